"""What verify jobs found out is remembered: a checkpoint's record says `verified` until the checkpoint is another one."""
import http.server
import json
import os
import shutil
import subprocess
import threading

import pytest
from crafted import Crafted

import dcpd as lib


@pytest.fixture
def c(d):
    return Crafted(d.storages["main"])


def record(d, name):
    one = d.api.get(d.api.storage_path("main", name)).ok(200)
    listed = [x for x in d.api.get("/v1/checkpoints/main?page_size=1000&prefix=" + name).ok(200)["checkpoints"] if x["name"] == name]
    assert len(listed) == 1 and listed[0]["verified"] == one["verified"] and listed[0]["etag"] == one["etag"]
    return one


def verdict(d, name):
    return record(d, name)["verified"]


def rot(path, offset=-30, silent=True):
    """Flips one bit; as a disk does it, so that no time changes (silent), or as a program does."""
    st = path.stat()
    with open(path, "r+b") as f:
        f.seek(offset % st.st_size)
        byte = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([byte[0] ^ 0x10]))
    if silent:
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def saved(d, name=None):
    """A checkpoint of ours with three tensors; (its reference, the files of `a`, and of `b` and `c`)."""
    sd, ref = lib.fresh(), {"storage": "main", "name": name or f"verdicts/{lib.fresh()}"}
    a, zeros = ("U8", [5000], bytes(range(250)) * 20), ("U8", [5000], bytes(5000))
    d.put(sd, [lib.image({"a": a}), lib.image({"b": zeros, "c": zeros})])
    d.api.run("save", source={"state_dict": sd}, target=ref, options={"overwrite": name is not None})
    d.drop(sd)
    where = d.storages["main"] / ref["name"]
    return ref, where / "__0_0.distcp", where / "__1_0.distcp"


def place_of(d, ref, fqn):
    listed = d.api.get(d.api.storage_path("main", ref["name"], "/tensors")).ok(200)["tensors"]
    chunk = next(t for t in listed if t["fqn"] == fqn)["chunks"][0]
    return chunk["offset"] + chunk["length"] // 2


def test_verified(d):
    ref, *_ = saved(d)
    assert verdict(d, ref["name"]) is None
    j = d.api.run("verify", source=ref, level="structure")
    v = verdict(d, ref["name"])
    assert (v["state"], v["level"], v["job"]) == ("unverified", "structure", j["id"])
    j = d.api.run("verify", source=ref, level="digest")
    v = verdict(d, ref["name"])
    assert (v["state"], v["level"], v["job"], v["at"]) == ("verified", "digest", j["id"], j["finished_at"])
    assert j["result"]["identity"] == record(d, ref["name"])["etag"]
    d.api.run("verify", source=ref, level="structure")
    assert verdict(d, ref["name"]) == v, "a look at sizes alone says less"
    d.api.run("verify", source=ref, level="values", include=["a"])
    assert verdict(d, ref["name"]) == v, "a part is not the whole"


def test_damaged(spawn):
    """A flipped bit that no time tells of: the verdict lasts until the next verify, then says damaged, over a restart too; loads warn."""
    d = spawn()
    ref, *files = saved(d)
    d.api.run("verify", source=ref, level="digest")
    for file, fqn in zip(files, "ac"):
        rot(file, place_of(d, ref, fqn))
    assert verdict(d, ref["name"])["state"] == "verified"
    p = d.api.fails("verify", "checkpoint_damaged", source=ref, level="digest")
    assert p["identity"] == record(d, ref["name"])["etag"] and p["damage_count"] == 2
    found = sorted(p["damage"], key=lambda x: x["fqn"])
    assert [(x["fqn"], x["rank"], x["file"], x["part"]) for x in found] == [("a", 0, "__0_0.distcp", "payload"),
                                                                            ("c", 1, "__1_0.distcp", "payload")]
    for x in found:
        assert x["offset"] <= place_of(d, ref, x["fqn"]) < x["offset"] + x["bytes"]
    v = verdict(d, ref["name"])
    assert (v["state"], v["level"], v["damage_count"]) == ("damaged", "digest", 2)
    d.api.fails("load", "digest_mismatch", source=ref, target={"state_dict": lib.fresh()})
    assert verdict(d, ref["name"]) == v, "the list is worth more than the place where a load has stopped"
    d.stop()
    d.start()
    assert verdict(d, ref["name"]) == v
    j = d.api.run("load", source=ref, target={"state_dict": lib.fresh()}, include=["b"])
    (w,) = j["result"]["warnings"]
    assert w["code"] == "checkpoint_damaged_known" and v["job"] in w["detail"] and v["at"] in w["detail"]
    shutil.rmtree(files[0].parent)
    saved(d, ref["name"])
    assert verdict(d, ref["name"]) is None


@pytest.mark.parametrize("file", [".metadata", ".dcpd.json", "__1_0.distcp"])
def test_what_cannot_even_be_opened_is_marked(d, file):
    """Its record cannot be made: the list, which looks at no content, tells of it."""
    ref, *files = saved(d)
    if file.startswith("__"):
        files[1].unlink()
    else:
        rot(files[0].parent / file, offset=40)
    p = d.api.fails("verify", "checkpoint_damaged", source=ref, level="digest")
    assert file in [x["file"] for x in p["damage"]], p
    (listed,) = d.api.get("/v1/checkpoints/main?prefix=" + ref["name"]).ok(200)["checkpoints"]
    assert (listed["verified"]["state"], listed["verified"]["level"], listed["etag"]) == ("damaged", "digest", p["identity"])
    assert listed["verified"]["damage_count"] == p["damage_count"]


def test_any_job_that_finds_damage_tells(d):
    ref, file, _ = saved(d)
    d.api.run("verify", source=ref, level="digest")
    rot(file, place_of(d, ref, "a"))
    d.api.fails("reshard", "digest_mismatch", source=ref, target={"storage": "main", "name": f"verdicts/{lib.fresh()}", "world_size": 1})
    assert verdict(d, ref["name"])["state"] == "damaged"


@pytest.mark.parametrize("change", ["overwritten", "deleted and saved", "written to", "metadata written to", "file replaced", "moved away"])
def test_void(d, change):
    ref, file, other = saved(d)
    d.api.run("verify", source=ref, level="digest")
    before = record(d, ref["name"])
    assert before["verified"]["state"] == "verified"
    if change == "overwritten":
        saved(d, ref["name"])
    elif change == "deleted and saved":
        d.api.run("delete", target=ref)
        saved(d, ref["name"])
    elif change == "written to":
        rot(file, silent=False)
    elif change == "metadata written to":
        os.utime(file.parent / ".metadata")
    elif change == "file replaced":
        st = file.stat()
        shutil.copy2(file, str(file) + ".new")
        os.rename(str(file) + ".new", file)
        assert file.stat().st_mtime_ns == st.st_mtime_ns
    else:
        os.rename(other, str(other) + ".away")
        assert d.api.get("/v1/checkpoints/main?prefix=" + ref["name"]).ok(200)["checkpoints"][0]["verified"] is None
        return
    after = record(d, ref["name"])
    assert after["verified"] is None and after["etag"] != before["etag"]


def test_what_does_not_matter(d):
    """Reading, other people's files and rights of payload files change nothing of what is stored."""
    ref, file, _ = saved(d)
    d.api.run("verify", source=ref, level="digest")
    before = record(d, ref["name"])
    file.chmod(0o600)
    (file.parent / "notes.txt").write_text("fine")
    file.read_bytes()
    after = record(d, ref["name"])
    assert (after["etag"], after["verified"]) == (before["etag"], before["verified"])


@pytest.mark.parametrize("case", ["rank_local", "sharded_rowwise", "hf_single"])
def test_other_formats_have_an_identity(d, case, tmp_path):
    if case == "hf_single":
        where = d.storages["main"] / "verdicts" / lib.fresh()
        where.mkdir(parents=True)
        (where / "model.safetensors").write_bytes(lib.image({"w": ("U8", [100], bytes(100))}))
    else:
        where = Crafted(d.storages["main"], f"torch-2.15.0/{case}").dir
    name = str(where.relative_to(d.storages["main"]))
    seen = {record(d, name)["etag"]}
    for f in sorted(where.iterdir()):
        os.utime(f)
        seen.add(record(d, name)["etag"])
    assert len(seen) == 1 + len(list(where.iterdir()))


def test_nothing_to_compare_with(d):
    """PyTorch's own checkpoints with archives that have CRCs are verified; a safetensors file has none, and is not called so."""
    c = Crafted(d.storages["main"])
    j = d.api.run("verify", source=c.ref, level="digest")
    v = verdict(d, c.name)
    assert v["state"] == ("verified" if j["result"]["verified_bytes"] else "unverified")
    assert v["unverifiable"] == j["result"]["unverifiable"]


# ------------------------------------------------------------------------------------------------------------- dcpctl


def verdict_of(out, name):
    """What `dcpctl ls` has in the column VERIFIED."""
    head, *lines = out.splitlines()
    return next(x for x in lines if f" {name} " in x)[head.index("VERIFIED"):].rstrip()


def test_dcpctl_marks_checkpoints(d):
    ref, file, _ = saved(d)
    full = f"main:{ref['name']}"
    out = d.ctl("ls", full).stdout
    assert verdict_of(out, ref["name"]) == "-"
    assert "verified" not in d.ctl("show", full).stdout
    assert d.ctl("verify", full).returncode == 0
    v = verdict(d, ref["name"])
    assert verdict_of(d.ctl("ls", full).stdout, ref["name"]) == f"verified digest {v['at']}"
    shown = d.ctl("show", full).stdout
    assert f"verified digest {v['at']}, job {v['job']}\n" in shown and "damage" not in shown, shown
    rot(file, place_of(d, ref, "a"))
    r = d.ctl("verify", full)
    assert r.returncode == 5 and r.stderr.splitlines()[-2].split() == "FILE RANK TENSOR OFFSET BYTES WHAT".split(), r.stderr
    assert r.stderr.splitlines()[-1].split()[:3] == ["__0_0.distcp", "0", "a"] and r.stderr.endswith(" payload\n"), r.stderr
    v = verdict(d, ref["name"])
    assert verdict_of(d.ctl("ls", full).stdout, ref["name"]) == f"damaged digest {v['at']}"
    assert f"damaged digest {v['at']}, 1 damaged place, job {v['job']}\n" in d.ctl("show", full).stdout
    sd = lib.fresh()
    r = d.ctl("load", full, f"shm:{sd}", "--include", "b")
    assert r.returncode == 0 and r.stderr.count("warning") == 1 and v["job"] in r.stderr, r.stderr
    d.drop(sd)


class OneJob(http.server.BaseHTTPRequestHandler):
    """A daemon that knows one job, whatever is asked."""
    job = None

    def do_GET(self):
        body = json.dumps(self.job).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_dcpctl_lists_damage():
    damage = [{"fqn": f"model.layers.{i}.w", "rank": i % 4, "file": f"__{i % 4}_0.distcp", "offset": 4096 * i, "bytes": 65536,
               "part": "payload", "code": "digest_mismatch"} for i in range(30)]
    damage[1] = {"fqn": None, "rank": None, "file": ".metadata", "offset": 0, "bytes": 700, "part": "metadata"}
    damage[2]["fqn"] = "evil\x1b[31m"
    error = {"type": "urn:dcpd:problem:checkpoint_damaged", "title": "The checkpoint is damaged", "status": 422, "retryable": False,
             "code": "checkpoint_damaged", "detail": "1200 items are damaged", "damage": damage, "damage_count": 1200}
    OneJob.job = {"id": "01J" + "A" * 23, "kind": "verify", "state": "failed", "created_at": "2026-11-22T00:00:00.000Z", "error": error}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneJob) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = lib.clean_environment(DCPD_URL=f"http://127.0.0.1:{server.server_port}", DCPD_TOKEN="x")
        r = subprocess.run([lib.BIN / "dcpctl", "job", OneJob.job["id"]], env=env, capture_output=True, text=True, timeout=60)
        server.shutdown()
    lines = r.stderr.splitlines()
    assert lines[0] == "dcpctl: checkpoint_damaged: 1200 items are damaged"
    assert lines[1].split() == "FILE RANK TENSOR OFFSET BYTES WHAT".split()
    assert len(lines) == 2 + 20 + 1 and lines[-1] == "and 1180 more (--json lists them)", r.stderr
    assert lines[2].split() == ["__0_0.distcp", "0", "model.layers.0.w", "0", "65536", "payload"]
    assert lines[3].split() == [".metadata", "-", "-", "0", "700", "metadata"]
    assert "\x1b" not in r.stderr and "evil?[31m" in r.stderr
