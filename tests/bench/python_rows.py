"""Bench rows of the Python package: what a trainer waits for, beside memcpy, PyTorch's checkpointing and fio, in one run.

Four ranks with half of the bench's bytes each (512 MiB by default), one process with 10,000 small tensors, and training steps with a save
under way. The processes that are measured are tests/bench/python_peer.py.
"""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "api" / "python"
RUNS = 3
IMPORT = "import time; t = time.perf_counter(); import dcpd; print(time.perf_counter() - t)"


def environment(bench):
    return {**os.environ, "DCPD_URL": f"unix://{bench.daemon().socket}", "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}


def measure(bench, *args):
    r = subprocess.run([sys.executable, HERE / "python_peer.py", *map(str, args)], env=environment(bench), capture_output=True, text=True,
                       timeout=900)
    if r.returncode != 0:
        raise AssertionError(f"python_peer.py {args[0]}: {r.stderr[-600:]}")
    return json.loads(r.stdout.splitlines()[-1])


def rows(bench, size):
    """size: the bench's bytes."""
    ranks = ("py.stall.warm", "py.stall.torch_best", "py.stall.torch_default", "py.stall.first", "py.save.durable", "py.save.first",
             "py.load.warm", "py.load.cold", "py.dropin.save", "py.dropin.load")
    if any(bench.wants(n) for n in ranks):
        of_ranks(bench, 4, size // 2)
    if any(bench.wants(n) for n in ("py.small.plain", "py.small.dtensor")):
        of_small(bench)
    if bench.wants("py.step.unpaced"):
        of_steps(bench)
    if bench.wants("py.import"):
        got = [float(subprocess.run([sys.executable, "-c", IMPORT], env=environment(bench), capture_output=True, text=True,
                                    check=True).stdout) * 1e3 for _ in range(5)]
        bench.row("py.import", "ms", "<=1.00", "the limit of 50 ms", got, [50.0] * 5, "python -c 'import dcpd'")


def of_ranks(bench, n, size):
    bench.no_torch()
    bench.daemon()
    with tempfile.TemporaryDirectory(dir=bench.disk) as folder:
        m = measure(bench, "ranks", n, size, RUNS, folder)
    what = f"dcpd.async_save, {n} ranks x {size >> 20} MiB"
    best = min((k for k in m if k in ("torch_default", "torch_thread_cached", "torch_process_cached")),
               key=lambda k: statistics.median(m[k]))

    def row(name, ours, goal, peer_name, peer, command=what):
        if bench.wants(name):
            bench.row(name, "s", goal, peer_name, m[ours], m[peer], command)

    row("py.stall.warm", "stall", "<=1.15", "threaded memcpy, warm", "copy_warm")
    row("py.stall.first", "stall_first", "<=1.30", "copy into new pages", "copy_new")
    row("py.stall.torch_best", "stall", "<=0.77", f"async_save of {best}", best)
    row("py.stall.torch_default", "stall", "<=0.33", "torch's async_save", "torch_default")
    row("py.save.first", "durable_first", "<=0.50", "torch's save", "torch_save", "dcpd.save, the first")
    row("py.load.warm", "load", "<=0.50", "torch's load", "torch_load", "dcpd.load(into=)")
    row("py.dropin.save", "dropin_save", "<=1.00", "FileSystemWriter", "torch_save_again", "dcp.save(storage_writer=StorageWriter(…))")
    row("py.dropin.load", "dropin_load", "<=1.00", "FileSystemReader", "torch_load", "dcp.load(storage_reader=dcpd.torch.StorageReader)")
    for name, key, rw in (("py.save.durable", "durable", "write"), ("py.load.cold", "load_cold", "read")):
        if bench.wants(name):
            if rw == "read":
                bench.fio("write")
            fio = [bench.fio(rw) for _ in range(RUNS)]
            bench.row(name, "GB/s", ">=0.90", f"fio sequential {rw}", [n * size / t / 1e9 for t in m[key]], fio,
                      "dcpd.save, warm" if rw == "write" else "drop_caches; dcpd.load(into=)")


def of_small(bench):
    m = measure(bench, "small", 7)
    ms = {k: [t * 1e3 for t in v] for k, v in m.items()}
    if bench.wants("py.small.plain"):
        bench.row("py.small.plain", "ms", "<=1.00", "the limit of 60 ms", ms["plain"], [60.0] * 7, "async_save, 10,000 tensors of 1 KiB")
    if bench.wants("py.small.dtensor"):
        bench.row("py.small.dtensor", "ms", "<=1.00", "their to_local() + 60 ms", ms["dtensor"], [t + 60 for t in ms["to_local"]],
                  "dcpd.async_save, 10,000 DTensors")


def of_steps(bench):
    """Without a save and with one, taking turns."""
    got = {"none": [], "some": []}
    for _ in range(RUNS):
        for saves, into in got.items():
            into.append(statistics.mean(measure(bench, "step", 6, saves)["steps"]) * 1e3)
    bench.row("py.step.unpaced", "ms", "<=2.00", "steps without a save", got["some"], got["none"], "training steps while a save runs")
