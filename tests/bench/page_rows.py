"""Bench rows of the dashboard, in Chromium over loopback.

`page.transfer`: all files of the page, as compressed as the daemon sends them. `page.first_paint`: from the request of the address to the
first content, with an empty cache, over a daemon that has runs and jobs. `page.open.100k`: from the click to the first rows of a checkpoint
with 100,000 tensors. `page.scroll.100k`: frames a second while its table is scrolled 400 pixels a frame. The peer of each row is the limit
that we set.
"""
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
sys.dont_write_bytecode = True

import world  # noqa: E402

RUNS, SCROLL_MS = 5, 1000
SETTLED_S = 4  # a look-up worker keeps what has not been changed for two seconds
CHROMIUM = "/usr/bin/chromium"
OPEN = """async (address) => {
    const start = performance.now(), frame = () => new Promise(requestAnimationFrame);
    location.hash = address;
    while (!document.querySelector(".virtual-row button")) await frame();
    await frame();
    return performance.now() - start;
}"""
SCROLL = """async () => {
    const table = document.querySelector(".virtual"), start = performance.now();
    let frames = 0;
    while (performance.now() - start < %d) {
        table.scrollTop += 400;
        await new Promise(requestAnimationFrame);
        frames++;
    }
    return (1000 * frames) / (performance.now() - start);
}""" % SCROLL_MS
PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0"""


def transfer(d):
    """KiB of all files of the page, as a browser that takes gzip gets them."""
    client, web = d.tcp_client(token=False), world.lib.ROOT / "web"
    names = [p.relative_to(web) for p in sorted(web.rglob("*")) if p.is_file()]
    answers = [client.get(f"/{name}", headers={"Accept-Encoding": "gzip"}) for name in names]
    assert all(a.status == 200 for a in answers)
    return sum(len(a.body) for a in answers) / 1024


def paint(browser, address):
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(address)
        page.get_by_text("Live", exact=True).wait_for()
        return page.evaluate(PAINT)
    finally:
        context.close()


def browse(bench, d, address):
    from playwright.sync_api import expect, sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        bench.row("page.first_paint", "ms", "<=1.00", "300 ms", [paint(browser, address) for _ in range(RUNS)], [300], "the overview")
        page = browser.new_page()
        page.goto(address)
        page.get_by_text("Live", exact=True).wait_for()
        opened, frames = [], []
        for _ in range(RUNS):
            page.evaluate("location.hash = '#/workers'")
            page.locator("#workers").wait_for()
            opened.append(page.evaluate(OPEN, "#/checkpoints/main%3Abig%2Fstep-1") / 1000)
            expect(page.locator("#tensors-count")).to_contain_text("tensors and values", timeout=60000)
            frames.append(page.evaluate(SCROLL))
        browser.close()
    bench.row("page.open.100k", "s", "<=1.00", "1 s", opened, [1.0], "the view of a checkpoint with 100,000 tensors")
    bench.row("page.scroll.100k", "1/s", ">=1.00", "50 frames/s", frames, [50.0], "its table, 400 pixels a frame")


def rows(bench):
    if not bench.wants("page.transfer") and not any(bench.wants(f"page.{n}") for n in ("first_paint", "open.100k", "scroll.100k")):
        return
    with world.started() as d:
        world.fill(d)
        world.many_tensors(d, "big/step-1")
        time.sleep(SETTLED_S)
        bench.row("page.transfer", "KiB", "<=1.00", "150 KiB", [transfer(d)], [150.0], "all files of web/")
        client = d.tcp_client()
        browse(bench, d, f"http://127.0.0.1:{client.tcp[1]}/#token={(d.state / 'token').read_text().strip()}")
