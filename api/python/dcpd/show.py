"""What people see: progress bars, trees, how a tensor is cut; as text and as HTML for notebooks, on light and dark pages."""
from __future__ import annotations

import contextlib
import html
import math
import os
import sys
import time
from concurrent import futures
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Sequence, Tuple

from . import errors

_COLOURS = ("#4269d0", "#c2571a", "#2f855a", "#b83280", "#6b46c1", "#0f766e", "#a16207", "#64748b")  # white text can be read on all


def size(n: float) -> str:
    """Bytes for people: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return ""


def count(n: Any, what: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def facts(record: Mapping[str, Any]) -> List[str]:
    """What a checkpoint's record says, in a few words each."""
    known = record.get("verified")
    return [str(record.get("format", "?")), size(record.get("bytes", 0)), count(record.get("tensors", "?"), "tensor"),
            count(record.get("values", "?"), "value"), f"world size {record.get('world_size', '?')}",
            *([f"{known['state']} ({known['level']}, {known['at']})"] if known else [])]


# ------------------------------------------------------------------------------------------------------------- progress


class _Bar:
    """tqdm if it is there, else a line that is written over on a terminal, or one line a while elsewhere."""

    def __init__(self, what: str) -> None:
        self.what, self.bar, self.last, self.open = what, None, time.monotonic(), False
        self.tty = sys.stderr.isatty()
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]

            self.bar = tqdm(desc=what, unit="B", unit_scale=True, leave=True, mininterval=0.1 if self.tty else 5.0)
        except ImportError:
            pass

    def __call__(self, job: Mapping[str, Any]) -> None:
        p = job.get("progress") or {}
        done, total = p.get("bytes_done", 0), p.get("bytes_total", 0)
        if self.bar is not None:
            self.bar.total = total or None
            self.bar.update(done - self.bar.n)
            return
        ended = job["state"] in errors.TERMINAL
        if not ended and not self.tty and time.monotonic() - self.last < 5:
            return
        self.last = time.monotonic()
        self._line(self.what + ": " + ", ".join(_state(job, p, done, total)), ended or not self.tty)

    def _line(self, text: str, end: bool) -> None:
        if self.tty:  # a line that is wrapped could not be written over
            try:
                width = os.get_terminal_size(sys.stderr.fileno()).columns
            except (OSError, ValueError):
                width = 0
            text = "\r\x1b[K" + (text if end or width < 20 else text[:width - 1])
        sys.stderr.write(text + ("\n" if end else ""))
        sys.stderr.flush()
        self.open = not end

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        elif self.open:
            sys.stderr.write("\n")


def _state(job: Mapping[str, Any], p: Mapping[str, Any], done: int, total: int) -> List[str]:
    if job["state"] in errors.TERMINAL:
        words = [] if not total else [size(done)] if done == total else [f"{size(done)} of {size(total)}"]
    elif total:
        words = [f"{100 * done // total} %", f"{size(done)} of {size(total)}"]
    else:
        words = []
    if p.get("rate"):
        words.append(f"{size(p['rate'])}/s")
    if p.get("eta_s") and job["state"] == "running":
        words.append(f"{p['eta_s']:.0f} s left")
    return words if job["state"] == "running" and words else [*words, str(job["state"])]


@contextlib.contextmanager
def following(what: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar on standard error for a job, which is told the job's record each time that it changes (jobs.wait's on_progress)."""
    bar = _Bar(what)
    try:
        yield bar
    finally:
        bar.close()


@contextlib.contextmanager
def reading(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for what this process reads itself: it is told how many bytes of `total` it has."""
    bar = _Bar(what)

    def at(done: int) -> None:
        bar({"state": "running", "progress": {"bytes_done": done, "bytes_total": total}})

    try:
        yield at
        bar({"state": "succeeded", "progress": {"bytes_done": total, "bytes_total": total}})
    finally:
        bar.close()


def follow(future: Any) -> None:
    """A bar for a SaveFuture, until it is done; its error is left to result()."""
    bar = _Bar(f"save {future.reference}")
    try:
        while not future.done():
            future.progress
            if not future._record.done:
                bar(future._record)
            futures.wait([future], 0.1)
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
        owners.append(c.get("rank"))
        o, s = _front(shape, c)
        if not all(s):
            continue
        for y in range(h):
            if o[0] <= (y * rows + rows // 2) // h < o[0] + s[0] or o[0] <= y * rows // h < o[0] + s[0]:
                for x in range(w):
                    if o[1] <= x * cols // w < o[1] + s[1]:
                        cells[y][x] = i
    return cells, owners


def _front(shape: Sequence[int], chunk: Mapping[str, Any]) -> Tuple[List[int], List[int]]:
    """Offsets and sizes in the picture's rows and columns; sizes [0, 0] for what lies behind others."""
    o, s = list(chunk["offsets"]), list(chunk["sizes"])
    if len(shape) > 2 and any(o[2:]):
        return [0, 0], [0, 0]
    if len(shape) == 1:
        o, s = [0, *o], [1, *s]
    return (o + [0, 0])[:2], (s + [1, 1])[:2]


def _mark(owner: Any, i: int) -> str:
    marks = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return marks[(owner if isinstance(owner, int) else i) % len(marks)]


def _box(c: Mapping[str, Any]) -> str:
    return ", ".join(f"{a}:{a + n}" for a, n in zip(c["offsets"], c["sizes"]))


def cut_text(fqn: str, shape: Sequence[int], chunks: Sequence[Mapping[str, Any]], width: int = 48, height: int = 12) -> str:
    """How a tensor is cut: each cell shows the rank that stored it ('.': nobody)."""
    cells, owners = _grid(shape, chunks, width, height)
    lines = [f"{fqn} {list(shape)}, {count(len(chunks), 'chunk')}" + (", first two dims" if len(shape) > 2 else "")]
    lines += ["  " + "".join("." if i < 0 else _mark(owners[i], i) for i in row) for row in cells]
    for i, c in enumerate(chunks[:16]):
        rank = f"rank {c['rank']}" if c.get("rank") is not None else f"chunk {i}"
        lines.append(f"  {_mark(owners[i], i)} {rank} [{_box(c)}]" + (f" in {c['file']}" if c.get("file") else ""))
    if len(chunks) > 16:
        lines.append(f"  … and {len(chunks) - 16} more")
    return "\n".join(lines)


# Notebooks have light and dark themes: text takes the page's colour, lines and grounds are grey with little opacity.
_STYLE = """<style>
.dcpd{font-size:13px;line-height:1.5}.dcpd summary{cursor:pointer}.dcpd .m{opacity:.65}.dcpd code{color:inherit;background:none;padding:0}
.dcpd table{border-collapse:collapse;margin:2px 0 6px 18px}.dcpd tr{background:none!important}
.dcpd th,.dcpd td{text-align:left!important;padding:1px 14px 1px 0;border-bottom:1px solid rgba(128,128,128,.25);vertical-align:middle}
.dcpd .w{white-space:nowrap}.dcpd th{font-weight:600;opacity:.65}.dcpd .n{text-align:right!important;white-space:nowrap}
.dcpd .b{display:inline-flex;width:120px;height:10px;border-radius:2px;overflow:hidden;background:rgba(128,128,128,.2)}
.dcpd .b span{height:100%;flex:none}.dcpd .k{display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 4px 0 0}
.dcpd .l{margin-right:12px}
.dcpd svg{display:block;background:rgba(128,128,128,.15);margin:4px 0}
.dcpd svg text{font:11px sans-serif;fill:#fff;text-anchor:middle;dominant-baseline:central;pointer-events:none}
</style>"""


def _page(*parts: str) -> str:
    return f'{_STYLE}<div class="dcpd">{"".join(parts)}</div>'


def _colour(rank: Any, i: int = 0) -> str:
    return _COLOURS[(rank if isinstance(rank, int) else i) % len(_COLOURS)]


def _legend(ranks: Iterable[Any]) -> str:
    known = sorted({r for r in ranks if isinstance(r, int)})
    keys = [f'<span class="l"><span class="k" style="background:{_colour(r)}"></span>rank {r}</span>' for r in known[:16]]
    return "<div>" + "".join(keys) + ("…" if len(known) > 16 else "") + "</div>" if keys else ""


def cut_html(fqn: str, dtype: str, shape: Sequence[int], chunks: Sequence[Mapping[str, Any]]) -> str:
    """The same as a picture; pointing at a part says which rank stored it, which indices it has, and in which file it is."""
    rows, cols = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1]) if shape else (1, 1)
    w, h = 360.0, max(24.0, min(240.0, 360.0 * rows / max(cols, 1)))
    out = []
    for i, c in enumerate(chunks[:4096]):
        o, s = _front(shape, c)
        if not all(s) or not rows or not cols:
            continue
        rank = c.get("rank")
        x, y, dx, dy = o[1] * w / cols, o[0] * h / rows, s[1] * w / cols, s[0] * h / rows
        who = f"rank {rank}" if rank is not None else f"chunk {i}"
        out.append(f'<g><title>{who} [{_box(c)}] {html.escape(str(c.get("file") or ""))}</title><rect x="{x:.1f}" y="{y:.1f}" '
                   f'width="{dx:.1f}" height="{dy:.1f}" fill="{_colour(rank, i)}" stroke="#fff" stroke-width=".7"></rect>'
                   + (f'<text x="{x + dx / 2:.1f}" y="{y + dy / 2:.1f}">{who if dx > 48 else _mark(rank, i)}</text>'
                      if dx > 10 and dy > 11 else "") + "</g>")
    note = " · the first two dims" if len(shape) > 2 else ""
    head = f"{dtype}{list(shape)} · {size(_bytes(dtype, shape))} · {count(len(chunks), 'chunk')}{note}"
    return _page(f"<code><b>{html.escape(fqn)}</b></code> <span class=m>{html.escape(head)}</span>",
                 f'<svg width="{w:.0f}" height="{h:.0f}">' + "".join(out) + "</svg>", _legend(c.get("rank") for c in chunks))


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    from . import _dtypes

    return _dtypes.itemsize(dtype) * math.prod(shape)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _value(v: Mapping[str, Any], limit: int) -> str:
    """A value on one line; one that was not read is named by its class."""
    known = v["value"] if "value" in v else v.get("object", v)
    text = repr(known) if known is not v else f"<{v.get('opaque', '?')}>"
    return text if len(text) <= limit else text[:limit - 1] + "…"


def tree_text(ck: Any) -> str:
    """All keys of a Checkpoint, one a line."""
    tensors, found = ck._all
    lines = [repr(ck)]
    width = min(60, max([len(k) for k in (*tensors, *found)] or [0]))
    kinds = {k: f"{t.dtype}{list(t.shape)}" for k, t in tensors.items()}
    wide = min(40, max([len(k) for k in kinds.values()] or [0]))
    for fqn, t in tensors.items():
        lines.append(f"  {fqn:<{width}}  {kinds[fqn]:<{wide}}  {size(t.nbytes):>7}"
                     + (f"  {len(t.chunks)} chunks" if len(t.chunks) > 1 else ""))
    for fqn, v in found.items():
        lines.append(f"  {fqn:<{width}}  {_value(v, 60)}")
    return "\n".join(lines)


def checkpoint_html(ck: Any, limit: int = 200) -> str:
    """Its keys in folds by their first part, with a bar that shows how many bytes of each tensor which rank stored."""
    tensors, found = ck._all
    groups: Dict[str, List[str]] = {}
    for k in (*tensors, *found):
        groups.setdefault(k.partition(".")[0] if "." in k else "", []).append(k)
    folds = []
    for name, keys in sorted(groups.items(), key=lambda g: g[0] == ""):
        rows = "".join(_row(k, tensors, found) for k in keys[:limit])
        more = f'<tr><td class=m colspan=4>… and {len(keys) - limit} more</td></tr>' if len(keys) > limit else ""
        inside = [k for k in keys if k in tensors]
        table = f"<table><tr><th>key<th>{'type<th class=n>bytes<th>cut' if inside else 'value'}</tr>{rows}{more}</table>"
        about = [f"{count(len(inside), 'tensor')}, {size(sum(tensors[k].nbytes for k in inside))}"] if inside else []
        about += [count(len(keys) - len(inside), "value")] if len(keys) > len(inside) else []
        folds.append(table if not name else f"<details{' open' if len(keys) <= 40 else ''}><summary><code>{html.escape(name)}</code> "
                     f"<span class=m>{' · '.join(about)}</span></summary>{table}</details>")
    ranks = {c.get("rank") for t in tensors.values() for c in t.chunks}
    return _page(f"<b>{html.escape(ck.reference)}</b> <span class=m>{html.escape(' · '.join(facts(ck.record)))}</span>",
                 _legend(ranks) if len(ranks) > 1 else "", *folds)


def _row(k: str, tensors: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    head = f"<tr><td><code>{html.escape(k)}</code></td>"
    if k in tensors:
        t = tensors[k]
        return f"{head}<td class=w>{html.escape(t.dtype)}{list(t.shape)}</td><td class=n>{size(t.nbytes)}</td><td>{_share(t)}</td></tr>"
    return f"{head}<td colspan=3>{html.escape(_value(found[k], 120))}</td></tr>"


def _share(t: Any) -> str:
    """A bar: how many bytes of a tensor each rank stored."""
    per: Dict[Any, int] = {}
    for c in t.chunks:
        per[c.get("rank")] = per.get(c.get("rank"), 0) + math.prod(c["sizes"])
    total = sum(per.values()) or 1
    parts = "".join(f'<span title="rank {r}: {100 * n // total} %" style="width:{100 * n / total:.1f}%;background:{_colour(r)}"></span>'
                    for r, n in sorted(per.items(), key=lambda x: str(x[0]).zfill(8)) if n)
    return f'<span class="b">{parts}</span>'


def client_html(client: Any) -> str:
    """The daemon and its storages."""
    caps = client.capabilities()
    storages = "".join(f"<tr><td><code>{html.escape(str(s['name']))}</code></td><td>{html.escape(str(s.get('path', '')))}</td>"
                       f"<td>{html.escape(str(s.get('state')))}</td><td class=n>{size(s.get('free_bytes', 0))}</td></tr>"
                       for s in client.storages.list() if not s.get("adhoc"))
    return _page(f"<b>dcpd {html.escape(str(caps.get('version')))}</b> <span class=m>at {html.escape(client.url)}</span>"
                 f"<table><tr><th>storage<th>path<th>state<th class=n>free</tr>{storages}</table>")
