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
