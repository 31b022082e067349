"""Paths: under a root, ad hoc, and at a private daemon of the user's own."""
import os
import pathlib
import signal
import subprocess
import time
from datetime import datetime, timezone

import harness as lib
import pytest
import torch

import dcpd
from dcpd import _daemon, _local, _where


def test_what_is_a_reference():
    for s in ("main:x", "a_b-1:x/y", "main:./x"):
        assert _where.is_reference(s), s
    for s in ("./main:x", "/main:x", "main:/x", "Main:x", "main", "", "1a:x", pathlib.Path("main:x")):
        assert not _where.is_reference(s), s


def test_a_path_under_a_root(at):
    name = lib.fresh()
    path = at.storages["main"] / name / "sub"
    dcpd.save({"x": 1}, path)
    assert (path / ".metadata").exists() and dcpd.load(f"main:{name}/sub") == {"x": 1}
    assert dcpd.load(str(path)) == {"x": 1} and dcpd.open(path)["x"] == 1
    assert not [s for s in at.api.get("/v1/storages").ok(200)["storages"] if s.get("adhoc") and str(at.home) in s["path"]]


def test_an_ad_hoc_path(at, tmp_path):
    path = tmp_path / "deep" / "er" / "ck"
    dcpd.save({"w": torch.ones(3)}, str(path))
    assert (path / ".metadata").exists()
    assert dcpd.load(path)["w"].tolist() == [1, 1, 1]
    with pytest.raises(dcpd.NotFound):
        dcpd.load(tmp_path / "nothing" / "here")
    with pytest.raises(dcpd.RequestRefused):
        dcpd.save({}, tmp_path / ".hidden")


def test_an_ad_hoc_lease_is_renewed_from_half_of_it_on(at, tmp_path):
    def storage():
        return next(s for s in at.api.get("/v1/storages?page_size=1000").ok(200)["storages"] if s["path"] == str(tmp_path))

    def seconds_left():
        return (datetime.fromisoformat(storage()["lease_expires_at"].replace("Z", "+00:00")) - datetime.now(timezone.utc)).total_seconds()

    def lease(seconds):
        at.api.post("/v1/storages", {"name": storage()["name"], "path": str(tmp_path), "lease_seconds": seconds}).ok(201)

    dcpd.save({"x": 1}, tmp_path / "a")
    lease(80000)
    dcpd.save({"x": 2}, tmp_path / "b")
    assert seconds_left() < 80001
    assert dcpd.load(tmp_path / "b") == {"x": 2} and seconds_left() > 86000, "who reads may go on for long"
    lease(60)
    dcpd.save({"x": 3}, tmp_path / "c")
    assert seconds_left() > 86000


@pytest.fixture
def own(request, tmp_path, monkeypatch):
    """No daemon to be found, and private ones in a folder of the test's."""
    for k in ("DCPD_URL", "DCPD_TOKEN", "DCPD_TOKEN_FILE"):
        monkeypatch.delenv(k, raising=False)
    run = pathlib.Path("/tmp") / lib.fresh("dcpd-run")
    run.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DCPD_BIN", str(lib.BIN / "dcpd"))
    monkeypatch.setattr(_daemon, "default_client", _none_found)
    before = dict(_local._holds)
    yield run
    dcpd.close()
    for folder, fd in list(_local._holds.items()):
        if folder not in before:
            os.close(_local._holds.pop(folder))
    lib.wait_for(lambda: not pids(run), 30, f"daemons of {run} gone")
    names = {m.decode() for f in run.rglob("journal*") for m in lib.SEGMENT.findall(f.read_bytes())}
    left = {n for n in names if (lib.SHM / n).exists()}
    for n in left:
        (lib.SHM / n).unlink()
    for f in sorted(run.rglob("*"), reverse=True):
        f.rmdir() if f.is_dir() else f.unlink()
    run.rmdir()
    assert not left or "supervisor" in request.node.name, f"left in shared memory: {left}"


def _none_found():
    if _daemon._stack:
        return _daemon._stack[-1]
    raise dcpd.NoDaemon("none")


def pids(run):
    """Processes that have the folder in their arguments."""
    out = []
    for p in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(run).encode() in p.read_bytes():
                out.append(int(p.parent.name))
        except OSError:
            pass
    return out


@pytest.mark.long
def test_private_daemon_comes_and_goes(own, tmp_path, monkeypatch):
    monkeypatch.setattr(_local.private, "__defaults__", (None, 1))
    dcpd.save({"w": torch.ones(5)}, tmp_path / "ck")
    assert dcpd.load(tmp_path / "ck")["w"].sum() == 5
    assert pids(own) and not list(own.rglob("*.port"))
    socket = own / "dcpd" / "private" / "s"
    assert socket.exists() and (own / "dcpd").stat().st_mode & 0o077 == 0
    listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True).stdout if os.path.exists("/usr/bin/ss") else ""
    assert not any(f"pid={p}," in listening for p in pids(own)), "it has a port"
    first = pids(own)
    time.sleep(2.5)
    assert set(pids(own)) >= set(first) - {0} and dcpd.load(tmp_path / "ck")["w"].sum() == 5, "gone while it has a user"
    dcpd.close()
    for fd in [_local._holds.pop(k) for k in list(_local._holds) if str(own) in k]:
        os.close(fd)
    lib.wait_for(lambda: not pids(own), 20, "the private daemon gone after its last user")
    assert dcpd.load(tmp_path / "ck")["w"].sum() == 5, "and there again when needed"


@pytest.mark.long
def test_private_daemon_dies_with_its_supervisor(own, tmp_path):
    dcpd.save({"x": 1}, tmp_path / "ck")
    supervisor = [p for p in pids(own) if b"_supervise" in pathlib.Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(supervisor) == 1
    os.kill(supervisor[0], signal.SIGKILL)


def test_local(own, tmp_path):
    with dcpd.local(tmp_path / "store", idle_seconds=1) as c:
        dcpd.save({"x": 2}, "main:a/b")
        assert dcpd.load("main:a/b") == {"x": 2} and (tmp_path / "store" / "a" / "b" / ".metadata").exists()
        assert [x["name"] for x in c.checkpoints.list("main")] == ["a/b"]
        with dcpd.local(tmp_path / "store") as again:
            assert again.url == c.url
    with pytest.raises(dcpd.NoDaemon):
        dcpd.load("main:a/b")


def test_no_program_is_said(own, monkeypatch, tmp_path):
    monkeypatch.setattr(_local, "find_program", lambda: (_ for _ in ()).throw(dcpd.NoDaemon("no dcpd program found")))
    with pytest.raises(dcpd.NoDaemon, match="program"):
        dcpd.save({}, tmp_path / "x")


def test_others_cannot_lay_a_trap(own, monkeypatch, tmp_path):
    (own / "dcpd").mkdir(mode=0o755, exist_ok=True)
    os.chmod(own / "dcpd", 0o755)
    with pytest.raises(dcpd.NoDaemon, match="700"):
        dcpd.save({}, tmp_path / "x")
    os.chmod(own / "dcpd", 0o700)
