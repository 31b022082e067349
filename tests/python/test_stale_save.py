"""A save that changes no tensor is flagged: trainings have saved one state for weeks, and every save succeeded."""
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpd
from dcpd.torch import StorageWriter


def flagged(c, name, save):
    """Saves, and says of which save the job has all tensors; the warnings of Python and of the job say the same."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        save(f"main:{name}")
    files = {w.filename for w in seen if "every tensor" in str(w.message)}
    assert all(f == __file__ or "/torch/distributed/" in f for f in files), files  # who called the package, not a thread of its own
    job = c.jobs.list(filter=f"target=main:{name} AND kind=save")[0]
    result = c.jobs.get(job["id"])["result"]
    codes = [w["code"] for w in result.get("warnings", [])]
    assert "tensors_digest" not in result
    assert codes == (["stale_save"] if "same_tensors_as" in result else [])
    return result.get("same_tensors_as", {}).get("name"), [str(w.message) for w in seen if "every tensor" in str(w.message)]


def metric(d):
    return sum(float(line.split()[-1]) for line in d.api.get("/metrics").body.decode().splitlines()
               if line.startswith("dcpd_stale_saves_total"))


def test_a_training_that_saves_a_copy(own):
    d = own()
    c = dcpd.connect()
    model = torch.nn.Linear(20, 30)
    optim = torch.optim.Adam(model.parameters())

    def train():
        model(torch.randn(4, 20)).sum().backward()
        optim.step()

    def save(ref):
        dcpd.save({"model": model.state_dict(), "optim": optim.state_dict(), "step": ref}, ref)

    train()
    assert flagged(c, "run1/step-1", save) == (None, [])
    train()
    assert flagged(c, "run1/step-2", save) == (None, [])
    for state in optim.state.values():   # a count goes on, and nothing else
        state["step"] += 1
    name, said = flagged(c, "run1/step-3", save)
    assert name == "run1/step-2" and len(said) == 1 and "run1/step-3" in said[0] and "run1/step-2" in said[0]
    assert metric(d) == 1
    job = c.jobs.list(filter="target=main:run1/step-3")[0]
    events = d.api.get(f"/v1/jobs/{job['id']}/events").body.decode()
    assert "checkpoint.stale" in events and '"same_tensors_as"' in events
    shown = d.ctl("job", job["id"])
    assert "run1/step-2" in shown.stdout + shown.stderr
    assert flagged(c, "run2/step-1", save)[0] is None     # the first of another run
    d.kill()
    d.start()
    assert flagged(c, "run1/step-4", save)[0] == "run1/step-3"
    with torch.no_grad():
        model.bias[7] += 1e-3
    assert flagged(c, "run1/step-5", save)[0] is None
    assert metric(d) == 1                                  # since the restart


@pytest.mark.parametrize("name", ["same/name", "alone"])
def test_a_name_that_is_saved_again(own, name):
    own()
    c = dcpd.connect()
    x, one = torch.randn(100), torch.tensor(3.0)

    def save(ref):
        dcpd.save({"x": x}, ref, overwrite=True)

    assert flagged(c, name, save)[0] is None
    stale, said = flagged(c, name, save)
    assert stale == name and "the former" in said[0]
    x[3] = 9
    assert flagged(c, name, save)[0] is None
    dcpd.save({"one": one}, "main:counts/1")
    assert flagged(c, "counts/2", lambda ref: dcpd.save({"one": one}, ref))[0] is None      # nothing but single numbers


def test_the_drop_in(own):
    own()
    c = dcpd.connect()
    sd = {"w": torch.randn(1 << 20), "lr": 0.1}

    def save(ref):
        dcp.save(sd, storage_writer=StorageWriter(ref))

    assert flagged(c, "drop/1", save)[0] is None
    sd["lr"] = 0.2
    assert flagged(c, "drop/2", save)[0] == "drop/1"
    sd["w"][-1] += 1
    assert flagged(c, "drop/3", save)[0] is None
