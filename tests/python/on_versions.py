"""Run under an older PyTorch: `on_versions.py DIRECTORY`. Both halves of the drop-in beside that version's own, and what 2.15 wrote."""
import inspect
import os
import subprocess
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from dcpd.torch import StorageReader, StorageWriter, install, uninstall

warnings.simplefilter("ignore")
ALONE = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 400, generator=g), "z": torch.tensor(seed + 3.5), "bf": torch.randn(5, 3, generator=g).bfloat16(),
            "t": torch.randn(40, 30, generator=g).t(), "sub": {"lr": 0.1 + seed, "list": [seed, torch.arange(5) + seed]}}


def check(reader=None, **kw):
    new, want = state(1), state()
    dcp.load(new, storage_reader=reader, **ALONE, **kw)
    for k in ("w", "z", "bf", "t"):
        assert torch.equal(new[k], want[k]), (torch.__version__, k)
    assert torch.equal(new["sub"]["list"][1], torch.arange(5))
    assert new["sub"]["lr"] == 0.1 or torch.__version__.startswith("2.3.")  # whose load() leaves values in nested dicts alone


class Planner(dcp.DefaultSavePlanner):
    """With something of its own in the metadata."""

    def create_global_plan(self, plans):
        plans, md = super().create_global_plan(plans)
        md.mine = {"k": [1]}
        return plans, md


def arguments(mine):
    """Each of those that this version has."""
    known = inspect.signature(dcp.FileSystemWriter.__init__).parameters
    dcp.save(state(), storage_writer=StorageWriter(mine + "-threads", thread_count=3), planner=Planner(), **ALONE)
    check(dcp.FileSystemReader(mine + "-threads"))
    assert sorted(n for n in os.listdir(mine + "-threads") if n[0] != ".") == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    assert dcp.FileSystemReader(mine + "-threads").read_metadata().mine == {"k": [1]}
    dcp.save(state(), storage_writer=StorageWriter(mine + "-files", single_file_per_rank=False, sync_files=False), **ALONE)
    check(dcp.FileSystemReader(mine + "-files"))
    if "overwrite" in known:
        try:
            dcp.save(state(2), storage_writer=StorageWriter(mine + "-files", overwrite=False), **ALONE)
            raise SystemExit("it was overwritten")
        except dcp.CheckpointException as e:
            assert "Checkpoint already exists" in str(e)
    if "_extensions" in known:
        from torch.distributed.checkpoint._extension import ZStandard

        try:
            import zstandard  # noqa: F401
        except ImportError:
            return
        dcp.save(state(), storage_writer=StorageWriter(mine + "-zstd", _extensions=[ZStandard()]), **ALONE)
        check(dcp.FileSystemReader(mine + "-zstd"))
        check(StorageReader(mine + "-zstd"))


def asynchronous(mine):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{mine}.store", rank=0, world_size=1)
    sd = state()
    f = dcp.async_save(sd, storage_writer=StorageWriter(mine + "-async"))
    if hasattr(dcp.storage, "StorageMeta"):  # 2.3 has no stagers, and does not copy what is on the CPU
        sd["w"].zero_()
    f.result(120)
    check(dcp.FileSystemReader(mine + "-async"))
    if "use_collectives" in inspect.signature(dcp.save).parameters:
        dcp.save(state(), storage_writer=StorageWriter(mine + "-local"), use_collectives=False)
        assert "__0.metadata" in os.listdir(mine + "-local")
        check(StorageReader(mine + "-local"))
        check(dcp.FileSystemReader(mine + "-local"))


def identity(mine):
    """What a save leaves in its metadata, and what the reader makes of it."""
    w = StorageWriter(mine + "-id")
    dcp.save(state(), storage_writer=w, **ALONE)
    for name, reader in (("theirs", dcp.FileSystemReader), ("ours", StorageReader), ("newest", dcp.FileSystemReader)):
        if name != "newest" and not hasattr(dcp.metadata, "StorageMeta"):
            continue  # 2.3
        md = reader(mine + "-id" if name != "newest" else os.path.join(os.path.dirname(mine), "newest")).read_metadata()
        assert md.storage_meta.save_id and (name == "newest" or md.storage_meta.save_id == w.save_id)
        assert isinstance(md.storage_meta, getattr(dcp.metadata, "StorageMeta", object)), type(md.storage_meta)
    assert isinstance(w, dcp.FileSystemWriter)


def rank_of_two(mine, rank):
    """Both at once: DTensors cut by rows, then by columns; in inference mode; and what ranks tell each other in one go, and in two."""
    import dcpd
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:
        from torch.distributed._tensor import Shard, distribute_tensor
    dist.init_process_group("gloo", init_method=f"file://{mine}.two", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = {f"layer.{i}.{'x' * 60}": torch.arange(30_000.).view(300, 100) + i for i in range(100)}

    def cut(dim, by=1.0):
        return {"m": {k: distribute_tensor(v * by, mesh, [Shard(dim)]) for k, v in full.items()}, "lr": by,
                "t": next(iter(full.values())).t() * by}

    def same(sd, by=1.0):
        assert sd["lr"] == by and all(torch.equal(sd["m"][k].full_tensor(), v * by) for k, v in full.items())
        assert torch.equal(sd["t"], next(iter(full.values())).t() * by)

    source, target, columns = cut(0), cut(0, 0.0), cut(1, 0.0)
    with torch.inference_mode():
        futures = [dcpd.async_save(source, f"{mine}-two-{i}", step=i) for i in range(3)]
        [f.result(120) for f in futures]
        dcpd.load(f"{mine}-two-0", into=target)
    same(target)
    dcpd.load(f"{mine}-two-2", into=columns)
    same(columns)
    keys = [f"m.{k}" for k in full]
    assert dcpd.load(f"{mine}-two-1", keys=keys)["m"].keys() == full.keys()
    try:
        dcpd.save(source, f"{mine}-of-{rank}")
        raise SystemExit("ranks that save to different targets")
    except dcpd.RanksDisagree:
        pass
    dcpd.save(cut(1, 2.0), f"{mine}-two-columns")
    for reader in (dcp.FileSystemReader, StorageReader):
        target = {k: v for k, v in cut(0, 0.0).items() if k != "lr"}
        dcp.load(target, storage_reader=reader(mine + "-two-columns"))
        same({**target, "lr": 2.0}, 2.0)
    dcp.save(source, storage_writer=StorageWriter(mine + "-two-dropin"))
    target = cut(1, 0.0)
    dcpd.load(mine + "-two-dropin", into=target)
    same(target)
    dcpd.close()


def together(folder):
    ps = [subprocess.Popen([sys.executable, __file__, folder, str(rank)]) for rank in range(2)]
    assert [p.wait(240) for p in ps] == [0, 0]


def main(folder):
    import dcpd

    mine = os.path.join(folder, torch.__version__)
    dcp.save(state(), storage_writer=StorageWriter(mine + "-ours"), **ALONE)
    check(dcp.FileSystemReader(mine + "-ours"))
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(mine + "-theirs"), **ALONE)
    check(StorageReader(mine + "-theirs"))
    install()
    dcp.save(state(), checkpoint_id=mine + "-installed", **ALONE)
    check(checkpoint_id=mine + "-installed")
    uninstall()
    assert os.path.exists(mine + "-installed/.dcpd.json")
    for reader in (dcp.FileSystemReader, StorageReader):
        check(reader(os.path.join(folder, "newest")))
    arguments(mine)
    identity(mine)
    asynchronous(mine)
    dcpd.close()
    together(folder)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        rank_of_two(os.path.join(sys.argv[1], torch.__version__), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # a group's end may hang in 2.3, also with its own writer: a thread of gloo's wants the lock that is held there
