"""A load that is asked for: its checked arguments, and the steps shared by loads of new tensors, in place, and of optimizer state."""
from __future__ import annotations

import os
import re
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import _daemon, _group, _session, _where, errors
from .client import Client, Job

LEASE = 120


class Ask:
    def __init__(self, checkpoint: _where.Target, group: _group.Group, client: Optional[Client], strict: bool, weights_only: bool,
                 verify: bool, progress: bool, timeout: Optional[float], transform: Any = None,
                 vars: Optional[Mapping[str, int]] = None) -> None:
        self.checkpoint, self.group, self.client, self.strict = checkpoint, group, client, strict
        self.weights_only, self.verify, self.progress, self.timeout = weights_only, verify, progress, timeout
        self.rules: Dict[str, Any] = {} if transform is None else {"transform": [transform], **({"vars": dict(vars)} if vars else {})}
        self.end: Optional[float] = None
        self.spread: Optional[Dict[str, Any]] = None  # what hosts share of a load, of a HostGroup (_hosts.py); None: each reads by itself
        self.submitted = 0

    @property
    def text(self) -> str:
        return str(self.checkpoint) if _where.is_reference(self.checkpoint) else os.path.abspath(os.fspath(self.checkpoint))

    def submit(self, c: Client, source: Mapping[str, str], target: Mapping[str, Any], keys: Optional[Sequence[str]]) -> Job:
        spec: Dict[str, Any] = {"source": dict(source), "target": dict(target), "strict": self.strict,
                                "options": {"verify": "digest" if self.verify else "none"}}
        spec.update(self.rules)
        self.submitted += 1
        if self.spread is not None:  # each of the jobs of a load is a group of its own
            spec["spread"] = {**self.spread, "id": f"{self.spread['id']}-{self.submitted}"}
        if keys is not None and self.rules:  # include is of the names before the rules
            wanted = "|".join(re.escape(k) for k in keys)
            spec["transform"] = [*spec["transform"], {"match": rf"^(?!(?:{wanted})(?:\.|$))", "drop": True, "optional": True}]
        elif keys is not None:
            spec["include"] = globs(keys)
        return c.jobs.create("load", **spec)

    def made(self, c: Client, source: Mapping[str, str]) -> Optional[Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]]:
        """(tensors, values) that the rules make of a checkpoint, in the form of `checkpoints.tensors`. None: there are more than a plan
        lists. Raises what is wrong with the rules."""
        target = {"state_dict": _session.new_name(), "world_size": 1}
        table = c.jobs.plan("load", source=dict(source), target=target, **self.rules).get("transform")
        if table is None:  # rules that are none
            return c.checkpoints.tensors(source)
        tensors, found = list(table["after"]), list(table.get("values", []))
        if (len(tensors), len(found)) != (table["after_count"], table.get("value_count")):
            return None
        return tensors, found

    def others(self, c: Client) -> bool:
        """Whether the rules read other checkpoints, too."""
        return any("from" in rule for rule in c.transforms.rules(*self.rules.get("transform", ())))

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

            with show.following(f"load {self.text}") as bar:
                return c.jobs.wait(job, left, on_progress=bar)
        return c.jobs.wait(job, left)


def globs(keys: Sequence[str]) -> List[str]:
    return [x for k in keys for x in (k, k + ".*")]


def selected(keys: Sequence[str], fqn: str) -> bool:
    return any(fqn == k or fqn.startswith(k + ".") for k in keys)


def client_of(ask: Ask, url: str) -> Client:
    return ask.client or _daemon.client_at(url)


def give_up(c: Client, job: str) -> None:
    """Of a load that has failed here, or was interrupted: nobody wants what its job makes."""
    try:
        with _session.brief(c) as client:
            client.jobs.cancel(job)
    except errors.DcpdError:
        pass  # it is over, or the daemon is gone


def remove(c: Client, name: str) -> None:
    """Removes a state dict of this process's, once its job has let go. A daemon that does not answer removes it with its lease: that is no
    error, and hides none."""
    _session.delete(c, name, 5.0)


def same_call(seen: Sequence[Tuple[Any, ...]]) -> None:
    for rank, x in enumerate(seen):
        if x[:2] != seen[0][:2]:
            raise errors.RanksDisagree(f"rank 0 loads {seen[0][0]!r}, rank {rank} {x[0]!r}" if x[0] != seen[0][0] else
                                       f"ranks 0 and {rank} ask for different keys", rank=rank)
