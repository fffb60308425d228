"""`GET /stream` where a browser can only wait: it gives up for good on any status but 200."""

from __future__ import annotations

from trio.testing import MockClock, wait_all_tasks_blocked

from tests.service.conftest import open_rig
from tokenflow.http.app import create_app


async def test_an_engine_that_restarts_is_waited_for(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        client = create_app(r.service).test_client()
        model = r.service.model("m")
        model.host.fail(model.engine, "it is given up")
        await wait_all_tasks_blocked()
        answer = await client.get("/stream?prompt=hello")
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        event, retry, data, *_ = (await answer.get_data(as_text=True)).split("\n")
        assert (event, retry) == ("event: error", "retry: 1000") and '"code":"engine_unavailable"' in data
        assert (await client.post("/generate", json={"prompt": "hello"})).status_code == 503
        assert (await client.get("/stream?prompt=hello&model=nothing")).status_code == 404, "waiting would not help"


async def test_what_is_in_the_query_twice_is_refused(autojump_clock: MockClock) -> None:
    async with open_rig() as r:
        answer = await create_app(r.service).test_client().get("/stream?prompt=hello&stop=a&stop=b")
        assert (answer.status_code, (await answer.get_json())["error"]["param"]) == (400, "stop")
