"""Copies of checkpoints, byte for byte: every format, whole folders, compared on the way, and nothing left of one that went wrong."""
import json
import os
import pathlib
import shutil

import pytest
from crafted import FIXTURES, Crafted, tree
from users import ALICE

import dcpd as lib

NOTES, COPIED = ".dcpd-notes.json", ".dcpd-copied.json"
MB = 1 << 20


def ref(storage, name):
    return {"storage": storage, "name": name}


def saved(d, size=5000, world=1, name=None):
    sd, name = lib.fresh(), name or f"copies/{lib.fresh()}"
    d.put(sd, [lib.image({"a": ("U8", [size], os.urandom(size)), "b": ("F32", [3], bytes(12))}) for _ in range(world)])
    try:
        d.api.run("save", source={"state_dict": sd}, target=ref("main", name))
    finally:
        d.drop(sd)
    return name


def copy(d, name, to=None, storage="other", source="main", **more):
    return d.api.run("replicate", source=ref(source, name), target=ref(storage, to or name), **more)


def files(folder):
    return {k: v for k, v in tree(folder).items() if k not in (COPIED, NOTES)}


def same(d, name, to=None, storage="other", source="main"):
    """The copy has the same bytes, dcpd finds it whole, and equal."""
    a, b = d.storages[source] / name, d.storages[storage] / (to or name)
    assert files(b) == files(a) if a.is_dir() else b.read_bytes() == a.read_bytes()
    return d.api.run("diff", a=ref(source, name), b=ref(storage, to or name), read_all=True)["result"]["equal"]


@pytest.mark.parametrize("form", [{"format": "safetensors"}, {"format": "torch"}, {"format": "npz"}, {"format": "dcp"},
                                  {"format": "safetensors", "max_file_bytes": 4000}, {"format": "safetensors", "file": True}])
def test_formats_that_dcpd_writes(d, form):
    form = dict(form)
    ends = {"torch": ".pt", "npz": ".npz"}.get(form["format"], ".safetensors" if form.pop("file", False) else "")
    source, name = Crafted(d.storages["main"]), f"copies/{lib.fresh()}{ends}"
    d.api.run("reshard", source=source.ref, target={**ref("main", name), **form})
    job = copy(d, name)
    assert same(d, name)
    one, other = (d.api.get(d.api.storage_path(s, name)).ok(200) for s in ("main", "other"))
    assert [one[k] for k in ("format", "bytes", "world_size", "files", "tensors")] == \
           [other[k] for k in ("format", "bytes", "world_size", "files", "tensors")]
    r = job["result"]
    assert r["bytes"] == one["bytes"] and r["format"] == one["format"] and r["verified_bytes"] + r["unverified_bytes"] == one["bytes"]
    if not ends:
        assert r["unverified_bytes"] == 0, r["unverified"]
        assert job["milestones"]["durable"]
        verified = d.api.run("verify", source=ref("other", name), level="digest")["result"]
        assert verified["unverified_bytes"] == 0 and verified["padding_damage"] == 0


@pytest.mark.parametrize("case", ["torch-2.15.0/sharded_rowwise", "torch-2.15.0/plain", "torch-2.2.2/plain"])
def test_what_pytorch_wrote(d, case):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    source = Crafted(d.storages["main"], case)
    job = copy(d, source.name)
    assert same(d, source.name)
    assert job["result"]["verified_bytes"] == 0 and job["result"]["unverified_bytes"] == job["result"]["bytes"]
    there = d.storages["other"] / source.name
    there, here = (dcp.FileSystemReader(p).read_metadata() for p in (there, source.dir))
    assert there.state_dict_metadata == here.state_dict_metadata


def test_every_golden_checkpoint(d):
    """All layouts and formats that PyTorch and DeepSpeed write, those with a folder of files and those of rank-local metadata too."""
    cases = sorted(p.parent for p in (FIXTURES / "torch-2.15.0").glob("*/checkpoint")) + sorted(FIXTURES.glob("megatron*/*"))
    done = 0
    for case in cases:
        name = f"golden/{case.parent.name}-{case.name}-{lib.fresh()}"
        shutil.copytree(case / "checkpoint" if (case / "checkpoint").exists() else case, d.storages["main"] / name)
        asked = {"kind": "replicate", "source": ref("main", name), "target": ref("other", name)}
        if d.api.post("/v1/jobs?dry_run=true", asked).status != 200:
            continue  # a fixture that is no checkpoint by itself
        copy(d, name)
        assert same(d, name), name
        done += 1
    assert done > 30


def test_zero(d):
    """A training's folder stands for its step, whose folder is copied; a universal one has a folder for each parameter."""
    torch = pytest.importorskip("torch")
    import zero_files
    name, groups = f"copies/{lib.fresh()}", [{"a": torch.randn(11, 6), "b": torch.randn(30)}]
    step = zero_files.write(d.storages["main"] / name, 1, 2, groups).name
    zero_files.write_universal(d.storages["main"] / f"{name}u", 1, 2, groups)
    for one in (f"{name}/{step}", f"{name}u/{step}_universal"):
        copy(d, one)
        assert same(d, one)
    copy(d, name, f"{name}-step")
    assert files(d.storages["other"] / f"{name}-step") == files(d.storages["main"] / name / step)
    assert d.api.run("diff", a=ref("main", name), b=ref("other", f"{name}-step"))["result"]["equal"]


def test_pytorch_loads_the_copy(d):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    name = saved(d, size=300_000)
    copy(d, name)
    got = [{"a": torch.zeros(300_000, dtype=torch.uint8), "b": torch.ones(3)} for _ in range(2)]
    for sd, storage in zip(got, ("main", "other")):
        dcp.load(sd, storage_reader=dcp.FileSystemReader(d.storages[storage] / name), no_dist=True)
    assert torch.equal(got[0]["a"], got[1]["a"]) and torch.equal(got[1]["b"], torch.zeros(3))


def test_delta_and_large_items(d):
    base, new = saved(d, 9 * MB + 17, world=2), saved(d, 9 * MB + 17, world=2)
    delta = f"copies/{lib.fresh()}"
    d.api.run("delta", base=ref("main", base), source=ref("main", new), target=ref("main", delta))
    for name in (base, delta):
        r = copy(d, name)["result"]
        assert files(d.storages["other"] / name) == files(d.storages["main"] / name)
        assert r["unverified_bytes"] == 0 and r["verified_bytes"] == r["bytes"]
    assert same(d, base)
    d.api.run("apply", base=ref("other", base), source=ref("other", delta), target=ref("other", delta + "-new"))
    assert d.api.run("diff", a=ref("main", new), b=ref("other", delta + "-new"))["result"]["equal"]


def test_all_that_lies_in_the_folder(d):
    name = saved(d)
    folder, there = d.storages["main"] / name, d.storages["other"] / name
    (folder / "logs" / "deep").mkdir(parents=True)
    (folder / "logs" / "deep" / "loss.csv").write_text("1,2\n")
    (folder / "config.json").write_text("{}")
    (folder / "empty").write_text("")
    (folder / "nothing").mkdir()
    d.api.request("PUT", d.api.storage_path("main", name, "/hold"), {"reason": "mine"}).ok(200)
    r = copy(d, name)["result"]
    assert same(d, name) and r["files"] == len([p for p in folder.rglob("*") if p.is_file() and p.name != NOTES])
    assert not (there / NOTES).exists() and "hold" not in d.api.get(d.api.storage_path("other", name)).ok(200)
    d.api.delete(d.api.storage_path("main", name, "/hold")).ok(200)
    page = json.loads((there / COPIED).read_text())
    assert page["kind"] == "replicate" and page["source"]["name"] == name and page["source"]["storage"] == "main"
    d.api.fails("replicate", "checkpoint_exists", source=ref("main", name), target=ref("other", name))
    copy(d, name, options={"overwrite": True})  # what was copied may be replaced …
    assert same(d, name)
    (there / "logs" / "deep" / "mine.txt").write_text("")  # … and nothing else
    e = d.api.fails("replicate", "not_a_checkpoint", source=ref("main", name), target=ref("other", name), options={"overwrite": True})
    assert e["file"].endswith("mine.txt") and (there / "logs" / "deep" / "mine.txt").exists()
    again = f"copies/{lib.fresh()}"
    copy(d, name, again, "main", "other")  # a copy of a copy
    assert json.loads((d.storages["main"] / again / COPIED).read_text())["source"]["storage"] == "other"


@pytest.mark.parametrize("make", ["symlink", "fifo", "folder_link"])
def test_what_is_no_file_is_refused_by_name(d, make):
    name = saved(d)
    folder = d.storages["main"] / name
    if make == "fifo":
        os.mkfifo(folder / "odd")
    else:
        (folder / "odd").symlink_to("/etc/passwd" if make == "symlink" else "/etc")
    e = d.api.fails("replicate", "name_invalid", source=ref("main", name), target=ref("other", name))
    assert e["file"] == "odd" and not (d.storages["other"] / name).exists()


def test_a_flipped_bit_is_named(d):
    name = saved(d, 6 * MB)
    path = next(p for p in (d.storages["main"] / name).glob("*.distcp"))
    data = bytearray(path.read_bytes())
    at = 5 * MB + 4321
    data[at] ^= 4
    path.write_bytes(data)
    e = d.api.fails("replicate", "digest_mismatch", source=ref("main", name), target=ref("other", name))
    assert e["file"] == path.name and e["offset"] <= at < e["offset"] + 4 * MB and e["expected"] != e["actual"]
    assert not (d.storages["other"] / name).exists() and d.storages["other"].exists()


@pytest.mark.parametrize("hurt", [".metadata", ".dcpd.json"])
def test_damaged_metadata(d, hurt):
    name = saved(d)
    path = d.storages["main"] / name / hurt
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    d.api.fails("replicate", "checkpoint_damaged", "format_manifest", source=ref("main", name), target=ref("other", name))


def slow(d, size=96 * MB):
    """A copy that takes long enough to be met on its way."""
    name = saved(d, size)
    job = d.api.submit("replicate", source=ref("main", name), target=ref("other", name), options={"pace": "background"})["id"]
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{job}").ok(200)["state"] == "running", 60)
    return name, job


@pytest.mark.long
def test_a_source_that_changes_leaves_no_copy(d):
    name, job = slow(d)
    (d.storages["main"] / name / "late.txt").write_text("")
    done = d.api.wait(job)
    assert done["error"]["code"] == "checkpoint_replaced" and done["error"]["file"] == "late.txt", done
    assert not (d.storages["other"] / name).exists()


@pytest.mark.long
def test_killed_worker(d):
    name, job = slow(d)
    d.kill_workers()
    assert d.api.wait(job)["state"] == "succeeded"
    assert same(d, name)


@pytest.mark.long
def test_killed_daemon(spawn):
    d = spawn(("main", "other"))
    name, job = slow(d)
    d.kill()
    d.start()
    assert d.api.wait(job)["state"] == "succeeded"
    assert same(d, name)


def test_full_target(spawn, mounted):
    d = spawn(("main",))
    small = mounted("size=3m")
    d.stop()
    d.storages["other"] = small
    d.start()
    name = saved(d, 8 * MB)
    asked = {"kind": "replicate", "source": ref("main", name), "target": ref("other", name)}
    d.api.post("/v1/jobs", asked).problem("storage_full", status=507)
    little = saved(d, MB)
    copy(d, little)
    assert same(d, little)


def test_requests(d):
    name = saved(d)
    d.api.post("/v1/jobs", {"kind": "replicate", "source": ref("main", name), "target": ref("main", name)}).problem("validation_failed")
    d.api.post("/v1/jobs", {"kind": "replicate", "source": ref("main", "nothing/there"), "target": ref("other", "x")}).problem("not_found")
    asked = {"kind": "replicate", "source": ref("main", name), "target": ref("other", name)}
    d.api.post("/v1/jobs", {**asked, "include": ["a"]}).problem("unknown_field")
    plan = d.api.post("/v1/jobs?dry_run=true", asked).ok(200)
    assert plan["bytes"] == d.api.get(d.api.storage_path("main", name)).ok(200)["bytes"] and not (d.storages["other"] / name).exists()
    out = d.ctl("cp", f"main:{name}", f"other:{name}", "--json")
    assert out.returncode == 0 and json.loads(out.stdout)["result"]["files"], out
    assert d.ctl("diff", f"main:{name}", f"other:{name}").returncode == 0
    assert d.ctl("cp", f"main:{name}", f"other:{name}").returncode == 5 and d.ctl("cp", f"main:{name}").returncode == 2
