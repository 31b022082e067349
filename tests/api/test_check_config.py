"""dcpd --check-config: what would keep the daemon from working is said before it is started, all of it at once."""
import os
import shutil
import socket
import subprocess
import tempfile

import pytest
from test_restart import run

import dcpd as lib


def check(tmp_path, *args, **kw):
    good = ["--state-dir", tmp_path / "state", "--listen", f"unix:{tmp_path}/run/s", "--storage", f"main={tmp_path}/main"]
    for d in ("run", "main"):
        (tmp_path / d).mkdir(exist_ok=True)
    return run(*good, *args, "--check-config", **kw)


def test_what_is_right_is_accepted(tmp_path):
    r = check(tmp_path)
    assert r.returncode == 0 and not r.stderr, r
    assert not (tmp_path / "state").exists(), "a check makes nothing"
    (tmp_path / "state").mkdir()
    assert check(tmp_path).returncode == 0


def test_a_running_daemon_is_no_fault(spawn):
    d = spawn()
    r = run(*d.command()[1:], "--check-config")
    assert r.returncode == 0 and not r.stderr, r


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    r = check(tmp_path, "--storage", f"gone={tmp_path}/gone", "--storage", f"file={tmp_path}/file", "--web-root", tmp_path / "empty",
              "--listen", f"unix:{tmp_path}/nowhere/s", "--listen", f"unix:{tmp_path}/file", "--worker-path", tmp_path / "no-worker",
              "--tls-cert", tmp_path / "no.pem", "--tls-key", tmp_path / "file")
    assert r.returncode == 2, r
    for words in (f"storage gone: {tmp_path}/gone", f"storage file: {tmp_path}/file", f"web-root: {tmp_path}/empty",
                  f"listen: {tmp_path}/nowhere", f"listen: {tmp_path}/file", f"worker-path: {tmp_path}/no-worker",
                  f"tls-cert: {tmp_path}/no.pem", f"tls-key: {tmp_path}/file"):
        assert words in r.stderr, (words, r.stderr)
    assert "storage main" not in r.stderr


@pytest.mark.parametrize("make", ["file", "below a file"])
def test_a_state_dir_that_cannot_be(tmp_path, make):
    (tmp_path / "f").write_text("x")
    where = tmp_path / "f" if make == "file" else tmp_path / "f/below/state"
    r = run("--state-dir", where, "--listen", "127.0.0.1:0", "--check-config")
    assert r.returncode == 2 and f"state-dir: {where}" in r.stderr, r


@pytest.mark.skipif(os.getuid() != 0, reason="takes another uid")
def test_folders_that_are_not_the_users_own():
    """As the service's user would find them: root may write anywhere."""
    with tempfile.TemporaryDirectory() as t:
        os.chmod(t, 0o755)
        for program in ("dcpd", "dcpd-worker"):
            shutil.copy(lib.BIN / program, t)
        for name, mode in (("state", 0o755), ("main", 0o755), ("run", 0o755), ("ours", 0o777), ("shut", 0o700)):
            os.mkdir(f"{t}/{name}")
            os.chmod(f"{t}/{name}", mode)
        args = ["--state-dir", f"{t}/state", "--listen", f"unix:{t}/run/s", "--check-config"]
        for name in ("main", "ours", "shut"):
            args += ["--storage", f"{name}={t}/{name}"]
        r = subprocess.run([f"{t}/dcpd", *args], capture_output=True, text=True, user=65534, group=65534, extra_groups=[],
                           env=lib.clean_environment())
        assert r.returncode == 2, r
        for words in (f"state-dir: {t}/state", f"listen: {t}/run", f"storage main: {t}/main", f"storage shut: {t}/shut"):
            assert words in r.stderr and "uid 65534" in r.stderr, (words, r.stderr)
        assert "storage ours" not in r.stderr


def test_certificates_that_are_none(tmp_path):
    for name in ("cert", "key"):
        (tmp_path / name).write_text("no PEM\n")
    r = check(tmp_path, "--tls-cert", tmp_path / "cert", "--tls-key", tmp_path / "key")
    assert r.returncode == 2 and f"tls-cert: {tmp_path}/cert" in r.stderr and f"tls-key: {tmp_path}/key" in r.stderr, r


def test_a_socket_that_a_killed_daemon_left_is_no_fault(tmp_path):
    (tmp_path / "run").mkdir()
    s = socket.socket(socket.AF_UNIX)
    s.bind(str(tmp_path / "run/s"))
    s.close()
    assert check(tmp_path).returncode == 0
