"""Checkpoints that DeepSpeed itself trained and saved: dcpd reads what zero_to_fp32.py and ds_to_universal.py make of them, bit for bit;
and tests/lib/zero_files.py writes files with the keys that they have."""
import json

import dcpd as lib
import deepspeed_python as deepspeed
import pytest
import torch
import zero_files
from ports import free_port
from safetensors.torch import load_file

HERE = {"storage": "main"}
pytestmark = [pytest.mark.long, pytest.mark.seconds(900)]


def train(folder, stage, dtype, world):
    port = free_port()
    deepspeed.ended([deepspeed.start("train", folder, stage, dtype, rank=r, world=world, port=port) for r in range(world)])


@pytest.mark.parametrize("stage, dtype, world", [pytest.param(1, "fp32", 3, marks=pytest.mark.slow), (2, "bf16", 2), (3, "fp32", 4),
                                                 pytest.param(3, "bf16", 2, marks=pytest.mark.slow)])
def test_what_deepspeed_saved(d, tmp_path, stage, dtype, world):
    name, main = lib.fresh(), d.storages["main"]
    train(main / name, stage, dtype, world)
    deepspeed.run("judge", main / name, tmp_path / "judge")
    deepspeed.run("universal", main / name / "global_step3", main / f"{name}u" / "global_step3_universal")
    assert d.api.run("verify", source={**HERE, "name": name}, level="digest")["result"]["unverified_bytes"] == 0
    d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": f"{name}.safetensors", "format": "safetensors"})
    got = load_file(main / f"{name}.safetensors")
    want = torch.load(tmp_path / "judge", weights_only=True)
    assert len(want) >= 12
    for fqn, t in want.items():
        assert got[fqn].dtype == t.dtype and torch.equal(got[fqn], t), fqn
    compare_universal(main / f"{name}u", got)
    assert d.api.run("diff", a={**HERE, "name": name}, b={**HERE, "name": f"{name}u"})["result"]["equal"]
    keys = json.loads((tmp_path / "judge.json").read_text())
    ours = {"model": zero_files.model_states(stage, world, 0, [{"w": torch.ones(3)}], {}, {}, {}),
            "optim": zero_files.optim_states(stage, world, 0, [{"w": torch.ones(3)}], 1, True, False)}
    for kind, state in ours.items():
        assert set(state) <= set(keys[kind]), kind


def compare_universal(folder, got):
    """Each state of each optimized parameter is what DeepSpeed merged; the rest of its files are copies of the 16-bit model."""
    seen = 0
    for path in (folder / "global_step3_universal" / "zero").glob("*/*.pt"):
        name = path.parent.name
        value = torch.load(path, weights_only=True)
        value = value["param"] if isinstance(value, dict) else value
        fqn = name if path.stem == "fp32" else f"optim.{path.stem}.{name}"
        if f"optim.exp_avg.{name}" in got:
            assert torch.equal(got[fqn].reshape(-1), value.detach().reshape(-1)), fqn
            seen += 1
    assert seen >= 3 * 8
