"""Whole jobs on object storage that misbehaves: lost answers, resets, errors, flipped bytes, two writers, processes that are killed, keys
that may not write, servers that heed no condition."""
import itertools
import json
import os
import random
import threading
import time

import pytest
from crafted import Crafted
from s3_server import Fake, Proxy, Tool
from test_s3 import MB, big, loads, names, options, ref, saved, state

import dcpd as lib

HARMLESS = ("500", "slow", "cut", "lost", "short", "flip_up")  # a client that repeats gets over them


@pytest.fixture(scope="module")
def proxy(s3_server):
    with Proxy(s3_server.endpoint) as p:
        p.region = s3_server.region
        yield p


@pytest.fixture(autouse=True)
def calm(proxy):
    proxy.fault, proxy.done, proxy.late, proxy.clock, proxy.age = lambda *_: None, [], [], 0, 0
    yield
    proxy.fault, proxy.clock, proxy.age = lambda *_: None, 0, 0


@pytest.fixture(scope="module")
def place():
    return lib.fresh("faults")


def daemon(home, proxy, server, place, **more):
    home.mkdir(exist_ok=True)
    return lib.Daemon(home, {"main": home / "main", "s3": f"s3://{server.bucket}/{place}"}, options(proxy),
                      env={**server.environment(), **more})


@pytest.fixture(scope="module")
def d(tmp_path_factory, proxy, s3_server, place):
    d = daemon(tmp_path_factory.mktemp("s3faults"), proxy, s3_server, place)
    yield d
    d.discard()


@pytest.fixture(scope="module")
def s3(s3_server, place):
    with Tool(s3_server.endpoint, s3_server.bucket, f"{place}/", s3_server.environment()) as t:
        yield t


def problem(d, images, name, **more):
    """The error of a save, at once or in the end; None: it succeeded."""
    sd = lib.fresh()
    d.put(sd, images)
    answer = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": ref("s3", name), **more})
    job = d.api.wait(answer.json["id"]) if answer.status == 202 else {"error": answer.json, "state": "failed"}
    d.drop(sd)
    return None if job["state"] == "succeeded" else job["error"]


@pytest.mark.long
def test_a_bad_network_tears_nothing(d, proxy, s3):
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    print(f"DCPD_SEED={seed}")
    kinds = itertools.cycle(rng.sample(HARMLESS, len(HARMLESS)))
    proxy.fault = lambda *_: next(kinds) if rng.random() < 0.15 else None
    kept = {}
    for i in range(40 if lib.FULL else 4):
        name, images = saved(d, f"bad/{i}", size=rng.choice((3000, 9 * MB + 17, 20 * MB)))
        kept[name] = images
        if i % 3 == 2:
            gone = rng.choice(sorted(kept))
            d.api.run("delete", target=ref("s3", gone))
            del kept[gone]
    for name, images in kept.items():
        loads(d, name, images)
    assert sorted(names(d, prefix="bad/")) == sorted(kept)
    proxy.fault = lambda *_: None
    assert len({what for what, *_ in proxy.done}) >= 4, proxy.done
    assert {k.rsplit("/", 1)[0] for k in s3.keys("bad/")} == set(kept)
    lib.wait_for(lambda: s3.keys(".dcpd/") == [], 10, "marks of attempts gone")


@pytest.mark.long
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_whose_answer_is_lost_is_done_once(d, proxy, overwrite):
    name, images = f"lost/{lib.fresh()}", state()
    if overwrite:
        saved(d, name)
    lost = []

    def fault(verb, path, _):
        if verb == "PUT" and path.endswith(f"{name}/.metadata") and not lost:
            lost.append(path)
            return "lost"

    proxy.fault = fault
    saved(d, name, images=images, **({"options": {"overwrite": True}} if overwrite else {}))
    assert lost
    loads(d, name, images)


@pytest.fixture(scope="module")
def other(tmp_path_factory, s3_server, place):
    """A daemon whose network is whole."""
    other = daemon(tmp_path_factory.mktemp("s3other"), s3_server, s3_server, place)
    yield other
    other.discard()


def between(name, first, meanwhile):
    """The first try of a commit ends so; before the second, others act."""
    tries = []

    def fault(verb, path, _):
        if verb != "PUT" or not path.endswith(f"{name}/.metadata"):
            return None
        tries.append(path)
        if len(tries) == 2:
            meanwhile()
        return first if len(tries) == 1 else None

    return fault


@pytest.mark.long
def test_who_overwrites_a_commit_whose_answer_is_lost_stays(d, other, proxy):
    """The repeat neither counts as a writer of its own nor removes what came behind it."""
    name, _ = saved(other)
    images = state()
    proxy.fault = between(name, "lost", lambda: saved(other, name, images=images, options={"overwrite": True}))
    error = problem(d, state(), name, options={"overwrite": True})
    assert error and error["code"] == "state_conflict", error
    loads(other, name, images)


def test_who_removes_a_commit_whose_answer_is_lost_removes_it(d, other, proxy, s3):
    """The repeat puts the commit in its place again, where its data is no more."""
    name = f"gone/{lib.fresh()}"
    proxy.fault = between(name, "lost", lambda: other.api.run("delete", target=ref("s3", name)))
    error = problem(d, state(), name)
    assert error and error["code"] == "state_conflict", error
    assert s3.keys(f"{name}/") == [] and name not in names(d)


def test_a_commit_that_comes_late_has_its_data(d, proxy):
    """The first try reaches the server behind the last repeat, which was told of a conflict."""
    name, images = f"late/{lib.fresh()}", state()
    proxy.fault = lambda verb, path, _: ("conflict" if proxy.late else "late") if path.endswith(f"{name}/.metadata") and verb == "PUT" \
        else None
    error = problem(d, images, name)
    assert error and error["code"] == "state_conflict", error
    assert name not in names(d)
    assert b" 200 " in proxy.release()[0]
    loads(d, name, images)


def test_a_removal_that_is_in_doubt_goes_on(d, proxy, s3):
    """Its claim lies in the place of .metadata when all answers fail: who recovers finds it by the mark, and removes the rest."""
    name, _ = saved(d, f"doubt/{lib.fresh()}")
    seen = []

    def fault(verb, path, _):
        if seen and verb == "GET" and ".dcpd%2Fat" in path:
            seen.append("recovered")
        if path.endswith(f"{name}/.metadata") and (verb == "PUT" or seen) and "recovered" not in seen:
            seen.append(verb)
            return "lost" if len(seen) == 1 else "500"

    proxy.fault = fault
    job = d.api.submit("delete", target=ref("s3", name))["id"]
    assert d.api.wait(job)["state"] == "succeeded" and "recovered" in seen
    assert name not in names(d) and s3.keys(f"{name}/") == []
    proxy.fault = lambda *_: None
    saved(d, name)


@pytest.mark.parametrize("what, answer", [("save", "lost"), ("save", "killed"), ("overwrite", "lost"), ("delete", "lost"),
                                          ("delete", None)])
def test_an_outcome_that_nobody_can_look_up_is_told(d, proxy, s3, what, answer):
    """The decisive write is done, its answer is lost or its worker is killed behind it, or neither, and then the server refuses all, to
    whoever recovers, too: the error does not say that nothing has happened, and a sweep comes again until it could look. It removes no
    checkpoint."""
    name, sent, marks = f"doubt/{lib.fresh()}", [], set(s3.keys(".dcpd/"))
    if what != "save":
        saved(d, name)

    def fault(verb, path, _):
        if sent:
            if answer == "killed" and len(sent) == 1:
                sent.append("killed")
                d.kill_workers()
            return "skewed"
        if verb == "PUT" and path.endswith(f"{name}/.metadata"):
            sent.append(path)
            return "lost" if answer == "lost" else None
        return None

    proxy.fault = fault
    if what != "delete":
        images = state()
        error = problem(d, images, name, options={"overwrite": what == "overwrite"})
    else:
        error = d.api.wait(d.api.submit("delete", target=ref("s3", name))["id"])["error"]
    proxy.fault = lambda *_: None
    assert sent and error["code"] == "not_durable", error
    assert "is not known" in error["detail"] and "RequestTimeTooSkewed" in error["detail"], error
    if what != "delete":
        loads(d, name, images)
        lib.wait_for(lambda: set(s3.keys(".dcpd/at/")) <= marks, 30, "the sweep")
        loads(d, name, images)
    else:
        assert name not in names(d)
        lib.wait_for(lambda: s3.keys(f"{name}/") == [], 30, "the sweep")
        saved(d, name)


def test_a_refusal_by_which_nothing_happened_is_told_as_it_is(d, proxy):
    """The decisive write itself is refused, and whoever recovers can look."""
    name, _ = saved(d, f"doubt/{lib.fresh()}")
    proxy.fault = lambda verb, path, _: "denied" if verb == "PUT" and path.endswith(f"{name}/.metadata") else None
    error = d.api.wait(d.api.submit("delete", target=ref("s3", name))["id"])["error"]
    proxy.fault = lambda *_: None
    assert error["code"] == "forbidden" and name in names(d), error


def test_who_takes_a_commit_back_leaves_the_claim_of_another(d, proxy, s3, tmp_path):
    """A copy whose files cannot come takes back what it put there, and nothing else."""
    source, _ = saved(d, storage="main")
    name = f"taken/{lib.fresh()}"
    (tmp_path / "other").write_text("another's")

    def fault(verb, path, _):
        if verb == "PUT" and path.endswith(f"{name}/__0_0.distcp") and not s3.keys(f"{name}/__0"):
            s3.put(f"{name}/.metadata", tmp_path / "other", "", "dcpdclaim8000000001")
            s3.put(f"{name}/__0_0.distcp", tmp_path / "other", "", "dcpdat8000000001")

    proxy.fault = fault
    d.api.fails("replicate", "checkpoint_exists", source=ref("main", source), target=ref("s3", name))
    proxy.fault = lambda *_: None
    assert sorted(s3.keys(f"{name}/")) == [f"{name}/.metadata", f"{name}/__0_0.distcp"]


def test_of_two_formats_one_wins(d, other, proxy):
    """Their commits are objects of different names."""
    source, name, done = Crafted(d.storages["main"]), f"formats/{lib.fresh()}", []

    def fault(verb, path, _):
        if verb == "PUT" and "/.dcpd/at/" in path and not done:
            done.append(saved(other, name))

    proxy.fault = fault
    d.api.fails("reshard", "checkpoint_exists", source=source.ref, target={**ref("s3", name), "format": "safetensors"})
    loads(other, *done[0])


def test_flipped_bytes_are_found(d, proxy):
    name, images = saved(d, size=MB)
    sd = lib.fresh()
    d.put(sd, [lib.image({k: (t, shape, bytes(len(b))) for k, (t, shape, b) in lib.Image(i).entries.items()}) for i in images])
    proxy.fault = lambda verb, path, _: "flip_down" if verb == "GET" and ".distcp" in path and "?" not in path else None
    d.api.fails("load", "digest_mismatch", source=ref("s3", name), target={"state_dict": sd})
    assert proxy.done
    proxy.fault = lambda *_: None
    d.drop(sd)
    loads(d, name, images)


def test_of_two_writers_one_wins(d, proxy, s3_server, place, tmp_path):
    other = daemon(tmp_path / "other", proxy, s3_server, place)
    try:
        for _ in range(4):
            name, ends = f"race/{lib.fresh()}", {}

            def save(who, images):
                ends[who] = problem(who, images, name)

            both = {who: state(size=100_000) for who in (d, other)}
            threads = [threading.Thread(target=save, args=x) for x in both.items()]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            [winner] = [who for who, error in ends.items() if not error]
            [loser] = [error for error in ends.values() if error]
            assert loser["code"] in ("checkpoint_exists", "target_busy"), loser
            loads(d, name, both[winner])
    finally:
        other.discard()


@pytest.mark.long
def test_kills_leave_whole_checkpoints_or_none(d, proxy, s3):
    rng = random.Random(lib.fresh())
    for i in range(20 if lib.FULL else 2):
        name, images, sd = f"killed/{lib.fresh()}", state(9 * MB), lib.fresh()
        d.put(sd, images)
        proxy.fault = lambda verb, *_: 0.05 if verb == "PUT" else None  # time to strike
        job = d.api.submit("save", source={"state_dict": sd}, target=ref("s3", name))["id"]
        time.sleep(rng.uniform(0.02, 0.5))
        if i % 2:
            d.kill_workers()
        else:
            d.kill()
            d.start()
        proxy.fault = lambda *_: None
        end = d.api.wait(job, 60)
        if end["state"] == "succeeded":
            loads(d, name, images)
        else:
            assert end["error"]["code"] and name not in names(d), end
            assert f"{name}/.metadata" not in s3.keys(f"{name}/")
        d.drop(sd)

    def swept():
        keys = s3.keys("killed/")
        return all(k.rsplit("/", 1)[0] + "/.metadata" in keys for k in keys)

    lib.wait_for(swept, 20, "what was killed is swept")


def test_a_mark_that_cannot_be_read_ends_no_sweep(d, s3, tmp_path):
    """The first of all marks is no JSON: what a killed delete left behind it is swept all the same."""
    name, _ = saved(d)
    job = d.api.get("/v1/jobs?page_size=1").ok(200)["jobs"][0]["id"]
    first, left = ".dcpd/at/.dcpd-0-1", f".dcpd/at/.dcpd-{job}-7"
    (tmp_path / "first").write_text("hello")
    (tmp_path / "left").write_text(json.dumps({"dcpd": 1, "job": job, "staging": f"swept/.dcpd-{job}-7", "target": "swept/gone",
                                               "file": False, "removes": True, "dead": False}))
    d.kill()
    s3.put(first, tmp_path / "first")
    s3.put(left, tmp_path / "left")
    d.start()
    try:
        lib.wait_for(lambda: left not in s3.keys(".dcpd/"), 20, "the sweep")
        assert first in s3.keys(".dcpd/")
    finally:
        s3.delete(first)


def test_notes_that_cannot_be_read_end_no_sweep(d, s3, tmp_path):
    """Of two targets the first has such notes: both sweeps go on, and the notes stay."""
    (tmp_path / "notes").write_text("{")
    saved(d)
    notes = "swept/aaa/.dcpd-notes.json"
    job = d.api.get("/v1/jobs?page_size=1").ok(200)["jobs"][0]["id"]
    marks = []
    for number, target in ((7, "swept/aaa"), (8, "swept/bbb")):
        marks.append(f".dcpd/at/.dcpd-{job}-{number}")
        (tmp_path / "mark").write_text(json.dumps({"dcpd": 1, "job": job, "staging": f"swept/.dcpd-{job}-{number}", "target": target,
                                                   "file": False, "removes": True, "dead": False}))
        s3.put(marks[-1], tmp_path / "mark")
    s3.put(notes, tmp_path / "notes")
    d.kill()
    d.start()
    lib.wait_for(lambda: not set(marks) & set(s3.keys(".dcpd/")), 20, "the sweep")
    assert s3.keys("swept/aaa") == [notes] and "notes that cannot be read" in d.tail()
    s3.delete(notes)


@pytest.mark.long
def test_a_list_behind_a_commit_shows_it(d, other):
    """Of another daemon: lists and looks have what replaced a checkpoint at once, and what came and went."""
    name = f"fresh/{lib.fresh()}"
    for i in range(3):
        writer, reader = (d, other) if i % 2 else (other, d)
        _, images = saved(writer, name, size=3000 + 5000 * i, world=1 + i % 2, **({"options": {"overwrite": True}} if i else {}))
        for daemon in (reader, writer):
            [shown] = [c for c in daemon.api.get("/v1/checkpoints/s3?filter=name%3D" + name.replace("/", "%2F")).ok(200)["checkpoints"]
                       if c["name"] == name]
            job = writer.api.get("/v1/jobs?page_size=1").ok(200)["jobs"][0]["id"]
            record = daemon.api.get(daemon.api.storage_path("s3", name)).ok(200)
            assert (shown["world_size"], record["world_size"]) == (1 + i % 2, 1 + i % 2), (i, shown)
            assert shown["bytes"] == record["bytes"] and record["made_by"]["job"] == job, (i, shown, record)
        loads(reader, name, images)
    writer.api.run("delete", target=ref("s3", name))
    assert name not in names(reader) and reader.api.get(reader.api.storage_path("s3", name)).status == 404


def mark(d, number, **more):
    """The mark of an attempt of a job that is over: its key and its text."""
    job = d.api.get("/v1/jobs?page_size=1").ok(200)["jobs"][0]["id"]
    doc = {"dcpd": 1, "job": job, "staging": f"swept/.dcpd-{job}-{number}", "target": "swept/gone", "file": False, "removes": False,
           "dead": False, **more}
    return f".dcpd/at/.dcpd-{job}-{number}", json.dumps(doc)


@pytest.mark.long
def test_ages_are_by_the_servers_clock(d, proxy, s3, tmp_path):
    """Requests of an attempt that was given up a moment ago may be on their way, whatever this host takes the server's times for."""
    saved(d)
    (dead, text), (over, removal) = mark(d, 7, dead=True), mark(d, 8, removes=True)
    for key, content in ((dead, text), (over, removal)):
        (tmp_path / "mark").write_text(content)
        s3.put(key, tmp_path / "mark")
    proxy.clock = -3600
    d.kill()
    d.start()
    lib.wait_for(lambda: over not in s3.keys(".dcpd/"), 20, "the sweep")
    assert dead in s3.keys(".dcpd/")
    proxy.clock, proxy.age = 3600, 16 * 60
    d.kill()
    d.start()
    lib.wait_for(lambda: dead not in s3.keys(".dcpd/"), 20, "the sweep of what is old enough")


@pytest.mark.long
def test_what_a_commit_in_doubt_left_goes_by_itself(d, proxy, s3):
    """The job's own sweep comes again when no request of it can be on its way."""
    name, before = f"doubt/{lib.fresh()}", set(s3.keys(".dcpd/"))
    proxy.age = 15 * 60 - 6
    proxy.fault = lambda verb, path, _: ("conflict" if proxy.late else "late") if path.endswith(f"{name}/.metadata") and verb == "PUT" \
        else None
    error = problem(d, state(), name)
    assert error and error["code"] == "state_conflict", error
    assert len(s3.keys(f"{name}/")) >= 2
    lib.wait_for(lambda: not s3.keys(f"{name}/") and set(s3.keys(".dcpd/")) <= before, 30, "the sweeps")


@pytest.mark.long
@pytest.mark.parametrize("given", [False, True])
def test_an_overwrite_that_is_killed_leaves_nothing_of_the_old(d, proxy, s3, given):
    """Behind its commit, when it removes what it replaced: files with the number of an attempt, and those of given names."""
    name, images = saved(d)
    if given:
        local, name = f"killed/{lib.fresh()}", f"killed/{lib.fresh()}"
        source, images = saved(d, local, storage="main")
        assert d.ctl("cp", f"main:{source}", f"s3:{name}").returncode == 0
    before = set(s3.keys(".dcpd/"))
    old, struck, sd, images = {k for k in s3.keys(f"{name}/") if not k.endswith(".metadata")}, threading.Event(), lib.fresh(), state()

    def fault(verb, path, _):
        if verb == "POST" and "?delete" in path:
            struck.set()
            return "cut"

    d.put(sd, images)
    proxy.fault = fault
    job = d.api.submit("save", source={"state_dict": sd}, target=ref("s3", name), options={"overwrite": True})["id"]
    assert struck.wait(20)
    d.kill_workers()
    assert d.api.wait(job, 60)["state"] == "succeeded"
    d.drop(sd)
    lib.wait_for(lambda: not old & set(s3.keys(f"{name}/")), 20, "the old one's files gone")
    loads(d, name, images)
    assert len({k for k in s3.keys(f"{name}/") if not k.endswith("notes.json")}) == 4
    lib.wait_for(lambda: set(s3.keys(".dcpd/")) <= before, 10, "marks of attempts gone")
    assert d.ctl("hold", f"s3:{name}").returncode == 0
    assert d.ctl("unhold", f"s3:{name}").returncode == 0


# ---------------------------------------------------------------------------------------------------------------- what cannot work


def test_a_storage_that_heeds_no_condition_is_not_written_to(tmp_path):
    """Two commits could overwrite each other there: dcpd says so, and serves the other storages."""
    class Heedless(Fake):
        def usual(self, h):
            del h.headers["If-None-Match"], h.headers["If-Match"]
            super().usual(h)

    with Heedless() as heedless:
        d = lib.Daemon(tmp_path, {"main": tmp_path / "main", "s3": f"s3://{Fake.bucket}/x"}, [f"--s3=s3.endpoint={heedless.endpoint}"],
                       env={"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
        try:
            saved(d, storage="main")
            error = problem(d, state(), "x")
            assert "does not heed If-None-Match" in error["detail"], error
            shown = {s["name"]: s for s in d.api.get("/v1/storages").ok(200)["storages"]}
            assert shown["s3"]["state"] == "unavailable" and shown["main"]["state"] == "ok", shown
            assert "two commits could overwrite each other" in shown["s3"]["problem"]["detail"], shown
            assert not any(".metadata" in path for verb, path, _ in heedless.seen if verb == "PUT")
        finally:
            d.discard()


def test_keys_that_may_only_read(tmp_path, proxy, s3_server, place, d):
    name, images = saved(d)
    reader = daemon(tmp_path, proxy, s3_server, place, AWS_ACCESS_KEY_ID="AKIAREADER")
    try:
        loads(reader, name, images)
        error = problem(reader, images, lib.fresh())
        assert error["code"] == "forbidden" and "AccessDenied" in error["detail"], error
    finally:
        reader.discard()


@pytest.mark.long
def test_a_parent_that_is_replaced_while_it_is_shared(d, other, proxy):
    """The server's condition tells: what was to be copied is written, and nothing of the other checkpoint comes along."""
    run, seed, done = f"inc/{lib.fresh()}", lib.fresh(), []
    first, _ = saved(d, f"{run}/step-1", images=big(1, seed), options={"incremental": True})

    def fault(verb, path, _):
        if verb == "PUT" and f"{run}/step-2/__0_" in path and not done:
            done.append(path)
            saved(other, first, images=big(1, f"{seed} other"), options={"overwrite": True})

    proxy.fault = fault
    second, images = saved(d, f"{run}/step-2", images=big(1, seed, [(0, 1)]), options={"incremental": True})
    proxy.fault = lambda *_: None
    assert done
    loads(d, second, images)


@pytest.mark.long
def test_a_commit_of_an_incremental_save_is_tried_again(d, other, proxy):
    """One file's copy is refused, so that its bytes are sent, and another's commit comes first: the second try has all files."""
    run, seed, refused, commits = f"inc/{lib.fresh()}", lib.fresh(), [], []
    name, _ = saved(other, f"{run}/step-2")
    saved(d, f"{run}/step-1", images=big(1, seed), options={"incremental": True})

    def fault(verb, path, _):
        if verb == "PUT" and b"x-amz-copy-source" in proxy.head.lower() and not refused:
            refused.append(path)
            return "denied"
        if verb == "PUT" and path.endswith(f"{name}/.metadata"):
            commits.append(path)
            if len(commits) == 1:
                saved(other, name, options={"overwrite": True})

    proxy.fault = fault
    step = {"incremental": True, "parent": ref("s3", f"{run}/step-1"), "overwrite": True}
    _, images = saved(d, name, images=big(1, seed, [(0, 1)]), options=step)
    proxy.fault = lambda *_: None
    assert refused and len(commits) == 2
    loads(d, name, images)
    verified = d.api.run("verify", source=ref("s3", name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified


@pytest.mark.long
def test_copies_on_the_server_through_a_bad_network(d, proxy):
    run, seed, rng = f"inc/{lib.fresh()}", lib.fresh(), random.Random(lib.fresh())
    saved(d, f"{run}/step-0", images=big(1, seed), options={"incremental": True})
    proxy.fault = lambda *_: rng.choice(HARMLESS) if rng.random() < 0.2 else None
    for i in range(1, 4):
        name, images = saved(d, f"{run}/step-{i}", images=big(1, seed, [(0, i - 1)]), options={"incremental": True})
        loads(d, name, images)
