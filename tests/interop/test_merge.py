"""Merges against the same sums made with torch: layouts, formats and dtypes of several checkpoints, weights, what is not averaged."""
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transform_cases as cases
from safetensors.torch import load_file, save_file

import dcpd as lib

HERE = {"storage": "main"}


def tensors(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return {"model.w": torch.randn(300, 1024, generator=g).to(dtype), "model.b": torch.randn(7, generator=g).to(dtype),
            "model.s": torch.randn((), generator=g).to(dtype), "model.e": torch.empty(0, 4, dtype=dtype),
            "model.d": torch.randn(33, 5, generator=g, dtype=torch.float64), "model.c": torch.randn(9, generator=g, dtype=torch.complex64),
            "model.n": torch.tensor([seed, 2]), "model.m": torch.tensor([True, False, seed % 2 == 0]), "step": seed}


def put(d, state, world=1, seed=0):
    name = lib.fresh()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / name)), no_dist=True)
    if world == 1:
        return {**HERE, "name": name}
    only = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    d.api.run("reshard", source={**HERE, "name": name},
              target={**HERE, "name": name + "-cut", "world_size": world, "layout": cases.layout(seed, only, world)})
    return {**HERE, "name": name + "-cut"}


def total(parts, weights, wide=False):
    out = None
    for p, w in zip(parts, weights):
        up = torch.complex128 if p.is_complex() and wide else torch.complex64 if p.is_complex() else \
            torch.float64 if wide or p.dtype == torch.float64 else torch.float32
        real = torch.view_as_real(p.to(up)) if p.is_complex() else p.to(up)
        one = real * torch.tensor(w, dtype=real.dtype)
        out = one if out is None else out + one
    return (torch.view_as_complex(out) if parts[0].is_complex() else out).to(parts[0].dtype)


def average(states, weights=None, wide=False, first_only=()):
    weights = weights or [1 / len(states)] * len(states)
    return {k: total([s[k] for s in states], weights, wide)
            if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) and k not in first_only else v
            for k, v in states[0].items()}


def get(d, ref, like):
    got = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in like.items()}
    dcp.load(got, storage_reader=dcp.FileSystemReader(str(d.storages["main"] / ref["name"])), no_dist=True)
    return got


def same(got, want):
    assert set(got) == set(want)
    for k, v in want.items():
        if isinstance(v, torch.Tensor):
            assert got[k].dtype == v.dtype and torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (got[k], v))), k
        else:
            assert got[k] == v


def merge(d, refs, world=1, layout=(), fmt="dcp", name=None, **more):
    to = {**HERE, "name": name or lib.fresh()}
    return to, d.api.run("merge", sources=refs, target={**to, "world_size": world, "layout": list(layout), "format": fmt}, **more)["result"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_averages(d, dtype):
    """Sources of 1, 3 and 4 ranks; a target of two; whatever is no float comes from the first."""
    states = [tensors(i, dtype) for i in range(3)]
    refs = [put(d, s, w, i) for i, (s, w) in enumerate(zip(states, (1, 3, 4)))]
    want = average(states)
    to, result = merge(d, refs, 2, cases.layout(5, {k: v for k, v in want.items() if isinstance(v, torch.Tensor)}, 2))
    same(get(d, to, want), want)
    assert result["averaged"] == 6 and result["first_only"] == 2
    assert result["unverified_bytes"] == (d.storages["main"] / refs[0]["name"] / ".metadata").stat().st_size, "PyTorch's"
    d.api.run("verify", source=to)


def test_weights_and_precision(d):
    states = [tensors(i) for i in range(4)]
    refs = [put(d, s) for s in states]
    weights = [0.1, 1.7, -0.4, 1e-3]
    for wide in (False, True):
        want = average(states, weights, wide, ("model.b",))
        to, result = merge(d, refs, weights=weights, dtype="float64" if wide else "float32", first_only=["*.b"])
        same(get(d, to, want), want)
    assert result["averaged"] == 5


def test_other_formats(d):
    """A safetensors file in bfloat16 and a DCP checkpoint; the sum as one safetensors file."""
    a, b = ({k: v for k, v in tensors(i).items() if isinstance(v, torch.Tensor) and not v.is_complex()} for i in (1, 2))
    b = {k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in b.items()}
    name = lib.fresh() + ".safetensors"
    save_file(b, str(d.storages["main"] / name))
    to, result = merge(d, [put(d, a), {**HERE, "name": name}], fmt="safetensors", name=lib.fresh() + ".safetensors")
    same(load_file(str(d.storages["main"] / to["name"])), average([a, b]))


@pytest.mark.long
def test_many_small_tensors(d):
    states = [{f"l.{i}.w": torch.full((3, i % 5 + 1), float(i * k), dtype=torch.bfloat16) for i in range(700)} for k in (1, 2, 4)]
    to, _ = merge(d, [put(d, s) for s in states])
    want = average(states)
    same(get(d, to, want), want)


@pytest.mark.parametrize("change, code", [
    (lambda s: s.pop("model.b"), "missing_key"), (lambda s: s.update({"model.x": torch.ones(2)}), "missing_key"),
    (lambda s: s.update({"model.b": torch.ones(8)}), "size_mismatch"),
    (lambda s: s.update({"model.b": torch.ones(7).int()}), "kind_mismatch")])
def test_checkpoints_of_other_tensors(d, change, code):
    """The error names tensor and checkpoint; nothing is made. What is left out does not count."""
    states = [tensors(i) for i in range(2)]
    change(states[1])
    refs = [put(d, s) for s in states]
    to = {**HERE, "name": lib.fresh()}
    error = d.api.fails("merge", code, sources=refs, target=to)
    assert error["fqn"] in ("model.b", "model.x") and error["file"] == f"main:{refs[1]['name']}"
    assert not (d.storages["main"] / to["name"]).exists()
    d.api.run("merge", sources=refs, target=to, exclude=["model.b", "model.x"])


def test_a_flipped_bit_is_not_averaged(d):
    states = [{"w": torch.randn(1 << 18)} for _ in range(2)]
    refs = [put(d, s, 2) for s in states]
    victim = sorted((d.storages["main"] / refs[1]["name"]).glob("*.distcp"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    to = {**HERE, "name": lib.fresh()}
    where = f"{refs[1]['name']}/{victim.name}"    # the files of all have the same names
    assert d.api.fails("merge", "digest_mismatch", sources=refs, target=to)["file"] == where
    assert d.api.fails("diff", "digest_mismatch", a=refs[0], b=refs[1])["file"] == where
    assert not (d.storages["main"] / to["name"]).exists()
    (victim.parent / ".metadata").write_bytes(b"x")
    assert d.api.fails("merge", "checkpoint_damaged", sources=refs, target=to)["file"] == f"{refs[1]['name']}/.metadata"


RULES = [{"match": r"^model\.(\w)$", "rename": "net.$1.w"}, {"match": r"^net\.w\.w$", "permute": [1, 0]},
         {"match": r"^net\.w\.w$", "split": {"dim": 1, "sizes": [100, "{dim1-100}"], "into": ["net.q", "net.k"]}},
         {"match": r"^net\.d\.w$", "pad": {"dim": 0, "to": 40}}, {"match": r"^net\.b\.", "rename": "net.b1."},
         {"match": r"^net\.b1\.w$", "tie": "net.b2.w"}, {"match": r"^net\.b\d\.w$", "stack": {"dim": 0, "into": "net.bb"}},
         {"match": "^net.s", "drop": True}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_are_applied_to_the_average(d, dtype):
    """They move the elements of the average, as a reshard of it by the same rules would."""
    states = [{k: v for k, v in tensors(i, dtype).items() if isinstance(v, torch.Tensor)} for i in range(3)]
    refs = [put(d, s, w, i) for i, (s, w) in enumerate(zip(states, (3, 1, 2)))]
    mean = average(states)
    want = cases.apply(mean, RULES)
    to, result = merge(d, refs, 2, cases.layout(3, want, 2), transform=RULES)
    same(get(d, to, want), want)
    again = {**HERE, "name": lib.fresh()}
    d.api.run("reshard", source=merge(d, refs)[0], target=again, transform=RULES)
    assert d.api.run("diff", a=to, b=again)["result"]["equal"] and result["averaged"] == 5
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "merge", "sources": refs, "target": to | {"name": lib.fresh()},
                                                "transform": RULES}).ok(200)["transform"]
    assert {(r["fqn"], tuple(r["shape"])) for r in plan["after"]} == {(k, tuple(v.shape)) for k, v in want.items()}
    assert plan["before_count"] == len(mean)


def test_a_cast_is_the_only_rounding_of_an_average(d):
    """bfloat16 checkpoints, one of them in float32, give a float32 average that was never bfloat16; integers are not averaged."""
    states = [{"w": torch.randn(300, 70).bfloat16(), "v": torch.randn(9).bfloat16(), "n": torch.tensor([k, 300])} for k in (1, 2)]
    states[1]["w"] = torch.randn(300, 70)
    rules = [{"match": "w", "dtype": "float16"}, {"match": "w", "dtype": "float32"}, {"match": "v", "dtype": "float64"}]
    to, result = merge(d, [put(d, s, 2, 1) for s in states], transform=rules)
    mean = average([{k: v.float() if v.is_floating_point() else v for k, v in s.items()} for s in states])
    want = {"w": mean["w"], "v": average([{"v": s["v"].double()} for s in states])["v"], "n": states[0]["n"]}
    same(get(d, to, want), want)
    assert {(c["fqn"], c["from"], c["to"]) for c in result["cast"]} == {("w", "bfloat16", "float32"), ("v", "bfloat16", "float64")}


def test_rules_and_what_is_not_averaged(d):
    """first_only names tensors before the rules, others may lack them; `from` takes a tensor as it is; no average is joined to it."""
    states = [{"a": torch.randn(4, 3), "b": torch.randn(4, 3), "opt.m": torch.randn(5), "i": torch.tensor([k, 300, 9])} for k in (1, 2)]
    del states[1]["opt.m"], states[1]["i"]
    other = put(d, {"b": torch.full((4, 3), 7.0), "head": torch.ones(2)})
    refs = [put(d, s) for s in states]
    rules = [{"match": "^opt", "rename": "optim"}, {"match": "^i$", "slice": ["1:"]}, {"match": "^(b|head)$", "from": other},
             {"match": "^a$", "permute": [1, 0]}]
    to, result = merge(d, refs, transform=rules, first_only=["opt.*"])
    want = {"a": average([{"a": s["a"]} for s in states])["a"].t().contiguous(), "b": torch.full((4, 3), 7.0), "head": torch.ones(2),
            "optim.m": states[0]["opt.m"], "i": states[0]["i"][1:]}
    same(get(d, to, want), want)
    assert result["averaged"] == 1
    joined = {"match": "^[ab]$", "concat": {"dim": 0, "into": "ab", "order": ["a", "b"]}}
    for more in ({"transform": [joined], "first_only": ["b", "opt.*"]}, {"transform": [*rules[2:3], joined], "first_only": ["opt.*"]}):
        error = d.api.fails("merge", "validation_failed", sources=refs, target={**HERE, "name": lib.fresh()}, **more)
        assert error["fqn"] == "ab" and error["pointer"].startswith("/transform")
    states[1]["b"] = torch.randn(3, 4)
    error = d.api.fails("merge", "size_mismatch", sources=[refs[0], put(d, states[1])], target={**HERE, "name": lib.fresh()},
                        transform=[joined], first_only=["opt.*"])
    assert error["fqn"] == "b"


def test_files_of_a_given_size(d):
    states = [{f"w{i}": torch.randn(1000) for i in range(6)} for _ in range(2)]
    to, result = merge(d, [put(d, s) for s in states], fmt="safetensors", name=lib.fresh() + "-hf")
    assert len(list((d.storages["main"] / to["name"]).glob("*.safetensors"))) == 1
    target = {**to, "name": lib.fresh(), "format": "safetensors", "max_file_bytes": 8000}
    d.api.run("merge", sources=[to, to], target=target)
    files = sorted((d.storages["main"] / target["name"]).glob("*.safetensors"))
    assert len(files) == 3
    same({k: v for f in files for k, v in load_file(f).items()}, average(states))


def test_requests_that_are_wrong(d):
    one = {**HERE, "name": "a"}
    two = {"sources": [one, one]}
    for body, pointer in [({"sources": [one]}, "/sources"), ({"sources": [one] * 17}, "/sources"),
                          ({"sources": [one, {"x": 1}]}, "/sources/1"),
                          ({**two, "weights": [1]}, "/weights"), ({**two, "weights": [1, "x"]}, "/weights/1"),
                          ({**two, "dtype": "int8"}, "/dtype"), ({"sources": [one, {**HERE, "name": "t"}]}, "/sources/1")]:
        p = d.api.post("/v1/jobs", {"kind": "merge", "target": {**HERE, "name": "t"}, **body})
        assert p.status in (400, 422) and p.json["pointer"].startswith(pointer), (body, p.json)


def test_a_checkpoint_that_is_not_there_is_refused_at_once(d):
    refs = [put(d, tensors(i)) for i in range(2)]
    gone = {**HERE, "name": lib.fresh()}
    for sources in ([*refs, gone], [gone, *refs], [refs[0], gone, refs[1]]):
        request = {"kind": "merge", "sources": sources, "target": {**HERE, "name": lib.fresh()}}
        assert gone["name"] in d.api.post("/v1/jobs", request).problem("not_found", status=404)["detail"]
    folder = d.storages["main"] / gone["name"]
    folder.mkdir()
    (folder / "notes").write_text("x")
    request = {"kind": "merge", "sources": [*refs, gone], "target": {**HERE, "name": lib.fresh()}}
    assert gone["name"] in d.api.post("/v1/jobs", request).problem("not_a_checkpoint")["detail"]


def test_patterns_that_match_nothing_are_told(d):
    refs = [put(d, tensors(i)) for i in range(2)]
    _, result = merge(d, refs, first_only=["model.b", "step", "modle.*", "optim.*"])
    w = next(w for w in result["warnings"] if w["code"] == "unmatched_first_only")
    assert "'modle.*', 'optim.*'" in w["detail"] and "model.b" not in w["detail"]
    _, result = merge(d, refs, first_only=["model.b", "st*p"])
    assert not [w for w in result.get("warnings", []) if w["code"] == "unmatched_first_only"]


@pytest.mark.parametrize("weights, dtype, fqn", [([1e300, 1], "float32", "w"), ([1, -1e39], "float64", "w"), ([1e5, 1], "float32", "h"),
                                                 ([0.1, 60000], "float64", None)])
def test_weights_beyond_the_dtype_are_told(d, weights, dtype, fqn):
    states = [{"d": torch.ones(3, dtype=torch.float64), "h": torch.ones(3).half() * 1e-3, "w": torch.ones(3)} for _ in range(2)]
    states = [{k: v for k, v in s.items() if k in ("d", fqn or "h")} for s in states]
    to, result = merge(d, [put(d, s) for s in states], weights=weights, dtype=dtype)
    told = [w["detail"] for w in result.get("warnings", []) if w["code"] == "weight_overflow"]
    assert (f"'{fqn}'" in told[0] and str(weights.index(max(weights, key=abs))) in told[0]) if fqn else told == []
    got = get(d, to, states[0])
    assert got["d"].isfinite().all()


def test_unverified_metadata_are_those_of_a_checkpoint(d):
    refs = [put(d, tensors(i)) for i in range(2)]
    for kind, more in (("diff", {"a": refs[0], "b": refs[1]}), ("merge", {"sources": refs, "target": {**HERE, "name": lib.fresh()}})):
        r = d.api.run(kind, **more)["result"]
        files = {u["file"] for u in r["unverified"] if not u["fqn"]}
        assert files == {f"{x['name']}/.metadata" for x in refs}, files


def test_dcpctl(d):
    states = [tensors(i) for i in range(2)]
    refs = [f"main:{put(d, s)['name']}" for s in states]
    name = lib.fresh()
    done = d.ctl("merge", *refs, f"main:{name}", "--weights", "0.25,0.75")
    assert done.returncode == 0, done.stderr
    want = average(states, [0.25, 0.75])
    same(get(d, {"name": name}, want), want)
    assert d.ctl("merge", refs[0], f"main:{name}-2").returncode == 2
