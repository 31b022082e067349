"""What the tests of faults run on each rank; see on_ranks.py, which has these too."""
import os
import time

import torch
from on_dropin import quiet

import dcpd

__all__ = ["dropin_with_a_death", "save_with_a_death", "held"]


def state(rank, x):
    return {f"t{rank}": torch.full((1 << 16,), float(x)), "all": torch.full((1000,), float(x)), "v": {"x": x}}


def die(*_, **__):
    os._exit(9)


def after(real):
    def wrapped(*args, **kw):
        real(*args, **kw)
        die()

    return wrapped


def dropin_with_a_death(pg, rank, path, x, victim=None, where="", how="save"):
    """Saves state(rank, x) by the drop-in; `victim` dies at `where`. Returns how long it took."""
    import torch.distributed.checkpoint as dcp
    from dcpd import _session
    from dcpd.torch import StorageWriter, _items

    _session.LEASE_SECONDS = 4
    start = time.monotonic()
    if rank == victim:
        if where == "copy":
            _items.fill = die
        elif where == "written":
            StorageWriter.write_data = after(StorageWriter.write_data)
        else:
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
    return time.monotonic() - start


def save_with_a_death(pg, rank, ref, x, victim=None, where=""):
    from dcpd import _save, _session, _tensors, client

    _session.LEASE_SECONDS = 4
    if rank == victim:
        if where == "copy":
            _tensors.copy_out = die
        elif where == "sealed":
            client.StateDicts.seal = after(client.StateDicts.seal)
        else:
            _save._submit = die
    return dcpd.save(state(rank, x), ref, process_group=pg, overwrite=True)["state"]


def held(pg, rank):
    """Segments that this process maps."""
    with open("/proc/self/maps") as f:
        return sorted({line.split()[5] for line in f if "/dev/shm/dcpd-" in line})
