"""The checkpoint plugin for Lightning without Lightning, of which it needs one empty class: what it removes, what it leaves to policies.
With Lightning itself: test_integrations.py."""
import logging
import sys
import types

import harness as lib
import pytest
import torch

import dcpd


@pytest.fixture
def plugin(monkeypatch):
    for name in ("lightning", "lightning.fabric", "lightning.fabric.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lightning.fabric.plugins"].CheckpointIO = type("CheckpointIO", (), {})
    monkeypatch.delitem(sys.modules, "dcpd.lightning", raising=False)
    import dcpd.lightning

    yield dcpd.lightning.DcpdCheckpointIO
    sys.modules.pop("dcpd.lightning", None)


def saved(io, run, n=3):
    for i in range(n):
        io.save_checkpoint({"state_dict": {"w": torch.full((10,), float(i))}, "global_step": i, "epoch": i}, f"main:{run}/step-{i}")
    io.teardown()


def there(client, run):
    return {c["name"].rpartition("/")[2] for c in client.runs.get(f"main:{run}")["checkpoints"]}


def test_removals_are_left_to_a_policy_of_the_run(own, plugin, caplog):
    own()
    caplog.set_level(logging.INFO, "dcpd")
    client, run = dcpd.connect(), lib.fresh("lightning")
    io = plugin()
    saved(io, run)
    io.remove_checkpoint(f"main:{run}/step-0")
    io.teardown()
    assert there(client, run) == {"step-1", "step-2"}, "no policy is for the run"
    client.policies.put("other", "main", "else*", {"last": 1}, confirm=True)
    client.policies.put("keeps", "main", run[:-2] + "*", {"last": 50})
    io.remove_checkpoint(f"main:{run}/step-1")
    io.teardown()
    assert there(client, run) == {"step-1", "step-2"} and "the policy keeps decides" in caplog.text
    always, never = plugin(removes=True), plugin(removes=False)
    never.remove_checkpoint(f"main:{run}/step-1")
    never.teardown()
    assert there(client, run) == {"step-1", "step-2"} and "removes=False" in caplog.text
    always.remove_checkpoint(f"main:{run}/step-1")
    always.teardown()
    assert there(client, run) == {"step-2"}
    client.policies.delete("keeps")
    client.policies.delete("other")
    assert torch.equal(io.load_checkpoint(f"main:{run}/step-2")["state_dict"]["w"], torch.full((10,), 2.0))
