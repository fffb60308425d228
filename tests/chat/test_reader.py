"""Every reader, fed whole, by characters and cut at every place: the same message; and what becomes of a broken one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenflow.chat.calls import CALLS
from tokenflow.chat.reader import MessageReader
from tokenflow.chat.reasoning import THINK
from tokenflow.chat.values import kinds, literal
from tokenflow.core.types import Delta, FinishReason, Message, TokenLogprob, Tools

TOOLS = Tools(
    functions=tuple(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in {
            "weather": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "array"},
                    "n": {"type": ["integer", "null"]},
                    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                    "size": {"enum": [1, 2]},
                    "share": {"type": "number"},
                    "code": {"$ref": "#/$defs/a~1b/anyOf/0"},
                    "whole": {"allOf": [{"description": "Any."}, {"$ref": "#/$defs/text"}]},
                    "fixed": {"const": "12"},
                },
                "$defs": {"text": {"type": "string"}, "a/b": {"anyOf": [{"enum": ["1", "2"]}]}},
            },
            "now": {"type": "object", "properties": {}},
        }.items()
    )
)
FORMATS = [*CALLS, "harmony"]
CALLED: FinishReason = "tool_calls"


def reader(name: str, *, tools: Tools | None = TOOLS, think: bool = True, opened: bool = False) -> MessageReader:
    if name == "harmony":
        return MessageReader(tools=tools, is_harmony=True, seed="s")
    return MessageReader(
        think=THINK["think"] if think else None, opened=opened, calls=CALLS.get(name), tools=tools, seed="s"
    )


@dataclass
class Said:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reason: str = "stop"


def read(name: str, pieces: Iterable[str], reason: FinishReason = "stop", **options: Any) -> Said:
    reading, message = reader(name, **options), Message()
    for piece in pieces:
        if (delta := reading.take(Delta(piece))) is not None:
            message.add(delta)
    tail, why = reading.finish(reason)
    if tail is not None:
        message.add(tail)
    calls = message.calls
    assert len({call.id for call in calls}) == len(calls)
    return Said(message.text, message.reasoning, [(call.name, call.arguments) for call in calls], why)


CALL = '{"city": "\\u00c5rhus \\"}]", "days": [1, {"a": null}]}'
VALUES = '{"city": "Århus \\"}]\\nx", "days": [1, {"a": null}]}'
ONE, TWO = [("weather", CALL)], [("weather", CALL), ("now", "{}")]
A_1 = [("now", '{"a": 1}')]
READ = [("weather", VALUES), ("now", "{}")]
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {CALL}}}\n</tool_call>'
HERMES_NOW = '<tool_call>{"arguments": {}, "name": "now"}</tool_call>'
QWEN = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nÅrhus "}]\nx\n</parameter>\n'
    "<parameter=days>\n[1, {'a': None}]\n</parameter>\n</function>\n</tool_call>\n"
)
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Århus "}]\nx</arg_value>\n'
    '<arg_key>days</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n</tool_call>'
)
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{CALL}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
HARMONY = f" to=functions.weather<|channel|>commentary json<|message|>{CALL}"

CASES: list[tuple[str, str, Said]] = [
    # format, what the model wrote, what it said
    *[(name, "Just text <b>, {1} [x](y)\n", Said("Just text <b>, {1} [x](y)\n")) for name in CALLS],
    *[
        (name, "\n<think>\n\nHm <x>\n\nso\n</think>\n\nHi\n\nyou\n", Said("Hi\n\nyou\n", "Hm <x>\n\nso"))
        for name in CALLS
    ],
    ("hermes", HERMES, Said("", "", ONE, CALLED)),
    ("hermes", f"Look.\n{HERMES}\n{HERMES_NOW}\n", Said("Look.", "", TWO, CALLED)),
    ("hermes", f"<think>a</think>{HERMES}", Said("", "a", ONE, CALLED)),
    ("hermes", f"A\n{HERMES}\nB", Said("A\nB", "", ONE, CALLED)),
    ("hermes", f"A{HERMES}\n\nB", Said("A\nB", "", ONE, CALLED)),
    ("hermes", "A <tool_call> is markup", Said("A <tool_call> is markup")),
    ("hermes", f"<tool_call> or <tool_{HERMES}", Said("<tool_call> or <tool_", "", ONE, CALLED)),
    ("hermes", '<tool_call>{"name": 7}</tool_call>', Said('<tool_call>{"name": 7}</tool_call>')),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', Said("", "", [("now", "{}")], CALLED)),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', Said("", "", A_1, CALLED)),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}', Said("", "", [("now", "{}")], CALLED)),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1', Said("", "", [("now", '{"a": [1')], "stop")),
    ("llama3", f'{{"name": "weather", "parameters": {CALL}}}', Said("", "", ONE, CALLED)),
    (
        "llama3",
        f'\n{{"type": "function", "name": "weather", "parameters": {CALL}}}; {{"name": "now", "parameters": {{}}}}',
        Said("", "", TWO, CALLED),
    ),
    (
        "llama3",
        f'{{"name": "weather", "parameters": {CALL}}} {{"note": 1}} and so on',
        Said('{"note": 1} and so on', "", ONE, CALLED),
    ),
    (
        "llama3",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"note": [1]}\n',
        Said('{"note": [1]}', "", [("now", "{}")], CALLED),
    ),
    ("llama3", '{"name": "Ann", "age": 3}', Said('{"name": "Ann", "age": 3}')),
    ("llama3", '{"a": {"name": "weather"}}', Said('{"a": {"name": "weather"}}')),
    ("llama3", f'Hm.<|python_tag|>{{"name": "weather", "parameters": {CALL}}}', Said("Hm.", "", ONE, CALLED)),
    ("llama3", '<|python_tag|>now.call(a="x")', Said("", "", [("now", '{"a": "x"}')], CALLED)),
    ("llama3", "<|python_tag|>print(1)", Said("<|python_tag|>print(1)")),
    (
        "pythonic",
        "[weather(city='Århus \"}]\\nx', days=[1, {'a': None}]), now()]",
        Said("", "", READ, CALLED),
    ),
    (
        "pythonic",
        '<|python_start|>[now(a="""q"t""", b=-1.5, c=True)]<|python_end|>',
        Said("", "", [("now", '{"a": "q\\"t", "b": -1.5, "c": true}')], CALLED),
    ),
    (
        "pythonic",
        '[now(a="\\x41\\u00e9\\q", b="")]',
        Said("", "", [("now", '{"a": "Aé\\\\q", "b": ""}')], CALLED),
    ),
    ("pythonic", "[weather](http://x) is a link", Said("[weather](http://x) is a link")),
    ("pythonic", "[now(), nobody(x=1)] or so", Said("nobody(x=1)] or so", "", [("now", "{}")], CALLED)),
    ("pythonic", "[nobody(1)]", Said("[nobody(1)]")),
    (
        "mistral",
        f'[TOOL_CALLS][{{"id": "1234", "name": "weather", "arguments": {CALL}}}, {{"arguments": {{}}, "name": "now"}}]',
        Said("", "", TWO, CALLED),
    ),
    (
        "mistral",
        f"Hm[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{CALL}[TOOL_CALLS]now{{}}",
        Said("Hm", "", TWO, CALLED),
    ),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{CALL}", Said("", "", ONE, CALLED)),
    ("mistral", "[TOOL_CALLS] is markup", Said("[TOOL_CALLS] is markup")),
    ("deepseek", f"Hm.\n<｜tool▁calls▁begin｜>{V3}\n{V31}<｜tool▁calls▁end｜>", Said("Hm.", "", TWO, CALLED)),
    ("deepseek", f"<｜tool_calls_begin｜>{V31}<｜tool▁calls▁end｜>", Said("", "", [("now", "{}")], CALLED)),
    ("deepseek", "<｜tool▁calls▁begin｜>?", Said("<｜tool▁calls▁begin｜>?")),
    ("qwen_xml", f"Hm\n\n{QWEN}<tool_call>\n<function=now>\n</function>\n</tool_call>", Said("Hm", "", READ, CALLED)),
    ("qwen_xml", "<function=now></function>", Said("", "", [("now", "{}")], CALLED)),
    (
        "qwen_xml",
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        Said("", "", [("now", "{}")], CALLED),
    ),
    ("qwen_xml", "<tool_call> is <function", Said("<tool_call> is <function")),
    ("glm", f"Hm\n{GLM}\n<tool_call>now\n</tool_call>", Said("Hm", "", READ, CALLED)),
    ("glm", "<tool_call> is markup", Said("<tool_call> is markup")),
    ("harmony", "<|channel|>final<|message|>Hi\n", Said("Hi\n")),
    ("harmony", "It lost its <format>\n", Said("It lost its <format>\n")),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{CALL}<|call|>",
        Said("I look.", "Hm.\n\nSo.", ONE, CALLED),
    ),
    ("harmony", HARMONY, Said("", "", ONE, CALLED)),
    *[
        (
            "harmony",
            f"<|channel|>commentary to=functions.now<|message|>{body}<|end|><|start|>assistant<|message|>B",
            Said("B", "", [("now", arguments)], CALLED),
        )
        for body, arguments in {
            "import x\nprint(1)": "import x\nprint(1)",
            "n = 1": "n = 1",
            '"a" + b': '"a" + b',
            "[1, 2] ": "[1, 2] ",
            '{"a": "<|end|>"}': '{"a": "<|end|>"}',
            '"{}"': "{}",
            "null": "{}",
            "": "{}",
        }.items()
    ],
]


@pytest.mark.parametrize(("name", "text", "said"), CASES)
def test_whole_by_characters_and_at_every_split(name: str, text: str, said: Said) -> None:
    assert read(name, [text]) == said
    assert read(name, text) == said
    for at in range(1, len(text)):
        assert read(name, [text[:at], text[at:]]) == said, (text[:at], text[at:])


@pytest.mark.parametrize(("name", "text", "said"), [case for case in CASES if case[2].calls])
def test_a_call_that_is_cut_is_length_with_its_partial_arguments(name: str, text: str, said: Said) -> None:
    """Whatever has been said stays said: each longer cut goes on where the shorter one ended."""
    cuts = [read(name, [text[:size]], "length") for size in range(len(text) + 1)]
    for size, (shorter, longer) in enumerate(pairwise(cuts)):
        assert longer.reason == "length"
        assert longer == read(name, text[: size + 1], "length")
        for before, after in zip(shorter.calls, longer.calls, strict=False):
            assert before[0] == after[0] and after[1].startswith(before[1])
        assert len(shorter.calls) <= len(longer.calls)
    assert (cuts[-1].calls, cuts[-1].content) == (said.calls, said.content)
    if (name, text) == ("hermes", HERMES):
        assert read(name, [text[: text.index("days")]], "length").calls == [("weather", CALL[: CALL.index("days")])]


def test_arguments_come_as_they_are_made() -> None:
    for name, text in {"hermes": HERMES, "qwen_xml": QWEN, "glm": GLM, "harmony": HARMONY}.items():
        reading = reader(name)
        deltas = [reading.take(Delta(char)) for char in text]
        assert sum(delta is not None and bool(delta.calls) for delta in deltas) > 15, name


FRAGMENTS = sorted(
    {"<think>", "</think>", "\n", "\n\n", "Hi", " ", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", "é"}
    | {"weather", "now", '{"name": ', '"weather"', ', "arguments": ', ', "parameters": ', "null", "12", "city", "days"}
    | {"<tool_call>", "</tool_call>", "<function=", ">", "<parameter=city>", "</parameter>", "</function>", "<"}
    | {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "```json\n"}
    | {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜"}
    | {"<｜tool▁calls▁end｜>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", ".call(", "<|channel|>", "<|"}
    | {"analysis", "final", "commentary", " to=functions.now", "<|message|>", "<|end|>", "<|start|>", "<|call|>"}
    | {HERMES, QWEN, GLM, V3, V31, CALL}
)


@settings(max_examples=150)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from(["stop", "length"]),
    st.booleans(),
    st.booleans(),
)
@example("pythonic", "[now(a='''\\", [], "stop", False, True)
@example("hermes", '<tool_call>{"name": "now", "arguments": "{', [3], "length", True, True)
def test_any_text_however_it_is_cut(
    name: str, text: str, cuts: list[int], reason: FinishReason, opened: bool, tools: bool
) -> None:
    options: dict[str, Any] = {"opened": opened, "tools": TOOLS if tools else None}
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    whole = read(name, [text], reason, **options)
    assert read(name, [text[a:b] for a, b in pairwise(edges)], reason, **options) == whole
    assert read(name, text, reason, **options) == whole
    if whole.reason == "tool_calls" and name in ("pythonic", "qwen_xml", "glm"):
        for _, arguments in whole.calls:
            json.loads(arguments)


def test_an_answer_in_json_is_not_held_until_its_end() -> None:
    reading = reader("llama3")
    said = [reading.take(Delta(piece)) for piece in ("{", '"title"', ": ", '"A', " story", '"}')]
    assert [delta and delta.text for delta in said] == [None, '{"title"', ": ", '"A', " story", '"}']


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    for name, text in {"hermes": HERMES, "qwen_xml": QWEN, "mistral": "[TOOL_CALLS][]"}.items():
        assert read(name, text, tools=None) == Said(text)
    call = "<|channel|>commentary to=functions.now<|message|>{}"
    assert read("harmony", call, tools=None) == Said("{}")


def test_values_take_the_type_that_their_schema_asks_for() -> None:
    def value(key: str, text: str) -> Any:
        said = read("qwen_xml", f"<function=weather><parameter={key}>{text}</parameter></function>")
        return json.loads(said.calls[0][1])[key]

    assert value("city", "12") == "12"
    assert value("city", "\n\n a \n\n") == "\n a \n", "one newline on either side is the format's"
    assert value("n", "12") == 12 and value("n", "null") is None and value("n", "a lot") == "a lot"
    assert value("either", "12") == 12 and value("either", "[1") == "[1" and value("either", "[1]") == "[1]"
    assert value("size", "2") == 2
    assert value("code", "1") == "1" and value("whole", "12") == "12" and value("fixed", "12") == "12"
    assert value("share", "1") == 1 and value("share", "0.5") == 0.5
    assert value("days", "(1, 2)") == [1, 2] and value("days", "NaN") == "NaN"
    assert value("unheard of", "true") is True and value("unheard of", "True") is True


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    )
)
def test_literals_both_ways(value: Any) -> None:
    try:
        repr(value).encode()
        json.dumps(value).encode()
    except UnicodeEncodeError:
        return
    if not isinstance(value, str):
        assert literal(json.dumps(value)) == literal(repr(value)) == value


def test_what_a_schema_does_not_say() -> None:
    for schema in (None, 7, {}, {"type": 7}, {"$ref": "#/x"}, {"enum": []}):
        assert kinds(schema) == frozenset()


def test_what_a_schema_refers_to() -> None:
    root = {"in": {"$ref": "#/circle"}, "circle": {"anyOf": [{"$ref": "#/in"}, {"$ref": "#"}]}, "list": [{"const": 1}]}
    for reference in ("#/in", "#/none", "#/list/1", "#/list/x", "#/list/-1", "elsewhere", "#"):
        assert kinds({"$ref": reference}, root) == frozenset()
    assert kinds({"$ref": "#/list/0"}, root) == {"integer"}
    long = {str(i): {"$ref": f"#/{i + 1}"} for i in range(5000)}
    assert kinds({"$ref": "#/0"}, long) == frozenset()


# --- ids, parallel calls ----------------------------------------------------------------------------------------------


def test_ids_are_the_same_again_and_as_long_as_the_format_wants() -> None:
    def ids(name: str, text: str) -> list[str]:
        reading, message = reader(name), Message()
        if (delta := reading.take(Delta(text))) is not None:
            message.add(delta)
        return [call.id for call in message.calls]

    assert ids("hermes", HERMES + HERMES) == ids("hermes", HERMES + HERMES)
    assert all(id.startswith("call_") for id in ids("hermes", HERMES))
    [id] = ids("mistral", "[TOOL_CALLS]now{}")
    assert len(id) == 9 and id.isalnum(), "Mistral's templates refuse others"


def test_one_call_where_they_may_not_be_parallel() -> None:
    alone = Tools(functions=TOOLS.functions, parallel=False)
    assert read("hermes", HERMES + HERMES_NOW, tools=alone) == Said("", "", ONE, CALLED)


def test_a_name_beyond_reason_is_cut() -> None:
    [(name, _)] = read("mistral", [f"[TOOL_CALLS]{'x' * 100_000}{{}}"]).calls
    assert name == "x" * 256


# --- log-probabilities ------------------------------------------------------------------------------------------------


def scored(tokens: list[bytes], texts: list[str], name: str = "hermes", **options: Any) -> tuple[str, str]:
    """Content, and what its entries say, for tokens that come with these texts."""
    reading, message = reader(name, **options), Message()
    for token, text in zip(tokens, texts, strict=True):
        entries = (TokenLogprob(token.decode(errors="replace"), -1.0, token),) if token else ()
        if (delta := reading.take(Delta(text, 1, entries))) is not None:
            message.add(delta)
    tail, _ = reading.finish("stop")
    if tail is not None:
        message.add(tail)
    return message.text, b"".join(entry.bytes for entry in message.logprobs).decode(errors="replace")


@pytest.mark.parametrize(
    ("tokens", "scored_tokens"),
    [
        (["<think>", "Hm", "</think>", "\n\n", "Hi", " you", "!"], "Hi you!"),
        (["<th", "ink>Hm</", "think>A", "Hi", " <", "b", ">"], "think>AHi <b>"),
        (["Hi", " <tool", "_call>", "\n{", '"name": "now"', "}", "\n", "</tool_call>", "\n", "Bye"], "Hi <tool\nBye"),
        (["I say <tool_call", "> to", " you"], "I say <tool_call> to you"),
        (["A", "\n", "<tool_call>", '{"name": "now"}', "</tool_call>"], "A"),
        (["A", "\n", "<tool_call>", '{"name": "now"}', "</tool_call>", "B", "\n"], "A\nB"),
        (["if (x) {", "\n", "}\n", "done"], "if (x) {\n}\ndone"),
        (["x", "\n", " <", " y"], "x\n < y"),
        (["x\n", "\n", "\n<", "tool_call", "> y", "\n"], "x\n\n\n<tool_call> y\n"),
    ],
)
def test_entries_are_those_of_tokens_that_are_content_at_least_in_part(tokens: list[str], scored_tokens: str) -> None:
    assert scored([token.encode() for token in tokens], tokens)[1] == scored_tokens


def test_entries_of_text_that_comes_later_than_its_tokens() -> None:
    """Half a character, a stop string that was none, a control token without text."""
    text, entries = scored([b"\xc3", b"\xa9", b"a", b"b", b"<|x|>", b"c"], ["", "é", "", "ab", "", "c"])
    assert (text, entries) == ("éabc", "éab<|x|>c")


def test_a_token_whose_text_comes_in_parts_has_its_entry_with_the_first() -> None:
    """What may begin a stop string is held; the mark before it is nobody's."""
    tokens = [b"<think>", b"x", b"</think>", b"He", b"llo"]
    assert scored(tokens, ["<think>", "x", "</think>", "H", "ello"]) == ("Hello", "Hello")
    assert scored(tokens[:4], ["<think>", "x", "</think>", "H"]) == ("H", "He")


def test_a_token_that_begins_a_character_of_content_is_told_and_one_that_ends_none() -> None:
    tokens = [b"<think>", b"x", b"</think>", b"\n\xc3", b"\xa9", b"\xc3"]
    assert scored(tokens, ["<think>", "x", "</think>", "\n", "é", "\ufffd"]) == ("é\ufffd", "\né\ufffd")
    assert scored([b"\xc3", b"<|x|>", b"\xa9a"], ["", "", "éa"]) == ("éa", "\ufffd<|x|>\ufffda")


def test_what_stands_between_the_messages_of_harmony_is_not_scored() -> None:
    tokens = ["<|channel|>", "commentary", "<|message|>", "A", "<|end|>", "<|start|>", "assistant", "<|channel|>"]
    tokens += ["final", "<|message|>", "B", "\n", "C"]
    assert scored([token.encode() for token in tokens], tokens, "harmony") == ("A\n\nB\nC", "AB\nC")


@settings(max_examples=150)
@given(st.lists(st.sampled_from(["a", "\n", "\n\n", " <", "b\n", "\n<tool", "_call>", "<", "é"]), max_size=12))
def test_entries_spell_a_content_that_no_call_interrupts(tokens: list[str]) -> None:
    text = "".join(tokens)
    assert scored([token.encode() for token in tokens], tokens, think=False) == (text, text)


def test_entries_that_wait_take_no_more_time_for_that() -> None:
    def seconds(begins: str, goes_on: str, tokens: int) -> float:
        reading = reader("hermes")
        for char in begins:
            reading.take(Delta(char, 1, (TokenLogprob(char, -1.0, char.encode()),)))
        entry = TokenLogprob(goes_on, -1.0, goes_on.encode())
        began = time.process_time()
        for _ in range(tokens):
            reading.take(Delta(goes_on, 1, (entry,)))
        return time.process_time() - began

    for begins, goes_on in (("a", "\n"), ("<tool_call>", '{"a'), ("a" + "\n" * 500 + HERMES[:45], "a")):
        few = min(seconds(begins, goes_on, 500) for _ in range(3))
        assert seconds(begins, goes_on, 10_000) < 20 * few * 5, begins


@pytest.mark.parametrize(
    ("name", "begins", "goes_on"),
    [
        ("hermes", "<tool_call>", "<tool_call"),
        ("hermes", '<tool_call>{"arguments": "', "a"),
        ("glm", "<tool_call>", "a"),
        ("qwen_xml", "<function=", "a"),
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALL"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call"),
        ("pythonic", "[weather(city='", "\\"),
        ("harmony", "<|channel|>", "<|message|"),
    ],
)
def test_what_never_comes_to_a_point_takes_no_more_time_for_that(name: str, begins: str, goes_on: str) -> None:
    """Text that is held until it is clear what it is costs the same a token, however much of it there is."""

    def seconds(tokens: int) -> float:
        reading = reader(name)
        reading.take(Delta(begins))
        began = time.process_time()
        for _ in range(tokens):
            reading.take(Delta(goes_on))
        return time.process_time() - began

    few = min(seconds(500) for _ in range(3))
    assert seconds(10_000) < 20 * few * 5  # it would be 20 times that if it were quadratic
