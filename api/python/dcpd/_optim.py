"""Optimizer state as a model's ranks need it: PyTorch's load_sharded_optimizer_state_dict, by the daemon.

The daemon decides who gets what (api/optimizer-state.md); it needs each rank's word on the model, so each writes the structure of its
model's state dict, without a byte of its tensors, into a small segment. What comes back is PyTorch's: ShardedTensors cut on dim 0,
over the world or, where FSDP is over tensor parallelism, over the data-parallel group; one-element tensors whole; values.
"""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from . import _ask, _dtypes, _group, _hosts, _session, _tensors, _tree, _where, errors, image, values
from .client import Client


def load_sharded_optimizer_state_dict(model_state_dict: Mapping[str, Any], optimizer_key: str, storage_reader: Any, planner: Any = None, *,
                                      weights_only: bool = True, verify: bool = True, process_group: Any = None,
                                      timeout: Optional[float] = None, client: Optional[Client] = None) -> Dict[str, Any]:
    """The optimizer state under `optimizer_key`, nested as it was saved, cut for this rank of the model.

    storage_reader: a reference ("STORAGE:NAME"), a path, or a reader that has one as its checkpoint_id or path. planner: None or a
    DefaultLoadPlanner; others would not be asked. Every rank of a torch.distributed job calls it; without one the tensors come whole.
    Raises MissingKey, StateDictMismatch, NotFound, …
    """
    if planner is not None and type(planner).__name__ != "DefaultLoadPlanner":
        raise ValueError(f"the daemon plans this load: {type(planner).__name__} would not be asked")
    torch = _tensors.torch_module()
    if torch is None:
        raise errors.RequestRefused("optimizer state needs torch: import it first")
    checkpoint = getattr(storage_reader, "checkpoint_id", None) or getattr(storage_reader, "path", None) or storage_reader
    g = _hosts.group(process_group)
    ask = _ask.Ask(checkpoint, g, client, True, weights_only, verify, False, timeout)
    g.check("load", ask.text)
    ask.checkpoint = _hosts.one_source(g, checkpoint, client)
    specs: List[image.ChunkSpec] = []
    dp: Any = None
    name, c, plan = "", client, None
    failure: Optional[BaseException] = None
    try:
        specs, dp = _structure(model_state_dict)
        if g.rank == 0:
            place = _where.resolve(ask.checkpoint, client)
            c, name = place.client, _session.new_name()
            c.state_dicts.create(name, g.size, 1, lease_seconds=_ask.LEASE)
            plan = (c.url, name, place.object)
    except Exception as e:
        failure = e
    try:
        seen = g.agree((ask.text, optimizer_key, _group.place(), plan), failure)
        _ask.same_call(seen)
        url, name, source = seen[0][3]
        return _fetch(ask, specs, dp, optimizer_key, c or _ask.client_of(ask, url), name, source)
    finally:
        if g.rank == 0 and c is not None and name:
            for n in (name, name + ".optim"):
                _ask.remove(c, n)


def _structure(model: Mapping[str, Any]) -> Tuple[List[image.ChunkSpec], Any]:
    """The model's tensors as entries without elements, and the process group of the last nested one, as PyTorch takes it."""
    leaves, paths = _tree.flatten(model, _tensors.is_tensor)
    specs: List[image.ChunkSpec] = []
    dp = None
    for fqn, t in leaves.items():
        if not _tensors.is_tensor(t):
            continue
        sharded = type(t).__name__ == "ShardedTensor"
        shape = tuple(t.metadata().size) if sharded else tuple(t.shape)
        nested = _tensors.nesting(t) if sharded else _around_dtensor(t)
        dtype = _dtypes.torch_name(t.metadata().tensor_properties.dtype if sharded else t.dtype)
        for o in dict.fromkeys(nested) if nested else (None,):
            at = o.offsets if o else (0,) * len(shape)
            specs.append(image.ChunkSpec(fqn, dtype or "uint8", shape, at, (0,) * len(shape), o))
        if nested and sharded and type(t.local_shards()[0].tensor).__name__ == "ShardedTensor":
            dp = t.local_shards()[0].tensor._process_group
    return specs, dp


def _around_dtensor(t: Any) -> List[Any]:
    kind = type(getattr(t, "_local_tensor", None)).__name__
    if type(t).__name__ != "DTensor" or kind not in ("DTensor", "ShardedTensor"):
        return []
    return [image.Outer((0,) * t.dim(), tuple(t.shape), None, ("DTensor", kind))]


def _fetch(ask: Any, specs: List[image.ChunkSpec], dp: Any, key: str, c: Client, name: str, source: Mapping[str, str]) -> Dict[str, Any]:
    g = ask.group
    failure: Optional[BaseException] = None
    job: Any = None
    try:
        layout = image.Layout(specs, {})
        header = layout.header({})
        size = len(header) + layout.data_bytes
        r = c.state_dicts.reserve(name, g.rank, size, 1)
        model = image.Segment(r["segment"])
        model.map[:len(header)] = header
        model.close()
        c.state_dicts.seal(name, g.rank, 1, size)
    except Exception as e:
        failure = e
    g.agree(None, failure)
    if g.rank == 0:
        try:
            target = {"state_dict": name + ".optim", "lease_seconds": _ask.LEASE}
            job = dict(c.jobs.create("load", source=dict(source), target=target, options={"verify": "digest" if ask.verify else "none"},
                                     optimizer={"key": key, "model": {"state_dict": name}}))
        except Exception as e:
            job = e
    told = g.broadcast(_group._portable(job) if isinstance(job, BaseException) else job)
    out: Dict[str, Any] = {}
    try:
        if isinstance(told, BaseException):
            raise job if isinstance(job, BaseException) else told
        ask.wait(c, told["id"])
        slot = c.state_dicts.get(name + ".optim")["ranks"][g.rank]["slots"][0]
        out = _take(image.Segment(slot["segment"], "w", slot["image_bytes"]), ask, dp)
        failure = None
    except Exception as e:
        failure = e
    g.agree(None, failure)
    return out


def _take(segment: image.Segment, ask: Any, dp: Any) -> Dict[str, Any]:
    torch = _tensors.torch_module()
    parsed = image.parse(segment.map)
    base = torch.frombuffer(segment.map, dtype=torch.uint8)
    leaves: Dict[str, Any] = {}
    for e in parsed.entries:
        local = _tensors.torch_view(base, e.spec, e.begin)
        whole = e.spec.shape == e.spec.sizes
        n = 1
        for s in e.spec.shape:
            n *= s
        leaves[e.spec.fqn] = local if ask.group.size == 1 and whole and not _there() or n == 1 else _sharded(torch, e.spec, local, dp)
    for fqn, v in parsed.values.items():
        leaves[fqn] = values.decode(v, fqn, ask.weights_only)
    return _tree.nest((parsed.paths.get(f, [f]), v) for f, v in leaves.items())


def _there() -> bool:
    dist = _tensors.torch_module().distributed
    return bool(dist.is_available() and dist.is_initialized())


def _sharded(torch: Any, spec: image.ChunkSpec, local: Any, dp: Any) -> Any:
    """The ShardedTensor that PyTorch would make: in 1-D without the empty chunks at the end, in 2-D with them."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.distributed_c10d import _get_pg_default_device

    dist = torch.distributed
    pg = dp if dp is not None else dist.group.WORLD
    device = _get_pg_default_device(pg).type
    size = spec.outer.sizes if spec.outer else spec.shape
    at = tuple(a - b for a, b in zip(spec.offsets, spec.outer.offsets)) if spec.outer else spec.offsets
    if device != "cpu":
        local = local.to(torch.device(device, torch.get_device_module(device).current_device()))
    ranks, step = dist.get_process_group_ranks(pg), -(-size[0] // dist.get_world_size(pg))
    metadata, mine = [], []
    for i, rank in enumerate(ranks):
        start = min(i * step, size[0])
        box = [start] + [0] * (len(size) - 1), [min(step, size[0] - start), *size[1:]]
        if not box[1][0] and size[0] and dp is None:
            break
        number = "" if device == "cpu" else f":{rank % torch.get_device_module(device).device_count()}"
        metadata.append(ShardMetadata(*box, f"rank:{rank}/{device}{number}"))
        if rank == dist.get_rank():
            if (tuple(box[0]), tuple(box[1])) != (at, spec.sizes):
                raise errors.StateDictMismatch(f"{spec.fqn}: the daemon sent {at}+{spec.sizes}, this rank's part is {box[0]}+{box[1]}",
                                               fqn=spec.fqn)
            mine.append(Shard(local, metadata[-1]))
    properties = TensorProperties(dtype=local.dtype, layout=local.layout, requires_grad=False, memory_format=torch.contiguous_format,
                                  pin_memory=False)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, ShardedTensorMetadata(shards_metadata=metadata, size=torch.Size(size), tensor_properties=properties), process_group=pg)
