"""The event loop of a process in virtual time, which may be stopped (SIGSTOP) and go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rackrun.chaos.simulator.base.virtual_time import NS, Engine

__all__ = ["VirtualLoop"]


class _VirtualTimer:
    """A call that is due later, as `asyncio.TimerHandle`."""

    __slots__ = ("callback", "cancelled")

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback, self.cancelled = callback, False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualLoop:
    """The loop of one process: a `rackrun.coordinator.shell.ports.Loop`.

    While the process is stopped nothing is called. What has arrived or come due meanwhile is called in that order when
    it goes on. ``late_s`` returns by how many seconds the next timer is late.
    """

    def __init__(self, engine: Engine, late_s: Callable[[], float]) -> None:
        self._engine, self._late_s = engine, late_s
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] | None = None
        """What waits for the process to go on; None: it is not stopped."""

    # -- as the process sees it
    def time(self) -> float:
        return self._engine.now_ns / NS

    def call_later(self, delay: float, callback: Callable[[], object]) -> _VirtualTimer:
        timer = _VirtualTimer(callback)
        at_ns = self._engine.now_ns + round(delay * NS) + round(self._late_s() * NS)
        self._engine.at(at_ns, self.call, self._fire, timer)
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        self._engine.after(0.0, self.call, callback)

    def _fire(self, timer: _VirtualTimer) -> None:
        if not timer.cancelled:
            timer.callback()

    # -- from outside
    @property
    def stopped(self) -> bool:
        return self._backlog is not None

    def call(self, do: Callable[..., object], *args: object) -> None:
        """Call ``do`` now, or when the process goes on."""
        if self._backlog is not None:
            self._backlog.append((do, args))
        else:
            do(*args)

    def stop(self) -> None:
        if self._backlog is None:
            self._backlog = deque()

    def go_on(self) -> None:
        backlog, self._backlog = self._backlog or deque(), None
        for do, args in backlog:
            self.call(do, *args)
