"""load: a checkpoint as new tensors, or into those that are there.

New tensors: dcpd loads into a segment, which is mapped here and then forgotten by its name; the tensors are views of it, so nothing
is copied. Into a state dict: each rank describes its own boxes in a segment, dcpd fills them from whatever layout the checkpoint
has, and they are copied in place.
"""
from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from . import _group, _session, _tensors, _tree, _where, errors, image, values
from .client import Client, Job

_LEASE = 120


def load(checkpoint: _where.Target, into: Any = None, *, keys: Optional[Iterable[str]] = None, device: Any = None, strict: bool = True,
         weights_only: bool = True, verify: bool = True, process_group: Any = None, no_dist: bool = False, progress: bool = False,
         timeout: Optional[float] = None, client: Optional[Client] = None) -> Any:
    """Loads a checkpoint ("STORAGE:NAME", or a path to a DCP directory, safetensors or a .pt file).

    Without `into`: returns a new state dict, nested as it was saved, with whole tensors of torch if it is installed, else arrays of
    numpy. They are views of shared memory that this call has made (on `device`, if given: copies there).
    With `into`: fills its tensors, DTensors, ShardedTensors and arrays in place, whatever the layout of the checkpoint, casting dtypes as
    copy_ does; meta tensors are replaced by real ones; values are replaced in their containers; Stateful members get
    load_state_dict(). Returns `into`. strict: a key that the checkpoint lacks is an error that lists all of them; False leaves it as it is.

    keys: flat keys ("model.w") or their beginnings ("model"); default all. weights_only: values of other than plain classes come as
    `Opaque`, with a warning; False unpickles them here. verify: check digests of what is read. timeout: seconds.
    In a torch.distributed job every rank calls it. Raises NotFound, MissingKey, StateDictMismatch, CheckpointDamaged, …
    """
    g = _group.group(process_group, no_dist)
    wanted = None if keys is None else list(keys)
    if isinstance(keys, str):
        raise TypeError("keys: a list of keys, not one string")
    ask = _Ask(checkpoint, g, client, strict, weights_only, verify, progress and g.first, timeout)
    g.check("load", (ask.text, wanted))
    if into is None:
        return _new(ask, wanted, device)
    return _into(ask, into, wanted)


class _Ask:
    def __init__(self, checkpoint: _where.Target, group: _group.Group, client: Optional[Client], strict: bool, weights_only: bool,
                 verify: bool, progress: bool, timeout: Optional[float]) -> None:
        self.checkpoint, self.group, self.client, self.strict = checkpoint, group, client, strict
        self.weights_only, self.verify, self.progress, self.timeout = weights_only, verify, progress, timeout

    @property
    def text(self) -> str:
        return str(self.checkpoint) if _where.is_reference(self.checkpoint) else os.path.abspath(os.fspath(self.checkpoint))

    def submit(self, c: Client, source: Mapping[str, str], target: Mapping[str, Any], include: Optional[Sequence[str]]) -> Job:
        spec: Dict[str, Any] = {"source": dict(source), "target": dict(target), "strict": self.strict,
                                "options": {"verify": "digest" if self.verify else "none"}}
        if include is not None:
            spec["include"] = list(include)
        return c.jobs.create("load", **spec)

    def wait(self, c: Client, job: Any) -> Job:
        if self.progress:
            from . import show

            return show.follow_job(c, job, self.timeout, f"load {self.text}")
        return c.jobs.wait(job, self.timeout)


def _globs(keys: Sequence[str]) -> List[str]:
    return [x for k in keys for x in (k, k + ".*")]


def _selected(keys: Sequence[str], fqn: str) -> bool:
    return any(fqn == k or fqn.startswith(k + ".") for k in keys)


def _client(ask: _Ask, url: str) -> Client:
    from ._save import _client_at

    return ask.client or _client_at(url)


def _remove(c: Client, name: str) -> None:
    try:
        c.state_dicts.delete(name)
    except errors.NotFound:
        pass


# ---------------------------------------------------------------------------------------------------------- new tensors


def _new(ask: _Ask, keys: Optional[List[str]], device: Any) -> Any:
    g = ask.group
    found: Any = None
    failure: Optional[BaseException] = None
    name, c = "", ask.client
    try:
        if g.rank == 0:
            place = _where.resolve(ask.checkpoint, ask.client)
            c, name = place.client, _session.new_name()
            found = (c.url, name, *_fetch(ask, place, name, keys))
    except Exception as e:
        failure = e
    try:
        seen = g.agree((ask.text, keys, _group.place(), found), failure)
        _same_call(seen)
        url, name, segment, size = seen[0][3]
        try:
            out = _map(segment, size, "w" if g.size == 1 else "c", ask, keys, device)
            failure = None
        except Exception as e:
            failure = e
        g.agree(None, failure)
        return out
    finally:
        if g.rank == 0 and c is not None and name:
            _remove(c, name)


def _same_call(seen: Sequence[Tuple[Any, ...]]) -> None:
    for rank, x in enumerate(seen):
        if x[:2] != seen[0][:2]:
            raise errors.RanksDisagree(f"rank 0 loads {seen[0][0]!r}, rank {rank} {x[0]!r}" if x[0] != seen[0][0] else
                                       f"ranks 0 and {rank} ask for different keys", rank=rank)


def _fetch(ask: _Ask, place: _where.Place, name: str, keys: Optional[List[str]]) -> Tuple[str, int]:
    """Runs the load; (segment, bytes of its image)."""
    c = place.client
    target = {"state_dict": name, "world_size": 1, "lease_seconds": _LEASE}
    job = ask.submit(c, place.object, target, None if keys is None else _globs(keys))
    ask.wait(c, job)
    slot = c.state_dicts.get(name)["ranks"][0]["slots"][0]
    return slot["segment"], slot["image_bytes"]


def _map(segment: str, size: int, mode: str, ask: _Ask, keys: Optional[List[str]], device: Any) -> Dict[str, Any]:
    s = image.Segment(segment, mode, size)
    parsed = image.parse(s.map)
    leaves = tensors_of(s.map, parsed, device)
    leaves.update(values.decode_all(parsed.values, ask.weights_only))
    if keys is not None:
        lacking = [k for k in keys if not any(_selected([k], f) for f in leaves)]
        if lacking and ask.strict:
            raise errors.MissingKey(f"{ask.text} has no {_tree.listing(lacking)}", code="missing_key", fqn=lacking[0])
    return _tree.numbered(_tree.nest((parsed.paths.get(f, [f]), v) for f, v in leaves.items()))


def tensors_of(buffer: Any, parsed: image.Parsed, device: Any = None) -> Dict[str, Any]:
    """{FQN: tensor or array} of an image that holds whole tensors, without a copy but to a device."""
    try:
        import torch
    except ImportError:
        if device is not None:
            raise errors.RequestRefused("device= needs torch") from None
        return {e.spec.fqn: _tensors.numpy_view(buffer, e.spec, e.begin) for e in parsed.entries}
    base = torch.frombuffer(buffer, dtype=torch.uint8)
    out = {}
    for e in parsed.entries:
        t = _tensors.torch_view(base, e.spec, e.begin)
        out[e.spec.fqn] = t if device is None or torch.device(device).type == "cpu" else t.to(device)
    return out


# ---------------------------------------------------------------------------------------------------------------- into


def _into(ask: _Ask, into: Any, keys: Optional[List[str]]) -> Any:
    """Retried with more room for values if those of the checkpoint are longer than expected."""
    room = 1 << 16
    while True:
        try:
            return _into_once(ask, into, keys, room)
        except errors.SharedMemoryFull as e:
            if "header" not in e.message or room >= image.HEADER_MAX // 2:
                raise
            room *= 16


def _into_once(ask: _Ask, into: Any, keys: Optional[List[str]], room: int) -> Any:
    g = ask.group
    plan: Any = None
    failure: Optional[BaseException] = None
    name, c = "", ask.client
    try:
        if g.rank == 0:
            place = _where.resolve(ask.checkpoint, ask.client)
            c, name = place.client, _session.new_name()
            fresh = [k for k in _fresh_optimizers(into) if _has_state(place, k)]
            c.state_dicts.create(name, g.size, 1, lease_seconds=_LEASE, on_owner_death={"drop": True})
            plan = (c.url, name, place.object, fresh)
    except Exception as e:
        failure = e
    try:
        seen = g.agree((ask.text, keys, _group.place(), plan), failure)
        _same_call(seen)
        url, name, source, fresh = seen[0][3]
        target = _Target(into, keys, fresh, room)
        _fill(ask, target, c, url, name, source)
    finally:
        if g.rank == 0 and c is not None and name:
            _remove(c, name)
    _give_back(into, target.described, target.made)
    return into


class _Target:
    """What is loaded into, on this rank; described when all ranks know where to load from."""

    def __init__(self, into: Any, keys: Optional[List[str]], fresh: Sequence[str], room: int) -> None:
        self.into, self.keys, self.fresh, self.room, self.made = into, keys, fresh, room, False

    def describe(self) -> None:
        for k in self.fresh:
            _start_optimizer(self.into if k == "" else self.into[k])
        keys = self.keys
        self.described = _tensors.describe(self.into, None if keys is None else lambda f: _selected(keys, f), self._materialize)
        self.layout = image.Layout(self.described.specs(), self.described.paths)
        values = self.described.values
        self.header = self.layout.header({k: {"json": None} for k in values}, self.room if values else 0)

    def _materialize(self, tree: Any) -> None:
        self.made = materialize(tree)


def _fill(ask: _Ask, t: _Target, c: Optional[Client], url: str, name: str, source: Mapping[str, str]) -> None:
    g = ask.group
    failure: Optional[BaseException] = None
    job: Any = None
    try:
        c = c or _client(ask, url)
        t.describe()
        size = len(t.header) + t.layout.data_bytes
        segment = image.Segment(c.state_dicts.reserve(name, g.rank, size, 1)["segment"])
        segment.map[:len(t.header)] = t.header
        c.state_dicts.seal(name, g.rank, 1, size)
    except Exception as e:
        failure = e
    g.agree(None, failure)
    assert c is not None
    if g.rank == 0:
        try:
            job = dict(ask.submit(c, source, {"state_dict": name}, None))
        except Exception as e:
            job = e
    told = g.broadcast(_group._portable(job) if isinstance(job, BaseException) else job)
    try:
        if isinstance(told, BaseException):
            raise job if isinstance(job, BaseException) else told
        done = ask.wait(c, told["id"])
        missing = set(done.get("result", {}).get("missing", []))
        _tensors.copy_in(t.described, _tensors.Views(segment.map, len(t.header), t.layout), missing.__contains__)
        _put_values(ask, t.described, segment, missing)
        failure = None
    except Exception as e:
        failure = e
    finally:
        segment.close()
    g.agree(None, failure)


def _fresh_optimizers(into: Any) -> List[str]:
    """Keys of optimizers that have not made a step: their state dicts lack what a checkpoint has."""
    torch = _tensors.torch_module()
    if torch is None or not hasattr(torch, "optim"):
        return []
    pairs = list(into.items()) if isinstance(into, Mapping) else [("", into)]
    return [k for k, x in pairs if isinstance(x, torch.optim.Optimizer) and not x.state]


def _has_state(place: _where.Place, key: str) -> bool:
    tensors, found = place.client.checkpoints.tensors(place.object, prefix=(key + "." if key else "") + "state.")
    return bool(tensors or found)


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


def _put_values(ask: _Ask, d: _tensors.Described, segment: image.Segment, missing: "set[str]") -> None:
    if not d.values:
        return
    got = image.parse(segment.map).values
    for fqn, x in values.decode_all({k: got[k] for k in d.values if k not in missing and k in got}, ask.weights_only).items():
        _tree.replace(d.tree, d.paths[fqn], x)


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
