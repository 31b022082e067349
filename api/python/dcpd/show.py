"""What people see: progress bars, trees, how a tensor is cut; as text and as HTML for notebooks."""
from __future__ import annotations

import html
import math
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .client import TERMINAL, Client, Job

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")


def size(n: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return ""


# ------------------------------------------------------------------------------------------------------------- progress


class _Bar:
    """tqdm if it is there, else a line that is written over on a terminal, or one line a while elsewhere."""

    def __init__(self, what: str) -> None:
        self.what, self.bar, self.last = what, None, 0.0
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

            self.bar = tqdm(desc=what, unit="B", unit_scale=True, leave=True)
        except ImportError:
            pass

    def __call__(self, job: Mapping[str, Any]) -> None:
        p = job.get("progress") or {}
        done, total = p.get("bytes_done", 0), p.get("bytes_total", 0)
        if self.bar is not None:
            self.bar.total = total or None
            self.bar.update(done - self.bar.n)
            return
        ended = job["state"] in TERMINAL
        tty = sys.stderr.isatty()
        if not ended and not tty and time.monotonic() - self.last < 5:
            return
        self.last = time.monotonic()
        rate = f", {size(p['rate'])}/s" if p.get("rate") else ""
        text = f"{self.what}: {size(done)} of {size(total)}{rate}, {job['state']}"
        sys.stderr.write(("\r\x1b[K" if tty else "") + text + ("\n" if ended or not tty else ""))
        sys.stderr.flush()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def follow_job(client: Client, job: Job, timeout: Optional[float] = None) -> Job:
    """Waits for a job with a bar on standard error."""
    ident = job if isinstance(job, str) else job.id
    kind = "job" if isinstance(job, str) else job["kind"]
    bar = _Bar(f"{kind} {ident[-6:]}")
    try:
        return client.jobs.wait(ident, timeout, on_progress=bar)
    finally:
        bar.close()


def follow(future: Any) -> None:
    """A bar for a SaveFuture, until it is done; its error is left to result()."""
    bar = _Bar(f"save {future.reference}")
    try:
        while not future.done():
            future.progress
            bar(future._record)
            time.sleep(0.1)
        bar(future._record)
    finally:
        bar.close()


# ------------------------------------------------------------------------------------------------------ how it is cut


def _grid(shape: Sequence[int], chunks: Sequence[Mapping[str, Any]], width: int, height: int) -> Tuple[List[List[int]], List[Any]]:
    """Which chunk covers each cell of a picture of the first two dims; those beyond the second are looked at from the front."""
    rows = shape[0] if shape else 1
    cols = shape[1] if len(shape) > 1 else 1
    if len(shape) == 1:
        rows, cols = 1, shape[0]
    h, w = max(1, min(rows, height)), max(1, min(cols, width))
    cells = [[-1] * w for _ in range(h)]
    owners: List[Any] = []
    for i, c in enumerate(chunks):
        o, s = list(c["offsets"]), list(c["sizes"])
        owners.append(c.get("rank"))
        if len(shape) == 1:
            o, s = [0, *o], [1, *s]
        o, s = (o + [0, 0])[:2], (s + [1, 1])[:2]
        if not all(s) or (len(c["offsets"]) > 2 and any(c["offsets"][2:])):
            continue
        for y in range(h):
            if o[0] <= (y * rows + rows // 2) // h < o[0] + s[0] or o[0] <= y * rows // h < o[0] + s[0]:
                for x in range(w):
                    if o[1] <= x * cols // w < o[1] + s[1]:
                        cells[y][x] = i
    return cells, owners


def _mark(owner: Any, i: int) -> str:
    marks = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return marks[(owner if isinstance(owner, int) else i) % len(marks)]


def cut_text(fqn: str, shape: Sequence[int], chunks: Sequence[Mapping[str, Any]], width: int = 48, height: int = 12) -> str:
    """How a tensor is cut: each cell shows the rank that stored it ('.': nobody)."""
    cells, owners = _grid(shape, chunks, width, height)
    lines = [f"{fqn} {list(shape)}, {len(chunks)} chunk{'s' if len(chunks) != 1 else ''}"]
    lines += ["  " + "".join("." if i < 0 else _mark(owners[i], i) for i in row) for row in cells]
    for i, c in enumerate(chunks[:16]):
        rank = f"rank {c['rank']}" if c.get("rank") is not None else f"chunk {i}"
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(c["offsets"], c["sizes"]))
        lines.append(f"  {_mark(owners[i], i)} {rank} [{box}]" + (f" in {c['file']}" if c.get("file") else ""))
    if len(chunks) > 16:
        lines.append(f"  … and {len(chunks) - 16} more")
    return "\n".join(lines)


def cut_html(fqn: str, dtype: str, shape: Sequence[int], chunks: Sequence[Mapping[str, Any]]) -> str:
    """The same as an SVG."""
    rows, cols = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1]) if shape else (1, 1)
    w, h = 360.0, max(24.0, min(240.0, 360.0 * rows / max(cols, 1)))
    out = [f"<div><code>{html.escape(fqn)}</code> {html.escape(dtype)}{list(shape)}<br>"
           f'<svg width="{w:.0f}" height="{h:.0f}" style="background:#eee">']
    for i, c in enumerate(chunks[:4096]):
        o, s = list(c["offsets"]), list(c["sizes"])
        if len(shape) == 1:
            o, s = [0, *o], [1, *s]
        o, s = (o + [0, 0])[:2], (s + [1, 1])[:2]
        if not all(s) or not rows or not cols:
            continue
        rank = c.get("rank")
        colour = _COLOURS[(rank if isinstance(rank, int) else i) % len(_COLOURS)]
        box = ", ".join(f"{a}:{a + n}" for a, n in zip(c["offsets"], c["sizes"]))
        out.append(f'<rect x="{o[1] * w / cols:.1f}" y="{o[0] * h / rows:.1f}" width="{s[1] * w / cols:.1f}" '
                   f'height="{s[0] * h / rows:.1f}" fill="{colour}" stroke="#fff"><title>rank {rank} [{box}] '
                   f'{html.escape(str(c.get("file", "")))}</title></rect>')
    return "".join(out) + "</svg></div>"


# ---------------------------------------------------------------------------------------------------------- checkpoints


def tree_text(ck: Any) -> str:
    """All keys of a Checkpoint, one a line."""
    from ._open import dumps

    tensors, found = ck._all
    lines = [repr(ck)]
    width = min(60, max([len(k) for k in (*tensors, *found)] or [0]))
    for fqn, t in tensors.items():
        lines.append(f"  {fqn:<{width}}  {t.dtype}{list(t.shape)}  {size(t.nbytes)}"
                     + (f"  {len(t.chunks)} chunks" if len(t.chunks) > 1 else ""))
    for fqn, v in found.items():
        text = dumps(v["value"]) if "value" in v else f"<{v.get('opaque', '?')}>"
        lines.append(f"  {fqn:<{width}}  {text if len(text) <= 60 else text[:57] + '...'}")
    return "\n".join(lines)


def checkpoint_html(ck: Any, limit: int = 200) -> str:
    from ._open import dumps

    tensors, found = ck._all
    r = ck.record
    head = " · ".join(html.escape(str(x)) for x in (r.get("format"), size(r.get("bytes", 0)), f"{len(tensors)} tensors",
                                                   f"{len(found)} values", f"world size {r.get('world_size')}"))
    rows = [f"<tr><td><code>{html.escape(k)}</code></td><td>{html.escape(t.dtype)}{list(t.shape)}</td><td>{size(t.nbytes)}</td>"
            f"<td>{_share(t)}</td></tr>" for k, t in list(tensors.items())[:limit]]
    rows += [f"<tr><td><code>{html.escape(k)}</code></td><td colspan=3>"
             f"{html.escape((dumps(v['value']) if 'value' in v else '<' + str(v.get('opaque', '?')) + '>')[:120])}</td></tr>"
             for k, v in list(found.items())[:limit]]
    more = len(tensors) + len(found) - len(rows)
    return (f"<details open><summary><b>{html.escape(ck.reference)}</b> {head}</summary><table><tr><th>key<th>type<th>bytes<th>cut</tr>"
            + "".join(rows) + "</table>" + (f"… and {more} more" if more > 0 else "") + "</details>")


def _share(t: Any) -> str:
    """A bar: how many bytes of a tensor each rank stored."""
    per: Dict[Any, int] = {}
    for c in t.chunks:
        per[c.get("rank")] = per.get(c.get("rank"), 0) + math.prod(c["sizes"])
    total = sum(per.values()) or 1
    return "".join(f'<span title="rank {r}: {100 * n // total} %" style="display:inline-block;height:10px;width:{120 * n / total:.0f}px;'
                   f'background:{_COLOURS[(r or 0) % len(_COLOURS)]}"></span>' for r, n in sorted(per.items(), key=lambda x: str(x[0])))


def client_html(client: Client) -> str:
    caps = client.capabilities()
    storages = "".join(f"<tr><td>{html.escape(str(s['name']))}</td><td>{html.escape(str(s.get('path', '')))}</td>"
                       f"<td>{html.escape(str(s.get('state')))}</td><td>{size(s.get('free_bytes', 0))} free</td></tr>"
                       for s in client.storages.list())
    return f"<b>dcpd {html.escape(str(caps.get('version')))}</b> at <code>{html.escape(client.url)}</code><table>{storages}</table>"
