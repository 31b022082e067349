"""open: a checkpoint to look into. Nothing is read but what is asked for.

    ck = dcpd.open("main:run1/step-100")
    ck["model.w"].shape, ck["model.w"][0:4], ck["optim.lr"], list(ck), ck.tree()
"""
from __future__ import annotations

import logging
import math
from collections.abc import Mapping as MappingBase
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from . import _ask, _daemon, _dtypes, _session, _tensors, _where, errors, image, values
from .client import Client

_log = logging.getLogger("dcpd")
_PIECE = 32 << 20  # bytes of one answer: a few readers at once fit into what the daemon keeps for clients
_WHOLE = 8         # times as much where each answer costs all of a chunk: without a manifest, one CRC32 is of all of it


class TensorSlice:
    """A tensor of a checkpoint, not read yet. `t[0:4]`, `t[..., 2]`, `t[:]` read; dtype, shape, nbytes, chunks are known.

    Slices are read by dcpd (steps are taken here); the result is a torch tensor if torch is installed, else an array. What is read is
    compared with the digests of its blocks; a chunk that PyTorch wrote has one CRC32, and is read whole for each slice of it. `unverified`:
    how many bytes of the last read nothing could be compared with, those of a `.metadata` without a digest among them.
    chunks: {"rank", "offsets", "sizes", "file"} of each stored box.
    """

    def __init__(self, checkpoint: "Checkpoint", record: Dict[str, Any]) -> None:
        self._ck, self._record = checkpoint, record
        self.fqn: str = record["fqn"]
        self.dtype: str = record["dtype"].replace("torch.", "")
        self.shape: Tuple[int, ...] = tuple(record["shape"])
        self.unverified = 0

    @property
    def chunks(self) -> List[Dict[str, Any]]:
        return list(self._record.get("chunks") or [])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return _dtypes.itemsize(self.dtype) * math.prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        box, after = _box(self.fqn, self.shape, index)
        whole = self._read(box)
        return whole[after] if after else whole

    def read(self) -> Any:
        """All of it."""
        return self._read([(0, n) for n in self.shape])

    def _read(self, box: Sequence[Tuple[int, int]]) -> Any:
        sizes = [b - a for a, b in box]
        row = _dtypes.itemsize(self.dtype) * math.prod(sizes[1:])
        piece = _PIECE if self._ck.record.get("manifest") else _PIECE * _WHOLE
        if not box or not math.prod(sizes) or row * sizes[0] <= piece:
            return _tensor(self._fetch(box), self.dtype, sizes)
        step = max(1, piece // row)
        out = bytearray(row * sizes[0])
        for a in range(0, sizes[0], step):
            b = min(a + step, sizes[0])
            out[a * row:b * row] = self._fetch([(box[0][0] + a, box[0][0] + b), *box[1:]])
        return _tensor(out, self.dtype, sizes)

    def _fetch(self, box: Sequence[Tuple[int, int]]) -> Any:
        if any(a == b for a, b in box):
            return b""
        text = ",".join(f"{a}:{b}" for a, b in box) if box else None
        got = self._ck._client.checkpoints.read(self._ck._ref, self.fqn, text)
        self.unverified = int(got.headers.get("dcpd-unverified-bytes", 0))
        return got.body

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        got = self.read()
        return np.asarray(got.numpy() if hasattr(got, "numpy") else got, dtype)

    def plot(self) -> str:
        """How the tensor is cut, as text: which rank stored which part."""
        from . import show

        return show.cut_text(self.fqn, self.shape, self.chunks)

    def __repr__(self) -> str:
        from . import show

        chunks = show.count(len(self.chunks), "chunk")
        return f"<TensorSlice {self.fqn}: {self.dtype}{list(self.shape)}, {show.size(self.nbytes)}, {chunks}>"

    def _repr_html_(self) -> str:
        from . import show

        return show.cut_html(self.fqn, self.dtype, self.shape, self.chunks)


def _tensor(data: Any, dtype: str, sizes: Sequence[int]) -> Any:
    spec = image.ChunkSpec("", dtype, tuple(sizes), (0,) * len(sizes), tuple(sizes))
    data = data if isinstance(data, bytearray) else bytearray(data)
    if len(data) != spec.nbytes:
        raise errors.CheckpointDamaged(f"{len(data)} bytes came for {dtype}{list(sizes)}")
    try:
        import torch
    except ImportError:
        return _tensors.numpy_view(data, spec, 0)
    base = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    return _tensors.torch_view(base, spec, 0)


def _box(fqn: str, shape: Tuple[int, ...], index: Any) -> Tuple[List[Tuple[int, int]], Tuple[Any, ...]]:
    """(what to read: begin and end per dim, what to take of that: integers and steps)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts.count(Ellipsis) > 1:
        raise IndexError(f"{fqn}: more than one ellipsis")
    if Ellipsis in parts:
        i = parts.index(Ellipsis)
        parts[i:i + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    if len(parts) > len(shape):
        raise IndexError(f"{fqn}: {len(parts)} indices for {len(shape)} dims")
    parts += [slice(None)] * (len(shape) - len(parts))
    box: List[Tuple[int, int]] = []
    after: List[Any] = []
    for d, (p, n) in enumerate(zip(parts, shape)):
        if isinstance(p, slice):
            a, b, step = p.indices(n)
            if step < 0:
                raise IndexError(f"{fqn}: a negative step in dim {d}")
            box.append((a, max(a, b)))
            after.append(slice(None, None, step))
        elif hasattr(p, "__index__"):
            i = p.__index__()
            if not -n <= i < n:
                raise IndexError(f"{fqn}: index {i} in dim {d} of {n}")
            box.append((i % n, i % n + 1))
            after.append(0)
        else:
            raise IndexError(f"{fqn}: {p!r} in dim {d}: integers and slices only")
    trivial = all(isinstance(x, slice) and x.step == 1 for x in after)
    return box, () if trivial else tuple(after)


class Checkpoint(MappingBase):  # type: ignore[type-arg]
    """A checkpoint as a mapping of flat keys: tensors come as `TensorSlice`, values as they are. See `dcpd.open`.

    record: what the API says of it (format, bytes, world_size …). Its listing is read once, at the first use.
    """

    def __init__(self, place: _where.Place, weights_only: bool) -> None:
        self._client, self._ref, self._weights_only = place.client, place.object, weights_only
        self.reference = place.shown
        self.record: Dict[str, Any] = self._find()
        verified = self.record.get("verified") or {}
        if verified.get("state") == "damaged":
            errors.warn_of(self._ref, f"the checkpoint was found damaged at {verified['at']}: `dcpctl job {verified['job']}` lists what")
        self._found: Optional[Tuple[Dict[str, TensorSlice], Dict[str, Any]]] = None

    def _find(self) -> Dict[str, Any]:
        """The record; of a checkpoint that is gone that of its copy in the storage behind, if there is one, which is read from then on."""
        try:
            return self._client.checkpoints.get(self._ref)
        except errors.NotFound:
            tier = next((s.get("tier") for s in self._client.storages.list() if s["name"] == self._ref["storage"]), None)
            if not tier:
                raise
            behind = {**self._ref, "storage": tier["storage"]}
            found = self._client.checkpoints.get(behind)
            _log.info("%s: read from its copy in %s", self.reference, tier["storage"])
            self._ref = behind
            return found

    @property
    def _all(self) -> Tuple[Dict[str, TensorSlice], Dict[str, Any]]:
        if self._found is None:
            tensors, found = self._client.checkpoints.tensors(self._ref)
            self._found = {t["fqn"]: TensorSlice(self, t) for t in tensors}, {v["fqn"]: v for v in found}
        return self._found

    @property
    def tensors(self) -> Dict[str, TensorSlice]:
        return dict(self._all[0])

    def __getitem__(self, fqn: str) -> Any:
        tensors, found = self._all
        if fqn in tensors:
            return tensors[fqn]
        if fqn not in found:
            raise errors.MissingKey(f"{self.reference} has no {fqn}", code="missing_key", fqn=fqn)
        v = found[fqn]
        if "value" in v:
            return v["value"]
        if "object" not in v:
            v["object"] = self._value(fqn)
        return v["object"]

    def _value(self, fqn: str) -> Any:
        """A value that is no JSON: dcpd puts it into a segment of its own."""
        name = _session.new_name()
        c = self._client
        try:
            job = c.jobs.create("load", source=self._ref, include=[fqn],
                                target={"state_dict": name, "world_size": 1, "lease_seconds": 60})
            c.jobs.wait(job)
            slot = c.state_dicts.get(name)["ranks"][0]["slots"][0]
            s = image.Segment(slot["segment"], "r", slot["image_bytes"])
            got = image.parse(s.map).values
            s.close()
            return values.decode(got[fqn], fqn, self._weights_only)
        finally:
            _ask.remove(c, name)

    def __iter__(self) -> Iterator[str]:
        tensors, found = self._all
        yield from tensors
        yield from found

    def __len__(self) -> int:
        return len(self._all[0]) + len(self._all[1])

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._all[0] or fqn in self._all[1]

    def __enter__(self) -> "Checkpoint":
        """For those who write `with dcpd.open(…) as ck`, as for a file: nothing is held that had to be closed."""
        return self

    def __exit__(self, *why: object) -> None:
        pass

    def tree(self) -> str:
        """All keys with dtypes and shapes, one a line."""
        from . import show

        return show.tree_text(self)

    def stats(self, *tensors: str, timeout: Optional[float] = None) -> Dict[str, Dict[str, Any]]:
        """What the numbers of each tensor are like: {fqn: {"min", "max", "mean", "norm", "zeros", "nan", "inf", "count", "histogram", …}}.

        tensors: globs of FQNs; none means all. All of them is read, by a job of the daemon; `min` to `norm` and the histogram
        ([exponent, negative, positive]: how many have 2**exponent <= abs(x) < 2**(exponent + 1)) are of the finite elements. Raises
        NotFound if no tensor matches, CheckpointDamaged.
        """
        job = self._client.jobs.run("stats", timeout, source=self._ref, include=list(tensors))
        return {t["fqn"]: t for t in job["result"]["statistics"]}

    def files(self) -> List[Dict[str, Any]]:
        return self._client.checkpoints.files(self._ref)

    def __repr__(self) -> str:
        from . import show

        return f"<Checkpoint {self.reference}: {', '.join(show.facts(self.record))}>"

    def _repr_html_(self) -> str:
        from . import show

        return show.checkpoint_html(self)


def diff(a: _where.Target, b: _where.Target, *, rtol: float = 0.0, atol: float = 0.0, top: int = 20, read_all: bool = False,
         include: Sequence[str] = (), exclude: Sequence[str] = (), client: Optional[Client] = None,
         timeout: Optional[float] = None) -> Dict[str, Any]:
    """How b differs from a, whatever their layouts and formats: {"equal", "differences", "movers", "totals", "unchanged", …}.

    a, b: references, paths, or "shm:NAME". movers: the `top` tensors that moved most, by |b - a| / |a| (rel_l2), with cosine, max_abs,
    count of elements and of bits that changed. totals: how many tensors and values were added, removed, reshaped, retyped, changed.
    rtol, atol: elements with |a - b| <= atol + rtol * |b| are equal; the same bits are, NaN too. Tensors whose digests on record are
    equal are not read (`unchanged` says how many bytes they are); read_all=True reads them. Raises NotFound, CheckpointDamaged.
    """
    sides: List[Dict[str, str]] = []
    for target in (a, b):
        if isinstance(target, str) and target.startswith("shm:"):
            sides.append({"state_dict": target[4:]})
            continue
        place = _where.resolve(target, client)
        client, side = place.client, place.object
        sides.append(side)
    c = client or _daemon.default_client()
    return dict(c.jobs.run("diff", timeout, a=sides[0], b=sides[1], rtol=rtol, atol=atol, top=top, read_all=read_all,
                           include=list(include), exclude=list(exclude))["result"])


def inspect(checkpoint: _where.Target, *, client: Optional[Client] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
    """What unpickling a checkpoint, a `.pt` file or any other would run: {"safe", "globals": [{"module", "name", "runs", "file", "offset",
    …}], "broken", "pickles", "files"}. Nothing is run, and nothing need be readable. safe: each pickle was followed to its end, and names
    nothing but data."""
    place = _where.resolve(checkpoint, client)
    return dict(place.client.jobs.run("inspect", timeout, source=place.object)["result"])


def repair(checkpoint: _where.Target, *, from_: Optional[_where.Target] = None, client: Optional[Client] = None,
           timeout: Optional[float] = None) -> Dict[str, Any]:
    """Makes lost or damaged metadata anew, and restores damaged parts: {"whole", "changed", "rebuilt", "restored", "unknown"}.

    from_: a checkpoint that has some of the same. Damaged bytes are taken from it, or from replicas in the checkpoint, if they have the
    digest or CRC32 that was recorded of them; lost metadata of PyTorch's own need one of the same layout, such as the step before. Raises
    CheckpointDamaged where nothing says what the files hold."""
    place = _where.resolve(checkpoint, client)
    more = {} if from_ is None else {"from": _where.resolve(from_, place.client).object}
    return dict(place.client.jobs.run("repair", timeout, target=place.object, **more)["result"])


def materialise(checkpoint: _where.Target, *, client: Optional[Client] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
    """Gives a checkpoint bytes of its own where incremental saves let it share some: {"files", "bytes", "changed"}."""
    place = _where.resolve(checkpoint, client)
    return dict(place.client.jobs.run("materialise", timeout, target=place.object)["result"])


def open(checkpoint: _where.Target, *, weights_only: bool = True, client: Optional[Client] = None) -> Checkpoint:
    """Opens a checkpoint ("STORAGE:NAME" or a path) to read parts of it: `dcpd.open(ref)["model.w"][0:4]`.

    weights_only: values of other than plain classes come as `Opaque`; False unpickles them here. Raises NotFound, CheckpointDamaged.
    """
    return Checkpoint(_where.resolve(checkpoint, client), weights_only)
