"""What the tests of direct reads run on each rank; see on_ranks.py."""
import contextlib

import dcpd
from dcpd import _direct


@contextlib.contextmanager
def always():
    """However small the tensors are."""
    kept = _direct.AVERAGE_MIN
    _direct.AVERAGE_MIN = 0
    try:
        yield
    finally:
        _direct.AVERAGE_MIN = kept


def directly(pg, rank, function, *args):
    """function(pg, rank, …), and how many boxes were read directly meanwhile."""
    before = _direct.counts["boxes"]
    with always():
        out = function(pg, rank, *args)
    return out, _direct.counts["boxes"] - before


def one_that_fails(pg, rank, ref, specs, victim, what):
    """Rank `victim` finds the disk broken, the checkpoint to be another one, or to become one; the others find nothing wrong. How many were
    direct."""
    import on_ranks

    real = _direct.Plan.read, _direct.find

    def read(self, *args, **kw):
        raise dcpd.errors.StorageFailed("cannot be read: Input/output error", code="storage_io", file="f")

    def replaced(self, *args, **kw):
        _direct.Plan.read = real[0]
        raise self.files.replaced(0)

    def find(place, specs, verify):
        plan = real[1](place, specs, verify)
        if plan is not None:
            plan.ident = "1:2" if what == "other" else plan.ident
        if what == "none" and plan is not None:
            plan.close()
            plan = None
        return plan

    if rank == victim and what in ("read", "replaced"):
        _direct.Plan.read = read if what == "read" else replaced
    elif rank == victim:
        _direct.find = find
    try:
        return directly(pg, rank, on_ranks.load_tensors, ref, specs)[1]
    finally:
        _direct.Plan.read, _direct.find = real


def trips(pg, rank, ref):
    """What a load of one large tensor a rank asks the daemon for, and how often the ranks wait for each other."""
    import torch

    from dcpd import _group, _http

    into = {f"w{rank}": torch.zeros(50_000)}
    dcpd.load(ref, into=into, process_group=pg)  # connections are there
    asked, met = [], []
    real = _http.Transport.raw, _group.TorchGroup.gather

    def raw(self, method, path, *args, **kw):
        asked.append(path.partition("?")[0].rpartition("/")[2].rpartition(":")[2])
        return real[0](self, method, path, *args, **kw)

    def gather(self, x):
        met.append(1)
        return real[1](self, x)

    _http.Transport.raw, _group.TorchGroup.gather = raw, gather
    try:
        dcpd.load(ref, into=into, process_group=pg)
    finally:
        _http.Transport.raw, _group.TorchGroup.gather = real
    assert into[f"w{rank}"].eq(torch.arange(50_000) + 1000 * rank).all()
    return asked, len(met)
