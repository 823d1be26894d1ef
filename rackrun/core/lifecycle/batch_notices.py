"""Notices about a changed global batch and its learning rates (``batch="scale_lr"``), each given once."""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.generation.outbox import Outbox
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import BatchChanged
from rackrun.protocol.ids import Step

__all__ = ["BatchNotices"]


@dataclass(slots=True)
class BatchNotices:
    """Gives one notice for each change of the global batch."""

    out: Outbox
    _told: dict[tuple[Step, int], None] = field(default_factory=dict)

    def report(self, event: BatchChanged) -> None:
        """Handle a report. Every rank sends one, and sends it again if the step is repeated."""
        if (event.step, event.batch) in self._told:
            return
        self._told[event.step, event.batch] = None
        rises = f", rising from {event.factor:g}" if event.factor < event.target else ""
        self.out.emit(
            Notice(
                text=f"from step {event.step} on the global batch is {event.batch} of {event.full_batch} samples, "
                f"and learning rates are multiplied by {event.target:g} ({event.rule}){rises}"
            )
        )
