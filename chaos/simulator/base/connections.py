"""Connections between agents and the coordinator, and which tray reaches which.

Each connection is first in, first out; several may deliver in any order. A message sent into a partition waits, as TCP
would send it again, until the partition heals or the connection is given up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rackrun.chaos.simulator.base.coverage_marks import Buggify, CoverageMarks
from rackrun.chaos.simulator.base.virtual_time import NS, Engine

__all__ = ["TrayCuts", "SimulatedChannel"]


@dataclass(slots=True)
class TrayCuts:
    """How one tray is cut off: the number of faults that cut it in each direction, and the delay of its messages."""

    up: int = 0
    down: int = 0
    peers: int = 0
    resets: int = 0
    """The number of faults that reset its connections to the coordinator, new ones included."""
    latency_s: float = 0.0
    jitter_s: float = 0.0

    @property
    def silent(self) -> bool:
        """Whether pings are not answered."""
        return self.up > 0 or self.down > 0


@dataclass(slots=True)
class SimulatedChannel:
    """One direction of one connection."""

    engine: Engine
    draw: random.Random
    buggify: Buggify
    marks: CoverageMarks
    latency_s: float
    cuts: TrayCuts
    is_cut: Callable[[], bool]
    deliver: Callable[[Any], None]
    closed: bool = False
    _last_ns: int = 0
    _waiting: deque[object] = field(default_factory=deque)

    def send(self, message: object) -> None:
        """Send a message, which arrives after the latency or, while the connection is cut, once it heals."""
        if self.closed:
            return
        if self._waiting or self.is_cut():
            self.marks.sometimes("a message waited for a partition to heal")
            self._waiting.append(message)
            return
        late = self.cuts.latency_s + self.cuts.jitter_s * self.draw.random()
        seconds = self.latency_s * (0.5 + self.draw.random()) + late
        if self.buggify("network: a slow message"):
            seconds += self.draw.random() * 2.0
        self._last_ns = max(self._last_ns, self.engine.now_ns + round(seconds * NS))
        self.engine.at(self._last_ns, self._arrive, message)

    def heal(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for message in waiting:
            self.send(message)

    def drop(self) -> None:
        """Lose all messages that wait."""
        self._waiting.clear()

    def _arrive(self, message: object) -> None:
        if not self.closed:
            self.deliver(message)
