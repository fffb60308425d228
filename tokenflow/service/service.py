"""The service: owns every engine host, waiting room, stream and sink, in nested nurseries.

sinks  (outermost: told of every end)
  engines
    streams  (innermost: cancelled first, and their slots are free before an engine closes)
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace

import trio

from tokenflow.api import Engine, EngineInfo, Gauges, ModelGauges
from tokenflow.chat.model import DEFAULT, ChatModel
from tokenflow.chat.template import TemplateError
from tokenflow.config.model import ChatConfig, Config, DefaultsConfig
from tokenflow.core.admission import Admission
from tokenflow.core.logstore import LogStore
from tokenflow.core.replay import Bounds
from tokenflow.core.types import GenerationRequest
from tokenflow.engines.host import EngineHost
from tokenflow.errors import (
    Draining,
    EngineClosed,
    IdempotencyConflict,
    ModelNotFound,
    ReplayFull,
    ResumeWindowLost,
    StartupError,
    StreamNotFound,
)
from tokenflow.service.account import StreamIdentity
from tokenflow.service.feeds import Feeds
from tokenflow.service.nested import alongside
from tokenflow.service.plan import Planner, asks_for
from tokenflow.service.reader import StreamReader
from tokenflow.service.room import RoomMaker
from tokenflow.service.stream import Stream
from tokenflow.service.watch import Watch

GOING_DOWN = "The server is shutting down. Ask again: another replica, or this one after its restart, will answer."

LET_GO_S = 0.3
"""For which engines are waited for at the end: most need a step. A sink then still has its second to write in."""
REMEMBERED = 1024
"""Streams that have ended and are not kept, and can still be cancelled: a cancel may come a moment after the end."""

log = logging.getLogger("tokenflow.service")


def _from_the_beginning(stream: Stream) -> StreamReader:
    """A reader of what an idempotency key stands for. ResumeWindowLost says which stream that is."""
    try:
        return stream.attach()
    except ResumeWindowLost as exc:
        exc.details |= {"id": stream.identity.id}
        raise


def new_id(server: str) -> str:
    """A stream's name: nobody guesses it, and a proxy finds the replica in it."""
    return f"{server}-{secrets.token_hex(16)}"


class Model:
    """One `[models.<id>]`: its engine's host, its waiting room, and what judges requests for it.

    Args:
        host: open, so that its engine has said what it is.
        config: the deployment.

    Raises:
        StartupError: the configuration asks for what its engine cannot do, or its template does not compile.
    """

    def __init__(self, host: EngineHost, config: Config) -> None:
        self.id = host.id
        self.host = host
        own = config.models.get(self.id)
        self.defaults = DefaultsConfig() if own is None else own.defaults
        info = host.info
        for name, value in self.defaults.sampling.items():
            if asks_for(name, value) and name not in info.capabilities:
                raise StartupError(f"model {self.id!r}: its engine cannot do {name}; take that out of its `defaults`.")
        chat = self._chat(info, ChatConfig() if own is None else own.chat)
        self._chat_capabilities = chat.capabilities if chat is not None else frozenset[str]()
        self.admission = Admission(info.slots, config.limits.max_waiting)
        rules = config.limits, config.timeouts, config.stream, config.replay
        self.planner = Planner(info, chat, *rules, self.defaults)

    @property
    def info(self) -> EngineInfo:
        """What its engine is and can do, and what can be done with it through its templates."""
        info = self.host.info
        return replace(info, capabilities=info.capabilities | self._chat_capabilities)

    def _chat(self, info: EngineInfo, chat: ChatConfig) -> ChatModel | None:
        """How it is talked with: as the configuration says, else as the model's file does."""
        templates = dict(info.chat_templates)
        if info.chat_template is not None:
            templates[DEFAULT] = info.chat_template
        try:
            if chat.template_file is not None:
                templates = {DEFAULT: chat.template_file.read_text(encoding="utf-8")}
            elif chat.template is not None:
                templates = {DEFAULT: chat.template}
            if DEFAULT not in templates:
                return None
            return ChatModel(
                templates,
                info.bos_token,
                info.eos_token,
                info.special_tokens,
                tool_calls=chat.tool_calls,
                reasoning=chat.reasoning,
                variables=chat.template_kwargs,
            )
        except (TemplateError, OSError, UnicodeDecodeError) as exc:
            raise StartupError(
                f"model {self.id!r}: {exc}; set [models.{self.id}.chat] template_file to another template."
            ) from exc

    @property
    def engine(self) -> Engine:
        return self.host.engine


class Service:
    """Everything between a dialect and an engine.

    Args:
        config: the deployment.
        hosts: one per model, in the order of the configuration; the first is the default.
        feeds: the sinks.
    """

    def __init__(self, config: Config, hosts: Mapping[str, EngineHost], feeds: Feeds) -> None:
        self.config = config
        self.feeds = feeds
        self._hosts = hosts
        self.models: dict[str, Model] = {}
        """Once they are open."""
        self.drain_begun = trio.Event()
        """Set once nothing more is admitted."""
        self.last_stream: Stream | None = None
        """The newest stream, also when it has ended."""
        self._streams: dict[str, Stream] = {}
        self._ended: set[Stream] = set()  # of these: those that are only kept for replay
        self._forgotten: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)  # id, key
        self._stream_ended = trio.lowlevel.ParkingLot()
        self._idempotent: dict[tuple[str, str], tuple[bytes, Stream]] = {}
        replay = config.replay
        self._logs = LogStore(Bounds(replay.stream_records, replay.stream_bytes), replay.total_bytes, trio.current_time)
        self._watch = Watch()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open everything, serve until cancelled, close everything.

        Raises:
            StartupError: a sink or an engine does not open.
        """
        async with alongside(self.feeds.run), alongside(*(host.run for host in self._hosts.values())):
            self.models = {id: Model(host, self.config) for id, host in self._hosts.items()}
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._watch.run)
                for model in self.models.values():
                    if "release" in model.host.info.capabilities:
                        self._nursery.start_soon(self._room_maker(model).run)
                task_status.started()
                await trio.sleep_forever()

    async def engine_lost(self) -> str:
        """Wait until a model's engine cannot be opened again in this process; the model's id."""
        lost = ""

        async def wait(host: EngineHost) -> None:
            nonlocal lost
            await host.lost.wait()
            lost = host.id
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for host in self._hosts.values():
                nursery.start_soon(wait, host)
        return lost

    def _room_maker(self, model: Model) -> RoomMaker:
        return RoomMaker(model.admission, lambda: self._streams_of(model), self.config.stream.park_hold_s)

    def _streams_of(self, model: Model) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.identity.model == model.id]

    def model(self, id: str) -> Model:
        """The model with that id; "" is the default. ModelNotFound otherwise."""
        if id in self.models:
            return self.models[id]
        if id == "":
            return next(iter(self.models.values()))
        raise ModelNotFound(
            f"The model {id[:200]!r} does not exist. Served here: {', '.join(self.models)}.", param="model"
        )

    async def open(
        self, request: GenerationRequest, *, key: str, route: str, digest: bytes = b""
    ) -> tuple[Stream, StreamReader]:
        """Judge `request`, find it a place, and start its stream with one reader from the beginning.

        With an idempotency key that `key` has used before: a reader of that stream, if it lives or is held complete.

        Args:
            digest: what tells one body from another, where there is an idempotency key.

        Raises:
            InvalidRequest, ModelNotFound, Overloaded, EngineClosed, IdempotencyConflict: and nothing has happened.
        """
        known = self._known(request, key, digest)
        if known is not None:
            return known, _from_the_beginning(known)
        if self._nursery is None:
            raise EngineClosed("The server is not open.")
        self._refuse_if_draining()
        model = self.model(request.model)
        id = new_id(self.config.server.name)
        plan = await model.planner.plan(request, model.engine, id)
        known = self._known(request, key, digest)  # the same request may have come in the meantime
        if known is not None:
            return known, _from_the_beginning(known)
        self._refuse_if_draining()
        if not self._logs.has_room:
            raise ReplayFull("The replay logs of live streams are full. Try again later.", retry_after_s=1.0)
        identity = StreamIdentity(
            id=id, model=model.id, engine=model.host.plugin.name, key=key, route=route, stream=request.stream
        )
        stream = Stream(
            identity,
            request,
            model.host,
            plan.sequences,
            plan.readers,
            model.admission,
            plan.settings,
            self._logs,
            self._watch,
            self.feeds.emit,
        )
        reader = stream.attach()
        self._streams[id] = self.last_stream = stream
        if request.idempotency_key is not None:
            self._idempotent[key, request.idempotency_key] = (digest, stream)
        # In a context of its own: the handler's holds the whole request, body included, for as long as this lives.
        Context().run(self._nursery.start_soon, self._run, stream, (key, request.idempotency_key))
        return stream, reader

    def _known(self, request: GenerationRequest, key: str, digest: bytes) -> Stream | None:
        if request.idempotency_key is None or (key, request.idempotency_key) not in self._idempotent:
            return None
        known, stream = self._idempotent[key, request.idempotency_key]
        if known != digest:
            raise IdempotencyConflict("This Idempotency-Key was used before, with another body.")
        return stream if stream.repeatable else None

    async def _run(self, stream: Stream, name: tuple[str, str | None]) -> None:
        try:
            await stream.run()
            self._ended.add(stream)
            self._stream_ended.unpark_all()
            await stream.keep()
        finally:
            self._ended.discard(stream)
            del self._streams[stream.identity.id]
            self._forgotten.append((stream.identity.id, stream.identity.key))
            if name[1] is not None and self._idempotent.get((name[0], name[1]), (b"", None))[1] is stream:
                del self._idempotent[name[0], name[1]]

    def stream(self, id: str, key: str) -> Stream:
        """The live or replayable stream with that id, if it is `key`'s. StreamNotFound otherwise."""
        stream = self._streams.get(id)
        if stream is None or stream.identity.key != key:
            raise StreamNotFound(f"There is no stream {id[:100]!r}.")
        return stream

    def cancel(self, id: str, key: str) -> None:
        """Cancel `key`'s stream with that id. Where it has ended that is nothing. StreamNotFound if there was none."""
        if id in self._streams or (id, key) not in self._forgotten:
            self.stream(id, key).cancel("client")

    def streams(self, key: str) -> list[Stream]:
        """All live and replayable streams of `key`, oldest first."""
        return [stream for stream in self._streams.values() if stream.identity.key == key]

    # --- going down -------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self.drain_begun.is_set()

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Draining(GOING_DOWN, retry_after_s=1.0)

    async def drain(self) -> None:
        """Admit nothing more; let live streams go on for `drain_s`, then end them with an error: come back.

        Returns when none lives any more.
        """
        self.drain_begun.set()
        with trio.move_on_after(self.config.server.drain_s):
            await self._wait_no_streams()
        await self.end_streams()

    async def _wait_no_streams(self) -> None:
        while self.live_streams:
            await self._stream_ended.park()

    async def end_streams(self) -> None:
        """End every live stream with `draining`; returns when their readers have it too, or have gone."""
        for stream in list(self._streams.values()):
            stream.cancel("server", Draining(GOING_DOWN, retry_after_s=1.0))
        with trio.move_on_after(LET_GO_S):
            await self._wait_no_streams()
        for stream in list(self._streams.values()):
            stream.give_up()
        await self._wait_no_streams()

    # --- for probes and pages ---------------------------------------------------------------------------------------

    @property
    def live_streams(self) -> int:
        """Streams that have not written their usage record yet."""
        return len(self._streams) - len(self._ended)

    async def not_ready(self) -> str | None:
        """Why new work would be refused or stand still; None: all is well."""
        if self.draining:
            return "draining"
        for model in self.models.values():
            if not await model.host.ready():
                return f"the engine of model {model.id!r} is not ready"
        return None

    async def gauges(self) -> Gauges:
        return Gauges(
            models=tuple([await self._gauges(model) for model in self.models.values()]),
            sink_events_dropped=self.feeds.dropped,
            replay_bytes=self._logs.bytes,
            replay_bytes_capacity=self._logs.total_bytes,
            replay_records_evicted=self._logs.evicted_records,
            kept_streams=len(self._ended),
        )

    async def _gauges(self, model: Model) -> ModelGauges:
        stats = await model.host.stats()
        return ModelGauges(
            model=model.id,
            ready=await model.host.ready(),
            active=sum(stream.holds_slots for stream in self._streams_of(model)),
            waiting=model.admission.waiting,
            waiting_capacity=model.admission.max_waiting,
            slots=stats.slots,
            slots_used=stats.slots_used,
            paused=stats.paused,
            generated_tokens=stats.generated_tokens,
            prompt_tokens=stats.prompt_tokens,
            kv_tokens_used=stats.kv_tokens_used,
            kv_tokens_capacity=stats.kv_tokens_capacity,
            kv_tokens_evicted=stats.kv_tokens_evicted,
        )
