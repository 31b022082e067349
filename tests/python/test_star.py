"""The gather of ranks on one host over their own sockets (dcpd._star), by threads that stand for ranks."""
import os
import socket
import threading

import pytest
from dcpd import _star


class Tell:
    """A process group's own gather."""

    def __init__(self, size):
        self.said, self.barrier = [None] * size, threading.Barrier(size, timeout=20)

    def of(self, rank):
        def tell(x):
            self.said[rank] = x
            self.barrier.wait()
            got = list(self.said)
            self.barrier.wait()
            return got
        return tell


def everywhere(size, f):
    """f(rank) in a thread each; what they return, or raise."""
    out = [None] * size

    def one(rank):
        try:
            out[rank] = f(rank)
        except Exception as e:
            out[rank] = e

    threads = [threading.Thread(target=one, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
        assert not t.is_alive()
    return out


def met(size, timeout=20.0):
    tell = Tell(size)
    return everywhere(size, lambda r: _star.meet(r, size, tell.of(r), timeout))


@pytest.fixture
def stars():
    made = met(4)
    yield made
    for s in made:
        s.close()


def test_everybody_has_everybodys_bytes(stars):
    for data in ([b"", b"one", b"22", b"333"], [os.urandom(3 << 20) for _ in range(4)]):
        assert everywhere(4, lambda r: stars[r].gather(data[r])) == [data] * 4


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_has_gone_ends_it_for_all(stars, gone):
    stars[gone].close()
    got = everywhere(4, lambda r: stars[r].gather(b"x"))
    assert all(isinstance(x, _star.Lost) for x in got), got
    for s in stars:
        with pytest.raises(_star.Lost, match="left before"):
            s.gather(b"x")


@pytest.mark.parametrize("says", ["nothing", "its word"])
def test_an_end_is_noticed_while_another_rank_is_late(stars, says):
    if says == "its word":
        stars[2]._links[0].sendall(_star._framed(b"x"))
    stars[2].close()
    got = everywhere(4, lambda r: stars[r].gather(b"x") if r in (0, 3) else None)
    assert isinstance(got[0], _star.Lost) and isinstance(got[3], _star.Lost)


def test_a_timeout_of_months_is_one(monkeypatch):
    stars = met(2, timeout=7.2e6)
    assert everywhere(2, lambda r: stars[r].gather(b"x")) == [[b"x"] * 2] * 2


def test_a_round_in_a_round_is_refused(stars):
    stars[0]._inside = True
    with pytest.raises(_star.Lost, match="handler"):
        stars[0].gather(b"x")
    stars[0]._inside = False


def test_ranks_of_two_networks_do_not_wait_for_each_other(monkeypatch):
    numbers = iter(range(3))
    monkeypatch.setattr(_star, "_network", lambda: next(numbers))
    monkeypatch.setattr(_star, "_let_in", None)
    assert met(3) == [None] * 3


def test_a_rank_that_is_too_late_ends_it_for_all():
    stars = met(3, timeout=0.3)
    got = everywhere(3, lambda r: stars[r].gather(b"x") if r != 1 else None)
    assert isinstance(got[0], _star.Lost) and isinstance(got[2], _star.Lost)
    assert isinstance(everywhere(3, lambda r: stars[r].gather(b"x"))[1], _star.Lost)


def test_a_fork_does_not_hide_an_end():
    from dcpd import _group

    stars = met(2)
    key = type("Key", (), {})()
    _group._stars[key] = stars[1]
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go[1])
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    stars[1].close()
    with pytest.raises(_star.Lost):
        stars[0].gather(b"x")
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    _group._stars.pop(key)


def test_strangers_are_turned_away(monkeypatch):
    real = _star._let_in

    def let_in(door, size, word):
        for said in (b"", b"x" * 20, word + (7).to_bytes(4, "little"), word + (0).to_bytes(4, "little")):
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(door.getsockname())
                s.sendall(said)
        return real(door, size, word)

    monkeypatch.setattr(_star, "_let_in", let_in)
    stars = met(3)
    assert everywhere(3, lambda r: stars[r].gather(bytes([r]))) == [[b"\0", b"\1", b"\2"]] * 3


@pytest.mark.parametrize("what", ["no socket", "one does not find it", "one is late"])
def test_ranks_that_do_not_meet_know_it(monkeypatch, what):
    if what == "no socket":
        monkeypatch.setattr(_star.socket, "socket", lambda *a: (_ for _ in ()).throw(OSError("no")))
    else:
        real = _star._enter
        monkeypatch.setattr(_star, "MEET_SECONDS", 0.5)

        def enter(name, word, rank):
            if rank != 2:
                return real(name, word, rank)
            if what == "one is late":
                return socket.socketpair()[0]
            return real(b"\0nobody", word, rank)

        monkeypatch.setattr(_star, "_enter", enter)
    assert met(3) == [None] * 3
