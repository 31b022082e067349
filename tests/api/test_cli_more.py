"""dcpctl where it speaks with people: what it asks, advises, suggests and shows."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest
from crafted import Crafted
from test_cli import good
from test_jobs import big

import dcpd as lib


def on_terminal(d, *args, answer=None, env=None):
    """dcpctl on a terminal of its own; `answer` is typed when it asks. (exit code, all that it showed)"""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update({**lib.clean_environment(DCPD_URL=f"unix://{d.socket}", TERM="xterm", LC_ALL="C.UTF-8"), **(env or {})})
        os.execv(lib.BIN / "dcpctl", ["dcpctl", *map(str, args)])
    shown, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        if not select.select([fd], [], [], 1)[0]:
            continue
        try:
            got = os.read(fd, 4096)
        except OSError:
            break
        if not got:
            break
        shown += got
        if answer is not None and b"?" in got:
            os.write(fd, answer.encode() + b"\n")
            answer = None
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode(errors="replace")


@pytest.fixture
def c(d):
    return Crafted(d.storages["main"])


def test_rm_asks_on_a_terminal(d):
    names = [Crafted(d.storages["main"]).name for _ in range(3)]
    code, shown = on_terminal(d, "rm", f"main:{names[0]}", answer="n")
    assert code == 130 and names[0] in shown and (d.storages["main"] / names[0]).exists(), shown
    code, shown = on_terminal(d, "rm", f"main:{names[0]}", answer="y")
    assert code == 0 and not (d.storages["main"] / names[0]).exists(), shown
    code, shown = on_terminal(d, "rm", f"main:{names[1]}", "--yes")
    assert code == 0 and "?" not in shown and not (d.storages["main"] / names[1]).exists(), shown
    good(d.ctl("rm", f"main:{names[2]}"))  # a script is not asked
    assert not (d.storages["main"] / names[2]).exists()
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})])
    code, shown = on_terminal(d, "rm", f"shm:{sd}", answer="")
    assert code == 130 and sd in shown
    code, shown = on_terminal(d, "rm", f"shm:{sd}", answer="yes")
    assert code == 0, shown
    code, shown = on_terminal(d, "rm", "main:no/such", answer="y")
    assert code == 6 and "?" not in shown, shown


@pytest.mark.parametrize("args", ["verify main:no/such", "reshard main:no/such main:out/x", "diff main:no/such main:no/such",
                                  "load main:no/such shm:x", "check main:no/such", "show main:no/such", "show shm:no-such",
                                  "cat main:no/such w", "rm main:no/such", "rm shm:no-such", "job 01ARZ3NDEKTSV4RRFFQ69G5FAV",
                                  "cancel 01ARZ3NDEKTSV4RRFFQ69G5FAV", "retry 01ARZ3NDEKTSV4RRFFQ69G5FAV", "save shm:no-such main:x",
                                  "verify nowhere:a", "ls nowhere", "copy shm:no-such shm:other"])
def test_what_is_not_there_is_exit_6(d, args):
    r = d.ctl(*args.split())
    assert r.returncode == 6 and "not_found" in r.stderr, (r.returncode, r.stdout, r.stderr)


def test_the_rate_at_the_end_is_that_of_the_whole_job(d):
    sd = big(d, 96)
    r = d.ctl("save", f"shm:{sd}", f"main:cli/{lib.fresh()}", "--pace", "background", "--json")
    j = json.loads(good(r))
    seconds = [float(re.search(r":(\d+)\.(\d+)Z", j[k])[0][1:-1]) + 60 * int(j[k][14:16]) for k in ("started_at", "finished_at")]
    took = (seconds[1] - seconds[0]) % 3600
    assert j["progress"]["rate"] == pytest.approx(j["progress"]["bytes_done"] / took, rel=0.01)


def test_queued_says_behind_what(d):
    sd = big(d, 64)
    first = good(d.ctl("save", f"shm:{sd}", "main:cli/first", "--pace", "background", "--detach")).strip()
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{first}").ok(200)["state"] == "running", 10)
    gang = [w["pid"] for w in d.api.get("/v1/workers").ok(200)["workers"] if w.get("job") == first]
    for pid in gang:
        os.kill(pid, signal.SIGSTOP)
    second = good(d.ctl("save", f"shm:{sd}", "main:cli/second", "--pace", "background", "--detach")).strip()
    j = d.api.get(f"/v1/jobs/{second}").ok(200)
    assert j["state"] == "queued" and j["waits_for"] == {"job": first, "kind": "save", "target": "main:cli/first", "ahead": 1}, j
    p = subprocess.Popen([lib.BIN / "dcpctl", "save", f"shm:{sd}", "main:cli/third", "--timeout", "2s"], stderr=subprocess.PIPE, text=True,
                         env=lib.clean_environment(DCPD_URL=f"unix://{d.socket}"))
    said = p.communicate(timeout=60)[1]
    assert re.search(rf"queued behind save {first} to main:cli/first \(2 jobs ahead\)", said), said
    shown = good(d.ctl("job", second))
    assert re.search(rf"^behind +save {first} to main:cli/first$", shown, re.M), shown
    third = next(x["id"] for x in d.api.get("/v1/jobs?page_size=5").ok(200)["jobs"] if x["target"]["name"] == "cli/third")
    assert d.api.get(f"/v1/jobs/{third}").ok(200)["waits_for"]["ahead"] == 2
    d.api.post(f"/v1/jobs/{first}:cancel")
    for pid in gang:
        os.kill(pid, signal.SIGCONT)
    d.api.wait(first)
    j = lib.wait_for(lambda: (x := d.api.get(f"/v1/jobs/{third}").ok(200)).get("waits_for", {}).get("job") != first and x, 10)
    assert j.get("waits_for", {"job": second})["job"] == second, "not what was kept of an earlier answer"
    assert "waits_for" not in d.api.get(f"/v1/jobs/{second}").ok(200)
    for j in (third, second):
        d.api.post(f"/v1/jobs/{j}:cancel")
        assert "waits_for" not in d.api.wait(j)


def test_advice_names_the_token(d):
    port = d.tcp_client().tcp[1]
    for token in ({}, {"DCPD_TOKEN": "wrong"}):
        r = d.ctl("jobs", env={"DCPD_URL": f"http://127.0.0.1:{port}", **token})
        assert r.returncode == 5 and "DCPD_TOKEN" in r.stderr and str(d.state) not in r.stderr, r.stderr


def test_steps_are_in_their_natural_order(d):
    run = lib.fresh("run")
    for step in ("step-2", "step-10", "step-1", "step-100", "best", "step-09"):
        Crafted(d.storages["main"], name=f"{run}/{step}")
    listed = good(d.ctl("ls", f"main:{run}/"))
    assert [m.split("/")[1] for m in re.findall(rf"{run}/\S+", listed)] == ["best", "step-1", "step-2", "step-09", "step-10", "step-100"]
    names = [x["name"] for x in json.loads(good(d.ctl("ls", f"main:{run}/", "--json")))]
    assert names[-1] == f"{run}/step-100" and names[2] == f"{run}/step-2"


def test_jobs_show_source_and_target(d, c):
    out, sd = f"cli/{lib.fresh()}", lib.fresh()
    good(d.ctl("reshard", f"main:{c.name}", f"other:{out}"))
    good(d.ctl("diff", f"main:{c.name}", f"other:{out}"))
    good(d.ctl("load", f"main:{c.name}", f"shm:{sd}"))
    good(d.ctl("rm", f"other:{out}"))
    rows = [re.split(r"\s{2,}", x.strip()) for x in good(d.ctl("jobs", "--limit", "4")).splitlines()]
    at = {title: i for i, title in enumerate(rows[0])}
    seen = [(r[at["KIND"]], r[at["SOURCE"]], r[at["TARGET"]]) for r in rows[1:]]
    assert seen == [("delete", "-", f"other:{out}"), ("load", f"main:{c.name}", f"shm:{sd}"),
                    ("diff", f"main:{c.name}", f"other:{out}"), ("reshard", f"main:{c.name}", f"other:{out}")]
    d.drop(sd)


@pytest.mark.parametrize("args, meant", [
    (["shwo", "main:a"], "show"), (["verfiy", "main:a"], "verify"), (["reshrad", "a", "b"], "reshard"),
    (["verify", "main:a", "--levle", "digest"], "--level"), (["ls", "--jsno"], "--json"),
    (["reshard", "main:a", "main:b", "--worldsize", "2"], "--world-size"),
    (["reshard", "main:a", "main:b", "--layouts", "x"], "--layout"),
    (["verify", "main:a", "--level", "digset"], "digest"), (["reshard", "main:a", "main:b", "--format", "safetensor"], "safetensors"),
    (["reshard", "main:a", "main:b", "--dtype", "*=bfloat61"], "bfloat16"),
    (["save", "shm:a", "main:b", "--pace", "backgruond"], "background"),
    (["gather", "shm:a", "--backend", "ncc"], "nccl"), (["reshard", "main:a", "main:b", "--layout", "*=Shrad(0)"], "Shard"),
], ids=lambda x: x if isinstance(x, str) else None)
def test_unknown_words_suggest_the_nearest(d, args, meant):
    r = d.ctl(*args)
    assert r.returncode == 2 and re.search(rf"did you mean \"?{re.escape(meant)}\b", r.stderr), r.stderr


def test_far_words_suggest_nothing(d):
    for args in (["xyzzy"], ["ls", "--xyzzy"], ["verify", "main:a", "--level", "xyzzy"]):
        r = d.ctl(*args)
        assert r.returncode == 2 and "did you mean" not in r.stderr, r.stderr


def test_formats_that_are_only_read_are_not_offered(d, c):
    r = d.ctl("reshard", f"main:{c.name}", f"main:cli/{lib.fresh()}", "--format", "dcp-rank-local")
    assert r.returncode == 5 and "format_unsupported" in r.stderr and "dcp, safetensors" in r.stderr, r.stderr
    assert "dcp-rank-local" not in good(d.ctl("reshard", "--help"))


def test_refused_or_failed(d):
    """What the daemon refuses is wrong usage; what a job finds out is a job that failed."""
    source, out = Crafted(d.storages["main"], "torch-2.15.0/plain"), lib.fresh()
    refused = d.ctl("reshard", f"main:{source.name}", f"main:{out}", "--world-size", "3", "--layout", "*=Shard(0)@2")
    boxes = '{"match":"*","boxes":[{"rank":0,"offsets":[0],"sizes":[1]}]}'
    failed = d.ctl("reshard", f"main:{source.name}", f"main:{out}", "--layout", boxes)
    assert "layout" in failed.stderr and (refused.returncode, failed.returncode) == (2, 5), (refused, failed)


def test_a_rank_is_named_once(d):
    sd = lib.fresh()
    d.create(sd, world=3)
    r = d.ctl("save", f"shm:{sd}", "main:named-once")
    assert r.returncode == 5 and r.stderr.rstrip().endswith("by ranks 0, 1, 2"), r
    d.drop(sd)
