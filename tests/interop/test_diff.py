"""How two checkpoints differ: what NumPy says of the same numbers in long double, whatever dtype, layout and format each side has."""
import json
import math

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcpd as lib
from test_tensor_stats import COMPLEX, FLOATS, INTS, numbers

HERE = {"storage": "main"}


def ref(name):
    return {**HERE, "name": name}


def put(d, state, world_size=0):
    """By PyTorch; with world_size resharded by dcpd, so that it has digests."""
    name = lib.fresh()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(d.storages["main"] / name))
    if world_size:
        d.api.run("reshard", source=ref(name), target={**ref(name + "-d"), "world_size": world_size})
    return ref(name + "-d" if world_size else name)


def diff(d, a, b, **more):
    return d.api.run("diff", a=a, b=b, **more)["result"]


def wide(t):
    """As long doubles; a complex number as two."""
    if t.dtype.is_complex:
        t = torch.view_as_real(t.to(torch.complex128))
    elif t.dtype.is_floating_point:
        t = t.float() if t.dtype.itemsize == 1 else t
        t = t.to(torch.float64)
    x = t.numpy()
    return x.astype(np.longdouble)


def expected(a, b):
    """The figures of a mover, elementwise on [n] or [n, 2]."""
    raw = [t.contiguous().view(torch.uint8).reshape(t.numel(), -1).numpy() for t in (a, b)]
    x, y = (wide(t).reshape(t.numel(), -1) for t in (a, b))
    other = (raw[0] != raw[1]).any(1)
    with np.errstate(all="ignore"):
        gap = np.sqrt(((x - y) ** 2).sum(1))
        gap[np.isinf(x - y).any(1) & ~np.isnan(x - y).any(1)] = np.inf
        size = np.sqrt((y ** 2).sum(1))
        apart = other & ~(gap <= 0)
        finite = np.isfinite(x).all(1) & np.isfinite(y).all(1)
        rel = np.where(size == 0, np.inf, gap / size)
    xf, yf = x[finite], y[finite]
    norms = [np.sqrt((v ** 2).sum()) for v in (xf, yf, xf - yf)]
    return {"count": int(apart.sum()), "not_finite": int((apart & ~finite).sum()), "elements": a.numel(),
            "bits_changed": int(np.unpackbits(raw[0] ^ raw[1]).sum()),
            "max_abs": float(gap[apart].max(initial=0)), "max_rel": float(rel[apart].max(initial=0)),
            "l2": float(norms[2]), "rel_l2": float(norms[2] / norms[0]) if norms[0] else math.inf if norms[2] else 0.0,
            "cosine": float((xf * yf).sum() / norms[0] / norms[1]) if norms[0] and norms[1] else None,
            "first_index": [int(i) for i in np.unravel_index(int(apart.argmax()), a.shape)] if apart.any() else None}


def check(got, a, b):
    for key, want in expected(a, b).items():
        have = float(got[key]) if isinstance(got[key], str) else got[key]
        if isinstance(want, float):
            near = math.isclose(have, want, rel_tol=1e-11, abs_tol=1e-13 if key == "cosine" else 0)
            assert near or (math.isnan(want) and math.isnan(have)), (got["path"], key, have, want)
        else:
            assert have == want, (got["path"], key, have, want)


def moved(t, seed):
    """The same tensor with every third element another one."""
    other, out = numbers(t.dtype, t.shape, seed), t.clone()
    out.view(-1).view(torch.uint8).view(t.numel(), -1)[::3] = other.view(-1).view(torch.uint8).view(t.numel(), -1)[::3]
    return out


@pytest.mark.parametrize("shape", [(5, 7), (300, 231)])
def test_every_dtype(d, shape):
    a = {f"t.{t}": numbers(t, shape, i) for i, t in enumerate(FLOATS + INTS + COMPLEX)}
    b = {k: moved(t, 1000 + i) for i, (k, t) in enumerate(a.items())}
    r = diff(d, put(d, a), put(d, b, 3), top=100)
    got = {m["path"]: m for m in r["movers"]}
    assert got.keys() == a.keys() and not r["equal"] and r["difference_count"] == len(a)
    for k, t in a.items():
        assert got[k]["dtype"] == str(t.dtype)[6:] and got[k]["shape"] == list(shape)
        check(got[k], t, b[k])
    assert r["totals"]["tensors"]["changed"] == len(a) and r["totals"]["count"] == sum(m["count"] for m in r["movers"])
    assert r["totals"]["bits_changed"] == sum(m["bits_changed"] for m in r["movers"])
    entries = {x["path"]: x for x in r["differences"]}
    assert all(entries[k]["what"] == "values" and entries[k]["rel_l2"] == got[k]["rel_l2"] for k in a)


def test_any_format_against_any(d):
    torch.manual_seed(1)
    a = {"w": torch.randn(700, 300), "b": torch.randn(33), "n": torch.arange(7), "same": torch.randn(64, 64)}
    b = {**a, "w": a["w"] + torch.randn(700, 300) * 1e-3, "b": -a["b"]}
    name = lib.fresh()
    save_file(b, d.storages["main"] / f"{name}.safetensors")
    torch.save(b, d.storages["main"] / f"{name}.pt")
    layout = [{"match": "w", "mesh": [2], "placements": ["Shard(1)"]}]
    d.api.run("reshard", source=ref(f"{name}.pt"), target={**ref(name), "world_size": 2, "layout": layout})
    mine = [put(d, a), put(d, a, 4)]
    results = [diff(d, x, ref(y)) for x in mine for y in (name, f"{name}.pt", f"{name}.safetensors")]
    for r in results:
        assert [m["path"] for m in r["movers"]] == ["b", "w"]       # -b is twice as far as b is long
        assert math.isclose(r["movers"][0]["rel_l2"], 2) and math.isclose(r["movers"][0]["cosine"], -1)
        check(r["movers"][1], a["w"], b["w"])
        assert r["unchanged"]["tensors"] == 2 and r["unchanged"]["bytes"] == 7 * 8 + 64 * 64 * 4
        assert r["unchanged"]["by_reading"] == {"tensors": 2, "bytes": r["unchanged"]["bytes"]}
        assert math.isclose(r["unchanged"]["share"], r["unchanged"]["bytes"] / sum(t.nbytes for t in a.values()))
    totals = [r["totals"] for r in results]
    assert all({**t, "l2": 0} == {**totals[0], "l2": 0} and math.isclose(t["l2"], totals[0]["l2"], rel_tol=1e-12) for t in totals)


def test_what_became_of_keys(d):
    a = {"gone": torch.zeros(2), "cut": torch.zeros(4, 2), "cast": torch.randn(1000), "w": torch.ones(3), "kind": torch.ones(2), "step": 1}
    b = {"new": torch.zeros(2), "cut": torch.zeros(2, 4), "cast": a["cast"].bfloat16(), "w": torch.ones(3), "kind": 3, "step": 2}
    r = diff(d, put(d, a), put(d, b))
    got = {x["path"]: x for x in r["differences"]}
    assert {k: x["what"] for k, x in got.items()} == {"gone": "missing", "new": "missing", "cut": "shape", "cast": "dtype", "kind": "kind",
                                                      "step": "value"}
    assert (got["gone"]["a"], got["gone"]["b"], got["new"]["b"]) == ("float32", None, "float32")
    assert r["totals"]["tensors"] == {"added": 1, "removed": 1, "reshaped": 1, "retyped": 1, "kind": 1, "changed": 0, "unchanged": 1}
    assert r["totals"]["values"] == {"added": 0, "removed": 0, "kind": 0, "changed": 1, "unchanged": 0}
    gap = a["cast"].double() - b["cast"].double()
    assert math.isclose(got["cast"]["rel_l2"], float(gap.norm() / a["cast"].double().norm())) and "bits_changed" not in got["cast"]
    assert [m["path"] for m in r["movers"]] == ["cast"] and r["movers"][0]["dtype"] == "bfloat16"
    other = diff(d, put(d, {"n": torch.arange(5)}), put(d, {"n": torch.arange(5).to(torch.complex64)}))
    assert other["differences"][0]["count"] == 0 and other["movers"] == [] and not other["equal"]


def test_nan(d):
    """The same bits are equal, NaN too. What became NaN moves first, and is in no norm."""
    nan = torch.tensor([1.0, math.nan, math.inf, -0.0])
    assert diff(d, put(d, {"w": nan}), put(d, {"w": nan.clone()}))["equal"]
    signs = diff(d, put(d, {"w": torch.tensor([0.0])}), put(d, {"w": torch.tensor([-0.0])}))
    assert signs["equal"] and signs["totals"]["bits_changed"] == 1
    a = {"w": torch.tensor([1.0, 2.0, 3.0]), "v": torch.tensor([1.0, 1.0])}
    b = {"w": torch.tensor([1.0, math.nan, 3.5]), "v": torch.tensor([100.0, 1.0])}
    r = diff(d, put(d, a), put(d, b), rtol=0.1)
    assert [m["path"] for m in r["movers"]] == ["w", "v"]
    w = r["movers"][0]
    assert (w["count"], w["not_finite"], w["max_abs"], w["first_index"]) == (2, 1, "nan", [1])
    assert math.isclose(w["rel_l2"], 0.5 / math.sqrt(10)) and r["totals"]["max_abs"] == "nan"


def test_digests_spare_reading(d):
    """Of two steps only what changed is read; digests that were cut otherwise prove nothing; a damaged byte is found where it is read."""
    torch.manual_seed(2)
    a = {"frozen": torch.randn(1 << 20), "w": torch.randn(1 << 18), "b": torch.randn(10), "lr": 0.1}
    b = {**a, "w": a["w"] * 1.5}
    x, y, cut = put(d, a, 2), put(d, b, 2), put(d, b, 3)
    r = diff(d, x, y)
    assert r["unchanged"]["by_digest"] == {"tensors": 2, "bytes": (4 << 20) + 40} and r["unchanged"]["by_reading"]["bytes"] == 0
    assert r["compared_bytes"] == 1 << 20 and r["read_bytes"] < 5 << 20
    assert [m["path"] for m in r["movers"]] == ["w"] and math.isclose(r["movers"][0]["rel_l2"], 0.5, rel_tol=1e-6)
    for other in (diff(d, x, y, read_all=True), diff(d, x, cut)):
        assert other["unchanged"]["by_reading"]["bytes"] == (4 << 20) + 40 and other["movers"] == r["movers"]
        assert other["unchanged"]["share"] == r["unchanged"]["share"] and other["totals"] == {**r["totals"], "l2": other["totals"]["l2"]}
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "diff", "a": x, "b": y}).ok(200)
    assert plan["totals"]["tensors"]["unchanged"] == 2 and "unchanged" not in plan and "movers" not in plan
    same = diff(d, x, x)
    assert same["equal"] and same["unchanged"]["share"] == 1.0 and same["compared_bytes"] == 0 and same["movers"] == []
    some = a["frozen"][1 << 18:(1 << 18) + 4].numpy().tobytes()
    victim = next(f for f in (d.storages["main"] / x["name"]).glob("*.distcp") if some in f.read_bytes())
    data = bytearray(victim.read_bytes())
    data[data.index(some)] ^= 1
    victim.write_bytes(data)
    assert diff(d, x, y)["unchanged"]["by_digest"]["tensors"] == 2
    assert d.api.fails("diff", "digest_mismatch", a=x, b=y, read_all=True)["fqn"] == "frozen"


def test_digests_of_safetensors_files(d):
    """dcpd has digests of the tensors in a file of safetensors, too."""
    a = {"frozen": torch.randn(1 << 16), "w": torch.randn(100)}
    both = []
    for state in (a, {**a, "w": a["w"] + 1}):
        name = lib.fresh()
        d.api.run("reshard", source=put(d, state), target={**ref(name), "format": "safetensors"})
        both.append(ref(name))
    r = diff(d, *both)
    assert r["unchanged"]["by_digest"] == {"tensors": 1, "bytes": 1 << 18} and [m["path"] for m in r["movers"]] == ["w"]


@pytest.mark.long
def test_top_and_many(d):
    """The movers are the largest of all, however many there are and however few are listed."""
    torch.manual_seed(3)
    a = {f"t{i:04}": torch.randn(50) for i in range(1100)}
    b = {k: t * (1 + i % 997 / 1e4) for i, (k, t) in enumerate(a.items())}
    r = diff(d, put(d, a), put(d, b), top=5, include=["t*"])
    want = sorted(a, key=lambda k: -float((a[k].double() - b[k].double()).norm() / a[k].double().norm()))[:5]
    assert [m["path"] for m in r["movers"]] == want and r["difference_count"] == r["totals"]["tensors"]["changed"] == 1098
    assert diff(d, put(d, a), put(d, b), top=0)["movers"] == []
    d.api.post("/v1/jobs", {"kind": "diff", "a": ref("x"), "b": ref("y"), "top": -1}).problem("validation_failed")


def test_dcpctl(d):
    a = {"w": torch.ones(4), "gone": torch.ones(1), "same": torch.ones(5)}
    x, y = put(d, a, 1), put(d, {"w": torch.tensor([1.0, 1.0, 1.0, 2.0]), "same": a["same"]}, 1)
    r = d.ctl("diff", f"main:{x['name']}", f"main:{y['name']}")
    assert r.returncode == 1 and "gone" in r.stdout and "missing" in r.stdout and "20 B by digest" in r.stdout, r.stdout
    row = next(line for line in r.stdout.splitlines() if line.startswith("w "))
    assert row.split()[:4] == ["w", "float32", "[4]", "0.5"], r.stdout
    r = d.ctl("diff", f"main:{x['name']}", f"main:{y['name']}", "--read-all", "--top", "0", "--json")
    doc = json.loads(r.stdout)["result"]
    assert r.returncode == 1 and doc["movers"] == [] and doc["unchanged"]["by_reading"]["tensors"] == 1
    assert d.ctl("diff", f"main:{x['name']}", f"main:{x['name']}").stdout.splitlines()[0] == "equal"
