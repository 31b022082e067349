"""npz as a target: numpy.load reads what dcpd wrote, bit for bit, and zipfile finds the CRC-32s right."""
import json
import zipfile

import numpy
import pytest
import torch
from safetensors.numpy import save_file

import dcpd as lib
from test_one_file import HERE, source_of

BY_NUMPY = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
VOID = {torch.bfloat16: 2, torch.float8_e4m3fn: 1, torch.float8_e5m2: 1}


def tensors():
    torch.manual_seed(3)
    made = {str(t): torch.randn(5, 7).mul(50).to(t) for t in [*BY_NUMPY, *VOID]}
    return made | {"large": torch.randn(1501, 1001), "layers.0/é.w": torch.randn(3), "empty": torch.empty(0, 3),
                   "scalar": torch.tensor(3.5, dtype=torch.float64), "one": torch.ones(1), "deep": torch.randn(1, 2, 1, 3, 1)}


def raw(t):
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def check(path, want):
    got = numpy.load(path)
    assert sorted(got.keys()) == sorted(want)
    for k, v in want.items():
        a = got[k]
        assert a.shape == tuple(v.shape) and a.tobytes() == raw(v), k
        assert a.dtype == (f"V{VOID[v.dtype]}" if v.dtype in VOID else v.numpy().dtype), k
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
        data = path.read_bytes()
        for i in z.infolist():
            assert i.compress_type == zipfile.ZIP_STORED and i.filename.endswith(".npy")
            begin = data.index(b"\x93NUMPY", i.header_offset)
            assert begin % 64 == 0 and (begin + 10 + int.from_bytes(data[begin + 8:begin + 10], "little")) % 64 == 0
            v = want[i.filename[:-4]]
            assert i.comment.decode() == (str(v.dtype).removeprefix("torch.") if v.dtype in VOID else "")


def test_numpy_reads_it(d):
    want = tensors()
    source, name = source_of(d, want), lib.fresh() + "/all.npz"
    result = d.api.run("reshard", source=source, target={**HERE, "name": name, "format": "npz"})["result"]
    path = d.storages["main"] / name
    assert result["files"] == 1 and result["bytes"] == path.stat().st_size
    check(path, want)
    b = numpy.load(path)["torch.bfloat16"].view(numpy.uint16).astype(numpy.uint32) << 16
    assert numpy.array_equal(b.view(numpy.float32), want["torch.bfloat16"].float().numpy())


def test_from_dcp_over_ranks_with_values(d):
    """From chunks that ranks hold, cast on the way; values have no place."""
    want, name = {"w": torch.randn(300, 1001), "b": torch.randn(17)}, lib.fresh()
    d.api.run("reshard", source=source_of(d, want), target={**HERE, "name": name, "world_size": 3, "layout": [
        {"match": "w", "mesh": [3], "placements": ["Shard(1)"]}]})
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + ".npz", "format": "npz"},
              dtype=[["b", "float16"]])
    check(d.storages["main"] / (name + ".npz"), {"w": want["w"], "b": want["b"].half()})


@pytest.mark.parametrize("count", [0, 1, pytest.param(70000, marks=pytest.mark.long)])
def test_counts(d, count):
    """None, and more members than 16 bits count (zip64)."""
    name = lib.fresh()
    if count:
        save_file({f"t{i:05}": numpy.full(1, i, dtype=numpy.int32) for i in range(count)}, d.storages["main"] / (name + ".safetensors"))
    else:
        (d.storages["main"] / (name + ".safetensors")).write_bytes((2).to_bytes(8, "little") + b"{}")
    d.api.run("reshard", source={**HERE, "name": name + ".safetensors"}, target={**HERE, "name": name + ".npz", "format": "npz"})
    got = numpy.load(d.storages["main"] / (name + ".npz"))
    assert len(got.files) == count and (count == 0 or got["t00000"] == 0 and got[f"t{count - 1:05}"] == count - 1)


@pytest.mark.parametrize("names", [("a", "a.npy"), ("nul\0", "b"), ("x" * 65532, "b")])
def test_names_without_a_place(d, names):
    source = source_of(d, {n: torch.ones(2) for n in names})
    name = lib.fresh() + ".npz"
    error = d.api.fails("reshard", "name_invalid", source=source, target={**HERE, "name": name, "format": "npz"})
    assert error["fqn"] and not (d.storages["main"] / name).exists()


def test_the_name_says_the_format(d):
    source = source_of(d, {"x": torch.ones(2)})
    p = d.api.post("/v1/jobs", {"kind": "reshard", "source": source, "target": {**HERE, "name": "x.bin", "format": "npz"}})
    assert ".npz" in p.problem("name_invalid", status=422)["detail"]


@pytest.mark.slow
def test_zip64_members(d):
    """A member of more than 4 GiB, and one behind it."""
    path = d.storages["main"] / (lib.fresh() + ".safetensors")
    n = (5 << 30) // 4
    head = json.dumps({"big": {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]},
                       "behind": {"dtype": "F32", "shape": [3], "data_offsets": [4 * n, 4 * n + 12]}}).encode()
    with open(path, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        f.seek(8 + len(head) + 4 * n - 4)
        f.write(numpy.float32([7, 1, 2, 3]).tobytes())
    name = lib.fresh() + ".npz"
    d.api.run("reshard", seconds=600, source={**HERE, "name": path.name}, target={**HERE, "name": name, "format": "npz"})
    with zipfile.ZipFile(d.storages["main"] / name) as z:
        assert z.getinfo("big.npy").file_size > 5 << 30 and z.testzip() is None
    got = numpy.load(d.storages["main"] / name)
    assert got["behind"].tolist() == [1, 2, 3] and got["big"][-1] == 7 and not got["big"][:-1].any()
