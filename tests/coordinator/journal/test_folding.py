"""Old units without their rows: what is said of a history is what would be said with all of them."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.coordinator.journal.folding import Folding
from rackrun.coordinator.journal.journal_writer import Journal, digest_of
from rackrun.coordinator.journal.ledger_check import FINDINGS, Folded, LedgerCheck, LedgerRow, check_ledger, fold
from rackrun.coordinator.report.goodput import read_goodput
from rackrun.coordinator.report.run_report import Report, read_report
from rackrun.protocol.commands import ResumeGeneration
from rackrun.protocol.ids import Position
from tests.coordinator.fakes import member, plan, unit
from tests.coordinator.journal.test_ledger_check import STEPS, History

WORLD = (member(0, "t/0", 1), member(1, "t/1", 2))


def folded_at(history: History, moment: int, count: int) -> tuple[LedgerCheck, list[Folded]]:
    """The check of a history of which, at the ``moment``-th report, up to ``count`` of the first units were folded, of which nobody told any more."""
    told, rows = history.units[:moment], history.rows[:moment]
    newest = max(generation for *_, generation, _ in told)
    plans = {generation: one for generation, one in history.plans.items() if generation <= newest}
    late = {at for at, _, generation, _ in history.units[moment:] if generation <= newest}
    found: dict[str, list[str]] = {kind: [] for kind in FINDINGS}
    folded: list[Folded] = []
    for at in sorted({at for at, *_ in told})[:count]:
        of = [(rank, generation, samples) for where, rank, generation, samples in told if where == at]
        ranks = Counter(generation for _, generation, _ in of)
        if at in late or any(
            generation == newest and n < plans[generation].world_size for generation, n in ranks.items()
        ):
            break

        def goes_on(generation: int, rank: int, at: Position = at, told: list[Any] = told) -> bool:
            return any(where > at and (who, one) == (rank, generation) for where, who, one, _ in told)

        left, check = fold(at, of, [row for row in rows if row.at == at], plans, goes_on=goes_on)
        folded += [left] if left else []
        for kind in FINDINGS:
            found[kind] += getattr(check, kind)
        told = [one for one in told if one[0] != at]
        rows = [one for one in rows if one.at != at]
    check = check_ledger(told + history.units[moment:], rows + history.rows[moment:], history.plans, folded=folded)
    return msgspec.structs.replace(check, **{kind: (*found[kind], *getattr(check, kind)) for kind in FINDINGS}), folded


@pytest.mark.parametrize("digests", [False, True])
def test_whatever_is_folded_and_whenever_the_check_says_the_same(digests: bool) -> None:
    folded_units = again = 0
    for seed in range(300):
        history = History(seed, digests)
        chance = random.Random(seed)
        whole = history.check()
        found, folded = folded_at(history, chance.randrange(1, len(history.units)), chance.randint(1, STEPS))
        assert found.ok, (seed, found)
        assert (found.units, found.samples) == (whole.units, whole.samples), (seed, found, whole)
        folded_units += found.folded
        again += len(folded) - found.folded
    assert folded_units > 150
    assert again > 10, "some were computed again after that"


def test_other_samples_in_a_unit_that_is_computed_again_are_found_though_its_rows_are_gone() -> None:
    found = 0
    for seed in range(400):
        history = History(seed)
        chance = random.Random(seed)
        moment, count = chance.randrange(1, len(history.units)), chance.randint(1, STEPS)
        _, folded = folded_at(history, moment, count)
        known = {one.at: history.eras.of(one.generation) for one in folded}
        later = [
            index
            for index, row in enumerate(history.rows)
            if index >= moment
            and row.at in known
            and history.eras.of(row.generation) > known[row.at]
            and history.counts(row)
        ]
        if not later:
            continue
        index = chance.choice(later)
        row = history.rows[index]
        assert row.ids is not None
        ids = row.ids[:-8] + (10_000).to_bytes(8, "little")
        history.rows[index] = row._replace(ids=ids, digest=digest_of(ids))
        check, _ = folded_at(history, moment, count)
        if history.check().differing:
            assert check.differing or check.by_gate, seed
            found += bool(check.differing)
    assert found > 10


def test_what_was_wrong_with_a_unit_is_found_when_it_is_folded() -> None:
    plans = {1: plan(1, *WORLD)}
    at, same = Position(3), b"".join(n.to_bytes(8, "little") for n in (7, 8))
    rows = [LedgerRow(at, rank, 1, 2, digest_of(same), same) for rank in (0, 1)]
    _, check = fold(at, [(0, 1, 4.0), (1, 1, 4.0)], rows, plans)
    assert check.doubled == ("step 3: 7, 8",)
    _, check = fold(at, [(0, 1, 4.0)], rows[:1], plans)
    assert check.missing == ("step 3: no row of rank 1",)


def test_of_a_unit_whose_rows_are_all_there_nothing_else_is_asked() -> None:
    """In a journal of millions of rows that would take as long as a recovery, for each unit."""

    def asked(*_: int) -> bool:
        raise AssertionError

    at, plans = Position(3), {1: plan(1, *WORLD)}
    _, check = fold(at, [(0, 1, 0.0), (1, 1, 0.0)], [], plans, goes_on=asked)
    assert check.ok


def test_a_unit_that_all_went_back_behind_before_its_gate_counted_leaves_nothing() -> None:
    plans = {1: plan(1, *WORLD), 2: plan(2, *WORLD, committed=Position(2))}
    left, check = fold(Position(3), [(0, 1, None)], [LedgerRow(Position(3), 0, 1, 2, b"", None)], plans)
    assert left is None
    assert check.units == 0


# -- in a journal
def written(path: Path, steps: int, keep_rows: int, *, ledger: str = "ids") -> Journal:
    """Two ranks, two samples each; a rollback to step 50 after step 80, and step 20 was broken once."""
    journal = Journal(path, run_id="job-1", ledger=ledger, keep_rows=keep_rows)  # type: ignore[arg-type]
    journal._folding = Folding(journal._telemetry, keep_rows, least_age_ms=0.0)
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 0)
    order = [(1, step) for step in range(min(steps, 81))]
    order += [(2, step) for step in range(51, steps)] if steps > 81 else []
    for number, (generation, step) in enumerate(order):
        if generation == 2 and step == 51:
            journal.flush()
            back = plan(2, *WORLD, committed=Position(80), rollback=50)
            journal.persist(ResumeGeneration(plan=back, because="damaged"), 10 * number)
        for rank in (0, 1):
            ids = b"".join((4 * step + 2 * rank + n).to_bytes(8, "little") for n in (0, 1))
            told = unit(step, rank, generation=generation, attempt=int(step == 20), ids=ids)
            journal.unit(msgspec.structs.replace(told, gate=(0.5, 4.0)), 10.0 * number)
        if number % 25 == 24:
            journal.flush()  # as time would pass
    journal.fact("ended_ms", 10 * len(order))
    journal.close()
    return journal


def reported(path: Path) -> Report:
    found = read_report(path)
    ledger = msgspec.structs.replace(found.ledger, distinct=0, folded=0)
    return msgspec.structs.replace(found, ledger=ledger, own_times=())


@pytest.mark.parametrize(("keep", "ledger"), [(10, "ids"), (100, "digest")])
def test_a_journal_whose_rows_are_bounded_says_what_one_with_all_rows_says(
    keep: int, ledger: str, tmp_path: Path
) -> None:
    bounded, whole = (
        written(tmp_path / "b", 200, keep, ledger=ledger),
        written(tmp_path / "w", 200, 10**6, ledger=ledger),
    )
    assert reported(bounded.path) == reported(whole.path)
    assert read_goodput(bounded.path) == read_goodput(whole.path)
    check = read_report(bounded.path).ledger
    assert check.ok, check
    assert (check.units, check.samples) == (200, 800)
    assert check.folded >= 100
    with closing(sqlite3.connect(bounded.path)) as connection:
        for table in ("units", "ledger"):
            (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert rows <= keep + 60, "and what came in the last batch"


def test_young_units_keep_their_rows_however_many_they_are(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", run_id="job-1", keep_rows=10)
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 0)
    for step in range(100):
        for rank in (0, 1):
            journal.unit(unit(step, rank, generation=1), 10.0 * step)
    journal.close()
    assert read_report(journal.path).ledger.folded == 0


def test_a_unit_that_cannot_be_folded_costs_the_bound_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "j", run_id="job-1", keep_rows=10, on_trouble=said.append)
    journal._folding = Folding(journal._telemetry, 10, least_age_ms=0.0)
    journal._folding._fold = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 0)
    for step in range(100):
        for rank in (0, 1):
            journal.unit(unit(step, rank, generation=1), 10.0 * step)
    journal.close()
    assert len(said) == 1
    assert "grows with every step" in said[0]
    assert read_report(journal.path).ledger.units == 100
    assert not journal.rows_lost


def test_units_whose_folding_was_taken_back_are_folded_later(tmp_path: Path) -> None:
    """The disk is full for a while. What was not folded then still counts as rows that are there."""
    journal = Journal(tmp_path / "j", run_id="job-1", keep_rows=10)
    journal._folding = Folding(journal._telemetry, 10, least_age_ms=0.0)
    journal._folding.some = taken_back(journal._folding, times=8)  # type: ignore[method-assign]
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 0)
    for step in range(200):
        for rank in (0, 1):
            journal.unit(unit(step, rank, generation=1), 10.0 * step)
        if step % 10 == 9:
            journal.flush()
    journal.close()
    with closing(sqlite3.connect(journal.path)) as connection:
        (rows,) = connection.execute("SELECT count(*) FROM units").fetchone()
    assert rows <= 10 + 2
    assert read_report(journal.path).ledger.units == 200


def test_a_journal_that_grows_because_nothing_can_be_folded_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "j", run_id="job-1", keep_rows=10, on_trouble=said.append)
    journal._folding = Folding(journal._telemetry, 10, least_age_ms=0.0)
    journal._folding.some = taken_back(journal._folding, times=10**6)  # type: ignore[method-assign]
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 0)
    for step in range(20):
        for rank in (0, 1):
            journal.unit(unit(step, rank, generation=1), 10.0 * step)
        journal.flush()
        assert (step < 10) or len(said) == 1, "twice as many rows as it is to keep"
    journal.close()
    assert "disk is full" in said[0]


def taken_back(folding: Folding, times: int) -> Callable[[], int]:
    """`Folding.some`, and then the transaction fails."""
    some, left = folding.some, [times]

    def fails() -> int:
        rows = some()
        if left[0]:
            left[0] -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return rows

    return fails


def test_however_many_ranks_are_lost_with_their_rows_the_journal_is_searched_once(tmp_path: Path) -> None:
    """Who persists a generation waits for it, and each search reads all rows of the ranks that live on."""
    world = tuple(member(rank, f"t{rank // 4}/{rank % 4}", rank + 1) for rank in range(8))
    journal = Journal(tmp_path / "j", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *world), because="begin"), 0)
    journal.persist(ResumeGeneration(plan=plan(2, *world[:4], committed=Position(0)), because="lost"), 0)
    for rank in range(4):  # the other tray is lost after step 0, with its rows
        journal.unit(msgspec.structs.replace(unit(0, rank, generation=1), gate=(0.5, 16.0)), 10.0)
        journal.unit(unit(1, rank, generation=2), 20.0)
    journal.close()
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as connection:
        folding = Folding(connection, 4, least_age_ms=0.0)
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
        assert folding.some() == 4
        found = [what for (what,) in connection.execute("SELECT what FROM findings WHERE kind = 'by_gate'")]
    assert len([one for one in statements if "AND generation = 1" in one]) == 1, statements
    assert "rank 4, 5, 6, 7 was lost with its row" in found[0]
