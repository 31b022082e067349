"""From a plan's items to bytes in a segment: which file an item goes to, and what of it is written how.

A tensor goes into the segment once, as it is; dcpd puts the torch.save archive around it. What this package cannot describe to dcpd (a
value, an item of an extension, a quantized tensor, one that a planner has made something else of than its metadata say, a
safetensors file) goes there as the bytes of the file.
"""
from __future__ import annotations

import ctypes
import io
import operator
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from .. import _copy, _dtypes
from ..image import ChunkSpec

_CUT_BYTES, _CUT_MAX = 1 << 20, 4096


class Entry(NamedTuple):
    """One item of a file. data: a CPU or device tensor, or a bytes-like object."""

    file: str
    exact: bool
    data: Any
    nbytes: int
    fqn: str
    dtype: Optional[str]
    sizes: Optional[Tuple[int, ...]]
    results: List[Tuple[Any, int]]  # (index, length if it is not the whole item) of each write item that it holds
    transforms: Optional[List[str]]
    spec: Optional[ChunkSpec] = None  # of a tensor that goes there as it is


def item_size(item: Any) -> int:
    import torch

    size = 1
    for s in item.tensor_data.size:
        size *= s
    return size * torch.empty((), dtype=item.tensor_data.properties.dtype).element_size()


def is_bytes(item: Any) -> bool:
    from torch.distributed.checkpoint.planner import WriteItemType

    return bool(item.type == WriteItemType.BYTE_IO)


def split(bins: int, items: Sequence[Any]) -> List[List[Any]]:
    """Over `bins` files as PyTorch does it: values in turn, then tensors, the largest first, each to the file with the least."""
    if bins == 1:
        return [list(items)]
    buckets: List[List[Any]] = [[] for _ in range(bins)]
    sums = [0] * bins
    for i, item in enumerate(x for x in items if is_bytes(x)):
        buckets[i % bins].append(item)
    for item in sorted((x for x in items if not is_bytes(x)), key=item_size, reverse=True):
        k = min(enumerate(sums), key=operator.itemgetter(1))[0]
        buckets[k].append(item)
        sums[k] += item_size(item)
    return buckets


def cut(items: Sequence[Any]) -> List[List[Any]]:
    """Files that the next save may share: one for the values, one for each large tensor, the others together. At most _CUT_MAX."""
    size = _CUT_BYTES
    while sum(item_size(x) >= size for x in items if not is_bytes(x)) > _CUT_MAX - 2:
        size *= 2
    out: List[List[Any]] = [[x for x in items if is_bytes(x)], []]
    for item in (x for x in items if not is_bytes(x)):
        if item_size(item) >= size:
            out.append([item])
        else:
            out[1].append(item)
    return [x for x in out if x] or [[]]


class _Open(io.RawIOBase):
    """Extensions close what they write to; this one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = bytearray()

    def writable(self) -> bool:
        return True

    writeable = writable

    def write(self, b: Any) -> int:
        self.bytes += b
        return len(b)

    def close(self) -> None:
        pass


def transformed(extensions: Sequence[Any], write: Any) -> Tuple[bytearray, List[str]]:
    raw = _Open()
    to: Any = raw
    for x in extensions:
        to = x.transform_to(to)
    write(to)
    to.close()
    return raw.bytes, [x.get_descriptor() for x in reversed(extensions)]


def resolve(planner: Any, item: Any) -> Any:
    """The tensor (of any device) or the buffer that an item stands for."""
    data = planner.resolve_data(item)
    if is_bytes(item):
        if not isinstance(data, io.BytesIO):
            raise AssertionError("Data must be io.BytesIO for BYTE_IO write items")
        return data.getbuffer()
    import torch

    if not isinstance(data, torch.Tensor):
        raise AssertionError("Data must be torch.Tensor for non-BYTE_IO write items")
    data = data.detach()
    if hasattr(data, "wait"):
        data = data.wait()
    return data


def entries(file: str, bucket: Sequence[Any], planner: Any, extensions: Sequence[Any], safetensors: bool) -> List[Entry]:
    """The items of one file, values first."""
    out = [_value(file, x, resolve(planner, x), extensions, safetensors) for x in bucket if is_bytes(x)]
    tensors = [x for x in bucket if not is_bytes(x)]
    if safetensors:
        if tensors:
            out.append(_safetensors(file, tensors, planner))
        return out
    return out + [_tensor(file, x, resolve(planner, x), extensions) for x in tensors]


def _value(file: str, item: Any, data: Any, extensions: Sequence[Any], exact: bool) -> Entry:
    names: Optional[List[str]] = None
    if extensions:
        data, names = transformed(extensions, lambda to: to.write(data))
    return Entry(file, exact, data, len(data), item.index.fqn, None, None, [(item.index, -1)], names)


def _tensor(file: str, item: Any, t: Any, extensions: Sequence[Any]) -> Entry:
    import torch

    name = _dtypes.torch_name(t.dtype) if t.layout is torch.strided and not getattr(t, "is_nested", False) else None
    said = item.tensor_data
    if name is None or extensions or t.is_meta or t.dtype != said.properties.dtype or t.shape != said.chunk.sizes:
        def write(to: Any) -> None:
            cpu = t.cpu()
            torch.save(cpu.clone() if cpu.untyped_storage().size() != cpu.nbytes else cpu, to)

        data, names = transformed(extensions, write)
        return Entry(file, False, data, len(data), item.index.fqn, None, None, [(item.index, -1)], names or None)
    spec = ChunkSpec(item.index.fqn, name, tuple(said.size), tuple(said.chunk.offsets), tuple(t.shape))
    return Entry(file, False, t, t.numel() * t.element_size(), item.index.fqn, name, spec.sizes, [(item.index, -1)], None, spec)


def _safetensors(file: str, items: Sequence[Any], planner: Any) -> Entry:
    """All tensors of a file as PyTorch's SAFETENSORS writes them: with the offsets of what was saved, and what is in there twice once."""
    import json

    from safetensors.torch import save
    from torch.distributed.checkpoint import _hf_utils as hf

    tensors: Dict[str, Any] = {}
    offsets: Dict[str, Any] = {}
    results: List[Tuple[Any, int]] = []
    for x in items:
        t = resolve(planner, x).cpu()
        t = t.clone() if t.untyped_storage().size() != t.nbytes else t
        tensors[x.index.fqn], offsets[x.index.fqn] = t, {"saved_offsets": x.tensor_data.chunk.offsets}
        results.append((x.index, t.numel() * t.element_size()))
    data = save(tensors, metadata={hf.CUSTOM_METADATA_KEY: json.dumps(offsets), hf.DCP_VERSION_KEY: str(hf.HF_DCP_VERSION),
                                   hf.FORMAT_KEY: hf.FORMAT_VALUE})
    return Entry(file, True, data, len(data), file, None, None, results, None)


def fill(base: Any, into: _copy.Into, jobs: Sequence[Tuple[int, Entry]], give: Any = None) -> None:
    """Copies entries to their places. give: see copy_tensors."""
    import torch

    blocks: List[_copy.Block] = []
    keep: List[Any] = []
    places: List[int] = []
    tensors: List[Any] = []
    sizes: List[int] = []
    address = into.address
    for at, e in jobs:
        if isinstance(e.data, torch.Tensor):
            places.append(at)
            tensors.append(e.data)
            sizes.append(e.nbytes)
        elif e.nbytes:
            view = (ctypes.c_char * e.nbytes).from_buffer_copy(e.data) if isinstance(e.data, bytes) else \
                (ctypes.c_char * e.nbytes).from_buffer(e.data)
            keep.append(view)
            blocks.append((address + at, ctypes.addressof(view), e.nbytes))
    copy_tensors(base, into, places, tensors, sizes, blocks, give)


class _Window:
    """Entries that are put into a ring together. Without any of a device they may be more than a step of it."""

    def __init__(self, ring: Any) -> None:
        import torch

        self.ring, self.base = ring, torch.frombuffer(ring.buffer, dtype=torch.uint8)
        self.blocks: List[_copy.Block] = []
        self.keep: List[Any] = []
        self.others: List[Tuple[int, Any]] = []  # places, and tensors that torch or the daemon copies
        self.begin = self.end = 0

    def add(self, at: int, e: Entry) -> None:
        import torch

        t, plain = e.data, not isinstance(e.data, torch.Tensor)
        if plain:
            t = (ctypes.c_char * e.nbytes).from_buffer_copy(e.data)
        plain = plain or (t.is_cpu and t.is_contiguous() and not t.is_conj() and not t.is_neg())
        if not plain and e.nbytes > self.ring.step:
            self.flush()
            self._parts(at, t)
            return
        if (self.others or not plain) and self.end and at + e.nbytes - self.begin > self.ring.step:
            self.flush()
        self.begin = self.begin if self.end else at
        self.end = at + e.nbytes
        if plain:
            self.keep.append(t)
            self.blocks.append((at, t.data_ptr() if isinstance(t, torch.Tensor) else ctypes.addressof(t), e.nbytes))
        else:
            self.others.append((at, t))

    def flush(self) -> None:
        if self.others:
            self.ring.room(self.end)
            self._copy(self.others)
        _copy.copy_in_order(self.blocks, self.ring)
        if self.others:
            self.ring.told(self.end)
        self.blocks, self.keep, self.others, self.begin, self.end = [], [], [], 0, 0

    def _parts(self, at: int, t: Any) -> None:
        """A large tensor, some rows after the other."""
        from .. import _tensors

        for part in _tensors._rows(t, self.ring.step):
            n = part.numel() * part.element_size()
            self.ring.room(at + n)
            self._copy([(at, part)])
            at += n
            self.ring.told(at)

    def _copy(self, parts: Sequence[Tuple[int, Any]]) -> None:
        from .. import _tensors

        given = [x for x in parts if self.ring.give is not None and _tensors.on_device(x[1])]
        if given and self.ring.give(given):
            parts = [x for x in parts if not _tensors.on_device(x[1])]
        views = [_tensors.torch_view(self.base, ChunkSpec("", str(_dtypes.torch_name(t.dtype)), tuple(t.shape), (), tuple(t.shape)),
                                     at % self.ring.size) for at, t in parts]
        _tensors.bulk_out(views, [t for _, t in parts])


def pour(lane: Any, jobs: Sequence[Tuple[int, Entry]]) -> None:
    """Entries, in the order of their places in the image, into a lane's ring; and says that this was all."""
    window = _Window(lane.ring)
    for at, e in jobs:
        if e.nbytes:
            window.add(at, e)
    window.flush()
    lane.ring.told(lane.whole)
    lane.poured()


def copy_tensors(base: Any, into: _copy.Into, places: Sequence[int], tensors: Sequence[Any], sizes: Sequence[int],
                 more: Sequence[_copy.Block] = (), give: Any = None) -> None:
    """Tensors to their places in a segment, contiguous: in bulk if they are small, large ones by threads, other kinds by torch. give: has
    those of a GPU copied (_handover.Giver)."""
    import torch

    from .. import _tensors

    blocks, address = list(more), into.address
    small: List[Tuple[int, int, int]] = []
    ours: List[Any] = []
    theirs: List[Any] = []
    plain = (torch.Tensor, torch.nn.Parameter)
    device = [(at, t) for at, t in zip(places, tensors) if _tensors.on_device(t)] if give is not None else []
    given = bool(device) and give(device)
    for at, t, n in zip(places, tensors, sizes):
        if n == 0 or (given and _tensors.on_device(t)):
            continue
        if type(t) in plain and t.is_cpu and t.is_contiguous() and not t.is_conj() and not t.is_neg():
            (small if n <= _copy.SMALL else blocks).append((address + at, t.data_ptr(), n))
        else:
            ours.append(base[at:at + n].view(t.dtype).view(t.shape))
            theirs.append(t)
    if ours:
        with torch.no_grad():
            _tensors._bulk(torch, ours, theirs)
    if small:
        to, frm, lengths = zip(*small)
        _copy.Batch(to, lengths).run(frm)
    _copy.copy_into(into, blocks)
