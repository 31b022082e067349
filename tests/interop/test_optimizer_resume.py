"""Optimizer state on other meshes: a small transformer trained with FSDP2 + TP on 4 ranks and saved by PyTorch goes on training on 1, 2,
3, 6 and 8 ranks; 10 further steps are bit for bit those after PyTorch's own load on the same mesh, and those of the unbroken run up to
rounding."""
import os

import numpy as np
import pytest
from ranks import Ranks

import dcpd as lib

FULL = bool(os.environ.get("DCPD_FULL"))
WORLDS = (1, 2, 3, 6, 8) if FULL else (1, 2, 3)
KINDS = {"adamw": {}, **({"sgd": {}, "adam fused": {}, "sgd plain": {}} if FULL else {})}


@pytest.fixture(scope="module")
def pool(ranks):
    if not FULL:
        yield ranks
        return
    p = Ranks(8)
    yield p
    p.close()


def call(pool, world, name, **kw):
    return pool.run(world, "train_cases", name, seconds=300, **kw)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, pool, shared_daemon):
    """(kind, name of the checkpoint, losses of the unbroken run, its parameters)"""
    name = "optim/" + lib.fresh()
    path = str(shared_daemon.storages["main"] / name)
    got = call(pool, 4, "train_and_save", path=path, kind=request.param)
    return request.param, name, path, got[0][1], got[0][2]


def goes_on_alike(a, b, how):
    """Losses and final parameters of two runs, rank by rank and bit for bit."""
    assert len(a) == len(b)
    for rank, (x, y) in enumerate(zip(a, b)):
        assert x[0] == y[0], f"{how}: losses of rank {rank}"
        assert x[1].keys() == y[1].keys()
        for k, v in x[1].items():
            assert y[1][k].tobytes() == v.tobytes(), f"{how}: {k} on rank {rank}"


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_training_goes_on_on_another_mesh(d, pool, trained, world):
    kind, name, path, unbroken, parameters = trained
    theirs = call(pool, world, "resume", path=path, kind=kind)
    made = f"{name}-on-{world}"
    d.api.run("reshard", source={"storage": "main", "name": name}, target={"storage": "main", "name": made, "world_size": world},
              options={"overwrite": True})
    ours = {"resharded by dcpd": call(pool, world, "resume", path=str(d.storages["main"] / made), kind=kind),
            "loaded by dcpd": call(pool, world, "resume", path=path, kind=kind, by="dcpd", url=f"unix://{d.socket}")}
    for how, got in ours.items():
        goes_on_alike(theirs, got, how)
    assert np.allclose(theirs[0][0], unbroken, rtol=0, atol=1e-5)
    for k, v in parameters.items():
        if k.endswith(".k.bias"):
            continue  # softmax takes no notice of it: its gradient is rounding, which Adam makes as large as any other
        assert np.allclose(theirs[0][1][k], v, rtol=0, atol=1e-5), k


@pytest.mark.long
def test_flattened_state_goes_on(d, pool):
    """flatten_optimizer_state_dict: saved by each of the two, loaded by each of them."""
    name, url = "optim/" + lib.fresh(), f"unix://{d.socket}"
    runs = []
    for by in ("pytorch", "dcpd"):
        path = str(d.storages["main"] / f"{name}-{by}")
        call(pool, 4, "train_and_save", path=path, by=by, url=url, flatten_optimizer_state_dict=True)
        runs += [call(pool, 2, "resume", path=path, by=other, url=url, flatten_optimizer_state_dict=True) for other in ("pytorch", "dcpd")]
    for how, got in zip(("saved by PyTorch, loaded by dcpd", "saved by dcpd, loaded by PyTorch", "saved and loaded by dcpd"), runs[1:]):
        goes_on_alike(runs[0], got, how)
