"""One fault at a time for all processes of a daemon under test, armed while they run (worker/os/fs_fault.c). Needs a build with FAULTS=1.

    f = Faults(path); Daemon(…, env=f.env)
    f.arm("commit.rename", 1)                  # the next pass of any process there: SIGKILL
    f.arm("", 7, errno.ENOSPC, onwards=True)   # from the seventh pass of whichever points on, all calls fail
    f.arm("fs.link", 1, HOLD)                  # the process waits there, five seconds at most, until f.disarm()
"""
import mmap
import struct

HOLD = -1
IDLE, ARMED, STRUCK = range(3)
SIZE = 16 + 56 + 56


class Faults:
    def __init__(self, path):
        with open(path, "wb") as f:
            f.truncate(SIZE)
        with open(path, "r+b") as f:
            self.map = mmap.mmap(f.fileno(), SIZE)
        self.env = {"DCPD_FAULT": f"@{path}"}

    def arm(self, point, nth, fails_with=0, onwards=False):
        self.disarm()
        self.map[4:SIZE] = struct.pack("=iiI56s56s", nth, fails_with, onwards, point.encode(), b"")
        self.map[0:4] = struct.pack("=I", ARMED)

    def disarm(self):
        """The point that was struck, or None."""
        point = self.struck()
        self.map[0:4] = struct.pack("=I", IDLE)
        return point

    def struck(self):
        return self.map[72:SIZE].split(b"\0")[0].decode() if struct.unpack("=I", self.map[0:4])[0] == STRUCK else None

    def close(self):
        self.map.close()
