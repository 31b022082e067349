"""What the tests of saves that are written while they are copied run on each rank: function(process group, rank, arguments…)."""
import contextlib
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import dcpd

KIB = 1 << 10


@contextlib.contextmanager
def put(thing, name, x):
    """thing.name is x, for a while."""
    old = getattr(thing, name)
    setattr(thing, name, x)
    try:
        yield old
    finally:
        setattr(thing, name, old)


@contextlib.contextmanager
def small_steps():
    """Pieces of 64 KiB through rings of 1 MiB, so that small state dicts go round."""
    from dcpd import _copy, _ring

    with put(_copy, "step", lambda: 64 * KIB), put(_ring, "BYTES", 1024 * KIB):
        yield


def state(pg, rank, world, seed=0):
    """Odd sizes, strides, many small, bfloat16, DTensors (of which some ranks may hold nothing), numpy, empty ones; rank 1 has none of its
    own."""
    import on_ranks

    g = torch.Generator().manual_seed(100 * seed + rank)
    sd = {"value": {"seed": seed}, "all": on_ranks.whole((700, 333), seed)}
    sd["cut"] = on_ranks.placed(pg, (1001, 77), (world,), [Shard(0)], seed)
    sd["few"] = on_ranks.placed(pg, (2, 50000), (world,), [Shard(0)], seed)
    sd["none"] = on_ranks.placed(pg, (0, 3), (world,), [Shard(0)])
    if rank != 1:
        sd[f"r{rank}"] = {
            "odd": torch.randn(123457, generator=g), "strided": torch.randn(301, 407, generator=g).t(),
            "bf16": torch.randn(99999, generator=g).to(torch.bfloat16), "large": torch.randn(700, 999, generator=g),
            "wide": torch.randn(600, 900, generator=g)[:, ::2], "array": torch.randn(70001, generator=g).numpy(),
            "z": torch.zeros(0, 5), "scalar": torch.tensor(7 + seed), "small": {f"s{i}": torch.randn(i % 50 + 1, generator=g)
                                                                             for i in range(300)},
            "conj": torch.randn(300, 500, generator=g, dtype=torch.complex64).conj()}
    return sd


def save(pg, rank, world, ref, seeds, **more):
    """Saves one state dict after the other to REF-SEED, streaming; the job's ids."""
    with small_steps():
        return [dcpd.save(state(pg, rank, world, s), f"{ref}-{s}", process_group=pg, **more)["id"] for s in seeds]


def check(pg, rank, world, path, seeds):
    """PyTorch's own reader finds the same bits."""
    import torch.distributed.checkpoint as dcp

    for s in seeds:
        want, sd = state(pg, rank, world, s), state(pg, rank, world, s)
        flat, got = leaves(want), leaves(sd)
        for t in got.values():
            if isinstance(t, torch.Tensor):
                (t.to_local() if hasattr(t, "to_local") else t).zero_()
        loaded = {k: torch.zeros_like(t).contiguous() if plain(t) and (t.is_conj() or not t.is_contiguous()) else t for k, t in got.items()}
        dcp.load(nest(loaded), checkpoint_id=f"{path}-{s}", process_group=pg)
        for k, t in flat.items():
            if isinstance(t, torch.Tensor):
                a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (loaded[k], t))
                assert torch.equal(a, b.resolve_conj()), (s, k)


def plain(t):
    return isinstance(t, torch.Tensor) and not hasattr(t, "to_local")


def leaves(x, at=()):
    out = {}
    for k, v in x.items():
        if isinstance(v, dict):
            out.update(leaves(v, (*at, k)))
        else:
            out[(*at, k)] = torch.from_numpy(v.copy()) if type(v).__module__ == "numpy" else v
    return out


def nest(flat):
    out = {}
    for path, v in flat.items():
        d = out
        for k in path[:-1]:
            d = d.setdefault(k, {})
        d[path[-1]] = v
    return out


def plain_state(rank, x, mib=2):
    return {f"t{rank}": torch.full((mib << 18,), float(x)), "all": torch.full((1000,), float(x)), "v": {"x": x}}


def counted(pg, rank, ref, how):
    """A save's job, when the ranks have met, and what it costs in collectives: those of PyTorch, and rounds of the ranks' own."""
    from dcpd import _star

    names = [n for n in dir(dist) if n.startswith(("all_", "broadcast", "gather", "scatter", "reduce", "barrier", "send", "recv"))
             and callable(getattr(dist, n))]
    run = (lambda i: dcpd.save(plain_state(rank, i), f"{ref}-{i}", process_group=pg)["id"]) if how == "save" else \
        (lambda i: dcpd.async_save(plain_state(rank, i), f"{ref}-{i}", process_group=pg).result()["id"])
    run(0)
    calls = []
    with contextlib.ExitStack() as stack:
        for n in names:
            stack.enter_context(put(dist, n, counting(getattr(dist, n), n, calls)))
        stack.enter_context(put(_star.Star, "gather", counting(_star.Star.gather, "star", calls)))
        return run(1), calls


def counting(real, name, calls):
    def wrapped(*args, **kw):
        calls.append(name)
        return real(*args, **kw)

    return wrapped


class Failure(RuntimeError):
    pass


def nth_told(n, act):
    """Ring.told that calls act() in its nth call."""
    from dcpd import _ring

    real, count = _ring.Ring.told, [0]

    def told(self, bytes_):
        count[0] += 1
        if count[0] == n:
            act()
        real(self, bytes_)

    return put(_ring.Ring, "told", told)


def fails(pg, rank, ref, victim, where, how, x):
    """`victim` raises in its copy, before its seal, or instead of it; the others save."""
    from dcpd import _tensors, client, errors

    def stop(*_, **__):
        raise Failure("on purpose")

    def busy(*_, **__):
        raise errors.SlotsBusy("on purpose", code="slots_busy")

    with contextlib.ExitStack() as stack:
        stack.enter_context(small_steps())
        if rank == victim:
            stack.enter_context({"copy": lambda: put(_tensors, "copy_out", stop), "seal": lambda: put(client.StateDicts, "seal", stop),
                                 "reserve": lambda: put(client.StateDicts, "reserve", busy),
                                 "middle": lambda: nth_told(5, stop)}[where]())
        f = dcpd.save if how == "save" else dcpd.async_save
        return f(plain_state(rank, x), ref, process_group=pg, slots=1, when_busy="fail" if where == "reserve" else "wait")


def saves(pg, rank, ref, x, how="save", **more):
    with small_steps():
        if how == "save":
            return dcpd.save(plain_state(rank, x), ref, process_group=pg, **more)["state"]
        return dcpd.async_save(plain_state(rank, x), ref, process_group=pg, **more).result()["state"]


def saves_in_one_slot(pg, rank, ref, x, how):
    return saves(pg, rank, ref, x, how, slots=1)


def short_leases(pg, rank):
    """What the dead hold is free after seconds."""
    from dcpd import _session

    _session.LEASE_SECONDS = 4


def dies(pg, rank, ref, x, victim):
    """`victim` is killed in the middle of its copy, when dcpd has been told of some of it."""
    import on_faults

    on_faults.patient(pg, victim)
    with small_steps(), nth_told(6, (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == victim else lambda: None):
        return dcpd.save(plain_state(rank, x), ref, process_group=pg, overwrite=True)["state"]


def kills_worker(pg, rank, ref, x, pids):
    """Rank 1 kills the workers, which may be idle ones of another save, when dcpd has been told of some of its copy."""
    def strike():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with small_steps(), nth_told(40, strike) if rank == 1 else contextlib.nullcontext():
        return dcpd.save(plain_state(rank, x, 16), ref, process_group=pg)["state"]


def kills_daemon(pg, rank, ref, x, pid, how):
    from dcpd import _tensors
    from on_faults import slayer

    with contextlib.ExitStack() as stack:
        stack.enter_context(small_steps())
        if rank == 1 and how == "save":
            stack.enter_context(nth_told(6, lambda: os.kill(pid, signal.SIGKILL)))
        elif rank == 1:
            stack.enter_context(put(_tensors, "copy_out", slayer(pid, _tensors.copy_out)))
        return saves(pg, rank, ref, x, how)


def old_daemon(pg, rank, ref, x, how):
    """A daemon of before refuses what it does not know, once: what was asked for after."""
    from dcpd import _daemon, _http, errors

    asked = []
    real = _http.Transport.request

    def request(self, method, path, body=None, **kw):
        field = "await_seal" if "await_seal" in (body or {}).get("source", {}) else "ring" if "ring" in (body or {}) else None
        if field:
            asked.append(field)
            raise errors.from_problem({"code": "unknown_field", "detail": f"unknown field \"{field}\"", "pointer": f"/{field}"})
        return real(self, method, path, body, **kw)

    c = _daemon.default_client()  # rank 0's; the others make one with a new session
    with put(_http.Transport, "request", request), put(c, "early", True), put(c, "rings", True):
        states = [saves(pg, rank, f"{ref}-{i}", x + i, how, slots=3) for i in range(3)]
    return states, asked


def gathers(pg, rank, sizes):
    """Whatever its length, everybody's comes to all, by PyTorch's collectives and by the ranks' own sockets."""
    from dcpd import _group

    _group._stars.clear()
    g = _group.TorchGroup(pg)
    by = []
    for _ in range(2):
        by += [g.gather((rank, "x" * n[rank])) == [(r, "x" * n[r]) for r in range(g.size)] for n in sizes]
        by.append(g.broadcast(rank) == 0)
        g.meet_here()
    assert _group._stars[g.whole] is not None
    return by


@contextlib.contextmanager
def dropin_rings():
    """Rings that a few tensors of the drop-in go round: its files have blocks of 4 MiB."""
    from dcpd import _copy, _ring

    with put(_copy, "step", lambda: 1024 * KIB), put(_ring, "BYTES", 16 * 1024 * KIB):
        yield


def dropin_state(pg, rank, world, seed):
    g = torch.Generator().manual_seed(7 * seed + rank)
    sd = state(pg, rank, world, seed)
    sd[f"big{rank}"] = {"w": torch.randn(9 << 20, generator=g), "t": torch.randn(1999, 1503, generator=g).t()}
    return {k: {n: t for n, t in v.items() if n != "array"} if isinstance(v, dict) else v for k, v in sd.items()}


def dropin(pg, rank, world, path, seed, pids=(), fails=-1):
    """A blocking save by PyTorch's own function, through rings; rank 1 kills these, or fails, in the middle of its copy."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    def strike():
        if fails == rank:
            raise Failure("on purpose")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with dropin_rings(), nth_told(20, strike) if rank == 1 else contextlib.nullcontext():
        dcp.save(dropin_state(pg, rank, world, seed), storage_writer=StorageWriter(path), process_group=pg)


def dropin_check(pg, rank, world, path, seed):
    import torch.distributed.checkpoint as dcp

    want = leaves(dropin_state(pg, rank, world, seed))
    got = {k: (torch.zeros_like(t) if hasattr(t, "to_local") else torch.zeros(t.shape, dtype=t.dtype)) for k, t in want.items()
           if isinstance(t, torch.Tensor)}
    dcp.load(nest(got), checkpoint_id=path, process_group=pg)
    for k, t in got.items():
        a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (t, want[k]))
        assert torch.equal(a, b.resolve_conj()), k


def strikes_ring(pg, rank, path, x, what, victim=0, pid=0):
    """A blocking save through rings of 16 MiB, of which a rank has gone round more than once when `what` happens to it. path: a directory,
    for the drop-in; a reference, for dcpd.save."""
    import torch.distributed.checkpoint as dcp
    from dcpd import _copy, _session, image
    from dcpd.torch import StorageWriter

    def rings():
        return [slot for s in _session.all_sessions() for slot in s.mapped.values() if slot.ring is not None]

    def strike():
        if what == "killed":
            os.kill(pid or os.getpid(), signal.SIGKILL)
        for slot in rings():
            if what == "shrunk":
                os.truncate(image.SHM + slot.segment.name, slot.ring.offset + 4096)
            if what == "too fast":
                _copy.store(slot.ring._numbers, (20 << 20) + slot.ring.size + 4096)
                for _ in range(600):
                    slot.ring._ask()
                    time.sleep(0.05)

    with dropin_rings(), nth_told(20, strike) if rank == victim and what else contextlib.nullcontext():
        if path.startswith("main:"):
            dcpd.save(plain_state(rank, x, 40), path, process_group=pg, overwrite=True)
        else:
            dcp.save(plain_state(rank, x, 40), storage_writer=StorageWriter(path), process_group=pg)
    return [slot.segment.name for slot in rings()]


def dies_now(pg, rank):
    os.kill(os.getpid(), signal.SIGKILL)
