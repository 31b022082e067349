"""Statistics of tensors: what PyTorch counts of the same numbers, for every dtype, however the tensor is cut and whoever wrote it."""
import math

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import dcpd as lib

HERE = {"storage": "main"}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
          torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]


def stats(d, name, seconds=60, **more):
    done = d.api.run("stats", source={**HERE, "name": name}, seconds=seconds, **more)
    assert all(t is not None for t in done["result"]["statistics"])
    return {t["fqn"]: t for t in done["result"]["statistics"]}, done["result"]


def near(got, want, rel=1e-12):
    if isinstance(got, str):
        got = float(got)
    return got == want or math.isclose(got, want, rel_tol=rel)


def bins_of(x):
    """[[exponent, negative, positive], …] of finite doubles, as tensor/stats.h has it."""
    x = x[x != 0]
    k = (torch.frexp(x.abs()).exponent - 1).clamp(-80, 47).long() + 80
    negative, positive = (torch.bincount(k[side], minlength=128).tolist() for side in (x < 0, x > 0))
    return [[e - 80, n, p] for e, (n, p) in enumerate(zip(negative, positive)) if n or p]


def check(got, t):
    """What is told of a tensor is what PyTorch says of it."""
    t = t.detach()
    assert got["dtype"] == str(t.dtype).replace("torch.", "") and got["shape"] == list(t.shape) and got["count"] == t.numel()
    if t.dtype.is_complex:
        return check_complex(got, t.to(torch.complex128).flatten())
    x = (t.float() if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t).to(torch.float64).flatten()
    finite = x[torch.isfinite(x)]
    assert (got["nan"], got["inf"]) == (int(x.isnan().sum()), int(x.isinf().sum()))
    assert got["zeros"] == int((x == 0).sum())
    assert got["histogram"] == bins_of(finite)
    if not finite.numel():
        assert not {"min", "max", "mean", "norm"} & got.keys()
        return
    if t.dtype in (torch.int64, torch.uint64):
        whole = t.flatten().tolist()
        exact = lambda v: v if v < 1 << 63 else float(v)  # noqa: E731
        assert (got["min"], got["max"]) == (exact(min(whole)), exact(max(whole)))
    else:
        assert (got["min"], got["max"]) == (finite.min(), finite.max())
        assert isinstance(got["min"], float if t.dtype.is_floating_point else int)
    wide = finite.numpy().astype(np.longdouble)
    assert abs(got["mean"] - wide.mean()) <= 1e-13 * abs(wide).max()
    assert near(got["norm"], float(np.sqrt((wide ** 2).sum())))


def check_complex(got, x):
    nan = x.real.isnan() | x.imag.isnan()
    inf = (x.real.isinf() | x.imag.isinf()) & ~nan
    finite = x[~nan & ~inf]
    assert (got["nan"], got["inf"], got["zeros"]) == (int(nan.sum()), int(inf.sum()), int((finite == 0).sum()))
    assert "min" not in got and "max" not in got
    assert sum(n + p for _, n, p in got["histogram"]) == int((finite != 0).sum()) and not any(n for _, n, _ in got["histogram"])
    if finite.numel():
        mean = finite.mean()
        scale = float(finite.abs().max())
        assert abs(complex(*got["mean"]) - complex(mean)) <= 1e-12 * scale and near(got["norm"], float(finite.norm()), 1e-12)


def numbers(dtype, shape, seed):
    """Numbers of the dtype: ordinary ones, zeros of both signs, the smallest and the largest, and what is no number."""
    g = torch.Generator().manual_seed(seed)
    n = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        raw = torch.randint(-1 << 63, (1 << 63) - 1, (n,), generator=g, dtype=torch.int64).view(torch.uint8)
        return raw[:n * dtype.itemsize].clone().view(dtype).reshape(shape)
    if dtype.is_complex:
        part = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}[dtype]
        return torch.stack([numbers(part, (n,), seed), numbers(part, (n,), seed + 1)], -1).contiguous().view(dtype).reshape(shape)
    t = (torch.randn(n, generator=g, dtype=torch.float64) * 0.05).float().to(dtype)
    if n > 16:
        odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 1.0], dtype=torch.float64).float().to(dtype)
        t.view(torch.uint8).view(-1, dtype.itemsize)[torch.randint(0, n, (9,), generator=g)] = odd.view(torch.uint8).view(
            -1, dtype.itemsize)
    return t.reshape(shape)


def test_every_dtype(d):
    """Few elements and many, since they are counted in different ways; in a file of PyTorch's, one of safetensors' and one of dcpd's."""
    for shape in ((5, 7), (300, 230)):
        sd = {f"t.{str(t)}": numbers(t, shape, i) for i, t in enumerate(FLOATS + INTS + COMPLEX)}
        name = lib.fresh()
        dcp.save(sd, storage_writer=dcp.FileSystemWriter(d.storages["main"] / name))
        got, result = stats(d, name)
        assert got.keys() == sd.keys() and result["verified_bytes"] >= sum(t.nbytes for t in sd.values())
        for k, t in sd.items():
            check(got[k], t)
        d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + "-2", "world_size": 3})
        again, result = stats(d, name + "-2")
        for k, t in sd.items():
            check(again[k], t)
        assert result["unverified_bytes"] == 0
        save_file({k: t for k, t in sd.items() if t.dtype not in COMPLEX and "fnuz" not in k}, d.storages["main"] / (name + ".safetensors"))
        bare, result = stats(d, name + ".safetensors")
        for k, t in bare.items():
            check(t, sd[k])
        assert result["verified_bytes"] == 0 and result["unverified_bytes"] >= sum(sd[k].nbytes for k in bare)


def test_views_and_lazy_bits(d):
    """Elements that lie in no row (or transposed), and those whose sign is still to be turned."""
    base = torch.randn(200, 400)
    z = torch.randn(30, 20, dtype=torch.complex64)
    sd = {"transposed": base.t(), "every.third": base[::3, 1::2], "conj": z.conj(), "negative": z.clone().conj().imag, "expanded":
          base[0].expand(5, 400), "row": base[3], "scalar": torch.tensor(-2.5), "empty": torch.empty(0, 4)}
    name = lib.fresh()
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(d.storages["main"] / name))
    torch.save(sd, d.storages["main"] / f"{name}.pt")
    torch.save(sd, d.storages["main"] / f"{name}.old.pt", _use_new_zipfile_serialization=False)
    for file in (name, f"{name}.pt", f"{name}.old.pt"):
        got, _ = stats(d, file)
        for k, t in sd.items():
            check(got[k], t.resolve_conj().resolve_neg().contiguous())


def test_extremes(d):
    """Squares beyond the range of a double, and below it."""
    sd = {"huge": torch.tensor([1e300, -1e300, 5e299], dtype=torch.float64), "tiny": torch.full((1000,), 1e-200, dtype=torch.float64),
          "largest": torch.full((100_000,), 1.7e308, dtype=torch.float64), "nothing": torch.full((9,), math.nan),
          "int64": torch.tensor([(1 << 63) - 1, -(1 << 63), (1 << 53) + 1]), "zeros": torch.full((70_000,), -0.0, dtype=torch.bfloat16)}
    name = lib.fresh()
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(d.storages["main"] / name))
    got, _ = stats(d, name)
    assert got["huge"]["norm"] == pytest.approx(1.5e300, rel=1e-12)
    assert got["tiny"]["norm"] == pytest.approx(1e-200 * 1000 ** 0.5, rel=1e-12)
    assert got["largest"]["mean"] == pytest.approx(1.7e308, rel=1e-14) and got["largest"]["norm"] == "inf"
    assert got["nothing"]["nan"] == 9 and "mean" not in got["nothing"] and got["nothing"]["histogram"] == []
    assert (got["int64"]["min"], got["int64"]["max"]) == (-(1 << 63), (1 << 63) - 1)
    assert got["zeros"]["zeros"] == 70_000 and (got["zeros"]["min"], got["zeros"]["max"], got["zeros"]["norm"]) == (0, 0, 0)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_layouts(d, data):
    """Any shape, dtype and cut: the same figures, and the same bits of the sums a second time, whoever read which part."""
    dtype = data.draw(st.sampled_from(FLOATS[:4] + INTS[:3] + COMPLEX[:2]))
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    world, dim = data.draw(st.integers(1, 4)), data.draw(st.integers(0, len(shape) - 1))
    t = numbers(dtype, shape, data.draw(st.integers(0, 1000)))
    name = lib.fresh()
    dcp.save({"t": t, "u": t}, storage_writer=dcp.FileSystemWriter(d.storages["main"] / name))
    d.api.run("reshard", source={**HERE, "name": name}, target={
        **HERE, "name": name + "-cut", "world_size": world, "layout": [{"match": "t", "placements": [f"Shard({dim})"]},
                                                                               {"match": "u", "placements": ["Replicate()"]}]})
    whole, _ = stats(d, name)
    for options in ({}, {"options": {"verify": "none"}}):
        cut, result = stats(d, name + "-cut", **options)
        check(cut["t"], t)
        check(cut["u"], t)
        assert cut["u"]["norm"] == whole["u"]["norm"] if "norm" in whole["u"] else "norm" not in cut["u"]
        assert (result["verified_bytes"] + result["cached"] > 0) == (not options) and (result["unverified_bytes"] > 0) == bool(options)


def test_same_bits_again(spawn):
    """Sums do not depend on how many workers there were, nor on which of them was faster."""
    seen = []
    t = {"t": torch.randn(3, 1 << 20)}
    for workers in ("1", "4"):
        d = spawn(args=("--workers", workers))
        dcp.save(t, storage_writer=dcp.FileSystemWriter(d.storages["main"] / "a"))
        for _ in range(3):
            seen.append(stats(d, "a")[0])
    assert all(s == seen[0] for s in seen)
    for k, v in t.items():
        check(seen[0][k], v)


def test_from_shared_memory(d):
    """Of a state dict: its newest sealed generation, replicas counted once."""
    sd = lib.fresh()
    a = torch.arange(1000.0)
    d.put(sd, [lib.image({"a": ("F32", [1000], a.numpy().tobytes())}) for _ in range(2)])
    done = d.api.run("stats", source={"state_dict": sd})
    check(done["result"]["statistics"][0], a)
    assert len(done["result"]["statistics"]) == 1
