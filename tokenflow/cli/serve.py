"""`tokenflow serve`."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Set
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import click
import trio

from tokenflow.cli.logs import log_level_option, start_logging
from tokenflow.cli.options import config_options, open_config
from tokenflow.config import Config, Flag

log = logging.getLogger(__name__)


@click.command("serve")
@config_options
@click.option("--host", help="Address to listen on; server.host.")
@click.option("--port", type=int, help="Port to listen on, 0 for any free one; server.port.")
@log_level_option
def serve_command(path: Path | None, sets: tuple[str, ...], host: str | None, port: int | None, log_level: str) -> None:
    """Serve the configured models over HTTP until a signal ends it.

    SIGTERM, Ctrl-C or the end of its terminal lets live streams go on for up to server.drain_s seconds; a second one
    ends them at once.
    """
    start_logging(log_level)
    flags = {"server.host": Flag("--host", host), "server.port": Flag("--port", port)}
    given = {key: flag for key, flag in flags.items() if flag.value is not None}
    loaded, registry = open_config(path, sets, given, look=True, warn=log.warning)
    from tokenflow.http.serve import run  # here, so that the other commands start without the web framework

    trio.run(partial(run, loaded.config, registry, on_ready=partial(announce, loaded.config)))


GC_THRESHOLDS = (25_000, 0, 30)
"""Connections leave no cycles behind (the tests count them), so collecting seldom costs no memory. With Python's own
thresholds, collections that find nothing take a third of what opening a stream costs. What has survived two is old:
each pass over the young is a pause for every stream, and thousands of idle connections are young for ever."""


def announce(config: Config, url: str, can: Set[str]) -> None:
    """Say where the server is, and to a person how to try it; the last thing before it serves."""
    gc.collect()
    gc.freeze()  # what is here now stays: no collection need look at it again
    gc.set_threshold(*GC_THRESHOLDS)
    models = ", ".join(config.models)
    url, elsewhere = usable(config, url)
    click.echo(f"Serving {models} on {url}{elsewhere}")
    if not _is_terminal():
        return  # in a journal each line is a record
    click.echo(f"Try it:\n  {curl_line(config, url, can)}")
    if "chat" in can:
        key = ' --key "$TOKENFLOW_KEY"' if config.auth.keys else ""
        click.echo(f"or: tokenflow chat --url {url}{key}")


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def usable(config: Config, url: str) -> tuple[str, str]:
    """The URL for clients on this machine, and what to say of other addresses.

    What stands for all addresses is none to connect to, and a certificate is for a name.
    """
    scheme, port, address = urlsplit(url).scheme, urlsplit(url).port, ip_address(urlsplit(url).hostname or "")
    if address.is_unspecified:
        local = "127.0.0.1" if address.version == 4 else "[::1]"
        name = "localhost" if scheme == "https" else local
        return f"{scheme}://{name}:{port}", f", and on all other IPv{address.version} addresses of this machine"
    if scheme == "https" and _is_name(config.server.host):
        return f"{scheme}://{config.server.host}:{port}", ""
    return url, ""


def _is_name(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


def curl_line(config: Config, url: str, can: Set[str]) -> str:
    """A line to paste into a shell that streams from the first model, which can do these things."""
    model = next(iter(config.models))
    body: dict[str, object] = {"model": model, "stream": True}
    body |= {"temperature": 0} if "temperature" in can else {}
    body |= {"max_tokens": 64}
    chats = "chat" in can
    body |= {"messages": [{"role": "user", "content": "Say hello."}]} if chats else {"prompt": "Once upon a time"}
    route = "/v1/chat/completions" if chats else "/v1/completions"
    quoted = json.dumps(body).replace("'", "\\u0027")  # a quote in a model's id would end the shell's string
    key = '-H "Authorization: Bearer $TOKENFLOW_KEY" ' if config.auth.keys else ""
    return f"curl -N {url}{route} {key}-H 'Content-Type: application/json' -d '{quoted}'"
