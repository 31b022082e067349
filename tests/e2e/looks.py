"""How the dashboard looks: pictures of its main views in both schemes, over recorded answers and with a stopped clock, so that two runs of
one page are alike on any machine but for its fonts.

    python tests/e2e/looks.py data        records anew what a live daemon answers (looks/answers.json)
    python tests/e2e/looks.py pictures    takes the pictures anew: look at them, then commit them
"""
import base64
import json
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(__file__).resolve().parents[1] / "lib")]
sys.dont_write_bytecode = True

import chromium  # noqa: E402
from fake_api import Fake  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent / "looks"
SIZE = {"width": 1280, "height": 900}
SCHEMES = ("light", "dark")
DIFFERS, SHARE = 40, 0.03  # so far in a channel of 256 is another colour; so many pixels may be (text is blurred away before)

# Both pictures become small, which blurs letters into grey, and are compared pixel by pixel.
COMPARE = """async ([a, b, most]) => {
    const pixels = async (url) => {
        const image = new Image();
        image.src = url;
        await image.decode();
        const canvas = new OffscreenCanvas(320, 225), context = canvas.getContext("2d");
        context.imageSmoothingQuality = "high";
        context.drawImage(image, 0, 0, 320, 225);
        return context.getImageData(0, 0, 320, 225).data;
    };
    const [x, y] = [await pixels(a), await pixels(b)];
    let other = 0;
    for (let i = 0; i < x.length; i += 4) {
        other += Math.max(Math.abs(x[i] - y[i]), Math.abs(x[i + 1] - y[i + 1]), Math.abs(x[i + 2] - y[i + 2])) > most;
    }
    return other / (x.length / 4);
}"""
SHRINK = """async (url) => {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [960, 675];
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, 960, 675);
    return canvas.toDataURL("image/webp", 0.72);
}"""


def answers():
    return json.loads((HERE / "answers.json").read_text())


def url_of(data, kind):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def views(told):
    """Name → address, and what must be in sight before the picture is taken."""
    return {"overview": ("#/", ".card .spark"), "run": (told["run"], "#h-run"), "job": (told["job"], "#h-job"),
            "checkpoint": (told["checkpoint"], "#tensor-name")}


def open_page(browser, fake, told, scheme):
    page = browser.new_page(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
    page.clock.set_fixed_time(told["time"])
    page.goto(f"{fake.url}#token={fake.token}")
    page.get_by_text("Live", exact=True).wait_for()
    return page


def picture(page, address, sign):
    page.evaluate("to => { location.hash = to; }", address)
    page.locator(sign).first.wait_for()
    page.mouse.move(0, 0)
    page.wait_for_timeout(400)  # answers that come later move what is below
    page.evaluate("sign => { document.activeElement?.blur(); document.querySelector(sign).closest('section').scrollIntoView(); }", sign)
    return page.screenshot()


def replay(told):
    fake = Fake()
    fake.recorded = told["answers"]
    return fake


def take():
    from playwright.sync_api import sync_playwright
    told = answers()
    fake = replay(told)
    with sync_playwright() as p:
        browser = chromium.launch(p)
        small = browser.new_page()
        for scheme in SCHEMES:
            page = open_page(browser, fake, told, scheme)
            for name, (address, sign) in views(told).items():
                url = small.evaluate(SHRINK, url_of(picture(page, address, sign), "png"))
                (HERE / f"{name}-{scheme}.webp").write_bytes(base64.b64decode(url.partition(",")[2]))
        browser.close()
    fake.down()


def record():
    """Goes through the views on a live daemon, and keeps what was asked and answered."""
    import datetime
    from urllib.parse import quote

    import world as w
    from playwright.sync_api import sync_playwright
    got, responses = {}, []
    with w.started() as d, sync_playwright() as p:
        w.fill(d)
        base = f"http://127.0.0.1:{d.tcp_client().tcp[1]}/"
        jobs = d.api.get("/v1/jobs?page_size=200").ok(200)["jobs"]
        failed = next(j for j in jobs if j["state"] == "failed" and j["kind"] == "load")["id"]
        told = {"run": f"#/runs/main/{quote(w.RUN, safe='')}", "job": f"#/jobs/{failed}",
                "checkpoint": f"#/checkpoints/{quote(f'main:{w.RUN}/step-600', safe='')}?t=model.layers.1.attn.out.weight"}
        browser = chromium.launch(p)
        page = browser.new_page(viewport=SIZE)
        page.on("response", lambda r: responses.append(r))
        page.goto(f"{base}#token={(d.state / 'token').read_text().strip()}")
        page.get_by_text("Live", exact=True).wait_for()
        for address, sign in views(told).values():
            page.evaluate("to => { location.hash = to; }", address)
            page.locator(sign).first.wait_for()
            page.wait_for_timeout(800)
        for r in responses:
            path = r.url.removeprefix(base.rstrip("/"))
            if r.ok and "json" in r.headers.get("content-type", ""):
                got[f"{r.request.method} {path}"] = json.loads(r.text().replace(str(d.home), "/data"))
        browser.close()
    now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=20)
    text = json.dumps({**told, "time": now.isoformat(timespec="seconds").replace("+00:00", "Z"), "answers": got}, separators=(",", ":"))
    (HERE / "answers.json").write_text(text + "\n")


if __name__ == "__main__":
    {"data": record, "pictures": take}[sys.argv[1]]()
