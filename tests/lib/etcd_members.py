"""Three members of one etcd on loopback, and a line to them that can be cut, for each node of a cluster."""
import contextlib
import selectors
import signal
import socket
import subprocess
import threading

import dcpd as lib
from etcd import PROGRAM, Etcd, free_port, needed


class Member(Etcd):
    """One of several; its address stays the same over stop() and start()."""

    def __init__(self, home, index, peers):
        self.index, self.peers = index, peers
        self.home, self.args, self.tls, self.process = home, [], None, None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.launch()

    def launch(self):
        peer = self.peers[self.index]
        all_ = ",".join(f"m{i}={url}" for i, url in enumerate(self.peers))
        with open(f"{self.home}/etcd{self.index}.log", "ab") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "--name", f"m{self.index}", "--data-dir", f"{self.home}/m{self.index}", "--listen-client-urls", self.url,
                 "--advertise-client-urls", self.url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", all_, "--heartbeat-interval", "50", "--election-timeout", "500"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start(self):
        if self.process is None:
            self.launch()


class Members:
    def __init__(self, home, count=3):
        needed()
        peers = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
        self.all = [Member(home, i, peers) for i in range(count)]
        self.url = ",".join(m.url for m in self.all)
        self.ready()

    def ready(self):
        for m in self.all:
            lib.wait_for(m.answers, 20, "etcd answers")

    def heal(self):
        for m in self.all:
            if m.process is None:
                m.start()
            m.go_on()

    def keys(self, prefix):
        return self.all[0].keys(prefix)

    def stop(self):
        for m in self.all:
            m.stop()


class Line:
    """What a node reaches etcd by: one address for each member. cut(): nothing comes through in either direction, and nothing is refused,
    as where a link is down. mute(): what is asked arrives, and is done; no answer comes back. mend(): connections that were held are gone,
    new ones pass."""

    def __init__(self, urls):
        self.is_cut, self.is_mute, self.ended, self.pairs, self.lock = False, False, False, {}, threading.Lock()
        self.selector = selectors.DefaultSelector()
        self.listeners, self.urls = [], []
        for url in urls.split(","):
            s = socket.create_server(("127.0.0.1", 0))
            s.setblocking(False)
            self.selector.register(s, selectors.EVENT_READ, ("accept", int(url.rsplit(":", 1)[1])))
            self.listeners.append(s)
            self.urls.append(f"http://127.0.0.1:{s.getsockname()[1]}")
        self.url = ",".join(self.urls)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def drop(self, s):
        other = self.pairs.pop(s, None)
        for one in (s, other):
            if one:
                self.pairs.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    self.selector.unregister(one)
                one.close()

    def accept(self, listener, port):
        near, _ = listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", port), timeout=1)
        except OSError:
            near.close()
            return
        self.pairs[near], self.pairs[far] = far, near
        for s, what in ((near, "ask"), (far, "answer")):
            s.settimeout(1)
            self.selector.register(s, selectors.EVENT_READ, (what, 0))

    def run(self):
        while not self.ended:
            for key, _ in self.selector.select(0.1):
                with self.lock:
                    if self.is_cut:
                        break
                    try:
                        if key.data[0] == "accept":
                            self.accept(key.fileobj, key.data[1])
                        elif key.fileobj in self.pairs:
                            bytes_ = key.fileobj.recv(65536)
                            if bytes_ and self.is_mute and key.data[0] == "answer":
                                continue
                            if bytes_:
                                self.pairs[key.fileobj].sendall(bytes_)
                            else:
                                self.drop(key.fileobj)
                    except OSError:
                        self.drop(key.fileobj)
            if self.is_cut:
                threading.Event().wait(0.05)

    def cut(self):
        with self.lock:
            self.is_cut = True

    def mute(self):
        with self.lock:
            self.is_mute = True

    def mend(self):
        with self.lock:
            for s in list(self.pairs):
                self.drop(s)
            self.is_cut = self.is_mute = False

    def close(self):
        self.ended = True
        self.thread.join()
        for s in [*self.listeners, *self.pairs]:
            s.close()


def freeze(d):
    """Stops a daemon and all of its workers. The pids, for thaw()."""
    pids = [d.proc.pid, *d.workers()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            lib.os.kill(pid, signal.SIGSTOP)
    return pids


def thaw(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            lib.os.kill(pid, signal.SIGCONT)
