"""Look-ups beside each other, on a file system that is slow or hangs (tests/fakes/libhost.c): saves do not wait for lists, and
`stalled` means that the file system does not answer, not that a question is long or that many are asked."""
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import dcpd as lib
import host


@pytest.fixture
def slow(spawn):
    """slow(deadline) → a daemon whose workers find entries named slow-… and hang-… as libhost.c says, and a sealed state dict `s`."""
    def make(deadline="10s"):
        d = spawn(args=["--lookup-deadline", deadline], env=host.SLOW_FILES)
        d.put("s", [lib.image({"w": ("U8", [8], b"abcdefgh")})])
        save(d, "saved/first")  # the gang is warm
        return d
    return make


def save(d, name):
    return d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": name})


def directory(d, name, entries):
    """A directory of the storage with empty files of these names."""
    at = d.storages["main"] / name
    at.mkdir(parents=True)
    for e in entries:
        (at / e).touch()
    return at


def state(d):
    return d.api.get("/v1/storages").ok(200)["storages"][0]["state"]


def names(d, page, prefix=""):
    """Of this page and those behind it: one whose time is up is shorter than asked for."""
    found = []
    while True:
        found += [c["name"] for c in page["checkpoints"]]
        if "next_page_token" not in page:
            return found
        page = d.api.get(f"/v1/checkpoints/main?prefix={prefix}&page_token={page['next_page_token']}").ok(200)


def busy(d):
    """Waits until a look-up worker has a question."""
    lib.wait_for(lambda: any(w["role"] == "lookup" and w["state"] == "busy" for w in d.api.get("/v1/workers").ok(200)["workers"]), 5)


class Asked:
    """Requests under way, one thread each."""

    def __init__(self, d, paths):
        self.pool = ThreadPoolExecutor(len(paths))
        self.futures = [self.pool.submit(d.api.get, p) for p in paths]

    def running(self):
        return sum(not f.done() for f in self.futures)

    def answers(self):
        return [f.result(600) for f in self.futures]


@pytest.mark.long
def test_a_save_does_not_wait_for_lists(slow):
    """Lists that take many seconds each occupy their own workers: a save is accepted and ends while all of them run."""
    d = slow("60s")
    directory(d, "many", [f"slow-{i}.pt" for i in range(100)])
    lists = Asked(d, [f"/v1/checkpoints/main?prefix={p}" for p in ("", "m", "ma", "man", "many")])
    busy(d)
    save(d, "saved/beside")
    assert lists.running() == 5, "the save has waited for a list"
    assert all(a.status == 200 for a in lists.answers())


@pytest.mark.long
def test_a_short_list_does_not_wait_for_long_ones(slow):
    """Lists of directories that are slow to read take turns: a short one is answered while three long ones go on. Those end whole."""
    d = slow("60s")
    for i in range(60):
        directory(d, f"many/{i:03}", [f"slow-{i}.pt"])
    directory(d, "quick", ["q.pt"])
    lists = Asked(d, [f"/v1/checkpoints/main?prefix={p}" for p in ("m", "ma", "man")])
    busy(d)
    assert [c["name"] for c in d.api.get("/v1/checkpoints/main?prefix=quick").ok(200)["checkpoints"]] == ["quick/q.pt"]
    assert lists.running() == 3, "the short list has waited for a long one"
    for a in lists.answers():
        assert names(d, a.ok(200), "m") == [f"many/{i:03}/slow-{i}.pt" for i in range(60)]


@pytest.mark.long
def test_a_slow_list_is_no_stalled_storage(slow):
    """A list that takes several times the look-up deadline, in many short system calls, ends; the storage is `ok` all the time."""
    d = slow("1s")
    directory(d, "many", [f"slow-{i}.pt" for i in range(100)])
    lists = Asked(d, ["/v1/checkpoints/main?page_size=1000"])
    seen = set()
    while lists.running():
        seen.add(state(d))
        time.sleep(0.05)
    assert seen == {"ok"}
    found = names(d, lists.answers()[0].ok(200))
    assert len(found) == 101 and "many/slow-99.pt" in found


def test_many_questions_are_no_stalled_storage(slow):
    """Questions that wait longer than they may are told to come again; none says that the storage is stalled, and it is not."""
    d = slow("1s")
    for i in range(8):
        directory(d, f"c{i}", [".metadata", *(f"slow-{k}" for k in range(20))])
    asked = Asked(d, [f"/v1/checkpoints/main/c{i}/files" for i in range(8)])
    save(d, "saved/beside")
    answers = asked.answers()
    assert {a.status for a in answers} == {200, 503} and state(d) == "ok"
    for a in answers:
        if a.status == 503:
            assert a.problem("busy")["retryable"] and a.headers["Retry-After"] == "1"


def test_a_question_that_hangs_is_a_stalled_storage(slow):
    """A worker that stays in one system call is given up: its question fails, the storage is stalled. A probe finds at once that only one
    directory hangs, and saves go on beside it."""
    d = slow("1s")
    hung = directory(d, "c", [".metadata", "hang-1"])
    p = d.api.get("/v1/checkpoints/main/c/files").problem("storage_stalled", status=504)
    assert "main" in p["detail"]
    assert "state=stalled" in d.since_start()
    lib.wait_for(lambda: state(d) == "ok", 1, "ok again")
    save(d, "saved/beside")
    (hung / "hang-1").unlink()
    d.api.get("/v1/checkpoints/main/c/files").ok(200)


@pytest.mark.long
def test_equal_questions_are_asked_once(slow):
    """Twelve clients ask for the same files: those that come while the first are being answered get one answer together. An answer lists
    the directory twice, to see what it is and what it has."""
    d = slow("60s")
    directory(d, "c", [".metadata", *(f"slow-{k}" for k in range(40))])

    def listings():
        return d.since_start().count("slow: slow-0\n")
    alone = d.api.get("/v1/checkpoints/main/c/files").ok(200)
    once = listings()
    assert 0 < once <= 2
    answers = [a.ok(200) for a in Asked(d, ["/v1/checkpoints/main/c/files"] * 12).answers()]
    assert all(a == alone for a in answers) and len(alone["files"]) == 41
    assert 0 < listings() - once <= 4 * once, "at most four questions"
