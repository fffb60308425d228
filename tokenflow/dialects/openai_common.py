"""What chat and plain completions share on the way in: sampling, lengths, stops, streaming, our extensions.

Only the form is judged here, and only what can be judged without a server: how many choices or stop strings a server
grants, and what a model can do, is the service's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenflow.core.types import Attendance, Dry, GenerationRequest, Mirostat, OnDisconnect, Prompt, Sampling, Xtc
from tokenflow.dialects.fields import Fields, as_integer, as_number, as_text, shown, unsupported, wrong_type
from tokenflow.dialects.openai_refused import refuse
from tokenflow.dialects.structured import grammar
from tokenflow.errors import InvalidRequest

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
INT32_MAX = (1 << 31) - 1
MAX_TEMPERATURE = 10
"""Front-ends offer up to 5. Logits are biased before they are divided by it: at 100, a bias of -100 bans nothing."""

MAX_BIAS = 100
MAX_TOKEN_ID = INT32_MAX
"""Engines count tokens in 32 bits. Whether the vocabulary has it is the engine's to say."""

TIMEOUT_KEYS = {
    "queue_timeout_s": "queue_s",
    "prefill_timeout_s": "prefill_s",
    "idle_timeout_s": "idle_s",
    "total_timeout_s": "total_s",
}
"""A request's names (and the configuration's) to those of `core.types.Timeouts`."""

ON_DISCONNECT: dict[str, OnDisconnect] = {"cancel": "cancel", "pause": "pause", "continue": "continue"}

_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


def generation_request(
    fields: Fields, prompts: tuple[Prompt, ...], *, logprobs: int | None, stream: bool | None
) -> GenerationRequest:
    """Everything but the prompt and log-probabilities, which each dialect spells in its own way.

    Args:
        stream: what the route says; None: the body says.
    """
    refuse(fields)
    asked = fields.boolean("stream")
    streaming = bool(asked) if stream is None else stream
    include_usage, attending = _stream_options(fields, streaming)
    return GenerationRequest(
        model=fields.text("model") or "",
        prompts=prompts,
        n=fields.integer("n", least=1) or 1,
        max_tokens=_max_tokens(fields),
        sampling=_sampling(fields),
        stop=_strings(fields, "stop") or (),
        logprobs=logprobs,
        ignore_eos=fields.boolean("ignore_eos") or False,
        grammar=grammar(fields),
        stream=streaming,
        include_usage=include_usage,
        coalesce_ms=fields.integer("coalesce_ms", least=0),
        timeouts=_timeouts(fields),
        attendance=attending,
    )


def _max_tokens(fields: Fields) -> int | None:
    # A huge one is no error: the server clamps it. Every name is checked; OpenAI's newer one counts first.
    old = _limit(fields, "max_tokens")
    new = _limit(fields, "max_completion_tokens")
    theirs = _limit(fields, "n_predict")
    if new is not None:
        return new
    return theirs if old is None else old


def _limit(fields: Fields, name: str) -> int | None:
    """As llama-server has it, -1 is no limit: more than any context, for what is unsaid has a default."""
    limit = fields.integer(name, least=-1)
    if limit == 0:
        raise InvalidRequest(f"'{name}' must be at least 1, or -1 for no limit; got 0.", param=name)
    return INT32_MAX if limit == -1 else limit


def _sampling(fields: Fields) -> Sampling:
    top_k = fields.integer("top_k", least=-1, most=INT64_MAX)
    alias = fields.number("repeat_penalty", above=0)
    penalty = fields.number("repetition_penalty", above=0)
    seed = fields.integer("seed", least=INT64_MIN, most=INT64_MAX)
    return Sampling(
        temperature=fields.number("temperature", least=0, most=MAX_TEMPERATURE),
        top_k=_top_k(top_k),
        top_p=fields.number("top_p", above=0, most=1),
        min_p=fields.number("min_p", least=0, most=1),
        typical_p=fields.number("typical_p", above=0, most=1),
        xtc=_xtc(fields),
        dry=_dry(fields),
        mirostat=_mirostat(fields),
        repetition_penalty=alias if penalty is None else penalty,
        frequency_penalty=fields.number("frequency_penalty", least=-2, most=2),
        presence_penalty=fields.number("presence_penalty", least=-2, most=2),
        seed=None if seed == -1 else seed,  # -1 is how other servers spell "by chance"
        logit_bias=_logit_bias(fields),
        banned_strings=_strings(fields, "banned_strings", "ban everything") or None,
    )


def _top_k(asked: int | None) -> int | None:
    """-1 is how other servers spell "all"; so is what is more than any vocabulary, and more than engines can count."""
    return 0 if asked == -1 or (asked or 0) > INT32_MAX else asked


def _xtc(fields: Fields) -> Xtc | None:
    probability = fields.number("xtc_probability", least=0, most=1)
    threshold = fields.number("xtc_threshold", least=0, most=1)
    return Xtc(probability=probability, **_given(threshold=threshold)) if probability else None


def _dry(fields: Fields) -> Dry | None:
    multiplier = fields.number("dry_multiplier", least=0)
    given = _given(
        base=fields.number("dry_base", least=1),
        allowed_length=fields.integer("dry_allowed_length", least=1, most=INT32_MAX),
        range_tokens=fields.integer("dry_range", least=0, most=INT32_MAX),
        sequence_breakers=_strings(fields, "dry_sequence_breakers", "break everything"),
    )
    return Dry(multiplier=multiplier, **given) if multiplier else None


def _mirostat(fields: Fields) -> Mirostat | None:
    ours, alias = fields.integer("mirostat", least=0), fields.integer("mirostat_mode", least=0)
    version = alias if ours is None else ours
    tau = fields.number("mirostat_tau", above=0) if version else fields.number("mirostat_tau", least=0)
    given = _given(tau=tau, eta=fields.number("mirostat_eta", least=0))
    if version not in (None, 0, 2):
        name = "mirostat_mode" if ours is None else "mirostat"
        raise unsupported(name, "only version 2 of it is done here; 0 is off.")
    return Mirostat(**given) if version else None


def _given(**values: Any) -> dict[str, Any]:
    """Those that are given; the others have a default of their own."""
    return {name: value for name, value in values.items() if value is not None}


def _logit_bias(fields: Fields) -> Mapping[int, float] | None:
    value = fields.get("logit_bias")
    if isinstance(value, list):
        return dict(_biased(pair, f"logit_bias[{i}]") for i, pair in enumerate(value)) or None
    table = fields.object("logit_bias")
    if table is None:
        return None
    bias = {}
    for key in table:
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("'logit_bias' maps token ids, written as strings, to numbers.", param="logit_bias")
        bias[int(key)] = as_number(table.get(key), f"logit_bias.{key}", least=-MAX_BIAS, most=MAX_BIAS)
    return bias or None


def _biased(pair: object, path: str) -> tuple[int, float]:
    """A token and its bias, as llama-server has them: `false` bans it."""
    if not isinstance(pair, list) or len(pair) != 2:
        raise wrong_type(path, "an array of a token id and a number", pair)
    token = as_integer(pair[0], f"{path}[0]", least=0, most=MAX_TOKEN_ID)
    return token, -MAX_BIAS if pair[1] is False else as_number(pair[1], f"{path}[1]", least=-MAX_BIAS, most=MAX_BIAS)


def _strings(fields: Fields, name: str, empty: str | None = None) -> tuple[str, ...] | None:
    """One string or several. `empty` says what an empty one would do, and so is refused; None: it is left out."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        strings = [_string(value, name, empty)]
    elif isinstance(value, list):
        strings = [_string(item, f"{name}[{i}]", empty) for i, item in enumerate(value)]
    else:
        raise wrong_type(name, "a string or an array of strings", value)
    return tuple(text for text in strings if text)


def _string(value: object, path: str, empty: str | None) -> str:
    text = as_text(value, path)
    if not text and empty is not None:
        raise InvalidRequest(f"'{path}' is an empty string, which would {empty}.", param=path)
    return text


def _stream_options(fields: Fields, streaming: bool) -> tuple[bool, Attendance]:
    options = fields.object("stream_options")
    if options is None:
        return False, Attendance()
    if not streaming:
        raise InvalidRequest("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    return options.boolean("include_usage") or False, attendance(options, "cancel")


def attendance(options: Fields, default: OnDisconnect) -> Attendance:
    """`on_disconnect`, `grace_s` and `retention_s`, wherever a dialect has them."""
    choice = options.text("on_disconnect") or default
    if choice not in ON_DISCONNECT:
        path = options.path("on_disconnect")
        raise InvalidRequest(f"'{path}' is one of {', '.join(ON_DISCONNECT)}, not {shown(choice)}.", param=path)
    return Attendance(
        on_disconnect=ON_DISCONNECT[choice],
        grace_s=options.number("grace_s", least=0),
        retention_s=options.number("retention_s", least=0),
    )


def _timeouts(fields: Fields) -> Mapping[str, float]:
    table = fields.object("timeouts")
    if table is None:
        return {}
    unknown = [key for key in table if key not in TIMEOUT_KEYS]
    if unknown:
        raise InvalidRequest(f"'timeouts' has an unknown key; it takes {', '.join(TIMEOUT_KEYS)}.", param="timeouts")
    read = {ours: table.number(theirs, above=0) for theirs, ours in TIMEOUT_KEYS.items()}
    return {key: seconds for key, seconds in read.items() if seconds is not None}
