"""Commands of ``rackctl`` from other packages: entry points of the group ``rackrun.commands``, each a `typer.Typer`.

They are loaded when they are used. ``chaos`` and ``plan`` are such commands (`rackrun.chaos` may import all of rackrun,
and nothing imports it).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["GROUP", "WithPlugins"]

GROUP = "rackrun.commands"


class WithPlugins(TyperGroup):
    """The commands of ``rackctl``, then those of plugins, sorted by name. (Contexts and commands are click's, or
    typer's own copy.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and (plugin := _plugins().get(cmd_name)):
            return typer.main.get_command(plugin.load())
        return found


def _plugins() -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in entry_points(group=GROUP)}
