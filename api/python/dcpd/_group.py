"""The ranks that act together: a torch.distributed process group, or just this process.

Every step that may fail ends in `agree`, so that a fault on one rank is raised on all of them, and nobody waits for one that has left.
"""
from __future__ import annotations

import ctypes
import functools
import os
import pickle
import socket
import sys
import weakref
from typing import Any, Dict, List, Optional, Tuple

from . import _star, errors

_TIMEOUT = 1800.0  # seconds; PyTorch's own
_stars: "weakref.WeakKeyDictionary[Any, Optional[_star.Star]]" = weakref.WeakKeyDictionary()  # of process groups; None: no rank meets
_TOGETHER = 4096  # bytes of a rank that go in one round; PyTorch's own way asks for the sizes first, in another


class Group:
    """rank, size; gather and broadcast of picklable objects. Every rank calls the same methods in the same order."""

    rank, size = 0, 1

    def gather(self, x: Any) -> List[Any]:
        """Everybody's x, by rank, on every rank."""
        return [x]

    def broadcast(self, x: Any) -> Any:
        """Rank 0's x, on every rank."""
        return x

    def agree(self, x: Any, e: Optional[BaseException]) -> List[Any]:
        """Everybody's x; or raises on every rank, if any rank came with an exception."""
        got = self.gather((x, _portable(e)))
        if e is not None:
            raise e
        for rank, (_, other) in enumerate(got):
            if other is not None:
                raise _elsewhere(rank, other)
        return [g[0] for g in got]

    @property
    def key(self) -> Any:
        return "alone"

    @property
    def first(self) -> bool:
        """Whether this is the first of all ranks, of whatever host."""
        return self.rank == 0

    def told(self, x: Any, e: Optional[BaseException]) -> Any:
        """Rank 0's x; its exception is raised on every rank."""
        got = self.broadcast(x if e is None else _portable(e))
        if e is not None:
            raise e
        if isinstance(got, BaseException):
            raise got
        return got

    def check(self, what: str, x: Any) -> None:
        """Raises RanksDisagree if ranks of other hosts say something else; those of one host are compared by their callers."""

    def meet(self, offer: Any, place: Any) -> Optional[Dict[str, Any]]:
        """How a save job finds those of other hosts: see _hosts.py."""
        return None


class Broken(errors.RankFailed):
    """The ranks cannot talk any more, as one of them has died, or is too late."""


class TorchGroup(Group):
    def __init__(self, pg: Any) -> None:
        import torch.distributed as dist

        self._dist, self._pg = dist, pg
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)
        self._first = 0 if pg is None else dist.get_global_rank(pg, 0)
        self.whole = dist.group.WORLD if pg is None else pg

    def meet_here(self) -> None:
        """For ranks of one host: what they gather goes over sockets of their own from now on. Every rank calls it."""
        if self.whole in _stars:  # also one that is over: which ranks know of that already nobody can tell, and so the group is broken
            return
        try:
            _stars[self.whole] = _star.meet(self.rank, self.size, self.gather, self._timeout())
        except BaseException:
            _stars[self.whole] = _star.Star([], False)
            raise

    def _timeout(self) -> float:
        for device in ("cpu", "cuda"):
            try:
                return float(self.whole._get_backend(sys.modules["torch"].device(device)).options._timeout.total_seconds())
            except (AttributeError, RuntimeError, ValueError):  # a release without; no such device
                pass
        return _TIMEOUT

    def gather(self, x: Any) -> List[Any]:
        star = _stars.get(self.whole)
        if star is not None:
            data = pickle.dumps(x, pickle.HIGHEST_PROTOCOL)
            try:
                return [pickle.loads(g) for g in star.gather(data)]
            except _star.Lost as e:
                raise self._broken(e) from e
        try:
            with self._as_ever():
                if self._on_cpu():
                    return self._at_once(x)
                out: List[Any] = [None] * self.size
                self._dist.all_gather_object(out, x, group=self._pg)
                return out
        except RuntimeError as e:
            raise self._broken(e) from e

    @staticmethod
    def _as_ever() -> Any:
        """Tensors that are made in inference mode are none for the process groups of 2.3."""
        return sys.modules["torch"].inference_mode(False)

    def _on_cpu(self) -> bool:
        """Whether gloo gathers tensors of the CPU for this group."""
        try:
            return "cpu:gloo" in str(self._dist.get_backend_config(self._pg))
        except (AttributeError, ValueError):  # a release without; a group that is none of PyTorch's
            return False

    def _at_once(self, x: Any) -> List[Any]:
        """What is short goes with its length; if anybody's is not, all see so, and it goes in a second round."""
        torch = sys.modules["torch"]
        data = pickle.dumps(x, pickle.HIGHEST_PROTOCOL)
        room = _TOGETHER - 8
        got = self._all(torch, len(data).to_bytes(8, "little") + data[:room], _TOGETHER, self._by_first)
        sizes = [int.from_bytes(g[:8], "little") for g in got]
        if max(sizes) <= room:
            return [pickle.loads(g[8:8 + n]) for g, n in zip(got, sizes)]
        got = self._all(torch, data, max(sizes), self._by_ring)
        return [pickle.loads(g[:n]) for g, n in zip(got, sizes)]

    def _all(self, torch: Any, data: bytes, size: int, way: Any) -> List[bytes]:
        """Everybody's bytes, filled up to size."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        out = torch.empty(self.size * size, dtype=torch.uint8, device="cpu")
        way(mine, out)
        return [ctypes.string_at(out.data_ptr() + i * size, size) for i in range(self.size)]

    def _by_ring(self, mine: Any, out: Any) -> None:
        """For much: each rank sends as much as it gets."""
        self._dist.all_gather(list(out.chunk(self.size)), mine, group=self._pg)

    def _by_first(self, mine: Any, out: Any) -> None:
        """For little: each step of a ring is a wait for a processor (4 ranks on 2 CPUs: 5.0 ms, by way of rank 0 1.5; 8 ranks: 14, 3.0).
        Of a rank that has died neither way tells all others: some wait until those who know have left, or for the group's timeout."""
        self._dist.gather(mine, list(out.chunk(self.size)) if self.rank == 0 else None, dst=self._first, group=self._pg)
        self._dist.broadcast(out, src=self._first, group=self._pg)

    def broadcast(self, x: Any) -> Any:
        if _stars.get(self.whole) is not None:
            return self.gather(x if self.rank == 0 else None)[0]
        box = [x]
        try:
            with self._as_ever():
                self._dist.broadcast_object_list(box, src=self._first, group=self._pg)
        except RuntimeError as e:
            raise self._broken(e) from e
        return box[0]

    @staticmethod
    def _broken(e: RuntimeError) -> Broken:
        return Broken(f"the process group is broken: has a rank died, or left with an error of its own? ({e})")

    @property
    def key(self) -> Any:
        return ("group", id(self._pg) if self._pg is not None else 0, self.size, self.rank)


def world_rank() -> int:
    """This process's rank among all, of whatever host."""
    dist = sys.modules.get("torch.distributed")
    return 0 if dist is None or not dist.is_available() or not dist.is_initialized() else int(dist.get_rank())


def world_size() -> int:
    """How many ranks there are, on whatever hosts."""
    dist = sys.modules.get("torch.distributed")
    return 1 if dist is None or not dist.is_available() or not dist.is_initialized() else int(dist.get_world_size())


def _portable(e: Optional[BaseException]) -> Any:
    if e is None or isinstance(e, errors.DcpdError):
        return e
    return errors.RankFailed(f"{type(e).__name__}: {e}")


def _elsewhere(rank: int, e: Any) -> BaseException:
    if not isinstance(e, errors.DcpdError):
        return errors.RankFailed(f"rank {rank}: {e}", rank=rank)
    if e.rank is None:
        e.rank = rank
    e.message = f"rank {rank}: {e.message}"
    e.args = (e.message,)
    return e


@functools.lru_cache(maxsize=1)
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f.read().strip()


def place() -> Tuple[str, str]:
    """(what two ranks share if one segment can serve both, this host's name). DCPD_PLACE stands in for the first, for tests."""
    host = socket.gethostname()
    if os.environ.get("DCPD_PLACE"):
        return os.environ["DCPD_PLACE"], f"{host} ({os.environ['DCPD_PLACE']})"
    try:
        return f"{_boot()}:{os.stat('/dev/shm').st_dev}", host
    except OSError:
        return host, host


def _after_fork() -> None:
    """A child that kept its parent's sockets would hide the parent's end from the other ranks."""
    for star in list(_stars.values()):
        if star is not None:
            star.close()
    _stars.clear()


os.register_at_fork(after_in_child=_after_fork)
