"""The one error envelope, and what HTTP says beside it."""

from __future__ import annotations

import math
from typing import Any

from tokenflow.errors import TokenflowError

MAX_MESSAGE_CHARS = 4000
"""An error is one line of at most 64 kB in a stream; an engine's own message may be anything."""


def envelope(error: TokenflowError) -> dict[str, Any]:
    """`{"error":{"message","type","param","code"}}`, and beside them what the error counts, where it does."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code} | error.details}


def error_status(error: TokenflowError) -> int:
    """The HTTP status."""
    return error.status_hint


def error_headers(error: TokenflowError) -> dict[str, str]:
    """`Retry-After` where waiting helps: whole seconds, at least one (RFC 9110 section 10.2.3)."""
    if error.status_hint == 401:
        return {"WWW-Authenticate": "Bearer"}  # RFC 9110 section 15.5.2
    seconds = error.retry_after_s
    if seconds is None:
        if error.status_hint not in (429, 503):
            return {}
        seconds = 1.0
    if not math.isfinite(seconds):
        seconds = 60.0
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
