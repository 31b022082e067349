"""The form of an answer: what the client has is not sent again, what it takes compressed is, slices come in ranges, lists as lines."""
import gzip
import json
import shutil
import subprocess
import urllib.parse

import pytest
from crafted import FIXTURES, Crafted

import dcpd as lib

ZSTD = shutil.which("zstd")


@pytest.fixture
def plain(d):
    """A checkpoint that PyTorch wrote."""
    target = d.storages["main"] / "forms"
    shutil.copytree(FIXTURES / "torch-2.15.0/plain/checkpoint", target)
    yield "/v1/checkpoints/main/forms"
    shutil.rmtree(target)


def unpacked(answer):
    coding = answer.headers.get("Content-Encoding")
    if coding == "zstd":
        return subprocess.run([ZSTD, "-dc"], input=answer.body, capture_output=True, check=True).stdout
    return gzip.decompress(answer.body) if coding == "gzip" else answer.body


def paths(d, plain):
    job = d.api.run("verify", source={"storage": "main", "name": "forms"}, level="structure")
    return ["/", "/app.js", "/openapi.yaml", "/v1/transforms", "/v1/transforms/llama-hf-to-megatron", "/v1/storages",
            "/v1/jobs", "/v1/capabilities", f"/v1/jobs/{job['id']}", f"/v1/jobs/{job['id']}?wait=1s", plain, plain + "/files",
            plain + "/tensors", plain + "/lineage", "/v1/checkpoints/main", "/v1/policies", "/v1/chains",
            "/v1/webhooks", "/v1/runs?storage=main"]


def test_what_the_client_has_is_not_sent_again(d, plain):
    for path in paths(d, plain):
        first = d.api.get(path)
        assert first.status == 200, (path, first.body)
        etag = first.headers["ETag"]
        assert etag.startswith('"'), path
        for tags in (etag, f'"x", W/{etag}', "*"):
            again = d.api.get(path, headers={"If-None-Match": tags})
            assert again.status == 304 and not again.body, (path, tags, again.status, first.body, again.body)
            assert again.headers["ETag"] == etag, path
            assert "Content-Type" not in again.headers, path
        assert d.api.get(path, headers={"If-None-Match": '"x"'}).status == 200, path
        head = d.api.request("HEAD", path)
        assert head.headers["ETag"] == etag and int(head.headers["Content-Length"]) == len(first.body), path


def test_the_etag_of_a_record_is_that_of_its_text(spawn):
    """Whether the record is kept as an answer, made for one request, or read from the journal by another daemon."""
    d = spawn()
    job = d.api.run("verify", source=Crafted(d.storages["main"]).ref, level="structure")
    path = f"/v1/jobs/{job['id']}"

    def tags():
        got = [d.api.get(path), d.api.get(path), d.api.get(path, headers={"X-Request-Id": "a-client-s"}), d.api.get(f"{path}?wait=1s")]
        return {(a.headers["ETag"], a.body) for a in got}

    before = tags()
    assert len(before) == 1
    d.stop()
    d.start()
    assert tags() == before


def test_an_etag_changes_with_the_answer(d):
    before = d.api.get("/v1/policies").headers["ETag"]
    d.api.request("PUT", "/v1/policies/forms", {"storage": "main", "match": "forms-run", "confirm": True, "keep": {"last": 1}}).ok(200)
    try:
        after = d.api.get("/v1/policies", headers={"If-None-Match": before})
        assert after.status == 200 and after.headers["ETag"] != before
    finally:
        d.api.delete("/v1/policies/forms").ok(200, 204)


@pytest.mark.parametrize("accept,coding", [
    ("gzip", "gzip"), ("gzip;q=0.5, zstd", "zstd"), ("zstd;q=0.1, gzip;q=0.2", "gzip"), ("*", "zstd"), ("br, gzip, zstd;q=0", "gzip"),
    ("identity", None), ("gzip;q=0", None), ("br", None), ("", None)])
def test_answers_are_compressed_as_the_client_asks(d, plain, accept, coding):
    if coding == "zstd" and not ZSTD:
        pytest.skip("no zstd program")
    for path in paths(d, plain):
        raw = d.api.get(path)
        packed = d.api.get(path, headers={"Accept-Encoding": accept})
        assert packed.status == 200 and "Accept-Encoding" in packed.headers["Vary"], path
        if path.endswith("capabilities"):  # has what is used just now
            continue
        assert unpacked(packed) == raw.body, path
        if len(raw.body) >= 1024 and coding:
            assert packed.headers["Content-Encoding"] == coding and len(packed.body) < 0.7 * len(raw.body), path
            assert packed.headers["ETag"] != raw.headers["ETag"], "a strong tag is of the bytes that are sent"
            same = {"Accept-Encoding": accept, "If-None-Match": packed.headers["ETag"]}
            assert d.api.get(path, headers=same).status == 304, path
        if not coding:
            assert "Content-Encoding" not in packed.headers


def test_problems_and_metrics(d):
    assert "Content-Encoding" not in d.api.get("/v1/jobs/nope", headers={"Accept-Encoding": "gzip"}).headers
    packed = d.api.get("/metrics", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip" and b"dcpd_jobs" in gzip.decompress(packed.body)


def tensor(d, plain):
    rows = d.api.get(plain + "/tensors").json["tensors"]
    fqn = max(rows, key=lambda t: t["bytes"])["fqn"]
    return f"{plain}/tensors/{fqn}"


def test_ranges_of_a_slice(d, plain):
    path = tensor(d, plain)
    whole = d.api.get(path)
    n, etag = len(whole.body), whole.headers["ETag"]
    assert n > 20 and whole.headers["Accept-Ranges"] == "bytes"
    for text, a, b in (("0-9", 0, 10), ("10-", 10, n), ("-7", n - 7, n), (f"5-{10 * n}", 5, n), ("3-3", 3, 4), (f"-{2 * n}", 0, n)):
        part = d.api.get(path, headers={"Range": "bytes=" + text})
        assert part.body == whole.body[a:b], text
        assert part.status == (206 if b - a < n else 200)
        assert part.status == 200 or part.headers["Content-Range"] == f"bytes {a}-{b - 1}/{n}"
        assert part.headers["ETag"] == etag
    for text in (f"bytes={n}-", "bytes=-0", f"bytes={10 * n}-{11 * n}"):
        bad = d.api.get(path, headers={"Range": text})
        bad.problem("range_invalid", status=416)
        assert bad.headers["Content-Range"] == f"bytes */{n}"
    for text in ("bytes=5-2", "bytes=", "bytes=a-b", "lines=1-2", "bytes=0-1,4-5", "bytes=99999999999999999999-"):
        assert d.api.get(path, headers={"Range": text}).status == 200, text
    assert d.api.get(path, headers={"Range": "bytes=0-1", "If-Range": etag}).status == 206
    assert d.api.get(path, headers={"Range": "bytes=0-1", "If-Range": '"other"'}).status == 200
    assert d.api.get(path, headers={"Range": "bytes=0-1", "If-None-Match": etag}).status == 304


def test_a_slices_etag_names_its_bytes(d, plain):
    path = tensor(d, plain)
    tags = {d.api.get(path + q).headers["ETag"] for q in ("", "?slice=0:1", "?slice=1:2", "?format=npy", "?verify=none", "")}
    assert len(tags) == 5
    old = d.api.get(path).headers["ETag"]
    (d.storages["main"] / "forms/.metadata").touch()
    new = d.api.get(path, headers={"If-None-Match": old})
    assert new.status == 200 and new.headers["ETag"] != old, "the files are others"


def test_the_form_of_a_slice_by_accept(d, plain):
    path = tensor(d, plain)
    kinds = {"raw": "application/octet-stream", "npy": "application/x-npy", "safetensors": "application/x-safetensors"}
    wanted = {name: d.api.get(f"{path}?format={name}").body for name in kinds}
    assert len(set(wanted.values())) == 3
    for accept, name in ((kinds["npy"], "npy"), (kinds["safetensors"], "safetensors"), ("*/*", "raw"), ("application/*", "raw"),
                         ("application/x-npy;q=0.3, application/x-safetensors;q=0.8, */*;q=0.1", "safetensors"),
                         ("application/octet-stream;q=0, */*", "npy")):
        got = d.api.get(path, headers={"Accept": accept})
        assert got.headers["Content-Type"] == kinds[name] and got.body == wanted[name], accept
    assert d.api.get(path + "?format=raw", headers={"Accept": kinds["npy"]}).body == wanted["raw"], "what the query says counts"
    d.api.get(path, headers={"Accept": "text/html, application/json"}).problem("not_acceptable", status=406)


def test_lists_as_lines(d, plain):
    lines = {"Accept": "application/x-ndjson"}
    for path, key in ((plain + "/tensors", "tensors"), ("/v1/storages", "storages"), ("/v1/checkpoints/main", "checkpoints"),
                      ("/v1/transforms", "transforms"), (plain + "/files", "files"), ("/v1/policies", "policies")):
        got, want = d.api.get(path, headers=lines), d.api.get(path).json[key]
        assert got.headers["Content-Type"] == "application/x-ndjson" and "Link" not in got.headers, path
        assert [json.loads(line) for line in got.body.splitlines()] == want, path
    path, names = plain + "/tensors?prefix=&page_size=2", []
    while path:
        got = d.api.get(path, headers=lines)
        names += [json.loads(line)["fqn"] for line in got.body.splitlines()]
        link = got.headers.get("Link", "")
        assert not link or ("page_size=2" in link and link.endswith('>; rel="next"'))
        path = link[1:].split(">")[0] if link else None
    assert names == [t["fqn"] for t in d.api.get(plain + "/tensors").json["tensors"]] and len(names) > 2
    d.api.get(plain, headers=lines).problem("not_acceptable", status=406)
    assert d.api.get("/v1/jobs", headers={"Accept": "application/x-ndjson;q=0.5, application/json"}).json["jobs"] is not None


def bare(d, entries):
    """A safetensors file of these tensors; its path in the API."""
    name = lib.fresh() + ".safetensors"
    head = json.dumps({fqn: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, fqn in enumerate(entries)}).encode()
    (d.storages["main"] / name).write_bytes(len(head).to_bytes(8, "little") + head + bytes(len(entries)))
    return f"/v1/checkpoints/main/{name}/tensors"


def test_lines_have_any_name(d):
    names = ["a\0b", "a\n", "é", "\u2028"]
    path = bare(d, names)
    got = d.api.get(path, headers={"Accept": "application/x-ndjson"})
    assert got.status == 200 and sorted(json.loads(line)["fqn"] for line in got.body.splitlines()) == sorted(names), got.body


def test_a_link_goes_as_far_as_a_head(d):
    """What is too long for it is refused: a list that stops without a word would be taken for all of it."""
    statuses = []
    path = bare(d, ["é" * 1300 + end for end in "abc"])
    for more in ({}, {"X-Pad": "x" * 4500}, {f"X-{i}": "y" for i in range(60)}):
        for n in range(20, 1300, 80):
            got = d.api.get(f"{path}?page_size=1&prefix={urllib.parse.quote('é' * n)}", headers={"Accept": "application/x-ndjson", **more})
            statuses.append(got.status)
            if got.status != 200:
                assert "next_page_token" in got.problem("not_acceptable", status=406)["detail"]
                continue
            link = got.headers["Link"]
            following = d.api.get(link[1:].split(">")[0]).ok(200)
            assert [t["fqn"][-1] for t in following["tensors"]] == ["b"] and len(link) > 6 * n
    assert statuses[:9] == [200] * 9 and {200, 406} == set(statuses)


@pytest.mark.long
def test_lines_of_a_large_list_are_refused(d, plain):
    for i in range(30000):
        (d.storages["main"] / "forms" / (f"{i}" + "x" * 240)).touch()
    p = d.api.get(plain + "/files", headers={"Accept": "application/x-ndjson"}).problem("not_acceptable", status=406)
    assert "page_size" in p["detail"]
    assert len(d.api.get(plain + "/files").json["files"]) > 30000


def test_a_client_is_told_when_to_come_back(d):
    """What another one has just now may be free in a second."""
    d.put("forms", [lib.image({"w": ("F32", [4], bytes(16))})], slots=1)
    got = d.api.post("/v1/state-dicts/forms/ranks/0:reserve", {"bytes": 4096, "generation": 2})
    got.problem("slots_busy", status=409)
    assert got.headers["Retry-After"] == "1"
    d.api.delete("/v1/state-dicts/forms").ok(200, 204)
    assert "Retry-After" not in d.api.get("/v1/jobs/nope").headers
