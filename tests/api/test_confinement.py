"""Workers are kept inside their storages on hosts of several kinds: by Landlock; by a mount namespace of the worker's own; or by nothing,
which is then told. A seccomp filter that denies Landlock, as containers' profiles do, stands in for a kernel without it."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import users
from users import ALICE, BOB, GROUP

import dcpd as lib

DENY = pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release")) / "tools/deny"
NO_LANDLOCK = "landlock_create_ruleset"
DAEMONS_USER = 54320


def may_unshare(*flags):
    return subprocess.run(["unshare", *flags, "--propagation", "slave", "true"], capture_output=True).returncode == 0


def save_and_look(d):
    """Work in all kinds of workers: a save, a list, a verify with digests, a slice."""
    d.put("s", [lib.image({"w": ("F32", [4, 4], bytes(range(64)))})])
    target = {"storage": "main", "name": "deep/er/a"}
    d.api.run("save", source={"state_dict": "s"}, target=target)
    d.api.run("save", source={"state_dict": "s"}, target=target, options={"overwrite": True})
    assert d.api.run("verify", source=target, level="digest")["result"]["verified_bytes"] >= 64
    assert [c["name"] for c in d.api.get("/v1/checkpoints/main").ok(200)["checkpoints"]] == ["deep/er/a"]
    raw = d.api.get(d.api.storage_path("main", "deep/er/a") + "/tensors/w?format=raw&slice=0:4,:")
    assert raw.status == 200 and raw.body == bytes(range(64))


def settled(d):
    """Workers that have confined themselves."""
    return [w for w in d.api.get("/v1/workers").ok(200)["workers"] if w["state"] != "starting" and w["role"] != "probe"]


def told(d):
    """{"log", "readyz", "status", "workers", "host"}: what each place says."""
    workers = settled(d)
    return {"log": "not confined" in d.tail(100000), "readyz": d.api.get("/readyz").ok(200)["warnings"],
            "status": d.ctl("status").stdout, "host": d.api.get("/v1/capabilities").ok(200)["host"]["sandbox"],
            "workers": {w["sandbox"] for w in workers}}


def sees_only_storages(d, pid):
    """The worker's root directory, as the kernel knows it: nothing but the way to its storages, under their own paths."""
    at, paths = pathlib.Path(f"/proc/{pid}/root"), [pathlib.Path(s) for s in d.storages.values()]
    for path in paths:
        for parent in path.parents:
            there = at / parent.relative_to("/")
            if there.exists() and not {p.name for p in there.iterdir()} <= {other.relative_to(parent).parts[0] for other in paths}:
                return False
    return not (at / "etc").exists()


def shown_path(d, pid):
    """/proc/PID/fd shows an operator the host's path of a storage that the worker has open."""
    return any(t in map(str, d.storages.values()) for t in lib.fd_targets(pid))


def check_confined(d, kind):
    save_and_look(d)
    t = told(d)
    assert t["host"] == kind and t["workers"] == {kind} and not t["log"] and t["readyz"] == [], t
    assert "WARNING" not in t["status"] and f"sandbox: {kind}" in t["status"], t
    pids = [w["pid"] for w in settled(d)]
    assert len(pids) >= 3 and sum(shown_path(d, pid) for pid in pids) >= 2, "a gang and one for questions"
    for pid in pids:
        assert sees_only_storages(d, pid) == (kind == "mount_namespace")
        assert os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt") or kind == "landlock"


def test_as_it_is(spawn):
    d = spawn()
    save_and_look(d)
    t = told(d)
    assert t["workers"] == {t["host"]} and (t["host"] == "none") == bool(t["readyz"]) == t["log"], t


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_SYS_ADMIN")
def test_root_without_landlock_has_a_mount_namespace(spawn):
    if not may_unshare("-m"):
        pytest.skip("no mount namespace is to be had here")
    check_confined(spawn(under=[DENY, NO_LANDLOCK]), "mount_namespace")


def test_without_both_it_is_told_everywhere_and_why(spawn):
    d = spawn(under=[DENY, f"{NO_LANDLOCK},unshare"])
    save_and_look(d)
    t = told(d)
    assert t["host"] == "none" and t["workers"] == {"none"} and t["log"], t
    assert len(t["readyz"]) == 1 and "not confined" in t["readyz"][0] and "namespace: Operation not permitted" in t["readyz"][0], t
    assert "WARNING: workers are not confined" in t["status"] and "sandbox: none" in t["status"], t
    e = lib.clean_environment(DCPD_URL=f"unix://{d.socket}", PYTHONPATH=str(lib.ROOT / "api/python"))
    doctor = subprocess.run([sys.executable, "-m", "dcpd", "doctor"], env=e, capture_output=True, text=True, timeout=60).stdout
    assert any(line.startswith("warn") and "not confined" in line for line in doctor.splitlines()), doctor


@pytest.fixture
def users_daemon():
    """dcpd of a user without privileges, on a host without Landlock; members of a group may use it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else")
    me = str(DAEMONS_USER)
    be = ["setpriv", "--reuid", me, "--regid", me, "--groups", str(GROUP.gr_gid), "--inh-caps=-all", "--"]
    if subprocess.run([*be, "unshare", "-Um", "true"], capture_output=True).returncode != 0:
        pytest.skip("users may make no namespaces here")
    made = []
    with users.reachable_folder() as home:
        def start(args=()):
            d = lib.Daemon(home / "d", ("main",), ["--allow-group", GROUP.gr_name, *args], start=False, under=[*be, DENY, NO_LANDLOCK])
            for p in (home / "d", d.state, d.storages["main"]):
                os.chown(p, DAEMONS_USER, DAEMONS_USER)
                p.chmod(0o755)
            made.append(d)
            return d.start()
        yield start
        for d in made:
            d.discard()


def test_a_user_without_landlock_has_a_mount_namespace(users_daemon):
    d = users_daemon()
    check_confined(d, "mount_namespace")
    for pid in d.workers():
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        assert f"Uid:\t{DAEMONS_USER}" in status and "CapEff:\t0000000000000000" in status


def test_files_for_a_group_rule_out_a_user_namespace(users_daemon):
    """Only the own group exists in it: files would keep the wrong one. That is told."""
    d = users_daemon(["--file-group", GROUP.gr_name, "--file-mode", "0640"])
    save_and_look(d)
    t = told(d)
    assert t["host"] == "none" and t["log"] and t["readyz"], t
    for p in d.storages["main"].rglob("*"):
        assert p.stat().st_gid == GROUP.gr_gid, p


def test_in_a_user_namespace_nobody_owns_what_others_wrote(users_daemon):
    """Files of all other users look like nobody's there: neither nobody nor a member gets them by that; what came by dcpd has its owner."""
    d = users_daemon()
    foreign = d.storages["main"] / "foreign"
    foreign.mkdir()
    os.chown(foreign, BOB, BOB)
    foreign.chmod(0o777)
    (foreign / ".metadata").write_bytes(b"x")

    def as_member(uid, fn):
        return json.loads(eval(users.as_user(uid, [GROUP.gr_gid], lambda: json.dumps(fn()))))

    def remove(name):
        a = d.api.delete(d.api.storage_path("main", name))
        return a.json["code"] if a.status >= 400 else d.api.wait(a.ok(202))["state"]

    def save():
        d.put("s", [lib.image({"w": ("F32", [4], bytes(16))})])
        return d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": "alices"})["state"]

    for uid in (65534, ALICE):
        assert as_member(uid, lambda: remove("foreign")) == "forbidden"
    assert as_member(ALICE, save) == "succeeded"
    assert as_member(BOB, lambda: remove("alices")) == "forbidden"
    assert as_member(ALICE, lambda: remove("alices")) == "succeeded"
