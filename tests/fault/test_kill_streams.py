"""kill -9 of the coordinator, of a worker, of both, or of the trainer, at random moments of saves that stream while ranks still fill.

Each job ends `succeeded`, or `failed` with a reason, within bounds; what can be seen equals the bytes that were sealed; nothing half is
there, nothing is left behind. DCPD_SEED=N repeats a run's moments.
"""
import collections
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import pytest

import dcpd as lib
from dcpd import FULL
from streaming import Filling, job, lost, submit
from test_kill_saves import strike

SAVES = 60 if FULL else 9
RANKS, MIB = 2, 1 << 20


def images(tag):
    return [lib.image({f"w{r}": ("U8", [16 * MIB], os.urandom(16 * MIB)), f"tag{r}": ("I64", [], tag.to_bytes(8, "little"))})
            for r in range(RANKS)]


class Trainer(threading.Thread):
    """One rank: fills in steps, seals, and does what a client does when the daemon is away for a while."""

    def __init__(self, d, rank, image, generation, pace):
        super().__init__()
        self.rank_of = Filling(d, "train", rank, image, generation)
        self.pace, self.error = pace, None

    def seal(self):
        f = self.rank_of
        for again in (True, False):
            a = f.seal()
            if a.status == 200 or not again:
                return a.ok(200)
            assert a.json["code"] in ("state_conflict", "draining"), a.json  # a reservation need not outlive the daemon
            s = f.d.reserve(f.sd, f.rank, f.mark_at + lib.PAGE, f.generation)
            f.file = lib.segment_file(s["segment"])
            f.put(0, f.image)

    def run(self):
        try:
            f = self.rank_of
            while f.done < len(f.image):
                f.upto(f.done + MIB)
                time.sleep(self.pace)
            end = time.monotonic() + 30 * lib.PATIENCE
            while True:
                try:
                    return self.seal()
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
        except BaseException as e:  # noqa: BLE001: told by the test
            self.error = e


def streams(d, j):
    state = job(d, j)
    return state["state"] in ("running", "committing", *lib.TERMINAL)


@pytest.mark.long
@pytest.mark.seconds(1200 if FULL else 150)
def test_kills_while_it_streams(spawn):
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    d = spawn()
    d.create("train", world=RANKS, lease_seconds=300)
    ends = collections.Counter()
    for i in range(SAVES):
        generation, who = i + 1, ("coordinator", "worker", "both")[i % 3]
        data = images(generation)
        ranks = [Trainer(d, r, data[r], generation, 0.01) for r in range(RANKS)]
        j = submit(d, "train", f"k{i}", generation)
        for t in ranks:
            t.start()
        lib.wait_for(lambda: streams(d, j), 30, "it streams", every=0.002)
        time.sleep(rng.uniform(0, 0.2))
        if strike(d, who, rng):
            d.start()
        for t in ranks:
            t.join()
            assert not t.error, f"seed {seed}, save {i}, {who}: {t.error!r}"
        end = d.api.wait(j, 30)
        ends[who, end["state"]] += 1
        if end["state"] == "failed":
            lib.check_problem(end["error"], "worker_lost")
            assert not (d.storages["main"] / f"k{i}").exists(), f"seed {seed}, save {i}"
        else:
            assert end["state"] == "succeeded", f"seed {seed}, save {i}: {end}"
            for r in range(RANKS):
                got = d.api.get(d.api.storage_path("main", f"k{i}", f"/tensors/w{r}?format=raw")).body
                assert got == lib.Image(data[r]).entries[f"w{r}"][2], f"seed {seed}, save {i}, rank {r}"
            d.api.run("verify", source={"storage": "main", "name": f"k{i}"}, level="digest")
        for r in range(RANKS):
            d.api.post(f"/v1/state-dicts/train/ranks/{r}:release", {"generation": generation}).ok(200, 204)
    assert ends["coordinator", "succeeded"] and ends["worker", "succeeded"], f"seed {seed}: {ends}"
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")
    d.drop("train")


CHILD = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import dcpd as lib
from streaming import Filling

class Place:
    api = lib.Client(sys.argv[2])
    reserve = lib.Daemon.reserve

image = lib.image({"w": ("U8", [64 << 20], bytes(64 << 20))})
f = Filling(Place(), "train", int(sys.argv[3]), image, int(sys.argv[4]))
print("filling", flush=True)
while f.done < len(image) // 2:
    f.upto(f.done + (1 << 20))
    time.sleep(0.005)
while True:
    f.post("renew")
    time.sleep(0.2)
"""


@pytest.mark.long
@pytest.mark.seconds(120)
def test_trainer_killed_while_it_fills(spawn):
    d = spawn()
    d.create("train", lease_seconds=2 * lib.PATIENCE, on_owner_death={"save": {"storage": "main", "name": "wish-{generation}"}})
    here = pathlib.Path(lib.__file__).parent
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(here), str(d.socket), "0", "7"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "filling\n"
        j = submit(d, "train", "never")
        lib.wait_for(lambda: job(d, j)["progress"]["bytes_done"] > 0, 20, "it streams")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    lost(d, j, "lease", rank=0)
    lib.wait_for(lambda: d.api.get("/v1/state-dicts/train").status == 404, 20, "the orphan is dropped")
    assert not (d.storages["main"] / "wish-7").exists()
    d.create("train")
    r = Filling(d, "train", 0, images(1)[0], 1)
    j = submit(d, "train", "next", 1)
    r.seal().ok(200)
    assert d.api.wait(j)["state"] == "succeeded"
    d.drop("train")
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")


@pytest.mark.long
def test_restart_and_the_trainer_never_seals(spawn):
    """The daemon forgets who was filling: the job waits for seals then, and fails when the leases are over."""
    d = spawn()
    d.create("train", world=RANKS, lease_seconds=2 * lib.PATIENCE)
    ranks = [Filling(d, "train", r, image) for r, image in enumerate(images(1))]
    j = submit(d, "train", "never")
    for r in ranks:
        r.upto(12 * MIB)
    lib.wait_for(lambda: job(d, j)["progress"]["bytes_done"] > 0, 20, "it streams")
    d.kill()
    d.start()
    lib.wait_for(lambda: job(d, j)["stage"] == "awaiting seals of ranks 0, 1", 20, "it waits")
    lib.wait_for(lambda: not d.staging(), 10, "no staging is left")
    assert not (d.storages["main"] / "never").exists()
    lost(d, j, "lease")
