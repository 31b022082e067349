"""HTTP to one daemon, over its Unix socket or TCP, by http.client.

A connection belongs to one thread of one process: a fork after `connect` just makes a new one, and background threads never wait for
each other. A connection that broke is made again, and the request sent again if it may be: GET, and what the API says is idempotent
(seal, reserve and release of one generation, a POST with an Idempotency-Key). So a restart of the daemon is a pause, not an error. So is
`busy`, by which a daemon says that it has begun nothing: any request is sent again then, for as long.
"""
from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.parse
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

from . import errors

RECONNECT_SECONDS = 20.0  # a daemon that we knew is given so long to come back


class Endpoint(NamedTuple):
    """Where a daemon listens: `unix` is a socket's path, else scheme, host and port."""

    unix: Optional[str]
    scheme: str = "http"
    host: str = "localhost"
    port: int = 0

    def __str__(self) -> str:
        return f"unix://{self.unix}" if self.unix else f"{self.scheme}://{self.host}:{self.port}"


def parse_url(url: str) -> Endpoint:
    """`http://host:port`, `https://…`, `unix:///path` or a bare absolute path."""
    if url.startswith("/"):
        return Endpoint(url)
    p = urllib.parse.urlsplit(url)
    if p.scheme == "unix":
        path = (p.netloc or "") + p.path
        if not path.startswith("/"):
            raise errors.RequestRefused(f"{url!r}: a Unix socket needs an absolute path, unix:///path/to/dcpd.sock")
        return Endpoint(path)
    if p.scheme not in ("http", "https") or not p.hostname:
        raise errors.RequestRefused(f"{url!r} is no address of a daemon: http://host:port or unix:///path")
    return Endpoint(None, p.scheme, p.hostname, p.port or (443 if p.scheme == "https" else 80))


def default_endpoints(environ: Optional[Mapping[str, str]] = None) -> List[Endpoint]:
    """Where a daemon may be, in the order of the manual: DCPD_URL alone, else the user's socket, then the system's."""
    env = os.environ if environ is None else environ
    if env.get("DCPD_URL"):
        return [parse_url(env["DCPD_URL"])]
    out = []
    state = env.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local/state")
    out.append(Endpoint(os.path.join(state, "dcpd", "dcpd.sock")))
    if os.geteuid() == 0:
        out.append(Endpoint("/var/lib/dcpd/dcpd.sock"))
    out.append(Endpoint("/run/dcpd/dcpd.sock"))
    return out


def default_token(environ: Optional[Mapping[str, str]] = None) -> Optional[str]:
    """DCPD_TOKEN, or what is in the file DCPD_TOKEN_FILE."""
    env = os.environ if environ is None else environ
    if env.get("DCPD_TOKEN"):
        return env["DCPD_TOKEN"]
    if env.get("DCPD_TOKEN_FILE"):
        try:
            with open(env["DCPD_TOKEN_FILE"], encoding="ascii") as f:
                return f.read().strip()
        except OSError as e:
            raise errors.NoDaemon(f"DCPD_TOKEN_FILE={env['DCPD_TOKEN_FILE']}: {e.strerror}") from e
    return None


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


def _unix_connection(path: str, timeout: float) -> Any:
    from http.client import HTTPConnection

    class UnixConnection(HTTPConnection):
        def connect(self) -> None:
            s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                s.settimeout(self.timeout)
                s.connect(path)
            except BaseException:
                s.close()
                raise
            self.sock = s

    return UnixConnection("localhost", timeout=timeout)


class Transport:
    """Requests to one daemon.

    timeout: seconds for one answer, beyond what a long poll asks for. Raises `NoDaemon` when nothing answers the first time,
    `ConnectionLost` when a daemon that answered before stays away, and the class of `errors` that fits a problem+json.
    """

    def __init__(self, endpoint: Endpoint, token: Optional[str] = None, timeout: float = 60.0,
                 reconnect: float = RECONNECT_SECONDS) -> None:
        self.endpoint, self.token, self.timeout, self.reconnect = endpoint, token, timeout, reconnect
        self.known = False
        self._local = threading.local()

    # a Transport travels to another process without its sockets
    def __getstate__(self) -> Dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_local"}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    def _connection(self, timeout: float) -> Any:
        c = getattr(self._local, "connection", None)
        if c is not None and getattr(self._local, "pid", 0) != os.getpid():
            c = None  # the parent's: it is left alone, not closed
        if c is None:
            if self.endpoint.unix:
                c = _unix_connection(self.endpoint.unix, timeout)
            else:
                import http.client
                cls = http.client.HTTPSConnection if self.endpoint.scheme == "https" else http.client.HTTPConnection
                c = cls(self.endpoint.host, self.endpoint.port, timeout=timeout)
            self._local.connection, self._local.pid = c, os.getpid()
        c.timeout = timeout
        if c.sock is not None:
            c.sock.settimeout(timeout)
        return c

    def close(self) -> None:
        """Closes this thread's connection; the next request makes a new one."""
        c = getattr(self._local, "connection", None)
        if c is not None and getattr(self._local, "pid", 0) == os.getpid():
            c.close()
        self._local.connection = None

    def _once(self, method: str, path: str, body: Optional[bytes], headers: Mapping[str, str], timeout: float) -> Answer:
        c = self._connection(timeout)
        try:
            c.request(method, path, body=body, headers=dict(headers))
            r = c.getresponse()
            data = r.read()
        except BaseException:
            self.close()  # also after a KeyboardInterrupt: half an answer may be in the pipe
            raise
        if r.will_close:
            self.close()
        return Answer(r.status, {k.lower(): v for k, v in r.getheaders()}, data)

    def raw(self, method: str, path: str, body: Any = None, *, headers: Optional[Mapping[str, str]] = None,
            idempotent: Optional[bool] = None, timeout: Optional[float] = None) -> Answer:
        """One request; the answer whatever its status. body: an object for JSON, or None."""
        from http.client import HTTPException

        h = dict(headers or {})
        if self.token:
            h["Authorization"] = "Bearer " + self.token
        data: Optional[bytes] = None
        if body is not None:
            data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
            h["Content-Type"] = "application/json"
        again = idempotent if idempotent is not None else method == "GET" or "Idempotency-Key" in h
        end: Optional[float] = None
        busy_end: Optional[float] = None
        pause, first = 0.02, True
        while True:
            fresh = getattr(self._local, "connection", None) is None or getattr(self._local, "pid", 0) != os.getpid()
            try:
                answer = self._once(method, path, data, h, timeout or self.timeout)
                self.known = True
                if answer.status != 503 or b'"code":"busy"' not in answer.body:
                    return answer
                busy_end = busy_end or time.monotonic() + self.reconnect
                if time.monotonic() > busy_end:
                    return answer
                time.sleep(pause)
                pause = min(pause * 2, 0.5)
            except socket.timeout as e:
                raise errors.ConnectionLost(f"{self.endpoint}: no answer within {timeout or self.timeout:g} s ({method} {path})",
                                            retryable=True) from e
            except (OSError, HTTPException) as e:
                refused = isinstance(e, (FileNotFoundError, ConnectionRefusedError, PermissionError))  # nothing was sent
                stale = first and not fresh and not isinstance(e, socket.timeout)
                if not self.known or (isinstance(e, PermissionError) and end is not None):  # it may be about to be granted, once
                    raise _no_daemon(self.endpoint, e) from e
                if not (again or refused or (stale and isinstance(e, (BrokenPipeError,)))):
                    raise errors.ConnectionLost(f"{self.endpoint}: the connection broke in {method} {path}: {e}",
                                                retryable=True) from e
                end = end or time.monotonic() + self.reconnect
                if time.monotonic() > end:
                    raise errors.ConnectionLost(f"{self.endpoint}: the daemon is gone, and did not come back within "
                                                f"{self.reconnect:g} s: {e}", retryable=True) from e
                if not (first and stale):
                    time.sleep(pause)
                    pause = min(pause * 2, 0.5)
                first = False

    def request(self, method: str, path: str, body: Any = None, **kw: Any) -> Any:
        """The decoded JSON of a good answer, None if it is empty; raises for any other."""
        what = f"{self.endpoint} {method} {path}"
        try:
            return checked(self.raw(method, path, body, **kw), what).json
        except ValueError as e:
            if isinstance(e, errors.DcpdError):
                raise
            raise errors.ProtocolMismatch(f"{what}: the answer is not JSON; is it a dcpd?") from e

    def __repr__(self) -> str:
        return f"<Transport {self.endpoint}>"


def checked(a: Answer, what: str) -> Answer:
    """The answer, if its status is 2xx; else the exception that fits."""
    if 200 <= a.status < 300:
        return a
    if "json" in a.headers.get("content-type", ""):
        try:
            problem = a.json
        except ValueError:
            problem = None
        if isinstance(problem, dict) and "code" in problem:
            raise errors.from_problem(problem)
    raise errors.ProtocolMismatch(f"{what}: HTTP {a.status} without a problem that this client understands; is it a dcpd?")


def _no_daemon(endpoint: Endpoint, e: BaseException) -> errors.DcpdError:
    if isinstance(e, PermissionError):
        return errors.Forbidden(f"{endpoint}: no permission; you must be in the group that dcpd's --allow-group names, "
                                "or be the user that dcpd runs as")
    return errors.NoDaemon(f"no dcpd at {endpoint} ({getattr(e, 'strerror', None) or e}). Start one with `dcpd --storage "
                           "main=/some/dir`, or set DCPD_URL to where it is; `python -m dcpd doctor` helps")


def quote(name: Union[str, int]) -> str:
    return urllib.parse.quote(str(name), safe="")


def query(path: str, **params: Any) -> str:
    """`path?…` with the parameters that are not None."""
    pairs: List[Tuple[str, str]] = [(k, ("true" if v else "false") if isinstance(v, bool) else str(v))
                                    for k, v in params.items() if v is not None]
    return path + ("?" + urllib.parse.urlencode(pairs, quote_via=urllib.parse.quote) if pairs else "")
