"""The worker by itself: whole jobs over its control socket, with a coordinator that does as worker/ctl/README.md says."""
import json
import os
import pathlib
import shutil
import struct

import pytest

import dcpd as lib
import gang as G
from gang import Gang, Segments, Worker, ask, done, failed

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
ROWS = "torch-2.15.0/sharded_rowwise/checkpoint"
ZSTD = "torch-2.15.0/zstd/checkpoint"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {"fx": FIXTURES, "out": tmp_path_factory.mktemp("out")}


def at(name, storage="fx"):
    return G.at(name, storage)


def differences(gang, a, b, state_dicts=None):
    return done(gang.job("diff", {"a": a, "b": b}, state_dicts))["differences"]


def cut(world, *placements):
    return {"world_size": world, "layout": [{"match": "*", "placements": list(placements)}]}


# ------------------------------------------------------------------------------------------------------ transforms


@pytest.mark.parametrize("count", [1, 2])
def test_transformed_items_are_spooled_once_and_read_by_all(roots, count):
    with Gang(count, roots) as g:
        loaded = done(g.job("load", {"source": at(ZSTD), "target": {"state_dict": "x", "world_size": 2}}))
        assert loaded["segment_bytes"] == sum(g.made.bytes)
        made = g.made
        assert differences(g, at(ZSTD), {"state_dict": "x"}, {"x": made}) == []
        name = f"unzstd-{count}"
        done(g.job("reshard", {"source": at(ZSTD), "target": {**at(name, "out"), **cut(3, "Shard(1)")}}))
        assert differences(g, {"state_dict": "x"}, at(name, "out"), {"x": made}) == []
        made.close()


def test_a_slice_of_a_transformed_tensor(roots):
    body, fds = ask(roots, op="slice", storage="fx", name=ZSTD, fqn="noise", slice="1:3,4", format="raw")
    want = (FIXTURES / ZSTD).parent / "expected.safetensors"
    whole = lib.Image(want.read_bytes()).entries["noise"][2]
    assert os.pread(fds[0], 100, 0) == whole[(9 + 4) * 4:][:4] + whole[(18 + 4) * 4:][:4]
    os.close(fds[0])


# ------------------------------------------------------------------------------------------------------ safetensors


def test_values_have_no_place_in_safetensors(gang, roots):
    r = done(gang.job("reshard", {"source": at("torch-2.15.0/nested/checkpoint"),
                                  "target": {**at("nested-st", "out"), "format": "safetensors"}}))
    file = next((roots["out"] / "nested-st").glob("*.safetensors"))
    data = file.read_bytes()
    meta = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    kept = json.loads(meta["dcpd_values"])
    assert kept and set(kept) <= set(r["dropped"])


# ------------------------------------------------------------------------------------------------------ whole jobs

ROWS_COLS = 64, 96


def train(world=4, generation_mark=0):
    """A state dict over `world` ranks: rows of w, a replicated tensor, a scalar, values on rank 0."""
    rows, cols = ROWS_COLS
    each = rows // world
    images = []
    for r in range(world):
        part = struct.pack(f"<{each * cols}f", *[generation_mark + r * each * cols + i for i in range(each * cols)])
        values = {"lr": {"json": 0.1}, "cfg": {"json": {"a": 1, "b": [1, 2, None]}}, "blob": {"bytes": "AAEC"}} if r == 0 else {}
        images.append(lib.image({"w": ("F32", (each, cols), part), "same": ("I64", (3,), struct.pack("<3q", 7, 8, 9)),
                                 "s": ("F64", (), struct.pack("<d", 7.5))},
                                {"tensors": {"w": {"fqn": "w", "global_shape": [rows, cols], "offsets": [r * each, 0]}},
                                 "values": values}))
    return Segments(images)


@pytest.fixture
def state():
    s = train()
    yield s
    s.close()


def save(gang, segments, name, **options):
    return gang.job("save", {"source": {"state_dict": "train", "generation": 7}, "target": at(name, "out"), "options": options},
                    {"train": segments})


def test_save_reshard_load_and_back(gang, roots, state):
    r = done(save(gang, state, "a/b"))
    assert r["generation"] == 7 and r["world_size"] == 4 and r["tensors"] == 3 and r["values"] >= 3
    assert [k for i, k in gang.seen if i == 0 and k != "PROGRESS"] == ["STATE", "STATE", "RUN", "WANT_COMMIT", "DONE"]
    assert differences(gang, at("a/b", "out"), {"state_dict": "train"}, {"train": state}) == []
    done(gang.job("reshard", {"source": at("a/b", "out"), "target": {**at("a/cols", "out"), **cut(3, "Shard(1)")}}))
    loaded = done(gang.job("load", {"source": at("a/cols", "out"), "target": {"state_dict": "x", "world_size": 2}}))
    assert loaded["missing"] == [] and loaded["unexpected"] == [] and loaded["cast"] == []
    made = gang.made
    assert differences(gang, {"state_dict": "x"}, {"state_dict": "train"}, {"x": made, "train": state}) == []
    assert lib.Image(made.read(0)).values["lr"] == {"json": 0.1}
    made.close()
    for level in ("structure", "digest", "values"):
        v = done(gang.job("verify", {"source": at("a/cols", "out"), "level": level}))
        assert v["level"] == level and v["tensors"] == 3
        assert level == "structure" or (v["unverifiable"] == 0 and v["verified_bytes"] > 64 * 96 * 4)
    assert v["nan"] == [] and v["all_zero"] == []
    assert sorted(p.name for p in (roots["out"] / "a").iterdir()) == ["b", "cols"]


def test_load_fills_what_is_there(gang, roots, state):
    other = train(generation_mark=1000)
    done(save(gang, other, "fill"))
    r = done(gang.job("load", {"source": at("fill", "out"), "target": {"state_dict": "train"}, "strict": True}, {"train": state}))
    assert r["missing"] == []
    assert differences(gang, {"state_dict": "train"}, {"state_dict": "other"}, {"train": state, "other": other}) == []
    other.close()


def test_what_diff_says(gang, state):
    other = train(generation_mark=1)
    a, b = {"state_dict": "a"}, {"state_dict": "b"}
    d = differences(gang, a, b, {"a": state, "b": other})
    assert [(x["path"], x["what"], x["count"], x["max_abs"], x["first_index"]) for x in d] == [("w", "values", 64 * 96, 1.0, [0, 0])]
    assert done(gang.job("diff", {"a": a, "b": b, "atol": 1}, {"a": state, "b": other}))["equal"]
    less = Segments([lib.image({"w": ("F32", (2, 2), bytes(16)), "s": ("F32", (), bytes(4))}, {"values": {"same": {"json": 1}}})])
    d = differences(gang, a, b, {"a": state, "b": less})
    assert {(x["path"], x["what"]) for x in d} >= {("w", "shape"), ("s", "dtype"), ("same", "kind"), ("lr", "missing")}
    other.close()
    less.close()


def test_overwrite_and_delete(gang, roots, state):
    other = train(generation_mark=5)
    done(save(gang, state, "over/x"))
    assert failed(save(gang, other, "over/x"), "checkpoint_exists")
    assert differences(gang, at("over/x", "out"), {"state_dict": "t"}, {"t": state}) == []
    r = done(save(gang, other, "over/x", overwrite=True, files_per_rank=2))
    assert r["files"] == 8
    assert differences(gang, at("over/x", "out"), {"state_dict": "t"}, {"t": other}) == []
    done(gang.job("delete", {"target": at("over/x", "out")}))
    lib.wait_for(lambda: list((roots["out"] / "over").iterdir()) == [], what="trash")
    failed(gang.job("delete", {"target": at("over/x", "out")}), "not_found")
    failed(gang.job("verify", {"source": at("over/x", "out")}), "not_found")
    other.close()


def test_a_dry_run_leaves_nothing(gang, roots, state):
    before = sorted(roots["out"].iterdir())
    spec = {"source": {"state_dict": "train"}, "target": at("dry", "out"), "options": {}}
    plan = gang.job("save", spec, {"train": state}, dry_run=True)
    assert plan.kind == "DONE" and plan.body["plan"]["bytes"] > 64 * 96 * 4 and len(plan.body["plan"]["files"]) == 4
    assert sorted(roots["out"].iterdir()) == before
    assert [k for i, k in gang.seen if k in ("RUN", "WANT_COMMIT")] == []


def test_a_tensor_that_crosses_blocks(gang, roots):
    """Larger than a task, rows to columns and back, files that are no multiple of anything."""
    rows, cols = 1031, 2053
    data = os.urandom(rows * cols * 2)
    big = Segments([lib.image({"big": ("I16", (rows, cols), data)})])
    done(save(gang, big, "big/rows"))
    done(gang.job("reshard", {"source": at("big/rows", "out"), "target": {**at("big/cols", "out"), **cut(3, "Shard(1)")}}))
    done(gang.job("reshard", {"source": at("big/cols", "out"), "target": {**at("big/st", "out"), "format": "safetensors"}}))
    file = next((roots["out"] / "big/st").glob("model-*.safetensors"))
    assert lib.Image(file.read_bytes()).entries["big"][2] == data
    assert differences(gang, at("big/cols", "out"), {"state_dict": "t"}, {"t": big}) == []
    body, fds = ask(roots, op="slice", storage="out", name="big/cols", fqn="big", slice="1000:1002,2050:", format="raw")
    got = b"".join(data[(r * cols + 2050) * 2:(r + 1) * cols * 2] for r in (1000, 1001))
    assert os.pread(fds[0], 1000, 0) == got and body["ok"]["shape"] == [2, 3]
    os.close(fds[0])
    big.close()


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_cancel_while_running(roots, state):
    def cancel(g, i, f):
        if f.type == "RUN":
            g.workers[0].send("CANCEL", g.generation, {})
        return False

    with Gang(2, roots, on=cancel) as g:
        failed(save(g, state, "cancelled"), "cancelled")
        assert not (roots["out"] / "cancelled").exists()
        assert [p for p in roots["out"].iterdir() if p.name.startswith(".")] == []
        g.on = None
        done(save(g, state, "after-cancel"))


def test_cancel_instead_of_commit(roots, state):
    def cancel(g, i, f):
        if f.type != "WANT_COMMIT":
            return False
        g.workers[0].send("CANCEL", g.generation, {})
        return True

    with Gang(1, roots, on=cancel) as g:
        failed(save(g, state, "not-committed"), "cancelled")
        assert not (roots["out"] / "not-committed").exists()


@pytest.mark.long
def test_a_diff_without_io_hears_a_cancel():
    """Two state dicts in memory: no task ever waits for I/O."""
    n = 256 << 20  # takes several times as long as a worker goes without listening
    a = Segments([lib.image({"x": ("BF16", (n // 2,), bytes(n))})])
    b = Segments([lib.image({"x": ("BF16", (n // 2,), b"\1" * n)})])

    def cancel(g, i, f):
        if f.type == "STATE" and f.body["state"] == "running":
            g.workers[0].send("CANCEL", g.generation, {})
        return False

    with Gang(1, {}, on=cancel) as g:
        failed(g.job("diff", {"a": {"state_dict": "a"}, "b": {"state_dict": "b"}}, {"a": a, "b": b}), "cancelled")
    a.close()
    b.close()


@pytest.mark.long
def test_a_cancel_is_called_one_by_every_worker():
    """Not a failure of the worker that heard of it first: often enough the leader hears of it between two of its tasks."""
    n = 64 << 20
    a = Segments([lib.image({"x": ("BF16", (n // 2,), bytes(n))})])
    b = Segments([lib.image({"x": ("BF16", (n // 2,), b"\1" * n)})])

    def cancel(g, i, f):
        for w in (1, 0) if f.type == "STATE" and f.body["state"] == "running" else ():
            g.workers[w].send("CANCEL", g.generation, {})
        return False

    with Gang(2, {}, on=cancel) as g:
        for i in range(24):
            end = g.job("diff", {"a": {"state_dict": "a"}, "b": {"state_dict": "b"}}, {"a": a, "b": b}, job=f"01TEST{i:020}")
            assert failed(end, "cancelled")["detail"] == "the job was cancelled"
    a.close()
    b.close()


def test_a_peer_that_fails(roots, state):
    """It gets a run that is none; the leader is cancelled, and both go on."""
    def spoil(g, i, f):
        if f.type != "RUN":
            return False
        with open("/dev/null", "rb") as nothing:
            g.workers[1].send("RUN", g.generation, f.body, [nothing.fileno()] + g.segments)
        g.waiting.add(1)
        return True

    with Gang(2, roots, on=spoil) as g:
        failed(save(g, state, "peer"), "protocol")
        assert not (roots["out"] / "peer").exists()
        g.on = None
        done(save(g, state, "peer"))


@pytest.mark.parametrize("spools, at_", [(5, 0), (-1, 0), (1, 99), (4294967295, 0), (0, 4294967295)])
def test_a_run_whose_numbers_do_not_fit(roots, spools, at_):
    w = Worker(roots, index=1, count=2)
    with open("/dev/null", "rb") as nothing:
        w.send("RUN", 3, {"job": "x", "attempt": 1, "segments": 0, "spools": spools, "spools_at": at_}, [nothing.fileno()])
    f = w.recv()
    assert (f.type, f.generation, f.body["code"]) == ("FAILED", 3, "protocol")
    assert w.close()[0] == 0


def test_a_segment_that_is_shrunk(roots, state):
    with Gang(2, roots) as g:
        os.ftruncate(state.fds[2], 8192)
        p = failed(save(g, state, "shrunk"), "segment_shrunk")
        assert p["rank"] == 2
        os.ftruncate(state.fds[2], 10)
        assert failed(save(g, state, "shrunk"), "segment_shrunk")["rank"] == 2
        assert not (roots["out"] / "shrunk").exists()


def test_a_segment_that_shrinks_while_it_is_read(roots):
    n = 64 << 20
    s = Segments([lib.image({"x": ("U8", (n,), bytes(n))})])

    def shrink(g, i, f):
        if f.type == "STATE" and f.body["state"] == "running":
            os.ftruncate(s.fds[0], 1 << 20)
        return False

    with Gang(1, roots, on=shrink) as g:
        assert failed(save(g, s, "shrinks"), "segment_shrunk")["rank"] == 0
        assert not (roots["out"] / "shrinks").exists()
    s.close()


def evict(folder):
    """The page cache has nothing of the files any more."""
    for f in folder.rglob("*"):
        if f.is_file():
            with open(f, "rb") as b:
                os.fsync(b.fileno())
                os.posix_fadvise(b.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_files_that_are_not_in_the_page_cache(roots, engine):
    """Tensors of whole pages and of odd sizes, small ones side by side, and the file's last page; in files whose payloads lie on pages, and
    in one where they do not."""
    sizes = {"pages": 8 << 20, "odd": (5 << 20) + 13, "end": 5001, **{f"s{i}": 100 + i for i in range(50)}}
    state = {name: os.urandom(n) for name, n in sizes.items()}
    s = Segments([lib.image({name: ("U8", (len(d),), d) for name, d in state.items()})])
    with Gang(2, roots, engine=engine) as g:
        done(save(g, s, f"cold-{engine}"))
        st = {**at(f"cold-st-{engine}", "out"), "format": "safetensors"}
        done(g.job("reshard", {"source": at(f"cold-{engine}", "out"), "target": st}))
        for name in (f"cold-{engine}", f"cold-st-{engine}"):
            for verify in ("digest", "none"):
                evict(roots["out"] / name)
                found = done(g.job("load", {"source": at(name, "out"), "target": {"state_dict": "x"}, "options": {"verify": verify}}))
                assert found["unverified_bytes"] == 0 or verify == "none"
                got = lib.Image(os.pread(g.made.fds[0], g.made.bytes[0], 0)).entries
                assert {n: got[n][2] for n in state} == state
                g.made.close()
            evict(roots["out"] / name)
            done(g.job("verify", {"source": at(name, "out"), "level": "digest"}))
            file = max((roots["out"] / name).iterdir(), key=lambda f: f.stat().st_size)
            with open(file, "r+b") as b:
                b.seek(file.read_bytes().index(state["odd"][-50:]))
                b.write(bytes(50))
            evict(roots["out"] / name)
            assert failed(g.job("load", {"source": at(name, "out"), "target": {"state_dict": "x"}}), "digest_mismatch")["fqn"] == "odd"
    s.close()


@pytest.mark.parametrize("what, code", [("target", "segment_shrunk"), ("file", "storage_io")])
def test_what_shrinks_while_a_load_copies_from_the_page_cache(roots, what, code):
    """The error names what became smaller; the same load works once it is whole again."""
    n = 16 << 20
    data = os.urandom(n)
    s, t = (Segments([lib.image({"x": ("U8", (n,), d)})]) for d in (data, bytes(n)))
    load = {"source": at(f"cached-{what}", "out"), "target": {"state_dict": "t"}, "options": {"verify": "none"}}
    hits = []

    def shrink(g, i, f):
        if g.kind == "load" and f.type == "STATE" and f.body["state"] == "running" and not hits:
            hits.append(1)
            os.ftruncate(t.fds[0], 1 << 20) if what == "target" else os.truncate(file, 1 << 20)
        return False

    with Gang(1, roots, on=shrink) as g:
        g.kind = "save"
        done(save(g, s, f"cached-{what}"))
        file = next((roots["out"] / f"cached-{what}").glob("*.distcp"))
        whole = file.read_bytes()  # and its pages are in the cache
        g.kind = "load"
        for _ in range(8):
            end = g.job("load", load, {"t": t})
            if end.kind == "FAILED":
                break
            t.close()  # it was through before this process could shrink anything
            file.write_bytes(whole)
            t = Segments([lib.image({"x": ("U8", (n,), bytes(n))})])
            hits.clear()
        p = failed(end, code)
        assert hits and (p["rank"] == 0 if what == "target" else file.name in p["file"]), p
        t.close()
        file.write_bytes(whole)
        t = Segments([lib.image({"x": ("U8", (n,), bytes(n))})])
        done(g.job("load", load, {"t": t}))
        assert os.pread(t.fds[0], n, os.fstat(t.fds[0]).st_size - n) == data
    s.close()
    t.close()


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, struct.pack("<Q", 16) + b"{}" + b" " * 14 + b"x",
                                  struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_a_segment_that_is_no_image(gang, data):
    s = Segments([data.ljust(64, b"\0")])
    p = gang.job("save", {"source": {"state_dict": "t"}, "target": at("no-image", "out"), "options": {}}, {"t": s})
    assert p.kind == "FAILED" and p.body["code"] in ("format_image", "format_safetensors") and p.body["rank"] == 0, p.body
    s.close()


def test_frames_of_another_generation_are_dropped(roots, state):
    def stale(g, i, f):
        if f.type == "RUN":
            for kind in ("CANCEL", "PEERS_DONE", "SEGMENTS", "COMMIT_OK"):
                g.workers[0].send(kind, g.generation - 1, {})
        if f.type == "WANT_COMMIT":
            g.workers[0].send("CANCEL", g.generation + 1, {})
        return False

    with Gang(2, roots, on=stale) as g:
        done(save(g, state, "stale"))


def test_the_coordinator_goes_away(roots, state):
    """The worker ends at once, wherever it is; nothing is visible that was not committed."""
    for moment in ("STATE", "RUN", "WANT_COMMIT"):
        g = Gang(1 if moment != "RUN" else 2, roots)
        g.start("save", {"source": {"state_dict": "t"}, "target": at(f"gone-{moment}", "out"), "options": {}}, {"t": state})
        while g.workers[0].recv().type != moment:
            pass
        for w in g.workers:
            rc, log = w.close()
            assert rc in (0, 1) and "Sanitizer" not in log, log
        assert not (roots["out"] / f"gone-{moment}").exists()
    body, _ = ask(roots, op="sweep", storage="out", keep=[])
    assert body["ok"]["removed"] >= 1
    assert [p.name for p in roots["out"].iterdir() if p.name.startswith(".dcpd")] == []


@pytest.mark.parametrize("hello", [{}, {"build_id": "other"}, b"[", b"{}"])
def test_a_hello_that_does_not_fit(roots, hello):
    w = Worker(roots, hello=hello)
    assert w.proc.wait(20) == 1
    assert "worker ends" in w.close()[1]


def test_bytes_that_are_no_frame(roots):
    w = Worker(roots)
    w.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert w.proc.wait(20) == 1
    w.close()


def test_a_root_that_is_not_there(roots):
    with Gang(1, {"gone": "/nonexistent-root", **roots}) as g:
        assert [r["ok"] for r in g.workers[0].hello["roots"]] == [False, True, True]
        failed(g.job("verify", {"source": at("x", "gone")}), "storage_gone")
        done(g.job("verify", {"source": at(ROWS)}))
        failed(g.job("frobnicate", {"source": at(ROWS)}), "unknown_kind")


def test_storage_that_is_full(roots, tmp_path):
    """A real one: four pages of tmpfs would need a mount; a limit of file size has the same end."""
    import resource

    n = 8 << 20
    s = Segments([lib.image({"x": ("U8", (n,), os.urandom(n))})])
    with Gang(1, {"out": tmp_path}) as g:
        resource.prlimit(g.workers[0].proc.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        p = save(g, s, "full")
        assert p.kind == "FAILED" and p.body["file"] == "__0_0.distcp" and p.body["rank"] == 0, p.body
        assert list(tmp_path.iterdir()) == []
    s.close()


def test_diff_tells_all_tensors_however_much_differs(gang):
    """One large tensor that differs everywhere once took all the places for differences."""
    n = 3 << 20
    many = {f"t{i:04}": ("F32", (8,), struct.pack("<8f", *([i] * 8))) for i in range(5000)}
    a = Segments([lib.image({"aaa": ("F64", (n,), bytes(8 * n)), **many})])
    less = {k: (d, s, b[:28] + struct.pack("<f", -1)) for k, (d, s, b) in many.items()}
    b = Segments([lib.image({"aaa": ("F64", (n,), struct.pack("<d", 2.0) * n), **less})])
    r = done(gang.job("diff", {"a": {"state_dict": "a"}, "b": {"state_dict": "b"}}, {"a": a, "b": b}))
    assert not r["equal"] and r["difference_count"] == 5001
    found = {x["path"]: x for x in r["differences"]}
    assert len(found) == 5001 and found["aaa"]["count"] == n and found["aaa"]["max_abs"] == 2.0
    assert found["t0007"]["first_index"] == [7] and found["t0007"]["max_abs"] == 8.0
    a.close()
    b.close()


# --------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("kind,more", [
    ("verify", {"level": "deep"}), ("reshard", {"options": {"verify": "quick"}}), ("load", {"options": {"verify": "quick"}}),
    ("load", {"options": {"pace": "slow"}}), ("reshard", {"options": {"dedup": "highest_rank"}}), ("load", {"options": {"verfy": "none"}}),
])
def test_a_word_that_is_unknown_means_nothing(roots, kind, more):
    """The worker reads requests by the rows that the coordinator checks them by: what those do not have is no default in disguise."""
    target = {"reshard": {"target": at(f"words-{kind}", "out")}, "load": {"target": {"state_dict": "x"}}}.get(kind, {})
    with Gang(1, roots) as g:
        failed(g.job(kind, {"source": at(ROWS), **target, **more}), "unknown_field" if "verfy" in str(more) else "validation_failed")
