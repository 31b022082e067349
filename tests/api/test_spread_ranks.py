"""Ranks on three hosts, each with a daemon that is a node of one cluster: a load reads each byte once from the storage. Hosts are names
here (DCPD_PLACE): what is under test is who asks whom for what."""
import hashlib
import os
import sys
import types

import etcd
import pytest

import dcpd as lib

pytest.importorskip("torch", reason="DCPD_TEST_VENV has no torch")
sys.path.append(str(lib.ROOT / "tests/python"))

import lib_ranks  # noqa: E402

NODES = ("a", "b", "c")
ROWS = 6144


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    home, nodes, ranks = tmp_path_factory.mktemp("spread"), [], None
    server = etcd.Etcd(home)
    try:
        for name in NODES:
            (home / name).mkdir()
            nodes.append(etcd.Node(home / name, server, name, {"main": home / "shared"}))
        for n in nodes:
            n.sees(**{name: "joined" for name in NODES})
        ranks = lib_ranks.Ranks(3, {"GLOO_SOCKET_IFNAME": "lo"},
                                hosts=[({"DCPD_URL": f"unix://{n.socket}", "DCPD_PLACE": n.name}, 1) for n in nodes])
        yield nodes, ranks
    finally:
        if ranks:
            ranks.close()
        for n in nodes:
            n.discard()
        server.stop()


@pytest.fixture(scope="module")
def saved(hosts):
    """The bytes of a tensor of float32 with 1,024 columns, saved by two ranks."""
    node, whole, half = hosts[0][0], os.urandom(4096 * ROWS), ROWS // 2
    node.put("source", [lib.image({"w": ("F32", [half, 1024], whole[r * half * 4096 : (r + 1) * half * 4096])},
                                      {"tensors": {"w": {"fqn": "w", "global_shape": [ROWS, 1024], "offsets": [r * half, 0]}}})
                        for r in range(2)])
    node.api.run("save", source={"state_dict": "source"}, target={"storage": "main", "name": "run/step-1"})
    node.drop("source")
    return whole


def on(name):
    """A function for ranks: this process cannot import it, as its package has the name of the tests' own harness."""
    return types.SimpleNamespace(__module__="on_spread", __name__=name)


def digest(x):
    return hashlib.sha256(x).hexdigest()


def loads(nodes):
    """The results of the nodes' loads so far, by node."""
    return [[j["result"] for j in n.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"] if j["kind"] == "load" and j["node"] == n.name]
            for n in nodes]


def since(before, after):
    return [x[: len(x) - len(b)] for x, b in zip(after, before)]


@pytest.mark.long
@pytest.mark.parametrize("how", ["new", "replicas"])
def test_what_all_hosts_load_is_read_once(hosts, saved, how):
    nodes, ranks = hosts
    before = loads(nodes)
    assert ranks(on(how), "main:run/step-1", ROWS) == [digest(saved)] * 3
    got = [r for results in since(before, loads(nodes)) for r in results]
    read = sum(r["spread"]["bytes_from_storage"] for r in got)
    assert 0.99 * len(saved) <= read <= 1.02 * len(saved), (read, len(saved))
    assert all(r["spread"]["nodes"] == list(NODES) and not r.get("warnings") for r in got) and len(got) >= 3


@pytest.mark.long
def test_what_each_host_needs_alone_is_not_spread(hosts, saved):
    nodes, ranks = hosts
    before, third = loads(nodes), len(saved) // 3
    assert ranks(on("sharded"), "main:run/step-1", ROWS) == [digest(saved[r * third : (r + 1) * third]) for r in range(3)]
    assert not any("spread" in r for results in since(before, loads(nodes)) for r in results)


@pytest.mark.long
def test_spread_can_be_switched_off_and_insisted_on(hosts, saved):
    nodes, ranks = hosts
    before = loads(nodes)
    assert ranks(on("new"), "main:run/step-1", ROWS, False) == [digest(saved)] * 3
    assert not any("spread" in r for results in since(before, loads(nodes)) for r in results)
    assert ranks(on("insists"), "main:run/step-1") == ["RequestRefused"] * 3
