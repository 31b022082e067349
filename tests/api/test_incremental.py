"""Incremental saves: what the step before has already costs no bytes, and neither of the two harms the other.

On tmpfs and the tests' own disk by links; by clones on an XFS in a file, where this machine can mount one. Every checkpoint is read by
PyTorch's own reader, verified, and compared byte for byte with what was saved.
"""
import hashlib
import os
import pathlib
import random
import shutil
import subprocess

import clones
import pytest

import dcpd as lib

MIB = 1 << 20


class Run:
    """A training that saves: a state dict of tensors that are changed from step to step."""

    def __init__(self, d, storage, tensors, world=1):
        self.d, self.storage, self.world, self.step, self.sd = d, storage, world, 0, lib.fresh()
        self.root, self.name = pathlib.Path(d.storages[storage]), f"run-{lib.fresh()}"
        self.tensors = dict(tensors)
        self.options = {"incremental": True}

    def images(self):
        out = []
        for rank in range(self.world):
            mine = {k: v for i, (k, v) in enumerate(self.tensors.items()) if i % self.world == rank}
            out.append(lib.image({k: ("U8", [len(v)], v) for k, v in mine.items()},
                                 {"values": {"step": {"json": self.step}}} if rank == 0 else None))
        return out

    def at(self, step):
        return {"storage": self.storage, "name": f"{self.name}/step-{step}"}

    def folder(self, step):
        return self.root / self.name / f"step-{step}"

    def put(self):
        for rank in range(self.world if self.step else 0):
            self.d.api.post(f"/v1/state-dicts/{self.sd}/ranks/{rank}:release", {"generation": self.step}).ok()
        self.step += 1
        self.d.put(self.sd, self.images(), generation=self.step, create=self.step == 1)

    def save(self, **options):
        self.put()
        return self.again(**options)

    def again(self, **options):
        r = self.d.api.run("save", source={"state_dict": self.sd, "generation": self.step}, target=self.at(self.step),
                           options={**self.options, **options})["result"]
        self.check(self.step)
        return r

    def change(self, name, at=0, value=b"\xA5" * 16):
        data = bytearray(self.tensors[name])
        data[at:at + len(value)] = value
        self.tensors[name] = bytes(data)

    def check(self, step, tensors=None):
        """It is whole, and holds these tensors."""
        self.d.api.run("verify", source=self.at(step), level="digest")
        for name, data in (self.tensors if tensors is None else tensors).items():
            got = self.d.api.get(self.d.api.storage_path(self.storage, self.at(step)["name"], f"/tensors/{name}?format=raw"))
            assert got.status == 200 and got.body == data, f"{name} of step {step}"

    def files(self, step):
        return {p.name: p for p in self.folder(step).iterdir() if p.suffix == ".distcp"}

    def close(self):
        self.d.drop(self.sd)


def some(n, seed):
    return random.Random(seed).randbytes(n)


MODEL = {"frozen.a": some(5 * MIB + 123, 1), "frozen.b": some(9 * MIB, 2), "lora.a": some(2 * MIB, 3), "norm": some(700, 4),
         "bias": some(300000, 5)}


@pytest.fixture(scope="module")
def xfs(tmp_path_factory):
    with clones.mounted(tmp_path_factory.mktemp("xfs")) as at:
        yield at


@pytest.fixture(scope="module")
def d(tmp_path_factory, request):
    home = tmp_path_factory.mktemp("incremental")
    shm = pathlib.Path(f"/dev/shm/dcpd-test-incremental-{os.getpid()}")
    storages = {"main": home / "main", "tmpfs": shm}
    d = lib.Daemon(home, storages)
    yield d
    d.discard()
    shutil.rmtree(shm, ignore_errors=True)


@pytest.fixture(scope="module")
def dx(tmp_path_factory, xfs):
    d = lib.Daemon(tmp_path_factory.mktemp("clones"), {"xfs": xfs / "s"})
    yield d
    d.discard()


@pytest.fixture(params=["main", pytest.param("tmpfs", marks=pytest.mark.long)])
def run(d, request):
    r = Run(d, request.param, MODEL)
    yield r
    r.close()


@pytest.fixture
def cloned(dx):
    r = Run(dx, "xfs", MODEL)
    yield r
    r.close()


def test_only_what_changed_is_written(run):
    first = run.save()
    assert first["bytes_shared"] == 0 and first["incremental"] == {"how": "none", "reason": "there is no earlier checkpoint of the run"}
    run.change("lora.a")
    second = run.save()
    assert second["incremental"] == {"how": "link", "parent": run.at(1)} and second["plan_reused"]
    a, b = run.files(1), run.files(2)
    same = {n for n in a if a[n].stat().st_ino == b[n].stat().st_ino}
    assert second["bytes_shared"] == sum(a[n].stat().st_size for n in same) > 14 * MIB
    assert second["bytes"] - second["bytes_shared"] < 3 * MIB
    record = run.d.api.get(run.d.api.storage_path(run.storage, run.at(2)["name"])).ok(200)
    assert record["bytes_shared"] == second["bytes_shared"]
    assert [(p["role"], p["name"]) for p in record["parents"]] == [("previous", run.at(1)["name"])]
    third = run.save()
    assert third["incremental"]["parent"] == run.at(2) and third["bytes"] - third["bytes_shared"] < MIB / 8  # values alone


def test_a_clone_costs_no_blocks(cloned):
    full = cloned.save()
    assert full["bytes_shared"] == 0 and list(cloned.files(1)) == ["__0_0.distcp"]
    cloned.change("lora.a", MIB)
    r = cloned.save()
    assert r["incremental"] == {"how": "reflink", "parent": cloned.at(1)}
    assert sum(len(MODEL[n]) for n in ("frozen.a", "frozen.b", "bias")) == r["bytes_shared"]


def test_a_difference_at_the_end_of_a_large_tensor_is_found(run):
    """Blocks that were taken for equal are written after all."""
    run.save()
    run.change("frozen.b", 9 * MIB - 1, b"\0")
    run.change("frozen.a", 5 * MIB + 122, b"\0")
    r = run.save()
    assert r["incremental"]["how"] == "link" and r["bytes_shared"] < 4 * MIB


def test_clones_differ_where_tensors_do(cloned):
    cloned.save()
    cloned.change("frozen.b", 9 * MIB - 1, b"\0")
    r = cloned.save()
    assert r["bytes_shared"] == sum(map(len, MODEL.values())) - MIB - len(MODEL["norm"])  # its blocks have 4 MiB


def test_another_structure_is_saved_in_full(run):
    run.save()
    run.tensors = {"a.new": some(3 * MIB, 9), **run.tensors}
    assert run.save()["bytes_shared"] == 0
    del run.tensors["bias"]
    run.save()
    assert run.save()["bytes_shared"] > 14 * MIB


def test_clones_find_tensors_wherever_they_lie(cloned):
    cloned.save()
    cloned.tensors = {"a.new": some(3 * MIB, 9), **cloned.tensors}
    assert cloned.save()["bytes_shared"] > 16 * MIB


def test_steps_stand_alone(run):
    steps = {}
    for i in range(3):
        run.change("lora.a", 100 * i)
        run.save()
        steps[i + 1] = dict(run.tensors)
    copied = run.root / run.name / "copied"
    shutil.copytree(run.folder(2), copied)
    run.d.api.run("delete", target=run.at(1))
    run.check(3)
    run.d.api.run("delete", target=run.at(3))
    run.check(2, steps[2])
    run.change("frozen.a")
    run.step = 1
    run.d.put(run.sd, run.images(), generation=9, create=False)
    run.d.api.run("save", source={"state_dict": run.sd, "generation": 9}, target=run.at(2),
                  options={"overwrite": True, "incremental": True})
    run.check(2)
    run.d.api.run("verify", source={"storage": run.storage, "name": f"{run.name}/copied"}, level="digest")


@pytest.mark.long
@pytest.mark.parametrize("how", ["touched", "written", "cut", "gone", "manifest", "copied"])
def test_a_parent_that_was_changed_by_hand_gives_nothing(run, how):
    run.save()
    large = max(run.files(1).values(), key=lambda p: p.stat().st_size)
    if how == "touched":
        os.utime(large)
    elif how == "written":
        with open(large, "r+b") as f:
            f.seek(5 * MIB)
            f.write(b"changed by hand")
    elif how == "cut":
        os.truncate(large, 5 * MIB)
    elif how == "gone":
        large.unlink()
    elif how == "manifest":
        (run.folder(1) / ".dcpd.json").write_bytes(b"{}")
    else:
        shutil.move(run.folder(1), run.root / "aside")
        shutil.copytree(run.root / "aside", run.folder(1), copy_function=shutil.copy)
        shutil.rmtree(run.root / "aside")
    r = run.save()
    if how in ("manifest", "copied"):
        assert r["bytes_shared"] == 0 and r["incremental"]["how"] == "none" and r["incremental"]["reason"]
    else:
        assert 0 < r["bytes_shared"] < 9 * MIB


def test_a_parent_that_a_verify_found_damaged_gives_nothing(run):
    """Nor does the step before it, whose bytes it shares."""
    run.save()
    run.save()
    large = max(run.files(2).values(), key=lambda p: p.stat().st_size)
    times = large.stat().st_atime_ns, large.stat().st_mtime_ns
    os.chmod(large, 0o600)
    with open(large, "r+b") as f:
        f.seek(5 * MIB)
        f.write(b"bits that have rotten")
    os.utime(large, ns=times)
    run.d.api.fails("verify", "checkpoint_damaged", source=run.at(2), level="digest")
    r = run.save()
    assert r["bytes_shared"] == 0 and "damaged" in r["incremental"]["reason"]
    assert run.save()["incremental"]["parent"] == run.at(3)


def test_links_do_not_cross_file_systems(run):
    """The parent lies on another one, mounted in the run's folder: what is equal is written anew."""
    run.save()
    aside = run.root / f"aside-{run.name}"
    shutil.move(run.folder(1), aside)
    run.folder(1).mkdir()
    r = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "dcpd-test", str(run.folder(1))], capture_output=True, text=True)
    if r.returncode:
        pytest.skip(f"cannot mount here: {r.stderr.strip()}")
    try:
        shutil.copytree(aside, run.folder(1), dirs_exist_ok=True)  # with its times
        shutil.rmtree(aside)
        assert run.save()["bytes_shared"] == 0
        assert all(p.stat().st_nlink == 1 for step in (1, 2) for p in run.files(step).values())
        run.check(1, MODEL)
    finally:
        subprocess.run(["umount", "-l", str(run.folder(1))], check=True)
    assert run.save()["bytes_shared"] > 14 * MIB


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_nothing_is_read_of_another_users_checkpoint(run):
    """A manifest of any size may lie there: whose it is, is asked first."""
    other = run.folder(0)
    other.mkdir(parents=True)
    (other / ".metadata").write_bytes(b"x")
    with open(other / ".dcpd.json", "wb") as f:
        f.truncate(1 << 30)
    for p in (other / ".metadata", other / ".dcpd.json", other):
        os.chown(p, 12345, 12345)
    assert run.save()["incremental"] == {"how": "none", "reason": "the parent is another user's"}
    assert run.save()["bytes_shared"] > 14 * MIB


def test_who_writes_over_a_linked_file_is_kept_out(run):
    run.save()
    run.save()
    shared = [p for p in run.files(2).values() if p.stat().st_nlink > 1]
    assert shared and all(p.stat().st_mode & 0o222 == 0 for p in shared)
    own = [p for p in run.files(2).values() if p.stat().st_nlink == 1]
    assert own and all(p.stat().st_mode & 0o200 for p in own)


def test_links_only_if_asked_for(run):
    run.options = {}
    run.save()
    r = run.save()
    assert r["bytes_shared"] == 0 and "incremental" not in r and list(run.files(2)) == ["__0_0.distcp"]
    run.options = {"incremental": False}
    assert "incremental" not in run.save()


def test_clones_unless_they_are_not_wanted(cloned):
    cloned.options = {}
    cloned.save()
    r = cloned.save()
    assert r["bytes_shared"] > 16 * MIB and r["incremental"]["how"] == "reflink"
    cloned.options = {"incremental": False}
    assert cloned.save()["bytes_shared"] == 0


def test_the_parent_that_is_named(run):
    run.save()
    run.change("frozen.b")
    run.save()
    run.tensors["frozen.b"] = MODEL["frozen.b"]
    r = run.save(parent=run.at(1))
    assert r["incremental"]["parent"] == run.at(1) and r["bytes_shared"] > 14 * MIB
    run.put()
    submit = {"source": {"state_dict": run.sd}, "target": run.at(9)}
    fails = run.d.api.fails
    fails("save", "not_found", **submit, options={"incremental": True, "parent": run.at(77)})
    fails("save", "validation_failed", **submit, options={"incremental": True, "parent": {"storage": "other", "name": "x"}})
    fails("save", "validation_failed", **submit, options={"incremental": False, "parent": run.at(1)})
    r = run.d.api.run("save", **submit, options={"incremental": True, "parent": {"storage": run.storage, "name": f"{run.name}@latest"}})
    assert r["result"]["incremental"]["parent"] == run.at(3)


def test_several_ranks_and_workers(d):
    r = Run(d, "main", {f"w{i}": some(3 * MIB + i, i) for i in range(12)}, world=4)
    try:
        r.save()
        r.change("w5", 3 * MIB)
        got = r.save()
        assert got["bytes_shared"] > 32 * MIB and got["world_size"] == 4
    finally:
        r.close()


def test_a_full_disk_harms_nobody(mounted, spawn):
    """The second step does not fit: it fails, the first is whole, and a third that shares fits."""
    at = mounted("size=24m")
    d = spawn({"small": at / "s"})
    r = Run(d, "small", {"a": some(9 * MIB, 1), "b": some(7 * MIB, 2)})
    r.save()
    for name in r.tensors:
        r.change(name)
    r.put()
    d.api.fails("save", "storage_full", source={"state_dict": r.sd, "generation": 2}, target=r.at(2), options=r.options)
    r.check(1, {"a": some(9 * MIB, 1), "b": some(7 * MIB, 2)})
    r.tensors["a"] = some(9 * MIB, 1)
    r.change("b", MIB)
    r.tensors["b"] = some(7 * MIB, 2)
    assert r.save()["bytes_shared"] > 15 * MIB
    assert not d.staging()


def test_other_jobs_read_shared_files(run):
    run.save()
    run.change("lora.a")
    run.save()
    new = {"storage": run.storage, "name": f"{run.name}/resharded"}
    run.d.api.run("reshard", source=run.at(2), target={**new, "world_size": 3})
    r = run.d.api.run("diff", a=run.at(2), b=new)["result"]
    assert r["equal"]
    r = run.d.api.run("diff", a=run.at(1), b=run.at(2))["result"]
    assert {x["path"] for x in r["differences"]} == {"lora.a", "step"}, r
    name = lib.fresh()
    run.d.api.run("load", source=run.at(2), target={"state_dict": name})
    try:
        assert {k: bytes(v[2]) for k, v in run.d.images(name)[0].entries.items()} == run.tensors
    finally:
        run.d.drop(name)


def test_a_repair_of_one_leaves_the_other(run):
    """The damaged file is replaced, not written to."""
    run.save()
    run.save()
    shared = max(run.files(2).values(), key=lambda p: p.stat().st_size)
    st = shared.stat()
    with open(shared, "r+b") as f:  # both are damaged
        f.seek(MIB)
        f.write(b"damage")
    os.utime(shared, ns=(st.st_atime_ns, st.st_mtime_ns))
    run.d.api.run("reshard", source=run.at(2), target={"storage": run.storage, "name": f"{run.name}/good"}, options={"verify": "none"})
    good = Run(run.d, run.storage, MODEL)
    try:
        good.save()
        damaged = hashlib.sha256(run.files(1)[shared.name].read_bytes()).digest()
        r = run.d.api.run("repair", target=run.at(2), **{"from": good.at(1)})["result"]
        assert r["whole"] and r["restored_count"]
    finally:
        good.close()
    run.check(2)
    assert run.files(1)[shared.name].stat().st_nlink == 1
    assert hashlib.sha256(run.files(1)[shared.name].read_bytes()).digest() == damaged


def inodes(run, step):
    return {n: p.stat() for n, p in run.files(step).items()}


@pytest.mark.parametrize("where", ["main", "tmpfs", "xfs"])
def test_materialise_gives_it_its_own(where, request):
    run = Run(request.getfixturevalue("dx" if where == "xfs" else "d"), where, MODEL)
    try:
        run.save()
        run.change("lora.a")
        run.save()
        before, steps = inodes(run, 2), (MODEL, run.tensors)
        plan = run.d.api.post("/v1/jobs?dry_run=true", {"kind": "materialise", "target": run.at(2)}).ok(200)
        assert plan["bytes"] > 14 * MIB and not plan["changed"] and plan["file_count"] > 0 and "files" not in plan
        assert inodes(run, 2) == before
        r = run.d.api.run("materialise", target=run.at(2))["result"]
        after = inodes(run, 2)
        assert r["changed"] and r["bytes"] == plan["bytes"] and all(st.st_nlink == 1 for st in after.values())
        assert {n for n in after if after[n].st_ino != before[n].st_ino} == {n for n in before if where == "xfs" or before[n].st_nlink > 1}
        assert all(after[n].st_mtime_ns == before[n].st_mtime_ns and after[n].st_mode & 0o200 for n in after)
        record = run.d.api.get(run.d.api.storage_path(where, run.at(2)["name"])).ok(200)
        assert record["bytes_shared"] == 0 and record["parents"][0]["role"] == "previous" and "problem" not in record
        for step in (1, 2):
            run.check(step, steps[step - 1])
        if where != "xfs":
            assert not run.d.api.run("materialise", target=run.at(2))["result"]["changed"]
            assert run.d.ctl("materialise", f"{where}:{run.at(1)['name']}").returncode == 0
        assert run.save()["bytes_shared"] > 14 * MIB  # and again
        run.d.api.run("delete", target=run.at(1))
        run.check(2, steps[1])
    finally:
        run.close()


def test_materialise_takes_no_damage_along(run):
    run.save()
    run.save()
    shared = max(run.files(2).values(), key=lambda p: p.stat().st_size)
    with open(shared, "r+b") as f:
        f.seek(5 * MIB)
        f.write(b"damage")
    p = run.d.api.fails("materialise", "digest_mismatch", target=run.at(2))
    assert p["file"] == shared.name and shared.stat().st_nlink == 2
    run.d.api.fails("materialise", "not_found", target=run.at(77))
    assert not run.d.staging()


def test_materialise_of_what_shares_nothing(d, golden_root):
    shutil.copytree(golden_root / "torch-2.15.0/plain/checkpoint", d.storages["main"] / "plain")
    d.api.fails("materialise", "format_unsupported", target={"storage": "main", "name": "plain"})
    planned = d.api.post("/v1/jobs?dry_run=true", {"kind": "materialise", "target": {"storage": "main", "name": "plain"}})
    planned.problem("format_unsupported", status=422)


@pytest.mark.parametrize("seed, where", [(1, "main"), *(pytest.param(*p, marks=pytest.mark.long) for p in ((2, "tmpfs"), (3, "xfs")))])
def test_any_history(seed, where, request):
    """Whatever is saved, replaced, deleted and materialised in any order: each checkpoint holds what was saved there."""
    r, run = random.Random(seed), Run(request.getfixturevalue("dx" if where == "xfs" else "d"), where, MODEL)
    there = {}
    try:
        for _ in range(30):
            act = r.choice(["save"] * 6 + ["delete", "materialise"])
            if act == "save":
                for name in r.sample(sorted(run.tensors), r.randrange(3)):
                    n = len(run.tensors[name])
                    run.change(name, r.choice([0, n // 2, n - 1]), r.randbytes(1))
                if r.random() < 0.1:
                    run.tensors = dict(r.sample(sorted(run.tensors.items()), len(run.tensors)))  # in another order
                run.put()
                step = r.randrange(1, 9)
                run.d.api.run("save", source={"state_dict": run.sd}, target=run.at(step),
                              options={"incremental": r.random() < 0.8, "overwrite": True})
                there[step] = dict(run.tensors)
            elif there:
                step = r.choice(sorted(there))
                run.d.api.run(act, target=run.at(step))
                if act == "delete":
                    del there[step]
        for step, tensors in there.items():
            run.check(step, tensors)
    finally:
        run.close()
