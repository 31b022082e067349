"""Bench rows of lists: 30,000 checkpoints on the disk, and what a save waits for while clients list them.

`list.save.beside.N`: from the request of a small save to its end beside N whole lists, each read by pages of 1,000 by a client of its own;
the peer is the same save alone. `list.whole`: one client's whole list; the peer is os.walk() with os.stat() of all files. The checkpoints'
files are hard links of one .metadata.
"""
import http.client
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
sys.dont_write_bytecode = True

import dcpd as lib  # noqa: E402

COUNT, RUNS = 30000, 5
LINKS = 30000  # of one file: ext4 allows 65,000
BESIDE = (8, 40)


def make(root, count=COUNT):
    """run/step-000000 … in `root`."""
    source = lib.ROOT / "tests/fixtures/torch-2.15.0/sharded_rowwise/checkpoint/.metadata"
    for i in range(count):
        d = root / "run" / f"step-{i:06}"
        d.mkdir(parents=True)
        if i % LINKS == 0:
            shutil.copy(source, d)
        else:
            os.link(root / f"run/step-{i // LINKS * LINKS:06}/.metadata", d / ".metadata")


def whole_list(path):
    """One client: page after page, as long as the process lives."""
    c = lib.UnixConnection(path, 300)
    token = ""
    while True:
        c.request("GET", f"/v1/checkpoints/lists?page_size=1000&page_token={urllib.parse.quote(token)}")
        r = c.getresponse()
        body = r.read()
        assert r.status == 200, body
        token = body.rpartition(b'"next_page_token":"')[2].partition(b'"')[0].decode() if b'"next_page_token"' in body else ""


def clients(path, count):
    """`count` of them, in a process of their own."""
    for _ in range(count):
        threading.Thread(target=whole_list, args=(path,), daemon=True).start()
    sys.stdin.read()


def save(d, name):
    start = time.monotonic()
    d.api.run("save", source={"state_dict": "small"}, target={"storage": "lists", "name": f"saved/{name}"})
    return time.monotonic() - start


def beside(bench, d, alone, count):
    p = subprocess.Popen([sys.executable, __file__, str(d.socket), str(count)], stdin=subprocess.PIPE)
    try:
        time.sleep(1)
        ours = [save(d, f"{count}-{i}") for i in range(RUNS)]
        assert p.poll() is None and d.api.get("/v1/storages").ok(200)["storages"][0]["state"] == "ok"
    finally:
        p.kill()
        p.wait()
    bench.row(f"list.save.beside.{count}", "s", "<=5.00", "the same save alone", ours, alone,
              f"dcpctl save beside {count} lists of {COUNT:,}")


def read_all(d, count):
    """Seconds that one client takes for all pages."""
    start, token, names = time.monotonic(), "", 0
    while True:
        p = d.api.get(f"/v1/checkpoints/lists?prefix=run&page_size=1000&page_token={urllib.parse.quote(token)}").ok(200)
        names, token = names + len(p["checkpoints"]), p.get("next_page_token")
        if not token:
            break
    assert names == count
    return time.monotonic() - start


def whole(bench, d, root):
    ours, peer = [], []
    for _ in range(RUNS):
        ours.append(read_all(d, COUNT))
        start = time.monotonic()
        sizes = [os.stat(os.path.join(at, f)).st_size for at, _, files in os.walk(root / "run") for f in files]
        peer.append(time.monotonic() - start)
        assert len(sizes) == COUNT
    bench.row("list.whole", "s", "<=3.00", "os.walk, os.stat of all files", ours, peer, "GET /v1/checkpoints/lists?page_size=1000 …")


def rows(bench):
    if not any(bench.wants(n) for n in ("list.whole", *(f"list.save.beside.{n}" for n in BESIDE))):
        return
    root = bench.disk / "lists"
    make(root)
    d = lib.Daemon(bench.disk / "list-home", {"lists": root})
    try:
        d.put("small", [lib.image({"w": ("U8", [8], b"abcdefgh")})])
        save(d, "first")
        alone = [save(d, f"alone-{i}") for i in range(RUNS)]
        if bench.wants("list.whole"):
            whole(bench, d, root)
        for count in BESIDE:
            if bench.wants(f"list.save.beside.{count}"):
                beside(bench, d, alone, count)
    finally:
        d.discard()
        shutil.rmtree(root)


if __name__ == "__main__":
    try:
        clients(sys.argv[1], int(sys.argv[2]))
    except http.client.HTTPException:
        pass
