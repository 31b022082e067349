"""The protocol below the API: what a proxy, a browser, a slow or a rude client sends, byte by byte."""
import fcntl
import json
import socket
import ssl
import subprocess
import sys
import termios
import threading
import time

import pytest

LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


class Raw:
    """One connection, bytes in and answers out."""

    def __init__(self, address, timeout=120):
        self.s = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self.s.settimeout(timeout)
        self.s.connect(address)
        self.rest = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.s.close()

    def send(self, data):
        self.s.sendall(data)
        return self

    def _more(self):
        got = self.s.recv(65536)
        if not got:
            raise EOFError(self.rest)
        self.rest += got

    def head(self):
        while b"\r\n\r\n" not in self.rest:
            self._more()
        head, self.rest = self.rest.split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        return int(first.split()[1]), {k.lower(): v for k, v in pairs}

    def answer(self, has_body=True):
        status, headers = self.head()
        n = int(headers.get("content-length", 0)) if has_body and status not in (204, 304) else 0
        while len(self.rest) < n:
            self._more()
        body, self.rest = self.rest[:n], self.rest[n:]
        return status, headers, body

    def closed(self):
        try:
            while self.s.recv(65536):
                pass
            return True
        except ConnectionResetError:
            return True


@pytest.fixture
def unix(d):
    return str(d.socket)


def ask(address, data):
    with Raw(address) as c:
        return c.send(data).answer()


def refused(address, data, status, code):
    got, headers, body = ask(address, data)
    assert got == status, (got, body)
    assert headers["content-type"] == "application/problem+json"
    assert json.loads(body)["code"] == code, body


def post(body, *more, length=None):
    lines = [b"POST /v1/jobs HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *more,
             b"Content-Length: %d" % (len(body) if length is None else length)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_headers_that_must_be_single(d, unix):
    refused(unix, post(b"{}", b"Content-Length: 2"), 400, "invalid_request")
    refused(unix, post(b"{}", b"Content-Type: application/json"), 400, "invalid_request")
    refused(unix, LIVE + b"Host: localhost\r\n\r\n", 400, "invalid_request")
    refused(unix, LIVE + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, "invalid_request")


def test_length_and_encoding_at_once(d, unix):
    status, _, _ = ask(unix, post(b"0\r\n\r\n", b"Transfer-Encoding: chunked"))
    assert status == 400
    status, _, _ = ask(unix, b"GET /livez HTTP/1.1\r\n\r\n")
    assert status == 400, "HTTP/1.1 without Host"
    assert ask(unix, b"GET /livez HTTP/1.0\r\n\r\n")[0] == 200, "HTTP/1.0 needs none"


def test_length_that_is_none(d, unix):
    for length in (b"x", b"-1", b"1e3", b"99999999999999999999999"):
        with Raw(unix) as c:
            c.send(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " + length
                   + b"\r\n\r\n{}")
            try:
                assert c.head()[0] in (400, 413), length
            except EOFError:
                pass
    assert ask(unix, LIVE + b"\r\n")[0] == 200


def test_methods(d, unix):
    status, headers, body = Raw(unix).send(b"HEAD /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").answer(has_body=False)
    assert status == 200 and int(headers["content-length"]) > 0
    for method in (b"TRACE", b"PATCH", b"BREW", b"PUT", b"CONNECT"):
        status, headers, body = ask(unix, method + b" /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status == 405 and "POST" in headers["allow"], (method, status)
    status, headers, _ = ask(unix, b"OPTIONS /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 204 and {"GET", "HEAD", "POST", "OPTIONS"} <= set(headers["allow"].split(", "))
    assert "access-control-allow-origin" not in headers
    assert ask(unix, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 204
    assert ask(unix, b"GET http://localhost/livez HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200, "the absolute form"


def test_connection_goes_on_after_an_error(d, unix):
    with Raw(unix) as c:
        for _ in range(3):
            c.send(post(b'{"kind":"explode"}'))
            status, _, body = c.answer()
            assert status == 422 and json.loads(body)["code"] == "unknown_kind"
            for path, wanted in ((b"/v1/nope", 404), (b"/v1/jobs?x=1", 422), (b"/v1/jobs/%zz", 400)):
                c.send(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert c.answer()[0] == wanted
        c.send(LIVE + b"\r\n" + LIVE + b"\r\n")
        assert [c.answer()[0], c.answer()[0]] == [200, 200], "pipelined"


def test_security_headers(d, unix):
    for path in (b"/livez", b"/v1/jobs", b"/v1/nope", b"/"):
        _, headers, _ = ask(unix, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"] and "server" not in headers


def test_page_without_token(d):
    tcp = d.tcp_client(token=False)
    page = tcp.get("/")
    assert page.status == 200 and page.headers["Content-Type"].startswith("text/html")
    again = tcp.get("/", headers={"If-None-Match": page.headers["ETag"]})
    assert again.status == 304 and not again.body
    for path in ("/app.js", "/style.css"):
        assert tcp.get(path).status == 200, path
    for path in ("/web/index.html", "/../VERSION", "/..%2fVERSION", "/.git/config", "/index.html%00", "/nope.js"):
        assert tcp.get(path).status in (400, 401, 404), path


def test_host_and_origin(d):
    tcp = d.tcp_client().tcp
    port = str(tcp[1]).encode()
    for host in (b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example:80", b"127.0.0.1:80:80", b"", b"127.1"):
        status, _, body = ask(tcp, b"GET /livez HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert status in (400, 421), (host, status, body)
    for host in (b"localhost", b"LOCALHOST:" + port, b"127.0.0.1:" + port, b"[::1]:" + port, b"[::1]"):
        assert ask(tcp, b"GET /livez HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")[0] == 200, host
    mine = b"127.0.0.1:" + port
    for origin in (b"http://evil.example", b"null", b"http://127.0.0.1:1", b"http://evil.example@" + mine):
        head = b"GET /livez HTTP/1.1\r\nHost: " + mine + b"\r\nOrigin: " + origin + b"\r\n\r\n"
        refused(tcp, head, 403, "forbidden")
    assert ask(tcp, b"GET /livez HTTP/1.1\r\nHost: " + mine + b"\r\nOrigin: http://" + mine + b"\r\n\r\n")[0] == 200


def test_strangers_learn_nothing(d):
    """Without a token every path but the open ones is 401, whether it exists or not."""
    tcp = d.tcp_client(token=False)
    for path in ("/v1/jobs", "/v1/nope", "/nope", "/metrics", "/openapi.yaml", "/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV"):
        a = tcp.get(path)
        a.problem("unauthenticated", status=401)
        assert a.headers["WWW-Authenticate"].startswith("Bearer")
    tcp.request("OPTIONS", "/v1/jobs").problem("unauthenticated", status=401)
    tcp.post("/v1/jobs", b"{" * 10000).problem("unauthenticated", status=401)
    token = d.state.joinpath("token").read_text().strip()
    for wrong in (token[:-1], token + "x", token.upper() if token.upper() != token else token.lower(), token[::-1]):
        tcp.get("/v1/jobs", headers={"Authorization": f"Bearer {wrong}"}).problem("unauthenticated", status=401)
    assert tcp.get("/v1/jobs", headers={"Authorization": f"bearer {token}"}).status == 200, "the scheme has no case"


def test_limits(d, unix):
    size = (1 << 20) + 1
    refused(unix, post(b" " * size), 413, "payload_too_large")
    with Raw(unix) as c:
        c.send(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            c.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
        c.send(b"0\r\n\r\n")
        assert c.answer()[0] == 413
    with Raw(unix) as c:
        c.send(post(b"", b"Expect: 100-continue", length=size))
        assert c.answer()[0] == 413, "refused before the body is sent"
    status, _, body = ask(unix, post(b'{"kind":' + b"[" * 33 + b"]" * 33 + b"}"))
    assert status == 400 and json.loads(body)["code"] == "invalid_json" and "nested" in json.loads(body)["detail"]
    status, _, body = ask(unix, post(b'{"kind":\n  NaN}'))
    assert status == 400 and "line 2" in json.loads(body)["detail"]
    with Raw(unix) as c:
        c.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for i in range(20000):
                c.send(b"X-%d: %s\r\n" % (i, b"y" * 100))
            c.send(b"\r\n")
            assert c.head()[0] in (400, 413, 431)
        except (EOFError, ConnectionError):
            pass


def test_queries(d, unix):
    for query in (b"?page_size=1&page_size=%zz", b"?%00=1", b"?page_size", b"?=", b"?filter=%ff"):
        status, _, _ = ask(unix, b"GET /v1/jobs" + query + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status in (200, 400, 422), query
    refused(unix, b"GET /v1/jobs?page_size=%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_request")


def test_bodies_where_none_belongs(d, unix):
    body = b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    refused(unix, body, 400, "invalid_request")


@pytest.mark.long
def test_slow_clients_are_cut(d, unix):
    """A byte now and then keeps a connection from being idle; the deadline ends it all the same. Others notice nothing."""
    def trickle(data, out):
        with Raw(unix) as c:
            start = time.monotonic()
            try:
                for i in range(len(data)):
                    c.send(data[i:i + 1])
                    time.sleep(1)
            except OSError:
                out.append(time.monotonic() - start)

    cut, answered = [], 0
    head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100
    slow = [threading.Thread(target=trickle, args=(head, cut)) for _ in range(8)]
    for t in slow:
        t.start()
    while any(t.is_alive() for t in slow):
        assert d.api.get("/livez").status == 200
        answered += 1
        time.sleep(0.5)
    assert len(cut) == 8 and all(s > 8 for s in cut), cut
    assert answered > 3, "others waited for the slow ones"


def test_streams(d, unix):
    """Heads come at once; there are at most 2048; a closed one makes room; both forms are valid."""
    get = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n"
    open_ = []
    for _ in range(2048):
        open_.append(Raw(unix).send(get + b"\r\n"))
        status, headers = open_[-1].head()
        assert status == 200 and headers["content-type"] == "text/event-stream"
    refused(unix, get + b"\r\n", 429, "too_many_streams")
    refused(unix, get + b"Accept: image/png\r\n\r\n", 406, "not_acceptable")
    for c in open_:
        c.s.close()
    end = time.monotonic() + 120
    while True:
        with Raw(unix) as c:
            status, headers = c.send(get + b"Accept: application/x-ndjson\r\n\r\n").head()
        if status == 200:
            break
        assert time.monotonic() < end, "closed streams are not noticed"
        time.sleep(0.5)
    assert headers["content-type"] == "application/x-ndjson"


def chunks(c):
    """The body's chunks, until it has none: (bytes of all, whether it came to its end)."""
    body = b""
    try:
        while True:
            while b"\r\n" not in c.rest:
                c._more()
            size, c.rest = c.rest.split(b"\r\n", 1)
            n = int(size, 16)
            while len(c.rest) < n + 2:
                c._more()
            assert c.rest[n:n + 2] == b"\r\n", c.rest[:100]
            body, c.rest = body + c.rest[:n], c.rest[n + 2:]
            if n == 0:
                return body, True
    except (EOFError, ConnectionError):
        return body, False


@pytest.mark.long
@pytest.mark.parametrize("version", (b"1.1", b"1.0"))
def test_a_client_that_reads_late_gets_every_event_once(spawn, version):
    """What its socket does not take waits, while others have theirs; then all comes, in order, and nothing of another event in between."""
    d = spawn()
    get = b"GET /v1/events HTTP/" + version + b"\r\nHost: localhost\r\nAccept: application/x-ndjson\r\n\r\n"
    late, never, quick = (Raw(str(d.socket)).send(get) for _ in range(3))
    assert [c.head()[0] for c in (late, never, quick)] == [200] * 3
    chain = {"storage": "main", "match": "none-*", "steps": [{"verify": {"level": "structure"}}]}
    n = full = since = 0
    while since < 100:  # until a socket has no room: a client that reads nothing for 30 s is left
        d.api.request("PUT", f"/v1/chains/{'x' * 64}", chain).ok(200, 201)
        n += 1
        quick._more()
        since = since + 1 if waiting(late) == full else 0
        full = waiting(late)

    def ids(body):
        return [int(json.loads(line)["id"]) for line in body.splitlines() if line]

    while quick.rest.count(b'"chain.set"') < n:
        quick._more()
    while late.rest.count(b'"chain.set"') < n:
        late._more()
    d.stop()
    if version == b"1.0":
        bodies = [(c.rest + rest(c), True) for c in (late, quick)]
    else:
        bodies = [chunks(late), chunks(quick)]
        assert not chunks(never)[1], "half a chunk is no end"
    for body, ended in bodies:
        assert ended and len(ids(body)) >= n and b"lost" not in body
        assert ids(body) == list(range(ids(body)[0], ids(body)[0] + len(ids(body))))


def waiting(c):
    """How many bytes lie in the socket's buffer."""
    return int.from_bytes(fcntl.ioctl(c.s, termios.FIONREAD, bytes(4)), sys.byteorder)


def rest(c):
    body = b""
    while got := c.s.recv(65536):
        body += got
    return body


def test_events_over_tls(spawn, tmp_path):
    """Events after the head come encrypted, too: there libmicrohttpd sends them."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2", "-keyout", key,
                    "-out", cert], check=True, capture_output=True)
    d = spawn(args=["--tls-cert", cert, "--tls-key", key])
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with Raw(d.tcp_client().tcp) as c:
        c.s = context.wrap_socket(c.s)
        token = (d.state / "token").read_text().strip().encode()
        c.send(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + token + b"\r\n\r\n")
        assert c.head()[0] == 200
        for i in range(5):
            d.api.post("/v1/state-dicts", {"name": f"sd{i}", "world_size": 1}).ok(201)
            while f'"sd{i}"'.encode() not in c.rest:
                c._more()
            time.sleep(0.1)


def test_last_event_id(d, unix):
    refused(unix, b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: x\r\n\r\n", 400, "invalid_request")
    with Raw(unix) as c:
        assert c.send(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 1\r\n\r\n").head()[0] == 200


def test_many_connections(d, unix):
    """More at once than are taken: those beyond wait or are cut, none breaks the daemon."""
    many = []
    try:
        for _ in range(1100):
            try:
                s = socket.socket(socket.AF_UNIX)  # our own limit may be the lower one
            except OSError:
                break
            many.append(s)
            s.settimeout(0.2)
            try:
                s.connect(unix)
            except OSError:
                break
    finally:
        for s in many:
            s.close()
    end = time.monotonic() + 120
    while True:
        try:
            assert ask(unix, LIVE + b"\r\n")[0] == 200
            return
        except (EOFError, OSError):
            assert time.monotonic() < end
            time.sleep(0.1)
