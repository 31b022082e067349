"""A pretraining loop in the form of torchtitan's: a configuration, a trainer, and a checkpoint manager that knows folder, interval,
how many to keep, and what has a state: model, optimizer, schedule, data loader, train state. FSDP2 over "dp", tensor parallelism over "tp".

    torchrun --nproc-per-node 4 titan.py main:titan --tp 2 --steps 12 --crash-at 9
    torchrun --nproc-per-node 2 titan.py main:titan --tp 1 --steps 12
"""
import argparse
import dataclasses
import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcpd


@dataclasses.dataclass
class Config:
    folder: str                  # "STORAGE:NAME"
    tp: int = 1
    steps: int = 12
    interval: int = 4
    keep_latest_k: int = 2
    async_mode: str = "async"    # or "disabled": each save waits until it is durable
    crash_at: int = 0
    dim: int = 32
    layers: int = 2


class Block(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.w1 = torch.nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = torch.nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.w2(torch.nn.functional.silu(self.w1(self.norm(x))))


class Loader:
    """Numbers that depend on the step only; its state is where it stands."""

    def __init__(self, dim, rank, world):
        self.dim, self.rank, self.world, self.at = dim, rank, world, 0

    def __next__(self):
        self.at += 1
        x = torch.randn(8, self.dim, generator=torch.Generator().manual_seed(self.at))
        return x.chunk(self.world)[self.rank]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, s):
        self.at = s["at"]


@dataclasses.dataclass
class TrainState:
    step: int = 0
    ntokens_seen: int = 0

    def state_dict(self):
        return dataclasses.asdict(self)

    def load_state_dict(self, s):
        self.step, self.ntokens_seen = s["step"], s["ntokens_seen"]


class CheckpointManager:
    """save() at an interval, load() of the newest, and no more than the newest k."""

    def __init__(self, config, model, optimizer, states):
        self.config, self.model, self.optimizer, self.states = config, model, optimizer, states
        self.client, self.saving = dcpd.connect(), None

    def steps(self):
        """Those that are complete, the oldest first."""
        storage, _, name = self.config.folder.partition(":")
        return sorted(int(c["name"].rsplit("-", 1)[1]) for c in self.client.checkpoints.list(storage, prefix=f"{name}/step-"))

    def save(self, step, last=False):
        if step % self.config.interval and not last:
            return
        if self.saving is not None:
            self.saving.result()  # a failed save is not overlooked
            self.purge()
        model, optim = get_state_dict(self.model, self.optimizer)
        self.saving = dcpd.async_save({"model": model, "optim": optim, **self.states}, f"{self.config.folder}/step-{step}", step=step)
        if last or self.config.async_mode == "disabled":
            self.saving.result()
            self.purge()

    def purge(self):
        if dist.get_rank() == 0:
            for s in self.steps()[:-self.config.keep_latest_k]:
                self.client.jobs.wait(self.client.checkpoints.delete(f"{self.config.folder}/step-{s}"))

    def load(self):
        box = [max(self.steps(), default=None) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        if box[0] is None:
            return False
        model, optim = get_state_dict(self.model, self.optimizer)
        dcpd.load(f"{self.config.folder}/step-{box[0]}", into={"model": model, "optim": optim, **self.states})
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)
        return True


class Trainer:
    def __init__(self, config):
        self.config = config
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // config.tp, config.tp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(Block(config.dim) for _ in range(config.layers)))
        for block in self.model:
            if config.tp > 1:
                parallelize_module(block, mesh["tp"], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 4))
        self.loader = Loader(config.dim, mesh["dp"].get_local_rank(), mesh["dp"].size())
        self.state = TrainState()
        self.checkpoint = CheckpointManager(config, self.model, self.optimizer, {
            "lr_scheduler": self.schedule, "dataloader": self.loader, "train_state": self.state})

    def train(self):
        if self.checkpoint.load() and dist.get_rank() == 0:
            print(f"goes on from step {self.state.step}, {self.state.ntokens_seen} tokens, on {dist.get_world_size()} ranks", flush=True)
        while self.state.step < self.config.steps:
            self.state.step += 1
            x = next(self.loader)
            loss = (self.model(x) - x.flip(1)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.state.ntokens_seen += 8
            self.checkpoint.save(self.state.step, last=self.state.step == self.config.steps)
            if self.state.step == self.config.crash_at:
                os._exit(13)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"step {self.state.step}, loss {loss.item() / dist.get_world_size():.5f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder", help="STORAGE:NAME")
    for f in dataclasses.fields(Config)[1:]:
        p.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    Trainer(Config(**vars(p.parse_args()))).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
