"""Saves by several hosts as one daemon sees them: what its requests may say, peers that never come, and what lies in the meeting place that
no daemon wrote. Real hosts: tests/python/test_hosts.py."""
import os

import pytest

import dcpd as lib

HOSTS = {"index": 0, "names": ["here", "there"], "ranks": [[0], [1]], "timeout_s": 1}


def save(d, name, **hosts):
    sd = lib.fresh()
    d.put(sd, [lib.image({"w": ("U8", [64], os.urandom(64))})])
    return {"kind": "save", "source": {"state_dict": sd}, "target": {"storage": "main", "name": name}, "options": {"retries": 0},
            "hosts": {"id": lib.fresh().replace("_", "-").lower() + "-12345678", **HOSTS, **hosts}}


def left(d):
    return [p.name for p in d.storages["main"].rglob(".dcpd-hosts-*")]


def test_meet(d):
    mark = {"name": f"{lib.fresh()}/x", "token": "0123456789abcdef"}
    meet = lambda **more: d.api.post("/v1/storages/main:meet", {**mark, **more})  # noqa: E731
    assert meet().ok() == {"seen": False}
    assert meet(action="put").ok() == {"seen": True} == meet(action="put").ok() == meet(action="look").ok()
    assert meet(token="0123456789abcdee").ok() == {"seen": False}
    meet(action="drop").ok()
    assert meet().ok() == {"seen": False} and left(d) == []
    for bad in ({"token": "../../../../x"}, {"token": "short"}, {"action": "run"}, {"more": 1}, {"name": "../x"}):
        assert meet(**bad).status in (400, 422), bad


@pytest.mark.parametrize("hosts", [{"ranks": [[0]]}, {"ranks": [[0], [-1]]}, {"index": 2}, {"id": "../../x"}, {"id": "A" * 20},
                                   {"timeout_s": 0}, {"part": True}, {"more": 1}])
def test_requests_that_cannot_be(d, hosts):
    assert d.api.post("/v1/jobs", save(d, lib.fresh(), **hosts)).status in (400, 422)


@pytest.mark.long
@pytest.mark.parametrize("hosts, words", [({"ranks": [[0], [0]]}, "each once"), ({"ranks": [[0, 1], [2]]}, "hosts names 2"),
                                          ({}, "there did not begin"), ({"index": 1}, "here, which leads, did not begin")])
def test_nobody_comes(d, hosts, words):
    """It ends, says why, and leaves nothing."""
    name = lib.fresh()
    job = d.api.wait(d.api.post("/v1/jobs", save(d, name, **hosts)).ok()["id"], 40)
    assert job["state"] == "failed" and words in job["error"]["detail"], job
    assert left(d) == [] and not (d.storages["main"] / name).exists()


@pytest.mark.parametrize("head", [b"", b"x" * 50, b"dcpd-heads-1".ljust(16, b"\0") + b"j".ljust(64, b"\0") + b"\xff" * 24,
                                  b"dcpd-heads-1".ljust(16, b"\0") + b"j" * 64,
                                  b"dcpd-heads-1".ljust(16, b"\0") + b"j".ljust(64, b"\0") + (1).to_bytes(8, "little") +
                                  (1 << 40).to_bytes(8, "little") + (24).to_bytes(8, "little") + b"\x10" + b"\0" * 7 + b"that is no JSON."])
def test_lies_of_a_peer(d, head):
    name = lib.fresh()
    spec = save(d, name, timeout_s=2)
    job = d.api.post("/v1/jobs", spec).ok()["id"]
    place = lib.wait_for(lambda: next(d.storages["main"].glob(".dcpd-hosts-*/heads-0"), None), 10, "it waits").parent
    (place / "x").write_bytes(head)
    os.rename(place / "x", place / "heads-1")
    job = d.api.wait(job, 40)
    assert job["state"] == "failed" and job["error"]["code"] in ("format_image", "format_safetensors"), job
    assert left(d) == [] and not (d.storages["main"] / name).exists()
