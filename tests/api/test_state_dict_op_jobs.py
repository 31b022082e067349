"""Operations on state dicts in shared memory, through a real daemon: what each kind takes and gives, and what becomes of its target when
it succeeds, fails, is cancelled or the daemon dies. What PyTorch makes of the same is judged in tests/interop."""
import json
import os
import signal
import struct
import subprocess

import pytest

import dcpd as lib

HEIGHT, WIDTH = 8, 6
MOVING = ["create", "copy", "offload", "gather", "broadcast", "distribute", "redistribute"]


def f32(values):
    return struct.pack(f"<{len(values)}f", *values)


def rows(world=2, mesh=True, height=HEIGHT, start=0.0):
    """An image for each rank: w cut by rows, a plain tensor p, a 0-d step and values. Element i of the whole w is start + i."""
    each, out = height // world, []
    for r in range(world):
        part = f32([start + r * each * WIDTH + i for i in range(each * WIDTH)])
        meta = {"tensors": {"w": {"fqn": "w", "global_shape": [height, WIDTH], "offsets": [r * each, 0]}},
                "values": {"lr": {"json": 0.5}, "blob": {"bytes": "AAEC"}}}
        if mesh:
            meta["layout"] = [{"match": "w", "mesh": [world], "placements": ["Shard(0)"]}]
        out.append(lib.image({"w": ("F32", [each, WIDTH], part), "p": ("I64", [2], struct.pack("<2q", r, 7)),
                              "step": ("F64", [], struct.pack("<d", 7.0))}, meta))
    return out


def whole(start=0.0):
    return f32([start + i for i in range(HEIGHT * WIDTH)])


def plain(world=2):
    """Whole tensors, which differ between ranks."""
    return [lib.image({"w": ("F32", [HEIGHT, WIDTH], whole(100.0 * r)), "p": ("I64", [2], struct.pack("<2q", r, 7))},
                      {"values": {"lr": {"json": 0.5 + r}}}) for r in range(world)]


def sd(name):
    return {"state_dict": name}


def record(d, name):
    return d.api.get(f"/v1/state-dicts/{name}").ok(200)


def images(d, name):
    """What each rank has sealed last: [(generation, Image)]."""
    out = []
    for r in record(d, name)["ranks"]:
        s = max((s for s in r["slots"] if s["state"] == "sealed"), key=lambda s: s["generation"])
        out.append((s["generation"], lib.read_segment(s["segment"], s["image_bytes"])))
    return out


def frozen(d, name):
    """All that can be seen of a state dict: to tell whether anything of it has changed."""
    return [[(s["slot"], s["segment"], s["state"], s.get("generation"), lib.segment_file(s["segment"]).read_bytes())
             for s in r["slots"] if s["state"] == "sealed"] for r in record(d, name)["ranks"]]


def used(d):
    return d.api.get("/v1/capabilities").ok(200)["shm"]["used_bytes"]


@pytest.fixture
def train(d):
    name = lib.fresh("train")
    d.put(name, rows(), generation=5)
    return name


# ------------------------------------------------------------------------------------------------- each kind's result


def test_gather(d, train):
    full = lib.fresh("full")
    job = d.api.run("gather", source=sd(train), target=sd(full))
    assert [g for g, _ in images(d, full)] == [5, 5], "the source's generation: it is larger than 0"
    for rank, (_, image) in enumerate(images(d, full)):
        assert image.entries["w"] == ("F32", [HEIGHT, WIDTH], whole())
        assert image.entries["p"][2] == struct.pack("<2q", rank, 7) and image.values["lr"] == {"json": 0.5}
    r = job["result"]
    assert r["generation"] == 5 and r["backend"] == "shm" and r["world_size"] == 2 and r["tensors"] >= 3
    assert r["moved_bytes"] == r["needed_bytes"] == HEIGHT * WIDTH * 4
    assert job["milestones"]["durable"] is None and job["source"]["generation"] == 5


def test_gather_to_some_ranks(d, train):
    full = lib.fresh("full")
    d.api.run("gather", source=sd(train), target=sd(full), ranks_only=[1], cpu_offload=True)
    none, all_ = [image for _, image in images(d, full)]
    assert none.entries == {} and none.values == {} and all_.entries["w"][2] == whole()


def test_create_copy_compare(d, train):
    new_one = lib.fresh("new")
    d.api.run("create", source=sd(train), target=sd(new_one))
    for (_, a), (_, b) in zip(images(d, train), images(d, new_one)):
        assert [(n, e[:2]) for n, e in a.entries.items()] == [(n, e[:2]) for n, e in b.entries.items()]
    d.api.run("copy", source=sd(train), target=sd(new_one))
    for (_, a), (g, b) in zip(images(d, train), images(d, new_one)):
        assert a.entries == b.entries and a.values == b.values and g == 6
    same = d.api.run("compare", a=sd(train), b=sd(new_one), values=True)["result"]
    assert same["equal"] is True and same["differences"] == []
    other = lib.fresh("other")
    d.put(other, rows(start=0.25))
    assert d.api.run("compare", a=sd(train), b=sd(other))["result"]["equal"] is True, "structure, dtype and size only"
    assert d.api.run("compare", a=sd(train), b=sd(other), values=True, atol=0.25)["result"]["equal"] is True
    job = d.api.run("compare", a=sd(train), b=sd(other), values=True)
    r = job["result"]
    assert r["equal"] is False and {x["path"] for x in r["differences"]} == {"w"} and job["a"] == sd(train)
    assert r["differences"][0]["max_abs"] == 0.25


def test_offload(d, train):
    out = lib.fresh("out")
    d.api.run("offload", source=sd(train), target=sd(out), ranks_only=[0])
    kept, none = [image for _, image in images(d, out)]
    assert none.entries == {} and kept.entries == images(d, train)[0][1].entries


def test_broadcast(d):
    source, out = lib.fresh("source"), lib.fresh("out")
    d.put(source, plain())
    d.api.run("broadcast", source=sd(source), target=sd(out), root=1)
    for _, image in images(d, out):
        assert image.entries["w"][2] == whole(100.0) and image.entries["p"][2] == struct.pack("<2q", 1, 7)
        assert image.values["lr"] == {"json": 1.5}


def test_distribute_into_a_larger_world(d):
    full, out = lib.fresh("full"), lib.fresh("out")
    d.put(full, [lib.image({"w": ("F32", [HEIGHT, WIDTH], whole())})])
    job = d.api.run("distribute", source=sd(full), target=sd(out), layout=[{"match": "*", "mesh": [4], "placements": ["Shard(0)"]}])
    assert job["result"]["world_size"] == 4 and record(d, out)["world_size"] == 4
    assert b"".join(image.entries["w"][2] for _, image in images(d, out)) == whole()


def test_a_layout_like_that_of_a_checkpoint(d, train):
    """Its storage is one that the job uses, wherever the request has its layout."""
    d.api.run("save", source=sd(train), target={"storage": "main", "name": f"like/{train}"})
    job = d.api.run("redistribute", source=sd(train), target=sd(lib.fresh()), layout=[{"match": "w", "like": f"main:like/{train}"}])
    assert job["state"] == "succeeded"


def test_redistribute_in_place(d, train):
    job = d.api.run("redistribute", source=sd(train), target=sd(train), layout=[{"match": "w", "placements": ["Shard(1)"]}])
    assert job["result"]["generation"] == 6 and job["result"]["moved_bytes"] == HEIGHT * WIDTH * 2
    values = struct.unpack(f"<{HEIGHT * WIDTH}f", whole())
    for rank, (g, image) in enumerate(images(d, train)):
        got = struct.unpack(f"<{HEIGHT * WIDTH // 2}f", image.entries["w"][2])
        assert g == 6 and list(got) == [values[i * WIDTH + rank * 3 + k] for i in range(HEIGHT) for k in range(3)]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_back_ends(d, train, backend):
    full = lib.fresh("full")
    r = d.api.run("gather", source=sd(train), target=sd(full), backend=backend)["result"]
    assert r["backend"] == backend and images(d, full)[1][1].entries["w"][2] == whole()
    text = d.api.get("/metrics").body.decode()
    assert f'dcpd_comm_bytes_total{{kind="gather",backend="{backend}"}}' in text
    assert 'dcpd_jobs_total{kind="gather",outcome="succeeded"}' in text


# ------------------------------------------------------------------------------------------------- generations and slots


def test_next_generation_and_what_is_released(d, train):
    full = lib.fresh("full")
    d.api.run("gather", source=sd(train), target=sd(full))
    before, old = used(d), frozen(d, full)
    for generation in (6, 7, 8):
        job = d.api.run("gather", source=sd(train), target=sd(full))
        assert job["result"]["generation"] == generation
        lib.wait_for(lambda: used(d) == before, 5, "the generation before is released")
    assert record(d, full)["generation"] == 8
    assert not lib.segment_file(old[0][0][1]).exists(), "its pages are not used again"


def test_a_trainers_slots_stay(d, train):
    mine = frozen(d, train)
    for generation in (6, 7):
        assert d.api.run("offload", source=sd(train) | {"generation": 5}, target=sd(train))["result"]["generation"] == generation
    seen = [[s[3] for s in r] for r in frozen(d, train)]
    lib.wait_for(lambda: [[s[3] for s in r] for r in frozen(d, train)] == [[5, 7], [5, 7]], 5, f"{seen}")
    assert [r[0] for r in frozen(d, train)] == [r[0] for r in mine]
    d.reserve(train, 0, 4096, 8)  # its second slot is still there for it
    d.api.post(f"/v1/state-dicts/{train}/ranks/1:reserve", {"bytes": 4096, "generation": 7}).problem("generation_stale")


def test_a_reader_keeps_what_it_reads(d, train):
    """The source of a running job stays while another job makes its next generation."""
    slow = d.api.submit("save", source=sd(train), target={"storage": "main", "name": f"state_dict_ops/{lib.fresh()}"})
    d.api.run("offload", source=sd(train), target=sd(train))
    assert d.api.wait(slow)["state"] == "succeeded"


# ------------------------------------------------------------------------------------------------- failures


def test_another_structure_leaves_the_target(d, train):
    other = lib.fresh("other")
    d.put(other, [lib.image({"x": ("F32", [2], f32([1, 2]))}) for _ in range(2)])
    before, bytes_before = frozen(d, other), used(d)
    p = d.api.fails("copy", "companion_mismatch", source=sd(train), target=sd(other))
    assert p.get("rank") is not None
    assert frozen(d, other) == before and used(d) == bytes_before


@pytest.fixture
def small(tmp_path):
    d = lib.Daemon(tmp_path, args=["--shm-limit", "256KiB"])
    yield d
    assert d.leaks() == []
    d.stop()
    d.discard()


def test_too_little_shared_memory(small):
    small.put("train", rows())
    before, bytes_before = frozen(small, "train"), used(small)
    size = (256 << 10) - bytes_before - (20 << 10)  # room for one rank's part, not for both
    small.create("filler")
    small.reserve("filler", 0, size // 4096 * 4096, 1)
    filled = used(small)
    for target in ("train", "full"):
        p = small.api.fails("gather", "shm_exhausted", source=sd("train"), target=sd(target))
        assert p["status"] == 507 and p["expected"] and frozen(small, "train") == before
        assert used(small) == filled
    small.drop("filler")
    assert used(small) == bytes_before
    small.api.run("gather", source=sd("train"), target=sd("full"))


def large(d, mib=40):
    """Enough that a job on it can be met while it runs."""
    name, part = lib.fresh("large"), mib << 20
    d.create(name, 2)
    for r in range(2):
        data = lib.image({"w": ("U8", [part], b"")}, {"tensors": {"w": {"fqn": "w", "global_shape": [2 * part], "offsets": [r * part]}},
                         "layout": [{"match": "w", "mesh": [2], "placements": ["Shard(0)"]}]}).replace(
            b'"data_offsets":[0,0]', b'"data_offsets":[0,%d]' % part)
        n = struct.unpack("<Q", data[:8])[0]
        text = data[8:8 + n].rstrip()
        head = struct.pack("<Q", 4088) + text + b" " * (4088 - len(text))
        s = d.reserve(name, r, len(head) + part, 1)
        lib.write_segment(s["segment"], head)
        d.seal(name, r, 1, len(head) + part)
    return name


def running(d, job):
    return lib.wait_for(lambda: d.api.get(f"/v1/jobs/{job['id']}").ok(200)["state"] in ("running", *lib.TERMINAL), 20, "the job runs")


def test_a_killed_worker(d):
    source, full = large(d), lib.fresh("full")
    d.api.run("gather", source=sd(source), target=sd(full))
    before, bytes_before = [[s[:4] for s in r] for r in frozen(d, full)], used(d)
    seconds = d.pids("gang", lambda w: w["index"] == 1)
    with lib.stopped(*seconds):  # the job cannot be faster than the signal
        job = d.api.submit("gather", source=sd(source), target=sd(full), options={"retries": 0})
        running(d, job)
        for pid in seconds:
            os.kill(pid, signal.SIGKILL)
    end = d.api.wait(job)
    assert end["state"] == "failed"
    lib.check_problem(end["error"], "worker_lost", "peer_lost")
    assert [[s[:4] for s in r] for r in frozen(d, full)] == before
    lib.wait_for(lambda: used(d) == bytes_before, 5, "what was made is dropped")
    assert d.api.wait(d.api.post(f"/v1/jobs/{job['id']}:retry").ok(202))["state"] == "succeeded"
    later = [[s[3] + 1 for s in r] for r in before]
    lib.wait_for(lambda: [[s[3] for s in r] for r in frozen(d, full)] == later, 5, "the next generation")


def test_cancel(d):
    source, full = large(d), lib.fresh("full")
    d.api.run("gather", source=sd(source), target=sd(lib.fresh()))  # the gang is there
    bytes_before = used(d)
    with lib.stopped(*d.workers()):
        job = d.api.submit("gather", source=sd(source), target=sd(full))
        d.api.fails("offload", "target_busy", source=sd(source), target=sd(full))
        d.api.post(f"/v1/jobs/{job['id']}:cancel")
    assert d.api.wait(job)["state"] == "cancelled"
    d.api.get(f"/v1/state-dicts/{full}").problem("not_found")
    lib.wait_for(lambda: used(d) == bytes_before, 5, "what was made is dropped")


def test_many_at_once(d):
    names = [lib.fresh("t") for _ in range(6)]
    for i, name in enumerate(names):
        d.put(name, rows(start=100.0 * i))
    jobs = [d.api.submit(kind, source=sd(name), target=sd(f"{name}-{kind}")) for name in names for kind in ("gather", "redistribute")]
    for j in jobs:
        assert d.api.wait(j)["state"] == "succeeded", j
    for i, name in enumerate(names):
        assert images(d, f"{name}-gather")[0][1].entries["w"][2] == whole(100.0 * i)


@pytest.mark.long
def test_restart(tmp_path):
    d = lib.Daemon(tmp_path)
    try:
        source = large(d)
        d.api.run("gather", source=sd(source), target=sd("full"))
        d.api.run("offload", source=sd(source), target=sd(source))
        job = d.api.submit("gather", source=sd(source), target=sd("full"))
        running(d, job)
        d.kill()
        d.start()
        assert d.api.wait(job)["state"] == "succeeded"
        lib.wait_for(lambda: [[s[3] for s in r] for r in frozen(d, "full")] == [[2], [2]], 5, "one generation, the next")
        assert [[s[3] for s in r] for r in frozen(d, source)] == [[1, 2], [1, 2]]
        d.stop()
        d.start()
        assert d.api.run("offload", source=sd(source), target=sd(source))["result"]["generation"] == 3
        lib.wait_for(lambda: [[s[3] for s in r] for r in frozen(d, source)] == [[1, 3], [1, 3]], 5, "made by a job: still known")
        for name in ("full", source):
            d.drop(name)
        assert d.leaks() == [] and used(d) == 0
        d.stop()
    finally:
        d.discard()


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind,more,code,pointer", [
    ("gather", {"ranks_only": [0, 2]}, "validation_failed", "/ranks_only/1"),
    ("gather", {"group": [1], "ranks_only": [1]}, "validation_failed", "/ranks_only/0"),
    ("gather", {"group": [0, 7]}, "validation_failed", "/group/1"),
    ("gather", {"group": [0, 0]}, "validation_failed", "/group/1"),
    ("gather", {"root": 0}, "unknown_field", "/root"),
    ("broadcast", {"root": 2}, "validation_failed", "/root"),
    ("broadcast", {"root": -1}, "validation_failed", "/root"),
    ("copy", {"layout": []}, "unknown_field", "/layout"),
    ("copy", {"backend": "gloo"}, "validation_failed", "/backend"),
    ("distribute", {"layout": [{"match": "*", "mesh": [3, 3], "placements": ["R", "R"], "ranks": [0]}]}, "world_mismatch", None),
    ("distribute", {"layout": [{"match": "*", "mesh": [1], "placements": ["R"]}]}, "world_mismatch", "/target/world_size"),
    ("redistribute", {"layout": [{"match": "*", "placements": ["Cut(0)"]}]}, "layout_invalid", "/layout/0/placements/0"),
])
def test_refused(d, train, kind, more, code, pointer):
    p = d.api.post("/v1/jobs", {"kind": kind, "source": sd(train), "target": sd("never"), **more}).problem(code, status=422)
    assert pointer is None or p["pointer"] == pointer, p
    d.api.get("/v1/state-dicts/never").problem("not_found")


def test_refused_for_what_is_there(d, train):
    one, empty = lib.fresh("one"), lib.fresh("empty")
    d.put(one, rows(1))
    d.create(empty, 2)
    post = lambda **doc: d.api.post("/v1/jobs", doc)  # noqa: E731
    post(kind="copy", source=sd("nothing"), target=sd(train)).problem("not_found", status=404)
    assert post(kind="copy", source=sd(train), target=sd("nothing")).problem("not_found")["pointer"] == "/target"
    assert post(kind="copy", source=sd(train), target=sd(train)).problem("validation_failed")["pointer"] == "/target"
    assert post(kind="create", source=sd(train), target=sd(one)).problem("state_dict_exists", status=409)["pointer"] == "/target"
    post(kind="copy", source=sd(train), target=sd(empty)).problem("not_sealed", status=409)
    assert post(kind="copy", source=sd(train), target=sd(one)).problem("world_mismatch")["pointer"] == "/target"
    post(kind="copy", source=sd(empty), target=sd(train)).problem("not_sealed", status=409)
    post(kind="compare", a=sd(train), b=sd(empty)).problem("not_sealed", status=409)
    post(kind="compare", a=sd(train), b={"storage": "main", "name": "x"}).problem("unknown_field")
    assert post(kind="compare", a=sd(train), b=sd(one), rtol=1).problem("validation_failed")["pointer"] == "/rtol"


def test_without_a_gpu(d, train):
    can = d.api.get("/v1/capabilities").ok(200)
    assert set(MOVING) | {"compare"} <= set(can["kinds"]) and can["backends"]["shm"]["available"] is True
    if can["backends"]["nccl"]["available"]:
        pytest.skip("there is one")
    for more, pointer in (({"backend": "nccl"}, "/backend"), ({"device": "cuda"}, "/device")):
        p = d.api.post("/v1/jobs", {"kind": "gather", "source": sd(train), "target": sd("never"), **more}).problem(
            "backend_unavailable", status=501)
        assert p["pointer"] == pointer and p["detail"] == can["backends"]["nccl"]["reason"]


def test_dry_run(d, train):
    before = frozen(d, train)
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "gather", "source": sd(train), "target": sd(train)}).ok(200)
    assert isinstance(plan, dict) and plan
    assert frozen(d, train) == before


def test_somebody_elses(d, train):
    script = ("import http.client, json, os, socket, sys\n"
              "os.setuid(65534)\n"
              "c = http.client.HTTPConnection('x'); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect(sys.argv[1])\n"
              "c.request('POST', '/v1/jobs', sys.argv[2], json.loads(sys.argv[3])); r = c.getresponse()\n"
              "print(r.status, r.read().decode())")
    if os.geteuid() != 0:
        pytest.skip("needs two users")
    token = (d.state / "token").read_text().strip()
    head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = {"kind": "copy", "source": sd(train), "target": sd("theirs")}
    r = subprocess.run(["/usr/bin/python3", "-c", script, str(d.socket), json.dumps(body), json.dumps(head)], capture_output=True,
                       text=True)
    if r.returncode:  # the state dir may be closed to others, which is as good
        assert "Permission" in r.stderr
    else:
        assert r.stdout.split()[0] in ("401", "403"), r.stdout


# ------------------------------------------------------------------------------------------------- dcpctl


@pytest.mark.parametrize("kind", MOVING)
def test_dcpctl(d, train, kind):
    if kind in ("broadcast", "distribute"):
        d.put(train := lib.fresh("plain"), plain(), generation=5)
    options = {"create": ["--pin-memory"], "offload": ["--ranks-only", "0"], "gather": ["--ranks-only", "1", "--cpu-offload"],
               "broadcast": ["--root", "1", "--strict"], "redistribute": ["--layout", "w=Shard(1)@2"]}.get(kind, [])
    names = iter([lib.fresh("out") for _ in range(4)] if kind == "create" else [lib.fresh("out")] * 4)
    if kind == "copy":
        d.api.run("create", source=sd(train), target=sd(next(names)))

    def run(*more):
        return d.ctl(kind, f"shm:{train}", f"shm:{next(names)}", *options, *more)

    r = run("--group", "0,1", "--backend", "shm")
    assert r.returncode == 0 and f"{kind} " in r.stdout, r
    r = run("--json")
    assert r.returncode == 0, r
    job = json.loads(r.stdout)
    assert job["kind"] == kind and job["spec"]["group"] == [] and job["result"]["generation"] == {"create": 5, "copy": 7}.get(kind, 6)
    if kind != "copy":
        assert d.api.wait(run("--detach").stdout.strip())["state"] == "succeeded"
    before = used(d)
    assert json.loads(run("--dry-run").stdout)
    assert used(d) <= before, "nothing is made"
    assert kind in d.ctl(kind, "--help").stdout


def test_dcpctl_compare_and_in_place(d, train):
    other = lib.fresh("other")
    d.put(other, rows(start=1.0))
    assert d.ctl("compare", f"shm:{train}", f"shm:{other}").returncode == 0
    r = d.ctl("compare", f"shm:{train}", f"shm:{other}", "--values")
    assert r.returncode == 1 and "w" in r.stdout, r
    assert d.ctl("compare", f"shm:{train}", f"shm:{other}", "--values", "--atol", "1").returncode == 0
    assert d.ctl("redistribute", f"shm:{train}", "--layout", "w=Replicate()@2").returncode == 0
    assert record(d, train)["generation"] == 6


@pytest.mark.parametrize("args,code", [
    (["gather"], 2), (["copy", "shm:a"], 2), (["gather", "shm:a", "shm:b", "--root", "1"], 2),
    (["gather", "shm:a", "shm:b", "--group", "0,x"], 2),
    (["broadcast", "shm:a", "shm:b", "--root", "-1"], 2), (["gather", "shm:nothing-there", "shm:b"], 6), (["gather", "main:a", "shm:b"], 2),
    (["distribute", "shm:a", "shm:b", "--layout", "nonsense"], 2), (["compare", "shm:a", "shm:b", "--values=1"], 2),
], ids=lambda v: " ".join(v) if isinstance(v, list) else str(v))
def test_dcpctl_refused(d, args, code):
    r = d.ctl(*args)
    assert r.returncode == code and r.stderr.strip(), r
