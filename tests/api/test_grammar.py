"""Grammars for a vocabulary of bytes: what passes, what is refused and where, and what would take the server along."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tokenflow.api import Grammar, Grammars, InvalidRequest
from tokenflow.api.grammar import _Worker
from tokenflow.errors import Overloaded

END = 256


@pytest.fixture(scope="module")
def _shared() -> Grammars:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return Grammars(tokens, ends=[END], specials=[END], tokenize=lambda text: list(text.encode()))


@pytest.fixture
async def grammars(_shared: Grammars) -> AsyncIterator[Grammars]:
    async with _shared:
        yield _shared


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(value), param="response_format")


def regex(source: str) -> Grammar:
    return Grammar(kind="regex", source=source, param="guided_regex")


def grammar(source: str) -> Grammar:
    return Grammar(kind="grammar", source=source, param="grammar")


async def allows(grammars: Grammars, wanted: Grammar, text: str) -> bool:
    """Whether `text` can be, and can end there: by masks alone."""
    matcher = await grammars.matcher(wanted)
    for byte in text.encode():
        if matcher.ended or not matcher.mask()[byte]:
            return False
        matcher.accept(byte)
    return matcher.ended or bool(matcher.mask()[END])


MASKS = [
    (
        schema({"type": "object"}),
        ['{"a": [1, null]}', '{\n  "é": "\\n"\n}', "{}"],
        ["[]", "{", '{"a": 1}x', "{\n\n\n}"],
    ),
    (schema({"enum": ["a", 1]}), ['"a"', "1"], ["a", "2"]),
    (schema({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}), ["12"], ["1.5"]),
    (  # what an object lists is all that it has
        schema({"properties": {"a": {"properties": {"b": {}}}}, "type": "object", "required": ["a"]}),
        ['{"a": {"b": 1}}', '{"a": {}}', '{"a": 1}'],
        ['{"a": 1, "c": 2}', '{"a": {"c": 2}}'],
    ),
    (  # also where its properties are called as keywords are
        schema(
            {
                "type": "object",
                "properties": {
                    "properties": {"type": "object"},
                    "default": {"properties": {"b": {}}, "type": "object"},
                },
            }
        ),
        ['{"properties": {"c": 1}, "default": {"b": 1}}', '{"properties": {}}'],
        ['{"default": {"c": 1}}', '{"additionalProperties": false}'],
    ),
    (  # unless it says so, or wants more than it lists
        schema(
            {"anyOf": [{"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"required": ["b"]}]}
        ),
        ['{"a": 1, "c": 2}', '{"b": 1}'],
        ['{"c": "d"}'],
    ),
    (  # or is one of several that hold together
        schema({"allOf": [{"type": "object", "properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]}),
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}'],
    ),
    (regex("a{2,3}|é"), ["aa", "aaa", "é"], ["a", "aaaa", "e"]),
    (grammar('start: "a" b\nb: /[0-9]/'), ["a1"], ["a", "1"]),
    (grammar('root ::= "a" b\nb ::= [0-9]'), ["a1"], ["a", "1"]),
    (grammar(r'start: "\"" | "\u00e9"'), ['"', "é"], ["a"]),
]


async def test_masks(grammars: Grammars) -> None:
    for wanted, good, bad in MASKS:
        assert [text for text in good if not await allows(grammars, wanted, text)] == []
        assert [text for text in bad if await allows(grammars, wanted, text)] == []


async def test_a_sequence_has_a_place_of_its_own(grammars: Grammars) -> None:
    first, second = [await grammars.matcher(regex("ab")) for _ in range(2)]
    first.accept(*b"ab")
    assert first.ended
    assert second.mask()[ord("a")]


async def test_what_is_certain(grammars: Grammars) -> None:
    matcher = await grammars.matcher(regex("(one|once) upon"))
    assert bytes(matcher.forced()) == b"on"
    matcher.accept(*b"one")
    assert bytes(matcher.forced()) == b" upon"


async def test_a_token_that_was_not_allowed_is_our_fault(grammars: Grammars) -> None:
    matcher = await grammars.matcher(regex("ab"))
    with pytest.raises(Exception, match="mask was not applied"):
        matcher.accept(ord("b"))


# --- what is refused ------------------------------------------------------------------------------------------------

DEEP = {"$defs": {"a": {"type": "object", "properties": {"b": {"type": "strange"}}}}, "$ref": "#/$defs/a"}


WRONG = [
    (schema({"type": "strange"}), "response_format", "Invalid type: strange"),
    (
        schema({"type": "object", "properties": {"a": {"items": {"not": {}}}}}),
        "response_format.properties.a.items",
        "not",
    ),
    (
        schema({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "a(b"}]}),
        "response_format.anyOf[1]",
        "unclosed group",
    ),
    (schema(DEEP), "response_format.$defs.a.properties.b", "Invalid type: strange"),
    (schema({"properties": {"a": {"$ref": "#/no/where"}}}), "response_format.properties.a", "/no/where"),
    (schema({"$ref": "http://example.com/a.json"}), "response_format", "not"),
    (schema({"type": "integer", "minimum": 5, "maximum": 3}), "response_format", "minimum"),
    (schema({"$ref": "#"}), "response_format", "Nothing can match it"),
    (regex("a(b"), "guided_regex", "unclosed group"),
    (regex("(?=a)b"), "guided_regex", "look-ahead"),
    (regex("[^\\s\\S]"), "guided_regex", ""),
    (grammar("start: other"), "grammar", "at 1(8): unknown name"),
    (grammar('root ::= "a'), "grammar", "line 1"),
    (grammar("no grammar at all"), "grammar", ""),
]


async def test_what_is_wrong_and_where(grammars: Grammars) -> None:
    for wanted, where, what in WRONG:
        with pytest.raises(InvalidRequest) as caught:
            await grammars.compile(wanted)
        assert caught.value.param == where
        assert caught.value.message.startswith(f"'{where}' cannot be used: ")
        assert what in caught.value.message
        assert len(caught.value.message) < 600
        assert "\n" not in caught.value.message


def chain(links: int) -> Any:
    refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    return {"$defs": {**refs, f"d{links}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "a chain of references": schema(chain(20_000)),
    "a chain of rules": grammar("".join(f"r{i}: r{i + 1}\n" for i in range(50_000)) + 'r50000: "a"\nstart: r0'),
    "multiples": schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}),
    "patterns": schema({"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(1, 60)]}),
    "objects": schema({"enum": [{"a": i, "b": [i] * 5} for i in range(20_000)]}),
    "parentheses": regex("(" * 200 + "a" + ")*" * 200),
    "depth": Grammar(kind="json_schema", source='{"not":' * 10_000 + "{}" + "}" * 10_000),
    "GBNF": grammar("root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_would_take_the_server_along(grammars: Grammars, name: str) -> None:
    """Refused within the budget, with the event loop free, and the next one is compiled as if nothing had been."""
    began, longest = trio.current_time(), 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = trio.current_time()
            await trio.lowlevel.checkpoint()
            longest = max(longest, trio.current_time() - before)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        with pytest.raises(InvalidRequest):
            await grammars.compile(HOSTILE[name], budget_s=0.5)
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 30  # the budget, and a process to start on a busy machine
    assert longest < 1
    assert await allows(grammars, regex(f"after {re.escape(name)}"), f"after {name}")


async def test_a_grammar_that_is_slow_at_a_step_ends_alone(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.api.grammar.MAX_STEP_S", 0.0)
    slow, other = [await grammars.matcher(regex("ab")) for _ in range(2)]
    with pytest.raises(InvalidRequest, match="for one token"):
        slow.mask()
    monkeypatch.undo()
    assert other.mask()


async def test_who_leaves_while_it_compiles(grammars: Grammars) -> None:
    with trio.move_on_after(0.3) as scope:
        await grammars.compile(HOSTILE["multiples"], budget_s=60)
    assert scope.cancelled_caught
    assert await allows(grammars, regex("who is next"), "who is next")


async def test_a_process_that_is_gone_is_nobodys_fault(grammars: Grammars) -> None:
    await grammars.compile(regex("before it went"))
    assert grammars._worker is not None
    grammars._worker._process.kill()
    await grammars._worker._process.wait()
    assert await allows(grammars, regex("after it went"), "after it went")


async def test_a_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    await grammars.compile(regex("once"))
    monkeypatch.setattr(grammars, "_ask_worker", None)
    await grammars.compile(Grammar(kind="regex", source="once", param="another field"))
    assert await allows(grammars, regex("once"), "once")


async def test_few_are_kept(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenflow.api.grammar.KEPT", 2)
    for n in range(4):
        await grammars.compile(regex(f"kept {n}"))
        assert len(grammars._kept) > n or n >= 2
    assert regex("kept 3") in grammars._kept
    assert regex("kept 0") not in grammars._kept


@pytest.fixture
async def busy(grammars: Grammars, nursery: trio.Nursery) -> Grammars:
    """With somebody's grammar that is being compiled for good."""

    async def compile_on(task_status: trio.TaskStatus[None]) -> None:
        async with grammars._turn:
            task_status.started()
            await trio.sleep_forever()

    await nursery.start(compile_on)
    return grammars


async def test_who_waits_long_for_others_is_told_to_come_back(busy: Grammars, autojump_clock: MockClock) -> None:
    began = trio.current_time()
    with trio.fail_after(60), pytest.raises(Overloaded) as caught:
        await busy.compile(regex("behind others"), budget_s=1.5)
    assert trio.current_time() - began == 3
    assert caught.value.retry_after_s == 1


async def test_a_sequence_waits_as_long_as_it_may(busy: Grammars, autojump_clock: MockClock) -> None:
    with trio.move_on_after(3600) as scope:
        await busy.matcher(regex("accepted before"))
    assert scope.cancelled_caught


async def test_what_was_driven_out_has_as_much_time_as_it_was_accepted_with(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenflow.api.grammar.BUDGET_S", 0.0)
    monkeypatch.setattr("tokenflow.api.grammar.KEPT", 1)
    await grammars.compile(regex("accepted"), budget_s=60)
    await grammars.compile(regex("another"), budget_s=60)
    assert regex("accepted") not in grammars._kept
    assert await allows(grammars, regex("accepted"), "accepted")


async def test_a_process_that_hangs_holds_nobody(
    grammars: Grammars, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the kernel, where SIGKILL does not reach it."""

    class Hanging:
        stdin = stdout = None

        def kill(self) -> None: ...

        async def wait(self) -> None:
            await trio.sleep_forever()

    monkeypatch.setattr(grammars, "_worker", _Worker(Hanging()))
    with trio.move_on_after(60) as scope:
        scope.cancel()
        await grammars._dismiss()
    assert grammars._worker is None


# --- anything at all ------------------------------------------------------------------------------------------------

PIECES = {
    "regex": r"a;b;c;.;(;);[;];{;};|;*;+;?;^;$;\;{1,3000};[a-z];[^a];\d;\p{L};(?i);(?=;(?P<a>;\1;é",
    "grammar": 'start: ;root ::= ;a: ;a ::= ;A: ;"x";/y+/;a ;A ;start ;root ;(;);*;+;| ;~ 3;{2,9000};%json {};[;];";&;é'
    ";<|x|>;[a-z];\n;\n;%import common.INT\n;%ignore /z/\n",
}
BEGINNING = {"regex": "", "grammar": 'start: "x" '}


@pytest.mark.stress
@pytest.mark.parametrize("kind", PIECES)
async def test_any_source(grammars: Grammars, kind: Any, share: Callable[[int], int]) -> None:
    """Seeded: what compiles can be begun, and what does not is refused."""
    good = 0
    for seed in range(share(2000)):
        dice = random.Random(seed)
        source = BEGINNING[kind] + "".join(dice.choices(PIECES[kind].split(";"), k=dice.randint(1, 14)))
        try:
            matcher = await grammars.matcher(Grammar(kind=kind, source=source, param=kind))
        except InvalidRequest:
            continue
        assert any(matcher.mask())
        good += 1
    assert good
