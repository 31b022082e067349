"""Layouts that trainers use, and those that PyTorch cannot save, with a real daemon: what each rank gets in shared memory is
what PyTorch's placements leave it; what is saved again PyTorch reads, bit for bit."""
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lib_dtensor import coordinates, local_tensor, positive
from lib_interop import boxes_of
from scenarios import full, same
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dcpd as lib

SHAPES = {"w": (10, 20), "v": (7, 3), "thin": (1, 40), "line": (37,), "none": (0, 4)}
GAPS = {  # mesh, placements: ranks hold rows that are not neighbours
    "strided": ([2], [_StridedShard(0, split_factor=3)]),
    "shard, strided": ([2, 2], [Shard(0), _StridedShard(0, split_factor=2)]),
    "strided, replicated": ([2, 2], [_StridedShard(0, split_factor=2), Replicate()]),
    "strided twice": ([2, 2], [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]),
    "fsdp over tp, uneven": ([3, 2], [_StridedShard(0, split_factor=2), Shard(0)]),
}
GRID = ([2, 2], [_StridedShard(0, split_factor=2), _StridedShard(-1, split_factor=4)])


def tensors(shapes=SHAPES):
    return {k: full(s, i) for i, (k, s) in enumerate(shapes.items())}


def ref(name):
    return {"storage": "main", "name": name}


def path(d, name):
    return str(d.storages["main"] / name)


@pytest.fixture
def source(d):
    """A checkpoint of whole tensors."""
    name = f"layouts/{lib.fresh()}"
    dcp.save(tensors(), checkpoint_id=path(d, name), no_dist=True)
    return name


def read_whole(where, want):
    got = {k: torch.full(t.shape, -7.0) for k, t in want.items()}
    dcp.load(got, checkpoint_id=where, no_dist=True)
    assert all(same(got[k], want[k]) for k in want)


def held(img):
    """A rank's local tensors, from its chunks in their order: {fqn: tensor}."""
    rows = {}
    for fqn, _, offsets, sizes, _, raw in img.chunks():
        part = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(sizes) if raw else torch.empty(sizes)
        rows.setdefault(fqn, []).append((offsets, part))
    out = {}
    for fqn, parts in rows.items():
        ndim = parts[0][1].dim()
        at = [{o: i for i, o in enumerate(sorted({p[0][d] for p in parts}))} for d in range(ndim)]
        assert [p[0] for p in parts] == sorted(p[0] for p in parts), "chunks stand in the order of the local tensor"
        grid = {tuple(at[d][o[d]] for d in range(ndim)): t for o, t in parts}
        for d in reversed(range(ndim)):
            grid = {k[:d]: torch.cat([grid[(*k[:d], i)] for i in range(len(at[d]))], d) for k in grid}
        out[fqn] = grid[()]
    return out


def check_ranks(d, sd, mesh, placements, ranks=None, want=None):
    images, want = d.images(sd), want or tensors()
    ranks = ranks or range(math.prod(mesh))
    for rank, coordinate in zip(ranks, coordinates(mesh), strict=True):
        got = held(images[rank])
        for fqn, whole in want.items():
            places = [positive(p, whole.dim()) for p in placements]
            local = local_tensor(whole, mesh, coordinate, places)
            assert got[fqn].shape == local.shape and same(got[fqn], local.contiguous()), (fqn, rank)


@pytest.mark.parametrize("case", GAPS)
def test_rows_that_are_not_neighbours(d, ranks, source, case):
    mesh, placements = GAPS[case]
    world, sd, again, direct = math.prod(mesh), lib.fresh(), f"{source}-shm-{lib.fresh()}", f"{source}-direct-{lib.fresh()}"
    rules = [{"match": "*", "mesh": mesh, "placements": [repr(p) for p in placements]}]
    d.api.run("load", source=ref(source), target={"state_dict": sd, "world_size": world, "layout": rules})
    check_ranks(d, sd, mesh, placements)
    assert any(len(list(img.chunks())) > len(SHAPES) for img in d.images(sd)), "no rank holds several chunks"
    d.api.run("save", source={"state_dict": sd}, target=ref(again))
    d.drop(sd)
    d.api.run("reshard", source=ref(source), target={**ref(direct), "layout": rules})
    assert boxes_of(path(d, direct)) == boxes_of(path(d, again))
    for made in (again, direct):
        read_whole(path(d, made), tensors())
    shapes = {k: v for k, v in SHAPES.items() if len(v) == 2 and v[0]}
    ranks.run(4, "scenarios", "dtensor_load", paths=[path(d, again), path(d, direct)], shapes=SHAPES, mesh=[4],
              placements=["Shard(0)"])
    back, third = f"{source}-back-{lib.fresh()}", lib.fresh()
    ranks.run(4, "scenarios", "dtensor_save", path=path(d, back), shapes=shapes, mesh=[2, 2], placements=["Shard(1)", "Shard(0)"])
    d.api.run("load", source=ref(back), target={"state_dict": third, "layout": rules})
    check_ranks(d, third, mesh, placements, want={k: t for k, t in tensors().items() if k in shapes})
    d.drop(third)


def test_gaps_in_two_dims(d, source):
    mesh, placements = GRID
    shapes, name, sd, saved = {"w": (10, 20), "v": (7, 9)}, f"layouts/{lib.fresh()}", lib.fresh(), f"layouts/{lib.fresh()}"
    dcp.save(tensors(shapes), checkpoint_id=path(d, name), no_dist=True)
    rules = [{"match": "*", "mesh": mesh, "placements": [str(p) for p in placements]}]
    d.api.run("load", source=ref(name), target={"state_dict": sd, "layout": rules})
    check_ranks(d, sd, mesh, placements, want=tensors(shapes))
    d.api.run("save", source={"state_dict": sd}, target=ref(saved))
    d.drop(sd)
    assert len(boxes_of(path(d, saved))["w"]) == 4 * 8
    read_whole(path(d, saved), tensors(shapes))


def test_fsdp_over_tensor_parallel_from_pytorch(d, ranks):
    """4 real ranks save it and load it; dcpd between them, in either direction."""
    shapes, name, made = {"w": (10, 20), "v": (7, 3)}, f"layouts/{lib.fresh()}", f"layouts/{lib.fresh()}"
    mesh, words = [2, 2], ["_StridedShard(0, split_factor=2)", "Shard(0)"]
    ranks.run(4, "scenarios", "dtensor_save", path=path(d, name), shapes=shapes, mesh=mesh, placements=words)
    sd = lib.fresh()
    rule = {"match": "*", "mesh": mesh, "placements": ["_StridedShard(dim=0, sf=2)", "Shard(dim=0)"], "dim_names": ["dp", "tp"]}
    d.api.run("load", source=ref(name), target={"state_dict": sd, "layout": [rule]})
    check_ranks(d, sd, mesh, [_StridedShard(0, split_factor=2), Shard(0)], want=tensors(shapes))
    d.drop(sd)
    d.api.run("reshard", source=ref(name), target={**ref(made), "world_size": 3, "layout": [{"match": "*", "placements": ["S(-1)"]}]})
    ranks.run(4, "scenarios", "dtensor_load", paths=[path(d, made)], shapes=shapes, mesh=mesh, placements=words)


def test_pipeline_stages_and_experts(d):
    """3-D: two stages of 2 x 2 ranks, HSDP or FSDP over TP; experts on a rank each; a tied weight in both stages' ranks."""
    shapes = {"stage0.a": (9, 4), "stage1.b": (5, 6), "experts.0.w": (3, 3), "experts.1.w": (4, 2), "tied": (6, 2)}
    name, sd, saved = f"layouts/{lib.fresh()}", lib.fresh(), f"layouts/{lib.fresh()}"
    dcp.save(tensors(shapes), checkpoint_id=path(d, name), no_dist=True)
    rules = [
        {"match": "stage0.*", "mesh": [2, 2], "ranks": [0, 1, 2, 3], "placements": ["_S(0, 2)", "S(0)"], "dim_names": ["dp", "tp"]},
        {"match": "stage1.*", "mesh": [2, 2], "ranks": [7, 6, 5, 4], "placements": ["R", "S(1)"], "dim_names": ["replicate", "shard"]},
        {"match": "experts.0.*", "ranks": [1], "placements": ["R"]},
        {"match": "experts.1.*", "ranks": [5], "placements": ["R"]},
        {"match": "tied", "ranks": [0, 1, 2, 3, 4, 5, 6, 7], "placements": ["S(0)"]},
        {"match": "stage*", "placements": ["S(5)"]},
    ]
    done = d.api.run("load", source=ref(name), target={"state_dict": sd, "world_size": 8, "layout": rules})
    assert done["result"]["unmatched_rules"] == ["stage*"]  # no tensor has a dim 5
    want = tensors(shapes)
    check_ranks(d, sd, [2, 2], [_StridedShard(0, split_factor=2), Shard(0)], [0, 1, 2, 3], {"stage0.a": want["stage0.a"]})
    check_ranks(d, sd, [2, 2], [Replicate(), Shard(1)], [7, 6, 5, 4], {"stage1.b": want["stage1.b"]})
    check_ranks(d, sd, [8], [Shard(0)], want={"tied": want["tied"]})
    names = [{c[0] for c in img.chunks()} for img in d.images(sd)]
    assert [sorted(n - {"tied"}) for n in names] == [["stage0.a"], ["experts.0.w", "stage0.a"], ["stage0.a"], ["stage0.a"],
                                                     ["stage1.b"], ["experts.1.w", "stage1.b"], ["stage1.b"], ["stage1.b"]]
    d.api.run("save", source={"state_dict": sd}, target=ref(saved))
    d.drop(sd)
    read_whole(path(d, saved), want)


def test_a_rule_without_tensors_is_a_warning(d, source):
    r = d.ctl("reshard", f"main:{source}", f"main:{source}-{lib.fresh()}", "--world-size", "2", "--layout", "nothing.*=S(0)@2")
    assert r.returncode == 0 and "layout rule for 'nothing.*' matches no tensor" in r.stderr


def test_layouts_that_cannot_be(d, source):
    def fails(rule, *codes, world=2):
        return d.api.fails("reshard", *codes, source=ref(source), target={**ref(f"{source}-bad"), "world_size": world, "layout": [rule]})

    def refused(code, rule):
        target = {**ref(f"{source}-bad"), "world_size": 3, "layout": [rule]}
        return d.api.post("/v1/jobs", {"kind": "reshard", "source": ref(source), "target": target}).problem(code, status=422)["detail"]

    text = refused("layout_invalid", {"match": "*", "placements": ["Partial(sum)"]})
    assert "not supported for DTensor with partial placements" in text and "/target/layout/0/placements/0" in text
    refused("layout_invalid", {"match": "*", "placements": ["_S(0, 0)"]})
    refused("world_mismatch", {"match": "*", "mesh": [2], "placements": ["S(0)"]})
    refused("layout_invalid", {"match": "*", "mesh": [2], "ranks": [1, 1], "placements": ["S(0)"]})
    refused("unknown_field", {"match": "*", "mesh": [3], "placements": ["S(0)"], "boxes": []})
    box = {"rank": 0, "offsets": [0, 0], "sizes": [10, 20]}
    error = fails({"match": "w", "boxes": [box, {"rank": 1, "offsets": [9, 0], "sizes": [1, 20]}]}, "layout_invalid")
    assert error["fqn"] == "w" and "rule 0 ('w')" in error["detail"] and "overlapping" in error["detail"]
    error = fails({"match": "w", "boxes": [{**box, "sizes": [9, 20]}]}, "layout_invalid")
    assert error["fqn"] == "w" and "volume" in error["detail"]
    error = fails({"match": "w", "boxes": [box, {"rank": 1, "offsets": [2**62, 2**62], "sizes": [2**62, 2**62]}]}, "layout_invalid")
    assert error["fqn"] == "w" and "out of bounds" in error["detail"]
    fails({"match": "w", "boxes": [{"rank": 0, "offsets": [0] * 64, "sizes": [1] * 64}]}, "layout_invalid")
