"""The figures of a host with a GPU, each beside its peer on the same GPU: `make bench-gpu` (MIB=16384 RUNS=5 SECONDS=540), or the program
`bench` in the folder that `make gpu-folder` makes.

A row: {"name","ours","peer","peer_name","unit","ratio","goal","met","runs"}, medians unless the peer's name says otherwise. The bytes of
every row are compared: of saves what their last checkpoint gives back, of loads what they have filled. The size shrinks until it fits
into the memory, the disk and the time; rows for which no time is left are named. The last line of build/bench/gpu.jsonl (--out) is this
run, with the machine's description. Without a GPU nothing is measured, and that is said; `--device cpu` tries the script itself, and
records nothing.
"""
import argparse
import contextlib
import datetime
import json
import logging
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "api/python"), str(ROOT / "tests/gpu")]
sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import gpu_host  # noqa: E402

WRITES = 8          # checkpoints of the whole size that all rows write until they are durable
LEAST, MANY = 64, 10000
PROBE = 256 << 20


class Bench:
    def __init__(self, o, folder, client):
        import torch

        import dcpd

        self.torch, self.dcpd, self.o, self.folder, self.client = torch, dcpd, o, pathlib.Path(folder), client
        self.rows, self.lacking, self.n, self.gpu = [], [], 0, o.device != "cpu"
        self.end = time.monotonic() + o.seconds
        self.suffix = "_expandable" if o.expandable else ""

    def sync(self):
        if self.gpu:
            self.torch.cuda.synchronize()

    def timed(self, f):
        self.sync()
        start = time.perf_counter()
        out = f()
        self.sync()
        return time.perf_counter() - start, out

    def row(self, name, goal, peer_name, ours, peer):
        """ours, peer: lists of seconds."""
        a, b = statistics.median(ours), statistics.median(peer)
        one = {"name": name + self.suffix, "ours": a, "peer": b, "peer_name": peer_name, "unit": "s", "ratio": round(a / b, 3),
               "goal": f"<={round(goal, 3)}", "met": a / b <= goal, "runs": {"ours": ours, "peer": peer}}
        self.rows.append(one)
        print(f"{one['name']:<24} {a:9.4f} s   {peer_name:<50} {b:9.4f} s   {one['ratio']:6.3f}  {one['goal']:<8}"
              f"{'' if one['met'] else 'MISSED'}", flush=True)

    @contextlib.contextmanager
    def part(self, *names):
        """Rows that are measured together; a failure is told, and costs no others."""
        before = len(self.rows)
        try:
            yield
        except Exception as e:
            print(f"{', '.join(names)}: {type(e).__name__}: {e}", flush=True)
        have = {r["name"] for r in self.rows[before:]}
        self.lacking += [n + self.suffix for n in names if n + self.suffix not in have]

    def late(self):
        if time.monotonic() > self.end:
            raise TimeoutError("not measured: the time is up (--seconds)")

    # ------------------------------------------------------------------------------------------------------------ sizes

    def fit(self):
        """The state dict's bytes: as many as asked for, if memory, disk and time allow."""
        probe = {"t": self.torch.ones(PROBE // 4, device=self.o.device)}
        self.dcpd.save(probe, "main:probe")  # starts the workers
        seconds, _ = self.timed(lambda: self.dcpd.save(probe, "main:probe", overwrite=True))
        room = {"asked for": self.o.mib << 20, "/dev/shm": gpu_host.free(gpu_host.SHM) * 2 // 5, "memory": gpu_host.free_memory() // 6,
                "disk": gpu_host.free(self.folder) // 3, "time": int(PROBE / seconds * self.o.seconds / 2 / WRITES)}
        if self.gpu:
            room["GPU"] = self.torch.cuda.mem_get_info()[0] // 4
        why = min(room, key=room.get)
        self.mib = room[why] >> 20
        print(f"{self.mib} MiB: {why}", flush=True)
        if self.mib < min(LEAST, self.o.mib):
            sys.exit(f"bench-gpu: no room for {LEAST} MiB: {why}")
        self.bytes = self.mib << 20
        self.state = self.tensors(8, self.bytes)

    def tensors(self, n, size, dtype=None):
        make = {f"w{i}": self.torch.randn(size // n // 4, device=self.o.device) for i in range(n)}
        return make if dtype is None else {k: v.to(dtype) for k, v in make.items()}

    def same(self, got, wanted):
        """Bit for bit, on the device."""
        view = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}
        assert got.keys() == wanted.keys()
        for k, w in wanted.items():
            bits = view[w.element_size()]
            assert got[k].dtype == w.dtype and self.torch.equal(got[k].view(bits), w.view(bits)), f"{k} has come back with other bytes"

    # ------------------------------------------------------------------------------------------------------ instruments

    def pinned(self, to_device):
        """Copies of all bytes between the GPU and one page-locked buffer."""
        torch, out = self.torch, []
        host = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=self.gpu)
        there = torch.empty(self.bytes, dtype=torch.uint8, device=self.o.device)
        for _ in range(self.o.runs + 1):
            out.append(self.timed(lambda: there.copy_(host, non_blocking=True) if to_device else host.copy_(there, non_blocking=True))[0])
        return out[1:]

    def memory(self):
        """Copies of all bytes within the host's memory, by PyTorch's threads, as far as a part of it tells."""
        torch = self.torch
        size = min(self.bytes, 2 << 30)
        a, b = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        return [self.timed(lambda: a.copy_(b))[0] * self.bytes / size for _ in range(self.o.runs + 1)][1:]

    def stall(self, state):
        """How long async_save keeps the trainer: until the snapshot is whole, and all may be changed. The last checkpoint is compared;
        those before need not become durable."""
        out = []
        for i in range(self.o.runs + 2):  # both slots once
            self.n += 1
            seconds, h = self.timed(lambda: self.dcpd.async_save(state, f"main:s{self.n}"))
            assert h.snapshotted
            out.append(seconds)
            if i < self.o.runs + 1:
                h.cancel()
                h.exception(600)  # of a save that was cancelled
        h.result(600)
        into = {k: self.torch.zeros_like(v) for k, v in state.items()}
        self.dcpd.load(f"main:s{self.n}", into=into)
        self.same(into, state)
        self.dcpd.close()
        self.drop()
        return out[2:]

    def drop(self):
        """Room on the disk for what comes."""
        for p in self.folder.iterdir():
            if p.is_dir() and not p.name.startswith("."):
                shutil.rmtree(p, ignore_errors=True)

    def loads(self, saved, into, wanted, **more):
        """Loads from the page cache."""
        self.n += 1
        self.dcpd.save(saved, f"main:l{self.n}", cache="keep")
        out = []
        for _ in range(self.o.runs + 1):
            for v in into.values():
                v.zero_()
            out.append(self.timed(lambda: self.dcpd.load(f"main:l{self.n}", into=into, **more))[0])
            self.same(into, wanted)
        return out[1:]

    # ------------------------------------------------------------------------------------------------------------ peers

    def peer_stall(self):
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        out, stager = [], DefaultStager(StagingOptions(use_pinned_memory=self.gpu, use_async_staging=False, use_non_blocking_copy=self.gpu))
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as folder:  # all may be changed when it returns, as with ours
            for i in range(min(self.o.runs, 2) + 1):
                seconds, f = self.timed(lambda: dcp.async_save(self.state, storage_writer=dcp.FileSystemWriter(f"{folder}/{i}"),
                                                               async_stager=stager, async_checkpointer_type=AsyncCheckpointerType.PROCESS))
                getattr(f, "upload_completion", f).result()
                out.append(seconds)
                into = {k: self.torch.zeros_like(v) for k, v in self.state.items()} if i == 0 else None
                if into is not None:
                    dcp.load(into, checkpoint_id=f"{folder}/{i}")
                    self.same(into, self.state)
                shutil.rmtree(f"{folder}/{i}", ignore_errors=True)
        dist.destroy_process_group()
        return out[1:]

    def peer_loads(self):
        from safetensors.torch import load_file, save_file

        with tempfile.NamedTemporaryFile(dir=self.folder.parent, suffix=".safetensors") as file:
            save_file(self.state, file.name)
            out = []
            for _ in range(self.o.runs + 1):
                seconds, got = self.timed(lambda: load_file(file.name, device=self.o.device))
                self.same(got, self.state)
                out.append(seconds)
                del got
        return out[1:]

    # ------------------------------------------------------------------------------------------------------------- rows

    def all(self):
        stall, loads = [], []
        with self.part("gpu.snapshot", "gpu.stall"):
            stall, copies = self.stall(self.state), self.pinned(False)
            self.row("gpu.snapshot", 1 / 0.9, "the fastest copy to page-locked memory", stall, [min(copies)])
            self.row("gpu.stall", 1.05, "a copy to page-locked memory", stall, copies)
        with self.part("gpu.load"):
            self.late()
            loads = self.loads(self.state, {k: self.torch.zeros_like(v) for k, v in self.state.items()}, self.state)
            self.drop()
            link, memory = min(self.pinned(True)), min(self.memory())
            peer = "the link, page-locked" if link > memory else "the host's memory"
            self.row("gpu.load", 1 / 0.85, f"the slower of link and memory: {peer}", loads, [max(link, memory)])
        if self.o.expandable:
            return
        with self.part("gpu.load_safetensors"):
            self.late()
            self.row("gpu.load_safetensors", 0.5, "safetensors load_file", loads, self.peer_loads())
        with self.part("gpu.small_tensors"):
            self.late()
            n = self.bytes // 8 // MANY // 4
            many = {f"t{i}": self.torch.randn(n, device=self.o.device) for i in range(MANY)}
            self.row("gpu.small_tensors", 1.2, "one tensor of the same bytes", self.stall(many),
                     self.stall({"t": self.torch.randn(n * MANY, device=self.o.device)}))
            del many
        with self.part("gpu.load_cast"):
            self.late()
            self.row("gpu.load_cast", 1, "the same, cast by the host", *self.casts())
        with self.part("gpu.stall_dcp"):
            self.late()
            self.row("gpu.stall_dcp", 0.33, "dcp.async_save, pinned, process", stall, self.peer_stall())

    def casts(self):
        """bfloat16 into float32, cast on the device and on the host."""
        half = self.tensors(8, self.bytes // 2, self.torch.bfloat16)
        wanted = {k: v.float() for k, v in half.items()}
        into = {k: self.torch.zeros_like(v) for k, v in wanted.items()}
        ours = self.loads(half, into, wanted)
        self.client.casts = False
        try:
            return ours, self.loads(half, into, wanted)
        finally:
            self.client.casts = True
            self.drop()


def measured(o):
    """One allocator's rows, in this process."""
    import torch

    import dcpd

    warnings.filterwarnings("ignore", ".*every tensor is what")  # nothing trains here
    logging.getLogger("dcpd").addFilter(lambda x: "was cancelled" not in x.getMessage())
    if o.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench-gpu: there is a GPU, but PyTorch does not see it: is its build for CUDA, and for this driver?")
    with tempfile.TemporaryDirectory(prefix="dcpd-gpu-", dir=o.folder) as folder:
        os.mkdir(f"{folder}/checkpoints")
        with dcpd.local(f"{folder}/checkpoints") as client:
            b = Bench(o, f"{folder}/checkpoints", client)
            b.fit()
            b.all()
            copied = gpu_host.device_bytes(client)
            dcpd.close()
            if b.gpu and not copied:
                sys.exit("bench-gpu: dcpd has copied nothing from the GPU: what was measured is PyTorch's copy")
    pathlib.Path(o.rows).write_text(json.dumps({"mib": b.mib, "rows": b.rows, "lacking": b.lacking, "torch": torch.__version__,
                                                "cuda": torch.version.cuda}))


def machine(folder):
    import record

    out = record.machine(folder or tempfile.gettempdir())
    query = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    with contextlib.suppress(OSError):
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True)
        out["gpu"] = done.stdout.strip().splitlines()
    return out


def commit():
    note = ROOT / "COMMIT"
    if note.exists():
        return note.read_text().strip()
    return subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda")
    p.add_argument("--mib", type=int, default=16384)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--seconds", type=int, default=540, help="for all of it")
    p.add_argument("--folder", help="on the disk that is written to; default: the temporary folder")
    p.add_argument("--out", default=str(ROOT / "build/bench/gpu.jsonl"))
    p.add_argument("--expandable", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--rows", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.rows:
        measured(o)
        return
    if not gpu_host.tries("bench-gpu", "nothing was measured", o.device):
        return
    start, run, failed = time.monotonic(), {"rows": [], "lacking": []}, []
    with tempfile.TemporaryDirectory() as work:
        for name, share in (("default", 0.75), ("expandable", 1)):
            rows = pathlib.Path(work, name)
            left = int((o.seconds - (time.monotonic() - start)) * share)
            args = [sys.executable, __file__, "--rows", str(rows), "--device", o.device, "--mib", str(o.mib), "--runs", str(o.runs),
                    "--seconds", str(left), *(["--folder", o.folder] if o.folder else []), *["--expandable"] * (name == "expandable")]
            conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if name == "expandable" else {}
            failed += [name] * bool(subprocess.run(args, env={**os.environ, **conf}).returncode)
            if rows.exists():
                got = json.loads(rows.read_text())
                run.update({k: v for k, v in got.items() if k not in run})
                run["rows"] += got["rows"]
                run["lacking"] += got["lacking"]
    if o.device == "cuda" and run["rows"]:
        out = pathlib.Path(o.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        about = {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine(o.folder)}
        with out.open("a") as f:
            f.write(json.dumps({**about, **run}) + "\n")
        print(f"recorded in {out}")
    lacking = failed + run["lacking"]
    sys.exit(f"bench-gpu: not measured: {', '.join(lacking)}" if lacking else 0)


if __name__ == "__main__":
    main()
