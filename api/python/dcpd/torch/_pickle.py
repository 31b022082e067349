"""`.metadata` as every PyTorch from 2.3 on unpickles it, whatever version of PyTorch and Python writes it.

TensorProperties has gained strides, which older versions refuse: they are left out, as they are only ever a hint. StorageMeta is a class
that 2.3 lacks: its attributes go into an object of one that all have, and loads() makes a StorageMeta of it where there is one. Paths
become text: Python 3.13 pickles them under a module that earlier ones lack, and another operating system cannot make them.
"""
from __future__ import annotations

import copy
import copyreg
import io
import pickle
from pathlib import PurePath
from typing import Any


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=4)
        from torch.distributed.checkpoint.metadata import TensorProperties

        self._properties_class = TensorProperties

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, PurePath):
            return str, (str(x),)
        if type(x) is self._properties_class:
            state = x.__getstate__()
            if isinstance(state, tuple) and len(state) > 5:
                return copyreg.__newobj__, (type(x),), state[:5]  # type: ignore[attr-defined]
        return NotImplemented


def dumps(metadata: Any) -> bytes:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    if getattr(metadata, "storage_meta", None) is not None:
        carrier = BytesStorageMetadata()
        vars(carrier).update(vars(metadata.storage_meta))
        metadata = copy.copy(metadata)
        metadata.storage_meta = carrier
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


def loads(data: bytes) -> Any:
    """The Metadata of a checkpoint. As PyTorch does it: they are Python objects, of any class that a planner has chosen."""
    from torch.distributed.checkpoint import metadata

    md = pickle.loads(data)
    meta = getattr(metadata, "StorageMeta", None)
    held = getattr(md, "storage_meta", None)
    if meta is not None and not isinstance(held, meta):
        md.storage_meta = meta()
        for k, v in vars(held).items() if held is not None else ():
            setattr(md.storage_meta, k, v)
    return md
