"""dcpctl: its commands, exit codes (0 done, 1 differs, 2 usage, 3 no daemon, 4 timed out, 5 failed, 6 not found) and --json."""
import json
import signal
import subprocess

import pytest
from crafted import Crafted
from test_jobs import big

import dcpd as lib


@pytest.fixture
def c(d):
    return Crafted(d.storages["main"])


def good(r, code=0):
    assert r.returncode == code, f"exit {r.returncode}\n{r.stdout}\n{r.stderr}"
    return r.stdout


def test_main_path(d, c):
    sd, out = lib.fresh(), f"cli/{lib.fresh()}"
    good(d.ctl("load", f"main:{c.name}", f"shm:{sd}"))
    good(d.ctl("save", f"shm:{sd}", f"main:{out}"))
    good(d.ctl("reshard", f"main:{out}", f"main:{out}-2", "--world-size", "2", "--layout", "*=Shard(1)@2"))
    good(d.ctl("reshard", f"main:{out}", f"main:{out}-st", "--format", "safetensors"))
    good(d.ctl("verify", f"main:{out}-2"))
    good(d.ctl("verify", f"main:{out}-2", "--level", "values"))
    good(d.ctl("diff", f"main:{c.name}", f"main:{out}-2"))
    assert out in good(d.ctl("ls", "main"))
    assert sd in good(d.ctl("ls", "shm:"))
    assert good(d.ctl("show", f"main:{out}"))
    t = good(d.ctl("show", f"main:{out}", "--tensors", "*"))
    fqn = d.api.get(d.api.storage_path("main", out, "/tensors")).ok(200)["tensors"][0]["fqn"]
    assert fqn in t
    assert good(d.ctl("show", f"shm:{sd}"))
    assert good(d.ctl("status"))
    assert "reshard" in good(d.ctl("jobs"))
    good(d.ctl("rm", f"shm:{sd}"))
    good(d.ctl("rm", f"main:{out}-2"))
    assert not (d.storages["main"] / f"{out}-2").exists()


def test_pace(d, c):
    sd, out = lib.fresh(), f"cli/{lib.fresh()}"
    for words in (["load", f"main:{c.name}", f"shm:{sd}"], ["save", f"shm:{sd}", f"main:{out}"],
                  ["reshard", f"main:{out}", f"main:{out}-2", "--world-size", "2"], ["verify", f"main:{out}-2"]):
        j = json.loads(good(d.ctl(*words, "--pace", "background", "--json")))
        assert j["state"] == "succeeded" and d.api.get(f"/v1/jobs/{j['id']}").ok(200)["spec"]["options"]["pace"] == "background"
    d.drop(sd)


def test_json(d, c):
    j = json.loads(good(d.ctl("verify", f"main:{c.name}", "--json")))
    assert j["kind"] == "verify" and j["state"] == "succeeded"
    assert json.loads(good(d.ctl("job", j["id"], "--json")))["id"] == j["id"]
    assert json.loads(good(d.ctl("jobs", "--json")))
    assert json.loads(good(d.ctl("ls", "main", "--json")))
    assert json.loads(good(d.ctl("show", f"main:{c.name}", "--json")))["name"] == c.name
    assert json.loads(good(d.ctl("status", "--json")))
    r = d.ctl("ls", "mian")
    assert r.returncode == 6 and r.stderr.strip().endswith('there is no storage "mian"; dcpd has: ' + ", ".join(sorted(d.storages))), r
    r = d.ctl("verify", "main:no/such", "--json")
    assert json.loads(good(r, 6))


def test_detach_and_dry_run(d, c):
    out = f"cli/{lib.fresh()}"
    job = good(d.ctl("reshard", f"main:{c.name}", f"main:{out}", "--detach")).strip()
    assert d.api.wait(job)["state"] == "succeeded"
    assert good(d.ctl("job", job, "--follow"))
    assert good(d.ctl("reshard", f"main:{c.name}", f"main:{out}-dry", "--dry-run"))
    assert not (d.storages["main"] / f"{out}-dry").exists()


def test_check(d, c):
    out = good(d.ctl("check", f"main:{c.name}", "--world-size", "3", "--layout", "*=Shard(0)@3"))
    assert "can be loaded so" in out
    sd = lib.fresh()
    d.put(sd, [lib.image({"no.such": ("F32", [1], bytes(4)), "nor.this": ("F32", [1], bytes(4))})])
    r = d.ctl("check", f"main:{c.name}", f"shm:{sd}")
    assert r.returncode == 1 and "missing_key" in r.stdout and "no.such" in r.stdout and "nor.this" in r.stdout, r
    j = json.loads(d.ctl("check", f"main:{c.name}", f"shm:{sd}", "--json").stdout)
    assert j["loads"] is False and [p["fqn"] for p in j["problems"]] == ["no.such", "nor.this"]
    assert good(d.ctl("check", f"main:{c.name}", f"shm:{sd}", "--no-strict"))
    r = d.ctl("check", f"main:{c.name}", "--layout", "zzz*=Shard(0)", "--world-size", "2")
    assert r.returncode == 0 and "zzz*" in r.stderr
    assert d.ctl("check", "main:no/such").returncode == 6
    d.drop(sd)


@pytest.mark.parametrize("args", [
    [], ["nonsense"], ["verify"], ["verify", "no-colon"], ["verify", "main:a", "--level", "deep"], ["reshard", "main:a"],
    ["reshard", "main:a", "main:b", "--layout", "nonsense"], ["reshard", "main:a", "main:b", "--world-size", "x"],
    ["diff", "main:a"], ["load", "main:a", "main:b"], ["--nope"], ["ls", "a", "b", "c"], ["verify", "main:../a"], ["cancel"],
    ["reshard", "main:a", "main:b", "--rename", "s/unfinished"], ["show", "main:"], ["verify", "main:a", "--pace", "slow"],
    ["diff", "main:a", "main:b", "--pace", "full"],
], ids=" ".join)
def test_wrong_usage(d, args):
    r = d.ctl(*args)
    assert r.returncode == 2 and r.stderr.strip(), (r.returncode, r.stdout, r.stderr)


def test_no_daemon(d, tmp_path):
    for url in (f"unix://{tmp_path}/nothing", "http://127.0.0.1:1"):
        r = d.ctl("jobs", env={"DCPD_URL": url})
        assert r.returncode == 3 and r.stderr.strip(), r


def test_failed_and_different(d, c):
    r = d.ctl("verify", "main:no/such")
    assert r.returncode == 6 and "not_found" in r.stderr + r.stdout
    c.files()[0].unlink()
    r = d.ctl("reshard", f"main:{c.name}", f"main:cli/{lib.fresh()}")
    assert r.returncode == 5 and ".distcp" in r.stderr + r.stdout, r
    a = Crafted(d.storages["main"], "torch-2.15.0/plain")
    b = Crafted(d.storages["main"], "torch-2.15.0/dtypes")
    assert d.ctl("diff", f"main:{a.name}", f"main:{b.name}").returncode == 1
    assert d.ctl("diff", f"main:{a.name}", f"main:{a.name}").returncode == 0
    existing = f"main:{a.name}"
    r = d.ctl("reshard", f"main:{b.name}", existing)
    assert r.returncode == 5 and "checkpoint_exists" in r.stderr + r.stdout, r
    good(d.ctl("reshard", f"main:{b.name}", existing, "--overwrite"))


def test_token_over_tcp(d):
    port = d.tcp_client().tcp[1]
    url = {"DCPD_URL": f"http://127.0.0.1:{port}"}
    good(d.ctl("jobs", env={**url, "DCPD_TOKEN_FILE": str(d.state / "token")}))
    good(d.ctl("jobs", env={**url, "DCPD_TOKEN": (d.state / "token").read_text().strip()}))
    r = d.ctl("jobs", env={**url, "DCPD_TOKEN": "wrong"})
    assert r.returncode not in (0, 1) and "unauthenticated" in r.stderr + r.stdout


def test_cancel_and_retry(d):
    sd, out = big(d), f"cli/{lib.fresh()}"
    job = good(d.ctl("save", f"shm:{sd}", f"main:{out}", "--detach")).strip()
    r = d.ctl("cancel", job)
    end = d.api.wait(job)
    if end["state"] == "cancelled":
        good(r)
        good(d.ctl("retry", job))
        assert d.api.wait(job)["state"] == "succeeded"
    else:
        assert r.returncode == 5, r


def test_selection(d, c):
    out = f"cli/{lib.fresh()}"
    fqn = d.api.get(d.api.storage_path("main", c.name, "/tensors")).ok(200)["tensors"][0]["fqn"]
    good(d.ctl("reshard", f"main:{c.name}", f"main:{out}", "--include", fqn, "--rename", "s/^/net./", "--dtype", f"{fqn}=bfloat16"))
    t = d.api.get(d.api.storage_path("main", out, "/tensors")).ok(200)["tensors"]
    assert [x["fqn"] for x in t] == [f"net.{fqn}"]


def test_output_to_a_closed_pipe(d):
    p = subprocess.Popen([str(lib.BIN / "dcpctl"), "ls", "golden"], env={"DCPD_URL": f"unix://{d.socket}", "PATH": ""},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    p.stdout.close()
    assert p.wait(20) in (0, 1, -signal.SIGPIPE, 141)
    p.stderr.close()


def test_help_names_every_command(d):
    text = good(d.ctl("--help"))
    for command in "status ls show rm jobs job cancel retry load save reshard verify diff".split():
        assert command in text, command
    assert good(d.ctl("--version")).strip()
