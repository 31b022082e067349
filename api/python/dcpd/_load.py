"""load: a checkpoint as new tensors, or into those that are there.

New tensors: dcpd loads into a segment, which is mapped here and then forgotten by its name; the tensors are views of it, so nothing
is copied. New tensors on a GPU are allocated there and filled as a state dict is: a segment of the whole checkpoint would be one copy more,
and shared memory need not hold it. Into a state dict: see _into.py.
"""
from __future__ import annotations

import logging
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from . import _ask, _dtypes, _group, _hosts, _into, _session, _tensors, _tree, _where, errors, image, values
from .client import Client

_log = logging.getLogger("dcpd")


def load(checkpoint: _where.Target, into: Any = None, *, keys: Optional[Iterable[str]] = None, device: Any = None, strict: bool = True,
         transform: Any = None, vars: Optional[Mapping[str, int]] = None, weights_only: bool = True, verify: bool = True,
         process_group: Any = None, no_dist: bool = False, progress: bool = False, timeout: Optional[float] = None,
         client: Optional[Client] = None, spread: Optional[bool] = None) -> Any:
    """Loads a checkpoint ("STORAGE:NAME", or a path to a DCP directory); without `into` also a state dict out of the memory of a node of
    the cluster ("shm:NODE/NAME"), such as a copy that `neighbours` of a save made there.

    Without `into`: returns a new state dict, nested as it was saved, with whole tensors of torch if it is installed, else arrays of
    numpy. They are views of shared memory that this call has made. device: new tensors there; those on a GPU are filled by dcpd, while it
    reads the next (api/device-memory.md).
    With `into`: fills its tensors, DTensors, ShardedTensors and arrays in place, whatever the layout of the checkpoint, casting dtypes as
    copy_ does; meta tensors are replaced by real ones; values are replaced in their containers; Stateful members get
    load_state_dict(). Returns `into`. strict: a key that the checkpoint lacks is an error that lists all of them, before anything is
    changed; False leaves it as it is. After other errors a part may have been loaded.

    transform: conversion rules (api/transforms.md): the name of a ready set, a file, rules, or a list of these; vars: numbers for {NAME} in
    their sizes. All other arguments, `keys` and `into`, are about the names that the rules make.
    keys: flat keys ("model.w") or their beginnings ("model"); default all. weights_only: values of other than plain classes come as
    `Opaque`, with a warning; False unpickles them here. verify: check digests of what is read. timeout: seconds.
    spread: whether ranks on several hosts read each byte once from the storage and pass it on to the others. That needs a daemon on each
    host, all of them nodes of one cluster. Default: where it can be, and most of the bytes are wanted by several hosts.
    In a torch.distributed job every rank calls it. Raises NotFound, MissingKey, StateDictMismatch, CheckpointDamaged, …
    """
    g = _hosts.group(process_group, no_dist)
    wanted = None if keys is None else list(keys)
    if isinstance(keys, str):
        raise TypeError("keys: a list of keys, not one string")
    ask = _ask.Ask(checkpoint, g, client, strict, weights_only, verify, progress and g.first, timeout, transform, vars)
    g.check("load", (ask.text, wanted, spread))
    ask.checkpoint = _hosts.one_source(g, checkpoint, client)
    if into is None:
        return _new(ask, wanted, device, spread)
    return _into.fill(ask, into, wanted, spread)


# ---------------------------------------------------------------------------------------------------------- new tensors


def _new(ask: _ask.Ask, keys: Optional[List[str]], device: Any, spread: Optional[bool]) -> Any:
    g = ask.group
    found: Any = None
    place: Any = None
    listed: Optional[Dict[str, _Leaf]] = None
    failure: Optional[BaseException] = None
    name, c = "", ask.client
    try:
        if g.rank == 0:
            place = _where.resolve(ask.checkpoint, ask.client, memory=True)
            listed = _list(ask, place, keys) if _is_other(device) else None
    except Exception as e:
        failure = e
    ask.spread = _hosts.spread(g, place, spread)
    if not _hosts.everywhere(g, listed is not None):
        listed = None
    try:
        if g.rank == 0 and failure is None:
            c, name = place.client, _session.new_name()
            found = (c.url, name, listed) if listed else (c.url, name, None, *_fetch(ask, place, name, keys))
    except Exception as e:
        failure = e
    try:
        seen = g.agree((ask.text, keys, _group.place(), found), failure)
        _ask.same_call(seen)
        url, name, listed, *rest = seen[0][3]
        if listed:
            name = ""
            return _filled(ask, listed, device, spread)
        segment, size = rest
        try:
            out = _map(segment, size, "w" if g.size == 1 else "c", ask, keys, device)
            failure = None
        except Exception as e:
            failure = e
        g.agree(None, failure)
        return out
    finally:
        if g.rank == 0 and c is not None and name:
            _ask.remove(c, name)


def _is_other(device: Any) -> bool:
    """Whether tensors are wanted in other memory than the host's."""
    if device is None:
        return False
    try:
        import torch
    except ImportError:
        raise errors.RequestRefused("device= needs torch") from None
    return torch.device(device).type not in ("cpu", "meta")


class _Leaf(NamedTuple):
    """An entry of a checkpoint. dtype: "" of a value."""

    path: Tuple[Any, ...]
    dtype: str
    shape: Tuple[int, ...]


def _list(ask: _ask.Ask, place: _where.Place, keys: Optional[List[str]]) -> Optional[Dict[str, _Leaf]]:
    """The entries that are asked for, by FQN. None where a load of new tensors goes through shared memory whole; why is said."""
    if "storage" not in place.object:  # a load in parts is several jobs
        return _whole(ask, "a state dict in memory may get a new generation between two parts of a load")
    if ask.others(place.client):  # which nobody watches
        return _whole(ask, "its rules read another checkpoint, which may be replaced between two parts of a load")
    try:
        listed = ask.made(place.client, place.object) if ask.rules else place.client.checkpoints.tensors(place.object)
    except errors.DcpdError as e:
        if ask.rules:
            raise
        return _whole(ask, f"its tensors cannot be listed: {e.message}")
    if listed is None:
        return _whole(ask, "the rules make more tensors than a plan lists")
    tensors, found = listed
    out = {t["fqn"]: _Leaf(tuple(t.get("path") or [t["fqn"]]), t["dtype"], tuple(t["shape"])) for t in tensors}
    out.update({v["fqn"]: _Leaf(tuple(v.get("path") or [v["fqn"]]), "", ()) for v in found})
    out = {k: v for k, v in out.items() if keys is None or _ask.selected(keys, k)}
    _lacking(ask, keys, out)
    known = frozenset(_dtypes.known_to_torch().values())
    dtypes = {x.dtype for x in out.values() if x.dtype}
    if not dtypes <= known:
        return _whole(ask, f"this PyTorch lacks {', '.join(sorted(dtypes - known))}, which come as their bytes")
    return out if dtypes else None


def _whole(ask: _ask.Ask, why: str) -> Optional[Dict[str, _Leaf]]:
    """No list, said in words."""
    _log.warning("dcpd: all of %s goes through shared memory at once, and PyTorch copies it to the device, which takes longer: %s",
                 ask.text, why)
    return None


def _filled(ask: _ask.Ask, listed: Dict[str, _Leaf], device: Any, spread: Optional[bool]) -> Dict[str, Any]:
    """New tensors on `device`, filled in place."""
    flat: Dict[str, Any] = {}
    failure: Optional[BaseException] = None
    try:
        flat = {k: _empty(x, device) if x.dtype else None for k, x in listed.items()}
    except Exception as e:  # no room there
        failure = e
    ask.group.agree(None, failure)
    _into.fill(ask, flat, None, spread)
    return _tree.numbered(_tree.nest((x.path, flat[k]) for k, x in listed.items()))


def _empty(x: _Leaf, device: Any) -> Any:
    import torch

    return torch.empty(x.shape, dtype=_dtypes.to_torch(x.dtype), device=device)


def _lacking(ask: _ask.Ask, keys: Optional[List[str]], there: Iterable[str]) -> None:
    """Raises MissingKey for keys that select nothing of what is there."""
    names = list(there)
    lacking = [k for k in keys or [] if not any(_ask.selected([k], f) for f in names)]
    if lacking and ask.strict:
        raise errors.MissingKey(f"{ask.text} has no {_tree.listing(lacking)}", code="missing_key", fqn=lacking[0])


def _fetch(ask: _ask.Ask, place: _where.Place, name: str, keys: Optional[List[str]]) -> Tuple[str, int]:
    """Runs the load; (segment, bytes of its image)."""
    c = place.client
    target = {"state_dict": name, "world_size": 1, "lease_seconds": _ask.LEASE}
    job = ask.submit(c, place.object, target, keys)
    try:
        ask.wait(c, job)
    except BaseException:
        _ask.give_up(c, job.id)
        raise
    slot = c.state_dicts.get(name)["ranks"][0]["slots"][0]
    return slot["segment"], slot["image_bytes"]


def _map(segment: str, size: int, mode: str, ask: _ask.Ask, keys: Optional[List[str]], device: Any) -> Dict[str, Any]:
    s = image.Segment(segment, mode, size)
    parsed = image.parse(s.map)
    leaves = tensors_of(s.map, parsed, device)
    leaves.update(values.decode_all(parsed.values, ask.weights_only))
    _lacking(ask, keys, leaves)
    return _tree.numbered(_tree.nest((parsed.paths.get(f, [f]), v) for f, v in leaves.items()))


def tensors_of(buffer: Any, parsed: image.Parsed, device: Any = None) -> Dict[str, Any]:
    """{FQN: tensor or array} of an image that holds whole tensors, without a copy but to a device."""
    try:
        import torch
    except ImportError:
        _is_other(device)
        return {e.spec.fqn: _tensors.numpy_view(buffer, e.spec, e.begin) for e in parsed.entries}
    base = torch.frombuffer(buffer, dtype=torch.uint8)
    out = {}
    for e in parsed.entries:
        t = _tensors.torch_view(base, e.spec, e.begin)
        out[e.spec.fqn] = t if device is None or torch.device(device).type == "cpu" else t.to(device)
    return out
