"""The snapshots in the model of a job, their parity on other trays, and the state that members of a plan get of them."""

from __future__ import annotations

from collections.abc import Mapping

from rackrun.protocol.commands import GenerationPlan, Reshard, Restore
from rackrun.protocol.ids import SlotId, Step, TrayId, snapshot_id, tray_of
from tests.core.model_process import Chain, Process


class ModelSnapshots:
    """What each worker has sealed, and which stripes of it lie on other trays."""

    def __init__(self, processes: Mapping[tuple[SlotId, int], Process], up_trays: Mapping[TrayId, bool]) -> None:
        """``processes`` and ``up_trays`` belong to the model, which changes them."""
        self._processes, self._up_trays = processes, up_trays
        self._taken = 0
        self.arenas: dict[tuple[SlotId, int], dict[int, Chain]] = {}
        self.rotten: set[tuple[SlotId, int, int]] = set()
        """Snapshots of which a bit has flipped: slot, incarnation, step."""
        self.files: dict[tuple[SlotId, int], dict[int, int]] = {}
        """Beside ``arenas``: no two snapshots are the same bytes. Both are by `snapshot_id`."""
        self.rows: dict[tuple[TrayId, int, int, int], dict[int, tuple[int, Chain]]] = {}
        """(tray, generation, keeper, step) -> whose stripes are in it, and of which file."""

    def arena_of(self, process: Process) -> Mapping[int, Chain]:
        return self.arenas.get((process.slot, process.incarnation), {})

    def steps_of(self, process: Process) -> tuple[Step, ...]:
        """The ids of its snapshots, as it tells them."""
        return tuple(Step(step) for step in sorted(self.arena_of(process)))

    # -- they are taken, and lost ----------------------------------------------------------------------------------
    def seal(self, process: Process, *, besides: int = -1) -> None:
        """There is room for two: this one, and ``besides`` or the newest other."""
        self._taken += 1
        arena = self.arenas.setdefault((process.slot, process.incarnation), {})
        arena[process.snapshot_now] = process.chain
        self.files.setdefault((process.slot, process.incarnation), {})[process.snapshot_now] = self._taken
        process.sealed = (process.generation, process.snapshot_now)
        others = sorted(named for named in arena if named != process.snapshot_now)
        for named in [one for one in others if one != (besides if besides in arena else others[-1])]:
            del arena[named]

    def stripe(self, process: Process, members: list[tuple[int, TrayId]]) -> bool:
        """Stripes of its newest snapshot go to the others of its set: rank and tray of each. Whether all have them."""
        process.given.add(process.sealed)
        (generation, step), rank = process.sealed, process.rank_held
        if generation != process.generation:
            return False
        others = [(keeper, tray) for keeper, tray in members if keeper != rank]
        for keeper, tray in others:
            if not self._up_trays.get(tray, False):
                return False
            who = process.slot, process.incarnation
            of = self.files[who][step], self.arenas[who][step]
            self.rows.setdefault((tray, generation, keeper, step), {})[rank] = of
        return True

    def drop_after(self, process: Process, newest: int) -> None:
        """A worker that went back to ``newest`` has no later one."""
        arena = self.arenas.get((process.slot, process.incarnation), {})
        for step in [step for step in arena if step > newest]:
            del arena[step]

    def lose_tray(self, tray: TrayId) -> None:
        self.arenas = {key: arena for key, arena in self.arenas.items() if tray_of(key[0]) != tray}
        self.rows = {key: row for key, row in self.rows.items() if key[0] != tray}

    # -- a member of a plan reads them -----------------------------------------------------------------------------
    def restored(self, process: Process) -> Chain | None:
        """The state that the plan means for this member; None as long as it cannot be had."""
        plan = process.plan
        assert plan is not None
        if plan.reshard is not None:
            return self._from_images(plan, plan.reshard)
        at = plan.committed.step if plan.rollback is None else plan.rollback
        if process.stateful:
            assert process.layout == plan.layout, "shards of another layout"
            if plan.rollback is not None:
                return self.arenas[process.slot, process.incarnation][snapshot_in(plan, at)]
            assert not process.torn, "a state that is half gone back is taken for a clean one"
            if process.passed < at:
                assert process.entered_in is not None
                return (*process.chain, (at, process.entered_in))
            return process.chain
        restore = next(r for r in plan.restores if r.rank == process.rank)
        return self._fetch(restore, plan, at)

    def _from_images(self, plan: GenerationPlan, of: Reshard) -> Chain | None:
        """What all the old ranks had, in one history; None as long as somebody has still to seal."""
        found: set[Chain] = set()
        named = snapshot_id(of.layout, Step(plan.committed.step))
        for where in of.images:
            key = owner_of(where)
            if named not in self.arenas.get(key, {}):
                owner = self._processes[key]
                waits = owner.alive and owner.generation < plan.generation
                assert waits or not owner.alive, "a snapshot that nobody keeps"
                return None
            found.add(self.arenas[key][named])
        assert len(found) == 1, "the old ranks have two histories"
        return found.pop()

    def _fetch(self, restore: Restore, plan: GenerationPlan, at: int) -> Chain | None:
        if restore.snapshot:
            owner = owner_of(restore.snapshot)
            arena = self.arenas.get(owner)
            assert arena is not None or not self._up_trays.get(tray_of(owner[0])), "a snapshot that nobody keeps"
            return arena[snapshot_in(plan, at)] if arena else None
        if restore.rebuild:
            return self._rebuild(restore, snapshot_in(plan, at))
        for source in restore.sources:
            member = plan.members[source]
            peer = self._processes[member.slot, member.incarnation]
            if peer.alive and peer.state == "running" and peer.generation == plan.generation:
                assert peer.passed == at, "a source that has gone on"
                return peer.chain
        return None

    def _rebuild(self, restore: Restore, at: int) -> Chain | None:
        """From each member that is left its row, with all stripes, and the very file that it gave stripes of."""
        lost: set[tuple[int, Chain]] = set()
        rows, files = [], {}
        for one in restore.rebuild:
            key = owner_of(one.snapshot)
            tray = tray_of(key[0])
            address, generation, keeper = one.row.split("/")
            assert (address, int(keeper)) == (f"{tray}:2", one.rank)
            if not self._up_trays.get(tray, False):
                return None
            if at not in self.arenas[key] and (*key, at) in self.rotten:
                return None  # that member has seen it too, and says so
            assert at in self.arenas[key], "a snapshot that nobody keeps"
            files[int(one.rank)] = self.files[key][at]
            rows.append((int(keeper), self.rows[tray, int(generation), int(keeper), at]))
        for whose, row in rows:
            assert row.keys() == {*restore.members} - {whose}, "a row that is not whole"
            assert all(row[rank][0] == file for rank, file in files.items() if rank != whose), "other bytes"
            lost.add(row[restore.rank])
        assert {restore.rank, *files} <= {*restore.members}
        assert len(files) >= len(restore.members) - restore.parity, "too few to rebuild from"
        assert len(lost) == 1, "stripes of two files"
        return lost.pop()[1]

    def rotten_source(self, process: Process) -> tuple[int, str] | None:
        """Step and place, when the snapshot that this member goes back to is not what it was."""
        plan = process.plan
        assert plan is not None
        if plan.reshard is not None:
            named = snapshot_id(plan.reshard.layout, Step(plan.committed.step))
            for where in plan.reshard.images:
                if (*owner_of(where), named) in self.rotten:
                    return named, where
            return None
        step = snapshot_in(plan, plan.committed.step if plan.rollback is None else plan.rollback)
        if plan.rollback is None and process.stateful:
            return None
        where = ""
        key: tuple[SlotId, int, int] = (process.slot, process.incarnation, step)
        if not process.stateful:
            restore = next(r for r in plan.restores if r.rank == process.rank)
            where = restore.snapshot
            if restore.rebuild:
                bad = [(*owner_of(one.snapshot), step) in self.rotten for one in restore.rebuild]
                return (step, restore.rebuild[0].row) if any(bad) else None
            if not where:
                return None
            key = (*owner_of(where), step)
        return (step, where) if key in self.rotten else None


def owner_of(where: str) -> tuple[SlotId, int]:
    """Slot and incarnation of the worker whose snapshot a plan names: ``ADDRESS/TRAY/INDEX/INCARNATION``."""
    _, tray, index, incarnation = where.split("/")
    return SlotId(f"{tray}/{index}"), int(incarnation)


def snapshot_in(plan: GenerationPlan, step: int) -> Step:
    """The id of the snapshot of that step in the layout of that plan."""
    return snapshot_id(plan.layout, Step(step))
