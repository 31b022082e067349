"""Whole jobs on object storage that refuses, lies or is set up wrongly: each ends with the server's own words, and harms nothing."""
import os
import random
import re
import time

import pytest
from s3_server import ACCESS, ACCESS_NEXT, SECRET, Fake, Proxy, says
from test_s3 import loads, names, options, ref, saved, state
from test_s3_faults import calm, problem, proxy  # noqa: F401

import dcpd as lib

RIGHTS = {"GetObject": lambda verb, path: verb == "HEAD" or (verb == "GET" and not listing(path)),
          "PutObject": lambda verb, path: verb == "PUT" or (verb == "POST" and "?delete" not in path),
          "DeleteObject": lambda verb, path: verb == "DELETE" or "?delete" in path,
          "ListBucket": lambda verb, path: verb == "GET" and listing(path)}
HONEST = ("internal", "worker_lost")  # codes that no server brings about


def listing(path):
    return "list-type=2" in path


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "credentials"
    path.write_text(f"[default]\naws_access_key_id={ACCESS}\naws_secret_access_key={SECRET}\n")
    return path


@pytest.fixture(scope="module")
def d(tmp_path_factory, proxy, s3_server, keys):
    home = tmp_path_factory.mktemp("s3bad")
    d = lib.Daemon(home, {"main": home / "main", "s3": f"s3://{s3_server.bucket}/{lib.fresh('bad')}"},
                   [*options(proxy), f"--s3=s3.credentials={keys}"])
    yield d
    d.discard()


def ended(d, kind, **request):
    """The error of a job, at once or in the end; None: it succeeded."""
    answer = d.api.post("/v1/jobs", {"kind": kind, **request})
    job = d.api.wait(answer.json["id"]) if answer.status == 202 else {"error": answer.json, "state": "failed"}
    return None if job["state"] == "succeeded" else job["error"]


def storage(d, name="s3"):
    return next(s for s in d.api.get("/v1/storages").ok(200)["storages"] if s["name"] == name)


@pytest.mark.short("PutObject")
@pytest.mark.parametrize("right", RIGHTS)
def test_a_right_that_is_missing(d, proxy, right):
    """The job that needs it fails in the server's words, or does without; nothing is torn, and all works again when it is allowed."""
    kept, images = saved(d)
    denied = lambda verb, path, _: "denied" if RIGHTS[right](verb, path) else None  # noqa: E731
    proxy.fault = denied
    new = {lib.fresh("denied"): state() for _ in range(2)}
    errors = {name: problem(d, image, name) for name, image in new.items()}
    errors["overwrite"] = problem(d, images, kept, options={"overwrite": True})
    errors["verify"] = ended(d, "verify", source=ref("s3", kept), level="values")
    refused = proxy.done
    proxy.fault = lambda *_: None
    loads(d, kept, images)
    there = names(d)
    for what, error in errors.items():
        assert not error or (error["code"] == "forbidden" and "AccessDenied" in error["detail"]), (what, error)
        assert what not in new or (what in there) == (not error), what
    assert refused and (any(errors.values()) or right == "DeleteObject"), errors
    for name in new:
        if name in there:
            loads(d, name, new[name])
    proxy.fault = denied
    error = ended(d, "delete", target=ref("s3", kept))
    proxy.fault = lambda *_: None
    assert not error or (error["code"] == "forbidden" and "AccessDenied" in error["detail"]), error
    if error and kept in names(d):
        loads(d, kept, images)
        d.api.run("delete", target=ref("s3", kept))
    lib.wait_for(lambda: kept not in names(d), 20, "the removal")
    saved(d, kept)


def test_keys_that_expire_are_read_anew(d, proxy, keys):
    """In the middle of a save: its worker finds the new ones, and the job goes on."""
    expired, first = [], keys.read_text()

    def fault(verb, path, _):
        if not expired and verb == "PUT" and ".distcp" in path:
            keys.write_text(first.replace(ACCESS, ACCESS_NEXT))
            expired.append(ACCESS.encode())
        return "expired" if expired and expired[0] in proxy.head else None

    time.sleep(1.1)  # keys that were read within the last second are not read again
    proxy.fault = fault
    name, images = saved(d)
    loads(d, name, images)
    assert any(verb == "PUT" for _, verb, _ in proxy.done)
    expired[0] = b""
    error = problem(d, state(), lib.fresh())
    assert error["code"] == "forbidden" and "ExpiredToken" in error["detail"], error
    keys.write_text(first)


def test_a_clock_that_differs(spawn, s3_server, proxy):
    """The server's words and both clocks are shown; when the clock is right again, so is the storage."""
    proxy.clock = -7200
    proxy.fault = lambda *_: "skewed"
    d = spawn(("main",), start=False, env=s3_server.environment())
    d.storages["s3"] = f"s3://{s3_server.bucket}/{lib.fresh()}"
    d.args += options(proxy)
    d.start()
    lib.wait_for(lambda: "unknown" not in (storage(d)["state"], storage(d, "main")["state"]), 30)
    shown = storage(d)
    assert shown["state"] == "unavailable" and storage(d, "main")["state"] == "ok", shown
    detail = shown["problem"]["detail"]
    assert shown["problem"]["code"] == "forbidden" and "RequestTimeTooSkewed: as the test says" in detail, shown
    assert re.search(r"the server's clock: \w{3}, \d\d .* GMT, this host's: \d{4}-", detail), detail
    error = problem(d, state(), "x")
    assert error["code"] == "forbidden" and "RequestTimeTooSkewed" in error["detail"], error
    proxy.fault = lambda *_: None
    loads(d, *saved(d))


def test_redirects_of_the_endpoint_go_nowhere(tmp_path):
    """To another address of this host, as to a service beside the cloud's machine: nothing asks there, with keys or without."""
    with Fake() as secret, Fake() as moved:
        moved.script = [says(307, "TemporaryRedirect", Location=f"{secret.endpoint}/tests/x") for _ in range(1000)]
        d = lib.Daemon(tmp_path, {"main": tmp_path / "main", "s3": "s3://tests/x"}, [f"--s3=s3.endpoint={moved.endpoint}"],
                       env={"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
        try:
            lib.wait_for(lambda: storage(d)["state"] != "unknown", 30)
            shown = storage(d)
            assert shown["state"] == "unavailable" and "307 TemporaryRedirect" in shown["problem"]["detail"], shown
            error = problem(d, state(), "x")
            assert error["code"] == "storage_gone" and "redirects are not followed" in error["detail"], error
            assert moved.seen and not secret.seen
        finally:
            d.discard()


# ---------------------------------------------------------------------------------------------------------------- a server that lies


def in_head(field, value):
    return lambda head, body: (re.sub(rb"(?im)^" + field + rb": [^\r]*", field + b": " + value, head), body)


def in_body(pattern, value):
    def lie(head, body):
        lied = re.sub(pattern, value, body)
        return re.sub(rb"(?im)^content-length: \d+", b"Content-Length: %d" % len(lied), head), lied
    return lie


BOMB = b'<!DOCTYPE a [<!ENTITY a "xxxxxxxx"><!ENTITY b "&a;&a;&a;&a;">]><ListBucketResult><Contents><Key>&b;</Key>'
LIES = {
    "sizes": in_body(rb"<Size>\d+</Size>", b"<Size>4611686018427387904</Size>"),
    "sizes of nothing": in_body(rb"<Size>\d+</Size>", b"<Size>1</Size>"),
    "etags of lists": in_body(rb"<ETag>[^<]*</ETag>", b"<ETag>&quot;0&quot;</ETag>"),
    "etags": in_head(b"ETag", b'"0"'),
    "no etag": lambda head, body: (re.sub(rb"(?im)^etag: [^\r]*\r\n", b"", head), body),
    "lengths": in_head(b"Content-Length", b"4611686018427387904"),
    "lengths of no number": in_head(b"Content-Length", b"18446744073709551616"),
    "half": in_head(b"Content-Length", b"10"),
    "keys": in_body(rb"<Key>[^<]*/", b"<Key>../../../"),
    "bomb": in_body(rb"(?s)^.*<Key>[^<]*</Key>", BOMB),
    "ranges": in_head(b"Content-Range", b"bytes 0-0/1"),
    "times": in_head(b"Last-Modified", b"Fri, 31 Dec 9999 23:59:59 GMT"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies(d, proxy, lie):
    """About sizes, ETags, lengths, keys: a load brings the right bytes or an error that says what is wrong, and no worker dies of it."""
    name, images = saved(d, size=20_000)
    lied = []

    def tell(head, body):
        answer = LIES[lie](head, body)
        lied.extend([1] if answer != (head, body) else [])
        return answer

    proxy.fault = lambda verb, *_: tell if verb in ("GET", "HEAD") else None
    sd = lib.fresh()
    d.put(sd, [lib.image({k: (t, shape, bytes(len(b))) for k, (t, shape, b) in lib.Image(i).entries.items()}) for i in images])
    error = ended(d, "load", source=ref("s3", name), target={"state_dict": sd}, strict=True, options={"retries": 0})
    assert not error or (error["code"] not in HONEST and error["detail"]), error
    assert error or [i.entries for i in d.images(sd)] == [lib.Image(i).entries for i in images]
    d.drop(sd)
    if lie not in ("keys", "bomb"):  # whether the save is there is asked for 20 s then
        error = problem(d, state(), lib.fresh(), options={"retries": 0})
        assert not error or (error["code"] not in HONEST and error["detail"]), error
    assert lied
    proxy.fault = lambda *_: None
    loads(d, name, images)


def test_answers_with_bytes_that_are_others(d, proxy):
    """Some bytes of each answer, head and all, drawn at random."""
    seed = int(os.environ.get("DCPD_SEED", random.randrange(1 << 32)))
    rng = random.Random(seed)
    print(f"DCPD_SEED={seed}")
    name, images = saved(d, size=20_000)

    def tell(head, body):
        if not body or rng.random() < 0.5:
            at = rng.randrange(12, len(head) - 4)
            return head[:at] + bytes([rng.randrange(32, 127)]) + head[at + 1:], body
        at = rng.randrange(len(body))
        return head, body[:at] + bytes([rng.randrange(256)]) + body[at + 1:]

    for _ in range(100 if lib.FULL else 3):
        proxy.fault = lambda *_: tell if rng.random() < 0.3 else None
        sd = lib.fresh()
        d.put(sd, [lib.image({k: (t, shape, bytes(len(b))) for k, (t, shape, b) in lib.Image(i).entries.items()}) for i in images])
        error = ended(d, "load", source=ref("s3", name), target={"state_dict": sd}, strict=True, options={"retries": 0})
        assert not error or (error["code"] not in HONEST and error["detail"]), error
        assert error or [d.images(sd)[i].entries == lib.Image(x).entries for i, x in enumerate(images)] == [True] * len(images)
        d.drop(sd)
        error = problem(d, state(), lib.fresh(), options={"retries": 0})
        assert not error or (error["code"] not in HONEST and error["detail"]), error
        proxy.fault = lambda *_: None
    loads(d, name, images)
