"""The figures of a host with a GPU, each beside its peer on the same GPU: `make bench-gpu` (MIB=16384, RUNS=5).

A row: {"name","ours","peer","peer_name","unit","ratio","goal","met","runs"}, medians; the last line of build/bench/gpu.jsonl is this
run, with the machine's description. Without a GPU nothing is measured, and that is said. `--device cpu` tries the script itself, and
records nothing.
"""
import argparse
import ctypes
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "api/python"))
sys.path.append(str(pathlib.Path(__file__).resolve().parent))


def why_not():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 was not found: no NVIDIA driver is installed here"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch sees no GPU: `dcpctl doctor` says what is missing"


class Bench:
    def __init__(self, o):
        import torch

        import dcpd

        self.torch, self.dcpd, self.o, self.rows, self.n = torch, dcpd, o, [], 0
        self.bytes = o.mib << 20
        self.state = {f"w{i}": torch.randn(self.bytes // 8 // 4, device=o.device) for i in range(8)}

    def sync(self):
        if self.o.device != "cpu":
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
        ratio = round(a / b, 3)
        one = {"name": name, "ours": a, "peer": b, "peer_name": peer_name, "unit": "s", "ratio": ratio, "goal": f"<={goal}",
               "met": ratio <= goal, "runs": {"ours": ours, "peer": peer}}
        self.rows.append(one)
        print(f"{name:<24} {a:9.4f} s   {peer_name:<36} {b:9.4f} s   {ratio:6.2f}  {one['goal']}  {'' if one['met'] else 'MISSED'}")

    def pinned(self, to_device):
        """A copy of all bytes between the GPU and one page-locked buffer."""
        torch, out = self.torch, []
        host = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=self.o.device != "cpu")
        there = torch.empty(self.bytes, dtype=torch.uint8, device=self.o.device)
        for _ in range(self.o.runs + 1):
            out.append(self.timed(lambda: there.copy_(host, non_blocking=True) if to_device else host.copy_(there, non_blocking=True))[0])
        return out[1:]

    def stall(self, state):
        """How long async_save keeps the trainer: until all may be changed."""
        out = []
        for _ in range(self.o.runs + 2):  # both slots once
            self.n += 1
            seconds, h = self.timed(lambda: self.dcpd.async_save(state, self.folder / f"s{self.n}", overwrite=True))
            assert h.snapshotted
            h.result(600)
            out.append(seconds)
        return out[2:]

    def peer_stall(self):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        gpu = self.o.device != "cpu"  # all may be changed when it returns, as with ours
        out, stager = [], DefaultStager(StagingOptions(use_pinned_memory=gpu, use_async_staging=False, use_non_blocking_copy=gpu))
        for i in range(self.o.runs + 1):
            seconds, f = self.timed(lambda: dcp.async_save(self.state, storage_writer=dcp.FileSystemWriter(self.folder / f"p{i}"),
                                                           async_stager=stager, async_checkpointer_type=AsyncCheckpointerType.PROCESS))
            getattr(f, "upload_completion", f).result()
            out.append(seconds)
        return out[1:]

    def loads(self):
        into = {k: self.torch.empty_like(v) for k, v in self.state.items()}
        self.dcpd.save(self.state, self.folder / "load", cache="keep")
        return [self.timed(lambda: self.dcpd.load(self.folder / "load", into=into))[0] for _ in range(self.o.runs + 1)][1:]

    def peer_loads(self):
        from safetensors.torch import load_file, save_file

        save_file(self.state, self.folder / "peer.safetensors")
        file = self.folder / "peer.safetensors"
        return [self.timed(lambda: load_file(file, device=self.o.device))[0] for _ in range(self.o.runs + 1)][1:]

    def all(self, folder):
        self.folder = pathlib.Path(folder)
        stall, small = self.stall(self.state), 10000
        self.row("gpu.stall", 1.05, "a copy to page-locked memory", stall, self.pinned(False))
        self.process_group()
        self.row("gpu.stall_dcp", 0.33, "dcp.async_save, pinned, process", stall, self.peer_stall())
        loads = self.loads()
        self.row("gpu.load", 1 / 0.85, "a copy from page-locked memory", loads, self.pinned(True))
        self.row("gpu.load_safetensors", 0.5, "safetensors load_file", loads, self.peer_loads())
        n = self.bytes // 8 // small // 4
        many = {f"t{i}": self.torch.randn(n, device=self.o.device) for i in range(small)}
        self.row("gpu.small_tensors", 1.2, "one tensor of the same bytes", self.stall(many),
                 self.stall({"t": self.torch.randn(n * small, device=self.o.device)}))

    def process_group(self):
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def record(self):
        import record

        machine = record.machine(self.folder)
        machine["gpu"] = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
                                         "--format=csv,noheader"], capture_output=True, text=True).stdout.strip().splitlines()
        out = ROOT / "build/bench/gpu.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as f:
            run = {"date": datetime.date.today().isoformat(), "machine": machine, "mib": self.o.mib, "rows": self.rows}
            f.write(json.dumps(run) + "\n")
        print(f"recorded in {out}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda")
    p.add_argument("--mib", type=int, default=16384)
    p.add_argument("--runs", type=int, default=5)
    o = p.parse_args()
    reason = why_not() if o.device == "cuda" else ""
    if reason:
        print(f"bench-gpu: skipped, nothing was measured: {reason}")
        return
    b = Bench(o)
    with tempfile.TemporaryDirectory(prefix="dcpd-gpu-") as folder:
        b.all(folder)
        b.dcpd.close()
        if o.device == "cuda":
            b.record()


if __name__ == "__main__":
    main()
