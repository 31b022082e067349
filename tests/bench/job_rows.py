"""Bench rows of jobs: save, load and reshard of four ranks' state dict, on the disk and on tmpfs, beside fio, memcpy, cp and PyTorch.

The limit of `save.tmpfs`, in seconds of one core per GiB with pages of 4 KiB: write() of new pages 0.40, which is all that the peer does;
a save maps its segments, too (0.13), and hashes (0.06): 0.40 / 0.59 = 0.68. With huge pages (deploy/tuning.md) both are 5 times as fast.

The parts of `load.warm`, in seconds of one core per GiB (Xeon, Linux 6.18): memcpy, which is all that the peer does, 0.14 (ordinary
stores, which first read what they overwrite); a load copies as much out of mapped pages of the file by streaming stores (0.10), maps and
unmaps them (0.02), and hashes (0.04 with digests), before the request's own 10 ms. Segments have huge pages: mapping them costs nothing.
"""
import datetime
import os
import shutil
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import dcpd as lib
from measure import COLUMNS, MIB, RANKS, RUNS, SIZE, drop_caches
from peak import Peak


def saves(b):
    if not (b.wants("save.disk") or b.wants("save.first") or b.wants("save.pytorch")):
        return
    b.fio("write")
    first, fio_first = [], []
    for _ in range(3):
        b.fresh()
        first.append(SIZE / b.save("disk", "first") / 1e9)
        fio_first.append(b.fio("write"))
        b.delete("disk", "first")
    ours, fio, torch = [], [], []
    pool = b.torch()
    for i in range(RUNS):
        fio.append(b.fio("write"))
        ours.append(SIZE / b.save("disk", f"s{i}") / 1e9)
        b.delete("disk", f"s{i}")
        torch.append(SIZE / max(pool.run(RANKS, "scenarios", "bench_save", seconds=300, path=str(b.disk / "torch"))) / 1e9)
    b.row("save.disk", "GB/s", ">=0.95", "fio sequential write, fsync", ours, fio, "dcpctl save shm:bench disk:s0")
    b.row("save.first.disk", "GB/s", ">=0.95", "fio sequential write, fsync", first, fio_first, "dcpctl save, first of a daemon")
    b.row("save.disk.pytorch", "GB/s", ">=1.00", "PyTorch dcp.save, 4 ranks", ours, torch, "dcp.save(FileSystemWriter)")


def saves_tmpfs(b):
    if not b.wants("save.tmpfs"):
        return
    b.daemon()
    b.no_torch()
    b.save("tmpfs", "warm")
    b.delete("tmpfs", "warm")
    ours, plain = [], []
    b.memspeed("write", b.tmpfs, runs=1)
    for i in range(RUNS):
        plain += b.memspeed("write", b.tmpfs, runs=1)
        ours.append(SIZE / b.save("tmpfs", f"s{i}") / 1e9)
        b.delete("tmpfs", f"s{i}")
    b.row("save.tmpfs", "GB/s", ">=0.65", "write() of new files, 2 threads", ours, plain, "dcpctl save shm:bench tmpfs:s0")


def loads(b):
    if not b.wants("load"):
        return
    b.daemon()
    b.save("disk", "src")
    source, target = {"storage": "disk", "name": "src"}, {"state_dict": "target", "world_size": RANKS}
    b.job("load", source=source, target=target)  # makes the segments and touches their pages
    load = {"source": source, "target": {"state_dict": "target"}}
    warm, bare, cold, fio, memory = [], [], [], [], []
    for _ in range(RUNS):
        memory.append(SIZE / b.job("load", **load) / 1e9)
    b.row("load.memory", "GB/s", ">=0.45", "memcpy, 2 threads", memory, b.memspeed("copy"),
          "the same, the state dict that was saved still in memory")
    b.d.drop("bench")  # from here on it comes from files
    b.job("load", **load, options={"cache": "keep"})
    for _ in range(RUNS):
        warm.append(SIZE / b.job("load", **load) / 1e9)
        bare.append(SIZE / b.job("load", **load, options={"verify": "none"}) / 1e9)
    copy = b.memspeed("copy")
    b.row("load.warm.digest", "GB/s", ">=0.55", "memcpy, 2 threads", warm, copy, "dcpctl load disk:src shm:target")
    b.row("load.warm", "GB/s", ">=0.80", "memcpy, 2 threads", bare, copy, "the same, options.verify none")
    if drop_caches():
        b.fio("write")
        for _ in range(3):
            drop_caches()
            fio.append(b.fio("read"))
            drop_caches()
            cold.append(SIZE / b.job("load", **load) / 1e9)
        b.row("load.cold", "GB/s", ">=0.95", "fio sequential read", cold, fio, "echo 3 > drop_caches; dcpctl load")
    b.d.drop("target")
    partial = {"source": source, "target": {"state_dict": "half", "world_size": 1}, "include": ["layers.1.*", "layers.2.*"]}
    done = b.daemon().api.run("load", seconds=300, **partial)
    plan = b.d.api.get(f"/v1/jobs/{done['id']}/plan").ok(200)
    b.row("load.partial.read", "B", "<=1.05", "bytes needed", [plan["read_bytes"]], [plan["needed_bytes"]], "dcpctl load --include …")
    b.d.drop("half")
    pool = b.torch()
    path = str(b.disk / "torch")
    pool.run(RANKS, "scenarios", "bench_save", seconds=300, path=path)
    torch = [SIZE / max(pool.run(RANKS, "scenarios", "bench_load", seconds=300, path=path)) / 1e9 for _ in range(3)]
    b.row("load.warm.pytorch", "GB/s", ">=1.00", "PyTorch dcp.load, 4 ranks", warm, torch, "dcp.load(FileSystemReader)")
    b.no_torch()
    b.delete("disk", "src")


def verifies(b):
    """Out of the page cache, so that the digests count and not the disk."""
    if not b.wants("verify.warm"):
        return
    b.daemon()
    b.save("disk", "src")
    files = [str(p) for p in (b.disk / "ckpt/src").iterdir()]
    ours, reads = [], []
    for i in range(RUNS + 1):
        start = time.monotonic()
        subprocess.run(["xargs", "-P2", "-n1", "cat"], input="\n".join(files), text=True, stdout=subprocess.DEVNULL, check=True)
        read = time.monotonic() - start
        took = b.job("verify", source={"storage": "disk", "name": "src"}, level="digest")
        if i:  # the first fills the page cache
            reads.append(SIZE / read / 1e9)
            ours.append(SIZE / took / 1e9)
    b.row("verify.warm", "GB/s", ">=0.80", "cat of the same files, 2 at a time", ours, reads, "dcpctl verify disk:src --level digest")
    b.delete("disk", "src")


def reshards(b):
    for storage, directory in (("disk", b.disk), ("tmpfs", b.tmpfs)):
        goal = "<=0.80" if storage == "disk" else "<=1.10"
        rows = [("reshard", "src", {"world_size": 2, "layout": COLUMNS}, goal),
                ("to_safetensors", "src", {"format": "safetensors"}, goal),
                ("from_safetensors", "hf", {"world_size": RANKS}, "<=1.20")]
        rows = [r for r in rows if b.wants(f"{r[0]}.{storage}")]
        if not rows:
            continue
        b.daemon()
        b.no_torch()
        b.save(storage, "src")
        if any(source == "hf" for _, source, _, _ in rows):
            b.job("reshard", source={"storage": storage, "name": "src"},
                  target={"storage": storage, "name": "hf", "format": "safetensors"})
        for name, source, target, goal in rows:
            ours, copies, peak = [], [], Peak(b.d)
            peak.start()
            for i in range(RUNS):
                copies.append(b.copy(directory / f"ckpt/{source}", directory / "copy"))
                where = {"storage": storage, "name": f"r{i}"}
                ours.append(b.job("reshard", source={"storage": storage, "name": source}, target={**where, **target}))
                b.d.api.run("delete", target=where)
            words = ("--format safetensors" if "format" in target else "--layout '*=Shard(1)@2'" if "layout" in target else
                     f"--world-size {RANKS}")
            peak.stop.set()
            peak.join()
            b.row(f"{name}.{storage}", "s", goal, "cp and fsync", ours, copies,
                  f"dcpctl reshard {storage}:{source} {storage}:r0 {words}")
            b.row(f"{name}.{storage}.memory", "MiB", "<=1.00", "limit 256 MiB", [peak.workers / MIB], [256.0],
                  "anonymous and shared memory of all workers")
        for name in sorted({source for _, source, _, _ in rows} | {"src"}):
            b.delete(storage, name)


def copies(b):
    """A checkpoint byte for byte, each byte compared with its digest, beside `cp -r` and a sync of all files; both read the page cache."""
    if not b.wants("catalogue.copy"):
        return
    b.daemon()
    b.save("disk", "src")
    source = {"storage": "disk", "name": "src"}
    b.copy(b.disk / "ckpt/src", b.disk / "cp")
    ours, cp = [], []
    for i in range(RUNS):
        cp.append(b.copy(b.disk / "ckpt/src", b.disk / "cp"))
        ours.append(b.job("replicate", source=source, target={"storage": "disk", "name": f"copy{i}"}))
        b.delete("disk", f"copy{i}")
    b.row("catalogue.copy", "s", "<=1.20", "cp -r, sync", ours, cp, "dcpctl cp disk:src disk:copy0")
    b.delete("disk", "src")


ENDS, ENDS_RUNS, ENDS_BYTES = 10, 5, 16 << 10  # saves of a figure, since records count milliseconds; bytes of a rank, which take no time


def ends(b):
    """What a save takes besides its bytes. `job.first_byte`: from the journal's commit to the copy's begin; `job.durable`: from there to
    durable, beside the bare sequence of the same files by as many threads as there are workers. The gang is warm. Before it renames, the
    daemon notes in its journal that it will: one more fsync, beside those of the metadata, and two messages, which the bare sequence has
    not (2.4 to 2.5 ms, 1.9)."""
    if not b.wants("job.first_byte") and not b.wants("job.durable"):
        return
    d = b.daemon()
    d.put("ends", [lib.image({f"w{r}": ("U8", [ENDS_BYTES], os.urandom(ENDS_BYTES))}, {}) for r in range(RANKS)])
    first, durable, bare = [], [], []
    for i in range(ENDS_RUNS + 1):
        saved = [d.api.run("save", source={"state_dict": "ends"}, target={"storage": "disk", "name": f"ends{k}"}) for k in range(ENDS)]
        like = {p.name: p.read_bytes() for p in (b.disk / "ckpt/ends0").iterdir()}
        alone = statistics.mean(bare_commit(b.disk / "ckpt", like) for _ in range(ENDS)) * 1e3
        if i:  # the first one warms up
            first.append(statistics.mean(stage(j, "copy") - stage(j, "starting") for j in saved))
            durable.append(statistics.mean(ms(j["milestones"]["durable"]) - stage(j, "copy") for j in saved))
            bare.append(alone)
        for k in range(ENDS):
            b.delete("disk", f"ends{k}")
    d.drop("ends")
    b.row("job.first_byte", "ms", "<=1.00", "limit 2 ms", first, [2.0], f"dcpctl save of {RANKS} x 16 KiB, by the stages of its record")
    b.row("job.durable", "ms", "<=1.35", "the same files, fsyncs and rename alone", durable, bare, "the same, until durable")


def ms(at):
    return datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp() * 1e3


def stage(job, name):
    return next(ms(s["at"]) for s in job["stages"] if s["stage"] == name)


def bare_commit(parent, files):
    """Seconds for a checkpoint's files, fsync of each, of the staging directory, a rename, fsync of the parent."""
    def write(name):
        fd = os.open(staging / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(fd, files[name])
        os.fsync(fd)
        os.close(fd)

    def sync(directory):
        fd = os.open(directory, os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)

    staging = parent / ".bare"
    data = [n for n in files if n.endswith(".distcp")]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(len, data))  # the threads are there
        start = time.monotonic()
        staging.mkdir()
        list(threads.map(write, data))
        for name in sorted(set(files) - set(data)):
            write(name)
        sync(staging)
        staging.rename(parent / "bare")
        sync(parent)
        took = time.monotonic() - start
    shutil.rmtree(parent / "bare")
    return took
