"""A reshard's memory does not grow with the model: all workers of the job together stay within 256 MiB, the coordinator within 64;
warm workers keep little of it for the next job.

4 ranks by rows to 2 by columns, as one tensor and as eight; 384 MiB in `make check`, 8 GiB in `make check-full`
(DCPD_MEMORY_MIB=N chooses). Sampled from smaps_rollup: anonymous and shared memory; a reshard has no segments.
"""
import json
import os
import struct
import subprocess

import pytest

import dcpd as lib
from dcpd import FULL
from peak import Peak, rollup

MIB = 1 << 20
SIZE = int(os.environ.get("DCPD_MEMORY_MIB", 8192 if FULL else 384))
TESTBIN = lib.pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))


def words(np, tensor, first, count):
    x = np.arange(first, first + count, dtype=np.uint64) + np.uint64(tensor << 40) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@pytest.mark.long
@pytest.mark.seconds(1800 if FULL else 150)
@pytest.mark.parametrize("tensors", [pytest.param(1, marks=pytest.mark.long), 8])
def test_reshard_in_bounded_memory(spawn, tensors):
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    free = os.statvfs("/dev/shm")
    if free.f_bavail * free.f_frsize < (SIZE + 512) * MIB:
        pytest.skip(f"/dev/shm has no room for {SIZE} MiB")
    d = spawn(args=("--gang-idle", "10m"))
    env = {**os.environ, "DCPD_URL": f"unix://{d.socket}"}
    subprocess.run([TESTBIN / "tools/fill", "big", "4", str(tensors), str(SIZE // tensors)], env=env, check=True,
                   stdout=subprocess.DEVNULL)
    d.api.run("save", seconds=600, source={"state_dict": "big"}, target={"storage": "main", "name": "rows"})
    d.drop("big")
    peak = Peak(d)
    peak.start()
    j = d.api.run("reshard", seconds=900, source={"storage": "main", "name": "rows"}, target={
        "storage": "main", "name": "columns", "world_size": 2,
        "layout": [{"match": "*", "mesh": [2], "placements": ["Shard(1)"]}]})
    peak.stop.set()
    peak.join()
    print(f"\n{SIZE} MiB in {tensors}: workers {peak.workers / MIB:.0f} MiB, coordinator {peak.coordinator / MIB:.0f} MiB, "
          f"{peak.samples} samples, {j['started_at']} to {j['finished_at']}")
    assert peak.samples > 5 and peak.workers <= 256 * MIB, f"{peak.workers / MIB:.0f} MiB"
    assert peak.coordinator <= 64 * MIB, f"{peak.coordinator / MIB:.0f} MiB"
    kept = "what warm workers keep between jobs"
    lib.wait_for(lambda: sum(rollup(p).get("Pss_Anon", 0) for p in d.workers()) <= 32 * MIB, 10, kept)
    path = d.storages["main"] / "columns"
    for t in range(tensors):
        rows = SIZE // tensors * 32
        sd = {f"layers.{t}.weight": torch.full((rows, 4096), -1, dtype=torch.int64)}
        dcp.load(sd, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        got = sd[f"layers.{t}.weight"].numpy().reshape(-1).view(np.uint64)
        step = 1 << 22
        for at in range(0, got.size, step):
            n = min(step, got.size - at)
            assert np.array_equal(got[at : at + n], words(np, t, at, n)), f"tensor {t}: differs near word {at}"
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")


def sparse_shards(folder, files, tensors, rows):
    """A sharded model of zeros in safetensors, without an index; its bytes are holes, which take no disk."""
    folder.mkdir()
    for f in range(files):
        row = 8 * 4096
        head = {f"layers.{f}.{t}.weight": {"dtype": "F64", "shape": [rows, 4096], "data_offsets": [t * rows * row, (t + 1) * rows * row]}
                for t in range(tensors)}
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{f + 1:05}-of-{files:05}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(path, 8 + len(text) + tensors * rows * row)


@pytest.mark.seconds(1800)
@pytest.mark.parametrize("size", [512, pytest.param(16 << 10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["dcp", pytest.param("torch", marks=pytest.mark.slow)])
def test_conversion_in_bounded_memory(spawn, size, target):
    """Any to any: a sharded model of 16 GiB in doubles, as fp8, in another format and layout."""
    files, tensors = 8, 4
    d = spawn()
    sparse_shards(d.storages["main"] / "source", files, tensors, size * MIB // (files * tensors * 8 * 4096))
    name = "made.pt" if target == "torch" else "made"
    cut = {"world_size": 4, "layout": [{"match": "*", "mesh": [4], "placements": ["Shard(1)"]}]} if target == "dcp" else {}
    peak = Peak(d)
    peak.start()
    d.api.run("reshard", seconds=1500, source={"storage": "main", "name": "source"}, dtype=[["*", "float8_e4m3fn"]],
              target={"storage": "main", "name": name, "format": target, **cut})
    peak.stop.set()
    peak.join()
    print(f"\n{size} MiB to {target}: workers {peak.workers / MIB:.0f} MiB, coordinator {peak.coordinator / MIB:.0f} MiB")
    assert peak.samples > 5 and peak.workers <= 256 * MIB and peak.coordinator <= 64 * MIB, (peak.workers, peak.coordinator)
    shown = d.api.get(d.api.storage_path("main", name)).ok()
    assert shown["tensors"] == files * tensors and size * MIB // 8 <= shown["bytes"] <= size * MIB // 8 + (4 << 20)
