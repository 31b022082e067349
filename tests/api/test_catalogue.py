"""The catalogue: lists that are filtered, sorted and paged, beside what Python makes of the same records; and how they follow the disk."""
import os
import random
import shutil
import time
import urllib.parse

import pytest
from crafted import Crafted

import dcpd as lib


def page(d, **query):
    return d.api.get("/v1/checkpoints?" + urllib.parse.urlencode(query, quote_via=urllib.parse.quote)).ok(200)


def found(d, size=1000, storage="main", **query):
    """All pages' records; no page is longer than `size`."""
    items, token = [], None
    while True:
        p = page(d, storage=storage, page_size=size, **query, **({"page_token": token} if token else {}))
        assert len(p["checkpoints"]) <= size and "problems" not in p
        items += p["checkpoints"]
        token = p.get("next_page_token")
        if not token:
            return items


def names(items):
    return [c["name"] for c in items]


def put(root, name, when, extra=0):
    """A checkpoint of another tool's, whose newest file was written at that second, and so many bytes longer."""
    at = root / name
    at.mkdir(parents=True)
    (at / ".metadata").write_bytes(b"x" * (1 + extra))
    os.utime(at / ".metadata", (when, when))


def held(d, name, on=True):
    d.api.request("PUT" if on else "DELETE", d.api.storage_path("main", name, "/hold")).ok(200)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Some hundreds of checkpoints in a few runs; some are held, verified, or files."""
    d = lib.Daemon(tmp_path_factory.mktemp("many"))
    rng, root = random.Random(7), d.storages["main"]
    try:
        for i in range(260):
            run = rng.choice(["a", "a-b", "a/c", "b", "b/b"])
            end = i if rng.random() < 0.9 else f"{i}x"  # without a step
            put(root, f"{run}/{rng.choice(['step-', 'final', 's'])}{end}", rng.randrange(1, 60) * 1000, rng.randrange(5))
        for i in range(6):
            Crafted(root, "torch-2.15.0/plain", f"real/step-{i}")
            (root / f"one-{i}.pt").write_bytes(b"\x80\x02}q\x00." + b" " * i)
        everything = found(d)
        for c in rng.sample(everything, 12):
            held(d, c["name"])
        for i in range(3):
            d.api.run("verify", source={"storage": "main", "name": f"real/step-{i}"}, level="digest" if i else "structure")
        yield d
    finally:
        d.discard()


def value(c, key):
    if key == "time":
        return c["modified_at"]
    return c.get(key)


def oracle(items, key, falls):
    """Python's own order: those without the number last, then by the name in the same direction."""
    known = [c for c in items if value(c, key) is not None]
    rest = [c for c in items if value(c, key) is None]

    def rank(c):
        second = (-1 if c["step"] is None else c["step"]) if key == "time" else 0
        return value(c, key), second, os.fsencode(c["name"])
    return sorted(known, key=rank, reverse=falls) + sorted(rest, key=lambda c: os.fsencode(c["name"]), reverse=falls)


def run_of(c):
    return c["name"].rpartition("/")[0] or "-"


FILTERS = {
    "run=a": lambda c: run_of(c) == "a",
    "run=a*": lambda c: run_of(c).startswith("a"),
    "run!=a* AND run!=-": lambda c: run_of(c)[0] not in "a-",
    "run=-": lambda c: "/" not in c["name"],
    "name=*1": lambda c: c["name"].endswith("1"),
    'name="*/step-*" AND step>=100 AND step<200': lambda c: "/step-" in c["name"] and c["step"] is not None and 100 <= c["step"] < 200,
    "step!=7": lambda c: c["step"] not in (None, 7),
    "bytes>2 AND bytes<=4": lambda c: 2 < c["bytes"] <= 4,
    "held=true": lambda c: "hold" in c,
    "held=false AND run=b": lambda c: "hold" not in c and run_of(c) == "b",
    "format=dcp": lambda c: c["format"] == "dcp",
    "format!=dcp": lambda c: c["format"] != "dcp",
    "verified=verified": lambda c: c["verified"] and c["verified"]["state"] == "verified",
    "verified!=none": lambda c: c["verified"],
    "time>=1970-01-01T08:20:00Z": lambda c: c["modified_at"] >= "1970-01-01T08:20:00Z",
    "metrics.loss<1": lambda c: False,
    "labels.team!=x AND run=real": lambda c: run_of(c) == "real",
}


def test_a_verdict_after_others_went(spawn):
    """The look-up worker that knows the verdicts hears of this one, too."""
    d = spawn()
    first, second, third = (Crafted(d.storages["main"], name=f"run{i}/step-1") for i in range(3))
    for c in (first, second):
        d.api.run("verify", source=c.ref)
    assert len(d.api.get("/v1/checkpoints/main?filter=verified%21%3Dnone").ok(200)["checkpoints"]) == 2
    for c in (first, second):
        d.api.run("delete", target=c.ref)
    d.api.run("verify", source=third.ref)
    assert [c["name"] for c in d.api.get("/v1/checkpoints/main?filter=verified%21%3Dnone").ok(200)["checkpoints"]] == [third.name]


def test_filters_as_python_has_them(many):
    everything = found(many, sort="name")
    assert names(everything) == names(found(many))
    assert len(everything) == 272 and names(everything) == sorted(names(everything), key=os.fsencode)
    for text, wants in FILTERS.items():
        got = found(many, 50, filter=text)
        assert names(got) == [c["name"] for c in everything if wants(c)], text
    assert names(found(many, run="a")) == [c["name"] for c in everything if run_of(c) == "a"]
    assert names(found(many, run="-")) == [c["name"] for c in everything if "/" not in c["name"]]
    assert found(many, run="nope") == [] and names(found(many, prefix="b/s", sort="name")) == names(found(many, prefix="b/s"))
    assert sum(FILTERS["verified=verified"](c) is True for c in everything) == 2
    assert sum(FILTERS["held=true"](c) for c in everything) == 12


@pytest.mark.parametrize("key", ["name", "time", "step", "bytes", "metrics.loss"])
@pytest.mark.parametrize("falls", [False, True])
def test_orders_as_python_has_them(many, key, falls):
    everything = found(many, sort="step")
    want = names(oracle(everything, key, falls))
    for size in (7, 100, 1000):
        assert names(found(many, size, sort="-" * falls + key)) == want, size
    run = [n for n in want if n.startswith("a/") and not n.startswith("a/c/")]
    assert names(found(many, 5, sort="-" * falls + key, run="a")) == run
    if key == "time" and falls:
        got = many.api.get("/v1/runs/main/a?page_size=1000").ok(200)
        assert names(got["checkpoints"]) == run and got["aliases"]["latest"] == run[0]


def test_a_run_in_another_order(many):
    got = many.api.get("/v1/runs/main/real?sort=step&filter=step%3E1&page_size=2").ok(200)
    assert got["count"] == 6 and got["aliases"]["latest-verified"] and names(got["checkpoints"]) == ["real/step-2", "real/step-3"]
    token = urllib.parse.quote(got["next_page_token"])
    got = many.api.get(f"/v1/runs/main/real?sort=step&filter=step%3E1&page_size=2&page_token={token}").ok(200)
    assert names(got["checkpoints"]) == ["real/step-4", "real/step-5"] and "next_page_token" not in got


def test_words_that_mean_nothing(many):
    def asked(**query):
        return many.api.get("/v1/checkpoints?" + urllib.parse.urlencode(query))
    p = asked(storage="main", filter="step>=1 AND stp<5").problem("validation_failed", status=422)
    assert "character 13" in p["detail"] and 'did you mean "step"' in p["detail"]
    assert "character 2" in asked(storage="main", sort="-tme").problem("validation_failed")["detail"]
    assert "storage" in asked(sort="-time").problem("invalid_request", status=400)["detail"]
    asked(storage="main", sort="step", page_token="main:nonsense").problem("invalid_request")
    asked(storage="nope", sort="step").problem("not_found")
    asked(storage="main", run="../x").problem("name_invalid")
    many.api.get("/v1/checkpoints/main?filter=x").problem("validation_failed")
    many.api.get("/v1/runs/main/a?filter=x").problem("validation_failed")
    many.api.get("/v1/runs/main/a?sort=x").problem("validation_failed")
    token = page(many, storage="main", sort="step", page_size=1)["next_page_token"]
    asked(storage="main", sort="-step", page_token=token).problem("invalid_request")
    assert len(page(many, filter="run=a", page_size=3)["checkpoints"]) == 3  # of all storages, in the order of names


def test_the_list_follows_the_disk(spawn):
    """Copied in, moved, replaced, removed, held: the very next question knows."""
    d = spawn()
    root = d.storages["main"]
    for i in range(5):
        put(root, f"r/step-{i}", 1000 + i)

    def newest():
        return names(found(d, sort="-time", filter="run=r*"))
    assert newest() == [f"r/step-{i}" for i in (4, 3, 2, 1, 0)]
    shutil.copytree(root / "r/step-2", root / "r/step-9", copy_function=shutil.copy)  # as cp -r
    assert newest()[0] == "r/step-9" and d.api.get("/v1/runs/main/r").ok(200)["aliases"]["latest"] == "r/step-9"
    shutil.rmtree(root / "r/step-9")
    assert newest()[0] == "r/step-4"
    (root / "r/step-0").rename(root / "r/step-10")
    os.utime(root / "r/step-10/.metadata", (5000, 5000))
    assert newest()[0] == "r/step-10"
    put(root, "fresh", 9000)
    shutil.rmtree(root / "r/step-10")
    (root / "fresh").rename(root / "r/step-10")  # another one of that name
    assert found(d, sort="-time")[0]["modified_at"] == "1970-01-01T02:30:00Z"
    (root / "r/step-1/.metadata").unlink()
    assert "r/step-1" not in newest()
    (root / "r/step-1/.metadata").write_bytes(b"y" * 50)
    assert newest()[0] == "r/step-1" and names(found(d, sort="-bytes"))[0] == "r/step-1"
    with (root / "r/step-3/.metadata").open("ab") as f:  # no directory shows it
        f.write(b"z" * 100)
    assert names(found(d, sort="-bytes"))[0] == "r/step-3" and newest()[0] == "r/step-3"
    held(d, "r/step-4")
    assert names(found(d, filter="held=true")) == ["r/step-4"]
    held(d, "r/step-4", False)
    assert found(d, filter="held=true") == []
    (root / "r/.metadata").write_bytes(b"x")  # the folder becomes a checkpoint itself
    assert names(found(d, sort="step")) == ["r"]
    (root / "r/.metadata").unlink()
    assert len(found(d, sort="step")) == 5
    for i in range(40):  # more than are looked at with each question
        put(root, f"q/step-{i}", 1000)
    lib.wait_for(lambda: time.time() - (root / "q/step-39").stat().st_ctime > 3.1, what="marks that prove something")
    assert len(newest()) == 5 and len(found(d, sort="step")) == 45
    (root / "q/step-7/.metadata").unlink()  # a checkpoint becomes a folder of others, which a list by names notices first
    put(root, "q/step-7/a", 9000)
    assert "q/step-7/a" in names(d.api.get("/v1/checkpoints/main?prefix=q/step-7").ok(200)["checkpoints"])
    assert found(d, sort="-time", filter="run=q*")[0]["name"] == "q/step-7/a"
    shutil.rmtree(root / "q")
    (root / "one.pt").write_bytes(b"\x80\x02}q\x00.")
    held(d, "one.pt")
    assert names(found(d, filter="held=true AND run=-")) == ["one.pt"]
    held(d, "one.pt", False)
    assert found(d, filter="held=true") == []


def test_pages_while_rows_come(spawn):
    """Nothing is shown twice or left out that was there all the time, whatever comes and goes between the pages."""
    d, rng = spawn(), random.Random(3)
    root = d.storages["main"]
    for i in range(60):
        put(root, f"r/step-{i}", 1000 + rng.randrange(20))
    for sort in ("-time", "step", "name", "-bytes"):
        there = {c["name"] for c in found(d, sort=sort)}
        stays = set(rng.sample(sorted(there), 30))
        got, token = [], None
        while True:
            p = page(d, storage="main", sort=sort, page_size=7, **({"page_token": token} if token else {}))
            got += names(p["checkpoints"])
            token = p.get("next_page_token")
            if not token:
                break
            put(root, f"r/new-{sort}-{len(got)}", 1000 + rng.randrange(20), rng.randrange(4))
            gone = rng.choice(sorted(there - stays))
            there.discard(gone)
            shutil.rmtree(root / gone)
        assert len(got) == len(set(got)) and stays <= set(got)


def test_a_new_daemon_knows_the_same(spawn, tmp_path):
    """What is kept is a cache: without the journal all is found again; a second daemon on the storage says the same."""
    d = spawn()
    root = d.storages["main"]
    for i in range(20):
        put(root, f"r/step-{i}", 1000 + i % 7)
    held(d, "r/step-3")
    held(d, "r/step-5")
    queries = [{"sort": "-time"}, {"filter": "held=true"}, {"run": "r", "sort": "-step"}]
    before = [found(d, **q) for q in queries]
    runs = d.api.get("/v1/runs?storage=main").ok(200)
    other = lib.Daemon(tmp_path / "other", {"main": root})
    try:
        assert [found(other, **q) for q in queries] == before
        held(other, "r/step-5", False)
        put(root, "r/step-99", 9000)
        shutil.rmtree(root / "r/step-0")
        for q in queries:
            assert found(d, **q) == found(other, **q)
        assert names(found(d, filter="held=true")) == ["r/step-3"]
        assert found(d, sort="-time")[0]["name"] == "r/step-99"
    finally:
        other.discard()
    put(root, "r/step-0", 1000)
    shutil.rmtree(root / "r/step-99")
    d.stop()
    for f in d.state.glob("journal*"):
        f.unlink()
    d.start()
    held(d, "r/step-5")
    assert [names(found(d, **q)) for q in queries] == [names(items) for items in before]
    now = d.api.get("/v1/runs?storage=main").ok(200)
    for key in ("run", "checkpoints", "latest"):
        assert [r[key] for r in now["runs"]] == [r[key] for r in runs["runs"]]


def test_a_restart_forgets_nothing_and_believes_nothing(spawn):
    """What was found out of checkpoints outlives workers and daemons, in a file. What changed meanwhile is looked at; so is all if the file
    is lost or damaged."""
    d = spawn()
    root, kept = d.storages["main"], d.state / "catalogue.main.cache"
    for i in range(100):
        put(root, f"r/step-{i}", 1000 + i)
    Crafted(root, "torch-2.15.0/plain", "real/step-1")
    lib.wait_for(lambda: time.time() - (root / "real/step-1").stat().st_ctime > 3.1, what="marks that prove something")

    def question():
        return found(d, sort="-time"), found(d, filter="held=true"), d.api.get("/v1/runs?storage=main").ok(200)["runs"]

    def again():
        d.kill()
        d.start()
        return question()
    first = question()
    size = kept.stat().st_size
    assert len(first[0]) == 101 and size > 101 * 300 and kept.stat().st_mode & 0o777 == 0o600
    assert again() == first and kept.stat().st_size == size  # of what is known no entry is made anew
    d.kill_workers()
    assert question() == first and kept.stat().st_size == size
    whole = kept.read_bytes()
    for damaged in whole[:-1], whole[:size // 2] + bytes([whole[size // 2] ^ 1]) + whole[size // 2 + 1:], b"x" * 5000, b"":
        kept.write_bytes(damaged)
        assert again() == first and kept.stat().st_size == size
    d.kill()
    (root / "r/step-1/.metadata").unlink()
    (root / "r/step-2").rename(root / "r/step-200")
    shutil.rmtree(root / "r/step-3")
    put(root, "new", 9000)
    shutil.rmtree(root / "r/step-4")
    (root / "new").rename(root / "r/step-4")
    with (root / "r/step-99/.metadata").open("ab") as f:  # no directory shows it
        f.write(b"z" * 100)
    shutil.rmtree(root / "real")
    d.start()
    held(d, "r/step-5")
    items, holds, _ = question()
    assert names(items)[:2] == ["r/step-99", "r/step-4"] and names(holds) == ["r/step-5"]
    assert sorted(names(items)) == sorted([f"r/step-{i}" for i in range(100) if i not in (1, 2, 3)] + ["r/step-200"])
    kept.unlink()
    assert again()[:2] == (items, holds)


def test_metrics_labels_and_steps_of_saves(spawn):
    """What saves say of themselves is found, sorted by and shown, by the API and dcpctl; a save over it counts at once."""
    d = spawn()
    d.put("sd", [lib.image({"a": ("U8", [64], bytes(64))})])

    def save(i, loss, **more):
        d.api.run("save", source={"state_dict": "sd"}, target={"storage": "main", "name": f"run/step-{i}"},
                  metrics={"loss": loss, "acc": -i}, labels={"team": "vision models" if i % 2 else "text"}, **more)
    for i, loss in enumerate([3.0, 1.5, 2.5, 0.5, 1e9]):
        save(i, loss)
    put(d.storages["main"], "run/of-another-tool", 1000)
    by_loss = [f"run/step-{i}" for i in (3, 1, 2, 0, 4)]
    assert names(found(d, 2, sort="metrics.loss")) == [*by_loss, "run/of-another-tool"]
    assert names(found(d, 2, sort="-metrics.loss"))[:5] == by_loss[::-1]
    assert names(found(d, filter="metrics.loss<2 AND metrics.acc<=-3")) == ["run/step-3"]
    assert names(found(d, filter='labels.team="vision models"')) == ["run/step-1", "run/step-3"]
    assert "run/of-another-tool" in names(found(d, filter="labels.team!=text"))
    assert names(found(d, filter="dcpd=false")) == ["run/of-another-tool"]
    newest = [f"run/step-{i}" for i in (4, 3, 2, 1, 0)]
    assert names(found(d, sort="-time")) == [*newest, "run/of-another-tool"]
    assert names(d.api.get("/v1/runs/main/run").ok(200)["checkpoints"])[:5] == newest
    digests = {c["content_digest"] for c in found(d, filter="dcpd=true")}
    assert len(digests) == 1 and len(found(d, filter=f"content_digest={digests.pop()}")) == 5
    save(4, 0.1, options={"overwrite": True})
    assert names(found(d, sort="metrics.loss"))[0] == "run/step-4"
    d.api.run("verify", source={"storage": "main", "name": "run/step-2"}, level="digest")
    assert names(found(d, filter="verified=verified")) == ["run/step-2"]
    assert d.api.get(d.api.storage_path("main", "run@latest-verified")).ok(200)["name"] == "run/step-2"
    d.api.run("delete", target={"storage": "main", "name": "run/step-2"})
    assert found(d, filter="verified=verified") == []
    d.api.get(d.api.storage_path("main", "run@latest-verified")).problem("not_found")

    def ls(*args):
        r = d.ctl(*args)
        assert r.returncode == 0, r
        return [word for line in r.stdout.splitlines() for word in line.split() if word.startswith("run/")]
    assert ls("ls", "main", "--sort", "metrics.loss", "--limit", "2") == ["run/step-4", "run/step-3"]
    assert ls("ls", "main:run/step", "--filter", "metrics.loss<1 AND step>=4") == ["run/step-4"]
    assert ls("ls", "--run", "run", "--filter", "labels.team=text") == ["run/step-0", "run/step-4"]
    assert ls("runs", "main:run", "--sort", "step", "--filter", "step>0", "--limit", "2")[-2:] == ["run/step-1", "run/step-3"]
    assert "did you mean" in d.ctl("ls", "main", "--filter", "stp>1").stderr
    assert d.ctl("ls", "main", "--limit", "0").returncode == 2


@pytest.mark.long
def test_a_page_whose_checkpoints_went_meanwhile(spawn):
    """Of very many, those of a page are looked at again: as one after the other turns out to have gone, others take their places."""
    d = spawn()
    for i in range(3000):
        put(d.storages["main"], f"run/step-{i}", 1000)

    def newest():
        return names(d.api.get("/v1/runs/main/run?sort=-step&page_size=1").ok(200)["checkpoints"])
    assert newest() == ["run/step-2999"]
    for sort in ("step", "-bytes"):  # page behind page, of one order that is kept, while another question comes in between
        want = sorted(range(3000), key=(lambda i: i) if sort == "step" else lambda i: f"run/step-{i}".encode(), reverse=sort[0] == "-")
        got = []
        token = ""
        while token is not None:
            p = d.api.get(f"/v1/checkpoints?storage=main&sort={sort}&page_size=700&page_token={urllib.parse.quote(token)}").ok(200)
            got += names(p["checkpoints"])
            token = p.get("next_page_token")
            assert newest() == ["run/step-2999"]
        assert got == [f"run/step-{i}" for i in want]
    for i in range(2950, 3000):
        (d.storages["main"] / f"run/step-{i}/.metadata").unlink()
    assert newest() == ["run/step-2949"]
