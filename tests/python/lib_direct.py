"""What the tests of loads that read the files themselves share: whether that was done, and small state dicts; `always` takes the limit
away below which a job is faster."""
import contextlib
import ctypes
import itertools
import mmap

import harness as lib
import pytest
import torch

import dcpd
from dcpd import _direct


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(_direct, "AVERAGE_MIN", 0)


def jobs(d):
    return {j["id"]: j for j in d.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"] if j["kind"] == "load"}


class Seen:
    boxes = bytes = 0
    jobs = ()


@contextlib.contextmanager
def direct(d):
    """Counts: boxes read here, and load jobs of the daemon."""
    before, known, seen = dict(_direct.counts), jobs(d), Seen()
    yield seen
    seen.boxes, seen.bytes, seen.memory = (_direct.counts[k] - before[k] for k in ("boxes", "bytes", "memory"))
    seen.jobs = [j for k, j in jobs(d).items() if k not in known]


def saved(sd, **kw):
    """A reference, of which nothing lies in memory any more: loads have to read the files."""
    ref = f"main:{lib.fresh()}"
    dcpd.save(sd, ref, **kw)
    dcpd.close()
    return ref


def folder(d, ref):
    return d.storages["main"] / ref[5:]


def tensors(n=4, size=50_000):
    return {f"w{i}": torch.arange(size, dtype=torch.float32) + 1000 * i for i in range(n)}


_next_low = itertools.count(1 << 34, 1 << 30)


def low(size):
    """A float32 tensor at an address where no library's memory lies: the heap of an interpreter that is loaded at a fixed address, such as
    Debian's own python3, begins a few MiB above 0. Its memory stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    got = libc.mmap(next(_next_low), size * 4, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert got < 1 << 36, "the address is but a hint, which the kernel follows where it is free"
    return torch.frombuffer((ctypes.c_char * (size * 4)).from_address(got), dtype=torch.float32)


def like(sd):
    return {k: torch.zeros_like(v) for k, v in sd.items()}


def same(a, b):
    for k, x in b.items():
        assert a[k].dtype == x.dtype and a[k].shape == x.shape, k
        assert bytes(a[k].contiguous().reshape(-1).view(torch.uint8).numpy()) == \
            bytes(x.contiguous().reshape(-1).view(torch.uint8).numpy()), k


def item(d, ref, fqn):
    """Where the bytes of a tensor of one dim begin that was saved by this process: its first unit."""
    t = next(t for t in dcpd.connect().checkpoints.tensors(ref)[0] if t["fqn"] == fqn)
    dtype = t["dtype"].replace("torch.", "")
    x = dcpd.connect().checkpoints.locate(ref, [{"fqn": fqn, "dtype": dtype, "shape": t["shape"], "offsets": [0] * len(t["shape"]),
                                                 "sizes": t["shape"]}])
    return x["files"][x["reads"][0]["file"]], x["reads"][0]["offset"]
