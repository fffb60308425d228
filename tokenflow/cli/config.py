"""`tokenflow config check|show|schema|template`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tokenflow.cli.group import Group
from tokenflow.cli.options import config_options, open_config
from tokenflow.config import schema, show, template
from tokenflow.engines.registry import Registry


@click.group("config", cls=Group)
def config_group() -> None:
    """Check, show and write configurations."""


@config_group.command("check")
@config_options
def config_check(path: Path | None, sets: tuple[str, ...]) -> None:
    """Say whether the configuration holds, and its files can be had; if not, everything that is wrong with it."""
    loaded, _ = open_config(path, sets, look=True)
    click.echo(f"The configuration holds. Models: {', '.join(loaded.config.models)}.")


@config_group.command("show")
@config_options
def config_show(path: Path | None, sets: tuple[str, ...]) -> None:
    """Show every key, its value, and where it comes from. Secrets are not shown."""
    loaded, _ = open_config(path, sets)
    click.echo(show(loaded), nl=False)


@config_group.command("schema")
@config_options
@click.option("--installed", is_flag=True, help="With all installed plugins, and without a configuration.")
def config_schema(path: Path | None, sets: tuple[str, ...], installed: bool) -> None:
    """Print a JSON schema of the configuration and the plugins that it names."""
    if installed:
        registry = Registry()
        for error in registry.load_all().values():
            click.echo(f"tokenflow: left out: {error.message}", err=True)
    else:
        _, registry = open_config(path, sets)
    engines = {name: engine.config for name, engine in registry.engines().items()}
    sinks = {name: sink.config for name, sink in registry.sinks().items()}
    click.echo(json.dumps(schema(engines, sinks), indent=2, ensure_ascii=False))


@config_group.command("template")
@click.option("--model", "models", metavar="ID=ENGINE", multiple=True, default=["smollm2=llamacpp"], show_default=True)
@click.option("--sink", "sinks", metavar="NAME", multiple=True, default=["prometheus", "ledger"], show_default=True)
def config_template(models: tuple[str, ...], sinks: tuple[str, ...]) -> None:
    """Write a configuration with every key, its default and its help."""
    registry = Registry()
    named = {}
    for text in models:
        id, _, engine = text.rpartition("=")
        named[id or engine] = (engine, registry.engine_config(engine))
    click.echo(template(named, {name: registry.sink_config(name) for name in sinks}), nl=False)
