"""Checkpoints with a few bytes changed, cut off or put in: no worker dies or hangs, every failure says what is wrong, nothing is left."""
import collections
import os
import pathlib
import random
import shutil

import pytest

import dcpd as lib
from gang import SANITIZED, Gang, Segments, failed as lib_failed

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
OURS = ("threads_4ranks", "nested", "zstd", "dtypes", "odd_keys")
VARIANTS = 400 if lib.FULL else 40
OURSELVES = ("internal", "no_memory", "protocol", "system", "worker_lost")  # what is wrong is the input, not us


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Golden checkpoints, and some that dcpd wrote, with a manifest."""
    out = tmp_path_factory.mktemp("ours")
    with Gang(1, {"fx": FIXTURES, "out": out}) as g:
        for name in OURS:
            end = g.job("reshard", {"source": {"storage": "fx", "name": f"torch-2.15.0/{name}/checkpoint"},
                                    "target": {"storage": "out", "name": name, "world_size": 2}, "options": {}})
            assert end.kind == "DONE", end.body
    return [c for c in sorted(FIXTURES.glob("*/*/checkpoint"))] + [out / n for n in OURS] * 4


def spoil(rng, directory):
    """Changes one file; what was done, to be told if it matters."""
    files = sorted(p for p in directory.iterdir() if p.is_file() and p.stat().st_size)
    small = [p.name.endswith("metadata") or p.name == ".dcpd.json" for p in files]
    f = rng.choices(files, [8 if s else 3 for s in small])[0]
    b = bytearray(f.read_bytes())
    at, how = rng.randrange(len(b)), rng.choice(["flip", "flip", "cut", "zero", "ones", "again", "digit"])
    if how == "flip":
        for _ in range(rng.choice([1, 1, 3, 10])):
            b[rng.randrange(len(b))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del b[at:]
    elif how in ("zero", "ones"):
        n = min(rng.choice([1, 4, 8, 64]), len(b) - at)
        b[at:at + n] = (b"\0" if how == "zero" else b"\xff") * n
    elif how == "again":
        b[at:at] = b[at:at + rng.randrange(1, 100)]
    else:
        b[at] = rng.choice(b"09(.]}\x80\x8a\xff")
    f.write_bytes(b)
    return f"{how} at {at} of {f.name}"


def jobs_on(name):
    me = {"storage": "out", "name": name}
    cut = {"world_size": 3, "layout": [{"match": "*", "placements": ["Shard(1)"]}]}
    yield "verify", {"source": me, "level": "values"}
    yield "reshard", {"source": me, "target": {"storage": "out", "name": f"{name}-r", **cut}, "options": {}}
    yield "reshard", {"source": me, "target": {"storage": "out", "name": f"{name}-s", "format": "safetensors"}, "options": {}}
    yield "load", {"source": me, "target": {"state_dict": "x", "world_size": 2}}
    yield "diff", {"a": me, "b": {"storage": "out", "name": "good"}}


@pytest.mark.seconds(600)
@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes(seeds, tmp_path, seed):
    rng, codes = random.Random(seed), collections.Counter()
    shutil.copytree(FIXTURES / "torch-2.15.0/nested/checkpoint", tmp_path / "good")
    with Gang(2, {"out": tmp_path}) as g:
        for i in range(VARIANTS):
            source, name = rng.choice(seeds), f"m{i}"
            shutil.copytree(source, tmp_path / name)
            if not any(p.stat().st_size for p in (tmp_path / name).iterdir()):
                continue
            what = f"seed {seed}, variant {i}: {source.parent.name}/{source.name}, {spoil(rng, tmp_path / name)}"
            for kind, spec in jobs_on(name):
                try:
                    end = g.job(kind, spec, seconds=120)
                except Exception as e:
                    raise AssertionError(f"{what}, {kind}: {e}") from e
                codes[end.body.get("code", "done")] += 1
                if end.kind == "FAILED":
                    assert end.body["code"] not in OURSELVES and end.body["detail"], f"{what}, {kind}: {end.body}"
                if g.made:
                    g.made.close()
            for p in tmp_path.glob(f"{name}*"):
                shutil.rmtree(p)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["good"]
        assert codes["done"] and len(codes) > 3, codes


# ------------------------------------------------------------------------------------------------------ by hand


def crafted(tmp_path, change):
    """A golden checkpoint whose Metadata is changed by change(md)."""
    import crafted as lib_crafted

    return lib_crafted.Crafted(tmp_path, name="x").edit(change)


@pytest.fixture
def run(tmp_path):
    """run(kind, **spec) on `out:x`: the end, with nothing left behind."""
    with Gang(2, {"out": tmp_path}) as g:
        def go(kind="verify", **spec):
            return g.job(kind, {"source": {"storage": "out", "name": "x"}, **spec}, seconds=120)
        yield go


def code_of(end):
    """Of a verify: that of the first damage."""
    more = end.body.get("more", {}).get("damage")
    return more[0]["code"] if more and end.body["code"] == "checkpoint_damaged" else end.body["code"]


def replace(md, index, **fields):
    import dataclasses

    md.storage_data[index] = dataclasses.replace(md.storage_data[index], **fields)


def first(md):
    return next((i, s) for i, s in md.storage_data.items() if getattr(i, "offset", None) is not None)


@pytest.mark.long
def test_a_rank_that_no_world_has(tmp_path, run):
    def change(md):
        for i, s in list(md.storage_data.items()):
            if s.relative_path == first(md)[1].relative_path:
                replace(md, i, relative_path="__4294967000_0.distcp")

    c = crafted(tmp_path, change)
    used = {p.name for p in c.files()}
    for name in used:
        shutil.copy(c.dir / name, c.dir / "__4294967000_0.distcp")
        break
    end = run("reshard", target={"storage": "out", "name": "y"}, options={})
    assert end.kind == "FAILED" or end.body["result"]["world_size"] <= 65536, end.body


@pytest.mark.long
@pytest.mark.parametrize("path", ["", ".", "..", "../x/__0_0.distcp", "/etc/passwd", "a/../__0_0.distcp", "link", "fifo", "dir"])
def test_paths_that_lead_elsewhere(tmp_path, run, path):
    c = crafted(tmp_path, lambda md: replace(md, first(md)[0], relative_path=path))
    if path == "link":
        (c.dir / "link").symlink_to("/etc/passwd")
    elif path == "fifo":
        os.mkfifo(c.dir / "fifo")
    elif path == "dir":
        (c.dir / "dir").mkdir()
    for end in (run(level="digest"), run("load", target={"state_dict": "s", "world_size": 1})):
        assert end.kind == "FAILED" and code_of(end) in ("format_metadata", "name_invalid", "checkpoint_incomplete"), end.body


@pytest.mark.parametrize("field, value", [("offset", 1 << 62), ("length", 1 << 62), ("offset", -1), ("length", -5), ("length", 1 << 63)])
def test_places_that_lie(tmp_path, run, field, value):
    crafted(tmp_path, lambda md: replace(md, first(md)[0], **{field: value}))
    end = run()
    assert end.kind == "FAILED" and code_of(end) in ("checkpoint_incomplete", "format_metadata", "limit_exceeded"), end.body


@pytest.mark.long
@pytest.mark.parametrize("pickle", [pytest.param(b"]", id="a stack of lists"),
                                    pytest.param(b"]a", id="a list of lists", marks=pytest.mark.long),
                                    pytest.param(b"]0", id="lists thrown away", marks=pytest.mark.long)])
def test_metadata_that_describes_much_more_than_it_has(tmp_path, pickle):
    """80 MiB of it took a worker to 1.7 GiB. (tests/unit/test_hostile_memory.c has the other formats.)"""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.metadata").write_bytes(b"]" + pickle * ((80 << 20) // len(pickle)) + b".")
    with Gang(1, {"out": tmp_path}) as g:
        x = {"source": {"storage": "out", "name": "x"}}
        lib_failed(g.job("verify", x, seconds=120), "checkpoint_damaged")
        lib_failed(g.job("load", {**x, "target": {"state_dict": "s", "world_size": 1}}, seconds=120), "format_pickle")
        status = pathlib.Path(f"/proc/{g.workers[0].proc.pid}/status").read_text()
        peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) >> 10
        assert SANITIZED or peak < 256, f"{peak} MiB"


@pytest.mark.parametrize("sparse", [False, True])
def test_a_tensor_much_larger_than_its_file(tmp_path, run, sparse):
    """Its chunk covers it and its product fits 64 bits: a plan of every block would not fit memory. A file can be as large without
    having the bytes."""
    import torch

    size = 1 << 43

    def change(md):
        index, info = first(md)
        t = md.state_dict_metadata[index.fqn]
        n = (1 << 50 if sparse else 1 << 58) // 4
        if sparse:
            import dataclasses
            info = dataclasses.replace(info, length=size)
        t.size = torch.Size([n])
        t.chunks[:] = [type(t.chunks[0])(offsets=torch.Size([0]), sizes=torch.Size([n]))]
        for i in [i for i in md.storage_data if i.fqn == index.fqn]:
            del md.storage_data[i]
        md.storage_data[type(index)(index.fqn, torch.Size([0]), 0)] = info

    c = crafted(tmp_path, change)
    for p in c.files() if sparse else ():
        os.truncate(p, size + (1 << 20))
    for kind, spec in (("verify", {"level": "digest"}), ("load", {"target": {"state_dict": "s", "world_size": 1}}),
                       ("reshard", {"target": {"storage": "out", "name": "y"}, "options": {}}),
                       ("reshard", {"target": {"storage": "out", "name": "y", "format": "safetensors"}, "options": {}})):
        end = run(kind, **spec)
        assert end.kind == "FAILED" and end.body["code"] not in OURSELVES, (kind, end.body)
    assert not (tmp_path / "y").exists()


def test_a_segment_whose_header_changes(tmp_path):
    """What was checked is copied once; a header that changes behind it does no harm."""
    n = 1 << 20
    s = Segments([lib.image({"x": ("U8", (n,), bytes(n))})])

    def change(g, i, f):
        if f.type == "STATE":
            os.pwrite(s.fds[0], b"\xff" * 4096, 0)
        return False

    with Gang(1, {"out": tmp_path}, on=change) as g:
        end = g.job("save", {"source": {"state_dict": "t"}, "target": {"storage": "out", "name": "y"}, "options": {}}, {"t": s})
        assert end.kind == "DONE" or end.body["code"].startswith("format_"), end.body
    s.close()
