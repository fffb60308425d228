"""The keys of `[models.<id>]` with `engine = "synthetic"`, and the directives by which a prompt changes some of them.

A directive is `{"synthetic": {"raise_at": 3}}` anywhere in the prompt's text, so that any client can send it, in a
message or a plain prompt; the last one counts. They are off by default: they can break the engine, by design.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt

from tokenflow.api import InvalidRequest

Count = Annotated[int, Ge(1)]
At = Annotated[int, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """How fast, how much, and what goes wrong."""

    slots: Count = 4
    """Sequences decoded at once."""
    context_length: Count = 8192
    """Tokens of prompt and completion together."""
    prefill_ms: Annotated[float, Ge(0)] = 0.0
    """Every prefill takes this long."""
    prefill_tokens_per_s: Annotated[float, Gt(0)] | None = None
    """And this much more by its length; unset: none."""
    tokens_per_s: Annotated[float, Gt(0)] | None = None
    """Tokens a second in each sequence; unset: as fast as the machine can."""
    tokens_per_step: Count = 1
    """Tokens that come at once, as with speculative decoding."""
    text: str | None = None
    """Say this, then stop; unset: words drawn by the hash of the prompt."""
    one_byte: bool = False
    """Each token is one byte of the text, so that characters come in parts."""
    stop_at: At | None = None
    """Stop by itself after this many tokens (`ignore_eos` goes on)."""
    raise_in_add: bool = False
    """Planned fault: refuse the sequence before it has a slot."""
    raise_at: At | None = None
    """Planned fault: after this many tokens the sequence fails, alone. 0: before the first."""
    break_at: At | None = None
    """Planned fault: after this many tokens the step raises, and every sequence that holds a slot fails."""
    hang_at: At | None = None
    """Planned fault: after this many tokens the sequence makes no more, while the others go on."""
    wedge_at: At | None = None
    """Planned fault: after this many tokens the whole engine hangs in its step and answers nobody."""
    directives: bool = False
    """Prompts may say `{"synthetic": {"raise_at": 3}}` to set, for themselves, any key that is not about the engine."""


_MARK = '{"synthetic":'


def plan(config: SyntheticConfig, prompt: str) -> SyntheticConfig:
    """What holds for one prompt: the config, changed by the prompt's directive where that is allowed.

    Raises:
        InvalidRequest: a directive that does not hold.
    """
    at = prompt.rfind(_MARK) if config.directives else -1
    if at < 0:
        return config
    try:
        value, _ = json.JSONDecoder().raw_decode(prompt, at)
        return replace(config, **_checked(value["synthetic"]))
    except (ValueError, TypeError) as exc:
        raise InvalidRequest(f"The prompt's directive does not hold: {exc}.", param="prompt") from exc


def _checked(directive: dict[str, Any]) -> dict[str, Any]:
    for key, value in directive.items():
        if key not in _PER_PROMPT:
            raise ValueError(f"there is no key {key!r}; there are {', '.join(sorted(_PER_PROMPT))}")
        kinds, least = _PER_PROMPT[key]
        if isinstance(value, bool) is not (kinds is bool) or not isinstance(value, kinds):
            raise ValueError(f"{key} cannot be {value!r}")
        if least is not None and value < least:
            raise ValueError(f"{key} must be at least {least}, not {value!r}")
    return directive


_PER_PROMPT: dict[str, tuple[Any, float | None]] = {
    "prefill_ms": (int | float, 0),
    "prefill_tokens_per_s": (int | float, 0.001),
    "tokens_per_s": (int | float, 0.001),
    "tokens_per_step": (int, 1),
    "text": (str, None),
    "one_byte": (bool, None),
    "stop_at": (int, 0),
    "raise_in_add": (bool, None),
    "raise_at": (int, 0),
    "break_at": (int, 0),
    "hang_at": (int, 0),
    "wedge_at": (int, 0),
}
"""Keys that a directive may set: the type, and the least value."""
