"""Which values of a parametrized test only ``make stories`` runs, because ``make test`` shows the same with others."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["in_stories"]


def in_stories(*values: Any, names: int = 1) -> list[Any]:
    """Return each value as a variant that only ``make stories`` runs. ``names``: of parameters; with several, each value
    is a tuple with one for each."""
    return [pytest.param(*(value if names > 1 else (value,)), marks=pytest.mark.stories) for value in values]
