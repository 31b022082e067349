"""PyTorch's own file-system checkpoint scenarios with dcpd in the middle, and the other way round.

    PyTorch saves → dcpd loads into shared memory as another layout, saves; and reshards → PyTorch loads, bit for bit
    segments → dcpd saves → PyTorch loads as another layout, saves → dcpd loads as a third: the segments' bytes again

Each with one and two writer threads, through save/load and the legacy pair. Real ranks over gloo.
"""
import math

import pytest
from lib_interop import assemble, boxes_of, images_of
from scenarios import LAYOUTS, LAYOUTS_32, boxes, full, module_content, rule

import dcpd as lib

VARIANTS = [(1, "new"), (2, "legacy"), (2, "new"), (1, "legacy")]


def across(names, cases):
    """The cases with threads and API. Quick: each case once, with the first two variants in turn; the others are long."""
    return pytest.mark.parametrize(f"{names}, threads, api", [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), *v, marks=() if k == i % 2 else pytest.mark.long)
        for i, case in enumerate(cases) for k, v in enumerate(VARIANTS)])


def name(*parts):
    return "/".join(["interop", lib.fresh(), *map(str, parts)])


def ref(n):
    return {"storage": "main", "name": n}


def path(d, n):
    return str(d.storages["main"] / n)


def through(d, source, layout, world, tag):
    """One checkpoint, twice through dcpd: by way of shared memory, and resharded directly. Two names."""
    via_shm, direct, sd = f"{source}-shm-{tag}", f"{source}-direct-{tag}", lib.fresh()
    rules = [rule(layout)]
    d.api.run("load", source=ref(source), target={"state_dict": sd, "world_size": world, "layout": rules})
    d.api.run("save", source={"state_dict": sd}, target=ref(via_shm))
    d.drop(sd)
    d.api.run("reshard", source=ref(source), target={**ref(direct), "format": "dcp", "world_size": world, "layout": rules})
    return [via_shm, direct]


@pytest.mark.long
@across("source", LAYOUTS)
def test_sharded_10x20_through_dcpd(d, ranks, source, threads, api):
    shape, base, loads = (10, 20), name(), []
    ranks.run(2, "scenarios", "save_sharded", jobs=[(path(d, base), LAYOUTS[source])], shape=shape, thread_count=threads, api=api)
    for i, (target, layout) in enumerate(LAYOUTS.items()):
        for made in through(d, base, layout, 2, i):
            assert boxes_of(path(d, made))["sharded"] == sorted((o, s) for _, o, s in boxes(layout, shape)), (made, target)
            loads += [(path(d, made), layout), (path(d, made), LAYOUTS[source]), (path(d, made), None)]
    ranks.run(2, "scenarios", "load_sharded", jobs=loads, shape=shape, api=api)


@across("source", LAYOUTS)
def test_sharded_10x20_from_dcpd(d, ranks, source, threads, api):
    shape, base, sd = (10, 20), name(), lib.fresh()
    d.put(sd, images_of("sharded", full(shape), boxes(LAYOUTS[source], shape), 2))
    d.api.run("save", source={"state_dict": sd}, target=ref(base))
    assert boxes_of(path(d, base))["sharded"] == sorted((o, s) for _, o, s in boxes(LAYOUTS[source], shape))
    targets = list(LAYOUTS.values())
    ranks.run(2, "scenarios", "load_sharded", jobs=[(path(d, base), t) for t in targets], shape=shape, api=api)
    back = [f"{base}-back-{i}" for i in range(len(targets))]
    ranks.run(2, "scenarios", "save_sharded", jobs=[(path(d, n), t) for n, t in zip(back, targets)], shape=shape,
              thread_count=threads, api=api)
    for n in back:
        again = lib.fresh()
        d.api.run("load", source=ref(n), target={"state_dict": again, "world_size": 2, "layout": [rule(LAYOUTS[source])]})
        for r, img in enumerate(d.images(again)):
            want = [(o, s) for k, o, s in boxes(LAYOUTS[source], shape) if k == r]
            assert sorted((o, s) for _, _, o, s, _, _ in img.chunks()) == sorted(want)
        assert assemble(d.images(again))["sharded"] == (list(shape), full(shape).numpy().tobytes())
        d.drop(again)


@across("source", [None, *LAYOUTS_32])
def test_sharded_32_as_plain_and_back(d, ranks, source, threads, api):
    shape, base, loads = (32,), name(), []
    layout = LAYOUTS_32.get(source)
    ranks.run(2, "scenarios", "save_sharded", jobs=[(path(d, base), layout)], shape=shape, thread_count=threads, api=api)
    targets = [None] if layout else list(LAYOUTS_32.values())
    for i, t in enumerate(targets):
        for made in through(d, base, t, 2, i):
            loads += [(path(d, made), t), (path(d, made), layout)]
    ranks.run(2, "scenarios", "load_sharded", jobs=loads, shape=shape, api=api)


@pytest.mark.parametrize("source", LAYOUTS_32)
def test_sharded_32_from_dcpd(d, ranks, source):
    shape, base, sd = (32,), name(), lib.fresh()
    d.put(sd, images_of("sharded", full(shape), boxes(LAYOUTS_32[source], shape), 2))
    d.api.run("save", source={"state_dict": sd}, target=ref(base))
    loads = [(path(d, base), t) for t in (None, *LAYOUTS_32.values())]
    ranks.run(2, "scenarios", "load_sharded", jobs=loads, shape=shape, api="new")


@across("world, no_dist", [(1, True), (2, False)])
def test_plain_module(d, ranks, world, no_dist, threads, api):
    base = name()
    ranks.run(world, "scenarios", "module_save", path=path(d, base), thread_count=threads, api=api, no_dist=no_dist)
    made = through(d, base, None, world, 0) + through(d, base, ("chunks", 0, [0, 1]), 2, 1)
    for n in made:
        ranks.run(world, "scenarios", "module_load", path=path(d, n), api=api, no_dist=no_dist)


def test_plain_module_from_dcpd(d, ranks):
    base, sd, content = name(), lib.fresh(), module_content()
    d.put(sd, [lib.image(content), lib.image(content)])
    d.api.run("save", source={"state_dict": sd}, target=ref(base))
    for world, no_dist in ((1, True), (2, False)):
        ranks.run(world, "scenarios", "module_load", path=path(d, base), api="new", no_dist=no_dist)


@across("world, no_dist", [(1, True), (2, False)])
def test_values_over_other_values(d, ranks, world, no_dist, threads, api):
    base = name()
    ranks.run(world, "scenarios", "values_save", path=path(d, base), thread_count=threads, api=api, no_dist=no_dist)
    for n in through(d, base, None, world, 0):
        ranks.run(world, "scenarios", "values_load", path=path(d, n), api=api, no_dist=no_dist)


def test_values_from_dcpd(d, ranks):
    base, sd = name(), lib.fresh()
    d.put(sd, [lib.image({}, {"values": {"bytes0": {"json": [1]}, "bytes1": {"json": "string"}}})])
    d.api.run("save", source={"state_dict": sd}, target=ref(base))
    ranks.run(1, "scenarios", "values_load", path=path(d, base), api="new", no_dist=True)


@pytest.mark.parametrize("world", [3, 4])
def test_rows_over_more_ranks(d, ranks, world):
    """Uneven: 10 rows over 3 and over 4 ranks, into columns."""
    shape, base = (10, 20), name()
    rows, columns = ("chunks", 0, list(range(world))), ("chunks", 1, list(range(world)))
    ranks.run(world, "scenarios", "save_sharded", jobs=[(path(d, base), rows)], shape=shape, thread_count=1, api="new")
    made = through(d, base, columns, world, 0)
    ranks.run(world, "scenarios", "load_sharded", jobs=[(path(d, n), t) for n in made for t in (rows, columns)], shape=shape,
              api="new")


def test_the_scenarios_themselves(ranks, tmp_path):
    """PyTorch alone passes them, and they do notice a wrong byte: a test of the tests."""
    shape = (10, 20)
    jobs = [(str(tmp_path / str(i)), layout) for i, layout in enumerate(LAYOUTS.values())]
    ranks.run(2, "scenarios", "save_sharded", jobs=jobs, shape=shape, thread_count=2, api="new")
    ranks.run(2, "scenarios", "load_sharded", jobs=[(p, t) for p, _ in jobs for t in LAYOUTS.values()], shape=shape, api="legacy")
    raw = full(shape)[:5].numpy().tobytes()
    f = next(f for f in (tmp_path / "0").glob("__0_*.distcp") if raw in f.read_bytes())
    data = bytearray(f.read_bytes())
    data[data.index(raw) + 5] ^= 1
    f.write_bytes(data)
    with pytest.raises(AssertionError, match="differs from what was saved"):
        ranks.run(2, "scenarios", "load_sharded", jobs=jobs[:1], shape=shape, api="new")
    assert math.prod(shape) == 200
