"""``rackctl chaos``: its options, and what it refuses before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.ctl.conftest import Said

Rackctl = Callable[..., Said]


def write(folder: Path, fault: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(f"plan: {{do: inject, fault: {{fault: {fault}}}, target: {{who: one, of: tray}}}}")
    return path


def test_the_doctor_says_what_can_be_and_why_not_the_rest(rackctl: Rackctl) -> None:
    said = rackctl("chaos", "doctor", "--json")
    assert said.code == 0
    found = {one["fault"]: one for one in said.json}
    assert found["kill"]["can"]
    assert not found["partition"]["can"]
    assert found["partition"]["remedy"]
    assert "no injector" in rackctl("chaos", "doctor").out


def test_a_plan_that_cannot_be_read_is_bad_usage(rackctl: Rackctl, tmp_path: Path) -> None:
    said = rackctl("chaos", "run", tmp_path / "none.yaml", "--", "train.py")
    assert said.code == 2
    assert "none.yaml" in said.err
    assert rackctl("chaos", "run", write(tmp_path, "earthquake"), "--", "train.py").code == 2


def test_a_fault_that_a_real_job_cannot_have_is_refused_before_the_start(rackctl: Rackctl, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = rackctl(
        "chaos", "run", write(tmp_path, "partition"), "--out", out, "--", "--nproc-per-node", "2", "train.py"
    )
    assert said.code == 2
    assert "partition has no injector" in said.err
    assert not out.exists()


def test_it_is_listed_with_the_other_commands(rackctl: Rackctl) -> None:
    assert "chaos" in rackctl("--help").out
    assert "doctor" in rackctl("chaos", "--help").out
