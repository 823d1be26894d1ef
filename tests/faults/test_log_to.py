"""`--log-to` has the values of each committed step once and in order, whoever is lost, and after a resume."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.sinks.test_libraries import TENSORBOARD, python
from tests.faults.scripts.strike import Fault
from tests.faults.trained import STEPS, Trained

pytestmark = pytest.mark.slow

Train = Callable[..., Trained]


def places(path: Path, name: str) -> list[tuple[int, int]]:
    """Step and phase of the lines that have a value of this name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    keys = [(line["step"], line.get("phase", 0)) for line in lines]
    assert keys == sorted(keys)
    return [key for key, line in zip(keys, lines, strict=True) if name in line]


def test_ranks_are_swapped(train: Train, tmp_path: Path) -> None:
    """Rank 0 twice: before its gate, and when it has committed a step and not told anybody."""
    path, board = tmp_path / "values.jsonl", tmp_path / "board"
    faults = [
        Fault(name="rank 0", place="backward", rank=0, step=3),
        Fault(name="rank 2", place="after the update", rank=2, step=6, after="rank 0"),
        Fault(name="rank 0 again", place="before report", rank=0, step=9, after="rank 2"),
    ]
    options = ["--log-to", f"jsonl:{path}"]
    if find_spec("tensorboard") is not None:
        options += ["--log-to", f"tensorboard:{board}"]
    trained = train("ddp", faults, spares=3, options=options)
    assert trained.ran.exit_code == 0, trained
    assert not trained.ran.left_behind, trained
    assert len(trained.struck) == 3, trained
    assert places(path, "loss") == [(step, 0) for step in range(STEPS)]
    assert len(places(path, "error")) == len(set(places(path, "error"))) > 0
    if find_spec("tensorboard") is not None:
        assert [step for step, _ in python(TENSORBOARD, board)["loss"]] == list(range(STEPS))


@pytest.mark.stories
def test_everyone_goes_back_to_a_snapshot(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "values.jsonl"
    faults = [Fault(name="rank", place="backward", rank=1, step=8)]
    trained = train("fsdp", faults, options=["--log-to", f"jsonl:{path}"])
    assert trained.ran.exit_code == 0, trained
    assert places(path, "loss") == [(step, 0) for step in range(STEPS)]


@pytest.mark.stories
def test_the_launcher_is_killed_and_the_job_resumes(train: Train, tmp_path: Path) -> None:
    """A checkpoint may hold steps of which a killed launcher has not heard: they are in no log (docs/loggers.md)."""
    path, checkpoints = tmp_path / "values.jsonl", tmp_path / "checkpoints"
    faults = [Fault(name="launcher", place="backward", rank=1, step=9, then="LAUNCHER")]
    options = ["--log-to", f"jsonl:{path}"]
    killed = train("ddp", faults, checkpoints=checkpoints, options=options)
    assert killed.ran.exit_code == -signal.SIGKILL, killed
    again = train("ddp", checkpoints=checkpoints, options=options)
    assert again.ran.exit_code == 0, again
    found = places(path, "loss")
    assert len(found) == len(set(found))
    unheard = range(8, min(again.samples))  # step 8 was on its way, and a checkpoint has what came after
    assert set(range(STEPS)) - {step for step, _ in found} <= set(unheard)


def test_a_target_that_takes_nothing_does_not_stop_the_job(train: Train, tmp_path: Path) -> None:
    trained = train("ddp", options=["--log-to", "otlp:http://127.0.0.1:1"])
    assert trained.ran.exit_code == 0, trained
    assert "does not take values: URLError" in trained.ran.stderr, trained
    assert "run.log calls were not delivered" in trained.ran.stderr, trained
    assert not trained.ran.left_behind, trained


@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        ("steps", "phase:5:0"),
        pytest.param("do", "phase:5:1", marks=pytest.mark.stories),
        *[
            pytest.param(kind, kill, marks=pytest.mark.stories)
            for kind in ("steps", "do")
            for kill in ("step:5:0", "body:5:0", "body:11:1", "phase:11:1")
        ],
    ],
)
def test_who_enters_a_turn_again_does_not_log_again(
    kind: str, kill: str, run_rackrun: Callable[..., Any], tmp_path: Path
) -> None:
    script = Path(__file__).parent / "scripts" / "logs_in_turns.py"

    def logged(name: str, kill: str) -> list[dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        options = ["--standalone", "--nproc-per-node", 3, "--spares", 1, "--log-to", f"jsonl:{folder / 'values'}"]
        ran = run_rackrun([*options, script, folder, kind, kill], env={"OMP_NUM_THREADS": "1"})
        assert ran.exit_code == 0, ran
        assert (folder / "struck").exists() == bool(kill), ran
        lines = [json.loads(line) for line in (folder / "values").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key != "time"} for line in lines]

    assert logged("struck", kill) == logged("calm", "")
