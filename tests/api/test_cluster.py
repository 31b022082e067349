"""Nodes of a cluster on a real etcd: who is there, who is drained, and what an etcd does that is away, wrong or read-only."""
import base64
import json
import os
import time

import etcd
import package
import pytest
from test_restart import run

import dcpd as lib


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    e = etcd.Etcd(tmp_path_factory.mktemp("etcd"))
    yield e
    e.stop()


@pytest.fixture
def own(tmp_path):
    """An etcd of the test's own, to be stopped."""
    e = etcd.Etcd(tmp_path)
    yield e
    e.stop()


@pytest.fixture
def cluster(server, tmp_path):
    """cluster(name…) → nodes that share the storage main, under a prefix of their own."""
    made = []

    def make(*names, at=None, args=(), **kw):
        got = []
        for name in names:
            home = tmp_path / f"{name}{len(made)}"
            home.mkdir()
            storages, prefix = {"main": tmp_path / "shared"}, ["--cluster-prefix", f"/{tmp_path.name}"]
            got.append(etcd.Node(home, at or server, name, storages, [*prefix, *args], **kw))
            made.append(got[-1])
        return got if len(names) > 1 else got[0]

    yield make
    for d in made:
        d.discard()


@pytest.fixture
def pair(cluster):
    a, b = cluster("a", "b")
    a.sees(a="joined", b="joined")
    b.sees(a="joined", b="joined")
    return a, b


def held_job(d, name):
    """A save that waits for a seal: it has not ended until its state dict has."""
    d.api.post("/v1/state-dicts", {"name": name, "world_size": 1}).ok()
    return d.api.submit("save", source={"state_dict": name, "generation": 1, "await_seal": True},
                        target={"storage": "main", "name": f"held/{name}"})


def test_nodes_see_each_other_come_and_go(cluster, server):
    a, b = cluster("a", "b")
    a.sees(a="joined", b="joined")
    shown = a.api.get("/v1/nodes").ok(200)
    assert shown["node"] == "a" and "problem" not in shown
    one = next(n for n in shown["nodes"] if n["name"] == "b")
    assert one["advertise"] == f"127.0.0.1:{b.http}" and one["storages"] == ["main"] and one["jobs"] == 0 and one["version"], one
    assert b.stop() == 0
    assert a.sees(a="joined", b="away"), "a daemon that is stopped gives its lease back"
    b.start()
    a.sees(a="joined", b="joined")
    b.kill()
    a.sees(a="joined", b="away")
    b.start()
    b.sees(a="joined", b="joined")
    assert "not in its cluster" not in b.warnings()
    a.sees(a="joined", b="joined")
    metrics = a.api.get("/metrics").body.decode()
    assert 'dcpd_cluster_nodes{state="joined"} 2' in metrics and "dcpd_cluster_joined 1" in metrics


def test_a_daemon_that_was_paused_for_longer_than_its_lease_joins_again(cluster):
    a, b = cluster("a", "b")
    a.sees(a="joined", b="joined")
    with lib.stopped(b.proc.pid):
        a.sees(a="joined", b="away")
    a.sees(a="joined", b="joined")


def test_a_name_has_one_daemon(cluster, tmp_path):
    a = cluster("a")
    with pytest.raises(AssertionError, match=r'node \\?"a\\?" of the cluster is another daemon, which is alive at 127'):
        cluster("a")
    a.sees(a="joined")
    a.kill()
    a.start()  # its lease is not over: it is the same state directory
    a.sees(a="joined")


def test_a_drained_node_ends_its_work_and_takes_no_other(cluster):
    a, b = cluster("a", "b")
    a.sees(a="joined", b="joined")
    job = held_job(b, "busy")
    assert a.api.post("/v1/nodes/b:drain?wait=500ms").ok(200)["state"] == "draining"
    b.sees(a="joined", b="draining")
    b.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
    assert a.api.post("/v1/nodes/b:drain?wait=30s").ok(200)["state"] == "drained"
    b.stop()
    b.start()
    a.sees(a="joined", b="drained")  # a restart does not undo an operator's wish
    held = held_job(b, "own")  # its own shared memory is nobody else's: a trainer's save is taken
    b.api.post(f"/v1/jobs/{held['id']}:cancel").ok(202)
    assert b.api.post("/v1/nodes/b:undrain?wait=30s").ok(200)["state"] == "joined"
    b.api.post("/v1/jobs", {"kind": "verify", "source": {"storage": "main", "name": "x"}, "level": "structure"}).problem("not_found")
    a.api.post("/v1/nodes/c:drain").problem("not_found")
    a.api.post("/v1/nodes/b:drain", {"now": True}).problem("unknown_field")
    rows = [r["action"] for r in a.api.get("/v1/audit").ok(200)["audit"]]
    assert rows.count("node.drain") == 2, rows


def test_dcpctl_and_the_package(cluster):
    a, b = cluster("a", "b")
    a.sees(a="joined", b="joined")
    rows = a.ctl("nodes").stdout.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["a", "joined"], ["b", "joined"]], rows
    assert rows[1].split()[-1] == ", ".join(a.storages), rows
    job = held_job(b, "busy")
    r = a.ctl("drain", "b", "--wait", "1s")
    assert r.returncode == 4 and r.stdout == "b is draining\n", r
    b.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
    assert a.ctl("drain", "b", "--wait", "30s").stdout == "b is drained\n"
    assert a.ctl("undrain", "b").stdout == "b is joined\n"
    assert a.ctl("drain", "c").returncode == 6
    with package.daemon(f"unix://{a.socket}") as dcpd, dcpd.connect(f"unix://{a.socket}") as client:
        assert client.nodes.drain("a", wait=20)["state"] == "drained"
        assert [n["state"] for n in client.nodes.list()] == ["drained", "joined"]
        assert client.nodes.undrain("a")["name"] == "a"


def test_without_a_cluster_there_are_no_nodes(spawn):
    d = spawn()
    assert d.api.get("/v1/nodes").ok(200) == {"nodes": []}
    d.api.post("/v1/nodes/a:drain").problem("not_found")


def test_work_goes_on_while_etcd_is_away(cluster, own):
    a = cluster("a", at=own)
    a.sees(a="joined")
    own.stop()
    lib.wait_for(lambda: "cannot be reached" in a.warnings(), 20, "the warning")
    assert a.api.get("/readyz").ok(200)["status"] == "degraded"
    assert "cannot be reached" in a.api.get("/v1/nodes").ok(200)["problem"]
    stranger = lib.Client(tcp=("127.0.0.1", a.http)).get("/readyz").ok(200)["warnings"]
    assert any("not in its cluster" in w for w in stranger) and own.url not in str(stranger), "etcd's words are not for strangers"
    assert "dcpd_cluster_joined 0" in a.api.get("/metrics").body.decode()
    sd = lib.fresh()
    a.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
    a.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "away/step-1"})
    a.api.post("/v1/nodes/a:drain").problem("cluster_unavailable")
    assert a.stop() == 0
    a.start()  # nor does it keep a daemon from starting
    a.api.run("verify", source={"storage": "main", "name": "away/step-1"}, level="digest")
    own.start()
    a.sees(a="joined")
    lib.wait_for(lambda: a.api.get("/readyz").ok(200)["status"] == "ready" or a.warnings(), 20, "ready")
    assert "cluster" not in a.warnings()


@pytest.mark.long
def test_an_etcd_that_hangs(cluster, own):
    a = cluster("a", at=own)
    a.sees(a="joined")
    own.pause()
    try:
        lib.wait_for(lambda: "not in its cluster" in a.warnings(), 30, "the warning")
        start = time.monotonic()
        assert a.api.get("/v1/nodes").ok(200)["nodes"]
        assert time.monotonic() - start < 3 * lib.PATIENCE
    finally:
        own.go_on()
    lib.wait_for(lambda: "cluster" not in a.warnings(), 30, "the cluster again")


def test_the_etcd_of_another_cluster_or_of_a_newer_protocol_is_refused(cluster, own, tmp_path):
    a = cluster("a", at=own)
    a.sees(a="joined")
    a.stop()
    own.stop()
    os.rename(tmp_path / "etcd", tmp_path / "lost")
    own.start()  # it has lost everything: whoever else holds a name there is not known
    b = cluster("b", at=own)  # makes a cluster of its own
    with pytest.raises(AssertionError, match="another cluster than the one"):
        a.start()
    b.sees(b="joined")
    b.stop()
    at = f"/{tmp_path.name}/cluster"
    own.put(at, json.dumps({**own.keys(at)[at], "protocol": 2}))
    with pytest.raises(AssertionError, match="speaks a newer protocol than this dcpd: update it"):
        b.start()


def test_keys_that_are_not_dcpds_are_left_alone(cluster, server, tmp_path):
    server.put(f"/{tmp_path.name}/something", "else")
    with pytest.raises(AssertionError, match="no dcpd cluster's: choose another --cluster-prefix"):
        cluster("a")
    server.put(f"/{tmp_path.name}/cluster", "not JSON")
    b = cluster("b")
    assert "none of dcpd's" in b.warnings()


def test_a_server_that_does_not_answer_is_skipped(cluster, server):
    a, b = cluster("a", "b", at=f"http://127.0.0.1:{etcd.free_port()},{server.url}")
    a.sees(a="joined", b="joined")
    assert "cluster" not in a.warnings()


def test_tls(cluster, tmp_path):
    """To etcd, which wants a certificate, and between nodes."""
    (tmp_path / "tls").mkdir()
    authority = etcd.Authority(tmp_path / "tls")
    server = etcd.Etcd(tmp_path, authority=authority)
    cert, key = authority.make("node")
    trust, shown = ["--cluster-ca", authority.ca], ["--cluster-cert", cert, "--cluster-key", key]
    serve = ["--tls-cert", cert, "--tls-key", key]
    try:
        a, b = cluster("a", "b", at=server, args=[*trust, *shown, *serve])
        a.sees(a="joined", b="joined")
        b.sees(a="joined", b="joined")
        job = held_job(a, "tls")
        assert b.api.get(f"/v1/jobs/{job['id']}").ok(200)["node"] == "a"
        assert [j["id"] for j in b.api.get("/v1/jobs").ok(200)["jobs"]] == [job["id"]]
        a.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
        a.put("dict", [lib.image({"w": ("U8", [3 << 20], bytes(range(256)) * (3 << 12))})])
        b.api.run("load", source={"state_dict": "dict", "node": "a"}, target={"state_dict": "copy"})
        assert b.images("copy")[0].entries == a.images("dict")[0].entries
        stranger = cluster("c", at=server, args=[*serve, *shown])  # does not know the authority
        assert "cannot be reached" in stranger.warnings() and "certificate" in stranger.warnings(), stranger.warnings()
        stranger = cluster("d", at=server, args=[*trust, *serve])  # shows no certificate
        assert "cannot be reached" in stranger.warnings(), stranger.warnings()
    finally:
        server.stop()


def test_what_is_no_etcd_is_said(cluster, spawn):
    other = spawn()
    port = other.tcp_client().tcp[1]
    a = cluster("a", at=f"http://127.0.0.1:{port}")
    assert "etcd at" in a.warnings() or "no etcd" in a.warnings(), a.warnings()


@pytest.mark.long
def test_a_user_who_may_only_read(cluster, own, tmp_path):
    code = lambda s: base64.b64encode(s.encode()).decode()
    own.ask("auth/user/add", {"name": "root", "password": "r"})
    own.ask("auth/user/grant", {"user": "root", "role": "root"})
    own.ask("auth/user/add", {"name": "reader", "password": "p"})
    own.ask("auth/role/add", {"name": "reads"})
    own.ask("auth/role/grant", {"name": "reads", "perm": {"permType": "READ", "key": code("/"), "range_end": code("0")}})
    own.ask("auth/user/grant", {"user": "reader", "role": "reads"})
    own.ask("auth/user/add", {"name": "writer", "password": "p:q"})
    own.ask("auth/role/add", {"name": "writes"})
    own.ask("auth/role/grant", {"name": "writes", "perm": {"permType": "READWRITE", "key": code("/"), "range_end": code("0")}})
    own.ask("auth/user/grant", {"user": "writer", "role": "writes"})
    own.ask("auth/enable", {})
    for user, words in (("reader:p", "permission denied"), ("reader:wrong", "authentication failed"), (None, "user name")):
        file = tmp_path / "user"
        file.write_text(f"{user}\n")
        a = cluster("a", at=own, args=["--cluster-user", file] if user else [])
        assert words in a.warnings(), (user, a.warnings())
        a.stop()
    file.write_text("writer:p:q\n")
    a = cluster("a", at=own, args=["--cluster-user", file])
    a.sees(a="joined")
    own.stop()  # with it goes the token that it gave
    lib.wait_for(lambda: "cannot be reached" in a.warnings(), 30, "the warning")
    own.start()
    lib.wait_for(lambda: "cluster" not in a.warnings(), 30, "the cluster again")
    a.sees(a="joined")


@pytest.mark.long
def test_a_token_of_before_a_change_of_users(cluster, tmp_path):
    """A JWT says of which revision of etcd's users it is: etcd refuses it behind any change of them."""
    key, public = tmp_path / "jwt.key", tmp_path / "jwt.pub"
    etcd.openssl("genrsa", "-out", key, 2048)
    etcd.openssl("rsa", "-in", key, "-pubout", "-out", public)
    server = etcd.Etcd(tmp_path, "--auth-token", f"jwt,pub-key={public},priv-key={key},sign-method=RS256,ttl=1h", "--bcrypt-cost", "4")
    try:
        server.ask("auth/user/add", {"name": "root", "password": "r"})
        server.ask("auth/user/grant", {"user": "root", "role": "root"})
        server.ask("auth/enable", {})
        (tmp_path / "user").write_text("root:r\n")
        a = cluster("a", at=server, args=["--cluster-user", tmp_path / "user"])
        a.sees(a="joined")
        login = lambda: server.ask("auth/authenticate", {"name": "root", "password": "r"})["token"]
        server.ask("auth/user/add", {"name": "other", "password": "o"}, login())
        code = lambda s: base64.b64encode(s.encode()).decode()
        server.ask("kv/put", {"key": code(f"/{tmp_path.name}/drained/a"), "value": code("{}")}, login())
        a.sees(a="drained")  # it reads etcd again
        assert "auth store" not in a.warnings()
    finally:
        server.stop()


@pytest.mark.parametrize("args, words", [
    (["--cluster", "http://127.0.0.1:1"], "also needs --node NAME and --advertise"),
    (["--node", "a"], "--cluster names its etcd"),
    (["--cluster", "ftp://x:1", "--node", "a", "--advertise", "127.0.0.1:1"], "is not http://HOST:PORT"),
    (["--cluster", "http://127.0.0.1:1,", "--node", "a", "--advertise", "127.0.0.1:1"], "is not http://HOST:PORT"),
    (["--cluster", "http://127.0.0.1", "--node", "a", "--advertise", "127.0.0.1:1"], "is not http://HOST:PORT"),
    (["--cluster", "http://127.0.0.1.example.com:1", "--node", "a", "--advertise", "127.0.0.1:1"], "beyond loopback"),
    (["--cluster", "http://etcd:1", "--node", "a", "--advertise", "127.0.0.1:1"], "beyond loopback"),
    (["--cluster", "http://127.0.0.1:1", "--node", "-a", "--advertise", "127.0.0.1:1"], "is no name"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a/b", "--advertise", "127.0.0.1:1"], "is no name"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a" * 65, "--advertise", "127.0.0.1:1"], "is no name"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "127.0.0.1:0"], "is not HOST:PORT"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "host:8427"], "beyond loopback"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "127.0.0.1:1", "--cluster-ttl", "1s"], "from 2s to 1h"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "127.0.0.1:1", "--cluster-ttl", "2500ms"], "whole seconds"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "127.0.0.1:1", "--cluster-prefix", "dcpd"], "is not '/' and a name"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "127.0.0.1:1", "--cluster-cert", "/x"], "go together"),
    (["--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise", "host:8427", "--insecure-http"], "no --listen is for"),
])
def test_options_that_cannot_be(tmp_path, args, words):
    r = run("--state-dir", tmp_path, "--listen", "127.0.0.1:0", *args, "--check-config")
    assert r.returncode == 2 and words in r.stderr, r


def test_a_node_that_only_its_own_host_reaches(tmp_path):
    r = run("--state-dir", tmp_path, "--listen", f"unix:{tmp_path}/s", "--cluster", "http://127.0.0.1:1", "--node", "a", "--advertise",
            "127.0.0.1:8427", "--check-config")
    assert r.returncode == 2 and "no --listen is for" in r.stderr, r
