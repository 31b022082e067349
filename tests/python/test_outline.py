"""What is remembered of a structure between two saves: it is found again where it is the same, and never where it is not.

An "image" here is what a save puts into shared memory, made without a daemon and read back as whoever loads it does.
"""
import collections
import gc
import mmap
import tempfile
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lib_direct import low

import dcpd
from dcpd import _copy, _dtypes, _load, _outline, _session, _tensors, image


@pytest.fixture(autouse=True)
def nothing_kept():
    _outline._kept.clear()
    yield
    _outline._kept.clear()


class Trainer:
    """Saves as a session does: one layout as long as the structure is the same, two slots by turns."""

    def __init__(self):
        self.session = _session.Session(None, "t", 0, 1, False, 2)
        self.slots = {}
        self.turn = 0
        self.found = False  # the structure was known

    def save(self, sd):
        before = list(_outline._kept)
        d = _tensors.describe(sd)
        self.found = any(d.outline is o for o in before)
        layout = self.session.layout_of(d)
        header = layout.header({k: {"json": v} for k, v in d.values.items()})
        self.turn ^= 1
        slot = self.slots.get(self.turn)
        if slot is None or len(slot) < len(header) + layout.data_bytes:
            slot = self.slots[self.turn] = mmap.mmap(-1, len(header) + layout.data_bytes + 4096)
            self.views = {}
        v = self.views.get(self.turn)
        if v is None or v.layout is not layout or v._begin != len(header):
            v = self.views[self.turn] = _tensors.Views(slot, len(header), layout)
        slot[:len(header)] = header
        _tensors.copy_out(d, v)
        parsed = image.parse(slot)
        out = {k: x.clone() for k, x in _load.tensors_of(slot, parsed).items()}
        out.update({k: x["json"] for k, x in parsed.values.items()})
        return out


def raw(t):
    t = torch.as_tensor(t).detach()
    return torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8) if t.numel() else t


def check(got, want):
    assert got.keys() == want.keys()
    for k, x in want.items():
        if isinstance(x, (torch.Tensor, np.ndarray)):
            x = torch.as_tensor(x)
            assert got[k].dtype == x.dtype and got[k].shape == x.shape and torch.equal(raw(got[k]), raw(x)), k
        else:
            assert got[k] == x and type(got[k]) is type(x), k


def state():
    g = torch.Generator().manual_seed(3)
    return {"a": torch.randn(4, 4, generator=g), "b": torch.randn(3, generator=g), "n": np.arange(6.0),
            "c": torch.randn(2, 2, dtype=torch.complex64, generator=g), "step": 1, "big": torch.arange(300_000.0),
            "empty": torch.empty(0, 3), "p": torch.nn.Parameter(torch.ones(5)), "t": torch.randn(3, 5, generator=g).t()}


def test_a_dtype_that_is_named_first_hides_no_other(monkeypatch):
    """Its tensors would be plain from the second look on only."""
    monkeypatch.setattr(_dtypes, "_torch_names", {})
    assert _dtypes.torch_name(torch.float32) == "float32"
    assert _dtypes.known_to_torch()[torch.complex64] == "complex64"


def test_the_same_structure_is_found_again_with_new_values():
    t, sd = Trainer(), state()
    check(t.save(sd), sd)
    assert not t.found
    for step in range(2, 5):
        sd["step"] = step
        for k, x in sd.items():
            if isinstance(x, torch.Tensor):
                with torch.no_grad():
                    x.add_(step)
        sd["n"] += 1
        check(t.save(sd), sd)
        assert t.found
    fresh = {k: x.detach().clone() if type(x) is torch.Tensor else x for k, x in sd.items()}
    fresh["t"] = sd["t"].t().clone().t()
    check(t.save(fresh), fresh)
    assert t.found


def swap(x, to):
    x.data = to


CHANGES = {
    "another shape in its place": lambda sd: swap(sd["a"], torch.randn(2, 9)),
    "another dtype in its place": lambda sd: swap(sd["a"], torch.randn(4, 4).to(torch.bfloat16)),
    "transposed in its place": lambda sd: swap(sd["a"], sd["a"].data.t()),
    "another layout of memory": lambda sd: sd.update(a=torch.randn(4, 8)[:, ::2]),
    "resized": lambda sd: sd["b"].resize_(40).fill_(2),
    "made larger by set_": lambda sd: sd["b"].set_(torch.randn(7)),
    "conjugated": lambda sd: sd.update(c=sd["c"].conj()),
    "negated": lambda sd: swap(sd["a"], torch._neg_view(sd["a"].data)),
    "one number of a conjugate": lambda sd: sd.update(b=torch.randn(1, dtype=torch.complex64).conj().imag),
    "without elements": lambda sd: sd.update(a=torch.empty(0)),
    "with elements": lambda sd: sd.update(empty=torch.ones(2)),
    "expanded": lambda sd: sd.update(a=torch.ones(1, 4).expand(4, 4)),
    "a zero tensor": lambda sd: sd.update(a=torch._efficientzerotensor((4, 4))),
    "an array instead": lambda sd: sd.update(a=np.ones((4, 4), np.float32)),
    "a value instead": lambda sd: sd.update(a=3),
    "a tensor for a value": lambda sd: sd.update(step=torch.ones(2)),
    "an array of another dtype": lambda sd: sd.update(n=np.arange(6)),
    "an array of another shape": lambda sd: sd.update(n=np.arange(7.0)),
    "one key more": lambda sd: sd.update(new=torch.ones(1)),
    "one key less": lambda sd: sd.pop("b"),
    "another order": lambda sd: sd.update(a=sd.pop("a")),
    "another name": lambda sd: sd.update(z=sd.pop("t")),
    "a Parameter instead": lambda sd: sd.update(a=torch.nn.Parameter(sd["a"].clone())),
}


NO_MATTER = ("conjugated", "a zero tensor")  # complex tensors, and those without an address, are left to torch each time


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_seen(change):
    t, sd = Trainer(), state()
    for _ in range(3):
        check(t.save(sd), sd)
    CHANGES[change](sd)
    for known in (False, True, True):
        want = {k: x.clone() if change == "a zero tensor" and k == "a" else x for k, x in sd.items()}
        check(t.save(sd), want)
        assert t.found == known or change in NO_MATTER


def test_what_did_not_change_the_structure():
    t, sd = Trainer(), state()
    t.save(sd)
    sd["a"].requires_grad_()
    other = torch.randn(64)
    sd["b"].set_(other.untyped_storage(), 5, (3,))  # of the same form, somewhere else
    sd["p"].data = torch.full((5,), 9.0)
    sd["t"] = torch.randn(3, 5).t()
    check(t.save(sd), sd)
    assert t.found
    sd["p"] = torch.nn.Parameter(torch.zeros(5))
    sd["b"] = sd["big"][7:10]  # two keys, one memory
    check(t.save(sd), sd)
    assert t.found


def test_nested_structures():
    t = Trainer()
    sd = {"opt": {"state": {0: {"m": torch.ones(2), "step": 4}, 1: {"m": torch.ones(3), "step": 4}},
                  "groups": [{"lr": 0.1, "betas": [1, 2]}], "mixed": [1, torch.ones(1)]}}
    first = t.save(sd)
    assert first["opt.groups.0.betas"] == [1, 2] and first["opt.mixed.0"] == 1
    sd["opt"]["groups"][0]["betas"] = [3, 4, 5]
    sd["opt"]["state"][0]["step"] = 5
    got = t.save(sd)
    assert t.found and got["opt.groups.0.betas"] == [3, 4, 5] and got["opt.state.0.step"] == 5
    sd["opt"]["groups"][0]["betas"] = [torch.tensor(3.0), 4]  # a list with a tensor in it is taken apart
    got = t.save(sd)
    assert not t.found and got["opt.groups.0.betas.0"] == 3 and got["opt.groups.0.betas.1"] == 4
    sd["opt"]["mixed"].append(torch.full((2,), 7.0))
    got = t.save(sd)
    assert not t.found and got["opt.mixed.2"].tolist() == [7, 7]
    sd["opt"]["state"] = {True: sd["opt"]["state"].pop(1), 0: sd["opt"]["state"][0]}  # True == 1, but it is called otherwise
    assert "opt.state.True.m" in t.save(sd)
    sd["opt"] = collections.OrderedDict(sd["opt"])
    assert "opt.state.True.m" in t.save(sd)


def test_arrays_of_objects_and_of_numbers():
    d = _tensors.describe({"a": torch.ones(1), "n": np.array([None, 1], dtype=object)})
    assert list(d.values) == ["n"]
    d = _tensors.describe({"a": torch.ones(1), "n": np.arange(2)})
    assert not d.values and len(d.keys) == 2
    d = _tensors.describe({"a": torch.ones(1), "n": np.array([None, 1], dtype=object)})
    assert list(d.values) == ["n"]


def test_a_tensor_that_says_its_boxes_itself():
    t, sd = Trainer(), {"a": torch.ones(2, 2)}
    t.save(sd)
    a = sd["a"]
    a.global_shape, a.global_offsets, a.local_offsets, a.local_sizes = (4, 2), [(2, 0)], [(0, 0)], [(2, 2)]
    d = _tensors.describe(sd)
    assert d.keys == [("a", "float32", (4, 2), (2, 0), (2, 2))]


def test_memory_that_lies_low_is_copied_as_any(monkeypatch):
    t, sd = Trainer(), {"a": low(8).fill_(3), "b": torch.ones(8)}
    check(t.save(sd), sd)
    monkeypatch.setattr(_tensors, "_move", None)  # the way that looks at each tensor by itself
    for _ in range(3):
        sd["a"] += 1
        check(t.save(sd), sd)
    assert t.found


def test_freed_and_missing_memory():
    t, sd = Trainer(), {"a": torch.ones(8), "b": torch.ones(8)}
    t.save(sd)
    for part in (sd["b"], sd["b"][4:]):
        sd["b"] = part
        t.save(sd)
    sd["b"].untyped_storage().resize_(0)  # as FSDP does with parameters that it does not need now
    with pytest.raises(dcpd.StateDictMismatch, match="b: the tensor's storage was freed"):
        t.save(sd)


def test_two_structures_by_turns():
    t, a, b = Trainer(), state(), {"x": torch.ones(3), "y": {"z": torch.ones(2)}}
    t.save(a)
    t.save(b)
    for _ in range(2):
        for sd in (a, b):
            t.save(sd)
            assert t.found
    for i in range(10):
        t.save({f"k{i}": torch.ones(1)})
    assert len(_outline._kept) <= 4


def test_no_tensor_is_kept_alive():
    t, sd = Trainer(), {"a": torch.ones(4), "n": {"b": torch.ones(2, dtype=torch.complex64)}}
    t.save(sd)
    t.save(sd)
    refs = [weakref.ref(sd["a"]), weakref.ref(sd["n"]["b"])]
    del sd
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_a_subclass_is_asked_each_time():
    class Mine(torch.Tensor):
        pass

    t, sd = Trainer(), {"a": torch.ones(3).as_subclass(Mine), "b": torch.ones(2)}
    t.save(sd)
    sd["a"].fill_(5)
    got = t.save(sd)
    assert t.found and got["a"].tolist() == [5, 5, 5]
    sd["a"] = torch.ones(4).as_subclass(Mine)
    assert t.save(sd)["a"].shape == (4,) and not t.found


# ------------------------------------------------------------------------------------------------------------- DTensors


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.tensor import init_device_mesh

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


def cut(t, mesh, *placements):
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(t, mesh, list(placements or [Shard(0)]), run_check=False)


def test_dtensors(mesh):
    from torch.distributed.tensor import Replicate, Shard

    t = Trainer()
    sd = {"p": torch.ones(2), "d": cut(torch.randn(4, 4), mesh), "e": cut(torch.nn.Parameter(torch.randn(3, 2)), mesh)}

    def expect(known):
        got = t.save(sd)
        assert t.found == known
        for k, x in sd.items():
            assert torch.equal(got[k], x.to_local() if hasattr(x, "to_local") else x), k

    expect(False)
    with torch.no_grad():
        sd["d"].add_(1)
    expect(True)
    sd["d"] = cut(torch.randn(4, 4), mesh)
    expect(True)
    sd["d"]._local_tensor = torch.randn(4, 4)  # what FSDP2 does
    expect(True)
    sd["d"]._local_tensor = torch.randn(4, 4).t()
    expect(False)
    sd["d"] = cut(torch.randn(4, 4), mesh, Replicate())
    expect(False)
    sd["d"] = cut(torch.randn(4, 4), mesh, Shard(1))
    expect(False)
    sd["d"]._spec.placements = (Shard(0),)  # in its place; this form was there before
    expect(True)
    assert _tensors.describe(sd).keys[1][3:] == ((0, 0), (4, 4))
    sd["d"] = sd["p"]
    expect(False)
    sd["d"] = cut(torch.randn(4, 4, dtype=torch.float64), mesh)
    expect(False)
    sd["d"]._local_tensor = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(dcpd.StateDictMismatch, match="local tensor has shape"):
        t.save(sd)


def test_a_dtensor_that_is_being_gathered_is_waited_for(mesh):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    t, sd = Trainer(), {"d": cut(torch.ones(4), mesh)}
    t.save(sd)
    sd["d"]._local_tensor = AsyncCollectiveTensor(torch.full((4,), 3.0))
    got = t.save(sd)
    assert not t.found and got["d"].tolist() == [3] * 4


def test_a_dtensor_without_private_fields(mesh, monkeypatch):
    d = cut(torch.randn(4, 4), mesh)
    monkeypatch.setattr(_tensors, "_in_sight", lambda *a: False)
    t = Trainer()
    for known in (False, True):
        assert torch.equal(t.save({"d": d})["d"], d.to_local()) and t.found == known


# ---------------------------------------------------------------------------------------------------------- small copies


@pytest.mark.parametrize("call", ["kernel", "none", "refused"])
@pytest.mark.parametrize("sizes", [[5], [1, 16384, 7] * 900, [16384] * 700], ids=["one", "mixed", "threads"])
def test_a_batch_copies_just_its_bytes(call, sizes, monkeypatch):
    if call != "kernel":
        monkeypatch.setattr(_copy, "_call", [None if call == "none" else lambda *a: -1])
    monkeypatch.setenv("DCPD_COPY_THREADS", "3")
    places, at = [], 0
    for n in sizes:
        places.append(at + 3)
        at += n + 10
    for _ in range(2):
        src, dst = torch.randint(0, 256, (at + 64,), dtype=torch.uint8), torch.zeros(at + 64, dtype=torch.uint8)
        want = torch.zeros_like(dst)
        for p, n in zip(places, sizes):
            want[p:p + n] = src[p + 1:p + 1 + n]
        _copy.Batch([dst.data_ptr() + p for p in places], sizes).run([src.data_ptr() + p + 1 for p in places])
        assert torch.equal(dst, want)
