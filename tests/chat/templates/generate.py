"""Write expected.json: what transformers' `apply_chat_template` makes of each case with each template.

Run it where transformers 4.57 is installed (no torch is needed): `python tests/chat/templates/generate.py`. The tests
need only the file. Later releases change the messages first (they drop what is None), which is a form of their own.
"""

from __future__ import annotations

import json
from datetime import datetime as real_datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent


class Frozen(real_datetime):
    """The day on which every test of a date is."""

    @classmethod
    def now(cls, tz: Any = None) -> Frozen:
        return cls(2026, 2, 3, 4, 5, 6)


def adapted(message: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's clients send it, in the form that a template is written for (templates.json says which)."""
    message = dict(message)
    for call in message.get("tool_calls", []):
        if form.get("arguments") != "text":
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if message["content"] is None:
        match form.get("no content", "absent"):
            case "absent":
                del message["content"]
            case "text":
                message["content"] = ""
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message


def rendered(source: str, form: dict[str, Any], case: dict[str, Any]) -> str | None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token=form["bos"], eos_token=form["eos"], chat_template=source
    )
    try:
        text = tokenizer.apply_chat_template(
            [adapted(message, form) for message in json.loads(json.dumps(case["messages"]))],
            tools=case.get("tools"),
            add_generation_prompt=case.get("add_generation_prompt", True),
            tokenize=False,
            **case.get("variables", {}),
        )
    except Exception as exc:
        print(f"  refused: {type(exc).__name__}: {exc}")
        return None
    return str(text)


def main() -> None:
    chat_template_utils.datetime = Frozen  # what `strftime_now` asks
    forms = json.loads((HERE / "templates.json").read_text())
    cases = json.loads((HERE / "cases.json").read_text())
    expected: dict[str, dict[str, str | None]] = {}
    for name, form in forms.items():
        source = (HERE / f"{name}.jinja").read_text()
        print(name)
        expected[name] = {what: rendered(source, form, case) for what, case in cases.items()}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
