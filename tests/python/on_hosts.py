"""What the tests of several hosts run on each rank: function(process group, rank, arguments…). Ranks 0 and 1 are on one, 2 and 3 on the
other."""
import os
import socket
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcpd
import on_ranks


def tensors(rank, seed=0, rows=8):
    """Cut over all, cut over hosts and replicated in them, replicated on all; values of all and of each."""
    mesh, grid = on_ranks.MESHES[(4,), None], on_ranks.MESHES[(2, 2), None]
    return {"a": distribute_tensor(on_ranks.whole((rows, 6), seed), mesh, [Shard(0)]),
            "b": distribute_tensor(on_ranks.whole((5, 7), seed + 1), grid, [Shard(1), Replicate()]),
            "c": distribute_tensor(on_ranks.whole((3, 3), seed + 2), mesh, [Replicate()]),
            "plain": on_ranks.whole((4, 2), seed + 3), f"own{rank}": on_ranks.whole((2,), rank),
            "step": seed, "opt": {"betas": (0.9, 0.99), f"only{rank}": rank}}


def where(pg, rank):
    from dcpd import _hosts

    g = _hosts.group(pg)
    return socket.gethostname(), type(g).__name__, g.rank, g.size, g.first, os.stat("/dev/shm").st_dev


def save(pg, rank, ref, seed=0, rows=8, overwrite=False):
    began = time.monotonic()
    ref = ref[rank] if isinstance(ref, list) else ref
    job = dcpd.save({"m": tensors(rank, seed, rows)}, ref, process_group=pg, overwrite=overwrite)
    return job["state"], job["result"].get("divergent"), time.monotonic() - began


def load(pg, rank, ref, seed=0, rows=8):
    want, got = tensors(rank, seed, rows), tensors(rank, seed + 500, rows)
    dcpd.load(ref, into={"m": got}, process_group=pg)
    for k, v in want.items():
        a, b = (getattr(x, "to_local", lambda x=x: x)() for x in (got[k], v))
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (k, a, b)
    return sorted(got)


def load_new(pg, rank, ref):
    return {k: v for k, v in dcpd.load(ref, process_group=pg)["m"].items() if not isinstance(v, torch.Tensor)}


def stock(pg, rank, path, seed=0):
    """PyTorch's own reader, on every rank."""
    import torch.distributed.checkpoint as dcp

    want, got = tensors(rank, seed), tensors(rank, seed + 500)
    state = {"m": got}
    dcp.load(state, checkpoint_id=path, process_group=pg)
    for k, v in want.items():
        if isinstance(v, torch.Tensor):
            a, b = (getattr(x, "to_local", lambda x=x: x)() for x in (state["m"][k], v))
            assert torch.equal(a, b), k
    assert state["m"]["step"] == seed and state["m"]["opt"][f"only{rank}"] == rank


def steps(pg, rank, ref, n):
    """async_save again and again; the tensors change as soon as it is back."""
    sd = {"m": tensors(rank, 0, 64)}
    futures = []
    for i in range(n):
        sd["m"]["plain"].fill_(i)
        sd["m"]["step"] = i
        futures.append(dcpd.async_save(sd, f"{ref}-{i}", process_group=pg, step=i))
        sd["m"]["plain"].fill_(-1)
    return [f.result(30)["state"] for f in futures]


def fsdp(pg, rank, ref, save):
    """A model and its optimizer, sharded by FSDP2 over both hosts."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0 if save else 1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=on_ranks.MESHES[(4,), None])
    opt = torch.optim.AdamW(model.parameters(), lr=0.1 if save else 0.2)
    if save:
        model(torch.ones(2, 6)).sum().backward()
        opt.step()
        return dcpd.save({"model": model, "opt": opt}, ref, process_group=pg)["state"]
    dcpd.load(ref, into={"model": model, "opt": opt}, process_group=pg)
    return {k: v.full_tensor() for k, v in model.state_dict().items()}, opt.param_groups[0]["lr"]


def diverge(pg, rank, ref, how):
    t = torch.zeros(4)
    t[0] = rank // 2   # the hosts differ, the ranks of one do not
    return dcpd.save({"t": t, "same": torch.ones(3)}, ref, process_group=pg, on_divergence=how)["result"]["divergent"]


def begin(pg, rank, ref):
    """A save whose future is kept for `end`."""
    state = {"m": tensors(rank, 9), f"big{rank}": torch.ones(16 << 20 if rank > 1 else 1)}
    on_ranks.HELD = dcpd.async_save(state, ref, process_group=pg, overwrite=True)
    return on_ranks.HELD.job_id


def end(pg, rank):
    began = time.monotonic()
    try:
        return on_ranks.HELD.result(60)["state"], time.monotonic() - began
    except Exception as e:
        return e, time.monotonic() - began


def seal_and_leave(pg, rank, ref):
    """As a trainer does that dies between its seal and the job: nobody renews the lease any more."""
    from dcpd import _save, _session

    def leave(session, *_):
        for k in [k for k, v in _session._sessions.items() if v is session]:
            del _session._sessions[k]

    old = _save._submit, _session.LEASE_SECONDS
    _save._submit, _session.LEASE_SECONDS = leave, 1
    try:
        assert dcpd.async_save({"m": tensors(rank, 6)}, ref, process_group=pg, slots=3) is None
    finally:
        _save._submit, _session.LEASE_SECONDS = old


def dropin_save(pg, rank, ref, seed=0, wait="", **more):
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    state = {"m": tensors(rank, seed)}
    ref = ref[rank] if isinstance(ref, list) else ref
    if wait == "async":
        dcp.async_save(state, storage_writer=StorageWriter(ref), process_group=pg).result()
    else:
        dcp.save(state, storage_writer=StorageWriter(ref), process_group=pg)


def dropin_load(pg, rank, ref, seed=0):
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader

    want, got = tensors(rank, seed), tensors(rank, seed + 500)
    dcp.load({"m": got}, storage_reader=StorageReader(ref), process_group=pg)
    for k, v in want.items():
        if isinstance(v, torch.Tensor):
            a, b = (getattr(x, "to_local", lambda x=x: x)() for x in (got[k], v))
            assert torch.equal(a, b), k
    assert got["step"] == seed


def collect(pg, rank):
    import gc

    gc.collect()


def dropin_cached(pg, rank, ref, n):
    """Plans that PyTorch keeps from one save to the next."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    for i in range(n):
        dcp.save({"m": {k: v for k, v in tensors(rank, i).items() if isinstance(v, torch.Tensor)}}, process_group=pg,
                 storage_writer=StorageWriter(f"{ref}-{i}"), planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
