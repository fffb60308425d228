"""What is in a model's directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenflow_exllama.models import (
    chat_templates,
    lora_directory,
    missing_directories,
    model_directory,
    weights_bytes,
)


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


def test_what_config_check_says_of_directories(tmp_path: Path) -> None:
    def look(path: str) -> Path:
        return model_directory(path, kind="EXL3 model", not_read={})

    paths = {"model": str(tmp_path / "nowhere"), "draft_model": None}
    line = f"{tmp_path}/nowhere: there is no such directory; give the directory of an EXL3 model"
    assert list(missing_directories(paths, look)) == [("model", line)]
    for name in ("config.json", "tokenizer.json", "x.safetensors"):
        (tmp_path / name).write_text("{}")
    assert list(missing_directories({"model": str(tmp_path)}, look)) == []


def test_what_config_check_says_of_loras(tmp_path: Path) -> None:
    def said() -> str:
        [(key, line)] = missing_directories({"loras": str(tmp_path / "lora")}, lora_directory)
        assert key == "loras" and line.endswith("; give the directory of a LoRA adapter")
        return line.removeprefix(f"{tmp_path}/lora: ").partition(";")[0]

    (tmp_path / "lora").touch()
    assert said() == "is a file"
    (tmp_path / "lora").unlink()
    assert said() == "there is no such directory"
    (tmp_path / "lora").mkdir()
    assert said() == "there is no adapter_config.json in it"
    (tmp_path / "lora/adapter_config.json").touch()
    assert said() == "there is no adapter_model.* in it"
    (tmp_path / "lora/adapter_model.bin").touch()
    assert lora_directory(str(tmp_path / "lora")) == tmp_path / "lora"


def test_a_file_counts_before_the_settings(tmp_path: Path) -> None:
    settings(tmp_path, "one")
    (tmp_path / "chat_template.jinja").write_text("é", encoding="utf-8")
    assert chat_templates(tmp_path) == {"default": "é"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("t")
    assert chat_templates(tmp_path) == {"default": "é", "tool_use": "t"}


def write_weights(path: Path, **sizes: int) -> None:
    """A safetensors file of tensors with so many bytes, in which they are not."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    data = json.dumps(header).encode()
    path.write_bytes(len(data).to_bytes(8, "little") + data)


def test_weights_that_go_to_the_gpus(tmp_path: Path) -> None:
    """What stays in the machine's own memory, or is not read at all, must not be why a model is refused."""
    ours = {"model.layers.0.mlp.up_proj.q_weight": 500, "lm_head.q_weight": 60, "model.norm.weight": 4}
    write_weights(tmp_path / "model-1.safetensors", **ours)
    assert weights_bytes(tmp_path) == 564
    elsewhere = ("model.embed_tokens.weight", "transformer.wte.weight", "vision_tower.layers.0.weight", "mtp.fc.weight")
    write_weights(tmp_path / "model-2.safetensors", **dict.fromkeys(elsewhere, 10_000))
    assert weights_bytes(tmp_path) == 564
    write_weights(tmp_path / "model-3.safetensors", **{"model.embed_tokens.trellis": 7, "model.layers.1.weight": 1})
    assert weights_bytes(tmp_path) == 572
    write_weights(tmp_path / "consolidated.safetensors", **{"layers.0.attention.wq.weight": 10_000})
    assert weights_bytes(tmp_path) == 572
    (tmp_path / "model-4.safetensors").write_bytes(b"\xff" * 100)
    assert weights_bytes(tmp_path) == 672, "what is no safetensors file counts as a whole"
    for path in tmp_path.glob("model-*"):
        path.unlink()
    assert weights_bytes(tmp_path) == 10_000, "there is nothing else"
