"""A host lets a training's processes go when the run's saves are durable: `:drain` waits for them."""
import re
import threading
import time

import package

import dcpd as lib


def save(d, name, generation=1, **more):
    """A save of a state dict that is not sealed yet: it waits for that. Returns the job and what seals."""
    sd = lib.fresh()
    d.create(sd)
    job = d.api.submit("save", source={"state_dict": sd, "generation": generation, "await_seal": True},
                       target={"storage": "main", "name": name}, **more)

    def seal():
        data = lib.image({"a": ("U8", [50], bytes(50))})
        lib.write_segment(d.reserve(sd, 0, len(data), generation)["segment"], data)
        d.seal(sd, 0, generation, len(data))
    return job["id"], seal


def waiting(d, ask):
    """The list that will have the answer, and the thread that waits for it; the daemon has the request."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    before = connections(d)
    thread.start()
    lib.wait_for(lambda: connections(d) > before, 20, "the request")
    for _ in range(20):
        d.api.get("/livez").ok(200)
        time.sleep(0.01)
    return answers, thread


def connections(d):
    return int(re.search(r"^dcpd_http_connections (\d+)", d.api.get("/metrics").body.decode(), re.M)[1])


def drain(d, run, wait=None):
    return d.api.post(f"/v1/runs/main/{run}:drain{wait and '?wait=' + wait or ''}").ok(200)


def test_saves_of_the_run_are_waited_for(d):
    run = lib.fresh()
    assert drain(d, run, "30s") == {"storage": "main", "run": run, "drained": True, "saves": []}
    job, seal = save(d, f"{run}/step-1")
    other, seal_other = save(d, f"{run}-b/step-1")
    got = drain(d, run)
    assert not got["drained"] and [(s["id"], s["name"], s["state"]) for s in got["saves"]] == [(job, f"{run}/step-1", "queued")]
    assert not drain(d, run, "200ms")["drained"]
    answers, waits = waiting(d, lambda: drain(d, run, "60s"))
    later, seal_later = save(d, f"{run}/step-2", 1)
    seal()
    assert d.api.wait(job)["state"] == "succeeded"
    assert not answers, "the save that was made meanwhile counts, too"
    seal_later()
    waits.join()
    assert answers[0]["drained"] and {s["id"]: s["state"] for s in answers[0]["saves"]} == {job: "succeeded", later: "succeeded"}
    assert d.api.get(f"/v1/jobs/{later}").ok(200)["milestones"]["durable"]
    assert drain(d, run, "60s")["saves"] == []
    seal_other()
    d.api.wait(other)


def test_a_run_of_names_with_one_part(d):
    job, seal = save(d, name := lib.fresh())
    assert [s["name"] for s in drain(d, "-")["saves"]] == [name]
    seal()
    d.api.wait(job)


def test_bad_requests(d):
    d.api.post("/v1/runs/none/run:drain").problem("not_found")
    d.api.post("/v1/runs/main/.run:drain").problem("name_invalid")
    d.api.post("/v1/runs/main/run:drain?wait=long").problem("invalid_request")
    d.api.post("/v1/runs/main/run:drain", {"now": True}).problem("unknown_field")


def test_dcpctl_and_the_package(d):
    run = lib.fresh()
    assert d.ctl("drain", f"main:{run}").stdout == f"main:{run} is drained\n"
    job, seal = save(d, f"{run}/step-1")
    r = d.ctl("drain", f"main:{run}", "--wait", "300ms")
    assert r.returncode == 4 and job in r.stdout and r.stdout.endswith("is not drained\n"), r
    seal()
    with package.daemon(f"unix://{d.socket}") as dcpd, dcpd.connect(f"unix://{d.socket}") as client:
        assert client.runs.drain(f"main:{run}", wait=60)["drained"]
    broken, _ = save(d, f"{run}/step-2")
    answers, waits = waiting(d, lambda: d.ctl("drain", f"main:{run}"))
    sd = d.api.get(f"/v1/jobs/{broken}").ok(200)["source"]["state_dict"]
    lib.write_segment(d.reserve(sd, 0, 4096, 1)["segment"], b"no image" * 512)
    d.seal(sd, 0, 1, 4096)
    waits.join()
    assert answers[0].returncode == 5 and "failed" in answers[0].stdout, answers
    assert d.ctl("undrain", f"main:{run}").returncode == 2
