"""torchtitan under rackrun trains what it trains alone under torchrun, to the bit, whoever is lost at which moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.framework_jobs import FrameworkJobs, same
from tests.frameworks.titan_assets import make_assets

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parent / "scripts" / "train_titan.py"
SHARDED: dict[str, Any] = {}
ALL: dict[str, Any] = {"accumulate": 2, "save": 3, "validate": 2, "steps": 5}


@pytest.fixture
def jobs(tmp_path: Path, run_rackrun: Callable[..., Any]) -> Callable[..., FrameworkJobs]:
    """Returns a function that makes jobs, given a number of ranks if that is not 2."""
    make_assets(tmp_path / "assets")
    return partial(FrameworkJobs, SCRIPT, tmp_path, run_rackrun)


@pytest.fixture
def compare(jobs: Callable[..., FrameworkJobs]) -> Callable[..., None]:
    """Returns a function that compares torchtitan alone with a job of rackrun's in which one is struck."""

    def compared(arguments: dict[str, Any], kill: str) -> None:
        both = jobs(2 * arguments.get("tp", 1) * arguments.get("replicate", 1))
        same(both.stock(arguments), both.elastic(arguments, kill), struck=bool(kill))

    return compared


@pytest.mark.feature("torchtitan", "FSDP2, any rank lost, rank 0 too")
def test_rank_0_is_killed_in_the_backward_pass(compare: Callable[..., None]) -> None:
    compare(ALL, "3:0:KILL:backward")


@pytest.mark.stories
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signalled", ["KILL", "STOP"])
@pytest.mark.parametrize(
    "moment", ["1:forward", "3:forward", "4:backward", "3:clip", "4:applied", "3:between", "3:saving", "3:saved", "2:validating"]
)
def test_one_is_lost_at_another_moment(moment: str, signalled: str, rank: int, compare: Callable[..., None]) -> None:
    step, where = moment.split(":")
    compare(ALL, f"{step}:{rank}:{signalled}:{where}")
