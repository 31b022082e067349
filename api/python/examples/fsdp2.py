"""FSDP2 over CPU ranks: a run that crashes, and one that goes on with another number of ranks.

    torchrun --nproc-per-node 4 fsdp2.py main:demo --steps 9 --crash-at 7
    torchrun --nproc-per-node 2 fsdp2.py main:demo --steps 9
"""
import argparse
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcpd


def latest(where):
    """The newest step saved so far, or None; the same on all ranks."""
    box = [None]
    if dist.get_rank() == 0:
        storage, _, name = where.partition(":")
        found = dcpd.connect().checkpoints.list(storage, prefix=f"{name}/step-")
        box = [max((int(c["name"].rsplit("-", 1)[1]) for c in found), default=None)]
    dist.broadcast_object_list(box)
    return box[0]


def batch(step, rank, world):
    """The same data whatever the number of ranks: each takes its part."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, 16, generator=g)
    return x.chunk(world)[rank]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("where", help="STORAGE:NAME")
    p.add_argument("--steps", type=int, default=9)
    p.add_argument("--every", type=int, default=3)
    p.add_argument("--crash-at", type=int)
    a = p.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 16))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    begin = 0
    found = latest(a.where)
    if found is not None:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcpd.load(f"{a.where}/step-{found}", into=state)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        begin = state["step"]
        if rank == 0:
            print(f"goes on from step {begin} on {world} ranks", flush=True)

    for step in range(begin + 1, a.steps + 1):
        loss = model(batch(step, rank, world)).pow(2).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % a.every == 0:
            m, o = get_state_dict(model, optim)
            dcpd.async_save({"model": m, "optim": o, "step": step}, f"{a.where}/step-{step}", step=step)
        if step == a.crash_at:
            os._exit(13)  # nothing is cleaned up: what was saved is dcpd's
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {a.steps}, loss {loss.item() / world:.6f}", flush=True)
    dcpd.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
