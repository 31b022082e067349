"""Rings whose trainer dies, takes them away, or lies about them, and rings whose daemon dies: nothing torn is ever seen, nothing stays, and
somebody says why. Leases are as long as they always are: nothing here waits for one."""
import os

import harness as lib
import lib_ranks
import on_streaming
import pytest
from test_faults_ranks import load, started_again

MIB = 1 << 20
WAYS = pytest.mark.parametrize("way", ["drop-in", "save"])


@pytest.fixture
def own(spawn):
    return spawn()


@pytest.fixture
def pool(own, forks):
    """pool(n) → ranks that may die."""
    made = []

    def make(n):
        made.append(lib_ranks.Ranks(n, {"DCPD_URL": f"unix://{own.socket}", "TEST_NO_MESHES": "1"}, forks))
        return made[-1]

    yield make
    for p in made:
        p.close()


def target(own, way):
    return str(own.storages["main"] / "a") if way == "drop-in" else "main:a"


def there(own, world):
    return load(own.storages["main"] / "a", world, 40 << 18)


def dropped(own):
    """As many rings did not wait for their leases."""
    for line in own.api.get("/metrics").body.decode().splitlines():
        if line.startswith("dcpd_rings_dropped_total"):
            return float(line.split()[-1])
    return 0


def failed(own):
    found = [j for j in own.api.get("/v1/jobs?page_size=1000").ok(200)["jobs"] if j["state"] == "failed"]
    return [(j["error"]["code"], j["error"]["detail"]) for j in found]


def nothing_stays(own, segments=()):
    lib.wait_for(lambda: not own.staging(), 30, "places and staging are gone")
    lib.wait_for(lambda: not [s for s in segments if os.path.exists("/dev/shm" + s)], 30, "rings are gone")
    lib.wait_for(lambda: not own.leaks(), 30, "nobody holds them")


@pytest.mark.long
@WAYS
@pytest.mark.parametrize("what", ["killed", "shrunk"])
def test_a_trainer_dies_in_mid_save(own, pool, way, what):
    """Whoever shrinks a ring dies of it, too."""
    ranks = pool(1)
    (rings,) = ranks(on_streaming.strikes_ring, target(own, way), 1, "")
    assert rings and there(own, 1) == 1
    (end,) = ranks(on_streaming.strikes_ring, target(own, way), 2, what, check=False)
    assert isinstance(end, lib_ranks.Ended), end
    nothing_stays(own, rings)
    assert dropped(own) == 1
    lib.wait_for(lambda: failed(own), 30, "the job fails")
    ((code, why),) = failed(own)
    assert (code == "not_sealed" and "process has ended" in why) or (what == "shrunk" and code == "segment_shrunk"), (code, why)
    assert there(own, 1) == 1


@pytest.mark.long
def test_a_rank_dies_when_others_have_written(own, pool):
    """Their parts are taken by no save: they stay as long as the ranks may yet save, and go with them."""
    ranks = pool(2)
    path = target(own, "drop-in")
    assert there_after(ranks, own, path) == 1
    got = ranks(on_streaming.strikes_ring, path, 2, "killed", 1, check=False)
    assert isinstance(got[1], lib_ranks.Ended) and isinstance(got[0], Exception), got
    assert there(own, 2) == 1
    ranks.close()
    nothing_stays(own)
    assert dropped(own) == 1 and there(own, 2) == 1


def there_after(ranks, own, path):
    ranks(on_streaming.strikes_ring, path, 1, "")
    return there(own, 2)


@WAYS
def test_a_trainer_that_dies_between_saves(own, pool, way):
    """Its warm ring does not wait for the lease either, and what it saved stays."""
    ranks = pool(1)
    (rings,) = ranks(on_streaming.strikes_ring, target(own, way), 1, "")
    assert all(os.path.exists("/dev/shm" + s) for s in rings)
    (end,) = ranks(on_streaming.dies_now, check=False)
    assert isinstance(end, lib_ranks.Ended), end
    nothing_stays(own, rings)
    assert dropped(own) == 1 and not failed(own) and there(own, 1) == 1


@pytest.mark.long
@WAYS
def test_a_trainer_that_writes_too_fast(own, pool, way):
    """The save fails and says so, and the next one is as good as ever."""
    ranks = pool(1)
    (error,) = ranks(on_streaming.strikes_ring, target(own, way), 1, "too fast", check=False)
    assert getattr(error, "code", "") == "format_image" or "format_image" in str(error) or "are said to be there" in str(error), error
    assert failed(own)[0][0] == "format_image"
    assert not (own.storages["main"] / "a").exists()
    ranks(on_streaming.strikes_ring, target(own, way), 2, "")
    assert there(own, 1) == 2


@pytest.mark.long
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_daemon_is_killed_under_the_drop_in(own, pool, world):
    """The save begins anew, from the tensors."""
    ranks = pool(world)
    path = target(own, "drop-in")
    ranks(on_streaming.strikes_ring, path, 1, "")
    with started_again(own) as pid:
        ranks(on_streaming.strikes_ring, path, 2, "killed", 0, pid)
    assert there(own, world) == 2
    ranks(on_streaming.strikes_ring, path, 3, "")
    assert there(own, world) == 3
    ranks.close()
    lib.wait_for(lambda: not [p for p in own.staging() if ".dcpd-hosts-" not in p], 30, "staging is gone")
