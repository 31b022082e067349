"""A checkpoint that is known to be damaged: who reads what is whole of it hears of it, who verifies it gets the list."""
import os
import pickle
import warnings

import harness as lib
import pytest
import torch
from lib_direct import item

import dcpd


@pytest.fixture
def damaged(at):
    """A reference whose tensor `bad` has a flipped bit; large enough to be read directly."""
    ref = f"main:damaged/{lib.fresh()}"
    dcpd.save({"good": torch.arange(1 << 20, dtype=torch.float32), "bad": torch.zeros(1 << 20), "lr": 0.5}, ref)
    dcpd.close()  # or it would be loaded from memory
    file, offset = item(at, ref, "bad")
    path = at.storages["main"] / ref[5:] / file
    st = path.stat()
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(b"\x10")
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
    return ref


def verify(ref):
    with dcpd.connect() as client, pytest.raises(dcpd.CheckpointDamaged) as e:
        client.jobs.run("verify", source=ref, level="digest")
    return e.value


def heard(call):
    """The warnings about damage, and whether each names this file."""
    with warnings.catch_warnings(record=True) as got:
        warnings.simplefilter("always")
        call()
    return [w.filename == __file__ for w in got if "damaged" in str(w.message)]


def test_reads_of_what_is_known_to_be_damaged_warn(damaged):
    into = {"good": torch.empty(1 << 20)}
    reads = [lambda: dcpd.load(damaged, keys=["good"]), lambda: dcpd.load(damaged, into=into), lambda: dcpd.open(damaged)]
    assert [heard(r) for r in reads] == [[], [], []], "nobody has looked yet"
    e = verify(damaged)
    assert e.code in ("checkpoint_damaged", "digest_mismatch") and e.file
    assert [bool(x) and all(x) for x in map(heard, reads)] == [True, True, True]
    assert torch.equal(into["good"], torch.arange(1 << 20, dtype=torch.float32))
    with pytest.raises(dcpd.CheckpointDamaged):
        dcpd.load(damaged)
    with pytest.warns(UserWarning, match=f"dcpctl job {e.job}` lists what"):
        assert "damaged (digest, " in repr(dcpd.open(damaged))


def test_the_list_survives_pickling():
    damage = [{"fqn": "w", "rank": 1, "file": "__1_0.distcp", "offset": 4096, "bytes": 16, "part": "payload"}]
    e = dcpd.errors.from_problem({"code": "checkpoint_damaged", "title": "The checkpoint is damaged", "damage": damage, "damage_count": 7})
    assert isinstance(e, dcpd.CheckpointDamaged) and (e.damage, e.damage_count) == (damage, 7)
    again = pickle.loads(pickle.dumps(e))
    assert (again.damage, again.damage_count) == (damage, 7)
    assert dcpd.CheckpointDamaged("x").damage == [] and dcpd.CheckpointDamaged("x").damage_count == 0
