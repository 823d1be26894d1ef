"""Virtual time: a heap of what is to happen, by (time, priority, order of being asked for)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["FIRST", "LAST", "NS", "Engine"]

NS = 1_000_000_000
FIRST, MIDDLE, LAST = 0, 1, 2
"""Of what happens at the same time."""


class Engine:
    __slots__ = ("_heap", "_order", "now_ns", "ran")

    def __init__(self) -> None:
        self.now_ns = 0
        self.ran = 0
        """So many things have happened."""
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, t_ns: int, do: Callable[..., None], *args: object, priority: int = MIDDLE) -> None:
        """What is asked for in the past happens now. Nothing is ever taken back: ``do`` looks whether it is still meant."""
        self._order += 1
        heapq.heappush(self._heap, (max(t_ns, self.now_ns), priority, self._order, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: object, priority: int = MIDDLE) -> None:
        self.at(self.now_ns + round(seconds * NS), do, *args, priority=priority)

    def step(self) -> bool:
        """The next thing happens; False: there is none."""
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
