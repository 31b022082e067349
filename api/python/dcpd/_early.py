"""The job of a save, made before its generation is sealed, and what is written into it while dcpd writes it out.

Rank 0 asks for the job from a thread of its own while all copy, so that nobody waits for it after the copy, and its record travels with
what the ranks tell each other then anyway. The daemon keeps it waiting for the last seal, and lets it fail if a rank gives up.

A caller that waits until all is durable gains more: each rank announces its image when its header is there, and after each piece of the
copy says how far it has come (`Filling`); dcpd writes that piece while the next one is copied. The last seal alone makes it a checkpoint.

Daemons of before refuse both, and are asked in the old order from then on.
"""
from __future__ import annotations

import threading
from typing import Callable, Optional

from . import _copy, errors, image
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
        self._thread = threading.Thread(target=self._run, name="dcpd-job", daemon=True)
        self._thread.start()

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
        self._thread.join()
        if self._failure is None:
            return self._job
        if refused(self._failure, "await_seal"):
            self._client.early = False
            return None
        raise self._failure

    def drop(self) -> None:
        """The save is given up. Waits for nothing that is still to come."""
        with self._guard:
            self._unwanted = True
            job = self._job
        if job is not None:
            cancel(self._client, job)

    def end(self) -> None:
        """After drop: waits until the job has let go of its target, so that the next save finds that free."""
        self._thread.join(END_SECONDS)
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


class Filling:
    """An image that is announced before it is whole. told(n): n bytes of it, from the start, are there for good."""

    def __init__(self, segment: image.Segment, size: int) -> None:
        self._segment, self._place = segment, image.address(segment.map) + filled_at(size)

    def told(self, n: int) -> None:
        _copy.store(self._place, n)


def filled_at(size: int) -> int:
    """Where it says how much of an image of so many bytes is there."""
    return size + -size % image.PAGE


def room_for(size: int) -> int:
    return filled_at(size) + image.PAGE


def announce(client: Client, name: str, rank: int, generation: int, segment: image.Segment, header: int, size: int) -> Optional[Filling]:
    """Says that the header is there and the rest comes. None: this daemon waits for the seal."""
    if not client.filling:
        return None
    f = Filling(segment, size)
    f.told(header)  # what it said of the step before is gone before anybody looks
    try:
        client.state_dicts.fill(name, rank, generation, size)
        return f
    except errors.DcpdError as e:
        if not refused(e, "filling"):
            raise
        client.filling = False
        return None
