"""``rackctl chaos`` is `rackrun.chaos`'s own, which may import all of rackrun and which nothing imports: it is looked up by name, when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["WithChaos"]

_MODULE = "rackrun.chaos.commands"


class WithChaos(TyperGroup):
    """The commands of ``rackctl``, and those of `rackrun.chaos` under their name. (Contexts and commands are click's, or typer's own copy.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "chaos"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name != "chaos":
            return super().get_command(ctx, cmd_name)
        return typer.main.get_command(import_module(_MODULE).chaos)
