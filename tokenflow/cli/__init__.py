"""The command line: `tokenflow serve`, `chat`, `lab`, `pull`, `config`, `plugins`, `engine`."""

from __future__ import annotations

import click

from tokenflow import __version__, compiled
from tokenflow.cli.chat import chat_command
from tokenflow.cli.config import config_group
from tokenflow.cli.engine import engine_group
from tokenflow.cli.group import Group
from tokenflow.cli.lab import lab_command
from tokenflow.cli.plugins import plugins_command
from tokenflow.cli.pull import pull_command
from tokenflow.cli.serve import serve_command


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(f"{__version__}, compiled" if compiled() else __version__, prog_name="tokenflow")
def main() -> None:
    """Stream tokens from a language model on your own hardware to everyone who reads from it."""


for command in (serve_command, chat_command, lab_command, pull_command, config_group, plugins_command, engine_group):
    main.add_command(command)
