"""The drop-in's commits, killed at each of their steps, most of all where it writes beside other files: what PyTorch finds there is the
old checkpoint or the new one, never a mix."""
import contextlib
import os
import signal
import time

import harness as lib
import pytest
import torch.distributed.checkpoint as dcp
from test_faults_dropin import load, save, state  # noqa: F401

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
              pytest.mark.skipif(not os.path.exists("/usr/bin/strace"), reason="needs strace")]
# away: .metadata, manifest, data; in: data, manifest, .metadata
RENAMES = 6


@pytest.fixture
def beside(own):  # noqa: F811
    """A checkpoint with state(1) and a file of somebody else; the daemon has no worker yet."""
    d = own()
    path = d.storages["main"] / "a"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save(state(1), path)
    d.kill()
    d.start()
    return d, path


def settled(d, path, x):
    assert load(path) == load(path, StorageReader) == x
    assert (path / "config.json").read_text() == "{}"
    lib.wait_for(lambda: not d.staging(), 5, "staging swept")
    save(state(3), path)
    assert load(path) == 3 and dcpd.connect().jobs.run("verify", source="main:a", level="digest")["result"]["unverifiable"] == 0


@pytest.mark.parametrize("nth", range(1, RENAMES + 1) if lib.FULL else [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 6))])
@pytest.mark.parametrize("what", ["signal=KILL", "error=EIO"] if lib.FULL else ["signal=KILL"])
def test_a_save_that_breaks_off_puts_back_what_was_there(beside, nth, what):
    """Each worker that tries it is struck: the job fails."""
    d, path = beside
    with lib.strikes(d, "renameat", nth, what):
        with pytest.raises(dcp.CheckpointException):
            save(state(2), path)
    settled(d, path, 1)


def test_a_save_that_fails_puts_back_what_was_there(beside):
    d, path = beside
    with lib.strikes(d, "renameat", 5, "error=EIO"):
        with pytest.raises(dcp.CheckpointException, match="dcpd.json"):
            save(state(2), path)
    settled(d, path, 1)


def test_a_worker_dies_after_the_commit(beside):
    d, path = beside
    with lib.strikes(d, "unlinkat", 1, "signal=KILL"):
        save(state(2), path)
    settled(d, path, 2)


@pytest.mark.parametrize("nth", range(1, RENAMES + 1) if lib.FULL else (4,))
def test_all_die_and_the_daemon_comes_back(beside, nth):
    """The job is done again, from the segments."""
    d, path = beside
    with lib.strikes(d, "renameat", nth, "signal=KILL:delay_enter=600000"):
        f = dcp.async_save(state(2), storage_writer=StorageWriter(path), no_dist=True)
        lib.wait_for(lambda: dcpd.connect().jobs.list(filter="state=committing"), 20, "a worker in its commit", every=0.001)
        time.sleep(0.1)
        workers = d.kill()
        for w in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(w, signal.SIGKILL)
    d.start()
    f.result(60)
    settled(d, path, 2)


@pytest.mark.long
@pytest.mark.parametrize("call, x", [("renameat2", 1), ("renameat", 2)])
def test_a_worker_dies_in_an_exchange(own, call, x):  # noqa: F811
    """Where the whole directory is replaced in one step: in it, after it."""
    d = own()
    path = d.storages["main"] / "a"
    save(state(1), path)
    d.kill()
    d.start()
    with lib.strikes(d, call, 1, "signal=KILL"):
        with contextlib.nullcontext() if x == 2 else pytest.raises(dcp.CheckpointException):
            save(state(2), path)
    assert load(path) == load(path, StorageReader) == x
    lib.wait_for(lambda: not d.staging(), 5, "staging swept")
    save(state(3), path)
    assert load(path) == 3
