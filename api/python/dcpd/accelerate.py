"""Hugging Face accelerate on dcpd: `accelerator.save_state` and `load_state` for any number of ranks.

    h = dcpd.accelerate.save_state(accelerator, "main:run1/step-100", step=100)
    dcpd.accelerate.load_state(accelerator, "main:run1/step-100")

What was given to `accelerator.prepare` and `register_for_checkpointing`: models, optimizers, schedulers, custom objects; the gradient
scaler, and each rank's random numbers. Data loaders are not saved: use accelerator.skip_first_batches.
"""
from __future__ import annotations

from typing import Any, Dict, List, Optional

from . import _exact, _group, _train, _where
from ._save import async_save
from .client import Client
from .future import SaveFuture


def _parts(accelerator: Any) -> List[Any]:
    """(model, its optimizers) of each prepared model, bare."""
    left = [getattr(o, "optimizer", o) for o in accelerator._optimizers]
    out = []
    for m in accelerator._models:
        held = {id(p) for p in m.parameters()}
        mine = [o for o in left if any(id(p) in held for g in o.param_groups for p in g["params"])]
        out.append((m, mine))
    return out


def _small(accelerator: Any) -> Dict[str, Any]:
    """Objects that keep a state of their own, by key."""
    found: Dict[str, Any] = {f"scheduler_{i}": s for i, s in enumerate(accelerator._schedulers)}
    found.update({f"custom_{i}": o for i, o in enumerate(accelerator._custom_objects)})
    if getattr(accelerator, "scaler", None) is not None:
        found["scaler"] = accelerator.scaler
    return found


def save_state(accelerator: Any, checkpoint: _where.Target, **options: Any) -> SaveFuture:
    """Copies the state of everything that `accelerator` has prepared and returns; all ranks call it. options: as for dcpd.async_save."""
    tree: Dict[str, Any] = {f"part_{i}": _train.state_of(m, o) for i, (m, o) in enumerate(_parts(accelerator))}
    tree.update({k: o.state_dict() for k, o in _small(accelerator).items()})
    tree["rng"] = {str(_group.world_rank()): _train.random_state()}
    return async_save(_exact.pack(tree), checkpoint, **options)


def load_state(accelerator: Any, checkpoint: _where.Target, *, client: Optional[Client] = None) -> None:
    """Brings everything prepared to the state of the checkpoint; all ranks call it, as many as they are now. Raises as dcpd.load."""
    place = _where.resolve(checkpoint, client)
    for i, (m, o) in enumerate(_parts(accelerator)):
        _train.restore(m, o, f"{place}", ("model", "optim"), place.client, f"part_{i}")
    rank, small = str(_group.world_rank()), _small(accelerator)
    found = _train.rest(f"{place}", [*small, f"rng.{rank}"], place.client)
    for k, o in small.items():
        if k in found:
            o.load_state_dict(found[k])
    _train.set_random_state(found.get("rng", {}).get(rank))
