"""options.pace: a background job does the same with little CPU time at a time, and hears what the coordinator says while it rests."""
import os
import time

import pytest

import dcpd as lib
from gang import Gang, Segments, at

MIB = 1 << 20
BYTES = 96 * MIB  # of each of two ranks
SHARE = 0.02  # of a core, per worker: worker/io/pace.h
PACED = 0.2  # of the CPU time, at least: plan, pages and commit take the rest at once; a job without pace comes to SHARE


@pytest.fixture(scope="module")
def state():
    s = Segments([lib.image({f"w{r}": ("U8", (BYTES,), bytes(range(r, r + 64)) * (BYTES // 64))}) for r in range(2)])
    yield s
    s.close()


def saving(name, pace=None):
    return {"source": {"state_dict": "train", "generation": 1}, "target": at(name), "options": {"pace": pace} if pace else {}}


@pytest.fixture(scope="module")
def full(gang, state):
    """The checkpoint of a save that did not say how fast."""
    assert gang.job("save", saving("full"), {"train": state}).kind == "DONE"
    return at("full")


def cpu(gang):
    """Seconds of each worker, its threads included."""
    out = []
    for w in gang.workers:
        tasks = [f"/proc/{w.proc.pid}/task/{t}/schedstat" for t in os.listdir(f"/proc/{w.proc.pid}/task")]
        out.append(sum(int(open(t).read().split()[0]) for t in tasks) / 1e9)
    return out


def timed(gang, kind, spec, state_dicts=None):
    """(wall seconds, CPU seconds of the busier worker)"""
    before, start = cpu(gang), time.monotonic()
    end = gang.job(kind, spec, state_dicts)
    assert end.kind == "DONE", end.body
    return time.monotonic() - start, max(b - a for a, b in zip(before, cpu(gang)))


@pytest.mark.long
def test_a_save_is_the_same_and_takes_little(gang, roots, state, full):
    wall, used = timed(gang, "save", saving("slow", "background"), {"train": state})
    assert wall > used / SHARE * PACED, (wall, used)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (roots["out"] / "slow" / name).read_bytes() == (roots["out"] / "full" / name).read_bytes()
    # a job has the pace that it asks for, not that of the one before; what else runs here may be slow, too
    assert any(timed(gang, "save", saving(f"again{i}"), {"train": state})[0] < wall / 2 for i in range(5))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["verify", "load", "reshard"])
def test_other_kinds(gang, full, kind):
    more = {"verify": {"level": "digest"}, "load": {"target": {"state_dict": "x", "world_size": 1}},
            "reshard": {"target": {**at("cut"), "world_size": 3}}}[kind]
    wall, used = timed(gang, kind, {"source": full, "options": {"pace": "background"}, **more})
    assert wall > used / SHARE * PACED, (wall, used)
    gang.made.close()


def test_cancel_while_it_rests(roots, state):
    sent = []

    def cancel(g, i, f):
        if f.type == "PROGRESS" and f.body.get("bytes_done") and not sent:
            sent.append((time.monotonic(), f.body["bytes_done"]))
            for w in g.workers:
                w.send("CANCEL", g.generation, {})
        return False

    with Gang(2, roots, on=cancel) as g:
        end = g.job("save", saving("never", "background"), {"train": state})
        assert end.kind == "FAILED" and end.body["code"] == "cancelled", end.body
        assert sent[0][1] < 2 * BYTES / 2 and time.monotonic() - sent[0][0] < 1  # it had more than a second to go
        assert not (roots["out"] / "never").exists()
