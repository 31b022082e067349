"""What PyTorch stores and dcpd has no name for: it is written and read all the same, and each half by itself."""
import dataclasses
import json
import os
import pickle
import shutil

import harness as lib
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dropin import load, path, same, save, state  # noqa: F401
from test_dropin_more import Half
from torch.distributed.checkpoint.metadata import StorageMeta

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
HALVES = [(StorageWriter, dcp.FileSystemReader), (dcp.FileSystemWriter, StorageReader), (StorageWriter, StorageReader)]
HALVES[2] = pytest.param(*HALVES[2], marks=pytest.mark.slow)
halves = pytest.mark.parametrize("writer, reader", HALVES, ids=["ours-theirs", "theirs-ours", "ours-ours"])


def unusual():
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "conj": torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.complex64).conj(),
        "neg": torch.complex(torch.ones(2), torch.arange(2.0)).conj().imag, "view": base[1:3, ::2], "flipped": base.t(),
        "expanded": torch.ones(1, 3).expand(4, 3), "many": torch.arange(4.0).reshape([1] * 10 + [2, 2]),
        "bool": torch.tensor([True, False]),
        "f8": torch.arange(4.0).to(torch.float8_e4m3fn), "parameter": torch.nn.Parameter(torch.arange(5.0)), "zero": torch.empty(3, 0, 2),
        "u16": torch.arange(3).to(torch.uint16), "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }


@halves
def test_tensors_of_all_kinds(path, writer, reader):  # noqa: F811
    sd = unusual()
    save(sd, writer(path))
    new = load({k: torch.zeros_like(t.detach().resolve_conj().resolve_neg().float() if k == "f8" else t.detach()) for k, t in sd.items()},
               reader(path))
    for k, t in sd.items():
        assert torch.equal(new[k].detach(), t.detach().float() if k == "f8" else t.detach()), k


@halves
def test_quantized(path, writer, reader):  # noqa: F811
    sd = {"q": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.quint8), "w": torch.ones(4)}
    save(sd, writer(path))
    new = load({"q": torch.quantize_per_tensor(torch.zeros(6), 0.5, 1, torch.quint8), "w": torch.zeros(4)}, reader(path))
    assert torch.equal(new["q"].dequantize(), sd["q"].dequantize()) and new["w"].all()


@halves
def test_another_dtype_than_the_metadata_say(path, writer, reader):  # noqa: F811
    sd = {"w": torch.randn(100, 100), "v": {"a": 1}}
    save(sd, writer(path), planner=Half())
    got = load({"w": torch.zeros(100, 100), "v": {"a": 0}}, reader(path))
    assert torch.equal(got["w"], sd["w"].bfloat16().float()) and got["v"] == {"a": 1}


@halves
def test_objects(path, writer, reader):  # noqa: F811
    class Counter:
        def __init__(self, n):
            self.n = n

        def state_dict(self):
            return {"n": self.n, "t": torch.full((2,), float(self.n))}

        def load_state_dict(self, sd):
            self.n = sd["n"] + int(sd["t"].sum())

    sched = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), lambda e: 0.5**e)
    sched.optimizer.step()
    sched.step()
    sd = {"c": Counter(5), "sched": sched.state_dict(), "rng": torch.get_rng_state(), "tuple": (1, "x"), "none": None, "s": {1, 2}}
    save(sd, writer(path))
    new = {"c": Counter(0), "sched": {k: None for k in sd["sched"]}, "rng": torch.zeros_like(sd["rng"]), "tuple": None, "none": 3,
           "s": set()}
    counter = new["c"]
    load(new, reader(path))
    assert new["c"] is counter and counter.n == 15 and new["sched"]["last_epoch"] == 1
    assert torch.equal(new["rng"], sd["rng"]) and new["tuple"] == (1, "x") and new["none"] is None and new["s"] == {1, 2}


def test_files_that_are_links(path):  # noqa: F811
    save(state(), dcp.FileSystemWriter(path))
    os.rename(path / "__0_0.distcp", path.parent / "elsewhere")
    (path / "__0_0.distcp").symlink_to(path.parent / "elsewhere")
    same(load(state(1), StorageReader(path)), state())


def test_a_file_that_is_not_asked_for_is_gone(path):  # noqa: F811
    sd = {"a": torch.arange(5.0), "b": torch.arange(7.0)}
    save(sd, StorageWriter(path, single_file_per_rank=False))
    (path / "__0_1.distcp").unlink()
    assert torch.equal(load({"a": torch.zeros(5)}, StorageReader(path))["a"], sd["a"])
    with pytest.raises(dcp.CheckpointException, match="__0_1.distcp"):
        load({"b": torch.zeros(7)}, StorageReader(path))


# ---- paths ----


@pytest.fixture
def aside(tmp_path, monkeypatch):
    """A path under a daemon of its own: directories become storages here. In the end nothing of what was replaced is left."""
    d = lib.Daemon(tmp_path / "own")
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    yield d.storages["main"] / lib.fresh()
    dcpd.close()
    try:
        lib.wait_for(lambda: not d.staging(), 10, "nothing is left")
    finally:
        d.discard()


def test_a_checkpoint_in_another(aside):
    """As the parts of a training state are laid by some; each may be saved anew, and the other stays."""
    path, inner = aside, aside / "optim" / "0"
    for i in range(2):
        save(state(i), StorageWriter(path))
        save(state(i + 5), StorageWriter(inner))
        same(load(state(9), dcp.FileSystemReader(path)), state(i))
        same(load(state(9), StorageReader(inner)), state(i + 5))
        same(load(state(9), dcp.FileSystemReader(inner)), state(i + 5))
    (path / "model.safetensors").write_bytes(b"")
    save(state(7), StorageWriter(path / "sub"))
    same(load(state(9), StorageReader(path / "sub")), state(7))


def test_below_a_hidden_directory(aside):
    for deep in (aside / ".cache" / "x", aside / "-a" / "x", aside / "/".join("d" * 20)):
        save(state(), StorageWriter(deep))
        same(load(state(9), StorageReader(deep)), state())
        same(load(state(9), dcp.FileSystemReader(deep)), state())


@pytest.mark.parametrize("name", [".hidden", "-rf", "new\nline", "x" * 220])
def test_a_name_that_dcpd_lacks(path, name):  # noqa: F811
    """It cannot be written, which is said; what PyTorch wrote there is read."""
    there = path.parent / name
    with pytest.raises(dcp.CheckpointException, match="name") as e:
        save(state(), StorageWriter(there))
    assert any(isinstance(x[0] if isinstance(x, tuple) else x, dcpd.RequestRefused) for x in e.value.failures.values())
    save(state(), dcp.FileSystemWriter(there))
    try:
        same(load(state(1), StorageReader(there)), state())
    finally:
        shutil.rmtree(there)


@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize("hurt", ["payload", "cut", b"." * 40, b"\x80\x02}.", b"\0" * 40, os.urandom(40)],
                         ids=["payload", "cut", "stops", "dict", "zeros", "noise"])
def test_damage_is_never_loaded(at, path, monkeypatch, hurt, direct):  # noqa: F811
    """Reading item by item is for what is unusual, not for what is broken. A load needs nothing of an archive but the payload, which has
    a digest in the manifest; verify finds the rest."""
    monkeypatch.setenv("DCPD_DIRECT", str(direct))
    sd = {"w": torch.arange(100_000.0)}
    save(sd, StorageWriter(path))
    at.drop(*lib.ours(at))  # or it would be loaded from memory
    (info,) = pickle.loads((path / ".metadata").read_bytes()).storage_data.values()
    data = bytearray((path / "__0_0.distcp").read_bytes())
    if hurt == "payload":
        data[info.offset + info.length // 2] ^= 1
    elif hurt == "cut":
        data = data[:info.offset + info.length // 2]
    else:
        data[info.offset:info.offset + len(hurt)] = hurt  # a point ends a pickle: PyTorch's unpickler has nothing to return then
    (path / "__0_0.distcp").write_bytes(data)
    with pytest.raises(dcpd.CheckpointDamaged) as e:
        dcpd.connect().jobs.run("verify", source=f"main:{path.name}")
    assert e.value.problem["damage"][0]["file"] == "__0_0.distcp", e.value.problem
    if type(hurt) is bytes:
        same(load({"w": torch.zeros(100_000)}, StorageReader(path)), sd)
        return
    with pytest.raises(dcp.CheckpointException, match="w") as e:
        load({"w": torch.zeros(100_000)}, StorageReader(path))
    (inner,) = [x[0] if isinstance(x, tuple) else x for x in e.value.failures.values()]
    assert isinstance(inner, dcpd.CheckpointDamaged) and inner.file == "__0_0.distcp", inner


# ---- what is beside the tensors ----


def test_storage_meta_is_one(path):  # noqa: F811
    w = StorageWriter(path)
    md = save(state(), w)
    want = StorageMeta(checkpoint_id=str(path), save_id=w.save_id)
    assert w.storage_meta() == dataclasses.replace(want, checkpoint_id=path)
    raw = pickle.loads((path / ".metadata").read_bytes())
    assert type(raw.storage_meta) is StorageMeta and raw.storage_meta == want and raw.version == md.version == "1.0.0"
    for reader in (dcp.FileSystemReader(path), StorageReader(path)):
        assert reader.read_metadata().storage_meta == dataclasses.replace(want, load_id=reader.load_id)
    first = w.save_id
    save(state(), w, checkpoint_id=path)
    assert w.save_id != first and dcp.FileSystemReader(path).read_metadata().storage_meta.save_id == w.save_id


def test_a_storage_meta_of_ones_own(path):  # noqa: F811
    class Mine(StorageWriter):
        def storage_meta(self):
            return Own(checkpoint_id="x", save_id=self.save_id, note="n")

    save(state(), Mine(path))
    assert dcp.FileSystemReader(path).read_metadata().storage_meta.note == "n"


@dataclasses.dataclass
class Own(StorageMeta):
    note: str = ""


def test_properties_are_those_of_pytorch(path):  # noqa: F811
    sd = {"t": torch.ones(3, 4).t(), "p": torch.nn.Parameter(torch.ones(2)), "l": [1, {"x": torch.ones(1)}]}
    theirs = path.parent / f"{path.name}-theirs"
    save(sd, StorageWriter(path))
    save(sd, dcp.FileSystemWriter(theirs))
    a, b = (dcp.FileSystemReader(p).read_metadata() for p in (path, theirs))
    assert a.planner_data == b.planner_data and a.state_dict_metadata.keys() == b.state_dict_metadata.keys()
    for k, x in a.state_dict_metadata.items():
        y = b.state_dict_metadata[k]
        assert type(x) is type(y) and getattr(x, "chunks", None) == getattr(y, "chunks", None)
        if hasattr(x, "size"):
            assert x.size == y.size and dataclasses.replace(x.properties, strides=None) == dataclasses.replace(y.properties, strides=None)
    assert {k.fqn: k for k in a.storage_data} == {k.fqn: k for k in b.storage_data}
    assert json.loads((path / ".dcpd.json").read_text())["kind"] == "save"
