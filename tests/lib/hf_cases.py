"""What PyTorch's HuggingFaceStorageWriter writes, on real ranks, and what its reader makes of it."""
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def whole():
    torch.manual_seed(11)
    made = {f"rows.{t}".replace("torch.", ""): torch.randn(10, 7).mul(9).to(t) for t in DTYPES}
    return made | {"columns": torch.randn(6, 12), "both": torch.randn(9, 8), "same": torch.randn(5), "plain": torch.randn(3, 2),
                   "few": torch.randn(2, 3), "large": torch.randn(1000, 301)}


def placements(name, dims):
    if dims == 2:
        return [Shard(0), Shard(1)] if name in ("both", "large") else [Shard(0), Replicate()]
    return [Shard(1)] if name == "columns" else [Replicate()] if name == "same" else [Shard(0)]


def floats():
    """PyTorch's consolidation takes no others."""
    return {k: t for k, t in whole().items() if t.is_floating_point()}


def sharded(mesh, tensors):
    """Every rank has what is not sharded, as after training."""
    m = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("a", "b")[:len(mesh)])
    return {k: t if k == "plain" else distribute_tensor(t, m, placements(k, len(mesh))) for k, t in tensors.items()}


def save(path, mesh, mapping=None, consolidate=False):
    writer = HuggingFaceStorageWriter(path, fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=consolidate)
    dcp.save(sharded(mesh, floats() if consolidate else whole()), storage_writer=writer)


def load(path):
    """The whole tensors, as PyTorch's own reader reads them."""
    state = {k: torch.zeros_like(t) for k, t in whole().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    return state
