"""Jobs drawn from seeds, in virtual time: what must hold at every step, and what must happen sometimes.

``RACKRUN_HYPOTHESIS=large`` plays far more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.plan.definition import Heal, Par
from rackrun.chaos.simulator.__main__ import LAST, main
from rackrun.chaos.simulator.base.coverage_marks import MARKS
from rackrun.chaos.simulator.cluster.simulation import Simulation, SimulationOutcome
from rackrun.chaos.simulator.fuzzing.draw_damage import a_job_with_a_damaged_checkpoint
from rackrun.chaos.simulator.fuzzing.draw_job import draw_job
from rackrun.chaos.simulator.fuzzing.fuzz import Tally, play, reduce
from rackrun.coordinator.shell.driver import Driver

pytestmark = pytest.mark.timeout(1_200)  # whichever test is the first plays all seeds, beside whatever else runs
SEEDS = 20_000 if os.environ.get("RACKRUN_HYPOTHESIS") == "large" else 100


class Played(NamedTuple):
    """Seeds that were played."""

    tally: Tally
    failed: list[SimulationOutcome]


@pytest.fixture(scope="module")
def played() -> Played:
    found = Played(Tally(), [])
    for seed in range(SEEDS):
        outcome = play(seed)
        found.tally.add(outcome)
        if outcome.violation:
            found.failed.append(outcome)
    return found


@pytest.fixture(scope="module")
def tally(played: Played) -> Tally:
    return played.tally


def all_that_failed(failed: Sequence[SimulationOutcome]) -> str:
    """Return for each seed what failed, what the core heard and said last, and whether it fails again in this process."""
    told = []
    for outcome in failed:
        seed, again = outcome.seed, play(outcome.seed)
        how = "alike" if again.trace == outcome.trace else f"with another trace: {again.trace}, not {outcome.trace}"
        told += [
            f"seed {seed} (python -m rackrun.chaos.simulator show {seed}): {outcome.violation}",
            f"    after {outcome.core_events} events of the core, {outcome.virtual_s:.3f} s in virtual time",
            f"    played once more, {how}: {again.violation or 'nothing fails'}",
            *(f"    {line[:300]}" for line in outcome.last[-LAST:]),
        ]
    return "\n".join(told)


def test_no_seed_finds_anything_that_is_not_as_it_must_be(played: Played) -> None:
    if played.failed:
        pytest.fail(all_that_failed(played.failed), pytrace=False)


def test_a_seed_that_fails_is_told_with_all_that_is_needed_to_play_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Driver, "_send", lambda *_: None)
        found = next(outcome for seed in range(20) if (outcome := play(seed)).violation)
    told = all_that_failed([found])
    assert told.startswith(
        f"seed {found.seed} (python -m rackrun.chaos.simulator show {found.seed}): {found.violation}\n"
    )
    assert "played once more, with another trace: " in told
    assert ": nothing fails" in told
    assert found.last[-1][:300] in told


@pytest.mark.parametrize(
    "seed",
    [
        94616,  # two replicas differed, no snapshot was left, and all went on from memory
        90206,  # a rank was lost before the ranks that had entered main again knew their replicas
        94711,  # newer copies replaced what the plan named, and their report was under way
        94882,  # a rank that was found wrong went back to a snapshot of its own
        31361,  # all replicas took over a wrong bit, and computing again convicted another rank when they were equal
        73479,  # a rank took over a wrong bit, and with its source it outvoted a rank that took its state before
        40535,  # a worker was fenced before its process began
        61134,  # a step was done again, and the report that its snapshot was copied was lost
    ],
)
def test_seeds_that_have_found_something_find_nothing_any_more(seed: int) -> None:
    outcome = play(seed)
    assert not outcome.violation, all_that_failed([outcome])


@pytest.mark.stories
def test_no_later_seed_does_either() -> None:
    failed = [outcome for seed in range(SEEDS, SEEDS + 400) if (outcome := play(seed)).violation]
    assert not failed, all_that_failed(failed)


@pytest.mark.stories
def test_every_mark_is_seen_by_some_seed(tally: Tally) -> None:
    """The rarest by one seed in some hundred: where the first ones miss them, more are played."""
    missing = {mark for mark in MARKS if not tally.marks[mark]}
    for seed in range(SEEDS, SEEDS + 2900):
        if not missing:
            break
        outcome = play(seed)
        assert not outcome.violation, all_that_failed([outcome])
        missing -= outcome.marks.keys()
    assert not missing


def test_of_jobs_with_a_damaged_checkpoint_many_begin_from_an_older_one() -> None:
    """They are one in a hundred of all, because hardly any other job begins from a checkpoint that is damaged."""
    jobs = [a_job_with_a_damaged_checkpoint(seed, stream(seed, "a damaged checkpoint")) for seed in range(40)]
    outcomes = [Simulation(job).run() for job in jobs]
    assert not [outcome.violation for outcome in outcomes if outcome.violation]
    assert sum("a damaged checkpoint was passed over" in outcome.marks for outcome in outcomes) >= 5


def test_jobs_end_well_and_stop_for_reasons_in_about_equal_parts(tally: Tally) -> None:
    assert min(tally.exits["0"], tally.exits["3"]) > SEEDS / 10, tally.exits


@pytest.mark.stories
def test_a_seed_is_a_run_in_whatever_process() -> None:
    """Nothing depends on the order of hashes, which differs from process to process."""
    seeds = [seed for seed in range(40) if seed % 4 == 0]
    script = f"""
from rackrun.chaos.simulator.fuzzing.fuzz import play
for seed in {seeds}:
    outcome = play(seed)
    print(seed, outcome.trace, outcome.happened)
"""
    told = []
    for hash_seed in ("1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        told.append(done.stdout)
    here = "".join(f"{seed} {outcome.trace} {outcome.happened}\n" for seed in seeds for outcome in [play(seed)])
    assert told == [here, here]


def test_another_seed_is_another_run() -> None:
    assert len({play(seed).trace for seed in range(10)}) == 10


def test_a_seed_that_finds_nothing_is_not_reduced() -> None:
    assert reduce(0) is None


def test_many_seeds_are_gone_through_once_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "tally"
    assert main(["fuzz", "--seeds", "0:52", "--tally", str(kept)]) == 0
    assert "52 seeds in" in capsys.readouterr().out
    lines = kept.read_bytes()
    assert [json.loads(line)["stop"] for line in lines.splitlines()] == [50, 52]
    with kept.open("ab") as file:
        file.write(b'{"start": 100, "st')  # it was killed while it wrote
    assert main(["fuzz", "--seeds", "0:52", "--tally", str(kept)]) == 0
    out = capsys.readouterr().out
    assert "52 of 52 seeds are known already" in out
    assert "seeds in" not in out
    assert kept.read_bytes() == lines


def test_faults_are_drawn_for_every_job() -> None:
    plans = [draw_job(seed).plan for seed in range(50)]
    assert all(plan.seed == seed for seed, plan in enumerate(plans))
    assert not any(plan.plan in (Heal(), Par(parts=())) for plan in plans)
