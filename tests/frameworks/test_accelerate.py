"""A loop with Accelerate under `rackrun.elastic`: rank 0 is lost, and its successor is Accelerate's main process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "train_accelerate.py"


def trained(run_rackrun: Callable[..., Any], folder: Path, kill: str) -> tuple[dict[str, Any], list[str]]:
    """What each rank has written, and what the main process has logged, step by step."""
    folder.mkdir()
    command = ["--standalone", "--nproc-per-node", 3, "--spares", 1, SCRIPT, folder, kill]
    ran = run_rackrun(command, env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code == 0, ran
    assert (folder / "struck").exists() == bool(kill), ran
    written = {path.stem: json.loads(path.read_text()) for path in folder.glob("[0-9].json")}
    return written, (folder / "main.txt").read_text().splitlines()


@pytest.mark.feature("Accelerate", "a loop as a step, any rank lost, rank 0 too")
@pytest.mark.feature("Accelerate", "the main process follows rank 0 (follow_ranks)")
@pytest.mark.parametrize("kill", ["3:0", pytest.param("5:1", marks=pytest.mark.stories)])
def test_who_takes_rank_0_over_is_the_main_process(kill: str, run_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    calm, calm_log = trained(run_rackrun, tmp_path / "calm", "")
    struck, log = trained(run_rackrun, tmp_path / "struck", kill)
    assert struck == calm
    assert [rank["place"] for _, rank in sorted(struck.items())] == [[0, 2, True], [1, 2, False]]
    assert log == calm_log, "each step once, and in order"
