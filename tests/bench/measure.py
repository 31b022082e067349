"""The bench's instruments: a daemon with a state dict of four ranks, PyTorch's ranks, fio, cp and memcpy, and the table of rows.

DCPD_BENCH_MIB=N (default 1024) is the state dict's size, DCPD_BENCH_DIR a directory of the disk to measure (default: build).
"""
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
sys.dont_write_bytecode = True

import dcpd as lib  # noqa: E402
from ranks import Ranks  # noqa: E402

MIB = 1 << 20
SIZE = int(os.environ.get("DCPD_BENCH_MIB", 1024)) * MIB
RANKS, TENSORS, RUNS = 4, 4, 3
TESTBIN = pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))
COLUMNS = [{"match": "*", "mesh": [2], "placements": ["Shard(1)"]}]


class Bench:
    def __init__(self, words=()):
        """words: rows whose name holds one of them; all without."""
        self.words, self.rows, self.since = words, [], time.monotonic()
        base = pathlib.Path(os.environ.get("DCPD_BENCH_DIR", lib.ROOT / "build"))
        base.mkdir(parents=True, exist_ok=True)
        self.disk = pathlib.Path(tempfile.mkdtemp(prefix="bench-", dir=base))
        self.tmpfs = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-", dir="/dev/shm"))
        self.pool = self.d = None

    def wants(self, name):
        """name: a row's, or the first words of several."""
        return not self.words or any(w in name or w.startswith(f"{name}.") for w in self.words)

    def asks(self, name):
        """Whether the row of that very name is asked for."""
        return not self.words or any(w in name for w in self.words)

    def row(self, name, unit, goal, peer_name, ours, peer, command, **more):
        """ours, peer: lists of figures. more: figures beside the ratio. A row that nobody asked for is dropped."""
        if not self.asks(name):
            return
        a, b = statistics.median(ours), statistics.median(peer)
        ratio = a / b if b else 0.0
        limit = float(goal[2:])
        met = ratio <= limit if goal.startswith("<=") else ratio >= limit
        now = time.monotonic()
        took, self.since = round(now - self.since, 1), now
        self.rows.append({"name": name, "ours": a, "peer": b, "peer_name": peer_name, "unit": unit, "ratio": round(ratio, 4),
                          "goal": goal, "met": met, "command": command, "runs": {"ours": ours, "peer": peer}, "took": took, **more})
        print(f"{name:32} {a:10.3f} {b:10.3f} {unit:5} {ratio:7.2f} {goal:8} {'' if met else 'MISSED':7} "
              f"{spread(ours):>5} {spread(peer):>5}  {peer_name}", flush=True)

    def daemon(self):
        """A daemon that holds the state dict "bench": made again if it died, for its rows must not be missing."""
        if self.d is None or not self.d.alive():
            self.fresh()
        elif self.d.api.get("/v1/state-dicts/bench").status == 404:
            self.fill("bench")
        return self.d

    def fresh(self):
        """A new daemon, with "bench" and without a save."""
        if self.d:
            # on a slow disk a removal takes seconds: one that its daemon does not end is another daemon's for an hour
            lib.wait_for(lambda: not self.d.staging(), 60, "what was deleted is gone")
            self.d.discard()
            shutil.rmtree(self.d.home, ignore_errors=True)
        home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-"))
        self.d = lib.Daemon(home, {"disk": self.disk / "ckpt", "tmpfs": self.tmpfs / "ckpt"})
        self.fill("bench")
        return self.d

    def fill(self, name, tensors=TENSORS):
        env = {**os.environ, "DCPD_URL": f"unix://{self.d.socket}"}
        subprocess.run([TESTBIN / "tools/fill", name, str(RANKS), str(tensors), str(SIZE // MIB // tensors)], env=env, check=True,
                       stdout=subprocess.DEVNULL)

    def torch(self):
        """PyTorch's ranks, which hold a state dict of the same bytes."""
        if self.pool is None:
            self.pool = Ranks(RANKS)
            self.pool.run(RANKS, "scenarios", "bench_state", tensors=TENSORS, mib=SIZE // MIB // TENSORS)
        return self.pool

    def ranks(self):
        """PyTorch's ranks without a state dict, for the collectives."""
        if self.pool is None:
            self.pool = Ranks(RANKS)
        return self.pool

    def no_torch(self):
        """The ranks' memory is wanted back before figures in which memory counts."""
        if self.pool:
            self.pool.close()
            self.pool = None

    def job(self, kind, **fields):
        """Seconds from the request to the end."""
        d = self.daemon()
        start = time.monotonic()
        d.api.run(kind, seconds=300, **fields)
        return time.monotonic() - start

    def save(self, storage, name):
        return self.job("save", source={"state_dict": "bench"}, target={"storage": storage, "name": name})

    def delete(self, storage, name):
        self.d.api.run("delete", target={"storage": storage, "name": name})

    def fio(self, rw, direct=1):
        """GB/s of a file of SIZE bytes; a write includes its fsync."""
        f = self.disk / "fio"
        extra = ["--end_fsync=1"] if rw == "write" else []
        if rw == "write":
            f.unlink(missing_ok=True)
        r = subprocess.run(["fio", "--name=x", f"--filename={f}", f"--rw={rw}", "--bs=1M", f"--size={SIZE}", "--ioengine=libaio",
                            "--iodepth=8", f"--direct={direct}", "--output-format=json", *extra],
                           capture_output=True, text=True, check=True)
        j = json.loads(r.stdout[r.stdout.index("{"):])["jobs"][0][rw]
        return SIZE / (j["runtime"] / 1000) / 1e9

    def copy(self, source, target):
        """cp with fsync, seconds."""
        shutil.rmtree(target, ignore_errors=True)
        start = time.monotonic()
        subprocess.run(["cp", "-r", source, target], check=True)
        subprocess.run(["sync", *map(str, pathlib.Path(target).iterdir()), str(target)], check=True)
        t = time.monotonic() - start
        shutil.rmtree(target)
        return t

    def memspeed(self, mode, *args, runs=RUNS):
        r = subprocess.run([TESTBIN / "bench/memspeed", mode, str(SIZE), "2", str(runs), *map(str, args)], capture_output=True,
                           text=True, check=True)
        return [float(x) / 1e9 for x in r.stdout.split()]

    def end(self):
        self.no_torch()
        if self.d:
            self.d.discard()
            shutil.rmtree(self.d.home, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.rmtree(self.tmpfs, ignore_errors=True)


def tool(name, *args):
    """The JSON that a bench program prints."""
    r = subprocess.run([TESTBIN / "bench" / name, *map(str, args)], capture_output=True, text=True, check=True)
    return json.loads(r.stdout)


def spread(v):
    return f"±{(max(v) - min(v)) / 2 / statistics.median(v):.0%}" if len(v) > 1 and statistics.median(v) else ""


def drop_caches():
    try:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("3")
        return True
    except OSError:
        return False
