"""A small transformer trained with FSDP2 and tensor parallelism on CPU ranks, for the tests of optimizer state: runs inside a rank of
lib/ranks.py. Every rank sees the whole batch of a step, so that runs on other meshes follow the same path up to rounding.
"""
import package
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, WIDTH, HIDDEN, HEAD, SEQ, BATCH = 29, 24, 50, 2, 7, 12
MESHES = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 6: (3, 2), 8: (4, 2)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))  # the heads that are here
        a = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1) @ v
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)


PLAN = {**{f"blocks.*.{n}": ColwiseParallel for n in ("q", "k", "v", "up")},
        **{f"blocks.*.{n}": RowwiseParallel for n in ("o", "down")}}


def trainer(kind="adamw"):
    """(model, optimizer) on this world's mesh, freshly initialised, the same everywhere."""
    torch.manual_seed(3)
    model = Transformer()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", MESHES[dist.get_world_size()], mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {k: v() for k, v in PLAN.items()})
        for b in model.blocks:
            fully_shard(b, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    make = {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, foreach=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
            "adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True), "sgd plain": lambda p: torch.optim.SGD(p, lr=1e-2)}
    return model, make[kind](model.parameters())


def steps(model, optimizer, first, count):
    losses = []
    for i in range(first, first + count):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=g)
        loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model, optimizer, **options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    m, o = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": m, "optim": o}


def restore(model, optimizer, sd, **options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    set_state_dict(model, optimizer, model_state_dict=sd["model"], optim_state_dict=sd["optim"], options=StateDictOptions(**options))


def full(model):
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).numpy().copy() for k, v in model.state_dict().items()}


def alone():
    return not dist.is_initialized()


def train_and_save(path, before=5, kind="adamw", by="pytorch", url=None, **options):
    """Trains, saves, trains on: (losses before, losses of the unbroken run, its final parameters)."""
    model, optimizer = trainer(kind)
    a = steps(model, optimizer, 0, before)
    sd = state(model, optimizer, **options)
    if by == "pytorch":
        dcp.save(sd, checkpoint_id=path, no_dist=alone())
    else:
        with package.daemon(url) as dcpd:
            dcpd.save(sd, path, no_dist=alone())
    return a, steps(model, optimizer, before, 10), full(model)


def resume(path, before=5, kind="adamw", by="pytorch", url=None, **options):
    """Loads onto this world's mesh, by PyTorch or by dcpd, and trains on: (losses, final parameters)."""
    model, optimizer = trainer(kind)
    sd = state(model, optimizer, **options)
    if by == "pytorch":
        dcp.load(sd, checkpoint_id=path, no_dist=alone())
    else:
        with package.daemon(url) as dcpd:
            dcpd.load(path, into=sd, no_dist=alone())
    restore(model, optimizer, sd, **options)
    return steps(model, optimizer, before, 10), full(model)
