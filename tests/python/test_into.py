"""load(into=) in groups: what comes, what fails, and a daemon that is restarted in the middle of it."""
import threading
import time

import harness as lib
import numpy as np
import on_ranks
import pytest
import torch
from test_ranks import FOUR, TWO

import dcpd
from dcpd import _into, client


@pytest.fixture
def groups(monkeypatch):
    """Two tensors of a kilobyte make a group."""
    monkeypatch.setattr(_into, "GROUP_MIN", 2048)


def state(n=20, value=1.0):
    return {"m": {f"t{i}": torch.full((16, 16), value * i) for i in range(n)}, "values": {"step": 7, "pair": (1, 2)}}


def zeros(n=20):
    sd = state(n, 0.0)
    sd["values"] = {"step": 0, "pair": None}
    return sd


def loads(d):
    return {j["id"] for j in d.api.get("/v1/jobs?page_size=100").ok(200)["jobs"] if j["kind"] == "load"}


def check(sd, n=20):
    assert sd["values"] == {"step": 7, "pair": (1, 2)}
    for i in range(n):
        assert sd["m"][f"t{i}"].eq(i).all(), i


def own_state_dicts(d):
    return [s["name"] for s in d.api.get("/v1/state-dicts").ok(200)["state_dicts"]]


def test_a_large_load_goes_in_groups(at, groups, monkeypatch):
    ref = f"main:{lib.fresh()}"
    dcpd.save(state(), ref)
    dcpd.close()
    before = loads(at)
    sd = zeros()
    places = [t.data_ptr() for t in sd["m"].values()]
    dcpd.load(ref, into=sd)
    check(sd)
    assert [t.data_ptr() for t in sd["m"].values()] == places
    assert len(loads(at) - before) == 10 and not own_state_dicts(at)
    monkeypatch.setattr(_into, "GROUPS_MAX", 3)
    before = loads(at)
    sd = zeros()
    dcpd.load(ref, into=sd)
    check(sd)
    assert 3 <= len(loads(at) - before) <= 4
    dcpd.load(ref, into=zeros(), progress=True)
    dcpd.load(ref, into={"values": {"step": 0}})
    one_large = {"m": {"t1": torch.zeros(16, 16)}}
    monkeypatch.setattr(_into, "GROUP_MIN", 10)
    dcpd.load(ref, into=one_large)
    assert one_large["m"]["t1"].eq(1).all()


def test_what_is_missing_is_said_at_once(at, groups):
    ref = f"main:{lib.fresh()}"
    dcpd.save(state(), ref)
    sd = zeros()
    sd["m"].update(x=torch.zeros(2), y=torch.zeros(2))
    sd["values"]["z"] = 1
    with pytest.raises(dcpd.MissingKey) as e:
        dcpd.load(ref, into=sd)
    assert all(k in str(e.value) for k in ("m.x", "m.y", "values.z"))
    assert not any(t.any() for t in sd["m"].values()) and sd["values"]["step"] == 0
    dcpd.load(ref, into=sd, strict=False)
    del sd["values"]["z"]
    check(sd)
    assert not sd["m"]["x"].any()


def test_a_group_that_fails(at, groups):
    ref = f"main:{lib.fresh()}"
    dcpd.save(state(), ref)
    dcpd.close()
    for wrong in ("t0", "t9", "t19"):
        sd = zeros()
        sd["m"][wrong] = torch.zeros(3)
        with pytest.raises(dcpd.StateDictMismatch, match=wrong):
            dcpd.load(ref, into=sd)
    lib.wait_for(lambda: not own_state_dicts(at), 5, "the lanes")


def test_the_timeout_is_that_of_all_groups(at, groups, monkeypatch):
    ref = f"main:{lib.fresh()}"
    dcpd.save(state(), ref)
    real, asked = client.Jobs.wait, []

    def wait(self, job, timeout=None, **kw):
        asked.append(timeout)
        time.sleep(0.02)
        return real(self, job, timeout, **kw)

    monkeypatch.setattr(client.Jobs, "wait", wait)
    dcpd.load(ref, into=zeros(), timeout=30)
    assert asked[0] == 30 and asked == sorted(asked, reverse=True) and 20 < asked[-1] < 29.9


@pytest.mark.long
def test_ranks_with_groups_of_their_own(ranks, d):
    ref = f"main:{lib.fresh()}"
    ranks(on_ranks.save_tensors, ref, FOUR)
    for least in (1, 64):
        ranks(on_ranks.in_groups, least, on_ranks.load_tensors, ref, FOUR)
        ranks(on_ranks.in_groups, least, on_ranks.load_tensors, ref, TWO, world=2)
    wishes = [{"plain": (3, 2)}, {"plain": (3, 2), "few": (2, 3), "rep": (4, 4)}, {"scalar": (), "one_d": (9,), "two": (5, 7)}, {}]
    assert ranks(on_ranks.in_groups, 1, on_ranks.load_some, ref, wishes) == [sorted(w) for w in wishes]
    wishes[3]["nope"] = (1,)
    for e in ranks(on_ranks.in_groups, 1, on_ranks.load_some, ref, wishes, check=False):
        assert isinstance(e, dcpd.MissingKey) and "nope" in str(e)


# ---- a daemon that is restarted ----


MOMENTS = {"reserve": (client.StateDicts, "reserve"), "seal": (client.StateDicts, "seal"), "submit": (client.Jobs, "create"),
           "wait": (client.Jobs, "wait"), "release": (client.StateDicts, "release")}


@pytest.mark.long
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_daemon_restarted(spawn, monkeypatch, groups, moment, when, nth):
    d = spawn()
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    dcpd.save(state(), "main:a")
    thing, name = MOMENTS[moment]
    real, calls, timers = getattr(thing, name), [], []

    def restart():
        d.kill()
        timers.append(threading.Timer(0.3, d.start))
        timers[0].start()

    def wrapped(*args, **kw):
        calls.append(1)
        if len(calls) == nth and when == "before":
            restart()
        out = real(*args, **kw)
        if len(calls) == nth and when == "after":
            restart()
        return out

    monkeypatch.setattr(thing, name, wrapped)
    sd = zeros()
    try:
        dcpd.load("main:a", into=sd)
    finally:
        [t.join(30) for t in timers]
    check(sd)
    assert timers
    dcpd.close()
    lib.wait_for(lambda: not d.leaks(), 10, "no leaks")


def test_the_state_dict_vanishes(spawn, monkeypatch):
    """As if the lease had ended: once it is made again, twice it is an error."""
    d = spawn()
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    dcpd.save(state(), "main:a")
    real, left = client.StateDicts.seal, [1]

    def seal(self, name, *args, **kw):
        if left[0]:
            left[0] -= 1
            self.delete(name)
        return real(self, name, *args, **kw)

    monkeypatch.setattr(client.StateDicts, "seal", seal)
    sd = zeros()
    dcpd.load("main:a", into=sd)
    check(sd)
    left[0] = 2
    start = time.monotonic()
    with pytest.raises(dcpd.NotFound, match="vanished twice"):
        dcpd.load("main:a", into=zeros())
    assert time.monotonic() - start < 20 * lib.PATIENCE
    dcpd.close()


# ---- what cannot be filled ----


def read_only(n):
    a = np.zeros(n, np.float32)
    a.flags.writeable = False
    return a


UNFILLABLE = {"expanded": lambda: torch.zeros(1, 600).expand(500, 600), "array": lambda: read_only(300_000),
              "small array": lambda: read_only(30), "broadcast": lambda: np.broadcast_to(np.float32(0), (7, 3)),
              "expanded parameter": lambda: torch.nn.Parameter(torch.zeros(())).expand(9)}


@pytest.mark.parametrize("direct", ["0", "1"])
@pytest.mark.parametrize("what", UNFILLABLE)
def test_what_cannot_be_filled(at, monkeypatch, what, direct):
    """Elements that lie in one place, and memory that may not be written: said with the key, and nothing has been changed."""
    monkeypatch.setenv("DCPD_DIRECT", direct)
    bad, ref = UNFILLABLE[what](), f"main:{lib.fresh()}"
    dcpd.save({"a": torch.ones(100_000), "bad": torch.ones(tuple(bad.shape)), "step": 7}, ref)
    sd = {"a": torch.zeros(100_000), "bad": bad, "step": 0}
    with pytest.raises(dcpd.StateDictMismatch, match="^bad: .*(lie in one place|read-only)") as e:
        dcpd.load(ref, into=sd)
    assert e.value.fqn == "bad" and sd["step"] == 0 and not sd["a"].any() and not bad.any()
    del sd["bad"]
    dcpd.load(ref, into=sd)
    assert sd["step"] == 7 and sd["a"].all()


# ---- what PyTorch before 2.4 wrote ----


def blank(x):
    if isinstance(x, dict):
        return {k: blank(v) for k, v in x.items()}
    if isinstance(x, list):
        return [blank(v) for v in x]
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else None


@pytest.mark.parametrize("strict", [True, False])
def test_containers_that_were_stored_whole(at, strict):
    """Mappings and lists without a tensor were one value each then."""
    ref = "golden:torch-2.2.2/nested_v23/checkpoint"
    want = dcpd.load(ref)
    sd = blank(want)
    groups, dicts = sd["optim"]["param_groups"], sd["list_of_dicts"]
    assert isinstance(groups[0], dict) and isinstance(dicts[1], dict)
    dcpd.load(ref, into=sd, strict=strict)
    assert repr(sd) == repr(want) and sd["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
    part = blank({k: want[k] for k in ("optim", "list_of_dicts")})
    dcpd.load(ref, into=part, keys=["optim"], strict=strict)
    assert repr(part["optim"]) == repr(want["optim"]) and part["list_of_dicts"] == [{"a": None}, {"b": None}]
    sd = {**blank(want), "more": {"x": 1}}
    if strict:
        with pytest.raises(dcpd.MissingKey, match=r"more\.x") as e:
            dcpd.load(ref, into=sd)
        assert "param_groups" not in str(e.value) and not sd["model"]["scale"]
    else:
        dcpd.load(ref, into=sd, strict=False)
        assert repr(sd) == repr({**want, "more": {"x": 1}})


@pytest.mark.parametrize("strict", ["both", "0", "1", ""])
def test_containers_that_were_stored_whole_come_to_all_ranks(ranks, strict):
    ref = "golden:torch-2.2.2/nested_v23/checkpoint"
    a, b = ranks(on_ranks.load_older, ref, strict, world=2)
    assert a["optim"]["param_groups"] == b["groups"] and b["groups"][0]["lr"] == 0.001 and a["optim"]["state"][1]["step"] == 3
