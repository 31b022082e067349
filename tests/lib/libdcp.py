"""libdcp.so of this build, as Python calls it: reads a checkpoint's tensors and values.

    with libdcp.open(directory) as ck:
        ck.read(fqn_or_index, offsets, sizes)  → bytes
"""
import contextlib
import ctypes as c
import os
import pathlib

BIN = pathlib.Path(os.environ.get("BIN", pathlib.Path(__file__).resolve().parents[2] / "build/bin"))
PATH = BIN.parent / "lib/libdcp.so.0"
STATUS = ["ok", "invalid", "not_found", "damaged", "unsupported", "io", "no_memory", "failed"]
DAMAGE = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_int64, c.c_char_p, c.c_uint64, c.c_uint64, c.c_char_p)
_lib = []


class DcpError(Exception):
    """status: the class; code, file, offset, fqn, rank: None if not known."""

    def __init__(self, status):
        say = lib()
        self.status, self.message = STATUS[status], say.dcp_error_message().decode()
        self.code, self.file, self.fqn = (f().decode() or None for f in (say.dcp_error_code, say.dcp_error_file, say.dcp_error_fqn))
        self.offset, self.rank = (None if f() < 0 else f() for f in (say.dcp_error_offset, say.dcp_error_rank))
        super().__init__(f"{self.code}: {self.message} [file {self.file} offset {self.offset} FQN {self.fqn}]")


def lib():
    if not _lib:
        so, p, n, u64 = c.CDLL(str(PATH)), c.c_void_p, c.c_size_t, c.c_uint64
        dims = c.POINTER(c.c_int64)
        for name, result, *args in (
                ("version", c.c_char_p), ("error_code", c.c_char_p), ("error_message", c.c_char_p), ("error_file", c.c_char_p),
                ("error_fqn", c.c_char_p), ("error_offset", c.c_int64), ("error_rank", c.c_int64),
                ("open", c.c_int, c.c_char_p, c.POINTER(p)), ("close", None, p), ("world_size", c.c_uint32, p), ("warning", c.c_char_p, p),
                ("unverified_bytes", u64, p),
                ("unverified_at", c.c_int, p, n, c.POINTER(c.c_char_p), c.POINTER(c.c_char_p), c.POINTER(u64), c.POINTER(u64)),
                ("verify", c.c_int, c.c_char_p, DAMAGE, p, c.POINTER(u64)),
                ("tensor_count", n, p), ("tensor_at", p, p, n), ("tensor_find", p, p, c.c_char_p), ("tensor_fqn", c.c_char_p, p),
                ("tensor_dtype", c.c_char_p, p), ("tensor_element_bytes", c.c_uint32, p), ("tensor_ndim", c.c_uint32, p),
                ("tensor_shape", dims, p), ("tensor_bytes", u64, p), ("tensor_chunk_count", n, p),
                ("tensor_chunk", c.c_int, p, p, n, c.POINTER(dims), c.POINTER(dims), c.POINTER(c.c_uint32)),
                ("read", c.c_int, p, p, p, n, c.c_uint, c.POINTER(u64)),
                ("read_slice", c.c_int, p, p, dims, dims, p, n, c.c_uint, c.POINTER(u64)),
                ("value_count", n, p), ("value_at", p, p, n), ("value_find", p, p, c.c_char_p), ("value_fqn", c.c_char_p, p),
                ("value_read", c.c_int, p, p, c.POINTER(c.c_int), c.POINTER(p), c.POINTER(n))):
            f = getattr(so, "dcp_" + name)
            f.restype, f.argtypes = result, args
        _lib.append(so)
    return _lib[0]


def check(status):
    if status:
        raise DcpError(status)


class Checkpoint:
    def __init__(self, directory):
        self.p = c.c_void_p()
        check(lib().dcp_open(os.fsencode(directory), c.byref(self.p)))

    def close(self):
        lib().dcp_close(self.p)
        self.p = None

    def tensors(self):
        """[(FQN, dtype, shape, handle)]"""
        out = []
        for i in range(lib().dcp_tensor_count(self.p)):
            t = lib().dcp_tensor_at(self.p, i)
            shape = tuple(lib().dcp_tensor_shape(t)[d] for d in range(lib().dcp_tensor_ndim(t)))
            out.append((lib().dcp_tensor_fqn(t).decode(), lib().dcp_tensor_dtype(t).decode(), shape, t))
        return out

    def tensor(self, fqn):
        return lib().dcp_tensor_find(self.p, fqn.encode())

    def chunks(self, t):
        """[(offsets, sizes, rank)]"""
        n, out = lib().dcp_tensor_ndim(t), []
        off, size, rank = c.POINTER(c.c_int64)(), c.POINTER(c.c_int64)(), c.c_uint32()
        while lib().dcp_tensor_chunk(self.p, t, len(out), c.byref(off), c.byref(size), c.byref(rank)):
            out.append((tuple(off[:n]), tuple(size[:n]), rank.value))
        assert len(out) == lib().dcp_tensor_chunk_count(t)
        return out

    def read(self, t, offsets=None, sizes=None, flags=0, room=None):
        """(bytes, how many of those read were not compared). room: the buffer's size."""
        n, unverified = lib().dcp_tensor_ndim(t), c.c_uint64(0)
        if offsets is None:
            size = lib().dcp_tensor_bytes(t)
            buffer = c.create_string_buffer(size)
            check(lib().dcp_read(self.p, t, buffer, size if room is None else room, flags, c.byref(unverified)))
            return buffer.raw[:size], unverified.value
        size = lib().dcp_tensor_element_bytes(t)
        for s in sizes:
            size *= max(s, 0)
        buffer = c.create_string_buffer(size)
        box = (c.c_int64 * n)(*offsets), (c.c_int64 * n)(*sizes)
        check(lib().dcp_read_slice(self.p, t, *box, buffer, size if room is None else room, flags, c.byref(unverified)))
        return buffer.raw[:size], unverified.value

    def values(self):
        """{FQN: (kind, bytes)}"""
        out = {}
        kind, text, n = c.c_int(), c.c_void_p(), c.c_size_t()
        for i in range(lib().dcp_value_count(self.p)):
            v = lib().dcp_value_at(self.p, i)
            check(lib().dcp_value_read(self.p, v, c.byref(kind), c.byref(text), c.byref(n)))
            out[lib().dcp_value_fqn(v).decode()] = ("json", "bytes", "opaque")[kind.value], c.string_at(text, n.value)
            free(text)
        return out

    def unverified(self):
        """[(FQN or None, file, offset, bytes)]"""
        out, fqn, file, offset, size = [], c.c_char_p(), c.c_char_p(), c.c_uint64(), c.c_uint64()
        while lib().dcp_unverified_at(self.p, len(out), c.byref(fqn), c.byref(file), c.byref(offset), c.byref(size)):
            out.append((fqn.value.decode() or None, file.value.decode(), offset.value, size.value))
        return out

    def unverified_bytes(self):
        return lib().dcp_unverified_bytes(self.p)


def free(p):
    libc = c.CDLL(None)
    libc.free.argtypes = [c.c_void_p]
    libc.free(p)


@contextlib.contextmanager
def open(directory):
    ck = Checkpoint(directory)
    try:
        yield ck
    finally:
        ck.close()


def verify(directory):
    """([(FQN, rank, file, offset, bytes, message)], unverified bytes, the error or None)"""
    damage, unverified = [], c.c_uint64()

    def note(_, fqn, rank, file, offset, size, message):
        damage.append((fqn.decode(), rank, file.decode(), offset, size, message.decode()))

    status = lib().dcp_verify(os.fsencode(directory), DAMAGE(note), None, c.byref(unverified))
    return damage, unverified.value, DcpError(status) if status else None
