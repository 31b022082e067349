"""Runs: what trainings there are, which checkpoints each has, newest first, as they lie in the storage."""
import concurrent.futures
import json
import os
import shutil
import urllib.parse

import pytest
from crafted import Crafted

import dcpd as lib


@pytest.fixture
def root(d):
    return d.storages["main"]


def put(root, name, when, case="torch-2.15.0/plain"):
    """A checkpoint whose newest file was written at that second."""
    c = Crafted(root, case, name)
    for p in c.dir.iterdir():
        os.utime(p, (1, when if p.name == ".metadata" else 1))
    return c


def path(run, storage="main", **query):
    return f"/v1/runs/{storage}/{urllib.parse.quote(run, safe='')}" + ("?" + urllib.parse.urlencode(query) if query else "")


def listed(d, run, **query):
    return d.api.get(path(run, **query)).ok(200)


def all_runs(d, **query):
    found, token = [], None
    while True:
        asked = {"storage": "main", **query, **({"page_token": token} if token else {})}
        page = d.api.get("/v1/runs?" + urllib.parse.urlencode(asked)).ok(200)
        found += page["runs"]
        token = page.get("next_page_token")
        if not token:
            return found


def test_newest_first(d, root):
    run = f"runs/{lib.fresh()}"
    for name, when in (("step-9", 2000), ("step-10", 2000), ("step-200", 1000), ("last", 3000), ("below/step-999", 9000)):
        put(root, f"{run}/{name}", when)
    put(root, f"{run}-b/step-1", 9000)
    got = listed(d, run)
    assert [c["name"] for c in got["checkpoints"]] == [f"{run}/{n}" for n in ("last", "step-10", "step-9", "step-200")]
    assert [c["step"] for c in got["checkpoints"]] == [None, 10, 9, 200]
    assert got["count"] == 4 and got["bytes"] == sum(c["bytes"] for c in got["checkpoints"]) and got["run"] == run
    assert got["aliases"] == {"latest": f"{run}/last", "latest-verified": None} and got["holds"] == []
    lost = got["lost_work"]
    assert lost.pop("seconds") > 1e9 and lost == {"since": "1970-01-01T00:50:00Z", "step": None, "seen_step": None, "steps": None}
    assert got["save_interval"] is None
    one = d.api.get(d.api.storage_path("main", f"{run}/last")).ok(200)
    assert {k: v for k, v in got["checkpoints"][0].items() if k != "step"}.items() <= {**one, "storage": "main"}.items()

    d.api.run("verify", source={"storage": "main", "name": f"{run}/step-9"}, level="digest")
    d.api.request("PUT", d.api.storage_path("main", f"{run}/step-200", "/hold")).ok(200)
    got = listed(d, run)
    assert got["aliases"] == {"latest": f"{run}/last", "latest-verified": f"{run}/step-9"}
    assert got["holds"] == [f"{run}/step-200"] and got["checkpoints"][3]["name"] == f"{run}/step-200"  # no newer for being held
    d.api.delete(d.api.storage_path("main", f"{run}/step-200", "/hold")).ok(200)
    shutil.rmtree(root / run / "last")
    shutil.rmtree(root / run / "step-9")
    assert listed(d, run)["aliases"] == {"latest": f"{run}/step-10", "latest-verified": None}
    shutil.move(root / run, root / f"{run}-moved")
    d.api.get(path(run)).problem("not_found", status=404)
    assert listed(d, run + "-moved")["count"] == 2


def test_a_save_is_the_latest(d, root):
    run, sd = f"runs/{lib.fresh()}", lib.fresh()
    put(root, f"{run}/step-500", 1000)
    d.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-3"})
    d.drop(sd)
    got = listed(d, run, mtbf="2h")
    assert got["aliases"]["latest"] == f"{run}/step-3" and got["lost_work"]["step"] == 3
    row = next(r for r in all_runs(d) if r["run"] == run)
    assert row == {"storage": "main", "run": run, "checkpoints": 2, "bytes": got["bytes"], "holds": 0, "latest": f"{run}/step-3", "step": 3,
                   "modified_at": got["lost_work"]["since"]}


def test_pages(d, root):
    run = f"runs/{lib.fresh()}"
    names = [f"{run}/step-{i}" for i in range(5)]
    for i, name in enumerate(names):
        put(root, name, 1000 + i)
        put(root, f"{run}-{i}/x", 1000)
    got, token, pages = [], {}, 0
    while token is not None:
        page = listed(d, run, page_size=2, **token)
        got += [c["name"] for c in page["checkpoints"]]
        assert page["count"] == 5 and page["aliases"]["latest"] == names[4]
        token = {"page_token": page["next_page_token"]} if "next_page_token" in page else None
        pages += 1
    assert got == names[::-1] and pages == 3
    runs = [r["run"] for r in all_runs(d, page_size=2)]
    assert runs == sorted(runs) == [r["run"] for r in all_runs(d)] and {f"{run}-{i}" for i in range(5)} | {run} <= set(runs)


def test_names_of_one_component(d, root):
    name = lib.fresh()
    put(root, name, 4000000000)  # in 2096: the newest one, whatever else lies there
    got = listed(d, "-", page_size=1)
    assert got["checkpoints"][0]["name"] == name == got["aliases"]["latest"] and got["run"] == "-"
    assert next(r for r in all_runs(d) if r["run"] == "-")["latest"] == name
    shutil.rmtree(root / name)


def test_bad_requests(d):
    d.api.get("/v1/runs").problem("invalid_request", status=400)
    d.api.get("/v1/runs?storage=nope").problem("not_found", status=404)
    d.api.get("/v1/runs?storage=main&page_token=..").problem("invalid_request")
    d.api.get(path("x", "nope")).problem("not_found")
    for run in ("..", "a/../b", ".x", "a//b"):
        d.api.get(path(run)).problem("name_invalid", status=422)


def test_dcpctl(d, root):
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/step-7", 1000)
    put(root, f"{run}/step-8", 2000)
    for what in ([], ["main"], ["main:"]):
        r = d.ctl("runs", *what)
        assert r.returncode == 0 and any(line.split()[:3] == ["main", run, "2"] for line in r.stdout.splitlines()), r
    r = d.ctl("runs", f"main:{run}")
    assert r.returncode == 0 and r.stdout.startswith(f"main:{run}: 2 checkpoints"), r
    assert r.stdout.index(f"{run}/step-8") < r.stdout.index(f"{run}/step-7") and "latest" in r.stdout
    assert json.loads(d.ctl("runs", f"main:{run}", "--json").stdout)["count"] == 2
    assert [x["run"] for x in json.loads(d.ctl("runs", "main", "--json").stdout) if x["run"] == run] == [run]
    assert d.ctl("runs", "main:no-such-run").returncode == 6


def alias(d, run, name, to, **condition):
    body = {**({"name": to} if to else {}), **({"if": condition["if_"]} if condition else {})}
    return d.api.request("PUT" if to else "DELETE", path(run) + "/aliases/" + name, body or None)


def test_aliases(d, root):
    run = f"runs/{lib.fresh()}"
    for i in (1, 2, 3):
        put(root, f"{run}/step-{i}", 1000 + i)
    one, two, three = (f"{run}/step-{i}" for i in (1, 2, 3))
    assert alias(d, run, "best", one, if_=None).ok(200) == {"storage": "main", "run": run, "alias": "best", "name": one}
    p = alias(d, run, "best", two, if_=None).problem("alias_moved", status=409)
    assert p["actual"] == one and "expected" not in p
    p = alias(d, run, "best", two, if_=three).problem("alias_moved", status=409)
    assert p["actual"] == one and p["expected"] == three
    alias(d, run, "best", two, if_=one).ok(200)
    got = listed(d, run)
    assert got["aliases"] == {"best": two, "latest": three, "latest-verified": None} and got["dangling"] == []
    for name, want in (("best", two), ("latest", three)):
        assert d.api.get(d.api.storage_path("main", f"{run}@{name}")).ok(200)["name"] == want
        assert d.api.get(d.api.storage_path("main", f"{run}@{name}", "/tensors")).ok(200)["tensors"]
        assert d.api.run("verify", source={"storage": "main", "name": f"{run}@{name}"}, level="structure")["source"]["name"] == want
    for name in ("none", "latest-verified.", "@"):
        source = {"storage": "main", "name": f"{run}@{name}"}
        d.api.post("/v1/jobs", {"kind": "verify", "source": source}).problem("not_found", status=404)
    d.api.get(d.api.storage_path("main", f"{run}@none")).problem("not_found")
    assert d.api.run("verify", source={"storage": "main", "name": one}, level="digest")["state"] == "succeeded"
    assert d.api.get(d.api.storage_path("main", f"{run}@latest-verified")).ok(200)["name"] == one
    exact = put(root, f"{run}@best", 1000)
    assert d.api.get(d.api.storage_path("main", f"{run}@best")).ok(200)["name"] == f"{run}@best"
    latest = {"storage": "main", "name": f"{run}@latest"}
    assert d.api.run("diff", a={"storage": "main", "name": exact.name}, b=latest)["b"]["name"] == three
    shutil.rmtree(exact.dir)
    d.api.run("reshard", source={"storage": "main", "name": f"{run}@best"}, target={"storage": "main", "name": f"{run}@new"})
    assert (root / f"{run}@new").is_dir()  # a target is what it is called
    shutil.move(root / run, root / f"{run}-moved")
    assert listed(d, f"{run}-moved")["aliases"]["best"] == f"{run}-moved/step-2"
    gone = d.api.wait(d.api.delete(d.api.storage_path("main", f"{run}-moved@best")).ok(202))
    assert gone["result"]["deleted"]["name"] == f"{run}-moved/step-2" and gone["result"]["aliases"] == ["best"]
    got = listed(d, f"{run}-moved")
    assert got["dangling"] == ["best"] and got["aliases"]["best"] == f"{run}-moved/step-2"
    d.api.get(d.api.storage_path("main", f"{run}-moved@best")).problem("not_found")
    alias(d, f"{run}-moved", "best", None, if_="x").problem("alias_moved")
    assert alias(d, f"{run}-moved", "best", None).ok(200)["name"] is None
    alias(d, f"{run}-moved", "best", None).problem("not_found")


def test_aliases_of_names_of_one_component(d, root):
    """Their run is "-": "-@best" stands for one of them wherever a checkpoint is read, and nothing is ever called so."""
    one, other, new = lib.fresh(), lib.fresh(), lib.fresh()
    put(root, one, 1000)
    (root / one / "config.json").write_text("{}")
    put(root, other, 4000000000)
    best, layout = {"storage": "main", "name": "-@best"}, [{"match": "*", "like": "main:-@best"}]
    try:
        d.api.get(d.api.storage_path("main", "-@best")).problem("not_found", status=404)
        d.api.post("/v1/jobs", {"kind": "verify", "source": best}).problem("not_found", status=404)
        r = d.ctl("alias", "main:-", "best", one)
        assert r.returncode == 0 and f"main:-@best is {one}" in r.stdout, r
        (root / "-@best").mkdir()
        (root / "-@best/.metadata").write_bytes(b"x")  # of another tool
        assert d.api.get(d.api.storage_path("main", "-@best")).ok(200)["name"] == one
        assert d.api.get(d.api.storage_path("main", "-@best", "/tensors")).ok(200)["tensors"]
        assert one in str(d.api.get(d.api.storage_path("main", "-@best", "/lineage")).ok(200))
        assert d.api.get(d.api.storage_path("main", "-@latest")).ok(200)["name"] == other
        target = {"storage": "main", "name": new, "layout": layout, "assets": best, "copy_assets": True}
        job = d.api.run("reshard", source=best, target=target)
        assert job["source"]["name"] == job["target"]["assets"]["name"] == one and job["target"]["layout"][0]["like"] == f"main:{one}"
        assert d.api.run("diff", a=best, b={"storage": "main", "name": new})["result"]["equal"]
        assert one in d.ctl("show", "main:-@best").stdout and d.ctl("verify", "main:-@best").returncode == 0
        assert d.ctl("hold", "main:-@best", "--reason", "x").returncode == 0 == d.ctl("unhold", "main:-@best").returncode
        for kind, source in (("reshard", best), ("save", {"state_dict": "x"})):
            p = d.api.post("/v1/jobs", {"kind": kind, "source": source, "target": best}).problem("name_invalid", status=422)
            assert "begins with '-'" in p["detail"]
        for name in ("-", "-x", "-x@best", "-@", "-@-a", "a/-@best"):
            d.api.get(d.api.storage_path("main", name)).problem("name_invalid", status=422)
            d.api.post("/v1/jobs", {"kind": "verify", "source": {"storage": "main", "name": name}}).problem("name_invalid", status=422)
        gone = d.api.wait(d.api.delete(d.api.storage_path("main", "-@best")).ok(202))
        assert gone["result"]["deleted"]["name"] == one and not (root / one).exists() and (root / "-@best").exists()
    finally:
        for name in (one, other, new, "-@best"):
            shutil.rmtree(root / name, ignore_errors=True)
        alias(d, "-", "best", None)


def test_aliases_in_requests(d, root):
    """A label is a text; a name of an unknown storage keeps no other from its checkpoint; a request has so many."""
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/x", 1000)
    ref = {"storage": "main", "name": f"{run}@latest"}
    for storage in ("main", "nowhere"):
        job = d.api.run("verify", labels={**ref, "storage": storage}, source=ref, level="structure")
        assert job["labels"] == {**ref, "storage": storage} and job["source"]["name"] == f"{run}/x"
    unknown = {"kind": "diff", "a": {**ref, "storage": "nowhere"}, "b": ref}
    assert "nowhere" in d.api.post("/v1/jobs", unknown).problem("not_found", status=404)["detail"]
    rules = [{"match": "*", "from": {**ref, "fqn": f"t{i}"}} for i in range(70)]
    many = {"kind": "reshard", "source": ref, "target": {"storage": "main", "name": f"{run}/y"}, "transform": rules}
    assert "64" in d.api.post("/v1/jobs", many).problem("validation_failed")["detail"]


def test_aliases_inside_a_target(d, root):
    """A layout rule's `like` and `assets` name checkpoints; the target's own name is what it is called."""
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/step-1", 1000, "torch-2.15.0/sharded_rowwise")
    put(root, f"{run}/step-2", 2000, "torch-2.15.0/plain")
    (root / run / "step-1/config.json").write_text("{}")
    alias(d, run, "cut", f"{run}/step-1").ok(200)
    target = {"storage": "main", "name": f"{run}@new", "layout": [{"match": "*", "like": f"main:{run}@cut"}],
              "assets": {"storage": "main", "name": f"{run}@cut"}, "copy_assets": True}
    job = d.api.run("reshard", source={"storage": "main", "name": f"{run}@cut"}, target=target)
    assert job["target"]["layout"][0]["like"] == f"main:{run}/step-1" and job["target"]["name"] == f"{run}@new"
    assert job["target"]["assets"]["name"] == f"{run}/step-1" and (root / f"{run}@new/config.json").is_file()
    target["layout"][0]["like"] = f"main:{run}@none"
    target["name"] = f"{run}-b"
    d.api.fails("reshard", "not_found", source={"storage": "main", "name": f"{run}/step-1"}, target=target)


def test_bad_aliases(d, root):
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/x", 1000)
    for name in ("latest", "latest-verified", "-a", "a@b", "n" * 65):
        alias(d, run, name, f"{run}/x").problem("name_invalid")
    for to, code in (("x", "validation_failed"), (f"{run}/../x", "name_invalid"), (f"{run}/y", "not_found")):
        alias(d, run, "a", to).problem(code)
    alias(d, "no-such-run", "a", "no-such-run/x").problem("not_found")
    page = root / run / ".dcpd-aliases.json"
    for text in ("", "[]", '{"version":2,"aliases":{}}', '{"version":1,"aliases":[]}', '{"version":1,"aliases":{"a":"../x"}}',
                 '{"version":1,"aliases":{"a":"b/c"}}', '{"version":1,"aliases":{"a":1}}', " " * (1 << 21),
                 *(json.dumps({"version": 1, "aliases": {key: "x"}}) for key in ("latest", "latest-verified", "", "a b", "é", "n" * 65))):
        page.write_text(text)
        assert alias(d, run, "a", f"{run}/x").problem("state_conflict")["detail"].count(".dcpd-aliases.json"), text[:40]
        d.api.get(d.api.storage_path("main", f"{run}@a")).problem("state_conflict")
        got = listed(d, run)
        assert ".dcpd-aliases.json" in got["aliases_problem"] and got["aliases"]["latest"] == f"{run}/x"
    page.unlink()


def test_as_many_aliases_as_a_run_has(d, root):
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/x", 1000)
    file, names = root / run / ".dcpd-aliases.json", [f"a{i}" for i in range(1000)]
    file.write_text(json.dumps({"version": 1, "aliases": {n: "x" if i % 2 else f"gone-{i % 4}" for i, n in enumerate(names)}}))
    got = listed(d, run)
    assert got["dangling"] == names[::2] and got["aliases"]["a1"] == f"{run}/x" and got["aliases_problem"] is None
    assert "1000" in alias(d, run, "b", f"{run}/x").problem("limit_exceeded")["detail"]
    alias(d, run, "a0", f"{run}/x").ok(200)  # moves and removals go on
    alias(d, run, "a2", None).ok(200)
    alias(d, run, "b", f"{run}/x").ok(200)
    assert listed(d, run)["dangling"] == names[4::2]
    file.write_text(json.dumps({"version": 1, "aliases": {n: "x" for n in [*names, "b"]}}))
    assert "1001" in listed(d, run)["aliases_problem"]


def test_of_many_moves_one_wins(d, root, tmp_path):
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/a", 1000)
    put(root, f"{run}/b", 1000)
    other = lib.Daemon(tmp_path / "other", {"main": root})
    try:
        alias(d, run, "best", f"{run}/a").ok(200)
        now = f"{run}/a"
        for _ in range(4):
            to = f"{run}/b" if now.endswith("/a") else f"{run}/a"
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                got = list(pool.map(lambda i: alias((d, other)[i % 2], run, "best", to, if_=now), range(8)))
            assert sorted(a.status for a in got) == [200] + [409] * 7, [a.body for a in got]
            assert {a.json["actual"] for a in got if a.status == 409} == {to}
            assert listed(other, run)["aliases"]["best"] == listed(d, run)["aliases"]["best"] == to
            now = to
    finally:
        other.discard()


def test_aliases_by_dcpctl(d, root):
    run = f"runs/{lib.fresh()}"
    put(root, f"{run}/step-7", 1000)
    r = d.ctl("alias", f"main:{run}", "best", "step-7", "--if", "")
    assert r.returncode == 0 and f"{run}/step-7" in r.stdout, r
    assert "step-7" in d.ctl("show", f"main:{run}@best").stdout
    assert d.ctl("verify", f"main:{run}@best").returncode == 0
    assert d.ctl("alias", f"main:{run}", "best", "step-7", "--if", "").returncode == 5
    put(root, f"{run}/step-8", 1001)
    assert "best" in d.ctl("runs", f"main:{run}").stdout and "not there" not in d.ctl("runs", f"main:{run}").stdout
    assert d.ctl("rm", "--yes", f"main:{run}/step-7").returncode == 0
    assert f"{run}/step-7 (not there any more)" in d.ctl("runs", f"main:{run}").stdout
    assert d.ctl("alias", f"main:{run}", "best").returncode == 2
    assert d.ctl("alias", f"main:{run}", "best", "--remove").returncode == 0
    assert d.ctl("show", f"main:{run}@best").returncode == 6


def gauges(d, run):
    text = d.api.get("/metrics").body.decode()
    return {k: next((float(x.split()[-1]) for x in text.splitlines() if x.startswith(f"{k}{{") and f'run="{run}"' in x), None)
            for k in ("dcpd_lost_work_seconds", "dcpd_lost_work_steps", "dcpd_last_durable_step")}


def test_lost_work(tmp_path):
    """A snapshot that could not be saved is ahead of what is durable, over a kill, too; gauges are there as long as the trainer lives."""
    d = lib.Daemon(tmp_path, {"main": tmp_path / "main"})
    one, other = (lib.image({"a": ("U8", [50], bytes([i]) * 50)}) for i in (1, 2))
    try:
        d.put("sd", [one, one], generation=100)
        d.api.run("save", source={"state_dict": "sd"}, target={"storage": "main", "name": "run/step-100"})
        got = listed(d, "run")["lost_work"]
        assert got["step"] == got["seen_step"] == 100 and got["steps"] == 0 and 0 <= got["seconds"] < 600
        assert gauges(d, "run")["dcpd_lost_work_steps"] == 0 and gauges(d, "run")["dcpd_lost_work_seconds"] < 600
        d.put("sd", [one, other], generation=160, create=False)
        d.api.fails("save", "divergent", source={"state_dict": "sd"}, target={"storage": "main", "name": "run/step-160"},
                    options={"on_divergence": "fail"})
        d.kill()
        d.start()
        got = listed(d, "run")["lost_work"]
        assert (got["step"], got["seen_step"], got["steps"]) == (100, 160, 60)
        assert gauges(d, "run")["dcpd_lost_work_steps"] == 60
        assert "60 steps" in d.ctl("runs", "main:run").stdout
        d.drop("sd")
        assert gauges(d, "run") == {"dcpd_lost_work_seconds": None, "dcpd_lost_work_steps": None, "dcpd_last_durable_step": 100}
    finally:
        d.discard()


def test_save_interval(d, root):
    run, sd = f"runs/{lib.fresh()}", lib.fresh()
    for i in (1, 2, 3):
        d.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})], generation=i, create=i == 1)
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-{i}"})
        d.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": i}).ok()
    d.drop(sd)
    day, hour = listed(d, run)["save_interval"], listed(d, run, mtbf="1h")["save_interval"]
    cost = day["measured_save_s"]
    assert len(day["last"]) == 3 and all(0 <= x["stall_s"] <= x["save_s"] for x in day["last"])
    assert sorted(x["save_s"] for x in day["last"])[1] == cost  # the median of what is listed
    assert day["saves"] == 3 and 0 <= day["measured_stall_s"] <= cost < 60 and (day["mtbf_s"], hour["mtbf_s"]) == (86400, 3600)
    assert day["young_s"] == pytest.approx((2 * cost * 86400) ** 0.5, abs=0.01) and day["async_s"] >= cost
    assert day["young_s"] == pytest.approx(hour["young_s"] * 24 ** 0.5, abs=0.01) and 0 < day["daly_s"] < day["young_s"] + 1
    for wrong in ("", "0s", "-1h", "1", "x", "1w", "9999999999s"):
        d.api.get(path(run, mtbf=wrong)).problem("invalid_request", status=400)
    r = d.ctl("runs", f"main:{run}", "--mtbf", "12h")
    assert r.returncode == 0 and "Young" in r.stdout and "12:00:00" in r.stdout, r.stdout
