"""Segments that a rank of PyTorch's save writes into: each a state dict of its own, of one rank and one slot, kept warm.

PyTorch brings ranks together in its own way (a custom planner, cached plans, no collectives at all), so nothing here is agreed upon:
every rank fills a lane of its own, and whoever finishes the save lists what lies where in whose lane.

A lane is free again when nobody can need it any more: the views that stage() gave out are gone, and the thread that handed it to a
save has ended or is here for its next one (then the save before is over: PyTorch's ranks end a save together).
"""
from __future__ import annotations

import ctypes
import json
import os
import struct
import threading
import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .. import _copy, _early, _group, _handover, _ring, _session, errors, image
from ..client import Client

HEAD = 4096      # of a lane's image, at least; the data follows
_NAMED, _NAMES = 256, 2  # of a header that names tensors: bytes for each, and times that it has each name
LARGE = 128 << 10  # from here on items begin on a page, so that they are written straight from the segment
SMALL_ALIGN = 64

_lanes: List["Lane"] = []
_guard = threading.RLock()
_pid = os.getpid()


class _Key:
    def __init__(self, name: str) -> None:
        self.key = ("lane", name)


def place(at: int, nbytes: int) -> Tuple[int, int]:
    """Where an item begins that comes behind `at`, and where it ends."""
    step = HEAD if nbytes >= LARGE else SMALL_ALIGN
    begin = -(-at // step) * step
    return begin, begin + nbytes


def head_for(tensors: int, names: int) -> int:
    """Bytes of a header that says of so many tensors, whose names have so many bytes together, where they lie."""
    return -(-(HEAD // 2 + _NAMED * tensors + _NAMES * names) // HEAD) * HEAD


class Lane:
    def __init__(self, client: Client, use: str) -> None:
        self.client, self.use, self.size, self.head, self.room = client, use, 0, HEAD, 0
        self._begin()
        self.taken = True
        self.holder: Optional[threading.Thread] = None
        self.token: Any = None     # weak: the buffer behind staged tensors
        self.map: Any = None
        self._into: Optional[_copy.Into] = None
        self.ring: Optional[_ring.Ring] = None
        self.place: Dict[str, int] = {}    # of the ring
        self.whole = 0                     # the image that goes through it
        self.segment = ""
        self._layout: Optional[image.Layout] = None

    def _begin(self) -> None:
        """If the owner dies, data that a job has saved stay for loads; each seal says that others go."""
        self.name, self.generation, self.sealed = _session.new_name(), 0, False
        death = {} if self.use == "data" else {"on_owner_death": {"drop": True}}
        self.client.state_dicts.create(self.name, 1, 1, lease_seconds=_session.LEASE_SECONDS, **death)
        self.session = _session.Session(self.client, self.name, 0, 1, True, 1)
        _session.keep(self.session, _Key(self.name))  # type: ignore[arg-type]

    def free(self) -> bool:
        if self.taken or (self.token is not None and self.token() is not None):
            return False
        return self.holder is None or not self.holder.is_alive() or self.holder is threading.current_thread()

    def alive(self) -> bool:
        return self.session in _session.all_sessions()

    def open(self, size: int, head: int = HEAD, room: int = 0) -> None:
        """Room for `size` bytes of a new generation behind a header of at most `head`; room: behind both, for copies of a GPU's memory."""
        self._reserve(head + size + room)
        self.size, self.head, self.room, self.token = head + size, head, room, None

    def giver(self) -> Optional[_handover.Giver]:
        """Has tensors of a GPU copied here; None if there is no room for that."""
        return _handover.Giver(self.client, self.name, 0, self.generation, self.map, self.size, self.ring) if self.room else None

    def _reserve(self, size: int) -> None:
        self._give_back()
        self.generation += 1
        slot = self.session.reserve(size, self.generation, "wait", lambda: None, self.use != "ring")
        self.map, self.segment, self.size, self.sealed = slot.segment.map, slot.segment.name, size, False
        self._into = slot.into

    def _give_back(self) -> None:
        if self.generation:
            self.session.release(self.generation)

    def buffer(self) -> Any:
        """All of it, as a ctypes array; every view of it keeps it alive."""
        return (ctypes.c_char * len(self.map)).from_buffer(self.map)

    def into(self) -> _copy.Into:
        """Where copies go; it knows what of the segment has been touched."""
        assert self._into is not None
        return self._into

    # ---- as a ring ----

    def announce(self, size: int) -> bool:
        """`size` bytes behind the header will come through this lane's ring. False: this daemon knows no rings."""
        whole = HEAD + size
        slot = self.session.mapped[self.segment]
        self.ring = slot.ring = slot.ring if slot.ring is not None and slot.ring.size == self.place["bytes"] else \
            _ring.Ring(slot.segment, HEAD, self.place["bytes"])
        self._put_head(size)
        self.ring.begin(HEAD, self._ask)
        self.ring.give = self.giver()
        self.whole = whole
        try:
            self.client.state_dicts.fill(self.name, 0, self.generation, whole, self.place)
            return True
        except errors.DcpdError as e:
            if not _early.refused(e, "ring"):
                raise
            self.client.rings = False
            return False

    def _ask(self) -> None:
        try:
            self.client.state_dicts.renew(self.name, 0, self.generation)
        except errors.DcpdError as e:
            raise _ring.Lost(e.message, code=e.code) if _ring.lost(e) else e

    def poured(self) -> None:
        """All is in the ring."""
        try:
            self.client.state_dicts.seal(self.name, 0, self.generation, self.whole, ring=self.place)
        except errors.DcpdError as e:
            raise _ring.Lost(e.message, code=e.code) if _ring.lost(e) else e

    def end_ring(self, written: bool) -> None:
        """All that went through it is written, for the save that this thread is in; or it is given up. Nobody else fills the ring
        meanwhile: that would tell the daemon that what was written is not wanted any more."""
        if self.ring is not None:
            self.ring.give = None
        self.ring = self.map = None  # the daemon may need its memory: what is warm of it is the session's
        try:
            self._give_back()
        except errors.DcpdError:
            pass  # it is freed with the next generation, or when the lease is over
        if written:
            self.hand_over()
        else:
            self.let_go()

    # ---- whole ----

    def _put_head(self, n: int, text: bytes = b"") -> None:
        text = text or json.dumps({"data": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
        self.map[:self.head] = struct.pack("<Q", self.head - 8) + text.ljust(self.head - 8)

    def seal(self, named: Sequence[Tuple[int, image.ChunkSpec]] = ()) -> None:
        """named: tensors, and where they begin: a load of what is saved from here finds them by the header. Too many: it has none."""
        if self.sealed:
            return
        self._put_head(self.size - self.head, self._names(named))
        self._seal()

    def _names(self, named: Sequence[Tuple[int, image.ChunkSpec]]) -> bytes:
        places: List[int] = []
        chunks: List[image.ChunkSpec] = []
        end = 0
        for at, spec in sorted(named, key=lambda x: x[0]):
            if at - self.head >= end:  # what several items share has the first one's name
                places.append(at - self.head)
                chunks.append(spec)
                end = places[-1] + spec.nbytes
        if not chunks:
            return b""
        if self._layout is None or self._layout.positions != places or self._layout.chunks != chunks \
                or self._layout.data_bytes != self.size - self.head:
            self._layout = image.Layout(chunks, {}, places, self.size - self.head)
        text = self._layout.header({})[8:].rstrip()
        return text if len(text) <= self.head - 8 else b""

    def put_image(self, data: bytes) -> None:
        """A whole image of somebody else's making: in the generation that the lane was taken with, if there is room."""
        if self.sealed or self.size < len(data):
            self._reserve(len(data))
        self.size = len(data)
        self.map[:len(data)] = data
        self._seal()

    def put_head(self, header: bytes, size: int) -> None:
        """An image's header; its data will be filled by a job."""
        self.map[:len(header)] = header
        self.size = size
        self._seal()

    def _seal(self) -> None:
        wish = {"drop": True} if self.use == "data" else None
        try:
            self.client.state_dicts.seal(self.name, 0, self.generation, self.size, wish)
        except (errors.NotFound, errors.RequestRefused) as e:
            if e.code not in ("not_found", "state_conflict"):
                raise
            self._move(e.code == "not_found")
            self.client.state_dicts.seal(self.name, 0, self.generation, self.size, wish)
        self.sealed = True

    def _move(self, begin: bool) -> None:
        """To another segment: a daemon that was restarted has forgotten the reservation, or the lease was over and the whole state dict is
        gone. The data are still mapped here."""
        before, size = self.map, self.size
        if begin:
            _session.discard(self.session)
            self._begin()
        self._reserve(size)
        if self.map is not before:
            self.map[:size] = before[:size]

    def hand_over(self) -> None:
        """To the save that this thread is in."""
        with _guard:
            self.holder, self.taken = threading.current_thread(), False

    def let_go(self) -> None:
        with _guard:
            self.holder, self.taken = None, False

    def drop(self) -> None:
        with _guard:
            if self in _lanes:
                _lanes.remove(self)
        self.map = self._into = None
        _session.discard(self.session)


def _fresh_process() -> None:
    global _pid
    if _pid != os.getpid():
        _lanes.clear()
        _pid = os.getpid()


def take(client: Client, size: int, use: str = "data", head: int = HEAD, room: int = 0) -> Lane:
    """A lane with room for `size` bytes behind a header of `head`, and for `room` more (Lane.giver): a free one that is large enough if
    there is one, the smallest of them.
    use: the list of a save ("list") comes from other lanes than its data, which the same thread has just handed over."""
    with _guard:
        _fresh_process()
        for dead in [x for x in _lanes if not x.alive()]:
            _lanes.remove(dead)
        free = [x for x in _lanes if x.use == use and x.client.url == client.url and x.free()]
        free.sort(key=lambda x: (x.size < head + size, x.size if x.size >= head + size else -x.size))
        lane = free[0] if free else None
        if lane is not None:
            lane.taken = True
    for again in (True, False):
        if lane is None:
            lane = Lane(client, use)
            with _guard:
                _lanes.append(lane)
        try:
            lane.open(size, head, room)
            return lane
        except errors.NotFound:
            lane.drop()
            lane = None
            if not again:
                raise
        except BaseException:
            lane.let_go()
            raise
    raise AssertionError("not reached")


def take_ring(client: Client, size: int, room: int = 0) -> Lane:
    """A lane with a ring for `size` bytes, to be announced."""
    ring = _ring.size_for(HEAD + size)
    while True:
        try:
            lane = take(client, ring + image.PAGE, "ring", room=room)
            lane.place = {"offset": HEAD, "bytes": ring}
            return lane
        except errors.SharedMemoryFull:
            ring = _ring.smaller(ring)


def of(address: int, nbytes: int) -> Optional[Tuple[Lane, int]]:
    """The lane whose staged data this is, and where in it."""
    with _guard:
        _fresh_process()
        for x in _lanes:
            staged = x.token() if x.token is not None else None
            if staged is None:
                continue
            at = address - ctypes.addressof(staged)
            if 0 <= at and at + nbytes <= x.size:
                return x, at
    return None


def stage_token(lane: Lane, buffer: Any) -> None:
    with _guard:
        lane.token, lane.taken = weakref.ref(buffer), False


def host() -> Dict[str, Any]:
    """Where this process's segments are: ranks of another host cannot be read by our daemon."""
    where, name = _group.place()
    return {"name": name, "place": where}


def _after_fork() -> None:
    global _guard
    _guard = threading.RLock()
    _lanes.clear()


os.register_at_fork(after_in_child=_after_fork)
