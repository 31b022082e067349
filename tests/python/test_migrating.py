"""The table for users of torch.distributed.checkpoint, line by line as code: the right column does what the left one did."""
import warnings

import harness as lib
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import dcpd
import dcpd.torch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained(seed=0):
    torch.manual_seed(seed)
    m = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    o = torch.optim.AdamW(m.parameters(), lr=0.01 + seed)
    m(torch.randn(3, 6)).sum().backward()
    o.step()
    return m, o


def both(m, o):
    model, optim = get_state_dict(m, o)
    return {"model": model, "optim": optim}


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        if isinstance(a[k], dict):
            same(a[k], b[k])
        elif isinstance(a[k], torch.Tensor):
            assert torch.equal(a[k], b[k]), k
        else:
            assert a[k] == b[k], k


@pytest.fixture
def path(at):
    return str(at.storages["main"] / lib.fresh())


def job_of(path):
    name = path.rsplit("/", 1)[1]
    return dcpd.connect().jobs.list(filter=f'target="main:{name}"')


def test_unchanged_but_for_install(at, path):
    sd = both(*trained())
    dcpd.torch.install()
    try:
        dcp.save(sd, checkpoint_id=path)
        into = both(*trained(1))
        dcp.load(into, checkpoint_id=path)
    finally:
        dcpd.torch.uninstall()
    same(into, sd)
    assert [j["kind"] for j in job_of(path)] == ["save"]
    other = path + "-plain"
    dcp.save(sd, checkpoint_id=other)
    assert not job_of(other), "uninstall took it back"


def test_writer_and_reader(at, path):
    sd = both(*trained())
    dcp.save(sd, storage_writer=dcpd.torch.StorageWriter(path, True, False, 2))
    into = both(*trained(1))
    dcp.load(into, storage_reader=dcpd.torch.StorageReader(path))
    same(into, sd)


def test_functions_and_back(at, path):
    """The files are the same: each side reads what the other wrote."""
    sd = both(*trained())
    dcpd.save(sd, path)
    theirs = both(*trained(1))
    dcp.load(theirs, checkpoint_id=path)
    same(theirs, sd)
    h = dcpd.async_save(sd, path + "-async")
    assert h.result(60)["state"] == "succeeded"
    dcp.save(sd, checkpoint_id=path + "-theirs")
    for where in (path, path + "-async", path + "-theirs"):
        into = both(*trained(1))
        assert dcpd.load(where, into=into) is into
        same(into, sd)


def test_get_and_set_state_dict(at, path):
    m, o = trained()
    dcpd.save(both(m, o), path)
    m2, o2 = trained(1)
    sd = dcpd.load(path, into=both(m2, o2))
    set_state_dict(m2, o2, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
    same(both(m2, o2), both(m, o))
    m3, o3 = trained(2)
    app = {"model": m3, "optim": o3}
    dcpd.save({"model": m, "optim": o}, path + "-objects")
    dcpd.load(path + "-objects", into=app)
    same(both(m3, o3), both(m, o))


def test_parts_and_one_file(at, path, tmp_path):
    sd = both(*trained())
    dcp.save(sd, checkpoint_id=path)
    theirs = _load_state_dict_from_keys({"model"}, checkpoint_id=path)
    same(dcpd.load(path, keys=["model"]), theirs)
    dcp_to_torch_save(path, tmp_path / "theirs.pt")
    torch.save(dcpd.load(path), tmp_path / "ours.pt")
    theirs, ours = (torch.load(tmp_path / f"{x}.pt") for x in ("theirs", "ours"))
    same(ours, theirs)
    torch_save_to_dcp(tmp_path / "ours.pt", path + "-theirs")
    dcpd.save(torch.load(tmp_path / "ours.pt"), path + "-ours")
    same(dcpd.load(path + "-ours"), dcpd.load(path + "-theirs"))


def test_partial_and_metadata(at, path):
    dcpd.save({"w": torch.ones(2)}, path)
    with pytest.raises(dcpd.MissingKey):
        dcpd.load(path, into={"w": torch.zeros(2), "new": torch.zeros(1)})
    into, theirs = ({"w": torch.zeros(2), "new": torch.full((1,), 5.0)} for _ in range(2))
    dcpd.load(path, into=into, strict=False)
    dcp.load(theirs, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    same(into, theirs)
    meta = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert set(dcpd.open(path)) == set(meta) and dcpd.open(path)["w"].shape == tuple(meta["w"].size)


def test_what_is_different(at, path):
    sd = {"w": torch.ones(2), "a": np.arange(3)}
    dcpd.save(sd, path)
    with pytest.raises(FileExistsError):
        dcpd.save(sd, path)
    dcpd.save(sd, path, overwrite=True)
    assert dcpd.open(path)["a"].dtype == "int64", "numpy's arrays are tensors"
    (file,) = (at.storages["main"] / path.rsplit("/", 1)[1]).glob("*.distcp")
    data = bytearray(file.read_bytes())
    i = data.index(torch.ones(2).numpy().tobytes())
    data[i] ^= 1
    file.write_bytes(data)
    dcp.load({"w": torch.zeros(2)}, checkpoint_id=path)
    at.drop(*lib.ours(at))  # what was saved is loaded from memory as long as it lies there
    with pytest.raises(dcpd.CheckpointDamaged):
        dcpd.load(path)


def test_safetensors_and_numpy(at):
    """The manual's lines for users of safetensors and of numpy."""
    name = lib.fresh()
    sd = {"model": {"w": torch.randn(7, 3, dtype=torch.bfloat16), "b": torch.arange(3.0)}, "lr": 0.1}
    dcpd.save(sd, f"main:{name}")
    client = dcpd.connect()
    job = client.jobs.run("reshard", source=f"main:{name}", target={"storage": "main", "name": name + "-st", "format": "safetensors"})
    assert job["result"]["dropped"] == ["lr"]
    (file,) = (at.storages["main"] / (name + "-st")).glob("*.safetensors")
    got = safetensors.torch.load_file(file)
    assert torch.equal(got["model.w"], sd["model"]["w"]) and torch.equal(got["model.b"], sd["model"]["b"])
    assert torch.equal(dcpd.load(f"main:{name}-st")["model.w"], sd["model"]["w"])
    dcpd.save(got, f"main:{name}-back")
    assert torch.equal(dcpd.load(f"main:{name}-back")["model.w"], sd["model"]["w"])
    client.jobs.run("load", source=f"main:{name}", target=f"shm:{name}")
    with dcpd.attach(f"shm:{name}", as_numpy=True) as view:
        assert view["model.b"].tolist() == [0, 1, 2] and not view["model.b"].flags.writeable and view["lr"] == 0.1
        with safetensors.safe_open(view.file, "pt") as f:
            assert torch.equal(f.get_tensor("model.w"), sd["model"]["w"])
            assert {k for k in f.keys() if not k.startswith("__dcpd_pad__/")} == {"model.w", "model.b"}
    client.state_dicts.delete(name)


def test_no_warning_on_the_way(at, path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcpd.save(both(*trained()), path)
        dcpd.load(path, into=both(*trained(1)))
        dcpd.load(path)
