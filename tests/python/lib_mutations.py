"""What may come of a damaged checkpoint on every path that reads it, and checkpoints of dcpd's own to damage.

`Judge.faults(mutation)` reads a damaged copy on all paths. Each must give equal data; or an error that names file, offset and, where known,
FQN; or other data whose item is among those that the job counts as unverified. What PyTorch refuses may not both verify and load.
"""
import fnmatch
import itertools
import re
import shutil
import warnings

import mutate
import torch
import torch.distributed.checkpoint as dcp
from lib_reads import LAYOUT, Read, Refused

import dcpd

# Codes that tell of a fault in dcpd and not in the checkpoint.
NEVER = {"worker_lost", "peer_lost", "peer_timeout", "internal", "system", "no_memory", "protocol", "timed_out", "storage_stalled",
         "comm_protocol", "collective_mismatch", "cancelled", "storage_io", "segment_shrunk", "checkpoint_replaced"}
# Codes for a target that does not fit: the same checkpoint with other keys or sizes, if nothing vouches for its metadata.
UNFIT = {"missing_key", "size_mismatch", "kind_mismatch", "not_found", "range_invalid", "coverage_hole"}
UNFIT_TEXT = re.compile("Missing key in checkpoint|mismatch between saved|size mismatch")
MEMORY = 2 << 30  # bytes that a path may take in this process
ROOM = 512 << 20  # bytes that the checkpoints, copies and state dicts of a run need
# Kinds of bytes that a CRC32 of PyTorch's covers.
BY_CRC = {"payload", "pickle", "value", "record"}


def text_of(e):
    if isinstance(e, Refused):
        p = e.problem
        return f"{p.get('code')}: {p.get('detail')} [file {p.get('file')} offset {p.get('offset')} FQN {p.get('fqn')}]"
    return f"{type(e).__name__}: {cause(e)}"


def cause(e):
    """The first rank's exception where PyTorch has wrapped it."""
    return next(iter(e.failures.values()))[0] if hasattr(e, "failures") else e


def facts(e):
    """(code, file, offset, FQN), as far as the error says them."""
    e = cause(e)
    if isinstance(e, Refused):
        return tuple(e.problem.get(k) for k in ("code", "file", "offset", "fqn"))
    return tuple(getattr(e, k, None) for k in ("code", "file", "offset", "fqn"))


def unfit(e):
    return facts(e)[0] in UNFIT or UNFIT_TEXT.search(text_of(e)) is not None


def first_difference(a, b):
    k = next(k for k in sorted({*a, *b}) if a.get(k) != b.get(k))
    return f"{k}: {str(a.get(k))[:100]} instead of {str(b.get(k))[:100]}"


class Judge:
    """Of the damage to one checkpoint."""

    def __init__(self, reader, directory):
        self.reader, self.source, self.numbers = reader, directory, itertools.count()
        self.found, self.swaps = mutate.regions(directory), mutate.exchanges(directory)
        self.own = any(r.kind == "manifest" for r in self.found)
        whole = f"whole{next(reader.numbers)}"
        shutil.copytree(directory, reader.root / whole)
        reader.take(whole)
        self.known = [self._read(whole, direct) for direct in (False, True)]

    def _read(self, name, direct, only=None):
        """{path: Read or exception}."""
        out = {}
        for path, read in self.reader.paths(direct).items():
            if only is None or path in only:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        out[path] = read(name)
                except BaseException as e:  # CheckpointException is no Exception
                    if isinstance(e, KeyboardInterrupt):
                        raise
                    out[path] = e
        return out

    def sound(self):
        """[(path, error)]: paths that cannot read the whole checkpoint; they are left out."""
        return [(p, x) for known in self.known for p, x in known.items() if not isinstance(x, Read)]

    def touched(self, m):
        return [r for r in self.found if r.file == m.file and any(a < r.end and r.begin < b for a, b in m.ranges())]

    def faults(self, m, direct=False):
        """[(path, what is wrong)] for a mutation; loads read the files directly or by jobs."""
        name = f"m{next(self.reader.numbers)}"
        shutil.copytree(self.source, self.reader.root / name)
        try:
            if not m.apply(self.reader.root / name):
                return []
            known = self.known[direct]
            got = self._read(name, direct, [p for p, x in known.items() if isinstance(x, Read)])
        finally:
            shutil.rmtree(self.reader.root / name, ignore_errors=True)
        if not self.reader.d.alive():
            return [("all", "the daemon is gone")]
        return list(self._faults(m, self.touched(m), known, got))

    def _faults(self, m, touched, known, got):
        counted = [x for path in ("load", "verify") if isinstance(got.get(path), Read) for x in got[path].unverified]
        for path, x in got.items():
            if path == "PyTorch" or path == "StorageReader" and self._planned_by_pytorch(m, got):
                continue
            if not isinstance(x, Read):
                fault = self._error(x, m, touched)
            elif self.own and touched[0].kind in ("metadata", "manifest"):
                fault = "reads on though the manifest tells of damage"
            elif x == known[path] or path == "diff" and not self.own and got.get("load") == known.get("load"):
                fault = None  # diff compares all bytes of a value that nobody unpickles, those around the records too
            else:
                named = counted if x.unverified is None else x.unverified
                fault = None
                if not self._allowed(path, named, touched, m, x):
                    fault = f"other data, unverified {named[:3]}: {first_difference(x, known[path])}"
            if fault:
                yield path, fault
        yield from self._verify(m, touched, known, got)

    def _planned_by_pytorch(self, m, got):
        """Whether PyTorch's own metadata were hurt, and the drop-in and PyTorch make the same of them: PyTorch plans both loads."""
        if self.own or not m.file.endswith(".metadata"):
            return False
        ours, theirs = got["StorageReader"], got["PyTorch"]
        return ours == theirs if isinstance(ours, Read) else type(cause(ours)) is type(cause(theirs))

    def _verify(self, m, touched, known, got):
        """Faults of verify beside the other paths."""
        ok, refused = isinstance(got.get("verify"), Read), [
            (p, x) for p, x in got.items() if not isinstance(x, Read) and not unfit(x) and p not in ("verify", "StorageReader")]
        for path, e in refused:
            if path == "PyTorch" and ok and self._allowed("verify", got["verify"].unverified, touched, m, got["verify"]):
                continue  # verify says that nothing vouches for these bytes
            if ok and (path != "PyTorch" or isinstance(got.get("load"), Read)):
                yield "verify", f"succeeds (load too, if PyTorch refuses), while {path} refuses: {text_of(e)[:200]}"
                break
        if ok:
            r, kinds = got["verify"].result, {x.kind for x in touched}
            unverified = {fqn for fqn, _ in known["verify"].unverified}
            if self.own and not (kinds <= {"padding", "inside"} and r.get("padding_damage")):
                yield "verify", "does not see damage that the manifest tells"
            elif not self.own and kinds <= BY_CRC and not all(x.fqn in unverified for x in touched):
                yield "verify", "does not see damage that a CRC32 tells"
        elif "damage" in getattr(got.get("verify"), "problem", {}) and (self.own or not m.file.endswith(".metadata")):
            listed = got["verify"].problem["damage"]
            if not any(x["file"] == m.file and (x["part"] in ("metadata", "manifest", "file") or x["offset"] < end and
                                                begin < x["offset"] + max(x["bytes"], 1)) for x in listed for begin, end in m.ranges()):
                yield "verify", f"lists other damage than what was done: {listed[:3]}"

    def _error(self, e, m, touched):
        """What is wrong with an error; None if nothing is."""
        code, file, offset, fqn = facts(e)
        text = text_of(e)
        if code in NEVER:
            return f"{code}: {text[:200]}"
        if not self.own and m.file.endswith(".metadata") and unfit(e):
            return None
        if isinstance(e, AssertionError) and "metadata is None" in text:  # PyTorch says so of any exception in read_metadata
            return None if re.search(rf"(?<!\w){re.escape(m.file)}", text) else f"no file named: {text[:220]}"
        if isinstance(e, (TimeoutError, AssertionError, ConnectionError)) and not isinstance(e, dcpd.DcpdError):
            return text[:200]
        if not file and m.file not in text:
            return f"no file named: {text[:220]}"
        if self.own and file and file != m.file:
            return f"another file named: {text[:220]}"
        if offset is None and code in ("digest_mismatch", "format_zip", "format_item", "format_pickle"):
            return f"no offset named: {text[:220]}"
        if code in ("digest_mismatch", "format_zip", "format_item", "format_pickle") and touched[0].fqn and not fqn:
            return f"no FQN named: {text[:220]}"
        return None

    def _allowed(self, path, named, touched, m, x):
        """Whether other data may come: the item that was hurt is named as unverified; or PyTorch's metadata are, and they were hurt or
        whole items were exchanged, which nothing but the metadata tell apart (a slice, a list and the package cannot say that)."""
        if x.result is None and not self.own and (m in self.swaps or m.file.endswith(".metadata") and path == "tensors"):
            return True
        fqns = {r.fqn for r in touched if r.fqn}
        return any(q in fqns or q is None and (fnmatch.fnmatch(m.file, f) or m in self.swaps) for q, f in named)

    def sample(self, rng, count):
        return mutate.sample(rng, self.found, self.swaps, count)


# --------------------------------------------------------------------------------------------- checkpoints of dcpd's own


def content(large=False):
    g = torch.Generator().manual_seed(7)
    if large:
        return {"large": torch.randint(0, 1 << 40, (9, 1 << 17), generator=g), "small": torch.arange(5)}
    return {"model": {"w": torch.randn(6, 4, generator=g), "same": torch.randn(6, 4, generator=g), "t": torch.randn(5, 3, generator=g).t(),
                      "scalar": torch.tensor(2.5, dtype=torch.float64), "none": torch.zeros(0, 3),
                      "long": torch.randint(0, 1 << 40, (70, 130), generator=g), "half": torch.randn(33, generator=g).to(torch.bfloat16)},
            "optim": {"lr": 0.01, "step": 12345, "betas": [0.9, 0.999], "name": "adam", "on": True, "nothing": None, "pair": (1, 2.5),
                      "set": {1, 2}}, "blob": b"bytes of a value"}


def written(reader, root):
    """{name: directory}: checkpoints of all forms that dcpd and its drop-in write and read."""
    from torch.distributed.checkpoint._extension import ZStandard

    from dcpd.torch import StorageWriter

    dcpd.save(content(), "main:own")
    dcpd.save(content(large=True), "main:blocks")
    reader.job("reshard", source=reader.ref("own"), target={**reader.ref("two-ranks"), "world_size": 2, "layout": LAYOUT})
    for name, args in (("dropin", {}), ("dropin-files", {"single_file_per_rank": False}), ("dropin-zstd", {"_extensions": [ZStandard()]})):
        dcp.save(content(), storage_writer=StorageWriter(reader.root / name, **args), no_dist=True)
    dcp.save(content(), storage_writer=StorageWriter(reader.root / "dropin-ranks"), no_dist=True, use_collectives=False)
    out = {}
    for name in ("own", "blocks", "two-ranks", "dropin", "dropin-files", "dropin-zstd", "dropin-ranks"):
        out[name] = root / name
        shutil.move(reader.root / name, out[name])
    return out
