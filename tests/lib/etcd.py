"""A real etcd on loopback (Debian's etcd-server), and daemons that are nodes of one cluster on it."""
import base64
import json
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

import dcpd as lib
from ports import free_port

PROGRAM = shutil.which("etcd")


def needed():
    if not PROGRAM:
        pytest.skip("no etcd here: Debian's package is etcd-server")


def openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


class Authority:
    """Makes certificates for 127.0.0.1: ca.pem, and NAME.pem with NAME.key."""

    def __init__(self, home):
        if not shutil.which("openssl"):
            pytest.skip("no openssl to make certificates with")
        self.home, self.ca = home, home / "ca.pem"
        self.new_key("ca")
        openssl("req", "-x509", "-new", "-key", home / "ca.key", "-days", 2, "-subj", "/CN=tests", "-out", self.ca)
        (home / "names").write_text("subjectAltName=IP:127.0.0.1\n")

    def new_key(self, name):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.home / f"{name}.key")

    def make(self, name):
        self.new_key(name)
        request, made = self.home / f"{name}.csr", self.home / f"{name}.pem"
        openssl("req", "-new", "-key", self.home / f"{name}.key", "-subj", f"/CN={name}", "-out", request)
        openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.home / "ca.key", "-CAcreateserial", "-days", 2, "-extfile",
                self.home / "names", "-out", made)
        return made, self.home / f"{name}.key"


class Etcd:
    """One server with a folder and ports of its own. stop() and start() keep what it holds. With an authority it speaks TLS, to who shows a
    certificate of that authority's."""

    def __init__(self, home, *args, authority=None):
        needed()
        self.home, self.args, self.tls = home, list(args), None
        self.port, self.peer, self.process = free_port(), free_port(), None
        self.url = f"{'https' if authority else 'http'}://127.0.0.1:{self.port}"
        if authority:
            cert, key = authority.make("etcd")
            self.args += ["--cert-file", cert, "--key-file", key, "--trusted-ca-file", authority.ca, "--client-cert-auth"]
            self.tls = ssl.create_default_context(cafile=authority.ca)
            self.tls.load_cert_chain(cert, key)
        self.start()

    def start(self):
        with open(f"{self.home}/etcd.log", "ab") as log:
            peer = f"http://127.0.0.1:{self.peer}"
            self.process = subprocess.Popen(
                [PROGRAM, "--data-dir", f"{self.home}/etcd", "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", *self.args],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        lib.wait_for(self.answers, 20, "etcd answers")

    def answers(self):
        """Perhaps with a refusal: it asks for a user."""
        try:
            self.ask("kv/range", {"key": base64.b64encode(b"x").decode()})
        except urllib.error.HTTPError as e:
            return e.code in (400, 401)
        except OSError:
            return False
        return True

    def ask(self, path, body, token=None):
        r = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode(), {"Authorization": token} if token else {})
        with urllib.request.urlopen(r, timeout=20, context=self.tls) as answer:
            return json.loads(answer.read())

    def keys(self, prefix="/dcpd/"):
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        code = lambda s: base64.b64encode(s.encode()).decode()
        rows = self.ask("kv/range", {"key": code(prefix), "range_end": code(end)}).get("kvs", [])
        return {base64.b64decode(row["key"]).decode(): json.loads(base64.b64decode(row["value"])) for row in rows}

    def knows(self, cluster, job, state="succeeded"):
        """The job's record, once etcd has it in that state: its node tells etcd later than its clients."""
        def look():
            row = self.keys(f"/{cluster}/jobs/").get(f"/{cluster}/jobs/{job}")
            return row if row and row["job"]["state"] == state else None

        return lib.wait_for(look, 20, f"etcd knows that {job} is {state}")

    def put(self, key, value):
        code = lambda s: base64.b64encode(s.encode()).decode()
        self.ask("kv/put", {"key": code(key), "value": code(value)})

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        if self.process:
            self.go_on()
            self.process.kill()
            self.process.wait()
            self.process = None


class Node(lib.Daemon):
    """A daemon of a cluster; `main` is a storage that all nodes share."""

    def __init__(self, home, etcd, name, storages, args=(), ttl="2s", port=None, advertise=None, **kw):
        self.name, self.http = name, port or free_port()
        url, at = etcd if isinstance(etcd, str) else etcd.url, f"127.0.0.1:{self.http}"
        args = ["--cluster", url, "--node", name, "--advertise", advertise or at, "--listen", at, "--cluster-ttl", ttl, *args]
        super().__init__(home, storages, args, tcp=False, **kw)

    def nodes(self):
        return {n["name"]: n["state"] for n in self.api.get("/v1/nodes").ok(200)["nodes"]}

    def sees(self, **states):
        """The nodes, once they are in these states; a node that has joined then knows which of its copies it may name, too."""
        def seen():
            knows = states.get(self.name) != "joined" or self.api.get("/v1/state-dicts?replica_of=main:none").status == 200
            return (got := self.nodes()) == states and knows and got

        return lib.wait_for(seen, 20, f"{self.name} sees {states}, not {self.nodes()}")

    def warnings(self):
        return " ".join(self.api.get("/readyz").ok(200)["warnings"])
