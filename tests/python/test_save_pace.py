"""pace= and DCPD_PACE: what a job is asked for. What it does then is tests/worker/test_pace.py's."""
import harness as lib
import pytest
import torch
from torch.distributed.checkpoint import save as dcp_save

import dcpd
from dcpd.torch import StorageWriter

STATE = {"w": torch.arange(6.0), "n": 3}


def pace_of(job):
    return dcpd.connect().jobs.get(job)["spec"]["options"]["pace"]


@pytest.mark.parametrize("asked,default,want", [
    (None, None, "full"), ("background", None, "background"), (None, "background", "background"), ("full", "background", "full"),
    (None, "", "full")])
def test_what_is_asked_for(at, monkeypatch, asked, default, want):
    monkeypatch.delenv("DCPD_PACE", raising=False)
    if default is not None:
        monkeypatch.setenv("DCPD_PACE", default)
    name = lib.fresh()
    assert dcpd.save(STATE, f"main:{name}", pace=asked)["spec"]["options"]["pace"] == want
    h = dcpd.async_save(STATE, f"main:{name}-2", pace=asked)
    h.result()
    assert pace_of(h.job_id) == want
    assert torch.equal(dcpd.load(f"main:{name}-2")["w"], STATE["w"])


def test_a_word_that_is_none(at, monkeypatch):
    with pytest.raises(ValueError, match="pace='slow': one of full, background"):
        dcpd.async_save(STATE, f"main:{lib.fresh()}", pace="slow")
    monkeypatch.setenv("DCPD_PACE", "Full")
    with pytest.raises(ValueError, match="DCPD_PACE='Full'"):
        dcpd.save(STATE, f"main:{lib.fresh()}")


def test_the_drop_in_has_the_environments(at, monkeypatch):
    for pace in ("background", None):
        if pace:
            monkeypatch.setenv("DCPD_PACE", pace)
        else:
            monkeypatch.delenv("DCPD_PACE", raising=False)
        w = StorageWriter(f"main:{lib.fresh()}")
        dcp_save(STATE, storage_writer=w, no_dist=True)
        jobs = [j for j in dcpd.connect().jobs.list() if j["labels"].get("save_id") == w.save_id]
        assert [pace_of(j["id"]) for j in jobs] == [pace or "full"]
