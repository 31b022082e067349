"""Folders in which each rank saved its own state dict by torch.save: real DTensors and ShardedTensors of every rank, made one after the
other in this process over PyTorch's fake process group; what dcpd puts together is the whole tensors."""
import contextlib
import shutil

import dcpd as lib
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

HERE = {"storage": "main"}


@contextlib.contextmanager
def as_rank(rank, world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def whole():
    torch.manual_seed(3)
    return {"layers.0.weight": torch.randn(10, 12), "layers.0.bias": torch.randn(7).to(torch.bfloat16),
            "tp": torch.arange(96.0).reshape(8, 12), "norm": torch.ones(5), "small": torch.arange(3), "scalar": torch.tensor(2.5)}


PLACES = {"layers.0.weight": [Shard(0), Shard(1)], "layers.0.bias": [Shard(0), Replicate()],
          "tp": [_StridedShard(0, split_factor=2), Shard(0)], "norm": [Replicate(), Replicate()], "small": [Shard(0), Replicate()]}


def of_rank(mesh):
    """DTensors as trainers have them; a tensor that is not sharded is saved as it is."""
    state = {k: distribute_tensor(v, mesh, PLACES[k], src_data_rank=None) if k in PLACES else v for k, v in whole().items()}
    return {**state, "step": 7}


def put(d, name, pattern, make, world_size=4):
    folder = d.storages["main"] / name
    folder.mkdir(exist_ok=True)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            torch.save(make(rank), folder / pattern.format(rank))
    return {**HERE, "name": name}


def loaded(d, name, want):
    got = {k: torch.empty_like(v) for k, v in want.items()}
    dcp.load(got, storage_reader=dcp.FileSystemReader(str(d.storages["main"] / name)), no_dist=True)
    return got


def same(got, want):
    assert got.keys() == want.keys()
    for k, v in want.items():
        assert got[k].dtype == v.dtype and torch.equal(got[k], v), k


@pytest.mark.parametrize("pattern", ["model_world_size_4_rank_{}.pt", "pytorch_model_fsdp_rank{}.bin"])
def test_dtensors(d, pattern):
    """verl's and accelerate's names; FSDP alone, over tensor parallelism, and in strided order; the result in any layout and format."""
    name = lib.fresh()
    source = put(d, name, pattern, lambda rank: of_rank(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))))
    shown = d.api.get(d.api.storage_path("main", name)).ok()
    assert (shown["format"], shown["world_size"], shown["tensors"], shown["values"]) == ("torch-ranks", 4, len(whole()), 1)
    assert [c["format"] for c in d.api.get(f"/v1/checkpoints/main?prefix={name}").ok()["checkpoints"]] == ["torch-ranks"]
    d.api.run("reshard", source=source, target={**HERE, "name": name + "-dcp", "world_size": 3, "layout": [
        {"match": "*weight", "placements": ["Shard(0)"], "mesh": [3]}]})
    same(loaded(d, name + "-dcp", whole()), whole())
    done = d.api.run("verify", source=source, level="digest")["result"]
    assert done["unverified_bytes"] == 0
    d.api.run("reshard", source=source, target={**HERE, "name": name + ".pt", "format": "torch"})
    got = torch.load(d.storages["main"] / (name + ".pt"), weights_only=True, mmap=True)
    assert got.pop("step") == 7
    same(got, whole())
    assert d.api.run("diff", a=source, b={**HERE, "name": name + ".pt"})["result"]["equal"]
    r = d.api.get(d.api.storage_path("main", name, "/tensors/tp?slice=1:7,3&format=raw"))
    assert r.body == whole()["tp"][1:7, 3].contiguous().numpy().tobytes()


def sharded(rank, tensor, world_size):
    rows = tensor.chunk(world_size)
    shards = [ShardMetadata(shard_offsets=[sum(len(r) for r in rows[:i]), 0], shard_sizes=list(r.shape), placement=f"rank:{i}/cpu")
              for i, r in enumerate(rows)]
    meta = ShardedTensorMetadata(shards_metadata=shards, size=tensor.shape, tensor_properties=TensorProperties(dtype=tensor.dtype))
    local = [LocalShard(rows[rank].clone(), shards[rank])] if rank < len(rows) else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, meta)


def test_sharded_tensors(d):
    want = {"w": torch.randn(7, 3), "v": torch.arange(4.0)}
    source = put(d, lib.fresh(), "rank_{}.pt", lambda rank: {"w": sharded(rank, want["w"], 4), "v": want["v"]})
    d.api.run("reshard", source=source, target={**HERE, "name": source["name"] + "-dcp"})
    same(loaded(d, source["name"] + "-dcp", want), want)


def test_families(d):
    """The optimizer's files lie beside the model's: their keys stand below the family's name."""
    name = lib.fresh()
    source = put(d, name, "model_world_size_2_rank_{}.pt", lambda r: {"w": sharded(r, torch.arange(6.0).reshape(3, 2), 2)}, 2)
    put(d, name, "optim_world_size_2_rank_{}.pt", lambda r: {"state": {"w": {"exp_avg": sharded(r, torch.ones(3, 2), 2)}}}, 2)
    put(d, name, "extra_state_world_size_2_rank_{}.pt", lambda r: {"rng": torch.full((3,), r), "lr": 0.5 + r}, 2)
    d.api.run("reshard", source=source, target={**HERE, "name": name + "-dcp"})
    want = {"w": torch.arange(6.0).reshape(3, 2), "optim.state.w.exp_avg": torch.ones(3, 2),
            "extra_state.rng": torch.zeros(3, dtype=torch.int64)}
    same(loaded(d, name + "-dcp", want), want)


def test_what_is_wrong(d):
    """A rank that is missing is named; so is a tensor that the ranks do not hold whole, or of which they say different things."""
    name = lib.fresh()
    source = put(d, name, "model_world_size_4_rank_{}.pt", lambda rank: of_rank(init_device_mesh("cpu", (2, 2))))
    folder, target = d.storages["main"] / name, {**HERE, "name": name + "-no"}
    for rank in (0, 2, 3):
        path = folder / f"model_world_size_4_rank_{rank}.pt"
        shutil.move(path, folder.parent / "away")
        error = d.api.fails("reshard", "checkpoint_incomplete", source=source, target=target)
        assert f"rank {rank}'s file" in error["detail"] and error["rank"] == rank, error
        shutil.move(folder.parent / "away", path)
    one = put(d, lib.fresh(), "rank{}.pt", lambda rank: {"w": sharded(rank, torch.ones(8, 2), 4)})
    (d.storages["main"] / one["name"] / "rank3.pt").unlink()
    error = d.api.fails("reshard", "checkpoint_incomplete", source=one, target=target)
    assert "12 of its 16 elements" in error["detail"] and error["fqn"] == "w"
    cases = [(lambda rank: {"w": torch.ones(2 + rank)}, "format_item", "is not what rank 0 says"),
             (lambda rank: {"w": DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])}, "format_unsupported",
              "Partial")]
    for make, code, text in cases:
        error = d.api.fails("reshard", code, source=put(d, lib.fresh(), "rank_{}.pt", make, 2), target=target)
        assert text in error["detail"] and error["fqn"] == "w" and error["file"].startswith("rank_"), error
    alone = put(d, lib.fresh(), "shard-{}.pt", lambda rank: {"w": sharded(rank, torch.ones(8, 2), 2)}, 2)
    error = d.api.fails("reshard", "format_unsupported", source={**HERE, "name": alone["name"] + "/shard-0.pt"}, target=target)
    assert "folder of all ranks" in error["detail"]
