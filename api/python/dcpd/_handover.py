"""Tensors on a GPU that a daemon copies in place of this process (api/device-memory.md), as save, async_save and load use it.

A worker's copy goes by DMA to page-locked memory on a stream of its own; one made here would need page-locked memory of this process's.
Whatever is refused, by the driver here or by the daemon, is said once, and torch copies then: `take` tells which chunks are left.
"""
from __future__ import annotations

import logging
import os
from typing import Any, Callable, Collection, Dict, FrozenSet, List, Optional, Set, Tuple

from . import _tensors, errors
from .client import Client
from .image import Layout

log = logging.getLogger("dcpd")
LEAST = 4 << 20       # bytes below which the round trip costs more than a copy
_ROW = 32             # bytes of the table of pieces
_MAPPING = 2 << 20    # the smallest allocation that an expandable segment is made of: a piece may cross into the next
_LASTING = ("", "backend_unavailable", "forbidden", "not_found", "unknown_field")  # codes of refusals that the next save would meet again
Wait = Callable[[Any], None]
_off: Dict[str, str] = {}        # by daemon: why nothing is handed over any more
_said: Set[Tuple[str, str]] = set()


def plan(client: Client, d: _tensors.Described, layout: Layout) -> Optional["Hand"]:
    """The chunks that a daemon can copy; None if they are few, or if it has refused before."""
    if not client._t.endpoint.unix or client.url in _off or os.environ.get("DCPD_HAND_OVER") == "0":
        return None
    found: Dict[int, int] = {}
    for i in d.outline.rest if d.outline is not None else range(len(d.sources)):
        at = _tensors.device_memory(d.sources[i], layout.chunks[i])
        if at is not None:
            found[i] = at
    return Hand(client, d, layout, found) if sum(layout.sizes[i] for i in found) >= LEAST else None


class Hand:
    """The chunks of one description that lie in GPU memory as an image has them. room: bytes that a slot needs behind the image."""

    def __init__(self, client: Client, d: _tensors.Described, layout: Layout, addresses: Dict[int, int]) -> None:
        self._client, self._d, self._layout, self._addresses = client, d, layout, addresses
        rows = 2 * len(addresses) + sum(layout.sizes[i] for i in addresses) // _MAPPING
        self.room = -layout.data_bytes % 8 + _ROW * rows
        self.chunks = frozenset(addresses)

    def take(self, name: str, rank: int, generation: int, v: _tensors.Views, chunks: Collection[int], wait: Optional[Wait] = None,
             to_device: bool = False) -> FrozenSet[int]:
        """Has those of these chunks that it can copied into the rank's open slot, which `v` shows, or from its sealed slot. wait: for the
        kernels of a device; those of the thread's current stream, if not given. Returns what is copied: all, or after a refusal the
        devices before. Raises ConnectionLost and WaitTimeout, as a worker may be writing still, and state_conflict if the slot is not this
        rank's."""
        done: Set[int] = set()
        for device, mine in self._by_device(chunks).items():
            pieces = [(v.at(i), self._addresses[i], self._layout.sizes[i]) for i in mine]
            (wait or _wait)(device)
            try:
                self._client.state_dicts.copy(name, rank, generation, pieces, v._buffer, v.end + -v.end % 8, to_device=to_device)
            except (errors.ConnectionLost, errors.WaitTimeout):
                raise
            except errors.DcpdError as e:
                if e.code == "state_conflict":
                    raise
                self._refused(e)
                break
            except OSError as e:  # of the descriptors' connection
                self._refused(errors.NoDaemon(str(e), code="descriptors"))
                break
            done.update(mine)
        return frozenset(done)

    def _by_device(self, chunks: Collection[int]) -> Dict[Any, List[int]]:
        out: Dict[Any, List[int]] = {}
        for i in self._addresses:
            if i in chunks:
                out.setdefault(self._d.sources[i].device, []).append(i)
        return out

    def _refused(self, e: errors.DcpdError) -> None:
        url, code = self._client.url, e.code or ""
        if (url, code) not in _said:
            _said.add((url, code))
            lasting = ", from now on" if code in _LASTING else ""
            log.warning("dcpd: this process copies its GPU memory itself%s, which takes longer: %s", lasting, e.message)
        if code in _LASTING:
            _off[url] = e.message


def _wait(device: Any) -> None:
    _tensors.device_module(device).current_stream(device).synchronize()
