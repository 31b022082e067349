"""Every golden checkpoint that PyTorch wrote: load, save back, verify, reshard to 1, 2, 3 and 4 ranks by rows and by columns;
what dcpd wrote is judged by PyTorch itself (lib/check_ckpt.py), and its boxes against PyTorch's way of cutting."""
import hashlib
import io
import json
import pathlib

import check_ckpt
import pytest
import torch
from lib_interop import assemble, boxes_of
from torch import _weights_only_unpickler
from torch.distributed.checkpoint import filesystem, metadata

import dcpd as lib

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
CASES = sorted(f"{p.parent.name}/{p.name}" for p in FIXTURES.glob("torch-*/*") if (p / "checkpoint").is_dir())
# The newest PyTorch, and what the oldest one writes in a way of its own or least like others: the ends of what there is between.
QUICK = ("torch-2.15.0/", *(f"torch-2.2.2/{n}" for n in ("plain", "dtypes", "nested_v23", "opaque_values", "rank_dependent_keys", "shapes",
                                                         "sharded_reversed_placement", "unflattened")))
CLASSES = [metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata,
           metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, metadata.MetadataIndex, metadata.StorageMeta,
           filesystem._StorageInfo]
# 2.2.2 kept dicts in lists as one value; a save out of shared memory takes them apart, as PyTorch does since 2.4.
UNFLATTENED = {"torch-2.2.2/nested_v23"}


def expected(case):
    return json.loads((FIXTURES / case / "expected.json").read_text())


def judge(directory, case):
    problems, tensors, values = check_ckpt.check(directory, FIXTURES / case)
    assert not problems, f"{directory}: " + "; ".join(problems[:5])
    doc = expected(case)
    assert (tensors, values) == (len(doc["tensors"]), len(doc["values"]))
    with torch.serialization.safe_globals(CLASSES):
        md = _weights_only_unpickler.load(io.BytesIO((directory / ".metadata").read_bytes()))
    assert set(md.state_dict_metadata) == set(doc["tensors"]) | set(doc["values"])


def cut(shape, dim, world):
    """Boxes of Shard(dim) over a 1-D mesh: as torch.chunk cuts; empty ones are not stored, but for an empty tensor."""
    if not shape:
        return [([], [])]
    step, out = -(-shape[dim] // world), []
    for r in range(world):
        off, size = [0] * len(shape), list(shape)
        off[dim] = min(r * step, shape[dim])
        size[dim] = min(step, shape[dim] - off[dim])
        out.append((off, size))
    some = [b for b in out if 0 not in b[1]]
    return sorted(some) if some else out[:1]


def test_all_cases_are_here():
    assert len(CASES) == 101


def resharded(d, case, base, world, dim):
    path = d.storages["main"] / f"{base}/{world}-{dim}"
    d.api.run("reshard", source={"storage": "golden", "name": f"{case}/checkpoint"}, target={
        "storage": "main", "name": f"{base}/{world}-{dim}", "format": "dcp", "world_size": world,
        "layout": [{"match": "*", "mesh": [world], "placements": [f"Shard({dim})"]}]})
    judge(path, case)
    have = boxes_of(path)
    for fqn, t in expected(case)["tensors"].items():
        shape = t["shape"]
        if 0 not in shape:
            assert have[fqn] == cut(shape, dim if dim < len(shape) else 0, world), (fqn, world, dim)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_other_cuts(d, case):
    base = f"golden/{lib.fresh()}"
    for world, dim in ((1, 0), (1, 1), (2, 0), (3, 1), (4, 0), (4, 1)):
        resharded(d, case, base, world, dim)


@pytest.mark.parametrize("case", [c if c.startswith(QUICK) else pytest.param(c, marks=pytest.mark.long) for c in CASES])
def test_golden(d, case, tmp_path):
    doc, base = expected(case), f"golden/{lib.fresh()}"
    source = {"storage": "golden", "name": f"{case}/checkpoint"}
    main = d.storages["main"]
    before = {p: p.stat().st_mtime_ns for p in (d.storages["golden"] / case).rglob("*")}

    result = d.api.run("verify", source=source, level="digest")["result"]
    assert not result.get("problems"), result
    for world in (1, 2):
        sd = lib.fresh("g")
        d.api.run("load", source=source, target={"state_dict": sd, "world_size": world})
        whole = assemble(d.images(sd))
        assert set(whole) == set(doc["tensors"])
        for fqn, t in doc["tensors"].items():
            shape, raw = whole[fqn]
            assert shape == t["shape"] and hashlib.sha256(raw).hexdigest() == t["sha256"], fqn
        assert set().union(*(img.values for img in d.images(sd))) == set(doc["values"])
        if world == 1 and case not in UNFLATTENED:  # the same once more, into what is there
            before_values = [img.values for img in d.images(sd)]
            d.api.run("load", source=source, target={"state_dict": sd})
            assert assemble(d.images(sd)) == whole and [img.values for img in d.images(sd)] == before_values
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{base}/shm-{world}"})
        d.drop(sd)
        if case not in UNFLATTENED:
            judge(main / f"{base}/shm-{world}", case)
    for world, dim in ((2, 1), (3, 0)):
        resharded(d, case, base, world, dim)
    d.api.run("verify", source={"storage": "main", "name": f"{base}/2-1"}, level="digest")
    diff = d.api.run("diff", a=source, b={"storage": "main", "name": f"{base}/3-0"})["result"]
    assert diff["equal"] is True and not diff["differences"], diff
    assert before == {p: p.stat().st_mtime_ns for p in (d.storages["golden"] / case).rglob("*")}, "the source was touched"
    d.api.run("delete", target={"storage": "main", "name": f"{base}/2-1"})
    assert not (main / f"{base}/2-1").exists()
