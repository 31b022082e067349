"""Conversion rules against the same done with torch: every kind, random chains over sharded sources and targets."""
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transform_cases as cases
from lib_interop import assemble
from safetensors.torch import save_file

import dcpd as lib

HERE = {"storage": "main"}


def put(d, state, world=1, layout=()):
    """A checkpoint of the state, cut by the layout over so many ranks."""
    name = lib.fresh()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / name)), no_dist=True)
    if world == 1:
        return {**HERE, "name": name}
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + "-cut", "world_size": world, "layout": list(layout)})
    return {**HERE, "name": name + "-cut"}


def convert(d, source, rules, world=1, layout=(), **more):
    to = {**HERE, "name": lib.fresh()}
    done = d.api.run("reshard", source=source, target={**to, "world_size": world, "layout": list(layout)}, transform=rules, **more)
    return to, done["result"]


def get(d, ref, like):
    got = {k: torch.empty_like(v) for k, v in like.items()}
    dcp.load(got, storage_reader=dcp.FileSystemReader(str(d.storages["main"] / ref["name"])), no_dist=True)
    reader = dcp.FileSystemReader(str(d.storages["main"] / ref["name"]))
    assert set(reader.read_metadata().state_dict_metadata) == set(like)
    return got


def check(d, state, rules, want=None, vars=None, source_world=1, world=1, seed=0):
    source = put(d, state, source_world, cases.layout(seed, state, source_world))
    want = cases.apply(state, rules, vars) if want is None else want
    more = {"vars": vars} if vars else {}
    layout = cases.layout(seed + 1, want, world)
    to, result = convert(d, source, rules, world, layout, **more)
    cases.same(get(d, to, want), want)
    check_load(d, source, rules, want, world, layout, **more)
    return result


def check_load(d, source, rules, want, world=1, layout=(), **more):
    """The same rules in a load: into a new state dict, and again into that, which holds other bytes by then."""
    sd, other = {"state_dict": lib.fresh()}, {"state_dict": lib.fresh()}
    form = {"world_size": world, "layout": list(layout)}
    done = d.api.run("load", source=source, target={**sd, **form}, transform=rules, **more)["result"]
    assert done["verified_bytes"] > 0 or not any(v.numel() for v in want.values())
    loaded(d, sd, want)
    ones = {k: torch.full_like(v.view(torch.uint8) if v.dtype.itemsize == 1 else v, 1).view(v.dtype) for k, v in want.items()}
    d.api.run("load", source=put(d, ones), target={**other, **form})
    d.api.run("load", source=source, target=other, transform=rules, **more)
    loaded(d, other, want)
    d.drop(sd["state_dict"], other["state_dict"])


def loaded(d, sd, want):
    got = assemble(d.images(sd["state_dict"]))
    assert got.keys() == want.keys()
    for k, v in want.items():
        assert got[k][0] == list(v.shape) and got[k][1] == cases.raw(v).numpy().tobytes(), k


W = torch.arange(24 * 10, dtype=torch.float32).reshape(24, 10)


@pytest.mark.parametrize("rule", [
    {"match": "^m\\.", "rename": ""},
    {"match": "(\\w+)$", "rename": "${1}x"},
    {"match": "w", "dtype": "bfloat16"},
    {"match": "^m\\.w$", "split": {"dim": 0, "sizes": [4, "{dim0/2}", 8], "into": ["a", "b", "$0.c"]}},
    {"match": "^m\\.w$", "split": {"dim": -1, "parts": 5, "into": ["a", "b", "c", "d", "e"]}},
    {"match": "^m\\.w$", "unstack": {"dim": 1, "into": "row.{i}"}},
    {"match": "w", "permute": [1, 0]},
    {"match": "w", "reshape": [2, -1, 3, "{dim1/2}"]},
    {"match": "w", "pad": {"dim": 0, "to": "{vocab}"}},
    {"match": "w", "slice": ["-5:", "2:{dim1-1}"]},
    {"match": "w", "drop": True},
    {"match": "^m\\.w$", "tie": "head"},
    {"match": "nothing", "drop": True, "optional": True},
])
@pytest.mark.parametrize("worlds", [(1, 1), (3, 2)])
def test_each_rule(d, rule, worlds):
    state = {"m.w": W, "m.b": torch.arange(10, dtype=torch.int32), "s": torch.tensor(1.5)}
    check(d, state, [rule], vars={"vocab": 32} if "pad" in rule else None, source_world=worlds[0], world=worlds[1])


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_experts_to_one_tensor_and_back(d, dim):
    state = {f"layers.{k}.experts.{i}.w1": W + 1000 * i + 7 * k for i in range(11) for k in range(2)}
    into = [{"match": r"layers\.(\d+)\.experts\.\d+\.w1", "stack": {"dim": dim, "into": "layers.$1.w1"}}]
    back = [{"match": r"layers\.(\d+)\.w1", "unstack": {"dim": dim, "into": "layers.$1.experts.{i}.w1"}}]
    check(d, state, into, source_world=2, world=3)
    check(d, state, into + back, want=state, source_world=2, world=3)


@pytest.mark.parametrize("kind", ["complex128", *(pytest.param(k, marks=pytest.mark.long)
                                                 for k in ("int8", "bfloat16", "float32", "float64"))])
def test_large_transposes(d, kind):
    """Rows that lie far apart are read one by one, and become columns many at a time; a cast on the way."""
    kind = getattr(torch, kind)
    wide = 40000 // kind.itemsize
    state = {"t": torch.arange(300 * wide).reshape(300, wide).to(kind), "u": torch.arange(7 * 31 * wide).reshape(7, 31, wide).to(kind)}
    rules = [{"match": "t", "permute": [1, 0]}, {"match": "u", "permute": [2, 0, 1]}, {"match": "t", "tie": "c"},
             {"match": "c", "dtype": "float16" if not kind.is_complex else "complex64"}]
    want = {"t": state["t"].t(), "u": state["u"].permute(2, 0, 1)}
    want["c"] = want["t"].to(torch.complex64 if kind.is_complex else torch.float16)
    source = put(d, state, 3, [{"match": "*", "placements": ["Shard(0)"], "mesh": [3]}])
    to, _ = convert(d, source, rules, 4, [{"match": "*", "placements": ["Shard(0)"], "mesh": [4]}])
    want = {k: v.contiguous() for k, v in want.items()}
    cases.same(get(d, to, want), want)
    assert d.api.run("verify", source=to)["result"]["unverified_bytes"] == 0


def test_parts_in_a_given_order(d):
    state = {f"{n}_proj.weight": W + i for i, n in enumerate("qkv")}
    rule = {"match": "._proj.weight", "concat": {"dim": 0, "into": "qkv.weight", "order": ["q_", "k_", "v_"]}}
    check(d, state, [rule], want={"qkv.weight": torch.cat([state["q_proj.weight"], state["k_proj.weight"], state["v_proj.weight"]])})


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_random_chains(d, seed):
    state, rules, want = cases.chain(seed)
    check(d, state, rules, want, source_world=1 + seed % 3, world=1 + seed % 4, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 200))
def test_more_random_chains(d, seed):
    test_random_chains(d, seed)


def test_from_another_checkpoint(d):
    a, b = {"w": W, "v": W + 1}, {"w": W * 2, "head": W * 3, "old.v": W * 4}
    other = put(d, b, 2, [{"match": "*", "placements": ["Shard(1)"], "mesh": [2]}])
    name = {k: other[k] for k in ("storage", "name")}
    rules = [{"match": "^head$", "from": name}, {"match": "^v$", "from": {**name, "fqn": "old.$0"}}]
    to, result = convert(d, put(d, a), rules, 2)
    want = {"w": a["w"], "v": b["old.v"], "head": b["head"]}
    cases.same(get(d, to, want), want)
    assert result["verified_bytes"] > 0


def test_safetensors_in_and_out(d):
    name = lib.fresh()
    (d.storages["main"] / name).mkdir()
    save_file({"w": W, "x": W.to(torch.bfloat16)}, d.storages["main"] / name / "model.safetensors")
    rules = [{"match": "w", "permute": [1, 0]}, {"match": "x", "reshape": [-1]}]
    out = {**HERE, "name": lib.fresh()}
    d.api.run("reshard", source={**HERE, "name": name}, target={**out, "format": "safetensors"}, transform=rules)
    d.api.run("reshard", source=out, target={**HERE, "name": name + "-dcp"})
    want = cases.apply({"w": W, "x": W.to(torch.bfloat16)}, rules)
    cases.same(get(d, {**HERE, "name": name + "-dcp"}, want), want)


def test_tensors_stored_in_another_order(d):
    """DCP's items keep the strides of their tensors: a transposed one is stored transposed."""
    state = {"t": W.t(), "u": torch.arange(2 * 3 * 4 * 5.).reshape(2, 3, 4, 5).permute(2, 0, 3, 1)}
    check(d, state, [{"match": "t", "slice": ["1:7", "3:"]}, {"match": "u", "permute": [3, 0, 1, 2]}, {"match": "u", "slice": ["1:"]}])
    source = put(d, {"t": W.t()})
    p = d.api.fails("reshard", "format_unsupported", source=source, target={**HERE, "name": lib.fresh()},
                    transform=[{"match": "t", "reshape": ["{dim0*2}", -1]}])
    assert p["fqn"] == "t" and p["file"]


REFUSED = [
    ([{"match": "nothing", "drop": True}], "validation_failed", "/transform/0"),
    ([{"match": "w", "rename": "v"}], "duplicate_key", "/transform/0"),
    ([{"match": "w", "permute": [0]}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "reshape": [7, -1]}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "reshape": [0, -1]}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "reshape": [2**62, 2**62]}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "slice": ["0:25"]}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "split": {"dim": 0, "sizes": [4, 4], "into": ["a", "b"]}}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "split": {"dim": 2, "parts": 2, "into": ["a", "b"]}}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "split": {"dim": 0, "parts": 2, "into": ["a", "a"]}}], "duplicate_key", "/transform/0"),
    ([{"match": "w", "pad": {"dim": 0, "to": 3}}], "size_mismatch", "/transform/0"),
    ([{"match": "w", "pad": {"dim": 0, "to": 2**62}}], "limit_exceeded", "/transform/0"),
    ([{"match": "[wv]", "concat": {"dim": 0, "into": "x"}}], "validation_failed", "/transform/0"),
    ([{"match": "(", "drop": True}], "validation_failed", "/transform/0/match"),
    ([{"match": "^(a|aa|aaa)+[b-z]", "drop": True}], "validation_failed", "/transform/0"),
    ([{"match": "w", "rename": "$9"}], "validation_failed", "/transform/0"),
    ([{"match": "w", "reshape": ["{dim0/5}", -1]}], "validation_failed", "/transform/0"),
]


@pytest.mark.parametrize("rules, code, pointer", REFUSED)
def test_what_does_not_fit(d, rules, code, pointer):
    source = put(d, {"w": W, "v": W, "a" * 200: torch.zeros(1)})
    p = d.api.fails("reshard", code, source=source, target={**HERE, "name": lib.fresh()}, transform=rules)
    assert p["pointer"] == pointer, p
    assert not d.staging()


def test_a_missing_part_is_told(d):
    source = put(d, {f"experts.{i}": W for i in (0, 1, 3)})
    p = d.api.fails("reshard", "missing_key", source=source, target={**HERE, "name": lib.fresh()},
                    transform=[{"match": r"experts\.\d", "stack": {"dim": 0, "into": "experts"}}])
    assert "number 2" in p["detail"]


def test_quantised_weights_and_their_companions(d):
    state = {"a.weight": W.to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1), "b.weight": W}
    check(d, state, [{"match": r"^a\.weight$", "rename": "x.y.weight"}],
          want={"x.y.weight": state["a.weight"], "x.y.weight_scale_inv": state["a.weight_scale_inv"], "b.weight": W})
    check(d, state, [{"match": r"^a\.weight$", "drop": True}], want={"b.weight": W})
    source = put(d, state)
    p = d.api.fails("reshard", "dtype_unsupported", source=source, target={**HERE, "name": lib.fresh()}, dtype=[["*", "bfloat16"]])
    assert p["fqn"] == "a.weight"
    for rule, code in (({"dtype": "bfloat16"}, "dtype_unsupported"), ({"permute": [1, 0]}, "validation_failed")):
        p = d.api.fails("reshard", code, source=source, target={**HERE, "name": lib.fresh()}, transform=[{"match": r"^.\.weight$", **rule}])
        assert p["fqn"] == "a.weight" and "a.weight_scale_inv" in p["detail"]


def test_damage_in_the_source_is_found(d):
    source = put(d, {"w": torch.randn(400, 300)}, 2, [{"match": "*", "placements": ["Shard(0)"], "mesh": [2]}])
    file = sorted((d.storages["main"] / source["name"]).glob("*.distcp"))[1]
    data = bytearray(file.read_bytes())
    data[8192] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    rules = [{"match": "w", "permute": [1, 0]}]
    d.api.fails("reshard", "digest_mismatch", source=source, target={**HERE, "name": lib.fresh()}, transform=rules)
    sd = lib.fresh()
    p = d.api.fails("load", "digest_mismatch", source=source, target={"state_dict": sd}, transform=rules)
    assert p["fqn"] == "w" and p["file"].endswith(file.name)
    done = d.api.run("load", source=source, target={"state_dict": sd}, transform=rules, options={"verify": "none"})["result"]
    assert done["verified_bytes"] == 0 and done["unverified_bytes"] >= 400 * 300 * 4
    d.drop(sd)


def test_a_load_renames_values_casts_and_tells_what_is_missing(d):
    state = {"a.w": W, "a.b": torch.arange(10.), "lr": 0.5, "a.step": 7}
    source, sd = put(d, state), lib.fresh()
    rules = [{"match": r"^a\.", "rename": "m."}, {"match": r"m\.w", "dtype": "bfloat16"}]
    p = d.api.fails("load", "validation_failed", source=source, target={"state_dict": sd}, transform=[{"match": "nothing", "drop": True}])
    assert p["pointer"] == "/transform/0"
    done = d.api.run("load", source=source, target={"state_dict": sd, "world_size": 2}, transform=rules)["result"]
    assert done["cast"] == [{"fqn": "m.w", "from": "float32", "to": "bfloat16"}]
    loaded(d, {"state_dict": sd}, {"m.w": W.bfloat16(), "m.b": state["a.b"]})
    assert set(d.images(sd)[0].values) == {"lr", "m.step"}
    d.api.fails("load", "missing_key", source=source, target={"state_dict": sd})
    done = d.api.run("load", source=source, target={"state_dict": sd}, strict=False)["result"]
    assert set(done["unexpected"]) == {"a.w", "a.b", "a.step"} and {"m.w", "m.b"} <= set(done["missing"])
    d.drop(sd)


def test_a_load_takes_some_elements_twice_and_others_never(d):
    """CRC32s of what is taken do not add up to those of the sources: they are compared by reading all."""
    source, sd = put(d, {"w": W}), lib.fresh()
    done = d.api.run("load", source=source, transform=[{"match": "w", "slice": ["0:12"]}],
                     target={"state_dict": sd, "world_size": 2, "layout": [{"match": "*", "placements": ["Replicate()"]}]})["result"]
    assert done["verified_bytes"] >= W.nbytes and done["unverified_bytes"] < W.nbytes  # PyTorch's .metadata has no digest
    assert [cases.raw(W[:12]).numpy().tobytes()] * 2 == [bytes(raw) for image in d.images(sd) for *_, raw in image.chunks()]
    d.drop(sd)


def test_dry_run_shows_before_and_after(d):
    source = put(d, {"q": W, "k": W, "e": torch.zeros(3, dtype=torch.int8)})
    rules = [{"match": "[qk]", "concat": {"dim": 1, "into": "qk", "order": ["q", "k"]}}, {"match": "qk", "dtype": "bfloat16"}]
    of_load = d.api.post("/v1/jobs?dry_run=true", {"kind": "load", "source": source, "target": {"state_dict": lib.fresh()},
                                                   "transform": rules}).ok(200)
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "reshard", "source": source, "target": {**HERE, "name": lib.fresh()},
                                                "transform": rules}).ok(200)["transform"]
    assert of_load["transform"] == plan and of_load["loads"] is True
    assert plan["before"] == [{"fqn": "q", "shape": [24, 10], "dtype": "float32"}, {"fqn": "k", "shape": [24, 10], "dtype": "float32"},
                              {"fqn": "e", "shape": [3], "dtype": "int8"}]
    assert plan["after"] == [{"fqn": "qk", "shape": [24, 20], "dtype": "bfloat16", "from": ["q", "k"]},
                             {"fqn": "e", "shape": [3], "dtype": "int8", "from": ["e"]}]
    assert (plan["before_count"], plan["after_count"]) == (3, 2)
