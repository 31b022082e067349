"""Every save of the drop-in, whatever its form, has a digest for each of its items: dcpctl verify finds a byte that has changed."""
import io
import json
import os
import pickle
import zipfile

import harness as lib
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dropin import load, path, same, save, state  # noqa: F401
from test_dropin_more import Half, Invert

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def zstd():
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    return {"_extensions": [ZStandard()]}


def safetensors():
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return {"serialization_format": SerializationFormat.SAFETENSORS}


WAYS = {"plain": dict, "files": lambda: {"single_file_per_rank": False}, "threads": lambda: {"thread_count": 3}, "zstd": zstd,
        "own": lambda: {"_extensions": [Invert()]}, "safetensors": safetensors, "unsynced": lambda: {"sync_files": False}}


def verify(path, level="digest"):  # noqa: F811
    return dcpd.connect().jobs.run("verify", source=f"main:{path.name}", level=level)["result"]


def items(path):  # noqa: F811
    """[(file, offset, length)] as the metadata have them, and as the manifests do."""
    named, listed = set(), set()
    for p in path.iterdir():
        if p.name.endswith(".metadata"):
            named |= {(i.relative_path, i.offset, i.length) for i in pickle.loads(p.read_bytes()).storage_data.values()}
        elif p.name.startswith(".dcpd"):
            listed |= {(f["name"], i[0], i[1]) for f in json.loads(p.read_text()).get("files", ()) for i in f["items"]}  # or a verdict
    return named, listed


def byte_of(file, offset, length):
    """One that matters: of a torch.save archive a byte of its data, else the one in the middle."""
    data = file.read_bytes()[offset:offset + length]
    if not data.startswith(b"PK"):
        return offset + length // 2
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        biggest = max(z.infolist(), key=lambda x: (x.file_size * x.filename.endswith("data/0"), x.file_size))
        head = biggest.header_offset
        return offset + head + 30 + sum(int.from_bytes(data[head + k:head + k + 2], "little") for k in (26, 28)) + biggest.file_size // 2


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def hurt(path, file, at):  # noqa: F811
    flip(path / file, at)
    with pytest.raises(dcpd.CheckpointDamaged) as e:
        verify(path)
    assert e.value.file == file, e.value
    flip(path / file, at)


@pytest.mark.long
@pytest.mark.parametrize("way, beside", [
    pytest.param(w, b, marks=[pytest.mark.slow] if b and w not in ("plain", "zstd") or w == "unsynced" else [])
    for w in sorted(WAYS) for b in (False, True)])
def test_every_item_has_a_digest(path, way, beside):  # noqa: F811
    if beside:
        path.mkdir()
        (path / "config.json").write_text("{}")
    sd = {k: v for k, v in state().items() if way != "safetensors" or k not in ("sub", "c", "none", "t")}
    save(sd, StorageWriter(path, **WAYS[way]()))
    assert (path / "config.json").exists() == beside
    r = verify(path)
    assert r["unverifiable"] == 0 and r["tensors"] + r["values"] == len(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
    named, listed = items(path)
    if way == "safetensors":
        assert {f for f, _, _ in named} == {f for f, _, _ in listed}  # one digest of all of a file
    else:
        assert named == listed and len(named) == len(dcp.FileSystemReader(path).read_metadata().storage_data)
    for file, offset, length in sorted(named)[:4]:
        hurt(path, file, byte_of(path / file, offset, length))
    assert verify(path)["unverifiable"] == 0


@pytest.mark.parametrize("way", ["plain", "files", "threads", "zstd", "safetensors"])
def test_the_record_has_the_content_digest(path, way):  # noqa: F811
    sd = {k: v for k, v in state().items() if way != "safetensors" or k not in ("sub", "c", "none", "t")}
    save(sd, StorageWriter(path, **WAYS[way]()))
    record = dcpd.connect().checkpoints.get(f"main:{path.name}")
    if way in ("zstd", "safetensors"):
        assert "content_digest" not in record and "no plain tensor" in record["content_unknown"]
        return
    assert "content_unknown" not in record
    own = f"{path.name}-own"
    dcpd.save(sd, f"main:{own}")
    assert record["content_digest"] == dcpd.connect().checkpoints.get(f"main:{own}")["content_digest"]
    assert verify(path)["content_digest"] == record["content_digest"]


def test_items_that_are_not_what_the_metadata_say_have_no_content_digest(path):  # noqa: F811
    dcp.save({"w": torch.randn(30, 40)}, storage_writer=StorageWriter(path), no_dist=True, planner=Half())
    record = dcpd.connect().checkpoints.get(f"main:{path.name}")
    assert "content_digest" not in record and "no plain tensor" in record["content_unknown"]


@pytest.mark.parametrize("way", ["plain", "zstd", "safetensors"])
def test_values_are_looked_at(path, way):  # noqa: F811
    sd = {"z": torch.zeros(5000), "n": torch.tensor([1.0, float("nan")]), "i": torch.full((3,), float("inf"))}
    save(sd, StorageWriter(path, **WAYS[way]()))
    r = verify(path, "values")
    want = {"nan": [("n", 1)], "inf": [("i", 3)], "all_zero": [("z", 5000)]}
    if way == "safetensors":
        want = dict.fromkeys(want, [])  # nobody has looked into it
    assert {k: [(x["fqn"], x["count"]) for x in r[k]] for k in want} == want and r["unverifiable"] == 0
    if way == "zstd":
        (file, offset, length), *_ = sorted(items(path)[0])
        data = bytearray((path / file).read_bytes())
        data[offset + length - 1] ^= 1  # zstd has no check of its own here
        (path / file).write_bytes(data)
        with pytest.raises(dcpd.CheckpointDamaged):
            verify(path, "values")


def test_metadata_that_only_their_planner_knows(path):  # noqa: F811
    class Planner(Half):
        def create_global_plan(self, plans):
            plans, md = super().create_global_plan(plans)
            md.mine = Invert()
            md.planner_data = Invert()
            return plans, md

    w = StorageWriter(path)
    save(state(), w, planner=Planner())
    assert verify(path)["unverifiable"] == 0
    md = dcp.FileSystemReader(path).read_metadata()
    assert isinstance(md.mine, Invert) and isinstance(md.planner_data, Invert)


def test_pytorch_saves_over_ours(path):  # noqa: F811
    """Its files have our names and other bytes; our manifest lies there still."""
    save(state(), StorageWriter(path))
    save(state(1), dcp.FileSystemWriter(path))
    assert (path / ".dcpd.json").exists()
    same(load(state(2), StorageReader(path)), state(1))
    r = verify(path)
    assert [w["code"] for w in r["warnings"]] == ["manifest_outdated"] and r["unverifiable"] == 0
    assert r["unverified"] == [{"fqn": None, "rank": None, "file": ".metadata", "offset": 0, "bytes": (path / ".metadata").stat().st_size}]
    save(state(3), StorageWriter(path))
    assert verify(path)["unverifiable"] == 0


# ---- ranks by themselves ----


def rank_local(ranks, path, ours=True):  # noqa: F811
    assert all(ok for ok, _ in ranks(on_ranks.dropin_rank_local, str(path), ours, True))


def test_ranks_by_themselves(ranks, d, at, path):  # noqa: F811
    rank_local(ranks, path)
    r = verify(path)
    assert r["unverifiable"] == 0 and r["values"] >= 1
    named, listed = items(path)
    assert named == listed and len(named) == 8
    assert [c["dcpd"] for c in dcpd.connect().checkpoints.list("main") if c["name"] == path.name] == [True]
    for file, offset, length in sorted(named):
        hurt(path, file, byte_of(path / file, offset, length))


def test_the_values_of_ranks_by_themselves(ranks, d, at, path):  # noqa: F811
    rank_local(ranks, path)
    r = verify(path, "values")
    assert r["all_zero"] == [{"fqn": "t", "count": 1000}] and r["nan"] == [] == r["inf"]  # rank 0's


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_ranks_manifest_that_is_gone_or_wrong(ranks, d, at, path, rank):  # noqa: F811
    rank_local(ranks, path)
    manifest, other = path / f".dcpd.{rank}.json", path / f".dcpd.{rank ^ 1}.json"
    text = manifest.read_bytes()
    for wrong, what in ((b"{", "manifest"), (b"", "manifest"), (text[:-20], "manifest"), (other.read_bytes(), "metadata is not what"),
                        (text.replace(b'"xxh3_128":"', b'"xxh3_128":"0', 1).replace(b'"},', b'},', 1), "manifest"),
                        (text.replace(b"__%d_0" % rank, b"__9_0"), "manifest"), (b'{"files":[]}', None)):
        manifest.write_bytes(wrong)
        if what:
            with pytest.raises(dcpd.CheckpointDamaged) as e:
                verify(path)
            assert e.value.code == "checkpoint_damaged" and e.value.file in (manifest.name, f"__{rank}.metadata")
        else:
            verify(path)  # what is listed nowhere has CRC32s still
    manifest.unlink()
    verify(path)
    manifest.write_bytes(text)
    digest = json.loads(text)["files"][0]["items"][0][3]
    manifest.write_bytes(text.replace(digest.encode(), digest[::-1].encode()))
    with pytest.raises(dcpd.CheckpointDamaged) as e:
        verify(path)
    assert e.value.code == "checkpoint_damaged" and e.value.file == manifest.name


def test_pytorchs_ranks_save_over_ours(ranks, d, at, path):  # noqa: F811
    rank_local(ranks, path)
    rank_local(ranks, path, ours=False)
    assert (path / ".dcpd.0.json").exists()
    assert [w["code"] for w in verify(path)["warnings"]] == ["manifest_outdated"]
    rank_local(ranks, path)
    assert verify(path)["unverifiable"] == 0


def test_one_save_of_all_replaces_those_of_ranks(ranks, d, at, path):  # noqa: F811
    rank_local(ranks, path)
    save(state(), StorageWriter(path))
    assert sorted(os.listdir(path)) == [".dcpd.json", ".metadata", "__0_0.distcp"]
    assert verify(path)["unverifiable"] == 0


def test_the_label_of_a_ranks_save(ranks, d, at, path):  # noqa: F811
    before = {j["id"] for j in dcpd.connect().jobs.list(filter="kind=save")}
    rank_local(ranks, path)
    jobs = [j for j in dcpd.connect().jobs.list(filter="kind=save") if j["id"] not in before]
    ids = [pickle.loads((path / f"__{r}.metadata").read_bytes()).storage_meta.save_id for r in range(4)]
    assert sorted(j["labels"]["save_id"] for j in jobs) == sorted(ids) and lib.fresh()
