"""Deltas: how a checkpoint or state dict differs from another, and the two made one again."""
from __future__ import annotations

from typing import Any, Dict, Optional

from . import _where
from .client import Client, ref_object


def _side(target: _where.Target, client: Client) -> Dict[str, Any]:
    if isinstance(target, str) and target.startswith("shm:"):
        return dict(ref_object(target))
    return dict(_where.resolve(target, client).object)


def delta(base: _where.Target, new: _where.Target, out: _where.Target, *, encoding: str = "xor", overwrite: bool = False,
          client: Optional[Client] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
    """Writes how `new` differs from `base` as the checkpoint `out`, in the form that slime writes and SGLang's /pull_weights applies.

    base, new: checkpoints, or state dicts in shared memory ("shm:NAME"), of the same tensors in any layouts and formats. encoding: "xor",
    or "overwrite" (smaller where few bytes change). Returns the job's result: "content_digest", "base_content_digest", "changed_tensors",
    "bytes", …; values of `new` travel in the index. Raises MissingKey, StateDictMismatch, CheckpointExists.
    """
    place = _where.resolve(out, client, make=True)
    at = place.client
    return dict(at.jobs.run("delta", timeout, base=_side(base, at), source=_side(new, at), target=place.object, encoding=encoding,
                            options={"overwrite": overwrite})["result"])


def apply(base: _where.Target, delta: _where.Target, out: _where.Target, *, format: str = "dcp", overwrite: bool = False,
          client: Optional[Client] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
    """Writes what the delta was made of as the checkpoint `out`, bit for bit, or into shared memory ("shm:NAME"). The delta's base may be
    "shm:NAME", too. Another base raises StateDictMismatch (code `base_mismatch`) before anything is written. Returns the job's result."""
    if isinstance(out, str) and out.startswith("shm:"):
        at = _where.resolve(delta, client).client
        return dict(at.jobs.run("apply", timeout, base=_side(base, at), source=_side(delta, at), target=dict(ref_object(out)))["result"])
    place = _where.resolve(out, client, make=True)
    at = place.client
    return dict(at.jobs.run("apply", timeout, base=_side(base, at), source=_side(delta, at), target={**place.object, "format": format},
                            options={"overwrite": overwrite})["result"])
