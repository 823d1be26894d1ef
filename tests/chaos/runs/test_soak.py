"""A soak says what was kept, and where the rest went: all of it, and each second once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos.runs.soak import LostTime, run_soak, waterfall
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.errors import UsageError

SMALL = Path(__file__).resolve().parents[3] / "examples" / "chaos" / "small.py"


def recovery(fault_ms: float) -> RecoveryRecord:
    """Decided in 20 ms, groups in 30, state in 50; its first step is there 150 ms later."""
    times: dict[str, Any] = {"plan_ms": fault_ms + 20, "resumed_ms": fault_ms + 100, "committed_ms": fault_ms + 250}
    return RecoveryRecord(generation=2, kind="swap", because="", fault_ms=fault_ms, **times)


def test_each_lost_second_is_counted_once() -> None:
    """Steps of 100 ms. One is struck 40 ms after the last commit, which is noticed 10 ms later; while the spare starts, two take 120 ms."""
    commits = [0.0, 100.0, 200.0, 500.0, 620.0, 740.0, 840.0]
    calm = [(0.0, 200.0), (740.0, 840.0)]
    lost = waterfall([recovery(250.0)], [240.0], commits, [300.0, 900.0], calm, 0.1)
    rest: Any = pytest.approx(0.0)
    assert lost == LostTime(detect=0.01, decide=0.02, regroup=0.03, restore=0.05, rework=0.09, spares=0.04, other=rest)
    assert lost.total == pytest.approx((840 - 6 * 100) / 1e3)


def test_what_nobody_can_explain_is_other() -> None:
    assert waterfall([], [], [0.0, 100.0, 350.0], [], [(0.0, 100.0)], 0.1) == LostTime(other=0.15)


def test_without_a_time_of_a_step_nothing_is_known() -> None:
    assert waterfall([recovery(10.0)], [5.0], [0.0, 400.0], [], [], None) == LostTime()


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        ([], {}, "needs a job with spares"),
        (["--spares", "1"], {"faults": ["fire"]}, "a soak has no faults 'fire'"),
        (["--spares", "1"], {"per_minute": 0.0}, "0.0 faults a minute are none"),
    ],
)
def test_what_no_soak_can_be_is_refused(options: list[str], more: dict[str, object], said: str, tmp_path: Path) -> None:
    asked = {"minutes": 1.0, "per_minute": 2.0, **more}
    with pytest.raises(UsageError, match=said):
        run_soak(["--nproc-per-node", "3", *options, str(SMALL)], out=tmp_path / "out", **asked)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.stories
@pytest.mark.timeout(600)
def test_a_soak_loses_nothing_and_gets_its_spares_back(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "4", "--spares", "1", str(SMALL), "ddp", "fast", "100000"]
    soak = run_soak(command, out=tmp_path / "out", minutes=0.5, per_minute=8.0, faults=["kill", "raise"])
    print(soak)
    assert soak.ok
    assert soak.faults == len(soak.recoveries_s) >= 1
    assert soak.spares == (1, 1)
    assert soak.kept is not None
    assert soak.lost_s.total == pytest.approx(soak.seconds * (1 - soak.kept), abs=0.1)
    assert (tmp_path / "out" / "soak.json").exists()
