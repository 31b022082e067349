"""Bench rows of the catalogue at 100,000 checkpoints in 100 runs: the wait for a page in any order, and what it takes to know them all.

`catalogue.first_page.ORDER`: the first 100 of 100,000; `catalogue.runs`: all runs. `catalogue.rescan`: a new look-up worker looks at each
checkpoint, all in the page cache. `catalogue.preview`: what a retention policy would remove of all. `catalogue.memory`: the daemon's peak
after all that; beside it that of its look-up workers.
"""
import os
import pathlib
import shutil
import signal
import time

import dcpd as lib
import list_rows

COUNT, RUNS, TIMES = 100000, 100, 7
PAGES = {"time": "sort=-time", "size": "sort=-bytes", "filter": "filter=step%3E%3D500%20AND%20format%3Ddcp&sort=step",
         "run": "run=run-7&sort=-step"}


def make(root):
    """run-0/step-0 … run-99/step-999: links to one .metadata for each run."""
    source = lib.ROOT / "tests/fixtures/torch-2.15.0/sharded_rowwise/checkpoint/.metadata"
    for run in range(RUNS):
        for step in range(COUNT // RUNS):
            d = root / f"run-{run}" / f"step-{step}"
            d.mkdir(parents=True)
            if step:
                os.link(root / f"run-{run}" / "step-0/.metadata", d / ".metadata")
            else:
                shutil.copy(source, d)


def timed(d, query):
    start = time.monotonic()
    d.api.get(query).ok(200)
    return time.monotonic() - start


def previewed(d):
    start = time.monotonic()
    d.api.post("/v1/policies/p:preview", {"storage": "lists", "match": "run-*", "keep": {"last": 3}}).ok(200)
    return time.monotonic() - start


def peak_bytes(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def known(d):
    """Seconds until a worker that knows nothing can answer."""
    start = time.monotonic()
    while d.api.get("/v1/checkpoints?storage=lists&sort=-time&page_size=1").status != 200:
        pass
    return time.monotonic() - start


def rows(bench):
    names = ["catalogue.rescan", "catalogue.memory", "catalogue.runs", "catalogue.preview", *(f"catalogue.first_page.{n}" for n in PAGES)]
    if not any(bench.wants(n) for n in names):
        return
    root = bench.disk / "lists"
    make(root)
    time.sleep(3)  # what has just been written to is looked at anew each time
    d = lib.Daemon(bench.disk / "list-home", {"lists": root})
    try:
        known(d)
        scans = []
        for _ in range(3):
            for pid in d.workers():
                os.kill(pid, signal.SIGKILL)
            scans.append(known(d))
        bench.row("catalogue.rescan", "s", "<=1.00", "5,000 a second", scans, [COUNT / 5000],
                  f"{COUNT:,} checkpoints, a worker that knows none")
        for name, query in PAGES.items():
            path = f"/v1/checkpoints?storage=lists&page_size=100&{query}"
            ours = [timed(d, path) for _ in range(TIMES)]
            bench.row(f"catalogue.first_page.{name}", "s", "<=1.00", "20 ms", ours, [0.02], f"GET {path}")
        bench.row("catalogue.runs", "s", "<=1.00", "20 ms", [timed(d, "/v1/runs?storage=lists") for _ in range(TIMES)], [0.02],
                  "GET /v1/runs?storage=lists")
        bench.row("catalogue.preview", "s", "<=1.00", "1 s", [previewed(d) for _ in range(3)], [1.0], "dcpctl policy p … --preview")
        bench.row("catalogue.memory", "B", "<=1.00", "96 MiB", [peak_bytes(d.proc.pid)], [96.0 * (1 << 20)], "VmHWM of dcpd",
                  workers=[peak_bytes(pid) for pid in d.workers()])
    finally:
        d.discard()
        shutil.rmtree(root)
        shutil.rmtree(bench.disk / "list-home")
