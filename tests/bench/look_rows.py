"""Bench rows of looking inside.

`format.stats`: a job of statistics over a checkpoint on the disk, cold, digests checked; the peer is fio's sequential read.
`format.stats.warm`: the same out of the page cache; the peer is a verify of it, which reads and compares the same bytes.
`format.slice_sparse`: 1 MiB by HTTP out of a sparse safetensors file of 100 GiB, warm; the peer is the limit, 10 ms.
"""
import json
import os
import shutil
import struct
import subprocess
import time

import dcpd as lib
from measure import TESTBIN

RUNS, SLICES = 3, 20
ROWS, COLUMNS = 25600, 1 << 20   # float32: 100 GiB


def stats(bench, d, size, drop_caches):
    def no_gang():
        return all(w["role"] != "gang" for w in d.api.get("/v1/workers").ok(200)["workers"])

    def timed(kind, **more):
        lib.wait_for(no_gang, 10, "the gang is gone, and what it had counted")
        os.truncate(d.state / "stats.cache", 0)  # what gangs leave for later ones
        start = time.monotonic()
        result = d.api.run(kind, source={"storage": "look", "name": "a"}, seconds=600, **more)["result"]
        assert result["verified_bytes"] >= size and not result.get("cached")
        return size / (time.monotonic() - start) / 1e9

    subprocess.run([TESTBIN / "tools/fill", "look", "4", "16", str(size // (1 << 20) // 16)], check=True,
                   env={**os.environ, "DCPD_URL": f"unix://{d.socket}"}, stdout=subprocess.DEVNULL)
    d.api.run("save", seconds=600, source={"state_dict": "look"}, target={"storage": "look", "name": "a"})
    d.drop("look")
    bench.fio("write")
    cold, disk, warm, verify = [], [], [], []
    for _ in range(RUNS):
        if not drop_caches():
            break
        cold.append(timed("stats"))
        drop_caches()
        disk.append(bench.fio("read"))
    timed("verify")
    for _ in range(RUNS):
        warm.append(timed("stats"))
        verify.append(timed("verify"))
    if cold:
        bench.row("format.stats", "GB/s", ">=0.80", "fio sequential read", cold, disk, "dcpctl stats look:a, cold")
    bench.row("format.stats.warm", "GB/s", ">=0.30", "verify of the same", warm, verify, "dcpctl stats look:a, warm")


def slice_sparse(bench, d, root):
    head = json.dumps({"w": {"dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [0, ROWS * COLUMNS * 4]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(root / "sparse.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        f.truncate(8 + len(head) + ROWS * COLUMNS * 4)
        f.seek(8 + len(head) + 12345 * COLUMNS * 4)
        f.write(b"\1" * (1 << 20))
    path, took = d.api.storage_path("look", "sparse.safetensors", "/tensors/w?slice=12345:12346,0:262144"), []
    for _ in range(SLICES + 1):
        start = time.monotonic()
        body = d.api.get(path).body
        took.append(time.monotonic() - start)
        assert body == b"\1" * (1 << 20)
    bench.row("format.slice_sparse", "s", "<=1.00", "10 ms", took[1:], [0.010], "GET …/tensors/w?slice=12345:12346,0:262144")


def rows(bench, size, drop_caches):
    if not any(bench.wants(n) for n in ("format.stats", "format.stats.warm", "format.slice_sparse")):
        return
    root = bench.disk / "look"
    root.mkdir()
    d = lib.Daemon(bench.disk / "look-home", {"look": root}, args=("--gang-idle", "100ms"))
    try:
        if bench.wants("format.slice_sparse"):
            slice_sparse(bench, d, root)
        if bench.wants("format.stats") or bench.wants("format.stats.warm"):
            stats(bench, d, size, drop_caches)
    finally:
        d.discard()
        shutil.rmtree(root)
