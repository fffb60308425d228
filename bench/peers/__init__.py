"""What tokenflow is compared with: the least that a user of each Python stack would write to stream tokens.

    python -m bench.peers NAME PORT TOKENS_PER_S      (a number, `inf` for as fast as it can, 0 for none at all)

Each answers `POST /v1/chat/completions` with OpenAI's stream (a role, tokens, a finish, `[DONE]`), the chunks built as
a dict and encoded by orjson, token by token: the same bytes that tokenflow sends. Those with `/v1/ws` answer the first
frame with tokenflow's frames. That is all. They don't check what is asked (but for FastAPI, whose way it is to have a
model of the body), know no deadlines, limits, accounts or replay, and log nothing: less work than a server must do in
earnest. Their engine is a task on their own event loop, so they pay for no thread either: at each tick, as in a batch,
it hands every stream a token through a bounded queue.

    fastapi         FastAPI, a StreamingResponse over an async generator, on uvicorn (uvloop, httptools)
    sse_starlette   the same with its EventSourceResponse
    uvicorn         a bare ASGI application on uvicorn (uvloop, httptools)
    granian         the same application on granian, one worker (uvloop)
    quart_trio      Quart-Trio on Hypercorn's own Trio worker
"""
