"""Bench rows of object storage: the S3 client beside boto3's transfer manager, on one SeaweedFS, in turns. Server and both clients share
the machine's processors, so the rows of processor time say more than those of the clock."""
import os
import subprocess

from measure import MIB, RUNS, SIZE, TESTBIN, lib

import s3_server

PART_MIB, THREADS = 16, 8


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
    if not b.wants("s3.put") and not b.wants("s3.get"):
        return
    path = b.tmpfs / "s3-content"
    path.write_bytes(os.urandom(MIB) * (SIZE // MIB))
    with s3_server.Server(b.disk / "s3") as server:
        to = (server.endpoint, server.bucket)
        env = server.environment()
        with Mover(TESTBIN / "bench/bench_s3", *to, "ours", SIZE // MIB, PART_MIB, THREADS, env=env) as ours, \
                Mover(s3_server.environment_of_tools(), lib.ROOT / "tests/bench/s3_peer.py", *to, "theirs", path, PART_MIB, THREADS,
                      env=env) as theirs:
            for way in ("put", "get"):
                a, c = [], []
                for i in range(RUNS + 1):
                    one = [(a, ours), (c, theirs)]
                    for runs, mover in one if i % 2 else reversed(one):
                        runs.append(mover.run(way))
                command = f"{SIZE // MIB} MiB in parts of {PART_MIB} MiB by {THREADS} threads"
                a, c = a[1:], c[1:]  # the first connects
                b.row(f"s3.{way}", "s", "<=1.0", "boto3's transfer manager", [x[0] for x in a], [x[0] for x in c], command)
                b.row(f"s3.{way}.cpu", "s", "<=0.5", "boto3's transfer manager", [x[1] for x in a], [x[1] for x in c], command)
    path.unlink()
