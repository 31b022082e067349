"""StorageReader: what FileSystemReader does, done by dcpd.

The boxes of tensors that this rank's plan asks for are read straight into the tensors that the planner gives for them, where dcpd says
where their bytes lie (_direct.py). The others are described in segments, each filled by a job; from there they are copied to where the
planner wants them. Values, items that extensions have transformed, and checkpoints that every rank wrote for itself are read item by item.

An alias or a link may lead elsewhere a moment later, and every rank asks for itself when its part of the load begins. So the coordinator
tells all ranks, with their plans, which checkpoint it has found, and a rank that had found another one reads that one instead. Hosts may
mount one checkpoint at different paths: the metadata tell whether two ranks have found the same one.
"""
from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import os
import uuid
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from torch.distributed.checkpoint import storage as _storage
from torch.distributed.checkpoint.filesystem import FileSystemReader

from .. import _direct, _dtypes, _tensors, _where, errors, image
from . import _checks, _lane, _path, _pickle

_GROUP_MIN = 64 << 20  # bytes; half of it where other ranks are beside: their new pages add up
_GROUPS = 16
_AHEAD = 2
_AT_ONCE = 128 << 20  # bytes of tensors that a planner holds for us
_Boxes = List[Tuple[Any, image.ChunkSpec]]

_log = logging.getLogger("dcpd")
# What dcpd refuses for what it is, and PyTorch may read nevertheless: a planner stored another dtype than its metadata say, a tensor has
# a kind or a number of dims that dcpd lacks, a file that is not asked for is gone, files are links. Never a wrong digest.
_UNUSUAL = frozenset(("format_item", "format_pickle", "format_metadata", "format_manifest", "format_unsupported", "dtype_unsupported",
                      "checkpoint_incomplete", "coverage_hole", "limit_exceeded", "name_invalid", "forbidden", "size_mismatch",
                      "kind_mismatch", "plan_invalid", "missing_key", "duplicate_key", "unsupported", "not_a_checkpoint"))


def _save_id(metadata: Any) -> Any:
    """dcpd writes it beside storage_meta, which older versions of PyTorch lack."""
    return getattr(getattr(metadata, "storage_meta", None), "save_id", None) or getattr(metadata, "save_id", None)


class _Standing(NamedTuple):
    """Of a plan: which checkpoint the load's path leads to."""

    name: Optional[str]  # _path.standing
    metadata: Optional[str]  # their digest; None: they have no id of their save, and those of two steps may be equal

    def is_same(self, other: "_Standing") -> bool:
        """A path that neither leads elsewhere nor did may be another on each rank, as with PyTorch."""
        return self.name == other.name or (self.metadata is not None and self.metadata == other.metadata)


class StorageReader(_path.Named, _storage.StorageReader):  # type: ignore[misc,unused-ignore]
    """Reads a checkpoint through dcpd; the arguments are those of torch.distributed.checkpoint.FileSystemReader.

    path: a directory, or a dcpd reference ("main:run1/step-100", "s3:run1/step-100"); it need not exist yet.
    _extension_registry: where extensions of the checkpoint are looked up by their descriptors; the default knows PyTorch's own.
    """

    def __init__(self, path: _path.Id, _extension_registry: Any = None) -> None:
        super().__init__()
        self.path = _path.parse(path)
        self.storage_data: Dict[Any, Any] = {}
        self.load_id = str(uuid.uuid4())
        self.extension_registry = _extension_registry
        self.rank: Optional[int] = None
        self.use_collectives = True
        self._metadata: Any = None
        self._looked: Any = None  # the files, and which of them the metadata were read from
        self._standing: Optional[_Standing] = None  # since read_metadata
        self._at: Any = self.path  # what `path` stands for

    def reset(self, checkpoint_id: Optional[_path.Id] = None) -> None:
        self.storage_data, self._metadata, self._looked = {}, None, None
        self.load_id = self._name(checkpoint_id)
        self._standing, self._at = None, self.path

    def __repr__(self) -> str:
        return f"<dcpd StorageReader of {self.path}>"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The checkpoint's Metadata; `rank=` asks for the one that this rank wrote for itself. Raises where it is absent."""
        return self._read_metadata(_path.standing(self.path), kwargs.get("rank"))

    def _read_metadata(self, standing: Optional[str], rank: Optional[int]) -> Any:
        self._at = _path.stood_for(self.path, standing)
        name = ".metadata" if rank is None else f"__{rank}.metadata"
        files = _path.files(self._at)
        data, stamp = files.read(name)
        self._looked = files, name, stamp
        self._damage()
        try:
            metadata = _pickle.loads(data)
        except Exception as e:  # an unpickler trips over damage in many ways
            raise errors.CheckpointDamaged(f"{name} cannot be unpickled: {type(e).__name__}: {e}", code="format_pickle", file=name) from e
        for lacking in (x for x in ("state_dict_metadata", "storage_data") if getattr(metadata, x, None) is None):
            raise errors.CheckpointDamaged(f"{name} holds no {lacking}", code="format_metadata", file=name)
        meta = getattr(metadata, "storage_meta", None)
        self._standing = _Standing(standing, hashlib.sha256(data).hexdigest() if _save_id(metadata) else None)
        if meta is not None:
            meta.load_id = self.load_id
        return metadata

    def _damage(self) -> None:
        """Raises CheckpointDamaged if the metadata or the manifest are not what dcpd wrote. What dcpd refuses besides PyTorch may read."""
        try:
            place = _where.resolve(self._at)
            place.client.checkpoints.get(place.object)
        except errors.DcpdError as e:
            if e.code in ("checkpoint_damaged", "format_manifest"):
                raise

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.storage_data, self._metadata = metadata.storage_data, metadata
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        if self.storage_data is None:
            raise AssertionError("storage_data must not be None in metadata")

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._told(plan)

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        return [self._told(plan) for plan in plans]

    def _told(self, plan: Any) -> Any:
        if self._standing is None or not (plan.storage_data is None or isinstance(plan.storage_data, _Standing)):
            return plan
        return dataclasses.replace(plan, storage_data=self._standing)

    def _agree(self, told: _Standing) -> None:
        """Reads the checkpoint that the coordinator found. The plan is of the other one: they need to be cut alike."""
        mine, found = self._metadata, self._at
        theirs = self._read_metadata(told.name, None if self.use_collectives else self.rank)
        if self._standing is not None and self._standing.metadata != told.metadata:
            raise errors.Busy(f"{self.path} led to {found} on this rank, and {self._at} is not the checkpoint that the coordinator found "
                              "there: load again", code="checkpoint_replaced", retryable=True)
        if (theirs.state_dict_metadata, theirs.planner_data) != (mine.state_dict_metadata, mine.planner_data):
            raise errors.Busy(f"{self.path} led to {self._at} on the coordinator and, a moment later, to {found} on this rank, and their "
                              "tensors are cut in other ways: load again", code="checkpoint_replaced", retryable=True)
        self.storage_data, self._metadata = theirs.storage_data, theirs

    def read_data(self, plan: Any, planner: Any) -> Any:
        from torch.futures import Future

        failure: Optional[Exception] = None
        told = getattr(plan, "storage_data", None)
        if isinstance(told, _Standing) and self._standing is not None and not told.is_same(self._standing):
            self._agree(told)
        try:
            self._read(plan, planner)
        except Exception as e:
            failure = e
        if self._replaced():
            raise errors.Busy(f"{self.path} was replaced while it was loaded; what was loaded may be of two versions",
                              code="checkpoint_replaced", retryable=True) from failure
        if failure is not None:
            raise failure
        done: Any = Future()
        done.set_result(None)
        return done

    def _replaced(self) -> bool:
        """Whether another version is there by now than the one whose metadata were read: values, tensors read here and those that come by
        jobs were all looked up in between. What has been deleted is no other version."""
        if self._looked is None:
            return False
        files, name, stamp = self._looked
        return bool(files.is_replaced(name, stamp))

    def _read(self, plan: Any, planner: Any) -> None:
        from torch.distributed.checkpoint.planner import LoadItemType

        boxes: _Boxes = []
        single: List[Any] = []
        for item in plan.items:
            spec = None if item.type == LoadItemType.BYTE_IO else self._box(item)
            if spec is None:
                single.append(item)
            else:
                boxes.append((item, spec))
        _Files(self).read(single, planner)
        if boxes:
            self._tensors(boxes, planner)

    def _box(self, item: Any) -> Optional[image.ChunkSpec]:
        """The part of the global tensor that an item asks for; None where dcpd cannot know it as that."""
        index = item.storage_index
        md = self._metadata.state_dict_metadata.get(index.fqn)
        info = self.storage_data[index]
        if getattr(info, "transform_descriptors", None) or not self.use_collectives or index.offset is None \
                or not hasattr(md, "chunks"):
            return None
        properties = getattr(md, "properties", None)
        dtype = _dtypes.torch_name(getattr(properties, "dtype", None))
        if dtype is None or str(getattr(properties, "layout", "torch.strided")) != "torch.strided":
            return None
        offsets = tuple(a + b for a, b in zip(index.offset, item.storage_offsets))
        return image.ChunkSpec(index.fqn, dtype, tuple(md.size), offsets, tuple(item.lengths))

    def _tensors(self, boxes: _Boxes, planner: Any) -> None:
        boxes = sorted(boxes, key=lambda x: self._place(x[0]))
        place = _where.resolve(self._at)
        if self._looked is not None and not place.root:  # asked once in a load
            place = place._replace(root=self._looked[0].root)
        chosen = _direct.choose([spec.nbytes for _, spec in boxes])
        some = [boxes[i] for i in chosen]
        plan = _direct.find(place, [spec for _, spec in some], True)
        if plan is not None:
            try:
                _Direct(plan, some).take(planner)
            finally:
                plan.close()
            taken = {chosen[i] for i in plan.boxes}
            boxes = [x for i, x in enumerate(boxes) if i not in taken]
        groups = _groups(boxes)
        try:
            self._fill(place, groups, planner)
        except errors.DcpdError as e:
            if e.code not in _UNUSUAL:
                raise
            _log.info("%s: dcpd does not load it: %s; item by item then", self.path, e)
            try:
                _Files(self).read([item for group in groups for item, _ in group], planner)
            except (OSError, errors.CheckpointDamaged):
                raise e from None

    def _fill(self, place: _where.Place, groups: List[_Boxes], planner: Any) -> None:
        """While one group is copied to where it is wanted, dcpd reads the next. Two small segments, used in turn, are soon warm; one for
        everything would cost its new pages more time than the reading takes. What is done is taken out of `groups`."""
        ahead: List[_Group] = []
        try:
            for boxes in list(groups):
                ahead.append(_Group(place, boxes))
                if len(ahead) == _AHEAD:
                    ahead.pop(0).take(planner)
                    groups.pop(0)
            while ahead:
                ahead.pop(0).take(planner)
                groups.pop(0)
        finally:
            for one in ahead:
                one.give_up()

    def _place(self, item: Any) -> Tuple[str, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset


def _groups(boxes: _Boxes) -> List[_Boxes]:
    """Of 64 MiB and at most _GROUPS of them, however large a load is: each is a job."""
    least = _GROUP_MIN >> (os.environ.get("LOCAL_WORLD_SIZE", "1") != "1")
    most = max(least, -(-sum(spec.nbytes for _, spec in boxes) // _GROUPS))
    groups: List[_Boxes] = []
    room = 0
    for item, spec in boxes:
        if not groups or spec.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append((item, spec))
        room -= spec.nbytes
    return groups


class _Direct:
    """Boxes that are read from the files, some at a time: a planner may make a tensor for each and drop it in commit_tensor."""

    def __init__(self, plan: _direct.Plan, boxes: _Boxes) -> None:
        self.plan, self.boxes = plan, boxes
        self.room: Any = None  # for what cannot be read to its place

    def take(self, planner: Any) -> None:
        groups: List[List[int]] = [[]]
        held = 0
        for i in self.plan.boxes:
            n = self.boxes[i][1].nbytes
            if held and held + n > _AT_ONCE:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += n
        for some, then in zip(groups, [*groups[1:], []]):
            self._some(some, then, planner)

    def _some(self, some: Sequence[int], then: Sequence[int], planner: Any) -> None:
        targets = [_target(planner, self.boxes[i][0], self.boxes[i][1].sizes) for i in some]
        places = [_tensors.memory(t, self.boxes[i][1]) for i, t in zip(some, targets)]
        beside = [i for i, at in zip(some, places) if at is None]
        views = dict(zip(beside, self._views(beside)))
        self.plan.read({i: views[i].data_ptr() if at is None else at for i, at in zip(some, places)}, then=then)
        for i, target in zip(some, targets):
            if i in views:
                target.copy_(views[i])
            planner.commit_tensor(self.boxes[i][0], target)

    def _views(self, beside: Sequence[int]) -> List[Any]:
        """Tensors of our own for these boxes, of memory that serves for all groups."""
        import torch

        begins, at = [], 0
        for i in beside:
            begins.append(at)
            at += -(-self.boxes[i][1].nbytes // 64) * 64
        if beside and (self.room is None or len(self.room) < at):
            self.room = None
            self.room = torch.empty(at, dtype=torch.uint8, device="cpu")
        return [_tensors.torch_view(self.room, self.boxes[i][1], b) for i, b in zip(beside, begins)]


class _Group:
    """Boxes on their way through one segment: a job that fills it has been submitted."""

    def __init__(self, place: Any, boxes: _Boxes) -> None:
        self.boxes, self.jobs = boxes, place.client.jobs
        self.layout = image.Layout(list(dict.fromkeys(spec for _, spec in boxes)), {})
        header = self.layout.header({})
        size = len(header) + self.layout.data_bytes
        self.begin = len(header)
        self.lane = _lane.take(place.client, size)  # its pages serve the next save
        try:
            self.lane.put_head(header, size)
            self.job = self.jobs.create("load", source=place.object, target={"state_dict": self.lane.name})
        except BaseException:
            self.lane.let_go()
            raise

    def take(self, planner: Any) -> None:
        try:
            self.jobs.wait(self.job)
            number = {spec: i for i, spec in enumerate(self.layout.chunks)}
            views = _tensors.Views(self.lane.map, self.begin, self.layout)
            for item, spec in self.boxes:
                _put(planner, item, views.torch(number[spec]))
        finally:
            self.lane.let_go()

    def give_up(self) -> None:
        """Another has failed; dcpd lends the segment again when this job is over."""
        try:
            self.jobs.cancel(self.job.id)
        except errors.DcpdError:
            pass
        self.lane.let_go()


def _target(planner: Any, item: Any, sizes: Sequence[int]) -> Any:
    target = planner.resolve_tensor(item).detach()
    if tuple(target.size()) != tuple(sizes):
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {tuple(sizes)}")
    return target


def _put(planner: Any, item: Any, tensor: Any) -> None:
    target = _target(planner, item, tensor.size())
    target.copy_(tensor)
    planner.commit_tensor(item, target)


class _Files:
    """Items by the bytes of their files."""

    def __init__(self, reader: StorageReader) -> None:
        self.reader = reader

    def read(self, items: Sequence[Any], planner: Any) -> None:
        per_file: Dict[str, List[Any]] = {}
        for item in items:
            per_file.setdefault(self.reader.storage_data[item.storage_index].relative_path, []).append(item)
        if not per_file:
            return
        files = _path.files(self.reader._at)
        collective = self.reader.use_collectives or self.reader.rank is None
        self.checks = _checks.Checks(files, ".metadata" if collective else f"__{self.reader.rank}.metadata")
        for name, wanted in per_file.items():
            with files.open(name) as pread:
                for item in sorted(wanted, key=lambda x: self.reader.storage_data[x.storage_index].offset):
                    self._one(item, self._bytes(pread, name, item), planner)

    def _bytes(self, pread: Any, name: str, item: Any) -> bytearray:
        """The item as torch.save made it, checked."""
        info = self.reader.storage_data[item.storage_index]
        data = bytearray()
        while len(data) < info.length:
            piece = pread(min(info.length - len(data), 1 << 30), info.offset + len(data))
            if not piece:
                raise errors.CheckpointDamaged(f"{name} ends before its item {item.storage_index.fqn}", file=name,
                                               fqn=item.storage_index.fqn, offset=info.offset)
            data += piece
        self.checks.item(name, item.storage_index.fqn, info.offset, data)
        descriptors = getattr(info, "transform_descriptors", None)
        return self._undone(name, item, data, descriptors) if descriptors else data

    def _undone(self, name: str, item: Any, data: bytearray, descriptors: Sequence[str]) -> bytearray:
        from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

        if self.reader.extension_registry is None:
            self.reader.extension_registry = ExtensionRegistry()
        stream: Any = io.BytesIO(data)
        extensions = self.reader.extension_registry.from_descriptor_list(descriptors)
        offset = self.reader.storage_data[item.storage_index].offset
        try:
            for x in extensions:
                if isinstance(x, StreamTransformExtension):
                    stream = x.transform_from(stream)
            out = bytearray(stream.read(-1))
        except Exception as e:  # of whatever library does it
            raise _checks.damaged(name, item.storage_index.fqn, offset, f"what {descriptors} made cannot be undone: {e}",
                                  "format_transform") from e
        self.checks.archive(name, item.storage_index.fqn, offset, out)
        return out

    def _one(self, item: Any, data: bytearray, planner: Any) -> None:
        import torch
        from torch.distributed.checkpoint.planner import LoadItemType

        info, fqn = self.reader.storage_data[item.storage_index], item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            try:
                planner.load_bytes(item, io.BytesIO(data))
            except Exception as e:
                if _checks.readable(data):
                    raise
                raise _checks.damaged(info.relative_path, fqn, info.offset, f"the value cannot be read: {e}", "format_item") from e
            return
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            for d, (a, n) in enumerate(zip(item.storage_offsets, item.lengths)):
                if a or n != tensor.shape[d]:
                    tensor = tensor.narrow(d, a, n)
            if tuple(tensor.shape) != tuple(item.lengths):
                raise ValueError(f"its size is {tuple(tensor.shape)}, {tuple(item.lengths)} was expected")
        except Exception as e:  # an unpickler trips over damage in many ways
            raise _checks.damaged(info.relative_path, fqn, info.offset, f"the item cannot be read: {e}", "format_item") from e
        _put(planner, item, tensor)


FileSystemReader.register(StorageReader)  # isinstance is asked by some; nothing is inherited
