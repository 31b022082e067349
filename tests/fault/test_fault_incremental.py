"""An incremental save whose calls fail, or that is killed, between the hash and the rename: its parent stays as it was, byte for byte, and
what is visible is whole. The parent's files are links of the new one's; where a link or a clone fails, the bytes are written.

Needs a build with FAULTS=1 (make check-san), as test_fault_points.py.
"""
import random
import shutil

import clones
import pytest

import dcpd as lib
from gang import BIN, Closed, Gang, Segments, ask, at, done

HAS_POINTS = b"is not POINT:N" in (BIN / "dcpd-worker").read_bytes()
pytestmark = pytest.mark.skipif(not HAS_POINTS, reason="this build has no fault points")
MIB = 1 << 20
POINTS = ["fs.link", "fs.open", "fs.truncate", "fs.fsync", "fs.rename", "io.write", "fs.pwrite", "commit.rename", "commit.renamed"]
PASSES = list(range(1, 31)) if lib.FULL else [1, 3]


def image(change):
    """`late` differs in its last byte, so that blocks are written after they were taken for equal."""
    r = random.Random(1)
    frozen, late, small = r.randbytes(3 * MIB), bytearray(r.randbytes(9 * MIB + 5)), bytearray(r.randbytes(5000))
    late[-1], small[0] = change, change
    return lib.image({"frozen": ("U8", [len(frozen)], frozen), "late": ("U8", [len(late)], late), "small": ("U8", [len(small)], small)},
                     {"values": {"step": {"json": change}}})


class Place:
    def __init__(self, root):
        self.root = root
        self.steps = [Segments([image(i)]) for i in (1, 2)]
        self.roots = {"out": root}
        root.mkdir(exist_ok=True)
        with Gang(1, self.roots) as g:
            for name, segments, incremental in (("run/step-1", 0, True), ("plain", 1, False)):
                done(g.job("save", {"source": {"state_dict": "s"}, "target": at(name), "options": {"incremental": incremental}},
                           {"s": self.steps[segments]}))
        self.parent = self.contents()

    def contents(self):
        return {p.name: p.read_bytes() for p in (self.root / "run/step-1").iterdir()}

    def save(self, fault, job):
        g = None
        try:
            g = Gang(1, self.roots, env={"DCPD_FAULT": fault} if fault else {})
            return g.job("save", {"source": {"state_dict": "s"}, "target": at("run/step-2"), "options": {"incremental": True}},
                         {"s": self.steps[1]}, job=job)
        except (Closed, BrokenPipeError, ConnectionResetError):
            return None
        finally:
            if g:
                g.close()

    def check(self, fault, number):
        job = f"01INCR{number:020d}"
        shutil.rmtree(self.root / "run/step-2", ignore_errors=True)
        end = self.save(fault, job)
        assert self.contents() == self.parent, f"{fault}: the parent has changed"
        there = (self.root / "run/step-2").exists()
        if end is None:
            body, _ = ask(self.roots, op="recover", **at("run/step-2"), job=job, kind="save")
            there = (self.root / "run/step-2").exists()
            assert body["ok"]["committed"] == there
        elif end.kind == "DONE":
            assert there
        else:
            assert end.body["code"] not in ("internal", "protocol") and (not there or end.body["code"] == "not_durable"), end.body
        if there:
            with Gang(1, self.roots) as g:
                assert g.job("verify", {"source": at("run/step-2"), "level": "digest"}).kind == "DONE"
                assert g.job("diff", {"a": at("run/step-2"), "b": at("plain"), "read_all": True}).body["result"]["equal"], fault
        left = {p.name for p in (self.root / "run").iterdir()} - {"step-1", "step-2"}
        assert not left or end is not None, f"{fault}: {left}"
        for name in left:
            shutil.rmtree(self.root / "run" / name)
        return end

    def close(self):
        for s in self.steps:
            s.close()


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    p = Place(tmp_path_factory.mktemp("links"))
    yield p
    p.close()


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    with clones.mounted(tmp_path_factory.mktemp("clones")) as at:
        p = Place(at / "s")
        yield p
        p.close()


def test_without_a_fault(links):
    r = links.check(None, 0).body["result"]
    assert r["incremental"]["how"] == "link" and 3 * MIB < r["bytes_shared"] < 4 * MIB


@pytest.mark.seconds(3600 if lib.FULL else 900)
@pytest.mark.parametrize("point", POINTS)
def test_links(links, point):
    for i, n in enumerate(PASSES):
        for k, fault in enumerate((f"{point}:{n}", f"{point}:{n}+:ENOSPC" if n == 1 else f"{point}:{n}:EIO")):
            links.check(fault, 1000 * POINTS.index(point) + 10 * i + k)


def test_a_link_that_fails_is_written(links):
    for fault in ("fs.link:1:EIO", "fs.link:1+:EPERM"):
        assert links.check(fault, 99000).body["result"]["bytes_shared"] == 0


@pytest.mark.seconds(900)
def test_clones(cloned):
    assert cloned.check(None, 1).body["result"]["bytes_shared"] > 10 * MIB
    assert cloned.check("fs.clone:1", 2) is None
    assert cloned.check("fs.clone:2", 3) is None
    some = cloned.check("fs.clone:1:EIO", 4).body["result"]["bytes_shared"]
    assert 0 < some < 10 * MIB
    assert cloned.check("fs.clone:1+:EOPNOTSUPP", 5).body["result"]["bytes_shared"] == 0
    for i, point in enumerate(("io.write", "fs.fsync", "commit.rename")):
        cloned.check(f"{point}:1", 10 + i)
        cloned.check(f"{point}:1+:ENOSPC", 20 + i)
