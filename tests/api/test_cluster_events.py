"""The stream of a job's events comes from any node of a cluster, and follows the job to the node that takes it over."""

import pytest
from events import Events
from test_cluster import cluster, held_job, own, pair, server  # noqa: F401
from test_cluster_jobs import save
from test_cluster_takeover import big, go_on, known_to_etcd, paused_worker, slow_reshard

import dcpd as lib

END = 60 * lib.PATIENCE


def test_any_node_streams_a_jobs_events(pair):
    a, b = pair
    done = save(a, "run/step-1")["id"]
    own_, other = Events(a, done), Events(b, done)
    assert own_.to_the_end(END) == other.to_the_end(END) and own_.states()[-1] == "succeeded"
    sse = b.api.get(f"/v1/jobs/{done}/events")
    assert sse.headers["Content-Type"] == "text/event-stream" and sse.body.startswith(b"retry: 1000\n\nid: ")
    assert sse.body.count(b"event: ") == len(other.seen) and sse.body == a.api.get(f"/v1/jobs/{done}/events").body
    ids = other.ids()
    for d in (a, b):
        assert Events(d, done, last=ids[1]).to_the_end(END) == own_.seen[2:]
        assert Events(d, done, last=ids[-1]).to_the_end(END) == []
        again = Events(d, done, last="0ABCDE-7").to_the_end(END)
        assert again[0] == {"type": "lost"} and again[1:] == own_.seen, "an id of another daemon says nothing about this one's events"
        for bad in ("x", "ABC-1", f"{ids[0]}x", "1" * 60, "0ABCDE-" + "1" * 30):
            d.api.get(f"/v1/jobs/{done}/events", headers={"Last-Event-ID": bad}).problem("invalid_request")
        d.api.get(f"/v1/jobs/{done}/events?wait=1s").problem("unknown_field", "invalid_request")
        d.api.get(f"/v1/jobs/{done}/events", headers={"Accept": "text/html"}).problem("not_acceptable")
        d.api.get("/v1/jobs/01J00000000000000000000000/events").problem("not_found")
    assert b.ctl("events", done).stdout.count("job.state") == len(other.states())


def test_events_come_as_they_happen(pair):
    a, b = pair
    job = held_job(a, "held")["id"]
    streams = [Events(b, job) for _ in range(3)]
    lib.wait_for(lambda: all(s.states() == ["queued"] for s in streams), 20, "what was")
    gone = Events(b, job)
    gone.connection.sock.shutdown(2)
    b.api.post(f"/v1/jobs/{job}:cancel").ok(202)
    for s in streams:
        s.to_the_end(END)
        assert s.states()[-1] == "cancelled" and len(set(s.ids())) == len(s.ids())


@pytest.mark.long
def test_the_stream_ends_if_the_owner_dies_and_nobody_takes_its_job(pair, server, tmp_path):  # noqa: F811
    a, b = pair
    job, done = held_job(a, "held")["id"], save(a, "run/step-1")["id"]
    lib.wait_for(lambda: b.api.get(f"/v1/jobs/{done}").ok(200)["state"] == "succeeded", 20)
    stream = Events(b, job)
    lib.wait_for(stream.states, 20, "what was")
    server.knows(tmp_path.name, done)
    a.kill()
    end = stream.to_the_end(END)
    assert end[-1]["type"] == "job.away" and end[-1]["data"] == {"job": job, "node": "a"}
    assert Events(b, done).to_the_end(END)[-1]["data"]["state"] == "succeeded", "of what has ended etcd knows the end"


@pytest.mark.long
def test_the_stream_follows_a_job_to_its_new_owner(pair):
    """The owner's own stream does, too, when it is there again."""
    a, b = pair
    big(a, "src", 48)
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    at_a, at_b = Events(a, job), Events(b, job)
    lib.wait_for(at_b.states, 20, "what was")
    pids = paused_worker(a, job)
    try:
        end = at_b.to_the_end(END)
    finally:
        go_on(pids)
    assert at_b.states()[-1] == "succeeded" and "lost" in at_b.types(), end
    assert b.api.get(f"/v1/jobs/{job}").ok(200)["node"] == "b"
    at_a.to_the_end(END)
    assert at_a.states()[-1] == "succeeded" and at_a.ids()[-1] == at_b.ids()[-1]
    first = next(i for i in at_b.ids() if i[:6] == job[-6:])
    assert Events(b, job, last=first).to_the_end(END)[0] == {"type": "lost"}


@pytest.mark.long
def test_a_third_node_follows_and_streams_are_limited(cluster):
    a, b, c = cluster("a", "b", "c")
    c.sees(a="joined", b="joined", c="joined")
    big(a, "src", 48)
    job = slow_reshard(a, "src", "dst")["id"]
    known_to_etcd(a, job)
    streams = [Events(c, job) for _ in range(128)]
    c.api.get(f"/v1/jobs/{job}/events").problem("too_many_streams")
    a.kill()
    for s in streams:
        assert s.to_the_end(END) and s.states()[-1] == "succeeded"
    assert Events(c, job).to_the_end(END)
