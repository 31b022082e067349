"""kill -9 and SIGSTOP of a worker at random moments of operations on state dicts, over each back end.

Each job ends soon: `succeeded`, with the target that an undisturbed job makes, or `failed` with a reason, and then the target is what it
was. Nothing is left behind, and the next job runs. In `make check` a few kills, in `make check-full` 100; DCPD_KILLS=N as many.
DCPD_SEED=N repeats a run's moments.
"""
import collections
import hashlib
import itertools
import os
import random
import signal
import time

import pytest

import dcpd as lib
from dcpd import FULL

KILLS = int(os.environ.get("DCPD_KILLS", 100 if FULL else 6))
RANKS, HEIGHT, WIDTH = 4, 1024, 4096  # 4 MiB of bytes a rank by rows
SHARD = {0: [{"match": "w", "mesh": [RANKS], "placements": ["Shard(0)"]}], 1: [{"match": "w", "mesh": [RANKS], "placements": ["Shard(1)"]}]}


def sharded(blob):
    each = HEIGHT // RANKS
    return [lib.image({"w": ("U8", [each * 4, WIDTH], blob[r]), "p": ("U8", [4096], bytes([r]) * 4096)},
                      {"tensors": {"w": {"fqn": "w", "global_shape": [HEIGHT * 4, WIDTH], "offsets": [r * each * 4, 0]}},
                       "values": {"lr": {"json": 0.5}}, "layout": SHARD[0]}) for r in range(RANKS)]


def plain(blob):
    return [lib.image({"w": ("U8", [HEIGHT * 4, WIDTH], b"".join(blob)), "p": ("U8", [4096], b"p" * 4096)},
                      {"values": {"lr": {"json": 0.25}}}) for _ in range(RANKS)]


def newest(d, name):
    """(generation, digest of all that its ranks have sealed last); None if there is no such state dict."""
    a = d.api.get(f"/v1/state-dicts/{name}")
    if a.status == 404:
        return None
    digest, generations = hashlib.blake2b(), set()
    for r in a.ok(200)["ranks"]:
        s = max((s for s in r["slots"] if s["state"] == "sealed"), key=lambda s: s["generation"])
        im = lib.read_segment(s["segment"], s["image_bytes"])
        generations.add(s["generation"])
        for k in sorted(im.entries):
            digest.update(repr((k, im.entries[k][:2])).encode() + im.entries[k][2])
        digest.update(repr(sorted(im.values.items())).encode())
    assert len(generations) == 1, f"{name}: one rank is ahead of another: {generations}"
    return generations.pop(), digest.hexdigest()


def used(d):
    return d.api.get("/v1/capabilities").ok(200)["shm"]["used_bytes"]


def workers_of(d, job):
    return [w for w in d.api.get("/v1/workers").ok(200)["workers"] if w.get("job") == job and w.get("pid")]


def jobs_of(n):
    """Each kind's fields, by the number of the job where that matters."""
    sd = lambda name: {"state_dict": name}  # noqa: E731
    return {
        "gather": {"source": sd("rows"), "target": sd(f"full{n % 2}"), "ranks_only": [[], [0, 2]][n % 2]},
        "offload": {"source": sd("rows"), "target": sd("off")},
        "copy": {"source": sd("rows"), "target": sd("twin")},
        "create": {"source": sd("rows"), "target": sd(f"new{n}")},
        "broadcast": {"source": sd("plain"), "target": sd(f"cast{n % RANKS}"), "root": n % RANKS},
        "distribute": {"source": sd("plain"), "target": sd("cut"), "layout": SHARD[1]},
        "redistribute": {"source": sd("rows"), "target": sd("columns"), "layout": SHARD[1]},
        "compare": {"a": sd("rows"), "b": sd("twin"), "values": True},
    }


@pytest.fixture
def ready(spawn):
    d = spawn(args=["--comm-deadline", "3s"])
    blob = [os.urandom(HEIGHT * WIDTH) for _ in range(RANKS)]
    d.put("rows", sharded(blob))
    d.put("plain", plain(blob))
    d.api.run("create", source={"state_dict": "rows"}, target={"state_dict": "twin"})
    return d


def undisturbed(d):
    """kind → (what its target has, seconds)."""
    out = {}
    for n in range(2):
        for kind, fields in jobs_of(n).items():
            start = time.monotonic()
            d.api.run(kind, **fields)
            seconds = time.monotonic() - start
            name = fields.get("target", {}).get("state_dict")
            out[kind, n % 2] = newest(d, name)[1] if name else None, seconds
            if kind == "create":
                d.drop(name)
    return out


def check_end(d, n, kind, fields, want, before, end):
    name = fields.get("target", {}).get("state_dict")
    now = newest(d, name) if name else None
    if end["state"] == "succeeded":
        if kind == "compare":
            assert end["result"]["equal"] is True
        else:
            assert now[1] == want, "the target is not what an undisturbed job makes"
            assert now[0] == end["result"]["generation"] == (before[0] + 1 if before else 1)
        if kind == "create":
            d.drop(name)
        return "succeeded"
    assert end["state"] == "failed", end
    p = lib.check_problem(end["error"], "worker_lost", "peer_lost", "peer_timeout")
    assert p.get("rank") is not None and p.get("detail"), p
    assert now == before, "the target of a job that failed was changed"
    return p["code"]


@pytest.mark.long
@pytest.mark.seconds(3600 if KILLS > 50 else 150)
def test_kills(ready):
    d = ready
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    struck, ends, slowest = collections.Counter(), collections.Counter(), 0
    want = undisturbed(d)
    for n in itertools.count():
        if n >= KILLS and (struck["shm"] + struck["tcp"] >= KILLS // 6 or n >= KILLS * 10):
            break  # on a busy machine a job has often ended before its worker is struck
        kind, fields = rng.choice(list(jobs_of(n).items()))
        backend, retries = rng.choice(["shm", "tcp"]), rng.choice([0, 0, 1])
        if kind == "compare" and newest(d, "twin")[1] != want["copy", 0][0]:
            continue
        name = fields.get("target", {}).get("state_dict")
        before, bytes_before = newest(d, name) if name else None, used(d)
        job = d.api.submit(kind, backend=backend, options={"retries": retries}, **fields)["id"]
        time.sleep(rng.uniform(0, want[kind, n % 2][1] * 1.2))
        try:
            there = workers_of(d, job)
            while not there and d.api.get(f"/v1/jobs/{job}").ok(200)["state"] not in lib.TERMINAL:
                there = workers_of(d, job)  # it still waits for workers: a busy machine
            if there:
                w = rng.choice(there)
                os.kill(w["pid"], signal.SIGKILL)
            struck[backend if there else "nobody"] += 1
            start = time.monotonic()
            end = d.api.wait(job, 30)
            slowest = max(slowest, time.monotonic() - start)
            ends[check_end(d, n, kind, fields, want[kind, n % 2][0], before, end)] += 1
            if end["state"] == "failed":
                lib.wait_for(lambda: used(d) <= bytes_before, 5, "what was made is dropped")  # what was there before may go meanwhile
            lib.wait_for(lambda: not d.leaks(), 10, f"nothing left behind: {d.leaks()}")
        except (AssertionError, ProcessLookupError) as e:
            raise AssertionError(f"job {n}, {kind} over {backend}, retries {retries}, seed {seed}: {e}\n{d.tail(1500)}") from None
    print(f"\nkilled: {dict(struck)}, ended {dict(ends)}, longest {slowest:.1f} s, seed {seed}")
    assert struck["shm"] + struck["tcp"] >= KILLS // 6
    for n in range(2):
        for kind, fields in jobs_of(n).items():
            assert d.api.run(kind, **fields)["state"] == "succeeded"


@pytest.mark.long
@pytest.mark.parametrize("leader, backend", [(False, "shm"), *(pytest.param(*p, marks=pytest.mark.long)
                                                                for p in ((True, "tcp"), (False, "tcp"), (True, "shm")))])
def test_stopped(ready, backend, leader):
    """A worker that is stopped is given up: its job fails, naming it, its gang is renewed, and the next one runs."""
    d = ready
    gather = {"source": {"state_dict": "rows"}, "target": {"state_dict": "full"}, "backend": backend}
    d.api.run("gather", **gather)
    before, bytes_before = newest(d, "full"), used(d)
    stopped = [w for w in d.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "gang" and (w["index"] == 0) is leader]
    assert stopped and all(w["state"] == "idle" for w in stopped), stopped
    for w in stopped:
        os.kill(w["pid"], signal.SIGSTOP)
    end = d.api.wait(d.api.submit("gather", options={"retries": 0}, **gather), 60)
    assert end["state"] == "failed", end
    p = lib.check_problem(end["error"], "peer_timeout")
    assert p["rank"] in {w["index"] for w in stopped}, p
    assert newest(d, "full") == before and used(d) == bytes_before
    assert d.api.run("gather", **gather)["state"] == "succeeded"
    for w in stopped:  # another gang's may be there still
        if lib.running(w["pid"]):
            os.kill(w["pid"], signal.SIGCONT)
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")
