"""A storage whose fsync of the directory behind a commit fails: the job fails, whatever a second fsync says (worker/store/commit.h)."""
import os
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


@pytest.mark.parametrize("call, error", [("pwrite64", "ENOSPC"), ("fsync", "EIO")])
def test_half_a_token_is_not_kept(spawn, call, error):
    """A state directory that was full at the first start is no reason to fail at the second."""
    d = spawn(start=False)
    token = d.state / "token"
    r = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(token), "-e", f"trace={call}", "-e",
                        f"inject={call}:error={error}:when=1", *d.command()], env=lib.clean_environment(), capture_output=True,
                       timeout=100)
    assert r.returncode == 1, r
    assert not token.exists()
    d.start()
    assert d.tcp_client().get("/v1/jobs").status == 200
