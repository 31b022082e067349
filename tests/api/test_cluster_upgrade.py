"""A cluster in a rolling upgrade: nodes of two builds (the later: NEXT of the Makefile), of one protocol and of two, while saves go on."""
import http.client
import os
import pathlib
import threading

import etcd  # noqa: F401
import pytest
from test_cluster import cluster, pair, server  # noqa: F401
from test_cluster_takeover import big, known_to_etcd, slow_reshard

import dcpd as lib

TESTBIN = pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))
LATER = {1: TESTBIN / "next/dcpd", 2: TESTBIN / "next/dcpd-protocol-2"}
OTHER = "speaks another protocol than this one: update the older one"


class Trainer(threading.Thread):
    """Saves its node's memory, step by step, and waits for a daemon that is away, as trainers do."""

    def __init__(self, d):
        super().__init__(name=f"trainer {d.name}")
        self.d, self.saved, self.failure, self.ended = d, [], None, threading.Event()
        self.start()

    def run(self):
        step = 0
        while not self.ended.wait(0.05):
            try:
                step += 1
                self.step(f"{self.d.name}/step-{step}")
            except (OSError, http.client.HTTPException):
                continue
            except AssertionError as e:
                if self.d.alive() and "draining" not in str(e):
                    self.failure = e
                    return

    def step(self, name):
        sd = lib.fresh()
        self.d.put(sd, [lib.image({"a": ("U8", [5000], name.encode().ljust(5000))})])
        job = self.d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
        assert job["state"] == "succeeded", job
        self.saved.append(name)
        self.d.drop(sd)

    def more(self):
        n = len(self.saved)
        lib.wait_for(lambda: self.failure or len(self.saved) > n + 1, 30, f"{self.name} goes on")

    def end(self):
        self.ended.set()
        self.join()
        assert not self.failure, self.failure


@pytest.fixture
def training(pair):  # noqa: F811
    trainers = [Trainer(d) for d in pair]
    yield trainers
    for t in trainers:
        t.ended.set()
        t.join()


def upgrade(d, protocol, by):
    by.api.post(f"/v1/nodes/{d.name}:drain?wait=30s").ok(200)
    assert d.stop() == 0
    d.program = LATER[protocol]
    d.start()
    d.sees(**{**d.nodes(), d.name: "drained"})


def versions(d):
    return {n["name"]: n["version"] for n in d.api.get("/v1/nodes").ok(200)["nodes"]}


def all_there(trainers, d):
    """Nothing that was acknowledged is missing or damaged."""
    for t in trainers:
        t.more()
        t.end()
        for name in t.saved[:: max(1, len(t.saved) // 8)]:
            assert d.api.run("verify", source={"storage": "main", "name": name}, level="digest")["result"]["unverified_bytes"] == 0
        names = {c["name"] for c in d.api.get(f"/v1/checkpoints/main?prefix={t.d.name}%2F&page_size=1000").ok(200)["checkpoints"]}
        assert set(t.saved) <= names, set(t.saved) - names


@pytest.mark.long
def test_nodes_of_two_versions_do_each_others_work(pair, training):  # noqa: F811
    a, b = pair
    old = versions(a)["a"]
    upgrade(a, 1, b)
    assert versions(b) == {"a": "99.0.0", "b": old}
    job = a.api.submit("verify", source={"storage": "main", "name": training[1].saved[0]}, level="digest")
    assert a.api.wait(job["id"])["node"] == "b", "a drained node of the later version sends requests on to the one before"
    b.api.post("/v1/nodes/a:undrain?wait=20s").ok(200)
    for here, there in ((a, b), (b, a)):
        sd, to = lib.fresh(), lib.fresh()
        there.put(sd, [lib.image({"a": ("U8", [50], bytes(range(50)))})])
        here.api.run("load", source={"state_dict": sd, "node": there.name}, target={"state_dict": to})
        assert here.images(to)[0].entries["a"][2] == bytes(range(50)), "memory is read by nodes of either version"
    big(a, "src")
    for owner, taker in ((a, b), (b, a)):
        job = slow_reshard(owner, "src", f"dst-{owner.name}")["id"]
        known_to_etcd(owner, job)
        owner.kill()
        lib.wait_for(lambda: taker.api.get(f"/v1/jobs/{job}").ok(200)["node"] == taker.name, 30, "a take-over")
        assert taker.api.wait(job, 60)["state"] == "succeeded"
        owner.start()
        owner.sees(a="joined", b="joined")
    upgrade(b, 1, a)
    assert versions(a) == {"a": "99.0.0", "b": "99.0.0"} and not a.warnings() and not b.warnings()
    all_there(training, a)


@pytest.mark.long
def test_nodes_of_two_protocols_work_side_by_side_and_say_so(pair, training):  # noqa: F811
    a, b = pair
    sd = lib.fresh()
    upgrade(a, 2, b)
    b.api.post("/v1/nodes/a:undrain?wait=20s").ok(200)
    for here, there in ((a, b), (b, a)):
        lib.wait_for(lambda: f'node "{there.name}" ' in here.warnings() and OTHER in here.warnings(), 20, "it is said")
        assert OTHER in here.api.get("/v1/nodes").ok(200)["problem"] and here.api.get("/readyz").ok(200)["status"] == "ready"
        there.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
        p = here.api.post("/v1/jobs", {"kind": "load", "source": {"state_dict": sd, "node": there.name},
                                       "target": {"state_dict": lib.fresh()}}).problem("cluster_unavailable")
        assert OTHER in p["detail"], p
    b.api.post("/v1/nodes/b:drain?wait=30s").ok(200)
    verify = {"kind": "verify", "source": {"storage": "main", "name": training[0].saved[0]}, "level": "digest"}
    assert "drained" in b.api.post("/v1/jobs", verify).problem("draining")["detail"]
    b.api.post("/v1/nodes/b:undrain?wait=20s").ok(200)
    big(a, "src")
    for t in training:
        t.more()
    for owner, other in ((a, b), (b, a)):
        job = slow_reshard(owner, "src", f"dst-{owner.name}")["id"]
        known_to_etcd(owner, job)
        owner.kill()
        other.sees(**{owner.name: "away", other.name: "joined"})
        for _ in range(3):
            other.api.post(f"/v1/nodes/{other.name}:undrain?wait=5s").ok(200)  # a look at etcd
        assert "taken_over" not in other.api.get(f"/v1/jobs/{job}").ok(200), "its node may mean by it what the other does not know"
        owner.start()
        assert owner.api.wait(job, 60)["state"] == "succeeded"
        owner.sees(a="joined", b="joined")
    upgrade(b, 2, a)
    lib.wait_for(lambda: not a.warnings() and not b.warnings(), 20, "one protocol again")
    all_there(training, a)


def test_an_older_protocol_joins_no_cluster_that_a_later_one_has_made(cluster):  # noqa: F811
    a = cluster("a", start=False)
    a.program = LATER[2]
    a.start()
    a.sees(a="joined")
    with pytest.raises(AssertionError, match="speaks a newer protocol than this dcpd: update it"):
        cluster("b")
    assert a.nodes() == {"a": "joined"}
