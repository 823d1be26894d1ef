"""Answers to operators' requests, which all clients that follow the job receive too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.rack import RackMachine
from rackrun.core.requests.pending_requests import RequestRefused
from rackrun.protocol.commands import Answer
from rackrun.protocol.ids import SlotId

__all__ = ["Replies"]


@dataclass(slots=True)
class Replies:
    """Emits answers, each with the present drained slots and departing trays."""

    rack: RackMachine
    out: Outbox

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
