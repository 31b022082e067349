"""The browser that all tests of the page share: one Chromium, and the tabs in it."""
import os
import re

import chromium
import pytest

WAIT_MS = int(os.environ.get("PAGE_WAIT_MS", "60000"))


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not os.path.exists(chromium.PATH):
        pytest.skip(f"no Chromium at {chromium.PATH}")
    playwright.expect.set_options(timeout=WAIT_MS)
    with playwright.sync_playwright() as p:
        b = chromium.launch(p)
        yield b
        b.close()


@pytest.fixture(scope="module")
def tabs(browser):
    """A browser context and the tab of the previous test. That tab stays open for one more test, because starting a renderer process costs
    more than most tests: the next tab shares its process. Tests share nothing else: a daemon's port, which no test before has used,
    is an origin of its own, and session storage belongs to a tab."""
    return browser.new_context(), []


@pytest.fixture
def page(tabs, request):
    """A tab that fails its test when the page logs an error, breaks its policy or talks to another host."""
    context, previous = tabs
    tab = context.new_page()
    tab.set_default_timeout(WAIT_MS)
    tab.is_looked_at_whole = "not long" not in request.config.getoption("markexpr")
    tab.wrong = []
    tab.on("pageerror", lambda e: tab.wrong.append(str(e)))
    tab.on("console", lambda m: tab.wrong.append(m.text) if m.type == "error" and not re.search(
        r"Failed to load resource|net::ERR", m.text) else None)
    tab.on("request", lambda r: tab.wrong.append(r.url) if not r.url.startswith("http://127.0.0.1:") else None)
    yield tab
    wrong = list(tab.wrong)
    while previous:
        previous.pop().close()
    previous.append(tab)
    assert wrong == []
