"""Requests that are wrong: each gets one clear problem with the right status, nothing is made, and the daemon goes on."""
import json
import re
import socket
import urllib.parse

import pytest
from crafted import Crafted
from spec_rows import KINDS

import dcpd as lib

RESHARD = {"kind": "reshard", "source": {"storage": "main", "name": "a"}, "target": {"storage": "main", "name": "b"}}


def post(d, body, *codes, status=None):
    return d.api.post("/v1/jobs", body).problem(*codes, status=status)


@pytest.mark.parametrize("text", [
    "", "{", "hello", '{"kind":', '{"kind":"save"}}', '{"kind":"save"} x', "\x00", '{"kind":"sa\x01ve"}', '{"kind":"\ud800"}',
    '{"kind":"diff","rtol":NaN}', '{"kind":"diff","rtol":Infinity}', '{"kind":"diff","rtol":-Infinity}', '{"a":1,"a":2}', "nul",
    '{"kind":"diff","rtol":1e999}', "[" * 100000, '{"a":' * 100000, "'{}'", "{'kind':'save'}", '{"kind":"save",}', "\ufeff{}",
])
def test_not_json(d, text):
    post(d, text.encode("utf-8", "surrogatepass"), "invalid_json", status=400)


@pytest.mark.parametrize("text", ["null", "[]", '"save"', "7", "true", "{}"])
def test_not_a_job(d, text):
    post(d, text, "validation_failed", "invalid_json", "invalid_request")


def test_bodies(d):
    d.api.post("/v1/jobs", b"x" * (17 << 20)).problem("payload_too_large", status=413)
    d.api.request("POST", "/v1/jobs", body=b"{}", headers={"Content-Type": "text/plain"}).problem(
        "unsupported_media_type", status=415)
    d.api.request("POST", "/v1/jobs", headers={"Content-Length": "0"}).problem("invalid_json", "invalid_request",
                                                                             "unsupported_media_type")


@pytest.mark.parametrize("kind", ["", "Save", "resave", "save ", "__proto__", "x" * 10000])
def test_unknown_kind(d, kind):
    post(d, {**RESHARD, "kind": kind}, "unknown_kind", status=422)


@pytest.mark.parametrize("kind", [None, 1, True, ["save"], {"kind": "save"}])
def test_kind_of_wrong_type(d, kind):
    post(d, {**RESHARD, "kind": kind}, "validation_failed", "unknown_kind", status=422)


@pytest.mark.parametrize("where,field", [
    ((), "colour"), ((), "overwrite"), ((), "strict"), ((), "level"), (("source",), "path"), (("source",), "generation"),
    (("target",), "worldsize"), (("target",), "Layout"), (("options",), "force"), (("options",), "on_divergence"),
])
def test_unknown_field(d, where, field):
    body = json.loads(json.dumps({**RESHARD, "options": {}}))
    at = body
    for w in where:
        at = at[w]
    at[field] = 1
    p = post(d, body, "unknown_field", status=422)
    assert field in p["detail"] or field in json.dumps(p), p


@pytest.mark.parametrize("change", [
    {"source": None}, {"source": "main:a"}, {"source": []}, {"source": {}}, {"source": {"storage": "main"}},
    {"source": {"name": "a"}}, {"source": {"storage": 1, "name": "a"}}, {"source": {"storage": "main", "name": ["a"]}},
    {"source": {"state_dict": "x"}}, {"source": {"storage": "main", "name": "a", "state_dict": "x"}},
    {"target": 7}, {"options": []}, {"options": {"overwrite": 1}}, {"options": {"overwrite": "true"}},
    {"options": {"pace": "slow"}}, {"options": {"pace": 1}}, {"options": {"pace": None}},
    {"options": {"files_per_rank": 0}}, {"options": {"files_per_rank": 1.5}}, {"options": {"files_per_rank": 1 << 40}},
    {"include": "model.*"}, {"include": [1]}, {"exclude": {"a": 1}}, {"rename": [["a"]]}, {"rename": "s/a/b/"},
    {"rename": [[1, 2]]}, {"dtype": [["*", "float99"]]}, {"dtype": [["*"]]}, {"labels": ["a"]}, {"labels": {"a": 1}},
], ids=str)
def test_fields_of_wrong_type(d, change):
    post(d, {**RESHARD, **change}, "validation_failed", "unknown_field", status=422)


@pytest.mark.parametrize("target,codes", [
    ({"world_size": 0}, ("validation_failed",)), ({"world_size": 65537}, ("validation_failed",)),
    ({"world_size": "2"}, ("validation_failed",)), ({"world_size": 2.5}, ("validation_failed",)),
    ({"world_size": 1 << 70}, ("validation_failed", "invalid_json")), ({"format": "hdf5"}, ("validation_failed",)),
    ({"layout": {"match": "*"}}, ("validation_failed", "layout_invalid")),
    ({"layout": [7]}, ("validation_failed", "layout_invalid")),
    ({"layout": [{"match": "*"}]}, ("validation_failed", "layout_invalid")),
    ({"layout": [{"placements": ["Shard(0)"]}]}, ("validation_failed", "layout_invalid")),
    ({"layout": [{"match": "*", "mesh": [2], "placements": ["Shard(0)", "Shard(1)"]}]}, ("layout_invalid", "validation_failed")),
    ({"layout": [{"match": "*", "mesh": [2], "placements": ["Shard(x)"]}]}, ("layout_invalid", "validation_failed")),
    ({"layout": [{"match": "*", "mesh": [2], "placements": ["Split(0)"]}]}, ("layout_invalid", "validation_failed")),
    ({"layout": [{"match": "*", "mesh": [0], "placements": ["Shard(0)"]}]},
     ("layout_invalid", "validation_failed", "world_mismatch")),
    ({"layout": [{"match": "*", "mesh": [1 << 20, 1 << 20, 1 << 30], "placements": ["R", "R", "R"]}]},
     ("layout_invalid", "validation_failed", "world_mismatch", "limit_exceeded")),
    ({"world_size": 3, "layout": [{"match": "*", "mesh": [2], "placements": ["Shard(0)"]}]}, ("world_mismatch",)),
    ({"layout": [{"match": "a", "mesh": [2], "placements": ["R"]}, {"match": "b", "mesh": [3], "placements": ["R"]}]},
     ("world_mismatch",)),
    ({"world_size": 2, "layout": [{"match": "*", "mesh": [2], "ranks": [0, 5], "placements": ["R"]}]},
     ("layout_invalid", "validation_failed", "world_mismatch")),
    ({"world_size": 2, "layout": [{"match": "*", "mesh": [2], "ranks": [1, 1], "placements": ["R"]}]},
     ("layout_invalid", "validation_failed")),
    ({"world_size": 2, "layout": [{"match": "*", "boxes": [{"rank": 9, "offsets": [0], "sizes": [1]}]}]},
     ("layout_invalid", "validation_failed", "world_mismatch")),
    ({"world_size": 2, "layout": [{"match": "*", "boxes": [{"rank": 0, "offsets": [-1], "sizes": [1]}]}]},
     ("layout_invalid", "validation_failed")),
    ({"world_size": 2, "layout": [{"match": "*", "chunks": {"dim": 0}}]}, ("layout_invalid", "validation_failed")),
    ({"world_size": 2, "layout": [{"match": "*", "chunks": {"dim": 0, "ranks": []}}]}, ("layout_invalid", "validation_failed")),
    ({"world_size": 2, "layout": [{"match": "*", "mesh": [2], "placements": ["R"], "chunks": {"dim": 0, "ranks": [0]}}]},
     ("layout_invalid", "validation_failed", "unknown_field")),
    ({"world_size": 2, "layout": [{"match": "*", "colour": 1, "placements": ["R"]}]}, ("unknown_field",)),
], ids=str)
def test_layouts_that_cannot_be(d, target, codes):
    post(d, {**RESHARD, "target": {**RESHARD["target"], **target}}, *codes)


@pytest.mark.parametrize("layout,codes", [
    ([{"match": "*", "boxes": [{"rank": 0, "offsets": [0, 0], "sizes": [1, 1]}]}], ("layout_invalid", "coverage_hole", "plan_invalid")),
    ([{"match": "*", "boxes": [{"rank": 0, "offsets": [0, 0], "sizes": [10 ** 9, 1]}]}],
     ("layout_invalid", "plan_invalid", "coverage_hole")),
], ids=str)
def test_layouts_that_do_not_fit_the_tensors(d, layout, codes):
    c = Crafted(d.storages["main"])
    name = f"target/{lib.fresh()}"
    d.api.fails("reshard", *codes, source=c.ref, target={"storage": "main", "name": name, "world_size": 2, "layout": layout})
    assert not (d.storages["main"] / name).exists()


BAD_NAMES = ["", "..", ".", "a/..", "../a", "a/../b", "/etc", "/", "a//b", "a/", "/a", ".hidden", "a/.b", "-rf", "a/-b",
             "a\x00b", "a\nb", "a\x7fb", "x" * 201, "/".join("abcdefghijklmnopq"), "a\x1bb", "..\\..\\x/.."]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names(d, name):
    ref = {"storage": "main", "name": name}
    codes = ("name_invalid", "validation_failed", "invalid_json")
    post(d, {**RESHARD, "source": ref}, *codes)
    post(d, {**RESHARD, "target": ref}, *codes)
    post(d, {"kind": "delete", "target": ref}, *codes)
    if name:
        d.api.get(d.api.storage_path("main", name)).problem("name_invalid", "not_found", "invalid_request", "validation_failed")
        d.api.delete(d.api.storage_path("main", name)).problem("name_invalid", "not_found", "invalid_request", "validation_failed")


@pytest.mark.parametrize("storage", ["", "nope", "Main", "main/x", "../main", "shm", "a" * 33, "1a"])
def test_storages(d, storage):
    post(d, {**RESHARD, "source": {"storage": storage, "name": "a"}}, "not_found", "name_invalid", "validation_failed")


def test_world_and_kind_that_do_not_go_together(d):
    post(d, {**RESHARD, "target": RESHARD["source"]}, "validation_failed")
    post(d, {"kind": "save", "source": {"storage": "main", "name": "a"}, "target": {"storage": "main", "name": "b"}},
         "validation_failed", "unknown_field")
    post(d, {"kind": "load", "source": {"storage": "main", "name": "a"}, "target": {"storage": "main", "name": "b"}},
         "validation_failed", "unknown_field")
    post(d, {"kind": "verify", "source": {"storage": "main", "name": "a"}, "level": "deep"}, "validation_failed")
    post(d, {"kind": "diff", "a": {"storage": "main", "name": "a"}}, "validation_failed")
    post(d, {"kind": "diff", "a": RESHARD["source"], "b": RESHARD["target"], "rtol": -1}, "validation_failed")


def test_paths_and_methods(d):
    for path in ("/v2/jobs", "/v1", "/v1/nope", "/v1/jobs/x/y/z", "/v1/jobs/0000:explode", "//v1/jobs"):
        d.api.get(path).problem("not_found", status=404)
    d.api.get("/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV").problem("not_found", status=404)
    d.api.get("/v1/jobs/nope/plan").problem("not_found", status=404)
    a = d.api.request("PUT", "/v1/jobs", body=b"{}")
    a.problem("method_not_allowed", status=405)
    assert "POST" in a.headers["Allow"]
    d.api.request("BREW", "/v1/jobs").problem("method_not_allowed", status=405)
    d.api.get("/v1/jobs/" + "a" * 10000).problem("uri_too_long", status=414)
    assert d.api.get("/v1/jobs/" + "a" * 100000).status in (414, 431)  # beyond the head's memory: the library's own words
    d.api.get("/v1/jobs/%zz").problem("invalid_request", "not_found")
    d.api.get("/v1/jobs?nope=1").problem("unknown_field", "invalid_request", "validation_failed")
    for q in ("page_size=0", "page_size=x", "page_size=-1", "filter=nonsense", "filter=colour%3Dred", "page_token=%00"):
        d.api.get(f"/v1/jobs?{q}").problem("validation_failed", "invalid_request")
    for q in ("wait=x", "wait=-1s", "wait=9999999h", "wait="):
        d.api.get(f"/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV?{q}").problem("validation_failed", "invalid_request", "not_found")
    d.api.get("/v1/jobs", headers={"Accept": "image/png"}).problem("not_acceptable", status=406)


def test_tcp_needs_the_token(d):
    with_token, without = d.tcp_client(), d.tcp_client(token=False)
    with_token.get("/v1/jobs").ok(200)
    without.get("/livez").ok(200)
    without.get("/readyz").ok(200)
    for path in ("/v1/jobs", "/metrics", "/v1/storages"):
        without.get(path).problem("unauthenticated", status=401)
    for bad in ("Bearer x", "Bearer ", "Basic eDp5", "bearer", "Bearer " + "a" * 8000):
        a = without.get("/v1/jobs", headers={"Authorization": bad})
        assert a.status in (401, 431), a.body
    a = with_token.get("/v1/jobs", headers={"Host": "evil.example"})
    a.problem("misdirected", "forbidden", status=421)
    assert d.state.joinpath("token").stat().st_mode & 0o777 == 0o600


@pytest.mark.long
def test_clients_that_go_away(d):
    """Half a request, a long-poll, a stream: the descriptors come back."""
    job = d.api.wait(d.api.submit("verify", source=Crafted(d.storages["main"]).ref, level="structure"))
    before = len(lib.fd_targets(d.proc.pid))  # with the workers of the job
    parts = [b"", b"GET", b"GET /v1/jobs HTTP/1.1\r\nHost: loc", b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n",
             b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"kind\":",
             f"GET /v1/jobs/{job['id']}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), b"\x16\x03\x01\x02\x00", b"\x00" * 10000]
    for _ in range(5):
        open_ = []
        for part in parts:
            s = socket.socket(socket.AF_UNIX)
            s.connect(str(d.socket))
            s.sendall(part)
            open_.append(s)
        d.api.get("/livez").ok(200)
        for s in open_:
            s.close()
    lib.wait_for(lambda: len(lib.fd_targets(d.proc.pid)) <= before + 2, 15, "descriptors of clients that went away")


def test_every_problem_is_in_the_contract(d):
    """openapi.yaml is served, and it lists the codes of base/err.def (tests/tidy.py compares them)."""
    text = d.api.get("/openapi.yaml").body.decode()
    for code in ("unknown_field", "target_busy", "checkpoint_exists", "segment_shrunk"):
        assert code in text


def routes():
    """(method, path) of the table in api/routes.c, with something in place of what is in braces."""
    text = (lib.ROOT / "api/routes.c").read_text()
    for method, path in re.findall(r'^\t\{ "([A-Z]+)", "([^"]+)", h_\w+', text, re.M):
        for part, value in {"storage": "main", "rank": "0", "name": "a", "id": "01ARZ3NDEKTSV4RRFFQ69G5FAV", "fqn": "w",
                            "run": "a", "alias": "b"}.items():
            path = path.replace("{" + part + "}", value)
        yield method, path


@pytest.mark.parametrize("method,path", [pytest.param(*x, id=" ".join(x)) for x in routes() if x[1].startswith("/v1/")])
def test_every_route_says_which_query_it_knows(d, method, path):
    """A page_size with a slip in it would else be obeyed in silence."""
    p = d.api.request(method, f"{path}?page_sise=1", body={} if method in ("POST", "PUT") else None).problem("unknown_field", status=422)
    known = re.search(r"known are: ([a-z_, ]+)$|no field is$", p["detail"])
    assert known, p
    assert ("page_size" in (known[1] or "").split(", ")) == ('did you mean "page_size"?' in p["detail"]), p


BODIES = [
    ("/v1/state-dicts", {"name": "a", "world_sise": 1}, "world_size"),
    ("/v1/state-dicts", {"name": "a", "world_size": 1, "on_owner_death": {"keep_sealed_second": 1}}, "save"),
    ("/v1/state-dicts/a/ranks/0:reserve", {"byte": 1}, "bytes"), ("/v1/state-dicts/a/ranks/0:seal", {"generatoin": 1}, "generation"),
    ("/v1/state-dicts/a/ranks/0:release", {"generatoin": 1}, "generation"), ("/v1/state-dicts/a/ranks/0:renew", {"x": 1}, None),
    ("/v1/storages", {"name": "a", "paht": "/"}, "path"), ("/v1/storages/main:meet", {"tokn": "x"}, "token"),
    ("/v1/checkpoints/main/a:locate", {"boxs": []}, "boxes"),
    ("/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV:cancel", {"x": 1}, None), ("/v1/jobs/01ARZ3NDEKTSV4RRFFQ69G5FAV:retry", {"x": 1}, None),
    *[("/v1/jobs", {"kind": k, "lables": {}}, "labels") for k in KINDS],
    ("/v1/jobs", {**RESHARD, "target": {"storage": "main", "name": "b", "layuot": []}}, "layout"),
    ("/v1/jobs", {**RESHARD, "options": {"overwriet": True}}, "overwrite"),
    ("/v1/jobs", {**RESHARD, "target": {**RESHARD["target"], "layout": [{"match": "*", "placement": ["R"]}]}}, "placements"),
    ("/v1/jobs", {**RESHARD, "target": {**RESHARD["target"], "layout": [{"match": "*", "chunks": {"dmi": 0, "ranks": [0]}}]}}, "dim"),
    ("/v1/jobs", {**RESHARD, "target": {**RESHARD["target"], "layout": [{"match": "*", "boxes": [{"rnak": 0}]}]}}, "rank"),
    ("/v1/jobs", {"kind": "load", "source": RESHARD["source"], "target": {"state_dict": "x"},
                  "optimizer": {"kye": "a", "model": {"state_dict": "m"}}}, "key"),
]


@pytest.mark.parametrize("path,body,meant", BODIES, ids=lambda x: x if isinstance(x, str) else None)
def test_unknown_fields_list_the_known_ones(d, path, body, meant):
    p = d.api.post(path, body).problem("unknown_field", status=422)
    known = re.search(r"; known are: ([a-z_, ]+)$|: no field is$", p["detail"])
    assert known and (meant is None or meant in known[1].split(", ")), p
    assert meant in (None, "save") or f'did you mean "{meant}"?' in p["detail"], p


@pytest.mark.parametrize("body,meant", [
    ({**RESHARD, "kind": "reshrad"}, "reshard"), ({"kind": "verify", "source": RESHARD["source"], "level": "value"}, "values"),
    ({**RESHARD, "target": {**RESHARD["target"], "format": "safe"}}, "safetensors"), ({**RESHARD, "dtype": [["*", "flaot16"]]}, "float16"),
    ({**RESHARD, "options": {"verify": "digests"}}, "digest"), ({**RESHARD, "options": {"dedup": "lowestrank"}}, "lowest_rank"),
])
def test_unknown_words_suggest_the_nearest(d, body, meant):
    p = d.api.post("/v1/jobs", body).problem(status=422)
    assert f'did you mean "{meant}"?' in p["detail"], p


LISTS = ["/v1/jobs", "/v1/state-dicts", "/v1/checkpoints", "/v1/checkpoints/main", "/v1/storages", "/v1/workers"]


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("query", ["page_size=0", "page_size=-1", "page_size=x", "page_size=1.5", "page_size=4294967296"])
def test_page_sizes_that_make_no_sense(d, path, query):
    d.api.get(f"{path}?{query}").problem("invalid_request", status=400)


def test_lists_have_pages(spawn):
    """No more than was asked for, all of it once, whatever the list."""
    d = spawn(["main", "other", "third"])
    long = "/".join(["x" * 200] * 16)
    for n in ("a", "b", long):
        Crafted(d.storages["main"], name=n)
    for n in range(3):
        d.create(f"sd{n}")
    ids = [d.api.run("verify", source={"storage": s, "name": "a"} if s == "main" else {"storage": "main", "name": "b"})["id"]
           for s in ("main", "other", "third")]
    for path, member, key, least in (("/v1/jobs", "jobs", "id", 3), ("/v1/state-dicts", "state_dicts", "name", 3),
                                     ("/v1/checkpoints/main", "checkpoints", "name", 3), ("/v1/storages", "storages", "name", 3),
                                     ("/v1/workers", "workers", "id", 2)):
        whole = [x[key] for x in d.api.get(path).ok(200)[member]]
        seen, token, pages = [], "", 0
        while pages == 0 or token:
            page = d.api.get(f"{path}?page_size=1" + (f"&page_token={urllib.parse.quote(token, safe='')}" if token else "")).ok(200)
            assert len(page[member]) <= 1, (path, page)
            seen += [x[key] for x in page[member]]
            token, pages = page.get("next_page_token"), pages + 1
        assert seen == whole and len(whole) >= least, (path, seen, whole)
    assert set(ids) <= {x["id"] for x in d.api.get("/v1/jobs").ok(200)["jobs"]}


def test_integers_in_other_spellings(d):
    """To JSON 7, 7.0 and 7e0 are one number; what does not fit is refused by its field."""
    name = lib.fresh()
    sd = d.api.post("/v1/state-dicts", f'{{"name":"{name}","world_size":1.0,"slots":2e0}}').ok(201)
    assert sd["world_size"] == 1
    d.api.post(f"/v1/state-dicts/{name}/ranks/0:reserve", '{"bytes":4096.0,"generation":7.0}').ok(200)
    for number in ("7.5", "1e300", str(1 << 64), str(-(1 << 70))):
        p = d.api.post(f"/v1/state-dicts/{name}/ranks/0:seal", f'{{"image_bytes":4096,"generation":{number}}}').problem("validation_failed")
        assert p["pointer"] == "/generation", p
    d.drop(name)
    diff = '{"kind":"diff","a":{"storage":"main","name":"no"},"b":{"storage":"main","name":"no"},"rtol":%s}'
    d.api.post("/v1/jobs", diff % (1 << 70)).problem("not_found")
    d.api.post("/v1/jobs", diff % "1e999").problem("invalid_json")


def test_too_many_boxes_are_counted_before_their_bytes(d):
    box = {"fqn": "", "dtype": "", "shape": [], "offsets": [], "sizes": []}
    p = d.api.post("/v1/checkpoints/main/a:locate", {"boxes": [box] * 10001}).problem("validation_failed", status=422)
    assert "10000" in p["detail"], p


def test_an_empty_last_event_id_is_none(d):
    ended = d.api.run("verify", source=Crafted(d.storages["main"]).ref)["id"]
    a = d.api.get(f"/v1/jobs/{ended}/events", headers={"Last-Event-ID": ""})
    assert a.status == 200 and b"event: job.state" in a.body


def test_dry_runs_that_are_refused_take_no_place(d):
    """A daemon has so many that wait, and no more."""
    verify = lambda ref: d.api.post("/v1/jobs?dry_run=true", {"kind": "verify", "source": ref})  # noqa: E731
    for _ in range(70):
        verify({"storage": "main", "name": "no/such@latest"}).problem("not_found", status=404)
    verify(Crafted(d.storages["main"]).ref).ok(200)
