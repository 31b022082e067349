"""What the rows of the drop-in measure, in processes of their own: one state dict saved and loaded through dcpd.torch and through
PyTorch's file system classes, taking turns.

    dropin_peer.py FORM RANKS BYTES RUNS DIR      FORM: few, dtensor, small

Prints {"ours": {"save": [seconds …], …}, "theirs": …}, of the slowest rank each. DCPD_URL says which daemon; ours go to its storage `disk`,
theirs into DIR. Before a "first", dcpd's segments are given back: what a process pays that has just begun. No clock starts before what was
given up is gone and written: the daemon frees memory, and the kernel writes, behind the caller's back.
"""
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcpd
from dcpd import _copy
from dcpd.torch import StorageReader, StorageWriter

warnings.filterwarnings("ignore")
SMALL, FEW = 2500, 8
SETTLE_S = 60


class Peer:
    def __init__(self, form, rank, ranks, size, folder):
        self.rank, self.ranks, self.folder, self.n = rank, ranks, folder, 0
        self.client = dcpd.connect()
        self.disk = pathlib.Path(self.client.storages.get("disk")["path"])
        self.state = self.make(form, size)
        self.out = {"ours": {}, "theirs": {}}
        self.control = dist.new_group() if ranks > 1 else None  # asynchronous saves use the default group from threads of theirs

    def make(self, form, size):
        if form == "small":
            return {f"layers.{i // 10}.w{i % 10}": torch.randn(16, 16) for i in range(SMALL)}
        if form == "few":
            return {f"w{i}": torch.rand(size // FEW // 4) for i in range(FEW)}
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        mesh, rows = init_device_mesh("cpu", (self.ranks,)), size // FEW // 4 // 1024 // self.ranks
        return {f"w{i}": DTensor.from_local(torch.rand(rows, 1024), mesh, [Shard(0)], run_check=False) for i in range(FEW)}

    def meet(self):
        if self.control:
            dist.barrier(group=self.control)

    def timed(self, who, name, call, *args, **kw):
        """Seconds of the slowest rank."""
        self.meet()
        start = time.perf_counter()
        got = call(*args, **kw)
        t = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        if self.control:
            dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.control)
        self.out[who].setdefault(name, []).append(t.item())
        return got

    # ---- where

    def new(self, who):
        self.n += 1
        return f"disk:drop{self.n}" if who == "ours" else f"{self.folder}/t{self.n}"

    def writer(self, who, path):
        return {"storage_writer": (StorageWriter if who == "ours" else dcp.FileSystemWriter)(path)}

    def reader(self, who, path):
        return {"storage_reader": (StorageReader if who == "ours" else dcp.FileSystemReader)(path)}

    def files(self, who, path):
        return self.disk / path.split(":")[1] if who == "ours" else pathlib.Path(path)

    def remove(self, who, path):
        """In the same way on both sides: a delete of dcpd's goes on for long, and would run into the next figure."""
        self.meet()
        if self.rank == 0:
            shutil.rmtree(self.files(who, path))
            os.sync()
        self.meet()

    def as_new(self, who):
        self.meet()
        if who == "ours":
            held = [pathlib.Path(p) for p in set(re.findall(r"/dev/shm/dcpd-\w+", pathlib.Path("/proc/self/maps").read_text()))]
            dcpd.close()
            end = time.monotonic() + SETTLE_S
            while any(p.exists() for p in held):
                assert time.monotonic() < end, f"dcpd keeps {held}"
                time.sleep(0.01)
        self.meet()

    def warm_cache(self, who, path):
        """The page cache has the files: PyTorch's own way of seeing to it, a load, takes long with many tensors."""
        self.meet()
        if self.rank == 0:
            for f in sorted(self.files(who, path).iterdir()):
                with open(f, "rb") as data:
                    while data.read(1 << 24):
                        pass
        self.meet()

    # ---- what

    def warm_up(self):
        """Imports, connections, threads: not what is measured."""
        for who in self.out:
            path = self.new(who)
            dcp.async_save({"x": torch.ones(4)}, **self.writer(who, path)).result()
            dcp.load({"x": torch.ones(4)}, **self.reader(who, path))
            self.remove(who, path)

    def saves(self, who):
        self.as_new(who)
        for name in ("save.first", "save"):
            path = self.new(who)
            self.timed(who, name, dcp.save, self.state, **self.writer(who, path))
            self.remove(who, path)
        for name in ("async.first", "async"):
            path = self.new(who)
            self.timed(who, name, dcp.async_save, self.state, **self.writer(who, path)).result()
            if name == "async":
                self.timed(who, "load.after_async", dcp.load, self.state, **self.reader(who, path))
            self.remove(who, path)

    def loads(self, who, path):
        for name in ("load.first", "load", "load.cold"):
            if name != "load":
                self.as_new(who)
            if name != "load.cold" or self.drop_caches():
                self.timed(who, name, dcp.load, self.state, **self.reader(who, path))

    def drop_caches(self):
        ok = os.access("/proc/sys/vm/drop_caches", os.W_OK)
        if ok and self.rank == 0:
            os.sync()
            with open("/proc/sys/vm/drop_caches", "w") as f:
                f.write("3")
        return ok

    def run(self, runs):
        self.warm_up()
        kept = {who: self.new(who) for who in self.out}
        for who, path in kept.items():
            dcp.save(self.state, **self.writer(who, path))
        for k in range(runs):
            for who in sorted(self.out, reverse=bool(k % 2)):
                self.saves(who)
                self.warm_cache(who, kept[who])
                self.loads(who, kept[who])
        for who, path in kept.items():
            self.remove(who, path)
        self.meet()
        dcpd.close()
        return self.out


def begin(rank, ranks, store):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(_copy.threads())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def main(form, ranks, size, runs, folder):
    store, pids = tempfile.mktemp(prefix="dcpd-bench-store-"), []
    for rank in range(1, ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                begin(rank, ranks, store)
                Peer(form, rank, ranks, size, folder).run(runs)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    begin(0, ranks, store)
    out = Peer(form, 0, ranks, size, folder).run(runs)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0, "a rank failed"
    os.unlink(store)
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
