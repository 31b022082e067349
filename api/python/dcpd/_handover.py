"""Tensors on a GPU that a daemon copies in place of this process (api/device-memory.md), as saves, loads and the drop-in use it.

A worker's copy goes by DMA to page-locked memory on a stream of its own; one made here would need page-locked memory of this process's.
Whatever is refused, by the driver here or by the daemon, is said once, and torch copies then: `take` tells which chunks are left.
"""
from __future__ import annotations

import logging
import os
import time
from typing import Any, Callable, Collection, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

from . import _device, _dtypes, _ring, _session, _tensors, errors
from .client import Client
from .image import Layout

log = logging.getLogger("dcpd")
LEAST = 4 << 20       # bytes below which the round trip costs more than a copy
_ROW = 32             # bytes of the table of pieces
_MAPPING = 2 << 20    # the smallest allocation that an expandable segment is made of: a piece may cross into the next
OUTLAST = 20.0        # seconds that the end of a copy whose answer was lost is waited for
_LASTING = ("", "backend_unavailable", "forbidden", "not_found", "unknown_field")  # codes of refusals that the next save would meet again
Wait = Callable[[Any], None]
_off: Dict[str, str] = {}        # by daemon: why nothing is handed over any more
_said: Set[Tuple[str, str]] = set()
_kept: List[List[Any]] = []      # tensors that a worker may still write to: never freed


def casts(client: Client) -> bool:
    """Whether this daemon's GPU casts for us, as far as it has not refused."""
    return client.casts and bool(client._t.endpoint.unix) and client.url not in _off and os.environ.get("DCPD_HAND_OVER") != "0"


def worth(client: Client, sizes: Sequence[int]) -> int:
    """Bytes that a slot needs behind its image to have tensors of these sizes copied by the daemon: for the table of pieces. 0: they are
    few, or it has refused before."""
    total = sum(sizes)
    if total < LEAST or not client._t.endpoint.unix or client.url in _off or os.environ.get("DCPD_HAND_OVER") == "0":
        return 0
    return 8 + _ROW * (2 * len(sizes) + 2 + total // _MAPPING)


def plan(client: Client, d: _tensors.Described, layout: Layout) -> Optional["Hand"]:
    """The chunks that a daemon can copy; None if they are few, or if it has refused before."""
    if not client._t.endpoint.unix or client.url in _off:
        return None
    found: Dict[int, int] = {}
    for i in d.outline.rest if d.outline is not None else range(len(d.sources)):
        t, spec = d.sources[i], layout.chunks[i]
        at = _tensors.device_memory(t, spec)
        if at is None and client.casts:
            at = _tensors.device_cast(t, spec)
        if at is not None:
            found[i] = at
    room = worth(client, [_bytes(d.sources[i]) for i in found])
    return Hand(client, d, layout, found, room) if room else None


def _bytes(t: Any) -> int:
    return int(t.numel() * t.element_size())


class Hand:
    """The chunks of one description that lie in GPU memory as an image has them. room: bytes that a slot needs behind the image."""

    def __init__(self, client: Client, d: _tensors.Described, layout: Layout, addresses: Dict[int, int], room: int) -> None:
        self._client, self._d, self._layout, self._addresses, self.room = client, d, layout, addresses, room
        self.chunks = frozenset(addresses)

    def take(self, name: str, rank: int, generation: int, v: _tensors.Views, chunks: Collection[int], wait: Optional[Wait] = None,
             to_device: bool = False) -> FrozenSet[int]:
        """Has those of these chunks that it can copied into the rank's open slot, which `v` shows, or from its sealed slot. wait: for the
        kernels of a device; those of the thread's current stream, if not given. Returns what is copied: all, or after a refusal the
        devices before. Raises ConnectionLost and WaitTimeout, and state_conflict if the slot is not this rank's. A copy to the device
        whose answer is lost is outlasted: see `_outlast`."""
        done: Set[int] = set()
        for device, mine in self._by_device(chunks).items():
            pieces = [self._piece(v.at(i), i) for i in mine]
            (wait or _wait)(device)
            try:
                told = self._client.state_dicts.copy(name, rank, generation, pieces, v._buffer, v.end + -v.end % 8, to_device=to_device)
            except BaseException as e:
                if to_device and not _has_ended(e):
                    _outlast(self._client, name, [self._d.sources[i] for i in mine])
                    raise
                if not isinstance(e, (errors.DcpdError, OSError)) or getattr(e, "code", None) == "state_conflict":
                    raise
                if getattr(e, "code", None) == "unknown_field" and any(self._is_cast(i) for i in mine):
                    _no_casts(self._client, str(e))  # a daemon of before
                    uncast = {i for i in mine if not self._is_cast(i)}
                    done.update(self.take(name, rank, generation, v, uncast, wait, to_device) if uncast else ())
                    continue
                _refused(self._client, e)
                break
            problem = told.get("cast_problem")
            done.update(i for i in mine if not problem or not self._is_cast(i))
            if problem:
                _no_casts(self._client, str(problem))
        return frozenset(done)

    def _is_cast(self, i: int) -> bool:
        return self._layout.chunks[i].dtype != _dtypes.torch_name(self._d.sources[i].dtype)

    def _piece(self, place: int, i: int) -> _device.Piece:
        t, address = self._d.sources[i], self._addresses[i]
        if not self._is_cast(i):
            return place, address, self._layout.sizes[i]
        return place, address, _bytes(t), self._layout.chunks[i].dtype, str(_dtypes.torch_name(t.dtype))

    def _by_device(self, chunks: Collection[int]) -> Dict[Any, List[int]]:
        out: Dict[Any, List[int]] = {}
        for i in self._addresses:
            if i in chunks:
                out.setdefault(self._d.sources[i].device, []).append(i)
        return out


def room(client: Client, tensors: Sequence[Any]) -> int:
    """The same for tensors that go into an image as they are."""
    return worth(client, [t.numel() * t.element_size() for t in tensors if _tensors.on_device(t)])


class Giver:
    """Has a daemon copy tensors into one open slot, or into the ring in it; after a refusal no more into this one."""

    def __init__(self, client: Client, name: str, rank: int, generation: int, slot: Any, table: int, ring: Any = None) -> None:
        """slot: the mapped segment. table: where the table of pieces may lie; room for it: see `worth`."""
        self._to, self._client, self._slot, self._ring = (name, rank, generation), client, slot, ring
        self._table = table + -table % 8
        self._waited: Set[Any] = set()
        self._over = False

    def __call__(self, parts: Sequence[Tuple[int, Any]]) -> bool:
        """parts: places in the image, and contiguous tensors that go there. True: they are there. False: nothing writes there any more, and
        this process copies them. Raises what ends the save: a daemon that is lost, a ring that nobody reads."""
        devices: Dict[Any, List[Tuple[int, int, int]]] = {}
        for at, t in parts if not self._over else ():
            devices.setdefault(t.device, []).extend(self._pieces(at, int(t.data_ptr()), t.numel() * t.element_size()))
        for device, pieces in devices.items():
            if device not in self._waited:
                _wait(device)
                self._waited.add(device)
            try:
                self._client.state_dicts.copy(*self._to, pieces, self._slot, self._table)
            except (errors.DcpdError, OSError) as e:
                self._over = True
                if self._ring is not None and (isinstance(e, errors.ConnectionLost) or getattr(e, "code", None) == "ring_lost"):
                    raise _ring.Lost(str(e), code=getattr(e, "code", None)) from e
                _refused(self._client, e)
                break
        return not self._over

    def _pieces(self, at: int, address: int, size: int) -> List[Tuple[int, int, int]]:
        """In a ring the image goes round."""
        r = self._ring
        if r is None:
            return [(at, address, size)]
        first = min(size, r.size - at % r.size)
        rest = [(r.offset, address + first, size - first)] if size > first else []
        return [(r.offset + at % r.size, address, first), *rest]


def _refused(client: Client, e: Exception) -> None:
    """Says it once, or raises it: a daemon that was lost may be writing still."""
    if isinstance(e, OSError) and not isinstance(e, errors.DcpdError):  # of the descriptors' connection
        e = errors.NoDaemon(str(e), code="descriptors")
    assert isinstance(e, errors.DcpdError)
    code = e.code or ""
    if isinstance(e, (errors.ConnectionLost, errors.WaitTimeout)):
        raise e
    if (client.url, code) not in _said:
        _said.add((client.url, code))
        lasting = ", from now on" if code in _LASTING else ""
        log.warning("dcpd: this process copies its GPU memory itself%s, which takes longer: %s", lasting, e.message)
    if code in _LASTING:
        _off[client.url] = e.message


def _no_casts(client: Client, why: str) -> None:
    client.casts = False
    log.warning("dcpd: from now on this process casts what is on a GPU itself, which takes longer: %s", why)


def _has_ended(e: BaseException) -> bool:
    """Whether a copy that raised this has ended, or never begun: the daemon has answered, or the request was not sent. A daemon that
    shuts down answers although a worker may hang in its driver."""
    if not isinstance(e, errors.DcpdError):
        return isinstance(e, OSError)  # of the descriptors' connection, before the request
    lost = (errors.ConnectionLost, errors.WaitTimeout, errors.NoDaemon, errors.ProtocolMismatch)
    return e.code != "draining" and not isinstance(e, lost)


def _outlast(client: Client, name: str, tensors: List[Any]) -> None:
    """Returns when the copy into these tensors has ended, or keeps them for good: a worker goes on writing when the client has lost the
    connection or was interrupted, and the memory would be somebody else's by then. The lane's state dict is deleted, which the daemon
    refuses while a copy uses it, and which keeps a copy that is still on its way from beginning. A restarted daemon has made sure that the
    workers of the one before are gone before it answers."""
    _kept.append(tensors)  # first: a further KeyboardInterrupt ends the waiting, and must not free them
    end, ended = time.monotonic() + OUTLAST, False
    while not ended and time.monotonic() < end:
        ended = _session.delete(client, name, end - time.monotonic())
        if not ended:  # nobody answers: the daemon may be restarted
            time.sleep(0.05)
    if ended:
        _kept[:] = [x for x in _kept if x is not tensors]
        return
    size = sum(x.numel() * x.element_size() for x in tensors)
    log.warning("dcpd: %d bytes of GPU memory are kept until this process ends: their load has lost its daemon, a worker of which may "
                "still write there", size)


def _wait(device: Any) -> None:
    _tensors.device_module(device).current_stream(device).synchronize()
