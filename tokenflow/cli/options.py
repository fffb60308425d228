"""Options that several commands share, and what they lead to: a loaded configuration with its plugins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from tokenflow.config import Flag, Loaded, load, strays
from tokenflow.config.raw import PREFIX
from tokenflow.engines.registry import Registry
from tokenflow.errors import StartupError

F = TypeVar("F", bound=Callable[..., Any])

SEARCHED = (Path("tokenflow.toml"), Path("conf/tokenflow.toml"))
"""Where a configuration is looked for, after `-c` and `$TOKENFLOW_CONFIG`."""

config_option = click.option(
    "-c",
    "--config",
    "path",
    type=click.Path(path_type=Path),
    envvar="TOKENFLOW_CONFIG",
    show_envvar=True,
    help=f"Configuration file. Otherwise the first that exists of {', '.join(map(str, SEARCHED))}.",
)
set_option = click.option(
    "--set",
    "sets",
    metavar="KEY=VALUE",
    multiple=True,
    help="Set a key over file and environment, e.g. --set stream.window=32. Repeatable.",
)


def config_options(command: F) -> F:
    """`-c` and `--set`."""
    return config_option(set_option(command))


def tell(text: str) -> None:
    """A line for people on standard error."""
    click.echo(f"tokenflow: {text}", err=True)


def open_config(
    path: Path | None,
    sets: Iterable[str],
    flags: Mapping[str, Flag] | None = None,
    *,
    look: bool = False,
    warn: Callable[[str], None] = tell,
) -> tuple[Loaded, Registry]:
    """Load the configuration and the plugins that it names; `look` whether its files are there.

    Variables that are ignored go to `warn`.

    Raises:
        ConfigError: it does not hold.
    """
    for text in strays(os.environ):
        warn(text)
    registry = Registry()
    overrides = _overrides(sets) | dict(flags or {})
    found = find_config(path, overrides)
    return load(found, os.environ, overrides, registry, look=look, template_fault=template_fault), registry


def template_fault(given: str | Path) -> str | None:
    """What is wrong with a chat template, given as text or as a file; None: nothing."""
    from tokenflow.chat.template import ChatTemplate, TemplateError  # here, for few configurations have one

    try:
        ChatTemplate(given.read_text(encoding="utf-8") if isinstance(given, Path) else given)
    except UnicodeDecodeError as exc:
        return f"byte {exc.object[exc.start]:#x} is not UTF-8; save it as UTF-8"
    except (TemplateError, OSError) as exc:
        return f"{exc}; mend it, or leave it out and have the model's own"
    return None


def find_config(given: Path | None, overrides: Iterable[str] = ()) -> Path | None:
    """The file to read; None: the environment or flags alone are meant to configure.

    Raises:
        StartupError: nothing does.
    """
    if given is not None:
        return given
    for path in SEARCHED:
        if path.exists():
            return path
    if any(name.startswith(PREFIX) and "__" in name for name in os.environ):
        return None
    if any(re.match(r"models\b", key) for key in overrides):
        return None
    places = " nor ".join(map(str, SEARCHED))
    raise StartupError(
        f"no configuration: there is neither {places} here. Name one with -c FILE or TOKENFLOW_CONFIG, "
        "write one with `tokenflow config template > tokenflow.toml`, or do without: "
        "--set models.qwen.engine=llamacpp --set models.qwen.model=FILE.gguf"
    )


def _overrides(sets: Iterable[str]) -> dict[str, object]:
    overrides: dict[str, object] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} has no '='; write --set server.port=9000", param_hint="--set")
        overrides[key.strip()] = value.strip()
    return overrides
