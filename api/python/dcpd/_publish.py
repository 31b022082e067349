"""publish: a trainer's weights as a version for those who serve them.

    pub = dcpd.publish(model.state_dict(), "policy", version=step)

Each rank copies what it holds into its slot of the publication, a state dict of that name, and seals it. When all ranks have, the version
is the newest one, and dcpd brings it to every subscriber, at its own layout (subscribe, in _subscribe.py). The slots are those of a save
that returns after the copy: two of them, warm from the second version on.
"""
from __future__ import annotations

import logging
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _daemon, _group, _hosts, _session, _tensors, errors, values
from .client import Client, Closing

log = logging.getLogger("dcpd")
_in_publish = threading.RLock()


class Publication(Closing):
    """A publication as one rank of its trainer sees it: what publish() returns. version: the one that was published last."""

    def __init__(self, session: _session.Session) -> None:
        self._session = session
        self.name, self.client = session.name, session.client
        self.version = session.generation

    def subscribers(self) -> List[Dict[str, Any]]:
        """Records of all subscribers: name, generation, subscription {applied, lag_s, changed_bytes, …}."""
        return list(self.client.publications.get(self.name)["subscribers"])

    def wait(self, timeout: Optional[float] = None, version: Optional[int] = None) -> None:
        """Until all subscribers of this moment have taken `version` (default: the newest) or a newer one, with all their ranks. One that
        goes away meanwhile is not waited for. Raises WaitTimeout."""
        wanted = self.version if version is None else version
        end = None if timeout is None else time.monotonic() + timeout
        left = {(s.get("node"), s["name"]) for s in self.subscribers()}
        while True:
            here = [s for s in self.subscribers() if (s.get("node"), s["name"]) in left]
            late = [s["name"] for s in here if s["subscription"]["applied"] is None or s["subscription"]["applied"] < wanted]
            if not late:
                return
            if end is not None and time.monotonic() > end:
                raise errors.WaitTimeout(f"{', '.join(late)} had not taken version {wanted} of {self.name} after {timeout:g} s")
            time.sleep(0.02)

    def close(self) -> None:
        """Ends this rank's part. The newest version stays for subscribers that come later, until the lease of all ranks has been over for
        an hour (the daemon's keep-sealed)."""
        self._session.owner = False
        _session.discard(self._session)

    def delete(self) -> None:
        """Removes the publication with its versions. Subscribers keep what they have."""
        self._session.owner = True
        _session.discard(self._session, 5.0)

    def __repr__(self) -> str:
        return f"<Publication {self.name}, version {self.version}>"


def publish(state_dict: Any, name: str, *, version: Optional[int] = None, readers: Sequence[int] = (), slots: int = 2,
            process_group: Any = None, no_dist: bool = False, lease_seconds: int = _session.LEASE_SECONDS,
            client: Optional[Client] = None) -> Publication:
    """Copies a state dict into shared memory as the newest version of publication `name`, and returns: the tensors may change then.

    state_dict: as for dcpd.save. In a torch.distributed job every rank of `process_group` calls it, on one host; no_dist: this rank
    alone. version: a number that grows, the same on all ranks, such as the step; None: one more than the last. readers: uids that may
    subscribe besides this user's own; they count when the publication is made. slots: versions that may be in memory at once: while one is
    written and the newest one is being read, a third call waits with 2. lease_seconds: how long after the last sign of life of its ranks a
    publication counts as left.
    A publication that an earlier process made goes on, if it had as many ranks. Raises RequestRefused (code generation_stale) for a version
    that is not newer than the last, StateDictMismatch for another number of ranks, SharedMemoryFull, RanksDisagree, …
    """
    with _in_publish:
        g = _hosts.group(process_group, no_dist)
        if getattr(g, "hosts", None) is not None and len(g.hosts) > 1:  # type: ignore[attr-defined]
            raise errors.SeveralHosts("the ranks of a publication are on one host", code="not_here")
        return Publication(_version(state_dict, name, version, _Wish(list(readers), slots, lease_seconds), g, client))


class _Wish(NamedTuple):
    readers: List[int]
    slots: int
    lease_seconds: int


class _Key:
    def __init__(self, name: str, g: _group.Group) -> None:
        self.key, self.rank, self.size = ("publish", name, g.key), g.rank, g.size


def _version(state_dict: Any, name: str, version: Optional[int], wish: _Wish, g: _group.Group,
             client: Optional[Client]) -> _session.Session:
    failure: Optional[BaseException] = None
    described: Optional[_tensors.Described] = None
    offer: Tuple[Any, ...] = (_group.place(), name, version, None)
    try:
        described = _tensors.describe(state_dict)
        if g.rank == 0:
            c = client or _daemon.default_client()
            last = _open(c, name, g.size, wish)
            offer = (*offer[:3], (c.url, last + 1 if version is None else version))
    except Exception as e:
        failure = e
    offers = g.agree(offer, failure)
    for rank, x in enumerate(offers):
        if x[1:3] != offers[0][1:3]:
            raise errors.RanksDisagree(f"rank 0 publishes {name!r}, version {version}; rank {rank} {x[1]!r}, version {x[2]}", rank=rank)
    url, generation = offers[0][3]
    session: Optional[_session.Session] = None
    try:
        session = _join(client or _daemon.client_at(url), name, g, wish.slots)
        with session.lock:
            _write(session, described, generation)
    except Exception as e:
        failure = e
    try:
        g.agree(None, failure)
    except BaseException:
        if session is not None:
            _give_up(session, generation)
        raise
    assert session is not None
    session.generation = generation
    return session


def _open(c: Client, name: str, size: int, wish: _Wish) -> int:
    """Makes the publication, or takes one up that is there; its last version."""
    try:
        got = c.state_dicts.create(name, size, wish.slots, lease_seconds=wish.lease_seconds, publish={"readers": wish.readers})
    except errors.DcpdError as e:
        if e.code != "state_dict_exists":
            raise
        got = c.state_dicts.get(name)
    if "publish" not in got:
        raise errors.StateDictMismatch(f"state dict {name!r} is there, and is no publication")
    if got["world_size"] != size:
        raise errors.StateDictMismatch(f"publication {name!r} has {got['world_size']} ranks, and {size} are here: "
                                       f"`dcpctl rm shm:{name}` removes it, or use another name", code="world_mismatch")
    return -1 if got["generation"] is None else int(got["generation"])


def _join(c: Client, name: str, g: _group.Group, slots: int) -> _session.Session:
    key: Any = _Key(name, g)
    s = _session.find(c, key, slots)
    return s if s is not None else _session.keep(_session.Session(c, name, g.rank, g.size, False, slots), key)


def _write(session: _session.Session, d: Optional[_tensors.Described], generation: int) -> None:
    assert d is not None
    layout = session.layout_of(d)
    header = layout.header({k: values.encode(v, k) for k, v in d.values.items()})
    size = len(header) + layout.data_bytes
    slot = session.reserve(size, generation, "wait", lambda: None)
    _tensors.copy_out(d, session.fill(slot, layout, header), slot.into)
    session.client.state_dicts.seal(session.name, session.rank, generation, size)


def _give_up(session: _session.Session, generation: int) -> None:
    try:
        session.release(generation)
    except errors.DcpdError:
        pass  # the next version frees it
