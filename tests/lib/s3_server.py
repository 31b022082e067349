"""Object storage for tests: SeaweedFS, a real server with conditional writes, on loopback; and Fake, one that misbehaves as it is told.

    with Server(folder) as s3: s3.endpoint, s3.bucket, s3.environment()
"""
import contextlib
import datetime
import email.utils
import http.client
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import urllib.parse
import zlib

from dcpd import ROOT, clean_environment, wait_for
from ports import free_ports

ACCESS, ACCESS_NEXT, SECRET = "AKIATESTS", "AKIANEXT", "secret/of+tests"
TOOL = pathlib.Path(os.environ.get("TESTBIN", ROOT / "build/test/release")) / "tools/s3_tool"
ENV, FILE, WEB_IDENTITY, CONTAINER, INSTANCE, NONE = range(1, 7)  # enum s3_credentials_from
GRPC = 10000  # SeaweedFS's own ports stand so far above those of HTTP


def environment_of_tools():
    """The interpreter of an environment with SeaweedFS and boto3, made once per user."""
    env = {k: v for k, v in os.environ.items() if k != "DCPD_TEST_VENV"}
    made = subprocess.run([ROOT / "tests/venv.sh", ROOT / "tests/lib/requirements-s3.txt"], env=env, check=True, stdout=subprocess.PIPE,
                          text=True)
    return pathlib.Path(made.stdout.strip()) / "bin/python"


# Lines of [code, args] become lines of [what it printed, what it raised].
PEER = """
import boto3, contextlib, io, json, sys, traceback
bucket, endpoint = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=endpoint)
for line in sys.stdin:
    code, args = json.loads(line)
    said, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            exec(code, {"s3": s3, "bucket": bucket, "args": args, "json": json})
    except Exception:
        error = traceback.format_exc()
    print(json.dumps([said.getvalue(), error]), flush=True)
"""


class Server:
    """SeaweedFS, all its parts in one process, with one bucket. threads: how many of Go's run at once; one takes a third less of the
    processors' time for small requests, for none wakes another."""

    bucket = "tests"
    region = "us-east-1"

    def __init__(self, folder, threads=None):
        self.folder, self.threads = pathlib.Path(folder), threads
        self.process = self.peer = None

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "data").mkdir()
        self.ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4, above=GRPC)))
        master, volume, filer, s3 = self.ports.values()
        keys = [{"accessKey": key, "secretKey": SECRET} for key in (ACCESS, ACCESS_NEXT)]
        reader = [{"accessKey": "AKIAREADER", "secretKey": SECRET}]
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [
            {"name": "all", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
            {"name": "reads", "credentials": reader, "actions": ["Read", "List"]}]}))
        self.endpoint = f"http://127.0.0.1:{s3}"
        self.log = open(self.folder / "weed.log", "wb")
        self.process = subprocess.Popen(
            [environment_of_tools().parent / "weed", "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
             f"-dir={self.folder}/data", f"-master.port={master}", "-master.electionTimeout=100ms", "-master.heartbeatInterval=20ms",
             "-master.volumeSizeLimitMB=1024", "-master.telemetry=false", f"-volume.port={volume}", "-volume.max=64",
             f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false",
             "-s3.autoCreateBucket=false", f"-s3.config={config}"],
            env={**os.environ, **({"GOMAXPROCS": str(self.threads)} if self.threads else {})}, stdout=self.log, stderr=subprocess.STDOUT,
            start_new_session=True)
        try:
            wait_for(lambda: self.make_bucket(filer), 20, "SeaweedFS", every=0.05)
            wait_for(self.answers, 20, "SeaweedFS's S3", every=0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def make_bucket(self, filer):
        """A folder of the filer's below /buckets is one."""
        assert self.process.poll() is None, (self.folder / "weed.log").read_text()[-4000:]
        with contextlib.suppress(OSError):
            c = http.client.HTTPConnection("127.0.0.1", filer, timeout=5)
            c.request("POST", f"/buckets/{self.bucket}/")
            return c.getresponse().status in (200, 201)

    def answers(self):
        """403 means that it asks for a signature, and that the bucket is known."""
        with contextlib.suppress(OSError):
            u = urllib.parse.urlsplit(self.endpoint)
            c = http.client.HTTPConnection(u.hostname, u.port, timeout=5)
            c.request("GET", f"/{self.bucket}")
            return c.getresponse().status == 403

    def boto3(self, code, *args):
        """Runs code that has `s3`, boto3's client, `bucket` and `args`, texts, and prints JSON; all in one process, whose start is slow."""
        if not self.peer:
            self.peer = subprocess.Popen([environment_of_tools(), "-c", PEER, self.bucket, self.endpoint], text=True,
                                         env=clean_environment(**self.environment()), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.peer.stdin.write(json.dumps([code, [str(a) for a in args]]) + "\n")
        self.peer.stdin.flush()
        said, error = json.loads(self.peer.stdout.readline())
        assert not error, error
        return json.loads(said or "null")

    def __exit__(self, *_):
        if self.peer:
            self.peer.communicate()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
        for name, port in self.ports.items():
            for socket_name in (f"{name}-grpc-{port + GRPC}", f"{name}-{port}"):
                pathlib.Path(f"/tmp/seaweedfs-{socket_name}.sock").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def environment(self, access=ACCESS, secret=SECRET):
        return {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": self.region}

    @contextlib.contextmanager
    def paused(self):
        """It neither answers nor reads, as a host that hangs."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)


class S3Error(Exception):
    def __init__(self, line):
        self.code, _, self.text = line.partition(" ")
        super().__init__(line)


class Tool:
    """tests/tools/s3_tool: a process with one S3 client of dcpd's."""

    def __init__(self, endpoint, bucket="tests", prefix="", env=None, **config):
        config.setdefault("credentials", ENV)
        env = {k: v for k, v in clean_environment(**(env or {})).items() if not k.startswith("AWS_") or k in (env or {})}
        self.process = subprocess.Popen([TOOL, endpoint, bucket, prefix, *(f"{k}={v}" for k, v in config.items())], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self.answer()
        except BaseException:
            self.close()
            raise

    def answer(self):
        rows = []
        while (line := self.process.stdout.readline().rstrip("\n")).startswith("- "):
            rows.append(line[2:].split("\t"))
        if line != "ok" and not line.startswith("ok "):
            raise S3Error(line)
        return rows or line[3:].split("\t")

    def __getattr__(self, command):
        def run(*words):
            self.process.stdin.write("\t".join([command, *map(str, words)]) + "\n")
            self.process.stdin.flush()
            return self.answer()
        return run

    def fails(self, code, command, *words):
        """The text of the error, which must be this one."""
        try:
            got = getattr(self, command)(*words)
        except S3Error as e:
            assert e.code == code, e
            return e.text
        raise AssertionError(f"{command} succeeded: {got}")

    def keys(self, prefix=""):
        rows = self.list(prefix)
        return [row[0] for row in rows] if rows != [""] else []

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) in (0, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---------------------------------------------------------------------------------------------------------------- a server that lies


def error(code, message="as the test says"):
    return f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>fake1</RequestId></Error>".encode()


class Fake:
    """A small S3 in memory. Before it answers, it takes the next of `script`: a function of the handler, which answers by itself and
    returns True, or lets the usual answer follow. `seen` has (verb, path, headers) of each request."""

    bucket = "tests"

    def __init__(self, host="127.0.0.1"):
        self.script, self.seen, self.objects, self.uploads, self.lock = [], [], {}, {}, threading.Lock()
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def serve(self):
                fake.serve(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve

            def log_message(self, *_):
                pass

        class Threaded(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass

        self.http = Threaded((host, 0), Handler)
        self.endpoint = f"http://{host}:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def reset(self, *script):
        with self.lock:
            self.script, self.seen, self.objects, self.uploads = list(script), [], {}, {}

    def serve(self, h):
        with self.lock:
            self.seen.append((h.command, h.path, {k.lower(): v for k, v in h.headers.items()}))
            step = self.script.pop(0) if self.script else None
        if step and step(h):
            return
        self.usual(h)

    def usual(self, h):
        body = h.rfile.read(int(h.headers.get("Content-Length") or 0))
        key, _, query = h.path.partition("?")
        key, query = urllib.parse.unquote(key), urllib.parse.parse_qs(query, keep_blank_values=True)
        mark = h.headers.get("x-amz-meta-dcpd-mark", "")
        with self.lock:
            if "uploads" in query or "uploadId" in query:
                return self.upload(h, key, query, body, mark)
            there = self.objects.get(key)
            if h.command == "PUT":
                return self.store(h, key, body, mark)
        if h.command == "DELETE":
            if there and h.headers.get("If-Match") not in (None, there[1]):
                return answer(h, 412, error("PreconditionFailed"))
            self.objects.pop(key, None)
            return answer(h, 204, b"")
        if not there:
            return answer(h, 404, error("NoSuchKey"))
        bytes_, etag, mark = there
        headers = {"ETag": etag, "x-amz-meta-dcpd-mark": mark, "Last-Modified": "Fri, 24 May 2013 00:00:00 GMT"}
        if span := h.headers.get("Range"):
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{min(last, len(bytes_) - 1)}/{len(bytes_)}"
            return answer(h, 206, bytes_[first:last + 1], **headers)
        return answer(h, 200, bytes_, **headers)


    def store(self, h, key, body, mark, said=""):
        there, wanted = self.objects.get(key), h.headers.get("If-Match")
        if (h.headers.get("If-None-Match") and there) or (wanted and (not there or there[1] != wanted)):
            return answer(h, 412, error("PreconditionFailed"))
        self.objects[key] = (body, f'"{zlib.crc32(body):08x}-{len(self.seen)}"', mark)
        return answer(h, 200, (said and f"<{said}><ETag>{self.objects[key][1]}</ETag></{said}>").encode(), ETag=self.objects[key][1])

    def upload(self, h, key, query, body, mark):
        if "uploads" in query:
            id_ = f"u{len(self.seen)}"
            self.uploads[id_] = (mark, {})
            said = "InitiateMultipartUploadResult"
            return answer(h, 200, f"<{said}><UploadId>{id_}</UploadId></{said}>".encode())
        mark, parts = self.uploads.get(query["uploadId"][0], (None, None))
        if parts is None:
            return answer(h, 404, error("NoSuchUpload"))
        if h.command == "PUT":
            parts[int(query["partNumber"][0])] = body
            return answer(h, 200, b"", ETag=f'"{zlib.crc32(body):08x}"')
        if h.command == "DELETE":
            del self.uploads[query["uploadId"][0]]
            return answer(h, 204, b"")
        return self.store(h, key, b"".join(parts[n] for n in sorted(parts)), mark, "CompleteMultipartUploadResult")


def answer(h, status, body, **headers):
    h.send_response(status)
    headers = {k.replace("_", "-"): v for k, v in headers.items()}
    headers.setdefault("Content-Length", str(len(body)))
    for k, v in headers.items():
        if v is not None:
            h.send_header(k, v)
    h.end_headers()
    if h.command != "HEAD":
        h.wfile.write(body)
    return True


def says(status, code="", **headers):
    def step(h):
        h.rfile.read(int(h.headers.get("Content-Length") or 0))
        return answer(h, status, error(code) if code else b"", **headers)
    return step


def cut(h):
    """The connection is reset without an answer."""
    h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    h.close_connection = True
    h.wfile = h.rfile = open(os.devnull, "r+b")
    h.connection.close()
    return True


def done_but_unheard(fake):
    """The request is carried out, and the answer lost."""
    def step(h):
        sent, h.wfile = h.wfile, open(os.devnull, "wb")
        fake.usual(h)
        h.wfile = sent
        return cut(h)
    return step


def hangs(seconds):
    def step(_):
        time.sleep(seconds)
        return False
    return step


# ---------------------------------------------------------------------------------------------------------------- a network that fails


def read_message(f):
    """The head of a message, its fields, and its body as it came. b"" for a connection that ended."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = f.readline(65536)
        if not line:
            return b"", {}, b""
        head += line
    fields = {k.strip(): v.strip() for k, v in (line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)}
    if fields.get(b"transfer-encoding") != b"chunked":
        return head, fields, None
    body = b""
    while True:
        size = f.readline()
        body += size + f.read(int(size, 16) + 2)
        if int(size, 16) == 0:
            return head, fields, body


def shifted(head, field, seconds):
    """The field's time is so much later."""
    def later(m):
        at = email.utils.parsedate_to_datetime(m[2].decode()) + datetime.timedelta(seconds=seconds)
        return m[1] + email.utils.format_datetime(at, usegmt=True).encode()

    return re.sub(rb"(?im)^(" + field + rb": )([^\r]+)", later, head)


STATUSES = {"500": (b"500 Internal", "InternalError"), "slow": (b"503 Slow Down", "SlowDown"),
            "conflict": (b"409 Conflict", "ConditionalRequestConflict"), "denied": (b"403 Forbidden", "AccessDenied"),
            "expired": (b"400 Bad Request", "ExpiredToken"), "skewed": (b"403 Forbidden", "RequestTimeTooSkewed")}


class Proxy:
    """Between dcpd and a server, on an address of its own. `fault(verb, path, number)` names what happens to a request, or nothing:

        "500", "slow"   the server is not asked: InternalError, SlowDown
        "cut"           the connection is reset before the server is asked
        "lost"          the server does it, and the answer is lost
        "late"          the connection is reset, and the server is asked when the test calls release()
        "conflict", "denied", "expired", "skewed"   the server is not asked: ConditionalRequestConflict, AccessDenied, …
        "short"         half of the answer's body comes, then a reset
        "flip_up", "flip_down"   one byte of what a PUT sends, or of what comes, is another
        a number        so many seconds pass before the server is asked
        a function      takes head and body of the answer, and returns those that are sent

    `head` is that of the request that fault() is asked about; `heard(verb, path, head, status)` is told of each that the server has
    answered. The server's clock is `clock` seconds ahead, in all that it says in headers;
    `age` more have passed since it wrote its objects.
    """

    def __init__(self, endpoint):
        u = urllib.parse.urlsplit(endpoint)
        self.server = (u.hostname, u.port)
        self.fault, self.head, self.heard = lambda verb, path, number: None, b"", lambda *_: None
        self.lock, self.count, self.done, self.late, self.clock, self.age = threading.Lock(), 0, [], [], 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def serve(self, client):
        with contextlib.suppress(OSError, ValueError), client, socket.create_connection(self.server) as server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked, answered = client.makefile("rb"), server.makefile("rb")
            while self.one(client, server, asked, answered):
                pass

    def release(self):
        """The status lines of what comes late."""
        said = []
        while self.late:
            with socket.create_connection(self.server) as server:
                server.sendall(self.late.pop(0))
                said.append(read_message(server.makefile("rb"))[0].split(b"\r\n")[0])
        return said

    def reset(self, client):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False

    def one(self, client, server, asked, answered):
        head, fields, _ = read_message(asked)
        if not head:
            return False
        body = bytearray(asked.read(int(fields.get(b"content-length", 0))))
        verb, path, _ = head.split(b" ", 2)
        with self.lock:
            self.count += 1
            self.head = head
            what = self.fault(verb.decode(), path.decode(), self.count)
            if what:
                self.done.append((what, verb.decode(), path.decode()))
        if what in STATUSES:
            status, code = STATUSES[what]
            text = error(code)
            text = b"" if verb == b"HEAD" else text
            date = email.utils.formatdate(time.time() + self.clock, usegmt=True).encode()
            client.sendall(b"HTTP/1.1 %s\r\nDate: %s\r\nContent-Length: %d\r\n\r\n%s" % (status, date, len(text), text))
            return True
        if what == "late":
            self.late.append(head + body)
        if what in ("cut", "late"):
            return self.reset(client)
        if isinstance(what, float):
            time.sleep(what)
        if what == "flip_up" and body and verb == b"PUT":
            body[len(body) // 2] ^= 1
        server.sendall(head + body)
        question, (head, fields, body) = head, read_message(answered)
        self.heard(verb.decode(), path.decode(), question, int(head.split(b" ")[1] if head else 0))
        for field, ahead in ((b"Date", self.clock + self.age), (b"Last-Modified", self.clock)):
            head = shifted(head, field, ahead) if ahead else head
        if body is None:
            empty = verb == b"HEAD" or head.split(b" ")[1] in (b"204", b"304")
            body = answered.read(0 if empty else int(fields.get(b"content-length", 0)))
        body = bytearray(body)
        if what == "lost":
            return self.reset(client)
        if what == "short" and body:
            client.sendall(head + body[:len(body) // 2])
            return self.reset(client)
        if what == "flip_down" and body:
            body[len(body) // 2] ^= 1
        if callable(what):
            head, body = what(head, bytes(body))
        client.sendall(head + body)
        return bool(head) and not callable(what)  # its length may be a lie
