"""Who has asked for a drain, a return or a swap over HTTP, and waits for what becomes of it."""

from __future__ import annotations

import asyncio
from collections import deque

from rackrun.protocol.commands import Answer, StopJob

__all__ = ["ANSWERS_MAX", "Requests"]

ANSWERS_MAX = 1_000
"""That are kept for who asks again."""


class Requests:
    """``over``: the end of the job, which answers whoever still waits."""

    def __init__(self, over: asyncio.Future[StopJob]) -> None:
        self._over = over
        self._newest: dict[str, Answer] = {}
        self._order: deque[str] = deque()
        self._waiting: dict[str, asyncio.Event] = {}

    def heard(self, answer: Answer) -> None:
        if answer.request not in self._newest:
            self._order.append(answer.request)
            if len(self._order) > ANSWERS_MAX:
                del self._newest[self._order.popleft()]
        self._newest[answer.request] = answer
        if answer.outcome != "begun" and (waiting := self._waiting.pop(answer.request, None)):
            waiting.set()

    def newest(self, request: str) -> Answer | None:
        """None: nobody has asked that, or it was long ago."""
        return self._newest.get(request)

    async def last(self, request: str) -> Answer | None:
        """The answer after which no other comes; None as `newest`."""
        if (answer := self.newest(request)) is None:
            return None
        if answer.outcome == "begun":
            done = self._waiting.setdefault(request, asyncio.Event())
            waits = asyncio.create_task(done.wait())
            try:
                await asyncio.wait((waits, self._over), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waits.cancel()
            answer = self._newest[request]
        return self.ended(request) if answer.outcome == "begun" else answer

    def ended(self, request: str) -> Answer:
        """For who asks too late."""
        because = (
            self._over.result().because if self._over.done() and not self._over.cancelled() else "no reason is known"
        )
        text = f"the job has ended: {because}"
        return Answer(request=request, outcome="refused", refusal="over", text=text, remedy="see rackctl status.")
