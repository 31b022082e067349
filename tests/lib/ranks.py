"""A pool of real ranks: processes in a gloo group that live for the whole test session, since importing PyTorch costs seconds. They are
programs that are forked (see forks.py).

    pool = Ranks(4)
    results = pool.run(2, "scenarios", "save_sharded", path=…)      ranks 0 and 1, in a process group of their own; a list by rank

A rank that raises fails the call with its traceback; so does one that stays silent.
"""
import gc
import importlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback

from forks import Forks

START_SECONDS = 300
PATIENCE = 6  # how many times as long as on an idle machine something may take


def serve(rank, pipe, meet):
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    group = None
    pipe.send((0, True, None))  # ready: the import may take longer than a call
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        call, world, turn, module, name, kwargs = job
        try:
            if group != (world, turn):
                if dist.is_initialized():
                    dist.destroy_process_group()
                    forget_group()
                if world > 1:
                    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{meet}/{turn}")
                group = (world, turn)
            pipe.send((call, True, getattr(importlib.import_module(module), name)(**kwargs)))
        except BaseException as e:  # CheckpointException is no Exception
            pipe.send((call, False, f"rank {rank}: {type(e).__name__}: {e}\n{traceback.format_exc()}"))
            group = None  # the ranks may be out of step: meet again


def forget_group():
    """What refers to a group that is gone: PyTorch's cache of DTensor operations finds the old mesh by the new one's numbers."""
    try:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    except ImportError:
        pass  # older releases have no such cache, or no name for it
    for m in list(sys.modules.values()):
        for made in vars(m).get("MADE_FOR_GROUP", ()) if hasattr(m, "__dict__") else ():
            made.clear()


class Ranks:
    def __init__(self, count):
        env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.forks = Forks(env)
        self.meet = tempfile.TemporaryDirectory(prefix="dcpd-ranks-")
        self.turn, self.world, self.calls = 0, None, 0
        pairs = [multiprocessing.Pipe() for _ in range(count)]
        self.parent = self.forks.start_with(__file__, [theirs.fileno() for _, theirs in pairs], {**env, "TEST_MEET": self.meet.name})
        self.pipes = [mine for mine, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
        for r in range(count):
            assert self.answer(r, 0, START_SECONDS)[0], f"rank {r} does not start"

    def answer(self, rank, call, seconds):
        """(ok, value) of this call; what came too late for an earlier one is dropped."""
        end = time.monotonic() + seconds * PATIENCE
        pipe = self.pipes[rank]
        while pipe.poll(max(0, end - time.monotonic())):
            number, ok, value = pipe.recv()
            if number == call:
                return ok, value
        return False, f"rank {rank}: no answer within {seconds * PATIENCE} s"

    def run(self, world, module, name, /, seconds=60, **kwargs):
        if world != self.world:
            self.turn, self.world = self.turn + 1, world
        self.calls += 1
        for pipe in self.pipes[:world]:
            pipe.send((self.calls, world, self.turn, module, name, kwargs))
        out, wrong = [], []
        for r in range(world):
            ok, value = self.answer(r, self.calls, seconds)
            out.append(value)
            wrong += [] if ok else [value]
        if wrong:
            self.world = None
            raise AssertionError("\n".join(wrong))
        return out

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        try:
            self.parent.wait(50)
        except subprocess.TimeoutExpired:
            os.killpg(self.parent.pid, signal.SIGKILL)
        self.forks.close()
        self.meet.cleanup()


def main():
    """Imports what FSDP asks for in each rank, then forks the ranks."""
    import torch._dynamo
    import torch.distributed._tools  # noqa: F401

    gc.freeze()
    os.setsid()
    pipes = [multiprocessing.connection.Connection(int(fd)) for fd in sys.argv[1:]]
    for rank, pipe in enumerate(pipes):
        if os.fork() == 0:
            for other in pipes:
                if other is not pipe:
                    other.close()
            serve(rank, pipe, os.environ["TEST_MEET"])
            os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


if __name__ == "__main__":
    main()
