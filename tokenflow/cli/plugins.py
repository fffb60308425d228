"""`tokenflow plugins`."""

from __future__ import annotations

import click

from tokenflow.engines.registry import OURS, Registry, installed


@click.command("plugins")
@click.option("--load", is_flag=True, help="Load each one, and show the engines, sinks and models that it offers.")
def plugins_command(load: bool) -> None:
    """List the installed plugins.

    None is loaded by being installed: only what a configuration names is.
    """
    found = installed()
    if not found:
        click.echo(f"No plugin is installed. For an engine, in a clone of tokenflow: pip install {OURS['llamacpp']}")
    registry = Registry()
    failures = registry.load_all() if load else {}
    width = max((len(plugin.name) for plugin in found), default=0)
    for plugin in found:
        click.echo(f"{plugin.name:<{width}}  {plugin.origin}")
        if error := failures.get(plugin.name):
            click.echo(f"  fails: {error.message}")
        elif offered := registry.offered_by(plugin):
            engines = [engine.name for engine in offered.engines]
            models = [source.name for engine in offered.engines for source in engine.models]
            for kind, names in ("engines", engines), ("sinks", [s.name for s in offered.sinks]), ("models", models):
                if names:
                    click.echo(f"  {kind}: {', '.join(names)}")
