"""The planner against PyTorch's own functions: dedup, order and reads. Boxes: test_layout_parts.py.

Random cases with a fixed seed. Nothing is saved here: metadata in, metadata out.
"""
import random

import pytest
import torch
from lib_dtensor import coordinates
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


def random_shape(rng, most=4):
    return [rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 13, 30, 64]) for _ in range(rng.randint(1, most))]


def random_mesh(rng):
    return [rng.choice([1, 2, 2, 3, 4]) for _ in range(rng.randint(1, 3))]


def dtensor_boxes(shape, mesh, placements):
    for coordinate in coordinates(mesh):
        size, offset = _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), coordinate, placements)
        yield list(offset), list(size)


def test_default_is_shard_0_over_the_world(plan):
    got = plan(op="layout", world=4, rules=[], tensors=[{"fqn": "w", "shape": [6, 2]}, {"fqn": "s", "shape": []}])
    assert got["tensors"]["w"] == [[r, *b] for r, b in enumerate(dtensor_boxes([6, 2], [4], [Shard(0)]))]
    assert got["tensors"]["s"] == [[0, [], []]]


def save_plans(tensors, world):
    plans = [SavePlan([]) for _ in range(world)]
    for tensor in tensors:
        for rank, offsets, sizes in tensor["chunks"]:
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size(tensor["shape"]),
            )
            index = MetadataIndex(tensor["fqn"], torch.Size(offsets))
            plans[rank].items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
    return plans


def random_held(rng):
    """Some tensors over one world, replicas and empty shards included."""
    mesh = random_mesh(rng)
    tensors = []
    for i in range(rng.randint(1, 4)):
        shape = [s or 1 for s in random_shape(rng, 3)]
        placements = [rng.choice([Replicate(), Shard(rng.randrange(len(shape)))]) for _ in mesh]
        chunks = [[r, *b] for r, b in enumerate(dtensor_boxes(shape, mesh, placements))]
        tensors.append({"fqn": f"t{i}", "shape": shape, "chunks": chunks})
    return tensors, len(coordinates(mesh))


def without_empty(chunks):
    return [c for c in chunks if 0 not in c[2]]


@pytest.mark.parametrize("how", ["lowest", "balanced"])
def test_dedup_and_order(plan, how):
    rng = random.Random(3)
    for _ in range(400):
        tensors, world = random_held(rng)
        deduped = dedup_save_plans(save_plans(tensors, world), save_to_lowest_rank=how == "lowest")
        new_plans, metadata = create_default_global_save_plan(deduped)
        assert not _validate_global_plan(new_plans, metadata)
        got = plan(op="save", dedup=how, tensors=tensors)["tensors"]
        writers = {(i.index.fqn, i.index.offset): r for r, p in enumerate(new_plans) for i in p.items}
        for fqn, md in metadata.state_dict_metadata.items():
            expected = without_empty(
                [[writers[fqn, c.offsets], list(c.offsets), list(c.sizes)] for c in md.chunks]
            )
            if how == "lowest":  # the very same chunks, by the same ranks, in the same order
                assert got[fqn] == expected
            else:  # PyTorch balances by the size of the whole tensor: the boxes are the same, some writers differ
                assert sorted(c[1:] for c in got[fqn]) == sorted(c[1:] for c in expected)
        if how == "lowest":
            assert list(got) == [k for k, md in metadata.state_dict_metadata.items()]


def test_balance_is_no_worse_than_pytorchs(plan):
    rng = random.Random(4)
    ours_total = theirs_total = 0
    for _ in range(200):
        tensors, world = random_held(rng)
        ours, theirs = [0] * world, [0] * world
        for rank, deduped in enumerate(dedup_save_plans(save_plans(tensors, world))):
            theirs[rank] += sum(i.tensor_data.chunk.sizes.numel() for i in deduped.items)
        for chunks in plan(op="save", dedup="balanced", tensors=tensors)["tensors"].values():
            for rank, _, sizes in chunks:
                ours[rank] += torch.Size(sizes).numel()
        assert sum(ours) == sum(theirs)
        ours_total += max(ours)
        theirs_total += max(theirs)
    assert ours_total <= theirs_total


def test_reads(plan):
    rng = random.Random(5)
    for _ in range(600):
        shape = [s or 1 for s in random_shape(rng, 3)]
        sides = []
        for _side in range(2):
            mesh = random_mesh(rng)
            placements = [Shard(rng.randrange(len(shape))) for _ in mesh]
            sides.append([[r, *b] for r, b in enumerate(dtensor_boxes(shape, mesh, placements))])
        saved, local = ([ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for _, o, s in side] for side in sides)
        md = TensorStorageMetadata(TensorProperties(), torch.Size(shape), saved)
        items = create_read_items_for_chunk_list("w", md, local)
        expected = {(i.dest_index.index, i.storage_index.index) for i in items}
        source, target = ({"fqn": "w", "shape": shape, "chunks": side} for side in sides)
        got = plan(op="load", source=[source], target=[target])["reads"]
        empty = {i for i, c in enumerate(saved) if 0 in c.sizes}
        expected = {(a, b) for a, b in expected if b not in empty and 0 not in local[a].sizes}
        assert {(a, b) for a, sources in enumerate(got) for b in sources} == expected


def test_errors_have_pytorchs_words(plan):
    one = {"fqn": "w", "shape": [8], "chunks": [[0, [0], [8]]]}
    two = {"fqn": "w", "shape": [9], "chunks": [[0, [0], [9]]]}
    got = plan(op="load", source=[one], target=[two])
    assert got["error"] == "size_mismatch"
    assert got["text"] == "Size mismatch between saved [8] and current: [9] for w"
    overlap = {"fqn": "w", "shape": [8], "chunks": [[0, [0], [6]], [1, [4], [4]]]}
    got = plan(op="save", tensors=[overlap])
    assert got["error"] == "plan_invalid"
    assert "Failed to validate global plan: key:w has overlapping chunks" in got["text"]
