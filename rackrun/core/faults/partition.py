"""Who is cut off from whom, when a generation's groups cannot be built though everybody lives.

All meet on an exchange, which one tray has. A rank that does not reach it is cut off from that tray; one that does, from another tray, has
seen that the exchange is not what is cut off. So who does not reach it is to blame if there is such a witness. Without one the next attempt
has its exchange on another tray, at best one without a rank: there any rank is a witness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rackrun.protocol.ids import Rank, TrayId

__all__ = ["Rifts"]


@dataclass(slots=True)
class Rifts:
    tried: dict[str, None] = field(default_factory=dict)
    """Exchanges with which it came to nothing, since the world last trained."""
    _told: dict[Rank, bool] = field(default_factory=dict)
    """Of the attempt under way: who could not build its groups, and whether it was cut off from the exchange."""

    def add(self, rank: Rank, *, cut_off: bool) -> None:
        self._told[rank] = cut_off

    def has_told(self, rank: Rank) -> bool:
        return rank in self._told

    def attempt(self) -> None:
        """Another one begins."""
        self._told.clear()

    def forget(self) -> None:
        """They have been built."""
        self._told.clear()
        self.tried.clear()

    def blame(self, trays: dict[Rank, TrayId], exchange: str, host: TrayId | None) -> tuple[Rank, ...]:
        """Those of ``trays``, which are all members', that are cut off. Nobody: there is no telling, and ``exchange``, on tray ``host``, is not
        to be used again."""
        cut_off = tuple(rank for rank in sorted(trays) if self._told.get(rank))
        if cut_off and any(not self._told.get(rank) and tray != host for rank, tray in trays.items()):
            return cut_off
        self.tried[exchange] = None
        return ()
