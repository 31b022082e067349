"""Whose a checkpoint is: who had it committed. Only that uid, root, dcpd's own and the token's holder remove or replace it."""
import contextlib
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import host
import pytest
import users
from users import ALICE, BOB

import dcpd as lib

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


@pytest.fixture
def d():
    with users.reachable_folder() as home:
        d = lib.Daemon(home / "d", ("main",), ["--allow-group", users.GROUP.gr_name, "--file-mode", "0600"])
        for made in (home / "d", d.state):
            made.chmod(0o755)
        yield d
        d.discard()


def ref(name):
    return {"storage": "main", "name": name}


def by(uid, fn, *args):
    """The JSON that fn returns as that member of the group."""
    text = users.as_user(uid, [users.GROUP.gr_gid], lambda: json.dumps(fn(*args)))
    try:
        return json.loads(eval(text))
    except SyntaxError:
        raise AssertionError(text) from None


def train(d, name):
    d.put(name, [lib.image({"w": ("F32", [4], bytes(16))})])


def save(d, source, name, **options):
    """How it ended: "succeeded", or the problem's code; what it is refused for at once comes with its status."""
    a = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": source}, "target": ref(name), "options": options})
    if a.status >= 400:
        return f"{a.status} {a.json['code']}"
    job = d.api.wait(a.ok(202))
    return job["error"]["code"] if job["state"] == "failed" else job["state"]


def remove(d, name):
    a = d.api.delete(d.api.storage_path("main", name))
    if a.status >= 400:
        return f"{a.status} {a.json['code']}"
    return d.api.wait(a.ok(202))["state"]


def test_one_file_belongs_to_whoever_had_it_made(d):
    train(d, "alice")
    save(d, "alice", "src")
    name = "run/step-1.pt"

    def convert(**options):
        target = {**ref(name), "format": "torch"}
        a = d.api.post("/v1/jobs", {"kind": "reshard", "source": ref("src"), "target": target, "options": options})
        return f"{a.status} {a.json['code']}" if a.status >= 400 else d.api.wait(a.ok(202))["state"]

    assert by(ALICE, convert) == "succeeded"
    assert by(BOB, remove, d, name) == "403 forbidden" and by(BOB, lambda: convert(overwrite=True)) == "403 forbidden"
    assert by(ALICE, lambda: convert(overwrite=True)) == "succeeded"
    file, page = d.storages["main"] / name, d.storages["main"] / "run/.step-1.pt.dcpd.json"
    old, time = page.read_text(), file.stat().st_mtime_ns
    assert by(ALICE, remove, d, name) == "succeeded"
    assert convert() == "succeeded" and by(ALICE, remove, d, name) == "403 forbidden"
    page.write_text(old.replace(str(time), str(file.stat().st_mtime_ns)))
    os.chown(page, ALICE, -1)  # her own page beside root's file
    assert d.api.get(d.api.storage_path("main", name)).ok(200)["made_by"]["uid"] == ALICE and by(ALICE, remove, d, name) == "403 forbidden"


def test_members_have_their_own(d):
    train(d, "root")
    assert save(d, "root", "roots/x") == "succeeded"
    for uid, name in ((ALICE, "alice"), (BOB, "bob")):
        by(uid, train, d, name)
        assert by(uid, save, d, name, f"{name}/x") == "succeeded"
        assert d.api.get(d.api.storage_path("main", f"{name}/x")).ok(200)["manifest"]["uid"] == uid
    before = {p: p.stat().st_ino for p in d.storages["main"].rglob("*")}
    for target in ("roots/x", "bob/x"):
        assert by(ALICE, remove, d, target) == "403 forbidden"
        assert by(ALICE, save, d, "alice", target) == "409 checkpoint_exists"
        for options in ({"overwrite": True}, {"overwrite": True, "in_place": "always"}, {"overwrite": True, "beside": "needed"}):
            assert by(ALICE, lambda t, o: save(d, "alice", t, **o), target, options) == "403 forbidden"
    assert {p: p.stat().st_ino for p in d.storages["main"].rglob("*")} == before
    d.kill()
    d.start()
    assert by(ALICE, remove, d, "bob/x") == "403 forbidden"
    assert by(BOB, lambda: save(d, "bob", "bob/x", overwrite=True)) == "succeeded"
    assert by(BOB, remove, d, "bob/x") == "succeeded"
    assert save(d, "root", "alice/x", overwrite=True) == "succeeded"
    assert by(ALICE, remove, d, "alice/x") == "403 forbidden"  # root's now
    assert remove(d, "roots/x") == "succeeded"


def test_the_token_is_dcpds_own_user(d):
    by(ALICE, train, d, "alice")
    assert by(ALICE, save, d, "alice", "hers") == "succeeded"
    train(d, "root")
    with contextlib.ExitStack() as stack:
        over_unix = d.api
        stack.callback(lambda: setattr(d, "api", over_unix))
        d.api = d.tcp_client()
        assert save(d, "alice", "hers", overwrite=True) == "succeeded"
    assert by(ALICE, remove, d, "hers") == "403 forbidden"
    token = (d.state / "token").read_text().strip()

    def with_token():
        d.api.headers["Authorization"] = f"Bearer {token}"
        return save(d, "alice", "given")

    assert by(ALICE, with_token) == "succeeded"
    assert d.api.get(d.api.storage_path("main", "given")).ok(200)["manifest"]["uid"] == os.geteuid()
    assert by(ALICE, remove, d, "given") == "403 forbidden"


def test_what_dcpd_did_not_write_is_its_directorys_owners(d, golden_root):
    golden = next(p for p in sorted(golden_root.glob("torch-2.15.0/plain/checkpoint")))
    for name, uid in (("alices", ALICE), ("roots", 0)):
        at = pathlib.Path(d.storages["main"]) / name
        at.mkdir()
        for f in golden.iterdir():
            (at / f.name).write_bytes(f.read_bytes())
        os.chown(at, uid, uid)
    (d.storages["main"] / "roots" / ".dcpd.json").write_text('{"dcpd":1,"uid":%d}' % ALICE)
    os.chown(d.storages["main"] / "roots" / ".dcpd.json", ALICE, ALICE)  # as if she could write there
    assert by(BOB, remove, d, "alices") == "403 forbidden"
    assert by(ALICE, remove, d, "roots") == "403 forbidden"
    assert by(ALICE, remove, d, "alices") == "succeeded"


@pytest.mark.long
def test_a_policy_that_two_put_at_once():
    """Alice's waits for the list of what it matches; root's, of the same name, is kept meanwhile and stays."""
    with users.reachable_folder() as home, ThreadPoolExecutor(1) as pool:
        d = lib.Daemon(home / "d", ("main",), ["--allow-group", users.GROUP.gr_name], env=host.SLOW_FILES)
        for made in (home / "d", d.state):
            made.chmod(0o755)
        train(d, "s")
        assert save(d, "s", "run/step-1") == "succeeded"
        at = d.storages["main"] / "folder"
        at.mkdir()
        for i in range(40):
            (at / f"slow-{i}").touch()
        body = {"storage": "main", "match": "run", "keep": {"last": 5}}
        alice = pool.submit(by, ALICE, lambda: d.api.request("PUT", "/v1/policies/p", body).status)
        lib.wait_for(lambda: any(w["role"] == "lookup" and w["state"] == "busy" for w in d.api.get("/v1/workers").ok(200)["workers"]), 30)
        d.api.request("PUT", "/v1/policies/p", {**body, "confirm": True}).ok(200)
        assert alice.result() == 403 and d.api.get("/v1/policies/p").ok(200)["uid"] == 0
        hers = {**body, "confirm": True}
        assert by(ALICE, lambda: d.api.delete("/v1/policies/p").status) == 403
        for uid, put, gone in ((ALICE, 200, None), (BOB, 403, 403), (0, 200, 204)):
            assert by(uid, lambda: d.api.request("PUT", "/v1/policies/hers", hers).status) == put
            assert gone is None or by(uid, lambda: d.api.delete("/v1/policies/hers").status) == gone
        d.discard()
