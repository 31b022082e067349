"""Lightning, transformers and accelerate themselves, on dcpd: a run that was resumed ends with the numbers of one that never stopped.

They are in an environment of their own (requirements-frameworks.txt): test_frameworks.py runs this file there, in make check-full.
"""
import gc
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import warnings

import harness as lib
import pytest
import torch
from conftest import PACKAGE
from ports import free_port

import dcpd

warnings.filterwarnings("ignore")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


@pytest.fixture
def folder(at):
    return at.storages["main"] / lib.fresh()


def equal(a, b):
    assert a.keys() == b.keys()
    for k in a:
        assert torch.equal(a[k], b[k]), k


# ------------------------------------------------------------------------------------------------------------ Lightning


def lightning_run(folder, epochs, ckpt_path=None, plugin=None, keep=None, **options):
    L = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dcpd.lightning import DcpdCheckpointIO

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def training_step(self, batch, i):
            loss = self.net(batch).pow(2).mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            o = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": o, "lr_scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5)}

    torch.manual_seed(0)
    net = Net()
    data = torch.utils.data.DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    keep = keep or ModelCheckpoint(dirpath=str(folder), save_top_k=1, monitor="loss", save_last=True, filename="{epoch}")
    plugin = plugin or DcpdCheckpointIO(**options)
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[keep], plugins=[plugin], default_root_dir=str(folder))
    trainer.fit(net, data, ckpt_path=ckpt_path)
    return trainer, net, keep


def there(folder):
    """What is in it, once what was removed or replaced has gone."""
    lib.wait_for(lambda: not list(folder.glob(".dcpd-trash-*")), 10, "the trash is empty")
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("options", [{}, {"wait": True}])
def test_lightning_resumes(at, folder, options):
    lightning_run(folder, 2, **options)
    assert there(folder) == ["epoch=1.ckpt", "last.ckpt"], "the worse one is removed"
    assert (folder / "last.ckpt/.metadata").exists() and dcpd.open(folder / "last.ckpt")["epoch"] == 1
    one = dcpd.connect().checkpoints.get(f"main:{folder.name}/epoch=1.ckpt")
    assert one["step"] == 8 and one["metrics"]["epoch"] == 1 and one["metrics"]["loss"] > 0
    trainer, net, keep = lightning_run(folder, 4, ckpt_path=str(folder / "last.ckpt"), **options)
    assert trainer.current_epoch == 4 and trainer.global_step == 16
    whole = lightning_run(folder.with_name(folder.name + "-whole"), 4)
    equal(net.state_dict(), whole[1].state_dict())
    one, two = (t.optimizers[0].state_dict() for t in (trainer, whole[0]))
    assert one["param_groups"] == two["param_groups"] and one["state"].keys() == two["state"].keys() == {0, 1, 2, 3}
    for k in one["state"]:
        equal(one["state"][k], two["state"][k])
    assert there(folder) == ["epoch=3.ckpt", "last.ckpt"] and keep.best_model_path.endswith("epoch=3.ckpt")
    jobs = dcpd.connect().jobs.list(filter=f'target="main:{folder.name}/last.ckpt"')
    assert {j["kind"] for j in jobs} == {"save"} and all(j["state"] == "succeeded" for j in jobs) and len(jobs) == 4


def test_lightning_links_the_last_one(at, folder):
    """A link to what is still being written; training goes on from it, and removing it leaves what it names."""
    L = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(dirpath=str(folder), save_top_k=2, monitor="epoch", mode="max", save_last="link", filename="{epoch}")
    trainer, net, _ = lightning_run(folder, 3, keep=keep)
    assert sorted(p.name for p in folder.glob("*.ckpt")) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert (folder / "last.ckpt").is_symlink()
    again, net, _ = lightning_run(folder, 4, ckpt_path=str(folder / "last.ckpt"))
    assert again.current_epoch == 4
    trainer.strategy.checkpoint_io.remove_checkpoint(folder / "last.ckpt")
    assert not (folder / "last.ckpt").is_symlink() and (folder / "epoch=2.ckpt/.metadata").exists() and L


def test_lightning_takes_references_and_its_own_files(at, folder):
    trainer, net, _ = lightning_run(folder, 1)
    trainer.save_checkpoint(f"main:{folder.name}/by-name")
    got = trainer.strategy.checkpoint_io.load_checkpoint(f"main:{folder.name}/by-name")
    equal(got["state_dict"], dict(net.state_dict()))
    assert got["optimizer_states"][0]["state"].keys() == {0, 1, 2, 3} and got["loops"]["fit_loop"]["state_dict"] == {}
    assert got["pytorch-lightning_version"]
    torch.save({"state_dict": dict(net.state_dict()), "epoch": 3, "empty": {}}, folder / "old.ckpt")
    old = trainer.strategy.checkpoint_io.load_checkpoint(folder / "old.ckpt")
    assert old["epoch"] == 3
    equal(old["state_dict"], dict(net.state_dict()))
    trainer.strategy.checkpoint_io.remove_checkpoint(folder / "old.ckpt")
    assert not (folder / "old.ckpt").exists()
    with pytest.raises(dcpd.NotFound):
        trainer.strategy.checkpoint_io.load_checkpoint(folder / "none.ckpt")
    trainer.strategy.checkpoint_io.remove_checkpoint(folder / "none.ckpt")
    trainer.strategy.checkpoint_io.teardown()


def test_lightning_keeps_the_old_one_if_the_new_one_fails(at, folder, caplog):
    pytest.importorskip("lightning")
    from dcpd import _saves
    from dcpd.lightning import DcpdCheckpointIO

    io = DcpdCheckpointIO()
    io.save_checkpoint({"w": torch.ones(4)}, folder / "a")
    io.teardown()
    real = _saves.async_save

    def cancelled(*args, **kw):
        f = real(*args, **kw)
        f._client.jobs.cancel(f.job_id)
        return f

    _saves.async_save = cancelled
    try:
        io.save_checkpoint({"w": torch.ones(64 << 20)}, folder / "b")
    finally:
        _saves.async_save = real
    io.remove_checkpoint(folder / "a")
    with pytest.raises(dcpd.JobCancelled):
        io.teardown()
    assert (folder / "a/.metadata").exists() and not (folder / "b").exists() and "is kept" in caplog.text
    io.teardown()


# --------------------------------------------------------------------------------------------------------- transformers


def trainer_of(folder, steps, callbacks, **more):
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                            num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True, attention_dropout=0.1)
    model = hf.LlamaForCausalLM(config)
    g = torch.Generator().manual_seed(2)
    data = [{"input_ids": (x := torch.randint(0, 64, (8,), generator=g)), "labels": x} for _ in range(64)]
    args = hf.TrainingArguments(output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                                disable_tqdm=True, logging_strategy="no", learning_rate=1e-2, **{"save_strategy": "no", **more})
    return hf.Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)


def scheduled(trainer, total=8):
    """The same schedule whatever max_steps is: a run that stops early has begun as a long one."""
    from transformers import get_linear_schedule_with_warmup

    trainer.create_optimizer()
    trainer.lr_scheduler = get_linear_schedule_with_warmup(trainer.optimizer, 2, total)
    return trainer


@pytest.mark.seconds(240)
def test_transformers_resumes(at, folder, tmp_path):
    pytest.importorskip("transformers")
    from dcpd.transformers import DcpdCallback, resume

    where = f"main:{folder.name}"
    first = scheduled(trainer_of(tmp_path, 5, [DcpdCallback(where, every=2, keep=1)]))
    assert resume(first, where) is None, "nothing there: starts anew"
    first.train(resume_from_checkpoint=resume(first, where))
    assert there(folder) == ["checkpoint-4"], "the newest one is kept"
    policy, = [p for p in dcpd.connect().policies.list() if p["match"] == folder.name]
    assert policy["keep"] == {"last": 1} and policy["status"]["removed"] == 1, "by a policy, which stays"
    again = scheduled(trainer_of(tmp_path, 8, []))
    with torch.no_grad():
        for p in again.model.parameters():
            p.fill_(0.5)
    again.train(resume_from_checkpoint=resume(again, where))
    assert again.state.global_step == 8
    whole = scheduled(trainer_of(tmp_path, 8, []))
    whole.train()
    equal(again.model.state_dict(), whole.model.state_dict())
    assert again.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    state = dcpd.load(where + "/checkpoint-4")
    assert json.loads(state["trainer"])["global_step"] == 4 and "model.embed_tokens.weight" in state["model"]
    assert "model.embed_tokens.weight" in state["optim"]["0"]["state"]


@pytest.mark.seconds(240)
def test_transformers_crashes_and_keeps_what_it_was_told_to(at, folder, tmp_path):
    """A trainer that dies at a step in the middle; the one that goes on counts what is there among what it keeps."""
    pytest.importorskip("transformers")
    from transformers import TrainerCallback

    from dcpd.transformers import DcpdCallback, resume

    class Crash(TrainerCallback):
        def on_step_end(self, args, state, control, **kw):
            if state.global_step == 5:
                raise RuntimeError("crash")

    where = f"main:{folder.name}"
    first = trainer_of(tmp_path, 8, [DcpdCallback(where, every=2, keep=2), Crash()])
    with pytest.raises(RuntimeError, match="crash"):
        first.train()
    dcpd.wait(60)
    assert there(folder) == ["checkpoint-2", "checkpoint-4"]
    again = trainer_of(tmp_path, 8, [DcpdCallback(where, every=2, keep=2)])
    own = resume(again, where)
    again.train(resume_from_checkpoint=own)
    assert sorted(p.name for p in folder.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    whole = trainer_of(tmp_path, 8, [])
    whole.train()
    equal(again.model.state_dict(), whole.model.state_dict())
    assert pathlib.Path(own).exists()
    del again, first
    gc.collect()
    assert not pathlib.Path(own).exists(), "the small directory goes with the trainer"


def test_transformers_saves_when_trainer_does(at, folder, tmp_path):
    pytest.importorskip("transformers")
    from dcpd.transformers import DcpdCallback, resume

    trainer = trainer_of(tmp_path, 4, [DcpdCallback(str(folder), labels={"run": "hf"})], save_strategy="steps", save_steps=2)
    trainer.train()
    assert there(folder) == ["checkpoint-2", "checkpoint-4"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"], "and its own"
    job = dcpd.connect().jobs.list(filter=f'target="main:{folder.name}/checkpoint-2"')[0]
    assert job["labels"] == {"run": "hf", "step": "2"}
    assert dcpd.connect().checkpoints.get(f"main:{folder.name}/checkpoint-4")["metrics"]["epoch"] > 0
    again = trainer_of(tmp_path, 4, [])
    again.train(resume_from_checkpoint=resume(again, str(folder / "checkpoint-2")))
    equal(again.model.state_dict(), trainer.model.state_dict())
    own = trainer_of(tmp_path, 4, [])
    assert resume(own, str(folder / "checkpoint-2"))
    own.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # Trainer's own checkpoints load as ever
    equal(own.model.state_dict(), trainer.model.state_dict())
    with pytest.raises(ValueError):
        DcpdCallback("main:x", every=0)


# ----------------------------------------------------------------------------------------------------------- accelerate


def test_accelerate_resumes(at):
    accelerate = pytest.importorskip("accelerate")
    import dcpd.accelerate

    class Counter:
        n = 0

        def state_dict(self):
            return {"n": self.n, "seen": {1: self.n}, "nothing": {}}

        def load_state_dict(self, s):
            assert s["seen"] == {1: s["n"]} and s["nothing"] == {}
            self.n = s["n"]

    def start():
        torch.manual_seed(0)
        a = accelerate.Accelerator(cpu=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optim, sched = a.prepare(model, optim, torch.optim.lr_scheduler.StepLR(optim, 1, 0.9))
        counter = Counter()
        a.register_for_checkpointing(counter)
        return a, model, optim, sched, counter

    def train(a, model, optim, sched, counter, steps):
        for _ in range(steps):
            a.backward(model(torch.randn(8, 4)).pow(2).mean())
            optim.step()
            sched.step()
            optim.zero_grad()
            counter.n += 1

    one = start()
    train(*one, 3)
    name = f"main:{lib.fresh()}"
    dcpd.accelerate.save_state(one[0], name, step=3).result(60)
    train(*one, 2)
    two = start()
    torch.manual_seed(99)
    dcpd.accelerate.load_state(two[0], name)
    assert two[4].n == 3
    train(*two, 2)
    equal(one[1].state_dict(), two[1].state_dict())
    assert one[3].state_dict() == two[3].state_dict()


RANKED = """
import sys, torch, accelerate, dcpd, dcpd.accelerate
name, what, steps, out = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
a = accelerate.Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optim, sched = a.prepare(model, optim, torch.optim.lr_scheduler.StepLR(optim, 1, 0.9))
torch.manual_seed(a.process_index)  # each rank has its own data and dropout

def train(steps):
    for _ in range(steps):
        a.backward(model(torch.randn(8, 4)).pow(2).mean())
        optim.step()
        sched.step()
        optim.zero_grad()

if what == "resume":
    torch.manual_seed(99)
    dcpd.accelerate.load_state(a, name)
else:
    train(3)
    dcpd.accelerate.save_state(a, name, step=3).result(60)
train(steps)
if a.is_main_process:
    torch.save({"model": a.unwrap_model(model).state_dict(), "sched": sched.state_dict(), "world": a.num_processes}, out)
a.end_training()
"""


def accelerate_ranks(at, tmp_path, world, *args):
    """RANKED on `world` ranks, as accelerate's launcher starts them; what rank 0 ends with."""
    file, out = tmp_path / "ranked.py", tmp_path / lib.fresh()
    file.write_text(RANKED)
    port = free_port()
    env = {**os.environ, "DCPD_URL": f"unix://{at.socket}", "PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world),
           "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    run = [subprocess.Popen([sys.executable, file, *map(str, args), out], env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
                            stderr=subprocess.PIPE, text=True) for r in range(world)]
    try:
        said = [p.communicate(timeout=240)[1] for p in run]
    finally:
        for p in run:
            p.kill()
    assert [p.returncode for p in run] == [0] * world, said
    return torch.load(out)


@pytest.mark.seconds(500)
def test_accelerate_resumes_on_ranks(at, tmp_path):
    """Two ranks of DDP go on with their own random numbers; one alone takes up the same checkpoint."""
    pytest.importorskip("accelerate")
    name = f"main:{lib.fresh()}"
    straight = accelerate_ranks(at, tmp_path, 2, name, "save", 2)
    resumed = accelerate_ranks(at, tmp_path, 2, name, "resume", 2)
    assert straight["world"] == resumed["world"] == 2 and straight["sched"] == resumed["sched"]
    equal(straight["model"], resumed["model"])
    here = accelerate_ranks(at, tmp_path, 1, name, "resume", 0)
    saved = dcpd.load(name, keys=["part_0.model"])["part_0"]["model"]
    equal(here["model"], saved)


# ---------------------------------------------------------------------------------------------------------------- types

PROGRAM = '''
import dcpd
from typing import Any, Dict

def resume(into: Dict[str, Any]) -> int:
    try:
        dcpd.load("main:run", into=into, strict=False)
    except dcpd.NotFound as e:
        reveal_type(e.code)
        return 0
    h = dcpd.async_save(into, "main:run", step=3)
    reveal_type(h.job_id)
    reveal_type(dcpd.open("main:run")["w"])
    with dcpd.connect("http://h:1", token="t") as c:
        reveal_type(c.jobs.run("verify", source="main:run"))
    return len(dcpd.save(into, "main:run", overwrite=True).id)
'''


@pytest.mark.seconds(500)
def test_a_typed_program(tmp_path):
    """py.typed holds what it promises: a strict user's program needs no ignores, and the package itself passes."""
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(PROGRAM)
    env = {**os.environ, "MYPYPATH": str(PACKAGE)}
    out = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "c"), str(file)], env=env,
                         capture_output=True, text=True, timeout=300)
    whole = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "c"), str(PACKAGE / "dcpd")],
                           capture_output=True, text=True, timeout=400)
    assert whole.returncode == 0, whole.stdout
    revealed = re.findall(r'Revealed type is "(?:builtins\.)?(.*?)"', out.stdout)
    assert out.returncode == 0 and revealed[:2] == ["str", "str"] and "Job" in revealed[3], out.stdout
