"""Which trays keep copies or parity of whose snapshots in one generation: a pure function of the ranks' slots.

Members of a set (XOR, Reed-Solomon) are on different hosts, if there are several, and on different trays in any case.
Each member's agent keeps parity for the others. If ranks are spread too unevenly for sets (a crowded tray, after
another was lost), they are mirrored, which only needs a second tray. With one tray there is nowhere to keep copies: its
agent already has the snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rackrun.checkpoint.redundancy.shard_placement import Labels, PlacementError, Redundancy, ShardPlacement, place
from rackrun.core.members.rack import RackMachine
from rackrun.protocol.commands import GenerationPlan, Keeper
from rackrun.protocol.ids import Rank, SlotId, TrayId, tray_of
from rackrun.protocol.job_config import JobConfig

__all__ = ["SnapshotCoverage", "Protection", "keepers_of", "protect"]

_SNAPSHOTS = "snapshots in memory: "
_NUMBERS = {2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True, slots=True)
class Protection:
    """The mirrors or sets of one generation."""

    mirrors: Mapping[TrayId, str]
    sets: tuple[tuple[Keeper, ...], ...]
    said: str
    """Description of the losses that it survives and of its cost; "" with one tray."""
    parity: int = 1
    """Number of members of a set that may be lost at once."""


def keepers_of(plan: GenerationPlan) -> dict[TrayId, tuple[TrayId, ...]]:
    """Return for each tray the trays that keep copies or parity of its snapshots."""
    if plan.sets:
        found: dict[TrayId, dict[TrayId, None]] = {}
        for of in plan.sets:
            for one in of:
                found.setdefault(one.tray, {}).update((other.tray, None) for other in of if other.tray != one.tray)
        return {tray: tuple(others) for tray, others in found.items()}
    return {tray: (TrayId(holder.rpartition("/")[2]),) for tray, holder in plan.mirrors.items()}


@dataclass(frozen=True, slots=True)
class SnapshotCoverage:
    """Which trays and ranks a plan protects."""

    plan: GenerationPlan
    trays: Collection[TrayId]
    """Trays that keep anything for others."""
    ranks: Collection[Rank]
    """Members of sets."""

    @classmethod
    def of(cls, plan: GenerationPlan) -> SnapshotCoverage:
        """Return what ``plan`` protects, indexed for `of_rank`."""
        keepers = [keeper for members in plan.sets for keeper in members]
        holders = [TrayId(holder.rpartition("/")[2]) for holder in plan.mirrors.values()]
        trays = frozenset((*holders, *(keeper.tray for keeper in keepers)))
        return cls(plan, trays, frozenset(keeper.rank for keeper in keepers))

    def of_rank(self, rank: Rank, tray: TrayId) -> bool:
        """Return whether another tray keeps the snapshots of ``rank``, which runs on ``tray``."""
        return tray in self.plan.mirrors or rank in self.ranks


def protect(config: JobConfig, seats: Mapping[Rank, SlotId], rack: RackMachine) -> Protection:
    """Choose mirrors or sets for these seats, as ``config.snapshot_copies`` asks for where possible."""
    mirrors = rack.mirrors()
    if not mirrors:
        return Protection({}, (), "")
    mirrored = f"{_SNAPSHOTS}a copy of each on another tray; {_any(1, 1.0)}"
    match config.snapshot_copies:
        case "local":
            return Protection({}, (), f"{_SNAPSHOTS}on their own tray alone and lost with it")
        case "mirror":
            return Protection(mirrors, (), mirrored)
        case "xor":
            redundancy = Redundancy.xor(config.set_size, "tray")
        case "rs":
            if without := [tray for tray, joined in sorted(rack.trays.items()) if not joined.codec]:
                return Protection(mirrors, (), f"{mirrored} (no codec of Reed-Solomon on {', '.join(without)})")
            redundancy = Redundancy.rs(config.set_size - config.set_parity, config.set_parity, "tray")
    placement = _sets(redundancy, seats, rack)
    if placement is None:
        trays, kind = len({tray_of(slot) for slot in seats.values()}), redundancy.kind.upper()
        crowded = f"{len(seats)} ranks on {trays} trays make no {kind} sets"
        return Protection(mirrors, (), f"{mirrored} ({crowded})")
    sizes = sorted(len(members) for members in placement.sets)
    span = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    return Protection(
        {},
        tuple([tuple([_keeper(Rank(rank), seats, rack) for rank in members]) for members in placement.sets]),
        f"{_SNAPSHOTS}their parity over sets of {span} trays; {_any(redundancy.parity, float(placement.kept()))}",
        redundancy.parity,
    )


def _sets(redundancy: Redundancy, seats: Mapping[Rank, SlotId], rack: RackMachine) -> ShardPlacement | None:
    hosts = {rank: rack.trays[tray_of(slot)].host for rank, slot in sorted(seats.items())}
    trays = {rank: tray_of(slot) for rank, slot in sorted(seats.items())}
    for apart in (hosts, trays):
        if len(dict.fromkeys(apart.values())) < 2:
            continue
        try:
            of = {name: Labels(tray=name) for name in dict.fromkeys(apart.values())}
            return place({int(rank): of[name] for rank, name in apart.items()}, redundancy)
        except PlacementError:
            continue
    return None


def _keeper(rank: Rank, seats: Mapping[Rank, SlotId], rack: RackMachine) -> Keeper:
    tray = tray_of(seats[rank])
    return Keeper(rank, tray, rack.trays[tray].snapshots)


def _any(lost: int, more: float) -> str:
    trays = "one tray" if lost == 1 else f"{_NUMBERS.get(lost, lost)} trays"
    return f"any {trays} may be lost, for 2 x {more:.0%} of a shard more memory on a rank"
