"""The most memory that a daemon and its workers take while something runs."""
import threading
import time


def rollup(pid):
    out = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            for line in f:
                k, _, v = line.partition(":")
                if v.endswith("kB\n"):
                    out[k] = int(v[:-3]) * 1024
    except OSError:  # it has ended
        pass
    return out


class Peak(threading.Thread):
    """Samples every 10 ms, from start() to stop.set(). workers: anonymous and shared memory of all together, segments included."""

    def __init__(self, d):
        super().__init__(daemon=True)
        self.d, self.stop = d, threading.Event()
        self.workers = self.coordinator = self.samples = 0

    def start(self):
        """Workers unmap the segments of a job when its end is reported: what is left of one before does not count."""
        end = time.monotonic() + 30
        while sum(rollup(p).get("Pss_Shmem", 0) for p in self.d.workers()) > 16 << 20 and time.monotonic() < end:
            time.sleep(0.01)
        super().start()

    def run(self):
        while not self.stop.is_set():
            r = [rollup(p) for p in self.d.workers()]
            self.workers = max(self.workers, sum(x.get("Pss_Anon", 0) + x.get("Pss_Shmem", 0) for x in r))
            self.coordinator = max(self.coordinator, rollup(self.d.proc.pid).get("Pss", 0))
            self.samples += 1
            time.sleep(0.01)
