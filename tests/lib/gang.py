"""dcpd-worker driven through its control socket by a coordinator that is not there: what worker/ctl/README.md says, in Python.

    with Gang(2, {"main": path}) as g:
        end = g.job("verify", {"source": ref, "level": "digest"})        # End(kind, body): DONE or FAILED of the leader
    ask({"main": path}, op="list", storage="main")                       # one question to a look-up worker
"""
import array
import collections
import json
import os
import pathlib
import re
import select
import socket
import struct
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("BIN", ROOT / "build/bin"))
HEAD = struct.Struct("<4sHHIIQ")
TYPES = {"HELLO": 1, "JOB": 2, "RUN": 3, "CANCEL": 4, "COMMIT_OK": 5, "SEGMENTS": 6, "PEERS_DONE": 7, "LOOKUP": 8,
         "RENDEZVOUS_ALL": 9, "SEALED": 10, "STATE": 32, "PROGRESS": 33, "WANT_SEGMENTS": 34, "WANT_COMMIT": 35, "DONE": 36,
         "FAILED": 37, "ANSWER": 38, "IO": 39, "RENDEZVOUS": 40}
NAMES = {v: k for k, v in TYPES.items()}
BATCH = 250
SANITIZED = b"AddressSanitizer" in (BIN / "dcpd-worker").read_bytes() if (BIN / "dcpd-worker").exists() else False  # memory is not as ever

End = collections.namedtuple("End", "kind body")
Frame = collections.namedtuple("Frame", "type generation body fds")


def build_id():
    version = (ROOT / "VERSION").read_text().strip()
    return version + re.search(r'DCPD_VERSION "([^"]+)"', (ROOT / "worker/ctl/build_id.h").read_text()).group(1)


class Closed(Exception):
    """The worker closed its socket; `rc` is its exit status."""

    def __init__(self, rc, log=""):
        super().__init__(f"the worker ended with {rc}: {log[-2000:]}")
        self.rc = rc


class Worker:
    def __init__(self, roots, role="gang", index=0, count=1, memory=96 << 20, engine="auto", hello=None, network=False,
                 listen="127.0.0.1", device=False, env=None):
        ours, theirs = socket.socketpair()
        self.proc = subprocess.Popen([str(BIN / "dcpd-worker"), "--control-fd", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                                     stderr=subprocess.PIPE, env={**os.environ, **(env or {})})
        theirs.close()
        self.sock, self.data, self.fds, self.queue = ours, b"", [], []
        doc = {"build_id": build_id(), "role": role, "index": index, "count": count, "io_engine": engine, "memory_bytes": memory,
               "network": network, "listen": listen, "device": device, "roots": [{"name": k, "path": str(v)} for k, v in roots.items()]}
        self.send("HELLO", 0, doc if hello is None else hello)
        self.hello = self.recv().body if hello is None else None

    def send(self, kind, generation, doc, fds=()):
        body = doc if isinstance(doc, bytes) else json.dumps(doc).encode()
        self.raw(HEAD.pack(b"DCPD", 1, TYPES.get(kind, kind), len(body), len(fds), generation) + body)
        for i in range(0, len(fds), BATCH):
            rights = array.array("i", fds[i:i + BATCH])
            self.sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def raw(self, data):
        self.sock.sendall(data)

    def whole(self):
        """The next frame, if all of it is here; what only counts bytes is passed over."""
        f = self.part()
        while f and f.type == "IO":
            f = self.part()
        return f

    def part(self):
        if len(self.data) < HEAD.size:
            return None
        _, _, kind, n, fd_count, generation = HEAD.unpack(self.data[:HEAD.size])
        end = HEAD.size + n + (fd_count + BATCH - 1) // BATCH
        if len(self.data) < end or len(self.fds) < fd_count:
            return None
        body = json.loads(self.data[HEAD.size:HEAD.size + n] or b"{}")
        fds, self.fds, self.data = self.fds[:fd_count], self.fds[fd_count:], self.data[end:]
        return Frame(NAMES[kind], generation, body, fds)

    def recv(self, seconds=300, io=False):
        """The next frame; how much the worker read and wrote, which is for the coordinator's metrics, only with `io`."""
        until = time.monotonic() + seconds
        while True:
            f = self.whole()
            if f and (io or f.type != "IO"):
                return f
            if f:
                continue
            if not select.select([self.sock], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(f"nothing from the worker in {seconds} s")
            data, extra, _, _ = self.sock.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 256))
            for _, _, rights in extra:
                a = array.array("i")
                a.frombytes(rights[:len(rights) - len(rights) % 4])
                self.fds += a
            if not data:
                raise Closed(self.proc.wait(200), self.proc.stderr.read().decode(errors="replace"))
            self.data += data

    def close(self):
        """Closes the socket; the worker must end by itself. Its exit status and what it logged."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        try:
            rc = self.proc.wait(200)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            raise
        log = self.proc.stderr.read().decode(errors="replace")
        self.proc.stderr.close()
        return rc, log


class Segments:
    """Shared memory without a name, one descriptor per rank."""

    def __init__(self, images=()):
        self.fds, self.bytes = [], []
        try:
            for data in images:
                self.make(len(data), data)
        except OSError:
            self.close()
            raise

    def make(self, n, data=b""):
        path = f"/dev/shm/dcpd-test-{os.getpid()}-{time.monotonic_ns()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.fds.append(fd)
        self.bytes.append(n)
        os.unlink(path)
        os.ftruncate(fd, n)
        if data:
            os.pwrite(fd, data, 0)
        return fd

    def doc(self, generation=1):
        """A state dict's entry in a JOB document."""
        return {"world_size": len(self.fds), "generation": generation,
                "ranks": [{"rank": r, "fd": r, "segment": f"/dcpd-{r}", "bytes": n, "image_bytes": n}
                          for r, n in enumerate(self.bytes)]}

    def read(self, rank):
        return os.pread(self.fds[rank], self.bytes[rank], 0)

    def close(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class Gang:
    """Workers of one gang and the coordinator's part in their jobs. `on` may answer a frame in another way:
    on(gang, worker index, frame) → True: dealt with."""

    def __init__(self, count, roots, on=None, **kw):
        self.workers = [Worker(roots, index=i, count=count, **kw) for i in range(count)]
        self.generation, self.on, self.seen, self.plan, self.made = 0, on, [], None, None
        self.deadline_ms = 30000  # as in the daemon: a machine may be busy

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def start(self, kind, spec, state_dicts=None, dry_run=False, job=None, attempt=1):
        """state_dicts: name → Segments. Their descriptors go with the frame, in order."""
        self.generation += 1
        self.seen, self.plan, self.made, self.segments, self.waiting = [], None, Segments(), [], set()
        docs = {}
        for name, s in (state_dicts or {}).items():
            docs[name] = s.doc(7)
            for r in docs[name]["ranks"]:
                r["fd"] += len(self.segments)
            self.segments += s.fds
        self.id = job or f"01TEST{time.time_ns():020d}"[:26]
        self.meeting = {}
        group = {"group_id": self.generation, "secret": os.urandom(32).hex(), "deadline_ms": self.deadline_ms}
        self.workers[0].send("JOB", self.generation, {"job": self.id, "attempt": attempt, "uid": os.geteuid(), "admin": True, "kind": kind,
                                                      "dry_run": dry_run, "spec": spec, "state_dicts": docs, "comm": group},
                             self.segments)

    def job(self, kind, spec, *args, seconds=300, **kw):
        self.start(kind, spec, *args, **kw)
        return self.finish(seconds)

    def finish(self, seconds=300):
        """Until every worker that has a part in the job has ended it. The leader's end, or that of a peer that failed first."""
        until, leader, bad = time.monotonic() + seconds, None, None
        while leader is None or self.waiting:
            for i, f in self.frames(max(0.01, until - time.monotonic())):
                if f.type == "IO":
                    continue
                self.seen.append((i, f.type))
                if self.on and self.on(self, i, f):
                    continue
                if f.type not in ("DONE", "FAILED"):
                    self.answer(i, f)
                    continue
                end = End(f.type, f.body)
                self.waiting.discard(i)
                if i == 0:
                    leader = end
                if f.type == "FAILED":
                    if bad is None:
                        for p in self.waiting | ({0} if leader is None else set()):
                            self.workers[p].send("CANCEL", self.generation, {})
                    if bad is None or bad.body["code"] == "cancelled":  # who heard of a failure says less than who had it
                        bad = end
                elif not self.waiting and not bad and leader is None:
                    self.workers[0].send("PEERS_DONE", self.generation, {})
        return bad or leader

    def frames(self, seconds):
        got = [(i, f) for i, w in enumerate(self.workers) for f in [w.whole()] if f]
        if got:
            return got
        ready = select.select([w.sock for w in self.workers], [], [], seconds)[0]
        if not ready:
            raise TimeoutError("the gang says nothing")
        return [(i, w.recv(io=True)) for i, w in enumerate(self.workers) if w.sock in ready]

    def meet(self, i, f):
        """Each of `size` members sends one; then each gets all."""
        self.meeting[i] = f.body
        if len(self.meeting) == f.body["size"]:
            for w in range(f.body["size"]):
                self.workers[w].send("RENDEZVOUS_ALL", self.generation, {"round": f.body["round"], "all": [
                    self.meeting[k]["data"] for k in range(f.body["size"])]})
            self.meeting = {}

    def answer(self, i, f):
        leader = self.workers[0]
        if f.type == "RUN":
            for i, w in enumerate(self.workers[1:], 1):
                w.send("RUN", self.generation, f.body, f.fds + self.segments)
                self.waiting.add(i)
            for fd in f.fds:
                os.close(fd)
        elif f.type == "RENDEZVOUS":
            self.meet(i, f)
        elif f.type == "WANT_COMMIT":
            leader.send("COMMIT_OK", self.generation, {})
        elif f.type == "WANT_SEGMENTS":
            for r in f.body["ranks"]:
                self.made.make(r["bytes"])
            self.segments += self.made.fds
            leader.send("SEGMENTS", self.generation, {"ranks": [{"rank": r["rank"], "fd": i, "bytes": r["bytes"]}
                                                                for i, r in enumerate(f.body["ranks"])]}, self.made.fds)
        elif f.type == "STATE":
            self.plan = f.body.get("plan", self.plan)

    def close(self):
        ends = [w.close() for w in self.workers]
        assert not any("Sanitizer" in log for _, log in ends), "".join(log for _, log in ends)


def at(name, storage="out"):
    return {"storage": storage, "name": name}


def done(end):
    """The result of a job that went well, or the plan of a dry run."""
    assert end.kind == "DONE", end.body
    return end.body.get("result", end.body.get("plan", end.body))


def failed(end, code):
    assert end.kind == "FAILED", end.body
    assert end.body["code"] == code, end.body
    assert end.body["detail"]
    return end.body


def ask(roots, fds=(), **question):
    """One question to a look-up worker: (answer's body, descriptors). The worker must say nothing else."""
    w = Worker(roots, role="lookup")
    try:
        w.send("LOOKUP", 1, question, fds)
        f = w.recv()
        assert f.type == "ANSWER", f
        return f.body, f.fds
    finally:
        rc, log = w.close()
        assert rc == 0, log
