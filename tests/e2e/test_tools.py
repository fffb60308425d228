"""Reasoning and tool calls, from a real server to a client: streamed, whole, cut, and read again from the middle.

The synthetic engine says what its prompt tells it to, so the text is any model's, and what must come of it is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.conftest import Server, serving
from tokenflow.core.sse import Parser

CONFIG = """
[models.talker]
engine = "synthetic"
directives = true
slots = 4

[models.talker.chat]
tool_calls = "hermes"
reasoning = "think"
template_kwargs = ["opened"]
template = '''
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls else "" }}<|im_end|>
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant
{% if opened %}<think>
{% endif %}'''

[models.plain]
engine = "synthetic"
"""

ARGUMENTS = ('{"city": "Århus \\"}", "days": [1, 2, {"a": null}]}', '{"city": "Oslo"}')
REASONING = "They want the weather.\n\nTwice."
SAID = (
    f"<think>\n{REASONING}\n</think>\n\nLet me look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS[0]}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS[1]}}}\n</tool_call>'
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of some days",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
        },
    }
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("tools"), CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, timeout=30.0) as client:
        yield client


def asking(text: str = SAID, **changes: Any) -> dict[str, Any]:
    """A request whose answer is `text`, one byte a token."""
    content = json.dumps({"synthetic": {"text": text, "one_byte": True}})
    return {"model": "talker", "messages": [{"role": "user", "content": content}], "tools": TOOLS} | changes


@dataclass
class Heard:
    """A choice as a program puts it together from a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    pieces: int = 0

    def take(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls") or ():
            self.pieces += 1
            if piece["index"] == len(self.calls):
                assert piece["type"] == "function"
                self.calls.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
            self.calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"]:
            self.reasons.append(choice["finish_reason"])


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[list[Heard], Any]:
    """What came, by choice, and the usage."""
    heard: dict[int, Heard] = {}
    usage = None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(stream=True, stream_options=options, **asked):
        usage = chunk.usage or usage
        for choice in chunk.to_dict()["choices"]:
            heard.setdefault(choice["index"], Heard()).take(choice)
    return [heard[i] for i in sorted(heard)], usage


def test_reasoning_and_calls_streamed(client: openai.OpenAI) -> None:
    [heard], usage = streamed(client, **asking())
    assert (heard.reasoning, heard.content, heard.reasons) == (REASONING, "Let me look.", ["tool_calls"])
    assert [(call["name"], call["arguments"]) for call in heard.calls] == [("weather", a) for a in ARGUMENTS]
    assert len({call["id"] for call in heard.calls}) == 2
    assert heard.pieces > 20, "arguments come as they are made"
    assert usage.completion_tokens == len(SAID.encode()) + 1, "all that was generated counts, markup too"


def test_reasoning_and_calls_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asking())
    message = answer.choices[0].message
    assert message.content == "Let me look."
    assert message.to_dict()["reasoning_content"] == REASONING
    assert [call.function.arguments for call in message.tool_calls] == list(ARGUMENTS)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(SAID.encode()) + 1


def test_an_agents_second_turn(client: openai.OpenAI) -> None:
    """The client sends back what it got, with the tool's answer."""
    first = client.chat.completions.create(**asking()).choices[0].message
    asked = asking("It rains.")
    asked["messages"] = [
        first.to_dict(),
        *[{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls],
        *asked["messages"],
    ]
    second = client.chat.completions.create(**asked).choices[0]
    assert (second.message.content, second.message.tool_calls, second.finish_reason) == ("It rains.", None, "stop")


def test_the_template_may_have_opened_the_reasoning(client: openai.OpenAI) -> None:
    opened = {"chat_template_kwargs": {"opened": True}}
    [heard], _ = streamed(client, **asking("Hm.\n</think>\nHi"), extra_body=opened)
    assert (heard.reasoning, heard.content, heard.reasons) == ("Hm.", "Hi", ["stop"])


def test_a_call_cut_by_the_limit_is_length_with_its_partial_arguments(client: openai.OpenAI) -> None:
    size = len(SAID[: SAID.index('"days"')].encode())
    [heard], usage = streamed(client, **asking(max_tokens=size))
    assert heard.reasons == ["length"]
    assert [call["arguments"] for call in heard.calls] == ['{"city": "Århus \\"}", ']
    assert usage.completion_tokens == size
    whole = client.chat.completions.create(**asking(max_tokens=size)).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls[0].function.arguments) == (
        "length",
        '{"city": "Århus \\"}", ',
    )


def test_a_stop_string_ends_a_call_before_it(client: openai.OpenAI) -> None:
    [heard], _ = streamed(client, **asking(stop=["days"]))
    assert heard.reasons == ["stop"], "it is not whole, so it is not to be made"
    assert [call["arguments"] for call in heard.calls] == ['{"city": "Århus \\"}", "']


def test_choices_are_read_apart(client: openai.OpenAI) -> None:
    both, usage = streamed(client, **asking(n=2))
    assert [heard.reasons for heard in both] == [["tool_calls"]] * 2
    assert [[call["arguments"] for call in heard.calls] for heard in both] == [list(ARGUMENTS)] * 2
    assert len({call["id"] for heard in both for call in heard.calls}) == 4
    assert usage.completion_tokens == 2 * (len(SAID.encode()) + 1)


def test_log_probabilities_are_the_contents(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asking(logprobs=True))
    entries = answer.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "Let me look."


def test_one_call_at_most_where_they_may_not_be_parallel(client: openai.OpenAI) -> None:
    [heard], _ = streamed(client, **asking(parallel_tool_calls=False))
    assert ([call["arguments"] for call in heard.calls], heard.reasons) == ([ARGUMENTS[0]], ["tool_calls"])


def test_a_dialect_that_knows_no_reasoning_tells_the_content(server: Server) -> None:
    prompt = asking()["messages"][0]["content"]
    with httpx2.Client(base_url=server.url, timeout=30.0) as http:
        got = http.post("/v1/chat/stream", json={"model": "talker", "prompt": prompt}).content
    *said, done = (event.data for event in Parser().feed(got))
    assert "".join(json.loads(data)["content"] for data in said) == SAID.partition("</think>\n\n")[2]
    assert done == "[DONE]"


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for asked in (asking(tools=openai.omit), asking(tool_choice="none")):
        [heard], _ = streamed(client, **asked)
        assert (heard.content, heard.calls) == (SAID.partition("</think>\n\n")[2], [])


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": "plain"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"closed": 1}}}, "chat_template_kwargs.closed"),
    ],
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asking(**changes))
    assert caught.value.param == param


REAL = """
[models.smollm2]
engine = "llamacpp"
slots = 1
context_length = 1024

[models.smollm2.chat]
tool_calls = "hermes"
template = '''
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}'''
"""


@pytest.mark.model
def test_a_real_model_makes_the_call_that_it_must_make(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    weather = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    other = {"type": "function", "function": {"name": "now"}}
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "tools": [other, weather],
        "temperature": 0,
        "max_tokens": 100,
    }
    with (
        serving(tmp_path, REAL) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, timeout=60.0) as client,
    ):
        for choice in ({"type": "function", "function": {"name": "weather"}}, "required"):
            [heard], _ = streamed(client, **asked, tool_choice=choice)
            assert heard.reasons == ["tool_calls"] and heard.content == ""
            [call] = heard.calls
            arguments = json.loads(call["arguments"])
            if choice != "required":
                assert call["name"] == "weather"
            if call["name"] == "weather":
                assert arguments["city"] in ("Oslo", "Paris") and 1 <= arguments["days"] <= 9


def test_a_reader_that_comes_back_in_the_middle_of_a_call_gets_the_same_bytes(server: Server) -> None:
    asked = asking(stream=True, stream_options={"on_disconnect": "continue"})
    with httpx2.Client(base_url=server.url, timeout=30.0) as http:
        got = b""
        with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            for piece in answer.iter_raw():
                got += piece
                if b"days" in got or got.count(b'"arguments":') > 12:
                    break
        path = "/v1/streams/" + answer.headers["X-Request-Id"]
        events = {"Accept": "text/event-stream"}
        whole = http.get(path, headers=events).content
        ids = [event.id for event in Parser().feed(whole) if event.id]
        frames = [frame + b"\n\n" for frame in whole.split(b"\n\n")[:-1]]
        assert b"".join(frames).startswith(got[: got.rindex(b"\n\n")])
        assert len(ids) > 40
        for id in ids[20::7]:
            after = http.get(path, headers=events | {"Last-Event-ID": id})
            last = max(i for i, frame in enumerate(frames) if f"id: {id}\n".encode() in frame)
            assert after.content == b"".join(frames[last + 1 :]), id
