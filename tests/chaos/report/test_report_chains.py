"""Which of a job's events a strike explains, and what the job made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackrun.chaos.evidence.history import Committed, Entry, Noticed, Strike, StrikeConfirmed, TakenBack
from rackrun.chaos.inprocess.restore_times import Restored
from rackrun.chaos.report.analysis.journal_timeline import Happened, JournalTimeline
from rackrun.chaos.report.analysis.recovery_chains import Chain, chains_of, entries_of, stages_of
from rackrun.coordinator.observe.recoveries import LostRank, RecoveryRecord
from rackrun.protocol.ids import Rank, SlotId

RANK_2 = ("t0/2", 3)


def strike(number: int, at_s: float, *slots: tuple[str, int], whom: str = "rank 2", fault: str = "kill") -> Strike:
    fault_of = {"fault": fault}
    return Strike(at_s=at_s, type="invoke", id=f"h{number}", strike=number, fault=fault_of, whom=(whom,), slots=slots)


def took(number: int, at_s: float, took: bool | None = True, struck_s: float | None = None) -> StrikeConfirmed:
    return StrikeConfirmed(at_s=at_s, id=f"c{number}", strike=number, took=took, detail="", struck_s=struck_s)


def event(number: int, at_s: float, name: str, **body: Any) -> Happened:
    return Happened(number, None, name, at_s, {"event": name, **body})


def exited(number: int, at_s: float, slot: str, incarnation: int, **how: Any) -> Happened:
    return event(number, at_s, "WorkerExited", slot=slot, incarnation=incarnation, **(how or {"signal": 9}))


def recovery(generation: int, fault_s: float, *lost: tuple[int, str], **more: Any) -> RecoveryRecord:
    """Planned 20 ms after the fault, resumed after 100 ms, committed after 300 ms."""
    ms = 1e3 * fault_s
    times: dict[str, Any] = {"parked_ms": ms + 10, "plan_ms": ms + 20, "resumed_ms": ms + 100, "committed_ms": ms + 300}
    ranks = tuple(LostRank(rank=Rank(rank), slot=SlotId(slot), how="SIGKILL", to=SlotId("t0/4")) for rank, slot in lost)
    return RecoveryRecord(
        generation=generation,
        kind="swap",
        because="",
        fault_ms=ms,
        lost=ranks,
        redone=(7,),
        rungs=("swap",),
        decided_ms=ms + 19,
        **times | more,
    )


def job(seen: Sequence[Happened], recoveries: Sequence[RecoveryRecord] = ()) -> JournalTimeline:
    return JournalTimeline(Path("nowhere"), end_s=100.0, seen=list(seen), recoveries=list(recoveries))


def only(history: Sequence[Entry], of: JournalTimeline | None) -> Chain:
    (chain,) = chains_of(history, of)
    return chain


def test_a_kill_is_followed_from_its_signal_to_the_first_good_step() -> None:
    chain = only(
        [Committed(at_s=0.5, id="h0", step=6), strike(0, 1.0, RANK_2), took(0, 1.3, struck_s=1.2)],
        job([exited(40, 1.205, *RANK_2)], [recovery(2, 1.205, (2, "t0/2"))]),
    )
    assert (chain.step, chain.at_s, chain.took) == (6, 1.2, True)
    assert (chain.noticed_s, chain.decided_s, chain.planned_s) == (1.205, 1.224, 1.225)
    assert (chain.resumed_s, chain.recovered_s, chain.first_step) == (1.305, 1.505, 7)
    assert not chain.inferred


def test_its_stages_are_consecutive_and_tell_regroup_from_restore_where_the_ranks_say() -> None:
    of = job([exited(40, 1.205, *RANK_2)], [recovery(2, 1.205, (2, "t0/2"))])
    of.restores = {2: [Restored(0, 2, 1.24, 1.25), Restored(2, 2, 1.245, 1.29)]}
    chain = only([strike(0, 1.0, RANK_2), took(0, 1.3, struck_s=1.2)], of)
    stages = stages_of(chain, of)
    assert [stage.name for stage in stages] == ["detect", "break", "decide", "regroup", "restore", "resume", "rework"]
    assert [stage.to_s for stage in stages] == [1.205, 1.215, 1.225, 1.24, 1.29, 1.305, 1.505]
    assert [stage.from_s for stage in stages] == [1.2, *(stage.to_s for stage in stages[:-1])]


def test_a_spare_that_is_lost_is_noticed_and_needs_no_recovery() -> None:
    chain = only(
        [strike(0, 1.0, ("t0/4", 5), whom="spare t0/4"), took(0, 1.1)],
        job([exited(40, 1.01, "t0/4", 5)], [recovery(2, 8.0, (2, "t0/2"))]),
    )
    assert (chain.noticed_s, chain.recovery, chain.recovered_s) == (1.01, None, None)


def test_a_recovery_that_is_overtaken_goes_on_in_the_next_one() -> None:
    first = recovery(2, 1.0, (2, "t0/2"), resumed_ms=None, committed_ms=None, overtaken=True)
    second = recovery(3, 1.05, (1, "t0/1"))
    of = job([exited(40, 1.0, *RANK_2), exited(41, 1.05, "t0/1", 2)], [first, second])
    both = chains_of([strike(0, 0.9, ("t0/1", 2), whom="rank 1", fault="crash_at"), strike(1, 0.99, RANK_2)], of)
    assert [chain.recovery and chain.recovery.generation for chain in both] == [3, 3]
    assert [len(chain.overtaken) for chain in both] == [0, 1]
    assert {chain.recovered_s for chain in both} == {1.35}


def test_who_was_struck_twice_is_lost_by_the_second_strike() -> None:
    of = job([exited(40, 5.0, *RANK_2)], [recovery(2, 5.0, (2, "t0/2"))])
    slow, kill = chains_of([strike(0, 1.0, RANK_2, fault="slow"), strike(1, 4.99, RANK_2)], of)
    assert slow.seen is None
    assert kill.noticed_s == 5.0


def test_another_process_in_the_same_slot_is_not_the_one_that_was_struck() -> None:
    of = job([exited(40, 50.0, "t0/2", 9)])
    assert only([strike(0, 1.0, RANK_2), TakenBack(at_s=2.0, id="h2", strike=0)], of).seen is None


def test_a_process_that_ends_well_was_not_struck_down() -> None:
    of = job([exited(40, 2.0, *RANK_2, exit_code=0)])
    assert only([strike(0, 1.0, RANK_2, fault="slow"), took(0, 1.1)], of).seen is None


def test_a_lost_tray_is_noticed_by_its_name_only_if_a_tray_was_struck() -> None:
    lost = event(40, 1.2, "TrayLost", tray="t0", because="its agent was killed")
    tray = only([strike(0, 1.0, RANK_2, ("t0/3", 4), whom="tray t0")], job([lost]))
    rank = only([strike(0, 1.0, RANK_2)], job([lost]))
    assert (tray.inferred, rank.inferred) == (False, True)


def test_what_names_nobody_who_was_struck_is_inferred_from_its_time_and_said_so() -> None:
    severed = event(40, 1.4, "WorkerSevered", slot="t1/0", incarnation=8, because="connection reset")
    of = job([severed], [recovery(2, 1.4)])
    chain = only([strike(0, 1.0, RANK_2, fault="partition"), TakenBack(at_s=3.0, id="h2", strike=0)], of)
    assert chain.inferred
    assert chain.recovery is not None
    (noticed,) = (entry for entry in entries_of([chain], of) if isinstance(entry, Noticed))
    assert (noticed.inferred, noticed.cause) == (True, "h0")


def test_nothing_is_inferred_from_what_comes_long_after_or_after_another_strike() -> None:
    late = event(40, 60.0, "WorkerSevered", slot="t1/0", incarnation=8, because="")
    assert only([strike(0, 1.0, RANK_2, fault="partition")], job([late])).seen is None
    between = event(40, 4.0, "WorkerSevered", slot="t1/0", incarnation=8, because="")
    first, second = chains_of([strike(0, 1.0, RANK_2), strike(1, 3.0, RANK_2)], job([between]))
    assert first.seen is None
    assert second.seen is between


def test_a_strike_that_took_no_effect_explains_nothing() -> None:
    of = job([exited(40, 1.01, *RANK_2)], [recovery(2, 1.01, (2, "t0/2"))])
    assert only([strike(0, 1.0, RANK_2), took(0, 1.1, False)], of).seen is None


def test_a_job_without_a_journal_has_made_nothing_of_it() -> None:
    chain = only([strike(0, 1.0, RANK_2), took(0, 1.1), TakenBack(at_s=2.0, id="h2", strike=0)], None)
    assert (chain.took, chain.back_s, chain.seen) == (True, 2.0, None)
