"""Who asks: API keys, compared by their SHA-256 in constant time. Without any configured, everybody on loopback.

A browser cannot set headers on a WebSocket, so there the key may also come as OpenAI's clients send it: as an offered
subprotocol, `openai-insecure-api-key.` and the key (percent-encoded, where it has characters that no token has). Not in
the URL: URLs are logged, by every proxy on the way.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from quart import Request, g
from quart.wrappers import Websocket

from tokenflow.config.model import AuthConfig
from tokenflow.errors import Unauthorized

OPEN = frozenset({"/health", "/health/live", "/health/ready"})
NOBODY = "-"
KEY_PROTOCOL = "openai-insecure-api-key."


def authenticate(request: Request, auth: AuthConfig) -> None:
    """Set `g.key` to the name of the request's key. Unauthorized if it has none that is let in."""
    g.key = NOBODY
    if not auth.keys or request.path in OPEN or request.method == "OPTIONS":
        return
    given = request.headers.get("Authorization", "")
    scheme, _, key = given.partition(" ")
    if scheme.lower() != "bearer" or not key:
        what = "The Authorization header has no `Bearer` before a key" if given else "No API key given"
        raise Unauthorized(f"{what}; send `Authorization: Bearer <key>`.", code="missing_api_key")
    g.key = _name(_sent(key), auth)


def websocket_key(websocket: Websocket, auth: AuthConfig) -> str:
    """The name of the WebSocket's key. Unauthorized if it has none that is let in."""
    if not auth.keys:
        return NOBODY
    scheme, _, key = websocket.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return _name(_sent(key), auth)
    for offered in websocket.requested_subprotocols:
        if offered.startswith(KEY_PROTOCOL):
            return _name(unquote_to_bytes(offered.removeprefix(KEY_PROTOCOL)), auth)
    raise Unauthorized(
        f"No API key given; send `Authorization: Bearer <key>`, or offer the subprotocol `{KEY_PROTOCOL}<key>`.",
        code="missing_api_key",
    )


def _sent(header: str) -> bytes:
    """A header's value as the client sent it: the framework takes each byte for a character."""
    return header.encode("latin-1")


def _name(key: bytes, auth: AuthConfig) -> str:
    digest = sha256(key.strip()).hexdigest()
    names = [known.name for known in auth.keys if hmac.compare_digest(known.sha256.lower(), digest)]
    if not names:
        raise Unauthorized("Incorrect API key provided.")
    return names[0]
