"""What a job could not remove goes while the daemon runs, not at its next start."""
import os

import pytest

import dcpd as lib

pytestmark = pytest.mark.skipif(not os.path.exists("/usr/bin/strace"), reason="needs strace")


@pytest.fixture
def trained(spawn):
    d = spawn()
    d.put("train", [lib.image({"w": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/x"})
    d.kill()
    return d.start()


@pytest.mark.parametrize("call", ["renameat,unlinkat", "unlinkat"], ids=["not moved to trash", "not removed"])
def test_an_overwritten_checkpoint_goes_in_the_end(trained, call):
    """unlinkat is struck in any case: else the next sweep may be quicker than the look for what was put away."""
    d = trained
    with lib.strikes(d, call, "1+", "error=EIO", running=True):
        d.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/x"}, options={"overwrite": True})
        lib.wait_for(d.staging, 5, "the old checkpoint, put away")
    lib.wait_for(lambda: not d.staging(), 30, "left-overs swept")
    d.api.run("verify", source={"storage": "main", "name": "run/x"}, level="digest")


@pytest.mark.long
def test_a_deleted_checkpoint_goes_in_the_end(trained):
    d = trained
    with lib.strikes(d, "unlinkat", "1+", "error=EACCES", running=True):
        d.api.run("delete", target={"storage": "main", "name": "run/x"})
        lib.wait_for(d.staging, 5, "the trash")
    lib.wait_for(lambda: not d.staging(), 30, "left-overs swept")


def test_staging_of_a_failed_save_goes_in_the_end(trained):
    """Every process fails to sync what it stages, and to remove it."""
    d = trained
    with lib.strikes(d, "unlinkat,fsync", "1+", "error=EIO", d.storages["main"] / "run"):
        d.api.fails("save", "storage_io", source={"state_dict": "train"}, target={"storage": "main", "name": "run/y"})
        assert d.staging()
    lib.wait_for(lambda: not d.staging(), 30, "left-overs swept")


def test_what_materialise_copied_through_goes_in_the_end(trained):
    d, target = trained, {"storage": "main", "name": "run/x-2"}
    data = lib.image({"w": ("F32", [4], bytes(16))})
    d.put("more", [data])
    for name in ("run/x-1", "run/x-2"):
        d.api.run("save", source={"state_dict": "more"}, target={**target, "name": name}, options={"incremental": True})
    with lib.strikes(d, "unlinkat", "1+", "error=EACCES", running=True):
        assert d.api.run("materialise", target=target)["result"]["changed"]
        lib.wait_for(d.staging, 5, "the staging directory")
    lib.wait_for(lambda: not d.staging(), 30, "left-overs swept")


def test_a_page_that_cannot_be_written_leaves_nothing(trained):
    d = trained
    path = d.api.storage_path("main", "run/x", "/hold")
    with lib.strikes(d, "fsync", "1+", "error=EIO", running=True):
        d.api.request("PUT", path, {"reason": "r"}).problem("storage_io")
    assert not d.staging()
    d.api.request("PUT", path, {"reason": "r"}).ok(200)


def killed_behind_the_rename(d, method, path, body):
    """The look-up worker, before it has synced what it has renamed: the n-th fsync is tried until that is so."""
    with lib.strikes(d, "fsync", 2, "signal=KILL", running=True):
        return d.api.request(method, path, body).problem("worker_lost", status=503)


def test_an_alias_that_was_moved_by_a_killed_worker_is_not_said_to_be_anothers(trained):
    """Who asked has to look: a second worker would find that it leads somewhere else, and blame somebody for that."""
    d, path = trained, "/v1/runs/main/run/aliases/best"
    killed_behind_the_rename(d, "PUT", path, {"name": "run/x", "if": None})
    assert d.api.get("/v1/runs/main/run").ok(200)["aliases"]["best"] == "run/x"


def test_a_checkpoint_that_a_killed_worker_brought_back_leaves_the_trash(trained):
    d, path = trained, lambda tail: f"/v1/checkpoints/main/run%2Fx{tail}"
    d.api.wait(d.api.delete(path("?trash=1h")).ok(202))
    killed_behind_the_rename(d, "POST", path(":undelete"), {})
    d.api.run("verify", source={"storage": "main", "name": "run/x"}, level="digest")
    lib.wait_for(lambda: not d.staging(), 30, "an entry without a checkpoint")
    assert d.api.get("/v1/storages/main/trash").ok(200)["trash"] == []
