"""An Idempotency-Key that several nodes of a cluster get makes one job."""
import concurrent.futures

import pytest
from test_cluster import cluster, own, pair, server  # noqa: F401
from test_cluster_jobs import save

import dcpd as lib

VERIFY = {"kind": "verify", "source": {"storage": "main", "name": "run/step-1"}, "level": "structure"}


def send(d, key, body=VERIFY):
    return d.api.post("/v1/jobs", body, headers={"Idempotency-Key": key})


def claims(server, tmp_path):  # noqa: F811
    return [k for k in server.keys(f"/{tmp_path.name}/") if "/keys/" in k]


@pytest.mark.long
def test_a_key_makes_one_job_whichever_nodes_get_it(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    save(a, "run/step-1")
    first = send(a, "k1").ok(202)
    again = send(b, "k1")
    assert again.ok(202)["id"] == first["id"] and again.headers["Idempotency-Replayed"] == "true"
    assert again.headers["Location"] == f"/v1/jobs/{first['id']}"
    p = send(b, "k1", {**VERIFY, "level": "digest"}).problem("idempotency_mismatch", status=422)
    assert first["id"] in p["detail"]
    assert send(b, "k2").ok(202)["id"] != first["id"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for n in range(3):
            got = [*pool.map(lambda i: send(pair[i % 2], f"race{n}"), range(8))]
            made = {g.json["id"] for g in got if g.status == 202}
            assert len(made) == 1, made
            for g in got:
                if g.status != 202:
                    assert g.problem("idempotency_in_flight", status=409)["retryable"]
            assert {send(d, f"race{n}").ok(202)["id"] for d in pair} == made
    known = len(claims(server, tmp_path))
    missing = {**VERIFY, "source": {"storage": "main", "name": "none"}}
    send(a, "k3", missing).problem("not_found")
    lib.wait_for(lambda: len(claims(server, tmp_path)) == known, 20, "a request that was refused keeps no claim")
    assert send(b, "k3").ok(202)["node"] == "b"
    assert save(a, "run/step-2")["node"] == "a" and len(claims(server, tmp_path)) == known + 1, "its own memory: no other node can do it"
    b.api.wait(send(b, "k2").ok(202)["id"])


@pytest.mark.long
def test_the_key_of_a_node_that_is_away(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    save(b, "run/step-1")
    job = a.api.wait(send(a, "k").ok(202)["id"])["id"]
    server.knows(tmp_path.name, job)
    a.kill()
    b.sees(a="away", b="joined")
    again = send(b, "k")
    assert again.ok(202)["id"] == job and again.headers["Idempotency-Replayed"] == "true"
    send(b, "k", {**VERIFY, "level": "digest"}).problem("idempotency_mismatch")
    key = claims(server, tmp_path)[0]
    claim = {**server.keys(f"/{tmp_path.name}/")[key], "job": f"{job[:10]}0000000000{job[20:]}"}
    server.put(key, lib.json.dumps(claim))  # a died before its job was known
    assert send(b, "k").problem("cluster_unavailable")["retryable"]
    assert b.ctl("forget", "a").returncode == 0
    lib.wait_for(lambda: send(b, "k").status == 202, 20, "nobody else can have done it")
    assert send(b, "k").ok(202)["node"] == "b"


def test_a_key_whose_job_was_never_made_is_used_again(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    save(a, "run/step-1")
    job = send(a, "k").ok(202)["id"]
    key = claims(server, tmp_path)[0]
    claim = server.keys(f"/{tmp_path.name}/")[key]
    assert claim["job"] == job and claim["node"] == "a"
    unused = f"{job[:10]}0000000000{job[20:]}"
    for n in range(2):  # as if a had died between claim and job; then its journal had forgotten the key
        k = f"other{n}"
        send(b, k).ok(202)
        at = next(x for x in claims(server, tmp_path) if server.keys(f"/{tmp_path.name}/")[x].get("node") == "b")
        server.put(at, lib.json.dumps({**claim, "job": unused if n == 0 else job}))
        got = send(a, k).ok(202)
        assert got["node"] == "a" and (got["id"] == unused if n == 0 else got["id"] not in (job, unused))


def test_while_etcd_is_away_each_node_has_its_own_keys(cluster, own):  # noqa: F811
    a = cluster("a", at=own)
    a.sees(a="joined")
    save(a, "run/step-1")
    own.stop()
    assert send(a, "k").ok(202)["id"] == send(a, "k").ok(202)["id"]


def test_claims_are_pruned(cluster, server, tmp_path):  # noqa: F811
    a = cluster("a", args=["--keep-jobs", "3/30d"])
    a.sees(a="joined")
    save(a, "run/step-1")
    seen = set()
    for n in range(6):
        a.api.wait(send(a, f"k{n}").ok(202)["id"])
        seen |= set(claims(server, tmp_path))
    assert len(seen) == 6
    kept = send(a, "k5").ok(202)["id"]
    a.stop()
    a.start()
    left = lib.wait_for(lambda: len(got := claims(server, tmp_path)) == 3 and got, 20, "the oldest are gone")
    assert kept in [server.keys(f"/{tmp_path.name}/")[k]["job"] for k in left]
