"""Traces: a job takes part in its caller's trace, and tells a collector how long it and its stages took, without waiting for that."""
import json
import re
import secrets
import socket
import time

import dcpd as lib
import pytest
from crafted import Crafted
from receiver import Receiver
from test_metrics import scrape


@pytest.fixture
def collector():
    r = Receiver()
    yield r
    r.close()


@pytest.fixture
def traced(spawn, collector):
    return spawn(args=["--otlp-endpoint", f"http://127.0.0.1:{collector.port}/", "--log-format", "json"])


def submit(d, kind, traceparent=None, **body):
    head = {"traceparent": traceparent} if traceparent else {}
    return d.api.wait(d.api.post("/v1/jobs", {"kind": kind, **body}, headers=head).ok(202)["id"])


def spans_of(collector, n):
    path, headers, body = collector.wait(n)[n - 1]
    assert path == "/v1/traces" and headers["Content-Type"] == "application/json" and "Dcpd-Signature" not in headers
    resource, = json.loads(body)["resourceSpans"]
    named = {a["key"]: a["value"]["stringValue"] for a in resource["resource"]["attributes"]}
    assert named["service.name"] == "dcpd" and named["host.name"] == socket.gethostname()
    scope, = resource["scopeSpans"]
    return scope["spans"]


def check(spans, job):
    """One span for the job, below it one a stage, each after the other, within the job's time."""
    root, *stages = spans
    assert root["name"] == job["kind"] and root["kind"] == 2 and all(s["kind"] == 1 for s in stages)
    assert {s["traceId"] for s in spans} == {job["trace"]["trace_id"]} and root["spanId"] == job["trace"]["span_id"]
    assert {s["parentSpanId"] for s in stages} == {root["spanId"]} and len({s["spanId"] for s in spans}) == len(spans)
    assert all(re.fullmatch(r"[0-9a-f]{16}", s["spanId"]) and s["startTimeUnixNano"].isdigit() for s in spans)
    times = [(int(s["startTimeUnixNano"]), int(s["endTimeUnixNano"])) for s in stages]
    assert [s["name"] for s in stages if s["name"] != "queued"] == [s["stage"] for s in job["stages"]]
    assert all(a <= b for a, b in times) and all(x[1] == y[0] for x, y in zip(times, times[1:]))
    assert int(root["startTimeUnixNano"]) <= times[0][0] and times[-1][1] == int(root["endTimeUnixNano"])
    told = {a["key"]: a["value"] for a in root["attributes"]}
    assert told["dcpd.job"] == {"stringValue": job["id"]} and told["dcpd.state"] == {"stringValue": job["state"]}
    return root, told


def test_a_job_is_part_of_its_callers_trace(traced, collector):
    d = traced
    c = Crafted(d.storages["main"])
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    j = submit(d, "reshard", f"00-{trace}-{span}-01", source=c.ref, target={"storage": "main", "name": "t/1"})
    assert j["state"] == "succeeded" and j["trace"]["trace_id"] == trace and j["trace"]["parent_id"] == span and j["trace"]["sampled"]
    root, told = check(spans_of(collector, 1), j)
    assert root["parentSpanId"] == span and root["status"] == {"code": 1} and {"metadata", "copy"} <= {s["stage"] for s in j["stages"]}
    assert told["dcpd.target"] == {"stringValue": "main:t/1"} and told["dcpd.bytes"] == {"intValue": str(j["progress"]["bytes_done"])}
    own = submit(d, "verify", source=c.ref)
    root, told = check(spans_of(collector, 2), own)
    assert "parentSpanId" not in root and own["trace"]["trace_id"] != trace
    bad = submit(d, "verify", source={"storage": "main", "name": c.name}, level="values", include=["no.such.tensor"])
    if bad["state"] == "failed":
        root, told = check(spans_of(collector, 3), bad)
        assert root["status"]["code"] == 2 and root["status"]["message"] and told["error.type"] == {"stringValue": bad["error"]["code"]}
    least = len(j["stages"]) + len(own["stages"]) + 2
    lib.wait_for(lambda: scrape(d).get(("dcpd_trace_spans_total", 'outcome="sent"'), 0) >= least, 10, "counted")
    lines = [json.loads(x) for x in d.tail(1 << 20).splitlines() if x.startswith("{")]
    assert {x["event"] for x in lines if x.get("trace") == trace and x.get("job") == j["id"]} == {"job created", "job state", "job ended"}


def test_jobs_that_end_together_are_told_together(traced, collector):
    c = Crafted(traced.storages["main"])
    jobs = [traced.api.submit("verify", source=c.ref)["id"] for _ in range(20)]
    stages = {i: len(traced.api.wait(i)["stages"]) for i in jobs}
    expected = lambda: sum(stages.values()) + len(jobs) <= scrape(traced).get(("dcpd_trace_spans_total", 'outcome="sent"'), 0)
    lib.wait_for(expected, 10, "all spans sent")
    told = [json.loads(body)["resourceSpans"][0]["scopeSpans"][0]["spans"] for _, _, body in collector.wait(1)]
    roots = [s["attributes"][0]["value"]["stringValue"] for spans in told for s in spans if s["name"] == "verify"]
    assert sorted(roots) == sorted(jobs) and len(told) < len(jobs)


@pytest.mark.parametrize("text,taken", [
    (f"00-{'a' * 32}-{'b' * 16}-00", False), (f"cc-{'a' * 32}-{'b' * 16}-01-more", True), (f"00-{'0' * 32}-{'b' * 16}-01", None),
    (f"00-{'A' * 32}-{'b' * 16}-01", None), ("x" * 5000, None),
])
def test_traceparents(d, text, taken):
    """Not sampled: kept, not sent. One that the standard does not have counts as none; without a collector there is no trace then."""
    c = Crafted(d.storages["main"])
    j = submit(d, "verify", text, source=c.ref)
    assert (j.get("trace") is None) == (taken is None) and (taken is None or j["trace"]["sampled"] == taken)


def test_a_collector_that_is_away_costs_spans_only(spawn):
    """Nobody listens, then somebody who never answers: jobs take no longer, and what was not sent is counted."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        d = spawn(args=["--otlp-endpoint", f"http://127.0.0.1:{s.getsockname()[1]}"])
        c = Crafted(d.storages["main"])
        began = time.monotonic()
        jobs = [submit(d, "verify", source=c.ref) for _ in range(3)]
        assert all(j["state"] == "succeeded" for j in jobs) and time.monotonic() - began < 10 * lib.PATIENCE
        spans = sum(1 + len(j["stages"]) for j in jobs)
        lib.wait_for(lambda: scrape(d).get(("dcpd_trace_spans_total", 'outcome="dropped"'), 0) >= spans, 20, "dropped spans counted")
        assert d.tail(1 << 20).count("spans are dropped") == 1, "said once a minute"
        s.listen()  # takes connections, says nothing
        assert submit(d, "verify", source=c.ref)["state"] == "succeeded" and d.api.get("/livez").status == 200
        d.stop()


def test_wrong_endpoints_are_refused(spawn):
    for bad in ("localhost:4318", "ftp://x", "http://user@x", "http://a b"):
        with pytest.raises(Exception):
            spawn(args=["--otlp-endpoint", bad])


def test_request_ids(spawn):
    d = spawn(args=["--log-format", "json"])
    c = Crafted(d.storages["main"])
    for sent, kept in (("req-1/α".encode("latin-1", "ignore").decode(), True), ("x" * 129, False), ("a b", False)):
        r = d.api.post("/v1/jobs", {"kind": "verify", "source": c.ref}, headers={"X-Request-Id": sent})
        job = d.api.wait(r.ok(202)["id"])["id"]
        given = r.headers["X-Request-Id"]
        assert given == sent if kept else re.fullmatch("[0-9a-f]{16}", given)
        lines = [json.loads(x) for x in d.tail(1 << 20).splitlines() if x.startswith("{")]
        line, = [x for x in lines if x["event"] == "job created" and x["job"] == job]
        assert line["request"] == given and "trace" not in line
