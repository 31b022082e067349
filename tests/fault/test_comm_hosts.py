"""Collectives between hosts: each member has a network namespace of its own, on one bridge.

Rates and losses are the kernel's (tbf, iptables); a partition is a link that goes down. Needs root, for namespaces."""
import os
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

TOOL = pathlib.Path(os.environ.get("TESTBIN", pathlib.Path(__file__).resolve().parents[2] / "build/test/release")) / "tools/comm_member"
SIZE = 3
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2")


def sh(*args, check=True):
    return subprocess.run(args, check=check, capture_output=True, text=True)


class Hosts:
    def __init__(self, tag, where):
        self.names = [f"dc{tag}h{i}" for i in range(SIZE)]
        self.bridge, self.where, self.runs = f"dc{tag}br", where, 0
        self.procs = []
        sh("ip", "netns", "add", f"dc{tag}sw")
        self.switch = f"dc{tag}sw"
        self.sw("ip", "link", "add", self.bridge, "type", "bridge")
        self.sw("ip", "link", "set", self.bridge, "up")
        for i, n in enumerate(self.names):
            sh("ip", "netns", "add", n)
            self.sw("ip", "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth1", "netns", n)
            self.sw("ip", "link", "set", f"v{i}", "master", self.bridge, "up")
            self.on(i, "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth1")
            self.on(i, "ip", "-6", "addr", "add", f"fd77::{i + 1}/64", "dev", "eth1", "nodad")
            self.on(i, "ip", "link", "set", "eth1", "up")

    def sw(self, *args):
        return sh("ip", "netns", "exec", self.switch, *args)

    def on(self, i, *args, check=True):
        return sh("ip", "netns", "exec", self.names[i], *args, check=check)

    def start(self, listen=None, deadline=20000, connections=0, size=1 << 20, rounds=3):
        self.runs += 1
        d = self.where / f"meet{self.runs}"
        d.mkdir()
        self.procs = [subprocess.Popen(
            ["ip", "netns", "exec", n, TOOL, str(i), str(SIZE), listen(i) if listen else "eth1", d, str(deadline), str(connections),
             str(size), str(rounds)], stdout=subprocess.PIPE, text=True) for i, n in enumerate(self.names)]

    def ends(self, but=()):
        return {i: p.communicate(timeout=300)[0].splitlines()[-1] for i, p in enumerate(self.procs) if i not in but}

    def under_way(self):
        assert self.procs[0].stdout.readline() == "round 0\n"

    def remove(self):
        for p in self.procs:
            if p.poll() is None:
                p.kill()
            p.wait()
            p.stdout.close()
        for n in [*self.names, self.switch]:
            sh("ip", "netns", "del", n, check=False)


@pytest.fixture
def hosts(tmp_path):
    h = Hosts(os.getpid() % 100000, tmp_path)
    yield h
    h.remove()


def all_ok(ends):
    assert all(e.startswith("ok ") for e in ends.values()), ends


def all_name(ends, code, rank):
    for e in ends.values():
        got, who = e.split()[:2]
        assert (got, int(who)) == (code, rank), ends


@pytest.mark.parametrize("connections", [0, 1, 4])
def test_interface(hosts, connections):
    hosts.start(connections=connections, size=8 << 20)
    all_ok(hosts.ends())


def test_ipv6(hosts):
    hosts.start(listen=lambda i: f"fd77::{i + 1}")
    all_ok(hosts.ends())


def test_slow_wire(hosts):
    hosts.on(1, "tc", "qdisc", "add", "dev", "eth1", "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")
    hosts.start(size=1 << 20, rounds=2)
    all_ok(hosts.ends())


def test_loss(hosts):
    r = hosts.on(1, "iptables", "-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.01", "-j", "DROP", check=False)
    if r.returncode:
        pytest.skip(f"no iptables statistic here: {r.stderr.strip()}")
    hosts.start(size=1 << 20, rounds=3)
    all_ok(hosts.ends())


@pytest.mark.long
def test_partition(hosts):
    """A host that vanishes says nothing: the others know by the deadline, and name it."""
    hosts.start(deadline=5000, rounds=100000, size=100000)
    hosts.under_way()
    hosts.on(2, "ip", "link", "set", "eth1", "down")
    time.sleep(0.1)
    ends = hosts.ends(but=(2,))
    for e in ends.values():
        assert e.split()[0] in ("peer_timeout", "peer_lost") and e.split()[1] == "2", ends
    assert hosts.ends()[2].split()[0] in ("peer_timeout", "peer_lost")


def test_killed(hosts):
    hosts.start(deadline=60000, rounds=100000, size=100000)
    hosts.under_way()
    os.kill(hosts.procs[1].pid, signal.SIGKILL)  # "ip netns exec" has become the member
    all_name(hosts.ends(but=(1,)), "peer_lost", 1)
