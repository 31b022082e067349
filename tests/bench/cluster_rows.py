"""Bench rows of a cluster of two nodes: checkpoints that are copied to a neighbour's memory and come back from there, and versions of
weights for a subscriber at another tensor-parallel layout, beside one TCP stream of iperf3 between the same endpoints. Both nodes, and
both ends of iperf3, share the machine's processors. Targets are memory that was touched before."""
import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
import time

from measure import MIB, RANKS, RUNS, SIZE, drop_caches, lib

import etcd

TENSORS, WIDTH = 4, 8192
HALF = SIZE // 2                                  # bytes of a state dict between neighbours: each round moves them eight times
ROWS = HALF // RANKS // TENSORS // WIDTH          # of a tensor on a rank
TP = [{"match": "*", "mesh": [2], "placements": ["Shard(1)"]}]
LINK = 512 * MIB                                  # bytes a second of a storage that all nodes share
FEW = HALF // RANKS // 16                         # bytes of a rank that a delta changes


def images(seed):
    """One tensor per rank and name, cut by rows."""
    out = []
    for r in range(RANKS):
        names = {f"layers.{t}.weight": ("U8", [ROWS, WIDTH], os.urandom(MIB) * (ROWS * WIDTH // MIB)) for t in range(TENSORS)}
        cut = {n: {"global_shape": [RANKS * ROWS, WIDTH], "offsets": [r * ROWS, 0]} for n in names}
        out.append(lib.image(names, {"tensors": cut, "values": {"step": {"json": seed}}}))
    return out


class Stream:
    """GB/s of one TCP stream over loopback, of as many bytes."""

    def __init__(self):
        self.port = etcd.free_port()
        self.server = subprocess.Popen(["iperf3", "-s", "-B", "127.0.0.1", "-p", str(self.port)], stdout=subprocess.DEVNULL)

    def run(self):
        def ask():
            r = subprocess.run(["iperf3", "-c", "127.0.0.1", "-p", str(self.port), "-n", str(HALF), "-J"], capture_output=True, text=True)
            return r.returncode == 0 and json.loads(r.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9

        return lib.wait_for(ask, 20, "iperf3 answers")

    def stop(self):
        self.server.kill()
        self.server.wait()


@contextlib.contextmanager
def world(b):
    """Two nodes that share a storage on the disk, and a stream beside."""
    with contextlib.ExitStack() as ends, tempfile.TemporaryDirectory(dir=b.tmpfs) as home:
        server = etcd.Etcd(b.disk)
        ends.callback(server.stop)
        stream, nodes = Stream(), []
        ends.callback(stream.stop)
        for name in ("a", "b"):
            pathlib.Path(home, name).mkdir()
            nodes.append(etcd.Node(f"{home}/{name}", server, name, {"main": b.disk / "cluster"}, ["--neighbour-memory", "80%"]))
            ends.callback(nodes[-1].discard)
        for n in nodes:
            n.sees(a="joined", b="joined")
        yield *nodes, stream


def timed(call):
    begun = time.perf_counter()
    done = call()
    return done, HALF / 1e9 / (time.perf_counter() - begun)


def copy_of(a, name):
    """Saves "train" with one copy; seconds until the neighbour had it."""
    job = a.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": name}, options={"neighbours": 1})
    begun = time.perf_counter()
    lib.wait_for(lambda: "replicated" in a.api.get(f"/v1/jobs/{job['id']}").ok(200)["milestones"], 60, "a neighbour has it", every=0.002)
    took = time.perf_counter() - begun
    a.api.wait(job)
    return took


def stream_beside(a, name, stream):
    """The stream while "train" is saved to the disk: what a copy has for itself. None: the save was over before it. What is saved stays, as
    a removal would run into the next figure."""
    job = a.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": name})
    speed = stream.run()
    over = a.api.get(f"/v1/jobs/{job['id']}").ok(200)["state"] == "succeeded"
    a.api.wait(job)
    return None if over else speed


def drop_copies(other):
    """False: a node held one a moment ago, and may come back for more."""
    copies = [sd["name"] for sd in other.api.get("/v1/state-dicts").ok(200)["state_dicts"] if "replica" in sd]
    return all(other.api.delete(f"/v1/state-dicts/{name}").status < 300 for name in copies)


def told():
    return f"{HALF // MIB} MiB, {RANKS} ranks"


def replicates(b, a, stream):
    """Copies as a training has them made, step by step: each takes the memory of the one before the last, the first two take new."""
    beside, streams, copies = [], [], []
    for i in range(RUNS + 2):
        a.put("train", images(i))
        streams.append(stream.run())
        beside.append(stream_beside(a, f"steps/alone-{i}", stream))
        copies.append(HALF / 1e9 / copy_of(a, f"steps/step-{i}"))
        a.drop("train")
    for i in range(RUNS + 2):
        for kind in ("alone", "step"):
            a.api.run("delete", target={"storage": "main", "name": f"steps/{kind}-{i}"})
    beside = [s for s in beside if s]
    b.row("cluster.replicate", "GB/s", ">=0.50", "iperf3 beside the same save" if beside else "iperf3, one stream", copies[2:],
          beside or streams, f"{told()} until a neighbour has them, while they are written to the disk", first=copies[0])


def restores(b, a, other, stream):
    runs = {"stream": [], "restore": [], "disk": []}
    load = lambda name: a.api.run("load", source={"storage": "main", "name": name}, target={"state_dict": "back", "world_size": RANKS})
    for i in range(RUNS + 1):
        runs["stream"].append(stream.run())
        a.put("train", images(i))
        copy_of(a, f"run/step-{i}")
        a.drop("train")
        done, speed = timed(lambda: load(f"run/step-{i}"))
        assert done["result"]["bytes_from_neighbours"] == HALF, done["result"]
        runs["restore"].append(speed)
        lib.wait_for(lambda: drop_copies(other), 20, "the copy is let go")
        drop_caches()
        done, speed = timed(lambda: load(f"run/step-{i}"))
        assert done["result"]["bytes_from_neighbours"] == 0, done["result"]
        runs["disk"].append(speed)
        a.api.run("delete", target={"storage": "main", "name": f"run/step-{i}"})
    a.drop("back")
    first = {name: v.pop(0) for name, v in runs.items()}
    b.row("cluster.restore", "GB/s", ">=0.80", "iperf3, one stream", runs["restore"], runs["stream"],
          f"load of {told()}, out of a neighbour's memory", first=first["restore"])
    # a disk of this machine, which one node has for itself, may be as fast as TCP between two
    b.row("cluster.restore.disk", "GB/s", ">=0.80", "the same load from the disk, cold", runs["restore"], runs["disk"], f"load of {told()}")


def write(a, name, version, data):
    segments = [lib.segment_file(a.api.post(f"/v1/state-dicts/{name}/ranks/{r}:reserve?wait=10s",
                                            {"bytes": len(one), "generation": version}).ok(200)["segment"]) for r, one in enumerate(data)]
    for path, one in zip(segments, data):
        with open(path, "r+b") as f:
            f.write(one)


def publishes(b, a, other, stream):
    runs = {"stream": [], "full": [], "delta": []}
    a.create("policy", RANKS, publish={})
    other.create("serve", 2, subscribe={"publication": "policy", "node": "a", "layout": TP})
    version = 0

    def publish(data):
        nonlocal version
        version += 1
        write(a, "policy", version, data)

        def until_applied():
            for r, one in enumerate(data):
                a.seal("policy", r, version, len(one))
            while (other.api.get("/v1/state-dicts/serve").ok(200)["generation"] or 0) < version:
                other.api.post("/v1/state-dicts/serve/ranks/0:renew?wait=5s", {}).ok(200)
                time.sleep(0.001)

        speed = timed(until_applied)[1]
        for r in range(2):
            other.api.post(f"/v1/state-dicts/serve/ranks/{r}:renew", {"taken": version}).ok(200)
        return speed

    for i in range(RUNS + 2):                     # the first two touch the subscriber's slots
        runs["stream"].append(stream.run())
        data = images(i)
        runs["full"].append(publish(data))
        few = [one[: -FEW] + os.urandom(FEW) for one in data]
        runs["delta"].append(publish(few))
    moved = f"{HALF // MIB} MiB of {RANKS} ranks by rows, for 2 ranks by columns"
    runs = {name: v[2:] for name, v in runs.items()}
    b.row("cluster.publish", "GB/s", ">=0.50", "iperf3, one stream", runs["full"], runs["stream"], moved)
    b.row("cluster.publish_delta", "GB/s", ">=1.50", "the whole version", runs["delta"], runs["full"],
          f"{moved}, of which 1/16 has changed")


def forget(folder):
    """What lies there is read from the disk again."""
    os.sync()
    for f in folder.rglob("*"):
        if f.is_file():
            with open(f, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(folder):
    """The page cache has what lies there."""
    for f in folder.rglob("*"):
        if f.is_file():
            with open(f, "rb") as file:
                while file.read(1 << 24):
                    pass


def spread_load(nodes, number, spread=True):
    """Seconds until all nodes have it; bytes that they read of the storage. All loads go to one state dict: its memory was touched."""
    begun, names = time.perf_counter(), [n.name for n in nodes]
    more = {"spread": {"nodes": names, "id": f"bench-{number}"}} if spread else {}
    target = {"state_dict": "to", "world_size": 1}
    jobs = [n.api.submit("load", source={"storage": "main", "name": "one"}, target=target, **more) for n in nodes]
    done = [n.api.wait(j, 120) for n, j in zip(nodes, jobs)]
    took = time.perf_counter() - begun
    assert all(j["state"] == "succeeded" and not j["result"].get("warnings") for j in done), done
    return took, sum(j["result"].get("spread", {}).get("bytes_from_storage", j["result"]["read_bytes"]) for j in done)


@contextlib.contextmanager
def one_disk_for_all(nodes, folder):
    """A cgroup (v1 or v2) holds what all nodes together read of the folder's disk to LINK bytes a second."""
    disk, base = os.stat(folder).st_dev, pathlib.Path("/sys/fs/cgroup")
    v1 = (base / "blkio").is_dir()
    group = (base / "blkio" if v1 else base) / f"dcpd-bench-{os.getpid()}"
    file, limit = ("blkio.throttle.read_bps_device", LINK) if v1 else ("io.max", f"rbps={LINK}")

    def move(pids, into):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (into / "cgroup.procs").write_text(str(pid))

    group.mkdir()
    try:
        (group / file).write_text(f"{os.major(disk)}:{os.minor(disk)} {limit}")
        move([p for n in nodes for p in (n.proc.pid, *n.workers())], group)
        yield
    finally:
        move((group / "cgroup.procs").read_text().split(), group.parent)
        group.rmdir()


def loads_in_turn(nodes, main, runs, label):
    """Seconds of one node's load of what is on the disk, seconds of the same spread over all, bytes read of the storage by these."""
    one, spread, read = [], [], []
    for i in range(runs):
        forget(main)
        one.append(spread_load(nodes[:1], 2 * i, False)[0])
        forget(main)
        took, count = spread_load(nodes, f"{label}-{i}")
        spread.append(took)
        read.append(count)
    return one, spread, read


def parts(nodes, stream):
    """Seconds that the parts of a spread load take here: the bytes that cross TCP, as iperf3 sends them, then a load of all nodes at once
    from the page cache."""
    return (len(nodes) - 1) * SIZE / 1e9 / stream.run() + spread_load(nodes, 0, False)[0]


def spread_rows(b):
    """cluster.spread is what it is for: a storage that is the limit. In cluster.spread.free the disk is as fast as it is, and the limit are
    the processors, which all nodes of this machine share: cluster.spread.parts has beside it what the parts of such a load cost there, 2.5
    to 2.9 times as much as one node's load."""
    if not b.wants("cluster.spread") or not etcd.PROGRAM:
        return
    with contextlib.ExitStack() as ends:
        home, nodes = pathlib.Path(ends.enter_context(tempfile.TemporaryDirectory(dir=b.disk))), []
        server, stream = etcd.Etcd(home), Stream()
        ends.callback(server.stop)
        ends.callback(stream.stop)
        for name in ("a", "b", "c"):
            (home / name).mkdir()
            nodes.append(etcd.Node(home / name, server, name, {"main": home / "main"}))
            ends.callback(nodes[-1].discard)
        for n in nodes:
            n.sees(a="joined", b="joined", c="joined")
        part = SIZE // RANKS
        nodes[0].put("bench", [lib.image({f"w{r}": ("U8", [part], os.urandom(MIB) * (part // MIB))}) for r in range(RANKS)])
        nodes[0].api.run("save", source={"state_dict": "bench"}, target={"storage": "main", "name": "one"})
        nodes[0].drop("bench")
        loads_in_turn(nodes, home / "main", 1, "first")  # touches the memory of all
        command = f"load of {SIZE // MIB} MiB from the disk by 3 daemons on this machine"
        one, spread, read = loads_in_turn(nodes, home / "main", RUNS, "free")
        b.row("cluster.spread.free", "s", "<=3.00", "the same by one of them", spread, one, command)
        b.row("cluster.spread_bytes", "bytes", "<=1.01", "the checkpoint's tensors", read, [SIZE] * RUNS, command)
        in_memory(home / "main")
        b.row("cluster.spread.parts", "s", "<=1.20", "the bytes by iperf3, and warm loads", spread,
              [parts(nodes, stream) for _ in range(RUNS)], command)
        with one_disk_for_all(nodes, home):
            one, spread, _ = loads_in_turn(nodes, home / "main", RUNS, "held")
            b.row("cluster.spread", "s", "<=1.20", "the same by one of them", spread, one,
                  f"the same, {LINK // MIB} MiB/s for all together")


def neighbour_rows(b):
    if not etcd.PROGRAM or not any(b.wants(f"cluster.{r}") for r in ("restore", "replicate", "publish")):
        return
    with world(b) as (a, other, stream):
        if b.wants("cluster.replicate"):
            replicates(b, a, stream)
        if b.wants("cluster.restore"):
            restores(b, a, other, stream)
        if b.wants("cluster.publish"):
            publishes(b, a, other, stream)


def rows(b):
    neighbour_rows(b)
    spread_rows(b)
