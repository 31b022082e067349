"""Checkpoints in object storage: whole jobs on SeaweedFS, with its rules: no rename, no locks, and a commit that is a conditional PUT."""
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from crafted import Crafted

import dcpd as lib

MB = 1 << 20


def ref(storage, name):
    return {"storage": storage, "name": name}


def options(server, name="s3"):
    return [f"--s3={name}.endpoint={server.endpoint}", f"--s3={name}.region={server.region}"]


@pytest.fixture(scope="module")
def d(tmp_path_factory, s3_server):
    home = tmp_path_factory.mktemp("s3d")
    d = lib.Daemon(home, {"main": home / "main", "s3": f"s3://{s3_server.bucket}/{lib.fresh()}"}, options(s3_server),
                   env=s3_server.environment())
    yield d
    d.discard()


@pytest.mark.long
def test_libcurl_is_opened_for_object_storage_alone(d, tmp_path):
    """It brings 28 libraries along: nearly half of a worker's start."""
    def have_it(daemon):
        daemon.api.run("verify", source=Crafted(daemon.storages["main"]).ref)
        return {"libcurl.so" in open(f"/proc/{pid}/maps").read() for pid in daemon.workers()}

    plain = lib.Daemon(tmp_path)
    try:
        assert have_it(plain) == {False} and "libcurl.so" not in open(f"/proc/{plain.proc.pid}/maps").read()
    finally:
        plain.discard()
    assert True in have_it(d)


class Bucket:
    """What lies in the bucket, as another tool sees it."""

    def __init__(self, server, prefix):
        self.server, self.prefix = server, prefix

    def run(self, code, *args):
        """Runs code that has `s3`, a client, `bucket` and `args`, and prints JSON: see Server.boto3()."""
        return self.server.boto3(code, *args)

    def keys(self, name):
        """Keys below a name, without it."""
        at = f"{self.prefix}/{name}/"
        code = ("print(json.dumps([o['Key'][len(args[0]):] for p in s3.get_paginator('list_objects_v2').paginate(Bucket=bucket, "
                "Prefix=args[0]) for o in p.get('Contents', [])]))")
        return self.run(code, at)

    def download(self, name, to):
        code = ("import os\nfor p in s3.get_paginator('list_objects_v2').paginate(Bucket=bucket, Prefix=args[0]):\n"
                "    for o in p.get('Contents', []): s3.download_file(bucket, o['Key'], os.path.join(args[1], os.path.basename(o['Key'])))")
        self.run(code, f"{self.prefix}/{name}/", to)


@pytest.fixture(scope="module")
def s3(d, s3_server):
    return Bucket(s3_server, d.storages["s3"].rsplit("/", 1)[1])


def state(size=3000, world=2):
    """Images of ranks, each with a tensor of its own rows and some small ones."""
    return [lib.image({f"rank{r}.w": ("U8", [size], os.urandom(size)), f"rank{r}.b": ("F32", [3], os.urandom(12))}) for r in range(world)]


def saved(d, name=None, storage="s3", size=3000, world=2, images=None, **more):
    sd, name = lib.fresh(), name or f"run/{lib.fresh()}"
    images = images or state(size, world)
    d.put(sd, images)
    try:
        d.api.run("save", source={"state_dict": sd}, target=ref(storage, name), **more)
    finally:
        d.drop(sd)
    return name, images


def loads(d, name, images, storage="s3"):
    """A load over zeros brings every byte back."""
    sd = lib.fresh()
    empty = [lib.image({k: (t, shape, bytes(len(b))) for k, (t, shape, b) in lib.Image(i).entries.items()}) for i in images]
    d.put(sd, empty)
    try:
        d.api.run("load", source=ref(storage, name), target={"state_dict": sd}, strict=True)
        for rank, image in enumerate(images):
            assert d.images(sd)[rank].entries == lib.Image(image).entries
    finally:
        d.drop(sd)


def names(d, storage="s3", prefix=""):
    return [c["name"] for c in d.api.get(f"/v1/checkpoints/{storage}").ok(200)["checkpoints"] if c["name"].startswith(prefix)]


@pytest.mark.parametrize("size", [3000, 9 * MB + 17, pytest.param(33 * MB, marks=pytest.mark.long)])
def test_save_and_load(d, size):
    name, images = saved(d, size=size)
    assert name in names(d)
    loads(d, name, images)


@pytest.mark.long
def test_many_tensors(d):
    """Metadata of more than one PUT takes, whose size is not told before its end."""
    image = lib.image({f"layers.{i}.weight": ("F32", [2], os.urandom(8)) for i in range(5000)})
    name, images = saved(d, images=[image])
    loads(d, name, images)
    verified = d.api.run("verify", source=ref("s3", name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified


def test_reads(d):
    name, images = saved(d)
    shown = d.api.get(d.api.storage_path("s3", name)).ok(200)
    assert shown["format"] == "dcp" and shown["world_size"] == 2
    assert d.ctl("show", f"s3:{name}").returncode == 0
    verified = d.api.run("verify", source=ref("s3", name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified
    back = f"back/{lib.fresh()}"
    d.api.run("reshard", source=ref("s3", name), target={**ref("main", back), "world_size": 1})
    assert d.api.run("diff", a=ref("s3", name), b=ref("main", back))["result"]["equal"]


@pytest.mark.long
@pytest.mark.parametrize("form", [{"world_size": 3}, {"format": "torch"}, {"format": "safetensors", "file": True},
                                  {"format": "safetensors", "max_file_bytes": 4000}])
def test_reshard_onto_it(d, form):
    form = dict(form)
    ends = ".pt" if form.get("format") == "torch" else ".safetensors" if form.pop("file", False) else ""
    source, name = Crafted(d.storages["main"]), f"run/{lib.fresh()}{ends}"
    d.api.run("reshard", source=source.ref, target={**ref("s3", name), **form})
    r = d.api.run("diff", a=source.ref, b=ref("s3", name))["result"]
    assert r["equal"] or form["format"] == "safetensors", r  # that format has tensors only
    d.api.run("delete", target=ref("s3", name))
    assert name not in names(d)


@pytest.mark.long
def test_what_lies_there_is_what_was_saved(d, s3):
    """Objects of nothing but the checkpoint are left."""
    name, images = saved(d, f"flat/{lib.fresh()}")
    keys = s3.keys(name)
    assert ".metadata" in keys and sum(k.endswith(".distcp") for k in keys) == 2 and len(keys) == 4, keys
    lib.wait_for(lambda: s3.keys(".dcpd") == [], 10, "marks of attempts gone")


def test_delete(d, s3):
    name, images = saved(d)
    d.api.run("delete", target=ref("s3", name))
    assert name not in names(d) and s3.keys(name) == []
    d.api.fails("delete", "not_found", target=ref("s3", name))


def test_overwrite(d, s3):
    name, images = saved(d)
    before = s3.keys(name)
    sd = lib.fresh()
    d.put(sd, images)
    d.api.fails("save", "checkpoint_exists", source={"state_dict": sd}, target=ref("s3", name))
    d.drop(sd)
    _, images = saved(d, name, size=5000, options={"overwrite": True})
    loads(d, name, images)
    assert len(s3.keys(name)) == len(before) and not set(s3.keys(name)) & (set(before) - {".metadata"})


def test_copy_there_and_back(d, s3):
    name, images = saved(d, storage="main", size=9 * MB)
    there, back = f"copy/{lib.fresh()}", f"copy/{lib.fresh()}"
    done = d.ctl("cp", f"main:{name}", f"s3:{there}")
    assert done.returncode == 0, done.stderr
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= set(s3.keys(there))
    loads(d, there, images)
    assert d.ctl("cp", f"s3:{there}", f"main:{back}").returncode == 0
    loads(d, back, images, "main")
    refused = d.api.fails("replicate", "checkpoint_exists", source=ref("main", name), target=ref("s3", there))
    assert refused
    d.api.run("delete", target=ref("s3", there))
    assert s3.keys(there) == []


@pytest.mark.long
def test_a_copy_replaces(d, s3):
    """Files of the same names, more of them and fewer, folders; and a checkpoint of another format."""
    names, images = zip(*(saved(d, storage="main", size=size, world=world) for size, world in ((9 * MB, 1), (3000, 3), (9 * MB, 2))))
    there = f"copy/{lib.fresh()}"
    for i, name in enumerate(names):
        below = d.storages["main"] / name / "tokenizer"
        below.mkdir()
        (below / "vocab.json").write_text(name)
        (below / f"only-{i}").write_text("")
        done = d.ctl("cp", f"main:{name}", f"s3:{there}", *(["--overwrite"] if i else []))
        assert done.returncode == 0, done.stderr
        loads(d, there, images[i])
        verified = d.api.run("verify", source=ref("s3", there), level="values")["result"]
        assert verified["unverified_bytes"] == 0, verified
        keys = s3.keys(there)
        assert {"__0_0.distcp", ".metadata", "tokenizer/vocab.json", f"tokenizer/only-{i}"} <= set(keys)
        assert sum(k.endswith(".distcp") for k in keys) == len(images[i]) and f"tokenizer/only-{i - 1}" not in keys, keys
    source = Crafted(d.storages["main"])
    d.api.run("reshard", source=source.ref, target={**ref("s3", there), "format": "safetensors", "max_file_bytes": 4000},
              options={"overwrite": True})
    assert d.api.get(d.api.storage_path("s3", there)).ok(200)["format"] == "safetensors"
    assert not any(".distcp" in k or ".metadata" in k or "tokenizer" in k for k in s3.keys(there))
    assert d.ctl("cp", f"main:{names[0]}", f"s3:{there}", "--overwrite").returncode == 0
    loads(d, there, images[0])
    lib.wait_for(lambda: s3.keys(".dcpd") == [], 10, "marks of attempts gone")


@pytest.mark.long
def test_copy_of_what_was_saved_there(d, s3):
    """Copies keep the names of data, which tell of the save: each is whole, and goes with all of it."""
    first, images = saved(d, size=9 * MB)
    second, third, local, fourth = (f"copy/{lib.fresh()}" for _ in range(4))
    for source, target in [(f"s3:{first}", f"s3:{second}"), (f"s3:{second}", f"s3:{third}"), (f"s3:{third}", f"main:{local}"),
                           (f"main:{local}", f"s3:{fourth}")]:
        done = d.ctl("cp", source, target)
        assert done.returncode == 0, done.stderr
    d.api.run("delete", target=ref("s3", first))
    for name in (second, third, fourth):
        loads(d, name, images)
        verified = d.api.run("verify", source=ref("s3", name), level="values")["result"]
        assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified
    d.api.run("delete", target=ref("s3", third))
    assert s3.keys(third) == [] and third not in names(d)
    data = {k for k in s3.keys(second) if k.endswith(".distcp")}
    _, images = saved(d, second, options={"overwrite": True})
    loads(d, second, images)
    assert len(s3.keys(second)) == 4 and data and not data & set(s3.keys(second))


@pytest.mark.long
@pytest.mark.parametrize("wrong, code, words", [
    ("keys", "forbidden", "SignatureDoesNotMatch"), ("user", "forbidden", "InvalidAccessKeyId"), ("bucket", "storage_gone", "NoSuchBucket"),
    ("port", "storage_gone", "")])
def test_unavailable(spawn, s3_server, wrong, code, words):
    """Wrong keys, no such bucket, nobody there: said in S3's own words, and the other storages are served."""
    keys = {"keys": {"secret": "wrong"}, "user": {"access": "AKIANOBODY"}}.get(wrong, {})
    d = spawn(("main",), start=False, env=s3_server.environment(**keys))
    d.storages["s3"] = f"s3://{'no-such-bucket' if wrong == 'bucket' else s3_server.bucket}/x"
    d.args += ["--s3=s3.endpoint=http://127.0.0.1:9", "--s3=s3.region=us-east-1"] if wrong == "port" else options(s3_server)
    d.start()
    shown = {}

    def looked():
        shown.update({s["name"]: s for s in d.api.get("/v1/storages").ok(200)["storages"]})
        return all(s["state"] != "unknown" for s in shown.values())

    lib.wait_for(looked, 30, "the storages' states")
    assert shown["s3"]["state"] == "unavailable" and shown["main"]["state"] == "ok", shown
    assert shown["s3"]["problem"]["code"] == code and words in shown["s3"]["problem"]["detail"], shown["s3"]
    assert words in d.ctl("status").stdout
    assert any("storage does not answer" in line and words in line for line in d.since_start().splitlines())
    name, images = saved(d, storage="main")
    loads(d, name, images, "main")
    sd = lib.fresh()
    d.put(sd, images)
    assert d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": ref("s3", "x")}).status >= 400 or \
        d.api.fails("save", code, source={"state_dict": sd}, target=ref("s3", "x"))
    d.drop(sd)


def test_two_writers_of_one_name(d, s3):
    """Of several that save one name at a time one wins, and what it wrote is what is read."""
    name, sds, images = f"race/{lib.fresh()}", [lib.fresh() for _ in range(3)], [state() for _ in range(3)]
    for sd, image in zip(sds, images):
        d.put(sd, image)
    jobs = [d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": ref("s3", name)}) for sd in sds]
    ended = [d.api.wait(j.ok(202)["id"]) if j.status == 202 else {"state": "refused"} for j in jobs]
    won = [i for i, j in enumerate(ended) if j["state"] == "succeeded"]
    assert len(won) == 1, ended
    loads(d, name, images[won[0]])
    d.drop(*sds)
    lib.wait_for(lambda: len(s3.keys(name)) == 4, 10, "the objects of one attempt")


@pytest.mark.long
def test_daemons_on_one_bucket(d, spawn, s3_server):
    """Another daemon, another state: what one saves the other loads, and of two that replace one name each is whole or refused."""
    other = spawn(("main",), start=False, env=s3_server.environment())
    other.storages["s3"] = d.storages["s3"]
    other.args += options(s3_server)
    other.start()
    name, images = saved(d)
    loads(other, name, images)
    made = {}

    def write(daemon, count):
        for _ in range(count):
            image = state()
            try:
                saved(daemon, name, images=image, options={"overwrite": True})
            except AssertionError as e:
                made.setdefault("errors", []).append(str(e))

    threads = [threading.Thread(target=write, args=(x, 3)) for x in (d, other)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    verified = other.api.run("verify", source=ref("s3", name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and not made.get("errors"), made


@pytest.mark.long
def test_pytorch_reads_it(d, s3, tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    torch = pytest.importorskip("torch")
    name, images = saved(d, size=4096)
    s3.download(name, tmp_path)
    want = {k: b for i in images for k, (t, shape, b) in lib.Image(i).entries.items() if t == "U8"}
    got = {k: torch.zeros(len(b), dtype=torch.uint8) for k, b in want.items()}
    dcp.load(got, checkpoint_id=str(tmp_path), no_dist=True)
    assert {k: bytes(v.numpy()) for k, v in got.items()} == want


@pytest.mark.long
def test_the_drop_in_reads_and_writes_it(d, s3):
    """dcpd.torch's StorageWriter and StorageReader, values and all, as of a directory."""
    if not importlib.util.find_spec("torch"):
        pytest.skip("no PyTorch")
    env = lib.clean_environment(DCPD_URL=f"unix://{d.socket}", PYTHONPATH=str(lib.ROOT / "api/python"), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([sys.executable, lib.ROOT / "tests/python/on_bucket.py", f"s3:dropin/{lib.fresh()}"], env=env,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["differ"] == [] and said["plain"] == [], said
    assert "replaced" in said["replaced"], said
    assert "none" in said["absent"] and "loaded" not in said["absent"], said


def test_bytes_of_a_file(d, s3):
    """As they lie, and counted as unverified; a file that is not the checkpoint's is not there."""
    name, _ = saved(d)
    path = d.api.storage_path("s3", name)
    whole = d.api.get(f"{path}/files/.metadata")
    assert whole.status == 200 and int(whole.headers["Dcpd-Unverified-Bytes"]) == len(whole.body)
    part = d.api.get(f"{path}/files/.metadata?offset=5&bytes=7")
    assert part.status == 200 and part.body == whole.body[5:12]
    assert d.api.get(f"{path}/files/.metadata?offset={len(whole.body)}").body == b""
    for file, code in (("none", "not_found"), (".metadata?offset=99999999", "range_invalid"), (".metadata?bytes=x", "range_invalid")):
        assert d.api.get(f"{path}/files/{file}").json["code"] == code, file


@pytest.mark.parametrize("when", [0.15, *(pytest.param(t, marks=pytest.mark.long) for t in (0.0, 0.05, 0.4, 0.8))])
def test_killed_in_the_middle(d, s3, when):
    """kill -9 of the daemon and its workers during an overwrite: the name has the old checkpoint or the new one, whole, and no attempt
    is torn; a retry succeeds."""
    name, old = saved(d, size=20 * MB, world=1)
    sd, new = lib.fresh(), state(20 * MB, 1)
    d.put(sd, new)
    job = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": ref("s3", name),
                                  "options": {"overwrite": True}}).ok(202)["id"]
    time.sleep(when)
    d.kill()
    d.start()
    ended = d.api.wait(job)
    loads(d, name, new if ended["state"] == "succeeded" else old)
    d.drop(sd)


def test_tier(spawn, s3_server):
    d = spawn(("main",), start=False, env=s3_server.environment())
    d.storages["s3"] = f"s3://{s3_server.bucket}/{lib.fresh()}"
    d.args += [*options(s3_server), "--tier=main=s3"]
    d.start()
    name, images = saved(d, storage="main")
    record = lib.wait_for(lambda: d.api.get(d.api.storage_path("main", name)).ok(200).get("replicated"), 60, "the copy")
    assert record["storage"] == "s3"
    loads(d, name, images)


@pytest.mark.long
def test_the_face_of_all_stores(s3_server):
    """What every store promises (worker/store/store.h), asked of this one."""
    env = lib.clean_environment(**s3_server.environment(), DCPD_TEST_S3=s3_server.endpoint)
    units = lib.pathlib.Path(os.environ.get("TESTBIN", lib.ROOT / "build/test/release"))
    done = subprocess.run([units / "test_store"], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.long
def test_a_worker_dies(d, s3):
    """Its job is begun anew, and nothing of the first attempt is seen."""
    name, (sd, images) = f"dies/{lib.fresh()}", (lib.fresh(), state(40 * MB, 1))
    d.put(sd, images)
    job = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": ref("s3", name)}).ok(202)["id"]
    lib.wait_for(lambda: d.api.get(f"/v1/jobs/{job}").ok(200)["state"] != "queued", 30)
    d.kill_workers()
    ended = d.api.wait(job)
    assert ended["state"] == "succeeded" or ended["error"]["code"] == "worker_lost", ended
    if ended["state"] == "succeeded":
        loads(d, name, images)
    d.drop(sd)


def test_held(d):
    name, _ = saved(d)
    assert d.ctl("hold", f"s3:{name}", "--reason", "kept").returncode == 0
    d.api.fails("delete", "checkpoint_held", target=ref("s3", name))
    assert "kept" in d.ctl("show", f"s3:{name}").stdout
    assert d.ctl("unhold", f"s3:{name}").returncode == 0
    d.api.run("delete", target=ref("s3", name))


def test_refused_in_words(d, s3):
    """What cannot be done safely says so, and changes nothing."""
    source, name = Crafted(d.storages["main"]), f"refused/{lib.fresh()}"
    d.api.run("reshard", source=source.ref, target={**ref("main", f"{name}/model.safetensors"), "format": "safetensors"})
    p = d.api.fails("replicate", "unsupported", source=ref("main", name), target=ref("s3", name))
    assert "object storage" in json.dumps(p) and s3.keys(name) == []


def test_aliases(d):
    """Moved by compare and swap: of many that move one run's aliases at a time none is lost."""
    run = f"aliases/{lib.fresh()}"
    name, images = saved(d, f"{run}/a")
    threads = [threading.Thread(target=d.ctl, args=("alias", f"s3:{run}", f"best{i}", "a")) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for i in range(4):
        shown = d.ctl("show", f"s3:{run}@best{i}")
        assert shown.returncode == 0, shown.stderr
    assert d.ctl("alias", f"s3:{run}", "best0", "--remove").returncode == 0
    assert d.ctl("show", f"s3:{run}@best0").returncode != 0


def big(world, seed, changed=()):
    """Images of ranks with tensors of files of their own."""
    def tensor(rank, i):
        return random.Random(f"{seed} {rank} {i} {(rank, i) in changed}").randbytes((MB, 3 * MB + 5, 9 * MB)[i])

    return [lib.image({f"rank{r}.{i}": ("U8", [len(b)], b) for i in range(3) for b in [tensor(r, i)]}) for r in range(world)]


@pytest.mark.long
def test_incremental(d, s3, s3_server):
    """What the step before has is copied by the server: of it no byte is sent, and both stand alone."""
    run, seed = f"inc/{lib.fresh()}", lib.fresh()

    def step(i, changed, **more):
        return saved(d, f"{run}/step-{i}", images=big(2, seed, changed), options={"incremental": True, **more})

    def result():
        return d.api.get("/v1/jobs?page_size=1").ok(200)["jobs"][0]["result"]

    def tensors(*some):
        return sum((MB, 3 * MB + 5, 9 * MB)[i] for i in some)

    first, images = step(1, ())
    assert result()["bytes_shared"] == 0
    second, images = step(2, [(1, 2)])
    r = result()
    shared = tensors(0, 1, 2, 0, 1)
    assert shared <= r["bytes_shared"] < shared + 128 * 1024 and r["incremental"] == {"how": "copy", "parent": ref("s3", first)}, r
    assert not set(s3.keys(first)) & set(s3.keys(second)) - {".metadata"}
    d.api.run("delete", target=ref("s3", first))
    loads(d, second, images)
    verified = d.api.run("verify", source=ref("s3", second), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified
    count = len(s3.keys(second))
    _, images = step(2, [(0, 0)], overwrite=True)
    r = result()
    assert r["bytes_shared"] >= tensors(1, 2, 0, 1), r
    loads(d, second, images)
    lib.wait_for(lambda: len(s3.keys(second)) == count, 10, "the objects of one attempt")


def trashed(d, name, time="1h"):
    job = d.api.wait(d.api.delete(d.api.storage_path("s3", name) + f"?trash={time}").ok(202))
    assert job["state"] == "succeeded" and job["result"]["trash"]["id"] == job["id"], job
    assert name not in names(d)
    return job["id"]


def undelete(d, name, **body):
    return d.api.post(d.api.storage_path("s3", name, ":undelete"), body or None)


def in_trash(d, name):
    return [e["id"] for e in d.api.get(f"/v1/storages/s3/trash?name={name.replace('/', '%2F')}").ok(200)["trash"]]


@pytest.mark.long
def test_trash(d, s3):
    """Two of one name go and come back; what lies there meanwhile is neither's."""
    name, first_images = saved(d, f"trash/{lib.fresh()}", size=9 * MB)
    first_keys = set(s3.keys(name))
    first = trashed(d, name)
    assert set(s3.keys(name)) == first_keys - {".metadata"}, "data stays where it is"
    _, images = saved(d, name)
    undelete(d, name).problem("checkpoint_exists", status=409)
    second = trashed(d, name)
    assert in_trash(d, name) == [second, first]
    undelete(d, name, id="01").problem("not_found")
    assert undelete(d, name).ok(200)["id"] == second
    loads(d, name, images)
    d.api.run("delete", target=ref("s3", name))
    assert undelete(d, name).ok(200)["id"] == first
    loads(d, name, first_images)
    verified = d.api.run("verify", source=ref("s3", name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified
    assert set(s3.keys(name)) == first_keys and in_trash(d, name) == []
    undelete(d, name).problem("not_found", status=404)
    trashed(d, name, "1s")
    lib.wait_for(lambda: s3.keys(name) == [] and s3.keys(".dcpd/trash") == [], 30, "the end of its time")
    undelete(d, name).problem("not_found", status=404)


@pytest.mark.long
def test_trash_of_copies_and_files(d, s3):
    """Files of given names make room for others of these names, folders too; one object is moved."""
    local, images = saved(d, storage="main", size=9 * MB)
    (d.storages["main"] / local / "tokenizer").mkdir()
    (d.storages["main"] / local / "tokenizer/words").write_text("one two")
    (d.storages["main"] / local / "tokenizer/none").write_text("")
    name, file = f"trash/{lib.fresh()}", f"trash/{lib.fresh()}.safetensors"
    assert d.ctl("cp", f"main:{local}", f"s3:{name}").returncode == 0
    keys = set(s3.keys(name))
    trashed(d, name)
    assert not {k for k in s3.keys(name) if not k.startswith(".dcpd")}
    assert d.ctl("cp", f"main:{local}", f"s3:{name}").returncode == 0
    undelete(d, name).problem("checkpoint_exists", status=409)
    d.api.run("delete", target=ref("s3", name))
    undelete(d, name).ok(200)
    loads(d, name, images)
    assert set(s3.keys(name)) == keys
    verified = d.api.run("verify", source=ref("s3", name), level="values")["result"]
    assert verified["verified_bytes"] > 0 and verified["unverified_bytes"] == 0, verified
    source = Crafted(d.storages["main"])
    d.api.run("reshard", source=source.ref, target={**ref("s3", file), "format": "safetensors"})
    trashed(d, file)
    assert s3.keys("trash/" + file.split("/")[1]) == []
    undelete(d, file).ok(200)
    assert d.api.run("verify", source=ref("s3", file))["state"] == "succeeded"
    for one in (name, file):
        trashed(d, one, "1s")
    lib.wait_for(lambda: s3.keys(name) == [] and s3.keys(".dcpd/trash") == [], 30, "the end of their time")


def damage(s3, name, file, offset):
    """Another byte in the middle of an object, which is marked as before."""
    s3.run("o = s3.get_object(Bucket=bucket, Key=args[0]); b = bytearray(o['Body'].read()); b[int(args[1])] ^= 1; "
           "s3.put_object(Bucket=bucket, Key=args[0], Body=bytes(b), Metadata=o['Metadata'])", f"{s3.prefix}/{name}/{file}", offset)


@pytest.mark.long
@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.long)])
def test_repair(d, s3, given):
    """Damaged bytes of data, manifest and metadata are made good, in the objects that they are in, and the rest is not sent."""
    good, images = saved(d, storage="main", size=20 * MB)
    name = f"repair/{lib.fresh()}"
    if given:
        assert d.ctl("cp", f"main:{good}", f"s3:{name}").returncode == 0
    else:
        saved(d, name, images=images)
    keys = s3.keys(name)
    data = sorted(k for k in keys if k.endswith(".distcp"))
    for file, offset in ((data[0], 9 * MB), (data[1], 100), (data[1], 15 * MB)):
        damage(s3, name, file, offset)
    d.api.fails("verify", "digest_mismatch", source=ref("s3", name), level="digest")
    done = d.api.run("repair", target=ref("s3", name), **{"from": ref("main", good)})["result"]
    assert done["whole"] and done["changed"], done
    loads(d, name, images)
    for file in [k for k in keys if k.endswith(".metadata")] + [k for k in keys if k.endswith("dcpd.json")]:
        damage(s3, name, file, 200)
        done = d.api.run("repair", target=ref("s3", name))["result"]
        assert done["whole"] and done["changed"], (file, done)
        loads(d, name, images)
    assert not {k for k in s3.keys(name) if "notes" not in k} - set(keys)
    d.api.run("delete", target=ref("s3", name))
    assert s3.keys(name) == []
