"""Any node of a cluster answers for every job, and work for a drained node is done by another."""
import json
import socket

import etcd
import pytest
from etcd_members import Line
from test_cluster import cluster, held_job, own, pair, server  # noqa: F401

import dcpd as lib


def save(d, name):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
    return d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})


def test_any_node_answers_for_a_job(pair):
    a, b = pair
    done = save(a, "run/step-1")
    assert done["node"] == "a" and done["nodes"] == ["a"]
    assert b.api.get(f"/v1/jobs/{done['id']}").ok(200) == a.api.get(f"/v1/jobs/{done['id']}").ok(200)
    assert b.api.get(f"/v1/jobs/{done['id']}/plan").ok(200) == a.api.get(f"/v1/jobs/{done['id']}/plan").ok(200)
    first = b.api.get(f"/v1/jobs/{done['id']}")
    assert b.api.get(f"/v1/jobs/{done['id']}", headers={"If-None-Match": first.headers["ETag"]}).status == 304
    job = held_job(a, "held")
    assert b.api.get(f"/v1/jobs/{job['id']}?wait=100ms").ok(200)["state"] == "queued"
    assert b.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)["node"] == "a"
    assert b.api.wait(job)["state"] == "cancelled"
    b.api.post(f"/v1/jobs/{job['id']}:cancel").problem("state_conflict", status=409)
    assert b.api.post(f"/v1/jobs/{job['id']}:retry").ok(202)["attempt"] == 2
    b.api.post(f"/v1/jobs/{job['id']}:cancel").ok(202)
    b.api.get(f"/v1/jobs/{job['id']}?wayt=1s").problem("unknown_field", "invalid_request")
    b.api.get("/v1/jobs/01J00000000000000000000000").problem("not_found")
    assert json.loads(b.ctl("job", done["id"], "--json").stdout)["node"] == "a"


def test_a_request_goes_to_no_other_host(pair):
    """Behind a node's URL, a path that begins with "@" would make the node's address a user, and of what follows the host."""
    a, b = pair
    job = save(a, "run/step-1")["id"]
    with socket.create_server(("127.0.0.1", 0)) as stranger, socket.socket(socket.AF_UNIX) as c:
        stranger.setblocking(False)
        c.connect(str(b.socket))
        c.settimeout(30)
        target = f"@127.0.0.1:{stranger.getsockname()[1]}/x://h/v1/jobs/{job}"
        c.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = c.makefile("rb").read()
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))


def test_the_list_has_the_jobs_of_all_nodes(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    ids = [save(d, f"run/step-{i}")["id"] for i, d in enumerate((a, b, a, b, b))]
    for d in (a, b):
        assert [j["id"] for j in d.api.get("/v1/jobs").ok(200)["jobs"]] == ids[::-1]
        assert "nodes_silent" not in d.api.get("/v1/jobs").ok(200)
        got, token = [], ""
        while token is not None:
            page = d.api.get(f"/v1/jobs?page_size=2{token and '&page_token=' + token}").ok(200)
            assert len(page["jobs"]) <= 2
            got += [j["id"] for j in page["jobs"]]
            token = page.get("next_page_token")
        assert got == ids[::-1]
        assert [j["node"] for j in d.api.get("/v1/jobs?filter=target%3Dmain%3Arun%2Fstep-3").ok(200)["jobs"]] == ["b"]
        lines = d.api.get("/v1/jobs", headers={"Accept": "application/x-ndjson"}).body.decode().splitlines()
        assert [json.loads(line)["id"] for line in lines] == ids[::-1]
    a.api.get("/v1/jobs?filter=what").problem("validation_failed")
    a.api.get("/v1/jobs?page_token=x").problem("validation_failed", "invalid_request")
    for job in ids:
        server.knows(tmp_path.name, job)
    b.kill()
    a.sees(a="joined", b="away")
    page = a.api.get("/v1/jobs").ok(200)
    assert [j["id"] for j in page["jobs"]] == ids[::-1] and page["nodes_silent"] == ["b"]
    assert [j.get("node_away", False) for j in page["jobs"]] == [j["node"] == "b" for j in page["jobs"]]
    page = a.api.get("/v1/jobs?page_size=2").ok(200)
    assert [j["id"] for j in page["jobs"]] == ids[:2:-1] and page["next_page_token"] == ids[3]
    page = a.api.get("/v1/jobs?filter=target%3Dmain%3Arun%2Fstep-3").ok(200)
    assert [j["id"] for j in page["jobs"]] == [ids[3]]
    known = a.api.get(f"/v1/jobs/{ids[1]}").ok(200)
    assert known["state"] == "succeeded" and known["node"] == "b" and known["node_away"]
    p = a.api.post(f"/v1/jobs/{ids[1]}:retry").problem("cluster_unavailable")
    assert p["detail"] == 'node "b" is away' and p["retryable"]
    b.start()
    a.sees(a="joined", b="joined")
    assert "node_away" not in a.api.get(f"/v1/jobs/{ids[1]}").ok(200)


@pytest.mark.long
def test_a_node_that_will_not_come_back_is_forgotten(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    done, waits = save(b, "run/step-1")["id"], held_job(b, "held")["id"]
    a.api.post("/v1/nodes/b:forget").problem("state_conflict")
    a.api.post("/v1/nodes/c:forget").problem("not_found")
    server.knows(tmp_path.name, done)
    server.knows(tmp_path.name, waits, "queued")
    b.kill()
    a.sees(a="joined", b="away")
    assert a.api.get(f"/v1/jobs/{waits}?wait=100ms").ok(200)["state"] == "queued"
    assert a.ctl("forget", "b").stdout == "b is forgotten\n"
    a.sees(a="joined")
    assert a.api.get(f"/v1/jobs/{done}").ok(200)["state"] == "succeeded"
    lost = a.api.get(f"/v1/jobs/{waits}").ok(200)
    assert lost["state"] == "failed" and "was forgotten" in lost["error"]["detail"], lost
    assert [j["id"] for j in a.api.get("/v1/jobs").ok(200)["jobs"]] == [waits, done]
    b.start()
    a.sees(a="joined", b="joined")
    assert a.api.get(f"/v1/jobs/{waits}").ok(200)["node"] == "b"


@pytest.mark.long
def test_work_for_a_drained_node_is_done_by_another(pair):
    a, b = pair
    save(a, "run/step-1")
    a.api.post("/v1/nodes/b:drain?wait=30s").ok(200)
    b.sees(a="joined", b="drained")
    body = {"kind": "verify", "source": {"storage": "main", "name": "run/step-1"}, "level": "digest"}
    got = b.api.post("/v1/jobs", body, headers={"Idempotency-Key": "k"})
    job = got.ok(202)
    assert job["node"] == "a" and got.headers["Location"] == f"/v1/jobs/{job['id']}"
    again = b.api.post("/v1/jobs", body, headers={"Idempotency-Key": "k"})
    assert again.ok(202)["id"] == job["id"] and again.headers["Idempotency-Replayed"] == "true"
    b.api.post("/v1/jobs", {**body, "level": "structure"}, headers={"Idempotency-Key": "k"}).problem("idempotency_mismatch", status=422)
    assert b.api.wait(job)["state"] == "succeeded"
    assert b.api.post("/v1/jobs?dry_run=true", {"kind": "reshard", "source": body["source"],
                                                "target": {"storage": "main", "name": "x", "world_size": 2}}).ok(200)
    b.api.post("/v1/jobs", {**body, "source": {"storage": "none", "name": "x"}}).problem("draining")
    assert save(b, "run/step-2")["node"] == "b", "a trainer's save is never sent away, nor refused"
    a.api.post("/v1/nodes/a:drain?wait=30s").ok(200)
    b.sees(a="drained", b="drained")
    assert "no other node" in b.api.post("/v1/jobs", body).problem("draining")["detail"]


@pytest.mark.long
def test_a_node_that_hangs_is_given_up(pair):
    a, b = pair
    done = save(b, "run/step-1")
    with lib.stopped(b.proc.pid):
        assert a.api.get("/v1/jobs").ok(200)["nodes_silent"] == ["b"]
        assert a.api.get(f"/v1/jobs/{done['id']}").ok(200)["node_away"]
    lib.wait_for(lambda: "node_away" not in a.api.get(f"/v1/jobs/{done['id']}").ok(200), 20, "the node again")


def test_only_nodes_speak_for_others(pair, server, tmp_path):
    a, _ = pair
    secret = server.keys(f"/{tmp_path.name}/")[f"/{tmp_path.name}/secret"]["secret"]

    def ask(bearer, caller, method="GET", path="/v1/jobs"):
        return lib.Client(tcp=("127.0.0.1", a.http), headers={"Authorization": f"Bearer {bearer}", **caller}).request(method, path)

    caller = {"Dcpd-Caller": "0 3 1 -"}
    assert ask(secret, caller).status == 200
    for wrong in ("", secret[:-1], secret + "0", secret.upper(), "0" * len(secret)):
        ask(wrong, caller).problem("unauthenticated")
    ask(secret, {}).problem("invalid_request")
    for bad in ("", "root", "0 9 1 -", "0 0 1 -", "-1 3 1 -", "+0 3 1 -", "4294967295 3 1 -", "4294967296 3 1 -",
                "99999999999999999999 3 1 -", "0 -3 1 -", "0 3 2 -", "0 3 -1 -", "0 3 1", "0 3 1 ", "0  3 1 -", "0\t3 1 -", "0x0 3 1 -",
                "0 3 1 - -", "0 3 1 " + "n" * 65, "0 3 1 " + "n" * 5000):
        ask(secret, {"Dcpd-Caller": bad}).problem("invalid_request")
    assert ask(secret, {"Dcpd-Caller": "4294967294 3 1 " + "n" * 64}).status == 200
    read = {"Dcpd-Caller": "1000 1 0 ci"}
    assert ask(secret, read).status == 200
    ask(secret, read, "POST", "/v1/nodes/a:drain").problem("forbidden")


@pytest.mark.long
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_ends_that_etcd_did_not_hear_of_are_told_after_a_restart(cluster, server, tmp_path, end):  # noqa: F811
    """Of a job that no other node may take over nothing else in etcd says that it is unfinished."""
    line = Line(server.url)
    try:
        a = cluster("a", at=line.url)
        a.sees(a="joined")
        save(a, "run/step-1")
        line.cut()
        ids = [a.api.run("verify", source={"storage": "main", "name": "run/step-1"}, level="structure")["id"] for _ in range(25)]
        a.kill() if end == "kill" else a.stop()
        line.mend()
        a.start()
        for job in ids:
            server.knows(tmp_path.name, job)
    finally:
        line.close()


@pytest.mark.long
def test_records_of_jobs_are_pruned_and_those_that_have_not_ended_stay(cluster, server, tmp_path):  # noqa: F811
    """--keep-jobs is for those of all nodes together; what waits for a node stays until the node is forgotten."""
    at = f"/{tmp_path.name}/jobs/"
    a, b = cluster("a", "b", args=["--keep-jobs", "72/30d"])
    a.sees(a="joined", b="joined")
    waiting = [f"01J000000000000000000{n:02}BBB" for n in range(70)]  # more than a page of them
    b.stop()
    for job in waiting:
        server.put(f"{at}{job}", json.dumps({"node": "b", "job": {"id": job, "kind": "save", "state": "queued", "node": "b"}}))
    save(a, "run/step-1")
    ids = [a.api.run("verify", source={"storage": "main", "name": "run/step-1"}, level="structure")["id"] for _ in range(5)]
    for job in ids:
        server.knows(tmp_path.name, job)
    a.stop()
    a.start()
    left = lib.wait_for(lambda: len(got := server.keys(at)) == 72 and sorted(got), 20, "the oldest ended ones are gone")
    assert left == [f"{at}{job}" for job in (*waiting, *ids[-2:])]
    a.ctl("forget", "b", check=True)
    for _ in range(2):
        server.knows(tmp_path.name, a.api.run("verify", source={"storage": "main", "name": "run/step-1"}, level="structure")["id"])
    a.stop()
    a.start()
    lib.wait_for(lambda: not {k.removeprefix(at) for k in server.keys(at)} & set(waiting[:2]), 20, "nobody has them")
