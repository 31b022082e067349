"""What an overwriting save replaces goes behind its back, from inside the sandbox: readers keep theirs, and the disk is not kept busy."""
import mmap
import os
import signal
import subprocess

import pytest

import dcpd as lib
from gang import Gang, Segments, ask, at, done

MIB = 96
STEP = 8 << 20
LOCAL = {"ext2/ext3", "xfs", "btrfs", "f2fs", "tmpfs"}


def train(mark):
    blob = bytes([mark]) * (1 << 20)
    return Segments([lib.image({"w": ("U8", (MIB, 1 << 20), blob * MIB)}, {"values": {"mark": {"json": mark}}})])


def save(gang, state, name):
    """How long the worker may yet remove what was replaced, in ms."""
    end = gang.job("save", {"source": {"state_dict": "train"}, "target": at(name), "options": {"overwrite": True}}, {"train": state})
    done(end)
    return end.body.get("trash_ms", 0)


@pytest.fixture(scope="module")
def states():
    made = [train(1), train(2)]
    yield made
    for s in made:
        s.close()


def removed_files(worker):
    """Sizes of what the worker has open that has no name any more, in the storage."""
    sizes = []
    folder = f"/proc/{worker.proc.pid}/fd"
    for fd in os.listdir(folder):
        try:
            if "/.dcpd-trash-" in os.readlink(f"{folder}/{fd}"):
                sizes.append(os.stat(f"{folder}/{fd}").st_size)
        except OSError:
            pass
    return sizes


def is_gentle(path):
    space = os.statvfs(path)
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    return kind in LOCAL and space.f_bavail > max(space.f_blocks // 20, 4 * (MIB << 20) // space.f_frsize)


def gone(roots, name):
    return not [n for n in os.listdir(roots["out"] / name) if n.startswith(".dcpd-")]


@pytest.mark.long
def test_readers_of_the_old_one_keep_it(gang, roots, states):
    save(gang, states[0], "read/x")
    path, = (roots["out"] / "read/x").glob("*.distcp")
    os.link(path, roots["out"] / "linked")
    size = path.stat().st_size
    with open(path, "rb") as reader, open(path, "rb") as other:
        mapped = mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ)
        old = reader.read()
        save(gang, states[1], "read/x")
        lib.wait_for(lambda: gone(roots, "read"), 30, "trash")
        reader.seek(0)
        assert reader.read() == old and len(old) == size
        assert mapped[:] == old
        mapped.close()
    assert (roots["out"] / "linked").read_bytes() == old
    os.unlink(roots["out"] / "linked")
    assert path.read_bytes() != old


def test_it_goes_bit_by_bit(gang, roots, states):
    if not is_gentle(roots["out"]):
        pytest.skip("a file system that nothing is removed gently from, or a full one")
    save(gang, states[0], "bits/x")
    assert save(gang, states[1], "bits/x") >= 10000
    seen = set()
    lib.wait_for(lambda: seen.update(removed_files(gang.workers[0])) or gone(roots, "bits"), 60, "trash", every=0.001)
    assert len([n for n in seen if n < (MIB << 20) - STEP]) >= 2, seen
    assert not removed_files(gang.workers[0])
    assert save(gang, states[1], "bits/y") == 0


@pytest.mark.long
@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_worker_that_goes_leaves_it_to_the_next_sweep(roots, states, how):
    with Gang(1, roots) as g:
        save(g, states[0], "left/x")
        save(g, states[1], "left/x")
        lib.wait_for(lambda: removed_files(g.workers[0]) or gone(roots, "left"), 30, "trash", every=0.001)
        if how == "killed":
            g.workers[0].proc.send_signal(signal.SIGKILL)
        assert g.workers[0].close()[0] == (-signal.SIGKILL if how == "killed" else 0)
        g.workers.clear()
    with Gang(1, roots) as g:
        ask(roots, op="sweep", storage="out", keep=[])
        assert gone(roots, "left")
        save(g, states[0], "left/x")
