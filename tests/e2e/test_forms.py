"""Forms that the daemon previews: late answers neither change what was typed nor show what came of an older form."""

import json
import re

import pytest

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect  # noqa: E402

from test_page import enter, fake  # noqa: E402, F401


class Late:
    """Requests of a page whose answers wait until the test lets them go."""

    def __init__(self, page, pattern, answer):
        self.held, self.answer, self.is_over = [], answer, False
        page.route(re.compile(pattern), lambda route: self.take(route))

    def take(self, route):
        self.held.append(route)
        if self.is_over:
            self.go(-1)

    def bodies(self):
        return [json.loads(route.request.post_data) for route in self.held]

    def wait(self, page, count):
        for _ in range(600):
            if len(self.held) >= count:
                return
            page.wait_for_timeout(100)
        raise AssertionError(f"{len(self.held)} requests, not {count}")

    def go(self, i):
        route = self.held[i]
        route.fulfill(json=self.answer(json.loads(route.request.post_data or "null")))

    def end(self):
        """Lets all go that wait, and all that come."""
        self.is_over = True
        for i in range(len(self.held)):
            self.go(i)


def plan(request):
    return {"bytes": 4096, "file_count": 1, "world_size": request["target"].get("world_size", 0), "tensors": 1, "chunks": 1,
            "read_bytes": 4096, "over_read_ratio": 1, "peak_memory_bytes": 1, "cuts": []}


def open_form(page, fake, view):  # noqa: F811
    enter(page, fake)
    page.evaluate("to => { location.hash = to; }", view)


@pytest.mark.long
def test_a_checkpoint_read_late_leaves_the_world_size_that_is_typed(page, fake):  # noqa: F811
    fake.tensors["main:a"] = []
    records = Late(page, "/v1/checkpoints/main/a$", lambda _: {"name": "a", "world_size": 8})
    plans = Late(page, "dry_run", plan)
    open_form(page, fake, "#/reshard/main%3Aa")
    world = page.locator("#to-world")
    world.focus()
    records.wait(page, 1)
    records.go(0)
    plans.wait(page, 1)
    assert plans.bodies()[0]["target"]["world_size"] == 8, "what an empty field means"
    page.keyboard.type("12")
    expect(world).to_have_value("12")
    plans.wait(page, 2)
    assert plans.bodies()[1]["target"]["world_size"] == 12


@pytest.mark.long
def test_a_policy_is_edited_once_it_is_read(page, fake):  # noqa: F811
    policy = {"name": "p", "storage": "main", "match": "run*", "keep": {"last": 3}}
    lists = Late(page, "/v1/policies$", lambda _: {"policies": [policy]})
    Late(page, ":preview", lambda _: {"remove": [], "keep": [], "remove_bytes": 0}).end()
    open_form(page, fake, "#/policies/p")
    expect(page.locator("#keep-last")).to_be_disabled()
    lists.wait(page, 1)
    lists.end()
    page.fill("#keep-last", "5")
    expect(page.locator("#policy-match")).to_have_value("run*")
    expect(page.locator("#keep-last")).to_have_value("5")


@pytest.mark.long
def test_the_plan_of_an_older_form_is_dropped(page, fake):  # noqa: F811
    """The last test of the module: the clock stays installed in the context that its tabs share."""
    fake.tensors["main:a"] = []
    plans = Late(page, "dry_run", plan)
    open_form(page, fake, "#/reshard/main%3Aa")
    plans.wait(page, 1)
    page.clock.install()
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    page.fill("#to-world", "5")  # its own question waits for the clock
    plans.go(0)
    page.wait_for_timeout(300)
    page.clock.run_for(200)  # a draw, but not yet the question
    expect(page.locator("#reshard-plan")).to_be_empty()
    page.clock.run_for(2000)
    plans.wait(page, 2)
    plans.go(1)
    page.wait_for_timeout(300)
    page.clock.run_for(2000)
    expect(page.locator("#reshard-plan")).to_contain_text("World size5")
