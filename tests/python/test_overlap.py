"""async_save(overlap=True): parameters and optimizer state are copied while training goes on; the state at the call is saved."""
import threading
import types

import harness as lib
import numpy as np
import on_overlap
import pytest
import torch
from on_overlap import SECONDS, backward, copies, differences, held_back, trained, waits

import dcpd
from dcpd import _copy, _overlap, _session, _tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def state(m, o):
    return {"model": m.state_dict(), "optim": o.state_dict()}


def save(sd, ref, **kw):
    return dcpd.async_save(sd, ref, overlap=True, **kw)


def late(h):
    """FQNs that the only copy under way is going to copy."""
    (c,) = _overlap._running
    return {i.fqn for i in c._items}


PARAMETERS = {"model.inner.weight", "model.outer.weight", *(f"optim.state.{i}.{k}" for i in (0, 4) for k in ("exp_avg", "exp_avg_sq"))}


@pytest.mark.parametrize("kind", ["state dicts", "objects", "wrapped"])
def test_what_a_forward_changes_is_copied_before(at, kind):
    m, o = trained()
    ref = f"main:{lib.fresh()}"
    wanted = copies(state(m, o))

    class Wrapped:
        def state_dict(self):
            return state(m, o)

        def load_state_dict(self, sd):
            raise AssertionError

    _overlap._searched.clear()
    with held_back() as go:
        h = save({"state dicts": state(m, o), "objects": {"model": m, "optim": o}, "wrapped": Wrapped()}[kind], ref)
        assert not h.snapshotted and late(h) == PARAMETERS
        before = copies(dict(m.named_buffers()))
        backward(m)
        assert len(differences(before, dict(m.named_buffers()))) == 4
        go.set()
        h.wait_snapshot(SECONDS)
    assert h.snapshotted
    o.step()
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []
    assert len(differences(wanted, state(m, o))) > 8, "the test changes what it saves"


def test_an_optimizer_is_found_that_nobody_names(at):
    m, o = trained()
    _overlap._optimizers.discard(o)
    _overlap._searched.clear()
    with held_back() as go:
        h = save(m.state_dict(), f"main:{lib.fresh()}")
        assert late(h) == {"inner.weight", "outer.weight"}
        go.set()
        h.result(SECONDS)


def test_tensors_that_are_no_parameters_are_copied_before(at):
    sd = {"t": torch.ones(1 << 16), "n": np.ones(1 << 16), "view": torch.ones(300, 300).t(), "frozen": torch.nn.Linear(300, 300).bias.data}
    with held_back():
        h = save(sd, f"main:{lib.fresh()}")
        assert h.snapshotted
        h.result(SECONDS)


@pytest.mark.parametrize("optimizer", [{}, dict(fused=True)])
def test_a_step_that_comes_too_early_waits(at, optimizer):
    """Fused steps leave no trace in version counters: the wait alone keeps them apart."""
    m, o = trained(torch.optim.Adam, **optimizer)
    ref, wanted = f"main:{lib.fresh()}", copies(state(m, o))
    with held_back() as go:
        h = save(state(m, o), ref)
        backward(m)
        waits(go, o.step)
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []


def test_steps_of_several_optimizers_wait(at):
    m, _ = trained()
    optimizers = [torch.optim.SGD(m.inner.parameters(), lr=1.0), torch.optim.AdamW(m.outer.parameters(), lr=1.0, foreach=True)]
    backward(m)
    ref, wanted = f"main:{lib.fresh()}", copies(m.state_dict())
    with held_back() as go:
        h = save({"model": m.state_dict(), "optim": [o.state_dict() for o in optimizers]}, ref)
        threads = [threading.Thread(target=o.step) for o in optimizers]
        for t in threads:
            t.start()
        threads[0].join(0.2)
        assert all(t.is_alive() for t in threads), "a step did not wait"
        go.set()
        for t in threads:
            t.join()
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)["model"]) == []
    assert differences(wanted, m.state_dict())


@pytest.mark.parametrize("moment", ["after the step", "before the step"])
def test_an_average_of_the_weights(at, moment):
    m, o = trained()
    ema = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    ema.update_parameters(m)
    backward(m)
    ref, wanted = f"main:{lib.fresh()}", copies({"model": m.state_dict(), "ema": ema.state_dict()})
    o.step()
    ema.update_parameters(m)
    m.load_state_dict(wanted["model"])
    ema.load_state_dict(wanted["ema"])
    with held_back() as go:
        h = save({"model": m, "ema": ema, "optim": o}, ref)
        assert "ema.module.inner.weight" in late(h)
        if moment == "after the step":
            threading.Timer(0.1, go.set).start()
            o.step()
            ema.update_parameters(m)
        else:
            ema.update_parameters(m)
            go.set()
            with pytest.raises(dcpd.TensorChanged, match="ema.module.inner.weight.*wait_snapshot") as e:
                h.result(SECONDS)
            assert e.value.fqn == "ema.module.inner.weight"
            return
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []


@pytest.mark.parametrize("optimizer", [dict(foreach=True), dict(foreach=False)])
def test_a_change_without_the_hook_fails_the_save(at, monkeypatch, optimizer):
    m, o = trained(torch.optim.AdamW, **optimizer)
    backward(m)
    ref = f"main:{lib.fresh()}"
    monkeypatch.setattr(_overlap.Copy, "wait", lambda self: None)
    with held_back() as go:
        h = save(state(m, o), ref)
        o.step()
        go.set()
        with pytest.raises(dcpd.TensorChanged, match="was changed while it was copied"):
            h.wait_snapshot(SECONDS)
        assert isinstance(h.exception(SECONDS), dcpd.TensorChanged) and not h.snapshotted and not h.durable
    c = dcpd.connect()
    (job,) = c.jobs.list(filter=f'target="{ref}"', limit=1)
    lib.wait_for(lambda: c.jobs.get(job.id).done, SECONDS, "its end")
    assert "was changed while it was copied" in c.jobs.get(job.id)["error"]["detail"]
    assert not c.checkpoints.exists({"storage": "main", "name": ref[5:]})
    dcpd.save(state(m, o), ref)  # neither the name nor a slot is held


def test_other_code_waits_by_itself(at):
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(m.state_dict())
    h = save(m.state_dict(), ref)
    h.wait_snapshot()
    with torch.no_grad():
        m.inner.weight.zero_()
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []


def test_waiting_has_a_limit(at):
    m, _ = trained()
    with held_back() as go:
        h = save(m, f"main:{lib.fresh()}")
        with pytest.raises(dcpd.WaitTimeout, match="0.01 s"):
            h.wait_snapshot(0.01)
        go.set()
        h.result(SECONDS)


def test_a_parameter_that_is_given_other_memory(at):
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(m.state_dict())
    with held_back() as go:
        h = save(dict(m.named_parameters()), ref)
        for p in m.parameters():
            p.data = torch.zeros_like(p)
        go.set()
        h.result(SECONDS)
    assert differences({k: wanted[k] for k, _ in m.named_parameters()}, dcpd.load(ref)) == []


def test_an_exception_in_training(at):
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(state(m, o))
    with held_back() as go, pytest.raises(ZeroDivisionError):
        h = save(state(m, o), ref)
        backward(m)
        threading.Timer(0.1, go.set).start()
        raise ZeroDivisionError
    assert h.result(SECONDS)["state"] == "succeeded"
    assert differences(wanted, dcpd.load(ref)) == []


@pytest.mark.parametrize("slots", [1, 2])
def test_saves_in_a_row(at, slots):
    """Each of its own moment; with one slot shared memory holds one snapshot."""
    m, o = trained()
    ref, wanted, handles = f"main:{lib.fresh()}", [], []
    for i in range(4):
        wanted.append(copies(state(m, o)))
        handles.append(save(state(m, o), f"{ref}-{i}", slots=slots))
        if i % 2:
            backward(m)
            o.step()
    (sd,) = [s for s in at.api.get("/v1/state-dicts").ok(200)["state_dicts"] if s["name"].startswith("py-")]
    assert len(at.api.get(f"/v1/state-dicts/{sd['name']}").ok(200)["ranks"][0]["slots"]) <= slots
    for i, h in enumerate(handles):
        assert h.result(SECONDS)["state"] == "succeeded"
        assert differences(wanted[i], dcpd.load(f"{ref}-{i}")) == []


def test_other_saves_between(at):
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(state(m, o))
    handles = [save(state(m, o), f"{ref}-0")]
    dcpd.save(state(m, o), f"{ref}-1")
    handles += [save(state(m, o), f"{ref}-2"), dcpd.async_save(state(m, o), f"{ref}-3")]
    for h in handles:
        h.result(SECONDS)
    for i in range(4):
        assert differences(wanted, dcpd.load(f"{ref}-{i}")) == [], i


def test_close_waits_for_the_copy(at):
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(state(m, o))
    with held_back() as go:
        h = save(state(m, o), ref)
        threading.Timer(0.1, go.set).start()
        dcpd.close()
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []


def test_a_daemon_without_early_jobs(at):
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(state(m, o))
    c = dcpd.connect()
    c.early = False
    h = save(state(m, o), ref, client=c)
    assert h.snapshotted
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []


def test_views_and_strides(at):
    """A parameter that lies in another's memory, and strided ones."""
    flat = torch.nn.Parameter(torch.arange(1 << 18, dtype=torch.float32))
    turned = torch.nn.Parameter(torch.randn(300, 200).t())
    o = torch.optim.SGD([flat, turned], lr=1.0)
    sd = {"a": flat.detach()[:1 << 17], "b": flat.detach()[1 << 17:].view(512, 256), "turned": turned.detach(),
          "half": turned.detach()[::2]}
    ref, wanted = f"main:{lib.fresh()}", copies(sd)
    with held_back() as go:
        h = save(sd, ref)
        assert late(h) == set(sd)
        go.set()
        for p in (flat, turned):
            p.grad = torch.ones_like(p)
        o.step()
    h.result(SECONDS)
    assert differences(wanted, dcpd.load(ref)) == []


def test_device_tensors_go_by_a_stream_of_their_own(at, monkeypatch):
    """Tensors of the CPU stand in for those of a device, with a module that notes what is asked of it."""
    seen = []

    class Stream:
        def __init__(self, device):
            seen.append("made")

        def wait_stream(self, other):
            seen.append(("waits for", other, threading.current_thread() is threading.main_thread()))

        def synchronize(self):
            seen.append("synchronized")

        def __enter__(self):
            seen.append("entered")

        def __exit__(self, *_):
            seen.append("left")

    module = types.SimpleNamespace(Stream=Stream, current_stream=lambda device: "the trainer's", stream=lambda s: s)
    real, bulk = _overlap._streams, _tensors.bulk_out
    monkeypatch.setattr(_tensors, "device_module", lambda device: module)
    monkeypatch.setattr(_overlap, "_streams", lambda tensors: real([types.SimpleNamespace(device=t.device, is_cpu=False) for t in tensors]))
    monkeypatch.setattr(_tensors, "memory", lambda t, spec: None)
    m, o = trained()
    ref, wanted = f"main:{lib.fresh()}", copies(state(m, o))
    with held_back() as go:
        h = save(state(m, o), ref)
        monkeypatch.setattr(_tensors, "bulk_out", lambda to, frm: (seen.append("copied"), bulk(to, frm))[1])
        assert seen[:2] == ["made", ("waits for", "the trainer's", True)]
        del seen[:]
        go.set()
        h.result(SECONDS)
    assert seen == ["entered", "copied", "left", "synchronized"]
    assert differences(wanted, dcpd.load(ref)) == []


TRAINER = """
import os, sys, threading, time
import torch, dcpd
from dcpd import _overlap
real = _overlap.Copy._some
def some(self, group):
    print("copying", flush=True)
    time.sleep(0.5)
    real(self, group)
_overlap.Copy._some = some
m = torch.nn.Linear(512, 512)
o = torch.optim.Adam(m.parameters())
with torch.no_grad():
    m.weight.fill_(7)
h = dcpd.async_save({"m": m}, sys.argv[1], overlap=True, at_exit=sys.argv[2])
if sys.argv[3] == "raise":
    raise ZeroDivisionError
if sys.argv[3] == "fork":
    pid = os.fork()
    if pid == 0:
        m(torch.ones(1, 512)).sum().backward()
        o.step()
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
if sys.argv[3] == "die":
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize("how,at_exit", [("return", "leave"), ("fork", "wait"), pytest.param("raise", "wait", marks=pytest.mark.long)])
def test_a_process_that_ends_while_it_copies(script, d, at_exit, how):
    ref = f"main:{lib.fresh()}"
    p = script(TRAINER, ref, at_exit, how, check=False)
    assert p.returncode == (how == "raise"), p.stderr
    c = dcpd.connect(f"unix://{d.socket}")
    if at_exit == "leave":
        lib.wait_for(lambda: c.checkpoints.exists({"storage": "main", "name": ref[5:]}), SECONDS, "the checkpoint")
    assert dcpd.load(ref, client=c)["m"]["weight"].eq(7).all()


def test_a_process_that_is_killed_while_it_copies(script, own):
    d = own()
    p = script(TRAINER, "main:killed", "wait", "die", wait=False, env={"DCPD_URL": f"unix://{d.socket}"})
    assert "copying" in p.stdout.readline()
    p.kill()
    p.communicate()
    c = dcpd.connect()
    (job,) = c.jobs.list(filter='target="main:killed"', limit=1)
    assert not job.done and not c.checkpoints.exists({"storage": "main", "name": "killed"})
    c.jobs.cancel(job.id)
    lib.wait_for(lambda: c.jobs.get(job.id).done, SECONDS, "its end")
    dcpd.save({"w": torch.ones(3)}, "main:killed")
    assert dcpd.load("main:killed")["w"].eq(1).all()


def test_a_daemon_that_is_restarted_meanwhile(own):
    """The save fails or is whole; the next one is."""
    d = own()
    m, o = trained()
    wanted = copies(state(m, o))
    with held_back() as go:
        h = save(state(m, o), "main:a")
        d.kill()
        d.start()
        go.set()
        try:
            h.result(SECONDS)
        except dcpd.DcpdError:
            pass
        else:
            assert differences(wanted, dcpd.load("main:a")) == []
    save(state(m, o), "main:b").result(SECONDS)
    assert differences(wanted, dcpd.load("main:b")) == []


@pytest.mark.parametrize("world", [2, 4])
def test_dtensors(ranks, world):
    assert ranks(on_overlap.dtensors, f"main:{lib.fresh()}", world=world) == [3] * world


@pytest.mark.parametrize("how", ["local", "dtensor"])
def test_a_change_on_one_rank_fails_the_save_on_all(ranks, how):
    a, b = ranks(on_overlap.changed_on_one_rank, f"main:{lib.fresh()}", how, world=2)
    assert b[:2] == ("TensorChanged", "m.rows"), b
    assert a[0] == "NotSealed" and "rank 1" in a[2] and "m.rows was changed while it was copied" in a[2], a


def test_ranks_that_differ_in_it_disagree(ranks):
    got = ranks(on_overlap.overlap_differs, f"main:{lib.fresh()}", world=2, check=False)
    assert all(isinstance(e, dcpd.RanksDisagree) and "overlap" in str(e) for e in got), got
