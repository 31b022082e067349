"""Layouts through the drop-in on real ranks: what was saved in one is loaded in another, each half beside PyTorch's own."""
import pathlib

import harness as lib
import on_ranks
import pytest

PAIRS = [("ours", "theirs"), ("theirs", "ours")]
halves = pytest.mark.parametrize("writer, reader", PAIRS, ids=["-".join(p) for p in PAIRS])
KINDS = ["plain", "view", "old", "fsdp", "tp", "hsdp", "2d", "twice", "own"]


def some(values, quick):
    """All of them in `make check-full`."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.fixture
def path(d):
    return str(d.storages["main"] / lib.fresh())


def one_content(d, path):
    """The record has the content digest, and what is made of it in another layout has the same (the reshard fails else)."""
    name = pathlib.Path(path).name
    made = d.api.run("reshard", source={"storage": "main", "name": name}, target={"storage": "main", "name": f"{name}-1", "world_size": 1})
    assert d.api.get(d.api.storage_path("main", name)).ok(200)["content_digest"] == made["result"]["content_digest"]


@pytest.mark.short("2d-ours-theirs")
@halves
@pytest.mark.parametrize("saved", some(KINDS, ("2d",)))
def test_every_layout_to_every_other(ranks, d, path, saved, writer, reader):
    ranks(on_ranks.write_as, path, writer, saved)
    if writer == "ours":
        one_content(d, path)
    for held in KINDS:
        ranks(on_ranks.read_as, path, reader, held)
    for held in ("old", "fsdp", "tp"):
        ranks(on_ranks.read_as, path, reader, held, world=2)


@halves
@pytest.mark.parametrize("saved", some(["old", "fsdp", "tp"], ("fsdp",)))
def test_two_ranks_to_four(ranks, path, saved, writer, reader):
    ranks(on_ranks.write_as, path, writer, saved, world=2)
    for held in ("old", "2d", "hsdp", "plain"):
        ranks(on_ranks.read_as, path, reader, held)


@pytest.mark.parametrize("saved", some(["old", "2d", "view", "own"], ("old", "own")))
def test_staged(ranks, path, saved):
    ranks(on_ranks.write_as, path, "ours", saved, True)
    ranks(on_ranks.read_as, path, "theirs", "fsdp")
    ranks(on_ranks.read_as, path, "ours", "old", world=2)


MODELS = {"fsdp1": ("fsdp1", None, 2), "fsdp2": ("fsdp2", (4,), 4), "hsdp": ("fsdp2", (2, 2), 4), "two": ("fsdp2", (2,), 2)}


@pytest.mark.short("hsdp-ours-theirs")
@halves
@pytest.mark.parametrize("saved", some(["fsdp1", "fsdp2", "hsdp"], ("fsdp1", "hsdp")))
def test_models_and_optimizers(ranks, path, writer, reader, saved):
    """FSDP1 on two ranks only: PyTorch's planner wants a key of the fourth one that its optimizer never had."""
    kind, mesh, world = MODELS[saved]
    want = ranks(on_ranks.train_write, path, writer, kind, mesh, world=world)[0]
    assert any("exp_avg" in k for k in want)
    for kind, mesh, world in MODELS.values():
        assert ranks(on_ranks.train_read, path, reader, kind, mesh, world=world) == [want] * world


@pytest.mark.short("theirs-given-ours")
@pytest.mark.parametrize("writer, planner, whose", [
    ("ours", "none", "theirs"), pytest.param("ours", "given", "theirs", marks=pytest.mark.slow),
    pytest.param("theirs", "none", "ours", marks=pytest.mark.slow), ("theirs", "given", "ours")])
def test_sharded_optimizer_state(ranks, path, writer, planner, whose):
    names = ranks(on_ranks.optimizer_state, path, writer, planner, whose)
    assert any("exp_avg_sq" in n for n in names[0]) and len({tuple(n) for n in names}) == 1


@pytest.mark.parametrize("writer, planner, whose", [("ours", "none", "theirs"), ("theirs", "given", "ours")])
def test_sharded_optimizer_state_of_two_dims(ranks, path, writer, planner, whose):
    got = ranks(on_ranks.optimizer_state_2d, path, writer, planner, whose)
    assert got == [(3.0, [{"lr": 0.1}])] * 2 + [None] * 2
