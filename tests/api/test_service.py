"""dcpd as a service: what it tells systemd of itself, the watchdog, and sockets that systemd listens on for it."""
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import dcpd as lib

# Becomes dcpd with the sockets of DESCRIPTORS as 3, 4, …, as systemd does: the number in LISTEN_PID is the daemon's own.
ACTIVATE = """import os, sys
fds = [int(n) for n in sys.argv[1].split(",")]
spare = [os.dup(fd) for fd in fds]
spare = [os.dup2(fd, 100 + i) for i, fd in enumerate(spare)]
for i, fd in enumerate(spare):
    os.dup2(fd, 3 + i, inheritable=True)
os.closerange(3 + len(spare), 200)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(spare)))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Manager:
    """The end of NOTIFY_SOCKET that systemd has."""

    def __init__(self, path):
        self.path, self.heard = str(path), []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.setblocking(False)

    def listen(self):
        while True:
            try:
                self.heard += self.socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self.heard

    def says(self, word, seconds=10):
        lib.wait_for(lambda: word in self.listen(), seconds, f"{word} to the service manager")


@pytest.fixture
def manager(tmp_path):
    m = Manager(tmp_path / "notify")
    yield m
    m.socket.close()


def test_ready_is_told_when_clients_are_answered_and_stopping_when_it_ends(spawn, manager):
    d = spawn(env={"NOTIFY_SOCKET": manager.path})
    manager.says("READY=1")
    assert "STOPPING=1" not in manager.heard and "WATCHDOG=1" not in manager.heard
    d.proc.send_signal(signal.SIGHUP)
    manager.says("RELOADING=1")
    lib.wait_for(lambda: manager.listen().count("READY=1") == 2, 10, "ready again")
    assert d.stop() == 0
    assert manager.listen()[-1] == "STOPPING=1"


def test_the_watchdog_is_fed_while_the_loop_turns_and_not_else(spawn, manager):
    d = spawn(env={"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "200000"})
    manager.says("WATCHDOG=1")
    d.proc.send_signal(signal.SIGSTOP)
    lib.wait_for(lambda: open(f"/proc/{d.proc.pid}/stat").read().rsplit(")", 1)[1].split()[0] == "T", 10, "stopped")
    manager.listen()
    manager.heard.clear()
    time.sleep(0.6)  # six turns of the watchdog, had it been fed by anything but the loop
    assert manager.listen() == []
    d.proc.send_signal(signal.SIGCONT)
    manager.says("WATCHDOG=1")


def test_a_watchdog_of_another_process_is_not_fed(spawn, manager):
    """WATCHDOG_PID names whose it is: a daemon that a service starts is not the service."""
    spawn(env={"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "50000", "WATCHDOG_PID": "1"})
    manager.says("READY=1")
    time.sleep(0.3)
    assert "WATCHDOG=1" not in manager.listen()


def given(home, *kinds):
    out = []
    for kind in kinds:
        s = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET, socket.SOCK_STREAM)
        s.bind(str(home / "state/s") if kind == "unix" else ("127.0.0.1", 0))
        s.listen(16)
        out.append(s)
    return out


def under(sockets):
    for s in sockets:
        os.set_inheritable(s.fileno(), True)
    return (sys.executable, "-c", ACTIVATE, ",".join(str(s.fileno()) for s in sockets))


class Activated(lib.Daemon):
    """Started as systemd starts a service that has a socket unit."""

    def __init__(self, home, sockets, **more):
        self.given = sockets
        super().__init__(home, under=under(sockets), tcp=False, **more)

    def start(self, seconds=20):
        with open(self.log, "ab") as log:
            self.proc = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False,
                                         env=lib.clean_environment(**self.env), start_new_session=True)
        lib.wait_for(self.ready, seconds, "dcpd ready")
        return self


@pytest.fixture
def home(tmp_path):
    (tmp_path / "state").mkdir()
    return tmp_path


def test_given_sockets_are_served_and_outlive_the_daemon(home):
    sockets = given(home, "unix", "tcp")
    port = sockets[1].getsockname()[1]
    d = Activated(home, sockets, args=["--listen", f"127.0.0.1:{port}"])
    try:
        assert d.api.get("/v1/storages").ok(200)
        assert lib.Client(tcp=("127.0.0.1", port)).get("/livez").ok(200)
        d.api.get("/v1/checkpoints/main").ok(200)  # a worker has started
        inodes, looked = {f"socket:[{os.fstat(s.fileno()).st_ino}]" for s in sockets}, 0
        for pid in d.workers():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
                assert not inodes & set(lib.fd_targets(pid)), f"worker {pid} has a socket that the daemon listens on"
                assert b"LISTEN_FDS" not in open(f"/proc/{pid}/environ", "rb").read()
                looked += 1
        assert looked
        assert d.stop() == 0
        assert d.socket.exists(), "the manager's socket is its own"
        # Who connects meanwhile waits, and is answered by the next daemon.
        early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        early.connect(str(d.socket))
        early.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        d.start()
        early.settimeout(20)
        assert early.recv(4096).startswith(b"HTTP/1.1 200"), "the client that waited"
    finally:
        d.discard()


def refused(home, sockets, *args):
    argv = [*under(sockets), str(lib.BIN / "dcpd"), "--state-dir", str(home / "state"), "--storage", f"main={home}", *args]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=lib.clean_environment(), close_fds=False)
    assert out.returncode == 1, out
    return out.stderr


def test_a_given_socket_that_nothing_names_is_refused(home):
    """Its clients would wait for ever; and a socket beyond loopback must not come in beside the check for TLS."""
    sockets = given(home, "tcp")
    port = sockets[0].getsockname()[1]
    text = refused(home, sockets, "--listen", f"unix:{home}/other")
    assert f"127.0.0.1:{port}, which no `listen` names" in text
    everywhere = socket.socket()
    everywhere.bind(("0.0.0.0", 0))
    everywhere.listen()
    text = refused(home, [everywhere], "--listen", f"0.0.0.0:{everywhere.getsockname()[1]}")
    assert "insecure-http" in text


def test_what_is_no_listening_socket_is_refused(home):
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagram.bind(str(home / "d"))
    assert "no stream socket that listens" in refused(home, [datagram], "--listen", f"unix:{home}/other")
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    assert "no stream socket that listens" in refused(home, [silent], "--listen", f"unix:{home}/other")
    with open(os.devnull) as f:
        assert "no stream socket that listens" in refused(home, [f], "--listen", f"unix:{home}/other")
