"""Several tokens: what each scope may, that a change of the file counts at once or not at all, and how often one may ask."""
import hashlib
import shutil
import signal
import subprocess
import time

import pytest
from crafted import FIXTURES

import dcpd as lib

TOKENS = {"grafana": ("read", "a" * 40), "trainer": ("submit", "b" * 40), "ops": ("admin", "c" * 40)}
SPEC = {"kind": "verify", "source": {"storage": "main", "name": "x"}, "level": "structure"}


def line(name, scope, token):
    return f"{name} {scope} {hashlib.sha256(token.encode()).hexdigest()}\n"


def write(d, text):
    (d.state / "tokens").write_text(text)


def by(d, token):
    return lib.Client(tcp=d.tcp_client().tcp, headers={"Authorization": f"Bearer {token}"})


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokens")
    (home / "state").mkdir()
    (home / "state/tokens").write_text("# who may what\n\n" + "".join(line(n, *t) for n, t in TOKENS.items()))
    d = lib.Daemon(home)
    yield d
    d.discard()


def test_each_scope_may_what_it_says(several):
    """Whether a request is right is looked at after whether it may be made: 404 and 422 are answers to who may."""
    asked = [
        ("read", "GET", "/v1/jobs", None), ("read", "GET", "/v1/state-dicts", None), ("read", "GET", "/metrics", None),
        ("read", "HEAD", "/openapi.yaml", None), ("read", "POST", "/v1/checkpoints/main/x:locate", {"boxes": []}),
        ("read", "POST", "/v1/policies/night:preview", {}), ("read", "OPTIONS", "/v1/jobs", None),
        ("submit", "POST", "/v1/jobs", SPEC), ("submit", "POST", "/v1/jobs/nope:cancel", {}),
        ("submit", "DELETE", "/v1/state-dicts/x", None), ("submit", "POST", "/v1/state-dicts", {"name": "t", "world_size": 1}),
        ("submit", "POST", "/v1/state-dicts/t/ranks/0:renew", {}),
        ("submit", "PUT", "/v1/runs/main/r/aliases/best", {"name": "r/x"}), ("submit", "PUT", "/v1/checkpoints/main/x/hold", {}),
        ("admin", "DELETE", "/v1/checkpoints/main/x", None), ("admin", "DELETE", "/v1/checkpoints/main/x/hold", None),
        ("admin", "POST", "/v1/jobs", {"kind": "delete", "target": {"storage": "main", "name": "x"}}),
        ("admin", "PUT", "/v1/policies/p", {}), ("admin", "DELETE", "/v1/policies/p", None), ("admin", "PUT", "/v1/chains/p", {}),
        ("admin", "DELETE", "/v1/chains/p", None), ("admin", "PUT", "/v1/webhooks/p", {}), ("admin", "DELETE", "/v1/webhooks/p", None),
        ("admin", "POST", "/v1/webhooks/p:test", {}),
    ]
    ranks = ["read", "submit", "admin"]
    for name, (scope, token) in TOKENS.items():
        client = by(several, token)
        you = client.get("/v1/capabilities").json
        assert (you["scope"], you["token"]) == (scope, name)
        for needed, method, path, body in asked:
            got = client.request(method, path, body)
            if ranks.index(scope) < ranks.index(needed):
                assert name in got.problem("forbidden", status=403)["detail"], (scope, method, path)
            else:
                assert got.status not in (401, 403), (scope, method, path, got.body)
    own = by(several, (several.state / "token").read_text().strip())
    assert own.get("/v1/capabilities").json["scope"] == "admin"
    you = several.api.get("/v1/capabilities").json
    assert you["scope"] == "admin" and "token" not in you, "no token, but the socket says who it is"
    weak = {"Authorization": "Bearer " + TOKENS["grafana"][1]}
    several.api.post("/v1/jobs", SPEC, headers=weak).problem("forbidden", status=403)


def test_a_delete_is_tried_again_by_who_may_delete(several):
    folder = several.storages["main"] / "run1"
    shutil.copytree(FIXTURES / "torch-2.15.0/plain/checkpoint", folder / "stays")
    if subprocess.run(["chattr", "+i", folder], capture_output=True).returncode != 0:
        pytest.skip("this file system has no immutable folders")
    try:
        job = several.api.request("POST", "/v1/jobs", {"kind": "delete", "target": {"storage": "main", "name": "run1/stays"}}).ok(202)["id"]
        assert several.api.wait(job)["state"] == "failed"
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
    for name in ("grafana", "trainer"):
        by(several, TOKENS[name][1]).post(f"/v1/jobs/{job}:retry").problem("forbidden", status=403)
    by(several, TOKENS["ops"][1]).post(f"/v1/jobs/{job}:retry").ok(202)
    row = several.api.get("/v1/audit?page_size=1").json["audit"][0]
    assert (row["action"], row["token"], row["job"]) == ("checkpoint.delete", "ops", job)


def test_what_is_no_token(several):
    digest = hashlib.sha256(TOKENS["ops"][1].encode()).hexdigest()
    for wrong in (TOKENS["ops"][1][:-1], TOKENS["ops"][1] + "c", digest, "ops", ""):
        by(several, wrong).get("/v1/jobs").problem("unauthenticated", status=401)


def test_a_changed_file_counts_after_a_reload(several):
    new, old = "d" * 40, TOKENS["ops"][1]
    before = (several.state / "tokens").read_text()

    def reload_until(client, status):
        several.proc.send_signal(signal.SIGHUP)
        lib.wait_for(lambda: client.get("/v1/jobs").status == status, 10, "the reload")

    write(several, before + line("new", "read", new))
    assert by(several, new).get("/v1/jobs").status == 401
    reload_until(by(several, new), 200)
    write(several, before.replace("ops admin", "# ops admin"))
    reload_until(by(several, old), 401)
    write(several, before)
    reload_until(by(several, old), 200)
    for bad in ("x read\n", "x write " + "0" * 64, "x read " + "0" * 63, "x read " + "g" * 64, "x read " + "0" * 64 + " more",
                "token read " + "0" * 64, "../x read " + "0" * 64, line("a", "read", "e" * 40) + line("a", "read", "f" * 40),
                line("a", "read", "e" * 40) + line("b", "admin", "e" * 40), "x" * 65 + " read " + "0" * 64):
        write(several, before.replace("ops admin", "# ops admin") + bad)
        refused = several.since_start().count("reload failed")
        several.proc.send_signal(signal.SIGHUP)
        lib.wait_for(lambda: several.since_start().count("reload failed") > refused, 10, "the refusal")
        assert by(several, old).get("/v1/jobs").status == 200, f"what was in use stays: {bad}"
    write(several, before)


def test_a_file_with_a_mistake_is_no_start(spawn):
    d = spawn(start=False)
    write(d, "ok read " + "0" * 64 + "\nbad line\n")
    r = subprocess.run(d.command(), env=lib.clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert r.returncode != 0 and "tokens:2: the scope is none of" in r.stderr


@pytest.mark.long
def test_each_token_has_its_own_rate(spawn):
    d = spawn(args=["--token-rate", "5"], start=False)
    write(d, "".join(line(n, *t) for n, t in TOKENS.items()))
    d.start()
    one, other = by(d, TOKENS["grafana"][1]), by(d, TOKENS["ops"][1])
    start, got = time.monotonic(), []
    while time.monotonic() - start < 1.5:
        got.append(one.get("/v1/capabilities"))
    passed, refused = [g for g in got if g.status == 200], [g for g in got if g.status != 200]
    taken = time.monotonic() - start
    assert 10 <= len(passed) <= 10 + 5 * taken + 1 and refused
    assert refused[0].problem("too_many_requests", status=429)["retryable"] and refused[0].headers["Retry-After"] == "1"
    assert other.get("/v1/jobs").status == 200 and d.api.get("/v1/jobs").status == 200, "others are not held up"
    time.sleep(1)
    assert one.get("/v1/jobs").status == 200, "it fills up again"
