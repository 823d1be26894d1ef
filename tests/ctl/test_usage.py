"""A command line that rackctl does not understand is refused in one line, with the help that explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Rackctl = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (("chaos", "run", "--seed", "x", "plan.yaml", "--", "train.py"), "'--seed': ", "rackctl chaos run --help"),
        (("chaos", "run", "--limit", "0", "plan.yaml", "--", "train.py"), "'--limit': ", "rackctl chaos run --help"),
        (("chaos", "soak", "--minutes", "", "--", "train.py"), "'--minutes': ", "rackctl chaos soak --help"),
        (("chaos", "run"), "PLAN", "rackctl chaos run --help"),
        (("shrink", "--to", "half"), "'--to': ", "rackctl shrink --help"),
        (("ckpt", "gc", "--keep-last", "1e99", "here"), "'--keep-last': ", "rackctl ckpt gc --help"),
        (("status", "--nothing"), "--nothing", "rackctl status --help"),
        (("status", "one", "two", "three"), "two three", "rackctl status --help"),
        (("nothing",), "'nothing'", "rackctl --help"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(
    rackctl: Rackctl, arguments: tuple[str, ...], what: str, remedy: str
) -> None:
    said = rackctl(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("rackctl: error: ")
    assert what in said.err
    assert said.err.endswith(f" Remedy: see {remedy}.\n")


def test_without_a_command_the_help_is_shown(rackctl: Rackctl) -> None:
    said = rackctl()
    assert said.code == 2
    assert "Commands:" in said.out + said.err
