"""Notices about workers whose hardware, libraries or settings differ from the others'.

Where such workers take part, equal bits are not promised. Nothing is stopped for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.core.generation.outbox import Outbox
from rackrun.protocol.commands import Notice
from rackrun.protocol.events import WorkerReady
from rackrun.protocol.ids import SlotId

__all__ = ["NumericsNotices", "differences"]

_NOTICES_MAX = 16
"""Largest number of notices: a fleet of many kinds is reported, not listed in full."""
Numerics = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class NumericsNotices:
    """Compares the numerics of all workers with those of the first."""

    out: Outbox
    _known: Numerics = ()
    """Numerics of the first worker that reported them."""
    _whose: SlotId | None = None
    _told: dict[str, None] = field(default_factory=dict)

    def compare(self, event: WorkerReady) -> None:
        """Compare a worker's numerics, whether it is a rank or a spare. Each difference is reported once."""
        if not event.numerics:
            return
        if self._whose is None or self._whose == event.slot:  # the script may have changed a setting since then
            self._known, self._whose = event.numerics, event.slot
            return
        different = differences(event.numerics, self._known, "there")
        if not different or different in self._told or len(self._told) >= _NOTICES_MAX:
            return
        self._told[different] = None
        self.out.emit(
            Notice(
                text=f"{event.slot} does not compute as {self._whose} does: {different}. Training goes on, but where such workers "
                "compute together, or one after another, the same bits are not promised"
            )
        )


def differences(one: Numerics, other: Numerics, where: str) -> str:
    """Describe the entries that both report and that differ; "" if there are none.

    For example ``GPU H200 (there H100), driver 580.95 (there 580.65)``. ``where`` names the place of ``other``.
    """
    known = dict(other)
    return ", ".join(
        f"{name} {value} ({where} {known[name]})" for name, value in one if known.get(name, value) != value
    )
