"""Streams and whole answers: literal bytes, a transcript read by hand, and what OpenAI's own client makes of them."""

from __future__ import annotations

import json
import math

import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tokenflow.core.sse import MAX_LINE_BYTES, Parser
from tokenflow.core.types import CallPiece, Delta, Message, MessageDelta, TokenLogprob, Usage
from tokenflow.dialects import openai_chat, openai_completions
from tokenflow.dialects.openai_chat import ChatEncoder
from tokenflow.dialects.openai_completions import CompletionsEncoder
from tokenflow.dialects.openai_frames import dumps
from tokenflow.errors import IdleTimeout

USAGE = Usage(prompt=5, completion=2, cached=4)
HEAD = b'data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":['
TEXT_HEAD = b'data: {"id":"tf-1","object":"text_completion","created":7,"model":"m","choices":['


def said(*deltas: Delta) -> Message:
    message = Message()
    for delta in deltas:
        message.add(delta)
    return message


def chat(include_usage: bool = False, choices: int = 1) -> ChatEncoder:
    return ChatEncoder("tf-1", "m", 7, include_usage, choices)


def completions(include_usage: bool = False, choices: int = 1) -> CompletionsEncoder:
    return CompletionsEncoder("tf-1", "m", 7, include_usage, choices)


def payloads(stream: bytes) -> list:
    """The stream as a client's parser reads it; `[DONE]` must be its end."""
    events = Parser().feed(stream)
    assert events[-1].data == "[DONE]"
    return [json.loads(event.data) for event in events[:-1]]


# --- frames ---------------------------------------------------------------------------------------------------------


def test_chat_frames_are_these_bytes():
    encoder = chat()
    assert encoder.start() == (
        HEAD + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert encoder.delta(0, Delta('h\u00e9"\n\u2028')) == (
        HEAD
        + b'{"index":0,"delta":{"content":"h\xc3\xa9\\"\\n\xe2\x80\xa8"},"logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert encoder.end(["stop"], USAGE) == (
        HEAD + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )


def test_completions_frames_are_these_bytes():
    encoder = completions()
    assert encoder.start() == b""
    assert encoder.delta(0, Delta("a")) == (
        TEXT_HEAD + b'{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert encoder.end(["length"], USAGE) == (
        TEXT_HEAD + b'{"index":0,"text":"","logprobs":null,"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    )


def test_a_failure_and_pings_are_these_bytes():
    for encoder in (chat(), completions(True)):
        assert encoder.failure(IdleTimeout("No token\nfor 30 s.")) == (
            b'data: {"error":{"message":"No token\\nfor 30 s.","type":"timeout_error","param":null,'
            b'"code":"idle_timeout"}}\n\ndata: [DONE]\n\n'
        )
        assert encoder.ping() == b": ping\n\n"
        assert encoder.ping(ids=True) == b": ping\n"


def test_a_delta_without_content_is_no_frame():
    assert chat().delta(0, Delta("")) == b""
    assert chat().delta(0, Delta(""), event_id="tf-1:1") == b""


def test_an_id_stands_first_and_only_on_a_records_last_frame():
    encoder = chat(True)
    assert encoder.delta(0, Delta("a"), event_id="tf-1:1").startswith(b"id: tf-1:1\n" + HEAD)
    long = encoder.delta(0, Delta("a" * 70_000), event_id="tf-1:2")
    assert long.count(b"id: ") == 1 and long.rindex(b"id: ") == long.rindex(b"\n\n", 0, -2) + 2
    assert encoder.end(["stop"], USAGE, event_id="tf-1:3").endswith(b"\n\nid: tf-1:3\ndata: [DONE]\n\n")
    assert encoder.failure(IdleTimeout("x"), event_id="tf-1:3").endswith(b"\n\nid: tf-1:3\ndata: [DONE]\n\n")


def test_what_is_no_text_becomes_a_replacement_character():
    frame = chat().delta(0, Delta("a\ud800b\ud83d\ude00"))
    assert json.loads(frame[6:])["choices"][0]["delta"]["content"] == "a\ufffdb\U0001f600"


def test_a_name_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="no room"):
        ChatEncoder("tf-1", "m" * 60_000, 7, False)


TRANSCRIPT = """\
data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":1,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null}

: ping

data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":1,"delta":{"content":"\N{WAVING HAND SIGN}"},"logprobs":{"content":[{"token":"\N{WAVING HAND SIGN}","logprob":-0.5,"bytes":[240,159,145,139],"top_logprobs":[{"token":"Hi","logprob":-0.25,"bytes":[72,105]}]}],"refusal":null},"finish_reason":null}],"usage":null}

data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}

data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":1,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}

data: {"id":"tf-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}

data: [DONE]

"""  # noqa: E501  # as it goes over the wire

WAVE = TokenLogprob("\U0001f44b", -0.5, "\U0001f44b".encode(), (TokenLogprob("Hi", -0.25, b"Hi"),))


def whole_stream(encoder) -> bytes:
    return (
        encoder.start()
        + encoder.delta(0, Delta("Hi"))
        + encoder.ping()
        + encoder.delta(1, Delta("\U0001f44b", 1, (WAVE,)))
        + encoder.end(["stop", "length"], USAGE)
    )


def test_a_whole_stream_reads_like_this():
    assert whole_stream(chat(True, 2)).decode() == TRANSCRIPT


# --- openai's own types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_chat_chunk_is_openais(include_usage):
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in payloads(whole_stream(chat(include_usage, 2)))]
    assert [choice.delta.content for chunk in chunks for choice in chunk.choices] == ["", "", "Hi", "👋", None, None]
    assert (chunks[-1].usage is not None) == include_usage


@pytest.mark.parametrize("include_usage", [False, True])
def test_every_completions_chunk_is_openais(include_usage):
    for chunk in payloads(whole_stream(completions(include_usage, 2))):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null until the last; their type forgets it
        Completion.model_validate(chunk)


def test_whole_answers_are_openais():
    messages = [said(Delta("Hi")), said(Delta("👋", 1, (WAVE,)))]
    body = openai_chat.complete("tf-1", "m", 7, messages, ["stop", "length"], USAGE, logprobs=True)
    answer = ChatCompletion.model_validate_json(dumps(body))
    assert answer.to_dict() == body
    assert answer.choices[0].message.content == "Hi"
    assert answer.choices[1].logprobs.content[0].top_logprobs[0].token == "Hi"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    body = openai_completions.complete("tf-1", "m", 7, messages, ["stop", "length"], USAGE, logprobs=True)
    assert Completion.model_validate_json(dumps(body)).to_dict() == body
    for complete in (openai_chat.complete, openai_completions.complete):
        assert complete("tf-1", "m", 7, [said(Delta("x"))], ["stop"], USAGE)["choices"][0]["logprobs"] is None


CALLING = (
    MessageDelta("", 1, (), "Hm"),
    MessageDelta("I ask.", 1, (), "!", (CallPiece(0, "c-1", "f", '{"a"'),)),
    MessageDelta("", 1, (), "", (CallPiece(0, arguments=": 1}"), CallPiece(1, "c-2", "g", "{}"))),
)


def test_reasoning_and_calls_are_these_bytes():
    def frame(delta: bytes) -> bytes:
        return HEAD + b'{"index":0,"delta":{' + delta + b'},"logprobs":null,"finish_reason":null}]}\n\n'

    first, second, third = (chat().delta(0, delta) for delta in CALLING)
    assert first == frame(b'"reasoning_content":"Hm"')
    assert second == b"".join(
        [
            frame(b'"reasoning_content":"!"'),
            frame(b'"content":"I ask."'),
            frame(b'"tool_calls":[{"index":0,"id":"c-1","type":"function","function":{"name":"f","arguments":""}}]'),
            frame(b'"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\""}}]'),
        ]
    )
    assert third == b"".join(
        [
            frame(b'"tool_calls":[{"index":0,"function":{"arguments":": 1}"}}]'),
            frame(b'"tool_calls":[{"index":1,"id":"c-2","type":"function","function":{"name":"g","arguments":""}}]'),
            frame(b'"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]'),
        ]
    )
    assert chat().delta(0, CALLING[1], event_id="tf-1:7").count(b"id: ") == 1, "one record, however many frames"


def test_a_calls_arguments_keep_to_the_line_limit():
    frames = chat().delta(0, MessageDelta("", 1, (), "\0" * 40_000, (CallPiece(0, "c", "f", "\1" * 40_000),)))
    assert max(map(len, frames.split(b"\n"))) <= MAX_LINE_BYTES
    deltas = [chunk["choices"][0]["delta"] for chunk in payloads(frames + b"data: [DONE]\n\n")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "\0" * 40_000
    calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(calls) == "\1" * 40_000


def test_a_whole_answer_with_calls_is_openais():
    body = openai_chat.complete("tf-1", "m", 7, [said(*CALLING), said(CALLING[2])], ["tool_calls", "stop"], USAGE)
    answer = ChatCompletion.model_validate_json(dumps(body))
    assert answer.to_dict() == body
    message = answer.choices[0].message
    assert (message.content, message.to_dict()["reasoning_content"]) == ("I ask.", "Hm!")
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("c-1", "f", '{"a": 1}'),
        ("c-2", "g", "{}"),
    ]
    assert said(CALLING[2]).text == "" and answer.choices[1].message.content is None


def client_for(stream: bytes) -> openai.OpenAI:
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    transport = httpx2.MockTransport(lambda request: answer)
    return openai.OpenAI(
        api_key="k", base_url="http://test/v1", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


def test_the_client_reads_a_stream():
    with client_for(whole_stream(chat(True, 2))) as client:
        messages = [{"role": "user", "content": "x"}]
        chunks = list(client.chat.completions.create(model="m", messages=messages, stream=True))
    assert len(chunks) == 7 and chunks[-1].usage.total_tokens == 7
    with client_for(whole_stream(completions(True, 2))) as client:
        texts = [c.choices[0].text for c in client.completions.create(model="m", prompt="x", stream=True) if c.choices]
    assert texts == ["Hi", "👋", "", ""]


def test_the_client_raises_on_a_failure():
    stream = chat().start() + chat().failure(IdleTimeout("No token for 30 s."))
    with client_for(stream) as client, pytest.raises(openai.APIError, match="No token for 30 s") as caught:
        list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True))
    assert caught.value.code == "idle_timeout"


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_completions_logprobs_know_where_their_text_begins():
    encoder = completions(choices=2)
    plain = TokenLogprob("ab", -1.0, b"ab")
    first = payloads(encoder.delta(0, Delta("ab", 1, (plain,))) + b"data: [DONE]\n\n")[0]
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["ab"],
        "token_logprobs": [-1.0],
        "top_logprobs": None,
        "text_offset": [0],
    }
    second = payloads(encoder.delta(0, Delta("abHi", 2, (plain, WAVE), offset=2)) + b"data: [DONE]\n\n")[0]
    assert second["choices"][0]["logprobs"] == {
        "tokens": ["ab", "👋"],
        "token_logprobs": [-1.0, -0.5],
        "top_logprobs": [{"ab": -1.0}, {"Hi": -0.25, "👋": -0.5}],
        "text_offset": [2, 4],
    }


def test_what_cannot_happen_has_a_number_that_json_has():
    never = TokenLogprob("a", -math.inf, b"a", (TokenLogprob("b", math.nan, b"b"),))
    (chunk,) = payloads(chat().delta(0, Delta("", 1, (never,))) + b"data: [DONE]\n\n")
    (entry,) = chunk["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


# --- long ones ------------------------------------------------------------------------------------------------------


def lines_fit(stream: bytes) -> bool:
    return all(len(line) <= MAX_LINE_BYTES for line in stream.split(b"\n"))


@pytest.mark.parametrize("make", [chat, completions])
@pytest.mark.parametrize("text", ["a" * 10_000, "\0" * 70_000, "👋" * 70_000, "é\n" * 100_000])
def test_long_text_becomes_several_chunks(make, text):
    stream = make(True).delta(0, Delta(text)) + b"data: [DONE]\n\n"
    assert lines_fit(stream)
    choices = [chunk["choices"][0] for chunk in payloads(stream)]
    assert "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices) == text


entries = st.builds(
    lambda token, top, times: TokenLogprob(
        token, -1.0, token.encode(), (TokenLogprob(token * times, -2.0, b"x"),) * top
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    st.integers(0, 20),
    st.integers(0, 20),
)


@settings(max_examples=50)
@given(
    st.sampled_from([chat, completions]),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(1, 2000),
    st.lists(entries, max_size=5),
    st.integers(1, 60),
)
def test_no_line_is_too_long_and_nothing_is_lost(make, text, times, entries, repeats):
    many = tuple(entries) * repeats
    stream = make().delta(0, Delta(text * times, 1, many))
    assert lines_fit(stream)
    choices = [chunk["choices"][0] for chunk in payloads(stream + b"data: [DONE]\n\n")]
    assert "".join(c["delta"]["content"] if "delta" in c else c["text"] for c in choices) == text * times
    got = [c["logprobs"] for c in choices if c["logprobs"]]
    if make is chat:
        assert [e["token"] for lp in got for e in lp["content"]] == [e.token for e in many]
        assert sum(len(e["top_logprobs"]) for lp in got for e in lp["content"]) == sum(len(e.top) for e in many)
    else:
        assert [token for lp in got for token in lp["tokens"]] == [e.token for e in many]


def test_an_entry_too_long_for_a_line_loses_its_alternatives_and_then_its_place():
    wide = TokenLogprob("a", -1.0, b"a", (TokenLogprob("b" * 9000, -1.0, b"b" * 9000),))
    huge = TokenLogprob("c" * 9000, -1.0, b"c" * 9000)
    stream = chat().delta(0, Delta("x", 2, (wide, huge)))
    assert lines_fit(stream)
    (chunk,) = payloads(stream + b"data: [DONE]\n\n")
    assert [(e["token"], e["top_logprobs"]) for e in chunk["choices"][0]["logprobs"]["content"]] == [("a", [])]
