"""Storages that are full, read-only or gone; ad-hoc ones; names that would leave them."""
import contextlib
import os
import shutil
import subprocess

import pytest
from crafted import Crafted, tree

import dcpd as lib
import streaming

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")


def state_dict(d, size):
    sd = lib.fresh()
    d.put(sd, [lib.image({"w": ("U8", [size], os.urandom(size))})])
    return sd


@root_only
def test_full(spawn, mounted):
    m = mounted("size=4m")
    d = spawn({"main": m})
    small, big = state_dict(d, 100_000), state_dict(d, 8 << 20)
    d.api.run("save", source={"state_dict": small}, target={"storage": "main", "name": "old"})
    before = tree(m)
    new = {"kind": "save", "source": {"state_dict": big}, "target": {"storage": "main", "name": "new"}}
    p = d.api.post("/v1/jobs", new).problem("storage_full", status=507)
    assert str(8 << 20)[:2] in p["detail"] or p.get("expected"), f"needed and free: {p}"
    p = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": big}, "target": {"storage": "main", "name": "old"},
                                "options": {"overwrite": True}}).problem("storage_full", status=507)
    assert tree(m) == before and not d.leaks()
    d.api.run("verify", source={"storage": "main", "name": "old"}, level="digest")


@root_only
@pytest.mark.parametrize("sealed", [False, True], ids=["filling", "sealed"])
def test_full_while_it_awaits_seals(spawn, mounted, sealed):
    """How much it would write was not known when the job was made."""
    m = mounted("size=4m")
    d = spawn({"main": m})
    d.api.run("save", source={"state_dict": state_dict(d, 100_000)}, target={"storage": "main", "name": "old"})
    before, sd = tree(m), lib.fresh()
    d.create(sd)
    j = streaming.submit(d, sd, name="old", options={"overwrite": True})
    r = streaming.Filling(d, sd, 0, lib.image({"w": ("U8", [8 << 20], os.urandom(8 << 20))}))
    if sealed:
        r.seal().ok(200)
    j = d.api.wait(j, 20)
    assert j["state"] == "failed", j
    p = lib.check_problem(j["error"], "storage_full")
    assert p["file"] == "__0_0.distcp" and 8 << 20 <= int(p["detail"].split("allocate ")[1].split()[0]) < 9 << 20, p  # bytes
    if not sealed:  # the trainer goes on as if nothing had been
        r.seal().ok(200)
    assert tree(m) == before and not d.leaks()
    d.api.run("verify", source={"storage": "main", "name": "old"}, level="digest")


@root_only
def test_fills_up_meanwhile(spawn, mounted):
    """Space was there when the job was accepted; something else takes it. The job fails, nothing is left."""
    m = mounted("size=64m")
    d = spawn({"main": m})
    sd = state_dict(d, 40 << 20)
    hog = m / "hog"
    j = d.api.submit("save", source={"state_dict": sd}, target={"storage": "main", "name": "x"})
    with contextlib.suppress(OSError), open(hog, "wb") as f:  # the save may have taken the room for the file itself
        while True:
            f.write(bytes(1 << 20))
            f.flush()
    j = d.api.wait(j)
    if j["state"] == "failed":
        lib.check_problem(j["error"], "storage_full", "storage_io")
        assert not (m / "x").exists()
    else:  # it was faster; the storage has no room for two
        d.api.run("verify", source={"storage": "main", "name": "x"}, level="digest")
        d.api.run("delete", target={"storage": "main", "name": "x"})
    assert not d.staging(), d.staging()
    hog.unlink(missing_ok=True)
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "y"})


@root_only
def test_what_goes_makes_room_for_the_next(spawn, mounted):
    """There is room for two: who has heard of the end of a job that replaced or deleted one can save the next."""
    d = spawn({"main": mounted("size=64m")})
    source = {"state_dict": state_dict(d, 24 << 20)}
    for name in "aaabbb":
        d.api.run("save", source=source, target={"storage": "main", "name": name}, options={"overwrite": True})
        if name == "b":
            d.api.run("delete", target={"storage": "main", "name": name})


@root_only
def test_read_only(spawn, mounted):
    m = mounted("size=16m")
    d = spawn({"main": m})
    sd = state_dict(d, 1000)
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "old"})
    subprocess.run(["mount", "-o", "remount,ro", str(m)], check=True)
    d.api.fails("save", "storage_readonly", source={"state_dict": sd}, target={"storage": "main", "name": "new"})
    d.api.fails("delete", "storage_readonly", target={"storage": "main", "name": "old"})
    d.api.run("load", source={"storage": "main", "name": "old"}, target={"state_dict": "back"})
    subprocess.run(["mount", "-o", "remount,rw", str(m)], check=True)
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "new"})


@root_only
def test_disk_error_while_reading(spawn, mounted):
    """A file of one checkpoint cannot be read: that job fails and says which; others go on."""
    d = spawn({"main": mounted("size=16m")})
    c = Crafted(d.storages["main"])
    f = c.files()[0]
    f.unlink()
    f.mkdir()
    p = d.api.fails("load", "storage_io", "format_item", "format_metadata", "checkpoint_incomplete", source=c.ref,
                    target={"state_dict": "x"})
    assert p["file"] == f.name, p
    d.api.run("verify", source=Crafted(d.storages["main"]).ref, level="digest")


def test_gone(spawn):
    d = spawn()
    sd = state_dict(d, 1000)
    save = {"source": {"state_dict": sd}, "target": {"storage": "main", "name": "new"}}
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "old"})
    shutil.rmtree(d.storages["main"])
    ref = {"storage": "main", "name": "old"}
    d.api.fails("save", "storage_gone", **save)
    d.api.fails("load", "storage_gone", "not_found", source=ref, target={"state_dict": "x"})
    d.api.get(d.api.storage_path("main", "old")).problem("storage_gone", "not_found")
    d.api.get("/livez").ok(200)
    assert not d.storages["main"].exists()
    d.storages["main"].mkdir()  # as an unmounted disk comes back: another directory of the same name

    def works():
        a = d.api.post("/v1/jobs", {"kind": "save", **save})
        return a.status == 202 and d.api.wait(a.json)["state"] == "succeeded"

    lib.wait_for(works, 20, "the storage is back")
    assert (d.storages["main"] / "new/.metadata").exists()


def test_missing_at_start(tmp_path):
    """A storage that is not there does not keep the others from working."""
    d = lib.Daemon(tmp_path / "d", {"main": tmp_path / "main"}, args=["--storage", f"lost={tmp_path}/nothing"])
    try:
        sd = state_dict(d, 10)
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "a"})
        d.api.fails("save", "storage_gone", source={"state_dict": sd}, target={"storage": "lost", "name": "a"})
        assert not (tmp_path / "nothing").exists()
    finally:
        d.discard()


def test_ad_hoc(d, tmp_path):
    name = f"tmp-{lib.fresh()}"
    d.api.post("/v1/storages", {"name": name, "path": str(tmp_path)}).ok(201)
    c = Crafted(d.storages["main"])
    d.api.run("reshard", source=c.ref, target={"storage": name, "name": "x"})
    assert (tmp_path / "x/.metadata").exists()
    (tmp_path / "elsewhere").mkdir()
    d.api.post("/v1/storages", {"name": name, "path": str(tmp_path / "elsewhere")}).problem()
    d.api.post("/v1/storages", {"name": "main", "path": str(tmp_path)}).problem()
    d.tcp_client().post("/v1/storages", {"name": "tmp-b", "path": str(tmp_path)}).problem("forbidden", status=403)
    for body in ({"name": "tmp-c", "path": "relative"}, {"name": "tmp-c"}, {"name": "../x", "path": "/"},
                 {"name": "shm", "path": str(tmp_path)}, {"name": "tmp-d", "path": str(tmp_path / "no")}):
        d.api.post("/v1/storages", body).problem("validation_failed", "name_invalid", "storage_gone", "not_found")


def test_a_link_on_the_way(d, tmp_path):
    """A folder of the storage that is a link to outside is not followed, for reading or writing."""
    (d.storages["main"] / "way").unlink(missing_ok=True)
    (d.storages["main"] / "way").symlink_to(tmp_path)
    inside = Crafted(d.storages["main"])
    shutil.copytree(inside.dir, tmp_path / "x")
    codes = ("not_found", "not_a_checkpoint", "forbidden", "storage_io", "checkpoint_incomplete", "name_invalid")
    d.api.fails("load", *codes, source={"storage": "main", "name": "way/x"}, target={"state_dict": lib.fresh()})
    d.api.fails("reshard", *codes, source=inside.ref, target={"storage": "main", "name": "way/y"})
    assert sorted(os.listdir(tmp_path)) == ["x"]
    (d.storages["main"] / "way").unlink()


def test_left_overs_are_swept_at_start(spawn):
    d = spawn()
    sd = state_dict(d, 10)
    job = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "run/a"})
    d.stop()
    ours = "01ARZ3NDEKTSV4RRFFQ6" + job["id"][-6:]
    others = d.storages["main"] / ("run/.dcpd-01ARZ3NDEKTSV4RRFFQ6" + job["id"][:-7:-1] + "-1")  # of another daemon, at work there
    for p in (d.storages["main"] / f"run/.dcpd-{ours}-1", d.storages["main"] / f".dcpd-trash-{ours}", others):
        p.mkdir()
        (p / "__0_0.distcp").write_bytes(b"x" * 1000)
    d.start()
    lib.wait_for(lambda: len(d.staging()) == 1, 15, "left-overs swept")
    assert others.is_dir()
    shutil.rmtree(others)
    d.api.run("verify", source={"storage": "main", "name": "run/a"}, level="digest")
