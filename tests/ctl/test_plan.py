"""``rackctl plan``: what it answers, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.planner.analysis.recommendation import GridSurvey
from rackrun.chaos.planner.inputs.operation_costs import read_costs
from rackrun.chaos.planner.swap_model.predict_swap import Swap
from tests.ctl.conftest import Said

Rackctl = Callable[..., Said]
SMALL = (
    "plan",
    "--gpus",
    300,
    "--tray-mtbf",
    "400h",
    "--days",
    5,
    "--seeds",
    2,
    "--spare-racks",
    "0,1",
    "--replica",
    16,
)


def test_it_answers_spares_policy_and_intervals_with_formulas_beside(rackctl: Rackctl) -> None:
    said = rackctl(*SMALL, "--json")
    assert said.code == 0
    found = msgspec.json.decode(said.out, type=GridSurvey)
    assert (found.gpus, found.racks, found.seeds) == (288, 4, (0, 1))
    assert [(one.spares_per_rack, one.spare_racks) for one in found.points] == [(0, 0), (0, 1), (8, 0), (8, 1)]
    assert found.best == max(found.points, key=lambda one: one.goodput.mean)
    assert found.best.goodput.half is not None
    for one in found.points:
        assert one.goodput.mean == pytest.approx(one.wall.mean * one.ranks / one.gpus)
        assert one.where.total() == pytest.approx(5 * 86400)
        wall = one.formulas["wall"]
        assert (wall.value is None) == bool(wall.why_not)
        if wall.value is not None:
            assert one.wall.mean == pytest.approx(wall.value, rel=0.05)
    assert any(one.formulas["wall"].value is not None for one in found.points)
    front = [one for one in found.points if one.front]
    assert found.best in front
    for one in front:
        better = [other for other in found.points if other.wall.mean > one.wall.mean and other.price < one.price]
        assert not better
    assert [one.what for one in found.policies] == ["cheapest", "swap,move,wait,shrink", "shrink", "restart"]
    assert [formula.name for formula in found.policies[-1].formulas] == ["Daly", "ETTR (Meta)"]
    sizes = [one.size for one in found.tornado]
    assert sizes == sorted(sizes, reverse=True)
    assert {"mtbf", "takeover_s"} <= {one.what for one in found.tornado}
    assert "step_s" in found.guessed


def test_people_get_tables(rackctl: Rackctl) -> None:
    said = rackctl(*SMALL)
    assert said.code == 0
    for word in (
        "288 GPUs in 4 racks",
        "paid/productive",
        "best ",
        "saving ",
        "policy",
        "assumption",
        "guessed, not measured",
    ):
        assert word in said.out
    assert "plan: 4 plans x 2 seeds" in said.err


def test_presets_traces_and_calibrated_costs_are_taken(rackctl: Rackctl, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("hours,where,kind,repair_hours\n24,0/3,hardware,6\n100,1,hardware,12\n")
    costs = tmp_path / "costs.json"
    costs.write_text('{"step_s": 2.0, "origin": {"step_s": "said so"}}')
    common = ("--gpus", 144, "--replica", 8, "--spares-per-rack", 0, "--spare-racks", 0, "--seeds", 1, "--costs", costs)
    said = rackctl("plan", "--trace", trace, *common, "--json")
    found = msgspec.json.decode(said.out, type=GridSurvey)
    assert found.best.goodput.half is None
    assert found.breaks_a_day == pytest.approx(2 / 30)
    assert "step_s" not in found.guessed
    assert "failures are a trace's" in found.best.formulas["wall"].why_not or found.best.formulas["wall"].value is None
    more = ("--rack-mtbf", "500h", "--process-mtbf", "5000h", "--stall-mtbf", "100h", "--lemons", "0.1:5", "--crews", 1)
    said = rackctl("plan", "--preset", "ant-a100", "--burn-in", "50h:3", *more, *common, "--json")
    assert msgspec.json.decode(said.out, type=GridSurvey).best.rungs.get("absorb", 0) > 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "--gpus 0 leaves no fleet"),
        (("--gpus", 71, "--tray-mtbf", "8000h"), "less than a rack"),
        (("--gpus", 720), "how often something fails"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--preset", "llama3"), "exactly one source"),
        (("--gpus", 720, "--tray-mtbf", "0h"), "no duration above 0"),
        (("--gpus", 720, "--tray-mtbf", "-5h"), "no duration above 0"),
        (("--gpus", 720, "--tray-mtbf", "often"), "no duration above 0"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--repair", "800h"), "not done within"),
        (
            ("--gpus", 720, "--tray-mtbf", "8000h", "--spares-per-rack", "80"),
            "a rack of 72 GPUs cannot hold back 80 spares",
        ),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--spares-per-rack", "many"), "no list of numbers"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--spare-racks", "10"), "10 spare racks leave none of 10 racks"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--lemons", "0.5"), "two parts"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--lemons", "x:2"), "'x' where a number belongs"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--crews", 0), "0 repair crews"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--weibull", 0), "shape 0"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--seeds", 0), "--seeds 0"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--days", -1), "--days -1"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--policy", "hope"), "no rung 'hope'"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--policy-weights", "luck=1"), "cannot be a weight"),
        (("--gpus", 720, "--preset", "nowhere"), "no preset 'nowhere'"),
        (("--gpus", 720, "--trace", "none.csv"), "none.csv cannot be read"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--costs", "none.json"), "none.json cannot be read"),
        (("--gpus", 720, "--tray-mtbf", "8000h", "--checkpoint-every", -3), "are impossible"),
        (("predict", "--ranks", 4, "--spares", 1, "--faults-per-minute", 0), "--faults-per-minute 0"),
        (("predict", "--ranks", 4, "--spares", 1, "--faults-per-minute", "1e99"), "cannot be simulated"),
        (
            ("predict", "--ranks", 4, "--spares", 1, "--faults-per-minute", 1, "--minutes", "1e99"),
            "cannot be simulated",
        ),
        (("predict", "--ranks", 4, "--spares", 1, "--faults-per-minute", 1, "--minutes", "nan"), "cannot be simulated"),
        (("predict", "--ranks", 0, "--spares", 1, "--faults-per-minute", 1), "cannot be predicted"),
        (("calibrate", "none"), "none cannot be read"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(
    rackctl: Rackctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = rackctl("plan", *arguments)
    assert said.code == 2
    assert what in said.err
    assert said.err.startswith("rackctl: error: ")


def test_a_small_job_that_is_killed_is_predicted(rackctl: Rackctl, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"step_s": 0.25, "detect_s": 0.0, "takeover_s": 0.4, "start_s": 8.0}')
    asked = ("plan", "predict", "--costs", costs, "--ranks", 4, "--spares", 3, "--faults-per-minute", 2)
    said = rackctl(*asked)
    assert said.code == 0
    assert "of its throughput without faults" in said.out
    assert 0.9 < rackctl(*asked, "--json").json["kept"]["mean"] < 1.0


def test_it_is_listed_with_the_other_commands(rackctl: Rackctl) -> None:
    assert "plan" in rackctl("--help").out
    assert "calibrate" in rackctl("plan", "--help").out


# -- the cost of a swap ------------------------------------------------------------------------------------------------
SWAP = ("plan", "swap", "--ranks", 1024, "--groups", "tp:8,dp:128", "--state", "12.7GB")


def test_a_swap_is_priced_stage_by_stage_and_says_what_is_only_predicted(rackctl: Rackctl) -> None:
    said = rackctl(*SWAP)
    assert said.code == 0
    for stage in ("notice a dead process", "build groups, all warm", "restore over nvlink", "whole swap, spare cold"):
        assert stage in said.out
    assert "not calibrated" in said.out
    assert "predicted, not measured: " in said.out


def test_its_figure_is_a_cost_of_the_plan(rackctl: Rackctl, tmp_path: Path) -> None:
    swap = msgspec.json.decode(rackctl(*SWAP, "--json").out, type=Swap)
    written = tmp_path / "costs.json"
    written.write_text(rackctl(*SWAP, "--as-costs").out)
    costs = read_costs(written)
    assert costs.takeover_s == swap.row("whole swap, spare warm").likely
    assert costs.state_bytes == 12.7e9
    assert "takeover_s" not in costs.guessed()
    assert "reasoned; not calibrated" in costs.origin["takeover_s"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--groups", "tp"), "needs two parts"),
        (("--groups", "tp:8,tp:8"), "or its name occurs twice"),
        (("--groups", "tp:x"), "is not a size"),
        (("--groups", "tp:7"), "do not divide"),
        (("--state", "much"), "is no number of bytes"),
        (("--state", "-1GB"), "is no number of bytes"),
        (("--kit", "absent.json"), "cannot be read"),
    ],
)
def test_what_a_swap_cannot_be_asked_is_refused(rackctl: Rackctl, arguments: tuple[str, str], why: str) -> None:
    said = rackctl(*SWAP, *arguments)
    assert said.code == 2
    assert why in said.err
