"""What lies in etcd, or says it is a node, and is none of dcpd's or of another version: no key stops a node or a take-over, and no job runs
twice because of one."""
import contextlib
import json
import os
import socket

import etcd
import pytest
from test_cluster import cluster, pair, server  # noqa: F401
from test_cluster_jobs import save
from test_cluster_takeover import big, known_to_etcd, slow_reshard

import dcpd as lib


def prefix(tmp_path):
    return f"/{tmp_path.name}"


def at_work(cluster):  # noqa: F811
    """A node, and a job of it that runs for a while."""
    a = cluster("a")
    a.sees(a="joined")
    big(a, "src")
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    return a, job


@pytest.mark.long
def test_foreign_keys_stop_no_take_over(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    big(a, "src")
    for i in range(40):  # more than a page of them, in front of the job's
        server.put(f"{prefix(tmp_path)}/live/a/0-{i:03}", "{}")
    server.put(f"{prefix(tmp_path)}/live/a/{'0' * 2000}", "{}")
    server.put(f"{prefix(tmp_path)}/live/a/01M86N1P3035BHT4CWYJAJ9YD0", "no JSON")
    server.put(f"{prefix(tmp_path)}/live/a/01M86N1P3035BHT4CWYJAJ9YD1", '{"storages": [1, {"main": 3}]}')
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    a.kill()
    lib.wait_for(lambda: b.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 30, "b has it")
    assert b.api.wait(job, 60)["state"] == "succeeded"
    a.start()
    lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 20, "a has asked etcd")
    save(a, "after")


@pytest.mark.long
def test_own_keys_that_are_none_do_not_hold_jobs_up(cluster, server, tmp_path):  # noqa: F811
    a, job = at_work(cluster)
    for i in range(501):  # more than a page, behind the job's
        server.put(f"{prefix(tmp_path)}/live/a/z{i:03}", "{}")
    a.kill()
    a.start()
    a.sees(a="joined")
    assert a.api.wait(job, 60)["state"] == "succeeded"


@pytest.mark.long
def test_a_new_state_directory_of_a_name_is_the_next_owner(cluster, server, tmp_path):  # noqa: F811
    a, job = at_work(cluster)
    a.kill()
    lib.wait_for(lambda: f"{prefix(tmp_path)}/alive/a" not in server.keys(f"{prefix(tmp_path)}/alive/"), 20, "its lease is over")
    other = cluster("a")
    end = other.api.wait(job, 60)
    assert end["state"] == "succeeded" and [(t["from"], t["to"]) for t in end["taken_over"]] == [("a", "a")], end
    assert os.path.exists(tmp_path / "shared" / f".dcpd-{job}-fence+0"), "the daemon that was there is kept out"
    other.stop()
    a.start()
    a.sees(a="joined")
    lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["state"] in ("failed", "succeeded"), 30, "it knows")
    assert not [n for n in os.listdir(tmp_path / "shared") if n.startswith(f".dcpd-{job}-") and "fence" not in n]


def test_a_value_that_is_none_of_dcpds_is_named_and_passed_over(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    key = f"{prefix(tmp_path)}/members/odd"
    server.put(key, "[]")
    server.put(f"{prefix(tmp_path)}/members/b", "no JSON")
    a.sees(a="joined", b="joined", odd="away")
    lib.wait_for(lambda: key in a.warnings() and "members/b" not in a.warnings(), 20, "b describes itself anew")
    shown = a.api.get("/v1/nodes").ok(200)
    assert key in shown["problem"] and a.api.get("/readyz").ok(200)["status"] == "ready", shown
    assert next(n for n in shown["nodes"] if n["name"] == "b")["advertise"] == f"127.0.0.1:{b.http}"
    save(a, "beside")
    a.ctl("forget", "odd", check=True)
    lib.wait_for(lambda: not a.warnings(), 20, "no warning")


def test_keys_among_the_withdrawn_that_no_node_has_written_are_passed_over(pair, server, tmp_path):  # noqa: F811
    """More than a page of such keys, too: a node names no copies until it has read all keys."""
    a, b = pair
    at = f"{prefix(tmp_path)}/withdrawn/b/"
    for i in range(120):
        server.put(f"{at}odd\0{i}", "[]")
    server.put(at + "x" * 2000, "[]")
    server.put(f"{at}none", "[]")
    b.kill()
    b.start()
    b.sees(a="joined", b="joined")
    lib.wait_for(lambda: f"{at}none" not in server.keys(at), 20, "the key that the node has read goes")


def test_a_node_of_another_protocol_is_shown_and_sent_nothing(pair, server, tmp_path):  # noqa: F811
    """As in an upgrade, node by node, to a version whose nodes speak otherwise."""
    a, b = pair
    at = f"{prefix(tmp_path)}/"
    member = server.keys(f"{at}members/")[f"{at}members/b"]
    with socket.create_server(("127.0.0.1", 0)) as newer:
        where = f"127.0.0.1:{newer.getsockname()[1]}"
        server.put(f"{at}members/aa", json.dumps({**member, "id": "n", "mark": "ZZZZZZZ", "advertise": where, "url": f"http://{where}",
                                                  "version": "9.0.0", "protocol": 2}))
        server.put(f"{at}alive/aa", json.dumps({"id": "n", "advertise": where, "jobs": 0, "draining": False}))
        for d in pair:
            d.sees(a="joined", aa="joined", b="joined")
        save(a, "one")
        assert a.api.get("/v1/jobs").ok(200)["nodes_silent"] == ["aa"]
        a.api.post("/v1/nodes/a:drain?wait=20s").ok(200)
        job = a.api.submit("verify", source={"storage": "main", "name": "one"}, level="structure")
        assert a.api.wait(job["id"])["node"] == "b", "aa, which has fewer jobs and is the first by name, is passed over"
        newer.setblocking(False)
        with pytest.raises(BlockingIOError):
            newer.accept()


def test_a_node_says_that_it_is_not_where_the_others_look_for_it(cluster):  # noqa: F811
    a = cluster("a")
    a.sees(a="joined")
    nowhere = cluster("b", advertise="127.0.0.1:1")
    lib.wait_for(lambda: "does not find itself at 127.0.0.1:1, where" in nowhere.warnings(), 20, "nobody listens there")
    assert "(--advertise)" in nowhere.api.get("/v1/nodes").ok(200)["problem"]
    stranger = cluster("c", advertise=f"127.0.0.1:{a.http}")
    lib.wait_for(lambda: "another server answers" in stranger.warnings(), 20, "the first node listens there")
    said = f'node "c" advertises 127.0.0.1:{a.http}, as this one does'
    lib.wait_for(lambda: said in a.warnings(), 20, "so says the first node")
    sd = lib.fresh()
    p = a.api.post("/v1/jobs", {"kind": "load", "source": {"state_dict": sd, "node": "c"}, "target": {"state_dict": sd}})
    assert "as this one does" in p.problem("cluster_unavailable")["detail"], "it does not ask itself instead"
    assert a.api.get("/readyz").ok(200)["status"] == "ready"


def test_a_node_on_loopback_of_another_host_is_named(pair, server, tmp_path):  # noqa: F811
    a, _ = pair
    assert not a.warnings()
    at = f"{prefix(tmp_path)}/"
    member = server.keys(f"{at}members/")[f"{at}members/b"]
    where = "127.0.0.1:65000"
    for name, place in (("far", "00000000-0000-0000-0000-000000000000/1"), ("old", None), ("near", member["place"])):
        there = {k: v for k, v in {**member, "id": name, "mark": "ZZZZZZZ", "advertise": where, "url": f"http://{where}",
                                   "place": place}.items() if v}
        server.put(f"{at}members/{name}", json.dumps(there))
        server.put(f"{at}alive/{name}", json.dumps({"id": name, "advertise": where, "jobs": 0, "draining": False}))
    said = lib.wait_for(lambda: a.warnings(), 20, "a warning")
    assert said.startswith(f'node "far" is on another host, and advertises {where}, which is on loopback') and "more" not in said, said


@pytest.mark.long
def test_values_of_a_megabyte_are_no_end_of_a_node(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    for i in range(12):
        server.put(f"{prefix(tmp_path)}/members/m{i}", json.dumps({"version": "x" * 1_000_000, "storages": [{"deep": [[[]]]}] * 1000}))
    server.put(f"{prefix(tmp_path)}/members/deep", "[" * 100_000)
    save(a, "beside")
    lib.wait_for(lambda: "none of dcpd's" in a.warnings(), 20, "it says that it cannot read them")
    a.api.get("/v1/nodes").ok(200)
    for name in [*(f"m{i}" for i in range(12)), "deep"]:
        server.ask("kv/deleterange", {"key": etcd.base64.b64encode(f"{prefix(tmp_path)}/members/{name}".encode()).decode()})
    a.sees(a="joined", b="joined")


def test_garbage_at_the_port_of_a_node_is_no_node(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    secret = server.keys(f"{prefix(tmp_path)}/")[f"{prefix(tmp_path)}/secret"]["secret"]
    begun = b"GET /v1/jobs HTTP/1.1\r\nAuthorization: Bearer "
    for junk, said in ((b"\0" * 4096, b""), (b"\xff" * 70000, b"HTTP/1.1 414 "), (begun + b"a" * 100000, b"HTTP/1.1 431 ")):
        with socket.create_connection(("127.0.0.1", b.http), 20) as s:
            got = b""
            with contextlib.suppress(ConnectionError):  # it may hang up before all is sent
                s.sendall(junk)
                got = s.recv(len(said), socket.MSG_WAITALL)
            assert got in (b"", said)
    b.sees(a="joined", b="joined")
    for d in (a, b):
        assert secret not in d.log.read_text(errors="replace")
        for pid in (d.proc.pid, *d.workers()):
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                assert secret.encode() not in f.read()
