"""The ledger's proof, over histories of deaths at each place: what was right is called right, and a lost or doubled sample is found.

The histories are made by the rules of `docs/gate.md`: a unit is committed when some rank saw its gate pass, and counts for all if
one of them lives to tell; a rank tells of it some time later, or never.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from rackrun.coordinator.journal.committed_units import RollbackEras
from rackrun.coordinator.journal.journal_writer import digest_of
from rackrun.coordinator.journal.ledger_check import LedgerCheck, LedgerRow, check_ledger
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import BEGIN, Position
from tests.coordinator.fakes import member, plan

BATCH = 12
STEPS = 10


@dataclass
class History:
    """``digests``: no ids are kept."""

    seed: int
    digests: bool = False
    plans: dict[int, GenerationPlan] = field(default_factory=dict)
    units: list[tuple[Position, int, int, float | None]] = field(default_factory=list)
    rows: list[LedgerRow] = field(default_factory=list)
    lost_at_end: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.incarnation = 0
        self.who: dict[int, int] = {}
        self.committed = BEGIN
        self.form(self.random.choice([2, 3, 4]), BEGIN, None, keep=())
        while self.committed.step < STEPS - 1:
            if len(self.plans) < 12 and self.random.random() < 0.4:
                self.break_at(Position(self.committed.step + 1))
            else:
                self.pass_all(Position(self.committed.step + 1))
        self.report()

    def form(self, size: int, committed: Position, rollback: int | None, keep: tuple[int, ...]) -> None:
        """A generation of ``size`` ranks, of which ``keep`` (by their old rank) live on, first."""
        held = [self.who[rank] for rank in keep][:size]
        while len(held) < size:
            self.incarnation += 1
            held.append(self.incarnation)
        self.who = dict(enumerate(held))
        self.generation = len(self.plans) + 1
        members = [member(rank, f"t/{who}", who) for rank, who in self.who.items()]
        self.plans[self.generation] = plan(self.generation, *members, committed=committed, rollback=rollback)
        self.committed = committed if rollback is None else Position(rollback)
        self.unsaid: dict[int, list[LedgerRow]] = {rank: [] for rank in self.who}

    def share(self, at: Position, rank: int) -> LedgerRow:
        """Of a rank in this world."""
        size = len(self.who)
        first, stop = rank * BATCH // size, (rank + 1) * BATCH // size
        ids = b"".join((BATCH * at.step + i).to_bytes(8, "little") for i in range(first, stop))
        return LedgerRow(at, rank, self.generation, stop - first, digest_of(ids), None if self.digests else ids)

    def tell(self, row: LedgerRow) -> None:
        self.units.append((row.at, row.rank, row.generation, float(BATCH)))
        self.rows.append(row)

    def report(self) -> None:
        for rank in self.unsaid:
            self.said_by(rank)

    def said_by(self, rank: int) -> None:
        for row in self.unsaid[rank]:
            self.tell(row)
        self.unsaid[rank] = []

    def pass_all(self, at: Position) -> None:
        self.committed = at
        for rank in self.who:
            self.unsaid[rank].append(self.share(at, rank))
        for rank in self.who:
            if self.random.random() < 0.8:
                self.said_by(rank)

    def break_at(self, at: Position) -> None:
        """Somebody dies in ``at``: before its gate, or when some ranks have seen it pass."""
        ranks = list(self.who)
        dead = self.random.sample(ranks, self.random.choice([1, 1, 1, 1, len(ranks) - 1, len(ranks)]))
        passed = self.random.sample(ranks, self.random.randint(0, len(ranks))) if self.random.random() < 0.7 else []
        for rank in passed:
            self.unsaid[rank].append(self.share(at, rank))
        for rank in passed:
            if self.random.random() < 0.5:
                self.said_by(rank)
        living = [rank for rank in ranks if rank not in dead]
        counts = bool(set(passed) & set(living))
        committed = at if counts else self.committed
        if counts:  # whoever lives has committed it then, by the plan
            for rank in living:
                if rank not in passed:
                    self.unsaid[rank].append(self.share(at, rank))
        begins_again = not living
        self.lost_at_end |= committed.step == STEPS - 1
        rollback = None
        if living and committed.step > 0 and self.random.random() < 0.3:
            rollback = self.random.randrange(committed.step)
        for rank in dead:  # its agent tells what its page holds, unless the tray has gone with it
            if begins_again or self.random.random() < 0.3:
                self.unsaid[rank] = []
            else:
                end = committed if rollback is None else Position(rollback)
                self.unsaid[rank] = [row for row in self.unsaid[rank] if row.at <= end]
                self.said_by(rank)
        for rank in living:
            self.said_by(rank)
        size = max(2, len(ranks) - self.random.choice([0, 0, 1]))
        self.form(size, BEGIN if begins_again else committed, rollback, tuple(living))

    @property
    def eras(self) -> RollbackEras:
        return RollbackEras(self.plans)

    def counts(self, row: LedgerRow) -> bool:
        return self.eras.counts(row.at, row.generation)

    def check(self) -> LedgerCheck:
        return check_ledger(self.units, self.rows, self.plans)


@pytest.mark.parametrize("digests", [False, True])
def test_what_was_right_is_called_right_wherever_ranks_died(digests: bool) -> None:
    by_gate = 0
    for seed in range(800):
        history = History(seed, digests)
        found = history.check()
        assert found.ok, (seed, found)
        assert found.units == STEPS
        if not found.by_gate and not history.lost_at_end:
            assert found.samples == BATCH * STEPS, (seed, found)
            assert digests or found.distinct == BATCH * STEPS
        by_gate += bool(found.by_gate)
    assert 0 < by_gate < 800, "some ranks were lost with their rows, and some histories are whole"


@pytest.mark.parametrize("digests", [False, True])
def test_a_row_that_is_not_there_is_missed(digests: bool) -> None:
    """Of the last execution of a unit, and of a rank that went on."""
    missed = 0
    for seed in range(400):
        history = History(seed, digests)
        last = max(history.plans)
        end = max((at for at, _, generation, _ in history.units if generation == last), default=None)
        told = [unit for unit in history.units if unit[2] == last and unit[0] != end]
        if not told:
            continue
        before = history.check()
        at, rank, generation, _ = history.random.choice(told)
        history.units = [unit for unit in history.units if unit[:3] != (at, rank, generation)]
        history.rows = [row for row in history.rows if (row.at, row.rank, row.generation) != (at, rank, generation)]
        found = history.check()
        assert before.ok, seed
        if not found.ok:
            assert any(f"step {at.step}:" in line for line in found.missing), (seed, found)
            missed += 1
        else:  # nobody has told of it since: then all went back, and it is the first that is done again
            assert not any(unit[0] == at and unit[2] == last for unit in history.units), (seed, at)
    assert missed > 50


def test_samples_that_were_exchanged_are_found() -> None:
    """One sample of the last execution is another unit's: it is there twice in the run, or the unit was computed on others before."""
    found = 0
    for seed in range(400):
        history = History(seed)
        rows = [index for index, row in enumerate(history.rows) if row.ids]
        index = history.random.choice(rows)
        row = history.rows[index]
        assert row.ids is not None
        foreign = (10_000).to_bytes(8, "little")
        ids = row.ids[:-8] + foreign
        last_id = row.ids[-8:]
        same = [
            r
            for r in history.rows
            if r.at == row.at and last_id in ((r.ids or b"")[i : i + 8] for i in range(0, len(r.ids or b""), 8))
        ]
        eras = {history.eras.of(r.generation) for r in same if history.counts(r)}
        history.rows[index] = row._replace(ids=ids, digest=digest_of(ids))
        check = history.check()
        if history.counts(row) and len(eras) > 1 and not check.by_gate:
            assert check.differing, seed
            found += 1
    assert found > 30
