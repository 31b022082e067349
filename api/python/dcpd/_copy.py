"""Copies between addresses, by several threads and without the interpreter's lock.

`ctypes.memmove` gives the lock back while it runs, and the C library's copy of large blocks passes the cache by, so a few threads
reach what the memory can do. For small blocks the call costs more than the copy: those go in a `Batch`, a thousand by one call
of the kernel (process_vm_writev, from this process to itself), which needs no compiled extension either.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
from array import array
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

ALONE = 8 << 20    # up to here one thread does it
PIECE = 256 << 20  # of one call: the C library passes the cache by only in long ones, but a signal waits for the end of it
SMALL = 16 << 10  # up to here a batch is the faster way
_AT_ONCE = 1024   # IOV_MAX
_WRITER_BEATS = 2  # threads: a page that is written takes 0.55 of the time of one that is cleared, mapped and copied to
Block = Tuple[int, int, int]  # to, from, bytes
Way = Callable[[List[Block]], None]

_pool: Optional[Any] = None
_pool_size = 0
_pool_pid = 0


def ranks_here() -> int:
    """How many ranks this host has, as torchrun and its like say; 1 if they do not."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def threads() -> int:
    """How many threads copy: the CPUs this process may use, shared with the ranks beside it; at most 8. DCPD_COPY_THREADS overrides."""
    env = os.environ.get("DCPD_COPY_THREADS", "")
    if env.isdigit() and int(env) > 0:
        return min(int(env), 64)
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks_here()))


def _get_pool(n: int) -> Any:
    global _pool, _pool_size, _pool_pid
    if _pool is None or _pool_pid != os.getpid() or _pool_size < n:
        from concurrent.futures import ThreadPoolExecutor

        _pool, _pool_size, _pool_pid = ThreadPoolExecutor(n, thread_name_prefix="dcpd-copy"), n, os.getpid()
    return _pool


def _run(blocks: List[Block]) -> None:
    for to, frm, n in blocks:
        ctypes.memmove(to, frm, n)


def _spread(n: int, f: Callable[[Any], Any], parts: Sequence[Any]) -> None:
    """Calls f for each part, by n threads. Returns when all have ended, also after a KeyboardInterrupt: what they write to will be
    somebody else's."""
    running: List[Any] = []
    try:
        try:
            for p in parts[1:] if n > 1 else ():
                running.append(_get_pool(n).submit(f, p))
        except RuntimeError:  # the interpreter is ending, and starts no thread any more: the rest is done here
            pass
        for p in [*parts[:1], *parts[1 + len(running):]]:
            f(p)
    finally:
        outlive(running)
    for r in running:
        r.result()


def outlive(running: Sequence[Any]) -> None:
    """Returns when all these futures have ended, whatever is raised meanwhile: they write to memory that will be somebody else's. What a
    signal's handler raises here, a second KeyboardInterrupt, is raised then."""
    late: Optional[BaseException] = None
    for r in running:
        while not r.done():
            try:
                r.exception()
            except BaseException as e:
                late = e
    if late is not None:
        raise late


def populate(address: int, size: int) -> None:
    """Maps the pages of fresh shared memory, by several threads: one by one, in the copy, it takes twice as long."""
    step, ends = 32 << 20, address + size
    parts = range(address, ends, step)
    n, madvise = threads(), _libc().madvise
    _spread(n, lambda a: madvise(a, min(step, ends - a), _MADV_POPULATE_WRITE), parts)


class Batch:
    """Small copies to places that stay, from places that change: made once for a structure, run for every step."""

    def __init__(self, to: Sequence[int], sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._to, self._from = _vectors(to, self._sizes), _vectors(to, self._sizes)
        self.bytes = sum(self._sizes)

    def run(self, frm: Sequence[int]) -> None:
        """Copies sizes[i] bytes from address frm[i] to to[i]."""
        if not frm:
            return
        self._from[0::2] = array("Q", frm)
        starts = range(0, len(self._sizes), _AT_ONCE)
        n = min(threads(), 1 + self.bytes // ALONE, len(starts))
        _spread(n, self._range, [starts[i::n] for i in range(n)])

    def _range(self, starts: Sequence[int]) -> None:
        frm, to, count, call, me = self._from, self._to, len(self._sizes), _writev(), os.getpid()
        a, b = frm.buffer_info()[0], to.buffer_info()[0]
        for i in starts:
            n = min(_AT_ONCE, count - i)
            if call is not None and call(me, a + 16 * i, n, b + 16 * i, n, 0) == sum(self._sizes[i:i + n]):
                continue
            for k in range(2 * i, 2 * (i + n), 2):  # a sandbox forbids it
                ctypes.memmove(to[k], frm[k], frm[k + 1])


def _vectors(places: Sequence[int], sizes: Sequence[int]) -> "array[int]":
    """An array of struct iovec."""
    v = array("Q", bytes(16 * len(sizes)))
    v[0::2], v[1::2] = array("Q", places), array("Q", sizes)
    return v


_call: List[Any] = []


def _writev() -> Any:
    """process_vm_writev; None where there is none."""
    if not _call:
        f = getattr(ctypes.CDLL(None), "process_vm_writev", None) if ctypes.sizeof(ctypes.c_void_p) == 8 else None
        if f is not None:
            word = ctypes.c_ulong
            f.argtypes, f.restype = (ctypes.c_int, ctypes.c_void_p, word, ctypes.c_void_p, word, word), ctypes.c_ssize_t
        _call.append(f)
    return _call[0]


class Into:
    """The segment that blocks are copied to. new: its pages have never been touched: writing to the file fills a page without
    clearing it first and without a fault for each, which takes half the time. unmapped: filled like that, and not yet mapped here."""

    def __init__(self, path: str, address: int, size: int) -> None:
        self.path, self.address, self.size = path, address, size
        self.new, self.unmapped = True, False

    def prepare(self, size: int) -> None:
        """Maps the first `size` bytes, unless the copy is to fill them: a file is written by one thread at a time, which more than
        _WRITER_BEATS threads that map pages overtake."""
        if threads() > _WRITER_BEATS:
            populate(self.address, size)
            self.new = False

    def write(self, fd: int, blocks: List[Block]) -> None:
        for to, frm, n in blocks:
            done = 0
            while done < n:
                k = _libc().pwrite(fd, frm + done, n - done, to - self.address + done)
                if k <= 0:
                    ctypes.memmove(to + done, frm + done, n - done)
                    break
                done += k

    def map(self, blocks: List[Block]) -> None:
        """Page tables for many pages by one call; an older kernel, without it, faults page by page."""
        for to, frm, n in blocks:
            begin = to & -4096
            _libc().madvise(begin, (to + n + 4095 & -4096) - begin, _MADV_POPULATE_READ)
            ctypes.memmove(to, frm, n)


_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # an older kernel has neither: pages come with the copy


def _libc() -> Any:
    if not _library:
        lib = ctypes.CDLL(None)
        word = ctypes.c_size_t
        lib.pwrite.argtypes, lib.pwrite.restype = (ctypes.c_int, ctypes.c_void_p, word, ctypes.c_int64), ctypes.c_ssize_t
        lib.madvise.argtypes, lib.madvise.restype = (ctypes.c_void_p, word, ctypes.c_int), ctypes.c_int
        _library.append(lib)
    return _library[0]


_library: List[Any] = []


@contextlib.contextmanager
def way(into: Optional[Into]) -> Iterator[Way]:
    """How blocks get into a segment now: the first time, and the second, in the ways that new pages want."""
    if into is None or not (into.new or into.unmapped):
        yield _run
        return
    if not into.new:
        yield into.map
        into.unmapped = False
        return
    into.new = False
    try:
        fd = os.open(into.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # its name is gone
        yield _run
        return
    try:
        yield lambda part: into.write(fd, part)
        into.unmapped = True
    finally:
        os.close(fd)


def copy_into(into: Into, blocks: List[Block]) -> None:
    """As copy, all of it to one segment."""
    with way(into) as run:
        copy(blocks, None, run)


def step() -> int:
    """Bytes after which is told how far a copy is: long enough for calls that pass the cache by, short enough for the disk not to wait."""
    return min(threads(), 4) * (16 << 20)


def copy_in_order(blocks: List[Block], ring: Any, run: Way = _run) -> None:
    """Copies blocks into a ring (see _ring.py), whose `to` counts from the image's start: in the order of where they go, all threads at the
    same ones; after each step is told up to where all is there."""
    part: List[Block] = []
    most = left = ring.step

    def flush() -> None:
        end = part[-1][0] + part[-1][2]
        ring.room(end)
        copy([(ring.at(to), frm, n) for to, frm, n in part], None, run)
        ring.told(end)

    for to, frm, size in sorted(blocks):
        while size:
            if part and to + min(size, left) - part[0][0] > most:  # filler between them counts, too
                flush()
                part, left = [], most
            n = min(size, left)
            part.append((to, frm, n))
            to, frm, size, left = to + n, frm + n, size - n, left - n
            if left == 0:
                flush()
                part, left = [], most
    if part:
        flush()


def store(address: int, number: int) -> None:
    """Eight bytes, little-endian, at once. Whoever sees them sees all that was copied before: between two foreign calls the
    interpreter's lock is given back and taken, which no processor moves a write across."""
    ctypes.memmove(address, number.to_bytes(8, "little"), 8)


def copy(blocks: List[Block], workers: Optional[int] = None, run: Way = _run) -> None:
    """Copies all blocks. They must not overlap, and what they point to must stay alive meanwhile. run: does it for some of them."""
    total = sum(b[2] for b in blocks)
    n = workers or threads()
    n = min(n, 1 + total // ALONE)
    if n <= 1:
        run(blocks)
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
    _spread(n, run, parts)
