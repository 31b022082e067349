"""Bench rows of the coordinator: requests a second, answers while a save runs, the start with a long journal."""
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time

import dcpd as lib
from measure import TESTBIN


def wrk(port, path, token=None, seconds=3, threads=1):
    c = ["wrk", f"-t{threads}", "-c16", f"-d{seconds}", "--latency"]
    c += ["-H", f"Authorization: Bearer {token}"] if token else []
    r = subprocess.run([*c, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in r, r
    p99 = next(line.split()[1] for line in r.splitlines() if line.strip().startswith("99%"))
    unit = {"us": 1e-3, "ms": 1.0, "s": 1000.0, "m": 60000.0}
    number = p99.rstrip("usm")
    ms = float(number) * unit[p99[len(number):]]
    return float(next(line.split()[1] for line in r.splitlines() if "Requests/sec" in line)), ms


def rest(b):
    if not b.wants("rest"):
        return
    d = b.daemon()
    b.no_torch()
    job = d.api.run("save", seconds=300, source={"state_dict": "bench"}, target={"storage": "disk", "name": "rest"})
    answer = d.api.get(f"/v1/jobs/{job['id']}")
    (b.disk / "body").write_bytes(answer.body)
    heads = [x for k, v in answer.headers.items() if k not in ("Date", "Content-Length", "Connection") for x in (k, v)]
    bare = subprocess.Popen([TESTBIN / "bench/bare_mhd", b.disk / "body", *heads], stdout=subprocess.PIPE, text=True)
    port = int(bare.stdout.readline())
    ours_port, token = d.tcp_client().tcp[1], (d.state / "token").read_text().strip()
    path = f"/v1/jobs/{job['id']}"
    ours, limit = [], []
    try:
        for _ in range(3):
            limit.append(wrk(port, path, token)[0])
            ours.append(wrk(ours_port, path, token)[0])
    finally:
        bare.kill()
        bare.wait()
    b.row("rest.get_job", "1/s", ">=0.60", "bare libmicrohttpd", ours, limit, "wrk -t1 -c16 http://…/v1/jobs/ID")
    alone, busy, p99 = [], [], []
    for i in range(3):
        alone.append(b.save("disk", f"alone{i}"))
        b.delete("disk", f"alone{i}")
        got = []
        # A steady trickle, as dashboards and schedulers make: a flood would measure two cores, not the daemon.
        stop = threading.Event()
        t = threading.Thread(target=lambda: trickle(d, path, got, stop))
        t.start()
        busy.append(b.save("disk", f"busy{i}"))
        stop.set()
        t.join()
        p99.append(sorted(got)[int(len(got) * 0.99)] * 1000)
        b.delete("disk", f"busy{i}")
    b.row("rest.p99_during_save", "ms", "<=1.00", "limit 3 ms", p99, [3.0],
          "GET /v1/jobs/ID 200 times a second, during a save")
    b.row("rest.save_slowed_by", "s", "<=1.02", "the same save alone", busy, alone, "dcpctl save, with these requests")
    b.delete("disk", "rest")


def start(b):
    if not b.wants("start"):
        return
    home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-"))
    d = lib.Daemon(home)
    golden = lib.ROOT / "tests/fixtures/torch-2.15.0/plain/checkpoint"
    shutil.copytree(golden, home / "main/x")
    want, end = 10000, time.monotonic() + 90

    def submit(n):
        for _ in range(n):
            if time.monotonic() < end:
                d.api.run("verify", source={"storage": "main", "name": "x"}, level="structure")

    threads = [threading.Thread(target=submit, args=(want // 8,)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    jobs = int(next((line.split()[-1] for line in d.api.get("/metrics").body.decode().splitlines()
                     if line.startswith("dcpd_jobs") and "succeeded" in line), 0) or 0)
    times = []
    for _ in range(5):
        d.stop()
        start = time.monotonic()
        d.start()
        times.append(time.monotonic() - start)
    d.discard()
    shutil.rmtree(home)
    b.row("start.cold", "s", "<=1.00", f"limit 0.2 s, {jobs or 'at most ' + str(want)} jobs in the journal", times, [0.2],
          "dcpd; until /readyz answers 200")


def trickle(d, path, got, stop):
    while not stop.is_set():
        start = time.monotonic()
        d.api.get(path)
        got.append(time.monotonic() - start)
        time.sleep(0.005)
