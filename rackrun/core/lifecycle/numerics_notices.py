"""Workers that compute with other hardware, libraries or settings than the rest are told of: where they take part nobody is promised the same
bits. Nothing is stopped for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rackrun.protocol.commands import Command, Notice
from rackrun.protocol.events import WorkerReady
from rackrun.protocol.ids import SlotId

__all__ = ["NumericsNotices", "differences"]

_NOTICES_MAX = 16
"""A fleet of many kinds is told of, not listed."""
Numerics = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class NumericsNotices:
    emit: Callable[[Command], None]
    _known: Numerics = ()
    """Of the first worker that has said."""
    _whose: SlotId | None = None
    _told: dict[str, None] = field(default_factory=dict)

    def heard(self, event: WorkerReady) -> None:
        """Whether it has a rank, or is a spare. Each difference is told once, whoever has it."""
        if not event.numerics:
            return
        if self._whose is None or self._whose == event.slot:  # a script may have changed a setting since
            self._known, self._whose = event.numerics, event.slot
            return
        different = differences(event.numerics, self._known, "there")
        if not different or different in self._told or len(self._told) >= _NOTICES_MAX:
            return
        self._told[different] = None
        self.emit(
            Notice(
                text=f"{event.slot} does not compute as {self._whose} does: {different}. Training goes on, but where such workers "
                "compute together, or one after another, the same bits are not promised"
            )
        )


def differences(one: Numerics, other: Numerics, where: str) -> str:
    """``GPU H200 (there H100), driver 580.95 (there 580.65)``: of what both have said; "" when that is the same. ``where``: the ``other`` is."""
    known = dict(other)
    return ", ".join(
        f"{name} {value} ({where} {known[name]})" for name, value in one if known.get(name, value) != value
    )
