"""Bench rows of the C library: one thread reads one tensor from the page cache into memory that was touched.

`c.read`: a checkpoint of dcpd's, compared with XXH3-128; `c.read.crc`: one of PyTorch's, compared with its CRC32. The peer is dcp.load of
the same checkpoint by one process, which compares nothing. `c.read.memcpy`: the first beside memcpy by one thread.
"""
import ctypes
import shutil
import time

import libdcp
import torch
import torch.distributed.checkpoint as dcp

RUNS = 3


def rows(bench, size):
    if not bench.wants("c.read"):
        return
    d = bench.daemon()
    bench.no_torch()
    theirs, ours = bench.disk / "c-pytorch", bench.disk / "ckpt/c-dcpd"
    dcp.save({"w": torch.randn(size // 4096, 1024)}, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True)
    d.api.run("reshard", seconds=300, source={"storage": "disk", "name": put(bench, theirs)}, target={"storage": "disk", "name": "c-dcpd"})
    target, other = torch.zeros(size // 4096, 1024), torch.zeros(size // 4096, 1024)
    figures = {"own": [], "own torch": [], "crc": [], "crc torch": [], "memcpy": []}
    for _ in range(RUNS):
        for name, path in (("own", ours), ("crc", theirs)):
            figures[name].append(size / read(path, target) / 1e9)
            figures[f"{name} torch"].append(size / load(path, other) / 1e9)
            assert torch.equal(target, other)
        start = time.monotonic()
        ctypes.memmove(other.data_ptr(), target.data_ptr(), size)
        figures["memcpy"].append(size / (time.monotonic() - start) / 1e9)
    what = "read_checkpoint ckpt w /dev/null"
    bench.row("c.read", "GB/s", ">=1.00", "PyTorch dcp.load, one process, unverified", figures["own"], figures["own torch"], what)
    bench.row("c.read.crc", "GB/s", ">=1.00", "the same, of PyTorch's checkpoint", figures["crc"], figures["crc torch"], what)
    bench.row("c.read.memcpy", "GB/s", ">=0.55", "memcpy, 1 thread", figures["own"], figures["memcpy"], what)
    for path in (theirs, ours, bench.disk / "ckpt/c-pytorch"):
        shutil.rmtree(path, ignore_errors=True)


def put(bench, directory):
    """A copy in the daemon's storage; its name."""
    shutil.copytree(directory, bench.disk / "ckpt" / directory.name)
    return directory.name


def read(path, into):
    start = time.monotonic()
    with libdcp.open(path) as ck:
        libdcp.check(libdcp.lib().dcp_read(ck.p, ck.tensor("w"), into.data_ptr(), into.nbytes, 0, None))
    return time.monotonic() - start


def load(path, into):
    start = time.monotonic()
    dcp.load({"w": into}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return time.monotonic() - start
