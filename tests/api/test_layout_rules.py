"""Layout rules that name a dim which tensors lack: a slip is an error wherever a layout is taken, what falls back is listed."""
import json
import struct

import pytest
from test_cli import good

import dcpd as lib

SHAPES = {"model.w": [8, 4], "model.b": [8], "model.scale": [], "optim.w.step": [], "optim.w.exp_avg": [8, 4]}


@pytest.fixture(scope="module")
def source(shared_daemon):
    d, name = shared_daemon, f"rules/{lib.fresh()}"
    if not d.alive():
        d.start()
    sd = lib.fresh()
    d.put(sd, [lib.image({k: ("F32", s, struct.pack("<f", 1) * (8 if s == [8] else 32 if s else 1)) for k, s in SHAPES.items()})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)
    return name


@pytest.fixture
def full(d):
    """The same as a state dict, whole tensors on rank 0 of 2."""
    sd = lib.fresh("full")
    d.put(sd, [lib.image({k: ("F32", s, bytes(4 * (8 if s == [8] else 32 if s else 1))) for k, s in SHAPES.items()}), lib.image({})])
    return sd


def rule(match, *placements, **more):
    return {"match": match, "placements": list(placements or ["Shard(0)"]), **more}


def ask(d, kind, source, full, rules, dry_run=False):
    """The result (of a dry run the plan), or the problem of one that is refused or fails."""
    made = lib.fresh()
    body = {"kind": "load" if kind == "check" else kind}
    if kind in ("load", "check", "reshard"):
        target = {"storage": "main", "name": f"rules/{made}"} if kind == "reshard" else {"state_dict": made}
        body |= {"source": {"storage": "main", "name": source}, "target": {**target, "world_size": 2, "layout": rules}}
    else:
        body |= {"source": {"state_dict": full}, "target": {"state_dict": made}, "layout": rules}
    a = d.api.post("/v1/jobs" + ("?dry_run=true" if dry_run or kind == "check" else ""), body)
    if a.status != 202:
        return a.json
    j = d.api.wait(a.json)
    if j["state"] == "succeeded" and kind != "reshard":
        d.drop(made)
    return j["result"] if j["state"] == "succeeded" else j["error"]


KINDS = ["load", "reshard", "distribute", "broadcast"]


@pytest.mark.parametrize("dry_run", [False, True], ids=["run", "dry run"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("match, placement, fqn", [("model.*", "Shard(7)", "model.w"), ("model.b", "Shard(1)", "model.b"),
                                                   ("*.step", "Shard(0)", "optim.w.step"), ("model.w", "Shard(-3)", "model.w")])
def test_a_rule_whose_tensors_all_lack_the_dim_is_an_error(d, source, full, kind, dry_run, match, placement, fqn):
    p = ask(d, kind, source, full, [rule(match, placement)], dry_run)
    if kind == "load" and dry_run:  # it lists all that is wrong
        assert p["loads"] is False and len(p["problems"]) == 1, p
        p = {**p["problems"][0], "status": 422}
    assert p["code"] == "layout_invalid" and p["status"] == 422 and match in p["detail"] and "optional" in p["detail"], p
    assert p["fqn"].startswith("model." if fqn.startswith("model.") else fqn), p


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_meant_is_listed(d, source, full, kind):
    """Optional, `*`, and a rule that fits some: all go on, and what went past the rule is told."""
    for r, past in ((rule("model.*", "Shard(7)", optional=True), {"model.w", "model.b", "model.scale"}),
                    (rule("*", "Shard(7)"), set(SHAPES)),
                    (rule("model.*", "Shard(1)"), {"model.b", "model.scale"})):
        for dry_run in (True, False):
            got = ask(d, kind, source, full, [r], dry_run)
            assert {x["fqn"] for x in got["fell_back"]} == past and got["fell_back_count"] == len(past), got
            assert all(x["rule"] == r["match"] and x["took"] is None for x in got["fell_back"]), got
            assert got.get("unmatched_rules", []) == ([r["match"]] if len(past) in (3, 5) else []), got


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_that_earlier_ones_leave_nothing_only_warns(d, source, full, kind):
    """All that has the dim is taken by then, or all that matches at all."""
    first = rule("*.w", "Shard(1)")
    got = ask(d, kind, source, full, [first, rule("model.*", "Shard(1)")])
    assert got["unmatched_rules"] == ["model.*"] and {x["fqn"] for x in got["fell_back"]} == {"model.b", "model.scale"}, got
    got = ask(d, kind, source, full, [rule("model.*", "Replicate()"), rule("model.*", "Shard(7)")])
    assert got["unmatched_rules"] == ["model.*"] and "fell_back" not in got, got
    got = ask(d, kind, source, full, [rule("zzz*", "Shard(7)")])
    assert got["unmatched_rules"] == ["zzz*"] and "fell_back" not in got, got


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_that_took_it_is_named(d, source, full, kind):
    got = ask(d, kind, source, full, [rule("model.*", "Shard(1)"), rule("*.b", "Replicate()")])
    assert {(x["fqn"], x["rule"], x["took"]) for x in got["fell_back"]} == {("model.b", "model.*", "*.b"), ("model.scale", "model.*", None)}


def test_chunks_name_a_dim_too(d, source, full):
    chunks = {"match": "model.b", "chunks": {"dim": 1, "ranks": [0, 1]}}
    assert ask(d, "load", source, full, [chunks])["code"] == "layout_invalid"
    assert ask(d, "load", source, full, [{**chunks, "optional": True}])["fell_back_count"] == 1


def test_redistribute(d, source):
    sd = lib.fresh()
    d.api.run("load", source={"storage": "main", "name": source}, target={"state_dict": sd, "world_size": 2, "layout": [rule("*")]})
    p = ask(d, "redistribute", None, sd, [rule("model.*", "Shard(7)")])
    assert p["code"] == "layout_invalid" and "model." in p["fqn"], p
    got = ask(d, "redistribute", None, sd, [rule("model.*", "Shard(1)")])
    assert "model.b" in {x["fqn"] for x in got["fell_back"]}, got
    d.drop(sd)


def test_dcpctl(d, source, full):
    out = f"main:rules/{lib.fresh()}"
    r = d.ctl("reshard", f"main:{source}", out, "--world-size", "2", "--layout", "model.*=Shard(7)")
    assert r.returncode == 5 and "layout_invalid" in r.stderr and "model.*" in r.stderr and "?" in r.stderr, r
    assert not (d.storages["main"] / out.split(":")[1]).exists()
    r = d.ctl("reshard", f"main:{source}", out, "--world-size", "2", "--layout", "?model.*=Shard(7)")
    assert r.returncode == 0 and "model.*" in r.stderr and "3 tensors" in r.stderr and "model.w" in r.stderr, r
    r = d.ctl("check", f"main:{source}", "--world-size", "2", "--layout", "model.*=Shard(7)")
    assert r.returncode == 1 and "layout_invalid" in r.stdout, r
    r = d.ctl("check", f"main:{source}", "--world-size", "2", "--layout", '?{"match":"model.*","placements":["Shard(7)"]}')
    assert r.returncode == 0 and "model.*" in r.stderr and "model.w" in r.stderr, r
    r = d.ctl("distribute", f"shm:{full}", f"shm:{full}-2", "--layout", "model.*=Shard(7)")
    assert r.returncode == 5 and "layout_invalid" in r.stderr, r
    plan = json.loads(good(d.ctl("reshard", f"main:{source}", out + "-x", "--world-size", "2", "--layout", "*=Shard(1)", "--dry-run")))
    assert plan["fell_back_count"] == 3
    d.drop(full)


def test_optional_is_true_or_false(d, source):
    body = {"kind": "reshard", "source": {"storage": "main", "name": source},
            "target": {"storage": "main", "name": "rules/x", "layout": [rule("*", optional="yes")]}}
    p = d.api.post("/v1/jobs", body).problem("validation_failed")
    assert p["pointer"] == "/target/layout/0/optional", p
