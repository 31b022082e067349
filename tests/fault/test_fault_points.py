"""Every call that the engine makes to a file system fails once, or the process is killed there: what is visible stays whole.

A checkpoint replaces another one, in a worker by itself; at the n-th pass of a fault point (worker/os/fs.h) the call gets an errno, or the
process a SIGKILL. Afterwards the target is the old checkpoint or the new one, verified and equal; it is the new one if the job said so, and
the old one if the job failed, but for `not_durable`, which says that it may be either. `recover` then tells what happened, and leaves
nothing behind. Needs a build with FAULTS=1 (make check-san); elsewhere there is no point that could fail.
"""
import pathlib
import shutil

import pytest

import dcpd as lib
from gang import BIN, Closed, Gang, Segments, ask, at, done

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures/torch-2.15.0"
HAS_POINTS = b"is not POINT:N" in (BIN / "dcpd-worker").read_bytes()
pytestmark = pytest.mark.skipif(not HAS_POINTS, reason="this build has no fault points")

COMMIT = [(p, k) for p in ("commit.synced", "commit.rename", "commit.renamed") for k in ("overwrite", "new")]
COMMIT.append(("commit.in_place", "beside"))
COMMIT += [(p, k) for p in ("commit.synced", "commit.rename", "commit.renamed") for k in ("copy", "copy.overwrite")]
CALLS = ["fs.open", "fs.mkdir", "fs.stat", "fs.allocate", "fs.truncate", "fs.fsync", "fs.rename", "fs.exchange", "fs.unlink", "fs.pread",
         "fs.pwrite", "fs.list", "fs.close", "io.read", "io.write", "io.fsync"]
PASSES = list(range(1, 61)) if lib.FULL else [1, 2, 4, 7, 3]


KINDS = {"beside": "save", "copy": "replicate", "copy.overwrite": "replicate"}


class Roots(dict):
    state = None  # the state dict that is saved beside other files: no other kind of job does that


@pytest.fixture
def roots(tmp_path):
    shutil.copytree(FIXTURES / "threads_4ranks/checkpoint", tmp_path / "old")
    shutil.copytree(FIXTURES / "nested/checkpoint", tmp_path / "new")
    roots = Roots(out=tmp_path)
    roots.state = Segments([lib.image({"w": ("F32", [300, 1000], bytes(range(240)) * 5000), "b": ("U8", [7], b"damaged")})])
    with Gang(1, roots) as g:
        done(g.job("save", {"source": {"state_dict": "s"}, "target": at("saved")}, {"s": roots.state}))
    (tmp_path / "saved/logs").mkdir()
    (tmp_path / "saved/logs/loss.csv").write_text("1,2")
    yield roots
    roots.state.close()


def reset(roots, target):
    """target: "new", where nothing is; "overwrite", the old checkpoint; "beside", in others' directory; "copy": of a replicate."""
    shutil.rmtree(roots["out"] / "t", ignore_errors=True)
    if target.endswith("overwrite"):
        shutil.copytree(roots["out"] / "old", roots["out"] / "t")
    elif target == "beside":
        (roots["out"] / "t").mkdir()
        (roots["out"] / "t/notes").write_text("not dcpd's")


def replace(roots, fault, job, target):
    """The job's end; None if the worker was killed."""
    g = Gang(1, roots, env={"DCPD_FAULT": fault})
    try:
        if target == "beside":
            return g.job("save", {"source": {"state_dict": "s"}, "target": at("t"), "options": {"in_place": "needed"}}, {"s": roots.state},
                         job=job)
        if target.startswith("copy"):
            return g.job("replicate", {"source": at("saved"), "target": at("t"), "options": {"overwrite": "overwrite" in target}}, job=job)
        return g.job("reshard", {"source": at("new"), "target": {**at("t"), "world_size": 2},
                                 "options": {"overwrite": target == "overwrite"}}, job=job)
    except (Closed, BrokenPipeError):
        return None
    finally:
        g.close()


def which(roots):
    """What lies at the target now, all of it verified: "old", "new" or "none"."""
    if not (roots["out"] / "t/.metadata").exists():
        return "none"
    with Gang(1, roots) as g:
        end = g.job("verify", {"source": at("t"), "level": "digest"})
        assert end.kind == "DONE", end.body
        for name in ("old", "new", "saved"):
            end = g.job("diff", {"a": at("t"), "b": at(name)})
            assert end.kind == "DONE", end.body
            if end.body["result"]["equal"]:
                return "old" if name == "old" else "new"
    raise AssertionError("the target is neither the old checkpoint nor the new one")


def check(roots, fault, number, target):
    job = f"01TEST{number:020d}"
    reset(roots, target)
    end = replace(roots, fault, job, target)
    before, now = "old" if target.endswith("overwrite") else "none", which(roots)
    if end is None:
        allowed = {before, "new"}
    elif end.kind == "DONE":
        allowed = {"new"}
    else:
        lib.check_problem({"title": "", "status": 0, "retryable": False, **end.body})
        assert end.body["code"] not in ("internal", "protocol"), end.body
        allowed = {before, "new"} if end.body["code"] == "not_durable" else {before}
    assert now in allowed, f"{fault}: the target is {now}, the job said {end}"
    if end is None or end.kind == "DONE" or target == "beside":  # one that could not undo its moves leaves that to the recovery
        body, _ = ask(roots, op="recover", **at("t"), job=job, kind=KINDS.get(target, "reshard"))
        assert body["ok"]["committed"] == (now == "new"), body
        assert which(roots) == now
    left = {p.name for p in roots["out"].iterdir()} - {"old", "new", "saved", "t"}
    if end is not None and (end.kind == "DONE" or end.body["code"] == "not_durable"):  # what is not needed any more is the next sweep's
        for name in left:
            shutil.rmtree(roots["out"] / name)
    else:
        assert not left, f"{fault}: {end} leaves {left}"
    assert target != "beside" or (roots["out"] / "t/notes").read_text() == "not dcpd's"
    return end


@pytest.mark.seconds(900)
@pytest.mark.parametrize("point, target", COMMIT)
def test_commit(roots, point, target):
    assert check(roots, f"{point}:1", 1, target) is None
    for i, errno in enumerate(("EIO", "ENOSPC", "EROFS"), 2):
        check(roots, f"{point}:1:{errno}", i, target)


@pytest.mark.seconds(3600 if lib.FULL else 900)
@pytest.mark.parametrize("point", CALLS)
def test_call(roots, point):
    ends = []
    for i, n in enumerate(PASSES):
        end = check(roots, f"{point}:{n}:EIO", i, ("overwrite", "new", "beside", "copy.overwrite", "copy")[i % 5])
        ends.append(end.kind)
        if lib.FULL and ends[-9:] == ["DONE"] * 9:
            break
    if point not in ("fs.unlink", "fs.close", "fs.truncate", "fs.exchange", "io.read"):  # tried only, tried again, or not needed here
        assert "FAILED" in ends, f"{point} was never met, or nobody minds: {ends}"


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def spoil(roots):
    """A copy without metadata, and with a byte of a payload that is another: (its files, those of the whole one)."""
    whole, t = contents(roots["out"] / "saved"), roots["out"] / "saved-again"
    shutil.rmtree(t, ignore_errors=True)
    shutil.copytree(roots["out"] / "saved", t)
    (t / ".metadata").unlink()
    data = bytearray(whole["__0_0.distcp"])
    data[data.index(bytes(range(240)) * 5) + 1000] ^= 1
    (t / "__0_0.distcp").write_bytes(data)
    return contents(t), whole


def repair(roots, fault, number):
    g = None
    try:
        g = Gang(1, roots, env={"DCPD_FAULT": fault} if fault else {})
        return g.job("repair", {"target": at("saved-again"), "from": at("saved")}, job=f"01REPR{number:020d}")
    except (Closed, BrokenPipeError):
        return None
    finally:
        if g:
            g.close()


def check_repair(roots, fault, number):
    """Each file is the damaged one or what the repair makes of it, whatever happens; the next repair ends it."""
    damaged, whole = spoil(roots)
    end = repair(roots, fault, number)
    now = contents(roots["out"] / "saved-again")
    if end is not None and end.kind == "DONE":
        assert ".metadata" in now and now["__0_0.distcp"] == whole["__0_0.distcp"]
    elif end is not None:
        assert end.body["code"] not in ("internal", "protocol"), end.body
    assert now["__0_0.distcp"] in (damaged["__0_0.distcp"], whole["__0_0.distcp"]) and now.keys() <= whole.keys(), (fault, end)
    if ".metadata" in now:
        assert now["__0_0.distcp"] == whole["__0_0.distcp"], f"{fault}: visible, and damaged"
    again = repair(roots, None, 1000 + number)
    assert again.kind == "DONE" and again.body["result"]["whole"], (fault, again)
    with Gang(1, roots) as g:
        assert g.job("verify", {"source": at("saved-again"), "level": "digest"}).kind == "DONE"
        assert g.job("diff", {"a": at("saved-again"), "b": at("saved")}).body["result"]["equal"]
    return end


@pytest.mark.seconds(900)
@pytest.mark.parametrize("point", ["commit.replace", "commit.replaced"])
def test_repair_killed_between_files(roots, point):
    for n in (1, 2, 3):  # the payload's file, the manifest (the copy has another name), the metadata
        assert check_repair(roots, f"{point}:{n}", n) is None
        check_repair(roots, f"{point}:{n}:EIO", 10 + n)


@pytest.mark.seconds(3600 if lib.FULL else 900)
@pytest.mark.parametrize("point", CALLS)
def test_repair_call(roots, point):
    for i, n in enumerate(PASSES):
        check_repair(roots, f"{point}:{n}:EIO", i)
        check_repair(roots, f"{point}:{n}", 100 + i)
