"""Tensors straight from the checkpoint's files, by this process: one copy, where a segment between would make it three.

dcpd plans the load and parses the formats; it says which bytes of which files are which bytes of our tensors, and their digests
(`POST …:locate`). They are read by a few threads without the interpreter's lock, and digested while they are in the cache. Bytes that still
lie in shared memory since they were saved from there are copied from there, and compared, whether or not the files' bytes are. What dcpd
does not locate (columns, other dtypes, what is compressed) is loaded by a job, through a segment; so is everything where this process
cannot read the files: another user's, in another container, by another daemon, without the libraries that the digests need. What is
wrong before the first byte is read is left to the job as well, which finds and says it.

Nothing that is told is trusted: the directory must be the one that the daemon has open, each box must be covered once and no more. Nor
is the checkpoint what it was for ever: what comes is of one version of it, or `Replaced` is raised (see `_find`).
"""
from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import resource
import stat
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import _copy, _digest, _tree, errors, image
from .image import ChunkSpec

AVERAGE_MIN = 16 << 10  # bytes of a box: below, what each costs here is more than a job costs
LARGE, LARGE_ALL = 1 << 20, 64 << 20  # where the average is less: one box, and all such that are worth another way for them
BOXES_MAX = 1 << 16      # of one question
PIECE = 512 << 10        # read and digested at once: little enough to be in the cache still
AHEAD = 8 << 20          # bytes that the kernel is asked to read before they are waited for, where it does not read enough by itself
ENOUGH, ENOUGH_FAR = 512 << 10, 8 << 20  # under way at once: from a disk, from another host
_ADVICE = 1 << 20        # by one call: it takes no more
_RWF_NOWAIT = 8
_QUESTION = 900 << 10    # bytes of a request
_OPEN_MAX = 256          # files that stay open; others are opened when they are read

_SEGMENT = re.compile(r"/dcpd-[0-9a-f-]+")

GONE = "gone"
_log = logging.getLogger("dcpd")
counts = {"boxes": 0, "bytes": 0, "memory": 0}  # of this process: what went this way, and the bytes of it that came from segments


class Read(NamedTuple):
    """Bytes [begin, begin + size) of a unit are those of a box from byte `at`. A unit: `bytes` bytes of a file that one digest is of;
    without a digest only what is needed is read. segment: the unit lies there, too, from byte segment_at on; -1: it does not."""

    file: int
    offset: int
    bytes: int
    kind: Optional[str]
    digest: str
    begin: int
    size: int
    box: int
    at: int
    segment: int = -1
    segment_at: int = 0


Unit = List[Read]  # of one unit, in order and without overlaps


class Replaced(errors.Busy):
    """The files that were found are not the checkpoint any more, or have been written to."""


class Plan:
    """What is read from one checkpoint, with its files open. boxes: those that are, by their places in what was asked for; others: the
    rest; ident: of this version of it; bytes: of the boxes; from_memory: those of them that came from segments, so far."""

    def __init__(self, ident: str, files: "_Files", reads: Dict[int, List[Read]], specs: Sequence[ChunkSpec],
                 segments: "_Segments") -> None:
        self.ident, self.files, self.reads, self.specs, self.segments = ident, files, reads, specs, segments
        self.from_memory = 0
        self.boxes = sorted(reads)
        self.others = [i for i in range(len(specs)) if i not in reads]
        self.bytes = sum(specs[i].nbytes for i in self.boxes)

    def close(self) -> None:
        self.files.close()
        self.segments.close()

    def read(self, addresses: Mapping[int, int], end: Optional[float] = None, tick: Optional[Callable[[int], None]] = None,
             then: Sequence[int] = ()) -> None:
        """Fills boxes: their memory, C-contiguous, of their size and dtype, begins at these addresses; it must stay alive.

        end: time.monotonic() at which WaitTimeout is raised. tick: called by this thread now and then with the bytes read so far. then:
        boxes that will be read next. Raises CheckpointDamaged with FQN, file and offset, Replaced, StorageFailed; when it returns or
        raises nothing writes there any more.
        """
        done = 0
        for layer in self._layers(addresses):
            units = self.units(layer)
            shown = None if tick is None else lambda n, so_far=done: tick(so_far + n)  # type: ignore[misc]
            reading = _Reading(self, units, addresses, end, shown, self.units(then))
            reading.run()
            self.from_memory += reading.from_memory
            counts["memory"] += reading.from_memory
            done += sum(self.specs[i].nbytes for i in layer)
        counts["boxes"] += len(addresses)
        counts["bytes"] += done

    def _layers(self, addresses: Mapping[int, int]) -> List[List[int]]:
        """Boxes that share memory (tied weights) one after the other: what one thread digests, no other may write to."""
        layers: List[List[int]] = [[]]
        ends = [0]
        for i in sorted((i for i in addresses if self.specs[i].nbytes), key=lambda i: addresses[i]):
            k = next((k for k, e in enumerate(ends) if e <= addresses[i]), len(ends))
            if k == len(ends):
                ends.append(0)
                layers.append([])
            ends[k] = addresses[i] + self.specs[i].nbytes
            layers[k].append(i)
        return layers

    def units(self, boxes: Sequence[int]) -> List[Unit]:
        """In the order of the files."""
        found: Dict[Tuple[Any, ...], List[Read]] = {}
        for i in boxes:
            for r in self.reads[i]:
                found.setdefault(r[:5], []).append(r)
        return [u for k in sorted(found, key=lambda k: k[:3]) for u in _apart(found[k])]


def enabled() -> bool:
    return os.environ.get("DCPD_DIRECT", "1") != "0" and ctypes.sizeof(ctypes.c_void_p) == 8


def choose(sizes: Sequence[int]) -> List[int]:
    """Which of boxes of so many bytes each are read faster here than by a job: all, or none, or large ones among very many small."""
    if sizes and sum(sizes) >= AVERAGE_MIN * len(sizes) and len(sizes) <= BOXES_MAX:
        return list(range(len(sizes)))
    large = [i for i, n in enumerate(sizes) if n >= LARGE]
    return large if sum(sizes[i] for i in large) >= LARGE_ALL and len(large) <= BOXES_MAX else []


def root_of(place: Any) -> str:
    """The storage's directory; "" if nothing will be read there, or if it cannot be told: the job will say why."""
    if place.root or not enabled():
        return str(place.root)
    try:
        return str(place.client.storages.get(place.storage).get("path") or "")
    except errors.DcpdError:
        return ""


class Elsewhere(Exception):
    """Nothing is read here; its text says why."""


def find(place: Any, specs: Sequence[ChunkSpec], verify: bool) -> Optional[Plan]:
    """What of these boxes can be read here; None if nothing, and the log says why. Never raises what a job would say better."""
    try:
        return examine(place, specs, verify)
    except Elsewhere as e:
        _log.info("%s: loaded by a job, not from its files: %s", place, e)
        return None


def examine(place: Any, specs: Sequence[ChunkSpec], verify: bool) -> Plan:
    """The same; raises Elsewhere."""
    if not enabled():
        raise Elsewhere("DCPD_DIRECT=0" if ctypes.sizeof(ctypes.c_void_p) == 8 else "this interpreter has 32 bits")
    if not place.client.url.startswith("unix://"):
        raise Elsewhere(f"the daemon at {place.client.url} may be on another host: only one at a Unix socket is on this one")
    if not specs:
        raise Elsewhere("all tensors are small, or none is contiguous CPU memory of the dtype that is asked for")
    root = ""
    try:
        root = root_of(place)
        plan = _find(place, root, specs, verify) or _find(place, root, specs, verify)  # the first time it may have been being replaced
    except errors.DcpdError as e:
        raise Elsewhere(f"the daemon says: {e}") from e
    except OSError as e:
        raise Elsewhere(f"{e.filename or root}: {e.strerror}; the daemon can read what this process cannot") from e
    except (KeyError, TypeError, ValueError) as e:
        raise Elsewhere(str(e)) from e
    if plan is None:
        raise Elsewhere(f"{root}/{place.name} is being replaced, or is not the one that the daemon has open (another container?)")
    if not plan.boxes:
        plan.close()
        raise Elsewhere(f"none of the {len(specs)} boxes lies in one piece in the files: columns, another dtype, compressed")
    return plan


def _find(place: Any, root: str, specs: Sequence[ChunkSpec], verify: bool) -> Optional[Plan]:
    """None if what the daemon has looked at is not there any more.

    A save replaces the whole directory; or, where other files are in it, it puts away .metadata, then the old files, moves in its own, and
    last its .metadata. Files are moved, never written again: what is open stays whole. So they are of the version that the daemon knows,
    all of them, if the .metadata that it has parsed still lies there, never moved, when the last of them is open: no save had begun to
    move files then. (PyTorch's own writer writes to the files that are there: what no digest speaks for is looked at again when it was
    read.)
    """
    fd = _open_below(root, place.name)
    try:
        told = _ask(place, specs, verify)
        if not told["id"]:
            raise ValueError("nothing tells versions of this checkpoint apart")
        if told["id"] != _ident(fd):
            return None
        if told["warning"]:
            errors.warn_of(place.object, told["warning"])
        reads = _reads(told, specs)
        unable = [specs[i].fqn for i, rows in reads.items() if verify and any(r.kind is None for r in rows)]
        if unable:
            errors.warn_of(place.object, f"{_tree.listing(sorted(set(unable)), 3)}: neither digest nor CRC32; what is read may be damaged")
        needed: Dict[int, int] = {}
        for r in (r for rows in reads.values() for r in rows):
            needed[r.file] = max(needed.get(r.file, 0), r.offset + r.bytes)
        if any(_digest.new(k) is None for k in {r.kind for rows in reads.values() for r in rows} if k):
            raise ValueError("no library for these digests")
        directory, fd = fd, -1  # from here on it is closed by those, also if they cannot be opened
        plan = Plan(str(told["id"]), _Files(directory, list(told["files"]), needed), reads, specs, _Segments(told["segments"]))
    except FileNotFoundError:
        return None
    finally:
        if fd >= 0:
            os.close(fd)
    if plan.files.ident() == plan.ident:
        return plan
    plan.close()
    return None


def _ident(directory: int) -> str:
    """Which checkpoint lies there, and which version of it, as the daemon says it. "" if it has no .metadata (of all ranks). A .metadata
    that was put away and put back, when a save failed, has another ctime."""
    try:
        st, md = os.fstat(directory), os.stat(".metadata", dir_fd=directory, follow_symlinks=False)
    except OSError:
        return ""
    return f"{st.st_dev}:{st.st_ino}:{md.st_ino}:{md.st_ctime_ns}"


def version(root: str, name: str) -> str:
    """`Plan.ident` of what is there now; GONE if there is nothing; "" if it cannot be told. root: "" if that is not known."""
    try:
        fd = _open_below(root, name) if root else -1
    except FileNotFoundError:
        return GONE
    except (OSError, ValueError):
        return ""
    if fd < 0:
        return ""
    try:
        return _ident(fd)
    finally:
        os.close(fd)


def _ask(place: Any, specs: Sequence[ChunkSpec], verify: bool) -> Dict[str, Any]:
    """The daemon's answer for all boxes; it takes so many bytes in one request."""
    told: Dict[str, Any] = {"id": None, "files": [], "segments": [], "reads": [], "others": [], "warning": ""}
    known: Dict[str, int] = {}
    known_segments: Dict[str, int] = {}
    first = 0
    while first < len(specs):
        boxes: List[Dict[str, Any]] = []
        room = _QUESTION
        for s in specs[first:]:
            box = {"fqn": s.fqn, "dtype": s.dtype, "shape": s.shape, "offsets": s.offsets, "sizes": s.sizes}
            room -= len(s.fqn) * 6 + sum(len(str(n)) + 1 for x in (s.shape, s.offsets, s.sizes) for n in x) + 100
            if boxes and room < 0:
                break
            boxes.append(box)
        got = place.client.checkpoints.locate(place.object, boxes, verify)
        files = [known.setdefault(name, len(known)) for name in got["files"]]
        segments = [known_segments.setdefault(name, len(known_segments)) for name in got.get("segments", [])]
        told["reads"] += [{**r, "box": r["box"] + first, "file": files[r["file"]], **({"segment": segments[r["segment"]]} if "segment" in r
                          else {})} for r in got["reads"]] if first else got["reads"]
        told["others"] += [{**x, "box": x["box"] + first} for x in got["others"]]
        told["warning"] = got.get("warning", "")
        told["id"] = got["id"] if told["id"] in (None, got["id"]) else "several"
        first += len(boxes)
    told["files"], told["segments"] = list(known), list(known_segments)
    return told


def _open_below(root: str, name: str) -> int:
    """The checkpoint's directory; below the storage's root no link is followed."""
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in name.split("/"):
            if part in ("", ".", ".."):
                raise ValueError(name)
            deeper = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = deeper
        return at
    except BaseException:
        os.close(at)
        raise


# ----------------------------------------------------------------------------------------------------- what the daemon says


def _reads(told: Mapping[str, Any], specs: Sequence[ChunkSpec]) -> Dict[int, List[Read]]:
    """Those of each box that is located. What does not add up is not. Raises ValueError, KeyError, TypeError for no answer at all."""
    others = {x["box"] for x in told["others"]}
    found: Dict[int, List[Read]] = {i: [] for i in range(len(specs)) if i not in others}
    for x in told["reads"]:
        kind = _digest.XXH3 if "xxh3" in x else _digest.CRC32 if "crc32" in x else None
        r = Read(x["file"], x["offset"], x["bytes"], kind, str(x[kind]) if kind else "", x["from"], x["count"], x["box"], x["at"])
        if kind and "segment" in x:
            r = r._replace(segment=x["segment"], segment_at=x["segment_offset"])
        numbers = (r.file, r.offset, r.bytes, r.begin, r.size, r.at, r.segment + 1, r.segment_at)
        if not all(type(n) is int and n >= 0 for n in numbers) or r.begin + r.size > r.bytes or r.file >= len(told["files"]) \
                or max(r.offset, r.segment_at) + r.bytes >= 1 << 63 or r.segment >= len(told["segments"]):
            raise ValueError(f"not a read: {x}")
        found[r.box].append(r)
    return {i: rows for i, rows in found.items() if _tiles(rows, specs[i].nbytes)}


def _tiles(rows: Sequence[Read], size: int) -> bool:
    """Whether they cover [0, size) once."""
    at = 0
    for r in sorted(rows, key=lambda r: r.at):
        if r.at != at:
            return False
        at += r.size
    return at == size


def _apart(rows: Sequence[Read]) -> Iterator[Unit]:
    """In lists without overlaps: a unit of which two boxes want the same bytes is read twice."""
    rest = sorted((r for r in rows if r.size), key=lambda r: r.begin)
    while rest:
        take: Unit = []
        left: Unit = []
        end = 0
        for r in rest:
            if r.begin >= end:
                take.append(r)
                end = r.begin + r.size
            else:
                left.append(r)
        yield take
        rest = left


# ------------------------------------------------------------------------------------------------------------------ files


class _Files:
    """The files of a checkpoint, beneath its directory. Raises OSError if one that is needed cannot be read or is too short."""

    def __init__(self, directory: int, names: List[str], needed: Mapping[int, int]) -> None:
        self.directory, self.names = directory, names
        self.fds: Dict[int, int] = {}
        self.known: Dict[int, Tuple[int, ...]] = {}
        try:
            most = min(_OPEN_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
            for i, size in needed.items():
                fd = self._open(i)
                if len(self.fds) < most:
                    self.fds[i] = fd
                st = os.fstat(fd)
                if i not in self.fds:
                    os.close(fd)
                if not stat.S_ISREG(st.st_mode) or st.st_size < size:
                    raise OSError(errno.EINVAL, "not what was told", names[i])
                self.known[i] = _stamp(st)
        except BaseException:
            self.close()
            raise

    def _open(self, i: int) -> int:
        at = self.directory
        folders = self.names[i].split("/")
        if any(x in ("", ".", "..") for x in folders):
            raise OSError(errno.EINVAL, "not a file's name", self.names[i])
        try:
            for name in folders[:-1]:
                deeper = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                if at != self.directory:
                    os.close(at)
                at = deeper
            return os.open(folders[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            if at != self.directory:
                os.close(at)

    def take(self, i: int) -> int:
        """Raises Replaced if its name is another file's by now, or nobody's."""
        fd = self.fds.get(i)
        if fd is not None:
            return fd
        try:
            fd = self._open(i)
        except FileNotFoundError as e:
            raise self.replaced(i) from e
        if self.changed(i, fd):
            os.close(fd)
            raise self.replaced(i)
        return fd

    def changed(self, i: int, fd: int) -> bool:
        """Whether it is another file than the one that was found, or was written to since."""
        return _stamp(os.fstat(fd)) != self.known[i]

    def replaced(self, i: int) -> Replaced:
        return Replaced(f"{self.names[i]}: the checkpoint was replaced while it was read", code="checkpoint_replaced", retryable=True,
                        file=self.names[i])

    def ident(self) -> str:
        return _ident(self.directory)

    def done(self, i: int, fd: int) -> None:
        if i not in self.fds:
            os.close(fd)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        if self.directory >= 0:
            os.close(self.directory)
            self.directory = -1


class _Segments:
    """Segments that have bytes of the checkpoint, too. One that this process cannot open is left out: the files have all."""

    def __init__(self, names: Sequence[str]) -> None:
        self.fds = [self._open(str(name)) for name in names[:_OPEN_MAX]]
        self.fds += [-1] * (len(names) - len(self.fds))

    @staticmethod
    def _open(name: str) -> int:
        """-1 for what is no file, too: a pipe of that name would be waited for."""
        try:
            fd = os.open(image.SHM + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK) if _SEGMENT.fullmatch(name) else -1
        except OSError:
            return -1
        if fd >= 0 and not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return -1
        return fd

    def close(self) -> None:
        for fd in self.fds:
            if fd >= 0:
                os.close(fd)
        self.fds = []


def _stamp(st: os.stat_result) -> Tuple[int, ...]:
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns


# ---------------------------------------------------------------------------------------------------------------- reading


def _libc() -> Any:
    if not _library:
        lib = ctypes.CDLL(None, use_errno=True)
        lib.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
        lib.pread.restype = ctypes.c_ssize_t
        if hasattr(lib, "preadv2"):
            lib.preadv2.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int)
            lib.preadv2.restype = ctypes.c_ssize_t
        _library.append(lib)
    return _library[0]


_library: List[Any] = []


def _read_ahead(device: int) -> int:
    """Bytes that the kernel reads ahead of one reader of a file by itself; 0: nobody knows."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for place in (f"/sys/class/bdi/{number}", f"/sys/dev/block/{number}/../queue"):  # of the file system, of the disk of a partition
        try:
            with open(f"{place}/read_ahead_kb", encoding="ascii") as f:
                return int(f.read()) << 10
        except (OSError, ValueError):
            pass
    return 0


def _ahead(fd: int, threads: int) -> int:
    """Bytes to ask the kernel for, where each rank has so many threads. The kernel's own read-ahead takes larger pieces of memory, and is
    the faster way if there is enough of it. Seconds on a disk of 2 GB/s, unasked and asked: 1 GiB by one rank 0.52 and 0.73 where the
    kernel reads 8 MiB ahead, 0.72 and 0.61 where it reads 128 KiB; 512 MiB by four ranks 0.32 and 0.37, 0.27 and 0.39."""
    device = os.fstat(fd).st_dev
    enough = ENOUGH if os.major(device) else ENOUGH_FAR
    return 0 if _read_ahead(device) * threads * _copy.ranks_here() >= enough else AHEAD


class _Reading:
    """Threads that take one unit after the other, in the order of the files."""

    def __init__(self, plan: Plan, units: Sequence[Unit], addresses: Mapping[int, int], end: Optional[float],
                 tick: Optional[Callable[[int], None]], then: Sequence[Unit]) -> None:
        self.plan, self.units, self.addresses, self.end, self.tick = plan, units, addresses, end, tick
        self.pread, self.guard, self.next = _libc().pread, threading.Lock(), 0
        self.cold = not hasattr(_libc(), "preadv2")  # whether something was not in the page cache
        self.stopped, self.done, self.shown = False, 0, 0.0
        self.from_memory = 0
        self.passed = self.advised = 0
        self.threads = min(_copy.threads(), 1 + sum(r.size for u in units for r in u) // _copy.ALONE, len(units))
        self.ahead: Optional[int] = None  # once something was not in the page cache
        self.advice = self._advice([*units, *then])

    def run(self) -> None:
        n = self.threads
        running: List[Any] = []
        try:
            try:
                for _ in range(n - 1):
                    running.append(_copy._get_pool(n).submit(self._work, False))
            except RuntimeError:  # the interpreter is ending, and starts no thread any more
                pass
            self._work(True)
            self._wait(running)
        finally:  # also after a KeyboardInterrupt, and a second one: what they write to will be somebody else's
            self.stopped = True
            _copy.outlive(running)
        for r in running:
            r.result()

    def _wait(self, running: List[Any]) -> None:
        from concurrent import futures

        while running and not self.stopped and futures.wait(running, 0.2).not_done:
            self.show()

    def show(self) -> None:
        if self.tick is not None and time.monotonic() - self.shown > 0.1:
            self.shown = time.monotonic()
            self.tick(self.done)

    def _work(self, mine: bool) -> None:
        """mine: in the caller's thread, which shows how far it is."""
        one = _Thread(self, mine)
        try:
            while not self.stopped:
                with self.guard:
                    i = self.next
                    self.next += 1
                if i >= len(self.units):
                    return
                one.unit(self.units[i])
        except BaseException:
            self.stopped = True
            raise

    def _advice(self, units: Sequence[Unit]) -> Iterator[Tuple[int, int, int]]:
        """All that will be read, in steps for the kernel."""
        for u in units:
            if u[0].segment >= 0:
                continue
            fd = self.plan.files.fds.get(u[0].file, -1)
            for begin, count in [(0, u[0].bytes)] if u[0].kind else [(r.begin, r.size) for r in u]:
                for at in range(begin, begin + count, _ADVICE):
                    yield fd, u[0].offset + at, min(_ADVICE, begin + count - at)

    def passes(self, n: int, fd: int) -> None:
        """n bytes of a file are about to be read: so many more of all files are asked for. Where everything is in the cache that would
        take a tenth of the time."""
        steps: List[Tuple[int, int, int]] = []
        with self.guard:
            self.passed += n
            if self.cold and self.ahead is None:
                self.ahead = _ahead(fd, self.threads)
            while self.ahead and self.advised < self.passed + self.ahead:
                step = next(self.advice, (-1, 0, 1 << 63))
                self.advised += step[2]
                if self.advised > self.passed:
                    steps.append(step)
        for to, offset, size in steps:
            if to >= 0:
                os.posix_fadvise(to, offset, size, os.POSIX_FADV_WILLNEED)


class _Place(NamedTuple):
    """Where a unit begins. memory: in a segment, which may be cut or written to at any time."""

    fd: int
    offset: int
    memory: bool


class _Thread:
    """One thread's share: its digests, and room for bytes that belong to no box."""

    def __init__(self, reading: _Reading, mine: bool) -> None:
        self.all, self.mine = reading, mine
        self.digests: Dict[str, Any] = {}
        self.waste: Any = None
        self.kept = 0  # bytes of boxes, in the unit at hand
        self.vector = (ctypes.c_size_t * 2)()  # a struct iovec
        self.vector_at = ctypes.addressof(self.vector)

    def _pread(self, fd: int, to: int, n: int, at: int) -> int:
        """As pread(2). As long as all is in the page cache, only what is there: the first time that it is not is noticed."""
        if not self.all.cold:
            self.vector[0], self.vector[1] = to, n
            got = int(_libc().preadv2(fd, self.vector_at, 1, at, _RWF_NOWAIT))
            if got > 0:
                return got
            self.all.cold = True
            self.all.passes(0, fd)
        return int(self.all.pread(fd, to, n, at))

    def unit(self, u: Unit) -> None:
        files, first = self.all.plan.files, u[0]
        digest: Any = None
        if first.kind:
            digest = self.digests.get(first.kind)
            if digest is None:
                digest = self.digests[first.kind] = _digest.new(first.kind)
            digest.begin()
        if first.segment >= 0 and self._from_segment(u, digest):
            return
        try:
            fd = files.take(first.file)
        except OSError as e:
            raise self._failed(first, first.offset, e) from e
        try:
            self._whole(u, _Place(fd, first.offset, False), digest)
        except errors.CheckpointDamaged as e:
            if files.changed(first.file, fd):
                raise files.replaced(first.file) from e
            raise
        else:
            if digest is None and files.changed(first.file, fd):
                raise files.replaced(first.file)
        finally:
            files.done(first.file, fd)

    def _from_segment(self, u: Unit, digest: Any) -> bool:
        """Copies the unit from memory. False: it is not there any more, and the file's bytes go where this has written."""
        first, reading = u[0], self.all
        fd = reading.plan.segments.fds[first.segment]
        if fd < 0:
            return False
        self.kept = 0
        try:
            self._whole(u, _Place(fd, first.segment_at, True), digest)
        except errors.CheckpointDamaged:
            reading.done -= self.kept
            digest.begin()
            return False
        with reading.guard:
            reading.from_memory += self.kept
        return True

    def _whole(self, u: Unit, place: _Place, digest: Any) -> None:
        at, first = 0, u[0]
        for r in u:
            self._skip(r, place, at, r.begin, digest)
            self._bytes(r, place, r.begin, r.size, self.all.addresses[r.box] + r.at, True, digest)
            at = r.begin + r.size
        self._skip(first, place, at, first.bytes, digest)
        if digest is not None and not self.all.stopped and digest.text() != first.digest:
            raise errors.CheckpointDamaged(
                f"{self._where(first)}: bytes {first.offset} to {first.offset + first.bytes} are not those written: expected "
                f"{first.digest}, found {digest.text()}", code="digest_mismatch", **self._fields(first, first.offset))

    def _skip(self, r: Read, place: _Place, begin: int, end: int, digest: Any) -> None:
        """Bytes that only the digest is of."""
        if digest is not None and begin < end:
            if self.waste is None:
                self.waste = (ctypes.c_char * PIECE)()
            self._bytes(r, place, begin, end - begin, ctypes.addressof(self.waste), False, digest)

    def _bytes(self, r: Read, place: _Place, begin: int, n: int, address: int, keep: bool, digest: Any) -> None:
        """keep: one piece behind the other; else each to the same place."""
        reading, at, end = self.all, place.offset + begin, place.offset + begin + n
        while at < end and not reading.stopped:
            if reading.end is not None and time.monotonic() > reading.end:
                raise errors.WaitTimeout("it was not read in time")
            piece = min(PIECE, end - at)
            if not place.memory:
                reading.passes(piece, place.fd)
            to, left = address, piece
            while left:
                got = int(reading.pread(place.fd, to, left, at)) if place.memory else self._pread(place.fd, to, left, at)
                if got <= 0:
                    number = ctypes.get_errno() if got < 0 else 0
                    if number == errno.EINTR:
                        continue
                    raise self._failed(r, at, OSError(number, os.strerror(number)) if number and not place.memory else None)
                if digest is not None:
                    digest.add(to, got)
                to, at, left = to + got, at + got, left - got
            if keep:
                address = to
                self.kept += piece
                reading.done += piece  # for people: an addition that is lost does no harm
            if self.mine:
                reading.show()

    def _where(self, r: Read) -> str:
        return f"{self.all.plan.files.names[r.file]}, {self.all.plan.specs[r.box].fqn}"

    def _fields(self, r: Read, offset: int) -> Dict[str, Any]:
        return {"fqn": self.all.plan.specs[r.box].fqn, "file": self.all.plan.files.names[r.file], "offset": offset}

    def _failed(self, r: Read, offset: int, e: Optional[OSError]) -> errors.DcpdError:
        if e is None or e.errno == errno.ENOENT:
            why = "the file is missing" if e is not None else f"the file ends at byte {offset}"
            return errors.CheckpointDamaged(f"{self._where(r)}: {why}", code="checkpoint_incomplete", **self._fields(r, offset))
        return errors.StorageFailed(f"{self._where(r)}: cannot be read: {e.strerror}", code="storage_io", **self._fields(r, offset))
