"""The API's resources as Python objects: `client.jobs`, `.checkpoints`, `.state_dicts`, `.storages`, `.transforms`,
`.runs`.

Records come back as the plain dicts of the HTTP API, so that everything `api/openapi.yaml` says holds here; a `Job` and a list of
checkpoints know in addition how to show themselves.
"""
from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from . import errors
from ._http import Answer, Transport, checked, default_endpoints, default_token, parse_url, query, quote

API = "v1"
Ref = Union[str, Tuple[str, str], Mapping[str, str]]


def ref_object(ref: Ref) -> Dict[str, Any]:
    """`"main:a/b"`, `("main", "a/b")` or `{"storage": …, "name": …}` → the API's object; `"shm:name"` → a state dict."""
    if isinstance(ref, Mapping):
        return dict(ref)
    if isinstance(ref, tuple):
        return {"storage": ref[0], "name": ref[1]}
    storage, colon, name = ref.partition(":")
    if not colon or not name:
        raise errors.RequestRefused(f"{ref!r} is no reference: STORAGE:NAME, such as main:run1/step-100")
    return {"state_dict": name} if storage == "shm" else {"storage": storage, "name": name}


class Job(Dict[str, Any]):
    """A job's record as the API gives it (`job["state"]`, `job["result"]`, …), with a readable repr."""

    @property
    def id(self) -> str:
        return str(self["id"])

    @property
    def done(self) -> bool:
        return self["state"] in errors.TERMINAL

    def raise_for_state(self) -> "Job":
        """Itself if it succeeded or still runs; else the exception that its error stands for. What its result warns of becomes a warning
        here."""
        if self["state"] == "failed":
            raise errors.from_problem(self.get("error") or {"title": "the job failed"}, self.id)
        if self["state"] == "cancelled":
            raise errors.JobCancelled(f"job {self.id} was cancelled", code="cancelled", job=self.id)
        source = self.get("target" if self.get("kind") == "save" else "source") or {}
        for w in (self.get("result") or {}).get("warnings") or []:
            errors.warn_of(source, str(w.get("detail") or w.get("code")))
        return self

    def __repr__(self) -> str:
        from .show import size

        p = self.get("progress") or {}
        parts = [f"{self.get('kind')} {self.id}", str(self.get("state"))]
        to = self.get("target") or {}
        if to.get("name") or to.get("state_dict"):
            parts[0] += " → " + errors.shown(f"{to['storage']}:{to['name']}" if to.get("name") else f"shm:{to['state_dict']}")
        if p.get("bytes_total"):
            done, total = p.get("bytes_done", 0), p["bytes_total"]
            parts.append(size(total) if done == total else f"{size(done)} of {size(total)}")
        if self.get("error"):
            parts.append(str(self["error"].get("detail") or self["error"].get("title")))
        return f"<Job {', '.join(parts)}>"


class _Resource:
    def __init__(self, transport: Transport) -> None:
        self._t = transport

    def _pages(self, path: str, key: str, **params: Any) -> Iterator[Any]:
        token: Optional[str] = None
        while True:
            page = self._t.request("GET", query(path, page_token=token, **params))
            yield from page.get(key, [])
            token = page.get("next_page_token")
            if not token:
                return


class Transforms(_Resource):
    def list(self) -> List[Dict[str, Any]]:
        """The ready sets of conversion rules: name, description, and what their `vars` mean."""
        return list(self._t.request("GET", "/v1/transforms")["transforms"])

    def get(self, name: str) -> Dict[str, Any]:
        """A ready set; its rules are under "transform"."""
        return dict(self._t.request("GET", f"/v1/transforms/{quote(name)}"))

    def rules(self, *sets: Any) -> List[Dict[str, Any]]:
        """One list of rules, of rules, lists of them, names of ready sets and JSON files (what has a slash or ends in .json)."""
        out: List[Dict[str, Any]] = []
        for s in sets:
            if isinstance(s, Mapping):
                out += self.rules(*s["transform"]) if "transform" in s else [dict(s)]
            elif isinstance(s, os.PathLike) or isinstance(s, str) and ("/" in s or s.endswith(".json")):
                with open(s, encoding="utf-8") as f:
                    out += self.rules(json.load(f))
            elif isinstance(s, str):
                out += self.rules(self.get(s))
            else:
                out += self.rules(*s)
        return out


class Jobs(_Resource):
    def _spec(self, spec: Dict[str, Any]) -> Dict[str, Any]:
        for k in ("source", "base", "target", "a", "b"):
            if k in spec and not isinstance(spec[k], Mapping):
                spec[k] = ref_object(spec[k])
        if "sources" in spec:
            spec["sources"] = [r if isinstance(r, Mapping) else ref_object(r) for r in spec["sources"]]
        if "transform" in spec:
            spec["transform"] = Transforms(self._t).rules(spec["transform"])
        return spec

    def create(self, kind: str, *, idempotency_key: Optional[str] = None, **spec: Any) -> Job:
        """Submits a job and returns its record at once. The keywords are the fields of the API; source, base, target, a, b and those of
        sources may be references ("main:run1", "shm:train"); transform may be a ready set's name, a file,
        or both in a list. A lost answer is asked for again with the same Idempotency-Key: one job in any case.

        Raises CheckpointExists, Busy, NotSealed, NoSpace, RequestRefused, …
        """
        spec = self._spec(spec)
        key = idempotency_key or uuid.uuid4().hex
        end = time.monotonic() + 30
        while True:
            try:
                return Job(self._t.request("POST", "/v1/jobs", {"kind": kind, **spec}, headers={"Idempotency-Key": key}))
            except errors.Busy as e:
                if e.code != "idempotency_in_flight" or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def plan(self, kind: str, **spec: Any) -> Dict[str, Any]:
        """What the job would do; nothing runs and nothing is written."""
        return dict(self._t.request("POST", "/v1/jobs?dry_run=true", {"kind": kind, **self._spec(spec)}, idempotent=True))

    def get(self, job: str, *, wait: Optional[float] = None) -> Job:
        """The record. wait: seconds (at most 60) to wait for the job's end."""
        w = None if wait is None else f"{max(0, min(60000, int(wait * 1000)))}ms"
        return Job(self._t.request("GET", query(f"/v1/jobs/{quote(job)}", wait=w), timeout=self._t.timeout + (wait or 0)))

    def list(self, *, filter: Optional[str] = None, limit: Optional[int] = None) -> List[Job]:
        """Newest first. filter: terms joined by AND, such as "state=running AND labels.run=r1"."""
        out: List[Job] = []
        for j in self._pages("/v1/jobs", "jobs", filter=filter, page_size=min(limit or 1000, 1000)):
            out.append(Job(j))
            if limit and len(out) >= limit:
                break
        return out

    def wait(self, job: Union[str, Job], timeout: Optional[float] = None, *,
             on_progress: Optional[Callable[[Job], None]] = None, poll: float = 30.0) -> Job:
        """Waits for the end, and raises if the job did not succeed.

        timeout: seconds, None for ever; then WaitTimeout, and the job goes on. on_progress is called with every record.
        """
        ident = job if isinstance(job, str) else job.id
        end = None if timeout is None else time.monotonic() + timeout
        if on_progress:
            poll = min(poll, 0.2)
        while True:
            left = poll if end is None else min(poll, end - time.monotonic())
            j = self.get(ident, wait=max(left, 0))
            if on_progress:
                on_progress(j)
            if j.done:
                return j.raise_for_state()
            if end is not None and time.monotonic() >= end:
                raise errors.WaitTimeout(f"{j['kind']} job {ident} is not done after {timeout:g} s; it goes on", job=ident)

    def run(self, kind: str, timeout: Optional[float] = None, **spec: Any) -> Job:
        """create and wait."""
        return self.wait(self.create(kind, **spec), timeout)

    def cancel(self, job: str) -> Job:
        return Job(self._t.request("POST", f"/v1/jobs/{quote(job)}:cancel"))

    def retry(self, job: str) -> Job:
        return Job(self._t.request("POST", f"/v1/jobs/{quote(job)}:retry"))


class Checkpoints(_Resource):
    @staticmethod
    def _path(ref: Ref, tail: str = "") -> str:
        r = ref_object(ref)
        if "storage" not in r:
            raise errors.RequestRefused(f"{ref!r} is a state dict in shared memory, not a checkpoint")
        return f"/v1/checkpoints/{quote(r['storage'])}/{quote(r['name'])}{tail}"

    def list(self, storage: Optional[str] = None, *, prefix: Optional[str] = None) -> List[Dict[str, Any]]:
        """Records of the checkpoints of one storage, or of all."""
        path = "/v1/checkpoints" + (f"/{quote(storage)}" if storage else "")
        return list(self._pages(path, "checkpoints", prefix=prefix, page_size=1000))

    def get(self, ref: Ref) -> Dict[str, Any]:
        """One record: format, bytes, world_size, tensors, values. Raises NotFound, CheckpointDamaged."""
        return dict(self._t.request("GET", self._path(ref)))

    def exists(self, ref: Ref) -> bool:
        try:
            self.get(ref)
            return True
        except errors.NotFound:
            return False

    def tensors(self, ref: Ref, *, prefix: Optional[str] = None) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
        """(tensors, values) as `.metadata` says: fqn, dtype, shape, chunks; fqn, value."""
        tensors: List[Dict[str, Any]] = []
        values: List[Dict[str, Any]] = []
        token: Optional[str] = None
        while True:
            page = self._t.request("GET", query(self._path(ref, "/tensors"), prefix=prefix, page_size=1000, page_token=token))
            tensors += page.get("tensors", [])
            values += page.get("values", [])
            token = page.get("next_page_token")
            if not token:
                return tensors, values

    def read(self, ref: Ref, fqn: str, slice: Optional[str] = None, format: str = "raw", verify: bool = True) -> Answer:
        """A tensor's bytes, or a slice of it ("0:128,:"); `headers` has x-dcpd-dtype, x-dcpd-shape and dcpd-unverified-bytes: how many
        bytes nothing could be compared with."""
        path = query(self._path(ref, f"/tensors/{quote(fqn)}"), slice=slice, format=format, verify=None if verify else "none")
        return checked(self._t.raw("GET", path), path)

    def locate(self, ref: Ref, boxes: Sequence[Mapping[str, Any]], verify: bool = True) -> Dict[str, Any]:
        """Where on the storage the bytes of boxes of tensors lie ("fqn", "dtype", "shape", "offsets", "sizes" each), with the digests to
        check them by: "id" of this version of it, "files", "reads", and "others", which only a job can load. "warning": the daemon's about
        this checkpoint, or ""."""
        path = self._path(ref, ":locate")
        a = checked(self._t.raw("POST", path, {"boxes": list(boxes), "verify": verify}, idempotent=True), path)
        return {**a.json, "warning": a.headers.get("dcpd-warning", "").partition("; ")[2]}

    def files(self, ref: Ref) -> List[Dict[str, Any]]:
        return list(self._t.request("GET", self._path(ref, "/files"))["files"])

    def hold(self, ref: Ref, reason: str = "") -> Dict[str, Any]:
        """Holds a checkpoint: nothing of dcpd's removes or replaces it before `unhold`, which its owner, root and dcpd's own user may.
        {"storage", "name", "hold": {"owner", "reason", "since"}}; the file with it lies beside the checkpoint's own."""
        return dict(self._t.request("PUT", self._path(ref, "/hold"), {"reason": reason}, idempotent=True))

    def unhold(self, ref: Ref) -> Dict[str, Any]:
        """Lifts the hold, if there is one."""
        return dict(self._t.request("DELETE", self._path(ref, "/hold"), idempotent=True))

    def delete(self, ref: Ref) -> Job:
        """Submits the delete job. Raises CheckpointHeld, Forbidden."""
        return Job(self._t.request("DELETE", self._path(ref), headers={"Idempotency-Key": uuid.uuid4().hex}))


class Runs(_Resource):
    def list(self, storage: Optional[str] = None) -> List[Dict[str, Any]]:
        """The runs of one storage, or of all, by name: run, checkpoints, bytes, latest, step, modified_at, holds."""
        of = [storage] if storage else [s["name"] for s in self._t.request("GET", "/v1/storages")["storages"]]
        return [r for s in of for r in self._pages("/v1/runs", "runs", storage=s, page_size=1000)]

    def get(self, run: str) -> Dict[str, Any]:
        """One run, "main:run1": all its checkpoints, newest first (records with "step"), aliases ("latest", "latest-verified"), holds, and
        "lost_work": since when, and since which step, work would be lost if the training ended now. Raises NotFound."""
        r = ref_object(run)
        path = f"/v1/runs/{quote(r['storage'])}/{quote(r['name'])}"
        page: Dict[str, Any] = dict(self._t.request("GET", query(path, page_size=1000)))
        token = page.pop("next_page_token", None)
        while token:
            more = self._t.request("GET", query(path, page_size=1000, page_token=token))
            page["checkpoints"] += more["checkpoints"]
            token = more.get("next_page_token")
        return page


    def alias(self, run: str, alias: str, name: Optional[str], **condition: Optional[str]) -> Dict[str, Any]:
        """Lets "main:run1@best" stand for a checkpoint of the run ("run1/step-300", or "step-300"); name None removes the alias.
        if_="run1/step-200": only if it leads there by now; if_=None: only if there is none. Else RequestRefused, code "alias_moved"."""
        r = ref_object(run)
        path = f"/v1/runs/{quote(r['storage'])}/{quote(r['name'])}/aliases/{quote(alias)}"
        body: Dict[str, Any] = {"if": condition["if_"]} if "if_" in condition else {}
        if name is None:
            return dict(self._t.request("DELETE", path, body))
        whole = name if "/" in name or r["name"] == "-" else f"{r['name']}/{name}"
        return dict(self._t.request("PUT", path, {"name": whole, **body}))


class StateDicts(_Resource):
    @staticmethod
    def _path(name: str, tail: str = "") -> str:
        return f"/v1/state-dicts/{quote(name)}{tail}"

    def create(self, name: str, world_size: int, slots: int = 2, **more: Any) -> Dict[str, Any]:
        """A state dict without segments. more: lease_seconds, on_owner_death."""
        return dict(self._t.request("POST", "/v1/state-dicts", {"name": name, "world_size": world_size, "slots": slots, **more},
                                    headers={"Idempotency-Key": uuid.uuid4().hex}))

    def list(self) -> List[Dict[str, Any]]:
        return list(self._pages("/v1/state-dicts", "state_dicts", page_size=1000))

    def get(self, name: str) -> Dict[str, Any]:
        return dict(self._t.request("GET", self._path(name)))

    def delete(self, name: str) -> None:
        """Raises NotFound, also where the answer was lost and it is gone by the time that it is asked for again."""
        self._t.request("DELETE", self._path(name), idempotent=True)

    def reserve(self, name: str, rank: int, bytes: int, generation: int, wait: Optional[float] = None) -> Dict[str, Any]:
        """A slot of at least so many bytes. wait: seconds (at most 60) to wait for a free one. Raises SlotsBusy, SharedMemoryFull."""
        path = query(self._path(name, f"/ranks/{rank}:reserve"), wait=f"{int((wait or 0) * 1000)}ms" if wait else None)
        return dict(self._t.request("POST", path, {"bytes": bytes, "generation": generation}, idempotent=True,
                                    timeout=self._t.timeout + (wait or 0)))

    def seal(self, name: str, rank: int, generation: int, image_bytes: int,
             on_owner_death: Optional[Mapping[str, Any]] = None, ring: Optional[Mapping[str, int]] = None) -> None:
        """From here on the slot is left alone, and outlives this process; or, through a ring, all has been put in.
        on_owner_death: what becomes of this generation when all its owners die before a job has saved it:
        {"save": {"storage", "name", "options", "labels"}} or {"drop": True}."""
        body: Dict[str, Any] = {"generation": generation, "image_bytes": image_bytes}
        if on_owner_death is not None:
            body["on_owner_death"] = dict(on_owner_death)
        if ring:
            body["ring"] = dict(ring)
        self._t.request("POST", self._path(name, f"/ranks/{rank}:seal"), body, idempotent=True)

    def fill(self, name: str, rank: int, generation: int, image_bytes: int, ring: Optional[Mapping[str, int]] = None) -> None:
        """The image's header is there, and its length will not change: a save that awaits the seal may write what is there already. How
        many bytes that is says a little-endian u64 in the page behind the image, or behind the ring ({"offset", "bytes"}) that the image
        goes through (api/image.md)."""
        self._t.request("POST", self._path(name, f"/ranks/{rank}:seal"),
                        {"generation": generation, "image_bytes": image_bytes, "filling": True, **({"ring": dict(ring)} if ring else {})},
                        idempotent=True)

    def release(self, name: str, rank: int, generation: int, reason: Optional[str] = None) -> None:
        """The slot is free, once no job uses it. reason: of one that will not be sealed, for the error of a save that awaits it."""
        self._t.request("POST", self._path(name, f"/ranks/{rank}:release"),
                        {"generation": generation, **({"reason": reason[:512]} if reason else {})}, idempotent=True)

    def renew(self, name: str, rank: int, generation: Optional[int] = None) -> None:
        """generation: asks whether it is still awaited, too; RequestRefused ("ring_lost") if nobody reads its ring any more."""
        self._t.request("POST", self._path(name, f"/ranks/{rank}:renew"), None if generation is None else {"generation": generation},
                        idempotent=True)


class Storages(_Resource):
    def list(self) -> List[Dict[str, Any]]:
        return list(self._t.request("GET", "/v1/storages")["storages"])

    def get(self, name: str) -> Dict[str, Any]:
        return dict(self._t.request("GET", f"/v1/storages/{quote(name)}"))

    def create(self, name: str, path: str, lease_seconds: Optional[int] = None) -> Dict[str, Any]:
        """An ad-hoc root, which lives with its lease; over the Unix socket, from dcpd's own user or root."""
        body: Dict[str, Any] = {"name": name, "path": path}
        if lease_seconds:
            body["lease_seconds"] = lease_seconds
        return dict(self._t.request("POST", "/v1/storages", body, idempotent=True))

    def meet(self, storage: str, name: str, token: str, action: str = "look") -> bool:
        """Whether the mark `token` lies beside checkpoint `name`; "put" makes it, "drop" removes it. Two daemons that see each other's
        marks share the storage."""
        return bool(self._t.request("POST", f"/v1/storages/{quote(storage)}:meet", {"name": name, "token": token, "action": action},
                                    idempotent=True)["seen"])


class Client:
    """A connection to one daemon. Threads and forked children may use it; it can be pickled. `with` closes it."""

    def __init__(self, transport: Transport) -> None:
        self._t = transport
        self.jobs, self.checkpoints = Jobs(transport), Checkpoints(transport)
        self.state_dicts, self.storages = StateDicts(transport), Storages(transport)
        self.transforms, self.runs = Transforms(transport), Runs(transport)
        self._caps: Optional[Dict[str, Any]] = None
        self.early = self.rings = True  # until this daemon refuses: see _early.py, _ring.py

    @property
    def url(self) -> str:
        return str(self._t.endpoint)

    def capabilities(self) -> Dict[str, Any]:
        """Version, limits, shared memory, host; `uid` and `admin` say as whom we count."""
        caps: Dict[str, Any] = self._t.request("GET", "/v1/capabilities")
        if caps.get("api") != API:
            raise errors.ProtocolMismatch(f"{self.url} speaks API {caps.get('api')!r}, this client {API!r}: update the older one")
        self._caps = caps
        return caps

    def check(self) -> "Client":
        """Asks once whether a daemon that understands us is there. Raises NoDaemon, Forbidden, ProtocolMismatch."""
        if self._caps is None:
            self.capabilities()
        return self

    def events(self) -> Iterator[Dict[str, Any]]:
        """Everything that happens, as it happens: {"id", "type", "time", "data"}, for ever."""
        t = Transport(self._t.endpoint, self._t.token, timeout=60)
        c = t._connection(60)
        c.request("GET", "/v1/events", headers={"Accept": "application/x-ndjson",
                                                **({"Authorization": "Bearer " + t.token} if t.token else {})})
        r = c.getresponse()
        try:
            while True:
                line = r.readline()
                if not line:
                    return
                if line.strip():
                    yield json.loads(line)
        finally:
            t.close()

    def close(self) -> None:
        self._t.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<dcpd.Client {self.url}>"

    def _repr_html_(self) -> str:
        from . import show
        return show.client_html(self)


def connect(url: Optional[str] = None, token: Optional[str] = None, *, timeout: float = 60.0) -> Client:
    """A client of the daemon at `url` (`http://host:port`, `unix:///path`), else of the one that is found.

    Looked for by DCPD_URL, else at $XDG_STATE_HOME/dcpd/dcpd.sock, then (root) /var/lib/dcpd/dcpd.sock, then
    /run/dcpd/dcpd.sock. token: default DCPD_TOKEN, or the content of DCPD_TOKEN_FILE; none is needed on the Unix socket.
    timeout: seconds for one answer. Raises NoDaemon at once when nothing answers, Forbidden, ProtocolMismatch.
    """
    token = token or default_token()
    if url:
        return Client(Transport(parse_url(url), token, timeout)).check()
    ends = default_endpoints()
    failures: List[str] = []
    locked: Optional[errors.Forbidden] = None
    for e in ends:
        try:
            return Client(Transport(e, token, timeout)).check()
        except errors.NoDaemon as x:
            failures.append(f"{e} ({getattr(x.__cause__, 'strerror', None) or x.__cause__})")
        except errors.Forbidden as x:
            locked = locked or x
    if locked is not None:
        raise locked
    raise errors.NoDaemon(f"no dcpd found: {'; '.join(failures)}. Start one with `dcpd --storage main=/some/dir`, or set DCPD_URL "
                          "to where it is; `python -m dcpd doctor` helps")
