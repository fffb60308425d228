"""The page at `/`, as it is handed out. What it does is tried in a real browser, in `tests/e2e/test_page.py`."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256

from quart import typing

from tokenflow.config import Config
from tokenflow.config.model import AuthConfig, HttpConfig, KeyConfig
from tokenflow.http.app import create_app
from tokenflow.http.routes.page import FILE
from tokenflow.service.feeds import Feeds
from tokenflow.service.service import Service

KEYS = AuthConfig(keys=(KeyConfig(name="reader", sha256="0" * 64),))


def client(http: HttpConfig | None = None, auth: AuthConfig | None = None) -> typing.TestClientProtocol:
    config = replace(Config(), http=http or HttpConfig(), auth=auth or AuthConfig())
    return create_app(Service(config, {}, Feeds({}))).test_client()


async def test_it_is_handed_out_whole_to_get_and_to_head() -> None:
    for auth in (AuthConfig(), KEYS):
        got = await client(auth=auth).get("/")
        assert (got.status_code, await got.get_data()) == (200, FILE.read_bytes())
        assert got.headers["Content-Type"] == "text/html; charset=utf-8"
        assert got.headers["Cache-Control"] == "no-cache"
        assert got.headers["Referrer-Policy"] == "no-referrer"
        assert got.headers["X-Content-Type-Options"] == "nosniff"
        head = await client(auth=auth).head("/")
        assert head.status_code == 200
        assert dict(head.headers) == dict(got.headers)


async def test_it_may_ask_nobody_else_and_run_nothing_but_its_own() -> None:
    page = FILE.read_text(encoding="utf-8")
    policy = dict(
        part.split(" ", 1) for part in (await client().get("/")).headers["Content-Security-Policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        [inside] = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"
    assert not re.search(r"innerHTML|\son\w+=|\bstyle=|https?://(?!www\.w3\.org/2000/svg')", page)


async def test_what_has_not_changed_is_not_sent_again() -> None:
    known = (await client().get("/")).headers["ETag"]
    again = await client().get("/", headers={"If-None-Match": known})
    assert (again.status_code, await again.get_data()) == (304, b"")
    assert (await client().get("/", headers={"If-None-Match": '"another"'})).status_code == 200


async def test_it_keeps_the_rules_of_every_route() -> None:
    for headers, status in [({"Host": "rebound.example.org"}, 421), ({"Sec-Fetch-Site": "cross-site"}, 403)]:
        assert (await client().get("/", headers=headers)).status_code == status
    assert (await client().post("/")).status_code == 405
    assert (await client(auth=KEYS).get("/v1/models")).status_code == 401


async def test_turned_off_it_is_not_there() -> None:
    answer = await client(HttpConfig(page=False)).get("/")
    assert (answer.status_code, (await answer.get_json())["error"]["code"]) == (404, "not_found")
    assert (await client(HttpConfig(page=False), KEYS).get("/")).status_code == 401
