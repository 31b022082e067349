"""Random state dicts under random layouts, for the property tests of resharding: runs inside a rank of lib/ranks.py, and, for what needs
no rank (`structure`, `boxes`), in the test too. Everything is a function of the seed.

A case is one tree of tensors and values, and three layouts of it (A, B, C), each over a world of its own.
"""
import math
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, torch.float32, torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
          torch.complex64, torch.complex128]


def world_of(seed, which, most):
    return random.Random(f"{seed} {which}").randint(1, most)


def structure(seed, wide=False):
    """{path: (shape, dtype) | value}; paths are tuples of keys."""
    rng = random.Random(seed)
    out = {}
    for i in range(rng.randint(3, 9)):
        path = rng.choice([(f"t{i}",), ("model", f"t{i}"), ("optim", "state", f"t{i}", "exp_avg")])
        if rng.random() < 0.25:
            out[path] = rng.choice([i, 0.5 * i, f"text {i}", None, True, [1, i], (1, "a")])
            continue
        dims = [rng.choice([0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33] if not wide else [1, 5, 64, 257]) for _ in range(rng.randint(0, 4))]
        while math.prod(dims) > 20000:
            dims[dims.index(max(dims))] = 2
        out[path] = (dims, rng.choice(DTYPES))
    return out


def content(seed, path, shape, dtype):
    g = torch.Generator().manual_seed(random.Random(f"{seed} {path}").randrange(1 << 40))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=g, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -100, 100, shape, generator=g).to(dtype)


def meshes(world):
    """Shapes of device meshes over so many ranks."""
    out = [(world,)]
    for a in range(1, world + 1):
        if world % a == 0:
            out.append((a, world // a))
            out += [(a, b, world // a // b) for b in range(2, world // a) if (world // a) % b == 0]
    return out


def layout(seed, which, path, shape, world):
    """None: plain on every rank; else (mesh shape, ranks, placements). Some meshes leave ranks out."""
    rng = random.Random(f"{seed} {which} {path}")
    if rng.random() < 0.15:
        return None
    # a 0-d DTensor has another size on ranks outside of its mesh (from_local takes an empty shape for none)
    inside = rng.randint(1, world) if shape and rng.random() < 0.2 else world
    ranks = sorted(rng.sample(range(world), inside))
    if rng.random() < 0.2:
        rng.shuffle(ranks)
    mesh = rng.choice(meshes(inside))
    placements = [Replicate() if not shape or rng.random() < 0.3 else Shard(rng.randrange(len(shape))) for _ in mesh]
    return mesh, ranks, placements


def rule(path, lay):
    fqn = ".".join(path)
    if lay is None:
        return {"match": fqn, "placements": ["Replicate()"]}
    mesh, ranks, placements = lay
    return {"match": fqn, "mesh": list(mesh), "ranks": ranks, "placements": [str(p) if isinstance(p, Replicate) else f"Shard({p.dim})"
                                                                           for p in placements]}


def rules(seed, which, world):
    return [rule(p, layout(seed, which, p, v[0], world)) for p, v in structure(seed).items() if is_tensor(v)]


def is_tensor(v):
    return isinstance(v, tuple) and len(v) == 2 and isinstance(v[1], torch.dtype)


def boxes(seed, which, world):
    """{fqn: the distinct boxes with elements}, as PyTorch cuts them."""
    out = {}
    for path, v in structure(seed).items():
        if not is_tensor(v):
            continue
        lay, got = layout(seed, which, path, v[0], world), set()
        if lay is None:
            got.add(((0,) * len(v[0]), tuple(v[0])))
        else:
            mesh, ranks, placements = lay
            for i in range(len(ranks)):
                at, n = [], i
                for s in reversed(mesh):
                    at.append(n % s)
                    n //= s
                size, off = _compute_local_shape_and_global_offset(tuple(v[0]), mesh, lambda d, at=at: at[::-1][d], placements)
                got.add((tuple(off), tuple(size)))
        out[".".join(path)] = {b for b in got if 0 not in b[1]}
    return out


def put(sd, path, v):
    for k in path[:-1]:
        sd = sd.setdefault(k, {})
    sd[path[-1]] = v


_made = {}
MADE_FOR_GROUP = (_made,)  # cleared when the ranks meet anew


def mesh_of(shape, ranks):
    key = (shape, tuple(ranks))
    if key not in _made:
        _made[key] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), _init_backend=False, _rank=dist.get_rank())
    return _made[key]


def build(seed, which, fill):
    """This rank's state dict; fill False: zeros."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    sd = {}
    for path, v in structure(seed).items():
        if not is_tensor(v):
            put(sd, path, v if fill else type(v)() if v is not None else 0)
            continue
        full = content(seed, path, *v) if fill else torch.zeros(v[0], dtype=v[1])
        lay = layout(seed, which, path, v[0], world)
        if lay is None or not dist.is_initialized():
            put(sd, path, full)
            continue
        mesh, placements = mesh_of(lay[0], lay[1]), lay[2]
        put(sd, path, DTensor.from_local(part(full, mesh, placements), mesh, placements, run_check=False, shape=full.shape,
                                         stride=full.stride()))
    return sd


def part(full, mesh, placements):
    at = mesh.get_coordinate()
    if at is None:
        return full.new_empty([0])
    size, off = _compute_local_shape_and_global_offset(full.shape, mesh.mesh.shape, lambda d: at[d], placements)
    return full[tuple(slice(o, o + s) for o, s in zip(off, size))].clone()


def flat(sd, path=()):
    for k, v in sd.items():
        if isinstance(v, dict):
            yield from flat(v, (*path, k))
        else:
            yield (*path, k), v


def save(seeds, which, root):
    for s in seeds:
        dcp.save(build(s, which, True), checkpoint_id=f"{root}/{s}", no_dist=not dist.is_initialized())


def load(seeds, which, pattern):
    """Loads every checkpoint into zeros of layout `which`; says what is wrong, "" if nothing."""
    wrong = []
    for s in seeds:
        sd, want = build(s, which, False), dict(flat(build(s, which, True)))
        try:
            dcp.load(sd, checkpoint_id=pattern.format(seed=s), no_dist=not dist.is_initialized())
        except BaseException as e:  # CheckpointException is no Exception
            wrong.append(f"seed {s}: {type(e).__name__}: {e}")
            continue
        for path, v in flat(sd):
            a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (v, want[path]))
            same = bits(a) == bits(b) and a.shape == b.shape if isinstance(b, torch.Tensor) else a == b and type(a) is type(b)
            if not same:
                wrong.append(f"seed {s}: {'.'.join(path)}: {a!r} is not {b!r}"[:500])
    return wrong


def bits(t):
    t = t.detach().contiguous()
    return (t.dtype, t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
