"""The ring that a save goes through when its caller waits until all is durable: shared memory of a few megabytes, used again and again, in
place of a segment as large as the state dict.

The segment's image is as ever (see image.py), but only its header stays: byte x of the image lies at x modulo the ring's bytes. This side
says how far it has come, dcpd's workers say below which byte nothing is read any more (api/image.md). A ring is mapped twice, one copy
behind the other, so that what crosses its end lies in a row.

A ring outlives nobody: if its daemon, its workers or another rank are gone, `Lost` is raised, and the save can begin anew from the
tensors, which its caller still holds.
"""
from __future__ import annotations

import ctypes
import os
import time
from typing import Any, Callable, Optional, Sequence, Tuple

from . import _copy, errors, image

BYTES = 128 << 20         # of all ranks of a host, but for SHORT a rank
MOST = 64 << 20           # of a rank: new pages are what a first save pays for
LEAST = 1 << 20           # dcpd's
SHORT = 16 << 20          # of a rank: four blocks of a file; less would starve the disk
FREE_TIMES = 8            # where less than so many times BYTES of shared memory is free, rings have half of it
_RELEASED_AT = 64         # of the page behind the ring
_ASK_AFTER, _ASK_EVERY = 0.3, 0.5  # seconds without room: is anybody there?
_REST_MIN, _REST_MAX = 0.0001, 0.002


class Lost(errors.DcpdError):
    """Nobody reads this ring any more. `again`: the save may begin anew."""


class _Twice:
    """An address range that shows `size` bytes of a file at `offset` twice."""

    def __init__(self, path: str, offset: int, size: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        word = ctypes.c_size_t
        libc.mmap.argtypes = (ctypes.c_void_p, word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
        libc.mmap.restype = ctypes.c_void_p
        libc.munmap.argtypes = (ctypes.c_void_p, word)
        self._unmap, self.size, self.address = libc.munmap, size, 0
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.address = self._map(libc, None, 2 * size, 0, _PRIVATE, -1, 0)
            for at in (self.address, self.address + size):
                self._map(libc, at, size, _READ_WRITE, _SHARED, fd, offset)
        finally:
            os.close(fd)

    @staticmethod
    def _map(libc: Any, at: Optional[int], size: int, access: int, flags: int, fd: int, offset: int) -> int:
        got = libc.mmap(at, size, access, flags, fd, offset)
        if got is None or got == ctypes.c_void_p(-1).value:
            e = ctypes.get_errno()
            raise OSError(e, os.strerror(e))
        return int(got)

    def __del__(self) -> None:
        if self.address:
            self._unmap(self.address, 2 * self.size)


_READ_WRITE, _SHARED, _PRIVATE = 3, 0x11, 0x22  # PROT_READ | PROT_WRITE; MAP_SHARED | MAP_FIXED; MAP_PRIVATE | MAP_ANONYMOUS


class Ring:
    """`size` bytes at `offset` of a mapped segment. buffer: both copies, which live as long as a view of them."""

    def __init__(self, segment: image.Segment, offset: int, size: int) -> None:
        self.segment, self.offset, self.size = segment, offset, size
        twice = _Twice(image.SHM + segment.name, offset, size)
        self.address = twice.address
        self.buffer = type("Memory", (ctypes.c_char * (2 * size),), {}).from_address(twice.address)
        self.buffer.twice = twice
        self._numbers = image.address(segment.map) + offset + size
        self._touched = 0
        self._released = 0
        self._ask: Callable[[], None] = lambda: None
        self.give: Optional[Callable[[Sequence[Tuple[int, Any]]], bool]] = None  # has tensors of a GPU copied (_handover.Giver)

    @property
    def step(self) -> int:
        """Bytes after which is told how far a copy is."""
        return min(_copy.step(), self.size // 4)

    def begin(self, have: int, ask: Callable[[], None]) -> None:
        """Of a new image `have` bytes, its header, are there. ask: raises why nobody will ever read it."""
        self._ask, self._released, self.give = ask, 0, None
        _copy.store(self._numbers + _RELEASED_AT, 0)
        _copy.store(self._numbers, have)

    def at(self, x: int) -> int:
        """The address of the image's byte x; `step` bytes from there on are in a row."""
        return self.address + x % self.size

    def told(self, end: int) -> None:
        """All below `end` is there; filler behind the last tensor need not have been written."""
        self.room(end)
        _copy.store(self._numbers, end)

    def room(self, end: int) -> None:
        """Waits until bytes up to `end` may be written. Raises what `ask` raises."""
        if end - self._released > self.size:
            self._wait(end)
        if self._touched < min(end, self.size):  # pages of the first round: by one call, not by a fault each
            to = min(end, self.size)
            _copy.populate(self.address + self._touched, to - self._touched)
            self._touched = to

    def _wait(self, end: int) -> None:
        rest, ask_at = _REST_MIN, time.monotonic() + _ASK_AFTER
        while True:
            self._released = max(self._released, int.from_bytes(ctypes.string_at(self._numbers + _RELEASED_AT, 8), "little"))
            if end - self._released <= self.size:
                return
            time.sleep(rest)
            rest = min(rest * 1.5, _REST_MAX)
            if time.monotonic() > ask_at:
                self._ask()
                ask_at = time.monotonic() + _ASK_EVERY


def size_for(nbytes: int) -> int:
    """The ring of an image of so many bytes."""
    share = min(MOST, max(_of_host() // _copy.ranks_here() // image.PAGE * image.PAGE, min(BYTES, SHORT)))
    return max(LEAST, min(share, nbytes + -nbytes % image.PAGE))


def _of_host() -> int:
    """Bytes for the rings of all ranks of this host. A rank that comes last must find room, too."""
    return BYTES if _free() >= FREE_TIMES * BYTES else BYTES // 2


def _free() -> int:
    s = os.statvfs(image.SHM)
    return s.f_bavail * s.f_frsize


def smaller(size: int) -> int:
    """The ring to ask for where shared memory had no room for one of `size`: Docker's default is 64 MiB. Raises what is being handled where
    that would starve the disk."""
    if size // 2 < SHORT:
        raise
    return size // 2 // image.PAGE * image.PAGE


def place(header: int) -> int:
    """Where it begins: behind the header, with room for one whose values grow from save to save."""
    return -(-(header + header // 4) // _HEADER_STEP) * _HEADER_STEP


_HEADER_STEP = 64 << 10


def lost(e: errors.DcpdError) -> bool:
    """Whether a daemon says so, of the ring or of the save that read it: a rank has given it up."""
    return e.code in ("ring_lost", "not_sealed", "not_found", "state_conflict")
