"""dcpctl's views: tree, plot, explain, watch, top; and Ctrl-C, which asks what shall become of a job."""
import contextlib
import csv
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

import dcpd as lib
import pytest
from test_cli import good

GOLDEN = "golden:torch-2.15.0/dtensor_2d_shard_shard/checkpoint"


@contextlib.contextmanager
def terminal(d, *args, rows=24, columns=100, **env):
    """dcpctl on a terminal of this size: an object with .until(text), .type(text), .end() → exit code, and .shown."""
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.environ.update({**lib.clean_environment(DCPD_URL=f"unix://{d.socket}", TERM="xterm", LC_ALL="C.UTF-8", NO_COLOR="1"), **env})
        os.execv(lib.BIN / "dcpctl", ["dcpctl", *map(str, args)])

    class Terminal:
        shown = ""
        code = None

        def read(self, seconds):
            if not select.select([fd], [], [], seconds)[0]:
                return True
            try:
                got = os.read(fd, 65536)
            except OSError:
                got = b""
            self.shown += got.decode(errors="replace")
            return bool(got)

        def until(self, text, seconds=30):
            end = time.monotonic() + seconds * lib.PATIENCE
            while text not in self.shown:
                assert time.monotonic() < end and self.read(1), f"no {text!r} in {self.shown!r}"

        def type(self, text):
            os.write(fd, text.encode())

        def attributes(self):
            return termios.tcgetattr(fd)[3]

        def end(self, seconds=30):
            end = time.monotonic() + seconds * lib.PATIENCE
            while self.code is None and time.monotonic() < end:
                self.read(0.1)
                done, status = os.waitpid(pid, os.WNOHANG)
                self.code = os.waitstatus_to_exitcode(status) if done else None
            while self.code is not None and select.select([fd], [], [], 0)[0] and self.read(0):
                pass
            assert self.code is not None, self.shown
            return self.code

    t = Terminal()
    try:
        yield t
    finally:
        if t.code is None:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.close(fd)


@pytest.fixture
def waiting(d):
    """A job that runs until somebody ends it: a save whose trainer never seals."""
    sd = lib.fresh()
    d.create(sd)
    d.reserve(sd, 0, 16384, 1)
    source = {"state_dict": sd, "generation": 1, "await_seal": True}
    job = d.api.submit("save", source=source, target={"storage": "main", "name": f"{sd}/1"})["id"]
    yield job
    d.api.post(f"/v1/jobs/{job}:cancel")
    d.api.wait(job)
    d.drop(sd)


def test_tree(d):
    sizes = {"model.layers.0.w": 4, "model.layers.10.w": 2, "model.layers.2.w": 1, "model.head": 8, "alone": 3,
             "optim.state.deep.only.x": 5}
    sd = lib.fresh()
    d.put(sd, [lib.image({n: ("F32", [k], bytes(4 * k)) for n, k in sizes.items()})])
    text = good(d.ctl("tree", f"shm:{sd}", env={"LC_ALL": "C.UTF-8"}))
    assert "├─ model  60 B  4 tensors" in text and "└─ optim.state.deep.only.x  20 B  float32 [5]" in text, text
    assert re.search(r"layers +28 B.*\n.*0\.w +16 B.*\n.*2\.w.*\n.*10\.w", text), "numbers by their value"
    assert "|- model" in good(d.ctl("tree", f"shm:{sd}", env={"LC_ALL": "C"})), "without UTF-8 there are no boxes"
    rows = list(csv.DictReader(io.StringIO(good(d.ctl("tree", f"shm:{sd}", "--output", "csv", "--depth", "1")))))
    assert {r["path"]: int(r["size"]) for r in rows} == {"alone": 12, "model": 60, "optim.state.deep.only.x": 20}
    assert sum(r["bytes"] for r in json.loads(good(d.ctl("tree", f"shm:{sd}", "--json"))) if "dtype" in r) == 4 * sum(sizes.values())
    assert "6 tensors" in text.splitlines()[0] and len(good(d.ctl("tree", f"shm:{sd}", "--tensors", "*.w")).splitlines()) == 5
    d.drop(sd)
    d.put(sd, [lib.image({n: ("F32", [1], bytes(4)) for n in ("a", "a.b", "a.b.c", "x.l.w", "x.l.w.absmax", "x.y")})])
    text = good(d.ctl("tree", f"shm:{sd}", env={"LC_ALL": "C"}))
    lines = [re.split(" [ 0-9]", x.strip("|-` "))[0] for x in text.splitlines()[1:]]
    assert lines == ["a", "a", "b", "b", "c", "x", "l.w", "w", "absmax", "y"], "tensors whose FQN others go on from"
    assert text.count("float32 [1]") == 6, text
    assert d.ctl("tree", f"shm:{sd}", "--depth", "x").returncode == 2 and d.ctl("tree", "shm:no-such").returncode == 6
    d.drop(sd)


def boxes(text):
    """The labels of the boxes drawn, line by line."""
    return [re.findall(r"[\d,]+", x) for x in text.splitlines() if re.match(r"  [│|]", x) and re.search(r"\d", x)]


def test_plot(d):
    text = good(d.ctl("plot", GOLDEN, "s01", env={"LC_ALL": "C.UTF-8"}))
    assert boxes(text) == [["0", "1"], ["2", "3"]] and "┼" in text and "float32  5 x 7" in text, text
    drawn = [x for x in text.splitlines() if x[2:3] in "┌│├└"]
    assert len({len(x) for x in drawn}) == 1 and drawn[0].index("┬") == drawn[-1].index("┴")
    across = drawn[0].index("┬") - 2
    assert abs(across / (len(drawn[0]) - 3) - 4 / 7) < 0.05, "to scale: 4 of 7 columns"
    plain = good(d.ctl("plot", GOLDEN, "s01", env={"LC_ALL": "C"}))
    assert boxes(plain) == [["0", "1"], ["2", "3"]] and "+" in plain and plain.isascii()
    table = [x.split() for x in text.splitlines() if "distcp" in x]
    assert [(x[0], x[5]) for x in table] == [(str(r), f"__{r}_0.distcp") for r in range(4)]
    rows = list(csv.DictReader(io.StringIO(good(d.ctl("plot", GOLDEN, "s01", "--output", "csv")))))
    assert [r["offsets"] for r in rows] == ["[0, 0]", "[0, 4]", "[3, 0]", "[3, 4]"]
    r = d.ctl("plot", GOLDEN, "s02")
    assert r.returncode == 6 and "dcpctl tree" in r.stderr


@pytest.mark.parametrize("shape", [[], [1], [0], [7], [3, 0], [2, 3, 4, 5], [100000, 2]])
def test_plot_of_any_shape(d, shape):
    sd, count = lib.fresh(), 1
    for n in shape:
        count *= n
    d.put(sd, [lib.image({"a": ("U8", shape, bytes(count))})])
    text = good(d.ctl("plot", f"shm:{sd}", "a"))
    assert text.splitlines()[0].startswith("a  uint8") and max(map(len, text.splitlines())) < 120
    d.drop(sd)


def test_explain():
    """Each code of the catalogue, without a daemon."""
    env = lib.clean_environment(DCPD_URL="unix:///nowhere")
    catalogue = (lib.ROOT / "worker/base/err.def").read_text()
    codes = {c.lower(): int(s) for c, s in re.findall(r"^X\((\w+), \w+, (\d+),", catalogue, re.M)}

    def run(*words):
        return subprocess.run([lib.BIN / "dcpctl", "explain", *words], capture_output=True, text=True, env=env)

    rows = json.loads(good(run("--json")))
    assert {r["code"]: r["status"] for r in rows} == codes
    assert all(r["what"] and r["do"] and r["title"] for r in rows)
    text = good(run("storage_full"))
    assert "HTTP 507" in text and "what to do     remove checkpoints" in text and "may go well later" in text
    r = run("storage_ful")
    assert r.returncode == 6 and 'did you mean "storage_full"' in r.stderr


def test_errors_say_the_next_step(d):
    with terminal(d, "show", "main:no/such") as t:
        assert t.end() == 6 and "not_found" in t.shown and "to do: `dcpctl ls STORAGE`" in t.shown
    assert "to do:" not in d.ctl("show", "main:no/such").stderr, "a script's log has the code"
    r = d.ctl("status", env={"DCPD_URL": "unix:///nowhere"})
    assert r.returncode == 3 and "DCPD_URL" in r.stderr


def test_watch_tells_each_change_once(d):
    run, sd = lib.fresh(), lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-1"})
    assert len(good(d.ctl("watch", f"main:{run}", "--count", "3", "--interval", "100ms")).splitlines()) == 1
    with terminal(d, "watch", f"main:{run}", "--interval", "100ms") as t:
        t.until(f"{run}/step-1")
        d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": f"{run}/step-2"})
        t.until(f"{run}/step-2")
        t.type("\x03")
        assert t.end() == 0
    assert d.ctl("watch", "main:").returncode == 2 and d.ctl("watch", "main:no-such-run", "--count", "1").returncode == 6
    d.drop(sd)


def test_top(d, waiting):
    """A screen of its own that shows the job, fits, follows keys, and leaves the terminal as it was."""
    with terminal(d, "top", "--interval", "100ms", rows=12, columns=70) as t:
        t.until("q: quit")
        assert "\x1b[?1049h" in t.shown and not t.attributes() & (termios.ECHO | termios.ICANON)
        t.until(waiting)
        for frame in t.shown.split("\x1b[H")[1:-1]:
            lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", frame).split("\n")
            assert len(lines) <= 12 and max(len(x.rstrip("\r")) for x in lines[1:]) <= 70, frame
        t.type("q")
        assert t.end() == 0 and t.shown.endswith("\x1b[?1049l")
        assert t.attributes() & termios.ECHO
    with terminal(d, "top") as t:
        t.until("q: quit")
        t.type("\x03")
        assert t.end() == 0 and t.shown.rstrip().endswith("\x1b[?1049l")
    plain = good(d.ctl("top"))
    assert "\x1b" not in plain and waiting in plain and "shared memory" in plain and "main" in plain
    assert d.ctl("top", "--json").returncode == 2


@pytest.mark.parametrize("answer,state,code", [("c\n", "cancelled", 5), ("\n", None, 130)])
def test_ctrl_c_asks(d, waiting, answer, state, code):
    """Cancel it, or leave it running: what was answered is what comes of the job."""
    with terminal(d, "job", waiting, "--follow") as t:
        t.until("await")
        t.type("\x03")
        t.until("Cancel it (c) or leave it running")
        t.type(answer)
        assert t.end() == code, t.shown
        assert state or f"dcpctl job {waiting} --follow" in t.shown
    now = d.api.get(f"/v1/jobs/{waiting}").ok(200)["state"]
    assert now == state if state else now in ("queued", "planning", "running")
