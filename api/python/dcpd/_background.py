"""Threads in which a save goes on while its caller waits for something else.

A thread is kept for the next save: threading.Thread.start() returns when the new one has run, behind whatever holds the processors, such as
the copies of other ranks (1 to 3 ms with 4 ranks on 2 CPUs).
"""
from __future__ import annotations

import os
import queue
import sys
import threading
from typing import Callable, List, Tuple

_idle: "List[_Thread]" = []


class _Thread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="dcpd-save", daemon=True)
        self.work: "queue.SimpleQueue[Tuple[Callable[[], None], threading.Event]]" = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            run, over = self.work.get()
            try:
                run()
            finally:
                over.set()
            del run, over
            _idle.append(self)


def begin(run: Callable[[], None]) -> threading.Event:
    """Runs it in a thread that the interpreter's end does not wait for; the event is set when it is over. Raises RuntimeError while the
    interpreter ends."""
    over = threading.Event()
    if sys.is_finalizing():
        raise RuntimeError("the interpreter is ending")
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
        thread.start()
    thread.work.put((run, over))
    return over


os.register_at_fork(after_in_child=_idle.clear)
