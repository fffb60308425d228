"""From what a client asks for to what an engine is asked for: everything that can be refused is refused here.

`plan` finds no fault twice: form is the dialects' affair; here a request meets the model and the configured limits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from tokenflow.api import Engine, EngineInfo, Sampling, SequenceRequest, StructuredEngine
from tokenflow.chat.forced import call_grammar, is_forced
from tokenflow.chat.marking import Segment
from tokenflow.chat.model import ChatModel
from tokenflow.chat.reader import MessageReader
from tokenflow.config.model import DefaultsConfig, LimitsConfig, ReplayConfig, StreamConfig, TimeoutsConfig
from tokenflow.core.types import Attendance, ChatPrompt, GenerationRequest, Prompt, TextPrompt, Timeouts, TokenPrompt
from tokenflow.dialects.fields import shown
from tokenflow.errors import ContextLengthExceeded, InvalidRequest
from tokenflow.service.stream import StreamSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request that has been found good: what to run, and how."""

    model: str
    sequences: tuple[SequenceRequest, ...]
    readers: tuple[MessageReader | None, ...]
    """Who reads each sequence's text as a message; None: it is all content."""
    settings: StreamSettings


_NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "temperature": (None, 1),
    "top_k": (None, 0),
    "top_p": (None, 1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "xtc": (None,),
    "dry": (None,),
    "mirostat": (None,),
    "repetition_penalty": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "seed": (None,),
    "logit_bias": (None,),
    "banned_strings": (None,),
}
"""Values that ask for nothing: many clients send every parameter, and an engine without one can still serve them."""


def asks_for(name: str, value: Any) -> bool:
    """Whether this value of a field of `Sampling` takes an engine that can do it."""
    return value not in _NEUTRAL[name]


_PARAM = {"xtc": "xtc_probability", "dry": "dry_multiplier"}
"""What a client would have to leave out, where it is not called as the capability is."""


class Planner:
    """Judges requests for one model.

    Args:
        info: what the engine can do.
        chat: its templates and formats; None where it has no template.
        defaults: what holds for requests that do not say.
    """

    def __init__(
        self,
        info: EngineInfo,
        chat: ChatModel | None,
        limits: LimitsConfig,
        timeouts: TimeoutsConfig,
        stream: StreamConfig,
        replay: ReplayConfig,
        defaults: DefaultsConfig,
    ) -> None:
        self._info = info
        self._chat = chat
        self._limits = limits
        self._timeouts = timeouts
        self._stream = stream
        self._replay = replay
        self._max_tokens_default = defaults.max_tokens
        self._sampling_defaults = defaults.sampling

    async def plan(self, request: GenerationRequest, engine: Engine, id: str) -> Plan:
        """The sequences and settings for `request`.

        Raises:
            InvalidRequest: with the field's name in `param`.
        """
        request = self._with_defaults(_with_forced_call(request))
        if any(isinstance(prompt, ChatPrompt) for prompt in request.prompts):
            self._can_chat()  # first, for no other field is worth mending where it cannot
        self._check_limits(request)
        self._check_capabilities(request)
        self._check_vocabulary(request)
        settings = self._settings(request)
        sequences: list[SequenceRequest] = []
        readers: list[MessageReader | None] = []
        for prompt in request.prompts:
            segments = self._segments(prompt)
            tokens = await _tokens(prompt, segments, engine)
            max_tokens = self._max_tokens(len(tokens), request, _param(prompt))
            for j in range(request.n):
                index = len(sequences)
                readers.append(reader := self._reader(request, prompt, segments, f"{id}:{index}"))
                sequences.append(
                    SequenceRequest(
                        prompt=tokens,
                        max_tokens=max_tokens,
                        sampling=_for_choice(request.sampling, j),
                        stop=request.stop,
                        logprobs=request.logprobs,
                        ignore_eos=request.ignore_eos,
                        grammar=request.grammar,
                        shown=self._chat.shown if reader is not None and self._chat is not None else frozenset(),
                        id=id,
                        index=index,
                    )
                )
        if request.grammar is not None:
            assert isinstance(engine, StructuredEngine)  # it has the capability
            await engine.compile(request.grammar, budget_s=self._limits.grammar_timeout_s)
        return Plan(model=request.model, sequences=tuple(sequences), readers=tuple(readers), settings=settings)

    def _with_defaults(self, request: GenerationRequest) -> GenerationRequest:
        unsaid = {n: value for n, value in self._sampling_defaults.items() if getattr(request.sampling, n) is None}
        return replace(request, sampling=replace(request.sampling, **unsaid)) if unsaid else request

    async def tokenize(self, prompt: Prompt, engine: Engine) -> tuple[int, ...]:
        """The prompt as token ids: a template's control tokens are tokens, a user's text is none.

        Raises:
            InvalidRequest: with the field's name in `param`.
        """
        return await _tokens(prompt, self._segments(prompt), engine)

    def _segments(self, prompt: Prompt) -> list[Segment]:
        """The prompt's text in pieces; none for one that is tokens already."""
        match prompt:
            case TokenPrompt():
                return []
            case TextPrompt(text=text, special=special):
                bos = self._info.bos_token
                begun = not (self._info.add_bos and prompt.begins) or (special and text.startswith(bos))
                return [Segment(text, special)] if begun else [Segment(bos, True), Segment(text, special)]
            case ChatPrompt():
                now = datetime.now(UTC).astimezone()
                return self._can_chat().render(prompt, now=now)

    def _can_chat(self) -> ChatModel:
        if self._chat is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        return self._chat

    def _reader(
        self, request: GenerationRequest, prompt: Prompt, segments: list[Segment], seed: str
    ) -> MessageReader | None:
        if not isinstance(prompt, ChatPrompt) or self._chat is None:
            return None
        if request.grammar is not None and not is_forced(prompt.tools):
            return None  # held to a form from its first token: it can neither reason nor call
        return self._chat.reader(prompt, segments, seed)

    def _check_limits(self, request: GenerationRequest) -> None:
        limits = self._limits
        choices = len(request.prompts) * request.n
        most = min(limits.max_n, self._info.slots)
        _at_most(choices, most, "n", "choices at once")
        _at_most(len(request.stop), limits.max_stop, "stop", "stop strings")
        _at_most(max(map(len, request.stop), default=0), limits.max_stop_chars, "stop", "characters in a stop string")
        banned = request.sampling.banned_strings or ()
        _at_most(len(banned), limits.max_banned_strings, "banned_strings", "banned strings")
        _at_most(max(map(len, banned), default=0), limits.max_stop_chars, "banned_strings", "characters in a string")
        _at_most(len(request.sampling.logit_bias or ()), limits.max_logit_bias, "logit_bias", "entries")
        if request.grammar is not None:
            _at_most(len(request.grammar.source), limits.max_grammar_chars, request.grammar.param, "characters")
        if request.logprobs is not None:
            most = min(limits.max_top_logprobs, self._info.max_logprobs)
            chat = isinstance(request.prompts[0], ChatPrompt)
            _at_most(request.logprobs, most, "top_logprobs" if chat else "logprobs", "alternatives")

    def _check_capabilities(self, request: GenerationRequest) -> None:
        can = self._info.capabilities
        sampling = request.sampling
        asked = [name for name in _NEUTRAL if asks_for(name, getattr(sampling, name))]
        asked += ["logprobs"] if request.logprobs is not None else []
        asked += ["ignore_eos"] if request.ignore_eos else []
        asked += ["stop"] if request.stop else []
        param = dict(_PARAM)
        if request.grammar is not None:
            asked.append("grammar")
            param["grammar"] = request.grammar.param
        for name in asked:
            if name not in can:
                raise InvalidRequest(
                    f"This model's engine cannot do {name}. It can do: {', '.join(sorted(can))}.",
                    param=param.get(name, name),
                    code="unsupported_parameter",
                )

    def _check_vocabulary(self, request: GenerationRequest) -> None:
        """Token ids that the model has not: the engine would say so too, but after the headers."""
        if size := self._info.vocab_size:
            for prompt in request.prompts:
                if isinstance(prompt, TokenPrompt):
                    _known(max(prompt.tokens, default=0), size, "prompt")
            _known(max(request.sampling.logit_bias or (0,)), size, "logit_bias")

    def _max_tokens(self, prompt: int, request: GenerationRequest, param: str) -> int:
        if prompt == 0:
            raise InvalidRequest("The prompt is empty.", param=param)
        limit = self._info.context_length
        if prompt >= limit:
            raise ContextLengthExceeded(limit=limit, prompt=prompt, requested=request.max_tokens, param=param)
        if self._limits.max_prompt_tokens is not None:
            _at_most(prompt, self._limits.max_prompt_tokens, param, "prompt tokens")
        own = self._max_tokens_default if request.max_tokens is None else request.max_tokens
        asked = [n for n in (own, self._limits.max_tokens) if n is not None]
        return min([limit - prompt, *asked])

    def _settings(self, request: GenerationRequest) -> StreamSettings:
        seconds = {}
        for name in ("queue", "prefill", "idle", "total"):
            most = getattr(self._timeouts, f"{name}_timeout_max_s")
            value = request.timeouts.get(f"{name}_s", getattr(self._timeouts, f"{name}_timeout_s"))
            _at_most(value, most, f"timeouts.{name}_timeout_s", "seconds")
            seconds[f"{name}_s"] = value
        coalesce_ms = self._stream.coalesce_ms if request.coalesce_ms is None else request.coalesce_ms
        _at_most(coalesce_ms, self._stream.coalesce_max_ms, "coalesce_ms", "milliseconds")
        return StreamSettings(
            timeouts=Timeouts(**seconds),
            window=self._stream.window,
            coalesce_s=coalesce_ms / 1000,
            attendance=self._attendance(request.attendance),
            kept=request.attendance.resumable or request.idempotency_key is not None,
        )

    def _attendance(self, asked: Attendance) -> Attendance:
        replay = self._replay
        grace_s = replay.grace_s if asked.grace_s is None else asked.grace_s
        retention_s = replay.retention_s if asked.retention_s is None else asked.retention_s
        _at_most(grace_s, replay.grace_max_s, "stream_options.grace_s", "seconds")
        _at_most(retention_s, replay.retention_max_s, "stream_options.retention_s", "seconds")
        return Attendance(on_disconnect=asked.on_disconnect, grace_s=grace_s, retention_s=retention_s)


async def _tokens(prompt: Prompt, segments: list[Segment], engine: Engine) -> tuple[int, ...]:
    """The prompt's tokens, out of its segments where it is text."""
    if isinstance(prompt, TokenPrompt):
        return prompt.tokens
    tokens: list[int] = []
    for text, special in segments:
        try:
            tokens += await engine.tokenize(text, special=special)
        except ValueError as exc:
            raise InvalidRequest(str(exc), param=_param(prompt)) from exc
    return tuple(tokens)


def _param(prompt: Prompt) -> str:
    """The field that it came in."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _with_forced_call(request: GenerationRequest) -> GenerationRequest:
    """A call that must be made is what the whole text is: whatever else was asked of its form is asked of content."""
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt) and prompt.tools is not None and is_forced(prompt.tools):
            return replace(request, grammar=call_grammar(prompt.tools))
    return request


def _known(token: int, size: int, param: str) -> None:
    if token >= size:
        raise InvalidRequest(f"{param}: there is no token {token}; this model has 0 to {size - 1}.", param=param)


def _at_most(value: int | float, most: int | float, param: str, what: str) -> None:
    if value > most:
        raise InvalidRequest(f"{param}: {_said(value)} {what} asked for; at most {_said(most)} here.", param=param)


def _said(number: int | float) -> str:
    return f"{number:g}" if isinstance(number, float) else shown(number)


def _for_choice(sampling: Sampling, j: int) -> Sampling:
    """Choice j's own sampling: a seed moves on by j, or n choices would be one text n times."""
    if sampling.seed is None or j == 0:
        return sampling
    changed = {f.name: getattr(sampling, f.name) for f in fields(Sampling)}
    return Sampling(**changed | {"seed": sampling.seed + j})
