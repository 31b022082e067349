"""Reads pickles of plain data from files that nobody vouches for: containers, numbers (numpy's, and arrays of them too), dates.

Not to run anybody's code is half of it: with a few builtins a pickle of some bytes can also ask for more memory or time than there is
(list(range(1 << 40)), the text of lists of lists of one list, a Fraction of "1e999999999", a memo of four billion places). So only what
real pickles call is called, with such arguments as they give, and all that is copied counts against the pickle's own length.

This stands on the unpickler that is written in Python: that of C keeps its memo in an array as long as any number in the pickle says, and
does not let an array take the place of what was begun.
"""
from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import math
import pickle
import re
from typing import Any, Callable, ClassVar, Dict, List, Tuple

ROOM = 1 << 16    # elements or bytes that may be copied besides
COPIES = 8        # … per byte of the pickle
_NDIM_MAX = 32
_OLD = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy.core.multiarray": "numpy._core.multiarray",
        "numpy.core.numeric": "numpy._core.numeric"}
_NUMBER = re.compile(r"[biufc]\d{1,2}")
_FRACTION = re.compile(r"-?\d{1,1000}(/\d{1,1000})?")
_HELD = frozenset((list, tuple, dict, set, frozenset, str, bytes, collections.OrderedDict))


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"{what} is not read as plain data")


class _Dtype:
    """What a pickled numpy.dtype says, of numbers only; the real one would take anything into its C code."""

    def __init__(self, code: Any, align: Any = False, copy: Any = True) -> None:
        if not isinstance(code, str) or not _NUMBER.fullmatch(code):
            raise _refused("numpy.dtype")
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < 5 or state[1] not in ("<", ">", "|", "=") or any(x is not None for x in state[2:5]):
            raise _refused("numpy.dtype")
        self.code = state[1] + self.code


class _Making:
    """An array as a pickle begins it: empty, until its state follows."""


class _Memo(Dict[int, Any]):
    def __getitem__(self, i: int) -> Any:
        x = super().__getitem__(i)
        if type(x) is _Making:
            raise _refused("an array in the making")
        return x


_ARRAY = object()
_SAME = frozenset((bool, int, float, str))  # classes that stand for themselves in a pickle ({"dtype": float}), and are not called
_MADE: Dict[Tuple[str, str], Any] = {
    ("builtins", "list"): list, ("builtins", "dict"): dict, ("builtins", "tuple"): tuple, ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset, ("builtins", "bytes"): bytes, ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex, ("builtins", "slice"): slice, ("builtins", "range"): range, ("builtins", "xrange"): range,
    ("collections", "OrderedDict"): collections.OrderedDict, ("collections", "Counter"): collections.Counter,
    ("collections", "deque"): collections.deque, ("datetime", "datetime"): datetime.datetime, ("datetime", "date"): datetime.date,
    ("datetime", "timedelta"): datetime.timedelta, ("fractions", "Fraction"): fractions.Fraction,
    ("decimal", "Decimal"): decimal.Decimal, ("numpy", "dtype"): _Dtype,
}
_COPIERS = frozenset((list, dict, tuple, set, frozenset, collections.OrderedDict, collections.Counter))
_NUMBERS = frozenset((complex, datetime.datetime, datetime.date, datetime.timedelta, decimal.Decimal, slice, range, _Dtype))


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[Dict[int, Callable[..., Any]]] = {k: f for k, f in pickle._Unpickler.dispatch.items()
                                                         if k not in (pickle.DUP[0], pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0])}
    stack: List[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.memo = _Memo()
        self._left = ROOM + COPIES * len(data)
        self._open = 0                       # arrays that are begun and not made

    def load(self) -> Any:
        x = super().load()
        if self._open:
            raise _refused("an array in the making")
        return x

    def find_class(self, module: str, name: str) -> Any:
        key = (_OLD.get(module, module), name)
        if key in _MADE:
            return _MADE[key]
        if key == ("torch", "Size"):
            import torch

            return torch.Size
        own = {("numpy._core.multiarray", "scalar"): self._scalar, ("numpy._core.multiarray", "_reconstruct"): self._begin,
               ("numpy._core.numeric", "_frombuffer"): self._from_buffer, ("numpy", "ndarray"): _ARRAY, ("_codecs", "encode"): self._encode,
               ("builtins", "long"): int, ("builtins", "unicode"): str, **{("builtins", k.__name__): k for k in _SAME}}
        if key not in own:
            raise _refused(f"{module}.{name}")
        return own[key]

    # ---- calls

    def _call(self, f: Any, args: Any) -> Any:
        if type(args) is not tuple:
            raise _refused("a call without arguments")
        if getattr(f, "__self__", None) is self or f in _NUMBERS:
            if any(type(a) in _HELD and type(a) not in (str, bytes, tuple) for a in args):
                raise _refused("such a call")
        elif f in _COPIERS or getattr(f, "__module__", "") == "torch":
            if len(args) > 1 or any(type(a) not in _HELD for a in args):
                raise _refused(f"such a {f.__name__}")
        elif not self._special(f, args):
            raise _refused(f"a call of {f!r}")
        self._spend(args)
        return f(*args)

    def _special(self, f: Any, args: Tuple[Any, ...]) -> bool:
        kinds = tuple(map(type, args))
        if f is bytes:
            return not args                  # how protocol 2 writes none
        if f is bytearray:
            return kinds in ((), (bytes,)) or kinds == (str, str)
        if f is collections.deque:
            return kinds in ((), (list,), (tuple,)) or (len(args) == 2 and kinds[0] in (list, tuple) and kinds[1] in (int, type(None)))
        if f is fractions.Fraction:
            return kinds == (int, int) or (kinds == (str,) and _FRACTION.fullmatch(args[0]) is not None)
        return False

    def _spend(self, xs: Any) -> None:
        for x in xs:
            if type(x) in _HELD:
                self._left -= len(x)
        if self._left < 0:
            raise _refused("so much made of so little")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        raise _refused("a call by names")

    def _instantiate(self, klass: Any, args: Any) -> None:
        self.append(self._call(klass, tuple(args)))  # type: ignore[attr-defined]

    def load_build(self) -> None:
        state, x = self.stack.pop(), self.stack[-1]
        if type(x) is _Dtype:
            x.__setstate__(state)
        elif type(x) is _Making and type(state) is tuple and len(state) == 5:
            array = self.stack[-1] = self._array(*state[1:])
            self._open -= 1
            for i, known in self.memo.items():
                if known is x:
                    self.memo[i] = array
        elif type(x) is collections.OrderedDict and type(state) is dict:  # the _metadata of a module's state dict
            self._spend((state,))
            x.__dict__.update(state)
        else:
            raise _refused("such a state")

    def load_bytearray8(self) -> None:
        n = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        self.append(bytearray(self.read(n)))  # type: ignore[attr-defined]

    for _op, _f in ((pickle.REDUCE, load_reduce), (pickle.NEWOBJ, load_newobj), (pickle.NEWOBJ_EX, load_newobj_ex),
                    (pickle.BUILD, load_build), (pickle.BYTEARRAY8, load_bytearray8)):
        dispatch[_op[0]] = _f

    # ---- what is called in place of the real thing

    def _encode(self, text: Any, encoding: Any = "") -> bytes:
        """How protocol 2 writes bytes."""
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            raise _refused("such an encoding")
        return text.encode(encoding)

    def _scalar(self, dtype: Any, data: Any) -> Any:
        """A numpy number, such as the best loss so far."""
        return self._array((), dtype, False, data)[()]

    def _begin(self, kind: Any, shape: Any, code: Any) -> _Making:
        if kind is not _ARRAY:
            raise _refused("a subclass of numpy.ndarray")
        self._open += 1
        return _Making()

    def _from_buffer(self, data: Any, dtype: Any, shape: Any, order: Any) -> Any:
        """How protocol 5 writes an array."""
        return self._array(shape, dtype, order == "F", data)

    def _array(self, shape: Any, dtype: Any, fortran: Any, data: Any) -> Any:
        import numpy as np

        if type(dtype) is not _Dtype or type(data) not in (bytes, bytearray) or type(shape) is not tuple or len(shape) > _NDIM_MAX \
                or any(type(n) is not int or n < 0 for n in shape):
            raise _refused("such an array")
        real = np.dtype(dtype.code)
        if math.prod(shape) * real.itemsize != len(data):
            raise _refused("an array of another size than its bytes")
        self._left -= len(data)
        self._spend(())
        flat = np.frombuffer(data, real) if data else np.empty(0, real)
        return flat.reshape(shape, order="F" if fortran else "C").astype(real.newbyteorder("="))


def loads(data: bytes) -> Any:
    """What the pickle holds. Raises some exception, whichever, if it is not plain data or is damaged."""
    return _Unpickler(data).load()
