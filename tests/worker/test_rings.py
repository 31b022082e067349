"""A gang whose source comes through rings: all of it arrives, whatever the ring's size and however the rank dawdles; and a rank that
lies about it, stops, or takes the ring away ends the save and leaves nothing."""
import contextlib
import os
import struct
import threading
import time

import pytest
from test_streams import Filling, at, equal, images

import dcpd as lib
from gang import Gang, done, failed

MIB = 1 << 20
PAGE = lib.PAGE


class Ringed(Filling):
    """Images of which the segments hold the header and a ring."""

    def __init__(self, images, ring=MIB):
        lib_segments = super(Filling, self)
        lib_segments.__init__()
        self.images, self.ring, self.done, self.filling = images, ring, {}, [True] * len(images)
        self.head = [8 + struct.unpack("<Q", x[:8])[0] for x in images]
        self.at = [-(-h // PAGE) * PAGE + 2 * PAGE for h in self.head]
        for r, x in enumerate(images):
            fd = self.make(self.at[r] + ring + PAGE)
            os.pwrite(fd, x[:self.head[r]], 0)
            os.pwrite(fd, b"\xee" * ring, self.at[r])
            self.done[r] = self.head[r]
            self.say(r, self.done[r])

    def say(self, r, n):
        os.pwrite(self.fds[r], struct.pack("<Q", n), self.at[r] + self.ring)

    def room(self, r):
        return struct.unpack("<Q", os.pread(self.fds[r], 8, self.at[r] + self.ring + 64))[0] + self.ring

    def upto(self, r, n):
        n = min(n, len(self.images[r]), self.room(r))
        x = self.done[r]
        while x < n:
            part = min(n - x, self.ring - x % self.ring)
            os.pwrite(self.fds[r], self.images[r][x:x + part], self.at[r] + x % self.ring)
            x += part
        if n > self.done[r]:
            self.say(r, n)
            self.done[r] = n

    def full(self):
        return all(self.done[r] == len(x) for r, x in enumerate(self.images))

    def doc(self, generation=1):
        doc = super().doc(generation)
        for r, one in enumerate(doc["ranks"]):
            one["ring"] = {"offset": self.at[r], "bytes": self.ring}
        return doc


class Going(threading.Thread):
    """Fills all rings in pieces as there is room, up to a share of the images; then says SEALED."""

    def __init__(self, gang, s, piece=200_001, share=1.0, sealed=True):
        super().__init__()
        self.gang, self.s, self.piece, self.share, self.sealed, self.stop = gang, s, piece, share, sealed, False

    def run(self):
        end = time.monotonic() + 60
        with contextlib.suppress(struct.error):  # the ring was taken away
            while not self.stop and not self.s.full() and time.monotonic() < end:
                for r, x in enumerate(self.s.images):
                    self.s.upto(r, min(self.s.done[r] + self.piece, int(len(x) * self.share)))
                time.sleep(0.0005)
        if self.sealed and self.s.full():
            self.gang.workers[0].send("SEALED", self.gang.generation, {})

    def halt(self):
        self.stop = True
        self.join()


def begin(gang, s, name, **how):
    gang.start("save", {"source": {"state_dict": "train", "generation": 7}, "target": at(name), "options": {}}, {"train": s})
    going = Going(gang, s, **how)
    going.start()
    return going


def end_of(gang, going, seconds=60):
    end = gang.finish(seconds)
    going.halt()
    return end


def nothing_left(roots, name):
    assert not os.path.exists(os.path.join(roots["out"], name))
    assert not [n for n in os.listdir(roots["out"]) if n.startswith(".dcpd-")]


@pytest.mark.short("auto-3-1048576", "threads-3-3149824")
@pytest.mark.parametrize("engine, workers, ring", [
    ("auto", 3, MIB), ("threads", 1, MIB), ("threads", 3, 3 * MIB + PAGE), ("auto", 1, 3 * MIB + PAGE), ("auto", 3, 16 * MIB),
    *(pytest.param(*x, marks=pytest.mark.long) for x in [
        ("auto", 1, MIB), ("threads", 3, MIB), ("threads", 1, 3 * MIB + PAGE), ("auto", 3, 3 * MIB + PAGE), ("auto", 1, 16 * MIB),
        ("threads", 1, 16 * MIB), ("threads", 3, 16 * MIB)])])
def test_all_of_it_arrives(roots, engine, workers, ring):
    with Gang(workers, roots, engine=engine) as g:
        for n in range(3):
            data = images()
            s = Ringed(data, ring)
            name = f"ring{engine}{workers}-{ring}/{n}"
            assert done(end_of(g, begin(g, s, name)))["plan_reused"] is (n > 0)
            s.close()
            equal(g, name, data)


def test_small_tensors_between_large_ones(roots):
    """Those that share a block lie near each other: else a block's bytes would not be in the ring at once."""
    data = [lib.image({f"{k}{i}": ("U8", [n], os.urandom(n)) for i in range(20) for k, n in (("big", MIB), ("small", 1000), ("e", 0))})]
    with Gang(2, roots) as g:
        s = Ringed(data)
        done(end_of(g, begin(g, s, "between")))
        s.close()
        equal(g, "between", data)


def test_replicas_are_compared(roots):
    """What another rank writes is read from this one's ring, too."""
    same = os.urandom(4 * MIB)
    data = [lib.image({"w": ("U8", [len(same)], same), f"own{r}": ("U8", [MIB], os.urandom(MIB))}) for r in range(2)]
    with Gang(2, roots) as g:
        s = Ringed(data)
        assert done(end_of(g, begin(g, s, "same")))["divergent"] == []
        s.close()
        other = [data[0], lib.image({"w": ("U8", [len(same)], same[:-1] + bytes([same[-1] ^ 1])), "own1": ("U8", [MIB], bytes(MIB))})]
        s = Ringed(other)
        assert [x["fqn"] for x in done(end_of(g, begin(g, s, "other")))["divergent"]] == ["w"]
        s.close()


def test_small_replicas_between_large_ones(roots):
    same = {f"{k}{i}": ("U8", [n], os.urandom(n)) for i in range(20) for k, n in (("s", 1000), ("b", 700_000))}
    data = [lib.image({**same, f"own{r}": ("U8", [MIB], os.urandom(MIB))}) for r in range(2)]
    with Gang(2, roots) as g:
        s = Ringed(data)
        assert done(end_of(g, begin(g, s, "scattered")))["divergent"] == []
        s.close()


@pytest.mark.parametrize("lie", ["beyond the room", "backwards", "beyond the image"])
def test_a_number_that_lies(roots, lie):
    with Gang(2, roots) as g:
        s = Ringed(images())
        going = begin(g, s, "lie", share=0.5)
        lib.wait_for(lambda: s.room(0) > s.ring + s.head[0] + MIB, 20, "it goes round")
        going.stop = True
        going.join()  # or it says an honest number over the lie
        most = s.done[0] + s.ring  # the room when all that was said has been taken: it grows until then
        s.say(0, {"beyond the room": most + PAGE * 64, "backwards": s.head[0], "beyond the image": 2**62}[lie])
        assert failed(end_of(g, going), "format_image")["rank"] == 0
        s.close()
        nothing_left(roots, "lie")


@pytest.mark.long
def test_a_seal_is_no_number(roots):
    """Sealed, but not all was put in: bytes of the last round are never taken for those of the next."""
    with Gang(2, roots) as g:
        s = Ringed(images())
        going = begin(g, s, "half", share=0.5, sealed=False)
        lib.wait_for(lambda: s.room(0) > s.ring + s.head[0] + MIB, 20, "it goes round")
        g.workers[0].send("SEALED", g.generation, {})
        failed(end_of(g, going), "not_sealed")
        s.close()
        nothing_left(roots, "half")


def test_a_ring_that_shrinks(roots):
    with Gang(2, roots) as g:
        s = Ringed(images())
        going = begin(g, s, "shrunk", share=0.5)
        lib.wait_for(lambda: s.room(0) > s.ring + s.head[0] + MIB, 20, "it goes round")
        going.halt()  # its writes would make the segment longer again
        os.ftruncate(s.fds[0], s.at[0] + PAGE)
        assert failed(end_of(g, going), "segment_shrunk")["rank"] == 0
        s.close()
        nothing_left(roots, "shrunk")


def test_a_ring_that_holds_no_task(roots):
    """A tensor cannot be written of which never enough is there: refused before anything is."""
    data = [lib.image({f"s{i}": ("U8", [120_000], os.urandom(120_000)) for i in range(20)})]
    with Gang(1, roots) as g:
        s = Ringed(data, 16 * PAGE)
        failed(end_of(g, begin(g, s, "tiny")), "plan_invalid")
        s.close()
        nothing_left(roots, "tiny")
