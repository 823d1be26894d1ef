"""The smallest plan that fails still: of runs that are pretended, and of real ones with a mistake that is known."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos import (
    CrashAt,
    DiskFull,
    HoldGil,
    Kill,
    Pause,
    Plan,
    Subjects,
    Summary,
    Verdict,
    draw_plan,
    exactly,
    inject,
    one,
    par,
)
from rackrun.chaos.base.errors import PlanError, Unsupported
from rackrun.chaos.plan.definition import Inject, Par, parts_of, read_plan
from rackrun.chaos.plan.shrink_plan import shrink
from rackrun.chaos.runs.run_plan import run_plan
from rackrun.chaos.runs.shrink_failure import NotFailing, ReducedPlan, reduce_plan
from rackrun.chaos.runs.simulated_counterpart import counterpart, reduced_in_simulator

SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMAND = ["--nproc-per-node", "3", "--spares", "1", "train.py"]
PLAN = Plan(
    plan=par(
        inject(Pause(for_s=4.0), exactly("rank", 0), step=1),
        inject(HoldGil(for_s=2.0), exactly("rank", 1), step=2),
        inject(Kill(signal="SEGV"), exactly("rank", 1), step=3, plus_s=0.25),
        inject(Kill(), exactly("spare", "tray-00/2"), step=4),
        inject(CrashAt(point="gate.after"), exactly("rank", 0), step=5),
        inject(Pause(for_s=2.0), exactly("rank", 1), step=6),
    )
)


def strikes(plan: Plan) -> list[Inject]:
    return [part for part in parts_of(plan.plan) if isinstance(part, Inject)]


def killed(plan: Plan, rank: str = "1") -> bool:
    return any(part.fault.loses and part.target == exactly("rank", rank) for part in strikes(plan))


class Pretended:
    """Runs that are wrong when ``wrong`` says so."""

    def __init__(self, wrong: Callable[[Plan], bool], flaky: int = 1) -> None:
        """Of every ``flaky`` runs of a plan the last is wrong."""
        self._wrong, self._flaky = wrong, flaky
        self.played: list[Plan] = []

    def __call__(self, plan: Plan, folder: Path) -> Summary:
        folder.mkdir(parents=True)
        self.played.append(plan)
        fails = self._wrong(plan) and self.played.count(plan) % self._flaky == 0
        verdict = Verdict(oracle="losses", holds=not fails, because="it differs")
        more = {
            "recoveries": (),
            "steps": 8,
            "seconds": 1.0,
            "reference_seconds": 1.0,
            "command": (),
            "out": str(folder),
        }
        return Summary(plan="", seed=0, expect="survives", holds=not fails, verdicts=(verdict,), strikes=(), **more)  # type: ignore[arg-type]


@pytest.fixture
def reduce(tmp_path: Path) -> Callable[..., ReducedPlan]:
    def run(play: Pretended, *, plan: Plan = PLAN, repeats: int = 1) -> ReducedPlan:
        return reduce_plan(plan, COMMAND, out=tmp_path / "reduced", repeats=repeats, play=play, simulate=False)

    return run


def test_the_faults_that_do_nothing_are_left_out_and_the_other_is_made_plain(
    reduce: Callable[..., ReducedPlan],
) -> None:
    reduced = reduce(Pretended(killed))
    assert strikes(reduced.plan) == [inject(Kill(), exactly("rank", 1), step=3)]
    assert reduced.wrong == ("losses",)
    assert read_plan(Path(reduced.out) / "smallest.json") == reduced.plan


def test_two_faults_that_fail_only_together_both_stay(reduce: Callable[..., ReducedPlan]) -> None:
    def both(plan: Plan) -> bool:
        return killed(plan, "0") and killed(plan, "1")

    assert [part.target for part in strikes(reduce(Pretended(both)).plan)] == [exactly("rank", 1), exactly("rank", 0)]


def test_durations_are_halved_as_long_as_that_fails(reduce: Callable[..., ReducedPlan]) -> None:
    def long(plan: Plan) -> bool:
        return any(isinstance(part.fault, Pause) and (part.fault.for_s or 0) >= 1.0 for part in strikes(plan))

    assert [part.fault for part in strikes(reduce(Pretended(long)).plan)] == [Pause(for_s=1.0)]


def test_one_of_several_subjects_is_enough() -> None:
    plan = Plan(plan=par(inject(Kill(), exactly("rank", 0, 1), step=3)))
    smallest, _ = shrink(plan, True, lambda tried: True if killed(tried) or tried == plan else None)
    assert [part.target for part in strikes(smallest)] == [exactly("rank", 1)]


def test_a_failure_that_comes_now_and_then_is_tried_as_often_as_asked(reduce: Callable[..., ReducedPlan]) -> None:
    assert len(strikes(reduce(Pretended(killed, flaky=3), repeats=3).plan)) == 1


def test_a_plan_that_does_not_fail_is_not_reduced(reduce: Callable[..., ReducedPlan]) -> None:
    with pytest.raises(NotFailing, match="did not fail in 2 runs"):
        reduce(Pretended(lambda _plan: False), repeats=2)


def test_who_is_stopped_goes_on_where_it_was(reduce: Callable[..., ReducedPlan], tmp_path: Path) -> None:
    whole = Pretended(killed)
    expected = reduce(whole)
    (tmp_path / "reduced").rename(tmp_path / "whole")

    class Stopped(Pretended):
        def __call__(self, plan: Plan, folder: Path) -> Summary:
            if len(self.played) == 3:
                folder.mkdir(parents=True)  # in the middle of a run
                raise KeyboardInterrupt
            return super().__call__(plan, folder)

    first = Stopped(killed)
    with pytest.raises(KeyboardInterrupt):
        reduce(first)
    with (tmp_path / "reduced" / "tries.jsonl").open("ab") as log:
        log.write(b'{"key": "half a li')
    second = Pretended(killed)
    assert reduce(second).plan == expected.plan
    assert first.played + second.played == whole.played


def test_only_runs_that_failed_are_kept(reduce: Callable[..., ReducedPlan]) -> None:
    play = Pretended(killed)
    reduced = reduce(play)
    kept = list((Path(reduced.out) / "tries").iterdir())
    assert len(kept) == sum(map(killed, play.played)) < len(play.played)


# -- in the simulator
def test_the_counterpart_has_the_size_of_the_job_and_its_names() -> None:
    command = ["--trays", "3", "--nproc-per-node=2", "--spares", "2", "--min-ranks", "0", "train.py", "--spares", "9"]
    plan = Plan(
        plan=par(inject(Kill(), exactly("tray", "tray-01"), step=3), inject(Kill(), exactly("spare", "tray-02/1")))
    )
    job = counterpart(plan, command, steps=9)
    assert (job.trays, job.slots, job.config.spares, job.config.min_ranks, job.units) == (3, 2, 2, 0, 9)
    assert [part.target for part in strikes(job.plan)] == [exactly("tray", "tray-1"), exactly("spare", "tray-2/1")]
    assert job.must_survive


def test_the_counterpart_of_a_job_on_a_rack_file_has_its_size_and_its_names(tmp_path: Path) -> None:
    racks = Path(__file__).resolve().parents[3] / "examples" / "racks"
    plan = Plan(plan=par(inject(Kill(), exactly("spare", "tray-04/0"), step=3), inject(Kill(), exactly("rank", 3))))
    job = counterpart(plan, ["--rack", str(racks / "five-trays.yaml"), "--spares", "2", "train.py"], steps=9)
    assert (job.trays, job.slots, job.config.spares) == (5, 1, 2)
    assert [part.target for part in strikes(job.plan)] == [exactly("spare", "tray-4/0"), exactly("rank", "3")]
    uneven = tmp_path / "uneven.yaml"
    uneven.write_text("racks: [{name: a, trays: [{name: one, gpus: 2}, {name: two, gpus: 4}]}]\n")
    assert "does not say how large" in reduced_in_simulator(plan, ["--rack", str(uneven), "train.py"], 9)[1]


def test_what_is_survived_in_the_simulator_is_not_the_coordinator_s() -> None:
    smaller, said = reduced_in_simulator(Plan(plan=inject(Kill(), exactly("rank", 1), step=3)), COMMAND, 8)
    assert smaller is None
    assert "it is not in what the coordinator decides" in said


def test_what_fails_in_the_simulator_is_reduced_there() -> None:
    """A tray that was to be survived, with nothing to replace it and no smaller world allowed."""
    plan = Plan(
        plan=par(
            inject(Pause(for_s=0.5), exactly("rank", 0), step=1),
            inject(Kill(), exactly("tray", "tray-01"), step=2),
        )
    )
    smaller, said = reduced_in_simulator(
        plan, ["--trays", "2", "--nproc-per-node", "1", "--min-ranks", "0", "train.py"], 8
    )
    assert smaller is not None, said
    assert [part.target for part in strikes(smaller)] == [exactly("tray", "tray-01")]
    assert "it had to survive" in said


@pytest.mark.parametrize(
    ("part", "error"),
    [(inject(DiskFull(), exactly("storage")), Unsupported), (inject(Kill(), one("rank"), step=3), PlanError)],
)
def test_what_has_no_counterpart_is_said_not_to_have_one(part: Inject, error: type[Exception]) -> None:
    plan = Plan(plan=Par(parts=(part,)))
    with pytest.raises(error):
        counterpart(plan, COMMAND, 8)
    assert reduced_in_simulator(plan, COMMAND, 8)[1].startswith("the simulator has no counterpart: ")


# -- with real runs
@pytest.mark.stories
@pytest.mark.timeout(1800)
def test_a_real_plan_is_reduced_to_the_one_fault_that_the_mistake_needs(tmp_path: Path) -> None:
    """A running mean that is not tracked: whichever rank is lost, and nothing else, shows it."""
    out = tmp_path / "out"
    command = ["--nproc-per-node", "4", "--spares", "2", str(SCRIPTS / "planted.py"), "normaliser"]
    plan = Plan(
        plan=par(
            inject(Pause(for_s=0.3), exactly("rank", 0), step=1),
            inject(Kill(signal="SEGV"), exactly("rank", 1), step=3),
            inject(HoldGil(for_s=0.3), exactly("rank", 0), step=5),
        )
    )
    assert run_plan(plan, command, out=out, step_by_step=True).holds is False
    resolved = read_plan(out / "resolved.json")
    assert len(strikes(resolved)) == 3
    reduced = reduce_plan(resolved, command, out=out / "reduced", repeats=1, reference=out / "reference")
    (only,) = strikes(reduced.plan)
    assert (only.fault, only.target) == (Kill(), exactly(Subjects.RANK, 1))
    assert "normalise.mean" in reduced.diagnosis
    assert "not in what the coordinator decides" in reduced.simulator
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    repro = ["/bin/sh", str(out / "reduced" / "repro.sh"), "--out", str(tmp_path / "again"), "--json"]
    again = subprocess.run(repro, cwd="/", env=environment, capture_output=True, text=True)
    assert again.returncode == 1, again.stderr
    assert msgspec.json.decode(again.stdout, type=Summary).holds is False


def test_a_drawn_plan_can_be_reduced_as_well(reduce: Callable[..., ReducedPlan]) -> None:
    """Its parts follow each other."""
    plan = draw_plan(5, steps=12, spares=3)
    assert len(strikes(reduce(Pretended(lambda tried: len(strikes(tried)) > 0), plan=plan).plan)) == 1
