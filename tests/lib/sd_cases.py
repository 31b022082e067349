"""State dicts for the tests of state-dict operations, and what PyTorch makes of them: runs inside a rank of lib/ranks.py.

Every state dict is a function of (case, seed, rank), so that the ranks, the images and PyTorch's own answer agree on it. What leaves
a rank is neutral (`describe`): no PyTorch on the other side.
"""
import base64
import copy
import io
import pickle
import random

import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils as utils
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
MESHES = [(4,), (2, 2), (1, 4), (4, 1)]
_meshes = {}
MADE_FOR_GROUP = (_meshes,)  # cleared when the ranks meet anew


def mesh(shape):
    key = tuple(shape)
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", tuple(shape))
    return _meshes[key]


# ---------------------------------------------------------------------------------------------------- what leaves a rank


def raw(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def tensor_record(fqn, path, t):
    rec = {"fqn": fqn, "path": path, "dtype": DTYPES[t.dtype], "shape": list(t.size())}
    if isinstance(t, ShardedTensor):
        rec |= {"kind": "sharded", "shards": [(list(s.metadata.shard_offsets), list(s.tensor.shape), raw(s.tensor))
                                              for s in t.local_shards()]}
    elif isinstance(t, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local = t._local_tensor
        if any(p.is_partial() for p in t.placements):
            offsets = [0] * t.dim()
        else:
            _, offsets = compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)
        here = t.device_mesh.get_coordinate() is not None
        rec |= {"kind": "dtensor", "mesh": list(t.device_mesh.mesh.shape), "ranks": t.device_mesh.mesh.flatten().tolist(),
                "placements": [word(p) for p in t.placements],
                "shards": [(list(offsets), list(local.shape), raw(local))] if here else []}
    else:
        rec |= {"kind": "plain", "shards": [([0] * t.dim(), list(t.shape), raw(t))]}
    return rec


def word(p):
    if isinstance(p, Shard):
        return f"Shard({p.dim})"
    return f"Partial({p.reduce_op})" if isinstance(p, Partial) else "Replicate()"


def value_record(fqn, path, v):
    if isinstance(v, io.BytesIO):
        v = v.getvalue()
    if isinstance(v, bytes):
        return {"fqn": fqn, "path": path, "bytes": v}
    if v is None or isinstance(v, (bool, int, float, str)):
        return {"fqn": fqn, "path": path, "json": v}
    return {"fqn": fqn, "path": path, "pickle": pickle.dumps(v)}


def describe(obj):
    """{"tensors":[…],"values":[…]} of this rank, or None where there is no result."""
    if obj is None:
        return None
    out = {"tensors": [], "values": []}

    def walk(path, v):
        if isinstance(v, dict):
            for k, x in v.items():
                walk([*path, str(k)], x)
        elif isinstance(v, (list, tuple)):
            for i, x in enumerate(v):
                walk([*path, i], x)
        elif isinstance(v, (torch.Tensor, ShardedTensor)):
            out["tensors"].append(tensor_record(".".join(map(str, path)), path, v))
        else:
            out["values"].append(value_record(".".join(map(str, path)), path, v))

    walk([], obj)
    return out


# ---------------------------------------------------------------------------------------------------- the state dicts


def rows(t):
    """This rank's `t` as its part of a ShardedTensor cut on dim 0, as PyTorch's own tests make it."""
    me, world = dist.get_rank(), dist.get_world_size()
    shard = LocalShard.from_tensor_and_offsets(t, [t.shape[0] * me, *[0] * (t.dim() - 1)], me)
    return init_from_local_shards([shard], t.shape[0] * world, *t.shape[1:])


def random_tensor(rng, shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    return torch.randint(-100 if dtype.is_signed else 0, 100, shape, generator=g).to(dtype)


def random_shape(rng, least=1):
    return [rng.choice([1, 2, 3, 4, 5, 7, 8, 12]) for _ in range(rng.randint(least, 3))]


def random_placements(rng, n, ndim, partial=False):
    choices = [Replicate(), *(Shard(d) for d in range(ndim))]
    if partial:
        choices += [Partial("sum"), Partial("avg"), Partial("max"), Partial("min")]
    return [rng.choice(choices) for _ in range(n)]


def random_dtensor(rng, dtype, partial=False):
    shape = random_shape(rng)
    m = rng.choice(MESHES)
    placements = random_placements(rng, len(m), len(shape), partial)
    if any(isinstance(p, Partial) for p in placements):
        placements = [placements[0] if isinstance(placements[0], Partial) else Partial("sum"), *[Replicate()] * (len(m) - 1)]
        rank_rng = random.Random(rng.randrange(1 << 30) + dist.get_rank() // (4 // m[0]))
        return DTensor.from_local(random_tensor(rank_rng, shape, dtype), mesh(m), placements, run_check=False)
    return distribute_tensor(random_tensor(rng, shape, dtype), mesh(m), placements)


def random_dict(seed, partial=False, depth=2, plain_differs=True, flat=False):
    """The same structure on all ranks. Plain tensors and values may differ between ranks."""
    rng = random.Random(seed)
    mine = random.Random(seed * 1000 + (dist.get_rank() if plain_differs else 0))

    def leaf():
        dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8])
        what = rng.randrange(10)
        if what < 5:
            return random_dtensor(rng, torch.float32 if partial else dtype, partial)
        shape = random_shape(rng, 0)
        if what < 7:
            return random_tensor(mine, shape, dtype)
        return rng.choice([lambda: mine.randrange(99), lambda: mine.random(), lambda: f"s{mine.randrange(99)}", lambda: None,
                           lambda: True, lambda: bytes([mine.randrange(256)] * 3)])()

    def tree(level):
        out = {}
        for i in range(rng.randint(2, 5)):
            if level and not flat and rng.random() < 0.3:
                out[f"d{i}"] = tree(level - 1)
            elif level and not flat and rng.random() < 0.2:
                out[f"l{i}"] = [leaf() for _ in range(rng.randint(1, 3))]
            else:
                out[f"k{i}"] = leaf()
        return out

    return tree(depth)


def scenario(name, seed=0):
    """The scenarios of PyTorch's own test_state_dict_utils.py."""
    me = dist.get_rank()
    rank_rng = random.Random(100 + me)
    if name == "cube dtensor":
        return {"dtensor": DTensor.from_local(random_tensor(rank_rng, [3, 3, 3]), mesh((4,)), [Shard(0)])}
    if name == "cube sharded":
        return {"sharded": rows(random_tensor(rank_rng, [3, 3, 3]))}
    if name == "aranges":
        return {"tensor": torch.arange(10), "ones": torch.ones(10)}
    if name == "complicated":
        sharded = [rows(random_tensor(rank_rng, [3, 3, 3])) for _ in range(10)]
        plain = [random_tensor(random.Random(7 + i), [4, 2]) for i in range(10)]
        return {"list": sharded + plain, "sharded": rows(torch.arange(8.0) + me), "range": list(range(10))}
    if name == "companion":
        buffer = io.BytesIO(b"\x00bytes\xff")
        return {"tensor1": torch.arange(10), "tensor2": torch.ones(10), "non_tensor_bytes_io": buffer,
                "non_tensor_bytes": buffer.getvalue(), "step": torch.tensor(7, dtype=torch.float), "lr": 1.5,
                "nested": {"list": [1, 2, 3, 4]}}
    if name == "random":
        return random_dict(seed)
    if name == "partial":
        return random_dict(seed, partial=True)
    if name == "flat":
        return random_dict(seed, flat=True, plain_differs=False)
    raise KeyError(name)


def describe_scenario(name, seed=0):
    return describe(scenario(name, seed))


# ---------------------------------------------------------------------------------------------------- PyTorch's answers


def gathered(name, seed=0, ranks_only=(), cpu_offload=False):
    return describe(utils._gather_state_dict(scenario(name, seed), ranks_only=tuple(ranks_only), cpu_offload=cpu_offload))


def offloaded(name, seed=0, ranks_only=()):
    return describe(utils._offload_state_dict_to_cpu(scenario(name, seed), ranks_only=tuple(ranks_only)))


def created(name, seed=0):
    """PyTorch's new tensors hold anything; ours zeros, so its content is set to that."""
    sd = utils._create_cpu_state_dict(scenario(name, seed), share_memory=True)

    def clear(v):
        if isinstance(v, dict):
            return {k: clear(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return type(v)(clear(x) for x in v)
        if isinstance(v, DTensor):
            v._local_tensor.zero_()
        elif isinstance(v, torch.Tensor):
            v.zero_()
        return v

    return describe(clear(sd))


def other(name, seed=0):
    """The same structure with other numbers: something to copy into."""
    sd = scenario(name, seed)

    def change(v):
        if isinstance(v, dict):
            return {k: change(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return type(v)(change(x) for x in v)
        if isinstance(v, ShardedTensor):
            v = copy.deepcopy(v)
            for s in v.local_shards():
                s.tensor.fill_(3)
        elif isinstance(v, DTensor):
            v = v.clone()
            v._local_tensor.fill_(3)
        elif isinstance(v, torch.Tensor):
            v = torch.full_like(v, 1)
        return v

    return change(sd)


def describe_other(name, seed=0):
    return describe(other(name, seed))


def copied(name, seed=0):
    return describe(utils._copy_state_dict(scenario(name, seed), other(name, seed)))


def similar(name, seed=0, change=None):
    a, b = scenario(name, seed), other(name, seed)
    if change == "tensor1":
        b["tensor1"] = torch.arange(11)
    return utils._check_state_dict_similarity(a, b)


def full_dict(seed):
    """What the root holds: plain tensors and values only; the same on every rank, as distribute needs it."""
    rng = random.Random(seed)
    out = {}
    for i in range(rng.randint(4, 10)):
        what = rng.randrange(10)
        dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.int64])
        if what < 7:
            out[f"k{i}"] = random_tensor(rng, random_shape(rng), dtype)
        elif what < 8:
            out[f"k{i}"] = random_tensor(rng, [], dtype)
        else:
            out[f"k{i}"] = rng.choice([rng.randrange(99), "text", None, 0.5])
    return out


def target_dict(seed, lacks=True):
    """A target for it: sharded where the dice say so, some keys missing, some of its own."""
    rng = random.Random(seed + 77)
    out = {}
    for k, v in full_dict(seed).items():
        what = rng.randrange(10)
        if lacks and what == 0:
            continue
        if not isinstance(v, torch.Tensor):
            out[k] = "old" if isinstance(v, str) else -1
        elif v.dim() and what < 7:
            m = rng.choice(MESHES)
            out[k] = distribute_tensor(torch.zeros_like(v), mesh(m), random_placements(rng, len(m), v.dim()))
        else:
            out[k] = torch.zeros_like(v)
    if lacks:
        out["own"] = torch.full((3,), 5.0)
        out["own_value"] = 17
    return out


def describe_full(seed, root=None):
    """Every rank's full dict; with a root, the others have nothing."""
    return describe(full_dict(seed) if root is None or dist.get_rank() == root else {})


def describe_target(seed, lacks=True):
    return describe(target_dict(seed, lacks))


def broadcast(seed, strict=False, cpu_offload=False, lacks=True):
    local = target_dict(seed, lacks)
    utils._broadcast_state_dict(full_dict(seed) if dist.get_rank() == 0 else {}, local, torch.device("cpu"), strict=strict,
                                cpu_offload=cpu_offload)
    return describe(local)


def distributed(seed, lacks=True):
    local = target_dict(seed, lacks)
    utils._distribute_state_dict(full_dict(seed), local, torch.device("cpu"))
    return describe(local)


def redistribute_plan(seed):
    """FQN → (mesh, placements) that the same dict is to have afterwards."""
    rng = random.Random(seed + 5)
    out = {}
    sd = random_dict(seed, flat=True, plain_differs=False)
    for k, v in sd.items():
        if isinstance(v, DTensor):
            m = list(v.device_mesh.mesh.shape)
            out[k] = (m, random_placements(rng, len(m), v.dim()))
    return sd, out


def redistributed(seed):
    """(this rank's result, the layout rules, bytes this rank gets that it did not hold)"""
    sd, plan = redistribute_plan(seed)
    rules = []
    for k, (m, placements) in plan.items():
        rules.append({"match": k, "mesh": m, "placements": [word(p) for p in placements]})
        sd[k] = sd[k].redistribute(sd[k].device_mesh, placements)
    return describe(sd), rules


def encode(b):
    return base64.b64encode(b).decode()
