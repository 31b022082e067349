"""Device images: weights in a GPU's memory that outlive the engines which map them, over the fake libcuda: its memory counts references as
a driver's does. What each call of the driver may answer is tried in tests/unit/test_device_import.c, too."""
import concurrent.futures
import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

import dcpd as lib
import fake_gpu
import users
from test_jobs import events

FAKES = fake_gpu.FAKE.parent
DATA = bytes(i * 7 % 251 for i in range(3 << 20))
MIB = 1 << 20


def gpu_daemon(home, *args, **env):
    (home / "fail").write_text("")
    d = lib.Daemon(home, args=args, env={"LD_LIBRARY_PATH": str(FAKES), "FAKE_CUDA_FAIL": f"@{home}/fail", **env})
    d.fail = home / "fail"
    lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
    return d


@pytest.fixture(scope="module")
def g(tmp_path_factory):
    d = gpu_daemon(tmp_path_factory.mktemp("gpu"))
    yield d
    for i in images(d):
        d.api.delete(f"/v1/device-images/{i['id']}").ok(204)
    no_memory(d)
    d.discard()


@pytest.fixture(scope="module")
def engine():
    assert fake_gpu.FAKE.exists(), "not built (make tools)"
    return fake_gpu.Trainer()


def images(d, name=None):
    return d.api.get("/v1/device-images" + (f"?state_dict={name}" if name else "")).ok(200)["device_images"]


def holders(d):
    return [w for w in d.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "holder"]


def memory(d):
    """Device memory that the daemon or a holder has open or mapped."""
    pids = [d.proc.pid, *(w["pid"] for w in holders(d))]
    maps = [x for p in pids for x in pathlib.Path(f"/proc/{p}/maps").read_text().splitlines() if "fake device memory" in x]
    return [x for p in pids for x in lib.fd_targets(p) if "fake device memory" in x] + maps


def no_memory(d):
    lib.wait_for(lambda: not memory(d), 10, "the end of all device memory")


def gone_by_itself(d, w, what):
    """The images of a state dict go, with their memory; the state dict is dropped."""
    lib.wait_for(lambda: not images(d, w.name), 10, what)
    no_memory(d)
    w.drop()


class Weights:
    """A sealed state dict of one rank."""

    def __init__(self, d, data=DATA, name=None):
        self.d, self.name, self.data, self.generation = d, name or lib.fresh(), data, 0
        d.create(self.name, slots=2)
        self.put(data)

    def put(self, data):
        self.generation += 1
        self.data, self.image = data, lib.image({"w": ("U8", [len(data)], data)})
        self.segment = s = self.d.reserve(self.name, 0, len(self.image), self.generation)["segment"]
        lib.write_segment(s, self.image)
        self.d.seal(self.name, 0, self.generation, len(self.image))

    def ask(self, api=None, **more):
        return (api or self.d.api).post("/v1/device-images", {"state_dict": self.name, **more})

    def keep(self, **more):
        return self.ask(**more).ok(200)

    def drop(self):
        self.d.drop(self.name)


class Attached:
    """An engine's mapping of an image."""

    def __init__(self, d, engine, id):
        self.hand, self.engine = fake_gpu.Descriptors(d), engine
        try:
            self.record = d.api.post(f"/v1/device-images/{id}:attach", {"descriptors": self.hand.token}).ok(200)
            self.p = engine.map(self.hand.receive(), self.record["bytes"])
        except BaseException:
            self.hand.close()
            raise

    @property
    def bytes(self):
        return self.engine.bytes_at(self.p, self.record["image_bytes"])

    def close(self):
        n = self.record["bytes"]
        self.engine("cuMemUnmap", fake_gpu.ctypes.c_uint64(self.p), fake_gpu.ctypes.c_size_t(n))
        self.engine("cuMemAddressFree", fake_gpu.ctypes.c_uint64(self.p), fake_gpu.ctypes.c_size_t(n))
        self.hand.close()


ENGINE = """
import sys, time
sys.path[:0] = [sys.argv[1]]
import dcpd as lib, fake_gpu
class Daemon: socket = sys.argv[2]
hand = fake_gpu.Descriptors(Daemon)
got = lib.Client(sys.argv[2]).post(f"/v1/device-images/{sys.argv[3]}:attach", {"descriptors": hand.token}).ok(200)
engine = fake_gpu.Trainer()
p = engine.map(hand.receive(), got["bytes"])
print(engine.bytes_at(p, got["image_bytes"])[-8:].hex(), flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def engine_process(d, id):
    p = subprocess.Popen([sys.executable, "-c", ENGINE, str(pathlib.Path(lib.__file__).parent), str(d.socket), id],
                         env=lib.clean_environment(LD_LIBRARY_PATH=str(FAKES)), stdout=subprocess.PIPE, text=True)
    try:
        yield p, bytes.fromhex(p.stdout.readline())
    finally:
        p.kill()
        p.wait()
        p.stdout.close()


def attached(d, id):
    return d.api.get(f"/v1/device-images/{id}").ok(200)["attached"]


def test_weights_outlive_the_engine_that_is_killed(g, engine):
    """Host and engines die; the memory does not, and the next engine maps the same bytes."""
    w = Weights(g)
    kept = w.keep()
    assert kept["state"] == "kept" and kept["bytes"] == 4 * MIB and kept["image_bytes"] == len(w.image) and "expires_at" in kept
    assert kept["ttl_seconds"] == 3600 and kept["device"] == fake_gpu.UUID
    image, holder = w.image, holders(g)[0]["pid"]
    name = w.segment.lstrip("/")
    assert name not in pathlib.Path(f"/proc/{holder}/maps").read_text() + " ".join(lib.fd_targets(holder)), "nothing page-locked stays"
    w.drop()  # the host's copy: the image is one of its own
    for _ in range(2):
        with engine_process(g, kept["id"]) as (p, last):
            assert last == image[-8:]
            one = g.api.get(f"/v1/device-images/{kept['id']}").ok(200)
            assert one["attached"] == 1 and "expires_at" not in one
            p.kill()
            lib.wait_for(lambda: attached(g, kept["id"]) == 0, 10, "the end of the connection")
    a = Attached(g, engine, kept["id"])
    assert a.bytes == image
    a.close()
    g.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
    g.api.delete(f"/v1/device-images/{kept['id']}").problem("not_found", status=404)
    no_memory(g)
    assert holders(g)[0]["sandbox"] == "none" and holders(g)[0]["state"] == "idle"


def test_an_image_is_dropped_when_its_last_engine_has_gone(g, engine):
    w = Weights(g)
    kept = w.keep(ttl_seconds=0)
    assert "expires_at" not in kept
    a, b = Attached(g, engine, kept["id"]), Attached(g, engine, kept["id"])
    g.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
    assert images(g, w.name)[0]["state"] == "dropped" and not [x for x in memory(g) if "anon" in x]
    p = g.api.post(f"/v1/device-images/{kept['id']}:attach", {"descriptors": a.hand.token}).problem("state_conflict", status=409)
    assert "is dropped" in p["detail"]
    assert a.bytes == b.bytes == w.image, "who has it, has it"
    a.close()
    lib.wait_for(lambda: images(g, w.name)[0]["attached"] == 1, 10, "one engine's end")
    b.close()
    gone_by_itself(g, w, "the end of the other engine's")


def test_an_image_without_an_engine_goes_after_its_time(g, engine):
    w = Weights(g)
    kept = w.keep(ttl_seconds=1)
    a = Attached(g, engine, kept["id"])
    time.sleep(2.5)
    assert images(g, w.name)[0]["state"] == "kept", "an engine has it"
    a.close()
    gone_by_itself(g, w, "the image's end")


def test_a_newer_generation_supersedes(g, engine):
    """The same one is there already; one of a state dict that has been made anew under the name is another."""
    w = Weights(g)
    one = w.keep()
    assert w.keep()["id"] == one["id"]
    a = Attached(g, engine, one["id"])
    old = w.image
    w.put(DATA[::-1])
    two = w.keep()
    assert two["generation"] == 2 and {i["id"]: i["state"] for i in images(g, w.name)} == {one["id"]: "dropped", two["id"]: "kept"}
    b = Attached(g, engine, two["id"])
    assert a.bytes == old and b.bytes == w.image
    a.close(), b.close()
    w.drop()
    again = Weights(g, DATA[1:], w.name)
    again.put(DATA[2:])
    three = again.keep(generation=2)
    assert three["id"] != two["id"] and [i["id"] for i in images(g, w.name)] == [three["id"]]
    g.api.delete(f"/v1/device-images/{three['id']}").ok(204)
    again.drop()
    no_memory(g)


def test_a_load_that_fills_the_state_dict_in_place_makes_another_image(g, engine):
    """The generation stays, its bytes do not: an image of the bytes before is not given for them, nor one that was copied meanwhile."""
    w, other = Weights(g), Weights(g, DATA[::-1])
    g.api.run("save", source={"state_dict": other.name}, target={"storage": "main", "name": other.name})
    one = w.keep()
    g.api.run("load", source={"storage": "main", "name": other.name}, target={"state_dict": w.name})
    two = w.keep()
    assert two["id"] != one["id"] and two["generation"] == one["generation"] and [i["id"] for i in images(g, w.name)] == [two["id"]]
    a = Attached(g, engine, two["id"])
    assert a.bytes[-len(DATA):] == DATA[::-1]
    a.close()
    g.api.post("/v1/jobs", {"kind": "load", "source": {"storage": "main", "name": "nothing"}, "target": {"state_dict": w.name}}).problem(
        "not_found")
    assert w.keep()["id"] == two["id"], "a load that was refused has written nothing"
    g.api.delete(f"/v1/device-images/{two['id']}").ok(204)
    holder = holders(g)[0]["pid"]
    os.kill(holder, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asked = pool.submit(lambda: w.ask(lib.Client(g.socket)))
            lib.wait_for(lambda: images(g, w.name), 10, "the copy's begin")
            g.api.run("load", source={"storage": "main", "name": other.name}, target={"state_dict": w.name})
            os.kill(holder, signal.SIGCONT)
            assert "was filled anew" in asked.result().problem("state_conflict", status=409)["detail"]
    finally:
        os.kill(holder, signal.SIGCONT)
    assert images(g, w.name) == [] and holders(g)[0]["pid"] == holder
    no_memory(g)
    w.drop(), other.drop()


def test_a_holder_that_ends_says_so(g, engine):
    """Its images are lost, in words; who has one keeps it; keeping again makes another."""
    w = Weights(g)
    kept = w.keep()
    a = Attached(g, engine, kept["id"])
    os.kill(holders(g)[0]["pid"], signal.SIGKILL)
    lib.wait_for(lambda: images(g, w.name)[0]["state"] == "lost", 10, "its images' end")
    assert "the worker that held it has ended: " in images(g, w.name)[0]["problem"]
    hand = fake_gpu.Descriptors(g)
    p = g.api.post(f"/v1/device-images/{kept['id']}:attach", {"descriptors": hand.token}).problem("not_found", status=404)
    assert "is lost: the worker that held it has ended" in p["detail"] and "Keep it again" in p["detail"]
    hand.close()
    assert a.bytes == w.image
    again = w.keep()
    assert again["id"] != kept["id"]
    a.close()
    lib.wait_for(lambda: [i["id"] for i in images(g, w.name)] == [again["id"]], 10, "the lost one's end")
    g.api.delete(f"/v1/device-images/{again['id']}").ok(204)
    no_memory(g)
    w.drop()


def test_a_failed_copy_of_a_trainer_costs_no_image(g, engine):
    """Copies of trainers have a worker of their own, which ends with what fails."""
    w = Weights(g)
    kept = w.keep()
    d = Weights(g)
    body = {"generation": 1, "device": fake_gpu.UUID, "to_device": True, "table": {"offset": 8, "count": 1},
            "allocations": [{"handle": "A" * 87 + "=", "bytes": 4096}]}
    assert g.api.post(f"/v1/state-dicts/{d.name}/ranks/0:copy", body).status != 200
    a = Attached(g, engine, kept["id"])
    assert a.bytes == w.image
    a.close()
    g.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
    w.drop(), d.drop()


@pytest.mark.parametrize("body, code, said", [
    ({"state_dict": "nothing"}, "not_found", "there is no state dict"),
    ({}, "validation_failed", ""),
    ({"rank": 3}, "not_found", "has ranks 0 to 0"),
    ({"generation": 9}, "state_conflict", "has not sealed generation 9"),
    ({"device": "cuda:0"}, "validation_failed", "nvidia-smi -L"),
    ({"device": fake_gpu.UUID[:-1] + "0"}, "not_found", "NVIDIA_VISIBLE_DEVICES"),
    ({"ttl_seconds": -1}, "validation_failed", ""),
    ({"copies": 2}, "unknown_field", ""),
])
def test_a_request_that_does_not_fit(g, body, code, said):
    w = Weights(g, DATA[:100])
    p = g.api.post("/v1/device-images", {"state_dict": w.name, **body} if body else {}).problem(code)
    assert said in p["detail"], p
    w.drop()


def test_too_many_engines_of_a_user_are_told(g):
    """Before the upgrade: behind it the client would see no more than an end."""
    hands = []
    try:
        with pytest.raises(AssertionError, match='"code":"busy".*a user has half'):
            while len(hands) < 300:
                hands.append(fake_gpu.Descriptors(g))
        assert len(hands) == 256
    finally:
        for h in hands:
            h.close()


def test_what_an_engine_may_ask(g):
    g.api.get("/v1/device-images?state_dict=a/b").problem("name_invalid", status=422)
    w = Weights(g, DATA[:100])
    kept = w.keep()
    path = f"/v1/device-images/{kept['id']}:attach"
    g.api.post(path, {"descriptors": "no token"}).problem("not_found", status=404)
    g.api.post(path, {}).problem("validation_failed", status=422)
    hand = fake_gpu.Descriptors(g)
    g.api.post(path, {"descriptors": hand.token}).ok(200)
    os.close(hand.receive())
    assert "open another" in g.api.post(path, {"descriptors": hand.token}).problem("state_conflict", status=409)["detail"]
    hand.close()
    p = g.api.post("/v1/device-images/0000:attach", {"descriptors": "x"}).problem("not_found", status=404)
    assert "dcpd was started again" in p["detail"]
    g.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
    w.drop()


# A call of the holder's, the driver's answer, and what is told. Other images stay unless the device is lost.
FAILURES = [
    ("cuMemCreate:0:2", "device_full", "has no room for a device image of"),
    ("cuMemAddressReserve:0:2", "device_full", "has no room"),
    ("cuMemMap:0:2", "device_full", "has no room"),
    ("cuDevicePrimaryCtxRetain:0:2", "device_full", "has no room for a device image of"),
    ("cuMemCreate:0:801", "device_failed", "cuMemCreate"),
    ("cuMemGetAllocationGranularity:0:999", "device_failed", "cuMemGetAllocationGranularity"),
    ("cuDeviceGetAttribute:0:999", "device_failed", "cuDeviceGetAttribute"),
    ("cuMemSetAccess:0:801", "device_failed", "cuMemSetAccess"),
    ("cuMemcpyHtoDAsync_v2:0:2", "device_failed", "cuMemcpyHtoDAsync"),
    ("cuStreamQuery:0:700:sticky", "device_failed", "cuStreamQuery"),
    ("cuMemExportToShareableHandle:0:999", "device_failed", "cuMemExportToShareableHandle"),
    ("cuMemUnmap:0:999", "device_failed", "cuMemUnmap"),
    ("cuMemRelease:0:999", "device_failed", "cuMemRelease"),
    ("cuInit:0:803", "device_failed|backend_unavailable", ""),
]


@pytest.mark.parametrize("fail, code, said", FAILURES)
def test_each_call_of_the_driver_fails(g, engine, fail, code, said):
    first = Weights(g)
    if fail.startswith(("cuInit", "cuDevicePrimaryCtxRetain")):
        for h in holders(g):
            os.kill(h["pid"], signal.SIGKILL)
        lib.wait_for(lambda: not holders(g), 10, "the holder's end")
    else:
        kept = first.keep()
    w = Weights(g)
    g.fail.write_text(fail)
    p = w.ask().problem(*code.split("|"))
    g.fail.write_text("")
    assert said in p["detail"] and len(p["detail"]) > 20, p
    if code == "device_full" and not fail.startswith("cuDevice"):
        a = Attached(g, engine, kept["id"])
        assert a.bytes == first.image and "dcpctl kept" in p["detail"]
        a.close()
    assert [i["state"] for i in images(g, w.name)] == [], "nothing stays of what failed"
    assert w.keep()["state"] == "kept", "the next one is sound"
    for i in images(g):
        g.api.delete(f"/v1/device-images/{i['id']}").ok(204)
    no_memory(g)
    first.drop(), w.drop()


def test_limits(tmp_path, engine):
    """device-limit counts what is kept and what engines still hold; the driver's own end says so in words."""
    d = gpu_daemon(tmp_path, "--device-limit", "9M", FAKE_CUDA_MEMORY=str(7 * MIB))
    try:
        one, two, big = Weights(d), Weights(d), Weights(d, DATA * 3)
        kept = one.keep()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            os.kill(holders(d)[0]["pid"], signal.SIGSTOP)
            second = pool.submit(lambda: two.ask(lib.Client(d.socket)))
            lib.wait_for(lambda: images(d, two.name), 10, "an image on its way")
            p = Weights(d, DATA[:100]).ask().problem("device_full", status=507)
            assert f"have {8 * MIB} bytes; with {2 * MIB} more" in p["detail"], "what is on its way counts as it will"
            os.kill(holders(d)[0]["pid"], signal.SIGCONT)
            d.api.delete(f"/v1/device-images/{second.result().ok(200)['id']}").ok(204)
        p = big.ask().problem("device_full", status=507)
        assert "beyond device-limit, 9437184: drop some" in p["detail"] and f"have {4 * MIB} bytes" in p["detail"], p
        a = Attached(d, engine, kept["id"])
        d.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
        big.ask().problem("device_full", status=507)
        a.close()
        lib.wait_for(lambda: not images(d), 10, "the first one's end")
        p = Weights(d, DATA * 2 + DATA[:MIB]).ask().problem("device_full", status=507)
        assert "has no room for a device image" in p["detail"] and "cuMemCreate of" in p["detail"], p
        two.keep()
        metrics = d.api.get("/metrics").body.decode()
        assert "dcpd_device_images 1\n" in metrics and f"dcpd_device_image_bytes {4 * MIB}\n" in metrics
    finally:
        d.discard()


def test_a_driver_that_shares_no_memory(tmp_path, spawn):
    d = gpu_daemon(tmp_path, FAKE_CUDA_NO_VMM="1")
    try:
        p = Weights(d).ask().problem("backend_unavailable", status=501)
        assert "cannot share memory by descriptors" in p["detail"]
    finally:
        d.discard()
    without = spawn(env={"LD_LIBRARY_PATH": ""})
    lib.wait_for(lambda: "not yet known" not in without.api.get("/v1/capabilities").ok(200)["backends"]["cuda"]["reason"], 20, "the probe")
    w = Weights(without)
    assert "libcuda.so.1" in w.ask().problem("backend_unavailable", status=501)["detail"]
    w.drop()


def test_several_gpus_are_named(tmp_path):
    d = gpu_daemon(tmp_path, FAKE_CUDA_DEVICES="2")
    try:
        w = Weights(d)
        assert "several GPUs" in w.ask().problem("validation_failed", status=422)["detail"]
        uuids = [x["uuid"] for x in d.api.get("/v1/capabilities").ok(200)["devices"]]
        assert [w.keep(device=u)["device"] for u in uuids] == uuids and len(holders(d)) == 2
        os.kill(holders(d)[0]["pid"], signal.SIGKILL)
        lib.wait_for(lambda: sorted(i["state"] for i in images(d)) == ["kept", "lost"], 10, "one GPU's images alone")
    finally:
        d.discard()


def test_memory_ends_with_the_daemon(tmp_path, engine):
    """Killed, it leaves no holder and no memory but what an engine has mapped; the host tier is there again."""
    d = gpu_daemon(tmp_path)
    try:
        w = Weights(d)
        kept = w.keep()
        a, pid = Attached(d, engine, kept["id"]), holders(d)[0]["pid"]
        d.proc.kill()
        d.proc.wait()
        lib.wait_for(lambda: not pathlib.Path(f"/proc/{pid}/fd").exists() or not os.path.exists(f"/proc/{pid}"), 10, "the holder's end")
        assert a.bytes == w.image and a.hand.socket.recv(1) == b"", "an engine learns of the end, and keeps what it has"
        d.start()
        lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
        assert images(d) == []
        b = Attached(d, engine, w.keep()["id"])
        assert b.bytes == w.image
        a.close(), b.close()
    finally:
        d.discard()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_gets_nothing(engine):
    with users.reachable_folder() as home:
        (home / "d").mkdir(mode=0o755)
        (home / "d" / "fail").write_text("")
        d = lib.Daemon(home / "d", args=["--allow-group", users.GROUP.gr_name], env={"LD_LIBRARY_PATH": str(FAKES)})
        d.state.chmod(0o755)
        try:
            lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
            ours = Weights(d)
            kept = ours.keep()
            given = fake_gpu.Descriptors(d)

            def other():
                hers = fake_gpu.Descriptors(d)
                path = f"/v1/device-images/{kept['id']}"
                assert "belongs to uid 0" in d.api.post(f"{path}:attach", {"descriptors": hers.token}).problem("forbidden")["detail"]
                d.api.get(path).problem("forbidden", status=403)
                d.api.delete(path).problem("forbidden", status=403)
                ours.ask().problem("forbidden", status=403)
                assert images(d) == []
                w = Weights(d)
                mine = w.keep()
                d.api.post(f"/v1/device-images/{mine['id']}:attach", {"descriptors": given.token}).problem("not_found", status=404)
                return "alice has one"

            assert "alice has one" in users.as_user(users.ALICE, [users.GROUP.gr_gid], other)
            hers = [i["id"] for i in images(d) if i["uid"] == users.ALICE]
            a = Attached(d, engine, hers[0])  # root may
            assert len(a.bytes) > len(DATA) and len(images(d)) == 2
            a.close()
        finally:
            d.discard()


def test_changes_are_in_the_audit_and_told(g, engine):
    """What is new, gets another time or is dropped has a row, with who asked for what; a keep of what is there has none."""
    w, told = Weights(g), queue.SimpleQueue()
    begun = threading.Event()
    listener = threading.Thread(daemon=True, target=lambda: told.put(events(
        g.api, "/v1/events", lambda e: e[1] == "device_image.changed" and e[2]["what"] == "removed", begun=begun)))
    listener.start()
    assert begun.wait(60)
    kept = w.keep(ttl_seconds=60)
    subject = f"{w.name}:{kept['id']}"
    assert w.keep(ttl_seconds=60)["id"] == w.keep()["id"] == kept["id"]
    w.keep(rank=0, ttl_seconds=0)
    w.ask(rank=3).problem("not_found")
    a = Attached(g, engine, kept["id"])
    a.close()
    lib.wait_for(lambda: attached(g, kept["id"]) == 0, 10, "the end of the connection")
    g.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
    g.api.delete(f"/v1/device-images/{kept['id']}").problem("not_found")
    rows = [r for r in g.api.get("/v1/audit").ok(200)["audit"] if r["subject"].startswith(w.name)]
    assert [(r["action"], r["subject"], r.get("request")) for r in rows] == [
        ("device_image.drop", subject, None),
        ("device_image.keep", subject, {"state_dict": w.name, "rank": 0, "ttl_seconds": 0}),
        ("device_image.keep", subject, {"state_dict": w.name, "ttl_seconds": 60})], rows
    mine = [e[2] for e in told.get(timeout=60) if e[1] == "device_image.changed"]
    assert [e["what"] for e in mine] == ["filling", "kept", "attached", "detached", "dropped", "removed"]
    assert all((e["device_image"], e["state_dict"], e["rank"], e["device"]) == (kept["id"], w.name, 0, fake_gpu.UUID) for e in mine)
    w.drop()


def test_another_time_of_an_image_on_its_way_is_in_the_audit(g):
    w = Weights(g)
    g.api.delete(f"/v1/device-images/{w.keep()['id']}").ok(204)
    holder = holders(g)[0]["pid"]
    os.kill(holder, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            one = pool.submit(lambda: w.ask(lib.Client(g.socket), ttl_seconds=60))
            lib.wait_for(lambda: images(g, w.name), 10, "the copy's begin")
            two = pool.submit(lambda: w.ask(lib.Client(g.socket), ttl_seconds=90))
            time.sleep(0.2)
            os.kill(holder, signal.SIGCONT)
            kept = [f.result().ok(200) for f in (one, two)]
    finally:
        os.kill(holder, signal.SIGCONT)
    assert kept[0]["id"] == kept[1]["id"] and kept[1]["ttl_seconds"] == 90
    rows = [r for r in g.api.get("/v1/audit").ok(200)["audit"] if r["subject"] == f"{w.name}:{kept[0]['id']}"]
    assert sorted(r["request"]["ttl_seconds"] for r in rows) == [60, 90], rows
    g.api.delete(f"/v1/device-images/{kept[0]['id']}").ok(204)
    w.drop()
    no_memory(g)


def test_dcpctl(g):
    w = Weights(g)
    id = g.ctl("keep", f"shm:{w.name}", "--ttl", "90s").stdout.strip()
    one = images(g, w.name)[0]
    assert one["id"] == id and one["ttl_seconds"] == 90
    shown = g.ctl("kept", f"shm:{w.name}").stdout
    assert id in shown and "kept" in shown and w.name in shown and "EXPIRES" in shown
    assert g.ctl("keep", "main:x").returncode != 0
    g.ctl("drop", id)
    assert images(g, w.name) == [] and g.ctl("drop", id).returncode == 6
    w.drop()


def test_a_segment_that_shrinks_ends_no_holder(g, engine):
    """Its owner may shrink it. Where it is not page-locked, the copy to the GPU reads it then; other users' images stay."""
    other = Weights(g)
    kept = other.keep()
    holder = holders(g)[0]["pid"]
    w = Weights(g)
    g.fail.write_text("cuMemHostRegister_v2:0:2")
    try:
        one = w.keep()
        a = Attached(g, engine, one["id"])
        assert a.bytes == w.image
        a.close()
        lib.wait_for(lambda: not attached(g, one["id"]))
        g.api.delete(f"/v1/device-images/{one['id']}").ok(204)
        os.truncate(lib.segment_file(w.segment), 8192)
        w.ask().problem("segment_shrunk")
    finally:
        g.fail.write_text("")
    assert [h["pid"] for h in holders(g)] == [holder]
    assert g.api.get(f"/v1/device-images/{kept['id']}").ok(200)["state"] == "kept"
    g.api.delete(f"/v1/device-images/{kept['id']}").ok(204)
    no_memory(g)
    w.drop()
    other.drop()
