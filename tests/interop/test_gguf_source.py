"""GGUF as a source: what gguf-py and dcpd wrote is read back, bit for bit; a file that lies is refused by name and offset."""
import random
import struct

import gguf
import numpy
import pytest
import torch
from safetensors.numpy import load_file

import dcpd as lib
import package
from test_gguf import convert, put, raw
from test_one_file import HERE
from test_tensor_stats import check


def write(path, align=32):
    w = gguf.GGUFWriter(path, "test")
    w.add_custom_alignment(align)
    w.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(40000)])
    w.add_array("numbers", list(range(1000)))
    rng = numpy.random.default_rng(1)
    made = {"f32": rng.standard_normal((3, 5, 7), dtype=numpy.float32), "f16": rng.standard_normal(9).astype(numpy.float16),
            "i32": numpy.arange(12, dtype=numpy.int32).reshape(3, 4), "f64": rng.standard_normal((2, 2))}
    for name, a in made.items():
        w.add_tensor(name, a)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
        blocks = gguf.quants.quantize(rng.standard_normal((4, 256), dtype=numpy.float32), kind)
        w.add_tensor(kind.name, blocks, raw_dtype=kind)
        made[kind.name] = gguf.quants.dequantize(blocks, kind) if kind.name == "Q8_0" else blocks
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return made


@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
def test_what_gguf_py_wrote(d, name):
    folder = d.storages["main"] / lib.fresh()
    folder.mkdir()
    want = write(folder / name, 64)
    source = {**HERE, "name": f"{folder.name}/{name}"}
    shown = d.api.get(d.api.storage_path("main", source["name"])).ok()
    assert shown["format"] == "gguf" and shown["tensors"] == len(want)
    d.api.run("reshard", source=source, target={**HERE, "name": folder.name + ".safetensors", "format": "safetensors"})
    got = load_file(d.storages["main"] / (folder.name + ".safetensors"))
    assert sorted(got) == sorted(want)
    for k, v in want.items():
        assert got[k].shape == v.shape and got[k].dtype == v.dtype and got[k].tobytes() == v.tobytes(), k
    checked = d.api.run("verify", source=source, level="values")["result"]
    head = 40000 * 9  # of tokens
    assert checked["verified_bytes"] == 0
    assert checked["unverified_bytes"] >= head + sum(v.nbytes for k, v in want.items() if k != "Q8_0")
    assert d.api.run("diff", a=source, b={**HERE, "name": folder.name + ".safetensors"})["result"]["equal"]


def test_q8_0_is_float32(d):
    """Worked out as gguf-py does, on every path: scales that are NaN, infinite, subnormal and negative, -128, boxes across blocks."""
    rng = numpy.random.default_rng(7)
    blocks = rng.integers(0, 256, (3, 500, 34 * 24), dtype=numpy.uint8)
    blocks.reshape(-1, 34)[:, :2] = rng.standard_normal(36000).astype(numpy.float16).view(numpy.uint8).reshape(-1, 2)
    for i, scale in enumerate([numpy.nan, numpy.inf, -numpy.inf, 6e-8, -0.0, 65504]):
        blocks[0, i, :2] = numpy.float16(scale).reshape(1).view(numpy.uint8)
    finite, path = blocks[1:], d.storages["main"] / (lib.fresh() + ".gguf")
    w = gguf.GGUFWriter(path, "test")
    for name, b in (("all", blocks), ("finite", finite), ("row", finite[0, :1])):
        w.add_tensor(name, b, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with numpy.errstate(invalid="ignore"):
        want = {k: gguf.quants.dequantize(b, gguf.GGMLQuantizationType.Q8_0) for k, b in
                (("all", blocks), ("finite", finite), ("row", finite[0, :1]))}
    source, name = {**HERE, "name": path.name}, lib.fresh()
    page = d.api.get(d.api.storage_path("main", path.name, "/tensors")).ok()["tensors"]
    assert {(t["fqn"], t["dtype"], tuple(t["shape"])) for t in page} == {(k, "float32", v.shape) for k, v in want.items()}
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "reshard", "source": source, "target": {**HERE, "name": name}}).ok(200)
    assert plan["needed_bytes"] == blocks.nbytes + finite.nbytes + finite[0, :1].nbytes, "blocks are read, not float32"
    result = d.api.run("reshard", source=source, target={**HERE, "name": name, "world_size": 3, "layout": [
        {"match": "*", "mesh": [3], "placements": ["Shard(1)"]}]})["result"]
    assert result["unverified_bytes"] >= blocks.nbytes
    back = lib.fresh() + ".safetensors"
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": back, "format": "safetensors"})
    got = load_file(d.storages["main"] / back)
    for k, v in want.items():
        same = (got[k].view(numpy.uint32) == v.view(numpy.uint32)) | (numpy.isnan(got[k]) & numpy.isnan(v))
        assert got[k].shape == v.shape and same.all(), k
    assert d.api.run("diff", a=source, b={**HERE, "name": back}, include=["finite", "row"])["result"]["equal"]
    assert d.api.run("diff", a={**HERE, "name": name}, b=source, include=["finite", "row"])["result"]["equal"]
    r = d.api.get(d.api.storage_path("main", path.name, "/tensors/finite?slice=1,3:77,31:65&format=raw"))
    assert r.body == want["finite"][1, 3:77, 31:65].tobytes()
    with package.daemon(f"unix://{d.socket}") as dcpd:
        assert torch.equal(dcpd.load(f"main:{path.name}", keys=["finite"])["finite"], torch.from_numpy(want["finite"]))
        turned = dcpd.load(f"main:{path.name}", keys=["finite"], transform={"match": "finite", "permute": [2, 0, 1]})["finite"]
        assert torch.equal(turned, torch.from_numpy(want["finite"]).permute(2, 0, 1))
    check(d.api.run("stats", source=source, include=["finite"])["result"]["statistics"][0], torch.from_numpy(want["finite"]))
    half = lib.fresh() + ".safetensors"
    d.api.run("reshard", source=source, target={**HERE, "name": half, "format": "safetensors"}, include=["finite"],
              dtype=[["*", "float16"]], transform=[{"match": "finite", "permute": [2, 0, 1]}])
    moved = load_file(d.storages["main"] / half)["finite"]
    assert numpy.array_equal(moved, want["finite"].transpose(2, 0, 1).astype(numpy.float16))
    name = lib.fresh()
    d.api.run("merge", sources=[source, {**HERE, "name": back}], include=["finite"],
              target={**HERE, "name": name + ".npz", "format": "npz"})
    assert numpy.array_equal(numpy.load(d.storages["main"] / (name + ".npz"))["finite"], want["finite"])


def test_other_blocks_are_named(d):
    folder = d.storages["main"] / lib.fresh()
    folder.mkdir()
    write(folder / "m.gguf")
    source = {**HERE, "name": f"{folder.name}/m.gguf"}
    page = d.api.get(d.api.storage_path("main", source["name"], "/tensors")).ok()["tensors"]
    assert {t["fqn"]: t["blocks"] for t in page if "blocks" in t} == {"Q4_0": "Q4_0"}
    shown = [row.split()[:2] for row in d.ctl("show", f"main:{source['name']}", "--tensors", "Q*").stdout.splitlines()]
    unverified = d.api.run("verify", source=source)["result"]["unverified"]
    assert {u["file"] for u in unverified} == {"m.gguf"} and unverified[0]["fqn"] is None, unverified
    assert ["Q4_0", "Q4_0"] in shown and ["Q8_0", "float32"] in shown, shown
    for more in ({"dtype": [["*", "float16"]]}, {"transform": [{"match": "Q4", "dtype": "float16"}]}):
        error = d.api.fails("reshard", "dtype_unsupported", source=source, target={**HERE, "name": lib.fresh()}, **more)
        assert error["fqn"] == "Q4_0" and "Q4_0" in error["detail"]
    for more in ({}, {"rename": [["^", "x"]]}):
        target = {**HERE, "name": lib.fresh() + ".gguf", "format": "gguf"}
        error = d.api.fails("reshard", "dtype_unsupported", source=source, target=target, **more)
        assert error["fqn"].endswith("Q4_0") and "blocks of Q4_0" in error["detail"] and "exclude" in error["detail"], error


def test_what_dcpd_wrote(d):
    state = {"a": torch.randn(300, 1000).bfloat16(), "b": torch.randn(7), "c": torch.zeros(0, 3), "d": torch.tensor(2.5)}
    source, _ = put(d, None, state)
    name = lib.fresh() + ".gguf"
    convert(d, source, name)
    assert d.api.run("diff", a=source, b={**HERE, "name": name})["result"]["equal"]
    r = d.api.get(d.api.storage_path("main", name, "/tensors/a?slice=10:20,5:9&format=raw"))
    assert r.body == raw(state["a"][10:20, 5:9])


def test_lies(d):
    """Lengths, counts and places that the file has no room for; truncations and flipped bytes at random never take dcpd down."""
    folder = d.storages["main"] / lib.fresh()
    folder.mkdir()
    path = folder / "x.gguf"

    def text(s):
        return struct.pack("<Q", len(s)) + s

    def file(tensors=b"", kv=b"", n=None, pairs=None, version=3, data=b"\0" * 256):
        head = b"GGUF" + struct.pack("<IQQ", version, tensors.count(b"T") if n is None else n, (1 if kv else 0) if pairs is None else pairs)
        head += kv + tensors
        return head + bytes(-len(head) % 32) + data

    def tensor(name=b"T", dims=(4,), kind=0, offset=0):
        return text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", x) for x in dims) + struct.pack("<IQ", kind, offset)

    lies = [
        (file(n=1 << 63), "format_gguf"), (file(pairs=1 << 63), "format_gguf"), (file(version=1), "format_unsupported"),
        (file(version=3 << 24), "format_unsupported"), (file(struct.pack("<Q", 1 << 63) + b"T", n=1), "format_gguf"),
        (file(tensor(dims=(1 << 62, 4))), "format_gguf"), (file(tensor(dims=(1 << 63,))), "format_gguf"),
        (file(tensor(dims=(1, 1, 1, 1, 1))), "format_gguf"), (file(tensor(offset=3)), "format_gguf"),
        (file(tensor(offset=1 << 62)), "checkpoint_incomplete"), (file(tensor(dims=(65,))), "checkpoint_incomplete"),
        (file(tensor() + tensor(b"TT", offset=0), n=2), "format_gguf"), (file(tensor() + tensor(offset=32), n=2), "duplicate_key"),
        (file(tensor(kind=8)), "format_gguf"), (file(tensor(kind=77)), "format_unsupported"),
        (file(kv=text(b"k") + struct.pack("<IQ", 8, 1 << 63)), "format_gguf"), (file(kv=text(b"k") + struct.pack("<I", 13)), "format_gguf"),
        (file(kv=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60)), "format_gguf"),
        (file(kv=text(b"k") + struct.pack("<IIQ", 9, 10, 1 << 61)), "format_gguf"),
        (file(kv=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 8), "format_gguf"),
        (file(kv=text(b"general.alignment") + struct.pack("<II", 4, 3)), "format_gguf"),
        (file(kv=text(b"general.alignment") + struct.pack("<II", 4, 0)), "format_gguf"), (b"GGUF\3\0\0\0", "format_gguf"),
    ]
    for bytes_, code in lies:
        path.write_bytes(bytes_)
        error = d.api.get(d.api.storage_path("main", f"{folder.name}/x.gguf", "/tensors")).problem(code)
        assert error["file"] == "x.gguf", (bytes_, error)
    write(path)
    whole, rnd = path.read_bytes(), random.Random(3)
    for _ in range(60):
        spoilt = bytearray(whole[:rnd.randrange(4, len(whole))] if rnd.random() < 0.5 else whole)
        spoilt[rnd.randrange(len(spoilt))] ^= 1 << rnd.randrange(8)
        path.write_bytes(spoilt)
        assert d.api.get(d.api.storage_path("main", f"{folder.name}/x.gguf", "/tensors")).status < 500
