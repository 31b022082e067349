"""The package `dcpd` under test, from the tree, at a real daemon.

The tests' own harness has the same name (tests/lib/dcpd.py) and is loaded already, as `lib` of the conftest above; here the package
takes the name, which is why `make check-python` is an interpreter of its own.
"""
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "api" / "python"
if "Daemon" in vars(sys.modules.get("dcpd", object)):
    sys.modules["harness"] = sys.modules.pop("dcpd")
sys.path[:0] = [str(PACKAGE), str(pathlib.Path(__file__).resolve().parent)]

import dcpd  # noqa: E402

assert str(PACKAGE) in str(dcpd.__file__), dcpd.__file__


@pytest.fixture
def at(d, monkeypatch):
    """The daemon, found as users' programs find it; afterwards this process holds nothing there."""
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    yield d
    dcpd.close()


@pytest.fixture
def own(spawn, monkeypatch):
    """A daemon that a test may kill, found by this process."""
    def make(*args, **kw):
        d = spawn(args=args, **kw)
        monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
        return d

    yield make
    dcpd.close()


def program_environment(d, **more):
    return {**os.environ, "DCPD_URL": f"unix://{d.socket}", "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="session")
def forks(shared_daemon):
    """What needs PyTorch is forked: see tests/lib/forks.py."""
    import forks

    f = forks.Forks(program_environment(shared_daemon))
    yield f
    f.close()


@pytest.fixture
def script(d, tmp_path, request):
    """script(code, *args) → the finished process: a program with the package and the daemon's address."""
    def run(code, *args, timeout=300, env=None, check=True, wait=True):
        file = tmp_path / f"s{len(list(tmp_path.iterdir()))}.py"
        file.write_text(code)
        e = program_environment(d, **(env or {}))
        if "torch" not in code:
            p = subprocess.Popen([sys.executable, str(file), *map(str, args)], env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True)
        else:
            p = request.getfixturevalue("forks").start(file, *args, env=e)
        if not wait:
            return p
        try:
            out, err = p.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            p.kill()
            out, err = p.communicate()
            raise AssertionError(f"hangs\n{out}\n{err}") from None
        assert not check or p.returncode == 0, f"rc {p.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(p.args, p.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def rank_pool(shared_daemon, forks):
    import lib_ranks

    pool = lib_ranks.Ranks(4, {"DCPD_URL": f"unix://{shared_daemon.socket}"}, forks)
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool, d):
    """Four ranks over gloo; ranks(on_ranks.function, …, world=2) uses the first two. Afterwards they hold nothing."""
    import on_ranks

    yield rank_pool
    rank_pool(on_ranks.let_go)
