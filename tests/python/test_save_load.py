"""save, async_save and load in one process: every kind of leaf, there and back; and what PyTorch reads of it."""
import asyncio
import pathlib
import subprocess
import sys
import warnings

import harness as lib
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpd

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fn,
          torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(t):
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def test_every_dtype_comes_back_bit_for_bit(at):
    g = torch.Generator().manual_seed(1)
    sd = {str(t): torch.randint(0, 2 if t is torch.bool else 256, (24 * torch.empty(0, dtype=t).element_size(),), generator=g,
                                dtype=torch.uint8).view(t).reshape(4, 6) for t in DTYPES}
    name = lib.fresh()
    dcpd.save(sd, f"main:{name}")
    got = dcpd.load(f"main:{name}")
    assert got.keys() == sd.keys()
    for k in sd:
        assert same(got[k], sd[k]), k


def test_views_strides_and_sizes(at):
    big = torch.arange(3 << 20, dtype=torch.float32)
    c = torch.randn(5, 3, dtype=torch.complex64)
    sd = {"t": torch.randn(7, 5).t(), "slice": torch.randn(9, 9)[2:7, ::2], "expand": torch.randn(1, 4).expand(3, 4), "conj": c.conj(),
          "neg": c.conj().imag, "big": big, "big_t": big.view(3, -1).t(), "zero_d": torch.tensor(3.5), "none": torch.empty(0, 3),
          "grad": torch.nn.Parameter(torch.randn(3)), "flip": torch.randn(600, 700).flip(0), "one": torch.ones(1)}
    name = lib.fresh()
    dcpd.save(sd, f"main:{name}")
    got = dcpd.load(f"main:{name}")
    for k, t in sd.items():
        assert same(got[k], t), k
    assert not got["grad"].requires_grad
    target = {k: torch.zeros_like(t) if k not in ("expand", "neg") else torch.zeros(t.shape) for k, t in sd.items()}
    before = {k: t.data_ptr() for k, t in target.items()}
    assert dcpd.load(f"main:{name}", into=target) is target
    for k, t in sd.items():
        assert torch.equal(target[k], t) and target[k].data_ptr() == before[k], k


def test_values_and_nesting(at):
    sd = {"a": {"b": {"x": torch.ones(2), 3: "int key"}}, "list": [torch.zeros(1), {"y": 1}, 5], "plain": [1, 2.0, "x", None, [True]],
          "tuple": (0.9, 0.999), "none": None, "b": b"\x00\xff", "inf": float("inf"), "huge": 1 << 80, "text": "ä\n\"", "f": 1.0, "i": 1,
          "set": {1, 2}, "size": torch.Size([2, 3]), "empty": {}, "complex": 1 + 2j}
    name = lib.fresh()
    dcpd.save(sd, f"main:{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing here is opaque
        got = dcpd.load(f"main:{name}")
    assert torch.equal(got["a"]["b"].pop("x"), torch.ones(2)) and got["a"] == {"b": {"3": "int key"}}
    assert got["list"][1:] == [{"y": 1}, 5] and "empty" not in got
    for k in ("plain", "tuple", "none", "b", "inf", "huge", "text", "f", "i", "set", "size", "complex"):
        assert got[k] == sd[k] and type(got[k]) is type(sd[k]), k
    target = {"a": {"b": {3: ""}}, "list": [torch.ones(1), {"y": 0}, 0], "tuple": ()}
    inner = target["a"]["b"]
    dcpd.load(f"main:{name}", into=target)
    assert target["a"]["b"] is inner and inner == {3: "int key"} and target["tuple"] == (0.9, 0.999)
    assert target["list"][1:] == [{"y": 1}, 5] and not target["list"][0].any()


class Anything:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x


def test_opaque_values_are_not_unpickled_unless_asked(at):
    name = lib.fresh()
    dcpd.save({"o": Anything(7), "t": torch.ones(1)}, f"main:{name}")
    with pytest.warns(UserWarning, match="o: a .*Anything is left as dcpd.Opaque"):
        got = dcpd.load(f"main:{name}")
    o = got["o"]
    assert isinstance(o, dcpd.Opaque) and o.class_name.endswith(".Anything") and "Anything" in repr(o)
    assert o.unpickle() == Anything(7)
    assert dcpd.load(f"main:{name}", weights_only=False)["o"] == Anything(7)
    dcpd.save(got, f"main:{name}2")  # an Opaque is stored as it came
    assert dcpd.load(f"main:{name}2", weights_only=False)["o"] == Anything(7)
    with pytest.raises(dcpd.StateDictMismatch, match="bad: .*cannot be pickled") as e:
        dcpd.save({"bad": lambda: 1}, f"main:{lib.fresh()}")
    assert e.value.fqn == "bad"


def test_pickles_of_others_run_nothing(at, tmp_path):
    class Evil:
        def __reduce__(self):
            return (pathlib.Path.touch, (tmp_path / "ran",))

    name = lib.fresh()
    dcpd.save({"e": Evil()}, f"main:{name}")
    with pytest.warns(UserWarning):
        dcpd.load(f"main:{name}")
    assert not (tmp_path / "ran").exists()


def test_arrays_in_values_are_plain_data(at):
    """numpy's random state is in most trainers' checkpoints."""
    sd = {"rng": np.random.get_state(), "deep": ((np.arange(6.0).reshape(2, 3), {"x"}), [np.zeros((0, 4), np.int8), np.array(7)]),
          "f": (np.asfortranarray(np.random.rand(3, 5)),), "be": (np.arange(4, dtype=">i4"),), "flags": (np.array([True, False]),),
          "twice": (lambda x: (x, x))(np.arange(3))}
    name = lib.fresh()
    dcpd.save(sd, f"main:{name}")
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(str(at.storages["main"] / f"{name}-t")), no_dist=True)

    def arrays(x):
        return [x] if isinstance(x, np.ndarray) else [a for y in x for a in arrays(y)] if isinstance(x, (tuple, list)) else []

    for ref in (name, f"{name}-t"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = dcpd.load(f"main:{ref}")
        assert got["rng"][0] == "MT19937" and got["rng"][2:] == sd["rng"][2:] and got["twice"][0] is got["twice"][1]
        for k in sd:
            for a, b in zip(arrays(sd[k]), arrays(got[k]), strict=True):
                assert type(b) is np.ndarray and b.dtype == a.dtype.newbyteorder("=") and b.shape == a.shape and np.array_equal(a, b), k
                assert b.flags.writeable and b.flags.f_contiguous == a.flags.f_contiguous
        np.random.set_state(got["rng"])


def test_arrays_that_pytorch_pickled(at):
    """Into arrays, as what dcpd saves of them: in place where they fit."""
    name, lr = lib.fresh(), np.linspace(0, 1, 7)
    sd = {"opt": {"lr": lr, "count": np.arange(4), "w": torch.ones(3)}, "seed": np.arange(3, dtype=np.uint32), "v": 5}
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(str(at.storages["main"] / name)), no_dist=True)
    same, longer = np.zeros(7), np.zeros(9, int)
    longer.flags.writeable = False
    into = {"opt": {"lr": same, "count": longer, "w": torch.zeros(3)}, "seed": np.zeros(3, dtype=">u4"), "v": 0}
    seed = into["seed"]
    dcpd.load(f"main:{name}", into=into)
    assert into["opt"]["lr"] is same and np.array_equal(same, lr) and into["seed"] is seed and seed.tolist() == [0, 1, 2]
    assert into["opt"]["count"].tolist() == [0, 1, 2, 3] and into["opt"]["w"].eq(1).all() and into["v"] == 5
    with pytest.raises(dcpd.MissingKey, match="nope"):
        dcpd.load(f"main:{name}", into={"opt": {"lr": same}, "nope": np.zeros(2)})
    dcpd.load(f"main:{name}", into={"opt": {"lr": same}, "nope": np.zeros(2)}, strict=False)


def test_numpy(at):
    sd = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "f": np.asfortranarray(np.random.rand(300, 500)), "s": np.array(["x"]),
          "big": np.arange(1 << 19, dtype=np.float64), "b": np.array([True, False]), "be": np.arange(4, dtype=">f4"), "z": np.float64(2.5),
          "zd": np.array(7)}
    name = lib.fresh()
    dcpd.save(sd, f"main:{name}")
    got = dcpd.load(f"main:{name}", weights_only=False)
    for k in ("a", "f", "be", "big", "b", "zd"):
        assert np.array_equal(got[k].numpy(), sd[k]), k
    target = {"a": np.zeros((2, 3), np.int16), "f": np.zeros((300, 500), order="F"), "big": np.zeros(1 << 19)}
    dcpd.load(f"main:{name}", into=target)
    assert all(np.array_equal(target[k], sd[k]) for k in target)


def test_modules_and_optimizers(at):
    def make(seed, steps=2):
        torch.manual_seed(seed)
        m = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        o = torch.optim.AdamW(m.parameters(), lr=0.1 + seed)
        s = torch.optim.lr_scheduler.StepLR(o, 3)
        for _ in range(steps):
            m(torch.randn(6, 4)).sum().backward()
            o.step()
            s.step()
        return m, o, s

    m, o, s = make(0)
    name = lib.fresh()
    dcpd.save({"model": m, "optim": o, "sched": s, "step": 2}, f"main:{name}")
    never, o3, _ = make(2, 0)  # an optimizer that has not made a step has no state to fill, yet
    before = [p.clone() for p in never.parameters()]
    dcpd.load(f"main:{name}", into={"optim": o3})
    assert all(torch.equal(o3.state_dict()["state"][i][k], v) for i, st in o.state_dict()["state"].items() for k, v in st.items())
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, never.parameters()))
    m2, o2, s2 = make(1)
    app = {"model": m2, "optim": o2, "sched": s2, "step": 0}
    dcpd.load(f"main:{name}", into=app)
    assert app["step"] == 2 and app["model"] is m2
    for k, t in m.state_dict().items():
        assert torch.equal(m2.state_dict()[k], t), k
    assert o2.state_dict()["param_groups"] == o.state_dict()["param_groups"]
    for i, st in o.state_dict()["state"].items():
        assert all(torch.equal(o2.state_dict()["state"][i][k], v) for k, v in st.items())
    assert s2.state_dict() == s.state_dict()
    with torch.device("meta"):
        m3 = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    dcpd.load(f"main:{name}", into={"model": m3})
    assert all(torch.equal(m3.state_dict()[k], t) for k, t in m.state_dict().items())
    whole = torch.nn.Linear(4, 8)
    dcpd.load(f"main:{name}", into={"model": {"0.weight": whole.weight, "0.bias": whole.bias}})
    assert torch.equal(whole.weight, m[0].weight) and whole.weight.requires_grad


def test_meta_tensors_become_real(at):
    name = lib.fresh()
    dcpd.save({"m": {"w": torch.arange(6.0).view(2, 3)}}, f"main:{name}")
    target = {"m": {"w": torch.empty(2, 3, device="meta")}}
    dcpd.load(f"main:{name}", into=target)
    assert target["m"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(dcpd.StateDictMismatch, match="w: a meta tensor"):
        dcpd.save({"w": torch.empty(2, device="meta")}, f"main:{lib.fresh()}")


def test_keys_and_strict(at):
    name = lib.fresh()
    dcpd.save({"model": {"a": torch.ones(2), "ab": torch.ones(3)}, "lr": 0.5}, f"main:{name}")
    assert dcpd.load(f"main:{name}", keys=["model.a", "lr"]).keys() == {"model", "lr"}
    assert list(dcpd.load(f"main:{name}", keys=["model.a"])["model"]) == ["a"]
    assert list(dcpd.load(f"main:{name}", keys=["model"])["model"]) == ["a", "ab"]
    with pytest.raises(dcpd.MissingKey, match="nope"):
        dcpd.load(f"main:{name}", keys=["model.a", "nope"])
    target = {"model": {"a": torch.zeros(2), "x": torch.zeros(1), "y": torch.zeros(1)}, "lr": 0.0, "more": 1}
    with pytest.raises(dcpd.MissingKey) as e:
        dcpd.load(f"main:{name}", into=target)
    assert all(k in str(e.value) for k in ("model.x", "model.y", "more"))
    assert not target["model"]["a"].any()
    dcpd.load(f"main:{name}", into=target, strict=False)
    assert target["model"]["a"].all() and not target["model"]["x"].any() and target["lr"] == 0.5 and target["more"] == 1
    with pytest.raises(dcpd.StateDictMismatch, match="model.a"):
        dcpd.load(f"main:{name}", into={"model": {"a": torch.zeros(3)}})
    half = {"model": {"a": torch.zeros(2, dtype=torch.float16)}, "lr": 0.0}
    dcpd.load(f"main:{name}", into=half, keys=["model"])
    assert half["model"]["a"].tolist() == [1, 1] and half["lr"] == 0.0


def test_values_that_are_empty_in_place(at):
    sd = {"b": b"", "s": "", "t": (), "l": [], "set": set(), "n": None, "": {"": ""}}
    ref = f"main:{lib.fresh()}"
    dcpd.save(sd, ref)
    into = {**dict.fromkeys(sd, 1), "": {"": 1}}
    dcpd.load(ref, into=into)
    assert into == sd and dcpd.load(ref) == sd


def test_values_longer_than_expected(at):
    name = lib.fresh()
    text = "x" * 3_000_000
    dcpd.save({"v": text}, f"main:{name}")
    assert dcpd.load(f"main:{name}", into={"v": ""})["v"] == text
    assert dcpd.load(f"main:{name}")["v"] == text


def test_overwrite_and_exists(at):
    name = lib.fresh()
    dcpd.save({"x": 1}, f"main:{name}")
    with pytest.raises(dcpd.CheckpointExists) as e:
        dcpd.save({"x": 2}, f"main:{name}")
    assert isinstance(e.value, FileExistsError) and e.value.code == "checkpoint_exists"
    with pytest.raises(dcpd.CheckpointExists):
        dcpd.async_save({"x": 2}, f"main:{name}")
    dcpd.save({"x": 3}, f"main:{name}", overwrite=True)
    assert dcpd.load(f"main:{name}") == {"x": 3}
    with pytest.raises(dcpd.NotFound):
        dcpd.load(f"main:{lib.fresh()}")
    with pytest.raises(dcpd.NotFound):
        dcpd.load("nowhere:x")


def test_metrics_are_in_the_record(at, caplog):
    names = [f"{lib.fresh()}/step-3" for _ in range(2)]
    metrics = {"loss": torch.tensor(1.5), "diverged": float("nan")}
    dcpd.save({"x": torch.zeros(4)}, f"main:{names[0]}", metrics=metrics)
    dcpd.async_save({"x": torch.zeros(4)}, f"main:{names[1]}", metrics=metrics).result(60)
    for n in names:
        assert at.api.get(at.api.storage_path("main", n)).ok(200)["metrics"] == {"loss": 1.5}
    assert sum("diverged" in r.getMessage() for r in caplog.records) == 2


def test_async_save_is_a_snapshot(at):
    t = torch.arange(1 << 22, dtype=torch.float32)
    want = t.clone()
    names = [lib.fresh() for _ in range(5)]
    handles = []
    for i, n in enumerate(names):
        handles.append(dcpd.async_save({"t": t, "i": i}, f"main:{n}", step=i, labels={"run": "r"}))
        assert handles[-1].snapshotted
        t += 1
    for i, (n, h) in enumerate(zip(names, handles)):
        job = h.result(60)
        assert h.done() and h.durable and job["state"] == "succeeded" and job["labels"] == {"run": "r", "step": str(i)}
        assert h.progress["bytes_done"] == h.progress["bytes_total"] and n in repr(h)
        got = dcpd.load(f"main:{n}")
        assert torch.equal(got["t"], want + i) and got["i"] == i

    async def one():
        return await dcpd.async_save({"x": 1}, f"main:{lib.fresh()}")

    assert asyncio.run(one())["state"] == "succeeded"
    dcpd.wait(10)
    sds = [s for s in at.api.get("/v1/state-dicts").ok(200)["state_dicts"] if s["name"].startswith("py-")]
    assert len(sds) == 1, "one state dict serves all saves"
    slots = at.api.get(f"/v1/state-dicts/{sds[0]['name']}").ok(200)["ranks"][0]["slots"]
    assert len(slots) in (1, 2) and {s["state"] for s in slots} == {"free"}, "a second one where a save outlasts the next step's start"
    dcpd.close()
    assert not [s for s in at.api.get("/v1/state-dicts").ok(200)["state_dicts"] if s["name"].startswith("py-")]


def test_structure_that_changes(at):
    """Slots are used again; what was in them before must not show."""
    for i, sd in enumerate([{"a": torch.ones(5000)}, {"a": torch.ones(5000), "b": torch.zeros(3)}, {"b": torch.ones(3)}, {"b": 1}, {},
                            {"a": torch.ones(50000).double()}, {"b": "x" * 10000}]):
        name = lib.fresh()
        dcpd.save(sd, f"main:{name}")
        got = dcpd.load(f"main:{name}")
        assert got.keys() == sd.keys(), i
        for k, v in sd.items():
            assert torch.equal(got[k], v) if isinstance(v, torch.Tensor) else got[k] == v, (i, k)


def test_what_pytorch_reads(at):
    import torch.distributed.checkpoint as dcp

    name = lib.fresh()
    sd = {"model": {"w": torch.randn(4, 3), "h": torch.randn(3).bfloat16()}, "o": [{"lr": 0.1, "betas": (0.9, 0.99)}], "e": Anything(3)}
    dcpd.save(sd, f"main:{name}")
    got = {"model": {"w": torch.zeros(4, 3), "h": torch.zeros(3).bfloat16()}, "o": [{"lr": 0.0, "betas": ()}], "e": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(got, checkpoint_id=str(at.storages["main"] / name))
        dcp.save(sd, checkpoint_id=str(at.storages["main"] / (name + "-t")))
    assert same(got["model"]["w"], sd["model"]["w"]) and same(got["model"]["h"], sd["model"]["h"])
    assert got["o"] == sd["o"] and got["e"] == sd["e"]
    back = dcpd.load(f"main:{name}-t", weights_only=False)
    assert same(back["model"]["w"], sd["model"]["w"]) and back["o"] == sd["o"] and back["e"] == sd["e"]


def test_import_is_cheap_and_connects_to_nothing():
    code = ("import sys, dcpd, threading; assert not {'torch', 'numpy', 'http.client', 'asyncio'} & set(sys.modules), 'too much'; "
            "assert threading.active_count() == 1")
    env = {"PYTHONPATH": str(pathlib.Path(dcpd.__file__).parents[1]), "DCPD_URL": "unix:///nowhere"}
    r = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


def test_no_daemon_is_said_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("DCPD_URL", f"unix://{tmp_path}/nothing")
    with pytest.raises(dcpd.NoDaemon, match="DCPD_URL"):
        dcpd.save({}, "main:x")
    with pytest.raises(ConnectionError):
        dcpd.connect()


@pytest.mark.parametrize("method, path, body", [("GET", "/v1/jobs", None), ("POST", "/v1/jobs", {})])
def test_a_socket_that_we_may_not_enter_any_more(at, monkeypatch, method, path, body):
    """A daemon that starts anew makes its socket before it says who may enter; for long it stays closed only if that is meant."""
    t = dcpd.connect(f"unix://{at.socket}")._t
    calls, real = [], t._once
    t.request("GET", "/v1/jobs")

    def once(refusals):
        def f(*args):
            calls.append(args)
            if len(calls) <= refusals:
                raise PermissionError(13, "Permission denied")
            return real(*args)
        return f

    monkeypatch.setattr(t, "_once", once(1))
    assert t.raw(method, path, body).status == (200 if body is None else 422) and len(calls) == 2
    calls.clear()
    monkeypatch.setattr(t, "_once", once(1000))
    with pytest.raises(dcpd.Forbidden, match="allow-group"):
        t.raw(method, path, body)
    assert len(calls) == 2
