"""Nodes that die or hang while bytes are under way between them: a copy for a neighbour, a load out of a neighbour's memory, a version of a
publication. Who receives has all of it in the end, or nothing of it."""
import re
import threading
import time

import pytest
from test_cluster import cluster, pair, server  # noqa: F401
from test_cluster_images import Proxy
from test_neighbours import ALL, BUDGET, PART, held, large, load, replicas, settled  # noqa: F401
from test_publish import arrives, publish, put, record, take, version
from test_publish_nodes import follow

import dcpd as lib


@pytest.fixture
def between(server, tmp_path):  # noqa: F811
    """between(node, who sees it…) → the proxy through which the others reach the node from now on."""
    made = []

    def make(node, *others):
        proxy = Proxy(server, f"/{tmp_path.name}", node, instead=True)
        made.append(proxy)
        at = f"127.0.0.1:{proxy.server.server_port}"
        for other in others:
            lib.wait_for(lambda o=other: {n["name"]: n["advertise"] for n in o.api.get("/v1/nodes").ok(200)["nodes"]}[node.name] == at, 20)
        return proxy

    yield make
    for proxy in made:
        proxy.close()


def is_payload(path, rank):
    """A range of the rank's image behind its header."""
    found = re.search(rf"/ranks/{rank}/image.* bytes=(\d+)-", path)
    return found and int(found.group(1)) >= 4096


def strike(proxy, rank, act):
    """act() once, when the first bytes of the rank's tensors are asked for; from then on the proxy hangs up. Returns what is set then."""
    struck, begun = threading.Event(), []

    def change(path, *answer):
        if not begun and is_payload(path, rank):
            begun.append(path)
            act()
            struck.set()  # whoever waits for it may start again what the act has killed
        return None if begun else answer

    proxy.change = change
    return struck


@pytest.mark.long
def test_a_neighbour_that_dies_in_the_middle_of_a_restore_leaves_the_rest_to_the_storage(held, between):  # noqa: F811
    a, b, c, source = held
    a.kill()
    struck = strike(between(b, c), 1, b.kill)
    done = load(c, source)
    assert struck.is_set() and done["bytes_from_neighbours"] <= PART and done["read_bytes"] >= PART and done["unverified_bytes"] == 0, done


@pytest.mark.long
def test_a_neighbour_that_hangs_costs_a_restore_less_than_a_requests_whole_time(held, between):  # noqa: F811
    a, b, c, source = held
    a.kill()
    proxy, over = between(b, c), threading.Event()
    proxy.change = lambda path, *answer: over.wait(60) and None if is_payload(path, "[01]") else answer
    try:
        job = c.api.submit("load", source=source, target={"state_dict": "x", "world_size": 2})
        done = c.api.wait(job, 20)["result"]
    finally:
        over.set()
    assert done["bytes_from_neighbours"] == 0 and done["read_bytes"] >= ALL, done
    asked = [(path, heads.get("Range")) for path, heads in proxy.asked if is_payload(f"{path} {heads.get('Range')}", "[01]")]
    assert asked and len(set(asked)) == len(asked), "none of its ranges is asked for again"


@pytest.mark.long
def test_a_neighbour_that_says_nothing_when_it_is_opened_costs_no_more(held, between):  # noqa: F811
    a, b, c, source = held
    a.kill()
    proxy, over = between(b, c), threading.Event()
    proxy.change = lambda path, *answer: over.wait(60) and None if "/digests" in path or "/image" in path else answer
    try:
        job = c.api.submit("load", source=source, target={"state_dict": "x", "world_size": 2})
        assert c.api.wait(job, 20)["result"]["bytes_from_neighbours"] == 0
    finally:
        over.set()
    assert len([path for path, _ in proxy.asked if "/digests" in path]) == 1


@pytest.mark.long
def test_a_node_that_hangs_keeps_loads_of_what_the_storage_has_waiting_once_at_most(cluster):  # noqa: F811
    """Its lease is not over, and its answer is awaited for three seconds where nothing else is known."""
    a, b = cluster("a", "b", ttl="60s")
    a.sees(a="joined", b="joined")
    a.put("train", large())
    a.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/step-1"})
    loads, limit = 15, 30
    with lib.stopped(b.proc.pid):
        end = time.monotonic() + limit
        done = [load(a, {"storage": "main", "name": "run/step-1"}) for _ in range(loads) if time.monotonic() < end]
    assert len(done) == loads, "each has waited"


@pytest.mark.long
def test_a_restore_reads_headers_of_a_copy_and_has_none_of_its_bytes_hashed_first(held, between):  # noqa: F811
    """All digests of a large copy take its node longer than the restore."""
    a, b, c, source = held
    a.kill()
    proxy = between(b, c)
    assert load(c, source)["bytes_from_neighbours"] == ALL
    asked = [path for path, _ in proxy.asked if "/digests" in path]
    assert asked and all("of=headers" in path for path in asked), asked


@pytest.mark.long
def test_a_copy_waits_for_its_nodes_digests_as_long_as_they_are_being_computed(cluster, between):  # noqa: F811
    a, b = cluster("a", "b", args=BUDGET)
    a.sees(a="joined", b="joined")
    proxy, later = between(a, b), []

    def change(path, *answer):
        if "/digests" not in path or len(later) == 8:
            return answer
        later.append(path)
        return 202, {"Content-Type": "application/json", "Content-Length": "2"}, b"{}"

    proxy.change = change
    a.put("train", large())
    job = a.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/step-1"}, options={"neighbours": 1})
    assert settled(a, job)["replicas"][0]["state"] == "held" and len(later) == 8
    assert all(heads.get("Prefer") == "wait=5" for path, heads in proxy.asked if "/digests" in path)


def test_who_prefers_not_to_wait_hears_that_digests_are_being_computed(d):
    name = lib.fresh()
    d.put(name, large())
    path = f"/v1/state-dicts/{name}/digests"
    assert d.api.get(path, headers={"Prefer": "wait=0"}).status == 202
    lib.wait_for(lambda: d.api.get(path, headers={"Prefer": "wait=1"}).status == 200, 20)
    assert d.api.get(path, headers={"Prefer": "wait=forever"}).status == 200
    d.drop(name)


def whole_or_nothing(node, images):
    for copy in replicas(node):
        assert [i.entries for i in node.images(copy["name"])] == [lib.Image(i).entries for i in images]
    return len(replicas(node))


def struck_while_copying(cluster, between, which):  # noqa: F811
    """a saves, b copies what a holds, and one of them is killed between two ranks' bytes: (a, b, the proxy between them, the save)."""
    a, b = cluster("a", "b", args=BUDGET)
    a.sees(a="joined", b="joined")
    proxy = between(a, b)
    struck = strike(proxy, 1, (a, b)[which].kill)
    a.put("train", large())
    job = a.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run/step-1"}, options={"neighbours": 1})
    lib.wait_for(struck.is_set, 20, "b reads")
    return a, b, proxy, job


@pytest.mark.long
def test_a_saver_that_dies_in_the_middle_of_a_copy_leaves_nothing_on_the_neighbour(cluster, between):  # noqa: F811
    a, b, _, _ = struck_while_copying(cluster, between, 0)
    ended = lambda: [j for j in b.api.get("/v1/jobs?filter=kind=load").ok(200)["jobs"] if j["state"] == "failed"]
    lib.wait_for(ended, 40, "its load has ended")
    assert not b.api.get("/v1/state-dicts").ok(200)["state_dicts"]
    assert not [leak for leak in b.leaks() if "holds" in leak]


@pytest.mark.long
def test_a_neighbour_that_dies_in_the_middle_of_a_copy_has_it_whole_or_not(cluster, between):  # noqa: F811
    a, b, proxy, job = struck_while_copying(cluster, between, 1)
    proxy.change = lambda path, *answer: answer
    b.start()
    done = settled(a, job)
    b.sees(a="joined", b="joined")
    assert done["state"] == "succeeded"
    assert whole_or_nothing(b, large()) == (done["replicas"][0]["state"] == "held"), done
    assert not [leak for leak in b.leaks() if "holds" in leak]


@pytest.mark.long
@pytest.mark.parametrize("who", ["publisher", "subscriber"])
def test_a_version_that_is_cut_off_by_a_death_comes_whole_afterwards(cluster, between, who):  # noqa: F811
    a, b = cluster("a", "b")
    a.sees(a="joined", b="joined")
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    publish(a, pub, 1, create=True)
    proxy = between(a, b)
    follow(b, sub, pub)
    arrives(b, sub, -1, 1)
    take(b, sub, 1)
    struck = strike(proxy, 1, (a if who == "publisher" else b).kill)
    put(a, pub, version(2, w=2.0), 2)
    lib.wait_for(struck.is_set, 20, "b reads")
    if who == "publisher":
        assert record(b, sub)["generation"] == 1, "nothing of the new version is shown"
        a.start()
        a.sees(a="joined", b="joined")
    else:
        b.start()
    proxy.change = lambda path, *answer: answer
    arrives(b, sub, 1, 2)
