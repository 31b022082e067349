"""Bench rows of the coordinator: requests a second, answers while a save runs, the start with a long journal."""
import concurrent.futures
import json
import os
import pathlib
import re
import resource
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time

import dcpd as lib
from measure import RUNS, TESTBIN

LENGTH = re.compile(rb"\r\nContent-Length: (\d+)", re.I)


def wrk(port, path, token=None, seconds=2, threads=1):
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
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    idle(b)
    streams(b)
    scrape(b)
    traces(b)
    command(b)
    polls(b)


def polls(b):
    if b.words and not any(w in name for name in ("rest.get_job", "rest.p99_during_save", "rest.save_slowed_by") for w in b.words):
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
    ours, limit, alone, busy, p99, bare_p99 = [], [], [], [], [], []

    def save(name, at=None, slow=None):
        """Seconds; a steady trickle meanwhile, as dashboards and schedulers make: a flood would measure two cores, not the daemon."""
        stop = threading.Event()
        with concurrent.futures.ThreadPoolExecutor() as beside:
            got = beside.submit(trickle, at, path, token, stop) if at else None
            try:
                took = b.save("disk", name)
            finally:
                stop.set()
        if got:
            times = sorted(got.result())
            slow.append(times[int(len(times) * 0.99)] * 1000)
        b.delete("disk", name)
        return took

    try:
        for _ in range(3):
            limit.append(wrk(port, path, token)[0])
            ours.append(wrk(ours_port, path, token)[0])
        b.row("rest.get_job", "1/s", ">=0.90", "bare libmicrohttpd", ours, limit, "wrk -t1 -c16 http://…/v1/jobs/ID")
        for i in range(RUNS):
            alone.append(save(f"alone{i}"))
            busy.append(save(f"busy{i}", ours_port, p99))
            save(f"bare{i}", port, bare_p99)
    finally:
        bare.kill()
        bare.wait()
    command = "GET /v1/jobs/ID 200 times a second, during a save"
    b.row("rest.p99_during_save", "ms", "<=1.00", "limit 3 ms", p99, [3.0], command)
    b.row("rest.p99_beside_bare", "ms", "<=1.20", "bare libmicrohttpd", p99, bare_p99, command)
    b.row("rest.save_slowed_by", "s", "<=1.02", "the same save alone", busy, alone, "dcpctl save, with these requests")
    b.delete("disk", "rest")


def timed(fn, times):
    """Seconds of each call, but for the first."""
    took = []
    for _ in range(times + 1):
        start = time.monotonic()
        fn()
        took.append(time.monotonic() - start)
    return took[1:]


def verify_many(d, count):
    """Seconds for so many small jobs, one after the other."""
    d.api.run("verify", source={"storage": "disk", "name": "golden"}, level="structure")
    return sum(timed(lambda: d.api.run("verify", source={"storage": "disk", "name": "golden"}, level="structure"), count))


def golden(b):
    at = b.disk / "ckpt/golden"
    if not at.exists():
        shutil.copytree(lib.ROOT / "tests/fixtures/torch-2.15.0/plain/checkpoint", at)


def scrape(b):
    """`rest.metrics`: what a scrape of /metrics takes, after some jobs; `rest.metrics.cpu`: dcpd's CPU for it, at one scrape a second."""
    if not b.wants("rest.metrics"):
        return
    d = b.daemon()
    golden(b)
    verify_many(d, 50)
    took = [x * 1000 for x in timed(lambda: d.api.get("/metrics"), 100)]
    b.row("rest.metrics", "ms", "<=1.00", "limit 20 ms", took, [20.0], "GET /metrics, after 50 jobs")
    start, count = cpu(d.proc.pid), 1000
    timed(lambda: d.api.get("/metrics"), count)
    b.row("rest.metrics.cpu", "%", "<=1.00", "limit 1 % of a core", [(cpu(d.proc.pid) - start) / (count + 1) * 100], [1.0],
          f"CPU of dcpd, {count} GET /metrics")


class Collector(threading.Thread):
    """Takes spans, and answers 200."""

    def __init__(self):
        super().__init__(daemon=True)
        self.s = socket.create_server(("127.0.0.1", 0))
        self.port = self.s.getsockname()[1]

    def run(self):
        while True:
            c, _ = self.s.accept()
            threading.Thread(target=self.serve, args=(c,), daemon=True).start()

    @staticmethod
    def serve(c):
        got = b""
        while more := c.recv(1 << 16):
            got += more
            while b"\r\n\r\n" in got:
                head, rest = got.split(b"\r\n\r\n", 1)
                n = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                if len(rest) < n:
                    break
                got = rest[n:]
                c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


def traces(b):
    """`rest.traces`: small jobs while spans are sent; the peer is a daemon that sends none, in turns."""
    if not b.wants("rest.traces"):
        return
    golden(b)
    collector = Collector()
    collector.start()
    homes = [pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-")) for _ in range(2)]
    on = lib.Daemon(homes[0], {"disk": b.disk / "ckpt"}, args=("--otlp-endpoint", f"http://127.0.0.1:{collector.port}"))
    off = lib.Daemon(homes[1], {"disk": b.disk / "ckpt"})
    ours, peer = [], []
    for _ in range(5):
        ours.append(verify_many(on, 60))
        peer.append(verify_many(off, 60))
    for d, home in ((on, homes[0]), (off, homes[1])):
        d.discard()
        shutil.rmtree(home)
    b.row("rest.traces", "s", "<=1.05", "without --otlp-endpoint", ours, peer, "60 verifies of a small checkpoint")


def command(b):
    """`rest.dcpctl`: what dcpctl takes to start, ask and print; the peer is curl for the same answer."""
    if not b.wants("rest.dcpctl"):
        return
    d = b.daemon()
    env = {**os.environ, "DCPD_URL": f"unix://{d.socket}"}
    ours, peer = [], []
    for _ in range(30):
        ours += [x * 1000 for x in timed(lambda: subprocess.run([lib.BIN / "dcpctl", "ls", "disk"], env=env, check=True,
                                                                stdout=subprocess.DEVNULL), 1)]
        peer += [x * 1000 for x in timed(lambda: subprocess.run(["curl", "-s", "--unix-socket", d.socket, "http://d/v1/checkpoints/disk"],
                                                                check=True, stdout=subprocess.DEVNULL), 1)]
    b.row("rest.dcpctl", "ms", "<=1.50", "curl, the same answer", ours, peer, "dcpctl ls disk")


CLIENTS, IDLE, SECONDS = 1000, 4000, 2
HEAD = "GET {} HTTP/1.1\r\nHost: localhost\r\n{}\r\n"


def cpu(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("RssAnon:"))) << 10


def connect(port, count, head):
    """Connections that have sent this, and what each got first."""
    many = []
    for _ in range(count):
        many.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        many[-1].sendall(head)
    firsts = [s.recv(65536) for s in many]
    for s in many:
        s.setblocking(False)
    return many, firsts


def drain(many, seconds, every_tenth=lambda: None):
    """Reads what comes for so long; bytes of all."""
    poll, got, start, ticks = select.epoll(), 0, time.monotonic(), 0
    by = {s.fileno(): s for s in many}
    for fd in by:
        poll.register(fd, select.EPOLLIN)
    while (now := time.monotonic() - start) < seconds:
        if now * 10 >= ticks:
            every_tenth()
            ticks += 1
        for fd, _ in poll.poll(0.02):
            got += len(by[fd].recv(65536))
    poll.close()
    return got


def streams(b):
    """`rest.sse_cpu`: what 1,000 streams cost at 10 events a second, less what the events cost without them."""
    if not b.wants("rest.sse_cpu"):
        return
    d = b.daemon()
    port, token = d.tcp_client().tcp[1], (d.state / "token").read_text().strip()
    head = HEAD.format("/v1/events", f"Authorization: Bearer {token}\r\n").encode()
    chain = json.dumps({"storage": "disk", "match": "none-*", "steps": [{"verify": {"level": "structure"}}]})

    def event():
        d.api.request("PUT", "/v1/chains/bench", chain).ok(200, 201)

    ours, limit = [], []
    (one,), _ = connect(port, 1, head)
    event()
    time.sleep(0.2)
    (b.disk / "event").write_bytes(one.recv(65536).split(b"\r\n", 1)[1].rsplit(b"\r\n", 1)[0])
    one.close()
    bare = subprocess.Popen([TESTBIN / "bench/bare_sse", b.disk / "event"], stdout=subprocess.PIPE, text=True)
    try:
        many, _ = connect(int(bare.stdout.readline()), CLIENTS, HEAD.format("/", "").encode())
        for _ in range(3):
            start = cpu(bare.pid)
            drain(many, SECONDS)
            limit.append(cpu(bare.pid) - start)
    finally:
        bare.kill()
        bare.wait()
    for s in many:
        s.close()
    start = cpu(d.proc.pid)
    drain([], SECONDS, event)
    alone = cpu(d.proc.pid) - start
    many, _ = connect(port, CLIENTS, head)
    for _ in range(3):
        start = cpu(d.proc.pid)
        got = drain(many, SECONDS, event)
        ours.append(cpu(d.proc.pid) - start - alone)
    assert got > CLIENTS * 9 * SECONDS * 50, got
    for s in many:
        s.close()
    d.api.delete("/v1/chains/bench")
    b.row("rest.sse_cpu", "s", "<=1.30", "bare epoll loop, same bytes", ours, limit,
          f"{CLIENTS} GET /v1/events, 10 events a second, {SECONDS} s")


def idle(b):
    """`rest.idle_connection`: the daemon's memory per connection that has asked once and stays; `rest.slow_writer`: per one whose head does
    not end."""
    if not b.wants("rest.idle"):
        return
    d = b.daemon()
    port, token = d.tcp_client().tcp[1], (d.state / "token").read_text().strip()
    base = resident(d.proc.pid)
    asks = HEAD.format("/v1/workers", f"Authorization: Bearer {token}\r\n").encode()
    half = HEAD.format("/v1/workers", "X: " + "x" * 2000)[:-4].encode()
    for name, head in (("rest.slow_writer", half), ("rest.idle_connection", asks)):
        many = []
        for _ in range(IDLE):
            many.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            many[-1].sendall(head)
            if head == asks:
                assert many[-1].recv(65536)[9:12] == b"200"
        assert d.api.get("/livez").status == 200
        each = (resident(d.proc.pid) - base) / IDLE
        for s in many:
            s.close()
        b.row(name, "B", "<=1.00", "limit 16 KiB", [each], [16384.0], f"{IDLE} connections")


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


def trickle(port, path, token, stop):
    """Seconds of each answer on one kept connection. Plain bytes: http.client takes ten times the processor of an answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    got = []
    with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
        while not stop.is_set():
            start = time.monotonic()
            s.sendall(request)
            answer = b""
            while (end := answer.find(b"\r\n\r\n")) < 0 or len(answer) < end + 4 + int(LENGTH.search(answer)[1]):
                more = s.recv(1 << 16)
                assert more, f"the connection has ended: {answer[:300]}"
                answer += more
            got.append(time.monotonic() - start)
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
            time.sleep(0.005)
    return got
