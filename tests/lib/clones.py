"""A file system with clones of blocks (FICLONERANGE), in a file: what the tests' own disk need not have."""
import contextlib
import shutil
import subprocess

import pytest


@contextlib.contextmanager
def mounted(home, mib=400):
    """A directory on it; the test is skipped where this machine can make or mount none."""
    image, at = home / "image", home / "at"
    at.mkdir()
    with open(image, "wb") as f:
        f.truncate(mib << 20)
    for make in (["mkfs.xfs", "-q", "-m", "reflink=1"], ["mkfs.btrfs", "-q"]):
        if shutil.which(make[0]) and subprocess.run([*make, image], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("no mkfs.xfs and no mkfs.btrfs")
    r = subprocess.run(["mount", "-o", "loop", image, at], capture_output=True, text=True)
    if r.returncode:
        pytest.skip(f"cannot mount an image here: {r.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)
