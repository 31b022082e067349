"""What the host has beside CPUs, and why not: found by a probe of its own, shown by /v1/capabilities and dcpctl status."""
import os
import pathlib
import signal

import pytest

import dcpd as lib

FAKES = lib.ROOT / "build/test/fakes"


def backends(d):
    """The answer of the probe; until it is there the reason says so."""
    def known():
        c = d.api.get("/v1/capabilities").ok(200)
        assert c["backends"]["shm"] == {"available": True} and c["backends"]["tcp"] == {"available": True}
        return c if "not yet known" not in c["backends"]["cuda"].get("reason", "") else None
    return lib.wait_for(known, 20, "the probe's answer")


def gone(d):
    """The probe is no worker that stays."""
    return lib.wait_for(lambda: not [w for w in d.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "probe"], 10,
                        "the end of the probe")


@pytest.fixture
def fakes(tmp_path):
    """A folder of libraries for LD_LIBRARY_PATH: fakes("libcuda.so.1")."""
    def make(*names):
        for n in names:
            assert (FAKES / n).exists(), "not built (make tools)"
            (tmp_path / "lib").mkdir(exist_ok=True)
            (tmp_path / "lib" / n).symlink_to(FAKES / n)
        return str(tmp_path / "lib")
    return make


def test_no_driver(spawn, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcuda.so.1").write_text("no library")
    d = spawn(env={"LD_LIBRARY_PATH": str(tmp_path / "lib")})
    c = backends(d)
    for name in ("cuda", "nccl"):
        assert c["backends"][name]["available"] is False
        assert "libcuda.so.1 cannot be loaded: " in c["backends"][name]["reason"]
    assert c["devices"] == []
    out = d.ctl("status").stdout
    assert "back ends: shm, tcp\n" in out and "no cuda: libcuda.so.1 cannot be loaded: " in out and "no nccl" not in out
    gone(d)


@pytest.mark.skipif(any(pathlib.Path(p).exists() for p in ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib64/libcuda.so.1")),
                    reason="a driver is installed")
def test_not_installed(spawn):
    c = backends(spawn(env={"LD_LIBRARY_PATH": ""}))
    assert c["backends"]["cuda"]["reason"] == "libcuda.so.1 was not found: no NVIDIA driver is installed here"
    assert c["backends"]["nccl"]["reason"] == "libcuda.so.1 was not found: no NVIDIA driver is installed here"


def test_gpus(spawn, fakes):
    d = spawn(env={"LD_LIBRARY_PATH": fakes("libcuda.so.1", "libnccl.so.2"), "FAKE_CUDA_DEVICES": "2"})
    c = backends(d)
    assert c["backends"]["cuda"] == {"available": True}
    assert c["backends"]["nccl"] == {"available": True, "version": "2.28.9"}
    assert c["devices"] == [
        {"index": 0, "name": "Fake GPU 0", "uuid": "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "memory_bytes": 1 << 30},
        {"index": 1, "name": "Fake GPU 1", "uuid": "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", "memory_bytes": 1 << 30}]
    out = d.ctl("status").stdout
    assert "back ends: shm, tcp, cuda, nccl\n" in out and "GPU 1: Fake GPU 1, 1.00 GiB\n" in out, out
    gone(d)


def test_gpu_without_nccl(spawn, fakes, tmp_path):
    path = fakes("libcuda.so.1")
    (tmp_path / "lib/libnccl.so.2").symlink_to(FAKES / "libcuda.so.1")
    c = backends(spawn(env={"LD_LIBRARY_PATH": path}))
    assert c["backends"]["cuda"]["available"] is True and len(c["devices"]) == 1
    assert c["backends"]["nccl"] == {"available": False, "reason": "libnccl.so.2 lacks ncclGetVersion: it is older than 2.14"}


@pytest.mark.parametrize("env,reason", [
    ({"FAKE_CUDA_INIT": "100"}, "cuInit: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE, error 100)"),
    ({"FAKE_CUDA_DEVICES": "0"}, "the NVIDIA driver shows no GPU to this process")])
def test_driver_without_gpu(spawn, fakes, env, reason):
    c = backends(spawn(env={"LD_LIBRARY_PATH": fakes("libcuda.so.1", "libnccl.so.2"), **env}))
    assert c["backends"]["cuda"] == {"available": False, "reason": reason} == c["backends"]["nccl"]


def test_driver_that_is_too_old(spawn, fakes, tmp_path):
    path = fakes("libnccl.so.2")
    (tmp_path / "lib/libcuda.so.1").symlink_to(FAKES / "libnccl.so.2")
    reason = "libcuda.so.1 lacks cuInit: the NVIDIA driver is too old"
    c = backends(spawn(env={"LD_LIBRARY_PATH": path}))
    assert c["backends"]["cuda"] == {"available": False, "reason": reason} == c["backends"]["nccl"]


def test_one_gpu_is_broken(spawn, fakes):
    c = backends(spawn(env={"LD_LIBRARY_PATH": fakes("libcuda.so.1"), "FAKE_CUDA_FAIL": "cuDeviceGetName:1:1"}))
    assert c["devices"] == [{"index": 0, "problem": "cuDeviceGetName: invalid argument (CUDA_ERROR_INVALID_VALUE, error 1)"}]


def test_driver_crashes(spawn, fakes):
    """A driver that takes its process with it costs a probe, and SIGHUP asks once more."""
    path = fakes("libcuda.so.1", "libnccl.so.2")
    flag = pathlib.Path(path) / "crash"
    flag.touch()
    d = spawn(env={"LD_LIBRARY_PATH": path, "FAKE_CUDA_CRASH": str(flag)})
    reason = backends(d)["backends"]["cuda"]["reason"]
    assert "the probe failed: worker probe-" in reason and "ended with signal" in reason
    assert d.alive() and d.api.get("/readyz").status == 200
    flag.unlink()
    os.kill(d.proc.pid, signal.SIGHUP)
    lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["backends"]["cuda"]["available"], 20, "a second probe")



# DAC_OVERRIDE, DAC_READ_SEARCH, CHOWN, FOWNER: linux/capability.h
FILES_ONLY = 1 << 1 | 1 << 2 | 1 << 0 | 1 << 3


def test_workers_keep_the_capabilities_of_file_access_alone(spawn):
    d = spawn()
    d.put("s", [lib.image({"w": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": "a"})
    d.api.get("/v1/checkpoints/main").ok(200)
    workers = d.workers()
    assert len(workers) >= 3, "a gang and one for questions"
    for pid in workers:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            held = int(next(line for line in status.splitlines() if line.startswith(name)).split()[1], 16)
            assert held & ~FILES_ONLY == 0, (name, hex(held))
