"""A host with its troubles, for daemons under test: tests/fakes/libhost.c, preloaded."""
import struct

import dcpd as lib

LIBRARY = lib.ROOT / "build/test/fakes/libhost.so"
OLD_KERNEL = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_OLD": "1"}
SLOW_FILES = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_SLOW": "50"}


class WallClock:
    """A wall clock that a test sets, for all programs that run in `env`."""

    def __init__(self, file):
        assert LIBRARY.exists(), "not built (make tools)"
        self.file = file
        self.step(0)
        self.env = {"LD_PRELOAD": str(LIBRARY), "FAKE_HOST_CLOCK": str(file)}

    def step(self, seconds):
        """From now on it is this far ahead of the real one."""
        with open(self.file, "r+b" if self.file.exists() else "w+b") as f:  # in place: it is mapped
            f.write(struct.pack("=q", seconds))
