"""Element types: PyTorch's names, what safetensors calls them, and how many bytes an element has."""
from __future__ import annotations

from typing import Any, Dict, Optional

# name: (safetensors' name or None, bytes of an element)
TABLE = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "complex128": (None, 16), "complex64": ("C64", 8), "complex32": (None, 4), "bcomplex32": (None, 4),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e4m3fnuz": (None, 1), "float8_e5m2fnuz": (None, 1),
    "float8_e8m0fnu": ("F8_E8M0", 1), "float4_e2m1fn_x2": (None, 1),
}
FROM_SAFETENSORS = {v[0]: k for k, v in TABLE.items() if v[0]}
_ML_DTYPES = {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}


def itemsize(name: str) -> int:
    return TABLE[name][1]


_torch_names: Dict[Any, str] = {}


def torch_name(dtype: Any) -> Optional[str]:
    """The name of a torch.dtype, None if no checkpoint can hold it (quantized types)."""
    return known_to_torch().get(dtype)


def known_to_torch() -> Dict[Any, str]:
    """{torch.dtype: name} of those that this torch has."""
    if not _torch_names:
        import torch

        _torch_names.update({getattr(torch, n): n for n in TABLE if hasattr(torch, n)})
    return _torch_names


def to_torch(name: str) -> Any:
    """The torch.dtype; the raw bytes (uint8) if this torch has none of that name."""
    import torch

    return getattr(torch, name, torch.uint8)


def numpy_name(dtype: Any) -> Optional[str]:
    """The name of a numpy dtype (ml_dtypes' too), None if no checkpoint can hold it."""
    name = str(dtype.name)
    return name if name in TABLE and dtype.kind in "biufcV" else None


def to_numpy(name: str) -> Any:
    """The numpy dtype; what numpy itself lacks comes from ml_dtypes, or as raw bytes of that width where that is not installed."""
    import numpy as np

    if name in _ML_DTYPES:
        try:
            import ml_dtypes  # type: ignore[import-not-found,unused-ignore]

            return np.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError):
            return np.dtype(f"u{itemsize(name)}")
    if name in ("complex32", "bcomplex32"):
        return np.dtype("u4")
    if name == "float4_e2m1fn_x2":
        return np.dtype("u1")
    return np.dtype(name)
