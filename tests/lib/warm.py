"""`python warm.py ARGUMENT…` is `python -m pytest ARGUMENT…` with PyTorch imported, once: what tests start by forks.Forks (programs, ranks)
are forks of this process, which has nothing of pytest yet.

WARM=SOCKET: sets of tests that run at a time share the import, too. The first one starts a process that has it, and pytest is a fork of
that; it ends when nobody has come for a while.
"""
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import forks

LINGER_S = 20


def import_torch():
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: F401


def become_pytest():
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forks.warm_up()
    sys.path[0] = os.getcwd()
    import pytest

    forks.end(pytest.main())


def connect(where):
    """To the process that has PyTorch, which may still be at it."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{where}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            s.connect(where)
        except OSError:
            if os.path.exists(where):
                os.unlink(where)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(where)
                listener.listen(64)
                subprocess.Popen([sys.executable, __file__, "--serve", str(listener.fileno())], pass_fds=[listener.fileno()],
                                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            s.connect(where)
    return s


def ask(where):
    """A fork of that process, which has our arguments, environment and standard files. None: it ended meanwhile."""
    r, w = os.pipe()
    with connect(where) as s, os.fdopen(r) as status:
        call = {"args": sys.argv, "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(s, [json.dumps(call).encode()], [0, 1, 2, w])
        os.close(w)
        try:
            return forks.Forked(sys.argv, os.fdopen(os.dup(status.fileno())), None, None, None)
        except ValueError:
            return None


def wait_for_pytest(where):
    p = ask(where) or ask(where)
    if not p:
        sys.exit("warm.py: the process that imports PyTorch has ended; without WARM this one would say why")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: p.send_signal(number))
    status = p.wait()
    return status if status >= 0 else 128 - status


def serve(listener):
    """Returns in pytest's process."""
    import_torch()
    forks.import_more()
    listener.settimeout(LINGER_S)
    live = 0
    while True:
        try:
            calls = listener.accept()[0]
        except TimeoutError:
            while live and os.waitpid(-1, os.WNOHANG)[0]:
                live -= 1
            if not live:
                sys.exit()
            continue
        live += 1
        if os.fork() == 0:
            listener.close()
            return forks.take(forks.serve(calls))
        calls.close()


if sys.argv[1:2] == ["--serve"]:
    serve(socket.socket(fileno=int(sys.argv[2])))
elif where := os.environ.pop("WARM", None):
    sys.exit(wait_for_pytest(where))
else:
    import_torch()
become_pytest()
