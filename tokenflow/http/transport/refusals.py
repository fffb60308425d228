"""Requests that no application should see, whatever the protocol that brought them."""

import re
from collections.abc import Sequence
from ipaddress import IPv6Address

from .limits import Limits

# RFC 9112 section 3.2. Any other target, `?a=1` for one, gives the application a path that it cannot split.
_TARGET = re.compile(rb"/|https?://[^/?#]+/", re.IGNORECASE)
# RFC 3986 section 3.2.2, in the part that names hosts of the Internet: an address in brackets, or labels as DNS has
# them. Whatever is none may be another host to whoever reads it next, a proxy or a URL parser; and an application that
# looks it up may fail on its labels.
_LABEL = rb"[A-Za-z0-9_~!$&'()*+,;=-]{1,63}"
_AUTHORITY = re.compile(rb"(?:\[([0-9A-Fa-f:.]{2,45})\]|(%b(?:\.%b)*\.?))(?::[0-9]{0,5})?" % (_LABEL, _LABEL))
_OF_TOKENS = (b"connection", b"upgrade", b"sec-websocket-")

MESSAGES = {
    400: "The request is not valid HTTP, or frames its body in two ways, or its target is no path in percent-encoding.",
    408: "The request's headers did not come in time.",
    421: "The Host header is not a host, with or without a port.",
    431: "The request's headers are too long, or too many.",
    501: "Not served: CONNECT for anything but WebSocket (RFC 8441), or a transfer coding other than chunked.",
}


def host_name(authority: bytes) -> str | None:
    """The host of a host with or without a port, in small letters and without brackets; None: it is none."""
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return None
    address, name = found.groups()
    if name is not None:
        return str(name.lower(), "ascii")
    try:
        return str(IPv6Address(str(address, "ascii")))
    except ValueError:
        return None


def refusal(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> int | None:
    """The status with which to refuse a request; None: the application shall have it. Names are in small letters."""
    names = {name for name, _ in headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        return 400  # RFC 9112 section 6.3: request smuggling
    if not (method.isascii() and target.isascii()):
        return 400
    if not _TARGET.match(target) and (method, target) != (b"OPTIONS", b"*"):
        return 400
    if any(name == b"host" and value and host_name(value) is None for name, value in headers):
        return 421
    if any(name.startswith(_OF_TOKENS) and not value.isascii() for name, value in headers):
        return 400  # RFC 6455 section 4.1: tokens; Hypercorn's reader of them knows nothing else
    # The libraries look at the length of what is incomplete, so they let through what arrives in one piece.
    if len(headers) > limits.max_headers or sum(len(n) + len(v) for n, v in headers) > limits.max_header_bytes:
        return 431
    return None
