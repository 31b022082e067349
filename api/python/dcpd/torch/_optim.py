"""load_sharded_optimizer_state_dict with dcpd's reader: PyTorch's own, which takes any reader."""
from __future__ import annotations

from typing import Any


def load_sharded_optimizer_state_dict(model_state_dict: Any, optimizer_key: str, storage_reader: Any, planner: Any = None) -> Any:
    """The optimizer's state of a checkpoint, sharded as the model is. Arguments and result are those of
    torch.distributed.checkpoint.load_sharded_optimizer_state_dict; storage_reader may also be a path or a reference."""
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as theirs

    from ._reader import StorageReader

    reader = storage_reader if hasattr(storage_reader, "read_metadata") else StorageReader(storage_reader)
    return theirs(model_state_dict, optimizer_key, reader, planner)
