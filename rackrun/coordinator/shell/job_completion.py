"""The end of a job, for whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from rackrun.protocol.commands import StopJob

__all__ = ["JobCompletion"]


class JobCompletion:
    """The end of one job. Any number of tasks may await it, and each gets the `StopJob`. It is made without an event
    loop."""

    def __init__(self) -> None:
        self.stop: StopJob | None = None
        """How the job ended; None: it goes on."""
        self._reached = asyncio.Event()

    def reach(self, stop: StopJob) -> None:
        """End the job. Only the first end counts."""
        if self.stop is None:
            self.stop = stop
            self._reached.set()

    def __await__(self) -> Generator[Any, None, StopJob]:
        yield from self._reached.wait().__await__()
        assert self.stop is not None, "it is reached"
        return self.stop
