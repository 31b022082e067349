"""What PyTorch calls a checkpoint id: a directory path, or a dcpd reference."""
from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, Optional, Union

from .. import _where, errors

Id = Union[str, "os.PathLike[str]"]


def parse(checkpoint_id: Id) -> Any:
    """A reference stays a string; everything else becomes a Path, as PyTorch's own classes have it."""
    if _where.is_reference(checkpoint_id):
        return str(checkpoint_id)
    return checkpoint_id if isinstance(checkpoint_id, Path) else Path(os.fspath(checkpoint_id))


def usable(checkpoint_id: Id) -> bool:
    """A reference, or a local path beneath a directory that can be written."""
    if isinstance(checkpoint_id, Path) or _where.is_reference(checkpoint_id):
        return True
    if "://" in str(checkpoint_id):
        return False
    return any(p.exists() and os.access(str(p), os.W_OK) for p in Path(os.fspath(checkpoint_id)).parents)


class Named:
    """What writer and reader have in common: PyTorch asks both what they are of."""

    path: Any

    def _name(self, checkpoint_id: Optional[Id]) -> str:
        """Of the checkpoint given, if one is; a new id of this save or load."""
        if checkpoint_id:
            self.path = parse(checkpoint_id)
        return str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> Any:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return usable(checkpoint_id)


def place(path: Any) -> _where.Place:
    """Where a save goes. No name of a storage says that a checkpoint lies in another, as PyTorch's may: the directory around it is a
    storage then."""
    found = _where.resolve(path, make=True)
    above = [] if _where.is_reference(path) else list(Path(os.path.abspath(path)).parents)[:found.name.count("/")]
    if any(_holds_checkpoint(x) for x in above):
        return _where._ad_hoc(found.client, os.path.abspath(path), True) or found
    return found


def _holds_checkpoint(directory: Path) -> bool:
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(x == ".metadata" or x.endswith(".safetensors") or (x.startswith("__") and x.endswith(".metadata")) for x in names)


def folder(path: Any) -> Path:
    """The checkpoint's directory on this host."""
    if not _where.is_reference(path):
        return Path(path)
    place = _where.resolve(path)
    return Path(str(place.client.storages.get(place.storage)["path"]), *place.name.split("/"))


def open_file(path: Any, inside: Path, name: str) -> int:
    """A file of the checkpoint in directory `inside`, to read. PyTorch's part of a load (the metadata, values) is done here: a daemon that
    has the checkpoint while we cannot open it is named, and what to do."""
    file = inside / name
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError) as e:
        if not _where.is_reference(path):
            raise
        at = _where.resolve(path)
        listed = {x["name"] for x in at.client.checkpoints.files(at.object)} if at.client.checkpoints.exists(at.object) else set()
        if name not in listed:
            raise
        raise errors.Forbidden(f"{path}: the daemon at {at.client.url} has {name}, and this process cannot open it as {file} "
                               f"({e.strerror}): is the directory mounted here, and may this user read it? dcpd.load() reads all of a "
                               "checkpoint through the daemon", code="forbidden", file=name) from e
