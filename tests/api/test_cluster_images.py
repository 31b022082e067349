"""State dicts in the memory of other nodes as sources of jobs."""
import http.client
import http.server
import json
import os
import threading
import time

import etcd  # noqa: F401
import pytest
from test_cluster import cluster, pair, server  # noqa: F401
from test_images import images

import dcpd as lib


def source(sd, node="a", **more):
    return {"state_dict": sd, "node": node, **more}


def test_a_node_loads_what_lies_in_the_memory_of_another(pair):
    a, b = pair
    sd, data = lib.fresh(), images(seed=5)
    a.put(sd, data, generation=11)
    job = b.api.run("load", source=source(sd), target={"state_dict": "whole", "world_size": 1})
    assert job["source"] == source(sd, generation=11), "the generation that it had then"
    done = job["result"]
    assert done["unverified_bytes"] == 0 and done["verified_bytes"] >= 64 and done["values"] == 1
    (whole,) = b.images("whole")
    assert whole.entries["w"][2] == b"".join(lib.Image(i).entries["w"][2] for i in data) and whole.values["step"]["json"] == 5
    b.api.run("load", source=source(sd), target={"state_dict": "columns", "world_size": 4,
                                                 "layout": [{"match": "*", "placements": ["Shard(1)"]}]})
    assert [i.entries["w"][1] for i in b.images("columns")] == [[8, 2]] * 4
    a.put(sd, images(seed=6), generation=12, create=False)
    assert b.ctl("load", f"shm:a/{sd}", "shm:whole").returncode == 0, "into what is there"
    assert b.images("whole")[0].values["step"]["json"] == 6
    old = b.api.run("load", source=source(sd, generation=11), target={"state_dict": "old", "world_size": 1})
    assert b.images("old")[0].values["step"]["json"] == 5 and old["result"]["unverified_bytes"] == 0
    assert b.api.get("/v1/storages").ok(200)["storages"][0]["name"] == "main" and len(b.api.get("/v1/storages").ok(200)["storages"]) == 1


def test_without_a_layout_it_is_what_lies_there_rank_for_rank(pair):
    """Replicas that differ, values of each rank, several chunks of a tensor, an empty rank, filler and rules."""
    a, b = pair
    sd = lib.fresh()
    layout = [{"match": "r", "placements": ["Replicate()"]}]
    part = lambda r: {"fqn": "w", "global_shape": [8, 8], "offsets": [4 * r, 0]}
    data = [lib.image({"w": ("U8", [2, 8], bytes([r] * 16)), "v": ("U8", [2, 8], bytes([9 + r] * 16)), "r": ("F32", [3], bytes([r] * 12)),
                       "none": ("F32", [0], b"")},
                      {"tensors": {"w": part(r), "v": {**part(r), "offsets": [4 * r + 2, 0]},
                                   "r": {"fqn": "r", "global_shape": [3], "offsets": [0]}},
                       "values": {"rank": {"json": r}}, "layout": layout}) for r in range(2)] + [lib.image({})]
    a.put(sd, data, generation=4)
    done = b.api.run("load", source=source(sd), target={"state_dict": sd})["result"]
    assert done["unverified_bytes"] == 0 and done["world_size"] == 3
    assert [b.api.get(f"/v1/state-dicts/{sd}/ranks/{r}/image").body for r in range(3)] == data
    plan = b.api.post("/v1/jobs?dry_run=true", {"kind": "load", "source": source(sd), "target": {"state_dict": "y"}}).ok(200)
    assert plan["loads"] is True


def test_what_is_not_there_is_refused_with_the_nodes_words(pair):
    a, b = pair
    sd = lib.fresh()
    body = {"kind": "load", "source": source(sd), "target": {"state_dict": "x"}}
    p = b.api.post("/v1/jobs", body).problem("not_found", status=404)
    assert p["detail"].startswith('node "a": ') and sd in p["detail"]
    a.create(sd, 1, 2)
    assert b.api.post("/v1/jobs", body).problem("not_sealed", status=409)["detail"].startswith('node "a": ')
    b.api.post("/v1/jobs", {**body, "source": source(sd, "c")}).problem("not_found")
    b.api.post("/v1/jobs", {**body, "source": source(sd, "a/b")}).problem("name_invalid")
    b.api.post("/v1/jobs", {**body, "source": {"state_dict": sd}}).problem("unknown_field")
    a.kill()
    assert b.api.post("/v1/jobs", body).problem("cluster_unavailable")["retryable"]


class Proxy:
    """A node "evil", whose answers are those of `to`, changed: change(path, status, headers, body) → the same three, or None: hang up.
    request(path, body) → the body that `to` gets. instead: it has the name of `to`, too, whom the other nodes do not reach otherwise."""

    def __init__(self, etcd, prefix, to, instead=False):
        self.change, self.request, self.asked = lambda path, *answer: answer, lambda path, body: body, []
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                proxy.asked.append((self.path, dict(self.headers)))
                c = http.client.HTTPConnection("127.0.0.1", to.http)
                heads = {k: v for k, v in self.headers.items() if k not in ("Host", "Content-Length")} | {"Host": f"127.0.0.1:{to.http}"}
                try:
                    body = proxy.request(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
                    c.request(self.command, self.path, body or None, heads)
                    r = c.getresponse()
                    changed = proxy.change(f"{self.path} {self.headers.get('Range')}", r.status, dict(r.getheaders()), r.read())
                except OSError:
                    changed = None
                if changed is None:
                    self.close_connection = True
                    return
                status, headers, body = changed
                self.send_response_only(status)
                for k, v in headers.items():
                    self.send_header(k, v)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_DELETE = do_GET

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, address):
                """Who asked has hung up."""

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.server.server_port}"
        if instead:
            row = f"{prefix}/members/{to.name}"
            etcd.put(row, json.dumps(etcd.keys(f"{prefix}/members/")[row] | {"advertise": url[7:], "url": url}))
            return
        member = {"id": "e", "mark": "evil", "advertise": url[7:], "url": url, "version": "1", "protocol": 1, "storages": []}
        etcd.put(f"{prefix}/members/evil", json.dumps(member))
        etcd.put(f"{prefix}/alive/evil", json.dumps({"id": "e", "advertise": url[7:], "jobs": 0, "draining": False}))

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def evil(cluster, server, tmp_path):
    """(proxy, a, b, state dict): the proxy stands for a."""
    a, b = cluster("a", "b")
    proxy = Proxy(server, f"/{tmp_path.name}", a)
    b.sees(a="joined", b="joined", evil="joined")
    sd = lib.fresh()
    big = bytes(range(256)) * (5 << 12)  # 5 MiB: more than a block
    a.put(sd, [lib.image({"big": ("U8", [len(big)], big), "w": ("F32", [2], bytes(8))})], generation=1)
    yield proxy, a, b, sd
    proxy.close()


def is_image(path):
    return "/image" in path


def flipped(body, at):
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


# What a node may send in place of what it was asked for, and the error that this is. Of ranges: those of the load, not the one that the
# daemon asks for before it takes the job.
OF_IMAGE = {
    "another byte": ("digest_mismatch", lambda s, h, b: (s, h, flipped(b, len(b) // 2) if len(b) > 4096 else b)),
    "a shorter body": ("cluster_unavailable storage_io", lambda s, h, b: (s, {**h, "Connection": "close"}, b[:-1])),
    "another length": ("storage_io", lambda s, h, b: (s, {**h, "Content-Length": str(len(b) - 1)}, b[:-1])),
    "another range": ("storage_io", lambda s, h, b: (s, {**h, "Content-Range": "bytes 0-7/9"}, b)),
    "another generation": ("checkpoint_replaced", lambda s, h, b: (s, {**h, "ETag": '"x-1"'}, b)),
    "all of the image": ("storage_io checkpoint_replaced", lambda s, h, b: (200, h, b)),
}
OF_DIGESTS = {
    "no digests": ("format_manifest", lambda s, h, b: (s, {**h, "Content-Length": "2"}, b"{}")),
    "damaged digests": ("checkpoint_damaged format_manifest", lambda s, h, b: (s, h, flipped(b, len(b) // 2))),
    "no secret": ("forbidden", lambda s, h, b: (401, {"Content-Length": "0"}, b"")),
    "no words": ("storage_io", lambda s, h, b: (418, {"Content-Length": "3"}, b"\0\xff{")),
    "nothing": ("cluster_unavailable storage_io", lambda s, h, b: None),
}
LIES = OF_IMAGE | OF_DIGESTS


def is_asked_first(path):
    """By the daemon, before it takes the job."""
    return "bytes=0-7" in path


@pytest.mark.long
@pytest.mark.parametrize("lie", [pytest.param(k, marks=() if i in (0, 1, 4, 6) else pytest.mark.long) for i, k in enumerate(LIES)])
def test_what_a_node_says_wrong_is_an_error_and_never_data(evil, lie):
    proxy, a, b, sd = evil
    codes, change = LIES[lie]
    where = is_image if lie in OF_IMAGE else lambda path: "/digests" in path
    proxy.change = lambda path, *answer: change(*answer) if where(path) and not is_asked_first(path) else answer
    b.api.fails("load", *codes.split(), source=source(sd, "evil"), target={"state_dict": "x"})
    b.api.get("/v1/state-dicts/x").problem("not_found")
    proxy.change = lambda p, *answer: answer
    done = b.api.run("load", source=source(sd, "evil"), target={"state_dict": "x"})["result"]
    assert done["unverified_bytes"] == 0
    assert b.images("x")[0].entries == a.images(sd)[0].entries


@pytest.mark.long
def test_a_node_that_is_killed_or_paused_while_it_is_read_ends_the_job(evil):
    proxy, a, b, sd = evil
    done = []

    def dies(path, *answer):
        if is_image(path) and not done and not is_asked_first(path):
            done.append(path)
            a.kill()
            return None
        return answer

    proxy.change = dies
    assert b.api.fails("load", "cluster_unavailable", "storage_io", source=source(sd, "evil"), target={"state_dict": "x"})
    a.start()
    a.sees(a="joined", b="joined", evil="joined")
    proxy.change = lambda path, *answer: time.sleep(12 if is_image(path) and not is_asked_first(path) else 0) or answer
    p = b.api.fails("load", "cluster_unavailable", source=source(sd, "evil"), target={"state_dict": "x"})
    assert p["detail"].startswith('node "evil"') and p["retryable"]


@pytest.mark.long
def test_a_load_goes_on_when_its_own_node_is_killed(evil):
    proxy, a, b, sd = evil
    waits = threading.Event()
    proxy.change = lambda path, *answer: answer if is_asked_first(path) or not is_image(path) or waits.wait(20) else None
    job = b.api.submit("load", source=source(sd, "evil"), target={"state_dict": "x"})
    lib.wait_for(lambda: any("/digests" in path for path, _ in proxy.asked), 20, "it is under way")
    b.kill()
    waits.set()
    b.start()
    assert b.api.wait(job)["state"] == "succeeded"
    assert b.images("x")[0].entries == a.images(sd)[0].entries


def test_a_worker_of_another_node_may_read_images_and_nothing_else(evil):
    proxy, a, b, sd = evil
    b.api.run("load", source=source(sd, "evil"), target={"state_dict": "x"})
    path, heads = next((p, h) for p, h in proxy.asked if "/digests" in p)
    key, secret = heads["Authorization"], server_secret(proxy, a)
    assert key != f"Bearer {secret}"
    far = lib.Client(tcp=("127.0.0.1", a.http))
    heads = {"Authorization": key, "Dcpd-Caller": f"{os.getuid()} 1 0 -"}
    assert far.get(path, headers=heads).status == 200
    assert far.get(path, headers={**heads, "Dcpd-Caller": "12345 1 0 -"}).problem("forbidden", "not_found")
    for other in ("/v1/jobs", f"/v1/state-dicts/{sd}", "/v1/nodes"):
        far.get(other, headers=heads).problem("forbidden")
    far.post("/v1/jobs", {"kind": "verify"}, headers={**heads, "Dcpd-Caller": "0 3 1 -"}).problem("forbidden")
    b.api.get("/v1/storages/@evil").problem("not_found")
    b.api.post("/v1/storages/@evil:meet", {"name": f"0a/{sd}/1", "token": "12345678"}).problem("not_found")
    far.get(path, headers={**heads, "Authorization": key[:-1] + ("0" if key[-1] != "0" else "1")}).problem("unauthenticated", "forbidden")


def server_secret(proxy, a):
    return next(h["Authorization"] for p, h in proxy.asked if "/image" in p)[7:]
