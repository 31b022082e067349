"""What a state dict in shared memory holds, without a copy: one process loads a model, many look at the same pages.

    with dcpd.attach("shm:serve") as view:
        view["model.w"]                    # a read-only tensor: its bytes are those in the segment
"""
from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping as MappingBase
from typing import Any, Dict, Iterator, List, Optional

from . import _tensors, errors, image, values
from .client import Client, Closing

_RENEW = 15.0


class Entries(MappingBase):  # type: ignore[type-arg]
    """What an image in a mapped segment holds: {FQN: view or value}; several chunks of one tensor come as a list."""

    def __init__(self, segment: image.Segment, as_numpy: bool, weights_only: bool) -> None:
        self._segment = segment
        self.file = image.SHM + segment.name
        self._fill(image.parse(segment.map), as_numpy, weights_only)

    def _fill(self, parsed: image.Parsed, as_numpy: bool, weights_only: bool) -> None:
        self.parsed, self.paths = parsed, parsed.paths
        self.chunks: List[image.ChunkSpec] = [e.spec for e in self.parsed.entries]
        self._items: Dict[str, Any] = {}
        for e in self.parsed.entries:
            self._put(e.spec.fqn, self.view(e, as_numpy))
        self._items.update(values.decode_all(self.parsed.values, weights_only))

    def view(self, e: image.Entry, as_numpy: bool) -> Any:
        """A chunk of the image, without a copy."""
        if not as_numpy:
            try:
                import torch
            except ImportError:
                as_numpy = True
        if as_numpy:
            return _tensors.numpy_view(self._segment.map, e.spec, e.begin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the buffer is read-only: it is meant so
            base = torch.frombuffer(self._segment.map, dtype=torch.uint8)
        return _tensors.torch_view(base, e.spec, e.begin)

    def _put(self, fqn: str, view: Any) -> None:
        if fqn not in self._items:
            self._items[fqn] = view
        elif isinstance(self._items[fqn], list):
            self._items[fqn].append(view)
        else:
            self._items[fqn] = [self._items[fqn], view]

    def __getitem__(self, fqn: str) -> Any:
        return self._items[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class StateDictView(Entries, Closing):
    """One rank's part of a sealed generation, as a mapping {FQN: tensor or value}; several chunks of one tensor come as a list.

    Tensors are views of shared memory: read-only as arrays; torch has no read-only tensors, so do not write to those. The state dict's
    lease is renewed until `close()` (or the end of the `with`); the views stay valid even then, as long as they are referenced. What
    is attached is left alone by others only while the owner does not release that generation.
    `file` is the segment's path in /dev/shm: a safetensors file (entries `__dcpd_pad__/N` are filler).
    """

    def __init__(self, client: Client, name: str, rank: int, generation: Optional[int], weights_only: bool, as_numpy: bool) -> None:
        self._client, self.name, self.rank = client, name, rank
        slots = [s for s in self._rank_record()["slots"] if s["state"] == "sealed" and generation in (None, s.get("generation"))]
        if not slots:
            which = "" if generation is None else f" of generation {generation}"
            raise errors.NotSealed(f"rank {rank} of state dict {name!r} has nothing sealed{which}", code="not_sealed", rank=rank)
        slot = max(slots, key=lambda s: s.get("generation") or 0)
        self.generation: int = slot.get("generation") or 0
        super().__init__(image.Segment(slot["segment"], "r", slot["image_bytes"]), as_numpy, weights_only)
        self._stop = threading.Event()
        threading.Thread(target=self._renew, name="dcpd-view", daemon=True).start()

    def _rank_record(self) -> Dict[str, Any]:
        ranks = self._client.state_dicts.get(self.name)["ranks"]
        if not 0 <= self.rank < len(ranks):
            raise errors.NotFound(f"state dict {self.name!r} has ranks 0 to {len(ranks) - 1}", rank=self.rank)
        return dict(ranks[self.rank])

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW):
            try:
                self._client.state_dicts.renew(self.name, self.rank)
            except errors.NotFound:
                return
            except errors.DcpdError:
                pass  # it may come back
            finally:
                self._client._t.close()  # this thread's connection

    def close(self) -> None:
        """Lets the lease go; the memory goes with the last view."""
        self._stop.set()
        self._items = {}
        self._segment.close()

    def __repr__(self) -> str:
        return f"<StateDictView shm:{self.name}, rank {self.rank}, generation {self.generation}, {len(self)} entries>"
