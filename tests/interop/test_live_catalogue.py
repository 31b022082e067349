"""A catalogue under everything that happens to one, with a real daemon: see lib/live_steps.py.

`make check` takes some hundred steps, `make check LONG=1` thousands, DCPD_FULL=1 100,000 and more; MODEL_SEED and MODEL_STEPS choose
others. With fault points (`make check-san`, FAULTS=1) processes are killed at them and calls fail; elsewhere they are killed at any moment.
"""
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import live_steps
import pytest

import dcpd as lib

FORMS = [{}, {"tier": True}, {"two": True, "clock": False}, {"disk": True}]


@pytest.fixture
def home(tmp_path):
    """In memory: most of a step is syncs. dcpd takes no file there for one of its segments."""
    at = pathlib.Path(f"/dev/shm/dcpd-test-model-{os.getpid()}")
    at.mkdir()
    yield at
    subprocess.run(["umount", "-lq", at / "disk"], stderr=subprocess.DEVNULL)
    shutil.rmtree(at)


def steps(home, seed, count, until=None):
    form = dict(FORMS[seed % len(FORMS)])
    if form.get("disk"):
        form["disk"] = home / "disk"
        form["disk"].mkdir(exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "dcpd-test", form["disk"]], capture_output=True).returncode:
            del form["disk"]
    if seed % 8 > 3:
        form["root"] = pathlib.Path(tempfile.gettempdir()) / home.name  # a disk's file system
    try:
        with live_steps.Catalogue(home / f"s{seed}", seed, **form) as c:
            return c.run(count, until).step_number
    finally:
        if form.get("disk"):
            subprocess.run(["umount", "-l", form["disk"]], check=True)
        if form.get("root"):
            shutil.rmtree(form["root"], ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", [int(os.environ["MODEL_SEED"])] if "MODEL_SEED" in os.environ else
                         [0, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
@pytest.mark.seconds(600)
def test_what_is_needed_stays(home, seed):
    steps(home, seed, int(os.environ.get("MODEL_STEPS", 60)), time.monotonic() + 60 if "MODEL_STEPS" not in os.environ else None)


@pytest.mark.slow
@pytest.mark.seconds(36000)
def test_what_is_needed_stays_for_long(home):
    """By `make check-full`."""
    taken, seed = 0, 100
    while taken < (100_000 if lib.FULL else 2000):
        seed += 1
        taken += steps(home, seed, 1000)
        print(f"seed {seed}: {taken} steps", flush=True)
