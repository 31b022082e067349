"""Optimizer state on other meshes: a small transformer trained with FSDP2 + TP on 4 ranks and saved by PyTorch goes on training on 1, 2,
3, 6 and 8 ranks; 10 further steps are bit for bit those after PyTorch's own load on the same mesh, and those of the unbroken run up to
rounding."""
import os

import numpy as np
import pytest
from ranks import Ranks

import dcpd as lib

FULL = bool(os.environ.get("DCPD_FULL"))
WORLDS = (1, 2, 3, 6, 8) if FULL else (1, 3)
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


@pytest.mark.parametrize("world", WORLDS)
def test_training_goes_on_on_another_mesh(d, pool, trained, world):
    kind, name, path, unbroken, parameters = trained
    theirs = call(pool, world, "resume", path=path, kind=kind)
    made = f"{name}-on-{world}"
    d.api.run("reshard", source={"storage": "main", "name": name}, target={"storage": "main", "name": made, "world_size": world},
              options={"overwrite": True})
    ours = {"resharded by dcpd": call(pool, world, "resume", path=str(d.storages["main"] / made), kind=kind)}
    for how, got in ours.items():
        for rank in range(world):
            assert got[rank][0] == theirs[rank][0], f"{how}: losses of rank {rank}"
            for k, v in theirs[rank][1].items():
                assert got[rank][1][k].tobytes() == v.tobytes(), f"{how}: {k} on rank {rank}"
    assert np.allclose(theirs[0][0], unbroken, rtol=0, atol=1e-5)
    for k, v in parameters.items():
        assert np.allclose(theirs[0][1][k], v, rtol=0, atol=1e-5), k
