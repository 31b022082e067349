"""What is planned before a byte moves: replicas that differ, who writes what several ranks hold, what a load would do."""
import pytest

import dcpd as lib
from gang import Gang, Segments


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {"out": tmp_path_factory.mktemp("out")}


@pytest.fixture(scope="module")
def gang(roots):
    with Gang(2, roots) as g:
        yield g


def at(name):
    return {"storage": "out", "name": name}


def done(end):
    assert end.kind == "DONE", end.body
    return end.body.get("result", end.body.get("plan", end.body))


def failed(end, code):
    assert end.kind == "FAILED" and end.body["code"] == code, end.body
    return end.body


def save(gang, images, name, dry_run=False, spec=None, **options):
    s = Segments(images)
    try:
        return gang.job("save", {"source": {"state_dict": "t", "generation": 1}, "target": at(name), "options": options, **(spec or {})},
                        {"t": s}, dry_run=dry_run)
    finally:
        s.close()


def ranks_with(*values):
    """Equal tensors and these values, a rank each."""
    a = {"a": ("F32", (4,), bytes(16))}
    return [lib.image(a, {"values": {k: v if isinstance(v, dict) and set(v) <= {"json", "bytes", "pickle"} else {"json": v}
                                     for k, v in of.items()}}) for of in values]


def test_values_that_differ_are_listed(gang):
    r = done(save(gang, ranks_with({"lr": 0.1, "step": 3, "cfg": {"x": 1, "y": 2}}, {"lr": 0.1, "step": 4, "cfg": {"y": 5, "x": 1}},
                                   {"lr": 1e-1, "step": 3}, {"lr": 0.25, "step": 5, "only": 1}), "v/differ"))
    listed = {x["fqn"]: x for x in r["divergent"]}
    assert {k: x["ranks"] for k, x in listed.items()} == {"step": [0, 1, 3], "cfg.y": [0, 1], "lr": [0, 3]}
    for x in listed.values():
        assert len(x["digests"]) == len(x["ranks"]) and len(set(x["digests"])) == len(x["ranks"])
        assert all(d.startswith("crc32:") and len(d) == 14 for d in x["digests"])
    loaded = done(gang.job("load", {"source": at("v/differ"), "target": {"state_dict": "x", "world_size": 1}}))
    assert loaded["values"] == 5
    values = lib.Image(gang.made.read(0)).values
    assert (values["step"], values["lr"], values["only"]) == ({"json": 3}, {"json": 0.1}, {"json": 1}), "the lowest rank's"
    gang.made.close()


def test_bytes_and_json_of_one_name_differ(gang):
    r = done(save(gang, ranks_with({"b": {"bytes": "AAEC"}}, {"b": {"bytes": "AAEC"}}, {"b": {"json": "x"}}), "v/kinds"))
    assert [(x["fqn"], x["ranks"]) for x in r["divergent"]] == [("b", [0, 2])]


def test_equal_values_are_not_listed(gang):
    assert done(save(gang, ranks_with({"lr": 0.5}, {"lr": 5e-1}, {"lr": 0.50}), "v/equal"))["divergent"] == []


def test_values_that_differ_are_refused_before_anything_is_written(gang, roots):
    images = ranks_with({"step": 3, "rng": 1}, {"step": 3, "rng": 2})
    p = failed(save(gang, images, "v/no", on_divergence="fail"), "divergent")
    assert p["fqn"] == "rng" and p["rank"] == 1 and "0 and 1" in p["detail"]
    assert not (roots["out"] / "v/no").exists()
    assert [k for _, k in gang.seen if k == "RUN"] == []
    assert done(save(gang, images, "v/yes", on_divergence="fail", spec={"exclude": ["rng"]}))["divergent"] == [], "it takes no part"


def test_a_dry_run_says_what_differs(gang):
    plan = done(save(gang, ranks_with({"step": 3}, {"step": 4}), "v/dry", dry_run=True))
    assert [(x["fqn"], x["ranks"]) for x in plan["divergent"]] == [("step", [0, 1])]


def test_renamed_values_are_listed_by_their_new_name(gang):
    r = done(save(gang, ranks_with({"m.step": 3}, {"m.step": 4}), "v/renamed", spec={"rename": [["^m\\.", "n."]]}))
    assert [x["fqn"] for x in r["divergent"]] == ["n.step"]


@pytest.mark.parametrize("second, code, said", [
    ({"tensors": {"a": ("F32", (5,), bytes(20))}}, "plan_invalid", "shape"),
    ({"tensors": {"a": ("F64", (4,), bytes(32))}}, "plan_invalid", "dtype"),
    ({"tensors": {}, "values": {"a": {"json": 1}}}, "plan_invalid", "tensor"),
])
def test_ranks_that_mean_different_things_by_a_name(gang, second, code, said):
    images = [lib.image({"a": ("F32", (4,), bytes(16))}), lib.image(second["tensors"], {"values": second.get("values", {})})]
    p = failed(save(gang, images, "v/kind"), code)
    assert p["fqn"] == "a" and p["rank"] == 1 and said in p["detail"], p


def replicated(count, world):
    t = {f"t{i}": ("U8", (4096,), bytes([i]) * 4096) for i in range(count)}
    return [lib.image(t) for _ in range(world)]


def test_who_writes_replicas(gang):
    by_rank = {}
    for how in ("balanced", "lowest_rank"):
        plan = done(save(gang, replicated(8, 4), "d/dry", dry_run=True, dedup=how))
        by_rank[how] = [r["bytes"] for r in plan["ranks"]] + [0] * (4 - len(plan["ranks"]))
        assert plan["dedup_bytes_saved"] == 3 * 8 * 4096
    assert max(by_rank["balanced"]) < 2 * min(by_rank["balanced"])
    assert by_rank["lowest_rank"][0] >= 8 * 4096 and max(by_rank["lowest_rank"][1:]) == 0


def test_without_key_paths(gang):
    images = [lib.image({"m.w": ("U8", (4,), b"abcd")}, {"values": {"m.lr": {"json": 1}},
                                                         "paths": {"m.w": ["m", "w"], "m.lr": ["m", "lr"]}})]
    done(save(gang, images, "f/on"))
    done(save(gang, images, "f/off", flatten_state_dict=False))
    d = gang.job("diff", {"a": at("f/on"), "b": at("f/off")})
    assert done(d)["equal"], "the keys and bytes are the same"
    on, off = [done(gang.job("load", {"source": at(f"f/{x}"), "target": {"state_dict": "x", "world_size": 1}})) and
               lib.Image(gang.made.read(0)).dcpd.get("paths", {}) for x in ("on", "off")]
    assert on == {"m.w": ["m", "w"], "m.lr": ["m", "lr"]} and not off
