"""Bench rows of formats, `format.*`: conversions beside cp and beside PyTorch's own tools, merges beside a read of the same bytes,
casts beside memcpy. Rows of what looks into checkpoints are in look_rows.py.

Everybody's bytes are durable: what PyTorch wrote is fsynced within its time, as cp's is. What is read from the disk is dropped from the
page cache before, on both sides. PyTorch writes the checkpoints.
"""
import itertools
import json
import shutil
import subprocess
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import dcpd as lib
import deepspeed_python as deepspeed
import zero_files
from measure import TESTBIN

warnings.filterwarnings("ignore", "torch.distributed is")

RUNS, TENSORS, MERGED = 3, 8, 4
RIVAL_RUNS = 2  # of PyTorch's tools, which take several times as long
CONVERSIONS = ("torch_to_dcp", "dcp_to_torch", "dcp_to_safetensors", "dcp_to_npz", "dcp_to_gguf", "hf_dcp_to_safetensors")
SHARDS = 4
FLOATS = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f8": "float8_e4m3fn"}
CASTS = {f"{a}_{b}": (FLOATS[a], FLOATS[b]) for a, b in itertools.permutations(FLOATS, 2)} | {"f8_f8": (FLOATS["f8"], "float8_e5m2")}
RULES = [{"match": "^layers\\.", "rename": "model.layers."}, {"match": "weight", "dtype": "bfloat16"},
         {"match": "^(.*)\\.weight$", "split": {"dim": 0, "parts": 2, "into": ["$1.a", "$1.b"]}}]


class Formats:
    def __init__(self, bench, size, drop_caches):
        self.bench, self.size, self.cold, self.n = bench, size, drop_caches, 0
        self.root = bench.disk / "formats"
        self.d = lib.Daemon(bench.disk / "formats-home", {"f": self.root})

    def end(self):
        self.d.discard()
        shutil.rmtree(self.root)

    def wants(self, *names):
        return any(self.bench.wants(f"format.{n}") for n in names)

    def row(self, name, *args, **more):
        if self.wants(name):
            self.bench.row(f"format.{name}", *args, **more)

    def state(self, size, seed=0):
        g = torch.Generator().manual_seed(seed)
        first = torch.randn(size // TENSORS // 4096, 1024, generator=g)
        return {f"layers.{i}.weight": first * (1 + i / TENSORS) for i in range(TENSORS)}

    def job(self, kind, target=None, **fields):
        """Seconds, and what was made is removed; a target's name goes on with a number."""
        name = self.root / f"new{self.n}{target['end']}" if target else None
        self.n += 1
        where = {"target": {"storage": "f", "name": name.name, **target["more"]}} if target else {}
        start = time.monotonic()
        self.d.api.run(kind, seconds=300, **where, **fields)
        took = time.monotonic() - start
        if target:
            remove(name)
        return took

    def reshard(self, source, end="", more=None, **fields):
        return self.job("reshard", {"end": end, "more": more or {}}, source=ref(source), **fields)

    def theirs(self, make):
        """Seconds of a peer that writes to a path, and of its fsync."""
        path = self.root / "theirs"
        start = time.monotonic()
        make(path)
        subprocess.run(["sync", *map(str, path.iterdir() if path.is_dir() else [path])], check=True)
        took = time.monotonic() - start
        remove(path)
        return took

    def read(self, directories):
        """Seconds of a plain read of all files."""
        files = [str(p) for d in directories for p in d.iterdir()]
        self.cold()
        start = time.monotonic()
        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
        return time.monotonic() - start


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def ref(name):
    return {"storage": "f", "name": name}


def rows(bench, size, drop_caches):
    """size: the bench's bytes; a conversion has half of them."""
    casts(bench)
    parts = [(conversions, (*CONVERSIONS, *(f"{n}.pytorch" for n in CONVERSIONS))), (transforms, ["transform"]),
             (merges, ["merge", "merge.pytorch"]), (diffs, ["diff", "diff.pytorch", "diff.digests"]), (zero, ["zero"]),
             (deltas, ["delta", "delta.apply"])]
    parts = [part for part, names in parts if any(bench.wants(f"format.{n}") for n in names)]
    if not parts:
        return
    bench.no_torch()
    f = Formats(bench, size // 2, drop_caches)
    try:
        for part in parts:
            part(f)
    finally:
        f.end()


def conversions(f):
    source, file, shards = f.root / "dcp", f.root / "pt/model.pt", f.root / "shards"
    file.parent.mkdir()
    shards.mkdir()
    state = f.state(f.size)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(source), no_dist=True)
    torch.save(state, file)
    for i in range(SHARDS):
        parts = {k: t.chunk(SHARDS)[i].contiguous() for k, t in state.items()}
        info = {k: {"saved_offsets": [i * t.shape[0], 0]} for k, t in parts.items()}
        save_file(parts, shards / f"shard-{i + 1:05}-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": json.dumps(info)})
    homes = dict.fromkeys(state, 1)
    del state, parts

    def consolidate(path):
        path.mkdir()
        consolidate_safetensors_files(str(shards), str(path), homes)

    def to_safetensors(path):
        path.mkdir()
        dcp_to_torch_save(source, path / "pt")
        save_file(torch.load(path / "pt", weights_only=True), path / "model.safetensors")
        (path / "pt").unlink()

    made = {"torch_to_dcp": ("pt/model.pt", "", {}, lambda path: torch_save_to_dcp(file, path), "torch_save_to_dcp"),
            "dcp_to_torch": ("dcp", ".pt", {"format": "torch"}, lambda path: dcp_to_torch_save(source, path), "dcp_to_torch_save"),
            "dcp_to_safetensors": ("dcp", "", {"format": "safetensors"}, to_safetensors, "dcp_to_torch_save, save_file"),
            "dcp_to_npz": ("dcp", ".npz", {"format": "npz"}, None, None), "dcp_to_gguf": ("dcp", ".gguf", {"format": "gguf"}, None, None),
            "hf_dcp_to_safetensors": ("shards", "", {"format": "safetensors"}, consolidate, "consolidate_safetensors_files")}
    for name in (n for n in CONVERSIONS if f.wants(n, f"{n}.pytorch")):
        origin, end, more, theirs, peer = made[name]
        ours, copies, torches = [], [], []
        f.reshard(origin, end, more)
        f.bench.copy(f.root / origin.split("/")[0], f.root / "copy")
        for i in range(RUNS):
            copies.append(f.bench.copy(f.root / origin.split("/")[0], f.root / "copy"))
            ours.append(f.reshard(origin, end, more))
            torches += [f.theirs(theirs)] if theirs and i < RIVAL_RUNS else []
        what = f"dcpctl reshard f:{origin} f:new{end}" + (f" --format {more['format']}" if more else "")
        f.row(name, "s", "<=1.18", "cp and fsync", ours, copies, what)
        if torches:
            f.row(f"{name}.pytorch", "s", "<=0.50" if theirs is consolidate else "<=0.20", f"{peer}, fsync", ours, torches, what)
    remove(source)
    remove(file.parent)
    remove(shards)


def transforms(f):
    dcp.save(f.state(f.size), storage_writer=dcp.FileSystemWriter(f.root / "plain"), no_dist=True)
    f.reshard("plain")
    ours, plain = [], []
    for _ in range(RUNS):
        plain.append(f.reshard("plain"))
        ours.append(f.reshard("plain", transform=RULES))
    f.row("transform", "s", "<=1.18", "the same reshard without rules", ours, plain, "dcpctl reshard --transform: rename, cast, split")
    remove(f.root / "plain")


def merges(f):
    names = [f"m{i}" for i in range(MERGED)]
    paths = [f.root / n for n in names]
    for i, p in enumerate(paths):
        dcp.save(f.state(f.size // 2, i), storage_writer=dcp.FileSystemWriter(p), no_dist=True)
    part = f.size // 2

    def by_torch(path):
        total = None
        for p in paths:
            one = {k: torch.empty_like(v) for k, v in like.items()}
            dcp.load(one, storage_reader=dcp.FileSystemReader(p), no_dist=True)
            total = {k: v / MERGED if total is None else total[k].add_(v, alpha=1 / MERGED) for k, v in one.items()}
        dcp.save(total, storage_writer=dcp.FileSystemWriter(path), no_dist=True)

    like = f.state(part)
    ours, reads, torches = [], [], []
    for i in range(RUNS):
        reads.append(MERGED * part / f.read(paths) / 1e9)
        f.cold()
        ours.append(f.job("merge", {"end": "", "more": {}}, sources=[ref(n) for n in names]))
        f.cold()
        torches += [f.theirs(by_torch)] if i < RIVAL_RUNS else []
    what = f"dcpctl merge f:m0 … f:m{MERGED - 1} f:new"
    f.row("merge", "GB/s", ">=0.80", "cat of the same files", [MERGED * part / t / 1e9 for t in ours], reads, what)
    f.row("merge.pytorch", "s", "<=1.00", "dcp.load of each, add, dcp.save, fsync", ours, torches, what)
    for p in paths:
        remove(p)


def zero(f):
    """ZeRO-3 of 4 ranks, as large as the others with its optimizer's states; their masters alone are wanted. Time of imports does not
    count. Both sides read and write the same bytes on the same disk, which is most of dcpd's time: 0.28 while the disk was fast, 0.49
    an hour later."""
    zero_files.write(f.root / "zero", 3, 4, [f.state(f.size // 3)])
    ours, theirs = [], []
    f.reshard("zero", "", {"format": "safetensors"}, exclude=["optim.*"])
    for _ in range(RUNS):
        f.cold()
        ours.append(f.reshard("zero", "", {"format": "safetensors"}, exclude=["optim.*"]))
        f.cold()
        theirs.append(float(deepspeed.run("convert", f.root / "zero", f.root / "theirs").split()[-1]))
        remove(f.root / "theirs")
    f.row("zero", "s", "<=0.50", "DeepSpeed zero_to_fp32.py, fsync", ours, theirs,
          "dcpctl reshard f:zero f:new --format safetensors --exclude 'optim.*'")
    remove(f.root / "zero")


def diffs(f):
    """Two checkpoints of PyTorch's, all of whose elements differ; then two that dcpd wrote, of which one tensor differs."""
    names, size = ("d0", "d1"), f.size
    paths = [f.root / n for n in names]
    state = f.state(size)
    for p in paths:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(p), no_dist=True)
        for t in state.values():
            t.mul_(1.001)
    like = {k: torch.empty_like(t) for k, t in state.items()}, {k: torch.empty_like(t) for k, t in state.items()}
    del state

    def by_torch():
        for p, state in zip(paths, like):
            dcp.load(state, storage_reader=dcp.FileSystemReader(p), no_dist=True)
        for k, a in like[0].items():
            b = like[1][k]
            gap = a - b
            figures = [gap.norm() / a.norm(), torch.dot(a.flatten(), b.flatten()) / a.norm() / b.norm(), gap.abs().max(), (a != b).sum()]
            assert all(x.isfinite() for x in figures)

    ours, reads, torches = [], [], []
    sides = {"a": ref("d0"), "b": ref("d1")}
    for i in range(RUNS):
        reads.append(2 * size / f.read(paths) / 1e9)
        f.cold()
        ours.append(f.job("diff", **sides))
        if i >= RIVAL_RUNS:
            continue
        f.cold()
        start = time.monotonic()
        by_torch()
        torches.append(time.monotonic() - start)
    f.row("diff", "GB/s", ">=0.80", "cat of the same files", [2 * size / t / 1e9 for t in ours], reads, "dcpctl diff f:d0 f:d1")
    f.row("diff.pytorch", "s", "<=1.00", "dcp.load of both, norms, dot, max", ours, torches, "dcpctl diff f:d0 f:d1")
    like[0].clear(), like[1].clear()
    if f.wants("diff.digests"):
        diff_by_digests(f, sides)
    for p in paths:
        remove(p)


def diff_by_digests(f, sides):
    for k, source in (("a", "d0"), ("b", "d0")):
        rules = [{"match": "^layers\\.0\\.weight$", "dtype": "bfloat16"}] if k == "b" else []
        f.d.api.run("reshard", seconds=300, source=ref(source), target={"storage": "f", "name": f"by-{k}"}, transform=rules)
    digests, reads = [], []
    for _ in range(RUNS):
        both = {"a": ref("by-a"), "b": ref("by-b")}
        f.cold()
        digests.append(f.job("diff", **both))
        f.cold()
        reads.append(f.job("diff", **both, read_all=True))
    f.row("diff.digests", "s", "<=0.35", "the same with read_all", digests, reads, "dcpctl diff of two steps that share 7 of 8 tensors")
    for k in "ab":
        remove(f.root / f"by-{k}")


def deltas(f):
    """A step of reinforcement learning: 2 % of the elements change, of 16-bit weights. All bytes are in the page cache."""
    g, size = torch.Generator().manual_seed(1), f.size
    base = {f"layers.{i}.weight": torch.randn(size // TENSORS // 2048, 1024, generator=g).bfloat16() for i in range(TENSORS)}
    new, diff = {}, f.root / "diff"
    with open(diff, "wb") as out:
        for k, t in base.items():
            new[k] = torch.where(torch.rand(t.shape, generator=g) < 0.02, (t.float() * 1.01).bfloat16(), t)
            (t.view(torch.int16) ^ new[k].view(torch.int16)).numpy().tofile(out)
    for name, state in (("base", base), ("step", new)):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f.root / name), no_dist=True)
    total = sum(t.nbytes for t in base.values())
    del base, new, state
    f.d.api.run("delta", base=ref("base"), source=ref("step"), target=ref("change"))
    ours, applied, zstd, copies = [], [], [], []
    for _ in range(RUNS):
        zstd.append(f.theirs(lambda path: subprocess.run(["zstd", "-q", "-1", diff, "-o", path], check=True)))
        ours.append(f.job("delta", {"end": "", "more": {}}, base=ref("base"), source=ref("step")))
        copies.append(f.bench.copy(f.root / "base", f.root / "copy"))
        applied.append(f.job("apply", {"end": "", "more": {}}, base=ref("base"), source=ref("change")))
    f.row("delta", "GB/s", ">=0.80", "zstd -1 of the xor'ed bytes, fsync", *([total / t / 1e9 for t in x] for x in (ours, zstd)),
          "dcpctl delta f:base f:step f:new")
    f.row("delta.apply", "s", "<=4.00", "cp and fsync of the base", applied, copies, "dcpctl apply f:base f:change f:new")
    for name in ("base", "step", "change", "diff"):
        remove(f.root / name)


def casts(bench):
    """Bytes read and written per second, one thread, in blocks as a reshard has them."""
    for name, pair in CASTS.items():
        if bench.wants(f"format.cast.{name}"):
            out = subprocess.run([TESTBIN / "bench/bench_cast", *pair], capture_output=True, text=True, check=True).stdout
            ours, peer = zip(*(map(float, line.split()) for line in out.splitlines()))
            bench.row(f"format.cast.{name}", "GB/s", ">=0.80", "memcpy of as many bytes, 1 thread", ours, peer,
                      f"bench_cast {' '.join(pair)}")
