"""Going on from an assistant's message: the prompt ends where its content does, whatever the template does with it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow.chat.marking import SpecialTokens
from tokenflow.chat.model import ChatModel
from tokenflow.chat.reader import MessageReader
from tokenflow.chat.template import ChatTemplate
from tokenflow.core.types import ChatPrompt, Message, Tools
from tokenflow.errors import InvalidRequest

from .test_families import CASES, FORMS, NOW, model, read
from .test_template import CHATML, SMOLLM, TURN_TOKENS, TURNS

QUESTION = {"role": "user", "content": "How is it?"}
TOOLS = Tools(functions=(CASES["with tools"]["tools"][0],))


def prompt(content: str, tools: Tools | None = None, **more: str) -> ChatPrompt:
    said = {"role": "assistant", "content": content} | more
    return ChatPrompt(messages=(QUESTION, said), tools=tools, ending="continued")


def rendered(talk: ChatModel, asked: ChatPrompt) -> str:
    return "".join(text for text, _ in talk.render(asked, now=NOW))


@pytest.mark.parametrize("name", FORMS)
def test_every_family_goes_on_right_after_what_was_said(name: str) -> None:
    content, blanks = "It is fine, and\nthe sea", " \n\n"
    text = rendered(model(name), prompt(content + blanks))
    whole = ChatPrompt(messages=prompt(content).messages, ending="closed")
    assert text.endswith(content + blanks)
    assert rendered(model(name), whole).startswith(text.removesuffix(blanks))


def test_blanks_are_kept_though_the_template_trims() -> None:
    for content in ("  so\n", "so", "\nso \t"):
        segments = ChatTemplate(TURNS, "<bos>", special_tokens=TURN_TOKENS).render(
            prompt(content).messages, ending="continued"
        )
        [(text, special)] = segments
        assert text.endswith("<start_of_turn>model\n" + content.lstrip()) and special


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[-1].content | upper }}",
        "{{ messages[-1].content[:5] }}",
        "{{ messages[-1].content | tojson(ensure_ascii=true) }}",
        "{{ messages[-1].content.split('.')[-1] }}",
        "{% for message in messages %}{% if not loop.last %}{{ message.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_changes_or_drops_it_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="no going on from it") as caught:
        ChatTemplate(source).render(prompt("One. Two").messages, ending="continued")
    assert caught.value.param == "continue_final_message"


def test_a_text_that_is_written_twice_ends_at_the_second() -> None:
    source = "{{ messages[-1].content }}|{{ messages[-1].content }}|"
    assert ChatTemplate(source).render(prompt("so ").messages, ending="continued") == [("so |so ", True)]


SPECIALS = SpecialTokens(CHATML)
PIECES = ["<|im_end|>", "<|im_start|>", "<|im", "_end|>", "|>", "<", "a", " ", "\n", "\ufdd0", "\ufdd3"]


@given(st.lists(st.sampled_from(PIECES), min_size=1).map("".join).filter(str.strip))
def test_it_spells_no_control_token(content: str) -> None:
    segments = ChatTemplate(SMOLLM, special_tokens=CHATML).render(prompt(content).messages, ending="continued")
    text = "".join(text for text, _ in segments)
    assert text.endswith("<|im_start|>assistant\n" + content)
    found = Counter(text[i:j] for text, special in segments if special for i, j in SPECIALS.find(text))
    assert found == {"<|im_start|>": 3, "<|im_end|>": 2}


# --- reasoning --------------------------------------------------------------------------------------------------------

OPENED = {
    "qwen3": "<|im_start|>assistant\n<think>",
    "glm-4.6": "<|assistant|><think>",
    "deepseek-r1-distill": "<｜Assistant｜><think>",
    "deepseek-v3.1": "<｜Assistant｜><think>",
    "smollm3": "<|im_start|>assistant\n<think>",
}


@pytest.mark.parametrize("name", OPENED)
@pytest.mark.parametrize("written", ["\n", "\nHm,", "\nHm.\n</think>\n\n", "\n\n</think>\n\nIt is"])
def test_reasoning_is_gone_on_from_as_the_model_writes_it(name: str, written: str) -> None:
    """Not as templates show it of earlier messages, without it or behind an empty block."""
    talk, asked = model(name), prompt("<think>" + written)
    assert rendered(talk, asked).endswith(OPENED[name] + written)
    reader = talk.reader(asked, talk.render(asked), "seed")
    if "</think>" in written:
        assert reader is None, "what follows is content"
    else:
        message = answer(reader, "so\n</think>\n\nFine.")
        assert (message.reasoning, message.text) == ("so", "Fine.")


def test_marks_of_reasoning_are_control_tokens_where_the_model_has_them_so() -> None:
    source = "[INST]{{ messages[0].content }}[/INST]{# [/THINK] #}"
    talk = ChatModel({"default": source}, special_tokens=frozenset({"[INST]", "[/INST]", "[THINK]", "[/THINK]"}))
    segments = talk.render(prompt("[THINK]a[/INST]b[/THINK]c"))
    assert [text for text, special in segments if special] == ["[INST]How is it?[/INST]", "[THINK]", "[/THINK]"]
    assert [text for text, special in segments if not special] == ["a[/INST]b", "c"]


def test_reasoning_beside_the_content_is_the_templates() -> None:
    text = rendered(model("qwen3"), prompt("It is", reasoning_content="Hm."))
    assert text.endswith("<|im_start|>assistant\n<think>\nHm.\n</think>\n\nIt is")


# --- the answer -------------------------------------------------------------------------------------------------------


def answer(reader: MessageReader | None, text: str) -> Message:
    assert reader is not None
    return read(reader, text)[0]


def test_nothing_of_what_follows_is_taken_for_an_opening() -> None:
    """Newlines, and a block of reasoning, at the beginning of a message are markup; here they are text."""
    for name in ("qwen3", "gpt-oss"):
        talk, asked = model(name), prompt("It is", TOOLS)
        assert answer(talk.reader(asked, [], "seed"), "\n\n<think>fine").text == "\n\n<think>fine"
    assert model("qwen3").reader(prompt("It is"), [], "seed") is None


def test_calls_follow_as_ever() -> None:
    calls = {
        "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Aarhus"}}\n</tool_call>',
        "gpt-oss": '<|end|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{"city": "Aarhus"}',
    }
    for name, call in calls.items():
        message = answer(model(name).reader(prompt("I ask", TOOLS), [], "seed"), " them." + call)
        assert message.text == " them."
        assert [(made.name, made.arguments) for made in message.calls] == [("weather", '{"city": "Aarhus"}')]


def test_harmony_goes_on_in_the_final_channel() -> None:
    talk, asked = model("gpt-oss"), prompt("It is")
    assert rendered(talk, asked).endswith("<|start|>assistant<|channel|>final<|message|>It is")
    assert answer(talk.reader(asked, [], "seed"), " fine.").text == " fine."
