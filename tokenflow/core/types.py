"""The plain data that travels: requests down to an engine, events up from it. Frozen, no behaviour, no I/O.

Everything here could be sent over a process boundary: numbers, strings, tuples and mappings of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from tokenflow.core.deltas import CallPiece as CallPiece
from tokenflow.core.deltas import Delta as Delta
from tokenflow.core.deltas import MessageDelta as MessageDelta
from tokenflow.core.deltas import TokenLogprob as TokenLogprob
from tokenflow.errors import PluginError

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


# --- down: what is asked for ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Xtc:
    """Exclude top choices: with `probability`, drop all tokens that reach `threshold` but the least likely of them."""

    probability: float
    threshold: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dry:
    """Don't repeat yourself: a token that would go on with a repetition of n tokens, n at least `allowed_length`, loses
    `multiplier * base ** (n - allowed_length)` from its logit.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    range_tokens: int = 0
    """Look for repetitions in this many tokens; 0: in all."""
    sequence_breakers: tuple[str, ...] | None = None
    """No repetition is followed across a token with one of these in it; None: the engine's choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirostat:
    """Mirostat 2.0: keep the text's surprise near `tau` bits a token, correcting by `eta`. Basu et al. 2020."""

    tau: float = 5.0
    eta: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. None: not asked for, so the engine's default (OpenAI's: temperature 1, top_p 1).

    The field names are the names of the capabilities: an engine that lists `min_p` in `EngineInfo.capabilities` can do
    `min_p`; asking one that does not is refused before the engine sees it.
    """

    temperature: float | None = None
    """0 is greedy; divides the logits otherwise."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float | None = None
    """Nucleus: the smallest set of tokens whose probability reaches top_p."""
    min_p: float | None = None
    """Keep tokens with at least min_p times the likeliest one's probability."""
    typical_p: float | None = None
    """Locally typical: those of nearly average surprise, as many as reach typical_p together. Meister et al. 2022."""
    xtc: Xtc | None = None
    dry: Dry | None = None
    mirostat: Mirostat | None = None
    repetition_penalty: float | None = None
    """Divides (or multiplies, below 0) the logits of tokens seen before; 1 is off. Keskar et al. 2019."""
    frequency_penalty: float | None = None
    """Subtracted per occurrence (OpenAI)."""
    presence_penalty: float | None = None
    """Subtracted once for a token that occurred (OpenAI)."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, where the engine can promise it."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of token ids; -100 bans."""
    banned_strings: tuple[str, ...] | None = None
    """Never in the text: where one would come, whatever its case, the engine goes back and says something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the whole of a generated text must match."""

    kind: Literal["json_schema", "regex", "grammar"]
    source: str
    """A JSON schema as JSON, a regular expression, or a grammar in Lark's or GBNF's notation."""
    param: str = field(default="", compare=False)
    """The request's field that asks for it, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One sequence, as an engine sees it. A request for n choices becomes n of these."""

    prompt: tuple[int, ...]
    """Token ids, at least one; they and max_tokens fit the context."""
    max_tokens: int
    """At least 1. The engine stops at it with `length`."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Strings that end the text; never sent, nor any part of one."""
    logprobs: int | None = None
    """None: no log-probabilities; k: each token's own and the k likeliest alternatives'."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token, to max_tokens."""
    grammar: Grammar | None = None
    """What the text must match; the sequence ends (`stop`) where nothing more can follow."""
    shown: frozenset[str] = frozenset()
    """Control tokens whose text is part of the output, because the message parser needs it; every other control token
    yields no text.
    """
    id: str = ""
    """For logs: the stream's id."""
    index: int = 0
    """Which choice of its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds; see `core.deadlines` for when each counts."""

    queue_s: float = 60.0
    prefill_s: float = 120.0
    idle_s: float = 30.0
    total_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text to go on from, as in completions."""

    text: str
    special: bool = False
    """Read control tokens out of it; False: what looks like one is text."""
    begins: bool = True
    """It is the beginning: a model that wants a token for that gets one, if the text has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids to go on from."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Functions that the model may call."""

    functions: tuple[Mapping[str, Any], ...]
    """Each as templates know it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    choice: Literal["auto", "none", "required", "named"] = "auto"
    """Whether it may, may not or must; named: it must, and `functions` has only the one."""
    parallel: bool = True
    """It may call several in one message."""


Ending = Literal["opening", "closed", "continued"]
"""How rendered messages end: with the opening of an assistant's turn; with the last one; or within the last one, which
is an assistant's, at the end of its content, so that the answer goes on from there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages for the model's own template: each a mapping with `role`, and `content` as one string.

    An assistant's `tool_calls` have their arguments as JSON text, as a client sends them; its `content` may be None
    then.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More that the client wants its template to find, by name: `enable_thinking` and the like."""
    reasoning_effort: str | None = None
    """How much the model is to think, for templates that know the word."""
    ending: Ending = "opening"


OnDisconnect = Literal["cancel", "pause", "continue"]
"""What the last reader's leaving does: end the stream; take no further step; run on into the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """What becomes of a stream while nobody reads it."""

    on_disconnect: OnDisconnect = "cancel"
    grace_s: float | None = None
    """How long a paused or continuing stream waits for a reader before it is cancelled; None: the default."""
    retention_s: float | None = None
    """How long it can be replayed after its end; None: the default."""

    @property
    def resumable(self) -> bool:
        """A reader may come back: its events carry ids."""
        return self.on_disconnect != "cancel"


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks for, whatever dialect it spoke. Numbers are checked for form, not yet against the server."""

    model: str
    prompts: tuple[Prompt, ...]
    """Usually one. Choices are numbered prompt by prompt: index = i * n + j."""
    n: int = 1
    max_tokens: int | None = None
    """None: to the end of the context, or the configured cap."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    grammar: Grammar | None = None
    stream: bool = False
    include_usage: bool = False
    coalesce_ms: int | None = None
    """None: the configured default."""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by key of `Timeouts`, for those that the client wants other than the default."""
    attendance: Attendance = field(default_factory=Attendance)
    idempotency_key: str | None = None

    @property
    def choices(self) -> int:
        """How many sequences it asks for."""
        return len(self.prompts) * self.n


# --- up: what comes of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has its slot: the queue has ended, prefill begins. Always the first event."""

    prompt_tokens: int
    cached_tokens: int = 0
    """How many of them came out of a prefix cache."""


class Message:
    """What one choice has said so far: its deltas joined."""

    __slots__ = ("_arguments", "_calls", "_reasoning", "_texts", "logprobs")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallPiece] = []
        self._arguments: list[list[str]] = []
        self.logprobs: list[TokenLogprob] = []

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.logprobs += delta.logprobs
        if isinstance(delta, MessageDelta):
            self._reasoning.append(delta.reasoning)
            for piece in delta.calls:
                if piece.at == len(self._calls):
                    self._calls.append(piece)
                    self._arguments.append([])
                self._arguments[piece.at].append(piece.arguments)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[CallPiece]:
        """The calls, each in one piece."""
        return [
            call._replace(arguments="".join(arguments))
            for call, arguments in zip(self._calls, self._arguments, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence that ended well."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Released:
    """The sequence has given up its slot, as it was asked to; it goes on once it has credit and a slot again."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """It has a slot again, and goes on where it was."""

    cached_tokens: int = 0
    """How many of its tokens a prefix cache still had."""


Event = Started | Delta | Finished | Released | Resumed
"""What an engine sends. A failure is no event: it is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request, over all its choices. `completion` counts what was generated, read or not."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


# --- the engine itself ----------------------------------------------------------------------------------------------


CAPABILITIES = frozenset(field.name for field in fields(Sampling)) | {
    *("logprobs", "stop", "ignore_eos", "grammar", "prefix_cache", "pause", "release"),
}
"""All that an engine can say of itself in `EngineInfo.capabilities`; docs/api.md says what each is."""

_OF_TEMPLATES = {"chat", "tools", "reasoning"}
"""Capabilities that the server adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is and can do; fixed while it is open.

    Raises:
        PluginError: there is no such capability.
    """

    model: str
    """For people: a file's name, a description."""
    context_length: int
    """Tokens of prompt and completion together, per sequence."""
    slots: int
    """Sequences decoded at once."""
    vocab_size: int = 0
    capabilities: frozenset[str] = frozenset()
    """Those of `CAPABILITIES` that it has. What templates bring (chat, tools, reasoning) is added by the server."""
    max_logprobs: int = 0
    chat_template: str | None = None
    """jinja2 source; None: no chat."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Templates by name, where there are several; `tool_use` is the one for requests with tools."""
    bos_token: str = ""
    add_bos: bool = False
    """A text begins with `bos_token`, also one that does not spell it. A chat template writes it by itself."""
    eos_token: str = ""
    special_tokens: frozenset[str] = frozenset()
    """The texts of control tokens, which user text must not be able to spell."""

    def __post_init__(self) -> None:
        for name in sorted(self.capabilities - CAPABILITIES - _OF_TEMPLATES):
            meant = "".join(f" (did you mean {close}?)" for close in get_close_matches(name, CAPABILITIES, n=1))
            known = ", ".join(sorted(CAPABILITIES))
            raise PluginError(f"its engine names a capability {name!r}, which is none{meant}; there are {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's counters and gauges at one moment. Counters never fall while it is open."""

    slots: int = 0
    slots_used: int = 0
    waiting: int = 0
    """Sequences that it has accepted and not yet given a slot."""
    paused: int = 0
    """Sequences in a slot that take no steps for want of credit."""
    prompt_tokens: int = 0
    """Counter: prompt tokens evaluated, without those out of a cache."""
    generated_tokens: int = 0
    """Counter: tokens sampled, delivered or not."""
    steps: int = 0
    """Counter: batch steps."""
    step_age_s: float = 0.0
    """How long the step in progress has taken; 0 between steps."""
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    kv_tokens_evicted: int = 0
    """Counter: tokens thrown out of the prefix cache to make room."""
