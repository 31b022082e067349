"""Whose a segment is: of daemons that are down, of journals that were deleted, of state directories that were copied or moved.

On the kernel there is, and on one before 6.6, whose tmpfs has no user.* attributes (Debian 12's).
"""
import os
import re
import shutil
import struct
import time

import pytest

import dcpd as lib
from host import OLD_KERNEL

F4 = ("F32", [4], bytes(range(16)))


@pytest.fixture(params=[{}, OLD_KERNEL], ids=["this kernel", "no user xattrs"])
def env(request):
    return request.param


def age(segments, seconds=3600):
    for s in segments:
        os.utime(lib.segment_file(s), (time.time() - seconds,) * 2)


def used(d):
    return d.api.get("/v1/capabilities").ok(200)["shm"]["used_bytes"]


def listed(d):
    return {s["name"]: s for s in d.api.get("/v1/state-dicts").ok(200)["state_dicts"]}


def delete_journal(d):
    for f in d.state.glob("journal*"):
        f.unlink()


def test_daemons_leave_alone_what_others_sealed(spawn, env):
    """One of the same user is started while the first has been down for an hour."""
    first = spawn(env=env)
    data = lib.image({"a": F4})
    segments = first.put("train", [data], generation=3)
    first.kill()
    age(segments)
    second = spawn(env=env)
    assert lib.segment_file(segments[0]).exists()
    assert listed(second) == {} and used(second) == 0, "not its business"
    first.start()
    first.api.run("save", source={"state_dict": "train", "generation": 3}, target={"storage": "main", "name": "c"})


def test_segments_of_a_deleted_journal_are_offered(spawn, env):
    """They are counted, listed, and go when somebody says so; not before, whatever is restarted."""
    d = spawn(env=env)
    data = lib.image({"a": ("U8", [3 << 20], bytes(3 << 20))})
    segments = d.put("train", [data, data], generation=3)
    held = used(d)
    d.kill()
    delete_journal(d)
    for _ in range(3):
        d.start()
        (name, found), = listed(d).items()
        assert name.startswith("orphaned-") and found["bytes"] == held == used(d) and found["orphaned_at"] and found["world_size"] == 2
        assert {s["segment"] for r in d.api.get(f"/v1/state-dicts/{name}").ok(200)["ranks"] for s in r["slots"]} == set(segments)
        assert all(lib.segment_file(s).exists() for s in segments)
        d.stop()
    assert name in d.tail(100000), "the log says what was found"
    d.start()
    assert "orphaned: 8" in d.ctl("status").stdout
    assert f'dcpd_shm_bytes{{state="orphaned"}} {held}' in d.api.get("/metrics").body.decode()
    shown = d.ctl("ls", "shm:")
    assert re.search(rf"{name} .* 20\d\d-.* 20\d\d-", shown.stdout), f"when it was made, and orphaned: {shown}"
    removed = d.ctl("rm", f"shm:{name}", "--yes")
    assert removed.returncode == 0, removed
    assert used(d) == 0 and listed(d) == {} and not any(lib.segment_file(s).exists() for s in segments)


def test_a_state_directory_that_was_removed_is_the_same_when_it_is_made_again(spawn, env):
    d = spawn(env=env)
    segments = d.put("train", [lib.image({"a": F4})])
    d.kill()
    shutil.rmtree(d.state)
    d.state.mkdir()
    d.start()
    more = d.put("train", [lib.image({"a": F4})])
    d.kill()
    delete_journal(d)
    d.start()
    assert len(listed(d)) == 2, "those of each journal by themselves"
    for name in listed(d):
        d.drop(name)
    assert not any(lib.segment_file(s).exists() for s in segments + more)


def test_orphaned_segments_can_be_saved(spawn):
    """Each is a safetensors file, and says how long it is; sealed again, they are a generation like any other."""
    d = spawn()
    rows = [bytes(range(16)), bytes(range(16, 32))]
    chunk = lambda i: {"tensors": {"a": {"fqn": "a", "global_shape": [2, 4], "offsets": [i, 0]}}}  # noqa: E731
    d.put("train", [lib.image({"a": ("F32", [1, 4], rows[i])}, chunk(i)) for i in range(2)])
    d.kill()
    delete_journal(d)
    d.start()
    (name,) = listed(d)
    d.api.fails("save", "not_sealed", source={"state_dict": name}, target={"storage": "main", "name": "c"})
    for r in d.api.get(f"/v1/state-dicts/{name}").ok(200)["ranks"]:
        (slot,) = r["slots"]
        d.seal(name, r["rank"], slot["generation"], lib.read_segment(slot["segment"]).bytes)
    d.api.run("save", source={"state_dict": name}, target={"storage": "main", "name": "c"})
    assert d.api.get(d.api.storage_path("main", "c") + "/tensors/a?format=raw").body == b"".join(rows)


def test_a_copied_state_directory_takes_nothing_from_the_daemon_that_runs(spawn, tmp_path, env):
    d = spawn(env=env)
    segments = d.put("train", [lib.image({"a": F4})], generation=3)
    copy = tmp_path / "copy"
    shutil.copytree(d.state, copy / "state", ignore=shutil.ignore_patterns("s", "*.sock"))
    other = lib.Daemon(copy, env=env)
    try:
        other.api.delete("/v1/state-dicts/train")
        assert lib.segment_file(segments[0]).exists()
    finally:
        other.kill()
    d.api.run("save", source={"state_dict": "train", "generation": 3}, target={"storage": "main", "name": "c"})


def test_a_moved_state_directory_keeps_what_it_had(spawn, tmp_path, env):
    d = spawn(env=env)
    segments = d.put("train", [lib.image({"a": F4})], generation=3)
    d.stop()
    (tmp_path / "moved").mkdir()
    d.state.rename(tmp_path / "moved/state")
    moved = lib.Daemon(tmp_path / "moved", env=env)
    try:
        moved.api.run("save", source={"state_dict": "train", "generation": 3}, target={"storage": "main", "name": "c"})
    finally:
        moved.discard()
    assert not lib.segment_file(segments[0]).exists()
    d.state.mkdir()


def test_strange_names_are_nobodys(spawn):
    """What looks like a segment, or nearly, is not touched by a daemon that did not make it."""
    files = [lib.SHM / n for n in ("dcpd-" + "0" * 32, "dcpd-" + "0" * 24 + "-" + "f" * 32, "dcpd-" + "0" * 23 + "-" + "f" * 32)]
    d = spawn()
    d.stop()
    try:
        for f in files:
            f.write_bytes(struct.pack("<Q", 2) + b"{}")
            f.chmod(0o600)
        d.start()
        assert all(f.exists() for f in files) and listed(d) == {}
    finally:
        for f in files:
            f.unlink(missing_ok=True)
