"""StorageWriter: what FileSystemWriter does, done by dcpd.

    every rank                                   coordinator
      write_data: items into a segment, sealed ──► finish: one list of all items → dcpd says where each will lie
      a list of results, each with its place       → the metadata that says the same → one job writes and commits all

Nothing is written by this process; the checkpoint appears when it is whole (or, in a directory that holds other things, when its
`.metadata` does).
"""
from __future__ import annotations

import dataclasses
import json
import time
import uuid
import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch.distributed.checkpoint import storage as _storage
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix

from .. import _copy, _early, _group, _handover, _ring, _where, errors, image
from .._save import metrics_of, pace_of
from ..client import Job
from . import _hosts as _torch_hosts, _items, _lane, _path, _pickle, _stage

VERSION = "1.0.0"
_AHEAD = 10_000_000


class _Transforms(NamedTuple):
    extensions: Sequence[Any]


class Part(NamedTuple):
    """A segment of one rank. elsewhere: of a rank of another host than the coordinator's, where its daemon has written its files."""

    url: str
    state_dict: str
    generation: int
    host: Tuple[Tuple[str, Any], ...]
    elsewhere: str = ""


@dataclasses.dataclass
class _OnHost(_StoragePrefix):
    """A local plan tells the coordinator which host it is of; a global one tells a rank of another host than its own."""

    place: Tuple[str, str] = ("", "")
    token: str = ""


@dataclasses.dataclass
class Placed(_StorageInfo):  # type: ignore[misc,unused-ignore]
    """Where an item's bytes lie now, on the way to the coordinator: there it becomes a plain _StorageInfo."""

    part: Any = None
    at: int = 0
    nbytes: int = 0
    fqn: str = ""
    dtype: Optional[str] = None
    sizes: Optional[Tuple[int, ...]] = None
    rank: int = 0
    exact: bool = False
    part_of: int = -1   # length, where the item holds more than this result

    def key(self) -> Tuple[Any, ...]:
        return self.relative_path, self.part, self.at, self.fqn


def _formats() -> Any:
    from torch.distributed.checkpoint import filesystem

    return getattr(filesystem, "SerializationFormat", None)


class StorageWriter(_path.Named, _storage.StorageWriter):  # type: ignore[misc,unused-ignore]
    """Writes a checkpoint through dcpd; the arguments are those of torch.distributed.checkpoint.FileSystemWriter.

    path: a directory, or a dcpd reference ("main:run1/step-100"). single_file_per_rank: False gives each item a file of its own.
    sync_files: False leaves out the fsyncs of the files. thread_count: files per rank, filled as PyTorch fills them; how many processes
    write is the daemon's choice. overwrite: False refuses to replace a checkpoint. _extensions: applied to every item, here.
    serialization_format: PyTorch's; with SAFETENSORS the tensors of a file are one safetensors file.

    cache_staged_state_dict: what it asks for is always so: staging memory is kept and used again, and what is saved are the data at the
    call. per_thread_copy_ahead has no effect, and a warning says so if it is set: tensors of a GPU are copied straight into the segment.

    incremental: see dcpd.save. With True each tensor of 1 MiB or more has a file of its own, for links to share; no ring is used.

    neighbours: see dcpd.save. Each rank's tensors are copied to that many nodes; no ring is used. Loads of the checkpoint find them.

    metrics, keep, hold: as of dcpd.save, for the checkpoint that this writer makes; those of the coordinator rank count.

    DCPD_PACE=background in the environment of the coordinator rank: the bytes are written at that pace (see dcpd.save).
    """

    _synchronize_after_execute: bool = True

    def __init__(self, path: _path.Id, single_file_per_rank: bool = True, sync_files: bool = True, thread_count: int = 1,
                 per_thread_copy_ahead: int = _AHEAD, cache_staged_state_dict: bool = False, overwrite: bool = True,
                 _extensions: Optional[Sequence[Any]] = None, serialization_format: Any = None, *, incremental: Optional[bool] = None,
                 metrics: Optional[Mapping[str, float]] = None, keep: Optional[str] = None, hold: Optional[str] = None,
                 neighbours: Optional[int] = None) -> None:
        super().__init__()
        if per_thread_copy_ahead not in (_AHEAD, 0):
            warnings.warn("per_thread_copy_ahead has no effect: dcpd copies tensors straight into shared memory", stacklevel=2)
        formats = _formats()
        self.path = _path.parse(path)
        self.single_file_per_rank, self.sync_files, self.thread_count = single_file_per_rank, sync_files, thread_count
        self.per_thread_copy_ahead, self.cache_staged_state_dict = per_thread_copy_ahead, cache_staged_state_dict
        self.overwrite, self.incremental, self.neighbours = overwrite, incremental, neighbours
        self.metrics, self.keep, self.hold = metrics_of(metrics), keep, hold
        self.transforms = _Transforms(() if _extensions is None else tuple(_extensions))
        self.serialization_format = formats.TORCH_SAVE if serialization_format is None and formats else serialization_format
        self.save_id = str(uuid.uuid4())
        self.rank: Optional[int] = None
        self.use_collectives = True
        self._token = ""
        self._unstaged: Optional[BaseException] = None

    # ---- what a checkpoint id is ----

    def reset(self, checkpoint_id: Optional[_path.Id] = None) -> None:
        self.save_id = self._name(checkpoint_id)

    def storage_meta(self) -> Any:
        try:
            from torch.distributed.checkpoint.metadata import StorageMeta
        except ImportError:
            return None
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def __repr__(self) -> str:
        return f"<dcpd StorageWriter to {self.path}>"

    # ---- staging ----

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: Any) -> Any:
        """A twin of the state dict with its data in shared memory, from where they are saved without another copy. Where other ranks take
        part, what goes wrong here is raised by prepare_local_plan: there they hear of it. From here they would go on to meet this one,
        and wait for it until the process group's timeout."""
        self._unstaged = None
        try:
            return _stage.stage(_where.resolve(self.path, make=True).client, state_dict)
        except Exception as e:
            if _group.world_size() == 1:
                raise
            self._unstaged = _group._portable(e)
            return state_dict

    def synchronize_staging(self) -> None:
        """Staging is over when stage() returns."""

    def close(self) -> None:
        """Nothing is held here: segments are the process's, and are given back by dcpd.close() or at its end."""

    # ---- a save ----

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def _metadata_name(self) -> str:
        return ".metadata" if self.use_collectives or self.rank is None else f"__{self.rank}.metadata"

    def _exists(self) -> bool:
        try:
            return _path.files(self.path).has(".metadata" if self.use_collectives else "__0.metadata")
        except errors.NotFound:
            return False

    def prepare_local_plan(self, plan: Any) -> Any:
        if self._unstaged is not None:
            failure, self._unstaged = self._unstaged, None
            raise failure
        if self._exists():
            if not self.overwrite:
                raise RuntimeError(f"Checkpoint already exists and {self.overwrite=}.")
            warnings.warn(f"Detected an existing checkpoint in {self.path}, overwriting since {self.overwrite=}.", stacklevel=2)
        if self.rank is not None and not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if plan.storage_data is None:
            plan = dataclasses.replace(plan, storage_data=_OnHost("", _group.place()))
        return plan

    def prepare_global_plan(self, plans: List[Any]) -> List[Any]:
        here = _group.place()
        others = [isinstance(p.storage_data, _OnHost) and p.storage_data.place[0] != here[0] for p in plans]
        self._token = _torch_hosts.mark(self) if any(others) else ""
        return [dataclasses.replace(p, storage_data=_OnHost(f"__{i}_", here, self._token) if other else _StoragePrefix(f"__{i}_"))
                if p.storage_data is None or isinstance(p.storage_data, _OnHost) else p
                for i, (p, other) in enumerate(zip(plans, others))]

    def _files(self, plan: Any) -> List[Tuple[str, List[Any]]]:
        if self.single_file_per_rank and self.incremental:
            buckets = _items.cut(plan.items)
        elif self.single_file_per_rank:
            buckets = _items.split(self.thread_count, plan.items)
        else:
            buckets = [[x] for x in plan.items]
        return [(f"{plan.storage_data.prefix}{i}.distcp", b) for i, b in enumerate(buckets)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        from torch.futures import Future

        formats = _formats()
        safetensors = formats is not None and self.serialization_format == formats.SAFETENSORS
        elsewhere = isinstance(plan.storage_data, _OnHost)
        if elsewhere:
            _torch_hosts.look(self.path, plan.storage_data)
        entries: List[_items.Entry] = []
        for name, bucket in self._files(plan):
            entries += _items.entries(name, bucket, planner, self.transforms.extensions, safetensors)
        done: Any = Future()
        rank = _number(plan.storage_data.prefix, self.rank)
        results = self._through_ring(entries, rank) if _ring_fits(entries) and not (self.incremental or self.neighbours) else None
        if results is None:
            results = self._into_segments(entries, rank)
            results = self._write_here(results) if elsewhere else results
        done.set_result(results)
        return done

    def _write_here(self, results: List[Any], fill: Optional[Callable[[], None]] = None) -> List[Any]:
        """The files of this rank, by the daemon of its host; the coordinator's moves them into the checkpoint. fill: puts the data into a
        ring, while they are written."""
        place = _path.place(self.path)
        ident = uuid.uuid4().hex
        listed = _List(place.client, results, self._metadata_name())
        if not listed.items:
            return results
        text = listed.image(None)
        lane = _lane.take(place.client, len(text), "list")
        job: Optional[Job] = None
        try:
            lane.put_image(text)
            job = place.client.jobs.create(
                "save", source={**listed.source(lane), **({"await_seal": True, "timeout_s": _early.TIMEOUT_SECONDS} if fill else {})},
                target=place.object, options={**self._options(), "retries": 0}, labels={"save_id": self.save_id},
                hosts={"id": ident, "part": True})
            if fill is not None:
                fill()
            place.client.jobs.wait(job)
        except _ring.Lost as e:
            assert job is not None
            _why_lost(place.client, job)
            raise e
        except BaseException:
            if job is not None:
                _early.cancel(place.client, job)
            raise
        finally:
            lane.hand_over()
        for r in results:
            r.storage_data.part = r.storage_data.part._replace(elsewhere=ident)
        return results

    def _through_ring(self, entries: List[_items.Entry], rank: int) -> Optional[List[Any]]:
        """The items of this rank through a ring, written while they are copied. None: this daemon knows no rings."""
        client = _path.place(self.path).client
        if not client.rings:
            return None
        at, places = 0, [0] * len(entries)
        for large in (False, True):  # small ones share blocks of a file: side by side here, too
            for i, e in enumerate(entries):
                if (e.nbytes >= _lane.LARGE) == large:
                    places[i], at = _lane.place(at, e.nbytes)
        room = _handover.room(client, [e.data for e in entries])
        for again in (True, False):
            lane = _lane.take_ring(client, at, room)
            try:
                if not lane.announce(at):
                    lane.end_ring(False)
                    return None
                results = self._results(rank, entries, [(lane, _lane.HEAD + p) for p in places])
                order = sorted(range(len(entries)), key=places.__getitem__)
                results = self._write_here(results, lambda: _items.pour(lane, [(_lane.HEAD + places[i], entries[i]) for i in order]))
                lane.end_ring(True)
                return results
            except BaseException as e:
                lane.end_ring(False)
                if not again or not (isinstance(e, _ring.Lost) or getattr(e, "code", "") == "ring_lost"):
                    raise  # else the tensors are still there: from the beginning
        raise AssertionError("not reached")

    def _into_segments(self, entries: List[_items.Entry], rank: int) -> List[Any]:
        import torch

        places: List[Optional[Tuple[_lane.Lane, int]]] = []
        copies: List[Tuple[int, _items.Entry]] = []
        at = 0
        for e in entries:
            found = None
            if isinstance(e.data, torch.Tensor) and e.nbytes and e.data.is_cpu and e.data.is_contiguous() \
                    and not e.data.is_conj() and not e.data.is_neg():
                found = _lane.of(e.data.data_ptr(), e.nbytes)
            places.append(found)
            if found is None:
                begin, at = _lane.place(at, e.nbytes)
                copies.append((begin, e))
        lanes = {x[0].name: x[0] for x in places if x is not None}
        own: Optional[_lane.Lane] = None
        if copies:
            head = _lane.head_for(len(copies), sum(len(e.fqn) for _, e in copies))
            client = _where.resolve(self.path, make=True).client
            own = _lane.take(client, at, head=head, room=_handover.room(client, [e.data for _, e in copies]))
            lanes[own.name] = own
            copies = [(head + begin, e) for begin, e in copies]
        rest = iter(copies)
        where = [x if x is not None else (own, next(rest)[0]) for x in places]
        try:
            if own is not None:
                base = torch.frombuffer(own.buffer(), dtype=torch.uint8)
                _items.fill(base, own.into(), copies, own.giver())
                del base
            for lane in lanes.values():
                lane.seal([(at, e.spec) for (x, at), e in zip(where, entries) if x is lane and e.spec is not None and e.nbytes])
                lane.hand_over()
        except BaseException:
            if own is not None:
                own.let_go()
            raise
        return self._results(rank, entries, where)

    def _results(self, rank: int, entries: List[_items.Entry], places: Sequence[Any]) -> List[Any]:
        host = tuple(sorted(_lane.host().items()))
        parts: Dict[str, Part] = {}
        out = []
        for e, (lane, at) in zip(entries, places):
            part = parts.setdefault(lane.name, Part(lane.client.url, lane.name, lane.generation, host))
            for index, length in e.results:
                info = Placed(e.file, 0, 0, part=part, at=at, nbytes=e.nbytes, fqn=e.fqn, dtype=e.dtype, sizes=e.sizes,
                              rank=rank, exact=e.exact, part_of=length)
                info.transform_descriptors = e.transforms
                out.append(_storage.WriteResult(index=index, size_in_bytes=e.nbytes if length < 0 else length, storage_data=info))
        return out

    # ---- the coordinator's part ----

    def finish(self, metadata: Any, results: List[List[Any]]) -> None:
        metadata.version = VERSION
        metadata.storage_meta = self.storage_meta()
        place = _path.place(self.path)
        flat = [r for one in results for r in one]
        listed = _List(place.client, flat, self._metadata_name())
        text = listed.image(None)
        lane = _lane.take(place.client, len(text), "list")
        try:
            options = {**self._options(), **({"retries": 0} if listed.elsewhere else {}),  # its files are moved, once
                       **({} if self.keep is None else {"alias": self.keep}), **({} if self.hold is None else {"hold": self.hold})}
            spec = {"target": place.object, "options": options, "labels": {"save_id": self.save_id},
                    **({"metrics": self.metrics} if self.metrics else {})}
            lane.put_image(text)
            plan = self._in_turn(place.client.jobs.plan, source=listed.source(lane), **spec)
            metadata.storage_data = listed.storage_data(plan["places"])
            lane.put_image(listed.image(_pickle.dumps(metadata)))
            place.client.jobs.wait(self._in_turn(place.client.jobs.create, source=listed.source(lane), **spec))
        finally:
            lane.hand_over()
            _torch_hosts.unmark(self._token)

    def _options(self) -> Dict[str, Any]:
        pace = pace_of(None)
        return {"overwrite": self.overwrite or not self.use_collectives, "sync_files": bool(self.sync_files),
                "in_place": "needed" if self.use_collectives else "always", **({"pace": pace} if pace else {}),
                **({} if self.incremental is None else {"incremental": bool(self.incremental)}),
                **({} if self.neighbours is None else {"neighbours": int(self.neighbours)})}

    @staticmethod
    def _in_turn(call: Any, **spec: Any) -> Any:
        """Ranks that save on their own, without collectives, take turns at their directory."""
        end, pause = time.monotonic() + 600, 0.02
        while True:
            try:
                return call("save", **spec)
            except errors.Busy as e:
                if e.code != "target_busy" or time.monotonic() > end:
                    raise
            time.sleep(pause)
            pause = min(pause * 2, 0.5)


def _ring_fits(entries: List[_items.Entry]) -> bool:
    """Much to write, and none of it staged: what is in shared memory already is written from there."""
    total = 0
    for e in entries:
        total += e.nbytes
        if e.nbytes and not isinstance(e.data, (bytes, bytearray, memoryview)) and e.data.is_cpu and e.data.is_contiguous() \
                and _lane.of(e.data.data_ptr(), e.nbytes) is not None:
            return False
    return total > _copy.step()


def _why_lost(client: Any, job: Job) -> None:
    """Raises why the job failed that read a ring, unless a new one may do better."""
    _early.cancel(client, job)
    try:
        client.jobs.get(job.id, wait=_early.END_SECONDS).raise_for_state()
    except errors.DcpdError as e:
        if e.code not in ("ring_lost", "not_sealed", "cancelled", "not_found"):
            raise


def _number(prefix: str, rank: Optional[int]) -> int:
    """The rank whose files begin so: releases that tell a writer its rank are new."""
    middle = prefix[2:-1]
    return int(middle) if prefix.startswith("__") and prefix.endswith("_") and middle.isdigit() else rank or 0


class _List:
    """All ranks' items as dcpd takes them."""

    def __init__(self, client: Any, flat: Sequence[Any], metadata_name: str) -> None:
        self.flat, self.metadata_name = flat, metadata_name
        self.parts: Dict[Part, int] = {}
        self.files: Dict[str, int] = {}
        self.heads: List[List[Any]] = []
        self.index: Dict[Tuple[Any, ...], int] = {}
        self.items: List[List[Any]] = []
        here = tuple(sorted(_lane.host().items()))
        for r in flat:
            s = r.storage_data
            if not isinstance(s, Placed):
                raise TypeError(f"{r.index}: a result that is not of dcpd's write_data")
            if s.part.host != here and not s.part.elsewhere:
                there = dict(s.part.host)["name"]
                raise errors.SeveralHosts(f"ranks of hosts {dict(here)['name']} and {there} save together without a plan that says so: "
                                          "dcpd's segments are of one host")
            self._add(s)

    def _add(self, s: Placed) -> None:
        if s.key() in self.index:
            return
        file = self.files.get(s.relative_path)
        if file is None:
            file = self.files[s.relative_path] = len(self.files)
            self.heads.append([s.relative_path, s.rank, s.exact] + ([s.part.elsewhere] if s.part.elsewhere else []))
        part = None if s.part.elsewhere else self.parts.setdefault(s.part, len(self.parts))
        self.index[s.key()] = len(self.items)
        self.items.append([file, part, s.at, s.nbytes, s.fqn, s.dtype, None if s.sizes is None else list(s.sizes)])

    @property
    def elsewhere(self) -> bool:
        return any(len(h) > 3 for h in self.heads)

    def source(self, lane: _lane.Lane) -> Dict[str, Any]:
        return {"state_dict": lane.name, "generation": lane.generation,
                "parts": [{"state_dict": p.state_dict, "generation": p.generation} for p in self.parts]}

    def image(self, metadata: Optional[bytes]) -> bytes:
        items = [[x[0], len(self.parts) if x[1] is None else x[1], *x[2:]] for x in self.items]
        text = json.dumps({"metadata_name": self.metadata_name, "files": self.heads, "items": items}).encode()
        pairs = [("items", text)] + ([] if metadata is None else [("metadata", metadata)])
        return image.dump([(image.ChunkSpec(k, "uint8", (len(v),), (0,), (len(v),)), v) for k, v in pairs])

    def storage_data(self, places: Sequence[Tuple[int, int]]) -> Dict[Any, Any]:
        out = {}
        for r in self.flat:
            s = r.storage_data
            offset, length = places[self.index[s.key()]]
            info = _StorageInfo(s.relative_path, offset, length if s.part_of < 0 else s.part_of)
            if s.transform_descriptors is not None:
                info.transform_descriptors = s.transform_descriptors
            out[r.index] = info
        return out


FileSystemWriter.register(StorageWriter)  # isinstance is asked by some; nothing is inherited
