"""Faults of several ranks: one of them dies, the others get an error, and can go on without it. Groups shrink from 4 ranks to 2."""
import contextlib
import threading

import harness as lib
import lib_ranks
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpd

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


@pytest.fixture
def own(spawn):
    return spawn()


@pytest.fixture
def mortal(own, forks):
    """Ranks of this test's own."""
    pool = lib_ranks.Ranks(4, {"DCPD_URL": f"unix://{own.socket}", "TEST_NO_MESHES": "1"}, forks)
    yield pool
    pool.close()


@contextlib.contextmanager
def started_again(d):
    """Whoever kills the daemon."""
    def watch():
        d.proc.wait()
        d.start()

    t = threading.Thread(target=watch)
    t.start()
    yield d.proc.pid
    t.join(40)
    assert not t.is_alive(), "nobody killed it"


def free(d, name):
    """No slot is held."""
    record = d.api.get(f"/v1/state-dicts/{name}")
    return record.status == 404 or all(s["state"] == "free" for r in record.ok(200)["ranks"] for s in r["slots"])


def load(path, world, size=1 << 16):
    """x of on_faults.state(rank, x), or of on_streaming.plain_state(rank, x), the same in all that is there. size: of a rank's tensor."""
    sd = {f"t{r}": torch.zeros(size) for r in range(world)}
    sd.update(all=torch.zeros(1000), v={"x": 0})
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    x = sd["v"]["x"]
    assert all(t.eq(x).all() for t in sd.values() if isinstance(t, torch.Tensor)), "a mix"
    return x


def one_dies(pool, world, victim, function, *args):
    got = pool(function, *args, world=world, check=False, seconds=60)
    assert isinstance(got[victim], lib_ranks.Ended), got
    for r, e in enumerate(got):
        assert r == victim or (isinstance(e, BaseException) and not isinstance(e, lib_ranks.Ended)), (r, e)
    return [e for r, e in enumerate(got) if r != victim]


def settled(d, pool):
    pool.close()
    lib.wait_for(lambda: all(free(d, name) for name in lib.ours(d)), 20, "the state dicts of the dead")
    d.drop(*lib.ours(d))  # what they had saved could be loaded from memory
    lib.wait_for(lambda: not d.leaks(), 5, "nothing left")


@pytest.mark.long
def test_ranks_die_one_by_one(mortal, own):
    """One in its copy, one of the drop-in's that has written, and rank 0 when all have sealed: then the job goes on, and the other rank
    waits for it. What was there before stays, and those that are left go on, into the same path. The daemon dies too."""
    path, ref = own.storages["main"] / "a", "main:a"
    with started_again(own) as pid:
        mortal(on_ranks.save_with_a_death, ref, 1, None, pid)
    assert load(path, 4) == 1
    with started_again(own) as pid:
        mortal(on_ranks.dropin_with_a_death, str(path), 2, None, pid, "async")
    assert load(path, 4) == 2
    errors = one_dies(mortal, 4, 3, on_ranks.save_with_a_death, ref, 3, 3, "copy")
    assert all(isinstance(e, dcpd.RankFailed) and "broken" in str(e) for e in errors), errors
    assert load(path, 4) == 2
    mortal(on_ranks.dropin_with_a_death, str(path), 4, world=3)
    one_dies(mortal, 3, 2, on_ranks.dropin_with_a_death, str(path), 5, 2, "written", "async")
    assert load(path, 3) == 4
    mortal(on_ranks.save_with_a_death, ref, 6, world=2)
    assert load(path, 2) == 6
    dead, other = mortal(on_ranks.save_with_a_death, ref, 7, 0, "submit", world=2, check=False, seconds=60)
    assert isinstance(dead, lib_ranks.Ended) and other == "succeeded"
    assert load(path, 2) == 7
    settled(own, mortal)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "async"])
def test_a_rank_dies_in_the_drop_in(mortal, own, how):
    """In the copy, after it, and the coordinator in finish: the old checkpoint stays, and the next save into the same path works."""
    path = own.storages["main"] / "a"
    mortal(on_ranks.dropin_with_a_death, str(path), 1)
    x = 1
    for world, where in ((4, "copy"), (3, "written")):
        one_dies(mortal, world, world - 1, on_ranks.dropin_with_a_death, str(path), x + 1, world - 1, where, how)
        assert load(path, world) == x
        x += 2
        mortal(on_ranks.dropin_with_a_death, str(path), x, None, "", how, world=world - 1)
        assert load(path, world - 1) == x
    one_dies(mortal, 2, 0, on_ranks.dropin_with_a_death, str(path), x + 1, 0, "finish", how)
    assert load(path, 2) == x
    settled(own, mortal)


@pytest.mark.slow
def test_a_rank_dies_in_a_save(mortal, own):
    path, ref = own.storages["main"] / "a", "main:a"
    mortal(on_ranks.save_with_a_death, ref, 1)
    x = 1
    for world, where in ((4, "copy"), (3, "sealed")):
        one_dies(mortal, world, world - 1, on_ranks.save_with_a_death, ref, x + 1, world - 1, where)
        assert load(path, world) in (x, x + 1 if where == "sealed" else x), "what all have sealed may be there before the others notice"
        x += 2
        mortal(on_ranks.save_with_a_death, ref, x, world=world - 1)
        assert load(path, world - 1) == x
    lib.wait_for(lambda: len(lib.ours(own)) == 1, 20, "the state dicts of groups that broke")
    settled(own, mortal)
