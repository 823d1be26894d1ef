"""Each oracle catches a rackrun that breaks the promise it looks after: whole jobs of `scripts/mutants.py`. Oracles that a whole job cannot show
cheaply are shown it by what such a job would leave (`test_oracles.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.hangs.pause_process import Pause
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.faults.targets import One, Several, Target
from rackrun.chaos.injectors.processes import signals
from rackrun.chaos.plan.definition import AtStep, Inject, Plan
from rackrun.chaos.runs.reference_run import ReferenceRun, run_reference
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.chaos.testbed.machine.processes import Process

pytestmark = [pytest.mark.slow, pytest.mark.stories, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOT = Path(__file__).resolve().parents[3]
STEPS, HOLD = 12, 6
TINY = ["--nproc-per-node", "3", "--spares", "1", str(SCRIPTS / "tiny.py"), str(STEPS), str(HOLD), "{out}", "1"]
LATER = [*TINY[:-3], "11", *TINY[-2:]]
"""Holds after the tenth step: then it has begun."""
RANK = One(Subjects.RANK)
KILLED = (Kill(), RANK)

CAUGHT: dict[str, tuple[str, Fault, Target]] = {
    "a step that is done again draws other random numbers": ("losses", *KILLED),
    "a newcomer keeps what it began with": ("losses", *KILLED),
    "a sample is used twice": ("samples", *KILLED),
    "a rank leaves an update out": ("weights", *KILLED),
    "a stop has no reason": ("ending", Kill(), Several(Subjects.RANK, 2)),
    "the end never comes": ("time", *KILLED),
    "a process is left": ("leftovers", *KILLED),
    "who stands still for a moment is given up": ("restraint", Pause(for_s=0.6), RANK),
    "the coordinator decides by what is no event": ("replayed", *KILLED),
}
"""Mutant -> the oracle that must catch it, and what strikes."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a rackrun that keeps its promises."""
    folder = tmp_path_factory.mktemp("without") / "reference"
    run_reference(TINY, folder)
    return folder


def run(fault: Fault, target: Target, out: Path, reference: Path, mutant: str = "") -> Summary:
    stops = isinstance(target, Several)
    step = HOLD - 1 if not stops else 10
    plan = Plan(
        plan=Inject(fault=fault, target=target, when=AtStep(step=step)), expect="stops" if stops else "survives", seed=3
    )
    env = {"PYTHONPATH": f"{ROOT}:{SCRIPTS}", "RACKRUN_TEST_MUTANT": mutant, "TINY_INSIDE": "1"}
    command = ["--preload", "mutants", *(LATER if stops else TINY)]
    summary = run_plan(
        plan,
        command,
        out=out,
        reference=ReferenceRun(reference, TINY),
        env=env,
        limit_s=60.0 if mutant == "the end never comes" else None,
    )
    print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode(), file=sys.stderr)
    print((out / "faulted" / "stderr.txt").read_text(), file=sys.stderr)
    return summary


def verdicts(summary: Summary) -> dict[str, bool | None]:
    return {verdict.oracle: verdict.holds for verdict in summary.verdicts}


@pytest.mark.parametrize(("fault", "target"), {(fault, target): None for _, fault, target in CAUGHT.values()})
def test_without_a_mutant_each_of_these_runs_is_right(
    fault: Fault, target: Target, tmp_path: Path, reference: Path
) -> None:
    assert run(fault, target, tmp_path / "out", reference).holds is True


@pytest.mark.parametrize("mutant", CAUGHT)
def test_a_mutant_is_caught(mutant: str, tmp_path: Path, reference: Path) -> None:
    oracle, fault, target = CAUGHT[mutant]
    summary = run(fault, target, tmp_path / "out", reference, mutant)
    assert verdicts(summary)[oracle] is False
    assert summary.holds is False


def test_an_injector_that_does_nothing_makes_the_run_unknown(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "CONFIRM_S", 0.0)
    monkeypatch.setattr(Process, "send", lambda _self, _number: True)
    summary = run(*KILLED, tmp_path / "out", reference)
    assert summary.holds is None
    assert {name for name, holds in verdicts(summary).items() if holds is not True} == {"strikes"}
