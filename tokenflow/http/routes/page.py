"""`GET /`: a page to talk to the models with, for people. One file, which asks nobody but this server.

It may run its own script and style, told by their hashes, and nothing that a model's answer could bring: the browser
itself refuses scripts in markup, and that anything but text is put into the page.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from quart import Response, request
from quart.typing import ResponseTypes
from quart_trio import QuartTrio

FILE = Path(__file__).parents[1] / "page.html"
ENDPOINT = "page"
"""It needs no key: it has nothing to tell, and asks for one."""


def register(app: QuartTrio) -> None:
    page = FILE.read_bytes()
    headers = {
        "Content-Security-Policy": _policy(page),
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-cache",
        "ETag": f'"{sha256(page).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @app.get("/", endpoint=ENDPOINT)
    async def index() -> ResponseTypes:
        return await Response(page, headers=headers).make_conditional(request)


def _policy(page: bytes) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(page, b'script')}",
            f"style-src {_hash(page, b'style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    )


def _hash(page: bytes, tag: bytes) -> str:
    """What CSP allows the page's one element of that name by: the hash of all that is in it."""
    [inside] = re.findall(rb"<%b\b[^>]*>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inside).digest()).decode()}'"
