"""python -m dcpd doctor: is everything there that a save needs, and if not, what to do."""
from __future__ import annotations

import os
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

from . import _local, errors, image
from . import __version__
from .client import Client, connect

Line = Tuple[str, str, str]  # "ok", "warn" or "fail"; what; what to do


def _python() -> Line:
    v = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 9):
        return "fail", f"Python {v}", "dcpd needs 3.9 or newer"
    return "ok", f"dcpd {__version__}, Python {v}", ""


def _libraries() -> Line:
    from importlib import metadata

    found = []
    for name in ("torch", "numpy", "ml_dtypes", "tqdm"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            pass
    return "ok", "libraries: " + (", ".join(found) or "none (only the client works)"), ""


def _shm() -> Line:
    try:
        s = os.statvfs(image.SHM)
    except OSError as e:
        return "fail", f"{image.SHM}: {e.strerror}", "mount a tmpfs there"
    free, total = s.f_bavail * s.f_frsize, s.f_blocks * s.f_frsize
    text = f"{image.SHM}: {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < total // 10:
        return "warn", text, "`dcpctl ls shm:` says what dcpd holds, `ls -l /dev/shm` what others do"
    if total < 1 << 30:
        return "warn", text, "that is little: a snapshot needs the state dict's bytes, twice. Docker: --shm-size=64g or --ipc=host"
    return "ok", text, ""


def _program() -> Line:
    try:
        return "ok", f"dcpd program, for private daemons: {_local.find_program()}", ""
    except errors.NoDaemon:
        return "warn", "no dcpd program here, so no private daemons: a running daemon must be found", \
               "build it (`make`), or install it; DCPD_BIN names it where it is not in PATH"


def _daemon(found: List[Client]) -> Line:
    try:
        c = connect()
    except errors.NoDaemon as e:
        return _no_daemon(str(e))
    except errors.Forbidden as e:
        if e.code == "unauthenticated":
            return "fail", f"{os.environ.get('DCPD_URL')} answers, but not us", str(e)
        text, _, todo = str(e).partition("; ")
        return "fail", text, f"{todo} (you are uid {os.geteuid()}); a directory path goes to a private daemon"
    except errors.DcpdError as e:
        return "fail", f"DCPD_URL={os.environ.get('DCPD_URL', '')}: {e}", "http://host:port, https://host:port or unix:///path/to/dcpd.sock"
    found.append(c)
    caps = c.capabilities()
    text = f"daemon {caps.get('version')} at {c.url}, {caps.get('workers')} workers, you are uid {caps.get('uid')}"
    if str(caps.get("version")) != __version__:
        return "warn", text, f"the package is {__version__}: install the one of the daemon's tree (`pip install ./api/python`)"
    return "ok", text, ""


def _no_daemon(text: str) -> Line:
    """What was looked for, without the advice that an exception gives: it ends with "ask the doctor"."""
    text = text.partition(". Start one")[0]
    start = "start one: `dcpd --storage main=/some/dir`"
    if os.environ.get("DCPD_URL"):
        return "fail", text, f"{start} there, or set DCPD_URL to where it is, or unset it"
    try:
        _local.find_program()
        return "warn", text, f"directory paths work all the same, by a private daemon; for STORAGE:NAME {start}"
    except errors.NoDaemon:
        return "fail", text, f"{start}, or set DCPD_URL to where it is"


def _writable(c: Client) -> Line:
    for w in c._t.request("GET", "/readyz").get("warnings", []):
        if "read-only" in w:
            return "fail", w, "make space there; the daemon goes on by itself"
    return "ok", "the daemon can write its journal", ""


def _same_shm(c: Client) -> Line:
    """A segment that the daemon makes must be there for us, and ours to write."""
    name = f"doctor-{os.getpid()}-{time.time_ns()}"
    try:
        c.state_dicts.create(name, 1, 1, lease_seconds=10)
        r = c.state_dicts.reserve(name, 0, 1 << 16, 1)
        s = image.Segment(r["segment"])
        s.map[:8] = b"dcpdtest"
        s.close()
        return "ok", "shared memory: the daemon's segments can be written here", ""
    except errors.NoSharedMemory:
        return "fail", "the daemon's shared memory is not this one: nothing can be saved or loaded from here, only looked at", \
               "run trainer and daemon on one host with one /dev/shm; containers: --ipc=host for both"
    except errors.DcpdError as e:
        return "fail", str(e), "--shm-limit and /dev/shm must hold the state dict twice; the daemon's group must let you in"
    finally:
        try:
            c.state_dicts.delete(name)
        except errors.DcpdError:
            pass


def _storages(c: Client) -> List[Line]:
    out: List[Line] = []
    for s in c.storages.list():
        name = "for directory paths" if s.get("adhoc") else s["name"]
        free = f", {s['free_bytes'] / 1e9:.1f} GB free" if "free_bytes" in s else ""
        text = f"storage {name}: {s.get('path', '')} {s.get('fs', '')}{free}"
        why = s.get("problem", {}).get("detail")
        state = f"{s.get('state')}: {why}" if why else s.get("state")
        good = state in ("ok", "unknown")
        if good:
            out.append(("ok", text, ""))
        elif s.get("adhoc"):  # of whoever saved there last; the next who names the directory gets a new one
            out.append(("warn", f"{text}, {state}", "if nobody saves there any more: it goes with its lease"))
        else:
            out.append(("fail", f"{text}, {state}", "is it mounted? `dcpctl status` says more"))
        if state == "ok" and s.get("fs") != "s3" and not s.get("direct_io", True):
            out.append(("warn", f"storage {s['name']} has no O_DIRECT", "saves go through the page cache: slower, and the memory counts"))
    return out or [("warn", "the daemon has no storage", "start it with --storage NAME=DIR, or pass directory paths")]


def _host(c: Client) -> List[Line]:
    """What the daemon's host lacks, by its own account; what it has is left to `dcpctl doctor`, and storages have lines of their own."""
    marks = {"warn": "warn", "bad": "fail"}
    return [(marks[f["state"]], f"daemon's host, {f['name']}: {f['words']}", f["command"])
            for f in c._t.request("GET", "/v1/doctor")["findings"]
            if f["state"] in marks and f["name"] not in ("journal", "sandbox") and not f["name"].startswith("storage ")]


def _sandbox(c: Client) -> Line:
    kind = c.capabilities().get("host", {}).get("sandbox")
    if kind == "none":
        return "warn", "the daemon's workers are not confined to the storages", \
               "`dcpctl status` says why, deploy/README.md what to do"
    return "ok", f"sandbox of the daemon's workers: {kind or 'not known before one has started'}", ""


def _copy_speed() -> Line:
    from . import _copy
    import ctypes

    n = 64 << 20
    a, b = ctypes.create_string_buffer(n), ctypes.create_string_buffer(n)
    pair = [(ctypes.addressof(b), ctypes.addressof(a), n)]
    _copy.copy(pair)
    t = time.perf_counter()
    _copy.copy(pair)
    return "ok", f"copy: {n / (time.perf_counter() - t) / 1e9:.1f} GB/s with {_copy.threads()} threads", ""


def _direct_reads() -> Line:
    from . import _digest, _direct

    slower = "loads go through shared memory, and take about twice as long"
    if not _direct.enabled():
        return "warn", f"DCPD_DIRECT=0: {slower}", "unset it, unless you compare"
    if _digest.new(_digest.XXH3) is None:
        return "warn", f"no libxxhash: {slower}", "apt install libxxhash0, or pip install xxhash"
    return "ok", "loads read the files themselves, where this process may open them", ""


def _direct_from(c: Client, storage: str) -> Line:
    """What a load of a tensor meets: a checkpoint that is there is tried."""
    from . import _direct, _where

    for record in c.checkpoints.list(storage):
        if record.get("format") != "dcp":
            continue
        place = _where.Place(c, storage, record["name"])
        t = next((t for t in c.checkpoints.tensors(place.object)[0] if t["shape"] and 0 not in t["shape"]), None)
        if t is None:
            continue
        shape = tuple(t["shape"])
        try:
            _direct.examine(place, [image.ChunkSpec(t["fqn"], t["dtype"], shape, (0,) * len(shape), shape)], True).close()
        except _direct.Elsewhere as e:
            return "warn", f"loads from {storage} do not read the files themselves: {e}", \
                   "they go through shared memory, and take about twice as long"
        return "ok", f"loads from {storage} read the files themselves", ""
    return "ok", f"loads from {storage}: not tried, it has no checkpoint yet", ""


def examine() -> List[Line]:
    """All findings. Never raises."""
    out: List[Line] = []
    found: List[Client] = []
    checks: List[Callable[[], Any]] = [_python, _libraries, _shm, _program, lambda: _daemon(found), _copy_speed, _direct_reads]
    for check in checks:
        out.append(_safe(check))
    for c in found:
        out.append(_safe(lambda: _writable(c)))
        if out[-1][0] == "ok":
            out.append(_safe(lambda: _same_shm(c)))
        try:
            out += _storages(c)
            out += [_safe(lambda name=s["name"]: _direct_from(c, name))  # type: ignore[misc]
                    for s in c.storages.list() if not s.get("adhoc")]
        except errors.DcpdError as e:
            out.append(("fail", str(e), ""))
        out.append(_safe(lambda: _sandbox(c)))
        try:
            out += _host(c)
        except errors.NotFound:
            pass  # a daemon of an older version
        except errors.DcpdError as e:
            out.append(("fail", str(e), ""))
    return out


def _safe(check: Callable[[], Any]) -> Line:
    try:
        line: Line = check()
        return line
    except Exception as e:
        return "fail", f"{type(e).__name__}: {e}", "please report this"


def main(argv: Any = None) -> int:
    """Prints the findings; 1 if something is in the way of a save."""
    marks: Dict[str, str] = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
    worst = 0
    for state, what, todo in examine():
        print(f"{marks[state]}  {what}")
        if todo:
            print(f"      → {todo}")
        worst = max(worst, {"ok": 0, "warn": 0, "fail": 1}[state])
    return worst
