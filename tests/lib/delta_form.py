"""The published form of a delta (slime's weight_vNNNNNN directories), read and written with numpy, zstandard and libxxhash: by none of
dcpd's code."""
import ctypes
import ctypes.util
import json
import pathlib
import zlib

import numpy as np
import safetensors.numpy
import zstandard
from safetensors import safe_open


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


_xxhash = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
_xxhash.XXH3_128bits.restype = _Hash128
_xxhash.XXH3_128bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def xxh3(data):
    h = _xxhash.XXH3_128bits(data, len(data))
    return f"{h.high:016x}{h.low:016x}"


CHECKSUMS = {"xxh3-128": xxh3, "adler32": lambda b: f"{zlib.adler32(b):08x}"}


def content_digest(tensors):
    """io/content.h. tensors: {FQN: (dtype's name, shape, bytes)}."""
    nodes = b""
    for name in sorted(tensors, key=lambda n: n.encode()):
        dtype, shape, data = tensors[name]
        n = len(name.encode()).to_bytes(8, "little") + name.encode() + len(dtype).to_bytes(8, "little") + dtype.encode()
        n += len(shape).to_bytes(8, "little") + b"".join(s.to_bytes(8, "little") for s in shape) + bytes.fromhex(xxh3(data))
        nodes += bytes.fromhex(xxh3(n))
    return xxh3(nodes)


def index(folder):
    return json.loads((pathlib.Path(folder) / "model.safetensors.index.json").read_text())


def read(folder, base):
    """{FQN: new bytes} of the tensors that the delta changes; base: {FQN: bytes}."""
    folder, out = pathlib.Path(folder), {}
    ix = index(folder)
    meta = ix["metadata"]
    assert meta["compression_format"] == "zstd"
    for name, file in ix["weight_map"].items():
        with safe_open(str(folder / file), "np") as f:
            frame, checksum = f.get_tensor(name), f.metadata()[name]
        assert frame.dtype == np.uint8 and frame.ndim == 1
        diff = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), np.uint8)
        new = np.frombuffer(base[name], np.uint8).copy()
        if meta["delta_encoding"] == "xor":
            new ^= diff
        else:
            count = int(diff[:4].view("<u4")[0])
            assert len(diff) == 4 + 5 * count
            new[diff[4:4 + 4 * count].view("<u4")] = diff[4 + 4 * count:]
        out[name] = new.tobytes()
        assert CHECKSUMS[meta["checksum_format"]](out[name]) == checksum, name
    return out


def encode(base, new, encoding, level=1):
    a, b = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        diff = a ^ b
    else:
        at = np.flatnonzero(a != b).astype("<u4")
        diff = np.concatenate([np.array([at.size], "<u4").view(np.uint8), at.view(np.uint8), b[at]])
    return zstandard.ZstdCompressor(level=level).compress(diff.tobytes())


def write(folder, base, new, encoding="xor", checksum="xxh3-128", level=1, files=2, metadata=(), frames=None, checksums=None):
    """As slime writes one: {FQN: bytes} of both sides, whatever their dtypes. frames and checksums: instead of what is right."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    changed = [n for n in new if base[n] != new[n]]
    parts = [changed[i::files] for i in range(files) if changed[i::files]]
    where = {}
    for i, names in enumerate(parts):
        file = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        data = {n: np.frombuffer((frames or {}).get(n) or encode(base[n], new[n], encoding, level), np.uint8) for n in names}
        sums = {n: CHECKSUMS[checksum](new[n]) for n in names} | {n: s for n, s in (checksums or {}).items() if n in names}
        safetensors.numpy.save_file(data, str(folder / file), metadata={n: s for n, s in sums.items() if s is not None})
        where |= dict.fromkeys(names, file)
    meta = {"version": "000001", "base_version": "000000", "delta_encoding": encoding, "compression_format": "zstd",
            "checksum_format": checksum, **dict(metadata)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": meta, "weight_map": where}))
