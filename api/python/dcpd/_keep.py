"""keep, attach: weights that outlive an inference engine, in shared memory and in a GPU's memory, and how an engine maps them.

    dcpd.keep("main:run1/step-100", "serve", device="cuda:0")    # in /dev/shm, and on the GPU
    weights = dcpd.attach("shm:serve", device="cuda:0")          # {FQN: tensor}: the bytes that are there, without a copy

An image on a GPU is one VMM allocation of dcpd's, whose descriptor comes over the Unix socket. It is mapped read-only, and unmapped with
the last tensor over it; until then the connection stays open, by which the daemon knows that the image is in use (api/engines.md).
"""
from __future__ import annotations

import contextlib
import os
import struct
import time
import weakref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union, overload

from . import _device, _tensors, _views, errors, image
from .client import Client, Closing

POLL = 0.1


def keep(source: str, name: Optional[str] = None, *, device: Any = None, rank: int = 0, generation: Optional[int] = None,
         world_size: Optional[int] = None, layout: Optional[Sequence[Mapping[str, Any]]] = None, ttl_seconds: Optional[int] = None,
         timeout: Optional[float] = None, client: Optional[Client] = None) -> Dict[str, Any]:
    """Keeps weights in memory for engines that come and go, and returns when they are there.

    source: a checkpoint, "main:run1/step-100", which is loaded into the state dict shm:NAME, cut by `world_size` and `layout`, unless there
    is one of that name; or a sealed state dict, "shm:NAME", such as a publication. Shared memory keeps it until it is deleted.
    device: a GPU ("cuda:0", a torch.device, an index), which gets a copy of one rank's newest generation (or `generation`), unless it has
    it already; that stays for `ttl_seconds` after its last engine (0: until it is dropped; None: the daemon's --keep-sealed). Without a
    device: shared memory only. Several processes may call it at once.
    Returns the record of the device image, or of the state dict. Raises NotFound, SharedMemoryFull, DeviceMemoryFull, WaitTimeout,
    RequestRefused (no driver here), DcpdError with the code `backend_unavailable` (no driver there).
    """
    from ._daemon import default_client

    c = client or default_client()
    end = None if timeout is None else time.monotonic() + timeout
    if source.startswith("shm:"):
        if name is not None and name != source[4:]:
            raise ValueError(f"{source} is kept under its own name, not {name!r}")
        name = source[4:]
    elif name is None:
        raise ValueError("name=: of the state dict in shared memory that the checkpoint is loaded into")
    else:
        name = name[4:] if name.startswith("shm:") else name
        _load(c, source, name, world_size, layout, end)
    if device is None:
        return c.state_dicts.get(name)
    uuid = _device.Driver("device images cannot be used").uuid_of(_ordinal(device))
    left = None if end is None else max(end - time.monotonic(), 0.001)  # 0 would be the client's own
    try:
        return c.device_images.keep(name, rank, generation=generation, device=uuid, ttl_seconds=ttl_seconds, timeout=left)
    except errors.ConnectionLost as e:
        if end is None or time.monotonic() < end:
            raise
        raise errors.WaitTimeout(f"{device} did not have rank {rank} of shm:{name} in time") from e


def _load(c: Client, source: str, name: str, world_size: Optional[int], layout: Optional[Sequence[Mapping[str, Any]]],
          end: Optional[float]) -> None:
    """Loads a checkpoint into a state dict that is not there; or waits for another process that does."""
    target: Dict[str, Any] = {"state_dict": name, "create_only": True}  # what came meanwhile is in use: it is not filled anew
    if world_size is not None:
        target["world_size"] = world_size
    if layout is not None:
        target["layout"] = list(layout)
    while not _is_sealed(c, name):
        left = None if end is None else max(end - time.monotonic(), 0.0)
        try:
            c.jobs.wait(c.jobs.create("load", source=source, target=target), left)
        except errors.DcpdError as e:
            if e.code not in ("target_busy", "state_dict_exists", "state_dict_busy"):
                raise
            if left == 0.0:
                raise errors.WaitTimeout(f"another process did not load shm:{name} in time") from e
            time.sleep(POLL)


def _is_sealed(c: Client, name: str) -> bool:
    try:
        return c.state_dicts.get(name)["generation"] is not None
    except errors.NotFound:
        return False


def _ordinal(device: Any) -> int:
    torch = _tensors.torch_module()
    if isinstance(device, int):
        return device
    if torch is None:
        text = str(device)
        kind, _, index = text.partition(":")
    else:
        d = torch.device(device)
        kind, index = d.type, "" if d.index is None else str(d.index)
    if kind != "cuda":
        raise ValueError(f"device: a GPU, such as \"cuda:0\", not {device!r}; without one it is shared memory")
    return int(index) if index else int(torch.cuda.current_device()) if torch is not None else 0


class DeviceMemory:
    """A device image mapped into this process, read-only, with the interface of CUDA arrays: `torch.as_tensor(memory)` and others' like
    calls give its bytes without a copy. It is unmapped, and the daemon told, when nobody refers to it any more."""

    def __init__(self, driver: _device.Driver, given: _device.Descriptors, ordinal: int, size: int) -> None:
        fd = given.receive()
        try:
            context = driver.retain(ordinal)
            try:
                self.address = driver.map(fd, ordinal, size)
            except BaseException:
                driver.release(ordinal)
                raise
        finally:
            os.close(fd)
        self.ordinal, self.size, self._driver, self._context = ordinal, size, driver, context
        _given.add(given)
        self._end = weakref.finalize(self, _let_go, os.getpid(), driver, given, ordinal, context, self.address, size)
        self._end.atexit = False  # the process's end unmaps, when nothing runs on the GPU any more

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None}

    def read(self, at: int, n: int) -> bytes:
        return self._driver.read(self._context, self.address + at, n)


def _let_go(pid: int, driver: _device.Driver, given: _device.Descriptors, ordinal: int, context: Any, address: int, size: int) -> None:
    if os.getpid() != pid:
        return  # a fork has neither the mapping nor a context
    with contextlib.suppress(errors.DcpdError):  # without a context nothing runs
        if not driver.synchronize(context):
            _not_unmapped.append(given)  # kernels may read there, as during the capture of a graph: in use until the process ends
            return
    try:
        driver.unmap(address, size)
        driver.release(ordinal)
    except errors.DcpdError:
        pass  # of a device that is lost: it has nothing any more
    finally:
        given.close()


def _after_fork() -> None:
    """The image is in use by the parent alone: an inherited connection would keep it in use after the parent's end."""
    for given in list(_given):
        given.close()


_given: "weakref.WeakSet[_device.Descriptors]" = weakref.WeakSet()
_not_unmapped: List[_device.Descriptors] = []
os.register_at_fork(after_in_child=_after_fork)


def _flat(memory: DeviceMemory) -> Any:
    """All its bytes as a tensor, which keeps the memory mapped."""
    torch = _tensors.torch_module()
    if torch is None:
        raise errors.RequestRefused("tensors over a GPU's memory need torch")
    return torch.as_tensor(memory, device=torch.device("cuda", memory.ordinal))


class DeviceView(_views.Entries, Closing):
    """One rank's part of a state dict in a GPU's memory, as a mapping {FQN: tensor or value}; several chunks of one tensor come as a list.

    Tensors are views of memory that other processes map, too, and that cannot be written to: a kernel that writes there ends with an
    illegal address. clone() what shall change. They stay valid after `close()`, and after the daemon's end, as long as they are referenced.
    memory: all of the image, for other libraries (`__cuda_array_interface__`). id: of the device image.
    """

    def __init__(self, record: Mapping[str, Any], memory: DeviceMemory, weights_only: bool) -> None:
        self.id, self.name, self.rank = str(record["id"]), str(record["state_dict"]), int(record["rank"])
        self.generation, self.device, self.memory = int(record["generation"]), f"cuda:{memory.ordinal}", memory
        size = int(record["image_bytes"])
        n = struct.unpack("<Q", memory.read(0, 8))[0] if size >= 8 else 0
        head = memory.read(0, min(8 + min(n, image.HEADER_MAX), size))
        self._base = _flat(memory)
        self._fill(image.parse(head, size), False, weights_only)

    def view(self, e: image.Entry, as_numpy: bool) -> Any:
        return _tensors.torch_view(self._base, e.spec, e.begin)

    def close(self) -> None:
        """Drops the views that this mapping holds; the memory goes with the last one that was taken out of it."""
        self._items, self._base, self.memory = {}, None, None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<DeviceView shm:{self.name}, rank {self.rank}, generation {self.generation}, on {self.device}, {len(self)} entries>"


_Views = Union[_views.StateDictView, DeviceView]


@overload
def attach(state_dict: str, rank: int = 0, *, generation: Optional[int] = None, weights_only: bool = True, as_numpy: bool = False,
           device: None = None, client: Optional[Client] = None) -> _views.StateDictView: ...


@overload
def attach(state_dict: str, rank: int = 0, *, generation: Optional[int] = None, weights_only: bool = True, as_numpy: bool = False,
           device: Any, client: Optional[Client] = None) -> DeviceView: ...


def attach(state_dict: str, rank: int = 0, *, generation: Optional[int] = None, weights_only: bool = True, as_numpy: bool = False,
           device: Any = None, client: Optional[Client] = None) -> _Views:
    """Maps the newest sealed generation of a rank of "shm:NAME". device: a GPU ("cuda:0"), whose image of it, which `keep` has made, is
    mapped in place of the one in shared memory. Raises NotFound, NotSealed, Forbidden."""
    from ._daemon import default_client

    name = state_dict[4:] if state_dict.startswith("shm:") else state_dict
    c = client or default_client()
    if device is None:
        return _views.StateDictView(c, name, rank, generation, weights_only, as_numpy)
    if as_numpy:
        raise ValueError("as_numpy: numpy's arrays lie in host memory; attach without device")
    return _on_device(c, name, rank, generation, device, weights_only)


def _on_device(c: Client, name: str, rank: int, generation: Optional[int], device: Any, weights_only: bool) -> DeviceView:
    driver = _device.Driver("device images cannot be used")
    ordinal = _ordinal(device)
    uuid = driver.uuid_of(ordinal)
    refused: Dict[str, errors.DcpdError] = {}  # by image: most were superseded between the list and the request
    while True:
        there = [i for i in c.device_images.list(name) if i["rank"] == rank and i["device"] == uuid]
        kept = [i for i in there if i["state"] == "kept" and generation in (None, i["generation"])]
        if not kept:
            raise errors.NotFound(_missing(name, rank, device, there), code="not_found", rank=rank)
        one = max(kept, key=lambda i: int(i["generation"]))
        if one["id"] in refused:
            raise refused[one["id"]]
        try:
            record, given = c.device_images.attach(one["id"])
        except errors.DcpdError as e:
            if e.code not in ("state_conflict", "not_found"):
                raise
            refused[one["id"]] = e
            continue
        try:
            memory = DeviceMemory(driver, given, ordinal, int(record["bytes"]))
        except BaseException:
            given.close()
            raise
        return DeviceView(record, memory, weights_only)


def _missing(name: str, rank: int, device: Any, there: List[Dict[str, Any]]) -> str:
    lost = "; ".join(str(i["problem"]) for i in there if i["state"] == "lost")
    return f"{device} has no image of rank {rank} of shm:{name}" + (f" any more ({lost})" if lost else "") + \
        f": dcpd.keep(\"shm:{name}\", device=…) makes one of the state dict in shared memory, " \
        f"dcpd.keep(CHECKPOINT, \"{name}\", device=…) both"
