"""The API's resources as Python objects: `client.jobs`, `.checkpoints`, `.state_dicts`, `.storages`, `.transforms`,
`.runs`, `.webhooks`, `.chains`, `.nodes`.

Records come back as the plain dicts of the HTTP API, so that everything `api/openapi.yaml` says holds here; a `Job` and a list of
checkpoints know in addition how to show themselves.
"""
from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from . import errors
from ._http import Answer, Transport, checked, default_endpoints, default_token, parse_url, query, quote

if TYPE_CHECKING:
    from . import _device

API = "v1"
IMAGE_PIECE = 64 << 20  # bytes asked for at once
Ref = Union[str, Tuple[str, str], Mapping[str, str]]


def ref_object(ref: Ref) -> Dict[str, Any]:
    """`"main:a/b"`, `("main", "a/b")` or `{"storage": …, "name": …}` → the API's object; `"shm:name"` → a state dict, `"shm:node/name"`
    one of another node of the cluster."""
    if isinstance(ref, Mapping):
        return dict(ref)
    if isinstance(ref, tuple):
        return {"storage": ref[0], "name": ref[1]}
    storage, colon, name = ref.partition(":")
    if not colon or not name:
        raise errors.RequestRefused(f"{ref!r} is no reference: STORAGE:NAME, such as main:run1/step-100")
    if storage != "shm":
        return {"storage": storage, "name": name}
    node, slash, rest = name.partition("/")
    return {"state_dict": rest, "node": node} if slash else {"state_dict": name}


_C = TypeVar("_C", bound="Closing")


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

    def list(self, storage: Optional[str] = None, *, prefix: Optional[str] = None, run: Optional[str] = None,
             filter: Optional[str] = None, sort: Optional[str] = None, limit: Optional[int] = None) -> List[Dict[str, Any]]:
        """Records of the checkpoints of one storage, or of all; of one run; `filter`: terms joined by AND, such as "step>=100 AND
        metrics.loss<1.5 AND verified=verified AND held=false AND labels.team=vision AND name=run1/*"; `sort`, of one storage: name, time,
        step, bytes or metrics.NAME, "-time" the newest first. Raises RequestRefused, which names the word that means nothing."""
        path = "/v1/checkpoints" + (f"/{quote(storage)}" if storage else "")
        size = min(limit or 1000, 1000)
        pages = self._pages(path, "checkpoints", prefix=prefix, run=run, filter=filter, sort=sort, page_size=size)
        return list(itertools.islice(pages, limit))

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

    def file(self, ref: Ref, name: str, offset: int = 0, bytes: Optional[int] = None) -> Answer:
        """Bytes of a file as they lie, up to 1 GiB; nothing has compared them with a digest."""
        path = query(self._path(ref, f"/files/{quote(name)}"), offset=offset or None, bytes=bytes)
        return checked(self._t.raw("GET", path), path)

    def lineage(self, ref: Ref) -> Dict[str, Any]:
        """What a checkpoint was made of, and what was made of it, as records tell: {"checkpoint", "nodes", "edges", "truncated"}. The state
        of an edge says whether the parent is still what the child was made of: "same", "replaced", "removed" or "unknown"."""
        return dict(self._t.request("GET", self._path(ref, "/lineage")))

    def hold(self, ref: Ref, reason: str = "") -> Dict[str, Any]:
        """Holds a checkpoint: nothing of dcpd's removes or replaces it before `unhold`, which its owner, root and dcpd's own user may.
        {"storage", "name", "hold": {"owner", "reason", "since"}}; the file with it lies beside the checkpoint's own."""
        return dict(self._t.request("PUT", self._path(ref, "/hold"), {"reason": reason}, idempotent=True))

    def unhold(self, ref: Ref) -> Dict[str, Any]:
        """Lifts the hold, if there is one."""
        return dict(self._t.request("DELETE", self._path(ref, "/hold"), idempotent=True))

    def copy(self, ref: Ref, to: Ref, *, overwrite: bool = False, pace: str = "full") -> Job:
        """Submits a job that copies a checkpoint of any format byte for byte, to another storage too, compared with its digests on the way.
        Raises CheckpointExists, NotFound, StorageFull; the job fails with CheckpointReplaced if the source changes meanwhile."""
        spec = {"kind": "replicate", "source": ref_object(ref), "target": ref_object(to), "options": {"overwrite": overwrite, "pace": pace}}
        return Job(self._t.request("POST", "/v1/jobs", spec, headers={"Idempotency-Key": uuid.uuid4().hex}))

    def delete(self, ref: Ref, *, trash: Optional[str] = None) -> Job:
        """Submits the delete job. trash: "72h", for so long `undelete` brings it back. Raises CheckpointHeld, Forbidden."""
        return Job(self._t.request("DELETE", query(self._path(ref), trash=trash), headers={"Idempotency-Key": uuid.uuid4().hex}))

    def undelete(self, ref: Ref, id: Optional[str] = None) -> Dict[str, Any]:
        """Brings back what was deleted into the trash under this name last, or what has the id. Raises NotFound, CheckpointExists: the
        name is taken, Forbidden."""
        return dict(self._t.request("POST", self._path(ref, ":undelete"), {"id": id} if id else {}, idempotent=True))

    def trash(self, storage: str) -> List[Dict[str, Any]]:
        """What lies in a storage's trash, newest first: id, name, bytes, uid, policy, why, deleted_at, until."""
        return list(self._t.request("GET", f"/v1/storages/{quote(storage)}/trash")["trash"])


class Policies(_Resource):
    """How long checkpoints are kept (the page retention.md)."""

    def list(self) -> List[Dict[str, Any]]:
        """All policies, by name, with `status`: what came of them."""
        return list(self._t.request("GET", "/v1/policies")["policies"])

    def get(self, name: str) -> Dict[str, Any]:
        """One policy. Raises NotFound."""
        return dict(self._t.request("GET", f"/v1/policies/{quote(name)}"))

    def put(self, name: str, storage: str, match: str, keep: Dict[str, Any], *, verified_only: bool = False, trash: Optional[str] = None,
            confirm: bool = False, paused: bool = False) -> Dict[str, Any]:
        """Keeps the policy, in place of one of its name: `client.policies.put("night", "main", "run*", {"last": 3, "every": "24h"})`. What
        it does not keep goes at once: see `preview`. confirm: `match` may match no run, or every run. paused: it removes nothing."""
        doc = {**self._doc(storage, match, keep, verified_only, trash, confirm), **({"paused": True} if paused else {})}
        return dict(self._t.request("PUT", f"/v1/policies/{quote(name)}", doc, idempotent=True))

    def delete(self, name: str) -> None:
        """Removes the policy; checkpoints stay as they are. Raises NotFound."""
        self._t.request("DELETE", f"/v1/policies/{quote(name)}", idempotent=True)

    def preview(self, name: str, storage: Optional[str] = None, match: str = "", keep: Optional[Dict[str, Any]] = None, *,
                verified_only: bool = False, trash: Optional[str] = None) -> Dict[str, Any]:
        """{"remove": [{"name", "bytes", "why"}], "keep": [{"name", "why": […]}]}: of the policy as it is, or, with storage, match and keep,
        as if it said that."""
        doc = self._doc(storage, match, keep or {}, verified_only, trash, True) if storage else {}
        return dict(self._t.request("POST", f"/v1/policies/{quote(name)}:preview", doc, idempotent=True))

    @staticmethod
    def _doc(storage: str, match: str, keep: Dict[str, Any], verified_only: bool, trash: Optional[str], confirm: bool) -> Dict[str, Any]:
        doc: Dict[str, Any] = {"storage": storage, "match": match, "keep": keep, "verified_only": verified_only}
        return {**doc, **({"trash": trash} if trash else {}), **({"confirm": True} if confirm else {})}


class Runs(_Resource):
    def list(self, storage: Optional[str] = None) -> List[Dict[str, Any]]:
        """The runs of one storage, or of all, by name: run, checkpoints, bytes, latest, step, modified_at, holds."""
        of = [storage] if storage else [s["name"] for s in self._pages("/v1/storages", "storages", page_size=1000)]
        return [r for s in of for r in self._pages("/v1/runs", "runs", storage=s, page_size=1000)]

    def get(self, run: str, *, filter: Optional[str] = None, sort: Optional[str] = None) -> Dict[str, Any]:
        """One run, "main:run1": its checkpoints, newest first unless sorted, and those alone that a filter lets through (checkpoints.list
        has the words), aliases ("latest", "latest-verified"), holds, and "lost_work": since when, and since which step, work would be lost
        if the training ended now. Raises NotFound."""
        r = ref_object(run)
        path = f"/v1/runs/{quote(r['storage'])}/{quote(r['name'])}"
        page: Dict[str, Any] = dict(self._t.request("GET", query(path, page_size=1000, filter=filter, sort=sort)))
        token = page.pop("next_page_token", None)
        while token:
            more = self._t.request("GET", query(path, page_size=1000, filter=filter, sort=sort, page_token=token))
            page["checkpoints"] += more["checkpoints"]
            token = more.get("next_page_token")
        return page

    def resume(self, run: str, *, look: bool = False, **wish: Any) -> Dict[str, Any]:
        """What a training goes on from: {"checkpoint", "step", "why", "skipped", "attempts", …}; "checkpoint" None: none will do. Counts an
        attempt, unless look. wish: world_size, layout, attempts_max, optimizer, unwanted. Raises NotFound: the run has no checkpoint."""
        r = ref_object(run)
        path = f"/v1/runs/{quote(r['storage'])}/{quote(r['name'])}:resume"
        if not look:
            return dict(self._t.request("POST", path, wish, idempotent=True))
        if "layout" in wish:
            wish["layout"] = json.dumps(wish["layout"])
        return dict(self._t.request("GET", query(path, **wish)))

    def drain(self, run: str, *, wait: float = 60) -> Dict[str, Any]:
        """Waits until no save into the run "main:run1" is under way, for `wait` seconds (at most 60): {"drained", "saves": [{"id", "name",
        "state"}, …]}."""
        r = ref_object(run)
        path = f"/v1/runs/{quote(r['storage'])}/{quote(r['name'])}:drain?wait={int(wait * 1000)}ms"
        return dict(self._t.request("POST", path, {}, idempotent=True))

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


class Webhooks(_Resource):
    """URLs that are told what happens (api/chains.md). For root, dcpd's own user and the holder of the token."""

    @staticmethod
    def _path(name: str, tail: str = "") -> str:
        return f"/v1/webhooks/{quote(name)}{tail}"

    def put(self, name: str, url: str, secret: str, events: Sequence[str] = ("checkpoint.durable",), *, storage: Optional[str] = None,
            match: Optional[str] = None) -> Dict[str, Any]:
        """Sets a webhook. secret: the name of a file in dcpd's `secrets/`; match: a glob for names of runs. What comes is checked with
        `dcpd.verify_webhook`."""
        body = {"url": url, "secret": secret, "events": list(events), "storage": storage, "match": match}
        return dict(self._t.request("PUT", self._path(name), {k: v for k, v in body.items() if v is not None}, idempotent=True))

    def get(self, name: str) -> Dict[str, Any]:
        return dict(self._t.request("GET", self._path(name)))

    def list(self) -> List[Dict[str, Any]]:
        return list(self._pages("/v1/webhooks", "webhooks", page_size=1000))

    def delete(self, name: str) -> None:
        self._t.request("DELETE", self._path(name))

    def deliveries(self, name: str, *, limit: Optional[int] = None) -> List[Dict[str, Any]]:
        """Newest first: id, event, state, attempts, status or error, times."""
        return list(itertools.islice(self._pages(self._path(name, "/deliveries"), "deliveries", page_size=min(limit or 1000, 1000)), limit))

    def retry(self, name: str, delivery: str) -> Dict[str, Any]:
        """Delivers again, now, with the same id."""
        return dict(self._t.request("POST", self._path(name, f"/deliveries/{quote(delivery)}:retry"), {}))

    def test(self, name: str) -> Dict[str, Any]:
        """Has the event `webhook.test` delivered."""
        return dict(self._t.request("POST", self._path(name, ":test"), {}))


class Chains(_Resource):
    """Jobs that follow each durable checkpoint of a run (api/chains.md)."""

    @staticmethod
    def _path(name: str, tail: str = "") -> str:
        return f"/v1/chains/{quote(name)}{tail}"

    def put(self, name: str, storage: str, steps: Sequence[Mapping[str, Any]], *, match: Optional[str] = None, behind: str = "newest",
            retries: Optional[int] = None) -> Dict[str, Any]:
        """Sets a chain. steps: [{"verify": {"level": "digest"}}, {"export": {"storage": "hf", "format": "safetensors"}}, …]."""
        body = {"storage": storage, "steps": [dict(s) for s in steps], "match": match, "behind": behind, "retries": retries}
        return dict(self._t.request("PUT", self._path(name), {k: v for k, v in body.items() if v is not None}, idempotent=True))

    def get(self, name: str) -> Dict[str, Any]:
        """The chain with its "status": how many executions wait, run, are done, failed or skipped, and the last ones with their jobs."""
        return dict(self._t.request("GET", self._path(name)))

    def list(self) -> List[Dict[str, Any]]:
        return list(self._pages("/v1/chains", "chains", page_size=1000))

    def delete(self, name: str) -> None:
        self._t.request("DELETE", self._path(name))

    def executions(self, name: str, *, limit: Optional[int] = None) -> List[Dict[str, Any]]:
        """Newest first."""
        return list(itertools.islice(self._pages(self._path(name, "/executions"), "executions", page_size=min(limit or 1000, 1000)), limit))


class StateDicts(_Resource):
    @staticmethod
    def _path(name: str, tail: str = "") -> str:
        return f"/v1/state-dicts/{quote(name)}{tail}"

    def create(self, name: str, world_size: int, slots: int = 2, **more: Any) -> Dict[str, Any]:
        """A state dict without segments. more: lease_seconds, on_owner_death, publish, subscribe."""
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

    def copy(self, name: str, rank: int, generation: int, pieces: Sequence[Tuple[Any, ...]], slot: Any, table: int, *,
             to_device: bool = False) -> Dict[str, Any]:
        """Copies device memory of this process (CUDA) into the rank's open slot, which is then to be sealed, or from its sealed slot to the
        device. pieces: (place in the slot, address on the device, bytes there), all of one GPU; those that are cast have (dtype in the
        slot, dtype on the device) behind, and are left out if the answer has a `cast_problem`. slot: the mapped segment, in which the
        table of pieces is written at `table`, behind the image: 32 bytes a piece, and as many for each allocation that a piece crosses.
        Kernels that write the memory must be done. The memory may change when this returns {"bytes", "copies", "gathered", "pinned"}.
        After an error that the daemon has answered nothing touches slot or memory any more: copy by other means. After ConnectionLost
        or an interrupt a worker may, until the state dict can be deleted: keep the memory. RequestRefused: memory cannot be handed over,
        or over TCP."""
        from . import _device

        if not self._t.endpoint.unix:
            raise errors.RequestRefused("device memory is handed over to a daemon on the same host: connect by its Unix socket")
        hand = _device.HandOver(_device.Driver(), pieces)
        given: Optional[_device.Descriptors] = None
        try:
            if table + len(hand.rows) > len(slot):
                raise errors.RequestRefused(f"the table of {hand.count} pieces needs {len(hand.rows)} bytes at {table} of the slot, "
                                            f"which has {len(slot)}: reserve more")
            slot[table:table + len(hand.rows)] = bytes(hand.rows)
            body: Dict[str, Any] = {"generation": generation, "device": hand.device, "allocations": hand.allocations,
                                    "table": {"offset": table, "count": hand.count}, "to_device": to_device}
            if hand.casts:
                body["casts"] = hand.casts
            if hand.fds:
                given = _device.Descriptors(self._t.endpoint.unix, hand.fds, self._t.timeout)
                body["descriptors"] = given.token
            return dict(self._t.request("POST", self._path(name, f"/ranks/{rank}:copy"), body, timeout=max(self._t.timeout, 600.0)))
        finally:
            hand.close()
            if given is not None:
                given.close()

    def image(self, name: str, rank: int, generation: Optional[int] = None, *, to: Union[str, "os.PathLike[str]", None] = None) -> bytes:
        """A rank's image as it lies in memory: a safetensors file (api/image.md). to: a path that it is written to piece by piece; no
        bytes are returned then. Raises NotFound, NotSealed, also if the generation goes meanwhile."""
        path = query(self._path(name, f"/ranks/{rank}/image"), generation=generation)
        if to is None:
            return checked(self._t.raw("GET", path), path).body
        part, at, of, tag = os.fspath(to) + ".part", 0, 1, ""
        try:
            with open(part, "wb") as f:
                while at < of:
                    more = {"If-Range": tag} if tag else {}
                    a = checked(self._t.raw("GET", path, headers={"Range": f"bytes={at}-{at + IMAGE_PIECE - 1}", **more}), path)
                    if tag and a.headers.get("etag") != tag:
                        raise errors.NotSealed(f"another generation of {name!r} lies there by now")
                    tag = a.headers.get("etag", "")
                    of = int(a.headers["content-range"].rpartition("/")[2]) if a.status == 206 else len(a.body)
                    f.write(a.body)
                    at += len(a.body)
            os.replace(part, to)
        finally:
            if os.path.exists(part):
                os.unlink(part)
        return b""

    def digests(self, name: str, generation: Optional[int] = None) -> Dict[str, Any]:
        """The digests (XXH3-128) of all images of a generation by blocks, as a checkpoint's manifest has them."""
        return dict(self._t.request("GET", query(self._path(name, "/digests"), generation=generation)))

    def release(self, name: str, rank: int, generation: int, reason: Optional[str] = None) -> None:
        """The slot is free, once no job uses it. reason: of one that will not be sealed, for the error of a save that awaits it."""
        self._t.request("POST", self._path(name, f"/ranks/{rank}:release"),
                        {"generation": generation, **({"reason": reason[:512]} if reason else {})}, idempotent=True)

    def renew(self, name: str, rank: int, generation: Optional[int] = None, *, taken: Optional[int] = None,
              wait: Optional[float] = None) -> None:
        """generation: asks whether it is still awaited, too; RequestRefused ("ring_lost") if nobody reads its ring any more. taken: the
        version that this rank of a subscriber uses from now on, and none before. wait: seconds (at most 60) to wait for a newer one."""
        body = {k: v for k, v in (("generation", generation), ("taken", taken)) if v is not None}
        path = query(self._path(name, f"/ranks/{rank}:renew"), wait=f"{int(wait * 1000)}ms" if wait else None)
        self._t.request("POST", path, body or None, idempotent=True, timeout=self._t.timeout + (wait or 0))


class DeviceImages(_Resource):
    """Weights kept in the memory of GPUs (api/engines.md)."""

    @staticmethod
    def _path(id: str, tail: str = "") -> str:
        return f"/v1/device-images/{quote(id)}{tail}"

    def list(self, state_dict: Optional[str] = None) -> List[Dict[str, Any]]:
        """id, state (filling, kept, dropped, lost), state_dict, rank, generation, device, bytes, attached, expires_at, problem, …"""
        return list(self._t.request("GET", query("/v1/device-images", state_dict=state_dict))["device_images"])

    def get(self, id: str) -> Dict[str, Any]:
        return dict(self._t.request("GET", self._path(id)))

    def keep(self, state_dict: str, rank: int = 0, *, generation: Optional[int] = None, device: Optional[str] = None,
             ttl_seconds: Optional[int] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
        """The record, once a GPU (its uuid; None: the only one) has one rank's sealed generation in memory that outlives its users."""
        body = {"state_dict": state_dict, "rank": rank, "generation": generation, "device": device, "ttl_seconds": ttl_seconds}
        return dict(self._t.request("POST", "/v1/device-images", {k: v for k, v in body.items() if v is not None}, idempotent=True,
                                    timeout=max(self._t.timeout, 600.0) if timeout is None else timeout))

    def attach(self, id: str) -> "Tuple[Dict[str, Any], _device.Descriptors]":
        """The record, and the connection to receive() the descriptor of the image's memory from; the image is in use until it is closed."""
        from . import _device

        if not self._t.endpoint.unix:
            raise errors.RequestRefused("device memory is handed over by a daemon on the same host: connect by its Unix socket")
        given = _device.Descriptors(self._t.endpoint.unix, (), self._t.timeout)
        try:
            return dict(self._t.request("POST", self._path(id, ":attach"), {"descriptors": given.token})), given
        except BaseException:
            given.close()
            raise

    def drop(self, id: str) -> None:
        """No process gets it any more; its memory is free when those that have it have ended. Raises NotFound, Forbidden, Busy (it is being
        filled)."""
        self._t.request("DELETE", self._path(id), idempotent=True)


class Publications(_Resource):
    def list(self) -> List[Dict[str, Any]]:
        """Records of publications, each with its `subscribers`: versions, lag, bytes of the last update."""
        return list(self._t.request("GET", "/v1/publications")["publications"])

    def get(self, name: str) -> Dict[str, Any]:
        return dict(self._t.request("GET", f"/v1/publications/{quote(name)}"))

    def follow(self, name: str, after: Optional[int] = None, wait: float = 20.0) -> Dict[str, Any]:
        """The record once there is a version newer than `after`, or after `wait` seconds."""
        body = {} if after is None else {"after": after}
        path = query(f"/v1/publications/{quote(name)}:follow", wait=f"{int(wait * 1000)}ms")
        return dict(self._t.request("POST", path, body, timeout=self._t.timeout + wait))


class Storages(_Resource):
    def list(self) -> List[Dict[str, Any]]:
        return list(self._pages("/v1/storages", "storages", page_size=1000))

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


class Audit(_Resource):
    """Who changed what: deletes, aliases, holds, policies, chains, webhooks, storages. For root, dcpd's own user and tokens with the scope
    admin."""

    def list(self, *, limit: Optional[int] = None) -> List[Dict[str, Any]]:
        """Newest first: id, time, uid, action, subject; token or policy, job and request where there is one."""
        return list(itertools.islice(self._pages("/v1/audit", "audit", page_size=min(limit or 1000, 1000)), limit))


class Nodes(_Resource):
    """The nodes of the daemon's cluster (api/cluster.md)."""

    def list(self) -> List[Dict[str, Any]]:
        """name, state (joined, draining, drained, away), advertise, version, jobs, storages; none without a cluster."""
        return list(self._t.request("GET", "/v1/nodes")["nodes"])

    def seen(self) -> Dict[str, Any]:
        """What the daemon says of itself beside list()'s `nodes`: node, its name, and spreads, whether loads can be spread over it and
        others; neither without a cluster. problem, if it has one."""
        return dict(self._t.request("GET", "/v1/nodes"))

    def drain(self, name: str, *, wait: float = 0) -> Dict[str, Any]:
        """Gives the node no new work. Returns it when its jobs have ended, or after `wait` seconds (at most 60)."""
        return dict(self._t.request("POST", f"/v1/nodes/{quote(name)}:drain?wait={int(wait * 1000)}ms", {}, idempotent=True))

    def undrain(self, name: str) -> Dict[str, Any]:
        return dict(self._t.request("POST", f"/v1/nodes/{quote(name)}:undrain", {}, idempotent=True))

    def forget(self, name: str) -> None:
        """Forgets a node that is away and will not come back."""
        self._t.request("POST", f"/v1/nodes/{quote(name)}:forget", {}, idempotent=True)


class Closing:
    """What `with` closes."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Client(Closing):
    """A connection to one daemon. Threads and forked children may use it; it can be pickled. `with` closes it."""

    def __init__(self, transport: Transport) -> None:
        self._t = transport
        self.jobs, self.checkpoints = Jobs(transport), Checkpoints(transport)
        self.state_dicts, self.storages = StateDicts(transport), Storages(transport)
        self.publications, self.audit = Publications(transport), Audit(transport)
        self.device_images = DeviceImages(transport)
        self.transforms, self.runs, self.policies = Transforms(transport), Runs(transport), Policies(transport)
        self.webhooks, self.chains = Webhooks(transport), Chains(transport)
        self.nodes = Nodes(transport)
        self._caps: Optional[Dict[str, Any]] = None
        self.early = self.rings = self.casts = True  # until this daemon refuses: see _early.py, _ring.py, _handover.py

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
