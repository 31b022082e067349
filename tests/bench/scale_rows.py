"""Bench rows of growth: the same work at three sizes, and the exponent of its time between the smallest and the largest; 1 is linear.

A row's `sizes` and `seconds` (or `bytes`) are what the exponent was made of. Ranks, chunks and tensors are planned by bench programs;
checkpoints are listed, and jobs are kept, by a daemon. `scale.gang` is the reverse: the same bytes by more ranks and as many workers, all
of them on this machine, so that what they contend for shows; 0 is no growth.
"""
import json
import math
import os
import pathlib
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import time

import dcpd as lib
import list_rows
from measure import TESTBIN, tool

PLANS = (("ranks", [(100, 4096), (100, 16384), (100, 65536)]),
         ("tensors", [(100000, 1), (300000, 1), (1000000, 1)]))
CHUNKS = (1000000, 3000000, 10000000)
CHECKPOINTS = (10000, 30000, 100000)
JOBS = (10000, 100000, 1000000)
GANGS, GANG_MIB = (4, 16, 64), 512
RUNS = 3


def exponent(sizes, figures):
    """The slope of log(figure) over log(size), by least squares."""
    x, y = [math.log(s) for s in sizes], [math.log(max(f, 1e-6)) for f in figures]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def row(b, name, sizes, figures, what, command, goal="<=1.15"):
    if b.wants(name):
        points = ", ".join(f"{n:,}: {f:.3g}" for n, f in zip(sizes, figures))
        b.row(name, what, goal, f"linear: {points}", [exponent(sizes, figures)], [1.0], command, sizes=list(sizes), figures=list(figures))


def best(got, key):
    return [min(g[key] for g in of) for of in got]


def plans(b):
    for name, args in PLANS:
        got = [[tool("bench_plan", *a) for _ in range(RUNS)] for a in args]
        sizes = [of[0]["chunks"] for of in got]
        for part in ("save_plan_s", "validate_s", "load_plan_s", "peak_rss_bytes"):
            row(b, f"scale.{name}.{part}", sizes, best(got, part), "B" if "bytes" in part else "s", "bench_plan {} {}".format(*args[-1]))
    got = [[tool("plan_million", n) for _ in range(RUNS if n < CHUNKS[-1] else 1)] for n in CHUNKS]
    for part in ("plan_s", "validate_s", "write_s", "parse_s"):
        row(b, f"scale.chunks.{part}", CHUNKS, best(got, part), "s", f"plan_million {CHUNKS[-1]}")
    row(b, "scale.chunks.bytes", CHUNKS, [n * f for n, f in zip(CHUNKS, best(got, "bytes_per_chunk"))], "B", f"plan_million {CHUNKS[-1]}")


def peak_bytes(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def checkpoints(b):
    seconds, memory = [], []
    for count in CHECKPOINTS:
        root = b.disk / "lists"
        list_rows.make(root, count)
        d = lib.Daemon(b.disk / "list-home", {"lists": root})
        try:
            list_rows.read_all(d, count)
            seconds.append(min(list_rows.read_all(d, count) for _ in range(RUNS)))
            memory.append(peak_bytes(d.proc.pid))
        finally:
            d.discard()
            shutil.rmtree(root)
            shutil.rmtree(b.disk / "list-home")
    row(b, "scale.checkpoints.list", CHECKPOINTS, seconds, "s", "GET /v1/checkpoints/lists, all pages")
    row(b, "scale.checkpoints.memory", CHECKPOINTS, memory, "B", "VmHWM of dcpd")


def jobs(b):
    """The start, a page of jobs and a new job beside a journal of so many jobs."""
    starts, pages, news, memory = [], [], [], []
    for count in JOBS:
        home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-"))
        d = lib.Daemon(home, args=["--keep-jobs", f"{2 * JOBS[-1]}/3650d"])
        try:
            shutil.copytree(lib.ROOT / "tests/fixtures/torch-2.15.0/plain/checkpoint", home / "main/x")
            verify = {"source": {"storage": "main", "name": "x"}, "level": "structure"}
            d.api.run("verify", **verify)
            d.stop()
            multiply(d.state, count)
            starts.append(min(started(d) for _ in range(RUNS)))
            d.start()
            assert len(timed(pages, lambda: d.api.get("/v1/jobs?page_size=100").ok(200)["jobs"])) == 100
            timed(news, lambda: d.api.run("verify", **verify))
            memory.append(peak_bytes(d.proc.pid))
        finally:
            d.discard()
            shutil.rmtree(home)
    for name, figures in (("start", starts), ("page", pages), ("new", news), ("memory", memory)):
        row(b, f"scale.jobs.{name}", JOBS, figures, "B" if name == "memory" else "s", "a journal of so many jobs")


def gangs(b):
    """Saves on tmpfs and looks at every byte again: tasks, counters and the commit are shared by all workers, and no disk hides them."""
    walls, checks, cpus = [], [], []
    for count in GANGS:
        home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-"))
        d = lib.Daemon(home, {"t": b.tmpfs / "gang"}, args=["--workers", str(count)])
        try:
            env = {**os.environ, "DCPD_URL": f"unix://{d.socket}"}
            subprocess.run([TESTBIN / "tools/fill", "gang", str(count), "4", str(GANG_MIB // 4)], env=env, check=True,
                           stdout=subprocess.DEVNULL)
            ref, save, check, cpu = {"storage": "t", "name": "x"}, [], [], []
            for _ in range(RUNS + 1):
                before = cpu_seconds(d)
                timed(save, lambda: d.api.run("save", seconds=300, source={"state_dict": "gang"}, target=ref))
                timed(check, lambda: d.api.run("verify", seconds=300, source=ref, level="digest"))
                cpu.append(cpu_seconds(d) - before)
                d.api.run("delete", target=ref)
            for into, figures in ((walls, save), (checks, check), (cpus, cpu)):
                into.append(min(figures[1:]))  # the first starts the workers
        finally:
            d.discard()
            shutil.rmtree(home)
    for name, figures in (("save", walls), ("verify", checks), ("cpu", cpus)):
        row(b, f"scale.gang.{name}", GANGS, figures, "s", f"{GANG_MIB} MiB, as many ranks and workers", "<=0.25")


def cpu_seconds(d):
    """Of the daemon and its workers."""
    pids = [d.proc.pid] + [w["pid"] for w in d.api.get("/v1/workers").ok(200)["workers"]]
    fields = [pathlib.Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def timed(into, fn):
    start = time.monotonic()
    out = fn()
    into.append(time.monotonic() - start)
    return out


def started(d):
    start = time.monotonic()
    d.start()
    seconds = time.monotonic() - start
    d.stop()
    return seconds


def multiply(state, count):
    """The journal's one job, `count` times under ids of their own."""
    db = sqlite3.connect(next(state.glob("*.db")))
    one = db.execute("SELECT * FROM jobs").fetchone()
    columns = [c[1] for c in db.execute("PRAGMA table_info(jobs)")]
    old = dict(zip(columns, one))

    def copies():
        for i in range(count - 1):
            new = old["id"][:10] + f"{i:016d}"
            doc = json.loads(old["doc"])
            doc["id"] = new
            yield tuple({**old, "id": new, "doc": json.dumps(doc)}[c] for c in columns)

    db.executemany(f"INSERT INTO jobs VALUES({','.join('?' * len(columns))})", copies())
    db.commit()
    db.close()


def rows(b):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for name, part in (("scale.ranks", plans), ("scale.checkpoints", checkpoints), ("scale.jobs", jobs), ("scale.gang", gangs)):
        if b.wants(name) or not b.words:
            part(b)
