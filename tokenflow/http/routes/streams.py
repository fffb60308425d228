"""Streams by id: look at one, read it (again), cancel it, hold it. And the browser's `GET /stream`, which comes back.

Somebody else's stream and one that never was are the same 404. A reader that already has everything gets 204, which
stops an `EventSource` for good.
"""

from __future__ import annotations

from quart import Response, after_this_request, g, request
from quart.typing import ResponseTypes
from quart_trio import QuartTrio

from tokenflow.dialects.small import SmallEncoder, parse_query
from tokenflow.dialects.streams import parse_after, parse_event_id, state_object
from tokenflow.errors import InvalidRequest, StreamNotFound, TokenflowError
from tokenflow.http.answers import answer, nothing
from tokenflow.http.events import HEADERS
from tokenflow.http.speak import CHAT, DIALECTS, NAMED, TOKENS, Dialect, as_events
from tokenflow.service.service import Service
from tokenflow.service.stream import Stream

BY_NAME = {"named": NAMED, "small": TOKENS}


def register(app: QuartTrio, service: Service) -> None:
    @app.get("/v1/streams")
    async def streams() -> Response:
        return answer({"object": "list", "data": [state_object(s.state) for s in service.streams(g.key)]})

    @app.get("/v1/streams/<id>")
    async def look(id: str) -> Response:
        stream = service.stream(id, g.key)
        accepts_events = any(
            kind.partition(";")[0].strip().lower() == "text/event-stream" and q > 0
            for kind, q in request.accept_mimetypes
        )
        reads = accepts_events or "Last-Event-ID" in request.headers
        if request.method == "HEAD" or not reads:
            return answer(state_object(stream.state))
        return _read_on(service, stream, _after(id), _dialect(stream))

    @app.delete("/v1/streams/<id>")
    async def cancel(id: str) -> Response:
        service.cancel(id, g.key)
        return nothing()

    @app.post("/v1/streams/<id>/pause")
    async def pause(id: str) -> Response:
        stream = service.stream(id, g.key)
        stream.pause()
        return answer(state_object(stream.state))

    @app.post("/v1/streams/<id>/resume")
    async def resume(id: str) -> Response:
        stream = service.stream(id, g.key)
        stream.resume()
        return answer(state_object(stream.state))

    @app.get("/stream")
    async def event_source() -> Response:
        return await _event_source(service)


async def _event_source(service: Service) -> Response:
    """A browser repeats its own URL: the id in its header says that it was here before."""
    if request.method == "HEAD":
        return Response(b"", headers=HEADERS)  # to look is not to generate
    last = request.headers.get("Last-Event-ID")
    if last:
        id, after = parse_event_id(last)
        return _read_on(service, service.stream(id, g.key), after, TOKENS)
    if twice := [name for name in request.args if len(request.args.getlist(name)) > 1]:
        raise InvalidRequest(f"'{twice[0]}' is in the query more than once.", param=twice[0])
    asked = parse_query(request.args)
    try:
        stream, reader = await service.open(asked, key=g.key, route="/stream")
    except InvalidRequest as exc:
        exc.param = exc.param and exc.param.removeprefix("stream_options.")  # in a query they stand by themselves
        raise
    except TokenflowError as exc:
        if exc.retry_after_s is None:
            raise
        # To come back later helps, and EventSource gives up for good on any status but 200.
        frame = SmallEncoder("", "", 0, False).failure(exc)

        @after_this_request
        async def say_so(refused: ResponseTypes) -> Response:
            return Response(frame, headers=HEADERS | {"X-Request-Id": refused.headers["X-Request-Id"]})

        raise
    return as_events(service, stream, reader, TOKENS, ids=asked.attendance.resumable)


def _read_on(service: Service, stream: Stream, after: int, dialect: Dialect) -> Response:
    if dialect is TOKENS and stream.asked.choices > 1:
        raise InvalidRequest("The small dialect has one choice, and this stream has more.", param="dialect")
    try:
        reader = stream.attach(after)
    except InvalidRequest as exc:
        if request.headers.get("Last-Event-ID"):  # which counts for more than the query
            exc.param = "Last-Event-ID"
        raise
    if reader.at_end:
        reader.close()
        return nothing()
    return as_events(service, stream, reader, dialect, ids=True)


def _after(id: str) -> int:
    """Where this reader was: `Last-Event-ID`, else `?after=`, else at the beginning."""
    last = request.headers.get("Last-Event-ID")
    if not last:
        return parse_after(request.args.get("after") or "0")
    whose, after = parse_event_id(last)
    if whose != id:
        raise StreamNotFound("The Last-Event-ID is another stream's.")
    return after


def _dialect(stream: Stream) -> Dialect:
    made_in = DIALECTS.get(stream.identity.route, CHAT)
    name = request.args.get("dialect") or made_in.name
    if name == made_in.name:
        return made_in
    if name == "openai":
        return CHAT
    if name not in BY_NAME:
        raise InvalidRequest(f"'dialect' is openai, named or small, not {name[:40]!r}.", param="dialect")
    return BY_NAME[name]
