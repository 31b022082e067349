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


@pytest.mark.parametrize("call", ["renameat", "unlinkat"], ids=["not moved to trash", "not removed"])
def test_an_overwritten_checkpoint_goes_in_the_end(trained, call):
    d = trained
    with lib.strikes(d, call, "1+", "error=EIO", running=True):
        d.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/x"}, options={"overwrite": True})
        lib.wait_for(d.staging, 5, "the old checkpoint, put away")
    lib.wait_for(lambda: not d.staging(), 30, "left-overs swept")
    d.api.run("verify", source={"storage": "main", "name": "run/x"}, level="digest")


def test_a_deleted_checkpoint_goes_in_the_end(trained):
    d = trained
    with lib.strikes(d, "unlinkat", "1+", "error=EACCES"):
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
