"""What PyTorch's placements leave on each rank of a mesh, worked out in one process with their own split functions."""
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard


def coordinates(mesh):
    """Of all ranks of a mesh, row by row."""
    out = [[]]
    for size in mesh:
        out = [c + [i] for c in out for i in range(size)]
    return out


def positive(placement, ndim):
    """As distribute_tensor does it before anything else."""
    if isinstance(placement, Shard):
        return Shard(placement.dim % ndim)
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim % ndim, split_factor=placement.split_factor)
    return placement


def local_tensor(whole, mesh, coordinate, placements):
    """distribute_tensor(src_data_rank=None), without a process group."""
    for size, index, placement in zip(mesh, coordinate, placements):
        if isinstance(placement, (Shard, _StridedShard)):
            whole = placement._split_tensor(whole, size, with_padding=False, contiguous=False)[0][index]
    return whole
