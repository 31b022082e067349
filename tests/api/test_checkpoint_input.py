"""Damaged and hostile checkpoints: each gets one clear problem from load and reshard, verify finds it, and nothing else happens."""
import io
import os
import pickle
import struct
import zipfile

import pytest
from crafted import Crafted, Evil, tree

import dcpd as lib

torch = pytest.importorskip("torch")

DAMAGED = ("checkpoint_incomplete", "format_pickle", "format_metadata", "limit_exceeded")
ITEM = ("format_item", "format_metadata", "format_zip", "checkpoint_incomplete", "limit_exceeded")


def found(d, ref, codes, level="digest"):
    """verify says so: the job fails with the code, or ends with the problem in its result."""
    a = d.api.post("/v1/jobs", {"kind": "verify", "source": ref, "level": level})
    if a.status >= 400:
        a.problem(*codes)
        return
    j = d.api.wait(a.ok(202))
    if j["state"] == "failed":
        lib.check_damage(j["error"], *codes)
        return
    problems = j["result"].get("problems") or []
    assert problems and all(p["code"] in codes for p in problems), j["result"]


def refused(d, c, *codes, verify=True):
    """Load and reshard are refused; the checkpoint stays as it is, and no half target is visible. The reshard's problem."""
    before, sd, target = tree(c.dir), lib.fresh("bad"), f"target/{lib.fresh()}"
    d.api.fails("load", *codes, source=c.ref, target={"state_dict": sd, "world_size": 2})
    assert d.api.get(f"/v1/state-dicts/{sd}").status == 404
    p = d.api.fails("reshard", *codes, source=c.ref, target={"storage": "main", "name": target, "world_size": 2})
    assert not (d.storages["main"] / target).exists()
    if verify:
        found(d, c.ref, codes)
    assert tree(c.dir) == before
    return p


@pytest.fixture
def c(d):
    return Crafted(d.storages["main"])


def test_metadata_missing(d, c):
    c.meta.unlink()
    refused(d, c, "checkpoint_incomplete", "not_a_checkpoint", "not_found")


@pytest.mark.parametrize("part", [0, 1, 2, 10, 0.3, 0.6, 0.9, -1])
def test_metadata_truncated(d, c, part):
    data = c.meta.read_bytes()
    refused(d, c.raw(data[: int(part * len(data)) if isinstance(part, float) else part]), *DAMAGED)


def test_file_missing(d, c):
    f = c.files()[0]
    f.unlink()
    p = refused(d, c, "checkpoint_incomplete", "format_item")
    assert p["file"] == f.name, p


@pytest.mark.parametrize("keep", [0, 1, 100, -1, -100])
def test_file_truncated(d, c, keep):
    f = c.files()[0]
    data = f.read_bytes()
    f.write_bytes(data[:keep] if keep >= 0 else data[:keep])
    p = refused(d, c, *ITEM)
    assert p["file"] == f.name, p


@pytest.mark.parametrize("offset", [1, 7, 1 << 20, 1 << 62, (1 << 63) - 1, 1 << 64, -1])
def test_offset_wrong(d, c, offset):
    def change(md):
        s = c.tensor(md)[1]
        s.offset = s.offset + offset if offset > 0 else offset

    refused(d, c.edit(change), *ITEM)


@pytest.mark.parametrize("length", [0, 1, 22, 100, 1 << 40, (1 << 63) - 1, 1 << 70, -5])
def test_length_wrong(d, c, length):
    def change(md):
        c.tensor(md)[1].length = length

    refused(d, c.edit(change), *ITEM)


def test_chunks_overlap(d, c):
    def change(md):
        fqn, m = next((k, m) for k, m in md.state_dict_metadata.items() if len(getattr(m, "chunks", ())) > 1)
        a, b = m.chunks[:2]
        index, info = next((i, s) for i, s in md.storage_data.items() if i.fqn == fqn and list(i.offset) == list(b.offsets))
        del md.storage_data[index]
        offsets = torch.Size([a.offsets[0] + 1, *a.offsets[1:]])
        b.offsets = offsets
        md.storage_data[type(index)(fqn, offsets, index.index)] = info

    refused(d, c.edit(change), "plan_invalid", "coverage_hole", "format_metadata")


def test_chunk_missing(d, c):
    def change(md):
        m = next(m for m in md.state_dict_metadata.values() if len(getattr(m, "chunks", ())) > 1)
        m.chunks.pop()

    p = refused(d, c.edit(change), "coverage_hole", "plan_invalid", "format_metadata")
    assert p["fqn"], p


def test_storage_of_a_chunk_missing(d, c):
    def change(md):
        del md.storage_data[c.tensor(md)[0]]

    refused(d, c.edit(change), "format_metadata", "coverage_hole", "checkpoint_incomplete")


def payload(f, offset, length):
    """Where in the file the tensor's own bytes begin, and how many there are: `data/0` of the stored archive."""
    with zipfile.ZipFile(io.BytesIO(f.read_bytes()[offset : offset + length])) as z:
        e = next(e for e in z.infolist() if e.filename.endswith("data/0"))
        head = f.read_bytes()[offset + e.header_offset :][:30]
    return offset + e.header_offset + 30 + sum(struct.unpack("<HH", head[26:30])), e.file_size


def flip(c, f):
    """One bit of a tensor in this file."""
    md = pickle.loads(c.joinpath(".metadata").read_bytes())
    info = next(s for i, s in md.storage_data.items()
                if s.relative_path == f.name and getattr(i, "offset", None) is not None)
    at, size = payload(f, info.offset, info.length)
    data = bytearray(f.read_bytes())
    data[at + size // 2] ^= 0x10
    f.write_bytes(data)


def test_crc_wrong(d, c):
    f = c.files()[0]
    flip(c.dir, f)
    p = refused(d, c, "digest_mismatch", "format_zip", "format_item")
    assert p["file"] == f.name and p["fqn"], p


PICKLES = {
    "unknown opcode": b"\x80\x04\xff.",
    "unknown opcode after a dict": b"\x80\x04}\xfe.",
    "protocol 9": b"\x80\x09N.",
    "only a stop": b".",
    "a number": b"\x80\x04K\x01.",
    "a string": b"\x80\x04\x8c\x01a.",
    "empty stack": b"\x80\x040.",
    "no mark": b"\x80\x04t.",
    "deep lists": b"\x80\x04" + b"]" * 200000 + b"a" * 199999 + b".",
    "deep marks": b"\x80\x04" + b"(" * 500000 + b".",
    "deep tuples": b"\x80\x04N" + b"\x85" * 500000 + b".",
    "a huge string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "a huge bytes": b"\x80\x05\x8e" + struct.pack("<Q", (1 << 64) - 1) + b".",
    "a huge frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 63) + b"N.",
    "a huge int": b"\x80\x04\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01.",
    "a negative length": b"\x80\x04\x8b" + struct.pack("<i", -1) + b".",
    "memo out of reach": b"\x80\x04j\xff\xff\xff\xff.",
    "memo put far away": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "a dict in itself": b"\x80\x04}\x94h\x00h\x00s.",
    "a tuple bomb": b"\x80\x04N\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60)) + b".",
    "an extension code": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x04\x8c\x01aQ.",
    "an unknown class": b"\x80\x04\x8c\x03foo\x8c\x03bar\x93)R.",
    "builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "getattr on anything": b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
}


@pytest.mark.parametrize("what", PICKLES)
def test_pickle_hostile(d, c, what):
    refused(d, c.raw(PICKLES[what]), *DAMAGED, "not_a_checkpoint", verify=False)


def test_pickle_runs_nothing(d, c, tmp_path):
    touched = tmp_path / "run"
    refused(d, c.raw(pickle.dumps(Evil(touched))), *DAMAGED, "not_a_checkpoint")

    def change(md):
        md.planner_data[next(iter(md.planner_data))] = Evil(touched)

    d.api.wait(d.api.submit("verify", source=Crafted(d.storages["main"]).edit(change).ref, level="digest"))
    assert not touched.exists()


def test_unknown_attribute_is_harmless(d, tmp_path):
    """What others add to Metadata is not looked at, and not run either."""
    touched = tmp_path / "run"
    c = Crafted(d.storages["main"])
    c.edit(lambda md: setattr(md, "mcore_data", {"x": Evil(touched)}))
    d.api.run("verify", source=c.ref, level="digest")
    assert not touched.exists()


def test_planner_data_in_itself(d, c):
    def change(md):
        loop = []
        loop.append(loop)
        md.planner_data[next(iter(md.planner_data))] = loop

    refused(d, c.edit(change), *DAMAGED)


def test_duplicate_fqn(d, c):
    def change(md):
        fqn, m = next((k, m) for k, m in md.state_dict_metadata.items() if hasattr(m, "chunks"))
        md.state_dict_metadata = {"duplicate_AAAA": m, "duplicate_BBBB": m}
        md.storage_data = {type(i)(k, i.offset, i.index): s for k in md.state_dict_metadata
                           for i, s in md.storage_data.items() if i.fqn == fqn}
        md.planner_data = {k: (k,) for k in md.state_dict_metadata}

    p = refused(d, c.edit(change).replace(b"duplicate_BBBB", b"duplicate_AAAA"), "duplicate_key", "format_metadata", "format_pickle")
    assert "duplicate_AAAA" in (p.get("fqn"), p["detail"]) or "duplicate_AAAA" in p["detail"], p


@pytest.mark.parametrize("size", [(1 << 62, 1 << 62), (1 << 63, 1), (3, (1 << 62) + 1), (-1, 4), (1 << 40, 1 << 10)])
def test_size_overflows(d, c, size):
    def change(md):
        fqn, m = next((k, m) for k, m in md.state_dict_metadata.items() if len(getattr(m, "chunks", ())) > 1)
        m.size = size
        m.chunks[-1].sizes = size

    refused(d, c.edit(change), *DAMAGED, "coverage_hole", "plan_invalid", "format_item")


@pytest.mark.parametrize("path", ["../{0}", "/etc/passwd", "a/../../{0}", "./{0}", "x\0y", "", "..", "no\nsuch", "a" * 5000])
def test_file_name_leaves_the_checkpoint(d, c, path):
    def change(md):
        info = c.tensor(md)[1]
        (c.dir.parent / info.relative_path).write_bytes((c.dir / info.relative_path).read_bytes())
        info.relative_path = path.format(info.relative_path)

    refused(d, c.edit(change), *ITEM, "name_invalid")


@pytest.mark.parametrize("what", ["file", "metadata", "directory"])
def test_links_are_not_followed(d, c, tmp_path, what):
    if what == "file":
        f = c.files()[0]
        f.rename(tmp_path / f.name)
        f.symlink_to(tmp_path / f.name)
        refused(d, c, *ITEM, "storage_io", "forbidden", verify=False)
    elif what == "metadata":
        c.meta.rename(tmp_path / "m")
        c.meta.symlink_to(tmp_path / "m")
        refused(d, c, *DAMAGED, "not_a_checkpoint", "not_found", "storage_io", "forbidden", "name_invalid", verify=False)
    else:
        c.dir.rename(tmp_path / "real")
        c.dir.symlink_to(tmp_path / "real")
        target = {"storage": "main", "name": f"target/{lib.fresh()}"}
        d.api.fails("reshard", "not_found", "not_a_checkpoint", "checkpoint_incomplete", "storage_io", "forbidden",
                    source=c.ref, target=target)
        d.api.get(d.api.storage_path("main", c.name)).problem()
        d.api.fails("delete", "not_found", "not_a_checkpoint", "checkpoint_incomplete", "storage_io", "forbidden", target=c.ref)
        assert (tmp_path / "real" / ".metadata").exists()


def test_fifo_does_not_block(d, c):
    f = c.files()[0]
    f.unlink()
    os.mkfifo(f)
    refused(d, c, *ITEM, "storage_io", "not_a_checkpoint")


def test_dtype_that_cannot_be_stored(d, c):
    def change(md):
        md.state_dict_metadata[c.tensor(md)[0].fqn].properties.dtype = torch.qint8

    p = refused(d, c.edit(change), "dtype_unsupported")
    assert p["fqn"] and "qint8" in p["detail"], p


def test_dtype_other_than_stored(d, c):
    def change(md):
        md.state_dict_metadata[c.tensor(md)[0].fqn].properties.dtype = torch.float64

    p = refused(d, c.edit(change), "format_item", "format_metadata")
    assert p["fqn"], p


@pytest.mark.parametrize("name", ["no/such", "no"])
def test_no_such_checkpoint(d, name):
    ref = {"storage": "main", "name": f"{name}-{lib.fresh()}"}
    d.api.fails("load", "not_found", source=ref, target={"state_dict": lib.fresh()})
    d.api.fails("verify", "not_found", source=ref)
    d.api.fails("delete", "not_found", target=ref)
    d.api.get(d.api.storage_path("main", ref["name"])).problem("not_found", status=404)


def test_a_folder_of_something_else(d):
    name = f"crafted/{lib.fresh()}"
    other = d.storages["main"] / name
    other.mkdir(parents=True)
    (other / "thesis.txt").write_text("five years")
    ref = {"storage": "main", "name": name}
    d.api.fails("load", "not_a_checkpoint", "not_found", "checkpoint_incomplete", source=ref, target={"state_dict": lib.fresh()})
    d.api.fails("delete", "not_a_checkpoint", "not_found", target=ref)
    good = Crafted(d.storages["main"])
    d.api.fails("reshard", "not_a_checkpoint", source=good.ref, target=ref, options={"overwrite": True})
    assert tree(other) == {"thesis.txt": b"five years"}


def test_checkpoint_inside_a_checkpoint(d, c):
    good = Crafted(d.storages["main"])
    d.api.fails("reshard", "name_invalid", "checkpoint_exists", "not_a_checkpoint", "state_conflict", source=good.ref,
                target={"storage": "main", "name": c.name + "/inner"})
    assert not (c.dir / "inner").exists()


def test_transform_unknown(d):
    c = Crafted(d.storages["main"], "torch-2.15.0/zstd")

    def change(md):
        info = next(s for s in md.storage_data.values() if getattr(s, "transform_descriptors", None))
        info.transform_descriptors = ["stream.rot13"]

    p = refused(d, c.edit(change), "format_transform")
    assert "rot13" in p["detail"] and p["fqn"], p


@pytest.mark.parametrize("how", ["cut", "garbage", pytest.param("bomb", marks=pytest.mark.long)])
def test_transform_damaged(d, how):
    zstandard = pytest.importorskip("zstandard")
    c = Crafted(d.storages["main"], "torch-2.15.0/zstd")
    md = pickle.loads(c.meta.read_bytes())
    index, info = next((i, s) for i, s in md.storage_data.items() if getattr(i, "offset", None) is not None)
    f = c.dir / info.relative_path
    data = bytearray(f.read_bytes())
    if how == "bomb":  # 4 GiB of zeroes in a few hundred kB
        bomb = zstandard.ZstdCompressor(level=1).compressobj()
        packed = b"".join(bomb.compress(bytes(1 << 24)) for _ in range(256)) + bomb.flush()
        f.write_bytes(data + packed)
        c.edit(lambda md: (setattr(md.storage_data[index], "offset", len(data)), setattr(md.storage_data[index], "length", len(packed)))
               and None)
    else:
        a, n = info.offset, info.length
        data[a + n // 2 : a + n] = bytes(n - n // 2) if how == "cut" else os.urandom(n - n // 2)
        f.write_bytes(data)
    p = refused(d, c, "format_transform", "format_zip", "format_item", "digest_mismatch", "limit_exceeded")
    assert p["file"] == f.name, p


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"files":7}', b"\xff", b"[" * 100000])
def test_manifest_damaged(d, text):
    """What dcpd itself wrote: a manifest that cannot be read is said, not believed."""
    name, source = f"crafted/{lib.fresh()}", Crafted(d.storages["main"])
    d.api.run("reshard", source=source.ref, target={"storage": "main", "name": name})
    made = d.storages["main"] / name
    manifest = made / ".dcpd.json"
    assert manifest.exists()
    manifest.write_bytes(text)
    j = d.api.wait(d.api.submit("verify", source={"storage": "main", "name": name}, level="digest"))
    assert j["state"] == "failed" and lib.check_damage(j["error"], "format_manifest", "format_unsupported"), j


def test_bytes_of_our_own_changed(d):
    """One bit in a payload, below a manifest with digests: load and verify tell FQN and file."""
    name, source = f"crafted/{lib.fresh()}", Crafted(d.storages["main"])
    d.api.run("reshard", source=source.ref, target={"storage": "main", "name": name})
    ref = {"storage": "main", "name": name}
    f = max((d.storages["main"] / name).glob("*.distcp"), key=lambda p: p.stat().st_size)
    flip(f.parent, f)
    d.api.fails("verify", "digest_mismatch", "format_zip", "format_item", source=ref, level="digest")
