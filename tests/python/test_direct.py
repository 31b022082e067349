"""Loads that read the files themselves: that they do, what comes, and what stays the daemon's; the drop-in's, too. What goes wrong is in
test_direct_faults.py, versions of a checkpoint in test_direct_replaced.py."""
import ctypes
import os
import pathlib
import sys
import tempfile
import types
import zlib

import harness as lib
import numpy as np
import on_direct
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import program_environment
from lib_direct import always, direct, folder, item, like, low, same, saved, tensors  # noqa: F401
from test_dropin_digests import flip
from test_ranks import FOUR, TWO

import dcpd
from dcpd import _digest, _direct, _tensors, client, doctor, image
from dcpd.torch import StorageReader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# ---- that it is done, and when ----


def test_no_job_where_nothing_needs_one(at):
    sd = tensors()
    ref = saved(sd)
    into = like(sd)
    places = [t.data_ptr() for t in into.values()]
    requests = []
    real = client.Transport.raw

    def raw(self, method, path, *args, **kw):
        requests.append((method, path.split("?")[0]))
        return real(self, method, path, *args, **kw)

    with direct(at) as seen, pytest.MonkeyPatch.context() as m:
        m.setattr(client.Transport, "raw", raw)
        dcpd.load(ref, into=into)
    same(into, sd)
    assert [t.data_ptr() for t in into.values()] == places
    assert (seen.boxes, seen.bytes, seen.jobs) == (4, 800_000, [])
    assert requests == [("GET", "/v1/storages/main"), ("POST", f"/v1/checkpoints/main/{ref[5:]}:locate")]


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_the_kernel_is_asked_where_it_reads_too_little_ahead(at, monkeypatch, reads_ahead):
    """As long as a file is in the page cache nobody is asked; of a library that cannot tell, none is."""
    sd = {"w": torch.arange(6 << 20, dtype=torch.float32)}
    ref = saved(sd)
    library, asked = types.SimpleNamespace(pread=_direct._libc().pread), []
    monkeypatch.setattr(_direct, "_libc", lambda: library)
    monkeypatch.setattr(_direct, "_read_ahead", lambda device: reads_ahead << 30)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, begin, size, advice: asked.append(size))
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.jobs == [] and (not asked if reads_ahead else 16 << 20 < sum(asked) <= 25 << 20), asked


def test_what_the_kernel_reads_ahead_by_itself(tmp_path):
    with open(tmp_path / "file", "wb") as f:
        device = os.fstat(f.fileno()).st_dev
        told = pathlib.Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        if told.exists():  # a partition has what its disk has
            assert _direct._read_ahead(device) == int(told.read_text()) << 10
        assert _direct._ahead(f.fileno(), 1) in (0, _direct.AHEAD)


def test_memory_may_lie_low(at):
    sd = tensors()
    ref = saved(sd)
    into = {k: low(v.numel()) for k, v in sd.items()}
    assert max(t.data_ptr() for t in into.values()) < 1 << 36
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert (seen.boxes, seen.jobs) == (4, [])


@pytest.mark.parametrize("why, change", [
    ("DCPD_DIRECT=0", lambda m, at: m.setenv("DCPD_DIRECT", "0")),
    ("Permission denied", lambda m, at: m.setattr(_direct, "_open_below", refuse)),
    ("no library for these digests", lambda m, at: m.setitem(_digest._found, "xxh3", None)),
    ("is not the one that the daemon has open", lambda m, at: m.setattr(_direct, "_ident", lambda fd: "another")),
    ("contiguous", lambda m, at: m.setattr(_tensors, "memory", lambda *a: None)),
    ("none of the 4 boxes", lambda m, at: m.setattr(_direct, "_tiles", lambda *a: False)),
])
def test_the_log_says_why_not(at, monkeypatch, caplog, why, change):
    sd = tensors()
    ref, into = saved(sd), like(sd)
    change(monkeypatch, at)
    with direct(at) as seen, caplog.at_level("INFO", "dcpd"):
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.boxes == 0 and len(seen.jobs) == 1
    told = [r.getMessage() for r in caplog.records if "not from its files" in r.getMessage()]
    assert len(told) == 1 and why in told[0] and ref in told[0], caplog.text


def refuse(root, name):
    raise PermissionError(13, "Permission denied", root)


def test_ranks_make_no_trip_in_vain(ranks, d, monkeypatch):
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    ref = saved(tensors())
    dcpd.close()
    got = ranks(on_direct.trips, ref)
    assert got == [(["main", "locate"], 3)] + [(["locate"], 3)] * 3


def test_values_come_by_a_tiny_job(at):
    sd = {**tensors(), "step": 7, "sched": {"last": [1, 2]}}
    ref = saved(sd)
    into = {**like(tensors()), "step": 0, "sched": {"last": None}}
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    assert into.pop("step") == 7 and into.pop("sched") == {"last": [1, 2]}
    same(into, tensors())
    assert seen.boxes == 4 and len(seen.jobs) == 1 and seen.jobs[0]["progress"].get("bytes_total", 0) < 1000


def test_many_small_ones_are_left_to_a_job(at):
    sd = {f"l{i}.w": torch.full((256,), float(i)) for i in range(300)}
    ref, into = saved(sd), like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.boxes == 0 and len(seen.jobs) == 1


def test_large_ones_among_many_small(at, monkeypatch):
    monkeypatch.setattr(_direct, "LARGE", 1 << 16)
    monkeypatch.setattr(_direct, "LARGE_ALL", 1 << 17)
    sd = {**{f"l{i}.w": torch.full((16,), float(i)) for i in range(300)}, **tensors(2, 20_000)}
    ref, into = saved(sd), like(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.boxes == 2 and len(seen.jobs) == 1
    into = like(sd)
    with direct(at) as seen:
        dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
    same(into, sd)
    assert seen.boxes == 2 and len(seen.jobs) == 1


@pytest.mark.parametrize("why", ["DCPD_DIRECT", "library", "old daemon", "other url", "unreadable", "elsewhere"])
def test_by_jobs_where_it_cannot_be(at, monkeypatch, why):
    sd = tensors()
    ref, into = saved(sd), like(sd)
    if why == "DCPD_DIRECT":
        monkeypatch.setenv("DCPD_DIRECT", "0")
    elif why == "library":
        monkeypatch.setitem(_digest._found, "xxh3", None)
    elif why == "old daemon":
        def locate(self, r, *_):
            return self._t.request("POST", self._path(r, ":nothing"), {})
        monkeypatch.setattr(client.Checkpoints, "locate", locate)
    elif why == "other url":
        monkeypatch.setenv("DCPD_URL", "http://%s:%d" % at.tcp_client().tcp)
        monkeypatch.setenv("DCPD_TOKEN", (at.state / "token").read_text().strip())
    elif why == "unreadable":
        real = os.open

        def opens(path, flags, *args, **kw):
            if str(path).endswith(".distcp"):
                raise PermissionError(13, "Permission denied", path)
            return real(path, flags, *args, **kw)

        monkeypatch.setattr(os, "open", opens)
    else:
        real_get = client.Storages.get
        monkeypatch.setattr(client.Storages, "get", lambda self, name: {**real_get(self, name), "path": str(at.home)})
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same(into, sd)
    assert seen.boxes == 0 and len(seen.jobs) == 1
    if why == "library":  # and none is needed where nothing is verified
        with direct(at) as seen:
            dcpd.load(ref, into=into, verify=False)
        assert seen.boxes == 4


@pytest.fixture
def open_to_all(monkeypatch):
    """A daemon in a folder that every user may enter; pytest's own are closed, whenever another run begins."""
    with tempfile.TemporaryDirectory(prefix="dcpd-open-") as home:
        os.chmod(home, 0o755)
        d = lib.Daemon(pathlib.Path(home), args=["--allow-group", "nogroup"])
        monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
        yield d
        dcpd.close()
        d.discard()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_of_another_user(open_to_all, forks):
    """The trainer may talk to the daemon, and not open its files."""
    d = open_to_all
    sd = tensors()
    ref = saved(sd)
    code = d.home / "other.py"
    code.write_text("import os, sys, torch, dcpd\n"
                    "from dcpd import _daemon, _direct\n"
                    "into = {f'w{i}': torch.zeros(50_000) for i in range(4)}\n"
                    "for how in '10':  # all is imported then: Python itself may be root's\n"
                    "    os.environ['DCPD_DIRECT'] = how\n"
                    "    dcpd.load(sys.argv[1], into=into)\n"
                    "dcpd.close()\n"
                    "_daemon.forget()\n"
                    "del os.environ['DCPD_DIRECT']\n"
                    "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
                    "[t.zero_() for t in into.values()]\n"
                    "_direct.counts['boxes'] = 0\n"
                    "dcpd.load(sys.argv[1], into=into)\n"
                    "print([float(into[f'w{i}'][-1]) for i in range(4)], _direct.counts['boxes'])\n"
                    "dcpd.close()\n")
    code.chmod(0o644)
    d.state.chmod(0o755)
    for mode, boxes in ((0o700, 0), (0o755, 4)):
        folder(d, ref).chmod(mode)
        for p in (d.storages["main"], *folder(d, ref).iterdir()):
            p.chmod(0o755)
        out, err = forks.start(code, ref, env=program_environment(d)).communicate(timeout=100)
        assert out.strip() == f"{[49999.0 + 1000 * i for i in range(4)]} {boxes}", err


# ---- what comes ----

DTYPES = [t for t in ("bfloat16", "float16", "float64", "int8", "int16", "int64", "uint8", "uint16", "bool", "complex64", "complex128",
                      "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, t)]


def test_all_dtypes_and_forms(at, always):
    raw = torch.randint(0, 2, (64 * 16,), dtype=torch.uint8)
    sd = {t: raw.clone().view(getattr(torch, t)).reshape(8, -1) for t in DTYPES}
    sd |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "one": torch.ones(1, 1, 1), "param": torch.nn.Parameter(torch.rand(7))}
    ref, into = saved(sd), {k: torch.zeros_like(v) for k, v in sd.items()}
    into["param"] = torch.nn.Parameter(torch.zeros(7))
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    same({k: v.detach() for k, v in into.items()}, {k: v.detach() for k, v in sd.items()})
    assert seen.boxes == len(sd) and not seen.jobs and isinstance(into["param"], torch.nn.Parameter)


def test_what_needs_more_than_bytes_goes_the_other_way(at, always):
    sd = {"plain": torch.rand(64, 64), "cast": torch.rand(64, 64), "t": torch.rand(64, 32), "strided": torch.rand(64, 64),
          "conj": torch.rand(16, dtype=torch.complex64), "stored_t": torch.rand(32, 8).t()}
    into = {"plain": torch.zeros(64, 64), "cast": torch.zeros(64, 64, dtype=torch.float64), "t": torch.zeros(32, 64).t(),
            "strided": torch.zeros(64, 128)[:, ::2], "conj": torch.zeros(16, dtype=torch.complex64).conj(), "stored_t": torch.zeros(8, 32)}
    ref = saved(sd)
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    for k, x in sd.items():
        assert torch.equal(into[k].resolve_conj(), x.to(into[k].dtype)), k
    assert seen.boxes == 2 and len(seen.jobs) == 1


def test_arrays(at, always):
    sd = {"a": np.arange(5000, dtype=np.float32), "f": np.asfortranarray(np.random.rand(20, 30)), "be": np.arange(9, dtype=">i4")}
    ref = saved(sd)
    into = {"a": np.zeros(5000, np.float32), "f": np.zeros((20, 30), order="F"), "be": np.zeros(9, ">i4")}
    with direct(at) as seen:
        dcpd.load(ref, into=into)
    assert all((into[k] == sd[k]).all() for k in sd) and seen.boxes == 1
    frozen = np.zeros(5000, np.float32)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, dcpd.DcpdError), match="read-only"):
        dcpd.load(ref, into={"a": frozen})
    assert not frozen.any()


def test_tied_weights_and_modules(at, always):
    """Two keys share one memory, and the checkpoint has different bytes for them: one of them is there in the end, and no digest is
    wrong because the other was written meanwhile."""
    big = {"a": torch.full((1 << 20,), 1.0), "b": torch.full((1 << 20,), 2.0), "c": torch.full((1 << 19,), 3.0)}
    ref, t = saved(big), torch.zeros(1 << 20)
    for _ in range(3):
        into = {"a": t, "b": t, "c": t[1 << 19:]}
        dcpd.load(ref, into=into)
        assert t[0] in (1, 2) and t[:1 << 19].eq(t[0]).all() and (t[-1] == 3 or t[-1] == t[0])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.rand(3, 64)).sum().backward()
    optim.step()
    ref = saved({"model": model, "optim": optim})
    fresh = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    other = torch.optim.AdamW(fresh.parameters())
    with direct(at) as seen:
        dcpd.load(ref, into={"model": fresh, "optim": other})
    same(fresh.state_dict(), model.state_dict())
    assert seen.boxes > 8 and torch.equal(other.state_dict()["state"][0]["exp_avg"], optim.state_dict()["state"][0]["exp_avg"])
    with torch.device("meta"):
        meta = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with direct(at) as seen:
        dcpd.load(ref, into={"model": meta})
    same(meta.state_dict(), model.state_dict())
    assert seen.boxes == 4


def boxed(t, shape, offsets):
    """A part of a global tensor, as PyTorch's CheckpointableTensor says it."""
    t.global_shape, t.global_offsets, t.local_offsets, t.local_sizes = shape, [offsets], [(0,) * t.dim()], [tuple(t.shape)]
    return t


def test_parts_of_units_and_columns(at, always):
    """Rows that begin and end within a digest's block are read directly, the digest is of all of it; few rows of a block are not worth it,
    unless nothing is verified, and columns are no bytes in a row."""
    whole = torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000)  # 12 MB: more than a block
    ref = saved({"w": whole})
    for rows, n in (((0, 3000), 1), ((1, 2), 1), ((1040, 1060), 0), ((900, 1900), 1), ((7, 2993), 1)):
        t = torch.zeros(rows[1] - rows[0], 1000)
        with direct(at) as seen:
            dcpd.load(ref, into={"w": boxed(t, (3000, 1000), (rows[0], 0))}, verify=rows != (1, 2))
        assert torch.equal(t, whole[rows[0]:rows[1]]), rows
        assert seen.boxes == n, rows
    t = torch.zeros(3000, 100)
    with direct(at) as seen:
        dcpd.load(ref, into={"w": boxed(t, (3000, 1000), (0, 450))})
    assert torch.equal(t, whole[:, 450:550]) and seen.boxes == 0 and len(seen.jobs) == 1


@pytest.mark.short("dcpd")
@pytest.mark.parametrize("writer", ["dcpd", "pytorch"])
def test_layouts_on_ranks(ranks, d, writer):
    name = lib.fresh()
    if writer == "dcpd":
        ranks(on_ranks.save_tensors, f"main:{name}", FOUR)
    else:
        ranks(on_ranks.pytorch_save, str(d.storages["main"] / name), FOUR)
    for specs, world in ((FOUR, 4), (TWO, 2)):
        got = ranks(on_direct.directly, on_ranks.load_tensors, f"main:{name}", specs, world=world)
        assert all(n >= 5 for _, n in got), got
        ranks(on_direct.directly, on_ranks.load_tensors, str(d.storages["main"] / name), specs, world=world)
    ref = f"main:{lib.fresh()}"
    ranks(on_ranks.save_tensors, ref, TWO, world=2)
    ranks(on_direct.directly, on_ranks.load_tensors, ref, FOUR)
    ref = f"main:{lib.fresh()}"
    for save in (True, False):
        ranks(on_direct.directly, on_ranks.gaps, f"{ref}g", save)
        ranks(on_direct.directly, on_ranks.sharded_tensors, f"{ref}s", save)
        ranks(on_direct.directly, on_ranks.strided, f"{ref}t", 7, save)


def test_what_pytorch_wrote_is_checked_by_its_crc(at, always):
    name, sd = lib.fresh(), tensors()
    place = at.storages["main"] / name
    dcp.save(sd, checkpoint_id=str(place), no_dist=True)
    into = like(sd)
    with direct(at) as seen:
        dcpd.load(str(place), into=into)
    same(into, sd)
    assert seen.boxes == 4 and not seen.jobs
    file, at_byte = item(at, f"main:{name}", "w2")
    flip(place / file, at_byte + 5)
    with pytest.raises(dcpd.CheckpointDamaged) as e:
        dcpd.load(str(place), into=into)
    assert (e.value.code, e.value.fqn, e.value.file, e.value.offset) == ("digest_mismatch", "w2", file, at_byte)


def test_nothing_beside_the_target_is_written(at, always):
    sd = tensors(3, 70_001)
    ref = saved(sd)
    room = torch.full((3 * 70_001 + 40,), -1.0)
    at_ = [10, 10 + 70_001 + 10, 10 + 2 * (70_001 + 10)]
    dcpd.load(ref, into={f"w{i}": room[a:a + 70_001] for i, a in enumerate(at_)})
    for i, a in enumerate(at_):
        assert torch.equal(room[a:a + 70_001], sd[f"w{i}"])
        room[a:a + 70_001] = -1
    assert room.eq(-1).all()


# ---- digests ----


def test_digests_are_the_same_whoever_computes_them(monkeypatch):
    data = (ctypes.c_char * 100_000).from_buffer(bytearray(os.urandom(100_000)))
    at = ctypes.addressof(data)

    def of(kind):
        _digest._found.clear()
        h = _digest.new(kind)
        if h is None:
            return None
        h.begin()
        h.add(at, 5)
        h.begin()
        for i in range(0, 100_000, 30_000):
            h.add(at + i, min(30_000, 100_000 - i))
        return h.text()

    native, crc = of("xxh3"), of("crc32")
    assert crc == f"{zlib.crc32(bytes(data)):08x}" and len(native) == 32
    monkeypatch.setattr(_digest, "_update", lambda library: library.XXH3_128bits_update)
    assert of("xxh3") == native
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: (_ for _ in ()).throw(OSError("not there")))
    assert of("crc32") == crc
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert of("xxh3") is None
    monkeypatch.undo()
    _digest._found.clear()


def test_the_doctor_says_whether(monkeypatch):
    assert doctor._direct_reads()[0] == "ok"
    monkeypatch.setitem(_digest._found, "xxh3", None)
    assert doctor._direct_reads()[0] == "warn" and "libxxhash0" in doctor._direct_reads()[2]
    monkeypatch.setenv("DCPD_DIRECT", "0")
    assert doctor._direct_reads()[1].startswith("DCPD_DIRECT=0") and doctor._direct_reads() in doctor.examine()


def test_the_doctor_tries_it(at, monkeypatch):
    """On a checkpoint that is there: what stands in the way is said as a load meets it."""
    def line():
        return [x for x in doctor.examine() if x[1].startswith("loads from main")]

    saved(tensors())
    assert line() == [("ok", "loads from main read the files themselves", "")]
    monkeypatch.setattr(_direct, "_open_below", refuse)
    state, what, todo = line()[0]
    assert state == "warn" and "Permission denied" in what and "shared memory" in todo


def test_units_and_layers():
    """Two boxes of the same stored bytes, and boxes of the same memory."""
    spec = image.ChunkSpec("w", "uint8", (100,), (0,), (100,))
    reads = {i: [_direct.Read(0, 0, 100, None, "", b, n, i, 0)] for i, (b, n) in enumerate(((0, 50), (40, 60), (50, 50), (0, 100)))}
    specs = [spec._replace(sizes=(n,)) for n in (50, 60, 50, 100)]
    plan = _direct.Plan("1:1", None, reads, specs, None)
    assert [[r.box for r in u] for u in plan.units([0, 1, 2, 3])] == [[0, 2], [3], [1]]
    assert plan._layers({0: 1000, 1: 1050, 2: 1110}) == [[0, 1, 2]]
    assert plan._layers({0: 1000, 1: 1000, 2: 1049, 3: 1100}) == [[0, 3], [1], [2]]


# ---- the drop-in ----


def test_the_reader_reads_directly(at):
    sd = tensors()
    ref = saved({**sd, "v": {"x": 1}})
    into = {**like(sd), "v": {"x": 0}}
    with direct(at) as seen:
        dcp.load(into, storage_reader=StorageReader(ref), no_dist=True)
    assert into.pop("v") == {"x": 1}
    same(into, sd)
    assert (seen.boxes, seen.jobs) == (4, [])


class Other(dcp.DefaultLoadPlanner):
    """Gives targets that bytes cannot be read into, and takes them in commit_tensor."""

    def __init__(self, how):
        super().__init__()
        self.how, self.order, self.held, self.most = how, [], 0, 0

    def resolve_tensor(self, item):
        t = super().resolve_tensor(item)
        self.order.append(("resolve", item.dest_index.fqn))
        self.held += t.nbytes
        self.most = max(self.most, self.held)
        return self.how(t)

    def commit_tensor(self, item, tensor):
        t = super().resolve_tensor(item)
        self.order.append(("commit", item.dest_index.fqn))
        self.held -= t.nbytes
        t.copy_(tensor.reshape(t.shape))


@pytest.mark.parametrize("how", ["cast", "strided", "fresh"])
def test_planners_with_targets_of_their_own(at, monkeypatch, how):
    from dcpd.torch import _reader

    monkeypatch.setattr(_reader, "_AT_ONCE", 300_000)
    made = {"cast": lambda t: torch.zeros_like(t, dtype=torch.float64), "strided": lambda t: torch.zeros(len(t), 2)[:, 0],
            "fresh": torch.zeros_like}[how]
    sd = tensors(6)
    ref, into, planner = saved(sd), like(sd), Other(made)
    with direct(at) as seen:
        dcp.load(into, storage_reader=StorageReader(ref), planner=planner, no_dist=True)
    same(into, sd)
    assert seen.boxes == 6 and planner.most <= 400_000 and planner.held == 0
    assert len(planner.order) == 12


def test_the_reader_finds_damage(at):
    sd = tensors()
    ref = saved(sd)
    file, begin = item(at, ref, "w1")
    flip(folder(at, ref) / file, begin + 9)
    with pytest.raises((dcpd.CheckpointDamaged, dcp.CheckpointException), match="are not those written") as e:
        dcp.load(like(sd), storage_reader=StorageReader(ref), no_dist=True)
    assert "w1" in str(e.value) and file in str(e.value)


def test_the_reader_on_ranks(ranks, d):
    path = str(d.storages["main"] / lib.fresh())
    ranks(on_ranks.pytorch_save, path, FOUR)
    got = ranks(on_direct.directly, on_ranks.dropin_load, path, TWO, world=2)
    assert min(n for _, n in got) >= 5, got
