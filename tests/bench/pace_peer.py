"""Training steps while saves run; a process of its own, because `dcpd` is the package here.

    pace_peer.py BYTES ROUNDS DIR KIND...     KIND: full, background (dcpd.async_save of that pace), torch (its async_save, to DIR)

Each round trains for a while without a save, then, of each kind, for as long as a save is under way. One process, because a step's
time differs from process to process by more than what is measured. Prints {"none": [seconds of each step, by round], KIND: …,
"KIND_save": [seconds of each save]}. DCPD_URL says which daemon; references go to its storage `disk`.
"""
import json
import logging
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcpd

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
QUIET_STEPS = 40


class Trainer:
    """A step is some 60 ms of products on all cores, on two."""

    def __init__(self):
        torch.manual_seed(0)
        width = 1024
        self.model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(256, width)

    def step(self):
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def steps(self, going):
        """At least one, then as many as `going` says."""
        out = [self.step()]
        while going(len(out)):
            out.append(self.step())
        return out


def save(kind, state, folder, n):
    if kind == "torch":
        return dcp.async_save(state, checkpoint_id=f"{folder}/torch{n % 2}")
    return dcpd.async_save(state, f"disk:pace-{kind}{n % 2}", overwrite=True, no_dist=True, pace=kind)


def main(size, rounds, folder, kinds):
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        state = {f"w{i}": torch.rand(size // 32 // 4) for i in range(32)}
        trainer, out = Trainer(), {}
        for k in kinds:  # segments, and PyTorch's threads, are made by then
            if k != "background":
                save(k, state, folder, 0).result()
        trainer.steps(lambda n: n < QUIET_STEPS)
        for i in range(1, rounds + 1):
            out.setdefault("none", []).append(trainer.steps(lambda n: n < QUIET_STEPS))
            for k in kinds:
                h = save(k, state, folder, i)
                start = time.perf_counter()
                out.setdefault(k, []).append(trainer.steps(lambda n: not h.done()))
                h.result()
                out.setdefault(k + "_save", []).append(time.perf_counter() - start)
        dist.destroy_process_group()
    return out


if __name__ == "__main__":
    how = sys.argv[1:]
    print(json.dumps(main(int(how[0]), int(how[1]), how[2], how[3:])), flush=True)
    os._exit(0)  # PyTorch's own executor threads may linger
