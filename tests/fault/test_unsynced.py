"""A storage whose fsync of the directory behind a commit fails: the job fails, whatever a second fsync says (worker/store/commit.h)."""
import os
import re
import signal
import subprocess

import pytest

import dcpd as lib

pytestmark = pytest.mark.skipif(not os.path.exists("/usr/bin/strace"), reason="needs strace")
OLD = {"storage": "main", "name": "old"}


@pytest.fixture
def fresh(spawn):
    """A checkpoint `old`, a state dict, and no worker yet. The root's first fsync of each job is that of the staging directory's entry,
    the second that of the commit, the third that of its undoing."""
    d = spawn()
    d.put("train", [lib.image({"w": ("F32", [4], bytes(16))}, {"values": {"step": {"json": 1}}})])
    save(d, "old", succeeds=True)
    d.kill()
    d.start()
    return d


def save(d, name, succeeds, **options):
    job = d.api.wait(d.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": name}, options=options))
    assert job["state"] == ("succeeded" if succeeds else "failed"), job
    return job


def names(d):
    return sorted(c["name"] for c in d.api.get("/v1/checkpoints/main").ok(200)["checkpoints"])


def test_a_commit_that_cannot_be_synced_is_taken_back(fresh):
    d = fresh
    with lib.strikes(d, "fsync", 2, "error=EIO", d.storages["main"]):
        job = save(d, "new", succeeds=False)
        lib.check_problem(job["error"], "storage_io")
        assert not (job.get("milestones") or {}).get("durable"), job
        assert names(d) == ["old"]
    save(d, "new", succeeds=True)
    assert names(d) == ["new", "old"] and not d.staging()


def test_a_commit_in_doubt_is_not_believed(fresh):
    """Nor is it after a restart."""
    d = fresh
    before = {p.name: p.stat().st_ino for p in (d.storages["main"] / "old").iterdir()}
    with lib.strikes(d, "fsync", "2+", "error=EIO", d.storages["main"]):
        job = save(d, "old", succeeds=False, overwrite=True)
    p = lib.check_problem(job["error"], "not_durable")
    assert not p["retryable"] and "power cut" in p["detail"], p
    assert {p.name: p.stat().st_ino for p in (d.storages["main"] / "old").iterdir()} == before
    assert d.staging()  # whole, until the next start
    d.kill()
    d.start()
    assert d.api.get(f"/v1/jobs/{job['id']}").ok(200)["state"] == "failed"
    lib.wait_for(lambda: not d.staging(), 10, "staging swept")
    assert d.api.run("verify", source=OLD, level="digest")["result"]["unverifiable"] == 0


def test_a_delete_that_cannot_be_synced_is_taken_back(fresh):
    d = fresh
    with lib.strikes(d, "fsync", 1, "error=EIO", d.storages["main"]):
        lib.check_problem(d.api.wait(d.api.submit("delete", target=OLD))["error"], "storage_io")
    assert names(d) == ["old"]
    d.api.run("verify", source=OLD, level="digest")


def test_what_is_not_synced_is_not_called_durable(spawn):
    d = spawn()
    d.put("train", [lib.image({"w": ("F32", [4], bytes(16))})])
    assert save(d, "a", succeeds=True)["milestones"]["durable"]
    job = save(d, "b", succeeds=True, sync_files=False)
    assert not job["milestones"].get("durable"), job


def struck_token(d, call, error):
    """The command line before dcpd's own that makes each `call` on the token fail. Its tracer is no parent of the daemon."""
    return ["strace", "-D", "-I2", "-qq", "-o", "/dev/null", "-P", str(d.state / "token"), "-e", f"trace={call}", "-e",
            f"inject={call}:error={error}"]


def tracer(d):
    with open(f"/proc/{d.proc.pid}/status") as f:
        return int(re.search(r"TracerPid:\t(\d+)", f.read()).group(1))


def test_a_token_that_cannot_be_synced_ends_the_start(spawn):
    """Half a token is not kept: the next start makes another."""
    d = spawn(start=False)
    r = subprocess.run([*struck_token(d, "fsync", "EIO"), *d.command()], env=lib.clean_environment(), capture_output=True, timeout=100)
    assert r.returncode == 1, r
    assert not (d.state / "token").exists()
    d.start()
    assert d.tcp_client().get("/v1/jobs").status == 200


def test_a_token_without_space_is_made_when_there_is_some(spawn):
    """The daemon runs meanwhile, says so, lets nobody in over TCP, and keeps no half token."""
    d = spawn(start=False)
    d.under = struck_token(d, "pwrite64", "ENOSPC")
    d.start()
    assert "no token can be made" in d.since_start()
    assert d.tcp_client(token=False).get("/v1/jobs").status == 401
    assert not (d.state / "token").exists()
    os.kill(tracer(d), signal.SIGTERM)
    lib.wait_for(lambda: not tracer(d), 10, "the token's writes succeed again")
    assert d.api.get("/v1/jobs").status == 200
    assert d.tcp_client().get("/v1/jobs").status == 200
    assert d.stop() == 0
