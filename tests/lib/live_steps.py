"""A catalogue under everything that happens to one: a real daemon, beside a model that knows what must still be there (live_model.py).

A seed decides the steps: saves, overwrites, deletes, the trash, holds, aliases, policies, deltas, chains, a tier, a second daemon on the
same storage, a clock that jumps, kills of dcpd and of its workers at fault points, calls that fail, a disk that fills up, and a journal
that is lost. Policies act by themselves meanwhile. After each step the list is compared with the model.

    with Catalogue(home, seed) as c:
        c.run(steps)

A failure says seed, step and the last steps. The same seed takes the same steps, but for what hangs on the time at which a policy acts.
"""
import collections
import contextlib
import errno
import http.client
import json
import os
import pathlib
import shutil
import signal
import threading
import time
import urllib.parse

import dcpd as lib
from faults import HOLD, Faults
from host import WallClock
from live_model import ALIASES, CONTENTS, GRACE, RUNS, Entry, Model, Policy, by_pytorch, data_of, images, run_of

# Fault points, and the steps that pass them; other points are passed by all.
STEPS_AT = {**dict.fromkeys(["commit.synced", "commit.rename", "fs.allocate", "fs.truncate", "io.write", "io.fsync"],
                            ["save", "overwrite"]),
            **dict.fromkeys(["commit.renamed", "fs.exchange", "commit.replace", "commit.replaced"], ["overwrite", "materialise"]),
            **dict.fromkeys(["remove.rename", "remove.renamed", "trash.made"], ["delete"]), "fs.link": ["save", "overwrite"],
            **dict.fromkeys(["undelete.rename", "undelete.renamed"], ["undelete"]), "io.read": ["verify", "delta", "materialise"]}
POINTS = ["", "", "", "", *STEPS_AT, "fs.open", "fs.mkdir", "fs.stat", "fs.fsync", "fs.rename", "fs.unlink", "fs.pread", "fs.pwrite",
          "fs.list", "fs.close"]
BROKEN = (ConnectionError, http.client.HTTPException, BrokenPipeError, TimeoutError)


def has_points():
    return b"is not POINT:N" in (lib.BIN / "dcpd-worker").read_bytes()


def quoted(name):
    return urllib.parse.quote(name, safe="")


class Kept(lib.Client):
    """One connection, kept."""
    connection = None

    def request(self, method, path, body=None, headers=None, timeout=None):
        h = {**self.headers, **(headers or {}), **({"Content-Type": "application/json"} if body is not None else {})}
        for attempt in (0, 1):
            c = self.connection or self.connect(timeout)
            self.connection = c
            fresh, c.timeout = c.sock is None, timeout or self.timeout
            try:
                c.request(method, path, body=None if body is None else json.dumps(body), headers=h)
                r = c.getresponse()
                return lib.Answer(r.status, dict(r.getheaders()), r.read())
            except (*BROKEN, OSError):
                self.connection = None
                c.close()
                if fresh or attempt or method != "GET":
                    raise


class Catalogue(Model):
    def __init__(self, home, seed, points=None, disk=None, two=False, tier=False, clock=True, root=None):
        """disk: a small file system that may be filled. root: where storages lie; default `home`. points: inject faults at fault points."""
        super().__init__(seed, lambda: self.d.tail(1500))
        self.home, self.disk = pathlib.Path(home), disk
        self.points = has_points() if points is None else points
        self.home.mkdir(parents=True, exist_ok=True)
        root = pathlib.Path(disk or root or home)
        self.faults, self.clock = Faults(self.home / "fault"), WallClock(self.home / "clock")
        env = {**self.clock.env, **self.faults.env}
        storages = {"main": root / "main", "far": root / "far"}
        args = ["--workers", "2", *(["--tier=main=far"] if tier else [])]
        self.d = lib.Daemon(self.home / "d", storages, args, env=env, start=False, tcp=False)
        self.other = lib.Daemon(self.home / "o", {"main": root / "main"}, args[:2], env=env, start=False, tcp=False) if two else None
        self.tier, self.with_clock, self.chain = tier, clock, False
        self.struck, self.keys = collections.Counter(), 0
        for x in self.daemons():
            x.api = Kept(x.socket)
            x.start()
            self.fill_memory(x)

    # ---- the daemons ----

    def daemons(self):
        return [x for x in (self.d, self.other) if x]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.faults.disarm()
        for x in self.daemons():
            x.discard()
        self.faults.close()

    def fill_memory(self, x):
        for content in CONTENTS:
            if x.api.get(f"/v1/state-dicts/s{content}").status == 404:
                x.put(f"s{content}", images(content), lease_seconds=86400)

    def back_up(self, x=None):
        """Whoever was killed runs again."""
        self.faults.disarm()
        for x in self.daemons():
            if not x.alive():
                x.proc.wait()
                x.api.connection = None
                x.start()

    # ---- requests ----

    def ask(self, x, method, path, body=None, key=None):
        """The answer, over any number of ends of the daemon: a request with a key is repeated, another answered None."""
        for _ in range(4):
            try:
                return x.api.request(method, path, body, {"Idempotency-Key": key} if key else None, timeout=60)
            except (*BROKEN, OSError) as e:
                self.say(f"  {method} {path}: {type(e).__name__}")
                lib.wait_for(lambda: not x.alive() or x.ready(), 10, "the daemon answers, or has ended")
                self.back_up()
                if not key and method != "GET":
                    return None
        self.fail(f"{method} {path} is never answered")

    def problem(self, a, *codes):
        p = a.problem()
        if self.policies and p["code"] == "target_busy":  # one of theirs is under way
            return p
        if p["code"] not in codes and p["status"] < 500 and not self.is_disturbed or p["code"] in ("internal", "protocol"):
            self.fail(f"{p['code']} is none of {codes}: {p}")
        return p

    def submit(self, kind, names, allowed, end, x=None, **fields):
        """A job: now, or it is left flying. end(job or None): what the model makes of it. allowed: codes of a refusal or failure."""
        self.keys += 1
        x = x or self.d
        key = f"{self.seed}-{self.keys}"
        a = self.ask(x, "POST", "/v1/jobs", {"kind": kind, **fields}, key)
        if a.status >= 400:
            p = self.problem(a, *allowed)
            self.say(f"  {kind}: {p['code']}")
            self.check(p["status"] < 500 or self.is_disturbed or p["code"] in allowed, lambda: f"{kind}: {p}")
            return p["code"]
        self.flying.append({"id": a.json["id"], "kind": kind, "names": set(names), "allowed": allowed, "end": end, "x": x,
                            "disturbed": self.is_disturbed, "fields": fields})
        if self.r.random() < 0.85 or self.is_disturbed:
            self.land()
        return None

    is_disturbed = is_alone = False

    def land(self):
        """All that flies has ended, and the model knows."""
        flying, self.flying = self.flying, []
        self.is_alone = len(flying) == 1
        for f in flying:
            for _ in range(40):
                a = self.ask(f["x"], "GET", f"/v1/jobs/{f['id']}?wait=20s")
                if a.status != 200 or a.json["state"] in lib.TERMINAL:
                    break
            self.check(a.status == 200, lambda: f"job {f['id']} ({f['kind']}) is not known: {a.status}")
            j = a.json
            self.check(j["state"] in lib.TERMINAL, lambda: f"job {f['id']} does not end: {j}")
            if j["state"] != "succeeded":
                code = j["error"]["code"]
                self.say(f"  {f['kind']} {f['names']}: {code}")
                ok = code in f["allowed"] or f["disturbed"] or self.is_disturbed
                self.check(ok and code not in ("internal", "protocol"), lambda: f"{f['kind']} failed: {j['error']} {f['fields']}")
            f["end"](j)

    # ---- what is so ----

    def listed(self, x=None, storage="main"):
        """Name → record."""
        for _ in range(20):
            a = self.ask(x or self.d, "GET", f"/v1/checkpoints/{storage}?page_size=1000")
            if a.status == 200:
                return {c["name"]: c for c in a.json["checkpoints"]}
            p = self.problem(a, "storage_stalled", "worker_lost")  # of a look-up worker that was struck a moment ago
            time.sleep(0.05)
        self.fail(f"no list: {p}")

    def look(self):
        self.compare(self.listed())

    # ---- steps: each is one thing that happens ----

    def do_save(self, name=None, overwrite=None):
        x = self.r.choice(self.daemons())
        name = name or f"{self.r.choice(RUNS)}/s-{self.r.randrange(14)}"
        if self.is_busy(name):
            return
        content = self.r.choice(CONTENTS)
        overwrite = self.r.random() < 0.2 if overwrite is None else overwrite
        options = {"overwrite": overwrite, "incremental": self.r.random() < 0.7, "retries": self.r.choice([0, 1, 3])}
        self.say("save", name, content, options, "by the other" if x is self.other else "")
        was = self.names.get(name)

        def end(j):
            if j["state"] == "succeeded":
                self.names[name] = Entry(content, j["id"])
                self.shared_bytes(name, j, was)
            elif j["error"]["code"] == "not_durable":
                self.either(name, Entry(content, j["id"]))

        codes = ["checkpoint_held"] if was and name in self.held else []
        codes += ["checkpoint_exists"] if was and not overwrite else []
        # what it shares with may go, or be replaced, while it does
        code = self.submit("save", [name], [*codes, "storage_full", "state_conflict", "checkpoint_replaced", "not_found"], end, x,
                           source={"state_dict": f"s{content}"}, target={"storage": "main", "name": name},
                           metrics={"loss": self.r.choice([0.5, 1.0, 2.0])}, labels={"c": content}, options=options)
        if codes and not code and not self.is_busy(name) and name in self.names and self.names[name] is not was:
            self.check(self.matching(name) and name not in self.held, f"{name} was replaced, and should not: {codes}")

    def do_overwrite(self):
        name = self.some(self.names)
        if name:
            self.do_save(name, True)

    def either(self, name, entry):
        """The job does not know whether it was committed: the record tells."""
        a = self.ask(self.d, "GET", f"/v1/checkpoints/main/{quoted(name)}")
        if a.status == 200 and a.json["made_by"]["job"] == entry.job:
            self.names[name] = entry

    def shared_bytes(self, name, j, was):
        """What it says to share with others is what has another name now, unless somebody removed it meanwhile."""
        folder = self.d.storages["main"] / name
        try:
            linked = sum(st.st_size for st in (p.stat() for p in folder.iterdir() if p.suffix == ".distcp") if st.st_nlink > 1)
        except FileNotFoundError:
            return
        shared = j["result"].get("bytes_shared")
        if shared is None:  # its success was found out after a kill: the checkpoint's own record tells
            a = self.ask(self.d, "GET", f"/v1/checkpoints/main/{quoted(name)}")
            if a.status != 200 or a.json["made_by"]["job"] != j["id"]:
                return
            shared = a.json.get("bytes_shared", 0)
        self.counts["saves that shared bytes"] += shared > 0
        self.check(linked <= shared or not self.is_alone, lambda: f"{name} says {shared} bytes are shared, {linked} are")
        if shared and not self.policies and self.is_alone and not was:
            self.check(linked == shared, lambda: f"{name} says {shared} bytes are shared, {linked} are")

    def do_delete(self):
        name = self.some(self.names)
        if not name or self.is_busy(name):
            return
        x = self.r.choice(self.daemons())
        trash, was = self.r.random() < 0.5, self.names[name]
        self.say("delete", name, "to the trash" if trash else "")

        def end(j):
            code = "" if j["state"] == "succeeded" else j["error"]["code"]
            there = (self.d.storages["main"] / name).exists()
            self.check(there or not code or code == "not_durable" or code == "not_found", lambda: f"{name} is gone, the job says {code}")
            self.check(code or not there, lambda: f"{name} is there, the job says that it is gone")
            if not there and name in self.names:
                del self.names[name]
                if trash and code != "not_found":
                    self.trash[j["id"]] = (name, was)

        codes = ["checkpoint_held"] if name in self.held else ["not_found"] if self.matching(name) else []
        self.submit("delete", [name], [*codes, "not_durable"], end, x, target={"storage": "main", "name": name},
                    options={"trash": "100000d"} if trash else {})

    def do_undelete(self):
        gone = self.some(self.trash)
        if not gone or self.is_busy(self.trash[gone][0]):
            return
        name, entry = self.trash[gone]
        self.say("undelete", name, gone)
        a = self.ask(self.d, "POST", f"/v1/checkpoints/main/{quoted(name)}:undelete", {"id": gone})
        folder = self.d.storages["main"] / name
        there = folder.is_dir() and any(folder.iterdir())
        if a and a.status >= 400:
            p = self.problem(a, "checkpoint_exists")
            is_unread = self.is_disturbed and (self.d.storages["main"] / ".dcpd-trash" / gone / "item").exists()
            self.check(p["code"] != "not_found" or there or is_unread, lambda: f"{gone} is not in the trash: {p}")
        entry_is_left = (self.d.storages["main"] / ".dcpd-trash" / gone / "item").exists()
        if a and a.status == 200:
            self.check((there or self.matching(name)) and not entry_is_left, f"{name} is not back")
        self.check(entry_is_left or there or self.matching(name), f"{name} is neither in the trash nor in its place")
        if not entry_is_left:
            del self.trash[gone]
            self.names[name] = entry
            if name not in self.seen:  # a policy may have taken it again before it was ever listed
                self.names.pop(name)
                self.calm()
                now = self.listed()
                if name in now:
                    self.names[name], self.seen[name] = entry, now[name]
                    if now[name].get("hold"):
                        self.held.add(name)
                else:
                    self.check(self.matching(name), f"{name} came back, and is gone again")

    def do_hold(self):
        name, x = self.some(self.names), self.r.choice(self.daemons())
        if not name or self.is_busy(name):
            return
        want = name not in self.held
        self.say("hold" if want else "unhold", name)
        a = self.ask(x, "PUT" if want else "DELETE", f"/v1/checkpoints/main/{quoted(name)}/hold", {"reason": "model"} if want else None)
        if a is not None and a.status < 400:
            (self.held.add if want else self.held.discard)(name)
        else:
            if a is not None and not self.is_disturbed:
                self.problem(a, *(["not_found"] if self.matching(name) else []))
            self.calm()
            now = self.listed().get(name)
            (self.held.add if now and now.get("hold") else self.held.discard)(name)

    def do_alias(self):
        name, alias, x = self.some(self.names), self.r.choice(ALIASES), self.r.choice(self.daemons())
        if not name:
            return
        run = run_of(name)
        was = self.aliases.get((run, alias))
        right = self.r.random() < 0.7
        said = was if right else self.r.choice([None, *(n for n in sorted(self.names) if run_of(n) == run)])
        self.say("alias", alias, name, "if", said)
        a = self.ask(x, "PUT", f"/v1/runs/main/{quoted(run)}/aliases/{alias}", {"name": name, "if": said})
        if a is not None and a.status == 200:
            self.check(said == was, f"{alias} of {run} was {was}, and moved from {said}")
            self.aliases[run, alias] = name
        elif a is not None and a.json["code"] == "alias_moved":
            p = a.problem()
            self.check(said != was and p.get("actual") == was, lambda: f"{alias} of {run} is {was}: {p}")
        else:
            if a is not None and not self.is_disturbed:
                self.problem(a, *(["not_found"] if self.matching(name) or self.is_busy(name) else []))
            self.aliases_again(run)

    def do_unalias(self):
        key = self.some(self.aliases)
        if key:
            self.say("unalias", *key)
            a = self.ask(self.r.choice(self.daemons()), "DELETE", f"/v1/runs/main/{quoted(key[0])}/aliases/{key[1]}")
            if a is not None and a.status == 200:
                del self.aliases[key]
            else:
                self.check(a is None or self.is_disturbed or a.status >= 500, lambda: f"{key}: {a.body}")
                self.aliases_again(key[0])

    def aliases_again(self, run):
        """A request that broke off: what the page says now."""
        file = self.d.storages["main"] / run / ".dcpd-aliases.json"
        page = json.loads(file.read_text())["aliases"] if file.exists() else {}
        for alias in ALIASES:
            self.aliases.pop((run, alias), None)
            if alias in page:
                self.aliases[run, alias] = f"{run}/{page[alias]}"

    def do_policy(self):
        name = self.r.choice("pq")
        old = self.policies.get(name)
        if old and self.r.random() < 0.35:
            self.say("drop policy", name)
            a = self.ask(self.d, "DELETE", f"/v1/policies/{name}")
            if a is None or a.status >= 400:
                a = self.ask(self.d, "DELETE", f"/v1/policies/{name}")
            self.policies.pop(name)
        else:
            keep = {}
            while not keep:
                keep = {k: v for k, v in {
                    "last": self.r.randint(1, 4), "every_steps": self.r.choice([2, 5]), "best": {"metric": "loss", "count": 2},
                    "every": "2h", "ttl": self.r.choice(["1s", "5h"]), "bytes": self.r.choice([0, 9000, 20000])}.items()
                    if self.r.random() < (0.6 if k == "last" else 0.2)}
            p = Policy(self.r.choice(["*", "a", "deep/*", "b"]), keep, self.r.random() < 0.2, self.r.random() < 0.3, time.monotonic())
            self.say("policy", name, *p)
            body = {"storage": "main", "match": p.match, "keep": keep, "verified_only": p.verified_only, "confirm": True,
                    **({"trash": "100000d"} if p.trash else {})}
            a = self.ask(self.d, "PUT", f"/v1/policies/{name}", body)
            if a is None:
                a = self.ask(self.d, "PUT", f"/v1/policies/{name}", body)
            if a is None or a.status >= 400:
                return self.problem(a) if a is not None else None
            self.policies[name] = p
        if old:
            self.ended_policies = [(q, t) for q, t in self.ended_policies if time.monotonic() - t < GRACE] + [(old, time.monotonic())]

    def do_preview(self):
        name = self.some(self.policies)
        if name:
            a = self.ask(self.d, "POST", f"/v1/policies/{name}:preview")
            if a is None or a.status >= 500:
                return
            gone = {x["name"] for x in a.ok(200)["remove"]}
            now = self.listed()  # a policy may have removed what needed one of them, before the preview looked
            for n in gone & set(self.names) & set(self.seen) if not self.flying else ():
                why = self.why_not(n, self.seen, set(self.seen) - gone) and self.why_not(n, {**self.seen, **now}, set(now) - gone)
                self.check(not why or "keeps it" in why, lambda: f"the preview would remove {n}, and {why}")

    def do_verify(self):
        name = self.some(n for n, e in self.names.items() if not e.base)
        if not name or self.is_busy(name):
            return
        self.say("verify", name)
        self.submit("verify", [], self.reading(name), lambda j: None, source={"storage": "main", "name": name}, level="digest")

    def reading(self, name):
        """How a job that reads it may fail: it may have gone before the request, by a policy; or is saved anew meanwhile."""
        may_go = self.matching(name) or self.is_busy(name) or name not in self.seen
        return ["checkpoint_replaced", *(["not_found"] if may_go else [])]

    def do_delta(self):
        plain = [n for n, e in self.names.items() if not e.base and not self.is_busy(n)]
        target = f"{self.r.choice(RUNS)}/d-{self.r.randrange(4)}"
        if len(plain) < 2 or target in self.names or self.is_busy(target):
            return
        base, source = self.some(plain), self.some(plain)
        self.say("delta", base, source, target)
        new, old = self.names[source], self.names[base]

        def end(j):
            if j["state"] == "succeeded":
                is_far = self.tier and not (self.d.storages["main"] / base).exists()  # it had gone, and its copy served
                self.names[target] = Entry(new.content, j["id"], base, "" if is_far else old.job)

        codes = {*self.reading(base), *self.reading(source), "validation_failed", "storage_full"}
        self.submit("delta", [target, base, source], codes, end, base={"storage": "main", "name": base},
                    source={"storage": "main", "name": source}, target={"storage": "main", "name": target})

    def do_apply(self):
        """A delta with its base is what it was made of."""
        delta = self.some(n for n, e in self.names.items() if e.base in self.names and self.names[e.base].job == e.base_job
                          and not self.is_busy(n) and not self.is_busy(e.base))
        if not delta:
            return
        e = self.names[delta]
        self.say("apply", e.base, delta)

        def end(j):
            if j["state"] == "succeeded":
                self.holds_content(self.d.storages["far"] / "applied", e.content)

        self.submit("apply", [delta], [*self.reading(delta), "storage_full"], end,
                    base={"storage": "main", "name": e.base}, source={"storage": "main", "name": delta},
                    target={"storage": "far", "name": "applied"}, options={"overwrite": True})

    def do_materialise(self):
        name = self.some(n for n, e in self.names.items() if not e.base and not self.is_busy(n))
        if not name:
            return
        self.say("materialise", name)

        def end(j):
            if j["state"] == "succeeded" and not self.policies:
                files = (self.d.storages["main"] / name).glob("*.distcp")
                self.check(all(p.stat().st_nlink == 1 for p in files), f"{name} shares files")

        self.submit("materialise", [name], [*self.reading(name), "storage_full"], end, target={"storage": "main", "name": name})

    def do_chain(self):
        self.chain = not self.chain
        self.say("chain", self.chain)
        if self.chain:
            body = {"storage": "main", "match": "a", "behind": "newest", "steps": [{"verify": {"level": "digest"}},
                                                                                   {"copy": {"storage": "far", "overwrite": True}}]}
            a = self.ask(self.d, "PUT", "/v1/chains/c", body)
            self.chain = a is not None and a.status == 200
        else:
            self.ask(self.d, "DELETE", "/v1/chains/c")

    def do_read(self):
        """Through the daemon, or by whoever opens the files."""
        name = self.some(n for n, e in self.names.items() if not e.base and not self.is_busy(n))
        if not name:
            return
        e, key = self.names[name], self.r.choice("wv")
        a = self.ask(self.d, "GET", f"/v1/checkpoints/main/{quoted(name)}/tensors/{key}?format=raw")
        if a.status == 200:
            self.check(a.body == data_of(key, e.content["wv".index(key)]), f"{key} of {name} is not what was saved")
        else:
            self.problem(a, *(["not_found"] if self.matching(name) else []))

    # ---- troubles ----

    def do_clock(self):
        if self.with_clock:
            days = self.r.choice([0, 0.1, -0.1, 1, -1, 30, -30, 400, -400])
            self.say("clock", days)
            self.clock.step(int(days * 86400))
            self.jumped = True

    def do_kill(self):
        """dcpd dies at some moment of what it does."""
        x = self.r.choice(self.daemons())
        self.say("kill dcpd")
        self.one_more_flying()
        time.sleep(self.r.choice([0, 0.001, 0.003, 0.01]))
        x.kill()
        self.back_up()
        self.recovered()

    def do_restart(self):
        x = self.r.choice(self.daemons())
        self.say("stop and start")
        self.land()
        x.stop()
        self.back_up()

    def one_more_flying(self):
        random_was, self.r.random = self.r.random, lambda: 0.9  # is not awaited
        try:
            getattr(self, self.r.choice(["do_save", "do_overwrite", "do_delete", "do_materialise", "do_verify"]))()
        finally:
            self.r.random = random_was

    def do_kill_worker(self):
        self.say("kill a worker")
        self.one_more_flying()
        pids = [p for x in self.daemons() for p in x.workers()]
        killed = self.r.choice(pids) if pids else None
        if killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed, signal.SIGKILL)
        self.disturbed(self.land)
        # until the daemon hears of it, an idle gang of which one is dead still gets jobs
        lib.wait_for(lambda: not any(killed in x.workers() for x in self.daemons()), 10, "a killed worker is buried")

    def calm(self):
        """Nothing is armed any more: what follows must go well."""
        point = self.faults.disarm()
        if point:
            self.struck[point] += 1
        self.back_up()

    def disturbed(self, what, then=lambda: None):
        self.is_disturbed = True
        try:
            what()
            self.land()
        finally:
            then()
            self.calm()
            self.is_disturbed = False

    def some_step(self, point=""):
        steps = STEPS_AT.get(point, ["save"] * 4 + ["overwrite"] * 3 + ["delete"] * 3 + [
            "undelete", "undelete", "hold", "alias", "unalias", "delta", "materialise", "verify", "policy"])
        getattr(self, "do_" + self.r.choice(steps))()

    def do_fault(self):
        """The process that passes a point is killed there, or the call fails, once or from then on."""
        if not self.points:
            return self.do_kill_worker()
        point, nth = self.r.choice(POINTS), int(self.r.choice([1, 1, 1, 2, 3, 5, self.r.expovariate(0.05) + 1]))
        what = self.r.choice([0, 0, errno.EIO, errno.ENOSPC, errno.EROFS])
        onwards = bool(what) and self.r.random() < 0.4
        self.say("fault", point or "any", nth, what, onwards)
        self.land()
        self.faults.arm(point, nth, what, onwards)
        self.disturbed(lambda: self.some_step(point))
        self.recovered()

    def do_kill_at(self):
        """dcpd is killed while a worker stands at a point, which goes on then."""
        if not self.points:
            return self.do_kill()
        point, nth = self.r.choice(POINTS), int(self.r.choice([1, 1, 2, 3, self.r.expovariate(0.1) + 1]))
        self.say("kill dcpd at", point or "any", nth)
        self.land()
        pids, over = [x.proc.pid for x in self.daemons()], threading.Event()

        def watch():
            while not over.wait(0.0005):
                at = self.faults.struck()
                if at:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    self.struck["dcpd at " + at] += 1
                    self.faults.disarm()
                    return

        thread = threading.Thread(target=watch)
        self.faults.arm(point, nth, HOLD)
        thread.start()
        try:
            self.disturbed(lambda: self.some_step(point), lambda: (over.set(), thread.join()))
        finally:
            over.set()
            thread.join()
        self.recovered()

    def do_fill(self):
        """The disk is full, but for some pages, in the middle of a step."""
        if not self.disk:
            return
        self.land()
        ballast, pages = pathlib.Path(self.disk) / "ballast", self.r.choice([0, 0, 1, 2, 3, 5, 8])
        self.say("a full disk, but for", pages, "pages")
        st = os.statvfs(self.disk)
        free = max(0, st.f_bavail * st.f_frsize - pages * 4096)
        try:
            with open(ballast, "wb") as f, contextlib.suppress(OSError):  # a chain's copy may have taken some of it
                os.posix_fallocate(f.fileno(), 0, max(1, free))
            self.disturbed(lambda: [self.some_step() for _ in range(2)])
        finally:
            ballast.unlink()
        self.recovered()

    def do_lose_journal(self):
        """The catalogue is what lies beside the bytes: a new daemon finds it."""
        self.say("the journal is lost")
        for name in list(self.policies):
            self.d.api.delete(f"/v1/policies/{name}").ok(204)
            self.ended_policies.append((self.policies.pop(name), time.monotonic()))
        self.d.api.delete("/v1/chains/c")
        self.settle()
        self.settle()
        before, runs = self.listed(), self.runs()
        trash = self.trash_of(self.d)
        self.d.kill()
        names = {m.decode() for f in self.d.state.glob("*") if f.is_file() for m in lib.SEGMENT.findall(f.read_bytes())}
        shutil.rmtree(self.d.state)
        self.d.state.mkdir()
        self.d.api.connection = None
        self.d.start()
        for n in names:
            (lib.SHM / n).unlink(missing_ok=True)
        self.fill_memory(self.d)
        now = self.listed()
        for c in [*before.values(), *now.values()]:
            c.pop("replicated", None)  # whether and where: from the tier's own list
            (c.get("verified") or {}).pop("at", None)
        for n in set(before) & set(now):
            if self.points and not now[n].get("verified"):  # its page could not be written then
                before[n]["verified"] = now[n].get("verified")
        self.check(now == before, lambda: "another catalogue: " + str([(n, before.get(n), now.get(n)) for n in {*before, *now}
                                                                       if before.get(n) != now.get(n)]))
        self.check(self.runs() == runs, lambda: f"other runs: {runs} {self.runs()}")
        self.check(self.trash_of(self.d) == trash, "another trash")
        self.chain = False

    def runs(self, x=None):
        out = {}
        for row in (x or self.d).api.get("/v1/runs?storage=main").ok(200)["runs"]:
            one = (x or self.d).api.get(f"/v1/runs/main/{quoted(row['run'])}").ok(200)
            out[row["run"]] = {k: one[k] for k in ("aliases", "dangling", "count")}
        return out

    def trash_of(self, x):
        return {e["id"]: (e["name"], e["until"], e["bytes"]) for e in x.api.get("/v1/storages/main/trash").ok(200)["trash"]}

    def recovered(self):
        self.land()
        if self.r.random() < 0.1:  # sweeps take seconds; the next settle looks in any case
            self.left_over()

    def left_over(self):
        """No staging, nothing half removed."""
        def none():
            return not [p for p in self.d.staging() if not p.endswith(".json.tmp")]

        try:
            lib.wait_for(none, 2, "no staging")
        except AssertionError:
            if not all("/.dcpd-trash/" in p for p in self.d.staging()):
                self.fail(f"left over: {self.d.staging()}")
            self.d.stop()  # an undelete that could not remove the empty entry of the trash: the next start does
            self.back_up()
            if not self.counts["lose_journal"]:  # those of the daemon before look like another daemon's
                lib.wait_for(none, 2, "no staging")

    # ---- what holds whenever nothing runs ----

    def settle(self):
        self.land()
        for _ in range(100):  # chains, tiers, removals of policies
            busy = [j for s in ("queued", "planning", "running", "committing")
                    for j in self.d.api.get(f"/v1/jobs?filter=state%3D{s}").ok(200)["jobs"]]
            if not busy:
                break
            self.ask(self.d, "GET", f"/v1/jobs/{busy[0]['id']}?wait=5s")
        self.left_over()
        self.look()
        self.links()
        listed = self.d.api.get("/v1/storages/main/trash").ok(200)["trash"]
        for gone in self.trash:
            self.check(any(e["id"] == gone for e in listed), f"{gone} is not in the trash")
        if self.other:
            theirs, mine = self.listed(self.other), self.listed()
            for c in [*mine.values(), *theirs.values()]:
                c.pop("replicated", None)
                (c.get("verified") or {}).pop("at", None)  # of the job's end, or of its page's writing
            self.check(set(mine) == set(theirs) or self.policies, lambda: f"two daemons, two lists: {set(mine) ^ set(theirs)}")
            for n in set(mine) & set(theirs):
                if not (mine[n].get("verified") and theirs[n].get("verified")):  # the page could not be written then
                    mine[n].pop("verified", None), theirs[n].pop("verified", None)
                self.check(mine[n] == theirs[n], lambda: f"two daemons, two records: {mine[n]} {theirs[n]}")
        for run in RUNS:
            a = self.d.api.get(f"/v1/runs/main/{quoted(run)}")
            if a.status == 200:
                got = {k: v for k, v in a.json["aliases"].items() if not k.startswith("latest")}
                want = {k[1]: v for k, v in self.aliases.items() if k[0] == run}
                self.check(got == want, f"aliases of {run} are {got}, not {want}")

    def links(self):
        """Each file is a checkpoint's or a trash entry's, and has as many names as there are of these."""
        main, by_inode = self.d.storages["main"], collections.defaultdict(list)
        known = {main / n for n in self.names} | set((main / ".dcpd-trash").glob("*/item"))
        for at, _, files in os.walk(main):
            for f in files:
                if f.endswith(".distcp"):
                    st = os.stat(os.path.join(at, f))
                    by_inode[st.st_ino].append((pathlib.Path(at), st.st_nlink))
        for found in by_inode.values():
            for folder, links in found:
                if not self.policies:
                    self.check(links == len(found), lambda: f"{found}")
                    self.check(folder in known, lambda: f"{folder} is nobody's")

    def holds_content(self, folder, content):
        """As PyTorch reads it, bit for bit."""
        try:
            got = by_pytorch(folder)
        except BaseException:  # PyTorch's own are no Exceptions
            if (folder / ".metadata").exists():
                raise
            return None  # a policy was quicker
        want = {"w": data_of("w", content[0]), "v": data_of("v", content[1]), "id": content}
        self.check(got == want, lambda: f"{folder} does not hold {content}: {({k: v == want.get(k) for k, v in got.items()})}")
        return True

    def read_all(self, count=None):
        names = [n for n, e in sorted(self.names.items()) if not e.base and not self.is_busy(n)]
        for n in names if count is None else self.r.sample(names, min(count, len(names))):
            self.holds_content(self.d.storages["main"] / n, self.names[n].content)
        for p in (self.d.storages["far"]).glob("*/*/.metadata"):
            if count is None:
                c = self.listed(storage="far").get(str(p.parent.relative_to(self.d.storages["far"])))
                if c and "labels" in c:
                    self.holds_content(p.parent, c["labels"]["c"])

    STEPS = {"save": 30, "overwrite": 8, "delete": 8, "undelete": 4, "hold": 8, "alias": 6, "unalias": 1, "policy": 5, "preview": 2,
             "verify": 6, "delta": 3, "apply": 1, "materialise": 3, "chain": 0.5, "read": 6, "clock": 0.7, "kill": 0.6, "restart": 0.2,
             "kill_worker": 1, "fault": 5, "kill_at": 2, "fill": 3, "lose_journal": 0.15, "settled": 1}

    def do_settled(self):
        self.settle()
        self.read_all(2)

    def run(self, steps, until=None):
        kinds, weights = zip(*self.STEPS.items())
        for _ in range(steps):
            self.step_number += 1
            kind = self.r.choices(kinds, weights)[0]
            self.counts[kind] += 1
            getattr(self, "do_" + kind)()
            self.look()
            if until and time.monotonic() > until:
                break
        self.faults.disarm()
        self.settle()
        self.read_all()
        return self
