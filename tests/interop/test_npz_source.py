"""npz as a source: what numpy.savez wrote is read bit for bit, in either order of dims; what is no array of numbers is refused by name."""
import io
import random
import struct
import zipfile

import numpy
import pytest
import torch
from safetensors.torch import load_file

import dcpd as lib
from test_npz import BY_NUMPY, HERE, raw, tensors
from test_one_file import source_of

NUMBERS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c16", "c8"]


def arrays():
    rng = numpy.random.default_rng(5)
    made = {f"t.{n}": (rng.standard_normal((5, 7)) * 50).astype(n) for n in NUMBERS}
    return made | {"fortran": numpy.asfortranarray(rng.standard_normal((11, 300, 5), dtype=numpy.float32)),
                   "large": numpy.asfortranarray(rng.standard_normal((1501, 1001))), "scalar": numpy.float64(3.5),
                   "empty": numpy.empty((0, 3), dtype=numpy.float32, order="F"), "a/é.w": numpy.arange(3),
                   "row": numpy.ones((1, 1, 4), order="F")}


def write(d, made, save=numpy.savez):
    path = d.storages["main"] / (lib.fresh() + ".npz")
    with open(path, "wb") as f:
        save(f, **made)
    return path


def test_every_dtype_and_order(d):
    """Load, reshard over ranks and back, slices, verify and diff."""
    want = arrays()
    source = {**HERE, "name": write(d, want).name}
    shown = d.api.get(d.api.storage_path("main", source["name"])).ok()
    assert shown["format"] == "npz" and shown["tensors"] == len(want)
    checked = d.api.run("verify", source=source)["result"]
    assert checked["unverified_bytes"] == 0 and checked["verified_bytes"] >= sum(a.nbytes for a in want.values())
    name = lib.fresh()
    moved = d.api.run("reshard", source=source, target={**HERE, "name": name, "world_size": 3})["result"]
    assert moved["unverified_bytes"] == 0
    assert d.api.run("diff", a=source, b={**HERE, "name": name})["result"]["equal"]
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + ".npz", "format": "npz"})
    got = numpy.load(d.storages["main"] / (name + ".npz"))
    assert sorted(got.files) == sorted(want)
    for k, a in want.items():
        assert got[k].dtype == a.dtype and got[k].shape == a.shape and numpy.array_equal(got[k], a), k
    r = d.api.get(d.api.storage_path("main", source["name"], "/tensors/fortran?slice=3:9,10:200,1:4&format=raw"))
    assert r.body == numpy.ascontiguousarray(want["fortran"][3:9, 10:200, 1:4]).tobytes()


def test_what_dcpd_wrote_comes_back(d):
    """bfloat16 and float8, whose name is the member's comment, too."""
    want = tensors()
    source, name = source_of(d, want), lib.fresh()
    d.api.run("reshard", source=source, target={**HERE, "name": name + ".npz", "format": "npz"})
    d.api.run("reshard", source={**HERE, "name": name + ".npz"}, target={**HERE, "name": name + ".safetensors", "format": "safetensors"})
    got = load_file(d.storages["main"] / (name + ".safetensors"))
    assert {k: (v.dtype, v.shape, raw(v)) for k, v in got.items()} == {k: (v.dtype, v.shape, raw(v)) for k, v in want.items()}
    assert len(BY_NUMPY) < len(got)


@pytest.mark.long
def test_recognised_by_content_and_empty(d):
    path = write(d, {"w": numpy.ones(3)})
    other = path.rename(path.with_suffix(".weights"))
    assert d.api.get(d.api.storage_path("main", other.name)).ok()["format"] == "npz"
    empty = write(d, {})
    assert d.api.get(d.api.storage_path("main", empty.name)).ok()["tensors"] == 0
    d.api.run("reshard", source={**HERE, "name": other.name}, target={**HERE, "name": empty.name, "format": "npz"},
              options={"overwrite": True})
    assert numpy.load(empty)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("made, code, says", [
    ({"o": numpy.array([1, "x"], dtype=object)}, "dtype_unsupported", "|O: Python objects"),
    ({"o": numpy.array(["ab", "c"])}, "dtype_unsupported", "<U2: texts"), ({"o": numpy.array([b"ab"])}, "dtype_unsupported", "|S2: texts"),
    ({"o": numpy.array(["2026-11-22"], dtype="M8[D]")}, "dtype_unsupported", "dates"),
    ({"o": numpy.arange(3, dtype=">f4")}, "dtype_unsupported", ">f4: big-endian"),
    ({"o": numpy.zeros(3, dtype="V2")}, "dtype_unsupported", "|V2"), ({"o": numpy.zeros(2, dtype="g")}, "dtype_unsupported", "f16"),
    ({"o": numpy.zeros(2, dtype=[("a", "f4"), ("b", "i4")])}, "format_unsupported", "records"),
])
def test_refused_by_name(d, made, code, says):
    path = write(d, {"fine": numpy.ones(2)} | made)
    error = d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem(code)
    assert error["fqn"] == "o" and error["file"] == path.name and says in error["detail"]


def test_compressed_and_other_members(d):
    path = write(d, {"w": numpy.ones(1000)}, numpy.savez_compressed)
    error = d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("format_unsupported")
    assert error["fqn"] == "w" and "savez_compressed" in error["detail"]
    path = write(d, {"w": numpy.ones(3)})
    with zipfile.ZipFile(path, "a") as z:
        z.writestr("README.txt", "x")
    assert d.api.get(d.api.storage_path("main", path.name, "/tensors")).problem("format_unsupported")["fqn"] == "README.txt"


def npy(head=None, version=1, data=bytes(16), length=None):
    text = (head or "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }").encode() + b"\n"
    n = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", n) + text + data


@pytest.mark.parametrize("member, code", [
    (b"", "format_npz"), (b"\x93NUMPX" + npy()[6:], "format_npz"), (npy(version=0), "format_npz"), (npy(version=4), "format_npz"),
    (npy(length=60000), "format_npz"), (npy(version=2, length=1 << 31), "limit_exceeded"), (npy(data=bytes(15)), "format_npz"),
    (npy(data=bytes(17)), "format_npz"), (npy("{'descr': '<f4', 'fortran_order': False}"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'shape': (4,)}"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': [4]}"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,)}"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4294967296)}"), None),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 65 + ")}"), "limit_exceeded"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)} + exit()"), "format_npz"), (npy("__import__('os')"), "format_npz"),
    (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4L,)}"), "ok"), (npy(version=2), "ok"), (npy(version=3), "ok"),
    (npy('{"shape":(2,2),"fortran_order":True,"descr":"=f4"}'), "ok"), (npy("{'descr': '', 'fortran_order': False, 'shape': ()}"), None),
], ids=lambda x: "head" if isinstance(x, bytes) else str(x))
def test_heads(d, member, code):
    path = d.storages["main"] / (lib.fresh() + ".npz")
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("w.npy", member)
    r = d.api.get(d.api.storage_path("main", path.name, "/tensors"))
    if code == "ok":
        assert numpy.load(io.BytesIO(member)).size == 4 and r.ok()["tensors"][0]["dtype"] == "float32"
        return
    problem = r.problem(code) if code else r.json
    assert r.status == 422 and problem["fqn"] == "w" and problem["file"] == path.name


def test_damage_is_found(d):
    """One bit of any member's head or payload: an error, by verify and by a reshard, never other numbers."""
    path = write(d, {"a": numpy.arange(1000.0), "b": numpy.asfortranarray(numpy.arange(600.0).reshape(20, 30))})
    whole, rnd = path.read_bytes(), random.Random(2)
    with zipfile.ZipFile(path) as z:
        spans = [(i.header_offset + 30 + len(i.filename) + 20, i.file_size) for i in z.infolist()]
    for n in range(30):
        begin, size = spans[n % 2]
        spoilt = bytearray(whole)
        spoilt[begin + (rnd.randrange(128) if n % 3 == 0 else rnd.randrange(128, size))] ^= 1 << rnd.randrange(8)
        path.write_bytes(spoilt)
        for job in ({"kind": "verify"}, {"kind": "reshard", "target": {**HERE, "name": lib.fresh()}}):
            r = d.api.post("/v1/jobs", {"source": {**HERE, "name": path.name}, **job})
            j = d.api.wait(r.ok(202), 60) if r.status == 202 else {"state": "failed", "error": r.json}
            assert j["state"] == "failed" and j["error"]["status"] < 500, (n, j)
    for _ in range(60):  # no place of the file takes dcpd down
        spoilt = bytearray(whole[:rnd.randrange(4, len(whole))] if rnd.random() < 0.5 else whole)
        spoilt[rnd.randrange(len(spoilt))] ^= 1 << rnd.randrange(8)
        path.write_bytes(spoilt)
        assert d.api.get(d.api.storage_path("main", path.name, "/tensors")).status < 500


def test_torch_agrees(d):
    """Loaded into shared memory, as torch makes of numpy's arrays."""
    want = {k: v for k, v in arrays().items() if k in ("fortran", "t.f4", "scalar")}
    name = lib.fresh() + ".pt"
    d.api.run("reshard", source={**HERE, "name": write(d, want).name}, target={**HERE, "name": name, "format": "torch"})
    got = torch.load(d.storages["main"] / name, weights_only=True)
    assert torch.equal(got["fortran"], torch.from_numpy(numpy.ascontiguousarray(want["fortran"])))
    assert got["t.f4"].numpy().tobytes() == want["t.f4"].tobytes() and got["scalar"].item() == 3.5
