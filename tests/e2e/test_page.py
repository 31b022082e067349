"""The dashboard in Chromium: every state it can show, against a scripted daemon, and the main ones against the real one."""

import pytest

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect  # noqa: E402

from fake_api import Fake  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def fake():
    f = Fake()
    f.storages = [storage("main"), storage("cold")]
    yield f
    f.down()


def storage(name, **more):
    return {"name": name, "path": f"/data/{name}", "free_bytes": 30 * MIB, "total_bytes": 100 * MIB, "fs": "ext4",
            "writable": True, "state": "ok", **more}


def job(n, state="running", **more):
    return {"id": f"01J{n:023d}", "kind": "reshard", "state": state, "stage": "copy" if state == "running" else None,
            "created_at": "2026-01-01T00:00:00Z", "started_at": "2026-01-01T00:00:01Z", "finished_at": None,
            "source": {"storage": "main", "name": "a"}, "target": {"storage": "main", "name": f"b{n}"},
            "milestones": {"snapshotted": False, "durable": False}, "progress": None, "result": None, "error": None, **more}


def progress(done, total, ranks):
    share = [{"rank": r, "bytes_done": done // ranks, "bytes_total": total // ranks} for r in range(ranks)]
    return {"bytes_done": done, "bytes_total": total, "rate": 5 * MIB, "eta_s": 3.0, "ranks": share}


def enter(page, fake, view="jobs"):
    page.goto(f"{fake.url}#token={fake.token}")
    expect(page.locator("#connection")).to_have_text("Live")
    page.click(f"nav a[href='#/{view}']")


def row(page, table, key):
    return page.locator(f"#{table} tr[data-key='{key}']")


def accessible(page, always=False):
    """Dialogs and states only with LONG=1: each look takes as long as a test. test_journeys looks at every view in any case."""
    if not (always or page.is_looked_at_whole):
        return
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(page, options={"resultTypes": ["violations"]})  # of what passes one example a rule: half of the work
    assert found.violations_count == 0, found.generate_report()


def test_asks_for_a_token_and_keeps_it_out_of_the_address(page, fake):
    page.goto(fake.url)
    expect(page.locator("#h-login")).to_be_visible()
    assert not [path for _, path, _ in fake.log if path.startswith("/v1")]
    accessible(page)
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#login-why")).to_contain_text("refused")
    page.fill("#token", fake.token)
    page.keyboard.press("Enter")
    expect(page.locator("#connection")).to_have_text("Live")
    page.goto("about:blank")
    page.goto(f"{fake.url}#token={fake.token}")
    expect(page.locator("#connection")).to_have_text("Live")
    assert fake.token not in page.url
    page.reload()
    expect(page.locator("#connection")).to_have_text("Live")
    assert not [path for _, path, _ in fake.log if fake.token in path]


@pytest.mark.long
def test_shows_that_there_is_nothing(page, fake):
    fake.storages = []
    enter(page, fake)
    for view, words in (("jobs", "No jobs yet."), ("checkpoints", "No checkpoints yet."),
                        ("storages", "No storage is configured."),
                        ("state-dicts", "No state dict is in shared memory."), ("workers", "No worker is running.")):
        page.click(f"nav a[href='#/{view}']")
        expect(page.locator(f"#{view} tbody")).to_have_text(words)
        accessible(page)


@pytest.mark.long
def test_a_job_appears_and_moves_without_reload(page, fake):
    enter(page, fake)
    fake.put_job(job(1, "queued"))
    line = row(page, "jobs", job(1)["id"])
    expect(line.locator(".state")).to_have_text("queued")
    fake.put_job(job(1, progress=progress(25 * MIB, 100 * MIB, 4)), "job.progress")
    expect(line.locator(".state")).to_have_text("running")
    expect(line).to_contain_text("main:a → main:b1")
    expect(line).to_contain_text("25.0 MiB of 100 MiB · 5.0 MiB/s · 3 s left")
    expect(line.locator(".ranks li")).to_have_count(4)
    assert line.locator("progress").first.get_attribute("value") == "25.0"
    expect(page.locator("#count-jobs")).to_have_text("1 active")
    accessible(page)
    line.get_by_role("link").click()
    expect(page.locator("#h-job")).to_have_text(f"Job {job(1)['id']}")
    fake.plans[job(1)["id"]] = {"files": [{"name": "__0_0.distcp"}]}
    expect(page.locator("#job-facts")).not_to_contain_text("Node")
    moved = {"from": "host-1", "to": "host-2", "at": "2026-01-01T00:00:05Z", "attempt": 1, "why": "the lease of its node was over"}
    fake.put_job(job(1, "succeeded", finished_at="2026-01-01T00:00:11Z", result={"bytes_written": 104857600}, node="host-2",
                     taken_over=[moved], progress=progress(100 * MIB, 100 * MIB, 4)))
    expect(page.locator("#job-taken-over li")).to_have_count(1)
    expect(page.locator("#job-taken-over")).to_contain_text("from host-1 to host-2")
    expect(page.locator("#job-taken-over")).to_contain_text("the lease of its node was over")
    expect(page.locator("#job-facts")).to_contain_text("Node")
    expect(page.locator("#job-result")).to_contain_text('"bytes_written": 104857600')
    expect(page.locator("#job-plan")).to_contain_text("__0_0.distcp")
    expect(page.locator("#announce")).to_contain_text("succeeded")
    accessible(page)


@pytest.mark.long
def test_an_event_without_the_job_makes_the_page_ask(page, fake):
    fake.jobs[job(1)["id"]] = job(1)
    enter(page, fake)
    line = row(page, "jobs", job(1)["id"])
    expect(line.locator(".state")).to_have_text("running")
    fake.jobs[job(1)["id"]] = job(1, "succeeded")
    fake.emit("job.state", {"job": job(1)["id"], "state": "succeeded"})
    expect(line.locator(".state")).to_have_text("succeeded")


@pytest.mark.long
def test_events_that_come_while_it_asks_are_not_lost(page, fake):
    """As the daemon does it: job.state names the job only, job.progress brings the progress only."""
    one = job(1)["id"]
    fake.jobs[one] = job(1, "queued")
    enter(page, fake)
    for n in range(20):
        fake.jobs[one] = job(1, "running", progress=progress(n * MIB, 100 * MIB, 2))
        fake.emit("job.state", {"job": one, "kind": "reshard", "state": "running", "stage": "copy"})
        fake.emit("job.progress", {"job": one, "progress": progress(n * MIB, 100 * MIB, 2)})
    line = row(page, "jobs", one)
    expect(line.locator(".state")).to_have_text("running")
    expect(line).to_contain_text("19.0 MiB of 100 MiB")
    fake.emit("job.state", {"job": job(2)["id"], "kind": "save", "state": "queued", "stage": None})
    fake.jobs[job(2)["id"]] = job(2, "queued", kind="save")
    fake.emit("job.state", {"job": job(2)["id"], "kind": "save", "state": "queued", "stage": None})
    expect(row(page, "jobs", job(2)["id"])).to_contain_text("save")


def test_an_error_says_where(page, fake):
    error = {"type": "/problems/digest_mismatch", "title": "The stored bytes are not those that were written", "status": 422,
             "code": "digest_mismatch", "detail": "chunk [4, 0] of model.w", "retryable": False, "rank": 2,
             "fqn": "model.layers.0.w", "file": "__2_0.distcp", "offset": 4096, "expected": "aa", "actual": "bb"}
    fake.jobs[job(1)["id"]] = job(1, "failed", error=error)
    enter(page, fake)
    line = row(page, "jobs", job(1)["id"])
    expect(line).to_contain_text("digest_mismatch")
    expect(line).to_contain_text("rank 2, model.layers.0.w, __2_0.distcp at offset 4096")
    line.get_by_role("link").click()
    for key in ("code", "rank", "fqn", "file", "offset", "expected", "actual"):
        expect(page.locator(f"[data-error={key}]")).to_have_text(str(error[key]))
    accessible(page)


def test_damage_is_marked_and_listed(page, fake):
    found = [{"fqn": f"model.layers.{i}.w", "rank": i % 4, "file": f"__{i % 4}_0.distcp", "offset": 4096 * i, "bytes": 65536,
              "part": "payload", "code": "digest_mismatch"} for i in range(300)]
    found[0] = {"fqn": None, "rank": None, "file": ".metadata", "offset": 0, "bytes": 700, "part": "metadata"}
    found[1]["fqn"] = "<img src=x>"
    error = {"type": "urn:dcpd:problem:checkpoint_damaged", "title": "The checkpoint is damaged", "status": 422, "retryable": False,
             "code": "checkpoint_damaged", "detail": "1200 places are damaged", "damage": found, "damage_count": 1200}
    fake.jobs[job(1)["id"]] = job(1, "failed", kind="verify", error=error)
    warning = {"code": "checkpoint_damaged_known", "detail": "the checkpoint was found damaged at noon"}
    fake.jobs[job(2)["id"]] = job(2, "succeeded", kind="load", result={"warnings": [warning]}, finished_at="2026-01-01T00:00:02Z")

    def checkpoint(name, verified):
        return {"storage": "main", "name": name, "format": "dcp", "bytes": MIB, "modified_at": "2026-01-01T00:00:00Z", "world_size": 4,
                "dcpd": True, "verified": verified}

    at = {"level": "digest", "at": "2026-01-01T00:00:02Z", "job": job(1)["id"]}
    fake.checkpoints = [checkpoint("bad", {"state": "damaged", "damage_count": 1200, **at}), checkpoint("unknown", None),
                        checkpoint("good", {"state": "verified", "unverifiable": 0, **at})]
    enter(page, fake, "checkpoints")
    for name, words in (("bad", "damaged"), ("good", "verified")):
        expect(row(page, "checkpoints", f"main:{name}").locator(".state")).to_have_text(words)
        expect(row(page, "checkpoints", f"main:{name}")).to_contain_text("digest")
    expect(row(page, "checkpoints", "main:bad")).to_contain_text("1200 places")
    expect(row(page, "checkpoints", "main:unknown").locator(".state")).to_have_count(0)
    accessible(page)
    page.fill("#checkpoints-text", "damaged")
    expect(page.locator("#checkpoints tbody tr")).to_have_count(1)
    # a job so short that it has ended when the page first asks for it; a silent stream makes the page read all again after 45 s
    fake.checkpoints[1] = checkpoint("unknown", {"state": "damaged", **at})
    fake.jobs[job(3)["id"]] = job(3, "failed", kind="verify", error=error)
    fake.emit("job.state", {"job": job(3)["id"], "kind": "verify", "state": "failed", "stage": None})
    expect(page.locator("#checkpoints tbody tr")).to_have_count(2, timeout=20000)
    row(page, "checkpoints", "main:bad").get_by_role("link", name="job").click()
    table = page.locator("#job-damage table")
    expect(page.locator("#job-damage h3")).to_have_text("Damage: the first 100 of 1200 places")
    expect(table.locator("tbody tr")).to_have_count(100)
    expect(table.locator("tbody tr").nth(0)).to_have_text(".metadata––0700metadata")
    expect(table).to_contain_text("<img src=x>")
    expect(page.locator("[data-error=damage]")).to_have_count(0)
    expect(page.locator("[data-error=damage_count]")).to_have_text("1200")
    accessible(page)
    page.goto(f"{fake.url}#/jobs/{job(2)['id']}")
    expect(page.locator("#job-warnings")).to_have_text("the checkpoint was found damaged at noon")
    accessible(page)


@pytest.mark.long
def test_what_came_of_operations_on_state_dicts(page, fake):
    ended = {"finished_at": "2026-01-01T00:00:02Z"}
    moved = {"backend": "shm", "generation": 8, "tensors": 3, "moved_bytes": 2 * MIB, "needed_bytes": 2 * MIB, "cast": [{"path": "w"}]}
    differing = {"equal": False, "difference_count": 2, "differences": [
        {"path": "model.<b>w", "what": "size", "a": "[4, 2]", "b": "[4, 3]"}, {"path": "step", "what": "value", "a": 7, "b": None}]}
    shm = {"source": {"state_dict": "train"}, "target": {"state_dict": "full"}}
    fake.jobs[job(1)["id"]] = job(1, "succeeded", kind="gather", result=moved, **shm, **ended)
    pair = {"a": {"state_dict": "train"}, "b": {"state_dict": "full"}}
    fake.jobs[job(2)["id"]] = {**job(2, "succeeded", kind="compare", result=differing, **ended), "source": None, "target": None, **pair}
    enter(page, fake)
    expect(row(page, "jobs", job(1)["id"])).to_contain_text("shm:train → shm:full")
    expect(row(page, "jobs", job(2)["id"])).to_contain_text("2 differences")
    row(page, "jobs", job(1)["id"]).get_by_role("link").click()
    for words in ("2.0 MiB of 2.0 MiB needed", "shm", "8", "cast"):
        expect(page.locator("#job-outcome")).to_contain_text(words)
    accessible(page)
    page.get_by_role("link", name="shm:full").click()
    expect(page.locator("#h-state-dicts")).to_be_visible()
    page.goto(f"{fake.url}#/jobs/{job(2)['id']}")
    table = page.locator("#job-differences")
    expect(table.locator("tbody tr")).to_have_count(2)
    expect(table).to_contain_text("model.<b>w")
    accessible(page)


def test_cancel_and_retry_ask_first(page, fake):
    fake.jobs[job(1)["id"]] = job(1)
    fake.jobs[job(2)["id"]] = job(2, "committing")
    enter(page, fake)
    line = row(page, "jobs", job(1)["id"])
    expect(row(page, "jobs", job(2)["id"]).get_by_role("button")).to_have_count(0)
    line.get_by_role("button", name="Cancel").click()
    expect(page.locator("#confirm")).to_be_visible()
    accessible(page)
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    assert not [m for m, _, _ in fake.log if m == "POST"]
    line.get_by_role("button", name="Cancel").click()
    page.click("#confirm-yes")
    expect(line.locator(".state")).to_have_text("cancelled")
    line.get_by_role("button", name="Retry").click()
    page.click("#confirm-yes")
    expect(line.locator(".state")).to_have_text("queued")
    posts = [(path, headers) for m, path, headers in fake.log if m == "POST"]
    assert [p for p, _ in posts] == [f"/v1/jobs/{job(1)['id']}:cancel", f"/v1/jobs/{job(1)['id']}:retry"]
    assert all(h["Idempotency-Key"] for _, h in posts)


@pytest.mark.long
def test_a_refused_cancel_is_shown(page, fake):
    fake.jobs[job(1)["id"]] = job(1)
    enter(page, fake)
    line = row(page, "jobs", job(1)["id"])
    line.get_by_role("button", name="Cancel").click()
    fake.jobs[job(1)["id"]] = job(1, "committing")
    page.click("#confirm-yes")
    expect(page.locator("#notices")).to_contain_text("the job is committing")
    expect(line.locator(".state")).to_have_text("committing")


@pytest.mark.long
def test_buttons_survive_live_updates(page, fake):
    fake.jobs[job(1)["id"]] = job(1)
    enter(page, fake)
    button = row(page, "jobs", job(1)["id"]).get_by_role("button", name="Cancel")
    button.focus()
    handle = button.element_handle()
    for n in range(1, 6):
        fake.put_job(job(1, progress=progress(n * MIB, 100 * MIB, 2)), "job.progress")
    expect(row(page, "jobs", job(1)["id"])).to_contain_text("5.0 MiB of 100 MiB")
    assert handle.evaluate("b => b.isConnected && document.activeElement === b")


@pytest.mark.long
def test_ten_thousand_jobs_are_paged_and_found(page, fake):
    for n in range(10000):
        fake.jobs[job(n)["id"]] = job(n, "failed" if n == 7 else "succeeded", labels={"run": f"r{n % 10}"})
    enter(page, fake)
    expect(page.locator("#jobs tbody tr")).to_have_count(50)
    expect(page.locator("#jobs-pager")).to_contain_text("1–50 of 200+ jobs")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#jobs tbody tr").first).to_contain_text(job(9949)["id"])
    page.select_option("#jobs-state", "failed")
    expect(row(page, "jobs", job(7)["id"])).to_be_visible()
    page.fill("#jobs-text", "no such thing")
    expect(page.locator("#jobs tbody")).to_have_text("No job matches.")
    page.click("#jobs-clear")
    expect(page.locator("#jobs-pager")).to_contain_text("1–50 of 10000 jobs")
    page.fill("#jobs-text", "B4321")
    expect(page.locator("#jobs tbody tr")).to_have_count(1)


def test_lists_of_everything_else(page, fake):
    fake.checkpoints = [
        {"storage": "main", "name": "run1/step-100", "format": "dcp", "bytes": 3 << 30, "modified_at": "2026-01-01T00:00:00Z",
         "world_size": 8, "dcpd": True},
        {"storage": "cold", "name": "hf", "format": "safetensors", "bytes": 1536, "modified_at": "2026-01-02T00:00:00Z",
         "world_size": 1, "dcpd": False}]
    slot = {"slot": 0, "segment": "/dcpd-x", "state": "sealed", "generation": 7, "bytes": MIB, "image_bytes": MIB,
            "in_use_by": [job(1)["id"]]}
    fake.state_dicts = [{"name": "train", "world_size": 2, "bytes": 2 * MIB},
                        {"name": "old", "world_size": 1, "bytes": MIB, "orphaned_at": "2026-01-01T00:00:00Z"}]
    fake.ranks = {"train": [{"rank": r, "slots": [slot]} for r in (0, 1)]}
    fake.storages = [storage("main"), storage("cold", state="stalled")]
    fake.stalled = {"cold"}
    fake.workers = [{"id": "w1", "pid": 4242, "role": "gang", "gang": 1, "index": 0, "state": "busy", "job": job(1)["id"],
                     "engine": "io_uring", "started_at": "2026-01-01T00:00:00Z"}]
    enter(page, fake, "checkpoints")
    expect(page.locator("#notices")).to_contain_text("Storage cold is stalled")
    expect(row(page, "checkpoints", "main:run1/step-100")).to_contain_text("3.0 GiB")
    accessible(page)
    fake.stalled = set()
    fake.storages = [storage("main"), storage("cold")]
    fake.emit("checkpoint.committed", {"storage": "cold", "name": "hf"})
    expect(row(page, "checkpoints", "cold:hf")).to_contain_text("safetensors")
    page.fill("#checkpoints-text", "step-1")
    expect(page.locator("#checkpoints tbody tr")).to_have_count(1)
    page.click("nav a[href='#/state-dicts']")
    expect(row(page, "state-dicts", "train")).to_contain_text("generation 7")
    expect(row(page, "state-dicts", "train")).to_contain_text("2 sealed")
    expect(row(page, "state-dicts", "train")).not_to_contain_text("orphaned")
    expect(row(page, "state-dicts", "old")).to_contain_text("orphaned")
    accessible(page)
    page.click("nav a[href='#/storages']")
    expect(row(page, "storages", "main")).to_contain_text("30.0 MiB free of 100 MiB")
    fake.storages = [storage("main"), storage("cold", state="stalled")]
    fake.emit("storage.stalled", {"storage": "cold"})
    expect(row(page, "storages", "cold").locator(".state")).to_have_text("stalled")
    accessible(page)
    page.click("nav a[href='#/workers']")
    expect(row(page, "workers", "w1")).to_contain_text("4242")
    fake.workers = []
    fake.emit("worker.lost", {"worker": "w1", "pid": 4242, "signal": 9, "job": job(1)["id"]})
    expect(page.locator("#workers tbody")).to_have_text("No worker is running.")
    expect(page.locator("#notices")).to_contain_text(f"Worker process 4242 was lost (signal 9), with job {job(1)['id']}")
    page.get_by_role("button", name="Dismiss").click()
    expect(page.locator("#notices")).not_to_contain_text("was lost")


@pytest.mark.long
def test_says_when_the_daemon_is_gone_and_goes_on_by_itself(page, fake):
    fake.jobs[job(1)["id"]] = job(1)
    enter(page, fake)
    fake.emit("job.progress", job(1, progress=progress(MIB, 4 * MIB, 2)))
    expect(row(page, "jobs", job(1)["id"])).to_contain_text("1.0 MiB of 4.0 MiB")
    fake.down()
    expect(page.locator("#connection")).to_contain_text("Not connected")
    expect(page.locator("#notices")).to_contain_text("The daemon does not answer")
    expect(row(page, "jobs", job(1)["id"])).to_be_visible()
    accessible(page)
    fake.jobs[job(1)["id"]] = job(1, "succeeded")
    fake.log.clear()
    fake.up()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(row(page, "jobs", job(1)["id"]).locator(".state")).to_have_text("succeeded")
    expect(page.locator("#notices")).to_be_empty()
    resumed = [h for _, path, h in fake.log if path == "/v1/events"]
    assert resumed and resumed[-1]["Last-Event-ID"] == "1"


@pytest.mark.long
def test_shows_what_the_daemon_says_of_itself(page, fake):
    enter(page, fake)
    expect(page.locator("#notices")).to_be_empty()
    fake.warnings = ["workers are not confined to the storages: no Landlock", "the state directory /s is full: dcpd is read-only"]
    fake.emit("daemon.state", {"state": "degraded"})
    expect(page.get_by_text("Workers are not confined to the storages: no Landlock.")).to_be_visible()
    expect(page.get_by_text("The state directory /s is full: dcpd is read-only.")).to_be_visible()
    fake.warnings = []
    fake.emit("daemon.state", {"state": "ready"})
    expect(page.locator("#notices")).to_be_empty()


def test_says_when_a_disk_is_full_by_what_was_measured(page, fake):
    hour = {"bytes": 3 * MIB, "seconds": 7200}
    fake.storages = [storage("main", growth=hour), storage("still", growth={**hour, "bytes": -1}),
                     storage("fresh", growth={**hour, "seconds": 700})]
    fake.capabilities = {**fake.capabilities, "token": "ops", "scope": "submit"}
    enter(page, fake, "")
    words = lambda name: page.locator(f"[data-storage={name}] .forecast")  # noqa: E731
    expect(words("main")).to_have_text("full in 20 h 0 min at 1.5 MiB an hour (measured over 2 h 0 min)")
    expect(words("still")).to_have_text("free space does not shrink (measured over 2 h 0 min)")
    expect(words("fresh")).to_have_text("nothing was written in the last day")
    expect(page.locator(".problems")).to_contain_text("Storage main")
    expect(page.locator("#who-words")).to_have_text("token ops, may submit jobs")


@pytest.mark.long
def test_the_nodes_of_a_cluster(page, fake):
    enter(page, fake, "workers")
    page.evaluate("location.hash = '#/nodes'")
    expect(page.locator("#nodes")).to_contain_text("This daemon is in no cluster.")
    expect(page.locator("#nav-nodes")).to_be_hidden()
    node = {"state": "joined", "advertise": "h:8427", "version": "0.1.0", "jobs": 2, "storages": ["main"]}
    fake.nodes = {"node": "host-1", "nodes": [{**node, "name": "host-1"}, {**node, "name": "host-2"},
                                              {**node, "name": "host-3", "state": "away"}]}
    fake.emit("daemon.state", {"state": "ready"})
    row = lambda name: page.locator(f"#nodes tr[data-key={name}]")  # noqa: E731
    expect(row("host-1")).to_contain_text("answers here")
    expect(row("host-3").locator(".state")).to_have_text("away")
    expect(page.locator("#nav-nodes")).to_contain_text("3")
    page.get_by_role("button", name="Drain host-2").click()
    page.click("#confirm-yes")
    expect(row("host-2").locator(".state")).to_have_text("drained")
    page.get_by_role("button", name="Undrain host-2").click()
    page.click("#confirm-yes")
    expect(row("host-2").locator(".state")).to_have_text("joined")
    accessible(page)
    page.evaluate("location.hash = '#/'")
    expect(page.locator(".problems")).to_contain_text("Node host-3 is away")


def test_hostile_and_long_names_are_only_text(page, fake):
    name = "<img src=x onerror=alert(1)>" + "x" * 180
    fqn = "model." + ".".join(f"layer{n}" for n in range(300))
    fake.jobs[job(1)["id"]] = job(1, "failed", target={"storage": "main", "name": name},
                                  error={"code": "<b>c</b>", "detail": "<script>alert(1)</script>", "fqn": fqn, "rank": 0})
    fake.checkpoints = [{"storage": "main", "name": name, "format": "dcp", "bytes": 1, "modified_at": "x", "world_size": 1}]
    page.set_viewport_size({"width": 360, "height": 700})
    enter(page, fake)
    expect(row(page, "jobs", job(1)["id"])).to_contain_text(fqn)
    expect(row(page, "jobs", job(1)["id"])).to_contain_text("<script>alert(1)</script>")
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    row(page, "jobs", job(1)["id"]).get_by_role("link").click()
    expect(page.locator("[data-error=fqn]")).to_have_text(fqn)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.click("nav a[href='#/checkpoints']")
    expect(page.locator("#checkpoints tbody")).to_contain_text(name)


@pytest.mark.long
def test_dark_scheme_has_contrast_too(page, fake):
    page.emulate_media(color_scheme="dark")
    states = ("queued", "planning", "running", "committing", "succeeded", "failed", "cancelled")
    for n, state in enumerate(states):
        fake.jobs[job(n)["id"]] = job(n, state, error={"code": "c", "fqn": "f"} if state == "failed" else None,
                                      progress=progress(MIB, 2 * MIB, 2))
    enter(page, fake)
    expect(page.locator("#jobs tbody tr")).to_have_count(len(states))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
    accessible(page)
    page.emulate_media(color_scheme="light")
    accessible(page)


@pytest.mark.long
def test_rows_are_cards_on_a_phone(page, fake):
    """No column is out of sight: each cell is below the one before, with its column's name, and still a table's cell."""
    page.set_viewport_size({"width": 390, "height": 800})
    error = {"code": "digest_mismatch", "fqn": "model.layers.1.mlp.weight", "file": "__3_0.distcp", "offset": 4096, "rank": 3}
    fake.put_job(job(1, "failed", error=error), "job.state")
    fake.workers = [{"id": "w1", "pid": 4242, "role": "gang", "state": "busy", "job": job(1)["id"], "storages": ["main"],
                     "engine": "threads", "landlock": 0, "seccomp": True}]
    enter(page, fake)
    cells = row(page, "jobs", job(1)["id"]).locator("th, td:not(:empty)")
    expect(cells.nth(3)).to_contain_text("__3_0.distcp")
    boxes = [cells.nth(i).bounding_box() for i in range(cells.count())]
    assert all(b["x"] >= 0 and b["x"] + b["width"] <= 390 for b in boxes), boxes
    assert all(a["y"] + a["height"] <= b["y"] + 1 for a, b in zip(boxes, boxes[1:])), boxes
    assert page.get_by_role("cell", name="digest_mismatch").get_attribute("data-label") == "Progress"
    accessible(page)
    page.click("nav a[href='#/workers']")
    expect(row(page, "workers", "w1")).to_contain_text("seccomp only")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    accessible(page)


@pytest.mark.long
def test_many_ranks_stay_readable(page, fake):
    fake.jobs[job(1)["id"]] = job(1, progress=progress(0, 4096 * MIB, 4096))
    enter(page, fake)
    line = row(page, "jobs", job(1)["id"])
    expect(line.locator(".ranks li")).to_have_count(9)
    expect(line.locator(".ranks li").last).to_have_text("and 4088 more")
    line.get_by_role("link").click()
    expect(page.locator("#job-body .ranks li")).to_have_count(513)


@pytest.mark.long
def test_keyboard_alone_reaches_everything(page, fake):
    fake.jobs[job(1)["id"]] = job(1)
    enter(page, fake)
    page.reload()
    expect(page.locator(f"[data-act='cancel-{job(1)['id']}']")).to_be_visible()  # what comes later may be behind the focus
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.act || ''") == f"cancel-{job(1)['id']}":
            break
    page.keyboard.press("Enter")
    expect(page.locator("#confirm-no")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#confirm")).to_be_hidden()
    assert not [m for m, _, _ in fake.log if m == "POST"]


PATH = "model.layers.17.self_attn.query_key_value.weight_of_a_name_that_goes_on_and_on_without_any_place_to_break"


@pytest.mark.long
def test_differences_stay_inside_their_panel(page, fake):
    result = {"equal": False, "difference_count": 3, "differences": [
        {"path": PATH, "what": "size", "a": "[4096, 12288]", "b": "[4096, 4096]"},
        {"path": "optim.state." + PATH, "what": "value", "a": "x" * 300, "b": {"lr": 0.001, "betas": [0.9, 0.999], "note": "y" * 200}},
        {"path": "step", "what": "value", "a": 7, "b": None}]}
    done = job(1, "succeeded", kind="diff", result=result, finished_at="2026-01-01T00:00:02Z")
    pair = {side: {"storage": "main", "name": side} for side in "ab"}
    fake.jobs[done["id"]] = {**done, "source": None, "target": None, **pair}
    enter(page, fake)
    for width in (1600, 1280, 800, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(f"{fake.url}#/jobs/{done['id']}")
        expect(page.locator("#job-differences tbody tr")).to_have_count(3)
        panel, table = (page.locator(x).bounding_box() for x in ("#job-outcome", "#job-differences"))
        assert panel["x"] <= table["x"] and table["x"] + table["width"] <= panel["x"] + panel["width"], (width, panel, table)
        cells = page.locator("#job-differences tbody td")
        boxes = [cells.nth(i).bounding_box() for i in range(cells.count())]
        assert all(b["x"] + b["width"] <= panel["x"] + panel["width"] + 1 for b in boxes), (width, boxes)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
    assert page.get_by_role("cell", name="[4096, 12288]").get_attribute("data-label") == "A"
    accessible(page)


@pytest.mark.long
def test_a_diff_shows_how_far_tensors_moved(page, fake):
    counts = {"added": 0, "removed": 1, "reshaped": 0, "retyped": 0, "kind": 0, "changed": 2, "unchanged": 7}
    figures = {"dtype": "float32", "shape": [4096, 12288], "elements": 50331648, "count": 17, "not_finite": 0, "max_abs": 0.25,
               "max_rel": "inf", "l2": 3.5, "cosine": 0.9998762, "bits_changed": 123456, "first_index": [0, 3]}
    result = {"equal": False, "difference_count": 3, "differences": [{"path": "gone", "what": "missing", "a": "float32", "b": None}],
              "movers": [{"path": PATH, "rel_l2": "inf", **figures}, {"path": "b", "rel_l2": 0.001234567, **figures, "cosine": None}],
              "totals": {"tensors": counts, "values": {"changed": 0}, "count": 34},
              "unchanged": {"tensors": 7, "bytes": 3 * MIB, "share": 0.75, "by_digest": {"tensors": 6, "bytes": 2 * MIB},
                            "by_reading": {"tensors": 1, "bytes": MIB}}}
    done = job(1, "succeeded", kind="diff", result=result, finished_at="2026-01-01T00:00:02Z")
    fake.jobs[done["id"]] = done
    enter(page, fake)
    page.goto(f"{fake.url}#/jobs/{done['id']}")
    rows_ = page.locator("#job-movers tbody tr")
    expect(rows_).to_have_count(2)
    expect(rows_.nth(0)).to_contain_text(f"{PATH}float32[4096, 12288]inf0.9998760.251750331648123456")
    expect(rows_.nth(1)).to_contain_text("0.00123457–0.25")
    expect(page.locator("#job-outcome")).to_contain_text("1 removed, 2 changed, 7 unchanged")
    expect(page.locator("#job-outcome")).to_contain_text("75 % (3.0 MiB; 2.0 MiB by digest, 1.0 MiB by reading)")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
    accessible(page)


def statistics(fqn, **more):
    return {"fqn": fqn, "dtype": "float32", "shape": [3, 4], "count": 12, "nan": 0, "inf": 0, "zeros": 2, "min": -0.1234567, "max": 3.0,
            "mean": 0.5, "norm": 4.25, "histogram": [[-4, 1, 0], [1, 0, 9]], **more}


def tensor_page(fake, count=2):
    """A checkpoint with tensors, and a daemon that answers each job of statistics when it is asked for it a second time."""
    fake.checkpoints = [{"storage": "main", "name": "run1/step-1", "format": "dcp", "bytes": MIB, "modified_at": "2026-01-01T00:00:00Z"}]
    fake.tensors["main:run1/step-1"] = [{"fqn": f"model.w{i}", "dtype": "float32", "shape": [3, 4], "bytes": 48} for i in range(count)]
    asked = []

    def submitted(request):
        asked.append(request)
        n = len(asked)
        made = job(n, "queued", kind="stats", source=request["source"], target=None)
        told = [statistics(f, max="nan" if f.endswith("7") else 3.0) for f in request["include"]]
        fake.jobs[made["id"]] = {**made, "state": "succeeded", "result": {"statistics": told}}
        return made

    fake.submitted = submitted
    return asked


def open_tensor(page, fake, fqn):
    page.goto(f"{fake.url}#/checkpoints/main%3Arun1%2Fstep-1")
    page.get_by_role("button", name=fqn, exact=True).click()
    expect(page.locator("#tensor-name")).to_have_text(fqn)


@pytest.mark.long
def test_statistics_of_a_tensor(page, fake):
    asked = tensor_page(fake)
    enter(page, fake, "checkpoints")
    page.get_by_role("link", name="main:run1/step-1").click()
    expect(page.locator("#h-checkpoint")).to_have_text("main:run1/step-1")
    expect(page.locator("#h-checkpoint")).to_be_focused()
    assert page.title() == "Checkpoint main:run1/step-1 – dcpd"
    expect(page.locator("nav a[aria-current=page]")).to_contain_text("Checkpoints")
    expect(page.locator("#tensors-count")).to_have_text("2 tensors and values")
    page.get_by_role("button", name="model.w1", exact=True).click()
    button = page.get_by_role("button", name="Statistics of model.w1")
    button.focus()
    page.keyboard.press("Enter")
    for words in ("-0.123457", "0.5", "4.25"):
        expect(page.locator("#tensor-stats")).to_contain_text(words)
    assert asked == [{"kind": "stats", "source": {"storage": "main", "name": "run1/step-1"}, "include": ["model.w1"]}]
    expect(page.locator("#announce")).to_have_text("Statistics of model.w1 are shown")
    page.locator("#tensor-histogram-table summary").click()
    expect(page.locator("#tensors-histogram tbody tr")).to_have_count(2)
    expect(page.locator("#tensors-histogram tbody tr").nth(1)).to_contain_text("2^1 to 2^209")
    accessible(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    accessible(page)


@pytest.mark.long
def test_tensors_are_searched_and_grouped(page, fake):
    tensor_page(fake, 120)
    fake.tensors["main:run1/step-1"] += [{"fqn": f"optim.state.{i}.exp_avg", "dtype": "float32", "shape": [2], "bytes": 8}
                                         for i in range(30)]
    enter(page, fake)
    page.goto(f"{fake.url}#/checkpoints/main%3Arun1%2Fstep-1")
    expect(page.locator("#tensors-count")).to_have_text("150 tensors and values")
    page.fill("#tensors-text", "W11")
    expect(page.locator("#tensors-count")).to_have_text("11 of 150")
    expect(page.locator(".virtual-row")).to_have_count(11)
    page.fill("#tensors-text", "")
    page.locator("#tree").get_by_role("button", name="optim", exact=True).click()
    expect(page.locator("#tensors-count")).to_have_text("30 of 150")
    expect(page.locator(".virtual-row").nth(9)).to_contain_text("optim.state.9.exp_avg")  # behind 8, before 10
    page.get_by_role("button", name="Open optim.", exact=True).click()
    expect(page.locator("#tree")).to_contain_text("state 30")
    page.fill("#tensors-text", "nothing")
    expect(page.locator(".virtual-row")).to_have_count(0)
    accessible(page)


@pytest.mark.long
def test_statistics_that_cannot_be_had(page, fake):
    tensor_page(fake)
    fake.tensors["main:run1/step-1"][0]["fqn"] = "<img src=x onerror=alert(1)>"
    fake.submitted = lambda request: "the daemon has too much to do"
    enter(page, fake)
    open_tensor(page, fake, "<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Statistics of <img").click()
    expect(page.locator("#tensor-stats")).to_contain_text("the daemon has too much to do")
    expect(page.locator("#announce")).to_contain_text("too much to do")
    expect(page.get_by_role("button", name="Statistics of <img")).to_be_enabled()
    accessible(page)
    page.goto(f"{fake.url}#/checkpoints/main%3Agone")
    expect(page.locator("#checkpoint-head")).to_contain_text("/v1/checkpoints/main/gone")


@pytest.mark.long
def test_what_retention_does_is_not_known_where_it_cannot_be_asked(page, fake):
    """A preview that fails says nothing of what stays: the page does not either."""
    fake.runs = [{"storage": "main", "run": "run1", "checkpoints": 1, "bytes": MIB, "holds": 0, "latest": "run1/step-1",
                  "modified_at": "2026-01-01T00:00:00Z", "step": 1}]
    one = {"name": "run1/step-1", "bytes": MIB, "durable_at": "2026-01-01T00:00:00Z", "step": 1, "verified": None}
    fake.run["main/run1"] = {"storage": "main", "run": "run1", "count": 1, "bytes": MIB, "checkpoints": [one], "aliases": {}, "holds": [],
                             "lost_work": {"since": None, "steps": None}, "save_interval": None}
    fake.policies = [{"name": "night", "storage": "main", "match": "run*", "keep": {"last": 1}, "status": {}}]
    enter(page, fake)
    page.goto(f"{fake.url}#/runs/main/run1")
    expect(page.locator("#run-checkpoints tbody tr")).to_contain_text("not known: ")
    page.click("nav a[href='#/']")
    row_ = page.locator("[data-run='main:run1'] .row").filter(has_text="Next retention")
    expect(row_.locator(".error")).to_be_visible()


@pytest.mark.long
def test_cancelled_is_no_fault(page, fake):
    """Red is for what went wrong: who cancelled a job knows that it is."""
    error = {"title": "The job was cancelled", "code": "cancelled", "detail": "cancelled", "status": 409, "retryable": True}
    fake.jobs[job(1)["id"]] = job(1, "cancelled", error=error)
    fake.jobs[job(2)["id"]] = job(2, "failed", error={**error, "code": "storage_io", "title": "The storage reported an error"})
    enter(page, fake)
    red = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad-bg').trim()")
    red = "rgb({}, {}, {})".format(*bytes.fromhex(red.lstrip("#")))
    looks = "e => getComputedStyle(e).backgroundColor"
    assert row(page, "jobs", job(2)["id"]).locator(".state").evaluate(looks) == red
    assert row(page, "jobs", job(1)["id"]).locator(".state").evaluate(looks) != red
    assert row(page, "jobs", job(1)["id"]).locator(".error").count() == 0
    for n, is_red in ((1, False), (2, True)):
        page.goto(f"{fake.url}#/jobs/{job(n)['id']}")
        expect(page.locator("#h-job")).to_have_text(f"Job {job(n)['id']}")
        expect(page.locator("#job-error h3")).to_have_text(fake.jobs[job(n)["id"]]["error"]["title"])
        assert (page.locator("#job-error").evaluate(looks) == red) == is_red
        accessible(page)


@pytest.mark.long
def test_no_retry_where_it_cannot_help(page, fake):
    errors = [{"code": "digest_mismatch", "retryable": False}, {"code": "storage_io", "retryable": True}, {"code": "odd"}, None]
    for n, error in enumerate(errors):
        fake.jobs[job(n)["id"]] = job(n, "failed", error=error)
    enter(page, fake)
    for n, count in ((0, 0), (1, 1), (2, 1), (3, 1)):
        expect(row(page, "jobs", job(n)["id"]).locator(".state")).to_have_text("failed")
        expect(row(page, "jobs", job(n)["id"]).get_by_role("button", name="Retry")).to_have_count(count)
    page.goto(f"{fake.url}#/jobs/{job(0)['id']}")
    expect(page.locator("[data-error=retryable]")).to_have_text("false")
    expect(page.locator("#job-body").get_by_role("button", name="Retry")).to_have_count(0)


@pytest.mark.long
def test_filters_are_in_the_address(page, fake):
    """What one looks at can be kept, sent to a colleague, and gone back to."""
    for n in range(120):
        fake.jobs[job(n)["id"]] = job(n, "failed" if n % 2 else "succeeded", labels={"run": f"r{n % 10}"})
    fake.checkpoints = [{"storage": "main", "name": f"run{n}/step-{n}", "format": "dcp", "bytes": 1, "modified_at": "2026-01-01T00:00:00Z",
                         "world_size": 1} for n in range(12)]
    enter(page, fake)
    page.fill("#jobs-text", "R3")
    page.select_option("#jobs-state", "failed")
    expect(page.locator("#jobs tbody tr")).to_have_count(12)
    expect(page).to_have_url(f"{fake.url}#/jobs?text=R3&state=failed")
    row(page, "jobs", job(113)["id"]).get_by_role("link").click()
    expect(page.locator("#h-job")).to_have_text(f"Job {job(113)['id']}")
    page.go_back()
    expect(page.locator("#jobs tbody tr")).to_have_count(12)
    row(page, "jobs", job(113)["id"]).get_by_role("link").click()
    page.click("#all-jobs")
    expect(page.locator("#jobs-text")).to_have_value("R3")
    page.reload()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#jobs tbody tr")).to_have_count(12)
    expect(page.locator("#jobs-state")).to_have_value("failed")
    page.click("#jobs-clear")
    expect(page).to_have_url(f"{fake.url}#/jobs")
    page.get_by_role("button", name="Next").click()
    expect(page).to_have_url(f"{fake.url}#/jobs?page=2")
    page.reload()
    expect(page.locator("#jobs-pager")).to_contain_text("51–100 of 120 jobs")
    page.goto(f"{fake.url}#/checkpoints?text=step-1")
    expect(page.locator("#checkpoints tbody tr")).to_have_count(3)
    expect(page.locator("#checkpoints-text")).to_have_value("step-1")
    page.fill("#checkpoints-text", "step-11")
    expect(page).to_have_url(f"{fake.url}#/checkpoints?text=step-11")
    page.click("nav a[href='#/jobs']")
    expect(page.locator("#jobs-text")).to_have_value("")
    page.goto(f"{fake.url}#/jobs?state=nonsense&page=-3&text=%3Cb%3E")
    expect(page.locator("#jobs-state")).to_have_value("")
    expect(page.locator("#jobs tbody")).to_have_text("No job matches.")


@pytest.mark.long
def test_a_job_says_which_layout_rules_went_past(page, fake):
    past = [{"fqn": f"model.{n}.<b>bias", "rule": "model.*", "took": None if n else "*.bias"} for n in range(25)]
    result = {"unmatched_rules": ["zzz*"], "fell_back": past, "fell_back_count": 1200}
    fake.jobs[job(1)["id"]] = job(1, "succeeded", result=result, finished_at="2026-01-01T00:00:02Z")
    enter(page, fake)
    page.goto(f"{fake.url}#/jobs/{job(1)['id']}")
    outcome = page.locator("#job-outcome")
    for words in ("zzz*", "model.0.<b>bias past model.* to *.bias", "model.1.<b>bias past model.* to the default", "and 1180 more"):
        expect(outcome).to_contain_text(words)
    accessible(page)


@pytest.mark.long
def test_a_slot_that_holds_no_image_is_told(page, fake):
    slot = {"slot": 0, "segment": "/dcpd-x", "state": "sealed", "generation": 7, "bytes": MIB, "image_bytes": MIB, "in_use_by": []}
    problem = {"code": "format_safetensors", "detail": "a header of 0 bytes is <b>too short</b>", "rank": 1}
    fake.state_dicts = [{"name": "train", "world_size": 2, "bytes": 2 * MIB}, {"name": "fine", "world_size": 1, "bytes": MIB}]
    fake.ranks = {"train": [{"rank": 0, "slots": [slot]}, {"rank": 1, "slots": [{**slot, "problem": problem}]}],
                  "fine": [{"rank": 0, "slots": [slot]}]}
    enter(page, fake, "state-dicts")
    expect(row(page, "state-dicts", "train").locator(".error")).to_have_text(f"rank 1, generation 7: {problem['detail']}")
    expect(row(page, "state-dicts", "fine").locator(".error")).to_have_count(0)
    accessible(page)


@pytest.mark.long
def test_a_publication_shows_its_subscribers_and_their_nodes(page, fake):
    subscriber = {"name": "serve", "world_size": 2, "subscription": {"applied": 6, "published": 7, "lag_s": 2.0}}
    fake.state_dicts = [{"name": "policy", "world_size": 1, "bytes": MIB, "publish": {"readers": []}},
                        {"name": "far", "world_size": 1, "bytes": MIB, "subscribe": {"publication": "weights", "node": "host-1"},
                         "subscription": {"applied": 3, "published": 3, "lag_s": 0}}]
    fake.recorded["GET /v1/publications"] = {"publications": [{**fake.state_dicts[0], "subscribers": [
        {**subscriber, "node": "host-2"}, {**subscriber, "name": "near", "subscription": {"applied": None, "published": 7, "lag_s": 0}}]}]}
    enter(page, fake, "state-dicts")
    expect(row(page, "state-dicts", "policy")).to_contain_text("subscriber serve on node host-2: version 6 in use, 2 s behind")
    expect(row(page, "state-dicts", "policy")).to_contain_text("subscriber near: version – in use")
    expect(row(page, "state-dicts", "far")).to_contain_text("subscribes to weights on node host-1: version 3 in use")
    accessible(page)
