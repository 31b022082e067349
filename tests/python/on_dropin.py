"""What the tests of the drop-in run on each rank; see on_ranks.py, which has these too."""
import contextlib
import warnings

import torch

__all__ = ["dropin_save", "dropin_load", "dropin_from_memory", "dropin_fails", "dropin_rank_local", "dropin_coordinator",
           "dropin_cached_plans", "dropin_while_another_is_saved", "dropin_local_again", "dropin_refused", "dropin_unstaged",
           "dropin_from_each_hosts_mount"]


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def state(pg, specs):
    import on_ranks

    sd = {k: on_ranks.placed(pg, *s, seed=i) for i, (k, s) in enumerate(specs.items())}
    sd["plain"] = on_ranks.whole((3, 2), 99)
    sd["value"] = {"step": 7, "betas": (0.9, 0.99)}
    return {"m": sd}


def dropin_save(pg, rank, path, specs, kwargs=None, how="save"):
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    sd = state(pg, specs)
    with quiet():
        w = StorageWriter(path, **(kwargs or {}))
        if how == "save":
            dcp.save(sd, storage_writer=w, process_group=pg)
        else:
            f = dcp.async_save(sd, storage_writer=w, process_group=pg)
            for t in sd["m"].values():
                if isinstance(t, torch.Tensor):
                    t.zero_()
            f.result(60)
    return w.save_id


def dropin_load(pg, rank, path, specs):
    import on_ranks
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader

    sd = {k: on_ranks.distribute_tensor(torch.zeros(s[0]), on_ranks.mesh_of(pg, s[1]), s[2]) for k, s in specs.items()}
    sd["plain"] = torch.zeros(3, 2)
    sd["value"] = {"step": 0, "betas": ()}
    held = dict(sd)
    with quiet():
        dcp.load({"m": sd}, storage_reader=StorageReader(path), process_group=pg)
    for i, (k, s) in enumerate(specs.items()):
        want = on_ranks.distribute_tensor(on_ranks.whole(s[0], i), on_ranks.mesh_of(pg, s[1]), s[2])
        assert sd[k] is held[k] and torch.equal(sd[k].to_local(), want.to_local()), k
    assert torch.equal(sd["plain"], on_ranks.whole((3, 2), 99)) and sd["value"] == {"step": 7, "betas": (0.9, 0.99)}


def dropin_from_memory(pg, rank, path, specs):
    """Saves with async_save and loads; bytes of tensors that this rank read itself, and those of them that came from memory."""
    from dcpd import _direct

    dropin_save(pg, rank, path, specs, None, "async")
    least, before = _direct.AVERAGE_MIN, dict(_direct.counts)
    _direct.AVERAGE_MIN = 0
    try:
        dropin_load(pg, rank, path, specs)
    finally:
        _direct.AVERAGE_MIN = least
    return _direct.counts["bytes"] - before["bytes"], _direct.counts["memory"] - before["memory"]


def dropin_fails(pg, rank, path, where):
    """A planner that fails on rank 1; what each rank gets."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            if rank == 1 and where == "resolve":
                raise ValueError("no such data")
            return super().resolve_data(item)

        def create_local_plan(self):
            if rank == 1 and where == "plan":
                raise ValueError("no such plan")
            return super().create_local_plan()

    try:
        with quiet():
            dcp.save({f"t{rank}": torch.ones(5)}, storage_writer=StorageWriter(path), planner=Planner(), process_group=pg)
    except dcp.CheckpointException as e:
        return {r: str(x[0] if isinstance(x, tuple) else x) for r, x in e.failures.items()}
    return None


def dropin_rank_local(pg, rank, path, ours_write, ours_read):
    """Every rank writes and reads its own metadata."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader, StorageWriter

    sd = {"t": torch.full((1000,), float(rank)), "n": {"rank": rank}}
    new = {"t": torch.zeros(1000), "n": {"rank": -1}}
    with quiet():
        dcp.save(sd, storage_writer=(StorageWriter if ours_write else dcp.FileSystemWriter)(path), process_group=pg, use_collectives=False)
        torch.distributed.barrier(group=pg)
        dcp.load(new, storage_reader=(StorageReader if ours_read else dcp.FileSystemReader)(path), process_group=pg)
    return bool(torch.equal(new["t"], sd["t"])), new["n"]


def dropin_coordinator(pg, rank, path, coordinator):
    """finish() is called on the coordinator, whoever that is."""
    from dcpd.torch import StorageReader, StorageWriter
    from torch.distributed.checkpoint import load_state_dict, save_state_dict

    finished = []

    class Writer(StorageWriter):
        def finish(self, metadata, results):
            finished.append(rank)
            super().finish(metadata, results)

    new = {"t": torch.zeros(10), "own": {"rank": -1}}
    with quiet():
        save_state_dict({"t": torch.arange(10.0), "own": {"rank": 5}}, Writer(path), process_group=pg, coordinator_rank=coordinator)
        load_state_dict(new, StorageReader(path), process_group=pg, coordinator_rank=coordinator)
    assert finished == ([rank] if rank == coordinator else []) and torch.equal(new["t"], torch.arange(10.0))


def dropin_while_another_is_saved(pg, rank, run, path, mark, alike):
    """`path` stands for step 1 when rank 0 asks, and for step 2 when rank 1 does: a save ends in between. What each has loaded."""
    import pathlib
    import time

    import dcpd
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader

    mark, link = pathlib.Path(mark), pathlib.Path(path)

    def step(i):
        more = {} if alike or i == 1 else {"later": torch.zeros(3)}
        dcpd.save({"x": torch.full((64,), float(i)), "step": i, **more}, f"{run}/step-{i}", no_dist=True)
        if not path.startswith("main:"):
            link.unlink(missing_ok=True)
            link.symlink_to(f"step-{i}")

    class Reader(StorageReader):
        def read_metadata(self, *args, **kwargs):
            while rank and not mark.exists():
                time.sleep(0.01)
            out = super().read_metadata(*args, **kwargs)
            if not rank and not mark.exists():
                step(2)
                mark.touch()
            return out

    if rank == 0:
        step(1)
    torch.distributed.barrier(group=pg)
    got = {"x": torch.zeros(64), "step": 0}
    try:
        with quiet():
            dcp.load(got, storage_reader=Reader(path), process_group=pg)
    except dcp.api.CheckpointException as e:
        return [str(x[0]) for x in e.failures.values()]
    return got["x"].unique().tolist(), got["step"]


def dropin_from_each_hosts_mount(pg, rank, run, path, case):
    """Each rank has its own view of the file system: a link to step 1 on rank 0, and on rank 1 a link of another name and depth to its own
    copy of a step. What each has loaded."""
    import pathlib
    import shutil

    import dcpd
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageReader

    here, there = pathlib.Path(path) / "a", pathlib.Path(path) / "b"
    if rank == 0:
        for i in (1, 2):
            dcpd.save({"x": torch.full((64,), float(i)), "step": i}, f"main:{run.name}/step-{i}", no_dist=True)
        shutil.copytree(run / "step-1", here / "steps" / "one")
        shutil.copytree(run / ("step-2" if case == "another" else "step-1"), there / "mounted" / "first")
        (here / "latest").symlink_to("steps/one")
        (there / "deep").mkdir()
        (there / "deep/latest").symlink_to("../mounted/first")
    torch.distributed.barrier(group=pg)
    mine = there / "deep/latest" if rank else here / ("latest" if case == "both are links" else "steps/one")
    got = {"x": torch.zeros(64), "step": 0}
    try:
        with quiet():
            dcp.load(got, storage_reader=StorageReader(mine), process_group=pg)
    except dcp.api.CheckpointException as e:
        return [str(x[0]) for x in e.failures.values()]
    return got["x"].unique().tolist(), got["step"]


def dropin_cached_plans(pg, rank, path, times):
    """enable_plan_caching: the second save has plans of the first one."""
    import on_ranks
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter
    from torch.distributed.tensor import Shard

    out = []
    for i in range(times):
        t = on_ranks.distribute_tensor(torch.full((9, 2), float(i)), on_ranks.mesh_of(pg, (4,)), [Shard(0)])
        new = {"t": on_ranks.distribute_tensor(torch.full((9, 2), -1.0), on_ranks.mesh_of(pg, (4,)), [Shard(0)]), "v": {"i": -1}}
        with quiet():
            dcp.save({"t": t, "v": {"i": i}}, storage_writer=StorageWriter(path), process_group=pg,
                     planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
            dcp.load(new, storage_reader=dcp.FileSystemReader(path), process_group=pg)
        assert torch.equal(new["t"].to_local(), t.to_local())
        out.append(new["v"]["i"])
    return out


def dropin_local_again(pg, rank, path, how):
    """use_collectives=False: over what is there, by the caller or by a thread; then refused without overwrite."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    new = {"t": torch.zeros(100)}
    with quiet():
        for i in range(2):
            sd = {"t": torch.full((100,), float(rank + i))}
            if how == "save":
                dcp.save(sd, storage_writer=StorageWriter(path), process_group=pg, use_collectives=False)
            else:
                dcp.async_save(sd, storage_writer=StorageWriter(path), process_group=pg, use_collectives=False).result(60)
            torch.distributed.barrier(group=pg)
        dcp.load(new, storage_reader=dcp.FileSystemReader(path), process_group=pg)
        torch.distributed.barrier(group=pg)
        try:
            dcp.save(sd, storage_writer=StorageWriter(path, overwrite=False), process_group=pg, use_collectives=False)
        except RuntimeError as e:
            return new["t"][0].item(), str(e)[:25]
    return new["t"][0].item(), None


def dropin_refused(pg, rank, path, alone):
    """How a save that dcpd refuses ends here: (kind, the ranks that failed, text)."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    try:
        with quiet():
            dcp.save({f"t{rank}": torch.ones(5)}, storage_writer=StorageWriter(path), process_group=pg, use_collectives=not alone)
    except dcp.CheckpointException as e:
        return "CheckpointException", sorted(e.failures), str(e)
    except Exception as e:
        return "other", [], f"{type(e).__name__} {e} {path}"
    return "saved", [], ""


def dropin_unstaged(pg, rank, path):
    """Rank 1 cannot stage: all hear of it, soon, and the next save with the same writer succeeds."""
    import time

    import dcpd
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter, _stage

    def full(*args):
        raise dcpd.SharedMemoryFull("no room in /dev/shm")

    sd, w, real, start = {"t": torch.ones(1000), f"r{rank}": torch.ones(3)}, StorageWriter(path), _stage.stage, time.monotonic()
    with quiet():
        try:
            _stage.stage = full if rank == 1 else real
            f = dcp.async_save(sd, storage_writer=w, process_group=pg)
            failed = {r: repr(e[0]) for r, e in f.exception(60).failures.items()}
        finally:
            _stage.stage = real
        seconds = time.monotonic() - start
        dcp.async_save(sd, storage_writer=w, process_group=pg).result(60)
    return failed, seconds < 30
