"""The worker by itself: whole jobs over its control socket, with a coordinator that does as worker/ctl/README.md says."""
import json
import os
import pathlib
import shutil
import struct

import pytest

import dcpd as lib
from gang import Gang, Segments, Worker, ask

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
ROWS = "torch-2.15.0/sharded_rowwise/checkpoint"
ZSTD = "torch-2.15.0/zstd/checkpoint"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {"fx": FIXTURES, "out": tmp_path_factory.mktemp("out")}


@pytest.fixture(scope="module")
def gang(roots):
    with Gang(2, roots) as g:
        yield g


def at(name, storage="fx"):
    return {"storage": storage, "name": name}


def done(end):
    assert end.kind == "DONE", end.body
    return end.body.get("result", end.body)


def failed(end, code):
    assert end.kind == "FAILED", end.body
    assert end.body["code"] == code, end.body
    assert end.body["detail"]
    return end.body


def differences(gang, a, b, state_dicts=None):
    return done(gang.job("diff", {"a": a, "b": b}, state_dicts))["differences"]


def cut(world, *placements):
    return {"world_size": world, "layout": [{"match": "*", "placements": list(placements)}]}


# ------------------------------------------------------------------------------------------------------ transforms


@pytest.mark.parametrize("count", [1, 2])
def test_transformed_items_are_spooled_once_and_read_by_all(roots, count):
    with Gang(count, roots) as g:
        loaded = done(g.job("load", {"source": at(ZSTD), "target": {"state_dict": "x", "world_size": 2}}))
        assert loaded["segment_bytes"] == sum(g.made.bytes)
        made = g.made
        assert differences(g, at(ZSTD), {"state_dict": "x"}, {"x": made}) == []
        name = f"unzstd-{count}"
        done(g.job("reshard", {"source": at(ZSTD), "target": {**at(name, "out"), **cut(3, "Shard(1)")}}))
        assert differences(g, {"state_dict": "x"}, at(name, "out"), {"x": made}) == []
        made.close()


def test_a_slice_of_a_transformed_tensor(roots):
    body, fds = ask(roots, op="slice", storage="fx", name=ZSTD, fqn="noise", slice="1:3,4", format="raw")
    want = (FIXTURES / ZSTD).parent / "expected.safetensors"
    whole = lib.Image(want.read_bytes()).entries["noise"][2]
    assert os.pread(fds[0], 100, 0) == whole[(9 + 4) * 4:][:4] + whole[(18 + 4) * 4:][:4]
    os.close(fds[0])


# ------------------------------------------------------------------------------------------------------ safetensors


def test_values_have_no_place_in_safetensors(gang, roots):
    r = done(gang.job("reshard", {"source": at("torch-2.15.0/nested/checkpoint"),
                                  "target": {**at("nested-st", "out"), "format": "safetensors"}}))
    file = next((roots["out"] / "nested-st").glob("*.safetensors"))
    data = file.read_bytes()
    meta = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    kept = json.loads(meta["dcpd_values"])
    assert kept and set(kept) <= set(r["dropped"])
