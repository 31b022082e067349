"""What the Python rows measure, in processes of its own: `dcpd` is the package here, and in the bench itself the tests' harness.

    python_peer.py PART N BYTES RUNS DIR       N ranks over gloo. PART: saves (dcpd, memcpy and torch.save taking turns), loads (dcpd and
                                               torch), or one form of PyTorch's async_save: default, thread_cached, process_cached
    python_peer.py small RUNS                  10,000 small tensors, plain and DTensors

Prints one JSON object of lists of seconds, each of the slowest rank. A rank that fails ends them all, and what it said is the last line
of stderr. DCPD_URL says which daemon; references go to its storage `disk`.
"""
import json
import mmap
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # once for all ranks, which are forks

import dcpd
from dcpd import _copy

warnings.filterwarnings("ignore")
LIMIT = 240  # seconds for a part
TENSORS = 8


class Ranks:
    """One rank. control: a group of our own, as PyTorch's asynchronous saves use the default one from threads of theirs."""

    def __init__(self, rank, size, runs, folder):
        self.rank, self.runs, self.folder, self.n = rank, runs, folder, 0
        self.control = dist.new_group()
        self.state = {f"r{rank}.w{i}": torch.full((size // TENSORS // 4,), rank + i / 8) for i in range(TENSORS)}
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(t) for t in self.state.values()], lr=0.0)  # of the same memory
        self.out = {}

    def timed(self, name, f, *args, **kw):
        dist.barrier(group=self.control)
        start = time.perf_counter()
        got = f(*args, **kw)
        self.put(name, time.perf_counter() - start)
        return got

    def put(self, name, seconds):
        t = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.control)
        self.out.setdefault(name, []).append(t.item())

    def path(self, kind):
        self.n += 1
        return f"{self.folder}/{kind}{self.n}"

    def drop(self, path):
        """What PyTorch wrote is not kept: its pages would be in everybody's way."""
        dist.barrier(group=self.control)
        if self.rank == 0:
            shutil.rmtree(path)

    def maps(self):
        """Blocks for a copy of the state into new shared pages, and those pages."""
        maps = [mmap.mmap(-1, t.nbytes) for t in self.state.values()]
        at = [torch.frombuffer(m, dtype=torch.uint8).data_ptr() for m in maps]
        return [(a, t.data_ptr(), t.nbytes) for a, t in zip(at, self.state.values())], maps

    def settle(self):
        """Nobody is at work: what came before (segments given back, files removed) runs into nobody's time, ours or PyTorch's."""
        dist.barrier(group=self.control)
        if self.rank == 0:
            end = time.monotonic() + 3  # others may work here too
            while time.monotonic() < end and busy(0.1) > 0.05:
                pass
        dist.barrier(group=self.control)

    def stall(self, name):
        """One async_save to a new name, as PyTorch's: what the caller waits for."""
        path = self.path("py")
        self.settle()
        self.timed("stall" + name, dcpd.async_save, self.state, path).result()
        self.drop(path)

    def overlap(self):
        """The same beside a step of twice the copy's time, in which this process sleeps, as while a GPU works."""
        path = self.path("py")
        self.settle()
        dist.barrier(group=self.control)
        start = time.perf_counter()
        h = dcpd.async_save(self.state, path, overlap=True)
        called = time.perf_counter()
        time.sleep(max(0.0, 2 * statistics.median(self.out["copy"]) - (called - start)))
        step = time.perf_counter()
        self.optimizer.step()
        self.put("overlap", time.perf_counter() - step + called - start)
        h.result()
        self.drop(path)

    def save(self, name):
        """One save to a new name, until it is durable."""
        path = self.path("py")
        self.settle()
        self.timed("save" + name, dcpd.save, self.state, path)
        self.drop(path)

    def saves(self):
        for _ in range(self.runs):
            dcpd.close()  # the slots: their pages are made anew
            blocks, maps = self.maps()
            self.settle()
            self.timed("copy_first", _copy.copy, blocks)
            del blocks, maps
            self.stall("_first")
            dcpd.close()
            self.save("_first")
            path = self.path("t")
            self.settle()
            self.timed("torch_save", dcp.save, self.state, checkpoint_id=path)
            self.drop(path)
        for _ in range(2):  # the other slot's pages, and how both are mapped
            self.stall("_second")
        blocks, maps = self.maps()
        _copy.copy(blocks)
        for _ in range(2 * self.runs):
            self.settle()
            self.timed("copy", _copy.copy, blocks)
            self.stall("")
        for _ in range(self.runs):
            self.overlap()
        for _ in range(self.runs):
            self.save("")

    def torch_async(self, kind, cached):
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        try:
            planner = dcp.DefaultSavePlanner(enable_plan_caching=cached)
        except TypeError:  # a release without
            planner = dcp.DefaultSavePlanner()
        more = {}
        if cached:  # its buffers are kept from save to save; pinned ones need CUDA
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            more = {"async_stager": DefaultStager(StagingOptions(False, True, False, False))}
        for again in range(self.runs + cached):
            path = self.path("a")
            f = self.timed("stall" if again or not cached else "first", dcp.async_save, self.state, checkpoint_id=path, planner=planner,
                           async_checkpointer_type=getattr(AsyncCheckpointerType, kind), **more)
            getattr(f, "upload_completion", f).result()
            self.drop(path)
        if more:
            more["async_stager"].close()
        if kind == "PROCESS":
            from torch.distributed.checkpoint import _async_process_executor as executor

            executor._CHECKPOINT_PROCESS = None  # its process ends with it, and not with a traceback

    def default(self):
        self.torch_async("THREAD", False)

    def thread_cached(self):
        self.torch_async("THREAD", True)

    def process_cached(self):
        self.torch_async("PROCESS", True)

    def loads(self):
        theirs = self.path("l")
        self.loads_after_saves()
        dcp.save(self.state, checkpoint_id=theirs)
        dcpd.save(self.state, "disk:py", overwrite=True)
        for cold in ("", "_cold"):
            if not cold:
                dcpd.load("disk:py", into=self.state)  # both are in the page cache now
                dcp.load(self.state, checkpoint_id=theirs)
            for _ in range(self.runs):
                for name, f in (("load", lambda: dcpd.load("disk:py", into=self.state)),
                                ("torch_load", lambda: dcp.load(self.state, checkpoint_id=theirs))):
                    if cold:
                        self.forget_files()
                    self.timed(name + cold, f)

    def loads_after_saves(self):
        """Each load is the first one of a checkpoint that was saved just before."""
        for _ in range(self.runs):
            path = self.path("s")
            dcp.save(self.state, checkpoint_id=path)
            self.settle()
            self.timed("torch_after_save", dcp.load, self.state, checkpoint_id=path)
            self.drop(path)
            for name, save in (("after_save", lambda p: dcpd.async_save(self.state, p).result()),
                               ("after_keep", lambda p: dcpd.save(self.state, p, cache="keep"))):
                path = self.path("m")
                save(path)
                self.settle()
                self.timed(name, dcpd.load, path, into=self.state)
                self.drop(path)

    def forget_files(self):
        dist.barrier(group=self.control)
        if self.rank == 0:
            with open("/proc/sys/vm/drop_caches", "w") as c:
                c.write("3")


def busy(seconds):
    """How much of the machine's time is worked or waited for the disk in."""
    def look():
        with open("/proc/stat") as f:
            x = list(map(int, f.readline().split()[1:9]))
        return sum(x), x[3]

    (a, idle), _ = look(), time.sleep(seconds)
    b, later = look()
    return 1 - (later - idle) / max(b - a, 1)


def rank(part, n, me, size, runs, folder, store, out):
    os.environ.update(RANK=str(me), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), LOCAL_RANK=str(me))
    torch.set_num_threads(_copy.threads())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=me, world_size=n)
    r = Ranks(me, size, runs, folder)
    getattr(r, part)()
    dist.barrier(group=r.control)
    dcpd.close()
    if me == 0:
        with open(out, "w") as f:
            json.dump(r.out, f)


def fork(part, n, me, *args):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        rank(part, n, me, *args)
        code = 0
    except BaseException as e:
        with open(f"{args[-1]}.{me}", "w") as f:
            f.write(f"{time.time()} rank {me}: {type(e).__name__}: {str(e)[:400]}")
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ranks(part, n, size, runs, folder):
    """Runs a part on n ranks. The first one that fails is the one to blame; the others would wait for it."""
    with tempfile.TemporaryDirectory() as place:
        out = f"{place}/out"
        pids = {fork(part, n, me, size, runs, folder, f"{place}/store", out): me for me in range(n)}
        end, failed = time.monotonic() + LIMIT, None
        while pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in pids:
                me = pids.pop(pid)
                if status and failed is None:
                    failed = f"rank {me} ended with status {status}"
                    end = min(end, time.monotonic() + 5)
            elif time.monotonic() > end:
                failed = failed or f"{part}: not done after {LIMIT} s"
                for p in pids:
                    os.kill(p, signal.SIGKILL)
                end = time.monotonic() + 60
            else:
                time.sleep(0.05)
        if failed is None:
            with open(out) as f:
                return json.load(f)
        said = sorted(open(f"{out}.{me}").read() for me in range(n) if os.path.exists(f"{out}.{me}"))
        sys.exit(said[0].split(" ", 1)[1] if said else failed)


def small(runs):
    plain = {f"layers.{i // 10}.w{i % 10}": torch.randn(16, 16) for i in range(10_000)}
    out = {"plain": [], "plain_cpu": [], "dtensor": [], "dtensor_cpu": [], "to_local": []}

    def go(sd, name):
        for k in range(runs + 2):
            start, cpu = time.perf_counter(), time.thread_time()
            h = dcpd.async_save(sd, f"disk:small-{name}", overwrite=True)
            t, cpu = time.perf_counter() - start, time.thread_time() - cpu
            h.result()
            if k > 1:  # both slots are warm
                out[name].append(t)
                out[name + "_cpu"].append(cpu)

    go(plain, "plain")
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        cut = {k: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for k, t in plain.items()}
        go(cut, "dtensor")
        for _ in range(runs):
            start = time.perf_counter()
            for t in cut.values():
                t.to_local()
            out["to_local"].append(time.perf_counter() - start)
        dist.destroy_process_group()
    return out


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    result = small(int(rest[0])) if how == "small" else ranks(how, int(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    print(json.dumps(result), flush=True)
