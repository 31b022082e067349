"""Clients that ask and do not read: what is kept for them is counted and bounded, others are served, and readers get every byte."""
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import dcpd as lib
from unread import Unread, memfds

MIB = 1 << 20
LIMIT = 256 * MIB  # server/unread.h


@pytest.fixture
def big(spawn):
    """big(deadline, MiB) → a daemon with a checkpoint of a tensor of that size and a small one, and the tensor's bytes."""
    def make(deadline, mib=64):
        d = spawn(args=["--lookup-deadline", deadline])
        data = os.urandom(MIB) * mib
        d.put("s", [lib.image({"w": ("U8", [mib, MIB], data), "b": ("U8", [8], b"abcdefgh")})])
        d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": "x"})
        d.drop("s")
        return d, data
    return make


def test_slices_that_nobody_reads(big):
    """Of twelve slices of 64 MiB those within the limit are made; the others are told to come again; small ones pass."""
    d, data = big("2s")
    path = d.api.storage_path("main", "x", "/tensors/")
    asked = [Unread(d, path + "w") for _ in range(12)]
    peak, end = 0, time.monotonic() + 6
    while time.monotonic() < end:
        peak = max(peak, memfds(d))
        time.sleep(0.02)
    assert 0 < peak <= LIMIT, f"{peak / MIB:.0f} MiB of slices wait for their readers"
    assert d.api.get(path + "b").body == b"abcdefgh"
    with ThreadPoolExecutor(len(asked)) as pool:  # one after the other, the last ones may be cut as idle on a slow machine
        got = list(pool.map(Unread.read, asked))
    assert {s for s, _, _ in got} == {200, 503}
    assert all(body == data for s, _, body in got if s == 200)
    busy = [(head, body) for s, head, body in got if s == 503]
    assert all("Retry-After: 1" in head and b'"code":"busy"' in body and b'"retryable":true' in body for head, body in busy)
    for u in asked:
        u.close()
    assert d.api.get(path + "w").body == data, "there is room again"


@pytest.mark.long
def test_a_reader_that_dawdles_is_cut(big):
    """A client that takes a few bytes now and then, so that its connection never idles, does not keep its room for ever."""
    d, _ = big("2s", 4)
    slow = Unread(d, d.api.storage_path("main", "x", "/tensors/w"))
    lib.wait_for(lambda: memfds(d) == 4 * MIB, 10, "the slice")
    start = time.monotonic()
    while memfds(d):  # it may take 60 s, and one more for each 128 KiB
        assert time.monotonic() < start + 120, "it still has its room"
        slow.s.recv(64 << 10)
        time.sleep(2)
    assert time.monotonic() > start + 85, "it was cut for another reason"


@pytest.mark.long
def test_readers_wait_for_each_other(big):
    """Six that do read: each waits until there is room for its slice, none is refused."""
    d, data = big("120s")
    path = d.api.storage_path("main", "x", "/tensors/w")
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda _: d.api.get(path), range(6)))
    assert [a.status for a in got] == [200] * 6 and all(a.body == data for a in got)


@pytest.mark.long
def test_a_slice_beyond_the_limit_comes_alone(big):
    """One of 320 MiB is made when nothing else waits for its reader, and not before."""
    d, _ = big("2s", 320)
    path = d.api.storage_path("main", "x", "/tensors/w")
    first = Unread(d, path + "?slice=0:128")
    lib.wait_for(lambda: memfds(d) == 128 * MIB, 10, "the first slice")
    d.api.get(path).problem("busy", status=503)
    first.read()
    first.close()
    lib.wait_for(lambda: memfds(d) == 0, 10, "the first slice gone")
    assert len(d.api.get(path).body) == 320 * MIB


@pytest.mark.long
def test_answers_of_json_are_counted_too(big):
    """While all room waits for its reader, a long list is refused, a short one is not; then there is room for both."""
    d, _ = big("2s", 256)
    values = {f"v{i:03}": {"json": "x" * 1000} for i in range(200)}
    d.put("s", [lib.image({"w": ("U8", [1], b"x")}, {"version": 1, "values": values})])
    held = Unread(d, d.api.storage_path("main", "x", "/tensors/w"))
    lib.wait_for(lambda: memfds(d) == 256 * MIB, 10, "the slice")
    p = d.api.get("/v1/state-dicts/s/tensors?page_size=200").problem("busy", status=503)
    assert p["retryable"] and "not read" in p["detail"], p
    d.api.get("/v1/state-dicts/s/tensors?page_size=10").ok(200)
    held.close()
    lib.wait_for(lambda: memfds(d) == 0, 10, "the slice gone")
    d.api.get("/v1/state-dicts/s/tensors?page_size=200").ok(200)


@pytest.mark.long
def test_what_was_done_is_told_though_there_is_no_room(big):
    """A job is made while all room waits for its reader: the answer is its record, however long, and no `busy` that would deny it."""
    d, _ = big("2s", 256)
    held = Unread(d, d.api.storage_path("main", "x", "/tensors/w"))
    lib.wait_for(lambda: memfds(d) == 256 * MIB, 10, "the slice")
    spec = {"source": {"storage": "main", "name": "x"}, "include": [f"{'b' * 100}{i}" for i in range(1000)]}
    made = d.api.post("/v1/jobs", {"kind": "reshard", **spec, "target": {"storage": "main", "name": "y"}})
    assert made.status == 202 and len(made.body) > 100_000, made.body[:300]
    d.api.get(f"/v1/jobs/{made.json['id']}").problem("busy", status=503)
    held.close()
    d.api.wait(made.json["id"])


@pytest.mark.long
def test_pages_have_a_limit_in_bytes(spawn):
    """1,000 values of 20 KB, asked for at once: pages are shorter than that, and together they are all."""
    d = spawn()
    values = {f"v{i:03}": {"json": "x" * 20000} for i in range(1000)}
    d.put("s", [lib.image({"w": ("U8", [1], b"x")}, {"version": 1, "values": values})])
    found, token, pages = [], "", 0
    while token is not None:
        a = d.api.get(f"/v1/state-dicts/s/tensors?page_size=1000&page_token={token}")
        p = a.ok(200)
        assert len(a.body) < 8 * MIB
        found, token, pages = found + [v["fqn"] for v in p["values"]], p.get("next_page_token"), pages + 1
    assert found == sorted(values) and pages > 2


def test_bodies_that_do_not_end(spawn):
    """Of sixty requests with bodies of nearly 1 MiB each that stop before their end, those beyond 32 MiB are refused, no small one."""
    d = spawn()
    body = b'{"boxes":[' + b" " * (MIB - 100) + b"]}"
    asked = [Unread(d, "/v1/checkpoints/main/x:locate", body, sent=len(body) - 1) for _ in range(60)]
    time.sleep(0.5)
    d.api.post("/v1/checkpoints/main/x:locate", {"boxes": []}).problem("not_found", status=404)
    got = []
    for u in asked:
        u.s.sendall(body[-1:])
        got.append(u.read())
        u.close()
    assert {s for s, _, _ in got} == {404, 503} and [s for s, _, _ in got].count(404) >= 30, [s for s, _, _ in got]
    assert all(b'"code":"busy"' in b and "Retry-After" in h for s, h, b in got if s == 503)
    d.api.post("/v1/checkpoints/main/x:locate", body).problem("not_found", status=404)
