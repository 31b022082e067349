"""Bench rows of dcpd.torch under PyTorch's own save and load, beside FileSystemWriter and FileSystemReader: same tensors, same run, same
disk, durable beside durable (sync_files is PyTorch's default).

Three forms of a state dict: one rank with few large tensors, four ranks with DTensors, one rank with 2,500 small tensors. The processes
that are measured are tests/bench/dropin_peer.py.

The spread of `async.first` is the machine's: a GiB of pages that the host of a virtual machine has taken back takes 3.1 s to touch, one of
others 0.26 s (measured by MADV_POPULATE_WRITE of anonymous memory, Xeon, 2 CPUs).

Of four ranks' DTensors both sides write each byte once, to the same disk, and wait for it: `drop.dtensor.save.disk` and `.load.disk` show
what the disk gives. A first save takes what the disk takes, 0.98 of fio, and so does PyTorch's where the disk is slow: 0.77 to 0.94.

PyTorch's load copies each byte twice, out of the page cache and into the tensor, on all processors at once; ours once, and hashes it:
`drop.dtensor.load.memory` is beside memcpy. A load right after a save, of 512 MiB by four ranks on two CPUs, takes 87 ms: 40 are the bytes
with their digests (memcpy by two threads: 43), 27 PyTorch's own collectives, 20 the questions to the daemon. PyTorch takes 170, so that
0.41 is the least ratio, and 0.50 of memcpy what is left. Of a load of 10,000 small tensors 2.8 to 3.2 s are PyTorch's planning and its
garbage collector, of 5.2 to 6.7 that it takes as a whole: 0.5 is the least there.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import python_rows

HERE = pathlib.Path(__file__).resolve().parent
FORMS = {"few": (1, 3), "dtensor": (4, 3), "small": (1, 2)}  # ranks, runs
GOALS = {"drop.few.load.after_async": "<=0.30", "drop.dtensor.load.after_async": "<=0.55", "drop.small.load.after_async": "<=0.70",
         "drop.few.save": "<=0.70", "drop.few.save.first": "<=0.70", "drop.dtensor.save": "<=1.00", "drop.dtensor.save.first": "<=1.00"}
LIMIT_S = 1200
WHAT = {"save": "save to a new name, the second of two", "save.first": "save into new segments, imports done",
        "async": "what async_save keeps the caller, the second of two", "async.first": "the same into new segments",
        "load.after_async": "load of what that save wrote, right after it",
        "load": "load, files in the page cache", "load.first": "the same, segments new", "load.cold": "load, caches dropped, segments new"}


def rows(bench, size):
    """size: bytes of a state dict of large tensors."""
    for form, (ranks, runs) in FORMS.items():
        names = {k: f"drop.{form}.{k}" for k in WHAT}
        if any(bench.wants(n) for n in names.values()):
            got = measure(bench, form, ranks, size, runs)
            for kind, name in names.items():
                if bench.wants(name) and got["theirs"].get(kind):
                    bench.row(name, "s", GOALS.get(name, "<=1.00"), f"PyTorch's: {WHAT[kind]}", got["ours"][kind], got["theirs"][kind],
                              f"dropin_peer.py {form} {ranks} {size} {runs} DIR")
            if form == "dtensor":
                bounds(bench, size, got["ours"])


def bounds(bench, size, ours):
    """What the machine gives: see above."""
    for name, kind, goal, peer, limit in (
            ("drop.dtensor.save.disk", "save", ">=0.90", "fio sequential write, fsync", lambda: [bench.fio("write") for _ in range(3)]),
            ("drop.dtensor.load.disk", "load.cold", ">=0.90", "fio sequential read", lambda: [bench.fio("read") for _ in range(3)]),
            ("drop.dtensor.load.memory", "load.after_async", ">=0.50", "memcpy, 2 threads", lambda: bench.memspeed("copy"))):
        if bench.wants(name) and ours.get(kind):
            bench.row(name, "GB/s", goal, peer, [size / 1e9 / t for t in ours[kind]], limit(), f"the row drop.dtensor.{kind}")


def measure(bench, form, ranks, size, runs):
    bench.no_torch()
    bench.daemon()
    with tempfile.TemporaryDirectory(dir=bench.disk) as folder:
        r = subprocess.run([sys.executable, HERE / "dropin_peer.py", form, str(ranks), str(size), str(runs), folder],
                           env=python_rows.environment(bench), capture_output=True, text=True, timeout=LIMIT_S)
    if r.returncode != 0:
        raise AssertionError(f"dropin_peer.py {form}: {r.stderr[-600:]}")
    return json.loads(r.stdout.splitlines()[-1])
