"""State-dict operations in a gang of workers, with a coordinator that does as worker/ctl/README.md says: what moves, what is kept, what
fails. Beside PyTorch's own functions they are judged in tests/interop."""
import os
import pathlib
import signal
import struct

import pytest

import dcpd as lib
from gang import SANITIZED, Closed, Gang, Segments, Worker, done, failed

BACKENDS = ["shm", "tcp", "nccl"]
FAKES = {"LD_LIBRARY_PATH": str(pathlib.Path(lib.ROOT) / "build/test/fakes"), "FAKE_CUDA_DEVICES": "2"}


@pytest.fixture(scope="module", params=BACKENDS)
def gang(request):
    """nccl: over a libcuda and a libnccl of the tests' own, so that it runs without a GPU."""
    nccl = request.param == "nccl"
    with Gang(2, {}, network=request.param != "shm", device=nccl, env=FAKES if nccl else None) as g:
        g.backend = request.param
        yield g


def f32(*v):
    return struct.pack(f"<{len(v)}f", *v)


def i64(*v):
    return struct.pack(f"<{len(v)}q", *v)


def run(gang, kind, source, target=None, **spec):
    dicts = {"s": source, **({"t": target} if target else {})}
    return gang.job(kind, {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": gang.backend, **spec}, dicts)


def still_works(gang):
    """What failed has left nothing behind that the next job meets."""
    s = rows(2)
    done(run(gang, "gather", s))
    gang.made.close()
    s.close()


def images(segments):
    return [lib.Image(segments.read(r)) for r in range(len(segments.fds))]


def rows(world=4, height=8, width=6, mesh=True, dtype="F32", make=f32):
    """w cut by rows; rank r's first element is r * 1000."""
    each = height // world
    out = []
    for r in range(world):
        part = make(*[r * 1000 + i for i in range(each * width)])
        meta = {"tensors": {"w": {"fqn": "w", "global_shape": [height, width], "offsets": [r * each, 0]}},
                "values": {"step": {"json": 7}, "cfg": {"json": {"a": [1, 2.5], "e": {}}}, "blob": {"bytes": "AAEC"}}}
        if mesh:
            meta["layout"] = [{"match": "w", "mesh": [world], "placements": ["Shard(0)"]}]
        out.append(lib.image({"w": (dtype, (each, width), part), "p": ("I64", (3,), i64(r, r + 1, r + 2)),
                              "z": ("F64", (), struct.pack("<d", r))}, meta))
    return Segments(out)


def whole(segments):
    return b"".join(im.entries["w"][2] for im in images(segments))


# ------------------------------------------------------------------------------------------------------ gather


@pytest.mark.parametrize("mesh", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather_gives_every_rank_the_whole(gang, mesh, world):
    s = rows(world, mesh=mesh)
    r = done(run(gang, "gather", s))
    for rank, im in enumerate(images(gang.made)):
        assert im.entries["w"] == ("F32", [8, 6], whole(s))
        assert im.entries["p"][2] == i64(rank, rank + 1, rank + 2)
        assert im.values["cfg.a"] == {"json": [1, 2.5]} and im.values["cfg.e"] == {"json": {}}
        assert im.dcpd["paths"]["cfg.a"] == ["cfg", "a"] and im.values["blob"] == {"bytes": "AAEC"}
        assert "layout" not in im.dcpd
    assert r["backend"] == gang.backend and r["world_size"] == world
    assert r["needed_bytes"] == (world - 1) * 8 * 6 * 4 == r["moved_bytes"]
    assert r["segment_bytes"] == sum(gang.made.bytes)
    gang.made.close()
    s.close()


def test_gather_to_some_ranks_leaves_the_others_empty(gang):
    s = rows(4)
    r = done(run(gang, "gather", s, ranks_only=[0, 2]))
    ims = images(gang.made)
    assert ims[1].entries == {} and ims[3].entries == {} and ims[1].values == {}
    assert ims[0].entries["w"][2] == ims[2].entries["w"][2] == whole(s)
    assert r["moved_bytes"] == 2 * 3 * 2 * 6 * 4
    gang.made.close()
    s.close()


def test_a_partial_tensor_is_reduced(gang):
    op = {"sum": sum, "avg": lambda v: sum(v) / len(v), "min": min, "max": max}
    for name, fn in op.items():
        parts = [[float((r + 2) * (i + 1) % 7) for i in range(12)] for r in range(4)]
        s = Segments([lib.image({"w": ("F32", (3, 4), f32(*parts[r]))},
                                {"tensors": {"w": {"fqn": "w", "global_shape": [3, 4], "offsets": [0, 0]}},
                                 "layout": [{"match": "*", "mesh": [4], "placements": [f"Partial({name})"]}]}) for r in range(4)])
        done(run(gang, "gather", s))
        want = f32(*[fn(p[i] for p in parts) if name != "avg" else fn([p[i] for p in parts]) for i in range(12)])
        assert all(im.entries["w"][2] == want for im in images(gang.made)), name
        gang.made.close()
        s.close()


# --------------------------------------------------------------------------------------------- redistribute, copy


def test_redistribute_rows_to_columns_and_back(gang):
    s = rows(4, 16, 12)
    r = done(run(gang, "redistribute", s, layout=[{"match": "*", "mesh": [4], "placements": ["Shard(1)"]}]))
    cols = gang.made
    want = struct.unpack("<192f", whole(s))
    for rank, im in enumerate(images(cols)):
        got = struct.unpack("<48f", im.entries["w"][2])
        assert list(got) == [want[i * 12 + rank * 3 + k] for i in range(16) for k in range(3)]
        assert im.dcpd["layout"][0]["placements"] == ["Shard(1)"]
    assert r["moved_bytes"] == r["needed_bytes"] == 16 * 12 * 4 * 3 // 4
    done(run(gang, "redistribute", cols, layout=[{"match": "*", "mesh": [4], "placements": ["Shard(0)"]}]))
    assert whole(gang.made) == whole(s)
    gang.made.close()
    cols.close()
    s.close()


def test_copy_casts_and_keeps_the_targets_dtype(gang):
    s, t = rows(2), rows(2, dtype="F64", make=lambda *v: struct.pack(f"<{len(v)}d", *[-1.0] * len(v)))
    before = [t.read(r) for r in range(2)]
    r = done(run(gang, "copy", s, t))
    for a, b in zip(images(s), images(gang.made)):
        n = 8 * 6 // 2
        assert b.entries["w"][0] == "F64"
        assert struct.unpack(f"<{n}d", b.entries["w"][2]) == struct.unpack(f"<{n}f", a.entries["w"][2])
        assert b.entries["p"] == a.entries["p"]
    assert {c["path"] for c in r["cast"]} == {"w"} and r["cast"][0]["from"] == "float32"
    assert [t.read(r) for r in range(2)] == before, "a target's bytes were changed in place"
    gang.made.close()
    s.close()
    t.close()


def test_copy_into_another_structure_names_the_path(gang):
    s = rows(2)
    t = Segments([lib.image({"p": ("I64", (3,), i64(0, 0, 0)), "z": ("F64", (), bytes(8))}, {"values": {"step": {"json": 1}}})] * 2)
    p = failed(run(gang, "copy", s, t), "companion_mismatch")
    assert "WANT_SEGMENTS" not in [k for _, k in gang.seen] and p["detail"]
    s.close()
    t.close()


# ----------------------------------------------------------------------------------------------- create, offload


def test_create_is_empty_and_alike(gang):
    s = rows(2)
    r = done(run(gang, "create", s, pin_memory=True))
    for a, b in zip(images(s), images(gang.made)):
        assert {k: v[:2] for k, v in a.entries.items()} == {k: v[:2] for k, v in b.entries.items()}
        assert not any(any(v[2]) for v in b.entries.values())
    assert r["moved_bytes"] == 0 and r["pinned"] is (gang.backend == "nccl") and ("pin_problem" in r) is not r["pinned"]
    gang.made.close()
    s.close()


def test_pinning_that_fails_is_told_and_leaves_nothing_pinned():
    env = {**FAKES, "FAKE_CUDA_FAIL": "cuMemHostRegister_v2:2:2"}
    with Gang(1, {}, device=True, env=env) as g:
        g.backend = "shm"
        s = rows(2)
        r = done(run(g, "create", s, pin_memory=True))
        assert r["pinned"] is False and "cuMemHostRegister" in r["pin_problem"]
        maps = open(f"/proc/{g.workers[0].proc.pid}/maps").read()
        assert "dcpd-test" not in maps
        r = done(run(g, "create", s, pin_memory=True))
        assert r["pinned"] is True
        assert open(f"/proc/{g.workers[0].proc.pid}/maps").read().count("dcpd-test") == 2
        done(run(g, "create", s))  # these segments have no name any more: the next job lets them go
        assert "dcpd-test" not in open(f"/proc/{g.workers[0].proc.pid}/maps").read()
        s.close()


def test_offload_to_some_ranks(gang):
    s = Segments([lib.image({"a": ("I64", (10,), i64(*range(10))), "b": ("I64", (10,), i64(*[1] * 10))}) for _ in range(4)])
    done(run(gang, "offload", s, ranks_only=[0, 2]))
    ims = images(gang.made)
    assert ims[0].entries == ims[2].entries == images(s)[0].entries and ims[1].entries == ims[3].entries == {}
    gang.made.close()
    s.close()


# --------------------------------------------------------------------------------------- broadcast, distribute


def full(height=8, width=6):
    return lib.image({"w": ("F32", (height, width), f32(*range(height * width))), "extra": ("I64", (2,), i64(5, 6)),
                      "z": ("F64", (), struct.pack("<d", 2.5))}, {"values": {"step": {"json": 9}, "more": {"json": "x"}}})


@pytest.mark.parametrize("strict", [False, True])
def test_broadcast_fills_what_the_target_has(gang, strict):
    s, t = Segments([full()]), rows(4)
    r = done(run(gang, "broadcast", s, t, strict=strict))
    ims = images(gang.made)
    assert b"".join(im.entries["w"][2] for im in ims) == f32(*range(48))
    for rank, im in enumerate(ims):
        assert ("p" in im.entries) == (not strict) and "extra" not in im.entries
        assert strict or im.entries["p"][2] == i64(rank, rank + 1, rank + 2)
        assert im.values["step"] == {"json": 9} and "more" not in im.values
        assert im.dcpd["layout"][0]["placements"] == ["Shard(0)"]
    assert {d["path"] for d in r["dropped"]} >= {"extra"} and {m["path"] for m in r["missing"]} >= {"p"}
    gang.made.close()
    s.close()
    t.close()


def test_broadcast_to_nobody_yet_takes_every_key(gang):
    s = Segments([full()])
    done(gang.job("broadcast", {"source": {"state_dict": "s"}, "target": {"state_dict": "t", "world_size": 3},
                                "backend": gang.backend}, {"s": s}))
    for im in images(gang.made):
        assert im.entries["w"] == ("F32", [8, 6], f32(*range(48))) and im.values["more"] == {"json": "x"}
    gang.made.close()
    s.close()


def test_distribute_uneven_by_a_layout(gang):
    s = Segments([full(7, 3)])
    done(gang.job("distribute", {"source": {"state_dict": "s"}, "target": {"state_dict": "t", "world_size": 4}, "backend": gang.backend,
                                 "layout": [{"match": "w", "mesh": [4], "placements": ["Shard(0)"]},
                                            {"match": "*", "mesh": [4], "placements": ["Replicate()"]}]}, {"s": s}))
    ims = images(gang.made)
    assert [im.entries["w"][1] for im in ims] == [[2, 3], [2, 3], [2, 3], [1, 3]]
    assert b"".join(im.entries["w"][2] for im in ims) == f32(*range(21))
    assert all(im.entries["extra"][2] == i64(5, 6) for im in ims)
    gang.made.close()
    s.close()


# ----------------------------------------------------------------------------------------------------- compare


def compare(gang, a, b, **spec):
    return done(gang.job("compare", {"a": {"state_dict": "s"}, "b": {"state_dict": "t"}, "backend": gang.backend, **spec},
                         {"s": a, "t": b}))


def test_compare(gang):
    a, b = rows(2), rows(2)
    assert compare(gang, a, b)["equal"] and compare(gang, a, b, values=True)["equal"]
    im = bytearray(b.read(1))
    at = im.index(f32(1000.0, 1001.0)) + 4 * 8
    im[at:at + 4] = f32(1010.0)
    os.pwrite(b.fds[1], bytes(im), 0)
    assert compare(gang, a, b)["equal"], "values were looked at"
    r = compare(gang, a, b, values=True)
    assert not r["equal"] and r["difference_count"] == 1
    d = r["differences"][0]
    assert (d["path"], d["what"], d["rank"], d["count"], d["first_index"], d["max_abs"]) == ("w", "values", 1, 1, [5, 2], 2.0)
    assert compare(gang, a, b, values=True, atol=2)["equal"]
    a.close()
    b.close()


def test_compare_names_what_is_of_another_size(gang):
    a = Segments([lib.image({"t": ("I64", (10,), i64(*range(10)))})])
    b = Segments([lib.image({"t": ("I64", (11,), i64(*range(11)))})])
    r = compare(gang, a, b)
    assert not r["equal"] and r["differences"][0]["path"] == "t"
    a.close()
    b.close()


# ------------------------------------------------------------------------------------------------ values, structure


def test_nested_tuples_and_opaque_values(gang):
    meta = {"values": {"o.betas": {"json": [0.9, 0.999]}, "sched": {"pickle": "gAJLAS4="}, "l.0": {"json": "x"}},
            "paths": {"o.betas": ["o", "betas"], "l.0": ["l", 0], "l.1": ["l", 1]}, "tuples": [["o", "betas"], ["l"]]}
    s = Segments([lib.image({"l.1": ("F32", (2,), f32(1, 2))}, meta)])
    assert failed(run(gang, "offload", s), "value_type")["fqn"] == "sched"
    done(run(gang, "offload", s, type_check=False))
    im = images(gang.made)[0]
    assert im.values["sched"] == meta["values"]["sched"] and im.values["o.betas"] == {"json": [0.9, 0.999]}
    assert sorted(im.dcpd["tuples"]) == [["l"], ["o", "betas"]] and im.dcpd["paths"]["l.1"] == ["l", 1]
    gang.made.close()
    s.close()


# -------------------------------------------------------------------------------------------------------- faults


def test_holes_and_overlaps_are_named(gang):
    def two(first, second):
        return Segments([lib.image({"w": ("F32", (2, 2), f32(1, 2, 3, 4))},
                                   {"tensors": {"w": {"fqn": "m.w", "global_shape": [4, 2], "offsets": [o, 0]}}})
                         for o in (first, second)])
    for offsets, code in (((0, 1), "plan_invalid"), ((0, 0), "coverage_hole")):
        s = two(*offsets)
        p = failed(run(gang, "gather", s), code)
        assert p["fqn"] == "m.w", p
        s.close()


def test_a_segment_that_shrank_is_named(gang):
    s = Segments([lib.image({"w": ("F32", (64, 1024), bytes(64 * 1024 * 4))},
                            {"tensors": {"w": {"fqn": "w", "global_shape": [128, 1024], "offsets": [r * 64, 0]}}}) for r in range(2)])
    shrink = []

    def on(g, i, f):
        if f.type == "WANT_SEGMENTS" and not shrink:
            os.ftruncate(s.fds[1], 8192)
            shrink.append(1)
        return False
    gang.on = on
    try:
        p = failed(run(gang, "gather", s), "segment_shrunk")
    finally:
        gang.on = None
    assert p["rank"] == 1 and p["fqn"] == "w"
    gang.made.close()
    s.close()
    still_works(gang)


def test_dry_run_asks_for_nothing(gang):
    s = rows(4)
    end = gang.job("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": gang.backend}, {"s": s},
                   dry_run=True)
    assert end.body["plan"]["needed_bytes"] == 3 * 8 * 6 * 4 and end.body["plan"]["segment_bytes"] > 4 * 4096
    assert not {"WANT_SEGMENTS", "RUN"} & {k for _, k in gang.seen}
    s.close()


# ------------------------------------------------------------------------------------------------ images that are wrong

ONE = {"w": ("F32", (2,), f32(1, 2))}
BOX = {"w": {"fqn": "w", "global_shape": [4], "offsets": [0]}}
WRONG = {
    "a list at the root": ({"paths": {"w": [0]}}, "format_image"),
    "a dict that is a list": ({"paths": {"w": ["a", 0], "v": ["a", "b"]}, "values": {"v": {"json": 1}}}, "format_image"),
    "a leaf that is a dict": ({"paths": {"w": ["a"], "v": ["a", "b"]}, "values": {"v": {"json": 1}}}, "format_image"),
    "two things of one path": ({"paths": {"w": ["a"], "v": ["a"]}, "values": {"v": {"json": 1}}}, "duplicate_key"),
    "a list with a hole of millions": ({"paths": {"w": ["a", 5000000]}}, "format_image"),
    "a path of a thousand parts": ({"paths": {"w": ["a"] * 1000}}, "limit_exceeded"),
    "a tuple that is a tensor": ({"tuples": [["w"]]}, "format_image"),
    "a tuple that is a dict": ({"paths": {"w": ["a", "b"]}, "tuples": [["a"]]}, "format_image"),
    "an empty path of a tuple": ({"tuples": [[]]}, "format_image"),
    "a mesh of more ranks than there are": ({"tensors": BOX, "layout": [{"match": "*", "mesh": [7], "placements": ["Shard(0)"]}]},
                                           "world_mismatch"),
    "a mesh of nothing": ({"tensors": BOX, "layout": [{"match": "*", "mesh": [0], "placements": ["Shard(0)"]}]}, "layout_invalid"),
    "a mesh that overflows": ({"tensors": BOX, "layout": [{"match": "*", "mesh": [1 << 62, 1 << 62, 4], "placements": ["R", "R", "R"]}]},
                              None),
    "a mesh of another world": ({"tensors": BOX, "layout": [{"match": "*", "mesh": [1], "ranks": [900], "placements": ["R"]}]}, None),
    "no placement at all": ({"tensors": BOX, "layout": [{"match": "*", "placements": ["Shard(zero)"]}]}, "layout_invalid"),
    "a value that is no base64": ({"values": {"v": {"bytes": "%%%"}}}, "format_image"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_images_are_refused_with_their_rank(what):
    meta, code = WRONG[what]
    with Gang(1, {}) as g:
        g.backend = "shm"
        s = Segments([lib.image(ONE, meta)])
        end = run(g, "offload", s)
        assert end.kind == "FAILED" and (code is None or end.body["code"] == code), end
        assert "mesh" in what or "placement" in what or end.body["rank"] == 0, end.body
        s.close()
        s = rows(1)
        done(run(g, "offload", s))
        g.made.close()
        s.close()


def test_what_else_a_layout_asks_for_is_not_looked_at():
    """`like` would open a checkpoint, boxes and chunks say nothing of an image."""
    meta = {"tensors": BOX, "layout": [{"match": "*", "like": "main:../../etc"}, {"match": "*", "boxes": 7}, {"match": 5}]}
    with Gang(1, {}) as g:
        g.backend = "shm"
        s = Segments([lib.image({"w": ("F32", (4,), f32(1, 2, 3, 4))}, meta)])
        done(run(g, "gather", s))
        assert images(g.made)[0].entries["w"][2] == f32(1, 2, 3, 4)
        g.made.close()
        s.close()


# ------------------------------------------------------------------------------------------- members that are not there


@pytest.fixture
def pair():
    """A gang over tcp of its own, with a short deadline, whose second worker may come to harm."""
    g = Gang(2, {}, network=True)
    g.backend, g.deadline_ms = "tcp", 1500
    yield g
    for w in g.workers:
        w.proc.kill()
        w.proc.wait()
        w.proc.stderr.close()
        w.sock.close()


def big(world=2, rows=64, cols=1 << 16):
    part = bytes(rows // world * cols * 4)
    return Segments([lib.image({"w": ("F32", (rows // world, cols), part)}, {"tensors": {
        "w": {"fqn": "w", "global_shape": [rows, cols], "offsets": [r * rows // world, 0]}}}) for r in range(world)])


@pytest.mark.parametrize("harm", ["killed", "stopped", "never told"])
def test_a_member_that_is_gone_fails_the_others_in_time(pair, harm):
    s = big()

    def on(g, i, f):
        if f.type != "RUN":
            return False
        if harm == "never told":
            return True
        g.answer(0, f)
        os.kill(g.workers[1].proc.pid, signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
        return True
    pair.on = on
    pair.start("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": "tcp"}, {"s": s})
    while True:
        f = pair.workers[0].recv()
        if f.type in ("DONE", "FAILED"):
            break
        if not on(pair, 0, f):
            pair.answer(0, f)
    assert f.type == "FAILED" and f.body["code"] in ("peer_timeout", "peer_lost"), f.body
    pair.made.close()
    s.close()


def let_meet(g, times):
    """Answers the gang's members until they have met so often, all of them counted."""
    while times > 0:
        for i, f in g.frames(120):
            g.answer(i, f)
            times -= f.type == "RENDEZVOUS"


def end_of(g, worker):
    """The end that a worker tells, whatever becomes of the others."""
    while (f := worker.recv()).type not in ("DONE", "FAILED"):
        if f.type != "PROGRESS":
            g.answer(g.workers.index(worker), f)
    return f


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_lost_while_bytes_are_on_their_way(pair, harm):
    """Both have met; then the second is no more."""
    s = big(rows=256)
    pair.start("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": "tcp"}, {"s": s})
    let_meet(pair, 2)
    os.kill(pair.workers[1].proc.pid, harm)
    f = end_of(pair, pair.workers[0])
    assert f.type == "FAILED" and f.body["code"] in ("peer_timeout", "peer_lost") and f.body["rank"] == 1, f.body
    pair.made.close()
    s.close()


def test_cancel(gang):
    s = big(rows=512)
    cancelled = []

    def on(g, i, f):
        if f.type == "RUN":
            g.answer(i, f)
            for w in g.workers:
                w.send("CANCEL", g.generation, {})
            cancelled.append(1)
            return True
        return False
    gang.on = on
    try:
        failed(run(gang, "gather", s), "cancelled")
    finally:
        gang.on = None
        gang.made.close()
        s.close()
    still_works(gang)


# ------------------------------------------------------------------------------------------- groups that are kept


def over_gpus(gpus, workers=4, **env):
    g = Gang(workers, {}, network=True, device=True, env={**FAKES, "FAKE_CUDA_DEVICES": str(gpus), **env})
    g.backend = "nccl"
    return g


def gathered(g, s):
    """How often the members of a job met. Once each to compare what they have kept, once more to open a group."""
    world = len(s.fds)
    done(run(g, "gather", s))
    assert all(im.entries["w"][2] == whole(s) for im in images(g.made))
    g.made.close()
    return sum(t == "RENDEZVOUS" for _, t in g.seen)


@pytest.mark.long
def test_a_group_over_nccl_is_kept_until_it_fails():
    """A gather is three of NCCL's operations: the fourth job of a group hangs, and fails at its deadline."""
    four, two = rows(4), rows(2)
    with over_gpus(4, FAKE_NCCL_HANG_AFTER="9") as g:
        g.deadline_ms = 2000
        assert [gathered(g, four) for _ in range(2)] == [8, 4]
        assert [gathered(g, two) for _ in range(2)] == [4, 2], "ranks of a smaller group begin at 0"
        assert gathered(g, four) == 4, "a group of another size takes no group's place"
        failed(run(g, "gather", four), "peer_timeout")
        g.made.close()
        assert [gathered(g, four) for _ in range(2)] == [8, 4], "a group that failed is no more"
        assert gathered(g, two) == 2, "the other one has not failed"
    four.close()
    two.close()


@pytest.mark.long
def test_few_groups_are_kept():
    """Four: the one that was not used for the longest makes room for a fifth."""
    of = {n: rows(n, 2 * n) for n in range(2, 7)}
    with over_gpus(6, 6) as g:
        assert [gathered(g, of[n]) for n in range(2, 7)] == [2 * n for n in range(2, 7)]
        assert [gathered(g, of[n]) for n in (6, 4, 3, 5)] == [6, 4, 3, 5]
        assert gathered(g, of[2]) == 4 and gathered(g, of[2]) == 2
        assert gathered(g, of[6]) == 12 and gathered(g, of[3]) == 3
    for s in of.values():
        s.close()


def test_a_gang_that_lost_a_worker_opens_its_groups_anew():
    """In a job, and between jobs. The survivors still have groups that the new worker does not know: none of them serves again,
    however alike their members are. A smaller group has ranks from 0."""
    three, two, wide = rows(3, 6), rows(2), big(world=3, rows=384)
    with over_gpus(3, 3) as g:
        g.deadline_ms = 1500

        def renew():
            lost = g.workers[1]
            lost.proc.kill()
            lost.proc.wait()
            lost.proc.stderr.close()
            lost.sock.close()
            g.workers[1] = Worker({}, index=1, count=3, network=True, device=True, env={**FAKES, "FAKE_CUDA_DEVICES": "3"})

        assert [gathered(g, s) for s in (three, two, three)] == [6, 4, 3]
        renew()
        assert [gathered(g, s) for s in (three, two, three, two)] == [6, 4, 3, 2]
        g.start("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": "nccl"}, {"s": wide})
        let_meet(g, 3)
        g.workers[1].proc.kill()
        for i in (0, 2):
            f = end_of(g, g.workers[i])
            assert f.type == "FAILED" and f.body["code"] in ("peer_timeout", "peer_lost"), f.body
        g.made.close()
        renew()
        assert [gathered(g, s) for s in (two, three, two, three)] == [4, 6, 2, 3]
    for s in (three, two, wide):
        s.close()


@pytest.mark.parametrize("env, members", [({}, 2), ({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "FAKE_NCCL_VERSION": "23000"}, 4)])
def test_several_ranks_on_one_gpu(env, members):
    """NCCL takes one member a GPU, which has the bytes of several ranks, unless its environment says that it takes more."""
    s = rows(4)
    with over_gpus(2, **env) as g:
        assert gathered(g, s) == 2 * members
    s.close()


def test_a_member_that_dies_over_nccl():
    """The others' group is aborted: none of them hangs in it, or in its end."""
    g = over_gpus(2, 2)
    g.deadline_ms = 1500
    s = big(rows=256)
    g.start("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": "nccl"}, {"s": s})
    let_meet(g, 4)
    g.workers[1].proc.kill()
    f = end_of(g, g.workers[0])
    assert f.type == "FAILED" and f.body["code"] in ("peer_timeout", "peer_lost"), f.body
    rc, log = g.workers[0].close()
    assert rc == 0, log
    g.workers[1].proc.wait()
    g.workers[1].proc.stderr.close()
    g.workers[1].sock.close()
    g.made.close()
    s.close()


@pytest.mark.long
def test_an_abort_that_never_returns_ends_the_worker_after_the_job():
    """NCCL may wait in it for ever. The job's end is told first; a gang of new workers has no such communicator."""
    g, s = over_gpus(2, 2, FAKE_NCCL_HANG_AFTER="1", FAKE_NCCL_ABORT_HANGS="1"), rows(2)
    g.deadline_ms = 1000
    g.start("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": "nccl"}, {"s": s})
    let_meet(g, 4)
    for w in g.workers:
        assert end_of(g, w).body["code"] == "peer_timeout"
        with pytest.raises(Closed) as e:
            w.recv(30)
        assert e.value.rc == 1 and "ncclCommAbort has not returned" in str(e.value)
        w.proc.stderr.close()
        w.sock.close()
    g.made.close()
    s.close()


def test_memory_is_bounded(gang):
    """Each worker's own memory, not the segments', while 64 MiB are gathered twice."""
    s = big(rows=256)
    done(run(gang, "gather", s))
    for w in gang.workers:
        status = open(f"/proc/{w.proc.pid}/status").read()
        peak = int(status.split("RssAnon:")[1].split()[0]) >> 10
        assert SANITIZED or peak < 64, f"{peak} MiB"
    gang.made.close()
    s.close()


def test_auto_is_shm_on_one_host_whatever_the_device():
    with Gang(2, {}) as g:
        g.backend = "auto"
        s = rows(2)
        for device in ("cpu", "cuda"):
            assert done(run(g, "gather", s, device=device))["backend"] == "shm"
            assert images(g.made)[1].entries["w"][2] == whole(s)
            g.made.close()
        failed(g.job("gather", {"source": {"state_dict": "s"}, "target": {"state_dict": "t"}, "backend": "gloo"}, {"s": s}),
               "validation_failed")
        s.close()


def test_without_a_network_there_is_no_tcp():
    with Gang(1, {}) as g:
        s = rows(2)
        g.backend = "tcp"
        failed(run(g, "gather", s), "backend_unavailable")
        s.close()
