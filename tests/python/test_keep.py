"""Weights that outlive an inference engine: dcpd.keep and dcpd.attach, in shared memory and, over the fake libcuda, in a GPU's memory. What
the daemon makes of images is tested in tests/api/test_device_images.py."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import harness as lib
import pytest
from conftest import program_environment

ON_ENGINE = pathlib.Path(__file__).with_name("on_engine.py")
FAKES = lib.ROOT / "build/test/fakes"


def gpu_daemon(home, **more):
    d = lib.Daemon(home, env={"LD_LIBRARY_PATH": str(FAKES), **more})
    lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
    return d


@pytest.fixture(scope="module")
def g(tmp_path_factory):
    d = gpu_daemon(tmp_path_factory.mktemp("gpu"))
    yield d
    for i in images(d):
        d.api.delete(f"/v1/device-images/{i['id']}").ok(204)
    d.discard()


def images(d):
    return d.api.get("/v1/device-images").ok(200)["device_images"]


class Engine:
    """A process that may be killed; `told` is the line that it printed last."""

    def __init__(self, forks, d, case, *args, stdin=False):
        self.p = forks.start(ON_ENGINE, case, *args, env=program_environment(d), stdin=stdin)
        self.told = self.next()

    def next(self):
        line = self.p.stdout.readline()
        if not line:
            raise AssertionError(self.p.stderr.read())
        return json.loads(line)

    def kill(self):
        self.p.kill()
        self.p.wait(30)

    def end(self):
        _, err = self.p.communicate(timeout=100)
        assert self.p.returncode == 0, err
        return self.told


@pytest.fixture
def engine(forks, g):
    """engine(case, …) → an Engine."""
    made = []

    def start(case, *args, d=g, **more):
        made.append(Engine(forks, d, case, *args, **more))
        return made[-1]

    yield start
    for e in made:
        with contextlib.suppress(ProcessLookupError):
            e.kill()


@pytest.fixture
def name(forks, g):
    """Of a checkpoint."""
    out = lib.fresh()
    p = forks.start(ON_ENGINE, "save", out, env=program_environment(g))
    _, err = p.communicate(timeout=100)
    assert p.returncode == 0, err
    return out


def loads(d, name):
    return [j for j in d.api.get("/v1/jobs?filter=kind=load").ok(200)["jobs"] if j["target"].get("state_dict") == name]


def test_the_next_engine_has_its_weights_at_once(engine, g, name):
    """Killed in the middle of serving; the checkpoint and the copy in shared memory may be gone: the GPU's is one of its own."""
    first = engine("serve", name)
    assert first.told["same"] and "on cuda:0, 5 entries" in first.told["text"]
    first.kill()
    g.api.run("delete", target={"storage": "main", "name": name})
    g.drop(name)
    assert engine("next_engine", name).end() == {"same": True, "attached": 1}
    assert engine("lifetimes", name).end()["ok"]


def test_a_mapping_that_is_let_go_in_a_fork_or_during_a_capture(engine, g, name):
    engine("keep", name).end()
    assert engine("forked", name).end() == {"attached": 0, "status": 0}
    assert engine("captured", name).end() == {"mapped": True, "attached": 1}
    g.drop(name)


def test_the_time_that_keep_may_take(engine, g, name):
    engine("keep", name).end()
    for i in images(g):
        g.api.delete(f"/v1/device-images/{i['id']}")
    holder = next(w["pid"] for w in g.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "holder")
    with lib.stopped(holder):
        assert engine("impatient", name).end()["ok"]
    lib.wait_for(lambda: all(i["state"] == "kept" for i in images(g)), 20, "the copy's end")
    g.drop(name)


def test_shared_memory_outlives_the_engine(engine, g, name):
    """One load; no lease that an engine must renew: the next one maps the same pages, after a daemon that was killed, too."""
    for i in range(3):
        e = engine("shared_memory", name)
        assert e.told == {"same": True, "into": True, "generation": 1}
        e.kill()
        if i == 1:
            g.proc.kill()
            g.proc.wait()
            g.start()
            lib.wait_for(lambda: g.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
    assert len(loads(g, name)) == 1
    assert not [r for r in g.api.get(f"/v1/state-dicts/{name}").ok(200)["ranks"] if "lease_expires_at" in r]
    g.drop(name)


def test_engines_that_start_together_load_once(forks, g, name):
    started = [forks.start(ON_ENGINE, "keep", name, env=program_environment(g)) for _ in range(4)]
    told = []
    for p in started:
        out, err = p.communicate(timeout=100)
        assert p.returncode == 0, err
        told.append(json.loads(out))
    assert len({t["id"] for t in told}) == 1, told
    assert len([j for j in loads(g, name) if j["state"] == "succeeded"]) == 1
    g.drop(name)


def test_what_another_engine_has_loaded_meanwhile_is_not_filled_anew(engine, g, name):
    engine("keep", name).end()
    assert engine("late", name).end() == {"generation": 1, "looks": 1}
    assert len(loads(g, name)) == 1
    source, target = {"storage": "main", "name": name}, {"state_dict": name, "create_only": True}
    p = g.api.post("/v1/jobs", {"kind": "load", "source": source, "target": target}).problem("state_dict_exists", status=409)
    assert "it is not loaded into" in p["detail"]
    g.drop(name)
    g.api.run("load", source=source, target=target)
    g.drop(name)


def test_ranks_are_kept_by_themselves(engine, g, name):
    assert engine("ranks", name).end() == {"same": [True, True]}
    assert sorted((i["rank"], i["state"]) for i in images(g) if i["state_dict"] == name) == [(0, "kept"), (1, "kept")]
    g.drop(name)


def test_a_newer_version_of_a_publication(engine):
    assert engine("generations", lib.fresh()).end()["ok"]


def test_an_image_that_is_superseded_before_it_is_attached(engine):
    assert engine("overtaken", lib.fresh()).end() == {"same": True, "other": True, "looks": 2}


def test_what_the_driver_refuses_an_engine(engine, g, name):
    engine("keep", name).end()
    assert engine("refused", name).end() == {"out": [], "same": True}
    g.drop(name)


def test_an_image_that_is_not_there_or_is_lost(engine, g, name):
    said = engine("missing", name).end()["said"]
    assert f"cuda:0 has no image of rank 0 of shm:{name}: dcpd.keep(" in said
    engine("keep", name).end()
    holder = next(w["pid"] for w in g.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "holder")
    os.kill(holder, signal.SIGKILL)
    lib.wait_for(lambda: all(i["state"] == "lost" for i in images(g) if i["state_dict"] == name), 10, "the images' end")
    said = engine("missing", name).end()["said"]
    assert "any more (the worker that held it has ended" in said and "dcpd.keep(" in said
    assert engine("keep", name).end()["state"] == "kept"
    g.drop(name)


def test_an_engine_outlives_the_daemon(engine, tmp_path, forks):
    d = gpu_daemon(tmp_path)
    try:
        name = lib.fresh()
        p = forks.start(ON_ENGINE, "save", name, env=program_environment(d))
        assert p.communicate(timeout=100) and p.returncode == 0
        engine("keep", name, d=d).end()
        e = engine("outlive", name, d=d, stdin=True)
        d.proc.kill()
        d.proc.wait()
        e.p.stdin.write("\n")
        e.p.stdin.flush()
        assert e.told["same"] and e.next()["same"]
        d.start()
        lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
        assert images(d) == [] and engine("keep", name, d=d).end()["state"] == "kept", "out of shared memory, which is still there"
        assert len(loads(d, name)) == 1
    finally:
        d.discard()


def test_no_room_on_the_gpu(engine, tmp_path, forks):
    d = gpu_daemon(tmp_path, FAKE_CUDA_MEMORY=str(1 << 20))
    try:
        name = lib.fresh()
        p = forks.start(ON_ENGINE, "save", name, env=program_environment(d))
        assert p.communicate(timeout=100) and p.returncode == 0
        told = engine("keep", name, d=d).end()
        assert told["raised"] == "DeviceMemoryFull" and "has no room for a device image of" in told["said"], told
    finally:
        d.discard()


NO_DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import dcpd
for call in (lambda: dcpd.keep("shm:x", device="cuda:0"), lambda: dcpd.attach("shm:x", device="cuda:0")):
    try:
        call()
    except dcpd.RequestRefused as e:
        print(e)
try:
    dcpd.keep("main:x", "x", device="cpu")
except Exception as e:
    print(type(e).__name__)
"""


def test_an_engine_without_a_driver(g):
    """Without PyTorch, too."""
    out = subprocess.run([sys.executable, "-S", "-c", NO_DRIVER, str(lib.ROOT / "api/python")],
                         env=program_environment(g, LD_LIBRARY_PATH=""), capture_output=True, text=True)
    assert out.stdout.count("device images cannot be used: libcuda.so.1") == 2, out
