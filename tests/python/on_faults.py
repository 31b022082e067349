"""What the tests of faults run on each rank; see on_ranks.py, which has these too."""
import datetime
import os
import signal

import torch
import torch.distributed as dist
from on_dropin import quiet

import dcpd

__all__ = ["dropin_with_a_death", "save_with_a_death"]


def state(rank, x):
    return {f"t{rank}": torch.full((1 << 16,), float(x)), "all": torch.full((1000,), float(x)), "v": {"x": x}}


def die(*_, **__):
    os._exit(9)


def after(real):
    def wrapped(*args, **kw):
        real(*args, **kw)
        die()

    return wrapped


def slayer(pid, real):
    """Kills the daemon, and goes on."""
    def wrapped(*args, **kw):
        if done:
            return real(*args, **kw)
        done.append(1)
        os.kill(pid, signal.SIGKILL)
        return real(*args, **kw)

    done = []
    return wrapped


def patient(pg, victim):
    """gloo does not tell all ranks that one has died: those wait as long as the group has patience."""
    if victim is not None:
        dist.set_timeout(datetime.timedelta(seconds=6), pg or dist.group.WORLD)


def deadly(rank, victim, where, module, copy):
    """The copy, which is module.copy: in it `victim` dies, or rank 1 kills the process whose number `where` is. Leases are short."""
    from dcpd import _session

    _session.LEASE_SECONDS = 4
    real = getattr(module, copy)
    if isinstance(where, int) and rank == 1:
        setattr(module, copy, slayer(where, real))
    elif rank == victim and where == "copy":
        setattr(module, copy, die)


def dropin_with_a_death(pg, rank, path, x, victim=None, where="", how="save"):
    """Saves state(rank, x) by the drop-in; `victim` dies at `where`. Where a number is given, rank 1 kills that process in its copy."""
    import torch.distributed.checkpoint as dcp
    from dcpd import _daemon
    from dcpd.torch import StorageWriter, _items

    patient(pg, victim)
    if isinstance(where, int):  # who has met the daemon waits for it; who comes first while it is away is told so, and the others wait
        _daemon.default_client()
        dist.barrier(pg)
    deadly(rank, victim, where, _items, "copy_tensors")
    if rank == victim and where == "written":
        StorageWriter.write_data = after(StorageWriter.write_data)
    elif rank == victim and where != "copy":
        setattr(StorageWriter, where, die)
    sd = state(rank, x)
    with quiet():
        w = StorageWriter(path)
        if how == "save":
            dcp.save(sd, storage_writer=w, process_group=pg)
        else:
            f = dcp.async_save(sd, storage_writer=w, process_group=pg)
            for t in (sd[f"t{rank}"], sd["all"]):
                t.zero_()
            f.result(60)


def save_with_a_death(pg, rank, ref, x, victim=None, where=""):
    from dcpd import _save, _tensors, client

    patient(pg, victim)
    deadly(rank, victim, where, _tensors, "copy_out")
    if rank == victim and where == "sealed":
        client.StateDicts.seal = after(client.StateDicts.seal)
    elif rank == victim and where != "copy":
        _save._submit = die
    return dcpd.save(state(rank, x), ref, process_group=pg, overwrite=True)["state"]
