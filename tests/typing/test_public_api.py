"""Whoever changes what users call sees it in a diff."""

from __future__ import annotations

from tests.typing.public_api import FILE, described


def test_public_names_and_signatures_are_those_that_are_written_down() -> None:
    """To write them down anew: ``python -m tests.typing.public_api``. A name that goes, or an argument, belongs into CHANGELOG.md."""
    assert described().splitlines() == FILE.read_text(encoding="utf-8").splitlines()
