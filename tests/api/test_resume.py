"""Resuming: the newest checkpoint of a run that loads, what was skipped and why, and how often one is tried."""
import json
import os
import shutil
import time
import urllib.parse

import pytest
from crafted import Crafted

import dcpd as lib

CASE = "torch-2.15.0/plain"


@pytest.fixture
def root(d):
    return d.storages["main"]


def put(root, run, last, when, case=CASE):
    """A checkpoint whose newest file was written at that second."""
    c = Crafted(root, case, f"{run}/{last}")
    age(c.dir, when)
    return c.dir


def age(folder, when):
    for p in folder.iterdir():
        os.utime(p, (1, when))


def path(run, verb=":resume", **query):
    return f"/v1/runs/main/{urllib.parse.quote(run, safe='')}{verb}" + ("?" + urllib.parse.urlencode(query) if query else "")


def look(d, run, **query):
    return d.api.get(path(run, **query)).ok(200)


def take(d, run, **body):
    return d.api.post(path(run), body).ok(200)


def name_of(answer):
    return answer["checkpoint"] and answer["checkpoint"]["name"].rpartition("/")[2]


def skipped(answer):
    return {s["name"].rpartition("/")[2]: s["why"] for s in answer["skipped"]}


def hurt(folder):
    """Bytes of an item, which a look at the structure does not see."""
    file = max(folder.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    for i in range(len(data) // 4, len(data) // 2):
        data[i] ^= 0xFF
    file.write_bytes(data)
    age(folder, 1005)


def test_the_newest_that_loads(d, root):
    run = f"resume/{lib.fresh()}"
    d.api.get(path(run)).problem("not_found", status=404)
    d.api.post(path(run), {}).problem("not_found", status=404)
    folders = {i: put(root, run, f"step-{i}", 1000 + i) for i in range(1, 6)}
    got = look(d, run)
    assert got["checkpoint"] == {"storage": "main", "name": f"{run}/step-5"}, str(got)[:1500]
    assert got["step"] == 5 and got["skipped"] == []
    assert got["attempts"] == 0 and got["verified"] is None and "not verified" in got["why"]
    hurt(folders[5])
    assert name_of(look(d, run)) == "step-5"  # nobody knows yet
    job = d.api.wait(d.api.submit("verify", source={"storage": "main", "name": f"{run}/step-5"}, level="digest"))
    assert job["state"] == "failed"
    next(folders[4].glob("*.distcp")).unlink()
    (folders[3] / ".metadata").write_bytes(b"no pickle")
    age(folders[3], 1003)
    d.api.run("verify", source={"storage": "main", "name": f"{run}/step-2"}, level="digest")
    for got in (look(d, run), take(d, run)):
        assert name_of(got) == "step-2" and got["step"] == 2 and "verified (digest)" in got["why"] and "3 skipped" in got["why"]
        why = skipped(got)
        assert list(why) == ["step-5", "step-4", "step-3"] and got["verified"]["state"] == "verified"
        assert "found damaged" in why["step-5"] and job["id"] in why["step-5"]
        assert ".distcp" in why["step-4"] and ".metadata" in why["step-3"], why
    for i in (1, 2):
        (folders[i] / ".metadata").unlink()
        (folders[i] / ".metadata").write_bytes(b"")
        age(folders[i], 1000 + i)
    got = take(d, run)
    assert got["checkpoint"] is None and got["step"] is None and got["attempts"] == 0 and len(got["skipped"]) == 5
    assert "none of the run's 5 checkpoints can be loaded" in got["why"]


def test_what_was_made_of_a_step_is_as_old_as_that(d):
    """A reshard that lies in the run's folder is written later than the steps, and is none."""
    run, sd = lib.fresh("run"), lib.fresh()
    one = lib.image({"a": ("U8", [5000], bytes(5000))})
    d.put(sd, [one])
    for step in (1, 2):
        if step > 1:
            d.put(sd, [one], generation=step, create=False)
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-{step}"})
    d.drop(sd)
    d.api.run("reshard", source={"storage": "main", "name": f"{run}/step-1"},
              target={"storage": "main", "name": f"{run}/step-1-tp2", "world_size": 2})
    listed = d.api.get(f"/v1/checkpoints/main?run={run}&sort=-time").ok(200)["checkpoints"]
    assert [c["name"] for c in listed] == [f"{run}/step-1-tp2", f"{run}/step-2", f"{run}/step-1"]
    for latest in ("step-2", "step-1", "step-1-tp2"):
        shown, alias = d.api.get(path(run, "")).ok(200), d.api.storage_path("main", f"{run}@latest")
        assert name_of(look(d, run)) == latest and shown["aliases"]["latest"] == f"{run}/{latest}", shown
        assert shown["checkpoints"][0]["name"] == f"{run}/{latest}" == d.api.get(alias).ok(200)["name"]
        policy = {"storage": "main", "match": run, "keep": {"last": 1}}
        goes = {r["name"] for r in d.api.post("/v1/policies/derived:preview", policy).ok(200)["remove"]}
        assert f"{run}/{latest}" not in goes and (latest != "step-2" or goes == {f"{run}/step-1"}), goes
        d.api.wait(d.api.delete(d.api.storage_path("main", f"{run}/{latest}")).ok(202))


def test_world_and_layout(d, root):
    run = f"resume/{lib.fresh()}"
    put(root, run, "step-1", 1000)
    rule = {"match": "*", "mesh": [4], "placements": ["Shard(0)"]}
    assert name_of(look(d, run, world_size=4)) == name_of(look(d, run, world_size=4, layout=json.dumps([rule]))) == "step-1"
    assert name_of(take(d, run, layout=[rule])) == "step-1"
    d.api.post(path(run), {"world_size": 3, "layout": [rule]}).problem("world_mismatch", status=422)
    d.api.get(path(run, world_size=3, layout=json.dumps([rule]))).problem("world_mismatch", status=422)
    got = look(d, run, world_size=2, layout=json.dumps([{"match": "*", "placements": ["Shard(7)"], "mesh": [2]}]))
    assert name_of(got) in (None, "step-1")
    got = take(d, run, world_size=1, layout=[{"match": "*weight*", "boxes": [{"rank": 0, "offsets": [0], "sizes": [1]}]}])
    assert got["checkpoint"] is None and "weight" in skipped(got)["step-1"], got


def test_bad_requests(d, root):
    run = f"resume/{lib.fresh()}"
    put(root, run, "step-1", 1000)
    for query in ({"world_size": 0}, {"world_size": 65537}, {"optimizer": "x"}, {"attempts_max": 1000001}, {"layout": "{}"}):
        d.api.get(path(run, **query)).problem("validation_failed", status=422)
    d.api.get(path(run, layout="[")).problem("invalid_request", status=400)
    d.api.get(path(run, world_size="x")).problem(status=400)
    for body in ({"world_size": "4"}, {"unwanted": {}}, {"unwanted": [{"name": f"{run}/step-1"}]},
                 {"unwanted": [{"name": "x", "why": "y" * 4097}]}):
        d.api.post(path(run), body).problem("validation_failed", status=422)
    d.api.post(path(run), {"size": 4}).problem("unknown_field")
    d.api.post(path(run), {"unwanted": [{"name": "../x", "why": ""}]}).problem("name_invalid")
    d.api.post(path(run), {"layout": [{"match": "*", "like": "main:x"}]}).problem("unsupported")
    d.api.get(path("x").replace("main", "nope", 1)).problem("not_found")
    d.api.get(path("../x")).problem("name_invalid")
    assert look(d, run)["attempts"] == 0


def test_unwanted(d, root):
    run = f"resume/{lib.fresh()}"
    put(root, run, "step-1", 1000)
    put(root, run, "step-2", 1001)
    got = take(d, run, unwanted=[{"name": f"{run}/step-2", "why": "rank 3 could not load it"}])
    assert name_of(got) == "step-1" and skipped(got) == {"step-2": "rank 3 could not load it"}


def test_attempts(d, root):
    run = f"resume/{lib.fresh()}"
    put(root, run, "step-1", 1000)
    two = put(root, run, "step-2", 1001)
    for i in range(3):
        assert look(d, run)["attempts"] == i
        got = take(d, run)
        assert name_of(got) == "step-2" and got["attempts"] == i + 1 and got["attempts_max"] == 3
    got = look(d, run)
    assert name_of(got) == "step-1" and got["attempts"] == 0 and "tried 3 times" in skipped(got)["step-2"]
    assert name_of(look(d, run, attempts_max=4)) == name_of(look(d, run, attempts_max=0)) == "step-2"
    for _ in range(3):
        assert name_of(take(d, run)) == "step-1"
    got = take(d, run)
    assert got["checkpoint"] is None and "tried 3 times" in got["why"] and "attempts_max=0" in got["why"]
    assert list(skipped(got)) == ["step-2", "step-1"]
    shutil.rmtree(two)
    assert look(d, run)["checkpoint"] is None
    put(root, run, "step-2", 1002)  # another one of that name
    got = take(d, run)
    assert name_of(got) == "step-2" and got["attempts"] == 1


def test_progress_begins_the_count_anew(d, root):
    """What began at step-1 came to step-2: that step-2 is lost since is not step-1's fault. A file of the future proves nothing."""
    run = f"resume/{lib.fresh()}"
    put(root, run, "step-1", 1000)
    for _ in range(3):
        take(d, run)
    two = put(root, run, "step-2", 4000000000)
    next(two.glob("*.distcp")).unlink()
    assert look(d, run)["checkpoint"] is None
    age(two, int(time.time()) + 1)
    lib.wait_for(lambda: look(d, run)["checkpoint"], what="that second to come")
    got = take(d, run)
    assert name_of(got) == "step-1" and got["attempts"] == 1 and list(skipped(got)) == ["step-2"]


def test_attempts_survive_kill(tmp_path):
    d = lib.Daemon(tmp_path, {"main": tmp_path / "main"})
    try:
        put(tmp_path / "main", "run", "step-1", 1000)
        assert take(d, "run")["attempts"] == 1
        take(d, "run")
        d.kill()
        d.start()
        assert look(d, "run")["attempts"] == 2
        d.put("sd", [lib.image({"a": ("U8", [50], bytes(50))})])
        job = d.api.submit("save", source={"state_dict": "sd"}, target={"storage": "main", "name": "run/step-2"},
                           options={"hold": "kept", "alias": "best"})
        d.kill()  # wherever it is by now: what a save asks for is done by the next daemon
        d.start()
        assert d.api.wait(job)["state"] == "succeeded"
        hold, best = held_and_named(d, "run/step-2")
        assert hold["reason"] == "kept" and best == "run/step-2"
    finally:
        d.discard()


def saved(d, name, values, tensors=("model.a", "model.b")):
    sd = lib.fresh()
    d.put(sd, [lib.image({t: ("U8", [64], bytes(64)) for t in tensors}, {"values": {k: {"json": v} for k, v in values.items()}})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)


LISTED = {"optim.param_groups.0.params": ["a", "b"], "optim.param_groups.0.lr": 0.1}
KEYS = {f"optim.param_groups.{p}.lr": 0.1 for p in "ab"}


@pytest.mark.parametrize("values", [LISTED, {"optim.param_groups": [{"params": ["a", "b"], "lr": 0.1}]}, KEYS,
                                    {"optim.param_groups": [{"params": [0, 1]}, {"params": ["a", "b"]}]}])
def test_optimizer_state_of_a_part(d, root, values):
    run, model = f"resume/{lib.fresh()}", ("model.a", "model.b")
    saved(d, f"{run}/step-1", values, (*model, "optim.state.a.exp_avg", "optim.state.b.exp_avg"))
    saved(d, f"{run}/step-2", values, model)
    age(root / run / "step-1", 1001)
    age(root / run / "step-2", 1002)
    assert name_of(look(d, run)) == "step-2"  # none of it: an optimizer that has not made a step yet
    saved(d, f"{run}/step-3", values, (*model, "optim.state.a.exp_avg", "optim.state.a.exp_avg_sq"))
    age(root / run / "step-3", 1003)
    got = look(d, run)
    assert name_of(got) == "step-2" and "'b'" in skipped(got)["step-3"] and "1 of the 2" in skipped(got)["step-3"]
    assert name_of(look(d, run, optimizer="any")) == name_of(take(d, run, optimizer="any")) == "step-3"


def test_groups_by_themselves(d, root):
    """A group that is frozen has no state, and needs none."""
    run = f"resume/{lib.fresh()}"
    saved(d, f"{run}/step-1", {"o.param_groups.0.params": ["a"], "o.param_groups.1.params": ["b"]}, ("o.state.a.x", "model.b"))
    assert name_of(look(d, run)) == "step-1"


def held_and_named(d, name):
    got = d.api.get(d.api.storage_path("main", name)).ok(200)
    return got.get("hold"), d.api.get(path(name.rpartition("/")[0], verb="")).ok(200)["aliases"].get("best")


def test_marks_of_a_save(d, root):
    """A save asks for a hold and an alias; they are there when it has succeeded."""
    run, sd = f"resume/{lib.fresh()}", lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
    for i in (1, 2):
        job = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-{i}"},
                        options={"alias": "best", **({"hold": "the paper's"} if i == 1 else {})})
        assert job["result"]["alias"] == "best" and job["result"].get("hold") == ("the paper's" if i == 1 else None)
        hold, best = held_and_named(d, f"{run}/step-{i}")
        assert best == f"{run}/step-{i}" and (hold and hold["reason"]) == job["result"].get("hold")
    again = {"source": {"state_dict": sd}, "target": {"storage": "main", "name": f"{run}/step-1"}}
    assert "the paper's" in d.api.fails("save", "checkpoint_held", **again, options={"overwrite": True})["detail"]
    page = root / run / ".dcpd-aliases.json"
    page.write_text("[]")
    job = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-3"}, options={"alias": "best"})
    assert [w["code"] for w in job["result"]["warnings"]][-1] == "alias_not_moved" and "alias" not in job["result"]
    target = {"storage": "main", "name": f"{run}/step-4"}
    for options, code in (({"alias": "latest"}, "name_invalid"), ({"alias": "a b"}, "name_invalid"), ({"hold": 1}, "validation_failed"),
                          ({"hold": "x" * 1001}, "validation_failed"), ({"alias": ""}, "validation_failed")):
        d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": target, "options": options}).problem(code)
    page.unlink()
    r = d.ctl("save", f"shm:{sd}", f"main:{run}/step-4", "--alias", "best", "--hold", "for now")
    assert r.returncode == 0 and held_and_named(d, f"{run}/step-4")[1] == f"{run}/step-4"
    for i in (1, 4):
        assert d.ctl("unhold", f"main:{run}/step-{i}").returncode == 0
    d.drop(sd)


def test_dcpctl(d, root):
    run = f"resume/{lib.fresh()}"
    assert d.ctl("resume", f"main:{run}").returncode == 6
    put(root, run, "step-1", 1000)
    broken = put(root, run, "step-2", 1001)
    next(broken.glob("*.distcp")).unlink()
    age(broken, 1001)
    for i in range(3):
        r = d.ctl("resume", f"main:{run}", "--world-size", "4")
        assert r.returncode == 0 and r.stdout == f"main:{run}/step-1\n" and f"skipped {run}/step-2: " in r.stderr, r
    r = d.ctl("resume", f"main:{run}")
    assert r.returncode == 5 and r.stdout == "" and "tried 3 times" in r.stderr, r  # not 6: it is no first start
    r = d.ctl("resume", f"main:{run}", "--attempts", "0", "--look", "--layout", "*=Shard(0)@4", "--any-optimizer", "--json")
    assert r.returncode == 0 and json.loads(r.stdout)["attempts"] == 3, r
    assert d.ctl("resume", f"main:{run}", "--look").returncode == 5
    assert d.ctl("resume", f"main:{run}", "--look", "--json").returncode == 5
    for wrong in ((), ("main",), ("nowhere:run",), ("shm:x",), (f"main:{run}", "--world-size", "0"), (f"main:{run}", "--attempts", "x"),
                  (f"main:{run}", "--world-size", "3", "--layout", "*=Shard(0)@4")):
        assert d.ctl("resume", *wrong).returncode == 2, wrong
