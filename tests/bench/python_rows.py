"""Bench rows of the Python package: what a trainer waits for, beside memcpy, PyTorch's checkpointing and fio, in one run.

Four ranks with half of the bench's bytes each (512 MiB by default), a quarter each for loads, and one process with 10,000 small tensors.
The processes that are measured are tests/bench/python_peer.py. Each form of PyTorch's saves runs for itself: one that fails takes its own
row only. The rows of the drop-in are in dropin_rows.py.

A stall of next to no bytes takes 7 ms: requests of four ranks on two CPUs, two rounds of theirs, and a job that is made; 4 of them are CPU
time. With overlap nothing else is left. Of one of 148 ms beside a copy of 132 the rest is the copy itself: four processes that begin one
after the other, into memory that workers had before, take 5 to 10 % more CPU time for the same bytes. So 1.15 is the limit.
"""
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "api" / "python"
RUNS, RIVAL_RUNS = 3, 2
IMPORT = "import time; t = time.perf_counter(); import dcpd; print(time.perf_counter() - t)"
RIVALS = ("default", "thread_cached", "process_cached")
SAVES = ("py.stall.warm", "py.stall.overlap", "py.stall.first", "py.save.durable", "py.save.first")
LOADS = ("py.load.warm", "py.load.cold", "py.load.after_save", "py.load.after_keep")


def environment(bench):
    return {**os.environ, "DCPD_URL": f"unix://{bench.daemon().socket}", "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}


def measure(bench, *args):
    """What python_peer.py prints. The last line of its stderr is the reason if it fails."""
    with tempfile.TemporaryFile("w+") as err:
        p = subprocess.Popen([sys.executable, HERE / "python_peer.py", *map(str, args)], env=environment(bench), stdout=subprocess.PIPE,
                             stderr=err, text=True, start_new_session=True)
        try:
            out = p.communicate(timeout=300)[0]
        finally:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
        err.seek(0)
        lines = [x for x in err.read().splitlines() if x.strip()]
    if p.returncode != 0:
        raise AssertionError(f"python_peer.py {args[0]}: {lines[-1] if lines else p.returncode}")
    return json.loads(out.splitlines()[-1])


class Part:
    """The figures of one part; a part that fails has none, and says so for each row that wants them."""

    def __init__(self, bench, size, part):
        bench.no_torch()
        bench.daemon()
        self.bench, self.figures, self.why = bench, {}, ""
        try:
            with tempfile.TemporaryDirectory(dir=bench.disk) as folder:
                self.figures = measure(bench, part, 4, size, RIVAL_RUNS if part in RIVALS else RUNS, folder)
        except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as e:
            self.why = str(e)[:400]

    def __getitem__(self, key):
        return self.figures.get(key)


def row(bench, name, unit, goal, peer_name, ours, peer, command, why, **more):
    """A row, or why there is none; true if it was measured."""
    if not bench.wants(name):
        return True
    if ours and peer:
        bench.row(name, unit, goal, peer_name, ours, peer, command, **more)
        return True
    print(f"{name}: not measured: {why or 'no figures'}", flush=True)
    return False


def rows(bench, size):
    """size: the bench's bytes."""
    wanted = [bench.wants(n) for n in (*SAVES, *LOADS, "py.stall.torch_best", "py.stall.torch_default")]
    done = []
    rivals = any(wanted[len(SAVES) + len(LOADS):])
    if any(wanted[:len(SAVES)]) or rivals:
        done += of_saves(bench, size // 2, rivals)
    if any(wanted[len(SAVES):len(SAVES) + len(LOADS)]):
        done += of_loads(bench, size // 4)
    if any(bench.wants(n) for n in ("py.small.plain", "py.small.dtensor")):
        of_small(bench)
    if bench.wants("py.import"):
        got = [float(subprocess.run([sys.executable, "-c", IMPORT], env=environment(bench), capture_output=True, text=True,
                                    check=True).stdout) * 1e3 for _ in range(5)]
        bench.row("py.import", "ms", "<=1.00", "the limit of 50 ms", got, [50.0] * 5, "python -c 'import dcpd'")
    if not all(done):
        raise AssertionError("rows of the package are missing")


def of_saves(bench, size, with_rivals):
    """Rivals that cannot be measured lose their own row only; so does the best of them, as long as there is one."""
    m = Part(bench, size, "saves")
    what = f"dcpd.async_save, 4 ranks x {size >> 20} MiB"
    done = [row(bench, "py.stall.warm", "s", "<=1.15", "threaded memcpy, warm", m["stall"], m["copy"], what, m.why),
            row(bench, "py.stall.overlap", "s", "<=0.10", "threaded memcpy, warm", m["overlap"], m["copy"],
                "the same, overlap=True, beside a step of 2 x memcpy in which the CPUs rest", m.why),
            row(bench, "py.stall.first", "s", "<=1.30", "copy into new pages", m["stall_first"], m["copy_first"], what, m.why),
            row(bench, "py.save.first", "s", "<=0.50", "torch's save", m["save_first"], m["torch_save"], "dcpd.save, the first", m.why)]
    if bench.wants("py.save.durable") and m["save"]:
        fio = [bench.fio("write") for _ in range(RUNS)]
        done.append(row(bench, "py.save.durable", "GB/s", ">=0.90", "fio sequential write", [4 * size / t / 1e9 for t in m["save"]], fio,
                        "dcpd.save, warm", m.why))
    if not with_rivals:
        return done
    rivals = {k: Part(bench, size, k) for k in RIVALS}
    for k, r in rivals.items():
        if r.why:
            print(f"torch's async_save, {k}: not measured: {r.why}", flush=True)
    best = min((k for k in RIVALS if rivals[k]["stall"]), key=lambda k: statistics.median(rivals[k]["stall"]), default=RIVALS[0])
    # Its cached stager copies once into warm memory, as async_save does, and asks nobody: 1.06 of memcpy, where 1.15 is the limit of ours.
    row(bench, "py.stall.torch_best", "s", "<=1.10", f"torch's async_save, {best}", m["stall"], rivals[best]["stall"], what,
        m.why or rivals[best].why)
    row(bench, "py.stall.torch_default", "s", "<=0.33", "torch's async_save", m["stall"], rivals["default"]["stall"], what,
        m.why or rivals["default"].why)
    return done


def of_loads(bench, size):
    m = Part(bench, size, "loads")
    done = [row(bench, "py.load.warm", "s", "<=0.50", "torch's load", m["load"], m["torch_load"], "dcpd.load(into=)", m.why),
            row(bench, "py.load.after_save", "s", "<=0.30", "torch's load after its save", m["after_save"], m["torch_after_save"],
                "async_save; dcpd.load(into=)", m.why),
            row(bench, "py.load.after_keep", "s", "<=0.30", "torch's load after its save", m["after_keep"], m["torch_after_save"],
                "save(cache='keep'); dcpd.load(into=)", m.why)]
    if bench.wants("py.load.cold"):
        fio = []
        if m["load_cold"]:
            bench.fio("write")
            fio = [bench.fio("read") for _ in range(RUNS)]
        done.append(row(bench, "py.load.cold", "GB/s", ">=0.90", "fio sequential read", [4 * size / t / 1e9 for t in m["load_cold"] or ()],
                        fio, "drop_caches; dcpd.load(into=)", m.why, torch=statistics.median(m["torch_load_cold"] or [0])))
    return done


def of_small(bench):
    m = measure(bench, "small", 7)
    ms = {k: [t * 1e3 for t in v] for k, v in m.items()}
    if bench.wants("py.small.plain"):
        bench.row("py.small.plain", "ms", "<=1.00", "the limit of 60 ms", ms["plain"], [60.0] * 7, "async_save, 10,000 tensors of 1 KiB",
                  cpu_ms=min(ms["plain_cpu"]))
    if bench.wants("py.small.dtensor"):
        bench.row("py.small.dtensor", "ms", "<=1.00", "their to_local() + 60 ms", ms["dtensor"], [t + 60 for t in ms["to_local"]],
                  "dcpd.async_save, 10,000 DTensors", cpu_ms=min(ms["dtensor_cpu"]))
