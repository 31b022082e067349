"""Jobs that copy or compare stored tensors read them once: the very bytes that are written are compared with their digests, whatever the
cuts, formats and writers. A plan says so before, and a flipped bit is found wherever it lies."""
import pathlib
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcpd as lib

HERE = {"storage": "main"}
SHAPES = {"big": (2311, 1024), "long": (3 << 20,), "cube": (37, 129, 255), "narrow": (70001, 8), "small": (5, 7), "one": ()}
BYTES = sum(4 * torch.Size(s).numel() for s in SHAPES.values())
ROWS, COLUMNS = [[{"match": "*", "mesh": [3], "placements": [f"Shard({dim})"]}] for dim in (0, 1)]
TARGETS = {"rows": {"world_size": 3, "layout": ROWS}, "columns": {"world_size": 3, "layout": COLUMNS}, "one rank": {"world_size": 1},
           "safetensors": {"format": "safetensors"}, "npz": {"format": "npz"}, "torch": {"format": "torch"}}
SPLIT = [{"match": "^big$", "split": {"dim": 0, "sizes": [11, 2300], "into": ["a", "b"]}}, {"match": "^cube$", "dtype": "float64"}]


@pytest.fixture(scope="module")
def state():
    g = torch.Generator().manual_seed(1)
    return {k: torch.randn(s, generator=g) for k, s in SHAPES.items()}


def ref(name, end=""):
    return {**HERE, "name": name + end}


def by_pytorch(d, state):
    name = lib.fresh()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / name)), no_dist=True)
    return ref(name)


def resharded(d, source, target):
    end = {"npz": ".npz", "torch": ".pt"}.get(target.get("format"), "")
    to = ref(lib.fresh(), end)
    return to, d.api.run("reshard", source=source, target={**to, **target})["result"]


def most(target):
    """Bytes that may be read. Columns of 12 bytes of `narrow` are too short to be added up: all of it is read first, and compared."""
    return 1.03 * BYTES + (4 * 70001 * 8 if target == "columns" else 0)


@pytest.fixture(scope="module")
def sources(shared_daemon, state):
    """By who wrote them: PyTorch has a CRC32 an item, dcpd digests of blocks, whose cuts are other ones in each layout."""
    d = shared_daemon
    first = by_pytorch(d, state)
    bare = d.storages["main"] / lib.fresh()
    bare.mkdir()
    save_file(state, bare / "model.safetensors")
    return {"pytorch": first, "bare": ref(bare.name),
            **{name: resharded(d, first, target)[0] for name, target in TARGETS.items()}}


@pytest.mark.parametrize("target", ["rows", *(pytest.param(t, marks=pytest.mark.long) for t in TARGETS if t != "rows")])
def test_a_reshard_reads_once(d, sources, target):
    for name, source in sources.items():
        to, done = resharded(d, source, TARGETS[target])
        assert BYTES <= done["read_bytes"] <= most(target), name
        assert (done["verified_bytes"] if name != "bare" else done["unverified_bytes"]) >= BYTES, name
        assert not d.api.run("diff", a=sources["pytorch"], b=to)["result"]["differences"], name


@pytest.mark.parametrize("target", ["rows", "columns", "safetensors"])
def test_the_plan_says_what_is_read(d, sources, target):
    for name, source in sources.items():
        request = {"kind": "reshard", "source": source, "target": {**ref(lib.fresh()), **TARGETS[target]}}
        plan = d.api.post("/v1/jobs?dry_run=true", request).ok(200)
        assert BYTES <= plan["read_bytes"] <= most(target) and 1 <= plan["over_read_ratio"] <= most(target) / BYTES, name


def test_rules_a_merge_and_a_diff_read_once(d, sources, state):
    for name in ("pytorch", "rows", "safetensors"):
        done = d.api.run("reshard", source=sources[name], target=ref(lib.fresh()), transform=SPLIT)["result"]
        assert BYTES <= done["read_bytes"] <= 1.03 * BYTES and done["verified_bytes"] >= BYTES, name
        done = d.api.run("merge", sources=[sources[name], sources["columns"]], target=ref(lib.fresh()))["result"]
        assert 2 * BYTES <= done["read_bytes"] <= 2.06 * BYTES and done["verified_bytes"] >= 2 * BYTES, name
        done = d.api.run("diff", a=sources[name], b=sources["columns"], read_all=True)["result"]
        assert 2 * BYTES <= done["read_bytes"] <= 2.06 * BYTES and done["verified_bytes"] >= 2 * BYTES, name


@pytest.mark.parametrize("rows", [1, 2])
def test_a_load_with_rules_reads_once(d, sources, rows):
    """Replicas, which take elements twice, and a part of the rows are read to be compared, too."""
    layout = [{"match": "*", "mesh": [rows], "placements": ["Shard(0)"]}]
    replicas = [{"match": "*", "mesh": [2], "placements": ["Replicate()"]}]
    for name in ("pytorch", "rows", "safetensors"):
        target = {"state_dict": lib.fresh(), "world_size": rows, "layout": layout}
        request = {"kind": "load", "source": sources[name], "target": target, "transform": SPLIT[:1]}
        plan = d.api.post("/v1/jobs?dry_run=true", request).ok(200)
        done = d.api.run("load", source=sources[name], target=target, transform=SPLIT)["result"]
        assert BYTES <= done["read_bytes"] <= 1.03 * BYTES and done["verified_bytes"] >= BYTES, name
        assert done["unverified_bytes"] <= 4096 * (name == "pytorch"), name  # its .metadata
        assert BYTES <= plan["read_bytes"] <= 1.03 * BYTES, name
        assert not d.api.run("diff", a=split(d, sources[name]), b={"state_dict": target["state_dict"]})["result"]["differences"], name
        d.drop(target["state_dict"])
        twice = {"state_dict": lib.fresh(), "world_size": 2, "layout": replicas}
        done = d.api.run("load", source=sources[name], target=twice, transform=SPLIT)["result"]
        assert done["verified_bytes"] >= BYTES and done["unverified_bytes"] <= 4096 * (name == "pytorch"), name
        d.drop(twice["state_dict"])


def split(d, source):
    to = ref(lib.fresh())
    d.api.run("reshard", source=source, target=to, transform=SPLIT)
    return to


def test_what_does_not_add_up_is_compared_all_the_same(d, sources, state):
    """A part of the rows is not what a digest is of: all of it is read, and compared."""
    for name in ("pytorch", "rows", "safetensors"):
        for rule in ({"match": "^big$", "slice": ["100:1800", ":"]}, {"match": "^big$", "tie": "long", "optional": True}):
            done = d.api.run("reshard", source=sources[name], target=ref(lib.fresh()), transform=[rule])["result"]
            assert done["verified_bytes"] >= BYTES - (4 * SHAPES["long"][0] if "tie" in rule else 0), name


def test_items_that_lie_in_another_order(d, state):
    """PyTorch keeps the strides of what it saves: ranges of such a storage are not in the order of the elements."""
    turned = {"big": state["big"].t(), "cube": state["cube"].permute(2, 0, 1)}
    source = by_pytorch(d, turned)
    for target in ("rows", "safetensors"):
        to, done = resharded(d, source, TARGETS[target])
        assert done["verified_bytes"] >= sum(v.nbytes for v in turned.values()) and done["unverified_bytes"] <= 1 << 16
        assert not d.api.run("diff", a=source, b=to)["result"]["differences"]
    path, = data_files(d.storages["main"] / source["name"])
    flip(path, path.stat().st_size // 2, 3)
    assert d.api.fails("reshard", "digest_mismatch", source=source, target=ref(lib.fresh()))["fqn"] in turned


def flip(path, at, bit):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit]))


def data_files(root):
    return sorted(p for p in ([root] if root.is_file() else root.iterdir()) if p.suffix in (".distcp", ".safetensors", ".npz", ".pt"))


@pytest.mark.parametrize("name", [*("pytorch", "safetensors"), *(pytest.param(t, marks=pytest.mark.long)
                                                                 for t in ("columns", "torch", "rows", "one rank", "npz"))])
def test_a_flipped_bit_is_found_while_it_is_copied(d, sources, name):
    rnd, source = random.Random(name), sources[name]
    target = TARGETS["columns" if name != "columns" else "safetensors"]
    for _ in range(6):
        path = rnd.choice(data_files(d.storages["main"] / source["name"]))
        at, bit = rnd.randrange(path.stat().st_size // 8, path.stat().st_size * 7 // 8), rnd.randrange(8)
        to = ref(lib.fresh())
        flip(path, at, bit)
        try:
            error = d.api.fails("reshard", "digest_mismatch", source=source, target={**to, **target})
            load = d.api.fails("load", "digest_mismatch", source=source, target={"state_dict": lib.fresh()}, transform=SPLIT)
            diff = d.api.fails("diff", "digest_mismatch", a=source, b=sources["rows" if name != "rows" else "pytorch"], read_all=True)
        finally:
            flip(path, at, bit)
        for e in (error, diff, load):
            assert pathlib.Path(e["file"]).name == path.name and e["fqn"] in SHAPES and 0 <= e["offset"] <= at, e
        assert not (d.storages["main"] / to["name"]).exists()
        assert not list(d.storages["main"].glob(f".dcpd*{to['name']}*"))
    d.api.run("verify", source=source)
