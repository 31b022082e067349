"""Targets that are one file: they appear whole or not at all, are replaced and removed like directories, and leave nothing beside them."""
import json
import os
import pathlib
import shutil
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dcpd as lib
from gang import Gang, ask, at, done

HERE = {"storage": "main"}
FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures/torch-2.15.0"


def tensors(seed=1):
    torch.manual_seed(seed)
    return {"w": torch.randn(1000, 3001), "half": torch.randn(100_003).bfloat16(), "odd": torch.arange(7, dtype=torch.uint8),
            "empty": torch.empty(0, 3), "scalar": torch.tensor(3.5, dtype=torch.float64)}


def source_of(d, state):
    path = d.storages["main"] / (lib.fresh() + ".safetensors")
    save_file(state, path, metadata={"format": "pt"})
    return {**HERE, "name": path.name}


def same(got, want):
    assert got.keys() == want.keys()
    for k, v in want.items():
        assert got[k].dtype == v.dtype and got[k].shape == v.shape and got[k].numpy(force=True).tobytes() == v.numpy(force=True).tobytes() \
            if v.dtype != torch.bfloat16 else torch.equal(got[k].view(torch.int16), v.view(torch.int16)), k


def test_safetensors_made_replaced_and_removed(d):
    want, folder = tensors(), d.storages["main"] / lib.fresh()
    target = {**HERE, "name": folder.name + "/sub/model.safetensors", "format": "safetensors"}
    done = d.api.run("reshard", source=source_of(d, want), target=target)
    assert done["result"]["files"] == 1 and done["result"]["format"] == "safetensors"
    mark = len(d.log.read_bytes())
    same(load_file(folder / "sub/model.safetensors"), want)
    both = [".model.safetensors.dcpd.json", "model.safetensors"]
    lib.wait_for(lambda: sorted(os.listdir(folder / "sub")) == both, 20, "the receipt's removal")
    time.sleep(0.2)
    assert b"left-over" not in d.log.read_bytes()[mark:]  # a receipt is none
    at = {**HERE, "name": target["name"]}
    shown = d.api.get(d.api.storage_path("main", target["name"])).ok()
    assert shown["format"] == "safetensors" and shown["files"] == 1 and shown["tensors"] == len(want)
    checked = d.api.run("verify", source=at)["result"]
    assert checked["verified_bytes"] == sum(v.nbytes for v in want.values()) and checked["unverified_bytes"] <= 4096  # the header
    assert d.api.fails("reshard", "checkpoint_exists", source=source_of(d, want), target=target)
    other = tensors(2)
    with open(folder / "sub/model.safetensors", "rb") as reader:
        whole = reader.read()
        reader.seek(0)
        d.api.run("reshard", source=source_of(d, other), target=target, options={"overwrite": True})
        assert reader.read() == whole  # the old file is as it was for whom has it open
    same(load_file(folder / "sub/model.safetensors"), other)
    lib.wait_for(lambda: not [n for n in os.listdir(folder / "sub") if n.startswith(".dcpd")], 60, "what was replaced is removed")
    assert sorted(n for n in os.listdir(folder / "sub") if not n.endswith("notes.json")) == both
    d.api.run("delete", target=at)
    lib.wait_for(lambda: os.listdir(folder / "sub") == [], 20, "the file's removal")


@pytest.mark.parametrize("end, word", [(".safetensors", "safetensors"), (".gguf", "gguf")])
def test_rot_in_place_is_damage(d, end, word):
    """These formats have no digests of their own: what is read is compared with the content digest of the record beside the file."""
    path = d.storages["main"] / (lib.fresh() + end)
    target = {**HERE, "name": path.name}
    made = d.api.run("reshard", source=source_of(d, {"w": torch.randn(64, 32), "v": torch.randn(300)}), target={**target, "format": word})
    fine = d.api.run("verify", source=target)["result"]
    assert fine["content_digest"] == made["result"]["content_digest"] and fine["verified_bytes"] == 4 * (64 * 32 + 300)
    assert d.api.get(d.api.storage_path("main", path.name)).ok()["verified"]["state"] == "verified"
    was, data = path.stat(), bytearray(path.read_bytes())
    data[-100] ^= 1
    with open(path, "r+b") as f:
        f.write(data)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    d.api.run("verify", source=target, level="structure")  # neither of them reads all
    assert d.api.run("verify", source=target, include=["w"])["result"]["verified_bytes"] == 0
    for level in ("digest", "values"):
        error = d.api.fails("verify", "checkpoint_damaged", source=target, level=level)
        assert [(x["file"], x["part"], x["bytes"]) for x in error["damage"]] == [(path.name, "file", len(data))], error
        assert made["result"]["content_digest"] in error["detail"]
    assert d.api.get(d.api.storage_path("main", path.name)).ok()["verified"]["state"] == "damaged"
    os.utime(path)  # by whom that has written: the record is not of it
    d.api.run("verify", source=target)


def test_what_is_there_already(d):
    """A directory is no file's place, and no file a directory's; nothing but a checkpoint is replaced."""
    want, name = {"x": torch.arange(4.0)}, lib.fresh()
    source = source_of(d, want)
    folder = d.storages["main"] / (name + ".safetensors")
    folder.mkdir()
    (folder / "notes").write_text("here")
    for overwrite in (False, True):
        d.api.fails("reshard", "not_a_checkpoint", source=source, target={**HERE, "name": folder.name, "format": "safetensors"},
                    options={"overwrite": overwrite})
    d.api.run("reshard", source=source, target={**HERE, "name": name + "/a.safetensors", "format": "safetensors"})
    error = d.api.fails("reshard", "name_invalid", source=source, target={**HERE, "name": name + "/a.safetensors/b"})
    assert "checkpoint" in error["detail"]
    d.api.fails("reshard", "name_invalid", source=source, target={**HERE, "name": name + "/a.safetensors"}, options={"overwrite": True})
    alone = d.storages["main"] / (name + "-alone.safetensors")
    save_file(want, alone)
    error = d.api.fails("reshard", "name_invalid", source=source, target={**HERE, "name": alone.name, "format": "dcp"},
                        options={"overwrite": True})
    assert "of one file, and no directory replaces it" in error["detail"]
    d.api.run("reshard", source=source, target={**HERE, "name": name + "/b.safetensors", "format": "safetensors"})  # files beside files
    for file in ("a", "b"):
        same(load_file(d.storages["main"] / name / f"{file}.safetensors"), want)
    d.api.run("reshard", source=source, target={**HERE, "name": name + "-hf", "format": "safetensors"})
    error = d.api.fails("reshard", "name_invalid", source=source,
                        target={**HERE, "name": name + "-hf/b.safetensors", "format": "safetensors"})
    assert "no checkpoint lies in another" in error["detail"]


def test_a_job_that_fails_leaves_nothing(d):
    source = source_of(d, {"y": torch.zeros(3)})
    name = lib.fresh()
    d.api.fails("reshard", "dtype_unsupported", source=source, dtype=[["y", "complex128"]],
                target={**HERE, "name": name + "/a.safetensors", "format": "safetensors"})
    lib.wait_for(lambda: not any((d.storages["main"] / name).iterdir()), 20, "staging")


@pytest.mark.parametrize("replaced", [False, True])
def test_recovery_knows_by_the_receipt(tmp_path, replaced):
    """After a crash the receipt tells a commit from another file of this name: by the file's size and time."""
    shutil.copytree(FIXTURES / "nested/checkpoint", tmp_path / "in")
    roots, name, job = {"out": tmp_path}, "t.safetensors", "01TEST" + "0" * 20
    if replaced:
        save_file({"old": torch.zeros(3)}, tmp_path / name)

    def run(job):
        with Gang(1, roots) as g:
            return g.job("reshard", {"source": at("in"), "target": {**at(name), "format": "safetensors"},
                                     "options": {"overwrite": replaced}}, job=job)

    done(run(job))
    written = (tmp_path / name).read_bytes()
    page, receipt = tmp_path / f".{name}.dcpd.json", tmp_path / f".dcpd-{job}-1/.dcpd.json"
    for killed_in_between in (True, False):
        receipt.parent.mkdir(exist_ok=True)
        if killed_in_between:
            page.rename(receipt)
        body, _ = ask(roots, op="recover", **at(name), job="01TEST" + "9" * 20, kind="reshard")
        assert body["ok"]["committed"] is False  # another job
        body, _ = ask(roots, op="recover", **at(name), job=job, kind="reshard")
        assert body["ok"]["committed"] is True and body["ok"]["result"]["bytes"] == len(written)
        assert sorted(p.name for p in tmp_path.iterdir()) == [page.name, "in", name] and (tmp_path / name).read_bytes() == written
    page.unlink()
    (tmp_path / name).unlink()
    if replaced:
        save_file({"old": torch.zeros(3)}, tmp_path / name)
    done(run(job))
    time.sleep(0.02)
    (tmp_path / name).write_bytes(written)  # the same bytes, by somebody else
    body, _ = ask(roots, op="recover", **at(name), job=job, kind="reshard")
    assert body["ok"]["committed"] is False and (tmp_path / name).read_bytes() == written


def test_max_file_bytes(d):
    want, name = {f"w{i}": torch.randn(100, 10) for i in range(5)} | {"large": torch.randn(100, 100)}, lib.fresh()
    d.api.run("reshard", source=source_of(d, want), target={**HERE, "name": name, "format": "safetensors", "max_file_bytes": 8000})
    files = {f.name: load_file(f) for f in (d.storages["main"] / name).glob("*.safetensors")}
    same({k: v for f in files.values() for k, v in f.items()}, want)
    assert all(len(f) == 1 or sum(v.nbytes for v in f.values()) <= 8000 for f in files.values()) and len(files) >= 4


@pytest.mark.parametrize("end, word", [(".pt", "torch"), (".gguf", "gguf")])
def test_a_file_that_is_only_called_so_is_not_replaced(d, end, word):
    path = d.storages["main"] / (lib.fresh() + end)
    path.write_bytes(b"hello")
    source = source_of(d, {"w": torch.ones(8, 32)})
    target = {**HERE, "name": path.name, "format": word}
    d.api.fails("reshard", "not_a_checkpoint", source=source, target=target, options={"overwrite": True})
    assert path.read_bytes() == b"hello"


@pytest.mark.parametrize("folder", [False, True])
def test_metadata_of_the_source_is_kept(d, folder):
    """Keys of __metadata__ that the target does not say itself, in every file; values that dcpd put there before, too."""
    path = d.storages["main"] / (lib.fresh() + ".safetensors")
    meta = {"modelspec.title": "é \"quoted\"", "training": json.dumps({"steps": 7}), "dcpd_values": '{"step":3}', "format": "tf"}
    save_file({"a": torch.ones(300), "b": torch.ones(300)}, path, metadata=meta)
    name = lib.fresh() + ("" if folder else ".safetensors")
    d.api.run("reshard", source={**HERE, "name": path.name}, target={**HERE, "name": name, "format": "safetensors", "max_file_bytes": 1200})
    made = d.storages["main"] / name
    files = sorted(made.glob("*.safetensors")) if folder else [made]
    assert len(files) == 1 + folder
    for file in files:
        with safe_open(file, "pt") as f:
            assert f.metadata() == {**meta, "format": "pt"}
