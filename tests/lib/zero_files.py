"""Checkpoints as DeepSpeed 0.19 writes them (runtime/engine.py, zero/stage_1_and_2.py, stage3.py, checkpoint/ds_to_universal.py), of
tensors that the caller chooses, without DeepSpeed. tests/interop/test_zero_deepspeed.py compares them with the real ones.

    groups = [{"w": torch.randn(5, 3)}, {"b": torch.randn(7)}]         parameters by group: the fp32 masters
    write(folder, 3, 2, groups, frozen={...}, buffers={...}, shared={"head": "w"})     → global_step7, latest
    want = expected(groups, ...)                                       FQN → tensor, as dcpd names them
"""
import collections
import math

import torch

KEYS = {"exp_avg": 0.5, "exp_avg_sq": 0.25}
STEP = 7


def moment(key, tensor):
    return tensor.float() * KEYS[key] + 1


def expected(groups, frozen=None, buffers=None, shared=None, moments=True):
    out = {**(buffers or {}), **(frozen or {})}
    for group in groups:
        for name, p in group.items():
            out[name] = p
            if moments:
                out.update({f"optim.{k}.{name}": moment(k, p) for k in KEYS})
                out[f"optim.step.{name}"] = torch.tensor(float(STEP))
    out.update({alias: out[of] for alias, of in (shared or {}).items()})
    return out


def module(groups, frozen, buffers, shared, sliced):
    """What the model's state_dict holds: 16-bit parameters, in stage 3 nothing of them."""
    out = collections.OrderedDict()
    for name, p in [*((k, v) for g in groups for k, v in g.items()), *frozen.items()]:
        out[name] = torch.empty(0, dtype=torch.bfloat16) if sliced else p.to(torch.bfloat16) if name not in frozen else p
    out.update(buffers)
    out.update({alias: out[of] for alias, of in shared.items()})
    return out


def shares(tensor, world):
    """Stage 3: each rank has ceil(numel / world) elements, the last ones padding."""
    size = math.ceil(tensor.numel() / world)
    flat = torch.cat([tensor.reshape(-1), torch.full((size * world - tensor.numel(),), 99, dtype=tensor.dtype)])
    return list(flat.split(size)) if size else [flat] * world


def partitions(group, world, alignment):
    """Stages 1, 2: the group flat, each parameter aligned, padded to 2 * world; ([rank's partition], [its padding], [parameter's])."""
    parts, between, at = [], [], 0
    for i, p in enumerate(group.values()):
        parts.append(p.reshape(-1))
        at += p.numel()
        between.append(0 if i + 1 == len(group) else -at % alignment)
        parts.append(torch.full((between[-1],), 99.0))
        at += between[-1]
    size = (at + -at % (2 * world)) // world
    parts.append(torch.full((size * world - at,), 99.0))
    return [p.clone() for p in torch.cat(parts).split(size)], [min(size, max(0, size * (r + 1) - at)) for r in range(world)], between


def optimizer(flats, values):
    """torch.optim's state dict of flat parameters."""
    state = {} if values is None else {g: {"step": torch.tensor(float(STEP)), **{k: values(k, flat) for k in KEYS}}
                                       for g, flat in enumerate(flats)}
    return {"state": state, "param_groups": [{"lr": 0.1 * (g + 1), "betas": (0.9, 0.95), "params": [g]} for g in range(len(flats))]}


def optim_states(stage, world, rank, groups, alignment, moments, elastic):
    common = {"dynamic_loss_scale": False, "overflow": False}
    values = moment if moments else None
    if stage == 3:
        flats = [torch.cat([shares(p, world)[rank] for p in g.values()]) for g in groups]
        return {"zero_stage": 3, **common, "partition_count": world, "optimizer_state_dict": optimizer(flats, values),
                "fp32_flat_groups": flats}
    cut = [partitions(g, world, alignment) for g in groups]
    flats, paddings = [c[0][rank] for c in cut], [c[1][rank] for c in cut]
    base = optimizer(flats, values)
    out = {**common, "clip_grad": 1.0, "base_optimizer_state": base}
    if elastic:
        out["base_optimizer_state"] = [{k: v[:len(v) - n] if v.dim() else v for k, v in base["state"][g].items()}
                                       for g, n in enumerate(paddings)]
    return {**out, "single_partition_of_fp32_groups": [f[:len(f) - n] for f, n in zip(flats, paddings)], "zero_stage": stage,
            "group_paddings": paddings, "param_alignment_paddings": [c[2] for c in cut], "partition_count": [world] * len(groups),
            "ds_version": "0.19.8", "param_slice_mappings": [collections.OrderedDict() for _ in groups]}


def model_states(stage, world, rank, groups, frozen, buffers, shared):
    saves_frozen = stage > 1
    fragments = {k: shares(v, world)[rank] if stage == 3 else v for k, v in frozen.items()}
    return {"module": module(groups, frozen, buffers, shared, stage == 3), "buffer_names": list(buffers), "optimizer": None,
            "param_shapes": [collections.OrderedDict((k, v.shape) for k, v in g.items()) for g in groups],
            "frozen_param_shapes": collections.OrderedDict((k, v.shape) for k, v in frozen.items()) if saves_frozen else None,
            "shared_params": dict(shared) if rank == 0 else {},
            "frozen_param_fragments": collections.OrderedDict(fragments) if saves_frozen else None,
            "lr_scheduler": {"last_batch_iteration": STEP}, "global_steps": STEP, "ds_config": {"zero_optimization": {"stage": stage}},
            "ds_version": "0.19.8", "epoch": 3, "table": torch.arange(6).reshape(2, 3).t()}


def write(folder, stage, world, groups, frozen=None, buffers=None, shared=None, alignment=1, moments=True, elastic=False):
    """Returns the folder of the step."""
    frozen, buffers, shared = frozen or {}, buffers or {}, shared or {}
    at = folder / f"global_step{STEP}"
    at.mkdir(parents=True)
    (folder / "latest").write_text(at.name)
    for rank in range(world):
        model = model_states(stage, world, rank, groups, frozen, buffers, shared)
        if stage == 3 or rank == 0:
            torch.save(model, at / (f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"))
        optim = optim_states(stage, world, rank, groups, alignment, moments, elastic)
        torch.save({"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.8"},
                   at / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return at


def write_universal(folder, stage, world, groups, frozen=None, buffers=None, shared=None, step=None):
    """As ds_to_universal.py makes it of such a checkpoint; step: of each parameter, instead of a tensor (stages 1, 2)."""
    frozen, buffers, shared = frozen or {}, buffers or {}, shared or {}
    at = folder / f"global_step{STEP}_universal"
    at.mkdir(parents=True)
    (folder / "latest_universal").write_text(at.name)
    for rank in range(world if stage == 3 else 1):
        model = model_states(stage, world, rank, groups, frozen, buffers, shared)
        torch.save(model, at / (f"zero_pp_rank_{rank}_" * (stage == 3) + "mp_rank_00_model_states.pt"))
    for name, p in [(k, v) for g in groups for k, v in g.items()]:
        (at / "zero" / name).mkdir(parents=True)
        for key, value in {"fp32": p, **{k: moment(k, p) for k in KEYS}}.items():
            torch.save(value.reshape(-1) if stage == 3 else {"cat_dim": 0, "param": value}, at / "zero" / name / f"{key}.pt")
        if stage < 3:
            torch.save(torch.tensor(float(STEP)) if step is None else step, at / "zero" / name / "step.pt")
    for name, p in model_states(stage, world, 0, groups, frozen, buffers, shared)["module"].items() if stage < 3 else ():
        if not (at / "zero" / name).exists():
            (at / "zero" / name).mkdir()
            torch.save({"param": p.float()}, at / "zero" / name / "fp32.pt")
    optim = optim_states(stage, world, 0, groups, 1, True, False)
    optim = {**optim, "param_groups": optim["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["param_groups"]}
    for key in ("base_optimizer_state", "param_slice_mappings", "single_partition_of_fp32_groups"):
        optim.pop(key, None)
    torch.save(optim, at / "zero" / "optimizer_state.pt")
    return at
