"""An owner is stopped where its worker is about to make a change visible, another node takes the job over and ends it, and then the former
owner goes on: its change does not happen. For each kind of commit, on a folder and on an object storage. Needs a build with FAULTS=1."""
import pytest
from campaign import HAS_POINTS, TTL, Campaign, image
from etcd_members import freeze, thaw
from faults import HOLD

import dcpd as lib

pytestmark = [pytest.mark.skipif(not HAS_POINTS, reason="this build has no fault points"), pytest.mark.long]


def at(storage, name):
    return {"storage": storage, "name": name}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, s3_server):
    c = Campaign(tmp_path_factory.mktemp("commits"), 0, s3_server)
    yield c
    c.close()


def case(kind, storage, again, **spec):
    return pytest.param(kind, storage, again, spec, id="-".join([kind, storage, *(["replaces"] if spec.get("options") else []), again]))


SOURCE, OTHER = at("main", "src/1"), at("main", "src/2")
CASES = [case(kind, storage, again, **spec)
         for storage in ("main", "s3")
         for kind, spec, again in (("reshard", {"source": SOURCE}, "stays"), ("reshard", {"source": SOURCE}, "removed"),
                                   ("reshard", {"source": SOURCE, "options": {"overwrite": True}}, "replaced"),
                                   ("merge", {"sources": [SOURCE, OTHER]}, "removed"), ("replicate", {"source": SOURCE}, "removed"),
                                   ("delete", {}, "made anew"))]


def known(cluster, job):
    """A job that etcd has not heard of is nobody's but its node's."""
    lib.wait_for(lambda: f"/dcpd/jobs/{job}" in cluster.etcd.keys("/dcpd/jobs/"), 20, "etcd knows the job")


@pytest.mark.parametrize("kind, storage, again, spec", CASES)
def test_a_former_owner_changes_nothing(cluster, kind, storage, again, spec):
    """again: what happens to the checkpoint between the new owner's commit and the former owner's return."""
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    name = f"fenced/{lib.fresh()}"
    here = at(storage, name)
    if kind == "delete" or spec.get("options"):
        before = b.api.run("reshard", source=at("main", "src/3"), target=here)["id"]
        cluster.etcd.all[0].ended("dcpd", before)  # else it may count as later than the job: who takes that over leaves what it saved
    fault = cluster.faults["a"]
    fault.arm("remove.rename" if kind == "delete" else "commit.rename", 1, HOLD)
    job = a.api.submit(kind, target=here, **spec)["id"]
    lib.wait_for(fault.struck, 20, "the commit", every=0.002)
    known(cluster, job)
    dies = kind == "delete" and storage == "main"  # it holds the folder's lock there: one that is only stopped keeps others out
    pids = [] if dies else freeze(a)
    if dies:
        a.kill()
    fault.disarm()
    try:
        end = lib.wait_for(lambda: (j := b.api.get(f"/v1/jobs/{job}").ok(200))["state"] in lib.TERMINAL and j, 20 * TTL, "a new owner")
        assert end["state"] == "succeeded" and end["node"] in "bc" and end["taken_over"][-1]["from"] == "a", end
        value = {"merge": 1.5, "delete": None}.get(kind, 1.0)
        assert cluster.value(storage, name, "b") == value
        if again == "removed":
            b.api.run("delete", target=here)
            value = None
        elif again in ("replaced", "made anew"):
            b.api.run("reshard", source=at("main", "src/0"), target=here, options={"overwrite": True})
            value = 0.0
    finally:
        thaw(pids)
        if dies:
            a.start()
    lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["node"] == end["node"], 20, "a knows")
    lib.wait_for(lambda: not [j for s in ("running", "committing", "planning")
                              for j in a.api.get(f"/v1/jobs?filter=state%3D{s}").ok(200)["jobs"]], 20, "a has given it up")
    assert cluster.value(storage, name) == value
    assert a.api.get(f"/v1/jobs/{job}").ok(200)["state"] == "succeeded"
    cluster.mended()


@pytest.mark.parametrize("storage", ["main", "s3"])
def test_a_save_whose_daemon_dies_at_the_commit_is_there_once(cluster, storage):
    """A save needs its node's memory: it waits for that node, and is whole after its return."""
    a, b = cluster.nodes["a"], cluster.nodes["b"]
    name, sd = f"saved/{lib.fresh()}", lib.fresh()
    for point in ("commit.rename", "commit.renamed"):
        a.put(sd + point, [image(7)], slots=1)
        cluster.faults["a"].arm(point, 1, HOLD)
        job = a.api.submit("save", source={"state_dict": sd + point}, target=at(storage, name + point))["id"]
        lib.wait_for(cluster.faults["a"].struck, 20, "the commit", every=0.002)
        known(cluster, job)
        a.kill()
        cluster.faults["a"].disarm()
        b.sees(a="away", b="joined", c="joined")
        assert "taken_over" not in b.api.get(f"/v1/jobs/{job}").ok(200)
        a.start()
        assert b.api.wait(job)["state"] == "succeeded"
        assert cluster.value(storage, name + point) == 7.0
    cluster.mended()
