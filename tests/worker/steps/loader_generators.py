"""Generators around a loader that a script keeps from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def endless(loader: Any) -> Iterator[Any]:
    """Go on with the loader's next step when one is over. It keeps nothing but the micro-batch."""
    while True:
        yield from loader


def counted(loader: Any) -> Iterator[Any]:
    """The same, and each micro-batch depends on how many came before, which cannot be put back."""
    number = 0
    while True:
        for batch in loader:
            number += 1
            yield batch * (1 + 0.1 * (number % 5))
