"""Stored items (torch.save archives in .distcp files) against what torch.load says of them, and items of ours in torch.load."""
import base64
import io
import json
import math
import os
import pathlib
import pickle
import subprocess
import warnings
import zipfile

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = pathlib.Path(os.environ.get("TESTBIN", ROOT / "build/test/release")) / "tools/item_tool"
FIXTURES = pathlib.Path(os.environ.get("DCPD_FIXTURES", ROOT / "tests/fixtures"))
REAL = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool float8_e4m3fn float8_e5m2
    float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu""".split()
COMPLEX = "complex128 complex64 complex32 bcomplex32".split()
DTYPES = REAL + COMPLEX + ["float4_e2m1fn_x2"]


def tool(*args, data=b""):
    r = subprocess.run([TOOL, *map(str, args)], input=data, capture_output=True)
    assert r.returncode == 0, r.stderr.decode()
    return r.stdout


def describe(lines):
    text = "".join("\t".join(map(str, f)) + "\n" for f in lines)
    return [json.loads(x) for x in tool("describe", data=text.encode()).splitlines()]


def raw(t):
    """The bytes of the elements in C order, lazy bits resolved."""
    if t.numel() == 0:
        return b""
    return t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def checkpoints():
    return sorted(p.parent for p in FIXTURES.glob("torch-*/*/checkpoint/.metadata"))


def items(checkpoint):
    """[(file, offset, length, transforms, is a tensor)]"""
    with open(checkpoint / ".metadata", "rb") as f:
        md = pickle.load(f)
    out = []
    for index, info in md.storage_data.items():
        names = " ".join(getattr(info, "transform_descriptors", None) or ()) or "-"
        kind = type(md.state_dict_metadata[index.fqn]).__name__
        out.append((checkpoint / info.relative_path, info.offset, info.length, names, kind.startswith("Tensor")))
    return out


def stored(file, offset, length, names):
    data = file.read_bytes()[offset : offset + length]
    if names != "-":
        import zstandard

        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    return data


def check_tensor(got, data):
    assert "error" not in got, got
    t = torch.load(io.BytesIO(data), weights_only=True)
    assert f"torch.{got['dtype']}" == str(t.dtype)
    assert (got["sizes"], got["strides"]) == (list(t.shape), list(t.stride()))
    assert (got["conj"], got["neg"]) == (t.is_conj(), t.is_neg())
    assert got["c_order"] == t.is_contiguous()
    assert got["storage_offset"] == t.storage_offset() and got["payload_bytes"] == t.untyped_storage().nbytes()
    plain = data[got["payload_off"] : got["payload_off"] + got["payload_bytes"]]
    assert plain == torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()


JSON_TYPES = (type(None), bool, int, float, str, list, dict)


def is_json(v):
    """Can JSON say it so that the way back gives the same?"""
    if type(v) is dict:
        return all(type(k) is str and "\0" not in k and is_json(k) and is_json(x) for k, x in v.items())
    if type(v) is list:
        return all(map(is_json, v))
    if type(v) is int:
        return -(2**63) <= v < 2**63
    if type(v) is float:
        return math.isfinite(v)
    if type(v) is str:
        return not any(0xD800 <= ord(c) < 0xE000 for c in v)
    return type(v) in JSON_TYPES


def same(a, b):
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if type(a) is list:
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (type(a) is not float or math.copysign(1, a) == math.copysign(1, b))


def check_value(got, data):
    assert "error" not in got, got
    try:
        v = torch.load(io.BytesIO(data), weights_only=False)
    except (ImportError, AttributeError):
        assert got["kind"] == "opaque"
        return
    if is_json(v):
        assert got["kind"] == "json" and same(got["value"], v)
    elif type(v) is bytes:
        assert got["kind"] == "bytes" and base64.b64decode(got["value"]) == v
    else:
        assert got["kind"] == "opaque"
        if callable(v) or isinstance(v, torch.dtype):  # named, not made: the name is that of the thing itself
            assert "." in got["value"]
            return
        name = type(v).__name__
        assert got["value"].split(".")[-1] in (name.split(".")[-1], "scalar", "xrange"), v  # what numpy and Python 2 call them


@pytest.mark.parametrize("checkpoint", checkpoints(), ids=lambda p: f"{p.parts[-3]}-{p.parts[-2]}")
def test_fixture(checkpoint):
    found = items(checkpoint)
    answers = describe((*i[:4], "tensor" if i[4] else "value") for i in found)
    assert len(answers) == len(found)
    for item, got in zip(found, answers):
        (check_tensor if item[4] else check_value)(got, stored(*item[:4]))


def test_there_are_fixtures():
    assert len(checkpoints()) > 50


def random_tensor(name, shape, seed=7):
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, name)
    n = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8)
    return (bits & 1 if name == "bool" else bits).view(dtype).reshape(shape)


def sizes_of(shape):
    return ",".join(map(str, shape)) or "-"


SHAPES = [(), (0,), (3, 0, 2), (1,), (4, 3), (2, 3, 4), (1, 2, 1, 3, 2), (257, 300)]


@pytest.mark.parametrize("align", [64, 4096])
@pytest.mark.parametrize("name", DTYPES)
def test_written_tensor(name, align):
    for shape in SHAPES:
        t = random_tensor(name, shape)
        item = tool("write", name, align, sizes_of(shape), data=raw(t))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an odd protocol or storage class warns
            back = torch.load(io.BytesIO(item), weights_only=True)
        assert (back.dtype, back.shape, back.stride()) == (t.dtype, t.shape, torch.empty(shape).stride())
        assert raw(back) == raw(t) and not back.requires_grad
        assert torch.load(io.BytesIO(item), weights_only=False).shape == t.shape
        with zipfile.ZipFile(io.BytesIO(item)) as z:
            assert z.testzip() is None
            assert z.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
        assert t.numel() < 100 or item.find(raw(t)) % align == 0


def test_written_tensor_is_read_back(tmp_path):
    f = tmp_path / "item"
    for name in DTYPES:
        for shape in SHAPES:
            t = random_tensor(name, shape)
            f.write_bytes(tool("write", name, 4096, sizes_of(shape), data=raw(t)))
            (got,) = describe([(f, 0, f.stat().st_size, "-", "tensor")])
            check_tensor(got, f.read_bytes())
            assert got["checked"] == 4 and got["unknown"] == 0


def save(obj, **kwargs):
    b = io.BytesIO()
    torch.save(obj, b, **kwargs)
    return b.getvalue()


def rezip(data, method, rename=lambda n: n, order=list):
    """The same records in another archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as a, zipfile.ZipFile(out, "w", method) as b:
        for n in order(a.namelist()):
            b.writestr(rename(n), a.read(n))
    return out.getvalue()


def odd_items():
    t = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    plain = save(t)
    yield "stream", save(t, _use_new_zipfile_serialization=False)
    yield "stream of a half", save(t.half().t(), _use_new_zipfile_serialization=False)
    yield "parameter", save(torch.nn.Parameter(t))
    yield "view", save(t[1:3, 2:5])
    yield "expanded", save(t[:1].expand(5, 6))
    yield "transposed", save(t.t())
    yield "conj", save(torch.view_as_complex(t.reshape(4, 3, 2)).conj())
    yield "neg", save(torch.view_as_complex(t.reshape(4, 3, 2)).conj().imag)
    yield "0-d", save(torch.tensor(3.5))
    yield "empty", save(torch.empty(0, 3))
    yield "protocol 3", save(t, pickle_protocol=3)
    yield "another folder", rezip(plain, zipfile.ZIP_STORED, lambda n: n.replace("archive", "x y", 1))
    yield "reversed", rezip(plain, zipfile.ZIP_STORED, order=lambda n: n[::-1])
    yield "few records", rezip(plain, zipfile.ZIP_STORED, order=lambda n: [x for x in n if x.split("/", 1)[1] in
                                                                         ("data.pkl", "data/0", "version")])


@pytest.mark.parametrize("name,data", list(odd_items()), ids=lambda x: x if isinstance(x, str) else "")
def test_odd_tensor(name, data, tmp_path):
    f = tmp_path / "item"
    f.write_bytes(b"junk" + data)
    (got,) = describe([(f, 4, len(data), "-", "tensor")])
    check_tensor(got, data)


def test_deflated_tensor(tmp_path):
    t = torch.arange(1000, dtype=torch.int64)
    data = rezip(save(t), zipfile.ZIP_DEFLATED)
    (tmp_path / "item").write_bytes(data)
    (got,) = describe([(tmp_path / "item", 0, len(data), "-", "tensor")])
    assert got["deflated"] and got["payload_bytes"] == 8000 and got["stored_bytes"] < 8000 and got["sizes"] == [1000]
    assert got["checked"] == len(zipfile.ZipFile(io.BytesIO(data)).namelist())
    assert torch.equal(torch.load(io.BytesIO(data)), t)


def test_not_dense(tmp_path):
    f = tmp_path / "item"
    for obj, word, code in [([1], "list", "format_item"), ({"a": torch.ones(1)}, "dict", "format_item"),
                            (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor", "format_unsupported")]:
        f.write_bytes(save(obj))
        (got,) = describe([(f, 0, f.stat().st_size, "-", "tensor")])
        assert got["error"] == code and word in got["text"], got


VALUES = [None, True, False, 0, 1, -1, 255, 256, 65536, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 0.0, -0.0, 1.0, 0.1, 1e300, 5e-324,
          "", "ü\U0001F600\n\"\\", "a\0b", [], {}, [1, 1.0, True, None, "x", [2, {"k": []}]], {"a": {"b": [1.5]}, "": 0}]
OPAQUE = [2**63, -(2**64), float("nan"), float("inf"), 1j, (1, 2), {1: 2}, {"a\0": 1}, {1, 2}, [(1,)], {"a": torch.ones(1)}, "\ud800",
          bytearray(b"x"), torch.Size([1]), torch.float32, torch.ones(2)]


@pytest.mark.parametrize("value", VALUES + OPAQUE + [b"", b"\x00\xff\x80" * 50], ids=repr)
@pytest.mark.parametrize("zipped", [True, False])
def test_value_read(value, zipped, tmp_path):
    data = save(value, _use_new_zipfile_serialization=zipped)
    (tmp_path / "item").write_bytes(data)
    (got,) = describe([(tmp_path / "item", 0, len(data), "-", "value")])
    check_value(got, data)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_json(value):
    item = tool("value", "json", data=json.dumps(value).encode())
    assert same(torch.load(io.BytesIO(item), weights_only=True), value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**100, -(10**100), 255 << 64, -(1 << 72)])
def test_value_big_int(value):
    assert torch.load(io.BytesIO(tool("value", "json", data=str(value).encode())), weights_only=True) == value


@pytest.mark.parametrize("value", [b"", b"abc", bytes(range(256)) * 3])
def test_value_bytes(value):
    assert torch.load(io.BytesIO(tool("value", "bytes", data=value)), weights_only=True) == value


def test_value_pickle():
    value = {"t": (1, 2), "s": {3}}
    assert torch.load(io.BytesIO(tool("value", "pickle", data=pickle.dumps(value))), weights_only=False) == value


@pytest.mark.parametrize("bad", ["", "{", "[1,]", "nan", "01", "1 2", '{"a":1,}', '"\x01"', "[" * 65 + "]" * 65, "1e999", "'a'"])
def test_value_bad_json(bad):
    r = subprocess.run([TOOL, "value", "json"], input=bad.encode(), capture_output=True)
    assert r.returncode == 1 and b"format_image" in r.stderr and not r.stdout


def big_item(tmp_path, rows):
    """A sparse file: head, a hole, tail. One byte in the middle and the last one are set, so CRC 0 says 'not known'."""
    lay, rest = tool("head", "uint8", 4096, f"{rows},4096").split(b"\n", 1)
    lay = json.loads(lay)
    f = tmp_path / "big"
    with open(f, "wb") as o:
        o.write(rest[: lay["payload_off"]])
        o.seek(lay["payload_off"] + rows * 4096 - 1)
        o.write(b"\x07")
        o.seek(lay["tail_off"])
        o.write(rest[lay["payload_off"] :])
    assert f.stat().st_size == lay["length"]
    return f, lay


@pytest.mark.parametrize("rows", [2**20 - 1, 2**20, 2**20 + 1])  # 4 GiB less a page, 4 GiB, more
def test_zip64(rows, tmp_path):
    f, lay = big_item(tmp_path, rows)
    (got,) = describe_head(f, lay)
    assert got["payload_bytes"] == rows * 4096 and got["payload_off"] == lay["payload_off"] and got["sizes"] == [rows, 4096]
    reader = torch._C.PyTorchFileReader(str(f))
    assert reader.get_record_offset("data/0") == lay["payload_off"]
    assert {"data.pkl", "data/0", "version", "byteorder"} == set(reader.get_all_records())
    t = torch.load(f, mmap=True, weights_only=True)
    assert t.shape == (rows, 4096) and t[-1, -1] == 7 and t[0, 0] == 0
    with zipfile.ZipFile(f) as z:
        assert z.getinfo("archive/data/0").file_size == rows * 4096


def describe_head(f, lay):
    """As describe, but the CRC of 4 GiB is 0 and so nothing of the payload is read."""
    return describe([(f, 0, lay["length"], "-", "tensor")])


# ---------------------------------------------------------------------------------------------------------------- cast


def patterns(name):
    """All codes of up to 16 bits, random ones of more, and numbers of ordinary size."""
    g = torch.Generator().manual_seed(3)
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    if name == "bool":
        return torch.arange(1001) % 3 == 0
    if size == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(5).view(dtype)
    if size == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    t = torch.randint(0, 256, (size * 20011,), generator=g, dtype=torch.uint8).view(dtype)
    if name in ("float64", "float32", "complex128", "complex64"):
        n = 40000
        x = torch.randn(n, generator=g, dtype=torch.float64) * torch.exp2(torch.randint(-40, 40, (n,), generator=g).double())
        t = torch.cat([t, (torch.view_as_complex(x.view(-1, 2)) if "complex" in name else x).to(dtype)])
    if name in ("float64", "float32"):  # halfway between two numbers of each smaller type, or next to it
        half = [torch.arange(1 << 16, dtype=torch.int64) << 16 | 1 << b for b in (12, 15)]
        half += [torch.arange(0, 1 << 13, dtype=torch.int64) << 19 | 1 << b for b in (18, 19, 20)]
        ties = torch.cat([h + d for h in half for d in (-1, 0, 1)]).to(torch.uint32).view(torch.float32)
        t = torch.cat([t, ties.to(dtype)])
    if name.startswith("int"):
        t = torch.cat([t, t >> 8 * (size // 2)])
    return t


def defined(src, to):
    """Which elements C and PyTorch define: a float that goes to an integer must be in its range."""
    real = torch.view_as_real(src)[..., 0] if src.is_complex() and src.dtype != torch.bcomplex32 else src
    if src.dtype == torch.bcomplex32:
        real = src.view(torch.bfloat16)[::2]
    if to.is_floating_point or to.is_complex or to == torch.bool or not real.dtype.is_floating_point:
        return torch.ones(src.numel(), dtype=torch.bool)
    i, f = torch.iinfo(to), real.to(torch.float64)
    low = -(2.0**31) if to == torch.int8 or to == torch.uint8 or to == torch.int16 or to == torch.uint16 else float(i.min)
    return (f > max(low, -(2.0**63)) - (1 if i.bits < 64 and i.min < 0 else 0)) & (f < float(i.max)) & ~torch.isnan(f) & (
        (f > -1) | (i.min < 0))


@pytest.mark.parametrize("name", REAL + COMPLEX)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_cast(name):
    src = patterns(name)
    data = src.view(torch.uint8).numpy().tobytes()
    for to_name in REAL + COMPLEX:
        to = getattr(torch, to_name)
        want = torch.empty(src.numel(), dtype=to).copy_(src)
        got = torch.frombuffer(bytearray(tool("cast", name, to_name, data=data)), dtype=torch.uint8).view(to)
        size = want.element_size()
        differ = (got.view(torch.uint8).view(-1, size) != want.view(torch.uint8).view(-1, size)).any(1) & defined(src, to)
        if to.is_floating_point or to.is_complex:  # which NaN a NaN becomes depends on the machine
            differ &= ~(nan_parts(got) & nan_parts(want))
        bad = differ.nonzero().flatten()
        assert len(bad) == 0, (to_name, len(bad), [(src[k], got[k], want[k]) for k in bad[:3].tolist()])


def nan_parts(t):
    return torch.isnan(t.to(torch.complex128 if t.is_complex() else torch.float64))


def test_cast_float4():
    data = bytes(range(256))
    assert tool("cast", "float4_e2m1fn_x2", "float4_e2m1fn_x2", data=data) == data
    for a, b in [("float4_e2m1fn_x2", "float32"), ("float32", "float4_e2m1fn_x2")]:
        r = subprocess.run([TOOL, "cast", a, b], input=data, capture_output=True)
        assert r.returncode == 1 and b"dtype_unsupported" in r.stderr
