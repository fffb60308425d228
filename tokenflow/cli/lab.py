"""`tokenflow lab`: the streaming exercise, measured against a running server and written down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import trio

from tokenflow.cli.figures import TOKENS_IN_ALL

FOLDER = Path("lab-out")


@click.command("lab")
@click.option("--url", default="http://127.0.0.1:8170", show_default=True, help="A server with conf/lab.toml.")
@click.option("--key", envvar="TOKENFLOW_KEY", show_envvar=True, help="API key.")
@click.option("--prompt", default="The duck swims", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=FOLDER,
    show_default=True,
    help="Folder for the results.",
)
@click.pass_context
def lab_command(ctx: click.Context, url: str, key: str | None, prompt: str, out: Path) -> None:
    """Measure what streaming is about, against `tokenflow serve -c conf/lab.toml`.

    Is the same prompt the same text? How long to the first token, and between tokens? And when a reader leaves in the
    middle, how much is generated for nobody? Each answer is a file in the folder; any that is out of bounds is told,
    and the exit code is 1.
    """
    from tokenflow.cli.measure import Measuring  # here, for the HTTP client is slow to import

    measuring = Measuring(url=url.rstrip("/"), key=key, prompt=prompt)
    trio.run(measuring.check)
    with _bar(TOKENS_IN_ALL) as step:
        found = trio.run(measuring.run, step)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.files().items():
        (out / name).write_text(text, encoding="utf-8")
    click.echo(found.summary())
    click.echo(f"In {out}: {', '.join(found.files())}")
    _judge(ctx, found.problems())


def _judge(ctx: click.Context, problems: list[str]) -> None:
    for problem in problems:
        click.echo(f"tokenflow: out of bounds: {problem}", err=True)
    if problems:
        ctx.exit(1)


@contextmanager
def _bar(length: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda steps: None
        return
    with click.progressbar(length=length, label="Measuring", file=sys.stderr) as bar:
        yield bar.update
