"""Lightning on dcpd: a checkpoint plugin.

    trainer = Trainer(plugins=[dcpd.lightning.DcpdCheckpointIO()], callbacks=[ModelCheckpoint(dirpath="/data/ckpt/run1")])
    trainer.fit(model, ckpt_path="/data/ckpt/run1/last.ckpt")

Training goes on when the copy into shared memory is done. Checkpoints are DCP directories under the names that Lightning chooses; a name
under a storage root goes to that daemon, and `ckpt_path` may be a reference ("main:run1/last.ckpt").
"""
from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Dict, Optional

import torch

from . import _exact, _load, _where
from ._saves import Saves, log
from .client import Client

if "lightning.fabric" not in sys.modules and ("lightning_fabric" in sys.modules or "pytorch_lightning" in sys.modules):
    from lightning_fabric.plugins import CheckpointIO
else:
    try:
        from lightning.fabric.plugins import CheckpointIO  # type: ignore[assignment,unused-ignore]
    except ImportError:
        from lightning_fabric.plugins import CheckpointIO


def _known(checkpoint: Dict[str, Any]) -> Dict[str, Any]:
    """The step and the metrics that Lightning's checkpoint tells: its epoch, and what each ModelCheckpoint monitors."""
    out: Dict[str, Any] = {}
    metrics: Dict[str, float] = {}
    if isinstance(checkpoint.get("global_step"), int):
        out["step"] = checkpoint["global_step"]
    if isinstance(checkpoint.get("epoch"), int):
        metrics["epoch"] = float(checkpoint["epoch"])
    for state in (checkpoint.get("callbacks") or {}).values():
        monitor, score = (state.get("monitor"), state.get("current_score")) if isinstance(state, dict) else (None, None)
        if isinstance(monitor, str) and score is not None:
            metrics[monitor] = float(score)
    return {**out, "metrics": metrics}


class DcpdCheckpointIO(CheckpointIO):  # type: ignore[misc,unused-ignore]
    """Saves, loads and removes Lightning's checkpoints by dcpd.

    wait: save_checkpoint returns when the checkpoint is durable, not when the copy is done. options: as for `dcpd.async_save`; an
    existing checkpoint of the name is replaced, as Lightning expects. removes: whether what ModelCheckpoint wants to remove is removed;
    None: unless a retention policy (`dcpctl policies`) is for the run, which then decides alone. For strategies whose rank 0 saves (one
    device, DDP); those that shard (FSDP, ModelParallel) write distributed checkpoints by themselves.
    """

    def __init__(self, *, wait: bool = False, removes: Optional[bool] = None, client: Optional[Client] = None, **options: Any) -> None:
        self._wait, self._removes, self._options, self._saves = wait, removes, options, Saves(client)

    def save_checkpoint(self, checkpoint: Dict[str, Any], path: _where.Target, storage_options: Optional[Any] = None) -> None:
        """storage_options: a dict that goes before the options of the plugin. Raises what an earlier save failed with."""
        if not _where.is_reference(path):  # save_last="link" puts its link there at once
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        f = self._saves.save(_exact.pack(checkpoint), path, **{"overwrite": True, "no_dist": True, **_known(checkpoint), **self._options,
                                                              **(storage_options or {})})
        if self._wait:
            f.result()

    def load_checkpoint(self, path: _where.Target, map_location: Optional[Any] = None,
                        weights_only: Optional[bool] = None) -> Dict[str, Any]:
        """The checkpoint as it was saved; what is still being saved to that name is waited for. Files that Lightning itself wrote load too.

        map_location: a device; functions are for storages of torch.save and mean the CPU here. weights_only: None is True.
        """
        if not _where.is_reference(path) and os.path.isfile(path):  # what Lightning itself wrote
            return dict(torch.load(path, map_location=map_location, weights_only=weights_only is not False))
        place = self._saves.settle(path)
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        got = _load.load(f"{place}", device=device, weights_only=weights_only is not False, no_dist=True, client=place.client)
        return _exact.unpack(got)

    def remove_checkpoint(self, path: _where.Target) -> None:
        """Removes it once all saves before are durable, unless a policy decides (`removes`); returns at once."""
        if not _where.is_reference(path) and (os.path.islink(path) or os.path.isfile(path)):
            os.remove(path)
            return
        policy = self._saves.policy_of(path) if self._removes is None else None
        if policy or self._removes is False:
            log.info("dcpd: %s stays as far as Lightning goes: %s", path, f"the policy {policy} decides" if policy else "removes=False")
        else:
            self._saves.remove(path)

    def teardown(self) -> None:
        """Waits until everything is durable. Raises what a save failed with."""
        self._saves.wait()
