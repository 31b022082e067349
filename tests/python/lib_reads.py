"""Every way to read a checkpoint, each as one function: a checkpoint's name → what was read, as a comparable dict.

A path raises what a user sees (Refused for a problem+json, else the exception of the package or of PyTorch). Two results of one path are
equal if and only if the user got the same data.
"""
import base64
import contextlib
import io
import itertools
import json
import os
import pathlib
import pickle
import shutil
import urllib.parse

import harness as lib
import libdcp
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import dcpd
from dcpd import _direct
from dcpd.torch import StorageReader

LAYOUT = [{"match": "*", "placements": ["Shard(1)"]}, {"match": "*", "placements": ["Shard(0)"]}]
POISON = 0xA5
SECONDS = 20 * lib.PATIENCE  # a job or a request that takes longer hangs


class Refused(Exception):
    """A problem+json: the answer to a request, or a job's error."""

    def __init__(self, problem):
        super().__init__(json.dumps(problem))
        self.problem = problem


class Read(dict):
    """What a path read. unverified: [(FQN, file)] of the bytes that the path says it compared with nothing; None if the path cannot say.
    result: the job's, for jobs."""

    unverified = result = None


# -------------------------------------------------------------------------------------------------------- comparable


def raw(t):
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(t.reshape(-1).view(torch.uint8).numpy()) if t.numel() else b""


def blob(data):
    """A pickled value. Of an archive only the records count, as PyTorch reads them: the fields around do not change what is unpickled."""
    if not data.startswith(b"PK"):
        return data
    try:
        z = torch._C.PyTorchFileReader(io.BytesIO(data))
        return tuple((name, z.get_record(name)) for name in z.get_all_records())
    except (RuntimeError, ValueError):
        return data


def plain(x):
    if isinstance(x, torch.Tensor):
        return "tensor", str(x.dtype), tuple(x.shape), raw(x)
    if isinstance(x, dcpd.Opaque):
        return "opaque", x.class_name, blob(x.bytes)
    if isinstance(x, dict):
        return "dict", [(k, plain(v)) for k, v in x.items()]
    if isinstance(x, (list, tuple)):
        return type(x).__name__, [plain(v) for v in x]
    if isinstance(x, (set, frozenset)):
        return "set", sorted((plain(v) for v in x), key=repr)
    return type(x).__name__, repr(x) if type(x).__repr__ is not object.__repr__ else pickle.dumps(x)


def flat(x, path=()):
    if isinstance(x, dict) and x:
        for k, v in x.items():
            yield from flat(v, (*path, k))
    elif isinstance(x, (list, tuple)) and x:
        for i, v in enumerate(x):
            yield from flat(v, (*path, i))
    else:
        yield ".".join(map(str, path)), plain(x)


@contextlib.contextmanager
def reading_directly(direct):
    """Loads of the package read the files themselves however small the tensors are, or never do."""
    least, env = _direct.AVERAGE_MIN, os.environ.get("DCPD_DIRECT")
    _direct.AVERAGE_MIN = 0
    os.environ["DCPD_DIRECT"] = "1" if direct else "0"
    try:
        yield
    finally:
        _direct.AVERAGE_MIN = least
        os.environ.pop("DCPD_DIRECT")
        if env is not None:
            os.environ["DCPD_DIRECT"] = env


def poison(file, size):
    """Overwrites the tensors of an image, not its header."""
    with open(file, "r+b") as f:
        n = 8 + int.from_bytes(f.read(8), "little")
        f.seek(n)
        f.write(bytes([POISON]) * (size - n))


class Reader:
    """Reads checkpoints of the storage `main` of a daemon that DCPD_URL names; its storage `other` takes what reshards write."""

    def __init__(self, daemon):
        self.d, self.api = daemon, daemon.api
        self.root, self.out = (pathlib.Path(daemon.storages[s]) for s in ("main", "other"))
        self.numbers, self.target = itertools.count(), None

    def ref(self, name, storage="main"):
        return {"storage": storage, "name": name}

    def get(self, name, tail):
        a = self.api.get(self.api.storage_path("main", name, tail), timeout=SECONDS)
        if a.status >= 400:
            raise Refused(a.json)
        return a

    def job(self, kind, **fields):
        a = self.api.post("/v1/jobs", {"kind": kind, **fields}, timeout=SECONDS)
        if a.status >= 400:
            raise Refused(a.json)
        j = self.api.get(f"/v1/jobs/{a.json['id']}?wait=60s", timeout=SECONDS).ok(200)
        if j["state"] not in lib.TERMINAL:
            self.api.post(f"/v1/jobs/{j['id']}:cancel")
            raise TimeoutError(f"{kind} hangs: {j['state']} {j['stage']}")
        if j["state"] != "succeeded":
            raise Refused(j["error"])
        return j["result"]

    # ---- the checkpoint that is read, whole or damaged

    def take(self, name):
        """From here on the paths read the checkpoint `name` and copies of it."""
        if self.target:
            self.api.delete(f"/v1/state-dicts/{self.target}")
        self.whole, self.target = name, None
        page = self.get(name, "/tensors?page_size=1000").json
        self.listed = [(t["fqn"], tuple(t["shape"]), getattr(torch, t["dtype"])) for t in page["tensors"]]
        self.schema = self.listed + [(v["fqn"], None, None) for v in page["values"]]
        self.mine = None  # keys of rank 0 in a rank-local checkpoint
        if (self.root / name / "__0.metadata").exists():
            self.mine = set(pickle.loads((self.root / name / "__0.metadata").read_bytes()).state_dict_metadata)
        sd = lib.fresh("into")
        try:
            self.job("load", source=self.ref(name), target={"state_dict": sd, "world_size": 2, "layout": LAYOUT})
            self.target = sd
        except Refused:
            pass

    def like(self, keys=None):
        """A state dict of these keys (default: all), whose tensors hold other bytes."""
        out = {}
        for fqn, shape, dtype in self.schema:
            if keys is not None and fqn not in keys:
                continue
            if shape is None:
                out[fqn] = "other"
            else:
                n = torch.Size(shape).numel() * torch._utils._element_size(dtype)
                out[fqn] = torch.full((n,), 1 if dtype == torch.bool else POISON, dtype=torch.uint8).view(dtype).reshape(shape)
        return out

    # ---- paths

    def paths(self, direct):
        """{path: function}. direct: whether loads by the package read the files themselves; the drop-in then leaves it to jobs."""
        return {"verify": self.verify, "load": self.load, "load into": self.load_into, "reshard": self.reshard, "diff": self.diff,
                "tensors": self.tensors, "slices": self.slices, "dcpd.load": self.python_load,
                "dcpd.load(into=)": lambda name: self.python_into(name, direct), "dcpd.open": self.python_open,
                "StorageReader": lambda name: self.dropin(name, not direct), "libdcp": self.libdcp, "PyTorch": self.pytorch}

    @staticmethod
    def _job(got, result):
        got.result, got.unverified = result, [(u.get("fqn"), u.get("file")) for u in result.get("unverified", ())]
        return got

    def image(self, state_dict):
        out = Read()
        for rank, img in enumerate(self.d.images(state_dict)):
            for fqn, whole, off, size, dtype, data in img.chunks():
                out[f"{rank}/{fqn}{off}"] = (dtype, tuple(whole), tuple(size), data)
            out.update({f"{rank}/{k}": blob(base64.b64decode(v["pickle"])) if "pickle" in v else json.dumps(v, sort_keys=True)
                        for k, v in img.values.items()})
            out[f"{rank} paths"] = json.dumps(img.dcpd.get("paths"), sort_keys=True)
        return out

    def loaded(self, ref):
        """(content of a new state dict, the job's result)."""
        sd = lib.fresh("m")
        try:
            r = self.job("load", source=ref, target={"state_dict": sd, "world_size": 1})
            return self.image(sd), r
        finally:
            self.api.delete(f"/v1/state-dicts/{sd}")

    def load(self, name):
        got, r = self.loaded(self.ref(name))
        return self._job(got, r)

    def load_into(self, name):
        """Into a state dict of two ranks and of another layout, full of other bytes."""
        if not self.target:
            raise NotImplementedError("this checkpoint cannot be loaded")
        for r in self.api.get(f"/v1/state-dicts/{self.target}").ok(200)["ranks"]:
            for s in r["slots"]:
                if s["state"] == "sealed":
                    poison(lib.segment_file(s["segment"]), s["image_bytes"])
        r = self.job("load", source=self.ref(name), target={"state_dict": self.target})
        got = self.image(self.target)
        got["unexpected"] = json.dumps(r.get("unexpected"))
        return self._job(got, r)

    def reshard(self, name):
        """Content of the checkpoint that a reshard wrote: damage must not have become what digests vouch for."""
        to = f"r{next(self.numbers)}"
        try:
            r = self.job("reshard", source=self.ref(name), target={**self.ref(to, "other"), "world_size": 2, "layout": LAYOUT})
            got, _ = self.loaded(self.ref(to, "other"))
        finally:
            shutil.rmtree(self.out / to, ignore_errors=True)
        return self._job(got, r)

    def verify(self, name):
        return self._job(Read(), self.job("verify", source=self.ref(name)))

    def diff(self, name):
        r = self.job("diff", a=self.ref(self.whole), b=self.ref(name), read_all=True)
        return self._job(Read(equal=r["equal"], differences=json.dumps(r["differences"])), r)

    def tensors(self, name):
        page = self.get(name, "/tensors?page_size=1000").json
        return Read({**{t["fqn"]: json.dumps({k: t.get(k) for k in ("dtype", "shape", "path")}) for t in page["tensors"]},
                     **{v["fqn"]: json.dumps(v, sort_keys=True) for v in page["values"]}})

    def slices(self, name):
        """Of each tensor all, or its last quarter."""
        got = Read()
        metadata = list((self.root / name).glob("*.metadata"))
        unprotected = sum(p.stat().st_size for p in metadata)
        got.unverified = []
        for i, (fqn, shape, _) in enumerate(self.listed):
            part = ""
            if i % 2 and shape and min(shape) > 0:
                part = "?slice=" + urllib.parse.quote(",".join(f"{s // 2}:{s}" for s in shape))
            a = self.get(name, f"/tensors/{urllib.parse.quote(fqn, safe='')}{part}")
            got[fqn] = a.headers.get("X-Dcpd-Dtype"), a.headers.get("X-Dcpd-Shape"), a.body
            counted = int(a.headers["Dcpd-Unverified-Bytes"])
            if counted > unprotected:
                got.unverified.append((fqn, None))
            elif counted:
                got.unverified += [(None, p.name) for p in metadata]
        return got

    def python_load(self, name):
        return Read(flat(dcpd.load(f"main:{name}")))

    def python_into(self, name, direct):
        sd = self.like()
        with reading_directly(direct):
            dcpd.load(f"main:{name}", into=sd)
        return Read((k, plain(v)) for k, v in sd.items())

    def python_open(self, name):
        ck = dcpd.open(f"main:{name}")
        return Read((k, plain(ck[k].read() if hasattr(ck[k], "read") else ck[k])) for k in ck)

    def dropin(self, name, direct):
        with reading_directly(direct):
            return self.by_pytorch(StorageReader(self.root / name))

    def libdcp(self, name):
        """From C: of each tensor all, or its last quarter."""
        got = Read()
        with libdcp.open(self.root / name) as ck:
            for i, (fqn, dtype, shape, t) in enumerate(ck.tensors()):
                half = [s // 2 for s in shape]
                part = (half, [s - h for s, h in zip(shape, half)]) if i % 2 else ()
                got[fqn] = dtype, shape, ck.read(t, *part)[0]
            got.update({fqn: (kind, text) for fqn, (kind, text) in ck.values().items()})
            got.unverified = [x[:2] for x in ck.unverified()]
        return got

    def pytorch(self, name):
        return self.by_pytorch(dcp.FileSystemReader(self.root / name))

    def by_pytorch(self, reader):
        """dcp.load; of a rank-local checkpoint what rank 0 wrote."""
        sd = self.like(self.mine)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load(sd, storage_reader=reader, no_dist=True, planner=planner)
        return Read((k, plain(v)) for k, v in sd.items())
