"""Faults around saves: Ctrl-C, a full /dev/shm, slots all in use, strangers at the socket, other versions, data that change meanwhile."""
import os
import random
import re
import signal
import socket
import threading
import time

import harness as lib
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_faults_dropin import gone, load, path, restarts, save, segments, state  # noqa: F401

import dcpd
from dcpd import _copy, _daemon, _tensors
from dcpd import client as C
from dcpd.torch import StorageReader, StorageWriter, _items

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
MIB = 1 << 20


# ---- Ctrl-C ----


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_an_interrupted_load_cancels_its_job(own, monkeypatch):
    """And the interrupt is what the caller sees, not that the job still uses the state dict."""
    own()
    client = dcpd.connect()
    dcpd.save({"w": np.arange(1000)}, "main:a")
    dcpd.load("main:a")
    gang = [w["pid"] for w in client._t.request("GET", "/v1/workers")["workers"] if w["role"] != "lookup"]
    real = C.Jobs.create

    def create(*args, **kw):
        for pid in gang:
            os.kill(pid, signal.SIGSTOP)
        return real(*args, **kw)

    monkeypatch.setattr(C.Jobs, "create", create)
    monkeypatch.setattr(C.Jobs, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dcpd.load("main:a")
    for pid in gang:
        os.kill(pid, signal.SIGCONT)
    (job,) = client.jobs.list(filter='kind="load"', limit=1)
    lib.wait_for(lambda: client.jobs.get(job.id).done, 20, "its end")
    assert client.jobs.get(job.id)["state"] == "cancelled"


@pytest.mark.parametrize("moment", ["copy", "sealed", "create", "created", "wait"])
def test_interrupted_saves_hold_no_slot(at, monkeypatch, moment):
    """One slot only: a save that kept it would make the next one wait for ever."""
    thing, name = {"copy": (_tensors, "copy_out"), "sealed": (C.StateDicts, "seal"), "create": (C.Jobs, "create"),
                   "created": (C.Jobs, "create"), "wait": (dcpd.SaveFuture, "result")}[moment]
    real = getattr(thing, name)

    def then_interrupt(*args, **kw):
        real(*args, **kw)
        raise KeyboardInterrupt

    for i in range(3):
        ref = f"main:{lib.fresh()}"
        with monkeypatch.context() as m:
            m.setattr(thing, name, then_interrupt if moment in ("sealed", "created") else interrupt)
            with pytest.raises(KeyboardInterrupt):
                dcpd.save({"w": np.full(1000, i)}, ref, slots=1)
        dcpd.save({"w": np.full(1000, -i)}, ref + "-next", slots=1)
        assert (dcpd.load(ref + "-next")["w"] == -i).all()
        if moment in ("created", "wait"):
            (job,) = dcpd.connect().jobs.list(filter=f'target="{ref}"', limit=1)
            dcpd.connect().jobs.wait(job)
            assert (dcpd.load(ref)["w"] == i).all(), "submitted: it goes on"
        elif moment == "sealed":  # its job is cancelled, unless it was done by then, or refused as the generation was given up first
            for job in dcpd.connect().jobs.list(filter=f'target="{ref}"', limit=1):
                lib.wait_for(lambda: dcpd.connect().jobs.get(job.id).done, 20, "its end")
                assert dcpd.connect().jobs.get(job.id)["state"] == "cancelled" or (dcpd.load(ref)["w"] == i).all()
        else:
            assert not dcpd.connect().checkpoints.exists(ref)


@pytest.mark.long
@pytest.mark.parametrize("where", [(_items, "copy_tensors"), (C.StateDicts, "seal"), (C.Jobs, "plan"), (C.Jobs, "create"),
                                   (C.Jobs, "wait")])
def test_interrupted_saves_of_the_drop_in(at, path, monkeypatch, where):  # noqa: F811
    save(state(1), path)
    lanes = len(lib.ours(at))
    for i in range(3):
        with monkeypatch.context() as m:
            m.setattr(*where, interrupt)
            with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)):
                save(state(2), path)
        save(state(3 + i), path)
        assert load(path) == load(path, StorageReader) == 3 + i
    assert len(lib.ours(at)) == lanes, "the same lanes, again and again"


def test_an_interrupted_copy_has_ended():
    """No thread of it goes on to write into what is somebody else's by then."""
    done = []

    def run(blocks):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.2)
        done.append(blocks)

    with pytest.raises(KeyboardInterrupt):
        _copy.copy([(0, 0, 64 * MIB)], 3, run)
    assert len(done) == 2


SIGINT = """
import dcpd, numpy as np, sys, torch
sd, ref = {"w": np.ones(1 << 22)}, sys.argv[1]
dcpd.save(sd, ref)
print("go", flush=True)
i = 0
try:
    while True:
        i += 1
        h = dcpd.async_save(sd, f"{ref}-{i}")
        h.result()
except KeyboardInterrupt:
    sd["w"][:] = 2
    dcpd.save(sd, ref + "-last")
    print("saved", (dcpd.load(ref + "-last")["w"].numpy() == 2).all())
"""


def test_a_real_ctrl_c(d, script):
    """At any moment of a loop that saves."""
    for late in (0.0, 0.013, 0.04, 0.2) if lib.FULL else (0.02,):
        p = script(SIGINT, f"main:{lib.fresh()}", wait=False)
        try:
            assert p.stdout.readline() == "go\n"
            time.sleep(late)
            p.send_signal(signal.SIGINT)
            out, err = p.communicate(timeout=60)
        finally:
            p.kill()
        assert "saved True" in out and p.returncode == 0, out + err
        assert not lib.ours(d)


# ---- slots ----


@pytest.mark.parametrize("mode", ["wait", "warn", "fail"])
def test_a_third_save_while_two_are_in_flight(at, monkeypatch, caplog, mode):
    """In flight as far as this process knows: it has not heard of their ends."""
    heard, real = threading.Event(), C.Jobs.wait
    monkeypatch.setattr(C.Jobs, "wait", lambda *args, **kw: heard.wait(30) and real(*args, **kw))
    w, ref = np.zeros(1000), f"main:{lib.fresh()}"
    handles = []
    for i in range(2):
        w[:] = i
        handles.append(dcpd.async_save({"w": w}, f"{ref}-{i}"))
    w[:] = 2
    hear = threading.Timer(0.5, heard.set)
    if mode == "fail":
        with pytest.raises(dcpd.SlotsBusy):
            dcpd.async_save({"w": w}, f"{ref}-2", when_busy=mode)
        assert not heard.is_set()
        hear.start()
    else:
        hear.start()
        handles.append(dcpd.async_save({"w": w}, f"{ref}-2", when_busy=mode))
        assert heard.is_set(), "it waited"
    assert ("2 saves are in flight" in caplog.text) == (mode == "warn")
    w[:] = -1
    for i, h in enumerate(handles):
        h.result(60)
        assert (dcpd.load(f"{ref}-{i}")["w"] == i).all()
    dcpd.save({"w": w}, ref, when_busy=mode)


# ---- /dev/shm ----

SMALL = """
import ctypes, dcpd, mmap, numpy as np, os, subprocess, sys, threading, time
import torch, warnings, torch.distributed.checkpoint as dcp
from dcpd.torch import StorageWriter
warnings.simplefilter("ignore")
program, home, private = sys.argv[1:]
assert ctypes.CDLL(None).unshare(0x20000) == 0    # CLONE_NEWNS
subprocess.run(["sh", "-c", private], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", "/dev/shm"], check=True)
p = subprocess.Popen([program, "--state-dir", home + "/state", "--listen", f"unix:{home}/s", "--storage", f"main={home}/main",
                      "--shm-limit", "1GiB"], stderr=open(home + "/log", "w"),
                     env={k: v for k, v in os.environ.items() if not k.startswith("DCPD_")})
os.environ["DCPD_URL"] = f"unix://{home}/s"
for _ in range(500):
    try:
        client = dcpd.connect()
        break
    except dcpd.NoDaemon:
        time.sleep(0.02)
MIB = 1 << 20
try:
    big, small = {"w": np.ones(40 * MIB, np.uint8)}, {"w": np.ones(5 * MIB, np.uint8)}
    ones = {"w": torch.ones(40 * MIB, dtype=torch.uint8)}
    dcpd.save(big, "main:ring")   # through a ring that fits
    dcp.save(ones, storage_writer=StorageWriter("main:dropin-ring"), no_dist=True)
    for name in ("ring", "dropin-ring"):
        saved = {"w": torch.zeros(40 * MIB, dtype=torch.uint8)}
        dcp.load(saved, checkpoint_id=f"{home}/main/{name}", no_dist=True)
        print(name, int(saved["w"].sum()) == 40 * MIB)
    for how in ("dcpd", "dropin"):
        try:
            if how == "dcpd":
                dcpd.async_save(big, "main:big").result(60)
            else:
                dcp.async_save(ones, storage_writer=StorageWriter("main:big"), no_dist=True).result()
            print("saved?")
        except dcpd.SharedMemoryFull as e:
            print(how, type(e).__name__, e)
        except dcp.CheckpointException as e:
            print(how, type(e.failures[0][0]).__name__, e.failures[0][0])
    h = dcpd.async_save(small, "main:small")
    dcp.save({"w": torch.ones(2 * MIB, dtype=torch.uint8)}, storage_writer=StorageWriter("main:dropin"), no_dist=True)
    try:
        dcpd.load("main:small", into={"w": np.zeros(5 * MIB, np.uint8)})
        with open("/dev/shm/other", "wb") as f:   # somebody else fills it
            f.write(bytes(24 * MIB))
    except OSError as e:
        print("full", e.errno)
    try:
        dcpd.save({"x": np.ones(20 * MIB, np.uint8)}, "main:x", slots=1)
        print("saved?")
    except dcpd.SharedMemoryFull as e:
        print("dcpd", type(e).__name__, e)
    os.unlink("/dev/shm/other")
    h.result(30)
    dcpd.save({"y": np.ones(18 * MIB, np.uint8)}, "main:y", slots=3)   # warm slots of others make room,
    held = [open("/dev/shm/" + x, "rb") for x in os.listdir("/dev/shm") if x.startswith("dcpd-")]   # once nobody maps them
    maps = [mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) for f in held]
    threading.Timer(0.3, lambda: [x.close() for x in (*maps, *held)]).start()
    dcpd.save(small, "main:again")
    print("goes on", int(dcpd.load("main:again")["w"].sum()) == 5 * MIB)
    dcpd.close()
    print("left", [x for x in os.listdir("/dev/shm") if x.startswith("dcpd-")])
finally:
    p.terminate()
    p.wait()
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small /dev/shm of its own")
def test_dev_shm_is_full(script, tmp_path):
    """By us, and by others: who needs how much, what is free, who holds it; and the trainer goes on. A save that blocks needs a ring."""
    (tmp_path / "main").mkdir()
    r = script(SMALL, lib.BIN / "dcpd", tmp_path, lib.PRIVATE_MOUNTS, timeout=100)
    lines = r.stdout.splitlines()
    full = [x for x in lines if "SharedMemoryFull" in x]
    assert len(full) == 3 and full[1].startswith("dropin"), r.stdout
    for x in full:
        assert re.search(r"\d{8} bytes are needed, \d+ of 25165824 are free; held by ", x), x
    assert "py-" in full[2] and "others, not through dcpd, " in full[2]
    assert "ring True" in lines and "dropin-ring True" in lines and "goes on True" in lines and lines[-1] == "left []", r.stdout


# ---- strangers ----


def strangers(address, stop, rng, seen):
    """What port scanners and worse send: nothing, garbage, halves of requests, one byte at a time, too much."""
    half = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"kind\":"
    held = []
    while not stop.is_set():
        s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        s.settimeout(1)
        try:
            s.connect(address)
            s.sendall(rng.choice([b"", bytes(rng.randbytes(300)), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", half, b"GET / HTTP/1.1\r\n",
                                  b"GET /" + b"a" * 20000, b"DELETE /v1/state-dicts/%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n",
                                  b"POST /v1/state-dicts HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
                                  b"GET /v1/jobs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"]))
            seen.append(1)
        except OSError:
            pass
        held.append(s)
        if len(held) > 30:
            held.pop(rng.randrange(len(held))).close()
        time.sleep(0.002)
    for s in held:
        s.close()


def test_strangers_at_the_socket(own):  # noqa: F811
    d = own()
    save(state(0), d.storages["main"] / "a")
    stop, seen = threading.Event(), []
    threads = [threading.Thread(target=strangers, args=(str(d.socket), stop, random.Random(i), seen)) for i in range(2)]
    for t in threads:
        t.start()
    try:
        for i in range(5):
            h = dcpd.async_save(state(i), f"main:s{i}")
            save(state(i), d.storages["main"] / "a")
            assert load(d.storages["main"] / "a", StorageReader) == i
            h.result(30)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert len(seen) > 50 and d.alive()
    lib.wait_for(lambda: not d.leaks(), 5, "no leaks")


# ---- two at once, nobody there, or somebody else ----


def test_two_saves_of_the_drop_in_into_one_path(at, path):  # noqa: F811
    """One after the other, as with PyTorch's own the last one wins; neither fails."""
    fs = [dcp.async_save(state(i), storage_writer=StorageWriter(path), no_dist=True) for i in (1, 2, 3)]
    for f in fs:
        f.result(60)
    assert load(path) in (1, 2, 3)
    lib.wait_for(lambda: not at.staging(), 5, "staging swept")


def test_another_version_under_the_drop_in(at, path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(C, "API", "v0")
    _daemon.forget()
    for call in (lambda: save(state(1), path), lambda: load("main:a", StorageReader)):
        with pytest.raises((dcp.CheckpointException, dcpd.ProtocolMismatch), match="speaks API 'v1', this client 'v0'"):
            call()
    monkeypatch.undo()
    _daemon.forget()


def test_no_daemon_under_the_drop_in(tmp_path, monkeypatch):
    """The drop-in says it at once, on the rank that it happens to."""
    monkeypatch.setenv("DCPD_URL", f"unix://{tmp_path}/nobody")
    start = time.monotonic()
    for call in (lambda: save(state(1), "main:a"), lambda: save(state(1), tmp_path / "a"), lambda: load("main:a", StorageReader)):
        with pytest.raises((dcp.CheckpointException, dcpd.NoDaemon), match="no dcpd "):
            call()
    with pytest.raises(dcpd.NoDaemon):
        dcp.async_save(state(1), storage_writer=StorageWriter("main:a"), no_dist=True)
    assert time.monotonic() - start < 5 * lib.PATIENCE


# ---- values at the call ----


@pytest.mark.long
@pytest.mark.seconds(900 if lib.FULL else 120)
def test_what_is_saved_is_what_was_there(own):  # noqa: F811
    """Tensors change as soon as a save is back, slots are used again, the daemon is killed now and then: every checkpoint has the
    bits of its call."""
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    d = own()
    t = torch.zeros(1 << 20, dtype=torch.int32)
    n = {"a": t, "part": t.view(1024, 1024)[:, 3:50], "many": [torch.zeros(100, dtype=torch.int32) for _ in range(50)]}
    pending, timers, kills = [], [], 0

    def check(i, dropin, f):
        f.result(60)
        if dropin:
            got = {"a": torch.zeros_like(t), "part": torch.zeros(1024, 47, dtype=torch.int32),
                   "many": [torch.zeros(100, dtype=torch.int32) for _ in range(50)]}
            dcp.load(got, storage_reader=dcp.FileSystemReader(d.storages["main"] / f"s{i}"), no_dist=True)
        else:
            got = dcpd.load(f"main:s{i}")
        want = (torch.arange(1 << 20, dtype=torch.int32) * (2 * i + 1)).bitwise_xor(i)
        assert torch.equal(got["a"], want) and torch.equal(got["part"], want.view(1024, 1024)[:, 3:50]), f"save {i}, seed {seed}"
        assert all(x.eq(i).all() for x in got["many"]), f"save {i}, seed {seed}"

    for i in range(300 if lib.FULL else 14):
        t.copy_((torch.arange(1 << 20, dtype=torch.int32) * (2 * i + 1)).bitwise_xor(i))
        for x in n["many"]:
            x.fill_(i)
        dropin = rng.random() < 0.5
        if dropin:
            f = dcp.async_save(n, storage_writer=StorageWriter(d.storages["main"] / f"s{i}"), no_dist=True)
        else:
            f = dcpd.async_save(n, f"main:s{i}", slots=rng.choice((1, 2)))
        t.fill_(-1)
        for x in n["many"]:
            x.fill_(-1)
        pending.append((i, dropin, f))
        if i % 5 == 4:
            for x in timers:
                x.join()
            time.sleep(rng.uniform(0, 0.02))
            d.kill()
            kills += 1
            timers = [threading.Timer(rng.uniform(0, 0.3), d.start)]
            timers[0].start()
        while len(pending) > 3:
            check(*pending.pop(0))
    for x in timers:
        x.join()
    for p in pending:
        check(*p)
    print(f"{i + 1} saves, {kills} kills, seed {seed}")
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")
