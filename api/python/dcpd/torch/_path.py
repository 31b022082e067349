"""What PyTorch calls a checkpoint id: a directory path, or a dcpd reference."""
from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Tuple, Union

from .. import _where, errors

Id = Union[str, "os.PathLike[str]"]
_BUCKET = re.compile(r"[a-z][a-z0-9+.-]*://")


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


def standing(path: Any) -> Optional[str]:
    """What an alias or a link stands for now, in words that every host understands; None: the path is neither, and stands for itself."""
    if _where.is_reference(path):
        return _where.settled(path) if _where.may_move(path) else None
    return os.path.relpath(os.path.realpath(path), _beside(path)) if os.path.islink(path) else None


def stood_for(path: Any, standing: Optional[str]) -> Any:
    """The path of what `standing` told, on this host."""
    if standing is None:
        return path
    return standing if _where.is_reference(path) else Path(os.path.normpath(os.path.join(_beside(path), standing)))


def _beside(link: Any) -> str:
    return os.path.realpath(os.path.dirname(os.path.abspath(link)))


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


class Here:
    """The files of a checkpoint in a directory on this host. root: the storage's directory, if a reference named it."""

    def __init__(self, path: Any, folder: Path, root: str = "") -> None:
        self.path, self.folder, self.root = path, folder, root

    def read(self, name: str) -> Tuple[bytes, Any]:
        """A whole file, and what tells it from one that takes its place."""
        with open(open_file(self.path, self.folder, name), "rb") as f:
            return f.read(), _stamp(os.fstat(f.fileno()))

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def is_replaced(self, name: str, stamp: Any) -> bool:
        """Whether another is there by now. What has been deleted is no other."""
        try:
            return bool(_stamp(os.stat(self.folder / name)) != stamp)
        except OSError:
            return bool(self.folder.exists())

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Callable[[int, int], bytes]]:
        """pread(bytes, offset) of a file."""
        fd = open_file(self.path, self.folder, name)
        try:
            yield lambda n, offset: os.pread(fd, n, offset)
        finally:
            os.close(fd)


class There:
    """The files of a checkpoint in a storage without directories (a bucket): the daemon reads them."""

    root = ""

    def __init__(self, place: _where.Place) -> None:
        self.place = place

    def _etag(self) -> Any:
        return self.place.client.checkpoints.get(self.place.object).get("etag")

    def _bytes(self, name: str, offset: int = 0, n: Optional[int] = None) -> bytes:
        try:
            return self.place.client.checkpoints.file(self.place.object, name, offset, n).body
        except errors.NotFound as e:
            raise FileNotFoundError(errno.ENOENT, str(e), f"{self.place}/{name}") from e

    def read(self, name: str) -> Tuple[bytes, Any]:
        try:
            etag = self._etag()
        except errors.NotFound as e:
            raise FileNotFoundError(errno.ENOENT, str(e), f"{self.place}/{name}") from e
        return self._bytes(name), etag

    def has(self, name: str) -> bool:
        ref = self.place.object
        return self.place.client.checkpoints.exists(ref) and name in {x["name"] for x in self.place.client.checkpoints.files(ref)}

    def is_replaced(self, name: str, stamp: Any) -> bool:
        try:
            return bool(self._etag() != stamp)
        except errors.NotFound:
            return False

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Callable[[int, int], bytes]]:
        yield lambda n, offset: self._bytes(name, offset, n)


def files(path: Any) -> Union[Here, There]:
    """The checkpoint's files, wherever they lie."""
    if not _where.is_reference(path):
        return Here(path, Path(path))
    place = _where.resolve(path)
    root = str(place.client.storages.get(place.storage)["path"])
    return There(place) if _BUCKET.match(root) else Here(path, Path(root, *place.name.split("/")), root)


def _stamp(st: os.stat_result) -> Tuple[int, int, int]:
    return st.st_dev, st.st_ino, st.st_ctime_ns


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
