"""What makes the drop-in quick must not be seen in what it does: loads in groups, copies into new segments, and the twin of a staged
state dict. The figures are rows of `make bench` (drop.*)."""
import collections
import mmap
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dropin import path, save  # noqa: F401
from test_dropin_digests import byte_of

import dcpd
from dcpd import _copy, errors
from dcpd.torch import StorageReader, StorageWriter, _lane, _reader, _stage

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture
def groups(monkeypatch):
    """Groups of 64 KiB, as many as are needed, all through the daemon."""
    monkeypatch.setenv("DCPD_DIRECT", "0")
    monkeypatch.setattr(_reader, "_GROUP_MIN", 64 << 10)
    monkeypatch.setattr(_reader, "_GROUPS", 1000)


def tensors(n=7, count=5000):
    return {f"t{i}": torch.arange(count * (i + 1), dtype=torch.float32) + i for i in range(n)}


def read(sd, where):
    dcp.load(sd, storage_reader=StorageReader(where))


def jobs(kind):
    return dcpd.connect().jobs.list(filter=f"kind={kind}")


# ------------------------------------------------------------------------------------------------------- loads in groups


def test_a_load_in_groups(path, groups):  # noqa: F811
    sd = tensors()
    dcp.save(sd, storage_writer=StorageWriter(path))
    before = len(jobs("load"))
    got = {k: torch.zeros_like(v) for k, v in sd.items()}
    read(got, path)
    assert all(torch.equal(got[k], v) for k, v in sd.items())
    assert len(jobs("load")) - before == 6  # the first two go together; each of the others is larger than a group
    assert sum(x.use == "data" for x in _lane._lanes) <= 3  # the save's, and two in turn
    assert all(x.free() for x in _lane._lanes)


def test_groups_are_few_however_large_a_load_is(monkeypatch):
    spec = dcpd.image.ChunkSpec("t", "uint8", (1 << 20,), (0,), (1 << 20,))
    boxes = [(i, spec) for i in range(4096)]
    for world, groups_ in (("1", 16), ("4", 16)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", world)
        assert len(_reader._groups(boxes)) == groups_
        assert [b for g in _reader._groups(boxes) for b in g] == boxes
    assert [len(g) for g in _reader._groups(boxes[:65])] == [32, 32, 1]  # half of 64 MiB, with other ranks beside
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert [len(g) for g in _reader._groups(boxes[:65])] == [64, 1]


def test_damage_in_a_later_group(path, groups):  # noqa: F811
    sd = tensors()
    dcp.save(sd, storage_writer=StorageWriter(path))
    info = next(v for k, v in StorageReader(path).read_metadata().storage_data.items() if k.fqn == "t4")
    at = byte_of(path / info.relative_path, info.offset, info.length)
    with open(path / info.relative_path, "r+b") as f:
        f.seek(at)
        b = f.read(1)
        f.seek(at)
        f.write(bytes((b[0] ^ 1,)))
    with pytest.raises(dcp.CheckpointException) as e:
        read({k: torch.zeros_like(v) for k, v in sd.items()}, path)
    assert "t4" in str(e.value)
    assert all(x.free() for x in _lane._lanes)
    some = {k: torch.zeros_like(v) for k, v in sd.items() if k != "t4"}
    read(some, path)
    assert all(torch.equal(some[k], sd[k]) for k in some)


def test_what_dcpd_refuses_in_a_later_group_is_read_once(path, groups, monkeypatch):  # noqa: F811
    """Item by item only from there on: a planner sees each of its items once."""
    sd = tensors(5)
    dcp.save(sd, storage_writer=StorageWriter(path))
    take, seen = _reader._Group.take, []

    class Planner(dcp.DefaultLoadPlanner):
        def commit_tensor(self, item, tensor):
            seen.append(item.storage_index.fqn)

    def refused(self, planner):
        if any(spec.fqn == "t3" for _, spec in self.boxes):
            self.lane.let_go()
            raise errors.DcpdError("no such kind of item", code="format_item")
        take(self, planner)

    monkeypatch.setattr(_reader._Group, "take", refused)
    got = {k: torch.zeros_like(v) for k, v in sd.items()}
    dcp.load(got, storage_reader=StorageReader(path), planner=Planner())
    assert all(torch.equal(got[k], v) for k, v in sd.items())
    assert sorted(seen) == sorted(sd)


# -------------------------------------------------------------------------------------------------- copies into segments


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.long)])
def test_copies_into_a_new_segment(tmp_path, named):
    """First through the file, then with pages mapped at once, then as ever; also where the file has lost its name."""
    import ctypes

    size, file = 40 << 20, tmp_path / "segment"
    file.write_bytes(b"")
    os.truncate(file, size)
    with open(file, "r+b") as f:
        m = mmap.mmap(f.fileno(), size)
    if not named:
        file.unlink()
    address = ctypes.addressof(ctypes.c_char.from_buffer(m))
    into = _copy.Into(str(file), address, size)
    for k in range(3):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        want = torch.frombuffer(bytearray(m), dtype=torch.uint8)
        blocks = []
        for at, n in ((5, 1 << 20), (3 << 20, (20 << 20) + 7), (39 << 20, 4096)):
            blocks.append((address + at, source.data_ptr() + at + 1, n))
            want[at:at + n] = source[at + 1:at + 1 + n]
        _copy.copy_into(into, blocks)
        assert torch.equal(torch.frombuffer(bytearray(m), dtype=torch.uint8), want), k
        assert (into.new, into.unmapped) == (False, named and k == 0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("way", ["stage", "async_save"])
def test_new_pages_are_made_once(at, way, threads, monkeypatch):
    """Either mapped by several threads, or filled through the file by few: doing both takes the time of both."""
    monkeypatch.setenv("DCPD_COPY_THREADS", str(threads))
    size, mapped, written = 20 << 20, [], []
    populate, write = _copy.populate, _copy.Into.write
    monkeypatch.setattr(_copy, "populate", lambda a, n: (mapped.append(n), populate(a, n)))
    monkeypatch.setattr(_copy.Into, "write", lambda i, fd, blocks: (written.extend(n for _, _, n in blocks), write(i, fd, blocks)))
    sd = {"w": torch.randn(size // 4)}
    if way == "stage":
        assert torch.equal(_stage.stage(dcpd.connect(), sd)["w"], sd["w"])
    else:
        name = f"main:once-{threads}"
        dcpd.async_save(sd, name).result()
        assert torch.equal(dcpd.load(name)["w"], sd["w"])
    if threads > 2:
        assert sum(mapped) >= size and not written
    else:
        assert sum(written) == size and not mapped


def test_saves_into_new_and_known_segments(path):  # noqa: F811
    for k in range(4):
        sd = {"big": torch.full((3 << 20,), float(k)), "small": torch.full((7,), float(-k)), "none": torch.empty(0)}
        dcp.save(sd, storage_writer=StorageWriter(path))
        got = {n: torch.ones_like(t) for n, t in sd.items()}
        dcp.load(got, checkpoint_id=path)  # PyTorch's own
        assert all(torch.equal(got[n], t) for n, t in sd.items()), k


# ------------------------------------------------------------------------------------------------------------------ twins


def test_the_twin_of_a_state_dict(at):
    """Equal, elsewhere, and not changed by what happens to the original."""
    base = torch.randn(8, 6)
    sd = {
        "plain": base.clone(), "parameter": torch.nn.Parameter(torch.randn(3)), "grad": torch.randn(2, requires_grad=True),
        "columns": base[:, ::2], "turned": base.t(), "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(4, dtype=torch.complex64).conj(), "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(3), "empty": torch.empty(0, 5), "half": torch.randn(5).bfloat16(), "bool": torch.tensor([True, False]),
        "wide": torch.randn(5, dtype=torch.complex128), "big": torch.randn(300_000), "expanded": torch.ones(1).expand(7),
        "meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse(),
        "in": {"list": [torch.ones(2), {"x": 1}], "pair": Pair(torch.zeros(2), "b"), "tuple": (torch.arange(3),), "bytes": b"x"},
    }
    twin = _stage.stage(dcpd.connect(), sd)
    flat, again = {p[-1]: t for p, t in leaves(sd)}, {p[-1]: t for p, t in leaves(twin)}
    assert list(flat) == list(again) and type(twin["in"]["pair"]) is Pair and twin["in"]["list"][1] == {"x": 1}
    with torch.no_grad():
        for k, t in flat.items():
            u = again[k]
            assert u.dtype == t.dtype and u.shape == t.shape and u.layout == t.layout and not u.requires_grad, k
            if t.is_meta:
                continue
            dense, kept = t.to_dense() if t.is_sparse else t, u.to_dense() if u.is_sparse else u.clone()
            assert torch.equal(kept, dense.detach()), k
            if not t.is_sparse and t.numel():
                assert u.is_contiguous() and u.data_ptr() != t.data_ptr()
        for k in ("plain", "parameter", "big"):
            kept = again[k].clone()
            flat[k].zero_()
            assert torch.equal(again[k], kept) and bool(kept.any()), k


def leaves(x, path=()):  # noqa: F811
    if isinstance(x, torch.Tensor):
        yield path, x
    elif isinstance(x, dict):
        for k, v in x.items():
            yield from leaves(v, (*path, k))
    elif isinstance(x, (list, tuple)):
        for i, v in enumerate(x):
            yield from leaves(v, (*path, i))
