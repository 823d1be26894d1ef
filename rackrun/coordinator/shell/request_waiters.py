"""HTTP clients that wait for the answers to their requests."""

from __future__ import annotations

import asyncio
from collections import deque

from rackrun.protocol.commands import Answer, StopJob

__all__ = ["ANSWERS_MAX", "Requests"]

ANSWERS_MAX = 1_000
"""Number of answers that are kept for clients that ask again."""


class Requests:
    """Latest answers to requests. The end of the job answers all waiting clients."""

    def __init__(self) -> None:
        self._over: StopJob | None = None
        self._newest: dict[str, Answer] = {}
        self._order: deque[str] = deque()
        self._waiting: dict[str, asyncio.Event] = {}

    def record_answer(self, answer: Answer) -> None:
        """Keep ``answer``, from the core, as the latest answer to its request.

        Unless it only says that the request has begun, the clients that wait for it get it. Only the last `ANSWERS_MAX`
        requests are kept.
        """
        if answer.request not in self._newest:
            self._order.append(answer.request)
            if len(self._order) > ANSWERS_MAX:
                del self._newest[self._order.popleft()]
        self._newest[answer.request] = answer
        if answer.outcome != "begun" and (waiting := self._waiting.pop(answer.request, None)):
            waiting.set()

    def newest(self, request: str) -> Answer | None:
        """Return the latest answer to a request; None if the request is unknown or too old."""
        return self._newest.get(request)

    async def last(self, request: str) -> Answer | None:
        """Wait for the final answer to a request; None as in `newest`."""
        if (answer := self.newest(request)) is None:
            return None
        if answer.outcome == "begun" and self._over is None:
            await self._waiting.setdefault(request, asyncio.Event()).wait()
            answer = self._newest[request]
        return self.ended(request) if answer.outcome == "begun" else answer

    def end(self, stop: StopJob) -> None:
        """Answer all waiting clients: the job has ended."""
        self._over = stop
        for waiting in self._waiting.values():
            waiting.set()

    def ended(self, request: str) -> Answer:
        """Return the answer for a client that asks after the end of the job."""
        because = self._over.because if self._over is not None else "no reason is known"
        text = f"the job has ended: {because}"
        return Answer(request=request, outcome="refused", refusal="over", text=text, remedy="see rackctl status.")
