"""A host with its troubles, for daemons under test: tests/fakes/libhost.c, preloaded."""
import struct
import time

import dcpd as lib

LIBRARY = lib.ROOT / "build/test/fakes/libhost.so"
OLD_KERNEL = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_OLD": "1"}
UNSYNCED = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_UNSYNCED": "1"}
BUFFERED = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_BUFFERED": "1"}
SLOW_FILES = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_SLOW": "50"}


class Disk:
    """A disk that a test makes slow, for all programs that run in `env`."""

    def __init__(self, file):
        assert LIBRARY.exists(), "not built (make tools)"
        self.file = file
        self.takes(0)
        self.env = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_DISK": str(file)}

    def takes(self, ms):
        """Each fsync and each rename, from now on."""
        with open(self.file, "r+b" if self.file.exists() else "wb") as f:  # in place: it is mapped
            f.write(struct.pack("=i", ms))


class Patience:
    """Time that a test lets pass, for all programs that run in `env`: their monotonic clock."""

    def __init__(self, file):
        assert LIBRARY.exists(), "not built (make tools)"
        self.file, self.seconds = file, 0
        file.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_AHEAD": str(file)}

    def passes(self, seconds):
        self.seconds += seconds
        with open(self.file, "r+b") as f:  # in place: it is mapped
            f.write(struct.pack("=q", self.seconds))


STEPS_MAX = 4096
STEP = struct.Struct("=qq")


class WallClock:
    """A wall clock that a test sets, for all programs that run in `env`; times of files are this clock's, too."""

    def __init__(self, file):
        assert LIBRARY.exists(), "not built (make tools)"
        self.file, self.steps = file, 0
        with open(file, "wb") as f:
            f.truncate(8 + STEPS_MAX * STEP.size)
        self.step(0)
        self.env = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_CLOCK": str(file)}

    def step(self, seconds):
        """From now on it is this far ahead of the real one."""
        assert self.steps < STEPS_MAX
        with open(self.file, "r+b") as f:  # in place: it is mapped
            f.seek(8 + self.steps * STEP.size)
            f.write(STEP.pack(time.time_ns() if self.steps else 0, seconds))
            f.flush()
            self.steps += 1
            f.seek(0)
            f.write(struct.pack("=q", self.steps))
