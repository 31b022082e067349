"""The daemon that a call without a client uses: the one that dcpd.local() made the default, else the one that is found."""
from __future__ import annotations

import atexit
import os
from typing import Dict, List, Optional, Tuple

from ._http import Transport, default_token, parse_url
from .client import Client, connect

_default: Optional[Tuple[int, Tuple[Optional[str], ...], Client]] = None
_clients: Dict[Tuple[int, str, Optional[str]], Client] = {}
_stack: List[Client] = []  # daemons that dcpd.local() made the default


def default_client() -> Client:
    """The client that calls without one use: what dcpd.local() started, else the daemon that is found. Looked for once per process
    and environment; a failure is not remembered."""
    global _default
    if _stack:
        return _stack[-1]
    env = tuple(os.environ.get(k) for k in ("DCPD_URL", "DCPD_TOKEN", "DCPD_TOKEN_FILE", "XDG_STATE_HOME", "HOME"))
    if _default is None or _default[:2] != (os.getpid(), env):
        _default = (os.getpid(), env, connect())
    return _default[2]


def forget() -> None:
    global _default
    _default = None


@atexit.register
def _exit() -> None:
    if _default is not None and _default[0] == os.getpid():
        _default[2].close()


def client_at(url: str) -> Client:
    """A client of the daemon that rank 0 has found; the same one each time."""
    key = (os.getpid(), url, default_token())
    found = _clients.get(key)
    if found is None:
        t = Transport(parse_url(url), key[2])
        t.known = True  # rank 0 has met it: if it does not answer now, it is being restarted
        found = _clients[key] = Client(t).check()
    return found
