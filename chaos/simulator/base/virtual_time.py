"""Virtual time: a heap of what is to happen, by (time, priority, order of the requests)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["FIRST", "LAST", "NS", "Engine"]

NS = 1_000_000_000
FIRST, MIDDLE, LAST = 0, 1, 2
"""The order of things that happen at the same time."""


class Engine:
    """The heap of calls that are due, and the present time."""

    __slots__ = ("_heap", "_order", "now_ns", "ran")

    def __init__(self) -> None:
        self.now_ns = 0
        self.ran = 0
        """The number of calls made so far."""
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, t_ns: int, do: Callable[..., None], *args: object, priority: int = MIDDLE) -> None:
        """Call ``do`` at ``t_ns``; a time in the past means now.

        A request is never withdrawn: ``do`` has to check whether it is still wanted.
        """
        self._order += 1
        heapq.heappush(self._heap, (max(t_ns, self.now_ns), priority, self._order, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: object, priority: int = MIDDLE) -> None:
        self._order += 1
        t_ns = max(self.now_ns + round(seconds * NS), self.now_ns)
        heapq.heappush(self._heap, (t_ns, priority, self._order, do, args))

    def step(self) -> bool:
        """Make the next call. Returns False if there is none."""
        if not self._heap:
            return False
        self.now_ns, _, _, do, args = heapq.heappop(self._heap)
        self.ran += 1
        do(*args)
        return True

    @property
    def now_s(self) -> float:
        return self.now_ns / NS

    @property
    def now_ms(self) -> int:
        return self.now_ns // 1_000_000
