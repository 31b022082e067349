"""/docs: every operation of the contract is there to be read and found, its commands run as they stand, nothing comes from elsewhere."""
import json
import os
import re
import subprocess

import pytest

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect  # noqa: E402

import dcpd as lib  # noqa: E402
from test_page import accessible  # noqa: E402

YAML = (lib.ROOT / "api/openapi.yaml").read_text()
IDS = re.findall(r"^      operationId: (\w+)$", YAML, re.M)


def url(d, path):
    host, port = d.tcp_client().tcp
    return f"http://{host}:{port}{path}"


def run(d, command):
    env = lib.clean_environment(DCPD_SOCKET=str(d.socket), DCPD_TOKEN=(d.state / "token").read_text().strip())
    r = subprocess.run(["sh", "-c", command], env=env, cwd=d.home, capture_output=True, text=True, check=True)
    return json.loads(r.stdout)


@pytest.mark.long
def test_every_operation_is_there_and_its_commands_run(page, d):
    page.goto(url(d, "/docs"))
    expect(page.locator("#state")).to_have_text(f"{len(IDS)} of {len(IDS)} operations")
    assert page.locator("main section[id] h2").count() == len(IDS) > 50
    assert page.evaluate("[...document.querySelectorAll('main section[id]')].map((s) => s.id)") == ["about", *IDS]
    for name in ("listJobs", "getCapabilities", "listStorages", "createJob", "lookForResume"):
        said = run(d, page.locator(f"#{name} pre.command").first.inner_text())
        assert isinstance(said, dict) and "invalid_json" not in str(said.get("code")), (name, said)
    page.locator("input[value=tcp]").check()
    assert "jobs" in run(d, page.locator("#listJobs pre.command").first.inner_text())
    accessible(page)


@pytest.mark.long
def test_what_is_looked_for_is_found(page, d):
    page.goto(url(d, "/docs#getJob"))
    expect(page.locator("#state")).to_contain_text("operations")
    page.fill("#find", "alias_moved")
    expect(page.locator("#moveAlias")).to_be_visible()
    expect(page.locator("#listJobs")).to_be_hidden()
    assert page.locator("#getJob pre.command").first.evaluate("(e) => getComputedStyle(e).fontFamily.includes('mono')")


def test_the_page_needs_no_token_and_has_a_strict_policy(d):
    plain = d.tcp_client(token=False)
    for path, kind in (("/docs", "text/html"), ("/docs/openapi.yaml", "application/yaml"), ("/docs.js", "text/javascript")):
        got = plain.get(path, headers={"Accept-Encoding": "gzip"})
        assert got.status == 200 and got.headers["Content-Type"].startswith(kind) and got.headers["Content-Encoding"] == "gzip"
        assert "'self'" in got.headers["Content-Security-Policy"] and "unsafe" not in got.headers["Content-Security-Policy"]
    plain.get("/openapi.yaml").problem("unauthenticated", status=401)
    assert os.path.getsize(lib.ROOT / "web/docs.js") < 20000
