"""The trash: a checkpoint that was deleted into it comes back whole, under its name, until its time is over."""
import json
import shutil

import pytest
from crafted import tree

import dcpd as lib


def path(d, name, tail=""):
    return d.api.storage_path("main", name, tail)


def saved(d, name, fill=0):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [5000], bytes([fill]) * 5000)})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)
    return name


def files(root, name):
    return tree(root / name)


def trashed(d, name, time="1h"):
    j = d.api.wait(d.api.delete(path(d, name) + f"?trash={time}").ok(202))
    assert j["state"] == "succeeded", j
    assert j["result"]["trash"]["id"] == j["id"] and j["result"]["bytes"] > 5000
    return j["id"]


def listed(d, name):
    return d.api.get(f"/v1/storages/main/trash?name={name.replace('/', '%2F')}").ok(200)["trash"]


def undelete(d, name, body=None):
    return d.api.post(path(d, name, ":undelete"), body)


def names(d, prefix):
    return [c["name"] for c in d.api.get(f"/v1/checkpoints/main?prefix={prefix}").ok(200)["checkpoints"]]


def test_a_time_beyond_all_calendars(d, root):
    name = saved(d, f"trash/{lib.fresh()}")
    trashed(d, name, "100000000d")
    entry, = listed(d, name)
    assert entry["until"].startswith("9999-12-31T") and "problem" not in entry
    undelete(d, name).ok(200)
    assert names(d, name) == [name]


@pytest.fixture
def root(d):
    return d.storages["main"]


def test_deleted_and_brought_back(d, root):
    name = saved(d, f"trash/{lib.fresh()}")
    before = files(root, name)
    gone = trashed(d, name)
    assert not (root / name).exists() and names(d, name) == []
    entry, = listed(d, name)
    assert entry["id"] == entry["job"] == gone and entry["name"] == name and entry["format"] == "dcp" and entry["bytes"] > 5000
    assert entry["policy"] is None and entry["deleted_at"] < entry["until"]
    assert undelete(d, name).ok(200) == {"storage": "main", "name": name, "id": gone}
    assert files(root, name) == before and names(d, name) == [name] and listed(d, name) == []
    assert d.api.run("verify", source={"storage": "main", "name": name}, level="digest")["result"]
    undelete(d, name).problem("not_found", status=404)
    assert not list((root / ".dcpd-trash").glob(gone + "*"))


def test_generations_and_a_name_that_is_taken(d, root):
    name = saved(d, f"trash/{lib.fresh()}", 1)
    first, before = trashed(d, name), files(root, saved(d, name, 2))
    second = trashed(d, name)
    assert [e["id"] for e in listed(d, name)] == [second, first]
    undelete(d, name, {"id": "01"}).problem("not_found")
    undelete(d, name, {"id": "../x"}).problem("not_found")
    undelete(d, name, {"ids": first}).problem("unknown_field")
    assert undelete(d, name).ok(200)["id"] == second
    assert files(root, name) == before
    undelete(d, name).problem("checkpoint_exists", status=409)
    undelete(d, name, {"id": first}).problem("checkpoint_exists", status=409)
    inside = saved(d, f"{name}-b/x")
    trashed(d, inside)
    shutil.copytree(root / name, root / f"{name}-b", dirs_exist_ok=True)  # its folder has become a checkpoint
    undelete(d, inside).problem("name_invalid")
    shutil.rmtree(root / f"{name}-b")
    undelete(d, inside).ok(200)  # with the folder that it was in


def test_a_file_and_bad_times(d, root):
    name = f"trash/{lib.fresh()}.safetensors"
    source = saved(d, f"trash/{lib.fresh()}")
    d.api.run("reshard", source={"storage": "main", "name": source}, target={"storage": "main", "name": name, "format": "safetensors"})
    before = (root / name).read_bytes()
    for time in ("", "soon", "-1h", "0s", "72", "000000000001h"):
        d.api.delete(path(d, name) + f"?trash={time}").problem("validation_failed")
    trashed(d, name)
    assert not (root / name).exists()
    undelete(d, name).ok(200)
    assert (root / name).read_bytes() == before


def test_its_time_is_over(d, root):
    name = saved(d, f"trash/{lib.fresh()}")
    kept = trashed(d, saved(d, f"trash/{lib.fresh()}"))
    gone = trashed(d, name, "100ms")
    lib.wait_for(lambda: not list((root / ".dcpd-trash").glob(gone + "*")), 20, "its time is over")
    lib.wait_for(lambda: not (root / f".dcpd-trash-{gone}").exists(), 20, "it is removed")
    undelete(d, name).problem("not_found")
    assert (root / ".dcpd-trash" / kept / "item").is_dir()
    lib.wait_for(lambda: d.api.get("/v1/storages/main").ok(200).get("trash", {}).get("checkpoints"), 10, "what lies there is counted")
    assert d.api.get("/v1/storages/main").ok(200)["trash"]["bytes"] > 5000


def test_pages_that_cannot_be_read(d, root):
    name = saved(d, f"trash/{lib.fresh()}")
    gone = trashed(d, name)
    page = root / ".dcpd-trash" / gone / "about.json"
    text = page.read_text()
    for bad in ("", "{", "[]", json.dumps({**json.loads(text), "name": "../../etc"}), json.dumps({**json.loads(text), "until": "soon"})):
        page.write_text(bad)
        entry = next(e for e in d.api.get("/v1/storages/main/trash").ok(200)["trash"] if e["id"] == gone)
        assert set(entry) == {"id", "problem"}
        undelete(d, name).problem("not_found")
    page.write_text(text)
    undelete(d, name).ok(200)


def test_conditions(d):
    run = f"trash-{lib.fresh()}"
    a, b = saved(d, f"{run}/step-1"), saved(d, f"{run}/step-2")
    etag = d.api.get(path(d, a)).ok(200)["etag"]

    def fails(**only_if):
        error = d.api.fails("delete", "state_conflict", target={"storage": "main", "name": a}, options={"only_if": only_if})
        assert "stays" in error["detail"]

    fails(etag="1-2")
    fails(etag=etag, present=[b, f"{run}/step-3"])
    d.api.request("PUT", f"/v1/runs/main/{run}/aliases/best", {"name": a}).ok(200)
    fails(unaliased=True)
    d.api.post("/v1/jobs", {"kind": "delete", "target": {"storage": "main", "name": a}, "options": {"only_if": {"not": 1}}}).problem(
        "unknown_field")
    d.api.request("PUT", f"/v1/runs/main/{run}/aliases/best", {"name": b}).ok(200)
    d.api.run("delete", target={"storage": "main", "name": a}, options={"only_if": {"etag": etag, "present": [b], "unaliased": True}})


def test_the_command(d, root):
    name = saved(d, f"trash/{lib.fresh()}")
    before = files(root, name)
    assert d.ctl("rm", f"main:{name}", "--yes", "--trash", "72h").returncode == 0
    out = d.ctl("trash", f"main:{name}")
    assert name in out.stdout and "UNTIL" in out.stdout
    assert json.loads(d.ctl("trash", "main", "--json").stdout)["checkpoints"] >= 1
    assert d.ctl("undelete", f"main:{name}").returncode == 0
    assert files(root, name) == before
    assert d.ctl("undelete", f"main:{name}").returncode == 6
    assert d.ctl("undelete", "main").returncode == 2
    assert d.ctl("rm", "shm:x", "--yes", "--trash", "72h").returncode == 2


@pytest.mark.slow
def test_more_than_a_list_shows_are_emptied(tmp_path):
    """A trash of more checkpoints than can be listed goes all the same, and is not read anew for each of them."""
    count, d = 100050, lib.Daemon(tmp_path, start=False)
    trash = d.storages["main"] / ".dcpd-trash"
    try:
        for i in range(count):
            item = trash / f"{i:026}" / "item"
            item.mkdir(parents=True)
            until = "2999-01-01T00:00:00Z" if i == 7 else "2020-01-01T00:00:00Z"
            (item.parent / "about.json").write_text(json.dumps({"name": f"run/step-{i}", "bytes": 1, "until": until}))
        d.start()
        lib.wait_for(lambda: d.api.get("/v1/storages/main").ok(200).get("trash", {}).get("checkpoints") == 1, 600, "all others went")
        assert [p.name for p in trash.iterdir() if p.is_dir()] == [f"{7:026}"]
    finally:
        d.discard()
