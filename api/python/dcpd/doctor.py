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
    if total < 1 << 30:
        return "warn", text, "that is little: a snapshot needs the state dict's bytes, twice. Docker: --shm-size=64g or --ipc=host"
    return "ok", text, ""


def _program() -> Line:
    try:
        return "ok", f"dcpd program: {_local.find_program()}", ""
    except errors.NoDaemon as e:
        return "warn", "no dcpd program on this host", f"only a daemon that runs already can be used ({e})"


def _daemon(found: List[Client]) -> Line:
    try:
        c = connect()
    except errors.NoDaemon as e:
        return "fail", str(e), "start one, or pass a directory path: a private daemon then serves it"
    except errors.DcpdError as e:
        return "fail", str(e), "see above"
    found.append(c)
    caps = c.capabilities()
    text = f"daemon {caps.get('version')} at {c.url}, {caps.get('workers')} workers, you are uid {caps.get('uid')}"
    if str(caps.get("version")) != __version__:
        return "warn", text, f"the package is {__version__}: they should be of one version"
    return "ok", text, ""


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
    except errors.NotFound:
        return "fail", "the daemon's shared memory is not this one", "daemon and trainer must share /dev/shm: --ipc=host, one host"
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
        text = f"storage {s['name']}: {s.get('path', '')} {s.get('fs', '')}, {s.get('free_bytes', 0) / 1e9:.1f} GB free"
        state = s.get("state")
        good = state in ("ok", "unknown")
        out.append(("ok", text, "") if good else ("fail", f"{text}, {state}", "is it mounted? `dcpctl status` says more"))
        if state == "ok" and not s.get("direct_io", True):
            out.append(("warn", f"storage {s['name']} has no O_DIRECT", "saves go through the page cache: slower, and the memory counts"))
    return out or [("warn", "the daemon has no storage", "start it with --storage NAME=DIR, or pass directory paths")]


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


def examine() -> List[Line]:
    """All findings. Never raises."""
    out: List[Line] = []
    found: List[Client] = []
    checks: List[Callable[[], Any]] = [_python, _libraries, _shm, _program, lambda: _daemon(found), _copy_speed]
    for check in checks:
        out.append(_safe(check))
    for c in found:
        out.append(_safe(lambda: _same_shm(c)))
        try:
            out += _storages(c)
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
