"""How much clients may take, and the count of those who wanted more."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Beyond each a client is told so, where the protocol has a way, and the rest of the server does not notice."""

    max_connections: int = 4096
    """Open at once; one more is a 503."""
    max_connections_per_address: int | None = None
    """Of these, from one address; one more is a 429."""
    header_timeout_s: float = 20.0
    """A request's head that is not whole by then is a 408; from its first byte, or from the connection's beginning."""
    max_header_bytes: int = 16 * 1024
    """Longer headers are a 431."""
    max_headers: int = 100
    """More of them are a 431."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Nobody is asked to go on with a longer one: the application, which reads bodies, has a 413 for it."""
    max_pipelined_bytes: int = 64 * 1024
    """Sent ahead of the answer to the request before. Beyond, the connection is cut: there is no way to say so."""
    max_streams: int = 100
    """At once on one HTTP/2 connection; one more is refused alone."""
    max_resets: int = 1000
    """Streams that a client may open and reset on one HTTP/2 connection within `RESETS_WITHIN_S`; then it is closed."""


RESETS_WITHIN_S = 10.0

BY_STATUS = {
    400: "malformed",
    408: "header_timeout",
    421: "host",
    431: "headers",
    501: "method",
}
"""Why a request was refused, by the status that says so."""
REASONS = (
    *BY_STATUS.values(),
    *("connections", "address", "pipelined", "streams", "resets"),
    *("body", "body_timeout"),  # counted by the application, which reads bodies
    *("queue_full", "replay_full", "draining", "invalid_api_key"),  # and its errors' codes, of which these are watched
)


@dataclass(slots=True)
class Traffic:
    """What goes on, for whoever watches."""

    connections: int = 0
    """Open now."""
    refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    """By reason, since the start."""
