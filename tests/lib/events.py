"""Reads a stream of events while the test goes on."""
import json
import threading

LINES = {"Accept": "application/x-ndjson"}


class Events:
    """The events of a job, from one daemon: `seen` grows until the stream ends; then `ended` is set. `cut`: it broke off."""

    def __init__(self, d, job, last=None, path=None):
        headers = {**LINES, **({"Last-Event-ID": last} if last else {})}
        self.connection = d.api.connect()
        self.connection.request("GET", path or f"/v1/jobs/{job}/events", headers=headers)
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200, self.answer.read()
        self.seen, self.ended, self.cut = [], threading.Event(), False
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        try:
            for line in self.answer:
                if line.strip():
                    self.seen.append(json.loads(line))
        except Exception:  # noqa: BLE001: whichever way a connection breaks off
            self.cut = True
        self.ended.set()

    def types(self):
        return [e["type"] for e in self.seen]

    def states(self):
        return [e["data"]["state"] for e in list(self.seen) if e["type"] == "job.state"]

    def ids(self):
        return [e["id"] for e in self.seen if "id" in e]

    def to_the_end(self, seconds):
        assert self.ended.wait(seconds), f"the stream has not ended: {self.seen[-3:]}"
        assert not self.cut, self.seen[-3:]
        return self.seen
