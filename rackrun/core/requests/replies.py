"""Answers to operators' requests, which all clients that follow the job receive too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.rack import RackMachine
from rackrun.core.requests.pending_requests import PendingRequest, RequestRefused, RequestState, RequestTrigger
from rackrun.protocol.commands import Answer
from rackrun.protocol.ids import SlotId

__all__ = ["Replies"]


@dataclass(slots=True)
class Replies:
    """Emits answers, each with the present drained slots and departing trays."""

    rack: RackMachine
    out: Outbox

    def begin(self, one: PendingRequest, text: str) -> None:
        """Begin a request, and report it."""
        one.move(RequestTrigger.BEGIN)
        self.say(one.request, "begun", text)

    def finish(self, one: PendingRequest, text: str) -> None:
        """End a request that is done, and report it."""
        one.move(RequestTrigger.FINISH)
        self.say(one.request, "done", text)

    def call_off(self, one: PendingRequest, refused: RequestRefused) -> None:
        """End a request without doing the rest of it, and report why."""
        had_begun = one.state is not RequestState.ASKED
        one.move(RequestTrigger.CALL_OFF)
        self.refuse(one.request, str(one), refused, called_off=had_begun)

    def say(
        self, request: str, outcome: Literal["begun", "done"], text: str, forgiven: tuple[SlotId, ...] = ()
    ) -> None:
        """Report that a request has begun or is done."""
        self.out.emit(
            Answer(
                request=request,
                outcome=outcome,
                text=text,
                drained=dict(self.rack.drained),
                departing=dict(self.rack.departing),
                forgiven=forgiven,
            )
        )

    def refuse(self, request: str, what: str, refused: RequestRefused, *, called_off: bool = False) -> None:
        """Report that a request is refused or, with ``called_off``, called off after it had begun."""
        self.out.emit(
            Answer(
                request=request,
                outcome="refused",
                text=f"{what} is {'called off' if called_off else 'refused'}: {refused.what}",
                refusal=refused.kind,
                remedy=refused.remedy,
                drained=dict(self.rack.drained),
                departing=dict(self.rack.departing),
            )
        )
