"""Loads from shared memory after async saves: bit for bit what torch has, whatever becomes of the segments; and the files where they do."""
import os
import pathlib

import harness as lib
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lib_direct import always, direct, folder, like, same, tensors  # noqa: F401

import dcpd
from dcpd import _direct, _session
from dcpd.torch import StorageReader, StorageWriter, _lane

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SIZE = 800_000  # bytes of tensors()


def saved(sd):
    """Durable, and released: its slot keeps the bytes."""
    ref = f"main:{lib.fresh()}"
    dcpd.async_save(sd, ref).result(60)
    return ref


def segments():
    """Of this process's snapshots, those that were written to."""
    return [pathlib.Path("/dev/shm" + name) for s in _session.all_sessions() for name in s.mapped]


def test_the_tensors_come_from_memory(at):
    sd = tensors()
    ref = saved(sd)
    for f in folder(at, ref).glob("*.distcp"):
        with open(f, "r+b") as b:  # of the same length and other content: it is not looked at
            b.seek(5000)
            b.write(bytes(f.stat().st_size - 5000))
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert (seen.bytes, seen.memory, seen.jobs) == (SIZE, SIZE, [])


@pytest.mark.parametrize("verify", [True, False])
def test_a_snapshot_that_was_written_over_is_not_taken(at, verify):
    sd = tensors()
    ref = saved(sd)
    for f in segments():
        with open(f, "r+b") as b:
            b.seek(6000)
            b.write(b"the next step")
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into, verify=verify)
    same(into, sd)
    assert 0 < seen.memory < seen.bytes == SIZE and not seen.jobs


def test_the_next_steps_take_the_slots(at):
    sd = tensors()
    ref = saved(sd)
    for i in range(2):
        saved({k: t + i + 1 for k, t in sd.items()})
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert (seen.bytes, seen.memory) == (SIZE, 0)


def test_a_segment_is_cut_between_plan_and_copy(at, monkeypatch):
    sd = tensors()
    ref = saved(sd)
    real = _direct.Plan.read

    def read(self, *args, **kw):
        assert self.segments.fds and min(self.segments.fds) >= 0
        for f in segments():
            os.truncate(f, 8192)
        return real(self, *args, **kw)

    monkeypatch.setattr(_direct.Plan, "read", read)
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.memory < seen.bytes == SIZE
    dcpd.close()  # nobody may touch what was cut


def test_a_process_that_cannot_open_the_segments_reads_the_files(at, monkeypatch):
    sd = tensors()
    ref = saved(sd)
    monkeypatch.setattr(_direct.image, "SHM", "/nowhere")
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert (seen.bytes, seen.memory) == (SIZE, 0)


@pytest.mark.parametrize("name", ["/etc/passwd", "/dcpd-../x", "dcpd-0", "/dcpd-0/../../etc/passwd", 7, None])
def test_only_segments_are_opened(name):
    assert _direct._Segments([name]).fds == [-1]


def test_parts_and_other_cuts(at, always):
    w = torch.arange(300 * 500, dtype=torch.float32).reshape(300, 500)
    ref = saved({"w": w})
    with direct(at) as seen:
        out = dcpd.load(ref)
    assert torch.equal(out["w"], w)
    [job] = seen.jobs
    assert at.api.get(f"/v1/jobs/{job['id']}").ok(200)["result"]["bytes_from_memory"] == w.nbytes
    into = {"w": torch.zeros(300, 500).t().contiguous().t()}  # by columns: a job does it
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    assert torch.equal(into["w"], w)
    [job] = seen.jobs
    assert at.api.get(f"/v1/jobs/{job['id']}").ok(200)["result"]["bytes_from_memory"] == w.nbytes


def test_dropins_reader(at):
    sd = tensors()
    ref = saved(sd)
    into = like(sd)
    with direct(at) as seen:
        dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
    same(into, sd)
    assert seen.memory == SIZE


# ------------------------------------------------------------------------------------------------------- saves of the drop-in


def dropins(sd):
    ref = f"main:{lib.fresh()}"
    dcp.async_save(sd, storage_writer=StorageWriter(ref), no_dist=True).result(60)
    return ref


@pytest.mark.parametrize("by", ["drop-in", "dcpd"])
def test_async_saves_of_the_dropin(at, by):
    sd = {**tensors(), "columns": torch.arange(60_000, dtype=torch.bfloat16).reshape(300, 200).t()}
    ref = dropins({"model": sd, "lr": 0.1})
    into = {"model": like(sd), "lr": 0.0}
    into["model"]["columns"] = torch.zeros(200, 300, dtype=torch.bfloat16)
    with direct(at) as seen:
        if by == "dcpd":
            dcpd.load(ref, into=into)
        else:
            dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
    same(into["model"], sd)
    assert into["lr"] == 0.1 and seen.memory == seen.bytes == SIZE + 120_000
    ours, into = into, {"model": like(into["model"]), "lr": 0.0}
    dcp.load(into, storage_reader=dcp.FileSystemReader(folder(at, ref)), no_dist=True)
    same(ours["model"], into["model"])


def test_a_view_of_a_dropins_snapshot_has_its_tensors(at):
    sd = tensors()
    dropins(sd)
    lane = next(x for x in _lane._lanes if x.use == "data")
    with dcpd.attach(lane.name) as view:
        same(view, sd)


def test_a_dropins_snapshot_with_too_many_names_is_read_from_the_files(at, always, monkeypatch):
    sd = tensors(60, 100)
    monkeypatch.setattr(_lane, "head_for", lambda *_: _lane.HEAD)
    ref = dropins(sd)
    into = like(sd)
    with direct(at) as seen:
        dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
    same(into, sd)
    assert (seen.bytes, seen.memory) == (60 * 400, 0)


def test_the_next_snapshot_of_the_dropin_takes_the_lane(at):
    sd = tensors()
    ref = dropins(sd)
    for i in range(1, 6):  # its slot may be held for a moment more
        dropins({k: t + i for k, t in sd.items()})
        into = like(sd)
        with direct(at) as seen:
            dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
        same(into, sd)
        if not seen.memory:
            break
    assert (seen.bytes, seen.memory) == (SIZE, 0)


def test_ranks_async_saves_of_the_dropin(ranks, d):
    import on_ranks
    from test_ranks import FOUR

    for read, memory in ranks(on_ranks.dropin_from_memory, f"main:{lib.fresh()}", FOUR):
        assert read == memory > 0


def test_a_restarted_daemon_knows_the_dropins_snapshots(own):
    d = own()
    sd = tensors()
    ref = dropins(sd)
    d.kill()
    d.start()
    into = like(sd)
    with direct(d) as seen:
        dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
    same(into, sd)
    assert seen.memory == SIZE


# ------------------------------------------------------------------------------------------------------- the trainer dies

CRASH = """
import dcpd, os, signal, sys, torch
from dcpd.torch import StorageWriter
dcpd._session.LEASE_SECONDS = 1
sd = {f"w{i}": torch.arange(50_000, dtype=torch.float32) + 1000 * i for i in range(4)}
if sys.argv[2] == "dcpd":
    dcpd.async_save(sd, sys.argv[1]).result(60)
else:
    torch.distributed.checkpoint.async_save(sd, storage_writer=StorageWriter(sys.argv[1]), no_dist=True).result(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("by", ["dcpd", "drop-in"])
def test_resume_after_a_crash_costs_a_copy(d, at, script, by):
    ref = f"main:{lib.fresh()}"
    assert script(CRASH, ref, by, check=False).returncode == -9
    looked = lambda: [d.api.get(f"/v1/state-dicts/{n}") for n in lib.ours(d)]
    records = lambda: [a.ok(200) for a in looked() if a.status != 404]  # one may go between the list and the look
    lib.wait_for(lambda: all(r.get("orphaned_at") and s["state"] == "free" for r in records() for k in r["ranks"] for s in k["slots"]), 20,
                 "its owner is dead, and what is saved is nobody's")
    into = like(tensors())
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, tensors())
    assert (seen.bytes, seen.memory) == (SIZE, SIZE)
    d.drop(*lib.ours(d))
