"""Runs: what trainings there are, which checkpoints each has, newest first, as they lie in the storage."""
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
    assert got["lost_work"] == {"since": "1970-01-01T00:50:00Z", "step": None}
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
    got = listed(d, run)
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
    d.api.get("/v1/runs?storage=main&page_token=x").problem("invalid_request")
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
