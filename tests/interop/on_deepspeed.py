"""Runs where DeepSpeed is installed (tests/lib/deepspeed_python.py).

    train FOLDER STAGE DTYPE       a rank, by RANK and WORLD_SIZE: some steps of a small model on the CPU, then save_checkpoint
    judge FOLDER OUT               what zero_to_fp32.py makes of the checkpoint, and the keys of its files
    universal STEP OUT             ds_to_universal.py
    convert FOLDER OUT             zero_to_fp32.py to safetensors, durable; prints the seconds, imports left out
"""
import argparse
import json
import os
import pathlib
import sys
import time

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.a = torch.nn.Linear(6, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.frozen = torch.nn.Linear(7, 5).requires_grad_(False)
        self.b = torch.nn.Linear(5, 6, bias=False)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.cube = torch.nn.Parameter(torch.randn(2, 3, 5))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("mean", torch.randn(7))
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("grid", torch.randn(3, 2).t())

    def forward(self, x):
        h = self.norm(self.a(self.emb(x))) - self.mean.to(self.a.weight.dtype)
        h = self.b(torch.tanh(self.frozen(h))) * self.scale + self.cube.sum() * 0.01
        return self.head(h).float().square().mean()


def train(folder, stage, dtype):
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    net = Net()
    params = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
              "zero_optimization": {"stage": int(stage), "sub_group_size": 100, "stage3_param_persistence_threshold": 10},
              "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, "bf16": {"enabled": dtype == "bf16"}}
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    for _ in range(3):
        engine.backward(engine(torch.randint(0, 11, (4,))))
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3, "table": torch.arange(6).reshape(2, 3).t()})
    torch.distributed.barrier()


def judge(folder, out):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.save({k: v.detach().clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(folder).items()}, out)
    step = pathlib.Path(folder) / (pathlib.Path(folder) / "latest").read_text()
    keys = {}
    for kind in ("model", "optim"):
        state = torch.load(sorted(step.glob(f"*{kind}_states.pt"))[0], weights_only=False)
        keys[kind] = sorted(state.get("optimizer_state_dict", state))
    pathlib.Path(out + ".json").write_text(json.dumps(keys))


def universal(step, out):
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(argparse.Namespace(input_folder=step, output_folder=out, num_extract_workers=1, num_merge_workers=1,
                                            keep_temp_folder=False, strict=True, inject_missing_state=True))


def convert(folder, out):
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    start = time.monotonic()
    convert_zero_checkpoint_to_fp32_state_dict(folder, out, max_shard_size=None, safe_serialization=True)
    for path in pathlib.Path(out).iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    print(time.monotonic() - start)


if __name__ == "__main__":
    {"train": train, "judge": judge, "universal": universal, "convert": convert}[sys.argv[1]](*sys.argv[2:])
