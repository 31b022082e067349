"""A model of a storage under retention: trainings save and overwrite, people delete, hold, name and verify, deltas are made, clocks jump,
jobs read and end, and removals go one after the other, some by a plan that is old by then, some cut off by a crash. Whatever happens, no
policy removes the newest durable checkpoint of a run, the newest verified one, or one that is held, aliased, needed by a delta or in use.

The decision is the product's (spec/retention.h, through build/test/…/tools/retention_tool); the storage is a dict, and its worker looks
once more before a checkpoint goes, as worker/store/commit.c does. `pytest -m long` takes 100,000 steps and more."""
import json
import os
import pathlib
import subprocess

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

TOOL = pathlib.Path(os.environ.get("TESTBIN", pathlib.Path(__file__).resolve().parents[2] / "build/test/release")) / "tools/retention_tool"
HOUR = 3600000
RUNS = ("a", "b", "deep/c")
runs, picks = st.sampled_from(RUNS), st.integers(0, 10**6)


class Tool:
    """One process for all examples: a question costs a tenth of a millisecond."""
    process = None

    @classmethod
    def ask(cls, question):
        if cls.process is None or cls.process.poll() is not None:
            cls.process = subprocess.Popen([TOOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cls.process.stdin.write(json.dumps(question) + "\n")
        cls.process.stdin.flush()
        return json.loads(cls.process.stdout.readline())


def stamp(ms):
    import datetime
    at = datetime.datetime.fromtimestamp(max(0, ms) / 1000, datetime.timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


keeps = st.fixed_dictionaries({}, optional={
    "last": st.integers(1, 4), "every_steps": st.sampled_from([2, 5, 10]), "every": st.sampled_from(["2h", "6h"]),
    "best": st.fixed_dictionaries({"metric": st.just("loss"), "mode": st.sampled_from(["min", "max"]), "count": st.integers(1, 2)}),
    "ttl": st.sampled_from(["1h", "5h", "30d"]), "bytes": st.integers(0, 600)}).filter(bool)


class Storage(RuleBasedStateMachine):
    taken = 0  # steps of all examples

    def __init__(self):
        super().__init__()
        self.names, self.aliases, self.policies, self.using = {}, {}, {}, set()
        self.wall, self.mono, self.sane_from, self.jobs = 1_700_000_000_000, 0, 0, 0
        self.steps, self.plan, self.trash = {r: 0 for r in RUNS}, [], {}

    # ---- what is so ----

    def newest(self, run, verified, key):
        of = [n for n, c in self.names.items() if c["run"] == run and c["readable"] and (c["verified"] or not verified)]
        return max(of, key=lambda n: (self.names[n][key], self.names[n]["job"]), default=None)

    def needed(self):
        return {c["base"] for c in self.names.values() if c["base"]}

    def may_never_go(self, name):
        c = self.names[name]
        newest = {self.newest(c["run"], v, k) for v in (False, True) for k in ("at", "job")}
        return (name in newest or c["held"] or not c["readable"] or name in self.aliases.values() or name in self.needed() or
                name in self.using)

    def record(self, name):
        c = self.names[name]
        facts = (["alias"] if name in self.aliases.values() else []) + (["in_use"] if name in self.using else [])
        return {"storage": "main", "name": name, "format": "delta" if c["base"] else "dcp", "bytes": c["bytes"], "facts": facts,
                "durable_at": stamp(c["at"]), "metrics": {"loss": c["loss"]}, "made_by": {"job": f"J{c['job']:08d}"}, "step": c["step"],
                "parents": [{"role": "base", "storage": "main", "name": c["base"]}] if c["base"] else [],
                **({"hold": {"owner": 1}} if c["held"] else {}), "etag": str(c["job"]),
                "verified": {"state": "verified" if c["verified"] else "unverified" if c["readable"] else "damaged"}}

    def some(self, pick, of=None):
        of = sorted(self.names if of is None else of)
        return of[pick % len(of)] if of else None

    def make(self, run, step, loss, size, base=None):
        self.jobs += 1
        self.mono += 1
        self.wall += 60000
        self.names[f"{run}/s-{step}"] = {"run": run, "step": step, "job": self.jobs, "at": self.wall, "loss": loss, "bytes": size,
                                         "held": False, "verified": False, "readable": True, "base": base}

    # ---- what happens ----

    @initialize(counts=st.tuples(*[st.integers(0, 9)] * 3), keep=keeps)
    def trained_before(self, counts, keep):
        for run, count in zip(RUNS, counts):
            for i in range(count):
                self.save(run, 1, 1, (0.5, 1.0, 2.0)[i % 3], 10)
                self.time_passes(1 + i % 2)
        self.policies["p"] = {"storage": "main", "match": "*", "keep": keep, "verified_only": False}

    @rule(run=runs, by=st.integers(1, 3), count=st.integers(1, 4), loss=st.sampled_from([0.5, 1.0, 2.0]), size=st.integers(1, 100))
    def save(self, run, by, count, loss, size):
        for _ in range(count):
            self.steps[run] += by
            self.make(run, self.steps[run], loss, size)

    @rule(run=runs, pick=picks)
    def set_back(self, run, pick):
        """The training goes on from an earlier step."""
        self.steps[run] = pick % (self.steps[run] + 1)

    @rule(run=runs, pick=picks)
    def delta(self, run, pick):
        base = self.some(pick)
        if base and f"{run}/s-{self.steps[run] + 1}" != base:
            self.steps[run] += 1
            self.make(run, self.steps[run], 1.0, 5, base)
            self.plan = []  # as policies_note does: what was decided before may need to stay now

    @rule(pick=picks)
    def person_deletes(self, pick):
        name = self.some(pick)
        if name and not self.names[name]["held"] and name not in self.needed():
            del self.names[name]
            self.aliases = {k: v for k, v in self.aliases.items() if v != name}

    @rule(pick=picks)
    def hold_or_not(self, pick):
        name = self.some(pick)
        if name:
            self.names[name]["held"] = not self.names[name]["held"]

    @rule(pick=picks, alias=st.sampled_from(["best", "prod"]))
    def name_it(self, pick, alias):
        if self.names:
            self.aliases[alias] = self.some(pick)

    @rule(pick=picks, good=st.booleans())
    def verify(self, pick, good):
        name = self.some(pick)
        if name:
            self.names[name].update(verified=good, readable=good or pick % 4 > 0)

    @rule(pick=picks)
    def job_begins(self, pick):
        if self.names:
            self.using.add(self.some(pick))

    @rule()
    def jobs_end(self):
        self.using.clear()

    @rule(hours=st.integers(1, 48))
    def time_passes(self, hours):
        self.wall += hours * HOUR
        self.mono += hours * HOUR

    @rule(days=st.integers(-2000, 2000))
    def clock_jumps(self, days):
        self.wall = max(1, self.wall + days * 24 * HOUR)
        self.sane_from = self.mono + HOUR

    @rule(name=st.sampled_from(["p", "q"]), match=st.sampled_from(["*", "a", "deep/*"]), keep=keeps, verified_only=st.booleans())
    def put_policy(self, name, match, keep, verified_only):
        self.policies[name] = {"storage": "main", "match": match, "keep": keep, "verified_only": verified_only}
        self.plan = []

    @rule(name=st.sampled_from(["p", "q"]))
    def drop_policy(self, name):
        self.policies.pop(name, None)
        self.plan = []

    # ---- what policies do ----

    @precondition(lambda self: self.policies)
    @rule(at_once=st.integers(0, 5))
    def decide(self, at_once):
        order = sorted(self.names)
        policies = [self.policies[k] for k in sorted(self.policies)]
        got = Tool.ask({"records": [self.record(n) for n in order], "policies": policies, "now": self.wall,
                        "sane": self.mono >= self.sane_from})
        gone = set()
        for g in got["go"]:
            name = order[g["record"]]
            c = self.names[name]
            assert not (self.needed_without(gone) and name in self.needed_without(gone)), f"{name} is the base of what stays"
            assert not c["held"] and c["readable"] and name not in self.aliases.values() and name not in self.using
            assert name not in {self.newest(c["run"], v, k) for v in (False, True) for k in ("at",)}, f"{name} is the newest"
            if g["why"] == "ttl":
                assert self.mono >= self.sane_from
            gone.add(name)
        go = [order[g["record"]] for g in got["go"]]
        self.plan = [(n, str(self.names[n]["job"]), self.protectors(n)) for n in go]
        for i, name in enumerate(order):
            assert name in gone or got["kept"][i] or not self.matched(name), f"{name} stays for no reason"
        if at_once:
            self.remove(at_once, False, False)

    def needed_without(self, gone):
        return {c["base"] for n, c in self.names.items() if c["base"] and n not in gone}

    def matched(self, name):
        import fnmatch
        return any(fnmatch.fnmatchcase(self.names[name]["run"], p["match"]) for p in self.policies.values())

    def protectors(self, name):
        run = self.names[name]["run"]
        return {self.newest(run, v, k) for v in (False, True) for k in ("at", "job")} - {None, name}

    @rule(count=st.integers(1, 5), into_trash=st.booleans(), cut_off=st.booleans())
    def remove(self, count, into_trash, cut_off):
        """Some removals of the plan, which may be old: the worker looks again. A crash leaves the rest of the plan undone."""
        for _ in range(count):
            if not self.plan:
                return
            name, etag, present = self.plan.pop(0)
            c = self.names.get(name)
            if (not c or str(c["job"]) != etag or c["held"] or name in self.aliases.values() or name in self.using or
                    not present <= set(self.names)):
                self.plan = []  # a removal that fails ends the list
                return
            assert name not in self.needed(), f"{name} goes before a delta to it"
            run = c["run"]
            newest = {self.newest(run, v, k) for v in (False, True) for k in ("at",)}
            if into_trash:
                self.trash[name] = c
            del self.names[name]
            # of what was there when it was decided, the newest ones are still there: nobody is left without a checkpoint to go on from
            assert name not in newest or any(p in self.names for p in present), f"{name} was the last of {run}"
            assert any(x["run"] == run and x["readable"] for x in self.names.values()), f"{run} has nothing to go on from"
        if cut_off:
            self.plan = []

    @rule(pick=picks)
    def undelete(self, pick):
        name = self.some(pick, self.trash)
        if name and name not in self.names:
            self.names[name] = self.trash.pop(name)

    @invariant()
    def step_is_counted(self):
        Storage.taken += 1

    @rule(pick=picks)
    def overwrite(self, pick):
        name = self.some(pick)
        if name and not self.names[name]["held"] and name not in self.needed():
            c = self.names[name]
            self.make(c["run"], c["step"], c["loss"], c["bytes"])


def run_model(examples, steps):
    run_state_machine_as_test(Storage, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
                                                         derandomize=examples < 1000, suppress_health_check=list(HealthCheck)))


@pytest.fixture(autouse=True)
def end_of_tool():
    yield
    if Tool.process:
        Tool.process.stdin.close()
        Tool.process.wait()
        Tool.process = None


def test_nothing_needed_goes():
    run_model(60, 60)


@pytest.mark.long
@pytest.mark.seconds(600)
def test_nothing_needed_goes_in_many_steps():
    Storage.taken = 0
    while Storage.taken < 100_000:
        run_model(1000, 200)
