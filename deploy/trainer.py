#!/usr/bin/env python3
"""A trainer as small as it gets: what a client of dcpd does, with nothing but Python's standard library.

Each step it reserves a segment, copies its tensors in (a safetensors image in shared memory), seals it and asks for a save.
Between seal and save it could die: the snapshot is dcpd's from then on. `--seal-only` stops there, `--save-only` saves what an
earlier run sealed. Once the checkpoint is durable it releases the slot for a later step.
"""

import argparse
import array
import http.client
import json
import mmap
import os
import socket
import sys
import time
import urllib.parse


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=90)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def call(method, path, body=None):
    url = urllib.parse.urlsplit(os.environ.get("DCPD_URL", "unix:///run/dcpd/dcpd.sock"))
    conn = UnixConnection(url.path) if url.scheme == "unix" else http.client.HTTPConnection(url.netloc, timeout=90)
    headers = {"Accept": "application/json"}
    if os.environ.get("DCPD_TOKEN"):
        headers["Authorization"] = "Bearer " + os.environ["DCPD_TOKEN"]
    if body is not None:
        headers["Content-Type"] = "application/json"
    conn.request(method, path, None if body is None else json.dumps(body), headers)
    answer = conn.getresponse()
    raw = answer.read()
    conn.close()
    value = json.loads(raw) if raw else {}
    if answer.status >= 400 and value.get("code") not in ("state_dict_exists",):
        sys.exit(f"{method} {path}: {answer.status} {value.get('code')}: {value.get('detail') or value.get('title')}")
    return value


def image_header(tensors):
    """The header of a safetensors file whose data starts at a multiple of 4096; tensors: {name: (shape, bytes)}, float32."""
    entries, at = {}, 0
    for name, (shape, size) in tensors.items():
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    words = json.dumps(entries).encode()
    words += b" " * (-(len(words) + 8) % 4096)
    return len(words).to_bytes(8, "little") + words, at


def snapshot(name, step, count):
    """Reserve, copy, seal: what blocks a trainer. Returns the bytes of the image."""
    weights = array.array("f", [float(step)]) * count
    header, data = image_header({"model.weight": ([count // 64, 64], 4 * count)})
    total = len(header) + data
    call("POST", "/v1/state-dicts", {"name": name, "world_size": 1})
    got = call("POST", f"/v1/state-dicts/{name}/ranks/0:reserve?wait=30s", {"bytes": total, "generation": step})
    fd = os.open("/dev/shm" + got["segment"], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with mmap.mmap(fd, got["bytes"]) as segment:
            segment[:len(header)] = header
            segment[len(header):total] = memoryview(weights).cast("B")
    finally:
        os.close(fd)
    call("POST", f"/v1/state-dicts/{name}/ranks/0:seal", {"generation": step, "image_bytes": total})
    return total


def save(name, step, target):
    job = call("POST", "/v1/jobs", {"kind": "save", "source": {"state_dict": name, "generation": step}, "target": target})
    while job["state"] not in ("succeeded", "failed", "cancelled"):
        job = call("GET", f"/v1/jobs/{job['id']}?wait=30s")
    if job["state"] != "succeeded":
        sys.exit(f"job {job['id']} {job['state']}: {json.dumps(job.get('error'))}")
    call("POST", f"/v1/state-dicts/{name}/ranks/0:release", {"generation": step})
    return job["id"]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--name", default="example", help="state dict")
    p.add_argument("--storage", default="main")
    p.add_argument("--run", default="example", help="checkpoints are RUN/step-N")
    p.add_argument("--first", type=int, default=1, help="first step")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--every", type=float, default=0, help="seconds between steps")
    p.add_argument("--mib", type=int, default=16, help="size of the state dict")
    p.add_argument("--seal-only", action="store_true")
    p.add_argument("--save-only", action="store_true")
    a = p.parse_args()
    for step in range(a.first, a.first + a.steps):
        if not a.save_only:
            start = time.monotonic()
            size = snapshot(a.name, step, a.mib << 18)
            print(f"step {step}: {size} bytes sealed in {1e3 * (time.monotonic() - start):.1f} ms", flush=True)
        if not a.seal_only:
            job = save(a.name, step, {"storage": a.storage, "name": f"{a.run}/step-{step}"})
            print(f"step {step}: {a.storage}:{a.run}/step-{step} is durable (job {job})", flush=True)
        time.sleep(a.every)


if __name__ == "__main__":
    main()
