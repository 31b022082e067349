"""Device memory that this process and a daemon share: which allocations addresses lie in, and their handles (api/device-memory.md); and
memory of the daemon's that is mapped here (api/engines.md).

The driver's library is the one that the process uses already: nothing that hands memory over makes a context, allocates, or waits for a
stream. Who maps uses the device's primary context, which is torch's, too.
"""
from __future__ import annotations

import base64
import bisect
import contextlib
import ctypes
import json
import os
import socket
import struct
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from . import _dtypes, _http, errors

# (place in the slot, address on the device, bytes there), or with a cast also (dtype in the slot, dtype on the device)
Piece = Union[Tuple[int, int, int], Tuple[int, int, int, str, str]]

_DEVICE, _LEGACY, _MAPPING_BYTES, _MAPPING_BASE = 9, 10, 18, 19  # CUpointer_attribute
_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ
_BATCH = 250
_U64 = ctypes.c_uint64
_ROW = struct.Struct("<3Q2L")


class Driver:
    """The calls of libcuda that naming and mapping memory takes. Raises RequestRefused with the driver's error where it refuses one, and
    what that means: `refusal`."""

    def __init__(self, refusal: str = "device memory cannot be handed over") -> None:
        self._refusal = refusal
        try:
            self._lib: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise errors.RequestRefused(f"{refusal}: {e}") from None

    def __call__(self, name: str, *args: Any) -> None:
        f = getattr(self._lib, name, None)
        r = 0 if f is None else f(*args)
        if f is None or r:
            why = f"error {r}" if r else "the driver is too old"
            raise errors.RequestRefused(f"{self._refusal}: {name}: {why}")

    def _attribute(self, what: int, address: int) -> int:
        out = _U64()
        self("cuPointerGetAttribute", ctypes.byref(out), what, _U64(address))
        return out.value

    def uuid(self, address: int) -> str:
        """Of the GPU, as nvidia-smi prints it. Processes number GPUs as they like."""
        return self.uuid_of(self._attribute(_DEVICE, address) & 0xFFFFFFFF)

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def uuid_of(self, ordinal: int) -> str:
        """Of the GPU with this number here, torch's too."""
        raw = (ctypes.c_ubyte * 16)()
        self("cuInit", 0)
        self("cuDeviceGetUuid_v2", ctypes.byref(raw), self._device(ordinal))
        text = bytes(raw).hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def is_legacy(self, address: int) -> bool:
        return bool(self._attribute(_LEGACY, address) & 0xFF)

    def allocation(self, address: int) -> Tuple[int, int]:
        """Where the allocation that an address lies in begins, and its bytes; of VMM memory: the mapping of one allocation."""
        if not self.is_legacy(address):
            return self._attribute(_MAPPING_BASE, address), self._attribute(_MAPPING_BYTES, address)
        base, size = _U64(), ctypes.c_size_t()
        self("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), _U64(address))
        return base.value, size.value

    def legacy_handle(self, base: int) -> str:
        handle = (ctypes.c_char * 64)()
        self("cuIpcGetMemHandle", ctypes.byref(handle), _U64(base))
        return base64.b64encode(handle.raw).decode()

    def descriptor(self, base: int) -> int:
        """Of the VMM allocation that is mapped at `base`: the caller's to close."""
        allocation, fd = _U64(), ctypes.c_int(-1)
        self("cuMemRetainAllocationHandle", ctypes.byref(allocation), ctypes.c_void_p(base))
        try:
            self("cuMemExportToShareableHandle", ctypes.byref(fd), allocation, _FD, _U64(0))
        finally:
            self("cuMemRelease", allocation)
        return fd.value


    def retain(self, ordinal: int) -> ctypes.c_void_p:
        """The device's primary context, which release() lets go."""
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
        return context

    def release(self, ordinal: int) -> None:
        self("cuDevicePrimaryCtxRelease_v2", self._device(ordinal))

    @contextlib.contextmanager
    def _inside(self, context: ctypes.c_void_p) -> Iterator[None]:
        self("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def map(self, fd: int, ordinal: int, size: int) -> int:
        """The memory of a descriptor, which stays the caller's, read-only: its address."""
        n, zero, allocation, at = ctypes.c_size_t(size), _U64(0), _U64(), _U64()
        access = (ctypes.c_int * 3)(1, self._device(ordinal).value, _READ)
        undo: List[Callable[[], None]] = []
        self("cuMemImportFromShareableHandle", ctypes.byref(allocation), ctypes.c_void_p(fd), _FD)
        try:
            self("cuMemAddressReserve", ctypes.byref(at), n, ctypes.c_size_t(0), zero, zero)
            undo.append(lambda: self("cuMemAddressFree", at, n))
            self("cuMemMap", at, n, ctypes.c_size_t(0), allocation, zero)
            undo.append(lambda: self("cuMemUnmap", at, n))
            self("cuMemSetAccess", at, n, access, ctypes.c_size_t(1))
        except BaseException:
            while undo:
                undo.pop()()
            raise
        finally:
            self("cuMemRelease", allocation)  # the mapping has a reference of its own
        return at.value

    def synchronize(self, context: ctypes.c_void_p) -> bool:
        """False: the driver does not wait. Raises where there is no context any more."""
        with self._inside(context):
            try:
                self("cuCtxSynchronize")
            except errors.RequestRefused:
                return False
        return True

    def unmap(self, address: int, size: int) -> None:
        """Of what nothing reads any more, on any stream: synchronize() first."""
        self("cuMemUnmap", _U64(address), ctypes.c_size_t(size))
        self("cuMemAddressFree", _U64(address), ctypes.c_size_t(size))

    def read(self, context: ctypes.c_void_p, address: int, size: int) -> bytes:
        out = (ctypes.c_char * size)()
        with self._inside(context):
            self("cuMemcpyDtoH_v2", out, _U64(address), ctypes.c_size_t(size))
        return out.raw


class HandOver:
    """Pieces of device memory, as a request names them: `device`, `allocations`, `rows` of the table, `casts`, and `fds`, which close()
    closes."""

    def __init__(self, driver: Driver, pieces: Sequence[Piece]) -> None:
        self.device, self.rows = driver.uuid(pieces[0][1]), bytearray()
        self.allocations: List[Dict[str, Any]] = []
        self.fds: List[int] = []
        self.casts: List[Dict[str, str]] = []
        self._driver = driver
        self._begins: List[int] = []                      # of the allocations known so far, in order of address,
        self._known: List[Tuple[int, int]] = []           # with their bytes and their index in `allocations`
        try:
            for p in pieces:
                self._add(p[0], p[1], p[2], {"slot": p[3], "device": p[4]} if len(p) == 5 else None)
        except BaseException:
            self.close()
            raise

    def _add(self, place: int, address: int, size: int, cast: Optional[Dict[str, str]]) -> None:
        slot = device = 1
        if cast is not None:
            slot, device = _dtypes.itemsize(cast["slot"]), _dtypes.itemsize(cast["device"])
            if cast not in self.casts:
                self.casts.append(cast)
        number = 0 if cast is None else 1 + self.casts.index(cast)
        while size:
            k = bisect.bisect_right(self._begins, address) - 1
            if k < 0 or address >= self._begins[k] + self._known[k][0]:
                k = self._name(*self._driver.allocation(address))
            base, (room, index) = self._begins[k], self._known[k]
            n = min(size, base + room - address)  # a tensor in an expandable segment may lie in several allocations
            self.rows += _ROW.pack(place, n // device * slot, address - base, index, number)
            place, address, size = place + n // device * slot, address + n, size - n

    def _name(self, base: int, room: int) -> int:
        """Takes an allocation up; its place among those known."""
        one: Dict[str, Any] = {"bytes": room}
        if self._driver.is_legacy(base):
            one["handle"] = self._driver.legacy_handle(base)
        else:
            self.fds.append(self._driver.descriptor(base))
            one["descriptor"] = len(self.fds) - 1
        k = bisect.bisect_left(self._begins, base)
        self._begins.insert(k, base)
        self._known.insert(k, (room, len(self.allocations)))
        self.allocations.append(one)
        return k

    @property
    def count(self) -> int:
        return len(self.rows) // _ROW.size

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Descriptors:
    """A connection over which descriptors are handed over, or received: they are the daemon's, too, until close(). `token` names them."""

    def __init__(self, path: str, fds: Sequence[int], timeout: float) -> None:
        connection = _http._unix_connection(path, timeout)
        connection.request("GET", "/v1/descriptors", headers={"Connection": "Upgrade", "Upgrade": "dcpd-descriptors"})
        self._socket: socket.socket = connection.sock
        try:
            answer = connection.response_class(self._socket, method="GET")
            answer.begin()
            if answer.status == 503:
                raise errors.from_problem(json.loads(answer.read()))
            if answer.status != 101:
                raise errors.RequestRefused(f"descriptors are not taken: HTTP {answer.status}")
            line = answer.fp.readline()
            if not line:
                raise errors.Busy("dcpd takes no more descriptors of this user, or is ending", code="busy")
            self.token = str(json.loads(line)["descriptors"])
            for i in range(0, len(fds), _BATCH):
                socket.send_fds(self._socket, [b"."], fds[i:i + _BATCH])
        except BaseException:
            self.close()
            raise

    def receive(self) -> int:
        """The descriptor that a request has asked for; the caller's."""
        fds = socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]
        if not fds:
            raise errors.ConnectionLost("dcpd has ended before it gave a descriptor", code="descriptors")
        return fds[0]

    def close(self) -> None:
        self._socket.close()
