"""The parent of a private daemon: `python -m dcpd._supervise FOLDER IDLE_SECONDS PROGRAM ARGUMENTS…`; see _local.py."""
from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from typing import List

from . import errors
from ._http import Endpoint, Transport
from .client import Client

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def busy(socket: str) -> bool:
    """Whether a job has not ended, or there is a state dict: without a daemon nobody would free its shared memory when its time is over."""
    try:
        c = Client(Transport(Endpoint(socket), timeout=5))
        return bool(c.state_dicts.list()) or any(j["state"] not in errors.TERMINAL for j in c.jobs.list(limit=100))
    except errors.DcpdError:
        return False


def main(argv: List[str]) -> int:
    folder, idle, program = argv[0], float(argv[1]), argv[2:]
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda *_: child.terminate())
    users = os.open(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    since = time.monotonic()
    pause = max(0.1, min(1.0, idle / 4))
    while True:
        try:
            return child.wait(pause)
        except subprocess.TimeoutExpired:
            pass
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            since = time.monotonic()
            continue
        if time.monotonic() - since >= idle and not busy(os.path.join(folder, "s")):
            child.terminate()
            return child.wait()  # whoever comes now waits for the lock, and starts a new one
        fcntl.flock(users, fcntl.LOCK_UN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
