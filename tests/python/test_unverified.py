"""What nothing could be compared with is said by every way to read. PyTorch can leave CRC32s out, and its .metadata has no digest."""
import harness as lib
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lib_direct import always, direct, like, same  # noqa: F401

import dcpd

STATE = {"w": torch.arange(30_000, dtype=torch.float32).reshape(100, 300), "v": torch.ones(7)}


@pytest.fixture
def without(at):
    """A checkpoint of PyTorch's without CRC32s."""
    ref = f"main:{lib.fresh()}"
    kept = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({**STATE, "step": 3}, checkpoint_id=str(at.storages["main"] / ref[5:]), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(kept)
    return ref


@pytest.fixture
def usual(at):
    ref = f"main:{lib.fresh()}"
    dcp.save({**STATE, "step": 3}, checkpoint_id=str(at.storages["main"] / ref[5:]), no_dist=True)
    return ref


def test_loads_warn(at, without, usual, always, recwarn):  # noqa: F811
    with pytest.warns(UserWarning, match="neither a digest nor a CRC32"):
        same(dcpd.load(without), STATE)
    into = like(STATE)
    with direct(at) as seen, pytest.warns(UserWarning, match="neither digest nor CRC32"):
        dcpd.load(without, into=into)
    same(into, STATE)
    assert seen.boxes == 2
    recwarn.clear()
    same(dcpd.load(without, verify=False), STATE)
    same(dcpd.load(usual), STATE)
    dcpd.load(usual, into=like(STATE))
    assert not [w for w in recwarn if "CRC32" in str(w.message)], "what was not to be checked, or was, is not worth a word"


def test_slices_count(at, without, usual):
    metadata = {ref: (at.storages["main"] / ref[5:] / ".metadata").stat().st_size for ref in (without, usual)}
    for ref, more in ((without, STATE["w"].nbytes), (usual, 0)):
        t = dcpd.open(ref)["w"]
        assert torch.equal(t[3:5], STATE["w"][3:5])
        assert metadata[ref] + more <= t.unverified <= metadata[ref] + more * 2
    ours = f"main:{lib.fresh()}"
    dcpd.save(STATE, ours)
    t = dcpd.open(ours)["w"]
    assert torch.equal(t[3:5], STATE["w"][3:5]) and t.unverified == 0
