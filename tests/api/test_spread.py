"""Loads by several nodes of a cluster: each byte is read once from the storage, and every node has the same, whoever dies or lies."""
import contextlib
import os
import signal

import pytest
from test_cluster import cluster, server  # noqa: F401
from test_s3 import options

import dcpd as lib

MIB = 1 << 20
NODES = ("a", "b", "c")


def parts(mib, world=2, names=("w",)):
    """Row-wise shards of the tensors, of random bytes, and the first of them whole."""
    rows = mib * MIB // world // 4096
    step = rows * 4096
    whole = {n: os.urandom(world * step) for n in names}
    images = [lib.image({n: ("U8", [rows, 4096], whole[n][r * step : (r + 1) * step]) for n in names},
                        {"tensors": {n: {"fqn": n, "global_shape": [world * rows, 4096], "offsets": [r * rows, 0]} for n in names},
                         "values": {"step": {"json": 7}}}) for r in range(world)]
    return whole[names[0]], images


def save(node, name, mib, **more):
    whole, images = parts(mib, **more)
    sd = lib.fresh()
    node.put(sd, images)
    node.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    node.drop(sd)  # a load would find its bytes in memory
    return whole


@pytest.fixture
def three(cluster):
    nodes = cluster(*NODES)
    for n in nodes:
        n.sees(**{name: "joined" for name in NODES})
    return nodes


def spread(node, name, sd, nodes=NODES, storage="main", **more):
    fields = {"timeout_s": 20, **more.pop("spread", {})}
    target = {"state_dict": sd, "world_size": 1, **more.pop("target", {})}
    return node.api.submit("load", source={"storage": storage, "name": name}, target=target, spread={"nodes": list(nodes), **fields},
                           **more)


def ends(nodes, job, seconds=60):
    """The job of each node, once it has ended: that of the first, and those that it has begun on the others."""
    def of(node):
        found = [j for j in node.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"]
                 if j["node"] == node.name and j["kind"] == "load" and job["id"] in (j["id"], j["spec"].get("spread", {}).get("id"))]
        return found and found[0]

    found = [lib.wait_for(lambda n=n: of(n), 20, f"{n.name} has the load") for n in nodes]
    return [n.api.wait(j, seconds) for n, j in zip(nodes, found)]


def warnings(job):
    return [w["detail"] for w in job["result"].get("warnings", []) if w["code"] == "spread_broken"]


def holds(node, sd, whole):
    (image,) = node.images(sd)
    assert image.entries["w"][2] == whole, f"{node.name} has other bytes"


def payload(node, name):
    return sum(f["bytes"] for f in node.api.get(f"/v1/checkpoints/main/{name.replace('/', '%2F')}/files").ok(200)["files"]
               if f["name"].endswith(".distcp"))


def test_a_load_by_three_nodes_reads_each_byte_once(three):
    a = three[0]
    whole = save(a, "run/step-1", 48)
    sd = lib.fresh()
    jobs = ends(three, spread(a, "run/step-1", sd))
    assert [j["state"] for j in jobs] == ["succeeded"] * 3, [j.get("error") for j in jobs]
    size = payload(a, "run/step-1")
    for node, job in zip(three, jobs):
        holds(node, sd, whole)
        s = job["result"]["spread"]
        assert not warnings(job) and s["nodes"] == list(NODES), job["result"]
        assert s["bytes_from_storage"] < 0.5 * size and s["bytes_from_nodes"] > 0.5 * size, s
        assert job["result"]["unverified_bytes"] == 0
    read = sum(j["result"]["spread"]["bytes_from_storage"] for j in jobs)
    assert 0.99 * size <= read <= 1.01 * size, (read, size)
    assert {j["result"]["spread"]["storage_bytes_of_all"] for j in jobs} == {read}


@pytest.mark.long
@pytest.mark.parametrize("what", ["columns", pytest.param("ranks", marks=pytest.mark.long), pytest.param("small", marks=pytest.mark.long)])
def test_nodes_may_load_it_cut_in_different_ways(three, what):
    """What all need (w), what two need (v) and what one alone needs (x), each once."""
    a, b, c = three
    whole = save(a, "run/step-1", 24 if what != "small" else 1, names=("w", "v", "x"))
    sd, group = lib.fresh(), lib.fresh()
    layout, world = {"columns": ([{"match": "*", "placements": ["Shard(1)"]}], 2),
                     "ranks": ([{"match": "*", "placements": ["Replicate()"]}], 2), "small": ([], 3)}[what]
    jobs = []
    for node, include, target in ((a, ["*"], {}), (b, ["w", "v"], {"world_size": world, "layout": layout}), (c, ["w"], {})):
        jobs.append(spread(node, "run/step-1", sd, include=include, target=target, spread={"id": group}))
    jobs = [n.api.wait(j) for n, j in zip(three, jobs)]
    assert [j["state"] for j in jobs] == ["succeeded"] * 3, [j.get("error") for j in jobs]
    size = payload(a, "run/step-1")
    read = sum(j["result"]["spread"]["bytes_from_storage"] for j in jobs)
    assert not any(map(warnings, jobs)) and read <= 1.02 * size + 4 * 65536, (read, size)
    holds(a, sd, whole)
    holds(c, sd, whole)
    if what == "columns":
        left, right = (i.entries["w"][2] for i in b.images(sd))
        assert left == b"".join(whole[i : i + 2048] for i in range(0, len(whole), 4096))
        assert right == b"".join(whole[i : i + 2048] for i in range(2048, len(whole), 4096))


def test_a_node_that_does_not_come_is_named_and_the_others_read_by_themselves(three):
    a, b, _ = three
    whole = save(a, "run/step-1", 8)
    sd, group = lib.fresh(), lib.fresh()
    jobs = [spread(n, "run/step-1", sd, spread={"id": group, "timeout_s": 1}) for n in (a, b)]
    for node, job in zip((a, b), jobs):
        done = node.api.wait(job)
        assert done["state"] == "succeeded", done.get("error")
        (why,) = warnings(done)
        assert '"c"' in why and "has not begun the load within 1 s" in why
        holds(node, sd, whole)


def test_a_node_that_refuses_is_named_with_its_reason(three):
    """Nobody waits for it."""
    a, b, c = three
    whole = save(a, "run/step-1", 8)
    sd = lib.fresh()
    b.api.post("/v1/state-dicts", {"name": sd, "world_size": 3}).ok()
    job = a.api.wait(spread(a, "run/step-1", sd, spread={"timeout_s": 60}), 30)
    assert job["state"] == "succeeded" and len(warnings(job)) == 1 and '"b"' in warnings(job)[0], job["result"]
    holds(a, sd, whole)


def killed(three, act, mib=176):
    """Node c, which is slow, is hit in the middle: the others have what is in memory at a time, and wait for more."""
    a, b, c = three
    whole = save(a, "run/step-1", mib)
    sd, group = lib.fresh(), lib.fresh()
    workers = lambda n: {w["pid"] for w in n.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "gang"}
    before = workers(c)
    jobs = [spread(n, "run/step-1", sd, spread={"id": group}, options={"pace": pace})
            for n, pace in zip(three, ("full", "full", "background"))]

    def in_the_middle():
        j = c.api.get(f"/v1/jobs/{jobs[2]['id']}").ok(200)
        assert j["state"] not in ("succeeded", "failed") and not j["progress"]["bytes_done"] > mib * MIB / 2, j
        return j["progress"]["bytes_done"] > 0

    lib.wait_for(in_the_middle, 30, "the load has begun")
    act(c, workers(c) - before)
    done = [n.api.wait(j, 120) for n, j in zip((a, b), jobs)]
    for node, job in zip((a, b), done):
        assert job["state"] == "succeeded", job.get("error")
        assert len(warnings(job)) == 1 and '"c"' in warnings(job)[0], job["result"]
        holds(node, sd, whole)
    return done


@pytest.mark.long
def test_a_host_that_dies_in_the_middle_is_named_and_its_bytes_come_from_the_storage(three):
    killed(three, lambda c, workers: c.kill())


@pytest.mark.long
def test_a_host_that_hangs_in_the_middle_is_named(cluster):
    nodes = cluster(*NODES, args=("--comm-deadline", "2s"))
    for n in nodes:
        n.sees(**{name: "joined" for name in NODES})
    stopped = []

    def stop(c, workers):
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)

    try:
        killed(nodes, stop)
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def damage(node, name, at):
    folder = node.storages["main"] / name
    file = next(f for f in sorted(folder.iterdir()) if f.suffix == ".distcp")
    with open(file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))
    return file.name


def test_a_damaged_byte_in_the_storage_is_named_on_every_node(three):
    a = three[0]
    save(a, "run/step-1", 16)
    file = damage(a, "run/step-1", 5 * MIB + 77)
    for job in ends(three, spread(a, "run/step-1", lib.fresh())):
        assert job["state"] == "failed", job["result"]
        assert job["error"]["code"] in ("digest_mismatch", "checkpoint_damaged") and job["error"]["file"] == file, job["error"]
        assert job["error"]["fqn"] == "w" and 4096 <= job["error"]["offset"] <= 5 * MIB + 77, job["error"]


def test_what_cannot_be_spread_is_refused(three):
    a, b, _ = three
    save(a, "run/step-1", 1)

    def body(**more):
        return {"kind": "load", "source": {"storage": "main", "name": "run/step-1"}, "target": {"state_dict": lib.fresh()}, **more}

    for nodes in (["a"], ["b", "c"], ["a", "none"], ["a", "b", "a"], ["a", ""], ["a"] * 65, "a", [1, 2]):
        a.api.post("/v1/jobs", body(spread={"nodes": nodes})).problem("validation_failed", status=422)
    a.api.post("/v1/jobs", body(spread={})).problem("validation_failed", status=422)
    a.api.post("/v1/jobs", body(spread={"nodes": ["a", "b"], "id": ""})).problem("validation_failed", status=422)
    a.api.post("/v1/jobs", body(spread={"nodes": ["a", "b"], "more": 1})).problem("unknown_field", status=422)
    memory = {**body(spread={"nodes": ["a", "b"]}), "source": {"state_dict": "x", "node": "b"}}
    a.api.post("/v1/jobs", memory).problem("validation_failed", status=422)
    a.api.post("/v1/spreads/x:meet", {"round": 0, "index": 0, "size": 2, "data": ""}).problem("forbidden", status=403)


def test_dcpctl_loads_on_several_nodes(three):
    a, b, _ = three
    whole = save(a, "run/step-1", 8)
    sd = lib.fresh()
    r = a.ctl("load", "main:run/step-1", f"shm:{sd}", "--world-size", "1", "--spread", "a", "--spread", "b")
    assert r.returncode == 0, r
    for node in (a, b):
        lib.wait_for(lambda n=node: n.api.get(f"/v1/state-dicts/{sd}").status == 200, 20, "the load has ended")
        holds(node, sd, whole)


@pytest.mark.long
def test_object_storage_is_read_once(cluster, s3_server):
    place = lib.fresh("spread")
    nodes = cluster(*NODES, args=("--storage", f"s3=s3://{s3_server.bucket}/{place}", *options(s3_server)), env=s3_server.environment())
    for n in nodes:
        n.sees(**{name: "joined" for name in NODES})
    a = nodes[0]
    whole, images = parts(24)
    sd = lib.fresh()
    a.put(sd, images)
    a.api.run("save", source={"state_dict": sd}, target={"storage": "s3", "name": "run/step-1"})
    a.drop(sd)
    jobs = ends(nodes, spread(a, "run/step-1", lib.fresh("to"), storage="s3"))
    assert [j["state"] for j in jobs] == ["succeeded"] * 3, [j.get("error") for j in jobs]
    for node, job in zip(nodes, jobs):
        holds(node, job["spec"]["target"]["state_dict"], whole)
    read = sum(j["result"]["spread"]["bytes_from_storage"] for j in jobs)
    assert not any(map(warnings, jobs)) and 0.99 * len(whole) <= read <= 1.01 * len(whole), (read, len(whole))


def test_loads_of_two_users_do_not_meet(three, server, tmp_path):
    """Ids are the callers' words: those of another user may be the same, on purpose or not."""
    a, b, c = three
    whole = save(a, "run/step-1", 8)
    group, path = lib.fresh(), f"/{tmp_path.name}/"
    secret = server.keys(path)[f"{path}secret"]["secret"]
    card = {"round": 0, "index": 1, "size": 3, "data": "bm8gY2FyZA=="}
    for node in (a, b, c):  # a load of another user's over more nodes has sent its card
        of = lib.Client(tcp=("127.0.0.1", node.http), headers={"Authorization": f"Bearer {secret}", "Dcpd-Caller": "12345 2 0 -"})
        of.post(f"/v1/spreads/{group}:meet", card).ok(200)
    sd = lib.fresh()
    jobs = [spread(n, "run/step-1", sd, nodes=["a", "b"], spread={"id": group}) for n in (a, b)]
    for node, job in zip((a, b), jobs):
        done = node.api.wait(job)
        assert done["state"] == "succeeded" and warnings(done) == [], done["result"]
        holds(node, sd, whole)
