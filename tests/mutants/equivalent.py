"""Mutants that survived, were read, and cannot change what the program does: each with the reason, in ``equivalent.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

__all__ = ["Equivalent", "changed_lines", "read", "why"]

FILE = Path(__file__).with_name("equivalent.toml")


class Equivalent(NamedTuple):
    module: str
    function: str
    operator: str
    change: str
    """Its lines that begin with - or +, as `changed_lines` gives them."""
    why: str


def read(path: Path = FILE) -> list[Equivalent]:
    return [
        Equivalent(**{**one, "change": changed_lines(one["change"])})
        for one in tomllib.loads(path.read_text()).get("mutant", [])
    ]


def changed_lines(diff: str) -> str:
    """Without what stands around them and without line numbers, which other changes of the module move."""
    lines = [line for line in diff.splitlines() if line[:1] in ("-", "+")]
    return "\n".join(line[0] + line[1:].strip() for line in lines)


def why(mutant: dict[str, object], known: list[Equivalent]) -> str:
    """The reason; "": nothing says that it is equivalent."""
    wanted = (mutant["module"], mutant["function"], mutant["operator"], changed_lines(str(mutant["diff"])))
    return next((one.why for one in known if one[:4] == wanted), "")
