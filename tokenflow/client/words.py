"""What the network's and HTTP's own words mean: headers, an error's body, and why nobody could be reached."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx2
import trio

from tokenflow.client.errors import Unreachable

REFUSAL_BYTES = 65_536
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]{0,199}")


def id_of(text: str) -> str | None:
    """A stream's id, as long as it can stand in a path as it is."""
    return text if _ID.fullmatch(text) else None


def is_event_stream(headers: httpx2.Headers) -> bool:
    """And not compressed, which it was asked not to be."""
    plain = headers.get("Content-Encoding", "identity") == "identity"
    kind, _, _ = headers.get("Content-Type", "").partition(";")  # its charset means nothing: it is UTF-8
    return plain and kind.strip().lower() == "text/event-stream"


async def some_of(response: httpx2.Response) -> bytes:
    """The beginning of an error's body, as far as it comes."""
    content = b""
    with suppress(httpx2.RequestError):
        pieces = response.aiter_bytes()
        async for piece in pieces:
            content += piece
            if len(content) > REFUSAL_BYTES:
                await unwind(pieces)
                break
    return content


async def unwind(pieces: AsyncGenerator[bytes, None]) -> None:
    """Close a body's iterator for good.

    httpx2 2.16 iterates generators within generators, and closing the outermost leaves the inner ones to the garbage
    collector, which warns. A read that is cancelled at its first checkpoint ends all of them, and the connection.
    """
    with trio.CancelScope() as scope, suppress(httpx2.RequestError):
        scope.cancel()
        async for _ in pieces:
            pass


def retry_after_s(value: str | None, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float | None:
    """Seconds, from either form of the header (RFC 9110 section 10.2.3); None for none or nonsense."""
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, (parsedate_to_datetime(value) - now()).total_seconds())
    except (ValueError, TypeError):
        return None


def unreachable(exc: Exception, url: str) -> Unreachable:
    """Why no request got through, in a line for people."""
    url = url.rstrip("/")
    if isinstance(exc, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
        return Unreachable(f"{url!r} is no URL ({exc}); write one like http://127.0.0.1:8000")
    if isinstance(exc, httpx2.TimeoutException):
        return Unreachable(f"{url} did not answer in time")
    return Unreachable(f"cannot reach {url}: {_cause(exc)}")


def _cause(exc: BaseException) -> str:
    """The operating system's own words at the bottom of an error; libraries on the way only say that they failed."""
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno:
            # Trio puts the address in front of strerror; name resolution has numbers of its own, below 0.
            return os.strerror(inner.errno) if inner.errno > 0 else str(inner.strerror)
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner.__cause__ or inner.__context__
    return str(exc)
