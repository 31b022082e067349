"""One save by the daemons of several hosts into one bucket: each writes the files of its ranks, one commits; kills leave it whole or
absent."""
import threading

import pytest
from s3_server import Proxy, Tool
from test_s3 import MB, loads, names, options, ref, state

import dcpd as lib


@pytest.fixture(scope="module")
def networks(s3_server):
    """One of each host: a request that waits in it keeps the other's from nothing."""
    with Proxy(s3_server.endpoint) as alpha, Proxy(s3_server.endpoint) as beta:
        alpha.region = beta.region = s3_server.region
        yield alpha, beta


@pytest.fixture
def proxy(networks):
    return networks[0]


@pytest.fixture(autouse=True)
def calm(networks):
    for p in networks:
        p.fault, p.done, p.late, p.age = lambda *_: None, [], [], 0
    yield
    for p in networks:
        p.fault, p.age = lambda *_: None, 0


@pytest.fixture(scope="module")
def place():
    return lib.fresh("hosts")


@pytest.fixture(scope="module")
def two(tmp_path_factory, s3_server, networks, place):
    """Two daemons that share nothing but the bucket."""
    both = []
    for name, proxy in zip(("alpha", "beta"), networks):
        home = tmp_path_factory.mktemp(name)
        both.append(lib.Daemon(home, {"main": home / "main", "s3": f"s3://{s3_server.bucket}/{place}"}, options(proxy),
                               env=s3_server.environment()))
    yield both
    for d in both:
        d.discard()


@pytest.fixture(scope="module")
def s3(s3_server, place):
    with Tool(s3_server.endpoint, s3_server.bucket, f"{place}/", s3_server.environment()) as t:
        yield t


class Save:
    """Images of four ranks, two on each host, and the jobs that save them together."""

    def __init__(self, two, name, size=3000, timeout=20, **more):
        self.two, self.name, self.images, self.sds, self.jobs = two, name, state(size, 4), [], []
        self.hosts = {"id": lib.fresh().replace("_", "-").lower() + "-12345678", "names": ["alpha", "beta"], "ranks": [[0, 2], [1, 3]],
                      "timeout_s": timeout}
        self.more = more
        for ranks, d in zip(self.hosts["ranks"], two):
            self.sds.append(lib.fresh())
            d.put(self.sds[-1], [self.images[r] for r in ranks])

    def begin(self, index):
        self.jobs.append((self.two[index], self.two[index].api.submit(
            "save", source={"state_dict": self.sds[index]}, target=ref("s3", self.name), hosts={**self.hosts, "index": index},
            **self.more)["id"]))
        return self

    def run(self):
        return self.begin(0).begin(1)

    def ends(self, seconds=60):
        jobs = [d.api.wait(job, seconds) for d, job in self.jobs]
        for d, sd in zip(self.two, self.sds):
            d.drop(sd)
        return [None if j["state"] == "succeeded" else j["error"] for j in jobs]


def test_each_host_writes_its_ranks_and_one_commits(two, proxy, s3):
    commits = []
    save = Save(two, f"run/{lib.fresh()}", 9 * MB + 17)
    proxy.fault = lambda verb, path, _: commits.extend([path] if verb == "PUT" and path.endswith(f"{save.name}/.metadata") else [])
    assert save.run().ends() == [None, None]
    assert len(commits) == 1
    for d in two:
        loads(d, save.name, save.images)
    verified = two[1].api.run("verify", source=ref("s3", save.name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified
    keys = s3.keys(f"{save.name}/")
    assert len(keys) == 6 and sum(k.endswith(".distcp") for k in keys) == 4, keys
    lib.wait_for(lambda: s3.keys(".dcpd/") == [], 20, "nothing is left of the meeting place")
    again = Save(two, save.name, 3000, options={"overwrite": True})
    assert again.run().ends() == [None, None]
    loads(two[0], save.name, again.images)
    assert len(s3.keys(f"{save.name}/")) == 6
    loads(two[1], save.name, again.images)


def test_meet(two, s3):
    mark = {"name": f"{lib.fresh()}/x", "token": "0123456789abcdef"}
    meet = lambda d, **more: d.api.post("/v1/storages/s3:meet", {**mark, **more}).ok()  # noqa: E731
    assert meet(two[0]) == {"seen": False}
    meet(two[0], action="put")
    assert meet(two[1], action="look") == {"seen": True}
    meet(two[1], action="drop")
    assert meet(two[0]) == {"seen": False} and s3.keys(".dcpd/hosts") == []


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_a_host_that_never_comes(two, s3, index):
    save = Save(two, lib.fresh(), timeout=1).begin(index)
    [error] = save.ends()
    assert error["code"] == "peer_timeout" and ("beta did not begin", "alpha, which leads, did not begin")[index] in error["detail"], error
    assert save.name not in names(two[0]) and s3.keys(f"{save.name}/") == []


def swept(d, proxy, s3):
    """A day later, the next start leaves nothing of meeting places and attempts."""
    proxy.age = 25 * 3600
    d.kill()
    d.start()
    lib.wait_for(lambda: s3.keys(".dcpd/") == [], 30, "the sweep")


@pytest.mark.short("commit")
@pytest.mark.parametrize("when", ["data", "commit"])
def test_a_leader_that_is_killed_goes_on(two, proxy, s3, when):
    """With the files that the other host has written; what its first attempt still had on its way changes nothing. Where the kill comes
    behind the commit, nobody is left to say goodbye: a sweep does."""
    save, struck = Save(two, f"run/{lib.fresh()}", 100_000), threading.Event()

    def fault(verb, path, _):
        """When the other host is done, one request of the leader's comes late."""
        at = f"{save.name}/__0_" in path if when == "data" else path.endswith(f"{save.name}/.metadata")
        if verb == "PUT" and at and not struck.is_set():
            lib.wait_for(lambda: any("/part-1" in k for k in s3.keys(".dcpd/hosts")), 20, "the other's part")
            struck.set()
            return "late"

    proxy.fault = fault
    save.run()
    assert struck.wait(30)
    two[0].kill_workers()
    assert save.ends() == [None, None]
    proxy.fault = lambda *_: None
    loads(two[1], save.name, save.images)
    for said in proxy.release():
        assert b" 200 " in said or b" 412 " in said, said
    loads(two[1], save.name, save.images)
    verified = two[0].api.run("verify", source=ref("s3", save.name), level="values")["result"]
    assert verified["unverified_bytes"] == 0, verified
    swept(two[0], proxy, s3)


@pytest.mark.long
def test_a_leader_that_is_killed_behind_its_commit_leaves_nothing(two, proxy, s3):
    """Nobody has said goodbye: who finds the commit does."""
    save, committed, struck, killed = Save(two, f"run/{lib.fresh()}", 100_000), [], threading.Event(), threading.Event()

    def fault(verb, path, _):
        if verb == "PUT" and path.endswith(f"{save.name}/.metadata"):
            committed.append(path)
        if verb == "DELETE" and "/.dcpd/" in path and committed and not struck.is_set():
            struck.set()
            killed.wait(30)
            return "cut"

    proxy.fault = fault
    save.run()
    assert struck.wait(30)
    assert f"{save.name}/.metadata" in s3.keys(f"{save.name}/"), "the commit was made"
    assert s3.keys(".dcpd/at/") and s3.keys(".dcpd/hosts")
    two[0].kill_workers()
    killed.set()
    assert save.ends() == [None, None]
    proxy.fault = lambda *_: None
    lib.wait_for(lambda: s3.keys(".dcpd/") == [], 20, "nothing is left of the meeting place")
    loads(two[1], save.name, save.images)


@pytest.mark.long
def test_a_host_that_comes_again_when_all_is_over_hears_of_the_commit(two, proxy, s3):
    """Its worker is killed while the leader commits, who says goodbye in vain and removes the meeting place."""
    save, struck, killed = Save(two, f"run/{lib.fresh()}", 100_000), threading.Event(), threading.Event()

    def fault(verb, path, _):
        if verb == "PUT" and path.endswith(f"{save.name}/.metadata"):
            struck.set()
            killed.wait(30)

    proxy.fault = fault
    save.run()
    assert struck.wait(30)
    proxy.fault = lambda *_: None
    with lib.stopped(two[1].proc.pid):
        two[1].kill_workers()
        killed.set()
        lib.wait_for(lambda: f"{save.name}/.metadata" in s3.keys(f"{save.name}/") and s3.keys(".dcpd/") == [], 60, "the leader's end")
    assert save.ends() == [None, None]
    loads(two[1], save.name, save.images)


@pytest.mark.long
@pytest.mark.parametrize("nth", [9, 12, 13, 14, 15, 17])
def test_a_host_that_comes_again_while_all_ends_hears_of_the_commit(two, networks, s3, nth):
    """The leader commits and removes the meeting place during the nth request of the host that comes again, whichever that is."""
    save, asked = Save(two, f"run/{lib.fresh()}", 100_000), []
    struck, again, held, goes_on, over = (threading.Event() for _ in range(5))

    def leader(verb, path, _):
        if verb == "PUT" and path.endswith(f"{save.name}/.metadata"):
            struck.set()
            goes_on.wait(60)

    def other(verb, path, _):
        if again.is_set() and not held.is_set():
            asked.append((verb, path))
            if len(asked) == nth:
                held.set()
                over.wait(60)

    networks[0].fault, networks[1].fault = leader, other
    save.run()
    assert struck.wait(30)
    two[1].kill_workers()
    again.set()
    try:
        assert held.wait(30)
        goes_on.set()
        lib.wait_for(lambda: f"{save.name}/.metadata" in s3.keys(f"{save.name}/") and s3.keys(".dcpd/") == [], 60, "the leader's end")
    finally:
        goes_on.set()
        over.set()
    assert save.ends() == [None, None], asked
    loads(two[1], save.name, save.images)


@pytest.mark.long
def test_a_host_that_dies_ends_the_save(two, networks, s3):
    """The other says so; its files, and those that come late, are nobody's, and go."""
    save, struck = Save(two, f"run/{lib.fresh()}", timeout=2), threading.Event()

    def fault(verb, path, _):
        if verb == "PUT" and f"{save.name}/__1_" in path:
            struck.set()
            return "late"

    networks[1].fault = fault
    save.run()
    assert struck.wait(30)
    two[1].kill()
    job = two[0].api.wait(save.jobs[0][1], 60)
    assert job["state"] == "failed" and job["error"]["code"] == "peer_timeout" and "beta" in job["error"]["detail"], job
    assert save.name not in names(two[0])
    networks[1].fault = lambda *_: None
    networks[1].release()
    two[1].start()
    two[1].api.wait(save.jobs[1][1], 60)
    save.ends()
    assert len(s3.keys(".dcpd/at/")) == 1
    swept(two[0], networks[0], s3)
    assert s3.keys(f"{save.name}/") == []


def test_a_name_that_another_takes_meanwhile(two, proxy, s3, tmp_path):
    """All hosts fail, and what was written goes; the other's checkpoint stays."""
    save, taken = Save(two, f"race/{lib.fresh()}"), []
    (tmp_path / "other").write_text("another's")

    def fault(verb, path, _):
        if verb == "PUT" and path.endswith(f"{save.name}/.metadata") and not taken:
            taken.extend(s3.put(f"{save.name}/.metadata", tmp_path / "other"))

    proxy.fault = fault
    errors = save.run().ends()
    assert taken and errors[0]["code"] == "checkpoint_exists" and errors[1]["detail"].startswith("host alpha: "), errors
    assert s3.keys(f"{save.name}/") == [f"{save.name}/.metadata"]


@pytest.mark.long
def test_a_bad_network_tears_nothing(two, networks):
    rng = lib.secrets.SystemRandom()
    for p in networks:
        p.fault = lambda *_: rng.choice(("500", "slow", "cut", "lost", "short", "flip_up")) if rng.random() < 0.1 else None
    saves = [Save(two, f"bad/{lib.fresh()}", rng.choice((3000, 9 * MB + 17))) for _ in range(3)]
    ends = [save.run().ends() for save in saves]
    for p in networks:
        p.fault = lambda *_: None
    there = names(two[0])
    for save, end in zip(saves, ends):
        assert (save.name in there) == (end[0] is None), end
        if save.name in there:
            loads(two[1], save.name, save.images)
    assert [None, None] in ends, ends


@pytest.mark.long
def test_a_page_that_comes_after_the_goodbye_goes(two, networks, s3):
    """The other host's first beat is on its way while the leader is cancelled, and removes the place where they meet."""
    save, held, gone = Save(two, f"run/{lib.fresh()}", timeout=3), threading.Event(), threading.Event()

    def fault(verb, path, _):
        if verb == "PUT" and path.endswith("/beat-1") and not held.is_set():
            held.set()
            gone.wait(30)

    networks[1].fault = fault
    save.run()
    assert held.wait(30)
    two[0].api.post(f"/v1/jobs/{save.jobs[0][1]}:cancel").ok(202)
    lib.wait_for(lambda: s3.keys(".dcpd/hosts") == [], 30, "the leader's goodbye")
    gone.set()
    assert all(save.ends())
    assert s3.keys(".dcpd/hosts") == []
    swept(two[0], networks[0], s3)
