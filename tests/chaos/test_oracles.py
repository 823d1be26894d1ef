"""Each oracle says *false* of the one thing that it looks at, and *unknown* where it cannot know."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from rackrun.chaos.conductor import Record, Strike
from rackrun.chaos.evidence import Evidence, Trace
from rackrun.chaos.faults import Kill, Subjects
from rackrun.chaos.job import Ended
from rackrun.chaos.oracles import judge, overall
from rackrun.chaos.plan import Inject, Plan
from rackrun.chaos.targets import One, Subject
from rackrun.launch.place import Result

PLAN = Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK)))
STOPS = Plan(plan=PLAN.plan, expect="stops")
STRIKE = Strike(0, Kill(), (Subject(Subjects.RANK, "1"),))


def result(code: int, because: str = "", remedy: str = "") -> Result:
    return Result(run_id="run", exit_code=code, because=because, remedy=remedy, steps=2, recoveries=(), seconds=1.0)


def trace(**changes: Any) -> Trace:
    gates = {(step, 0): struct.pack("<3d", 1.0 / (step + 3), 4.0, 77.0 + step) for step in range(2)}
    samples = {step: {0: (4 * step, 4 * step + 1), 1: (4 * step + 2, 4 * step + 3)} for step in range(2)}
    return replace(Trace(gates, samples, held={"0": "a", "1": "b"}, result=result(0)), **changes)


def evidence(plan: Plan = PLAN, **changes: Any) -> Evidence:
    fine = Evidence(plan, trace(), trace(), Ended(0, 5.0, ()), 60.0, (Record(STRIKE, 3, 0.0, 4.0, took=True),), (), "")
    return replace(fine, **changes)


def said(of: Evidence) -> dict[str, bool | None]:
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
    assert not said(evidence(STOPS, trace=stopped, ended=Ended(3, 5.0, ())))


def test_a_step_that_came_out_otherwise_the_second_time_is_seen() -> None:
    assert said(evidence(trace=trace(contradictions=["step 1"]))) == {"losses": False}


@pytest.mark.parametrize("ids", [(4, 4), (4, 99)])
def test_a_sample_twice_or_of_another_step_is_seen(ids: tuple[int, ...]) -> None:
    samples = trace().samples | {1: {0: ids, 1: (6, 7)}}
    assert said(evidence(trace=trace(samples=samples))) == {"samples": False}


def test_another_number_of_samples_is_seen_in_the_gate() -> None:
    gates = trace().gates | {(1, 0): struct.pack("<3d", 0.25, 3.0, 78.0)}
    assert said(evidence(trace=trace(gates=gates))) == {"samples": False}


def test_what_a_lost_agent_could_not_tell_is_in_the_gate() -> None:
    assert not said(evidence(trace=trace(samples={0: trace().samples[0], 1: {0: (4, 5)}})))


def test_without_sample_ids_nobody_knows() -> None:
    assert said(evidence(trace=trace(samples={}))) == {"samples": None}


def test_other_weights_are_seen_and_missing_ones_are_unknown() -> None:
    assert said(evidence(trace=trace(held={"0": "a", "1": "c"}))) == {"weights": False}
    assert said(evidence(trace=trace(held={"0": "a"}))) == {"weights": None}


def test_another_ending_is_seen() -> None:
    failed = trace(result=result(3, "no copy is left", "add spares"))
    assert said(evidence(trace=failed, ended=Ended(3, 5.0, ()))) == {"ending": False}
    assert said(evidence(STOPS)) == {"ending": False}


def test_who_stops_says_why_and_what_to_do() -> None:
    for told in (None, result(3), result(3, "no copy is left")):
        assert said(evidence(STOPS, trace=trace(result=told), ended=Ended(3, 5.0, ()))) == {"ending": False}


def test_a_killed_coordinator_says_nothing_more() -> None:
    killed = evidence(STOPS, trace=trace(result=None), ended=Ended(-9, 5.0, ()))
    assert said(killed) == {"ending": False}
    assert not said(replace(killed, killed_coordinator=True))


def test_a_hang_is_seen() -> None:
    hung = said(evidence(ended=Ended(None, 60.0, ())))
    assert hung == {"ending": False, "time": False, "leftovers": None}


def test_a_process_that_outlives_the_job_is_seen() -> None:
    assert said(evidence(ended=Ended(0, 5.0, ("process 7: sleep",)))) == {"leftovers": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"records": (Record(STRIKE, 3, 0.0, 4.0, took=False, detail="gone already"),)},
        {"records": (Record(STRIKE, 3, 0.0, 4.0),)},
        {"nobody": ("after step 3: there is no rank 7 now",)},
        {"undone": "the job ended before the plan was carried out"},
    ],
)
def test_a_strike_that_was_not_done_makes_the_run_unknown(changes: dict[str, Any]) -> None:
    found = evidence(**changes)
    assert said(found) == {"strikes": None}
    assert overall(judge(found)) is None


def test_wrong_outweighs_unknown() -> None:
    found = evidence(trace=trace(held={"0": "x", "1": "b"}), undone="the job ended")
    assert overall(judge(found)) is False
