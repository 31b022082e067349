"""Faults of a cluster while checkpoints are saved, and a checker of what came of it.

Three daemons, three members of etcd, a folder and an object storage that all share. In each round a batch of small jobs goes to any nodes,
one fault strikes, all is mended, and the jobs end. Everything is drawn from one seed. What is checked, of each round and at the end:

    torn      every checkpoint that can be seen is whole, and its values are those of the one request that may have made it
    lost      what a job's record called durable is there, unless a later removal or replacement took it
    twice     the name of a job without `overwrite` shows one inode for ever, also after its removal, and the object storage carries one
              commit out; a key makes one job
    agreed    each node tells the same end of each job

Links are relays: from each node to etcd, and to each node from the other ones (`Line`); to the object storage (`Proxy`, which also fails
requests and hurts bytes). Each node has a wall clock of its own (`WallClock`), and a disk that may be slow (`Disk`).
"""
import collections
import contextlib
import datetime
import random
import statistics
import struct
import threading
import time

import etcd_members
import faults
from etcd import Node, free_port
from host import Disk, WallClock
from s3_server import Proxy

import dcpd as lib

FLOATS, TTL, BIG = 64, 2, 16 << 20
NOBODY = ("cluster_unavailable", "draining", "idempotency_in_flight", "storage_unavailable", "storage_stalled", "target_busy",
          "too_many_jobs")
S3_FAULTS = ("500", "slow", "cut", "lost", "short", "flip_up", "flip_down", 0.3)
STEPS = (-86400, -300, -20, 20, 300, 7 * 86400)  # seconds; an object storage refuses a clock that is off by 15 minutes
HAS_POINTS = b"is not POINT:N" in (lib.BIN / "dcpd-worker").read_bytes() if (lib.BIN / "dcpd-worker").exists() else False


def image(value, more=0):
    """more: bytes of another tensor, for jobs that take a while."""
    big = {"big": ("U8", [more], bytes(range(256)) * (more // 256))} if more else {}
    return lib.image({"t": ("F32", [FLOATS], struct.pack("<f", value) * FLOATS), **big})


class Commits:
    """How often the object storage has carried out a commit of each name: a write of `.metadata` that bears the mark of an attempt."""

    def __init__(self, place):
        self.place, self.counts = f"/{place}/", collections.Counter()

    def heard(self, verb, path, asked, status):
        path = path.split("?")[0]
        if verb == "PUT" and status == 200 and path.endswith("/.metadata") and b"x-amz-meta-dcpd-mark: dcpdat" in asked.lower():
            self.counts[path.removeprefix(self.place).removesuffix("/.metadata")] += 1


def clock_of(text):
    return datetime.datetime.fromisoformat(text).timestamp()


class Watch(threading.Thread):
    """Which inodes each name of the shared folder has had."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.inodes, self.ended = folder, collections.defaultdict(list), threading.Event()
        self.start()

    def look(self):
        for p in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):
                inode = p.stat().st_ino
                if not p.name.startswith(".") and inode not in self.inodes[f"{p.parent.name}/{p.name}"]:
                    self.inodes[f"{p.parent.name}/{p.name}"].append(inode)

    def run(self):
        while not self.ended.wait(0.05):
            self.look()


class Op:
    """One request, with the key that it is sent with until a node takes it."""

    def __init__(self, number, body, storage, name, value, overwrites=False, removes=False):
        self.key, self.body, self.storage, self.name = f"op{number}", body, storage, name
        self.value, self.overwrites, self.removes = value, overwrites, removes
        self.ids, self.job, self.end, self.nodes, self.codes = set(), None, None, None, []
        self.alone = False      # sent while etcd was away, when each node has its own keys
        self.unknown = False    # an answer was lost: there may be a job
        self.pending = False    # nobody has taken it yet


class Campaign:
    def __init__(self, home, seed, s3=None):
        self.random, self.home, self.seed = random.Random(seed), home, seed
        self.etcd = etcd_members.Members(home)
        self.s3, self.ops, self.names, self.numbers = s3, [], {}, 0
        self.takes, self.failed, self.struck, self.alone = [], collections.Counter(), collections.Counter(), False
        self.only = None        # the nodes that requests go to; None: any
        self.delays, self.gone = [], (None, 0)
        self.lines, self.ways, self.nodes, self.faults, self.frozen = {}, {}, {}, {}, {}
        self.clocks, self.ahead, self.disks = {}, dict.fromkeys("abc", 0), {}
        (home / "shared").mkdir()
        place = f"{s3.bucket}/{home.name}-{seed}" if s3 else ""
        self.net, self.commits = Proxy(s3.endpoint) if s3 else None, Commits(place)
        if s3:
            self.net.heard = self.commits.heard
        for name in "abc":
            self.add_node(name, {"main": home / "shared", **({"s3": f"s3://{place}"} if s3 else {})})
        self.watch = Watch(home / "shared")
        self.mended()
        for storage in ("main", "s3") if s3 else ("main",):
            for i in range(4):
                self.save("a", storage, f"src/{i}", i)
        self.save("a", "main", "src/big", 9, BIG)
        self.settle()

    def add_node(self, name, storages):
        s3, port = self.s3, free_port()
        (self.home / name).mkdir()
        self.lines[name] = etcd_members.Line(self.etcd.url)
        self.ways[name] = etcd_members.Line(f"http://127.0.0.1:{port}")
        self.faults[name] = faults.Faults(self.home / f"{name}.faults")
        self.clocks[name] = WallClock(self.home / f"{name}.clock")
        self.disks[name] = Disk(self.home / f"{name}.disk")
        env = {**self.clocks[name].env, **self.disks[name].env, **(s3.environment() if s3 else {}),
               **(self.faults[name].env if HAS_POINTS else {})}
        args = ["--workers", "1", *([f"--s3=s3.endpoint={self.net.endpoint}", f"--s3=s3.region={s3.region}"] if s3 else [])]
        self.nodes[name] = Node(self.home / name, self.lines[name].url, name, storages, args, ttl=f"{TTL}s", env=env, port=port,
                                advertise=self.ways[name].url.removeprefix("http://"))

    def close(self):
        self.watch.ended.set()
        self.watch.join()
        for pids in self.frozen.values():
            etcd_members.thaw(pids)
        for d in self.nodes.values():
            d.discard()
        for line in [*self.lines.values(), *self.ways.values()]:
            line.close()
        if self.net:
            self.net.__exit__()
        self.etcd.heal()
        self.etcd.stop()

    # ---- requests

    def up(self):
        return [n for n, d in self.nodes.items() if d.alive() and n not in self.frozen]

    def number(self):
        self.numbers += 1
        return self.numbers

    def send(self, op, seconds=2):
        """Sends the request until a node has taken or refused it, to another one after each that does not. True: done."""
        end = time.monotonic() + seconds
        op.pending = True
        while time.monotonic() < end:
            able = [n for n in op.nodes or self.up() if n in self.up()]
            if not able:
                return False
            op.alone = op.alone or self.alone
            try:
                got = self.nodes[self.random.choice(able)].api.post("/v1/jobs", op.body, headers={"Idempotency-Key": op.key}, timeout=10)
            except OSError:
                op.unknown = True
                continue
            if got.status == 202:
                op.job = got.json["id"]
                op.ids.add(op.job)
                op.pending = False
                return True
            op.codes.append(got.json["code"])
            if got.json["code"] not in NOBODY:
                op.pending = False
                return True
            time.sleep(0.05)
        return False

    def add(self, body, storage, name, value, nodes=None, **more):
        op = Op(self.number(), body, storage, name, value, **more)
        op.nodes = nodes or self.only
        self.ops.append(op)
        self.names.setdefault((storage, name), []).append(op)
        self.send(op)
        op.nodes = nodes
        return op

    def save(self, node, storage, name, value, more=0):
        """From the node's own memory."""
        sd = f"s{self.number()}"
        try:
            self.nodes[node].put(sd, [image(value, more)], slots=1)
        except (OSError, AssertionError):
            return None
        return self.add({"kind": "save", "source": {"state_dict": sd}, "target": {"storage": storage, "name": name}}, storage, name, value,
                        [node])

    def storage(self):
        return self.random.choice(("main", "main", "s3")) if self.s3 else "main"

    def one(self, kind=None):
        r, n = self.random, self.number()
        kind = kind or r.choices(("save", "reshard", "replicate", "merge", "register", "delete"), (4, 4, 3, 1, 2, 2))[0]
        i, storage = r.randrange(4), self.storage()
        source, name = {"storage": self.storage(), "name": f"src/{i}"}, f"out/{kind}{n}"
        target = {"storage": storage, "name": name}
        if kind == "save":
            return self.save(r.choice(self.up()), storage, name, n % 1000)
        if kind == "merge":
            other = r.randrange(4)
            return self.add({"kind": "merge", "sources": [source, {"storage": "main", "name": f"src/{other}"}], "target": target}, storage,
                            name, (i + other) / 2)
        if kind == "register":
            name = f"reg/{r.randrange(3)}"
            earlier = self.names.get((storage, name), [])
            if any(o.pending or (o.job and not o.end) for o in earlier):
                return None
            return self.add({"kind": "reshard", "source": source, "target": {"storage": storage, "name": name},
                             "options": {"overwrite": True}}, storage, name, i, overwrites=True)
        if kind == "delete":
            gone = [k for k, ops in self.names.items() if k[1].startswith("out/") and len(ops) == 1 and ops[0].end]
            if not gone:
                return None
            storage, name = r.choice(gone)
            return self.add({"kind": "delete", "target": {"storage": storage, "name": name}}, storage, name, None, removes=True)
        return self.add({"kind": kind, "source": source, "target": target}, storage, name, i)

    def slow(self, node):
        """Jobs that are under way, or wait, when something happens to the node."""
        for _ in range(2):
            storage, name = self.storage(), f"out/slow{self.number()}"
            self.add({"kind": "reshard", "source": {"storage": "main", "name": "src/big"}, "target": {"storage": storage, "name": name},
                      "options": {"pace": "background"}}, storage, name, 9, [node]).nodes = None

    # ---- faults

    def kill(self):
        name = self.random.choice(self.up())
        self.slow(name)
        at = time.time()
        self.nodes[name].kill()
        return name, at

    def pause(self):
        name = self.random.choice(self.up())
        self.slow(name)
        self.frozen[name] = etcd_members.freeze(self.nodes[name])
        return name, time.time()

    def cut(self):
        name = self.random.choice(self.up())
        self.slow(name)
        self.lines[name].cut()
        self.alone = True
        return name, time.time()

    def cut_off(self):
        """From etcd and from those who ask it: it still reaches the other nodes and the storages."""
        self.ways[self.random.choice(self.up())].cut()
        gone = self.cut()
        self.ways[gone[0]].cut()
        return gone

    def mute(self):
        """What the node asks of etcd is done, and it does not hear of it."""
        name = self.random.choice(self.up())
        self.lines[name].mute()
        self.alone = True
        self.slow(name)

    def cut_all(self):
        """No node reaches another one, but all reach etcd."""
        for way in self.ways.values():
            way.cut()

    def clock_jumps(self):
        for name in self.random.sample("abc", self.random.randrange(1, 4)):
            self.ahead[name] = self.random.choice(STEPS)
            self.clocks[name].step(self.ahead[name])

    def clocks_right(self):
        for name, ahead in self.ahead.items():
            if ahead:
                self.clocks[name].step(0)
        self.ahead = dict.fromkeys("abc", 0)

    def disks_slow(self):
        for name in self.random.sample("abc", self.random.randrange(1, 4)):
            self.disks[name].takes(self.random.choice((20, 100, 500)))

    def s3_fails(self, share):
        drawn = random.Random(self.random.random())
        self.net.fault = lambda *_: drawn.choice(S3_FAULTS) if drawn.random() < share else None

    def pause_etcd(self, count):
        for m in self.random.sample(self.etcd.all, count):
            m.pause()
        self.alone = self.alone or count > 1

    def stop_etcd(self, count):
        for m in self.random.sample(self.etcd.all, count):
            m.stop()
        self.alone = self.alone or count > 1

    def hold(self):
        """The owner is stopped where its worker is about to rename, or to write the object that makes the checkpoint visible."""
        name = self.random.choice(self.up())
        d, f = self.nodes[name], self.faults[name]
        f.arm("commit.rename", self.random.randrange(1, 4), faults.HOLD)
        kinds, self.only = ["reshard", "replicate", "register", "merge"], [name]
        for _ in range(8):
            if not f.struck():
                self.one(self.random.choice(kinds))
        self.only = None
        with contextlib.suppress(AssertionError):
            lib.wait_for(f.struck, 1, "a commit", every=0.005)
        if not f.struck():
            f.disarm()
            return None, 0
        self.frozen[name] = etcd_members.freeze(d)
        f.disarm()
        self.struck["held at the commit"] += 1
        return name, time.time()

    def strike(self, kind):
        """What happens in a round; the node that is away then, and since when."""
        self.struck[kind] += 1
        r = self.random
        if kind == "kill":
            return self.kill()
        if kind == "pause":
            return self.pause()
        if kind == "hold" and HAS_POINTS:
            return self.hold()
        if kind == "cut":
            return self.cut()
        if kind == "etcd member":
            r.choice((self.pause_etcd, self.stop_etcd))(1)
        elif kind == "etcd":
            r.choice((self.pause_etcd, self.stop_etcd))(r.choice((2, 3)))
        elif kind == "kill and etcd":  # a take-over that cannot begin, or is cut off
            gone = self.kill()
            time.sleep(r.choice((0, TTL * 0.9, TTL * 1.2)))
            self.pause_etcd(r.choice((2, 3)))
            return gone
        elif kind == "kill two":
            self.kill()
            return self.kill()
        elif kind == "cut off":
            return self.cut_off()
        elif kind == "mute":
            self.mute()
        elif kind == "cut all":
            self.cut_all()
        elif kind == "clock":
            self.clock_jumps()
        elif kind == "clock and kill":
            self.clock_jumps()
            return self.kill()
        elif kind == "slow disk":
            self.disks_slow()
        elif kind == "slow disk and pause":
            self.disks_slow()
            return self.pause()
        elif kind == "s3 hangs" and self.s3:
            with self.s3.paused():
                time.sleep(r.uniform(0.2, 1))
        elif kind == "s3 fails" and self.s3:
            self.s3_fails(0.15)
        elif kind == "s3 fails and kill" and self.s3:
            self.s3_fails(0.15)
            return self.kill()
        elif kind == "s3 fails and hold" and self.s3 and HAS_POINTS:
            self.s3_fails(0.1)
            return self.hold()
        return None, 0

    def mended(self):
        """Everything is there again, and everybody sees everybody."""
        self.etcd.heal()
        for name, pids in self.frozen.items():
            etcd_members.thaw(pids)
        self.frozen = {}
        for disk in self.disks.values():
            disk.takes(0)
        if self.net:
            self.net.fault = lambda *_: None
            self.struck.update(f"s3: {what}" for what, *_ in self.net.done)
            self.net.done = []
        for line in [*self.lines.values(), *self.ways.values()]:
            if line.is_cut or line.is_mute:
                line.mend()
        for d in self.nodes.values():
            if not d.alive():
                d.start(60)
        for d in self.nodes.values():
            lib.wait_for(lambda: d.nodes() == dict.fromkeys("abc", "joined"), 60, f"all see all, not {d.nodes()}")
        self.alone = False

    # ---- rounds

    def round(self, kind, count):
        before = len(self.ops)
        for _ in range(count // 2):
            self.one()
        away, since = self.strike(kind)
        time.sleep(self.random.uniform(0, 0.3))
        for _ in range(count - count // 2):
            self.one()
        if away:
            self.await_takeovers(away, before, since)
            if "etcd" not in kind:
                self.gone = (away, since)
        elif kind.startswith("etcd") or kind == "mute":
            time.sleep(self.random.uniform(0.5, 2 * TTL))
        self.some_removed()
        self.mended()
        self.settle(before)
        self.gone = (None, 0)

    def await_takeovers(self, away, before, since):
        """Until nobody has a job that another node could take; at most three leases. While etcd is away nothing can be taken."""
        end = time.monotonic() + 3 * TTL
        if self.alone:
            time.sleep(self.random.uniform(TTL, 2 * TTL))
        while not self.alone and time.monotonic() < end and self.up():
            listed = self.jobs(self.up()[0])
            held = [j for j in listed if j["node"] == away and j["state"] not in lib.TERMINAL and j["kind"] != "save"]
            if listed and not held and time.time() - since > TTL:
                return
            time.sleep(0.2)

    def jobs(self, node):
        with contextlib.suppress(OSError):
            got = self.nodes[node].api.get("/v1/jobs?page_size=60", timeout=20)
            return got.json["jobs"] if got.status == 200 else []
        return []

    def some_removed(self):
        """Some of what was just committed goes again, before a former owner comes back that may think it its own to commit."""
        if self.alone or not self.up():
            return
        listed = {j["id"]: j for j in self.jobs(self.up()[0])}
        for op in self.ops[-24:]:
            if op.job not in listed or op.removes or op.overwrites or len(self.names[op.storage, op.name]) > 1:
                continue
            j = listed[op.job]
            if j["state"] == "succeeded" and j.get("taken_over") and self.random.random() < 0.5:
                self.add({"kind": "delete", "target": {"storage": op.storage, "name": op.name}}, op.storage, op.name, None, removes=True)
                self.struck["removed before the owner is back"] += 1

    def settle(self, before=0):
        """All jobs end, and every node tells the same of each."""
        for op in self.ops[before:]:
            if op.pending:
                assert self.send(op, 10 * lib.PATIENCE), f"seed {self.seed}: nobody takes {op.body}: {op.codes[-3:]}"
            if not op.job or op.end:
                continue
            end = self.nodes["a"].api.wait(op.job, 60)
            for d in self.nodes.values():
                lib.wait_for(lambda: (got := d.api.get(f"/v1/jobs/{op.job}").ok(200))["state"] == end["state"]
                             and got["node"] == end["node"], 20, f"{d.name} agrees about {op.job}: {end['state']} at {end['node']}")
            op.end = end
            if end["state"] == "failed":
                self.failed[end["error"]["code"]] += 1
            self.takes += end.get("taken_over", [])
            self.delays += [clock_of(t["at"]) - self.ahead[t["to"]] - self.gone[1] for t in end.get("taken_over", [])
                            if t["from"] == self.gone[0]]
        self.clocks_right()
        for (storage, name), ops in self.names.items():
            if any(op in ops for op in self.ops[before:]):
                self.check(storage, name, ops)

    # ---- what must be so

    def value(self, storage, name, node="a"):
        """The checkpoint's, whose digests were compared; None: there is none."""
        d = self.nodes[node]
        got = d.api.get(d.api.storage_path(storage, name, "/tensors/t?format=raw"))
        if got.status == 404 or (storage == "s3" and got.status == 422 and got.json["code"] == "checkpoint_incomplete"):
            return None  # objects of an attempt without `.metadata` lie there until they are swept
        assert got.status == 200, f"seed {self.seed}: torn: {storage}:{name}: {got.body[:400]}"
        values = struct.unpack(f"<{FLOATS}f", got.body)
        assert len(set(values)) == 1, f"seed {self.seed}: torn: {storage}:{name}: {set(values)}"
        return values[0]

    def check(self, storage, name, ops, verify=True):
        where, may, loose = f"seed {self.seed}: {storage}:{name}", {None}, set()
        for op in ops:
            state, result = op.end["state"] if op.end else "refused", None if op.removes else op.value
            if state == "succeeded":
                may = {result}
                assert op.removes or op.end["milestones"]["durable"], f"{where}: {op.end}"
            elif op.unknown or (op.end and op.end.get("error", {}).get("code") == "not_durable"):
                may.add(result)
            if op.unknown and op.alone: # perhaps two jobs, of which one is not known
                loose.add(result)
            assert op.alone or len(op.ids) <= 1, f"{where}: a key made several jobs: {op.ids}"
        value = self.value(storage, name)
        told = [(op.body["kind"], op.job, op.end["state"] if op.end else op.codes[-1:]) for op in ops]
        seen = value in may | loose or {n: self.value(storage, name, n) for n in self.nodes}
        assert value in may | loose, f"{where} has {value} ({seen}), not {may | loose}: {told}, "\
            f"{[(op.unknown, op.alone, op.ids, op.codes, op.end) for op in ops]}"
        once = [op for op in ops if not op.removes]
        if storage == "main" and len(once) == 1 and not once[0].overwrites:
            assert len(self.watch.inodes[name]) <= 1, f"{where} was committed {len(self.watch.inodes[name])} times: {told}"
        if storage == "s3" and len(once) == 1 and not once[0].overwrites:
            assert self.commits.counts[name] <= 1, f"{where} was committed {self.commits.counts[name]} times: {told}"
        if value is not None and verify:
            self.nodes[self.random.choice("abc")].api.run("verify", source={"storage": storage, "name": name}, level="digest")

    def figures(self):
        saves = [op for op in self.ops if op.job and not op.removes]
        good = [op for op in saves if op.end["state"] == "succeeded"]
        return {"seed": self.seed, "saves": len(saves), "succeeded": len(good), "failed": dict(self.failed), "takeovers": len(self.takes),
                "takeovers timed": len(self.delays), "median takeover / TTL": round(statistics.median(self.delays or [0]) / TTL, 2),
                "slowest takeover / TTL": round(max(self.delays, default=0) / TTL, 2),
                "removals": sum(op.removes for op in self.ops), "faults": dict(self.struck),
                "fences left": len(list((self.home / "shared").rglob(".dcpd-*-fence*")))}

    def check_all(self):
        """What the rounds left is still so, at the end of all."""
        for (storage, name), ops in self.names.items():
            self.check(storage, name, ops, verify=False)
