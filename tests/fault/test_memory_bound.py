"""A reshard's memory does not grow with the model: all workers of the job together stay within 256 MiB, the coordinator within 64.

4 ranks by rows to 2 by columns, as one tensor and as eight; 512 MiB in `make check`, 8 GiB in `make check-full`
(DCPD_MEMORY_MIB=N chooses). Sampled from smaps_rollup: anonymous and shared memory; a reshard has no segments.
"""
import os
import subprocess

import pytest

import dcpd as lib
from dcpd import FULL
from peak import Peak

MIB = 1 << 20
SIZE = int(os.environ.get("DCPD_MEMORY_MIB", 8192 if FULL else 512))
TESTBIN = lib.pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))


def words(np, tensor, first, count):
    x = np.arange(first, first + count, dtype=np.uint64) + np.uint64(tensor << 40) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@pytest.mark.seconds(1800 if FULL else 150)
@pytest.mark.parametrize("tensors", [pytest.param(1, marks=pytest.mark.long), 8])
def test_reshard_in_bounded_memory(spawn, tensors):
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    free = os.statvfs("/dev/shm")
    if free.f_bavail * free.f_frsize < (SIZE + 512) * MIB:
        pytest.skip(f"/dev/shm has no room for {SIZE} MiB")
    d = spawn()
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
