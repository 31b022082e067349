"""What somebody new to the package meets: resuming by hand, values of numpy, paths, wrong set-ups, and what is said then."""
import os
import re
import subprocess
import sys
import time
import warnings

import harness as lib
import numpy as np
import pytest
import torch
from conftest import PACKAGE

import dcpd
from dcpd import _daemon, _local, doctor, errors, show, values


def test_optimizer_state_resumes_by_hand(at):
    """A state dict of text keys would be taken by load_state_dict without a word, and ignored."""
    def make():
        m = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        return m, torch.optim.AdamW(m.parameters(), lr=0.1)

    m, o = make()
    m(torch.ones(2, 4)).sum().backward()
    o.step()
    name = f"main:{lib.fresh()}"
    dcpd.save({"model": m, "optim": o, "both": [o.state_dict()], "other": {"state": {"a": 1}, "param_groups": [{"params": [0]}]}}, name)
    got = dcpd.load(name)
    assert list(got["optim"]["state"]) == [0, 1, 2, 3] and list(got["other"]["state"]) == ["a"]
    m2, o2 = make()
    m2.load_state_dict(got["model"])
    o2.load_state_dict(got["optim"])
    assert torch.equal(o2.state[m2[0].weight]["exp_avg"], o.state[m[0].weight]["exp_avg"])
    part = dcpd.load(name, keys=["optim"])["optim"]
    assert list(part["state"]) == [0, 1, 2, 3]


def test_numbers_of_numpy_come_back(at):
    sd = {"best": np.float64(1e300), "n": np.int64(-4), "h": np.float16(0.5), "flag": np.bool_(True), "z": np.complex64(1 + 2j)}
    name = f"main:{lib.fresh()}"
    dcpd.save(sd, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = dcpd.load(name)
    assert {k: (type(v), v) for k, v in got.items()} == {k: (type(v), v) for k, v in sd.items()}


def test_a_hostile_numpy_value_stays_closed():
    import pickle

    class Evil:
        def __reduce__(self):
            return np._core.multiarray.scalar, (np.dtype([("a", "O")]), b"\1" * 8)

    class Short:
        def __reduce__(self):
            return np._core.multiarray.scalar, (np.dtype("f8"), b"\1")

    for x in (Evil(), Short(), np.dtype("O"), np.dtype([("a", "f4")])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert isinstance(values.from_pickle(pickle.dumps(x, 2)), dcpd.Opaque), x


def test_a_masked_array_keeps_its_mask(at):
    name = f"main:{lib.fresh()}"
    dcpd.save({"m": np.ma.masked_array([1, 2], mask=[False, True])}, name)
    got = dcpd.load(name, weights_only=False)["m"]
    assert got.mask.tolist() == [False, True]


def test_one_warning_for_all_that_is_opaque(at):
    name = f"main:{lib.fresh()}"
    dcpd.save({f"v{i}": np.array([str(i)]) for i in range(7)}, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcpd.load(name)
        dcpd.open(name)["v3"]
    first, second = (str(w.message) for w in caught)
    assert "v0: a numpy.ndarray" in first and "and 2 more are left as dcpd.Opaque" in first
    assert second.startswith("v3: a numpy.ndarray is left")
    assert {w.filename for w in caught} == {__file__}, "the caller's line is named"


def test_paths_are_shown_as_paths(at, tmp_path):
    path = tmp_path / "run" / "step-1"
    h = dcpd.async_save({"w": torch.ones(3)}, path)
    job = h.result(30)
    assert h.reference == str(path) and str(path) in repr(h) and str(path) in repr(job) and "path-" not in repr(job)
    ck = dcpd.open(path)
    assert ck.reference == str(path) and f"{path}: dcp" in repr(ck) and str(path) in ck._repr_html_()
    with pytest.raises(dcpd.CheckpointExists, match=re.escape(f"{path} exists")):
        dcpd.save({"x": 1}, path)
    with pytest.raises(dcpd.NotFound, match=re.escape(f"{tmp_path}/run/none")):
        dcpd.load(tmp_path / "run" / "none")


def test_no_checkpoint_in_another_by_a_path(at, tmp_path):
    dcpd.save({"x": 1}, tmp_path / "a")
    for inner in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        with pytest.raises(dcpd.RequestRefused, match="no checkpoint lies in another"):
            dcpd.save({"x": 1}, inner)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in (tmp_path / "a").iterdir() if p.is_file())


def test_a_link_to_the_latest_is_followed(at, tmp_path):
    for folder in (tmp_path, at.storages["main"] / lib.fresh()):
        dcpd.save({"x": 1}, folder / "step-1")
        (folder / "latest").symlink_to("step-1")
        assert dcpd.load(folder / "latest") == {"x": 1} and dcpd.open(str(folder / "latest"))["x"] == 1


def test_checkpoints_by_their_numbers(at):
    from dcpd import _train

    where = f"main:{lib.fresh()}"
    assert _train.numbered(where) == [] and _train.newest(where) is None
    for n in ("checkpoint-10", "checkpoint-9", "other", "checkpoint-9-old"):
        dcpd.save({"x": 1}, f"{where}/{n}")
    assert _train.numbered(where) == [(9, "checkpoint-9"), (10, "checkpoint-10")] and _train.newest(where) == f"{where}/checkpoint-10"


def test_urls_are_no_directories(at, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/run", "file:///tmp/x", "hf://a"):
        with pytest.raises(dcpd.RequestRefused, match="no URLs"):
            dcpd.save({"x": 1}, url)
    assert not list(tmp_path.iterdir())


def test_a_daemon_that_lets_nobody_in_is_no_obstacle(at, tmp_path, monkeypatch):
    """A path goes to a private daemon where the system's may not be used; a reference says why it cannot."""
    monkeypatch.delenv("DCPD_URL")

    def locked(*a, **k):
        raise dcpd.Forbidden("no permission; join")

    monkeypatch.setattr(_daemon, "connect", locked)
    _daemon.forget()
    from dcpd._http import Endpoint, Transport
    monkeypatch.setattr(_local, "private", lambda: dcpd.Client(Transport(Endpoint(str(at.socket)))))
    dcpd.save({"x": 1}, tmp_path / "mine")
    assert (tmp_path / "mine/.metadata").exists()
    with pytest.raises(dcpd.Forbidden):
        dcpd.save({"x": 1}, "main:x")
    _daemon.forget()


def test_the_first_socket_may_be_locked(at, monkeypatch):
    from dcpd import client
    from dcpd._http import Endpoint, Transport

    ends = [Endpoint("/locked"), Endpoint(str(at.socket))]
    monkeypatch.setattr(client, "default_endpoints", lambda: ends)
    real = Transport.raw

    def raw(self, *a, **k):
        if self.endpoint.unix == "/locked":
            raise dcpd.Forbidden("/locked: no permission")
        return real(self, *a, **k)

    monkeypatch.setattr(Transport, "raw", raw)
    assert dcpd.connect().url.endswith(str(at.socket))
    ends.pop()
    with pytest.raises(dcpd.Forbidden):
        dcpd.connect()


def test_elsewhere_there_is_no_shared_memory(at, monkeypatch):
    """Over HTTP from a container: a save and a load say what is wrong, and are not taken for a checkpoint that is not there."""
    from dcpd import image

    name = f"main:{lib.fresh()}"
    dcpd.save({"w": torch.arange(6.0)}, name)
    dcpd.close()
    monkeypatch.setattr(image, "SHM", "/nowhere")
    for call in (lambda: dcpd.save({"w": torch.ones(2)}, name, overwrite=True), lambda: dcpd.load(name),
                 lambda: dcpd.load(name, into={"w": torch.ones(6)})):
        with pytest.raises(dcpd.NoSharedMemory, match="--ipc=host") as e:
            call()
        assert not isinstance(e.value, dcpd.NotFound)
    assert dcpd.open(name)["w"][1:3].tolist() == [1, 2], "tensors can be read from anywhere"
    line = doctor._same_shm(dcpd.connect())
    assert line[0] == "fail" and "--ipc=host" in line[2]


def test_wrong_words_are_refused_before_anything_happens(at):
    name = f"main:{lib.fresh()}"
    for wrong in ({"slots": 0}, {"slots": 17}, {"on_divergence": "ignore"}, {"when_busy": "never"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dcpd.save({"x": 1}, name, **wrong)
    dcpd.save({"x": 1}, name, overwrite=1)
    p = errors.from_problem({"code": "validation_failed", "detail": "/slots: 0 is wrong", "pointer": "/slots"})
    assert str(p) == "/slots: 0 is wrong"
    assert "DCPD_TOKEN_FILE" in str(errors.from_problem({"code": "unauthenticated", "detail": "send Authorization: Bearer"}))


def test_a_save_that_is_waited_for_does_not_log_what_it_raises(at, caplog):
    name = f"main:{lib.fresh()}"
    dcpd.save({"x": 1}, name)
    with pytest.raises(dcpd.RequestRefused, match="no checkpoint lies in another"):
        dcpd.save({"x": 1}, name + "/inner")
    assert not caplog.records
    with pytest.raises(dcpd.RequestRefused):
        dcpd.async_save({"x": 1}, name + "/inner").result(30)
    assert "inner failed" in caplog.text


def test_progress_asked_for_at_the_end_does_not_undo_it(at, monkeypatch):
    h = dcpd.async_save({"w": torch.ones(10)}, f"main:{lib.fresh()}")
    late = dict(h._record, state="running")
    h.result(30)
    h._seen(dcpd.Job(late))
    assert h._record["state"] == "succeeded" and h.result()["state"] == "succeeded"


# ------------------------------------------------------------------------------------------------------------- progress

PROGRESS = """
import sys, torch, dcpd
sys.modules["tqdm"] = sys.modules["tqdm.auto"] = None
x = {"w": torch.ones(64 << 20 >> 2)}
dcpd.save(x, sys.argv[1], progress=True)
dcpd.load(sys.argv[1], progress=True)
dcpd.load(sys.argv[1], into=x, progress=True)
try:
    dcpd.save(x, sys.argv[1] + "/in", progress=True)
except dcpd.RequestRefused as e:
    print("refused")
"""


def test_lines_of_progress(script):
    name = f"main:{lib.fresh()}"
    done = script(PROGRESS, name, timeout=110)
    lines = done.stderr.splitlines()
    for line, what in zip(lines, (f"save {name}", f"load {name}", f"load {name}")):
        assert re.fullmatch(rf"{what}: 67\.1 MB(, [\d.]+ .B/s)?, succeeded", line), line
    assert lines[3:] == [] and done.stdout == "refused\n", "a save that is refused has made no progress"


@pytest.mark.long
def test_a_bar_on_a_terminal(at, tmp_path):
    """On a terminal one line is written over, and is never left open."""
    file, name = tmp_path / "p.py", f"main:{lib.fresh()}"
    file.write_text(PROGRESS)
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    out = subprocess.run(["script", "-qec", f"stty cols 60; {sys.executable} {file} {name}", "/dev/null"], env=env, capture_output=True,
                         timeout=110)
    assert out.returncode == 0, out.stdout
    text = out.stdout.decode()
    shown = [line.rpartition("\x1b[K")[2] for line in text.split("\r\n")]
    assert shown[-2:] == ["refused", ""] and sum(s.endswith("succeeded") for s in shown) == 3, shown
    assert text.count("\r\x1b[K") > sum("\x1b[K" in line for line in text.split("\r\n")), "written over"


def test_words_of_progress():
    running = {"state": "running", "progress": {"bytes_done": 5e8, "bytes_total": 2e9, "rate": 1e8, "eta_s": 15}}
    assert show._state(running, running["progress"], int(5e8), int(2e9)) == ["25 %", "500 MB of 2 GB", "100 MB/s", "15 s left"]
    assert show._state({"state": "planning"}, {}, 0, 0) == ["planning"]
    assert show._state({"state": "committing"}, {}, 5, 5) == ["100 %", "5 B of 5 B", "committing"]


# --------------------------------------------------------------------------------------------------------------- doctor


def examined(monkeypatch, **env):
    for k in ("DCPD_URL", "DCPD_TOKEN", "DCPD_TOKEN_FILE", "DCPD_BIN"):
        monkeypatch.delenv(k, raising=False)
    for k, v in env.items():
        monkeypatch.setenv(k, str(v))
    return {state + " " + what: todo for state, what, todo in doctor.examine()}


def finding(found, word):
    lines = [k for k in found if word in k]
    assert len(lines) == 1, (word, found)
    return lines[0], found[lines[0]]


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """No daemon to be found."""
    from dcpd import client
    from dcpd._http import Endpoint

    monkeypatch.setattr(client, "default_endpoints", lambda: [Endpoint(str(tmp_path / "none"))])


def test_doctor_without_a_daemon(nothing, monkeypatch):
    found = examined(monkeypatch, DCPD_BIN=lib.BIN / "dcpd")
    what, todo = finding(found, "no dcpd found")
    assert what.startswith("warn") and "python -m" not in what and "private daemon" in todo and "dcpd --storage" in todo
    monkeypatch.setattr(_local, "find_program", _no_program)
    found = examined(monkeypatch)
    assert finding(found, "no dcpd found")[0].startswith("fail") and "private" not in finding(found, "no dcpd found")[1]
    assert "make" in finding(found, "no dcpd program")[1]


def _no_program():
    raise dcpd.NoDaemon("none")


def test_doctor_at_a_daemon_that_keeps_us_out(at, monkeypatch):
    tcp = at.tcp_client()
    url = "http://{}:{}".format(*tcp.tcp)
    what, todo = finding(examined(monkeypatch, DCPD_URL=url), "answers, but not us")
    assert what.startswith("fail") and "DCPD_TOKEN_FILE" in todo
    assert finding(examined(monkeypatch, DCPD_URL="ftp://x"), "ftp://x")[0].startswith("fail")
    monkeypatch.setattr(doctor, "connect", _locked)
    what, todo = finding(examined(monkeypatch), "no permission")
    assert "--allow-group" in todo and f"uid {os.geteuid()}" in todo and "--allow-group" not in what


def _locked():
    raise dcpd.Forbidden("/s: no permission; you must be in the group that dcpd's --allow-group names")


def test_doctor_and_versions(at, monkeypatch):
    monkeypatch.setattr(doctor, "__version__", "9.9.9")
    what, todo = finding(examined(monkeypatch, DCPD_URL=f"unix://{at.socket}"), "workers, you are")
    assert what.startswith("warn") and "9.9.9" in todo and "pip install" in todo


def test_doctor_and_memory(monkeypatch):
    class Small:
        f_frsize, f_blocks, f_bavail = 4096, 16384, 16384

    with monkeypatch.context() as m:
        m.setattr(os, "statvfs", lambda p: Small)
        small = doctor._shm()
        Small.f_bavail = 100
        full = doctor._shm()
    assert "--shm-size" in small[2] and "dcpctl ls shm:" in full[2]


def test_a_reader_that_has_enough_is_no_error(at):
    dcpd.save({"w": torch.ones(3)}, name := f"main:{lib.fresh()}")
    for words in (["ls", "main"], ["show", name]):
        r, w = os.pipe()
        os.close(r)
        p = subprocess.run([sys.executable, "-m", "dcpd", *words], cwd=PACKAGE, stdout=w, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(w)
        assert (p.returncode, p.stderr) == (0, ""), p


def test_importing_costs_little():
    """Also with warnings as errors; and nothing heavy comes along."""
    code = ("import sys; before = set(sys.modules); import dcpd; new = set(sys.modules) - before; "
            "print(len(new), sorted({'torch', 'numpy', 'http', 'json', 'logging', 'asyncio'} & set(sys.modules)))")
    out = subprocess.run([sys.executable, "-W", "error", "-S", "-c", code], capture_output=True, text=True, check=True,
                         env={"PYTHONPATH": str(PACKAGE)})
    modules, _, loaded = out.stdout.strip().partition(" ")
    assert loaded == "[]" and int(modules) < 60, out.stdout


@pytest.mark.long
def test_nothing_is_left_open(script):
    """With all warnings as errors, also those of what is collected at the end; leases are renewed all the time."""
    code = """
import gc, sys, time, types, dcpd
from dcpd import _session
sleep, renewed = time.sleep, []
_session.time = types.SimpleNamespace(sleep=lambda _: renewed.append(sleep(0.02)), monotonic=time.monotonic)
dcpd.save({"x": 1, "t": (1, 2)}, sys.argv[1])
while len(renewed) < 3:
    sleep(0.02)
dcpd.async_save({"x": 2}, sys.argv[1], overwrite=True).result()
with dcpd.connect() as c:
    assert dcpd.open(sys.argv[1])["x"] == 2 and dcpd.load(sys.argv[1], client=c) == {"x": 2}
dcpd.close()
gc.collect()
"""
    out = script(code, f"main:{lib.fresh()}", env={"PYTHONWARNINGS": "error"})
    assert not out.stderr, out.stderr
