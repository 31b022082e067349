"""Publications and subscribers through a real daemon: versions in their order, all ranks or none, only what has changed, and what becomes
of it all when publishers, subscribers or the daemon die. The package's side, with PyTorch as judge: tests/python/test_subscribe.py."""
import json
import struct
import time

import pytest

import dcpd as lib

HEIGHT, WIDTH = 8, 6
TP2 = [{"match": "w", "placements": ["Shard(1)"]}, {"match": "*", "placements": ["Replicate()"]}]


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def version(step, world=2, w=0.0, b=0.0):
    """Images of a publication: w cut by rows, b whole on every rank, a value."""
    each, out = HEIGHT // world, []
    for r in range(world):
        part = f32([w + r * each * WIDTH + i for i in range(each * WIDTH)])
        meta = {"tensors": {"w": {"global_shape": [HEIGHT, WIDTH], "offsets": [r * each, 0]}}, "values": {"step": {"json": step}}}
        out.append(lib.image({"w": ("F32", [each, WIDTH], part), "b": ("F32", [4], f32([b] * 4))}, meta))
    return out


def columns(rank, world=2, w=0.0):
    n = WIDTH // world
    return f32([w + i * WIDTH + rank * n + k for i in range(HEIGHT) for k in range(n)])


def publish(d, name, step, create=False, **more):
    if create:
        d.create(name, 2, publish={}, **more)
    put(d, name, version(step, w=more.get("w", float(step)), b=more.get("b", 0.0)), step)


def put(d, name, images, step):
    for rank, data in enumerate(images):
        lib.write_segment(reserve(d, name, rank, len(data), step)["segment"], data)
        d.seal(name, rank, step, len(data))


def reserve(d, name, rank, size, step):
    """Waits: the slot of the version before the newest is free when the journal says so."""
    return d.api.post(f"/v1/state-dicts/{name}/ranks/{rank}:reserve?wait=10s", {"bytes": size, "generation": step}).ok(200)


def subscribe(d, name, publication, world=2, layout=TP2, **more):
    return d.create(name, world, subscribe={"publication": publication, "layout": layout}, **more)


def record(d, name, after=None):
    """after: a newer generation is awaited, or the problem that it has; -1: any."""
    def look():
        r = d.api.get(f"/v1/state-dicts/{name}").ok(200)
        newest = -1 if r["generation"] is None else r["generation"]
        return (after is None or newest > after or "problem" in r.get("subscription", {})) and r

    return lib.wait_for(look, 20)


def take(d, name, generation, ranks=(0, 1)):
    for r in ranks:
        d.api.post(f"/v1/state-dicts/{name}/ranks/{r}:renew", {"taken": generation}).ok(200)


def arrives(d, name, after, generation):
    """The subscriber has the version, on all ranks, bit for bit."""
    rec = record(d, name, after)
    assert rec["generation"] == generation, rec
    for rank, image in enumerate(d.images(name, generation)):
        assert image.entries["w"][2] == columns(rank, len(rec["ranks"]), float(generation))
        assert image.values["step"] == {"json": generation}
    return rec


@pytest.fixture
def names():
    return lib.fresh("policy"), lib.fresh("serve")


def test_versions_arrive_in_another_layout_and_world(d, names):
    pub, sub = names
    one = lib.fresh("one")
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    subscribe(d, one, pub, 1, [])
    rec = arrives(d, sub, -1, 1)
    assert rec["subscribe"]["publication"] == pub and rec["subscription"]["published"] == 1 and rec["subscription"]["applied"] is None
    assert record(d, one, -1)["generation"] == 1 and d.images(one)[0].entries["w"][2] == columns(0, 1, 1.0)
    take(d, sub, 1)
    publish(d, pub, 4)
    rec = arrives(d, sub, 1, 4)
    s = rec["subscription"]
    assert s["changed_bytes"] == HEIGHT * WIDTH * 4 and s["kept_bytes"] == 2 * 16 and s["applied"] == 1 and s["lag_s"] > 0
    take(d, sub, 4)
    assert record(d, sub)["subscription"]["applied"] == 4 and record(d, sub)["subscription"]["lag_s"] == 0
    assert record(d, one)["generation"] == 1, "its rank has not taken version 1: it keeps it"
    take(d, one, 1, [0])
    assert record(d, one, 1)["generation"] == 4
    pubs = d.api.get(f"/v1/publications/{pub}").ok(200)
    assert {(s["name"], s["generation"]) for s in pubs["subscribers"]} == {(sub, 4), (one, 4)} and pubs["generation"] == 4
    assert pub in [p["name"] for p in d.api.get("/v1/publications").ok(200)["publications"]]
    lib.wait_for(lambda: [s["generation"] for r in record(d, pub)["ranks"] for s in r["slots"] if s["state"] == "sealed"] == [4, 4])


def test_only_what_has_changed_is_written(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    record(d, sub, -1)
    take(d, sub, 1)
    figures, before = [], 1
    for step, b in ((2, 0.0), (3, 7.0), (4, 7.0), (5, 0.0)):
        publish(d, pub, step, w=1.0, b=b)
        s = record(d, sub, before)["subscription"]
        figures.append((s["changed_bytes"], s["kept_bytes"]))
        for rank, image in enumerate(d.images(sub, step)):
            assert image.entries["w"][2] == columns(rank, 2, 1.0) and image.entries["b"][2] == f32([b] * 4)
            assert image.values["step"] == {"json": step}
        take(d, sub, step)
        before = step
    w, b = HEIGHT * WIDTH * 4, 2 * 16
    assert figures == [(0, w + b), (b, w), (0, w + b), (b, w)]


def test_slots_are_used_again(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    seen = set()
    for step in range(1, 7):
        if step > 1:
            publish(d, pub, step)
        rec = arrives(d, sub, step - 1, step)
        take(d, sub, step)
        seen |= {s["segment"] for r in rec["ranks"] for s in r["slots"]}
        lib.wait_for(lambda: all(sum(s["state"] == "sealed" for s in r["slots"]) == 1 for r in record(d, sub)["ranks"]))
    assert len(seen) == 4, "two segments for each of two ranks"


def test_what_a_subscriber_spoils_is_mended(d, names):
    """A piece is left as it is only if its bytes were read and have the source's digest."""
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    for step in (1, 2):
        if step > 1:
            publish(d, pub, step, w=1.0)
        record(d, sub, step - 1)
        take(d, sub, step)
    old = lib.wait_for(lambda: [s for s in record(d, sub)["ranks"][0]["slots"] if s["state"] == "free"])[0]
    with open(lib.segment_file(old["segment"]), "r+b") as f:
        f.seek(4096)
        f.write(b"\xff" * 8192)
    publish(d, pub, 3, w=1.0)
    rec = record(d, sub, 2)
    assert old["segment"] in [s["segment"] for s in rec["ranks"][0]["slots"] if s.get("generation") == 3]
    assert d.images(sub, 3)[0].entries["w"][2] == columns(0, 2, 1.0) and rec["subscription"]["changed_bytes"] == 0


def test_slow_subscriber_skips_and_late_one_begins_at_the_newest(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    record(d, sub, -1)
    for step in (2, 3, 5):
        publish(d, pub, step)
    assert record(d, sub)["generation"] == 1
    take(d, sub, 1, [0])
    assert record(d, sub)["generation"] == 1, "rank 1 has not taken it"
    take(d, sub, 1, [1])
    arrives(d, sub, 1, 5)
    late = lib.fresh("late")
    subscribe(d, late, pub)
    arrives(d, late, -1, 5)
    assert record(d, late)["subscription"]["updates"] == 1


def test_subscriber_waits_for_a_publication_that_is_not_there(d, names):
    pub, sub = names
    subscribe(d, sub, pub)
    assert record(d, sub)["generation"] is None
    publish(d, pub, 3, create=True)
    arrives(d, sub, -1, 3)


def test_versions_begin_at_0(d, names):
    pub, sub = names
    publish(d, pub, 0, create=True)
    subscribe(d, sub, pub)
    arrives(d, sub, -1, 0)
    take(d, sub, 0)
    publish(d, pub, 1)
    arrives(d, sub, 0, 1)


def test_half_a_version_is_none(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    record(d, sub, -1)
    take(d, sub, 1)
    data = version(2)[0]
    lib.write_segment(reserve(d, pub, 0, len(data), 2)["segment"], data)
    d.seal(pub, 0, 2, len(data))
    d.api.post(f"/v1/state-dicts/{sub}/ranks/0:renew?wait=300ms", {"taken": 1}).ok(200)
    assert record(d, sub)["generation"] == 1
    publish(d, pub, 3)
    arrives(d, sub, 1, 3)
    d.api.post(f"/v1/state-dicts/{pub}/ranks/1:reserve", {"bytes": 4096, "generation": 2}).problem("generation_stale", status=409)


def test_a_failed_update_leaves_the_version_that_was(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    record(d, sub, -1)
    take(d, sub, 1)
    bad = [lib.image({"w": ("F32", [HEIGHT, WIDTH], bytes(HEIGHT * WIDTH * 4))}),
           lib.image({"w": ("F32", [HEIGHT, WIDTH + 1], bytes(HEIGHT * (WIDTH + 1) * 4))})]
    put(d, pub, bad, 2)
    rec = record(d, sub, 1)
    assert rec["generation"] == 1 and rec["subscription"]["problem"]["code"] == "size_mismatch", rec
    arrives(d, sub, 0, 1)
    publish(d, pub, 3)
    rec = lib.wait_for(lambda: (r := record(d, sub))["generation"] == 3 and r)
    assert "problem" not in rec["subscription"]


def test_daemon_killed_and_started_again(spawn, names):
    d = spawn()
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    arrives(d, sub, -1, 1)
    take(d, sub, 1)
    d.kill()
    d.start()
    arrives(d, sub, -1, 1)
    publish(d, pub, 2)
    assert record(d, sub)["generation"] == 1, "this daemon does not know yet that its ranks have taken version 1"
    take(d, sub, 1)
    rec = arrives(d, sub, 1, 2)
    assert rec["subscription"]["kept_bytes"] == 2 * 16, "the tables lie in the segments"
    d.kill()
    d.start()
    take(d, sub, 2)
    publish(d, pub, 3)
    arrives(d, sub, 2, 3)


@pytest.mark.long
def test_a_dead_subscriber_is_dropped_and_the_publication_goes_on(spawn, names):
    d = spawn()
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub, lease_seconds=lib.PATIENCE, on_owner_death={"drop": True})
    record(d, sub, -1)
    lib.wait_for(lambda: d.api.get(f"/v1/state-dicts/{sub}").status == 404)
    assert d.api.get(f"/v1/publications/{pub}").ok(200)["subscribers"] == []
    publish(d, pub, 2)
    assert record(d, pub)["generation"] == 2


def test_workers_killed_during_an_update(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    arrives(d, sub, -1, 1)
    take(d, sub, 1)
    publish(d, pub, 2)
    d.kill_workers()
    lib.wait_for(lambda: record(d, sub)["generation"] == 2, 20)
    arrives(d, sub, 1, 2)


@pytest.mark.parametrize("more,code,pointer", [
    ({"publish": {}, "subscribe": {"publication": "x"}}, "validation_failed", "/subscribe"),
    ({"publish": {"readers": ["root"]}}, "validation_failed", "/publish/readers/0"),
    ({"publish": {"reader": [0]}}, "unknown_field", "/publish/reader"),
    ({"publish": {}, "slots": 1}, "validation_failed", None),
    ({"subscribe": {}}, "validation_failed", "/subscribe/publication"),
    ({"subscribe": {"publication": "a/b"}}, "name_invalid", "/subscribe/publication"),
    ({"subscribe": {"publication": "never"}, "name": "never"}, "validation_failed", "/subscribe/publication"),
    ({"subscribe": {"publication": "x", "layout": [{"match": "*", "placements": ["Cut(0)"]}]}}, "layout_invalid",
     "/subscribe/layout/0/placements/0"),
    ({"subscribe": {"publication": "x", "layout": [{"match": "*", "mesh": [3], "placements": ["R"]}]}}, "world_mismatch", None),
    ({"subscribe": {"publication": "x", "layout": {}}}, "validation_failed", "/subscribe/layout"),
    ({"subscribe": {"publication": "x", "dtype": {"*": "bfloat16"}}}, "validation_failed", "/subscribe/dtype"),
    ({"subscribe": {"publication": "x", "include": "w"}}, "validation_failed", "/subscribe/include"),
    ({"subscribe": {"publication": "x", "transform": []}}, "validation_failed", "/subscribe/transform"),
])
def test_refused(d, more, code, pointer):
    p = d.api.post("/v1/state-dicts", {"name": "never", "world_size": 2, **more}).problem(code, status=422)
    assert pointer is None or (p["pointer"] == pointer and p["detail"].startswith(f"{pointer}: ")), p


@pytest.mark.parametrize("rename, code", [([["(", "x"]], "validation_failed"), ([["^[wb]$", "one"]], "duplicate_key")])
def test_rules_that_cannot_be_carried_out_are_told_to_who_waits(d, names, rename, code):
    pub, sub = names
    publish(d, pub, 1, create=True)
    d.create(sub, 2, subscribe={"publication": pub, "rename": rename})
    problem = record(d, sub, -1)["subscription"]["problem"]
    assert problem["code"] == code and not problem["retryable"], problem


def test_refused_for_what_is_there(d, names):
    pub, sub = names
    publish(d, pub, 1, create=True)
    subscribe(d, sub, pub)
    record(d, sub, -1)
    renew = f"/v1/state-dicts/{sub}/ranks/0:renew"
    d.api.post(renew, {"taken": 9}).problem("not_sealed", status=409)
    d.api.post(renew, {"taken": -1}).problem("validation_failed", status=422)
    d.api.post(f"/v1/state-dicts/{pub}/ranks/0:renew", {"taken": 1}).problem("state_conflict", status=409)
    d.api.get(f"/v1/publications/{sub}").problem("not_found", status=404)
    d.api.post(f"/v1/state-dicts/{pub}/ranks/0:renew?wait=5s").problem("state_conflict", status=409)
    wish = {"kind": "redistribute", "source": {"state_dict": pub}, "target": {"state_dict": sub}}
    d.api.post("/v1/jobs", {**wish, "delta": True, "backend": "tcp"}).problem("validation_failed", status=422)
    d.api.post("/v1/jobs", {**wish, "include": ["w"]}).problem("validation_failed", status=422)
    for key, value in (("group", [0, 1]), ("device", "cuda")):
        p = d.api.post("/v1/jobs", {**wish, "delta": True, "include": ["w"], key: value}).problem("validation_failed", status=422)
        assert p["pointer"] == f"/{key}", p


def test_a_redistribute_with_rules_keeps_the_targets_world_size(d, names):
    pub, target = names
    publish(d, pub, 1, create=True)
    wish = {"source": {"state_dict": pub}, "delta": True, "include": ["w"], "layout": [{"match": "*", "placements": ["Replicate()"]}]}
    d.api.run("redistribute", **wish, target={"state_dict": target, "world_size": 3})
    publish(d, pub, 2)
    d.api.run("redistribute", **wish, target={"state_dict": target})
    assert [image.entries["w"][2] for image in d.images(target)] == [columns(0, 1, 2.0)] * 3
