"""Saves that begin while their ranks still fill their segments: `:seal` with "filling", and source.await_seal."""
import os
import random
import struct
import threading
import time

import pytest

import dcpd as lib
from streaming import Filling, job, lost, runs, saved, submit

MIB = 1 << 20


def images(ranks=2, mib=12):
    """Large shards, a column-wise one, replicas, many small tensors, a value: all that a save cuts into blocks of its own kind."""
    out, same = [], os.urandom(300 << 10)
    rows = mib << 8
    for r in range(ranks):
        entries = {"big": ("U8", [rows, 4096], os.urandom(rows * 4096)), "columns": ("F32", [64, 2048], os.urandom(64 * 2048 * 4)),
                   "same": ("U8", [len(same)], same), f"odd{r}": ("U8", [1234567], os.urandom(1234567)),
                   **{f"s{r}.{i}": ("U8", [100 + i], os.urandom(100 + i)) for i in range(200)}}
        tensors = {"big": {"fqn": "big", "global_shape": [rows * ranks, 4096], "offsets": [rows * r, 0]},
                   "columns": {"fqn": "columns", "global_shape": [64, 2048 * ranks], "offsets": [0, 2048 * r]}}
        out.append(lib.image(entries, {"tensors": tensors, "values": {"step": {"json": 7}} if r == 0 else {}}))
    return out


@pytest.fixture(scope="module")
def two():
    return images()


def small(rank=0):
    return lib.image({f"w{rank}": ("U8", [3 * MIB], os.urandom(3 * MIB))})


def streaming(d, filled=0):
    """(image, its filler, the job that streams it): one rank, with so many bytes of its data there."""
    sd, image = lib.fresh(), small()
    d.create(sd)
    r = Filling(d, sd, 0, image)
    j = submit(d, sd)
    if filled:
        r.upto(r.head + filled)
    lib.wait_for(lambda: job(d, j)["state"] == "running", 20, "it streams")
    return image, r, j


def test_written_while_it_is_filled(d, two):
    sd = lib.fresh()
    d.create(sd, world=2)
    ranks = [Filling(d, sd, r, two[r]) for r in range(2)]
    slots = [s for s in d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"][1]["slots"] if s["state"] == "filling"]
    assert [(s["generation"], s["image_bytes"]) for s in slots] == [(7, len(two[1]))]
    j = submit(d, sd)
    assert j["milestones"]["snapshotted"] is None
    for r in ranks:
        r.upto(r.head + 9 * MIB)
    runs(d, j, 8 * MIB)
    now = job(d, j)
    assert now["progress"]["bytes_done"] <= sum(r.done for r in ranks), "no byte before it was there"
    assert now["milestones"]["snapshotted"] is None
    assert not (d.storages["main"] / j["target"]["name"]).exists()
    for r in ranks:
        r.seal().ok(200)
    end = saved(d, j, two)
    assert end["milestones"]["snapshotted"] and end["result"]["generation"] == 7


def test_not_visible_before_the_last_seal(d, two):
    sd = lib.fresh()
    d.create(sd, world=2)
    ranks = [Filling(d, sd, r, two[r]) for r in range(2)]
    j = submit(d, sd)
    for r in ranks:
        r.upto(len(r.image))
    lib.wait_for(lambda: job(d, j)["stage"] == "await_seal", 20, "all is written")
    ranks[0].seal().ok(200)
    time.sleep(0.2)
    now = job(d, j)
    assert (now["state"], now["stage"]) == ("running", "await_seal") and now["progress"]["bytes_done"] == now["progress"]["bytes_total"]
    assert not (d.storages["main"] / j["target"]["name"]).exists()
    ranks[1].seal().ok(200)
    saved(d, j, two)


@pytest.mark.parametrize("options", [{}, {"options": {"files_per_rank": 3}}, {"dtype": [["columns", "bfloat16"]]},
                                     {"include": ["s0.*", "big"]}, {"rename": [["^big$", "large"]]}])
def test_filled_at_random(d, two, options):
    sd, rng = lib.fresh(), random.Random(7)
    d.create(sd, world=2)
    ranks = [Filling(d, sd, r, two[r]) for r in range(2)]
    j = submit(d, sd, **options)
    while any(r.done < len(r.image) for r in ranks):
        r = rng.choice(ranks)
        r.upto(r.done + rng.choice((1, 4096, 100_000, 2 * MIB)) * rng.randint(1, 3))
    for r in ranks:
        r.seal().ok(200)
    saved(d, j, two)


def test_the_next_step_of_the_same_training(d):
    sd = lib.fresh()
    d.create(sd, world=2)
    reused = []
    for generation in range(1, 5):
        two = images(mib=4)
        ranks = [Filling(d, sd, r, two[r], generation) for r in range(2)] if generation != 2 else None
        if ranks is None:  # a sealed one between them has the same plan
            d.put(sd, two, generation, create=False)
            j = submit(d, sd, generation=generation)
        else:
            j = submit(d, sd, generation=generation)
            for r in ranks:
                r.upto(r.head + 5 * MIB)
            runs(d, j)
            for r in ranks:
                r.seal().ok(200)
        reused.append(saved(d, j, two)["result"]["plan_reused"])
        for r in range(2):
            d.api.post(f"/v1/state-dicts/{sd}/ranks/{r}:release", {"generation": generation}).ok(204)
    assert reused == [False, True, True, True]


def test_some_filling_some_sealed(d, two):
    sd = lib.fresh()
    d.create(sd, world=2)
    s = d.reserve(sd, 1, len(two[1]), 7)  # no room for the number, and none is needed
    lib.write_segment(s["segment"], two[1])
    d.seal(sd, 1, 7, len(two[1]))
    j = submit(d, sd)
    assert job(d, j)["stage"] == "awaiting seal of rank 0"
    r = Filling(d, sd, 0, two[0])
    runs(d, j)
    r.seal(fill=False).ok(200)  # it says that all is there, whatever the number is
    r.put(0, two[0])
    assert d.api.wait(j)["state"] == "succeeded"


def test_the_seal_counts_where_the_number_was_left_behind(d):
    image, r, j = streaming(d)
    r.put(r.head, image[r.head:])
    r.seal(fill=False).ok(200)
    saved(d, j, [image])


def test_refused(d):
    sd, image = lib.fresh(), small()
    d.create(sd)
    r = Filling(d, sd, 0, image, announce=False)
    assert r.announce().ok(200) == {"rank": 0, "generation": 7, "state": "filling"}
    r.announce().ok(200)  # once more
    r.post("seal", image_bytes=len(image) - 4096, filling=True).problem("state_conflict", status=409)
    r.post("seal", image_bytes=len(image) - 4096).problem("state_conflict", status=409)
    r.announce(on_owner_death={"drop": True}).problem("validation_failed", status=422)
    r.post("seal", image_bytes=len(image), filling=1).problem("validation_failed", status=422)
    d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd, "generation": 7},
                            "target": {"storage": "main", "name": lib.fresh()}}).problem("not_sealed", status=409)
    d.api.get(f"/v1/state-dicts/{sd}/tensors").problem("not_sealed")
    r.seal().ok(200)
    r.announce().problem("state_conflict", status=409)
    tight = d.reserve(sd, 0, 1 * MIB, 8)
    for n, code in ((tight["bytes"], "validation_failed"), (tight["bytes"] - 4096, None)):
        a = d.api.post(f"/v1/state-dicts/{sd}/ranks/0:seal", {"generation": 8, "image_bytes": n, "filling": True})
        assert a.ok(200) if code is None else "page behind it" in a.problem(code, status=422)["detail"]
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:seal", {"generation": 9, "image_bytes": 4096, "filling": True}).problem("state_conflict")


def give_up(d, sd, ranks, how):
    if how == "release":
        ranks[1].post("release").ok(204)
    elif how == "again":
        d.reserve(sd, 1, len(ranks[1].image), 7)
    elif how == "newer":
        d.reserve(sd, 1, len(ranks[1].image), 8)
    else:
        d.api.delete(f"/v1/state-dicts/{sd}").problem("state_dict_busy", status=409)


@pytest.mark.parametrize("how", ["release", "again", "newer", "delete"])
def test_lost_while_it_streams(d, two, how):
    sd = lib.fresh()
    d.create(sd, world=2)
    ranks = [Filling(d, sd, r, two[r]) for r in range(2)]
    j = submit(d, sd)
    for r in ranks:
        r.upto(len(r.image) // 2)
    runs(d, j)
    ranks[0].seal().ok(200)
    workers = d.workers()
    give_up(d, sd, ranks, how)
    lost(d, j, *{"newer": ["generation 8"], "delete": ["deleted"]}.get(how, ["rank 1"]), rank=1)
    assert set(workers) & set(d.workers()), "no worker is to blame"
    if how == "delete":
        d.drop(sd)
        assert not ranks[0].file.exists()
        return
    ranks[0].post("release").ok(204)
    slots = [s for r in d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"] for s in r["slots"]]
    assert not any(s["in_use_by"] for s in slots) and not any(s["state"] == "filling" for s in slots if how != "newer"), slots
    for r in range(2):
        Filling(d, sd, r, two[r], 9)
    again = submit(d, sd, generation=9)
    d.api.post(f"/v1/jobs/{again['id']}:cancel").ok(202)
    assert d.api.wait(again)["state"] == "cancelled"


def test_timeout(d):
    sd = lib.fresh()
    d.create(sd)
    r = Filling(d, sd, 0, small())
    j = submit(d, sd, source={"timeout_s": 1})
    r.upto(2 * MIB)
    lost(d, j, "1 s", rank=0)


@pytest.mark.parametrize("mark", ["beyond", "back", "huge"])
def test_a_number_that_lies(d, mark):
    image, r, j = streaming(d, MIB)
    time.sleep(0.3)
    r.mark({"beyond": len(image) + 1, "back": 5, "huge": 2**64 - 1}[mark])
    lost(d, j, "are said to be there", code="format_image", rank=0)


def test_segment_shrunk(d):
    _, r, j = streaming(d)
    os.truncate(r.file, 4096)
    lost(d, j, code="segment_shrunk", rank=0)


@pytest.mark.long
@pytest.mark.seconds(200)
def test_slow_ranks_give_the_workers_back(d):
    """A number that does not move keeps neither workers nor lane: the job waits for the seals as if nothing had been announced."""
    sd, image, other = lib.fresh(), small(), lib.fresh()
    d.create(sd, lease_seconds=300)
    r = Filling(d, sd, 0, image)
    j = submit(d, sd)
    r.upto(r.head + 100)
    lib.wait_for(lambda: job(d, j)["state"] == "running", 20, "it streams")
    d.put(other, [lib.image({"a": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": other}, target={"storage": "main", "name": f"stream/{lib.fresh()}"})  # in the same lane
    now = job(d, j)
    assert now["state"] == "queued" and now["stage"] in ("retry", "awaiting seal of rank 0"), now
    r.upto(len(image) // 2)
    time.sleep(1)
    assert job(d, j)["state"] == "queued", "it does not begin again before the seal"
    r.seal().ok(200)
    assert saved(d, j, [image])["attempt"] == 2


@pytest.mark.long
def test_waiting_costs_next_to_nothing(d):
    def cpu():
        return sum(sum(map(int, open(f"/proc/{p}/stat").read().rsplit(")", 1)[1].split()[11:13])) for p in d.workers())

    sd = lib.fresh()
    d.create(sd, world=8)
    ranks = [Filling(d, sd, r, small(r)) for r in range(8)]
    j = submit(d, sd)
    lib.wait_for(lambda: job(d, j)["state"] == "running", 20, "it streams")
    time.sleep(0.3)
    before, start = cpu(), time.monotonic()
    time.sleep(4)
    used, passed = (cpu() - before) / os.sysconf("SC_CLK_TCK"), time.monotonic() - start
    assert job(d, j)["state"] == "running"
    assert used < passed / 5, f"{used} s of CPU time in {passed} s of waiting"
    for r in ranks:
        r.seal().ok(200)
    assert d.api.wait(j)["state"] == "succeeded"


def test_cancel_while_it_streams(d, two):
    sd = lib.fresh()
    d.create(sd, world=2)
    ranks = [Filling(d, sd, r, two[r]) for r in range(2)]
    j = submit(d, sd)
    ranks[0].upto(8 * MIB)
    runs(d, j)
    d.api.post(f"/v1/jobs/{j['id']}:cancel").ok(202)
    assert d.api.wait(j, 15)["state"] == "cancelled"
    lib.wait_for(lambda: not d.staging(), 10, "no staging is left")
    for r in ranks:
        r.seal().ok(200)
    d.api.post(f"/v1/jobs/{j['id']}:retry").ok(202)
    saved(d, j, two)


def test_many_at_once(d):
    """Trainers side by side, each filling from a thread of its own: in one lane, yet all are saved."""
    names, failures = [lib.fresh() for _ in range(4)], []
    data = {n: small() for n in names}

    def train(n):
        try:
            d.create(n)
            r = Filling(d, n, 0, data[n])
            j = submit(d, n)
            while r.done < len(r.image):
                r.upto(r.done + 200_000)
                time.sleep(0.002)
            r.seal().ok(200)
            assert d.api.wait(j)["state"] == "succeeded"
            where = d.api.storage_path("main", j["target"]["name"], "/tensors/w0?format=raw")
            assert d.api.get(where).body == lib.Image(data[n]).entries["w0"][2]
        except BaseException as e:  # noqa: BLE001: told below
            failures.append(e)

    threads = [threading.Thread(target=train, args=(n,)) for n in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures


def test_header_that_is_wrong(d):
    sd = lib.fresh()
    d.create(sd)
    r = Filling(d, sd, 0, small())
    r.put(0, struct.pack("<Q", 1 << 40))
    lost(d, submit(d, sd), code="format_safetensors", rank=0)
