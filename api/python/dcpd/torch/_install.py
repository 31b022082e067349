"""install(): the drop-ins where `save(sd, checkpoint_id=…)` and `load(sd, checkpoint_id=…)` look for their classes."""
from __future__ import annotations

from typing import Any, Dict, Tuple

_before: Dict[Tuple[str, str], Any] = {}


def install() -> None:
    """A bare `torch.distributed.checkpoint.save(sd, checkpoint_id=…)` goes through dcpd from now on, and `load`. Twice is fine."""
    from torch.distributed.checkpoint import _storage_utils as utils
    from torch.distributed.checkpoint import filesystem

    from ._reader import StorageReader
    from ._writer import StorageWriter

    for name, ours in (("FileSystemReader", StorageReader), ("FileSystemWriter", StorageWriter)):
        # 2.3 imports them anew in every call, from the module that has them
        module = utils if hasattr(utils, name) else filesystem
        if (module.__name__, name) not in _before:
            _before[(module.__name__, name)] = getattr(module, name)
            setattr(module, name, ours)


def uninstall() -> None:
    """PyTorch's own classes are used again."""
    import sys

    while _before:
        (module, name), was = _before.popitem()
        setattr(sys.modules[module], name, was)
