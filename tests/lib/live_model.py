"""What must still be there of a catalogue, under everything that happens to one: the model beside which live_steps.py drives a real daemon.

The model knows which checkpoints were made, of what content, and which of them a hold, an alias, a delta or a policy keeps. What has gone
from the list without being asked to must be what a policy may remove.
"""
import collections
import fnmatch
import random
import time

import dcpd as lib

RUNS = ("a", "b", "deep/c")
ALIASES = ("best", "prod")
SIZES = {"w": 3000, "v": 1000}  # tensor of rank 0, of rank 1
CONTENTS = [f"{a}{b}" for a in range(3) for b in range(3)]  # which bytes each of the two has
GRACE = 3.0  # seconds in which a removal that was under way may still end


def data_of(tensor, key):
    return random.Random(f"{tensor}{key}").randbytes(SIZES[tensor])


def images(content):
    a, b = content
    return [lib.image({"w": ("U8", [SIZES["w"]], data_of("w", a))}, {"values": {"id": {"json": content}}}),
            lib.image({"v": ("U8", [SIZES["v"]], data_of("v", b))}, {"values": {"id": {"json": content}}})]


def run_of(name):
    return name.rpartition("/")[0]


Entry = collections.namedtuple("Entry", "content job base base_job", defaults=(None, None))  # base, base_job: of a delta
Policy = collections.namedtuple("Policy", "match keep verified_only trash since")


class Violation(AssertionError):
    pass


class Model:
    """seed: names the run in a failure; tail: the end of the daemon's log, for the same."""

    def __init__(self, seed, tail):
        self.r, self.seed, self.tail = random.Random(seed), seed, tail
        self.names, self.held, self.aliases = {}, set(), {}
        self.trash, self.policies, self.ended_policies = {}, {}, []
        self.flying, self.seen, self.log, self.step_number = [], {}, collections.deque(maxlen=60), 0
        self.counts, self.jumped = collections.Counter(), False
        self.recent = {}  # name → its record, and when it was listed last

    def some(self, things):
        things = sorted(things)
        return self.r.choice(things) if things else None

    def say(self, *what):
        self.log.append(f"{self.step_number}: " + " ".join(map(str, what)))

    def fail(self, why):
        raise Violation(f"seed {self.seed}, step {self.step_number}: {why}\n  " + "\n  ".join(self.log) +
                        f"\nnames {self.names}\nheld {self.held} aliases {self.aliases} policies {self.policies}\n{self.tail()}")

    def check(self, condition, why):
        if not condition:
            self.fail(why() if callable(why) else why)

    def is_busy(self, name):
        return any(name in f["names"] for f in self.flying)

    def matching(self, name):
        now = time.monotonic()
        return [p for p in [*self.policies.values(), *(q for q, end in self.ended_policies if now - end < GRACE)]
                if fnmatch.fnmatchcase(run_of(name), p.match)]

    def why_not(self, name, before, now):
        """Why no policy may have removed it; None: one may."""
        run, policies = run_of(name), self.matching(name)
        of = [n for n in before if run_of(n) == run]
        if not policies:
            return "no policy is about it"
        if name in self.held:
            return "it is held"
        if self.aliases.get((run, "best")) == name or self.aliases.get((run, "prod")) == name:
            return "an alias leads to it"
        if before[name]["made_by"]["job"] != self.names[name].job:  # saved anew a moment ago, and never listed
            return None
        verified = [n for n in of if (before[n].get("verified") or {}).get("state") == "verified"]
        for what, among in (("", of), ("verified ", verified)):
            for order in ("job", "time"):
                key = (lambda n: before[n]["made_by"]["job"]) if order == "job" else (lambda n: before[n]["durable_at"])
                if among and name in among and key(name) == max(map(key, among)):
                    return f"it is the newest {what}by {order}"
        for n, e in self.names.items():
            if (e.base, e.base_job) == (name, self.names[name].job) and n in now:
                return f"it is the base of {n}"
        if not self.jumped and time.monotonic() - max(p.since for p in policies) > GRACE:
            order = sorted(of, key=lambda n: before[n]["made_by"]["job"])
            for p in self.policies.values():
                if p in policies and "last" in p.keep and not p.verified_only and name in order[-p.keep["last"]:]:
                    return f"{p} keeps it"
        return None

    def compare(self, now):
        """The list, beside the model."""
        for name in sorted(set(self.names) - set(now)):
            if self.is_busy(name):
                continue
            before = {**{n: c for n, (c, at) in self.recent.items() if time.monotonic() - at < GRACE}, **self.seen, **now}
            if name in before:  # by what was there before this step, or by what is there now
                why = self.why_not(name, before, now) and self.why_not(name, {**before, **self.seen}, now)
            else:  # it went between two lists; ids and times grow no more behind a lost journal and a clock that was ahead
                newer = [n for n, c in now.items() if run_of(n) == run_of(name) and c["made_by"]["job"] > self.names[name].job]
                is_odd = newer or (self.jumped and self.counts["lose_journal"])
                why = "" if self.matching(name) and is_odd else "it has never been listed"
            self.check(not why, lambda: f"{name} has gone, and {why}")
            self.counts["removed by policies"] += 1
            self.say(f"  gone by a policy: {name}")
            del self.names[name]
        for name, c in now.items():
            if self.is_busy(name):
                continue
            e = self.names.get(name)
            self.check(e, lambda: f"{name} is listed, and nobody made it: {c}")
            self.check(c.get("made_by", {}).get("job") == e.job, lambda: f"{name} is of {c.get('made_by')}, not of {e}")
            self.check(bool(c.get("hold")) == (name in self.held), lambda: f"{name}: hold {c.get('hold')}")
            self.check(not c.get("record_problem") and not c.get("problem"), lambda: f"{name}: {c}")
        self.seen = now
        self.recent.update((n, (c, time.monotonic())) for n, c in now.items())


def by_pytorch(folder):
    import torch
    import torch.distributed.checkpoint as dcp
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(folder)
        meta = reader.read_metadata().state_dict_metadata
        sd = {k: torch.empty(m.size, dtype=m.properties.dtype) if hasattr(m, "size") else None for k, m in meta.items()}
        dcp.load(sd, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {k: v.numpy().tobytes() if hasattr(v, "numpy") else v for k, v in sd.items()}
