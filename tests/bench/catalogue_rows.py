"""Bench rows of the catalogue at 100,000 checkpoints in 100 runs: the wait for a page in any order, and what it takes to know them all.

`catalogue.first_page.ORDER`: the first 100 of 100,000, each time behind a change of one; `catalogue.again.ORDER`: without one, as of a
page that is looked at again; `catalogue.page.time`: a hundred deep inside. `catalogue.runs`: all runs. `catalogue.rescan`: a new look-up
worker looks at each checkpoint, all in the page cache, without the file of what was known; `catalogue.restart`: the first page of a new
daemon with it. `catalogue.preview`: what a retention policy would remove of all. `catalogue.memory`: the daemon's peak after all that;
beside it that of its look-up workers. `catalogue.save.beside.removal`: a save while dcpd removes a checkpoint of BESIDE_GIB, whose files
have blocks, but were not written to; the peer are the same saves before and after. `load`: the machine's load average then.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import time
import urllib.parse

from measure import MIB, RANKS, TESTBIN, lib

COUNT, RUNS, TIMES = 100000, 100, 7
BESIDE_GIB, SAVE_MIB, ROUNDS = 12, 256, 2
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
    """Seconds until a worker can answer."""
    start = time.monotonic()
    while d.api.get("/v1/checkpoints?storage=lists&sort=-time&page_size=1").status != 200:
        pass
    return time.monotonic() - start


def rescan(d):
    """The same, of a worker that knows nothing."""
    for pid in d.workers():
        os.kill(pid, signal.SIGKILL)
    (d.state / "catalogue.lists.cache").unlink()
    return known(d)


def restart(d):
    d.kill()
    d.start()
    return timed(d, f"/v1/checkpoints?storage=lists&page_size=100&{PAGES['time']}")


def changed(root, i):
    d = root / "run-0" / f"new-{i}"
    d.mkdir()
    os.link(root / "run-0/step-0/.metadata", d / ".metadata")


def pages(bench, d, root):
    for name, query in PAGES.items():
        path = f"/v1/checkpoints?storage=lists&page_size=100&{query}"
        ours = []
        for i in range(TIMES):
            changed(root, f"{name}-{i}")
            ours.append(timed(d, path))
        bench.row(f"catalogue.first_page.{name}", "s", "<=1.00", "20 ms", ours, [0.02], f"GET {path}", load=os.getloadavg())
        again = [timed(d, path) for _ in range(TIMES)]
        bench.row(f"catalogue.again.{name}", "s", "<=1.00", "20 ms", again, [0.02], f"GET {path}", load=os.getloadavg())
    path = f"/v1/checkpoints?storage=lists&page_size=1000&{PAGES['time']}"
    ours, token = [], ""
    for i in range(50 + TIMES):
        start = time.monotonic()
        token = d.api.get(f"{path}&page_token={urllib.parse.quote(token)}").ok(200)["next_page_token"]
        path = path.replace("page_size=1000", "page_size=100") if i == 49 else path
        ours += [time.monotonic() - start] if i >= 50 else []
    bench.row("catalogue.page.time", "s", "<=1.00", "20 ms", ours, [0.02], f"GET {path}&page_token=…", load=os.getloadavg())


def large(root, name):
    """A checkpoint of BESIDE_GIB in files of 1 GiB."""
    d = root / name
    d.mkdir(parents=True)
    for i in range(BESIDE_GIB):
        with (d / f"__{i}_0.distcp").open("wb") as f:
            os.posix_fallocate(f.fileno(), 0, 1 << 30)
            os.fsync(f.fileno())
    (d / ".metadata").write_bytes(b"x")


def beside(bench):
    root = bench.disk / "beside"
    root.mkdir()
    d = lib.Daemon(bench.disk / "beside-home", {"disk": root})
    alone, ours, count = [], [], 0

    def save():
        nonlocal count
        count += 1
        start = time.monotonic()
        d.api.run("save", source={"state_dict": "s"}, target={"storage": "disk", "name": f"run/step-{count}"})
        return time.monotonic() - start
    try:
        subprocess.run([TESTBIN / "tools/fill", "s", str(RANKS), "4", str(SAVE_MIB // 4)], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "DCPD_URL": f"unix://{d.socket}"})
        save()
        for i in range(ROUNDS):
            large(root, f"large/step-{i}")
            os.sync()
            alone += [save() for _ in range(3)]
            d.api.run("delete", target={"storage": "disk", "name": f"large/step-{i}"})
            for _ in range(6):
                seconds = save()
                if not d.staging():
                    break  # it has gone meanwhile
                ours.append(seconds)
            lib.wait_for(lambda: not d.staging(), 120, "what was deleted is gone")
            alone += [save() for _ in range(3)]
            for step in range(2, count + 1):  # at once, with nothing beside it
                shutil.rmtree(root / f"run/step-{step}", ignore_errors=True)
            os.sync()
        bench.row("catalogue.save.beside.removal", "s", "<=1.02", "the same save alone", ours, alone,
                  f"dcpctl save of {SAVE_MIB} MiB, {BESIDE_GIB} GiB being removed", load=os.getloadavg())
    finally:
        d.discard()
        shutil.rmtree(root)
        shutil.rmtree(bench.disk / "beside-home", ignore_errors=True)


def rows(bench):
    if bench.wants("catalogue.save.beside.removal"):
        beside(bench)
    names = ["catalogue.rescan", "catalogue.restart", "catalogue.memory", "catalogue.runs", "catalogue.preview", "catalogue.page.time",
             *(f"catalogue.{kind}.{n}" for kind in ("first_page", "again") for n in PAGES)]
    if not any(bench.wants(n) for n in names):
        return
    root = bench.disk / "lists"
    make(root)
    time.sleep(3)  # what has just been written to is looked at anew each time
    d = lib.Daemon(bench.disk / "list-home", {"lists": root})
    try:
        known(d)
        bench.row("catalogue.rescan", "s", "<=1.00", "5,000 a second", [rescan(d) for _ in range(2)], [COUNT / 5000],
                  f"{COUNT:,} checkpoints, a worker that knows none", load=os.getloadavg())
        bench.row("catalogue.restart", "s", "<=1.00", "1 s", [restart(d) for _ in range(3)], [1.0],
                  "systemctl restart dcpd, GET /v1/checkpoints?…", load=os.getloadavg())
        pages(bench, d, root)
        bench.row("catalogue.runs", "s", "<=1.00", "20 ms", [timed(d, "/v1/runs?storage=lists") for _ in range(TIMES)], [0.02],
                  "GET /v1/runs?storage=lists", load=os.getloadavg())
        bench.row("catalogue.preview", "s", "<=1.00", "1 s", [previewed(d) for _ in range(3)], [1.0], "dcpctl policy p … --preview",
                  load=os.getloadavg())
        bench.row("catalogue.memory", "B", "<=1.00", "96 MiB", [peak_bytes(d.proc.pid)], [96.0 * MIB], "VmHWM of dcpd",
                  workers=[peak_bytes(pid) for pid in d.workers()])
    finally:
        d.discard()
        shutil.rmtree(root)
        shutil.rmtree(bench.disk / "list-home")
