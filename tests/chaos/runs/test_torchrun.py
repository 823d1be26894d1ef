"""A job that rackrun did not start is struck in the same way, and what it told of its steps is compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.crash_at_point import CrashAt
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import One, Target
from rackrun.chaos.inprocess.step_probe import FOLDER, FinishedStep, read_finished_steps, report_step
from rackrun.chaos.plan.definition import AtPoint, AtStep, Inject, Now, Plan, Trigger
from rackrun.chaos.runs.torchrun import compare, run_outside
from rackrun.errors import UsageError

EITHER = Path(__file__).resolve().parents[3] / "examples" / "chaos" / "either.py"


def told(steps: Sequence[int], *, began_s: float = 0.0, loss: float = 1.0, ranks: int = 2) -> list[FinishedStep]:
    """One second a step; each rank has a sample of its own in each."""
    return [
        FinishedStep(
            rank=rank,
            step=step,
            loss=(loss + step).hex(),
            samples=(ranks * step + rank,),
            at_s=began_s + number + 0.1 * rank,
            pid=rank,
        )
        for number, step in enumerate(steps)
        for rank in range(ranks)
    ]


def test_steps_that_are_computed_again_are_counted_and_the_next_good_one_is_a_new_one() -> None:
    without = told(range(6))
    found = compare(without, told(range(4)) + told(range(2, 6), began_s=10.0), [3.5])
    assert (found.steps, found.steps_again, found.same_losses, found.samples_twice) == (6, 2, True, 0)
    assert found.good_step_s == pytest.approx((8.6,))


def test_a_job_that_goes_on_from_other_weights_has_other_losses() -> None:
    assert not compare(told(range(6)), told(range(3)) + told(range(3, 6), loss=1.5), []).same_losses


def test_a_job_that_never_goes_on_has_no_next_good_step() -> None:
    found = compare(told(range(6)), told(range(3)), [2.5])
    assert found.good_step_s == (None,)
    assert (found.steps, found.steps_without) == (3, 6)


def test_what_a_lost_rank_could_not_tell_is_no_difference() -> None:
    some = [one for one in told(range(6)) if (one.rank, one.step) != (1, 3)]
    assert compare(told(range(6)), some, []).same_losses


def test_a_script_that_begins_its_data_again_uses_samples_twice() -> None:
    first, later = told(range(3)), told(range(3, 6), began_s=5.0)
    again = [
        FinishedStep(rank=one.rank, step=one.step, loss=one.loss, samples=(one.samples[0] % 6,), at_s=one.at_s, pid=0)
        for one in later
    ]
    assert compare(told(range(6)), first + again, [2.5]).samples_twice == 6


def test_a_rank_tells_whole_lines_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_step(rank=0, step=0, loss=1.0)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    report_step(rank=1, step=3, loss=0.1, samples=[7, 8])
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'{"rank": 1, "st')
    assert [(one.rank, one.step, float.fromhex(one.loss), one.samples) for one in read_finished_steps(tmp_path)] == [
        (1, 3, 0.1, (7, 8))
    ]


def test_how_a_job_of_torchrun_stops_is_judged_by_nobody(tmp_path: Path) -> None:
    plan = Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK), when=Now()), expect="stops")
    with pytest.raises(UsageError, match="cannot be judged under torchrun"):
        run_outside(plan, ["train.py"], out=tmp_path / "out")


@pytest.mark.parametrize(
    ("fault", "target", "when"),
    [
        (CrashAt(point="gate.before"), One(Subjects.RANK), Now()),
        (Kill(), One(Subjects.SPARE), Now()),
        (Kill(), One(Subjects.RANK), AtPoint(point="gate.before")),
    ],
)
def test_what_needs_rackrun_is_refused(fault: Fault, target: Target, when: Trigger, tmp_path: Path) -> None:
    plan = Plan(plan=Inject(fault=fault, target=target, when=when))
    with pytest.raises(UsageError, match="rackrun"):
        run_outside(plan, ["train.py"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.stories
@pytest.mark.timeout(600)
def test_torchrun_goes_on_from_the_checkpoint_of_the_script(tmp_path: Path) -> None:
    plan = Plan(plan=Inject(fault=Kill(), target=One(Subjects.RANK), when=AtStep(step=13)), seed=1)
    command = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(EITHER), "40", "{out}", "10"]
    found = run_outside(plan, command, out=tmp_path / "out")
    print(found)
    assert found.holds is True
    assert found.steps == found.steps_without == 40
    assert found.steps_again >= 4
    assert found.good_step_s[0] is not None
