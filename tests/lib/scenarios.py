"""What the ranks do in the interop tests: PyTorch's own saves and loads, as its file-system checkpoint tests use them.

Runs inside a rank of lib/ranks.py. Every load starts from a target that holds other values, and says so if it does not.
"""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

# Boxes as (rank, offsets, sizes); dim and ranks for chunks: one description for PyTorch, for dcpd and for images.
LAYOUTS = {
    "rows on 0,1": ("chunks", 0, [0, 1]),
    "columns on 0,1": ("chunks", 1, [0, 1]),
    "rows on 0,1,1,0": ("chunks", 0, [0, 1, 1, 0]),
    "boxes of 2,1,3,3,1 rows": ("boxes", [(0, [0, 0], [2, 20]), (1, [2, 0], [1, 20]), (0, [3, 0], [3, 20]),
                                          (1, [6, 0], [3, 20]), (0, [9, 0], [1, 20])]),
    "boxes of 8 and 2 rows on 1,0": ("boxes", [(1, [0, 0], [8, 20]), (0, [8, 0], [2, 20])]),
}
LAYOUTS_32 = {
    "2 chunks": ("chunks", 0, [0, 1]),
    "4 chunks": ("chunks", 0, [0, 1, 0, 1]),
    "boxes 8/24": ("boxes", [(0, [0], [8]), (1, [8], [24])]),
    "boxes 10/22": ("boxes", [(0, [0], [10]), (1, [10], [22])]),
}


def boxes(layout, shape):
    """[(rank, offsets, sizes)]: chunks are cut as torch.chunk cuts."""
    if layout[0] == "boxes":
        return layout[1]
    _, dim, ranks = layout
    step, out = -(-shape[dim] // len(ranks)), []
    for i, r in enumerate(ranks):
        off, size = [0] * len(shape), list(shape)
        off[dim] = min(i * step, shape[dim])
        size[dim] = min(step, shape[dim] - off[dim])
        out.append((r, off, size))
    return out


def rule(layout, match="*"):
    """The same layout in dcpd's words."""
    if layout is None:
        return {"match": match, "placements": ["Replicate()"]}
    if layout[0] == "chunks":
        return {"match": match, "chunks": {"dim": layout[1], "ranks": layout[2]}}
    return {"match": match, "boxes": [{"rank": r, "offsets": o, "sizes": s} for r, o, s in layout[1]]}


def full(shape, salt=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + salt))


def make(layout, shape, source=None):
    """A ShardedTensor of this layout (None: a plain tensor), cut from `source` or full of other values."""
    if layout is None:
        return source.clone() if source is not None else torch.full(shape, -7.0)
    if layout[0] == "chunks":
        spec = ChunkShardingSpec(dim=layout[1], placements=[f"rank:{r}/cpu" for r in layout[2]])
    else:
        spec = EnumerableShardingSpec([ShardMetadata(shard_offsets=o, shard_sizes=s, placement=f"rank:{r}/cpu")
                                       for r, o, s in layout[1]])
    st = sharded_tensor.full(spec, shape, -7.0)
    if source is not None:
        for shard in st.local_shards():
            shard.tensor.copy_(part(source, shard.metadata.shard_offsets, shard.metadata.shard_sizes))
    return st


def part(t, offsets, sizes):
    return t[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]


def equal(t, source):
    if isinstance(t, torch.Tensor) and not hasattr(t, "local_shards"):
        return same(t, source)
    return all(same(s.tensor, part(source, s.metadata.shard_offsets, s.metadata.shard_sizes)) for s in t.local_shards())


def same(a, b):
    """Bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.contiguous().numpy().tobytes()


def save(sd, path, thread_count=1, api="new", no_dist=False):
    writer = dcp.FileSystemWriter(path, thread_count=thread_count)
    if api == "legacy":
        dcp.save_state_dict(state_dict=sd, storage_writer=writer, no_dist=no_dist)
    elif no_dist:
        dcp.save(sd, storage_writer=writer, no_dist=True)
    else:
        dcp.save(sd, storage_writer=writer)


def load(sd, path, api="new", no_dist=False):
    reader = dcp.FileSystemReader(path)
    if api == "legacy":
        dcp.load_state_dict(state_dict=sd, storage_reader=reader, no_dist=no_dist)
    elif no_dist:
        dcp.load(sd, storage_reader=reader, no_dist=True)
    else:
        dcp.load(sd, storage_reader=reader)


def save_sharded(jobs, shape, thread_count, api, name="sharded"):
    """jobs: [(path, layout)]"""
    for path, layout in jobs:
        save({name: make(layout, shape, full(shape))}, path, thread_count, api)


def load_sharded(jobs, shape, api, name="sharded"):
    """Each path into each layout, bit for bit."""
    for path, layout in jobs:
        t = make(layout, shape)
        assert not equal(t, full(shape)) or not getattr(t, "local_shards", lambda: [1])(), "the target is equal before the load"
        load({name: t}, path, api)
        assert equal(t, full(shape)), f"{path}: differs from what was saved ({layout})"


def dtensor_of(whole, mesh, placements):
    """`placements` as text; every rank cuts its own part."""
    places = [eval(p, {"Shard": Shard, "Replicate": Replicate, "_StridedShard": _StridedShard}) for p in placements]
    return distribute_tensor(whole, init_device_mesh("cpu", tuple(mesh)), places, src_data_rank=None)


def dtensor_save(path, shapes, mesh, placements):
    save({k: dtensor_of(full(s, i), mesh, placements) for i, (k, s) in enumerate(shapes.items())}, path)


def dtensor_load(paths, shapes, mesh, placements):
    """Each path into DTensors of this layout, bit for bit."""
    for path in paths:
        sd = {k: dtensor_of(torch.full(s, -7.0), mesh, placements) for k, s in shapes.items()}
        load(sd, path)
        for i, (k, s) in enumerate(shapes.items()):
            want = dtensor_of(full(s, i), mesh, placements).to_local()
            assert same(sd[k].to_local(), want), f"{path}: {k} differs from what was saved"


class Module(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear_1 = torch.nn.Linear(5, 5)
        self.linear_2 = torch.nn.Linear(5, 1)
        self.emb = torch.nn.EmbeddingBag(5, 10)
        self.register_buffer("steps", torch.tensor(seed))


def module_save(path, thread_count, api, no_dist):
    save(Module(1).state_dict(), path, thread_count, api, no_dist)


def module_load(path, api, no_dist):
    want, target = Module(1).state_dict(), Module(2)
    sd = target.state_dict()
    for k in sd:
        assert not same(sd[k], want[k]), f"{k}: equal before the load"
    load(sd, path, api, no_dist)
    target.load_state_dict(sd)
    for k, v in target.state_dict().items():
        assert same(v, want[k]), f"{k}: differs"


def module_content():
    """For images: {fqn: (safetensors dtype, shape, bytes)}"""
    names = {torch.float32: "F32", torch.int64: "I64"}
    return {k: (names[v.dtype], list(v.shape), v.numpy().tobytes()) for k, v in Module(1).state_dict().items()}


def values_save(path, thread_count, api, no_dist=False):
    save({"bytes0": [1], "bytes1": "string"}, path, thread_count, api, no_dist)


def values_load(path, api, no_dist=False):
    sd = {"bytes0": [2], "bytes1": "other"}
    load(sd, path, api, no_dist)
    assert sd == {"bytes0": [1], "bytes1": "string"}, sd


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


# For the bench: each rank keeps its state dict between calls, so that pages are touched before a clock starts.
STATE = {}


def bench_state(tensors, mib):
    """Row-wise sharded int64 tensors over the world, as tests/tools/fill.c makes them."""
    world, rows = dist.get_world_size(), mib * 32
    layout = ("chunks", 0, list(range(world)))
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in layout[2]])
    STATE.clear()
    for t in range(tensors):
        STATE[f"layers.{t}.weight"] = sharded_tensor.full(spec, (rows, 4096), t + 1, dtype=torch.int64)


def bench_save(path):
    return timed(lambda: dcp.save(STATE, storage_writer=dcp.FileSystemWriter(path, overwrite=True)))


def bench_load(path):
    return timed(lambda: dcp.load(STATE, storage_reader=dcp.FileSystemReader(path)))


def timed(what):
    import time

    dist.barrier()
    start = time.monotonic()
    what()
    dist.barrier()
    return time.monotonic() - start


def bench_plan(chunks, ranks, path):
    """PyTorch's global plan, and its `.metadata`, for as many chunks: seconds."""
    import pickle
    import time

    from torch.distributed.checkpoint import default_planner, metadata, planner

    props = metadata.TensorProperties(dtype=torch.bfloat16)
    tensors = chunks // ranks
    plans = []
    for r in range(ranks):
        items = []
        for t in range(tensors):
            fqn, off = f"model.layers.{t}.attention.weight", torch.Size((4 * r, 0))
            items.append(planner.WriteItem(
                metadata.MetadataIndex(fqn, off), planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(metadata.ChunkStorageMetadata(off, torch.Size((4, 16))), props,
                                                    torch.Size((ranks * 4, 16)))))
        plans.append(planner.SavePlan(items, planner_data={f"model.layers.{t}.attention.weight": ("x",) for t in range(tensors)}))
    p = default_planner.DefaultSavePlanner()
    p.set_up_planner({}, is_coordinator=True)
    start = time.monotonic()
    _, md = p.create_global_plan(plans)
    planned = time.monotonic()
    md.storage_data = {i: None for i in range(0)}
    with open(path, "wb") as f:
        pickle.dump(md, f)
    return planned - start, time.monotonic() - planned
