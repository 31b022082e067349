"""What was described before. A trainer saves one structure again and again and waits while it is looked at, so the second look must cost
next to nothing: an `Outline` has all that a description depends on and no tensor, and `match` asks whether a tree is still of that form.

Nothing is taken for granted because an object is the same one: `t.data = …`, `resize_` and `set_` change a tensor in its place. What makes
this fast is that a tensor is asked everything at once, while its fields are in the cache, and that whole lists are compared, not leaves.
"""
from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, repeat
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from . import _dtypes, _tree

_KEYS = frozenset((str, int))
_KEPT = 4  # a process that saves model and optimizer by turns has two


class Found(NamedTuple):
    """The leaves of a tree that has an outline. sources: the local tensors and arrays by chunk; addresses: of outline.flat."""

    sources: List[Any]
    values: Dict[str, Any]
    addresses: List[int]


class Marks(NamedTuple):
    """The form of a tree: for each mapping and list on the way its keys and the types of keys and members, and its leaves in order."""

    form: List[Any]
    leaves: List[Any]


def skim(tree: Any, is_tensor: Callable[[Any], bool], leaf_types: FrozenSet[Any]) -> Optional[Marks]:
    """The marks of a tree, by the rules of _tree.flatten; None if its keys cannot be compared."""
    form: List[Any] = []
    leaves: List[Any] = []

    def walk(ks: List[Any], ys: List[Any], listed: bool) -> bool:
        kinds = list(map(type, ys))
        form.append(ks)
        form.append(kinds)
        if not listed:
            key_kinds = list(map(type, ks))  # {1: …} and {True: …} are equal, but not their text
            form.append(key_kinds)
            if not _KEYS.issuperset(key_kinds):
                return False
        if leaf_types.issuperset(kinds):
            leaves.extend(ys)
            return True
        for y, kind in zip(ys, kinds):
            if kind not in leaf_types:
                if isinstance(y, Mapping):
                    if not walk(list(y), list(y.values()), False):
                        return False
                    continue
                if isinstance(y, list):
                    opens = _tree._opens(y, is_tensor)
                    form.append(opens)
                    if opens:
                        if not walk([len(y)], y, True):
                            return False
                        continue
            leaves.append(y)
        return True

    return Marks(form, leaves) if isinstance(tree, Mapping) and walk(list(tree), list(tree.values()), False) else None


Fact = Tuple[Any, ...]


def facts(tensors: List[Any], addresses: List[int]) -> List[Fact]:
    """What a copy depends on, of each local tensor: shape, dtype, layout, and whether it is plain memory. Their addresses are added to a
    list; that is why a fact ends in None. Raises RuntimeError for tensors without such facts (nested, sparse)."""
    put = addresses.append
    return [(t.shape, t.dtype, t.layout, t.is_cpu, t.is_contiguous(), t.is_neg(), put(t.data_ptr())) for t in tensors]


def _outer(dtensors: List[Any], locals_: List[Any]) -> List[Fact]:
    out = []
    for t, local in zip(dtensors, locals_):
        spec = t._spec
        out.append((spec.mesh, spec.placements, t.shape, t.dtype, type(local)))
    return out


class Leaf(NamedTuple):
    """How one leaf was described: the keys of its chunks, and the local tensors or arrays; kind: "plain", "dtensor" (one box of a
    tensor that lies in plain sight), "other", or "value"."""

    kind: str
    keys: List[Any]
    sources: List[Any]


class Outline:
    """One structure. keys, specs and paths are those of its description; flat: the chunks that are plain memory, whose addresses `match`
    gives; rest: the other chunks."""

    def __init__(self, form: List[Any], leaves: Dict[str, Any], described: List[Leaf], paths: Dict[str, _tree.Path]) -> None:
        self.form, self.fqns, self.paths = form, list(leaves), paths
        xs = list(leaves.values())
        kinds = [d.kind for d in described]
        self.keys: List[Any] = [k for d in described for k in d.keys]
        self._plain = [i for i, k in enumerate(kinds) if k == "plain"]
        self._dtensors = [i for i, k in enumerate(kinds) if k == "dtensor"]
        self._values = [i for i, k in enumerate(kinds) if k == "value"]
        # an array of objects is a value, one of numbers is not, and both are of one type
        self._others = [(i, d.kind, d.keys) for i, d in enumerate(described)
                        if d.kind == "other" or (d.kind == "value" and hasattr(xs[i], "dtype"))]
        self._first = list(accumulate((len(d.keys) for d in described), initial=0))
        self._chunks = [self._first[i] for i in self._plain + self._dtensors]
        self._in_order = not self._others and self._chunks == list(range(len(self.keys)))
        plain = [described[i].sources[0] for i in self._plain]
        cut = [described[i].sources[0] for i in self._dtensors]
        self._facts = facts(plain + cut, [])
        self._outer = _outer([xs[i] for i in self._dtensors], cut)
        good = [f[3] and f[4] and not f[5] and not f[1].is_complex and 0 not in f[0] and self._as_keyed(c, f)
                for c, f in zip(self._chunks, self._facts)]
        self._good = None if all(good) else [k for k, g in enumerate(good) if g]
        self.flat = [c for c, g in zip(self._chunks, good) if g]
        self.rest = sorted(frozenset(range(len(self.keys))) - frozenset(self.flat))
        self.sound: Sequence[int] = ()  # addresses that were found to be memory

    def _as_keyed(self, chunk: int, fact: Fact) -> bool:
        """A local tensor of another shape or dtype than its box is left to copy_, which casts or complains."""
        key = self.keys[chunk]
        dtype = _dtypes.torch_name(fact[1]) if isinstance(key[1], str) else fact[1]
        return bool(tuple(fact[0]) == tuple(key[4] if len(key) > 3 else key[2]) and dtype == key[1])

    def match(self, marks: Marks, describe_one: Callable[[str, Any], Leaf]) -> Optional[Found]:
        """What is to be copied, if a tree with these marks has this outline; describe_one: for leaves that are looked at each time."""
        if marks.form != self.form or len(marks.leaves) != len(self.fqns):
            return None
        leaves = marks.leaves
        plain = leaves if len(self._plain) == len(leaves) else [leaves[i] for i in self._plain]
        if any(map(hasattr, plain, repeat("global_shape"))):
            return None
        tensors = plain
        if self._dtensors:
            cut = leaves if len(self._dtensors) == len(leaves) else [leaves[i] for i in self._dtensors]
            locals_ = [t._local_tensor for t in cut]
            if _outer(cut, locals_) != self._outer:
                return None
            tensors = [*plain, *locals_] if plain else locals_
        addresses: List[int] = []
        try:
            if facts(tensors, addresses) != self._facts:
                return None
        except RuntimeError:
            return None
        if self._good is not None:
            addresses = [addresses[k] for k in self._good]
        sources = self._merge(tensors, leaves, describe_one)
        if sources is None:
            return None
        return Found(sources, {self.fqns[i]: leaves[i] for i in self._values}, addresses)

    def _merge(self, tensors: List[Any], leaves: List[Any], describe_one: Callable[[str, Any], Leaf]) -> Optional[List[Any]]:
        if self._in_order:
            return tensors
        sources: List[Any] = [None] * len(self.keys)
        for c, t in zip(self._chunks, tensors):
            sources[c] = t
        for i, kind, keys in self._others:
            d = describe_one(self.fqns[i], leaves[i])
            if d.kind != kind or d.keys != keys:
                return None
            sources[self._first[i]:self._first[i] + len(keys)] = d.sources
        return sources


_kept: List[Outline] = []


def find(marks: Marks, describe_one: Callable[[str, Any], Leaf]) -> Optional[Tuple[Outline, Found]]:
    """The outline that a tree has, of those kept."""
    for o in _kept:
        found = o.match(marks, describe_one)
        if found is not None:
            if o is not _kept[0]:
                _kept.remove(o)
                _kept.insert(0, o)
            return o, found
    return None


def keep(marks: Marks, leaves: Dict[str, Any], described: List[Leaf], paths: Dict[str, _tree.Path],
         describe_one: Callable[[str, Any], Leaf]) -> Optional[Tuple[Outline, Found]]:
    """Makes the outline of a tree and keeps it; None for one that is described otherwise each time, or that has no memory to be seen."""
    try:
        o = Outline(marks.form, leaves, described, paths)
    except RuntimeError:
        return None
    found = o.match(marks, describe_one)
    if found is None:
        return None
    _kept.insert(0, o)
    del _kept[_KEPT:]
    return o, found
