"""What the layout tests of the drop-in run on each rank: any writer, any reader, any way to hold the tensors; see on_ranks.py."""
import torch
import torch.distributed as dist
from on_dropin import quiet

__all__ = ["write_as", "read_as", "train_write", "train_read", "optimizer_state", "optimizer_state_2d"]
WIDE, TALL, FLAT, TINY, NONE = (4, 9), (7, 3), (11,), (2, 2), (0, 3)


def both():
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader, StorageWriter

    return {"ours": (StorageWriter, StorageReader), "theirs": (dcp.FileSystemWriter, dcp.FileSystemReader)}


def boxes(shape, dim, world, rank):
    """One box of a dim cut in uneven pieces: rank r gets r + 1 shares."""
    total = world * (world + 1) // 2
    cuts = [shape[dim] * (r * (r + 1) // 2) // total for r in range(world + 1)]
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = cuts[rank], cuts[rank + 1] - cuts[rank]
    return offsets, sizes


def sharded(pg, rank, full, own, fill):
    """A ShardedTensor of the boxes that this rank has."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardMetadata, init_from_local_shards

    shards = []
    for offsets, sizes in own:
        part = full
        for d, (a, n) in enumerate(zip(offsets, sizes)):
            part = part.narrow(d, a, n)
        data = part.clone() if fill else torch.full_like(part, -1)
        shards.append(Shard(data.contiguous(), ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu")))
    return init_from_local_shards(shards, *full.shape, process_group=pg)


def buffer(full, box, fill):
    offsets, sizes = box
    t = torch.full([n + 2 for n in sizes], -1.0)
    if fill:
        t[tuple(slice(1, n + 1) for n in sizes)] = full[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))]
    some = 0 not in sizes
    t.global_shape, t.global_offsets = tuple(full.shape), (tuple(offsets),) * some
    t.local_offsets, t.local_sizes = ((1,) * len(sizes),) * some, (tuple(sizes),) * some
    return t


def tensors(pg, rank, how, fill):
    """{name: how this rank holds it}, with the data or with -1."""
    import on_ranks
    from torch.distributed.tensor import Replicate, Shard

    world = dist.get_world_size(pg)
    full = {"wide": on_ranks.whole(WIDE, 1), "tall": on_ranks.whole(TALL, 2), "flat": on_ranks.whole(FLAT, 3),
            "tiny": on_ranks.whole(TINY, 4), "none": on_ranks.whole(NONE, 5), "scalar": torch.tensor(6.5)}
    if how == "plain":
        return full, {k: t.clone() if fill else torch.full_like(t, -1) for k, t in full.items()}
    if how == "view":  # targets and sources that are parts of something larger
        out = {}
        for k, t in full.items():
            base = torch.full([2 * n + 1 for n in t.shape] or [3], -1.0)
            view = base[tuple(slice(1, 2 * n + 1, 2) for n in t.shape)] if t.dim() else base[1]
            if fill:
                view.copy_(t)
            out[k] = view
        return full, out
    if how == "old":  # ShardedTensor: uneven rows, uneven columns, two boxes on one rank, a rank without any
        row = {k: [boxes(full[k].shape, 0, world, rank)] for k in ("tall", "flat")}
        row["wide"] = [boxes(WIDE, 1, world, rank)]
        row["tiny"] = [([0, 0], [1, 2]), ([1, 0], [1, 2])] if rank == world - 1 else []
        return full, {**{k: full[k].clone() if fill else torch.full_like(full[k], -1) for k in ("none", "scalar")},
                      **{k: sharded(pg, rank, full[k], [x for x in b if 0 not in x[1]], fill) for k, b in row.items()}}
    if how == "own":  # CheckpointableTensor: a buffer with a rim, and a box of the global tensor within it
        return full, {k: buffer(t, boxes(t.shape, 0, world, rank), fill) if k in ("wide", "tall", "flat") else
                      t.clone() if fill else torch.full_like(t, -1) for k, t in full.items()}
    rows, cols, both_ways = [Shard(0)], [Shard(1)], [Shard(0), Shard(1)]
    mesh, places = {"fsdp": ((world,), lambda n: rows if n else [Replicate()]),
                    "tp": ((world,), lambda n: cols if n > 1 else rows if n else [Replicate()]),
                    "hsdp": ((2, 2), lambda n: [Replicate(), *rows] if n else [Replicate()] * 2),
                    "2d": ((2, 2), lambda n: both_ways if n > 1 else [Replicate(), *rows] if n else [Replicate()] * 2),
                    "twice": ((2, 2), lambda n: rows * 2 if n else [Replicate()] * 2)}[how]
    return full, {k: on_ranks.distribute_tensor(t if fill else torch.full_like(t, -1), on_ranks.mesh_of(pg, mesh), places(t.dim()))
                  for k, t in full.items()}


def write_as(pg, rank, path, whose, how, asynchronous=False):
    import torch.distributed.checkpoint as dcp

    with quiet():
        _, sd = tensors(pg, rank, how, True)
        w = both()[whose][0](path)
        if not asynchronous:
            dcp.save({"m": sd}, storage_writer=w, process_group=pg)
            return
        f = dcp.async_save({"m": sd}, storage_writer=w, process_group=pg)
        for t in sd.values():
            parts = [s.tensor for s in t.local_shards()] if hasattr(t, "local_shards") else [t]
            for x in parts:
                x.zero_()
        f.result(60)


def read_as(pg, rank, path, whose, how):
    import torch.distributed.checkpoint as dcp

    with quiet():
        full, sd = tensors(pg, rank, how, False)
        held, want = dict(sd), tensors(pg, rank, how, True)[1]
        dcp.load({"m": sd}, storage_reader=both()[whose][1](path), process_group=pg)
    for k, t in sd.items():
        assert t is held[k], k
        if hasattr(t, "local_shards"):
            assert [torch.equal(a.tensor, b.tensor) for a, b in zip(t.local_shards(), want[k].local_shards())].count(False) == 0, (k, t)
        else:
            assert torch.equal(local(t), local(want[k])), (k, local(t), local(want[k]))
        if how == "view" and t._base is not None:
            untouched = t._base.clone()
            untouched[tuple(slice(1, 2 * n + 1, 2) for n in full[k].shape) if full[k].dim() else 1] = -1
            assert bool((untouched == -1).all()), k


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


# ---- models and optimizers ----


def train_write(pg, rank, path, whose, kind, mesh):
    import on_ranks
    import torch.distributed.checkpoint as dcp

    _, _, (m, o) = on_ranks.fsdp(pg, rank, kind, 0, mesh)
    with quiet():
        dcp.save({"model": m, "optim": o}, storage_writer=both()[whose][0](path), process_group=pg)
    return flat(pg, {"model": m, "optim": o})


def train_read(pg, rank, path, whose, kind, mesh):
    import on_ranks
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optim, (m, o) = on_ranks.fsdp(pg, rank, kind, 1, mesh)
    new = {"model": m, "optim": o}
    with quiet():
        dcp.load(new, storage_reader=both()[whose][1](path), process_group=pg)
        set_state_dict(model, optim, model_state_dict=new["model"], optim_state_dict=new["optim"])
    return flat(pg, new)


def whole_of(pg, t):
    """All of a tensor, on every rank of the group."""
    if not hasattr(t, "local_shards"):
        return t.full_tensor() if hasattr(t, "full_tensor") else t
    out = torch.zeros(t.size(), dtype=t.dtype)
    for s in t.local_shards():
        part = out
        for d, (a, n) in enumerate(zip(s.metadata.shard_offsets, s.metadata.shard_sizes)):
            part = part.narrow(d, a, n)
        part.copy_(s.tensor)
    dist.all_reduce(out, group=pg)
    return out


def flat(pg, tree):
    import on_ranks

    return {k: whole_of(pg, v).tolist() if isinstance(v, torch.Tensor) else v for k, v in on_ranks.walk(tree)}


def optimizer_state(pg, rank, path, whose_write, planner, ours):
    """load_sharded_optimizer_state_dict of an FSDP1 model: PyTorch's with dcpd's reader, and dcpd's own. It gives what was saved."""
    import on_ranks
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader
    from dcpd.torch import load_sharded_optimizer_state_dict as mine
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as theirs
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model, optim, _ = on_ranks.fsdp(pg, rank, "fsdp1", 0, None)
    with quiet():
        saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optim)}
        dcp.save(saved, storage_writer=both()[whose_write][0](path), process_group=pg)
        want = flat(pg, {"optimizer": saved["optimizer"]})
        other, optim2, _ = on_ranks.fsdp(pg, rank, "fsdp1", 1, None)
        given = {"given": dcp.DefaultLoadPlanner(), "none": None}[planner]
        call = {"ours": mine, "theirs": theirs}[ours]
        got = call(model_state_dict=other.state_dict(), optimizer_key="optimizer", storage_reader=StorageReader(path), planner=given)
        plain = theirs(other.state_dict(), "optimizer", dcp.FileSystemReader(path), None)
        assert flat(pg, got) == flat(pg, plain)
        flattened = FSDP.optim_state_dict_to_load(other, optim2, got["optimizer"])
        optim2.load_state_dict(flattened)
        again = flat(pg, {"optimizer": FSDP.optim_state_dict(other, optim2)})
    assert again == want, [k for k in want if again.get(k) != want[k]]
    return sorted(want)


def optimizer_state_2d(pg, rank, path, whose_write, planner, ours):
    """The same where the model's tensors are slices of tensor parallelism, cut again by FSDP: ShardedTensors of ShardedTensors. PyTorch
    takes ranks within a group for global ones here, so that both groups must be ranks 0 and 1."""
    import on_ranks
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader
    from dcpd.torch import load_sharded_optimizer_state_dict as mine
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as theirs
    from torch.distributed.tensor import Shard

    row, begin, mesh = 4 * rank, 6 * rank, on_ranks.mesh_of(pg, (2,))
    full = {"exp_avg": on_ranks.whole((8, 6), 1), "exp_avg_sq": on_ranks.whole((8, 6), 2)}
    state = {k: on_ranks.distribute_tensor(t, on_ranks.mesh_of(pg, (4,)), [Shard(1)]) for k, t in full.items()}
    with quiet():
        dcp.save({"optimizer": {"state": {"w": {**state, "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]}, "other": 1},
                 storage_writer=both()[whose_write][0](path), process_group=pg)
        if rank > 1:  # it loads by the group of all
            dcp.load_state_dict({}, StorageReader(path))
            return None
        weights, pg = torch.zeros(8, 6), mesh.get_group()
        inner = sharded(pg, rank, weights[row:row + 4], [([2 * rank, 0], [2, 6])], True)
        outer = sharded(pg, rank, weights, [([row, 0], [4, 6])], True)
        outer._local_shards[0].tensor = inner
        given = {"given": dcp.DefaultLoadPlanner(), "none": None}[planner]
        call = {"ours": mine, "theirs": theirs}[ours]
        got = call({"w": outer}, "optimizer", StorageReader(path), given)["optimizer"]
    for k, t in full.items():
        (shard,) = got["state"]["w"][k].local_shards()
        assert torch.equal(shard.tensor, t[begin:begin + 2]), k
    return float(got["state"]["w"]["step"]), got["groups"]
