"""Gloo through PyTorch, for the bench rows of the collectives: runs inside a rank of lib/ranks.py. Buffers are touched before the clock
starts; a rank gives (seconds, CPU seconds) per run, the collective's time being the slowest rank's."""
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def timed(fn, runs):
    out = []
    for i in range(runs + 1):
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        fn()
        wall = time.perf_counter() - wall
        dist.barrier()
        if i:  # the first one warms up
            out.append((wall, time.process_time() - cpu))
    return out


def collective(op, size, runs):
    me, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((size,), me + 1, dtype=torch.uint8)
    if op == "all_gather":
        out = torch.zeros(size * world, dtype=torch.uint8)
        times = timed(lambda: dist.all_gather_into_tensor(out, mine), runs)
        assert all(out[size * r] == r + 1 and out[size * (r + 1) - 1] == r + 1 for r in range(world))
        return times
    if op == "broadcast":
        times = timed(lambda: dist.broadcast(mine, src=0), runs)
        assert mine[0] == 1 and mine[-1] == 1
        return times
    if op == "gather":
        out = [torch.zeros(size, dtype=torch.uint8) for _ in range(world)] if me == 0 else None
        return timed(lambda: dist.gather(mine, out, dst=0), runs)
    assert op == "redistribute"
    cols = 64 * world
    rows = max(world, size * world // (4 * cols))
    d = DTensor.from_local(torch.full((rows // world, cols), float(me)), init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False)
    return timed(lambda: d.redistribute(d.device_mesh, [Shard(1)]).to_local(), runs)
