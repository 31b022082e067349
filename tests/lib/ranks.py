"""A pool of real ranks: processes in a gloo group that live for the whole test session, since importing PyTorch costs seconds. They are
forks of one process that has imported it, and nothing else.

    pool = Ranks(4)
    results = pool.run(2, "scenarios", "save_sharded", path=…)      ranks 0 and 1, in a process group of their own; a list by rank

A rank that raises fails the call with its traceback; so does one that stays silent.
"""
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback

START_SECONDS = 300
PATIENCE = 6  # how many times as long as on an idle machine something may take


def serve(rank, pipe, meet):
    import gc
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: no collection of garbage looks through it again
    group = None
    pipe.send((0, True, None))  # ready: the import may take longer than a call
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ctx = multiprocessing.get_context("forkserver")
        ctx.set_forkserver_preload(["torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
                                    "torch.distributed.tensor.parallel", "torch.distributed._tools", "torch._dynamo"])
        self.meet = tempfile.TemporaryDirectory(prefix="dcpd-ranks-")
        self.turn, self.world, self.calls, self.ranks = 0, None, 0, []
        for r in range(count):
            mine, theirs = ctx.Pipe()
            p = ctx.Process(target=serve, args=(r, theirs, self.meet.name), daemon=True)
            p.start()
            theirs.close()
            self.ranks.append((p, mine))
        for r in range(count):
            assert self.answer(r, 0, START_SECONDS)[0], f"rank {r} does not start"

    def answer(self, rank, call, seconds):
        """(ok, value) of this call; what came too late for an earlier one is dropped."""
        end = time.monotonic() + seconds * PATIENCE
        pipe = self.ranks[rank][1]
        while pipe.poll(max(0, end - time.monotonic())):
            number, ok, value = pipe.recv()
            if number == call:
                return ok, value
        return False, f"rank {rank}: no answer within {seconds * PATIENCE} s"

    def run(self, world, module, name, /, seconds=60, **kwargs):
        if world != self.world:
            self.turn, self.world = self.turn + 1, world
        self.calls += 1
        for _, pipe in self.ranks[:world]:
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
        for p, pipe in self.ranks:
            try:
                pipe.send(None)
            except OSError:
                pass
        for p, _ in self.ranks:
            p.join(50)
            if p.is_alive():
                p.kill()
        self.meet.cleanup()
