"""`.metadata` between dcpd and PyTorch, without any daemon: build/test/release/tools/meta_dump reads each golden `.metadata` and must
say what Python's unpickler says; what it writes back must load in PyTorch, with and without weights-only, and be equal."""
import io
import json
import os
import pathlib
import pickle
import pickletools
import subprocess

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = pathlib.Path(os.environ.get("DCPD_FIXTURES", ROOT / "tests" / "fixtures"))
TOOL = os.environ.get("DCPD_META_DUMP", ROOT / "build/test/release/tools/meta_dump")
FILES = sorted(FIXTURES.rglob("*.metadata"))
RANK_LOCAL = sorted({f.parent for f in FILES if f.name != ".metadata"})
CLASSES = [metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.BytesStorageMetadata,
           metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
           filesystem._StorageInfo]


def ids(path):
    return str(path.relative_to(FIXTURES))


def dump(*args):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def text(s):
    return s.encode("utf-8", "surrogatepass").hex()


def rank(name):
    return int(name.split("/")[-1].split("_")[2]) if name.split("/")[-1].startswith("__") else 0


def path_of(md, fqn):
    path = (md.planner_data or {}).get(fqn, ())
    return [text(p) if isinstance(p, str) else p for p in path]


def place(info):
    return {"rank": rank(info.relative_path), "file": text(info.relative_path), "offset": info.offset,
            "length": info.length, "transforms": text(" ".join(getattr(info, "transform_descriptors", None) or ()))}


def expected(md):
    """What meta_dump must print for a Metadata object."""
    storage = {(k.fqn, tuple(k.offset) if k.offset is not None else None): v for k, v in md.storage_data.items()}
    out = {"has_paths": md.planner_data is not None, "tensors": [], "values": []}
    for fqn, m in md.state_dict_metadata.items():
        if isinstance(m, metadata.BytesStorageMetadata):
            out["values"].append({"fqn": text(fqn), "path": path_of(md, fqn), **place(storage[fqn, None])})
            continue
        chunks = [{"offsets": list(c.offsets), "sizes": list(c.sizes), **place(storage[fqn, tuple(c.offsets)])}
                  for c in m.chunks]
        out["tensors"].append({"fqn": text(fqn), "dtype": str(m.properties.dtype)[6:],
                               "requires_grad": m.properties.requires_grad, "shape": list(m.size),
                               "path": path_of(md, fqn), "chunks": chunks})
    return out


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_reads_as_python_does(file):
    assert dump(file) == expected(pickle.loads(file.read_bytes()))


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_written_back(file, tmp_path):
    out = tmp_path / ".metadata"
    before = dump(file, "--rewrite", out)
    bytes_ = out.read_bytes()
    md = pickle.loads(bytes_)
    assert expected(md) == before == dump(out)
    assert md.version == "1.0.0" and md.checkpoint_id == "rewritten"
    assert md.storage_meta is None  # PyTorch 2.3 has no such class; newer readers make one
    for m in md.state_dict_metadata.values():
        if isinstance(m, metadata.TensorStorageMetadata):
            assert m.properties.layout is torch.strided and m.properties.memory_format is torch.contiguous_format
            assert type(m.size) is torch.Size and all(type(c.offsets) is torch.Size for c in m.chunks)
    with torch.serialization.safe_globals(CLASSES):
        safe = torch._weights_only_unpickler.load(io.BytesIO(bytes_))
    assert expected(safe) == before


def test_only_opcodes_and_states_that_older_versions_know(tmp_path):
    """Five elements in TensorProperties, protocol 2."""
    out = tmp_path / ".metadata"
    file = next(f for f in FILES if "2.15" in str(f) and f.name == ".metadata")
    dump(file, "--rewrite", out)
    seen = {op.name for op, _, _ in pickletools.genops(out.read_bytes())}
    assert seen <= {"PROTO", "GLOBAL", "BINUNICODE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MARK",
                    "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST", "NEWOBJ", "BUILD", "REDUCE", "TUPLE", "TUPLE1", "TUPLE2",
                    "TUPLE3", "SETITEMS", "APPENDS", "BININT", "BININT1", "BININT2", "LONG1", "NONE", "NEWTRUE",
                    "NEWFALSE", "STOP"}

    class Five(metadata.TensorProperties):
        def __setstate__(self, state):
            assert len(state) == 5
            super().__setstate__(state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return Five if name == "TensorProperties" else super().find_class(module, name)

    assert Unpickler(io.BytesIO(out.read_bytes())).load().state_dict_metadata


@pytest.mark.parametrize("directory", RANK_LOCAL, ids=ids)
def test_union_of_rank_local_files(directory, tmp_path):
    files = sorted(directory.glob("__*.metadata"), key=lambda f: rank(f.name.replace(".metadata", "_")))
    parts = [expected(pickle.loads(f.read_bytes())) for f in files]
    union = dump(*files)
    want = {}
    for part in parts:
        for t in part["tensors"]:
            boxes = want.setdefault(t["fqn"], {})
            for c in t["chunks"]:
                boxes.setdefault((*c["offsets"], *c["sizes"]), c)
    got = {t["fqn"]: {(*c["offsets"], *c["sizes"]): c for c in t["chunks"]} for t in union["tensors"]}
    assert got == want
    assert [v["fqn"] for v in union["values"]] == list(dict.fromkeys(v["fqn"] for p in parts for v in p["values"]))
    first = {}
    for part in parts:
        for v in part["values"]:
            first.setdefault(v["fqn"], v)
    assert {v["fqn"]: v for v in union["values"]} == first


def handmade():
    """Everything the fixtures lack: large numbers, surrogates, odd keys, five dims, wrong hints, transforms, a tensor in two files."""
    size = torch.Size
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    fqn = "emb\udc80\ud83d \U0001f600.\x00weight"
    state = {
        fqn: metadata.TensorStorageMetadata(properties, size((4, 1 << 33)), [
            metadata.ChunkStorageMetadata(size((2, 0)), size((2, 1 << 33))),
            metadata.ChunkStorageMetadata(size((0, 0)), size((2, 1 << 33)))]),
        "__metadata__": metadata.TensorStorageMetadata(properties, size(()), [
            metadata.ChunkStorageMetadata(size(()), size(()))]),
        "five": metadata.TensorStorageMetadata(properties, size((1, 2, 3, 4, 5)), [
            metadata.ChunkStorageMetadata(size((0,) * 5), size((1, 2, 3, 4, 5)))]),
        "": metadata.BytesStorageMetadata(),
        "n\n'\\u0041\xe9\u20ac": metadata.BytesStorageMetadata(),
    }
    index = metadata.MetadataIndex
    storage = {
        index(fqn, size((2, 0)), 1): filesystem._StorageInfo("sub/__7_0.distcp", (1 << 40) + 3, 1 << 35),
        index(fqn, size((0, 0)), 77): filesystem._StorageInfo("__3_1.distcp", 1 << 31, (1 << 31) - 1, ["stream.zstd/1"]),
        index("__metadata__", size(())): filesystem._StorageInfo("__3_1.distcp", (1 << 62), 255),
        index("five", size((0,) * 5), 0): filesystem._StorageInfo("odd name", 65535, 65536),
        index(""): filesystem._StorageInfo("__0_0.distcp", 0, 256),
        index("n\n'\\u0041\xe9\u20ac"): filesystem._StorageInfo("__0_0.distcp", 256, 1, ["a", "b/2"]),
        index("nobody asks", size((1,))): filesystem._StorageInfo("../../etc/passwd", 0, 1),
    }
    paths = {"five": ("a", 0, "b", -5, ""), "": ("",), fqn: ("emb\udc80", 1 << 40), "gone": ("gone",)}
    md = metadata.Metadata(state, paths, storage, metadata.StorageMeta(pathlib.PurePosixPath("/x/y"), "id"), "1.0.0")
    md.mcore_data = {"anything": print, "else": {1, 2.5, 1j, frozenset((b"b", bytearray(b"c"))[:1])}}
    return md


@pytest.mark.parametrize("optimized", [False, True], ids=["", "optimized"])
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps], ids=["c", "python"])
def test_every_protocol(protocol, pickler, optimized, tmp_path):
    bytes_ = pickler(handmade(), protocol=protocol)
    if optimized:
        bytes_ = pickletools.optimize(bytes_)
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_bytes(bytes_ + b"behind STOP")
    want = expected(handmade())
    assert dump(file, "--rewrite", out) == want
    again = pickle.loads(out.read_bytes())
    fallback = {fqn: (fqn,) for fqn in again.state_dict_metadata if fqn not in handmade().planner_data}
    assert {k: tuple(v) for k, v in again.planner_data.items()} == \
        {**fallback, **{k: v for k, v in handmade().planner_data.items() if k != "gone"}}
    again.planner_data = handmade().planner_data
    assert expected(again) == want


def test_pure_python_memo_without_sharing(tmp_path):
    """A pickler in fast mode memoizes nothing: every string and size is there once per use."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 4)
    pickler.fast = True
    pickler.dump(handmade())
    (tmp_path / "in").write_bytes(buffer.getvalue())
    assert dump(tmp_path / "in") == expected(handmade())


def test_nothing_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "executed"),)

    md = handmade()
    md.evil = Evil()
    (tmp_path / "in").write_bytes(pickle.dumps(md))
    assert dump(tmp_path / "in") == expected(handmade())
    (tmp_path / "in").write_bytes(pickle.dumps(Evil()))
    done = subprocess.run([TOOL, tmp_path / "in"], capture_output=True, text=True)
    assert done.returncode == 1 and "posix.system" in done.stderr
    assert not (tmp_path / "executed").exists()


def mutations():
    """(name, change of a Metadata, what the message says)"""
    def set_(fqn, **attributes):
        def change(md):
            for key, value in attributes.items():
                setattr(md.state_dict_metadata[fqn], key, value)
        return change

    def chunk(offsets, sizes):
        def change(md):
            md.state_dict_metadata["five"].chunks.append(
                metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return change

    def info(**attributes):
        def change(md):
            for key, value in attributes.items():
                setattr(md.storage_data[metadata.MetadataIndex("five", torch.Size((0,) * 5))], key, value)
        return change

    def drop(md):
        del md.storage_data[metadata.MetadataIndex("")]

    yield "outside", chunk((1, 0, 0, 0, 0), (1, 2, 3, 4, 5)), "outside"
    yield "twice", chunk((0,) * 5, (1, 1, 1, 1, 1)), "two chunks"
    yield "unplaced", chunk((0, 1, 0, 0, 0), (1, 1, 3, 4, 5)), "no entry for the chunk"
    yield "ndim", chunk((0,), (1,)), "dims"
    yield "negative", chunk((0, 0, 0, 0, -1), (1, 2, 3, 4, 1)), "is -1"
    yield "value", drop, "no entry for the value"
    yield "kind", lambda md: md.state_dict_metadata.update(five=[1]), "neither a tensor nor a value but a list"
    yield "overflow", set_("five", size=torch.Size((1 << 40, 1 << 40, 1, 1, 1))), "too many elements"
    yield "dims", set_("five", size=torch.Size((1,) * 65)), "65 dims"
    yield "chunks", set_("five", chunks=None), "no list"
    yield "properties", set_("five", properties={}), "TensorProperties"
    yield "dotdot", info(relative_path="../x"), "no name of a file"
    yield "absolute", info(relative_path="/etc/passwd"), "no name of a file"
    yield "empty part", info(relative_path="a//b"), "no name of a file"
    yield "offset", info(offset=-1), "cannot be"
    yield "length", info(length=1 << 63), "cannot be"
    yield "end", info(offset=(1 << 63) - 1, length=1), "cannot be"
    yield "path type", info(relative_path=5), "no name of a file"
    yield "planner", lambda md: md.planner_data.update(five=(1.5,)), "no str or int"
    yield "quantized", set_("five", properties=metadata.TensorProperties(dtype=torch.qint8)), "qint8"


@pytest.mark.parametrize("name, change, says", list(mutations()), ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_names_its_fqn(name, change, says, tmp_path):
    md = handmade()
    change(md)
    (tmp_path / "in").write_bytes(pickle.dumps(md))
    done = subprocess.run([TOOL, tmp_path / "in"], capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr, done.stderr
    assert ("fqn ''" in done.stderr) == (name == "value"), done.stderr
