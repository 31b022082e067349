"""XXH3-128 and CRC32 of memory at an address, piece by piece and without the interpreter's lock.

The digests that dcpd stores are of libraries that are there wherever dcpd runs: they are called as they are (ctypes), so that this package
needs no compiled extension. Where libxxhash is not installed the PyPI package `xxhash` serves; without either nothing here can check an
XXH3, and dcpd does it.
"""
from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict, Optional

XXH3, CRC32 = "xxh3", "crc32"


class Digest:
    """One after the other: begin, add pieces, text. Not for two threads."""

    def begin(self) -> None:
        raise NotImplementedError

    def add(self, address: int, n: int) -> None:
        raise NotImplementedError

    def text(self) -> str:
        """Lower-case hex, as in a checkpoint's manifest."""
        raise NotImplementedError


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def _update(lib: Any) -> Any:
    """On x86 the library has one that asks the processor what it can; the other is for any of them, and takes twice as long."""
    return getattr(lib, "XXH3_128bits_update_dispatch", None) or lib.XXH3_128bits_update


class _Native(Digest):
    def __init__(self, lib: Any) -> None:
        self._lib, self._state, self._add = lib, lib.XXH3_createState(), _update(lib)
        if not self._state:
            raise MemoryError("XXH3_createState")

    def begin(self) -> None:
        self._lib.XXH3_128bits_reset(self._state)

    def add(self, address: int, n: int) -> None:
        self._add(self._state, address, n)

    def text(self) -> str:
        h = self._lib.XXH3_128bits_digest(self._state)
        return f"{h.high:016x}{h.low:016x}"

    def __del__(self) -> None:
        self._lib.XXH3_freeState(self._state)


def _bytes_at(address: int, n: int) -> Any:
    return (ctypes.c_char * n).from_address(address)


class _Package(Digest):
    def __init__(self, module: Any) -> None:
        self._hash = module.xxh3_128()

    def begin(self) -> None:
        self._hash.reset()

    def add(self, address: int, n: int) -> None:
        self._hash.update(memoryview(_bytes_at(address, n)))

    def text(self) -> str:
        return str(self._hash.hexdigest())


class _Crc(Digest):
    def __init__(self, update: Callable[[int, int, int], int]) -> None:
        self._update, self._crc = update, 0

    def begin(self) -> None:
        self._crc = 0

    def add(self, address: int, n: int) -> None:
        self._crc = self._update(self._crc, address, n)

    def text(self) -> str:
        return f"{self._crc & 0xffffffff:08x}"


def _xxhash() -> Optional[Callable[[], Digest]]:
    word = ctypes.c_void_p
    try:
        lib = ctypes.CDLL("libxxhash.so.0")
        lib.XXH3_createState.restype, lib.XXH3_createState.argtypes = word, ()
        lib.XXH3_freeState.argtypes = lib.XXH3_128bits_reset.argtypes = (word,)
        _update(lib).argtypes = (word, word, ctypes.c_size_t)
        lib.XXH3_128bits_digest.argtypes, lib.XXH3_128bits_digest.restype = (word,), _Hash128
        return lambda: _Native(lib)
    except (OSError, AttributeError):  # not there, or older than 0.8
        pass
    try:
        import xxhash  # type: ignore[import-not-found,unused-ignore]

        return (lambda: _Package(xxhash)) if hasattr(xxhash, "xxh3_128") else None
    except ImportError:
        return None


def _crc32() -> Callable[[], Digest]:
    for name, function, size in (("libdeflate.so.0", "libdeflate_crc32", ctypes.c_size_t),
                                 ("libisal.so.2", "crc32_gzip_refl", ctypes.c_uint64)):
        try:
            call = getattr(ctypes.CDLL(name), function)
        except (OSError, AttributeError):
            continue
        call.argtypes, call.restype = (ctypes.c_uint32, ctypes.c_void_p, size), ctypes.c_uint32
        return lambda: _Crc(call)
    import zlib

    return lambda: _Crc(lambda crc, address, n: zlib.crc32(_bytes_at(address, n), crc))


_found: Dict[str, Optional[Callable[[], Digest]]] = {}


def new(kind: str) -> Optional[Digest]:
    """XXH3 or CRC32; None where it cannot be computed here."""
    if kind not in _found:
        _found[kind] = _xxhash() if kind == XXH3 else _crc32() if kind == CRC32 else None
    make = _found[kind]
    return None if make is None else make()
