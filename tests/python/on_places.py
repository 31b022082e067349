"""What the tests of hosts by name (DCPD_PLACE) run on each rank: function(process group, rank, arguments…)."""
import pathlib
import time

import torch

import dcpd
from dcpd import _where
from dcpd import client as C


def steps(pg, rank, run):
    for i in (1, 2):
        dcpd.save({"x": torch.full((4,), float(i))}, f"{run}/step-{i}", process_group=pg)


def by_alias(pg, rank, run, into, mark):
    """The alias is moved when rank 0 has asked what it stands for, and rank 1 has not. What each has loaded."""
    mark, real, at = pathlib.Path(mark), _where.resolve, dcpd.connect()
    if rank == 0:
        at.runs.alias(run, "best", "step-1")

    def resolve(target, *args, **more):
        if "@" not in str(target):
            return real(target, *args, **more)
        while rank and not mark.exists():
            time.sleep(0.01)
        if rank:
            at.runs.alias(run, "best", "step-2")
        out = real(target, *args, **more)
        mark.touch()
        return out

    _where.resolve = resolve
    try:
        got = dcpd.load(f"{run}@best", into={"x": torch.zeros(4)} if into else None, process_group=pg)
    finally:
        _where.resolve = real
        mark.touch()
    return got["x"].tolist()


def of_several_clusters(pg, rank, ref, spread):
    """Each host's daemon is a node, of a cluster that has no other."""
    real = C.Nodes.seen
    nodes = [{"name": f"node-{rank}", "state": "joined"}, {"name": f"node-{1 - rank}", "state": "away"}][:1 + rank]
    C.Nodes.seen = lambda self: {"node": f"node-{rank}", "spreads": True, "nodes": nodes}
    try:
        return dcpd.load(ref, process_group=pg, spread=spread)["x"].tolist()
    except dcpd.RequestRefused as e:
        return str(e)
    finally:
        C.Nodes.seen = real


def out_of_reach(pg, rank, ref):
    """The daemons are nodes of one cluster, whose workers listen on loopback."""
    real = C.Nodes.seen
    nodes = [{"name": f"node-{i}", "state": "joined"} for i in (0, 1)]
    C.Nodes.seen = lambda self: {"node": f"node-{rank}", "spreads": False, "nodes": nodes}
    try:
        return dcpd.load(ref, process_group=pg)["x"].tolist()
    finally:
        C.Nodes.seen = real


def differing(pg, rank, ref):
    try:
        dcpd.load(ref, process_group=pg, spread=[None, False][rank])
    except dcpd.RanksDisagree as e:
        return e.rank


def nowhere(pg, rank, ref):
    """What spread=True hides is not why a load fails."""
    try:
        dcpd.load(ref, process_group=pg, spread=True)
    except dcpd.DcpdError as e:
        return type(e).__name__
