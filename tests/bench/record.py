"""Recorded runs of the bench, and what became slower since.

recorded.jsonl has a line per run: {"date","commit","machine":{…},"mib","rows":{name:{"ours","peer","unit","ratio","goal","spread"}}}.
Runs are compared if machine and size are equal, by their ratios: a peer in the same run takes the machine's mood out.
"""
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess

RECORDED = pathlib.Path(__file__).with_name("recorded.jsonl")
SLACK = 0.10  # a ratio within so much of the recorded one is the same


def machine(disk):
    """disk: a directory on the disk that is measured."""
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    kib = int(re.search(r"MemTotal:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text()).group(1))
    fs = subprocess.run(["stat", "-f", "-c", "%T", disk], capture_output=True, text=True).stdout.strip()
    return {"cpu": cpu.group(1).strip() if cpu else platform.machine(), "cpus": os.cpu_count(), "memory_gib": round(kib / (1 << 20)),
            "kernel": platform.release().split("-")[0], "disk": fs}


def half_range(v):
    m = statistics.median(v)
    return (max(v) - min(v)) / 2 / m if len(v) > 1 and m else 0.0


def digest(rows):
    """A run's rows as they are recorded."""
    return {r["name"]: {"ours": round(r["ours"], 4), "peer": round(r["peer"], 4), "unit": r["unit"], "ratio": r["ratio"], "goal": r["goal"],
                        "spread": round(half_range(r["runs"]["ours"]) + half_range(r["runs"]["peer"]), 3)} for r in rows}


def runs():
    return [json.loads(line) for line in RECORDED.read_text().splitlines()] if RECORDED.exists() else []


def last(of_machine, mib):
    """Each row as it was recorded last on such a machine, of that size: runs may have some of the rows. {} if there is none."""
    rows = {}
    for r in runs():
        if r["machine"] == of_machine and r["mib"] == mib:
            rows.update({name: dict(row, date=r["date"], commit=r["commit"]) for name, row in r["rows"].items()})
    return rows


def slower(now, then):
    """Rows of now (digest) whose ratio is worse than then's by more than SLACK and both spreads: (name, then, now, factor), worst first."""
    found = []
    for name, r in now.items():
        old = then.get(name)
        if not old or not r["ratio"] or not old["ratio"]:
            continue
        factor = r["ratio"] / old["ratio"] if r["goal"].startswith("<=") else old["ratio"] / r["ratio"]
        if factor > 1 + SLACK + r["spread"] + old["spread"]:
            found.append((name, old["ratio"], r["ratio"], factor))
    return sorted(found, key=lambda x: -x[3])


def add(rows, of_machine, mib, root):
    git = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    line = {"date": datetime.date.today().isoformat(), "commit": git.stdout.strip(), "machine": of_machine, "mib": mib}
    line["rows"] = digest(rows)
    with open(RECORDED, "a") as f:
        f.write(json.dumps(line, separators=(",", ":")) + "\n")
