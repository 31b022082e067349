"""Ranks on two hosts: namespaces of this machine with a name, a /dev/shm and a daemon of their own, over one directory.

Two ranks on each; what they write is judged by PyTorch's own reader, by verify, and by loads on both hosts and on one.
"""
import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess

import pytest

import dcpd
import harness

pytest.importorskip("torch", reason="DCPD_TEST_VENV has no torch")

import lib_ranks  # noqa: E402
import on_hosts  # noqa: E402

SCRIPT = f"{harness.PRIVATE_MOUNTS} && hostname {{0}} && mount -t tmpfs -o size=512m tmpfs /dev/shm && echo ready && exec sleep 3600"


class Host:
    """Namespaces that a sleeping process holds."""

    def __init__(self, name):
        self.name = name
        self.holder = subprocess.Popen(["unshare", "--mount", "--uts", "--propagation", "unchanged", "sh", "-c", SCRIPT.format(name)],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline().strip() != "ready":
            self.holder.wait(5)
            pytest.skip(f"namespaces are not permitted here: {self.holder.stderr.read().strip()}")
        self.enter = ["nsenter", f"--target={self.holder.pid}", "--mount", "--root", "--wd", "--uts", "--"]  # as lib_ranks.enter() does

    def segments(self):
        return sorted(os.listdir(f"/proc/{self.holder.pid}/root/dev/shm"))

    def close(self):
        self.holder.kill()
        self.holder.wait()


class HostDaemon(harness.Daemon):
    def __init__(self, host, home, storages):
        self.host = host
        super().__init__(home, storages, tcp=False)

    def command(self):
        return self.host.enter + super().command()

    def ref(self, name):
        return f"main:{name}"


class Hosts:
    def __init__(self, home, forks):
        self.home, self.all = home, []
        try:
            self.all += [Host("alpha"), Host("beta")]
            self.dir = home / "shared"
            self.daemons = [HostDaemon(h, home / h.name, {"main": self.dir, "own": home / h.name / "own"}) for h in self.all]
            env = {"GLOO_SOCKET_IFNAME": "lo", "DCPD_HOSTS_TIMEOUT": "4"}
            self.ranks = lib_ranks.Ranks(4, env, forks, [({"DCPD_URL": f"unix://{d.socket}", "TEST_ENTER": h.holder.pid}, 2)
                                                         for h, d in zip(self.all, self.daemons)])
            self.outside = harness.Daemon(home / "outside", {"main": self.dir}, tcp=False)
            self.client = dcpd.connect(f"unix://{self.outside.socket}")
        except BaseException:
            self.close()
            raise

    def close(self):
        if hasattr(self, "ranks"):
            self.ranks.close()
        for d in getattr(self, "daemons", []) + [getattr(self, "outside", None)]:
            if d is not None:
                d.discard()
        for h in self.all:
            h.close()

    def left(self):
        return sorted(str(p.relative_to(self.dir)) for p in self.dir.rglob(".dcpd-*") if p.name != ".dcpd-notes.json")


@pytest.fixture(scope="module")
def two(tmp_path_factory, forks):
    if not (shutil.which("unshare") and shutil.which("nsenter")) or os.geteuid() != 0:
        pytest.skip("hosts are namespaces: that needs root, unshare and nsenter")
    h = Hosts(tmp_path_factory.mktemp("hosts"), forks)
    yield h
    h.close()


@pytest.fixture
def hosts(two):
    for d in two.daemons:
        if not d.alive():
            d.start()
    yield two
    import on_ranks

    if not any(p.poll() is not None for p in two.ranks.parents):
        two.ranks(on_ranks.let_go)
    harness.wait_for(lambda: two.left() == [], 10, "nothing is left")


def test_hosts_are_hosts(hosts):
    got = hosts.ranks(on_hosts.where)
    assert [g[:5] for g in got] == [("alpha", "HostGroup", 0, 2, True), ("alpha", "HostGroup", 1, 2, False),
                                    ("beta", "HostGroup", 0, 2, False), ("beta", "HostGroup", 1, 2, False)]
    assert got[0][5] == got[1][5] != got[2][5] == got[3][5]


def test_save_and_load(hosts):
    got = hosts.ranks(on_hosts.save, "main:run/a", 3)
    assert [g[:2] for g in got] == [("succeeded", [])] * 4
    hosts.ranks(on_hosts.load, "main:run/a", 3)
    hosts.ranks(on_hosts.stock, str(hosts.dir / "run/a"), 3)
    client = hosts.client
    checked = client.jobs.run("verify", source="main:run/a", level="digest")["result"]
    assert checked.get("unverified_bytes", 0) == 0 and checked["verified_bytes"] > 0, checked
    made = client.checkpoints.get("main:run/a")
    assert made["world_size"] == 4 and made["manifest"]["generation"] == 1
    files = {f["name"] for f in client.checkpoints.files("main:run/a")} - {".dcpd-notes.json"}
    assert files == {".metadata", ".dcpd.json"} | {f"__{r}_0.distcp" for r in range(4)}
    # one copy of what all have, written where it is: of the world's 4 · "c" nothing but one is in the files
    tensors, values = client.checkpoints.tensors("main:run/a")
    assert len(next(t for t in tensors if t["fqn"] == "m.c")["chunks"]) == 1
    assert {v["fqn"] for v in values} >= {"m.step", *(f"m.opt.only{r}" for r in range(4))}
    assert dcpd.load("main:run/a", client=client)["m"]["a"].shape == (8, 6)  # a process of no host at all, whole


def test_new_tensors_on_all_hosts(hosts):
    hosts.ranks(on_hosts.save, "main:run/new", 5)
    for got in hosts.ranks(on_hosts.load_new, "main:run/new"):
        assert got["step"] == 5 and got["opt"]["betas"] == (0.9, 0.99) and got["opt"]["only3"] == 3


def test_many_steps(hosts):
    assert hosts.ranks(on_hosts.steps, "main:run/step", 5) == [["succeeded"] * 5] * 4
    client = hosts.client
    for i in range(5):
        got = dcpd.load(f"main:run/step-{i}", client=client)["m"]
        assert got["step"] == i and got["plain"].eq(i).all()


@pytest.mark.long
def test_fsdp(hosts):
    import torch

    assert hosts.ranks(on_hosts.fsdp, "main:run/fsdp", True) == ["succeeded"] * 4
    got = hosts.ranks(on_hosts.fsdp, "main:run/fsdp", False)
    saved = dcpd.load("main:run/fsdp", client=hosts.client)["model"]
    for weights, lr in got:
        assert lr == 0.1 and all(torch.equal(w, got[0][0][k]) for k, w in weights.items())
        assert all(torch.equal(saved[k] if k in saved else saved[k.split(".")[0]][k.split(".")[1]], w) for k, w in weights.items())


def test_replicas_of_hosts_are_compared(hosts):
    for divergent in hosts.ranks(on_hosts.diverge, "main:run/d", "report")[:2]:
        assert [x["fqn"] for x in divergent] == ["t"] and len(divergent[0]["ranks"]) in (3, 4)
    for e in hosts.ranks(on_hosts.diverge, "main:run/d2", "fail", check=False):
        assert isinstance(e, dcpd.DcpdError) and e.code == "divergent", e
    assert not (hosts.dir / "run/d2").exists()


def test_overwrite(hosts):
    hosts.ranks(on_hosts.save, "main:run/o", 1)
    for e in hosts.ranks(on_hosts.save, "main:run/o", 2, check=False):
        assert isinstance(e, dcpd.CheckpointExists)
    hosts.ranks(on_hosts.save, "main:run/o", 2, 8, True)
    hosts.ranks(on_hosts.load, "main:run/o", 2)


def test_a_storage_that_is_not_shared(hosts):
    before = [h.segments() for h in hosts.all]
    for e in hosts.ranks(on_hosts.save, "own:x", check=False):
        assert isinstance(e, dcpd.SeveralHosts), e
        assert "alpha: ranks 0, 1; beta: ranks 2, 3" in str(e) and "beta does not see" in str(e)
    assert [list((d.home / "own").iterdir()) for d in hosts.daemons] == [[], []]
    assert not any(set(h.segments()) - set(b) for h, b in zip(hosts.all, before)), "nothing is copied before it is known"


def test_a_directory_path(hosts):
    """No root of the daemons: an ad-hoc storage at each."""
    path = str(hosts.home / "elsewhere" / "ck")
    hosts.ranks(on_hosts.save, path, 4)
    hosts.ranks(on_hosts.load, path, 4)
    hosts.ranks(on_hosts.stock, path, 4)


def stop(pids, how):
    for p in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(p, how)


def hold(hosts, pids, ref):
    """Begins a save and stops beta amid its part; False: it was too fast, and all is saved."""
    folder = hosts.dir / "run"
    begun = concurrent.futures.ThreadPoolExecutor(1).submit(hosts.ranks, on_hosts.begin, ref)
    harness.wait_for(lambda: list(folder.glob(".dcpd-*/heads-1")), 30, "beta's part has begun", every=0.001)
    stop(pids, signal.SIGSTOP)
    begun.result(40)
    harness.wait_for(lambda: list(folder.glob(".dcpd-*/part-0")) or not hosts.left(), 20, "alpha's part")
    if hosts.left() and not list(folder.glob(".dcpd-*/part-1")):
        return True
    stop(pids, signal.SIGCONT)
    hosts.ranks(on_hosts.end)
    return False


@contextlib.contextmanager
def interrupted(hosts, ref):
    """A save of which alpha has done its part, and beta is stopped amid its own."""
    hosts.ranks(on_hosts.save, f"main:run/{harness.fresh()}", 0)  # the workers are there
    pids = [w["pid"] for w in hosts.daemons[1].api.get("/v1/workers").ok()["workers"] if w["role"] == "gang"]
    try:
        assert any(hold(hosts, pids, ref) for _ in range(3)), "beta was too fast"
        yield
    finally:
        stop(pids, signal.SIGCONT)


def in_a_thread(hosts):
    """What the ranks' saves end with, while this goes on."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    return pool.submit(hosts.ranks, on_hosts.end)


def failed(outcome, *words):
    e, seconds = outcome
    assert isinstance(e, dcpd.DcpdError) and any(w in str(e) for w in words), e
    return seconds


@pytest.mark.long
def test_a_daemon_that_dies(hosts):
    """alpha says within the timeout that beta is silent; beta's own ranks hear it when their daemon is back. The old one stays."""
    alpha, beta = hosts.daemons
    hosts.ranks(on_hosts.save, "main:run/k", 1)
    with interrupted(hosts, "main:run/k"):
        answers = in_a_thread(hosts)
        beta.kill()
        harness.wait_for(lambda: hosts.left() == [], 30, "alpha gives the save up")
    beta.start()
    got = answers.result(60)
    assert max(failed(x, "host beta is silent") for x in got[:2]) < 30
    assert max(failed(x, "alpha") for x in got[2:]) < 40
    hosts.ranks(on_hosts.load, "main:run/k", 1)
    hosts.ranks(on_hosts.save, "main:run/k", 2, 8, True)
    hosts.ranks(on_hosts.load, "main:run/k", 2)


@pytest.mark.long
def test_a_leader_that_dies(hosts):
    """beta gives up; alpha's daemon, back again, finds that it did, and leaves nothing."""
    alpha, beta = hosts.daemons
    with interrupted(hosts, "main:run/l"):
        answers = in_a_thread(hosts)
        alpha.kill()
    harness.wait_for(lambda: list(hosts.dir.rglob("end-1")), 15, "beta gives the save up")
    alpha.start()
    got = answers.result(60)
    assert max(failed(x, "host beta") for x in got[:2]) < 40
    assert max(failed(x, "host alpha is silent") for x in got[2:]) < 30
    assert not (hosts.dir / "run/l").exists()
    hosts.ranks(on_hosts.save, "main:run/l", 2)


@pytest.mark.short("0")
@pytest.mark.parametrize("which", [0, 1])
def test_a_daemon_that_comes_back_in_time(hosts, which):
    """The save goes on as if nothing had been."""
    ref = f"main:run/back{which}"
    with interrupted(hosts, ref):
        hosts.daemons[which].kill()
        hosts.daemons[which].start()
    got = hosts.ranks(on_hosts.end)
    assert [x[0] for x in got] == ["succeeded"] * 4, got
    assert hosts.client.jobs.run("verify", source=ref, level="digest")["result"]["verified_bytes"] > 0


def test_trainers_that_die_behind_the_seal(hosts):
    """The daemons find each other all the same; nothing of one host alone is ever seen."""
    hosts.ranks(on_hosts.seal_and_leave, "main:run/orphan")
    harness.wait_for(lambda: (hosts.dir / "run/orphan").exists(), 30, "the daemons save it")
    hosts.ranks(on_hosts.load, "main:run/orphan", 6)
    assert hosts.client.checkpoints.get("main:run/orphan")["world_size"] == 4
    for d in hosts.daemons:
        harness.wait_for(lambda d=d: all(s["generation"] is None for s in d.api.get("/v1/state-dicts").ok()["state_dicts"]), 20,
                         "no slot is held: what stays is memory that a load may use")


@pytest.mark.parametrize("how", ["", "async"])
def test_the_drop_in(hosts, how):
    path = str(hosts.dir / f"run/dropin{how}")
    for seed in (2, 7):  # the second replaces the first
        hosts.ranks(on_hosts.dropin_save, path, seed, how)
        hosts.ranks(on_hosts.dropin_load, path, seed)
        hosts.ranks(on_hosts.stock, path, seed)
    ref = f"main:run/dropin{how}"
    assert sorted(f["name"] for f in hosts.client.checkpoints.files(ref)) == [".dcpd.json", ".metadata"] + [
        f"__{r}_0.distcp" for r in range(4)]
    assert "not written here" in hosts.client.checkpoints.get(ref)["content_unknown"]
    checked = hosts.client.jobs.run("verify", source=ref, level="digest")["result"]
    record = hosts.client.checkpoints.get(ref)
    assert record["content_digest"] == checked["content_digest"] and "content_unknown" not in record
    assert not checked.get("unverified_bytes") and checked["verified_bytes"] > 0
    done = [d.api.get("/v1/jobs").ok()["jobs"] for d in hosts.daemons]
    kinds = [[j["source"] for j in jobs if j["kind"] == "save" and j["target"].get("name") == f"run/dropin{how}"] for jobs in done]
    assert len(kinds[0]) == 2 and len(kinds[1]) == 4, "two saves by the coordinator's daemon, their parts by that of beta"
    hosts.ranks(on_hosts.load, ref, 7)


def test_a_host_has_its_part_of_the_drop_ins_save_in_its_memory(hosts):
    hosts.ranks(on_hosts.dropin_save, "main:run/remembered", 3, "async")
    for d in hosts.daemons:
        client = dcpd.connect(f"unix://{d.socket}")
        found = client.jobs.run("load", source="main:run/remembered", target={"state_dict": "found"})["result"]
        assert 0 < found["bytes_from_memory"] < found["bytes"], (d.host.name, found)
        client.state_dicts.delete("found")


def test_the_drop_in_with_kept_plans(hosts):
    hosts.ranks(on_hosts.dropin_cached, "main:run/kept", 3)
    for i in range(3):
        assert dcpd.load(f"main:run/kept-{i}", client=hosts.client)["m"]["plain"][0, 0] == (i + 3) * 1000


def test_the_drop_in_over_a_storage_that_is_not_shared(hosts):
    for e in hosts.ranks(on_hosts.dropin_save, "own:x", check=False):
        assert "beta does not see what alpha writes" in str(e), e
    for _ in range(2):  # the first call still has what the one before raised
        hosts.ranks(on_hosts.collect)
    harness.wait_for(lambda: not any(list((d.home / "own").iterdir()) for d in hosts.daemons), 10, "nothing is left")
