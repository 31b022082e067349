"""What all Python tests share: the daemon they talk to, and a look for leaks behind each of them."""
import collections
import faulthandler
import gc
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "lib"))
sys.dont_write_bytecode = True
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # PyTorch's idle threads sleep: they would spin on a processor that others wait for
SHM_NEEDED = 2 << 30
MANY, SAMPLE = 6, 4           # of a test function's cases
NO_ROOM = re.compile(r"No space left on device|shm_exhausted|SharedMemoryFull|/dev/shm holds")

import dcpd as lib  # noqa: E402


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job: tests interrupt programs, and themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)
    set_hypothesis_home_dir(pathlib.Path(tempfile.gettempdir()) / "dcpd-hypothesis")  # not a folder in the tree
    config.addinivalue_line("markers", "slow: only in make check-full")
    config.addinivalue_line("markers", "long: not in plain make check, which must stay short; in make check LONG=1, see the README")
    config.addinivalue_line("markers", "short(ID…): of a function's cases these are in plain make check; the others are long")
    config.addinivalue_line("markers", "many: set here, of a function's many cases: not in plain make check, see a_few()")
    config.addinivalue_line("markers", "seconds(n): on an idle machine it may need as long as this, not 120 s")


def a_few(cases):
    """Of many cases: those with a value of a parameter that recurs among them and was not seen before, and every SAMPLE-th by its id. The
    same each time, and each value of each of several parameters occurs."""
    values = [set(i.callspec.indices.items()) for i in cases]
    recurs = {v for v, n in collections.Counter(v for some in values for v in some).items() if n > 1}
    seen, few = set(), []
    for item, some in zip(cases, values):
        new = (some & recurs) - seen
        if new or not few or zlib.crc32(item.callspec.id.encode()) % SAMPLE == 0:
            few.append(item)
            seen |= some
    return few


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    some = config.getoption("lf", False) or any("[" in str(x) for x in config.args)  # then not all cases of a function are there
    functions = collections.defaultdict(list)
    for i in items:
        functions[i.nodeid.partition("[")[0]].append(i)
    for function, cases in functions.items():
        short = next((i.get_closest_marker("short") for i in cases), None)
        if short:
            long = [i for i in cases if i.callspec.id not in short.args]
            if not some and 1 < len(cases) == len(long):
                raise pytest.UsageError(f"{function}: its mark `short` names none of its cases")
            for item in long:
                item.add_marker("long")
        elif len(cases) >= MANY and not some and not any(i.get_closest_marker(m) for i in cases for m in ("long", "slow")):
            few = a_few(cases)
            for item in cases:
                if item not in few:
                    item.add_marker("many")


def pytest_collection_finish():
    """No later collection of garbage looks through PyTorch again, here or in forks: all that is imported by now stays."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A container has 64 MiB of shared memory unless it is told otherwise: what does not fit there is skipped, and says so."""
    report = yield
    room = shutil.disk_usage(lib.SHM).total
    if report.failed and room < SHM_NEEDED and NO_ROOM.search(str(report.longrepr)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: /dev/shm holds {room >> 20} MiB; all tests need {SHM_NEEDED >> 20}")
    return report


@pytest.fixture(autouse=True)
def limit(request):
    """No test hangs the run: after several times its time it fails and shows where it stood."""
    mark = request.node.get_closest_marker("seconds")
    seconds = (mark.args[0] if mark else 120) * lib.PATIENCE

    def late(*_):
        faulthandler.dump_traceback()
        raise TimeoutError(f"longer than {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.fixture(scope="session")
def golden_root(tmp_path_factory):
    """A copy of the golden checkpoints: a daemon under test never gets the tree itself."""
    d = tmp_path_factory.mktemp("golden")
    for v in sorted((HERE / "fixtures").glob("torch-*")):
        shutil.copytree(v, d / v.name)
    return d


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """Object storage: SeaweedFS with one bucket, for all tests of a run (a prefix each)."""
    import s3_server  # noqa: PLC0415: most runs need none
    with s3_server.Server(tmp_path_factory.mktemp("s3"), threads=1) as server:
        yield server


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory, golden_root):
    home = tmp_path_factory.mktemp("dcpd")
    d = lib.Daemon(home, {"main": home / "main", "other": home / "other", "golden": golden_root})
    yield d
    d.discard()


@pytest.fixture
def d(shared_daemon):
    """The session's daemon. After the test it still serves, nothing runs, and nothing is left behind."""
    if not shared_daemon.alive():
        shared_daemon.start()
    pid = shared_daemon.proc.pid
    before = {s["name"] for s in shared_daemon.api.get("/v1/state-dicts").ok(200)["state_dicts"]}
    yield shared_daemon
    api = shared_daemon.api
    assert shared_daemon.alive() and shared_daemon.proc.pid == pid, f"dcpd is gone\n{shared_daemon.tail()}"
    for state in ("queued", "planning", "running", "committing"):
        for j in api.get(f"/v1/jobs?filter=state%3D{state}").ok(200)["jobs"]:
            api.post(f"/v1/jobs/{j['id']}:cancel")
            api.wait(j["id"])
    for s in api.get("/v1/state-dicts").ok(200)["state_dicts"]:
        if s["name"] not in before:
            api.delete(f"/v1/state-dicts/{s['name']}").ok(200, 204)
    leaks = []
    try:
        lib.wait_for(lambda: not leaks.__setitem__(slice(None), shared_daemon.leaks()) and not leaks, 10)
    except AssertionError:
        raise AssertionError("leaks: " + "; ".join(leaks)) from None


@pytest.fixture
def spawn(tmp_path):
    """spawn(storages, args) → a daemon of the test's own, ended with it."""
    made = []

    def make(storages=("main",), args=(), **kw):
        home = tmp_path / f"d{len(made)}"
        home.mkdir()
        made.append(lib.Daemon(home, storages, args, **kw))
        return made[-1]

    yield make
    for x in made:
        x.discard()


@pytest.fixture
def mounted(tmp_path):
    """mounted(options) → a small tmpfs, unmounted with the test."""
    made = []

    def make(options):
        p = tmp_path / f"m{len(made)}"
        p.mkdir()
        r = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "dcpd-test", str(p)], capture_output=True, text=True)
        if r.returncode != 0:
            pytest.skip(f"cannot mount here: {r.stderr.strip()}")
        made.append(p)
        return p

    yield make
    for p in made:
        subprocess.run(["umount", "-l", str(p)], check=True)
