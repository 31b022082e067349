"""A stand-in for dcpd's HTTP side, for states that are hard to bring about with the real one.

It serves the page out of web/ with the daemon's security headers, the lists that a test puts into it, and an event stream. A test
changes `fake.jobs` and friends, calls `emit`, or takes the daemon down and up again on the same port. Nothing here is timed: what
the page shows follows from what the test said.
"""

import json
import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

WEB = Path(__file__).resolve().parents[2] / "web"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
         ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
CSP = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # as api/req.c says
ENDED = ("succeeded", "failed", "cancelled")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *args):
        self.open = set()
        super().__init__(*args)

    def process_request(self, request, client_address):
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):
        self.open.discard(request)
        super().shutdown_request(request)

    def cut(self):
        """Kept-alive connections end too: their threads would go on answering."""
        for request in list(self.open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Fake:
    def __init__(self, token="s3cret"):
        self.token = token
        self.jobs = {}
        self.plans = {}
        self.checkpoints = []
        self.tensors = {}            # "STORAGE:NAME" → its tensors
        self.submitted = None        # answers POST /v1/jobs: request → job, or the detail of a refusal
        self.state_dicts = []
        self.device_images = []
        self.ranks = {}              # state dict → its ranks, which the list leaves out
        self.storages = []
        self.workers = []
        self.runs = []
        self.run = {}                # "STORAGE/RUN" → its record
        self.policies = []           # each with `preview`
        self.doctor = []
        self.capabilities = {"version": "0.0.0", "workers": 2, "kinds": [], "uid": 0, "host": {}, "backends": {}, "devices": [],
                             "shm": {"limit_bytes": 1 << 30, "used_bytes": 0, "free_bytes": 1 << 30, "orphaned_bytes": 0}}
        self.recorded = {}           # "GET /v1/jobs?page_size=200" → what was answered once: goes before all else
        self.nodes = {"nodes": []}   # of a cluster
        self.warnings = []           # of /readyz
        self.stalled = set()         # storages whose listing answers 504
        self.log = []                # (method, path with query, headers)
        self.streams = set()
        self.event_id = 0
        self.lock = threading.Lock()
        self.server = None
        self.port = 0
        self.up()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/"

    def up(self):
        fake = self

        class Handler(BaseHandler):
            owner = fake

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def down(self):
        """Streams end and the port is closed, as when the daemon was killed."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.end_streams()
        self.server.cut()

    def end_streams(self):
        with self.lock:
            for stream in self.streams:
                stream.put(None)
            self.streams.clear()

    def emit(self, kind, data):
        with self.lock:
            self.event_id += 1
            words = f"id: {self.event_id}\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
            for stream in self.streams:
                stream.put(words)

    def put_job(self, job, event="job.state"):
        self.jobs[job["id"]] = job
        self.emit(event, job)


class BaseHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner = None

    def log_message(self, *args):
        pass

    def send(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def json(self, value, status=200):
        self.send(status, json.dumps(value).encode())

    def problem(self, status, code, detail):
        body = {"type": f"/problems/{code}", "title": code, "status": status, "code": code, "detail": detail}
        self.send(status, json.dumps(body).encode(), "application/problem+json")

    def static(self, path):
        file = WEB / ("index.html" if path == "/" else path.lstrip("/"))
        if not file.resolve().is_relative_to(WEB) or not file.is_file():
            return self.problem(404, "not_found", path)
        return self.send(200, file.read_bytes(), TYPES[file.suffix])

    def listing(self, member, items, query):
        size = int(query.get("page_size", ["100"])[0])
        start = int(query.get("page_token", ["0"])[0])
        body = {member: items[start:start + size]}
        if start + size < len(items):
            body["next_page_token"] = str(start + size)
        self.json(body)

    def stream(self):
        mine = queue.Queue()
        with self.owner.lock:
            self.owner.streams.add(mine)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(b"retry: 100\n\n")
            while (words := mine.get()) is not None:
                raw = words.encode()
                self.wfile.write(raw[:7])        # an event may come in pieces
                self.wfile.flush()
                self.wfile.write(raw[7:])
        except OSError:
            pass

    def do_GET(self):
        fake = self.owner
        fake.log.append(("GET", self.path, dict(self.headers)))
        url = urlsplit(self.path)
        query, path = parse_qs(url.query), url.path
        if path == "/readyz":
            return self.json({"status": "ready", "warnings": fake.warnings})
        if not path.startswith("/v1/"):
            return self.static(path)
        if self.headers.get("Authorization") != f"Bearer {fake.token}":
            return self.problem(401, "unauthenticated", "A token is needed")
        if f"GET {self.path}" in fake.recorded:
            return self.json(fake.recorded[f"GET {self.path}"])
        parts = [unquote(p) for p in path.split("/")[2:]]
        match parts:
            case ["events"]:
                return self.stream()
            case ["jobs"]:
                return self.listing("jobs", sorted(fake.jobs.values(), key=lambda j: j["id"], reverse=True), query)
            case ["jobs", job] if job in fake.jobs:
                return self.json(fake.jobs[job])
            case ["jobs", job, "plan"] if job in fake.plans:
                return self.json(fake.plans[job])
            case ["doctor"]:
                return self.json({"findings": fake.doctor, "bad": sum(f["state"] == "bad" for f in fake.doctor)})
            case ["capabilities"]:
                return self.json(fake.capabilities)
            case ["policies"]:
                return self.json({"policies": fake.policies})
            case ["nodes"]:
                return self.json(fake.nodes)
            case ["runs"]:
                return self.listing("runs", [r for r in fake.runs if r["storage"] == query["storage"][0]], query)
            case ["runs", storage, run] if f"{storage}/{run}" in fake.run:
                return self.json(fake.run[f"{storage}/{run}"])
            case ["checkpoints", storage, name] if f"{storage}:{name}" in fake.tensors:
                return self.json({"name": name, "format": "dcp", "bytes": 1 << 20, "world_size": 2, "etag": "e", "dcpd": True,
                                  "tensors": len(fake.tensors[f"{storage}:{name}"]), "values": 0, "modified_at": "2026-01-01T00:00:00Z"})
            case ["checkpoints", storage]:
                if storage in fake.stalled:
                    return self.problem(504, "storage_stalled", f"storage {storage} does not answer")
                return self.listing("checkpoints", [c for c in fake.checkpoints if c["storage"] == storage], query)
            case ["checkpoints", storage, name, "tensors"] if f"{storage}:{name}" in fake.tensors:
                wanted = [t for t in fake.tensors[f"{storage}:{name}"] if t["fqn"].startswith(query.get("prefix", [""])[0])]
                return self.listing("tensors", wanted, query)
            case ["state-dicts"]:
                return self.listing("state_dicts", fake.state_dicts, query)
            case ["device-images"]:
                return self.json({"device_images": fake.device_images})
            case ["state-dicts", name] if name in fake.ranks:
                return self.json({"name": name, "ranks": fake.ranks[name]})
            case ["storages"]:
                return self.listing("storages", fake.storages, query)
            case ["workers"]:
                return self.listing("workers", fake.workers, query)
        return self.problem(404, "not_found", path)

    def do_POST(self):
        fake = self.owner
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        fake.log.append(("POST", self.path, dict(self.headers)))
        if self.headers.get("Authorization") != f"Bearer {fake.token}":
            return self.problem(401, "unauthenticated", "A token is needed")
        if f"POST {self.path}" in fake.recorded:
            return self.json(fake.recorded[f"POST {self.path}"])
        if self.path == "/v1/jobs" and fake.submitted:
            made = fake.submitted(json.loads(body))
            return self.problem(409, "busy", made) if isinstance(made, str) else self.json(made, 202)
        if self.path.startswith("/v1/nodes/"):
            name, _, verb = self.path.removeprefix("/v1/nodes/").partition(":")
            node = next(n for n in fake.nodes["nodes"] if n["name"] == unquote(name))
            node["state"] = "drained" if verb == "drain" else "joined"
            return self.json(node)
        name, _, verb = self.path.removeprefix("/v1/jobs/").partition(":")
        job = fake.jobs.get(unquote(name))
        if job is None:
            return self.problem(404, "not_found", self.path)
        if verb == "cancel" and job["state"] in ("committing", *ENDED):
            return self.problem(409, "state_conflict", f"the job is {job['state']}")
        changed = {**job, "state": "cancelled" if verb == "cancel" else "queued", "error": None}
        fake.put_job(changed)
        return self.json(changed, 200 if verb == "cancel" else 202)
