"""The integrations in an environment with the real frameworks; what needs none of them is here."""
import os
import pathlib
import subprocess

import harness as lib
import pytest
import safetensors
import torch

import dcpd
from dcpd import _exact

HERE = pathlib.Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.seconds(1800)
def test_integrations_with_the_real_packages():
    env = {k: v for k, v in os.environ.items() if k != "DCPD_TEST_VENV"}
    venv = subprocess.run([HERE.parent / "venv.sh", HERE.parent / "requirements.txt", HERE / "requirements-frameworks.txt"], env=env,
                          stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    r = subprocess.run([venv + "/bin/python", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", HERE / "test_integrations.py"],
                       capture_output=True, text=True)
    assert r.returncode == 0 and "skipped" not in r.stdout, r.stdout[-8000:] + r.stderr[-2000:]


def test_structure_that_flat_keys_lack_comes_back(at):
    """Numbers as keys, and containers without anything in them."""
    w = torch.ones(2)
    tree = {"optim": {"state": {0: {"step": w, "none": {}}, 1: {}}, "param_groups": [{"params": [0, 1], "betas": (0.9, 0.99)}]},
            "list": [{}, {"x": w}, {}], "flat": [], "deep": {"a.b": {2.5: {True: {None: 7}}}}, "empty": {}, "plain": {"k": 1}}
    name = f"main:{lib.fresh()}"
    dcpd.save(_exact.pack(tree), name)
    got = _exact.unpack(dcpd.load(name))
    assert repr(got["optim"]["state"]) == repr(tree["optim"]["state"])
    for k in ("list", "flat", "deep", "empty", "plain"):
        assert repr(got[k]) == repr(tree[k]), k
    assert got.keys() == tree.keys() and got["optim"]["param_groups"] == tree["optim"]["param_groups"]
    assert _exact.NOTES not in _exact.pack({"a": {"b": 1}}) and _exact.unpack({"a": 1}) == {"a": 1}
    part = _exact.unpack(dcpd.load(name, keys=["list", _exact.NOTES]), ["list"])
    assert part.keys() == {"list"}
    assert repr(part["list"]) == repr(tree["list"])


def test_safetensors_reads_files_and_segments(at):
    """What a reshard to safetensors writes, and a segment as it is: an image is a safetensors file."""
    w = torch.randn(5, 3, dtype=torch.bfloat16)
    name = lib.fresh()
    with pytest.raises(dcpd.RequestRefused, match="dcp"):
        dcpd.save({"w": w}, f"main:{name}", format="safetensors")
    dcpd.save({"w": w, "i": torch.arange(4)}, f"main:{name}-dcp")
    dcpd.connect().jobs.run("reshard", source=f"main:{name}-dcp",
                            target={"storage": "main", "name": name, "format": "safetensors", "world_size": 1})
    path = at.storages["main"] / name
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    assert files
    found = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as f:
            found.update({k: f.get_tensor(k) for k in f.keys()})
    assert torch.equal(found["w"], w) and torch.equal(found["i"], torch.arange(4))
    sd = lib.fresh()
    at.api.run("load", source={"storage": "main", "name": name + "-dcp"}, target={"state_dict": sd, "world_size": 1})
    slot = at.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"][0]["slots"][0]
    data = lib.segment_file(slot["segment"]).read_bytes()[:slot["image_bytes"]]
    tensors = dict(safetensors.deserialize(data))
    assert bytes(tensors["w"]["data"]) == bytes(w.view(torch.uint8).numpy()) and tensors["w"]["dtype"] == "BF16"
