"""load: a checkpoint as new tensors, or into those that are there.

New tensors: dcpd loads into a segment, which is mapped here and then forgotten by its name; the tensors are views of it, so nothing
is copied. Into a state dict: see _into.py.
"""
from __future__ import annotations

import os
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from . import _group, _session, _tensors, _tree, _where, errors, image, values
from .client import Client, Job

_LEASE = 120


def load(checkpoint: _where.Target, into: Any = None, *, keys: Optional[Iterable[str]] = None, device: Any = None, strict: bool = True,
         weights_only: bool = True, verify: bool = True, process_group: Any = None, no_dist: bool = False, progress: bool = False,
         timeout: Optional[float] = None, client: Optional[Client] = None) -> Any:
    """Loads a checkpoint ("STORAGE:NAME", or a path to a DCP directory).

    Without `into`: returns a new state dict, nested as it was saved, with whole tensors of torch if it is installed, else arrays of
    numpy. They are views of shared memory that this call has made (on `device`, if given: copies there).
    With `into`: fills its tensors, DTensors, ShardedTensors and arrays in place, whatever the layout of the checkpoint, casting dtypes as
    copy_ does; meta tensors are replaced by real ones; values are replaced in their containers; Stateful members get
    load_state_dict(). Returns `into`. strict: a key that the checkpoint lacks is an error that lists all of them, before anything is
    changed; False leaves it as it is. After other errors a part may have been loaded.

    keys: flat keys ("model.w") or their beginnings ("model"); default all. weights_only: values of other than plain classes come as
    `Opaque`, with a warning; False unpickles them here. verify: check digests of what is read. timeout: seconds.
    In a torch.distributed job every rank calls it. Raises NotFound, MissingKey, StateDictMismatch, CheckpointDamaged, …
    """
    g = _group.group(process_group, no_dist)
    wanted = None if keys is None else list(keys)
    if isinstance(keys, str):
        raise TypeError("keys: a list of keys, not one string")
    ask = _Ask(checkpoint, g, client, strict, weights_only, verify, progress and g.first, timeout)
    g.check("load", (ask.text, wanted))
    if into is None:
        return _new(ask, wanted, device)
    from . import _into

    return _into.fill(ask, into, wanted)


class _Ask:
    def __init__(self, checkpoint: _where.Target, group: _group.Group, client: Optional[Client], strict: bool, weights_only: bool,
                 verify: bool, progress: bool, timeout: Optional[float]) -> None:
        self.checkpoint, self.group, self.client, self.strict = checkpoint, group, client, strict
        self.weights_only, self.verify, self.progress, self.timeout = weights_only, verify, progress, timeout
        self.end: Optional[float] = None

    @property
    def text(self) -> str:
        return str(self.checkpoint) if _where.is_reference(self.checkpoint) else os.path.abspath(os.fspath(self.checkpoint))

    def submit(self, c: Client, source: Mapping[str, str], target: Mapping[str, Any], include: Optional[Sequence[str]]) -> Job:
        spec: Dict[str, Any] = {"source": dict(source), "target": dict(target), "strict": self.strict,
                                "options": {"verify": "digest" if self.verify else "none"}}
        if include is not None:
            spec["include"] = list(include)
        return c.jobs.create("load", **spec)

    def deadline(self) -> Optional[float]:
        """When the timeout is over, which counts from the first time that this is asked."""
        if self.timeout is not None:
            self.end = self.end or time.monotonic() + self.timeout
        return self.end

    def wait(self, c: Client, job: Any, quiet: bool = False) -> Job:
        """The timeout is that of all jobs of this load."""
        left = self.timeout
        if left is not None:
            now = time.monotonic()
            self.end = self.end or now + left
            left = max(0.0, self.end - now)
        if self.progress and not quiet:
            from . import show

            return show.follow_job(c, job, left, f"load {self.text}")
        return c.jobs.wait(job, left)


def _globs(keys: Sequence[str]) -> List[str]:
    return [x for k in keys for x in (k, k + ".*")]


def _selected(keys: Sequence[str], fqn: str) -> bool:
    return any(fqn == k or fqn.startswith(k + ".") for k in keys)


def _client(ask: _Ask, url: str) -> Client:
    from ._save import _client_at

    return ask.client or _client_at(url)


def _remove(c: Client, name: str) -> None:
    try:
        c.state_dicts.delete(name)
    except errors.NotFound:
        pass


# ---------------------------------------------------------------------------------------------------------- new tensors


def _new(ask: _Ask, keys: Optional[List[str]], device: Any) -> Any:
    g = ask.group
    found: Any = None
    failure: Optional[BaseException] = None
    name, c = "", ask.client
    try:
        if g.rank == 0:
            place = _where.resolve(ask.checkpoint, ask.client)
            c, name = place.client, _session.new_name()
            found = (c.url, name, *_fetch(ask, place, name, keys))
    except Exception as e:
        failure = e
    try:
        seen = g.agree((ask.text, keys, _group.place(), found), failure)
        _same_call(seen)
        url, name, segment, size = seen[0][3]
        try:
            out = _map(segment, size, "w" if g.size == 1 else "c", ask, keys, device)
            failure = None
        except Exception as e:
            failure = e
        g.agree(None, failure)
        return out
    finally:
        if g.rank == 0 and c is not None and name:
            _remove(c, name)


def _same_call(seen: Sequence[Tuple[Any, ...]]) -> None:
    for rank, x in enumerate(seen):
        if x[:2] != seen[0][:2]:
            raise errors.RanksDisagree(f"rank 0 loads {seen[0][0]!r}, rank {rank} {x[0]!r}" if x[0] != seen[0][0] else
                                       f"ranks 0 and {rank} ask for different keys", rank=rank)


def _fetch(ask: _Ask, place: _where.Place, name: str, keys: Optional[List[str]]) -> Tuple[str, int]:
    """Runs the load; (segment, bytes of its image)."""
    c = place.client
    target = {"state_dict": name, "world_size": 1, "lease_seconds": _LEASE}
    job = ask.submit(c, place.object, target, None if keys is None else _globs(keys))
    ask.wait(c, job)
    slot = c.state_dicts.get(name)["ranks"][0]["slots"][0]
    return slot["segment"], slot["image_bytes"]


def _map(segment: str, size: int, mode: str, ask: _Ask, keys: Optional[List[str]], device: Any) -> Dict[str, Any]:
    s = image.Segment(segment, mode, size)
    parsed = image.parse(s.map)
    leaves = tensors_of(s.map, parsed, device)
    leaves.update(values.decode_all(parsed.values, ask.weights_only))
    if keys is not None:
        lacking = [k for k in keys if not any(_selected([k], f) for f in leaves)]
        if lacking and ask.strict:
            raise errors.MissingKey(f"{ask.text} has no {_tree.listing(lacking)}", code="missing_key", fqn=lacking[0])
    return _tree.numbered(_tree.nest((parsed.paths.get(f, [f]), v) for f, v in leaves.items()))


def tensors_of(buffer: Any, parsed: image.Parsed, device: Any = None) -> Dict[str, Any]:
    """{FQN: tensor or array} of an image that holds whole tensors, without a copy but to a device."""
    try:
        import torch
    except ImportError:
        if device is not None:
            raise errors.RequestRefused("device= needs torch") from None
        return {e.spec.fqn: _tensors.numpy_view(buffer, e.spec, e.begin) for e in parsed.entries}
    base = torch.frombuffer(buffer, dtype=torch.uint8)
    out = {}
    for e in parsed.entries:
        t = _tensors.torch_view(base, e.spec, e.begin)
        out[e.spec.fqn] = t if device is None or torch.device(device).type == "cpu" else t.to(device)
    return out
