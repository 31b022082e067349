"""Several ranks of torch.distributed: every layout there and back, and what happens when ranks do not agree."""
import harness as lib
import on_places
import on_ranks
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import dcpd

FOUR = {
    "rows": ((8, 3), (4,), [Shard(0)]), "uneven": ((5, 3), (4,), [Shard(0)]), "few": ((2, 3), (4,), [Shard(0)]),
    "cols": ((3, 8), (4,), [Shard(1)]), "rep": ((4, 4), (4,), [Replicate()]), "hsdp": ((6, 5), (2, 2), [Replicate(), Shard(0)]),
    "two": ((5, 7), (2, 2), [Shard(0), Shard(1)]), "twice": ((7, 2), (2, 2), [Shard(0), Shard(0)]), "one_d": ((9,), (4,), [Shard(-1)]),
    "none": ((0, 3), (4,), [Shard(0)]), "scalar": ((), (4,), [Replicate()]),
}
TWO = {k: (s, (2,), [Shard(0) if s else Replicate()]) for k, (s, _, _) in FOUR.items()}
TWO["rows"] = ((8, 3), (2,), [Shard(1)])


@pytest.mark.parametrize("spec", sorted(FOUR))
def test_boxes_are_those_of_pytorch(ranks, spec):
    shape, mesh, placements = FOUR[spec]
    got = ranks(on_ranks.boxes_of, shape, mesh, placements)
    assert all(a == b for a, b in got), got


def test_layouts_there_and_back(ranks, d):
    ref = f"main:{lib.fresh()}"
    assert ranks(on_ranks.save_tensors, ref, FOUR) == [("succeeded", [])] * 4
    ranks(on_ranks.load_tensors, ref, FOUR)
    ranks(on_ranks.load_tensors, ref, TWO, world=2)
    assert ranks(on_ranks.load_whole, ref, FOUR)[0] == sorted([*FOUR, "plain", "value"])
    ranks(on_ranks.pytorch_load, str(d.storages["main"] / ref[5:]), TWO, world=2)


def test_what_pytorch_wrote(ranks, d):
    name = lib.fresh()
    ranks(on_ranks.pytorch_save, str(d.storages["main"] / name), FOUR)
    ranks(on_ranks.load_tensors, f"main:{name}", TWO, world=2)
    ranks(on_ranks.load_tensors, f"main:{name}", FOUR)


@pytest.mark.parametrize("rows", [8, 7, 5, 3])
def test_strided_shards(ranks, d, rows):
    ref = f"main:{lib.fresh()}"
    assert ranks(on_ranks.strided, ref, rows, True) == ["succeeded"] * 4
    got = dcpd.load(ref, client=dcpd.connect(f"unix://{d.socket}"))
    assert torch.equal(got["t"], on_ranks.whole((rows, 3)))
    ranks(on_ranks.strided, ref, rows, False)


def test_strided_shards_with_gaps(ranks, d):
    ref = f"main:{lib.fresh()}"
    assert ranks(on_ranks.gaps, ref, True) == ["succeeded"] * 4
    assert torch.equal(dcpd.load(ref, client=dcpd.connect(f"unix://{d.socket}"))["t"], on_ranks.whole((16, 2)))
    ranks(on_ranks.gaps, ref, False)


def test_sharded_tensors(ranks):
    ref = f"main:{lib.fresh()}"
    assert ranks(on_ranks.sharded_tensors, ref, True) == ["succeeded"] * 4
    ranks(on_ranks.sharded_tensors, ref, False)


@pytest.mark.parametrize("kind, mesh", [("fsdp2", (4,)), ("fsdp2", (2, 2)), ("fsdp1", (4,))])
def test_fsdp_model_and_optimizer(ranks, kind, mesh):
    ref = f"main:{lib.fresh()}"
    saved = ranks(on_ranks.fsdp_save, ref, kind, mesh)
    assert {s for s, _ in saved} == {"succeeded"}
    want = saved[0][1]
    assert any("exp_avg" in k for k in want) and any(k.startswith("model.") for k in want)
    for got in ranks(on_ranks.fsdp_load, ref, kind, mesh):
        assert got == want
    if kind == "fsdp2":
        for got in ranks(on_ranks.fsdp_load, ref, "fsdp2", (2,), world=2):
            assert got == want


def test_ranks_that_do_not_agree(ranks, d):
    ref = f"main:{lib.fresh()}"
    same = [{"x": 1}] * 4
    for e in ranks(on_ranks.save_each, [ref, ref, ref + "b", ref], same, check=False):
        assert isinstance(e, dcpd.RanksDisagree) and ref + "b" in str(e) and e.rank == 2
    steps = [{"step": 1}, {"step": 1}, {"step": 1}, {"step": 2}]
    for e in ranks(on_ranks.save_each, [ref] * 4, same, steps, check=False):
        assert isinstance(e, dcpd.RanksDisagree) and "step" in str(e) and e.rank == 3
    # a fault on one rank is raised on all
    got = ranks(on_ranks.save_each, [ref] * 4, [{"x": 1}, {"x": 1}, "lambda", {"x": 1}], check=False)
    assert all(isinstance(e, dcpd.StateDictMismatch) and e.fqn == "bad" for e in got) and "rank 2" in str(got[0])
    for e in ranks(on_ranks.save_each, ["nowhere:x"] * 4, same, check=False):
        assert isinstance(e, dcpd.DcpdError) and "nowhere" in str(e)
    # and the group goes on
    assert ranks(on_ranks.save_each, [ref] * 4, same) == ["succeeded"] * 4
    for e in ranks(on_ranks.save_each, [ref] * 4, same, check=False):
        assert isinstance(e, dcpd.CheckpointExists)


def test_ranks_with_different_structures(ranks, d):
    """Keys of their own are fine; one FQN with two shapes is not."""
    ref = f"main:{lib.fresh()}"
    mine = [{"all": torch.ones(2), f"only{r}": torch.full((2,), float(r))} for r in range(4)]
    assert ranks(on_ranks.save_each, [ref] * 4, mine) == ["succeeded"] * 4
    got = dcpd.load(ref, client=dcpd.connect(f"unix://{d.socket}"))
    assert got["only3"].tolist() == [3, 3] and len(got) == 5
    bad = [{"t": torch.ones(2)}] * 3 + [{"t": torch.ones(3)}]
    for e in ranks(on_ranks.save_each, [ref + "x"] * 4, bad, check=False):
        assert isinstance(e, dcpd.DcpdError) and "t" in str(e) and e.job, repr(e)
    for e in ranks(on_ranks.load_each, [ref] * 4, [{"all": 2}, {"all": 2, "nope": 1}, {"all": 2}, {"only1": 2}], check=False):
        assert isinstance(e, dcpd.MissingKey) and "nope" in str(e)
    assert ranks(on_ranks.load_each, [ref] * 4, [{"all": 2}, {"only0": 2}, {"only2": 2}, {"only1": 2}]) == [
        {"all": 2.0}, {"only0": 0.0}, {"only2": 4.0}, {"only1": 2.0}]


def test_no_dist(ranks):
    assert ranks(on_ranks.alone, f"main:{lib.fresh()}") == [(r, [r] * 3) for r in range(4)]


def test_under_another_default_device(ranks, d):
    """Models are often made under torch.device("meta"): what is ours stays on the CPU, whatever the default."""
    ref = f"main:{lib.fresh()}"
    assert ranks(on_ranks.default_device, ref, str(d.storages["main"] / f"{ref[5:]}-dcp"), world=2) == [True] * 2


def test_more_saves_than_slots(ranks, d):
    ref = f"main:{lib.fresh()}"
    assert ranks(on_ranks.many_steps, ref, 6, world=2) == [["succeeded"] * 6] * 2
    c = dcpd.connect(f"unix://{d.socket}")
    for i in range(6):
        got = dcpd.load(f"{ref}-{i}", client=c)
        assert got["step"] == i and got["t1"].eq(1 + 10 * i).all() and got["t0"].eq(10 * i).all()


def test_a_save_too_many_can_fail(ranks):
    ref = f"main:{lib.fresh()}"
    got = ranks(on_ranks.busy, ref, "fail", world=2, check=False)
    assert all(isinstance(e, dcpd.SlotsBusy) for e in got), got
    assert ranks(on_ranks.busy, ref + "w", "wait", world=2) == [["succeeded"] * 2] * 2


def test_several_hosts_are_named_at_once(ranks):
    env = {"DCPD_PLACE": ["host-a", "host-a", "host-b", "host-a"]}
    for e in ranks(on_ranks.save_each, [f"main:{lib.fresh()}"] * 4, [{"x": 1}] * 4, env=env, check=False):
        assert isinstance(e, dcpd.SeveralHosts) and "host-b" in str(e) and "host-a" in str(e)


HOSTS = {"DCPD_PLACE": ["host-a", "host-b"]}


@pytest.fixture
def run(ranks):
    """A run with the steps 1 and 2."""
    name = f"main:{lib.fresh()}"
    ranks(on_places.steps, name, world=2)
    return name


@pytest.mark.parametrize("into", [False, True])
def test_an_alias_is_one_checkpoint_for_all_hosts(ranks, run, tmp_path, into):
    got = ranks(on_places.by_alias, run, into, str(tmp_path / "asked"), world=2, env=HOSTS)
    assert got == [[1.0] * 4] * 2


def test_daemons_of_several_clusters_spread_nothing(ranks, run):
    assert ranks(on_places.of_several_clusters, f"{run}/step-1", None, world=2, env=HOSTS) == [[1.0] * 4] * 2
    got = ranks(on_places.of_several_clusters, f"{run}/step-1", True, world=2, env=HOSTS)
    assert all("nodes of one cluster" in x for x in got), got


def test_workers_on_loopback_spread_nothing(ranks, run):
    assert ranks(on_places.out_of_reach, f"{run}/step-1", world=2, env=HOSTS) == [[1.0] * 4] * 2


def test_hosts_that_disagree_about_spreading(ranks, run):
    assert ranks(on_places.differing, f"{run}/step-1", world=2, env=HOSTS) == [1, 0]


def test_a_load_that_must_be_spread_says_what_else_fails(ranks, tmp_path):
    assert ranks(on_places.nowhere, str(tmp_path / "none" / "step"), world=2, env=HOSTS) == ["NotFound"] * 2
