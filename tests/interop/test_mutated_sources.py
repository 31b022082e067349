"""Checkpoints of every format that dcpd reads, damaged at random: read in one process, thousands of times (tests/tools/mutate_tool.c).
What comes out is equal to what was stored, an error, or counted as unverified; the process neither crashes, hangs, nor takes memory."""
import json
import os
import pathlib
import shutil
import subprocess

import gguf
import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from crafted import FIXTURES
from safetensors.torch import save_file

import dcpd as lib
from test_torch_ranks import of_rank, put, sharded
from torch.distributed.device_mesh import init_device_mesh

TOOL = pathlib.Path(os.environ["TESTBIN"]) / "tools/mutate_tool"
HERE = {"storage": "main"}


def tensors():
    torch.manual_seed(1)
    return {"model.w": torch.randn(17, 33), "model.t": torch.randn(6, 4).t(), "b": torch.arange(9).to(torch.bfloat16), "n": torch.tensor(3),
            "none": torch.zeros(0, 4), "flags": torch.tensor([True, False])}


def golden(case):
    def make(d, path):
        shutil.copytree(FIXTURES / "torch-2.15.0" / case / "checkpoint", path)
    return make


def converted(case, form):
    """What dcpd makes of it, with digests."""
    def make(d, path):
        shutil.copytree(FIXTURES / "torch-2.15.0" / case / "checkpoint", f"{path}-source")
        root = d.storages["main"]
        d.api.run("reshard", source={**HERE, "name": f"{path.relative_to(root)}-source"},
                  target={**HERE, "name": str(path.relative_to(root)), "format": form})
    return make


def torch_save(**options):
    def make(d, path):
        torch.save({"state": tensors(), "step": 7, "list": [1.5, None, {"a": "b"}]}, path, **options)
    return make


def ranks(make_state):
    def make(d, path):
        put(d, path.name, "model_world_size_4_rank_{}.pt", make_state)
    return make


def dtensors(rank):
    return of_rank(init_device_mesh("cpu", (2, 2)))


def by_gguf_py(d, path):
    w = gguf.GGUFWriter(path, "llama")
    w.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(50)])
    w.add_uint32("llama.block_count", 3)
    for name, t in tensors().items():
        if t.numel() and t.dtype == torch.float32:
            w.add_tensor(name, t.contiguous().numpy())
    q8 = gguf.GGMLQuantizationType.Q8_0
    w.add_tensor("q", gguf.quants.quantize(numpy.random.default_rng(1).standard_normal((3, 64), dtype=numpy.float32), q8), raw_dtype=q8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def by_numpy(d, path):
    with open(path, "wb") as f:
        numpy.savez(f, a=numpy.arange(300.0), f=numpy.asfortranarray(numpy.ones((4, 5))), s=numpy.float32(2))


SOURCES = {
    "dcp": golden("nested"), "dcp values": golden("opaque_values"), "dcp zstd": golden("zstd"), "dcp rank-local": golden("rank_local"),
    "dcp of dcpd's": converted("nested", "dcp"), "safetensors of dcpd's": converted("fsdp2_adam", "safetensors"),
    "model.safetensors": lambda d, path: save_file({k: v.contiguous() for k, v in tensors().items()}, path),
    "zip.pt": torch_save(), "legacy.pt": torch_save(_use_new_zipfile_serialization=False),
    "ranks": ranks(dtensors), "ranks sharded": ranks(lambda rank: {"w": sharded(rank, torch.arange(40.0).reshape(10, 4), 4), "step": 1}),
    "model.gguf": by_gguf_py, "arrays.npz": by_numpy,
}


def mutated(d, source, count, seed=1):
    root = d.storages["main"] / f"mutated-{lib.fresh()}"
    root.mkdir()
    name = source.replace(" ", "-").replace("'", "")
    made = d.storages["main"] / f"{root.name}-{name}"  # one that is read through the daemon has a name of one part
    SOURCES[source](d, made)
    shutil.move(made, root / name)
    done = subprocess.run([str(TOOL), str(root), name, str(count), str(seed)], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    shutil.rmtree(root)
    found = json.loads(done.stdout)
    assert found["equal"] + found["errors"] + found["unverified"] > count * 0.9, found
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_some_mutations(d, source):
    found = mutated(d, source, 150)
    assert found["errors"], found


@pytest.mark.long
@pytest.mark.seconds(1800)
@pytest.mark.parametrize("source", SOURCES)
def test_ten_thousand_mutations(d, source):
    found = mutated(d, source, 10000, seed=7)
    print(source, found)
    assert found["errors"] > 1000 and len(found["codes"]) > 1, found
