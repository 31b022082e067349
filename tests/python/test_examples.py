"""The examples do what they say: go on after a crash, with the same numbers as a run that never crashed."""
import pathlib
import re

import harness as lib
import pytest
from conftest import PACKAGE, program_environment
from ports import free_port

import dcpd

EXAMPLES = pathlib.Path(PACKAGE) / "examples"


@pytest.fixture
def start(d, forks):
    def run(name, *args, **env):
        return forks.start(EXAMPLES / name, *args, env=program_environment(d, **env))

    return run


def finish(p, rc=0):
    out, err = p.communicate(timeout=100)
    assert p.returncode == rc, f"rc {p.returncode}\n{out}\n{err}"
    return out


@pytest.mark.long
def test_single_process(d, start):
    ref = f"main:{lib.fresh()}"
    finish(start("single.py", ref, "--steps", "10"))
    out = finish(start("single.py", ref, "--steps", "20"))
    assert "goes on from step 10" in out
    whole = finish(start("single.py", ref + "-whole", "--steps", "20"))
    assert re.search(r"step 20, loss .*", out)[0] == re.search(r"step 20, loss .*", whole)[0]
    shared = finish(start("sharing.py", ref + "/step-20"))
    sums = re.findall(r"sum (-?\d+\.\d{6})", shared)  # three processes write
    assert len(sums) == 3 and len(set(sums)) == 1, shared


def ranks(start, n, ref, *args, rc=0, program="fsdp2.py"):
    port = str(free_port())
    ps = [start(program, ref, *args, RANK=str(r), WORLD_SIZE=str(n), LOCAL_RANK=str(r), LOCAL_WORLD_SIZE=str(n),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for r in range(n)]
    return [finish(p, rc) for p in ps][0]


@pytest.mark.long
@pytest.mark.seconds(240)
def test_fsdp2_crashes_on_four_ranks_and_goes_on_with_two(d, start):
    ref = f"main:{lib.fresh()}"
    ranks(start, 4, ref, "--crash-at", "7", rc=13)
    c = dcpd.connect(f"unix://{d.socket}")
    lib.wait_for(lambda: c.checkpoints.exists(ref + "/step-6"), 20, "the save of the dead")
    out = ranks(start, 2, ref)
    assert "goes on from step 6 on 2 ranks" in out
    a = dcpd.load(ref + "/step-9", client=c)
    assert a["step"] == 9 and a["model"]["0.weight"].shape == (48, 16)
    assert c.checkpoints.get(ref + "/step-3")["world_size"] == 4 and c.checkpoints.get(ref + "/step-9")["world_size"] == 2


@pytest.mark.slow
@pytest.mark.seconds(400)
def test_loop_like_torchtitans(d, start):
    """Four ranks, FSDP2 over tensor parallelism, crash; two ranks without it end where one run over four would."""
    ref = f"main:{lib.fresh()}"
    ranks(start, 4, ref, "--tp", "2", "--crash-at", "9", "--interval", "2", rc=13, program="titan.py")
    c = dcpd.connect(f"unix://{d.socket}")
    lib.wait_for(lambda: c.checkpoints.exists(ref + "/step-8"), 20, "the save of the dead")
    names = {x["name"].rsplit("/", 1)[1] for x in c.checkpoints.list("main", prefix=ref[5:] + "/")}
    assert {"step-8", "step-6"} <= names <= {"step-8", "step-6", "step-4"}, "the newest two are kept"
    out = ranks(start, 2, ref, program="titan.py")
    assert "goes on from step 8, 64 tokens, on 2 ranks" in out
    whole = ranks(start, 2, ref + "-whole", program="titan.py")
    a, b = (float(re.search(r"step 12, loss (\S+)", x)[1]) for x in (out, whole))
    assert abs(a - b) < 1e-3 * b, (out, whole)
    got = dcpd.load(ref + "/step-12", client=c)
    assert got["train_state"] == {"step": 12, "ntokens_seen": 96} and got["dataloader"]["at"] == 12
