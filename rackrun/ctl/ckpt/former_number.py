"""The former name of the checkpoint number in `rackctl ckpt`, *generation*: a hidden option, and a second key in JSON."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperCommand

from rackrun.errors import UsageError

__all__ = ["NumberedCommand", "numbered"]

_FORMER, _NAME = "--generation", "--number"


class NumberedCommand(TyperCommand):
    """A command with the option ``--number`` that also accepts its former name, ``--generation``.

    The former name is not in the help. Who uses it is told on stderr. Raises UsageError when both are given.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: click's Context, or that of typer's own copy
        end = args.index("--") if "--" in args else len(args)
        renamed = [_renamed(word) for word in args[:end]] + args[end:]
        if renamed != args:
            if any(word.partition("=")[0] == _NAME for word in args[:end]):
                raise UsageError(f"{_FORMER} and {_NAME} cannot be given together.", remedy=f"give {_NAME} alone.")
            print(f"rackctl: {_FORMER} is deprecated: it is called {_NAME} now.", file=sys.stderr)
        return super().parse_args(ctx, renamed)


def numbered(number: int) -> dict[str, int]:
    """Return a checkpoint number for JSON: as ``number``, and under its former key ``generation``."""
    return {"number": number, "generation": number}


def _renamed(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{_NAME}{equals}{value}" if option == _FORMER else word
