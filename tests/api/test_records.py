"""Records: what a checkpoint's own files tell of where it comes from. They outlive the journal, and go along with a copied folder."""
import json
import os
import re
import shutil

import pytest
from delta_form import xxh3

import dcpd as lib


def record(api, name, storage="main"):
    """As the checkpoint's own page, the list and its run have it: the same everywhere."""
    one = api.get(api.storage_path(storage, name)).ok(200)
    (listed,) = [x for x in api.get(f"/v1/checkpoints/{storage}?page_size=1000&prefix={name}").ok(200)["checkpoints"] if x["name"] == name]
    run = name.rpartition("/")[0].replace("/", "%2F") or "-"
    (of_run,) = [x for x in api.get(f"/v1/runs/{storage}/{run}?page_size=1000").ok(200)["checkpoints"] if x["name"] == name]
    keys = ("step", "durable_at", "made_by", "labels", "metrics", "parents", "bytes_shared", "content_digest", "record_problem", "verified")
    for other in (listed, of_run):
        assert [other.get(k) for k in keys] == [one.get(k) for k in keys]
    return one


def saved(d, name=None, generation=1, tensors=None, **fields):
    sd, name = lib.fresh(), name or f"{lib.fresh('records')}/step-{generation}"
    d.put(sd, [lib.image(tensors or {"a": ("F32", [40], bytes(range(160)))})], generation=generation)
    job = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name}, **fields)
    d.drop(sd)
    return name, job


def ref(name, storage="main"):
    return {"storage": storage, "name": name}


def test_who_made_it(d):
    name, job = saved(d, metrics={"loss": 1.5, "tokens": 12, "tiny": 1e-9}, labels={"run": "r1", "ü": 'a"b'})
    r = record(d.api, name)
    assert r["metrics"] == {"loss": 1.5, "tokens": 12, "tiny": 1e-9} and r["labels"] == {"run": "r1", "ü": 'a"b'}
    made = r["made_by"]
    assert (made["job"], made["kind"], made["attempt"]) == (job["id"], "save", 1) and made["version"] and made["uid"] >= 0
    assert re.fullmatch("[0-9a-f]{32}", made["plan_digest"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", r["durable_at"])
    assert job["started_at"] <= r["durable_at"] <= job["finished_at"]
    assert r["step"] == 1 and "parents" not in r and "record_problem" not in r
    again = record(d.api, saved(d)[0])
    assert again["made_by"]["plan_digest"] == made["plan_digest"] and "metrics" not in again and "labels" not in again


def test_the_step_is_the_names_else_the_generation(d):
    assert record(d.api, saved(d, f"{lib.fresh()}/best", generation=300)[0])["step"] == 300
    assert record(d.api, saved(d, f"{lib.fresh()}/step-7", generation=300)[0])["step"] == 7
    for label, step in (("12", 12), ("x", 300)):  # Python's generations count saves: what it knows of steps is the label
        assert record(d.api, saved(d, f"{lib.fresh()}/best", generation=300, labels={"step": label})[0])["step"] == step


def test_an_empty_tensor_with_sizes_whose_bytes_fit_no_number(d):
    """They are nobody's bytes: it is saved, verified and resharded as any other."""
    name, job = saved(d, tensors={"none": ("F64", [0, 1 << 31, 1 << 31], b""), "a": ("F32", [4], bytes(16))})
    digest = job["result"]["content_digest"]
    assert d.api.run("verify", source=ref(name), level="digest")["result"]["content_digest"] == digest
    other = ref(f"{name}-hf")
    assert d.api.run("reshard", source=ref(name), target={**other, "format": "safetensors"})["result"]["content_digest"] == digest


@pytest.mark.parametrize("metrics, pointer", [
    ({"loss": "1.5"}, "/metrics/loss"), ({"": 1}, "/metrics/"), ({"x" * 65: 1}, "/metrics/" + "x" * 65), ([], "/metrics"),
    ({f"m{i}": i for i in range(65)}, "/metrics"), ({"loss": None}, "/metrics/loss")])
def test_metrics_that_are_none(d, metrics, pointer):
    p = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": "x"}, "target": ref("a/b"), "metrics": metrics}).problem(
        "validation_failed", "unknown_field")
    assert pointer in json.dumps(p)


def test_parents(d):
    a, first = saved(d)
    b, second = saved(d, tensors={"a": ("F32", [40], bytes(160))})
    made = {}
    for kind, fields in {"reshard": {"source": ref(a)}, "merge": {"sources": [ref(a), ref(b)]},
                         "delta": {"base": ref(a), "source": ref(b)}}.items():
        made[kind] = f"{lib.fresh('made')}/{kind}"
        job = d.api.run(kind, target=ref(made[kind]), metrics={"loss": 2}, **fields)
        r = record(d.api, made[kind])
        assert r["made_by"]["job"] == job["id"] and r["made_by"]["kind"] == kind and r["metrics"] == {"loss": 2}
    d.api.run("apply", base=ref(a), source=ref(made["delta"]), target=ref("made/applied"), options={"overwrite": True})

    def parents(name):
        return [(p["role"], p["storage"], p["name"], p["job"]) for p in record(d.api, name)["parents"]]

    assert parents(made["reshard"]) == [("source", "main", a, first["id"])]
    assert parents(made["merge"]) == [("member", "main", a, first["id"]), ("member", "main", b, second["id"])]
    assert parents(made["delta"]) == [("base", "main", a, first["id"]), ("source", "main", b, second["id"])]
    assert [p[:3] for p in parents("made/applied")] == [("base", "main", a), ("source", "main", made["delta"])]


def test_a_source_that_pytorch_wrote_is_a_parent_without_a_job(d):
    name = f"{lib.fresh()}/from-torch"
    d.api.run("reshard", source=ref("torch-2.15.0/plain/checkpoint", "golden"), target=ref(name))
    (parent,) = record(d.api, name)["parents"]
    assert parent["role"] == "source" and parent["storage"] == "golden" and "job" not in parent
    r = d.api.get(d.api.storage_path("golden", "torch-2.15.0/plain/checkpoint")).ok(200)
    assert r["step"] is None and not {"made_by", "durable_at", "record_problem"} & set(r)


def test_a_lost_journal_and_a_copied_folder(spawn):
    d = spawn()
    name, job = saved(d, metrics={"loss": 0.25}, labels={"run": "r"})
    out = f"{name}-out"
    d.api.run("reshard", source=ref(name), target=ref(out))
    before = {n: record(d.api, n) for n in (name, out)}
    shutil.copytree(d.storages["main"] / name, d.storages["main"] / "copied/step-1")
    d.stop()
    shutil.rmtree(d.state)
    d.state.mkdir()
    d.start()
    for n, r in before.items():
        assert record(d.api, n) == r
    copy = record(d.api, "copied/step-1")
    assert {k: copy[k] for k in ("made_by", "durable_at", "metrics", "labels")} == {k: before[name][k] for k in (
        "made_by", "durable_at", "metrics", "labels")}


def test_what_is_no_record_hides_nothing(d):
    """The checkpoint is listed and, where the manifest is as PyTorch would leave it, loaded."""
    name, _ = saved(d, metrics={"loss": 1})
    path = d.storages["main"] / name / ".dcpd.json"
    good = path.read_text()
    assert list(json.loads(good))[:3] == ["dcpd", "record", "record_xxh3_128"], "in front of what grows"
    for bad in (good.replace('"loss":1.0', '"loss":9.0'), good[:60], "", "{", "[]", '{"record":1}', "x" * 300000, good.replace("{", "[", 2),
                '{"dcpd":1,"record":' + "[" * 100000, '{"dcpd":1,"record":{"metrics":"' + "y" * 400000 + '"}}'):
        path.write_text(bad)
        (listed,) = d.api.get("/v1/checkpoints/main?prefix=" + name).ok(200)["checkpoints"]
        assert listed["record_problem"] and not {"made_by", "metrics"} & set(listed), bad[:80]
    path.write_text(good)
    assert record(d.api, name)["metrics"] == {"loss": 1}


def test_a_manifest_that_a_later_save_of_pytorchs_left_is_none_of_its(d):
    name, _ = saved(d, metrics={"loss": 1})
    other, _ = saved(d, tensors={"zz": ("F32", [40], bytes(160))})
    shutil.copy(d.storages["main"] / other / ".metadata", d.storages["main"] / name / ".metadata")
    (listed,) = d.api.get("/v1/checkpoints/main?prefix=" + name).ok(200)["checkpoints"]
    assert "another save" in listed["record_problem"] and "made_by" not in listed


def test_verified_survives_a_lost_journal_and_a_copy_says_that_it_is_one(spawn):
    d = spawn()
    name, _ = saved(d)
    assert record(d.api, name)["verified"] is None
    job = d.api.run("verify", source=ref(name), level="digest")
    before = record(d.api, name)
    assert (before["verified"]["state"], before["verified"]["job"]) == ("verified", job["id"])
    shutil.copytree(d.storages["main"] / name, d.storages["main"] / "copied/step-1")
    d.stop()
    shutil.rmtree(d.state)
    d.state.mkdir()
    d.start()
    after = record(d.api, name)
    times = [r["verified"].pop("at") for r in (before, after)]
    assert after == before and times[1] <= times[0]
    assert d.api.get("/v1/runs/main/" + name.split("/")[0]).ok(200)["aliases"]["latest-verified"] == name
    copy = record(d.api, "copied/step-1")["verified"]
    assert (copy["state"], copy["copied"], copy["job"]) == ("unverified", "verified", job["id"])
    assert d.api.get("/v1/runs/main/copied").ok(200)["aliases"]["latest-verified"] is None
    d.api.run("verify", source=ref("copied/step-1"))
    assert record(d.api, "copied/step-1")["verified"]["state"] == "verified" and "copied" not in record(d.api, "copied/step-1")["verified"]
    saved(d, name, options={"overwrite": True})
    assert record(d.api, name)["verified"] is None


def test_notes_of_a_verify_keep_a_hold_and_bad_ones_stay(spawn):
    d = spawn()
    name, _ = saved(d)
    notes = d.storages["main"] / name / ".dcpd-notes.json"
    hold = d.api.request("PUT", d.api.storage_path("main", name, "/hold"), {"reason": "r"}).ok(200)["hold"]
    d.api.run("verify", source=ref(name))
    assert json.loads(notes.read_text())["hold"] == hold and record(d.api, name)["verified"]["state"] == "verified"
    d.api.delete(d.api.storage_path("main", name, "/hold")).ok(200)
    assert record(d.api, name)["verified"]["state"] == "verified" and "hold" not in json.loads(notes.read_text())
    for bad in ("{", '{"version":1,"verified":[]}', '{"version":1,"verified":{"identity":"x","made":1}}', "x" * 70000):
        notes.write_text(bad)
        d.api.run("verify", source=ref(name))
        assert record(d.api, name)["verified"]["state"] == "verified"
    assert notes.read_text() == "x" * 70000, "notes that cannot be read are not replaced"


# ---- checkpoints that are one file ----

@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Its policies look at all storages."""
    d = lib.Daemon(tmp_path_factory.mktemp("files"), ("main", "other"))
    yield d
    d.discard()


def made(d, name, source, **fields):
    form = {"pt": "torch"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    return d.api.run("reshard", source=ref(source), target={**ref(name), "format": form}, **fields)


def page(d, name, storage="main", end=".dcpd.json"):
    path = d.storages[storage] / name
    return path.with_name(f".{path.name}{end}")


@pytest.mark.parametrize("end", ["pt", "safetensors", "npz", "gguf"])
def test_one_file_has_a_record_beside_it(files, end):
    d = files
    source, first = saved(d, metrics={"loss": 9})
    name = lib.fresh("files") + ("-" if end == "safetensors" else "/") + f"step-7.{end}"  # a folder of those would be one checkpoint
    job = made(d, name, source, metrics={"loss": 0.5}, labels={"run": "r1"})
    r = record(d.api, name)
    assert r["metrics"] == {"loss": 0.5} and r["labels"] == {"run": "r1"} and r["step"] == (None if end == "gguf" else 7) and r["dcpd"]
    assert (r["made_by"]["job"], r["made_by"]["kind"]) == (job["id"], "reshard") and r["durable_at"]
    assert [(p["role"], p["name"], p["job"]) for p in r["parents"]] == [("source", source, first["id"])]
    assert r["content_digest"] == job["result"]["content_digest"] == first["result"]["content_digest"]
    assert r["verified"] is None
    verify = d.api.run("verify", source=ref(name), level="digest")
    found = record(d.api, name)["verified"]
    assert found["job"] == verify["id"]
    assert json.loads(page(d, name, end=".dcpd-notes.json").read_text())["verified"]["job"] == verify["id"], "a lost journal loses it not"
    nodes, edges, _ = lineage(d.api, name)
    assert edges == {(f"main:{source}", f"main:{name}"): ("source", "same")}
    folder, pages = page(d, name).parent, page(d, name, end="*").name
    assert len(list(folder.glob(pages))) == 2
    d.api.run("delete", target=ref(name), options={"trash": "1h"})
    assert not list(folder.glob(pages)), "they go with the file"
    d.api.post(d.api.storage_path("main", name, ":undelete")).ok(200)
    again = record(d.api, name)
    assert {k: again[k] for k in ("made_by", "metrics", "labels", "parents", "durable_at")} == {
        k: r[k] for k in ("made_by", "metrics", "labels", "parents", "durable_at")}
    assert again["verified"] is None or again["verified"]["state"] == found["state"]
    d.api.run("delete", target=ref(name))
    assert not list(folder.glob(pages)), "and for good"


def test_the_record_of_another_file_never_counts(files):
    d, root = files, files.storages["main"]
    source, _ = saved(d)
    run = lib.fresh("files")
    name, other = f"{run}/step-1.pt", f"{run}/step-2.pt"
    made(d, name, source, metrics={"loss": 1})
    bytes_of = (root / name).read_bytes()
    (root / other).write_bytes(bytes_of)
    assert not {"made_by", "metrics", "content_digest", "record_problem"} & set(record(d.api, other)) and not record(d.api, other)["dcpd"]
    shutil.copy(page(d, name), page(d, other))
    assert "made_by" not in record(d.api, other), "a page that was made for a file of another time"
    shutil.copy2(root / name, root / other)
    assert record(d.api, other)["metrics"] == {"loss": 1}, "copied with its page and times (cp -a)"
    old = (root / name).stat()
    (root / name).write_bytes(bytes_of)
    assert "made_by" not in record(d.api, name), "written over by somebody else"
    made(d, name, source, metrics={"loss": 2}, options={"overwrite": True})
    assert record(d.api, name)["metrics"] == {"loss": 2} and (root / name).stat().st_mtime_ns != old.st_mtime_ns
    good = page(d, name).read_bytes()
    for bad in (b"", b"{", good[:200], good.replace(b'"loss":2', b'"loss":3'), b"[" * 10000, good[:good.index(b'"files"')],
                good.replace(b'"mtime_ns":', b'"mtime_ns":1e9,"x":'), b"x" * 300000):
        page(d, name).write_bytes(bad)
        assert not {"made_by", "metrics"} & set(record(d.api, name)), bad[:80]
    page(d, name).unlink()
    page(d, name).symlink_to(root / other)
    assert "made_by" not in record(d.api, name)
    page(d, name).unlink()
    os.mkfifo(page(d, name))
    assert "made_by" not in record(d.api, name)


def test_a_copy_of_one_file_has_the_sources_record(files):
    d = files
    source, _ = saved(d)
    name = f"{lib.fresh('files')}/step-3.npz"
    made(d, name, source, metrics={"loss": 0.25})
    of = record(d.api, name)
    job = d.api.run("replicate", source=ref(name), target=ref(name, "other"))
    copy = record(d.api, name, "other")
    assert {k: copy[k] for k in ("made_by", "metrics", "parents", "content_digest")} == {
        k: of[k] for k in ("made_by", "metrics", "parents", "content_digest")}
    assert copy["copied_from"] == {**ref(name), "etag": of["etag"], "job": of["made_by"]["job"]}
    assert json.loads(page(d, name, "other").read_text())["job"] == job["id"]


def test_the_best_of_files(files):
    d, run = files, lib.fresh("files")
    source, _ = saved(d)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        made(d, f"{run}/step-{step}.pt", source, metrics={"loss": loss})
    of_run = d.api.get(f"/v1/runs/main/{run}").ok(200)
    assert of_run["aliases"]["latest"] == f"{run}/step-3.pt"
    d.api.request("PUT", "/v1/policies/files", {"storage": "main", "match": run, "keep": {
        "best": {"metric": "loss", "mode": "min", "count": 1}}}).ok(200)
    left = {f"{run}/step-2.pt", f"{run}/step-3.pt"}  # the best, and the newest
    lib.wait_for(lambda: {c["name"] for c in d.api.get(f"/v1/runs/main/{run}").ok(200)["checkpoints"]} == left, 20, "the other goes")
    d.api.delete("/v1/policies/files").ok(204)


def lineage(api, name, storage="main"):
    got = api.get(api.storage_path(storage, name, "/lineage")).ok(200)
    assert got["checkpoint"] == ref(name, storage)
    nodes = {f"{n['storage']}:{n['name']}": n for n in got["nodes"]}
    assert len(nodes) == len(got["nodes"]) and all(e[k] in nodes for e in got["edges"] for k in ("parent", "child"))
    return nodes, {(e["parent"], e["child"]): (e["role"], e["state"]) for e in got["edges"]}, got["truncated"]


def test_lineage(spawn):
    """save a → reshard b (in another storage) → reshard c; a and x → merge m; a parent that is replaced, and one that is removed."""
    d = spawn(("main", "other"))
    a, first = saved(d, "run/step-1")
    saved(d, "run/step-2", generation=2, tensors={"a": ("F32", [40], bytes(160))})
    d.api.run("reshard", source=ref(a), target=ref("b", "other"))
    d.api.run("reshard", source=ref("b", "other"), target=ref("c"))
    d.api.run("merge", sources=[ref(a), ref("run/step-2")], target=ref("m"))
    nodes, edges, truncated = lineage(d.api, "c")
    assert edges == {("other:b", "main:c"): ("source", "same"), (f"main:{a}", "other:b"): ("source", "same")} and not truncated
    assert nodes[f"main:{a}"]["job"] == first["id"] and nodes[f"main:{a}"]["kind"] == "save" and nodes[f"main:{a}"]["step"] == 1
    nodes, edges, _ = lineage(d.api, a)
    assert edges == {(f"main:{a}", "main:m"): ("member", "same"), (f"main:{a}", "other:b"): ("source", "same"),
                     ("other:b", "main:c"): ("source", "same")}
    nodes, edges, _ = lineage(d.api, "b", "other")
    assert edges == {(f"main:{a}", "other:b"): ("source", "same"), ("other:b", "main:c"): ("source", "same")}
    saved(d, a, generation=3, tensors={"a": ("F32", [40], bytes(160))}, options={"overwrite": True})
    d.api.run("delete", target=ref("run/step-2"))
    nodes, edges, _ = lineage(d.api, "m")
    assert edges == {(f"main:{a}", "main:m"): ("member", "replaced"), ("main:run/step-2", "main:m"): ("member", "removed")}
    assert nodes["main:run/step-2"]["found"] is False and nodes[f"main:{a}"]["found"] is True
    assert lineage(d.api, a)[1] == {}, "what was made of the one before is none of its"
    saved(d, a, generation=4, options={"overwrite": True})
    assert lineage(d.api, "m")[1][(f"main:{a}", "main:m")] == ("member", "same"), "another job, the same content"
    d.stop()
    shutil.rmtree(d.state)
    d.state.mkdir()
    d.start()
    assert lineage(d.api, "c")[1] == {("other:b", "main:c"): ("source", "same"), (f"main:{a}", "other:b"): ("source", "same")}
    d.api.get(d.api.storage_path("main", "nothing", "/lineage")).problem("not_found")
    shown = d.ctl("lineage", "main:c")
    assert shown.returncode == 0 and re.search(rf"^main:{a} +source +other:b +same$", shown.stdout, re.M), shown.stdout
    saved(d, "alone/1")
    assert "no record tells" in d.ctl("lineage", "main:alone/1").stdout and d.ctl("lineage", "shm:x").returncode == 2


def test_a_circle_of_forged_records_ends(spawn):
    d = spawn()
    names = [saved(d, f"circle/{i}")[0] for i in range(3)]
    for i, n in enumerate(names):
        path = d.storages["main"] / n / ".dcpd.json"
        doc = json.loads(path.read_text())
        doc["record"] = {**doc["record"], "parents": [{"role": "source", **ref(names[k])} for k in (i, (i + 1) % 3)] * 5}
        text = json.dumps(doc["record"], separators=(",", ":"))
        doc["record_xxh3_128"] = xxh3(text.encode())
        rest = json.dumps({k: v for k, v in doc.items() if k not in ("dcpd", "record")}, separators=(",", ":"))
        path.write_text('{"dcpd":1,"record":' + text + "," + rest[1:])
    nodes, edges, truncated = lineage(d.api, names[0])
    assert len(nodes) == 3 and len(edges) == 6 and {s for _, s in edges.values()} == {"unknown"} and not truncated


def test_dcpctl_shows_it(d):
    sd, name = lib.fresh(), f"{lib.fresh()}/step-1"
    d.put(sd, [lib.image({"a": ("F32", [40], bytes(160))})])
    r = d.ctl("save", f"shm:{sd}", f"main:{name}", "--metric", "loss=1.5", "--metric", "acc=0.25", "--label", "run=r1")
    d.drop(sd)
    assert r.returncode == 0, r.stderr
    out = f"{name}-out"
    assert d.ctl("reshard", f"main:{name}", f"main:{out}").returncode == 0
    shown = d.ctl("show", f"main:{name}").stdout
    assert re.search(r"^metrics +loss 1\.5, acc 0\.25$", shown, re.M) and re.search(r"^labels +run r1$", shown, re.M), shown
    assert re.search(r"^made by +save, job \w+", shown, re.M) and re.search(r"^durable_at ", shown, re.M)
    assert re.search(rf"^parent +source main:{name}$", d.ctl("show", f"main:{out}").stdout, re.M)
    r = d.ctl("ls", "main:", "--json")
    assert r.returncode == 0
    for bad in ("loss", "=1", "loss=x", "loss=nan", "loss="):
        assert d.ctl("save", f"shm:{sd}", f"main:{name}", "--metric", bad).returncode == 2
