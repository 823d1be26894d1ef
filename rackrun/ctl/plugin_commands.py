"""``rackctl chaos`` and ``rackctl plan`` are `rackrun.chaos`'s own, which may import all of rackrun and which nothing imports: they are
looked up by name, when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["WithChaos"]

_MODULES = {"chaos": "rackrun.chaos.cli.chaos_commands", "plan": "rackrun.chaos.planner.plan_commands"}


class WithChaos(TyperGroup):
    """The commands of ``rackctl``, and those of `rackrun.chaos` under their names. (Contexts and commands are click's, or typer's own copy.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_MODULES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        return typer.main.get_command(getattr(import_module(_MODULES[cmd_name]), cmd_name))
