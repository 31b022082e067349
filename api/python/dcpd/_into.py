"""load(into=): fills what a state dict has, in place.

What a rank can read by itself goes straight from the files into its tensors (_direct.py): most of a model, if this process may open the
checkpoint. The rest comes through dcpd: each rank describes its own boxes in a segment, dcpd fills them from whatever layout the
checkpoint has, and they are copied to their places. If they are many they go in groups, through two lanes by turns (three where tensors
lie on a GPU): while one group is copied, dcpd reads the next. The worker that copies from a lane to a GPU page-locks it once for all its
groups. A segment for all of it would have to be cleared and mapped first, which takes longer than reading, and nothing would happen
meanwhile. That comes first, as it finds what is missing before anything is changed.

Whatever may fail ends in `_agree`, so that all ranks take the same way. A daemon that was restarted may have lost a reservation, or the
whole state dict: then all begin again, once. So they do when the checkpoint is replaced meanwhile, so that all comes from one version.
"""
from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from typing import Any, Collection, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence

from . import _ask, _direct, _group, _handover, _hosts, _older, _session, _tensors, _tree, _where, errors, image, values
from .client import Client

GROUP_MIN = 128 << 20  # bytes of a rank
GROUPS_MAX = 16        # each is a job
LANES, LANES_GPU = 2, 3  # lanes used by turns: one is read, one is copied from; a GPU's link is faster than most disks, and must not wait


_log = logging.getLogger("dcpd")


_REPLACED_MAX = 3  # times


class _Again(errors.DcpdError):
    """What was reserved is gone."""


class _Replaced(_Again):
    """The checkpoint is another one than when the load began."""


def fill(ask: Any, into: Any, keys: Optional[List[str]], spread: Optional[bool] = None) -> Any:
    """ask, spread: the rest of load's arguments (_ask.Ask). Retried with more room for values if those of the checkpoint are longer than
    expected."""
    room, again, replaced = 1 << 16, True, 0
    older: Optional[Collection[str]] = None
    while True:
        try:
            return _once(ask, into, keys, room, older, spread)
        except _older.Older as e:
            older = e.names
        except errors.SharedMemoryFull as e:
            if "header" not in e.message or room >= image.HEADER_MAX // 2:
                raise
            room *= 16
        except _Replaced as e:
            replaced, older = replaced + 1, None
            if replaced == _REPLACED_MAX:
                raise errors.Busy(f"{ask.text} was replaced {replaced} times while it was loaded; what was loaded is of several versions",
                                  code="checkpoint_replaced", retryable=True, file=e.file) from None
        except _Again as e:
            if not again:
                raise errors.NotFound(f"what was reserved in shared memory vanished twice: is dcpd being restarted? {e.message}") from None
            again = False


def _once(ask: Any, into: Any, keys: Optional[List[str]], room: int, older: Optional[Collection[str]], spread: Optional[bool]) -> Any:
    g = ask.group
    plan: Any = None
    failure: Optional[BaseException] = None
    c: Optional[Client] = ask.client
    try:
        if g.rank == 0:
            place = _where.resolve(ask.checkpoint, ask.client)
            c = place.client
            fresh = [k for k in _fresh_optimizers(into) if _has_state(place, k)]
            plan = (c.url, [_session.new_name() for _ in range(LANES_GPU)], (place.storage, place.name, _direct.root_of(place)), fresh)
    except Exception as e:
        failure = e
    seen = g.agree((ask.text, keys, _group.place(), plan), failure)
    _ask.same_call(seen)
    url, names, source, fresh = seen[0][3]
    target = _Target(into, keys, fresh, room, older)
    run = _Run(ask, target, names, source)
    try:
        run.begin(c, url, spread)
        run.all()
        run.read()
        run.look_for_older()
    except Exception:
        if run.lacking:
            run.look_for_older(True)
        raise
    finally:
        run.end()
    _give_back(into, target.described, target.made)
    return into


class _Part(NamedTuple):
    """A group of this rank's boxes, and how they lie in a segment. hand: those of them that dcpd copies to a GPU."""

    described: _tensors.Described
    layout: image.Layout
    header: bytes
    hand: Optional[_handover.Hand]

    @property
    def size(self) -> int:
        return len(self.header) + self.layout.data_bytes


class _Target:
    """What is loaded into, on this rank; described when all ranks know where to load from."""

    def __init__(self, into: Any, keys: Optional[List[str]], fresh: Sequence[str], room: int, older: Optional[Collection[str]]) -> None:
        self.into, self.keys, self.fresh, self.room, self.older, self.made = into, keys, fresh, room, older, False
        self.parts: List[_Part] = []
        self.direct: Optional[_direct.Plan] = None
        self.addresses: Dict[int, int] = {}  # by box of `direct`
        self.largest = 0

    def describe(self, place: _where.Place) -> None:
        for k in self.fresh:
            _start_optimizer(self.into if k == "" else self.into[k])
        keys = self.keys
        self.described = _tensors.describe(self.into, None if keys is None else lambda f: _ask.selected(keys, f), self._materialize)
        arrays = self.described.arrays()
        if arrays:
            found: List[Any] = []
            with contextlib.suppress(errors.NotFound):  # a node may have it in its memory alone: the jobs find it there, or it is missing
                found = place.client.checkpoints.tensors(place.object, prefix=os.path.commonprefix(list(arrays)) or None)[1]
            pickled = {v["fqn"]: arrays[v["fqn"]] for v in found if v["fqn"] in arrays}
            self.described = self.described.as_values(pickled) if pickled else self.described
        _tensors.check_targets(self.described)
        if self.older is not None:
            self.described = _older.described(self.described, self.older, keys)
        self.specs = self.described.specs()
        self.rest = list(range(len(self.specs)))

    def locate(self, place: _where.Place, verify: bool) -> None:
        """What this rank reads by itself; the rest is left in `rest`."""
        if not self.specs:
            return
        found = [(i, at) for i, (t, s) in enumerate(zip(self.described.sources, self.specs))
                 if (at := _tensors.memory(t, s)) is not None]
        found = [found[k] for k in _direct.choose([self.specs[i].nbytes for i, _ in found])]
        with contextlib.suppress(errors.NotFound):
            self.direct = _direct.find(place, [self.specs[i] for i, _ in found], verify)
        if self.direct is not None:
            self.addresses = {k: found[k][1] for k in self.direct.boxes}
            taken = {found[k][0] for k in self.direct.boxes}
            self.rest = [i for i in self.rest if i not in taken]

    def mostly_direct(self) -> bool:
        return self.direct is not None and self.direct.bytes > sum(self.specs[i].nbytes for i in self.rest)

    def all_by_jobs(self) -> None:
        if self.direct is not None:
            self.direct.close()
        self.direct, self.rest = None, list(range(len(self.specs)))

    def _materialize(self, tree: Any) -> None:
        self.made = materialize(tree)

    def groups(self) -> List[List[int]]:
        """The rest in groups, in its order: a checkpoint has it in much the same."""
        most = max(GROUP_MIN, -(-sum(self.specs[i].nbytes for i in self.rest) // GROUPS_MAX))
        groups: List[List[int]] = [[]]
        held = 0
        for i in self.rest:
            n = self.specs[i].nbytes
            if held and held + n > most:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += n
        return groups

    def cast_here(self, stored: Mapping[str, str]) -> Dict[str, bool]:
        """Of the tensors whose dtype is not that in the checkpoint: whether a GPU casts all that this rank has of them, by FQN."""
        out: Dict[str, bool] = {}
        for s, t in zip(self.specs, self.described.sources):
            if stored.get(s.fqn, s.dtype) != s.dtype:
                out[s.fqn] = out.get(s.fqn, True) and _tensors.casts_on_device(t, stored[s.fqn])
        return out

    def cut(self, groups: Sequence[Sequence[int]], c: Client, stored: Mapping[str, str]) -> None:
        """Values, and the paths of all, go with the first group. stored: dtypes that tensors have in the segment, by FQN; default: their
        own."""
        d = self.described
        specs = [s._replace(dtype=stored.get(s.fqn, s.dtype)) for s in self.specs] if stored else self.specs
        for i, boxes in enumerate(groups):
            layout = image.Layout([specs[k] for k in boxes], d.paths if i == 0 else {})
            held = {k: {"json": None} for k in d.values} if i == 0 else {}
            part = d._replace(sources=[d.sources[k] for k in boxes], values=d.values if i == 0 else {})
            self.parts.append(_Part(part, layout, layout.header(held, self.room if held else 0), _handover.plan(c, part, layout)))
        self.largest = max((p.size + (p.hand.room if p.hand else 0) for p in self.parts), default=0)


class _Told(NamedTuple):
    """What a rank says before a load begins. ident: of the checkpoint's directory that it reads; rest: whether it needs jobs; strict: the
    first one's counts; gpu: whether tensors lie on one."""

    host: int
    ident: str
    groups: int
    rest: bool
    progress: bool
    strict: bool
    gpu: bool


class _Key:
    def __init__(self, name: str) -> None:
        self.key = ("load", name)


class _Step(NamedTuple):
    part: _Part
    lane: _session.Session
    generation: int
    segment: image.Segment
    job: str


class _Run:
    """One load. lanes: state dicts of one slot for each rank, made by rank 0 and used by turns."""

    def __init__(self, ask: Any, target: _Target, names: Sequence[str], source: Sequence[str]) -> None:
        self.ask, self.g, self.target, self.names, self.where = ask, ask.group, target, names, source
        self.source = {"storage": source[0], "name": source[1]}
        self.everyone: _group.Group = getattr(self.g, "all", self.g)
        self.lanes: List[_session.Session] = []
        self.running: List[_Step] = []
        self.directly = False  # whether any rank reads files
        self.version = ""      # of the checkpoint, as far as this rank can tell
        self.lacked = False   # whether a value of this rank was missing
        self.lacking = False  # whether a load failed for that, on any rank

    def begin(self, c: Optional[Client], url: str, spread: Optional[bool]) -> None:
        """Describes what is here, what of it is read directly, and in how many groups the rest goes on all ranks."""
        failure: Optional[BaseException] = None
        place: Any = None
        try:
            self.c = c or _ask.client_of(self.ask, url)
            place = _where.Place(self.c, *self.where)
            self.target.describe(place)
        except Exception as e:
            failure = e
        self._spread(place, spread, failure)
        try:
            if not self.ask.rules and failure is None and self.ask.spread is None:
                self.target.locate(place, self.ask.verify)
        except Exception as e:
            failure = e
        told = self._settle(failure)
        n = 1 if any(x.progress for x in told) else max(x.groups for x in told)
        self.directly = any(x.ident for x in told)
        if self.directly and not any(x.rest for x in told):
            n = 0
        self.strict = told[0].strict
        if n:
            self.version = self.target.direct.ident if self.target.direct is not None else _direct.version(self.where[2], self.where[1])
        gpu, found = any(x.gpu for x in told), None
        if n and (gpu or (n > 1 and self.strict)):
            found = self._list()
        if n > 1 and self.strict and not self._complete(found):
            n = 1  # one job says all that is missing, and nothing has been changed then
        groups = self.target.groups() if n > 1 else [self.target.rest] * n
        self.target.cut([*groups, *[[]] * (n - len(groups))], self.c, self._cast_on_devices(found or {}) if gpu else {})
        if n:
            self._open(min(n, LANES_GPU if gpu else LANES))

    def _spread(self, place: Any, wanted: Optional[bool], failure: Optional[BaseException]) -> None:
        """Whether the hosts read each byte once and pass it on: by default where most of the bytes are wanted by several of them."""
        self.ask.spread = None if self.ask.rules else _hosts.spread(self.g, place, wanted)
        if self.ask.spread is None or wanted:
            return
        mine = [] if failure else [(zlib.crc32(repr((s.fqn, s.offsets, s.sizes)).encode()), s.nbytes) for s in self.target.specs]
        hosts: Dict[int, "set[int]"] = {}
        sizes: Dict[int, int] = {}
        for host, boxes in self.everyone.gather((getattr(self.g, "index", 0), mine)):
            for key, size in boxes:
                hosts.setdefault(key, set()).add(host)
                sizes[key] = size
        shared = sum(n for key, n in sizes.items() if len(hosts[key]) > 1)
        if 2 * shared < sum(sizes.values()):
            self.ask.spread = None

    def _settle(self, failure: Optional[BaseException]) -> List["_Told"]:
        """What all ranks are about to do. Those of a host must have seen one checkpoint, else jobs do it all."""
        while True:
            me = None
            if failure is None:
                t = self.target
                me = _Told(getattr(self.g, "index", 0), t.direct.ident if t.direct else "", len(t.groups()),
                           bool(t.rest or t.described.values), self.ask.progress, self.ask.strict,
                           any(getattr(x, "is_cuda", False) for x in t.described.sources))
            told: List[_Told] = self._agree(failure, me)
            if len({(x.host, x.ident) for x in told if x.ident}) == len({x.host for x in told if x.ident}):
                return told
            self.target.all_by_jobs()

    def _list(self) -> Optional[Dict[str, str]]:
        """What the checkpoint has, or the rules make of it: dtypes by FQN, of values "". None if it cannot be told."""
        out: Optional[Dict[str, str]] = None
        if self.g.rank == 0:
            try:
                listed = self.ask.made(self.c, self.source) if self.ask.rules else self.c.checkpoints.tensors(self.source)
                out = None if listed is None else {**{x["fqn"]: str(x["dtype"]) for x in listed[0]}, **{x["fqn"]: "" for x in listed[1]}}
            except Exception:
                pass  # the others wait for the broadcast; the job will say it, also of a file of rules that cannot be read
        return self.g.broadcast(out)  # type: ignore[no-any-return]

    def _cast_on_devices(self, stored: Mapping[str, str]) -> Dict[str, str]:
        """The stored dtypes of tensors that GPUs cast, by FQN. All ranks have one dtype of a tensor in their segments. None if another
        version may come unseen, of a checkpoint that rules read from, too: if its dtypes were wider, it would be rounded."""
        able = _handover.casts(self.c) and self.version not in ("", _direct.GONE) and not self.ask.rules
        told: List[Dict[str, bool]] = self.everyone.gather({k: able and x for k, x in self.target.cast_here(stored).items()})
        return {k: stored[k] for x in told for k in x if k in stored and all(other.get(k, True) for other in told)}

    def _complete(self, found: Optional[Mapping[str, str]]) -> bool:
        """Whether the checkpoint has all keys that any rank asks for."""
        d = self.target.described
        mine = found is not None and found.keys() >= {s.fqn for s in self.target.specs} and found.keys() >= d.values.keys()
        return all(self.everyone.gather(mine))

    def _open(self, n: int) -> None:
        failure: Optional[BaseException] = None
        for name in self.names[:n]:
            try:
                if self.g.rank == 0 and failure is None:
                    self.c.state_dicts.create(name, self.g.size, 1, lease_seconds=_ask.LEASE, on_owner_death={"drop": True})
                lane = _session.Session(self.c, name, self.g.rank, self.g.size, self.g.rank == 0, 1)
                self.lanes.append(_session.keep(lane, _Key(name)))  # type: ignore[arg-type]
            except Exception as e:
                failure = e
        self._agree(failure)

    def all(self) -> None:
        for i in range(len(self.target.parts)):
            self.running.append(self._start(i))
            if len(self.running) == len(self.lanes):
                self._finish(self.running[0])
                self.running.pop(0)
        while self.running:
            self._finish(self.running[0])
            self.running.pop(0)

    def _start(self, i: int) -> _Step:
        part, lane = self.target.parts[i], self.lanes[i % len(self.lanes)]
        generation = i // len(self.lanes) + 1
        failure: Optional[BaseException] = None
        job: Any = None
        try:
            segment = lane.reserve(self.target.largest, generation, "wait", lambda: None).segment
            segment.map[:len(part.header)] = part.header
            self.c.state_dicts.seal(lane.name, self.g.rank, generation, part.size)
        except Exception as e:
            failure = e
            if isinstance(e, errors.DcpdError) and e.code in ("not_found", "state_conflict"):
                failure = _Again(e.message)
        self._agree(failure)
        if self.g.rank == 0:
            try:
                job = self.ask.submit(self.c, self.source, {"state_dict": lane.name}, None).id
            except Exception as e:
                failure = self._why(lane, e)
        told = self._agree(failure, job)
        return _Step(part, lane, generation, segment, told[getattr(self.g, "mine", (0,))[0]])

    def _finish(self, step: _Step) -> None:
        failure: Optional[BaseException] = None
        try:
            done = self.ask.wait(self.c, step.job, self.target.mostly_direct())
            if self._replaced():
                raise _Replaced("before a job had read it")
            missing = set(done.get("result", {}).get("missing", []))
            self.lacked = self.lacked or not missing.isdisjoint(step.part.described.values)
            views = _tensors.Views(step.segment.map, len(step.part.header), step.part.layout)
            _tensors.copy_in(step.part.described, views, missing.__contains__, self._to_devices(step, views, missing))
            _put_values(self.ask, step.part.described, step.segment, missing)
            step.lane.release(step.generation)
        except Exception as e:
            failure = self._why(step.lane, e)
        self._agree(failure)

    def _to_devices(self, step: _Step, views: _tensors.Views, missing: "set[str]") -> FrozenSet[int]:
        """Has dcpd copy what lies on GPUs from the lane's page-locked segment; which chunks those were."""
        hand = step.part.hand
        if hand is None:
            return frozenset()
        found = frozenset(i for i in hand.chunks if step.part.layout.chunks[i].fqn not in missing)
        return hand.take(step.lane.name, self.g.rank, step.generation, views, found, to_device=True)

    def read(self) -> None:
        """The rest of it: what is read here."""
        if not self.directly:
            return
        failure: Optional[BaseException] = None
        start, plan = time.monotonic(), self.target.direct
        try:
            if plan is not None:
                self._read(plan)
                _log.info("%s: %d tensors, %d bytes read in %.3f s, %d from memory, the rest from its files; %d through dcpd",
                          self.ask.text, len(plan.boxes), plan.bytes, time.monotonic() - start, plan.from_memory, len(self.target.rest))
        except _direct.Replaced as e:
            failure = _Replaced(e.message, file=e.file)
        except Exception as e:
            failure = e
        self._agree(failure)

    def _read(self, plan: _direct.Plan) -> None:
        end = self.ask.deadline()
        try:
            if self.ask.progress:
                from . import show

                with show.reading(f"load {self.ask.text}", plan.bytes) as tick:
                    plan.read(self.target.addresses, end, tick)
            else:
                plan.read(self.target.addresses, end)
        except errors.WaitTimeout:
            raise errors.WaitTimeout(f"{self.ask.text} is not loaded after {self.ask.timeout:g} s; a part of it is") from None

    def _replaced(self) -> bool:
        """Whether another version is there by now, as far as this process can tell. What has been deleted is no other one."""
        return _direct.version(self.where[2], self.where[1]) not in (self.version, _direct.GONE)

    def look_for_older(self, missing: bool = False) -> None:
        """missing: it has failed for that. What is left out without an error is looked for as well."""
        if self.target.older is None and not self.ask.rules and (missing or (not self.strict and any(self.everyone.gather(self.lacked)))):
            _older.look(self.g, self.everyone, self.c, self.source, self.target.described, self.target.keys)

    def _why(self, lane: _session.Session, e: Exception) -> BaseException:
        """Of a job that could not be: has the lane gone, or another checkpoint come?"""
        if isinstance(e, errors.NotSealed):
            return _Again(e.message)
        if isinstance(e, _Again):
            return e
        if isinstance(e, errors.DcpdError) and not isinstance(e, (errors.WaitTimeout, errors.ConnectionLost)):
            if self._replaced():
                return _Replaced(e.message)
            try:
                self.c.state_dicts.get(lane.name)
            except errors.NotFound:
                return _Again(e.message)
            except errors.DcpdError:
                pass
        return e

    def _agree(self, failure: Optional[BaseException], x: Any = None) -> List[Any]:
        """Everybody's x; raises on all ranks what went wrong on one; _Again on all, if it is that on any."""
        why = type(failure) if isinstance(failure, _Again) else None
        got = self.everyone.gather((why, _group._portable(failure), x))
        for rank, (again, _, _) in enumerate(got):
            if again:  # on all ranks the same
                raise failure if again is why and failure is not None else again(f"on rank {rank}")
        self.lacking = any(isinstance(e, errors.MissingKey) for _, e, _ in got)
        if failure is not None:
            raise failure
        for rank, (_, e, _) in enumerate(got):
            if e is not None:
                raise _group._elsewhere(rank, e)
        return [x for _, _, x in got]

    def end(self) -> None:
        if self.target.direct is not None:
            self.target.direct.close()
        if self.g.rank == 0:
            for step in self.running:
                _ask.give_up(self.c, step.job)
        for lane in self.lanes:
            _session.discard(lane, 5.0)


def _fresh_optimizers(into: Any) -> List[str]:
    """Keys of optimizers that have not made a step: their state dicts lack what a checkpoint has."""
    torch = _tensors.torch_module()
    if torch is None or not hasattr(torch, "optim"):
        return []
    pairs = list(into.items()) if isinstance(into, Mapping) else [("", into)]
    return [k for k, x in pairs if isinstance(x, torch.optim.Optimizer) and not x.state]


def _has_state(place: _where.Place, key: str) -> bool:
    prefix = (key + "." if key else "") + "state."
    try:
        tensors, found = place.client.checkpoints.tensors(place.object, prefix=prefix)
        return bool(tensors or found)
    except errors.NotFound:  # a node may have it in its memory alone, which a plan finds
        plan = place.client.jobs.plan("load", source=place.object, include=[prefix + "*"],
                                      target={"state_dict": _session.new_name(), "world_size": 1})
        return bool(plan.get("needed_bytes"))


def _start_optimizer(optimizer: Any) -> None:
    """Makes the state by a step that changes nothing (no gradient, no learning rate), as PyTorch's get_optimizer_state_dict does."""
    torch = _tensors.torch_module()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(p.grad is not None for p in parameters):
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step(closure=None)
    finally:
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


def _put_values(ask: Any, d: _tensors.Described, segment: image.Segment, missing: "set[str]") -> None:
    if not d.values:
        return
    got = image.parse(segment.map).values
    for fqn, x in values.decode_all({k: got[k] for k in d.values if k not in missing and k in got}, ask.weights_only).items():
        if not _copied(d.values[fqn], x):
            _tree.replace(d.tree, d.paths[fqn], x)


def _copied(target: Any, x: Any) -> bool:
    """An array that can take what was pickled stays the same object."""
    np = _tensors.numpy_module()
    if np is None or type(target) is not np.ndarray or type(x) is not np.ndarray or x.dtype != target.dtype.newbyteorder("=") \
            or x.shape != target.shape or not target.flags.writeable:
        return False
    np.copyto(target, x)
    return True


def _give_back(into: Any, d: _tensors.Described, made: bool) -> None:
    """Stateful members take what was loaded. made: some of it lies in tensors that were on the meta device."""
    if d.tree is not into and isinstance(into, dict):
        for k, x in d.tree.items():
            if k not in d.stateful:
                into[k] = x
    torch = _tensors.torch_module()
    for k, x in d.stateful.items():
        tree = d.tree if k == "" else d.tree[k]
        if made and isinstance(x, torch.nn.Module):
            x.load_state_dict(tree, assign=True)
        else:
            x.load_state_dict(tree)


def materialize(tree: Any) -> bool:
    """Replaces meta tensors in the containers of a state dict by empty ones, DTensors on their mesh's current device."""
    torch = _tensors.torch_module()
    found = False
    if torch is None or not isinstance(tree, (dict, list)):
        return False
    for k, x in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if isinstance(x, (dict, list)):
            found = materialize(x) or found
        elif isinstance(x, torch.Tensor) and type(x).__name__ != "ShardedTensor" and x.is_meta:
            tree[k], found = _real(torch, x), True
    return found


def _real(torch: Any, x: Any) -> Any:
    if type(x).__name__ == "DTensor":
        device = x.device_mesh.device_type
        if device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return torch.empty_like(x, device=device)
    return torch.empty_like(x, device="cpu")
