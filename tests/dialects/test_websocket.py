"""WebSocket frames: literal bytes out, every field judged on the way in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.core.types import CallPiece, ChatPrompt, Delta, MessageDelta, TextPrompt, TokenLogprob, Usage
from tokenflow.dialects.websocket import (
    Attach,
    Credit,
    Encoder,
    Generate,
    Ping,
    Pong,
    Steer,
    parse,
    read,
    refused,
    said_id,
)
from tokenflow.errors import InvalidRequest, ResumeWindowLost


def frame(**fields: Any) -> Any:
    return parse(read(json.dumps(fields)))


def test_a_generation_is_asked_for_in_either_dialect() -> None:
    chat = frame(action="generate", id="a", messages=[{"role": "user", "content": "hi"}], max_tokens=7, n=2)
    assert isinstance(chat, Generate) and (chat.id, chat.credit) == ("a", None)
    assert isinstance(chat.request.prompts[0], ChatPrompt)
    assert (chat.request.max_tokens, chat.request.n, chat.request.stream) == (7, 2, True)
    plain = frame(action="generate", prompt="Once", credit=5, stream_options={"on_disconnect": "pause"})
    assert isinstance(plain, Generate) and (plain.id, plain.credit) == (None, 5)
    assert plain.request.prompts == (TextPrompt(text="Once", special=True),)
    assert plain.request.attendance.on_disconnect == "pause"


def test_a_bare_prompt_or_messages_is_a_generate() -> None:
    assert frame(prompt="Once") == frame(action="generate", prompt="Once")
    messages = [{"role": "user", "content": "hi"}]
    assert frame(messages=messages, id="x") == frame(action="generate", messages=messages, id="x")


def test_the_other_actions() -> None:
    for action in ("cancel", "pause", "resume"):
        assert frame(action=action, id="a") == frame(action=action, stream="a") == Steer(action=action, id="a")
    assert frame(action="attach", stream="tf-1") == Attach(id=None, stream="tf-1", after=0, credit=None)
    assert frame(action="attach", stream="s", id="a", after=9, credit=0) == Attach(
        id="a", stream="s", after=9, credit=0
    )
    assert frame(action="credit", id="a", n=3) == Credit(id="a", n=3)
    assert (frame(type="ping"), frame(type="pong")) == (Ping(), Pong())


def test_null_means_absent() -> None:
    nothing = dict.fromkeys(["action", "type", "id", "messages", "credit", "max_tokens"])
    assert frame(prompt="Once", **nothing) == frame(prompt="Once")


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    assert frame(action="attach", stream="s", after=3.0) == frame(action="attach", stream="s", after=3)
    assert repr(frame(action="credit", id="a", n=2.0)) == repr(frame(action="credit", id="a", n=2))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "action"),
        ({"type": "hello"}, "action"),
        ({"action": "dance"}, "action"),
        ({"action": ["cancel"]}, "action"),
        ({"action": "generate"}, "messages"),
        ({"action": "generate", "prompt": "a", "messages": []}, "prompt"),
        ({"action": "generate", "prompt": 7}, "prompt"),
        ({"action": "generate", "prompt": "a", "id": 7}, "id"),
        ({"action": "generate", "prompt": "a", "id": ""}, "id"),
        ({"action": "generate", "prompt": "a", "id": "x" * 257}, "id"),
        ({"action": "generate", "prompt": "a", "credit": -1}, "credit"),
        ({"action": "generate", "prompt": "a", "credit": 1 << 60}, "credit"),
        ({"action": "generate", "prompt": "a", "temperature": "hot"}, "temperature"),
        ({"action": "generate", "prompt": "a", "stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"action": "cancel"}, "id"),
        ({"action": "pause", "id": "x" * 257}, "id"),
        ({"action": "attach"}, "stream"),
        ({"action": "attach", "stream": "s", "after": -1}, "after"),
        ({"action": "attach", "stream": "s", "after": 1.5}, "after"),
        ({"action": "credit", "id": "a"}, "n"),
        ({"action": "credit", "id": "a", "n": 0}, "n"),
        ({"action": "credit", "id": "a", "n": True}, "n"),
        ({"action": "credit", "n": 1}, "id"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        frame(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("data", ["", "{", "[]", "1", "null", '"ping"', "NaN", b'{"type":"ping"}', "[" * 100_000])
def test_a_frame_is_a_json_object_in_text(data: Any) -> None:
    with pytest.raises(InvalidRequest):
        read(data)


@given(st.text() | st.binary())
def test_nothing_raises_anything_else(data: str | bytes) -> None:
    try:
        fields = read(data)
        said_id(fields)
        parse(fields)
    except InvalidRequest:
        pass


def test_an_error_names_the_frame_that_it_answers() -> None:
    assert said_id(read('{"id":"a","action":7}')) == "a"
    assert said_id(read('{"id":7}')) is said_id(read("{}")) is said_id(read(json.dumps({"id": "x" * 257}))) is None
    assert said_id(read('{"id":"\\ud800"}')) == "\ufffd", "what goes out is always text"
    answer = json.loads(refused("a", InvalidRequest("no", param="n")))
    assert answer == {
        "id": "a",
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_value"},
    }


def test_the_frames_letter_by_letter() -> None:
    encoder = Encoder('my "id"', "tf-1")
    head = '{"id":"my \\"id\\"","stream":"tf-1","n":'
    assert encoder.begun(0) == head + "0}"
    assert encoder.delta(3, 1, Delta('a\n"é')) == head + '3,"index":1,"delta":{"content":"a\\n\\"é"}}'
    assert encoder.end(4, ("stop",), Usage(prompt=2, completion=5)) == head + (
        '4,"done":true,"finish_reason":"stop","usage":{"prompt_tokens":2,"completion_tokens":5,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":0}}}'
    )


def test_reasoning_and_calls_are_as_in_a_chunk() -> None:
    encoder = Encoder("a", "s")
    first = MessageDelta("Hi", 1, (), "Hm", (CallPiece(0, "c", "f", '{"a"'),))
    assert json.loads(encoder.delta(1, 0, first))["delta"] == {
        "reasoning_content": "Hm",
        "content": "Hi",
        "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}],
    }
    second = MessageDelta("", 1, (), "", (CallPiece(0, arguments=":1}"),))
    assert json.loads(encoder.delta(2, 0, second)) == {
        "id": "a",
        "stream": "s",
        "n": 2,
        "index": 0,
        "delta": {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
    }


def test_several_choices_have_all_their_reasons() -> None:
    end = json.loads(Encoder("a", "s").end(9, ("length", "stop"), Usage()))
    assert (end["finish_reason"], end["finish_reasons"]) == ("length", ["length", "stop"])
    end = json.loads(Encoder("a", "s").end(9, ("stop", "cancelled"), Usage()))
    assert end["finish_reason"] == "cancelled", "as a whole it was"


def test_log_probabilities_are_the_chat_dialects() -> None:
    delta = Delta("a", 1, (TokenLogprob("a", -0.5, b"a", (TokenLogprob("b", float("-inf"), b"b"),)),))
    [entry] = json.loads(Encoder("a", "s").delta(1, 0, delta))["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -0.5, [97])
    assert entry["top_logprobs"] == [{"token": "b", "logprob": -9999.0, "bytes": [98]}]


def test_a_failure_carries_what_its_error_counts() -> None:
    error = ResumeWindowLost(asked=3, oldest=9, last=12, sealed=False)
    frame = json.loads(Encoder("a", "s").failure(2, error))
    assert (frame["id"], frame["stream"], frame["n"], frame["error"]["code"]) == ("a", "s", 2, "resume_window_lost")
    assert (frame["error"]["oldest"], frame["error"]["last"]) == (9, 12)


@given(st.text(st.characters()), st.integers(0, 9))
def test_any_text_comes_out_as_json_that_is_utf8(text: str, index: int) -> None:
    frame = Encoder("a", "s").delta(1, index, Delta(text))
    frame.encode()
    if text.isprintable():
        assert json.loads(frame)["delta"]["content"] == text


def test_half_a_character_from_a_faulty_engine() -> None:
    Encoder("a", "s").delta(1, 0, Delta("\ud83d")).encode()
