"""Copies in neighbours' memory of what is no checkpoint, or no checkpoint any more: they serve no load and go, however they are met."""
import contextlib
import os
import shutil
import signal

import pytest
from test_cluster import cluster, server  # noqa: F401
from test_neighbours import BUDGET, images, large, load, pair, replicas, save, settled  # noqa: F401

import dcpd as lib

SOURCE = {"storage": "main", "name": "run/step-1"}


@contextlib.contextmanager
def held_up(node):
    """Saves of the node stand still: the workers that do them are stopped. It must have saved before."""
    pids = [w["pid"] for w in node.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "gang"]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def copied(node, sd, generation=2, **options):
    """A save under way, whose copy has reached its neighbour."""
    node.put(sd, large(), generation=generation, create=False)
    job = node.api.submit("save", source={"state_dict": sd, "generation": generation}, target=SOURCE,
                          options={"neighbours": 1, "retries": 0, **options})
    held = lambda: [r for r in node.api.get(f"/v1/jobs/{job['id']}").ok(200).get("replicas", []) if r["state"] == "held"]
    lib.wait_for(held, 20, "its neighbour has it")
    return job


@pytest.fixture
def trainer(pair):  # noqa: F811
    """(a, b, state dict): a has saved something from it, so that its workers are there."""
    a, b = pair
    sd = lib.fresh()
    a.put(sd, large())
    a.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "other/step-1"})
    return a, b, sd


def is_not_served(*nodes):
    """A node that has just joined answers 503 until it knows which copies were withdrawn meanwhile."""
    load_ = {"kind": "load", "source": SOURCE, "target": {"state_dict": lib.fresh()}}
    for node in nodes:
        for ask in (lambda: node.api.post("/v1/jobs", load_), lambda: node.api.get("/v1/runs/main/run:resume")):
            lib.wait_for(lambda: (got := ask()).status != 503 and got, 20, f"{node.name} knows").problem("not_found")


@pytest.mark.long
def test_the_copies_of_a_cancelled_save_go(trainer):
    a, b, sd = trainer
    with held_up(a):
        job = copied(a, sd)
        a.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
        assert a.api.wait(job)["state"] == "cancelled"
        lib.wait_for(lambda: not replicas(b), 20, "its copy is gone")
    is_not_served(a, b)
    assert a.api.get(f"/v1/jobs/{job['id']}").ok(200)["replicas"][0]["state"] == "dropped"


def test_the_copies_of_a_failed_save_go(trainer, tmp_path):
    a, b, sd = trainer
    with held_up(a):
        job = copied(a, sd)
        (tmp_path / "shared" / "run" / "step-1").mkdir(parents=True)
        (tmp_path / "shared" / "run" / "step-1" / "mine").write_text("")
    assert a.api.wait(job)["state"] == "failed"
    lib.wait_for(lambda: not replicas(b), 20, "its copy is gone")
    shutil.rmtree(tmp_path / "shared" / "run")
    is_not_served(a, b)


@pytest.mark.long
def test_the_copies_of_a_save_whose_memory_was_lost_stay(trainer):
    """They are for that: the host comes back with nothing."""
    a, b, sd = trainer
    pids = a.workers()
    with held_up(a):
        job = copied(a, sd)
        segments = [s["segment"] for r in a.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"] for s in r["slots"]]
        a.kill()
    lib.wait_for(lambda: not any(lib.running(pid) for pid in pids), 20)
    for segment in segments:
        os.unlink(lib.segment_file(segment))
    a.start()
    a.sees(a="joined", b="joined")
    done = a.api.wait(job)
    assert done["state"] == "failed" and len(replicas(b)) == 1, done
    assert load(a, SOURCE)["served_from"]["node"] == "b"


@pytest.mark.long
def test_a_copy_in_use_serves_its_deleted_checkpoint_no_more_and_goes_with_its_reader(trainer):
    a, b, sd = trainer
    job = settled(a, a.api.submit("save", source={"state_dict": sd}, target=SOURCE, options={"neighbours": 1}))
    (copy,) = job["replicas"]
    a.api.run("load", source={"state_dict": copy["state_dict"], "node": "b"}, target={"state_dict": "x", "world_size": 2})
    assert b.api.delete(f"/v1/state-dicts/{copy['state_dict']}").status == 409, "the node that reads it holds it for a while"
    a.api.run("delete", target=SOURCE)
    listed = lambda: b.api.get(f"/v1/state-dicts?replica_of=main:{SOURCE['name']}").ok(200)["state_dicts"]
    lib.wait_for(lambda: not listed(), 20, "b was told")
    is_not_served(a, b)
    lib.wait_for(lambda: not replicas(b), 30, "its reader has let go")


@pytest.mark.long
@pytest.mark.parametrize("how", ["paused", pytest.param("killed", marks=pytest.mark.long)])
def test_a_node_that_was_away_hears_of_a_delete_when_it_is_back(trainer, how):
    a, b, sd = trainer
    settled(a, a.api.submit("save", source={"state_dict": sd}, target=SOURCE, options={"neighbours": 1}))
    assert len(replicas(b)) == 1
    if how == "killed":
        b.kill()
    with lib.stopped(b.proc.pid) if how == "paused" else contextlib.nullcontext():
        a.sees(a="joined", b="away")
        a.api.run("delete", target=SOURCE)
    if how == "killed":
        b.start()
    b.sees(a="joined", b="joined")
    a.sees(a="joined", b="joined")
    lib.wait_for(lambda: not replicas(b), 20, "it has heard of it")
    is_not_served(a, b)


@pytest.mark.long
def test_a_node_that_does_not_answer_for_a_while_hears_of_a_delete(trainer):
    """Its lease is not over: it is told again and again."""
    a, b, sd = trainer
    settled(a, a.api.submit("save", source={"state_dict": sd}, target=SOURCE, options={"neighbours": 1}))
    b.kill()
    a.api.run("delete", target=SOURCE)
    b.start()
    lib.wait_for(lambda: not replicas(b), 20, "it has heard of it")
    is_not_served(a, b)


@pytest.mark.long
@pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_a_node_hears_of_a_delete_whose_daemon_ended_before_it_was_heard(trainer, end):
    """The next daemon tells it."""
    a, b, sd = trainer
    settled(a, a.api.submit("save", source={"state_dict": sd}, target=SOURCE, options={"neighbours": 1}))
    b.kill()
    a.api.run("delete", target=SOURCE)
    getattr(a, end)()
    b.start()
    assert len(replicas(b)) == 1
    a.start()
    lib.wait_for(lambda: not replicas(b), 20, "it has heard of it")
    is_not_served(a, b)


def test_the_copies_of_a_replaced_checkpoint_go(trainer, tmp_path):
    a, b, sd = trainer
    settled(a, a.api.submit("save", source={"state_dict": sd}, target=SOURCE, options={"neighbours": 1}))
    b.put("train", large(2))
    b.api.run("save", source={"state_dict": "train"}, target=SOURCE, options={"overwrite": True})
    lib.wait_for(lambda: not replicas(b), 20, "its copy is gone")
    lib.wait_for(lambda: not list((tmp_path / "shared").rglob(".dcpd-trash-*")), 20, "what it replaced is gone")
    shutil.rmtree(tmp_path / "shared" / "run")
    is_not_served(a, b)


@pytest.mark.long
def test_the_copies_of_a_save_that_only_tried_do_not_take_others_along(trainer):
    a, b, sd = trainer
    settled(a, a.api.submit("save", source={"state_dict": sd}, target=SOURCE, options={"neighbours": 1}))
    other = lib.fresh()
    a.put(other, large())
    with held_up(a):
        job = copied(a, other, overwrite=True)
        assert len(replicas(b)) == 2
        a.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
        a.api.wait(job)
        lib.wait_for(lambda: len(replicas(b)) == 1, 20, "the copy of the cancelled one is gone")
    assert replicas(b)[0]["replica"]["job"] != job["id"] and load(b, SOURCE)["bytes_from_memory"]


def test_only_nodes_withdraw(pair):  # noqa: F811
    a, _ = pair
    job = save(a, lib.fresh(), "run/step-1")
    a.api.delete(f"/v1/state-dicts?replica_of=main:run/step-1&saved_by={job['id']}").problem("forbidden", status=403)
