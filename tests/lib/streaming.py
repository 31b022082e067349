"""A rank that fills its segment piece by piece, and says how far it is, as a client does while a save streams from it."""
import os
import struct

import dcpd as lib

PAGE = lib.PAGE


class Filling:
    def __init__(self, d, sd, rank, image, generation=7, announce=True):
        self.d, self.sd, self.rank, self.image, self.generation, self.done = d, sd, rank, bytes(image), generation, 0
        self.mark_at = -(-len(self.image) // PAGE) * PAGE
        self.segment = d.reserve(sd, rank, self.mark_at + PAGE, generation)["segment"]
        self.file = lib.segment_file(self.segment)
        self.put(0, b"\xee" * self.mark_at)  # what is not there yet must not be saved
        self.head = 8 + struct.unpack("<Q", self.image[:8])[0]
        self.upto(self.head)
        if announce:
            self.announce().ok(200)

    def post(self, action, **body):
        return self.d.api.post(f"/v1/state-dicts/{self.sd}/ranks/{self.rank}:{action}", {"generation": self.generation, **body})

    def announce(self, **more):
        return self.post("seal", image_bytes=len(self.image), filling=True, **more)

    def put(self, at, data):
        fd = os.open(self.file, os.O_RDWR | os.O_CLOEXEC)
        try:
            assert os.pwrite(fd, data, at) == len(data)
        finally:
            os.close(fd)

    def mark(self, n):
        self.put(self.mark_at, struct.pack("<Q", n))

    def upto(self, n):
        n = min(n, len(self.image))
        self.put(self.done, self.image[self.done:n])
        self.mark(n)
        self.done = n

    def seal(self, fill=True):
        if fill:
            self.upto(len(self.image))
        return self.post("seal", image_bytes=len(self.image))


def submit(d, sd, name=None, generation=7, headers=None, source=None, **more):
    body = {"kind": "save", "source": {"state_dict": sd, "generation": generation, "await_seal": True, **(source or {})},
            "target": {"storage": "main", "name": name or f"stream/{lib.fresh()}"}, **more}
    return d.api.post("/v1/jobs", body, headers=headers).ok(202)


def job(d, j):
    return d.api.get(f"/v1/jobs/{j['id']}").ok(200)


def runs(d, j, bytes_done=1):
    """It writes already."""
    lib.wait_for(lambda: job(d, j)["state"] == "running" and job(d, j)["progress"]["bytes_done"] >= bytes_done, 20, "it streams")


def lost(d, j, *words, code="not_sealed", rank=None):
    """It fails soon, with a reason, and nothing is to be seen of it."""
    end = d.api.wait(j, 15)
    assert end["state"] == "failed", end
    p = lib.check_problem(end["error"], code)
    assert all(w in p["detail"] for w in words), p
    assert rank is None or p["rank"] == rank, p
    assert not (d.storages["main"] / end["target"]["name"]).exists()
    lib.wait_for(lambda: not d.staging(), 10, "no staging is left")
    return end


def saved(d, j, images):
    """It succeeds, its digests are right, and a save of the same bytes, sealed before it was made, is the same."""
    end = d.api.wait(j)
    assert end["state"] == "succeeded", end
    d.api.run("verify", source=end["target"] if isinstance(end["target"], str) else {k: end["target"][k] for k in ("storage", "name")},
              level="digest")
    plain, name = lib.fresh("plain"), f"stream/{lib.fresh()}"
    d.put(plain, images)
    spec = {k: end["spec"][k] for k in ("include", "exclude", "rename", "dtype", "options")}
    d.api.run("save", source={"state_dict": plain}, target={"storage": "main", "name": name}, **spec)
    a = {k: end["target"][k] for k in ("storage", "name")}
    r = d.api.run("diff", a=a, b={"storage": "main", "name": name})["result"]
    assert r["equal"], r
    d.drop(plain)
    return end
