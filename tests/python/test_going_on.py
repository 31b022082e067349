"""dcpd.resume: training loops that go on from what can be loaded."""
import os
import shutil
import warnings

import harness as lib
import on_ranks
import pytest
import torch
from lib_direct import item
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import dcpd
from dcpd.torch import StorageReader, StorageWriter


def rot(d, ref, fqn="w"):
    """A flipped bit that nobody has seen yet."""
    file, offset = item(d, ref, fqn)
    path = d.storages["main"] / ref[5:] / file
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)
        f.seek(offset)
        f.write(bytes([byte[0] ^ 1]))


def save(ref, value, step, size=1 << 18):
    dcpd.save({"w": torch.full((size,), float(value)), "step": step}, ref)


def age(d, ref, when):
    for p in (d.storages["main"] / ref[5:]).iterdir():
        os.utime(p, (1, when))


def test_a_loop(at):
    """First start, a crash, a newest that is damaged, and one whose bytes nobody has looked at."""
    run = f"main:resume/{lib.fresh()}"
    state = {"w": torch.zeros(1 << 18), "step": 0}
    r = dcpd.resume(run, into=state)
    assert r is None and (r.step + 1 if r else 0) == 0
    for step in (10, 20, 30):
        save(f"{run}/step-{step}", step, step)
        age(at, f"{run}/step-{step}", 1000 + step)
    r = dcpd.resume(run, into=state)
    assert r.checkpoint == f"{run}/step-30" and r.step == 30 and r.attempts == 1 and r.skipped == [] and (state["w"] == 30).all()
    dcpd.close()
    rot(at, f"{run}/step-30")
    state["w"].zero_()
    r = dcpd.resume(run, into=state)
    assert r.step == 20 and (state["w"] == 20).all() and state["step"] == 20
    assert [s["name"] for s in r.skipped] == [f"{run[5:]}/step-30"] and "w: bytes" in r.skipped[0]["why"]
    assert dcpd.resume(run, look=True).step in (20, 30)  # a direct read tells nobody what it found
    rot(at, f"{run}/step-20")
    rot(at, f"{run}/step-10")
    with pytest.raises(dcpd.NothingToResume) as e:
        dcpd.resume(run, into=state)
    assert len(e.value.skipped) == 3 and "step-10" in str(e.value)
    assert run[5:] in [r["run"] for r in dcpd.runs("main")]


def test_attempts(at):
    run = f"main:resume/{lib.fresh()}"
    for step in (1, 2):
        save(f"{run}/step-{step}", step, step)
        age(at, f"{run}/step-{step}", 1000 + step)
    assert [dcpd.resume(run, attempts_max=2).step for _ in range(4)] == [2, 2, 1, 1]
    with pytest.raises(dcpd.NothingToResume, match="tried 2 times"):
        dcpd.resume(run, attempts_max=2)
    assert dcpd.resume(run, attempts_max=0).attempts == 3


def test_keep_and_hold(at):
    run = f"main:resume/{lib.fresh()}"
    dcpd.save({"w": torch.ones(4)}, f"{run}/step-1", keep="best", hold="the paper's weights", metrics={"loss": 0.5})
    dcpd.async_save({"w": torch.zeros(4)}, f"{run}/step-2", keep="last-good").result()
    with dcpd.connect() as client:
        aliases = client.runs.get(run)["aliases"]
        assert (aliases["best"], aliases["last-good"]) == (f"{run[5:]}/step-1", f"{run[5:]}/step-2")
        one = client.checkpoints.get(f"{run}@best")
    assert one["hold"]["reason"] == "the paper's weights" and one["metrics"] == {"loss": 0.5}
    with pytest.raises(dcpd.CheckpointHeld):
        dcpd.save({"w": torch.zeros(4)}, f"{run}/step-1", overwrite=True)
    with dcpd.connect() as client:
        client.checkpoints.unhold(f"{run}/step-1")


def test_keep_and_hold_by_the_drop_in(at):
    run = f"main:resume/{lib.fresh()}"
    torch.distributed.checkpoint.save({"w": torch.ones(4)}, no_dist=True, storage_writer=StorageWriter(
        f"{run}/step-1", metrics={"loss": 0.25}, keep="best", hold="good"))
    with dcpd.connect() as client:
        one = client.checkpoints.get(f"{run}@best")
        assert one["name"] == f"{run[5:]}/step-1" and one["hold"]["reason"] == "good" and one["metrics"] == {"loss": 0.25}
        client.checkpoints.unhold(f"{run}/step-1")


def test_an_alias_of_names_of_one_component(at):
    dcpd.save({"w": torch.full((4,), 7.0)}, f"main:{lib.fresh()}", keep="chosen")
    dcpd.save({"w": torch.zeros(4)}, f"main:{lib.fresh()}")
    into = {"w": torch.zeros(4)}
    torch.distributed.checkpoint.load(into, no_dist=True, storage_reader=StorageReader("main:-@chosen"))
    assert into["w"].tolist() == [7] * 4 == dcpd.load("main:-@chosen")["w"].tolist()
    with pytest.raises(dcpd.RequestRefused, match="begins with '-'"):
        dcpd.save({"w": torch.zeros(4)}, "main:-@chosen", overwrite=True)


def test_wrong_names_are_no_first_start(at):
    with pytest.raises(dcpd.NotFound, match="nowhere"):
        dcpd.resume("nowhere:run1")
    with pytest.raises(dcpd.RequestRefused):
        dcpd.resume("main:../x")


def test_paths(at, tmp_path):
    under, outside = at.storages["main"] / "resume" / lib.fresh(), tmp_path / "run"
    for folder in (under, outside):
        assert dcpd.resume(folder) is None
        dcpd.save({"w": torch.ones(4)}, folder / "step-3")
        state = {"w": torch.zeros(4)}
        r = dcpd.resume(folder, into=state)
        assert r.checkpoint == str(folder / "step-3") and r.step == 3 and (state["w"] == 1).all()
    shutil.rmtree(under)


def trained(steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ["names", "numbers", "pytorch"])
def test_lazy_optimizers(at, form):
    """State wholly absent loads; state of a part of the parameters is skipped, in whatever form it was saved."""
    run = f"main:resume/{lib.fresh()}"

    def put(step, drop):
        model, optimizer = trained(1)
        if form == "numbers":
            optim = optimizer.state_dict()
        else:
            optim = get_optimizer_state_dict(model, optimizer)
        optim["state"] = {k: v for i, (k, v) in enumerate(optim["state"].items()) if i not in drop}
        state = {"model": model.state_dict(), "optim": optim}
        if form == "pytorch":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.distributed.checkpoint.save(state, checkpoint_id=at.storages["main"] / run[5:] / f"step-{step}", no_dist=True)
        else:
            dcpd.save(state, f"{run}/step-{step}")
        age(at, f"{run}/step-{step}", 1000 + step)

    put(1, drop=range(4))
    assert dcpd.resume(run, look=True).step == 1
    put(2, drop=())
    assert dcpd.resume(run, look=True).step == 2
    put(3, drop=(2,))
    r = dcpd.resume(run, look=True)
    assert r.step == 2 and ("'2'" if form == "numbers" else "'1.weight'") in r.skipped[0]["why"], r
    assert dcpd.resume(run, look=True, optimizer="any").step == 3


def test_ranks(ranks, at):
    """All ranks go on from the same, and leave what is damaged together."""
    run = f"main:resume/{lib.fresh()}"
    assert ranks(on_ranks.resume, run, world=2) == [None, None]
    for step in (1, 2):
        dcpd.save({"w": torch.full((8, 4), float(step)), "step": step}, f"{run}/step-{step}")
        age(at, f"{run}/step-{step}", 1000 + step)
    dcpd.close()
    assert ranks(on_ranks.resume, run, world=2) == [((f"{run}/step-2", 2), [], [2.0], 2)] * 2
    rot(at, f"{run}/step-2")
    assert ranks(on_ranks.resume, run, world=2) == [((f"{run}/step-1", 1), [f"{run[5:]}/step-2"], [1.0], 1)] * 2


def test_the_readme(at):
    """Its loop, in two parts, ends where the same loop ends in one: AdamW's state is taken along."""
    code = (lib.ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("% 100", "% 5")

    def run(name, last):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def train(model, optimizer):
            model(torch.ones(2, 4)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        there = {"model": model, "optimizer": optimizer, "train": train}
        exec(code.replace("1001", str(last + 1)).replace("main:run1", name), there)  # noqa: S102
        return model, optimizer, there["r"]

    name = f"main:readme/{lib.fresh()}"
    assert run(name, 10)[2] is None
    model, optimizer, r = run(name, 20)
    whole, same, _ = run(f"{name}-whole", 20)
    assert r.step == 10 and optimizer.state_dict()["state"][0]["step"] == 20
    assert torch.equal(model.weight, whole.weight)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg_sq"], same.state_dict()["state"][0]["exp_avg_sq"])
