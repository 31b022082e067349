"""What is planned before a byte moves: replicas that differ, who writes what several ranks hold, what a load would do."""
import pytest

import dcpd as lib
from gang import Segments, at, done, failed


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


# ------------------------------------------------------------------------------------------------------ what a load would do

ROWS, COLS = 64, 96


@pytest.fixture(scope="module")
def source(gang):
    """w in rows over 4 ranks, v whole, f4 of a dtype that cannot be cast, two values."""
    images = []
    for r in range(4):
        images.append(lib.image({"w": ("F32", (ROWS // 4, COLS), bytes(ROWS // 4 * COLS * 4)), "v": ("F32", (4,), bytes(16)),
                                 "f4": ("U8", (2, 2), bytes(4))},
                                {"tensors": {"w": {"fqn": "w", "global_shape": [ROWS, COLS], "offsets": [r * ROWS // 4, 0]},
                                             "f4": {"fqn": "f4", "global_shape": [2, 2], "offsets": [0, 0],
                                                    "dtype": "float4_e2m1fn_x2"}},
                                 "values": {"lr": {"json": 0.1}, "step": {"json": 7}}}))
    done(save(gang, images, "load/src"))
    return at("load/src")


def would_load(gang, source, target=None, into=None, **more):
    spec = {"source": source, "target": {"state_dict": "x", **(target or {})}, **more}
    segments = {"x": Segments(into)} if into else {}
    end = gang.job("load", spec, segments, dry_run=True)
    for s in segments.values():
        s.close()
    assert [k for _, k in gang.seen if k in ("RUN", "WANT_SEGMENTS")] == []
    return done(end)


def cut(world, *placements, match="*"):
    return {"world_size": world, "layout": [{"match": match, "placements": list(placements)}]}


def test_figures_of_a_load(gang, source):
    plan = would_load(gang, source, cut(4, "Shard(0)"))
    assert plan["loads"] is True and plan["problems"] == [] and plan["problem_count"] == 0
    assert plan["needed_bytes"] == plan["read_bytes"] == ROWS * COLS * 4 + 16 + 4 and plan["over_read_ratio"] == 1.0
    assert plan["file_count"] == 4 and all(f["name"].endswith(".distcp") and f["bytes"] > 0 for f in plan["files"])
    assert sum(r["bytes"] for r in plan["ranks"]) >= plan["needed_bytes"]
    assert 1 << 20 <= plan["peak_memory_bytes"] < 1 << 30
    assert plan["segment_bytes"] > ROWS * COLS * 4 and plan["tensors"] == 3 and plan["values"] == 2 and plan["chunks"] == 12


def test_what_lies_between_rows_is_read_too(gang, source):
    one = would_load(gang, source, {"world_size": 1, "layout": [{"match": "w", "boxes": [
        {"rank": 0, "offsets": [0, 0], "sizes": [ROWS, COLS]}]}]}, include=["w"])
    assert one["over_read_ratio"] == 1.0
    part = [lib.image({"w": ("F32", (ROWS, 48), bytes(ROWS * 48 * 4))},
                      {"tensors": {"w": {"fqn": "w", "global_shape": [ROWS, COLS], "offsets": [0, 24]}}})]
    plan = would_load(gang, source, into=part)
    assert plan["loads"] and plan["unexpected"] == ["v", "f4", "lr", "step"]
    assert plan["needed_bytes"] == ROWS * 48 * 4
    # what PyTorch wrote has one CRC32 for a whole shard
    assert plan["read_bytes"] == ROWS * COLS * 4 and plan["over_read_ratio"] == pytest.approx(COLS / 48)
    per_rank = (ROWS // 4 - 1) * COLS + 48
    plan = would_load(gang, source, into=part, options={"verify": "none"})
    assert plan["read_bytes"] == 4 * per_rank * 4 and plan["over_read_ratio"] == pytest.approx(per_rank / (ROWS // 4 * 48))


def test_every_mismatch_is_listed(gang, source):
    into = [lib.image({"w": ("F32", (ROWS, COLS + 1), bytes(ROWS * (COLS + 1) * 4)), "f4": ("F32", (2, 2), bytes(16)),
                       "lr": ("F32", (), bytes(4)), "new.a": ("F32", (1,), bytes(4)), "new.b": ("F32", (1,), bytes(4)),
                       "v": ("F16", (4,), bytes(8))}, {"values": {"other": {"json": 1}}})]
    plan = would_load(gang, source, into=into)
    assert plan["loads"] is False
    got = {p["fqn"]: p for p in plan["problems"]}
    assert plan["problem_count"] == len(plan["problems"]) == 6
    assert {k: p["code"] for k, p in got.items()} == {"w": "size_mismatch", "f4": "dtype_unsupported", "lr": "kind_mismatch",
                                                      "new.a": "missing_key", "new.b": "missing_key", "other": "missing_key"}
    assert got["w"]["expected"] == f"[{ROWS}, {COLS}]" and got["w"]["actual"] == f"[{ROWS}, {COLS + 1}]"
    assert "Size mismatch between saved" in got["w"]["detail"] and "float4_e2m1fn_x2" in got["f4"]["detail"]
    assert [(c["fqn"], c["from"], c["to"]) for c in plan["cast"]] == [("v", "float32", "float16")]
    partial = would_load(gang, source, into=into, strict=False)
    assert partial["missing"] == ["new.a", "new.b", "other"] and partial["problem_count"] == 3


def test_a_load_that_fails_says_all_of_it(gang, source):
    s = Segments([lib.image({"w": ("F32", (3, 3), bytes(36)), "v": ("F32", (5,), bytes(20)), "gone": ("F32", (1,), bytes(4))})])
    p = failed(gang.job("load", {"source": source, "target": {"state_dict": "x"}}, {"x": s}), "missing_key")
    s.close()
    assert p["fqn"] == "gone"
    for part in ("Missing key in checkpoint state_dict: gone", "[3, 3] for w", "[5] for v"):
        assert part in p["detail"], p["detail"]


def test_layouts_that_do_not_fit(gang, source):
    boxes = [{"rank": 0, "offsets": [0, 0], "sizes": [10, COLS]}]
    plan = would_load(gang, source, {"world_size": 2, "layout": [{"match": "w", "boxes": boxes}, {"match": "v", "boxes": boxes},
                                                                 {"match": "zzz*", "placements": ["Shard(0)"]}]})
    assert plan["loads"] is False and plan["unmatched_rules"] == ["zzz*"]
    assert {(p["fqn"], p["code"]) for p in plan["problems"]} == {("w", "layout_invalid"), ("v", "layout_invalid")}
    assert all("rule " in p["detail"] for p in plan["problems"])


def test_figures_of_a_reshard(gang, source):
    spec = {"source": source, "target": {**at("load/dry"), **cut(2, "Shard(1)", match="w")}, "options": {"dedup": "lowest_rank"}}
    plan = done(gang.job("reshard", spec, dry_run=True))
    assert plan["file_count"] == 2 and sum(f["bytes"] for f in plan["files"]) == plan["bytes"]
    assert [r["rank"] for r in plan["ranks"]] == [0, 1] and plan["peak_memory_bytes"] > 0
    assert plan["over_read_ratio"] > 1.9, "all is read for its check, then once more"
    unchecked = done(gang.job("reshard", {**spec, "options": {**spec["options"], "verify": "none"}}, dry_run=True))
    assert unchecked["over_read_ratio"] == 1.0 and unchecked["needed_bytes"] == plan["needed_bytes"]
    assert plan["dedup_bytes_saved"] == 0


def test_the_same_request_gives_the_same_plan(gang, source):
    spec = {"source": source, "target": {**at("load/dry"), **cut(3, "Shard(1)", match="w")}}
    a, b = [done(gang.job("reshard", spec, dry_run=True)) for _ in range(2)]
    assert a == b
