"""The dashboard over the real daemon: what happens shows without a reload, and an error says where."""

import os
import re
import signal
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect  # noqa: E402

import dcpd as lib  # noqa: E402
import fake_gpu  # noqa: E402
import streaming  # noqa: E402
from ports import free_port  # noqa: E402
from test_page import accessible, row  # noqa: E402

ROWS, COLUMNS = 1024, 256


def images(worlds=2):
    part = ROWS // worlds
    out = []
    for r in range(worlds):
        entry = {"fqn": "model.w", "global_shape": [ROWS, COLUMNS], "offsets": [r * part, 0]}
        out.append(lib.image({"w": ("F32", [part, COLUMNS], bytes(4 * part * COLUMNS))}, {"tensors": {"w": entry}}))
    return out


@pytest.fixture
def daemon(spawn):
    """A daemon on a port that stays the same when it starts again."""
    port = free_port()
    d = spawn(args=["--listen", f"127.0.0.1:{port}"], tcp=False)
    d.url = f"http://127.0.0.1:{port}/"
    return d


def enter(page, daemon):
    token = (Path(daemon.state) / "token").read_text().strip()
    page.goto(f"{daemon.url}#token={token}")
    expect(page.locator("#connection")).to_have_text("Live")
    assert token not in page.url
    page.click("nav a[href='#/jobs']")


def test_a_save_shows_up_and_ends_live(page, daemon):
    enter(page, daemon)
    daemon.put("train", images())
    job = daemon.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run1/step-1"})
    line = row(page, "jobs", job["id"])
    expect(line).to_contain_text("shm:train → main:run1/step-1")
    expect(line.locator(".state")).to_have_text("succeeded")
    line.get_by_role("link").click()
    expect(page.locator("#job-plan")).to_be_visible()
    expect(page.locator("#job-body")).to_contain_text("Durable")
    accessible(page)
    page.click("nav a[href='#/checkpoints']")
    saved = row(page, "checkpoints", "main:run1/step-1")
    expect(saved).to_contain_text("dcp")
    expect(saved.locator("td").nth(2)).to_have_text("2")
    page.click("nav a[href='#/state-dicts']")
    expect(row(page, "state-dicts", "train")).to_contain_text("generation 1")
    page.click("nav a[href='#/storages']")
    expect(row(page, "storages", "main")).to_contain_text("free of")
    page.click("nav a[href='#/workers']")
    expect(page.locator("#workers tbody")).to_contain_text("gang")  # the list is asked for now and then
    accessible(page)


@pytest.mark.long
def test_a_save_that_awaits_its_seals(page, daemon):
    asked = []
    page.on("request", lambda r: asked.append(r.url))
    enter(page, daemon)
    daemon.create("early", world=2)
    job = streaming.submit(daemon, "early", name="run1/early")
    line = row(page, "jobs", job["id"])
    expect(line).to_contain_text("awaiting seals of ranks 0, 1")
    line.get_by_role("link").click()
    expect(page.locator("#job-body")).to_contain_text("Created")
    streaming.Filling(daemon, "early", 0, images()[0]).seal().ok(200)
    expect(page.locator("#job-body")).to_contain_text("awaiting seal of rank 1")
    assert not [u for u in asked if u.endswith("/plan")]
    streaming.Filling(daemon, "early", 1, images()[1]).seal().ok(200)
    expect(page.locator("#job-plan")).to_contain_text("__0_0.distcp")
    expect(page.locator("#job-body")).to_contain_text("succeeded")
    accessible(page)


@pytest.mark.long
def test_a_damaged_file_shows_where(page, daemon):
    daemon.put("train", images())
    daemon.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "a"})
    daemon.drop("train")  # or it would be loaded from memory
    file = max((daemon.storages["main"] / "a").glob("*.distcp"), key=lambda p: p.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    enter(page, daemon)
    job = daemon.api.submit("load", source={"storage": "main", "name": "a"}, target={"state_dict": "serve", "world_size": 1})
    line = row(page, "jobs", job["id"])
    expect(line.locator(".state")).to_have_text("failed")
    error = daemon.api.wait(job)["error"]
    assert error["fqn"] == "model.w" and error["file"].endswith(file.name), error
    expect(line).to_contain_text(error["code"])
    expect(line).to_contain_text("model.w")
    line.get_by_role("link").click()
    assert {"fqn", "file", "offset"} <= {k for k, v in error.items() if v is not None}, error
    for key in ("code", "rank", "fqn", "file", "offset"):
        if error.get(key) is not None:
            expect(page.locator(f"[data-error={key}]")).to_have_text(str(error[key]))
    accessible(page)


@pytest.mark.long
def test_a_verify_marks_its_checkpoint(page, daemon):
    daemon.put("train", images())
    ref = {"storage": "main", "name": "a"}
    daemon.api.run("save", source={"state_dict": "train"}, target=ref)
    enter(page, daemon)
    page.click("nav a[href='#/checkpoints']")
    line = row(page, "checkpoints", "main:a")
    expect(line.locator("td").nth(5)).to_have_text("–")
    daemon.api.run("verify", source=ref, level="digest")
    expect(line.locator(".state")).to_have_text("verified")
    file = max((daemon.storages["main"] / "a").glob("*.distcp"), key=lambda p: p.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    job = daemon.api.wait(daemon.api.submit("verify", source=ref, level="digest"))
    expect(line.locator(".state")).to_have_text("damaged")
    line.get_by_role("link", name="job").click()
    expect(page.locator("#job-damage tbody tr")).to_have_count(1)
    expect(page.locator("#job-damage tbody tr")).to_contain_text(f"{file.name}{job['error']['rank']}model.w")
    accessible(page)


@pytest.mark.long
def test_statistics_are_read_when_asked_for(page, daemon):
    daemon.put("train", images())
    daemon.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "run1/step-1"})
    enter(page, daemon)
    page.click("nav a[href='#/checkpoints']")
    page.get_by_role("link", name="main:run1/step-1").click()
    page.get_by_role("button", name="model.w", exact=True).click()
    page.get_by_role("button", name="Statistics of model.w", exact=True).click()
    told = lambda: next((j for j in daemon.api.get("/v1/jobs").ok(200)["jobs"] if j["kind"] == "stats"), None)  # noqa: E731
    expect(page.locator("#tensor-stats dd").first).to_have_text(str(ROWS * COLUMNS))
    statistics = daemon.api.get(f"/v1/jobs/{told()['id']}").ok(200)["result"]["statistics"][0]
    assert statistics["zeros"] == ROWS * COLUMNS and statistics["histogram"] == []
    expect(page.locator("#tensor-stats")).to_contain_text("No element is finite and not zero.")
    accessible(page)


@pytest.mark.long
def test_a_restart_is_seen_and_survived(page, daemon):
    enter(page, daemon)
    daemon.put("train", images())
    first = daemon.api.run("save", source={"state_dict": "train"}, target={"storage": "main", "name": "a"})
    expect(row(page, "jobs", first["id"]).locator(".state")).to_have_text("succeeded")
    daemon.kill()
    expect(page.locator("#notices")).to_contain_text("The daemon does not answer")
    daemon.start()
    expect(page.locator("#connection")).to_have_text("Live")
    expect(row(page, "jobs", first["id"]).locator(".state")).to_have_text("succeeded")
    second = daemon.api.submit("save", source={"state_dict": "train"}, target={"storage": "main", "name": "b"})
    expect(row(page, "jobs", second["id"]).locator(".state")).to_have_text("succeeded")


def test_the_page_is_served_with_a_strict_policy(daemon):
    client = daemon.tcp_client(token=False)
    for path, kind in (("/", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css"),
                       ("/icon.svg", "image/svg")):
        answer = client.get(path)
        assert answer.status == 200, path
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    client.get("/../api/openapi.yaml").problem("not_found", "invalid_request", "unauthenticated")


@pytest.mark.long
def test_device_images_are_shown_and_dropped(page, spawn):
    """Over a fake driver: what is kept, which engines have it and why one is lost shows by itself; a drop asks first."""
    d = spawn(env={"LD_LIBRARY_PATH": str(fake_gpu.FAKE.parent)})
    d.url = f"http://127.0.0.1:{d.tcp_client().tcp[1]}/"
    lib.wait_for(lambda: d.api.get("/v1/capabilities").ok(200)["devices"], 20, "the probe's answer")
    d.put("serve", images(1))
    enter(page, d)
    page.click("nav a[href='#/state-dicts']")
    expect(row(page, "state-dicts", "serve")).to_contain_text("generation 1")
    expect(page.locator("#device-memory")).to_be_hidden()
    kept = d.api.post("/v1/device-images", {"state_dict": "serve"}).ok(200)
    line = row(page, "device-images", kept["id"])
    cells = line.locator("td")
    for n, words in enumerate(("0", "1", fake_gpu.UUID, "2.0 MiB", "kept", "0")):
        expect(cells.nth(n)).to_have_text(words)
    expect(cells.nth(6)).to_have_text(re.compile("^in (1 h|59 min)"))
    hand = fake_gpu.Descriptors(d)
    d.api.post(f"/v1/device-images/{kept['id']}:attach", {"descriptors": hand.token}).ok(200)
    expect(cells.nth(5)).to_have_text("1")
    expect(cells.nth(6)).to_have_text("–")
    os.kill(next(w["pid"] for w in d.api.get("/v1/workers").ok(200)["workers"] if w["role"] == "holder"), signal.SIGKILL)
    expect(line.locator(".state")).to_have_text("lost")
    expect(line).to_contain_text("the worker that held it has ended: ")
    accessible(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.set_viewport_size({"width": 1280, "height": 800})
    drop = page.get_by_role("button", name=f"Drop device image {kept['id']}")
    drop.click()
    expect(page.locator("#confirm-text")).to_contain_text("The engine that has it keeps it")
    page.keyboard.press("Escape")
    assert d.api.get(f"/v1/device-images/{kept['id']}").ok(200)["state"] == "lost"
    drop.click()
    page.click("#confirm-yes")
    expect(line.locator(".state")).to_have_text("dropped")
    expect(line.get_by_role("button")).to_have_count(0)
    hand.close()
    expect(page.locator("#device-memory")).to_be_hidden()
    page.goto(f"{d.url}#/audit?action=device_image.drop")
    expect(page.locator("#audit tbody tr")).to_contain_text(f"serve:{kept['id']}")
