"""Bench rows of object storage: the S3 client beside boto3's transfer manager, s3torchconnector and rclone, on one SeaweedFS, in turns.
Server and clients share the machine's processors, so the rows of processor time say more than those of the clock."""
import contextlib
import os
import shutil
import statistics
import subprocess

from measure import MIB, RUNS, SIZE, TESTBIN, lib

import s3_server

PART_MIB, THREADS = 16, 8
OBJECT = max(SIZE // 4, PART_MIB * THREADS * MIB)  # each of the four moves it eight times


class Mover:
    """A program that moves once for each line it gets."""

    def __init__(self, *command, env):
        self.process = subprocess.Popen([str(x) for x in command], env=lib.clean_environment(**env), text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def run(self, way):
        self.process.stdin.write(f"{way}\n")
        self.process.stdin.flush()
        said, seconds, cpu = self.process.stdout.readline().split()
        assert said == way
        return float(seconds), float(cpu)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def rows(b):
    """The best of the peers by the clock is the one that counts; all are told. rclone is left out where it is not installed."""
    if not b.wants("s3.put") and not b.wants("s3.get"):
        return
    path = b.tmpfs / "s3-content"
    path.write_bytes(os.urandom(MIB) * (OBJECT // MIB))
    peers = ["boto3", "s3torchconnector", *(["rclone"] if shutil.which("rclone") else [])]
    with s3_server.Server(b.disk / "s3") as server, contextlib.ExitStack() as open_:
        env = {**server.environment(), "PATH": os.environ["PATH"]}
        ours = Mover(TESTBIN / "bench/bench_s3", server.endpoint, server.bucket, "ours", OBJECT // MIB, PART_MIB, THREADS, env=env)
        movers = {"ours": open_.enter_context(ours)}
        for peer in peers:
            movers[peer] = open_.enter_context(Mover(
                s3_server.environment_of_tools(), lib.ROOT / "tests/bench/s3_peer.py", peer, server.endpoint, server.region, server.bucket,
                peer, path, PART_MIB, THREADS, env=env))
        for way in ("put", "get"):
            runs = {name: [] for name in movers}
            for i in range(RUNS + 1):
                for name in list(movers) if i % 2 else reversed(list(movers)):
                    runs[name].append(movers[name].run(way))
            runs = {name: list(zip(*some[1:])) for name, some in runs.items()}  # the first connects
            command = f"{OBJECT // MIB} MiB in parts of {PART_MIB} MiB by {THREADS} threads"
            told = {name: [round(statistics.median(x), 4) for x in runs[name]] for name in peers}
            best = min(peers, key=lambda name: told[name][0])
            for i, (row, goal) in enumerate(((f"s3.{way}", "<=1.0"), (f"s3.{way}.cpu", "<=0.5"))):
                b.row(row, "s", goal, f"{best}, the fastest of {', '.join(peers)}", list(runs["ours"][i]), list(runs[best][i]), command,
                      peers=told)
    path.unlink()
