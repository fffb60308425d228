"""Which web pages may use this server, and what their browsers are told.

Without keys whoever reaches the port is let in, and a browser on this machine reaches it for any page in the world. So
there a request must be for a name of this machine (any name can be made to point here: DNS rebinding), and what a page
asks for must come from a page of such a name, or from an origin that the configuration names. With keys there is
nothing to check: no page has one that was not given to it.

A browser lets a page of another origin read an answer only if the answer says so (CORS, in the Fetch standard). It does
for the origins that the configuration names, also where it refuses, or the page could not tell why. Cookies and their
like mean nothing here, so credentials are never allowed.
"""

from __future__ import annotations

from functools import lru_cache, partial

from werkzeug.datastructures import Headers

from tokenflow.config import HttpConfig
from tokenflow.core.hosts import is_loopback
from tokenflow.errors import Forbidden, Misdirected
from tokenflow.http.transport import host_name

EXPOSED = "X-Request-Id, Retry-After"
"""What a page may read beside the few headers that it always may."""
PREFLIGHT_S = 600
"""For how long a browser may remember an answer to a preflight."""


class Pages:
    """Who may ask, by the headers that browsers send and pages cannot forge.

    Args:
        config: the names and origins beside this machine's own.
        open_to_all: there are no keys.
    """

    def __init__(self, config: HttpConfig, *, open_to_all: bool) -> None:
        self._is_ours = lru_cache(maxsize=256)(partial(_is_of, frozenset(host.lower() for host in config.hosts)))
        self._origins = frozenset(config.cors_origins)
        self._open_to_all = open_to_all

    def check(self, headers: Headers) -> None:
        """Refuse what a page may not ask for.

        Raises:
            Misdirected: the request is for a name that is not this server's.
            Forbidden: the page is somebody else's.
        """
        if not self._open_to_all:
            return
        host = headers.get("Host")
        if host and not self._is_ours(host):  # without one it is HTTP/1.0, which no browser speaks
            raise Misdirected(
                f"Without API keys only requests for this machine by its own name are served, not for {host[:100]!r}; "
                "a name that a proxy serves goes into the configuration's http.hosts."
            )
        origin = headers.get("Origin")
        if origin is None:  # nothing that a page asked for by itself; but a picture's address could make us work
            ours = headers.get("Sec-Fetch-Site") != "cross-site"
        else:
            scheme, _, whose = origin.partition("://")  # RFC 6454 section 6.2: and that is all of it
            ours = (bool(scheme) and self._is_ours(whose)) or self._may_read(origin)
        if not ours:
            raise Forbidden(
                "Without API keys only pages of this machine are served; others go into http.cors_origins.",
                code="origin_not_allowed",
            )

    def cors(self, headers: Headers) -> dict[str, str]:
        """What an answer says to the browser of a page that has asked with `headers`."""
        if not self._origins:
            return {}
        origin = headers.get("Origin")
        if origin is None or not self._may_read(origin):
            return {"Vary": "Origin"}
        return {"Vary": "Origin", "Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}

    def preflight(self, headers: Headers, methods: str) -> dict[str, str]:
        """The same for the question that comes before the request: may it be asked with these headers?"""
        answer = self.cors(headers)
        if "Access-Control-Allow-Origin" not in answer or "Access-Control-Request-Method" not in headers:
            return answer
        answer |= {"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": str(PREFLIGHT_S)}
        if asked := headers.get("Access-Control-Request-Headers"):
            answer["Access-Control-Allow-Headers"] = asked  # SDKs send a dozen of their own
        return answer

    def _may_read(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins


def _is_of(hosts: frozenset[str], authority: str) -> bool:
    """Whether `authority`, a host with or without a port, is this machine's, or one of `hosts`.

    By the name alone, never by whether `Origin` and `Host` are the same: those of a rebound name are.
    """
    name = host_name(authority.encode())
    return name is not None and (is_loopback(name) or name in hosts)
