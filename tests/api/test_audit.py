"""Who changed what is told, and only to those who may all."""
import hashlib
import shutil
import subprocess

import pytest
from crafted import FIXTURES

import dcpd as lib

OPS, READER = "c" * 40, "a" * 40


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    home = tmp_path_factory.mktemp("audit")
    (home / "state").mkdir()
    (home / "state/tokens").write_text("".join(f"{n} {s} {hashlib.sha256(t.encode()).hexdigest()}\n"
                                               for n, s, t in (("ops", "admin", OPS), ("reader", "read", READER))))
    d = lib.Daemon(home)
    for name in ("run1/step-1", "run1/step-2", "run1/step-3"):
        shutil.copytree(FIXTURES / "torch-2.15.0/plain/checkpoint", d.storages["main"] / name)
    yield d
    d.discard()


def rows(d):
    return [(r["action"], r["subject"], r.get("token"), r.get("policy")) for r in reversed(d.api.get("/v1/audit").ok(200)["audit"])]


def test_each_change_is_there_when_it_is_answered(audited):
    d, path = audited, "/v1/checkpoints/main/run1%2Fstep-"
    ops = lib.Client(tcp=d.tcp_client().tcp, headers={"Authorization": f"Bearer {OPS}"})
    before, want = len(rows(d)), []

    def change(client, method, where, body, *row, status=(200, 201, 202, 204)):
        got = client.request(method, where, body).ok(*status)
        want.append((*row, "ops" if client is ops else None, None))
        assert rows(d)[before:] == want
        return got

    change(d.api, "PUT", "/v1/runs/main/run1/aliases/best", {"name": "run1/step-2"}, "alias.move", "main:run1@best")
    assert d.api.get("/v1/audit?page_size=1").json["audit"][0]["request"] == {"name": "run1/step-2"}
    change(ops, "DELETE", "/v1/runs/main/run1/aliases/best", None, "alias.remove", "main:run1@best")
    change(ops, "PUT", path + "3/hold", {"reason": "mine"}, "hold.set", "main:run1/step-3")
    change(d.api, "DELETE", path + "3/hold", None, "hold.lift", "main:run1/step-3")
    change(ops, "PUT", "/v1/chains/c", {"storage": "main", "match": "no*", "steps": [{"verify": {"level": "structure"}}]}, "chain.set", "c")
    change(ops, "DELETE", "/v1/chains/c", None, "chain.remove", "c")
    job = change(ops, "DELETE", path + "3", None, "checkpoint.delete", "main:run1/step-3")
    assert d.api.get("/v1/audit?page_size=1").json["audit"][0]["job"] == job["id"]
    d.api.wait(job["id"])
    d.api.request("PUT", "/v1/policies/night", {"storage": "main", "match": "run1", "keep": {"last": 1}}).ok(200)  # it runs at once
    lib.wait_for(lambda: any(r[3] for r in rows(d)), 10, "the policy's removal")
    want += [("policy.set", "night", None, None), ("checkpoint.delete", "main:run1/step-1", None, "night")]
    change(d.api, "DELETE", "/v1/policies/night", None, "policy.remove", "night")
    body = {"kind": "delete", "target": {"storage": "main", "name": "run1/step-2"}}
    d.api.request("POST", "/v1/jobs?dry_run=true", body)
    d.api.request("DELETE", "/v1/policies/none").problem("not_found")
    change(ops, "POST", "/v1/jobs", body, "checkpoint.delete", "main:run1/step-2")
    d.stop()
    d.start()
    assert rows(d)[before:] == want, "a restart keeps them"


def test_pages_and_commands(audited):
    for name in ("a", "b", "c"):
        chain = {"storage": "main", "match": "no*", "steps": [{"verify": {"level": "structure"}}]}
        audited.api.request("PUT", f"/v1/chains/{name}", chain).ok(200, 201)
    all_ = audited.api.get("/v1/audit").json["audit"]
    paged, token = [], ""
    while token is not None:
        page = audited.api.get(f"/v1/audit?page_size=2&page_token={token}").json
        paged += page["audit"]
        token = page.get("next_page_token")
    assert paged == all_ and len(all_) >= 3
    assert [int(r["id"]) for r in all_] == sorted((int(r["id"]) for r in all_), reverse=True)
    command = [lib.BIN / "dcpctl", "--url", f"unix://{audited.socket}", "audit", "--limit", "2"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("chain.set") == 2 and said.split("\n")[1].split()[-1] in ("c", "-"), said


def test_only_administrators_see_it(audited):
    weak = lib.Client(tcp=audited.tcp_client().tcp, headers={"Authorization": f"Bearer {READER}"})
    weak.get("/v1/audit").problem("forbidden", status=403)
    audited.api.get("/v1/audit?page_token=x").problem("invalid_request", status=400)
