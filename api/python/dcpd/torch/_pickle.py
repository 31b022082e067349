"""`.metadata` as every PyTorch from 2.3 on unpickles it, whatever version of PyTorch and Python writes it.

TensorProperties carries strides since 2.9, which older versions refuse: they are left out, as they are only ever a hint. Paths become
text: Python 3.13 pickles them under a module that earlier ones lack, and another operating system cannot make them.
"""
from __future__ import annotations

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
                import copyreg

                return copyreg.__newobj__, (type(x),), state[:5]
        return NotImplemented


def dumps(metadata: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()
