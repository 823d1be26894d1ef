"""``train`` runs the script of these tests with faults; ``reference`` is the same training without."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeRack
from tests.faults.resized import WAIT_S, Story
from tests.faults.scripts.strike import Fault, faults_to_json
from tests.faults.trained import RANKS, STEPS, Trained, read

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "train.py"
DEADLINE_S = 100.0

DOUBLED = Path(__file__).parents[1] / "worker" / "doubled.py"

Train = Callable[..., Trained]


def script(path: Path) -> list[str | Path]:
    """What to start. RACKRUN_NCCL_DOUBLE says whether its workers have the double of NCCL's contract for their device."""
    mode = os.environ.get("RACKRUN_NCCL_DOUBLE")
    return [DOUBLED, mode, path] if mode else [path]


@pytest.fixture
def train(start_rackrun: Callable[..., Any], tmp_path: Path) -> Train:
    """``train(mode, faults, spares=1, trays=1, checkpoints=None, copies="") -> Trained``: a whole job; whatever happens, none
    of it is left. ``policy``, where its module is in the folder ``path``. ``options``: more of rackrun's; ``patience_s``: no step is called
    a hang before. ``rack``: on its trays, with its driver. ``checkpoints`` is a folder to write one to after every other step, and to go on from."""
    runs = 0

    def run(
        mode: str,
        faults: Sequence[Fault] = (),
        *,
        spares: int = 1,
        trays: int = 1,
        checkpoints: Path | None = None,
        copies: str = "",
        rack: FakeRack | None = None,
        policy: str = "",
        path: Path | None = None,
        filler: str = "",
        steps: int = STEPS,
        options: Sequence[object] = (),
        patience_s: float = 0.0,
        reduction: str = "fast",
    ) -> Trained:
        nonlocal runs
        folder = tmp_path / f"train-{runs}"
        runs += 1
        for name in ("marks", "held"):
            (folder / name).mkdir(parents=True)
        options = ["--spares", spares, "--ledger", "ids", *options]
        env = {}
        if rack is None:
            options += ["--nproc-per-node", (RANKS + spares) // trays, "--trays", trays]
        else:
            options += ["--rack", rack.path.with_suffix(".yaml")]
            env = rack.environment(rack.path.parent)
        if mode != "ddp":  # imported once, not by every worker
            options += ["--preload", "torch.distributed.fsdp,torch.distributed.tensor"]
        if checkpoints is not None:
            options += ["--checkpoint-dir", checkpoints, "--checkpoint-every", 2]
        if filler:
            options += ["--filler", filler]
        if copies:
            options += ["--snapshot-copies", copies]
        if policy:
            options += ["--policy", policy]
        if path is not None:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
        env |= {
            "RACKRUN_TEST_FAULTS": faults_to_json(list(faults)),
            "RACKRUN_TEST_MARKS": str(folder / "marks"),
            "RACKRUN_TEST_JOURNAL": str(tmp_path / f"run-{runs - 1}" / "journal.sqlite"),
            "RACKRUN_TEST_REDUCTION": reduction,
        }
        if patience_s:
            env["RACKRUN_TEST_PATIENCE"] = str(patience_s)
        job = start_rackrun(["--standalone", *options, *script(SCRIPT), mode, steps, folder / "held"], env=env)
        trained = read(job.finish(DEADLINE_S), folder)
        print(trained, file=sys.stderr)
        return trained

    return run


@pytest.fixture(scope="session")
def references() -> dict[str, Trained]:
    return {}


@pytest.fixture
def reference(train: Train, references: dict[str, Trained]) -> Callable[[str], Trained]:
    """``reference(mode)``: the training without a fault, run once. ``reference(mode, steps)``: of so many."""

    def of(mode: str, steps: int = STEPS, reduction: str = "fast") -> Trained:
        key = f"{mode} {steps} {reduction}"
        if key not in references:
            trained = train(mode, steps=steps, reduction=reduction)
            assert trained.ran.exit_code == 0, trained
            assert not trained.recoveries, trained
            assert sorted(trained.held) == [*(f"{rank}.json" for rank in range(RANKS)), "export.json"], trained
            assert len(trained.samples) == steps, trained
            references[key] = trained
        return references[key]

    return of


@pytest.fixture
def story(start_rackrun: Callable[..., Any], tmp_path: Path) -> Callable[..., Trained]:
    """``story(mode, ranks, steps, reduction, change, options=[], batch="constant") -> Trained``, of ``scripts/resized.py`` without spares;
    ``change(story)`` does what happens to it. ``options``: more of rackrun's, or others. ``worlds``: the script is told that its world was of
    these sizes. ``hangs``: slots."""
    runs = 0

    def run(
        mode: str,
        ranks: int,
        steps: int,
        reduction: str,
        change: Callable[[Story], None],
        options: Sequence[object] = (),
        batch: str = "constant",
        worlds: object = None,
        *,
        hangs: Sequence[str] = (),
    ) -> Trained:
        nonlocal runs
        folder = tmp_path / f"story-{runs}"
        runs += 1
        for name in ("marks", "held", "pid", "come", "came", "hangs"):
            (folder / name).mkdir(parents=True)
        (folder / "limit").write_text("0")
        for slot in hangs:
            (folder / "hangs" / slot).touch()
        command = ["--standalone", "--policy", "swap,shrink,wait", *(options or ["--nproc-per-node", ranks])]
        if mode != "ddp":
            command += ["--preload", "torch.distributed.fsdp,torch.distributed.tensor"]
        env = {"RACKRUN_TEST_WORLDS": json.dumps(worlds)}
        job = start_rackrun([*command, *script(SCRIPTS / "resized.py"), mode, steps, folder, reduction, batch], env=env)
        told = Story(job, folder, ranks)
        job.wait_for(lambda status: status["core"]["phase"] == "training", WAIT_S)
        told.go_on(ranks)
        change(told)
        told.say_limit(steps)
        trained = read(job.finish(WAIT_S), folder)
        trained.held = {path.name: path.read_text() for path in (folder / "held").iterdir()}
        assert trained.ran.exit_code == 0, trained
        assert not trained.ran.left_behind, trained
        return trained

    return run
