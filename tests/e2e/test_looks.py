"""The dashboard's main views look as the pictures in looks/ do, in both schemes. After a change that is meant: looks.py."""

import pytest

playwright = pytest.importorskip("playwright.sync_api")

import looks  # noqa: E402


@pytest.fixture(scope="module")
def told():
    return looks.answers()


@pytest.fixture(scope="module")
def fake(told):
    f = looks.replay(told)
    yield f
    f.down()


@pytest.mark.long
@pytest.mark.parametrize("scheme", [looks.SCHEMES[0], *(pytest.param(s, marks=pytest.mark.long) for s in looks.SCHEMES[1:])])
def test_views_look_as_they_did(browser, fake, told, scheme):
    page, judge = looks.open_page(browser, fake, told, scheme), browser.new_page()
    kept = {name: looks.url_of((looks.HERE / f"{name}-{scheme}.webp").read_bytes(), "webp") for name in looks.views(told)}
    wrong = {}
    try:
        for name, (address, sign) in looks.views(told).items():
            now = looks.url_of(looks.picture(page, address, sign), "png")
            share = {other: judge.evaluate(looks.COMPARE, [url, now, looks.DIFFERS]) for other, url in kept.items()}
            assert min(v for other, v in share.items() if other != name) > looks.SHARE, "no picture passes for another one"
            if share[name] > looks.SHARE:
                wrong[name] = round(share[name], 4)
    finally:
        page.close()
        judge.close()
    assert not wrong, f"another look, by share of pixels: {wrong}"
