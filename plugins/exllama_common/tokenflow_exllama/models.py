"""What is in a model's directory: whether it is one, and its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenflow.api import StartupError

FILES = ("config.json", "tokenizer.json", "*.safetensors")


def model_directory(path: str, *, kind: str, not_read: Mapping[str, str], files: tuple[str, ...] = FILES) -> Path:
    """The directory of a model, by the look of it.

    Args:
        kind: what it should be the directory of: "EXL3 model".
        not_read: quantizations that the library does not know, as config.json names them, with the way out for each.
        files: what must be in it.

    Raises:
        StartupError: it is none.
    """
    directory = _directory(path, f"an {kind}", files)
    method = (read_json(directory / "config.json").get("quantization_config") or {}).get("quant_method")
    if method in not_read:
        raise StartupError(f"{directory}: this model is quantized as {method!r}; {not_read[method]}.")
    return directory


def lora_directory(path: str) -> Path:
    """The directory of a LoRA adapter, by the look of it. Raises StartupError: it is none."""
    return _directory(path, "a LoRA adapter", ("adapter_config.json", "adapter_model.*"))


def _directory(path: str, what: str, files: tuple[str, ...]) -> Path:
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "there is no such directory"
        raise StartupError(f"{directory}: {found}; give the directory of {what}.")
    for pattern in files:
        if not any(directory.glob(pattern)):
            raise StartupError(f"{directory}: there is no {pattern} in it; give the directory of {what}.")
    return directory


def missing_directories(paths: Mapping[str, str | None], look: Callable[[str], object]) -> Iterator[tuple[str, str]]:
    """What is wrong with each directory that is named, by its key. `look` raises StartupError where something is."""
    for key, path in paths.items():
        try:
            if path is not None:
                look(path)
        except StartupError as exc:
            yield key, exc.message.removesuffix(".")


def read_json(path: Path) -> dict[str, Any]:
    """StartupError if there is no JSON object in it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise StartupError(f"{path}: cannot be read ({one_line(exc)}); fetch the model anew.") from exc
    if not isinstance(values, dict):
        raise StartupError(f"{path}: there is no JSON object in it; fetch the model anew.")
    return values


def chat_templates(directory: Path) -> dict[str, str]:
    """The model's own templates by name: files beside it, else what its tokenizer's settings have.

    There is a `default` where there are any.
    """
    found = {file.stem: file for file in directory.glob("additional_chat_templates/*.jinja")}
    if (file := directory / "chat_template.jinja").is_file():
        found["default"] = file
    if found:
        return _with_default({name: file.read_text(encoding="utf-8") for name, file in found.items()})
    settings = directory / "tokenizer_config.json"
    value = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(value, list):
        return _with_default({entry["name"]: entry["template"] for entry in value})
    return {"default": value} if value else {}


def _with_default(templates: dict[str, str]) -> dict[str, str]:
    return {"default": next(iter(templates.values())), **templates} if templates else {}


def check_same_tokens(main: Path, draft: Path | None = None) -> None:
    """StartupError if `draft` cannot guess for `main`: its token ids would mean something else.

    One that has no tokens of its own was made for some model's; it is taken at its word.
    """
    if draft is not None and (draft / "tokenizer.json").is_file():
        main_tokens, draft_tokens = (
            read_json(path / "tokenizer.json").get("model", {}).get("vocab") for path in (main, draft)
        )
        if main_tokens != draft_tokens:
            raise StartupError(f"{draft}: has other tokens than {main}, so it cannot guess for it; choose another.")


def weights_bytes(directory: Path) -> int:
    """Of what is sure to go to the GPUs.

    Not so the embeddings of tokens, which both libraries keep in the machine's own memory, what a model sees and hears
    with, its head that guesses ahead, and weights that are there a second time in Mistral's own format.
    """
    files = list(directory.glob("*.safetensors"))
    own = [path for path in files if not path.name.startswith("consolidated")]
    return sum(map(_gpu_bytes, own or files))


_ELSEWHERE = re.compile(
    r"(^|\.)((embed_tokens\w*|wte|tok_embeddings|word_embeddings)\.weight$|(vision|visual|audio|multi_modal|mtp)\w*\.)"
)


def _gpu_bytes(path: Path) -> int:
    """As the beginning of a safetensors file says; if it says nothing, the library will have a word about it."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            tensors = json.loads(file.read(min(size, int.from_bytes(file.read(8), "little"))))
        spans = [
            entry["data_offsets"]
            for name, entry in tensors.items()
            if "data_offsets" in entry and not _ELSEWHERE.search(name)
        ]
        return sum(end - begin for begin, end in spans)
    except (OSError, ValueError, TypeError, AttributeError):
        return size


def one_line(exc: BaseException) -> str:
    """What it says, as a part of a sentence."""
    return " ".join(str(exc).split()).rstrip(".") or type(exc).__name__
