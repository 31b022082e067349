"""What goes wrong, by class.

The daemon's answers are problem+json with a `code` from one catalogue; `from_problem` makes the exception whose class fits. Where
known an exception says `rank`, `fqn`, `file` and `job`. All derive from `DcpdError`, and from the built-in class that a caller would
expect (`FileExistsError`, `KeyError`-like lookups, `TimeoutError`, `ConnectionError`, …).
"""
from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from typing import Any, Dict, List, Mapping, Optional, Type

__all__ = [
    "DcpdError", "NoDaemon", "ConnectionLost", "RequestRefused", "Forbidden", "NotFound", "CheckpointExists", "CheckpointHeld",
    "Busy", "SlotsBusy", "NotSealed", "NoSpace", "SharedMemoryFull", "DeviceMemoryFull", "StorageFailed", "CheckpointDamaged", "MissingKey",
    "StateDictMismatch", "JobFailed", "JobCancelled", "WaitTimeout", "TensorChanged", "RanksDisagree", "RankFailed", "SeveralHosts",
    "NoSharedMemory", "ProtocolMismatch", "from_problem",
]
TERMINAL = ("succeeded", "failed", "cancelled")  # the states in which a job stays


class DcpdError(Exception):
    """The base of all.

    code: the catalogue's word (`checkpoint_exists`, …), "" where the fault is the client's own. retryable: the same call may succeed
    later. rank, fqn, file, offset, job: where it happened, None if not known. problem: the daemon's whole answer.
    """

    def __init__(self, message: str, *, code: str = "", retryable: bool = False, rank: Optional[int] = None,
                 fqn: Optional[str] = None, file: Optional[str] = None, offset: Optional[int] = None, job: Optional[str] = None,
                 problem: Optional[Mapping[str, Any]] = None) -> None:
        super().__init__(message)
        self.message = message
        self.code, self.retryable = code, retryable
        self.rank, self.fqn, self.file, self.offset, self.job = rank, fqn, file, offset, job
        self.problem = dict(problem or {})

    def __str__(self) -> str:
        def said(v: Any) -> bool:
            return re.search(rf"(?<!\w){re.escape(str(v))}(?!\w)", self.message) is not None

        where = [f"{k} {v}" for k, v in (("rank", self.rank), ("FQN", self.fqn), ("file", self.file), ("offset", self.offset),
                                         ("job", self.job)) if v is not None and not said(v)]
        return self.message + (f" ({', '.join(where)})" if where else "")

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.message, {k: getattr(self, k) for k in (
            "code", "retryable", "rank", "fqn", "file", "offset", "job", "problem")})


def _rebuild(cls: Type[DcpdError], message: str, state: Mapping[str, Any]) -> DcpdError:
    return cls(message, **state)


class NoDaemon(DcpdError, ConnectionError):
    """No daemon answers. The message says where it was looked for and what to do."""


class ConnectionLost(DcpdError, ConnectionError):
    """The daemon went away in the middle and did not come back in time."""


class RequestRefused(DcpdError, ValueError):
    """The daemon does not take the request: a wrong name, layout, field or value."""


class Forbidden(DcpdError, PermissionError):
    """Not yours: another user's state dict, or a token is needed."""


class NotFound(DcpdError, LookupError):
    """No checkpoint, job, storage, state dict or tensor of that name."""


class NothingToResume(DcpdError, RuntimeError):
    """A run has checkpoints, and none of them will do: damaged, incomplete, or tried too often. skipped: each with its reason."""

    @property
    def skipped(self) -> List[Dict[str, str]]:
        return list(self.problem.get("skipped") or [])


class CheckpointExists(DcpdError, FileExistsError):
    """A checkpoint of that name exists, and `overwrite` is false."""


class CheckpointHeld(DcpdError, PermissionError):
    """Somebody holds the checkpoint: it is neither removed nor replaced before the hold is lifted."""


class Busy(DcpdError):
    """Something else uses the target or the state dict now, or other requests take all that the daemon has for them."""


class SlotsBusy(Busy):
    """As many saves are in flight as there are slots."""


class NotSealed(Busy):
    """Not all ranks have sealed the generation."""


class NoSpace(DcpdError, OSError):
    """Not enough room on the storage."""


class SharedMemoryFull(NoSpace, MemoryError):
    """Not enough room in /dev/shm, or below dcpd's --shm-limit. The message says how much is needed, free and held by whom."""


class DeviceMemoryFull(NoSpace, MemoryError):
    """Not enough room in a GPU's memory, or below dcpd's --device-limit. The message says which, and what to do."""


class StorageFailed(DcpdError, OSError):
    """The storage reports errors, does not answer, or is not there."""


class CheckpointDamaged(DcpdError, ValueError):
    """What is stored is not what must be there: a wrong digest, holes, a format error.

    damage: of a verify, all that it found, the first 1,000 ({"fqn", "rank", "file", "offset", "bytes", "part", "code"}; fqn and rank
    may be None); [] of any other call. damage_count: how many there are in all.
    """

    @property
    def damage(self) -> List[Dict[str, Any]]:
        return list(self.problem.get("damage") or [])

    @property
    def damage_count(self) -> int:
        return int(self.problem.get("damage_count") or len(self.damage))


class StateDictMismatch(DcpdError, ValueError):
    """Checkpoint and state dict do not fit: a size, or a tensor where the other has a value."""


class MissingKey(StateDictMismatch, KeyError):
    """The checkpoint lacks keys of the target."""

    __str__ = DcpdError.__str__


class JobFailed(DcpdError, RuntimeError):
    """The job failed for a reason that has no class of its own; see `code`."""


class JobCancelled(JobFailed):
    """Somebody cancelled the job."""


class WaitTimeout(DcpdError, TimeoutError):
    """It took longer than the caller allowed; the job goes on."""


class TensorChanged(DcpdError, RuntimeError):
    """A tensor was written to while `async_save(overlap=True)` copied it."""


class RanksDisagree(DcpdError, ValueError):
    """The ranks of a process group passed different things, such as two checkpoint names or steps."""


class RankFailed(DcpdError, RuntimeError):
    """Another rank of the process group failed; the message has its text."""


class SeveralHosts(DcpdError, RuntimeError):
    """The ranks are on several hosts, and their daemons cannot write one checkpoint together."""


class NoSharedMemory(DcpdError, RuntimeError):
    """This process and the daemon do not share one /dev/shm: another host, or a container with one of its own."""


class ProtocolMismatch(DcpdError, RuntimeError):
    """Client and daemon are of versions that do not understand each other."""


_CLASSES: Mapping[str, Type[DcpdError]] = {
    **dict.fromkeys(("unauthenticated", "forbidden", "misdirected"), Forbidden),
    "not_found": NotFound,
    "checkpoint_exists": CheckpointExists,
    "checkpoint_held": CheckpointHeld,
    **dict.fromkeys(("target_busy", "state_dict_busy", "state_dict_exists", "too_many_jobs", "too_many_requests", "too_many_streams",
                     "draining", "busy", "checkpoint_replaced", "idempotency_in_flight"), Busy),
    "slots_busy": SlotsBusy,
    "not_sealed": NotSealed,
    "storage_full": NoSpace,
    "shm_exhausted": SharedMemoryFull,
    "device_full": DeviceMemoryFull,
    **dict.fromkeys(("storage_io", "not_durable", "storage_readonly", "storage_gone", "storage_stalled"), StorageFailed),
    **dict.fromkeys(("checkpoint_damaged", "checkpoint_incomplete", "format_zip", "format_pickle", "format_metadata", "format_item",
                     "format_transform", "format_safetensors", "format_manifest", "limit_exceeded", "digest_mismatch", "coverage_hole"),
                    CheckpointDamaged),
    "missing_key": MissingKey,
    **dict.fromkeys(("size_mismatch", "kind_mismatch", "duplicate_key", "plan_invalid", "divergent", "base_mismatch"), StateDictMismatch),
    "cancelled": JobCancelled,
    **dict.fromkeys(("timed_out",), WaitTimeout),
    **dict.fromkeys(("invalid_json", "invalid_request", "validation_failed", "world_mismatch", "layout_invalid", "name_invalid",
                     "range_invalid", "state_conflict", "generation_stale", "alias_moved", "not_a_checkpoint", "overwrite_unsupported",
                     "dtype_unsupported", "format_unsupported", "format_image", "idempotency_mismatch",
                     "payload_too_large"), RequestRefused),
    **dict.fromkeys(("unknown_field", "unknown_kind", "method_not_allowed", "not_acceptable"), ProtocolMismatch),
}


_folders: Dict[str, str] = {}  # storages that stand for directories given as paths, by name
_FOLDER = re.compile(r"path-[0-9a-f]{20}:")


def shown(text: str) -> str:
    """A text of the daemon's with directories as the caller wrote them, not the names that storages for them were given."""
    return _FOLDER.sub(lambda m: os.path.join(_folders[m[0][:-1]], "") if m[0][:-1] in _folders else m[0], text)


class Line:
    """The line that called this package: where a warning belongs that a thread of the package will have later.

        line = Line()      # in the caller's thread
        with line: …       # in the other
    """

    def __init__(self) -> None:
        frame, here = sys._getframe(1), os.path.dirname(__file__)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
            frame = frame.f_back
        self.file, self.number = frame.f_code.co_filename, frame.f_lineno
        self.module = str(frame.f_globals.get("__name__", "<string>"))
        self.registry: Any = frame.f_globals.setdefault("__warningregistry__", {})

    def __enter__(self) -> None:
        _thread.line = self

    def __exit__(self, *_: Any) -> None:
        _thread.line = None


_thread = threading.local()


def warn(text: str) -> None:
    """A warning at the line that called this package."""
    at = getattr(_thread, "line", None) or Line()
    warnings.warn_explicit(text, UserWarning, at.file, at.number, at.module, at.registry)


def warn_of(checkpoint: Mapping[str, Any], detail: str) -> None:
    """The daemon's warning about a checkpoint ({"storage", "name"})."""
    warn((shown(f"{checkpoint['storage']}:{checkpoint['name']}: ") if checkpoint.get("name") else "") + detail)


def from_problem(problem: Mapping[str, Any], job: Optional[str] = None) -> DcpdError:
    """The exception that fits a problem+json object. job: the job's id, where the problem is a job's `error`."""
    code = str(problem.get("code", ""))
    text = str(problem.get("detail") or problem.get("title") or code or "the daemon refused")
    text = shown(text)
    if problem.get("pointer") and str(problem["pointer"]) not in text:
        text += f" (field {problem['pointer']})"
    if code == "unauthenticated":
        text = "the daemon wants its token, and not the one given, if any: it is in the file `token` of its state directory; " \
               "pass token=, or set DCPD_TOKEN or DCPD_TOKEN_FILE"
    cls = _CLASSES.get(code, JobFailed if job else DcpdError)
    if cls is ProtocolMismatch:
        text += "; this client and the daemon may be of different versions: `python -m dcpd doctor` shows both"
    return cls(text, code=code, retryable=bool(problem.get("retryable")), rank=problem.get("rank"), fqn=problem.get("fqn"),
               file=problem.get("file"), offset=problem.get("offset"), job=problem.get("job") or job, problem=problem)
