"""What the Python rows measure, in processes of its own: `dcpd` is the package here, and in the bench itself the tests' harness.

    python_peer.py ranks N BYTES RUNS DIR      N ranks over gloo: stalls, saves and loads of dcpd and of PyTorch, taking turns
    python_peer.py small RUNS                  10,000 small tensors, plain and DTensors
    python_peer.py step SECONDS SAVES          training steps with saves under way; SAVES "none": without

Prints one JSON object of lists of seconds. DCPD_URL says which daemon; references go to its storage `disk`.
"""
import json
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist

import dcpd
from dcpd import _copy

warnings.filterwarnings("ignore")


control = None  # a group of our own: PyTorch's asynchronous saves use the default one from threads of theirs


def timed(f, *args, **kw):
    """Seconds of the slowest rank."""
    dist.barrier(group=control)
    start = time.perf_counter()
    got = f(*args, **kw)
    t = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=control)
    return t.item(), got


class Ranks:
    def __init__(self, rank, size, runs, folder):
        self.rank, self.runs, self.folder, self.n = rank, runs, folder, 0
        self.state = {f"r{rank}.w{i}": torch.rand(size // 8 // 4) for i in range(8)}
        self.out = {}

    def put(self, name, seconds):
        self.out.setdefault(name, []).append(seconds)

    def path(self, kind):
        self.n += 1
        return f"{self.folder}/{kind}{self.n}"

    def copies(self):
        """A threaded memcpy of the bytes: into new shared pages, then into the same ones."""
        import mmap

        for again in range(self.runs + 1):
            if again == 0:
                maps = [mmap.mmap(-1, t.nbytes) for t in self.state.values()]
                to = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
            blocks = [(a.data_ptr(), b.data_ptr(), b.nbytes) for a, b in zip(to, self.state.values())]
            self.put("copy_warm" if again else "copy_new", timed(_copy.copy, blocks)[0])

    def ours(self):
        for again in range(self.runs + 1):
            dist.barrier()
            start = time.perf_counter()
            t, h = timed(dcpd.async_save, self.state, f"disk:py{again}", overwrite=True)
            h.result()
            dist.barrier()
            self.put("stall" if again else "stall_first", t)
            self.put("durable" if again else "durable_first", time.perf_counter() - start)

    def torch_first(self):
        import torch.distributed.checkpoint as dcp

        self.put("torch_save", timed(dcp.save, self.state, checkpoint_id=self.path("t"))[0])

    def torch_async(self):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kinds = {"default": (AsyncCheckpointerType.THREAD, False), "thread_cached": (AsyncCheckpointerType.THREAD, True),
                 "process_cached": (AsyncCheckpointerType.PROCESS, True)}
        for name, (kind, cached) in kinds.items():
            try:
                planner = dcp.DefaultSavePlanner(enable_plan_caching=cached)
            except TypeError:
                planner = dcp.DefaultSavePlanner()
            more = {}
            if cached:  # its buffers are kept from save to save; pinned ones need CUDA
                from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

                more = {"async_stager": DefaultStager(StagingOptions(False, True, False, False))}
            for again in range(self.runs + 1):
                try:
                    t, f = timed(dcp.async_save, self.state, checkpoint_id=self.path("a"), planner=planner,
                                 async_checkpointer_type=kind, **more)
                except Exception as e:  # a form that this release lacks: the others are the rivals
                    print(f"torch {name}: {e}", file=sys.stderr)
                    break
                getattr(f, "upload_completion", f).result()
                if again or not cached:
                    self.put("torch_" + name, t)
            if more:
                more["async_stager"].close()

    def loads(self):
        import torch.distributed.checkpoint as dcp
        from dcpd.torch import StorageReader, StorageWriter

        theirs, mixed = self.path("l"), self.path("d")
        dcp.save(self.state, checkpoint_id=theirs)
        for cold in (False, True):
            for _ in range(self.runs):
                for name, f in (("load", lambda: dcpd.load("disk:py1", into=self.state)),
                                ("torch_load", lambda: dcp.load(self.state, checkpoint_id=theirs)),
                                ("dropin_load", lambda: dcp.load(self.state, storage_reader=StorageReader("disk:py1")))):
                    if cold and self.rank == 0:
                        os.sync()
                        with open("/proc/sys/vm/drop_caches", "w") as c:
                            c.write("3")
                    self.put(name + ("_cold" if cold else ""), timed(f)[0])
        for _ in range(self.runs):
            self.put("dropin_save", timed(dcp.save, self.state, storage_writer=StorageWriter("disk:dropin"))[0])
            self.put("torch_save_again", timed(dcp.save, self.state, checkpoint_id=mixed)[0])


def ranks(n, size, runs, folder):
    global control
    store = tempfile.mktemp(prefix="dcpd-bench-store-")
    pids = []
    for rank in range(n):
        if rank + 1 < n:
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
        code = 1
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
            torch.set_num_threads(_copy.threads())
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
            control = dist.new_group()
            r = Ranks(rank, size, runs, folder)
            for part in (r.copies, r.ours, r.torch_first, r.torch_async, r.loads):
                part()
            dist.barrier()
            dcpd.close()
            code = 0
            if rank + 1 == n:
                break
        finally:
            if rank + 1 < n:
                os._exit(code)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0, "a rank failed"
    os.unlink(store)
    return r.out


def small(runs):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    plain = {f"layers.{i // 10}.w{i % 10}": torch.randn(16, 16) for i in range(10_000)}
    out = {"plain": [], "dtensor": [], "to_local": []}

    def go(sd, name):
        for k in range(runs + 2):
            start = time.perf_counter()
            h = dcpd.async_save(sd, f"disk:small-{name}", overwrite=True)
            t = time.perf_counter() - start
            h.result()
            if k > 1:  # both slots are warm
                out[name].append(t)

    go(plain, "plain")
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    cut = {k: DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for k, t in plain.items()}
    go(cut, "dtensor")
    for _ in range(runs):
        start = time.perf_counter()
        for t in cut.values():
            t.to_local()
        out["to_local"].append(time.perf_counter() - start)
    return out


def step(seconds, saves):
    """Steps of a small model on one thread; with a save always under way unless saves is none."""
    torch.set_num_threads(1)
    a, state = torch.randn(512, 512), {f"w{i}": torch.rand(32 << 20) for i in range(4)}
    out, h, n = [], None, 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if saves != "none" and (h is None or h.done()):
            h, n = dcpd.async_save(state, f"disk:step{n % 2}", overwrite=True), n + 1
        start = time.perf_counter()
        for _ in range(10):
            a = torch.tanh(a @ a)
        out.append(time.perf_counter() - start)
    if h is not None:
        h.result()
    return {"steps": out}


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "ranks":
        result = ranks(int(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    elif how == "small":
        result = small(int(rest[0]))
    else:
        result = step(float(rest[0]), rest[1])
    print(json.dumps(result), flush=True)
