"""The copy of an async_save: a state dict whose tensors are views of a segment, so that saving it copies nothing again."""
from __future__ import annotations

import copy
from typing import Any, List, Tuple

from .. import _dtypes
from ..client import Client
from . import _items, _lane


class _Collector:
    """Walks a state dict twice in the same order: first to see what is there, then to build its twin."""

    def __init__(self) -> None:
        self.entries: List[_items.Entry] = []
        self.views: List[Any] = []

    def _local(self, t: Any, build: bool) -> Any:
        import torch

        t = t.detach()
        if hasattr(t, "wait"):
            t = t.wait()
        name = _dtypes.torch_name(t.dtype)
        if name is None or t.layout is not torch.strided or t.is_meta or getattr(t, "is_nested", False):
            return t.clone().cpu() if build and not t.is_meta else t
        if build:
            return self.views.pop()
        self.entries.append(_items.Entry("", False, t, t.numel() * t.element_size(), "", name, tuple(t.shape), [], None))
        return t

    def walk(self, x: Any, build: bool) -> Any:
        import torch

        if isinstance(x, torch.Tensor):
            return self._tensor(x, build)
        if isinstance(x, dict):
            return {k: self.walk(v, build) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            items = [self.walk(v, build) for v in x]
            if not build or isinstance(x, list):
                return items
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        return copy.deepcopy(x) if build else x

    def _tensor(self, x: Any, build: bool) -> Any:
        kind = type(x).__name__
        if kind == "ShardedTensor":
            shards = [self._local(s.tensor, build) for s in x.local_shards()]
            if not build:
                return x
            twin = copy.copy(x)
            twin._local_shards = [copy.copy(s) for s in x.local_shards()]
            for s, t in zip(twin._local_shards, shards):
                s.tensor = t
            return twin
        if kind == "DTensor":
            local = self._local(x.detach().to_local(), build)
            return _dtensor(x, local) if build else x
        if type(x) not in (_plain()) and hasattr(x, "__create_write_items__"):
            return copy.deepcopy(x) if build else x
        twin = self._local(x, build)
        if build and hasattr(x, "global_shape"):  # CheckpointableTensor: a tensor whose attributes say which boxes it holds
            for k in ("global_shape", "global_offsets", "local_offsets", "local_sizes"):
                setattr(twin, k, getattr(x, k))
        return twin


def _plain() -> Tuple[type, ...]:
    import torch

    return torch.Tensor, torch.nn.Parameter


def _dtensor(x: Any, local: Any) -> Any:
    if x.device_mesh.device_type == local.device.type:
        return type(x).from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.size(), stride=x.stride())
    return type(x)(local, x._spec, requires_grad=False)  # from_local would move it back to the mesh's device


def stage(client: Client, state_dict: Any) -> Any:
    import torch

    c = _Collector()
    c.walk(state_dict, False)
    places, at = [], 0
    for e in c.entries:
        begin, at = _lane.place(at, e.nbytes)
        places.append(_lane.HEAD + begin)
    lane = _lane.take(client, at)
    try:
        buffer = lane.buffer()
        base = torch.frombuffer(buffer, dtype=torch.uint8)
        _items.fill(base, base.data_ptr(), list(zip(places, c.entries)))
        c.views = [base[a:a + e.nbytes].view(e.data.dtype).view(e.sizes or ()) for a, e in zip(places, c.entries)]
        c.views.reverse()
        twin = c.walk(state_dict, True)
        _lane.stage_token(lane, buffer)
        return twin
    except BaseException:
        lane.let_go()
        raise
