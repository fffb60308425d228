"""Fields of OpenAI's and of other servers' that ask for another answer than can be given here.

To ignore them would be to give that other answer without a word. A value that asks for nothing is let through, for many
clients send every parameter.
"""

from __future__ import annotations

from tokenflow.dialects.fields import Fields, as_text, shown, unsupported
from tokenflow.errors import InvalidRequest

_SWITCHES = {
    "echo": "the answer has only what was generated.",
    "include_stop_str_in_output": "a stop string is never sent.",
    "use_beam_search": "answers are drawn; ask for n choices and choose.",
}
_LISTS = {
    "stop_token_ids": "send 'stop', which takes strings.",
    "bad_words": "send 'banned_strings'.",
    "allowed_token_ids": "send 'logit_bias', or say what the answer must match with 'structured_outputs'.",
    "lora": "a model is served as it was loaded.",
}
_NUMBERS = {
    "truncate_prompt_tokens": "a prompt is never cut.",
    "prompt_logprobs": "log-probabilities are only of what was generated.",
}
_OFF: dict[str, tuple[int, str]] = {
    "top_n_sigma": (0, "send 'min_p' or 'top_p'."),
    "dynatemp_range": (0, "the temperature is the same for every token."),
    "min_keep": (1, "what is left to draw from may be one token."),
    "n_indent": (0, "an answer ends where the model ends it; send 'stop'."),
    "t_max_predict_ms": (0, "an answer ends by its tokens; send 'max_tokens'."),
}
"""Numbers of llama-server's, with the largest of each that asks for nothing."""
_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_SAMPLER_LETTERS = "edskypmxt"
"""llama-server's default order of them, by both of the names that it has for each."""


def refuse(fields: Fields) -> None:
    """What any body that generates may ask for in vain.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    for name, why in _SWITCHES.items():
        if fields.boolean(name):
            raise unsupported(name, why)
    for name, why in _LISTS.items():
        if fields.array(name):
            raise unsupported(name, why)
    for name, why in _NUMBERS.items():
        if fields.integer(name) is not None:
            raise unsupported(name, why)
    for name, (most, why) in _OFF.items():
        if (fields.number(name) or 0) > most:
            raise unsupported(name, why)
    _refuse_samplers(fields)
    if fields.integer("min_tokens", least=0):
        raise unsupported("min_tokens", "an answer ends where the model ends it; 'ignore_eos' goes on to max_tokens.")
    if fields.text("suffix"):
        raise unsupported("suffix", "this server does not fill in the middle.")
    _refuse_best_of(fields)


def _refuse_best_of(fields: Fields) -> None:
    best_of = fields.integer("best_of", least=1)
    n = fields.integer("n", least=1) or 1
    if best_of is not None and best_of > n:
        raise unsupported("best_of", "it may not be more than n; ask for n choices and choose.")
    if best_of is not None and best_of < n:
        raise InvalidRequest("'best_of' must be at least 'n'.", param="best_of")


def _refuse_samplers(fields: Fields) -> None:
    """Clients send the default order with every request. Like llama-server, this passes over names it does not know."""
    value = fields.get("samplers")
    known = _SAMPLER_LETTERS if isinstance(value, str) else _SAMPLERS
    asked = value if isinstance(value, str) else fields.array("samplers") or []
    order = [known.index(name) for name in asked if name in known]
    if order != sorted(order):
        raise unsupported("samplers", f"each engine has its own order; only {', '.join(_SAMPLERS)} is let through.")


def refuse_in_chat(fields: Fields) -> None:
    """What a chat may ask for in vain beside that.

    Raises:
        InvalidRequest: with `param` naming the field.
    """
    refuse_in_messages(fields)
    for i, kind in enumerate(fields.array("modalities") or []):
        if as_text(kind, f"modalities[{i}]") != "text":
            raise unsupported("modalities", f"answers are text only; got {shown(kind)}.")
    if fields.object("audio") is not None:
        raise unsupported("audio", "answers are text only.")


def refuse_in_messages(fields: Fields) -> None:
    """What nobody who has messages rendered gets: they go through the model's template."""
    if fields.array("documents"):
        raise unsupported("documents", "templates are given none; put them in a message.")
    if fields.text("chat_template"):
        raise unsupported("chat_template", "messages go through the model's own; /v1/completions takes any text.")
