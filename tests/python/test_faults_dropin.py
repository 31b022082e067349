"""Faults under dcpd.torch's writer and reader, one rank: whoever dies, and whenever. PyTorch's own reader says what is there afterwards."""
import http.client
import threading
import time

import harness as lib
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpd
from dcpd import _daemon, _http
from dcpd import client as C
from dcpd.torch import StorageReader, StorageWriter, _items, _lane
from test_faults import kept_for_loads

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MIB = 1 << 20
HEAD = """
import dcpd, dcpd._session as S, os, sys, time, threading, torch, warnings
S.LEASE_SECONDS = 4
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
import dcpd.client as C, dcpd.torch._items as I, dcpd.torch._lane as L, dcpd.torch._writer as W
from dcpd.torch import StorageReader, StorageWriter
def state(x):
    return {"w": torch.full((1 << 18,), float(x)), "v": {"x": x}}
"""


def state(x):
    return {"w": torch.full((1 << 18,), float(x)), "v": {"x": x}}


def save(sd, path, **kw):
    dcp.save(sd, storage_writer=StorageWriter(path, **kw), no_dist=True)


def load(path, reader=dcp.FileSystemReader):
    """What a checkpoint of state(x) holds: x, the same in all of it."""
    sd = state(-1)
    dcp.load(sd, storage_reader=reader(path), no_dist=True)
    x = sd["v"]["x"]
    assert sd["w"].eq(x).all(), "torn"
    return x


@pytest.fixture
def path(d):
    return d.storages["main"] / lib.fresh()


def lists(d, others=()):
    """State dicts of saves that say what lies where: nobody loads those."""
    return [s["name"] for s in d.api.get("/v1/state-dicts").ok(200)["state_dicts"] if s["name"] in set(lib.ours(d)).difference(others)
            and s["on_owner_death"] == {"drop": True}]


def segments(d):
    return {s["segment"] for sd in lib.ours(d) for r in d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"] for s in r["slots"]
            if s.get("segment")}


def gone(d, files, seconds=20):
    lib.wait_for(lambda: not lib.ours(d), seconds, "the state dicts of the dead")
    lib.wait_for(lambda: not [f for f in files if lib.segment_file(f).exists()], 5, "their segments")
    lib.wait_for(lambda: not d.staging(), 5, "staging swept")


# ---- the trainer ----

VICTIMS = HEAD + """
import dcpd._ask
def stop(*_, **__):
    print("here", flush=True)
    time.sleep(60)
def victim(where, how, path):
    dcpd._ask.LEASE = 1
    at = {"copy": (I, "copy_tensors"), "seal": (C.StateDicts, "seal"), "write": (StorageWriter, "write_data"),
          "finish": (StorageWriter, "finish"),
          "plan": (C.Jobs, "plan"), "create": (C.Jobs, "create"), "wait": (C.Jobs, "wait")}[where]
    setattr(*at, stop)
    if how == "save":
        dcp.save(state(2), storage_writer=StorageWriter(path), no_dist=True)
    elif how == "async":
        dcp.async_save(state(2), storage_writer=StorageWriter(path), no_dist=True)
        time.sleep(60)
    elif how == "load":
        dcp.load(state(2), storage_reader=StorageReader(path), no_dist=True)
    else:
        dcpd.load(path, into=state(2))
victim(*sys.argv[1:])
"""
KILLS = [("copy", "async"), ("write", "async"), ("create", "save"), ("wait", "async"), ("wait", "load"), ("wait", "into")]
if lib.FULL:
    KILLS += [("copy", "save"), ("seal", "async"), ("finish", "save"), ("plan", "async"), ("wait", "save"), ("create", "load"),
              ("seal", "load"), ("seal", "into")]


@pytest.fixture
def victims(d, script):
    """victims(where, how, path): kills it there; gives back the segments that were there then."""
    def kill(*args):
        p = script(VICTIMS, *args, wait=False, env={"DCPD_DIRECT": "0"})  # a load has segments, and jobs, that it may leave behind
        assert p.stdout.readline() == "here\n", p.communicate()
        files = segments(d)
        p.kill()
        p.communicate()
        return files

    return kill


@pytest.mark.short("copy-async")
@pytest.mark.parametrize("where, how", KILLS)
def test_trainer_killed(at, victims, path, where, how):
    """The checkpoint that was there stays, until the job is submitted; then the new one comes without its trainer."""
    save(state(1), path)
    mine, before = set(lib.ours(at)), path.stat().st_ino
    files = victims(where, how, path)
    if where == "wait" and how in ("save", "async"):
        lib.wait_for(lambda: path.stat().st_ino != before, 10, "the save goes on without its trainer")
        assert load(path) == 2
        lib.wait_for(lambda: not lists(at, mine), 20, "the list of its items goes, the data stay")
        kept_for_loads(at, mine)
    else:
        assert load(path) == 1
    lib.wait_for(lambda: set(lib.ours(at)) <= mine, 20, "the state dicts of the dead")
    save(state(3), path)
    assert load(path) == load(path, StorageReader) == 3
    dcpd.close()
    gone(at, files)


EXIT = HEAD + """
from torch.distributed.checkpoint.staging import BlockingAsyncStager
how, path = sys.argv[1:]
kw = {}
if how == "stager":
    kw["async_stager"] = BlockingAsyncStager()
    real = StorageWriter.write_data
    def late(self, plan, planner):
        import concurrent.futures.thread as pools
        while not pools._shutdown:   # until the interpreter is ending
            time.sleep(0.01)
        return real(self, plan, planner)
    StorageWriter.write_data = late
dcp.async_save({"w": torch.full((6 << 20,), 2.0), "v": {"x": 2}}, storage_writer=StorageWriter(path), no_dist=True, **kw)
"""


@pytest.mark.parametrize("how", ["staged", "stager"])
def test_interpreter_exit_with_a_save_in_flight(d, script, path, how):
    """PyTorch's executor is waited for; with a stager of one's own the copy itself is made while the interpreter ends."""
    r = script(EXIT, how, path, env={"DCPD_COPY_THREADS": "2"})
    assert "Traceback" not in r.stderr, r.stderr
    sd = {"w": torch.zeros(6 << 20), "v": {"x": 0}}
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert sd["w"].eq(2).all() and sd["v"]["x"] == 2
    assert not lib.ours(d), "given back at exit, without waiting for a lease"


FORK = HEAD + """
path = sys.argv[1]
def x_of(p):
    sd = state(-1)
    dcp.load(sd, storage_reader=StorageReader(p), no_dist=True)
    assert sd["w"].eq(sd["v"]["x"]).all()
    return sd["v"]["x"]
w = StorageWriter(path + "-0")
staged = w.stage(state(1))          # the parent's snapshot
pid = os.fork()
if pid == 0:
    dcp.save(state(2), storage_writer=StorageWriter(path + "-child"), no_dist=True)
    dcp.save(staged, storage_writer=StorageWriter(path + "-both"), no_dist=True)
    os._exit(0 if x_of(path + "-child") == 2 and x_of(path + "-both") == 1 else 1)
dcp.save(staged, storage_writer=w, no_dist=True)
dcp.save(state(3), storage_writer=StorageWriter(path + "-1"), no_dist=True)
assert os.waitpid(pid, 0)[1] == 0
assert (x_of(path + "-0"), x_of(path + "-1"), x_of(path + "-child")) == (1, 3, 2)
print("ok")
"""


@pytest.mark.long
def test_fork_after_connect(d, script, path):
    assert script(FORK, path).stdout == "ok\n"
    lib.wait_for(lambda: not lists(d), 20, "the child's, which it did not give back")
    kept_for_loads(d)


# ---- the daemon ----


class Restarts:
    """restarts.at(object, name): the daemon is killed when that is called first, and started again a moment later."""

    def __init__(self, d, monkeypatch):
        self.d, self.monkeypatch, self.struck, self.timers = d, monkeypatch, 0, []

    def strike(self, late=0.0):
        time.sleep(late)
        self.struck += 1
        self.d.kill()
        t = threading.Timer(0.3, self.d.start)
        t.start()
        self.timers.append(t)

    def at(self, thing, name, before=True, late=0.0):
        real, n = getattr(thing, name), self.struck

        def wrapped(*args, **kw):
            if self.struck > n:
                return real(*args, **kw)
            if before:
                self.strike(late)
                return real(*args, **kw)
            out = real(*args, **kw)
            self.strike(late)
            return out

        self.monkeypatch.setattr(thing, name, wrapped)

    def settle(self):
        for t in self.timers:
            t.join(30)


@pytest.fixture
def restarts(own, monkeypatch):
    r = Restarts(own(), monkeypatch)
    yield r
    r.settle()


MOMENTS = {
    "reserve": (C.StateDicts, "reserve", True, 0), "not yet mapped": (C.StateDicts, "reserve", False, 0),
    "reserved": (_items, "copy_tensors", True, 0), "reserved and in the journal": (_items, "copy_tensors", True, 0.5),
    "copied": (_items, "copy_tensors", False, 0),
    "between stage and write": (StorageWriter, "write_data", True, 0), "sealed": (StorageWriter, "write_data", False, 0),
    "list written": (_lane.Lane, "put_image", True, 0), "list sealed": (_lane.Lane, "put_image", False, 0),
    "plan": (C.Jobs, "plan", True, 0), "planned": (C.Jobs, "plan", False, 0), "submitted": (C.Jobs, "create", False, 0),
}


EARLY = ("reserve", "not yet mapped", "reserved", "copied")


@pytest.mark.short("async-sealed")
@pytest.mark.parametrize("how, moment", [(h, m) if h == "async" else pytest.param(h, m, marks=pytest.mark.long)
                                         for h in ("async", "first", "save") for m in MOMENTS
                                         if lib.FULL or h == "async" or (h == "first" and m in EARLY)])
def test_daemon_restarted_in_a_save(restarts, moment, how):
    """first: into new segments, of which the journal may not know yet."""
    d = restarts.d
    path = d.storages["main"] / "a"
    if how == "first":
        _daemon.default_client()
    else:
        save(state(1), path)
    restarts.at(*MOMENTS[moment])
    if how != "async":
        save(state(2), path)
    else:
        sd = state(2)
        f = dcp.async_save(sd, storage_writer=StorageWriter(path), no_dist=True)
        sd["w"].zero_()
        f.result(60)
    assert restarts.struck == 1 and load(path) == 2
    save(state(3), path)
    assert load(path, StorageReader) == 3
    lib.wait_for(lambda: not d.leaks(), 5, "no leaks")


@pytest.mark.long
@pytest.mark.parametrize("thing, name, before", [(_lane.Lane, "put_head", True), (_lane.Lane, "put_head", False),
                                                 (C.Jobs, "create", False), (C.Checkpoints, "locate", True),
                                                 (C.Checkpoints, "locate", False)])
def test_daemon_restarted_in_a_load(restarts, monkeypatch, thing, name, before):
    d = restarts.d
    monkeypatch.setenv("DCPD_DIRECT", str(int(name == "locate")))
    path = d.storages["main"] / "a"
    save(state(1), path)
    restarts.at(thing, name, before)
    assert load(path, StorageReader) == 1 and restarts.struck == 1
    assert load(path, StorageReader) == 1
    lib.wait_for(lambda: not d.leaks(), 5, "no leaks")


def load_into(path):
    sd = state(-1)
    dcpd.load(path, into=sd)
    return sd["v"]["x"]


WAYS = {"drop-in": lambda path, x: save(state(x), path), "save": lambda path, x: dcpd.save(state(x), path, overwrite=True),
        "async": lambda path, x: dcpd.async_save(state(x), path, overwrite=True).result(60),
        "reader": lambda path, x: load(path, StorageReader), "into": lambda path, x: load_into(path),
        "new": lambda path, x: dcpd.load(path)["v"]["x"]}


@pytest.mark.long
@pytest.mark.parametrize("way", [w if w in ("drop-in", "new") else pytest.param(w, marks=pytest.mark.long) for w in WAYS])
def test_any_answer_may_be_lost(at, path, monkeypatch, way):
    """As if the daemon had died when it had done what it was asked for: the client asks again, whatever it was."""
    real, asked = _http.Transport._once, []
    _daemon.default_client()
    save(state(0), path)

    def once(self, method, name, *args):
        answer = real(self, method, name, *args)
        asked.append(f"{method} {name}")
        if len(asked) == nth and self.reconnect:
            self.close()
            raise http.client.RemoteDisconnected("Remote end closed connection without response")
        return answer

    monkeypatch.setattr(_http.Transport, "_once", once)
    nth = 0
    while len(asked) >= nth:
        nth += 1
        dcpd.close()
        asked.clear()
        out = WAYS[way](path, nth)
        assert out == 0 if way in ("reader", "into", "new") else load(path) == nth, asked
    assert nth > 2


@pytest.mark.parametrize("when", ["free", "staged"])
def test_lanes_that_are_lost_are_made_again(own, when):
    """The lease was over, say after a night in a debugger. What was staged before is still in this process's memory."""
    d = own()
    path = d.storages["main"] / "a"
    save(state(1), path)
    w = StorageWriter(path)
    staged = w.stage(state(2)) if when == "staged" else state(2)
    d.drop(*lib.ours(d))
    dcp.save(staged, storage_writer=w, no_dist=True)
    assert load(path) == 2
    save(state(3), path)
    assert load(path, StorageReader) == 3
