"""What a receiver of webhooks needs (api/chains.md)."""
from __future__ import annotations

import hashlib
import hmac
import time
from typing import Union


def verify_webhook(body: bytes, header: str, secret: Union[bytes, str], tolerance: float = 300) -> bool:
    """Was this body sent by a dcpd that has the secret, at most `tolerance` seconds ago (or ahead)?

    body: the request's, byte for byte. header: its `Dcpd-Signature`. The comparison takes the same time whatever differs. Whoever keeps
    the ids (`Dcpd-Delivery`) of a day knows in addition what came before.
    """
    key = secret.encode() if isinstance(secret, str) else bytes(secret)
    parts = dict(p.strip().split("=", 1) for p in (header or "").split(",") if "=" in p)
    t, given = parts.get("t", ""), parts.get("v1", "")
    if not (t.isascii() and t.isdigit() and len(t) <= 15) or not given.isascii():
        return False
    good = hmac.compare_digest(hmac.new(key, t.encode() + b"." + body, hashlib.sha256).hexdigest(), given)
    return good and abs(time.time() - int(t)) <= tolerance
