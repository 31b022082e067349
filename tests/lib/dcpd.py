"""A real daemon for tests, and what a client needs: HTTP over its Unix socket, segments, dcpctl, and a look for leaks.

Standard library only, and on purpose not the `dcpd` package: a fault there must not hide one in the daemon.
"""
import contextlib
import http.client
import json
import mmap
import os
import pathlib
import re
import secrets
import signal
import socket
import struct
import subprocess
import time
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BIN", ROOT / "build/bin"))
FULL = os.environ.get("DCPD_FULL") == "1"
SHM = pathlib.Path("/dev/shm")
TERMINAL = ("succeeded", "failed", "cancelled")
PAGE = 4096
SEGMENT = re.compile(rb"dcpd-(?:[0-9a-f]{24}-)?[0-9a-f]{32}")


# A test says how long something takes on an idle machine at most; this many times as long, and it hangs. A busy machine is no failure.
# A lease within which a test must act (seal, renew, submit) is as many times as long, too.
PATIENCE = 6


def wait_for(condition, seconds=10.0, what="condition", every=0.02):
    """Polls; the value of `condition` once it is true, else a failure that says what was awaited. What has taken long is looked at less
    often, at a twentieth of that: looking costs time of the processor that others wait for."""
    seconds *= PATIENCE
    start = time.monotonic()
    while True:
        got = condition()
        if got:
            return got
        taken = time.monotonic() - start
        if taken > seconds:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(min(max(every, taken / 20), 10 * every))


@contextlib.contextmanager
def stopped(*pids):
    """Processes that stand still meanwhile, so that what they do cannot end before it is met."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# For a shell in a new mount namespace: nothing that is mounted here shows elsewhere. In a chroot `/` need not be a mount itself, so that
# `unshare --propagation private` and `mount --make-rprivate /` fail there.
PRIVATE_MOUNTS = """while read -r _ _ _ _ at _; do
mount --make-private "$at" || ! mountpoint -q "$at" || exit 1  # one that another test has removed meanwhile is in nobody's way
done < /proc/self/mountinfo"""


def clean_environment(**more):
    """Ours without what configures dcpd or these tests: it must not leak into a daemon."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("DCPD_")}, **more}


# ---------------------------------------------------------------------------------------------------------------- HTTP


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    def ok(self, *status):
        good = self.status in status if status else 200 <= self.status < 300
        assert good, f"HTTP {self.status}: {self.body[:2000].decode(errors='replace')}"
        return self.json if self.body else None

    def problem(self, *codes, status=None):
        """It is one clear problem+json with one of these codes."""
        text = self.body[:2000].decode(errors="replace")
        assert self.status >= 400, f"HTTP {self.status}, expected {codes}: {text}"
        assert self.headers.get("Content-Type", "").startswith("application/problem+json"), f"{self.headers}\n{text}"
        p = self.json
        check_problem(p, *codes)
        assert p["type"].endswith(p["code"]), p
        assert p["status"] == self.status, text
        assert status is None or self.status == status, text
        return p


def check_problem(p, *codes):
    assert isinstance(p, dict), p
    for key in ("title", "status", "code", "retryable"):
        assert key in p, f"a problem without `{key}`: {p}"
    assert isinstance(p["retryable"], bool) and isinstance(p["status"], int), p
    assert not codes or p["code"] in codes, f"{p['code']} instead of {' or '.join(codes)}: {p}"
    assert "\n" not in p.get("detail", ""), p
    return p


def check_damage(p, *codes):
    """The error of a verify: all damage is listed, and of the first fault the code may be the one that others fail with."""
    if p["code"] != "checkpoint_damaged":
        return check_problem(p, *codes)
    assert p["damage_count"] >= len(p["damage"]) > 0, p
    assert all(x["file"] and x["part"] and x["offset"] >= 0 and x["bytes"] >= 0 for x in p["damage"]), p
    return check_problem(p, *(codes if not {x["code"] for x in p["damage"]} & set(codes) else ()))


class Client:
    """Requests to one daemon. `headers` go with every request; `tcp=(host, port)` uses TCP in place of the socket."""

    def __init__(self, path=None, tcp=None, headers=None, timeout=300):
        self.path, self.tcp, self.headers, self.timeout = path, tcp, dict(headers or {}), timeout

    def connect(self, timeout=None):
        timeout = timeout or self.timeout
        return UnixConnection(str(self.path), timeout) if self.path else http.client.HTTPConnection(*self.tcp, timeout=timeout)

    def request(self, method, path, body=None, headers=None, timeout=None):
        h = {**self.headers, **(headers or {})}
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
            h.setdefault("Content-Type", "application/json")
        elif body is not None:
            h.setdefault("Content-Type", "application/json")
        c = self.connect(timeout)
        try:
            c.request(method, path, body=body, headers=h)
            r = c.getresponse()
            return Answer(r.status, dict(r.getheaders()), r.read())
        finally:
            c.close()

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body=None, **kw):
        return self.request("POST", path, {} if body is None else body, **kw)

    def delete(self, path, **kw):
        return self.request("DELETE", path, **kw)

    # jobs
    def submit(self, kind, headers=None, **fields):
        return self.post("/v1/jobs", {"kind": kind, **fields}, headers=headers).ok(202)

    def wait(self, job, seconds=60):
        job = job["id"] if isinstance(job, dict) else job
        seconds *= PATIENCE
        end = time.monotonic() + seconds
        while True:
            left = max(1, min(20, int(end - time.monotonic())))
            j = self.get(f"/v1/jobs/{job}?wait={left}s", timeout=left + 300).ok(200)
            if j["state"] in TERMINAL:
                return j
            assert time.monotonic() < end, f"not finished within {seconds} s: {j}"

    def run(self, kind, seconds=60, **fields):
        j = self.wait(self.submit(kind, **fields), seconds)
        assert j["state"] == "succeeded", f"{kind} {j['state']}: {json.dumps(j.get('error'))}"
        return j

    def fails(self, kind, *codes, seconds=60, **fields):
        """The job is refused, or accepted and then failed: one clear problem either way."""
        a = self.post("/v1/jobs", {"kind": kind, **fields})
        if a.status >= 400:
            return a.problem(*codes)
        j = self.wait(a.ok(202), seconds)
        assert j["state"] == "failed", f"{kind} {j['state']}, expected {codes}: {j.get('result')}"
        p = check_damage(j["error"], *codes) if kind == "verify" else check_problem(j["error"], *codes)
        assert p.get("detail"), f"a problem without detail: {p}"
        return p

    def storage_path(self, storage, name, tail=""):
        return f"/v1/checkpoints/{storage}/{urllib.parse.quote(name, safe='')}{tail}"


# ------------------------------------------------------------------------------------------------------------- images


def image(entries, dcpd=None):
    """A segment image. entries: {name: (safetensors dtype, shape, bytes)}; tensors begin at pages, filler lies between."""
    head, parts, pos, pads = {}, [], 0, 0
    if dcpd is not None:
        head["__metadata__"] = {"dcpd": json.dumps({"version": 1, **dcpd})}
    for name, (dtype, shape, data) in entries.items():
        data = bytes(data)
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [pos, pos + len(data)]}
        parts.append(data)
        pos += len(data)
        gap = -pos % PAGE
        if gap:
            head[f"__dcpd_pad__/{pads}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [pos, pos + gap]}
            parts.append(bytes(gap))
            pads, pos = pads + 1, pos + gap
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


RAW_BYTES = {"complex128": 16, "complex32": 4, "bcomplex32": 4, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
             "float4_e2m1fn_x2": 1}


class Image:
    """What a segment holds: entries {name: (dtype, shape, bytes)} without filler, and the dcpd metadata."""

    def __init__(self, data):
        n = struct.unpack("<Q", data[:8])[0]
        head = json.loads(bytes(data[8 : 8 + n]))
        meta = head.pop("__metadata__", {})
        self.dcpd = json.loads(meta.get("dcpd", "{}"))
        self.entries = {}
        self.bytes = 8 + n
        for name, e in head.items():
            a, b = e["data_offsets"]
            self.bytes = max(self.bytes, 8 + n + b)
            if not name.startswith("__dcpd_pad__/"):
                self.entries[name] = (e["dtype"], e["shape"], bytes(data[8 + n + a : 8 + n + b]))
        self.values = self.dcpd.get("values", {})

    def chunks(self):
        """[(fqn, global shape, offsets, sizes, dtype, bytes)]"""
        out = []
        for name, (dtype, shape, data) in self.entries.items():
            t = self.dcpd.get("tensors", {}).get(name, {})
            if RAW_BYTES.get(t.get("dtype"), 1) > 1:
                # safetensors lacks it: bytes, whose shape is the chunk's with one more dim, or its last one longer
                width = RAW_BYTES[t["dtype"]]
                dims = len(t["global_shape"]) if "global_shape" in t else len(shape) - 1
                shape = shape[:dims] if len(shape) == dims + 1 else [*shape[:-1], shape[-1] // width]
            whole = t.get("global_shape", shape)
            out.append((t.get("fqn", name), whole, t.get("offsets", [0] * len(whole)), shape, t.get("dtype", dtype), data))
        return out


def segment_file(segment):
    assert re.fullmatch(r"/dcpd-[A-Za-z0-9._-]+", segment), segment
    return SHM / segment[1:]


def write_segment(segment, data):
    f = segment_file(segment)
    fd = os.open(f, os.O_RDWR | os.O_CLOEXEC)
    try:
        assert os.fstat(fd).st_size >= len(data), f"{segment}: {os.fstat(fd).st_size} bytes, {len(data)} needed"
        with mmap.mmap(fd, 0) as m:
            m[: len(data)] = data
    finally:
        os.close(fd)


def read_segment(segment, image_bytes=None):
    data = segment_file(segment).read_bytes()
    return Image(data if image_bytes is None else data[:image_bytes])


# ------------------------------------------------------------------------------------------------------------- daemon


class Hidden:
    """What lies below a folder under a name of dcpd's own that is no record. A folder is listed again when it has changed: each test
    looks for left-overs, among the checkpoints of all tests before."""

    RECORDS = (".dcpd-aliases.json", ".dcpd-copied.json", ".dcpd-notes.json", ".dcpd-trash")
    SETTLED_NS = 100_000_000  # a folder that changes twice within a tick of the clock may show it only once

    def __init__(self):
        self.known = {}  # folder → its mark, folders in it, hidden names in it

    def below(self, root):
        found, folders = [], [root]
        for at in folders:
            try:
                st = os.stat(at)
                mark = st.st_dev, st.st_ino, st.st_ctime_ns
                known = self.known.get(at)
                if not known or known[0] != mark:
                    is_settled = time.time_ns() - st.st_ctime_ns > self.SETTLED_NS
                    with os.scandir(at) as entries:
                        names = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
                    known = (mark if is_settled else None, [os.path.join(at, n) for n, is_dir in names if is_dir],
                             [os.path.join(at, n) for n, _ in names if n.startswith(".dcpd-") and n not in self.RECORDS])
                    self.known[at] = known
            except OSError:  # it has gone meanwhile
                continue
            folders += known[1]
            found += known[2]
        return found


class Daemon:
    """One dcpd with a state dir, a Unix socket, any free port and storages of its own."""
    program = BIN / "dcpd"

    def __init__(self, home, storages=("main",), args=(), env=None, start=True, tcp=True, under=()):
        self.home = pathlib.Path(home)
        self.state = self.home / "state"
        self.state.mkdir(parents=True, exist_ok=True)
        self.storages = dict(storages) if isinstance(storages, dict) else {s: self.home / s for s in storages}
        for d in self.storages.values():
            if "://" not in str(d):
                pathlib.Path(d).mkdir(parents=True, exist_ok=True)
        self.socket = self.state / "s"
        self.args, self.env, self.tcp = list(args), env or {}, tcp
        self.under = [str(word) for word in under]  # a program that execs dcpd: another user, a host that denies system calls
        self.log, self.proc, self.port = self.home / "log", None, None
        self.api, self.hidden = Client(self.socket), Hidden()
        if start:
            self.start()

    def command(self):
        c = self.under + [str(self.program), "--state-dir", str(self.state), "--listen", f"unix:{self.socket}"]
        c += ["--listen", "127.0.0.1:0"] if self.tcp else []
        for name, d in self.storages.items():
            c += ["--storage", f"{name}={d}"]
        return c + self.args

    def start(self, seconds=20):
        assert self.program.exists(), f"{self.program}: not built (make all tools)"
        self.mark = self.log.stat().st_size if self.log.exists() else 0
        with open(self.log, "ab") as log:
            self.proc = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                         env=clean_environment(**self.env), start_new_session=True)
        try:
            wait_for(self.ready, seconds, "dcpd ready")
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.tail()}") from None
        return self

    def ready(self):
        if self.proc.poll() is not None:
            raise AssertionError(f"dcpd ended with {self.proc.returncode}")
        try:
            return self.api.get("/readyz", timeout=60).status == 200
        except OSError:
            return False

    def tail(self, n=3000):
        return self.log.read_bytes()[-n:].decode(errors="replace") if self.log.exists() else ""

    def since_start(self):
        return self.log.read_bytes()[self.mark :].decode(errors="replace")

    def tcp_client(self, token=True):
        m = wait_for(lambda: re.search(r"127\.0\.0\.1:([1-9]\d*)", self.since_start()), 5, "the port in the log")
        auth = {"Authorization": "Bearer " + (self.state / "token").read_text().strip()} if token else {}
        return Client(tcp=("127.0.0.1", int(m.group(1))), headers=auth)

    def alive(self):
        return self.proc is not None and self.proc.poll() is None

    def workers(self):
        return [p for p in children(self.proc.pid)]

    def pids(self, role, which=lambda w: True):
        return [w["pid"] for w in self.api.get("/v1/workers").ok(200)["workers"] if w["role"] == role and which(w)]

    def kill_workers(self):
        """How many were there to be killed: the rest of a gang goes with its first, and others may end by themselves."""
        n = 0
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                n += 1
        return n

    def kill(self):
        """As a crash would: no clean-up. Workers end by themselves when their socket closes."""
        workers = self.workers() if self.alive() else []
        if self.alive():
            self.proc.send_signal(signal.SIGKILL)
        self.proc.wait()
        return workers

    def stop(self, seconds=20):
        if not self.alive():
            return self.proc.returncode if self.proc else None
        workers = self.workers()
        self.proc.send_signal(signal.SIGTERM)
        try:
            self.proc.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
            raise AssertionError(f"dcpd did not drain within {seconds * PATIENCE} s\n{self.tail()}") from None
        wait_for(lambda: not any(running(p) for p in workers), 10, "workers gone")
        return self.proc.returncode

    def discard(self):
        """Ends it in any case and removes its segments, whose names its journal has: for a test that is over."""
        names = {os.path.basename(x).split(" ")[0] for x in shm_files(self.proc.pid)} if self.alive() else set()
        if self.alive():
            self.proc.kill()
            self.proc.wait()
        for f in self.state.glob("*"):
            if f.is_file():
                names |= {m.decode() for m in SEGMENT.findall(f.read_bytes())}
        for n in names:
            if n.startswith("dcpd-"):
                (SHM / n).unlink(missing_ok=True)

    def ctl(self, *args, timeout=300, env=None, **kw):
        e = clean_environment(**{"DCPD_URL": f"unix://{self.socket}", **(env or {})})
        return subprocess.run([str(BIN / "dcpctl"), *map(str, args)], env=e, capture_output=True, text=True, timeout=timeout,
                              stdin=subprocess.DEVNULL, **kw)

    # state dicts
    def create(self, name, world=1, slots=2, **more):
        return self.api.post("/v1/state-dicts", {"name": name, "world_size": world, "slots": slots, **more}).ok(201)

    def reserve(self, name, rank, size, generation):
        return self.api.post(f"/v1/state-dicts/{name}/ranks/{rank}:reserve", {"bytes": size, "generation": generation}).ok()

    def seal(self, name, rank, generation, image_bytes):
        return self.api.post(f"/v1/state-dicts/{name}/ranks/{rank}:seal",
                             {"generation": generation, "image_bytes": image_bytes}).ok()

    def put(self, name, images, generation=1, create=True, slots=2, **more):
        """A state dict with these images, one a rank, sealed."""
        if create:
            self.create(name, len(images), slots, **more)
        segments = []
        for rank, data in enumerate(images):
            s = self.reserve(name, rank, len(data), generation)
            write_segment(s["segment"], data)
            self.seal(name, rank, generation, len(data))
            segments.append(s["segment"])
        return segments

    def images(self, name, generation=None):
        """The sealed images of a state dict, newest generation, by rank."""
        out = []
        for r in self.api.get(f"/v1/state-dicts/{name}").ok(200)["ranks"]:
            slots = [s for s in r["slots"] if s["state"] == "sealed" and generation in (None, s.get("generation"))]
            assert slots, r
            best = max(slots, key=lambda s: s.get("generation") or 0)
            out.append(read_segment(best["segment"], best["image_bytes"]))
        return out

    def drop(self, *names):
        for n in names:
            self.api.delete(f"/v1/state-dicts/{n}").ok(200, 204)

    # leaks
    def listed_segments(self):
        names = set()
        token = None
        while True:
            page = self.api.get("/v1/state-dicts" + (f"?page_token={token}" if token else "")).ok(200)
            for sd in page["state_dicts"]:
                for r in self.api.get(f"/v1/state-dicts/{sd['name']}").ok(200)["ranks"]:
                    names |= {s["segment"][1:] for s in r["slots"] if s.get("segment")}
            token = page.get("next_page_token")
            if not token:
                return names

    def staging(self):
        """Staging, and what is being removed, which may vanish while it is looked for. Of the trash, whose checkpoints may come back,
        entries without one."""
        empty = [str(p) for d in self.storages.values() for p in pathlib.Path(d, ".dcpd-trash").glob("*") if not (p / "item").exists()]
        return empty + [at for d in self.storages.values() for at in self.hidden.below(str(d))]

    def leaks(self):
        """What is there and should not be, while nothing runs."""
        listed = self.listed_segments()
        found = [f"left in the storage: {p}" for p in self.staging()]
        for pid in [self.proc.pid, *self.workers()]:
            who = "dcpd" if pid == self.proc.pid else f"worker {pid}"
            found += [f"{who} holds {f}" for f in shm_files(pid) if os.path.basename(f).split(" ")[0] not in listed]
            found += [f"{who} holds {f}" for f in checkpoint_files(pid, self.storages.values())]
        return found


@contextlib.contextmanager
def strikes(d, call, when, what, path=None, running=False):
    """What happens to the `when`-th `call` of each process that the daemon makes from here on: signal=KILL, error=EIO, …; with `path`, to
    the `when`-th on that file. running: workers that run already are struck as well, counted from here on. Needs strace."""
    def is_traced(pid):
        try:
            with open(f"/proc/{pid}/status") as f:
                return "TracerPid:\t0" not in f.read()
        except FileNotFoundError:  # it has ended
            return True

    def begin():
        """None: a worker that was made while strace began is missing."""
        pids = [d.proc.pid, *(d.workers() if running else ())]
        p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", *(a for pid in pids for a in ("-p", str(pid))),
                              *(["-P", str(path)] if path else []), "-e", f"trace={call}", "-e", f"inject={call}:{what}:when={when}"])
        wait_for(lambda: all(map(is_traced, pids)) or p.poll() is not None, 10, "strace")
        if p.poll() is None and (not running or all(map(is_traced, d.workers()))):
            return p
        p.terminate()
        p.wait()
        return None

    p = wait_for(begin, 10, "strace")
    try:
        yield
    finally:
        p.terminate()
        try:
            p.wait(20)
        except subprocess.TimeoutExpired:  # strace lets go of each thread by itself, and has been seen to wait for one without end
            p.kill()
            p.wait()


def ours(d):
    """State dicts of the Python package, from which loads come as long as they are there."""
    return [s["name"] for s in d.api.get("/v1/state-dicts").ok(200)["state_dicts"] if s["name"].startswith("py-")]


def shm_files(pid):
    return [t for t in fd_targets(pid) if t.startswith(("/dev/shm/dcpd-", "/memfd:"))]


def checkpoint_files(pid, roots):
    roots = [str(r).rstrip("/") + "/" for r in roots]
    return [t for t in fd_targets(pid) if any(t.startswith(r) for r in roots)]


def fd_targets(pid):
    out = []
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                out.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
    except OSError:
        pass
    return out


def children(pid):
    out = []
    for t in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            out += [int(x) for x in t.read_text().split()]
        except OSError:
            pass
    return out


def running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def fresh(prefix="t"):
    """A name no other test uses."""
    return f"{prefix}-{secrets.token_hex(4)}"
