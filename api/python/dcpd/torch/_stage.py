"""The copy of an async_save: a state dict whose tensors are views of a segment, so that saving it copies nothing again."""
from __future__ import annotations

import copy
from typing import Any, Dict, Iterator, List, Tuple

from .. import _dtypes, _handover
from ..client import Client
from . import _items, _lane


_KEY = 8  # bytes of a name for a number in a list, or for a key that is no string


class _Twins:
    """Walks a state dict twice in the same order: first to see what is there, then to build its twin. Plain tensors come first
    in every choice: there are ten thousand of them, and the trainer waits."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.plain = frozenset((torch.Tensor, torch.nn.Parameter))
        self.found: List[Any] = []   # tensors that a segment can hold
        self.odd: List[bool] = []    # of every tensor: it cannot
        self.names = 0               # bytes of all names of those found, as PyTorch flattens them
        self._views: Iterator[Any] = iter(())
        self._odd: Iterator[bool] = iter(())

    # ---- what is there

    def look(self, x: Any, name: int = 0) -> None:
        """name: bytes of the names that lead here."""
        if type(x) in self.plain:
            self._note(x)
            self.names += name
        elif isinstance(x, self.torch.Tensor):
            for t in self._locals(x):
                if type(t) not in self.plain:
                    t = t.detach()
                    t = t.wait() if hasattr(t, "wait") else t
                self._note(t)
                self.names += name
        elif isinstance(x, dict):
            for k, v in x.items():
                self.look(v, name + 1 + (len(k) if isinstance(k, str) else _KEY))
        elif isinstance(x, (list, tuple)):
            for v in x:
                self.look(v, name + _KEY)

    def _locals(self, x: Any) -> List[Any]:
        kind = type(x).__name__
        if kind == "ShardedTensor":
            return [s.tensor for s in x.local_shards()]
        if kind == "DTensor":
            return [x.detach().to_local()]
        return [] if hasattr(x, "__create_write_items__") else [x]  # of somebody else's class, which makes its items itself

    def _note(self, t: Any) -> None:
        odd = _dtypes.torch_name(t.dtype) is None or t.layout is not self.torch.strided or t.is_meta or t.is_nested
        self.odd.append(odd)
        if not odd:
            self.found.append(t)

    # ---- its twin

    def build(self, x: Any, views: List[Any]) -> Any:
        self._views, self._odd = iter(views), iter(self.odd)
        return self._twin(x)

    def _local(self, t: Any) -> Any:
        if not next(self._odd):
            return next(self._views)
        t = t.detach()
        t = t.wait() if hasattr(t, "wait") else t
        return t if t.is_meta else t.clone().cpu()

    def _twin(self, x: Any) -> Any:
        if type(x) in self.plain:
            return self._boxed(x)
        if isinstance(x, self.torch.Tensor):
            return self._tensor(x)
        if isinstance(x, dict):
            return {k: self._twin(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            items = [self._twin(v) for v in x]
            if isinstance(x, list):
                return items
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        return copy.deepcopy(x)

    def _tensor(self, x: Any) -> Any:
        kind = type(x).__name__
        if kind == "ShardedTensor":
            twin = copy.copy(x)
            twin._local_shards = [copy.copy(s) for s in x.local_shards()]
            for s in twin._local_shards:
                s.tensor = self._local(s.tensor)
            return twin
        if kind == "DTensor":
            return _dtensor(x, self._local(x.detach().to_local()))
        return copy.deepcopy(x) if hasattr(x, "__create_write_items__") else self._boxed(x)

    def _boxed(self, x: Any) -> Any:
        twin = self._local(x)
        if hasattr(x, "global_shape"):  # CheckpointableTensor: a tensor whose attributes say which boxes it holds
            for k in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
                setattr(twin, k, getattr(x, k))
        return twin


def _dtensor(x: Any, local: Any) -> Any:
    if x.device_mesh.device_type == local.device.type:
        return type(x).from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.size(), stride=x.stride())
    return type(x)(local, x._spec, requires_grad=False)  # from_local would move it back to the mesh's device


def _places(head: int, sizes: List[int]) -> Tuple[List[int], int]:
    places, at = [], 0
    for n in sizes:
        begin, at = _lane.place(at, n)
        places.append(head + begin)
    return places, at


def _views(base: Any, places: List[int], tensors: List[Any]) -> List[Any]:
    """Contiguous tensors in the segment; one call each where the source is contiguous, too."""
    of: Dict[Any, Tuple[Any, int]] = {}
    out = []
    for at, t in zip(places, tensors):
        kind = t.dtype
        if kind not in of:
            of[kind] = (base[:len(base) - len(base) % 16].view(kind), t.element_size())
        flat, width = of[kind]
        if t.is_contiguous():
            out.append(flat.as_strided(t.shape, t.stride(), at // width))
        else:
            out.append(base[at:at + t.numel() * width].view(kind).view(t.shape))
    return out


def stage(client: Client, state_dict: Any) -> Any:
    import torch

    twins = _Twins()
    twins.look(state_dict)
    sizes = [t.numel() * t.element_size() for t in twins.found]
    head = _lane.head_for(len(sizes), twins.names)
    places, total = _places(head, sizes)
    lane = _lane.take(client, total, head=head, room=_handover.room(client, twins.found))
    try:
        buffer = lane.buffer()
        base = torch.frombuffer(buffer, dtype=torch.uint8)
        _items.copy_tensors(base, lane.into(), places, twins.found, sizes, give=lane.giver())
        twin = twins.build(state_dict, _views(base, places, twins.found))
        _lane.stage_token(lane, buffer)
        return twin
    except BaseException:
        lane.let_go()
        raise
