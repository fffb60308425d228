"""Bodies: what is taken, and what is refused by which name. Nothing but `InvalidRequest` ever comes out."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.core.types import (
    ChatPrompt,
    Dry,
    GenerationRequest,
    Mirostat,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Xtc,
)
from tokenflow.dialects import openai_chat, openai_completions, small, tokens
from tokenflow.errors import InvalidRequest

USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER]}
TEXT = {"prompt": "Once"}
SAID = {"role": "assistant", "content": "So"}
CALLED = {"tool_calls": [{"function": {"name": "f"}}]}
TOOL = {"type": "function", "function": {"name": "f", "description": "D"}}


def chat(**fields) -> GenerationRequest:
    return openai_chat.parse(json.dumps(CHAT | fields).encode())


def completions(**fields) -> GenerationRequest:
    return openai_completions.parse(json.dumps(TEXT | fields).encode())


def refusal(parse, body) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status_hint == 400
    assert caught.value.message.encode()  # can be written
    return caught.value.param, caught.value.code


# --- what is taken --------------------------------------------------------------------------------------------------


def test_the_least_chat():
    assert chat() == GenerationRequest(
        model="", prompts=(ChatPrompt(messages=({"role": "user", "content": "Hi"},)),), sampling=Sampling()
    )


def test_the_least_completion():
    assert completions() == GenerationRequest(model="", prompts=(TextPrompt(text="Once", special=True),))


ALL = {
    "model": "m",
    "n": 2,
    "max_tokens": 7,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 40,
    "min_p": 0.1,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2,
    "dry_allowed_length": 3,
    "dry_range": 512,
    "dry_sequence_breakers": ["\n"],
    "mirostat": 2,
    "mirostat_tau": 4,
    "mirostat_eta": 0.2,
    "banned_strings": ["shivers", "spine"],
    "repetition_penalty": 1.1,
    "frequency_penalty": -2,
    "presence_penalty": 2.0,
    "seed": -(1 << 63),
    "logit_bias": {"50256": -100, "7": 0.5},
    "stop": ["a", "b"],
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "coalesce_ms": 20,
    "timeouts": {"queue_timeout_s": 1, "prefill_timeout_s": 2, "idle_timeout_s": 3.5, "total_timeout_s": None},
}


@pytest.mark.parametrize("parse", [chat, completions])
def test_every_shared_field(parse):
    request = parse(**ALL)
    assert (request.model, request.n, request.max_tokens) == ("m", 2, 7)
    assert request.sampling == Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        typical_p=0.9,
        xtc=Xtc(probability=0.5, threshold=0.2),
        dry=Dry(multiplier=0.8, base=2.0, allowed_length=3, range_tokens=512, sequence_breakers=("\n",)),
        mirostat=Mirostat(tau=4.0, eta=0.2),
        banned_strings=("shivers", "spine"),
        repetition_penalty=1.1,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        seed=-(1 << 63),
        logit_bias={50256: -100.0, 7: 0.5},
    )
    assert request.stop == ("a", "b")
    assert request.ignore_eos and request.stream and request.include_usage
    assert request.coalesce_ms == 20
    assert request.timeouts == {"queue_s": 1.0, "prefill_s": 2.0, "idle_s": 3.5}


@pytest.mark.parametrize("parse", [chat, completions])
def test_other_spellings(parse):
    assert parse(stop="x").stop == ("x",)
    assert parse(stop=[]).stop == parse(stop="").stop == parse(stop=[""]).stop == ()
    assert parse(stop=["", "x", ""]).stop == ("x",)
    assert parse(top_k=-1).sampling.top_k == 0
    assert parse(top_k=1 << 31).sampling.top_k == 0
    assert parse(top_k=(1 << 31) - 1).sampling.top_k == (1 << 31) - 1
    assert parse(repeat_penalty=1.5).sampling.repetition_penalty == 1.5
    assert parse(repeat_penalty=1.5, repetition_penalty=1.2).sampling.repetition_penalty == 1.2
    assert parse(max_completion_tokens=5).max_tokens == 5
    assert parse(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert parse(n_predict=5).max_tokens == 5
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        assert parse(**{name: -1}).max_tokens == (1 << 31) - 1  # said, so that no default of the model's counts
    assert parse(n_predict=5, max_tokens=9).max_tokens == parse(n_predict=-1, max_completion_tokens=9).max_tokens == 9
    assert parse(max_tokens=10**9).max_tokens == 10**9
    assert parse(logit_bias={}).sampling.logit_bias is None
    assert parse(logit_bias=[[5, 1.5], [7.0, False]]).sampling.logit_bias == {5: 1.5, 7: -100}
    assert parse(mirostat_mode=2) == parse(mirostat=2) == parse(mirostat=2, mirostat_mode=0)
    assert parse(mirostat_mode=0) == parse()
    assert parse(temperature=10).sampling.temperature == 10
    assert parse(logit_bias=[], grammar="", mirostat=0, mirostat_tau=0) == parse(), "llama-server's defaults"
    assert parse(stream=True, stream_options={}).include_usage is False
    assert parse(nobody_knows=[{"this": "field"}], metadata=7, user=7).n == 1


@pytest.mark.parametrize("parse", [chat, completions])
def test_a_whole_number_is_an_integer_however_it_is_written(parse):
    names = ("n", "max_tokens", "max_completion_tokens", "n_predict", "top_k", "seed", "coalesce_ms")
    for name in names:
        assert repr(parse(**{name: 3.0})) == repr(parse(**{name: 3}))
    assert parse(seed=-0.0).sampling.seed == 0
    assert parse(seed=-1) == parse(seed=-1.0) == parse(), "by chance, as other servers have it"
    assert parse(max_tokens=1e30).max_tokens == int(1e30)
    assert parse(mirostat=2.0).sampling.mirostat == Mirostat()
    assert repr(parse(dry_multiplier=1, dry_range=8.0)) == repr(parse(dry_multiplier=1, dry_range=8))
    assert refusal(openai_chat.parse, b'{"messages":[{"role":"user","content":""}],"n":1e999}') == ("n", TYPE)


@pytest.mark.parametrize("parse", [chat, completions])
def test_samplers_of_several_fields(parse):
    """They are on by the field that says how much, and the others have defaults."""
    off = parse(xtc_probability=0, xtc_threshold=0.3, dry_multiplier=0, dry_base=3, mirostat=0, mirostat_tau=1)
    assert off.sampling == parse(banned_strings=[]).sampling == Sampling()
    on = parse(xtc_probability=1, dry_multiplier=1, dry_sequence_breakers=[], mirostat=2, banned_strings="x").sampling
    assert on.xtc == Xtc(probability=1.0, threshold=0.1)
    assert on.dry == Dry(multiplier=1.0, base=1.75, allowed_length=2, range_tokens=0, sequence_breakers=())
    assert on.mirostat == Mirostat(tau=5.0, eta=0.1)
    assert on.banned_strings == ("x",)


def test_the_route_can_settle_whether_it_streams():
    body = json.dumps(CHAT | {"stream_options": {"include_usage": True}}).encode()
    assert openai_chat.parse(body, stream=True).include_usage
    assert not openai_chat.parse(json.dumps(CHAT | {"stream": True}).encode(), stream=False).stream
    assert openai_completions.parse(json.dumps(TEXT).encode(), stream=True).stream


def test_a_body_may_have_been_read_already():
    assert openai_chat.parse(CHAT) == chat()
    assert openai_completions.parse(bytearray(b'{"prompt":"Once"}')) == completions()


def test_chat_logprobs():
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).logprobs == 5
    assert chat(logprobs=False).logprobs is None
    assert completions(logprobs=0).logprobs == 0
    assert completions(logprobs=5).logprobs == 5


def test_messages():
    (prompt,) = chat(
        messages=[
            {"role": "developer", "content": "S"},
            {"role": "user", "content": "", "name": "Ann", "unknown": {"a": 1}},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
            {"role": "function", "name": "f", "content": "5"},
            {"role": "user", "content": "no calls", "tool_calls": None},
        ]
    ).prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "", "name": "Ann"},
        {"role": "assistant", "content": "ab"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "5", "name": "f"},
        {"role": "user", "content": "no calls"},
    )


def said(**message) -> object:
    (prompt,) = chat(messages=[{"role": "assistant"} | message]).prompts
    return dict(prompt.messages[0])


def test_what_an_assistant_refused_with_is_what_it_said():
    """Clients send an answer back as they got it."""
    refused = {"role": "assistant", "content": "No."}
    assert said(content=[{"type": "refusal", "refusal": "No."}]) == refused
    assert said(content=[{"type": "text", "text": "N"}, {"type": "refusal", "refusal": "o."}]) == refused
    assert said(content=None, refusal="No.") == said(refusal="No.") == said(content="", refusal="No.") == refused
    assert said(content=[], refusal="No.") == refused
    assert said(content="No.", refusal=None) == said(content="No.", refusal="") == refused
    assert said(content="", refusal=None) == said(content="", refusal="") == {"role": "assistant", "content": ""}
    assert chat(messages=[USER | {"refusal": 7}]) == chat(), "nobody else refuses"


def test_tools():
    (prompt,) = chat(
        tools=[TOOL, {"type": "function", "function": {"parameters": {"a": 1}, "name": "g", "strict": True}}],
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False, "left_out": None},
        reasoning_effort="low",
    ).prompts
    assert prompt.tools.functions == (TOOL, {"type": "function", "function": {"parameters": {"a": 1}, "name": "g"}})
    assert list(prompt.tools.functions[1]["function"]) == ["parameters", "name"], "in the client's order"
    assert (prompt.tools.choice, prompt.tools.parallel) == ("auto", False)
    assert (prompt.variables, prompt.reasoning_effort) == ({"enable_thinking": False}, "low")


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tool_choice(choice):
    assert chat(tools=[TOOL], tool_choice=choice).prompts[0].tools.choice == choice


def test_one_tool_may_be_named():
    other = {"type": "function", "function": {"name": "g"}}
    named = {"type": "function", "function": {"name": "g"}}
    tools = chat(tools=[TOOL, other], tool_choice=named).prompts[0].tools
    assert (tools.functions, tools.choice) == ((other,), "named")


def test_schemas_nested_beyond_reason_are_refused():
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    body = b'{"messages":[{"role":"user","content":""}],"tools":[{"type":"function","function":{"name":"f",'
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        openai_chat.parse(body + b'"parameters":' + deep + b"}}]}")


def test_a_schema_that_arguments_are_held_to_is_not_nested_beyond_reason():
    deep: dict[str, object] = {"a": 1}
    for _ in range(70):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "g", "parameters": deep}}
    assert chat(tools=[TOOL, tool]).prompts[0].tools.functions[1] == tool
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        with pytest.raises(InvalidRequest, match="levels deep") as caught:
            chat(tools=[TOOL, tool], tool_choice=choice)
        assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_body_full_of_tools_takes_no_longer_each(choice):
    """Everybody else waits while a body is read."""

    def seconds(count: int) -> float:
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
        body = json.dumps(
            {"messages": [{"role": "user", "content": ""}], "tools": tools, "tool_choice": choice}
        ).encode()
        began = time.perf_counter()
        openai_chat.parse(body)
        return time.perf_counter() - began

    assert min(seconds(16_000) for _ in range(3)) < 24 * min(seconds(2_000) for _ in range(3))


def test_prompts():
    assert completions(prompt=["a", "b"]).prompts == tuple(TextPrompt(text=text, special=True) for text in "ab")
    assert completions(prompt=[1, 0, 3]).prompts == (TokenPrompt(tokens=(1, 0, 3)),)
    assert completions(prompt=[1.0, 2]).prompts == (TokenPrompt(tokens=(1, 2)),)
    assert completions(prompt=[[1], [2, 3]]).prompts == (TokenPrompt(tokens=(1,)), TokenPrompt(tokens=(2, 3)))
    whole_pair = "a\ud83d\ude00"
    assert completions(prompt=whole_pair).prompts == (TextPrompt(text="a\U0001f600", special=True),)


def test_how_a_raw_text_is_read():
    """As it is written, unless it is said that it is no more than text; the small dialect's always is."""
    plain = TextPrompt(text="Once")
    assert completions(parse_special=False).prompts == (plain,)
    assert completions(parse_special=True).prompts == (replace(plain, special=True),)
    for name in ("add_special", "add_special_tokens"):
        assert completions(**{name: False}).prompts == (replace(plain, special=True, begins=False),)
        assert completions(**{name: True}) == completions()
    assert small.parse_generate(TEXT).prompts == small.parse_query(TEXT).prompts == (plain,)


def test_how_messages_end():
    said = {"messages": [USER, SAID]}
    for fields, ending in (
        ({}, "opening"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "opening"),
        ({"add_generation_prompt": False}, "closed"),
        ({"continue_final_message": True}, "continued"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continued"),
    ):
        [prompt] = chat(**said, **fields).prompts
        assert isinstance(prompt, ChatPrompt) and prompt.ending == ending
        assert tokens.parse_tokenize(said | fields).prompt == prompt


def test_what_asks_for_nothing_is_no_matter():
    chat(tools=[], functions=[], tool_choice="none", function_call="auto", response_format={"type": "text"})
    chat(continue_final_message=False, add_generation_prompt=True, modalities=["text"])
    chat(modalities=[])
    for parse in (chat, completions):
        assert parse(skip_special_tokens=False) == parse()
        assert (
            parse(echo=False, suffix="", best_of=1, use_beam_search=False, include_stop_str_in_output=False) == parse()
        )
        assert parse(stop_token_ids=[], bad_words=[], allowed_token_ids=[], min_tokens=0) == parse()
        assert parse(n=3, best_of=3) == parse(n=3)
        assert parse(top_n_sigma=-1, dynatemp_range=0, dynatemp_exponent=1, min_keep=0, n_indent=0) == parse()
        assert parse(top_n_sigma=0, min_keep=1, t_max_predict_ms=-1, lora=[], samplers=[]) == parse()
        assert parse(length_penalty=0.5) == parse(), "it is of beam search alone, which is refused"
    assert chat(documents=[], chat_template="") == chat()


@pytest.mark.parametrize(
    "samplers",
    [
        "edskypmxt",
        "kypmt",
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"],
        ["dry", "top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"],
    ],
)
def test_the_order_of_samplers_that_clients_send_by_default(samplers):
    assert chat(samplers=samplers) == chat()


# --- what is refused ------------------------------------------------------------------------------------------------

VALUE, TYPE, MISSING = "invalid_value", "invalid_type", "missing_required_parameter"
JSON, UNSUPPORTED = "invalid_json", "unsupported_parameter"

ANY_BODY = [
    (b"", None, JSON),
    (b"{", None, JSON),
    (b'{"a":1}x', None, JSON),
    (b"{'a':1}", None, JSON),
    (b'\xef\xbb\xbf{"a":1}', None, JSON),
    (b'{"a":"\xff"}', None, JSON),
    (b'{"a":"\xed\xa0\x80"}', None, JSON),
    (b'{"a":NaN}', None, JSON),
    (b'{"a":-Infinity}', None, JSON),
    (b'{"a":' + b"9" * 5000 + b"}", None, JSON),
    (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", None, JSON),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, None, JSON),
    (b"null", None, TYPE),
    (b"[]", None, TYPE),
    (b'"{}"', None, TYPE),
    (b"7", None, TYPE),
    (b"true", None, TYPE),
]

SHARED = [
    ({"model": 7}, "model", TYPE),
    ({"model": "\ud800"}, "model", VALUE),
    ({"n": 0}, "n", VALUE),
    ({"n": True}, "n", TYPE),
    ({"n": 1.5}, "n", TYPE),
    ({"n": 0.0}, "n", VALUE),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": -2}, "max_tokens", VALUE),
    ({"max_tokens": "5"}, "max_tokens", TYPE),
    ({"max_tokens": 1.5}, "max_tokens", TYPE),
    ({"max_completion_tokens": 0}, "max_completion_tokens", VALUE),
    ({"max_completion_tokens": 1, "max_tokens": []}, "max_tokens", TYPE),
    ({"n_predict": 0}, "n_predict", VALUE),
    ({"n_predict": -2}, "n_predict", VALUE),
    ({"n_predict": "5", "max_tokens": 7}, "n_predict", TYPE),
    ({"temperature": -0.1}, "temperature", VALUE),
    ({"temperature": 10.1}, "temperature", VALUE),
    ({"temperature": "hot"}, "temperature", TYPE),
    ({"temperature": False}, "temperature", TYPE),
    ({"temperature": 10**400}, "temperature", VALUE),
    ({"top_p": 0}, "top_p", VALUE),
    ({"top_p": 1.01}, "top_p", VALUE),
    ({"top_k": -2}, "top_k", VALUE),
    ({"top_k": 1 << 63}, "top_k", VALUE),
    ({"min_p": 1.5}, "min_p", VALUE),
    ({"typical_p": 0}, "typical_p", VALUE),
    ({"xtc_probability": 1.1}, "xtc_probability", VALUE),
    ({"xtc_threshold": -1}, "xtc_threshold", VALUE),
    ({"dry_multiplier": -1}, "dry_multiplier", VALUE),
    ({"dry_base": 0.5}, "dry_base", VALUE),
    ({"dry_allowed_length": 0}, "dry_allowed_length", VALUE),
    ({"dry_range": 1 << 31}, "dry_range", VALUE),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]", VALUE),
    ({"mirostat": 1}, "mirostat", UNSUPPORTED),
    ({"mirostat": True}, "mirostat", TYPE),
    ({"mirostat_mode": 1}, "mirostat_mode", UNSUPPORTED),
    ({"mirostat": 2, "mirostat_mode": "2"}, "mirostat_mode", TYPE),
    ({"mirostat": 2, "mirostat_tau": 0}, "mirostat_tau", VALUE),
    ({"mirostat_eta": -0.1}, "mirostat_eta", VALUE),
    ({"banned_strings": ["a", 7]}, "banned_strings[1]", TYPE),
    ({"banned_strings": ""}, "banned_strings", VALUE),
    ({"repetition_penalty": 0}, "repetition_penalty", VALUE),
    ({"repeat_penalty": "x"}, "repeat_penalty", TYPE),
    ({"frequency_penalty": 2.5}, "frequency_penalty", VALUE),
    ({"presence_penalty": -3}, "presence_penalty", VALUE),
    ({"seed": 1 << 63}, "seed", VALUE),
    ({"seed": 10**4000}, "seed", VALUE),
    ({"seed": 1e300}, "seed", VALUE),
    ({"seed": 1.5}, "seed", TYPE),
    ({"logit_bias": 5}, "logit_bias", TYPE),
    ({"logit_bias": [5, 1]}, "logit_bias[0]", TYPE),
    ({"logit_bias": [[5, 1], [5]]}, "logit_bias[1]", TYPE),
    ({"logit_bias": [["a", 1]]}, "logit_bias[0][0]", TYPE),
    ({"logit_bias": [[-1, 1]]}, "logit_bias[0][0]", VALUE),
    ({"logit_bias": [[5, True]]}, "logit_bias[0][1]", TYPE),
    ({"logit_bias": [[5, -101]]}, "logit_bias[0][1]", VALUE),
    ({"logit_bias": {"a": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"-1": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"١": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", VALUE),
    ({"logit_bias": {"5": None}}, "logit_bias.5", TYPE),
    ({"stop": 7}, "stop", TYPE),
    ({"stop": ["a", 7]}, "stop[1]", TYPE),
    ({"stop": ["a", None]}, "stop[1]", TYPE),
    ({"stop": ["\udc00"]}, "stop[0]", VALUE),
    ({"ignore_eos": 1}, "ignore_eos", TYPE),
    ({"stream": "true"}, "stream", TYPE),
    ({"stream": 1}, "stream", TYPE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    ({"stream": False, "stream_options": {}}, "stream_options", VALUE),
    ({"stream": True, "stream_options": True}, "stream_options", TYPE),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", TYPE),
    ({"coalesce_ms": -1}, "coalesce_ms", VALUE),
    ({"coalesce_ms": 2.5}, "coalesce_ms", TYPE),
    ({"timeouts": 5}, "timeouts", TYPE),
    ({"timeouts": {"idle": 5}}, "timeouts", VALUE),
    ({"timeouts": {"idle_timeout_s": 0}}, "timeouts.idle_timeout_s", VALUE),
    ({"timeouts": {"idle_timeout_s": "5"}}, "timeouts.idle_timeout_s", TYPE),
    ({"echo": True}, "echo", UNSUPPORTED),
    ({"echo": 0}, "echo", TYPE),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"suffix": 7}, "suffix", TYPE),
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"best_of": 1, "n": 2}, "best_of", VALUE),
    ({"best_of": 0}, "best_of", VALUE),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", UNSUPPORTED),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", TYPE),
    ({"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
    ({"use_beam_search": "yes"}, "use_beam_search", TYPE),
    ({"stop_token_ids": [7]}, "stop_token_ids", UNSUPPORTED),
    ({"stop_token_ids": 7}, "stop_token_ids", TYPE),
    ({"bad_words": ["x"]}, "bad_words", UNSUPPORTED),
    ({"bad_words": "x"}, "bad_words", TYPE),
    ({"allowed_token_ids": [7]}, "allowed_token_ids", UNSUPPORTED),
    ({"allowed_token_ids": {}}, "allowed_token_ids", TYPE),
    ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens", UNSUPPORTED),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", TYPE),
    ({"prompt_logprobs": 0}, "prompt_logprobs", UNSUPPORTED),
    ({"prompt_logprobs": "1"}, "prompt_logprobs", TYPE),
    ({"min_tokens": 1}, "min_tokens", UNSUPPORTED),
    ({"min_tokens": -1}, "min_tokens", VALUE),
    ({"min_tokens": "1"}, "min_tokens", TYPE),
    ({"top_n_sigma": 1}, "top_n_sigma", UNSUPPORTED),
    ({"top_n_sigma": "0"}, "top_n_sigma", TYPE),
    ({"dynatemp_range": 0.5}, "dynatemp_range", UNSUPPORTED),
    ({"min_keep": 2}, "min_keep", UNSUPPORTED),
    ({"n_indent": 4}, "n_indent", UNSUPPORTED),
    ({"t_max_predict_ms": 100}, "t_max_predict_ms", UNSUPPORTED),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora", UNSUPPORTED),
    ({"samplers": ["temperature", "top_p"]}, "samplers", UNSUPPORTED),
    ({"samplers": "tkp"}, "samplers", UNSUPPORTED),
    ({"samplers": 7}, "samplers", TYPE),
]

CHAT_ONLY = [
    ({"messages": None}, "messages", MISSING),
    ({"messages": []}, "messages", VALUE),
    ({"messages": "Hi"}, "messages", TYPE),
    ({"messages": {}}, "messages", TYPE),
    ({"messages": [[]]}, "messages[0]", TYPE),
    ({"messages": [USER, None]}, "messages[1]", TYPE),
    ({"messages": [{}]}, "messages[0].role", MISSING),
    ({"messages": [{"role": 7, "content": ""}]}, "messages[0].role", TYPE),
    ({"messages": [{"role": "root\ud800"[:4], "content": ""}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": "x" * 5000, "content": ""}]}, "messages[0].role", VALUE),
    ({"messages": [{"role": "user"}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content", TYPE),
    ({"messages": [USER, {"role": "user", "content": 7}]}, "messages[1].content", TYPE),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", VALUE),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", TYPE),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type", MISSING),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", MISSING),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", UNSUPPORTED),
    ({"messages": [{"role": "assistant", "refusal": ""}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "assistant", "refusal": 7}]}, "messages[0].refusal", TYPE),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
        "messages[0].content[0].refusal",
        MISSING,
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 7}]}]},
        "messages[0].content[0].refusal",
        TYPE,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}]},
        "messages[0].content[0].type",
        UNSUPPORTED,
    ),
    ({"messages": [USER | {"name": 7}]}, "messages[0].name", TYPE),
    ({"messages": [{"role": "tool", "content": "", "tool_call_id": 7}]}, "messages[0].tool_call_id", TYPE),
    ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, "messages[0].tool_calls[0]", TYPE),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function", MISSING),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
        UNSUPPORTED,
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
        MISSING,
    ),
    ({"logprobs": 1}, "logprobs", TYPE),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", TYPE),
    ({"top_logprobs": 1}, "top_logprobs", VALUE),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs", VALUE),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": {}}, "tools", TYPE),
    ({"tools": [7]}, "tools[0]", TYPE),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", MISSING),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", MISSING),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", VALUE),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", VALUE),
    ({"tools": [TOOL | {"function": {"name": "f", "parameters": 7}}]}, "tools[0].function.parameters", TYPE),
    ({"tools": [TOOL | {"function": {"name": "f", "strict": 7}}]}, "tools[0].function.strict", TYPE),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"function_call": {"name": "f"}}, "function_call", UNSUPPORTED),
    ({"function_call": 7}, "function_call", TYPE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice", VALUE),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name", MISSING),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", UNSUPPORTED),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name", VALUE),
    ({"tool_choice": 7}, "tool_choice", TYPE),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", TYPE),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", TYPE),
    ({"reasoning_effort": 3}, "reasoning_effort", TYPE),
    ({"continue_final_message": True}, "messages[0].role", VALUE),
    ({"continue_final_message": True, "messages": [USER, SAID | {"content": " \n"}]}, "messages[1].content", VALUE),
    ({"continue_final_message": True, "messages": [USER, SAID | CALLED]}, "messages[1].role", VALUE),
    (
        {"continue_final_message": True, "messages": [USER, SAID], "tools": [TOOL], "tool_choice": "required"},
        "tool_choice",
        VALUE,
    ),
    (
        {"continue_final_message": True, "messages": [USER, SAID], "add_generation_prompt": True},
        "add_generation_prompt",
        VALUE,
    ),
    ({"continue_final_message": 1}, "continue_final_message", TYPE),
    ({"add_generation_prompt": 0}, "add_generation_prompt", TYPE),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"modalities": ["text", 7]}, "modalities[1]", TYPE),
    ({"modalities": "audio"}, "modalities", TYPE),
    ({"documents": [{"text": "a"}]}, "documents", UNSUPPORTED),
    ({"documents": "a"}, "documents", TYPE),
    ({"chat_template": "{{ messages }}"}, "chat_template", UNSUPPORTED),
    ({"audio": {"voice": "ash", "format": "mp3"}}, "audio", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
    ({"audio": "mp3"}, "audio", TYPE),
]

COMPLETIONS_ONLY = [
    ({"parse_special": 1}, "parse_special", TYPE),
    ({"prompt": [1], "add_special_tokens": "no"}, "add_special_tokens", TYPE),
    ({"prompt": None}, "prompt", MISSING),
    ({"prompt": ""}, "prompt", VALUE),
    ({"prompt": []}, "prompt", VALUE),
    ({"prompt": [[]]}, "prompt[0]", VALUE),
    ({"prompt": [""]}, "prompt[0]", VALUE),
    ({"prompt": ["a", ""]}, "prompt[1]", VALUE),
    ({"prompt": [[1], []]}, "prompt[1]", VALUE),
    ({"prompt": 7}, "prompt", TYPE),
    ({"prompt": {}}, "prompt", TYPE),
    ({"prompt": [None]}, "prompt[0]", TYPE),
    ({"prompt": [True]}, "prompt[0]", TYPE),
    ({"prompt": [1, "a"]}, "prompt[1]", TYPE),
    ({"prompt": [1, 2.5]}, "prompt[1]", TYPE),
    ({"prompt": [1.5]}, "prompt[0]", TYPE),
    ({"prompt": [1.0, -2.0]}, "prompt[1]", VALUE),
    ({"prompt": [1, -2]}, "prompt[1]", VALUE),
    ({"prompt": [1, 1 << 31]}, "prompt[1]", VALUE),
    ({"prompt": ["a", 1]}, "prompt[1]", TYPE),
    ({"prompt": [[1], "a"]}, "prompt[1]", TYPE),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]", TYPE),
    ({"prompt": "a\udfff"}, "prompt", VALUE),
    ({"logprobs": True}, "logprobs", TYPE),
    ({"logprobs": -1}, "logprobs", VALUE),
]


def name(value: object) -> str | None:
    return repr(value)[:60] if isinstance(value, bytes | dict) else None


@pytest.mark.parametrize(("body", "param", "code"), ANY_BODY, ids=name)
def test_no_body_at_all(body, param, code):
    for parse in (openai_chat.parse, openai_completions.parse, tokens.parse_tokenize, tokens.parse_detokenize):
        assert refusal(parse, body) == (param, code)


@pytest.mark.parametrize(("fields", "param", "code"), SHARED + CHAT_ONLY, ids=name)
def test_wrong_chat(fields, param, code):
    assert refusal(openai_chat.parse, CHAT | fields) == (param, code)


@pytest.mark.parametrize(("fields", "param", "code"), SHARED + COMPLETIONS_ONLY, ids=name)
def test_wrong_completions(fields, param, code):
    assert refusal(openai_completions.parse, TEXT | fields) == (param, code)


def test_infinity_by_arithmetic_is_no_number():
    for number in (b"1e999", b"-1e999", b"1" + b"0" * 400):
        assert refusal(
            openai_chat.parse,
            b'{"messages":[{"role":"user","content":""}],"timeouts":{"idle_timeout_s":' + number + b"}}",
        ) == ("timeouts.idle_timeout_s", VALUE)


def test_a_long_value_is_not_quoted_whole():
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "x" * 5000, "content": ""}])
    assert len(caught.value.message) < 300


# --- null, and anything at all --------------------------------------------------------------------------------------

SHARED_FIELDS = [*ALL, "max_completion_tokens", "repeat_penalty", "logprobs", "echo", "suffix", "best_of"]
SHARED_FIELDS += ["include_stop_str_in_output", "use_beam_search", "stop_token_ids", "bad_words", "allowed_token_ids"]
SHARED_FIELDS += ["truncate_prompt_tokens", "prompt_logprobs", "min_tokens", "n_predict", "top_n_sigma", "min_keep"]
SHARED_FIELDS += ["mirostat_mode"]
SHARED_FIELDS += ["dynatemp_range", "n_indent", "t_max_predict_ms", "lora", "samplers"]
CHAT_FIELDS = [*SHARED_FIELDS, "top_logprobs", "tools", "functions", "tool_choice", "function_call"]
CHAT_FIELDS += ["parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "continue_final_message"]
CHAT_FIELDS += ["add_generation_prompt", "modalities", "audio", "documents", "chat_template"]
COMPLETIONS_FIELDS = [*SHARED_FIELDS, "parse_special", "add_special", "add_special_tokens"]


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_null_in_chat_is_absent(field):
    assert chat(**{field: None}) == chat()
    full = {name: value for name, value in ALL.items() if name not in (field, "stream", "stream_options")}
    assert chat(**full, **{field: None}) == chat(**full)


@pytest.mark.parametrize("field", COMPLETIONS_FIELDS)
def test_null_in_completions_is_absent(field):
    assert completions(**{field: None}) == completions()


def test_null_deeper_down_is_absent():
    assert chat(stream=True, stream_options={"include_usage": None}) == chat(stream=True)
    assert chat(timeouts={"idle_timeout_s": None}) == chat()
    message = USER | {"name": None, "tool_call_id": None, "tool_calls": None, "refusal": None}
    assert chat(messages=[message]) == chat()


FIELDS = sorted(
    {*CHAT_FIELDS, *COMPLETIONS_FIELDS, "messages", "prompt", "role", "content", "type", "text", "function", "refusal"}
)
FIELDS += ["include_usage", "idle_timeout_s", "tool_calls", "name", "arguments", "tokens"]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["user", "assistant", "text", "function", "5", 10**400, math.inf, math.nan, "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(), inner, max_size=6),
    max_leaves=20,
)
PARSERS = [openai_chat.parse, openai_completions.parse, tokens.parse_tokenize, tokens.parse_detokenize]


@given(st.sampled_from(PARSERS), values | st.dictionaries(st.sampled_from(FIELDS), values))
def test_any_value_is_taken_or_refused(parse, body):
    for given_body in (body, json.dumps(body).encode()):
        try:
            parse(given_body)
        except InvalidRequest as error:
            assert (error.message + (error.param or "")).encode()


@given(st.sampled_from(PARSERS), st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(parse, body):
    with contextlib.suppress(InvalidRequest):
        parse(body)


@given(st.fixed_dictionaries({"prompt": st.just("a")}, optional={name: values for name in COMPLETIONS_FIELDS}))
def test_what_is_taken_has_its_types(body):
    try:
        request = openai_completions.parse(body)
    except InvalidRequest:
        return
    assert type(request.n) is int and request.n >= 1
    assert request.max_tokens is None or (type(request.max_tokens) is int and request.max_tokens >= 1)
    for number in (request.sampling.temperature, request.sampling.top_p, *request.timeouts.values()):
        assert number is None or (type(number) is float and math.isfinite(number))


@pytest.mark.parametrize("text", ["٣", "1_0", "+1", " 1", "1 ", "0x1", "", "1" * 401, "1" * 5000, "--1", "1\n"])
def test_a_number_in_a_query_is_one_in_these_digits(text: str) -> None:
    """Python's own readers of numbers take more than anybody means."""

    def parse(body: bytes) -> GenerationRequest:
        return small.parse_query({"prompt": "Once"} | json.loads(body))

    for name in ("max_tokens", "temperature"):
        assert refusal(parse, {name: text})[0] == name
    for wrong in ("nan", "inf", ".", "1e", "1e1.5"):
        assert refusal(parse, {"temperature": wrong})[0] == "temperature"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("echo", "true"), ("use_beam_search", "true"), ("include_stop_str_in_output", "true"), ("suffix", "x")),
        *(("min_tokens", "5"), ("best_of", "2"), ("truncate_prompt_tokens", "5"), ("prompt_logprobs", "0")),
        *(("top_n_sigma", "1"), ("dynatemp_range", ".5"), ("min_keep", "2"), ("samplers", "tk")),
        *(("n_indent", "4"), ("t_max_predict_ms", "9")),
    ],
)
def test_what_a_query_asks_for_in_vain(name: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        small.parse_query({"prompt": "Once", name: text})
    assert (caught.value.param, caught.value.code) == (name, UNSUPPORTED)


def test_small_bodies_ask_in_vain_too() -> None:
    for parse in (small.parse_generate, small.parse_chat):
        assert refusal(parse, TEXT | {"echo": True}) == ("echo", UNSUPPORTED)
        assert refusal(parse, TEXT | {"stop_token_ids": [1]}) == ("stop_token_ids", UNSUPPORTED)


def test_numbers_in_a_query() -> None:
    asked = small.parse_query(
        {"prompt": "Once", "max_tokens": "007", "temperature": "5e-1", "seed": "-1", "top_p": ".5"}
    )
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (7, 0.5, 0.5)
    whole = small.parse_query({"prompt": "Once", "max_tokens": "3.0", "seed": "1e3"})
    assert (whole.max_tokens, whole.sampling.seed) == (3, 1000)
    with pytest.raises(InvalidRequest, match="'max_tokens' must be an integer"):
        small.parse_query({"prompt": "Once", "max_tokens": "3.5"})
    assert small.parse_query({"prompt": "Once", "n_predict": "-1"}).max_tokens == (1 << 31) - 1
    assert small.parse_query({"prompt": "Once", "max_tokens": "9" * 400}).max_tokens == int("9" * 400), "clamped later"
