"""What tests/api/test_spread_ranks.py runs on each rank: function(process group, rank, arguments…). Every rank is on a host of its own."""
import hashlib
import importlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcpd


def plainly(pg, rank, module, name, *args):
    """The function's result; its exception as one that every process can read."""
    try:
        return getattr(importlib.import_module(module), name)(pg, rank, *args)
    except BaseException as e:  # PyTorch raises such
        raise RuntimeError(f"{type(e).__name__}: {e}") from None


def digest(x):
    return hashlib.sha256(x if isinstance(x, bytes) else x.contiguous().numpy().tobytes()).hexdigest()


def new(pg, rank, ref, rows, spread=None):
    return digest(dcpd.load(ref, process_group=pg, spread=spread)["w"])


def replicas(pg, rank, ref, rows):
    """Data parallel: every rank has all of it."""
    into = {"w": torch.zeros(rows, 1024)}
    dcpd.load(ref, into=into, process_group=pg)
    return digest(into["w"])


def sharded(pg, rank, ref, rows):
    into = {"w": distribute_tensor(torch.zeros(rows, 1024), init_device_mesh("cpu", (3,)), [Shard(0)])}
    dcpd.load(ref, into=into, process_group=pg)
    return digest(into["w"].to_local())


def insists(pg, rank, ref):
    """A process by itself is on no several hosts."""
    try:
        dcpd.load(ref, no_dist=True, spread=True)
    except dcpd.errors.DcpdError as e:
        return type(e).__name__
    return "loaded"
