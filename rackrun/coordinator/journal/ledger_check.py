"""Check that no sample was lost or counted twice: compares the ledger's rows with the plans, unit by unit.

An *execution* of a unit is one time that it was committed. Rollbacks and restarts separate executions, and within one
each sample occurs once. Some ranks may report it in the generation in which its gate passed, others in the next. The
last execution is the one that counts: it has to be complete. An earlier one, which was taken back, may lack the rows of
ranks that died with it; the rows that exist must match what was computed again.

A rank that is lost with its tray loses the rows that it has not reported yet. The unit still counts, by its gate, which
has counted the samples of all ranks: this gives their number, but no ids.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.core.placement.mesh_resize import Axes
from rackrun.core.stragglers.shares import sharing
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Position, unit_text

__all__ = ["FINDINGS", "Folded", "LedgerCheck", "LedgerRow", "check_ledger", "fold", "samples_in"]

FINDINGS = ("doubled", "differing", "missing", "by_gate")
"""Fields of `LedgerCheck` that hold findings."""


class LedgerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the check. Empty lists mean that every sample was counted once."""

    units: int
    samples: int
    distinct: int
    """Number of different sample ids, if ids were kept."""
    doubled: tuple[str, ...] = ()
    """Sample ids that occur twice within one committed unit, other than on ranks that share their samples."""
    differing: tuple[str, ...] = ()
    """Units that were computed again on other samples than before, and ranks that share their samples but had different
    ones."""
    missing: tuple[str, ...] = ()
    """Ranks of the world whose row of a committed unit is missing."""
    rows_lost: int = 0
    """Number of rows that the journal could not write."""
    by_gate: tuple[str, ...] = ()
    """Ranks whose row was lost with their tray. The unit's gate gives their number of samples."""
    folded: int = 0
    """Number of units whose rows were removed after they had been checked."""

    @property
    def ok(self) -> bool:
        """Whether every sample was counted exactly once, as far as the rows show, and none were lost."""
        return not (self.doubled or self.differing or self.missing or self.rows_lost)


class LedgerRow(NamedTuple):
    """One rank's part of one unit."""

    at: Position
    rank: int
    generation: int
    samples: int
    digest: bytes
    ids: bytes | None
    """Sample ids, int64, little endian; None: only digests are kept."""


class Folded(NamedTuple):
    """What is kept of a unit whose rows were removed."""

    at: Position
    generation: int
    """Generation of the execution that counts: the first in which a rank reported it."""
    samples: int
    unreported: int
    """Additional samples that its gate has counted, from ranks that were lost with their rows."""
    ids: bytes | None
    """Digest of the sample ids of all ranks, independent of their order; None: only digests were kept."""


@dataclass
class _Execution:
    """One execution of a unit."""

    generation: int
    """The first generation in which a rank reported it."""
    reported: set[int] = field(default_factory=set)
    rows: dict[int, LedgerRow] = field(default_factory=dict)
    samples: float | None = None
    """Samples of all ranks, according to its gate."""


def check_ledger(
    units: Iterable[tuple[Position, int, int, float | None]],
    rows: Iterable[LedgerRow],
    plans: Mapping[int, GenerationPlan],
    axes: Axes = (),
    rows_lost: int = 0,
    folded: Iterable[Folded] = (),
) -> LedgerCheck:
    """Check a whole ledger.

    ``units`` holds for each reported commit: position, rank, generation, and the number of samples that its gate
    counted (None: not reported).
    """
    proof = _LedgerChecker(plans, axes, folded)
    for at, rank, generation, samples in units:
        proof.add_gate(at, rank, generation, samples)
    for row in rows:
        proof.row(row)
    return proof.result(rows_lost)


def fold(
    at: Position,
    units: Iterable[tuple[int, int, float | None]],
    rows: Iterable[LedgerRow],
    plans: Mapping[int, GenerationPlan],
    axes: Axes = (),
    *,
    before: Folded | None = None,
    goes_on: Callable[[int, int], bool] = lambda *_: False,
) -> tuple[Folded | None, LedgerCheck]:
    """Check one unit that no rank will report any more. Return what to keep of it when its rows are removed, and the
    findings.

    The first result is None if the unit does not count, or not yet. ``units`` holds rank, generation and samples by the
    gate. ``before``: what was kept earlier, if the unit was computed again. ``goes_on(generation, rank)`` returns
    whether that rank reported a later unit in that generation; it is called only for ranks without rows.
    """
    proof = _LedgerChecker(plans, axes, [before] if before else [])
    for rank, generation, samples in units:
        proof.add_gate(at, rank, generation, samples)
    for row in rows:
        proof.row(row)
    proof.go_on(at, goes_on)
    return proof.left(at), proof.result(0, all_reported=True)


class _LedgerChecker:
    def __init__(self, plans: Mapping[int, GenerationPlan], axes: Axes, folded: Iterable[Folded] = ()) -> None:
        self._plans, self._axes, self._eras = plans, axes, RollbackEras(plans)
        self._folded = {one.at: one for one in folded if self._eras.counts(one.at, one.generation)}
        self._units: dict[Position, dict[int, _Execution]] = defaultdict(dict)
        self._last_of: dict[tuple[int, int], Position] = {}
        """(generation, rank) -> the last unit that the rank reported."""
        self._reach: dict[int, tuple[Position, Position]] = {}
        """Era -> the first and the last unit that were computed in it."""
        self._doubled: list[str] = []
        self._differing: list[str] = []
        self._missing: list[str] = []
        self._by_gate: list[str] = []

    def add_gate(self, at: Position, rank: int, generation: int, samples: float | None) -> None:
        """Add a rank's report of a unit; ``samples``: as its gate summed them, None: not in it."""
        if not self._eras.counts(at, generation):
            return
        execution = self._execution(at, generation)
        execution.reported.add(rank)
        execution.samples = samples if samples is not None else execution.samples
        key = generation, rank
        self._last_of[key] = max(self._last_of.get(key, at), at)

    def row(self, row: LedgerRow) -> None:
        """Add a rank's row of sample ids. What a rollback took back is ignored."""
        if self._eras.counts(row.at, row.generation):
            self._execution(row.at, row.generation).rows[row.rank] = row

    def _execution(self, at: Position, generation: int) -> _Execution:
        found = self._units[at].setdefault(self._eras.of(generation), _Execution(generation))
        found.generation = min(found.generation, generation)
        return found

    def go_on(self, at: Position, goes_on: Callable[[int, int], bool]) -> None:
        """Find out whether ranks without a row of ``at`` reported a later unit."""
        later = Position(at.step + 1)
        for execution in self._units.get(at, {}).values():
            plan = self._plans.get(execution.generation)
            for rank in range(plan.world_size if plan else 0):
                if rank not in execution.reported and goes_on(execution.generation, rank):
                    self._last_of[execution.generation, rank] = later

    def left(self, at: Position) -> Folded | None:
        """Return a unit as the one row that folding keeps; None if nothing is known of it."""
        executions = self._since(at)
        if not executions:
            return self._folded.get(at)
        counts = executions[max(executions)]
        rows = self._apart(at, counts, tell=False)
        reported = sum(row.samples for row in rows.values())
        whole = self._is_whole(counts)
        known = whole and all(row.ids is not None for row in rows.values())
        unreported = 0 if whole else max(int(counts.samples or 0) - reported, 0)
        return Folded(at, counts.generation, reported, unreported, _mixed(_ids_of(rows)) if known else None)

    def _since(self, at: Position) -> dict[int, _Execution]:
        """Return the executions since the unit's rows were folded, by era."""
        executions, folded = self._units.get(at, {}), self._folded.get(at)
        if folded is None:
            return executions
        over = self._eras.of(folded.generation)
        return {era: execution for era, execution in executions.items() if era > over}

    def result(self, rows_lost: int, *, all_reported: bool = False) -> LedgerCheck:
        """Return the findings. ``all_reported``: the job is over, so the last unit's rows must be complete too."""
        known = sorted(self._units.keys() | self._folded.keys())
        for at in known:
            eras = list(self._since(at))
            eras += [self._eras.of(self._folded[at].generation)] if at in self._folded else []
            for era in eras:
                self._reach[era] = (self._reach.get(era, (at, at))[0], at)
        total, seen = 0, Counter[int]()
        newest = None if all_reported else max(self._units, default=None)
        for at in known:
            executions, folded = self._since(at), self._folded.get(at)
            if not executions:
                assert folded is not None
                self._check_done_again(at, folded.generation)
                total += folded.samples
                continue
            *taken_back, counts = (execution for _, execution in sorted(executions.items()))
            if at != newest:  # some rows of the last unit may still be under way
                self._check_whole(at, counts)
                self._check_done_again(at, counts.generation)
            rows = self._apart(at, counts)
            ids = self._ids(at, rows)
            total += sum(row.samples for row in rows.values())
            seen.update(ids.tolist())
            reported = sum(row.samples for row in counts.rows.values())
            unreported = 0 if self._is_whole(counts) else max(int(counts.samples or 0) - reported, 0)
            for execution in taken_back:
                whole = self._is_whole(execution) and self._is_whole(counts)
                self._compare(at, self._apart(at, execution), rows, ids, whole=whole, unreported=unreported)
            if folded is not None and (at != newest or self._is_whole(counts)):
                self._compare_folded(folded, rows, ids, whole=self._is_whole(counts), unreported=unreported)
        return LedgerCheck(
            units=len(known),
            folded=sum(not self._since(at) for at in self._folded),
            samples=total,
            distinct=len(seen),
            doubled=tuple(self._doubled),
            differing=tuple(dict.fromkeys(self._differing)),
            missing=tuple(self._missing),
            rows_lost=rows_lost,
            by_gate=tuple(self._by_gate),
        )

    def _is_whole(self, execution: _Execution) -> bool:
        plan = self._plans.get(execution.generation)
        return plan is not None and len(execution.rows) == plan.world_size

    def _check_done_again(self, at: Position, generation: int) -> None:
        """Check that a unit which was taken back, and passed again since, was computed again."""
        for era, (first, last) in self._reach.items():
            if era > self._eras.of(generation) and first < at < last:
                self._missing.append(f"{unit_text(at)}: no row of any rank since everybody went back behind it")
                return

    def _check_whole(self, at: Position, execution: _Execution) -> None:
        plan = self._plans.get(execution.generation)
        absent = [rank for rank in range(plan.world_size) if rank not in execution.reported] if plan else []
        with_tray = [rank for rank in absent if execution.samples is not None and self._was_lost(at, rank, execution)]
        known = sum(row.samples for row in execution.rows.values())
        if with_tray and len(with_tray) == len(absent) and (execution.samples or 0) >= known:
            ranks, left = ", ".join(map(str, with_tray)), (execution.samples or 0) - known
            self._by_gate.append(
                f"{unit_text(at)}: rank {ranks} was lost with its row; its gate has counted {left:.0f} more samples"
            )
        elif absent:
            self._missing.append(f"{unit_text(at)}: no row of rank {', '.join(map(str, absent))}")

    def _was_lost(self, at: Position, rank: int, execution: _Execution) -> bool:
        """Return whether the rank was lost after this unit, before it reported a later one: its worker is in no later
        plan."""
        plan = self._plans[execution.generation]
        if self._last_of.get((execution.generation, rank), at) > at:
            return False
        holder = next((one for one in plan.members if one.rank == rank), None)
        later = [one for generation, one in self._plans.items() if generation > execution.generation]
        return (
            holder is not None
            and bool(later)
            and not any(
                (one.slot, one.incarnation) == (holder.slot, holder.incarnation)
                for one in min(later, key=_generation).members
            )
        )

    def _apart(self, at: Position, execution: _Execution, *, tell: bool = True) -> dict[int, LedgerRow]:
        """Return the rows of an execution, with only one of the ranks that share their samples."""
        rows = dict(execution.rows)
        plan = self._plans.get(execution.generation)
        for group in sharing(self._axes, plan.world_size) if plan else ():
            reported = {rank: (rows[rank].samples, rows[rank].digest) for rank in group if rank in rows}
            if tell and len(set(reported.values())) > 1:
                self._differing.append(
                    f"{unit_text(at)}: ranks {', '.join(map(str, reported))} share their samples, and had others"
                )
            for rank in list(reported)[1:]:
                del rows[rank]  # counted once
        return rows

    def _ids(self, at: Position, rows: Mapping[int, LedgerRow]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        delivered = np.sort(_ids_of(rows))
        twice = np.unique(delivered[1:][delivered[1:] == delivered[:-1]])
        if len(twice):
            self._doubled.append(f"{unit_text(at)}: {_some(twice.tolist())}")
        return delivered

    def _compare(
        self,
        at: Position,
        before: Mapping[int, LedgerRow],
        rows: Mapping[int, LedgerRow],
        ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        *,
        whole: bool,
        unreported: int,
    ) -> None:
        """Compare what was taken back with what was computed again: all of it, or what is left of it.

        ``unreported``: number of samples of ranks that were lost with their rows.
        """
        count, now = (sum(row.samples for row in of.values()) for of in (before, rows))
        same = count == now if whole else count <= now + unreported
        if all(row.ids is not None for row in (*before.values(), *rows.values())):
            known = np.sort(_ids_of(before))
            same &= len(known) == len(np.unique(known)) and len(np.setdiff1d(known, ids)) <= unreported
        elif before.keys() == rows.keys() and all(row.samples == rows[rank].samples for rank, row in before.items()):
            same &= all(row.digest == rows[rank].digest for rank, row in before.items())
        # otherwise digests say nothing, because ranks had other shares
        if same:
            return
        self._differing.append(f"{unit_text(at)}: computed again on other samples")

    def _compare_folded(
        self,
        folded: Folded,
        rows: Mapping[int, LedgerRow],
        ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        *,
        whole: bool,
        unreported: int,
    ) -> None:
        before, now = folded.samples + folded.unreported, sum(row.samples for row in rows.values())
        same = before == now if whole else before <= now + unreported
        if whole and folded.ids is not None and all(row.ids is not None for row in rows.values()):
            same &= folded.ids == _mixed(ids)
        if not same:
            self._differing.append(f"{unit_text(folded.at)}: computed again on other samples")


def samples_in(gate: bytes | None) -> float | None:
    """Return the number of samples that the gate of a unit counted over all ranks; None if it has none."""
    values = np.frombuffer(gate or b"", dtype="<f8")
    return float(values[_SAMPLES_IN_GATE]) if len(values) > _SAMPLES_IN_GATE else None


_SAMPLES_IN_GATE = 1
"""Index in the gate's values, as in `rackrun.worker.membership.decisions.gate.GateSums`."""


def _mixed(ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
    """Return a digest that is equal for the same ids in any order.

    It is the sum, for two seeds, of each id's output of SplitMix64 (https://prng.di.unimi.it/splitmix64.c).
    """
    found = b""
    for seed in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found += int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64)).to_bytes(8, "little")
    return found


def _generation(plan: GenerationPlan) -> int:
    return int(plan.generation)


def _ids_of(rows: Mapping[int, LedgerRow]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.frombuffer(b"".join(row.ids for row in rows.values() if row.ids is not None), dtype="<i8").astype(
        np.int64
    )


def _some(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:8]))
    return shown if len(ids) <= 8 else f"{shown} and {len(ids) - 8} more"
