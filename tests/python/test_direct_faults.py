"""Loads that read the files themselves, when something goes wrong: damage, a checkpoint that is replaced, the disk, signals, time."""
import ctypes
import os
import shutil
import signal
import time

import harness as lib
import on_direct
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lib_direct import always, direct, folder, item, like, same, saved, tensors  # noqa: F401
from test_dropin_digests import flip
from test_ranks import FOUR, TWO

import dcpd
from dcpd import _direct, client

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# ---- damage ----


def error_of(ref, into, **kw):
    with pytest.raises(dcpd.DcpdError) as e:
        dcpd.load(ref, into=into, **kw)
    return e.value


def test_a_byte_that_has_changed(at, always, monkeypatch):
    sd = tensors(5, 1_500_000)  # two blocks each
    ref = saved(sd)
    file, begin = item(at, ref, "w3")
    flip(folder(at, ref) / file, begin + 4_500_000)
    for threads in ("1", "3"):
        monkeypatch.setenv("DCPD_COPY_THREADS", threads)
        e = error_of(ref, like(sd))
        assert isinstance(e, dcpd.CheckpointDamaged) and (e.code, e.fqn, e.file) == ("digest_mismatch", "w3", file)
        assert begin <= e.offset <= begin + 4_500_000 < e.offset + (4 << 20) and "are not those written: expected" in str(e)
    into = like(sd)
    dcpd.load(ref, into=into, verify=False)
    assert torch.equal(into["w2"], sd["w2"]) and (into["w3"] != sd["w3"]).sum() == 1
    monkeypatch.setenv("DCPD_DIRECT", "0")
    by_job = error_of(ref, like(sd))
    assert (type(by_job), by_job.code, by_job.fqn, by_job.file) == (type(e), e.code, e.fqn, e.file)


def test_damage_on_one_rank_is_everybodys(ranks, d):
    ref = f"main:{lib.fresh()}"
    ranks(on_ranks.save_tensors, ref, FOUR)
    client = dcpd.connect(f"unix://{d.socket}")
    boxes = [{"fqn": "m.rows", "dtype": "float32", "shape": [8, 3], "offsets": [6, 0], "sizes": [2, 3]}]
    told = client.checkpoints.locate(ref, boxes)
    file, begin = told["files"][0], told["reads"][0]["offset"]
    flip(folder(d, ref) / file, begin + 3)
    d.drop(*lib.ours(d))  # or it would be loaded from memory
    for specs, world in ((FOUR, 4), ({"rows": TWO["uneven"][:0] or ((8, 3), *TWO["uneven"][1:])}, 2)):
        got = ranks(on_direct.directly, on_ranks.load_tensors, ref, specs, world=world, check=False)
        for rank, e in enumerate(got):
            assert isinstance(e, dcpd.CheckpointDamaged), got
            assert (e.code, e.fqn, e.file, e.offset) == ("digest_mismatch", "m.rows", file, begin), (rank, e)


def test_one_rank_cannot_read(ranks, d):
    ref = f"main:{lib.fresh()}"
    ranks(on_ranks.save_tensors, ref, FOUR)
    got = ranks(on_direct.one_that_fails, ref, FOUR, 2, "read", check=False)
    assert all(isinstance(e, dcpd.errors.StorageFailed) for e in got), got
    assert ranks(on_direct.one_that_fails, ref, FOUR, 1, "other") == [0] * 4  # ranks that see two checkpoints read none of them
    mixed = ranks(on_direct.one_that_fails, ref, FOUR, 3, "none")
    assert mixed[3] == 0 and min(mixed[:3]) > 4


@pytest.mark.parametrize("how", ["truncated", "removed", "link", "directory gone"])
def test_what_is_wrong_before_is_said_by_a_job(at, always, monkeypatch, how):
    sd = tensors()
    ref = saved(sd)
    place = folder(at, ref)
    file = place / "__0_0.distcp"
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 700_000)
    elif how == "removed":
        file.unlink()
    elif how == "link":
        shutil.move(file, place / "other")
        file.symlink_to("other")
    else:
        shutil.rmtree(place)
    e = error_of(ref, like(sd))
    monkeypatch.setenv("DCPD_DIRECT", "0")
    by_job = error_of(ref, like(sd))
    assert (type(e), e.code, e.file, e.fqn) == (type(by_job), by_job.code, by_job.file, by_job.fqn) and e.code != ""


def test_a_file_that_ends_while_it_is_read(at, always, monkeypatch):
    sd = tensors()
    ref = saved(sd)
    file = folder(at, ref) / "__0_0.distcp"
    _, begin = item(at, ref, "w1")
    real = _direct.Plan.read

    def read(self, *args, **kw):
        os.truncate(file, begin + 100)
        return real(self, *args, **kw)

    monkeypatch.setattr(_direct.Plan, "read", read)
    e = error_of(ref, like(sd))
    assert isinstance(e, dcpd.CheckpointDamaged) and e.file == file.name and e.offset <= begin + 100 and e.fqn == "w1", e


def test_errors_of_the_disk(at, always, monkeypatch):
    sd = tensors()
    ref = saved(sd)
    real = _direct._Thread._pread

    def pread(self, fd, to, n, offset):
        ctypes.set_errno(5)
        return -1

    monkeypatch.setattr(_direct._Thread, "_pread", pread)
    e = error_of(ref, like(sd))
    assert isinstance(e, dcpd.errors.StorageFailed) and e.file == "__0_0.distcp" and e.fqn and "Input/output error" in str(e)

    calls = []

    def slow(self, fd, to, n, offset):  # a signal, and a byte at a time: as a pipe would
        calls.append(1)
        if len(calls) % 2:
            ctypes.set_errno(4)
            return -1
        return real(self, fd, to, max(1, n // 2), offset)

    monkeypatch.setattr(_direct._Thread, "_pread", slow)
    into = like(sd)
    dcpd.load(ref, into=into)
    same(into, sd)


@pytest.mark.parametrize("times", [1, 9])
def test_the_checkpoint_is_replaced_meanwhile(at, always, monkeypatch, times):
    """Between our look at the directory and the daemon's: once it is asked again, else a job loads it."""
    old, new = tensors(), {k: v + 1 for k, v in tensors().items()}
    ref = saved(old)
    left, real = [times], client.Checkpoints.locate

    def locate(self, *args):
        if left[0]:
            left[0] -= 1
            dcpd.save(new, ref, overwrite=True)
        return real(self, *args)

    monkeypatch.setattr(client.Checkpoints, "locate", locate)
    into = like(old)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, new)
    assert (seen.boxes, len(seen.jobs)) == ((4, 0) if times == 1 else (0, 1))


def test_replaced_after_it_was_opened(at, always, monkeypatch):
    """What was opened is read to its end, whatever has its name now."""
    old, new = tensors(), {k: v + 1 for k, v in tensors().items()}
    ref = saved(old)
    real = _direct.Plan.read

    def read(self, *args, **kw):
        dcpd.save(new, ref, overwrite=True)
        return real(self, *args, **kw)

    monkeypatch.setattr(_direct.Plan, "read", read)
    into = like(old)
    dcpd.load(ref, into=into)
    same(into, old)


WRONG = {
    "hole": lambda x: x["reads"].pop(1), "twice": lambda x: x["reads"].append(dict(x["reads"][0])),
    "beyond": lambda x: x["reads"][0].update(at=x["reads"][0]["at"] + 4), "negative": lambda x: x["reads"][0].update(at=-4),
    "long": lambda x: x["reads"][0].update(count=x["reads"][0]["bytes"] + 1), "no file": lambda x: x["reads"][0].update(file=7),
    "text": lambda x: x["reads"][0].update(offset="0"), "lists": lambda x: x.update(reads=None),
    "far": lambda x: x["reads"][0].update(offset=1 << 62),
    "up": lambda x: x["files"].__setitem__(0, "../x"), "root": lambda x: x["files"].__setitem__(0, "/etc/passwd"),
    "no box": lambda x: x["reads"][0].update(box=99), "id": lambda x: x.update(id="1:1"),
    "huge": lambda x: x["reads"][0].update(offset=1 << 80),
}


@pytest.mark.parametrize("what", WRONG)
def test_answers_that_are_wrong(at, always, monkeypatch, what):
    sd = tensors()
    ref = saved(sd)
    real = client.Checkpoints.locate

    def locate(self, *args):
        x = real(self, *args)
        WRONG[what](x)
        return x

    monkeypatch.setattr(client.Checkpoints, "locate", locate)
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.boxes < 4 and len(seen.jobs) == 1


def test_missing_keys_change_nothing(at, always):
    sd = tensors()
    ref = saved(sd)
    into = {**like(sd), "more": torch.zeros(3)}
    with pytest.raises(dcpd.MissingKey, match="more"):
        dcpd.load(ref, into=into)
    assert not any(t.any() for t in into.values())
    dcpd.load(ref, into=into, strict=False)
    assert not into.pop("more").any()
    same(into, sd)
    wrong = {**like(sd), "w1": torch.zeros(3)}
    with pytest.raises(dcpd.StateDictMismatch, match="w1"):
        dcpd.load(ref, into=wrong)
    assert not wrong["w0"].any()


# ---- signals, time, progress ----


def test_a_signal_while_it_is_read(at, always, monkeypatch):
    """KeyboardInterrupt is raised when no thread writes to the tensors any more."""
    monkeypatch.setenv("DCPD_COPY_THREADS", "3")
    sd = tensors(8, 3_000_000)
    ref, into = saved(sd), like(sd)
    real, calls, inside = _direct._Thread._pread, [], []

    def pread(self, fd, to, n, offset):
        calls.append(1)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        inside.append(1)
        try:
            end = time.monotonic() + 20
            while len(calls) >= 20 and not self.all.stopped and time.monotonic() < end:
                time.sleep(0.001)  # the main thread takes its time on a busy machine
            return real(self, fd, to, n, offset)
        finally:
            inside.pop()

    with monkeypatch.context() as m:
        m.setattr(_direct._Thread, "_pread", pread)
        with pytest.raises(KeyboardInterrupt):
            dcpd.load(ref, into=into)
        assert not inside
        n = len(calls)
        time.sleep(0.05)
    assert len(calls) == n < 30
    dcpd.load(ref, into=into)
    same(into, sd)


def test_the_timeout_holds(at, always, monkeypatch):
    sd = tensors(2, 1_000_000)
    ref = saved(sd)
    real = _direct._Thread._pread
    monkeypatch.setattr(_direct._Thread, "_pread", lambda self, *args: time.sleep(0.05) or real(self, *args))
    start = time.monotonic()
    with pytest.raises(dcpd.WaitTimeout, match="not loaded after 0.2 s"):
        dcpd.load(ref, into=like(sd), timeout=0.2)
    assert time.monotonic() - start < 5 * lib.PATIENCE


def test_progress(at, always, capfd):
    sd = tensors(2, 1_000_000)
    ref = saved({**sd, "v": 1})
    dcpd.load(ref, into={**like(sd), "v": 0}, progress=True)
    assert "8" in capfd.readouterr().err


def test_no_file_stays_open(at, always):
    sd = tensors()
    ref = saved(sd)
    dcpd.load(ref, into=like(sd))
    before = sorted(os.listdir("/proc/self/fd"))
    flipped = saved(sd)
    file, begin = item(at, flipped, "w0")
    for _ in range(3):
        dcpd.load(ref, into=like(sd))
        dcpd.load(ref, into=like(sd), verify=False)
    flip(folder(at, flipped) / file, begin)
    error_of(flipped, like(sd))
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_files_that_cannot_be_opened_are_closed_once(at, always, monkeypatch):
    """A descriptor that is closed twice may be somebody else's by then."""
    sd = tensors()
    ref, into = saved(sd), like(sd)
    closed, bad, real, real_open = [], [], os.close, os.open

    def close(fd):
        try:
            real(fd)
        except OSError:
            bad.append(fd)
            raise
        closed.append(fd)

    def opens(path, *args, **kw):
        if str(path).endswith(".distcp"):
            raise OSError(5, "Input/output error", path)
        return real_open(path, *args, **kw)

    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(os, "open", opens)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    monkeypatch.undo()
    same(into, sd)
    assert seen.boxes == 0 and closed and not bad


def test_more_files_than_may_be_open(at, always, monkeypatch):
    monkeypatch.setattr(_direct, "_OPEN_MAX", 1)
    name, sd = lib.fresh(), tensors(6)
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(str(at.storages["main"] / name), single_file_per_rank=False), no_dist=True)
    into, before = like(sd), len(os.listdir("/proc/self/fd"))
    with direct(at) as seen:
        dcpd.load(f"main:{name}", into=into)
    same(into, sd)
    assert seen.boxes == 6 and len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_question_in_parts(at, always, monkeypatch):
    monkeypatch.setattr(_direct, "_QUESTION", 500)
    sd = tensors(20, 100)
    ref, into = saved(sd), like(sd)
    asked, real = [], client.Checkpoints.locate
    monkeypatch.setattr(client.Checkpoints, "locate", lambda self, r, boxes, ok: asked.append(len(boxes)) or real(self, r, boxes, ok))
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.boxes == 20 and sum(asked) == 20 and len(asked) > 3
