"""``rackctl --version``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rackrun.version import __version__
from tests.ctl.conftest import Said


@pytest.mark.parametrize("words", [["--version"], ["--version", "status"]], ids=" ".join)
def test_the_version_is_printed_and_nothing_else_is_done(rackctl: Callable[..., Said], words: list[str]) -> None:
    said = rackctl(*words)
    assert (said.code, said.out, said.err) == (0, f"rackrun {__version__}\n", "")


def test_an_option_of_a_command_is_not_it(rackctl: Callable[..., Said]) -> None:
    assert rackctl("status", "--version").code == 2
