"""Bench rows of the collectives: shm and TCP over loopback, beside Gloo through PyTorch in the same run.

Every rank ends with a private, writable copy, which is compared with what was sent; where the source may be mapped read-only, that is a
row of its own. Ours and Gloo's take turns. A row says, beside the time, the bytes moved over the bytes needed, and CPU seconds.
"""
import json
import statistics
import subprocess

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"1KiB": KIB, "1MiB": MIB, "64MiB": 64 * MIB}
OPS = ("all_gather", "broadcast", "gather", "redistribute")
# What DESIGN asks of 64 MiB over 4 ranks; elsewhere: not slower than Gloo. A broadcast over loopback is the kernel's work: dcpd takes
# 0.091 s of CPU for it, Gloo 0.093, so that 46 ms are the least for either on two CPUs.
GOALS = {("shm", "all_gather", "64MiB", 4): "<=0.25", ("shm", "broadcast", "64MiB", 4): "<=0.40",
         ("tcp", "all_gather", "64MiB", 4): "<=0.77", **{("tcp", "broadcast", "64MiB", ranks): "<=1.20" for ranks in (2, 4)}}


def ours(testbin, backend, op, ranks, size, runs, source="window"):
    r = subprocess.run([testbin / "bench/bench_comm", "--backend", backend, "--op", op, "--ranks", str(ranks), "--bytes", str(size),
                        "--runs", str(runs), "--source", source], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(r.stdout)


def rows(bench, testbin):
    for ranks in (2, 4):
        for op in OPS:
            for label, size in SIZES.items():
                row(bench, testbin, op, ranks, label, size)
    if bench.wants("comm.shm.broadcast.latency"):
        us = [ours(testbin, "shm", "broadcast", 4, KIB, 1000)["seconds"] * 1e6 for _ in range(3)]
        bench.row("comm.shm.broadcast.latency", "us", "<=1.00", "the limit of 50 us", us, [50.0] * 3,
                  "bench_comm --backend shm --op broadcast --ranks 4 --bytes 1024 --runs 1000")
    for label, size in SIZES.items():
        if bench.wants(f"comm.mapped.all_gather.4x{label}"):
            copied, mapped = [], []
            for _ in range(3):
                copied.append(ours(testbin, "shm", "all_gather", 4, size, 5)["seconds"] * 1e3)
                mapped.append(ours(testbin, "shm", "all_gather", 4, size, 5, "mapped")["seconds"] * 1e3)
            goal = "<=1.25" if size == KIB else "<=1.00"  # of 1 KiB the copy is nothing, and to map takes two system calls
            bench.row(f"comm.mapped.all_gather.4x{label}", "ms", goal, "the same, copied by every rank", mapped, copied,
                      f"bench_comm --backend shm --op all_gather --ranks 4 --bytes {size} --source mapped")


def row(bench, testbin, op, ranks, label, size):
    names = {b: f"comm.{b}.{op}.{ranks}x{label}" for b in ("shm", "tcp")}
    if not any(bench.wants(n) for n in names.values()):
        return
    turns, runs = 3, 1 if size > MIB else 100 if size == KIB else 20
    got, gloo = {"shm": [], "tcp": []}, []
    for _ in range(turns):
        for b in got:
            got[b].append(ours(testbin, b, op, ranks, size, runs))
        by_rank = bench.ranks().run(ranks, "comm_peer", "collective", seconds=300, op=op, size=size, runs=runs)
        gloo.append((statistics.median(max(r[i][0] for r in by_rank) for i in range(runs)),
                     sum(r[i][1] for r in by_rank for i in range(runs)) / runs))
    for b, name in names.items():
        if not bench.wants(name):
            continue
        bench.row(name, "ms", GOALS.get((b, op, label, ranks), "<=1.00"), "gloo", [g["seconds"] * 1e3 for g in got[b]],
                  [t * 1e3 for t, _ in gloo], f"bench_comm --backend {b} --op {op} --ranks {ranks} --bytes {size}",
                  moved_over_needed=got[b][0]["moved_bytes"] / max(1, got[b][0]["needed_bytes"]),
                  cpu_seconds={"ours": statistics.median(g["cpu_seconds"] for g in got[b]), "peer": statistics.median(c for _, c in gloo)})
