"""What the application leaves out of Quart is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import iscoroutinefunction
from typing import Any

from tests.service.conftest import open_rig
from tokenflow.http.app import create_app
from tokenflow.http.framework import App


def functions(app: App) -> Iterator[Any]:
    """Everything of ours that Quart calls."""
    yield from app.view_functions.values()
    for by_blueprint in (
        *(app.before_request_funcs, app.after_request_funcs, app.teardown_request_funcs),
        *(app.before_websocket_funcs, app.after_websocket_funcs, app.teardown_websocket_funcs),
    ):
        for registered in by_blueprint.values():
            yield from registered
    for handlers in app.error_handler_spec.values():
        for by_class in handlers.values():
            yield from by_class.values()


async def test_no_handler_blocks() -> None:
    async with open_rig() as rig:
        found = list(functions(create_app(rig.service)))
        assert len(found) > 20
        assert [function for function in found if not iscoroutinefunction(function)] == []


async def test_a_path_spelled_like_a_rule_is_a_path() -> None:
    """Not the rule's own: what stands for the id is an id, and asked for again it still is."""
    async with open_rig() as rig:
        client = create_app(rig.service).test_client()
        for path in ("/v1/streams/<id>", "/v1/models/<path:id>", "/v1/models", "/v1/models"):
            for _ in range(2):
                answer = await client.get(path)
                assert answer.status_code == (200 if path == "/v1/models" else 404), path
