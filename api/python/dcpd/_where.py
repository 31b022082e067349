"""From what a caller writes to a daemon and a name there: references ("main:run1/step-100") and directory paths."""
from __future__ import annotations

import hashlib
import os
import re
from datetime import datetime, timezone
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _daemon, _local, errors
from .client import Client

_REFERENCE = re.compile(r"[a-z][a-z0-9_-]*:[^/]")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_LEASE_SECONDS = 86400
Target = Union[str, "os.PathLike[str]"]


class Place(NamedTuple):
    """A checkpoint's name at one daemon. root: the storage's directory, if it is known already."""

    client: Client
    storage: str
    name: str
    root: str = ""

    @property
    def object(self) -> Dict[str, str]:
        if self.storage == "shm":
            node, _, name = self.name.partition("/")
            return {"state_dict": name, "node": node}
        return {"storage": self.storage, "name": self.name}

    def __str__(self) -> str:
        return f"{self.storage}:{self.name}"

    @property
    def shown(self) -> str:
        """For people: the path, if the caller gave one that is under no root of the daemon's."""
        return errors.shown(str(self))


def is_reference(target: Target) -> bool:
    """Whether it is STORAGE:NAME; everything else, and every PathLike, is a path."""
    return isinstance(target, str) and _REFERENCE.match(target) is not None


def may_move(target: Target) -> bool:
    """Whether it may lead to another checkpoint a moment later: an alias, or a path, which may be a link."""
    return not is_reference(target) or "@" in str(target).rpartition("/")[2]


def settled(target: Target, client: Optional[Client] = None) -> str:
    """The checkpoint that it leads to now, as every host may name it."""
    if is_reference(target):
        return str(resolve(target, client, memory=True))
    path = os.path.abspath(os.fspath(target))
    return os.path.realpath(path) if os.path.islink(path) else path


def resolve(target: Target, client: Optional[Client] = None, make: bool = False, memory: bool = False) -> Place:
    """The daemon and the name. make: the directory above a path may be created (a save). memory: shm:NODE/NAME, a state dict in the memory
    of a node of the cluster, will do.

    A path under a root of the daemon goes there. Any other: an ad-hoc root at the daemon found, if it runs as our own user (or takes
    us for an administrator), else at the user's private daemon, which is started now if need be. Raises NoDaemon, RequestRefused.
    """
    if is_reference(target):
        storage, _, name = str(target).partition(":")
        if storage == "shm" and memory and 0 < name.find("/") < len(name) - 1:
            return Place(client or _daemon.default_client(), storage, name)
        if storage == "shm":
            raise errors.RequestRefused(f"{target!r} is a state dict in shared memory; a checkpoint is STORAGE:NAME or a path")
        at = client or _daemon.default_client()
        if not make and "@" in name.rpartition("/")[2]:  # an alias, or a name that looks like one
            try:
                name = str(at.checkpoints.get(str(target))["name"])
            except errors.NotFound:
                pass  # told by what comes
        return Place(at, storage, name)
    if isinstance(target, str) and _URL.match(target):
        raise errors.RequestRefused(f"{target!r}: no URLs; a checkpoint is STORAGE:NAME or a directory path (a mounted one)")
    path = os.path.abspath(os.fspath(target))
    if not make and os.path.islink(path):
        path = os.path.realpath(path)  # such as "latest"; dcpd itself follows no links
    found = client
    if found is None:
        try:
            found = _daemon.default_client()
        except (errors.NoDaemon, errors.Forbidden):
            if os.environ.get("DCPD_URL"):
                raise  # it was named: another one would be a surprise
    if found is not None:
        known = found.storages.list()
        place = _under_root(found, path, known) or _ad_hoc(found, path, make, known)
        if place is not None:
            return place
        if client is not None:
            raise errors.RequestRefused(f"{path} is {_outside(client)}")
    try:
        private = _local.private()
    except errors.NoDaemon as e:
        raise e if found is None else errors.NoDaemon(f"{path} is {_outside(found)}; and there is no private one: {e}") from e
    place = _ad_hoc(private, path, make)
    if place is None:
        raise errors.NoDaemon("the private daemon does not take an ad-hoc storage")
    return place


def _outside(client: Client) -> str:
    roots = ", ".join(f"{s['name']}={s.get('path')}" for s in client.storages.list() if not s.get("adhoc")) or "none"
    return f"under none of the storage roots of {client.url} ({roots}), which takes no others from here"


def _under_root(client: Client, path: str, known: List[Dict[str, Any]]) -> Optional[Place]:
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    best: Optional[Tuple[str, Dict[str, Any]]] = None
    for s in known:
        root = os.path.realpath(str(s.get("path") or "")) if s.get("path") else ""
        if root and real.startswith(root.rstrip("/") + "/") and not s.get("adhoc") and (best is None or len(root) > len(best[0])):
            best = (root, s)
    if best is None:
        return None
    name = os.path.relpath(real, best[0])
    above = name.split("/")[:-1]
    if len(above) > 15 or any(p.startswith((".", "-")) for p in above):
        return None  # no name there can say it
    return Place(client, best[1]["name"], name, best[0])


def _lasts(storage: Dict[str, Any]) -> bool:
    """Whether it was found to be there, and has half of its lease left: until then no save has to wait for the daemon to write down
    another."""
    if not storage.get("probed_at"):
        return False
    try:
        end = datetime.fromisoformat(str(storage.get("lease_expires_at")).replace("Z", "+00:00"))
    except ValueError:
        return False
    return (end - datetime.now(timezone.utc)).total_seconds() > _LEASE_SECONDS / 2


def _ad_hoc(client: Client, path: str, make: bool, known: Optional[List[Dict[str, Any]]] = None) -> Optional[Place]:
    """known: the daemon's storages; None: the daemon is asked."""
    caps = client._caps or client.capabilities()
    if not caps.get("admin") or not client.url.startswith("unix://"):
        return None
    folder, name = os.path.split(path)
    if not name or name.startswith((".", "-")):
        raise errors.RequestRefused(f"{path}: a checkpoint's name must not begin with . or -", code="name_invalid")
    if make:
        os.makedirs(folder, exist_ok=True)
    elif not os.path.isdir(folder):
        raise errors.NotFound(f"{path}: no such directory", code="not_found")
    folder = os.path.realpath(folder)
    storage = "path-" + hashlib.sha256(folder.encode("utf-8", "surrogateescape")).hexdigest()[:20]
    if not make or not any(s["name"] == storage and s.get("path") == folder and _lasts(s) for s in known or client.storages.list()):
        try:
            client.storages.create(storage, folder, lease_seconds=_LEASE_SECONDS)
        except errors.Forbidden:
            return None
    errors._folders[storage] = folder
    return Place(client, storage, name, folder)


def not_inside(target: Target) -> None:
    """A path in a checkpoint would make a storage of it, which takes what no other takes: a checkpoint in a checkpoint, which goes when
    the outer one is replaced. (dcpd.torch allows it, as PyTorch does.)"""
    if is_reference(target):
        return
    path = os.path.abspath(os.fspath(target))
    above = os.path.realpath(os.path.dirname(path))
    while above != "/":
        if os.path.isfile(os.path.join(above, ".metadata")):
            raise errors.RequestRefused(f"{path}: {above} is a checkpoint, and no checkpoint lies in another", code="name_invalid")
        above = os.path.dirname(above)
