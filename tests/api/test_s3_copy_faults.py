"""Copies to object storage that replace a checkpoint file by file, for their files have given names: kills, lost answers and other writers
between the claim, the files and the commit."""
import random
import threading

import pytest
from s3_server import error as error_text
from test_s3 import MB, loads, names, ref, saved, state
from test_s3_faults import HARMLESS, calm, d, other, place, problem, proxy, s3  # noqa: F401

import dcpd as lib


@pytest.mark.long
def test_a_copy_that_is_killed_leaves_its_name_free(d, proxy, s3):
    """With folders, and with data that has the number of another attempt: all of it is taken back, and the copy is made anew."""
    name, images = saved(d)
    local, there = f"killed/{lib.fresh()}", f"killed/{lib.fresh()}"
    assert d.ctl("cp", f"s3:{name}", f"main:{local}").returncode == 0
    below = d.storages["main"] / local / "tokenizer/extra"
    below.mkdir(parents=True)
    (below / "vocab.json").write_text("{}")
    (below.parent / "words").write_text("one two")
    commits, struck = [], threading.Event()

    def fault(verb, path, _):
        """The second PUT of .metadata takes the claim's place: all files are there by then."""
        if verb == "PUT" and path.endswith(f"{there}/.metadata"):
            commits.append(path)
            if len(commits) == 2:
                struck.set()
                return 1.0

    proxy.fault = fault
    job = d.api.submit("replicate", source=ref("main", local), target=ref("s3", there))["id"]
    assert struck.wait(20)
    assert any("tokenizer" in k for k in s3.keys(f"{there}/"))
    d.kill_workers()
    end = d.api.wait(job, 60)
    if end["state"] != "succeeded":
        d.api.run("replicate", source=ref("main", local), target=ref("s3", there))
    loads(d, there, images)
    d.api.run("delete", target=ref("s3", there))
    assert s3.keys(f"{there}/") == []
    saved(d, there)


@pytest.mark.long
@pytest.mark.parametrize("step", ["commit", *(pytest.param(s, marks=pytest.mark.long) for s in ("claim", "file", "clear"))])
def test_a_copy_that_replaces_and_is_killed_goes_on(d, other, proxy, s3, step):
    """Old files are gone from the first file on: the new checkpoint is made of what is on the server. Before, the old one stays."""
    local, newer = saved(d, storage="main", size=9 * MB), saved(d, storage="main", size=9 * MB)
    there, commits, struck, seen = f"killed/{lib.fresh()}", [], threading.Event(), []
    before = set(s3.keys(".dcpd/"))
    assert d.ctl("cp", f"main:{local[0]}", f"s3:{there}").returncode == 0

    def fault(verb, path, _):
        commits.extend([path] if verb == "PUT" and path.endswith(f"{there}/.metadata") and "uploadId" not in path else [])
        completes = verb == "POST" and "uploadId" in path and f"{there}/" in path
        if struck.is_set() or not {"claim": len(commits) == 1 and verb == "PUT" and path.endswith(".metadata"),
                                   "file": completes and "__1_0" in path, "commit": completes and ".metadata" in path,
                                   "clear": verb == "POST" and "?delete" in path}[step]:
            return None
        seen.append(names(other))
        struck.set()
        return "cut"

    proxy.fault = fault
    job = d.api.submit("replicate", source=ref("main", newer[0]), target=ref("s3", there), options={"overwrite": True})["id"]
    assert struck.wait(30)
    d.kill_workers()
    end = d.api.wait(job, 60)
    loads(d, there, newer[1] if end["state"] == "succeeded" or step != "claim" else local[1])
    verified = d.api.run("verify", source=ref("s3", there), level="values")["result"]
    assert verified["unverified_bytes"] == 0 and verified["verified_bytes"] > 0, verified
    if step != "claim":  # else it waits until no request of that process can come
        lib.wait_for(lambda: set(s3.keys(".dcpd/")) <= before, 20, "marks of attempts gone")
        assert len([k for k in s3.keys(f"{there}/") if "notes" not in k]) == 5
    assert there not in seen[0] or step in ("claim", "clear"), "nobody sees files of both"


@pytest.fixture(scope="module")
def copies(d, other):
    """Checkpoints of two ranks and of one, which both daemons have: copies of them have the same keys."""
    images = {"old": state(), "new": state(world=1), "last": state()}
    return {k: [saved(x, storage="main", images=i) for x in (d, other)] for k, i in images.items()}


@pytest.mark.long
@pytest.mark.parametrize("last, moment", [("old", "commit"), ("last", "clear"), pytest.param("last", "commit", marks=pytest.mark.long)])
def test_files_that_come_behind_a_commit_stay(d, other, proxy, s3, copies, last, moment):
    """Of three copies to one name the first and the last have files that the second lacks. The second's host is stopped behind its
    commit, or before the request that removes files of the first, until the last is there. The same bytes at "clear": s3_store.h says
    what is left open."""
    there, done = f"names/{lib.fresh()}", []

    def copy(daemon, name, at):
        daemon.api.run("replicate", source=ref("main", name), target=ref("s3", at), options={"overwrite": True})

    def act():
        if not done:
            done.append(1)
            copy(other, copies[last][1][0], there)

    def heard(verb, path, head, status):
        if moment == "commit" and status == 200 and verb == "POST" and f"{there}/.metadata?uploadId=" in path:
            act()

    copy(d, copies["old"][0][0], there)
    assert any("__1_" in k for k in s3.keys(f"{there}/"))
    proxy.heard = heard
    proxy.fault = lambda verb, path, _: act() if moment == "clear" and verb == "POST" and "?delete" in path else None
    try:
        copy(d, copies["new"][0][0], there)
    finally:
        proxy.heard, proxy.fault = lambda *_: None, lambda *_: None
    assert done
    loads(other, there, copies[last][1][1])


@pytest.mark.long
def test_a_claim_that_comes_when_its_attempt_was_given_up_goes_on(d, proxy, s3):
    """It has taken the place of the old commit: what its mark lists is the only checkpoint there is."""
    (local, _), (newer, images) = saved(d, storage="main"), saved(d, storage="main")
    there, before = f"late/{lib.fresh()}", set(s3.keys(".dcpd/"))
    assert d.ctl("cp", f"main:{local}", f"s3:{there}").returncode == 0
    proxy.age = 15 * 60 - 6
    proxy.fault = lambda verb, path, _: ("conflict" if proxy.late else "late") if path.endswith(f"{there}/.metadata") and verb == "PUT" \
        else None
    d.api.fails("replicate", "state_conflict", source=ref("main", newer), target=ref("s3", there), options={"overwrite": True})
    proxy.fault = lambda *_: None
    [mark] = set(s3.keys(".dcpd/")) - before
    assert b" 200 " in proxy.release()[0]
    lib.wait_for(lambda: mark not in s3.keys(".dcpd/"), 30, "the sweep")
    loads(d, there, images)


@pytest.mark.long
def test_a_copy_that_replaces_and_cannot_go_on_leaves_what_it_needs(d, proxy, s3):
    """A right is withdrawn between its claim and its files: the outcome is open, and once the copy may be written again it is there."""
    (local, _), (newer, images) = saved(d, storage="main"), saved(d, storage="main")
    there = f"right/{lib.fresh()}"
    assert d.ctl("cp", f"main:{local}", f"s3:{there}").returncode == 0
    proxy.fault = lambda verb, path, _: "denied" if verb == "POST" and "uploadId" in path and f"{there}/__" in path else None
    d.api.fails("replicate", "not_durable", source=ref("main", newer), target=ref("s3", there), options={"overwrite": True})
    d.kill()
    proxy.fault = lambda *_: None
    d.start()
    lib.wait_for(lambda: there in names(d), 20, "the new checkpoint")
    loads(d, there, images)


@pytest.mark.long
@pytest.mark.parametrize("there_was", [False, True])
def test_files_that_were_put_once_are_not_put_again_empty(d, proxy, s3, tmp_path, there_was):
    """A writer that heeds no claim comes between a copy's files and its commit: these files are spent, and no second try takes them."""
    (source, _), (other, _) = saved(d, storage="main", size=3000 if there_was else MB), saved(d, storage="main")
    name, commits = f"twice/{lib.fresh()}", []
    if there_was:
        assert d.ctl("cp", f"main:{source}", f"s3:{name}").returncode == 0
    other = d.storages["main"] / other / ".metadata"

    def fault(verb, path, _):
        at = f"{name}/.metadata" in path and (verb == "PUT" and "uploadId" not in path or verb == "POST" and "uploadId" in path)
        commits.extend([path] if at else [])
        if at and len(commits) == 2:
            s3.put(f"{name}/.metadata", other)

    proxy.fault = fault
    d.api.fails("replicate", "state_conflict", source=ref("main", source), target=ref("s3", name), options={"overwrite": True})
    proxy.fault = lambda *_: None
    s3.get(f"{name}/.metadata", 0, other.stat().st_size, tmp_path / "left")
    assert (tmp_path / "left").read_bytes() == other.read_bytes()


@pytest.mark.long
def test_a_copy_that_goes_on_takes_nothing_back_in_doubt(d, proxy, s3):
    """A file was made and its answer is lost; whether it is there cannot be asked when the commit is carried on: later it can."""
    (local, _), (newer, images) = saved(d, storage="main", size=MB), saved(d, storage="main", size=MB)
    there, struck, killed, asked = f"doubt/{lib.fresh()}", threading.Event(), threading.Event(), []
    assert d.ctl("cp", f"main:{local}", f"s3:{there}").returncode == 0

    def fault(verb, path, _):
        if verb == "POST" and "uploadId" in path and f"{there}/__1_0" in path:
            if struck.is_set():
                killed.wait(20)
            struck.set()
            return "cut" if killed.is_set() else "lost"
        if killed.is_set() and verb == "GET" and "uploadId" in path and f"{there}/__1_0" in path:
            text = error_text("NoSuchUpload")
            return lambda *_: (b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(text), text)
        if killed.is_set() and verb in ("HEAD", "GET") and f"{there}/__1_0" in path and "uploadId" not in path:
            asked.append(path)
            return "denied"

    proxy.fault = fault
    job = d.api.submit("replicate", source=ref("main", newer), target=ref("s3", there), options={"overwrite": True})["id"]
    assert struck.wait(30)
    d.kill_workers()
    killed.set()
    d.api.wait(job, 60)
    assert asked
    d.kill()
    proxy.fault = lambda *_: None
    d.start()
    lib.wait_for(lambda: there in names(d), 20, "the new checkpoint")
    loads(d, there, images)


@pytest.mark.long
def test_a_copy_replaces_through_a_bad_network(d, proxy, s3):
    copies = [saved(d, storage="main", size=9 * MB) for _ in range(2)]
    there, rng = f"bad/{lib.fresh()}", random.Random(lib.fresh())
    proxy.fault = lambda *_: rng.choice(HARMLESS) if rng.random() < 0.15 else None
    for i, (name, images) in enumerate(copies * 2):
        d.api.run("replicate", source=ref("main", name), target=ref("s3", there), options={"overwrite": i > 0})
        loads(d, there, images)


@pytest.mark.long
def test_of_a_copy_and_a_save_that_replace_one_wins(d, other, proxy):
    """Another's commit comes before the claim: the copy replaces that one; behind it: the save is refused, and the copy is there."""
    for when in (1, 2):
        (local, images), (there, _) = saved(d, storage="main"), saved(other)
        tries, errors = [], []

        def fault(verb, path, _):
            if verb == "PUT" and path.endswith(f"{there}/.metadata") and "uploadId" not in path or \
                    verb == "POST" and "uploadId" in path and f"{there}/.metadata" in path:
                tries.append(path)
                if len(tries) == when:
                    errors.append(problem(other, state(), there, options={"overwrite": True}))

        proxy.fault = fault
        d.api.run("replicate", source=ref("main", local), target=ref("s3", there), options={"overwrite": True})
        proxy.fault = lambda *_: None
        assert (errors[0] is None) == (when == 1), errors
        loads(d, there, images)
