"""Each oracle says *false* of the one thing that it looks at, and *unknown* where it cannot know."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rackrun.chaos.evidence.journal_replay import Replayed
from rackrun.chaos.evidence.run_evidence import RunEvidence, Trace
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.hangs.slow_down import Slow
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.targets import One, Subject
from rackrun.chaos.inprocess.state_recorder import EndState
from rackrun.chaos.oracles import judge, overall
from rackrun.chaos.plan.conductor import StrikeOrder, StrikeRecord
from rackrun.chaos.plan.definition import Every, Inject, Plan
from rackrun.chaos.testbed.job_under_test import JobResult
from rackrun.coordinator.observe.recoveries import LostRank, RecoveryRecord
from rackrun.coordinator.report.goodput import Goodput
from rackrun.launch.run.run_directory import Result
from rackrun.protocol.commands import GenerationPlan, Member
from rackrun.protocol.ids import BEGIN, Generation, Incarnation, Position, Rank, SlotId, Step

PLAN = Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK)))
STOPS = Plan(plan=PLAN.plan, expect="stops")
STRIKE = StrikeOrder(0, Kill(), (Subject(Subjects.RANK, "1"),))
GOODPUT = Goodput(
    wall_s=4.0,
    productive_s=2.0,
    startup_s=1.0,
    recovery_s=0.5,
    redone_s=0.25,
    other_s=0.25,
    ettr=0.5,
    ettr_since_first_step=0.67,
)


def result(code: int, because: str = "", remedy: str = "") -> Result:
    return Result(run_id="run", exit_code=code, because=because, remedy=remedy, steps=2, recoveries=(), seconds=1.0)


def trace(**changes: Any) -> Trace:
    gates = {(step, 0): struct.pack("<3d", 1.0 / (step + 3), 4.0, 77.0 + step) for step in range(2)}
    samples: dict[int, dict[int, tuple[int, ...]]] = {
        step: {0: (4 * step, 4 * step + 1), 1: (4 * step + 2, 4 * step + 3)} for step in range(2)
    }
    fine = Trace(gates, samples, held={"0": "a", "1": "b"}, plans=[world(1, -1)], result=result(0))
    fine.ends = {rank: end(rank) for rank in range(2)}
    fine.began_monotonic_s = 50.5
    fine.began_wall_s, fine.goodput, fine.replayed = 1000.5, GOODPUT, Replayed(events=9, commands=7)
    return replace(fine, **changes)


def end(rank: int, since: int = 0, **changes: Any) -> EndState:
    """An average, which all ranks have alike, and a counter, which is a rank's own."""
    return EndState(rank=rank, world=2, since=since, reached={"ema.mean": "0.5", "count": f"{rank}", **changes})


def world(
    generation: int, committed: int, rollback: int | None = None, members: tuple[Member, ...] = ()
) -> GenerationPlan:
    at = Position(committed) if committed >= 0 else BEGIN
    back = None if rollback is None else Step(rollback)
    return GenerationPlan(
        generation=Generation(generation),
        world_size=2,
        members=members,
        store="",
        layout=Generation(0),
        full=2,
        committed=at,
        rollback=back,
    )


def recovery(slot: str = "tray-00/1", **changes: Any) -> RecoveryRecord:
    """Of a rank that was killed 4 s after the start, which is 3.5 s after the coordinator's."""
    lost = LostRank(rank=Rank(1), slot=SlotId(slot), how="SIGKILL")
    times = {"fault_ms": 3510.0, "break_ms": 3511.0, "plan_ms": 3520.0, "resumed_ms": 3600.0, "committed_ms": 3700.0}
    told: dict[str, Any] = {"generation": 2, "kind": "swap", "because": "", "rungs": ("swap",), "lost": (lost,)}
    return RecoveryRecord(**{**told, **times, **changes})


def evidence(plan: Plan = PLAN, **changes: Any) -> RunEvidence:
    records = (StrikeRecord(STRIKE, 3, 0.0, 4.0, took=True),)
    fine = RunEvidence(
        plan,
        trace(),
        trace(),
        JobResult(0, 5.0, ()),
        60.0,
        records,
        (),
        "",
        began_wall_s=1000.0,
        began_monotonic_s=50.0,
    )
    return replace(fine, places={0: ("tray-00/1",)}, **changes)


def said(of: RunEvidence) -> dict[str, bool | None]:
    return {verdict.oracle: verdict.holds for verdict in judge(of) if verdict.holds is not True}


def test_a_run_like_the_one_without_faults_is_right() -> None:
    assert not said(evidence())
    assert overall(judge(evidence())) is True


def test_one_bit_of_a_loss_is_seen() -> None:
    loss = math.nextafter(1.0 / 4, 1.0)
    gates = trace().gates | {(1, 0): struct.pack("<3d", loss, 4.0, 78.0)}
    assert said(evidence(trace=trace(gates=gates))) == {"losses": False}


def test_a_step_that_was_never_committed_is_seen_unless_it_was_to_stop() -> None:
    first = {(0, 0): trace().gates[0, 0]}
    assert said(evidence(trace=trace(gates=first))) == {"losses": False}
    stopped = trace(gates=first, held={}, result=result(3, "no copy is left", "add spares"))
    assert not said(evidence(STOPS, trace=stopped, ended=JobResult(3, 5.0, ())))


def test_a_step_that_came_out_otherwise_the_second_time_is_seen() -> None:
    assert said(evidence(trace=trace(contradictions=["step 1"]))) == {"losses": False}


@pytest.mark.parametrize("ids", [(4, 4), (4, 99)])
def test_a_sample_twice_or_of_another_step_is_seen(ids: tuple[int, ...]) -> None:
    samples = trace().samples | {1: {0: ids, 1: (6, 7)}}
    assert said(evidence(trace=trace(samples=samples))) == {"samples": False}


def test_ranks_of_a_tensor_parallel_group_have_the_same_samples() -> None:
    """Two pairs. A pair that has those of the other is still seen."""
    pairs = {
        step: {rank: (4 * step + rank // 2 * 2, 4 * step + rank // 2 * 2 + 1) for rank in range(4)} for step in range(2)
    }
    axes, plans = (("dp", 2), ("tp", 2)), [msgspec.structs.replace(world(1, -1), world_size=4)]
    assert not said(evidence(trace=trace(samples=pairs, axes=axes, plans=plans)))
    overlap = {**pairs, 1: {**pairs[1], 2: (5, 6), 3: (5, 6)}}
    assert said(evidence(trace=trace(samples=overlap, axes=axes, plans=plans))) == {"samples": False}
    apart = {**pairs, 1: {**pairs[1], 3: (5, 6)}}
    assert said(evidence(trace=trace(samples=apart, axes=axes, plans=plans))) == {"samples": False}
    assert said(evidence(trace=trace(samples=pairs, plans=plans))) == {"samples": False}, "without a mesh nobody shares"


def test_another_number_of_samples_is_seen_in_the_gate() -> None:
    gates = trace().gates | {(1, 0): struct.pack("<3d", 0.25, 3.0, 78.0)}
    assert said(evidence(trace=trace(gates=gates))) == {"samples": False}


def test_what_a_lost_agent_could_not_tell_is_in_the_gate() -> None:
    assert not said(evidence(trace=trace(samples={0: trace().samples[0], 1: {0: (4, 5)}})))


def test_without_sample_ids_nobody_knows() -> None:
    assert said(evidence(trace=trace(samples={}))) == {"samples": None}


def test_a_script_that_reads_its_data_by_itself_is_told_so() -> None:
    alone = trace(gates={(step, 0): struct.pack("<3d", 1.0, 0.0, 0.0) for step in range(2)}, samples={})
    found = evidence(trace=alone, reference=alone)
    assert said(found) == {"samples": None}
    assert "run.loader" in next(verdict.because for verdict in judge(found) if verdict.oracle == "samples")


def test_other_weights_are_seen_and_missing_ones_are_unknown() -> None:
    assert said(evidence(trace=trace(held={"0": "a", "1": "c"}))) == {"weights": False}
    assert said(evidence(trace=trace(held={"0": "a"}))) == {"weights": None}


def test_where_all_hold_the_same_a_smaller_world_can_be_told_from_any_other() -> None:
    both = trace(held={"0": "a", "1": "a"})
    assert not said(evidence(reference=both, trace=trace(held={"0": "a"})))
    assert not said(evidence(reference=both, trace=trace(held={"0": "a", "1": "a", "2": "a"})))
    assert said(evidence(reference=both, trace=trace(held={"0": "b"}))) == {"weights": False}
    assert said(evidence(reference=both, trace=trace(held={}))) == {"weights": None}


def because(of: RunEvidence, oracle: str) -> str:
    return next(verdict.because for verdict in judge(of) if verdict.oracle == oracle)


def test_what_a_newcomer_did_not_get_is_named_whatever_the_losses_are() -> None:
    found = evidence(trace=trace(ends={0: end(0), 1: end(1, since=4, **{"ema.mean": "0.1"})}))
    assert said(found) == {"untracked": False}
    told = because(found, "untracked")
    assert "ema.mean on rank 1, another process since step 4, is 0.1, and 0.5 without faults" in told
    allowed = replace(found, may_differ=("ema",))
    assert not said(allowed)
    assert not said(replace(found, may_differ=("*mean",)))
    assert said(replace(found, may_differ=("em",))) == {"untracked": False}


def test_what_two_runs_without_faults_do_not_have_alike_is_nobodys_mistake() -> None:
    found = evidence(trace=trace(ends={0: end(0, clock="1"), 1: end(1, clock="2")}))
    reference = trace(ends={0: end(0, clock="7"), 1: end(1, clock="7")})
    again = trace(ends={0: end(0, clock="8"), 1: end(1, clock="9")})
    assert said(replace(found, reference=reference)) == {"untracked": False}
    assert not said(replace(found, reference=reference, again=again))


def test_a_variable_that_is_not_bound_differs_from_nothing_and_a_missing_key_does() -> None:
    reference = trace(
        ends={rank: end(rank, 0, **{"best": "3", "seen['a']": "1", "seen['b']": "2"}) for rank in range(2)}
    )
    late = {0: reference.ends[0], 1: end(1, since=4, **{"seen['a']": "1"})}
    found = evidence(reference=reference, trace=trace(ends=late))
    assert "seen['b'] on rank 1, another process since step 4, is not there, and 2" in because(found, "untracked")
    assert "best" not in because(found, "untracked")


def test_in_a_world_that_was_resized_a_newcomer_is_compared_with_who_stayed() -> None:
    resized = [world(1, -1), msgspec.structs.replace(world(2, 0), world_size=1), world(3, 1)]
    stayed = end(0, 0, **{"count": "9", "ema.mean": "0.7"})
    grown = trace(plans=resized, ends={0: stayed, 1: end(1, since=4, **{"ema.mean": "0.7"})})
    assert not said(evidence(trace=grown))
    lost = trace(plans=resized, ends={0: stayed, 1: end(1, since=4)})
    assert said(evidence(trace=lost)) == {"untracked": False}
    assert "is 0.5, and 0.7 on rank 0" in because(evidence(trace=lost), "untracked")


# -- what comes too late, and worlds of another size
def test_a_kill_after_the_last_commit_proves_nothing() -> None:
    """`evidence` strikes 4 s after the start, which is 3.5 s on the coordinator's clock."""
    died: dict[str, Any] = {
        "ended": JobResult(3, 5.0, ()),
        "trace": trace(last_commit_ms=3400.0, result=result(3, "did not exit well")),
    }
    assert said(evidence(**died)) == {"ending": None, "strikes": None}
    assert "came after the last commit" in because(evidence(**died), "ending")
    assert said(evidence(trace=trace(last_commit_ms=3400.0))) == {"strikes": None}
    before = trace(last_commit_ms=3600.0, result=result(3, "no copy is left"))
    assert said(evidence(ended=JobResult(3, 5.0, ()), trace=before)) == {"ending": False}
    first = {(0, 0): trace().gates[0, 0]}
    assert said(evidence(trace=trace(gates=first, last_commit_ms=100.0))) == {"losses": False}, (
        "it had not been the last"
    )


def test_what_an_endless_plan_does_after_the_end_is_not_missed() -> None:
    endless = Plan(plan=Every(mean_s=1.0, part=PLAN.plan))
    assert not said(evidence(endless, trace=trace(last_commit_ms=3400.0)))


def shrunk(**changes: Any) -> Trace:
    """From step 1 on there is one rank less."""
    return trace(plans=[world(1, -1), msgspec.structs.replace(world(2, 0), world_size=1)], exact=False, **changes)


def losses(of: float) -> dict[tuple[int, int], bytes]:
    return trace().gates | {(1, 0): struct.pack("<3d", of, 4.0, 78.0)}


def test_sums_that_another_number_of_ranks_rounds_otherwise_are_nobodys_mistake() -> None:
    rounded = shrunk(gates=losses(0.25000001), held={"0": "x", "1": "y"})
    assert said(evidence(trace=rounded)) == {"losses": None, "weights": None}
    assert "from step 1 on it has 1 ranks instead of 2" in because(evidence(trace=rounded), "losses")
    assert said(evidence(trace=replace(rounded, exact=True))) == {"losses": False, "weights": False}
    assert said(evidence(trace=shrunk(gates=losses(0.26)))) == {"losses": False}, "that is more than rounding"
    early = trace().gates | {(0, 0): struct.pack("<3d", 0.33333334, 4.0, 77.0)}
    assert said(evidence(trace=shrunk(gates=early))) == {"losses": False}, "there were as many ranks still"


def test_replicas_are_alike_whatever_their_number() -> None:
    alike = trace(held={"0": "a", "1": "a"})
    assert said(evidence(reference=alike, trace=shrunk(held={"0": "x", "1": "x"}))) == {"weights": None}
    assert said(evidence(reference=alike, trace=shrunk(held={"0": "x", "1": "y"}))) == {"weights": False}


def test_the_world_of_a_step_is_that_of_the_last_plan_which_reaches_it() -> None:
    shrink, grow = msgspec.structs.replace(world(2, 5), world_size=1), world(3, 8)
    assert trace(plans=[world(1, -1), shrink, grow]).sizes == [(0, 2), (6, 1), (9, 2)]
    assert trace(plans=[world(1, -1), shrink, world(4, 8, rollback=3)]).sizes == [(0, 2)]


# -- how far back, and what is on disk
def went_back(committed: int, to: int, **changes: Any) -> Trace:
    back = msgspec.structs.replace(world(2, committed, rollback=to), anew=changes.pop("anew", False))
    gates = {(step, 0): struct.pack("<3d", 1.0, 4.0, 7.0) for step in range(committed + 2)}
    return trace(gates=gates, plans=[world(1, -1), back], samples={}, **changes)


def rollback_of(of: Trace, plan: Plan = PLAN) -> bool | None:
    return next(one.holds for one in judge(evidence(plan, trace=of)) if one.oracle == "rollback")


def test_a_rollback_past_the_snapshots_that_there_must_be_is_seen() -> None:
    assert rollback_of(went_back(12, 10, snapshot_gap=2)) is True
    assert rollback_of(went_back(12, 2, snapshot_gap=2)) is False
    told = because(evidence(trace=went_back(12, 2, snapshot_gap=2)), "rollback")
    assert "goes back 10 steps, from step 12 to 2; 7 are right (a snapshot every 2 steps)" in told
    assert rollback_of(went_back(12, 2)) is True, "nobody has said how far"
    assert rollback_of(went_back(12, 2), msgspec.structs.replace(PLAN, rollback_max=9)) is False
    assert rollback_of(went_back(12, 2, snapshot_gap=2), msgspec.structs.replace(PLAN, rollback_max=10)) is True
    assert rollback_of(went_back(12, 2, snapshot_gap=2, anew=True)) is True, "what came after was wrong"
    assert rollback_of(went_back(12, 2, snapshot_gap=2, damaged=(2,))) is True, "the newer one was damaged"


def test_an_order_that_is_not_on_disk_is_seen() -> None:
    lost = evidence(trace=trace(unpersisted=("break of generation 3",)))
    assert said(lost) == {"committed": False}


def test_nobody_knows_what_nobody_has_looked_at() -> None:
    assert said(evidence(reference=trace(ends={}))) == {"untracked": None}
    assert said(evidence(trace=trace(ends={}))) == {"untracked": None}
    assert not said(evidence(STOPS, trace=trace(ends={}, result=result(3, "lost", "add")), ended=JobResult(3, 5.0, ())))


def test_another_ending_is_seen() -> None:
    failed = trace(result=result(3, "no copy is left", "add spares"))
    assert said(evidence(trace=failed, ended=JobResult(3, 5.0, ()))) == {"ending": False}
    assert said(evidence(STOPS)) == {"ending": False}


def test_a_job_that_was_not_struck_need_not_stop() -> None:
    missed = (StrikeRecord(STRIKE, 3, 0.0, 4.0, took=False, detail="gone already"),)
    assert said(evidence(STOPS, records=missed)) == {"ending": None, "strikes": None}


def test_who_stops_says_why_and_what_to_do() -> None:
    for told in (None, result(3), result(3, "no copy is left")):
        assert said(evidence(STOPS, trace=trace(result=told), ended=JobResult(3, 5.0, ()))) == {"ending": False}


def test_a_killed_coordinator_says_nothing_more() -> None:
    killed = evidence(STOPS, trace=trace(result=None), ended=JobResult(-9, 5.0, ()))
    assert said(killed) == {"ending": False}
    assert not said(replace(killed, killed_coordinator=True))


def test_a_hang_is_seen() -> None:
    hung = said(evidence(ended=JobResult(None, 60.0, ())))
    assert hung == {"ending": False, "time": False, "leftovers": None}


def test_a_process_that_outlives_the_job_is_seen() -> None:
    assert said(evidence(ended=JobResult(0, 5.0, ("process 7: sleep",)))) == {"leftovers": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"records": (StrikeRecord(STRIKE, 3, 0.0, 4.0, took=False, detail="gone already"),)},
        {"records": (StrikeRecord(STRIKE, 3, 0.0, 4.0),)},
        {"nobody": ("after step 3: there is no rank 7 now",)},
        {"undone": "the job ended before the plan was carried out"},
    ],
)
def test_a_strike_that_was_not_done_makes_the_run_unknown(changes: dict[str, Any]) -> None:
    found = evidence(**changes)
    assert said(found) == {"strikes": None}
    assert overall(judge(found)) is None


# -- what is committed
@pytest.mark.parametrize(
    "plans",
    [
        [world(1, -1), world(3, 5), world(4, 4)],
        [world(1, -1), world(3, 5), world(3, 6)],
        [world(1, -1), world(3, 5, rollback=6)],
    ],
)
def test_a_plan_that_takes_back_what_was_committed_is_seen(plans: list[GenerationPlan]) -> None:
    assert said(evidence(trace=trace(plans=plans))) == {"committed": False}


def test_who_goes_back_says_so() -> None:
    plans = [world(1, -1), world(3, 5), world(4, 5, rollback=3), world(5, 3), world(6, -1), world(7, 0)]
    assert not said(evidence(trace=trace(plans=plans)))


def test_a_step_that_was_passed_over_is_seen() -> None:
    gates = {(step, 0): struct.pack("<3d", 1.0, 4.0, 7.0) for step in (0, 1, 3)}
    both = trace(gates=gates)
    assert said(evidence(trace=both, reference=both)) == {"committed": False}


# -- how soon
@pytest.mark.parametrize(
    "late",
    [
        {"fault_ms": 14_600.0, "break_ms": 14_600.0, "plan_ms": 14_700.0, "committed_ms": 14_800.0},
        {"plan_ms": 24_000.0, "committed_ms": 24_100.0},
        {"committed_ms": 64_000.0},
    ],
)
def test_a_recovery_that_waits_for_a_timeout_is_seen_unless_the_machine_stood_still(late: dict[str, Any]) -> None:
    slow = evidence(trace=trace(recoveries=[recovery(**late)]))
    assert said(slow) == {"recovery_times": False}
    assert said(replace(slow, late_s=1.0)) == {"recovery_times": None}
    for rung in ("wait", "hold"):
        waited = recovery(**late, rungs=(rung, "swap"), overtaken=True)
        assert said(evidence(trace=trace(recoveries=[waited]))).get("recovery_times") is (
            False if "fault_ms" in late else None
        )


def test_time_that_is_counted_twice_is_seen() -> None:
    twice = msgspec.structs.replace(GOODPUT, recovery_s=1.0)
    assert said(evidence(trace=trace(goodput=twice))) == {"accounts": False}
    longer = msgspec.structs.replace(GOODPUT, wall_s=6.0, other_s=2.25)
    assert said(evidence(trace=trace(goodput=longer))) == {"accounts": False}
    assert said(evidence(trace=trace(goodput=None))) == {"accounts": None}


# -- who was given up
def test_a_rank_that_nothing_struck_is_not_given_up() -> None:
    assert not said(evidence(trace=trace(recoveries=[recovery()])))
    other = evidence(trace=trace(recoveries=[recovery("tray-00/0")]))
    assert said(other) == {"restraint": False}
    assert said(replace(other, late_s=1.0)) == {"restraint": None}


@pytest.mark.parametrize(("back_to", "holds"), [(2, True), (3, False), (None, False)])
def test_who_took_over_after_the_step_that_all_go_back_to_may_give_itself_up(back_to: int | None, holds: bool) -> None:
    def member(slot: str) -> Member:
        return Member(rank=Rank(0), slot=SlotId(slot), incarnation=Incarnation(1))

    plans = [
        world(1, -1, members=(member("tray-00/0"),)),
        world(2, 3, members=(member("tray-04/0"),)),
        world(3, 4, back_to, members=(member("tray-04/0"),)),
    ]
    found = evidence(trace=trace(recoveries=[recovery("tray-04/0")], plans=plans))
    assert said(found).get("restraint") is (None if holds else False)
    first = evidence(
        trace=trace(recoveries=[recovery("tray-00/0")], plans=[plans[0], world(2, 3, back_to, plans[0].members)])
    )
    assert said(first).get("restraint") is False, "it has run all steps"


@pytest.mark.parametrize(("lasted_s", "holds"), [(0.5, False), (3.0, True)])
def test_a_pause_shorter_than_a_lease_is_no_reason_to_give_anybody_up(lasted_s: float, holds: bool) -> None:
    strike = StrikeOrder(0, Pause(for_s=lasted_s), (Subject(Subjects.RANK, "1"),))
    paused = (StrikeRecord(strike, 3, 0.0, 4.0, took=True, back_s=4.0 + lasted_s),)
    found = evidence(trace=trace(recoveries=[recovery()]), records=paused)
    assert said(found) == ({} if holds else {"restraint": False})


def test_slowness_is_no_reason_to_give_anybody_up() -> None:
    slow = StrikeOrder(0, Slow(), (Subject(Subjects.RANK, "1"),))
    found = evidence(trace=trace(recoveries=[recovery()]), records=(StrikeRecord(slow, 3, 0.0, 4.0, took=True),))
    assert said(found) == {"restraint": False}


# -- what was decided
def test_another_command_than_the_core_gives_is_seen() -> None:
    assert said(evidence(trace=trace(replayed=Replayed(difference="after WorkerExited: nothing")))) == {
        "replayed": False
    }
    assert said(evidence(trace=trace(replayed=Replayed(unknown="7 rows are lost")))) == {"replayed": None}


def test_a_core_that_contradicts_itself_stops_for_no_honest_reason() -> None:
    broken = trace(result=result(3, "rackrun contradicts itself on WorkerExited", "please report this"))
    assert said(evidence(STOPS, trace=broken, ended=JobResult(3, 5.0, ()))) == {"ending": False}


def test_a_run_in_which_nothing_was_struck_proves_nothing() -> None:
    assert said(evidence(records=())) == {"strikes": None}
    stopped = trace(result=result(3, "no copy is left", "add spares"))
    assert said(evidence(STOPS, trace=stopped, ended=JobResult(3, 5.0, ()), records=())) == {"strikes": None}


def test_wrong_outweighs_unknown() -> None:
    found = evidence(trace=trace(held={"0": "x", "1": "b"}), undone="the job ended")
    assert overall(judge(found)) is False
