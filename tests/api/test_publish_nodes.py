"""Subscribers on other nodes than their publication's: what comes over the network, in what layout, and what becomes of them when nodes die
or are slow. On one host: test_publish.py."""
import socket
import struct

import etcd  # noqa: F401
import package
import pytest
from test_cluster import cluster, pair, server  # noqa: F401
from test_publish import arrives, columns, f32, publish, put, record, take

import dcpd as lib

BLOCK = 4 << 20
COLUMNS = [{"match": "w", "placements": ["Shard(1)"]}, {"match": "*", "placements": ["Replicate()"]}]


def big(step, changed=(), height=3072, width=1024):
    """One rank's image: w of 12 MiB, three blocks of digests; the first element of each block in `changed` is the step."""
    w = bytearray(struct.pack("<f", 1.0) * (height * width))
    for block in changed:
        w[block * BLOCK : block * BLOCK + 4] = struct.pack("<f", float(step))
    return [lib.image({"w": ("F32", [height, width], bytes(w))}, {"values": {"step": {"json": step}}})], bytes(w)


def delta(d, pub, sub, **more):
    return d.api.run("load", source={"state_dict": pub, "node": "a"}, target={"state_dict": sub, "world_size": 2, "layout": COLUMNS},
                     delta=True, **more)["result"]


def holds(d, sub, w, width=1024, item=4):
    row = item * width
    rows = [w[i : i + row] for i in range(0, len(w), row)]
    for rank, image in enumerate(d.images(sub)):
        assert image.entries["w"][2] == b"".join(r[rank * row // 2 : (rank + 1) * row // 2] for r in rows)


@pytest.mark.long
def test_only_blocks_that_changed_come_over_the_network(pair):
    a, b = pair
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    a.create(pub, 1, 2, publish={})
    images, w = big(1)
    put(a, pub, images, 1)
    first = delta(b, pub, sub)
    assert (first["changed_bytes"], first["kept_bytes"], first["generation"]) == (3 * BLOCK, 0, 1) and first["unverified_bytes"] == 0
    holds(b, sub, w)
    images, w = big(2, [1])
    put(a, pub, images, 2)
    second = delta(b, pub, sub)
    assert (second["changed_bytes"], second["kept_bytes"]) == (BLOCK, 2 * BLOCK) and second["read_bytes"] < 1.2 * BLOCK, second
    holds(b, sub, w)
    assert all(i.values["step"] == {"json": 2} for i in b.images(sub)), "values are on every rank"


def follow(d, sub, pub, world=2, layout=COLUMNS, node="a", rules=None, **more):
    where = {"node": node} if node else {}
    return d.create(sub, world, subscribe={"publication": pub, **where, "layout": layout, **(rules or {})}, **more)


def bfloat16(w):
    """Of float32 whose lower halves are zero."""
    out = bytearray(len(w) // 2)
    out[0::2], out[1::2] = w[2::4], w[3::4]
    return bytes(out)


@pytest.mark.parametrize("near", [False, True], ids=["from another node", "on its host"])
def test_a_subscriber_picks_renames_and_casts_and_gets_only_what_of_that_changed(pair, near):
    a, b = pair
    d = a if near else b
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    a.create(pub, 1, 2, publish={})

    def version(step, changed=()):
        _, w = big(step, changed)
        more = {n: ("F32", [1024], struct.pack("<f", step) * 1024) for n in ("model.bias", "model.scale", "optim.m")}
        values = {"model.step": {"json": step}, "lr": {"json": 0.1}}
        put(a, pub, [lib.image({"model.w": ("F32", [3072, 1024], w), **more}, {"values": values})], step)
        return bfloat16(w)

    w = version(1)
    rules = {"include": ["model.*"], "exclude": ["*.bias"], "rename": [["^model\\.", ""]], "dtype": [["w", "bfloat16"]]}
    follow(d, sub, pub, node=None if near else "a", rules=rules)
    rec = record(d, sub, -1)
    assert rec["generation"] == 1 and rec["subscribe"]["rename"] == rules["rename"], rec
    for step in (1, 2):
        if step == 2:
            take(d, sub, 1)
            w = version(2, [1])
            rec = record(d, sub, 1)
        holds(d, sub, w, item=2)
        for image in d.images(sub):
            assert {n: e[0] for n, e in image.entries.items() if not n.startswith("__")} == {"w": "BF16", "scale": "F32"}
            assert image.values == {"step": {"json": step}} and image.entries["scale"][2] == struct.pack("<f", step) * 1024
    got = rec["subscription"]
    changed = (BLOCK // 8 if near else BLOCK // 2) + 2 * 4096  # a piece with other bytes; the pieces of a block of the source
    assert (got["changed_bytes"], got["kept_bytes"]) == (changed, 3 * BLOCK // 2 + 2 * 4096 - changed), got
    job = d.api.get(f"/v1/jobs?filter=labels.subscriber={sub}").ok(200)["jobs"][0]
    assert near or job["result"]["read_bytes"] < 1.2 * BLOCK and job["result"]["unverified_bytes"] == 0, job["result"]


def test_the_same_bytes_under_another_dtype_are_another_version(pair):
    """A rule casts them: the subscriber's bytes are others, though the publisher's are not."""
    a, b = pair
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    a.create(pub, 1, 2, publish={})
    put(a, pub, [lib.image({"w": ("BF16", [4], struct.pack("<4H", *[0x3F80] * 4))})], 1)
    follow(b, sub, pub, rules={"dtype": [["w", "float32"]]}, world=1, layout=[])
    record(b, sub, -1)
    for step, kind, number in ((2, "F16", 1.875), (3, "F16", 1.875), (4, "BF16", 1.0)):
        take(b, sub, step - 1, [0])
        put(a, pub, [lib.image({"w": (kind, [4], struct.pack("<4H", *[0x3F80] * 4))})], step)
        rec = record(b, sub, step - 1)
        assert b.images(sub, step)[0].entries["w"][::2] == ("F32", f32([number] * 4))
        assert rec["subscription"]["kept_bytes"] == (16 if step == 3 else 0)


class Stalled:
    """A request for an image whose client stops reading after the head."""

    def __init__(self, d, name, generation):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(d.socket))
        path = f"/v1/state-dicts/{name}/ranks/0/image?generation={generation}"
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self.got = b""
        while b"\r\n\r\n" not in self.got:
            self.got += self.socket.recv(100)

    def rest(self, size):
        head, body = self.got.split(b"\r\n\r\n", 1)
        assert b" 200 " in head.split(b"\r\n")[0], head
        while len(body) < size and (more := self.socket.recv(1 << 20)):
            body += more
        return body


@pytest.mark.long
def test_versions_arrive_on_another_node_and_the_publisher_sees_who_has_them(pair):
    a, b = pair
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    follow(b, sub, pub)
    assert record(b, sub)["subscription"]["published"] is None, "the publication need not be there yet"
    publish(a, pub, 1, create=True)
    rec = arrives(b, sub, -1, 1)
    assert rec["subscribe"]["node"] == "a" and rec["subscription"]["published"] == 1
    publish(a, pub, 2)
    publish(a, pub, 3)
    assert record(b, sub)["generation"] == 1, "its ranks have not taken version 1: it keeps it"
    take(b, sub, 1)
    arrives(b, sub, 1, 3)  # version 2 is skipped
    take(b, sub, 3)

    def seen():
        got = a.api.get(f"/v1/publications/{pub}").ok(200)["subscribers"]
        return got and got[0]["subscription"]["applied"] == 3 and got[0]

    guest = lib.wait_for(seen, 10, "the publisher knows that version 3 is in use")
    assert (guest["name"], guest["node"], guest["world_size"], guest["subscription"]["lag_s"]) == (sub, "b", 2, 0)
    shown = a.ctl("publications").stdout
    assert pub in shown and [sub, "b", pub] in [row.split()[:3] for row in shown.splitlines()], shown
    follow(b, late := lib.fresh("late"), pub, 1)
    assert record(b, late, -1)["generation"] == 3, "who comes late begins at the newest"
    job = b.api.get(f"/v1/jobs?filter=labels.subscriber={late}").ok(200)["jobs"][0]
    counted = b.api.get("/metrics").body.decode(), a.api.get("/metrics").body.decode()
    assert ["dcpd_subscribers 2\n" in text for text in counted] == [True, False], "each node counts its own"
    assert job["kind"] == "load" and job["labels"] == {"publication": pub, "subscriber": late} and job["result"]["unverified_bytes"] == 0


def test_what_a_subscriber_on_another_node_spoils_is_mended(pair):
    """A piece is kept only if its bytes have the digest that they had."""
    a, b = pair
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    publish(a, pub, 1, create=True)
    follow(b, sub, pub)
    record(b, sub, -1)
    for step in (2, 3, 4):
        segment = next(s for s in record(b, sub)["ranks"][0]["slots"] if s["state"] == "sealed" and s["generation"] == step - 1)
        with open("/dev/shm" + segment["segment"], "r+b") as f:
            f.seek(segment["image_bytes"] - 8)
            f.write(b"\xff" * 8)
        take(b, sub, step - 1)
        publish(a, pub, step, w=1.0)
        record(b, sub, step - 1)
        for rank, image in enumerate(b.images(sub, step)):
            assert image.entries["w"][2] == columns(rank, 2, 1.0) and image.entries["b"][2] == f32([0.0] * 4)


@pytest.mark.long
def test_a_publishers_node_that_dies_ends_the_waits_of_its_subscribers(cluster):
    a, b = cluster("a", "b", args=["--cluster-ttl", "2s"])
    b.sees(a="joined", b="joined")
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    publish(a, pub, 1, create=True)
    follow(b, sub, pub)
    arrives(b, sub, -1, 1)
    take(b, sub, 1)
    a.kill()
    b.api.post(f"/v1/state-dicts/{sub}/ranks/0:renew?wait=30s", {"taken": 1}).ok(200)
    problem = record(b, sub)["subscription"]["problem"]
    assert problem["code"] == "publisher_away" and not problem["retryable"] and pub in problem["detail"], problem
    assert record(b, sub)["generation"] == 1, "it keeps what it has"
    a.start()
    lib.wait_for(lambda: "problem" not in record(b, sub)["subscription"], 20, "the node is back")
    publish(a, pub, 2)
    arrives(b, sub, 1, 2)


def test_a_reader_that_is_slow_never_stalls_the_publisher(pair):
    """A node that reads an old version holds none of the publisher's two slots once they are needed."""
    a, b = pair
    pub = lib.fresh("policy")
    a.create(pub, 1, 2, publish={})
    images, w = big(1)
    put(a, pub, images, 1)
    slow = Stalled(a, pub, 1)
    with slow.socket:
        for step in (2, 3, 4):
            put(a, pub, big(step)[0], step)  # a reservation waits for 10 s at most
        assert slow.rest(len(images[0])) == images[0], "what was being sent goes on to its end, as it was"
    a.api.get(f"/v1/state-dicts/{pub}/ranks/0/image?generation=1").problem("not_sealed")


REFUSED = [
    ({"node": "nobody"}, "not_found", "/subscribe/node"),
    ({"node": 7}, "validation_failed", "/subscribe/node"),
    ({"node": "a", "layout": 3}, "validation_failed", "/subscribe/layout"),
    ({"node": "a", "rename": [["w"]]}, "validation_failed", "/subscribe/rename/0"),
    ({"node": "a", "transform": []}, "validation_failed", "/subscribe/transform"),
]


@pytest.mark.parametrize("more, code, pointer", REFUSED)
def test_refused(pair, more, code, pointer):
    p = pair[1].api.post("/v1/state-dicts", {"name": lib.fresh(), "world_size": 1, "subscribe": {"publication": "p", **more}}).problem(code)
    assert p["pointer"] == pointer and p["detail"].startswith(f"{pointer}: ")


def test_a_publication_is_followed_and_a_subscribers_own_node_is_no_other_one(pair):
    a, b = pair
    pub, sub = lib.fresh("policy"), lib.fresh("serve")
    publish(a, pub, 1, create=True)
    assert b.api.post("/v1/state-dicts", {"name": sub, "world_size": 1, "subscribe": {"publication": pub, "node": "b"}}).ok(201)
    assert "node" not in record(b, sub)["subscribe"], "its own node is no other one"
    other = a.api.post(f"/v1/publications/{pub}:follow?wait=100ms", {"after": 1}).ok(200)
    assert other["generation"] == 1
    a.api.post("/v1/publications/nothing:follow", {}).problem("not_found")
    a.api.post(f"/v1/publications/{pub}:follow", {"subscriber": {"name": "x", "node": "b", "world_size": 0}}).problem("validation_failed")
    ghost = {"subscriber": {"name": "x", "node": "b", "world_size": 1}}
    p = a.api.post(f"/v1/publications/{pub}:follow", ghost).problem("forbidden", status=403)
    assert p["pointer"] == "/subscriber", "only daemons say who subscribes"
    assert a.api.get(f"/v1/publications/{pub}").ok(200)["subscribers"] == []


@pytest.mark.long
def test_the_package_serves_torch_tensors_of_another_node(pair):
    torch = pytest.importorskip("torch")
    a, b = pair
    pub = lib.fresh("policy")
    weights = lambda step: {"w": torch.arange(24.0).reshape(6, 4) + step, "half": torch.full((5,), float(step)).bfloat16(), "step": step}
    mine = {"w": torch.zeros(6, 4, dtype=torch.float64), "half": torch.zeros(5, dtype=torch.bfloat16), "step": 0}
    with package.daemon(f"unix://{a.socket}") as dcpd, dcpd.connect(f"unix://{b.socket}") as far:
        made = dcpd.publish(weights(1), pub, version=1)
        rows = [{"match": "w", "mesh": [2], "placements": ["Shard(0)"]}]
        with dcpd.subscribe(pub, node="a", into=mine, timeout=60, client=far) as filled, \
             dcpd.subscribe(pub, node="a", layout=rows, name=f"{pub}.half", world_size=2, rank=1, timeout=60, client=far) as part:
            far.state_dicts.renew(f"{pub}.half", 0)
            for step in (1, 2):
                if step > 1:
                    made = dcpd.publish(weights(2), pub, version=2)
                update = next(filled)
                far.state_dicts.renew(f"{pub}.half", 0, taken=step - 1 or None)
                assert update.version == step and torch.equal(mine["w"], weights(step)["w"].double()) and mine["step"] == step
                assert torch.equal(mine["half"], weights(step)["half"])
                half = next(part)
                assert torch.equal(half["w"], weights(step)["w"][3:]) and torch.equal(half["half"], weights(step)["half"])
                far.state_dicts.renew(f"{pub}.half", 0, taken=step)
            made.wait(60)
            assert {(s["node"], s["subscription"]["applied"]) for s in made.subscribers()} == {("b", 2)}
            assert made.client.publications.follow(pub, after=1)["generation"] == 2
        lib.wait_for(lambda: [s["name"] for s in made.subscribers()] == [f"{pub}.half"], 3, "who closes is not waited for")
        made.delete()
