"""Holds: nothing removes or replaces a held checkpoint, whoever wrote it, and what says so lies beside it."""
import json
import os
import shutil
import threading

import pytest
import users
from crafted import Crafted, tree
from users import ALICE, BOB

import dcpd as lib

NOTES = ".dcpd-notes.json"


@pytest.fixture
def root(d):
    return d.storages["main"]


def path(d, name, tail="/hold"):
    return d.api.storage_path("main", name, tail)


def hold(d, name, reason=None):
    return d.api.request("PUT", path(d, name), None if reason is None else {"reason": reason}).ok(200)


def unhold(d, name):
    return d.api.delete(path(d, name)).ok(200)


def record(d, name):
    one = d.api.get(path(d, name, "")).ok(200)
    listed = [x for x in d.api.get("/v1/checkpoints/main?page_size=1000&prefix=" + name).ok(200)["checkpoints"] if x["name"] == name]
    assert all(x.get("hold") == one.get("hold") for x in listed)  # of a file in a folder of such the folder is listed
    return one


def saved(d, name=None, **options):
    sd, name = lib.fresh(), name or f"holds/{lib.fresh()}"
    d.put(sd, [lib.image({"a": ("U8", [5000], bytes(5000))})])
    try:
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name}, options=options)
    finally:
        d.drop(sd)
    return name


def refused(d, name, file=False):
    """Every way in which dcpd could remove or replace it, by a request; nothing in the storage changes."""
    before = tree(d.storages["main"])
    target = {"storage": "main", "name": name}
    assert f"`dcpctl unhold main:{name}`" in d.api.delete(path(d, name, "")).problem("checkpoint_held", status=409)["detail"]
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [5000], bytes(5000))})])
    for options in ({"overwrite": True}, {"overwrite": True, "in_place": "always"}, {"overwrite": True, "beside": "needed"}):
        if not file:
            d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": target,
                                    "options": options}).problem("checkpoint_held", status=409)
    d.api.post("/v1/jobs", {"kind": "reshard", "source": {"storage": "golden", "name": "torch-2.15.0/plain/checkpoint"}, "target": target,
                            "options": {"overwrite": True}}).problem("checkpoint_held", status=409)
    d.drop(sd)
    assert tree(d.storages["main"]) == before


def test_a_held_checkpoint_stays(d, root):
    name = saved(d)
    before = record(d, name)
    assert "hold" not in before
    made = hold(d, name, "the paper's weights")
    assert made["storage"] == "main" and made["name"] == name
    assert made["hold"]["owner"] == os.geteuid() and made["hold"]["reason"] == "the paper's weights"
    after = record(d, name)
    assert after["hold"] == made["hold"] and after["etag"] == before["etag"] and after["bytes"] == before["bytes"]
    refused(d, name)
    d.api.post("/v1/jobs?dry_run=true", {"kind": "delete", "target": {"storage": "main", "name": name}}).problem("checkpoint_held")
    assert hold(d, name)["hold"]["reason"] == ""  # again: another reason
    assert d.api.run("verify", source={"storage": "main", "name": name}, level="digest")["result"]
    assert unhold(d, name)["hold"] is None and unhold(d, name)["hold"] is None
    assert "hold" not in json.loads((root / name / NOTES).read_text()) and "hold" not in record(d, name)  # verified stays
    saved(d, name, overwrite=True)
    d.api.wait(d.api.delete(path(d, name, "")).ok(202))
    assert not (root / name).exists()


def test_foreign_checkpoints_and_copies(d, root):
    c = Crafted(root)
    torch = pytest.importorskip("torch.distributed.checkpoint")
    before = torch.FileSystemReader(c.dir).read_metadata()
    hold(d, c.name, "from PyTorch")
    refused(d, c.name)
    assert torch.FileSystemReader(c.dir).read_metadata().state_dict_metadata.keys() == before.state_dict_metadata.keys()
    copy = f"holds/{lib.fresh()}"
    shutil.copytree(c.dir, root / copy)
    assert record(d, copy)["hold"] == record(d, c.name)["hold"]
    refused(d, copy)
    for name in (copy, c.name):
        unhold(d, name)
        d.api.wait(d.api.delete(path(d, name, "")).ok(202))


def test_files_and_folders_of_files(d, root):
    folder = f"holds/{lib.fresh()}"
    name = folder + "/model.safetensors"
    source = Crafted(root)
    d.api.run("reshard", source=source.ref, target={"storage": "main", "name": name, "format": "safetensors"})
    lib.wait_for(lambda: not list((root / folder).glob(".dcpd-0*")), 10, "the sweep behind the job")
    hold(d, name, "one file")
    assert record(d, name)["hold"]["reason"] == "one file"
    assert {p.name for p in (root / folder).iterdir() if NOTES in p.name} == {".model.safetensors" + NOTES}
    refused(d, name, file=True)
    job = d.api.wait(d.api.delete(path(d, folder, "")).ok(202))  # the folder is a checkpoint, too, and the worker looks into it
    lib.check_problem(job["error"], "checkpoint_held")
    unhold(d, name)
    hold(d, folder, "all files")
    assert d.api.delete(path(d, name, "")).problem("checkpoint_held")["detail"].startswith(f"'{folder}'")
    unhold(d, folder)
    assert not [p.name for p in (root / folder).iterdir() if NOTES in p.name]
    d.api.wait(d.api.delete(path(d, folder, "")).ok(202))
    assert not (root / folder).exists()


def test_what_lies_in_a_folder(d, root):
    """A folder with something held in it is neither replaced nor removed, however deep that lies."""
    folder = f"holds/{lib.fresh()}"
    source = Crafted(root)
    target = {"storage": "main", "name": folder, "format": "safetensors"}
    d.api.run("reshard", source=source.ref, target=target)
    file = next(p.name for p in (root / folder).iterdir() if p.suffix == ".safetensors")
    hold(d, f"{folder}/{file}")
    error = d.api.fails("reshard", "checkpoint_held", source=source.ref, target=target, options={"overwrite": True})
    assert file in error["detail"], error
    unhold(d, f"{folder}/{file}")
    shutil.copytree(root / source.name, root / folder / "logs/checkpoint-500")
    hold(d, f"{folder}/logs/checkpoint-500")
    job = d.api.wait(d.api.delete(path(d, folder, "")).ok(202))
    assert "logs/checkpoint-500" in lib.check_problem(job["error"], "checkpoint_held")["detail"]
    unhold(d, f"{folder}/logs/checkpoint-500")
    d.api.wait(d.api.delete(path(d, folder, "")).ok(202))
    assert not (root / folder).exists()


def hostile(notes):
    def write(text):
        return lambda: notes.write_text(text)

    yield "a fifo", lambda: os.mkfifo(notes)
    yield "a link", lambda: notes.symlink_to("/etc/passwd")
    yield "a folder", notes.mkdir
    yield "too large", write(json.dumps({"version": 1, "x": "y" * 100000}))
    for text in ("", "null", "[]", "{}", '{"version":2}', '{"version":1,"hold":', '{"version":1,"hold":true}', "[" * 5000,
                 '{"version":1,"hold":{}}', '{"version":1,"hold":{"owner":-1,"reason":"","since":""}}', '\x00\xff',
                 '{"version":1,"hold":{"owner":1.5,"reason":"","since":""}}', '{"version":1,"hold":{"owner":1,"reason":3,"since":""}}',
                 '{"version":1,"hold":{"owner":1,"reason":"' + "r" * 1001 + '","since":""}}'):
        yield text[:40], write(text)


def test_notes_that_cannot_be_read_hold(d, root):
    c = Crafted(root)
    notes = c.dir / NOTES
    for what, make in hostile(notes):
        make()
        got = record(d, c.name).get("hold")
        assert got, what
        assert got["owner"] is None and got["since"] is None and NOTES in got["reason"], what
        for a in (d.api.delete(path(d, c.name, "")), d.api.delete(path(d, c.name)), d.api.request("PUT", path(d, c.name))):
            assert NOTES in a.problem("checkpoint_held", status=409)["detail"], what
        assert d.api.get(path(d, c.name, "/tensors")).ok(200)["tensors"], what
        notes.rmdir() if notes.is_dir() and not notes.is_symlink() else notes.unlink()
    notes.write_text('{"version":1,"later":[1]}')  # a member of a newer daemon's
    hold(d, c.name, "x")
    assert json.loads(notes.read_text())["later"] == [1]
    unhold(d, c.name)
    assert json.loads(notes.read_text()) == {"version": 1, "later": [1]}
    d.api.wait(d.api.delete(path(d, c.name, "")).ok(202))
    assert not c.dir.exists()


def test_bad_requests(d, root):
    c = Crafted(root)
    for body, code in (({"reason": 3}, "validation_failed"), ({"why": ""}, "unknown_field"), ({"reason": "r" * 1001}, "validation_failed")):
        d.api.request("PUT", path(d, c.name), body).problem(code, status=422)
    d.api.request("PUT", path(d, "holds/nothing")).problem("not_found", status=404)
    (root / "holds-other").mkdir()
    d.api.request("PUT", path(d, "holds-other")).problem("not_found", "not_a_checkpoint")
    d.api.request("POST", path(d, c.name)).problem("method_not_allowed")
    assert not (c.dir / NOTES).exists()


def test_it_is_held_or_gone(d, root):
    """A hold and a delete at once: whoever is told that it went well is right in the end."""
    for _ in range(8):
        c = Crafted(root)
        got = {}

        def remove():
            a = d.api.delete(path(d, c.name, ""))
            got["job"] = d.api.wait(a.json)["state"] if a.status == 202 else a.problem("checkpoint_held")["code"]

        t = threading.Thread(target=remove)
        t.start()
        a = d.api.request("PUT", path(d, c.name), {"reason": "now"})
        t.join()
        assert (a.status == 200) == c.dir.exists() == (got["job"] != "succeeded"), (a.status, got)
        if a.status == 200:
            unhold(d, c.name)


def test_dcpctl(d, root):
    c = Crafted(root)
    ref = f"main:{c.name}"
    r = d.ctl("hold", ref, "--reason", "für später")
    assert r.returncode == 0 and "held" in r.stdout, r
    r = d.ctl("show", ref)
    assert f"uid {os.geteuid()} since" in r.stdout and "für später" in r.stdout, r.stdout
    r = d.ctl("rm", "--yes", ref)
    assert r.returncode == 5 and "checkpoint_held" in r.stderr and "für später" in r.stderr, r
    assert json.loads(d.ctl("unhold", ref, "--json").stdout)["hold"] is None
    assert d.ctl("hold", "shm:x").returncode == 2
    assert d.ctl("hold", ref + "-not").returncode == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_whose_hold_it_is(golden_root):
    with users.reachable_folder() as home:
        d = lib.Daemon(home / "d", ("main",), ["--allow-group", users.GROUP.gr_name])
        try:
            for made in (home / "d", d.state):
                made.chmod(0o755)
            c = Crafted(d.storages["main"])
            os.chown(c.dir, ALICE, ALICE)

            def by(uid, method):
                def ask():
                    a = d.api.request(method, path(d, c.name))
                    return f"{a.status} {a.json.get('code') or a.json['hold'] and a.json['hold']['owner']}"
                return eval(users.as_user(uid, [users.GROUP.gr_gid], ask))

            assert by(BOB, "PUT") == "403 forbidden"
            assert by(ALICE, "PUT") == f"200 {ALICE}"
            assert by(BOB, "DELETE") == "403 forbidden"
            assert by(ALICE, "DELETE") == "200 None"
            hold(d, c.name)  # root's
            assert by(ALICE, "PUT") == by(ALICE, "DELETE") == "403 forbidden"
            unhold(d, c.name)
        finally:
            d.discard()
