"""Repair: what was damaged is what was written, as PyTorch itself reads it, or the job says what is not known; nothing is ever worse than
before, and where there is nothing to do, nothing is changed."""
import json
import os
import pathlib
import random
import shutil
import struct

import check_ckpt
import dcpd as lib
import pytest
import torch
import torch.distributed.checkpoint as dcp
from crafted import FIXTURES
from mutate import regions

HERE = {"storage": "main"}
GOLDEN = "torch-2.15.0"
BIG = random.Random(5).randbytes(9 << 20)      # three digest blocks


def tree(directory):
    """All files but the notes, in which a verify says what it found."""
    return {str(p.relative_to(directory)): (p.read_bytes(), p.stat().st_ino) for p in sorted(directory.rglob("*"))
            if p.is_file() and p.name != ".dcpd-notes.json"}


def contents(directory):
    return {k: v[0] for k, v in tree(directory).items()}


class Place:
    """A checkpoint that may be spoiled and repaired."""

    def __init__(self, d, source=None, ignore=()):
        self.d, self.name = d, f"repair/{lib.fresh()}"
        self.dir = d.storages["main"] / self.name
        self.ref = {**HERE, "name": self.name}
        if source:
            shutil.copytree(source, self.dir, ignore=shutil.ignore_patterns(*ignore))

    def items(self):
        """FQN: (file, offset, length) of a tensor's first chunk or of a value."""
        t = self.d.api.get(self.d.api.storage_path("main", self.name, "/tensors?page_size=1000")).ok(200)
        found = {x["fqn"]: (x["file"], x["offset"], x["length"]) for x in t["values"]}
        found.update({x["fqn"]: (c["file"], c["offset"], c["length"]) for x in t["tensors"] for c in x["chunks"][:1]})
        return found

    def flip(self, file, *at):
        data = bytearray((self.dir / file).read_bytes())
        for i in at:
            data[i] ^= 0x10
        (self.dir / file).write_bytes(data)

    def repair(self, source=None, **more):
        return self.d.api.run("repair", target=self.ref, **({"from": source.ref} if source else {}), **more)["result"]

    def refused(self, *codes, source=None):
        return self.d.api.fails("repair", *codes, target=self.ref, **({"from": source.ref} if source else {}))

    def verified(self):
        job = self.d.api.wait(self.d.api.submit("verify", source=self.ref, level="digest"))
        assert job["state"] == "succeeded", job["error"]
        return job["result"]

    def loaded(self):
        """What PyTorch's own reader makes of it."""
        metadata = dcp.FileSystemReader(str(self.dir)).read_metadata()
        state = {k: torch.empty(m.size, dtype=m.properties.dtype) if hasattr(m, "size") else None
                 for k, m in metadata.state_dict_metadata.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(str(self.dir)), no_dist=True)
        return state


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        if isinstance(a[k], torch.Tensor):
            assert a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8) if a[k].ndim else a[k], b[k].view(torch.uint8)
                                                             if b[k].ndim else b[k]), k
        else:
            assert a[k] == b[k], k


def save(d, name, generation=1, world=2, tied=False, seed=0):
    """A checkpoint of dcpd's own: chunks of two ranks, small items, values, and a tensor of several digest blocks."""
    r = random.Random(seed)
    rows = [struct.pack("<1536f", *(r.random() for _ in range(1536))) for _ in range(world)]
    big = BIG[seed:] + BIG[:seed]
    images = [lib.image({"big": ("U8", [len(big)], big), "w": ("F32", [32, 48], rows[i]), "s": ("F32", [], struct.pack("<f", seed))},
                        {"tensors": {"w": {"fqn": "model.w", "global_shape": [32 * world, 48], "offsets": [32 * i, 0]}},
                         "values": {"lr": {"json": 0.5 + seed}, "name": {"json": "x" * 60}},
                         "paths": {"model.w": ["model", "w"], "lr": ["optim", 0, "lr"]}}) for i in range(world)]
    if tied:
        images[1] = lib.image({"again": ("U8", [len(big)], big), "w": ("F32", [32, 48], rows[1])},
                              {"tensors": {"w": {"fqn": "model.w", "global_shape": [32 * world, 48], "offsets": [32, 0]}}})
    d.put(name, images, generation=generation)
    p = Place(d)
    d.api.run("save", source={"state_dict": name}, target=p.ref, options={"on_divergence": "report"})
    d.drop(name)
    return p


@pytest.fixture
def made(d):
    return save(d, lib.fresh())


# ---------------------------------------------------------------------------------------------------------- metadata


def test_lost_metadata_are_made_again_byte_for_byte_out_of_the_items(d, made):
    was = contents(made.dir)
    (made.dir / ".metadata").unlink()
    result = made.repair()
    assert result["whole"] and result["changed"] and not result["unknown"] and not result["restored"]
    assert [(x["file"], x["by"], x["proven"]) for x in result["rebuilt"]] == [(".metadata", "items", True)]
    assert contents(made.dir) == was
    made.verified()


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "other", "hole"])
def test_damaged_metadata_are_made_again(d, made, how):
    was = contents(made.dir)
    data = was[".metadata"]
    damaged = {"flip": data[:400] + bytes([data[400] ^ 1]) + data[401:], "cut": data[:300], "empty": b"",
               "other": (FIXTURES / GOLDEN / "plain/checkpoint/.metadata").read_bytes(),
               "hole": data.replace(b"model.w", b"model.v", 1)}[how]
    (made.dir / ".metadata").write_bytes(damaged)
    d.api.fails("verify", "checkpoint_damaged", source=made.ref)
    assert made.repair()["rebuilt"][0]["proven"]
    assert contents(made.dir) == was


def test_a_copy_without_hidden_files_says_itself_what_it_holds(d, made):
    """`cp dir/*` copies neither metadata nor manifest."""
    copy = Place(d, made.dir, ignore=[".*"])
    assert sorted(os.listdir(copy.dir)) == ["__0_0.distcp", "__1_0.distcp"]
    result = copy.repair()
    assert result["whole"] and result["rebuilt"][0]["by"] == "items" and not result["rebuilt"][0]["proven"]
    same(copy.loaded(), made.loaded())
    assert d.api.run("diff", a=made.ref, b=copy.ref)["result"]["equal"]
    want, got = (dcp.FileSystemReader(str(p.dir)).read_metadata() for p in (made, copy))
    assert want.state_dict_metadata == got.state_dict_metadata and want.planner_data == got.planner_data
    assert want.storage_data == got.storage_data and list(want.state_dict_metadata) == list(got.state_dict_metadata)


def test_a_renamed_checkpoint_keeps_its_manifest(d, made):
    """Metadata name the checkpoint: made again under another name they are others, and the manifest tells of them."""
    copy = Place(d, made.dir, ignore=[".metadata"])
    result = copy.repair()
    assert result["whole"] and not result["rebuilt"][0]["proven"]
    assert copy.verified()["unverified_bytes"] == 0
    assert json.loads((copy.dir / ".dcpd.json").read_text())["job"] == json.loads((made.dir / ".dcpd.json").read_text())["job"]
    same(copy.loaded(), made.loaded())


def test_a_lost_manifest_and_lost_metadata_beside_a_damaged_payload_stay_invisible(d, made):
    file, offset, length = made.items()["big"]
    (made.dir / ".metadata").unlink()
    made.flip(file, offset + (5 << 20))
    was = tree(made.dir)
    result = made.repair()
    assert not result["whole"] and not result["changed"] and tree(made.dir) == was
    assert [(x["fqn"], x["file"]) for x in result["unknown"]] == [("big", file)]


def test_a_damaged_manifest_goes_when_all_crcs_are_right(d, made):
    made.flip(".dcpd.json", 200)
    want = made.loaded()
    result = made.repair()
    assert result["whole"] and result["changed"] and any(w["code"] == "manifest_lost" for w in result["warnings"])
    assert not (made.dir / ".dcpd.json").exists()
    made.verified()
    same(made.loaded(), want)


@pytest.mark.parametrize("case", ["plain", "fsdp2_adam", "dtensor_2d_shard_shard", "threads_4ranks", "nested", "shapes", "dtypes"])
def test_pytorchs_own_by_a_checkpoint_of_the_same_layout(d, case):
    """PyTorch's items say dtype and sizes; FQNs and offsets are those of the step before."""
    golden = FIXTURES / GOLDEN / case
    before, lost = Place(d, golden / "checkpoint"), Place(d, golden / "checkpoint", ignore=[".metadata"])
    lost.refused("checkpoint_incomplete")
    result = lost.repair(before)
    assert result["whole"] and result["rebuilt"][0]["by"] == f"main:{before.name}" and not result["rebuilt"][0]["proven"]
    assert any(w["code"] == "assumed" for w in result["warnings"])
    problems, _, _ = check_ckpt.check(lost.dir, golden)
    assert not problems, problems


def step(d, seed, keys=("a", "b", "c"), threads=1):
    torch.manual_seed(seed)
    p = Place(d)
    state = {"model": {k: torch.randn(17, 33) for k in keys}, "step": seed * 100000, "lr": 0.1 * seed, "note": "x" * seed}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(p.dir), thread_count=threads), no_dist=True)
    return p, {**{f"model.{k}": v for k, v in state["model"].items()}, **{k: v for k, v in state.items() if k != "model"}}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_next_step_has_other_numbers_and_values_of_other_lengths(d, threads):
    (before, _), (lost, want) = step(d, 1, threads=threads), step(d, 2, threads=threads)
    (lost.dir / ".metadata").unlink()
    assert lost.repair(before)["whole"]
    same(lost.loaded(), want)
    lost.verified()


def test_another_layout_is_refused_by_what_differs(d):
    (lost, _), (more, _), wide = step(d, 1), step(d, 1, keys="abcd"), Place(d, FIXTURES / GOLDEN / "plain/checkpoint")
    (lost.dir / ".metadata").unlink()
    was = tree(lost.dir)
    for other in (more, wide):
        problem = lost.refused("checkpoint_incomplete", source=other)
        assert other.name in problem["detail"] and problem["file"], problem
    assert tree(lost.dir) == was


# ------------------------------------------------------------------------------------------------------------ blocks


def test_nothing_to_do_changes_nothing(d, made):
    for place in (made, Place(d, FIXTURES / GOLDEN / "fsdp2_adam/checkpoint")):
        was = tree(place.dir)
        verified = d.api.run("verify", source=place.ref)["id"]
        result = place.repair()
        assert d.api.get(d.api.storage_path("main", place.ref["name"])).ok()["verified"]["job"] == verified
        assert result["whole"] and not result["changed"]
        assert not result["rebuilt"] and not result["restored"] and not result["unknown"]
        assert tree(place.dir) == was
    assert not d.staging()


def test_a_dry_run_says_what_would_be_made_and_changes_nothing(d, made):
    (made.dir / ".metadata").unlink()
    was = tree(made.dir)
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "repair", "target": made.ref}).ok(200)
    assert plan["rebuilt"][0]["proven"] and not plan["changed"] and tree(made.dir) == was
    assert "whole" not in plan  # no payload was looked at


@pytest.mark.parametrize("other", ["the same", "column-wise", "safetensors"])
def test_a_damaged_block_is_restored_from_equal_elements_whatever_their_layout_and_format(d, made, other):
    was = contents(made.dir)
    copy = Place(d)
    target = {**copy.ref, **{"the same": {}, "column-wise": {"world_size": 3, "layout": [
        {"match": "model.w", "mesh": [3], "placements": ["Shard(1)"]}]}, "safetensors": {"format": "safetensors"}}[other]}
    d.api.run("reshard", source=made.ref, target=target)
    items = made.items()
    big, w = items["big"], items["model.w"]
    made.flip(big[0], big[1] + (1 << 20), big[1] + (5 << 20))
    made.flip(w[0], w[1] + 1000)
    damage = d.api.fails("verify", "checkpoint_damaged", source=made.ref)["damage"]
    result = made.repair(copy)
    assert result["whole"] and result["changed"] and not result["unknown"]
    assert contents(made.dir) == was
    assert sorted((x["file"], x["offset"]) for x in result["restored"]) == sorted((x["file"], x["offset"]) for x in damage)
    assert {(x["fqn"], x["rank"], x["by"]) for x in result["restored"]} <= {
        (fqn, int(items[fqn][0][2]), f"main:{copy.name}") for fqn in ("big", "model.w")}
    made.verified()


def test_bytes_that_are_not_those_that_were_written_are_never_taken(d, made):
    """The other checkpoint has a tensor of this name and other numbers: digests tell."""
    other = save(d, lib.fresh(), seed=3)
    file, offset, _ = made.items()["big"]
    made.flip(file, offset + (5 << 20))
    was = tree(made.dir)
    for source in (None, other):
        result = made.repair(source)
        assert not result["whole"] and not result["changed"] and tree(made.dir) == was
        assert [(x["fqn"], x["file"]) for x in result["unknown"]] == [("big", file)]


def test_what_can_be_restored_is_though_other_damage_is_left(d, made):
    was = contents(made.dir)
    copy = Place(d, made.dir)
    copy.flip(*[(f, o + (5 << 20)) for f, o, _ in [made.items()["big"]]][0])
    items = made.items()
    made.flip(items["big"][0], items["big"][1] + (1 << 20), items["big"][1] + (5 << 20))
    result = made.repair(copy)
    assert not result["whole"] and result["changed"] and len(result["restored"]) == 1 and len(result["unknown"]) == 1
    now = contents(made.dir)
    assert sum(a != b for a, b in zip(now[items["big"][0]], was[items["big"][0]])) == 1


def test_a_replica_in_the_checkpoint_itself_is_enough(d):
    """A tied weight is stored twice under two names: one digest."""
    made = save(d, lib.fresh(), tied=True)
    was = contents(made.dir)
    file, offset, _ = made.items()["again"]
    made.flip(file, offset + (2 << 20), offset + (6 << 20))
    result = made.repair()
    assert result["whole"] and {x["by"] for x in result["restored"]} == {"replica"} and len(result["restored"]) == 2
    assert contents(made.dir) == was


@pytest.mark.parametrize("where", [0, 40, 2000, "tail", "index", "index end"])
def test_what_dcpd_writes_around_payloads_follows_from_the_rest(d, made, where):
    was = contents(made.dir)
    file, offset, length = made.items()["big"]
    size = (made.dir / file).stat().st_size
    made.flip(file, {"tail": offset + length - 30, "index": size - 4000, "index end": size - 5}.get(where) or offset + where)
    d.api.fails("verify", "checkpoint_damaged", source=made.ref)
    result = made.repair()
    assert result["whole"] and [x["by"] for x in result["restored"]] == ["items"]
    assert contents(made.dir) == was


def test_a_value_is_restored_from_an_equal_one(d, made):
    was = contents(made.dir)
    same_values, others = save(d, lib.fresh()), save(d, lib.fresh(), seed=1)
    file, offset, length = made.items()["lr"]
    made.flip(file, offset + length // 2)
    assert made.repair(others)["unknown"][0]["fqn"] == "lr"
    assert made.repair(same_values)["whole"] and contents(made.dir) == was


@pytest.mark.parametrize("how", ["lost", "cut"])
def test_a_lost_file_comes_back_from_a_copy(d, made, how):
    was = contents(made.dir)
    copy = Place(d, made.dir)
    if how == "lost":
        (made.dir / "__1_0.distcp").unlink()
    else:
        os.truncate(made.dir / "__1_0.distcp", 5000)
    result = made.repair(copy)
    assert result["whole"], result["unknown"]
    assert contents(made.dir) == was
    assert made.verified()["padding_damage"] == 0


@pytest.mark.parametrize("other", ["torch", "dcpd"])
def test_without_digests_the_items_own_crc32_decides(d, other):
    golden = FIXTURES / GOLDEN / "fsdp2_adam"
    hurt, copy = Place(d, golden / "checkpoint"), Place(d, golden / "checkpoint")
    was = contents(hurt.dir)
    if other == "dcpd":
        shutil.rmtree(copy.dir)
        d.api.run("reshard", source={**HERE, "name": hurt.name}, target={**copy.ref, "world_size": 3})
    payload = max((r for r in regions(hurt.dir) if r.kind == "payload"), key=lambda r: r.end - r.begin)
    fqn = payload.fqn
    hurt.flip(payload.file, (payload.begin + payload.end) // 2)
    assert not hurt.repair()["whole"] and contents(hurt.dir) != was
    result = hurt.repair(copy)
    assert result["whole"] and [x["fqn"] for x in result["restored"]] == [fqn]
    assert contents(hurt.dir) == was


def test_an_item_of_pytorchs_with_a_damaged_head_is_taken_whole_from_an_equal_one(d):
    (hurt, want), (copy, _), (next_step, _) = step(d, 1), step(d, 1), step(d, 2)
    was = contents(hurt.dir)
    for fqn, at in (("model.b", 70), ("note", 70)):
        file, offset, _ = hurt.items()[fqn]
        hurt.flip(file, offset + at)
    assert len(hurt.repair(next_step)["unknown"]) == 2
    assert hurt.repair(copy)["whole"] and contents(hurt.dir) == was


def test_replicas_of_ranks_that_saved_alone(d):
    """A rank-local checkpoint has what several ranks hold once for each."""
    golden = FIXTURES / GOLDEN / "rank_local"
    hurt = Place(d, golden / "checkpoint")
    was = contents(hurt.dir)
    restored = []
    for r in [r for r in regions(hurt.dir) if r.kind in ("payload", "pickle", "value")]:
        hurt.flip(r.file, (r.begin + r.end) // 2)
        result = hurt.repair()
        assert result["whole"] == (contents(hurt.dir) == was) and all(x["by"] == "replica" for x in result["restored"]), (r, result)
        restored += [(r.fqn, r.kind)] * result["whole"]
        (hurt.dir / r.file).unlink()
        (hurt.dir / r.file).write_bytes(was[r.file])
    assert {kind for _, kind in restored} == {"payload", "pickle", "value"}, restored


def test_safetensors_by_their_manifest(d, made):
    hf = Place(d)
    d.api.run("reshard", source=made.ref, target={**hf.ref, "format": "safetensors", "max_file_bytes": 1 << 20})
    was = contents(hf.dir)
    names = sorted(f for f in was if f.endswith(".safetensors"))
    large = max(names, key=lambda f: len(was[f]))
    hf.flip(large, len(was[large]) - 100)
    result = hf.repair(made)
    assert result["whole"] and result["restored"][0]["by"] == f"main:{made.name}" and contents(hf.dir) == was


# ------------------------------------------------------------------------------------------------------ what is refused


def test_single_files_and_what_is_not_there_are_refused(d, made):
    torch.save({"w": torch.ones(3)}, d.storages["main"] / "repair/one.pt")
    p = d.api.fails("repair", "format_unsupported", target={**HERE, "name": "repair/one.pt"})
    assert "one file" in p["detail"]
    d.api.post("/v1/jobs", {"kind": "repair", "target": {**HERE, "name": "repair/nothing"}}).problem("not_found")
    (d.storages["main"] / "repair/empty").mkdir()
    d.api.fails("repair", "checkpoint_incomplete", target={**HERE, "name": "repair/empty"})
    itself = d.api.post("/v1/jobs", {"kind": "repair", "target": made.ref, "from": made.ref}).problem("validation_failed")
    assert itself["pointer"] == "/from"
    d.api.fails("repair", "not_found", target=made.ref, **{"from": {**HERE, "name": "repair/nothing"}})
    d.api.post("/v1/jobs", {"kind": "repair", "source": made.ref}).problem("unknown_field", "validation_failed")


def index_of(data):
    """(begin, JSON) of the index at a file's end."""
    n = json.loads("{" + data[-42:].decode().lstrip(","))["bytes"]
    return len(data) - n, json.loads(data[-n:])


def with_index(data, doc):
    import zlib
    begin, _ = index_of(data)
    body = json.dumps({k: v for k, v in doc.items() if k not in ("bytes", "crc32")}, separators=(",", ":"))[:-1].encode()
    body += b" " * (-(len(body) + 42) % 4096)
    return data[:begin] + body + b',"bytes":%12d,"crc32":"%08x"}\n' % (len(body) + 42, zlib.crc32(body))


HOSTILE = {
    "beyond": lambda x: x["t"][0][6].__setitem__(1, 1 << 40),
    "length": lambda x: x["t"][0][6].__setitem__(2, 1 << 40),
    "negative": lambda x: x["t"][0][6].__setitem__(1, -1),
    "number": lambda x: x["t"][0].__setitem__(0, 1 << 31),
    "chunk": lambda x: x["t"][0][6].__setitem__(0, 1 << 31),
    "twice": lambda x: x["t"].append(x["t"][0]),
    "counts": lambda x: x.update(tensors=1 << 60),
    "many": lambda x: x.update(tensors=1 << 29, chunks=1 << 29, values=1 << 29),
    "dtype": lambda x: x["t"][0].__setitem__(3, "float33"),
    "shape": lambda x: x["t"][0].__setitem__(5, [1 << 62, 1 << 62]),
    "dims": lambda x: x["t"][0].__setitem__(5, [1] * 100),
    "outside": lambda x: x["t"][0].__setitem__(5, [1]),
    "path": lambda x: x["t"][0].__setitem__(2, ["a"] * 1000),
    "same name": lambda x: [t.__setitem__(1, "x") for t in x["t"]],
    "long name": lambda x: x["t"][0].__setitem__(1, "x" * 100000),
    "deep": lambda x: x.update(t=[[[[[[[[[[[]]]]]]]]]]]),
    "none": lambda x: (x["t"].clear(), x["v"].clear()),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_an_index_that_lies_is_an_error_and_nothing_else(d, made, how):
    lying = Place(d, made.dir, ignore=[".*"])
    for file in ("__0_0.distcp", "__1_0.distcp"):
        data = (lying.dir / file).read_bytes()
        _, doc = index_of(data)
        HOSTILE[how](doc)
        (lying.dir / file).write_bytes(with_index(data, doc))
    was = tree(lying.dir)
    problem = lying.refused("format_metadata", "checkpoint_incomplete", "duplicate_key", "dtype_unsupported", "limit_exceeded",
                            "plan_invalid", "coverage_hole")
    assert problem["detail"]
    assert tree(lying.dir) == was


def test_an_index_like_the_one_that_was_written_is_read(d, made):
    """The hostile ones are refused for what they say, not for how this test writes them."""
    copy = Place(d, made.dir, ignore=[".*"])
    for file in ("__0_0.distcp", "__1_0.distcp"):
        data = (copy.dir / file).read_bytes()
        (copy.dir / file).write_bytes(with_index(data, index_of(data)[1]))
    assert copy.repair()["whole"]
    same(copy.loaded(), made.loaded())


def test_marks_of_archives_inside_of_payloads_mislead_nobody(d):
    """A tensor whose bytes are an archive, and one of nothing but end records."""
    (source, _), lost = step(d, 1), Place(d)
    file, offset, length = source.items()["model.a"]
    archive = (source.dir / file).read_bytes()[offset:offset + length]
    ends = archive[-22:] * 40
    state = {"archive": torch.frombuffer(bytearray(archive * 2), dtype=torch.uint8).clone(),
             "ends": torch.frombuffer(bytearray(ends), dtype=torch.uint8).clone(), "after": torch.arange(5.0)}
    for place in (source, lost):
        shutil.rmtree(place.dir, ignore_errors=True)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(place.dir)), no_dist=True)
    (lost.dir / ".metadata").unlink()
    assert lost.repair(source)["whole"]
    same(lost.loaded(), state)


def test_dcpctl_says_what_came_of_it(d, made):
    ref = f"main:{made.name}"
    done = d.ctl("repair", ref)
    assert done.returncode == 0 and "nothing to repair" in done.stdout
    copy = Place(d, made.dir)
    (made.dir / ".metadata").unlink()
    done = d.ctl("repair", ref)
    assert done.returncode == 0 and ".metadata" in done.stdout and "items" in done.stdout, done.stdout
    file, offset, _ = made.items()["big"]
    made.flip(file, offset + (5 << 20))
    done = d.ctl("repair", ref)
    assert done.returncode == 1 and "big" in done.stdout and "1 place is still damaged" in done.stdout, done.stdout
    done = d.ctl("repair", ref, "--from", f"main:{copy.name}")
    assert done.returncode == 0 and "restored" in done.stdout.lower(), done.stdout
    assert d.ctl("repair", ref, "--json").returncode == 0
