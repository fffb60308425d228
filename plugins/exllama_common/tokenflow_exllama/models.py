"""What is in a model's directory: whether it is one, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    directory = Path(path).expanduser().absolute()
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "there is no such directory"
        raise StartupError(f"{directory}: {what}; give the directory of an {kind}.")
    for pattern in files:
        if not any(directory.glob(pattern)):
            raise StartupError(f"{directory}: there is no {pattern} in it; give the directory of an {kind}.")
    method = (read_json(directory / "config.json").get("quantization_config") or {}).get("quant_method")
    if method in not_read:
        raise StartupError(f"{directory}: this model is quantized as {method!r}; {not_read[method]}.")
    return directory


def read_json(path: Path) -> dict[str, Any]:
    """StartupError if there is no JSON object in it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise StartupError(f"{path}: cannot be read ({one_line(exc)}); fetch the model anew.") from exc
    if not isinstance(values, dict):
        raise StartupError(f"{path}: there is no JSON object in it; fetch the model anew.")
    return values


def chat_template(directory: Path) -> str | None:
    """The model's own template: a file beside it, or a value in its tokenizer's settings; None: it has none."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    settings = directory / "tokenizer_config.json"
    value = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(value, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in value}
        value = by_name.get("default", next(iter(by_name.values()), None))
    return value or None


def weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def one_line(exc: BaseException) -> str:
    """What it says, as a part of a sentence."""
    return " ".join(str(exc).split()).rstrip(".") or type(exc).__name__
