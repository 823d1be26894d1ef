"""A hand-made journal, and what is read out of it."""

from __future__ import annotations

import contextlib
import itertools
import math
import sqlite3
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.observe.recoveries import LostRank, RecoveryRecord
from rackrun.coordinator.report.run_report import Report, read_report
from rackrun.core.policy.choice import parse_rules
from rackrun.ctl.run_render import render_report, render_status
from rackrun.errors import UsageError
from rackrun.protocol.commands import BreakGeneration, Decided, Notice, ResumeGeneration
from rackrun.protocol.events import WorkerReady
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId
from rackrun.protocol.job_config import JobConfig
from rackrun.protocol.policy_types import Decision, Failure, FailureCause, Rung
from tests.coordinator.fakes import member, plan, unit
from tests.core.core_harness import CoreHarness, only

WORLD = (member(0, "tray-00/0", 1), member(1, "tray-00/1", 2))
RECOVERY = RecoveryRecord(
    generation=2,
    kind="swap",
    because="swap",
    fault_ms=1000.0,
    break_ms=1001.0,
    parked_ms=1011.0,
    plan_ms=1014.0,
    resumed_ms=1314.0,
    committed_ms=1400.0,
    lost=(LostRank(rank=Rank(1), slot=SlotId("tray-00/1"), how="SIGKILL", to=SlotId("tray-00/2")),),
    world_size=2,
    redone=(4,),
    rungs=("wait", "swap"),
    reasons=("wait: 2 x (0.2 s wait + 0.1 s takeover) = 0.6 GPU-s", "swap: 2 x (0.1 s takeover) = 0.2 GPU-s"),
    decided_ms=1014.0,
    predicted_gpu_s=0.6,
    measured_gpu_s=0.8,
)

STATUS = {
    "run_id": "job-1",
    "uptime_s": 9.0,
    "progress": {"position": [4, 0], "steps_per_s": 1.0, "values": {}},
    "recoveries": 0,
    "last_recovery": "",
}


def ids(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Two ranks, eight steps of 100 ms, two samples a rank; step 4 was broken, and rank 1 swapped."""
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 500)
    for step in range(8):
        for rank in (0, 1):
            generation, attempt = (1, 0) if step < 4 else (2, int(step == 4))
            first = 4 * step + 2 * rank
            row = unit(step, rank, generation=generation, attempt=attempt, ids=ids(first, first + 1))
            journal.unit(row, 600.0 + 100 * step)
    swapped = plan(2, WORLD[0], member(1, "tray-00/2", 3, fresh=True), committed=Position(3))
    journal.persist(ResumeGeneration(plan=swapped, because="swap"), 1014)
    journal.recovery(RECOVERY)
    for key, value in (("exit_code", 0), ("because", "done"), ("ended_ms", 2000)):
        journal.fact(key, value)
    return journal


def report_of(journal: Journal) -> Report:
    journal.close()
    return read_report(journal.path)


def test_the_waterfall_is_gapless_and_adds_up(journal: Journal) -> None:
    (recovery,) = report_of(journal).recoveries
    assert [(stage.name, stage.ms) for stage in recovery.stages] == [
        ("break", 1.0),
        ("park", 10.0),
        ("plan", 3.0),
        ("resume", 300.0),
        ("first commit", 86.0),
    ]
    assert sum(stage.ms for stage in recovery.stages) == 400.0
    assert recovery.seconds == pytest.approx(0.314)


def test_goodput_counts_each_step_once_at_its_usual_time(journal: Journal) -> None:
    report = report_of(journal)
    assert (report.steps, report.steps_redone, report.generations, report.exit_code) == (8, 1, 2, 0)
    goodput = report.goodput
    assert goodput.productive_s == pytest.approx(0.8)
    assert goodput.ettr == pytest.approx(0.4)
    assert goodput.startup_s == pytest.approx(0.5)
    assert goodput.redone_s == pytest.approx(0.1)
    parts = goodput.productive_s + goodput.startup_s + goodput.recovery_s + goodput.redone_s + goodput.other_s
    assert parts == pytest.approx(goodput.wall_s)


def test_what_was_done_again_took_no_longer_than_there_was_time(journal: Journal) -> None:
    """It is counted at the usual time of a step, and steps may be slower after a loss than before."""
    journal.fact("ended_ms", 1350)
    goodput = report_of(journal).goodput
    assert goodput.redone_s == pytest.approx(0.05)
    parts = goodput.productive_s + goodput.startup_s + goodput.recovery_s + goodput.redone_s + goodput.other_s
    assert parts == pytest.approx(goodput.wall_s)


def _decided(rung: Rung) -> Decided:
    failure = Failure(
        what="rank 1 lost (SIGKILL)", whose=FailureCause.HARDWARE, ranks=(Rank(1),), slots=(), evidence=()
    )
    return Decided(generation=Generation(2), failure=failure, decision=Decision(rung=rung))


def test_a_hold_has_its_own_row_and_its_own_stage(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 500)
    journal.unit(unit(0, 0, generation=1), 600.0)
    for at_ms, rung in ((1014, Rung.WAIT), (1100, Rung.HOLD), (1200, Rung.HOLD), (1700, Rung.SWAP)):
        journal.command(_decided(rung), at_ms, 1)
    journal.unit(unit(1, 0, generation=2), 2200.0)
    held = msgspec.structs.replace(RECOVERY, plan_ms=1714.0, resumed_ms=2000.0, committed_ms=2200.0, held_ms=600.0)
    journal.recovery(held)
    journal.fact("ended_ms", 2300)
    report = report_of(journal)
    goodput = report.goodput
    assert goodput.hold_s == pytest.approx(0.6)
    assert goodput.recovery_s == pytest.approx(0.4)
    parts = goodput.productive_s + goodput.startup_s + goodput.recovery_s + goodput.redone_s + goodput.hold_s
    assert parts + goodput.other_s == pytest.approx(goodput.wall_s)
    stages = [(stage.name, stage.ms) for stage in report.recoveries[0].stages]
    assert stages[2:4] == [("hold", 600.0), ("plan", 103.0)]
    shown = StringIO()
    render_report(Console(file=shown, width=200), report)
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["hold", "0.60", "s", "26.1%"] in rows


def test_the_report_of_a_job_that_holds_says_what_the_status_says(tmp_path: Path) -> None:
    """A whole core's commands, as the coordinator writes them."""
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2, rules=parse_rules("swap,hold")))
    files = itertools.count()

    def written(*, exit_code: int | None = None) -> Report:
        journal = Journal(tmp_path / f"journal-{next(files)}.sqlite", run_id="job-1")
        for command in harness.answers:
            if isinstance(command, BreakGeneration | ResumeGeneration):
                journal.persist(command, 1)
            else:
                journal.command(command, 1, 1)
        if exit_code is not None:
            journal.fact("exit_code", exit_code)
        return report_of(journal)

    harness.join("a", 3)
    harness.join("b", 3)
    harness.train()
    assert (written().waits, written().hold) == ("", "")
    harness.tray_lost("b")
    harness.park_all()
    report = written()
    assert report.waits == harness.view.waits
    assert report.waits.startswith("ranks 2, 3 lost (b lost: lease lapsed); hold, by the order given: no deadline")
    assert report.hold == harness.view.hold == only(Notice, harness.answers[-4:]).text
    console = Console(width=1000, record=True, file=StringIO())
    render_report(console, report)
    render_status(console, STATUS | {"core": msgspec.to_builtins(harness.view)})
    assert console.export_text().count(f"all ranks wait: {report.waits}\n  {report.hold}\n") == 2
    harness.join("c", 1)
    report = written()
    assert report.hold == harness.view.hold
    assert "The hold ends when the spare that starts is ready" in report.hold
    assert (written(exit_code=143).waits, written(exit_code=143).hold) == ("", "")
    harness.ready("c/0")
    assert (written().waits, written().hold, harness.view.hold) == ("", "", "")


def test_a_notice_of_a_hold_is_known_by_its_field_and_in_an_older_journal_by_its_text(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.command(_decided(Rung.HOLD), 1000, 1)
    journal.command(Notice(text="all ranks wait in a hold, it ends soon", of_hold=True), 1000, 1)
    journal.command(Notice(text="they hold, and it ends when spares are there", of_hold=True), 1100, 1)
    journal.command(Notice(text="all ranks wait in a hold, says something else"), 1200, 1)
    assert report_of(journal).hold == "they hold, and it ends when spares are there"
    with contextlib.closing(sqlite3.connect(journal.path)) as connection:
        connection.execute("UPDATE events SET body = json_remove(body, '$.of_hold') WHERE at_ms <> 1200")
        connection.execute("DELETE FROM events WHERE at_ms = 1200")
        connection.commit()
    assert read_report(journal.path).hold == "all ranks wait in a hold, it ends soon"


def test_a_hold_in_which_the_job_ends_or_goes_on_is_counted_until_now(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 500)
    journal.unit(unit(0, 0, generation=1), 600.0)
    journal.command(_decided(Rung.HOLD), 1000, 1)
    journal.fact("ended_ms", 5000)
    goodput = report_of(journal).goodput
    assert goodput.hold_s == pytest.approx(4.0)
    assert goodput.other_s == pytest.approx(0.4)


def test_what_was_computed_while_the_coordinator_stood_still_is_no_recovery(tmp_path: Path) -> None:
    """It hears at 2 s that all have resumed, and of ten steps of 100 ms that they have done since."""
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 500)
    journal.unit(unit(0, 0, generation=1), 600.0)
    for step in range(1, 11):
        journal.unit(unit(step, 0, generation=2), 2000.0)
    journal.recovery(msgspec.structs.replace(RECOVERY, fault_ms=600.0, resumed_ms=2000.0))
    journal.fact("ended_ms", 2000)
    goodput = report_of(journal).goodput
    assert goodput.productive_s == pytest.approx(1.1)
    assert goodput.recovery_s == pytest.approx(0.4)


def test_a_whole_ledger_is_good_news(journal: Journal) -> None:
    ledger = report_of(journal).ledger
    assert ledger.ok
    assert (ledger.units, ledger.samples, ledger.distinct) == (8, 32, 32)


def test_a_sample_twice_in_one_unit_is_found(journal: Journal) -> None:
    journal.unit(unit(6, 1, generation=2, ids=ids(24, 99)), 1.0)  # 24 is rank 0's
    ledger = report_of(journal).ledger
    assert ledger.doubled == ("step 6: 24",)
    assert not ledger.ok


def test_a_missing_row_is_named(journal: Journal) -> None:
    report = _without(journal, "step = 2 AND rank = 1")
    assert report.ledger.missing == ("step 2: no row of rank 1",)


def test_rows_of_the_last_unit_may_still_be_on_their_way(journal: Journal) -> None:
    assert _without(journal, "step = 7 AND rank = 1").ledger.ok


def test_steps_computed_again_after_a_rollback_are_one_execution_each(journal: Journal) -> None:
    journal.persist(ResumeGeneration(plan=plan(3, *WORLD, committed=Position(7), rollback=5), because=""), 1500)
    for step in (6, 7):
        for rank in (0, 1):
            first = 4 * step + 2 * rank
            journal.unit(unit(step, rank, generation=3, ids=ids(first, first + 1)), 1.0)
    report = report_of(journal)
    assert report.ledger.ok
    assert report.ledger.samples == 32
    assert report.steps_redone == 3


@pytest.mark.parametrize(
    ("changes", "redone", "seconds"),
    [
        ({}, 4, 0.4),
        ({"rollback": None, "kind": "restart"}, 4, 0.4),
        ({"overtaken": True}, 3, 0.3),
        ({"generation": 4}, 3, 0.3),  # the job ended before it was done again
    ],
)
def test_the_step_that_was_broken_before_a_rollback_counts_as_one_that_was_broken_without(
    journal: Journal, changes: dict[str, Any], redone: int, seconds: float
) -> None:
    """Steps 6 and 7 were taken back, and step 8 was broken: its second attempt is numbered from 0 again."""
    journal.persist(ResumeGeneration(plan=plan(3, *WORLD, committed=Position(7), rollback=5), because=""), 1500)
    for step in (6, 7, 8):
        for rank in (0, 1):
            first = 4 * step + 2 * rank
            journal.unit(unit(step, rank, generation=3, ids=ids(first, first + 1)), 1.0)
    back = RecoveryRecord(generation=3, kind="swap", because="", fault_ms=1500.0, rollback=5, redone=(6, 7, 8))
    journal.recovery(msgspec.structs.replace(back, **changes))
    journal.fact("ended_ms", 9000)
    report = report_of(journal)
    assert (report.steps, report.steps_redone) == (9, redone)
    assert report.goodput.redone_s == pytest.approx(seconds)


def test_a_step_is_named_by_the_recovery_after_which_it_was_done_again_not_by_the_one_that_came_meanwhile(
    journal: Journal,
) -> None:
    """Rank 1 was lost in step 4. Rank 0 told of step 4 when rank 1 was lost again already, in step 6: between, no step is
    done again."""
    journal.recovery(msgspec.structs.replace(RECOVERY, redone=(), committed_ms=None))
    journal.persist(ResumeGeneration(plan=plan(3, *WORLD, committed=Position(7)), because=""), 1500)
    for rank in (0, 1):
        journal.unit(unit(8, rank, generation=3, attempt=1, ids=ids(32 + 2 * rank, 33 + 2 * rank)), 1600.0)
    again = msgspec.structs.replace(RECOVERY, generation=3, fault_ms=1500.0, redone=(4, 8))
    assert again.line().endswith(", steps 4, 8 done again")
    journal.recovery(again)
    report = report_of(journal)
    assert report.steps_redone == 2
    assert [one.recovery.redone for one in report.recoveries] == [(4,), (8,)]
    assert [one.line.rpartition(", ")[2] for one in report.recoveries] == ["step 4 done again", "step 8 done again"]


@pytest.mark.parametrize(
    ("until", "exit_code", "redone", "told"),
    [
        (8, 0, 4, "steps 6 to 8 done again"),
        (7, 143, 3, "steps 6 to 7 done again, step 8 not done again"),
        (6, None, 2, "step 6 done again, steps 7 to 8 not yet done again"),
        (5, 143, 1, "back to the state after step 5, steps 6 to 8 not done again"),
    ],
)
def test_the_steps_that_a_recovery_names_as_done_again_are_those_that_are_counted(
    tmp_path: Path, journal: Journal, until: int, exit_code: int | None, redone: int, told: str
) -> None:
    """Step 4 was broken in its middle. Later all went back from step 8 to step 5, and the job ended before they were there again."""
    journal.close()
    with contextlib.closing(sqlite3.connect(journal.path)) as connection:
        connection.execute("DELETE FROM meta WHERE key = 'exit_code'")
        connection.commit()
    journal = Journal(journal.path, run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(4, *WORLD, committed=Position(7), rollback=5), because=""), 1500)
    for step in range(6, until + 1):
        for rank in (0, 1):
            first = 4 * step + 2 * rank
            journal.unit(unit(step, rank, generation=4, ids=ids(first, first + 1)), 1600.0)
    back = RecoveryRecord(generation=3, kind="swap", because="x", fault_ms=1500.0, rollback=5, redone=(6, 7, 8))
    journal.recovery(msgspec.structs.replace(back, plan_ms=1501.0, overtaken=True))
    journal.recovery(
        msgspec.structs.replace(back, generation=4, plan_ms=1502.0, resumed_ms=1503.0, rollback=5, redone=())
    )
    if exit_code is not None:
        journal.fact("exit_code", exit_code)
    report = report_of(journal)
    assert report.steps_redone == redone == len({step for one in report.recoveries for step in one.recovery.redone})
    swap, overtaken, last = (one.line for one in report.recoveries)
    assert swap.endswith(", step 4 done again")
    assert "done again" not in overtaken
    assert last.endswith(told)


def test_a_row_that_went_with_its_rank_before_all_went_back_is_not_missed(journal: Journal) -> None:
    """Rank 1 was lost before it had told of steps 6 and 7; all went back behind them, and did them again."""
    journal.persist(ResumeGeneration(plan=plan(3, *WORLD, committed=Position(6), rollback=5), because=""), 1500)
    for step in (6, 7):
        for rank in (0, 1):
            first = 4 * step + 2 * rank
            journal.unit(unit(step, rank, generation=3, ids=ids(first, first + 1)), 1.0)
    ledger = _without(journal, "step IN (6, 7) AND rank = 1 AND generation = 2").ledger
    assert ledger.ok, ledger
    assert (ledger.units, ledger.samples, ledger.distinct) == (8, 32, 32)


def test_a_row_that_went_with_its_tray_is_counted_by_the_gate(journal: Journal) -> None:
    """Rank 1's last unit: nobody else can tell its samples, but all ranks have counted them."""
    journal.unit(msgspec.structs.replace(unit(3, 0, ids=ids(12, 13)), gate=(0.5, 4.0)), 1.0)
    ledger = _without(journal, "step = 3 AND rank = 1").ledger
    assert ledger.ok, ledger
    assert ledger.by_gate == ("step 3: rank 1 was lost with its row; its gate has counted 2 more samples",)


def test_a_step_computed_again_on_other_samples_is_found(journal: Journal) -> None:
    journal.persist(ResumeGeneration(plan=plan(3, *WORLD, committed=Position(7), rollback=6), because=""), 1500)
    for rank in (0, 1):
        journal.unit(unit(7, rank, generation=3, ids=ids(100 + rank, 200 + rank)), 1.0)
    assert report_of(journal).ledger.differing == ("step 7: computed again on other samples",)


@pytest.mark.parametrize(("dealt", "ok"), [((1, 3), True), ((2, 2), False), ((1, 2), False)])
def test_by_digests_alone_a_step_that_was_dealt_otherwise_is_told_by_how_many_samples_it_had(
    dealt: tuple[int, int], ok: bool, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "digests.sqlite", run_id="x", ledger="digest")
    again = plan(2, *WORLD, committed=Position(7), rollback=6)
    for world in (plan(1, *WORLD), again):
        journal.persist(ResumeGeneration(plan=world, because=""), 1)
    for generation, shares in ((1, (2, 2)), (2, dealt)):
        first = generation
        for rank, share in enumerate(shares):
            journal.unit(unit(7, rank, generation=generation, ids=ids(*range(first, first + share))), 1.0)
            first += share
    assert report_of(journal).ledger.ok is ok


def on_a_mesh(tmp_path: Path, delivered: dict[int, bytes]) -> Report:
    """One step of four ranks, two by two."""
    journal = Journal(tmp_path / "mesh.sqlite", run_id="job-2")
    ready = WorkerReady(slot=SlotId("tray-00/0"), incarnation=Incarnation(1), mesh=(("dp", 3), ("tp", 2)))
    journal.event(ready)
    world = [member(rank, f"tray-00/{rank}", rank + 1) for rank in range(4)]
    journal.persist(ResumeGeneration(plan=plan(1, *world), because="begin"), 500)
    for rank, numbers in delivered.items():
        journal.unit(unit(0, rank, generation=1, ids=numbers), 600.0)
    return report_of(journal)


def test_ranks_that_share_their_samples_count_them_once(tmp_path: Path) -> None:
    ledger = on_a_mesh(tmp_path, {0: ids(1, 2), 1: ids(1, 2), 2: ids(3, 4), 3: ids(3, 4)}).ledger
    assert ledger.ok, ledger
    assert (ledger.samples, ledger.distinct) == (4, 4)


def test_ranks_that_share_their_samples_and_had_others_are_found(tmp_path: Path) -> None:
    ledger = on_a_mesh(tmp_path, {0: ids(1, 2), 1: ids(1, 2), 2: ids(3, 4), 3: ids(5, 6)}).ledger
    assert ledger.differing == ("step 0: ranks 2, 3 share their samples, and had others",)


def test_a_sample_that_goes_to_two_replicas_is_found_on_a_mesh_too(tmp_path: Path) -> None:
    ledger = on_a_mesh(tmp_path, {0: ids(1, 2), 1: ids(1, 2), 2: ids(2, 4), 3: ids(2, 4)}).ledger
    assert ledger.doubled == ("step 0: 2",)


def test_the_report_is_json_and_text(journal: Journal) -> None:
    report = report_of(journal)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    console = Console(width=120, record=True, file=StringIO())
    render_report(console, report)
    text = console.export_text()
    assert "rank 1 lost on tray-00/1 (SIGKILL) -> tray-00/2 in 0.31 s, step 4 done again" in text
    assert "decided: wait: 2 x (0.2 s wait + 0.1 s takeover) = 0.6 GPU-s" in text
    assert "decided: swap: 2 x (0.1 s takeover) = 0.2 GPU-s" in text
    assert "cost: predicted 0.6 GPU-s, measured 0.8 GPU-s" in text
    assert "goodput (ETTR) 40.0%" in text
    assert "32 samples in 8 units" in text


def test_the_report_of_a_job_that_ended_in_a_hold_counts_no_recovery(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 500)
    because = "rank 1 lost (SIGKILL)"
    held = RecoveryRecord(generation=2, kind="regroup", because=because, fault_ms=600.0, held_ms=2e3, rungs=("hold",))
    journal.recovery(held)
    console = Console(width=120, record=True, file=StringIO())
    render_report(console, report_of(journal))
    text = console.export_text()
    assert "1 generation, 0 recoveries, and 1 not completed when the job ended" in text.replace("\n", " ")
    assert "\ngeneration 2: rank 1 lost (SIGKILL) -> the job ended, after 2.00 s in a hold\n" in text


def test_the_report_says_which_steps_were_done_again_without_a_fault(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", run_id="job-1")
    journal.persist(ResumeGeneration(plan=plan(1, *WORLD), because="begin"), 500)
    for step in range(3):
        for rank in (0, 1):
            attempt = int(step == 0)
            first = 4 * step + 2 * rank
            row = unit(step, rank, attempt=attempt, rescaled=attempt, ids=ids(first, first + 1))
            journal.unit(row, 600.0 + step)
    report = report_of(journal)
    assert (report.steps_redone, report.steps_rescaled) == (1, 1)
    console = Console(width=120, record=True, file=StringIO())
    render_report(console, report)
    why = '3 steps, 1 of them done again (1 because a gradient had no scale yet or had outgrown it, reduction="exact");'
    assert why in console.export_text().replace("\n", "")


def test_own_times_show_who_is_waited_for(journal: Journal) -> None:
    for step in range(8, 11):
        for rank, own in ((0, 0.03), (1, 0.09)):
            journal.unit(msgspec.structs.replace(unit(step, rank, generation=2, ids=ids(step, rank)), own=own), 1500.0)
    report = report_of(journal)
    assert [(one.rank, one.seconds, round(one.waits, 3)) for one in report.own_times] == [
        (0, 0.03, 0.7),
        (1, 0.09, 0.1),
    ]
    console = Console(width=120, record=True, file=StringIO())
    render_report(console, report)
    text = console.export_text()
    assert "own time of a step, without waiting: median rank 30.0 ms" in text
    assert text.index("rank 1   ") < text.index("rank 0   ")
    assert "x 3.00" in text


def test_a_loss_that_was_no_number_does_not_make_the_journal_unreadable(journal: Journal, tmp_path: Path) -> None:
    broken = msgspec.structs.replace(plan(3, *WORLD, committed=Position(7)), gate=(math.nan, 4.0))
    journal.persist(ResumeGeneration(plan=broken, because="again"), 1500)
    journal.close()
    assert read_report(tmp_path / "journal.sqlite").exit_code == 0


def test_what_is_no_journal_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no journal at"):
        read_report(tmp_path / "journal.sqlite")
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to be looked at " * 20)
    with pytest.raises(UsageError, match="cannot be read as a journal"):
        read_report(tmp_path / "text.sqlite")


def _without(journal: Journal, rows: str) -> Report:
    journal.close()
    connection = sqlite3.connect(journal.path)
    for table in ("units", "ledger"):
        connection.execute(f"DELETE FROM {table} WHERE {rows}")
    connection.commit()
    connection.close()
    return read_report(journal.path)
