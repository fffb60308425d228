"""A whole server in one call: the port, the service, the transport, the signals.

The port is taken first, so that a busy one is known before a model is loaded. SIGTERM and SIGINT drain; a second one
ends at once.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Set
from contextlib import closing

import trio
from hypercorn.config import Config as HypercornConfig

from tokenflow.config.model import Config, ServerConfig
from tokenflow.engines.host import EngineHost
from tokenflow.engines.registry import Registry
from tokenflow.errors import EngineLost, StartupError
from tokenflow.http.app import create_app
from tokenflow.http.transport import Limits, Traffic, bind, serve
from tokenflow.service.feeds import Feeds
from tokenflow.service.nested import alongside
from tokenflow.service.service import Service

log = logging.getLogger("tokenflow.http")

LAST_WORDS_S = 0.6
"""After the drain's end, for the error event to reach its reader before the socket is closed."""
ENDS_WITHIN_S = 1.75
"""After the drain, or after a signal that ends at once: a supervisor that kills after `drain_s` + 2 s never has to."""
KEEP_ALIVE_S = 75.0
"""Idle connections live longer than the 60 s for which proxies and pooled clients keep theirs (RFC 9112, 9.5)."""

OTHER_FILES = 256
"""Open files beside connections: models, sinks, libraries."""

MAX_FRAME_BYTES = 1_048_576
"""Of a WebSocket message from a client; a larger one is a close with 1009."""


OnReady = Callable[[str, Set[str]], None]
"""Called once the server answers, with its URL and what its first model can do."""


async def run(config: Config, registry: Registry, *, on_ready: OnReady = lambda *_: None) -> None:
    """Serve until a signal says otherwise.

    Raises:
        StartupError: the port, a sink or an engine could not be had.
        EngineLost: an engine cannot be opened again in this process; it has been drained.
    """
    _allow_files(config.server.max_connections)
    listener = _bind(config)
    service = create_service(config, registry)
    last_resort = _LastResort(config.server.drain_s)
    lost = ""
    with listener, closing(last_resort), trio.open_signal_receiver(*_end_signals()) as signals:
        async with trio.open_nursery() as nursery:
            ready, stop = trio.Event(), trio.Event()
            nursery.start_soon(_heed, signals, ready, stop, service, nursery.cancel_scope, last_resort)

            async def heed_loss() -> None:
                nonlocal lost
                model = await service.engine_lost()
                if stop.is_set():
                    return
                lost, last_resort.exit_code = model, 1
                last_resort.expect_end(draining=ready.is_set())
                if ready.is_set():
                    log.error("draining for %g s, then ending, to be started anew", config.server.drain_s)
                    stop.set()
                else:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(heed_loss)

            def answers(url: str) -> None:
                ready.set()
                on_ready(url, service.model("").info.capabilities)

            async with alongside(service.run):
                await _serve(service, listener, stop, answers)
            nursery.cancel_scope.cancel()
    if lost:
        raise EngineLost(f"The engine of model {lost!r} cannot be opened again in this process; see its log.")


def create_service(config: Config, registry: Registry) -> Service:
    """The service that `config` describes, not yet open."""
    hosts = {id: EngineHost(id, registry.engine(model.engine), model.options) for id, model in config.models.items()}
    return Service(config, hosts, Feeds({name: (registry.sink(name), sink) for name, sink in config.sinks.items()}))


async def _serve(service: Service, listener: socket.socket, stop: trio.Event, on_ready: Callable[[str], None]) -> None:
    settings = service.config.server
    traffic = Traffic()
    async with trio.open_nursery() as nursery:

        async def start(task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(
                create_app(service, traffic),
                hypercorn_config(service.config),
                listeners=[listener],
                shutdown_trigger=stop.wait,
                drain=service.drain,
                drain_s=settings.drain_s + LAST_WORDS_S,
                stall_s=service.config.stream.stall_s,
                limits=_limits(settings),
                traffic=traffic,
                task_status=task_status,
            )
            nursery.cancel_scope.cancel()

        [url] = await nursery.start(start)
        on_ready(url)


async def _heed(
    signals: AsyncIterator[int],
    ready: trio.Event,
    stop: trio.Event,
    service: Service,
    scope: trio.CancelScope,
    last_resort: _LastResort,
) -> None:
    """The first signal drains; a second one, or one while the models still load, ends at once."""
    async for number in signals:
        name = signal.Signals(number).name
        if number == signal.SIGHUP and stop.is_set():
            continue  # a terminal that closes sends it twice
        if stop.is_set() or not ready.is_set():
            log.warning("%s: ending at once", name)
            last_resort.expect_end(draining=False)
            with trio.move_on_after(LAST_WORDS_S):
                await service.end_streams()
            scope.cancel()
        else:
            drain_s = service.config.server.drain_s
            log.info("%s: draining; live streams may go on for %g s, a second signal ends them at once", name, drain_s)
            last_resort.expect_end(draining=True)
            stop.set()


def _end_signals() -> list[signal.Signals]:
    """What asks it to end; a terminal that closes too, unless that is to be ignored (nohup)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]


class _LastResort:
    """Ends the process when its time is up: code of an engine that does not return can only be left behind."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self.exit_code = 0
        self._timer = threading.Timer(0, lambda: None)

    def expect_end(self, *, draining: bool) -> None:
        """From now on there are `ENDS_WITHIN_S`, after the drain if there is one."""
        self._timer.cancel()
        self._timer = threading.Timer(ENDS_WITHIN_S + draining * self._drain_s, _leave_behind, [self.exit_code])
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        self._timer.cancel()


def _leave_behind(exit_code: int) -> None:
    log.warning("an engine or a sink has not closed in time; ending without it")
    logging.shutdown()
    os._exit(exit_code)


def _bind(config: Config) -> socket.socket:
    host, port = config.server.host, config.server.port
    try:
        stall_s, keepalive_s = config.stream.stall_s, config.stream.heartbeat_s
        return bind(host, port, backlog=config.server.backlog, stall_s=stall_s, keepalive_s=keepalive_s)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise StartupError(
                f"{host}:{port} is in use. Stop what listens there, or choose another port with --port."
            ) from exc
        raise StartupError(f"Cannot listen on {host}:{port}: {exc.strerror or exc}.") from exc


def _limits(settings: ServerConfig) -> Limits:
    return Limits(
        max_connections=settings.max_connections,
        max_connections_per_address=settings.max_connections_per_address,
        header_timeout_s=settings.header_timeout_s,
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
        max_body_bytes=settings.max_body_bytes,
        max_pipelined_bytes=settings.max_pipelined_bytes,
        max_streams=settings.max_streams_per_connection,
    )


def _allow_files(connections: int) -> None:
    """A connection is an open file, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    if hard < wanted:
        log.warning("this process may open %d files: too few for server.max_connections, %d", hard, connections)


def hypercorn_config(config: Config) -> HypercornConfig:
    """What Hypercorn is to know of ours."""
    hypercorn = HypercornConfig()
    hypercorn.keep_alive_timeout = KEEP_ALIVE_S
    hypercorn.keep_alive_max_requests = sys.maxsize  # by default 1,000: nobody is better off after that
    hypercorn.include_server_header = False
    hypercorn.accesslog = None
    hypercorn.errorlog = logging.getLogger("tokenflow.http")
    hypercorn.websocket_max_message_size = MAX_FRAME_BYTES
    hypercorn.certfile, hypercorn.keyfile = config.server.tls_certificate, config.server.tls_key
    hypercorn.websocket_ping_interval = config.stream.heartbeat_s
    return hypercorn
