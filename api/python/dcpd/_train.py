"""What a training loop has to keep, in a form that any number of ranks can take up again: used by the integrations.

Model and optimizer by PyTorch's own get_state_dict, whose keys are names of parameters whatever wraps the model (DDP, FSDP, DTensor).
What belongs to one rank, such as its random numbers, has a key of its own for each rank: a run on fewer ranks takes what fits.
"""
from __future__ import annotations

import random
import re
from typing import Any, Dict, List, Optional, Tuple

from . import _exact, _load, _where, errors
from .client import Client


def state_of(model: Any, optimizers: List[Any]) -> Dict[str, Any]:
    """{"model": …, "optim": {"0": …}}, tensors not copied. Optimizers that have made no step get their state."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {"model": get_model_state_dict(model),
            "optim": {str(i): get_optimizer_state_dict(model, o) for i, o in enumerate(optimizers)}}


def restore(model: Any, optimizers: List[Any], ref: str, what: Tuple[str, ...], client: Client, under: str = "") -> None:
    """Fills model and optimizers (those in `what`: "model", "optim") from a checkpoint, on all ranks. under: the key that holds both."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    into = {k: v for k, v in state_of(model, optimizers if "optim" in what else []).items() if k in what and v}
    _load.load(ref, into={under: into} if under else into, client=client)
    if "model" in into:
        set_model_state_dict(model, into["model"])
    for i, o in enumerate(optimizers if "optim" in into else []):
        set_optimizer_state_dict(model, o, into["optim"][str(i)])


def rest(ref: str, keys: List[str], client: Client) -> Dict[str, Any]:
    """Parts that are small and are taken as they were saved."""
    got = _load.load(ref, keys=[*keys, _exact.NOTES], strict=False, client=client, no_dist=True)
    return _exact.unpack(got, [k for k in keys if k in got])


def random_state() -> Tuple[Any, ...]:
    """The generators of this rank: Python's, torch's, CUDA's, numpy's. A tuple: one value, which ranks do not share."""
    import torch

    np, numbers = _numpy(), None
    if np is not None:
        kind, key, *more = np.random.get_state()
        numbers = (kind, torch.from_numpy(key.astype("int64")), *more)
    return random.getstate(), torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [], numbers


def set_random_state(found: Optional[Tuple[Any, ...]]) -> None:
    """None: a checkpoint of fewer ranks has none for this one."""
    if found is None:
        return
    import torch

    python, here, cuda, numbers = found
    random.setstate(python)
    torch.set_rng_state(here)
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    np = _numpy()
    if np is not None and numbers is not None:
        kind, key, *more = numbers
        np.random.set_state((kind, key.numpy().astype("uint32"), *more))


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def numbered(where: str, client: Optional[Client] = None) -> List[Tuple[int, str]]:
    """The checkpoints in `where` whose names end in a number ("checkpoint-20"), in its order. Complete ones only: dcpd shows no others."""
    try:
        place = _where.resolve(f"{where}/x" if _where.is_reference(where) else where.rstrip("/") + "/x", client)
    except errors.NotFound:
        return []
    prefix = place.name[:-1]
    names = [c["name"][len(prefix):] for c in place.client.checkpoints.list(place.storage, prefix=prefix)]
    return sorted((int(m[1]), n) for n in names if (m := re.fullmatch(r"[A-Za-z]*-?(\d+)", n)))


def newest(where: str, client: Optional[Client] = None) -> Optional[str]:
    """The checkpoint of the highest number in `where` ("main:run1": "main:run1/checkpoint-20"), or None; the same on all ranks if they
    ask together."""
    found = numbered(where, client)
    return f"{where.rstrip('/')}/{found[-1][1]}" if found else None
