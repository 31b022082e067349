"""Optimizer state by PyTorch's load_sharded_optimizer_state_dict and by dcpd's: runs inside a rank of lib/ranks.py.

`linear_*`: the case of PyTorch's own test_fsdp_optim_state.py, FSDP1 and three linear layers. `nested_*`: a model whose tensors are
ShardedTensors in ShardedTensors, as FSDP1 over tensor parallelism had them, made by hand.
"""
import contextlib

import package
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.remote_device import _remote_device


def said(x):
    """What two results must agree in, as plain data: bytes, boxes, placements."""
    if isinstance(x, dict):
        return {k: said(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [type(x).__name__, *(said(v) for v in x)]
    if isinstance(x, ShardedTensor):
        m = x.metadata()
        return ("sharded", list(m.size), str(m.tensor_properties.dtype), m.tensor_properties.requires_grad,
                [(list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in m.shards_metadata],
                [(list(s.metadata.shard_offsets), list(s.metadata.shard_sizes), said(s.tensor)) for s in x.local_shards()],
                dist.get_process_group_ranks(x._process_group))
    if isinstance(x, torch.Tensor):
        return ("tensor", list(x.shape), str(x.dtype), x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return x


def load(by, model, key, path, url, planner=None):
    if by == "pytorch":
        return load_sharded_optimizer_state_dict(model, key, dcp.FileSystemReader(path), planner=planner)
    with package.daemon(url):
        from dcpd._optim import load_sharded_optimizer_state_dict as ours

        return ours(model, key, dcp.FileSystemReader(path) if planner else path, planner=planner)


# ------------------------------------------------------------------------------------------------------------ FSDP1


class Linears(nn.Module):
    """As in PyTorch's test: as many rows as ranks, twice and three times as many (of the world that saved)."""

    def __init__(self, world):
        super().__init__()
        self.net1 = nn.Sequential(nn.Linear(8, world), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(world, 2 * world), nn.ReLU())
        self.net3 = nn.Sequential(nn.Linear(2 * world, 3 * world), nn.ReLU())
        self.odd = nn.Linear(3 * world, 1)  # a bias of one element: whole on every rank

    def forward(self, x):
        return self.odd(self.net3(self.net2(self.net1(x))))


OPTIMIZERS = {"adam": lambda p: torch.optim.Adam(p, lr=0.1), "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
              "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True)}


def linears(width, kind, seed, steps=1):
    torch.manual_seed(seed)
    model = FSDP(Linears(width), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.rand(8, 8, generator=torch.Generator().manual_seed(seed + i))).sum().backward()
        optimizer.step()
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, optimizer


def linear_save(path, width, kind="adam", by="pytorch", url=None):
    model, optimizer = linears(width, kind, 1, 3)
    sd = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if by == "pytorch":
        dcp.save(sd, checkpoint_id=path)
    else:
        with package.daemon(url) as dcpd:
            dcpd.save(sd, path)


def linear_load(path, width, url, kind="adam", planner=False):
    """(what PyTorch loaded, what dcpd loaded, the optimizers' states after each of them)"""
    out, states = [], []
    for by in ("pytorch", "dcpd"):
        model, optimizer = linears(width, kind, 7)
        got = load(by, model.state_dict(), "optimizer", path, url, dcp.DefaultLoadPlanner() if planner else None)
        out.append(said(got))
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, got["optimizer"]))
        states.append(said(optimizer.state_dict()))
    return (*out, *states)


# ----------------------------------------------------------------------------------------------------------- nested


def sharded(t, pg, dim=0, wrap=lambda x: x):
    """`t` cut on `dim` over the group, the last part shorter; wrap makes the local tensor."""
    ranks, size = dist.get_process_group_ranks(pg), list(t.shape)
    step = -(-size[dim] // len(ranks))
    metadata, mine = [], []
    for i, r in enumerate(ranks):
        start = min(i * step, size[dim])
        n = min(step, size[dim] - start)
        offsets, sizes = [0] * len(size), list(size)
        offsets[dim], sizes[dim] = start, n
        metadata.append(ShardMetadata(offsets, sizes, f"rank:{r}/cpu"))
        if r == dist.get_rank():
            mine.append(Shard(wrap(t.narrow(dim, start, n).contiguous()), metadata[-1]))
    properties = TensorProperties(dtype=t.dtype, layout=t.layout, requires_grad=False, memory_format=torch.contiguous_format)
    whole = ShardedTensorMetadata(shards_metadata=metadata, size=torch.Size(size), tensor_properties=properties)
    if all(type(s.tensor) is torch.Tensor for s in mine):
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, whole, process_group=pg)
    # its checks ask a tensor for things that a ShardedTensor does not have
    st = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.empty(s.metadata.shard_sizes, dtype=t.dtype), s.metadata) for s in mine], whole, process_group=pg)
    st._local_shards = mine
    return st


PARAMETERS = {"rows": ((7, 4), 0), "columns": ((6, 5), 1), "bias": ((5,), 0), "norm": ((3,), None), "cube": ((4, 3, 5), 2)}
_groups = {}


def groups(tp):
    """(tensor-parallel group, data-parallel group) of this rank; mesh rows are data-parallel."""
    world = dist.get_world_size()
    key = (dist.group.WORLD, tp)  # of the world that is met now
    if key not in _groups:
        _groups.clear()
        mine = {}
        rows, columns = [list(range(i, i + tp)) for i in range(0, world, tp)], [list(range(i, world, tp)) for i in range(tp)]
        for name, lists in (("tp", rows), ("dp", columns)):
            for ranks in lists:
                pg = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    mine[name] = pg
        _groups[key] = mine
    return _groups[key]["tp"], _groups[key]["dp"]


def content(name, salt):
    shape = PARAMETERS[name][0]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) * 100 + salt))


def nested_model(tp):
    tp_pg, dp_pg = groups(tp)
    return {n: sharded(content(n, 0), dp_pg) if dim is None else sharded(content(n, 0), tp_pg, dim, lambda x: sharded(x, dp_pg))
            for n, (_, dim) in PARAMETERS.items()}


def nested_save(path, tp, by="pytorch", url=None):
    """Model and optimizer state, nested as FSDP1 over TP nests them; a frozen parameter's state is not in the model."""
    tp_pg, dp_pg = groups(tp)
    state = {}
    for n, (_, dim) in PARAMETERS.items():
        wrap = (lambda x: x) if dim is None else (lambda x: sharded(x, dp_pg))
        state[n] = {k: sharded(content(n, 1 + i), dp_pg if dim is None else tp_pg, 0 if dim is None else dim, wrap)
                    for i, k in enumerate(("exp_avg", "exp_avg_sq"))}
        state[n]["step"] = torch.tensor(3.0)
        state[n]["one"] = torch.full((1, 1), 4.0)
    state["lost"] = {"exp_avg": torch.arange(11.0), "count": 3}
    param_groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(PARAMETERS)}]
    sd = {"model": nested_model(tp), "optim": {"state": state, "param_groups": param_groups}}
    if by == "pytorch":
        dcp.save(sd, checkpoint_id=path)
    else:
        with package.daemon(url) as dcpd:
            dcpd.save(sd, path)


@contextlib.contextmanager
def group_ranks():
    """PyTorch 2.15 counts the ranks of a data-parallel group from 0 and then takes them for global ones, so that it refuses its own
    tensors unless the group is ranks 0 to n - 1. Inside they are taken for what they are."""
    from torch.distributed._shard.sharded_tensor import api

    before = api._parse_and_validate_remote_device
    api._parse_and_validate_remote_device = lambda pg, device: (dist.get_process_group_ranks(pg)[device.rank()], device.device())
    try:
        yield
    finally:
        api._parse_and_validate_remote_device = before


def name_global_ranks(x):
    """Puts global ranks into the placements of what was made inside of group_ranks."""
    if isinstance(x, dict):
        for v in x.values():
            name_global_ranks(v)
    elif isinstance(x, ShardedTensor):
        for s in x.metadata().shards_metadata:
            s.placement = _remote_device(f"rank:{dist.get_process_group_ranks(x._process_group)[s.placement.rank()]}/cpu")


def nested_load(path, tp, url):
    model = nested_model(tp)
    if tp == 1:  # the group is the world: PyTorch needs no help
        theirs = load("pytorch", model, "optim", path, url)
    else:
        with group_ranks():
            theirs = load("pytorch", model, "optim", path, url)
        name_global_ranks(theirs)
    return said(theirs), said(load("dcpd", model, "optim", path, url))


def nested_refused(path, url):
    """What each of them says to models that are nested as they must not be."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Cut, distribute_tensor

    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inside = {"rows": sharded(content("rows", 0), world, 0, lambda x: distribute_tensor(x, mesh, [Cut(0)]))}
    around = distribute_tensor(content("rows", 0), mesh, [Cut(0)])
    around._local_tensor = distribute_tensor(content("rows", 0), mesh, [Cut(0)])
    out = []
    for model in (inside, {"rows": around}):
        for by in ("pytorch", "dcpd"):
            try:
                load(by, model, "optim", path, url)
                out.append("nothing")
            except Exception as e:
                out.append(str(e))
    return out


# ------------------------------------------------------------------------------------------------------------ forms


def forms_save(path, form):
    """Optimizer state of a plain model in the forms that people store it in."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if form != "empty" else torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.rand(3, 7)).sum().backward()
    optimizer.step()
    if form == "index":
        state = optimizer.state_dict()
    else:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
        state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=path)


def forms_load(path, url):
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1)).state_dict()
    return tuple(said(load(by, model, "optim", path, url)) for by in ("pytorch", "dcpd"))
