"""Where the bytes of boxes lie: what `:locate` says is read here as a client would, from the files, and must give what the daemon's own
reading gives, bit for bit, with the digests that it names."""
import ctypes
import json
import pathlib
import random
import struct
import time
import urllib.parse
import zlib

import pytest
from crafted import FIXTURES, Crafted

import dcpd as lib

ITEM = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8,
        "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex128": 16, "complex64": 8, "complex32": 4, "bcomplex32": 4}
WHYS = {"missing", "kind", "shape", "dtype", "hole", "transformed", "deflated", "lazy", "layout", "sparse", "limit", "unchecked"}


class Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


xxhash = ctypes.CDLL("libxxhash.so.0")
xxhash.XXH3_128bits.restype = Hash128
xxhash.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def xxh3(data):
    h = xxhash.XXH3_128bits(data, len(data))
    return f"{h.high:016x}{h.low:016x}"


def numel(sizes):
    n = 1
    for s in sizes:
        n *= s
    return n


class Looked:
    """A checkpoint's tensors, and questions about it."""

    def __init__(self, d, name, storage="main"):
        self.d, self.storage, self.name = d, storage, name
        self.dir = pathlib.Path(d.storages[storage]) / name
        self.path = d.api.storage_path(storage, name)
        self.tensors, token = {}, None
        while True:
            page = d.api.get(f"{self.path}/tensors?page_size=1000" + (f"&page_token={token}" if token else "")).ok(200)
            self.tensors.update({t["fqn"]: t for t in page["tensors"] if "\0" not in t["fqn"]})  # which no request can say
            token = page.get("next_page_token")
            if not token:
                return

    def box(self, fqn, offsets=None, sizes=None, **other):
        t = self.tensors[fqn]
        return {"fqn": fqn, "dtype": t["dtype"], "shape": t["shape"], "offsets": offsets or [0] * len(t["shape"]),
                "sizes": t["shape"] if sizes is None else sizes, **other}

    def ident(self):
        """Of this version; none where each rank has metadata of its own."""
        if not (self.dir / ".metadata").exists():
            return ""
        st, md = self.dir.stat(), (self.dir / ".metadata").stat()
        return f"{st.st_dev}:{st.st_ino}:{md.st_ino}:{md.st_ctime_ns}"

    def ask(self, boxes, **more):
        return self.d.api.post(self.path + ":locate", {"boxes": boxes, **more})

    def slice(self, box):
        """What the daemon reads for a box."""
        text = ",".join(f"{o}:{o + s}" for o, s in zip(box["offsets"], box["sizes"]))
        fqn = urllib.parse.quote(box["fqn"], safe="")
        return self.d.api.get(f"{self.path}/tensors/{fqn}?format=raw&slice={text}")

    def read(self, boxes, verify=True, digests=None):
        """Boxes' bytes as the answer says: (list of bytes or why, answer). Each read's digest is compared; every byte comes once."""
        a = self.ask(boxes, verify=verify).ok(200)
        assert a["id"] == self.ident()
        assert set(a) == {"id", "files", "segments", "reads", "others", "bytes"}
        out = [bytearray(numel(b["sizes"]) * ITEM.get(b["dtype"], 1)) for b in boxes]
        filled, used = [0] * len(boxes), set()
        for r in a["reads"]:
            assert {"box", "at", "file", "offset", "bytes", "from", "count"} <= set(r)
            with open(self.dir / a["files"][r["file"]], "rb") as f:
                f.seek(r["offset"])
                unit = f.read(r["bytes"])
            used.add(r["file"])
            assert len(unit) == r["bytes"] and 0 <= r["from"] <= r["from"] + r["count"] <= r["bytes"] and r["count"] > 0
            assert filled[r["box"]] == r["at"], "in order, without gaps"
            filled[r["box"]] += r["count"]
            out[r["box"]][r["at"] : r["at"] + r["count"]] = unit[r["from"] : r["from"] + r["count"]]
            if "xxh3" in r:
                assert xxh3(unit) == r["xxh3"]
            if "crc32" in r:
                assert f"{zlib.crc32(unit):08x}" == r["crc32"]
            if digests is not None:
                digests.add("xxh3" if "xxh3" in r else "crc32" if "crc32" in r else None)
            if not verify:
                assert r["from"] == 0 and r["count"] == r["bytes"] and not {"xxh3", "crc32"} & set(r)
        assert used == set(range(len(a["files"]))) and len(set(a["files"])) == len(a["files"])
        others = {o["box"]: o["why"] for o in a["others"]}
        assert set(others.values()) <= WHYS and sorted(others) == [o["box"] for o in a["others"]]
        for i, data in enumerate(out):
            assert filled[i] == (0 if i in others else len(data)), (boxes[i], filled[i], len(data))
        assert a["bytes"] == sum(filled)
        return [others.get(i) or bytes(data) for i, data in enumerate(out)], a

    def check(self, boxes, verify=True, digests=None):
        """The same as the daemon reads; how many were not among the others."""
        got, _ = self.read(boxes, verify, digests)
        for b, data in zip(boxes, got):
            if isinstance(data, bytes) and b["fqn"]:  # a path has no empty part
                assert data == self.slice(b).body, b
        return [x if isinstance(x, str) else None for x in got]

    def chunks(self):
        return [self.box(f, c["offsets"], c["sizes"]) for f, t in self.tensors.items() for c in t["chunks"]]

    def rows(self, n):
        """Every tensor cut into n parts of rows, as torch.chunk does."""
        out = []
        for f, t in self.tensors.items():
            if not t["shape"]:
                out.append(self.box(f))
                continue
            each = -(-t["shape"][0] // n)
            for k in range(n):
                begin, end = min(k * each, t["shape"][0]), min((k + 1) * each, t["shape"][0])
                out.append(self.box(f, [begin, *[0] * (len(t["shape"]) - 1)], [end - begin, *t["shape"][1:]]))
        return out


GOLDEN = sorted(str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.glob("torch-*/*/checkpoint"))


@pytest.mark.parametrize("case", [c if c.startswith("torch-2.15.0") else pytest.param(c, marks=pytest.mark.long)
                                  for c in GOLDEN])
def test_golden(d, case):
    """Stored chunk by stored chunk, whole tensors, rows, columns: what is answered is right, and what can be answered is."""
    c = Looked(d, f"{case}/checkpoint", "golden")
    for verify in (True, False):
        whys = c.check(c.chunks(), verify)
        assert all(w in (None, "transformed", "lazy", "layout") for w in whys), whys
        if "zstd" in case:
            assert "transformed" in whys
        elif "conj_neg" in case:
            assert {"lazy", None} <= set(whys)
        elif "odd" not in case and "dtypes" not in case:
            assert whys.count(None) >= len(whys) * 3 // 4, whys
        for boxes in ([c.box(f) for f in c.tensors], c.rows(2), c.rows(3)):
            c.check(boxes, verify)


def saved(d, tensors, world=1, **dcpd):
    """dcpd's own checkpoint of one rank's tensors {fqn: (dtype, shape, bytes)}, or of a list of ranks'."""
    sd, name = lib.fresh(), f"located/{lib.fresh()}"
    ranks = tensors if isinstance(tensors, list) else [tensors]
    d.put(sd, [lib.image(t, dcpd or None) if isinstance(t, dict) else t for t in ranks])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)
    return Looked(d, name)


def noise(n, seed=1):
    return random.Random(seed).randbytes(n)


MIB = 1 << 20


def big(d, ranks=1):
    """A tensor of 24 MiB, cut by rows over `ranks`; so it has several digest blocks."""
    rows, width = 6144, 1024
    data, each = noise(rows * width * 4), rows // ranks
    images = []
    for r in range(ranks):
        part = data[r * each * width * 4 : (r + 1) * each * width * 4]
        t = {"w": {"fqn": "w", "global_shape": [rows, width], "offsets": [r * each, 0]}}
        images.append(lib.image({"w": ("F32", [each, width], part)}, {"tensors": t} if ranks > 1 else None))
    return saved(d, images), data


def big_small(d):
    """Tensors of all sorts over two ranks, one of them in several digest blocks."""
    images = []
    for r in range(2):
        t = {"w": {"fqn": "w", "global_shape": [4096, 1024], "offsets": [r * 2048, 0]},
             "c": {"fqn": "c", "global_shape": [6, 4], "offsets": [0, r * 2]}}
        entries = {"w": ("F32", [2048, 1024], noise(8 * MIB, r)), "c": ("BF16", [6, 2], noise(24, r))}
        if r == 0:
            entries.update({"s": ("I64", [], noise(8)), "e": ("F32", [0], b"")})
        images.append(lib.image(entries, {"tensors": t}))
    return saved(d, images)


def test_same_layout(d):
    """A resume: a whole stored chunk is whole digest blocks and nothing else."""
    c, data = big(d, 4)
    got, a = c.read(c.chunks())
    assert b"".join(got) == data and not a["others"] and a["bytes"] == len(data)
    assert all("xxh3" in r and r["from"] == 0 and r["count"] == r["bytes"] for r in a["reads"])
    assert a["files"] == [f"__{r}_0.distcp" for r in range(4)]
    assert len(a["reads"]) >= 8, "6 MiB a rank are several blocks"
    got, a = c.read(c.chunks(), verify=False)
    assert b"".join(got) == data and len(a["reads"]) == 4


@pytest.mark.long
@pytest.mark.parametrize("stored,wanted", [(4, 2), (4, 8), (1, 4), (3, 4)])
def test_other_rows(d, stored, wanted):
    c, data = big(d, stored)
    digests = set()
    got, a = c.read(c.rows(wanted), digests=digests)
    assert b"".join(got) == data and digests == {"xxh3"}
    assert sum(r["bytes"] for r in a["reads"]) <= 2 * len(data) + wanted * MIB
    got, a = c.read(c.rows(wanted), verify=False)
    assert b"".join(got) == data and sum(r["bytes"] for r in a["reads"]) == len(data)


def test_columns_are_for_others(d):
    c, _ = big(d, 2)
    boxes = [c.box("w", [0, 0], [6144, 512]), c.box("w", [5, 3], [1, 7]), c.box("w", [5, 3], [2, 7]), c.box("w", [9, 0], [2, 1024])]
    got, a = c.read(boxes, verify=False)
    assert [x if isinstance(x, str) else "" for x in got] == ["layout", "", "layout", ""]
    assert got[1] == c.slice(boxes[1]).body and got[3] == c.slice(boxes[3]).body


def test_a_little_of_a_block_is_for_others(d):
    """To read 4 MiB for a row and check them is worse than what a load does for all boxes at once."""
    c, _ = big(d, 1)
    row = c.box("w", [3000, 0], [1, 1024])
    assert c.check([row]) == ["sparse"]
    assert c.check([row], verify=False) == [None]
    assert c.check([c.box("w", [0, 0], [3000, 1024])]) == [None]


def test_kinds_of_boxes(d):
    """0-d, empty, of one element, a single row of a cube, transposed by one-element dims."""
    cube = noise(3 * 1 * 4 * 5 * 2)
    c = saved(d, {"s": ("F64", [], struct.pack("<d", 0.5)), "e": ("F32", [0, 4], b""), "c": ("BF16", [3, 1, 4, 5], cube),
                  "b": ("BOOL", [7], b"\1\0\1\1\0\0\1")})
    boxes = [c.box("s"), c.box("e"), c.box("c"), c.box("c", [1, 0, 2, 0], [1, 1, 1, 5]), c.box("c", [1, 0, 0, 0], [2, 1, 4, 5]),
             c.box("c", [2, 0, 3, 4], [1, 1, 1, 1]), c.box("b", [2], [0]), c.box("b", [6], [1]), c.box("c", [0, 0, 0, 0], [3, 0, 4, 5]),
             c.box("c", [0, 0, 1, 0], [2, 1, 2, 5])]
    for verify in (True, False):
        assert c.check(boxes, verify) == [None] * 9 + ["layout"]
    assert c.read([c.box("s")])[0] == [struct.pack("<d", 0.5)]
    _, a = c.read([c.box("e"), c.box("b", [2], [0])])
    assert a["reads"] == a["others"] == a["files"] == [] and a["bytes"] == 0
    assert c.ask([]).ok(200)["reads"] == []


def test_what_does_not_fit_is_for_others(d):
    c = saved(d, {"w": ("F32", [4, 2], noise(32)), "v": ("I64", [3], noise(24))}, values={"lr": {"json": 0.5}})
    w = c.box("w")
    boxes = [{**w, "fqn": "x"}, {**w, "fqn": "lr"}, {**w, "shape": [4, 3], "sizes": [4, 3]}, {**w, "dtype": "float16"}, w,
             {**w, "dtype": "no such"}, {**w, "shape": [8], "offsets": [0], "sizes": [8]}, {**w, "dtype": "torch.float32"},
             c.box("v", [1], [2]), {**w, "fqn": ""}]
    got, a = c.read(boxes)
    assert [x if isinstance(x, str) else None for x in got] == ["missing", "kind", "shape", "dtype", None, "dtype", "shape", None, None,
                                                                 "missing"]


def test_boxes_of_one_tensor_in_any_order(d):
    c, _ = big(d, 4)
    more = saved(d, {"a": ("U8", [9], noise(9)), "b": ("U8", [9], noise(9, 2))})
    boxes = [more.box("b", [3], [4]), more.box("a"), more.box("b"), more.box("b", [3], [4]), more.box("a", [8], [1])]
    assert more.check(boxes) == [None] * 5
    rng = random.Random(4)
    boxes = c.rows(4) + c.rows(3) + c.rows(4)
    rng.shuffle(boxes)
    assert c.check(boxes) == [None] * 11


def test_torch_crc_of_the_whole_payload(d):
    """PyTorch's own files: the unit is the whole payload with its CRC32; where the archive has none, the bytes alone."""
    c, digests = Looked(d, "torch-2.15.0/sharded_rowwise/checkpoint", "golden"), set()
    c.check(c.chunks() + c.rows(2), digests=digests)
    assert digests == {"crc32"}
    c, digests = Looked(d, "torch-2.15.0/crc32_off/checkpoint", "golden"), set()
    c.check(c.chunks(), digests=digests)
    assert digests == {None}


def test_a_large_payload_of_torch(d):
    """A little of it with a CRC32 over all of it: not worth it."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    name = f"located/{lib.fresh()}"
    w = torch.arange(4 * MIB // 4, dtype=torch.int32).reshape(1024, -1)
    dcp.save({"w": w}, checkpoint_id=str(d.storages["main"] / name), no_dist=True)
    c = Looked(d, name)
    half, row = c.box("w", [512, 0], [512, 1024]), c.box("w", [5, 0], [1, 1024])
    got, a = c.read([half, row, c.box("w")])
    assert got == [w[512:].numpy().tobytes(), "sparse", w.numpy().tobytes()] and [r["bytes"] for r in a["reads"]] == [4 * MIB] * 2
    assert c.check([half, row], verify=False) == [None, None]


def test_the_id_tells_versions_apart(d):
    """Those saved one after the other to a directory that has other files too, which stays; not what else happens there."""
    c, ids = saved(d, {"w": ("F32", [4], noise(16))}), []
    (c.dir / "notes.txt").write_text("somebody's")
    for i in range(3):
        ids.append(c.read([c.box("w")])[1]["id"])
        (c.dir / "notes.txt").write_text(f"{i}")
        assert c.read([c.box("w")])[1]["id"] == ids[-1]
        sd = lib.fresh()
        d.put(sd, [lib.image({"w": ("F32", [4], noise(16, i + 2))})])
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": c.name},
                  options={"overwrite": True, "in_place": "needed"})
        d.drop(sd)
    assert (c.dir / "notes.txt").exists() and len(set(ids)) == 3 and len({i.split(":")[1] for i in ids}) == 1
    dirs = c.ask([c.box("w")]).ok(200)["id"]
    time.sleep(0.02)  # a tick of the file system's clock
    (c.dir / ".metadata").rename(c.dir / "away")  # as a save does that fails, and puts back what was there
    (c.dir / "away").rename(c.dir / ".metadata")
    assert c.read([c.box("w")])[1]["id"] != dirs


def test_damaged(d):
    """As from other look-ups: which file, which FQN, where."""
    c = Crafted(d.storages["main"])
    looked = Looked(d, c.name)
    boxes = looked.chunks()
    assert not looked.ask(boxes).ok(200)["others"]
    c.meta.write_bytes(c.meta.read_bytes()[:100])
    looked.ask(boxes).problem("format_pickle", "format_metadata")
    c = Crafted(d.storages["main"])
    looked = Looked(d, c.name)
    f = c.files()[1]
    data = f.read_bytes()
    f.write_bytes(data[:-100])
    p = looked.ask(boxes).problem("checkpoint_incomplete")
    assert p["file"] == f.name and p["fqn"] in looked.tensors and p["offset"] >= 0
    f.write_bytes(data.replace(b"PK\5\6", b"PK\5\7"))
    p = looked.ask(boxes).problem("format_zip", "format_item")
    assert p["file"] == f.name and p["fqn"] in looked.tensors and p["offset"] >= 0
    f.unlink()
    looked.ask(boxes).problem("checkpoint_incomplete")

    def hole(md):
        m = next(m for m in md.state_dict_metadata.values() if len(getattr(m, "chunks", ())) > 1)
        m.chunks.pop()

    pytest.importorskip("torch")
    c = Crafted(d.storages["main"]).edit(hole)
    looked = Looked(d, c.name)
    assert "hole" in {o["why"] for o in looked.ask([looked.box(f) for f in looked.tensors]).ok(200)["others"]}


def test_spoiled_manifest(d):
    """Blocks that are larger than the payload are no blocks; what they say of other bytes is never believed without a look."""
    c, data = big(d, 1)
    f = c.dir / ".dcpd.json"
    m = json.loads(f.read_text())
    del m["self_xxh3_128"]  # an older version's
    for x in m["files"]:
        del x["edges"]
    item = next(i for x in m["files"] for i in x["items"] if len(i) > 4)
    assert item[4][-2] == len(data)
    item[4][-2] *= 2
    f.write_text(json.dumps(m))
    got, a = c.read(c.rows(2))
    assert b"".join(got) == data and {r.get("xxh3") for r in a["reads"]} == {None}
    f.write_text("{")
    c.ask(c.rows(2)).problem("format_manifest")
    f.unlink()
    got, a = c.read(c.rows(2))
    assert b"".join(got) == data and all("crc32" in r and r["bytes"] == len(data) for r in a["reads"])


def test_items_of_dcpd_are_not_looked_at(d):
    """The place of a payload follows from its box, as its manifest tells that dcpd has written it."""
    c = saved(d, {"w": ("F32", [512, 1024], noise(2 * MIB)), "s": ("F32", [4], noise(16)), "u": ("C64", [3, 0, 2], b"")})
    f, boxes = c.dir / "__0_0.distcp", [c.box("w"), c.box("s"), c.box("u"), c.box("w", [512 - 300, 0], [300, 1024])]
    assert c.check(boxes) == [None] * 4
    data = bytearray(f.read_bytes())
    for t in c.tensors.values():
        at = t["chunks"][0]["offset"]
        assert data[at : at + 4] == b"PK\3\4"
        data[at] = 0
    f.write_bytes(data)
    assert b"".join(c.read(boxes[:2])[0]) == noise(2 * MIB) + noise(16)
    assert c.check(boxes, verify=False) == [None] * 4
    (c.dir / ".dcpd.json").unlink()
    p = c.ask(boxes).problem("format_item")
    assert p["file"] == f.name and p["fqn"] in ("w", "s") and p["offset"] == c.tensors[p["fqn"]]["chunks"][0]["offset"]


SPOILED = ("checkpoint_incomplete", "format_pickle", "format_metadata", "format_manifest", "format_item", "format_zip",
           "dtype_unsupported", "limit_exceeded", "plan_invalid", "duplicate_key", "unsupported", "format_unsupported",
           "checkpoint_damaged", "digest_mismatch")


@pytest.mark.long
@pytest.mark.parametrize("ours", [True, False])
def test_spoiled_bytes(d, ours):
    """Whatever a byte is changed to: an answer that stays inside the files, or one clear problem; never the end of a worker."""
    c = big_small(d) if ours else Looked(d, Crafted(d.storages["main"], "torch-2.15.0/dtensor_2d_shard_shard").name)
    rng, boxes, seen = random.Random(5), c.chunks() + c.rows(3), set()
    files = [c.dir / ".metadata", *sorted(c.dir.glob("*.distcp")), *c.dir.glob(".dcpd.json")]
    assert c.ask(boxes).ok(200)["reads"]
    for i in range(150):
        f = files[0] if i % 3 == 0 else rng.choice(files)
        data = f.read_bytes()
        spoiled, at = bytearray(data), rng.randrange(len(data))
        if rng.random() < 0.5:
            spoiled[at] ^= 1 << rng.randrange(8)
        else:
            spoiled[at : at + 8] = rng.choice([bytes(8), b"\xff" * 8, b"0" * 8, struct.pack("<Q", 1 << 62), rng.randbytes(8)])
        f.write_bytes(spoiled)
        a = c.ask(boxes, verify=rng.random() < 0.7)
        if a.status == 200:
            seen.add("ok")
            for r in a.json["reads"]:
                assert 0 <= r["from"] and 0 < r["count"] <= r["bytes"] - r["from"]
                assert 0 <= r["offset"] and r["offset"] + r["bytes"] <= (c.dir / a.json["files"][r["file"]]).stat().st_size
        else:
            seen.add(a.problem(*SPOILED)["code"])
        f.write_bytes(data)
    assert len(seen) > 1, seen
    assert not c.ask(c.chunks()).ok(200)["others"]


BOX = {"fqn": "w", "dtype": "float32", "shape": [4, 2], "offsets": [0, 0], "sizes": [4, 2]}


@pytest.mark.parametrize("body,pointer", [
    ({}, "/boxes"),
    ({"boxes": {}}, "/boxes"),
    ({"boxes": [7]}, "/boxes/0"),
    ({"boxes": [BOX, {**BOX, "fqn": 7}]}, "/boxes/1/fqn"),
    ({"boxes": [{**BOX, "dtype": None}]}, "/boxes/0/dtype"),
    ({"boxes": [{k: v for k, v in BOX.items() if k != "sizes"}]}, "/boxes/0/sizes"),
    ({"boxes": [{**BOX, "shape": 4}]}, "/boxes/0/shape"),
    ({"boxes": [{**BOX, "offsets": [0]}]}, "/boxes/0/offsets"),
    ({"boxes": [{**BOX, "sizes": [4, 2, 1]}]}, "/boxes/0/sizes"),
    ({"boxes": [{**BOX, "offsets": [-1, 0]}]}, "/boxes/0/offsets/0"),
    ({"boxes": [{**BOX, "sizes": [4, -2]}]}, "/boxes/0/sizes/1"),
    ({"boxes": [{**BOX, "offsets": [0, 0.5]}]}, "/boxes/0/offsets/1"),
    ({"boxes": [{**BOX, "offsets": [0, True]}]}, "/boxes/0/offsets/1"),
    ({"boxes": [{**BOX, "offsets": [1, 0]}]}, "/boxes/0/sizes"),
    ({"boxes": [{**BOX, "offsets": [(1 << 63) - 1, 0], "sizes": [(1 << 63) - 1, 1]}]}, "/boxes/0/sizes"),
    ({"boxes": [{**BOX, "shape": [1] * 65, "offsets": [0] * 65, "sizes": [1] * 65}]}, "/boxes/0/shape"),
    ({"boxes": [BOX], "verify": "yes"}, "/verify"),
    ({"boxes": [{**BOX, "shape": [], "offsets": [], "sizes": []}] * 8000 * 2 + [7] * 400}, "/boxes"),
])
def test_hostile_bodies(d, body, pointer):
    c = saved(d, {"w": ("F32", [4, 2], noise(32))})
    small = json.dumps(body, separators=(",", ":")).replace('"fqn":"w","dtype":"float32","shape":[]', '"fqn":"","dtype":"","shape":[]')
    p = d.api.post(c.path + ":locate", small).problem("validation_failed", status=422)
    assert p["pointer"] == pointer


def test_more_hostile_bodies(d):
    c = saved(d, {"w": ("F32", [4, 2], noise(32))})
    where = c.path + ":locate"
    d.api.post(where, {"boxes": [BOX], "wanted": 1}).problem("unknown_field", status=422)
    d.api.post(where, {"boxes": [{**BOX, "rank": 1}]}).problem("unknown_field", status=422)
    d.api.post(where, json.dumps({"boxes": [{**BOX, "offsets": [1 << 64, 0]}]})).problem("invalid_json", "validation_failed")
    d.api.post(where, "[]").problem("invalid_json", "validation_failed")
    d.api.post(where, "{" + '"boxes":[' * 20000).problem("invalid_json")
    d.api.post(where, {"boxes": [{**BOX, "fqn": "x" * (1 << 20)}]}).problem("payload_too_large", status=413)
    d.api.post(where + "?a=1", {"boxes": []}).problem("unknown_field", status=422)
    d.api.get(where).problem("method_not_allowed", status=405)
    d.api.post(d.api.storage_path("main", "no/such") + ":locate", {"boxes": []}).problem("not_found", status=404)
    d.api.post(d.api.storage_path("none", c.name) + ":locate", {"boxes": []}).problem("not_found", status=404)
    d.api.post(d.api.storage_path("main", "../x") + ":locate", {"boxes": []}).problem("name_invalid")
    huge = {**BOX, "shape": [(1 << 63) - 1] * 64, "offsets": [0] * 64, "sizes": [(1 << 63) - 1] * 64}
    a = c.ask([huge, BOX]).ok(200)
    assert a["others"] == [{"box": 0, "why": "shape"}] and a["bytes"] == 32


def test_a_name_with_a_colon(d):
    """"%3A" is a colon of the name; a verb stands behind a bare one."""
    c = saved(d, {"w": ("F32", [4, 2], noise(32))})
    for name in ("located/x:locate", "located/x:"):
        d.api.run("reshard", source={"storage": "main", "name": c.name}, target={"storage": "main", "name": name, "world_size": 1})
        other = Looked(d, name)
        assert other.check([BOX]) == [None]
        assert d.api.get(other.path).ok(200)["name"] == name
        d.api.run("delete", target={"storage": "main", "name": name})


def test_many_boxes(d):
    tensors = {f"layer.{i}.weight": ("F32", [4], struct.pack("<4f", i, 1, 2, 3)) for i in range(5000)}
    c = saved(d, tensors)
    boxes = [c.box(f) for f in tensors]
    got, a = c.read(boxes)
    assert got == [t[2] for t in tensors.values()]
    assert len(a["reads"]) == 5000 and len(a["files"]) == 1
