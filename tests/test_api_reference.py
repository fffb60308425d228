"""The reference of the API names what there is: every route, every error's code, every request field, every metric."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tokenflow_prometheus.sink import PrometheusSink

from tokenflow.api import CAPABILITIES, Gauges
from tokenflow.config import Config
from tokenflow.dialects import openai_chat, openai_completions
from tokenflow.errors import ConfigError, EngineLost, PluginError, StartupError, TokenflowError
from tokenflow.http.app import create_app
from tokenflow.service.feeds import Feeds
from tokenflow.service.service import Service

REFERENCE = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"[a-z_]+", REFERENCE))
OPERATORS = (StartupError, ConfigError, PluginError, EngineLost)
"""No client meets these."""


def errors(base: type[TokenflowError]) -> Iterator[type[TokenflowError]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__ == base.__module__:
            yield from errors(kind)


def test_every_route() -> None:
    config = Config()
    app = create_app(Service(replace(config, server=replace(config.server, debug=True)), {}, Feeds({})))
    routes = {re.sub("<(path:)?id>", "{id}", rule.rule) for rule in app.url_map.iter_rules()}
    assert [route for route in sorted(routes) if not re.search(f"[ `]{re.escape(route)}`", REFERENCE)] == []


def test_every_code() -> None:
    codes = {kind.code for kind in errors(TokenflowError) if kind not in OPERATORS}
    assert sorted(codes - WORDS) == []


class Watched(dict[str, object]):
    """A body that knows what it was asked for."""

    def __init__(self, **fields: object) -> None:
        super().__init__(fields)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.asked.add(key)
        return super().get(key, default)


def test_every_field() -> None:
    chat, plain = Watched(messages=[{"role": "user", "content": "hi"}]), Watched(prompt="hi")
    openai_chat.parse(chat)
    openai_completions.parse(plain)
    assert sorted((chat.asked | plain.asked) - WORDS - {""}) == []


def test_every_capability() -> None:
    assert sorted(CAPABILITIES - WORDS) == []


def test_every_metric() -> None:
    page = PrometheusSink().expose(Gauges(models=(), sink_events_dropped=0)).body.decode()
    names = set(re.findall(r"^# TYPE tokenflow_(\w+)", page, re.MULTILINE))
    assert sorted(names - WORDS) == []
