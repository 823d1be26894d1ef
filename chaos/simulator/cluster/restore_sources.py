"""Model of the sources of restored state: peers, snapshots and their copies in the memory of agents, and parity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackrun.chaos.simulator.base.ground_truth import StateHistory, Violation, must
from rackrun.protocol.commands import GenerationPlan, Reshard, Restore
from rackrun.protocol.events import SnapshotMirrored
from rackrun.protocol.ids import SlotId, Step, TrayId, snapshot_id, tray_of

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["CorruptState", "AgentMemory", "Unlike", "named"]

Owner = tuple[SlotId, int]
"""Slot and incarnation of the worker whose state it is."""


class CorruptState(Exception):
    """The state to restore does not match its checksums. ``where``: as in `SnapshotDamaged`."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__(step, where)
        self.step, self.where = step, where


class Unlike(Exception):
    """The sources hold different states."""


def named(plan: GenerationPlan, step: int) -> int:
    return int(snapshot_id(plan.layout, Step(step)))


class AgentMemory:
    """The memory of all agents. A tray's part of it is lost with the tray."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.kept: dict[tuple[TrayId, Owner], dict[int, StateHistory]] = {}
        """(tray, owner) -> snapshots by `snapshot_id`: the owner's on its own tray, or copies on another."""
        self.files: dict[tuple[Owner, int], int] = {}
        """Each snapshot is a file of its own, because parity is computed of exactly these bytes."""
        self.rows: dict[tuple[TrayId, int, int, int], dict[int, tuple[int, StateHistory]]] = {}
        """(tray, generation, keeper, snapshot) -> rank -> the file and the state whose stripes are in this row."""
        self.rotten: set[tuple[TrayId, Owner, int]] = set()
        self._told: dict[tuple[TrayId, Owner], tuple[Step, ...]] = {}
        """The copies that the coordinator last heard of. The holder may have newer ones, which replaced older ones, and
        whose report was lost."""
        self._told_then = self._told
        """The same, when the newest plan was made."""

    def seal(self, tray: TrayId, owner: Owner, name: int, history: StateHistory) -> None:
        self.kept.setdefault((tray, owner), {})[name] = history
        self.files[owner, name] = len(self.files) + 1
        self.rotten.discard((tray, owner, name))

    def of(self, tray: TrayId, owner: Owner) -> dict[int, StateHistory]:
        return self.kept.get((tray, owner), {})

    def forget_tray(self, tray: TrayId) -> None:
        """Drop everything that a tray kept."""
        if any(of[0] == tray for of in self.kept):
            self._sim.marks.sometimes("a snapshot was lost with its tray")
        self.kept = {key: found for key, found in self.kept.items() if key[0] != tray}
        self.rows = {key: row for key, row in self.rows.items() if key[0] != tray}
        self.rotten = {key for key in self.rotten if key[0] != tray}

    def forget_owner(self, tray: TrayId, owner: Owner) -> None:
        self.kept.pop((tray, owner), None)

    def record_copy(self, event: SnapshotMirrored) -> None:
        self._told[event.holder, (event.slot, int(event.incarnation))] = event.steps

    def planned(self) -> None:
        """A plan has been made, by what the coordinator has heard so far."""
        self._told_then = dict(self._told)

    # -- restoring
    def for_member(self, process: SimulatedWorker, plan: GenerationPlan) -> StateHistory | None:
        """Return the state that ``plan`` gives to a member; None while it is not available. Raises `CorruptState`."""
        try:
            return self._for_member(process, plan)
        except Violation:
            if plan.generation < self._sim.truth.announced:
                return None  # the others have gone on, and so has what it would read
            raise

    def _for_member(self, process: SimulatedWorker, plan: GenerationPlan) -> StateHistory | None:
        if plan.reshard is not None:
            return self._from_images(plan, plan.reshard)
        at = plan.committed.step if plan.rollback is None else plan.rollback
        if process.stateful:
            must(process.layout == plan.layout, "shards of another layout")
            if plan.rollback is not None:
                tray, name = process.agent.tray, named(plan, at)
                found = self.of(tray, process.owner)
                must(name in found, f"{process} is to go back to a snapshot that it does not have")
                if (tray, process.owner, name) in self.rotten:
                    raise CorruptState(name, "")
                return found[name]
            must(not process.rollback_incomplete, "a state that is half gone back is taken for a clean one")
            if process.passed < at:
                must(process.entered_in is not None, "a unit is to be applied that was never entered")
                return process.state_after()
            return process.state_now
        mine = [restore for restore in plan.restores if restore.rank == process.rank]
        must(len(mine) == 1, f"{process} is fresh and has no source")
        return self._fetch(mine[0], plan, at)

    def _fetch(self, restore: Restore, plan: GenerationPlan, at: int) -> StateHistory | None:
        if restore.snapshot:
            found = self._read(restore.snapshot, named(plan, at))
            if found is not None and restore.snapshot.split("/")[1] != restore.snapshot.split(":")[0]:
                self._sim.marks.sometimes("a copy on another tray was restored")
            return found
        if restore.rebuild:
            return self._rebuild(restore, named(plan, at))
        peers = []
        for source in restore.sources:
            peer = self._sim.processes.get((plan.members[source].slot, plan.members[source].incarnation))
            if peer is None or not peer.alive or peer.state != "running" or peer.generation != plan.generation:
                continue
            must(peer.passed == at, "a source that has gone on")
            self._sim.marks.sometimes("a replica was the source")
            peers.append(peer.state_now)
        if any(one.digest != peers[0].digest for one in peers):
            raise Unlike
        return peers[0] if peers else None

    def _reachable(self, tray: TrayId) -> bool:
        agent = self._sim.agents.get(tray)
        return agent is not None and agent.alive and not agent.paused and not self._sim.cuts[tray].peers

    def _read(self, where: str, name: int) -> StateHistory | None:
        address, slot_tray, index, incarnation = where.split("/")
        tray, owner = TrayId(address.partition(":")[0]), (SlotId(f"{slot_tray}/{index}"), int(incarnation))
        if not self._reachable(tray):
            return None
        if (tray, owner) not in self.kept and self._sim.agents[tray].began_ns > self._sim.planned_ns:
            return None  # the tray has come back empty meanwhile
        if name not in self.of(tray, owner) and name in self._told_then.get((tray, owner), ()):
            raise CorruptState(name, where)
        must(name in self.of(tray, owner), f"a snapshot that nobody keeps: {name} at {where}")
        if (tray, owner, name) in self.rotten:
            raise CorruptState(name, where)
        return self.of(tray, owner)[name]

    def _from_images(self, plan: GenerationPlan, of: Reshard) -> StateHistory | None:
        """Return the joint history of all old ranks; None while some rank has still to seal its image."""
        found: dict[int, StateHistory] = {}
        name = int(snapshot_id(of.layout, Step(plan.committed.step)))
        for where in of.images:
            address, slot_tray, index, incarnation = where.split("/")
            tray, owner = TrayId(address.partition(":")[0]), (SlotId(f"{slot_tray}/{index}"), int(incarnation))
            if name not in self.of(tray, owner) and tray == tray_of(owner[0]):
                process = self._sim.processes.get(owner)
                lost = process is None or not process.alive or not self._reachable(tray)
                must(
                    lost or (process is not None and process.generation < plan.generation), "an image that nobody keeps"
                )
                return None
            image = self._read(where, name)
            if image is None:
                return None
            found[id(image)] = image
        must(len({id(one.plain) for one in found.values()}) == 1, "the old ranks have two histories")
        return next(iter(found.values()))

    def _rebuild(self, restore: Restore, name: int) -> StateHistory | None:
        """Rebuild a snapshot from parity.

        Each remaining member gives its row, with the stripes of all others, and the same file of which it gave stripes
        itself.
        """
        rows, files, rotten = [], {}, False
        for one in restore.rebuild:
            address, slot_tray, index, incarnation = one.snapshot.split("/")
            at, generation, keeper_ = one.row.split("/")
            keeper = int(keeper_)
            must((at, keeper) == (address, one.rank), "a row of another's")
            tray, owner = TrayId(address.partition(":")[0]), (SlotId(f"{slot_tray}/{index}"), int(incarnation))
            if not self._reachable(tray):
                return None
            key = (tray, int(generation), keeper, name)
            if name not in self.of(tray, owner) or key not in self.rows:
                process = self._sim.processes.get(owner)
                empty = self._sim.agents[tray].began_ns > self._sim.planned_ns
                gone = process is not None and name in process.damaged
                must(empty or gone, f"neither a snapshot nor a row: {one}")
                return None
            rotten |= (tray, owner, name) in self.rotten
            files[int(one.rank)] = self.files[owner, name]
            rows.append((keeper, self.rows[key]))
        if rotten:
            raise CorruptState(name, restore.rebuild[0].row)
        lost: dict[int, StateHistory] = {}
        whole: set[int] = set()
        for of, row in rows:
            must(row.keys() == {*restore.members} - {of}, "a row that is not whole")
            must(all(row[rank][0] == file for rank, file in files.items() if rank != of), "stripes of other bytes")
            whole.add(row[restore.rank][0])
            lost[id(row[restore.rank][1])] = row[restore.rank][1]
        must({restore.rank, *files} <= {*restore.members}, "a set of others")
        must(len(files) >= len(restore.members) - restore.parity, "too few to rebuild from")
        must(len(whole) == len(lost) == 1, "stripes of two files")
        self._sim.marks.sometimes("a snapshot was rebuilt from parity")
        return next(iter(lost.values()))
