"""What a leaf of a state dict holds on this rank: whole tensors, DTensors and ShardedTensors as boxes; numpy arrays.

`describe` gives for each leaf the boxes of its global tensor that are here, each with the local tensor that has its bytes. Strided
placements (FSDP2 over tensor parallelism) may own several runs of rows: each run is a box of its own, where PyTorch records one box.
"""
from __future__ import annotations

import gc
import itertools
import sys
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import _dtypes, _tree, errors
from .image import ChunkSpec, Layout, Outer

Range = Tuple[int, int]


def torch_module() -> Any:
    """torch if this process has imported it, else None: without it there can be no tensor of its."""
    return sys.modules.get("torch")


def numpy_module() -> Any:
    return sys.modules.get("numpy")


def is_tensor(x: Any) -> bool:
    torch, np = torch_module(), numpy_module()
    if torch is not None and isinstance(x, torch.Tensor):
        return True
    return np is not None and isinstance(x, np.ndarray) and _dtypes.numpy_name(x.dtype) is not None


# ---------------------------------------------------------------------------------------------------------------- boxes


def _take(ranges: Sequence[Range], begin: int, end: int) -> List[Range]:
    """Positions begin to end of what the ranges hold one after the other."""
    out: List[Range] = []
    at = 0
    for a, b in ranges:
        lo, hi = max(begin, at), min(end, at + b - a)
        if lo < hi:
            if out and out[-1][1] == a + lo - at:
                out[-1] = (out[-1][0], a + hi - at)
            else:
                out.append((a + lo - at, a + hi - at))
        at += b - a
    return out


def _chunk(length: int, n: int, i: int) -> Range:
    step = -(-length // n)  # torch.chunk
    return min(i * step, length), min((i + 1) * step, length)


def mesh_ranges(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int],
                placements: Sequence[Tuple[str, int, int]]) -> List[List[Range]]:
    """For each dim the runs of indices that the rank at `coordinate` holds, in the order in which its local tensor has them.

    placements: one per mesh dim: ("replicate", 0, 0), ("shard", dim, 0) or ("strided", dim, split_factor), applied left to right.
    """
    dims: List[List[Range]] = [[(0, s)] if s else [] for s in shape]
    for n, i, (kind, dim, factor) in zip(mesh, coordinate, placements):
        if kind == "replicate":
            continue
        length = sum(b - a for a, b in dims[dim])
        if kind == "shard":
            dims[dim] = _take(dims[dim], *_chunk(length, n, i))
            continue
        pieces: List[Range] = []
        for k in range(factor):
            a, b = _chunk(length, factor, k)
            lo, hi = _chunk(b - a, n, i)
            for r in _take(dims[dim], a + lo, a + hi):
                if pieces and pieces[-1][1] == r[0]:
                    pieces[-1] = (pieces[-1][0], r[1])
                else:
                    pieces.append(r)
        dims[dim] = pieces
    return dims


def boxes(dims: Sequence[Sequence[Range]]) -> List[Tuple[Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]]]:
    """(offsets, sizes, where in the local tensor) of every combination of runs."""
    per_dim = []
    for runs in dims:
        at, out = 0, []
        for a, b in runs:
            out.append((a, b - a, at))
            at += b - a
        per_dim.append(out)
    return [(tuple(c[0] for c in combo), tuple(c[1] for c in combo), tuple(c[2] for c in combo))
            for combo in itertools.product(*per_dim)]


# ------------------------------------------------------------------------------------------------------------- tensors

Part = Tuple[Tuple[int, ...], Tuple[int, ...], Any]  # offsets, sizes, the local tensor with these bytes


def _narrow(t: Any, at: Sequence[int], sizes: Sequence[int]) -> Any:
    for d, (a, n) in enumerate(zip(at, sizes)):
        if a or n != t.shape[d]:
            t = t.narrow(d, a, n)
    return t


def _placement(fqn: str, p: Any) -> Tuple[str, int, int]:
    name = type(p).__name__
    if name == "Replicate":
        return "replicate", 0, 0
    if name == "Shard":
        return "shard", p.dim, 0
    if name == "_StridedShard":
        return "strided", p.dim, p.split_factor
    if name == "Partial" or name == "_Partial":
        raise errors.StateDictMismatch(f"{fqn}: a DTensor with a Partial placement has no value yet: redistribute it first", fqn=fqn)
    raise errors.StateDictMismatch(f"{fqn}: placement {p!r} is not known", fqn=fqn)


_mesh_cache: Dict[Any, Any] = {}


def _dtensor_parts(fqn: str, t: Any) -> List[Part]:
    spec = t._spec
    mesh = spec.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape = tuple(t.shape)
    key = (tuple(mesh.shape), tuple(coordinate), tuple(spec.placements), shape)
    found = _mesh_cache.get(key)
    if found is None:
        placements = [(k, d % len(shape) if shape else 0, f) for k, d, f in (_placement(fqn, p) for p in spec.placements)]
        if len(_mesh_cache) > 100_000:
            _mesh_cache.clear()
        found = _mesh_cache[key] = boxes(mesh_ranges(shape, key[0], key[1], placements))
    local = t.to_local() if t.requires_grad is False else t.detach().to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    if len(found) == 1:
        offsets, sizes, _ = found[0]
        if tuple(local.shape) != sizes:
            raise errors.StateDictMismatch(f"{fqn}: the local tensor has shape {tuple(local.shape)}, its placements say {sizes}", fqn=fqn)
        return [(offsets, sizes, local)]
    if not found and not all(shape):
        return [((0,) * len(shape), shape, local)]  # a tensor without elements: somebody must say that it is there
    return [(offsets, sizes, _narrow(local, at, sizes)) for offsets, sizes, at in found]


def _sharded_parts(fqn: str, t: Any) -> Tuple[Tuple[int, ...], List[Part]]:
    shape = tuple(t.metadata().size)
    parts: List[Part] = []
    for shard in t.local_shards():
        offsets, inner = tuple(shard.metadata.shard_offsets), shard.tensor
        if type(inner).__name__ == "ShardedTensor":  # FSDP1 over tensor parallelism: a shard that is sharded again
            for s in inner.local_shards():
                at = tuple(a + b for a, b in zip(offsets, s.metadata.shard_offsets))
                parts.append((at, tuple(s.metadata.shard_sizes), s.tensor.detach()))
        else:
            if type(inner).__name__ == "DTensor":
                for at, sizes, local in _dtensor_parts(fqn, inner):
                    parts.append((tuple(a + b for a, b in zip(offsets, at)), sizes, local))
                continue
            parts.append((offsets, tuple(shard.metadata.shard_sizes), inner.detach()))
    return shape, parts


def nesting(t: Any) -> List[Any]:
    """For each part of a ShardedTensor that is sharded again, the shard that it is a part of (image.Outer); else nothing."""
    out: List[Any] = []
    for shard in t.local_shards():
        inner, kind = shard.tensor, type(shard.tensor).__name__
        if kind not in ("ShardedTensor", "DTensor"):
            return []
        ranks: Optional[Tuple[int, ...]] = None
        if kind == "ShardedTensor":
            count = len(inner.local_shards())
            ranks = tuple(torch_module().distributed.get_process_group_ranks(inner._process_group))
        else:
            count = len(_dtensor_parts("", inner))
        outer = Outer(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes), ranks, ("ShardedTensor", kind))
        out += [outer] * count
    return out


def _boxed_parts(t: Any) -> Tuple[Tuple[int, ...], List[Part]]:
    """A tensor that says itself which slices of it are which boxes of a global tensor (PyTorch's CheckpointableTensor)."""
    base = t.detach()
    return tuple(t.global_shape), [(tuple(g), tuple(n), _narrow(base, at, n))
                                   for g, at, n in zip(t.global_offsets, t.local_offsets, t.local_sizes)]


def torch_parts(fqn: str, t: Any) -> Tuple[str, Tuple[int, ...], List[Part]]:
    """(dtype, global shape, the boxes that are here) of a torch tensor of any kind."""
    torch = torch_module()
    kind = type(t).__name__
    element = t.metadata().tensor_properties.dtype if kind == "ShardedTensor" else t.dtype
    dtype = _dtypes.torch_name(element)
    if dtype is None:
        raise errors.StateDictMismatch(f"{fqn}: no checkpoint can hold dtype {element}", fqn=fqn, code="dtype_unsupported")
    if kind == "ShardedTensor":
        shape, parts = _sharded_parts(fqn, t)
        return dtype, shape, parts
    if kind == "DTensor" or (hasattr(t, "_spec") and hasattr(t, "device_mesh")):
        return dtype, tuple(t.shape), _dtensor_parts(fqn, t)
    if t.layout is not torch.strided:
        raise errors.StateDictMismatch(f"{fqn}: a tensor of layout {t.layout} cannot be stored; make it dense first", fqn=fqn)
    if getattr(t, "is_nested", False):
        raise errors.StateDictMismatch(f"{fqn}: a nested tensor cannot be stored", fqn=fqn)
    if hasattr(t, "global_shape") and hasattr(t, "local_sizes"):
        shape, parts = _boxed_parts(t)
        return dtype, shape, parts
    shape = tuple(t.shape)
    return dtype, shape, [((0,) * len(shape), shape, t.detach() if t.requires_grad else t)]


class Described(NamedTuple):
    """A state dict on this rank. keys: what a layout depends on, comparable with that of the step before."""

    keys: List[Any]
    specs: Callable[[], List[ChunkSpec]]
    sources: List[Any]
    values: Dict[str, Any]
    paths: Dict[str, _tree.Path]
    tree: Mapping[Any, Any]
    stateful: Dict[str, Any]


def _spec_of(key: Tuple[Any, ...]) -> ChunkSpec:
    fqn, dtype, shape = key[0], key[1], tuple(key[2])
    name = dtype if isinstance(dtype, str) else str(_dtypes.torch_name(dtype))
    if len(key) == 3:
        return ChunkSpec(fqn, name, shape, (0,) * len(shape), shape)
    return ChunkSpec(fqn, name, shape, *key[3:])


def is_stateful(x: Any) -> bool:
    """An object that keeps its own state dict: a module, an optimizer, a scheduler."""
    return callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None)) \
        and not isinstance(x, (Mapping, type)) and not is_tensor(x)


def describe(state_dict: Any, select: Optional[Callable[[str], bool]] = None,
             prepare: Optional[Callable[[Any], Any]] = None) -> Described:
    """Everything that this rank holds. select: only the flat keys for which it is true. prepare: called with the tree first.

    Stateful objects, at the top or as the whole, stand for their state_dict(). Raises StateDictMismatch naming the FQN for what no
    checkpoint can hold: meta tensors are left to the caller.
    """
    stateful: Dict[str, Any] = {}
    torch, np = torch_module(), numpy_module()
    simple = frozenset((torch.Tensor, torch.nn.Parameter)) if torch is not None and hasattr(torch, "nn") else frozenset()
    if is_stateful(state_dict):
        stateful[""] = state_dict
        tree: Mapping[Any, Any] = state_dict.state_dict()
    elif isinstance(state_dict, Mapping) and any([is_stateful(v) for v in state_dict.values() if type(v) not in simple]):
        tree = {}
        for k, v in state_dict.items():
            if is_stateful(v):
                stateful[k], v = v, v.state_dict()
            tree[k] = v
    else:
        tree = state_dict
    if prepare is not None:
        prepare(tree)
    collecting = gc.isenabled()
    gc.disable()  # tens of thousands of small tuples would set it off, and there is no cycle to be found
    try:
        leaves, paths = _tree.flatten(tree, is_tensor, simple)
        if select is not None:
            leaves = {k: v for k, v in leaves.items() if select(k)}
        return _list(leaves, paths, tree, stateful, torch, np, simple)
    finally:
        if collecting:
            gc.enable()


def _list(leaves: Dict[str, Any], paths: Dict[str, _tree.Path], tree: Any, stateful: Dict[str, Any], torch: Any, np: Any,
          simple: FrozenSet[Any]) -> Described:
    keys: List[Any] = []
    sources: List[Any] = []
    values: Dict[str, Any] = {}
    tensor_type = torch.Tensor if torch is not None else ()
    array_type = np.ndarray if np is not None else ()
    strided = torch.strided if torch is not None else None
    known = _dtypes.known_to_torch() if torch is not None else {}
    for fqn, x in leaves.items():
        if type(x) in simple and x.layout is strided and (dtype := x.dtype) in known and not x.is_nested \
                and (not x.__dict__ or not hasattr(x, "global_shape")):
            keys.append((fqn, dtype, x.shape))
            sources.append(x)
        elif isinstance(x, tensor_type):
            dtype, shape, parts = torch_parts(fqn, x)
            nested = nesting(x) if type(x).__name__ == "ShardedTensor" else []
            for i, (offsets, sizes, local) in enumerate(parts):
                keys.append((fqn, dtype, shape, offsets, sizes, nested[i]) if nested else (fqn, dtype, shape, offsets, sizes))
                sources.append(local)
        elif isinstance(x, array_type) and _dtypes.numpy_name(x.dtype) is not None:
            keys.append((fqn, _dtypes.numpy_name(x.dtype), x.shape))
            sources.append(x)
        else:
            values[fqn] = x
    return Described(keys, lambda: [_spec_of(k) for k in keys], sources, values, paths, tree, stateful)


# -------------------------------------------------------------------------------------------------------- in a segment

BIG = 1 << 20  # from here on a tensor is worth a call of its own


class Views:
    """The chunks of a layout in one mapped segment, as tensors and arrays; made once per slot and structure."""

    def __init__(self, buffer: Any, data_begin: int, layout: Layout) -> None:
        self.layout, self._buffer, self._begin = layout, buffer, data_begin
        self._torch: Dict[int, Any] = {}
        self._numpy: Dict[int, Any] = {}
        self._base: Any = None
        self._address: Optional[int] = None
        self.small: Optional[Tuple[List[int], List[Any]]] = None  # the torch chunks, where all are small

    @property
    def address(self) -> int:
        if self._address is None:
            import ctypes

            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        return self._address

    def at(self, i: int) -> int:
        """Where chunk i begins, from the start of the buffer."""
        return self._begin + self.layout.positions[i]

    def torch(self, i: int) -> Any:
        v = self._torch.get(i)
        if v is None:
            v = self._torch[i] = torch_view(self._all(), self.layout.chunks[i], self.at(i))
        return v

    def _all(self) -> Any:
        if self._base is None:
            self._base = torch_module().frombuffer(self._buffer, dtype=torch_module().uint8)
        return self._base

    def numpy(self, i: int) -> Any:
        v = self._numpy.get(i)
        if v is None:
            v = self._numpy[i] = numpy_view(self._buffer, self.layout.chunks[i], self.at(i))
        return v

    def raw(self, i: int) -> Any:
        """The bytes of chunk i as a flat torch tensor."""
        at = self.at(i)
        return self._all()[at:at + self.layout.chunks[i].nbytes]


def torch_view(base: Any, spec: ChunkSpec, at: int) -> Any:
    """Chunk `spec` at byte `at` of a flat uint8 tensor, without a copy. A dtype that this torch lacks comes as its bytes."""
    dtype = _dtypes.to_torch(spec.dtype)
    flat = base[at:at + spec.nbytes]
    if spec.nbytes == 0:
        return flat.new_empty(spec.sizes, dtype=dtype)
    if at % max(dtype.itemsize, 1):
        flat = flat.clone()  # an image of somebody else's, not aligned
    shape = spec.sizes if dtype.itemsize == _dtypes.itemsize(spec.dtype) else (*spec.sizes, _dtypes.itemsize(spec.dtype))
    return flat.view(dtype).view(shape)


def numpy_view(buffer: Any, spec: ChunkSpec, at: int) -> Any:
    """The same as a numpy array."""
    import numpy as np

    dtype = _dtypes.to_numpy(spec.dtype)
    count = spec.nbytes // dtype.itemsize
    if count == 0:
        return np.empty(spec.sizes, dtype)
    return np.frombuffer(buffer, np.uint8, spec.nbytes, at).view(dtype).reshape(spec.sizes)


def _plain_cpu(t: Any, nbytes: int) -> bool:
    return nbytes >= BIG and t.device.type == "cpu" and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def copy_out(d: Described, v: Views) -> None:
    """Tensors → segment."""
    _move(d, v, True)


def copy_in(d: Described, v: Views, skip: Callable[[str], bool]) -> None:
    """Segment → tensors, under no_grad; what `skip` says keeps its value."""
    _move(d, v, False, skip)


def _move(d: Described, v: Views, out: bool, skip: Optional[Callable[[str], bool]] = None) -> None:
    from . import _copy

    torch, np = torch_module(), numpy_module()
    chunks, base = v.layout.chunks, v.address if v.layout.data_bytes else 0
    blocks: List[_copy.Block] = []
    ours: List[Any] = []
    theirs: List[Any] = []
    tensor_type = torch.Tensor if torch is not None else ()
    cached = v._torch
    if out and v.small is not None:  # a layout that was copied before: equal keys, so equal kinds and sizes
        some, views = v.small
        _bulk_out(torch, views, d.sources if len(some) == len(d.sources) else [d.sources[i] for i in some])
        return
    picked: List[int] = []
    for i, (t, n) in enumerate(zip(d.sources, v.layout.sizes)):
        if n == 0 or (skip is not None and skip(chunks[i].fqn)):
            continue
        if isinstance(t, tensor_type):
            if n >= BIG and _plain_cpu(t, n):
                blocks.append((base + v.at(i), t.data_ptr(), n) if out else (t.data_ptr(), base + v.at(i), n))
                continue
            ours.append(cached.get(i) if i in cached else v.torch(i))
            theirs.append(t)
            picked.append(i)
        elif t.nbytes >= BIG and t.flags.c_contiguous and t.dtype.isnative:
            blocks.append((base + v.at(i), t.ctypes.data, t.nbytes) if out else (t.ctypes.data, base + v.at(i), t.nbytes))
        elif out:
            np.copyto(v.numpy(i), t, casting="no" if t.dtype.isnative else "equiv")
        else:
            np.copyto(t, v.numpy(i))
    if out:
        _bulk_out(torch, ours, theirs)
        if ours and len(ours) == sum(n > 0 and n < BIG for n in v.layout.sizes) == sum(n > 0 for n in v.layout.sizes):
            v.small = picked, ours
    elif ours:
        with torch.no_grad():
            _bulk(torch, theirs, ours)
    _copy.copy(blocks)


def _bulk_out(torch: Any, views: List[Any], sources: List[Any]) -> None:
    if views:
        with torch.no_grad():
            _bulk(torch, views, sources)


def _bulk(torch: Any, to: List[Any], frm: List[Any]) -> None:
    try:
        torch._foreach_copy_(to, frm)
        return
    except (RuntimeError, AttributeError, NotImplementedError):
        pass  # a dtype or device that it does not know: one by one
    for a, b in zip(to, frm):
        try:
            a.copy_(b)
        except (RuntimeError, NotImplementedError):
            a.reshape(-1).view(torch.uint8).copy_(b.contiguous().reshape(-1).view(torch.uint8))
