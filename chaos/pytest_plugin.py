"""The pytest plugin: the fixture ``chaos`` breaks a training script on purpose, and fails the test if anything was
lost.

::

    def test_a_lost_rank_costs_nothing(chaos):
        chaos.survives("train.py", plan=inject(Kill(), one("rank"), step=6), ranks=3, spares=1, args=["--steps", 12])

The fixture exists wherever rackrun is installed, so this module imports nothing before a test asks for it.
"""

from __future__ import annotations

import os
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rackrun.chaos.testing import Chaos, References

__all__ = ["chaos", "pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "rackrun: training scripts, broken on purpose")
    group.addoption(
        "--chaos-seed",
        type=int,
        default=None,
        metavar="N",
        help="Of what is random in plans. Default: a new one; a test that fails says which.",
    )
    group.addoption(
        "--chaos-out",
        type=Path,
        default=None,
        metavar="DIR",
        help="Keep all runs here. Default: pytest's own temporary folder.",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.chaos_seed is None:  # set here, so that the processes of pytest-xdist have the same
        config.option.chaos_seed = secrets.randbelow(2**31)


@pytest.fixture(scope="session")
def _chaos_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted: Path | None = request.config.option.chaos_out
    if wanted is None:
        return tmp_path_factory.mktemp("chaos")
    folder = wanted.resolve() / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="session")
def _chaos_references(_chaos_folder: Path) -> References:
    from rackrun.chaos.testing import References

    return References(_chaos_folder / "references")


@pytest.fixture
def chaos(request: pytest.FixtureRequest, _chaos_folder: Path, _chaos_references: References) -> Chaos:
    """Break a training script on purpose: ``chaos.survives("train.py", plan=..., ranks=4, spares=1, args=[...])``.

    The other methods are ``stops``, ``repeats`` and ``run``; see `rackrun.chaos.testing.Chaos`.
    """
    from rackrun.chaos.testing import Chaos

    node = request.node
    name = re.sub(r"[^\w.-]+", "-", node.nodeid).strip("-")[-100:]
    return Chaos(
        seed=request.config.option.chaos_seed,
        folder=_chaos_folder / name,
        references=_chaos_references,
        near=Path(node.path).parent,
        test=node.nodeid,
        tell=lambda text: node.add_report_section("call", "chaos", text),
    )
