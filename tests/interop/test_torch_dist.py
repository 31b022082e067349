"""torch-dist: what Megatron-Core's dist_checkpointing wrote (tests/fixtures/make_megatron.py), read as DCP with what is beside it."""
import json
import os
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dcpd as lib
from test_one_file import FIXTURES, HERE

sys.path.append(str(FIXTURES.parent))
import make_megatron as made  # noqa: E402

LLAMA = FIXTURES.parent / "megatron-core-0.16.1/llama"


def put(d):
    path = d.storages["main"] / lib.fresh()
    shutil.copytree(LLAMA, path)
    return path, {**HERE, "name": path.name}


def layers(name):
    return [made.tensor(f"decoder.layers.{i}.{name}", made.LAYER[name][:-1]) for i in range(made.LAYERS)]


def test_tensors_and_values(d):
    path, source = put(d)
    shown = d.api.get(d.api.storage_path("main", path.name)).ok()
    assert shown["format"] == "torch-dist"
    listed = d.api.get(f"/v1/checkpoints/main?prefix={path.name}").ok()["checkpoints"]
    assert [c["format"] for c in listed] == ["torch-dist"]
    page = d.api.get(d.api.storage_path("main", path.name, "/tensors?page_size=1000")).ok()
    assert {t["fqn"]: t["shape"] for t in page["tensors"]} == (
        {f"decoder.layers.{k}": [made.LAYERS, *v[:-1]] for k, v in made.LAYER.items()} | {k: list(v[:-1]) for k, v in made.OUTER.items()})
    values = {v["fqn"]: v.get("value", v.get("opaque")) for v in page["values"]}
    assert {k: values[k] for k in ("iteration", "checkpoint_version", "opt_param_scheduler.max_lr")} == {
        "iteration": 7, "checkpoint_version": 3.0, "opt_param_scheduler.max_lr": 0.1}
    assert "Namespace" in values["args"] and {f"decoder.layers.self_attention._extra_state/shard_{i}_4" for i in range(4)} < set(values)
    assert d.api.run("verify", source=source)["result"]["unverified_bytes"] == (path / ".metadata").stat().st_size


def test_reshard_keeps_all(d):
    """To DCP over two ranks: PyTorch reads the same tensors and values; to torch: common.pt's values as torch.load gives them."""
    path, source = put(d)
    name = lib.fresh()
    d.api.run("reshard", source=source, target={**HERE, "name": name, "world_size": 2})
    state = {"iteration": 0} | {f"decoder.layers.{k}": torch.zeros(made.LAYERS, *v[:-1], dtype=torch.bfloat16)
                                for k, v in made.LAYER.items()}
    dcp.load(state, checkpoint_id=d.storages["main"] / name, no_dist=True)
    assert state.pop("iteration") == 7
    for k, v in state.items():
        assert torch.equal(v, torch.stack(layers(k.removeprefix("decoder.layers.")))), k
    assert d.api.run("diff", a=source, b={**HERE, "name": name})["result"]["equal"]
    d.api.run("reshard", source=source, target={**HERE, "name": name + ".pt", "format": "torch"}, exclude=["*_extra_state*"])
    got = torch.load(d.storages["main"] / (name + ".pt"), weights_only=False)
    assert got["args"].hidden_size == made.HIDDEN and got["opt_param_scheduler.num_steps"] == 700


def test_to_hugging_face(d):
    """Layers unstacked, then Llama's names: q, k, v, gate and up as Megatron interleaves them."""
    path, source = put(d)
    name = lib.fresh() + ".safetensors"
    d.api.run("reshard", source=source, target={**HERE, "name": name, "format": "safetensors"},
              transform=rules(d), vars={"heads": made.HEADS, "groups": made.GROUPS})
    got = load_file(d.storages["main"] / name)
    assert torch.equal(got["model.embed_tokens.weight"], made.tensor("embedding.word_embeddings.weight", (made.VOCAB, made.HIDDEN)))
    for i, (qkv, fc1) in enumerate(zip(layers("self_attention.linear_qkv.weight"), layers("mlp.linear_fc1.weight"))):
        q, k, v = qkv.view(made.GROUPS, -1, made.HEAD, made.HIDDEN).split([made.HEADS // made.GROUPS, 1, 1], dim=1)
        for word, want in (("q", q), ("k", k), ("v", v)):
            assert torch.equal(got[f"model.layers.{i}.self_attn.{word}_proj.weight"], want.reshape(-1, made.HIDDEN)), (i, word)
        assert torch.equal(got[f"model.layers.{i}.mlp.gate_proj.weight"], fc1[:made.FFN])
        assert torch.equal(got[f"model.layers.{i}.mlp.up_proj.weight"], fc1[made.FFN:])
    assert len(got) == 3 + 9 * made.LAYERS


def rules(d):
    return [r for name in ("megatron-unstack", "llama-megatron-to-hf") for r in d.api.get(f"/v1/transforms/{name}").ok()["transform"]]


@pytest.mark.parametrize("text", [b"", b"{", b'{"sharded_backend":"zarr"}', b'{"a":{"sharded_backend":"torch_dist"}}', b"[1]",
                                  b"x" * 70000])
def test_other_metadata_json(d, text):
    """A file of that name makes no DCP checkpoint Megatron's, nor a directory a checkpoint."""
    path, source = put(d)
    (path / "metadata.json").write_bytes(text)
    assert d.api.get(d.api.storage_path("main", path.name)).ok()["format"] == "dcp"
    (path / ".metadata").unlink()
    d.api.get(d.api.storage_path("main", path.name)).problem("not_found", status=404)


def test_damaged_and_missing_parts(d):
    path, source = put(d)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend_version": 2, "sharded_backend": "torch_dist"}))
    data = (path / "common.pt").read_bytes()
    (path / "common.pt").write_bytes(data[:-20])
    assert d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("format_zip")["file"] == "common.pt"
    (path / "common.pt").unlink()
    assert d.api.get(d.api.storage_path("main", path.name)).ok()["format"] == "torch-dist"
    os.unlink(next(path.glob("*.distcp")))
    problem = d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("checkpoint_incomplete")
    assert problem["file"].endswith(".distcp")
