"""A loop with Fabric under `rackrun.elastic`: rank 0 is lost, and its successor is Fabric's main process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import own_loop

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "train_fabric.py"


@pytest.mark.feature("Fabric", "a loop as a step, any rank lost, rank 0 too")
@pytest.mark.parametrize("kill", ["3:0", pytest.param("5:1", marks=pytest.mark.stories)])
def test_who_takes_rank_0_over_is_the_main_process(kill: str, run_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    calm, calm_lines = own_loop(SCRIPT, run_rackrun, tmp_path / "calm", "")
    struck, lines = own_loop(SCRIPT, run_rackrun, tmp_path / "struck", kill)
    assert struck == calm
    assert [rank["place"] for _, rank in sorted(struck.items())] == [[0, 2, True], [1, 2, False]]
    assert list(dict.fromkeys(lines)) == calm_lines, "a successor repeats the last"
    assert [line.split()[-1] for line in calm_lines] == ["0.5"] * 8, "the mean of the ranks"
