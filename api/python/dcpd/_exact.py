"""State dicts of frameworks, with what flat keys cannot say.

A checkpoint keeps no empty mapping, and its keys are text: an optimizer's `{"state": {0: …}}` would come back with the key "0", which
load_state_dict takes without a word and ignores. `pack` notes such places beside the entries, `unpack` puts them back.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Dict, List, Optional, Sequence

from . import _tensors, _tree

NOTES = "__dcpd_structure__"


def pack(tree: Mapping[Any, Any]) -> Dict[Any, Any]:
    """The tree with one more entry at the top, if there is anything to note: [[path, original keys or None where it is empty], …]."""
    notes: List[Any] = []
    _look(tree, [], notes)
    return {**tree, NOTES: notes} if notes else dict(tree)


def _look(x: Any, path: List[Any], notes: List[Any]) -> None:
    if isinstance(x, Mapping):
        if not x:
            notes.append([path, None])
        elif any(type(k) is not str for k in x):
            notes.append([path, list(x)])
        for k, v in x.items():
            _look(v, [*path, k if type(k) is str else str(k)], notes)
    elif isinstance(x, list) and _tree._opens(x, _tensors.is_tensor):
        for i, v in enumerate(x):
            _look(v, [*path, i], notes)


def _as_text(at: Any) -> Any:
    """load gives an optimizer's state its numbers back by itself; the notes speak of the text that was stored."""
    if isinstance(at, dict) and any(type(k) is int for k in at):
        items = [(str(k) if type(k) is int else k, v) for k, v in at.items()]
        at.clear()
        at.update(items)
    return at


def unpack(tree: Dict[Any, Any], keys: Optional[Sequence[str]] = None) -> Dict[Any, Any]:
    """What `pack` was given; a tree without notes as it is. keys: it holds these at the top only, loaded together with NOTES."""
    notes = [n for n in tree.pop(NOTES, []) if keys is None or (n[0] and n[0][0] in keys)]
    for path, names in notes:
        at: Any = tree
        for part in path if names is not None else path[:-1]:
            at = _as_text(at)
            if part not in at if isinstance(at, dict) else part >= len(at):
                break
            at = at[part]
        else:
            _as_text(at)
    for path, names in notes:
        if names is None:
            _tree.set_at(tree, path, {})
    for path, names in reversed(notes):  # the inner ones first: the outer ones change the keys on the way there
        if names is None:
            continue
        at = tree
        for part in path:
            at = at[part]
        found = dict(at)
        at.clear()
        at.update((k, found[str(k)]) for k in names)
    return tree
