"""Faults: whoever dies, and whenever: nothing hangs, no snapshot is torn, nothing stays in shared memory."""
import http.server
import json
import threading
import time

import harness as lib
import numpy as np
import pytest

import dcpd
from dcpd import _daemon, _tensors

SHORT = "import dcpd._session as S; S.LEASE_SECONDS = 4\n"
MIB = 1 << 20


def segments(d):
    return {s["segment"] for sd in lib.ours(d) for r in d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"] for s in r["slots"]
            if s.get("segment")}


def gone(d, files, seconds=20):
    lib.wait_for(lambda: not lib.ours(d), seconds, "the state dicts of the dead")
    lib.wait_for(lambda: not [f for f in files if lib.segment_file(f).exists()], 5, "their segments")


def kept_for_loads(d, others=()):
    """What was saved is released, and stays where the next trainer finds it. others: state dicts that are not looked at."""
    slots = lambda name: [s for r in d.api.get(f"/v1/state-dicts/{name}").ok(200)["ranks"] for s in r["slots"]]
    for name in set(lib.ours(d)).difference(others):
        lib.wait_for(lambda n=name: all(s["state"] == "free" for s in slots(n)), 20, "released")
        assert any(s.get("segment") for s in slots(name))
        d.drop(name)


KILL = SHORT + """
import dcpd, numpy as np, os, sys, time
where, ref = sys.argv[1:]
def stop(*_):
    print("here", flush=True)
    time.sleep(60)
if where == "copy":
    import dcpd._tensors as T
    T.copy_out = stop
elif where == "seal":
    import dcpd.client as C
    C.StateDicts.seal = stop
elif where == "submit":
    import dcpd._save as V
    V._submit = stop
dcpd.async_save({"w": np.arange(1 << 20)}, ref)
stop()
"""


@pytest.mark.short("copy")
@pytest.mark.parametrize("where", ["copy", "seal", "submit", "done"])
def test_trainer_killed(d, script, where):
    name = lib.fresh()
    p = script(KILL, where, f"main:{name}", wait=False)
    assert p.stdout.readline() == "here\n", p.stderr.read()
    files = segments(d)
    assert len(files) == 1
    p.kill()
    p.communicate()
    if where in ("submit", "done"):
        lib.wait_for(lambda: (d.storages["main"] / name / ".metadata").exists(), 10, "the save goes on without its trainer")
        assert np.array_equal(dcpd.load(f"main:{name}", client=dcpd.connect(f"unix://{d.socket}"))["w"].numpy(), np.arange(1 << 20))
        kept_for_loads(d)
    gone(d, files)


@pytest.mark.parametrize("late", [0, 0.5])
def test_daemon_restarted_between_reserve_and_seal(own, monkeypatch, late):
    """At once, when the journal may not have the reservation yet; and later."""
    d = own()
    real = _tensors.copy_out
    kills = [1]

    def copy(*args):
        if kills:
            time.sleep(late * kills.pop())
            d.kill()
            threading.Timer(0.3, d.start).start()
        real(*args)

    monkeypatch.setattr(_tensors, "copy_out", copy)
    dcpd.save({"w": np.arange(1000)}, "main:a")
    monkeypatch.setattr(_tensors, "copy_out", real)
    assert np.array_equal(dcpd.load("main:a")["w"].numpy(), np.arange(1000))
    dcpd.save({"w": np.arange(1000)}, "main:b")
    lib.wait_for(lambda: not d.leaks(), 5, "no leaks")


def test_a_rank_that_comes_while_the_daemon_restarts(own):
    """Rank 0 met the daemon; another rank's first request finds none, and waits for it."""
    d = own()
    d.kill()
    again = threading.Timer(0.5, d.start)
    again.start()
    try:
        assert _daemon.client_at(f"unix://{d.socket}").state_dicts.list() == []
    finally:
        again.join()


def test_daemon_restarted_in_a_save(own):
    d = own()
    h = dcpd.async_save({"w": np.ones(64 * MIB // 8)}, "main:a")
    d.kill()
    time.sleep(0.2)
    d.start()
    assert h.result(60)["state"] == "succeeded"
    assert dcpd.load("main:a")["w"].sum() == 64 * MIB // 8


def test_daemon_gone_for_good(own, monkeypatch):
    d = own()
    dcpd.save({"x": 1}, "main:a")
    d.kill()
    monkeypatch.setattr(_daemon.default_client()._t, "reconnect", 0.5)
    with pytest.raises(dcpd.ConnectionLost, match="did not come back"):
        dcpd.save({"x": 1}, "main:b")


def test_state_dict_lost_is_made_again(own):
    """The lease was over, say after a night in a debugger: the next save just works."""
    d = own()
    dcpd.save({"w": np.arange(10)}, "main:a")
    d.drop(*lib.ours(d))
    dcpd.save({"w": np.arange(20)}, "main:b")
    assert len(dcpd.load("main:b")["w"]) == 20 and len(lib.ours(d)) == 1


def test_shared_memory_full(own):
    d = own("--shm-limit", "16MiB")
    with pytest.raises(dcpd.SharedMemoryFull) as e:
        dcpd.save({"w": np.zeros(32 * MIB, np.uint8)}, "main:a")
    assert isinstance(e.value, MemoryError) and e.value.retryable and "MiB" in str(e.value) or "bytes" in str(e.value)
    dcpd.save({"w": np.zeros(MIB, np.uint8)}, "main:a")
    with pytest.raises(dcpd.SharedMemoryFull):
        dcpd.load("main:a", into={"w": np.zeros(MIB, np.uint8), "x": np.zeros(20 * MIB, np.uint8)}, strict=False)
    dcpd.load("main:a", into={"w": np.zeros(MIB, np.uint8)})
    lib.wait_for(lambda: not d.leaks(), 5, "no leaks")


FORK = """
import dcpd, numpy as np, os, sys, threading
ref = sys.argv[1]
def holds(name, x):
    a = {"w": np.zeros(1 << 18, int)}
    dcpd.load(name, into=a)
    return (a["w"] == x).all()
dcpd.save({"w": np.full(1 << 18, 1)}, ref + "-0")
pid = os.fork()
if pid == 0:
    dcpd.save({"w": np.full(1 << 18, 2)}, ref + "-child")
    os._exit(0 if holds(ref + "-child", 2) else 1)
dcpd.save({"w": np.full(1 << 18, 3)}, ref + "-1")
assert os.waitpid(pid, 0)[1] == 0
assert holds(ref + "-0", 1) and holds(ref + "-1", 3) and holds(ref + "-child", 2)
dcpd.save({"w": np.full(1 << 18, 4)}, ref + "-2")
print("ok")
"""


def test_fork_after_connect(d, script):
    assert script(FORK, f"main:{lib.fresh()}").stdout == "ok\n"


EXIT = """
import dcpd, numpy as np, sys
how, ref = sys.argv[1:]
dcpd.async_save({"w": np.ones(1 << 22)}, ref, at_exit=how)
"""


@pytest.mark.long
def test_interpreter_exit_with_a_save_in_flight(d, script):
    name = lib.fresh()
    script(EXIT, "wait", f"main:{name}")
    assert (d.storages["main"] / name / ".metadata").exists(), "waited until it is durable"
    assert not lib.ours(d)
    name = lib.fresh()
    script(SHORT + EXIT, "leave", f"main:{name}")
    lib.wait_for(lambda: (d.storages["main"] / name / ".metadata").exists(), 20, "left to the daemon")
    kept_for_loads(d)


SIGNAL = """
import dcpd, numpy as np, signal, sys, time
ref = sys.argv[1]
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
import dcpd.client as C
real = C.Jobs.get
def slow(self, job, wait=None):
    time.sleep(1.0)
    return real(self, job, wait=wait)
C.Jobs.get = slow
h = dcpd.async_save({"w": np.ones(10)}, ref)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    h.result()
    print("not broken off")
except Late:
    print("broken off")
try:
    h.result(0.05)
except TimeoutError:
    print("timeout")
print(h.result(30)["state"])
"""


def test_a_signal_in_wait(d, script):
    assert script(SIGNAL, f"main:{lib.fresh()}").stdout == "broken off\ntimeout\nsucceeded\n"


def test_timeout_of_save_leaves_the_job(at):
    name = lib.fresh()
    with pytest.raises(dcpd.WaitTimeout) as e:
        dcpd.save({"w": np.ones(8 << 20)}, f"main:{name}", timeout=0.0001, pace="background")  # not done before its end is asked for
    assert isinstance(e.value, TimeoutError) and dcpd.connect().jobs.wait(e.value.job)["state"] == "succeeded"


def test_two_saves_to_one_name(at):
    name = lib.fresh()
    first = dcpd.async_save({"w": np.ones(8 << 20)}, f"main:{name}")
    with pytest.raises((dcpd.Busy, dcpd.CheckpointExists)) as e:
        dcpd.async_save({"w": np.zeros(8 << 20)}, f"main:{name}")
    assert e.value.code in ("target_busy", "checkpoint_exists")
    first.result(60)
    assert dcpd.load(f"main:{name}")["w"].min() == 1
    dcpd.save({"x": 1}, f"main:{name}-2")  # the slot of the refused one is free again


def test_failed_saves_are_told(at, caplog):
    """Replicas that differ, refused on request: the future has the job's error, and the slot is free again."""
    sd = lib.fresh()
    one, two = (lib.image({"w": ("F32", [1], bytes([x] * 4))}) for x in (1, 2))
    at.put(sd, [one, two])
    job = dcpd.connect().jobs.create("save", source=f"shm:{sd}", target=f"main:{sd}", options={"on_divergence": "fail"})
    with pytest.raises(dcpd.StateDictMismatch) as e:
        dcpd.connect().jobs.wait(job)
    assert e.value.code == "divergent" and e.value.fqn == "w" and e.value.job == job.id and job.id in str(e.value)
    h = dcpd.async_save({"w": np.ones(32 << 20, np.uint8)}, f"main:{lib.fresh()}")
    if h.cancel():
        with pytest.raises(dcpd.JobCancelled):
            h.result(30)
        assert not h.durable and "failed" in repr(h) and "cancelled" in caplog.text
    dcpd.save({"x": 1}, f"main:{lib.fresh()}")


@pytest.fixture
def server():
    """Something that answers HTTP, but is not the dcpd of this client."""
    answer = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = answer["body"]
            self.send_response(answer.get("status", 200))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=s.serve_forever, daemon=True).start()
    answer["url"] = f"http://127.0.0.1:{s.server_port}"
    yield answer
    s.shutdown()
    s.server_close()


def test_daemons_of_other_versions(server):
    server["body"] = json.dumps({"api": "v9", "version": "9.0"}).encode()
    with pytest.raises(dcpd.ProtocolMismatch, match="'v9'"):
        dcpd.connect(server["url"])
    server.update(body=b"<html>", status=404)
    with pytest.raises(dcpd.ProtocolMismatch, match="is it a dcpd"):
        dcpd.connect(server["url"])
    server.update(body=b"not json", status=200)
    with pytest.raises(dcpd.ProtocolMismatch):
        dcpd.connect(server["url"])
    for url in ("ftp://x", "unix://relative", "http://"):
        with pytest.raises(dcpd.RequestRefused):
            dcpd.connect(url)


def test_images_that_are_none():
    from dcpd import image

    good = image.dump([(image.ChunkSpec("w", "float32", (4,), (0,), (4,)), bytes(16))], {"v": {"json": 1}})
    assert image.parse(good).entries[0].begin == 4096
    for bad in (b"", bytes(8), b"\xff" * 16, good[:4000], good[:4097], good.replace(b'"F32"', b'"F99"'),
                good.replace(b"[0,16]", b"[0,-9]"), good.replace(b"[0,16]", b"[0,15]"), good.replace(b'"shape":[4]', b'"shape":[5]')):
        with pytest.raises(dcpd.CheckpointDamaged):
            image.parse(bad)


def test_close_unmaps(at):
    def mapped():
        with open("/proc/self/maps") as f:
            return [m for m in f if "/dev/shm/dcpd-" in m]

    before = mapped()
    dcpd.save({"w": np.ones(10)}, f"main:{lib.fresh()}")
    assert len(mapped()) == len(before) + 1
    dcpd.close()
    assert mapped() == before
