"""Tensors on a GPU that dcpd copies: save, async_save and load of the package, over the fake libcuda (tests/fakes/libcuda.c). The tensors
are torch's, with their bytes behind the fake device's addresses (tests/lib/fake_gpu.py). The daemon's counter tells who copied."""
import json
import pathlib

import harness as lib
import lib_ranks
import on_gpu_ranks
import pytest
from conftest import program_environment

ON_GPU = pathlib.Path(__file__).with_name("on_gpu.py")
FAKES = lib.ROOT / "build/test/fakes"
ALL = 4 * (1 << 20) + 2 * 3000001 + 4 * 25 + 4 * 3  # bytes of on_gpu.state that are handed over


def gpu_daemon(home, **more):
    (home / "fail").write_text("")
    d = lib.Daemon(home, env={"LD_LIBRARY_PATH": str(FAKES), "FAKE_CUDA_FAIL": f"@{home}/fail"}, **more)
    d.fail = home / "fail"
    lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
    return d


@pytest.fixture(scope="module")
def g(tmp_path_factory):
    d = gpu_daemon(tmp_path_factory.mktemp("gpu"))
    yield d
    # an idle copier keeps the table of its kernel, on the device
    lib.wait_for(lambda: all("fake device memory" in x for x in d.leaks()), 10, "the end of what was page-locked")
    d.discard()


def copied(d):
    lines = d.api.get("/metrics").body.decode().splitlines()
    return sum(int(float(x.split()[-1])) for x in lines if x.startswith("dcpd_device_copy_bytes_total"))


@pytest.fixture
def run(g, forks):
    """run(case, …) → (what it printed, bytes that the daemon copied for it)."""
    def run(case, *args, d=g, env=None):
        before = copied(d)
        p = forks.start(ON_GPU, case, f"main:{lib.fresh()}", *args, env=program_environment(d, **(env or {})))
        out, err = p.communicate(timeout=100 * lib.PATIENCE)
        assert p.returncode == 0, f"{out}\n{err}"
        return json.loads(out.splitlines()[-1]), copied(d) - before if d.alive() else None

    return run


def test_saves_and_loads_are_copied_by_the_daemon(run):
    told, n = run("save_and_load")
    assert n == 2 * ALL and told["said"] == [] and told["off"] == []
    assert told["out"] == [1, 2], "the device's stream is waited for before each copy"


def test_a_save_that_blocks(run):
    told, n = run("blocking")
    assert n == ALL and told["said"] == []


def test_a_save_through_a_ring(run, g):
    told, n = run("through_ring", g.fail, "", "")
    assert n == 2 * (ALL + 20 * 4) and told["said"] == [], (told, n)


@pytest.mark.parametrize("fail", ["cuMemcpyDtoHAsync_v2:3:700:sticky", "cuIpcOpenMemHandle_v2:2:2"])
def test_a_driver_that_refuses_in_the_middle_of_a_ring(run, g, fail):
    """What the ring has already stays, this process copies the rest; the next save is handed over."""
    told, n = run("through_ring", g.fail, fail, "")
    assert ALL + 20 * 4 < n < 2 * (ALL + 20 * 4) and len(told["said"]) == 1 and told["off"] == [], (told, n)


def test_the_drop_in(run, g):
    told, n = run("drop_in", g.fail, "")
    assert n == 3 * (ALL + 20 * 4) and told["said"] == [], (told, n)


def test_the_drop_in_and_a_driver_that_refuses(run, g):
    told, n = run("drop_in", g.fail, "cuIpcOpenMemHandle_v2:0:2", "cuMemcpyDtoHAsync_v2:3:700:sticky")
    assert 0 < n < 3 * (ALL + 20 * 4) and len(told["said"]) == 2 and told["off"] == [], (told, n)


def test_memory_without_handles_is_copied_by_torch(run):
    told, n = run("unshareable")
    assert n == 0 and len(told["said"]) == 1, told
    assert "copies its GPU memory itself, from now on" in told["said"][0] and "cuMemExportToShareableHandle: error 801" in told["said"][0]


@pytest.mark.long
def test_each_call_of_the_trainer_fails(run):
    assert run("each_call")[1] == 0


@pytest.mark.long
@pytest.mark.parametrize("fail, said", [
    ("cuIpcOpenMemHandle_v2:0:2", "CUDA_ERROR_OUT_OF_MEMORY"),
    ("cuMemcpyDtoHAsync_v2:0:700:sticky", "CUDA_ERROR_ILLEGAL_ADDRESS"),
])
def test_a_driver_that_refuses_is_asked_again(run, g, fail, said):
    told, n = run("refused", g.fail, fail)
    assert n == ALL and len(told["said"]) == 1 and said in told["said"][0] and "from now on" not in told["said"][0], told


def test_a_load_goes_through_three_page_locked_lanes(run):
    told, n = run("several_lanes")
    assert told["out"] == [3] and n == 8 * (4 << 20) and told["said"] == []


def test_new_tensors_on_the_device(run):
    told, n = run("new_tensors")
    assert n == 2 * (2 * (2 << 20) + 4) + 4 * (3 << 20) + 4 * 5 and told["said"] == [], (told, n)
    assert told["out"] == [], "segments that a load has made are gone when it has failed"


CASTS = 2 * (2 << 20) + 2 * 1000 + 2 * (1 << 20) + 4 * 12 + 4099 + 2 * 12 + 4 * 50  # what goes over the bus


def test_a_load_into_other_dtypes_is_cast_on_the_device(run, g):
    told, n = run("casts", g.fail, "")
    assert n == CASTS and told["said"] == [], (told, n)


@pytest.mark.parametrize("fail", ["", "cuModuleLoadData:0:218"])
def test_a_save_of_another_dtype_is_cast_on_the_device(run, tmp_path, fail):
    d = gpu_daemon(tmp_path)
    try:
        told, n = run("cast_on_save", d.fail, fail, d=d)
    finally:
        d.discard()
    assert n == (0 if fail else 2 * (3 << 20)) and len(told["said"]) == bool(fail), (told, n)


@pytest.mark.parametrize("fail", ["cuModuleLoadData:0:218", "cuMemHostGetDevicePointer_v2:0:801"])
def test_a_device_that_runs_no_kernel_casts_nothing(run, tmp_path, fail):
    d = gpu_daemon(tmp_path)
    try:
        told, n = run("casts", d.fail, fail, d=d)
    finally:
        d.discard()
    assert n == 2 * (1 << 20) + 4 * 50 and len(told["said"]) == 1, (told, n)
    assert "casts what is on a GPU itself" in told["said"][0] and fail[:12] in told["said"][0] and told["off"] == [], told


def test_new_tensors_that_rules_make_go_through_the_lanes(run):
    told, n = run("by_rules")
    assert told["out"][0] == 3 and n == 4 * (4 << 20) + 2 * (2 << 20), (told, n)
    assert len(told["said"]) == 1 and "goes through shared memory at once" in told["said"][0] and "lacks float16" in told["said"][0], told


@pytest.mark.long
@pytest.mark.parametrize("how", ["goes_on", "hangs"])
def test_an_interrupted_load_leaves_no_memory_to_a_worker_that_writes(run, how):
    """The tensors are freed when the copy into them has ended, else never."""
    told, _ = run("lost", how)
    hangs = how == "hangs"
    assert told["out"] == ["KeyboardInterrupt", [hangs]], told
    assert [("8388608 bytes of GPU memory are kept" in x) for x in told["said"]] == [True] * hangs, told


def test_a_load_that_loses_its_daemon_keeps_what_a_worker_may_write_to(run, tmp_path):
    d = gpu_daemon(tmp_path)
    try:
        told, _ = run("lost", "killed", d.proc.pid, d=d)
    finally:
        d.discard()
    assert told["out"] == ["ConnectionLost", [True]] and "bytes of GPU memory are kept" in told["said"][0], told


def test_an_overlapping_save(run):
    told, n = run("overlapped")
    assert n == 2 * 4 * (2 << 20) and told["said"] == []


@pytest.mark.long
@pytest.mark.parametrize("cases", [["save", "async_save"], ["load"], ["casts", "published"], ["kept"]])
def test_what_the_check_of_a_gpu_expects(run, cases):
    run("checks", *cases)


@pytest.mark.long
def test_what_the_check_of_several_gpus_expects(run, spawn):
    run("checks", "operations", d=spawn(env={"LD_LIBRARY_PATH": str(FAKES), "FAKE_CUDA_DEVICES": "2"}))


def test_little_memory_is_not_worth_a_copy(run):
    assert run("little")[1] == 0


def test_switched_off(run):
    told, n = run("blocking", env={"DCPD_HAND_OVER": "0"})
    assert n == 0 and told["said"] == []


def test_a_host_without_a_driver_says_so_once(run, spawn):
    d = spawn()
    lib.wait_for(lambda: "not yet known" not in d.api.get("/v1/capabilities").ok(200)["backends"]["cuda"]["reason"], 20, "the probe")
    told, _ = run("save_and_load", d=d)
    assert len(told["said"]) == 1 and "libcuda.so.1" in told["said"][0] and len(told["off"]) == 1, told


@pytest.mark.long
def test_no_room_for_a_snapshot(run, tmp_path):
    d = gpu_daemon(tmp_path, args=["--shm-limit", "72M"])
    try:
        assert run("no_room", d=d)[1] == 6 * (16 << 20)
    finally:
        d.discard()


@pytest.fixture(scope="module")
def two(g, forks):
    """Two ranks, and a checkpoint that they have saved."""
    pool = lib_ranks.Ranks(2, {"DCPD_URL": f"unix://{g.socket}", "TEST_NO_MESHES": "1"}, forks)
    ref = f"main:{lib.fresh()}"
    pool(on_gpu_ranks.save, ref)
    yield pool, ref
    pool.close()


ALL_KEYS = ["model.b", "model.w", "optim.m"]


@pytest.mark.parametrize("how, keys, handed", [("all", ALL_KEYS, 12 << 20 | 20), ("part", ["optim.m"], 4 << 20),
                                               ("rules", ["model.b", "model.renamed", "optim.m"], 12 << 20 | 20)])
def test_new_tensors_of_several_ranks(two, g, how, keys, handed):
    """Each rank has all of it on its own device, whatever rules make of it."""
    pool, ref = two
    before = copied(g)
    assert pool(on_gpu_ranks.whole, ref, how) == [keys] * 2
    assert copied(g) - before == 2 * handed


@pytest.mark.parametrize("on_device, handed", [([0, 1], 2 * (8 << 20)), ([0], 16 << 20)])
def test_a_cast_of_several_ranks(two, g, on_device, handed):
    """A GPU casts what no rank has to have cast elsewhere: a tensor has one dtype in the segments of all ranks."""
    pool, ref = two
    before = copied(g)
    pool(on_gpu_ranks.into_doubles, ref, on_device)
    assert copied(g) - before == handed


def test_rules_that_cannot_be_read_fail_all_ranks(two):
    pool, ref = two
    assert all("FileNotFoundError" in x or x == "RankFailed" for x in pool(on_gpu_ranks.rules_that_are_not_there, ref))


def test_a_rank_without_room_on_its_device(two):
    pool, ref = two
    got = pool(on_gpu_ranks.no_room, ref)
    assert got[1] == "RuntimeError: CUDA out of memory." and got[0].startswith("RankFailed: rank 1: RuntimeError"), got


HOSTS = {"DCPD_PLACE": ["host-a", "host-b"]}


@pytest.mark.parametrize("case", [on_gpu_ranks.whole, on_gpu_ranks.not_listed])
def test_new_tensors_on_several_hosts(two, case):
    """A host that cannot list the checkpoint loads as the others do."""
    pool, ref = two
    assert pool(case, ref, *["all"] * (case is on_gpu_ranks.whole), env=HOSTS) == [ALL_KEYS] * 2


@pytest.mark.parametrize("spread", [False, None])
def test_a_wish_to_spread_is_that_of_all_steps(two, spread):
    pool, ref = two
    got = pool(on_gpu_ranks.wishes, ref, spread, env=HOSTS)
    assert len(got[0]) > 1 and set(got[0] + got[1]) == {spread}
