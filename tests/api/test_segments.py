"""State dicts in shared memory: slots, generations, leases, owners; and images that are not what they must be."""
import json
import os
import stat
import struct
import subprocess
import tempfile
import time

import pytest

import dcpd as lib

F4 = ("F32", [4], bytes(range(16)))


def save(d, sd, **more):
    return {"source": {"state_dict": sd, **more}, "target": {"storage": "main", "name": f"seg/{lib.fresh()}"}}


def no_checkpoint(d, job):
    assert not (d.storages["main"] / job["target"]["name"]).exists()


def test_sizes_whose_sum_has_no_64_bits_are_too_large_for_a_storage(d):
    sd, ring = lib.fresh(), {"offset": 4096, "bytes": 1 << 20}
    d.create(sd, world=4, slots=2)
    for r in range(4):
        d.reserve(sd, r, (1 << 20) + 8192, 1)
        d.api.post(f"/v1/state-dicts/{sd}/ranks/{r}:seal", {"generation": 1, "image_bytes": 1 << 62, "filling": True, "ring": ring}).ok()
    job = {"kind": "save", **save(d, sd, generation=1, await_seal=True)}
    p = d.api.post("/v1/jobs", job).problem("storage_full", status=507)
    assert p["expected"] == str((1 << 64) - 1)
    d.drop(sd)


def test_life(d):
    sd = lib.fresh()
    made = d.create(sd, world=2, slots=2)
    assert made["name"] == sd and made["world_size"] == 2
    assert [len(r["slots"]) for r in d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"]] in ([2, 2], [0, 0])
    r0 = d.reserve(sd, 0, 5000, 1)
    assert r0["bytes"] >= 5000 and r0["slot"] in (0, 1)
    f = lib.segment_file(r0["segment"])
    assert f.stat().st_mode & 0o777 == 0o600 and f.stat().st_size >= 5000
    assert d.reserve(sd, 0, 5000, 1)["segment"] == r0["segment"], "the same again while it is open"
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:renew").ok()
    d.drop(sd)
    assert not f.exists()
    d.api.get(f"/v1/state-dicts/{sd}").problem("not_found", status=404)


def test_save_and_look(d):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": F4, "b": ("I64", [], struct.pack("<q", 7))}, {"values": {"lr": {"json": 0.5}}})], generation=3)
    s = d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"][0]["slots"]
    assert [(x["state"], x["generation"]) for x in s if x["state"] == "sealed"] == [("sealed", 3)]
    tensors = d.api.get(f"/v1/state-dicts/{sd}/tensors").ok(200)
    assert {t["fqn"]: (t["dtype"], t["shape"]) for t in tensors["tensors"]} == {"a": ("float32", [4]), "b": ("int64", [])}
    job = save(d, sd)
    done = d.api.run("save", **job)
    assert done["milestones"]["durable"] and done["result"]
    where = d.api.storage_path("main", job["target"]["name"])
    assert d.api.get(where).ok(200)["format"] == "dcp"
    assert d.api.get(where + "/tensors/a?format=raw").body == F4[2]
    assert d.api.get(where + "/tensors/a?slice=1:3&format=raw").body == F4[2][4:12]
    d.api.get(where + "/tensors/a?slice=1:3,0:1").problem("range_invalid")
    d.api.get(where + "/tensors/zzz").problem("not_found", status=404)


def test_look_at_texts_that_json_hardly_says(d):
    """A NUL, in a name too, is shown; half a surrogate pair is not, and stops nothing."""
    sd, values = lib.fresh(), {"nul": "a\0b", "half": "\ud800", "key\0": ["c\0d"], "deep": [[[["x"]]]]}
    d.put(sd, [lib.image({"a\0b": F4}, {"values": {k: {"json": v} for k, v in values.items()}})])
    job = save(d, sd)
    d.api.run("save", **job)
    where = d.api.storage_path("main", job["target"]["name"])
    seen = d.api.get(where + "/tensors").ok(200)
    assert [t["fqn"] for t in seen["tensors"]] == ["a\0b"]
    shown = {v["fqn"]: v.get("value", v.get("opaque")) for v in seen["values"]}
    assert shown == {**values, "half": "str"}


def test_not_sealed(d):
    sd, job = lib.fresh(), None
    d.create(sd, world=2)
    job = save(d, sd)
    d.api.fails("save", "not_sealed", **job)
    data = lib.image({"a": F4})
    s = d.reserve(sd, 0, len(data), 1)
    lib.write_segment(s["segment"], data)
    d.seal(sd, 0, 1, len(data))
    p = d.api.fails("save", "not_sealed", **job)
    assert "1" in p["detail"], f"the rank that lacks it: {p}"
    no_checkpoint(d, job)


def test_ranks_seal_different_generations(d):
    sd, data = lib.fresh(), lib.image({"a": F4})
    d.create(sd, world=2)
    for rank, generation in ((0, 5), (1, 6)):
        lib.write_segment(d.reserve(sd, rank, len(data), generation)["segment"], data)
        d.seal(sd, rank, generation, len(data))
    job = save(d, sd)
    d.api.fails("save", "not_sealed", **job)
    d.api.fails("save", "not_sealed", **save(d, sd, generation=6))
    no_checkpoint(d, job)


def test_generations_grow(d):
    sd, data = lib.fresh(), lib.image({"a": F4})
    d.put(sd, [data], generation=9)
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:reserve", {"bytes": 4096, "generation": 8}).problem("generation_stale", status=409)
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:seal", {"generation": 8, "image_bytes": 10}).problem(
        "generation_stale", "not_found", "state_conflict")
    d.seal(sd, 0, 9, len(data))  # once more: fine
    d.api.fails("save", "not_sealed", **save(d, sd, generation=10))


def test_slots_busy_and_released(d):
    sd, data = lib.fresh(), lib.image({"a": F4})
    d.put(sd, [data], generation=1)
    d.put(sd, [data], generation=2, create=False)
    where = f"/v1/state-dicts/{sd}/ranks/0"
    start = time.monotonic()
    a = d.api.post(f"{where}:reserve", {"bytes": len(data), "generation": 3})
    a.problem("slots_busy")  # both generations are kept until one is released
    d.api.post(f"{where}:reserve?wait=1s", {"bytes": len(data), "generation": 3}).problem("slots_busy")
    assert time.monotonic() - start > 0.8
    d.api.post(f"{where}:release", {"generation": 1}).ok()
    d.api.post(f"{where}:reserve", {"bytes": len(data), "generation": 3}).ok()
    d.api.post(f"{where}:release", {"generation": 77}).ok()  # not held: released before
    d.api.run("save", **save(d, sd, generation=2))


def test_exists_and_wrong_calls(d):
    sd = lib.fresh()
    d.create(sd, world=1)
    d.api.post("/v1/state-dicts", {"name": sd, "world_size": 1}).problem("state_dict_exists", status=409)
    at = f"/v1/state-dicts/{sd}/ranks"
    d.api.post(f"{at}/1:reserve", {"bytes": 10, "generation": 1}).problem("not_found", "validation_failed")
    d.api.post(f"{at}/x:reserve", {"bytes": 10, "generation": 1}).problem("not_found", "validation_failed")
    d.api.post(f"{at}/0:reserve", {"bytes": -1, "generation": 1}).problem("validation_failed")
    d.api.post(f"{at}/0:reserve", {"bytes": 0, "generation": 1}).problem("validation_failed")
    d.api.post(f"{at}/0:reserve", {"bytes": 10}).problem("validation_failed")
    d.api.post(f"{at}/0:reserve", {"bytes": 10, "generation": -3}).problem("validation_failed")
    d.api.post(f"{at}/0:seal", {"generation": 1, "image_bytes": 10}).problem("state_conflict", "not_found", "generation_stale")
    r = d.reserve(sd, 0, 4096, 1)
    d.api.post(f"{at}/0:seal", {"generation": 1, "image_bytes": r["bytes"] + 1}).problem("validation_failed")
    for world in (0, -1, 65537, 1.5, "2", None, True):
        d.api.post("/v1/state-dicts", {"name": lib.fresh(), "world_size": world}).problem("validation_failed")
    for name in ("", "a/b", "a:b", "..", "x" * 300, 7, None, "a\nb"):
        d.api.post("/v1/state-dicts", {"name": name, "world_size": 1}).problem("name_invalid", "validation_failed")


def test_more_than_there_is(d):
    sd = lib.fresh()
    d.create(sd)
    p = d.api.post(f"/v1/state-dicts/{sd}/ranks/0:reserve", {"bytes": 1 << 50, "generation": 1}).problem("shm_exhausted", status=507)
    assert str(1 << 50) in p["detail"] or p.get("expected"), p
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:reserve", {"bytes": (1 << 63) + 5, "generation": 1}).problem(
        "validation_failed", "invalid_json", "shm_exhausted")


def test_segment_shrunk(d):
    sd = lib.fresh()
    seg = d.put(sd, [lib.image({"a": ("U8", [1 << 20], bytes(1 << 20))})])[0]
    job = save(d, sd)
    os.truncate(lib.segment_file(seg), 8192)
    d.api.fails("save", "segment_shrunk", **job)
    no_checkpoint(d, job)
    d.drop(sd)
    d.put(sd, [lib.image({"a": F4})])  # the gang works on
    d.api.run("save", **save(d, sd))


def test_segment_gone(d):
    sd = lib.fresh()
    seg = d.put(sd, [lib.image({"a": F4})])[0]
    lib.segment_file(seg).unlink()
    d.api.run("save", **save(d, sd))  # dcpd holds it open: the content is still there


def header(text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(4,), a=0, b=16):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [a, b]}


def meta(**dcpd):
    return {"__metadata__": {"dcpd": json.dumps({"version": 1, **dcpd})}, "a": entry()}


def tensors(**t):
    return header(meta(tensors={"a": t}), bytes(16))


IMAGES = {
    "nothing": b"",
    "too short": b"\0\0\0",
    "zeroes": bytes(64),
    "header longer than the segment": struct.pack("<Q", 1 << 40) + b"{}",
    "header length at the limit": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "not JSON": header(b"hello!!!"),
    "JSON cut short": header(b'{"a":{"dtype":"F32"'),
    "a list": header(b"[1,2,3]"),
    "not UTF-8": header(b'{"\xff\xfe":1}'),
    "deep JSON": header(b"[" * 100000 + b"]" * 100000),
    "NaN": header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)),
    "unknown dtype": header({"a": entry("F13")}, bytes(16)),
    "dtype a number": header({"a": {"dtype": 3, "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    "no offsets": header({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)),
    "size and shape differ": header({"a": entry(shape=(5,))}, bytes(16)),
    "end before begin": header({"a": entry(a=16, b=0)}, bytes(16)),
    "past the end": header({"a": entry(shape=(1 << 30,), b=4 << 30)}, bytes(16)),
    "shape overflows": header({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(16)),
    "negative shape": header({"a": entry(shape=(-4,))}, bytes(16)),
    "fraction in shape": header({"a": entry(shape=(4.5,))}, bytes(16)),
    "100 dims": header({"a": entry(shape=(1,) * 100, b=4)}, bytes(4)),
    "a hole": header({"a": entry(), "b": entry(a=32, b=48)}, bytes(48)),
    "overlap": header({"a": entry(), "b": entry(a=8, b=24)}, bytes(24)),
    "key twice": header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
                        bytes(2)),
    "metadata not text": header({"__metadata__": {"dcpd": 5}, "a": entry()}, bytes(16)),
    "dcpd not JSON": header({"__metadata__": {"dcpd": "{{{"}, "a": entry()}, bytes(16)),
    "dcpd of another version": header({"__metadata__": {"dcpd": '{"version":99}'}, "a": entry()}, bytes(16)),
    "entry that is not there": header(meta(tensors={"zzz": {"fqn": "a"}}), bytes(16)),
    "chunk outside the tensor": tensors(fqn="a", global_shape=[6], offsets=[4]),
    "offsets of other rank": tensors(fqn="a", global_shape=[4, 4], offsets=[0]),
    "negative offset": tensors(fqn="a", global_shape=[8], offsets=[-1]),
    "global shape overflows": tensors(fqn="a", global_shape=[(1 << 63) - 1], offsets=[(1 << 63) - 2]),
    "a hole in the tensor": tensors(fqn="a", global_shape=[8], offsets=[0]),
    "dtype without size": tensors(fqn="a", dtype="qint8"),
    "value not base64": header(meta(values={"v": {"bytes": "!!!"}}), bytes(16)),
    "value of no kind": header(meta(values={"v": {}}), bytes(16)),
    "value and tensor of one name": header(meta(values={"a": {"json": 1}}), bytes(16)),
    "pickle that is none": header(meta(values={"v": {"pickle": "AAAA"}}), bytes(16)),
}
CODES = ("format_image", "format_safetensors", "limit_exceeded", "dtype_unsupported", "duplicate_key", "coverage_hole",
         "plan_invalid", "format_pickle")


@pytest.mark.parametrize("what", IMAGES)
def test_image_invalid(d, what):
    sd, data = lib.fresh(), IMAGES[what]
    d.create(sd)
    s = d.reserve(sd, 0, max(1, len(data)), 1)
    lib.write_segment(s["segment"], data)
    a = d.api.post(f"/v1/state-dicts/{sd}/ranks/0:seal", {"generation": 1, "image_bytes": max(1, len(data))})
    if a.status >= 400:
        a.problem("validation_failed", *CODES)
        return
    job = save(d, sd)
    p = d.api.fails("save", *CODES, **job)
    assert p.get("rank") == 0 or p.get("fqn"), f"says where: {p}"
    no_checkpoint(d, job)


@pytest.mark.parametrize("what,second,codes", [
    ("same FQN, other shape", {"fqn": "a", "global_shape": [8], "offsets": [4]}, ("plan_invalid", "size_mismatch", "format_image")),
    ("overlapping boxes", {"fqn": "a", "global_shape": [6], "offsets": [2]}, ("plan_invalid", "coverage_hole", "format_image")),
])
def test_ranks_that_do_not_fit(d, what, second, codes):
    first = {"fqn": "a", "global_shape": [6], "offsets": [0]}
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": F4}, {"tensors": {"a": t}}) for t in (first, second)])
    job = save(d, sd)
    p = d.api.fails("save", *codes, **job)
    assert p.get("fqn") == "a", p
    no_checkpoint(d, job)


def test_ranks_of_other_dtype(d):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": F4}), lib.image({"a": ("I32", [4], bytes(16))})])
    job = save(d, sd)
    d.api.fails("save", "plan_invalid", "kind_mismatch", "format_image", "size_mismatch", **job)
    no_checkpoint(d, job)


def test_divergent_replicas(d):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": F4}), lib.image({"a": ("F32", [4], bytes(16))})])
    done = d.api.run("save", **save(d, sd))
    listed = done["result"].get("divergent")
    assert listed and listed[0]["fqn"] == "a", done["result"]
    job = save(d, sd)
    d.api.fails("save", "divergent", **job, options={"on_divergence": "fail"})
    no_checkpoint(d, job)


@pytest.mark.long
def test_lease_over_drops_what_is_not_sealed(spawn):
    d = spawn()
    d.create("short", lease_seconds=lib.PATIENCE)
    seg = lib.segment_file(d.reserve("short", 0, 4096, 1)["segment"])
    lib.wait_for(lambda: not seg.exists(), 10, "the open slot of a dead trainer is given back")


@pytest.mark.long
def test_on_owner_death_saves(spawn):
    d = spawn()
    d.create("t", lease_seconds=lib.PATIENCE, on_owner_death={"save": {"storage": "main", "name": "last/step-{generation}"}})
    d.put("t", [lib.image({"a": F4})], generation=41, create=False)
    lib.wait_for(lambda: (d.storages["main"] / "last/step-41/.metadata").exists(), 20, "saved after its owner's death")
    d.api.run("verify", source={"storage": "main", "name": "last/step-41"}, level="digest")


def seal(d, name, rank, data, generation, **more):
    lib.write_segment(d.reserve(name, rank, len(data), generation)["segment"], data)
    return d.api.post(f"/v1/state-dicts/{name}/ranks/{rank}:seal", {"generation": generation, "image_bytes": len(data), **more})


def nothing_held(d, name):
    """It is gone, or its slots are free: their bytes may serve a load until somebody needs them."""
    record = d.api.get(f"/v1/state-dicts/{name}")
    return record.status == 404 or all(k["state"] == "free" for r in record.ok(200)["ranks"] for k in r["slots"])


def to(name, **more):
    return {"on_owner_death": {"save": {"storage": "main", "name": name, **more}}}


@pytest.mark.long
def test_on_owner_death_of_one_generation(spawn):
    """What one rank said when it sealed goes before what the state dict says, and outlives a restart."""
    d = spawn()
    one = lib.image({"a": F4})
    d.create("t", world_size=2, lease_seconds=5, **to("never-{generation}"))
    seal(d, "t", 0, one, 5, **to("five", options={"overwrite": True, "files_per_rank": 2}, labels={"step": "5"})).ok(200)
    seal(d, "t", 1, one, 5).ok(200)
    seal(d, "t", 0, one, 6, **to("six")).ok(200)  # rank 1 dies before it seals: the fifth is the newest whole one
    d.kill()
    d.start()
    lib.wait_for(lambda: (d.storages["main"] / "five/.metadata").exists(), 20, "saved under the name that was said")
    job = d.api.get("/v1/jobs").ok(200)["jobs"][0]
    assert job["labels"] == {"step": "5"} and job["target"]["name"] == "five"
    lib.wait_for(lambda: nothing_held(d, "t"), 10, "then given back")
    assert sorted(p.name for p in d.storages["main"].iterdir() if not p.name.startswith(".")) == ["five"]


@pytest.mark.long
def test_generation_saved_by_a_job_is_not_saved_again(spawn):
    """Also not by a later run of the daemon, which could replace something newer of that name."""
    d = spawn()
    d.create("t", lease_seconds=5)
    seal(d, "t", 0, lib.image({"a": F4}), 1, **to("c", options={"overwrite": True})).ok(200)
    d.api.run("save", source={"state_dict": "t"}, target={"storage": "main", "name": "c"}, options={"overwrite": True})
    assert d.api.get("/v1/state-dicts/t").ok(200)["on_owner_death"]["generations"] == {"1": {"drop": True}}
    d.kill()
    d.start()
    lib.wait_for(lambda: d.api.get("/v1/state-dicts/t").status == 404, 10, "dropped")
    assert len(d.api.get("/v1/jobs").ok(200)["jobs"]) == 1


def test_on_owner_death_of_one_generation_is_checked(d):
    name = lib.fresh()
    d.create(name)
    data = lib.image({"a": F4})
    for more, code, pointer in (
            ({"on_owner_death": {"save": {"storage": "main", "name": "a"}, "drop": True}}, "validation_failed", "/on_owner_death"),
            ({"on_owner_death": 7}, "validation_failed", "/on_owner_death"),
            (to("../x"), "name_invalid", "/on_owner_death/save/name"),
            (to("x", format="dcp-rank-local"), "format_unsupported", "/on_owner_death/save/format"),
            (to("x", options={"overwrite": 1}), "validation_failed", "/on_owner_death/save/options/overwrite"),
            (to("x", options={"what": 1}), "unknown_field", "/on_owner_death/save/options/what"),
            (to("x", labels={"a": 1}), "validation_failed", "/on_owner_death/save/labels/a"),
            ({"on_owner_death": {"keep": 1}}, "unknown_field", "/on_owner_death/keep")):
        p = seal(d, name, 0, data, 1, **more).problem(code, status=422)
        assert p["pointer"] == pointer, p
    for g in range(1, 5):  # wishes of generations that are gone are not kept
        seal(d, name, 0, data, g, **to(f"x{g}")).ok(200)
        d.api.post(f"/v1/state-dicts/{name}/ranks/0:release", {"generation": g}).ok(200, 204)
    assert list(d.api.get(f"/v1/state-dicts/{name}").ok(200)["on_owner_death"]["generations"]) == ["4"]
    job = {"source": {"state_dict": name}, "target": {"storage": "main", "name": "x", "format": "safetensors"}}
    assert d.api.post("/v1/jobs", {"kind": "save", **job}).problem("validation_failed")["pointer"] == "/target/format"


CLIENT = """
import json, sys
sys.path.insert(0, {lib!r})
import dcpd
c = dcpd.Client({sock!r})
a = c.request(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else None)
print(a.status, a.json.get("code", "") if a.body else "", a.json.get("segment", "") if a.body else "")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes other users' identities")
def test_other_users(spawn):
    with tempfile.TemporaryDirectory(prefix="dcpd-users-") as where:
        os.chmod(where, 0o755)
        sock = f"{where}/s"
        d = spawn(args=["--listen", f"unix:{sock}", "--allow-group", "nogroup"])
        code = CLIENT.format(lib=where, sock=sock)
        with open(lib.__file__) as f, open(f"{where}/dcpd.py", "w") as out:
            out.write(f.read())

        def as_uid(uid, *args, group=65534):
            r = subprocess.run(["/usr/bin/python3", "-c", code, *args], user=uid, group=group, extra_groups=[], cwd="/",
                               capture_output=True, text=True, timeout=300)
            if "PermissionError" in r.stderr:
                return ["", "no_access"]  # the socket's mode kept it out
            assert r.returncode == 0, r.stderr
            return r.stdout.split()

        assert as_uid(65534, "POST", "/v1/state-dicts", '{"name":"theirs","world_size":1}')[0] == "201"
        status, segment = as_uid(65534, "POST", "/v1/state-dicts/theirs/ranks/0:reserve", '{"bytes":4096,"generation":1}')
        assert status == "200"
        path = str(lib.segment_file(segment))
        opens = ["/usr/bin/python3", "-c", f"open({path!r}, 'r+b').write(b'hello')"]
        assert subprocess.run(opens, user=65534, group=65534, extra_groups=[], capture_output=True).returncode == 0
        assert subprocess.run(opens, user=1, group=65534, extra_groups=[], capture_output=True).returncode != 0
        for method, path, body in (("POST", "/v1/state-dicts/theirs/ranks/0:reserve", '{"bytes":4096,"generation":2}'),
                                   ("GET", "/v1/state-dicts/theirs", "null"), ("GET", "/v1/state-dicts/theirs/digests", "null"),
                                   ("GET", "/v1/state-dicts/theirs/ranks/0/image", "null"), ("DELETE", "/v1/state-dicts/theirs", "null")):
            assert as_uid(1, method, path, body)[:2] in (["403", "forbidden"], ["404", "not_found"]), (method, path)
        job = json.dumps({"kind": "save", "source": {"state_dict": "theirs"}, "target": {"storage": "main", "name": "stolen"}})
        assert as_uid(1, "POST", "/v1/jobs", job)[1] in ("forbidden", "not_found")
        assert as_uid(1, "GET", "/v1/jobs", "null", group=2)[1] == "no_access"
        assert stat.S_IMODE(os.stat(sock).st_mode) == 0o660 and os.stat(sock).st_gid == 65534
        assert stat.S_IMODE(os.stat(d.socket).st_mode) == 0o660
        d.discard()


def test_load_with_a_lease_is_dropped_when_nobody_renews(spawn):
    d = spawn()
    d.put("src", [lib.image({"w": ("F32", [4], bytes(16))})])
    d.api.run("save", source={"state_dict": "src"}, target={"storage": "main", "name": "c"})
    d.api.run("load", source={"storage": "main", "name": "c"}, target={"state_dict": "leased", "lease_seconds": 1})
    d.api.run("load", source={"storage": "main", "name": "c"}, target={"state_dict": "stays"})
    lib.wait_for(lambda: d.api.get("/v1/state-dicts/leased").status == 404, 10, "dropped")
    d.api.get("/v1/state-dicts/stays").ok(200)
    d.api.post("/v1/jobs", {"kind": "load", "source": {"storage": "main", "name": "c"},
                            "target": {"state_dict": "x", "lease_seconds": 0}}).problem("validation_failed", status=422)


@pytest.mark.long
def test_owner_death_keeps_nothing_that_is_saved_or_not_wanted(spawn):
    d = spawn()
    one = lib.image({"w": ("F32", [4], bytes(16))})
    d.put("saved", [one], lease_seconds=lib.PATIENCE)
    d.api.run("save", source={"state_dict": "saved"}, target={"storage": "main", "name": "c"})
    d.put("unwanted", [one], lease_seconds=lib.PATIENCE, on_owner_death={"drop": True})
    d.put("kept", [one], lease_seconds=lib.PATIENCE)
    lib.wait_for(lambda: nothing_held(d, "saved"), 10, "given back")
    lib.wait_for(lambda: d.api.get("/v1/state-dicts/unwanted").status == 404, 10, "dropped")
    d.api.get("/v1/state-dicts/kept").ok(200)
    both = {"drop": True, "save": {"storage": "main", "name": "x-{generation}"}}
    d.api.post("/v1/state-dicts", {"name": "b", "world_size": 1, "on_owner_death": both}).problem("validation_failed")
