"""`dcpd --doctor`, GET /v1/doctor and `dcpctl doctor`: each lack is made real, by a limit, a small tmpfs, or a filter of system calls."""
import csv
import json
import os
import pathlib
import resource
import subprocess

import host
import pytest

import dcpd as lib

TESTBIN = pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))
DENY = TESTBIN / "tools/deny"
NOBODY = 65534


def doctor(home, *args, under=(), env=None, rc=0, **more):
    """{name: finding} of `dcpd --doctor json`."""
    argv = [*map(str, under), str(lib.BIN / "dcpd"), "--doctor", "json", "--state-dir", str(home / "state"), *args]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=lib.clean_environment(**(env or {})), **more)
    assert out.returncode == rc, (out.returncode, out.stdout, out.stderr)
    doc = json.loads(out.stdout)
    assert doc["bad"] == sum(f["state"] == "bad" for f in doc["findings"]) and (doc["bad"] > 0) == (rc == 1)
    return {f["name"]: f for f in doc["findings"]}


def lacks(finding, state, words, command):
    assert finding["state"] == state and words in finding["words"] and command in finding["command"], finding


def can_mount():
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def with_shm(size):
    if not can_mount():
        pytest.skip("no mount namespace to be had here")
    return ("unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size={size},mode=1777 shm /dev/shm && exec \"$@\"", "sh")


def test_a_host_that_lacks_nothing_of_these(tmp_path):
    found = doctor(tmp_path, "--storage", f"main={tmp_path}")
    assert {"shm", "shm_xattr", "memlock", "open_files", "io_uring", "landlock", "clock", "nvidia_driver", "container_toolkit", "numa",
            "pci", "cuda", "nccl", "storage main"} == set(found)
    for f in found.values():
        assert f["words"] and bool(f["command"]) == (f["state"] in ("warn", "bad")), f
    assert not (tmp_path / "state").exists() and not list(tmp_path.iterdir()), "looking makes nothing that stays"


@pytest.mark.parametrize("size, state, rc", [("32m", "bad", 1), ("64m", "warn", 0), ("2g", "ok", 0)])
def test_shm(tmp_path, size, state, rc):
    found = doctor(tmp_path, under=with_shm(size), rc=rc)
    assert found["shm"]["state"] == state, found["shm"]
    if state != "ok":
        lacks(found["shm"], state, f"/dev/shm has {size[:-1]} MiB", "size")


@pytest.mark.long
def test_a_full_shm(tmp_path):
    fill = ("sh", "-c", 'fallocate -l 1900M /dev/shm/full && exec "$@"', "sh")
    lacks(doctor(tmp_path, under=(*with_shm("2g"), *fill))["shm"], "warn", "nearly full", "dcpctl ls shm:")


def test_tmpfs_without_user_attributes(tmp_path):
    found = doctor(tmp_path, env=host.OLD_KERNEL)
    lacks(found["shm_xattr"], "warn", "no user attributes", "Linux 6.6")


def test_io_uring_refused(tmp_path):
    under = (DENY, "io_uring_setup")
    lacks(doctor(tmp_path, under=under)["io_uring"], "warn", "Operation not permitted", "")
    lacks(doctor(tmp_path, "--io-engine", "io_uring", under=under, rc=1)["io_uring"], "bad", "no job can run", "")
    assert doctor(tmp_path, "--io-engine", "threads", under=under)["io_uring"]["state"] == "idle"


def test_landlock_refused(tmp_path):
    lacks(doctor(tmp_path, under=(DENY, "landlock_create_ruleset"))["landlock"], "warn", "mount namespace", "seccomp=")


def limited(what, value):
    return lambda: (resource.setrlimit(what, (value, value)), os.setresuid(NOBODY, NOBODY, NOBODY))


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user, to lose the capability that lifts limits")
def test_limits(tmp_path):
    tmp_path.chmod(0o777)
    found = doctor(tmp_path, preexec_fn=limited(resource.RLIMIT_MEMLOCK, 8 << 20))
    lacks(found["memlock"], "warn", "only 8.0 MiB", "memlock" if "docker" in found["memlock"]["command"] else "LimitMEMLOCK")
    found = doctor(tmp_path, preexec_fn=limited(resource.RLIMIT_NOFILE, 1024))
    lacks(found["open_files"], "warn", "only 1024 files", "65536")
    found = doctor(tmp_path, preexec_fn=limited(resource.RLIMIT_NOFILE, 64), rc=1)
    lacks(found["open_files"], "bad", "only 64 files", "65536")


def test_a_clock_that_is_years_behind(tmp_path):
    clock = host.WallClock(tmp_path / "clock")
    clock.step(-20 * 365 * 86400)
    found = doctor(tmp_path, env=clock.env, rc=1)
    lacks(found["clock"], "bad", "years behind", "timedatectl")


def test_a_clock_that_nobody_keeps(tmp_path):
    lacks(doctor(tmp_path, env=host.UNSYNCED)["clock"], "warn", "not synchronised", "timedatectl")
    lacks(doctor(tmp_path, under=(DENY, "adjtimex,clock_adjtime"))["clock"], "idle", "not known", "")


def test_storages(tmp_path, mounted):
    lacks(doctor(tmp_path, "--storage", f"main={tmp_path}/none", rc=1)["storage main"], "bad", "cannot be written", "--check-config")
    closed = mounted("ro")
    lacks(doctor(tmp_path, "--storage", f"main={closed}", rc=1)["storage main"], "bad", "cannot be written", "--check-config")
    out = subprocess.run([lib.BIN / "dcpd", "--doctor", "table", "--state-dir", tmp_path / "s"], capture_output=True, text=True, timeout=60)
    assert out.returncode == 2 and 'text or json, not "table"' in out.stderr


def test_a_storage_without_o_direct(tmp_path):
    lacks(doctor(tmp_path, "--storage", f"main={tmp_path}", env=host.BUFFERED)["storage main"], "warn", "has no O_DIRECT", "ext4 or xfs")


@pytest.mark.parametrize("nccl, state, words", [
    ({}, "ok", "NCCL 2.28.9"), ({"FAKE_NCCL_VERSION": "21304"}, "warn", "older than 2.14"),
    ({"FAKE_NCCL_VERSION": "30000"}, "warn", "another major version")])
def test_driver_and_nccl_of_the_running_daemon(spawn, nccl, state, words):
    d = spawn(env={"LD_LIBRARY_PATH": str(lib.ROOT / "build/test/fakes"), **nccl})
    found = {}

    def asked():
        found.update({f["name"]: f for f in d.api.get("/v1/doctor").ok(200)["findings"]})
        return "probe" not in found["cuda"]["words"]

    lib.wait_for(asked, 20, "the probe's answer")
    lacks(found["cuda"], "ok", "the driver answers", "")
    lacks(found["nccl"], state, words, "libnccl2" if state == "warn" else "")


FAKES = str(lib.ROOT / "build/test/fakes")


@pytest.mark.parametrize("env, cuda, nccl, words", [
    ({"LD_LIBRARY_PATH": FAKES}, "ok", "ok", "NCCL 2.28.9"),
    ({"LD_LIBRARY_PATH": FAKES, "FAKE_NCCL_VERSION": "21304"}, "ok", "warn", "older than 2.14"),
    ({"LD_LIBRARY_PATH": FAKES, "FAKE_CUDA_INIT": "803"}, "idle", "idle", "not needed without a GPU")])
def test_driver_and_nccl_without_a_daemon(tmp_path, env, cuda, nccl, words):
    found = doctor(tmp_path, env=env)
    assert found["cuda"]["state"] == cuda, found["cuda"]
    lacks(found["nccl"], nccl, words, "libnccl2" if nccl == "warn" else "")


def test_a_driver_in_the_kernel_alone(tmp_path):
    """The kernel's driver and its device files are there, and libcuda.so.1 is not what it should be: the row says so, and what mends it."""
    if not can_mount() or not os.path.isdir("/proc/driver"):
        pytest.skip("no mount namespace to be had here, or no /proc/driver")
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    dev = "mount -t tmpfs dev /mnt && cp -a /dev/null /dev/urandom /mnt && mkdir /mnt/shm && mount --bind /dev/shm /mnt/shm && " \
          "touch /mnt/nvidiactl && mount --rbind /mnt /dev"
    under = ("unshare", "--mount", "sh", "-c", f"mount --bind {tmp_path} /proc/driver && {dev} && exec \"$@\"", "sh")
    for fail, mends in (("803", ("reboot", "start the container anew")), ("802", ("fabricmanager", "fabricmanager"))):
        found = doctor(tmp_path, under=under, env={"LD_LIBRARY_PATH": FAKES, "FAKE_CUDA_INIT": fail})
        assert found["nvidia_driver"]["state"] == "ok", found["nvidia_driver"]
        lacks(found["cuda"], "warn", f"error {fail}", "")
        assert any(m in found["cuda"]["command"] for m in mends), found["cuda"]


def test_a_driver_that_crashes_is_a_finding(tmp_path):
    crash = tmp_path / "crash"
    crash.touch()
    found = doctor(tmp_path, env={"LD_LIBRARY_PATH": FAKES, "FAKE_CUDA_CRASH": str(crash)})
    lacks(found["cuda"], "idle", "the probe failed: it ended in the driver", "")


def test_what_the_running_daemon_adds(spawn):
    d = spawn()
    d.api.get("/v1/checkpoints/main").ok(200)
    lib.wait_for(lambda: "probe" not in d.api.get("/v1/doctor").body.decode(), 20, "the probe's answer")
    doc = d.api.get("/v1/doctor").ok(200)
    found = {f["name"]: f for f in doc["findings"]}
    assert {"journal", "storage main", "cuda", "nccl", "shm"} <= set(found), found
    assert found["journal"]["state"] == "ok" and found["storage main"]["state"] in ("ok", "warn")
    said = d.ctl("doctor", "--json")
    assert json.loads(said.stdout)["bad"] == doc["bad"] and said.returncode == (doc["bad"] > 0)
    text = d.ctl("doctor").stdout
    for f in doc["findings"]:
        assert f["name"] in text and (not f["command"] or f"mend: {f['command']}" in text), f
    rows = list(csv.reader(d.ctl("doctor", "--output", "csv").stdout.splitlines()))
    assert len(rows) == len(doc["findings"]) + 1 and "NAME" in rows[0][1].upper()


def test_a_storage_that_is_gone_is_in_the_way(spawn):
    d = spawn()
    d.stop()
    home = d.storages["main"]
    home.rename(home.with_name("away"))
    d.start()
    lib.wait_for(lambda: d.api.get("/v1/storages/main").json["state"] == "gone", 10, "gone")
    said = d.ctl("doctor")
    assert said.returncode == 1 and "BAD " in said.stdout and "storage main" in said.stdout, said.stdout


def test_the_self_test_at_start_is_in_the_log(spawn):
    d = spawn(under=(DENY, "landlock_create_ruleset,io_uring_setup"))
    assert "self-test" in d.tail() and "io_uring, landlock" in d.tail(100000), d.tail()
    bad = spawn(under=(DENY, "io_uring_setup"), args=["--io-engine", "io_uring"])
    assert "lacks=io_uring" in bad.tail(100000), bad.tail()


def test_without_a_daemon_this_host_is_looked_at(tmp_path):
    env = lib.clean_environment(HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path))
    out = subprocess.run([lib.BIN / "dcpctl", "doctor", "--json"], capture_output=True, text=True, timeout=60, env=env)
    if "no daemon answers" not in out.stderr:
        pytest.skip("a daemon of this machine answers")
    doc = json.loads(out.stdout)
    assert {"shm", "io_uring"} <= {f["name"] for f in doc["findings"]} and out.returncode == (doc["bad"] > 0)
    asked = subprocess.run([lib.BIN / "dcpctl", "doctor", "--url", f"unix://{tmp_path}/none"], capture_output=True, text=True, timeout=60,
                           env=env)
    assert asked.returncode == 3 and not asked.stdout, "a daemon that was named is not on this host by all accounts"


def test_a_storage_is_looked_at_where_children_are_not_reported(tmp_path):
    """Some parents leave SIGCHLD ignored to what they start."""
    under = ("sh", "-c", 'trap "" CHLD; exec "$@"', "sh")
    found = doctor(tmp_path, "--storage", f"main={tmp_path}/none", under=under, rc=1)
    assert [f["state"] for name, f in found.items() if "main" in name] == ["bad"], found
