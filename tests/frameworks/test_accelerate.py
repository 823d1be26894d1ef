"""A loop with Accelerate under `rackrun.elastic`: rank 0 is lost, and its successor is Accelerate's main process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import own_loop

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "train_accelerate.py"


@pytest.mark.feature("Accelerate", "a loop as a step, any rank lost, rank 0 too")
@pytest.mark.feature("Accelerate", "the main process follows rank 0 (follow_ranks)")
@pytest.mark.parametrize("kill", ["3:0", pytest.param("5:1", marks=pytest.mark.stories)])
def test_who_takes_rank_0_over_is_the_main_process(kill: str, run_rackrun: Callable[..., Any], tmp_path: Path) -> None:
    calm, calm_log = own_loop(SCRIPT, run_rackrun, tmp_path / "calm", "")
    struck, log = own_loop(SCRIPT, run_rackrun, tmp_path / "struck", kill)
    assert struck == calm
    assert [rank["place"] for _, rank in sorted(struck.items())] == [[0, 2, True], [1, 2, False]]
    assert log == calm_log, "each step once, and in order"
