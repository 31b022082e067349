"""Saves that are made before their generation is sealed: source.await_seal."""
import signal
import time

import pytest

import dcpd as lib

ONE = lib.image({"a": ("F32", [4], bytes(range(16)))}, {"values": {"step": {"json": 7}}})
TWO = [lib.image({f"a{rank}": ("F32", [4], bytes([rank] * 16))}) for rank in range(2)]


def save(sd, name=None, generation=7, await_seal=True, **source):
    return {"kind": "save", "source": {"state_dict": sd, "generation": generation, "await_seal": await_seal, **source},
            "target": {"storage": "main", "name": name or f"await/{lib.fresh()}"}}


def submit(d, sd, **more):
    headers = more.pop("headers", None)
    return d.api.post("/v1/jobs", save(sd, **more), headers=headers).ok(202)


def write(d, sd, rank, image, generation=7):
    s = d.reserve(sd, rank, len(image), generation)
    lib.write_segment(s["segment"], image)
    return s


def seal(d, sd, rank, image, generation=7):
    write(d, sd, rank, image, generation)
    d.seal(sd, rank, generation, len(image))


def rank_post(d, sd, rank, action, **body):
    return d.api.post(f"/v1/state-dicts/{sd}/ranks/{rank}:{action}", body)


def job(d, j):
    return d.api.get(f"/v1/jobs/{j['id']}").ok(200)


def queued(d, j, stage):
    now = job(d, j)
    assert (now["state"], now["stage"]) == ("queued", stage), now
    return now


def lost(d, j, *ranks_or_words, rank=None):
    """It fails at once, for what was said, and nothing is to be seen of it."""
    end = d.api.wait(j, 10)
    assert end["state"] == "failed", end
    p = lib.check_problem(end["error"], "not_sealed")
    assert all(w in p["detail"] for w in ranks_or_words), p
    assert rank is None or p["rank"] == rank, p
    assert not (d.storages["main"] / end["target"]["name"]).exists()


def test_made_before_the_seals(d):
    sd = lib.fresh()
    d.create(sd, world=4)
    images = [lib.image({f"a{rank}": ("F32", [4], bytes([rank] * 16))}) for rank in range(4)]
    seal(d, sd, 0, images[0])
    seal(d, sd, 2, images[2])
    j = submit(d, sd)
    assert j["state"] == "queued" and j["stage"] == "awaiting seals of ranks 1, 3", j
    assert j["milestones"]["snapshotted"] is None
    seal(d, sd, 3, images[3])
    queued(d, j, "awaiting seal of rank 1")
    seal(d, sd, 1, images[1])
    end = d.api.wait(j)
    assert end["state"] == "succeeded" and end["milestones"]["snapshotted"], end
    assert end["result"]["generation"] == 7
    for rank in range(4):
        where = d.api.storage_path("main", end["target"]["name"], f"/tensors/a{rank}?format=raw")
        assert d.api.get(where).body == bytes([rank] * 16)


def test_nothing_reserved_yet_and_all_sealed_already(d):
    sd = lib.fresh()
    d.create(sd, world=2)
    j = submit(d, sd)
    queued(d, j, "awaiting seals of ranks 0, 1")
    for rank in range(2):
        seal(d, sd, rank, TWO[rank])
    assert d.api.wait(j)["state"] == "succeeded"
    assert d.api.wait(submit(d, sd))["state"] == "succeeded", "sealed when it is asked for"


def test_an_idempotent_request_makes_one_job(d):
    sd = lib.fresh()
    d.create(sd)
    body, key = save(sd), {"Idempotency-Key": lib.fresh()}
    a, b = (d.api.post("/v1/jobs", body, headers=key).ok(202) for _ in range(2))
    assert a["id"] == b["id"]
    seal(d, sd, 0, ONE)
    assert d.api.wait(a)["state"] == "succeeded"


def test_holds_up_nobody(d):
    waiting, other = lib.fresh(), lib.fresh()
    d.create(waiting)
    first = [submit(d, waiting, generation=7) for _ in range(3)]
    d.put(other, [ONE])
    d.api.run("save", source={"state_dict": other}, target={"storage": "main", "name": f"await/{lib.fresh()}"})
    for j in first:
        queued(d, j, "awaiting seal of rank 0")
    seal(d, waiting, 0, ONE)
    assert [d.api.wait(j)["state"] for j in first] == ["succeeded"] * 3


def test_its_target_is_taken(d):
    sd, name = lib.fresh(), f"await/{lib.fresh()}"
    d.create(sd)
    j = submit(d, sd, name=name)
    d.api.post("/v1/jobs", save(sd, name=name)).problem("target_busy")
    d.api.post(f"/v1/jobs/{j['id']}:cancel").ok(202)
    assert d.api.wait(j)["state"] == "cancelled"


def test_cancel_while_it_waits(d):
    sd = lib.fresh()
    d.create(sd)
    write(d, sd, 0, ONE)
    j = submit(d, sd)
    assert d.api.post(f"/v1/jobs/{j['id']}:cancel").ok(202)["state"] == "cancelled"
    d.seal(sd, 0, 7, len(ONE))
    assert job(d, j)["state"] == "cancelled"
    again = d.api.post(f"/v1/jobs/{j['id']}:retry").ok(202)
    assert d.api.wait(again)["state"] == "succeeded", "it is sealed now"


def test_retry_awaits_again(d):
    sd = lib.fresh()
    d.create(sd)
    j = submit(d, sd)
    d.api.post(f"/v1/jobs/{j['id']}:cancel").ok(202)
    d.api.wait(j)
    d.api.post(f"/v1/jobs/{j['id']}:retry").ok(202)
    lib.wait_for(lambda: job(d, j)["stage"] == "awaiting seal of rank 0", 5, "waits again")
    seal(d, sd, 0, ONE)
    assert d.api.wait(j)["state"] == "succeeded"


@pytest.mark.parametrize("reason", [None, "w was changed \u2028 meanwhile"])
@pytest.mark.parametrize("sealed", [False, True])
def test_released(d, sealed, reason):
    sd = lib.fresh()
    d.create(sd, world=2)
    write(d, sd, 1, TWO[1])
    if sealed:
        d.seal(sd, 1, 7, len(TWO[1]))
    j = submit(d, sd)
    rank_post(d, sd, 1, "release", generation=6).ok(204)
    assert job(d, j)["state"] == "queued", "of another generation"
    for wrong in ("", "x" * 3000, 7):
        assert rank_post(d, sd, 1, "release", generation=7, reason=wrong).problem("validation_failed")["pointer"] == "/reason"
    rank_post(d, sd, 1, "release", generation=7, **({"reason": reason} if reason else {})).ok(204)
    lost(d, j, "rank 1", "generation 7", reason or "released", rank=1)


def test_given_up_before_it_was_reserved(d):
    sd = lib.fresh()
    d.create(sd, world=2)
    j = submit(d, sd)
    rank_post(d, sd, 0, "release", generation=7).ok(204)
    lost(d, j, "rank 0", rank=0)


@pytest.mark.parametrize("seals", [False, True])
def test_a_rank_goes_past_it(d, seals):
    sd = lib.fresh()
    d.create(sd, world=2)
    seal(d, sd, 0, TWO[0])
    write(d, sd, 1, TWO[1])
    j = submit(d, sd)
    seal(d, sd, 0, TWO[0], generation=8)
    assert job(d, j)["state"] == "queued", "rank 0 has sealed it, and may go on"
    write(d, sd, 1, TWO[1], generation=8)
    if seals:
        d.seal(sd, 1, 8, len(TWO[1]))
    lost(d, j, "rank 1", "generation 8", rank=1)
    d.api.post("/v1/jobs", save(sd)).problem("not_sealed", status=409)


def test_refused_at_once_when_it_cannot_come(d):
    sd = lib.fresh()
    d.create(sd, world=2)
    seal(d, sd, 0, TWO[0], generation=9)
    p = d.api.post("/v1/jobs", save(sd)).problem("not_sealed", status=409)
    assert p["rank"] == 0 and "generation 9" in p["detail"], p
    d.api.post("/v1/jobs", save(lib.fresh())).problem("not_found")


def test_state_dict_deleted(d):
    sd = lib.fresh()
    d.create(sd, world=2)
    seal(d, sd, 1, TWO[1])
    j = submit(d, sd)
    d.drop(sd)
    lost(d, j, "deleted", "rank 0", rank=0)


def test_timeout(d):
    sd = lib.fresh()
    d.create(sd, world=2)
    seal(d, sd, 0, TWO[0])
    j = submit(d, sd, timeout_s=1)
    lost(d, j, "rank 1", "1 s", rank=1)


def test_checked(d):
    sd = lib.fresh()
    d.put(sd, [ONE], generation=7)
    source = {"state_dict": sd, "await_seal": True}
    for bad in (source, {**source, "generation": 7, "timeout_s": 0}, {**source, "generation": -1}, {**source, "await_seal": "yes"},
                {"state_dict": sd, "timeout_s": 5}, {**source, "generation": 7, "parts": [{"state_dict": sd, "generation": 7}]}):
        d.api.post("/v1/jobs", {**save(sd), "source": bad}).problem("validation_failed", status=422)
    hosts = {"id": "abcdefgh", "ranks": [[0], [1]], "index": 0}
    d.api.post("/v1/jobs", {**save(sd), "hosts": hosts}).problem("validation_failed", status=422)
    d.api.post("/v1/jobs", {"kind": "load", "source": {"storage": "main", "name": "x", "await_seal": True},
                            "target": {"state_dict": "y"}}).problem("validation_failed", "unknown_field", status=422)
    assert d.api.post("/v1/jobs?dry_run=true", save(sd)).ok(200)["world_size"] == 1
    d.api.post("/v1/jobs?dry_run=true", save(sd, generation=8)).problem("not_sealed")
    assert d.api.wait(submit(d, sd, await_seal=False))["state"] == "succeeded"


@pytest.mark.long
def test_lease_of_a_rank_is_over(spawn):
    d = spawn()
    d.create("t", world=2, lease_seconds=lib.PATIENCE)
    seal(d, "t", 0, TWO[0])
    write(d, "t", 1, TWO[1])
    j = submit(d, "t")
    end = time.monotonic() + 60
    while job(d, j)["state"] == "queued" and time.monotonic() < end:
        rank_post(d, "t", 0, "renew")  # rank 0 lives
        time.sleep(0.3)
    lost(d, j, "rank 1", "lease", rank=1)
    d.api.post("/v1/jobs", save("t")).problem("not_sealed")


def test_trainer_dead_after_its_seals_is_saved_once(spawn):
    d = spawn()
    wish = {"save": {"storage": "main", "name": "by-wish-{generation}"}}
    d.create("t", world=2, lease_seconds=lib.PATIENCE, on_owner_death=wish)
    j = submit(d, "t", name="by-job")
    for rank in range(2):
        seal(d, "t", rank, TWO[rank])
    assert d.api.wait(j)["state"] == "succeeded"
    free = lambda: all(k["state"] == "free" for r in d.api.get("/v1/state-dicts/t").ok(200)["ranks"] for k in r["slots"])
    lib.wait_for(free, 20, "the orphan's slots are given back")
    assert (d.storages["main"] / "by-job").exists() and not (d.storages["main"] / "by-wish-7").exists()


@pytest.mark.long
def test_trainer_dead_before_its_last_seal(spawn):
    d = spawn()
    d.create("t", world=2, lease_seconds=lib.PATIENCE, on_owner_death={"save": {"storage": "main", "name": "by-wish-{generation}"}})
    seal(d, "t", 0, TWO[0])
    j = submit(d, "t")
    lost(d, j, "lease")
    lib.wait_for(lambda: d.api.get("/v1/state-dicts/t").status == 404, 20, "the orphan is dropped")
    assert not (d.storages["main"] / "by-wish-7").exists()


def kill_and_start(d):
    d.kill()
    d.start()


def test_restart_while_it_waits(spawn):
    d = spawn()
    d.create("t", world=2)
    seal(d, "t", 0, TWO[0])
    write(d, "t", 1, TWO[1])
    j = submit(d, "t")
    kill_and_start(d)
    queued(d, j, "awaiting seal of rank 1")
    if rank_post(d, "t", 1, "seal", generation=7, image_bytes=len(TWO[1])).status != 200:  # a reservation need not outlive it
        seal(d, "t", 1, TWO[1])
    assert d.api.wait(j)["state"] == "succeeded"


def test_restart_after_the_last_seal(spawn):
    d = spawn()
    d.create("t", world=2)
    jobs = [submit(d, "t", name=f"c{i}") for i in range(4)]
    for rank in range(2):
        seal(d, "t", rank, TWO[rank])
    kill_and_start(d)
    for j in jobs:
        assert d.api.wait(j)["state"] == "succeeded"
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")


@pytest.mark.long
def test_restart_and_the_trainer_is_gone(spawn):
    d = spawn()
    d.create("t", world=2, lease_seconds=lib.PATIENCE)
    seal(d, "t", 0, TWO[0])
    j = submit(d, "t")
    kill_and_start(d)
    lost(d, j, "lease")


def test_drain_keeps_it(spawn):
    d = spawn()
    d.create("t")
    j = submit(d, "t")
    d.proc.send_signal(signal.SIGTERM)
    d.proc.wait(60)
    d.start()
    queued(d, j, "awaiting seal of rank 0")
    seal(d, "t", 0, ONE)
    assert d.api.wait(j)["state"] == "succeeded"
