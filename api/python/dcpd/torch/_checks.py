"""Items that the drop-in reads itself (values, transformed items, rank-local checkpoints), compared with what the checkpoint says of them.

Of a checkpoint that dcpd wrote the manifest has a CRC32 of each item; the others have those in their archives. Whether the manifest and
the metadata are what was written is the daemon's to say, before anything is read (StorageReader.read_metadata).
"""
from __future__ import annotations

import ctypes
import io
import json
import pickletools
import re
import zipfile
import zlib
from typing import Any, Optional

from .. import _digest, errors

_HEAD = 4096  # the manifest's first bytes, which have what it says of the metadata
_REFUSED, _DIRECTORY = 1 | 1 << 5 | 1 << 6 | 1 << 13, 0x10  # flags and attributes that PyTorch's reader refuses
_LOCAL = 30   # bytes of a record's local header


class Checks:
    """Of the files of one checkpoint (_path.files), by the manifest of one metadata file: neither is read before the first item."""

    def __init__(self, files: Any, metadata: str) -> None:
        self._files, self._metadata = files, metadata
        self._text: Optional[bytes] = None
        self._at = 0  # where the last item was found: they are asked for in the order of the files

    def item(self, file: str, fqn: str, offset: int, data: bytearray) -> None:
        """Raises CheckpointDamaged if the stored bytes of the item are not those that were written, as far as anything tells."""
        crc, whole = self._listed(file, offset, len(data))
        if crc is not None and whole:
            if _crc32(data) != crc:
                raise damaged(file, fqn, offset, "the bytes of the item are not those written", "digest_mismatch")
        else:
            payload = self.archive(file, fqn, offset, data)
            if None not in (crc, payload) and payload != crc:
                raise damaged(file, fqn, offset, "the item's payload is not the one written", "digest_mismatch")

    @staticmethod
    def archive(file: str, fqn: str, offset: int, data: bytearray) -> Optional[int]:
        """The same for an archive by what is in it. The CRC32 of its payload, if it has one payload."""
        if data[:2] != b"PK":
            return None
        try:
            return _archive(data)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OverflowError) as e:
            raise damaged(file, fqn, offset, f"the item's archive is damaged: {e}", "format_zip") from e

    def _listed(self, file: str, offset: int, length: int) -> Any:
        """(CRC32, whether it is of all bytes and not of the payload alone) by the manifest; (None, False) where it says nothing."""
        if self._text is None:
            self._text = self._in_force()
        begin = self._text.find(b'{"name":' + json.dumps(file, ensure_ascii=False).encode() + b",")
        if begin < 0:
            return None, False
        end = self._text.find(b'{"name":', begin + 1)
        end = len(self._text) if end < 0 else end
        item = re.compile(rb'\[%d,%d,"([0-9a-f]{8})","[0-9a-f]{32}"(?:,\[[^\]]*\])?(,true)?\]' % (offset, length))
        found = begin <= self._at < end and item.search(self._text, self._at, end) or item.search(self._text, begin, end)
        if not found:
            return None, False
        self._at = found.start()
        return int(found[1], 16), found[2] is not None

    def _in_force(self) -> bytes:
        """The manifest's text; b"" if there is none, or if it is that of a checkpoint which PyTorch has replaced: the metadata are others,
        and the daemon has found no damage."""
        rank = re.fullmatch(r"__(\d+)\.metadata", self._metadata)
        try:
            text, _ = self._files.read(f".dcpd.{rank[1]}.json" if rank else ".dcpd.json")
            metadata = bytearray(self._files.read(self._metadata)[0])
        except (OSError, errors.Forbidden):
            return b""
        said = re.search(rb'"metadata":\{"name":"([^"]*)","bytes":(\d+),"xxh3_128":"([0-9a-f]{32})"', text[:_HEAD])
        if not said or said[1].decode() != self._metadata or int(said[2]) != len(metadata):
            return b""
        digest = _digest.new(_digest.XXH3)
        return b"" if digest is not None and _digest_of(digest, metadata) != said[3].decode() else text


def damaged(file: str, fqn: str, offset: int, why: str, code: str) -> errors.CheckpointDamaged:
    return errors.CheckpointDamaged(why, code=code, file=file, fqn=fqn, offset=offset)


def _digest_of(digest: _digest.Digest, data: bytearray, begin: int = 0, size: Optional[int] = None) -> str:
    n = len(data) - begin if size is None else size
    digest.begin()
    if n:
        digest.add(ctypes.addressof((ctypes.c_char * n).from_buffer(data, begin)), n)
    return digest.text()


def _crc32(data: bytearray, begin: int = 0, size: Optional[int] = None) -> int:
    digest = _digest.new(_digest.CRC32)
    assert digest is not None
    return int(_digest_of(digest, data, begin, size), 16)


def _archive(data: bytearray) -> Optional[int]:
    """Checks the CRC32 of every record that has one; the payload's, if there is one payload. Raises BadZipFile, …"""
    payloads = []
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        prefix = None
        for info in z.infolist():
            prefix = info.filename.split("/")[0] if prefix is None else prefix
            if not info.filename.startswith(prefix + "/"):
                raise zipfile.BadZipFile(f"record '{info.filename}' is not in '{prefix}/'")
            local = data[info.header_offset:info.header_offset + _LOCAL]
            if len(local) < _LOCAL or local[:4] != b"PK\3\4":
                raise zipfile.BadZipFile(f"no local header of record '{info.filename}'")
            name = int.from_bytes(local[26:28], "little")
            begin = info.header_offset + _LOCAL + name + int.from_bytes(local[28:30], "little")
            if begin + info.compress_size > len(data) or \
                    data[info.header_offset + _LOCAL:info.header_offset + _LOCAL + name] != info.orig_filename.encode():
                raise zipfile.BadZipFile(f"the local header of record '{info.filename}' is not what the directory says")
            if info.flag_bits & _REFUSED or info.external_attr & _DIRECTORY:
                raise zipfile.BadZipFile(f"record '{info.filename}' is encrypted, patched or a directory")
            if info.compress_type == zipfile.ZIP_STORED:
                if info.CRC and _crc32(data, begin, info.compress_size) != info.CRC:
                    raise zipfile.BadZipFile(f"the CRC32 of record '{info.filename}' is wrong")
            elif info.CRC:
                z.read(info)
            if re.search(r"/data/\d+$", info.filename):
                payloads.append(info.CRC)
    return payloads[0] if len(payloads) == 1 and payloads[0] else None


def readable(data: bytearray) -> bool:
    """Whether PyTorch finds its way about the item, and its pickle ends. An error that comes of such an item is not for damage."""
    import torch

    try:
        if data[:2] == b"PK":
            reader = torch._C.PyTorchFileReader(io.BytesIO(data))
            records = {name: reader.get_record(name) for name in reader.get_all_records()}
            pickled = records["data.pkl"]
            texts = [r.decode() for name, r in records.items() if name != "data.pkl" and not re.match(r"data/\d", name)]
            if "byteorder" in records and not {"little", "big"} & set(texts):
                return False
        else:
            pickled = bytes(data)
        for _ in pickletools.genops(pickled):
            pass
    except Exception:
        return False
    return True
