"""Pickles of plain data read without running anybody's code, and without asking for more than they are."""
import collections
import datetime
import decimal
import fractions
import io
import pickle
import pickletools
import random
import resource
import time

import numpy as np
import pytest
import torch

import dcpd
from dcpd import _plain_pickle, values

REDUCE, G = b"R", b"c%s\n%s\n"
ORDERED = collections.OrderedDict(a=[1, 2], b=())
ORDERED._metadata = {"version": 2}
PLAIN = [None, True, -1, 1 << 100, 1.5, float("inf"), "ä\0\ud800", b"\0\xff", b"", bytearray(b"xyz"), bytearray(), (), (1,), (1, 2, 3, 4),
         [], [1, [2, [3]]], {}, {"a": {"b": 1}, 3: 4}, set(), {1, "x"}, frozenset((1, 2)), frozenset(), ORDERED, collections.OrderedDict(),
         collections.Counter("aab"), collections.deque([1, 2], 5), collections.deque([3]), 1 + 2j, slice(1, None, 2), range(3, 9, 2),
         datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.date(2026, 1, 2), datetime.timedelta(3, 4, 5), fractions.Fraction(-3, 7),
         decimal.Decimal("1.10"), float, int, str, bool, list, dict, np.float32(2.5), np.int64(-3), np.bool_(True), np.complex64(1j),
         np.arange(6).reshape(2, 3), np.asfortranarray(np.random.rand(3, 4)), np.zeros((0, 2), np.float16), np.arange(3, dtype=">u2")]


def alike(a, b):
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return type(a) is type(b) and a == b and getattr(a, "__dict__", None) == getattr(b, "__dict__", None)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data(protocol):
    for x in PLAIN:
        assert alike(x, _plain_pickle.loads(pickle.dumps(x, protocol))), x
    twice = np.arange(3)
    a, b, (c,) = _plain_pickle.loads(pickle.dumps((twice, twice, [twice]), protocol))
    assert a is b is c
    knot = [1]
    knot.append(knot)
    back = _plain_pickle.loads(pickle.dumps(knot, protocol))
    assert back[1] is back
    assert _plain_pickle.loads(pickle.dumps(torch.Size([2, 3]), protocol)) == torch.Size([2, 3])


def test_what_pytorch_saves():
    out = io.BytesIO()
    torch.save((0.9, ORDERED, np.random.get_state()), out)
    got = values.from_pickle(out.getvalue())
    assert got[:2] == (0.9, ORDERED) and got[1]._metadata == {"version": 2} and np.array_equal(got[2][1], np.random.get_state()[1])


def call(name, args, module=b"builtins"):
    return G % (module, name) + args + b"tR"


HUGE = b"(I0\nI1099511627776\n"
RANGE = call(b"range", HUGE)
MANY = b"(" + b"I1\n" * 9000 + b"lp0\n"
HOSTILE = {
    "list of a range": b"(" + RANGE + b"tp0\n0" + G % (b"builtins", b"list") + b"g0\nR",
    "list of a range, protocol 2": G % (b"builtins", b"list") + b"(" + RANGE + b"t\x81",
    "tuple of a range": G % (b"builtins", b"tuple") + b"(" + RANGE + b"t\x81",
    "set of a range": G % (b"builtins", b"set") + b"(" + RANGE + b"tR",
    "Counter of a range": G % (b"collections", b"Counter") + b"(" + RANGE + b"tR",
    "deque of a range": G % (b"collections", b"deque") + b"(" + RANGE + b"tR",
    "inst": b"(" + RANGE + b"ibuiltins\nlist\n",
    "obj": b"(" + G % (b"builtins", b"list") + RANGE + b"o",
    "bytearray of a number": call(b"bytearray", b"(I17179869184\n"),
    "bytes of a number": call(b"bytes", b"(I17179869184\n"),
    "bytearray8": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little"),
    "a Fraction": call(b"Fraction", b"(S'1e999999999'\n", b"fractions"),
    "text of lists": b"(lp0\n" + b"".join(b"(g%d\ng%d\nlp%d\n" % (i, i, i + 1) for i in range(60)) + b"0" + call(b"str", b"(g60\n"),
    "copies": MANY + b"0(" + (G % (b"builtins", b"list") + b"(g0\ntR") * 20000 + b"l",
    "copies of bytes": b"S'" + b"x" * 10000 + b"'\np0\n0(" + (G % (b"_codecs", b"encode") + b"(g0\nS'latin1'\ntR") * 2000 + b"l",
    "copies of a state": b"}" + b"".join(b"S'k%d'\nI1\ns" % i for i in range(3000)) + b"p0\n0("
    + (G % (b"collections", b"OrderedDict") + b")Rg0\nb") * 2000 + b"l",
    "an array of nothing": b"cnumpy\ndtype\n(S'u1'\nI00\nI01\ntRp1\n0cnumpy._core.numeric\n_frombuffer\n(C\x00g1\n"
    + b"(I1099511627776\ntS'C'\ntR",
    "code": call(b"eval", b"(S'1'\n"), "os": call(b"system", b"(S'true'\n", b"posix"), "getattr": call(b"getattr", b"(N"),
    "import": call(b"__import__", b"(S'os'\n"), "type": G % (b"builtins", b"type"), "object": G % (b"builtins", b"object"),
    "dotted": b"\x80\x04\x8c\x08builtins\x8c\x0alist.clear\x93", "dup": b"(lp0\n2", "extension": b"\x82\x01", "persistent": b"Px\n",
    "by names": G % (b"builtins", b"dict") + b")}\x92", "state of a Counter": call(b"Counter", b"(", b"collections") + b"}b",
    "state of a list": b"(l}b", "class that is called": call(b"int", b"(S'1'\n"), "empty": b"", "cut": b"(I1",
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_hostile(what):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(Exception):
        print(what, _plain_pickle.loads(HOSTILE[what] + b"."))
    assert time.process_time() - start < 5 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    with pytest.warns(UserWarning, match="Opaque"):
        assert isinstance(values.from_pickle(HOSTILE[what] + b"."), dcpd.Opaque)


@pytest.mark.parametrize("what", ["objects", "records", "text", "subclass", "short", "long", "huge", "negative", "open", "early", "twice"])
def test_arrays_that_are_no_plain_data(what):
    begin = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntRp0\n"
    dtype = b"cnumpy\ndtype\n(S'u1'\nI00\nI01\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"

    def built(shape, data):
        return begin + b"(I1\n(" + b"".join(b"I%d\n" % n for n in shape) + b"t" + dtype + b"I00\nC" + bytes([len(data)]) + data + b"tb"

    assert _plain_pickle.loads(built([2], b"ab") + b".").tolist() == [97, 98]
    assert _plain_pickle.loads(b"(" + built([1], b"x") + b"g0\nt.")[1].tolist() == [120]
    bad = {"objects": pickle.dumps(np.array([object()])), "records": pickle.dumps(np.zeros(2, "i4,f8")),
           "text": pickle.dumps(np.array(["x"])), "short": built([3], b"ab") + b".", "long": built([1], b"ab") + b".",
           "subclass": begin.replace(b"cnumpy\nndarray", b"cnumpy\nmatrix") + b".", "huge": built([1 << 40] * 3, b"") + b".",
           "negative": built([-1, -2], b"ab") + b".", "open": b"(" + begin + b"t.", "early": b"(" + begin + b"g0\nt.",
           "twice": begin + b"2" + built([1], b"x")[len(begin):] + b"."}[what]
    with pytest.raises((pickle.UnpicklingError, KeyError)):
        _plain_pickle.loads(bad)


def test_what_the_hostile_ones_are_made_of_is_read():
    """They are refused for what they ask, not for how they are written."""
    assert _plain_pickle.loads(RANGE + b".") == range(0, 1 << 40)
    assert _plain_pickle.loads(b"Nr\xff\xff\xff\x7f.") is None, "no memo of 16 GiB"
    assert _plain_pickle.loads(MANY + b"0" + (G % (b"builtins", b"list") + b"(g0\ntR") + b".") == [1] * 9000
    assert _plain_pickle.loads(G % (b"builtins", b"list") + b"((lt\x81.") == []
    assert _plain_pickle.loads(b"S'xy'\np0\n0" + G % (b"_codecs", b"encode") + b"(g0\nS'latin1'\ntR.") == b"xy"
    assert _plain_pickle.loads(b"\x80\x05\x96" + (3).to_bytes(8, "little") + b"abc.") == b"abc"
    assert _plain_pickle.loads(call(b"Fraction", b"(S'1/9'\n", b"fractions") + b".") == fractions.Fraction(1, 9)


def test_mutated():
    """Whatever comes out is plain data."""
    rng = random.Random(7)
    known = [pickle.dumps(x, p) for x in PLAIN for p in (0, 2, 4, 5)]
    opcodes = [ord(o.code) for o in pickletools.opcodes]
    allowed = {type(x) for x in PLAIN} | {torch.Size, object, type, *(np.dtype(c).type for c in "bhilqBHILQefdgFD?")}
    read = 0
    for _ in range(6000):
        data = bytearray(rng.choice(known))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) or 1)
            if rng.random() < .5 and data:
                data[at] = rng.choice(opcodes)
            elif rng.random() < .5:
                data[at:at] = rng.choice(known)[:rng.randint(1, 40)]
            else:
                del data[at:at + rng.randint(1, 5)]
        try:
            got = _plain_pickle.loads(bytes(data))
        except Exception:
            continue
        read += 1
        seen, left = set(), [got]
        while left:
            x = left.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            assert type(x) in allowed, (type(x), bytes(data))
            left += list(x) if isinstance(x, (list, tuple, set, frozenset, collections.deque)) else []
            left += [*x, *x.values()] if isinstance(x, dict) else []
    assert read > 200
