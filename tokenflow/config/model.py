"""The configuration as plain frozen dataclasses: one class a table, one field a key, its help right under it.

Nothing here reads a file: `config.load` does, checks types and bounds strictly, and says where each value came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import StringConstraints

from tokenflow.config.words import HOST_PATTERN, NAME_PATTERN, ORIGIN_PATTERN, SHA256_PATTERN

Seconds = Annotated[float, Gt(0)]
Count = Annotated[int, Ge(1)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Host = Annotated[str, StringConstraints(pattern=HOST_PATTERN)]
Origin = Annotated[str, StringConstraints(pattern=ORIGIN_PATTERN)]
Sha256 = Annotated[str, StringConstraints(pattern=SHA256_PATTERN)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`[server]`: where it listens and how it ends."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `[auth] keys`."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    name: Name = "tf"
    """The replica's name, the first part of every stream id, so that a proxy can route by it: letters, digits, `_`."""
    tls_certificate: str | None = None
    """PEM file with the certificate and its chain, relative to the working directory; set, it serves HTTPS, HTTP/2
    included. Needs `tls_key`."""
    tls_key: str | None = None
    """PEM file with the certificate's private key, relative to the working directory."""
    drain_s: Annotated[float, Ge(0)] = 20.0
    """On SIGTERM live streams may go on for this long."""
    backlog: Count = 2048
    """Connections that the kernel keeps until they are accepted."""
    max_connections: Count = 4096
    """Open at once; one more is a 503."""
    max_connections_per_address: Count | None = None
    """Of these, from one address, beyond which one more is a 429; unset: all. A proxy in front is one address."""
    header_timeout_s: Seconds = 20.0
    """A request's head that has not arrived by then is a 408."""
    max_header_bytes: Count = 16_384
    """Longer headers are a 431."""
    max_headers: Count = 100
    """More of them are a 431."""
    max_body_bytes: Count = 4_194_304
    """A larger request body is a 413."""
    body_timeout_s: Seconds = 30.0
    """A body that has not arrived by then is a 408."""
    max_pipelined_bytes: Count = 65_536
    """Sent ahead of the answer to the request before; with more the connection is cut."""
    max_streams_per_connection: Count = 100
    """HTTP/2 requests at once on one connection; one more is refused, to be sent again."""
    debug: bool = False
    """Opens `/_debug/generated`, which counts the tokens that engines really made: for lessons and tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyConfig:
    """One of `[[auth.keys]]`."""

    name: str
    """Who it is, in logs and records."""
    sha256: Sha256
    """Hex SHA-256 of the key: `printf %s "$KEY" | sha256sum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """`[auth]`: who may ask. Without keys only loopback is served."""

    keys: tuple[KeyConfig, ...] = ()
    """Keys that are let in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """`[http]`: which web pages may use it."""

    hosts: tuple[Host, ...] = ()
    """Without keys: names, beside this machine's own, that a proxy serves it by. A request for another is a 421."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of pages that may read its answers (CORS), like `https://chat.example.org`; `*`: any. Empty: off."""
    page: bool = True
    """`/` is a page to talk to the models with. It asks for a key where there are keys; it needs none itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """`[limits]`: how much one request may ask for, and how many may wait."""

    max_waiting: Annotated[int, Ge(0)] = 64
    """Places in each model's waiting room; a request that finds none is a 503."""
    max_tokens: Count | None = None
    """Cap on generated tokens per choice; unset: the rest of the context."""
    max_prompt_tokens: Count | None = None
    """Cap on prompt tokens; unset: the context."""
    max_n: Count = 16
    """Choices per request (never more than the model's slots)."""
    max_stop: Count = 16
    """Stop strings per request."""
    max_stop_chars: Count = 512
    """Characters per stop string or banned string."""
    max_banned_strings: Count = 64
    """Banned strings per request."""
    max_logit_bias: Count = 1024
    """Entries in logit_bias."""
    max_top_logprobs: Annotated[int, Ge(0)] = 20
    """Alternatives per token."""
    max_grammar_chars: Count = 65_536
    """Characters of a JSON schema, regular expression or grammar that an answer shall match."""
    grammar_timeout_s: Seconds = 3.0
    """One that takes longer to compile is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsConfig:
    """`[timeouts]`: seconds. A request's own `timeouts` may lower each, or raise it up to its `_max`."""

    queue_timeout_s: Seconds = 60.0
    """Waiting for a slot."""
    queue_timeout_max_s: Seconds = 600.0
    """The most a request may ask for."""
    prefill_timeout_s: Seconds = 120.0
    """From the slot to the first token."""
    prefill_timeout_max_s: Seconds = 1200.0
    """The most a request may ask for."""
    idle_timeout_s: Seconds = 30.0
    """Between tokens, while the reader is not the reason."""
    idle_timeout_max_s: Seconds = 600.0
    """The most a request may ask for."""
    total_timeout_s: Seconds = 600.0
    """From admission to the end."""
    total_timeout_max_s: Seconds = 7200.0
    """The most a request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """`[stream]`: how tokens reach their readers."""

    window: Count = 64
    """Records that the engine may be ahead of the fastest reader."""
    heartbeat_s: Seconds = 15.0
    """After this long with nothing written, a heartbeat is."""
    stall_s: Seconds = 30.0
    """A reader that takes nothing for this long is disconnected."""
    park_hold_s: Annotated[float, Ge(0)] = 0.5
    """A sequence that is parked for its reader this long gives its slot to who waits for one, and goes on later."""
    coalesce_ms: Annotated[int, Ge(0)] = 0
    """Gather tokens for at most this long into one event; 0: every token at once."""
    coalesce_max_ms: Annotated[int, Ge(0)] = 1000
    """The most a request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """`[replay]`: what is kept for readers who come back."""

    grace_s: Annotated[float, Ge(0)] = 15.0
    """How long a paused or continuing stream waits for a reader before it is cancelled."""
    grace_max_s: Annotated[float, Ge(0)] = 300.0
    """The most a request may ask for."""
    retention_s: Annotated[float, Ge(0)] = 300.0
    """How long an ended stream can be replayed."""
    retention_max_s: Annotated[float, Ge(0)] = 3600.0
    """The most a request may ask for."""
    stream_bytes: Count = 1_048_576
    """Memory that one stream's log may hold; its oldest records go first."""
    stream_records: Count = 16_384
    """Records that one stream's log may hold."""
    total_bytes: Count = 268_435_456
    """Memory that all logs, and the streams that they are kept for, may hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsConfig:
    """`[plugins]`: plugins that are files, beside the installed ones."""

    files: tuple[str, ...] = ()
    """Python files, relative to the configuration's folder; each is a plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How the model is talked with, where its own template does not say it right."""

    template: str | None = None
    """jinja2, instead of the model's own template."""
    template_file: Path | None = None
    """A file with it, relative to the configuration's folder."""
    tool_calls: Literal[
        "auto", "none", "deepseek", "glm", "harmony", "hermes", "llama3", "mistral", "pythonic", "qwen_xml"
    ] = "auto"
    """How it writes tool calls; auto: as its template teaches it."""
    reasoning: Literal["auto", "none", "harmony", "mistral", "seed", "think"] = "auto"
    """How it marks its reasoning; auto: as its template does."""
    template_kwargs: tuple[str, ...] = ("enable_thinking", "thinking")
    """Names that a request's chat_template_kwargs may set for the template."""

    def __post_init__(self) -> None:
        if self.template is not None and self.template_file is not None:
            raise ValueError("template and template_file are both set; take one")
        if taken := sorted(TEMPLATE_NAMES.intersection(self.template_kwargs)):
            raise ValueError(f"template_kwargs has {taken[0]}, which is the server's own to set; leave it out")


TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "range"}
    | {"raise_exception", "strftime_now"}
)
"""What every template finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsConfig:
    """What holds for requests that do not say. Unset: OpenAI's, temperature 1 and all tokens."""

    max_tokens: Count | None = None
    """Tokens of an answer. Unset: as many as the context and `limits.max_tokens` allow."""
    temperature: Annotated[float, Ge(0), Le(10)] | None = None
    """0 always takes the likeliest token."""
    top_k: Annotated[int, Ge(0)] | None = None
    """Tokens are drawn from so many of the likeliest; 0: from all."""
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    """From the likeliest that have this probability together."""
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    """From those with at least this part of the likeliest one's probability."""
    typical_p: Annotated[float, Gt(0), Le(1)] | None = None
    """From those of nearly average surprise that have this probability together."""
    repetition_penalty: Annotated[float, Gt(0)] | None = None
    """Above 1, tokens that have been there become less likely."""
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    """The same, by how often they were."""
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    """The same, however often."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Those that are set and say how tokens are drawn, by the names that `Sampling` has for them."""
        return {name: value for name, value in self.given.items() if name != "max_tokens"}

    @property
    def given(self) -> dict[str, Any]:
        """Those that are set."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


MODEL_TABLES: Mapping[str, type] = {"chat": ChatConfig, "defaults": DefaultsConfig}
"""The tables that every model may have, whatever its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One `[models.<id>]`: what clients ask for by that id."""

    engine: str
    """The engine's name: of an installed plugin, or of one in `[plugins] files`."""
    options: Any
    """An instance of that engine's own config class: every other key of the table."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Its table `chat`."""
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    """Its table `defaults`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole deployment."""

    server: ServerConfig = field(default_factory=ServerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """By the id that clients use; the first is the default."""
    sinks: Mapping[str, Any] = field(default_factory=dict)
    """By the sink plugin's name: an instance of its own config class."""
