"""Bench rows of incremental saves: 1 % of the bytes changed, as whole tensors, beside a full save of the same, in turns."""
import os
import time

from measure import MIB, RANKS, RUNS, SIZE, lib

TENSORS = 100
NAME = "shares"


def change(d, number):
    """New bytes for one tensor, in the place of its old ones: nobody reads meanwhile."""
    part = SIZE // MIB // TENSORS * MIB // RANKS
    for rank in d.api.get(f"/v1/state-dicts/{NAME}").ok(200)["ranks"]:
        slot = next(s for s in rank["slots"] if s["state"] == "sealed")
        fd = os.open(lib.segment_file(slot["segment"]), os.O_WRONLY)
        try:
            os.pwrite(fd, os.urandom(part), slot["image_bytes"] - part * (1 + number % (TENSORS - 1)))
        finally:
            os.close(fd)


def save(b, storage, name, incremental):
    start = time.monotonic()
    r = b.d.api.run("save", seconds=300, source={"state_dict": NAME}, target={"storage": storage, "name": name},
                    options={"incremental": incremental})["result"]
    return time.monotonic() - start, r["bytes"] - r["bytes_shared"], r["bytes"]


def rows(b):
    if not b.wants("catalogue.incremental"):
        return
    b.fresh()
    b.d.drop("bench")
    b.fill(NAME, TENSORS)
    for storage in ("disk", "tmpfs"):
        ours, full, written, whole = [], [], [], []
        save(b, storage, "warm/step-0", False)
        b.delete(storage, "warm/step-0")
        save(b, storage, "shares/step-0", True)
        for i in range(1, RUNS + 1):
            change(b.d, i)
            for incremental in (True, False) if i % 2 else (False, True):
                lib.wait_for(lambda: not b.d.staging(), 60, "what was deleted is gone")
                os.sync()
                if incremental:
                    seconds, less, _ = save(b, storage, f"shares/step-{i}", True)
                    ours.append(seconds)
                    written.append(less)
                    b.delete(storage, f"shares/step-{i - 1}")
                else:
                    seconds, less, _ = save(b, storage, f"full/step-{i}", False)
                    full.append(seconds)
                    whole.append(less)
                    b.delete(storage, f"full/step-{i}")
        command = f"dcpctl save shm:x {storage}:run/step-2 --incremental, 1 % changed"
        b.row(f"catalogue.incremental.{storage}", "s", "<=0.35", "full save", ours, full, command)
        b.row(f"catalogue.incremental.{storage}.bytes", "B", "<=0.10", "full save", written, whole, command)
        b.delete(storage, f"shares/step-{RUNS}")
    b.d.drop(NAME)
    b.fresh()
