"""Jobs: idempotency, names in use, overwrite, long-poll, events, cancel, retry, dry run, plan, lists, selections."""
import concurrent.futures
import json
import os
import struct
import threading
import time

import pytest
from crafted import Crafted, tree

import dcpd as lib

MIB = 1 << 20


def name():
    return f"jobs/{lib.fresh()}"


def big(d, mib=256):
    """A sealed state dict of one rank, some MiB: a save of it takes a while. Its name."""
    sd = lib.fresh("big")
    n = mib * MIB
    text = json.dumps({"w": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    d.create(sd)
    s = d.reserve(sd, 0, 8 + len(text) + n, 1)
    block = os.urandom(MIB)
    with open(lib.segment_file(s["segment"]), "r+b") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _ in range(mib):
            f.write(block)
    d.seal(sd, 0, 1, 8 + len(text) + n)
    return sd


def small(d):
    sd = lib.fresh("small")
    d.put(sd, [lib.image({"model.w": ("F32", [4, 2], bytes(range(32))), "model.b": ("F32", [2], bytes(8)),
                          "optim.m": ("F32", [3], bytes(range(12)))}, {"values": {"lr": {"json": 0.5}}})])
    return sd


def to(n):
    return {"storage": "main", "name": n}


def test_record(d):
    n, sd = name(), small(d)
    a = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": to(n), "labels": {"run": "r1"}})
    j = a.ok(202)
    assert a.headers["Location"] == f"/v1/jobs/{j['id']}" and len(j["id"]) == 26 and j["kind"] == "save"
    j = d.api.wait(j)
    assert j["state"] == "succeeded" and j["milestones"]["durable"], j
    assert j["created_at"] <= j["started_at"] <= j["finished_at"]
    assert j["progress"]["bytes_done"] == j["progress"]["bytes_total"] > 0
    assert not j.get("error")
    listed = d.api.get("/v1/jobs?filter=labels.run%3Dr1&page_size=1000").ok(200)["jobs"]
    assert j["id"] in [x["id"] for x in listed]
    for f, hit in ((f"target=main:{n}", True), (f"target=main:{n} AND kind=save", True), (f"target=main:{n} AND kind=load", False)):
        got = d.api.get("/v1/jobs?filter=" + f.replace(" ", "%20").replace("=", "%3D").replace("/", "%2F")).ok(200)["jobs"]
        assert ([x["id"] for x in got] == [j["id"]]) == hit, f
    plan = d.api.get(f"/v1/jobs/{j['id']}/plan").ok(200)
    assert isinstance(plan, dict) and plan


def test_list_pages(d):
    for _ in range(3):
        d.api.run("verify", source=Crafted(d.storages["main"]).ref, level="structure")
    seen, token = [], ""
    while True:
        page = d.api.get(f"/v1/jobs?page_size=2{token}").ok(200)
        assert len(page["jobs"]) <= 2
        seen += [j["id"] for j in page["jobs"]]
        if not page.get("next_page_token"):
            break
        token = "&page_token=" + page["next_page_token"]
    assert len(seen) == len(set(seen)) >= 3 and seen == sorted(seen, reverse=True)


def test_idempotency(d):
    n, key = name(), {"Idempotency-Key": lib.fresh()}
    body = {"kind": "save", "source": {"state_dict": small(d)}, "target": to(n)}
    first = d.api.post("/v1/jobs", body, headers=key).ok(202)
    second = d.api.post("/v1/jobs", body, headers=key).ok(200, 202)
    assert first["id"] == second["id"]
    d.api.wait(first)
    assert d.api.post("/v1/jobs", body, headers=key).ok(200, 202)["id"] == first["id"], "still, when it has ended"
    d.api.post("/v1/jobs", {**body, "labels": {"a": "b"}}, headers=key).problem("idempotency_mismatch", status=422)
    d.api.post("/v1/jobs", body, headers={"Idempotency-Key": "x" * 10000}).problem()
    sd = {"name": lib.fresh(), "world_size": 1}
    k2 = {"Idempotency-Key": lib.fresh()}
    d.api.post("/v1/state-dicts", sd, headers=k2).ok(201)
    d.api.post("/v1/state-dicts", sd, headers=k2).ok(200, 201)


def test_existing_name(d):
    n, sd = name(), small(d)
    d.api.run("save", source={"state_dict": sd}, target=to(n))
    before = tree(d.storages["main"] / n)
    d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": to(n)}).problem("checkpoint_exists", status=409)
    c = Crafted(d.storages["main"])
    d.api.post("/v1/jobs", {"kind": "reshard", "source": c.ref, "target": to(n)}).problem("checkpoint_exists", status=409)
    assert tree(d.storages["main"] / n) == before
    d.api.run("reshard", source=c.ref, target=to(n), options={"overwrite": True})
    d.api.run("verify", source=to(n), level="digest")
    result = d.api.run("diff", a=c.ref, b=to(n))["result"]
    assert result["equal"] is True, result


def test_overwrite_that_fails_leaves_the_old_one(d):
    n, sd = name(), small(d)
    d.api.run("save", source={"state_dict": sd}, target=to(n))
    before = tree(d.storages["main"] / n)
    c = Crafted(d.storages["main"])
    c.files()[0].write_bytes(b"")
    d.api.fails("reshard", source=c.ref, target=to(n), options={"overwrite": True})
    assert tree(d.storages["main"] / n) == before


def test_two_jobs_on_one_name(d):
    n, sd, other = name(), big(d), small(d)
    d.api.run("save", source={"state_dict": other}, target=to(name()))  # the gang is there
    with lib.stopped(*d.pids("gang")):
        first = d.api.submit("save", source={"state_dict": sd}, target=to(n))
        d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": other}, "target": to(n)}).problem("target_busy", status=409)
        d.api.post("/v1/jobs", {"kind": "delete", "target": to(n)}).problem("target_busy", "not_found")
        d.api.delete(f"/v1/state-dicts/{sd}").problem("state_dict_busy", status=409)
    done = d.api.wait(first)
    assert done["state"] == "succeeded", done
    d.api.delete(d.api.storage_path("main", n)).ok(200, 202, 204)


def test_many_posts_at_once_make_one(d):
    n, sd, answers = name(), small(d), []
    body = {"kind": "save", "source": {"state_dict": sd}, "target": to(n)}
    threads = [threading.Thread(target=lambda: answers.append(d.api.post("/v1/jobs", body))) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    good = [a for a in answers if a.status == 202]
    states = [d.api.wait(a.json)["state"] for a in good]
    for a in answers:
        if a.status != 202:
            a.problem("target_busy", "checkpoint_exists")
    assert states.count("succeeded") == 1, states
    d.api.run("verify", source=to(n), level="digest")


def test_cancel(d):
    n, sd = name(), big(d)
    j = d.api.submit("save", source={"state_dict": sd}, target=to(n))
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{j['id']}").ok(200)["state"] != "queued", 20, "started")
    a = d.api.post(f"/v1/jobs/{j['id']}:cancel")
    end = d.api.wait(j)
    if a.status == 409:
        a.problem("state_conflict")
        assert end["state"] == "succeeded"
    else:
        assert end["state"] == "cancelled", end
        assert not (d.storages["main"] / n).exists()
        d.api.post(f"/v1/jobs/{j['id']}:cancel").problem("state_conflict", status=409)
        again = d.api.post(f"/v1/jobs/{j['id']}:retry").ok(200, 202)
        assert again["id"] == j["id"]
        assert d.api.wait(j)["state"] == "succeeded"
        d.api.run("verify", source=to(n), level="digest")
    d.api.post(f"/v1/jobs/{j['id']}:retry").problem("state_conflict", status=409)
    d.api.post("/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV:cancel").problem("not_found", status=404)


def test_retry_after_the_reason_is_gone(d):
    n, c = name(), Crafted(d.storages["main"])
    f = c.files()[0]
    data = f.read_bytes()
    f.write_bytes(bytes(len(data)))
    j = d.api.wait(d.api.submit("reshard", source=c.ref, target=to(n)))
    assert j["state"] == "failed" and j["error"]["file"] == f.name, j
    f.write_bytes(data)
    d.api.post(f"/v1/jobs/{j['id']}:retry").ok(200, 202)
    assert d.api.wait(j)["state"] == "succeeded"


def test_dry_run(d):
    n, c = name(), Crafted(d.storages["main"])
    before = len(d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"])
    a = d.api.post("/v1/jobs?dry_run=true", {"kind": "reshard", "source": c.ref, "target": {**to(n), "world_size": 3}})
    plan = a.ok(200)
    assert plan and not (d.storages["main"] / n).exists()
    stored = {t["fqn"]: t for t in d.api.get(d.api.storage_path("main", c.ref["name"], "/tensors")).ok(200)["tensors"]}
    assert {t["fqn"] for t in plan["cuts"]} == set(stored)
    for t in plan["cuts"]:  # the boxes fill the tensor, and rank r has the r-th part of dim 0
        assert t["shape"] == stored[t["fqn"]]["shape"] and t["dtype"] == stored[t["fqn"]]["dtype"]
        rows = [(x["rank"], x["offsets"][0], x["sizes"][0]) for x in t["chunks"] if t["shape"]]
        assert rows == sorted(rows) and sum(r[2] for r in rows) == (t["shape"] or [0])[0], t
    assert len(d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"]) == before
    d.api.post("/v1/jobs?dry_run=maybe", {"kind": "verify", "source": c.ref}).problem("validation_failed", "invalid_request")


def test_long_poll(d):
    n, sd = name(), small(d)
    j = d.api.run("save", source={"state_dict": sd}, target=to(n))
    start = time.monotonic()
    d.api.get(f"/v1/jobs/{j['id']}?wait=60s").ok(200)
    assert time.monotonic() - start < 60, "an ended job is answered at once"
    a = d.api.get(f"/v1/jobs/{j['id']}")
    same = d.api.get(f"/v1/jobs/{j['id']}", headers={"If-None-Match": a.headers["ETag"]})
    assert same.status == 304 and not same.body


def events(client, path, until, headers=None, seconds=120, begun=None):
    """[(id, event, data)] of an event stream, up to one that `until` likes. `begun` is set when it has begun."""
    c = client.connect(timeout=seconds)
    c.request("GET", path, headers={**client.headers, "Accept": "text/event-stream", **(headers or {})})
    r = c.getresponse()
    assert r.status == 200 and r.getheader("Content-Type").startswith("text/event-stream"), r.read()
    begun and begun.set()
    out, now = [], {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        line = r.readline().decode().rstrip("\n")
        if line == "" and now.get("data") is not None:
            out.append((now.get("id"), now.get("event"), json.loads(now["data"])))
            if until(out[-1]):
                break
        if line == "":
            now = {}
        elif not line.startswith(":"):
            k, _, v = line.partition(":")
            now[k] = now.get(k, "") + v.lstrip() if k == "data" else v.lstrip()
    c.close()
    assert out and until(out[-1]), out[-3:]
    return out


def test_events_of_a_job(d):
    n, sd = name(), big(d, 64)
    j = d.api.submit("save", source={"state_dict": sd}, target=to(n))
    got = events(d.api, f"/v1/jobs/{j['id']}/events", lambda e: "succeeded" in json.dumps(e[2]))
    assert all(j["id"] in json.dumps(e[2]) for e in got)
    ids = [e[0] for e in got if e[0]]
    assert len(ids) == len(set(ids)), ids
    times = [e[2]["at"] for e in got]
    assert times == sorted(times), times


def test_stages_of_a_job(d):
    """The record says when it came to each stage, in their order."""
    n, sd = name(), small(d)
    j = d.api.run("save", source={"state_dict": sd}, target=to(n))
    stages, times = [s["stage"] for s in j["stages"]], [s["at"] for s in j["stages"]]
    assert len(set(stages)) == len(stages) and stages[-1] == "commit" and "copy" in stages, stages
    assert [j["created_at"], *times, j["finished_at"]] == sorted([j["created_at"], *times, j["finished_at"]])


def test_events_of_all(d):
    """Made before the job: the stream tells of it from its first state to its last."""
    n, sd, got, ids = name(), small(d), [], []

    begun, asked = threading.Event(), threading.Event()

    def last(e):
        """The job may end before the answer to its request is read: its id is waited for."""
        return asked.wait(120) and ids[0] in json.dumps(e[2]) and "succeeded" in json.dumps(e[2])

    t = threading.Thread(target=lambda: got.extend(events(d.api, "/v1/events", last, begun=begun)))
    t.start()
    assert begun.wait(120)
    ids.append(d.api.submit("save", source={"state_dict": sd}, target=to(n))["id"])
    asked.set()
    d.api.wait(ids[0])
    t.join(120)
    assert got and not t.is_alive()


def test_selection_rename_and_cast(d):
    a, b = name(), name()
    d.api.run("save", source={"state_dict": small(d)}, target=to(a))
    d.api.run("reshard", source=to(a), target=to(b), include=["model.*", "lr"], exclude=["*.b"], rename=[["^model\\.", "net."]],
              dtype=[["net.w", "float64"], ["model.w", "float64"]])
    t = d.api.get(d.api.storage_path("main", b, "/tensors")).ok(200)
    assert {x["fqn"]: x["dtype"] for x in t["tensors"]} == {"net.w": "float64"}
    assert [v["fqn"] for v in t["values"]] == ["lr"]
    d.api.fails("reshard", "validation_failed", source=to(a), target=to(name()), rename=[["(", "x"]])
    d.api.fails("reshard", "duplicate_key", source=to(a), target=to(name()), rename=[["^model\\..*$", "same"]])


def test_load_strict_and_not(d):
    n, sd = name(), lib.fresh()
    d.api.run("save", source={"state_dict": small(d)}, target=to(n))
    d.put(sd, [lib.image({"model.w": ("F32", [4, 2], bytes(32)), "extra": ("F32", [2], bytes(8)), "more": ("F32", [1], bytes(4))})])
    p = d.api.fails("load", "missing_key", source=to(n), target={"state_dict": sd})
    assert "extra" in p["detail"] and "more" in p["detail"], p
    r = d.api.run("load", source=to(n), target={"state_dict": sd}, strict=False)["result"]
    assert sorted(r["missing"]) == ["extra", "more"] and "optim.m" in r["unexpected"], r
    img = d.images(sd)[0]
    assert img.entries["model.w"][2] == bytes(range(32)) and img.entries["extra"][2] == bytes(8)


def test_load_into_other_size_or_kind(d):
    n = name()
    d.api.run("save", source={"state_dict": small(d)}, target=to(n))
    a, b = lib.fresh(), lib.fresh()
    d.put(a, [lib.image({"model.w": ("F32", [2, 4], bytes(32))})])
    p = d.api.fails("load", "size_mismatch", source=to(n), target={"state_dict": a})
    assert p["fqn"] == "model.w", p
    d.put(b, [lib.image({"lr": ("F32", [1], bytes(4))})])
    d.api.fails("load", "kind_mismatch", source=to(n), target={"state_dict": b})
    assert d.images(a)[0].entries["model.w"][2] == bytes(32), "a refused load changes nothing"


def test_busy_names_a_job_that_there_is(d):
    """While a request is being looked at that will be refused, another one is not told of its job."""
    request = {"kind": "reshard", "source": to(lib.fresh()), "target": to(lib.fresh())}   # no such source
    d.api.post("/v1/jobs", request).problem("not_found")  # the worker that looks for sources is there
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with lib.stopped(*d.pids("lookup")):
            two = [pool.submit(lib.Client(d.socket).post, "/v1/jobs", request) for _ in range(2)]
            done, (first,) = concurrent.futures.wait(two, 30 * lib.PATIENCE, concurrent.futures.FIRST_COMPLETED)
            p = done.pop().result().problem("target_busy")
            assert "another request" in p["detail"] and request["target"]["name"] in p["detail"], p
        first.result().problem("not_found")


def test_diff(d):
    a, b, x, y = name(), name(), lib.fresh(), lib.fresh()
    d.put(x, [lib.image({"w": ("F32", [2], b"\0\0\x80?" * 2), "v": ("F32", [1], bytes(4))})])
    d.put(y, [lib.image({"w": ("F32", [2], b"\0\0\x80?" + b"\1\0\x80?"), "u": ("F32", [1], bytes(4))})])
    for sd, n in ((x, a), (y, b)):
        d.api.run("save", source={"state_dict": sd}, target=to(n))
    r = d.api.run("diff", a=to(a), b=to(b))["result"]
    assert r["equal"] is False and {"w", "u", "v"} <= {e["path"] for e in r["differences"]}, r
    r = d.api.run("diff", a=to(a), b=to(b), rtol=1e-3)["result"]
    assert {e["path"] for e in r["differences"]} == {"u", "v"}, r
    assert d.api.run("diff", a=to(a), b={"state_dict": x})["result"]["equal"] is True


def test_to_safetensors(d):
    st = pytest.importorskip("safetensors.numpy")
    n, out = name(), name()
    d.api.run("save", source={"state_dict": small(d)}, target=to(n))
    r = d.api.run("reshard", source=to(n), target={**to(out), "format": "safetensors"})["result"]
    assert "lr" in json.dumps(r["dropped"]), r
    files = sorted((d.storages["main"] / out).glob("*.safetensors"))
    index = json.loads((d.storages["main"] / out / "model.safetensors.index.json").read_text()) if len(files) > 1 else None
    got = {k: v for f in files for k, v in st.load_file(f).items()}
    assert set(got) == {"model.w", "model.b", "optim.m"}
    assert got["model.w"].tobytes() == bytes(range(32)) and list(got["model.w"].shape) == [4, 2]
    assert index is None or set(index["weight_map"]) == set(got)


def test_world_size_is_logical(d):
    """64 ranks on two workers."""
    c, n = Crafted(d.storages["main"]), name()
    d.api.run("reshard", source=c.ref, target={**to(n), "world_size": 64})
    assert d.api.run("diff", a=c.ref, b=to(n))["result"]["equal"] is True
    assert d.api.get(d.api.storage_path("main", n)).ok(200)["world_size"] <= 64


def test_like(d):
    c, n = Crafted(d.storages["main"]), name()
    d.api.run("reshard", source=c.ref, target={**to(n), "world_size": 4, "layout": [{"match": "*", "like": f"main:{c.name}"}]})
    assert d.api.run("diff", a=c.ref, b=to(n))["result"]["equal"] is True


def test_delete(d):
    n = name()
    d.api.run("save", source={"state_dict": small(d)}, target=to(n))
    d.api.run("delete", target=to(n))
    assert not (d.storages["main"] / n).exists()
    d.api.fails("delete", "not_found", target=to(n))
    listed = d.api.get("/v1/checkpoints/main?prefix=jobs%2F&page_size=1000").ok(200)["checkpoints"]
    assert n not in [x["name"] for x in listed]


def test_retention(spawn):
    d = spawn(args=["--keep-jobs", "5/30d"])
    ref = Crafted(d.storages["main"]).ref
    ids = [d.api.run("verify", source=ref, level="structure")["id"] for _ in range(9)]
    lib.wait_for(lambda: len(d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"]) <= 5, 15, "old job records gone")
    d.api.get(f"/v1/jobs/{ids[0]}").problem("not_found", status=404)
    d.api.get(f"/v1/jobs/{ids[-1]}").ok(200)


def test_metrics_and_capabilities(d):
    d.api.run("verify", source=Crafted(d.storages["main"]).ref, level="structure")
    sd, n = lib.fresh(), name()
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})], generation=41)
    save = {"source": {"state_dict": sd}, "target": {"storage": "main", "name": n}}
    d.api.run("save", **save, labels={"run": 'no"label'})
    text = d.api.get("/metrics").body.decode()
    assert "# TYPE dcpd_jobs_total counter" in text
    lines = text.splitlines()
    assert not [x for x in lines if "no" + '"label' in x], "labels of jobs are not those of metrics"
    assert any(x.startswith('dcpd_job_stage_duration_seconds_count{kind="save",stage="commit"}') for x in lines), text
    assert d.api.get("/v1/capabilities").ok(200) and d.api.get("/v1/workers").ok(200)["workers"] is not None
    assert {s["name"] for s in d.api.get("/v1/storages").ok(200)["storages"]} >= {"main", "other", "golden"}


def test_cross_storage(d):
    c, n = Crafted(d.storages["main"]), name()
    d.api.run("reshard", source=c.ref, target={"storage": "other", "name": n})
    assert d.api.run("diff", a=c.ref, b={"storage": "other", "name": n})["result"]["equal"] is True


def test_queue_is_bounded(spawn):
    d = spawn(args=["--queue-max", "2"])
    sd = big(d, 128)
    answers = [d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": to(f"q{i}")}) for i in range(20)]
    refused = [a for a in answers if a.status != 202]
    assert refused and all(a.problem("too_many_jobs", status=429)["retryable"] for a in refused)
    for a in answers:
        if a.status == 202:
            assert d.api.wait(a.json)["state"] == "succeeded"


@pytest.mark.long
def test_streams_are_bounded(d):
    before, open_ = len(lib.fd_targets(d.proc.pid)), []
    try:
        for _ in range(2100):
            c = d.api.connect(timeout=120)
            c.request("GET", "/v1/events", headers={"Accept": "text/event-stream"})
            r = c.getresponse()
            open_.append(c)
            if r.status != 200:
                p = lib.check_problem(json.loads(r.read()), "too_many_streams")
                assert p["retryable"] is True
                break
        else:
            raise AssertionError("2100 streams")
    finally:
        for c in open_:
            c.sock and c.sock.close()
            c.close()
    lib.wait_for(lambda: len(lib.fd_targets(d.proc.pid)) <= before + 2, 15, "streams given back")


def test_replaced_while_it_is_read(d):
    """A reader of the old one ends well, with the old bytes or the new ones, or says that it was replaced."""
    n, sd, other = name(), big(d, 128), small(d)
    d.api.run("save", source={"state_dict": sd}, target=to(n))
    for i in range(3):
        read = d.api.submit("reshard", source=to(n), target=to(f"{n}-copy{i}"))
        d.api.run("save", source={"state_dict": (other, sd)[i % 2]}, target=to(n), options={"overwrite": True})
        end = d.api.wait(read)
        if end["state"] == "failed":
            lib.check_problem(end["error"], "checkpoint_replaced")
        else:
            d.api.run("verify", source=to(f"{n}-copy{i}"), level="digest")


def test_formats_that_cannot_be_used(d):
    c, n = Crafted(d.storages["main"]), name()
    d.api.fails("reshard", "format_unsupported", "unsupported", source=c.ref, target={**to(n), "format": "dcp-rank-local"})
    where = d.storages["main"] / n
    where.mkdir(parents=True)
    (where / "model.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    d.api.fails("load", "format_unsupported", "not_a_checkpoint", "not_found", "checkpoint_incomplete", source=to(n),
                target={"state_dict": lib.fresh()})


def test_what_is_not_selected_is_neither_compared_nor_verified(d):
    a, b = lib.fresh(), lib.fresh()
    one, two = struct.pack("<4f", 1, 2, 3, 4), struct.pack("<4f", 1, 2, 3, 5)
    values = {"values": {"lr": {"json": 1.5}, "model.step": {"json": 1}}}
    d.put(a, [lib.image({"model.w": ("F32", [4], one), "optim.m": ("F32", [4], one)}, values)])
    d.put(b, [lib.image({"model.w": ("F32", [4], one), "optim.m": ("F32", [4], two), "optim.more": ("F32", [4], two)}, values)])
    both = {"a": {"state_dict": a}, "b": {"state_dict": b}}
    whole = d.api.run("diff", **both)["result"]
    assert {x["path"] for x in whole["differences"]} == {"optim.m", "optim.more"}
    assert d.api.run("diff", **both, include=["model.*"])["result"]["equal"] is True
    assert {x["path"] for x in d.api.run("diff", **both, exclude=["*.more"])["result"]["differences"]} == {"optim.m"}
    name = {"storage": "main", "name": lib.fresh()}
    d.api.run("save", source={"state_dict": a}, target=name)
    for level in ("structure", "digest", "values"):
        got = d.api.run("verify", source=name, level=level, include=["model.*"])["result"]
        assert (got["tensors"], got["values"] if level != "values" else 1) == (1, 1), got
    d.drop(a, b)
