"""`tokenflow engine check`."""

from __future__ import annotations

from pathlib import Path

import click

from tokenflow.cli.group import Group
from tokenflow.cli.options import config_options, open_config
from tokenflow.errors import StartupError


@click.group("engine", cls=Group)
def engine_group() -> None:
    """For those who write engines."""


@engine_group.command("check")
@click.argument("name")
@config_options
@click.pass_context
def check(ctx: click.Context, name: str, path: Path | None, sets: tuple[str, ...]) -> None:
    """Run the conformance kit against the engine of the configured model NAME."""
    loaded, registry = open_config(path, sets)
    if name not in loaded.config.models:
        raise StartupError(f'no model "{name}" is configured; there is {", ".join(loaded.config.models)}')
    try:
        from tokenflow.testing.check import run  # here, for it needs pytest, which a server does not
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("tokenflow"):
            raise
        raise StartupError(f"the conformance kit needs {exc.name}; install it: pip install pytest pytest-trio") from exc
    ctx.exit(run(loaded.config, registry, name))
