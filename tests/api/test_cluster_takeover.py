"""Jobs of a node that is away: any node answers for them, and another node takes over those that need only shared storages. A real etcd,
and daemons that share a folder; one is killed or paused."""
import contextlib
import json
import os
import re
import signal
import time

import pytest
from etcd_members import Line
from host import WallClock
from test_cluster import cluster, own, pair, server  # noqa: F401
from test_cluster_jobs import save

import dcpd as lib

TTL = 2


def big(d, name, mib=24):
    """A checkpoint whose reshard takes a while at a background pace."""
    sd = lib.fresh()
    blob = os.urandom(1 << 20)
    d.put(sd, [lib.image({f"t{i}": ("U8", [1 << 20], blob) for i in range(mib)})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})


def slow_reshard(d, source, target, **options):
    return d.api.submit("reshard", source={"storage": "main", "name": source}, target={"storage": "main", "name": target, "world_size": 2},
                        options={"pace": "background", **options})


def known_to_etcd(d, job):
    return lib.wait_for(lambda: "ownership" in (got := d.api.get(f"/v1/jobs/{job}").ok(200)) and got, 20, "the job is in etcd")


def no_fence_stays(tmp_path):
    """The owner that it kept out is back, and knows that the job is another's."""
    lib.wait_for(lambda: not list((tmp_path / "shared").rglob(".dcpd-*-fence*")), 20, "the fence is gone")


def test_a_job_of_a_dead_node_is_taken_over(pair):
    a, b = pair
    big(a, "src")
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    a.kill()
    lib.wait_for(lambda: b.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 30, "b has it")
    end = b.api.wait(job, 60)
    assert end["state"] == "succeeded", end
    assert end["node"] == "b" and [(t["from"], t["to"]) for t in end["taken_over"]] == [("a", "b")], end
    assert b.api.run("verify", source={"storage": "main", "name": "dst"}, level="digest")
    shown = b.ctl("job", job).stdout
    assert re.search(r"^node +b$", shown, re.M) and re.search(r"TAKEN-OVER +FROM +TO +WHY\n\S+Z +a +b +the lease", shown), shown
    rows = {row.split()[0]: row.split() for row in b.ctl("jobs").stdout.splitlines()}
    assert rows["ID"][-2:] == ["NODE", "TAKEN-OVER"] and rows[job][-2:] == ["b", "1"], rows
    a.start()
    lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 20, "a has asked etcd")
    assert [j["id"] for j in a.api.get("/v1/jobs").ok(200)["jobs"]].count(job) == 1


@pytest.mark.long
def test_what_needs_the_dead_nodes_memory_waits_for_it(pair, server, tmp_path):  # noqa: F811
    from test_cluster import held_job
    a, b = pair
    job = held_job(a, "held")["id"]
    server.knows(tmp_path.name, job, "queued")
    a.kill()
    b.sees(a="away", b="joined")
    time.sleep(2 * TTL)
    known = b.api.get(f"/v1/jobs/{job}").ok(200)
    assert known["node"] == "a" and known["node_away"] and "taken_over" not in known, known


def paused_worker(a, job):
    """Stops the daemon and its workers while the job runs."""
    lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["state"] == "running", 20, "it runs")
    pids = [a.proc.pid, *a.workers()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def go_on(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # a daemon that goes on ends workers whose job another node has
            os.kill(pid, signal.SIGCONT)


def test_a_paused_owner_does_not_commit_what_another_node_has_taken(pair, tmp_path):
    a, b = pair
    big(a, "src", 48)
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    pids = paused_worker(a, job)
    try:
        lib.wait_for(lambda: (j := b.api.get(f"/v1/jobs/{job}").ok(200))["node"] == "b" and j, 30, "b has it")
        end = b.api.wait(job, 60)
        inode = os.stat(tmp_path / "shared" / "dst").st_ino
    finally:
        go_on(pids)
    assert end["state"] == "succeeded" and end["node"] == "b", end
    lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b" and a.sees(a="joined", b="joined"), 30, "a knows")
    lib.wait_for(lambda: not a.api.get("/v1/jobs?filter=state%3Drunning").ok(200)["jobs"], 30, "a has given it up")
    assert os.stat(tmp_path / "shared" / "dst").st_ino == inode, "it was committed once"
    no_fence_stays(tmp_path)
    assert [j["state"] for j in a.api.get("/v1/jobs").ok(200)["jobs"] if j["id"] == job] == ["succeeded"]
    b.api.run("verify", source={"storage": "main", "name": "dst"}, level="digest")


@pytest.mark.long
def test_which_job_came_later_is_not_told_by_nodes_clocks(cluster, server, tmp_path):  # noqa: F811
    """The owner dies with a job that replaces a checkpoint. Was that saved before the job was made, or instead of it?"""
    clock, where = WallClock(tmp_path / "clock"), {"storage": "main", "name": "dst"}
    clock.step(-300)
    a, b = cluster("a", env=clock.env), cluster("b")
    a.sees(a="joined", b="joined")
    big(b, "src")

    def left_by_a():
        job = slow_reshard(a, "src", "dst", overwrite=True)["id"]
        known_to_etcd(a, job)
        a.kill()
        lib.wait_for(lambda: b.nodes()["a"] == "away", 20, "a is away")
        return job

    def taken(job):
        return lib.wait_for(lambda: (j := b.api.get(f"/v1/jobs/{job}").ok(200))["node"] == "b" and j["state"] in lib.TERMINAL and j, 30,
                            "b has ended it")

    before = b.api.run("reshard", source={"storage": "main", "name": "src"}, target=where)["id"]
    server.knows(tmp_path.name, before)
    job = left_by_a()
    assert job < before and taken(job)["state"] == "succeeded"

    clock.step(300)
    a.start()
    a.sees(a="joined", b="joined")
    lib.wait_for(lambda: not any("/left/" in k for k in server.keys(f"/{tmp_path.name}/")), 20, "a knows what it has lost")
    b.api.post("/v1/nodes/b:drain").ok(200)
    job = left_by_a()
    sd = lib.fresh()
    b.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
    later = b.api.run("save", source={"state_dict": sd}, target=where, options={"overwrite": True})["id"]
    b.api.post("/v1/nodes/b:undrain").ok(200)
    end = taken(job)
    assert later < job and end["error"]["code"] == "state_conflict" and later in end["error"]["detail"], end
    assert json.loads((tmp_path / "shared/dst/.dcpd.json").read_bytes())["job"] == later


@pytest.mark.long
def test_a_restarted_owner_asks_before_it_goes_on(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    big(a, "src")
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    a.kill()
    lib.wait_for(lambda: b.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 30, "b has it")
    a.start()  # while b is at it
    a.sees(a="joined", b="joined")
    end = a.api.wait(job, 60)
    assert end["node"] == "b" and end["state"] == "succeeded", end
    assert a.api.get(f"/v1/jobs/{job}").ok(200)["state"] == "succeeded"
    secret = server.keys(f"/{tmp_path.name}/")[f"/{tmp_path.name}/secret"]["secret"]
    node = lib.Client(tcp=("127.0.0.1", a.http), headers={"Authorization": f"Bearer {secret}", "Dcpd-Caller": "0 3 1 -"})
    node.get(f"/v1/jobs/{job}").problem("job_moved")
    p = a.api.post(f"/v1/jobs/{job}:retry").problem("state_conflict")
    assert "succeeded" in p["detail"]
    no_fence_stays(tmp_path)


@pytest.mark.long
def test_a_node_that_died_before_it_told_of_an_end_gives_way(cluster, server, tmp_path):  # noqa: F811
    """Its journal has the job's end, and nothing there says that etcd lacks it."""
    line = Line(server.url)
    try:
        a, b = cluster("a", at=line.url, ttl="4s"), cluster("b", ttl="4s")
        a.sees(a="joined", b="joined")
        big(a, "src")
        job = slow_reshard(a, "src", "dst")["id"]
        known_to_etcd(a, job)
        line.cut()
        assert a.api.wait(job)["state"] == "succeeded"
        a.kill()
        line.mend()
        lib.wait_for(lambda: b.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 30, "b has it")
        end = b.api.wait(job)
        a.start()
        lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200) == end, 20, "both tell the same end")
        lib.wait_for(lambda: not any("/left/" in k for k in server.keys(f"/{tmp_path.name}/")), 20, "a has told that it knows")
        no_fence_stays(tmp_path)
    finally:
        line.close()


@pytest.mark.long
def test_what_has_ended_here_is_not_run_again(pair, server, tmp_path):  # noqa: F811
    """Its end is told to etcd later than to clients: another node may have taken it over meanwhile, and died."""
    a, b = pair
    big(b, "src", 1)
    job = b.api.run("reshard", source={"storage": "main", "name": "src"}, target={"storage": "main", "name": "dst", "world_size": 2})["id"]
    at = f"/{tmp_path.name}"
    record = server.knows(tmp_path.name, job)
    b.api.run("delete", target={"storage": "main", "name": "dst"})
    about = {"storages": {"main": (tmp_path / "shared/.dcpd-storage-id").read_text().strip()}}
    a.kill()
    server.put(f"{at}/jobs/{job}", json.dumps({"node": "a", "job": {**record["job"], "node": "a", "state": "running"}}))
    server.put(f"{at}/live/a/{job}", json.dumps(about))
    lib.wait_for(lambda: not any("/live/" in k for k in server.keys(f"{at}/")), 30, "etcd hears of the end")
    assert server.keys(f"{at}/")[f"{at}/jobs/{job}"]["job"]["state"] == "succeeded"
    assert b.api.get(f"/v1/jobs/{job}").ok(200)["attempt"] == 1
    assert not (tmp_path / "shared/dst").exists()


@pytest.mark.long
def test_a_job_of_a_newer_version_stays_where_it_is(pair, server, tmp_path):  # noqa: F811
    """What this version cannot read waits for its node, and stops none of the others."""
    a, b = pair
    big(b, "src", 1)
    done = b.api.run("verify", source={"storage": "main", "name": "src"})["id"]
    at = f"/{tmp_path.name}"
    record = server.knows(tmp_path.name, done)["job"]
    del record["result"], record["finished_at"]
    about = {"storages": {"main": (tmp_path / "shared/.dcpd-storage-id").read_text().strip()}}
    a.kill()
    field, kind, plain = ("01M86N1P3035BHT4CWYJAJ9YD" + c for c in "012")
    changes = {field: {"spec": {**record["spec"], "of_tomorrow": 1}}, kind: {"kind": "of_tomorrow"}, plain: {}}
    for job, change in changes.items():
        row = {**record, "id": job, "node": "a", "state": "running", **change}
        server.put(f"{at}/jobs/{job}", json.dumps({"node": "a", "job": row}))
        server.put(f"{at}/live/a/{job}", json.dumps(about))
    lib.wait_for(lambda: b.api.get(f"/v1/jobs/{plain}").ok(200)["state"] == "succeeded", 30, "b has the job that it knows")
    keys = server.keys(f"{at}/")
    assert keys[f"{at}/jobs/{plain}"]["node"] == "b"
    for job in (field, kind):
        assert keys[f"{at}/jobs/{job}"]["node"] == "a" and f"{at}/live/a/{job}" in keys, keys
        shown = b.api.get(f"/v1/jobs/{job}").ok(200)
        assert shown["node"] == "a" and shown["node_away"] and "taken_over" not in shown, shown
    assert {field, kind, plain} <= {j["id"] for j in b.api.get("/v1/jobs").ok(200)["jobs"]}


def test_a_job_that_goes_on_after_a_restart_is_no_ended_one(cluster):  # noqa: F811
    """Records of ended jobs in memory go with each pruning: one that is still held, until etcd says whose it is, is none of them."""
    a = cluster("a", args=["--keep-jobs", "1/30d"])
    a.sees(a="joined")
    big(a, "src")
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    a.kill()
    a.start()
    for _ in range(12):
        a.api.run("verify", source={"storage": "main", "name": "src"}, level="structure")
    assert a.api.wait(job)["state"] == "succeeded" and a.alive()


@pytest.mark.long
def test_an_end_that_etcd_never_heard_of_gives_way_when_its_record_has_left_memory(cluster, server, tmp_path):  # noqa: F811
    """As at a node that has many jobs: those that ended are read from the journal again."""
    line = Line(server.url)
    try:
        a, b = cluster("a", at=line.url, args=["--keep-jobs", "64/30d"], ttl="6s"), cluster("b", ttl="6s")
        a.sees(a="joined", b="joined")
        big(a, "src")
        job = slow_reshard(a, "src", "dst")["id"]
        known_to_etcd(a, job)
        line.cut()
        assert a.api.wait(job)["state"] == "succeeded"
        lib.wait_for(lambda: b.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 30, "b has it")
        assert b.api.wait(job)["state"] == "succeeded"
        for _ in range(4):
            a.api.run("verify", source={"storage": "main", "name": "src"}, level="structure")
        time.sleep(2.5)  # the journal is pruned, and ended jobs leave memory
        line.mend()
        a.sees(a="joined", b="joined")
        lib.wait_for(lambda: a.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b", 20, "a gives way")
        key = f"/{tmp_path.name}/jobs/{job}"
        assert server.keys(key)[key]["node"] == "b"
        no_fence_stays(tmp_path)
    finally:
        line.close()


@pytest.mark.long
def test_an_end_that_etcd_has_not_heard_of_is_not_pruned(cluster, server, tmp_path):  # noqa: F811
    """Else its record in etcd says for ever that it waits."""
    line = Line(server.url)
    try:
        a = cluster("a", at=line.url, args=["--keep-jobs", "1/30d"], ttl="6s")
        a.sees(a="joined")
        big(a, "src")
        job = slow_reshard(a, "src", "dst")["id"]
        known_to_etcd(a, job)
        line.cut()
        assert a.api.wait(job)["state"] == "succeeded"
        for _ in range(3):
            a.api.run("verify", source={"storage": "main", "name": "src"}, level="structure")
        time.sleep(2.5)  # the journal is pruned
        assert a.api.get(f"/v1/jobs/{job}").ok(200)["state"] == "succeeded"
        line.mend()
        key = f"/{tmp_path.name}/jobs/{job}"
        lib.wait_for(lambda: key not in (there := server.keys(key)) or there[key]["job"]["state"] == "succeeded", 20, "etcd has heard it")
    finally:
        line.close()
