"""What the network's and HTTP's own words mean: headers, an error's body, and why nobody could be reached."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.request import getproxies, proxy_bypass

import httpx2
import trio

from tokenflow.client.errors import Unreachable
from tokenflow.core.hosts import is_loopback

REFUSAL_BYTES = 65_536
_OTHER_NAME, _OTHER_TIME = (62, 64), (9, 10)
"""OpenSSL's X509_V_ERR_…: HOSTNAME_MISMATCH, IP_ADDRESS_MISMATCH; CERT_NOT_YET_VALID, CERT_HAS_EXPIRED."""
_USERINFO = re.compile(r"(?:(?<=://)|^)[^/@]*@")
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


def network(url: str, limits: httpx2.Limits) -> httpx2.AsyncBaseTransport | None:
    """How this machine is asked: no proxy is in between, whatever the environment says. None: another machine.

    Raises as httpx2 does.
    """
    return httpx2.AsyncHTTPTransport(limits=limits) if is_loopback(httpx2.URL(url).host) else None


def proxy_for(url: str) -> str:
    """The proxy that the environment has for a URL, in words; empty: none."""
    try:
        asked = httpx2.URL(url)
    except httpx2.InvalidURL:
        return ""
    proxies = getproxies()
    name = next((name for name in (asked.scheme, "all") if proxies.get(name)), None)
    if name is None or is_loopback(asked.host) or proxy_bypass(asked.host):
        return ""
    return f"{_USERINFO.sub('', proxies[name])} ({name}_proxy)"


def unreachable(exc: Exception, url: str, proxy: str = "") -> Unreachable:
    """Why no request got through, in a line for people, with the way out where it is known here."""
    url = url.rstrip("/")
    if isinstance(exc, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
        return Unreachable(f"{url!r} is no URL ({exc}); write one like http://127.0.0.1:8000")
    if proxy and isinstance(exc, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        cause = _cause(exc)
        if not isinstance(cause, ssl.SSLError):
            why = _in_words(exc, cause) or "no answer in time"
            way_out = "if it can be reached without, name its host in no_proxy"
            return Unreachable(f"no way to {url} through the proxy {proxy}: {why}; {way_out}")
    if isinstance(exc, httpx2.TimeoutException):
        return Unreachable(f"{url} did not answer in time")
    cause = _cause(exc)
    if isinstance(cause, ssl.SSLError):
        return Unreachable(_no_tls(cause, url))
    if isinstance(cause, socket.gaierror | socket.herror):
        return Unreachable(f"cannot find the host of {url}: {cause.strerror}; look at its name, and at the network")
    why = _in_words(exc, cause)
    if isinstance(exc, httpx2.ConnectError):
        return Unreachable(f"cannot reach {url}: {why}")
    way_out = "; if it serves TLS, write https://" if url.startswith("http://") else ""
    return Unreachable(f"the connection to {url} broke: {why}{way_out}")


def _in_words(exc: Exception, cause: OSError | None) -> str:
    if cause is None:
        return str(exc).rstrip(".")
    # Trio puts the address in front of strerror.
    return str(cause.strerror) if isinstance(cause, socket.gaierror) else os.strerror(cause.errno or 0)


def untrusting(exc: OSError) -> Unreachable:
    """Why the certificates that the environment names cannot be had, in a line for people."""
    name = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), "SSL_CERT_FILE")
    why = "it holds no certificate" if isinstance(exc, ssl.SSLError) else exc.strerror or exc
    return Unreachable(f"{name}={os.environ.get(name, '')} cannot be used: {why}; name a PEM file, or unset it")


def _no_tls(exc: ssl.SSLError, url: str) -> str:
    """The number of such an error is OpenSSL's own, whatever the system calls it by."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        # Where the system verifies, as on macOS, the code is its own.
        why, code = str(getattr(exc, "verify_message", None) or exc).rstrip("."), getattr(exc, "verify_code", None)
        if code in _OTHER_NAME:
            return f"the certificate of {url} is for another name: {why}; use a URL with a name that it has"
        if code in _OTHER_TIME:
            return f"the certificate of {url} is not trusted: {why}; renew it, or set the clock"
        return f"the certificate of {url} is not trusted: {why}; if you do trust it, set SSL_CERT_FILE=its.pem"
    reason = getattr(exc, "reason", None)
    why = reason.replace("_", " ").lower() if reason else str(exc)
    return f"no TLS connection to {url}: {why}; if it serves none, write http://"


def _cause(exc: BaseException) -> OSError | None:
    """The system's own error at the bottom of one; libraries on the way only say that they failed."""
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, ssl.SSLError) or (isinstance(inner, OSError) and inner.errno):
            return inner
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner.__cause__ or inner.__context__
    return None
