"""Incremental saves from Python: PyTorch reads each of them, in place and copied, and the shared files are the same inodes."""
import shutil

import clones
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpd
import harness as lib
from dcpd.torch import StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def state(seed):
    """The frozen part is the same for all."""
    frozen, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    return {"frozen": {f"w{i}": torch.randn(700, 900, generator=frozen) for i in range(4)},
            "lora": {"a": torch.randn(8, 900, generator=own), "b": torch.randn(700, 8, generator=own)},
            "big": torch.randn(600, 1000, generator=own), "step": seed, "lr": 0.1 * seed}


def read(path):
    """By PyTorch alone."""
    sd = state(77)
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return sd


def same(a, b):
    for k, x in a.items():
        if isinstance(x, dict):
            same(x, b[k])
        else:
            assert torch.equal(x, b[k]) if isinstance(x, torch.Tensor) else x == b[k], k


def shared(a, b):
    inodes = {p.stat().st_ino for p in a.glob("*.distcp")}
    return sum(p.stat().st_size for p in b.glob("*.distcp") if p.stat().st_ino in inodes)


def by_save(at, path, sd, **kw):
    return dcpd.save(sd, f"main:{path.relative_to(at.storages['main'])}", incremental=True, **kw)["result"]["bytes_shared"]


def by_async(at, path, sd, **kw):
    return dcpd.async_save(sd, str(path), incremental=True, **kw).result()["result"]["bytes_shared"]


def by_writer(at, path, sd, **kw):
    dcp.save(sd, storage_writer=StorageWriter(path, incremental=True, **kw), no_dist=True)
    name = str(path.relative_to(at.storages["main"]))
    jobs = [j for j in dcpd.connect().jobs.list() if j["kind"] == "save" and j["target"].get("name") == name]
    return max(jobs, key=lambda j: j["id"])["result"]["bytes_shared"]


@pytest.mark.short("by_save")
@pytest.mark.parametrize("way", [by_save, by_async, by_writer])
def test_pytorch_reads_what_shares(at, way):
    run = at.storages["main"] / lib.fresh()
    steps = [run / f"step-{i}" for i in range(1, 4)]
    assert way(at, steps[0], state(1)) == 0
    for i in (2, 3):
        frozen = 4 * 700 * 900 * 4
        assert frozen < way(at, steps[i - 1], state(i)) < frozen + (1 << 20)
        assert shared(steps[i - 2], steps[i - 1]) > frozen
    for i, step in enumerate(steps, 1):
        same(read(step), state(i))
    copied = run.parent / f"{run.name}-copied"
    shutil.copytree(steps[1], copied)
    shutil.rmtree(steps[0])
    shutil.rmtree(steps[1])
    same(read(copied), state(2))
    same(read(steps[2]), state(3))
    same(dcpd.load(str(steps[2])), state(3))


def test_pytorch_reads_clones(own, tmp_path):
    """A path under no root of the daemon's, saved to through a ring, without a word of increments."""
    with clones.mounted(tmp_path) as at:
        own()
        for i in (1, 2):
            job = dcpd.save(state(i), str(at / f"run/step-{i}"))
        assert job["result"]["bytes_shared"] >= 4 * 700 * 900 * 4 and not shared(at / "run/step-1", at / "run/step-2")
        shutil.rmtree(at / "run/step-1")
        same(read(at / "run/step-2"), state(2))
        dcpd.close()


def test_a_named_parent(at):
    run = at.storages["main"] / lib.fresh()
    by_save(at, run / "one", state(1))
    by_save(at, run / "two", {"other": torch.zeros(9)})
    assert by_save(at, run / "three", state(2), parent=f"main:{run.name}/one") > 4 * 700 * 900 * 4
    assert by_async(at, run / "four", state(3), parent=str(run / "one")) > 4 * 700 * 900 * 4
    same(read(run / "four"), state(3))


def test_materialise(at):
    run = at.storages["main"] / lib.fresh()
    by_save(at, run / "step-1", state(1))
    by_save(at, run / "step-2", state(2))
    assert dcpd.materialise(str(run / "step-2"))["bytes"] > 4 * 700 * 900 * 4
    assert not shared(run / "step-1", run / "step-2")
    same(read(run / "step-2"), state(2))


def test_saves_in_turns_replace_the_same_name(at):
    path = at.storages["main"] / lib.fresh() / "last"
    for i in (1, 2, 3):
        got = by_save(at, path, state(i), overwrite=True)
        assert (got > 4 * 700 * 900 * 4) == (i > 1)
        same(read(path), state(i))
