"""The copy of an async_save that goes on while the trainer runs forward and backward.

Between two steps nothing but the optimizer writes parameters and optimizer state, so these alone are copied late. All else (buffers,
which a forward changes, numpy arrays, values, tensors of unknown use) is copied before async_save returns. A tensor counts as a
parameter if it lies in memory of one: the tensors of a `state_dict()` are detached, and carry no mark. Those of DTensors do not even
share the version counter with their parameter, nor does a DTensor with its local tensor: all of these counters are looked at.

A hook of PyTorch's lets each `optimizer.step()` wait for the copy. Code that changes a parameter in another way is found out by the
tensor's version counter, and the save fails: a checkpoint of two steps mixed must not be. Writes through `.data` and by fused
optimizers leave no trace there; the latter are steps, which wait.
"""
from __future__ import annotations

import bisect
import gc
import os
import threading
import weakref
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from . import _copy, _tensors, errors

LEAST = 64 << 10   # bytes: what is smaller costs more to watch than to copy
GROUP = 128 << 20  # bytes between two looks at the version counters

_optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_searched: Set[FrozenSet[str]] = set()  # names of large tensors that a search has found no parameter for
_running: List["Copy"] = []
Wait = Callable[[Any], None]
Take = Callable[[FrozenSet[int], Wait], FrozenSet[int]]
_hooked: List[Any] = []


class _Item(NamedTuple):
    """A chunk to be copied. tensor: detached, so that it keeps its memory even if the parameter is given another. watched: all tensors
    that are this memory, each with its version when async_save was called."""

    chunk: int
    fqn: str
    tensor: Any
    watched: List[Tuple[Any, int]]

    def check(self) -> None:
        for t, version in self.watched:
            if t._version != version:
                raise errors.TensorChanged(
                    f"{self.fqn} was changed while it was copied beside the training step (version {t._version}, {version} when async_save "
                    "was called): before anything but optimizer.step() writes to it call wait_snapshot(), or save without overlap",
                    fqn=self.fqn)


class Copy:
    """The late part of one snapshot. Made by the thread that calls async_save, run by another."""

    def __init__(self, d: _tensors.Described, v: _tensors.Views, chunks: Mapping[int, Sequence[Any]], fresh: bool,
                 take: Optional[Take] = None) -> None:
        """chunks: and the tensors to be watched for each. fresh: the segment's pages have never been touched. take: see begin."""
        self._views, self._fresh, self._take = v, fresh, take
        self.chunks = frozenset(chunks)
        self._items = [_Item(c, v.layout.chunks[c].fqn, d.sources[c].detach(), [(t, t._version) for t in watched])
                       for c, watched in chunks.items()]
        self._streams = _streams([i.tensor for i in self._items])
        self._guard, self._over, self.sealed = threading.Lock(), threading.Event(), threading.Event()
        _hook()
        _running.append(self)

    def run(self) -> None:
        """Raises TensorChanged; the segment then holds no snapshot."""
        try:
            if self._fresh:
                _copy.populate(self._views.address, self._views.end)
            if self._take is not None:
                self._group(self._items, self._hand_over)
            for group in self._groups():
                self._group(group, self._some)
        finally:
            self._end()

    def _group(self, group: Sequence[_Item], copy: Callable[[Sequence[_Item]], None]) -> None:
        with self._guard:
            if self._over.is_set():
                raise errors.JobCancelled("the save was given up")
            copy(group)
        for i in group:
            i.check()

    def _hand_over(self, items: Sequence[_Item]) -> None:
        """What dcpd copies needs no copy here."""
        assert self._take is not None
        done = self._take(self.chunks, lambda device: self._streams[device].synchronize())
        self._items = [i for i in items if i.chunk not in done]

    def _end(self) -> None:
        with self._guard:
            self._over.set()
            self._items = []

    def drop(self) -> None:
        """From here on neither tensors nor segment are touched: the generation is sealed, or given up."""
        self._end()
        self.sealed.set()
        if self in _running:
            _running.remove(self)

    def wait(self) -> None:
        """Until the tensors are not read any more."""
        self._over.wait()

    def _groups(self) -> Iterator[List[_Item]]:
        group: List[_Item] = []
        held = 0
        for i in self._items:
            group.append(i)
            held += self._views.layout.sizes[i.chunk]
            if held >= GROUP:
                yield group
                group, held = [], 0
        if group:
            yield group

    def _some(self, group: Sequence[_Item]) -> None:
        v = self._views
        plain = [i for i in group if _tensors.memory(i.tensor, v.layout.chunks[i.chunk])]
        _copy.copy([v.block(i.chunk, i.tensor.data_ptr(), v.layout.sizes[i.chunk]) for i in plain])
        alike: Dict[Any, List[_Item]] = {}
        blocks = frozenset(i.chunk for i in plain)
        for i in group:
            if i.chunk not in blocks:
                alike.setdefault(i.tensor.device, []).append(i)
        for device, items in alike.items():
            self._by_torch(device, items)

    def _by_torch(self, device: Any, items: Sequence[_Item]) -> None:
        """Strided tensors, and those of a device: by its own stream, so that the trainer's kernels need not be done first."""
        to, frm = [self._views.torch(i.chunk) for i in items], [i.tensor for i in items]
        stream = self._streams.get(device)
        if stream is None:
            _tensors.bulk_out(to, frm)
            return
        with _tensors.device_module(device).stream(stream):
            _tensors.bulk_out(to, frm)
        stream.synchronize()


def _streams(tensors: Sequence[Any]) -> Dict[Any, Any]:
    """A stream for each device, whose work begins after what the calling thread has enqueued there until now."""
    out: Dict[Any, Any] = {}
    for device in {t.device for t in tensors if not t.is_cpu}:
        module = _tensors.device_module(device)
        out[device] = module.Stream(device)
        out[device].wait_stream(module.current_stream(device))
    return out


# ------------------------------------------------------------------------------------------------ which tensors


def begin(d: _tensors.Described, v: _tensors.Views, fresh: bool, take: Optional[Take] = None) -> Optional[Copy]:
    """The late part of a snapshot into these views; None if there is nothing to be copied late. take: has dcpd copy those of these chunks
    that it can, and says which they were; it is given how to wait for a device's kernels."""
    torch = _tensors.torch_module()
    chunks = _choose(torch, d, v.layout.sizes, [c.fqn for c in v.layout.chunks]) if torch is not None else {}
    return Copy(d, v, chunks, fresh, take) if chunks else None


def _choose(torch: Any, d: _tensors.Described, sizes: Sequence[int], fqns: Sequence[str]) -> Dict[int, List[Any]]:
    large = [i for i, n in enumerate(sizes) if n >= LEAST and _watchable(torch, d.sources[i])]
    found, others = _divide(torch, d, large, fqns)
    if others and others not in _searched:
        _search(torch)
        found, others = _divide(torch, d, large, fqns)
        if len(_searched) == 16:
            _searched.clear()
        _searched.add(others)
    return found


def _divide(torch: Any, d: _tensors.Described, large: Sequence[int], fqns: Sequence[str]) -> Tuple[Dict[int, List[Any]], FrozenSet[str]]:
    """Chunks that lie in memory of parameters or optimizer state, with the tensors to be watched, and the names of the others."""
    spans, found = _Spans(_owned(torch, d) if large else ()), {}
    for i in large:
        t = d.sources[i]
        owners = spans.of(t)
        if owners or t.requires_grad:
            found[i] = [t, *owners]
    return found, frozenset(fqns[i] for i in large) - frozenset(fqns[i] for i in found)


def _watchable(torch: Any, t: Any) -> bool:
    """Whether a tensor has memory, a version that is counted, and, if it is a device's, streams."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta and not t.is_inference() and _tensors.is_memory(t) \
        and (t.is_cpu or all(hasattr(_tensors.device_module(t.device), name) for name in ("Stream", "current_stream")))


def _owned(torch: Any, d: _tensors.Described) -> Iterator[Any]:
    """Local tensors that only an optimizer's step changes."""
    optimizers = {id(o): o for o in (*_optimizers, *d.stateful.values()) if isinstance(o, torch.optim.Optimizer)}
    for o in optimizers.values():
        for group in list(o.param_groups):
            yield from group["params"]
        for state in list(o.state.values()):
            if isinstance(state, dict):
                yield from [x for x in state.values() if isinstance(x, torch.Tensor)]
    for m in d.stateful.values():
        if isinstance(m, torch.nn.Module):
            yield from [p for p in m.parameters() if p.requires_grad]


class _Spans:
    """The memory of tensors, as ranges of addresses without overlaps, each with the tensors that share it."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        found: Dict[Any, List[Tuple[int, int, int, List[Any]]]] = {}
        for i, t in enumerate(tensors):
            local = _tensors.local_of(t) if type(t).__name__ == "DTensor" else t
            span = _span(local)
            if span is not None and not local.is_inference():
                found.setdefault(local.device, []).append((*span, i, [t] if local is t else [t, local]))
        self._by_device: Dict[Any, Tuple[List[int], List[int], List[List[Any]]]] = {}
        for device, spans in found.items():
            begins, ends, owners = self._by_device.setdefault(device, ([], [], []))
            for a, b, _, ts in sorted(spans, key=lambda s: s[:3]):
                if ends and a < ends[-1]:
                    ends[-1] = max(ends[-1], b)
                    owners[-1] += ts
                else:
                    begins.append(a)
                    ends.append(b)
                    owners.append(ts)

    def of(self, t: Any) -> List[Any]:
        """The tensors in whose memory t lies."""
        span, (begins, ends, owners) = _span(t), self._by_device.get(t.device, ([], [], []))
        k = bisect.bisect_right(begins, span[0]) - 1 if span is not None else -1
        return owners[k] if span is not None and k >= 0 and span[1] <= ends[k] else []


def _span(t: Any) -> Optional[Tuple[int, int]]:
    try:
        n, size = t.numel(), t.element_size()
        if n * size < LEAST:
            return None
        at = t.data_ptr()
        return at, at + (n if t.is_contiguous() else 1 + sum((k - 1) * s for k, s in zip(t.shape, t.stride()))) * size
    except (RuntimeError, NotImplementedError, AttributeError):  # of somebody else's class, without memory of its own
        return None


def _search(torch: Any) -> None:
    """Optimizers that are not part of the state dict, and have not made a step since the first save: PyTorch keeps no list of them."""
    kinds, more = {}, [torch.optim.Optimizer]
    while more:
        kind = more.pop()
        kinds[id(kind)] = kind
        more += [k for k in type.__subclasses__(kind) if id(k) not in kinds]
    _optimizers.update([o for o in gc.get_objects() if id(type(o)) in kinds])


# ------------------------------------------------------------------------------------------------ the wait


def _hook() -> None:
    """Lets each step of each optimizer wait. It stays: steps tell which optimizers there are."""
    if not _hooked:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        _hooked.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Any, *_: Any) -> None:
    """Until no tensor is read any more by a copy of this process. Whether it went well the save's future tells."""
    _optimizers.add(optimizer)
    for c in list(_running):
        c.wait()


def settle() -> None:
    """Until no slot of this process is being filled."""
    for c in list(_running):
        c.sealed.wait()


def _after_fork() -> None:
    """A child has no part in its parent's copies: the thread that runs them is not there."""
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
