"""Who keeps what of whose snapshots, in one generation: a pure function of where its ranks are.

Members of an XOR set are on different hosts, where there are several, and on different trays in any case; each member's
agent keeps one row of parity. Where ranks are spread too unevenly for sets (a crowded tray, after another was lost) they are mirrored, which
needs a second tray and nothing else. With one tray there is nowhere to keep anything: its agent has the snapshots already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rackrun.checkpoint.placement import Labels, Placement, PlacementError, Redundancy, place
from rackrun.core.commands import Keeper
from rackrun.core.config import JobConfig
from rackrun.core.ids import Rank, SlotId, TrayId, tray_of
from rackrun.core.rack import RackMachine

__all__ = ["Protection", "protect"]

_SNAPSHOTS = "shards without a replica: snapshots, "


@dataclass(frozen=True, slots=True)
class Protection:
    mirrors: Mapping[TrayId, str]
    sets: tuple[tuple[Keeper, ...], ...]
    said: str
    """What it survives and what it costs; "" with one tray."""


def protect(config: JobConfig, seats: Mapping[Rank, SlotId], rack: RackMachine) -> Protection:
    mirrors = rack.mirrors()
    if not mirrors:
        return Protection({}, (), "")
    mirrored = f"{_SNAPSHOTS}a copy of each on another tray; {_any_one(1.0)}"
    match config.snapshot_copies:
        case "local":
            return Protection({}, (), f"{_SNAPSHOTS}on their own tray alone and lost with it")
        case "mirror":
            return Protection(mirrors, (), mirrored)
        case "xor":
            placement = _sets(config, seats, rack)
    if placement is None:
        crowded = f"{len(seats)} ranks on {len({tray_of(slot) for slot in seats.values()})} trays make no XOR sets"
        return Protection(mirrors, (), f"{mirrored} ({crowded})")
    sizes = sorted(len(members) for members in placement.sets)
    span = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
    return Protection(
        {},
        tuple(tuple(_keeper(Rank(rank), seats, rack) for rank in members) for members in placement.sets),
        f"{_SNAPSHOTS}their parity over sets of {span} trays; {_any_one(float(placement.kept()))}",
    )


def _sets(config: JobConfig, seats: Mapping[Rank, SlotId], rack: RackMachine) -> Placement | None:
    hosts = {rank: rack.trays[tray_of(slot)].host for rank, slot in sorted(seats.items())}
    trays = {rank: tray_of(slot) for rank, slot in sorted(seats.items())}
    for apart in (hosts, trays):
        if len(dict.fromkeys(apart.values())) < 2:
            continue
        try:
            labels = {int(rank): Labels(tray=name) for rank, name in apart.items()}
            return place(labels, Redundancy.xor(config.set_size, "tray"))
        except PlacementError:
            continue
    return None


def _keeper(rank: Rank, seats: Mapping[Rank, SlotId], rack: RackMachine) -> Keeper:
    tray = tray_of(seats[rank])
    return Keeper(rank, tray, rack.trays[tray].snapshots)


def _any_one(more: float) -> str:
    return f"any one tray may be lost, for 2 x {more:.0%} of a shard more memory on a rank"
