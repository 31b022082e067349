"""Values that are no tensors: how they travel, and what comes back without running anybody's code.

None, bool, int, finite float, str and lists of them travel as JSON, bytes as bytes. Everything else is pickled here (by torch.save
where torch is loaded, so that tensors inside go along) and never unpickled by the daemon. Reading with `weights_only=True` builds
plain containers and numbers (tuples, sets, OrderedDict, torch.Size, tensors, numpy's numbers and arrays of them …); a value of another
class comes as `Opaque`.
"""
from __future__ import annotations

import base64
import io
import pickle
import pickletools
import sys
import zipfile
from typing import Any, Dict, List, Mapping, Optional

from . import _plain_pickle, _tree, errors

_ZIP = b"PK\x03\x04"
_MAX_NAMES = 64


class Opaque:
    """A pickled value of a class that was not unpickled.

    class_name: "module.Class" of what it is, as far as it can be said without running it; bytes: the pickle, or what torch.save
    made. `unpickle()` gives the object, and runs whatever code the pickle holds: only for bytes you trust.
    """

    __slots__ = ("class_name", "bytes")

    def __init__(self, class_name: str, data: bytes) -> None:
        self.class_name, self.bytes = class_name, data

    def unpickle(self) -> Any:
        return unpickle(self.bytes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.bytes == other.bytes

    def __hash__(self) -> int:
        return hash(self.bytes)

    def __repr__(self) -> str:
        return f"<dcpd.Opaque {self.class_name}, {len(self.bytes)} bytes>"


def encode(x: Any, fqn: str = "") -> Dict[str, Any]:
    """A leaf as an image's `values` holds it: {"json": …}, {"bytes": base64} or {"pickle": base64}."""
    if _tree.plain(x):
        return {"json": x}
    if type(x) is bytes:
        return {"bytes": base64.b64encode(x).decode()}
    if isinstance(x, Opaque):
        return {"pickle": base64.b64encode(x.bytes).decode()}
    try:
        return {"pickle": base64.b64encode(_dump(x)).decode()}
    except Exception as e:
        raise errors.StateDictMismatch(f"{fqn}: a {type(x).__module__}.{type(x).__qualname__} cannot be pickled: {e}", fqn=fqn) from e


def _dump(x: Any) -> bytes:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "save"):
        b = io.BytesIO()
        torch.save(x, b)
        return b.getvalue()
    return pickle.dumps(x, protocol=2)


def decode_all(found: Mapping[str, Mapping[str, Any]], weights_only: bool = True) -> Dict[str, Any]:
    """Leaves by key, with one warning for all that stay Opaque, which names the caller's line."""
    out = {k: _decode(v, k, weights_only) for k, v in found.items()}
    _warn({k: v.class_name for k, v in out.items() if isinstance(v, Opaque)})
    return out


def _warn(opaque: Mapping[str, str]) -> None:
    """opaque: class names by key."""
    if not opaque:
        return
    names = _tree.listing([f"{k}: a {c}" for k, c in opaque.items()], 5)
    errors.warn(f"{names} {'is' if len(opaque) == 1 else 'are'} left as dcpd.Opaque; weights_only=False unpickles "
                + ("it" if len(opaque) == 1 else "them"))


def decode(v: Mapping[str, Any], fqn: str = "", weights_only: bool = True) -> Any:
    """The leaf again. weights_only: classes that are not plain data come as Opaque, with a warning; False unpickles in this process."""
    return decode_all({fqn: v}, weights_only)[fqn]


def _decode(v: Mapping[str, Any], fqn: str, weights_only: bool) -> Any:
    if "json" in v:
        return v["json"]
    if "bytes" in v:
        return base64.b64decode(v["bytes"])
    if "pickle" not in v:
        raise errors.CheckpointDamaged(f"{fqn}: a value of no known kind ({', '.join(v)})", fqn=fqn)
    return _from_pickle(base64.b64decode(v["pickle"]), fqn, weights_only)


def from_pickle(data: bytes, fqn: str = "", weights_only: bool = True) -> Any:
    """What a pickle or a torch.save archive holds; see decode."""
    x = _from_pickle(data, fqn, weights_only)
    _warn({fqn: x.class_name} if isinstance(x, Opaque) else {})
    return x


def _from_pickle(data: bytes, fqn: str, weights_only: bool) -> Any:
    if not weights_only:
        try:
            return unpickle(data)
        except Exception as e:
            raise errors.CheckpointDamaged(f"{fqn}: cannot be unpickled: {type(e).__name__}: {e}", fqn=fqn) from e
    try:
        return _safe(data)
    except Exception:  # whatever a hostile or foreign pickle makes of it: it stays closed
        return Opaque(class_of(data) or "?", data)


def unpickle(data: bytes) -> Any:
    """Runs the pickle, in this process. Only for bytes you trust."""
    if data[:4] == _ZIP:
        import torch

        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return pickle.loads(data)


def _safe(data: bytes) -> Any:
    if data[:4] != _ZIP:
        return _plain_pickle.loads(data)
    inner = _record(data)
    try:
        return _plain_pickle.loads(inner or b"")
    except Exception:
        import torch

        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _record(data: bytes) -> Optional[bytes]:
    """data.pkl of a torch.save archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            for i in z.infolist():
                if i.filename.endswith("/data.pkl") and i.file_size <= 64 << 20:
                    return z.read(i)
    except (zipfile.BadZipFile, OSError, ValueError):
        pass
    return None


def class_of(data: bytes) -> Optional[str]:
    """The class that a pickle makes at the top, read from its opcodes; nothing is run."""
    found = _first_class(data)
    return "numpy.number" if found in ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar") else found


def _first_class(data: bytes) -> Optional[str]:
    pickled = _record(data) if data[:4] == _ZIP else data
    if not pickled:
        return None
    first: Optional[str] = None
    strings: List[str] = []
    try:
        for op, arg, _ in pickletools.genops(pickled):
            if op.name == "GLOBAL":
                name = ".".join(str(arg).split(" "))
            elif op.name == "STACK_GLOBAL" and len(strings) >= 2:
                name = f"{strings[-2]}.{strings[-1]}"
            else:
                if isinstance(arg, str):
                    strings = [*strings[-_MAX_NAMES:], arg]
                continue
            if name not in ("copyreg._reconstructor", "copy_reg._reconstructor", "copyreg.__newobj__", "builtins.object",
                            "__builtin__.object", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
                first = name
                break
    except Exception:
        return first
    return first
