"""Checkpoints in object storage: whole jobs on SeaweedFS, with its rules: no rename, no locks, and a commit that is a conditional PUT."""
import json
import os
import subprocess

import pytest
from crafted import Crafted
from s3_server import environment_of_tools

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


class Bucket:
    """What lies in the bucket, as another tool sees it."""

    def __init__(self, server, prefix):
        self.server, self.prefix = server, prefix

    def run(self, code, *args):
        """Runs code that has `s3`, a client, `bucket` and `args`, and prints JSON."""
        begin = (f"import boto3, json, sys; args = sys.argv[1:]; bucket = {self.server.bucket!r}; s3 = boto3.client('s3', "
                 f"endpoint_url={self.server.endpoint!r})\n")
        env = lib.clean_environment(**self.server.environment())
        made = subprocess.run([environment_of_tools(), "-c", begin + code, *map(str, args)], env=env, capture_output=True, text=True,
                              timeout=60)
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout or "null")

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


@pytest.mark.parametrize("size", [3000, 9 * MB + 17, 33 * MB])
def test_save_and_load(d, size):
    name, images = saved(d, size=size)
    assert name in names(d)
    loads(d, name, images)


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


@pytest.mark.parametrize("form", [{"world_size": 3}, {"format": "torch"}, {"format": "safetensors", "file": True}])
def test_reshard_onto_it(d, form):
    form = dict(form)
    ends = ".pt" if form.get("format") == "torch" else ".safetensors" if form.pop("file", False) else ""
    source, name = Crafted(d.storages["main"]), f"run/{lib.fresh()}{ends}"
    d.api.run("reshard", source=source.ref, target={**ref("s3", name), **form})
    r = d.api.run("diff", a=source.ref, b=ref("s3", name))["result"]
    assert r["equal"] or ends == ".safetensors", r  # that format has tensors only
    d.api.run("delete", target=ref("s3", name))
    assert name not in names(d)


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
    d.api.fails("replicate", "overwrite_unsupported", source=ref("main", name), target=ref("s3", there), options={"overwrite": True})
    loads(d, there, images)
    d.api.run("delete", target=ref("s3", there))
    assert s3.keys(there) == []
