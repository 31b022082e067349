"""Saves of a framework's integration that are under way, and the removals that must not come before them.

A trainer that keeps the newest checkpoints removes an old one as soon as the save of a new one has returned. Here that is when the copy
is done: the old one goes when the new one is durable, and stays if that failed.
"""
from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from concurrent.futures import Future
from typing import Any, Dict, List, Optional, Tuple

from . import _where, errors
from ._save import async_save
from .client import Client
from .future import SaveFuture

log = logging.getLogger("dcpd")
POLICY_S = 30  # that the end of a training waits for removals


def _matches(glob: str, run: str) -> bool:
    """`*` stands for any characters, as in the daemon."""
    return re.fullmatch(".*".join(re.escape(part) for part in glob.split("*")), run, re.DOTALL) is not None


class Saves:
    """Saves by target. Errors of earlier ones are raised by the next call."""

    def __init__(self, client: Optional[Client] = None) -> None:
        self._client = client
        self._running: Dict[str, SaveFuture] = {}
        self._removals: List["Future[None]"] = []
        self._policy: Optional[Tuple[Client, str]] = None

    def save(self, state: Any, target: _where.Target, **options: Any) -> SaveFuture:
        """async_save; a save to the same name before it is waited for."""
        before = self._running.get(str(target))
        if before is not None:
            before.result()
        self._collect()
        f = self._running[str(target)] = async_save(state, target, client=self._client, **options)
        return f

    def keep_newest(self, run: str, count: int) -> bool:
        """Has dcpd keep the newest checkpoints of a run, "main:run1". False: that daemon knows no policies."""
        place = _where.resolve(run, self._client, make=True)
        name = "keep-" + hashlib.sha256(str(place).encode()).hexdigest()[:16]
        try:
            place.client.policies.put(name, place.storage, place.name, {"last": count}, confirm=True)
        except errors.NotFound:
            return False
        self._policy = place.client, name
        return True

    def policy_of(self, target: _where.Target) -> Optional[str]:
        """The name of a retention policy that is for the target's run; None: there is none."""
        try:
            place = _where.resolve(target, self._client)
            policies = place.client.policies.list()
        except errors.NotFound:  # no such place, or a daemon that knows no policies
            return None
        run = place.name.rpartition("/")[0] or "-"
        return next((p["name"] for p in policies if p["storage"] == place.storage and _matches(p["match"], run)), None)

    def _settle_policy(self) -> None:
        """Waits a while until all has gone that may go."""
        end = time.monotonic() + POLICY_S
        while self._policy is not None and time.monotonic() < end:
            client, name = self._policy
            try:
                if not client.policies.preview(name)["remove"] and not any(not j.done for j in self._policy_jobs()):
                    return
            except errors.NotFound:  # somebody has removed it
                return
            time.sleep(0.05)

    def _policy_jobs(self) -> List[Any]:
        client, name = self._policy or (None, "")
        return list(client.jobs.list(filter=f"labels.policy={name}", limit=20)) if client else []

    def remove(self, target: _where.Target) -> None:
        """Removes a checkpoint once all saves so far are durable. Returns at once; one that is not there, or is held, is no error."""
        done: "Future[None]" = Future()
        self._removals.append(done)
        threading.Thread(target=self._remove, args=(target, list(self._running.values()), done), name="dcpd-remove").start()

    def _remove(self, target: _where.Target, before: List[SaveFuture], done: "Future[None]") -> None:
        try:
            for f in before:
                if f.exception() is not None:
                    log.warning("dcpd: %s is kept: the save to %s after it failed", target, f.reference)
                    done.set_result(None)
                    return
            place = _where.resolve(target, self._client)
            place.client.jobs.wait(place.client.checkpoints.delete(place.object))
            done.set_result(None)
        except (errors.NotFound, errors.CheckpointHeld) as e:
            log.info("dcpd: %s is not removed: %s", target, e)
            done.set_result(None)
        except BaseException as e:  # told by the next call
            done.set_exception(e)

    def _collect(self) -> None:
        """Forgets what is done; raises what failed, once."""
        for name, f in [(n, f) for n, f in self._running.items() if f.done()]:
            del self._running[name]
            f.result()
        for r in [r for r in self._removals if r.done()]:
            self._removals.remove(r)
            r.result()

    def settle(self, target: _where.Target) -> _where.Place:
        """Waits for saves to `target` that any process has under way at the daemon; where it is."""
        f = self._running.get(str(target))
        if f is not None:
            f.result()
        place = _where.resolve(target, self._client)
        for job in place.client.jobs.list(filter=f'target="{place}"', limit=3):
            if not job.done and job["kind"] == "save":
                place.client.jobs.wait(job)
        return place

    def wait(self) -> None:
        """Until everything is durable, and what was to be removed is gone. Raises the first error."""
        for f in list(self._running.values()):
            f.exception()
        for r in list(self._removals):
            r.exception()
        self._collect()
        self._settle_policy()
