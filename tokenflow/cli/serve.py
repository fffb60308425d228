"""`tokenflow serve`."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import click
import trio

from tokenflow.cli.logs import log_level_option, start_logging
from tokenflow.cli.options import config_options, open_config
from tokenflow.config import Config, Flag


@click.command("serve")
@config_options
@click.option("--host", help="Address to listen on; server.host.")
@click.option("--port", type=int, help="Port to listen on, 0 for any free one; server.port.")
@log_level_option
def serve_command(path: Path | None, sets: tuple[str, ...], host: str | None, port: int | None, log_level: str) -> None:
    """Serve the configured models over HTTP until a signal ends it.

    SIGTERM and SIGINT let live streams end, for server.drain_s; a second one does not.
    """
    start_logging(log_level)
    flags = {"server.host": Flag("--host", host), "server.port": Flag("--port", port)}
    given = {key: flag for key, flag in flags.items() if flag.value is not None}
    loaded, registry = open_config(path, sets, given)
    from tokenflow.http.serve import run  # here, so that the other commands start without the web framework

    trio.run(partial(run, loaded.config, registry, on_ready=partial(announce, loaded.config)))


GC_THRESHOLDS = (25_000, 0, 30)
"""Connections leave no cycles behind (the tests count them), so collecting seldom costs no memory. With Python's own
thresholds, collections that find nothing take a third of what opening a stream costs. What has survived two is old:
each pass over the young is a pause for every stream, and thousands of idle connections are young for ever."""


def announce(config: Config, url: str, chats: bool) -> None:
    """Say where the server is and how to try it; the last thing before it serves."""
    gc.collect()
    gc.freeze()  # what is here now stays: no collection need look at it again
    gc.set_threshold(*GC_THRESHOLDS)
    models = ", ".join(config.models)
    click.echo(f"Serving {models} on {url}\nTry it:\n  {curl_line(config, url, chats)}")
    if chats:
        click.echo(f"or: tokenflow chat --url {url}")


def curl_line(config: Config, url: str, chats: bool) -> str:
    """A line to paste into a shell that streams from the first model."""
    model = next(iter(config.models))
    body = {"model": model, "stream": True, "temperature": 0, "max_tokens": 64}
    body |= {"messages": [{"role": "user", "content": "Say hello."}]} if chats else {"prompt": "Once upon a time"}
    route = "/v1/chat/completions" if chats else "/v1/completions"
    quoted = json.dumps(body).replace("'", "\\u0027")  # a quote in a model's id would end the shell's string
    key = '-H "Authorization: Bearer $TOKENFLOW_KEY" ' if config.auth.keys else ""
    return f"curl -N {url}{route} {key}-H 'Content-Type: application/json' -d '{quoted}'"
