"""Chains: jobs that follow each durable checkpoint of a run, in order, once each, whatever dies."""
import ast
import json
import os
import pathlib

import package
import pytest
import users
from receiver import Receiver

import dcpd as lib


@pytest.fixture(scope="module")
def cd(tmp_path_factory):
    d = lib.Daemon(tmp_path_factory.mktemp("chains"), ("main", "hf", "other"), ["--webhook-allow", "127.0.0.0/8"])
    (d.state / "secrets").mkdir()
    (d.state / "secrets" / "s").touch(0o600)
    (d.state / "secrets" / "s").write_text("sixteen bytes or more")
    yield d
    d.discard()


def put(d, name, steps, storage="main", **more):
    return d.api.request("PUT", f"/v1/chains/{name}", {"storage": storage, "steps": steps, **more})


def drop(d, name):
    assert d.api.delete(f"/v1/chains/{name}").status == 204


def executions(d, name):
    return d.api.get(f"/v1/chains/{name}/executions").ok(200)["executions"]


def ended(d, name, n=1, state="done"):
    """The executions, oldest first, once n are in that state and none runs or waits."""
    def look():
        got = executions(d, name)[::-1]
        return sum(x["state"] == state for x in got) >= n and not any(x["state"] in ("running", "waiting") for x in got) and got

    return lib.wait_for(look, 90, f"{n} {state} of {name}")


@pytest.fixture
def save(cd):
    sd = lib.fresh()
    cd.put(sd, [lib.image({"a": ("U8", [64, 1024], bytes(65536))})])
    yield lambda name, **options: saved(cd, sd, name, **options)
    cd.drop(sd)


def saved(d, sd, name, **options):
    return d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name}, options=options)


def there(d, storage, name):
    return d.api.get(d.api.storage_path(storage, name)).status == 200


def test_verify_export_delete(cd, save):
    run = lib.fresh("run")
    steps = [{"verify": {"level": "digest"}}, {"export": {"storage": "hf", "format": "safetensors", "name": "{run}/{name}-hf"}},
             {"delete": {}}]
    chain = put(cd, "full", steps, match=run).ok(200)
    assert chain["steps"] == steps and chain["uid"] == 0 and chain["status"]["last"] == []
    j = save(f"{run}/step-1")
    save(f"{run}-not/step-1")
    x, = ended(cd, "full")
    assert x["checkpoint"] == {"storage": "main", "name": f"{run}/step-1"} and x["job"] == j["id"] and x["finished_at"]
    assert [(s["step"], s["state"]) for s in x["jobs"]] == [("verify", "succeeded"), ("export", "succeeded"), ("delete", "succeeded")]
    jobs = [cd.api.get(f"/v1/jobs/{s['job']}").ok(200) for s in x["jobs"]]
    assert [k["kind"] for k in jobs] == ["verify", "reshard", "delete"]
    for i, k in enumerate(jobs):
        assert k["parent"] == {"chain": "full", "execution": x["id"], "step": i, "depth": 1} and k["labels"] == {"chain": "full"}
    assert jobs[1]["spec"]["options"]["pace"] == "background"
    assert there(cd, "hf", f"{run}/step-1-hf") and not there(cd, "main", f"{run}/step-1") and there(cd, "main", f"{run}-not/step-1")
    status = cd.api.get("/v1/chains/full").ok(200)["status"]
    assert {k: v for k, v in status.items() if k != "last"} == {"waiting": 0, "running": 0, "done": 1, "failed": 0, "skipped": 0}
    assert status["last"] == [x]
    listed = cd.api.get("/v1/jobs?filter=labels.chain%3Dfull").ok(200)["jobs"]
    assert {k["id"] for k in listed} == {s["job"] for s in x["jobs"]}
    drop(cd, "full")


def test_a_step_that_fails_stops_it(cd, save):
    run = lib.fresh("run")
    r = Receiver()
    hook = {"url": r.url, "secret": "s", "events": ["chain.failed", "chain.done"], "match": run}
    cd.api.request("PUT", "/v1/webhooks/failed", hook).ok(200)
    put(cd, "fails", [{"export": {"storage": "hf", "name": f"{run}-there/x"}}, {"delete": {}}], match=run).ok(200)
    save(f"{run}/step-1")
    save(f"{run}/step-2")  # its target is there by now
    got = ended(cd, "fails", 1, "failed")
    assert [x["state"] for x in got] == ["done", "failed"]
    assert got[1]["error"]["code"] == "checkpoint_exists" and got[1]["step"] == 0 and there(cd, "main", f"{run}/step-2")
    told = {e["event"]: e for e in r.events(2)}
    assert told["chain.failed"]["chain"] == "fails" and told["chain.failed"]["execution"] == got[1]["id"]
    assert told["chain.failed"]["error"]["code"] == "checkpoint_exists" and told["chain.failed"]["checkpoint"]["name"] == f"{run}/step-2"
    assert told["chain.done"]["execution"] == got[0]["id"]
    cd.api.delete("/v1/webhooks/failed")
    drop(cd, "fails")
    r.close()


def test_newest_and_all(spawn):
    """While one is running, of those that come the newest waits; or all of them do."""
    d = spawn(("main", "hf"), ["--workers", "2"])
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [64, 1024], bytes(65536))})])
    put(d, "newest", [{"export": {"storage": "hf", "name": "newest/{name}"}}], match="run").ok(200)
    put(d, "all", [{"export": {"storage": "hf", "name": "all/{name}"}}], match="run", behind="all").ok(200)
    # What the first executions write is being written by others: they wait, and the chains fall behind.
    blocked = {n: pathlib.Path(d.storages["hf"]) / n / "step-1" for n in ("newest", "all")}
    for p in blocked.values():
        p.parent.mkdir(exist_ok=True)
    jobs = []
    for n in blocked:
        sd2 = lib.fresh()
        d.create(sd2, 1)
        d.reserve(sd2, 0, 4096, 5)
        jobs.append(d.api.submit("save", source={"state_dict": sd2, "generation": 5, "await_seal": True, "timeout_s": 600},
                                 target={"storage": "hf", "name": f"{n}/step-1"}))
    for i in range(1, 5):
        saved(d, sd, f"run/step-{i}")
    lib.wait_for(lambda: all(d.api.get(f"/v1/chains/{n}").ok(200)["status"]["running"] == 1 for n in blocked), 30)
    assert [x["state"] for x in executions(d, "newest")[::-1]] == ["running", "skipped", "skipped", "waiting"]
    assert [x["state"] for x in executions(d, "all")[::-1]] == ["running", "waiting", "waiting", "waiting"]
    policy = {"storage": "main", "match": "run", "keep": {"last": 1}}
    d.api.request("PUT", "/v1/policies/last", {**policy, "confirm": True}).ok(200)
    kept = {k["name"]: k["why"] for k in d.api.post("/v1/policies/last:preview", {}).ok(200)["keep"]}
    assert all(any("in_use" in json.dumps(w) for w in kept[f"run/step-{i}"]) for i in range(1, 4)), kept  # chains will read them
    d.api.delete("/v1/policies/last")
    d.kill()  # and over a restart
    d.start()
    for j in jobs:
        d.api.post(f"/v1/jobs/{j['id']}:cancel")
        d.api.wait(j)
    got = ended(d, "newest", 2)
    assert [x["state"] for x in got] == ["done", "skipped", "skipped", "done"]
    assert [x["checkpoint"]["name"] for x in ended(d, "all", 4)] == [f"run/step-{i}" for i in range(1, 5)]
    assert all(there(d, "hf", f"all/step-{i}") for i in range(1, 5)) and not there(d, "hf", "newest/step-2")
    status = d.api.get("/v1/chains/newest").ok(200)["status"]
    assert status["done"] == 2 and status["skipped"] == 2


def test_once_over_kills(spawn):
    """dcpd is killed again and again while executions go through their steps: each step of each has one job."""
    d = spawn(("main", "hf"), ["--workers", "2"])
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [64, 1024], bytes(65536))})])
    put(d, "c", [{"verify": {}}, {"export": {"storage": "hf", "format": "safetensors"}}, {"delete": {}}], behind="all", match="run").ok(200)
    n = 4
    for i in range(n):
        saved(d, sd, f"run/step-{i}")
        jobs = lambda: [s for x in executions(d, "c") for s in x.get("jobs", [])]  # noqa: E731
        lib.wait_for(lambda: len(jobs()) > 3 * i - i % 2, 60)  # somewhere among the steps
        d.kill()
        d.start()
    got = ended(d, "c", n)
    assert [x["checkpoint"]["name"] for x in got] == [f"run/step-{i}" for i in range(n)]
    for x in got:
        assert [(s["step"], s["state"]) for s in x["jobs"]] == [("verify", "succeeded"), ("export", "succeeded"), ("delete", "succeeded")]
    made = d.api.get("/v1/jobs?filter=labels.chain%3Dc&page_size=1000").ok(200)["jobs"]
    assert len(made) == 3 * n and {j["id"] for j in made} == {s["job"] for x in got for s in x["jobs"]}
    assert all(there(d, "hf", f"run/step-{i}") and not there(d, "main", f"run/step-{i}") for i in range(n))


def test_chains_that_start_each_other(cd, save):
    run = lib.fresh("run")
    put(cd, "first", [{"export": {"storage": "hf", "format": "safetensors"}}], match=run).ok(200)
    put(cd, "second", [{"export": {"storage": "other"}}], storage="hf", match="run*").ok(200)
    p = put(cd, "third", [{"verify": {}}, {"export": {"storage": "main", "name": "{run}/{name}-back"}}], storage="other").problem(
        "validation_failed", status=422)
    assert p["pointer"] == "/steps" and "second" in p["detail"]
    p = put(cd, "self", [{"export": {"storage": "main", "name": "{run}/{name}-again"}}], match="run*").problem("validation_failed")
    assert p["pointer"] == "/steps"
    put(cd, "self", [{"export": {"storage": "main", "name": "out/{run}/{name}"}}], match="run*").ok(200)  # another run
    drop(cd, "self")
    save(f"{run}/step-1")
    x, = ended(cd, "first")
    y, = ended(cd, "second")
    assert x["depth"] == 1 and y["depth"] == 2 and y["job"] == x["jobs"][0]["job"] and there(cd, "other", f"{run}/step-1")
    drop(cd, "first")
    drop(cd, "second")


def test_bad_chains(cd):
    def refused(code, pointer, steps, status=422, **more):
        p = put(cd, "bad", steps, **more).problem(code, status=status)
        assert p.get("pointer") == pointer, p
        return p

    refused("validation_failed", "/steps", [])
    refused("unknown_field", "/steps/0/verify/levle", [{"verify": {"levle": "digest"}}])
    refused("validation_failed", "/steps/1/export/format", [{"verify": {}}, {"export": {"storage": "hf", "format": "x"}}])
    refused("not_found", "/steps/0/export/storage", [{"export": {"storage": "nope"}}], status=404)
    refused("not_found", "/storage", [{"verify": {}}], status=404, storage="nope")
    refused("validation_failed", "/behind", [{"verify": {}}], behind="oldest")
    refused("validation_failed", "/steps/0/export/storage", [{"export": {"storage": "main"}}])
    refused("validation_failed", "/steps/0", [{"delete": {}}, {"verify": {}}])
    refused("validation_failed", "/retries", [{"verify": {}}], retries=99)
    twice = [{"export": {"storage": "hf"}}, {"verify": {}}, {"copy": {"storage": "hf"}}]
    assert "step 0" in refused("validation_failed", "/steps/2/copy", twice)["detail"]
    named = [{"copy": {"storage": "hf"}}, {"export": {"storage": "hf", "name": "{run}/{name}"}}]
    refused("validation_failed", "/steps/1/export/name", named)
    refused("validation_failed", "/steps/1/copy/name", [{"copy": {"storage": "hf", "name": "best"}}] * 2)
    for fine in ([named[0], {"export": {**named[1]["export"], "overwrite": True}}],
                 [{"copy": {"storage": "hf", "name": "{run}/{name}"}}, {"export": {"storage": "hf", "name": "{run}/step-{step}"}}]):
        put(cd, "bad", fine).ok(200)
        drop(cd, "bad")
    refused("validation_failed", "/storage", [{"verify": {}}], storage=None)
    cd.api.request("PUT", "/v1/chains/a%2Fb", {"storage": "main", "steps": [{"verify": {}}]}).problem("name_invalid", status=422)
    cd.api.get("/v1/chains/nope").problem("not_found", status=404)
    cd.api.get("/v1/chains/nope/executions").problem("not_found", status=404)
    cd.api.delete("/v1/chains/nope").problem("not_found", status=404)


def test_a_checkpoint_that_is_replaced_is_not_removed(cd, save):
    """A save with overwrite makes another checkpoint of the same name: the first execution does not remove that."""
    run = lib.fresh("run")
    put(cd, "once", [{"verify": {}}, {"delete": {}}], match=run, behind="all").ok(200)
    for _ in range(3):
        save(f"{run}/step-1", overwrite=True)
    got = ended(cd, "once", 1)
    assert len(got) == 3 and got[-1]["state"] == "done" and not there(cd, "main", f"{run}/step-1")
    drop(cd, "once")


def test_lists_and_events(cd):
    for name in ("l1", "l2", "l3"):
        put(cd, name, [{"verify": {}}], match="none").ok(200)
    page = cd.api.get("/v1/chains?page_size=2").ok(200)
    assert [c["name"] for c in page["chains"]] == ["l1", "l2"]
    rest = cd.api.get(f"/v1/chains?page_size=2&page_token={page['next_page_token']}").ok(200)
    assert [c["name"] for c in rest["chains"]] == ["l3"] and "next_page_token" not in rest
    put(cd, "l1", [{"verify": {"level": "values"}}], match="none").ok(200)
    assert cd.api.get("/v1/chains/l1").ok(200)["steps"] == [{"verify": {"level": "values"}}]
    for name in ("l1", "l2", "l3"):
        drop(cd, name)


def test_delete_while_it_runs(cd, save):
    """Each turn some job of the removed chain ends while the end of the next save is on its way to the journal, sooner or later."""
    for _ in range(10):
        delete_while_it_runs(cd, save)


def delete_while_it_runs(cd, save):
    run = lib.fresh("run")
    put(cd, "gone", [{"verify": {}}] * 5, match=run).ok(200)
    save(f"{run}/step-1")
    drop(cd, "gone")
    put(cd, "gone", [{"verify": {}}], match=run).ok(200)
    assert json.dumps(executions(cd, "gone")) == "[]"
    save(f"{run}/step-2")
    assert [x["checkpoint"]["name"] for x in ended(cd, "gone")] == [f"{run}/step-2"]
    drop(cd, "gone")


def test_dcpctl_and_python(cd, save, tmp_path):
    run = lib.fresh("run")
    (tmp_path / "c.json").write_text(json.dumps({"storage": "main", "match": run, "steps": [{"verify": {}}]}))
    assert cd.ctl("chain", "c", "--file", tmp_path / "c.json").returncode == 0
    save(f"{run}/step-1")
    x, = ended(cd, "c")
    r = cd.ctl("chain", "c")
    assert r.returncode == 0 and f"main:{run}/step-1" in r.stdout and "steps: verify" in r.stdout and "done 1" in r.stdout, r
    assert x["id"] in cd.ctl("chain", "c", "--executions").stdout and run in cd.ctl("chains").stdout
    (tmp_path / "c.json").write_text('{"storage": "main", "steps": [{"verify": {"levle": 1}}]}')
    r = cd.ctl("chain", "c", "--file", tmp_path / "c.json")
    assert r.returncode == 2 and "/steps/0/verify/levle" in r.stderr, r
    with package.daemon(f"unix://{cd.socket}") as dcpd, dcpd.connect() as c:
        assert c.chains.get("c")["status"]["last"] == [x] == c.chains.executions("c", limit=5)
        assert c.chains.put("c", "main", [{"verify": {"level": "values"}}], match=run, behind="all")["behind"] == "all"
        assert [k["name"] for k in c.chains.list() if k["name"] == "c"] == ["c"]
    assert cd.ctl("chain", "c", "--rm").returncode == 0 and cd.ctl("chain", "c").returncode == 6


def test_copy_and_trash(cd, save):
    """What is copied keeps its record, which names the job that saved it: it is removed by a chain of the other storage all the same."""
    run = lib.fresh("run")
    steps = [{"verify": {}}, {"copy": {"storage": "other", "name": "{run}/copy-{step}"}}, {"delete": {"trash": "1h"}}]
    put(cd, "copy", steps, match=run).ok(200)
    r = Receiver()
    hook = {"url": r.url, "secret": "s", "events": ["checkpoint.replicated"], "match": run}
    cd.api.request("PUT", "/v1/webhooks/copies", hook).ok(200)
    put(cd, "onward", [{"copy": {"storage": "hf"}}, {"delete": {}}], storage="other", match=run).ok(200)
    save(f"{run}/step-5")
    x, = ended(cd, "copy")
    assert [s["step"] for s in x["jobs"]] == ["verify", "copy", "delete"]
    y, = ended(cd, "onward")
    assert y["depth"] == 2 and there(cd, "hf", f"{run}/copy-5") and not there(cd, "other", f"{run}/copy-5")
    assert cd.api.get(f"/v1/jobs/{x['jobs'][1]['job']}").ok(200)["kind"] == "replicate"
    assert cd.api.get(f"/v1/jobs/{x['jobs'][2]['job']}").ok(200)["spec"]["options"]["trash"] == "1h"
    cd.api.post(cd.api.storage_path("main", f"{run}/step-5", ":undelete"), {}).ok(200)
    told = r.events(2)
    assert [(t["event"], t["checkpoint"]["storage"], t["job"]) for t in told] == [
        ("checkpoint.replicated", "main", x["jobs"][1]["job"]), ("checkpoint.replicated", "other", y["jobs"][0]["job"])]
    cd.api.delete("/v1/webhooks/copies")
    r.close()
    drop(cd, "copy")
    drop(cd, "onward")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_rights(spawn):
    """A chain's jobs have the rights of who set it; webhooks are for admins."""
    with users.reachable_folder() as folder:
        d = lib.Daemon(folder, ("main", "hf"), ["--allow-group", users.GROUP.gr_name])
        try:
            d.home.chmod(0o755)
            for p in (d.state, d.socket):
                p.chmod(0o777)
            body = {"storage": "main", "match": "run", "steps": [{"verify": {}}, {"delete": {}}]}

            def ask(uid, method, path, body=None):
                def go():
                    a = d.api.request(method, path, body)
                    return a.status, a.json if a.body else None

                return ast.literal_eval(users.as_user(uid, [users.GROUP.gr_gid], go))

            assert ask(users.ALICE, "PUT", "/v1/chains/a", body)[0] == 200
            status, doc = ask(users.BOB, "PUT", "/v1/chains/a", body)
            assert status == 403 and doc["code"] == "forbidden"
            assert ask(users.BOB, "DELETE", "/v1/chains/a")[0] == 403
            sd = lib.fresh()
            d.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
            saved(d, sd, "run/root-1")  # root's: alice's chain may verify, and not remove it
            x, = ended(d, "a", 1, "failed")
            assert x["error"]["code"] == "forbidden" and there(d, "main", "run/root-1")
            assert d.api.get(f"/v1/jobs/{x['jobs'][0]['job']}").ok(200)["uid"] == users.ALICE
            hook = {"url": "https://example.org/", "secret": "s", "events": ["job.failed"]}
            for method, path in (("GET", ""), ("PUT", "/w"), ("GET", "/w"), ("DELETE", "/w"), ("POST", "/w:test"),
                                 ("GET", "/w/deliveries")):
                assert ask(users.ALICE, method, f"/v1/webhooks{path}", hook if method == "PUT" else None)[0] == 403, (method, path)
        finally:
            d.discard()
