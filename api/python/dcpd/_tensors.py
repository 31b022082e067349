"""What a leaf of a state dict holds on this rank: whole tensors, DTensors and ShardedTensors as boxes; numpy arrays.

`describe` gives for each leaf the boxes of its global tensor that are here, each with the local tensor that has its bytes. Strided
placements (FSDP2 over tensor parallelism) may own several runs of rows: each run is a box of its own, where PyTorch records one box.
"""
from __future__ import annotations

import bisect
import gc
import itertools
import sys
from typing import Any, Callable, Collection, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import _copy, _dtypes, _outline, _ring, _tree, errors, image
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
    return np is not None and isinstance(x, np.ndarray) and _dtypes.numpy_name(x.dtype) is not None \
        and not hasattr(x, "mask")  # a masked array is more than its elements: a value


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
    local = local_of(t)
    if len(found) == 1:
        offsets, sizes, _ = found[0]
        if tuple(local.shape) != sizes:
            raise errors.StateDictMismatch(f"{fqn}: the local tensor has shape {tuple(local.shape)}, its placements say {sizes}", fqn=fqn)
        return [(offsets, sizes, local)]
    if not found and not all(shape):
        return [((0,) * len(shape), shape, local)]  # a tensor without elements: somebody must say that it is there
    return [(offsets, sizes, _narrow(local, at, sizes)) for offsets, sizes, at in found]


def local_of(t: Any) -> Any:
    """What to_local() gives, without its way through autograd where the tensor lies in plain sight."""
    torch = torch_module()
    local = getattr(t, "_local_tensor", None)
    if type(local) is torch.Tensor or type(local) is torch.nn.Parameter:
        return local
    local = t.to_local() if t.requires_grad is False else t.detach().to_local()
    return local.wait() if hasattr(local, "wait") else local


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
    """A state dict on this rank. keys: what a layout depends on, comparable with that of the step before; outline: the same one for equal
    structures, as long as it is remembered, and addresses of its flat chunks."""

    keys: List[Any]
    specs: Callable[[], List[ChunkSpec]]
    sources: List[Any]
    values: Dict[str, Any]
    paths: Dict[str, _tree.Path]
    tree: Mapping[Any, Any]
    stateful: Dict[str, Any]
    outline: Optional[_outline.Outline] = None
    addresses: Sequence[int] = ()

    def arrays(self) -> Dict[str, Any]:
        """Those leaves that are numpy arrays, which PyTorch's checkpoints have as values."""
        np = numpy_module()
        return {k[0]: x for k, x in zip(self.keys, self.sources) if isinstance(x, np.ndarray)} if np is not None else {}

    def as_values(self, arrays: Mapping[str, Any]) -> "Described":
        """The same with these arrays as values."""
        left = [i for i, k in enumerate(self.keys) if k[0] not in arrays]
        keys = [self.keys[i] for i in left]
        return self._replace(keys=keys, specs=lambda: [_spec_of(k) for k in keys], sources=[self.sources[i] for i in left],
                             values={**self.values, **arrays})


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


def _not_tensors(xs: Collection[Any], torch: Any) -> List[Any]:
    kinds = frozenset(map(type, xs))
    others = frozenset(k for k in kinds if k not in _tree.PLAIN and not (torch is not None and issubclass(k, torch.Tensor)))
    return [x for x in xs if type(x) in others] if others else []


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
    elif isinstance(state_dict, Mapping) and any([is_stateful(v) for v in _not_tensors(state_dict.values(), torch)]):
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
        return _described(tree, stateful, simple, select, remember=select is None and prepare is None)
    finally:
        if collecting:
            gc.enable()


def _described(tree: Any, stateful: Dict[str, Any], simple: FrozenSet[Any], select: Optional[Callable[[str], bool]],
               remember: bool) -> Described:
    one = _describer(simple)
    marks = _outline.skim(tree, is_tensor, simple.union(_tree.PLAIN)) if remember else None
    known = _outline.find(marks, one) if marks is not None else None
    if known is not None:
        return _recalled(*known, tree, stateful)
    leaves, paths = _tree.flatten(tree, is_tensor, simple)
    if select is not None:
        leaves = {k: v for k, v in leaves.items() if select(k)}
    described = [one(fqn, x) for fqn, x in leaves.items()]
    known = _outline.keep(marks, leaves, described, paths, one) if marks is not None else None
    if known is not None:
        return _recalled(*known, tree, stateful)
    keys = [k for d in described for k in d.keys]
    values = {fqn: x for (fqn, x), d in zip(leaves.items(), described) if d.kind == "value"}
    return Described(keys, lambda: [_spec_of(k) for k in keys], [s for d in described for s in d.sources], values, paths, tree, stateful)


def _recalled(o: _outline.Outline, f: _outline.Found, tree: Any, stateful: Dict[str, Any]) -> Described:
    return Described(o.keys, lambda: [_spec_of(k) for k in o.keys], f.sources, f.values, o.paths, tree, stateful, o, f.addresses)


def _describer(simple: FrozenSet[Any]) -> Callable[[str, Any], _outline.Leaf]:
    torch, np = torch_module(), numpy_module()
    tensor_type = torch.Tensor if torch is not None else ()
    array_type = np.ndarray if np is not None else ()
    strided = torch.strided if torch is not None else None
    known = _dtypes.known_to_torch() if torch is not None else {}

    def one(fqn: str, x: Any) -> _outline.Leaf:
        if type(x) in simple and x.layout is strided and x.dtype in known and not x.is_nested and not hasattr(x, "global_shape"):
            return _outline.Leaf("plain", [(fqn, x.dtype, x.shape)], [x])
        if isinstance(x, tensor_type):
            dtype, shape, parts = torch_parts(fqn, x)
            nested = nesting(x) if type(x).__name__ == "ShardedTensor" else []
            keys = [(fqn, dtype, shape, offsets, sizes, nested[i]) if nested else (fqn, dtype, shape, offsets, sizes)
                    for i, (offsets, sizes, _) in enumerate(parts)]
            sources = [p[2] for p in parts]
            return _outline.Leaf("dtensor" if _in_sight(x, sources, simple) else "other", keys, sources)
        if isinstance(x, array_type) and is_tensor(x):
            return _outline.Leaf("other", [(fqn, _dtypes.numpy_name(x.dtype), x.shape)], [x])
        return _outline.Leaf("value", [], [])

    return one


def _in_sight(x: Any, sources: Sequence[Any], simple: FrozenSet[Any]) -> bool:
    """A DTensor whose one box here is the tensor that it holds."""
    return type(x).__name__ == "DTensor" and len(sources) == 1 and type(sources[0]) in simple \
        and getattr(x, "_local_tensor", None) is sources[0]


# -------------------------------------------------------------------------------------------------------- in a segment

BIG = 1 << 20  # from here on a tensor is worth a call of its own


class Views:
    """The chunks of a layout in one mapped segment, as tensors and arrays; made once per slot and structure."""

    def __init__(self, buffer: Any, data_begin: int, layout: Layout, ring: Optional[_ring.Ring] = None) -> None:
        """ring: the image goes through it, and buffer is the ring's."""
        self.layout, self._buffer, self._begin, self.ring = layout, buffer, data_begin, ring
        self._torch: Dict[int, Any] = {}
        self._numpy: Dict[int, Any] = {}
        self._base: Any = None
        self._address: Optional[int] = None
        self._plan: Optional[_Plan] = None

    def plan(self, d: Described, late: Collection[int]) -> "_Plan":
        if self._plan is None or self._plan.outline is not d.outline or self._plan.late != late:
            self._plan = _Plan(d, self, late)
        return self._plan

    @property
    def address(self) -> int:
        if self._address is None:
            self._address = image.address(self._buffer)
        return self._address

    @property
    def end(self) -> int:
        """The image's bytes."""
        return self._begin + self.layout.data_bytes

    def at(self, i: int) -> int:
        """Where chunk i begins, from the start of the image."""
        return self._begin + self.layout.positions[i]

    def place(self, i: int) -> int:
        """The same, from the start of the buffer."""
        return self.at(i) if self.ring is None else self.at(i) % self.ring.size

    def block(self, i: int, frm: int, nbytes: int) -> _copy.Block:
        """A copy of chunk i from plain memory: in a ring, copy_in_order says where to."""
        return (self.at(i) if self.ring is not None else self.address + self.at(i)), frm, nbytes

    def torch(self, i: int) -> Any:
        v = self._torch.get(i)
        if v is None:
            v = self._torch[i] = torch_view(self._all(), self.layout.chunks[i], self.place(i))
        return v

    def _all(self) -> Any:
        if self._base is None:
            self._base = torch_module().frombuffer(self._buffer, dtype=torch_module().uint8)
        return self._base

    def numpy(self, i: int) -> Any:
        v = self._numpy.get(i)
        if v is None:
            v = self._numpy[i] = numpy_view(self._buffer, self.layout.chunks[i], self.place(i))
        return v

    def raw(self, i: int) -> Any:
        """The bytes of chunk i as a flat torch tensor."""
        at = self.place(i)
        return self._all()[at:at + self.layout.chunks[i].nbytes]

    def piece(self, at: int, spec: ChunkSpec) -> Any:
        """A box of the image that lies in the ring, from the image's byte `at` on."""
        assert self.ring is not None
        return torch_view(self._all(), spec, at % self.ring.size)


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


# An address below may be an offset into a storage that was freed, or that never was; above, it is memory. Memory may lie below as well: the
# heap of an interpreter that is loaded at a fixed address, as Debian's own python3, begins a few MiB above 0.
_LOW = 1 << 36


def _plain_cpu(t: Any, nbytes: int) -> bool:
    return nbytes >= BIG and t.device.type == "cpu" and t.is_contiguous() and not t.is_conj() and not t.is_neg()


def memory(t: Any, spec: ChunkSpec) -> Optional[int]:
    """Where chunk `spec` lies that this local tensor or array holds, if bytes of it can be put there: plain memory of this process, in
    order, of the stored dtype, that may be written. 0 for one without bytes, None where it is not so."""
    torch, np = torch_module(), numpy_module()
    if torch is not None and type(t) in (torch.Tensor, torch.nn.Parameter):
        if not t.is_cpu or t.layout is not torch.strided or not t.is_contiguous() or t.is_conj() or t.is_neg() \
                or _dtypes.torch_name(t.dtype) != spec.dtype or t.numel() * t.element_size() != spec.nbytes:
            return None
        return 0 if spec.nbytes == 0 else int(t.data_ptr()) if is_memory(t) else None
    if np is not None and isinstance(t, np.ndarray) and t.flags.c_contiguous and t.flags.writeable and t.dtype.isnative \
            and _dtypes.numpy_name(t.dtype) == spec.dtype and t.nbytes == spec.nbytes:
        return int(t.ctypes.data) if t.nbytes else 0
    return None


def on_device(t: Any) -> bool:
    """Whether a tensor or array lies in a GPU's memory as in an image: in order."""
    torch = torch_module()
    return torch is not None and isinstance(t, torch.Tensor) and t.is_cuda and t.layout is torch.strided and t.is_contiguous() \
        and not t.is_conj() and not t.is_neg() and t.numel() > 0


def device_memory(t: Any, spec: ChunkSpec) -> Optional[int]:
    """Where chunk `spec` lies in a GPU's memory, if it lies there as in an image, of the stored dtype. Else None."""
    if not on_device(t) or _dtypes.torch_name(t.dtype) != spec.dtype or t.numel() * t.element_size() != spec.nbytes:
        return None
    return int(t.data_ptr()) or None


_ON_A_GPU = frozenset(("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
                       "float8_e8m0fnu"))


def casts_on_device(t: Any, dtype: str) -> bool:
    """Whether a GPU casts between this tensor, which lies there, and chunks of a dtype: the narrower side is in the image, so that less
    goes over the bus than if the host cast."""
    own = _dtypes.torch_name(t.dtype) if on_device(t) else None
    return own in _ON_A_GPU and dtype in _ON_A_GPU and own != dtype and _dtypes.itemsize(dtype) <= _dtypes.itemsize(str(own))


def device_cast(t: Any, spec: ChunkSpec) -> Optional[int]:
    """Where a tensor lies in a GPU's memory whose chunk in the image has another dtype, if the GPU casts it on the way. Else None."""
    if not casts_on_device(t, spec.dtype) or t.numel() * _dtypes.itemsize(spec.dtype) != spec.nbytes:
        return None
    return int(t.data_ptr()) or None


def device_module(device: Any) -> Any:
    """torch.cuda, or its like for another device; None if it has none."""
    return getattr(torch_module(), device.type, None)


def check_targets(d: Described) -> None:
    """Raises StateDictMismatch naming the FQN for what nothing can be copied into."""
    torch = torch_module()
    tensor_type = torch.Tensor if torch is not None else ()
    for t, key in zip(d.sources, d.keys):
        why = ""
        if not isinstance(t, tensor_type):
            if not t.flags.writeable and t.nbytes:
                why = "the array is read-only"
        elif t.layout is torch.strided and not t.is_contiguous() and any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride())):
            why = "several elements of the tensor lie in one place, as expand() makes it: clone() it first"
        if why:
            raise errors.StateDictMismatch(f"{key[0]}: {why}", fqn=key[0])


class _Plan:
    """How the chunks of an outline come into one slot: small flat ones in a batch, large ones in blocks by several threads, and those
    that are strided, cast, or on a device by torch; all of them at once, or, in order, some megabytes after the other. late: see
    copy_out."""

    def __init__(self, d: Described, v: Views, late: Collection[int]) -> None:
        self.outline, self.late = d.outline, late
        assert d.outline is not None
        ranges = v.layout.ranges(v.ring.step) if v.ring is not None else [range(len(v.layout.chunks))]
        flat, rest = d.outline.flat, d.outline.rest
        order: Sequence[int] = sorted(range(len(flat)), key=flat.__getitem__) if v.ring is not None else range(len(flat))
        if late:
            order, rest = [k for k in order if flat[k] not in late], [c for c in rest if c not in late]
        at = [flat[k] for k in order]
        self._parts: List[_Part] = []
        for r in ranges:
            mine = order[bisect.bisect_left(at, r.start):bisect.bisect_left(at, r.stop)] if v.ring is not None else order
            self._parts.append(_Part(d, v, r, mine, rest[bisect.bisect_left(rest, r.start):bisect.bisect_left(rest, r.stop)]))

    def run(self, d: Described, v: Views, into: Optional[_copy.Into]) -> None:
        new = into is not None and into.new
        with _copy.way(into) as way:
            for p in self._parts:
                p.run(d, v, way, new)


class _Part:
    """The chunks `r` of a plan: of those that are flat the numbers in outline.flat, and the rest. Of a ring: no more than a step, or one
    chunk that is larger."""

    def __init__(self, d: Described, v: Views, r: range, flat: Sequence[int], rest: Sequence[int]) -> None:
        assert d.outline is not None
        sizes, chunk = v.layout.sizes, d.outline.flat
        base = v.address if flat else 0
        small = [k for k in flat if sizes[chunk[k]] <= _copy.SMALL]
        self._small = None if isinstance(flat, range) and len(small) == len(chunk) else small
        self._batch = _copy.Batch([base + v.place(chunk[k]) for k in small], [sizes[chunk[k]] for k in small])
        self._large = [(k, *v.block(chunk[k], 0, sizes[chunk[k]])) for k in flat if sizes[chunk[k]] > _copy.SMALL]
        rest = [c for c in rest if sizes[c]]
        tensor_type = torch.Tensor if (torch := torch_module()) is not None else ()
        most = v.ring.step if v.ring is not None else v.end
        bulk = [c for c in rest if isinstance(d.sources[c], tensor_type) and not (sizes[c] >= BIG and d.sources[c].is_cpu)
                and sizes[c] <= most]
        chosen = frozenset(bulk)
        self._bulk, self._views = bulk, [v.torch(c) for c in bulk]
        self._single = [c for c in rest if c not in chosen]
        self._begin, self._end = v.at(r.start) if r else v.end, v.at(r.stop) if r.stop < len(sizes) else v.end
        self._scattered = 2 * sum([n for _, _, _, n in self._large]) < self._end - self._begin

    def run(self, d: Described, v: Views, way: _copy.Way, new: bool) -> None:
        at, ring = d.addresses, v.ring
        if ring is not None and self._end - self._begin <= ring.step:
            ring.room(self._end)
        if new and self._scattered:
            _copy.populate(v.address + self._begin, self._end - self._begin)
        self._batch.run(at if self._small is None else [at[k] for k in self._small])
        given = _given(d, v, self._bulk)
        views = self._views if not given else [x for c, x in zip(self._bulk, self._views) if c not in given]
        bulk_out(views, [d.sources[c] for c in self._bulk if c not in given])
        blocks = [(to, at[k], n) for k, to, _, n in self._large]
        if self._single:
            _move(d, v, True, only=self._single, way=way, blocks=blocks)
            blocks = []
        if ring is None:
            _copy.copy(blocks, None, way)
        else:
            _copy.copy_in_order(blocks, ring, way)
            ring.told(self._end)


def _is_freed(t: Any) -> bool:
    """Torch would read, or write, where nothing is."""
    if not t.is_cpu or t.is_meta or t.data_ptr() >= _LOW or t._is_zerotensor():
        return False
    last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return bool(t.untyped_storage().nbytes() < (last + 1) * t.element_size())


def is_memory(t: Any) -> bool:
    """Whether a CPU tensor's bytes are where its address says."""
    return t.data_ptr() >= _LOW or not (t._is_zerotensor() or _is_freed(t))


def _all_memory(d: Described) -> bool:
    """Whether the flat chunks of the outline are where their addresses say. The answer for the addresses of the save before is kept: a
    storage that is freed has another."""
    assert d.outline is not None
    if d.addresses and min(d.addresses) < _LOW and d.addresses != d.outline.sound:
        if not all(is_memory(d.sources[c]) for c, a in zip(d.outline.flat, d.addresses) if a < _LOW):
            return False
        d.outline.sound = d.addresses
    return True


def copy_out(d: Described, v: Views, into: Optional[_copy.Into] = None, late: Collection[int] = frozenset()) -> None:
    """Tensors → segment, or ring. into: the segment, if its pages are new. late: chunks that are left out, as they are copied later, or
    were; of a segment only."""
    if d.outline is not None and _all_memory(d):
        v.plan(d, late).run(d, v, into)
        return
    if v.ring is None:
        with _copy.way(into) as way:
            _move(d, v, True, only=[i for i in range(len(d.sources)) if i not in late] if late else None, way=way)
        return
    for r in v.layout.ranges(v.ring.step):
        end = v.at(r.stop) if r.stop < len(d.sources) else v.end
        given: Collection[int] = ()
        if end - v.at(r.start) <= v.ring.step:
            v.ring.room(end)
            given = _given(d, v, r)
        _move(d, v, True, only=[i for i in r if i not in given] if given else r)
        v.ring.told(end)


def copy_in(d: Described, v: Views, skip: Callable[[str], bool], done: Collection[int] = frozenset()) -> None:
    """Segment → tensors, under no_grad; what `skip` says keeps its value, and chunks `done` have theirs."""
    _move(d, v, False, skip, [i for i in range(len(d.sources)) if i not in done] if done else None)


def _given(d: Described, v: Views, chunks: Sequence[int]) -> Collection[int]:
    """Which of these chunks the daemon has copied from a GPU into the ring, where there is room for all of them. Comes before copies that
    say how far they are."""
    give = v.ring.give if v.ring is not None else None
    mine = [c for c in chunks if device_memory(d.sources[c], v.layout.chunks[c]) is not None] if give is not None else []
    return frozenset(mine) if give is not None and mine and give([(v.at(c), d.sources[c]) for c in mine]) else ()


def _move(d: Described, v: Views, out: bool, skip: Optional[Callable[[str], bool]] = None, only: Optional[Sequence[int]] = None,
          way: Optional[_copy.Way] = None, blocks: Sequence[_copy.Block] = ()) -> None:
    """blocks: plain memory that goes there as well; in a ring what is copied is told in order, so all of it has to be known here."""
    torch, np = torch_module(), numpy_module()
    chunks, base, ring = v.layout.chunks, v.address if v.layout.data_bytes else 0, v.ring
    blocks = list(blocks)
    ours: List[Any] = []
    theirs: List[Any] = []
    keep: List[Any] = []
    least = BIG if ring is None else min(BIG, ring.step)
    tensor_type = torch.Tensor if torch is not None else ()
    for i in range(len(d.sources)) if only is None else only:
        t, n = d.sources[i], v.layout.sizes[i]
        if n == 0 or (skip is not None and skip(chunks[i].fqn)):
            continue
        if isinstance(t, tensor_type):
            if _is_freed(t):
                raise errors.StateDictMismatch(f"{chunks[i].fqn}: the tensor's storage was freed", fqn=chunks[i].fqn)
            if _plain_cpu(t, n):
                blocks.append(v.block(i, t.data_ptr(), n) if out else (t.data_ptr(), base + v.at(i), n))
            elif ring is not None and n > ring.step:
                _pieces_out(v, ring, i, t)
            else:
                ours.append(v.torch(i))
                theirs.append(t)
            continue
        if ring is not None and n > ring.step and not (t.flags.c_contiguous and t.dtype.isnative):
            t = np.ascontiguousarray(t, t.dtype.newbyteorder("="))
            keep.append(t)
        if t.nbytes >= least and t.flags.c_contiguous and t.dtype.isnative:
            blocks.append(v.block(i, t.ctypes.data, t.nbytes) if out else (t.ctypes.data, base + v.at(i), t.nbytes))
        elif out:
            np.copyto(v.numpy(i), t, casting="no" if t.dtype.isnative else "equiv")
        else:
            np.copyto(t, v.numpy(i))
    if out:
        bulk_out(ours, theirs)
    elif ours:
        with torch.no_grad():
            _bulk(torch, theirs, ours)
    if ring is None:
        _copy.copy(blocks, None, way or _copy._run)
    else:
        _copy.copy_in_order(blocks, ring, way or _copy._run)


def _pieces_out(v: Views, ring: _ring.Ring, i: int, t: Any) -> None:
    """A strided tensor, or one of a device, that is larger than a step of its ring: some rows after the other."""
    spec, at = v.layout.chunks[i], v.at(i)
    for part in _rows(t, ring.step):
        one = spec._replace(sizes=tuple(part.shape), outer=None)
        ring.room(at + one.nbytes)
        if ring.give is None or device_memory(part, one) is None or not ring.give([(at, part)]):
            bulk_out([v.piece(at, one)], [part])
        at += one.nbytes
        ring.told(at)


def _rows(t: Any, most: int) -> Iterator[Any]:
    """A tensor in C order, cut along its first dims, in parts of at most so many bytes."""
    n = t.shape[0] if t.dim() else 1
    row = t.numel() // n * t.element_size()
    if n == 1 and t.dim() > 1 or row > most:
        for i in range(n):
            yield from _rows(t[i], most)
        return
    rows = max(1, most // row)
    for i in range(0, n, rows):
        yield t.narrow(0, i, min(rows, n - i)) if t.dim() else t


def bulk_out(views: List[Any], sources: List[Any]) -> None:
    """Tensors → views of them in a segment, by torch."""
    if views:
        torch = torch_module()
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
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size())
            if bits is None or a.dtype != b.dtype or b.is_conj() or b.is_neg():
                raise
            a.view(bits).copy_(b.view(bits))
