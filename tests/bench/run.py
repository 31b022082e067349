#!/usr/bin/env python3
"""make bench: how fast dcpd is, beside PyTorch and beside the limit that the machine sets, both in one run.

    run.py [WORD...]      rows whose name holds a WORD; all without

Prints a table; build/bench/results.jsonl has a line per row: {"name","ours","peer","peer_name","unit","ratio","goal","met","command",
"runs"}. ratio = ours / peer. Medians; `runs` has the single figures of both sides, so the spread can be seen. Ours and the peer
take turns, because a disk's speed drifts; memory is touched once before a clock starts, because new pages cost more than the
work itself. DCPD_BENCH_MIB=N (default 1024) is the state dict's size, DCPD_BENCH_DIR the disk.
"""
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "lib"))
sys.dont_write_bytecode = True

import c_rows  # noqa: E402
import comm_rows  # noqa: E402
import dcpd as lib  # noqa: E402
import dropin_rows  # noqa: E402
import format_rows  # noqa: E402
import list_rows  # noqa: E402
import look_rows  # noqa: E402
import pace_rows  # noqa: E402
import python_rows  # noqa: E402
import torch_save_rows  # noqa: E402
from ranks import Ranks  # noqa: E402

MIB = 1 << 20
SIZE = int(os.environ.get("DCPD_BENCH_MIB", 1024)) * MIB
RANKS, TENSORS, RUNS = 4, 4, 5
TESTBIN = pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))
OUT = lib.ROOT / "build/bench"
COLUMNS = [{"match": "*", "mesh": [2], "placements": ["Shard(1)"]}]


class Bench:
    def __init__(self, words):
        self.words, self.rows = words, []
        base = pathlib.Path(os.environ.get("DCPD_BENCH_DIR", lib.ROOT / "build"))
        base.mkdir(parents=True, exist_ok=True)
        self.disk = pathlib.Path(tempfile.mkdtemp(prefix="bench-", dir=base))
        self.tmpfs = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-", dir="/dev/shm"))
        self.pool = self.d = None

    def wants(self, name):
        return not self.words or any(w in name for w in self.words)

    def row(self, name, unit, goal, peer_name, ours, peer, command, **more):
        """ours, peer: lists of figures. more: figures beside the ratio."""
        a, b = statistics.median(ours), statistics.median(peer)
        ratio = a / b if b else 0.0
        limit = float(goal[2:])
        met = ratio <= limit if goal.startswith("<=") else ratio >= limit
        self.rows.append({"name": name, "ours": a, "peer": b, "peer_name": peer_name, "unit": unit, "ratio": round(ratio, 4),
                          "goal": goal, "met": met, "command": command, "runs": {"ours": ours, "peer": peer}, **more})
        print(f"{name:32} {a:10.3f} {b:10.3f} {unit:5} {ratio:7.2f} {goal:8} {'' if met else 'MISSED':7} "
              f"{spread(ours):>5} {spread(peer):>5}  {peer_name}", flush=True)

    # ---- what is measured with
    def daemon(self):
        if self.d is None:
            home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-"))
            self.d = lib.Daemon(home, {"disk": self.disk / "ckpt", "tmpfs": self.tmpfs / "ckpt"})
            self.fill("bench")
        return self.d

    def fill(self, name):
        env = {**os.environ, "DCPD_URL": f"unix://{self.d.socket}"}
        subprocess.run([TESTBIN / "tools/fill", name, str(RANKS), str(TENSORS), str(SIZE // MIB // TENSORS)], env=env, check=True,
                       stdout=subprocess.DEVNULL)

    def torch(self):
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
        start = time.monotonic()
        self.daemon().api.run(kind, seconds=300, **fields)
        return time.monotonic() - start

    def save(self, storage, name):
        where = {"storage": storage, "name": name}
        t = self.job("save", source={"state_dict": "bench"}, target=where)
        return t

    def delete(self, storage, name):
        self.d.api.run("delete", target={"storage": storage, "name": name})

    def fio(self, rw, direct=1):
        f = self.disk / "fio"
        extra = ["--end_fsync=1"] if rw == "write" else []
        if rw == "write":
            f.unlink(missing_ok=True)
        r = subprocess.run(["fio", "--name=x", f"--filename={f}", f"--rw={rw}", "--bs=1M", f"--size={SIZE}", "--ioengine=libaio",
                            "--iodepth=8", f"--direct={direct}", "--output-format=json", *extra],
                           capture_output=True, text=True, check=True)
        j = json.loads(r.stdout[r.stdout.index("{"):])["jobs"][0][rw if rw == "write" else "read"]
        return SIZE / (j["runtime"] / 1000) / 1e9 if rw == "read" else SIZE / ((j["runtime"]) / 1000) / 1e9

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

    # ---- rows
    def collectives(self):
        comm_rows.rows(self, TESTBIN)

    def python(self):
        python_rows.rows(self, SIZE)
        pace_rows.rows(self, SIZE)
        self.no_torch()

    def lists(self):
        list_rows.rows(self)

    def look(self):
        look_rows.rows(self, SIZE, drop_caches)

    def c(self):
        c_rows.rows(self, SIZE)

    def formats(self):
        format_rows.rows(self, SIZE, drop_caches)

    def torch_save(self):
        torch_save_rows.rows(self, SIZE // 2)

    def dropin(self):
        dropin_rows.rows(self, SIZE // 2)

    def saves(self):
        if not (self.wants("save.disk") or self.wants("save.first") or self.wants("save.pytorch")):
            return
        self.daemon()
        self.fio("write")
        first, fio_first = [SIZE / self.save("disk", "first") / 1e9], [self.fio("write")]
        self.delete("disk", "first")
        ours, fio, torch = [], [], []
        pool = self.torch()
        for i in range(RUNS):
            fio.append(self.fio("write"))
            ours.append(SIZE / self.save("disk", f"s{i}") / 1e9)
            self.delete("disk", f"s{i}")
            torch.append(SIZE / max(pool.run(RANKS, "scenarios", "bench_save", seconds=300, path=str(self.disk / "torch"))) / 1e9)
        self.row("save.disk", "GB/s", ">=0.90", "fio sequential write, fsync", ours, fio, "dcpctl save shm:bench disk:s0")
        self.row("save.first.disk", "GB/s", ">=0.90", "fio sequential write, fsync", first, fio_first, "dcpctl save, first of a daemon")
        self.row("save.disk.pytorch", "GB/s", ">=1.00", "PyTorch dcp.save, 4 ranks", ours, torch, "dcp.save(FileSystemWriter)")

    def saves_tmpfs(self):
        if not self.wants("save.tmpfs"):
            return
        self.daemon()
        self.no_torch()
        self.save("tmpfs", "warm")
        self.delete("tmpfs", "warm")
        ours, plain = [], []
        self.memspeed("write", self.tmpfs, runs=1)
        for i in range(RUNS):
            plain += self.memspeed("write", self.tmpfs, runs=1)
            ours.append(SIZE / self.save("tmpfs", f"s{i}") / 1e9)
            self.delete("tmpfs", f"s{i}")
        self.row("save.tmpfs", "GB/s", ">=0.90", "write() of new files, 2 threads", ours, plain, "dcpctl save shm:bench tmpfs:s0")

    def loads(self):
        if not self.wants("load"):
            return
        self.daemon()
        self.save("disk", "src")
        source, target = {"storage": "disk", "name": "src"}, {"state_dict": "target", "world_size": RANKS}
        self.job("load", source=source, target=target)  # makes the segments and touches their pages
        load = {"source": source, "target": {"state_dict": "target"}}
        warm, bare, cold, fio = [], [], [], []
        for _ in range(RUNS):
            warm.append(SIZE / self.job("load", **load) / 1e9)
            bare.append(SIZE / self.job("load", **load, options={"verify": "none"}) / 1e9)
        copy = self.memspeed("copy")
        self.row("load.warm.digest", "GB/s", ">=0.55", "memcpy, 2 threads", warm, copy, "dcpctl load disk:src shm:target")
        self.row("load.warm", "GB/s", ">=0.80", "memcpy, 2 threads", bare, copy, "the same, options.verify none")
        if drop_caches():
            self.fio("write")
            for _ in range(3):
                drop_caches()
                fio.append(self.fio("read"))
                drop_caches()
                cold.append(SIZE / self.job("load", **load) / 1e9)
            self.row("load.cold", "GB/s", ">=0.90", "fio sequential read", cold, fio, "echo 3 > drop_caches; dcpctl load")
        self.d.drop("target")
        pool = self.torch()
        path = str(self.disk / "torch")
        pool.run(RANKS, "scenarios", "bench_save", seconds=300, path=path)
        torch = [SIZE / max(pool.run(RANKS, "scenarios", "bench_load", seconds=300, path=path)) / 1e9 for _ in range(3)]
        self.row("load.warm.pytorch", "GB/s", ">=1.00", "PyTorch dcp.load, 4 ranks", warm, torch, "dcp.load(FileSystemReader)")
        self.no_torch()
        self.delete("disk", "src")

    def reshards(self):
        for storage, directory in (("disk", self.disk), ("tmpfs", self.tmpfs)):
            rows = [("reshard", "src", {"world_size": 2, "layout": COLUMNS}, "<=1.30"),
                    ("to_safetensors", "src", {"format": "safetensors"}, "<=1.20"),
                    ("from_safetensors", "hf", {"world_size": RANKS}, "<=1.20")]
            rows = [r for r in rows if self.wants(f"{r[0]}.{storage}")]
            if not rows:
                continue
            self.daemon()
            self.no_torch()
            self.save(storage, "src")
            if any(source == "hf" for _, source, _, _ in rows):
                self.job("reshard", source={"storage": storage, "name": "src"},
                         target={"storage": storage, "name": "hf", "format": "safetensors"})
            for name, source, target, goal in rows:
                ours, copies = [], []
                for i in range(RUNS):
                    copies.append(self.copy(directory / f"ckpt/{source}", directory / "copy"))
                    where = {"storage": storage, "name": f"r{i}"}
                    ours.append(self.job("reshard", source={"storage": storage, "name": source}, target={**where, **target}))
                    self.d.api.run("delete", target=where)
                words = ("--format safetensors" if "format" in target else "--layout '*=Shard(1)@2'" if "layout" in target else
                         f"--world-size {RANKS}")
                self.row(f"{name}.{storage}", "s", goal, "cp and fsync", ours, copies,
                         f"dcpctl reshard {storage}:{source} {storage}:r0 {words}")
            for name in sorted({source for _, source, _, _ in rows} | {"src"}):
                self.delete(storage, name)

    def plans(self):
        if not self.wants("plan"):
            return
        got = []
        for _ in range(3):
            r = subprocess.run([TESTBIN / "bench/plan_million", "1000000"], capture_output=True, text=True, check=True)
            got.append(json.loads(r.stdout))
        for name, key, limit in (("plan.global", "plan_s", 1.0),
                                 ("plan.write_metadata", "write_s", 1.0), ("plan.parse", "parse_s", 2.0)):
            self.row(f"{name}.1M_chunks", "s", "<=1.00", f"limit {limit:g} s", [g[key] for g in got], [limit], "plan_million 1000000")
        self.row("plan.bytes_per_chunk", "B", "<=1.00", "limit 300 bytes", [g["bytes_per_chunk"] for g in got], [300.0],
                 "plan_million 1000000")
        for name, args in (("grid_1000x1000", "1 1024 1000"), ("1M_chunks", "977 1024"), ("1M_tensors", "1000000 1")):
            got_of = []
            for _ in range(3):
                r = subprocess.run([TESTBIN / "bench/bench_plan", *args.split()], capture_output=True, text=True, check=True)
                got_of.append(json.loads(r.stdout))
            for row, key in (("plan.save", "save_plan_s"), ("plan.validate", "validate_s"), ("plan.load", "load_plan_s")):
                self.row(f"{row}.{name}", "s", "<=1.00", "limit 1 s", [g[key] for g in got_of], [1.0], f"bench_plan {args}")
            self.row(f"plan.save_bytes.{name}", "B", "<=1.00", "limit 300 bytes and the name",
                     [g["save_peak_bytes_per_chunk"] for g in got_of], [300 + g["name_bytes_per_chunk"] for g in got_of],
                     f"bench_plan {args}")
        self.plans_pytorch()
        self.steps()

    def plans_pytorch(self):
        import scenarios

        n = 100000  # a million takes PyTorch most of a minute and 2.5 GB
        ours = {"plan": [], "write": []}
        theirs = {"plan": [], "write": []}
        for _ in range(3):
            r = subprocess.run([TESTBIN / "bench/plan_million", str(n)], capture_output=True, text=True, check=True)
            g = json.loads(r.stdout)
            planned, written = scenarios.bench_plan(n, 1000, str(self.disk / "metadata"))
            for part, mine, its in (("plan", g["plan_s"] + g["validate_s"], planned), ("write", g["write_s"], written)):
                ours[part].append(n / mine)
                theirs[part].append(n / its)
        for part, what in (("plan", "create_global_plan, which validates"), ("write", "pickle.dump of its Metadata")):
            self.row(f"plan.pytorch.{part}", "chunks/s", ">=20.00", f"PyTorch {what}, {n} chunks", ours[part], theirs[part],
                     f"plan_million {n}")

    def steps(self):
        got = []
        for _ in range(3):
            r = subprocess.run([TESTBIN / "bench/bench_step", "10000", "4"], capture_output=True, text=True, check=True)
            got.append(json.loads(r.stdout))
        planned = [g["parse_ms"] + g["plan_ms"] + g["tables_ms"] for g in got]
        self.row("plan.step_again.10k_tensors", "ms", "<=1.00", "limit 1 ms", [g["again_plan_ms"] for g in got], [1.0],
                 "bench_step 10000 4")
        self.row("plan.step_headers.10k_tensors", "ms", "<=1.00", "headers of 4 ranks read and planned",
                 [g["again_match_ms"] + g["again_plan_ms"] + g["again_share_ms"] for g in got], planned, "bench_step 10000 4")

    def wrk(self, port, path, token=None, seconds=3, threads=1):
        c = ["wrk", f"-t{threads}", "-c16", f"-d{seconds}", "--latency"]
        c += ["-H", f"Authorization: Bearer {token}"] if token else []
        r = subprocess.run([*c, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, check=True).stdout
        assert "Non-2xx" not in r, r
        p99 = next(line.split()[1] for line in r.splitlines() if line.strip().startswith("99%"))
        unit = {"us": 1e-3, "ms": 1.0, "s": 1000.0, "m": 60000.0}
        number = p99.rstrip("usm")
        ms = float(number) * unit[p99[len(number):]]
        return float(next(line.split()[1] for line in r.splitlines() if "Requests/sec" in line)), ms

    def rest(self):
        if not self.wants("rest"):
            return
        d = self.daemon()
        self.no_torch()
        job = d.api.run("save", seconds=300, source={"state_dict": "bench"}, target={"storage": "disk", "name": "rest"})
        answer = d.api.get(f"/v1/jobs/{job['id']}")
        (self.disk / "body").write_bytes(answer.body)
        heads = [x for k, v in answer.headers.items() if k not in ("Date", "Content-Length", "Connection") for x in (k, v)]
        bare = subprocess.Popen([TESTBIN / "bench/bare_mhd", self.disk / "body", *heads], stdout=subprocess.PIPE, text=True)
        port = int(bare.stdout.readline())
        ours_port, token = d.tcp_client().tcp[1], (d.state / "token").read_text().strip()
        path = f"/v1/jobs/{job['id']}"
        ours, limit = [], []
        for _ in range(3):
            limit.append(self.wrk(port, path, token)[0])
            ours.append(self.wrk(ours_port, path, token)[0])
        bare.kill()
        bare.wait()
        self.row("rest.get_job", "1/s", ">=0.60", "bare libmicrohttpd", ours, limit, "wrk -t1 -c16 http://…/v1/jobs/ID")
        alone, busy, p99 = [], [], []
        for i in range(3):
            alone.append(self.save("disk", f"alone{i}"))
            self.delete("disk", f"alone{i}")
            got = []
            # A steady trickle, as dashboards and schedulers make: a flood would measure two cores, not the daemon.
            stop = threading.Event()
            t = threading.Thread(target=lambda: trickle(d, path, got, stop))
            t.start()
            busy.append(self.save("disk", f"busy{i}"))
            stop.set()
            t.join()
            p99.append(sorted(got)[int(len(got) * 0.99)] * 1000)
            self.delete("disk", f"busy{i}")
        self.row("rest.p99_during_save", "ms", "<=1.00", "limit 5 ms", p99, [5.0],
                 "GET /v1/jobs/ID 200 times a second, during a save")
        self.row("rest.save_slowed_by", "s", "<=1.02", "the same save alone", busy, alone, "dcpctl save, with these requests")
        self.delete("disk", "rest")

    def start(self):
        if not self.wants("start"):
            return
        home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-bench-"))
        d = lib.Daemon(home)
        golden = lib.ROOT / "tests/fixtures/torch-2.15.0/plain/checkpoint"
        shutil.copytree(golden, home / "main/x")
        want, end = 10000, time.monotonic() + 90

        def submit(n):
            for _ in range(n):
                if time.monotonic() < end:
                    d.api.run("verify", source={"storage": "main", "name": "x"}, level="structure")

        threads = [threading.Thread(target=submit, args=(want // 8,)) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        jobs = int(next((line.split()[-1] for line in d.api.get("/metrics").body.decode().splitlines()
                         if line.startswith("dcpd_jobs") and "succeeded" in line), 0) or 0)
        times = []
        for _ in range(5):
            d.stop()
            start = time.monotonic()
            d.start()
            times.append(time.monotonic() - start)
        d.discard()
        shutil.rmtree(home)
        self.row("start.cold", "s", "<=1.00", f"limit 0.2 s, {jobs or 'at most ' + str(want)} jobs in the journal", times, [0.2],
                 "dcpd; until /readyz answers 200")

    def end(self):
        self.no_torch()
        if self.d:
            self.d.discard()
            shutil.rmtree(self.d.home, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.rmtree(self.tmpfs, ignore_errors=True)


def trickle(d, path, got, stop):
    while not stop.is_set():
        start = time.monotonic()
        d.api.get(path)
        got.append(time.monotonic() - start)
        time.sleep(0.005)


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


def main():
    b = Bench(sys.argv[1:])
    OUT.mkdir(parents=True, exist_ok=True)
    print(f"{SIZE // MIB} MiB over {RANKS} ranks, {os.cpu_count()} CPUs, disk {b.disk.parent}\n")
    print(f"{'row':32} {'dcpd':>10} {'peer':>10} {'unit':5} {'ratio':>7} {'goal':8} {'':7} {'±dcpd':>5} {'±peer':>5}  peer",
          flush=True)
    failed = []
    try:
        for part in (b.collectives, b.plans, b.start, b.lists, b.look, b.saves_tmpfs, b.reshards, b.rest, b.saves, b.loads, b.python,
                     b.dropin, b.c, b.formats, b.torch_save):
            try:
                part()
            except (AssertionError, OSError, subprocess.SubprocessError) as e:
                failed.append(part.__name__)
                print(f"{part.__name__}: not measured: {str(e)[:600]}", flush=True)
                if b.d and not b.d.alive():
                    b.d = None
    finally:
        b.end()
        with open(OUT / "results.jsonl", "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in b.rows)
    missed = [r["name"] for r in b.rows if not r["met"]]
    print(f"\n{len(b.rows)} rows, {len(missed)} goals missed{': ' + ', '.join(missed) if missed else ''}; {OUT}/results.jsonl")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
