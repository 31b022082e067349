"""What people come to the dashboard for, over a live daemon with a training run and checkpoints that PyTorch wrote: one daemon and one
browser for all of it."""

import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from urllib.parse import quote

import pytest

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect  # noqa: E402

import world as w  # noqa: E402
from test_page import accessible  # noqa: E402

REF = f"main:{w.RUN}/step-600"
VIEWS = ("", "runs", "jobs", "checkpoints", "compare", "policies", "policies/nightly", "automation", "state-dicts", "storages",
         "workers", "audit", "doctor")


@pytest.fixture(scope="module")
def world():
    with w.started() as d:
        w.fill(d)
        d.url = f"http://127.0.0.1:{d.tcp_client().tcp[1]}/"
        yield d


def token(d):
    return (d.state / "token").read_text().strip()


def enter(page, d, view=""):
    page.goto(f"{d.url}#token={token(d)}")
    expect(page.locator("#connection")).to_have_text("Live")
    go(page, view)


def go(page, view):
    page.evaluate("to => { location.hash = to; }", f"#/{view}")


def at_checkpoint(ref):
    return f"checkpoints/{quote(ref, safe='')}"


def job_of(d, kind, state):
    return next(j for j in d.api.get("/v1/jobs?page_size=200").ok(200)["jobs"] if j["kind"] == kind and j["state"] == state)


@pytest.mark.long
def test_a_newcomer_sees_whether_runs_are_safe_and_why_a_job_failed(page, world):
    enter(page, world)
    expect(page.locator(".verdict-words")).to_contain_text("things need you")
    good = page.locator(f"[data-run='main:{w.RUN}']")
    expect(good.locator(".state")).to_have_text("Safe")
    expect(good).to_contain_text("Newest durablestep-600")
    expect(good).to_contain_text("Newest verifiedstep-500")
    expect(good.locator(".rows")).to_contain_text(re.compile(r"If it crashed now\d+ \w+( \d+ s)? of work"))
    expect(good).to_contain_text("(nightly)")
    expect(good.get_by_role("img", name=re.compile("^Throughput of the last 6 saves"))).to_be_visible()
    expect(page.locator("[data-run='main:vision/finetune']")).to_contain_text("step-100 is damaged")
    expect(page.locator("[data-storage=main] .forecast")).to_contain_text(re.compile("full in|room for over a year"))
    page.locator(".problems").get_by_role("link", name="load main:vision/finetune/step-100").click()
    error = job_of(world, "load", "failed")["error"]
    assert error["rank"] == 3 and error["fqn"] and error["file"] and error["offset"]
    for key in ("rank", "fqn", "file", "offset", "expected", "actual"):
        expect(page.locator(f"[data-error={key}]")).to_have_text(str(error[key]))
    expect(page.locator("#job-error .advice")).to_contain_text("repair")


@pytest.mark.long
def test_a_job_shows_where_its_time_went_and_can_be_repeated(page, world):
    failed = job_of(world, "load", "failed")
    enter(page, world, f"jobs/{failed['id']}")
    expect(page.locator("#job-stages li")).to_have_count(len(failed["stages"]) + (failed["stages"][0]["at"] > failed["created_at"]))
    expect(page.locator("#job-stages")).to_contain_text("copy")
    expect(page.locator("#job-events")).to_contain_text("digest_mismatch")
    command = page.locator("#job-curl").text_content()
    assert token(world) not in command
    env = {**os.environ, "DCPD_TOKEN": token(world)}
    answer = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    again = world.api.wait(re.search(r'"id":"(\w{26})"', answer.stdout).group(1))
    assert again["spec"] == failed["spec"] and again["error"]["offset"] == failed["error"]["offset"], answer
    shlex.split(command)


@pytest.mark.long
def test_a_run_shows_what_retention_does_and_holds_keep(page, world):
    run = f"runs/main/{quote(w.RUN, safe='')}"
    enter(page, world, run)
    row = lambda step: page.locator(f"#run-checkpoints tr[data-key='{w.RUN}/step-{step}']")  # noqa: E731
    expect(row(600)).to_contain_text("latest")
    expect(row(600)).to_contain_text("best")
    expect(row(300)).to_contain_text("held")
    expect(row(500)).to_contain_text("newest verified")
    expect(row(100)).to_contain_text("stays: ttl")
    steps = page.locator("#run-timeline").get_by_role("link")
    expect(steps).to_have_count(6)
    words = "^step-500, .*verified, alias latest-verified, loss 2.28, stays: the newest verified one"
    expect(steps.nth(4)).to_have_attribute("aria-label", re.compile(words))
    expect(steps.nth(2)).to_have_attribute("aria-label", re.compile("held: figures of the paper"))
    page.get_by_role("button", name="Lag").click()
    expect(page.locator("#run-charts").get_by_role("img", name=re.compile("^step-600, durable .* after the copy"))).to_be_attached()
    expect(page.locator("#run-more")).to_contain_text("A training would go on from step-600")
    expect(page.locator("#run-lineage")).to_contain_text("serving-2")
    row(200).get_by_role("button", name="Hold step-200").click()
    page.fill("#hold-reason", "for the talk")
    page.click("#confirm-yes")
    expect(row(200)).to_contain_text("held")
    assert world.api.get(world.api.storage_path("main", f"{w.RUN}/step-200")).ok(200)["hold"]["reason"] == "for the talk"
    expect(row(200)).to_contain_text("stays: held")
    row(200).get_by_role("button", name="Lift hold of step-200").click()
    page.click("#confirm-yes")
    expect(row(200)).not_to_contain_text("held")
    row(400).get_by_role("button", name="Alias for step-400").click()
    expect(page.locator("#alias-name")).to_be_focused()
    page.fill("#alias-name", "demo")
    page.keyboard.press("Enter")
    expect(row(400)).to_contain_text("demo")


@pytest.mark.long
def test_delete_says_what_goes_and_the_trash_gives_it_back(page, world):
    name = f"{w.RUN}/step-100"
    enter(page, world, at_checkpoint(f"main:{name}"))
    page.get_by_role("button", name="Delete …").click()
    expect(page.locator("#delete-goes")).to_contain_text("retention would keep it: ttl")
    accessible(page)
    page.click("#confirm-no")
    assert world.api.get(world.api.storage_path("main", name)).status == 200
    page.get_by_role("button", name="Delete …").click()
    page.click("#confirm-yes")
    expect(page.locator("#notices")).to_contain_text("in the trash of main")
    assert world.api.get(world.api.storage_path("main", name)).status == 404
    go(page, "storages")
    page.get_by_role("button", name="Trash of main").click()
    page.get_by_role("button", name=f"Bring back {name}").click()
    page.click("#confirm-yes")
    expect(page.locator("#trash")).to_contain_text("It is empty.")
    assert world.api.get(world.api.storage_path("main", name)).status == 200


@pytest.mark.long
def test_a_policy_says_what_it_removes_before_it_is_kept(page, world):
    run = "vision/finetune"
    enter(page, world, "policies")
    nightly = page.locator("[data-policy=nightly]")
    expect(nightly).to_contain_text("Keeps the newest 3 and the best by lowest loss; the others go when they are older than 30d.")
    page.get_by_role("link", name=f"main:{run}").click()
    expect(page.locator("#policy-match")).to_have_value(run)
    page.fill("#policy-name", "tight")
    expect(page.locator("#policy-fates tr", has_text="step-100")).to_contain_text("it cannot be read")
    page.fill("#policy-match", w.RUN)
    page.fill("#keep-last", "")
    expect(page.locator("#policy-problem")).to_contain_text("at least one rule")
    expect(page.locator("#policy-save")).to_be_disabled()
    page.fill("#keep-last", "1")
    expect(page.locator("#policy-fates tr", has_text="step-200")).to_contain_text("no rule keeps it")
    expect(page.get_by_role("img", name=f"{w.RUN}: 2 of 6 checkpoints go")).to_be_visible()
    page.check("#policy-paused")
    accessible(page)
    page.fill("#keep-every-steps", "150")
    page.keyboard.press("Enter")
    tight = page.locator("[data-policy=tight]")
    expect(tight.locator(".state")).to_have_text("paused")
    kept = world.api.get("/v1/policies/tight").ok(200)
    assert kept["paused"] is True and kept["keep"] == {"last": 1, "every_steps": 150}, "Enter keeps what was typed last"
    page.get_by_role("button", name="Go on with tight").click()
    expect(page.locator("#confirm-text")).to_contain_text("It removes 1,")
    page.click("#confirm-no")
    page.get_by_role("button", name="Delete tight").click()
    page.click("#confirm-yes")
    expect(tight).to_have_count(0)
    assert world.api.get("/v1/policies/tight").status == 404


@pytest.mark.long
def test_what_follows_a_checkpoint_and_who_is_told(page, world):
    secret = world.state / "secrets/eval"
    secret.parent.mkdir(mode=0o700, exist_ok=True)
    secret.write_text("x" * 32)
    secret.chmod(0o600)
    enter(page, world, "automation")
    page.get_by_role("button", name="New webhook").click()
    page.fill("#hook-name", "eval")
    page.fill("#hook-url", "http://127.0.0.1:9/hook")
    page.fill("#hook-secret", "eval")
    accessible(page)
    page.click("#confirm-yes")
    expect(page.locator("[data-webhook=eval]")).to_contain_text("Nothing was sent yet.")
    page.get_by_role("button", name="New chain").click()
    page.fill("#chain-name", "check")
    page.select_option("#chain-storage", "archive")
    page.fill("#chain-match", "chained")
    page.fill("#chain-steps", '[{"verify": {"level": "digest"}}]')
    page.click("#confirm-yes")
    expect(page.locator("[data-chain=check] .flow")).to_contain_text("verify digest")
    world.api.run("replicate", source={"storage": "main", "name": "torch/fsdp2"}, target={"storage": "archive", "name": "chained/step-1"})
    expect(page.locator("#executions-check tr", has_text="chained/step-1")).to_contain_text("done")
    failed = page.locator("#deliveries-eval tr", has_text="chained/step-1")
    expect(failed.locator(".state")).to_have_text("failed")
    why = world.api.get("/v1/webhooks/eval/deliveries").ok(200)["deliveries"][0]["error"]
    expect(failed).to_contain_text(why)
    failed.get_by_role("button", name="Send again").click()
    expect(failed).to_contain_text("2 attempts")
    accessible(page)
    for name in ("webhook eval", "chain check"):
        page.get_by_role("button", name=f"Delete {name}").click()
        page.click("#confirm-yes")
    expect(page.locator("#chains")).to_contain_text("No chain is set")
    go(page, "audit")
    page.fill("#audit-text", "check")
    expect(page.locator("#audit tbody tr")).to_have_count(2)
    page.select_option("#audit-action", "chain.set")
    expect(page.locator("#audit tbody tr")).to_have_count(1)
    expect(page.locator("#audit tbody")).to_contain_text("token token")
    page.locator("#audit summary").click()
    expect(page.locator("#audit pre")).to_contain_text('"level": "digest"')


def test_the_speed_of_a_storage_over_time(page, world):
    enter(page, world, "storages")
    written = page.locator("#speed-main").get_by_role("group", name="Writes of main by minute")
    expect(written.get_by_role("img").first).to_have_attribute("aria-label", re.compile(r"/s, .* of jobs' time$"))
    page.locator("#stages-main summary").click()
    io = {x["stage"]: x for x in world.api.get("/v1/storages/main").ok(200)["io"]["stages"]}
    for stage in io:
        expect(page.locator("#stages-table-main th", has_text=re.compile(f"^{stage}$"))).to_be_visible()
    assert io["copy"]["write"]["bytes"] > 0
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#h-login")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.long
def test_the_cut_of_a_tensor_that_pytorch_wrote(page, world):
    listed = world.api.get(world.api.storage_path("main", "torch/mesh-2x2", "/tensors")).ok(200)["tensors"]
    tensor = max(listed, key=lambda t: t["chunk_count"])
    assert tensor["chunk_count"] == 4 and len(tensor["shape"]) == 2
    enter(page, world, at_checkpoint("main:torch/mesh-2x2"))
    page.get_by_role("button", name=tensor["fqn"], exact=True).click()
    boxes = page.locator("section[aria-label='Cut over ranks'] rect")
    expect(boxes).to_have_count(4)
    for i, c in enumerate(tensor["chunks"]):
        box = ", ".join(f"{o}:{o + s}" for o, s in zip(c["offsets"], c["sizes"]))
        boxes.nth(i).hover()
        expect(page.locator("#tip")).to_contain_text(f"rank {c['rank']}box [{box}]{c['file']} at {c['offset']}")
    corner = boxes.nth(3).bounding_box()
    first = boxes.nth(0).bounding_box()
    assert corner["x"] > first["x"] and corner["y"] > first["y"], "rank 3 has the last box in both dims"
    expect(page.locator("section[aria-label='Bytes in files'] li")).to_have_count(4)
    page.get_by_role("button", name="Draw it").click()
    expect(page.get_by_role("img", name=re.compile(re.escape(tensor["fqn"]) + r".* values from "))).to_be_visible()
    page.get_by_role("button", name=f"Statistics of {tensor['fqn']}").click()
    expect(page.locator("#tensor-stats")).to_contain_text("Norm")
    accessible(page)


@pytest.mark.long
def test_a_reshard_is_seen_before_it_is_made(page, world):
    name = f"{w.RUN}/columns"
    enter(page, world, f"reshard/{quote(REF, safe='')}")
    page.fill("#to-world", "2")
    page.fill("#to-name", name)
    page.get_by_role("button", name="Add a rule").click()
    page.select_option("#cut-tensor", "model.layers.0.mlp.up.weight")
    after = page.locator("figure").nth(1)
    expect(after.locator("rect").nth(1)).to_have_attribute("aria-label", "rank 1, box [0:256, 32:64]")
    expect(page.locator("figure").nth(0).locator("rect")).to_have_count(4)
    expect(page.locator("#reshard-plan")).to_contain_text("5 lack the dim")
    page.fill("#rule-0-placements", "Sharded(1)")
    expect(page.locator("#reshard-problem .notice")).to_be_visible()
    expect(page.locator("#reshard-go")).to_be_disabled()
    page.fill("#rule-0-placements", "Shard(1)")
    page.locator("#more-reshard summary").click()
    page.fill("#to-transform", '[{"match": "^model\\\\.(.*)", "rename": "net.$1"}]')
    expect(page.locator("#reshard-plan")).to_contain_text("net.layers.0.mlp.up.weight")
    accessible(page)
    page.fill("#to-transform", "")
    expect(page.locator("#reshard-plan")).not_to_contain_text("net.layers")
    page.get_by_role("button", name="Reshard", exact=True).click()
    expect(page.locator("#job-facts .state")).to_have_text("succeeded")
    up = next(t for t in world.api.get(world.api.storage_path("main", name, "/tensors")).ok(200)["tensors"]
              if t["fqn"] == "model.layers.0.mlp.up.weight")
    assert [c["offsets"] for c in up["chunks"]] == [[0, 0], [0, 32]]


@pytest.mark.long
def test_a_checkpoint_is_loaded_and_exported(page, world):
    enter(page, world, at_checkpoint("main:torch/fsdp2"))
    page.get_by_role("button", name="Load …").click()
    page.fill("#load-name", "serve-2")
    page.fill("#load-world", "2")
    page.click("#confirm-yes")
    expect(page.locator("#job-facts .state")).to_have_text("succeeded")
    page.locator("#job-facts").get_by_role("link", name="shm:serve-2").click()
    expect(page.locator("#slots-serve-2 .slot")).to_have_count(2)
    page.get_by_role("button", name="Delete serve-2").click()
    page.click("#confirm-yes")
    expect(page.locator("#state-dicts tr[data-key=serve-2]")).to_have_count(0)
    go(page, at_checkpoint("main:torch/fsdp2"))
    page.get_by_role("button", name="Export …").click()
    page.select_option("#export-storage", "archive")
    page.fill("#export-name", "exported/fsdp2")
    page.click("#confirm-yes")
    expect(page.locator("#job-facts .state")).to_have_text("succeeded")
    made = world.api.get(world.api.storage_path("archive", "exported/fsdp2")).ok(200)
    assert made["format"] == "safetensors" and made["parents"][0]["name"] == "torch/fsdp2"


@pytest.mark.long
def test_two_checkpoints_compared(page, world):
    enter(page, world, "compare")
    page.fill("#compare-a", f"main:{w.RUN}/step-300")
    page.fill("#compare-b", f"main:{w.RUN}/step-400")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.locator("#compare-body")).to_contain_text("different")
    expect(page.locator(".legend .k1").first).to_contain_text("1 unchanged")
    expect(page.locator(".legend .k2")).to_contain_text("22 changed")
    expect(page.locator(".movers li").first).to_be_visible()
    assert quote(f"main:{w.RUN}/step-300", safe="") in page.url


def violations(page):
    """Of axe, which accessible() has brought into the page: bringing it in anew for each view costs more than the look."""
    found = page.evaluate("""async () => (await axe.run({resultTypes: ["violations"]})).violations
                             .map(v => [v.id, v.nodes.map(n => n.html)])""")
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize("turn", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2, 3))])
def test_every_view_is_accessible_in_both_schemes_and_fits_a_phone(page, world, turn):
    """In each turn every fourth view, on a desk in the light scheme and on a phone in the dark."""
    enter(page, world)
    views = [*VIEWS, f"runs/main/{quote(w.RUN, safe='')}", at_checkpoint(REF) + "?t=model.embed.weight",
             f"reshard/{quote(REF, safe='')}", f"jobs/{job_of(world, 'load', 'failed')['id']}",
             f"jobs/{job_of(world, 'save', 'succeeded')['id']}",
             f"compare?a={quote(f'main:{w.RUN}/step-500')}&b={quote(REF)}"]
    accessible(page, always=True)
    for view in views[turn::4]:
        go(page, view)
        expect(page.locator("#view h2")).to_be_attached()
        expect(page.locator("#view")).not_to_contain_text("Looking …")
        for scheme, width in (("light", 1280), ("dark", 390)):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 850})
            violations(page)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), (view, width)
        page.set_viewport_size({"width": 1280, "height": 850})


@pytest.mark.long
def test_hostile_names_are_text(page, world):
    enter(page, world, at_checkpoint("main:odd/<script>alert(2)<"))
    expect(page.locator("#h-checkpoint")).to_have_text("main:odd/<script>alert(2)<")
    for name in w.ODD:
        page.locator(".virtual-row button").filter(has_text=name).first.click()
        expect(page.locator("#tensor-name")).to_have_text(name)
        page.get_by_role("button", name="Draw it").click()
        expect(page.locator("#tensor-heat canvas")).to_be_visible()
    go(page, "policies")
    expect(page.locator("#policies")).to_contain_text("main:odd")
    go(page, "policies/%2B?storage=main&match=odd")
    expect(page.locator("#policy-fates")).to_contain_text("odd/<script>alert(2)<")
    go(page, "runs/main/odd")
    expect(page.locator("#run-timeline a")).to_have_attribute("aria-label", re.compile("^<script>alert"))
    go(page, at_checkpoint("main:odd/<script>alert(2)<"))
    page.locator(".virtual-row button").filter(has_text=w.ODD[1]).first.click()
    isolated = page.locator("#tensor-name bdi").evaluate("e => getComputedStyle(e).unicodeBidi")
    assert isolated == "isolate"
    assert page.locator("main img, main script").count() == 0
    accessible(page)


@pytest.mark.long
@pytest.mark.parametrize("many", [5000, pytest.param(100000, marks=pytest.mark.long)])
def test_a_hundred_thousand_tensors(page, world, many):
    """The page holds the rows that are in sight, however many there are."""
    name = f"big/step-{many}"
    w.many_tensors(world, name, many)
    enter(page, world, at_checkpoint(f"main:{name}"))
    expect(page.locator(".virtual-row button").first).to_be_visible()
    expect(page.locator(".virtual")).to_have_attribute("aria-rowcount", str(many + 1))
    expect(page.locator("#tensors-count")).to_have_text(f"{many} tensors and values")
    page.locator(".virtual").evaluate("e => { e.scrollTop = e.scrollHeight; }")
    expect(page.locator(".virtual-row").last).to_contain_text(f"layers.{many // 10 - 1}.mlp.experts.9.weight")
    assert page.locator(".virtual-row").count() < 80
    page.fill("#tensors-text", "layers.171.")
    expect(page.locator("#tensors-count")).to_have_text(f"10 of {many}")
    accessible(page)


@pytest.mark.long
def test_two_tabs_show_one_truth(page, tabs, world):
    other = tabs[0].new_page()
    try:
        enter(page, world, "storages")
        enter(other, world, at_checkpoint("main:torch/fsdp2"))
        other.get_by_role("button", name="Verify …").click()
        other.click("#confirm-yes")
        expect(other.locator("#job-facts .state")).to_have_text("succeeded")
        go(page, "checkpoints")
        line = page.locator("#checkpoints tr[data-key='main:torch/fsdp2']")
        expect(line.locator(".state")).to_have_text(re.compile("verified"))
    finally:
        other.close()


@pytest.mark.long
def test_a_slow_network_shows_the_last_view_asked_for(page, world):
    slow = page.context.new_cdp_session(page)
    rate = {"downloadThroughput": 100000, "uploadThroughput": 100000}
    slow.send("Network.emulateNetworkConditions", {"offline": False, "latency": 300, **rate})
    try:
        enter(page, world)
        expect(page.locator(".card").first).to_be_visible()
        for view in ("doctor", "compare", at_checkpoint(REF), "storages"):
            go(page, view)
        expect(page.locator("#storages tbody tr")).to_have_count(2)
        assert page.locator("#view section[id^=view-]").count() == 1
    finally:
        slow.send("Network.emulateNetworkConditions", {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1})
        slow.detach()


@pytest.mark.long
def test_a_token_that_was_changed_is_asked_for_again(page, world):
    """The daemon takes the new one on SIGHUP. The page's next request is refused, and it asks; nothing of what was shown stays."""
    enter(page, world, "runs")
    old = token(world)
    (world.state / "token").write_text(secrets.token_hex(24) + "\n")
    world.proc.send_signal(signal.SIGHUP)
    end = time.monotonic() + 60
    while world.tcp_client(token=False).get("/v1/runs?storage=main", headers={"Authorization": f"Bearer {old}"}).status != 401:
        assert time.monotonic() < end
        time.sleep(0.02)
    go(page, at_checkpoint(REF))
    expect(page.locator("#h-login")).to_be_visible()
    expect(page.locator("#view")).to_be_empty()
    page.fill("#token", token(world))
    page.keyboard.press("Enter")
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#h-checkpoint")).to_have_text(REF)
