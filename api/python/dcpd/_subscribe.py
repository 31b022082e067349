"""subscribe: versions of a publication as they come, at this process's own layout.

    for update in dcpd.subscribe("policy"):
        update.version, update["model.w"]      # views of shared memory, until the next one is asked for

A subscriber is a state dict at the daemon with as many ranks as the serving job has. dcpd fills a free slot of it with the newest version,
and shows it when all ranks' parts are there; it begins the next update when all ranks have taken this one. So all ranks see the same
versions in the same order, and one that is slow skips those between. Waiting is a long poll that renews the lease and says what was taken:
after a restart of the daemon the repeated request says it again.
"""
from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import _copy, _daemon, _hosts, _into, _session, _tensors, _tree, _views, errors, image, values
from .client import Client, Closing

log = logging.getLogger("dcpd")
WAIT_SECONDS = 20.0
_RULES = ("include", "exclude", "rename", "dtype")


class Update(_views.Entries):
    """A version on this rank, as a mapping {FQN: tensor or value}; several boxes of one tensor come as a list. Tensors are views of shared
    memory, valid until the next update is asked for or the subscription is closed: do not write to them, and clone() what shall stay.

    version; changed_bytes and kept_bytes: of all ranks, what differs from the version before, and what does not. chunks: where the boxes
    of this rank lie in their tensors. file: the segment's path, a safetensors file."""

    def __init__(self, version: int, slot: Mapping[str, Any], record: Mapping[str, Any], as_numpy: bool, weights_only: bool) -> None:
        super().__init__(image.Segment(str(slot["segment"]), "r", int(slot["image_bytes"])), as_numpy, weights_only)
        of = record["subscription"]
        self.version, self.changed_bytes, self.kept_bytes = version, int(of["changed_bytes"]), int(of["kept_bytes"])

    def release(self) -> None:
        """Drops the views that this mapping holds. Those that were taken out of it are good until the next update is asked for."""
        self._items = {}
        self._segment.close()

    def __repr__(self) -> str:
        return f"<Update {self.version}, {len(self.chunks)} boxes, {self.changed_bytes} bytes changed>"


class Subscription(Closing):
    """An iterator of updates, and a context manager. name: of the subscriber's state dict; version: of the last update, None before."""

    def __init__(self, client: Client, name: str, rank: int, o: "_Wish", layout: List[Dict[str, Any]], world: int) -> None:
        self.client, self.name, self.rank, self._o = client, name, rank, o
        self._layout, self._world = layout, world
        self.version: Optional[int] = None
        self._held: Optional[Update] = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._renewer = threading.Thread(target=self._renew, name="dcpd-subscriber", daemon=True)
        self._renewer.start()

    def __iter__(self) -> "Subscription":
        return self

    def __next__(self) -> Update:
        try:
            return self.next(self._o.timeout)
        except errors.NotFound:
            if self._closed.is_set():
                raise StopIteration from None
            raise

    def next(self, timeout: Optional[float] = None) -> Update:
        """The next version; the one before is given back. With `into` its tensors are there when this returns. Raises WaitTimeout, what an
        update failed with unless it is tried again, and StateDictMismatch or MissingKey naming all that does not fit `into`, which is
        as it was then."""
        with self._lock:
            end = None if timeout is None else time.monotonic() + timeout
            while True:
                if self._closed.is_set():
                    raise errors.NotFound(f"the subscription {self.name} was closed")
                update = self._look(end)
                if update is not None:
                    return self._take(update)

    def _look(self, end: Optional[float]) -> Optional[Update]:
        left = WAIT_SECONDS if end is None else min(WAIT_SECONDS, end - time.monotonic())
        if left <= 0:
            raise errors.WaitTimeout(f"{self.name} had no newer version than {self.version} in time")
        try:
            self.client.state_dicts.renew(self.name, self.rank, taken=self.version, wait=left)
            record = self.client.state_dicts.get(self.name)
        except errors.NotFound:
            if self._closed.is_set():
                raise
            self._create()  # the lease was over, or the daemon has lost its journal
            return None
        of, newest = record["subscription"], record["generation"]
        if newest is None or newest <= (-1 if self.version is None else self.version):
            problem = of.get("problem")
            if problem and not problem.get("retryable"):
                raise errors.from_problem(problem)
            if problem:
                time.sleep(0.2)
            return None
        slot = next((s for s in record["ranks"][self.rank]["slots"] if s["state"] == "sealed" and s["generation"] == newest), None)
        return None if slot is None else Update(int(newest), slot, record, self._o.as_numpy, self._o.weights_only)

    def _create(self) -> None:
        _make(self.client, self.name, self._world, self._o, self._layout)

    def _take(self, update: Update) -> Update:
        if self._o.into is not None:
            _copy_into(self._o, update)
        self._held, self.version = update, update.version
        self.client.state_dicts.renew(self.name, self.rank, taken=update.version)
        return update

    def _renew(self) -> None:
        while not self._closed.wait(self._o.lease_seconds / 4):
            try:
                self.client.state_dicts.renew(self.name, self.rank)
            except errors.DcpdError:
                pass  # next() says it
            finally:
                self.client._t.close()  # this thread's connection

    def close(self) -> None:
        """Ends it on this rank; rank 0 removes the subscriber at the daemon. A next() in another thread ends within a long poll."""
        self._closed.set()
        if self._held is not None:
            self._held.release()
            self._held = None
        if self.rank:
            return
        for _ in range(100):
            try:
                self.client.state_dicts.delete(self.name)
                return
            except errors.Busy:
                time.sleep(0.05)  # an update is under way
            except errors.DcpdError:
                return

    def __repr__(self) -> str:
        return f"<Subscription {self.name} of {self._o.publication}, rank {self.rank}, version {self.version}>"


class _Wish:
    def __init__(self, publication: str, node: Optional[str], into: Any, strict: bool, as_numpy: bool, weights_only: bool,
                 timeout: Optional[float], lease_seconds: int, rules: Mapping[str, Sequence[Any]]) -> None:
        for k in (k for k, v in rules.items() if isinstance(v, str)):
            raise TypeError(f"{k}: a list, not one string")
        self.rules = {k: [x if isinstance(x, str) else list(x) for x in v] for k, v in rules.items() if v}
        self.of = {"publication": publication, **({"node": node} if node is not None else {}), **self.rules}
        self.publication, self.into, self.strict, self.as_numpy = publication, into, strict, as_numpy
        self.weights_only, self.timeout, self.lease_seconds = weights_only, timeout, lease_seconds


def subscribe(publication: str, *, node: Optional[str] = None, into: Any = None, layout: Optional[Sequence[Mapping[str, Any]]] = None,
              include: Sequence[str] = (), exclude: Sequence[str] = (), rename: Sequence[Tuple[str, str]] = (),
              dtype: Sequence[Tuple[str, str]] = (), rank: Optional[int] = None, world_size: Optional[int] = None,
              name: Optional[str] = None, strict: bool = True,
              as_numpy: bool = False, weights_only: bool = True, timeout: Optional[float] = None, process_group: Any = None,
              no_dist: bool = False, lease_seconds: int = _session.LEASE_SECONDS, client: Optional[Client] = None) -> Subscription:
    """Versions of publication `publication`, from the newest one on, as an iterator of `Update`.

    node: of the cluster, where the publication is; None: on this host. A node that dies ends the wait with `publisher_away`; a later
    next() goes on when it is back.
    into: a state dict (nested mappings of torch tensors, DTensors, numpy arrays) whose tensors each update fills, at whatever layout,
    before it is handed out; None: views of shared memory, cut by `layout` (rules: [{"match": "*.w", "placements": ["Shard(0)"]}];
    what no rule speaks of comes whole).
    include, exclude: globs of published FQNs, which alone come, or do not; rename: (PCRE2 pattern, replacement), in order; dtype: (glob of
    the new FQN, dtype), the first match wins. layout and `into` are of what they leave. strict: keys of `into` that a version lacks are an
    error; False: they keep their value.
    In a torch.distributed job every rank of `process_group` calls it; elsewhere the processes of one serving job give the same `name`,
    `world_size`, and their `rank`. The publication need not be there yet. timeout: seconds that the iterator waits for a version, then
    WaitTimeout. lease_seconds: how long after its last sign of life a subscriber is dropped.
    """
    g = _hosts.group(process_group, no_dist or world_size is not None)
    rank, world = (g.rank, g.size) if world_size is None else (int(rank or 0), int(world_size))
    if world_size is not None and world > 1 and name is None:
        raise ValueError("world_size: the ranks find each other by the same name=")
    o = _Wish(publication, node, into, strict, as_numpy, weights_only, timeout, lease_seconds,
              dict(zip(_RULES, (include, exclude, rename, dtype))))
    failure: Optional[BaseException] = None
    offer: Any = None
    try:
        rules = [*(layout or ()), *_rules(into)] if into is not None else list(layout or ())
        rules.append({"match": "*", "placements": ["Replicate()"]})
        if g.rank == 0:
            c = client or _daemon.default_client()
            name = name or f"{publication}.{secrets.token_hex(4)}"
            _make(c, name, world, o, rules)
            offer = (c.url, name, rules)
    except Exception as e:
        failure = e
    url, name, rules = g.agree(offer, failure)[0]
    return Subscription(client or _daemon.client_at(url), str(name), rank, o, rules, world)


def _make(c: Client, name: str, world: int, o: _Wish, layout: List[Dict[str, Any]]) -> None:
    try:
        c.state_dicts.create(name, world, 2, lease_seconds=o.lease_seconds, on_owner_death={"drop": True},
                             subscribe={**o.of, "layout": layout})
    except errors.DcpdError as e:
        if e.code != "state_dict_exists":
            raise
        got = c.state_dicts.get(name)  # another rank of this job was first
        of = got.get("subscribe", {})
        if of.get("publication") != o.publication or got["world_size"] != world:
            raise errors.StateDictMismatch(f"state dict {name!r} is there, and is no subscriber of {o.publication!r} with {world} "
                                           "ranks") from None
        for k in (k for k in _RULES if (of.get(k) or []) != o.rules.get(k, [])):
            raise errors.StateDictMismatch(f"subscriber {name!r} is there, with {k}={of.get(k) or []}, not {o.rules.get(k, [])}: all ranks "
                                           "give the same rules") from None


def _rules(into: Any) -> List[Dict[str, Any]]:
    """How the DTensors of a state dict are cut; whole tensors need no rule."""
    leaves, _ = _tree.flatten(into.state_dict() if _tensors.is_stateful(into) else into, _tensors.is_tensor, frozenset())
    out = []
    for fqn, t in leaves.items():
        if type(t).__name__ == "DTensor":
            mesh = t.device_mesh
            out.append({"match": fqn, "mesh": [int(n) for n in mesh.shape], "placements": [str(_spelled(p)) for p in t.placements],
                        "ranks": [int(r) for r in mesh.mesh.flatten().tolist()], "optional": True})
        elif type(t).__name__ == "ShardedTensor":
            raise errors.StateDictMismatch(f"{fqn}: a ShardedTensor cannot be subscribed into: use DTensors, or layout= and views", fqn=fqn)
    return out


def _spelled(p: Any) -> str:
    return {"Shard": lambda: f"Shard({p.dim})", "Replicate": lambda: "Replicate()",
            "_StridedShard": lambda: f"_StridedShard(dim={p.dim}, sf={p.split_factor})"}.get(type(p).__name__, lambda: repr(p))()


def _copy_into(o: _Wish, update: Update) -> None:
    """All is compared before anything is changed."""
    d = _tensors.describe(o.into)
    _tensors.check_targets(d)
    there: Dict[Any, image.Entry] = {(e.spec.fqn, e.spec.offsets, e.spec.sizes): e for e in update.parsed.entries}
    shapes = {e.spec.fqn: e.spec for e in update.parsed.entries}
    faults, missing, found = [], [], []
    for s in d.specs():
        e = there.get((s.fqn, s.offsets, s.sizes))
        of = shapes.get(s.fqn)
        if of is None:
            missing.append(s.fqn)
        elif of.shape != s.shape:
            faults.append(f"{s.fqn}: shape {list(s.shape)} here, {list(of.shape)} in the version")
        elif not _casts(of.dtype, s.dtype):
            faults.append(f"{s.fqn}: dtype {s.dtype} here, {of.dtype} in the version")
        elif e is None and s.nbytes:
            faults.append(f"{s.fqn}: the box at {list(s.offsets)} of {list(s.sizes)} is cut in another way in the subscriber")
        found.append(e)
    missing += [k for k in d.values if k not in update.parsed.values]
    if faults or (missing and o.strict):
        lacking = [f"{k}: not in the version" for k in dict.fromkeys(missing)] if o.strict else []
        kind = errors.StateDictMismatch if faults else errors.MissingKey
        raise kind(f"version {update.version} of {o.publication} does not fit: " + "; ".join([*lacking, *faults]),
                   code="size_mismatch" if faults else "missing_key")
    _copy_views([(t, update.view(e, _is_array(t))) for t, e in zip(d.sources, found) if e is not None and e.spec.nbytes])
    left = {k: x for k, x in values.decode_all(update.parsed.values, o.weights_only).items() if k in d.values}
    for fqn, x in left.items():
        if not _into._copied(d.values[fqn], x):
            _tree.replace(d.tree, d.paths[fqn], x)
    _into._give_back(o.into, d, False)


def _casts(a: str, b: str) -> bool:
    """Between floating types, as copy_ does; anything else is a slip."""
    return a == b or ("float" in a and "float" in b)


def _copy_views(pairs: Sequence[Tuple[Any, Any]]) -> None:
    torch, np = _tensors.torch_module(), _tensors.numpy_module()
    blocks: List[_copy.Block] = []
    to: List[Any] = []
    frm: List[Any] = []
    for t, v in pairs:
        if _is_array(t):
            np.copyto(t, v, casting="same_kind")
        elif t.dtype == v.dtype and _tensors._plain_cpu(t, v.numel() * v.element_size()):
            blocks.append((t.data_ptr(), v.data_ptr(), v.numel() * v.element_size()))
        else:
            to.append(t)
            frm.append(v)
    if to:
        with torch.no_grad():
            _tensors._bulk(torch, to, frm)
    _copy.copy(blocks, None, _copy._run)


def _is_array(t: Any) -> bool:
    torch = _tensors.torch_module()
    return torch is None or not isinstance(t, torch.Tensor)
