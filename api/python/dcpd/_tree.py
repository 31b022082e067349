"""State dicts as flat keys, by the rules of torch.distributed.checkpoint.

Mappings are always taken apart (keys become strings), lists only if there is a tensor or a mapping somewhere in them; all else is a
leaf. A flat key is its path joined by dots. Empty mappings leave no trace, as in PyTorch.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, MutableMapping, Sequence, Tuple, Union

from . import errors

Path = Tuple[Union[str, int], ...]
PLAIN = frozenset((int, float, str, bytes, bool, type(None)))


def _opens(x: Any, is_tensor: Callable[[Any], bool]) -> bool:
    """A list is taken apart if it holds a tensor or a mapping, however deep."""
    for y in x:
        t = type(y)
        if t in PLAIN:
            continue
        if isinstance(y, Mapping) or is_tensor(y) or (isinstance(y, list) and _opens(y, is_tensor)):
            return True
    return False


def flatten(tree: Mapping[Any, Any], is_tensor: Callable[[Any], bool],
            leaf_types: FrozenSet[Any] = frozenset()) -> Tuple[Dict[str, Any], Dict[str, Path]]:
    """({flat key: leaf}, {flat key: path}) in the order of the tree. Two leaves of one key raise StateDictMismatch.

    leaf_types: exact types that need no further look; a state dict has tens of thousands of tensors, and this runs while the trainer waits.
    """
    leaves: Dict[str, Any] = {}
    paths: Dict[str, Path] = {}
    quick = leaf_types.union(PLAIN)

    def walk(pairs: Iterable[Tuple[Any, Any]], path: Path, prefix: str, listed: bool) -> None:
        for k, y in pairs:
            part: Union[str, int] = k if listed or type(k) is str else str(k)
            key = f"{prefix}{part}"
            if type(y) not in quick:
                if isinstance(y, Mapping):
                    walk(y.items(), (*path, part), key + ".", False)
                    continue
                if isinstance(y, list) and _opens(y, is_tensor):
                    walk(enumerate(y), (*path, part), key + ".", True)
                    continue
            if key in leaves:
                raise errors.StateDictMismatch(f"two entries have the flat key {key!r}", code="duplicate_key", fqn=key)
            leaves[key] = y
            paths[key] = (*path, part)

    if not isinstance(tree, Mapping):
        raise errors.StateDictMismatch(f"a state dict is a mapping, not {type(tree).__name__}")
    walk(tree.items(), (), "", False)
    return leaves, paths


def set_at(root: MutableMapping[str, Any], path: Sequence[Union[str, int]], value: Any) -> None:
    """Puts a leaf where its path says, making mappings for strings and lists for numbers; lists grow with None."""
    at: Any = root
    for i, part in enumerate(path):
        last = i + 1 == len(path)
        fresh: Any = value if last else ([] if isinstance(path[i + 1], int) else {})
        if isinstance(part, int):
            if part > 1 << 24:
                raise errors.CheckpointDamaged(f"list position {part} in the path {list(path)}")
            at.extend([None] * (part + 1 - len(at)))
            if last or at[part] is None:
                at[part] = fresh
        elif last or part not in at:
            at[part] = fresh
        at = at[part]


def replace(root: Any, path: Sequence[Union[str, int]], value: Any) -> None:
    """Replaces the leaf at `path` of a tree that has one there; a key that was no string (`{0: …}`) is found by its text."""
    at = root
    for i, part in enumerate(path):
        key: Any = part
        if isinstance(at, Mapping) and part not in at:
            key = next((k for k in at if str(k) == part), part)
        if i + 1 == len(path):
            at[key] = value
        else:
            at = at[key]


def nest(leaves: Iterable[Tuple[Sequence[Union[str, int]], Any]]) -> Dict[str, Any]:
    """The tree of (path, leaf) pairs."""
    root: Dict[str, Any] = {}
    for path, value in leaves:
        set_at(root, path, value)
    return root


def numbered(tree: Dict[str, Any]) -> Dict[str, Any]:
    """The same tree, whose optimizer states have the numbers of their parameters again as keys, not as text: load_state_dict would take
    {"0": …} without a word and ignore it. An optimizer's state is known by {"state", "param_groups": [{"params": [numbers]}]}."""
    groups, state = tree.get("param_groups"), tree.get("state")
    if isinstance(groups, list) and isinstance(state, dict) and all(isinstance(g, dict) for g in groups):
        ids = {str(p): p for g in groups if isinstance(g.get("params"), list) for p in g["params"] if type(p) is int}
        if state and all(k in ids for k in state):
            tree["state"] = {ids[k]: v for k, v in state.items()}
    for x in tree.values():
        if isinstance(x, dict):
            numbered(x)
    return tree


def plain(x: Any) -> bool:
    """What JSON can hold without loss: exact None, bool, int of 64 bits, finite float, str of valid text, lists of them."""
    t = type(x)
    if x is None or t is bool:
        return True
    if t is int:
        return bool(-(1 << 63) <= x < 1 << 63)
    if t is float:
        return bool(x - x == 0.0)
    if t is str:
        return _is_text(x)
    return t is list and all(plain(y) for y in x)


def _is_text(x: str) -> bool:
    try:
        x.encode()
        return True
    except UnicodeEncodeError:
        return False


def listing(keys: Iterable[str], n: int = 10) -> str:
    """The first n keys, and how many more there are, for a message."""
    ks: List[str] = list(keys)
    return ", ".join(ks[:n]) + (f" and {len(ks) - n} more" if len(ks) > n else "")
