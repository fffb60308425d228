"""Run one peer on a port, until it is ended."""

from __future__ import annotations

import os
import sys
from typing import Any

BACKLOG = 4096


def run_uvicorn(app: Any, port: int) -> None:
    import uvicorn

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", backlog=BACKLOG, log_level="warning", access_log=False)


def run_fastapi(port: int, tokens_per_s: float, *, sse_starlette: bool = False) -> None:
    from bench.peers import fastapi_app

    run_uvicorn(fastapi_app.create(tokens_per_s, sse_starlette=sse_starlette), port)


def run_bare(port: int, tokens_per_s: float) -> None:
    from bench.peers import bare_app

    run_uvicorn(bare_app.App(tokens_per_s), port)


def run_granian(port: int, tokens_per_s: float) -> None:
    from granian import Granian
    from granian.constants import Interfaces, Loops

    os.environ["TOKENS_PER_S"] = str(tokens_per_s)
    Granian(
        "bench.peers.bare_app:create",
        factory=True,
        port=port,
        interface=Interfaces.ASGI,
        loop=Loops.uvloop,
        backlog=BACKLOG,
        backpressure=2 * BACKLOG,
        log_enabled=False,
    ).serve()


def run_quart_trio(port: int, tokens_per_s: float) -> None:
    import trio
    from hypercorn.config import Config
    from hypercorn.trio import serve

    from bench.peers import quart_app

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog = BACKLOG
    trio.run(serve, quart_app.create(tokens_per_s), config)


PEERS = {
    "fastapi": run_fastapi,
    "sse_starlette": lambda port, tokens_per_s: run_fastapi(port, tokens_per_s, sse_starlette=True),
    "uvicorn": run_bare,
    "granian": run_granian,
    "quart_trio": run_quart_trio,
}

if __name__ == "__main__":
    name, port, tokens_per_s = sys.argv[1:]
    PEERS[name](int(port), float(tokens_per_s))
