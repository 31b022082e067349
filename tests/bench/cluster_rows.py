"""Bench rows of a cluster: a state dict out of another node's memory, beside a plain socket copy of as many bytes, both over loopback into
memory that was touched before. Both nodes share the machine's processors, and the other node's digests are computed in each run."""
import mmap
import multiprocessing
import os
import socket
import tempfile
import time

from measure import MIB, RANKS, RUNS, SIZE, lib

import etcd

DIGESTS_KEPT_S = 6  # a node forgets digests of a generation that nobody reads


def send(path, port_out):
    with socket.create_server(("127.0.0.1", 0)) as server, open(path, "rb") as f:
        port_out.send(server.getsockname()[1])
        while True:
            c, _ = server.accept()
            with c:
                f.seek(0)
                c.sendfile(f)


def socket_copy(port, into):
    """GB/s of one stream."""
    begun, at = time.perf_counter(), 0
    with socket.create_connection(("127.0.0.1", port)) as c:
        while at < len(into):
            n = c.recv_into(into[at : at + (4 << 20)])
            assert n
            at += n
    return len(into) / 1e9 / (time.perf_counter() - begun)


def rows(b):
    if not b.wants("cluster.restore") or not etcd.PROGRAM:
        return
    part = SIZE // RANKS
    with tempfile.TemporaryDirectory(dir=b.tmpfs) as home:
        server, nodes = etcd.Etcd(b.disk), []
        try:
            for name in ("a", "b"):
                os.mkdir(f"{home}/{name}")
                nodes.append(etcd.Node(f"{home}/{name}", server, name, {"main": f"{home}/main"}))
            one, two = nodes
            two.sees(a="joined", b="joined")
            one.put("bench", [lib.image({f"w{r}": ("U8", [part], os.urandom(MIB) * (part // MIB))}) for r in range(RANKS)], generation=1)
            ours, peer = [], []
            with open(f"{home}/plain", "wb") as f:
                f.write(os.urandom(MIB) * (SIZE // MIB))
            mine, its = multiprocessing.Pipe()
            sender = multiprocessing.Process(target=send, args=(f"{home}/plain", its), daemon=True)
            sender.start()
            port, into = mine.recv(), memoryview(mmap.mmap(-1, SIZE))
            for i in range(RUNS + 1):
                peer.append(socket_copy(port, into))
                begun = time.perf_counter()
                two.api.run("load", source={"state_dict": "bench", "node": "a"}, target={"state_dict": "bench"})
                ours.append(SIZE / 1e9 / (time.perf_counter() - begun))
                time.sleep(DIGESTS_KEPT_S)
            sender.terminate()
            b.row("cluster.restore", "GB/s", ">=0.80", "a plain socket copy, unverified", ours[1:], peer[1:],
                  f"load of {SIZE // MIB} MiB, {RANKS} ranks", first=ours[0])
        finally:
            for d in nodes:
                d.discard()
            server.stop()
