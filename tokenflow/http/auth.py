"""Who asks: API keys, compared by their SHA-256 in constant time. Without any configured, everybody on loopback."""

from __future__ import annotations

import hmac
from hashlib import sha256

from quart import Request, g

from tokenflow.config.model import AuthConfig
from tokenflow.errors import Unauthorized

OPEN = frozenset({"/health/live", "/health/ready"})
NOBODY = "-"


def authenticate(request: Request, auth: AuthConfig) -> None:
    """Set `g.key` to the name of the request's key. Unauthorized if it has none that is let in."""
    g.key = NOBODY
    if not auth.keys or request.path in OPEN:
        return
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized("No API key given; send `Authorization: Bearer <key>`.", code="missing_api_key")
    digest = sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()
    names = [known.name for known in auth.keys if hmac.compare_digest(known.sha256.lower(), digest)]
    if not names:
        raise Unauthorized("Incorrect API key provided.")
    g.key = names[0]
