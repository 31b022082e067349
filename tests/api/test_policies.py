"""Retention policies with a real daemon: what goes by them, what never does, restarts, kills, and what people and frameworks see."""
import json
import os

import pytest
from host import SLOW_FILES, WallClock

import dcpd as lib

U8 = lib.image({"a": ("U8", [5000], bytes(5000))})


class Host:
    """A daemon of its own: policies look at all storages, and the shared one's tests would disturb each other."""

    def __init__(self, d):
        self.d, self.api, self.root = d, d.api, d.storages["main"]

    def save(self, name, metrics=None, **options):
        sd = lib.fresh()
        self.d.put(sd, [U8])
        more = {"metrics": metrics} if metrics else {}
        self.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name}, options=options, **more)
        self.d.drop(sd)
        return name

    def run_of(self, count, step=100):
        run = f"r{lib.fresh()}"
        for i in range(1, count + 1):
            self.save(f"{run}/step-{i * step}")
        return run

    def put(self, name, match, keep, **more):
        return self.api.request("PUT", f"/v1/policies/{name}", {"storage": "main", "match": match, "keep": keep, **more})

    def drop(self, name):
        self.api.delete(f"/v1/policies/{name}").ok(204)

    def preview(self, name, body=None):
        return self.api.post(f"/v1/policies/{name}:preview", body)

    def steps(self, run):
        a = self.api.get(f"/v1/runs/main/{run}?page_size=1000")
        return sorted(c["step"] for c in a.ok(200)["checkpoints"]) if a.status == 200 else []

    def settles(self, run, steps, what="removed"):
        lib.wait_for(lambda: self.steps(run) == steps, 10, f"{what}: {steps}")

    def path(self, name, tail=""):
        return self.api.storage_path("main", name, tail)


@pytest.fixture(scope="module")
def h(tmp_path_factory):
    home = tmp_path_factory.mktemp("policies")
    d = lib.Daemon(home, ("main",))
    yield Host(d)
    d.discard()


def test_the_cycle_of_a_policy(h):
    run = h.run_of(5)
    before = h.preview("p1", {"storage": "main", "match": run, "keep": {"last": 2}}).ok(200)
    assert [r["name"] for r in before["remove"]] == [f"{run}/step-{s}" for s in (100, 200, 300)]
    assert all(r["why"] == "not_kept" and r["policy"] == "p1" and r["bytes"] > 5000 for r in before["remove"])
    assert {k["name"]: k["why"] for k in before["keep"]} == {f"{run}/step-400": ["last"], f"{run}/step-500": ["newest_durable", "last"]}
    assert h.steps(run) == [100, 200, 300, 400, 500]
    h.api.get("/v1/policies/p1").problem("not_found", status=404)
    kept = h.put("p1", run, {"last": 2}).ok(200)
    assert kept["name"] == "p1" and kept["keep"] == {"last": 2} and kept["match"] == run and kept["uid"] == os.geteuid()
    h.settles(run, [400, 500])
    h.save(f"{run}/step-600")
    h.settles(run, [500, 600], "after the next save")
    lib.wait_for(lambda: h.api.get("/v1/policies/p1").ok(200)["status"]["removed"] == 4, 10, "counted")
    assert [p["name"] for p in h.api.get("/v1/policies").ok(200)["policies"]] == ["p1"]
    metrics = h.api.get("/metrics").body.decode()
    assert 'dcpd_checkpoints_removed_total{by="policy",to="nowhere"}' in metrics
    jobs = h.api.get("/v1/jobs?filter=labels.policy%3Dp1").ok(200)["jobs"]
    assert len(jobs) == 4 and all(j["kind"] == "delete" and j["state"] == "succeeded" for j in jobs)
    h.drop("p1")
    h.api.get("/v1/policies/p1").problem("not_found")
    h.save(f"{run}/step-700")
    assert h.steps(run) == [500, 600, 700]


def test_a_paused_policy_removes_nothing_until_it_goes_on(h):
    run = h.run_of(3)
    kept = h.put("rest", run, {"last": 1}, paused=True).ok(200)
    assert kept["paused"] is True
    lib.wait_for(lambda: h.api.get("/v1/policies/rest").ok(200)["status"]["evaluated_at"], 10, "looked at")
    h.save(f"{run}/step-400")
    lib.wait_for(lambda: h.api.get("/v1/policies/rest").ok(200)["status"]["checkpoints"] == 4, 10, "looked at again")
    assert h.steps(run) == [100, 200, 300, 400]
    shown = h.preview("rest").ok(200)
    assert shown["remove"] == [] and shown["keep"][0] == {"name": f"{run}/step-100", "bytes": shown["keep"][0]["bytes"], "why": ["paused"]}
    assert len(h.preview("rest", {"storage": "main", "match": run, "keep": {"last": 1}}).ok(200)["remove"]) == 3, "what it would do"
    h.put("rest", run, {"last": 1}).ok(200)
    h.settles(run, [400])
    h.drop("rest")


def test_said_twice(h):
    run = h.run_of(2)
    error = h.put("all", "*", {"last": 1}).problem("validation_failed", status=422)
    assert "every run" in error["detail"] and "confirm" in error["detail"]
    assert "no run" in h.put("none", "nosuchrun", {"last": 1}).problem("validation_failed", status=422)["detail"]
    h.put("none", "nosuchrun", {"last": 1}, confirm=True).ok(200)
    h.drop("none")
    for keep in ({}, {"last": 0}, {"newest": 3}, {"ttl": "soon"}, {"best": {"mode": "min"}}, {"every_steps": "7"}, {"bytes": -1}):
        h.put("bad", run, keep).problem("validation_failed", "unknown_field")
    h.put("bad", run, {"last": 1}, storage="nosuch").problem("not_found")
    h.put("bad/name", run, {"last": 1}).problem("not_found", "name_invalid", "method_not_allowed")
    h.api.delete("/v1/policies/bad").problem("not_found")
    assert h.steps(run) == [100, 200]


def test_what_stays_whatever_a_policy_says(h):
    run = h.run_of(6)
    h.api.request("PUT", h.path(f"{run}/step-100", "/hold"), {"reason": "mine"}).ok(200)
    h.api.request("PUT", f"/v1/runs/main/{run}/aliases/best", {"name": f"{run}/step-200"}).ok(200)
    h.api.run("verify", source={"storage": "main", "name": f"{run}/step-300"}, level="digest")
    notes = h.root / run / "step-400/.dcpd-notes.json"
    notes.write_text("{")
    shown = {k["name"][-3:]: k["why"] for k in h.preview("p", {"storage": "main", "match": run, "keep": {"last": 1}}).ok(200)["keep"]}
    assert shown["100"] == ["held"] and shown["200"] == ["alias"] and shown["300"] == ["newest_verified"]
    assert shown["400"] == ["held", "unreadable"] and shown["600"] == ["newest_durable", "last"]
    h.put("p", run, {"last": 1}).ok(200)
    h.settles(run, [100, 200, 300, 400, 600])
    notes.unlink()
    h.api.delete(h.path(f"{run}/step-100", "/hold")).ok(200)
    h.api.request("PUT", f"/v1/runs/main/{run}/aliases/best", {"name": f"{run}/step-600"}).ok(200)
    h.put("p", run, {"last": 1}).ok(200)
    h.settles(run, [300, 600])
    h.drop("p")


def test_deltas_keep_their_bases(h):
    run = h.run_of(3)
    base, new = ({"storage": "main", "name": f"{run}/step-{s}"} for s in (100, 200))
    h.api.run("delta", base=base, source=new, target={"storage": "main", "name": f"deltas-{run}/d-1"})
    h.put("p", run, {"last": 1}).ok(200)
    h.settles(run, [100, 300])
    why = {k["name"]: k["why"] for k in h.preview("p").ok(200)["keep"]}
    assert why[f"{run}/step-100"] == ["base_of_kept"]
    h.api.wait(h.api.delete(h.path(f"deltas-{run}/d-1")).ok(202))
    h.put("p", run, {"last": 1}).ok(200)
    h.settles(run, [300])
    h.drop("p")


@pytest.mark.long
def test_a_delta_that_is_made_while_policies_are_looked_at(spawn):
    """The list of main has been read when the delta comes; that of the other storage takes its time."""
    h = Host(spawn(("main", "slow"), env=SLOW_FILES))
    run = h.run_of(3)
    at = h.d.storages["slow"] / "folder"
    at.mkdir()
    for i in range(8):
        (at / f"slow-{i}").touch()

    h.put("p", run, {"last": 1}).ok(200)
    lib.wait_for(lambda: any(w["role"] == "lookup" and w["state"] == "busy" for w in h.api.get("/v1/workers").ok(200)["workers"]), 60)
    base, new = ({"storage": "main", "name": f"{run}/step-{s}"} for s in (100, 300))
    h.api.run("delta", base=base, source=new, target={"storage": "main", "name": f"{run}-deltas/d-1"})
    h.settles(run, [100, 300])
    assert {k["name"]: k["why"] for k in h.preview("p").ok(200)["keep"]}[f"{run}/step-100"] == ["base_of_kept"]


@pytest.mark.long
def test_a_delta_that_comes_back_while_policies_are_looked_at(spawn):
    """The list of main, without it, has been read by then."""
    h = Host(spawn(("main", "slow"), env=SLOW_FILES))
    run = h.run_of(3)
    base, new = ({"storage": "main", "name": f"{run}/step-{s}"} for s in (100, 300))
    h.api.run("delta", base=base, source=new, target={"storage": "main", "name": f"{run}-deltas/d-1"})
    h.api.wait(h.api.delete(h.path(f"{run}-deltas/d-1") + "?trash=1h").ok(202))
    at = h.d.storages["slow"] / "folder"
    at.mkdir()
    for i in range(8):
        (at / f"slow-{i}").touch()

    h.put("p", run, {"last": 1}).ok(200)
    lib.wait_for(lambda: any(w["role"] == "lookup" and w["state"] == "busy" for w in h.api.get("/v1/workers").ok(200)["workers"]), 60)
    h.api.post(h.path(f"{run}-deltas/d-1", ":undelete")).ok(200)
    h.settles(run, [100, 300])


@pytest.mark.long
def test_what_a_verify_finds_while_policies_are_looked_at(spawn):
    """By the list of main that was read before, the first three checkpoints go; then one proves whole, and the newest one damaged."""
    h = Host(spawn(("main", "slow"), env=SLOW_FILES))
    run = h.run_of(4)
    of = lambda step: {"storage": "main", "name": f"{run}/step-{step}"}  # noqa: E731
    h.api.run("verify", source=of(200), level="structure")
    file = next(p for p in (h.root / run / "step-400").iterdir() if p.suffix == ".distcp")
    at = h.d.storages["slow"] / "folder"
    at.mkdir()
    for i in range(12):
        (at / f"slow-{i}").touch()

    h.put("p", run, {"last": 1}).ok(200)
    lib.wait_for(lambda: any(w["role"] == "lookup" and w["state"] == "busy" for w in h.api.get("/v1/workers").ok(200)["workers"]), 60)
    h.api.run("verify", source=of(100), level="digest")
    os.truncate(file, 100)
    h.api.fails("verify", "checkpoint_damaged", source=of(400), level="digest")
    assert h.steps(run) == [100, 200, 300, 400]
    h.settles(run, [100, 300, 400])
    why = {k["name"][-3:]: k["why"] for k in h.preview("p").ok(200)["keep"]}
    assert why["100"] == ["newest_verified"] and "newest_durable" in why["300"] and why["400"] == ["unreadable"], why


def test_best_steps_and_a_budget(h):
    run = f"r{lib.fresh()}"
    for step, loss in ((100, 3.0), (200, 1.0), (300, 2.0), (400, 5.0), (500, 4.0)):
        h.save(f"{run}/step-{step}", metrics={"loss": loss})
    h.put("p", run, {"best": {"metric": "loss", "mode": "min", "count": 2}}).ok(200)
    h.settles(run, [200, 300, 500])
    h.put("p", run, {"every_steps": 100, "bytes": 1}).ok(200)
    lib.wait_for(lambda: h.api.get("/v1/policies/p").ok(200)["status"]["over_bytes"] > 0, 10, "a budget that cannot be met is shown")
    assert h.steps(run) == [200, 300, 500]
    h.put("p", run, {"bytes": 1}).ok(200)
    h.settles(run, [500])
    h.drop("p")


def test_shared_bytes_count_once(h):
    """Of an incremental checkpoint whose parent is gone all bytes count: nobody else has them any more."""
    run = f"r{lib.fresh()}"
    for step in (100, 200, 300):
        h.save(f"{run}/step-{step}", incremental=True)

    def counted():
        shown = h.preview("p", {"storage": "main", "match": run, "keep": {"last": 9}}).ok(200)
        return {k["name"][-3:]: k["bytes"] > 5000 for k in shown["keep"]}

    assert counted() == {"100": True, "200": False, "300": False}
    h.api.run("delete", target={"storage": "main", "name": f"{run}/step-100"})
    assert counted() == {"200": True, "300": False}


def test_into_the_trash_and_back(h):
    run = h.run_of(3)
    h.put("p", run, {"last": 1}, trash="5000d").ok(200)
    h.settles(run, [300])
    listed = [e for e in h.api.get("/v1/storages/main/trash").ok(200)["trash"] if e["name"].startswith(run + "/")]
    assert len(listed) == 2 and all(e["policy"] == "p" and e["why"] == "not_kept" for e in listed)
    h.drop("p")
    h.api.post(h.path(f"{run}/step-100", ":undelete")).ok(200)
    assert h.steps(run) == [100, 300]


def test_over_a_restart(h):
    run = h.run_of(2)
    h.put("p", run, {"last": 2, "ttl": "720h"}, verified_only=True, trash="1h").ok(200)
    before = {k: v for k, v in h.api.get("/v1/policies/p").ok(200).items() if k != "status"}
    h.d.kill()
    h.d.start()
    assert {k: v for k, v in h.api.get("/v1/policies/p").ok(200).items() if k != "status"} == before
    h.put("p", run, {"last": 1}).ok(200)
    h.settles(run, [200])
    h.drop("p")


def test_the_command(h):
    run = h.run_of(3)
    ctl = h.d.ctl
    shown = ctl("policy", "night", "--storage", "main", "--match", run, "--keep-last", "2", "--preview")
    assert shown.returncode == 0 and "step-100" in shown.stdout and "newest_durable, last" in shown.stdout
    assert ctl("policy", "night").returncode == 6
    made = ctl("policy", "night", "--storage", "main", "--match", run, "--keep-last", "2", "--keep-best", "loss:max:3", "--keep-every",
               "24h", "--keep-every-steps", "1000", "--ttl", "720h", "--bytes", "1000000000", "--verified-only", "--paused", "--trash",
               "72h", "--json")
    doc = json.loads(made.stdout)
    assert doc["keep"] == {"last": 2, "best": {"metric": "loss", "mode": "max", "count": 3}, "every": "24h", "every_steps": 1000,
                           "ttl": "720h", "bytes": 1000000000} and doc["verified_only"] and doc["paused"] and doc["trash"] == "72h"
    assert "night" in ctl("policies").stdout
    assert ctl("policy", "night", "--keep-best", "loss:min:x").returncode == 2
    assert ctl("policy", "night", "--rm").returncode == 0
    assert ctl("policy", "night", "--rm").returncode == 6


def test_a_clock_that_jumps_removes_nothing(tmp_path, spawn):
    clock = WallClock(tmp_path / "clock")
    h = Host(spawn(env=clock.env))
    run = h.run_of(3)
    trashed = h.run_of(2)
    h.put("t", trashed, {"last": 1}, trash="1h").ok(200)
    h.settles(trashed, [200])
    h.put("p", run, {"ttl": "720h"}).ok(200)
    clock.step(3650 * 86400)
    h.put("p", run, {"ttl": "720h"}).ok(200)
    shown = h.preview("p").ok(200)
    assert not shown["remove"] and all("clock" in k["why"] or "newest_durable" in k["why"] for k in shown["keep"])
    h.save(f"{run}/step-400")
    clock.step(-3650 * 86400)
    h.save(f"{run}/step-500")
    h.put("p", run, {"last": 1}).ok(200)
    lib.wait_for(lambda: h.api.get("/v1/policies/p").ok(200)["status"]["evaluated_at"], 10, "looked at")
    h.settles(run, [400, 500], "the newest by its time, and the newest by its job")
    assert [e["name"] for e in h.api.get("/v1/storages/main/trash").ok(200)["trash"]] == [f"{trashed}/step-100"]
