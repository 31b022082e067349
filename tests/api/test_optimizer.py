"""Loads of optimizer state: what a model's state dict in shared memory makes of it, and what is refused. PyTorch's own is beside it in
tests/interop/test_optimizer_state.py."""
import struct

import pytest

import dcpd as lib


def floats(shape, start=0):
    n = 1
    for s in shape:
        n *= s
    return struct.pack(f"<{n}f", *range(start, start + n))


def rows(t, offsets, sizes, shape, start=0):
    """What box offsets+sizes of a 2-d tensor made by floats() holds."""
    assert len(shape) == 2, t
    return b"".join(struct.pack(f"<{sizes[1]}f", *(start + (offsets[0] + i) * shape[1] + offsets[1] + k for k in range(sizes[1])))
                    for i in range(sizes[0]))


STATE = {"w": [6, 5], "v": [7, 4], "b": [5]}


def checkpoint(d, entries=None, values=None, paths=None):
    """A checkpoint with optimizer state; its reference."""
    sd, n = lib.fresh("src"), f"optim/{lib.fresh()}"
    tensors, where = {"model.w": ("F32", [6, 5], floats([6, 5]))}, {"model.w": ["model", "w"]}
    for i, (p, shape) in enumerate(STATE.items()):
        for k, name in enumerate(("exp_avg", "exp_avg_sq")):
            fqn = f"optim.state.{p}.{name}"
            tensors[fqn] = ("F32", shape, floats(shape, 1000 * i + 100 * k))
            where[fqn] = ["optim", "state", p, name]
        tensors[f"optim.state.{p}.step"] = ("F32", [], struct.pack("<f", 7 + i))
        where[f"optim.state.{p}.step"] = ["optim", "state", p, "step"]
    tensors["optim.state.w.one"] = ("F32", [1, 1], floats([1, 1], 5))
    where["optim.state.w.one"] = ["optim", "state", "w", "one"]
    where["optim.param_groups"] = ["optim", "param_groups"]
    values = values or {"optim.param_groups": {"json": [{"lr": 0.5, "params": ["w", "v", "b"]}]}, "epoch": {"json": 3}}
    d.put(sd, [lib.image(entries or tensors, {"paths": where if paths is None else paths, "values": values})])
    ref = {"storage": "main", "name": n}
    d.api.run("save", source={"state_dict": sd}, target=ref)
    return ref


def model(d, ranks, **more):
    """A sealed model of one entry list per rank: {FQN: (shape of the part, what the metadata say of it)}."""
    name = lib.fresh("model")
    images = []
    for r in ranks:
        images.append(lib.image({n: ("F32", shape, floats(shape)) for n, (shape, _) in r.items()},
                                {"tensors": {n: t for n, (_, t) in r.items() if t}, **more}))
    d.put(name, images)
    return name


def plain_model(d, world):
    """1-D: each rank has rows of w."""
    step = -(-6 // world)
    return model(d, [{"w": ([min(step, max(0, 6 - step * r)), 5], {"global_shape": [6, 5], "offsets": [min(step * r, 6), 0]})}
                     for r in range(world)])


def nested(shape, outer, sizes, offsets, inner, **more):
    return inner, {"global_shape": sizes, "offsets": offsets, "outer": {"global_shape": shape, "offsets": outer, **more}}


def tp_model(d, named=True):
    """2-D on 4 ranks: w by columns (3 + 2) over tp, v by rows (4 + 3); ranks 0 and 2 share a slice, 1 and 3 the other. b is not nested."""
    ranks = []
    for r in range(4):
        tp, dp = r % 2, r // 2
        group = {"ranks": [tp, tp + 2]} if named else {}
        wide, high = (3, 2)[tp], (4, 3)[tp]
        step = -(-high // 2)
        ranks.append({"w": nested([6, 5], [0, 3 * tp], [6, wide], [3 * dp, 0], [3, wide], **group),
                      "v": nested([7, 4], [4 * tp, 0], [high, 4], [step * dp, 0], [min(step, high - step * dp), 4], **group),
                      "b": ([5], None)})
    return model(d, ranks)


def load(d, ref, model, key="optim", **more):
    name = lib.fresh("osd")
    j = d.api.run("load", source=ref, target={"state_dict": name}, optimizer={"key": key, "model": {"state_dict": model}}, **more)
    return j["result"], d.images(name)


def torch_chunk(n, world, i):
    step = -(-n // world)
    return min(i * step, n), min(step, max(0, n - i * step))


@pytest.mark.parametrize("world", (1, 2, 3, 8))
def test_one_dimension(d, world):
    result, images = load(d, checkpoint(d), plain_model(d, world))
    assert result["world_size"] == world and result["tensors"] == 10 and result["unexpected"] == [] and result["unmatched"] == 0
    for r, im in enumerate(images):
        got = {c[0]: c for c in im.chunks()}
        assert set(im.values) == {"optim.param_groups.0.lr", "optim.param_groups.0.params"}, im.values
        assert im.values["optim.param_groups.0.lr"] == {"json": 0.5}
        assert im.dcpd["paths"]["optim.param_groups.0.lr"] == ["optim", "param_groups", 0, "lr"]
        assert len(got) == 10
        for i, (p, shape) in enumerate(STATE.items()):
            assert got[f"optim.state.{p}.step"][1:4] == ([], [], []) and got[f"optim.state.{p}.step"][5] == struct.pack("<f", 7 + i)
            start, n = torch_chunk(shape[0], world, r)
            _, whole, offsets, sizes, _, data = got[f"optim.state.{p}.exp_avg"]
            assert (whole, offsets, sizes) == (shape, [start] + [0] * (len(shape) - 1), [n] + shape[1:])
            width = len(floats(shape[1:]))
            assert data == floats(shape, 1000 * i)[start * width:(start + n) * width]
            assert "global_shape" in im.dcpd["tensors"][f"optim.state.{p}.exp_avg"]  # also where it is whole: it is sharded
        assert got["optim.state.w.one"][1:4] == ([1, 1], [0, 0], [1, 1]) and got["optim.state.w.one"][5] == floats([1], 5)
        assert "optim.state.w.one" not in im.dcpd["tensors"]


@pytest.mark.parametrize("named", (True, False))
def test_two_dimensions(d, named):
    ref = checkpoint(d)
    result, images = load(d, ref, tp_model(d, named))
    assert result["world_size"] == 4 and result["unmatched"] == 0
    for r, im in enumerate(images):
        tp, dp = r % 2, r // 2
        got = {c[0]: c for c in im.chunks()}
        assert len(got) == 10 and set(im.values) == {"optim.param_groups.0.lr", "optim.param_groups.0.params"}
        for i, (p, at, slice_) in enumerate((("w", [0, 3 * tp], [6, (3, 2)[tp]]), ("v", [4 * tp, 0], [(4, 3)[tp], 4]))):
            for k, n in enumerate(("exp_avg", "exp_avg_sq")):
                fqn = f"optim.state.{p}.{n}"
                _, whole, offsets, sizes, _, data = got[fqn]
                start, rows_here = torch_chunk(slice_[0], 2, dp)
                assert (whole, offsets, sizes) == (slice_, [start, 0], [rows_here, slice_[1]])  # unshifted: within the slice
                assert im.dcpd["tensors"][fqn]["outer"] == {"global_shape": STATE[p], "offsets": at, "ranks": [tp, tp + 2]}
                assert data == rows(fqn, [at[0] + start, at[1]], sizes, STATE[p], 1000 * i + 100 * k)  # read where it lies
        start, n = torch_chunk(5, 2, dp)
        assert got["optim.state.b.exp_avg"][1:4] == ([5], [start], [n])  # not nested: whole, over the group
        assert got["optim.state.b.exp_avg"][5] == floats([5], 2000)[4 * start:4 * (start + n)]
        assert got["optim.state.v.step"][5] == struct.pack("<f", 8)
    # what was loaded can be saved: its parts are known to be parts of the whole tensors
    names = d.api.get("/v1/state-dicts").ok(200)["state_dicts"]
    osd = [s["name"] for s in names if s["name"].startswith("osd")][0]
    again = {"storage": "main", "name": f"optim/{lib.fresh()}"}
    d.api.run("save", source={"state_dict": osd}, target=again, options={"on_divergence": "fail"})
    j = d.api.run("diff", a=ref, b=again)
    assert {x["path"] for x in j["result"]["differences"]} == {"model.w", "epoch"}, j["result"]


def test_a_model_inside_a_dict_and_a_flattened_state(d):
    """The parameters are called by the last part of their paths, and by dots alone where there is no path."""
    where = {"model": {"w": ["model", "w"]}}
    ranks = [{"model.w": nested([6, 5], [0, 3 * r], [6, 3 - r], [0, 0], [6, 3 - r])} for r in range(2)]
    m = model(d, ranks, paths={"model.w": where["model"]["w"]})
    flat = {"optim.state.w.exp_avg": ("F32", [6, 5], floats([6, 5])), "optim.state.q.exp_avg": ("F32", [6, 5], floats([6, 5], 50)),
            "optim.state.w": ("F32", [3], floats([3]))}
    for paths in ({f: ["optim", f[6:]] for f in flat}, {f: ["optim", "state", *f[12:].split(".")] for f in flat}):
        paths["optim.param_groups.w.lr"] = ["optim", "param_groups.w.lr"]
        ref = checkpoint(d, flat, {"optim.param_groups.w.lr": {"json": 1}}, paths)
        result, images = load(d, ref, m)
        assert result["unmatched"] == 1, result
        for r, im in enumerate(images):
            got = {c[0]: c for c in im.chunks()}
            assert got["optim.state.w.exp_avg"][1:4] == ([6, 3 - r], [0, 0], [6, 3 - r])
            assert got["optim.state.w.exp_avg"][5] == rows("w", [0, 3 * r], [6, 3 - r], [6, 5])
            assert got["optim.state.q.exp_avg"][1:4] == ([6, 5], [0, 0], [6, 5])  # the model lacks it: full size
            assert got["optim.state.w"][1:4] == ([3], [0], [3])  # other dims than the parameter's: full size
            assert im.dcpd["paths"]["optim.state.w.exp_avg"] == paths["optim.state.w.exp_avg"]


def test_a_mesh_rule_of_the_model(d):
    """DTensors: 1-D as in PyTorch, unless a mesh dim is named tp."""
    def dtensor(names):
        rule = {"match": "w", "mesh": [2, 2], "placements": ["Shard(0)", "Shard(1)"], **names}
        return model(d, [{"w": ([3, 3 - r % 2], {"global_shape": [6, 5], "offsets": [3 * (r // 2), 3 * (r % 2)]})} for r in range(4)],
                     layout=[rule])

    ref = checkpoint(d)
    for names in ({}, {"dim_names": ["replicate", "shard"]}):
        _, images = load(d, ref, dtensor(names))
        assert [next(c for c in im.chunks() if c[0] == "optim.state.w.exp_avg")[1:4] for im in images] == \
            [([6, 5], [0, 0], [2, 5]), ([6, 5], [2, 0], [2, 5]), ([6, 5], [4, 0], [2, 5]), ([6, 5], [6, 0], [0, 5])]
    _, images = load(d, ref, dtensor({"dim_names": ["dp", "tp"]}))
    for r, im in enumerate(images):
        c = next(c for c in im.chunks() if c[0] == "optim.state.w.exp_avg")
        assert c[1:4] == ([6, 3 - r % 2], [3 * (r // 2), 0], [3, 3 - r % 2])
        assert c[5] == rows("w", [3 * (r // 2), 3 * (r % 2)], c[3], [6, 5])


@pytest.mark.parametrize("types, words", ((["ShardedTensor", "DTensor"], "Cannot handle DTensor nested inside ShardedTensor"),
                                          (["DTensor", "ShardedTensor"], "Cannot handle nested DTensor")))
def test_nestings_that_pytorch_refuses(d, types, words):
    m = model(d, [{"w": nested([6, 5], [0, 0], [6, 5], [0, 0], [6, 5], types=types)}])
    p = d.api.fails("load", "plan_invalid", source=checkpoint(d), target={"state_dict": lib.fresh("osd")},
                    optimizer={"key": "optim", "model": {"state_dict": m}})
    assert words in p["detail"] and p["fqn"] == "w" and p["rank"] == 0, p


def test_several_outer_shards(d):
    m = model(d, [{"w": nested([6, 5], [0, 0], [6, 3], [0, 0], [6, 3]),
                   "w2": (lambda e: (e[0], {**e[1], "fqn": "w"}))(nested([6, 5], [0, 3], [6, 2], [0, 0], [6, 2]))}])
    p = d.api.fails("load", "plan_invalid", source=checkpoint(d), target={"state_dict": lib.fresh("osd")},
                    optimizer={"key": "optim", "model": {"state_dict": m}})
    assert "Cannot handle ST with multiple shards" in p["detail"] and p["fqn"] == "w" and p["rank"] == 0, p


def test_groups_that_contradict_each_other(d):
    ref = checkpoint(d)
    half = [nested([6, 5], [0, 3 * r], [6, 3 - r], [0, 0], [6, 3 - r], ranks=[0, 1]) for r in range(2)]
    outside = nested([6, 5], [0, 0], [6, 5], [0, 0], [6, 5], ranks=[0, 9])
    foreign = nested([6, 5], [0, 0], [6, 5], [0, 0], [6, 5], ranks=[1])
    twice = nested([6, 5], [0, 0], [6, 5], [0, 0], [6, 5], ranks=[0, 0])
    for ranks, rank in (([{"w": half[0]}, {"w": half[1]}], 1), ([{"w": outside}], 0), ([{"w": foreign}, {"w": foreign}], 0),
                        ([{"w": twice}], 0)):
        p = d.api.fails("load", "plan_invalid", source=ref, target={"state_dict": lib.fresh("osd")},
                        optimizer={"key": "optim", "model": {"state_dict": model(d, ranks)}})
        assert p["fqn"] == "w" and p["rank"] == rank, p


def test_state_of_another_model(d):
    m = model(d, [{"w": nested([6, 9], [0, 0], [6, 9], [0, 0], [6, 9])}])
    p = d.api.fails("load", "size_mismatch", source=checkpoint(d), target={"state_dict": lib.fresh("osd")},
                    optimizer={"key": "optim", "model": {"state_dict": m}})
    assert p["fqn"] == "optim.state.w.exp_avg" and p["expected"] == "[6, 5]" and p["actual"] == "[6, 9]", p


def test_bad_requests(d):
    ref, m = checkpoint(d), plain_model(d, 2)
    to = {"state_dict": lib.fresh("osd")}
    ok = {"key": "optim", "model": {"state_dict": m}}

    def refused(*codes, target=to, kind="load", **more):
        return d.api.post("/v1/jobs", {"kind": kind, "source": ref, "target": target, **more}).problem(*codes)

    assert refused("not_found", optimizer={"key": "optim", "model": {"state_dict": "nobody"}})["status"] == 404
    p = d.api.fails("load", "missing_key", source=ref, target=to, optimizer={**ok, "key": "optimizer"})
    assert "model" in p["detail"] and "optim" in p["detail"] and "epoch" in p["detail"] and p["status"] == 422, p
    p = d.api.fails("load", "world_mismatch", source=ref, target={**to, "world_size": 3}, optimizer=ok)
    assert refused("validation_failed", optimizer=ok, target={**to, "layout": [{"match": "*", "placements": ["Shard(0)"]}]})
    assert refused("unknown_field", optimizer={**ok, "planner": 1})["pointer"] == "/optimizer/planner"
    assert refused("validation_failed", optimizer={"key": "", "model": {"state_dict": m}})
    assert refused("validation_failed", optimizer={"model": {"state_dict": m}})
    assert refused("validation_failed", optimizer={"key": "optim"})
    assert refused("validation_failed", "unknown_field", optimizer={"key": "optim", "model": ref})
    assert refused("validation_failed", optimizer="optim")
    assert refused("unknown_field", kind="reshard", target={"storage": "main", "name": "x"}, optimizer=ok)
    assert refused("state_dict_exists", optimizer=ok, target={"state_dict": m})["status"] == 409
    open_one = lib.fresh("open")
    d.create(open_one)
    assert refused("not_sealed", optimizer={"key": "optim", "model": {"state_dict": open_one}})


@pytest.mark.parametrize("key", ("optim.", ".optim", "optim..state", "o", "optim.state.w.exp_avg.", "." * 4000, "*", "\u0000", "epoch.x"))
def test_hostile_keys(d, key):
    m = plain_model(d, 1)
    d.api.fails("load", "missing_key", "validation_failed", "invalid_json", source=checkpoint(d), target={"state_dict": lib.fresh("osd")},
                optimizer={"key": key, "model": {"state_dict": m}})


def test_a_key_of_several_parts(d):
    """{"app": {"optim": …}}: PyTorch finds optimizers at the top level only."""
    result, images = load(d, checkpoint(d), plain_model(d, 2), key="optim.state.w")
    names = {f"optim.state.w.{n}" for n in ("exp_avg", "exp_avg_sq", "step", "one")}
    assert result["tensors"] == 4 and {c[0] for c in images[0].chunks()} == names


def test_selections_and_dry_run(d):
    ref, m = checkpoint(d), tp_model(d)
    result, images = load(d, ref, m, include=["optim.state.w.*"], dtype=[["*.exp_avg", "float64"]])
    assert result["tensors"] == 4 and result["values"] == 0
    assert next(c for c in images[1].chunks() if c[0].endswith("exp_avg"))[4] == "F64"
    to = {"state_dict": lib.fresh("osd")}
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "load", "source": ref, "target": to,
                                                "optimizer": {"key": "optim", "model": {"state_dict": m}}}).ok(200)
    assert plan
    d.api.get(f"/v1/state-dicts/{to['state_dict']}").problem("not_found")


def test_dcpctl(d):
    ref, m, name = checkpoint(d), plain_model(d, 2), lib.fresh("osd")
    done = d.ctl("load", f"main:{ref['name']}", f"shm:{name}", "--optimizer", "optim", "--model", f"shm:{m}")
    assert done.returncode == 0, done.stderr
    assert len(d.images(name)) == 2
    for words in (("--optimizer", "optim"), ("--model", f"shm:{m}"), ("--optimizer", "optim", "--model", m)):
        assert d.ctl("load", f"main:{ref['name']}", f"shm:{lib.fresh()}", *words).returncode == 2
