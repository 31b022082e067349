"""Damage to a checkpoint, one mutation at a time, and which part of the format a byte belongs to.

    for r in regions(directory):          # Region(file, begin, end, kind, fqn), sorted, without holes: every byte of every file
    Mutation.parse("flip:__0_0.distcp:142:6").apply(directory)

A mutation is written as text, so that a failing case can be repeated:

    flip:FILE:AT:BIT      zero:FILE:AT:BYTES      swap:FILE:AT:OTHER:BYTES      cut:FILE:SIZE

Kinds: `payload` (a tensor's storage), `pickle` (data.pkl of a tensor), `value` (data.pkl of a value), `record` (other records of an
archive), `local.*`, `directory.*`, `end.*`, `descriptor` (zip structure by field), `inside` (unused bytes within an item), `stream` (an
item that is no archive), `padding` (between items), `metadata`, `metadata tail` (behind the pickle's end), `manifest`, `header` (of
safetensors), `other`.
"""
import json
import pathlib
import pickle
import pickletools
import struct
from typing import NamedTuple

LOCAL = [("signature", 4), ("version", 2), ("flags", 2), ("method", 2), ("time", 4), ("crc", 4), ("packed", 4), ("size", 4),
         ("name length", 2), ("extra length", 2)]
CENTRAL = [("signature", 4), ("made by", 2), ("version", 2), ("flags", 2), ("method", 2), ("time", 4), ("crc", 4), ("packed", 4),
           ("size", 4), ("name length", 2), ("extra length", 2), ("comment length", 2), ("disk", 2), ("attributes", 6), ("offset", 4)]
END = [("signature", 4), ("disks", 4), ("counts", 4), ("size", 4), ("offset", 4), ("comment length", 2)]
END64 = [("signature", 4), ("record size", 8), ("versions", 4), ("disks", 8), ("counts", 16), ("size", 8), ("offset", 8)]
LOCATOR = [("signature", 4), ("disk", 4), ("offset", 8), ("disks", 4)]


class Region(NamedTuple):
    file: str
    begin: int
    end: int
    kind: str
    fqn: str

    def __str__(self):
        return f"{self.file}:{self.begin}-{self.end} {self.kind} {self.fqn}".rstrip()


class Mutation(NamedTuple):
    op: str
    file: str
    numbers: tuple

    @staticmethod
    def parse(text):
        op, file, *numbers = text.split(":")
        return Mutation(op, file, tuple(int(n) for n in numbers))

    def __str__(self):
        return ":".join([self.op, self.file, *map(str, self.numbers)])

    @property
    def at(self):
        return self.numbers[0]

    def ranges(self):
        """The bytes that it may change: [(begin, end)]."""
        if self.op == "flip":
            return [(self.at, self.at + 1)]
        if self.op == "zero":
            return [(self.at, self.at + self.numbers[1])]
        if self.op == "swap":
            n = self.numbers[2]
            return [(self.at, self.at + n), (self.numbers[1], self.numbers[1] + n)]
        return [(self.at, 1 << 62)]

    def change(self, data):
        data = bytearray(data)
        if self.op == "flip":
            data[self.at] ^= 1 << self.numbers[1]
        elif self.op == "zero":
            data[self.at:self.at + self.numbers[1]] = bytes(self.numbers[1])
        elif self.op == "swap":
            a, b, n = self.numbers
            data[a:a + n], data[b:b + n] = data[b:b + n], data[a:a + n]
        elif self.op == "cut":
            del data[self.at:]
        else:
            raise ValueError(self.op)
        return bytes(data)

    def apply(self, directory):
        """False if nothing changed."""
        f = pathlib.Path(directory) / self.file
        old = f.read_bytes()
        new = self.change(old)
        if new != old:
            f.write_bytes(new)
        return new != old


# ------------------------------------------------------------------------------------------------------------ structure


def fields(at, kind, layout, out):
    for name, n in layout:
        out.append((at, at + n, f"{kind}.{name}"))
        at += n
    return at


def le(data, at, n):
    return int.from_bytes(data[at:at + n], "little")


def archive(data, is_value):
    """[(begin, end, kind)] of a zip archive's parts, in any order; None if these bytes are none."""
    end = data.rfind(b"PK\5\6")
    if end < 0 or not data.startswith(b"PK\3\4"):
        return None
    out, count, at = [], le(data, end + 10, 2), le(data, end + 16, 4)
    fields(end, "end", END, out)
    if data[end - 20:end - 16] == b"PK\6\7":
        end64 = le(data, end - 12, 8)
        fields(end - 20, "locator", LOCATOR, out)
        fields(end64, "end64", END64, out)
        count, at = le(data, end64 + 32, 8), le(data, end64 + 48, 8)
    records = []
    for _ in range(count):
        name, extra, comment = (le(data, at + k, 2) for k in (28, 30, 32))
        packed, where = le(data, at + 20, 4), le(data, at + 42, 4)
        at = fields(at, "directory", CENTRAL, out)
        out += [(at, at + name, "directory.name"), (at + name, at + name + extra, "directory.extra"),
                (at + name + extra, at + name + extra + comment, "directory.comment")]
        records.append((data[at:at + name].decode(), where, packed))
        at += name + extra + comment
    for path, where, packed in records:
        name, extra, flags = le(data, where + 26, 2), le(data, where + 28, 2), le(data, where + 6, 2)
        at = fields(where, "local", LOCAL, out)
        out += [(at, at + name, "local.name"), (at + name, at + name + extra, "local.extra")]
        at += name + extra
        tail = path.split("/", 1)[-1]
        out.append((at, at + packed, "payload" if tail.startswith("data/") else ("value" if is_value else "pickle") if tail == "data.pkl"
                    else "record"))
        if flags & 8:
            signed = data[at + packed:at + packed + 4] == b"PK\7\x08"
            size = next((n for n in (16, 24, 12) if data[at + packed + n:at + packed + n + 2] == b"PK"), 16) if signed else 0
            out.append((at + packed, at + packed + size, "descriptor"))
    return [x for x in out if x[0] < x[1]]


def metadata_files(directory):
    return sorted(p for p in pathlib.Path(directory).iterdir() if p.name.endswith(".metadata"))


def items(directory):
    """{file: [(offset, length, FQN, is it a value)]}, as the metadata say."""
    out = {}
    for p in metadata_files(directory):
        md = pickle.loads(p.read_bytes())
        for index, info in md.storage_data.items():
            if hasattr(info, "relative_path"):
                value = not hasattr(md.state_dict_metadata.get(index.fqn), "chunks")
                out.setdefault(info.relative_path, set()).add((info.offset, info.length, index.fqn, value))
    return {f: sorted(x) for f, x in out.items()}


def fill(parts, size, kind):
    """Sorted, with `kind` where no part is. Parts do not overlap."""
    at, out = 0, []
    for begin, end, k, fqn in sorted(parts):
        if begin > at:
            out.append((at, begin, kind, fqn))
        out.append((begin, end, k, fqn))
        at = max(at, end)
    return out + ([(at, size, kind, "")] if at < size else [])


def data_file(data, listed):
    parts = []
    for offset, length, fqn, is_value in listed:
        item = data[offset:offset + length]
        inner = archive(item, is_value)
        inner = [(0, length, "stream")] if inner is None else inner
        parts += [(offset + a, offset + b, k, fqn) for a, b, k, _ in fill([(*x, fqn) for x in inner], length, "inside")]
    return fill(parts, len(data), "padding")


def pickle_end(data):
    for _, _, at in pickletools.genops(data):
        end = at + 1
    return end


def regions(directory):
    listed, out = items(directory), []
    for p in sorted(pathlib.Path(directory).iterdir()):
        data = p.read_bytes()
        if p.name.endswith(".metadata"):
            end = pickle_end(data)
            parts = [(0, end, "metadata", ""), (end, len(data), "metadata tail", "")]
        elif p.name.startswith(".dcpd"):
            parts = [(0, len(data), "manifest", "")]
        elif p.name in listed:
            parts = data_file(data, listed[p.name])
        elif p.suffix == ".safetensors":
            n = 8 + struct.unpack("<Q", data[:8])[0]
            spans = {k: v["data_offsets"] for k, v in json.loads(data[8:n]).items() if k != "__metadata__"}
            tensors = [(n + a, n + b, "payload", k) for k, (a, b) in spans.items() if a < b]
            parts = fill([(0, n, "header", ""), *tensors], len(data), "padding")
        else:
            parts = [(0, len(data), "other", "")]
        out += [Region(p.name, *x) for x in parts if x[0] < x[1]]
    return out


# ------------------------------------------------------------------------------------------------------------- choosing

OPS = ("flip", "zero", "swap", "cut")


def one(rng, op, region, beside):
    """A mutation of this kind that begins in the region. beside: regions of the same kind in the same file, to swap with."""
    n = region.end - region.begin
    at = rng.randrange(region.begin, region.end)
    if op == "flip":
        return Mutation(op, region.file, (at, rng.randrange(8)))
    if op == "zero":
        return Mutation(op, region.file, (at, rng.choice((1, min(4, region.end - at), region.end - at))))
    if op == "cut":
        return Mutation(op, region.file, (at,))
    others = [r for r in beside if r.begin != region.begin]
    if others and rng.random() < 0.7:
        other = rng.choice(others)
        size = min(n, other.end - other.begin)
        return Mutation("swap", region.file, (*sorted((region.begin, other.begin)), size))
    size = max(1, min(n // 2, 1 << rng.randrange(8)))
    return Mutation("swap", region.file, (region.begin, region.begin + n - size, size)) if n >= 2 * size else \
        Mutation("flip", region.file, (at, rng.randrange(8)))


def exchanges(directory):
    """Mutations that swap two whole items of one length."""
    out = []
    for file, listed in items(directory).items():
        for n in {length for _, length, _, _ in listed if length}:
            same = sorted({offset for offset, length, _, _ in listed if length == n})
            out += [Mutation("swap", file, (a, b, n)) for a, b in zip(same, same[1:])]
    return sorted(out)


def sample(rng, found, swaps, count):
    """`count` mutations: spread over kinds first, then over regions; swaps: those of whole items, which count as a kind."""
    kinds = {"exchange": swaps} if swaps else {}
    for r in found:
        kinds.setdefault(r.kind, []).append(r)
    out, order = [], []
    while len(out) < count:
        if not order:
            order = sorted(kinds)
            rng.shuffle(order)
        kind = order.pop()
        r = rng.choice(kinds[kind])
        out.append(r if kind == "exchange" else one(rng, rng.choice(OPS), r, [x for x in kinds[kind] if x.file == r.file]))
    return out


def every_byte(rng, found, payload=200):
    """A flip of each byte; of a payload so many at random, since all of its bytes are alike."""
    for r in found:
        places = range(r.begin, r.end)
        if r.kind == "payload" and len(places) > payload:
            places = rng.sample(places, payload)
        for at in places:
            yield Mutation("flip", r.file, (at, rng.randrange(8)))
