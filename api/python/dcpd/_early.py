"""The job of a save, made before its generation is sealed, and what is written into it while dcpd writes it out.

Rank 0 asks for the job from a thread of its own while all copy, so that nobody waits for it after the copy, and its record travels with
what the ranks tell each other then anyway. The daemon keeps it waiting for the last seal, and lets it fail if a rank gives up.

A caller that waits until all is durable gains more: each rank announces its image when its header is there, and sends the rest through a
ring (_ring.py). The last seal alone makes it a checkpoint.

Daemons of before refuse both, and are asked in the old order from then on.
"""
from __future__ import annotations

import threading
from typing import Callable, Optional

from . import _background, errors
from .client import Client, Job

TIMEOUT_SECONDS = 86400  # of a copy; a rank that has gone is noticed by its lease
END_SECONDS = 5.0
_REFUSALS = ("unknown_field", "validation_failed", "invalid_request")


def refused(e: BaseException, word: str) -> bool:
    """Whether a daemon does not know a field."""
    return isinstance(e, errors.DcpdError) and e.code in _REFUSALS and word in f"{e.message} {e.problem.get('pointer', '')}"


class Early:
    """One job that is being made. make: asks for it, in a thread of its own."""

    def __init__(self, client: Client, make: Callable[[], Job]) -> None:
        self._client, self._make = client, make
        self._guard = threading.Lock()
        self._job: Optional[Job] = None
        self._failure: Optional[BaseException] = None
        self._unwanted = False
        self._over = _background.begin(self._run)

    def _run(self) -> None:
        try:
            job = self._make()
            with self._guard:
                self._job = job
                unwanted = self._unwanted
            if unwanted:
                cancel(self._client, job)
        except BaseException as e:  # raised by job()
            self._failure = e
        finally:
            self._client._t.close()  # this thread's connection

    def job(self) -> Optional[Job]:
        """The job; None if the daemon knows no such jobs. Raises why there is none."""
        self._over.wait()
        if self._failure is None:
            return self._job
        if refused(self._failure, "await_seal"):
            self._client.early = False
            return None
        raise self._failure

    def check(self) -> None:
        """Raises why there is no job, or why it has ended, as far as that is known."""
        if self._failure is not None and not refused(self._failure, "await_seal"):
            raise self._failure
        if self._job is not None:
            job = self._client.jobs.get(self._job.id)
            if job.done:
                job.raise_for_state()

    def drop(self) -> None:
        """The save is given up. Waits for nothing that is still to come."""
        with self._guard:
            self._unwanted = True
            job = self._job
        if job is not None:
            cancel(self._client, job)

    def end(self) -> None:
        """After drop: waits until the job has let go of its target, so that the next save finds that free."""
        self._over.wait(END_SECONDS)
        job = self._job
        try:
            if job is not None:
                self._client.jobs.get(job.id, wait=END_SECONDS)
        except errors.DcpdError:
            pass


def cancel(client: Client, job: Job) -> None:
    try:
        client.jobs.cancel(job.id)
    except errors.DcpdError:
        pass  # it has ended, or ends by itself as the seals do not come
