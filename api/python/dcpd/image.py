"""The segment image: one rank's part of a state dict, as a safetensors file in shared memory (see api/image.md).

`Layout` says where each chunk lies; it is made once for a structure and used again for every step. `Segment` is a mapping of one
named segment. `parse` reads an image that somebody else wrote.
"""
from __future__ import annotations

import json
import mmap
import os
import re
import struct
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import _dtypes, errors

PAGE = 4096
PAD = "__dcpd_pad__/"
HEADER_MAX = 100 << 20
SHM = "/dev/shm"
_NAME = re.compile(r"/dcpd-[A-Za-z0-9._-]+")


class Outer(NamedTuple):
    """The shard of a larger tensor that is itself sharded: its box, the ranks that divide it, and what the two tensors are."""

    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]
    ranks: Optional[Tuple[int, ...]] = None
    types: Tuple[str, str] = ("ShardedTensor", "ShardedTensor")


class ChunkSpec(NamedTuple):
    """A box of a tensor that this rank holds: offsets and sizes in the whole tensor, one number a dim."""

    fqn: str
    dtype: str
    shape: Tuple[int, ...]
    offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]
    outer: Optional[Outer] = None

    @property
    def nbytes(self) -> int:
        n = _dtypes.itemsize(self.dtype)
        for s in self.sizes:
            n *= s
        return n


def _dumps(x: Any) -> str:
    return json.dumps(x, separators=(",", ":"))


class Layout:
    """Where the chunks of one structure lie in an image: tensors at multiples of 4096, filler between them; or at `places`, in ascending
    order and without overlaps, of `data_bytes` bytes of data.

    positions[i], sizes[i]: offset of chunk i from the start of the data, and its bytes; data_bytes: all of the data. The header's text
    is made once; only the values in it are new each time.
    """

    def __init__(self, chunks: Sequence[ChunkSpec], paths: Mapping[str, Sequence[Any]], places: Optional[Sequence[int]] = None,
                 data_bytes: int = 0) -> None:
        self.chunks = list(chunks)
        self.sizes = [c.nbytes for c in self.chunks]
        if places is None:
            places, data_bytes = self._pages(self.sizes)
        self.positions = list(places)
        self.data_bytes = data_bytes
        entries: List[str] = []
        listed: Dict[str, Any] = {}
        taken: Dict[str, int] = {}
        names = {c.fqn for c in chunks}
        end = pads = 0
        for c, n, pos, then in zip(self.chunks, self.sizes, self.positions, [*self.positions[1:], data_bytes]):
            if end < pos:  # before the first one
                entries.append(self._filler(pads, end, pos))
                pads += 1
            name = self._entry_name(c.fqn, taken, names)
            entries.append(self._entry(name, c, pos, n))
            more = self._more(name, c)
            if more:
                listed[name] = more
            if pos + n < then:
                entries.append(self._filler(pads, pos + n, then))
                pads += 1
            end = then
        self._paths = {k: list(p) for k, p in paths.items() if len(p) != 1 or p[0] != k}
        # a string inside a string: what is escaped piece by piece is escaped as a whole
        head = '{"version":1'
        if listed:
            head += ',"tensors":' + _dumps(listed)
        if self._paths:
            head += ',"paths":' + _dumps(self._paths)
        self._dcpd = _dumps(head)[1:-1]
        self._entries = (("," if entries else "") + ",".join(entries) + "}").encode("utf-8", "surrogatepass")
        self._last: Tuple[str, int, bytes] = ("", -1, b"")

    @staticmethod
    def _pages(sizes: Sequence[int]) -> Tuple[List[int], int]:
        """Places at multiples of 4096, and where the last chunk's page ends."""
        places, at = [], 0
        for n in sizes:
            places.append(at)
            at += n + -n % PAGE
        return places, at

    @staticmethod
    def _filler(number: int, begin: int, end: int) -> str:
        return f'"{PAD}{number}":{{"dtype":"U8","shape":[{end - begin}],"data_offsets":[{begin},{end}]}}'

    @staticmethod
    def _entry_name(fqn: str, taken: Dict[str, int], names: "set[str]") -> str:
        n = taken.get(fqn, 0)
        taken[fqn] = n + 1
        if n == 0 and fqn != "__metadata__" and not fqn.startswith(PAD):
            return fqn
        name = f"{fqn}#{n}"
        while name in names or name.startswith(PAD):
            name = "#" + name
        names.add(name)
        return name

    @staticmethod
    def _entry(name: str, c: ChunkSpec, pos: int, n: int) -> str:
        st, width = _dtypes.TABLE[c.dtype]
        shape = list(c.sizes)
        if st is None and width > 1:
            shape.append(width)
        return f'{json.dumps(name)}:{{"dtype":"{st or "U8"}","shape":{_dumps(shape)},"data_offsets":[{pos},{pos + n}]}}'

    @staticmethod
    def _more(name: str, c: ChunkSpec) -> Dict[str, Any]:
        more: Dict[str, Any] = {}
        if name != c.fqn:
            more["fqn"] = c.fqn
        if c.shape != c.sizes or any(c.offsets):
            more["global_shape"], more["offsets"] = list(c.shape), list(c.offsets)
        if _dtypes.TABLE[c.dtype][0] is None:
            more["dtype"] = c.dtype
            more["global_shape"] = list(c.shape)
        if c.outer is not None:
            o = c.outer
            more["global_shape"], more["offsets"] = list(o.sizes), [a - b for a, b in zip(c.offsets, o.offsets)]
            more["outer"] = {"global_shape": list(c.shape), "offsets": list(o.offsets)}
            if o.ranks is not None:
                more["outer"]["ranks"] = list(o.ranks)
            if o.types != ("ShardedTensor", "ShardedTensor"):
                more["outer"]["types"] = list(o.types)
        return more

    def ranges(self, room: int) -> List[range]:
        """The chunks in order, in runs of about so many bytes; a larger chunk is one by itself."""
        out: List[range] = []
        first = begin = 0
        for i, (at, n) in enumerate(zip(self.positions, self.sizes)):
            if i > first and at + n - begin > room:
                out.append(range(first, i))
                first, begin = i, at
        if first < len(self.sizes):
            out.append(range(first, len(self.sizes)))
        return out

    def header(self, values: Mapping[str, Mapping[str, Any]], room: int = 0) -> bytes:
        """Length and JSON, padded so that the data begins at a multiple of 4096. room: bytes to leave for values that grow."""
        inner = self._dcpd + _dumps("" if not values else ',"values":' + _dumps(values))[1:-1] + "}"
        if self._last[:2] == (inner, room):
            return self._last[2]
        text = ('{"__metadata__":{"dcpd":"' + inner + '"}').encode("utf-8", "surrogatepass") + self._entries
        n = len(text) + room
        n += -(8 + n) % PAGE
        if n > HEADER_MAX:
            raise errors.StateDictMismatch(f"the values and the structure of this rank need a header of {n} bytes; at most "
                                           f"{HEADER_MAX} are possible")
        self._last = (inner, room, struct.pack("<Q", n) + text + b" " * (n - len(text)))
        return self._last[2]


def address(buffer: Any) -> int:
    """Where a writable buffer lies."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Segment:
    """A mapping of a named segment ("/dcpd-…") of dcpd's, of `bytes` bytes or all of it.

    mode "w" writes what everybody sees, "r" only reads, "c" gives this process copies of the pages that it writes. The memory stays
    as long as somebody maps it, also when the name is gone. Raises NoSharedMemory, Forbidden.
    """

    def __init__(self, name: str, mode: str = "w", bytes: Optional[int] = None) -> None:
        if not _NAME.fullmatch(name):
            raise errors.ProtocolMismatch(f"{name!r} is no segment's name")
        self.name = name
        flags = os.O_RDWR if mode == "w" else os.O_RDONLY
        try:
            fd = os.open(SHM + name, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as e:
            raise errors.NoSharedMemory(
                f"{SHM}{name} is not there: this process and dcpd must be on one host, with one /dev/shm (containers: --ipc=host for "
                "both). From elsewhere dcpd.open() reads tensors, and jobs run at the daemon", code="segment_gone") from e
        except PermissionError as e:
            raise errors.Forbidden(f"{SHM}{name} belongs to another user", code="forbidden") from e
        try:
            size = os.fstat(fd).st_size
            if bytes is not None and size < bytes:
                raise errors.CheckpointDamaged(f"{name} has {size} bytes, not {bytes}", code="segment_shrunk")
            access = {"w": mmap.ACCESS_WRITE, "r": mmap.ACCESS_READ, "c": mmap.ACCESS_COPY}[mode]
            self.map: Any = mmap.mmap(fd, size if bytes is None else bytes, access=access)
        finally:
            os.close(fd)
        self.size = len(self.map)

    def close(self) -> None:
        """Lets it go: it is unmapped with the last view. Never by force: torch's views hold the mapping, but not as a buffer, so
        mmap.close() would take the memory from under them."""
        self.map = b""

    def __repr__(self) -> str:
        return f"<Segment {self.name}, {self.size} bytes>"


class Entry(NamedTuple):
    """One chunk of a parsed image; `begin` counts from the start of the image."""

    spec: ChunkSpec
    begin: int


class Parsed(NamedTuple):
    entries: List[Entry]
    values: Dict[str, Dict[str, Any]]
    paths: Dict[str, List[Any]]


def parse(image: Any, size: Optional[int] = None) -> Parsed:
    """The structure of an image (a buffer, or its beginning with the header of an image of `size` bytes). Raises CheckpointDamaged where it
    is not one."""
    view = memoryview(image)
    try:
        size = len(view) if size is None else size
        if len(view) < 8:
            raise ValueError("shorter than its length field")
        n = struct.unpack("<Q", view[:8])[0]
        if n > HEADER_MAX or 8 + n > len(view):
            raise ValueError(f"a header of {n} bytes")
        head = json.loads(bytes(view[8:8 + n]))
        dcpd = json.loads(head.pop("__metadata__", {}).get("dcpd", '{"version":1}'))
        if dcpd.get("version") != 1:
            raise ValueError(f"version {dcpd.get('version')!r}")
        listed = dcpd.get("tensors", {})
        entries = [Entry(_spec(name, e, listed.get(name, {})), 8 + n + _begin(e, size - 8 - n))
                   for name, e in head.items() if not name.startswith(PAD)]
        for e in entries:
            if e.begin + e.spec.nbytes > size:
                raise ValueError(f"{e.spec.fqn} goes beyond the end")
        return Parsed(entries, dict(dcpd.get("values", {})), dict(dcpd.get("paths", {})))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise errors.CheckpointDamaged(f"not a segment image: {e}", code="format_image") from e
    finally:
        view.release()


def _begin(e: Mapping[str, Any], limit: int) -> int:
    a, b = e["data_offsets"]
    if not (isinstance(a, int) and isinstance(b, int) and 0 <= a <= b <= limit):
        raise ValueError(f"data_offsets {a}, {b}")
    return a


def _outer(o: Mapping[str, Any], sizes: Sequence[int]) -> Outer:
    ranks = o.get("ranks")
    a, b = o.get("types", ("ShardedTensor", "ShardedTensor"))
    return Outer(tuple(int(x) for x in o["offsets"]), tuple(sizes), None if ranks is None else tuple(int(r) for r in ranks), (a, b))


def _spec(name: str, e: Mapping[str, Any], more: Mapping[str, Any]) -> ChunkSpec:
    dtype = more.get("dtype") or _dtypes.FROM_SAFETENSORS[e["dtype"]]
    if dtype not in _dtypes.TABLE:
        raise ValueError(f"dtype {dtype!r}")
    sizes = [int(s) for s in e["shape"]]
    width = _dtypes.itemsize(dtype)
    if more.get("dtype") and _dtypes.TABLE[dtype][0] is None and width > 1:
        dims = len(more["global_shape"]) if "global_shape" in more else len(sizes) - 1
        if len(sizes) == dims + 1:
            sizes = sizes[:-1]
        elif len(sizes) == dims and dims:
            sizes[-1] //= width
    shape = [int(s) for s in more.get("global_shape", sizes)]
    if any(s < 0 for s in sizes):
        raise ValueError(f"sizes {sizes}")
    offsets = tuple(int(a) for a in more.get("offsets", [0] * len(shape)))
    outer = _outer(more["outer"], shape) if "outer" in more else None
    if outer is not None:
        shape = [int(s) for s in more["outer"]["global_shape"]]
        offsets = tuple(a + b for a, b in zip(outer.offsets, offsets))
    spec = ChunkSpec(str(more.get("fqn", name)), dtype, tuple(shape), offsets, tuple(sizes), outer)
    if e["data_offsets"][1] - e["data_offsets"][0] != spec.nbytes:
        raise ValueError(f"{spec.fqn}: {e['data_offsets']} for {spec.nbytes} bytes")
    return spec


def dump(chunks: Iterable[Tuple[ChunkSpec, Any]], values: Optional[Mapping[str, Mapping[str, Any]]] = None,
         paths: Optional[Mapping[str, Sequence[Any]]] = None) -> bytes:
    """A whole image in memory, of (spec, buffer) pairs: for small ones, and for tests."""
    pairs = list(chunks)
    layout = Layout([c for c, _ in pairs], paths or {})
    head = layout.header(values or {})
    out = bytearray(len(head) + layout.data_bytes)
    out[:len(head)] = head
    for (c, data), pos in zip(pairs, layout.positions):
        out[len(head) + pos:len(head) + pos + c.nbytes] = memoryview(data).cast("B")
    return bytes(out)
