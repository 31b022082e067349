"""kill -9 of the coordinator, of a worker, or of both, at random moments of many saves.

Each accepted job ends `succeeded` within 30 s of the restart, or `failed` with a reason; every checkpoint that can be seen passes
verify and equals the sealed bytes; an older one of the same name is whole; nothing is left behind. In `make check` a few saves, in
`make check-full` 200 with at least 60 kills while running and 20 while committing. DCPD_SEED=N repeats a run's moments.
"""
import collections
import contextlib
import os
import random
import signal
import time

import pytest

import dcpd as lib
from dcpd import FULL

SAVES = 200 if FULL else 12  # each who in each kind of moment
RANKS, MIB = 2, 16


def sealed(d):
    blob = os.urandom(MIB << 20)
    images = []
    for r in range(RANKS):
        meta = {"w": {"fqn": "w", "global_shape": [RANKS * 2, MIB << 19], "offsets": [2 * r, 0]}}
        images.append(lib.image({"w": ("U8", [2, MIB << 19], blob), "same": ("U8", [4096], blob[:4096])},
                                {"tensors": meta, "values": {"step": {"json": 7}}}))
    d.put("train", images)


def state(d, job):
    return d.api.get(f"/v1/jobs/{job}", timeout=10).ok(200)["state"]


def strike(d, who, rng):
    """Kills; True if the daemon needs a start."""
    workers = d.workers()
    if who in ("worker", "both") and workers:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(rng.choice(workers), signal.SIGKILL)
    if who in ("coordinator", "both"):
        d.kill()
        return True
    return False


def settle(d, job):
    """The job's end, within 30 s; what can be seen is right."""
    end = d.api.wait(job, 30)
    if end["state"] == "failed":
        lib.check_problem(end["error"])
        assert end["error"].get("detail"), end
    else:
        assert end["state"] == "succeeded", end
    return end


@pytest.mark.seconds(3600 if FULL else 150)
def test_kill_saves(spawn):
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    d = spawn()
    sealed(d)
    ref = {"storage": "main", "name": "old"}
    d.api.run("save", source={"state_dict": "train"}, target=ref)
    times = []
    for i in range(5):
        start = time.monotonic()
        d.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": f"warm{i}"})
        times.append(time.monotonic() - start)
    usual = sorted(times)[2]
    struck, ends = collections.Counter(), collections.Counter()
    for i in range(SAVES):
        who = ("coordinator", "worker", "both")[i % 3]
        overwrite = i % 4 == 3
        target = {"storage": "main", "name": "old" if overwrite else f"k{i}"}
        job = d.api.submit("save", source={"state_dict": "train"}, target=target, options={"overwrite": overwrite})["id"]
        if i % 5 == 4:  # committing is short: wait for it
            lib.wait_for(lambda: state(d, job) in ("committing", *lib.TERMINAL), 30, "committing", every=0.0005)
            time.sleep(rng.uniform(0, 0.01))
        else:
            time.sleep(rng.uniform(0, usual))
        struck[state(d, job)] += 1
        try:
            if strike(d, who, rng):
                d.start()
            end = settle(d, job)
            ends[end["state"]] += 1
            where = d.storages["main"] / target["name"]
            if end["state"] == "succeeded" or overwrite:
                assert where.is_dir(), "the older checkpoint is gone"
            if where.exists():
                d.api.run("verify", source=target, level="digest")
                diff = d.api.run("diff", a=target, b={"state_dict": "train"})["result"]
                assert diff["equal"] is True, diff
                if not overwrite:
                    d.api.run("delete", target=target)
            lib.wait_for(lambda: not d.staging(), 10, "staging swept")
            assert all(lib.segment_file(s["segment"]).exists()
                       for r in d.api.get("/v1/state-dicts/train").ok(200)["ranks"] for s in r["slots"] if s["state"] == "sealed")
        except AssertionError as e:
            raise AssertionError(f"save {i}, {who}, seed {seed}: {e}\n{d.tail(1500)}") from None
    print(f"\n{SAVES} saves, killed while {dict(struck)}, ended {dict(ends)}, seed {seed}")
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")
    if FULL:
        assert struck["running"] >= 60 and struck["committing"] >= 20, struck


@pytest.mark.long
@pytest.mark.seconds(120)
def test_kill_while_loading_and_resharding(spawn):
    """Loads leave no segment, reshards no folder, whoever dies."""
    rng = random.Random(5)
    d = spawn()
    sealed(d)
    source = {"storage": "main", "name": "src"}
    d.api.run("save", source={"state_dict": "train"}, target=source)
    for i in range(30 if FULL else 6):
        if i % 2:
            job = d.api.submit("load", source=source, target={"state_dict": f"l{i}", "world_size": 3})["id"]
        else:
            job = d.api.submit("reshard", source=source, target={"storage": "main", "name": f"r{i}", "world_size": 3})["id"]
        time.sleep(rng.uniform(0, 0.1))
        if strike(d, ("coordinator", "worker", "both")[i % 3], rng):
            d.start()
        end = settle(d, job)
        if i % 2 == 0 and end["state"] == "succeeded":
            d.api.run("verify", source={"storage": "main", "name": f"r{i}"}, level="digest")
        elif i % 2 == 0:
            assert not (d.storages["main"] / f"r{i}").exists()
        elif end["state"] == "succeeded":
            d.drop(f"l{i}")
        else:
            d.api.get(f"/v1/state-dicts/l{i}").problem("not_found")
        lib.wait_for(lambda: not d.leaks(), 10, f"nothing left behind after {i}: {d.leaks()}")
    d.api.run("verify", source=source, level="digest")
