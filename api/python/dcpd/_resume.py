"""resume: what a training goes on from, and loading it.

dcpd chooses (api/resuming.md): rank 0 asks, and all ranks load the same. What turns out to be damaged while it is loaded is left for the
one before, by all ranks.
"""
from __future__ import annotations

import logging
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from . import _group, _hosts, _load, _where, errors
from .client import Client

log = logging.getLogger("dcpd")


class Resumed(NamedTuple):
    """What a training goes on from. checkpoint: its reference, or its path where the run was given as one. skipped: newer ones, the newest
    first: {"name", "why"}. attempts: with this one since a newer checkpoint became durable, this one included."""

    checkpoint: str
    step: Optional[int]
    why: str
    attempts: int
    skipped: List[Dict[str, str]]


def resume(run: _where.Target, into: Any = None, *, attempts_max: int = 3, optimizer: str = "whole",
           layout: Optional[Sequence[Mapping[str, Any]]] = None, look: bool = False, process_group: Any = None, no_dist: bool = False,
           client: Optional[Client] = None, **load_options: Any) -> Optional[Resumed]:
    """Loads the newest checkpoint of a run ("main:run1", or a directory) that can be loaded, into a state dict.

        r = dcpd.resume("main:run1", into=state_dict)
        start = r.step + 1 if r else 0

    None: the run has no checkpoint yet. NothingToResume: it has some, and none will do; beginning anew is not for a program to decide.
    A checkpoint that is found damaged while it is loaded is left for the one before; other errors of the load are raised. Each call
    counts an attempt with what it hands out; after attempts_max (0: without limit) without a newer checkpoint the one before is next.
    Without `into` nothing is loaded, for those who load by other means. look: asks only, and counts nothing.
    optimizer: "any" takes optimizer state that only a part of a group has. layout: rules that must fit (api/layouts.md).
    load_options: as of `load` (keys, strict, transform, …). In a torch.distributed job every rank calls it, and all get the same.
    """
    g = _hosts.group(process_group, no_dist)
    everyone = g.all if isinstance(g, _hosts.HostGroup) else g
    body: Dict[str, Any] = {"world_size": everyone.size, "attempts_max": attempts_max, "optimizer": optimizer}
    if layout is not None:
        body["layout"] = [dict(rule) for rule in layout]
    unwanted: List[Dict[str, str]] = []
    while True:
        found = _ask(run, {**body, "unwanted": unwanted} if unwanted else body, look and not unwanted, everyone, client)
        if found is None:
            return None
        r = _resumed(run, found)
        for s in found["skipped"]:
            if everyone.rank == 0 and s not in unwanted:
                log.warning("dcpd: %s is skipped: %s", s["name"], s["why"])
        if into is None or look:
            return r
        why = _fill(r.checkpoint, into, everyone, process_group, no_dist, client, load_options)
        if why is None:
            return r
        unwanted.append({"name": found["checkpoint"]["name"], "why": why[:4096]})


def _ask(run: _where.Target, body: Dict[str, Any], look: bool, everyone: _group.Group,
         client: Optional[Client]) -> Optional[Dict[str, Any]]:
    found: Optional[Dict[str, Any]] = None
    failure: Optional[BaseException] = None
    if everyone.rank == 0:
        try:
            found = _answer(run, body, look, client)
            if found is not None and found["checkpoint"] is None:
                reasons = "; ".join(f"{s['name']}: {s['why']}" for s in found["skipped"])
                raise errors.NothingToResume(f"{run}: {found['why']}: {reasons}", code="nothing_to_resume", problem=found)
        except Exception as e:
            failure = e
    got: Optional[Dict[str, Any]] = everyone.told(found, failure)
    return got


def _answer(run: _where.Target, body: Dict[str, Any], look: bool, client: Optional[Client]) -> Optional[Dict[str, Any]]:
    try:
        at = _where.resolve(_inside(run), client)
    except errors.NotFound:  # no such directory: a first start
        return None
    try:
        return at.client.runs.resume(f"{at.storage}:{at.name.rpartition('/')[0] or '-'}", look=look, **body)
    except errors.NotFound:
        at.client.storages.get(at.storage)  # a wrong name is no first start
        return None


def _inside(run: _where.Target) -> _where.Target:
    """A name in the run."""
    if _where.is_reference(run):
        storage, _, name = str(run).partition(":")
        return f"{storage}:x" if name == "-" else f"{run}/x"
    return os.path.join(os.path.abspath(os.fspath(run)), "x")


def _resumed(run: _where.Target, found: Dict[str, Any]) -> Resumed:
    name = found["checkpoint"]["name"]
    at = f"{found['checkpoint']['storage']}:{name}" if _where.is_reference(run) else os.path.join(os.fspath(run), name.rpartition("/")[2])
    return Resumed(at, found["step"], found["why"], found["attempts"], found["skipped"])


def _fill(checkpoint: str, into: Any, everyone: _group.Group, process_group: Any, no_dist: bool, client: Optional[Client],
          options: Dict[str, Any]) -> Optional[str]:
    """None: it is loaded. A text, on all ranks: it is damaged, or gone since."""
    failure: Optional[BaseException] = None
    try:
        _load.load(checkpoint if _where.is_reference(checkpoint) else _path(checkpoint), into, process_group=process_group, no_dist=no_dist,
                   client=client, **options)
    except (errors.CheckpointDamaged, errors.NotFound) as e:
        failure = e
    if everyone.size == 1:
        return None if failure is None else str(failure)
    said = [x for x in everyone.gather(None if failure is None else str(failure)) if x is not None]
    return said[0] if said else None


def _path(text: str) -> "os.PathLike[str]":
    import pathlib

    return pathlib.Path(text)


def runs(storage: Optional[str] = None, *, client: Optional[Client] = None) -> List[Dict[str, Any]]:
    """The runs of one storage, or of all, by name: "storage", "run", "checkpoints", "bytes", "latest", "step", "modified_at", "holds"."""
    from . import _daemon

    return (client or _daemon.default_client()).runs.list(storage)
