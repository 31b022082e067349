"""The daemon with an allocator that fails: the request that meets it gets an error, or works; the daemon goes on.

For each kind of request: the first allocation that the daemon makes fails, then the second, and so on until the request needs no
more. After each of them the same request must work, at once, in the same process. Nothing is left out: libevent, libmicrohttpd,
jansson and SQLite use the same allocator (tests/fakes/libmemory.c). In `make check` every 97th of them, beginning anywhere; in
`make check-full` each. And all at once: many requests, while one allocation in so many fails. DCPD_SEED=N repeats a run.
"""
import collections
import contextlib
import http.client
import itertools
import json
import mmap
import os
import random
import struct
import threading
import time
import urllib.parse

import pytest

import dcpd as lib
from dcpd import FULL

STEP = int(os.environ.get("DCPD_STEP", 1 if FULL else 97))
LIBMEMORY = lib.ROOT / "build/test/fakes/libmemory.so"
CUT = (http.client.RemoteDisconnected, http.client.IncompleteRead, ConnectionError)
CODES = {"no_memory", "journal", "system"}
LIVE = ("queued", "planning", "running", "committing")


class Memory:
    """The file that the daemon's allocator shares with the test."""

    def __init__(self, path):
        path.write_bytes(bytes(8192))
        with open(path, "r+b") as f:
            self.map = mmap.mmap(f.fileno(), 8192)

    def set(self, left=0, odds=0):
        struct.pack_into("<QQ", self.map, 0, left, odds)

    def left(self):
        return struct.unpack_from("<Q", self.map, 0)[0]

    def failed(self):
        return struct.unpack_from("<Q", self.map, 24)[0]

    def trace(self):
        return self.map[64:].split(b"\0")[0].decode()


class Refused(Exception):
    """An answer, or the end of a job, that is an error."""

    def __init__(self, problem):
        super().__init__(f"{problem['code']}: {problem.get('detail')}")
        self.code = problem["code"]


def ok(answer):
    if answer.status >= 400:
        raise Refused(answer.problem())
    try:
        return json.loads(answer.body) if answer.body[:1] in (b"{", b"[") else answer.body
    except ValueError as e:
        raise AssertionError(f"{e}: {answer.body}") from None


class Requests:
    """One method, one kind of request. Each makes names of its own: a request that failed halfway may have left its own behind."""

    def __init__(self, d):
        self.d, self.api, self.left = d, d.api, []
        blob = bytes(range(256)) * 64
        d.put("train", [lib.image({"w": ("U8", [len(blob)], blob)},
                                  {"tensors": {"w": {"fqn": "w", "global_shape": [2 * len(blob)], "offsets": [r * len(blob)]}},
                                   "values": {"lr": {"json": 0.5}}}) for r in range(2)])
        d.api.run("save", source={"state_dict": "train"}, target=self.ref("base"))

    def ref(self, name):
        return {"storage": "main", "name": name}

    def name(self, prefix):
        self.left.append(lib.fresh(prefix))
        return self.left[-1]

    def get(self, path):
        return ok(self.api.get(path))

    def job(self, kind, **fields):
        j = self.end(ok(self.api.post("/v1/jobs", {"kind": kind, **fields}))["id"])
        if j["state"] == "failed":
            raise Refused(lib.check_problem(j["error"]))
        return j

    def end(self, job):
        """The job's record when it has ended. Questions about it that are refused are asked again."""
        end, j = time.monotonic() + 30 * lib.PATIENCE, {}
        while j.get("state") not in lib.TERMINAL:
            assert time.monotonic() < end, f"hangs: {job} {j}"
            with contextlib.suppress(Refused, *CUT):
                j = self.get(f"/v1/jobs/{job}?wait=2s")
        return j

    # ---- what is walked through
    def state_dict(self):
        sd = self.name("sd")
        ok(self.api.post("/v1/state-dicts", {"name": sd, "world_size": 2}))
        s = ok(self.api.post(f"/v1/state-dicts/{sd}/ranks/0:reserve", {"bytes": 5000, "generation": 1}))
        data = lib.image({"w": ("U8", [4], b"abcd")})
        lib.write_segment(s["segment"], data)
        ok(self.api.post(f"/v1/state-dicts/{sd}/ranks/0:seal", {"generation": 1, "image_bytes": len(data)}))
        ok(self.api.post(f"/v1/state-dicts/{sd}/ranks/0:renew"))
        ok(self.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": 1}))
        ok(self.api.delete(f"/v1/state-dicts/{sd}"))

    def look_at_state_dicts(self):
        self.get("/v1/state-dicts")
        self.get("/v1/state-dicts/train")
        self.get("/v1/state-dicts/train/tensors")

    def save(self):
        self.job("save", source={"state_dict": "train"}, target={**self.ref("again")}, options={"overwrite": True})

    def load(self):
        sd = self.name("load")
        self.job("load", source=self.ref("base"), target={"state_dict": sd, "world_size": 2})
        ok(self.api.delete(f"/v1/state-dicts/{sd}"))

    def reshard(self):
        self.job("reshard", source=self.ref("base"), target={**self.ref("two"), "world_size": 1}, options={"overwrite": True})

    def verify_and_diff(self):
        self.job("verify", source=self.ref("base"), level="digest")
        assert self.job("diff", a=self.ref("base"), b={"state_dict": "train"})["result"]["equal"]

    def gather(self):
        sd = self.name("gather")
        self.job("gather", source={"state_dict": "train"}, target={"state_dict": sd})
        ok(self.api.delete(f"/v1/state-dicts/{sd}"))

    def delete(self):
        name = self.name("gone")
        self.job("save", source={"state_dict": "train"}, target=self.ref(name))
        self.job("delete", target=self.ref(name))

    def dry_run(self):
        ok(self.api.post("/v1/jobs?dry_run=true", {"kind": "reshard", "source": self.ref("base"),
                                                   "target": {**self.ref("never"), "world_size": 1}}))

    def cancel_and_retry(self):
        name = self.name("late")
        ok(self.api.post("/v1/state-dicts", {"name": name, "world_size": 1}))
        source = {"state_dict": name, "generation": 1, "await_seal": True, "timeout_s": 1}
        j = ok(self.api.post("/v1/jobs", {"kind": "save", "source": source, "target": self.ref(name)}))["id"]
        ok(self.api.post(f"/v1/jobs/{j}:cancel"))
        assert self.end(j)["state"] == "cancelled"
        ok(self.api.post(f"/v1/jobs/{j}:retry"))
        ok(self.api.post(f"/v1/jobs/{j}:cancel"))

    def look_at_jobs(self):
        j = self.get("/v1/jobs?page_size=3&filter=" + urllib.parse.quote("kind=save AND state=succeeded"))["jobs"][0]["id"]
        self.get(f"/v1/jobs/{j}?wait=1s")
        self.get(f"/v1/jobs/{j}/plan")

    def look_at_checkpoints(self):
        self.get("/v1/checkpoints/main")
        where = self.d.api.storage_path("main", "base")
        self.get(where)
        self.get(where + "/tensors")
        assert len(self.get(where + "/tensors/w?slice=0:8&format=raw")) == 8
        self.get(where + "/files")

    def ad_hoc_storage(self):
        name = self.name("s").replace("-", "")
        ok(self.api.post("/v1/storages", {"name": name, "path": str(self.d.storages["main"]), "lease_seconds": 1}))
        self.get("/v1/storages")

    def look_at_the_daemon(self):
        for path in ("/readyz", "/metrics", "/v1/workers", "/v1/capabilities", "/openapi.yaml", "/"):
            self.get(path)


@pytest.fixture
def place(spawn, tmp_path):
    assert LIBMEMORY.exists(), "not built (make tools)"
    memory = Memory(tmp_path / "memory")
    d = spawn(args=("--workers", "2", "--lease", "2h", "--gang-idle", "2s"),
              env={"LD_PRELOAD": str(LIBMEMORY), "FAKE_MEMORY": str(tmp_path / "memory"), "FAKE_MEMORY_OF": "dcpd"})
    yield d, memory, Requests(d)
    memory.set()


def outcome(act):
    try:
        act()
        return "ok"
    except Refused as e:
        return e.code
    except CUT:
        return "cut"


def settle(d):
    """An answer that could not be given may have been about a job that runs: it ends like every other."""
    lib.wait_for(lambda: not any(d.api.get(f"/v1/jobs?filter=state%3D{s}").ok(200)["jobs"] for s in LIVE), 30, "all jobs ended")


def tidy_up(d, requests):
    """What requests that failed halfway have left, each of which is gone or can be removed."""
    for name in requests.left:
        d.api.delete(f"/v1/state-dicts/{name}")
    requests.left.clear()


WALKED = [n for n in vars(Requests) if not n.startswith("_") and n not in ("ref", "name", "get", "job", "end")]


@pytest.mark.seconds(3600 if FULL else 120)
@pytest.mark.parametrize("what", WALKED)
def test_each_allocation_that_fails(place, what):
    d, memory, requests = place
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    act, pid, seen = getattr(requests, what), d.proc.pid, collections.Counter()
    assert outcome(act) == "ok"
    for n in itertools.count(1 + seed % max(1, STEP // 8), STEP):  # the first one fires, however few there are
        memory.set(left=n)
        try:
            how = outcome(act)
        except AssertionError as e:
            raise AssertionError(f"allocation {n} of {what}, seed {seed}: {e}\nit failed at\n{memory.trace()}") from None
        fired, trace = memory.left() == 0, memory.trace()
        memory.set()
        settle(d)
        about = f"allocation {n} of {what}, seed {seed}, {how}; it failed at\n{trace}"
        assert d.alive() and d.proc.pid == pid, f"{about}\n{d.tail(1500)}"
        assert how in CODES | {"ok", "cut"}, about
        seen[how] += 1
        again = outcome(act)
        assert again == "ok", f"then {again}; {about}\n{d.tail(1500)}"
        tidy_up(d, requests)
        if not fired:
            break
    print(f"\n{what}: {sum(seen.values())} of {n} allocations: {dict(seen)}")
    assert sum(seen.values()) > 1 and seen["ok"]
    lib.wait_for(lambda: not d.leaks(), 20, f"nothing left behind: {d.leaks()}")


@pytest.mark.long
@pytest.mark.seconds(1200 if FULL else 120)
@pytest.mark.parametrize("odds", [30, *(pytest.param(n, marks=pytest.mark.long) for n in (1000, 100, 10))])
def test_many_requests_while_memory_is_short(place, odds):
    """An answer may get lost, or say that what was done before is in the way; but the daemon goes on, nothing is lost or left behind, and
    the next daemon finds all that this one knew."""
    d, memory, requests = place
    seed, pid = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32))), d.proc.pid
    until, seen = time.monotonic() + (60 if FULL else 2), collections.Counter()

    def client(n):
        rng = random.Random(f"{seed}.{n}")
        while time.monotonic() < until:
            with contextlib.suppress(AssertionError, TimeoutError):
                seen[outcome(getattr(requests, rng.choice(WALKED)))] += 1

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    memory.set(odds=odds)
    for t in threads:
        t.start()
    time.sleep(max(0, until - time.monotonic()))
    memory.set()
    for t in threads:
        t.join()
    print(f"\none in {odds}: {memory.failed()} allocations failed: {dict(seen)}, seed {seed}")
    assert d.alive() and d.proc.pid == pid, f"seed {seed}, it failed at\n{memory.trace()}\n{d.tail(2000)}"
    settle(d)
    for what in WALKED:
        again = outcome(getattr(requests, what))
        assert again == "ok", f"then {what}: {again}; seed {seed}\n{d.tail(2000)}"
    tidy_up(d, requests)
    lib.wait_for(lambda: not d.leaks(), 20, f"nothing left behind: {d.leaks()}, seed {seed}")
    known = {j["id"]: j["state"] for j in d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"]}
    d.kill()
    d.start()
    assert {j: d.api.get(f"/v1/jobs/{j}").ok(200)["state"] for j in known} == known, f"seed {seed}"
    assert "cannot be" not in d.since_start(), f"seed {seed}\n{d.since_start()}"
    requests.look_at_state_dicts()
    requests.save()
