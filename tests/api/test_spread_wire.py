"""Loads by several nodes over a connection that damages, cuts or holds up what goes through it: every node has the checkpoint's bytes, and
says who is to blame."""
import base64
import ctypes
import ctypes.util
import json
import socket
import struct
import threading

import pytest
from test_cluster import cluster, server  # noqa: F401
from test_cluster_images import Proxy
from test_neighbour_faults import between  # noqa: F401
from test_spread import MIB, NODES, holds, save, spread, warnings

import dcpd as lib

HEAD, CHALLENGE, WELCOME = 128, 64, 32            # bytes of a frame's head, and of what comes before the first frame
PAYLOAD = 64 << 10                                # bodies of this size are a tensor's bytes
_xxhash = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
_xxhash.XXH3_64bits.restype = ctypes.c_uint64
_xxhash.XXH3_64bits.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def xxh3(data):
    return struct.pack("<Q", _xxhash.XXH3_64bits(data, len(data)))


def flipped(head, body):
    """A bit that the network turns over."""
    middle = len(body) // 2
    return head + body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :]


def forged(head, body):
    """Other bytes than the checkpoint's in a sound frame: the sender's memory is at fault."""
    body = flipped(b"", body)
    head = head[: HEAD - 16] + xxh3(body)
    return head + xxh3(head) + body


class Wire:
    """A connection to a member of a group of hosts: act(head, body) → what goes on in place of the third frame of tensors that the member
    sends; None: nothing goes on any more, and the connection stays open; b"": it is closed."""

    def __init__(self, host, port, act):
        self.to, self.act, self.frames, self.struck = (host, port), act, 0, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.open = self.listener.getsockname()[1], [self.listener]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                caller = self.listener.accept()[0]
            except OSError:
                return
            member = socket.create_connection(self.to)
            self.open += [caller, member]
            for run in (self.up, self.down):
                threading.Thread(target=self.guard, args=(run, caller, member), daemon=True).start()

    def guard(self, run, caller, member):
        try:
            run(caller, member)
        except (OSError, EOFError):
            pass
        for s in (caller, member):
            s.close()

    def up(self, caller, member):
        while data := caller.recv(MIB):
            member.sendall(data)
        member.shutdown(socket.SHUT_WR)

    def down(self, caller, member):
        def take(n):
            data = bytearray()
            while len(data) < n:
                got = member.recv(n - len(data))
                if not got:
                    raise EOFError
                data += got
            return bytes(data)

        caller.sendall(take(CHALLENGE))
        caller.sendall(take(WELCOME))
        while True:
            head = take(HEAD)
            body = take(struct.unpack_from("<I", head, 80)[0])
            self.frames += len(body) >= PAYLOAD
            if self.frames == 3 and not self.struck.is_set():
                self.struck.set()
                out = self.act(head, body)
                if out is None:
                    threading.Event().wait(60)
                if not out:
                    return
                caller.sendall(out)
            else:
                caller.sendall(head + body)

    def close(self):
        for s in self.open:
            s.close()


@pytest.fixture
def wired(cluster, between):  # noqa: F811
    """wired(act) → (the nodes, the wire through which c hears a)."""
    wires = []

    def make(act):
        nodes = cluster(*NODES, args=("--comm-deadline", "2s"))
        for n in nodes:
            n.sees(**{name: "joined" for name in NODES})

        def request(path, body):
            doc = path.endswith(":meet") and json.loads(body)
            if not doc or doc["index"] != 0:
                return body
            card = bytearray(base64.b64decode(doc["data"]))
            assert card[:4] == b"DCPA" and struct.unpack_from("<H", card, 12)[0] == 4, card[:24]
            wires.append(Wire(socket.inet_ntop(socket.AF_INET, bytes(card[16:20])), struct.unpack_from("<H", card, 14)[0], act))
            struct.pack_into("<H", card, 14, wires[-1].port)
            return json.dumps({**doc, "data": base64.b64encode(card).decode()}).encode()

        between(nodes[2], nodes[0]).request = request
        return nodes, wires

    yield make
    for w in wires:
        w.close()


def loads(wired, act):
    """(node, its job) of all nodes, each of which has the checkpoint's bytes, although the wire was struck."""
    nodes, wires = wired(act)
    whole = save(nodes[0], "run/step-1", 48)
    sd, group = lib.fresh(), lib.fresh()
    jobs = [spread(n, "run/step-1", sd, spread={"id": group}) for n in nodes]
    done = [n.api.wait(job, 60) for n, job in zip(nodes, jobs)]
    assert [w.struck.is_set() for w in wires] == [True]
    for node, job in zip(nodes, done):
        assert job["state"] == "succeeded", job.get("error")
        assert job["result"]["unverified_bytes"] == 0
        holds(node, sd, whole)
    return list(zip(nodes, done))


@pytest.mark.long
@pytest.mark.parametrize("act, why", [(flipped, "checksum differs"), (lambda head, body: b"", ""), (lambda head, body: None, "")],
                         ids=["damaged", "cut", "stalled"])
def test_a_connection_that_fails_in_the_middle_is_named_and_the_rest_comes_from_the_storage(wired, act, why):
    for node, job in loads(wired, act):
        (warning,) = warnings(job)
        assert why in warning and ('"a"' in warning or '"c"' in warning), f"{node.name}: {warning}"


@pytest.mark.long
def test_other_bytes_than_the_checkpoints_are_named_and_read_from_the_storage(wired):
    """Their frame is sound: the manifest's digest finds them."""
    for node, job in loads(wired, forged):
        if node.name != "c":
            assert not warnings(job), warnings(job)
            continue
        (warning,) = warnings(job)
        assert '"a"' in warning and ".distcp" in warning, warning
        assert job["result"]["spread"]["bytes_from_nodes"] > 0
