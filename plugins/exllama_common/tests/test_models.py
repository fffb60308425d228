"""What is in a model's directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenflow_exllama.models import chat_templates


def settings(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def test_templates_of_a_model(tmp_path: Path) -> None:
    assert chat_templates(tmp_path) == {}
    settings(tmp_path, None)
    assert chat_templates(tmp_path) == {}
    settings(tmp_path, "one")
    assert chat_templates(tmp_path) == {"default": "one"}
    settings(tmp_path, [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}])
    assert chat_templates(tmp_path) == {"default": "a", "tool_use": "b"}
    settings(tmp_path, [{"name": "rag", "template": "c"}])
    assert chat_templates(tmp_path)["default"] == "c", "the only one is what there is"


def test_a_file_counts_before_the_settings(tmp_path: Path) -> None:
    settings(tmp_path, "one")
    (tmp_path / "chat_template.jinja").write_text("é", encoding="utf-8")
    assert chat_templates(tmp_path) == {"default": "é"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("t")
    assert chat_templates(tmp_path) == {"default": "é", "tool_use": "t"}
