"""dcpd.torch's StorageWriter and StorageReader under torch.distributed.checkpoint, each half beside PyTorch's own.

PyTorch is the judge: what our writer writes its reader reads, and the other way round; what an argument does to the files is compared
with what it does to PyTorch's.
"""
import json
import os
import pickle
import pathlib
import warnings

import harness as lib
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_ranks import FOUR, TWO

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 400, generator=g), "t": torch.randn(40, 30, generator=g).t(),
            "bf": torch.randn(5, 3, generator=g).bfloat16(), "z": torch.tensor(seed + 3.5), "none": torch.empty(0, 4),
            "u8": torch.randint(0, 255, (400_000,), generator=g).to(torch.uint8),
            "c": torch.randn(4, generator=g).to(torch.complex128),
            "sub": {"lr": 0.1 + seed, "list": [seed, torch.arange(5) + seed]}}


def same(a, b):
    for k, x in a.items():
        if isinstance(x, dict):
            same(x, b[k])
        elif isinstance(x, torch.Tensor):
            assert x.dtype == b[k].dtype and torch.equal(x, b[k]), k
        else:
            assert str(x) == str(b[k]), k


def save(sd, writer, **kw):
    return dcp.save(sd, storage_writer=writer, no_dist=True, **kw)


def load(sd, reader, **kw):
    dcp.load(sd, storage_reader=reader, no_dist=True, **kw)
    return sd


@pytest.fixture
def path(at):
    """A new path under the daemon's root."""
    return at.storages["main"] / lib.fresh()


def jobs_of(save_id):
    return dcpd.connect().jobs.list(filter=f"labels.save_id={save_id}")


# ---- each half beside PyTorch's ----


def test_ours_to_pytorch(path):
    w = StorageWriter(path)
    md = save(state(), w)
    same(load(state(1), dcp.FileSystemReader(path)), state())
    assert md.storage_meta.save_id and sorted(os.listdir(path)) == [".dcpd.json", ".metadata", "__0_0.distcp"]
    stored = pickle.loads((path / ".metadata").read_bytes())
    assert stored.state_dict_metadata.keys() == md.state_dict_metadata.keys() and stored.planner_data == md.planner_data
    assert type(next(iter(stored.storage_data.values()))).__module__ == "torch.distributed.checkpoint.filesystem"


def test_pytorch_to_ours(path):
    save(state(), dcp.FileSystemWriter(path))
    same(load(state(1), StorageReader(path)), state())


def test_ours_to_ours_by_reference(at, path):
    ref = f"main:{path.name}"
    save(state(), StorageWriter(path=ref))
    same(load(state(1), StorageReader(path=ref)), state())


def test_a_save_is_a_job_and_every_item_has_a_digest(path):
    w = StorageWriter(str(path))
    w.reset()
    save(state(), w)
    (job,) = jobs_of(w.save_id)
    assert job["kind"] == "save" and job["state"] == "succeeded" and job["result"]["metadata_checked"]
    r = dcpd.connect().jobs.run("verify", source=f"main:{path.name}", level="digest")["result"]
    assert r["unverifiable"] == 0 and r["tensors"] == 8 and r["values"] == 2


def test_loading_does_not_use_pytorchs_files(path, monkeypatch):
    monkeypatch.setenv("DCPD_DIRECT", "0")
    save(state(), StorageWriter(path))
    before = len(dcpd.connect().jobs.list(filter="kind=load"))
    load(state(1), StorageReader(path))
    assert len(dcpd.connect().jobs.list(filter="kind=load")) == before + 1


def test_part_of_it_and_another_dtype(path):
    save(state(), StorageWriter(path))
    got = load({"w": torch.zeros(300, 400, dtype=torch.float64)}, StorageReader(path))
    assert torch.equal(got["w"], state()["w"].double())


def test_errors_of_planners_keep_their_text(path):
    save(state(), StorageWriter(path))
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint"):
        load({"x": torch.zeros(3)}, StorageReader(path))
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(3)}, StorageReader(path))


def test_many_saves_leave_the_newest(at, path):
    for i in range(4):
        save(state(i), StorageWriter(path))
    same(load(state(9), dcp.FileSystemReader(path)), state(3))
    lib.wait_for(lambda: not at.staging(), 10, "the old ones are gone")


def test_nothing_to_save(path):
    save({}, StorageWriter(path))
    assert load({}, dcp.FileSystemReader(path)) == {} and load({}, StorageReader(path)) == {}


def test_to_torch_save(path, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(state(), StorageWriter(path))
    dcp_to_torch_save(path, tmp_path / "one.pt")
    same(torch.load(tmp_path / "one.pt", weights_only=False), state())


# ---- a directory that is there ----


def test_pytorchs_checkpoint_is_replaced(path):
    save(state(1), dcp.FileSystemWriter(path, thread_count=2))
    save(state(), StorageWriter(path))
    same(load(state(2), dcp.FileSystemReader(path)), state())
    assert "__0_1.distcp" not in os.listdir(path)


def test_other_files_stay(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    save(state(1), StorageWriter(path))
    save(state(), StorageWriter(path))
    assert (path / "config.json").read_text() == "{}"
    same(load(state(2), dcp.FileSystemReader(path)), state())
    assert dcpd.connect().jobs.run("verify", source=f"main:{path.name}", level="digest")["result"]["unverifiable"] == 0


def test_an_empty_directory_and_missing_parents(path):
    path.mkdir()
    save(state(), StorageWriter(path))
    same(load(state(2), dcp.FileSystemReader(path)), state())
    deep = path.parent / lib.fresh() / "a" / "b"
    save(state(), StorageWriter(deep))
    same(load(state(2), dcp.FileSystemReader(deep)), state())


# ---- arguments ----


def files(path):
    """{file: FQNs in it}, as the metadata say."""
    md = dcp.FileSystemReader(path).read_metadata()
    out = {}
    for index, info in md.storage_data.items():
        out.setdefault(info.relative_path, set()).add(index.fqn)
    return out


def test_overwrite(path):
    save(state(), StorageWriter(path, overwrite=False))
    with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
        save(state(1), StorageWriter(path, overwrite=False))
    same(load(state(2), dcp.FileSystemReader(path)), state())


@pytest.mark.parametrize("kw", [{"thread_count": 3}, {"single_file_per_rank": False}, {"thread_count": 20}])
def test_files_are_cut_as_pytorch_cuts_them(path, kw):
    save(state(), StorageWriter(path, **kw))
    theirs = path.parent / lib.fresh()
    save(state(), dcp.FileSystemWriter(theirs, **kw))
    assert files(path) == files(theirs) and len(files(path)) > 1
    same(load(state(2), dcp.FileSystemReader(path)), state())


def test_extensions(path):
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    sd = {"zeros": torch.zeros(1 << 20), "v": {"a": 1}}
    save(sd, StorageWriter(path, _extensions=[ZStandard()]))
    assert (path / "__0_0.distcp").stat().st_size < 1 << 20
    assert load({"zeros": torch.ones(1 << 20), "v": {"a": 0}}, dcp.FileSystemReader(path))["v"] == {"a": 1}
    got = load({"zeros": torch.ones(1 << 20), "v": {"a": 0}}, StorageReader(path))
    assert not got["zeros"].any() and got["v"] == {"a": 1}


def test_serialization_format(path):
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    sd = {"a": torch.arange(100_000.0), "b": torch.ones(3, 4)}
    save(sd, StorageWriter(path, serialization_format=SerializationFormat.SAFETENSORS))
    theirs = path.parent / lib.fresh()
    save(sd, dcp.FileSystemWriter(theirs, serialization_format=SerializationFormat.SAFETENSORS))
    same(load_file(path / "__0_0.distcp"), sd)
    heads = [json.loads(x[8:8 + int.from_bytes(x[:8], "little")]) for x in ((p / "__0_0.distcp").read_bytes() for p in (path, theirs))]
    assert heads[0] == heads[1] and heads[0]["__metadata__"]
    assert (path / "__0_0.distcp").stat().st_size == (theirs / "__0_0.distcp").stat().st_size


# ---- async ----


def test_async_save_has_the_data_of_the_call(path):
    sd = state()
    w = StorageWriter(path)
    assert isinstance(w, dcp.staging.AsyncStager)
    f = dcp.async_save(sd, storage_writer=w, no_dist=True)
    for x in sd.values():
        if isinstance(x, torch.Tensor):
            x.zero_()
    sd["sub"]["list"][1].zero_()
    sd["sub"]["lr"] = 0
    f.result(60)
    same(load(state(1), dcp.FileSystemReader(path)), state())


def test_a_staged_tensor_is_not_copied_again(path):
    from dcpd.torch import _lane

    w = StorageWriter(path)
    staged = w.stage({"w": torch.ones(1 << 18)})
    lanes = len(_lane._lanes)
    save(staged, w)
    assert len([x for x in _lane._lanes if x.use == "data"]) == len([x for x in _lane._lanes[:lanes] if x.use == "data"])
    assert load({"w": torch.zeros(1 << 18)}, dcp.FileSystemReader(path))["w"].all()


def test_two_saves_in_flight(path):
    w = [StorageWriter(f"{path}-{i}") for i in range(3)]
    fs = [dcp.async_save(state(i), storage_writer=w[i], no_dist=True) for i in range(3)]
    for i, f in enumerate(fs):
        f.result(60)
        same(load(state(9), dcp.FileSystemReader(f"{path}-{i}")), state(i))


# ---- identity ----


def test_ids_and_paths(at, tmp_path):
    assert StorageWriter.validate_checkpoint_id(tmp_path / "x") and StorageReader.validate_checkpoint_id("main:a/b")
    assert not StorageWriter.validate_checkpoint_id("abc://x/y") and not StorageReader.validate_checkpoint_id("abc://x/y")
    for cls, ident in ((StorageWriter, "save_id"), (StorageReader, "load_id")):
        x = cls(tmp_path / "never-made")
        first = getattr(x, ident)
        assert x.checkpoint_id == x.path == tmp_path / "never-made"
        x.reset("main:a")
        assert getattr(x, ident) != first and x.checkpoint_id == "main:a"
        assert getattr(pickle.loads(pickle.dumps(x)), ident) == getattr(x, ident)


def test_metadata_twice_and_absent(path):
    r = StorageReader(path)
    with pytest.raises(FileNotFoundError):
        r.read_metadata()
    save(state(), StorageWriter(path))
    assert r.read_metadata().storage_meta.load_id == r.read_metadata().storage_meta.load_id == r.load_id
    with pytest.raises(FileNotFoundError):
        r.read_metadata(rank=3)


def test_installed(path):
    from dcpd.torch import install, uninstall

    install()
    install()
    try:
        dcp.save(state(), checkpoint_id=str(path), no_dist=True)
        new = state(1)
        dcp.load(new, checkpoint_id=str(path), no_dist=True)
        same(new, state())
        assert (path / ".dcpd.json").exists()
    finally:
        uninstall()
    dcp.save(state(), checkpoint_id=str(path), no_dist=True)
    assert dcp._storage_utils.FileSystemWriter is dcp.FileSystemWriter


def test_importing_starts_nothing(script):
    r = script("import threading, sys, os; import dcpd.torch; from dcpd import _daemon; "
               "assert threading.active_count() == 1 and _daemon._default is None and not dcpd.torch._lane._lanes; print('ok')")
    assert r.stdout == "ok\n"


def test_ahead_warns(tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        StorageWriter(tmp_path, per_thread_copy_ahead=5)
        StorageWriter(tmp_path)
    assert ["per_thread_copy_ahead" in str(w.message) for w in seen] == [True]


# ---- several ranks ----


def test_ranks_ours_to_pytorch(ranks, d):
    path = str(d.storages["main"] / lib.fresh())
    ids = ranks(on_ranks.dropin_save, path, FOUR)
    ranks(on_ranks.pytorch_load, path, FOUR)
    ranks(on_ranks.pytorch_load, path, TWO, world=2)
    assert [j["state"] for i in ids for j in d.api.get(f"/v1/jobs?filter=labels.save_id%3D{i}").ok(200)["jobs"]] == ["succeeded"]


def test_ranks_pytorch_to_ours(ranks, d):
    path = str(d.storages["main"] / lib.fresh())
    ranks(on_ranks.pytorch_save, path, FOUR)
    ranks(on_ranks.dropin_load, path, FOUR)
    ranks(on_ranks.dropin_load, path, TWO, world=2)


def test_ranks_async(ranks, d):
    path = str(d.storages["main"] / lib.fresh())
    ranks(on_ranks.dropin_save, path, FOUR, None, "async")
    ranks(on_ranks.pytorch_load, path, TWO, world=2)


@pytest.mark.parametrize("where", ["plan", "resolve"])
def test_a_rank_that_fails_is_named_on_all(ranks, d, where):
    path = d.storages["main"] / lib.fresh()
    for got in ranks(on_ranks.dropin_fails, str(path), where):
        assert set(got) == {1} and f"no such {'plan' if where == 'plan' else 'data'}" in got[1]
    assert not path.exists()
    ranks(on_ranks.dropin_save, str(path), FOUR)
    ranks(on_ranks.dropin_load, str(path), FOUR)


@pytest.mark.parametrize("halves", [(True, False), (False, True)])
def test_without_collectives(ranks, d, halves):
    path = pathlib.Path(d.storages["main"] / lib.fresh())
    got = ranks(on_ranks.dropin_rank_local, str(path), *halves)
    assert got == [(True, {"rank": r}) for r in range(4)]
    assert sorted(n for n in os.listdir(path) if n[0] != ".") == sorted(
        f"__{r}{tail}" for r in range(4) for tail in ("_0.distcp", ".metadata"))
