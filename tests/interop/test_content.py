"""The content digest of a record: equal for equal tensors, whatever the layout, world size and format, and computed here a second time, by
none of dcpd's code (api/checking.md)."""
import json
import pathlib
import shutil
import struct

import pytest
from delta_form import xxh3

import dcpd as lib

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
CASES = sorted(f"{p.parent.name}/{p.name}" for v in ("torch-2.2.2", "torch-2.15.0") for p in (FIXTURES / v).glob("*")
               if (p / "checkpoint").is_dir() and p.name != "odd_keys")  # a tensor is called __metadata__ there
TABLE = []
for i in range(256):
    for _ in range(8):
        i = i >> 1 ^ (0xC96C5795D7870F42 if i & 1 else 0)
    TABLE.append(i)


def crc64(data):
    """CRC-64/XZ."""
    crc = (1 << 64) - 1
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ ((1 << 64) - 1)


def content_digest(tensors):
    """tensors: {FQN: (dtype, shape, bytes)}."""
    nodes = b""
    for name in sorted(tensors, key=lambda n: n.encode()):
        dtype, shape, data = tensors[name]
        fqn = name.encode("utf-8", "surrogatepass")
        nodes += bytes.fromhex(xxh3(struct.pack("<Q", len(fqn)) + fqn + struct.pack("<Q", len(dtype)) + dtype.encode() +
                                    struct.pack(f"<{1 + len(shape)}Q", len(shape), *shape) + struct.pack("<Q", crc64(data))))
    return xxh3(nodes)


def expected(case):
    doc = json.loads((FIXTURES / case / "expected.json").read_text())["tensors"]
    raw = (FIXTURES / case / "expected.safetensors").read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8:8 + n])
    return {fqn: (t["dtype"], t["shape"], raw[8 + n:][slice(*head[fqn]["data_offsets"])]) for fqn, t in doc.items()}


def test_the_check_value():
    assert crc64(b"123456789") == 0x995DC9BBDF1939FA


# What verify reads in other ways than item by item, in C order, it does not sum up: a reshard does.
BY_RESHARD_ONLY = {"rank_local", "zstd", "torch_save_to_dcp", "conj_neg", "dtensor_shard1", "shapes"}


@pytest.mark.parametrize("case", [c if c.startswith("torch-2.15.0") else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_golden(d, case):
    source, base = {"storage": "golden", "name": f"{case}/checkpoint"}, f"content/{lib.fresh()}"
    want = content_digest(expected(case))
    got = d.api.run("verify", source=source, level="digest")["result"].get("content_digest")
    assert got in (want, None)
    by_reshard = [d.api.run("reshard", source=source, target={"storage": "main", "name": f"{base}/{i}", **target})
                  for i, target in enumerate((
                      {"world_size": 2, "layout": [{"match": "*", "mesh": [2], "placements": ["Shard(1)"]}]},
                      {"world_size": 3}))]
    for i, job in enumerate(by_reshard):
        name = f"{base}/{i}"
        record = d.api.get(d.api.storage_path("main", name)).ok(200)
        assert record["content_digest"] == job["result"]["content_digest"] == want
        assert d.api.run("verify", source={"storage": "main", "name": name}, level="digest")["result"]["content_digest"] == want
    assert got or case.split("/")[1] in BY_RESHARD_ONLY, "verify has read all of it"
    shutil.rmtree(d.storages["main"] / base)


@pytest.mark.parametrize("case", ["dtensor_2d_shard_shard", "nested", "fsdp2_adam"])
def test_other_formats(d, case):
    """Values have no part in it: safetensors has none."""
    source, base = {"storage": "golden", "name": f"torch-2.15.0/{case}/checkpoint"}, f"content/{lib.fresh()}"
    want = content_digest(expected(f"torch-2.15.0/{case}"))
    for name, format in (("st", "safetensors"), ("back", "dcp"), ("one.pt", "torch"), ("again", "dcp")):
        job = d.api.run("reshard", source=source, target={"storage": "main", "name": f"{base}/{name}", "format": format})
        assert job["result"]["content_digest"] == want, (case, name)
        source = {"storage": "main", "name": f"{base}/{name}"}
    assert d.api.get(d.api.storage_path("main", f"{base}/st")).ok(200)["content_digest"] == want
    assert d.api.run("verify", source={"storage": "main", "name": f"{base}/st"})["result"]["content_digest"] == want
    shutil.rmtree(d.storages["main"] / base)


def test_another_bit_is_another_digest(d):
    got = set()
    for data in (bytes(4096), bytes(4095) + b"\1", b"\1" + bytes(4095)):
        for entry in ({"a": ("U8", [4096], data)}, {"b": ("U8", [4096], data)}, {"a": ("I8", [4096], data)}, {"a": ("U8", [64, 64], data)}):
            sd, name = lib.fresh(), f"content/{lib.fresh()}"
            d.put(sd, [lib.image(entry)])
            got.add(d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})["result"]["content_digest"])
            d.drop(sd)
    assert len(got) == 12


def test_a_reshard_that_is_not_what_the_record_tells_is_none(d):
    """Whoever is wrong, the record or the copy: nothing is committed. What takes a part of it, or changes it, is not compared."""
    sd, name = lib.fresh(), f"content/{lib.fresh()}"
    d.put(sd, [lib.image({"a": ("U8", [4096], bytes(4096)), "b": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)
    path = d.storages["main"] / name / ".dcpd.json"
    text = path.read_text()
    record = text[text.index('"record":') + 9:text.index(',"record_xxh3_128"')]
    digest = json.loads(record)["content_digest"]
    lie = record.replace(digest, xxh3(b"another"))
    text = text.replace(record, lie).replace(xxh3(record.encode()), xxh3(lie.encode()))
    head = text[:text.index(',"self_xxh3_128"')]
    path.write_text(f'{head},"self_xxh3_128":"{xxh3(head.encode())}"}}\n')
    source, out = {"storage": "main", "name": name}, {"storage": "main", "name": f"{name}-out"}
    p = d.api.fails("reshard", "digest_mismatch", source=source, target=out)
    assert (p["expected"], p["actual"]) == (xxh3(b"another"), digest)
    d.api.get(d.api.storage_path("main", out["name"])).problem("not_found")
    d.api.run("reshard", source=source, target=out, include=["a"])
    d.api.run("verify", source=source)
