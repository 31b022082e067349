"""dcpd under torch.distributed.checkpoint: the same calls, the same files, written and read by dcpd.

    from dcpd.torch import StorageWriter, StorageReader
    torch.distributed.checkpoint.save(sd, storage_writer=StorageWriter("main:run1/step-100"))    # a directory path works as well
    torch.distributed.checkpoint.load(sd, storage_reader=StorageReader("main:run1/step-100"))

`install()` puts both where a bare `save(sd, checkpoint_id=…)` picks its classes. PyTorch 2.3 to 2.15. Importing connects to nothing and
starts no thread.
"""
from __future__ import annotations

from ._install import install, uninstall
from ._optim import load_sharded_optimizer_state_dict
from ._reader import StorageReader
from ._writer import StorageWriter

__all__ = ["StorageWriter", "StorageReader", "install", "uninstall", "load_sharded_optimizer_state_dict"]
