"""Copies between addresses, by several threads and without the interpreter's lock.

`ctypes.memmove` gives the lock back while it runs, and the C library's copy of large blocks passes the cache by, so a few threads
reach what the memory can do. A compiled extension would save only the microsecond that a call costs, and small tensors do not come
through here: torch and numpy copy those in bulk.
"""
from __future__ import annotations

import ctypes
import os
from typing import Any, List, Optional, Tuple

PIECE = 8 << 20
Block = Tuple[int, int, int]  # to, from, bytes

_pool: Optional[Any] = None
_pool_size = 0
_pool_pid = 0


def threads() -> int:
    """How many threads copy: the CPUs this process may use, shared with the ranks beside it; at most 8. DCPD_COPY_THREADS overrides."""
    env = os.environ.get("DCPD_COPY_THREADS", "")
    if env.isdigit() and int(env) > 0:
        return min(int(env), 64)
    try:
        beside = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        beside = 1
    return max(1, min(8, len(os.sched_getaffinity(0)) // beside))


def _get_pool(n: int) -> Any:
    global _pool, _pool_size, _pool_pid
    if _pool is None or _pool_pid != os.getpid() or _pool_size < n:
        from concurrent.futures import ThreadPoolExecutor

        _pool, _pool_size, _pool_pid = ThreadPoolExecutor(n, thread_name_prefix="dcpd-copy"), n, os.getpid()
    return _pool


def _run(blocks: List[Block]) -> None:
    for to, frm, n in blocks:
        ctypes.memmove(to, frm, n)


def copy(blocks: List[Block], workers: Optional[int] = None) -> None:
    """Copies all blocks. They must not overlap, and what they point to must stay alive meanwhile."""
    total = sum(b[2] for b in blocks)
    n = workers or threads()
    n = min(n, 1 + total // PIECE)
    if n <= 1:
        _run(blocks)
        return
    share, parts, part, left = -(-total // n), [], [], -(-total // n)
    for to, frm, size in blocks:
        while size:
            step = min(size, left, PIECE)
            part.append((to, frm, step))
            to, frm, size, left = to + step, frm + step, size - step, left - step
            if left == 0:
                parts.append(part)
                part, left = [], share
    if part:
        parts.append(part)
    running = []
    try:
        pool = _get_pool(n)
        running = [pool.submit(_run, p) for p in parts[1:]]
    except RuntimeError:  # the interpreter is ending, and starts no thread any more: the rest is copied here
        pass
    for p in [parts[0], *parts[1 + len(running):]]:
        _run(p)
    for r in running:
        r.result()
