"""What the tests run on each rank: function(process group, rank, arguments…)."""
import threading
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcpd
from dcpd import client as C
from on_dropin import *  # noqa: F403
from on_faults import *  # noqa: F403
from on_layouts import *  # noqa: F403


def whole(shape, seed=0, dtype=torch.float32):
    n = 1
    for s in shape:
        n *= s
    return (torch.arange(n, dtype=torch.float64) + seed * 1000).reshape(shape).to(dtype)


MESHES = {}


def make_meshes(groups):
    """All there are, by all ranks: making one is a collective of the whole world, also for a mesh of two. Those of one shape share their
    process groups, because each gloo group has a thread that wakes up a hundred times a second. groups: by world size; None: all ranks"""
    for n in (4, 2):
        for names in (None, ("tp",), ("s",)):
            if dist.get_rank() < n <= dist.get_world_size():
                MESHES[(n,), names] = DeviceMesh.from_group(groups[n] or dist.group.WORLD, "cpu", mesh_dim_names=names)
    if dist.get_world_size() >= 4:
        grid = MESHES[(2, 2), None] = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        for names in (("dp", "tp"), ("r", "s")):
            MESHES[(2, 2), names] = DeviceMesh.from_group(grid.get_all_groups(), "cpu", mesh=grid.mesh, mesh_dim_names=names)


def mesh_of(pg, shape, names=None):
    """None: this rank is not in it."""
    return MESHES.get((shape, names))


def placed(pg, shape, mesh, placements, seed=0):
    return distribute_tensor(whole(shape, seed), mesh_of(pg, mesh), placements)


def save_tensors(pg, rank, ref, specs, replicated=True):
    """specs: {fqn: (shape, mesh, placements)}"""
    sd = {k: placed(pg, *s, seed=i) for i, (k, s) in enumerate(specs.items())}
    sd["plain"] = whole((3, 2), 99)
    sd["value"] = {"step": 7, "betas": (0.9, 0.99)}
    job = dcpd.save({"m": sd}, ref, process_group=pg)
    return job["state"], job.get("result", {}).get("divergent")


def load_tensors(pg, rank, ref, specs):
    sd = {k: distribute_tensor(torch.zeros(s[0]), mesh_of(pg, s[1]), s[2]) for k, s in specs.items()}
    sd["plain"] = torch.zeros(3, 2)
    sd["value"] = {"step": 0, "betas": ()}
    dcpd.load(ref, into={"m": sd}, process_group=pg)
    for i, (k, s) in enumerate(specs.items()):
        want = distribute_tensor(whole(s[0], i), mesh_of(pg, s[1]), s[2])
        assert torch.equal(sd[k].to_local(), want.to_local()), (k, sd[k].to_local(), want.to_local())
    assert torch.equal(sd["plain"], whole((3, 2), 99)) and sd["value"] == {"step": 7, "betas": (0.9, 0.99)}


def default_device(pg, rank, ref, path):
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader, StorageWriter

    def state(x, cut):
        sd = {"t": x.t(), "empty": torch.full((0, 3), 1.)}
        return {**sd, "cut": distribute_tensor(x, mesh_of(pg, (2,)), [Shard(0)]), "value": {"a": rank}} if cut else sd

    full, zero = whole((512, 640)), torch.zeros(512, 640)
    mine, into = state(full, True), state(zero, True)
    plain, again = state(full, False), state(zero.clone(), False)  # PyTorch's planner cannot cut DTensors there
    with torch.device("meta"):
        dcpd.save(mine, ref, process_group=pg)
        dcpd.async_save(mine, ref + "-async", process_group=pg).result()
        dcpd.load(ref + "-async", into=into, process_group=pg)
        got = dcpd.load(ref, process_group=pg)
        with dcpd.open(ref) as c:
            assert c["empty"][:].device.type == c["t"][:2].device.type == "cpu"
        dcp.save(plain, storage_writer=StorageWriter(path), process_group=pg)
        dcp.load(again, storage_reader=StorageReader(path), process_group=pg)
    assert into["value"] == got["value"] == {"a": 0} and got["empty"].shape == (0, 3) and torch.equal(got["cut"], full)
    assert torch.equal(into["cut"].to_local(), full[256 * rank:256 * (rank + 1)])
    return all(torch.equal(x["t"], full.t()) for x in (into, again, got))


def load_older(pg, rank, ref, strict):
    """Rank 0 asks for the parts of what was stored whole, rank 1 for the whole; strict: which rank says so."""
    groups = [dict.fromkeys(("lr", "betas", "eps", "params", "foreach", "maximize"))]
    sd = {"optim": {"state": {1: {"step": torch.tensor(0.0)}}, "param_groups": groups}} if rank == 0 else {"optim": {"param_groups": None}}
    dcpd.load(ref, into=sd, process_group=pg, strict=strict == "both" or strict == str(rank))
    return sd if rank == 0 else {"groups": sd["optim"]["param_groups"]}


def load_whole(pg, rank, ref, specs):
    got = dcpd.load(ref, process_group=pg)["m"]
    for i, (k, s) in enumerate(specs.items()):
        assert torch.equal(got[k], whole(s[0], i)), k
    got["plain"] += rank  # nobody else's
    dist.barrier(group=pg)
    assert torch.equal(got["plain"], whole((3, 2), 99) + rank)
    return sorted(got)


def boxes_of(pg, rank, shape, mesh, placements):
    """(ours, PyTorch's own split of a tensor of indices)"""
    from dcpd import _tensors

    t = placed(pg, shape, mesh, placements)
    _, _, parts = _tensors.torch_parts("t", t)
    ref = whole(shape)
    for offsets, sizes, local in parts:
        box = ref
        for d, (a, n) in enumerate(zip(offsets, sizes)):
            box = box.narrow(d, a, n)
        assert torch.equal(box, local), (offsets, sizes)
    return sum(p[2].numel() for p in parts), t.to_local().numel()


def strided(pg, rank, ref, rows, save):
    """FSDP2 over tensor parallelism on one dim, and a strided placement with gaps."""
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = mesh_of(pg, (2, 2), ("dp", "tp"))
    full = whole((rows, 3))
    tp = distribute_tensor(full, mesh["tp"], [Shard(0)])
    local = tp.to_local()
    mine = list(torch.chunk(local, 2)) + [local[:0]]
    part = mine[mesh["dp"].get_local_rank()].clone()
    t = DTensor.from_local(part if save else torch.zeros_like(part), mesh, [_StridedShard(0, split_factor=2), Shard(0)],
                           run_check=False, shape=full.shape, stride=full.stride())
    if save:
        return dcpd.save({"t": t}, ref, process_group=pg)["state"]
    dcpd.load(ref, into={"t": t}, process_group=pg)
    assert torch.equal(t.to_local(), part)
    return None


def gaps(pg, rank, ref, save):
    """A strided placement alone: each rank owns several runs of rows, which PyTorch's one box cannot say."""
    from torch.distributed.tensor.placement_types import _StridedShard

    full = whole((16, 2))
    world = dist.get_world_size(pg)
    rows = torch.cat([torch.chunk(half, world)[rank] for half in torch.chunk(full, 2)])
    t = DTensor.from_local(rows.clone() if save else torch.zeros_like(rows), mesh_of(pg, (world,)), [_StridedShard(0, split_factor=2)],
                           run_check=False, shape=full.shape, stride=full.stride())
    if save:
        return dcpd.save({"t": t}, ref, process_group=pg)["state"]
    dcpd.load(ref, into={"t": t}, process_group=pg)
    assert torch.equal(t.to_local(), rows)
    return None


def sharded_tensors(pg, rank, ref, save):
    """ShardedTensor of the older API: column-wise, and one rank with two shards."""
    from torch.distributed._shard.sharded_tensor import Shard as OldShard, init_from_local_shards
    from torch.distributed._shard.sharded_tensor import ShardMetadata

    world = dist.get_world_size(pg)
    full, full2 = whole((4, 2 * world)), whole((world + 1, 3), 5)

    def make(box, t):
        (r0, c0), (r, c) = box
        data = t[r0:r0 + r, c0:c0 + c].clone() if save else torch.zeros(r, c)
        return OldShard(data, ShardMetadata([r0, c0], [r, c], f"rank:{rank}/cpu"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = init_from_local_shards([make(((0, 2 * rank), (4, 2)), full)], 4, 2 * world, process_group=pg)
        own = [((rank, 0), (1, 3))] + ([((world, 0), (1, 3))] if rank == 0 else [])
        b = init_from_local_shards([make(x, full2) for x in own], world + 1, 3, process_group=pg)
    if save:
        return dcpd.save({"a": a, "b": b}, ref, process_group=pg)["state"]
    dcpd.load(ref, into={"a": a, "b": b}, process_group=pg)
    assert torch.equal(a.local_shards()[0].tensor, full[:, 2 * rank:2 * rank + 2])
    for s, x in zip(b.local_shards(), own):
        assert torch.equal(s.tensor, full2[x[0][0]:x[0][0] + 1])
    return None


def fsdp(pg, rank, kind, seed, mesh_shape):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3, bias=False))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = mesh_of(pg, mesh_shape, ("r", "s")[-len(mesh_shape):])
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FullyShardedDataParallel(model, process_group=pg, device_id=torch.device("cpu"), use_orig_params=True)
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        torch.manual_seed(100 + step)
        model(torch.randn(4, 6)).pow(2).sum().backward()
        optim.step()
        optim.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, optim, get_state_dict(model, optim)


def full(t):
    if isinstance(t, DTensor):
        return t.full_tensor()
    if type(t).__name__ == "ShardedTensor":
        out = torch.zeros(t.size()) if dist.get_rank() == 0 else None
        t.gather(0, out)
        box = [out]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    return t


def walk(tree, path=()):
    for k, v in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(v, (dict, list)):
            yield from walk(v, (*path, str(k)))
        else:
            yield ".".join((*path, str(k))), v


def fsdp_save(pg, rank, ref, kind, mesh_shape):
    _, _, (m, o) = fsdp(pg, rank, kind, 0, mesh_shape)
    job = dcpd.async_save({"model": m, "optim": o}, ref, process_group=pg, step=2).result(60)
    out = {k: full(v).tolist() if isinstance(v, torch.Tensor) else v for k, v in walk({"model": m, "optim": o})}
    return job["state"], out


def fsdp_load(pg, rank, ref, kind, mesh_shape):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optim, (m, o) = fsdp(pg, rank, kind, 1, mesh_shape)
    dcpd.load(ref, into={"model": m, "optim": o}, process_group=pg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_state_dict(model, optim, model_state_dict=m, optim_state_dict=o)
    return {k: full(v).tolist() if isinstance(v, torch.Tensor) else v for k, v in walk({"model": m, "optim": o})}


def pytorch_save(pg, rank, path, specs):
    import torch.distributed.checkpoint as dcp

    sd = {k: placed(pg, *s, seed=i) for i, (k, s) in enumerate(specs.items())}
    sd["plain"] = whole((3, 2), 99)
    sd["value"] = {"step": 7, "betas": (0.9, 0.99)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"m": sd}, checkpoint_id=path, process_group=pg)


def pytorch_load(pg, rank, path, specs):
    import torch.distributed.checkpoint as dcp

    sd = {k: distribute_tensor(torch.zeros(s[0]), mesh_of(pg, s[1]), s[2]) for k, s in specs.items()}
    sd["plain"] = torch.zeros(3, 2)
    sd["value"] = {"step": 0, "betas": ()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"m": sd}, checkpoint_id=path, process_group=pg)
    for i, (k, s) in enumerate(specs.items()):
        want = distribute_tensor(whole(s[0], i), mesh_of(pg, s[1]), s[2])
        assert torch.equal(sd[k].to_local(), want.to_local()), k
    assert torch.equal(sd["plain"], whole((3, 2), 99)) and sd["value"] == {"step": 7, "betas": (0.9, 0.99)}


def save_each(pg, rank, refs, objects, options=None):
    """Every rank with arguments of its own: what they raise is what is tested."""
    x = objects[rank]
    if x == "lambda":
        x = {"bad": lambda: 1}
    return dcpd.save(x, refs[rank], process_group=pg, **(options or [{}] * 9)[rank])["state"]


def load_each(pg, rank, refs, targets):
    t = {k: torch.zeros(v) for k, v in targets[rank].items()}
    dcpd.load(refs[rank], into=t, process_group=pg)
    return {k: v.sum().item() for k, v in t.items()}


def alone(pg, rank, ref):
    """no_dist: each rank by itself, at its own time."""
    time.sleep(0.05 * rank)
    dcpd.save({"r": rank, "t": torch.full((3,), float(rank))}, f"{ref}-{rank}", no_dist=True)
    got = dcpd.load(f"{ref}-{rank}", no_dist=True)
    return got["r"], got["t"].tolist()


def many_steps(pg, rank, ref, n):
    """More saves than slots, each of other data; none is lost, and the tensors go on changing meanwhile."""
    t = torch.full((1 << 18,), float(rank))
    handles = []
    for i in range(n):
        handles.append(dcpd.async_save({f"t{rank}": t, "step": i}, f"{ref}-{i}", process_group=pg, step=i))
        t += 10
    return [h.result(60)["state"] for h in handles]


def busy(pg, rank, ref, mode):
    """Mode "fail": no rank hears of the end of the first save before the second is asked for."""
    t, heard, real = torch.ones(1 << 10), threading.Event(), C.Jobs.wait
    if mode == "fail":
        C.Jobs.wait = lambda *args, **kw: heard.wait(60) and real(*args, **kw)
    try:
        handles = [dcpd.async_save({f"t{rank}": t}, f"{ref}-{i}", process_group=pg, when_busy=mode, slots=1) for i in range(2)]
    finally:
        C.Jobs.wait = real
        heard.set()
    return [h.result(60)["state"] for h in handles]


def let_go(pg, rank):
    dist.barrier()
    dcpd.close()
    dist.barrier()


def in_groups(pg, rank, least, f, *args):
    """f with groups of `least` bytes in load(into=)."""
    from dcpd import _into

    before, _into.GROUP_MIN = _into.GROUP_MIN, least
    try:
        return f(pg, rank, *args)
    finally:
        _into.GROUP_MIN = before


def load_some(pg, rank, ref, wishes):
    """wishes: for each rank {name: shape} of whole tensors under "m"."""
    sd = {"m": {k: torch.full(tuple(s), -1.0) for k, s in wishes[rank].items()}}
    dcpd.load(ref, into=sd, process_group=pg)
    assert not any(t.eq(-1).any() for t in sd["m"].values())
    return sorted(sd["m"])


def resume(pg, rank, run):
    """What each rank goes on from, and with which tensors; of a first start None."""
    model = {"w": distribute_tensor(torch.full((8, 4), -1.0), mesh_of(pg, (2,)), [Shard(0)]), "step": -1}
    r = dcpd.resume(run, into=model, process_group=pg)
    return r and (tuple(r)[:2], [s["name"] for s in r.skipped], model["w"].full_tensor().unique().tolist(), model["step"])


def publish_and_serve(pg, rank, name, tp_from, tp_to):
    """The first tp_from ranks publish, the first tp_to serve; each compares with what distribute_tensor makes of the whole."""
    import contextlib

    def cut(n, seed):
        full = whole((8, 6), seed), whole((5,), seed + 1)
        if n == 1:
            return {"w": full[0], "v": full[1], "step": seed}
        mesh = mesh_of(pg, (n,))
        return {"w": distribute_tensor(full[0], mesh, [Shard(1)]), "v": distribute_tensor(full[1], mesh, [Replicate()]), "step": seed}

    alone = {"no_dist": True}
    two = {"process_group": pg}
    serving, publishing = rank < tp_to, rank < tp_from
    into = cut(tp_to, 900) if serving else None
    with contextlib.ExitStack() as stack:
        sub = stack.enter_context(dcpd.subscribe(name, into=into, timeout=60, **(two if tp_to > 1 else alone))) if serving else None
        for seed in (1, 2):
            if publishing:
                pub = dcpd.publish(cut(tp_from, seed), name, version=seed, **(two if tp_from > 1 else alone))
            if serving:
                assert next(sub).version == seed
                for k, t in cut(tp_to, seed).items():
                    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (into[k], t))
                    assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (k, a, b)
    if rank == 0:
        pub.wait(60)
        pub.delete()
    return "same"
