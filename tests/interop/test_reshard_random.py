"""Random trees, shapes, dtypes, meshes and placements: PyTorch saves under layout A, dcpd reshards to B, PyTorch loads under B and C, bit
for bit, and the boxes of B are PyTorch's own. Another thousand of cases and worlds up to 8 with DCPD_FULL=1."""
import os
import shutil

import pytest
import reshard_cases as cases
from lib_interop import boxes_of
from ranks import Ranks

import dcpd as lib

FULL = bool(os.environ.get("DCPD_FULL"))
WORLDS = 8 if FULL else 4
GROUPS = 120 if FULL else 6
PER_GROUP = 20  # cases that share their three worlds, so that ranks meet once


@pytest.fixture(scope="module")
def pool(ranks):
    if WORLDS == 4:
        yield ranks
        return
    p = Ranks(WORLDS)
    yield p
    p.close()


def call(pool, world, name, **kw):
    return pool.run(world, "reshard_cases", name, seconds=300, **kw)


@pytest.mark.long
@pytest.mark.parametrize("group", [g if g < 1 else pytest.param(g, marks=pytest.mark.long) for g in range(GROUPS)])
def test_a_to_b_to_c(d, pool, group):
    a, b, c = (cases.world_of(group, w, WORLDS) for w in "abc")
    seeds, base = range(group * PER_GROUP, (group + 1) * PER_GROUP), lib.fresh()
    root = d.storages["main"] / "random"
    call(pool, a, "save", seeds=seeds, which=f"a{a}", root=str(root / base))
    for s in seeds:
        d.api.run("reshard", source={"storage": "main", "name": f"random/{base}/{s}"},
                  target={"storage": "main", "name": f"random/{base}-b/{s}", "world_size": b, "layout": cases.rules(s, f"b{b}", b)})
        got = {fqn: {(tuple(o), tuple(z)) for o, z in boxes if 0 not in z} for fqn, boxes in boxes_of(root / f"{base}-b/{s}").items()}
        assert got == cases.boxes(s, f"b{b}", b), f"seed {s}"
    wrong = [f"{a} -> {b} -> {world}, rank {r}: {x}"
             for world, which in ((b, f"b{b}"), (c, f"c{c}"))
             for r, of_rank in enumerate(call(pool, world, "load", seeds=seeds, which=which, pattern=str(root / (base + "-b") / "{seed}")))
             for x in of_rank]
    shutil.rmtree(root)
    assert not wrong, "\n".join(wrong[:20])
