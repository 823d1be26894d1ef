"""Which ranks are cut off when a generation's groups cannot be built although all members live.

All members meet on an exchange, which one tray serves. A rank that does not reach it is cut off from that tray. A rank
on another tray that does reach it shows that the exchange itself is not cut off. So the ranks that do not reach it are
to blame if there is such a witness. Without one, the next attempt uses an exchange on another tray, preferably one
without a rank: then any rank is a witness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.protocol.ids import Rank, TrayId

__all__ = ["PartitionReports"]


@dataclass(slots=True)
class PartitionReports:
    """What members reported about the attempts to build a generation's groups."""

    tried: dict[str, None] = field(default_factory=dict)
    """Exchanges over which groups could not be built, since the world last trained."""
    _told: dict[Rank, bool] = field(default_factory=dict)
    """For each rank that could not build its groups in this attempt, whether it was cut off from the exchange."""

    def add(self, rank: Rank, *, cut_off: bool) -> None:
        """Record that ``rank`` could not build its groups; ``cut_off``: it did not reach the exchange either."""
        self._told[rank] = cut_off

    def has_reported(self, rank: Rank) -> bool:
        """Return whether ``rank`` has reported in this attempt."""
        return rank in self._told

    def attempt(self) -> None:
        """Begin another attempt."""
        self._told.clear()

    def forget(self) -> None:
        """Forget all attempts, because the groups have been built."""
        self._told.clear()
        self.tried.clear()

    def blame(self, trays: dict[Rank, TrayId], exchange: str, host: TrayId | None) -> tuple[Rank, ...]:
        """Return the members that are cut off.

        ``trays`` holds the tray of every member. If the result is empty, the cause is unknown, and ``exchange``, on
        tray ``host``, is not used again.
        """
        cut_off = tuple(rank for rank in sorted(trays) if self._told.get(rank))
        if cut_off and any(not self._told.get(rank) and tray != host for rank, tray in trays.items()):
            return cut_off
        self.tried[exchange] = None
        return ()
