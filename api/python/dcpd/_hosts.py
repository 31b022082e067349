"""Ranks on several hosts: each host has its own daemon and shared memory, and all see one storage.

A HostGroup is the ranks of one host, which act together as those of a single host do: their first asks their daemon, makes their state
dict, submits their job. Only a failure is everybody's: `agree` raises on all ranks of all hosts, so that all take the same steps. A load
needs no more than that. For a save the daemons then work together by themselves, over the storage (worker/runner/hosts.h): no trainer is
needed for it, and nobody gathers results over a process group from a thread.

Before a first byte is copied it is looked at whether the storage is one: a mark that one daemon makes must be seen by the others.
"""
from __future__ import annotations

import hashlib
import os
import secrets
import sys
import weakref
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from . import _group, _where, errors

TIMEOUT_SECONDS = 20

_known: "weakref.WeakKeyDictionary[Any, Dict[Any, Optional[List[Tuple[str, str]]]]]" = weakref.WeakKeyDictionary()  # of process groups
_proved: Set[Any] = set()


class HostGroup(_group.Group):
    """The ranks of this host out of all; rank and size count those of this host."""

    def __init__(self, everyone: _group.Group, places: Sequence[Tuple[str, str]]) -> None:
        self.all = everyone
        by: Dict[str, List[int]] = {}
        for r, (place, _) in enumerate(places):
            by.setdefault(place, []).append(r)
        self.hosts = list(by.values())
        self.index = next(i for i, ranks in enumerate(self.hosts) if everyone.rank in ranks)
        self.mine = self.hosts[self.index]
        self.rank, self.size = self.mine.index(everyone.rank), len(self.mine)
        self.names = _names([places[ranks[0]][1] for ranks in self.hosts])

    @property
    def first(self) -> bool:
        return self.all.rank == 0

    @property
    def key(self) -> Any:
        return ("host", self.all.key, self.index)

    def gather(self, x: Any) -> List[Any]:
        got = self.all.gather(x)
        return [got[r] for r in self.mine]

    def broadcast(self, x: Any) -> Any:
        return self.gather(x if self.rank == 0 else None)[0]

    def agree(self, x: Any, e: Optional[BaseException]) -> List[Any]:
        got = self.all.agree(x, e)
        return [got[r] for r in self.mine]

    def told(self, x: Any, e: Optional[BaseException]) -> Any:
        return self.agree(x if self.rank == 0 else None, e)[0]

    def check(self, what: str, x: Any) -> None:
        for r, other in enumerate(self.all.gather(x)):
            if other != x:
                raise errors.RanksDisagree(f"ranks {self.all.rank} and {r} {what}: {x!r} and {other!r}", rank=r)

    def meet(self, offer: Any, place: Any) -> Dict[str, Any]:
        """What this host's save job says of the others. Raises SeveralHosts on all ranks if they do not share the storage.

        offer: of this host's first rank, which alone has `place`.
        """
        seen = self.all.gather((offer.target, offer.options, offer.state_dict, offer.generation, offer.storage, offer.name))
        for r, x in enumerate(seen):
            if x[:2] != seen[0][:2]:
                raise errors.RanksDisagree(f"ranks 0 and {r} save {seen[0][0]!r} and {x[0]!r}, or with different options", rank=r)
        where = tuple((seen[ranks[0]][4], os.path.dirname(seen[ranks[0]][5])) for ranks in self.hosts)
        if (self.key, where) not in _proved:
            self._look_for_twins(place, [seen[ranks[0]][2] for ranks in self.hosts])
            self._prove(place)
            _proved.add((self.key, where))
        ident = hashlib.sha256(f"{seen[0][2]}:{seen[0][3]}".encode()).hexdigest()[:32]
        return {"id": ident, "index": self.index, "names": self.names, "ranks": self.hosts,
                "timeout_s": int(os.environ.get("DCPD_HOSTS_TIMEOUT", TIMEOUT_SECONDS))}

    def _look_for_twins(self, place: Any, state_dicts: Sequence[str]) -> None:
        """One daemon may have the ranks of two /dev/shm: then it cannot read what one of them writes."""
        twins: List[int] = []
        failure: Optional[BaseException] = None
        try:
            if place is not None:
                twins = [i for i, s in enumerate(state_dicts) if i != self.index and _has(place, s)]
        except Exception as e:
            failure = e
        found = self.all.agree(twins, failure)
        for i, ranks in enumerate(self.hosts):
            if found[ranks[0]]:
                raise errors.SeveralHosts(f"the ranks on {self.names[i]} and {self.names[found[ranks[0]][0]]} do not share one /dev/shm, "
                                          "but one daemon: run their containers with --ipc=host, or a daemon beside each")

    def _prove(self, place: Any) -> None:
        token = self.all.broadcast(secrets.token_hex(16) if self.first else None)
        self._step(place if self.first else None, token, "put")
        try:
            seen = self._step(place, token, "look")
        finally:
            if self.first:
                _quietly(place, token)
        blind = [i for i, ranks in enumerate(self.hosts) if not seen[ranks[0]]]
        if blind:
            text = "; ".join(f"{n}: rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}" for n, r in zip(self.names, self.hosts))
            raise errors.SeveralHosts(
                f"the ranks are on {len(self.hosts)} hosts ({text}), and {', '.join(self.names[i] for i in blind)} "
                f"{'does' if len(blind) == 1 else 'do'} not see what {self.names[0]} writes to this storage: ranks of several hosts save "
                "to a storage that the daemons of all of them share, such as NFS or a bucket")

    def _step(self, place: Any, token: str, action: str) -> List[Any]:
        answer: Any = None
        failure: Optional[BaseException] = None
        try:
            if place is not None:
                answer = place.client.storages.meet(place.storage, place.name, token, action)
        except Exception as e:
            failure = e
        return self.all.agree(answer, failure)


def one_source(g: _group.Group, checkpoint: _where.Target, client: Any) -> _where.Target:
    """What all hosts load. Each asks a daemon of its own, and between two answers an alias or a link may be moved: so the first of all
    ranks asks for all. Every rank calls it, with the same checkpoint."""
    if not isinstance(g, HostGroup) or not _where.may_move(checkpoint):
        return checkpoint
    found: Optional[str] = None
    failure: Optional[BaseException] = None
    try:
        if g.first:
            found = _where.settled(checkpoint, client)
    except Exception as e:
        failure = e
    return str(g.all.told(found, failure))


def everywhere(g: _group.Group, yes: bool) -> bool:
    """Whether it is so on the first rank of every host; of ranks on one host: what this one says. Every rank calls it."""
    return all(g.all.gather(yes or g.rank != 0)) if isinstance(g, HostGroup) else yes


def spread(g: _group.Group, place: Any, wanted: Optional[bool]) -> Optional[Dict[str, Any]]:
    """What the jobs of all hosts say of each other, so that each byte is read once from the storage: None if their daemons are no nodes
    of one cluster whose workers reach each other, or nothing is to be spread (`wanted` False), or the source is in no storage. Every
    rank calls it. place: on the first rank of each host; None: it has failed there, and says why in the next step. Raises RequestRefused
    on all ranks if it cannot be, and `wanted` is True."""
    if not isinstance(g, HostGroup) or wanted is False:
        if wanted:
            raise errors.RequestRefused("spread=True is for ranks on several hosts, each with a daemon of its own")
        return None
    node: Optional[str] = None
    reached: List[str] = []
    if g.rank == 0 and place is not None and place.storage:
        try:
            told = place.client.nodes.seen()
            node = told["node"] if told.get("spreads") else None
            reached = [n["name"] for n in told["nodes"] if n["state"] != "away"]
        except errors.DcpdError:
            pass  # of no cluster
    seen = g.all.gather((node, reached, secrets.token_hex(16), place is None))
    firsts = [seen[ranks[0]] for ranks in g.hosts]
    nodes = [x[0] for x in firsts]
    if len(set(nodes)) == len(nodes) and all(set(nodes) <= set(x[1]) for x in firsts):
        return {"nodes": nodes, "id": seen[0][2]}
    if wanted and not any(x[3] for x in firsts):
        raise errors.RequestRefused("spread=True needs daemons that are nodes of one cluster, with a --comm-listen that the others "
                                    f"reach; those of the hosts are {nodes}")
    return None


def _has(place: Any, state_dict: str) -> bool:
    try:
        place.client.state_dicts.get(state_dict)
        return True
    except errors.NotFound:
        return False


def _quietly(place: Any, token: str) -> None:
    try:
        place.client.storages.meet(place.storage, place.name, token, "drop")
    except errors.DcpdError:
        pass  # a later sweep takes it


def _names(hosts: Sequence[str]) -> List[str]:
    """Two containers may have one name."""
    return [h if list(hosts).count(h) == 1 else f"{h} ({i})" for i, h in enumerate(hosts)]


def split(everyone: _group.TorchGroup) -> _group.Group:
    """The ranks themselves if they share their memory, else those of this host. Looked at once per process group."""
    place = _group.place()
    seen = _known.setdefault(everyone.whole, {})
    key = (os.getpid(), place)
    if key not in seen:
        places = everyone.gather(place)
        seen[key] = None if len({p for p, _ in places}) == 1 else places
    known: Any = seen[key]
    if known is not None:
        return HostGroup(everyone, known)
    everyone.meet_here()
    return everyone


def group(process_group: Any = None, no_dist: bool = False) -> _group.Group:
    """The process group given, else the default one if torch.distributed is initialised, else this process alone; of ranks that are on
    several hosts those of this one, as a HostGroup."""
    if no_dist:
        return _group.Group()
    dist = sys.modules.get("torch.distributed")
    if process_group is None and (dist is None or not dist.is_available() or not dist.is_initialized()):
        return _group.Group()
    g = _group.TorchGroup(process_group)
    if g.size == 1:
        return _group.Group()
    return split(g)
