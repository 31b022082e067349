"""torch.save files as a source: by every torch.save there is (zip, legacy stream, old pickle protocols), read by every path of dcpd, and
compared with what PyTorch's own DCP makes of the same state dict; damage in them is found; what is not data is refused by name."""
import argparse
import collections
import json
import pickle
import struct
import warnings
import zipfile

import dcpd as lib
import package
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

HERE = {"storage": "main"}
DTYPES = [getattr(torch, n) for n in (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64 complex32 float8_e4m3fn "
    "float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu").split()]


def of_dtype(dtype, n=24):
    size = torch.empty(0, dtype=dtype).element_size()
    pattern = torch.arange(n * size, dtype=torch.int64).to(torch.uint8)
    return (pattern % 2).bool()[:n] if dtype == torch.bool else pattern.view(dtype)


def everything():
    base = torch.arange(600.0).reshape(20, 30)
    tied = torch.randn(40, 8)
    return {
        "dtypes": {str(t): of_dtype(t) for t in DTYPES},
        "views": {"base": base, "row": base[3], "column": base[:, 4], "part": base[2:9:3, 5:17], "t": base.t(),
                  "expanded": base[1].expand(5, 30)},
        "tied": [{"a": tied}, {"b": tied}],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "lazy": {"conj": torch.randn(6, dtype=torch.complex64).conj(), "neg": torch.randn(4, dtype=torch.complex64).conj().imag},
        "big": torch.arange(3_000_001, dtype=torch.int32),
        "ordered": collections.OrderedDict(x=torch.ones(3), y=collections.OrderedDict(z=torch.zeros(2, 2))),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4)}, 1: {"step": torch.tensor(4.0)}},
                      "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}]},
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "none": None, "yes": True, "int": 7, "huge": 1 << 80, "float": 0.5,
        "text": "Grüße", "bytes": b"\x00\xff", "list": [1, [2, "x"]], "tuple": (1, None), "set": {3}, "complex": 1 + 2j,
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    }


def flat(state):
    return flatten_state_dict(state)[0]


def put(d, name, state, **options):
    path = d.storages["main"] / name
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path, **options)
    return {**HERE, "name": name}


def as_bytes(t):
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def equal(got, want, where=""):
    assert type(got) is type(want) or isinstance(want, torch.Tensor), (where, type(got), type(want))
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, (where, got.dtype, got.shape)
        assert torch.equal(as_bytes(got), as_bytes(want)), where
    else:
        assert got == want, (where, got, want)


def same(got, want):
    """Flat state dicts."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for k, v in want.items():
        equal(got[k], v, k)


def by_dcp(d, name, want):
    """What PyTorch loads from a DCP checkpoint, of the keys in `want`."""
    got = {k: torch.empty(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else None for k, v in want.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(got, storage_reader=dcp.FileSystemReader(str(d.storages["main"] / name)))
    return got


def keys_of(d, name):
    meta = dcp.FileSystemReader(str(d.storages["main"] / name)).read_metadata()
    return {k: v for k, v in meta.planner_data.items()}


OPTIONS = [{}, {"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}, {"pickle_protocol": 5}]


@pytest.mark.parametrize("options", OPTIONS, ids=["zip", "legacy", "protocol4", "protocol5"])
def test_to_dcp(d, options):
    """Reshard to DCP: FQNs, paths, tensors and values are those that PyTorch's own save of the state dict has."""
    state, name = everything(), lib.fresh() + ".pt"
    if "_use_new_zipfile_serialization" in options:
        del state["dtypes"][str(torch.complex32)]  # has no legacy storage class
    source = put(d, name, state, **options)
    want = flat(state)
    done = d.api.run("reshard", source=source, target={**HERE, "name": name[:-3], "world_size": 3,
                                                       "layout": [{"match": "big", "placements": ["Shard(0)"], "mesh": [3]}]})["result"]
    same(by_dcp(d, name[:-3], want), want)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / (name + "-torch"))), no_dist=True)
    assert keys_of(d, name[:-3]) == keys_of(d, name + "-torch")
    assert d.api.run("diff", a=source, b={**HERE, "name": name[:-3]})["result"]["equal"]
    assert done["tensors"] == sum(isinstance(v, torch.Tensor) for v in want.values())


def test_shown(d):
    state, name = everything(), lib.fresh() + ".weights"  # recognised by what is in it
    put(d, name, state)
    shown = d.api.get(d.api.storage_path("main", name)).ok()
    want = flat(state)
    tensors = {k: v for k, v in want.items() if isinstance(v, torch.Tensor)}
    assert shown["format"] == "torch" and shown["files"] == 1 and shown["tensors"] == len(tensors)
    assert shown["values"] == len(want) - len(tensors)
    assert [c["format"] for c in d.api.get(f"/v1/checkpoints/main?prefix={name}").ok()["checkpoints"]] == ["torch"]
    listed = d.api.get(d.api.storage_path("main", name, "/tensors?page_size=1000")).ok()
    assert {t["fqn"]: t["shape"] for t in listed["tensors"]} == {k: list(v.shape) for k, v in tensors.items()}
    values = {v["fqn"]: v.get("value", v.get("opaque")) for v in listed["values"]}
    assert values["int"] == 7 and values["none"] is None and values["text"] == "Grüße" and values["list"] == [1, [2, "x"]]
    assert values["args"] == "argparse.Namespace" and values["size"] == "torch.Size"
    for fqn in ("views.t", "views.part", "lazy.conj", "big", "scalar", "views.expanded"):
        r = d.api.get(d.api.storage_path("main", name, f"/tensors/{fqn}?format=raw"))
        assert r.status == 200 and r.body == as_bytes(tensors[fqn]).numpy().tobytes(), fqn
    r = d.api.get(d.api.storage_path("main", name, "/tensors/views.t?slice=2:5,7:9&format=raw"))
    assert r.body == state["views"]["t"][2:5, 7:9].contiguous().numpy().tobytes()


def test_load(d):
    """By the package: new tensors, and into tensors that are there."""
    state, name = {k: v for k, v in everything().items() if k != "dtypes"}, lib.fresh() + ".pt"
    source = put(d, name, state)
    tensors = {k: v for k, v in flat(state).items() if isinstance(v, torch.Tensor)}
    with package.daemon(f"unix://{d.socket}") as dcpd, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = flat(dcpd.load(f"main:{source['name']}"))
        same({k: got[k] for k in tensors}, tensors)
        into = {"big": torch.zeros(3_000_001, dtype=torch.int32), "views": {"t": torch.zeros(30, 20)}}
        dcpd.load(f"main:{source['name']}", into=into, strict=False)
    assert torch.equal(into["big"], state["big"]) and torch.equal(into["views"]["t"], state["views"]["t"])


def test_index(d):
    """A directory of shards, as Hugging Face's libraries wrote them."""
    name, a, b = lib.fresh(), {"x": torch.randn(5), "y": torch.ones(2, 2)}, {"z": torch.arange(9), "y": torch.zeros(7)}
    put(d, name + "/pytorch_model-00001-of-00002.bin", a)
    put(d, name + "/pytorch_model-00002-of-00002.bin", b)
    index = d.storages["main"] / name / "pytorch_model.bin.index.json"
    files = {k: f"pytorch_model-0000{i}-of-00002.bin" for k, i in (("x", 1), ("y", 1), ("z", 2))}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert d.api.get(d.api.storage_path("main", name)).ok()["format"] == "torch"
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + "-dcp"})
    want = {**a, "z": b["z"]}
    same(by_dcp(d, name + "-dcp", want), want)
    d.api.run("verify", source={**HERE, "name": name}, level="digest")
    for wrong in ({**files, "q": files["x"]}, {**files, "x": "gone.bin"}):
        index.write_text(json.dumps({"metadata": {}, "weight_map": wrong}))
        assert d.api.fails("reshard", "checkpoint_incomplete", source={**HERE, "name": name}, target={**HERE, "name": name + "-no"})["file"]


def test_verify(d):
    """CRC32s of records: of storages with one tensor, with several views, and of the pickle."""
    base = torch.arange(40_000, dtype=torch.int16)
    state = {"whole": torch.randn(1000, 300), "a": base[:20_000], "b": base[30_000:], "nan": torch.tensor([1.0, float("nan")])}
    name = lib.fresh() + ".pt"
    source = put(d, name, state)
    done = d.api.run("verify", source=source, level="digest")["result"]
    assert done["unverified_bytes"] == 0 and done["verified_bytes"] == state["whole"].nbytes + base.nbytes + 8
    assert [n["fqn"] for n in d.api.run("verify", source=source, level="values")["result"]["nan"]] == ["nan"]
    path = d.storages["main"] / name
    data = path.read_bytes()
    at = {"whole": data.index(state["whole"].numpy().tobytes()) + 5000, "a": data.index(base.numpy().tobytes()) + 50_000}
    for fqn, offset in at.items():
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1:])
        error = d.api.fails("verify", "digest_mismatch", "checkpoint_damaged", source=source, level="digest")
        assert error["fqn"] == fqn and error["file"] == name, error
        if fqn == "whole":
            d.api.fails("reshard", "digest_mismatch", source=source, target={**HERE, "name": name + "-no"})
    offset = data.index(b"data.pkl") + 40
    path.write_bytes(data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1:])
    d.api.fails("verify", "digest_mismatch", "format_pickle", "format_zip", source=source)


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_refused(d):
    """Whatever is not data is refused by name; nothing of it runs."""
    cases = {
        "sparse": ({"x": torch.eye(3).to_sparse()}, "_rebuild_sparse_tensor", "x"),
        "quantized": ({"x": {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}}, "_rebuild_qtensor", "x.q"),
        "nested": ({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "_rebuild_nested_tensor", "x"),
        "module": (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear", ""),
        "tuple": ({"x": (torch.ones(2), 1)}, "persistent id", "x"),
        "key": ({"x": {(1, 2): torch.ones(2)}}, "tuple", "x"),
        "meta": ({"x": torch.ones(2, device="meta")}, "_rebuild_meta_tensor_no_storage", "x"),
    }
    for what, (state, text, fqn) in cases.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = put(d, f"{lib.fresh()}-{what}.pt", state)
        error = d.api.fails("reshard", "format_item", "format_unsupported", "format_pickle", source=source,
                            target={**HERE, "name": lib.fresh()})
        assert text in error["detail"] and error.get("fqn", "") == fqn and error["file"] == source["name"], (what, error)
        if "_rebuild_" in text:
            assert error["code"] == d.api.fails("verify", "format_unsupported", source=source)["code"], "the file is not damaged"
            only = {k: v for k, v in state.items() if k != fqn.split(".")[0]} | {"y": torch.arange(4.)}
            both = put(d, f"{lib.fresh()}-{what}.pt", {**state, **only})
            listed = d.api.get(d.api.storage_path("main", both["name"], "/tensors")).ok()
            assert [t["fqn"] for t in listed["tensors"]] == ["y"]
            assert [(v["fqn"], text in v["opaque"]) for v in listed["values"]] == [(fqn, True)]
            name = lib.fresh()
            d.api.fails("reshard", "format_unsupported", source=both, target={**HERE, "name": name}, include=["y", fqn])
            for left in ({"exclude": [fqn]}, {"include": ["y"]}):
                d.api.run("reshard", source=both, target={**HERE, "name": name}, options={"overwrite": True}, **left)
                same(by_dcp(d, name, {"y": torch.zeros(4)}), {"y": torch.arange(4.)})
                d.api.run("verify", source=both, **left)
            d.api.fails("delta", "format_unsupported", base=both, source=both, target={**HERE, "name": name + "-delta"})
            if what != "meta":  # has no storage, and is no tensor to a legacy stream either
                old = put(d, f"{lib.fresh()}-old.pt", {**state, **only, "z": torch.arange(7)}, _use_new_zipfile_serialization=False)
                d.api.fails("reshard", "format_unsupported", source=old, target={**HERE, "name": name}, options={"overwrite": True})
                d.api.run("reshard", source=old, target={**HERE, "name": name}, options={"overwrite": True}, exclude=[fqn])
                same(by_dcp(d, name, {"y": torch.zeros(4), "z": torch.zeros(7, dtype=torch.int64)}),
                     {"y": torch.arange(4.), "z": torch.arange(7)})
    name = lib.fresh() + ".pt"
    put(d, name, {"x": torch.ones(3), "evil": Evil()})
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + "-dcp"})
    same(by_dcp(d, name + "-dcp", {"x": torch.ones(3)}), {"x": torch.ones(3)})


def test_containers_that_are_refused(d):
    name = lib.fresh() + ".pt"
    path = d.storages["main"] / name
    torch.save({"x": torch.arange(5000.0), "y": torch.ones(3)}, path)
    data = path.read_bytes()

    def packed(change=lambda n, b: (n, b), **options):
        with zipfile.ZipFile(path) as old:
            records = [(n, old.read(n)) for n in old.namelist()]
        with zipfile.ZipFile(path, "w", **options) as new:
            for r in records:
                new.writestr(*change(*r))

    def fails(*codes):
        error = d.api.fails("reshard", *codes, source={**HERE, "name": name}, target={**HERE, "name": lib.fresh()})
        assert error["file"] == name, error
        return error

    packed(compression=zipfile.ZIP_DEFLATED)
    assert "compressed" in fails("format_unsupported")["detail"]
    path.write_bytes(data)
    packed(lambda n, b: (n, b"big" if n.endswith("byteorder") else b))
    assert "big-endian" in fails("format_unsupported")["detail"]
    path.write_bytes(data)
    packed(lambda n, b: (n, b[:-4] if n.endswith("data/0") else b))
    assert "data/0" in fails("format_item")["detail"]
    path.write_bytes(data)
    packed(lambda n, b: ("../../etc/" + n if n.endswith("data/1") else n, b))
    fails("format_zip")
    path.write_bytes(b"sys_info".ljust(257, b"\0") + b"ustar".ljust(255, b"\0"))
    assert "tar archive" in fails("format_unsupported")["detail"]
    for n in (0, 3, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        fails("format_item", "format_zip")


def test_legacy_lies(d):
    name = lib.fresh() + ".pt"
    path = d.storages["main"] / name
    torch.save({"x": torch.arange(50.0), "y": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    at = data.index(torch.arange(50.0).numpy().tobytes()) - 8
    for lie in (51, -1, 1 << 61, 49):
        path.write_bytes(data[:at] + struct.pack("<q", lie) + data[at + 8:])
        error = d.api.fails("reshard", "format_item", "limit_exceeded", source={**HERE, "name": name}, target={**HERE, "name": lib.fresh()})
        assert error["file"] == name
    path.write_bytes(data[:-1])
    d.api.fails("reshard", "format_item", source={**HERE, "name": name}, target={**HERE, "name": lib.fresh()})


def test_a_graph_without_end(d):
    """A list that holds itself, and lists of lists that are one: the walk ends."""
    loop = [torch.ones(1)]
    loop.append(loop)
    bomb = [torch.ones(1)]
    for _ in range(50):
        bomb = [bomb, bomb]
    for state in ({"x": loop}, {"x": bomb}):
        source = put(d, lib.fresh() + ".pt", state)
        d.api.fails("reshard", "limit_exceeded", "duplicate_key", source=source, target={**HERE, "name": lib.fresh()})


def test_zip64(d):
    """A sparse file of more than 4 GiB: only what is wanted is read."""
    name = lib.fresh() + ".pt"
    path = d.storages["main"] / name
    skeleton = {"huge": torch.empty(5 << 30, dtype=torch.uint8, device="meta"), "last": torch.empty(3, device="meta")}
    with torch.serialization.skip_data():
        torch.save({k: torch.empty_like(v, device="cpu") for k, v in skeleton.items()}, path)
    with zipfile.ZipFile(path) as z:
        info = z.getinfo(z.namelist()[0][: -len("data.pkl")] + "data/1")
    with open(path, "r+b") as f:
        f.seek(info.header_offset)
        head = f.read(30)
        f.seek(info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"))
        f.write(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes())
    r = d.api.get(d.api.storage_path("main", name, "/tensors/last?format=raw&verify=none"))
    assert r.body == torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes(), r.body
    r = d.api.get(d.api.storage_path("main", name, f"/tensors/huge?slice={(5 << 30) - 9}:&format=raw&verify=none"))
    assert r.body == bytes(9)
    path.unlink()


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5), st.just((1, "x")),
    st.builds(lambda t, n: of_dtype(t, n), st.sampled_from(DTYPES[:12]), st.integers(0, 5)),
    st.builds(lambda a, b: torch.arange(float(a * b)).reshape(a, b).t(), st.integers(0, 4), st.integers(0, 4)))
trees = st.recursive(leaves, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=4), st.integers(-3, 99)), inner, max_size=3)), max_leaves=12)


@settings(max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1, max_size=5), trees, min_size=1, max_size=4), st.sampled_from(OPTIONS))
def test_any_tree(d, state, options):
    try:
        want = flat(state)
    except ValueError:  # "duplicated flatten key"
        want = None
    source = put(d, lib.fresh() + ".pt", state, **options)
    target = {**HERE, "name": source["name"] + "-dcp"}
    if want is None:
        d.api.fails("reshard", "duplicate_key", source=source, target=target)
    else:
        d.api.run("reshard", source=source, target=target)
        same(by_dcp(d, target["name"], want), want)


def test_pickled_by_hand(d):
    """The DCP value of an opaque object is the object."""
    name = lib.fresh() + ".pt"
    state = {"w": torch.ones(2), "args": argparse.Namespace(a=[1, {"b": (2,)}]), "deque": collections.deque([1, 2], 5)}
    put(d, name, state)
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + "-dcp"})
    got = by_dcp(d, name + "-dcp", state)
    assert got["args"] == state["args"] and got["deque"] == state["deque"] and got["deque"].maxlen == 5
    assert pickle.dumps(got["args"])


# ------------------------------------------------------------------------------------------------------------- as a target


def opened(d, name, **options):
    """What torch.load makes of a file of dcpd's, by every way that it has, which all agree."""
    path = d.storages["main"] / name
    got = torch.load(path, **{"weights_only": True, "mmap": True, **options})
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None  # every CRC32
    return got


def test_written(d):
    """DCP of several ranks → one file; the state dict is nested as it was, storages begin at multiples of 64."""
    state, name = everything(), lib.fresh()
    for key in ("args", "set", "complex", "dtype"):  # no torch.load(weights_only=True) takes them
        del state[key]
    state["optimizer"]["state"] = {"0": state["optimizer"]["state"][0]}  # DCP makes text of keys that are ints
    del state["tuple"], state["bytes"]
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / name)), no_dist=True)
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name + "-4", "world_size": 4, "layout": [
        {"match": "big", "placements": ["Shard(0)"], "mesh": [4]}]})
    job = d.api.run("reshard", source={**HERE, "name": name + "-4"}, target={**HERE, "name": name + ".pt", "format": "torch"})
    got = opened(d, name + ".pt")
    same(flat(got), flat(state))
    assert list(got) == list(state) and got["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert job["result"]["files"] == 1 and not [p for p in (d.storages["main"]).glob(".dcpd-*") if name in p.name]
    with zipfile.ZipFile(d.storages["main"] / (name + ".pt")) as z:
        data = (d.storages["main"] / (name + ".pt")).read_bytes()
        for info in z.infolist():
            head = data[info.header_offset:info.header_offset + 30]
            at = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            assert "/data/" not in info.filename or at % 64 == 0, info
    done = d.api.run("verify", source={**HERE, "name": name + ".pt"}, level="digest")["result"]
    assert done["unverified_bytes"] == 0
    for other in (name, name + "-4"):
        assert d.api.run("diff", a={**HERE, "name": name + ".pt"}, b={**HERE, "name": other})["result"]["equal"]


def test_file_to_file(d):
    """torch.save → dcpd → torch.load: views become tensors of their own, keys that are ints stay so, objects stay what they were."""
    state, name = everything(), lib.fresh()
    put(d, name + ".pt", state)
    d.api.run("reshard", source={**HERE, "name": name + ".pt"}, target={**HERE, "name": name + ".bin", "format": "torch"})
    got = opened(d, name + ".bin", weights_only=False)
    same(flat(got), flat(state))
    assert got["optimizer"]["state"].keys() == {0, 1} and got["args"] == state["args"] and got["size"] == torch.Size([2, 3])
    assert got["parameter"].requires_grad and not got["big"].requires_grad
    r = d.ctl("reshard", f"main:{name}.bin", f"main:{name}.pth", "--format", "torch")
    assert r.returncode == 0, r
    same(flat(opened(d, name + ".pth", weights_only=False)), flat(state))
    assert d.ctl("verify", f"main:{name}.pth").returncode == 0
    error = d.api.fails("reshard", "name_invalid", source={**HERE, "name": name + ".pt"}, target={**HERE, "name": name, "format": "torch"})
    assert ".pt" in error["detail"]


def test_written_from_safetensors(d):
    """Names without paths are the keys of one dict."""
    name, state = lib.fresh(), {"a.b": torch.randn(5), "a": torch.ones(2, dtype=torch.bfloat16), "e": torch.empty(0)}
    path = d.storages["main"] / (name + ".safetensors")
    save_file(state, path)
    d.api.run("reshard", source={**HERE, "name": path.name}, target={**HERE, "name": name + ".pt", "format": "torch"})
    same(opened(d, name + ".pt"), state)


@pytest.mark.long
def test_overwrite(d):
    """A file is replaced only where that is asked for; a job that fails leaves the old one, and nothing else."""
    name, one, two = lib.fresh(), {"x": torch.ones(3)}, {"x": torch.arange(2_000_000.0)}
    put(d, name + "-1.pt", one)
    put(d, name + "-2.pt", two)
    target = {**HERE, "name": name + ".pt", "format": "torch"}
    d.api.run("reshard", source={**HERE, "name": name + "-1.pt"}, target=target)
    d.api.fails("reshard", "checkpoint_exists", source={**HERE, "name": name + "-2.pt"}, target=target)
    data = bytearray((d.storages["main"] / (name + "-2.pt")).read_bytes())
    data[len(data) // 2] ^= 1
    (d.storages["main"] / (name + "-3.pt")).write_bytes(data)
    d.api.fails("reshard", "digest_mismatch", source={**HERE, "name": name + "-3.pt"}, target=target, options={"overwrite": True})
    same(opened(d, name + ".pt"), one)
    d.api.run("reshard", source={**HERE, "name": name + "-2.pt"}, target=target, options={"overwrite": True})
    same(opened(d, name + ".pt"), two)


@settings(max_examples=20, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(min_size=1, max_size=5), trees, min_size=1, max_size=4))
def test_any_tree_written(d, state):
    """A tree that dcpd writes is the tree that PyTorch's unflattening gives, with keys that are ints as they were."""
    try:
        want = flat(unflatten_state_dict(*flatten_state_dict(state)))  # empty containers are gone
    except (ValueError, TypeError):
        return
    source = put(d, lib.fresh() + ".pt", state)
    target = {**HERE, "name": source["name"] + ".pt", "format": "torch"}
    d.api.run("reshard", source=source, target=target)
    got = opened(d, target["name"], weights_only=False)
    same(flat(got), want)


@pytest.mark.slow
def test_a_million_tensors_are_written_and_read(d):
    """The pickle's objects need more memory than the pickle has bytes."""
    name = lib.fresh()
    save_file({f"layer.{i // 100}.block.{i % 100}.w": torch.zeros(1) for i in range(1_000_000)}, d.storages["main"] / f"{name}.safetensors")
    d.api.run("reshard", source={"storage": "main", "name": f"{name}.safetensors"},
              target={"storage": "main", "name": f"{name}.pt", "format": "torch"})
    assert d.api.run("verify", source={"storage": "main", "name": f"{name}.pt"})["result"]["tensors"] == 1_000_000
