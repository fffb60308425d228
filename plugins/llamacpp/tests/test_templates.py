"""What a model file says beside its weights: its templates, and how a text begins."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tokenflow_llamacpp import SMOLLM2, LlamaConfig, open_llama

from tokenflow.chat.model import ChatModel
from tokenflow.core.types import ChatPrompt, Ending

from .conftest import Table

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each scalar kind in GGUF's metadata (its specification: ggml, docs/gguf.md); 8 is a string, 9 an array."""


def number(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]


def skip_text(file: BinaryIO) -> None:
    file.seek(number(file, "Q"), 1)


def skip_value(file: BinaryIO, kind: int) -> None:
    if kind == 8:
        skip_text(file)
    elif kind == 9:
        inner, count = number(file, "I"), number(file, "Q")
        for _ in range(count):
            skip_value(file, inner)
    else:
        file.seek(SIZES[kind], 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def with_key(source: Path, target: Path, key: str, value: str) -> None:
    """A copy of a GGUF file with one more string in its metadata."""
    with source.open("rb") as old, target.open("wb") as new:
        magic, version = old.read(4), number(old, "I")
        tensors, keys = number(old, "Q"), number(old, "Q")
        start = old.tell()
        for _ in range(keys):
            skip_text(old)
            skip_value(old, number(old, "I"))
        metadata_end = old.tell()
        for _ in range(tensors):
            skip_text(old)
            old.seek(8 * number(old, "I") + 4 + 8, 1)
        infos_end = old.tell()
        old.seek(start)
        new.write(magic + struct.pack("<IQQ", version, tensors, keys + 1))
        new.write(old.read(metadata_end - start) + text(key) + struct.pack("<I", 8) + text(value))
        new.write(old.read(infos_end - metadata_end))
        new.write(b"\0" * (-new.tell() % 32))
        old.seek(-infos_end % 32, 1)
        shutil.copyfileobj(old, new, 1 << 20)


@pytest.mark.model
async def test_a_template_for_tools_is_found(tmp_path: Path) -> None:
    path = tmp_path / "with-tools.gguf"
    with_key(SMOLLM2.path, path, "tokenizer.chat_template.tool_use", "{{ tools }}é")
    async with open_llama(LlamaConfig(model=str(path), slots=1, context_length=32, batch=32)) as engine:
        assert engine.info.chat_templates == {"tool_use": "{{ tools }}é"}
        assert engine.info.chat_template is not None and "<|im_start|>" in engine.info.chat_template
    path.unlink()


@pytest.mark.model
def test_what_was_said_is_gone_on_from(table: Table) -> None:
    """The prompt is what the model would have read had it said so itself, and its answer joins up with it."""
    vocabulary, model = table.stepper.vocabulary, table.stepper.info
    chat = ChatModel({"default": model.chat_template or ""}, model.bos_token, model.eos_token, model.special_tokens)
    asked = {"role": "user", "content": "What is two plus two?"}

    def tokens(*messages: dict[str, str], ending: Ending = "opening") -> tuple[int, ...]:
        segments = chat.render(ChatPrompt(messages=messages, ending=ending))
        return tuple(token for text, special in segments for token in vocabulary.tokenize(text, special))

    opened = tokens(asked)
    whole = table.start(opened)
    table.play(whole, tokens=16)
    words = whole.text.split(" ")
    assert len(words) > 8
    for count in (1, 2, 5, 8):
        said = " ".join(words[:count])
        begun = tokens(asked, {"role": "assistant", "content": said}, ending="continued")
        assert begun == opened + tuple(vocabulary.tokenize(said))
        table.fresh()
        played = table.start(begun)
        table.play(played, tokens=len(opened) + 16 - len(begun))
        assert said + played.text == whole.text


@pytest.mark.model
async def test_a_text_begins_with_a_token_where_the_model_file_says_so(tmp_path: Path) -> None:
    """The default model's says no; its copy says yes, and then llama.cpp itself adds what the server would."""
    key = b"tokenizer.ggml.add_bos_token" + struct.pack("<I", 7)  # and a byte: a boolean
    path = tmp_path / "begins.gguf"
    shutil.copyfile(SMOLLM2.path, path)
    with path.open("r+b") as file:
        file.seek(file.read(1 << 23).index(key + b"\0") + len(key))
        file.write(b"\1")
    for model, add_bos in ((SMOLLM2.path, False), (path, True)):
        async with open_llama(LlamaConfig(model=str(model), slots=1, context_length=32, batch=32)) as engine:
            assert (engine.info.add_bos, engine.info.bos_token) == (add_bos, "<|im_start|>")
            plain = await engine.tokenize("Hi", special=True)
            begun = await engine.tokenize("<|im_start|>Hi", special=True)
            assert begun == [1, *plain]
            theirs = list(engine._vocabulary._vocab.tokenize("Hi", True, True))  # type: ignore[attr-defined]
            assert theirs == (begun if add_bos else plain)
    path.unlink()
