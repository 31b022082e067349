"""A checkpoint moves into the trash, and out of it, and every call on the way fails once, or the process is killed there
(worker/os/fs.h): it is in its place or in the trash, whole, never in neither and never in both; the end of the job is as told, and a sweep
leaves no entry without a checkpoint. Needs a build with FAULTS=1 (make check-san)."""
import shutil

import pytest

import dcpd as lib
from gang import BIN, Closed, Gang, Worker, ask, at
from test_fault_points import FIXTURES, PASSES, contents

HAS_POINTS = b"is not POINT:N" in (BIN / "dcpd-worker").read_bytes()
pytestmark = pytest.mark.skipif(not HAS_POINTS, reason="this build has no fault points")

KILLED = ["trash.made", "remove.rename", "remove.renamed"]
CALLS = ["fs.open", "fs.mkdir", "fs.stat", "fs.fsync", "fs.rename", "fs.pwrite", "fs.list", "fs.close"]


@pytest.fixture
def roots(tmp_path):
    shutil.copytree(FIXTURES / "threads_4ranks/checkpoint", tmp_path / "run/t")
    return {"out": tmp_path}


def delete(roots, fault, job):
    try:
        g = Gang(1, roots, env={"DCPD_FAULT": fault})
    except Closed:  # before it began
        return None
    try:
        return g.job("delete", {"target": at("run/t"), "options": {"trash": "1h"}}, job=job)
    except (Closed, BrokenPipeError):
        return None
    finally:
        g.close()


def places(roots, job):
    return [p for p in (roots["out"] / "run/t", roots["out"] / ".dcpd-trash" / job / "item") if p.exists()]


def check(roots, fault, number):
    job, before = f"01TRASH{number:019d}", contents(roots["out"] / "run/t")
    end = delete(roots, fault, job)
    where = places(roots, job)
    assert len(where) == 1 and contents(where[0]) == before, f"{fault}: {where}"
    in_trash = where[0].name == "item"
    if end is None:
        body, _ = ask(roots, op="recover", **at("run/t"), job=job, kind="delete")
        assert body["ok"]["committed"] == in_trash, body
    elif end.kind == "DONE":
        assert in_trash
    else:
        lib.check_problem({"title": "", "status": 0, "retryable": False, **end.body})
        assert end.body["code"] not in ("internal", "protocol"), end.body
        assert not in_trash or end.body["code"] == "not_durable", end.body
    body, _ = ask(roots, op="sweep", storage="out", keep=[], before="01ZZZ")
    assert places(roots, job) == where
    assert in_trash or not (roots["out"] / ".dcpd-trash" / job).exists(), f"{fault}: an entry without a checkpoint stays"
    if in_trash:
        body, _ = ask(roots, op="trash", storage="out", restore="run/t", uid=0, admin=True)
        assert body["ok"]["id"] == job
    assert contents(roots["out"] / "run/t") == before
    assert not (roots["out"] / ".dcpd-trash" / job).exists()
    return end


@pytest.mark.seconds(600)
@pytest.mark.parametrize("point", KILLED)
def test_killed_on_the_way(roots, point):
    assert check(roots, f"{point}:1", 1) is None
    for i, errno in enumerate(("EIO", "ENOSPC", "EROFS"), 2):
        check(roots, f"{point}:1:{errno}", i)


@pytest.mark.seconds(900)
@pytest.mark.parametrize("point", CALLS)
def test_a_call_fails(roots, point):
    for i, n in enumerate(PASSES):
        check(roots, f"{point}:{n}:EIO", 10 + i)
        check(roots, f"{point}:{n}", 100 + i)


@pytest.mark.parametrize("point", ["undelete.rename", "undelete.renamed", "fs.fsync", "fs.rename", "fs.mkdir"])
def test_killed_on_the_way_back(roots, point):
    before = contents(roots["out"] / "run/t")
    for i in range(1, 4):
        job = f"01BACK{i:020d}"
        assert delete(roots, "none.such:1", job).kind == "DONE"
        (roots["out"] / "run").rmdir()
        w = Worker(roots, role="lookup", env={"DCPD_FAULT": f"{point}:{i}"})  # opens no file before it is asked
        try:
            w.send("LOOKUP", 1, {"op": "trash", "storage": "out", "restore": "run/t", "uid": 0, "admin": True}, ())
            w.recv()
        except (Closed, BrokenPipeError):
            pass
        finally:
            w.close()
        where = places(roots, job)
        assert len(where) == 1 and contents(where[0]) == before
        ask(roots, op="sweep", storage="out", keep=[], before="01ZZZ")
        if where[0].name == "item":
            ask(roots, op="trash", storage="out", restore="run/t", uid=0, admin=True)
        assert contents(roots["out"] / "run/t") == before and not (roots["out"] / ".dcpd-trash" / job).exists()
