"""Requests that are too large, malformed or unusual: what api/http.md says that a client gets for each of them, and what each route says of
its methods."""
import json
import pathlib
import re

import pytest
import yaml
from test_http_basics import Raw

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOST = b"Host: localhost\r\n"
PATHS = yaml.load((ROOT / "api/openapi.yaml").read_text(), yaml.CSafeLoader)["paths"]


def get(target=b"/livez", *lines, version=b"1.1"):
    return b"GET " + target + b" HTTP/" + version + b"\r\n" + HOST + b"".join(x + b"\r\n" for x in lines) + b"\r\n"


def post(*lines, body=b""):
    return get(b"/v1/jobs", b"Content-Type: application/json", *lines).replace(b"GET", b"POST", 1) + body


CHUNKED = b"Transfer-Encoding: chunked"
OURS = {   # problem+json: the connection goes on
    "path": (get(b"/v1/" + b"a" * 9000), 414, "uri_too_long"),
    "path below the head's limit": (get(b"/v1/" + b"a" * 12000), 414, "uri_too_long"),
    "query": (get(b"/v1/jobs?filter=" + b"a" * 12000), 422, "validation_failed"),
    "body": (post(b"Content-Length: 1048577", body=b" " * 1048577), 413, "payload_too_large"),
    "body in chunks": (post(CHUNKED, body=(b"10000\r\n" + b" " * 65536 + b"\r\n") * 17 + b"0\r\n\r\n"), 413, "payload_too_large"),
    "space in a header's name": (get(b"/livez", b"Content-Length : 5"), 400, "invalid_request"),
    "two lengths": (post(b"Content-Length: 2", b"Content-Length: 2", body=b"{}"), 400, "invalid_request"),
    "trailers": (post(CHUNKED, body=b"2\r\n{}\r\n0\r\nX: y\r\n\r\n"), 422, "validation_failed"),
}
CLOSED = {  # problem+json, and the connection ends
    "coding": (post(b"Transfer-Encoding: gzip", body=b"{}"), 400, "invalid_request"),
    "length and coding": (post(b"Transfer-Encoding: gzip", b"Content-Length: 2", body=b"{}"), 400, "invalid_request"),
}
LIBRARY = {  # a short page in HTML without X-Request-Id, and the connection ends
    "path beyond the head's limit": (get(b"/v1/" + b"a" * 20000), 414),
    "header line": (get(b"/livez", b"X: " + b"a" * 20000), 431),
    "headers": (get(b"/livez", *(b"X-%d: %s" % (i, b"a" * 52) for i in range(300))), 431),
    "chunk's size": (post(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk's size beyond 64 bits": (post(CHUNKED, body=b"ffffffffffffffffff\r\n{}\r\n"), 413),
    "chunk's end": (post(CHUNKED, body=b"2\r\n{}xx\r\n0\r\n\r\n"), 400),
    "length": (post(b"Content-Length: x", body=b"{}"), 400),
    "length below 0": (post(b"Content-Length: -1", body=b"{}"), 400),
    "length beyond 64 bits": (post(b"Content-Length: 99999999999999999999", body=b"{}"), 413),
    "no Host": (b"GET /livez HTTP/1.1\r\n\r\n", 400),
    "line without a colon": (get(b"/livez", b"nocolon"), 400),
    "no version": (b"GET /livez\r\n\r\n", 400),
    "HTTP/2": (get(version=b"2.0"), 505),
    "HTTP/0.9": (get(version=b"0.9"), 505),
}


@pytest.mark.parametrize("what", [*OURS, *CLOSED])
def test_dcpd_refuses_in_its_own_form(d, what):
    data, status, code = {**OURS, **CLOSED}[what]
    with Raw(str(d.socket)) as c:
        got, headers, body = c.send(data).answer()
        p = json.loads(body)
        assert (got, p["code"], headers["content-type"]) == (status, code, "application/problem+json"), (headers, body)
        assert p["request_id"] == headers["x-request-id"]
        if what in CLOSED:
            assert c.closed()
        else:
            assert c.send(get()).answer()[0] == 200


@pytest.mark.parametrize("what", LIBRARY)
def test_the_library_refuses_in_its_form(d, what):
    data, status = LIBRARY[what]
    with Raw(str(d.socket)) as c:
        try:
            c.send(data)
        except OSError:
            pass
        got, headers = c.head()
        assert (got, headers.get("connection")) == (status, "close") and "x-request-id" not in headers, headers
        assert c.closed()
    assert d.api.get("/livez").status == 200


@pytest.mark.parametrize("data", (get(b"/v1/" + b"a" * 14000), get(b"/livez", b"X: " + b"a" * 14000),
                                  get(b"/livez", b"Cookie: a=" + b"a" * 7000)))
def test_a_head_that_leaves_no_room_for_an_answer_has_none(d, data):
    with Raw(str(d.socket)) as c:
        assert c.send(data).closed() and not c.rest
    assert d.api.get("/livez").status == 200


def filled(path):
    return re.sub(r"\{id\}", "0" * 26, re.sub(r"\{rank\}", "0", re.sub(r"\{(?!id|rank)\w+\}", "none", path)))


@pytest.mark.parametrize("path", PATHS)
def test_each_route_says_what_it_takes(d, path):
    """OPTIONS: its methods. Any other: 405 with these. HEAD: GET's answer without the body. Each with an id."""
    methods = {m.upper() for m in PATHS[path] if m != "parameters"}
    allowed = methods | ({"HEAD"} if "GET" in methods else set())
    a = d.api.request("OPTIONS", filled(path))
    assert a.status == 204 and set(a.headers["Allow"].split(", ")) == allowed | {"OPTIONS"} and a.headers["X-Request-Id"]
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "BREW"} - methods:
        a = d.api.request(method, filled(path), headers={"X-Request-Id": "mine"})
        p = a.problem("method_not_allowed", status=405)
        assert set(a.headers["Allow"].split(", ")) == allowed and a.headers["X-Request-Id"] == p["request_id"] == "mine"
    if "GET" in methods and not path.endswith("/events") and path != "/metrics":
        for _ in range(10 if path == "/v1/doctor" else 1):  # what a machine has to spare changes between two looks
            whole, head = (d.api.request(m, filled(path)) for m in ("GET", "HEAD"))
            if head.headers.get("ETag") == whole.headers.get("ETag"):
                break
        assert (head.status, head.body, head.headers.get("ETag")) == (whole.status, b"", whole.headers.get("ETag"))
        assert head.headers.get("Content-Type") == whole.headers.get("Content-Type")


def test_pipelined_requests_are_answered_in_order_each_with_its_id(d):
    """Among them polls of one job, whose answer is kept between requests."""
    job = d.api.run("verify", source={"storage": "golden", "name": "torch-2.15.0/plain/checkpoint"}, level="structure")["id"].encode()
    asked = [(get(b"/v1/jobs/" + job, b"X-Request-Id: mine-%d" % i) if i % 3 == 0 else get(b"/v1/jobs/" + job), i) for i in range(60)]
    with Raw(str(d.socket)) as c:
        c.send(b"".join(data for data, _ in asked))
        ids = []
        for _, i in asked:
            status, headers, body = c.answer()
            assert status == 200 and json.loads(body)["id"] == job.decode()
            assert (headers["x-request-id"] == f"mine-{i}") == (i % 3 == 0)
            ids.append(headers["x-request-id"])
        assert len(set(ids)) == len(ids)
