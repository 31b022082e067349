"""copy_assets: small files beside the source travel along with a reshard or merge, are in its manifest, and are verified."""
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcpd as lib

HERE = {"storage": "main"}
CONFIG = json.dumps({"model_type": "llama", "hidden_size": 8}).encode()


def folder(d, files, tensors=None):
    """A directory of safetensors with other files beside."""
    path = d.storages["main"] / lib.fresh()
    path.mkdir()
    save_file(tensors or {"w": torch.arange(12.0).reshape(3, 4)}, path / "model.safetensors")
    for name, text in files.items():
        (path / name).write_bytes(text)
    return path


def reshard(d, source, **target):
    name = lib.fresh()
    job = d.api.run("reshard", source={**HERE, "name": source.name}, target={**HERE, "name": name, "copy_assets": True, **target})
    return d.storages["main"] / name, job["result"]


@pytest.mark.parametrize("target", [{"format": "safetensors"}, {"format": "dcp", "world_size": 2}])
def test_they_travel_along_and_back(d, target):
    """Of no bytes, of few, of more than a page, of more than a block; twice, as the second source is dcpd's own."""
    files = {"config.json": CONFIG, "empty": b"", "tokenizer.json": os.urandom(5 << 20), "vocab.txt": os.urandom(9001), "é ü.md": b"x",
             "merges.txt": os.urandom(200_000)}
    source = folder(d, {**files, ".hidden": b"no", "old.bin": b"no", "model.safetensors.index.json": json.dumps(
        {"metadata": {}, "weight_map": {"w": "model.safetensors"}}).encode()})
    (source / "onnx").mkdir()
    made, result = reshard(d, source, **target)
    assert result["assets"] == sorted(files) and "assets_left_out" not in result
    assert {u["file"] for u in result["unverified"] if u["fqn"] is None} >= set(files) - {"empty"}
    again, result = reshard(d, made, format="safetensors")
    assert result["assets"] == sorted(files) and result["unverified_bytes"] == 0
    for at in (made, again):
        assert {p.name: p.read_bytes() for p in at.iterdir() if p.name in files} == files
        assert set(os.listdir(at)).isdisjoint({".hidden", "old.bin", "onnx"})
        checked = d.api.run("verify", source={**HERE, "name": at.name})["result"]
        assert checked["unverified_bytes"] == 0 and checked["verified_bytes"] > 5 << 20
    assert torch.equal(load_file(next(again.glob("*.safetensors")))["w"], torch.arange(12.0).reshape(3, 4))


def test_overwritten_and_deleted(d):
    source = folder(d, {"config.json": CONFIG, "a.txt": b"a"})
    made, _ = reshard(d, source)
    (source / "a.txt").unlink()
    (source / "b.txt").write_bytes(b"b")
    d.api.run("reshard", source={**HERE, "name": source.name}, target={**HERE, "name": made.name, "copy_assets": True},
              options={"overwrite": True})
    assert {p for p in os.listdir(made) if p[0] not in "._"} == {"config.json", "b.txt"}
    (made / "mine.txt").write_bytes(b"no part of it")
    again = {"source": {**HERE, "name": source.name}, "target": {**HERE, "name": made.name}, "options": {"overwrite": True}}
    assert d.api.fails("reshard", "not_a_checkpoint", **again)["file"] == "mine.txt"
    (made / "mine.txt").unlink()
    d.api.run("delete", target={**HERE, "name": made.name})
    assert not made.exists()


@pytest.mark.parametrize("level", ["structure", "digest"])
@pytest.mark.parametrize("hurt", ["flip", "cut", "gone"])
def test_damage_is_found(d, hurt, level):
    made, _ = reshard(d, folder(d, {"config.json": CONFIG, "other.txt": b"o" * 100}))
    path = made / "config.json"
    text = bytearray(path.read_bytes())
    text[3] ^= 1
    if hurt == "gone":
        path.unlink()
    else:
        path.write_bytes(text if hurt == "flip" else text[:-1])
    if level == "structure" and hurt == "flip":
        d.api.run("verify", source={**HERE, "name": made.name}, level=level)
        return
    damage = d.api.fails("verify", "checkpoint_damaged", source={**HERE, "name": made.name}, level=level)["damage"]
    assert [(x["file"], x["part"], x["fqn"]) for x in damage] == [("config.json", "file", None)]
    if hurt == "flip":
        error = d.api.fails("reshard", "digest_mismatch", source={**HERE, "name": made.name},
                            target={**HERE, "name": lib.fresh(), "copy_assets": True})
        assert error["file"] == "config.json"


def test_left_out_links_and_large_files(d):
    source = folder(d, {"config.json": CONFIG})
    os.symlink("/etc/passwd", source / "tokenizer.json")
    os.symlink("config.json", source / "link.json")
    with open(source / "tf_model.h5", "wb") as f:
        f.truncate((64 << 20) + 1)
    os.mkfifo(source / "pipe")
    made, result = reshard(d, source)
    assert result["assets"] == ["config.json"] and result["assets_left_out"] == [
        {"file": "link.json", "why": "a symbolic link"}, {"file": "tf_model.h5", "why": "too large"},
        {"file": "tokenizer.json", "why": "a symbolic link"}]
    assert not {"tokenizer.json", "link.json", "tf_model.h5", "pipe"} & set(os.listdir(made))


@pytest.mark.parametrize("name", [b"a\nb", b"a\x1b[31m", b"\xff\xfe", b"\x7f"])
def test_hostile_names(d, name):
    source = folder(d, {"config.json": CONFIG})
    with open(os.fsencode(source) + b"/" + name, "wb"):
        pass
    target = {**HERE, "name": lib.fresh(), "copy_assets": True}
    assert d.api.fails("reshard", "name_invalid", source={**HERE, "name": source.name}, target=target)["file"]
    assert not (d.storages["main"] / target["name"]).exists()


def test_too_many(d):
    source = folder(d, {f"{i}.txt": b"" for i in range(257)})
    target = {**HERE, "name": lib.fresh(), "copy_assets": True}
    d.api.fails("reshard", "limit_exceeded", source={**HERE, "name": source.name}, target=target)
    (source / "0.txt").unlink()
    assert len(reshard(d, source)[1]["assets"]) == 256


def test_from_another_folder_and_in_a_merge(d):
    source, base = folder(d, {"mine.txt": b"m"}), folder(d, {"config.json": CONFIG})
    made, result = reshard(d, source, assets={**HERE, "name": base.name})
    assert result["assets"] == ["config.json"] and (made / "config.json").read_bytes() == CONFIG
    name = lib.fresh()
    d.api.run("merge", sources=[{**HERE, "name": source.name}, {**HERE, "name": base.name}],
              target={**HERE, "name": name, "copy_assets": True})
    assert (d.storages["main"] / name / "mine.txt").read_bytes() == b"m"
    target = {**HERE, "name": lib.fresh(), "copy_assets": True, "assets": {**HERE, "name": base.name}}
    result = d.api.run("merge", sources=[{**HERE, "name": source.name}] * 2, target=target)["result"]
    assert result["assets"] == ["config.json"] and (d.storages["main"] / target["name"] / "config.json").read_bytes() == CONFIG


def test_one_file_has_no_place_for_them(d):
    source = folder(d, {"config.json": CONFIG})
    for name, form in [("a.pt", "torch"), ("a.safetensors", "safetensors"), ("a.npz", "npz")]:
        p = d.api.post("/v1/jobs", {"kind": "reshard", "source": {**HERE, "name": source.name},
                                    "target": {**HERE, "name": name, "format": form, "copy_assets": True}})
        assert p.problem("validation_failed", status=422)["pointer"] == "/target/copy_assets"
    single = {**HERE, "name": f"{source.name}/model.safetensors"}  # a source that is one file has a folder, too
    name = lib.fresh()
    d.api.run("reshard", source=single, target={**HERE, "name": name, "copy_assets": True})
    assert (d.storages["main"] / name / "config.json").read_bytes() == CONFIG


def test_pytorch_saves_over_it(d):
    """PyTorch leaves the files alone: the manifest is outdated, not the checkpoint damaged."""
    import torch.distributed.checkpoint as dcp
    made, _ = reshard(d, folder(d, {"config.json": CONFIG}))
    dcp.save({"w": torch.ones(3, 4)}, storage_writer=dcp.FileSystemWriter(made, overwrite=True), no_dist=True)
    result = d.api.run("reshard", source={**HERE, "name": made.name}, target={**HERE, "name": lib.fresh(), "copy_assets": True})["result"]
    assert any(w["code"] == "manifest_outdated" for w in result["warnings"]) and result["assets"] == ["config.json"]
