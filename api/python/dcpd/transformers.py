"""Hugging Face Trainer on dcpd: a callback that saves, and a helper that resumes.

    trainer = Trainer(model, args, train_dataset=…, callbacks=[dcpd.transformers.DcpdCallback("main:run1", every=500)])
    trainer.train(resume_from_checkpoint=dcpd.transformers.resume(trainer, "main:run1"))

Saves have model, optimizer, scheduler, the Trainer's state and random numbers, under `main:run1/checkpoint-STEP`. With `every`, set
`save_strategy="no"`, so that Trainer does not write its own as well; without, they are made whenever Trainer saves.
"""
from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import weakref
from typing import Any, Callable, Dict, List, Optional

from transformers import TrainerCallback

from . import _exact, _group, _hosts, _train, _where, errors
from ._saves import Saves
from .client import Client

_STATE = "trainer_state.json"
_LOGGED = 8  # entries of its log: the last of training and of each evaluation are among them
_SPEEDS = ("_runtime", "_per_second")


class DcpdCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Saves to `where`/checkpoint-STEP whenever Trainer saves and, if given, `every` so many steps; training goes on after the copy.

    where: "STORAGE:NAME" or a directory. keep: how many checkpoints of this run stay, the newest, also over a resume; None keeps all. Of
    "STORAGE:NAME" it is a retention policy of that run (`dcpctl policies`), which stays when the training has ended; what is held or has an
    alias stays as well. In a directory, which others may use, the callback removes what it has saved itself.
    Further options as for `dcpd.async_save`. On several ranks all take part, whatever wraps the model. The end of training waits until all
    are durable.
    """

    def __init__(self, where: str, *, every: Optional[int] = None, keep: Optional[int] = None, client: Optional[Client] = None,
                 **options: Any) -> None:
        if (every is not None and every < 1) or (keep is not None and keep < 1):
            raise ValueError("every and keep: at least 1")
        self.where, self.every, self.keep, self._options = os.fspath(where).rstrip("/"), every, keep, options
        self._saves, self._last = Saves(client), -1
        self._made: List[str] = []
        self._by_policy = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """A run that goes on counts what it has saved before among those to keep."""
        if self.keep is None or _hosts.group().rank != 0:
            return
        self._by_policy = _where.is_reference(self.where) and self._saves.keep_newest(self.where, self.keep)
        if state.global_step and not self._by_policy:
            self._made = [f"{self.where}/{name}" for n, name in _train.numbered(self.where, self._saves._client) if n <= state.global_step]

    def on_save(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Trainer has decided to save."""
        self._save(state, kw)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """After each optimizer step."""
        if self.every and state.global_step % self.every == 0:
            self._save(state, kw)

    def on_train_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Waits until everything is durable."""
        self._saves.wait()

    def _save(self, state: Any, kw: Dict[str, Any]) -> None:
        if state.global_step == self._last:
            return  # both ways asked for this step
        self._last = state.global_step
        optimizer, scheduler, rank = _bare(kw.get("optimizer")), kw.get("lr_scheduler"), _group.world_rank()
        tree: Dict[str, Any] = _train.state_of(kw["model"], [optimizer] if optimizer is not None else [])
        if rank == 0:
            tree["trainer"] = json.dumps(_common(state), sort_keys=True)
        if scheduler is not None:
            tree["scheduler"] = scheduler.state_dict()
        tree["rng"] = {str(rank): _train.random_state()}
        target = f"{self.where}/checkpoint-{state.global_step}"
        self._saves.save(_exact.pack(tree), target, **{"overwrite": True, "step": state.global_step,
                                                           "metrics": _metrics(state), **self._options})
        self._made.append(target)
        while self.keep is not None and not self._by_policy and len(self._made) > self.keep:
            old = self._made.pop(0)
            if rank == 0:
                self._saves.remove(old)


def _bare(optimizer: Any) -> Any:
    """torch's optimizer inside accelerate's."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _metrics(state: Any) -> Dict[str, float]:
    """The newest numbers that Trainer has logged (loss, eval_loss, …), but for those of its own speed, and the epoch."""
    out: Dict[str, float] = {} if state.epoch is None else {"epoch": float(state.epoch)}
    for entry in state.log_history[-_LOGGED:]:
        out.update((k, float(v)) for k, v in entry.items()
                   if isinstance(v, (int, float)) and k not in ("step", "epoch", "total_flos") and not k.endswith(_SPEEDS))
    return out


def _common(state: Any) -> Dict[str, Any]:
    """TrainerState, without what belongs to a rank."""
    d = dataclasses.asdict(state)
    for k in ("is_local_process_zero", "is_world_process_zero"):
        d.pop(k, None)
    return d


def resume(trainer: Any, where: str, *, client: Optional[Client] = None) -> Optional[str]:
    """What to pass as `resume_from_checkpoint`: the trainer will take model, optimizer, scheduler and random numbers from dcpd.

    where: a checkpoint of DcpdCallback, or what was given to it: then its newest one; None if there is none, and training starts anew.
    On any number of ranks. The path returned is a small directory for the Trainer's own state, of use to this trainer only.
    """
    ref = _find(where, client)
    if ref is None:
        return None
    place = _where.resolve(ref, client)
    folder = tempfile.mkdtemp(prefix="dcpd-resume-")
    weakref.finalize(trainer, shutil.rmtree, folder, True)
    with open(os.path.join(folder, _STATE), "w", encoding="utf-8") as f:
        f.write(_train.rest(f"{place}", ["trainer"], place.client)["trainer"])

    def model(*a: Any, **kw: Any) -> None:
        m = kw.get("model") or (a[1] if len(a) > 1 else None) or trainer.model
        _train.restore(m, [], f"{place}", ("model",), place.client)

    def optimizer(*a: Any, **kw: Any) -> None:
        o = _bare(trainer.optimizer)
        _train.restore(trainer.model_wrapped, [o], f"{place}", ("optim",), place.client)
        found = _train.rest(f"{place}", ["scheduler"], place.client)
        if trainer.lr_scheduler is not None and "scheduler" in found:
            trainer.lr_scheduler.load_state_dict(found["scheduler"])

    def numbers(*a: Any, **kw: Any) -> None:
        rank = str(_group.world_rank())
        found = _train.rest(f"{place}", [f"rng.{rank}"], place.client)
        _train.set_random_state(found.get("rng", {}).get(rank))

    for name, ours in (("_load_from_checkpoint", model), ("_load_optimizer_and_scheduler", optimizer), ("_load_rng_state", numbers)):
        _take_over(trainer, name, ours, folder)
    return folder


def _find(where: str, client: Optional[Client]) -> Optional[str]:
    try:
        place = _where.resolve(where, client)
        if place.client.checkpoints.exists(place.object):
            return where
    except errors.NotFound:
        pass
    return _train.newest(where, client)


def _take_over(trainer: Any, name: str, ours: Callable[..., None], folder: str) -> None:
    """The trainer's own method for all other checkpoints, ours for this one."""
    theirs = getattr(trainer, name, None)
    if theirs is None:
        raise errors.ProtocolMismatch(f"this version of transformers has no Trainer.{name}; dcpd.load() the parts by hand")

    def method(checkpoint: Any = None, *a: Any, **kw: Any) -> Any:
        if checkpoint is None:
            checkpoint = kw.get("resume_from_checkpoint", kw.get("checkpoint"))
        return ours(checkpoint, *a, **kw) if checkpoint == folder else theirs(checkpoint, *a, **kw)

    setattr(trainer, name, method)
