"""Ranks of PyTorch's save that are on other hosts than the coordinator.

PyTorch gives a writer no process group, so what is to be known travels with the plans: each local plan says of which host it is, and the
global one tells the ranks of other hosts. Their daemons write their files at once, in write_data, as PyTorch's own writer would; the
coordinator's daemon moves them into the checkpoint. Whether the storage is shared is tried out first: the coordinator makes a mark, which
the others look for before they copy anything.
"""
from __future__ import annotations

import secrets
import weakref
from typing import Any, Dict, Set, Tuple

from .. import _group, _where, errors
from . import _path

_marks: Dict[str, _where.Place] = {}
_proved: Set[Tuple[str, str, str]] = set()


def mark(writer: Any) -> str:
    """A mark that goes with `writer`, if its save does not come to an end before."""
    place = _path.place(writer.path)
    token = secrets.token_hex(16)
    _marks[token] = place
    weakref.finalize(writer, unmark, token)
    place.client.storages.meet(place.storage, place.name, token, "put")
    return token


def unmark(token: str) -> None:
    place = _marks.pop(token, None)
    if place is None:
        return
    try:
        place.client.storages.meet(place.storage, place.name, token, "drop")
    except errors.DcpdError:
        pass  # a later sweep takes it


def look(path: Any, coordinator: Any) -> None:
    """Raises SeveralHosts if we do not see what the coordinator's daemon has made. Once for each storage: a cached plan has an old mark."""
    place = _path.place(path)
    key = (place.client.url, place.storage, coordinator.place[0])
    if key in _proved:
        return
    if not place.client.storages.meet(place.storage, place.name, coordinator.token):
        host, there = _group.place()[1], coordinator.place[1]
        raise errors.SeveralHosts(f"{host} does not see what {there} writes to {path}: ranks of several hosts save to a directory that the "
                                  "daemons of all of them share, such as NFS")
    _proved.add(key)
