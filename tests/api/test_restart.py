"""The daemon's own life: kill -9 of it and of workers, SIGTERM, SIGHUP, a taken port, a newer journal, configuration."""
import fcntl
import re
import signal
import sqlite3
import subprocess
import threading
import time

import pytest

import dcpd as lib
from test_jobs import big

F4 = ("F32", [4], bytes(range(16)))


def save(sd, name, **more):
    return {"source": {"state_dict": sd}, "target": {"storage": "main", "name": name}, **more}


def test_kill_of_the_daemon_keeps_what_was_sealed(spawn):
    d = spawn()
    seg = d.put("train", [lib.image({"a": F4})], generation=4)[0]
    done = d.api.run("save", **save("train", "one"))
    workers = d.kill()
    lib.wait_for(lambda: not any(lib.running(p) for p in workers), 10, "workers end with their socket")
    assert lib.segment_file(seg).exists(), "a sealed generation outlives the daemon"
    d.start()
    again = d.api.get(f"/v1/jobs/{done['id']}").ok(200)
    assert again == {**done, **{k: again[k] for k in again if k not in done}}
    d.api.run("save", **save("train", "two"))
    assert d.api.run("diff", a={"storage": "main", "name": "one"}, b={"storage": "main", "name": "two"})["result"]["equal"]
    d.drop("train")
    assert not lib.segment_file(seg).exists()


def test_a_lock_that_is_let_go_in_a_moment_is_waited_for(spawn):
    """A worker that a killed daemon was about to start holds the lock until its exec; another daemon holds it for good."""
    d = spawn()
    second = subprocess.run(d.command(), env=lib.clean_environment(**d.env), capture_output=True, text=True,
                            timeout=20 * lib.PATIENCE)
    assert second.returncode == 1 and f"another daemon uses {d.state}" in second.stderr, second
    d.kill()
    with open(d.state / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        d.start()
        timer.join()


def test_kill_of_the_daemon_carries_jobs_on(spawn):
    d = spawn()
    sd = big(d, 128)
    jobs = [d.api.submit("save", **save(sd, f"j{i}")) for i in range(4)]
    time.sleep(0.1)
    d.kill()
    d.start()
    for i, j in enumerate(jobs):
        end = d.api.wait(j, 60)
        assert end["state"] == "succeeded", end
        d.api.run("verify", source={"storage": "main", "name": f"j{i}"}, level="digest")
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")


def test_kill_of_a_worker_is_the_end_of_its_job_only(spawn):
    d = spawn()
    sd = big(d, 256)
    j = d.api.submit("save", **save(sd, "x"), options={"retries": 0})
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{j['id']}").ok(200)["state"] == "running", 20, "running", every=0.002)
    assert d.kill_workers() > 0
    end = d.api.wait(j)
    assert end["state"] == "failed", end
    lib.check_problem(end["error"], "worker_lost")
    assert end["error"]["retryable"] is True and not (d.storages["main"] / "x").exists()
    d.api.run("save", **save(sd, "y"))
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")


def test_idle_workers_killed(spawn):
    d = spawn()
    d.put("t", [lib.image({"a": F4})])
    d.api.run("save", **save("t", "a"))
    assert d.kill_workers() > 0, "a gang stays warm"
    a = d.api.post("/v1/jobs", {"kind": "save", **save("t", "b")})
    if a.status != 202:  # it was being asked when it died
        assert a.problem("worker_lost", status=503)["retryable"] is True
        a = d.api.post("/v1/jobs", {"kind": "save", **save("t", "b")})
    assert d.api.wait(a.ok(202))["state"] == "succeeded"


def test_segments_nobody_names_are_swept_at_start(spawn):
    d = spawn()
    kept = lib.segment_file(d.put("train", [lib.image({"a": F4})])[0])
    d.stop()
    owner = len("dcpd-") + 24  # state directory and journal, 12 digits each
    left = kept.with_name(kept.name[:-8] + "01234567")
    others = [kept.with_name("dcpd-" + "f" * 24 + kept.name[owner:]), lib.SHM / "dcpd-leftover0123456789", lib.SHM / "notdcpd-0123456789"]
    try:
        for f in [left, *others]:
            f.write_bytes(bytes(4096))
            f.chmod(0o600)
        d.start()
        assert not left.exists(), "of this journal, and in none of its rows"
        assert kept.exists() and all(f.exists() for f in others), "what others made is theirs"
        assert d.listed_segments() == {kept.name}
    finally:
        for f in [left, *others]:
            f.unlink(missing_ok=True)


def test_sigterm_drains(spawn):
    d = spawn()
    sd = big(d, 128)
    j = d.api.submit("save", **save(sd, "x"))
    d.proc.send_signal(signal.SIGTERM)
    try:
        while True:  # while it drains it takes no new jobs, and says so
            a = d.api.post("/v1/jobs", {"kind": "verify", "source": {"storage": "main", "name": "x"}})
            if a.status == 503:
                a.problem("draining", status=503)
                break
    except OSError:
        pass  # it was quicker
    assert d.proc.wait(40) == 0  # a second signal would make it leave at once
    assert not d.staging()
    d.start()
    assert d.api.wait(j)["state"] == "succeeded"
    d.api.run("verify", source={"storage": "main", "name": "x"}, level="digest")


def test_sighup_reads_the_token_again(spawn):
    d = spawn()
    old = d.tcp_client()
    old.get("/v1/jobs").ok(200)
    (d.state / "token").write_text("another-token-of-some-length-0123456789\n")
    d.proc.send_signal(signal.SIGHUP)
    lib.wait_for(lambda: old.get("/v1/jobs").status == 401, 10, "the old token is refused")
    d.tcp_client().get("/v1/jobs").ok(200)


def run(*args, env=None, seconds=120):
    return subprocess.run([str(lib.BIN / "dcpd"), *map(str, args)], capture_output=True, text=True, timeout=seconds,
                          env=lib.clean_environment(**(env or {})), stdin=subprocess.DEVNULL)


def test_taken_port_is_fatal(spawn, tmp_path):
    d = spawn()
    port = d.tcp_client().tcp[1]
    r = run("--state-dir", tmp_path / "s", "--listen", f"127.0.0.1:{port}")
    assert r.returncode != 0 and str(port) in r.stderr, r
    r = run("--state-dir", d.state, "--listen", f"unix:{tmp_path}/s2")
    assert r.returncode != 0, "two daemons on one state dir"
    d.api.get("/livez").ok(200)


def test_newer_journal_is_refused(spawn):
    d = spawn()
    d.stop()
    db = next(p for p in d.state.iterdir() if p.read_bytes()[:15] == b"SQLite format 3")
    with sqlite3.connect(db) as c:
        tables = [t for (t,) in c.execute("select name from sqlite_master where type='table'")]
        c.execute("pragma user_version=9999")
        for t in tables:
            columns = [x[1] for x in c.execute(f"pragma table_info('{t}')")]
            if "schema_version" in columns:
                c.execute(f"update {t} set schema_version=9999")
    c.close()
    r = run(*d.command()[1:])
    assert r.returncode != 0 and re.search(r"journal_newer|newer", r.stderr), r


@pytest.mark.parametrize("args", [
    ["--nope"], ["--storage", "x"], ["--storage", "Bad=/tmp"], ["--storage", "shm=/tmp"], ["--workers", "0"], ["--workers", "x"],
    ["--shm-limit", "lots"], ["--listen", "nonsense:x"], ["--keep-jobs", "x"], ["--log-format", "xml"], ["--config", "/nonexistent"],
    ["extra"], ["--listen", "0.0.0.0:0"], ["--tls-cert", "/nonexistent"],
])
def test_wrong_options(tmp_path, args):
    r = run("--state-dir", tmp_path / "s", "--check-config", *args)
    assert r.returncode not in (0, None) and r.returncode > 0, r
    assert r.stderr.strip() and len(r.stderr.strip().splitlines()) <= 2, r


def test_configuration(tmp_path):
    conf = tmp_path / "c.conf"
    conf.write_text(f"# a comment\nstate-dir = {tmp_path}/s\nstorage = a={tmp_path}\nstorage = b={tmp_path}\nworkers = 3\n")
    r = run("--config", conf, "--print-config")
    assert r.returncode == 0 and re.search(r"workers\s*=\s*3", r.stdout) and r.stdout.count("storage =") >= 2, r
    assert re.search(r"workers\s*=\s*5", run("--config", conf, "--workers", "5", "--print-config").stdout)
    assert re.search(r"workers\s*=\s*4", run("--config", conf, "--print-config", env={"DCPD_WORKERS": "4"}).stdout)
    conf.write_text("colour = red\n")
    r = run("--config", conf, "--check-config")
    assert r.returncode != 0 and "colour" in r.stderr and "\n" not in r.stderr.strip(), r
    assert run("--config", conf, "--state-dir", tmp_path).returncode == r.returncode, "the same without --check-config"


def test_every_option_is_documented(tmp_path):
    text = run("--help").stdout
    keys = set(re.findall(r"--([a-z][a-z-]+)", text))
    printed = set(re.findall(r"^#? ?([a-z][a-z-]+) *=", run("--state-dir", tmp_path, "--print-config").stdout, re.M))
    example = (lib.ROOT / "deploy/dcpd.conf").read_text()
    assert len(keys) > 8
    for k in printed:
        assert k in keys, f"--help lacks --{k}"
    shown = set(re.findall(r"^#?([a-z-]+)(?:\.[a-z-]+)* = ", example, re.M)) - {"nfs"}  # tier.STORAGE.behind, STORAGE.file-mode
    assert shown <= keys, f"deploy/dcpd.conf has {shown - keys}, the daemon has not"
    missing = keys - shown - {"config", "check-config", "print-config", "doctor", "manual", "version", "help"}
    assert not missing, f"deploy/dcpd.conf lacks {missing}"
    everything = tmp_path / "all.conf"
    text = re.sub(r"^#([a-z.-]+ = )", r"\1", example, flags=re.M).replace("allow-group = dcpd", "allow-group = root")
    for path, there in {"/usr/share/dcpd/web": lib.ROOT / "web", "/usr/lib/dcpd/dcpd-worker": lib.BIN / "dcpd-worker"}.items():
        text = text.replace(f"= {path}", f"= {there}")
    for path in ("/srv/checkpoints", "/mnt/nfs/checkpoints", "/run/dcpd", "/var/lib/dcpd", "/etc/dcpd"):
        (tmp_path / path[1:]).mkdir(parents=True)
        text = re.sub(rf"(?<=[=:]) ?{path}\b", lambda m: m[0].replace(path, str(tmp_path) + path), text)
    for name in ("cert", "key"):
        (tmp_path / f"etc/dcpd/{name}.pem").write_text("-----BEGIN X-----\n")
    everything.write_text(text)
    r = run("--config", everything, "--check-config")
    assert r.returncode == 0, r.stderr


def test_a_state_dir_of_someone_else(tmp_path):
    (tmp_path / "s").write_text("a file")
    r = run("--state-dir", tmp_path / "s", "--listen", f"unix:{tmp_path}/x")
    assert r.returncode != 0 and r.stderr.strip()


@pytest.mark.long
def test_what_an_idle_gang_was_removing_is_swept(spawn):
    d = spawn(args=["--gang-idle", "1s"])  # a save's old checkpoint is removed for longer, and the save is over by then
    sd = big(d, 256)
    for name in ("one", "one", "one"):
        d.api.run("save", **save(sd, name), options={"overwrite": True})
    lib.wait_for(lambda: not d.staging(), 10, "trash swept")
    lib.wait_for(lambda: not d.leaks(), 10, "nothing left behind")
