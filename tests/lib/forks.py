"""Programs that start at once: forks of an interpreter that has PyTorch imported, which costs more than what most of them do.

    forks = Forks(environment); p = forks.start(file, *arguments, env=…); out, err = p.communicate(timeout=60); p.returncode

A program has its own standard files and environment, and is `__main__`. It ends as an interpreter does, but for the modules, which are
taken down in check-full only: PyTorch's cost more than most programs do. Only what is read while an interpreter starts (PYTHONWARNINGS, the
number of OpenMP threads, LD_…) is as it was for the first. That one is a fork of pytest's own process from before it became pytest's,
where warm.py began it.
"""
import atexit
import contextlib
import gc
import importlib.machinery
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types

MAX_FDS = 32  # that a call has beside those of every call
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "api" / "python" / "dcpd"
# An optimizer imports the compiler when it is made: a second and a half, and most programs have one.
MORE = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
warm = None  # calls go there, if this process was begun by warm.py
has_more = False


class Forked:
    """As much of subprocess.Popen as tests use; without pipes there is no communicate(). The status comes from a process between, whose
    child the program is."""

    def __init__(self, args, status, stdin, stdout, stderr):
        self.args, self.status, self.returncode = args, status, None
        self.stdin, self.stdout, self.stderr, self.readers = stdin, stdout, stderr, []
        self.pid = int(status.readline())

    def poll(self):
        return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None and select.select([self.status], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int(self.status.readline()))
            self.status.close()
        if self.returncode is None and timeout:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        if self.stdin:
            self.stdin.close()
        if not self.readers:
            for f in (self.stdout, self.stderr):
                text = []
                t = threading.Thread(target=lambda f=f, text=text: text.append(f.read()), daemon=True)
                t.start()
                self.readers.append((t, text))
        for t, _ in self.readers:
            t.join(None if end is None else max(0, end - time.monotonic()))
            if t.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if end is None else max(0.001, end - time.monotonic()))
        out, err = (text[0] for _, text in self.readers)
        return out, err


class Forks:
    """Without warm.py it has an interpreter of its own, which has to import PyTorch first."""

    def __init__(self, env):
        self.socket, self.parent = warm, None
        if self.socket:
            return
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.parent = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()],
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()

    def call(self, file, args, env, fds):
        """Sends a call with descriptors: the three standard files, where the status goes, and those whose numbers become arguments."""
        call = {"args": [str(file), *map(str, args)], "env": {k: str(v) for k, v in env.items()}, "cwd": os.getcwd()}
        socket.send_fds(self.socket, [json.dumps(call).encode()], fds)
        return call["args"]

    def start_with(self, file, fds, env):
        """A program with our standard output and error, whose arguments are the numbers of these descriptors there."""
        str_, stw = os.pipe()
        with open(os.devnull) as null:
            args = self.call(file, [], env, [null.fileno(), 1, 2, stw, *fds])
        os.close(stw)
        return Forked(args, os.fdopen(str_), None, None, None)

    def start(self, file, *args, env, stdin=False):
        (outr, outw), (errr, errw), (str_, stw) = os.pipe(), os.pipe(), os.pipe()
        inr, inw = os.pipe() if stdin else (os.open(os.devnull, os.O_RDONLY), None)
        args = self.call(file, args, env, [inr, outw, errw, stw])
        for fd in (inr, outw, errw, stw):
            os.close(fd)
        return Forked(args, os.fdopen(str_), os.fdopen(inw, "w") if stdin else None, os.fdopen(outr), os.fdopen(errr))

    def close(self):
        if self.parent:
            self.socket.close()
            self.parent.wait(100)


def serve(calls):
    """Returns in a child, with the call that it is to run; ends with the other side."""
    while True:
        data, fds, _, _ = socket.recv_fds(calls, 1 << 20, 4 + MAX_FDS)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            calls.close()
            pid = os.fork()
            if pid == 0:
                for i in range(3):
                    os.dup2(fds[i], i)
                for fd in fds[:4]:
                    os.close(fd)
                call = json.loads(data)
                call["args"] += map(str, fds[4:])
                return call
            for fd in fds[:3] + fds[4:]:
                os.close(fd)
            os.write(fds[3], b"%d\n" % pid)
            os.write(fds[3], b"%d\n" % os.waitpid(pid, 0)[1])
            os._exit(0)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def take(call):
    os.environ.clear()
    os.environ.update(call["env"])
    os.chdir(call["cwd"])
    sys.argv = call["args"]


def run(call):
    """The program, in a `__main__` of its own, until the interpreter ends."""
    take(call)
    sys.path[:1] = [str(pathlib.Path(sys.argv[0]).parent), *filter(None, call["env"].get("PYTHONPATH", "").split(os.pathsep))]
    main = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    exec(compile(pathlib.Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), vars(main))


def run_to_end(call):
    status = 0
    try:
        run(call)
    except KeyboardInterrupt:
        raise
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if not isinstance(e.code, (int, type(None))):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    end(status)


def end(status):
    threading._shutdown()
    atexit._run_exitfuncs()
    for f in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            f.flush()
    os._exit(status & 0xFF)


def compile_package():
    """Programs import the package themselves, but none compiles it again: the tests leave no bytecode in the tree."""
    compiled = {}
    for file in map(str, PACKAGE.rglob("*.py")):
        source = pathlib.Path(file).read_bytes()
        compiled[file] = source, compile(source, file, "exec", dont_inherit=True)
    of_source = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(loader, source, file, **options):
        known = compiled.get(str(file))
        return known[1] if known and known[0] == source else of_source(loader, source, file, **options)

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code


def import_more():
    """What programs need, unless this process is a fork of one that has it."""
    global has_more
    if has_more:
        return
    for name in MORE:
        importlib.import_module(name)
    compile_package()
    gc.freeze()  # else each program looks through all of PyTorch once more when it ends
    has_more = True


def begin(calls):
    """Serves. Returns in programs, when they have ended."""
    import_more()
    ends_whole = os.environ.get("DCPD_FULL")
    call = serve(calls)
    if ends_whole:
        run(call)
    else:
        run_to_end(call)


def warm_up():
    """From here on all programs are forks of this process, as it is now."""
    global warm
    calls, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        calls.close()
        os.setsid()
        begin(theirs)
        sys.exit()
    theirs.close()
    warm = calls


if __name__ == "__main__":
    import torch  # noqa: F401

    begin(socket.socket(fileno=int(sys.argv[1])))
