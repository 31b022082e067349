"""Where a process keeps its snapshots: one state dict at the daemon per process group, with a few slots that stay warm.

A slot is a segment in /dev/shm. The first save makes its pages, each further one finds them mapped and, if the structure is the same,
the header's text and the views of all tensors ready: what is left is the copy. The lease is renewed in the background as long as the
process lives; when it dies, dcpd saves or frees what was sealed.
"""
from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from . import _copy, _ring, _tensors, errors, image
from .client import Client
from ._group import Group
from ._http import Transport

LEASE_SECONDS = 60
WAIT_STEP = 20.0


class Slot:
    """A mapped segment with what was written into it last."""

    def __init__(self, segment: image.Segment) -> None:
        self.segment = segment
        self.into = _copy.Into(image.SHM + segment.name, image.address(segment.map), segment.size)
        self.views: Optional[_tensors.Views] = None
        self.header: Optional[bytes] = None
        self.ring: Optional[_ring.Ring] = None


class Session:
    """One rank's side of a state dict with `slots` slots. Not for two threads at once: hold `lock`."""

    def __init__(self, client: Client, name: str, rank: int, world: int, owner: bool, slots: int) -> None:
        self.client, self.name, self.rank, self.world, self.owner, self.slots = client, name, rank, world, owner, slots
        self.generation = 0
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.mapped: Dict[str, Slot] = {}
        self.layout: Optional[image.Layout] = None
        self.described: Any = None

    # ---- one generation ----

    def layout_of(self, d: _tensors.Described) -> image.Layout:
        """The layout of the step before, if the structure is the same."""
        before = self.described
        if self.layout is None or d.outline is None or d.outline is not before[2]:
            if self.layout is None or before[0] != d.keys or before[1] != d.paths:
                self.layout = image.Layout(d.specs(), d.paths)
            self.described = (d.keys, d.paths, d.outline)
        return self.layout

    def reserve(self, size: int, generation: int, when_busy: str, warn: Callable[[], None], populate: bool = True) -> Slot:
        """A slot of at least `size` bytes, mapped. when_busy: "wait", "warn" (and wait) or "fail". populate: all its pages are there when
        this returns, if that is the faster way; else those of a new one come as they are written."""
        warned, again, room = when_busy != "warn", True, True
        while True:
            try:
                wait = None if when_busy == "fail" or not warned else WAIT_STEP
                return self._map(self.client.state_dicts.reserve(self.name, self.rank, size, generation, wait=wait)["segment"], size,
                                 populate)
            except errors.SlotsBusy:
                if when_busy == "fail":
                    raise
                if not warned:
                    warn()
                    warned = True
            except errors.NoSharedMemory:
                if not again:
                    raise
                again = False  # the daemon was restarted just now, and had not written down that it made the segment
            except errors.SharedMemoryFull:
                # dcpd has dropped warm slots, but their memory is free only when nobody maps them any more
                if not room or not sum([s._forget_dead() for s in all_sessions()]):
                    raise
                room = False

    def _map(self, name: str, size: int, populate: bool) -> Slot:
        slot = self.mapped.get(name)
        if slot is None or slot.segment.size < size:
            self._forget_dead(keep=name)
            slot = self.mapped[name] = Slot(image.Segment(name))
            if populate:
                slot.into.prepare(size)
        return slot

    def _forget_dead(self, keep: str = "") -> int:
        """Slots whose segment was replaced by a larger one, or dropped: their memory is freed when the last view goes. How many."""
        dead = [n for n in list(self.mapped) if n == keep or not os.path.exists(image.SHM + n)]
        for name in dead:
            self.drop(name)
        return len(dead)

    def drop(self, name: str) -> None:
        slot = self.mapped.pop(name, None)
        if slot is None:
            return
        slot.views = slot.ring = None
        slot.segment.close()

    def fill(self, slot: Slot, layout: image.Layout, header: bytes) -> _tensors.Views:
        """Header into the slot; the views of its tensors."""
        return self._views(slot, layout, header, None, slot.segment.map)

    def fill_ring(self, slot: Slot, layout: image.Layout, header: bytes, offset: int, size: int) -> _tensors.Views:
        """The same, where the tensors go through a ring."""
        ring = slot.ring
        if ring is None or (ring.offset, ring.size) != (offset, size):
            ring = slot.ring = _ring.Ring(slot.segment, offset, size)
        return self._views(slot, layout, header, ring, ring.buffer)

    @staticmethod
    def _views(slot: Slot, layout: image.Layout, header: bytes, ring: Optional[_ring.Ring], buffer: Any) -> _tensors.Views:
        v = slot.views
        if v is None or v.layout is not layout or v._begin != len(header) or v.ring is not ring:
            v = slot.views = _tensors.Views(buffer, len(header), layout, ring)
        if slot.header != header:
            slot.segment.map[:len(header)] = header
            slot.header = header
        return v

    def release(self, generation: int, reason: Optional[str] = None) -> None:
        """Ends this rank's hold on a generation. A state dict that is gone already is no error."""
        try:
            self.client.state_dicts.release(self.name, self.rank, generation, reason)
        except errors.NotFound:
            pass

    def close(self, timeout: float = 5.0) -> None:
        """Unmaps everything, and deletes the state dict if it was made here and no job uses it."""
        for name in list(self.mapped):
            self.drop(name)
        if self.owner and self.pid == os.getpid():
            delete(self.client, self.name, timeout)


def brief(client: Client) -> Client:
    """A client of the same daemon that does not wait for it if it has gone."""
    t = client._t
    return Client(Transport(t.endpoint, t.token, timeout=5.0, reconnect=0.0))


def delete(client: Client, name: str, timeout: float) -> bool:
    """Deletes a state dict when nothing uses it any more; returns whether it is known to be gone. Else dcpd frees it when the jobs are done
    and the lease is over."""
    end = time.monotonic() + timeout
    with brief(client) as c:
        while True:
            try:
                c.state_dicts.delete(name)
                return True
            except errors.NotFound:
                return True
            except errors.Busy:
                if time.monotonic() > end:
                    return False
                time.sleep(0.05)
            except errors.DcpdError:
                return False


_sessions: Dict[Any, Session] = {}
_guard = threading.Lock()
_renewer: Optional[threading.Thread] = None


def new_name() -> str:
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:40]
    return f"py-{host}-{os.getpid()}-{secrets.token_hex(6)}"


def find(client: Client, group: Group, slots: int) -> Optional[Session]:
    with _guard:
        return _sessions.get((client.url, group.key, slots))


def create(client: Client, group: Group, slots: int, **more: Any) -> Session:
    """Makes the state dict at the daemon; the caller is rank 0."""
    name = new_name()
    client.state_dicts.create(name, group.size, slots, lease_seconds=LEASE_SECONDS, **more)
    return keep(Session(client, name, group.rank, group.size, True, slots), group)


def join(client: Client, group: Group, slots: int, name: str) -> Session:
    """The session of a state dict that rank 0 made."""
    s = find(client, group, slots)
    if s is None or s.name != name:
        if s is not None:
            discard(s)
        s = keep(Session(client, name, group.rank, group.size, False, slots), group)
    return s


def keep(s: Session, group: Group) -> Session:
    global _renewer
    with _guard:
        _sessions[(s.client.url, group.key, s.slots)] = s
        if _renewer is None or not _renewer.is_alive():
            _renewer = threading.Thread(target=_renew, name="dcpd-lease", daemon=True)
            _renewer.start()
    return s


def discard(s: Session, timeout: float = 0.0) -> None:
    with _guard:
        for k in [k for k, v in _sessions.items() if v is s]:
            del _sessions[k]
    s.close(timeout)


def discard_group(group: Group) -> None:
    """Of ranks that cannot save together any more: no lease keeps their slots, and dcpd saves or frees what is in them."""
    with _guard:
        found = [s for k, s in _sessions.items() if k[1] == group.key]
    for s in found:
        discard(s)


def all_sessions() -> List[Session]:
    with _guard:
        return list(_sessions.values())


def _renew() -> None:
    while True:
        time.sleep(LEASE_SECONDS / 4)
        for s in all_sessions():
            try:
                s.client.state_dicts.renew(s.name, s.rank)
            except errors.NotFound:
                discard(s)
            except errors.DcpdError:
                pass  # the next call says it
            finally:
                s.client._t.close()  # this thread's connection: nobody could close it when the process ends


def close_all(timeout: float = 5.0) -> None:
    """Gives back all slots of this process. What is being saved goes on."""
    for s in all_sessions():
        with _guard:
            for k in [k for k, v in _sessions.items() if v is s]:
                del _sessions[k]
        s.close(timeout)


def _after_fork() -> None:
    """A child has no part in its parent's snapshots: it would write over them."""
    global _guard, _renewer
    _sessions.clear()
    _guard = threading.Lock()
    _renewer = None


os.register_at_fork(after_in_child=_after_fork)
