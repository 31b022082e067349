"""The S3 client against SeaweedFS, and against a server that misbehaves as it is told."""
import hashlib
import json
import os
import socket
import ssl
import subprocess
import time
import urllib.parse

import pytest

import s3_server as servers
from s3_server import CONTAINER, ENV, FILE, INSTANCE, NONE, WEB_IDENTITY, Fake, S3Error, Tool, cut, done_but_unheard, error, hangs, says

ODD = "a b/=+~!*'()ü?&#%%41.x:@,;$[]{}|^`\"<>"


@pytest.fixture(scope="module")
def server(s3_server):
    return s3_server


@pytest.fixture(scope="module")
def fake():
    with Fake() as f:
        yield f


@pytest.fixture
def prefix(request):
    return f"{request.node.name}/"


@pytest.fixture
def tool(server, prefix):
    with Tool(server.endpoint, server.bucket, prefix, server.environment()) as t:
        yield t


KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.fixture
def liar(fake):
    fake.reset()
    with Tool(fake.endpoint, env=KEYS, stall_ms=1500, connect_ms=1000, call_ms=20000) as t:
        yield t


@pytest.fixture
def content(tmp_path):
    path = tmp_path / "content"
    path.write_bytes(os.urandom(12 << 20))
    return path


# ---------------------------------------------------------------------------------------------------------------- a real server


def test_objects(tool, content, tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"words")
    for key in (ODD, "=x", "~", "ü" * 100):
        [etag] = tool.put(key, small)
        assert etag == f'"{hashlib.md5(b"words").hexdigest()}"'
        size, is_, mtime = tool.head(key)
        assert (size, is_) == ("5", etag) and abs(int(mtime) / 1000 - time.time()) < 600
        assert tool.get_all(key, 5)[3] == "words"
        tool.delete(key)
        assert "NoSuchKey" in tool.fails("not_found", "head", key)  # words that only a GET has
    tool.delete(key)  # nothing there is fine
    tool.put("big", content)
    got = tmp_path / "got"
    assert tool.get("big", 12345, 7 << 20, got)[0] == str(12 << 20)
    assert got.read_bytes() == content.read_bytes()[12345:][:7 << 20]
    tool.put("empty", "/dev/null")
    assert tool.get_all("empty", 0)[0] == "0"
    tool.fails("limit_exceeded", "get_all", "big", 1000)
    tool.fails("range_invalid", "get", "big", 12 << 20, 1, got)
    assert "InvalidRange" in tool.fails("range_invalid", "get", "big", 99 << 20, 10, got)
    assert "where 100 were asked" in tool.fails("storage_io", "get", "big", (12 << 20) - 50, 100, got)
    tool.fails("checkpoint_replaced", "get", "big", 0, 10, got, '"0123"')
    tool.fails("name_invalid", "head", "k" * 1025)


def test_conditions(tool, content, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"other")
    [first] = tool.put("k", content, "none")
    assert "PreconditionFailed" in tool.fails("checkpoint_exists", "put", "k", other, "none")
    tool.fails("checkpoint_exists", "put", "k", other, '"0123"')
    [second] = tool.put("k", other, first)
    tool.fails("checkpoint_exists", "put", "k", content, first)
    assert tool.head("k")[:2] == ["5", second]
    tool.put("marked", other, "none", "job7")
    assert tool.put("marked", other, "none", "job7") == [second]  # one's own
    tool.fails("checkpoint_exists", "put", "marked", other, "none", "job8")
    tool.probe("probe")
    tool.fails("not_found", "head", "probe")


@pytest.mark.long
def test_lists(tool, content, tmp_path, prefix):
    small = tmp_path / "small"
    small.write_bytes(b"x")
    keys = sorted(["d/1", "d/2", "d/e/3", "f", ODD, "z =&", *(f"n/{i:04}" for i in range(1100))])
    for k in keys:
        tool.put(k, small)
    rows = tool.list()
    assert sorted(r[0] for r in rows) == keys and all(r[1] == "1" and r[2].startswith('"') and int(r[3]) for r in rows)
    assert [r[0] for r in tool.list("d/")] == ["d/1", "d/2", "d/e/3"]
    assert [r[0] for r in tool.list("d/", "/")] == ["d/1", "d/2", "d/e/"]
    assert [r[0] for r in tool.list("n/", "", "n/0001", 2)] == ["n/0002", "n/0003"]
    assert sorted(r[0] for r in tool.list("", "/")) == sorted({k.split("/")[0] + "/" if "/" in k else k for k in keys})
    assert tool.list("nothing") == [""]
    for i in range(0, len(keys), 15):
        tool.delete_many(*keys[i:i + 15])
    assert tool.list() == [""]
    assert tool.delete_many("never-there") == [""]


def test_uploads(tool, content, tmp_path):
    half = 6 << 20
    tool.begin("u")
    tool.part("u", content, 0, half)
    assert tool.list() == [""]
    [[key, listed, begun]] = tool.uploads()
    assert key == "u" and abs(int(begun) / 1000 - time.time()) < 600
    [row] = tool.resume("u", listed)
    assert row[:2] == ["1", str(half)]
    tool.part("u", content, half, half)
    [etag] = tool.complete("u", "none")
    got = tmp_path / "got"
    assert tool.get("u", 0, 12 << 20, got) == [str(12 << 20), etag] and got.read_bytes() == content.read_bytes()
    assert tool.uploads() == [""]
    tool.begin("u")
    tool.part("u", content, 0, 100)
    tool.fails("checkpoint_exists", "complete", "u", "none")
    [etag] = tool.complete("u", etag)
    assert tool.head("u")[0] == "100"
    assert tool.complete("u", "none") == [etag]  # asked for once more: its own
    tool.begin("gone")
    tool.part("gone", content, 0, 100)
    tool.abort("gone")
    assert tool.uploads() == [""]
    assert "NoSuchUpload" in tool.fails("not_found", "part", "gone", content, 0, 100)
    tool.put("source", content)
    tool.begin("copied")
    tool.part_copy("copied", "source", half, half)
    tool.part("copied", content, 0, half)
    tool.complete("copied")
    assert tool.get("copied", 0, 12 << 20, got) and got.read_bytes() == content.read_bytes()[half:] + content.read_bytes()[:half]
    assert tool.copy("copied", ODD) and tool.get(ODD, 0, 12 << 20, got)
    tool.fails("checkpoint_replaced", "copy", "copied", "x", '"0123"')
    assert "NoSuchKey" in tool.fails("not_found", "copy", "nothing", "x")


def test_refusals_have_the_servers_words(server, prefix, content):
    with Tool(server.endpoint, "tests", prefix, {**server.environment(), "AWS_SECRET_ACCESS_KEY": "wrong"}) as t:
        assert "403 SignatureDoesNotMatch: " in t.fails("forbidden", "head", "k")
    with Tool(server.endpoint, "tests", prefix, server.environment(access="AKIANOBODY")) as t:
        assert "InvalidAccessKeyId" in t.fails("forbidden", "put", "k", content)
    with Tool(server.endpoint, "tests", prefix, server.environment(access="AKIAREADER")) as t:
        assert "AccessDenied" in t.fails("forbidden", "put", "k", content)
        t.fails("not_found", "head", "k")
    with Tool(server.endpoint, "nowhere", prefix, server.environment()) as t:
        assert "NoSuchBucket" in t.fails("storage_gone", "put", "k", content)
        assert "NoSuchBucket" in t.fails("storage_gone", "list")


def test_a_server_that_hangs_is_noticed(server, tool, content):
    tool.put("k", content)
    with Tool(server.endpoint, "tests", "", server.environment(), stall_ms=1000, tries=1) as t, server.paused():
        assert "stalls" in t.fails("storage_stalled", "put", "k", content)
    with Tool(server.endpoint, "tests", "", server.environment()) as t:
        t.put("k", content)


# ---------------------------------------------------------------------------------------------------------------- a server that lies


def test_transient_errors_are_repeated(fake, liar, content, tmp_path):
    fake.reset(says(500, "InternalError"), says(503, "SlowDown"), cut, says(400, "RequestTimeout"))
    liar.put("k", content)
    assert len(fake.seen) == 5 and fake.objects["/tests/k"][0] == content.read_bytes()
    fake.script = [says(502), cut]
    assert liar.get("k", 0, 100, tmp_path / "got")
    fake.reset(*[says(503, "SlowDown")] * 7)
    with Tool(fake.endpoint, env=KEYS, tries=2) as t:
        assert "SlowDown" in t.fails("storage_stalled", "head", "k")
        assert [verb for verb, *_ in fake.seen] == ["HEAD", "HEAD", "GET"]
    fake.reset(*[says(500, "InternalError")] * 20)
    assert "InternalError" in liar.fails("storage_io", "put", "k", content)
    assert len(fake.seen) == 6
    fake.reset()
    liar.put("a/../b//c", content)
    assert fake.seen[0][1] == "/tests/a/../b//c"
    fake.reset(says(400, "InvalidPart"), says(403, "AccessDenied"))
    liar.fails("storage_io", "put", "k", content)
    liar.fails("forbidden", "put", "k", content)
    assert len(fake.seen) == 2  # neither was


def test_a_delete_takes_the_object_that_was_meant(fake, liar, content):
    fake.reset()
    [old] = liar.put("k", content)
    [new] = liar.put("k", content)
    liar.delete("k", old)
    assert fake.objects["/tests/k"][1] == new
    liar.delete("k", new)
    liar.delete("k", new)  # nothing there is fine
    assert not fake.objects
    for status, code in ((501, "NotImplemented"), (400, "InvalidArgument")):  # a server that knows of no condition here
        fake.reset()
        [new] = liar.put("k", content)
        fake.script = [says(status, code)]
        liar.delete("k", new)
        assert not fake.objects and ["if-match" in headers for _, _, headers in fake.seen[1:]] == [True, False]
    fake.script = [says(403, "AccessDenied")]
    assert "AccessDenied" in liar.fails("forbidden", "delete", "k", new)


@pytest.mark.long
def test_a_budget_of_repeats_ends(fake, content):
    fake.reset(*[says(500, "InternalError")] * 2000)
    with Tool(fake.endpoint, env=KEYS, tries=2) as t:
        for _ in range(110):
            t.fails("storage_io", "delete", "k")
        before = len(fake.seen)
        t.fails("storage_io", "delete", "k")
        assert len(fake.seen) == before + 1 and 180 < before < 220


def test_a_lost_answer_is_settled(fake, liar, content):
    fake.reset(done_but_unheard(fake))
    [etag] = liar.put("k", content, "none")
    assert fake.objects["/tests/k"][1] == etag
    fake.script = [done_but_unheard(fake)]
    liar.put("k", content, etag)
    other = fake.objects["/tests/k"]

    def overtaken(h):
        """Another's write comes first, and this one's answer is lost."""
        fake.objects["/tests/k"] = (b"theirs", '"theirs"', "theirs")
        return done_but_unheard(fake)(h)

    fake.reset(overtaken)
    liar.fails("checkpoint_exists", "put", "k", content, "none")
    assert fake.objects["/tests/k"][0] == b"theirs" and other


def test_lies_about_content(fake, liar, content, tmp_path):
    got = tmp_path / "got"
    liar.put("k", content)
    etag = fake.objects["/tests/k"][1]

    def lies(status=206, body=b"x" * 100, **headers):
        headers = {"Content_Range": "bytes 0-99/1000", "ETag": etag, **headers}
        return lambda h: answer(h, status, body, headers)

    def answer(h, status, body, headers):
        if headers.get("Content_Length"):
            h.close_connection = True
        return servers.answer(h, status, body, **headers)

    for lie, words in [(lies(Content_Range="bytes 1-100/1000"), "another range"), (lies(Content_Range=None), "another range"),
                       (lies(Content_Range="bytes 0-99/50"), "another range"), (lies(body=b"x" * 101), "announced 101"),
                       (lies(body=b"x" * 99), "announced 99"), (lies(ETag=None), "lacks an ETag"), (lies(status=204, body=b""), "204"),
                       (lies(status=200, body=b"x" * 1000), "announced 1000")]:
        fake.reset(lie)
        assert words in liar.fails("storage_io", "get", "k", 0, 100, got)
    fake.reset(lies(ETag='"other"'))
    liar.fails("checkpoint_replaced", "get", "k", 0, 100, got, etag)

    def chunked(n):
        def step(h):
            h.close_connection = True
            return servers.answer(h, 206, b"x" * n, ETag=etag, Content_Range="bytes 0-99/1000", Content_Length=None, Connection="close")
        return step

    fake.reset(chunked(100))
    assert liar.get("k", 0, 100, got) and got.read_bytes() == b"x" * 100
    fake.reset(*[chunked(101)] * 6)
    assert "more bytes than were asked for" in liar.fails("storage_io", "get", "k", 0, 100, got)
    fake.reset(chunked(50), chunked(100))
    assert liar.get("k", 0, 100, got)
    fake.reset(lies(Content_Length="100", body=b"x" * 50), chunked(100))
    assert liar.get("k", 0, 100, got)
    assert len(fake.seen) == 2
    fake.reset(lambda h: servers.answer(h, 200, b"hello", ETag=etag, x_amz_checksum_crc32="AAAAAA=="))
    assert "not those that were stored" in liar.fails("storage_io", "get_all", "k", 100)
    fake.reset(lambda h: servers.answer(h, 200, b"hello", ETag=etag, x_amz_checksum_crc32="NhCmhg=="))
    assert liar.get_all("k", 100)[3] == "hello"


def test_redirects_are_not_followed(fake, liar, content):
    with Fake() as secret:
        secret.objects["/tests/k"] = (b"secret", '"e"', "")
        fake.reset(*[says(307, "TemporaryRedirect", Location=f"{secret.endpoint}/tests/k")] * 2)
        assert "307 TemporaryRedirect" in liar.fails("storage_gone", "get_all", "k", 100)
        assert not secret.seen
    fake.reset(says(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"))
    assert "the bucket is in the region eu-west-1" in liar.fails("storage_gone", "put", "k", content)
    fake.reset(*[says(301, x_amz_bucket_region="eu-west-1")] * 2)
    assert "region eu-west-1" in liar.fails("storage_gone", "head", "k")


def test_hostile_xml(fake, liar):
    bomb = b'<!DOCTYPE a [<!ENTITY a "x">' + b"".join(b'<!ENTITY %c "%s">' % (98 + i, b"&%c;" % (97 + i) * 10) for i in range(20)) + \
        b"]><ListBucketResult><Contents><Key>&u;</Key></Contents></ListBucketResult>"

    def lists(body):
        fake.reset(lambda h: servers.answer(h, 200, body))

    lists(bomb)
    assert "document type" in liar.fails("storage_io", "list")
    lists(b"<a>" * 1000)
    assert "levels" in liar.fails("storage_io", "list")
    lists(b"<ListBucketResult><Contents><Key>../x</Key><Size>1</Size></Contents></ListBucketResult>")
    with Tool(fake.endpoint, prefix="mine/", env=KEYS) as t:
        assert "does not begin" in t.fails("storage_io", "list")
    lists(b"<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>")
    assert "without a key" in liar.fails("storage_io", "list")
    lists(b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>")
    assert "does not go on" in liar.fails("storage_io", "list")
    page = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    fake.reset(*[lambda h: servers.answer(h, 200, page)] * 3)
    assert "does not go on" in liar.fails("storage_io", "list")
    assert len(fake.seen) == 2
    lists(b"<html>hello</html>")
    liar.fails("storage_io", "list")
    fake.reset(lambda h: servers.answer(h, 403, error("Evil\x1b[31m"[:4], "x" * 5000)))
    assert len(liar.fails("forbidden", "head", "k")) < 600


@pytest.mark.parametrize("empty, code, words", [(True, "storage_io", "does not go on"),
                                                 pytest.param(False, "storage_stalled", "", marks=pytest.mark.long)])
def test_lists_end(fake, empty, code, words):
    """A server that always has a next page, with a token that it never sent before."""
    def keys(h):
        n = len(fake.seen)
        entry = "" if empty else f"<Contents><Key>k{n:09}</Key><Size>1</Size></Contents>"
        return servers.answer(h, 200, (f"<ListBucketResult>{entry}<IsTruncated>true</IsTruncated><NextContinuationToken>t{n}"
                                       "</NextContinuationToken></ListBucketResult>").encode())

    def uploads(h):
        n = len(fake.seen)
        entry = "" if empty else f"<Upload><Key>k{n:09}</Key><UploadId>u</UploadId></Upload>"
        return servers.answer(h, 200, (f"<ListMultipartUploadsResult>{entry}<IsTruncated>true</IsTruncated><NextKeyMarker>t{n}"
                                       f"</NextKeyMarker></ListMultipartUploadsResult>").encode())

    for command, page in [("list", keys), ("uploads", uploads)]:
        fake.reset(*[page] * 20000)
        with Tool(fake.endpoint, env=KEYS, call_ms=5000 if empty else 200) as t:
            assert words in t.fails(code, command)
            assert len(fake.seen) == 100 or not empty


def test_an_error_inside_a_success(fake, liar, content):
    fake.reset(*[says(200, "InternalError")] * 6)
    assert "answered InternalError" in liar.fails("storage_io", "copy", "a", "b")
    assert len(fake.seen) == 6


@pytest.mark.long
def test_stalls(fake, liar, content, tmp_path):
    fake.reset(hangs(4))
    begin = time.monotonic()
    liar.put("k", content)  # the second try
    assert 1 < time.monotonic() - begin and len(fake.seen) == 2
    with Tool(fake.endpoint, env=KEYS, stall_ms=60000, call_ms=1500) as t:
        fake.reset(*[hangs(4)] * 2)
        begin = time.monotonic()
        t.fails("storage_stalled", "get_all", "k", 100)
        assert time.monotonic() - begin < 60

    def drips(h):
        """A byte now and then is no progress."""
        h.send_response(206)
        for k, v in {"Content-Length": "100", "Content-Range": "bytes 0-99/1000", "ETag": '"e"'}.items():
            h.send_header(k, v)
        h.end_headers()
        for _ in range(40):
            h.wfile.write(b"x")
            time.sleep(0.2)
        return True

    with Tool(fake.endpoint, env=KEYS, stall_ms=1000, tries=1) as t:
        fake.reset(drips)
        assert "stalls" in t.fails("storage_stalled", "get", "k", 0, 100, tmp_path / "got")
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # a body that nobody reads, byte by byte
        with Tool(f"http://127.0.0.1:{deaf.getsockname()[1]}", env=KEYS, stall_ms=1000, tries=1) as t:
            assert "stalls" in t.fails("storage_stalled", "put", "k", content)
        gone = f"http://127.0.0.1:{deaf.getsockname()[1]}"
    with Tool(gone, env=KEYS, tries=2) as t:
        assert "cannot be reached" in t.fails("storage_gone", "head", "k")


def test_conditions_that_a_server_does_not_heed(fake, liar):
    def forgets(h):
        del h.headers["If-None-Match"], h.headers["If-Match"]
        return False

    def forgets_match(h):
        del h.headers["If-Match"]
        return False

    fake.reset(*[forgets] * 10)
    assert "does not heed If-None-Match" in liar.fails("unsupported", "probe", "p")
    fake.reset(says(200, ETag='"x"'), says(501, "NotImplemented"))
    liar.fails("unsupported", "probe", "p")
    fake.reset(*[forgets_match] * 20)
    assert "does not heed If-Match" in liar.fails("unsupported", "probe", "p")
    fake.reset(says(403, "AccessDenied"))
    liar.fails("forbidden", "probe", "p")
    fake.reset()
    liar.probe("p")
    assert not fake.objects and not fake.uploads


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_heeds_conditions_of_puts_alone(header):
    """Commits end uploads, too."""
    class Half(Fake):
        def usual(self, h):
            if h.command == "POST":
                del h.headers[header]
            super().usual(h)

    with Half() as half, Tool(half.endpoint, env=KEYS) as t:
        assert f"does not heed {header} of CompleteMultipartUpload" in t.fails("unsupported", "probe", "p")
        assert not half.objects and not half.uploads


# ---------------------------------------------------------------------------------------------------------------- credentials


def signer(fake):
    """Whose keys, and which token, the last request had."""
    headers = fake.seen[-1][2]
    return headers["authorization"].split("Credential=")[1].split("/")[0], headers.get("x-amz-security-token")


def keys_json(access, seconds=3600, **more):
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
    return json.dumps({"AccessKeyId": access, "SecretAccessKey": "hidden", "Token": "token", "Expiration": expires, **more}).encode()


def sends(body):
    return lambda h: servers.answer(h, 200, body)


def test_credentials_of_a_file(fake, tmp_path):
    path = tmp_path / "credentials"
    path.write_text("# mine\n[default]\naws_access_key_id = AKIAONE\naws_secret_access_key=x=y/+\n\n[other]\r\n"
                    " aws_access_key_id=AKIATWO\r\naws_secret_access_key = s\r\naws_session_token = t\n[profile third]\nregion = x\n")
    fake.reset()
    with Tool(fake.endpoint, credentials=FILE, file=path) as t:
        t.delete("k")
        assert signer(fake) == ("AKIAONE", None)
        path.write_text(path.read_text().replace("AKIAONE", "AKIANEW"))
        time.sleep(1)
        fake.script = [says(403, "InvalidAccessKeyId")]  # they were rotated: the file is read anew
        t.delete("k")
        assert signer(fake) == ("AKIANEW", None)
    with Tool(fake.endpoint, credentials=FILE, env={"AWS_SHARED_CREDENTIALS_FILE": str(path), "AWS_PROFILE": "other"}) as t:
        t.delete("k")
        assert signer(fake) == ("AKIATWO", "t")
    for profile, words in [("third", "lacks aws_access_key_id"), ("none", "there is no profile 'none'")]:
        with Tool(fake.endpoint, credentials=FILE, file=path, profile=profile) as t:
            assert words in t.fails("forbidden", "delete", "k")
    with Tool(fake.endpoint, credentials=FILE, file=tmp_path / "none") as t:
        assert "there is no file" in t.fails("forbidden", "delete", "k")


def test_credentials_in_their_order(fake, tmp_path):
    env = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    fake.reset()
    with Tool(fake.endpoint, credentials=0, env=env) as t:
        text = t.fails("forbidden", "delete", "k")
        assert all(w in text for w in ("environment: AWS_ACCESS_KEY_ID", "web identity: ", "file: ", "container: ", "instance: ")), text
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id=AKIAHOME\naws_secret_access_key=s\n")
    with Tool(fake.endpoint, credentials=0, env=env) as t:
        t.delete("k")
        assert signer(fake)[0] == "AKIAHOME"
    with Tool(fake.endpoint, credentials=0, env={**env, **KEYS, "AWS_SESSION_TOKEN": "temporary"}) as t:
        t.delete("k")
        assert signer(fake) == ("a", "temporary")
    with Tool(fake.endpoint, credentials=NONE) as t:
        t.delete("k")
        assert "authorization" not in fake.seen[-1][2]


def test_credentials_of_an_instance(fake):
    env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.endpoint}
    fake.reset(sends(b"proof"), sends(b"a role\n"), sends(keys_json("AKIAFIRST", 2)))
    with Tool(fake.endpoint, credentials=INSTANCE, env=env) as t:
        t.delete("k")
        assert [(v, p) for v, p, _ in fake.seen] == [
            ("PUT", "/latest/api/token"), ("GET", "/latest/meta-data/iam/security-credentials/"),
            ("GET", "/latest/meta-data/iam/security-credentials/a%20role"), ("DELETE", "/tests/k")]
        assert fake.seen[0][2]["x-aws-ec2-metadata-token-ttl-seconds"] and fake.seen[2][2]["x-aws-ec2-metadata-token"] == "proof"
        assert signer(fake) == ("AKIAFIRST", "token")
        t.delete("k")
        assert len(fake.seen) == 5
        time.sleep(2)
        fake.script = [sends(b"proof"), sends(b"role"), sends(keys_json("AKIASECOND"))]
        t.delete("k")
        assert signer(fake) == ("AKIASECOND", "token")
        fake.script = [says(403, "ExpiredToken")]  # within a second of the fetch: there can be none that are newer
        assert "ExpiredToken" in t.fails("forbidden", "delete", "k")
    for body, words in [(b"{}", "sent no AccessKeyId"), (b"[1", "than JSON"), (keys_json("A", Expiration="soon"), "expiry"),
                        (keys_json("A" * 300), "cannot be used"), (b"hidden" * 20000, "bytes")]:
        fake.reset(sends(b"proof"), sends(b"role"), sends(body))
        with Tool(fake.endpoint, credentials=INSTANCE, env=env) as t:
            text = t.fails("forbidden", "delete", "k")
            assert words in text and "hidden" not in text


def test_keys_that_come_expired_are_not_fetched_again_and_again(fake):
    fake.reset(*[sends(b"proof"), sends(b"role"), sends(keys_json("AKIALATE", -10))] * 100)
    with Tool(fake.endpoint, credentials=INSTANCE, env={"AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.endpoint}, call_ms=3000) as t:
        assert "have expired" in t.fails("forbidden", "delete", "k")
    assert len(fake.seen) == 3


def test_keys_are_fetched_once_for_all(fake):
    def slow(h):
        time.sleep(0.3)
        return sends(keys_json("AKIAONE"))(h)

    fake.reset(sends(b"proof"), sends(b"role"), slow)
    with Tool(fake.endpoint, credentials=INSTANCE, env={"AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.endpoint}) as t:
        t.together(16, 4, "k")
    assert sum("/latest/" in path for _, path, _ in fake.seen) == 3 and len(fake.seen) == 3 + 16 * 4


def test_credentials_of_a_container(fake, tmp_path):
    (tmp_path / "token").write_text("Bearer from-file\n")
    env = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{fake.endpoint}/creds?x=1"}
    for more, sent in [({}, None), ({"AWS_CONTAINER_AUTHORIZATION_TOKEN": "Bearer it"}, "Bearer it"),
                       ({"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token")}, "Bearer from-file")]:
        fake.reset(sends(keys_json("AKIABOX")))
        with Tool(fake.endpoint, credentials=CONTAINER, env={**env, **more}) as t:
            t.delete("k")
        assert fake.seen[0][1] == "/creds?x=1" and fake.seen[0][2].get("authorization") == sent and signer(fake) == ("AKIABOX", "token")
    with Tool(fake.endpoint, credentials=CONTAINER, env={"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://10.1.2.3/creds"}) as t:
        assert "neither https nor on this host" in t.fails("forbidden", "delete", "k")


def test_credentials_of_a_web_identity(fake, tmp_path):
    (tmp_path / "token").write_text("jwt/with=signs\n")
    env = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
           "AWS_ENDPOINT_URL_STS": fake.endpoint}
    asked = []

    def sts(h):
        asked.append(urllib.parse.parse_qs(h.rfile.read(int(h.headers["Content-Length"])).decode()))
        return servers.answer(h, 200, b"<AssumeRoleWithWebIdentityResponse xmlns='x'><AssumeRoleWithWebIdentityResult><Credentials>"
                              b"<AccessKeyId>AKIASTS</AccessKeyId><SecretAccessKey>hidden</SecretAccessKey><SessionToken>tok</SessionToken>"
                              b"<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
                              b"</AssumeRoleWithWebIdentityResponse>")

    fake.reset(sts)
    with Tool(fake.endpoint, credentials=WEB_IDENTITY, env=env) as t:
        t.delete("k")
    assert signer(fake) == ("AKIASTS", "tok")
    assert asked[0] == {"Action": ["AssumeRoleWithWebIdentity"], "Version": ["2011-06-15"], "RoleArn": ["arn:aws:iam::1:role/r"],
                        "RoleSessionName": ["dcpd"], "WebIdentityToken": ["jwt/with=signs"]}
    words = b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code><Message>No provider</Message></Error></ErrorResponse>"
    fake.reset(lambda h: h.rfile.read(int(h.headers["Content-Length"])) and servers.answer(h, 400, words))
    with Tool(fake.endpoint, credentials=WEB_IDENTITY, env=env) as t:
        assert "STS answered 400 InvalidIdentityToken: No provider" in t.fails("forbidden", "delete", "k")


# ---------------------------------------------------------------------------------------------------------------- where it is


def test_addresses_that_are_refused(fake):
    fake.reset()
    with Tool(fake.endpoint, env=KEYS, refuse="127.0.0.1") as t:
        assert "must not connect to" in t.fails("storage_gone", "head", "k")
    assert not fake.seen


def test_tls_is_verified(tmp_path, fake):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                    "-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "cert"],
                   check=True, capture_output=True)
    with Fake() as f:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        f.http.socket = context.wrap_socket(f.http.socket, server_side=True)
        endpoint = f"https://localhost:{f.http.server_port}"
        with Tool(endpoint, env=KEYS, tries=1) as t:
            assert "certificate is not trusted" in t.fails("storage_gone", "head", "k")
        trusted = {**KEYS, "AWS_CA_BUNDLE": str(tmp_path / "cert")}
        with Tool(endpoint, env=trusted) as t:
            t.put("k", __file__)
            assert f.objects["/tests/k"]
        with Tool(f"https://127.0.0.1:{f.http.server_port}", env=trusted, tries=1) as t:
            assert "certificate is not trusted" in t.fails("storage_gone", "head", "k")


def test_styles_of_addresses(fake, tmp_path):
    port = fake.http.server_port
    fake.reset()
    with Tool(f"http://localhost:{port}", "buck", env=KEYS, virtual=1) as t:
        t.delete("k")  # *.localhost is this host
        assert fake.seen[-1][1] == "/k" and fake.seen[-1][2]["host"] == f"buck.localhost:{port}"
    with Tool(f"http://127.0.0.1:{port}", "buck", env=KEYS, virtual=1) as t:
        t.delete("k")  # an address has no names below it
        assert fake.seen[-1][1] == "/buck/k"
    for endpoint, bucket, more in [("ftp://x", "tests", {}), ("http://u:p@x", "tests", {}), ("http://x/y", "tests", {}),
                                   ("http://x?y", "tests", {}), ("", "tests", {}), ("http://x", "Tests", {}), ("http://x", "ab", {}),
                                   ("http://x", "a/b", {}),
                                   ("http://x", "tests", {"region": "a/b"})]:
        with pytest.raises(S3Error) as e:
            Tool(endpoint, bucket, env=KEYS, **more)
        assert e.value.code == "config"
