"""`.metadata` as every PyTorch from 2.3 on unpickles it, whatever version of PyTorch and Python writes it.

TensorProperties has gained strides, which older versions refuse: they are left out, as they are only ever a hint. StorageMeta is a class
that 2.3 lacks: what is stored says "the class of that name in the module, or else BytesStorageMetadata, with these attributes". Paths
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
            state = x.__getstate__()  # type: ignore[no-untyped-call,unused-ignore]
            if isinstance(state, tuple) and len(state) > 5:
                return copyreg.__newobj__, (type(x),), state[:5]  # type: ignore[attr-defined]
        return NotImplemented


def _text(s: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes((len(s),)) + s.encode()


def _storage_meta(held: Any) -> bytes:
    """Opcodes that give the metadata on the stack their storage_meta: no function of pickle's can say "if there is one"."""
    module = "torch.distributed.checkpoint.metadata"
    state = io.BytesIO()
    pickler = _Pickler(state)
    pickler.fast = True  # without a memo: this one goes on where another pickle ends
    pickler.dump(vars(held))
    return b"".join((
        pickle.EMPTY_DICT, _text("storage_meta"),
        _text(module), _text("__dict__.get"), pickle.STACK_GLOBAL, _text("StorageMeta"),
        _text(module), _text("BytesStorageMetadata"), pickle.STACK_GLOBAL, pickle.TUPLE2, pickle.REDUCE,
        pickle.EMPTY_TUPLE, pickle.REDUCE, state.getvalue()[:-1], pickle.BUILD, pickle.SETITEM, pickle.BUILD))


def dumps(metadata: Any) -> bytes:
    from torch.distributed.checkpoint import metadata as classes

    held, more = getattr(metadata, "storage_meta", None), b""
    if held is not None and type(held) is getattr(classes, "StorageMeta", None):
        metadata = copy.copy(metadata)
        metadata.storage_meta, more = None, _storage_meta(held)
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()[:-1] + more + pickle.STOP


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
