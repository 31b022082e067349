"""A trainer's side of device memory, over the fake libcuda: allocations with bytes in them, their handles, and the Unix socket's hand-over
of descriptors. Without the harness: the package under test may use it. The fake keeps to the process that loads it, as a driver does."""
import base64
import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import socket
import struct

FAKE = pathlib.Path(__file__).resolve().parents[2] / "build/test/fakes/libcuda.so.1"
UUID = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
CHUNK = 2 << 20  # of VMM memory


class Trainer:
    def __init__(self):
        self.cuda = ctypes.CDLL(str(FAKE))
        self.cuda.fake_cuda_bytes.restype = ctypes.c_void_p
        self.cuda.fake_cuda_bytes.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)
        self.held = []  # the calls that let go of each allocation

    def __call__(self, name, *args):
        r = getattr(self.cuda, name)(*args)
        assert r == 0, f"{name}: error {r}"

    def bytes_at(self, p, n):
        return ctypes.string_at(self.cuda.fake_cuda_bytes(p, n), n)

    def fill(self, p, data):
        ctypes.memmove(self.cuda.fake_cuda_bytes(p, len(data)), bytes(data), len(data))

    def legacy(self, data):
        """cuMemAlloc with these bytes: its address, and the allocation as a request names it."""
        p, handle = ctypes.c_uint64(), (ctypes.c_char * 64)()
        self("cuMemAlloc_v2", ctypes.byref(p), ctypes.c_size_t(len(data)))
        self.held.append([("cuMemFree_v2", p)])
        self.fill(p.value, data)
        self("cuIpcGetMemHandle", ctypes.byref(handle), p)
        return p.value, {"handle": base64.b64encode(handle.raw).decode(), "bytes": len(data)}

    def vmm(self, data, shareable=True):
        """The same with VMM memory: the descriptor is the caller's."""
        n = -(-len(data) // CHUNK) * CHUNK
        p, a, fd = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
        how, access = (ctypes.c_int * 8)(1, 1 if shareable else 0, 1, 0, 0, 0, 0, 0), (ctypes.c_int * 3)(1, 0, 3)
        self("cuMemCreate", ctypes.byref(a), ctypes.c_size_t(n), how, ctypes.c_uint64(0))
        self("cuMemAddressReserve", ctypes.byref(p), ctypes.c_size_t(n), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        self("cuMemMap", p, ctypes.c_size_t(n), ctypes.c_size_t(0), a, ctypes.c_uint64(0))
        self("cuMemSetAccess", p, ctypes.c_size_t(n), access, ctypes.c_size_t(1))
        self("cuMemRelease", a)
        self.held.append([("cuMemUnmap", p, ctypes.c_size_t(n)), ("cuMemAddressFree", p, ctypes.c_size_t(n))])
        self.fill(p.value, data)
        if not shareable:
            return p.value, None, n
        self("cuMemRetainAllocationHandle", ctypes.byref(a), p)
        self("cuMemExportToShareableHandle", ctypes.byref(fd), a, 1, ctypes.c_uint64(0))
        self("cuMemRelease", a)
        return p.value, fd.value, n

    def map(self, fd, n):
        """The memory of a descriptor, read-only, as an engine maps a device image: its address. Takes the descriptor."""
        p, a, access = ctypes.c_uint64(), ctypes.c_uint64(), (ctypes.c_int * 3)(1, 0, 1)
        self("cuMemImportFromShareableHandle", ctypes.byref(a), ctypes.c_void_p(fd), 1)
        os.close(fd)
        self("cuMemAddressReserve", ctypes.byref(p), ctypes.c_size_t(n), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        self("cuMemMap", p, ctypes.c_size_t(n), ctypes.c_size_t(0), a, ctypes.c_uint64(0))
        self("cuMemSetAccess", p, ctypes.c_size_t(n), access, ctypes.c_size_t(1))
        self("cuMemRelease", a)
        return p.value

    def let_go(self):
        """Of all the memory that it has made: the fake has 1 GiB for a whole run of tests."""
        while self.held:
            for call in self.held.pop():
                self(*call)


def taken_by(holders):
    """Bytes of device memory that dcpd's holders (their pids), dcpd itself or this process's children have open or mapped."""
    pids, sizes = set(holders), {}
    pids |= {int(pathlib.Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[1]) for p in pids}
    pids |= {int(p) for tasks in pathlib.Path("/proc/self/task").glob("*/children") for p in tasks.read_text().split()}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "fake device memory" in line:
                    begin, end = (int(x, 16) for x in line.split()[0].split("-"))
                    sizes[line.split()[4]] = end - begin
            for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if "fake device memory" in os.readlink(fd):
                        sizes[str(fd.stat().st_ino)] = fd.stat().st_size
    return sum(sizes.values())


class Descriptors:
    """An open connection that has handed over descriptors: `token` names them."""

    def __init__(self, d, fds=()):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(str(d.socket))
        self.socket.sendall(b"GET /v1/descriptors HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: dcpd-descriptors\r\n\r\n")
        answer = http.client.HTTPResponse(self.socket)
        answer.begin()
        assert answer.status == 101, answer.read()
        self.token = json.loads(answer.fp.readline())["descriptors"]
        for i in range(0, len(fds), 250):
            socket.send_fds(self.socket, [b"."], fds[i:i + 250])
        for fd in fds:
            os.close(fd)

    def receive(self):
        """The descriptor that the daemon gives."""
        return socket.recv_fds(self.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)[1][0]

    def close(self):
        self.socket.close()


def as_flat(trainer):
    """What the package's _keep._flat is in a test: a mapping's bytes as a tensor of torch's, which holds the mapping."""
    import torch

    def flat(memory):
        behind = (ctypes.c_ubyte * memory.size).from_address(trainer.cuda.fake_cuda_bytes(memory.address, memory.size))
        behind.memory = memory
        return torch.frombuffer(behind, dtype=torch.uint8)

    return flat


def table(pieces):
    """Rows of (place in the segment, bytes, offset in the allocation, allocation)."""
    return b"".join(struct.pack("<4Q", *p) for p in pieces)


def as_torch(trainer):
    """put(tensor, vmm=False, shareable=True): the tensor on the fake device, as torch would have it there: `is_cuda`, and an address that
    only a driver can read. Its operators work on the bytes behind. torch.cuda gets streams, whose synchronize() put.waits counts."""
    import torch

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            pass

        def synchronize(self):
            put.waits += 1

    class Tensor(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        device, is_cuda, is_cpu = torch.device("cuda", 0), True, False

        def data_ptr(self):
            return self.place

        def detach(self):
            return of(super().detach(), self.place)

        def narrow(self, dim, start, length):
            return of(super().narrow(dim, start, length), self.place + start * self.stride(dim) * self.element_size())

        def __getitem__(self, i):
            return self.narrow(0, i, 1).view(self.shape[1:]) if isinstance(i, int) else super().__getitem__(i)

        def view(self, *shape):
            out = super().view(*shape)
            return of(out, self.place) if out.data_ptr() == super().data_ptr() else out

    def put(t, vmm=False, shareable=True):
        data = bytes(t.detach().contiguous().view(-1).view(torch.uint8).numpy())
        place = trainer.vmm(data, shareable)[0] if vmm else trainer.legacy(data)[0]
        behind = (ctypes.c_ubyte * len(data)).from_address(trainer.cuda.fake_cuda_bytes(place, len(data)))
        return of(torch.frombuffer(behind, dtype=t.dtype).view(t.shape), place)

    def of(t, place):
        out = torch.Tensor._make_subclass(Tensor, t)
        out.place = place
        return out

    put.waits = 0
    torch.cuda.Stream, torch.cuda.current_stream, torch.cuda.stream = Stream, Stream, lambda s: contextlib.nullcontext()
    return put
