"""Tiers: durable in the fast storage, then replicated to the one behind it; either copy serves; a dead target blocks no save."""
import os
import re
import shutil
import subprocess

import pytest
from crafted import Crafted, tree

import dcpd as lib


def ref(name, storage="main"):
    return {"storage": storage, "name": name}


def save(d, name, size=5000):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [size], os.urandom(size))})])
    try:
        return d.api.run("save", source={"state_dict": sd}, target=ref(name))
    finally:
        d.drop(sd)


def tier(d):
    return next(s for s in d.api.get("/v1/storages").ok(200)["storages"] if s["name"] == "main")["tier"]


def record(d, name, storage="main"):
    return d.api.get(d.api.storage_path(storage, name)).ok(200)


def replicated(d, name):
    lib.wait_for(lambda: record(d, name)["replicated"], 60, name)
    return record(d, name)


def same(d, name):
    a, b = ({k: v for k, v in tree(d.storages[s] / name).items() if k != ".dcpd-copied.json"} for s in ("main", "far"))
    return a == b


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    home = tmp_path_factory.mktemp("tiered")
    d = lib.Daemon(home, {"main": home / "main", "far": home / "far"}, ["--tier=main=far"])
    yield d
    d.discard()


def test_durable_then_replicated(tiered):
    d = tiered
    job = save(d, "run1/step-1")
    assert job["milestones"]["durable"]
    after = replicated(d, "run1/step-1")
    assert after["replicated"]["storage"] == "far" and after["replicated"]["at"] and same(d, "run1/step-1")
    listed = d.api.get("/v1/checkpoints/main").ok(200)["checkpoints"]
    assert next(c for c in listed if c["name"] == "run1/step-1")["replicated"] == after["replicated"]
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{job['id']}").ok(200)["milestones"].get("replicated"), 30)
    milestones = d.api.get(f"/v1/jobs/{job['id']}").ok(200)["milestones"]
    assert milestones["durable"] <= milestones["replicated"]
    assert record(d, "run1/step-1", "far")["copied_from"]["name"] == "run1/step-1" and "replicated" not in record(d, "run1/step-1", "far")
    assert {k: tier(d)[k] for k in ("storage", "state", "waiting", "bytes")} == {"storage": "far", "state": "ok", "waiting": 0, "bytes": 0}


def test_what_others_wrote_and_what_is_replaced(tiered):
    d = tiered
    save(d, "run2/step-1")
    replicated(d, "run2/step-1")
    sd = lib.fresh()
    d.put(sd, [lib.image({"b": ("U8", [100], os.urandom(100))})])
    d.api.run("save", source={"state_dict": sd}, target=ref("run2/step-1"), options={"overwrite": True})
    d.drop(sd)
    for _ in range(2):  # whether it is replicated by now or not: what the copy has from before is no part of it
        p = d.api.get(d.api.storage_path("main", "run2/step-1", "/tensors/a")).problem("not_found", status=404)
        assert p["detail"] == "there is no tensor 'a'", p
        lib.wait_for(lambda: same(d, "run2/step-1"), 60)
    c = Crafted(d.storages["main"])
    d.stop()
    d.start()  # lists both storages: what PyTorch wrote meanwhile is found, what is there already is not copied again
    replicated(d, c.name)
    assert record(d, "run2/step-1")["replicated"] == {"storage": "far"} and same(d, c.name)
    copies = [j for j in d.api.get("/v1/jobs?filter=kind%3Dreplicate").ok(200)["jobs"] if j["source"]["name"] == "run2/step-1"]
    assert len(copies) == 2, copies


@pytest.mark.parametrize("kind", ["load", "reshard", "verify"])
def test_the_copy_serves_what_is_gone(tiered, kind):
    d = tiered
    name = f"run3/{lib.fresh()}"
    save(d, name)
    replicated(d, name)
    shutil.rmtree(d.storages["main"] / name)
    targets = {"load": {"target": {"state_dict": lib.fresh()}}, "reshard": {"target": ref(name + "-new")}, "verify": {}}
    job = d.api.run(kind, source=ref(name), **targets[kind])
    served = job["result"]["served_from"]
    assert served["storage"] == "far" and served["name"] == name and served["why"] == "not_found", served
    if kind == "load":
        d.drop(targets["load"]["target"]["state_dict"])
    d.api.post("/v1/jobs", {"kind": "load", "source": ref("run3/nowhere"), "target": {"state_dict": "x"}}).problem("not_found")


def test_the_copy_serves_lookups_of_what_is_gone(tiered):
    d = tiered
    name = f"run5/{lib.fresh()}"
    save(d, name)
    replicated(d, name)

    def look(storage):
        at = d.api.storage_path(storage, name)
        boxes = {"boxes": [{"fqn": "a", "dtype": "uint8", "shape": [5000], "offsets": [10], "sizes": [50]}]}
        answers = [d.api.get(f"{at}/tensors/a?slice=10:60"), d.api.get(f"{at}/tensors/a?format=npy"), d.api.get(f"{at}/tensors"),
                   d.api.post(f"{at}:locate", boxes)]
        assert {a.status for a in answers} == {200}
        return [a.body for a in answers], {a.headers.get("Dcpd-Served-From") for a in answers}

    there, by = look("main")
    assert by == {None}
    p = d.api.get(d.api.storage_path("main", name, "/tensors/typo")).problem("not_found", status=404)
    assert p["detail"] == "there is no tensor 'typo'", "the checkpoint is there, and nobody else is asked"
    shutil.rmtree(d.storages["main"] / name)
    behind, by = look("main")
    assert by == {"far"} and behind[:3] == there[:3] and behind == look("far")[0]
    p = d.api.get(d.api.storage_path("main", name, "/tensors/typo")).problem("not_found", status=404)
    assert p["detail"] == "there is no tensor 'typo'", "of the copy"
    p = d.api.get(d.api.storage_path("main", "run5/nowhere", "/tensors")).problem("not_found")
    assert "no copy of it in far" in p["detail"]
    d.api.get(d.api.storage_path("main", name)).problem("not_found")  # its own record says what is so
    d.api.get(d.api.storage_path("far", "run5/nowhere", "/tensors/a")).problem("not_found")


def test_the_copy_serves_what_is_damaged(tiered):
    d = tiered
    save(d, "run4/step-1", 3 << 20)
    replicated(d, "run4/step-1")
    whole = d.api.get(d.api.storage_path("main", "run4/step-1", "/tensors/a"))
    assert whole.status == 200
    path = next((d.storages["main"] / "run4/step-1").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[2 << 20] ^= 1
    path.write_bytes(data)
    slice_ = d.api.get(d.api.storage_path("main", "run4/step-1", "/tensors/a"))
    assert slice_.body == whole.body and slice_.headers["Dcpd-Served-From"] == "far"
    job = d.api.run("reshard", source=ref("run4/step-1"), target=ref("run4/new"))
    assert job["result"]["served_from"]["why"] == "digest_mismatch"
    d.api.run("diff", a=ref("run4/new"), b=ref("run4/step-1", "far"))
    d.api.fails("verify", "checkpoint_damaged", source=ref("run4/step-1"), level="digest")  # a verify is of the copy that was asked for


@pytest.mark.long
def test_a_dead_target_blocks_no_save(spawn, mounted):
    far = mounted("size=64m")
    d = spawn(("main",), start=False)
    d.storages["far"] = far
    d.args = [*d.args, "--tier=main=far"]
    d.start()
    save(d, "run/step-1")
    replicated(d, "run/step-1")
    subprocess.run(["mount", "-o", "remount,ro", str(far)], check=True)
    for step in (2, 3):
        assert save(d, f"run/step-{step}")["milestones"]["durable"]
    lib.wait_for(lambda: tier(d)["state"] == "failing", 30)
    assert tier(d)["waiting"] == 2 and tier(d)["error"]["code"] and tier(d)["bytes"] > 0
    failures = re.compile(r'^dcpd_tier_failures_total\{.*\} ([3-9])', re.M)
    lib.wait_for(lambda: failures.search(d.api.get("/metrics").body.decode()), 60)
    copies = d.api.get("/v1/jobs?filter=kind%3Dreplicate").ok(200)["jobs"]
    assert len(copies) <= 3 and max(c["attempt"] for c in copies) > 1  # what failed is tried again, and makes no other job
    text = d.api.get("/metrics").body.decode()
    assert 'dcpd_tier_waiting{storage="main",to="far"} 2' in text and 'dcpd_tier_failing{storage="main",to="far"} 1' in text
    d.kill()
    subprocess.run(["mount", "-o", "remount,rw", str(far)], check=True)
    d.start()
    for step in (2, 3):
        replicated(d, f"run/step-{step}")
        assert same(d, f"run/step-{step}")
    lib.wait_for(lambda: tier(d)["state"] == "ok", 30)


def test_policies_leave_what_is_not_replicated(spawn, mounted):
    far = mounted("size=64m")
    d = spawn(("main",), start=False)
    d.storages["far"] = far
    d.args = [*d.args, "--tier=main=far"]
    d.start()
    save(d, "run/step-1")
    replicated(d, "run/step-1")
    subprocess.run(["mount", "-o", "remount,ro", str(far)], check=True)
    for step in (2, 3, 4):
        save(d, f"run/step-{step}")

    def preview():
        p = d.api.post("/v1/policies/p:preview", {"storage": "main", "match": "run", "keep": {"last": 1}}).ok(200)
        return [r["name"] for r in p["remove"]], {k["name"]: k["why"] for k in p["keep"]}

    lib.wait_for(lambda: preview()[0] == ["run/step-1"], 30, "only what has a replica goes")
    assert preview()[1]["run/step-2"] == preview()[1]["run/step-3"] == ["in_use"]
    subprocess.run(["mount", "-o", "remount,rw", str(far)], check=True)
    for step in (2, 3, 4):
        replicated(d, f"run/step-{step}")
    lib.wait_for(lambda: preview()[0] == ["run/step-1", "run/step-2", "run/step-3"], 30, "all are replicated")


@pytest.mark.long
def test_copies_that_stand_still_hold_up_no_save(spawn):
    """The workers of a copy are stopped, as a system call that does not return would stop them."""
    d = spawn(("main", "far"), ["--tier=main=far", "--tier=main.pace=background"])
    save(d, "run/large", 64 << 20)

    def copying():
        jobs = d.api.get("/v1/jobs?filter=kind%3Dreplicate%20AND%20state%3Drunning").ok(200)["jobs"]
        return [w["pid"] for w in d.api.get("/v1/workers").ok(200)["workers"] if jobs and w.get("job") == jobs[0]["id"]]

    pids = lib.wait_for(copying, 30)
    with lib.stopped(*pids):
        for step in (1, 2):
            assert save(d, f"run/step-{step}")["milestones"]["durable"]
        assert tier(d)["waiting"] == 3 and not record(d, "run/step-1")["replicated"]
        assert d.api.run("load", source=ref("run/step-2"), target={"state_dict": "loaded"})["state"] == "succeeded"
    for name in ("run/large", "run/step-1", "run/step-2"):
        replicated(d, name)
    d.drop("loaded")


def test_only_the_newest_wait(spawn, mounted):
    far = mounted("size=64m")
    d = spawn(("main",), start=False)
    d.storages["far"] = far
    config = d.home / "dcpd.conf"
    config.write_text("tier.main = far\ntier.main.order = newest\ntier.main.behind = 1\n")
    d.args = [*d.args, f"--config={config}"]
    d.start()
    subprocess.run(["mount", "-o", "remount,ro", str(far)], check=True)
    for step in (1, 2, 3):
        save(d, f"run/step-{step}")
    save(d, "other/step-1")
    lib.wait_for(lambda: tier(d)["skipped"] == 2, 60)
    subprocess.run(["mount", "-o", "remount,rw", str(far)], check=True)
    replicated(d, "run/step-3")
    replicated(d, "other/step-1")
    assert not record(d, "run/step-2")["replicated"] and not (far / "run/step-2").exists()


@pytest.mark.parametrize("args, say", [(["--tier=main=nowhere"], "no other storage"), (["--tier=main=main"], "no other storage"),
                                       (["--tier=x=main"], "no such storage"), (["--tier=main.behind=2"], "no storage"),
                                       (["--tier=main=far", "--tier=far=main"], "leads back"),
                                       (["--tier=main=far", "--tier=main.order=any"], "known are")])
def test_configuration(tmp_path, args, say):
    for name in ("main", "far"):
        (tmp_path / name).mkdir()
    r = subprocess.run([lib.BIN / "dcpd", f"--state-dir={tmp_path}", f"--storage=main={tmp_path}/main", f"--storage=far={tmp_path}/far",
                        "--check-config", *args], env=lib.clean_environment(), capture_output=True, text=True, timeout=30)
    assert r.returncode != 0 and say in r.stderr + r.stdout, r
