"""A state directory without space: the daemon starts and goes on read-only, says so, loses nothing, and writes again by itself."""
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

import dcpd as lib

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems")
F4 = ("F32", [4], bytes(range(16)))


@pytest.fixture
def small(mounted, tmp_path):
    """A daemon whose state directory, and nothing else of it, lies on a file system of 8 MiB. Not started."""
    d = lib.Daemon(mounted("size=8m"), {"main": tmp_path / "main"}, start=False)
    d.log = tmp_path / "log"
    yield d
    d.discard()


def fill(d):
    with open(d.home / "ballast", "ab", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))


def free(d):
    (d.home / "ballast").unlink()
    lib.wait_for(lambda: d.api.get("/readyz").ok(200)["status"] == "ready", 10, "writable again")


def ready(d):
    return d.api.get("/readyz").ok(200)


def save(sd, name):
    return {"kind": "save", "source": {"state_dict": sd}, "target": {"storage": "main", "name": name}}


def refused(d, answer):
    p = answer.problem("storage_full", status=507)
    assert p["retryable"] and str(d.state) in p["detail"], p


def check_read_only(d):
    """Whatever would need the journal is refused, and the daemon says why wherever somebody looks."""
    said = ready(d)
    assert said["status"] == "degraded" and any(str(d.state) in w and "read-only" in w for w in said["warnings"]), said
    assert "read-only" in d.since_start()
    status = d.ctl("status").stdout
    assert "degraded" in status and f"WARNING: {said['warnings'][0]}" in status
    doctor = subprocess.run([sys.executable, "-m", "dcpd", "doctor"], capture_output=True, text=True, timeout=60, env=lib.clean_environment(
        PYTHONPATH=str(lib.ROOT / "api/python"), DCPD_URL=f"unix://{d.socket}"))
    assert doctor.returncode == 1 and f"FAIL  {said['warnings'][0]}" in doctor.stdout, doctor.stdout + doctor.stderr
    assert "dcpd_journal_writable 0" in d.api.get("/metrics").body.decode()
    refused(d, d.api.post("/v1/jobs", save("sd", "later")))
    refused(d, d.api.post("/v1/state-dicts", {"name": "other", "world_size": 1}))
    refused(d, d.api.delete("/v1/state-dicts/sd"))
    refused(d, d.api.post("/v1/state-dicts/sd/ranks/0:reserve", {"bytes": 4096, "generation": 9}))
    refused(d, d.api.delete("/v1/checkpoints/main/one"))


def check_writable(d, name):
    assert ready(d)["status"] == "ready"
    d.api.run("save", **{k: v for k, v in save("sd", name).items() if k != "kind"})
    assert "dcpd_journal_writable 1" in d.api.get("/metrics").body.decode()


@pytest.mark.short("kill")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_starts_read_only(small, end):
    d = small
    d.start()
    segment = d.put("sd", [lib.image({"a": F4})])[0]
    done = d.api.run("save", **{k: v for k, v in save("sd", "one").items() if k != "kind"})
    getattr(d, end)()
    fill(d)
    d.start()
    assert d.api.get(f"/v1/jobs/{done['id']}").ok(200)["result"] == done["result"]
    assert [j["id"] for j in d.api.get("/v1/jobs").ok(200)["jobs"]] == [done["id"]]
    assert [s["name"] for s in d.api.get("/v1/state-dicts").ok(200)["state_dicts"]] == ["sd"]
    assert [c["name"] for c in d.api.get("/v1/checkpoints/main").ok(200)["checkpoints"]] == ["one"]
    assert d.api.get("/v1/checkpoints/main/one/tensors/a").body == F4[2]
    check_read_only(d)
    free(d)
    check_writable(d, "two")
    assert d.images("sd") and lib.segment_file(segment).exists()
    ids = {j["id"] for j in d.api.get("/v1/jobs").ok(200)["jobs"]}
    d.kill()
    d.start()
    assert {j["id"] for j in d.api.get("/v1/jobs").ok(200)["jobs"]} == ids and len(ids) == 2
    d.drop("sd")


def test_first_start_without_space(small):
    """There is neither journal nor token yet: both come when there is space, and what was made meanwhile is known to the next start."""
    d = small
    fill(d)
    d.start()
    assert ready(d)["status"] == "degraded"
    refused(d, d.api.post("/v1/state-dicts", {"name": "sd", "world_size": 1}))
    free(d)
    d.put("sd", [lib.image({"a": F4})])
    check_writable(d, "one")
    assert d.tcp_client().get("/v1/jobs").ok(200)["jobs"]
    d.kill()
    d.start()
    assert ready(d)["status"] == "ready" and len(d.api.get("/v1/jobs").ok(200)["jobs"]) == 1 and d.images("sd")
    d.drop("sd")


def test_fills_while_it_runs(small):
    d = small
    d.start()
    d.put("sd", [lib.image({"a": F4})])
    d.api.run("save", **{k: v for k, v in save("sd", "one").items() if k != "kind"})
    fill(d)
    refused(d, d.api.post("/v1/jobs", save("sd", "later")))
    lib.wait_for(lambda: ready(d)["status"] == "degraded", 10, "it says so")
    check_read_only(d)
    free(d)
    check_writable(d, "two")
    d.drop("sd")


@pytest.fixture
def running(small):
    """(daemon, job, workers): the job has begun and its workers stand still; then the disk has filled up."""
    d = small
    d.start()
    d.put("sd", [lib.image({"a": F4})])
    d.api.run("save", **{k: v for k, v in save("sd", "zero").items() if k != "kind"})
    gang = [w["pid"] for w in d.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "gang"]
    assert gang
    for pid in gang:
        os.kill(pid, signal.SIGSTOP)
    j = d.api.post("/v1/jobs", save("sd", "one")).ok(202)
    lib.wait_for(lambda: state_of(d, j) != "queued", 10, "the job is with the workers")
    fill(d)
    yield d, j, gang
    for pid in gang:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def state_of(d, j):
    return d.api.get(f"/v1/jobs/{j['id']}").ok(200)["state"]


def go_on(gang):
    for pid in gang:
        os.kill(pid, signal.SIGCONT)


def test_a_job_waits_for_space_before_its_commit(running):
    d, j, gang = running
    go_on(gang)
    lib.wait_for(lambda: ready(d)["status"] == "degraded", 10, "it says so")
    time.sleep(1.5)
    assert state_of(d, j) == "committing" and not (d.storages["main"] / "one").exists()
    free(d)
    end = d.api.wait(j)
    assert end["state"] == "succeeded" and end["attempt"] == 1
    d.drop("sd")


@pytest.mark.long
def test_a_job_is_carried_on_when_there_is_space(running):
    d, j, _ = running
    d.kill()
    d.start()
    check_read_only(d)
    time.sleep(1.5)
    assert state_of(d, j) in ("queued", "planning", "running") and not (d.storages["main"] / "one").exists()
    free(d)
    assert d.api.wait(j)["state"] == "succeeded"
    d.drop("sd")


def test_ends_without_space(running):
    """SIGTERM does not wait for space, and what could not be written is found out by the next start."""
    d, j, gang = running
    go_on(gang)
    lib.wait_for(lambda: state_of(d, j) == "committing", 10, "the commit waits")
    assert d.stop() == 0
    d.start()
    assert ready(d)["status"] == "degraded" and d.stop() == 0
    (d.home / "ballast").unlink()
    d.start()
    assert ready(d)["status"] == "ready" and d.api.wait(j)["state"] == "succeeded"
    d.drop("sd")
