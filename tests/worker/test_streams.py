"""A gang whose source is still being filled: what it takes when, and that it commits only when it is told that all is sealed."""
import os
import struct
import threading
import time

import pytest

import dcpd as lib
from gang import Gang, Segments, at, done, failed

MIB = 1 << 20
PAGE = lib.PAGE


class Filling(Segments):
    """Images of which only the headers are there, and the page with the number behind each."""

    def __init__(self, images, filling=None):
        super().__init__()
        self.images, self.filling = images, [True] * len(images) if filling is None else filling
        for image, empty in zip(images, self.filling):
            self.make(len(image) if not empty else self.mark_at(image) + PAGE, b"" if empty else image)
        for r, image in enumerate(images):
            if self.filling[r]:
                self.done = getattr(self, "done", {})
                self.done[r] = 0
                os.pwrite(self.fds[r], b"\xee" * len(image), 0)
                self.upto(r, 8 + struct.unpack("<Q", image[:8])[0])

    @staticmethod
    def mark_at(image):
        return -(-len(image) // PAGE) * PAGE

    def upto(self, r, n):
        image, n = self.images[r], min(n, len(self.images[r]))
        os.pwrite(self.fds[r], image[self.done[r]:n], self.done[r])
        os.pwrite(self.fds[r], struct.pack("<Q", n), self.mark_at(image))
        self.done[r] = n

    def doc(self, generation=1):
        doc = super().doc(generation)
        for r, one in enumerate(doc["ranks"]):
            one["image_bytes"] = len(self.images[r])
            if self.filling[r]:
                one["filling"] = True
        return doc


def images(world=2, mib=6):
    return [lib.image({f"w{r}": ("U8", [mib * MIB], os.urandom(mib * MIB)),
                       **{f"s{r}.{i}": ("U8", [99], os.urandom(99)) for i in range(50)}}) for r in range(world)]


class Fill(threading.Thread):
    """Fills side by side, in small steps, and then says SEALED, as the coordinator does."""

    def __init__(self, gang, s, sealed=True):
        super().__init__()
        self.gang, self.s, self.sealed = gang, s, sealed

    def run(self):
        n = 0
        while n < max(map(len, self.s.images)):
            n += 300_000
            for r in self.s.done:
                self.s.upto(r, n)
            time.sleep(0.005)
        if self.sealed:
            time.sleep(0.3)
            self.sealed_at = time.monotonic()
            self.gang.workers[0].send("SEALED", self.gang.generation, {})


def save(gang, s, name, sealed=True):
    gang.start("save", {"source": {"state_dict": "train", "generation": 7}, "target": at(name), "options": {}}, {"train": s})
    fill = Fill(gang, s, sealed)
    fill.start()
    end = gang.finish(60)
    fill.join()
    return end, fill


def equal(gang, name, data):
    s = Segments(data)
    r = done(gang.job("diff", {"a": at(name), "b": {"state_dict": "t"}}, {"t": s}))
    s.close()
    assert r["equal"], r
    done(gang.job("verify", {"source": at(name), "level": "digest"}))


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("workers", [1, 3])
def test_all_of_it_and_no_commit_before_it_is_sealed(roots, engine, workers):
    asked = []

    def on(gang, i, f):
        if f.type == "WANT_COMMIT":
            asked.append(time.monotonic())

    with Gang(workers, roots, on, engine=engine) as g:
        for n in range(3):
            data = images()
            s = Filling(data)
            end, fill = save(g, s, f"{engine}{workers}/{n}")
            assert done(end)["plan_reused"] is (n > 0)
            assert asked.pop() >= fill.sealed_at and not asked
            s.close()
            equal(g, f"{engine}{workers}/{n}", data)


def test_one_rank_is_sealed_already(roots):
    data = images()
    with Gang(2, roots) as g:
        s = Filling(data, [False, True])
        done(save(g, s, "one")[0])
        s.close()
        equal(g, "one", data)


@pytest.mark.long
def test_filled_but_never_sealed(roots):
    with Gang(2, roots) as g:
        s = Filling(images())
        end, _ = save(g, s, "never", sealed=False)
        failed(end, "not_sealed")
        s.close()
        assert not os.path.exists(os.path.join(roots["out"], "never"))
        assert not [n for n in os.listdir(roots["out"]) if n.startswith(".dcpd-")]


@pytest.mark.parametrize("mark", [2**63, 1])
def test_a_number_that_lies(roots, mark):
    with Gang(2, roots) as g:
        s = Filling(images())
        s.upto(0, 3 * MIB)
        g.start("save", {"source": {"state_dict": "train", "generation": 7}, "target": at("lie"), "options": {}}, {"train": s})
        time.sleep(0.5)
        os.pwrite(s.fds[0], struct.pack("<Q", mark), s.mark_at(s.images[0]))
        assert failed(g.finish(60), "format_image")["rank"] == 0
        s.close()
        assert not [n for n in os.listdir(roots["out"]) if n.startswith(".dcpd-")]


def test_cancel_while_it_waits(roots):
    with Gang(2, roots) as g:
        s = Filling(images())
        g.start("save", {"source": {"state_dict": "train", "generation": 7}, "target": at("c"), "options": {}}, {"train": s})
        time.sleep(0.5)
        start = time.monotonic()
        for w in g.workers:
            w.send("CANCEL", g.generation, {})
        failed(g.finish(60), "cancelled")
        assert time.monotonic() - start < 2 * lib.PATIENCE
        s.close()
        assert not [n for n in os.listdir(roots["out"]) if n.startswith(".dcpd-")]
