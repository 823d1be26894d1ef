"""A loop with Fabric under `rackrun.elastic`: rank 0 is lost, and its successor is Fabric's main process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "train_fabric.py"


def trained(run_rackrun: Callable[..., Any], folder: Path, kill: str) -> tuple[dict[str, Any], list[str]]:
    """What each rank has written, and what the main process has noted, each line once: a successor repeats the last."""
    folder.mkdir()
    command = ["--standalone", "--nproc-per-node", 3, "--spares", 1, SCRIPT, folder, kill]
    ran = run_rackrun(command, timeout=90, env={"OMP_NUM_THREADS": "1"})
    assert ran.exit_code == 0, ran
    assert (folder / "struck").exists() == bool(kill), ran
    written = {path.stem: json.loads(path.read_text()) for path in folder.glob("[0-9].json")}
    return written, list(dict.fromkeys((folder / "main.txt").read_text().splitlines()))


@pytest.mark.feature("Fabric", "a loop as a step, any rank lost, rank 0 too")
@pytest.mark.parametrize("kill", ["3:0", pytest.param("5:1", marks=pytest.mark.stories)])
def test_who_takes_rank_0_over_is_the_main_process(kill: str, run_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    calm, calm_lines = trained(run_rackrun, tmp_path / "calm", "")
    struck, lines = trained(run_rackrun, tmp_path / "struck", kill)
    assert struck == calm
    assert [rank["place"] for _, rank in sorted(struck.items())] == [[0, 2, True], [1, 2, False]]
    assert lines == calm_lines
    assert [line.split()[-1] for line in lines] == ["0.5"] * 8, "the mean of the ranks"
