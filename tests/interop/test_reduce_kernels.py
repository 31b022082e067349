"""Reductions of every dtype against PyTorch's own arithmetic: members in rank order, small floats in float32, NaN wins."""
import os
import pathlib
import subprocess

import pytest
import torch

TOOL = pathlib.Path(os.environ.get("TESTBIN", "build/test/release")) / "tools/reduce_tool"
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FLOATS = [torch.float64, torch.float32]
SMALL = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex64, torch.complex128]
MEMBERS, COUNT = 3, 1301  # more than a block of the kernel, and not a multiple


def kernel(parts, op):
    name = str(parts[0].dtype).split(".")[1]
    data = b"".join(p.contiguous().view(torch.uint8).numpy().tobytes() for p in parts)
    run = subprocess.run([TOOL, name, op, str(len(parts)), str(parts[0].numel())], input=data, capture_output=True)
    if run.returncode == 3:
        return None
    assert run.returncode == 0, run.stderr
    return torch.frombuffer(bytearray(run.stdout), dtype=torch.uint8).view(parts[0].dtype)


def judge(parts, op):
    fold = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}[op]
    acc = parts[0].clone()
    for p in parts[1:]:
        acc = fold(acc, p)
    if op == "avg" and acc.is_complex():  # its division by a complex number rounds once more
        return torch.complex(acc.real / len(parts), acc.imag / len(parts))
    if op == "avg":
        acc = acc / len(parts) if acc.is_floating_point() else torch.div(acc, len(parts), rounding_mode="trunc")
    return acc


def values(dtype, seed):
    g = torch.Generator().manual_seed(seed)
    if dtype in INTS:
        info = torch.iinfo(dtype)
        low, high = (info.min, info.max) if dtype.itemsize < 8 else (-2**62, 2**62)
        return torch.randint(low, high, (COUNT,), generator=g).to(dtype)
    if dtype.is_complex:
        return torch.complex(torch.randn(COUNT, generator=g), torch.randn(COUNT, generator=g)).to(dtype)
    x = torch.randn(COUNT, generator=g, dtype=torch.float64) * 3
    x[seed * 7:seed * 7 + 5] = float("nan")
    if dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x[100 + seed] = float("inf")
        x[200 + seed] = float("-inf")
    return x.to(torch.float32).to(dtype) if dtype.itemsize == 1 else x.to(dtype)


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
@pytest.mark.parametrize("dtype", INTS + FLOATS + SMALL + COMPLEX, ids=str)
def test_like_pytorch(dtype, op):
    parts = [values(dtype, m) for m in range(MEMBERS)]
    got = kernel(parts, op)
    if dtype.is_complex and op not in ("sum", "avg"):
        assert got is None
        return
    wide = [p.float() if dtype in SMALL else p for p in parts]
    want = judge(wide, op)
    want = want.to(dtype)
    if dtype.is_floating_point:
        assert torch.equal(got.float().isnan(), want.float().isnan())
        got, want = got.double().nan_to_num(7), want.double().nan_to_num(7)
    assert torch.equal(got, want)


@pytest.mark.parametrize("op,fold", [("sum", torch.logical_or), ("max", torch.logical_or), ("product", torch.logical_and),
                                     ("min", torch.logical_and)])
def test_bool_is_any_or_all(op, fold):
    a, b = torch.tensor([0, 0, 1, 1], dtype=torch.bool), torch.tensor([0, 1, 0, 1], dtype=torch.bool)
    assert torch.equal(kernel([a, b], op), fold(a, b))
    assert kernel([a, b], "avg") is None
