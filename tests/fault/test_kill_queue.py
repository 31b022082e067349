"""kill -9 of workers at random while a queue of saves keeps the lane full: no job hangs, whatever gang follows on which.

A gang that starts while the last one is being collected gets the descriptors of dead workers. If the end of one worker goes
unnoticed, its job waits for the stall deadline (10 minutes) and the save lane with it. So each job must end soon, by the events
alone: the coordinator's second look, which would heal such a loss, says in the log when it had to. In `make check` a few dozen
kills, in `make check-full` 5 seeds of 1,500. DCPD_SEED=N runs one seed.
"""
import collections
import os
import pathlib
import random
import signal
import threading
import time

import pytest

import dcpd as lib
from dcpd import FULL

KILLS = 1500 if FULL else 40
SEEDS = [int(os.environ["DCPD_SEED"])] if "DCPD_SEED" in os.environ else list(range(1, 6)) if FULL else [random.randrange(1 << 32)]
QUEUE, NAMES, RANKS, BYTES = 6, 16, 2, 1 << 20
HANGS_S = 30


class Killer(threading.Thread):
    """Kills a random worker again and again; `pause` is drawn anew for each kill, so that starts, runs and ends are all hit."""

    def __init__(self, d, rng):
        super().__init__(daemon=True)
        self.d, self.rng, self.kills, self.done = d, rng, 0, threading.Event()

    def run(self):
        while self.kills < KILLS and not self.done.wait(self.rng.expovariate(1 / self.rng.choice((0.005, 0.03, 0.1)))):
            alive = [p for p in self.d.workers() if lib.running(p)]
            try:
                if alive:
                    os.kill(self.rng.choice(alive), signal.SIGKILL)
                    self.kills += 1
            except ProcessLookupError:
                pass


def submit(d, name):
    """A look-up worker that dies while it looks at the target is an error of the request, which may be made again."""
    while True:
        a = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": "train"}, "target": {"storage": "main", "name": name},
                                    "options": {"overwrite": True}})
        if a.status == 202:
            return a.json["id"]
        assert a.problem("worker_lost")["retryable"]


def zombies(d):
    return [p for p in d.workers() if not lib.running(p)]


def fds(d):
    return len(os.listdir(f"/proc/{d.proc.pid}/fd"))


@pytest.mark.seconds(3600 if FULL else 120)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_save_of_a_queue_hangs(spawn, seed):
    rng = random.Random(seed)
    d = spawn(args=("--workers", "2", "--lease", "2h"))
    blob = os.urandom(BYTES)
    d.put("train", [lib.image({"w": ("U8", [BYTES], blob)},
                              {"tensors": {"w": {"fqn": "w", "global_shape": [RANKS * BYTES], "offsets": [r * BYTES]}}})
                    for r in range(RANKS)])
    d.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "first"})
    before = fds(d)
    queue, ends, made, killer = collections.deque(), collections.Counter(), 0, Killer(d, rng)
    killer.start()
    try:
        while killer.is_alive() or queue:
            while killer.is_alive() and len(queue) < QUEUE:
                queue.append(submit(d, f"k{made % NAMES}"))
                made += 1
            start = time.monotonic()
            while (job := d.api.get(f"/v1/jobs/{queue[0]}?wait=1s").ok(200))["state"] not in lib.TERMINAL:
                waited = time.monotonic() - start
                assert waited < HANGS_S * lib.PATIENCE, \
                    f"hangs after {killer.kills} kills, seed {seed}: {job}; zombies {zombies(d)}\n{d.tail(2000)}"
            queue.popleft()
            ends[job["state"]] += 1
            if job["state"] == "failed":
                assert job["error"]["code"] == "worker_lost", job["error"]
    finally:
        killer.done.set()
        killer.join()
    print(f"\n{killer.kills} kills, {made} saves ended {dict(ends)}, seed {seed}")
    assert killer.kills == KILLS and sum(ends.values()) == made
    d.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "last"})
    d.api.run("verify", source={"storage": "main", "name": "last"}, level="digest")
    lib.wait_for(lambda: not zombies(d), 10, "all workers collected")
    try:
        lib.wait_for(lambda: not d.leaks(), 10)
    except AssertionError:
        raise AssertionError(f"left behind: {d.leaks()}, seed {seed}\n{d.tail(6000)}") from None
    lib.wait_for(lambda: fds(d) <= before + 8, 40, f"{before} descriptors again, not {fds(d)}")
    told = [x for x in pathlib.Path(d.log).read_text(errors="replace").splitlines() if "no event told" in x]
    assert not told, told
