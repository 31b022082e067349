"""The wall clock jumps; nothing but records may go by it: leases, retention, ids, probes, durations.

Each test has a daemon for each jump, side by side: most of it is waiting.
"""
import calendar
import os
import re
import signal
import time

import pytest

import dcpd as lib
from host import WallClock
from test_jobs import big

F4 = ("F32", [4], bytes(range(16)))
DAY = 86400
STEPS = {"90 s": 90, "a day back": -DAY, "a year": 365 * DAY}
TICKS = 1.6  # seconds: leases are looked at twice in one


class Host:
    def __init__(self, spawn, file, name, args):
        self.name, self.seconds, self.clock = name, STEPS[name], WallClock(file)
        self.d = spawn(env=self.clock.env, args=args)

    def jump(self):
        self.clock.step(self.seconds)

    def slots(self, state):
        a = self.d.api.get("/v1/state-dicts/train")
        return [s for r in a.json["ranks"] for s in r["slots"] if s["state"] == state] if a.status == 200 else []

    def is_gone(self):
        return self.d.api.get("/v1/state-dicts/train").status == 404


@pytest.fixture
def hosts(spawn, tmp_path):
    return lambda *args: [Host(spawn, tmp_path / f"clock{i}", name, args) for i, name in enumerate(STEPS)]


def save(i):
    return {"source": {"state_dict": "train"}, "target": {"storage": "main", "name": f"c{i}"}}


def test_live_trainers_keep_what_they_hold(hosts):
    data = lib.image({"a": F4})
    all_hosts = hosts()
    for h in all_hosts:
        h.d.put("train", [data], generation=1, lease_seconds=20)
        lib.write_segment(h.d.reserve("train", 0, len(data), 2)["segment"], data)
        h.jump()
    time.sleep(TICKS)
    for h in all_hosts:
        assert h.slots("open") and h.slots("sealed"), f"{h.name}: the snapshot being filled, and the one before"
        h.d.seal("train", 0, 2, len(data))
        shown = h.d.api.post("/v1/state-dicts/train/ranks/0:renew").ok(200)["lease_expires_at"]
        ends = calendar.timegm(time.strptime(shown[:19], "%Y-%m-%dT%H:%M:%S"))
        assert abs(ends - (time.time() + h.seconds + 20)) < 15, f"{h.name}: the record is in the time that people see"


def test_leases_of_dead_trainers_end(hosts):
    data = lib.image({"a": F4})
    all_hosts = hosts("--keep-sealed", "2s")
    for h in all_hosts:
        h.d.put("train", [data], generation=1, lease_seconds=lib.PATIENCE)
        h.d.reserve("train", 0, len(data), 2)
        h.jump()
    for h in all_hosts:
        lib.wait_for(lambda h=h: not h.slots("open"), 5, f"{h.name}: the slot that it filled is given back")
    for h in all_hosts:
        lib.wait_for(h.is_gone, 6, f"{h.name}: what it had sealed is kept for its time, no longer")


@pytest.mark.long
def test_orphans_are_kept_for_their_time_over_a_restart(hosts):
    all_hosts = hosts("--keep-sealed", "6s")
    for h in all_hosts:
        h.d.put("train", [lib.image({"a": F4})], lease_seconds=lib.PATIENCE)
    for h in all_hosts:
        lib.wait_for(lambda h=h: h.d.api.get("/v1/state-dicts/train").ok(200).get("orphaned_at"), 10, "orphaned")
        h.d.kill()
        h.jump()
        h.d.start()
    time.sleep(TICKS)
    for h in all_hosts:
        assert h.slots("sealed"), h.name
    for h in all_hosts:
        lib.wait_for(h.is_gone, 10, f"{h.name}: dropped in the end")


@pytest.mark.long
def test_trainers_are_not_silent_while_the_daemon_cannot_hear_them(spawn):
    d = spawn()
    d.create("train", lease_seconds=5)
    segment = d.reserve("train", 0, 4096, 1)["segment"]
    d.proc.send_signal(signal.SIGSTOP)
    time.sleep(7)
    d.proc.send_signal(signal.SIGCONT)
    time.sleep(TICKS)
    assert lib.segment_file(segment).exists()


@pytest.mark.long
def test_jobs_that_are_frozen_with_the_daemon_have_not_stalled(spawn):
    """As `docker pause` does, or a virtual machine that is moved: nobody ran, so nobody was silent."""
    d = spawn(args=("--stall-after", "1s", "--stall-deadline", "3s"))
    sd = big(d, 128)
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "warm"})
    job = d.api.submit("save", source={"state_dict": sd}, target={"storage": "main", "name": "c"}, options={"retries": 0})
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{job['id']}").ok(200)["state"] == "running", 10, "running", every=0.002)
    pids = [d.proc.pid, *d.workers()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    end = d.api.wait(job)
    assert end["state"] == "succeeded", end["error"]


@pytest.mark.long
def test_adhoc_storages_keep_their_lease(hosts, tmp_path):
    all_hosts = hosts()
    names = lambda h: {s["name"] for s in h.d.api.get("/v1/storages").ok(200)["storages"]}  # noqa: E731
    for h in all_hosts:
        h.d.api.post("/v1/storages", {"name": "adhoc", "path": str(tmp_path), "lease_seconds": 6}).ok(200, 201)
        h.jump()
    time.sleep(2.5)  # they are looked at every 2 s
    for h in all_hosts:
        assert "adhoc" in names(h), h.name
    for h in all_hosts:
        lib.wait_for(lambda h=h: "adhoc" not in names(h), 10, f"{h.name}: its lease ends")


@pytest.mark.long
def test_storages_are_probed_again(hosts):
    all_hosts = hosts()
    shown = lambda h: h.d.api.get("/v1/storages").ok(200)["storages"][0]  # noqa: E731
    for h in all_hosts:
        h.d.stop()
        h.d.storages["main"].rmdir()
        h.d.start()
        lib.wait_for(lambda h=h: shown(h).get("probed_at"), 10, "probed")
        assert shown(h)["state"] != "ok"
        h.jump()
        h.d.storages["main"].mkdir()
    for h in all_hosts:
        lib.wait_for(lambda h=h: shown(h)["state"] == "ok", 5, f"{h.name}: seen to be there again")


def test_records_outlive_a_step(hosts):
    """Ended jobs are kept for 30 days and idempotency keys for two: not by this clock."""
    all_hosts, ids = hosts("--keep-jobs", "32/30d"), {}
    key = {"Idempotency-Key": "k"}
    for h in all_hosts:
        h.d.put("train", [lib.image({"a": F4})])
        first = h.d.api.submit("save", headers=key, **save(0))["id"]
        h.d.api.wait(first)
        h.jump()
        ids[h.name] = [first] + [h.d.api.run("save", **save(i))["id"] for i in (1, 2, 3)]  # above a 32nd of 32: pruned at once
    time.sleep(2.5)
    for h in all_hosts:
        assert [j["id"] for j in h.d.api.get("/v1/jobs").ok(200)["jobs"]] == ids[h.name][::-1], h.name
        assert h.d.api.submit("save", headers=key, **save(0))["id"] == ids[h.name][0], h.name


def test_ids_grow_over_a_restart(spawn, tmp_path):
    clock = WallClock(tmp_path / "clock")
    d, ids = spawn(env=clock.env), []
    d.put("train", [lib.image({"a": F4})])
    for i in range(3):
        d.stop()
        clock.step(-i * DAY)
        d.start()
        ids.append(d.api.run("save", **save(i))["id"])
    assert ids == sorted(ids)


def test_hosts_go_on_beating(hosts):
    """A host of a save by several that waits for its peers shows them that it lives."""
    places = []
    for h in (all_hosts := hosts()):
        h.d.put("train", [lib.image({"a": F4})])
        h.jump()
        together = {"id": lib.fresh() + "-12345678", "index": 0, "names": ["here", "there"], "ranks": [[0], [1]], "timeout_s": 4}
        h.d.api.submit("save", hosts=together, **save(0))
    for h in all_hosts:
        places.append(lib.wait_for(lambda h=h: next(h.d.storages["main"].glob(".dcpd-hosts-*/beat-0"), None), 10, "it waits"))
    first = [p.read_bytes() for p in places]
    for h, place, number in zip(all_hosts, places, first):
        lib.wait_for(lambda p=place, n=number: p.read_bytes() != n, 2, f"{h.name}: a beat")


def test_what_other_daemons_stage_is_not_old(hosts):
    """It was just written; a daemon that starts after a jump sees it to be a year old."""
    for h in hosts():
        main = h.d.storages["main"]
        theirs = [main / f".dcpd-{'0' * 26}-1/__0_0.distcp", main / "run/.dcpd-hosts-0123456789/beat-0"]
        for f in theirs:
            f.parent.mkdir(parents=True)
            f.write_bytes(b"x")
        h.d.stop()
        h.jump()
        h.d.start()
        h.d.put("train", [lib.image({"a": F4})])
        h.d.api.run("save", **save(0))  # behind the sweep
        assert all(f.exists() for f in theirs), h.name


def test_durations_are_not_the_wall_clocks(hosts):
    for h in hosts():
        job = h.d.api.submit("save", source={"state_dict": big(h.d, 48)}, target={"storage": "main", "name": "c"})
        h.jump()
        h.d.api.wait(job)
        text = h.d.api.get("/metrics").body.decode()
        for name in ("dcpd_save_lag_seconds_sum", 'dcpd_job_duration_seconds_sum{kind="save"}'):
            seconds = float(re.search(re.escape(name) + r" (\S+)", text).group(1))
            assert 0 <= seconds < 60, f"{h.name}: {name} is {seconds}"
