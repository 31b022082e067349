"""A look-up worker keeps the checkpoint that it was asked about last: what it says is what is there now, whatever was done in between."""
import contextlib
import os
import pathlib
import shutil
import time

import pytest

import dcpd as lib
from gang import Segments, Worker, at, done

TENSORS = 2000  # metadata of a quarter of a megabyte
ZSTD = pathlib.Path(__file__).resolve().parents[1] / "fixtures/torch-2.15.0/zstd/checkpoint"


def images(mark):
    return [lib.image({f"{mark}{i}": ("U8", (8,), bytes([i % 256] * 8)) for i in range(TENSORS)})]


@contextlib.contextmanager
def asking(roots):
    """question(op, …): one after the other, of one worker; the answer's body, with what it has read for it."""
    w = Worker(roots, role="lookup")

    def question(op, name, **more):
        before = chars(w)
        w.send("LOOKUP", 1, {"op": op, "storage": "out", "name": name, **more})
        f = w.recv()
        assert f.type == "ANSWER", f
        for fd in f.fds:
            f.body["bytes"] = os.pread(fd, 1 << 20, 0)
            os.close(fd)
        f.body["read"] = chars(w) - before
        assert not [t for t in lib.fd_targets(w.proc.pid) if t.startswith(str(roots["out"]) + "/")], "nothing is held between questions"
        return f.body

    try:
        yield question
    finally:
        rc, log = w.close()
        assert rc == 0, log


def chars(w):
    with open(f"/proc/{w.proc.pid}/io") as f:
        return int(f.readline().split()[1])


@pytest.fixture(scope="module")
def made(gang, roots):
    """make(name, …): checkpoints a, b of other tensors, z with transforms, whose times have settled; copies are hard links, as old."""
    for mark in "ab":
        s = Segments(images(mark))
        done(gang.job("save", {"source": {"state_dict": "train"}, "target": at(mark)}, {"train": s}))
        s.close()
    shutil.copytree(ZSTD, roots["out"] / "z")
    for name in ("beside", "manifest", "short", "gone", "changed"):
        shutil.copytree(roots["out"] / "a", roots["out"] / name)
    time.sleep(3.5)
    return roots["out"]


def names(answer):
    return [t["fqn"] for t in answer["ok"]["tensors"]]


def large(path):
    return (path / ".metadata").stat().st_size // 2


def test_it_is_read_once(roots, made):
    with asking(roots) as question:
        first = question("tensors", "a", page_size=10)
        assert first["read"] > large(made / "a")
        for i in range(1, 4):
            page = question("tensors", "a", page_size=10, page_token=first["ok"]["next_page_token"])
            assert page["read"] < large(made / "a") and page["ok"]["tensors"] and names(page) != names(first)
        got = question("slice", "a", fqn="a7", slice="2:5", format="raw")
        assert got["bytes"] == bytes([7] * 3) and got["read"] < large(made / "a")
        assert question("show", "a")["ok"]["tensors"] == TENSORS
        assert names(question("tensors", "b", page_size=1))[0][0] == "b"
        assert names(question("tensors", "a", page_size=1))[0][0] == "a"
        assert question("tensors", "nothing")["problem"]["code"] == "not_found"
        assert names(question("tensors", "a", page_size=1))[0][0] == "a"


def test_another_in_its_place(roots, made):
    (made / "swap").mkdir()
    with asking(roots) as question:
        for mark in "abab":
            os.rename(made / mark, made / "swap/x")
            got = question("tensors", "swap/x", page_size=1)
            assert names(got)[0][0] == mark
            os.rename(made / "swap/x", made / mark)


def test_metadata_that_is_written_over(roots, made):
    """In place, as no tool of ours does; then by a rename, as they do."""
    b = (made / "b/.metadata").read_bytes()
    with asking(roots) as question:
        assert names(question("tensors", "beside", page_size=1))[0][0] == "a"
        with open(made / "beside/.metadata", "r+b") as f:
            f.write(b)
            f.truncate()
        p = question("tensors", "beside", page_size=1)["problem"]  # seen, and no longer what its manifest tells
        assert (p["code"], p["file"]) == ("checkpoint_damaged", ".metadata")
        (made / "beside/x").write_bytes((made / "a/.metadata").read_bytes())
        os.rename(made / "beside/x", made / "beside/.metadata")
        assert names(question("tensors", "beside", page_size=1))[0][0] == "a"


def test_what_was_changed_a_moment_ago_is_not_kept(roots, made):
    """Its clock might not have moved since."""
    size = large(made / "changed")
    with asking(roots) as question:
        os.utime(made / "changed/.metadata")
        for _ in range(2):
            assert question("tensors", "changed", page_size=1)["read"] > size


def test_its_manifest(roots, made):
    with asking(roots) as question:
        assert question("show", "manifest")["ok"]["manifest"]["kind"] == "save"
        os.unlink(made / "manifest/.dcpd.json")
        assert question("show", "manifest")["ok"]["manifest"] is None


def test_its_files(roots, made):
    with asking(roots) as question:
        for name, spoil in (("short", lambda p: os.truncate(p, 100)), ("gone", os.unlink)):
            path, = (made / name).glob("*.distcp")
            question("tensors", name, page_size=1)
            spoil(path)
            e = question("tensors", name, page_size=1)["problem"]
            assert (e["code"], e["file"]) == ("checkpoint_incomplete", path.name)
            shutil.copy(made / "a" / path.name, path)
            assert names(question("tensors", name, page_size=1))[0][0] == "a"


def test_after_a_slice_that_undid_transforms(roots, made):
    with asking(roots) as question:
        slices = [question("slice", "z", fqn="noise", slice="1:3,4", format="raw")["bytes"] for _ in range(3)]
        assert slices[0] and slices[0] == slices[1] == slices[2]
        box = {"fqn": "noise", "dtype": "float32", "shape": [9, 9], "offsets": [0, 0], "sizes": [9, 9]}
        shape = next(t for t in question("tensors", "z")["ok"]["tensors"] if t["fqn"] == "noise")["shape"]
        box.update(shape=shape, offsets=[0] * len(shape), sizes=shape)
        for _ in range(2):
            got = question("locate", "z", boxes=[box])
            assert b'"transformed"' in got["bytes"], got
