"""Publications and subscribers of different users, on one host and on two nodes: who gets versions, and who is told that it does not."""
import json
import os

import etcd
import pytest
import users
from test_cluster import server  # noqa: F401
from test_publish import TP2, arrives, put, record, take, version
from users import ALICE, BOB

import dcpd as lib

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
CAROL = 54323


@pytest.fixture(scope="module")
def nodes(server, tmp_path_factory):
    prefix = f"/{tmp_path_factory.mktemp('users').name}"
    with users.reachable_folder() as home:
        made = []
        for name in "ab":
            d = etcd.Node(home / name, server, name, ("main",), ["--cluster-prefix", prefix, "--allow-group", users.GROUP.gr_name])
            made.append(d)
            for folder in (home / name, d.state):
                folder.chmod(0o755)
        made[0].sees(a="joined", b="joined")
        made[1].sees(a="joined", b="joined")
        yield made
        for d in made:
            d.discard()


@pytest.fixture(params=["here", "on another node"])
def place(nodes, request):
    """Where the publication is, where its subscribers are, and how they name its node."""
    a, b = nodes
    return (a, a, {}) if request.param == "here" else (a, b, {"node": "a"})


def by(uid, fn, *args, **kw):
    """The JSON that fn returns as that member of the group."""
    text = users.as_user(uid, [users.GROUP.gr_gid], lambda: json.dumps(fn(*args, **kw)))
    try:
        return json.loads(eval(text))
    except SyntaxError:
        raise AssertionError(text) from None


def publish(d, name, step, readers=None):
    if readers is not None:
        d.create(name, 2, publish={"readers": readers})
    put(d, name, version(step, w=float(step)), step)


def drop(d, name):
    """Once a node that has read it has let go."""
    lib.wait_for(lambda: d.api.delete(f"/v1/state-dicts/{name}").status == 204)


def follow(d, sub, pub, node):
    d.create(sub, 2, subscribe={"publication": pub, "layout": TP2, **node})


def code(d, method, path, body=None):
    answer = d.api.request(method, path, body)
    return answer.json["code"] if answer.status >= 400 else answer.status


@pytest.mark.short("here")
def test_the_owner_its_readers_and_root_get_versions(place):
    a, b, node = place
    pub = lib.fresh("policy")
    by(ALICE, publish, a, pub, 1, [BOB])
    subs = {uid: lib.fresh(f"serve-{uid}") for uid in (ALICE, BOB, 0)}
    for uid, sub in subs.items():
        by(uid, follow, b, sub, pub, node)
    for step in (1, 2):
        for uid, sub in subs.items():
            arrives(b, sub, step - 1, step)
            assert by(uid, lambda: [len(i.entries) for i in b.images(sub, step)]) == [2, 2], "its segments are its user's"
            by(uid, take, b, sub, step)
        if step == 1:
            by(ALICE, publish, a, pub, 2)

    def seen():
        shown = by(BOB, lambda: a.api.get(f"/v1/publications/{pub}").ok(200)["subscribers"])
        return {(s["uid"], s["name"]) for s in shown} == set(subs.items()) and all(s["subscription"]["applied"] == 2 for s in shown)

    lib.wait_for(seen, 10, "all are listed, with their users")


@pytest.mark.short("here")
def test_one_that_is_no_reader_is_told_and_goes_on_when_it_is_one(place):
    a, b, node = place
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    by(ALICE, publish, a, pub, 7, [BOB])
    by(CAROL, follow, b, sub, pub, node)
    renew = f"/v1/state-dicts/{sub}/ranks/0:renew?wait=30s"
    for _ in range(2):  # the second wait ends for the same reason
        assert by(CAROL, code, b, "POST", renew) == 200
        rec = by(CAROL, record, b, sub)
        problem = rec["subscription"]["problem"]
        assert rec["generation"] is None and problem["code"] == "forbidden" and not problem["retryable"] and pub in problem["detail"], rec
    by(ALICE, drop, a, pub)
    by(ALICE, publish, a, pub, 0, [CAROL])
    rec = lib.wait_for(lambda: (r := record(b, sub))["generation"] == 0 and r, 20, "version 0 of the new publication")
    assert "problem" not in rec["subscription"]
    by(CAROL, take, b, sub, 0)
    by(ALICE, drop, a, pub)
    by(ALICE, publish, a, pub, 3, [])
    assert by(CAROL, code, b, "POST", renew, {"taken": 0}) == 200
    rec = record(b, sub)
    assert rec["subscription"]["problem"]["code"] == "forbidden" and rec["generation"] == 0, "it keeps what it has"


@pytest.mark.short("here")
def test_a_reader_changes_nothing_and_others_see_nothing(place):
    a, b, node = place
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    by(ALICE, publish, a, pub, 1, [BOB])
    by(BOB, follow, b, sub, pub, node)
    record(b, sub, -1)
    slot = f"/v1/state-dicts/{pub}/ranks/0"
    for path, body in ((f"{slot}:reserve", {"bytes": 4096, "generation": 2}), (f"{slot}:seal", {"generation": 1, "image_bytes": 64}),
                       (f"{slot}:release", {"generation": 1})):
        assert by(BOB, code, a, "POST", path, body) == "forbidden", path
    assert by(BOB, code, a, "DELETE", f"/v1/state-dicts/{pub}") == "forbidden"
    for method, path in (("GET", f"/v1/publications/{pub}"), ("POST", f"/v1/publications/{pub}:follow"), ("GET", f"{slot}/image"),
                         ("GET", f"/v1/state-dicts/{pub}")):
        assert by(CAROL, code, a, method, path) == "forbidden", path
        assert by(BOB, code, a, method, path) == 200 or path.endswith("image"), path
    assert pub not in by(CAROL, lambda: [p["name"] for p in a.api.get("/v1/publications").ok(200)["publications"]])
    source = {"state_dict": pub, **node}
    target, layout = {"state_dict": lib.fresh(), "world_size": 2}, {"layout": []}
    how = {"kind": "load", "target": {**target, **layout}} if node else {"kind": "redistribute", "target": target, **layout}

    def ends():
        got = b.api.post("/v1/jobs", {**how, "source": source, "delta": True})
        return got.json["code"] if got.status >= 400 else (b.api.wait(got.json).get("error") or {}).get("code")

    assert by(CAROL, ends) == "forbidden", "nor by a job of its own"
    for path, body in ((f"/v1/state-dicts/{sub}/ranks/0:renew", {"taken": 1}), (f"/v1/state-dicts/{sub}/ranks/0:renew?wait=1s", None)):
        assert by(CAROL, code, b, "POST", path, body) == "forbidden", "a subscriber is its user's"
