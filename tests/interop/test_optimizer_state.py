"""dcpd's load of optimizer state beside PyTorch's load_sharded_optimizer_state_dict: the same tensors, boxes, placements and values, rank
by rank. How training goes on with it: test_optimizer_resume.py."""
import os

import pytest

import dcpd as lib

FULL = bool(os.environ.get("DCPD_FULL"))


def call(pool, world, name, **kw):
    return pool.run(world, "optim_cases", name, seconds=100, **kw)


def place(d):
    name = "osd/" + lib.fresh()
    return str(d.storages["main"] / name)


@pytest.fixture
def url(d):
    return f"unix://{d.socket}"


def same(a, b, where=""):
    """Says where they differ."""
    assert type(a) is type(b), f"{where}: {a!r} and {b!r}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {a.keys() ^ b.keys()}"
        for k in a:
            same(a[k], b[k], f"{where}/{k}")
    elif isinstance(a, (list, tuple)) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}/{i}")
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


@pytest.mark.long
@pytest.mark.parametrize("kind", ("adam", "sgd", "adamw", "fused") if FULL else ("adam",))
@pytest.mark.parametrize("planner", (False, True))
def test_fsdp(d, ranks, url, kind, planner):
    """PyTorch's FSDP optimizer test: three linear layers, saved by 4 ranks, loaded by 4 and 2."""
    path = place(d)
    call(ranks, 4, "linear_save", path=path, width=4, kind=kind)
    for world in (4, 2) if not planner else (2,):
        got = call(ranks, world, "linear_load", path=path, width=4, kind=kind, url=url, planner=planner)
        for theirs, ours, their_state, our_state in got:
            same(theirs, ours)
            same(their_state, our_state)
            assert "sharded" in str(ours) and ours["optimizer"]["param_groups"]


def test_fsdp_saved_by_dcpd(d, ranks, url):
    path = place(d)
    call(ranks, 2, "linear_save", path=path, width=2, by="dcpd", url=url)
    for theirs, ours, their_state, our_state in call(ranks, 4, "linear_load", path=path, width=2, url=url):
        same(theirs, ours)
        same(their_state, our_state)


@pytest.mark.parametrize("by", ("pytorch", "dcpd"))
def test_nested_tensors(d, ranks, url, by):
    """FSDP1 over tensor parallelism: a ShardedTensor in a ShardedTensor, of uneven slices; saved on 2 × 2, loaded on other meshes."""
    path = place(d)
    call(ranks, 4, "nested_save", path=path, tp=2, by=by, url=url)
    for world, tp in ((4, 2), *(((4, 4), (3, 3)) if FULL or by == "dcpd" else ()), (2, 1), (2, 2)):
        for theirs, ours in call(ranks, world, "nested_load", path=path, tp=tp, url=url):
            same(theirs, ours, f"{world} ranks, tp {tp}")
    state = ours["optim"]["state"]
    assert state["lost"]["count"] == 3 and state["rows"]["one"][1] == [1, 1] and ours["optim"]["param_groups"][1]["lr"] == 0.1
    assert state["columns"]["exp_avg"][1] == [6, 2], "the last rank's slice"


def test_nestings_that_are_refused(d, ranks, url):
    path = place(d)
    call(ranks, 2, "nested_save", path=path, tp=2)
    for inside_theirs, inside_ours, around_theirs, around_ours in call(ranks, 2, "nested_refused", path=path, url=url):
        assert "Cannot handle DTensor nested inside ShardedTensor" in inside_theirs
        assert "Cannot handle DTensor nested inside ShardedTensor" in inside_ours
        assert "Cannot handle nested DTensor" in around_theirs
        assert "Cannot handle nested DTensor" in around_ours


@pytest.mark.parametrize("form", ("fqn", "index", "flattened", "empty"))
def test_forms(d, ranks, url, form):
    path = place(d)
    call(ranks, 1, "forms_save", path=path, form=form)
    for theirs, ours in call(ranks, 3, "forms_load", path=path, url=url):
        same(theirs, ours)
        assert "optim" in ours
