"""How commands fail: what people can mend is a line on stderr and exit code 1; only our own faults show a trace."""

from __future__ import annotations

from typing import Any

import click

from tokenflow.errors import ConfigError, TokenflowError

INTERRUPTED = 130
"""The exit code of a shell command that SIGINT ended."""


class Group(click.Group):
    """A group of commands that all fail alike."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (TokenflowError, BaseExceptionGroup) as exc:
            known = _known(exc)
            if not known:
                raise
            for line in known:
                click.echo(f"tokenflow: {line}", err=True)
            ctx.exit(1)


def _known(exc: BaseException) -> list[str]:
    """The lines for people in an error, or in a group that holds nothing else; none for anything unforeseen."""
    if isinstance(exc, BaseExceptionGroup):
        parts = [_known(inner) for inner in exc.exceptions]
        return list(dict.fromkeys(line for part in parts for line in part)) if all(parts) else []
    if isinstance(exc, ConfigError):
        return exc.problems
    # A bare TokenflowError is a fault of ours by its own definition, and wants its trace.
    return [exc.message] if isinstance(exc, TokenflowError) and type(exc) is not TokenflowError else []
