"""What is removed from object storage, or put into the trash there and taken out again: holds, kills and other writers at that moment."""
import threading

import pytest
from crafted import Crafted
from test_s3 import in_trash, loads, names, ref, saved, state, undelete
from test_s3_faults import calm, d, other, place, problem, proxy, s3  # noqa: F401

import dcpd as lib


def one_file(d):
    """A checkpoint that is one object, and its source."""
    source, name = Crafted(d.storages["main"]), f"files/{lib.fresh()}.safetensors"
    d.api.run("reshard", source=source.ref, target={**ref("s3", name), "format": "safetensors"})
    return name, source


@pytest.mark.long
@pytest.mark.parametrize("what", ["delete", "delete file", "overwrite"])
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_hold_at_the_moment_of_a_removal(d, other, proxy, s3, what, when):
    """It is refused, or it is heeded."""
    name, source = one_file(d) if what == "delete file" else saved(d)
    held, images = [], state()

    def fault(verb, path, _):
        commits = path.endswith(name if what == "delete file" else f"{name}/.metadata")
        if verb == "PUT" and not held and (commits if when == "behind" else "/.dcpd/at/" in path):
            held.append(other.ctl("hold", f"s3:{name}"))

    proxy.fault = fault
    if what == "overwrite":
        error = problem(d, images, name, options={"overwrite": True})
    else:
        job = d.api.wait(d.api.submit("delete", target=ref("s3", name))["id"])
        error = None if job["state"] == "succeeded" else job["error"]
    proxy.fault = lambda *_: None
    assert held
    if when == "before":
        assert held[0].returncode == 0 and error["code"] == "checkpoint_held", (held, error)
        if what == "delete file":
            assert d.api.run("verify", source=ref("s3", name))["state"] == "succeeded"
        else:
            loads(d, name, source)
        assert d.ctl("unhold", f"s3:{name}").returncode == 0
    else:
        assert held[0].returncode != 0 and "removed or replaced" in held[0].stderr and not error, (held, error)
    if what == "overwrite" and when == "behind":
        loads(d, name, images)
        assert d.ctl("hold", f"s3:{name}").returncode == 0 and d.ctl("unhold", f"s3:{name}").returncode == 0
    elif when == "behind":
        assert s3.keys(name) == [] and s3.keys(f"{name.rpartition('/')[0]}/.{name.rpartition('/')[2]}") == []


@pytest.mark.long
def test_what_takes_the_place_of_a_file_that_is_removed_stays(d, other, proxy, s3):
    """Behind the removal's last look another saves there: it is refused, or what it saved is there."""
    name, source = one_file(d)
    ended = []

    def fault(verb, path, _):
        if verb == "DELETE" and path.endswith(name) and not ended:
            answer = other.api.post("/v1/jobs", {"kind": "reshard", "source": ref("s3", beside), "options": {"overwrite": True},
                                                 "target": {**ref("s3", name), "format": "safetensors"}})
            ended.append(other.api.wait(answer.json["id"])["state"] if answer.status == 202 else "refused")

    beside, _ = saved(d)
    proxy.fault = fault
    d.api.run("delete", target=ref("s3", name))
    proxy.fault = lambda *_: None
    assert ended and (name in s3.keys(name)) == (ended == ["succeeded"]), ended
    assert (name in names(d)) == (ended == ["succeeded"])


def test_a_removal_of_a_file_that_is_killed_goes_on(d, proxy, s3):
    """Its claim lies in the file's place; nobody takes it for a checkpoint."""
    name, source = one_file(d)
    struck = threading.Event()

    def fault(verb, path, _):
        if verb == "DELETE" and path.endswith(name):
            struck.set()
            return "cut"

    proxy.fault = fault
    job = d.api.submit("delete", target=ref("s3", name))["id"]
    assert struck.wait(20)
    assert name not in names(d) and d.ctl("show", f"s3:{name}").returncode != 0
    d.kill_workers()
    proxy.fault = lambda *_: None
    assert d.api.wait(job, 60)["state"] == "succeeded"
    assert s3.keys(name) == []


def trash(d, name):
    return d.api.delete(d.api.storage_path("s3", name) + "?trash=1h").ok(202)["id"]


def copy_or_save(d, kind):
    name, images = saved(d, storage="main" if kind == "copy" else "s3")
    if kind == "copy":
        local, name = name, f"trash/{lib.fresh()}"
        assert d.ctl("cp", f"main:{local}", f"s3:{name}").returncode == 0
    return name, images


@pytest.mark.short("claim-save")
@pytest.mark.parametrize("step, kind", [("entry", "save"), ("claim", "save"), ("kept", "copy"), ("end", "save"),
                                        pytest.param("entry", "copy", marks=pytest.mark.long),
                                        pytest.param("claim", "copy", marks=pytest.mark.long),
                                        pytest.param("end", "copy", marks=pytest.mark.long)])
def test_a_removal_into_the_trash_that_is_killed(d, proxy, s3, step, kind):
    """It is there or in the trash, whole, and never in both places or in none."""
    (name, images), struck = copy_or_save(d, kind), threading.Event()
    before, seen = set(s3.keys(".dcpd/at/")), []

    def fault(verb, path, _):
        puts = verb == "PUT"
        seen.extend([path] if puts and path.endswith("/about") else [])
        if not struck.is_set() and {"entry": puts and ".dcpd/trash" in path and path.endswith("/commit"),
                                    "claim": puts and path.endswith(f"{name}/.metadata"),
                                    "kept": puts and path.endswith("/about") and len(seen) == 3,
                                    "end": verb == "DELETE" and path.endswith(f"{name}/.metadata")}[step]:
            struck.set()
            return "lost" if step == "claim" else "cut"

    proxy.fault = fault
    job = trash(d, name)
    assert struck.wait(20)
    d.kill_workers()
    proxy.fault = lambda *_: None
    end = d.api.wait(job, 60)
    gone = end["state"] == "succeeded"
    assert (name not in names(d)) == gone and in_trash(d, name) == ([job] if gone else []), end
    if gone:
        assert undelete(d, name).ok(200)["id"] == job
    loads(d, name, images)
    if step != "entry":
        lib.wait_for(lambda: set(s3.keys(".dcpd/at/")) <= before, 20, "marks of attempts gone")
    d.api.run("delete", target=ref("s3", name))


@pytest.mark.long
def test_an_undelete_that_is_killed(d, proxy, s3):
    """Before its commit the checkpoint is in the trash again, behind it is there, when no request of the one that died can come."""
    for kind, point in (("copy", "commit"), ("save", "commit"), ("save", "behind")):
        (name, images), struck = copy_or_save(d, kind), threading.Event()
        job = trash(d, name)
        d.api.wait(job)

        def fault(verb, path, _):
            completes = verb == "POST" and "uploadId" in path and f"{name}/.metadata" in path
            if completes if point == "commit" else verb == "DELETE" and "/trash/" in path:
                struck.set()
                return "cut"

        proxy.fault = fault
        proxy.age = 0
        asks = threading.Thread(target=undelete, args=(d, name))
        asks.start()
        assert struck.wait(20)
        d.kill()
        asks.join()
        proxy.fault = lambda *_: None
        proxy.age = 16 * 60
        d.start()
        back = point == "behind"
        lib.wait_for(lambda: (name in names(d), in_trash(d, name)) == (back, [] if back else [job]), 30, f"{point} of a {kind}")
        proxy.age = 0
        if not back:
            assert undelete(d, name).ok(200)["id"] == job
        loads(d, name, images)
        d.api.run("delete", target=ref("s3", name))


def test_of_an_undelete_and_a_save_one_wins(d, other, proxy):
    """The save comes before the commit of the undelete: the checkpoint stays in the trash."""
    (name, images), done = copy_or_save(d, "save"), []
    job = trash(d, name)
    d.api.wait(job)

    def fault(verb, path, _):
        if verb == "POST" and "uploadId" in path and f"{name}/.metadata" in path and not done:
            done.append(saved(other, name))

    proxy.fault = fault
    undelete(d, name).problem("checkpoint_exists", status=409)
    proxy.fault = lambda *_: None
    loads(d, *done[0])
    assert in_trash(d, name) == [job]
    d.api.run("delete", target=ref("s3", name))
    undelete(d, name).ok(200)
    loads(d, name, images)


@pytest.mark.long
def test_of_many_that_undelete_one_wins(d, other):
    for _ in range(3):
        name, images = saved(d, f"trash/{lib.fresh()}")
        d.api.wait(trash(d, name))
        said = []
        threads = [threading.Thread(target=lambda x=x: said.append(undelete(x, name).status)) for x in (d, other, d, other)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert said.count(200) == 1 and set(said) <= {200, 404, 409}, said
        loads(d, name, images)
