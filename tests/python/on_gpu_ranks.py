"""What the tests of device memory run on each of several ranks: function(process group, rank, arguments…). The fake driver is loaded by the
first call, and stays."""
import pathlib
import sys

import torch

import dcpd
from dcpd import _hosts, _load

_put = []


def put(t):
    if not _put:
        sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "lib"))  # behind the package, whose name the harness has too
        import fake_gpu

        _put.append(fake_gpu.as_torch(fake_gpu.Trainer()))
    return _put[0](t)


def numbers(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def wanted():
    return {"model": {"w": numbers(2 << 20, 1), "b": numbers(5, 2)}, "optim": {"m": numbers(1 << 20, 3)}, "step": 7}


def save(pg, rank, ref):
    return dcpd.save(wanted(), ref, process_group=pg) and None


def on_a_device(monkey):
    """Tensors that are asked for on a GPU lie on the fake one."""
    real, to = _load._empty, torch.Tensor.to
    monkey.append((_load, "_empty", real))
    _load._empty = lambda x, device: put(real(x, "cpu"))
    monkey.append((torch.Tensor, "to", to))
    torch.Tensor.to = lambda t, *a, **k: put(t) if a and str(a[0]).startswith("cuda") else to(t, *a, **k)


def undo(monkey):
    for at, name, real in reversed(monkey):
        setattr(at, name, real)


def whole(pg, rank, ref, how):
    """What each rank has, and what of it is on the device."""
    monkey = []
    on_a_device(monkey)
    try:
        rules = {"transform": [{"match": "model\\.w", "rename": "model.renamed"}]}
        more = {"rules": rules, "part": {"keys": ["optim", "step"]}}.get(how, {})
        got = dcpd.load(ref, device=f"cuda:{rank}", process_group=pg, **more)
    finally:
        undo(monkey)
    flat = {f"{k}.{i}": t for k in ("model", "optim") for i, t in got.get(k, {}).items()}
    flat.update({k: t for k, t in got.items() if k == "model.renamed"})  # a key that a rule makes is no path
    there = {f"{k}.{i}": t for k in ("model", "optim") for i, t in wanted()[k].items()}
    assert got["step"] == 7 and all(t.is_cuda for t in flat.values()), got
    for k, t in flat.items():
        assert torch.equal(t.as_subclass(torch.Tensor), there["model.w" if k == "model.renamed" else k]), k
    return sorted(flat)


def into_doubles(pg, rank, ref, on_device):
    """A tensor of another dtype than the stored one, which only the ranks `on_device` have on a GPU."""
    t = torch.zeros(2 << 20, dtype=torch.float64)
    into = {"model": {"w": put(t) if rank in on_device else t}}
    dcpd.load(ref, into=into, process_group=pg)
    assert torch.equal(into["model"]["w"].as_subclass(torch.Tensor), wanted()["model"]["w"].double())


def no_room(pg, rank, ref):
    """The device of rank 1 has no room."""
    monkey = []
    on_a_device(monkey)
    if rank == 1:
        def full(x, device):
            raise RuntimeError("CUDA out of memory.")

        _load._empty = full
    try:
        dcpd.load(ref, device="cuda", process_group=pg)
        return "loaded"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    finally:
        undo(monkey)


def not_listed(pg, rank, ref):
    """The daemon of rank 1's host does not list the checkpoint's tensors just now."""
    monkey = []
    if rank == 1:
        monkey.append((_load, "_list", _load._list))
        _load._list = lambda *_: None
    try:
        return whole(pg, rank, ref, "all")
    finally:
        undo(monkey)


def wishes(pg, rank, ref, spread):
    """What the steps of a load say of spreading."""
    seen, monkey = [], [(_hosts, "spread", _hosts.spread)]
    _hosts.spread = lambda g, place, wish: seen.append(wish)
    on_a_device(monkey)
    try:
        dcpd.load(ref, device="cuda", process_group=pg, spread=spread)
    finally:
        undo(monkey)
    return seen


def rules_that_are_not_there(pg, rank, ref):
    """What rank 0 cannot read fails all ranks: none waits for what it would have told."""
    into = {"model": {"w": put(torch.zeros(2 << 20))}}
    try:
        dcpd.load(ref, into=into, process_group=pg, transform="nowhere/rules.json")
    except Exception as e:
        return type(e).__name__
    raise AssertionError("rules of no file")
