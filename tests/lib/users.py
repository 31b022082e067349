"""Other users for tests that run as root: a child that becomes one, and a directory that others can come to, which pytest's are not."""
import contextlib
import grp
import os
import pathlib
import shutil
import signal
import tempfile
import traceback

GROUP = grp.getgrnam("users")
ALICE, BOB = 54321, 54322


def as_user(uid, groups, fn, *args):
    """What fn returns, by repr, or what it raises, in a child that is `uid` with these groups."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        try:
            os.setgroups(groups)
            os.setgid(uid)
            os.setuid(uid)
            text = repr(fn(*args))
        except BaseException:
            text = traceback.format_exc()
        os.write(w, text.encode()[-4000:])
        os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        text = f.read()
    os.waitpid(pid, 0)
    return text


@contextlib.contextmanager
def reachable_folder():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-users-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        for p in pathlib.Path("/proc").glob("[0-9]*"):  # a private daemon of such a user, which would stay for a minute
            with contextlib.suppress(OSError):
                if os.fsencode(folder) in (p / "cmdline").read_bytes():
                    os.kill(int(p.name), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)
