"""Device memory of a trainer as the source of a segment, and its target: over the fake libcuda, whose memory another process can open as it
can a GPU's. What each call of the driver may answer is tried in tests/unit/test_device_import.c."""
import base64
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import time

import pytest

import dcpd as lib
import fake_gpu
import host
import users

FAKES = fake_gpu.FAKE.parent
PAGE = lib.PAGE
DATA = bytes(i * 7 % 251 for i in range(3 * PAGE + 100))


@pytest.fixture
def trainer():
    assert fake_gpu.FAKE.exists(), "not built (make tools)"
    trainer = fake_gpu.Trainer()
    yield trainer
    trainer.let_go()


def known(d):
    """The probe has seen the GPU."""
    return lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")


@pytest.fixture(scope="module")
def g(tmp_path_factory):
    """A daemon with the fake GPU. What its driver answers is in the file `fail`."""
    home = tmp_path_factory.mktemp("gpu")
    (home / "fail").write_text("")
    d = lib.Daemon(home, env={"LD_LIBRARY_PATH": str(FAKES), "FAKE_CUDA_FAIL": f"@{home}/fail"})
    d.fail = home / "fail"
    known(d)
    yield d
    # an idle copier keeps the table of its kernel, on the device
    lib.wait_for(lambda: all("fake device memory" in x for x in d.leaks()), 10, "the end of what state dicts that are gone had page-locked")
    d.discard()


def copiers(d):
    return [w for w in d.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "device"]


def end_copiers(d):
    """The next copy gets a worker of its own."""
    for w in copiers(d):
        os.kill(w["pid"], signal.SIGKILL)
    lib.wait_for(lambda: not copiers(d), 10, "the end of the worker")


class Rank:
    """A state dict of one rank with an image whose data is still on the device."""

    def __init__(self, d, data=DATA, generation=1, name=None, room=PAGE):
        self.d, self.name, self.generation = d, name or lib.fresh(), generation
        self.image = lib.image({"w": ("U8", [len(data)], data)})
        self.at = self.image.index(data[:64])  # of the tensor
        self.data, self.table_at = data, len(self.image)
        if not name:
            d.create(self.name)
        self.segment = d.reserve(self.name, 0, self.table_at + room, generation)["segment"]
        blank = bytearray(self.image)
        blank[self.at:self.at + len(data)] = bytes(len(data))
        lib.write_segment(self.segment, bytes(blank))

    def pieces(self, *pieces):
        rows = fake_gpu.table(pieces)
        lib.write_segment(self.segment, lib.segment_file(self.segment).read_bytes()[:self.table_at] + rows)
        return {"offset": self.table_at, "count": len(pieces)}

    def copy(self, allocations, *pieces, api=None, **more):
        body = {"generation": self.generation, "device": fake_gpu.UUID, "allocations": allocations, "table": self.pieces(*pieces), **more}
        return (api or self.d.api).post(f"/v1/state-dicts/{self.name}/ranks/0:copy", body)

    def whole(self, allocation, **more):
        return self.copy([allocation], (self.at, len(self.data), 0, 0), **more)

    def sealed_as_it_should_be(self):
        self.d.seal(self.name, 0, self.generation, self.table_at)
        assert self.d.images(self.name)[0].entries["w"][2] == self.data

    def drop(self):
        self.d.drop(self.name)


def test_a_segment_is_filled_from_legacy_memory_and_saved(g, trainer):
    r = Rank(g)
    _, allocation = trainer.legacy(DATA)
    out = r.whole(allocation).ok(200)
    assert out == {"bytes": len(DATA), "copies": 1, "gathered": 0, "pinned": True}
    r.sealed_as_it_should_be()
    job = g.api.run("save", source={"state_dict": r.name}, target={"storage": "main", "name": f"gpu/{r.name}"})
    assert g.api.get(f"/v1/checkpoints/main/gpu%2F{r.name}/tensors/w?format=raw").body == DATA, job
    worker = copiers(g)
    assert len(worker) == 1 and worker[0]["state"] == "idle" and worker[0]["sandbox"] == "none"
    r.drop()


def test_pieces_of_several_vmm_allocations(g, trainer):
    r = Rank(g)
    cut = 2 * PAGE + 8
    _, a, a_bytes = trainer.vmm(b"x" * 16 + DATA[:cut])
    _, b, b_bytes = trainer.vmm(DATA[cut:])
    hand = fake_gpu.Descriptors(g, [a, b])
    allocations = [{"descriptor": 0, "bytes": a_bytes}, {"descriptor": 1, "bytes": b_bytes}]
    pieces = [(r.at + i, min(100, cut - i), 16 + i, 0) for i in range(0, cut, 100)] + [(r.at + cut, len(DATA) - cut, 0, 1)]
    assert r.copy(allocations, *pieces, descriptors=hand.token).ok(200)["copies"] == 2, "pieces that touch are one copy"
    r.sealed_as_it_should_be()
    held = [f for f in lib.fd_targets(g.proc.pid) if "fake device memory" in f]
    assert len(held) == 2
    hand.close()
    lib.wait_for(lambda: not [f for f in lib.fd_targets(g.proc.pid) if "fake device memory" in f], 10, "the descriptors' end")
    r.copy(allocations, *pieces, descriptors=hand.token).problem("not_found", status=404)
    assert not [f for w in copiers(g) for f in lib.fd_targets(w["pid"]) if "fake device memory" in f], "the worker lets go at once"
    r.drop()


@pytest.mark.parametrize("fail, gathered", [("", 300), ("cuModuleLoadData:0:218", 0), ("cuMemHostGetDevicePointer_v2:0:801", 0)])
def test_many_small_pieces_are_gathered(g, trainer, fail, gathered):
    """By a kernel, in both directions; where none can be run, by copies, and the answer says why."""
    end_copiers(g)
    data = DATA[:300 * 40]
    r = Rank(g, data, room=32 * 300)
    scattered = b"".join(data[i:i + 40] + b"#" * 7 for i in range(0, len(data), 40))
    _, source = trainer.legacy(scattered)
    pieces = [(r.at + 40 * i, 40, 47 * i, 0) for i in range(300)]
    g.fail.write_text(fail)
    out = r.copy([source], *pieces).ok(200)
    assert (out["bytes"], out["gathered"], out["copies"]) == (len(data), gathered, 300 - gathered)
    assert ("gather_problem" in out) == bool(fail) and fail[:12] in out.get("gather_problem", "")
    r.pieces(*pieces)
    g.seal(r.name, 0, 1, r.table_at)
    place, target = trainer.legacy(b"#" * len(scattered))
    assert r.copy([target], *pieces, to_device=True).ok(200)["gathered"] == gathered
    assert trainer.bytes_at(place, len(scattered)) == scattered
    g.fail.write_text("")
    r.drop()


@pytest.mark.parametrize("fail", ["", "cuModuleLoadData:0:218", "cuMemHostGetDevicePointer_v2:0:801"])
def test_pieces_are_cast(g, trainer, fail):
    """bfloat16 in the slot, float32 on the device, in both directions; where no kernel can be run they are left out, in words."""
    end_copiers(g)
    narrow = b"".join(struct.pack("<H", 37 * i % 0x7F80) for i in range(70001))
    wide = b"".join(b"\0\0" + narrow[i:i + 2] for i in range(0, len(narrow), 2))
    r = Rank(g, narrow + b"plain")
    _, source = trainer.legacy(wide + b"plain")
    half = 2 * 30000
    rows = [(r.at, half, 0, 1 << 32), (r.at + half, len(narrow) - half, 2 * half, 1 << 32), (r.at + len(narrow), 5, len(wide), 0)]
    casts = [{"slot": "bfloat16", "device": "float32"}]
    g.fail.write_text(fail)
    out = r.copy([source], *rows, casts=casts).ok(200)
    assert (out["bytes"], out["cast"]) == ((5, 0) if fail else (len(narrow) + 5, len(narrow)))
    assert ("cast_problem" in out) == bool(fail) and fail[:12] in out.get("cast_problem", "")
    if not fail:
        r.pieces(*rows)
        r.sealed_as_it_should_be()
        place, target = trainer.legacy(b"#" * (len(wide) + 5))
        assert r.copy([target], *rows, casts=casts, to_device=True).ok(200)["cast"] == len(narrow)
        assert trainer.bytes_at(place, len(wide) + 5) == wide + b"plain"
    g.fail.write_text("")
    r.drop()


@pytest.mark.parametrize("casts, row, why", [
    ([{"slot": "bfloat16", "device": "float32"}], (0, 4, 0, 2 << 32), "there are 1"),
    ([{"slot": "bfloat16", "device": "float32"}], (1, 4, 0, 1 << 32), "element"),
    ([{"slot": "bfloat16", "device": "float32"}], (0, 3, 0, 1 << 32), "element"),
    ([{"slot": "bfloat16", "device": "float32"}], (0, 4, 2, 1 << 32), "element"),
    ([{"slot": "bfloat16", "device": "float32"}], (0, 4096, 4096, 1 << 32), "beyond"),
    ([{"slot": "bfloat16", "device": "int32"}], (0, 4, 0, 1 << 32), "int32"),
    ([{"slot": "bfloat16", "device": "float4"}], (0, 4, 0, 1 << 32), "dtype"),
    ([{"slot": "bfloat16"}], (0, 4, 0, 1 << 32), "device"),
    ([{"slot": "bfloat16", "device": "float32", "more": 1}], (0, 4, 0, 1 << 32), "more"),
])
def test_casts_that_cannot_be(g, trainer, casts, row, why):
    r = Rank(g)
    _, source = trainer.legacy(bytes(8192))
    answer = r.copy([source], (r.at + row[0], *row[1:]), casts=casts)
    assert answer.status in (400, 422) and why in answer.body.decode(), answer.body
    r.drop()


def test_a_sealed_segment_is_copied_to_the_device(g, trainer):
    r = Rank(g)
    r.whole(trainer.legacy(DATA)[1], to_device=True).problem("state_conflict", status=409)
    r.whole(trainer.legacy(DATA)[1]).ok(200)
    r.pieces((r.at, len(DATA), 40, 0))
    g.seal(r.name, 0, 1, r.table_at)
    place, target = trainer.legacy(bytes(len(DATA) + 80))
    r.copy([target], (r.at, len(DATA), 40, 0)).problem("state_conflict", status=409)
    r.copy([target], (r.at, len(DATA), 40, 0), to_device=True).ok(200)
    assert trainer.bytes_at(place, len(DATA) + 80) == bytes(40) + DATA + bytes(40)
    r.drop()


@pytest.mark.parametrize("what, field, said", [
    (lambda r, a: r.copy([a], (r.at, 8, 0, 1)), None, "there are 1"),
    (lambda r, a: r.copy([a], (r.table_at, 8, 0, 0)), None, "does not end before the table"),
    (lambda r, a: r.copy([a], (2**64 - 4, 8, 0, 0)), None, "does not end before the table"),
    (lambda r, a: r.copy([a], (r.at, 8, len(DATA) - 4, 0)), None, "is beyond the"),
    (lambda r, a: r.copy([a], (r.at, 8, 2**64 - 4, 0)), None, "is beyond the"),
    (lambda r, a: r.copy([{**a, "bytes": a["bytes"] + 1}], (r.at, 8, 0, 0)), None, "is said to have"),
    (lambda r, a: r.copy([{"descriptor": 3, "bytes": 4096}], (r.at, 8, 0, 0)), None, "there is no descriptor 3"),
    (lambda r, a: r.whole(a, table={"offset": r.table_at, "count": 10**6}), None, "is beyond the segment's"),
    (lambda r, a: r.whole(a, table={"offset": r.table_at, "count": 2**62}), None, "there must be 1 to"),
    (lambda r, a: r.whole(a, table={"offset": r.table_at + 4, "count": 1}), "/table/offset", "multiple of 8"),
    (lambda r, a: r.copy([], (r.at, 8, 0, 0)), "/allocations", "one allocation"),
    (lambda r, a: r.whole({"bytes": 8}), "/allocations/0", "has a handle, or a descriptor"),
    (lambda r, a: r.whole({"bytes": 8, "handle": "AAAA"}), "/allocations/0/handle", "64 bytes in base64"),
    (lambda r, a: r.whole({"bytes": 8, "handle": "!" * 88}), None, "a handle is 64 bytes in base64"),
    (lambda r, a: r.whole(a, device="cuda:0"), "/device", "nvidia-smi"),
])
def test_a_request_that_does_not_fit(g, trainer, what, field, said):
    r = Rank(g)
    p = what(r, trainer.legacy(DATA)[1]).problem("validation_failed", status=422)
    assert said in p["detail"] and p.get("pointer") == field, p
    r.whole(trainer.legacy(DATA)[1]).ok(200)
    r.sealed_as_it_should_be()
    r.drop()


def test_whom_a_copy_is_not_for(g, trainer, spawn):
    r = Rank(g)
    _, a = trainer.legacy(DATA)
    p = r.whole(a, device=fake_gpu.UUID[:-1] + "0").problem("not_found", status=404)
    assert "NVIDIA_VISIBLE_DEVICES" in p["detail"]
    r.whole(a, generation=2).problem("state_conflict", status=409)
    g.api.get("/v1/descriptors").problem("invalid_request", status=400)
    g.tcp_client().get("/v1/descriptors", headers={"Connection": "Upgrade", "Upgrade": "dcpd-descriptors"}).problem("invalid_request")
    r.drop()
    without = spawn(env={"LD_LIBRARY_PATH": ""})
    lib.wait_for(lambda: "not yet known" not in without.api.get("/v1/capabilities").ok(200)["backends"]["cuda"]["reason"], 20, "the probe")
    other = Rank(without)
    assert "libcuda.so.1" in other.whole(a).problem("backend_unavailable", status=501)["detail"]
    other.drop()


PYTHON = """
import mmap, os, sys
sys.path[:0] = sys.argv[1:3]
from fake_gpu import Trainer
import dcpd
client = dcpd.connect(sys.argv[3])
trainer, data = Trainer(), bytes(range(256)) * 50
a, _ = trainer.legacy(data)
b, _, _ = trainer.vmm(data)
slot = client.state_dicts.reserve("python", 0, 40960, 1)
with open("/dev/shm" + slot["segment"], "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
    print(client.state_dicts.copy("python", 0, 1, [(64, a + 7, 1000), (2000, b + 4000, 5000), (8000, b, 100)], m, 32768))
    assert m[64:1064] == data[7:1007] and m[2000:7000] == data[4000:9000] and m[8000:8100] == data[:100]
    p, _, _ = trainer.vmm(data, shareable=False)
    try:
        client.state_dicts.copy("python", 0, 1, [(64, p, 100)], m, 32768)
    except dcpd.RequestRefused as e:
        print(e)
held = [os.readlink(f"/proc/self/fd/{x}") for x in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{x}")]
print("open:", sum("socket:" in x for x in held))
"""


def test_python_finds_the_handles_of_addresses(g):
    g.create("python")
    out = subprocess.run([sys.executable, "-c", PYTHON, str(lib.ROOT / "api/python"), str(lib.ROOT / "tests/lib"), f"unix://{g.socket}"],
                         env=lib.clean_environment(LD_LIBRARY_PATH=str(FAKES)), capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "'bytes': 6100, 'copies': 3" in out.stdout and "cuMemExportToShareableHandle: error 801" in out.stdout, out.stdout
    assert "open: 1" in out.stdout, "the client's own connection"
    g.drop("python")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_user_hands_over_descriptors_only(trainer, tmp_path):
    """The numbers of a legacy handle may be guessed; a token of somebody else's descriptors is not there."""
    with users.reachable_folder() as home:
        (home / "d").mkdir(mode=0o755)
        d = lib.Daemon(home / "d", args=["--allow-group", users.GROUP.gr_name], env={"LD_LIBRARY_PATH": str(FAKES)})
        d.state.chmod(0o755)
        try:
            known(d)
            legacy, (_, fd, n) = trainer.legacy(DATA)[1], trainer.vmm(DATA)
            ours = fake_gpu.Descriptors(d, [os.dup(fd)])

            def train():
                r = Rank(d)
                assert "expandable_segments:True" in r.whole(legacy).problem("forbidden", status=403)["detail"]
                r.whole({"descriptor": 0, "bytes": n}, descriptors=ours.token).problem("not_found", status=404)
                hers = fake_gpu.Descriptors(d, [fd])
                r.whole({"descriptor": 0, "bytes": n}, descriptors=hers.token).ok(200)
                r.d.seal(r.name, 0, 1, r.table_at)
                return "trained"

            assert "trained" in users.as_user(users.ALICE, [users.GROUP.gr_gid], train)
            ours.close()
        finally:
            d.discard()


# A call of the worker's, the driver's answer, and what the trainer is told.
FAILURES = [
    ("cuIpcOpenMemHandle_v2:1:2", "no_memory", "CUDA_ERROR_OUT_OF_MEMORY"),
    ("cuIpcOpenMemHandle_v2:1:801", "device_failed", "CUDA_ERROR_NOT_SUPPORTED"),
    ("cuMemcpyDtoHAsync_v2:1:700:sticky", "device_failed", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ("cuStreamQuery:1:719:sticky", "device_failed", "cuStreamQuery"),
    ("cuIpcCloseMemHandle:1:999", "device_failed", "cuIpcCloseMemHandle"),
    ("cuDevicePrimaryCtxRetain:1:46", "device_failed", "cuDevicePrimaryCtxRetain"),
]


@pytest.mark.parametrize("fail, code, said", FAILURES)
def test_what_the_driver_refuses_ends_the_copy_alone(g, trainer, fail, code, said):
    """The worker ends with its error, and the slot is the trainer's to fill itself; the next copy has a new worker, and is sound."""
    end_copiers(g)
    r = Rank(g)
    g.fail.write_text(fail)
    p = r.whole(trainer.legacy(DATA)[1]).problem(code)
    g.fail.write_text("")
    assert said in p["detail"], p
    assert not [w for w in copiers(g) if w["state"] != "starting"], "it has ended by the time of the answer"
    r.whole(trainer.legacy(DATA)[1]).ok(200)
    r.sealed_as_it_should_be()
    r.drop()


CALLS = re.findall(r"^\tX\(\w+, (\w+),", (lib.ROOT / "worker/device/cuda_abi.h").read_text(), re.M)
NO_ERROR = {"cuGetErrorName", "cuGetErrorString", "cuMemcpyDtoDAsync_v2",  # of the fake; not called for a copy: tests/unit/test_device*.c
            "cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"}
ANSWERS = {"cuInit": ("803", "999")}  # a driver of another version than its kernel module
ERRORS = ("no_memory", "device_failed", "backend_unavailable", "not_found", "worker_lost")
OF_LOADS = {"cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuStreamQuery", "cuEventRecord", "cuMemImportFromShareableHandle"}


class Both:
    """Device memory of both kinds, with the data's pieces by turns: small ones, enough for a kernel, and a large one."""

    SMALL = 2 * PAGE

    def __init__(self, d, trainer, data):
        self.trainer, self.bytes = trainer, len(data)
        self.legacy, legacy = trainer.legacy(b"." * 5 + data)
        self.vmm, fd, n = trainer.vmm(data)
        self.hand = fake_gpu.Descriptors(d, [fd])
        self.allocations = [legacy, {"descriptor": 0, "bytes": n}]

    def copy(self, r, **more):
        pieces = [(r.at + i, 64, 5 + i, 0) if i % 128 else (r.at + i, 64, i, 1) for i in range(0, self.SMALL, 64)]
        pieces.append((r.at + self.SMALL, self.bytes - self.SMALL, 5 + self.SMALL, 0))
        if "to_device" not in more:
            return r.copy(self.allocations, *pieces, descriptors=self.hand.token, **more)
        table = {"offset": r.table_at, "count": len(pieces)}  # written before the seal
        body = {"generation": r.generation, "device": fake_gpu.UUID, "allocations": self.allocations, "table": table}
        return r.d.api.post(f"/v1/state-dicts/{r.name}/ranks/0:copy", {**body, "descriptors": self.hand.token, **more})

    def data(self):
        at = self.trainer.bytes_at
        small = b"".join(at(self.legacy + 5 + i if i % 128 else self.vmm + i, 64) for i in range(0, self.SMALL, 64))
        return small + at(self.legacy + 5 + self.SMALL, self.bytes - self.SMALL)


@pytest.mark.parametrize("call, nth, to_device", [
    pytest.param(call, nth, to_device, marks=pytest.mark.long if nth or (to_device and call not in OF_LOADS) else ())
    for call in CALLS if call not in NO_ERROR for nth in (0, 1) for to_device in (False, True)])
def test_each_call_of_the_driver_fails(g, trainer, call, nth, to_device):
    """Out of memory, not supported, a context that is lost: the copy is sound all the same, or fails in words, which name the call, and
    leaves nothing; the daemon and the next copy know nothing of it."""
    daemon, data = g.proc.pid, (DATA * 7)[:19 * PAGE]
    way = {"to_device": True} if to_device else {}
    for answer in ANSWERS.get(call, ("2", "801", "700:sticky")):
        r = Rank(g, data, room=2 * PAGE)
        memory = Both(g, trainer, data)
        if to_device:
            memory.copy(r).ok(200)
            g.seal(r.name, 0, 1, r.table_at)
            memory.hand.close()
            memory = Both(g, trainer, bytes(len(data)))
        end_copiers(g)
        g.fail.write_text(f"{call}:{nth}:{answer}")
        out = memory.copy(r, **way)
        g.fail.write_text("")
        if out.status != 200:
            assert re.sub(r"_v\d$", "", call) in out.problem(*ERRORS)["detail"], out
            memory.copy(r, **way).ok(200)
        if to_device:
            assert memory.data() == data
        else:
            r.sealed_as_it_should_be()
        memory.hand.close()
        r.drop()
    assert g.proc.pid == daemon and g.alive()
    held = lambda: [f for w in copiers(g) for f in lib.fd_targets(w["pid"]) if "fake device memory" in f]  # noqa: E731
    lib.wait_for(lambda: len(held()) <= 1, 10, "the last copy's worker has let go of all but its kernel's table of pieces")


@pytest.mark.parametrize("fail, passes, said", [
    ("cuStreamQuery:0:600", 25, "nothing was copied for 20 s; look at nvidia-smi and dmesg for Xid errors"),
    ("cuDevicePrimaryCtxRetain:1:hang", 90, "the driver has not answered for too long")])
def test_a_device_that_does_not_come_on_is_given_up_in_words(spawn, trainer, tmp_path, fail, passes, said):
    """A copy that is begun and never done is its worker's to find; a call of the driver that does not return the daemon's."""
    clock = host.Patience(tmp_path / "clock")
    (tmp_path / "fail").write_text(fail)
    d = spawn(env={"LD_LIBRARY_PATH": str(FAKES), "FAKE_CUDA_FAIL": f"@{tmp_path}/fail", **clock.env})
    known(d)
    r = Rank(d)
    _, allocation = trainer.legacy(DATA)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(r.whole, allocation)
        lib.wait_for(lambda: [w for w in copiers(d) if w["state"] == "busy"], 10, "the copy's begin")
        time.sleep(1)  # until the worker waits: a clock that jumps before it does moves its deadline, too
        assert not answer.done()
        clock.passes(passes)
        p = answer.result(60 * lib.PATIENCE).problem("device_failed")
    assert fake_gpu.UUID in p["detail"] and said in p["detail"], p
    (tmp_path / "fail").write_text("")
    r.whole(allocation).ok(200)
    r.sealed_as_it_should_be()


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(g, trainer):
    end_copiers(g)
    r = Rank(g)
    g.fail.write_text("cuMemHostRegister_v2:0:2")
    out = r.whole(trainer.legacy(DATA)[1]).ok(200)
    g.fail.write_text("")
    assert out["pinned"] is False and "cuMemHostRegister" in out["pin_problem"]
    r.sealed_as_it_should_be()
    r.drop()


def test_a_trainer_that_has_ended(g, tmp_path):
    """Its handle is good for nothing; the worker lives on for others."""
    code = ("import sys; sys.path[:0] = sys.argv[1:]; import fake_gpu\n"
            "print(fake_gpu.Trainer().legacy(b'x' * 5000)[1]['handle'])")
    out = subprocess.run([sys.executable, "-c", code, str(pathlib.Path(lib.__file__).parent)], capture_output=True, text=True, check=True)
    r = Rank(g)
    p = r.copy([{"handle": out.stdout.strip(), "bytes": 5000}], (r.at, 5000, 0, 0)).problem("device_failed")
    assert "allocation 0 cannot be opened" in p["detail"] and "cuIpcOpenMemHandle" in p["detail"], p
    assert base64.b64decode(out.stdout.strip())[:8] == b"fakecuda"
    r.drop()


DYING = """
import http.client, json, socket, sys
sys.path[:0] = [sys.argv[1]]
import fake_gpu
trainer = fake_gpu.Trainer()
_, legacy = trainer.legacy(b"x" * 5000)
_, fd, n = trainer.vmm(b"y" * 5000)
class Daemon: socket = sys.argv[2]
hand = fake_gpu.Descriptors(Daemon, [fd])
c = http.client.HTTPConnection("localhost")
c.sock = socket.socket(socket.AF_UNIX)
c.sock.connect(sys.argv[2])
body = json.loads(sys.argv[3])
body.update(allocations=[legacy, {"descriptor": 0, "bytes": n}], descriptors=hand.token)
c.request("POST", sys.argv[4], json.dumps(body), {"Content-Type": "application/json"})
c.getresponse()
"""


def test_a_trainer_that_exits_while_its_memory_is_read(g, trainer):
    """The copy ends, or fails, without it: nothing is sealed of its slot, nothing stays open or held, and the next trainer is served."""
    end_copiers(g)
    r = Rank(g)
    table = r.pieces((r.at, 4000, 0, 0), (r.at + 4000, 4000, 0, 1))
    g.fail.write_text("cuStreamQuery:0:600")  # never ready
    body = {"generation": 1, "device": fake_gpu.UUID, "table": table}
    p = subprocess.Popen([sys.executable, "-c", DYING, str(pathlib.Path(lib.__file__).parent), str(g.socket), json.dumps(body),
                          f"/v1/state-dicts/{r.name}/ranks/0:copy"], env=lib.clean_environment(LD_LIBRARY_PATH=str(FAKES)))
    try:
        lib.wait_for(lambda: [w for w in copiers(g) if w["state"] == "busy"], 20, "the copy's begin")
    finally:
        p.kill()
        p.wait()
    g.fail.write_text("")
    lib.wait_for(lambda: not [w for w in copiers(g) if w["state"] == "busy"], 30, "the copy's end")
    mine = lambda pid: [f for f in lib.fd_targets(pid) if "fake device memory" in f]  # noqa: E731
    lib.wait_for(lambda: not mine(g.proc.pid) and not [f for w in copiers(g) for f in mine(w["pid"])], 10, "what was handed over is let go")
    assert g.api.get(f"/v1/state-dicts/{r.name}").ok(200)["ranks"][0]["slots"][0]["state"] == "open"
    r.whole(trainer.legacy(DATA)[1]).ok(200)
    r.sealed_as_it_should_be()
    r.drop()


def test_a_slot_that_is_being_copied_is_left_alone(g, trainer):
    """A device that does not come on: no seal meanwhile, and whoever reserves the generation anew gets another place."""
    end_copiers(g)
    r = Rank(g)
    g.fail.write_text("cuStreamQuery:0:600")  # never ready
    with contextlib.closing(g.api.connect(60)) as c:
        body = {"generation": 1, "device": fake_gpu.UUID, "allocations": [trainer.legacy(DATA)[1]],
                "table": r.pieces((r.at, len(DATA), 0, 0))}
        c.request("POST", f"/v1/state-dicts/{r.name}/ranks/0:copy", body=json.dumps(body),
                  headers={"Content-Type": "application/json"})
        lib.wait_for(lambda: [w for w in copiers(g) if w["state"] == "busy"], 10, "the copy's begin")
        p = g.api.post(f"/v1/state-dicts/{r.name}/ranks/0:seal", {"generation": 1, "image_bytes": r.table_at})
        assert "being copied" in p.problem("state_conflict", status=409)["detail"]
        r.whole(trainer.legacy(DATA)[1]).problem("state_conflict", status=409)
        g.api.delete(f"/v1/state-dicts/{r.name}").problem("state_dict_busy", status=409)
        again = Rank(g, name=r.name)
        assert again.segment != r.segment
        os.kill(copiers(g)[0]["pid"], signal.SIGKILL)
        answer = lib.Answer((got := c.getresponse()).status, dict(got.getheaders()), got.read())
    g.fail.write_text("")
    answer.problem("worker_lost", status=503)
    again.whole(trainer.legacy(DATA)[1]).ok(200)
    again.sealed_as_it_should_be()
    r.drop()


def test_a_ring_takes_what_it_has_room_for(g, trainer):
    """Device memory goes into a ring while the image is filled; not while a worker writes there, and not when nobody reads it any more."""
    end_copiers(g)
    name, ring = lib.fresh(), {"offset": PAGE, "bytes": 1 << 20}
    table_at, whole = PAGE + ring["bytes"] + PAGE, 5 << 20
    g.create(name)
    segment = g.reserve(name, 0, table_at + PAGE, 1)["segment"]
    at = f"/v1/state-dicts/{name}/ranks/0"
    sealed = {"generation": 1, "image_bytes": whole, "ring": ring}
    g.api.post(f"{at}:seal", {**sealed, "filling": True}).ok(204, 200)
    image = lib.segment_file(segment)
    with open(image, "r+b") as f:
        f.seek(table_at)
        f.write(fake_gpu.table([(PAGE + 512, len(DATA), 0, 0)]))
    body = {"generation": 1, "device": fake_gpu.UUID, "allocations": [trainer.legacy(DATA)[1]], "table": {"offset": table_at, "count": 1}}
    assert g.api.post(f"{at}:copy", body).ok(200)["bytes"] == len(DATA)
    assert image.read_bytes()[PAGE + 512:PAGE + 512 + len(DATA)] == DATA
    g.fail.write_text("cuStreamQuery:0:600")  # never ready
    with contextlib.closing(g.api.connect(60)) as c:
        c.request("POST", f"{at}:copy", body=json.dumps(body), headers={"Content-Type": "application/json"})
        lib.wait_for(lambda: [w for w in copiers(g) if w["state"] == "busy"], 10, "the copy's begin")
        assert "being copied" in g.api.post(f"{at}:seal", sealed).problem("state_conflict", status=409)["detail"]
        g.api.post(f"{at}:copy", body).problem("state_conflict", status=409)
        os.kill(copiers(g)[0]["pid"], signal.SIGKILL)
        lib.Answer((got := c.getresponse()).status, dict(got.getheaders()), got.read()).problem("worker_lost", status=503)
    g.fail.write_text("")
    assert g.api.post(f"{at}:copy", body).ok(200)["bytes"] == len(DATA)
    job = g.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": name, "generation": 1, "await_seal": True, "timeout_s": 60},
                                  "target": {"storage": "main", "name": f"gpu/{name}"}}).ok(202)
    g.api.post(f"/v1/jobs/{job['id']}:cancel")  # or it has found by then that this image is none
    lib.wait_for(lambda: g.api.get(f"/v1/jobs/{job['id']}").ok(200)["state"] in ("cancelled", "failed"), 20, "the job's end")
    g.api.post(f"{at}:copy", body).problem("ring_lost", status=409)
    g.drop(name)


def test_the_daemon_ends_while_it_copies(spawn, trainer, tmp_path):
    (tmp_path / "fail").write_text("cuStreamQuery:0:600")
    d = spawn(env={"LD_LIBRARY_PATH": str(FAKES), "FAKE_CUDA_FAIL": f"@{tmp_path}/fail"})
    known(d)
    r = Rank(d)
    hand = fake_gpu.Descriptors(d)
    pid = os.fork()
    if pid == 0:
        try:
            r.whole(trainer.legacy(DATA)[1]).problem("draining", "device_failed", "worker_lost")
            os._exit(0)
        finally:
            os._exit(1)
    lib.wait_for(lambda: [w for w in copiers(d) if w["state"] == "busy"], 10, "the copy's begin")
    begun = time.monotonic()
    d.stop()
    assert time.monotonic() - begun < 20 * lib.PATIENCE
    assert os.waitpid(pid, 0)[1] == 0
    hand.close()
