"""A private daemon: of this user, on this host, without a port. Started at first use, gone some time after its last user.

Who uses it holds a shared lock on the file `users` in its folder; a supervisor (`_supervise.py`) stops the daemon when it could have
taken the lock for itself for a while, and no job runs. So nothing is left running, and nobody has to count.
"""
from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from typing import Dict, Optional, Union

from . import _daemon, _programs, _session, errors
from ._http import Endpoint, Transport
from .client import Client

IDLE_SECONDS = 60
START_SECONDS = 20.0
_holds: Dict[str, int] = {}  # folder → descriptor of its `users`


def base_folder() -> str:
    """Where this user's private daemons have their folders: $XDG_RUNTIME_DIR/dcpd, else one in the temporary folder."""
    run = os.environ.get("XDG_RUNTIME_DIR")
    path = os.path.join(run, "dcpd") if run and os.path.isdir(run) else os.path.join(tempfile.gettempdir(), f"dcpd-{os.geteuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    s = os.lstat(path)
    if not stat.S_ISDIR(s.st_mode) or s.st_uid != os.geteuid() or s.st_mode & 0o077:
        raise errors.NoDaemon(f"{path} must be a directory of yours that nobody else can use (mode 700)")
    return path


def find_program() -> str:
    """The dcpd program: DCPD_BIN, inside this package, beside this Python, in PATH, or built in the tree that this package lies in."""
    tree = os.path.join(os.path.dirname(__file__), "..", "..", "..", "build", "bin", "dcpd")
    for p in (os.environ.get("DCPD_BIN"), _programs.inside("dcpd"), os.path.join(os.path.dirname(sys.executable), "dcpd"),
              shutil.which("dcpd"), "/usr/local/bin/dcpd", os.path.abspath(tree)):
        if p and os.access(p, os.X_OK) and os.path.isfile(p):
            return p
    raise errors.NoDaemon("no dcpd program found: build it (`make`), install it, or set DCPD_BIN to it")


def private(directory: Optional[str] = None, idle_seconds: int = IDLE_SECONDS) -> Client:
    """The user's daemon for ad-hoc paths, or the one whose storage `main` is `directory`; started if it is not there."""
    folder = os.path.join(base_folder(), "private" if directory is None else
                          "dir-" + hashlib.sha256(os.fsencode(directory)).hexdigest()[:16])
    os.makedirs(folder, mode=0o700, exist_ok=True)
    _hold(folder)
    socket = os.path.join(folder, "s")
    if len(os.fsencode(socket)) > 100:
        raise errors.NoDaemon(f"{socket}: too long for a socket; set XDG_RUNTIME_DIR or TMPDIR to a shorter path")
    client = _try(socket)
    if client is not None:
        return client
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that come at once: one of them starts it
        client = _try(socket)
        if client is None:
            _start(folder, socket, directory, idle_seconds)
            client = _await(folder, socket)
    return client


def _hold(folder: str) -> None:
    """Counts this process, and its forks, among the users until it ends. Waits while a supervisor is stopping the daemon."""
    if folder not in _holds:
        fd = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        _holds[folder] = fd


def release(directory: str) -> None:
    """No longer a user of the daemon for `directory`."""
    folder = os.path.join(base_folder(), "dir-" + hashlib.sha256(os.fsencode(directory)).hexdigest()[:16])
    fd = _holds.pop(folder, None)
    if fd is not None:
        os.close(fd)


def _try(socket: str) -> Optional[Client]:
    try:
        return Client(Transport(Endpoint(socket))).check()
    except errors.NoDaemon:
        return None


def _start(folder: str, socket: str, directory: Optional[str], idle_seconds: int) -> None:
    args = [find_program(), "--state-dir", os.path.join(folder, "state"), "--listen", f"unix:{socket}"]
    if directory is not None:
        args += ["--storage", f"main={directory}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("DCPD_")}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env["PYTHONPATH"] = root + (":" + env["PYTHONPATH"] if env.get("PYTHONPATH") else "")
    with open(os.path.join(folder, "log"), "ab") as log:
        subprocess.Popen([sys.executable, "-m", "dcpd._supervise", folder, str(idle_seconds), *args], stdin=subprocess.DEVNULL,
                         stdout=log, stderr=log, env=env, cwd="/", start_new_session=True)


def _await(folder: str, socket: str) -> Client:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        client = _try(socket)
        if client is not None:
            return client
        time.sleep(0.02)
    try:
        with open(os.path.join(folder, "log"), "rb") as f:
            tail = f.read()[-2000:].decode(errors="replace")
    except OSError:
        tail = ""
    raise errors.NoDaemon(f"the private daemon did not start within {START_SECONDS:g} s; {folder}/log ends with:\n{tail}")


class LocalClient(Client):
    """The client of a daemon that dcpd.local started. Leaving its `with` makes the daemon found before the default again."""

    def __init__(self, client: Client, directory: str) -> None:
        super().__init__(client._t)
        self._caps = client._caps
        self.directory = directory
        _daemon._stack.append(self)

    def close(self) -> None:
        if self in _daemon._stack:
            for s in _session.all_sessions():
                if s.client.url == self.url:
                    _session.discard(s)
            _daemon._stack.remove(self)
            release(self.directory)
        super().close()


def local(directory: Union[str, "os.PathLike[str]"], *, idle_seconds: int = IDLE_SECONDS) -> LocalClient:
    """Starts (or joins) a daemon of your own whose storage `main` is `directory`, and makes it this process's default.

    It has no port and serves nobody else; it ends `idle_seconds` after its last user. `with dcpd.local(dir) as client: …`
    Raises NoDaemon where the program is not found or does not start.
    """
    path = os.path.realpath(os.fspath(directory))
    os.makedirs(path, exist_ok=True)
    return LocalClient(private(path, idle_seconds), path)

