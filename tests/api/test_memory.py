"""Loads of checkpoints whose bytes still lie in segments: copied from there as long as they are the checkpoint's, else read."""
import ctypes
import mmap
import os
import random

import pytest

import dcpd as lib

ROWS, COLUMNS, WORLD = 512, 1024, 2
BYTES = ROWS * COLUMNS * 4
PART = BYTES // WORLD


def content(seed):
    return random.Random(seed).randbytes(BYTES)


def images(data):
    """A tensor by rows, a small one that all ranks have, and a value."""
    rows = ROWS // WORLD
    return [lib.image({"w": ("F32", [rows, COLUMNS], data[PART * r:PART * (r + 1)]), "b": ("F32", [4], bytes(range(16)))},
                      {"tensors": {"w": {"global_shape": [ROWS, COLUMNS], "offsets": [rows * r, 0]}}, "values": {"step": {"json": 7}}})
            for r in range(WORLD)]


class Saved:
    """A state dict, sealed and saved."""

    def __init__(self, d, seed=1):
        self.d, self.name, self.data = d, lib.fresh(), content(seed)
        self.source = {"storage": "main", "name": self.name}
        self.segments = d.put(self.name, images(self.data))
        self.save()

    def save(self, generation=1, **options):
        self.d.api.run("save", source={"state_dict": self.name, "generation": generation}, target=self.source, options=options)

    def load(self, world=1, **options):
        """The job's result, when what it loaded is what was saved."""
        target = lib.fresh()
        job = self.d.api.run("load", source=self.source, target={"state_dict": target, "world_size": world}, options=options)
        w = b"".join(data for image in self.d.images(target) for fqn, *_, data in image.chunks() if fqn == "w")
        assert w == self.data
        self.d.drop(target)
        return job["result"]

    def segment(self, rank):
        return lib.segment_file(self.segments[rank])

    def hurt(self, rank, at=-5000, data=b"not what was saved"):
        with open(self.segment(rank), "r+b") as f:
            size = os.fstat(f.fileno()).st_size
            f.seek(at % size)
            f.write(data)

    def hurt_tensor(self, rank, at=0):
        """Within w, whose bytes begin at the image's second page."""
        self.hurt(rank, 4096 + at)


@pytest.fixture
def saved(d):
    s = Saved(d)
    yield s
    if d.api.get(f"/v1/state-dicts/{s.name}").status == 200:
        d.drop(s.name)


ALL = BYTES + 16


def test_a_load_after_a_save_reads_no_file(saved):
    found = saved.load()
    assert found["bytes_from_memory"] == ALL == found["bytes"] and found["read_bytes"] == 0
    assert found["verified_bytes"] >= ALL and found["unverified_bytes"] == 0


def test_released_slots_serve_until_they_are_handed_out(saved):
    for rank in range(WORLD):
        saved.d.api.post(f"/v1/state-dicts/{saved.name}/ranks/{rank}:release", {"generation": 1}).ok()
    assert saved.load()["bytes_from_memory"] == ALL
    for generation in (2, 3):
        saved.d.put(saved.name, images(content(2)), generation, create=False)
    found = saved.load()
    assert found["bytes_from_memory"] == 0 and found["read_bytes"] >= ALL


def test_both_slots_serve_their_checkpoints(saved):
    first, saved.source = saved.source, {"storage": "main", "name": saved.name + "-2"}
    before, saved.data = saved.data, content(3)
    saved.d.put(saved.name, images(saved.data), 2, create=False)
    saved.save(2)
    assert saved.load()["bytes_from_memory"] == ALL
    saved.source, saved.data = first, before
    assert saved.load()["bytes_from_memory"] == ALL


@pytest.mark.parametrize("verify", ["digest", "none"])
def test_a_segment_that_was_written_to_is_not_taken(saved, verify):
    saved.hurt_tensor(1)
    found = saved.load(verify=verify)
    assert 0 < found["bytes_from_memory"] <= ALL - 16 and found["read_bytes"] > 0


@pytest.mark.parametrize("verify", ["digest", "none"])
def test_what_comes_from_memory_is_compared_at_all_times(saved, verify):
    found = saved.load(verify=verify)
    assert found["bytes_from_memory"] == ALL <= found["verified_bytes"]
    assert found["unverified_bytes"] < 1000, "at most the value, which is read from its file"


def test_a_segment_that_shrinks_is_not_taken(saved):
    os.truncate(saved.segment(0), 8192)
    found = saved.load()
    assert PART <= found["bytes_from_memory"] < ALL and found["read_bytes"] > 0


def test_a_header_that_is_spoiled_is_not_taken(saved):
    saved.hurt(0, 0, b"\xff" * 64)
    found = saved.load()
    assert PART <= found["bytes_from_memory"] < ALL


def test_some_ranks_gone(saved):
    saved.d.api.post(f"/v1/state-dicts/{saved.name}/ranks/0:release", {"generation": 1}).ok()
    saved.d.reserve(saved.name, 0, 4096, 2)  # one free slot is as good as another: both are opened
    saved.d.reserve(saved.name, 0, 4096, 3)
    found = saved.load()
    assert PART <= found["bytes_from_memory"] <= PART + 16 and found["read_bytes"] >= PART


def test_another_checkpoint_of_the_name(saved):
    """The bytes in memory are whole, but not those of what lies there now."""
    other = Saved(saved.d, 5)
    try:
        saved.d.api.run("save", source={"state_dict": other.name}, target=saved.source, options={"overwrite": True})
        saved.d.drop(other.name)
        saved.data = other.data
        assert saved.load()["bytes_from_memory"] == 0
        saved.d.put(saved.name, images(saved.data), 2, create=False)
        saved.save(2, overwrite=True)
        assert saved.load()["bytes_from_memory"] == ALL
    finally:
        if saved.d.api.get(f"/v1/state-dicts/{other.name}").status == 200:
            saved.d.drop(other.name)


def test_damaged_files_do_not_matter_to_what_is_in_memory(saved):
    """A load takes what was saved, wherever it finds it; a verify tells of the files."""
    for f in (saved.d.storages["main"] / saved.name).glob("*.distcp"):
        at = f.stat().st_size // 2
        with open(f, "r+b") as b:
            b.seek(at)
            b.write(bytes(64))
    assert saved.load()["bytes_from_memory"] == ALL
    saved.d.api.fails("verify", "checkpoint_damaged", source=saved.source)
    saved.d.drop(saved.name)
    saved.d.api.fails("load", "digest_mismatch", "checkpoint_damaged", source=saved.source, target={"state_dict": lib.fresh()})


def test_other_layouts_and_parts(saved):
    found = saved.load(world=3)
    assert found["bytes_from_memory"] >= ALL and found["read_bytes"] == 0
    target = lib.fresh()
    rule = {"match": "w", "mesh": [2], "placements": ["Shard(1)"]}
    job = saved.d.api.run("load", source=saved.source, target={"state_dict": target, "layout": [rule]}, include=["w"])
    got = [c[-1] for image in saved.d.images(target) for c in image.chunks()]
    rows = [saved.data[4 * COLUMNS * r:4 * COLUMNS * (r + 1)] for r in range(ROWS)]
    assert got == [b"".join(r[:2 * COLUMNS] for r in rows), b"".join(r[2 * COLUMNS:] for r in rows)]
    assert job["result"]["bytes_from_memory"] == BYTES
    saved.d.drop(target)


def test_deleted_state_dict(saved):
    saved.d.drop(saved.name)
    assert saved.load()["bytes_from_memory"] == 0


def test_dcpctl_says_what_came_from_memory(saved):
    target = lib.fresh()
    done = saved.d.ctl("load", f"main:{saved.name}", f"shm:{target}")
    assert done.returncode == 0 and f"bytes_from_memory: {ALL}" in done.stdout, done
    saved.d.drop(target)


@pytest.mark.long
def test_a_dead_trainers_checkpoint_is_loaded_from_memory(spawn):
    d = spawn(args=("--keep-sealed", "8s"))
    s = Saved.__new__(Saved)
    s.d, s.name, s.data, s.source = d, "train", content(7), {"storage": "main", "name": "train"}
    d.create(s.name, WORLD, lease_seconds=lib.PATIENCE)
    s.segments = d.put(s.name, images(s.data), create=False)
    s.save()
    record = lambda: d.api.get("/v1/state-dicts/train")
    lib.wait_for(lambda: record().ok(200).get("orphaned_at"), 10, "its trainer counts as dead")
    lib.wait_for(lambda: all(k["state"] == "free" for r in record().ok(200)["ranks"] for k in r["slots"]), 10, "saved: nobody holds it")
    assert s.load()["bytes_from_memory"] == ALL
    lib.wait_for(lambda: record().status == 404, 30, "kept for its time, no longer")
    assert not s.segment(0).exists() and s.load()["bytes_from_memory"] == 0


def test_a_restarted_daemon_remembers_what_was_saved(spawn):
    """Both generations that the slots have; released ones as well."""
    d = spawn()
    saved = Saved(d)
    first, before = saved.source, saved.data
    saved.source, saved.data = {"storage": "main", "name": saved.name + "-2"}, content(3)
    d.put(saved.name, images(saved.data), 2, create=False)
    saved.save(2)
    for rank in range(WORLD):
        d.api.post(f"/v1/state-dicts/{saved.name}/ranks/{rank}:release", {"generation": 1}).ok()
    d.kill()
    d.start()
    assert saved.load()["bytes_from_memory"] == ALL
    saved.source, saved.data = first, before
    assert saved.load()["bytes_from_memory"] == ALL


libc = ctypes.CDLL(None, use_errno=True)
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident(path):
    """Bytes of a file in the page cache, in whole pages."""
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
        pages = ctypes.create_string_buffer(-(-len(m) // mmap.PAGESIZE))
        at = ctypes.c_char.from_buffer(m)
        assert libc.mincore(ctypes.addressof(at), len(m), pages) == 0
        del at
        return sum(p & 1 for p in pages.raw) * mmap.PAGESIZE


def has_o_direct(folder):
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        (folder / "probe").unlink(missing_ok=True)
    return True


@pytest.mark.parametrize("cache", ["keep", "drop"])
def test_a_save_leaves_its_files_in_the_page_cache_if_asked(saved, cache):
    saved.save(overwrite=True, cache=cache)
    found = sum(resident(f) for f in (saved.d.storages["main"] / saved.name).glob("*.distcp"))
    if cache == "keep":
        assert found >= BYTES
    elif has_o_direct(saved.d.storages["main"].parent):
        assert found < BYTES / 2
    saved.d.api.run("verify", source=saved.source)
    saved.d.drop(saved.name)
    assert saved.load()["bytes_from_memory"] == 0


@pytest.mark.parametrize("cache", ["keep", "drop"])
def test_a_load_leaves_what_it_reads_in_the_page_cache_if_asked(saved, cache):
    files = list((saved.d.storages["main"] / saved.name).glob("*.distcp"))
    saved.d.drop(saved.name)
    for f in files:
        with open(f, "rb") as b:
            os.posix_fadvise(b.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if sum(resident(f) for f in files):
        pytest.skip("a file system in memory")
    assert saved.load(cache=cache)["read_bytes"] == pytest.approx(ALL, rel=0.01)
    found = sum(resident(f) for f in files)
    if cache == "keep":
        assert found >= BYTES
    elif has_o_direct(saved.d.storages["main"].parent):
        assert found < BYTES / 2
