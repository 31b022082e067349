"""Saves that are written while they are copied, and jobs that are made before the seals: what arrives is right bit for bit, no more
collectives are used than planned, and whatever breaks off leaves nothing. Steps are small here, so that small state dicts stream."""
import contextlib
import os
import signal
import threading
import time

import harness as lib
import numpy as np
import on_streaming
import pytest
import torch
import torch.distributed.checkpoint
from test_faults_ranks import load as load_ranks
from test_faults_ranks import mortal, one_dies, settled, started_again  # noqa: F401
from test_outline import check

import dcpd
from dcpd import _copy, _load, _ring, _tensors, image

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]
MIB = 1 << 20


@pytest.fixture
def own(spawn):
    return spawn()


def jobs(d, ref):
    name = ref.split(":")[1]
    return [j for j in d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"] if (j.get("target") or {}).get("name") == name]


def verified(d, ref):
    job = d.api.run("verify", source={"storage": "main", "name": ref.split(":")[1]}, level="digest")
    return job["result"]


def load(path, world):
    return load_ranks(path, world, 2 << 18)


# ---- the copy ----


def kinds():
    g = torch.Generator().manual_seed(1)
    few = {f"s{i}": torch.randn(i % 40 + 1, generator=g) for i in range(500)}
    yield "mixed", {**few, "big": torch.randn(1_000_003, generator=g), "t": torch.randn(900, 700, generator=g).t(),
                    "half": torch.randn(777_777, generator=g).to(torch.bfloat16), "z": torch.zeros(0), "n": np.arange(300_000.0),
                    "conj": torch.randn(500, 500, generator=g, dtype=torch.complex64).conj(), **{f"b{k}": v for k, v in few.items()}}
    yield "small", few
    yield "one", {"big": torch.randn(3_000_001, generator=g)}
    yield "other order", {"a": torch.randn(200_000, generator=g), "x": np.arange(100_000.0), "b": torch.randn(200_000, generator=g)}
    yield "beside", {"a": torch.randn(10_000, generator=g), "x": np.arange(5_000.0), "b": torch.randn(4_000, generator=g)}
    yield "nothing", {"z": torch.zeros(0, 3), "v": 1}


def segment(size):
    """A file in shared memory with pages that were never touched."""
    name = f"/dcpd-test-{os.getpid()}-{lib.fresh()}"
    with open("/dev/shm" + name, "wb") as f:
        f.truncate(size)
    return image.Segment(name)


@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.long), "3"])
@pytest.mark.parametrize("known", [True, False], ids=["outline", "none"])
@pytest.mark.parametrize("kind, sd", list(kinds()))
def test_what_is_told_is_there(monkeypatch, kind, sd, known, threads):
    """A reader that takes what it is told, and gives room for it a little later, gets the image whatever way the tensors go; and nothing
    is written over that it has not taken."""
    monkeypatch.setenv("DCPD_COPY_THREADS", threads)
    monkeypatch.setattr(_copy, "step", lambda: 100_000)
    if kind == "beside":
        monkeypatch.setattr(_tensors, "BIG", 30_000)  # all of it in one step, by two kinds of copies
    d = _tensors.describe(sd)
    d = d if known else d._replace(outline=None)
    layout = image.Layout(d.specs(), d.paths)
    header = layout.header({})
    size = len(header) + layout.data_bytes
    place = _ring.place(len(header))
    s = segment(place + _ring.LEAST + 4096)
    numbers = place + _ring.LEAST
    ring = _ring.Ring(s, place, _ring.LEAST)
    try:
        for _ in range(3):
            whole, late, real = bytearray(header), [], _ring.Ring.told
            ring.begin(len(header), lambda: pytest.fail("there is room"))

            def told(self, n):
                real(self, n)
                have = len(whole)
                assert have <= n <= size and n - (late[0] if late else 0) <= _ring.LEAST
                whole.extend(b"".join(taken(s, place, have, n)))
                late.append(n)
                if len(late) > 2:
                    s.map[numbers + 64:numbers + 72] = late.pop(0).to_bytes(8, "little")

            monkeypatch.setattr(_ring.Ring, "told", told)
            _tensors.copy_out(d, _tensors.Views(ring.buffer, len(header), layout, ring))
            monkeypatch.setattr(_ring.Ring, "told", real)
            assert len(whole) == size
            check(_load.tensors_of(bytes(whole), image.parse(bytes(whole))), {k: x for k, x in sd.items() if k != "v"})
    finally:
        os.unlink("/dev/shm" + s.name)


def taken(s, place, have, n):
    """Bytes [have, n) of an image that goes through a ring."""
    while have < n:
        at = have % _ring.LEAST
        part = min(n - have, _ring.LEAST - at)
        yield s.map[place + at:place + at + part]
        have += part


# ---- ranks ----


def test_what_ranks_gather(ranks):
    sizes = [[0, 0, 0, 0], [4000, 10, 0, 4000], [5000, 0, 1, 2], [3, 100_000, 4096, 4088]]
    assert ranks(on_streaming.gathers, sizes) == [[True] * 10] * 4


@pytest.mark.parametrize("how", ["save", "async"])
def test_two_rounds_and_one_job(ranks, d, how):
    """Two times everybody hears of everybody; and all ranks have the id of the one job that was made."""
    ref = f"main:{lib.fresh()}"
    got = ranks(on_streaming.counted, ref, how)
    assert len({g[0] for g in got}) == 1
    assert [j["id"] for j in jobs(d, ref + "-1")] == [got[0][0]]
    assert [g[1] for g in got] == [["star"] * 2] * 4


@pytest.mark.long
@pytest.mark.parametrize("world", [4, 1])
def test_bit_for_bit(ranks, d, world):
    """Structures that change from save to save, in two slots; PyTorch's reader judges."""
    ref = f"main:{lib.fresh()}"
    seeds = [0, 1, 2, 3]
    ids = ranks(on_streaming.save, 4, ref, seeds) if world == 4 else None
    if world == 1:
        with on_streaming.small_steps():
            for s in seeds:
                dcpd.save(dict(kinds())["mixed"], f"{ref}-{s}", client=dcpd.connect(f"unix://{d.socket}"))
        check((dcpd.load(ref + "-3", client=dcpd.connect(f"unix://{d.socket}"))), dict(kinds())["mixed"])
    else:
        assert all(i == ids[0] for i in ids)
        ranks(on_streaming.check, 4, str(d.storages["main"] / ref[5:]), seeds)
    for s in seeds:
        r = verified(d, f"{ref}-{s}")
        assert r["verified_bytes"] and r["unverifiable"] == 0, r


def test_written_while_it_is_copied(d, monkeypatch):
    """Before the last piece is there dcpd has written some of it; and nothing is visible before the seal."""
    c = dcpd.connect(f"unix://{d.socket}")
    ref, seen = f"main:{lib.fresh()}", []
    real = _ring.Ring.told
    n = 64 * MIB

    def told(self, have):
        real(self, have)
        if have > n * 3 // 4 and not seen:
            lib.wait_for(lambda: any((j.get("progress") or {}).get("bytes_done", 0) > 0 for j in jobs(d, ref)), 20, "bytes written")
            seen.append(not (d.storages["main"] / ref[5:]).exists())

    monkeypatch.setattr(_ring.Ring, "told", told)
    dcpd.save({f"w{i}": torch.full((n // 16,), float(i)) for i in range(4)}, ref, client=c)
    assert seen == [True]
    assert all(t.eq(int(k[1:])).all() for k, t in dcpd.load(ref, client=c).items())
    dcpd.close()


@pytest.mark.long
@pytest.mark.parametrize("how, where", [("async", "copy"), ("async", "seal"), ("async", "reserve"), ("save", "copy"), ("save", "seal"),
                                        ("save", "reserve"), ("save", "middle")])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_fails(ranks, d, how, where, victim):
    """All raise; the job is no more, nothing is visible, and the one slot is free for the next save to the same name."""
    ref = f"main:{lib.fresh()}"
    got = ranks(on_streaming.fails, ref, victim, where, how, 1, check=False)
    assert all("on purpose" in str(e) for e in got), got
    assert not (d.storages["main"] / ref[5:]).exists()
    assert all(j["state"] in ("cancelled", "failed") for j in jobs(d, ref)), jobs(d, ref)
    assert ranks(on_streaming.saves_in_one_slot, ref, 2, how) == ["succeeded"] * 4
    assert load(d.storages["main"] / ref[5:], 4) == 2


@pytest.mark.parametrize("how", ["async", "save"])
def test_a_daemon_of_before(ranks, d, how):
    """It is asked once, and then as it knows."""
    ref = f"main:{lib.fresh()}"
    got = ranks(on_streaming.old_daemon, ref, 5, how)
    assert [g[0] for g in got] == [["succeeded"] * 3] * 4
    later = ["ring"] if how == "save" else []
    assert [sorted(g[1]) for g in got] == [["await_seal", *later], later, later, later]
    assert load(d.storages["main"] / f"{ref[5:]}-2", 4) == 7


@pytest.mark.long
@pytest.mark.parametrize("how", ["async", "save"])
def test_the_daemon_is_restarted_in_the_copy(mortal, own, how):  # noqa: F811
    path, ref = own.storages["main"] / "a", "main:a"
    with started_again(own) as pid:
        assert mortal(on_streaming.kills_daemon, ref, 3, pid, how, seconds=60) == ["succeeded"] * 4
    assert load(path, 4) == 3
    assert mortal(on_streaming.saves, "main:b", 4, how) == ["succeeded"] * 4
    assert load(own.storages["main"] / "b", 4) == 4
    settled(own, mortal)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_is_killed_in_the_copy(mortal, own, victim):  # noqa: F811
    path, ref = own.storages["main"] / "a", "main:a"
    mortal(on_streaming.short_leases)
    assert mortal(on_streaming.saves, ref, 1) == ["succeeded"] * 4
    errors = one_dies(mortal, 4, victim, on_streaming.dies, ref, 2, victim)
    assert all(isinstance(e, dcpd.RankFailed) for e in errors), errors
    assert load(path, 4) == 1
    if victim == 3:
        assert mortal(on_streaming.saves, "main:b", 3, world=2) == ["succeeded"] * 2
    settled(own, mortal)
    assert load(path, 4) == 1


@pytest.mark.parametrize("in_thread", [False, True], ids=["signal", "raised"])
def test_interrupted_in_the_copy(at, in_thread):
    """One slot only; an interrupted save holds it no longer than it must."""
    def stop():
        lib.wait_for(lambda: jobs(at, ref), 10, "the save's job, which another thread asks for")
        if in_thread:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)

    for i in range(3):
        ref = f"main:{lib.fresh()}"
        with on_streaming.small_steps(), on_streaming.nth_told(5, stop), pytest.raises(KeyboardInterrupt):
            dcpd.save(on_streaming.plain_state(0, 1), ref, slots=1)
        with on_streaming.small_steps():
            dcpd.save(on_streaming.plain_state(0, 2 + i), ref + "-next", slots=1)
        assert load(at.storages["main"] / f"{ref[5:]}-next", 1) == 2 + i
        assert not (at.storages["main"] / ref[5:]).exists()
        (job,) = jobs(at, ref)
        assert job["state"] in ("cancelled", "failed")


# ---- rings ----


@pytest.mark.parametrize("ranks, size, short", [("", 64, 64), ("2", 64, 32), ("4", 32, 16), ("64", 16, 16)])
def test_ranks_of_a_host_share_the_memory(monkeypatch, ranks, size, short):
    """short: the size where little of /dev/shm is free."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(_ring, "_free", lambda: 900 * MIB)
    assert _ring.size_for(1 << 40) == short * MIB
    monkeypatch.setattr(_ring, "_free", lambda: 1024 * MIB)
    assert _ring.size_for(1 << 40) == size * MIB
    assert _ring.size_for(3 * MIB + 1) == 3 * MIB + 4096 and _ring.size_for(1) == _ring.LEAST


def test_shared_memory_for_one_ring(own):
    """However large the state dict is: what is in /dev/shm while it is saved, the first time and the second."""
    c = dcpd.connect(f"unix://{own.socket}")
    most, stop = [0], threading.Event()

    def watch():
        while not stop.wait(0.002):
            size = 0
            for path in lib.shm_files(own.proc.pid):  # other sets of tests fill the same file system
                with contextlib.suppress(OSError):
                    size += os.stat(path).st_blocks * 512
            most[0] = max(most[0], size)

    watcher = threading.Thread(target=watch)
    watcher.start()
    sd = {f"w{i}": torch.full((16 << 20,), float(i)) for i in range(5)}  # 320 MiB
    try:
        for i in range(2):
            dcpd.save(sd, f"main:{i}", client=c)
    finally:
        stop.set()
        watcher.join()
    used = c._t.request("GET", "/v1/state-dicts")["state_dicts"][0]["bytes"]
    dcpd.close()
    assert used < _ring.MOST + (2 << 20) and _ring.MOST <= most[0] < 2 * _ring.MOST + (4 << 20), (used, most)
    assert all(t.eq(int(k[1:])).all() for k, t in dcpd.load("main:1", client=c).items())


@pytest.mark.long
def test_a_smaller_ring_where_shared_memory_is_short(spawn):
    """As in a container with Docker's default of 64 MiB, of which dcpd takes 80 %."""
    d = spawn(args=("--shm-limit", "51MiB"))
    c = dcpd.connect(f"unix://{d.socket}")
    dcpd.save({f"w{i}": torch.full((8 << 20,), float(i)) for i in range(6)}, "main:a", client=c)
    used = c._t.request("GET", "/v1/state-dicts")["state_dicts"][0]["bytes"]
    dcpd.close()
    assert used < 51 << 20
    got = {f"w{i}": torch.zeros(8 << 20) for i in range(6)}
    torch.distributed.checkpoint.load(got, checkpoint_id=str(d.storages["main"] / "a"), no_dist=True)
    assert all(t.eq(int(k[1:])).all() for k, t in got.items())


@pytest.mark.long
@pytest.mark.parametrize("what", ["a worker", "all workers", "the daemon"])
def test_killed_while_it_goes_round(own, what):
    """The save begins anew, from the tensors."""
    def strike():
        if what == "the daemon":
            own.kill()
            own.start()
            return
        busy = [w["pid"] for w in own.api.get("/v1/workers").ok(200)["workers"] if w.get("job")]
        for pid in busy[-1:] if what == "a worker" else busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    c = dcpd.connect(f"unix://{own.socket}")
    with on_streaming.small_steps(), on_streaming.nth_told(60, strike):
        assert dcpd.save(on_streaming.plain_state(0, 3, 16), "main:a", client=c)["state"] == "succeeded"
    dcpd.close()
    assert load_ranks(own.storages["main"] / "a", 1, 16 << 18) == 3
    lib.wait_for(lambda: not own.staging(), 10, "nothing is left")
    broken = jobs(own, "main:a")
    assert len(broken) == 2 and broken[-1]["error"]["code"] in ("ring_lost", "not_sealed"), broken


def test_a_worker_is_killed_under_ranks(ranks, d):
    ref = f"main:{lib.fresh()}"
    assert ranks(on_streaming.kills_worker, ref, 5, d.workers()) == ["succeeded"] * 4
    assert load_ranks(d.storages["main"] / ref[5:], 4, 16 << 18) == 5


@pytest.mark.long
def test_a_trainer_that_stands_still(own, monkeypatch):
    """For longer than workers wait: it begins anew when it goes on."""
    c = dcpd.connect(f"unix://{own.socket}")
    with on_streaming.small_steps(), on_streaming.nth_told(60, lambda: time.sleep(14)):
        dcpd.save(on_streaming.plain_state(0, 4, 16), "main:a", client=c)
    dcpd.close()
    assert load_ranks(own.storages["main"] / "a", 1, 16 << 18) == 4


# ---- the drop-in, whose ranks each have their files written from the start ----


def saved_in_parts(d, name, at_least):
    """As many jobs wrote ranks' files."""
    found = [j for j in d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"] if (j.get("target") or {}).get("name") == name]
    parts = [j for j in found if (j["spec"].get("hosts") or {}).get("part") and j["state"] == "succeeded"]
    assert len(parts) >= at_least and all(j["spec"]["source"]["ring"] for j in parts), found


def test_the_drop_in_goes_through_rings(ranks, d):
    name = lib.fresh()
    path = str(d.storages["main"] / name)
    for seed in (1, 2):
        ranks(on_streaming.dropin, 4, path, seed)
        ranks(on_streaming.dropin_check, 4, path, seed)
    r = verified(d, f"main:{name}")
    assert r["verified_bytes"] and r["unverifiable"] == 0, r
    saved_in_parts(d, name, 8)
    lib.wait_for(lambda: not d.staging(), 10, "nothing is left")


@pytest.mark.long
def test_workers_are_killed_under_the_drop_in(ranks, d):
    name = lib.fresh()
    path = str(d.storages["main"] / name)
    ranks(on_streaming.dropin, 4, path, 3, d.workers())
    ranks(on_streaming.dropin_check, 4, path, 3)
    saved_in_parts(d, name, 4)


@pytest.mark.long
def test_a_rank_of_the_drop_in_fails(ranks, d):
    name = lib.fresh()
    path = str(d.storages["main"] / name)
    got = ranks(on_streaming.dropin, 4, path, 4, (), 1, check=False)
    assert all("on purpose" in str(e) for e in got), got
    assert not (d.storages["main"] / name).exists()
    ranks(on_streaming.dropin, 4, path, 5)
    ranks(on_streaming.dropin_check, 4, path, 5)
