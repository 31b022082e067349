#!/usr/bin/env python3
"""make bench: how fast dcpd is, beside PyTorch and beside the limit that the machine sets, both in one run.

    run.py [--quick] [--record] [WORD...]      rows whose name holds a WORD; all without
    run.py --scale                             growth with ranks, chunks, tensors, checkpoints and jobs (scale_rows.py)

Prints a table; build/bench/results.jsonl has a line per row: {"name","ours","peer","peer_name","unit","ratio","goal","met","command",
"runs","took"}. ratio = ours / peer. Medians; `runs` has the single figures of both sides, so the spread can be seen; `took`: seconds
since the row before. Ours and the peer take turns, because a disk's speed drifts; memory is touched once before a clock starts, because
new pages cost more than the work itself. Then come the rows that became slower than when they were recorded last on such a machine
(record.py); --record adds this run. Exit status 1: a part was not measured, or a recorded row is missing.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback

from measure import MIB, RANKS, SIZE, TESTBIN, Bench, drop_caches, lib  # first: makes tests/lib known

import c_rows
import cluster_rows
import comm_rows
import dropin_rows
import format_rows
import incremental_rows
import job_rows
import catalogue_rows
import list_rows
import look_rows
import pace_rows
import page_rows
import plan_rows
import python_rows
import record
import s3_rows
import scale_rows
import server_rows
import torch_save_rows

OUT = lib.ROOT / "build/bench"
QUICK = ("save.disk", "save.tmpfs", "load.warm", "reshard.", "py.stall.warm", "drop.few.save")


def python(b):
    python_rows.rows(b, SIZE)
    pace_rows.rows(b, SIZE // 2)
    b.no_torch()


PARTS = {
    "collectives": lambda b: comm_rows.rows(b, TESTBIN),
    "cluster": cluster_rows.rows,
    "plans": plan_rows.rows,
    "start": server_rows.start,
    "lists": list_rows.rows,
    "catalogue": catalogue_rows.rows,
    "look": lambda b: look_rows.rows(b, SIZE, drop_caches),
    "ends": job_rows.ends,
    "saves_tmpfs": job_rows.saves_tmpfs,
    "reshards": job_rows.reshards,
    "copies": job_rows.copies,
    "rest": server_rows.rest,
    "page": page_rows.rows,
    "saves": job_rows.saves,
    "incremental": incremental_rows.rows,
    "loads": job_rows.loads,
    "verifies": job_rows.verifies,
    "python": python,
    "dropin": lambda b: dropin_rows.rows(b, SIZE // 2),
    "c": lambda b: c_rows.rows(b, SIZE),
    "formats": lambda b: format_rows.rows(b, SIZE, drop_caches),
    "s3": s3_rows.rows,
    "torch_save": lambda b: torch_save_rows.rows(b, SIZE // 2),
}
SCALE = {"scale": scale_rows.rows}


def measure(b, parts):
    """Names of the parts that were not measured. Says what each part took: all together are to take 15 minutes at most."""
    print(f"{SIZE // MIB} MiB over {RANKS} ranks, {os.cpu_count()} CPUs\n")
    print(f"{'row':32} {'dcpd':>10} {'peer':>10} {'unit':5} {'ratio':>7} {'goal':8} {'':7} {'±dcpd':>5} {'±peer':>5}  peer",
          flush=True)
    failed, took = [], {}
    for name, part in parts.items():
        start = time.monotonic()
        try:
            part(b)
        except (AssertionError, OSError, subprocess.SubprocessError) as e:
            failed.append(name)
            print(f"{name}: not measured: {str(e)[:600] or traceback.format_exc()[-600:]}", flush=True)
        took[name] = time.monotonic() - start
    longest = sorted(((s, name) for name, s in took.items() if s >= 1), reverse=True)
    print(f"\n{sum(took.values()):.0f} s: " + ", ".join(f"{name} {s:.0f}" for s, name in longest))
    return failed


def compare(b, machine):
    """Says what became slower; names of the recorded rows that are missing."""
    then = record.last(machine, SIZE // MIB)
    if not then:
        print("no recorded run of such a machine and size")
        return []
    now = record.digest(b.rows)
    slower = record.slower(now, then)
    print(f"beside what was recorded last: {len(slower)} rows slower")
    for name, old, new, factor in slower:
        print(f"  {name:32} ratio {old:.2f} at {then[name]['commit']} of {then[name]['date']}, {new:.2f} now: {factor:.2f} times worse")
    return sorted(n for n in then if n not in now and b.asks(n))


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("words", nargs="*")
    ap.add_argument("--quick", action="store_true", help="a few rows, in two minutes")
    ap.add_argument("--scale", action="store_true", help="growth with size instead of speed")
    ap.add_argument("--record", action="store_true", help="add this run to recorded.jsonl")
    a = ap.parse_args()
    b = Bench(a.words or (QUICK if a.quick else ()))
    OUT.mkdir(parents=True, exist_ok=True)
    machine, failed = record.machine(b.disk), []
    try:
        failed = measure(b, SCALE if a.scale else PARTS)
    finally:
        b.end()
        with open(OUT / ("scale.jsonl" if a.scale else "results.jsonl"), "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in b.rows)
    missed = [r["name"] for r in b.rows if not r["met"]]
    print(f"\n{len(b.rows)} rows, {len(missed)} goals missed{': ' + ', '.join(missed) if missed else ''}; {pathlib.Path(f.name)}")
    missing = [] if a.scale else compare(b, machine)
    if failed or missing:
        print(f"NOT MEASURED: {', '.join(failed + missing)}")
    elif a.record:
        record.add(b.rows, machine, SIZE // MIB, lib.ROOT)
    sys.exit(1 if failed or missing else 0)


if __name__ == "__main__":
    main()
