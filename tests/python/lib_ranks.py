"""Ranks of torch.distributed (gloo) that stay for a session: importing PyTorch four times costs more than all the tests.

    ranks = Ranks(4, environment, forks); ranks(on_ranks.function, arguments…) → what each rank returned (or raised, as an exception)

A rank is a fork of this file run as a program, which is a fork of an interpreter that has PyTorch (see tests/lib/forks.py): it
reads pickled calls of functions of on_ranks.py from a pipe. With `world=2` only the first two are called, with that group as `pg`.
"""
import ctypes
import importlib
import os
import pathlib
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import traceback

PATIENCE = 6  # how many times as long as on an idle machine something may take
HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "api" / "python"


class Remote(Exception):
    """What a rank raised; args[0] is the original if it could be pickled."""


def send(f, x):
    data = pickle.dumps(x)
    f.write(struct.pack("<Q", len(data)) + data)
    f.flush()


def receive(f):
    head = f.read(8)
    if len(head) < 8:
        raise Ended
    return pickle.loads(f.read(struct.unpack("<Q", head)[0]))


class Ended(Exception):
    """The other side closed its pipe."""


class Ranks:
    def __init__(self, n, env, forks=None, hosts=None):
        """forks: None: an interpreter of their own. hosts: [(environment, ranks)] for each; default: all ranks here."""
        self.n, self.forks = n, forks
        self.dir = tempfile.TemporaryDirectory()
        self.pipes, self.parents = [], []
        for more, count in hosts or [({}, n)]:
            self.start({**env, **more}, len(self.pipes), count)

    def start(self, env, first, count):
        theirs = []
        for _ in range(count):
            (r1, w1), (r2, w2) = os.pipe(), os.pipe()
            self.pipes.append((os.fdopen(w1, "wb"), os.fdopen(r2, "rb")))
            theirs += [r1, w2]
        e = {**os.environ, "WORLD_SIZE": str(self.n), "LOCAL_WORLD_SIZE": str(count), "FIRST_RANK": str(first), "OMP_NUM_THREADS": "1",
             "PYTHONPATH": f"{PACKAGE}:{HERE}", "PYTHONDONTWRITEBYTECODE": "1", "TEST_STORE": f"{self.dir.name}/store", **env}
        if self.forks:
            parent = self.forks.start_with(__file__, theirs, e)
        else:
            parent = subprocess.Popen([sys.executable, "-u", __file__, *map(str, theirs)], env=e, pass_fds=theirs,
                                      stdin=subprocess.DEVNULL, start_new_session=True)
        self.parents.append(parent)
        for fd in theirs:
            os.close(fd)

    def __call__(self, function, *args, world=None, seconds=40, env=None, check=True):
        world = world or self.n
        for to, _ in self.pipes[:world]:
            send(to, (function.__module__, function.__name__, args, world, env or {}))
        timer = threading.Timer(seconds * PATIENCE, self.interrupt)
        timer.start()
        try:
            out = [self.answer(r) for r in range(world)]
        finally:
            timer.cancel()
        if check:
            for r, o in enumerate(out):
                if isinstance(o, Ended):
                    raise AssertionError(f"rank {r} ended")
                if isinstance(o, Remote):
                    raise AssertionError(f"rank {r}: {o.args[1]}")
        return [o.args[0] if isinstance(o, Remote) else o for o in out]

    def answer(self, r):
        try:
            return receive(self.pipes[r][1])
        except Ended as e:
            return e

    def interrupt(self):
        for p in self.parents:
            os.killpg(p.pid, signal.SIGABRT)  # the fault handler shows where it stood

    def close(self):
        for to, frm in self.pipes:
            to.close()
        for p in self.parents:
            try:
                p.wait(100)
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                p.wait()
        for to, frm in self.pipes:
            frm.close()
        self.dir.cleanup()


def main():
    """Imports everything once, then forks the ranks: before any thread and any connection is made."""
    import faulthandler
    import gc

    import torch
    import dcpd.torch
    import dcpd._load
    import dcpd._save
    import on_ranks

    if "TEST_NO_MESHES" not in os.environ:
        import torch._dynamo  # noqa: F401: FSDP asks for it, in each rank
    gc.freeze()  # what is imported stays: no collection of garbage looks through it again, in no rank
    faulthandler.enable()
    if os.getsid(0) != os.getpid():
        os.setsid()  # interrupt() signals the group
    if "TEST_ENTER" in os.environ:
        enter(os.environ["TEST_ENTER"])
    fds = list(map(int, sys.argv[1:]))
    pids = []
    for here in range(len(fds) // 2):
        pid = os.fork()
        if pid == 0:
            for i, fd in enumerate(fds):
                if i // 2 != here:
                    os.close(fd)
            try:
                serve(torch, on_ranks, here + int(os.environ["FIRST_RANK"]), os.fdopen(fds[2 * here], "rb"),
                      os.fdopen(fds[2 * here + 1], "wb"))
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(0)
        pids.append(pid)
    for fd in fds:
        os.close(fd)
    for pid in pids:
        os.waitpid(pid, 0)


def enter(pid):
    """The namespaces and the root of a host that this process holds; Python has setns() from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("uts", "mnt")]
    for fd in opened:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    os.fchdir(root)  # setns() has gone to the namespace's own root, which is not the holder's where these tests run in a chroot
    os.chroot(".")
    os.close(root)


def serve(torch, on_ranks, rank, calls, out):
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    n = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://" + os.environ["TEST_STORE"], rank=rank, world_size=n)
    groups = {n: None, **{k: dist.new_group(list(range(k))) for k in range(1, n)}}
    if "TEST_NO_MESHES" not in os.environ:
        on_ranks.make_meshes(groups)
    while True:
        try:
            module, name, args, world, env = receive(calls)
        except Ended:
            break
        old = dict(os.environ)
        os.environ.update({k: str(v[rank] if isinstance(v, (list, tuple)) else v) for k, v in env.items()})
        try:
            answer = getattr(importlib.import_module(module), name)(groups[world], rank, *args)
        except BaseException as e:
            try:
                pickle.loads(pickle.dumps(e))
            except Exception:
                e = RuntimeError(f"{type(e).__name__}: {e}")
            answer = Remote(e, traceback.format_exc())
        os.environ.clear()
        os.environ.update(old)
        send(out, answer)
    import dcpd

    dcpd.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    import lib_ranks  # so that its classes have the names by which the other side knows them

    lib_ranks.main()
