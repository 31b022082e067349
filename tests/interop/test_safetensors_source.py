"""safetensors as a source: written by the safetensors library (with and without an index, tied weights, a file by itself) and by dcpd; read
by every path, and damage in what dcpd wrote is found."""
import json
import pathlib
import struct
import warnings

import package
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import dcpd as lib

HERE = {"storage": "main"}


def tensors():
    made = {
        "w": torch.arange(3000 * 1000).reshape(3000, 1000).float(),
        "half": torch.arange(1_000_003).to(torch.bfloat16),
        "odd": torch.arange(7, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }
    for t in (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        made[str(t)] = torch.arange(10).to(t)
    return made


def put(d, name, files, index=None):
    path = d.storages["main"] / name
    path.mkdir(parents=True)
    for file, state in files.items():
        save_file(state, path / file, metadata={"format": "pt"})
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return {**HERE, "name": name}


def by_dcp(d, name, like):
    got = {k: torch.empty_like(v) for k, v in like.items()}
    dcp.load(got, storage_reader=dcp.FileSystemReader(str(d.storages["main"] / name)))
    return got


def same(got, want):
    assert got.keys() == want.keys()
    for k, v in want.items():
        assert got[k].dtype == v.dtype and got[k].shape == v.shape, k
        assert torch.equal(got[k].contiguous().view(-1).view(torch.uint8), v.contiguous().view(-1).view(torch.uint8)), k


@pytest.mark.parametrize("indexed", [False, True])
def test_to_dcp_and_back(d, indexed):
    want = tensors()
    a, b = dict(list(want.items())[:3]), dict(list(want.items())[3:])
    files = {"model-00001-of-00002.safetensors": a, "model-00002-of-00002.safetensors": b}
    index = {k: f for f, state in files.items() for k in state} if indexed else None
    source = put(d, lib.fresh(), files, index)
    done = d.api.run("reshard", source=source, target={**HERE, "name": source["name"] + "-dcp", "world_size": 3,
                                                       "layout": [{"match": "w", "placements": ["Shard(1)"], "mesh": [3]}]})
    same(by_dcp(d, source["name"] + "-dcp", want), want)
    assert done["result"]["verified_bytes"] == 0
    assert done["result"]["unverified_bytes"] >= sum(v.nbytes for v in want.values())  # nobody wrote a digest
    d.api.run("reshard", source={**HERE, "name": source["name"] + "-dcp"},
              target={**HERE, "name": source["name"] + "-hf", "format": "safetensors"})
    written = d.storages["main"] / (source["name"] + "-hf")
    same({k: v for f in written.glob("*.safetensors") for k, v in load_file(f).items()}, want)
    for x in ("-dcp", "-hf"):
        assert d.api.run("diff", a=source, b={**HERE, "name": source["name"] + x})["result"]["equal"]
    verified = d.api.run("verify", source={**HERE, "name": source["name"] + "-hf"}, level="values")["result"]
    assert verified["unverifiable"] == 0 and verified["unverified_bytes"] == 0
    assert verified["verified_bytes"] == sum(v.nbytes for v in want.values())


def test_tied_weights(d):
    """Of a tensor that two files have the index names one; without an index that is an error which names both."""
    one, other, two = torch.zeros(4), torch.zeros(5), torch.ones(4)
    files = {"a.safetensors": {"x": one, "y": other}, "b.safetensors": {"x": two}}
    source = put(d, lib.fresh(), files, {"x": "b.safetensors", "y": "a.safetensors"})
    d.api.run("reshard", source=source, target={**HERE, "name": source["name"] + "-dcp"})
    same(by_dcp(d, source["name"] + "-dcp", {"x": one, "y": other}), {"x": two, "y": other})
    source = put(d, lib.fresh(), files)
    error = d.api.fails("verify", "duplicate_key", "checkpoint_damaged", source=source)
    assert error["code"] == "duplicate_key" and error["fqn"] == "x" and error["file"] == "b.safetensors"


def test_one_file(d):
    want = tensors()
    name = lib.fresh() + "/model.safetensors"
    path = d.storages["main"] / name
    path.parent.mkdir()
    save_file(want, path)
    save_file({"another": torch.zeros(3)}, path.parent / "other.safetensors")
    shown = d.api.get(d.api.storage_path("main", name)).ok()
    assert shown["format"] == "safetensors" and shown["tensors"] == len(want) and shown["files"] == 1
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": name.split("/")[0] + "-dcp"})
    same(by_dcp(d, name.split("/")[0] + "-dcp", want), want)


def test_slice(d):
    want = tensors()
    source = put(d, lib.fresh(), {"model.safetensors": want})
    r = d.api.get(d.api.storage_path("main", source["name"], "/tensors/w?slice=10:20,5:9&format=raw"))
    assert r.body == want["w"][10:20, 5:9].contiguous().numpy().tobytes()
    assert int(r.headers["Dcpd-Unverified-Bytes"]) > 0


def test_what_is_wrong(d):
    w = {"x": torch.arange(64.0)}
    file = "model.safetensors"
    cases = [
        ({"x": file, "y": file}, "checkpoint_incomplete", None),
        ({"x": "gone.safetensors"}, "checkpoint_incomplete", None),
        ({"x": "../" + file}, "format_safetensors", None),
        ({"x": ".hidden"}, "format_safetensors", None),
        ({"x": 3}, "format_safetensors", None),
        (None, "format_safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1])),
        (None, "format_safetensors", lambda p: p.write_bytes(b"\xff" * 8)),
        (None, "format_safetensors", lambda p: p.write_bytes(b"")),
    ]
    for index, code, spoil in cases:
        source = put(d, lib.fresh(), {file: w}, index)
        if spoil:
            spoil(d.storages["main"] / source["name"] / file)
        error = d.api.fails("reshard", code, source=source, target={**HERE, "name": source["name"] + "-dcp"})
        assert error["file"], (index, error)


def test_damage_in_what_dcpd_wrote(d):
    """A flipped bit of the header, of a payload or of the index is an error that names the file; nothing is laundered."""
    want = {k: v for k, v in tensors().items() if k in ("half", "odd", "scalar")}
    name = lib.fresh()
    d.api.run("reshard", source=put(d, name + "-src", {"m.safetensors": want}), target={**HERE, "name": name, "format": "safetensors"})
    folder = d.storages["main"] / name
    payload = next(folder.glob("*.safetensors"))
    whole = payload.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    at_dtype = whole.index(b"BF16")
    for file, at in ((payload, at_dtype), (payload, head + 1000), (payload, len(whole) - 1), (folder / "model.safetensors.index.json", 60)):
        data = bytearray(pathlib.Path(file).read_bytes())
        data[at] ^= 1
        pathlib.Path(file).write_bytes(data)
        codes = "digest_mismatch", "checkpoint_damaged"
        error = d.api.fails("reshard", *codes, source={**HERE, "name": name}, target={**HERE, "name": lib.fresh()})
        assert error["file"] == file.name, (at, error)
        d.api.fails("verify", *codes, source={**HERE, "name": name})
        data[at] ^= 1
        pathlib.Path(file).write_bytes(data)
    d.api.run("verify", source={**HERE, "name": name})


def test_load(d):
    """By the package: all of it as new tensors, and into tensors that are there."""
    want = tensors()
    source = put(d, lib.fresh(), {"model.safetensors": want})
    with package.daemon(f"unix://{d.socket}") as dcpd, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing to compare it with
        same(dcpd.load(f"main:{source['name']}"), want)
        into = {k: torch.zeros_like(v) for k, v in want.items()}
        dcpd.load(f"main:{source['name']}", into=into)
        same(into, want)


def by_hand(d, **tensors):
    """A directory whose only file holds bytes of these names; the safetensors library is not asked."""
    name, at, head = lib.fresh(), 0, {}
    for fqn, data in tensors.items():
        head[fqn] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    (d.storages["main"] / name).mkdir()
    (d.storages["main"] / name / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))
    return {**HERE, "name": name}


def test_a_name_with_a_nul(spawn):
    """The result of a job that names it is read again, from the journal too, and by dcpctl."""
    d = spawn()
    a, b = by_hand(d, **{"a\0b": b"x"}), by_hand(d, **{"a\0b": b"y"})
    job = d.api.wait(d.api.submit("diff", a=a, b=b))
    assert job["state"] == "succeeded" and "a\\u0000b" in json.dumps(job["result"])
    d.kill()
    d.start()
    assert d.api.get(f"/v1/jobs/{job['id']}").ok(200)["result"] == job["result"]
    for args, status in ((["diff", "main:" + a["name"], "main:" + b["name"]], 1), (["show", "main:" + a["name"], "--tensors", "*"], 0)):
        r = d.ctl(*args)
        assert r.returncode == status and r.stdout.strip(), r


def test_a_name_that_is_too_long(d):
    """A reshard made a checkpoint of it which nobody could read."""
    source = by_hand(d, **{"n" * 70000: b"x"})
    for kind, more in (("verify", {}), ("reshard", {"target": {**HERE, "name": lib.fresh()}})):
        r = d.api.post("/v1/jobs", {"kind": kind, "source": source, **more})
        error = r.json if r.status >= 400 else d.api.wait(r.json)["error"]
        assert error["code"] == "limit_exceeded" and error["file"] == "model.safetensors", error


@pytest.mark.long
def test_every_dtype_of_the_format(d):
    """As safetensors' own writer has them; F4 by its bytes, for the package gives torch none; the two that PyTorch lacks are named."""
    made = {str(t): torch.arange(48, dtype=torch.int64).to(torch.uint8).view(t) if t != torch.bool else torch.arange(6) % 2 == 0 for t in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.uint64, torch.uint32, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
        torch.float8_e5m2, torch.float8_e5m2fnuz)}
    path, name = d.storages["main"] / (lib.fresh() + ".safetensors"), lib.fresh() + ".safetensors"
    save_file(made, path)
    d.api.run("reshard", source={**HERE, "name": path.name}, target={**HERE, "name": name, "format": "safetensors"})
    got = load_file(d.storages["main"] / name)
    for k, v in made.items():
        assert got[k].dtype == v.dtype and torch.equal(got[k].view(torch.uint8), v.view(torch.uint8)), k

    def file(dtype, shape, data):
        head = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head + data)
        return d.api.get(d.api.storage_path("main", path.name, "/tensors"))

    data = bytes(range(12))
    t = file("F4", [2, 3, 4], data).ok()["tensors"][0]
    assert (t["dtype"], t["shape"]) == ("float4_e2m1fn_x2", [2, 3, 2])
    d.api.run("reshard", source={**HERE, "name": path.name}, target={**HERE, "name": name, "format": "safetensors"},
              options={"overwrite": True})
    raw = (d.storages["main"] / name).read_bytes()
    assert raw.endswith(data) and json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["w"] == {
        "dtype": "F4", "shape": [2, 3, 4], "data_offsets": [0, 12]}
    assert file("F8_E8M0", [12], data).ok()["tensors"][0]["dtype"] == "float8_e8m0fnu"
    for dtype, shape, code in (("F4", [3, 3], "format_safetensors"), ("F4", [], "format_safetensors"), ("F4", [12], "format_safetensors"),
                               ("F6_E2M3", [16], "dtype_unsupported"), ("F6_E3M2", [16], "dtype_unsupported")):
        assert file(dtype, shape, data).problem(code)["fqn"] == "w"
