"""publish and subscribe: weights from ranks of one layout to ranks of another, with PyTorch as judge; and who dies when. The daemon's side:
tests/api/test_publish.py."""
import os
import signal
import threading

import pytest

import dcpd
import harness as lib

np = pytest.importorskip("numpy")


@pytest.fixture
def name():
    return lib.fresh("policy")


def weights(step):
    return {"a": np.arange(24, dtype=np.float32).reshape(6, 4) + step, "frozen": np.ones((64, 64), np.float32), "step": step}


def test_views_and_a_copy_in_place(at, name):
    pub = dcpd.publish(weights(1), name, version=1)
    mine = {"a": np.zeros((6, 4), np.float32), "frozen": np.zeros((64, 64), np.float32), "step": 0}
    with dcpd.subscribe(name, as_numpy=True, timeout=30) as sub, dcpd.subscribe(name, into=mine, timeout=30) as filled:
        for step in (1, 2, 5):
            if step > 1:
                dcpd.publish(weights(step), name, version=step)
            update = next(sub)
            assert update.version == step and np.array_equal(update["a"], weights(step)["a"]) and update["step"] == step
            assert filled.next(30).version == step and np.array_equal(mine["a"], weights(step)["a"]) and mine["step"] == step
            assert (update.changed_bytes, update.kept_bytes) == ((96, 16384) if step > 1 else (96 + 16384, 0))
        pub.wait(30, version=5)
        assert {s["subscription"]["applied"] for s in pub.subscribers()} == {5}
        with pytest.raises(dcpd.WaitTimeout):
            sub.next(0.2)
    assert pub.subscribers() == []
    with pytest.raises(dcpd.DcpdError) as e:
        dcpd.publish(weights(3), name, version=3)
    assert e.value.code == "generation_stale"
    assert dcpd.publish(weights(6), name).version == 6
    pub.delete()


def test_a_subscriber_picks_renames_and_casts(at, name):
    pub = dcpd.publish({"model": {"a": weights(1)["a"], "b": weights(2)["a"]}, "step": 1}, name, version=1)
    mine = {"a": np.zeros((6, 4), np.float32)}
    rules = {"include": ["model.*"], "rename": [(r"^model\.", "")]}
    with dcpd.subscribe(name, as_numpy=True, timeout=30, dtype=[("b", "float64")], **rules) as sub, \
         dcpd.subscribe(name, into=mine, exclude=["*.b"], timeout=30, **rules) as filled:
        update = next(sub)
        assert sorted(update) == ["a", "b"] and update["b"].dtype == np.float64 and np.array_equal(update["b"], weights(2)["a"])
        next(filled)
        assert np.array_equal(mine["a"], weights(1)["a"])
    pub.delete()


@pytest.mark.parametrize("key", ["include", "exclude", "rename", "dtype"])
def test_one_string_is_no_list_of_rules(at, name, key):
    """Its letters would be globs, one of them "*"."""
    with pytest.raises(TypeError, match=f"{key}: a list"):
        dcpd.subscribe(name, **{key: "model.*"})


@pytest.mark.parametrize("key, rules", [("include", ["b"]), ("exclude", ["frozen"]), ("rename", [("a", "c")]),
                                        ("dtype", [("a", "float64")])])
def test_a_rank_with_other_rules_is_no_rank_of_that_subscriber(at, name, key, rules):
    given = {"include": ["a", "frozen"], "rename": [("^a$", "a")], "dtype": [("a", "float32")]}
    ranks = {"name": f"{name}.tp", "world_size": 2}
    with dcpd.subscribe(name, rank=0, **ranks, **given):
        dcpd.subscribe(name, rank=1, **ranks, **given).close()
        with pytest.raises(dcpd.StateDictMismatch, match=f"{key}="):
            dcpd.subscribe(name, rank=1, **ranks, **{**given, key: rules})


def test_version_zero_is_one(at, name):
    pub = dcpd.publish(weights(0), name, version=0)
    with dcpd.subscribe(name, as_numpy=True, timeout=30) as sub:
        assert next(sub).version == 0
        pub.wait(5)
    pub.delete()


def test_all_that_does_not_fit_is_said_at_once(at, name):
    pub = dcpd.publish(weights(1), name)
    mine = {"a": np.zeros((6, 5), np.float32), "frozen": np.zeros((64, 64), np.int32), "other": np.zeros(3, np.float32)}
    with dcpd.subscribe(name, into=mine, timeout=30) as sub:
        with pytest.raises(dcpd.StateDictMismatch) as e:
            next(sub)
        for said in ("a: shape [6, 5] here, [6, 4]", "frozen: dtype int32 here, float32", "other: not in the version"):
            assert said in str(e.value)
        assert not mine["a"].any() and not mine["frozen"].any()
    with dcpd.subscribe(name, into={"other": np.zeros(3, np.float32)}, timeout=30) as sub, pytest.raises(dcpd.MissingKey):
        next(sub)
    pub.delete()


def test_two_processes_see_the_same_versions(at, name):
    """Ranks without torch.distributed: they meet by their name. None gets ahead of the other."""
    dcpd.publish({"w": np.arange(12, dtype=np.float32).reshape(4, 3)}, name, version=1)
    rules = [{"match": "w", "placements": ["Shard(0)"]}]
    both = [dcpd.subscribe(name, name=f"{name}.tp", rank=r, world_size=2, layout=rules, as_numpy=True, timeout=30) for r in (0, 1)]
    assert next(both[0])["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    dcpd.publish({"w": np.zeros((4, 3), np.float32)}, name, version=2)
    with pytest.raises(dcpd.WaitTimeout):
        both[0].next(0.3)
    assert next(both[1])["w"].tolist() == [[6, 7, 8], [9, 10, 11]] and both[1].version == 1
    assert [next(s).version for s in both] == [2, 2]
    for s in reversed(both):
        s.close()


def test_daemon_killed_while_a_subscriber_waits(own, name):
    d = own()
    dcpd.publish(weights(1), name, version=1)
    sub = dcpd.subscribe(name, as_numpy=True)
    assert next(sub).version == 1
    got = []
    waiting = threading.Thread(target=lambda: got.append(sub.next(60).version))
    waiting.start()
    d.kill()
    d.start()
    dcpd.publish(weights(2), name, version=2)
    waiting.join(60)
    assert got == [2]
    sub.close()


KILLED = """
import os, signal, sys
import numpy as np
import dcpd
from dcpd import client
what, name = sys.argv[1:]
if what == "publisher":
    dcpd.publish({"a": np.zeros(4, np.float32)}, name, version=1)
    client.StateDicts.seal = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
    dcpd.publish({"a": np.ones(4, np.float32)}, name, version=2)
else:
    sub = dcpd.subscribe(name, as_numpy=True, timeout=30, lease_seconds=1)
    next(sub)
    print("has it", flush=True)
    sub.next(30)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_publisher_killed_in_the_middle(at, name, script):
    p = script(KILLED, "publisher", name, check=False)
    assert p.returncode == -signal.SIGKILL, p.stderr
    with dcpd.subscribe(name, as_numpy=True, timeout=30) as sub:
        assert next(sub).version == 1
        pub = dcpd.publish({"a": np.full(4, 3, np.float32)}, name)
        assert pub.version == 2 and next(sub)["a"].tolist() == [3] * 4
    pub.delete()


def test_subscriber_killed_in_the_middle(at, name, script):
    pub = dcpd.publish(weights(1), name, version=1)
    p = script(KILLED, "subscriber", name, check=False, wait=False)
    assert p.stdout.readline() == "has it\n"
    dcpd.publish(weights(2), name, version=2)
    assert p.wait(60) == -signal.SIGKILL
    p.communicate()
    lib.wait_for(lambda: pub.subscribers() == [], 20)
    with dcpd.subscribe(name, as_numpy=True, timeout=30) as sub:
        assert next(sub).version == 2
    pub.delete()


def test_another_layout_and_world_over_torch(at, ranks, name):
    """TP 1 to 2, and 2 to 1, bit for bit as distribute_tensor cuts it."""
    import on_ranks

    assert ranks(on_ranks.publish_and_serve, name + "-up", 1, 2, world=2) == ["same"] * 2
    assert ranks(on_ranks.publish_and_serve, name + "-down", 2, 1, world=2) == ["same"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")
def test_another_user_must_be_a_reader(at, name):
    dcpd.publish(weights(1), name, version=1, readers=[1])
    assert dcpd.connect().publications.get(name)["publish"] == {"readers": [1]}
    dcpd.connect().state_dicts.delete(name)
