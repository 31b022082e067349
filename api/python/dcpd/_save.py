"""save and async_save.

One save, as its ranks see it: describe what is here → agree on target and generation (one gather) → reserve, copy, seal, while rank 0
has the job made → agree that all did, which tells its id too (one gather). Whatever fails on one rank is raised on all, and the job is
cancelled. Once all have sealed it is the daemon's: the trainer may go on, or die.

A save that blocks needs no shared memory for a snapshot: each rank's bytes go through a ring, which dcpd writes to the disk while it is
filled (_ring.py). What breaks off there is lost with the ring, and all ranks begin anew, once, from the tensors. A save that returns after
the copy leaves a snapshot: the trainer waits for the copy alone, and dcpd would take the processors from it.
"""
from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import weakref
from functools import partial
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import _copy, _daemon, _early, _group, _handover, _hosts, _overlap, _ring, _session, _tensors, _where, errors, image, values
from .client import Client, Job
from .future import SaveFuture
from .image import Layout

log = logging.getLogger("dcpd")
_BUSY = ("wait", "warn", "fail")
_PACES = ("full", "background")
_open_futures: "weakref.WeakSet[SaveFuture]" = weakref.WeakSet()
_in_save = threading.RLock()
_at_exit = "wait"


def save(state_dict: Any, checkpoint: _where.Target, *, overwrite: bool = False, process_group: Any = None, no_dist: bool = False,
         step: Optional[int] = None, format: str = "dcp", files_per_rank: Optional[int] = None, on_divergence: Optional[str] = None,
         pace: Optional[str] = None, cache: Optional[str] = None, incremental: Optional[bool] = None,
         parent: Optional[_where.Target] = None, labels: Optional[Mapping[str, str]] = None,
         metrics: Optional[Mapping[str, float]] = None, keep: Optional[str] = None, hold: Optional[str] = None,
         neighbours: Optional[int] = None, slots: int = 2, when_busy: str = "wait", progress: bool = False, timeout: Optional[float] = None,
         client: Optional[Client] = None) -> Job:
    """Saves a state dict and returns when it is durable.

    state_dict: nested mappings and lists of torch tensors of any device, strides and dtype, DTensors, ShardedTensors, numpy arrays, and
    values; a Stateful object (module, optimizer, scheduler), at the top or as a member, stands for its state_dict(). checkpoint:
    "STORAGE:NAME", or a directory path. In a torch.distributed job every rank of `process_group` calls it; no_dist: this rank alone.

    overwrite: replace an existing checkpoint, atomically. step: a number that all ranks must share, kept as label `step`.
    format: "dcp"; a reshard makes other formats of it. on_divergence: "fail" refuses replicas that differ between ranks. labels: str → str.
    metrics: name → number, such as {"loss": 1.5}: the checkpoint's record keeps them, beside its bytes; those of rank 0 count.
    keep: an alias of the run, such as "best", that leads here once this is durable: main:run1@best. hold: a reason to hold it from then on:
    nothing of dcpd's removes or replaces it. Both are the daemon's to do, whatever becomes of this process.
    pace: "background" takes a few percent of a core per worker, so that training beside it is hardly slowed, and takes longer; "full"
    takes all there is; None asks the environment's DCPD_PACE, and without that is "full". cache: "keep" leaves the files in the page cache,
    so that the next load on this host needs no disk; "drop", which is what None means, writes past it, which is faster.
    incremental: True: what an earlier checkpoint of the run has already (or `parent`, a checkpoint) costs no bytes, by clones where the
    file system has them, else by hard links, which have risks (api/incremental.md); False: all is written; None: by clones, or not at
    all. With True no ring is used: shared memory must hold the state dict.
    neighbours: copy the snapshot into the memory of so many other nodes of the cluster, too (api/cluster.md): it is there, in most cases,
    before it is durable, and a load on a host that has lost it takes it from there. Fewer copies than that are a warning of the job's
    result, never an error. No ring is used then, either.
    Otherwise the state dict goes through a ring of shared memory (128 MiB for all ranks of a host, 16 to 64 each) while it is written.
    slots: saves of this process that may be in flight, each with a ring, or, of async_save, a snapshot as large as the state
    dict; when_busy: "wait", "warn" (and wait) or "fail" when all are. progress: a progress bar on rank 0.
    timeout: seconds; the job goes on after it.
    Returns the job's record. Raises CheckpointExists, NoSpace, SharedMemoryFull, NoDaemon, RanksDisagree, RankFailed, …
    """
    o = _Options(overwrite, format, files_per_rank, on_divergence, pace_of(pace), _labels(labels, step), slots, when_busy,
                 cache=cache, metrics=metrics_of(metrics), incremental=incremental, parent=_parent(parent), keep=keep, hold=hold,
                 neighbours=neighbours)
    for again in (True, False):
        h = _start(state_dict, checkpoint, o, process_group, no_dist, client, blocking=True)
        try:
            return _until_durable(h, checkpoint, progress, timeout)
        except errors.DcpdError as e:  # all ranks see the same end of the same job
            if e.code != "ring_lost" or not again:
                raise
            log.warning("dcpd: saving %s begins anew: %s", checkpoint, e.message)
    raise AssertionError("not reached")


def _until_durable(h: "_Started", checkpoint: _where.Target, progress: bool, timeout: Optional[float]) -> Job:
    if progress and h.rank == 0:
        from . import show

        show.follow(h.future)
    try:
        return h.future.result(timeout)  # type: ignore[no-any-return]
    except TimeoutError as e:
        if isinstance(e, errors.DcpdError):
            raise
        raise errors.WaitTimeout(f"{checkpoint} is not durable after {timeout:g} s; job {h.future.job_id} goes on",
                                 job=h.future.job_id) from None


def async_save(state_dict: Any, checkpoint: _where.Target, *, overwrite: bool = False, process_group: Any = None, no_dist: bool = False,
               step: Optional[int] = None, format: str = "dcp", files_per_rank: Optional[int] = None,
               on_divergence: Optional[str] = None, pace: Optional[str] = None, cache: Optional[str] = None,
               incremental: Optional[bool] = None, parent: Optional[_where.Target] = None,
               labels: Optional[Mapping[str, str]] = None, metrics: Optional[Mapping[str, float]] = None,
               keep: Optional[str] = None, hold: Optional[str] = None, neighbours: Optional[int] = None, slots: int = 2,
               when_busy: str = "wait", overlap: bool = False, at_exit: Optional[str] = None,
               client: Optional[Client] = None) -> SaveFuture:
    """Copies the state dict into shared memory and returns; dcpd brings it to the disk. Arguments as for `save`.

    When it returns the snapshot outlives this process, and the tensors may be changed. overlap: returns sooner, and copies parameters and
    optimizer state while forward and backward run; the next step() of any PyTorch optimizer waits until they are copied, and so does
    `wait_snapshot()` of what is returned, which other code that changes them has to call. A tensor that is changed before fails the save
    (TensorChanged). Parameters are those that an optimizer has, or that belong to a module in the state dict and require gradients;
    everything else is copied before the call returns. Ranks on several hosts copy all before the call returns.
    slots=1 takes half the shared memory: the next save waits until this one is durable. at_exit: what an interpreter that ends does
    with saves in flight: "wait" (the default) until they are durable, or "leave" them to the daemon; it holds for the whole process.
    """
    global _at_exit
    if at_exit is not None:
        if at_exit not in ("wait", "leave"):
            raise ValueError(f"at_exit={at_exit!r}: 'wait' or 'leave'")
        _at_exit = at_exit
    return _start(state_dict, checkpoint, _Options(overwrite, format, files_per_rank, on_divergence, pace_of(pace), _labels(labels, step),
                                                   slots, when_busy, bool(overlap), cache, metrics_of(metrics), incremental,
                                                   _parent(parent), keep, hold, neighbours), process_group, no_dist, client).future


def wait(timeout: Optional[float] = None) -> None:
    """Until all saves of this process are durable. Raises the first error of one."""
    for f in list(_open_futures):
        f.result(timeout)


def close() -> None:
    """Gives back this process's slots in shared memory. Saves in flight go on, and are not waited for, but for a copy under way."""
    _overlap.settle()
    _session.close_all()


def pace_of(pace: Optional[str]) -> Optional[str]:
    """What a save is asked for: the argument, else DCPD_PACE. A wrong word is an error before anything is copied."""
    source, value = ("pace", pace) if pace is not None else ("DCPD_PACE", os.environ.get("DCPD_PACE") or None)
    if value is not None and value not in _PACES:
        raise ValueError(f"{source}={value!r}: one of {', '.join(_PACES)}")
    return value


class _Options(NamedTuple):
    overwrite: bool
    format: str
    files_per_rank: Optional[int]
    on_divergence: Optional[str]
    pace: Optional[str]
    labels: Mapping[str, str]
    slots: int
    when_busy: str
    overlap: bool = False
    cache: Optional[str] = None
    metrics: Mapping[str, float] = {}
    incremental: Optional[bool] = None
    parent: Optional[str] = None
    keep: Optional[str] = None
    hold: Optional[str] = None
    neighbours: Optional[int] = None

    def job(self) -> Dict[str, Any]:
        o: Dict[str, Any] = {"overwrite": bool(self.overwrite)}
        if self.files_per_rank is not None:
            o["files_per_rank"] = self.files_per_rank
        if self.on_divergence is not None:
            o["on_divergence"] = self.on_divergence
        if self.pace is not None:
            o["pace"] = self.pace
        if self.cache is not None:
            o["cache"] = self.cache
        if self.incremental is not None:
            o["incremental"] = bool(self.incremental)
        if self.keep is not None:
            o["alias"] = self.keep
        if self.hold is not None:
            o["hold"] = self.hold
        if self.neighbours is not None:
            o["neighbours"] = int(self.neighbours)
        return o


def _parent(parent: Optional[_where.Target]) -> Optional[str]:
    return None if parent is None else _text(parent)


def _labels(labels: Optional[Mapping[str, str]], step: Optional[int]) -> Dict[str, str]:
    out = {str(k): str(v) for k, v in (labels or {}).items()}
    if step is not None:
        out["step"] = str(int(step))
    return out


def metrics_of(metrics: Optional[Mapping[str, float]]) -> Dict[str, float]:
    out = {str(k): float(v) for k, v in (metrics or {}).items()}
    for name in [k for k, v in out.items() if not math.isfinite(v)]:
        log.warning("dcpd: the metric %s is %s, which no record keeps: the checkpoint is saved without it", name, out.pop(name))
    return out


class _Started(NamedTuple):
    future: SaveFuture
    rank: int


class _Offer(NamedTuple):
    """What a rank brings to the first gather."""

    place: Tuple[str, str]
    target: str
    options: _Options
    url: Optional[str] = None          # the rest by rank 0
    storage: str = ""
    name: str = ""
    state_dict: str = ""
    generation: int = 0
    hosts: Optional[Dict[str, Any]] = None


def _start(state_dict: Any, target: _where.Target, o: _Options, process_group: Any, no_dist: bool, client: Optional[Client],
           blocking: bool = False) -> _Started:
    if o.when_busy not in _BUSY:
        raise ValueError(f"when_busy={o.when_busy!r}: one of {', '.join(_BUSY)}")
    if o.cache not in (None, "drop", "keep"):
        raise ValueError(f"cache={o.cache!r}: 'drop' or 'keep'")
    if o.on_divergence not in (None, "report", "fail"):
        raise ValueError(f"on_divergence={o.on_divergence!r}: 'report' or 'fail'")
    if not 1 <= o.slots <= 16:
        raise ValueError(f"slots={o.slots!r}: 1 to 16")
    with _in_save:
        _overlap.settle()  # dcpd takes an open slot of an older generation for given up
        g = _hosts.group(process_group, no_dist)
        for again in (True, False):
            try:
                return _Started(_attempt(state_dict, target, o, g, client, blocking), 0 if g.first else 1)
            except _Stale as e:
                if not again:
                    raise errors.NotFound("the state dict in shared memory vanished twice: is dcpd being restarted? "
                                          f"({e.message})") from None
            except _group.Broken:
                _session.discard_group(g)
                raise
        raise AssertionError("not reached")


class _Stale(errors.DcpdError):
    """The session's state dict is gone: its lease was over, or dcpd lost its journal; or a ring is lost. All ranks start again, once."""


def _attempt(state_dict: Any, target: _where.Target, o: _Options, g: _group.Group, client: Optional[Client],
             blocking: bool) -> SaveFuture:
    offer = _Offer(_group.place(), _text(target), o)
    place: Optional[_where.Place] = None
    failure: Optional[BaseException] = None
    described: Optional[_tensors.Described] = None
    try:
        described = _tensors.describe(state_dict)
        if g.rank == 0:
            _where.not_inside(target)
            place = _where.resolve(target, client, make=True)
            if blocking and not o.overwrite and place.client.checkpoints.exists(place.object):
                raise errors.CheckpointExists(f"{place.shown} exists; overwrite=True replaces it", code="checkpoint_exists")
            s = _session.find(place.client, g, o.slots) or _session.create(place.client, g, o.slots)
            s.generation += 1
            offer = offer._replace(url=place.client.url, storage=place.storage, name=place.name, state_dict=s.name,
                                   generation=s.generation)
    except Exception as e:
        failure = e
    offers = g.agree(offer, failure)
    assert described is not None
    _same(offers)
    first: _Offer = offers[0]._replace(hosts=g.meet(offers[0], place))
    snapshot = _Snapshot(described, first, o, blocking)
    session = snapshot.take(place.client if place else client, g)
    return _submit(session, snapshot, first, o, g, blocking)


def _same(offers: Sequence[_Offer]) -> None:
    for rank, x in enumerate(offers):
        if x.target != offers[0].target:
            raise errors.RanksDisagree(f"rank 0 saves to {offers[0].target!r}, rank {rank} to {x.target!r}", rank=rank)
        a, b = ({**y.options._asdict(), "metrics": None} for y in (offers[0], x))  # each rank has a loss of its own
        if a != b:
            what = ", ".join(f"{k}={a[k]!r} and {b[k]!r}" for k in a if a[k] != b[k])
            raise errors.RanksDisagree(f"ranks 0 and {rank} pass different options: {what}", rank=rank)


def _text(target: _where.Target) -> str:
    return str(target) if _where.is_reference(target) else os.path.abspath(os.fspath(target))


class _Snapshot:
    """Reserve, copy, seal; and everybody knows that everybody did. job: what rank 0 had made meanwhile; None, and it is still to be made.
    again: a rank had to begin again, as the daemon was restarted. complete: copies the rest and seals, if the save overlaps the step."""

    def __init__(self, d: _tensors.Described, first: _Offer, o: _Options, streams: bool) -> None:
        self.d, self.first, self.o, self.streams = d, first, o, streams and first.hosts is None
        self.job: Optional[Job] = None
        self.again = False
        self.complete: Optional[Callable[[], None]] = None
        self._early: Optional[_early.Early] = None
        self._late: Optional[_overlap.Copy] = None

    def take(self, c: Optional[Client], g: _group.Group) -> _session.Session:
        session: Optional[_session.Session] = None
        failure: Optional[BaseException] = None
        lost: Optional[str] = None
        written = False
        try:
            session = _session.join(c or _daemon.client_at(str(self.first.url)), g, self.o.slots, self.first.state_dict)
            with session.lock:
                self._write(session)
            written = True
            if self._early is not None:
                self.job = self._early.job()
        except _ring.Lost as e:
            lost = e.message
        except Exception as e:
            failure = e
            if isinstance(e, errors.NotSealed) and self.streams:  # another rank has given up, before there was a job
                failure, lost = None, e.message
            if isinstance(e, errors.NotFound) and e.code == "not_found" and not written:  # else it is the storage
                failure = _Stale(e.message)
        except BaseException:  # a signal's
            self._give_up(session)
            raise
        if (failure is not None or lost is not None) and self.streams:
            self._give_up(session)  # at once: others wait for room in their rings
        try:
            told = g.agree((None if self.job is None else dict(self.job), self.again, lost), failure)
            if any(x[2] is not None for x in told):
                self._lose(g, next(x[2] for x in told if x[2] is not None))
            if self.o.overlap and told[0][0] is None:
                self._complete_now(g)
        except BaseException as e:
            self._give_up(session, isinstance(e, Exception))
            if session is not None and isinstance(e, _Stale):
                _session.discard(session)
            raise
        assert session is not None
        self.job, self.again = None if told[0][0] is None else Job(told[0][0]), any(x[1] for x in told)
        return session

    def drop_late(self) -> None:
        if self._late is not None:
            self._late.drop()

    def _give_up(self, session: Optional[_session.Session], wait: bool = False) -> None:
        self.drop_late()
        if self._early is not None:
            self._early.drop()
        if session is not None:
            _give_up(session, self.first.generation)
        if self._early is not None and wait:
            self._early.end()

    def _write(self, session: _session.Session) -> None:
        d, first, o = self.d, self.first, self.o
        layout: Layout = session.layout_of(d)
        header = layout.header({k: values.encode(v, k) for k, v in d.values.items()})
        size = len(header) + layout.data_bytes
        _check_meta(d, layout)
        wish: Optional[Dict[str, Any]] = None
        if session.rank == 0:  # who dies between here and the job has it saved all the same
            options, more = _job_options(session, first, o)
            wish = {"save": {"storage": first.storage, "name": first.name, "format": o.format, "options": options,
                             "labels": dict(o.labels), **_metrics_field(o), **more}}
        hand = _handover.plan(session.client, d, layout)
        ring = self.streams and session.client.rings and not (o.incremental or o.neighbours) and layout.data_bytes > _copy.step()
        while True:
            try:
                if ring and self._through_ring(session, layout, header, size, hand):
                    return
                ring = False  # a daemon of before
                slot = self._reserve(session, size + (hand.room if hand else 0))
                views = session.fill(slot, layout, header)
                take = partial(hand.take, session.name, session.rank, first.generation, views) if hand is not None else None
                if o.overlap and first.hosts is None:
                    self._late = _overlap.begin(d, views, slot.into.new, take)
                self._submit_early(session)
                done = take(hand.chunks - self._late.chunks if self._late else hand.chunks) if hand and take else frozenset()
                if self._late is not None:
                    slot.into.new = False  # its pages are made by the late part
                    _tensors.copy_out(d, views, None, self._late.chunks | done)
                    self.complete = partial(self._complete, session, size, wish)
                    return
                slot.into.new = slot.into.new and not done  # page-locked pages are there
                _tensors.copy_out(d, views, slot.into, done)
                session.client.state_dicts.seal(session.name, session.rank, first.generation, size, wish)
                return
            except errors.RequestRefused as e:
                if e.code != "state_conflict" or self.again:
                    raise  # else the daemon was restarted since, and a reservation need not outlive that: once more
                self.again = True

    def _complete(self, session: _session.Session, size: int, wish: Optional[Dict[str, Any]]) -> None:
        """The late part, and the seal. Takes no part in collectives, which belong to the trainer's thread: the job fails on all ranks."""
        assert self._late is not None
        try:
            self._late.run()
            session.client.state_dicts.seal(session.name, session.rank, self.first.generation, size, wish)
        except BaseException as e:
            _give_up(session, self.first.generation, str(e))
            raise
        finally:
            self._late.drop()

    def _complete_now(self, g: _group.Group) -> None:
        """For a daemon of before, which makes no job of what is not sealed."""
        failure: Optional[BaseException] = None
        try:
            if self.complete is not None:
                self.complete()
        except Exception as e:
            failure = e
        self.complete = None
        g.agree(None, failure)

    def _reserve(self, session: _session.Session, size: int) -> _session.Slot:
        o = self.o
        return session.reserve(size, self.first.generation, o.when_busy, lambda: log.warning(
            "dcpd: %d saves are in flight; saving %s waits for one of them", o.slots, self.first.target),
            not self.streams and not o.overlap)

    def _reserve_ring(self, session: _session.Session, place: Dict[str, int], room: int) -> _session.Slot:
        while True:
            try:
                return self._reserve(session, place["offset"] + place["bytes"] + image.PAGE + room)
            except errors.SharedMemoryFull:
                place["bytes"] = _ring.smaller(place["bytes"])

    def _through_ring(self, session: _session.Session, layout: Layout, header: bytes, size: int, hand: Optional[_handover.Hand]) -> bool:
        """False: this daemon knows no rings."""
        dicts, generation = session.client.state_dicts, self.first.generation
        place = {"offset": _ring.place(len(header)), "bytes": _ring.size_for(size)}
        slot = self._reserve_ring(session, place, hand.room if hand else 0)
        views = session.fill_ring(slot, layout, header, place["offset"], place["bytes"])
        assert views.ring is not None
        views.ring.begin(len(header), lambda: self._ask(session))
        try:
            dicts.fill(session.name, session.rank, generation, size, place)
        except errors.DcpdError as e:
            if not _early.refused(e, "ring") and not _early.refused(e, "filling"):
                raise _lost(e)
            session.client.rings = False
            return False
        self._submit_early(session)
        if hand is not None:
            views.ring.give = _handover.Giver(session.client, session.name, session.rank, generation, slot.segment.map,
                                              place["offset"] + place["bytes"] + image.PAGE, views.ring)
        try:
            _tensors.copy_out(self.d, views)
        finally:
            views.ring.give = None
        try:
            dicts.seal(session.name, session.rank, generation, size, ring=place)
        except errors.DcpdError as e:
            raise _lost(e)
        return True

    def _ask(self, session: _session.Session) -> None:
        """There is no room in the ring: is it still read?"""
        try:
            if self._early is not None:
                self._early.check()
            session.client.state_dicts.renew(session.name, session.rank, self.first.generation)
        except errors.DcpdError as e:
            raise _lost(e)

    def _lose(self, g: _group.Group, why: str) -> None:
        """A rank has lost its ring, and none knows of another fault: the job may. Raises on all ranks the same."""
        failure: Optional[BaseException] = None
        if self._early is not None:
            try:
                self._early.end()
                self._early.check()
            except errors.JobCancelled:
                pass  # by this rank, just now
            except Exception as e:
                failure = e if getattr(e, "code", "") not in ("ring_lost", "not_sealed") else None
        g.told(None, failure)
        raise _Stale(why)

    def _submit_early(self, session: _session.Session) -> None:
        """A single rank that goes on after its copy asks afterwards: a second thread would cost it more than it gains."""
        c, first = session.client, self.first
        if session.rank or first.hosts is not None or not c.early or self._early is not None:
            return
        if not self.streams and self._late is None and session.world == 1:
            return
        try:
            self._early = _early.Early(c, lambda: _create_job(session, first, self.o, await_seal=True, timeout_s=_early.TIMEOUT_SECONDS))
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            pass


def _lost(e: errors.DcpdError) -> errors.DcpdError:
    return _ring.Lost(e.message, code=e.code) if _ring.lost(e) else e


def _check_meta(d: _tensors.Described, layout: Layout) -> None:
    torch = _tensors.torch_module()
    if torch is None:
        return
    chunks = d.outline.rest if d.outline is not None else range(len(d.sources))  # what is flat lies in host memory
    for i in chunks:
        if getattr(d.sources[i], "is_meta", False):
            fqn = layout.chunks[i].fqn
            raise errors.StateDictMismatch(f"{fqn}: a meta tensor has no data to save", fqn=fqn)


def _give_up(session: _session.Session, generation: int, reason: Optional[str] = None) -> None:
    try:
        session.release(generation, reason)
    except errors.DcpdError as e:
        if reason and _early.refused(e, "reason"):  # a daemon of before
            _give_up(session, generation)
        # else it is freed with the next generation, or when the lease is over


def _job_options(session: _session.Session, first: _Offer, o: _Options) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """A job's options, and what else it has if other hosts take part."""
    options = o.job()
    if o.parent is not None:
        options["parent"] = _where.resolve(o.parent, session.client).object
    if first.hosts is None:
        return options, {}
    return {**options, "retries": 0}, {"hosts": first.hosts}  # hosts that fail do so together


def _metrics_field(o: _Options) -> Dict[str, Any]:
    return {"metrics": dict(o.metrics)} if o.metrics else {}


def _create_job(session: _session.Session, first: _Offer, o: _Options, **source: Any) -> Job:
    options, more = _job_options(session, first, o)
    return session.client.jobs.create(
        "save", source={"state_dict": session.name, "generation": first.generation, **source},
        target={"storage": first.storage, "name": first.name, "format": o.format}, options=options, labels=dict(o.labels),
        **_metrics_field(o), **more)


def _submit(session: _session.Session, taken: _Snapshot, first: _Offer, o: _Options, g: _group.Group, watched: bool) -> SaveFuture:
    """All have sealed, or will."""
    job: Optional[Job] = taken.job
    try:
        if job is None or taken.again:
            job = _told(session, job, first, o, g)
        # rank 0's client goes into the thread; each thread has its own connection
        reference = first.target if first.storage.startswith("path-") else f"{first.storage}:{first.name}"
        f = SaveFuture(session.client, job, reference, lambda: session.release(first.generation), watched, taken.complete)
        _open_futures.add(f)
        return f
    except _group.Broken:
        raise  # all have sealed: dcpd saves it when the leases are over, if it has no job yet
    except BaseException:  # a signal's too; a job that was submitted all the same keeps its slots until it is done
        if first.hosts is not None and isinstance(job, Job):
            _early.cancel(session.client, job)  # another host has none
        taken.drop_late()
        _give_up(session, first.generation)
        raise


def _told(session: _session.Session, job: Optional[Job], first: _Offer, o: _Options, g: _group.Group) -> Job:
    """The job that rank 0 makes now; or the one that it made before, if a restart of the daemon has not ended that."""
    failure: Optional[BaseException] = None
    if g.rank == 0:
        try:
            if job is not None:
                job = session.client.jobs.get(job.id)
                error = job.get("error") or {}
                if job["state"] == "failed" and error.get("code") == "not_sealed":
                    job = None
            job = job or _create_job(session, first, o)
        except Exception as e:
            failure = e
    return Job(g.told(None if job is None else dict(job), failure))


def _after_fork() -> None:
    global _in_save
    _open_futures.clear()
    _in_save = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _exit() -> None:
    """Saves in flight are waited for, or left to the daemon; then the slots are given back."""
    for f in list(_open_futures):
        if not f.done():
            try:
                f.result() if _at_exit == "wait" else f.wait_snapshot()
            except Exception:
                pass  # logged by its thread
            except BaseException:  # Ctrl-C: the rest is left to the daemon
                break
    _session.close_all(1.0 if _at_exit == "wait" else 0.0)
