"""What the ranks of one host tell each other, over Unix sockets to rank 0.

A process group's own gather takes 0.6 ms of CPU time of each rank, and several turns on processors that others keep busy; that of a GPU's
group waits for the kernels before it. A save has two. A rank that dies ends the wait of all, as its socket does.

The sockets are a process group's own: it tells who listens where, and which word lets in.
"""
from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Optional

MEET_SECONDS = 5.0
LONGEST = 2e6  # seconds that poll() can wait
_WORD = 16


class Lost(RuntimeError):
    """A rank has died, or is too late. Nothing is told over these sockets any more."""


class Star:
    """links: rank 0's to ranks 1, 2, …; another rank's to rank 0."""

    def __init__(self, links: List[socket.socket], first: bool) -> None:
        self._links, self._first, self._guard, self._inside = links, first, threading.RLock(), False

    def gather(self, mine: bytes) -> List[bytes]:
        """Everybody's bytes, by rank, on every rank. Raises Lost, on all ranks or on none, but for those that have their answer."""
        with self._guard:
            if not self._links or self._inside:
                raise Lost("a signal's handler saves or loads in the middle of a round" if self._inside else "a rank has left before")
            self._inside = True
            try:
                if not self._first:
                    self._links[0].sendall(_framed(mine))
                    return _parts(_take(self._links[0]))
                got = [mine, *_take_all(self._links)]
                answer = _framed(b"".join(map(_framed, got)))
                for s in self._links:
                    s.sendall(answer)
                return got
            except BaseException as e:  # a signal's too: half a word may be on its way
                self.close()
                if isinstance(e, OSError):
                    raise Lost(f"no word of a rank: {e}") from e
                raise
            finally:
                self._inside = False

    def close(self) -> None:
        """In a forked child it ends this process's part alone."""
        for s in self._links:
            s.close()
        self._links = []

    __del__ = close


def meet(rank: int, size: int, tell: Callable[[Any], List[Any]], timeout: float) -> Optional[Star]:
    """Every rank of a group calls it; None on all if they do not meet. tell: the group's own gather. timeout: seconds for all words."""
    door: Optional[socket.socket] = None
    links: List[socket.socket] = []
    try:
        offer = None
        if rank == 0:
            try:
                door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                door.bind(b"\0dcpd-" + secrets.token_hex(16).encode())
                door.listen(size + 64)  # and strangers
                offer = door.getsockname(), secrets.token_bytes(_WORD)
            except OSError:
                pass
        seen = tell((offer, _network()))
        told = seen[0][0]
        if told is None or any(network != seen[0][1] for _, network in seen):
            return None
        try:
            links = _let_in(door, size, told[1]) if door is not None else [_enter(told[0], told[1], rank)]
        except OSError:
            pass
        everybody = all(tell(bool(links)))
    except BaseException:
        _drop(links)
        raise
    finally:
        if door is not None:
            door.close()
    if not everybody:
        _drop(links)
        return None
    for s in links:
        s.settimeout(min(max(timeout, 0.001), LONGEST))
    return Star(links, rank == 0)


def _network() -> Optional[int]:
    """Sockets without a file are found in one network namespace."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None


def _enter(name: bytes, word: bytes, rank: int) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        s.settimeout(MEET_SECONDS)
        s.connect(name)
        s.sendall(word + struct.pack("<I", rank))
        return s
    except BaseException:
        s.close()
        raise


def _let_in(door: socket.socket, size: int, word: bytes) -> List[socket.socket]:
    """Any process of the host may knock."""
    links: Dict[int, socket.socket] = {}
    end = time.monotonic() + MEET_SECONDS
    try:
        while len(links) < size - 1:
            door.settimeout(max(0.001, end - time.monotonic()))
            s, _ = door.accept()
            s.settimeout(max(0.001, min(1.0, end - time.monotonic())))
            rank = _known(s, word)
            if rank in links or not 0 < rank < size:
                s.close()
            else:
                links[rank] = s
        return [links[r] for r in range(1, size)]
    except BaseException:
        _drop(list(links.values()))
        raise


def _known(s: socket.socket, word: bytes) -> int:
    """The rank of who has come; 0: a stranger."""
    try:
        if struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.geteuid():
            return 0
        said = _exactly(s, _WORD + 4)
    except OSError:
        return 0
    return int(struct.unpack("<I", said[_WORD:])[0]) if hmac.compare_digest(said[:_WORD], word) else 0


def _drop(links: List[socket.socket]) -> None:
    for s in links:
        s.close()


def _framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _take(s: socket.socket) -> bytes:
    return _exactly(s, struct.unpack("<Q", _exactly(s, 8))[0])


def _take_all(links: List[socket.socket]) -> List[bytes]:
    """In whatever order they come: one who leaves, before or after its word, is noticed while another is late."""
    got: Dict[int, bytes] = {}
    waiting = {s.fileno(): i for i, s in enumerate(links)}
    poll, timeout = select.poll(), links[0].gettimeout() or LONGEST
    end = time.monotonic() + timeout
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting:
        ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
        if not ready:
            raise socket.timeout(f"one is not there after {timeout:g} s")
        for fd, _ in ready:
            if fd not in waiting:
                raise ConnectionResetError("it has left")
            i = waiting.pop(fd)
            got[i] = _take(links[i])
            poll.modify(fd, 0)
    return [got[i] for i in range(len(links))]


def _exactly(s: socket.socket, n: int) -> bytes:
    data, at = bytearray(n), 0
    while at < n:
        k = s.recv_into(memoryview(data)[at:])
        if k == 0:
            raise ConnectionResetError("it has left")
        at += k
    return bytes(data)


def _parts(data: bytes) -> List[bytes]:
    out, at = [], 0
    while at < len(data):
        n = struct.unpack_from("<Q", data, at)[0]
        out.append(data[at + 8:at + 8 + n])
        at += 8 + n
    return out
