"""What each rank holds, element by element: random meshes and placements against the local tensors that PyTorch's own split
functions make, and random ShardedTensor specs against its checks. What differs on purpose is in api/layouts.md."""
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib_dtensor import coordinates, local_tensor, positive
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcpd import FULL

pytestmark = pytest.mark.seconds(600 if FULL else 120)


def cases(few, many):
    return settings(max_examples=many if FULL else few, deadline=None, derandomize=not FULL, database=None,
                    suppress_health_check=list(HealthCheck))


SIZES = st.one_of(st.integers(0, 9), st.sampled_from([12, 16, 17, 23, 30]))


@st.composite
def dtensors(draw, partial=True, most=24):
    """(shape, mesh, placements); dims may be negative."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda m: math.prod(m) <= most))
    dim = st.integers(-len(shape), len(shape) - 1)
    kinds = [st.builds(Shard, dim), st.just(Replicate()),
             st.builds(lambda d, f: _StridedShard(d, split_factor=f), dim, st.sampled_from([1, 2, 2, 3, 4, 5, 8, 100]))]
    if partial:
        kinds.append(st.just(Partial(draw(st.sampled_from(["sum", "avg", "min", "max", "product"])))))
    return shape, mesh, [draw(st.one_of(*kinds)) for _ in mesh]


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


def box(tensor, offsets, sizes):
    for d, (o, s) in enumerate(zip(offsets, sizes)):
        tensor = tensor.narrow(d, o, s)
    return tensor


def assemble(whole, part):
    local = torch.full(part["size"], -1)
    for offsets, sizes, at in part["boxes"]:
        box(local, at, sizes).copy_(box(whole, offsets, sizes))
    return local


def check_parts(plan, shape, mesh, placements, words):
    got = plan(op="parts", shape=shape, mesh=mesh, placements=words)
    assert "error" not in got, got
    whole, placements = numbered(shape), [positive(p, len(shape)) for p in placements]
    for part, coordinate in zip(got["parts"], coordinates(mesh), strict=True):
        local = local_tensor(whole, mesh, coordinate, placements)
        size, offset = _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), coordinate, placements)
        assert part["size"] == list(size) == list(local.shape)
        assert part["boxes"][0][0] == list(offset)
        assert torch.equal(assemble(whole, part), local)
        assert sum(math.prod(sizes) for _, sizes, _ in part["boxes"]) == local.numel()


def test_values_of_every_rank(plan):
    @cases(100, 5000)
    @given(dtensors(), st.booleans())
    def check(case, short):
        shape, mesh, placements = case
        check_parts(plan, shape, mesh, placements, [(str if short else repr)(p) for p in placements])

    check()


@pytest.mark.long
def test_fsdp_over_tensor_parallel(plan):
    """_StridedShard left of the Shard that it anticipates: one box a rank, but for some uneven sizes (37 rows over 3 x 2)."""

    @cases(100, 4000)
    @given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 4), st.booleans())
    def check(rows, dp, tp, replicated):
        mesh, placements = [dp, tp], [_StridedShard(0, split_factor=tp), Shard(0)]
        if replicated:
            mesh, placements = [2, *mesh], [Replicate(), *placements]
        check_parts(plan, [rows, 2], mesh, placements, [repr(p) for p in placements])
        for part in plan(op="parts", shape=[rows, 2], mesh=mesh, placements=[str(p) for p in placements])["parts"]:
            assert len(part["boxes"]) == 1 or rows % tp

    check()
    assert len(plan(op="parts", shape=[37], mesh=[3, 2], placements=["_S(0, 2)", "S(0)"])["parts"][4]["boxes"]) == 2


@pytest.mark.long
def test_chunks_of_all_ranks(plan):
    """The layout's chunks are the parts, under their ranks; on a sub-mesh in any order, the others hold nothing."""

    @cases(150, 3000)
    @given(dtensors(partial=False), st.randoms(use_true_random=False), st.integers(0, 5))
    def check(case, rng, more):
        shape, mesh, placements = case
        words = [repr(p) for p in placements]
        world = math.prod(mesh) + more
        ranks = rng.sample(range(world), math.prod(mesh))
        rule = {"match": "*", "mesh": mesh, "placements": words}
        if more:
            rule["ranks"] = ranks
        else:
            ranks = list(range(world))
        got = plan(op="layout", world=world, rules=[rule], tensors=[{"fqn": "w", "shape": shape}])["tensors"]["w"]
        parts = plan(op="parts", shape=shape, mesh=mesh, placements=words)["parts"]
        expected = [[rank, offsets, sizes] for rank, part in zip(ranks, parts) for offsets, sizes, _ in part["boxes"]]
        assert got == sorted(expected, key=lambda c: c[0])
        held = plan(op="save", dedup="balanced", tensors=[{"fqn": "w", "shape": shape, "chunks": got}])
        assert "error" not in held  # what is written tiles the tensor: nothing twice, no holes

    check()


def test_distribute_tensor_itself(plan):
    """The same through a DeviceMesh and distribute_tensor, in a process group that only pretends."""

    @cases(12, 150)
    @given(dtensors(most=6))
    def check(case):
        shape, mesh, placements = case
        placements = [Replicate() if isinstance(p, Partial) else positive(p, len(shape)) for p in placements]
        parts = plan(op="parts", shape=shape, mesh=mesh, placements=[repr(p) for p in placements])["parts"]
        whole = numbered(shape)
        for rank, part in enumerate(parts):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(parts))
            try:
                tensor = distribute_tensor(whole, init_device_mesh("cpu", tuple(mesh)), placements, src_data_rank=None)
                assert torch.equal(tensor.to_local(), assemble(whole, part))
            finally:
                dist.destroy_process_group()

    check()


def test_chunk_sharding_spec(plan):
    @cases(150, 4000)
    @given(st.lists(SIZES, min_size=1, max_size=3), st.integers(0, 5), st.lists(st.integers(0, 3), min_size=1, max_size=9))
    def check(shape, dim, ranks):
        dim = dim % (2 * len(shape)) - len(shape)
        spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{r}/cpu" for r in ranks])
        shards = spec.build_metadata(torch.Size(shape), TensorProperties()).shards_metadata
        expected = [[s.placement.rank(), [min(o, n) for o, n in zip(s.shard_offsets, shape)], list(s.shard_sizes)] for s in shards]
        rules = [{"match": "*", "chunks": {"dim": dim, "ranks": ranks}}]
        got = plan(op="layout", world=4, rules=rules, tensors=[{"fqn": "w", "shape": shape}])
        assert got["tensors"]["w"] == sorted(expected, key=lambda c: c[0])

    check()


@st.composite
def box_lists(draw):
    """(shape, boxes): a tiling by repeated cuts, spoilt in one place in two cases of three."""
    shape = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        if sizes[d] < 2:
            boxes.append((offsets, sizes))
            continue
        at = draw(st.integers(1, sizes[d] - 1))
        right, rest = list(offsets), list(sizes)
        right[d] += at
        rest[d] -= at
        boxes += [(offsets, [at if i == d else s for i, s in enumerate(sizes)]), (right, rest)]
    boxes = draw(st.permutations(boxes))
    i, d = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
    how = draw(st.sampled_from(["good", "moved", "grown", "less", "twice", "dims"]))
    if how == "moved":
        boxes[i][0][d] += 1
    elif how == "grown":
        boxes[i][1][d] += 1
    elif how == "less" and len(boxes) > 1:
        boxes.pop(i)
    elif how == "twice":
        boxes.append(boxes[i])
    elif how == "dims":
        boxes[i] = (boxes[i][0] + [0], boxes[i][1] + [1])
    return shape, boxes


def test_enumerable_sharding_spec(plan):
    @cases(200, 5000)
    @given(box_lists())
    def check(case):
        shape, boxes = case
        placed = [(i % 3, offsets, sizes) for i, (offsets, sizes) in enumerate(boxes)]
        try:
            spec = EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}/cpu") for r, o, s in placed])
            spec.build_metadata(torch.Size(shape), TensorProperties())
            refused = None
        except ValueError as e:
            refused = str(e)
        rules = [{"match": "*", "boxes": [{"rank": r, "offsets": o, "sizes": s} for r, o, s in placed]}]
        got = plan(op="layout", world=3, rules=rules, tensors=[{"fqn": "w", "shape": shape}])
        if refused:
            assert got["error"] == "layout_invalid" and "rule 0 ('*')" in got["text"], (refused, got)
        else:
            assert got["tensors"]["w"] == sorted(([r, list(o), list(s)] for r, o, s in placed), key=lambda c: c[0])

    check()


def test_a_huge_split_factor_is_refused_or_free(plan):
    tall = [{"fqn": "model.tall", "shape": [1 << 40, 2]}]
    rule = {"match": "model.*", "mesh": [2], "placements": [f"_StridedShard(dim=0, sf={1 << 39})"]}
    got = plan(op="layout", world=2, rules=[rule], tensors=tall)
    assert got["error"] == "limit_exceeded" and "rule 0 ('model.*')" in got["text"] and got["fqn"] == "model.tall"
    rule["placements"] = [f"_StridedShard(dim=0, sf={1 << 40})"]  # a row a piece: the first rank has all
    got = plan(op="layout", world=2, rules=[rule], tensors=tall)["tensors"]["model.tall"]
    assert got == [[0, [0, 0], [1 << 40, 2]], [1, [1 << 40, 0], [0, 2]]]
