"""hf-dcp: what torch's HuggingFaceStorageWriter writes in each of its forms is read bit for bit."""
import json
import os
import shutil
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import dcpd as lib
import hf_cases as cases
from test_one_file import HERE


def equal(got, want):
    assert got.keys() == want.keys()
    for k, v in want.items():
        assert got[k].dtype == v.dtype and torch.equal(got[k], v), k


def written(d, name, mesh, **target):
    out = lib.fresh() + ".safetensors"
    result = d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": out, "format": "safetensors"})["result"]
    return load_file(d.storages["main"] / out), result


@pytest.mark.parametrize("mesh, mapping", [([4], False), ([2, 2], False), ([3], True)])
def test_sharded(d, ranks, mesh, mapping):
    """Every rank's own files, one or several; resharded, listed, sliced, verified, compared."""
    name = lib.fresh()
    path, want = d.storages["main"] / name, cases.whole()
    files = {k: 1 + i % 2 for i, k in enumerate(want)} if mapping else None
    world = torch.Size(mesh).numel()
    ranks.run(world, "hf_cases", "save", path=str(path), mesh=mesh, mapping=files)
    shown = d.api.get(d.api.storage_path("main", name)).ok()
    assert (shown["format"], shown["tensors"], shown["world_size"]) == ("hf-dcp", len(want), world)
    assert [c["format"] for c in d.api.get(f"/v1/checkpoints/main?prefix={name}").ok()["checkpoints"]] == ["hf-dcp"]
    got, _ = written(d, name, mesh)
    equal(got, want)
    equal(cases.load(str(path)), want)
    r = d.api.get(d.api.storage_path("main", name, "/tensors/large?slice=400:600,100:200&format=raw"))
    assert r.body == want["large"][400:600, 100:200].contiguous().numpy().tobytes()
    again = lib.fresh()
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": again, "world_size": 2})
    assert d.api.run("diff", a={**HERE, "name": name}, b={**HERE, "name": again})["result"]["equal"]
    d.api.run("verify", source={**HERE, "name": name}, level="values")
    assert torch.Size(mesh).numel() == len({f.split("-model")[0] for f in os.listdir(path)})


def test_consolidated(d, ranks):
    """The whole tensors are plain safetensors; the shards stay beside them in a folder, which is a checkpoint of its own."""
    name, want = lib.fresh(), cases.floats()
    ranks.run(2, "hf_cases", "save", path=str(d.storages["main"] / name), mesh=[2], consolidate=True)
    assert d.api.get(d.api.storage_path("main", name)).ok()["format"] == "safetensors"
    equal(written(d, name, [2])[0], want)
    moved = d.storages["main"] / lib.fresh()
    shutil.move(d.storages["main"] / name / "sharded", moved)
    assert d.api.get(d.api.storage_path("main", moved.name)).ok()["format"] == "hf-dcp"
    equal(written(d, moved.name, [2])[0], want)


@pytest.mark.parametrize("mapping", [None, {k: 1 + i % 3 for i, k in enumerate(cases.whole())}])
def test_by_one_rank(d, mapping):
    """Not distributed: files and an index as Hugging Face has them."""
    name, want = lib.fresh(), cases.whole()
    writer = HuggingFaceStorageWriter(str(d.storages["main"] / name), fqn_to_index_mapping=mapping)
    dcp.save(dict(want), storage_writer=writer, no_dist=True)
    assert d.api.get(d.api.storage_path("main", name)).ok()["format"] == "safetensors"
    equal(written(d, name, [1])[0], want)


def shard(path, number, tensors, info=None, count=1):
    meta = {"DCP_SHARDING_INFO": info if isinstance(info, str) else json.dumps(info)} if info is not None else None
    save_file(tensors, path / f"shard-{number:05}-model-00001-of-{count:05}.safetensors", metadata=meta)


def at(*offsets):
    return {"w": {"saved_offsets": list(offsets)}}


@pytest.mark.parametrize("infos, code", [
    ([at(0, 0), at(4, 0)], None), ([at(0, 0), None], "overlap"), ([at(0, 0), at(2, 0)], "overlap"), ([at(0, 0), at(0, 0)], "replica"),
    ([at(0, 0), at(5, 0)], "coverage_hole"), ([at(0), at(4, 0)], "format_safetensors"), ([at(0, 0, 0), at(4, 0)], "format_safetensors"),
    ([at(0, 0), at(-4, 0)], "format_safetensors"), ([at(0, 0), at(1 << 63, 0)], "format_safetensors"),
    ([at(0, 0), at((1 << 63) - 1, 0)], "format_safetensors"), ([at(0, 0), {}], "format_safetensors"),
    ([at(0, 0), "[]"], "format_safetensors"),
    ([at(0, 0), "{"], "format_safetensors"), ([at(0, 0), '{"w":{"saved_offsets":[4,0]}} x'], "format_safetensors"),
    ([at(0, 0), {"w": {}}], "format_safetensors"), ([at(0, 0), {"w": 3}], "format_safetensors"),
    ([at(0, 0), at(4, 0) | {"v": {"x": [1]}}], None),
], ids=str)
def test_offsets(d, infos, code):
    path = d.storages["main"] / lib.fresh()
    path.mkdir()
    for i, info in enumerate(infos):
        shard(path, i + 1, {"w": torch.full((4, 3), float(i))}, info)
    source, target = {**HERE, "name": path.name}, {**HERE, "name": lib.fresh() + ".safetensors", "format": "safetensors"}
    if code in (None, "replica"):
        d.api.run("reshard", source=source, target=target)
        want = torch.cat([torch.full((4, 3), float(i)) for i in range(1 if code else 2)])
        assert torch.equal(load_file(d.storages["main"] / target["name"])["w"], want)
        return
    if code == "overlap":
        assert d.api.fails("verify", source=source, code="checkpoint_damaged")
        return
    error = d.api.fails("reshard", code, source=source, target=target)
    assert error.get("fqn") == "w" or isinstance(infos[1], str)


def test_files_that_are_missing_or_lie(d):
    path = d.storages["main"] / lib.fresh()
    path.mkdir()
    for i in (1, 3):
        shard(path, i, {"w": torch.ones(2, 2)}, at(2 * i, 0))
    problem = d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("checkpoint_incomplete")
    assert "shard 2" in problem["detail"] or "shard 0" in problem["detail"]
    shard(path, 2, {"w": torch.ones(2, 2).half()}, at(4, 0))
    problem = d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("format_safetensors")
    assert problem["fqn"] == "w" and problem["file"].startswith("shard-00002")
    (path / "shard-00002-model-00001-of-00001.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    assert d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("format_safetensors")["file"].startswith("shard-00002")
