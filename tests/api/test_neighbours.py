"""Checkpoints in the memory of other nodes: copies that a save asks its neighbours for, and what becomes of them."""
import contextlib
import os
import re
import shutil
import signal
import threading
import time

import package
import pytest
from test_cluster import cluster, server  # noqa: F401
from test_images import images

import dcpd as lib

BUDGET = ("--neighbour-memory", "64MiB")


def save(node, sd, name, neighbours=1, generation=1, seed=1, create=True):
    """The save's record once its copies have ended, one way or the other; its slots are free then."""
    node.put(sd, images(seed=seed), generation=generation, create=create)
    job = node.api.submit("save", source={"state_dict": sd, "generation": generation}, target={"storage": "main", "name": name},
                          options={"neighbours": neighbours})
    done = settled(node, job)
    for rank in range(2):
        node.api.post(f"/v1/state-dicts/{sd}/ranks/{rank}:release", {"generation": generation}).ok()
    return done


def settled(node, job):
    node.api.wait(job)

    def over():
        j = node.api.get(f"/v1/jobs/{job['id']}").ok(200)
        warned = any(w["code"] == "not_replicated" for w in (j.get("result") or {}).get("warnings", []))
        return (warned or "replicated" in j["milestones"]) and j

    return lib.wait_for(over, 20, "its copies have ended")


def replicas(node):
    found = node.api.get("/v1/state-dicts").ok(200)["state_dicts"]
    return [sd for sd in found if "replica" in sd]


def warning(job):
    return next(w["detail"] for w in job["result"]["warnings"] if w["code"] == "not_replicated")


@pytest.fixture
def pair(cluster):
    a, b = cluster("a", "b", args=BUDGET)
    a.sees(a="joined", b="joined")
    b.sees(a="joined", b="joined")
    return a, b


def test_a_save_is_copied_to_a_neighbour(pair):
    a, b = pair
    sd = lib.fresh()
    job = save(a, sd, "run/step-1")
    assert job["state"] == "succeeded" and job["milestones"]["replicated"] >= job["milestones"]["snapshotted"]
    (copy,) = job["replicas"]
    assert copy["node"] == "b" and copy["state"] == "held" and not job["result"].get("warnings"), job
    (held,) = replicas(b)
    assert held["replica"] == {"job": job["id"], "storage": "main", "name": "run/step-1", "from": "a", "from_state_dict": sd,
                               "part": False}
    assert (held["name"], held["generation"]) == (copy["state_dict"], copy["generation"]) and not replicas(a)
    assert [i.entries for i in b.images(held["name"])] == [lib.Image(i).entries for i in images()]
    metrics = a.api.get("/metrics").body.decode()
    assert 'dcpd_replicas_total{outcome="held"} 1' in metrics and "dcpd_replicated_seconds_count 1" in metrics
    assert 'dcpd_neighbour_bytes{state="limit"} 67108864' in b.api.get("/metrics").body.decode()


def test_dcpctl_saves_with_neighbours(pair):
    a, b = pair
    sd = lib.fresh()
    a.put(sd, images())
    r = a.ctl("save", f"shm:{sd}", "main:run/step-1", "--neighbours", "1")
    assert r.returncode == 0, r
    (job,) = a.api.get("/v1/jobs?filter=kind=save").ok(200)["jobs"]
    replicated = settled(a, job)["milestones"]["replicated"]
    shown = a.ctl("job", job["id"]).stdout
    (line,) = [row for row in shown.splitlines() if row.startswith("replicated")]
    assert replicated in line and re.search(rf"^b +held +replica-{job['id']}\b", shown, re.M), shown
    assert "neighbours" in a.ctl("save", f"shm:{sd}", "main:run/step-2", "--neighbours", "17").stderr


@pytest.mark.long
def test_a_newer_step_takes_the_place_of_the_older_one_and_a_restart_keeps_it(pair):
    a, b = pair
    sd = lib.fresh()
    save(a, sd, "run/step-1")
    save(a, sd, "run/step-2", generation=2, seed=2, create=False)
    save(a, lib.fresh(), "other/step-1", seed=3)
    names = lambda: sorted(r["replica"]["name"] for r in replicas(b))
    assert names() == ["other/step-1", "run/step-2"]
    b.kill()
    b.start()
    b.sees(a="joined", b="joined")
    assert names() == ["other/step-1", "run/step-2"]
    a.sees(a="joined", b="joined")
    save(a, sd, "run/step-3", generation=3, seed=4, create=False)
    assert names() == ["other/step-1", "run/step-3"]
    b.drop(*[r["name"] for r in replicas(b)])
    assert not replicas(b)


def segments(node):
    """Of the one copy that the node shows."""
    (copy,) = replicas(node)
    ranks = node.api.get(f"/v1/state-dicts/{copy['name']}").ok(200)["ranks"]
    return copy["replica"]["name"], [slot["segment"] for r in ranks for slot in r["slots"]]


def shared_memory(node):
    return int(re.search(r'^dcpd_neighbour_bytes\{state="used"\} (\d+)', node.api.get("/metrics").body.decode(), re.M)[1])


@pytest.mark.long
def test_the_segments_of_a_replaced_copy_serve_the_next_one(pair):
    """New pages cost as much as the bytes that come into them."""
    a, b = pair
    sd, got = lib.fresh(), []
    for step in range(1, 5):
        done = save(a, sd, f"run/step-{step}", generation=step, seed=step, create=step == 1)
        assert "replicated" in done["milestones"], done["result"]["warnings"]
        name, names = segments(b)
        assert name == f"run/step-{step}" and [i.entries for i in b.images(replicas(b)[0]["name"])] == \
            [lib.Image(i).entries for i in images(seed=step)]
        got.append(names)
    assert got[0] == got[2] != got[1] == got[3] and not set(got[0]) & set(got[1])
    one = shared_memory(b) // 2
    b.kill()
    b.start()
    a.sees(a="joined", b="joined")
    assert segments(b)[1] == got[3] and shared_memory(b) == one, "what is in no row is gone"
    assert not lib.segment_file(got[0][0]).exists()
    save(a, sd, "run/step-5", generation=5, seed=5, create=False)
    assert segments(b)[0] == "run/step-5" and shared_memory(b) == 2 * one


def test_the_memory_of_replaced_copies_goes_for_whatever_needs_it(cluster):
    a = cluster("a")
    b = cluster("b", args=("--neighbour-memory", "5MiB", "--shm-limit", "7MiB"))
    for n in (a, b):
        n.sees(a="joined", b="joined")
    large = lambda seed, mib: [lib.image({"w": ("U8", [(mib << 20) - 4096], bytes([seed]) * ((mib << 20) - 4096))})]

    def step(sd, generation, mib):
        a.put(sd, large(generation, mib), generation=generation, create=generation == 1)
        job = a.api.submit("save", source={"state_dict": sd, "generation": generation},
                           target={"storage": "main", "name": f"{sd}/step-{generation}"}, options={"neighbours": 1})
        assert settled(a, job)["replicas"][0]["state"] == "held"
        a.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": generation}).ok()

    step("one", 1, 2)
    step("one", 2, 2)
    assert shared_memory(b) == 4 << 20, "the replaced one waits"
    step("two", 1, 3)  # of another run
    assert sorted(r["replica"]["name"] for r in replicas(b)) == ["one/step-2", "two/step-1"] and shared_memory(b) == 5 << 20
    b.drop(*[r["name"] for r in replicas(b) if r["replica"]["name"] == "two/step-1"])
    step("one", 3, 2)
    assert shared_memory(b) == 4 << 20
    b.put("own", large(1, 5))  # a trainer's: 7 MiB do not hold it beside both
    assert shared_memory(b) == 2 << 20 and segments(b)[0] == "one/step-3"


def test_what_a_neighbour_declines_is_a_warning_and_the_next_one_is_asked(cluster):
    a, b, c = [cluster(n, args=() if n == "b" else BUDGET if n == "a" else ("--neighbour-memory", "1MiB")) for n in "abc"]
    for n in (a, b, c):
        n.sees(a="joined", b="joined", c="joined")
    sd = lib.fresh()
    job = save(a, sd, "run/step-1", neighbours=1)
    assert [(r["node"], r["state"]) for r in job["replicas"]] == [("b", "failed"), ("c", "held")]
    assert "--neighbour-memory" in job["replicas"][0]["why"] and "replicated" in job["milestones"] and replicas(c)
    job = save(a, sd, "run/step-2", neighbours=2, generation=2, create=False)
    assert job["state"] == "succeeded" and "replicated" not in job["milestones"]
    assert "1 of 2 copies" in warning(job) and "--neighbour-memory" in warning(job)
    a.put("large", [lib.image({"w": ("U8", [2 << 20], bytes(2 << 20))})])
    done = settled(a, a.api.submit("save", source={"state_dict": "large"}, target={"storage": "main", "name": "large/step-1"},
                                   options={"neighbours": 1}))
    assert done["state"] == "succeeded" and "0 of 1 copies" in warning(done) and len(replicas(c)) == 1


def test_without_a_cluster_it_is_a_warning(d):
    sd = lib.fresh()
    job = save(d, sd, sd)
    assert job["state"] == "succeeded" and "in no cluster" in warning(job)
    d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": {"storage": "main", "name": "x"},
                            "options": {"neighbours": -1}}).problem("validation_failed")
    replica = {"job": job["id"], "checkpoint": {"storage": "main", "name": sd}}
    d.api.post("/v1/jobs", {"kind": "load", "source": {"state_dict": sd, "node": "a"}, "target": {"state_dict": "x"},
                            "replica": replica}).problem("forbidden", status=403)
    d.api.get("/v1/state-dicts?replica_of=shm:x").problem("invalid_request", status=400)
    d.api.get("/v1/state-dicts?replica_of=main").problem("name_invalid", status=422)
    d.drop(sd)


@pytest.mark.long
def test_a_replica_goes_after_its_time_and_with_its_node(cluster):
    a = cluster("a")
    b = cluster("b", args=(*BUDGET, "--neighbour-keep", "1s"))
    c = cluster("c", args=BUDGET)
    a.sees(a="joined", b="joined", c="joined")
    save(a, lib.fresh(), "run/step-1", neighbours=2)
    assert replicas(c)
    lib.wait_for(lambda: not replicas(b), 20, "its time is over")
    assert replicas(c)
    a.kill()
    c.sees(a="away", b="joined", c="joined")
    time.sleep(0.1)
    assert replicas(c), "that is what it is for"
    assert c.ctl("forget", "a").returncode == 0
    lib.wait_for(lambda: not replicas(c), 20, "its node is gone")


@pytest.mark.long
def test_a_neighbour_that_dies_is_a_warning(pair):
    a, b = pair
    b.kill()
    job = save(a, lib.fresh(), "run/step-1")
    assert job["state"] == "succeeded" and "0 of 1 copies" in warning(job)
    assert "replicated" not in job["milestones"]


@pytest.mark.long
def test_the_package_saves_with_neighbours(pair):
    """Not through a ring: there is something to copy. Slots that are released meanwhile are held."""
    a, b = pair
    numpy = pytest.importorskip("numpy")
    state = {"w": numpy.arange(8 << 20, dtype="float32"), "step": 3}
    with package.daemon(f"unix://{a.socket}") as dcpd:
        job = settled(a, dcpd.save(state, "main:run/step-1", neighbours=1))
        assert job["replicas"][0]["state"] == "held", job
        dcpd.close()
        got = dcpd.load(f"shm:b/{job['replicas'][0]['state_dict']}")
        assert (got["w"] == state["w"]).all() and got["step"] == 3
        with pytest.raises(dcpd.errors.RequestRefused):
            dcpd.load("shm:b", None)
    (held,) = replicas(b)
    assert held["replica"]["job"] == job["id"] and held["bytes"] >= state["w"].nbytes


@pytest.mark.long
@pytest.mark.parametrize("blocking", [True, False])
def test_saves_that_pytorch_plans_are_copied(pair, blocking):
    """Each rank's snapshot is a part: it stands for nothing by itself, and a load of the checkpoint finds it."""
    a, b = pair
    torch = pytest.importorskip("torch")
    state = {f"w{i}": torch.arange(1 << 20, dtype=torch.float32) + i for i in range(8)}
    with package.daemon(f"unix://{a.socket}") as dcpd:
        import torch.distributed.checkpoint as dcp
        from dcpd.torch import StorageWriter

        for step in (1, 2):
            for t in state.values():
                t += 1
            writer = StorageWriter(f"main:run/step-{step}", neighbours=1)
            if blocking:
                dcp.save(state, storage_writer=writer, no_dist=True)
            else:
                dcp.async_save(state, storage_writer=writer, no_dist=True).result(60)
            job = next(j for j in a.api.get("/v1/jobs?filter=kind=save").ok(200)["jobs"] if j["target"]["name"] == f"run/step-{step}")
            job = settled(a, job)
            assert [(r["node"], r["state"]) for r in job["replicas"]] == [("b", "held")] and not job["result"].get("warnings"), job
            (held,) = replicas(b)
            assert held["replica"]["name"] == f"run/step-{step}" and held["replica"]["part"] and held["replica"]["job"] == job["id"]
        dcpd.close()
    a.kill()
    b.sees(a="away", b="joined")
    done = b.api.run("load", source={"storage": "main", "name": "run/step-2"}, target={"state_dict": "x"})["result"]
    assert done["bytes_from_memory"] == sum(t.nbytes for t in state.values()) and done["unverified_bytes"] == 0, done
    got = b.images("x")[0].entries
    assert all(got[k][2] == t.numpy().tobytes() for k, t in state.items())
    shutil.rmtree(b.storages["main"] / "run")
    b.api.post("/v1/jobs", {"kind": "load", "source": {"storage": "main", "name": "run/step-2"},
                            "target": {"state_dict": "y"}}).problem("not_found")


WORLD, PART = 2, 1 << 20
ALL = WORLD * PART


def large(seed=1):
    """Row-wise shards of a tensor that are larger than what is read from files at once anyway."""
    rows = PART // 1024
    return [lib.image({"w": ("U8", [rows, 1024], bytes([seed + r]) * PART)},
                      {"tensors": {"w": {"fqn": "w", "global_shape": [WORLD * rows, 1024], "offsets": [r * rows, 0]}},
                       "values": {"step": {"json": seed}}}) for r in range(WORLD)]


@pytest.fixture
def held(cluster):
    """(a, b, c, source): a's save lies in b's memory and in the storage; c has nothing."""
    a, b = cluster("a", "b", args=BUDGET)
    c = cluster("c")
    for n in (a, b, c):
        n.sees(a="joined", b="joined", c="joined")
    a.put("train", large())
    job = a.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/step-1"}, options={"neighbours": 1})
    assert settled(a, job)["replicas"][0]["state"] == "held"
    return a, b, c, {"storage": "main", "name": "run/step-1"}


def load(node, source, world=2):
    """The result of a load of what was saved."""
    name = lib.fresh()
    done = node.api.run("load", source=source, target={"state_dict": name, "world_size": world})["result"]
    whole = b"".join(i.entries["w"][2] for i in node.images(name))
    assert whole == b"".join(lib.Image(i).entries["w"][2] for i in large()) and node.images(name)[0].values["step"]["json"] == 1
    node.drop(name)
    return done


def test_an_empty_host_takes_the_bytes_from_a_neighbour(held):
    a, b, c, source = held
    a.kill()
    done = load(c, source)
    assert done["bytes_from_neighbours"] == ALL and done["unverified_bytes"] == 0 and done["read_bytes"] < PART, done
    assert load(c, source, world=1)["bytes_from_neighbours"] == ALL, "in any layout"
    done = load(b, source)
    assert done["bytes_from_memory"] == ALL and done["bytes_from_neighbours"] == 0, "its own memory is nearer"


def test_a_copy_that_is_spoiled_or_gone_costs_nothing_but_the_reads(held):
    a, b, c, source = held
    (copy,) = replicas(b)
    segment = b.api.get(f"/v1/state-dicts/{copy['name']}").ok(200)["ranks"][1]["slots"][0]["segment"]
    with open(lib.segment_file(segment), "r+b") as f:
        f.seek(PART // 2)
        f.write(b"not what was saved")
    done = load(c, source)
    assert done["bytes_from_neighbours"] == PART and done["read_bytes"] >= PART and done["unverified_bytes"] == 0, done
    b.kill()
    assert load(c, source)["bytes_from_neighbours"] == 0


@pytest.mark.long
def test_what_is_not_in_the_storage_comes_out_of_a_nodes_memory(held, tmp_path):
    """The host died before its save was durable."""
    a, b, c, source = held
    a.kill()
    shutil.rmtree(tmp_path / "shared" / "run")
    done = load(c, source)
    (copy,) = replicas(b)
    assert done["served_from"] == {"node": "b", "state_dict": copy["name"], "generation": copy["generation"], "instead_of": source,
                                   "why": "not_found"}
    assert load(b, source)["served_from"]["node"] == "b"
    b.kill()
    c.sees(a="away", b="away", c="joined")
    c.api.post("/v1/jobs", {"kind": "load", "source": source, "target": {"state_dict": "x"}}).problem("not_found")


def resumed(node, method="get"):
    return getattr(node.api, method)("/v1/runs/main/run:resume").ok(200)


@pytest.mark.long
def test_a_step_that_only_a_neighbour_has_is_what_a_training_goes_on_from(held, tmp_path):
    a, b, c, source = held
    a.put("train", large(7), generation=2, create=False)
    job = a.api.submit("save", source={"state_dict": "train", "generation": 2}, target={"storage": "main", "name": "run/step-2"},
                       options={"neighbours": 1})
    (copy,) = settled(a, job)["replicas"]
    assert "copy" not in resumed(c) and resumed(c)["step"] == 2
    a.kill()
    shutil.rmtree(tmp_path / "shared" / "run" / "step-2")  # the saver died before it was durable
    for node in (b, c):
        found = resumed(node)
        assert found["checkpoint"]["name"] == "run/step-2" and found["step"] == 2 and "not become durable" in found["why"], found
        assert found["copy"] == {"node": "b", "state_dict": copy["state_dict"], "generation": copy["generation"]}
    assert c.ctl("resume", "main:run", "--look").stdout.strip() == "main:run/step-2"
    c.api.run("load", source=found["checkpoint"], target={"state_dict": "x", "world_size": 2})
    assert c.images("x")[0].values["step"]["json"] == 7
    assert [resumed(c, "post")["attempts"] for _ in range(3)] == [1, 2, 3]
    found = resumed(c)
    assert found["checkpoint"]["name"] == "run/step-1" and found["skipped"][0]["name"] == "run/step-2" and "copy" not in found
    shutil.rmtree(tmp_path / "shared" / "run")
    assert resumed(b)["checkpoint"]["name"] == "run/step-2", "the run has nothing else"


@pytest.mark.long
def test_what_only_a_silent_node_may_have_is_not_said_to_be_nowhere(cluster, tmp_path):
    """A trainer that is told "none" begins anew."""
    a, b = cluster("a", "b", args=BUDGET, ttl="60s")
    a.sees(a="joined", b="joined")
    b.sees(a="joined", b="joined")
    save(a, lib.fresh(), "run/step-1")
    load = {"kind": "load", "source": {"storage": "main", "name": "run/step-1"}, "target": {"state_dict": "x"}}
    other = {**load, "source": {"storage": "main", "name": "run/step-1-of-others"}}
    shutil.rmtree(tmp_path / "shared" / "run")
    a.api.post("/v1/jobs", other).problem("not_found")
    with lib.stopped(b.proc.pid):
        for answer in (a.api.get("/v1/runs/main/run:resume"), a.api.post("/v1/jobs", load)):
            p = answer.problem("cluster_unavailable", status=503)
            assert p["retryable"] and '"b"' in p["detail"], p
    lib.wait_for(lambda: a.api.get("/v1/runs/main/run:resume").status == 200, 20, "b has its breath again")
    assert resumed(a)["checkpoint"]["name"] == "run/step-1"
    a.api.run("load", **{k: v for k, v in load.items() if k != "kind"})


def test_a_node_that_comes_again_does_not_say_that_it_has_no_copy(server, pair):  # noqa: F811
    """The node says that it does not know, until it knows which copies were withdrawn while it was away: a trainer that is told "none"
    begins anew."""
    a, b = pair
    save(a, lib.fresh(), "run/step-1")
    b.kill()
    with lib.stopped(server.process.pid):
        b.start()

    def named():
        answer = b.api.get("/v1/state-dicts?replica_of=main:run/step-1")
        if answer.status == 503:
            answer.problem("cluster_unavailable")
        else:
            assert len(answer.ok(200)["state_dicts"]) == 1, "a list without it"
        return answer.status == 200 and b.nodes() == {"a": "joined", "b": "joined"}

    lib.wait_for(named, 20, "it has joined, and names its copy", every=0)


def test_the_package_resumes_from_a_neighbours_memory(pair, tmp_path):
    a, b = pair
    numpy = pytest.importorskip("numpy")
    state = {"w": numpy.arange(1 << 20, dtype="float32"), "step": 3}
    with package.daemon(f"unix://{a.socket}") as dcpd:
        settled(a, dcpd.save(state, "main:run/step-3", neighbours=1))
        dcpd.close()
    a.kill()
    shutil.rmtree(tmp_path / "shared" / "run")
    into = {"w": numpy.zeros(1 << 20, dtype="float32"), "step": 0}
    with package.daemon(f"unix://{b.socket}") as dcpd:
        found = dcpd.resume("main:run", into=into)
        dcpd.close()
    assert (found.checkpoint, found.step) == ("main:run/step-3", 3) and (into["w"] == state["w"]).all() and into["step"] == 3


@pytest.mark.short("True")
@pytest.mark.parametrize("trained", [True, False])
def test_an_optimizer_resumes_from_a_neighbours_memory(pair, tmp_path, trained):
    """Whether a new optimizer needs its state first, only the copy tells."""
    a, b = pair
    torch = pytest.importorskip("torch")

    def new():
        model = torch.nn.Linear(8, 8)
        return {"model": model, "optim": torch.optim.Adam(model.parameters())}

    state, into = new(), new()
    if trained:
        state["model"](torch.ones(8)).sum().backward()
        state["optim"].step()
    with package.daemon(f"unix://{a.socket}") as dcpd:
        settled(a, dcpd.save(state, "main:run/step-3", neighbours=1))
        dcpd.close()
    a.kill()
    shutil.rmtree(tmp_path / "shared" / "run")
    lib.wait_for(lambda: b.api.get("/v1/runs/main/run:resume").status == 200, 20, "b names its copy")
    with package.daemon(f"unix://{b.socket}") as dcpd:
        found = dcpd.resume("main:run", into=into)
        dcpd.close()
    assert found.checkpoint == "main:run/step-3" and torch.equal(into["model"].weight, state["model"].weight)
    old, got = (list(x["optim"].state_dict()["state"].values()) for x in (state, into))
    assert len(got) == len(old) == 2 * trained and all(torch.equal(x["exp_avg"], y["exp_avg"]) for x, y in zip(old, got))


def test_a_deleted_checkpoint_is_not_brought_back_by_a_copy(held):
    a, b, c, source = held
    save(a, lib.fresh(), "other/step-1")
    c.api.post("/v1/jobs?dry_run=true", {"kind": "delete", "target": source}).ok(200)
    assert len(replicas(b)) == 2
    c.api.run("delete", target=source)
    lib.wait_for(lambda: len(replicas(b)) == 1, 20, "its copy is gone, too")
    assert replicas(b)[0]["replica"]["name"] == "other/step-1"
    b.api.post("/v1/jobs", {"kind": "load", "source": source, "target": {"state_dict": "x"}}).problem("not_found")


@pytest.mark.long
def test_a_neighbour_whose_load_stands_still_does_not_hold_the_trainers_slots(cluster):
    a = cluster("a", args=("--stall-after", "1s"))
    b = cluster("b", args=BUDGET)
    a.sees(a="joined", b="joined")
    sd = lib.fresh()
    save(a, sd, "run/step-1")  # the workers that b reads it with stay
    for pid in b.workers():
        os.kill(pid, signal.SIGSTOP)
    job = save(a, sd, "run/step-2", generation=2, create=False)
    assert job["state"] == "succeeded" and "no progress" in warning(job), job
    for generation in (3, 4):
        a.put(sd, images(), generation=generation, create=False)


@pytest.mark.long
def test_a_copy_ends_when_its_node_is_away(pair):
    a, b = pair
    with lib.stopped(b.proc.pid):
        job = save(a, lib.fresh(), "run/step-1")
    assert job["state"] == "succeeded" and "it is away" in warning(job), job


def test_the_part_of_a_save_by_several_hosts_never_stands_for_the_whole(pair):
    """Also if the other parts are gone: half a checkpoint would be loaded as if it were all."""
    a, b = pair
    a.put("half", large())
    job = a.api.submit("save", source={"state_dict": "half"}, target={"storage": "main", "name": "run/step-1"},
                       options={"neighbours": 1, "retries": 0},
                       hosts={"id": "several-12345678", "index": 0, "ranks": [[0, 1], [2, 3]], "timeout_s": 60})
    lib.wait_for(lambda: replicas(b), 20, "its part is there")
    b.api.post("/v1/jobs", {"kind": "load", "source": {"storage": "main", "name": "run/step-1"},
                            "target": {"state_dict": "x"}}).problem("not_found")
    assert replicas(b)[0]["replica"]["part"] is True
    a.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
    a.api.wait(job)
    lib.wait_for(lambda: not replicas(b), 20, "it is a part of nothing")


def test_nothing_else_is_put_into_a_copy(held):
    """It would be loaded as the checkpoint."""
    a, b, c, source = held
    (copy,) = replicas(b)
    b.api.post("/v1/jobs", {"kind": "load", "source": source, "target": {"state_dict": copy["name"]}}).problem("state_dict_exists")


@pytest.mark.long
def test_a_daemon_stops_while_a_load_asks_for_copies(pair, cluster):
    a, b = pair
    c = cluster("c", args=("--drain-timeout", "100ms"))
    c.sees(a="joined", b="joined", c="joined")
    source = {"storage": "main", "name": "run/step-1"}

    def ask():
        with contextlib.suppress(OSError):
            c.api.post("/v1/jobs", {"kind": "load", "source": source, "target": {"state_dict": "x"}})

    asked = threading.Thread(target=ask)
    with lib.stopped(b.proc.pid):
        asked.start()
        time.sleep(0.3)
        assert c.stop() == 0
    asked.join()
