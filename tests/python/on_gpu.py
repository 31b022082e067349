"""What the tests of device memory run, each in a process of its own: `on_gpu.py CASE REFERENCE …`. It prints a line of JSON."""
import gc
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import weakref

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "lib"))  # behind the package, whose name the harness has too

import fake_gpu  # noqa: E402
import torch  # noqa: E402

import dcpd  # noqa: E402
from dcpd import _copy, _handover, _into, _load, _overlap, _ring, _tensors  # noqa: E402

trainer = fake_gpu.Trainer()
put = fake_gpu.as_torch(trainer)
SECONDS = 60
said = []


class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


logging.getLogger("dcpd").addHandler(Said())
logging.getLogger("dcpd").propagate = False


def numbers(n, seed, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state(seed=0, shareable=True):
    """Large and small, of both kinds of memory; one that lies in no order that an image has; what is not on the device at all."""
    return {"model": {"legacy": put(numbers(1 << 20, seed)), "vmm": put(numbers(3000001, seed + 1, torch.bfloat16), True, shareable),
                      "small": put(numbers(25, seed + 2), vmm=True), "odd": put(numbers(3, seed + 3)),
                      "across": put(numbers(5000, seed + 4).view(50, 100)).t()},
            "host": numbers(1 << 18, seed + 5), "step": seed}


def host(sd):
    return {k: host(v) if isinstance(v, dict) else v.as_subclass(torch.Tensor).clone() if isinstance(v, torch.Tensor) else v
            for k, v in sd.items()}


def same(a, b):
    return all(same(a[k], b[k]) if isinstance(a[k], dict) else torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k]
               for k in {**a, **b})


def spoil(sd):
    for v in sd.values():
        if isinstance(v, dict):
            spoil(v)
        elif isinstance(v, torch.Tensor):
            v.zero_()


def wait(h):
    return h.result(SECONDS)["state"]


def save_and_load(ref):
    sd = state()
    wanted = host(sd)
    h = dcpd.async_save(sd, ref)
    assert h.snapshotted
    spoil(sd)  # the weights may change
    assert wait(h) == "succeeded" and same(dcpd.load(ref), wanted)
    dcpd.save(host(wanted), f"{ref}-host")
    waits = put.waits
    dcpd.load(f"{ref}-host", into=sd)
    assert same(host(sd), wanted)
    return waits, put.waits


def blocking(ref):
    sd = state(7)
    dcpd.save(sd, ref)
    assert same(dcpd.load(ref), host(sd))


def through_ring(ref, fail, *texts):
    """A save that blocks, of more than a step of its ring; the driver refuses in the middle if `fail` says so."""
    _copy.step, _ring.BYTES = lambda: 512 << 10, 4 << 20
    sd = {**state(7), "cpu": numbers(200001, 8), "scalars": {f"s{i}": put(numbers(1, i)) for i in range(20)},
          "array": numbers(300001, 9).numpy()}
    for i, text in enumerate(texts):
        pathlib.Path(fail).write_text(text)
        dcpd.save(sd, f"{ref}-{i}")
        got = dcpd.load(f"{ref}-{i}")
        assert (got.pop("array").numpy() == sd["array"]).all() and same(got, host({k: v for k, v in sd.items() if k != "array"})), text


def drop_in(ref, fail, *texts):
    """PyTorch's save, blocking through a segment and through a ring, and of a staged copy."""
    import torch.distributed.checkpoint as dcp
    from dcpd.torch import StorageWriter

    sd = {**state(7), "scalars": {f"s{i}": put(numbers(1, i)) if i % 3 else numbers(1, i) for i in range(30)}}
    wanted = host(sd)
    for i, text in enumerate(texts):
        pathlib.Path(fail).write_text(text)
        for way in ("whole", "staged", "ring"):
            if way == "ring":
                _copy.step, _ring.BYTES = lambda: 512 << 10, 4 << 20
            w = StorageWriter(f"{ref}-{i}-{way}")
            dcp.save(w.stage(sd) if way == "staged" else sd, storage_writer=w)
            assert same(dcpd.load(f"{ref}-{i}-{way}"), wanted), (text, way)


def unshareable(ref):
    """Memory without handles: torch copies, and the driver is not asked again."""
    sd = state(1, shareable=False)
    for i in range(2):
        wait(dcpd.async_save(sd, f"{ref}-{i}"))
        assert same(dcpd.load(f"{ref}-{i}"), host(sd))
    dcpd.load(f"{ref}-0", into=sd)
    assert same(host(sd), dcpd.load(f"{ref}-1"))


CALLS = ("cuPointerGetAttribute", "cuDeviceGet", "cuDeviceGetUuid_v2", "cuMemGetAddressRange_v2", "cuIpcGetMemHandle",
         "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuMemRelease")


def each_call(ref):
    """Every call of the driver that this process makes fails, with several errors: each save is sound, and says which call it was."""
    sd = state(3)
    for call in CALLS:
        for answer in (2, 201, 801):
            _handover._off.clear(), _handover._said.clear(), said.clear()
            os.environ["FAKE_CUDA_FAIL"] = f"{call}:0:{answer}"
            at = f"{ref}-{call}-{answer}"
            wait(dcpd.async_save(sd, at))
            os.environ["FAKE_CUDA_FAIL"] = ""
            assert len(said) == 1 and f"{call}: error {answer}" in said[0], (call, answer, said)
            assert same(dcpd.load(at), host(sd))
    said.clear(), _handover._off.clear()


def refused(ref, fail, text):
    """The driver refuses while the file `fail` says so; the next save is handed over."""
    sd = state(2)
    for i, now in enumerate((text, text, "")):
        pathlib.Path(fail).write_text(now)
        wait(dcpd.async_save(sd, f"{ref}-{i}"))
        assert same(dcpd.load(f"{ref}-{i}"), host(sd))


def several_lanes(ref):
    """A load in more groups than there are lanes."""
    _into.GROUP_MIN, opened, real = 4 << 20, [], _into._Run._open
    _into._Run._open = lambda self, n: (opened.append(n), real(self, n))[1]
    wanted = {f"w{i}": numbers(1 << 20, i) for i in range(8)}
    dcpd.save(wanted, ref)
    into = {k: put(torch.zeros_like(v)) for k, v in wanted.items()}
    into["w7"] = put(torch.zeros(1 << 20, dtype=torch.float64))  # cast on the device, of the stored dtype in the lane
    dcpd.load(ref, into=into)
    assert same({**host(into), "w7": into["w7"].float()}, wanted)
    return opened


def new_tensors(ref):
    """load(device="cuda"): of a whole checkpoint and of a part; a device without room leaves nothing behind."""
    made, real = [], _load._empty
    _load._empty = lambda x, device: (made.append(device), put(t) if (t := real(x, "cpu")).numel() else t)[1]
    wanted = {"model": {"w": numbers(3 << 20, 1), "b": numbers(5, 2), "none": torch.zeros(0, 4)}, "optim": {
        "state": {0: {"step": torch.tensor(3.0), "m": numbers(2 << 20, 3, torch.bfloat16)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    dcpd.save(wanted, ref)
    dcpd.close()
    got = dcpd.load(ref, device="cuda")
    assert same(got["model"], wanted["model"]) and same(got["optim"]["state"][0], wanted["optim"]["state"][0])
    assert got["optim"]["param_groups"] == wanted["optim"]["param_groups"] and got["model"]["w"].is_cuda and made == ["cuda"] * 5
    part = dcpd.load(ref, keys=["optim.state"], device="cuda")
    assert list(part) == ["optim"] and same(part["optim"]["state"]["0"], wanted["optim"]["state"][0])
    try:
        dcpd.load(ref, keys=["model.w", "nowhere"], device="cuda")
    except dcpd.MissingKey as e:
        assert e.fqn == "nowhere", e

    def no_room(x, device):
        raise torch.OutOfMemoryError("CUDA out of memory.") if hasattr(torch, "OutOfMemoryError") else RuntimeError("out of memory")

    _load._empty = no_room
    try:
        dcpd.load(ref, device="cuda")
        raise AssertionError("there was room")
    except RuntimeError as e:
        assert "out of memory" in str(e)
    return [x["name"] for x in dcpd.connect().state_dicts.list() if f"-{os.getpid()}-" in x["name"]]


def casts(ref, fail, *texts):
    """Loads into other dtypes than the stored ones: the narrower one goes over the bus. The driver refuses if `fail` says so."""
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 65519.0, 65520.0, 3.4e38, 448.0, 1.0005])
    stored = {"bf16": numbers(2 << 20, 1, torch.bfloat16), "half": numbers(1000, 2, torch.float16), "f32": numbers(1 << 20, 3), "odd": odd,
              "f8": numbers(4099, 4).to(torch.float8_e5m2), "odd16": odd.bfloat16(), "host": numbers(500, 5, torch.bfloat16),
              "long": torch.arange(50)}
    to = {"bf16": torch.float32, "half": torch.float64, "f32": torch.bfloat16, "odd": torch.float64, "f8": torch.float16,
          "odd16": torch.float16, "host": torch.float32, "long": torch.float32}
    dcpd.save(stored, ref)
    wanted = {k: v.to(to[k]) for k, v in stored.items()}
    for text in texts:
        pathlib.Path(fail).write_text(text)
        into = {k: torch.zeros(v.shape, dtype=to[k]) if k == "host" else put(torch.full(v.shape, 7.0).to(to[k])) for k, v in stored.items()}
        dcpd.load(ref, into=into)
        got = host(into)
        assert all(torch.equal(got[k].nan_to_num(5.0), wanted[k].nan_to_num(5.0)) for k in stored), text
        assert got["bf16"].dtype == torch.float32 and got["odd"].signbit().tolist()[:4] == odd.signbit().tolist()[:4]


def cast_on_save(ref, fail, *texts):
    """Chunks of another dtype than their tensors on the device, as a ShardedTensor may have them."""
    real = _tensors.describe
    _tensors.describe = lambda x: (d := real(x))._replace(
        keys=(keys := [(k[0], "bfloat16", k[2]) for k in d.keys]), specs=lambda: [_tensors._spec_of(k) for k in keys], outline=None)
    sd = {"a": put(numbers(2 << 20, 1)), "b": put(numbers(1 << 20, 2), vmm=True), "cpu": numbers(300000, 3)[:7]}
    wanted = {k: v.bfloat16() for k, v in host(sd).items()}
    for i, text in enumerate(texts):
        pathlib.Path(fail).write_text(text)
        h = dcpd.async_save(sd, f"{ref}-{i}")
        wait(h)
        assert same(dcpd.load(f"{ref}-{i}"), wanted), text


def by_rules(ref):
    """New tensors that conversion rules make, in more groups than there are lanes; and of a dtype that this torch lacks, in words."""
    real, opened, begin = _load._empty, [], _into._Run._open
    _load._empty = lambda x, device: put(real(x, "cpu"))
    _into.GROUP_MIN, _into._Run._open = 4 << 20, lambda self, n: (opened.append(n), begin(self, n))[1]
    wanted = {"old": {f"w{i}": numbers(1 << 20, i) for i in range(6)}, "kept": {"a": {"b": numbers(9, 7)}}, "old.step": 5,
              "half": numbers(9, 8)}
    dcpd.save(wanted, ref)
    rules = [{"match": "^old\\.", "rename": "new."}, {"match": "w[45]$", "dtype": "bfloat16"}, {"match": "^half$", "dtype": "float16"}]
    got = dcpd.load(ref, device="cuda", transform=rules)
    plain = dcpd.load(ref, transform=rules)  # into shared memory, by one job
    assert got["half"].is_cuda and got["kept"]["a"]["b"].is_cuda and plain["half"].dtype == torch.float16 and same(host(got), plain)
    assert [k for k in got] == [k for k in plain] and got["new.step"] == 5 and same(plain["kept"], wanted["kept"])
    part = dcpd.load(ref, keys=["kept"], device="cuda", transform=rules)
    assert list(part) == ["kept"] and same(part["kept"], wanted["kept"]) and not said
    try:
        dcpd.load(ref, device="cuda", transform=[{"match": "nowhere", "drop": True}])
        raise AssertionError("a rule that matches nothing")
    except dcpd.RequestRefused as e:
        assert "nowhere" in e.message, e.message
    assert same(host(dcpd.load(ref, keys=["half"], device="cuda", transform=[])), {"half": wanted["half"]})
    del _load._dtypes._torch_names[torch.float16]
    to = torch.Tensor.to
    torch.Tensor.to = lambda t, *a, **k: put(t) if a and a[0] == "cuda" else to(t, *a, **k)
    got = dcpd.load(ref, keys=["half"], device="cuda", transform=rules)
    assert bytes(got["half"].view(torch.uint8)) == bytes(wanted["half"].half().view(torch.uint8))
    return opened


def lost(ref, how, pid=0):
    """Loads to the device whose copy hangs in its worker. The call is interrupted ("goes_on": the worker goes on when the load waits for
    it; "hangs": it never does), or the daemon, process `pid`, is killed. Whether what was made for the load is still in memory."""
    made, real, deleted, client = [], _load._empty, dcpd.client.StateDicts.delete, dcpd.connect()
    _load._empty = lambda x, device: (t := put(real(x, "cpu")), made.append(weakref.ref(t)))[0]
    dcpd.save({"w": numbers(2 << 20, 1)}, ref)
    dcpd.load(ref, device="cuda")  # the worker is there
    worker = next(w["pid"] for w in workers(client))
    made.clear()

    def once_begun():
        while not any(w["state"] == "busy" for w in workers(client)):
            time.sleep(0.01)
        os.kill(int(pid), signal.SIGKILL) if pid else signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def delete(*args):
        if how == "goes_on":
            os.kill(worker, signal.SIGCONT)
        return deleted(*args)

    dcpd.client.StateDicts.delete = delete
    client._t.reconnect = 0.1
    _handover.OUTLAST = SECONDS if how == "goes_on" else 0.1
    os.kill(worker, signal.SIGSTOP)
    threading.Thread(target=once_begun).start()
    try:
        dcpd.load(ref, device="cuda", client=client)
        raise AssertionError("it was loaded")
    except (KeyboardInterrupt, dcpd.ConnectionLost) as e:
        raised = type(e).__name__
    gc.collect()
    kept = [t() is not None for t in made]
    if not pid:
        os.kill(worker, signal.SIGCONT)
    return raised, kept


def workers(client, role="device"):
    return [w for w in client._t.request("GET", "/v1/workers")["workers"] if w["role"] == role]


def overlapped(ref):
    _overlap._watchable = lambda torch, t: isinstance(t, torch.Tensor) and not t.is_meta
    weight, moved = put(numbers(2 << 20, 9)), put(numbers(2 << 20, 10))
    weight.requires_grad_()
    wanted = host({"weight": weight.detach(), "moved": moved})
    optimizer = torch.optim.SGD([weight], lr=1.0)
    h = dcpd.async_save({"weight": weight, "moved": moved}, ref, overlap=True)
    moved.zero_()  # no parameter: copied before
    h.wait_snapshot(SECONDS)
    with torch.no_grad():
        weight.zero_()
    assert wait(h) == "succeeded" and same(dcpd.load(ref), wanted)
    del optimizer


def checks(ref, *cases):
    """Cases of the check of a real GPU (tests/gpu/check.py): what they expect to be handed over is."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
    import check

    def placed(t):
        return put(t) if t.numel() else t

    def on(device, x):
        return {k: on(device, v) if isinstance(v, dict) else v if not isinstance(v, torch.Tensor) else
                placed(v.detach().clone()) if device == "cuda" else v.detach().as_subclass(torch.Tensor).clone() for k, v in x.items()}

    def blank(x):
        return {k: blank(v) if isinstance(v, dict) else placed(torch.zeros_like(v.as_subclass(torch.Tensor))) if isinstance(v, torch.Tensor)
                else None for k, v in x.items()}

    _load._empty, zeros = lambda x, device: placed(torch.empty(x.shape, dtype=_load._dtypes.to_torch(x.dtype))), torch.zeros
    torch.zeros = lambda *a, device=None, **k: placed(zeros(*a, **k)) if device == "cuda" else zeros(*a, **k)
    check.on, check.blank = on, blank
    check.same = lambda got, wanted, real=check.same: real(on("cpu", got), wanted)
    c = check.Check("cuda", 16)
    c.client, c.sync = dcpd.connect(), lambda: None
    c.program = [sys.executable, str(pathlib.Path(__file__).with_name("on_engine.py")), "checked"]
    c.free_memory = lambda: -fake_gpu.taken_by(w["pid"] for w in workers(c.client, "holder"))
    for case in cases:
        getattr(c, case)()
        assert not said, (case, said)


def little(ref):
    sd = {"w": put(numbers(1000, 3))}
    wait(dcpd.async_save(sd, ref))
    assert same(dcpd.load(ref), host(sd))


def no_room(ref):
    """Shared memory for a ring, but for no snapshot."""
    sd = {f"w{i}": put(numbers(4 << 20, i)) for i in range(6)}
    dcpd.save(sd, ref)
    dcpd.close()
    into = {k: torch.zeros_like(v) for k, v in host(sd).items()}
    assert same(dcpd.load(ref, into=into), host(sd))


out = globals()[sys.argv[1]](*sys.argv[2:])
left = sorted(_handover._off.values())
dcpd.close()
print(json.dumps({"out": out, "said": said, "off": left}))
