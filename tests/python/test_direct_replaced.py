"""Loads of a checkpoint that another is saved over meanwhile, file by file in one directory: all of the old one, all of the new one, or a
clear error; never some of each. Most of these checkpoints have no digests, by which a mix would be found."""
import os
import shutil
import time

import harness as lib
import on_direct
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lib_direct import direct, like, same
from test_ranks import FOUR

import dcpd
from dcpd import _ask, _direct, _into, client
from dcpd.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(_direct, "AVERAGE_MIN", 0)


def version(n, values=True):
    sd = {f"w{i}": torch.arange(30_000, dtype=torch.float32) + 1000 * i + n for i in range(4)}
    return {**sd, "step": n} if values else sd


def pytorchs(sd, path):
    """By PyTorch's own writer, which writes to the files that are there. Without CRC32s."""
    kept = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(sd, storage_writer=dcp.FileSystemWriter(str(path), single_file_per_rank=False), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(kept)


def ours(sd, path):
    """Moved in beside the other files."""
    dcp.save(sd, storage_writer=StorageWriter(path, single_file_per_rank=False), no_dist=True)


@pytest.fixture
def place(at):
    """A directory with somebody's file: saves go beside it, into the same directory."""
    path = at.storages["main"] / lib.fresh()
    path.mkdir()
    (path / "config.json").write_text("{}")
    inode = path.stat().st_ino
    yield path
    assert path.stat().st_ino == inode and (path / "config.json").exists()


def once(monkeypatch, thing, name, what, after=False, nth=1):
    """At its n-th call `what` happens."""
    real, calls = getattr(thing, name), []

    def hooked(*args, **kw):
        calls.append(1)
        if len(calls) == nth and not after:
            what()
        got = real(*args, **kw)
        if len(calls) == nth and after:
            what()
        return got

    monkeypatch.setattr(thing, name, hooked)


# When the save is done, and what is loaded then. What is open is read to its end, but if a job has brought some of the new one.
WHEN = {
    "before it is asked": (client.Checkpoints, "locate", False, 1, 2),
    "when it was asked": (client.Checkpoints, "locate", True, 1, 2),
    "between two files": (_direct._Files, "_open", True, 1, 2),
    "after the last file": (_direct._Files, "_open", True, 4, 2),
    "before the job": (_direct, "find", True, 1, 2),
    "after the job": (_into._Run, "_finish", True, 1, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("first", [pytorchs, ours])
@pytest.mark.parametrize("when, values", [(x, v) for x in WHEN for v in (True, False) if v or "job" not in x])
def test_a_save_beside_while_it_is_loaded(at, place, monkeypatch, when, first, values):
    first(version(1), place)
    thing, name, after, nth, wanted = WHEN[when]
    once(monkeypatch, thing, name, lambda: ours(version(2), place), after, nth)
    into = {**like(version(0, False)), **({"step": 0} if values else {})}
    with direct(at) as seen:
        dcpd.load(str(place), into=into)
    assert into.pop("step", wanted) == wanted
    same(into, version(wanted, False))
    assert seen.boxes == 4


@pytest.mark.parametrize("first", [pytorchs, ours])
def test_files_that_are_opened_again(at, place, monkeypatch, first):
    """They are more than stay open, and by then others: all is loaded anew."""
    monkeypatch.setattr(_direct, "_OPEN_MAX", 1)
    first(version(1), place)
    once(monkeypatch, _direct.Plan, "read", lambda: ours(version(2), place))
    into, before = like(version(0, False)), len(os.listdir("/proc/self/fd"))
    dcpd.load(str(place), into=into)
    same(into, version(2, False))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_files_that_are_written_to(at, place, monkeypatch):
    """PyTorch's writer saves over the checkpoint that is being read, in place."""
    pytorchs(version(1), place)
    once(monkeypatch, _direct._Thread, "unit", lambda: (time.sleep(0.02), pytorchs(version(2), place)), nth=3)
    into = {**like(version(0, False)), "step": 0}
    dcpd.load(str(place), into=into)
    assert into.pop("step") == 2
    same(into, version(2, False))


def test_a_save_that_fails_and_puts_all_back(at, place, monkeypatch):
    """The .metadata is the very file that was parsed; yet what was opened is not what belongs to it."""
    pytorchs(version(1), place)
    real, calls = _direct._Files._open, []

    def opens(self, i):
        calls.append(1)
        if len(calls) != 2:
            return real(self, i)
        time.sleep(0.02)
        file, away = place / self.names[i], place / "away"
        away.mkdir()
        (place / ".metadata").rename(away / ".metadata")
        file.rename(away / "file")
        file.write_bytes(bytes((away / "file").stat().st_size))
        fd = real(self, i)
        (away / "file").rename(file)
        (away / ".metadata").rename(place / ".metadata")
        away.rmdir()
        return fd

    monkeypatch.setattr(_direct._Files, "_open", opens)
    into = like(version(0, False))
    with direct(at) as seen:
        dcpd.load(str(place), into=into)
    same(into, version(1, False))
    assert seen.boxes == 4 and len(calls) == 8


def test_replaced_again_and_again(at, place, monkeypatch):
    """It ends, and says what it is."""
    pytorchs(version(1), place)
    n = [1]
    real = _direct._Thread.unit

    def unit(self, u):
        n[0] += 1
        time.sleep(0.02)
        pytorchs(version(n[0]), place)
        real(self, u)

    monkeypatch.setattr(_direct._Thread, "unit", unit)
    with pytest.raises(dcpd.errors.Busy, match="was replaced 3 times while it was loaded") as e:
        dcpd.load(str(place), into=like(version(0, False)))
    assert e.value.code == "checkpoint_replaced" and e.value.retryable and e.value.file in os.listdir(place)


def test_all_ranks_begin_again(ranks, d):
    ref = f"main:{lib.fresh()}"
    ranks(on_ranks.save_tensors, ref, FOUR)
    got = ranks(on_direct.one_that_fails, ref, FOUR, 2, "replaced")
    assert min(got) > 4, got


def test_many_jobs_and_no_files(at, place, monkeypatch):
    """Nothing is read here, and jobs bring it by groups: some old, some new, if nobody looked."""
    ours(version(1), place)
    monkeypatch.setattr(_into, "GROUP_MIN", 1)
    monkeypatch.setattr(_direct, "find", lambda *_: None)
    once(monkeypatch, _into._Run, "_finish", lambda: ours(version(2), place), True, 2)
    into = {**like(version(0, False)), "step": 0}
    with direct(at) as seen:
        dcpd.load(str(place), into=into)
    assert into.pop("step") == 2 and len(seen.jobs) > 4
    same(into, version(2, False))


def test_deleted_while_it_is_read(at, monkeypatch):
    """No other has come: what was open, or in a job, is all of it."""
    ref = f"main:{lib.fresh()}"
    dcpd.save(version(1), ref)
    once(monkeypatch, _ask.Ask, "wait", lambda: shutil.rmtree(at.storages["main"] / ref[5:]), True)
    into = {**like(version(0, False)), "step": 0}
    dcpd.load(ref, into=into)
    assert into.pop("step") == 1
    same(into, version(1, False))


def test_each_ranks_own_metadata(at, place):
    """No one file tells their versions apart: they are left to jobs, without a second question."""
    dcp.save(version(1), storage_writer=StorageWriter(place), no_dist=True, use_collectives=False)
    assert (place / "__0.metadata").exists() and not (place / ".metadata").exists()
    asked, into = [], {**like(version(0, False)), "step": 0}
    with direct(at) as seen, pytest.MonkeyPatch.context() as m:
        once(m, client.Checkpoints, "locate", lambda: asked.append(1), nth=1)
        once(m, client.Checkpoints, "locate", lambda: asked.append(2), nth=2)
        dcpd.load(str(place), into=into)
    assert into.pop("step") == 1 and (seen.boxes, len(seen.jobs)) == (0, 1) and asked == [1]
    same(into, version(1, False))


# ---- the drop-in ----


@pytest.mark.parametrize("when", ["planned", "found", "read"])
def test_the_reader(at, place, monkeypatch, when):
    """PyTorch has planned by the old metadata: there is nothing to begin again. An error, and the next load is whole."""
    pytorchs(version(1), place)
    thing, name = {"planned": (StorageReader, "read_data"), "found": (_direct, "find"), "read": (_direct.Plan, "read")}[when]
    into = {**like(version(0, False)), "step": 0}
    with monkeypatch.context() as m:
        once(m, thing, name, lambda: ours(version(2), place), when == "found")
        with pytest.raises((dcpd.errors.Busy, dcp.CheckpointException), match="was replaced while it was loaded"):
            dcp.load(into, storage_reader=StorageReader(place), no_dist=True)
    with direct(at) as seen:
        dcp.load(into, storage_reader=StorageReader(place), no_dist=True)
    assert into.pop("step") == 2 and seen.boxes == 4
    same(into, version(2, False))
