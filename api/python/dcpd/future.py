"""What async_save returns."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any, Callable, Dict, Generator, Optional

from . import _background, errors
from .client import Client, Job

log = logging.getLogger("dcpd")


class SaveFuture(Future):  # type: ignore[type-arg]
    """A save that dcpd brings to the disk. A concurrent.futures.Future whose result is the job's record; `await` works too.

    snapshotted: the data are in shared memory and outlive this process: when async_save returns, but for one that overlaps the step.
    durable: the checkpoint is on the disk, visible and complete. progress: {"bytes_done", "bytes_total", "rate", "eta_s"}.
    job_id: for `dcpctl job`. reference: where it goes. `result(timeout)` raises the job's error, by class, or TimeoutError.
    """

    def __init__(self, client: Client, job: Job, reference: str, finish: Callable[[], None], watched: bool = False,
                 complete: Optional[Callable[[], None]] = None) -> None:
        """watched: the caller waits for it, so that nothing need be logged. complete: makes the snapshot whole, in the future's thread."""
        super().__init__()
        self._complete, self._copied = complete, threading.Event()
        self._no_snapshot: Optional[BaseException] = None
        if complete is None:
            self._copied.set()
        self._watched, self._guard = watched, threading.Lock()
        self._client, self._record, self.reference = client, job, reference
        self._finish, self._line = finish, errors.Line()
        self.set_running_or_notify_cancel()
        _background.begin(self._wait)

    @property
    def job_id(self) -> str:
        return self._record.id

    @property
    def snapshotted(self) -> bool:
        return self._copied.is_set() and self._no_snapshot is None

    def wait_snapshot(self, timeout: Optional[float] = None) -> None:
        """Until the snapshot is whole: the tensors may be changed by whatever code, and the process may die. An optimizer's step waits for
        the copy by itself. Raises why there is no snapshot (TensorChanged, …), or WaitTimeout after so many seconds."""
        if not self._copied.wait(timeout):
            raise errors.WaitTimeout(f"the snapshot of {self.reference} is not whole after {timeout:g} s", job=self.job_id)
        if self._no_snapshot is not None:
            raise self._no_snapshot

    @property
    def durable(self) -> bool:
        return self.done() and self.exception() is None

    @property
    def progress(self) -> Dict[str, Any]:
        if not self.done():
            self._look()
        return dict(self._record.get("progress") or {})

    def _copy(self) -> None:
        try:
            if self._complete is not None:
                self._complete()
        except BaseException as e:
            self._no_snapshot = e
            raise
        finally:
            self._complete = None
            self._copied.set()

    def _look(self) -> None:
        try:
            self._seen(self._client.jobs.get(self.job_id))
        except errors.DcpdError:
            pass  # the waiting thread says it, if it lasts

    def _seen(self, record: Job) -> None:
        """A record that was under way while the job ended does not replace the last one."""
        with self._guard:
            if not self._record.done:
                self._record = record

    def cancel(self) -> bool:
        """Asks the daemon to stop the job. False if it is too late; else result() raises JobCancelled."""
        if self.done():
            return False
        try:
            self._client.jobs.cancel(self.job_id)
            return True
        except errors.DcpdError:
            return False

    def _wait(self) -> None:
        failure: Optional[BaseException] = None
        try:
            self._copy()
            with self._line:
                self._seen(self._client.jobs.wait(self.job_id))
        except BaseException as e:  # everything must reach result()
            failure = e
            if not isinstance(e, ConnectionError):
                self._look()
        try:
            self._finish()
        except errors.DcpdError as e:
            log.debug("dcpd: the slot of %s is not released: %s", self.reference, e)
        finally:
            self._client._t.close()  # this thread's connection
        if failure is None:
            self.set_result(self._record)
        else:
            log.log(logging.DEBUG if self._watched else logging.ERROR, "dcpd: saving %s failed: %s", self.reference, failure)
            self.set_exception(failure)

    def __await__(self) -> Generator[Any, None, Job]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "durable" if self.exception() is None else f"failed: {self.exception()}"
        return f"<dcpd.SaveFuture {self.reference}, job {self.job_id}, {state}>"
