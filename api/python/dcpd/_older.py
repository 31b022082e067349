"""Checkpoints of PyTorch before 2.4, which kept a container without a tensor in it whole, as one value: an optimizer's `param_groups`,
say. A target of today asks for each of its numbers. PyTorch's own load looks for the old keys when it finds none of the new ones; so does
`load(into=)`, when it is told that keys are missing.
"""
from __future__ import annotations

from typing import Any, Collection, Dict, List, Optional

from . import _ask, _group, _tensors, _tree, errors
from .client import Client


class Older(Exception):
    """The checkpoint has containers as values; `names` are all its values."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names


def look(g: _group.Group, everyone: _group.Group, c: Client, source: Any, d: _tensors.Described, keys: Optional[List[str]]) -> None:
    """Every rank, after keys were missing: raises Older if it may help any of them."""
    names: Any = ()
    if g.rank == 0:
        try:
            names = frozenset(x["fqn"] for x in c.checkpoints.tensors(source)[1])
        except errors.DcpdError:
            pass  # what was wrong already is said
    names = g.broadcast(names)
    if any(everyone.gather(bool(_containers(d, names, keys)))):
        raise Older(names)


def _containers(d: _tensors.Described, names: Collection[str], keys: Optional[List[str]]) -> Dict[str, _tree.Path]:
    """Those of the target that the checkpoint has as a value, and of whose parts it lacks one."""
    beside = {d.paths[k[0]][:i] for k in d.keys for i in range(len(d.paths[k[0]]))}  # a tensor is beneath
    out: Dict[str, _tree.Path] = {}
    for path in [d.paths[fqn] for fqn in d.values if fqn not in names]:
        for i in range(1, len(path)):
            key = ".".join(map(str, path[:i]))
            if key in names and path[:i] not in beside and (keys is None or _ask.selected(keys, key)):
                out[key] = path[:i]
                break
    return out


def described(d: _tensors.Described, names: Collection[str], keys: Optional[List[str]]) -> _tensors.Described:
    """The same target, asking for what such a checkpoint has."""
    whole = _containers(d, names, keys)
    tops = frozenset(whole.values())
    parts = {fqn for fqn in d.values if any(d.paths[fqn][:i] in tops for i in range(1, len(d.paths[fqn])))}
    values = {**{k: v for k, v in d.values.items() if k not in parts}, **dict.fromkeys(whole)}
    return d._replace(values=values, paths={**{k: v for k, v in d.paths.items() if k not in parts}, **whole})
