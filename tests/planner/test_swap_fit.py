"""What the GPU kit has measured goes into the model of a swap, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.swap_model.fit_measurements import fitted, held_against, read_kit
from rackrun.chaos.planner.swap_model.predict_swap import WARM, SwapScenario, predict_swap
from rackrun.chaos.planner.swap_model.stage_costs import FIGURES, built_s


def line(check: str, value: object, unit: str, outcome: str = "ok") -> dict[str, Any]:
    return {
        "id": check,
        "title": "t",
        "outcome": outcome,
        "value": value,
        "unit": unit,
        "expected": "",
        "seconds": 1.0,
        "note": "",
        "must": True,
    }


BOX = [
    line("A1", "2.15", ""),
    line("H1", 0.8, "s"),
    line("C1", 0.9, "s"),
    line("H3", 12, "ms"),
    line("D1", 0.3, "s"),
    line("H7", 310, "GB/s"),
    line("B7", 48, "GB/s"),
    line("H5", 1.2, "s"),
]


@pytest.fixture
def box(tmp_path: Path) -> Path:
    return document(tmp_path, BOX)


def document(folder: Path, checks: list[dict[str, Any]], mode: str = "box") -> Path:
    path = folder / "box-h200.json"
    facts = {"gpus": [{"name": "NVIDIA H200"}], "torch": "2.15.0"}
    path.write_text(json.dumps({"format": 1, "mode": mode, "facts": facts, "checks": checks}))
    return path


def test_a_measured_figure_takes_the_place_of_a_thought(box: Path) -> None:
    figures, told = fitted(read_kit(box))
    assert told == (
        "calibrated by box-h200.json (NVIDIA H200, torch 2.15.0): build (H1), revoke (H3), restore over nvlink (H7), restore over host (B7)"
    )
    assert built_s(figures.build.likely, figures.build_growth.likely, 8) == pytest.approx(0.8)
    assert (figures.revoke.likely, figures.revoke.source) == (0.012, "measured")
    assert figures.restore["nvlink"].likely == 310e9
    assert figures.restore["network"] == FIGURES.restore["network"]
    assert figures.build_growth == FIGURES.build_growth, "eight ranks say nothing of a thousand"


def test_the_prediction_follows_and_says_what_is_measured(box: Path) -> None:
    figures, told = fitted(read_kit(box))
    found = predict_swap(SwapScenario(ranks=8, groups={"dp": 8}, state_bytes=31e9), figures, told)
    assert found.row(WARM).likely == pytest.approx(0.8 + 7 * FIGURES.host_pair.likely)
    assert found.row(WARM).source == "reasoned", "its growth is"
    assert found.row("restore over nvlink").source == "measured"
    assert found.row("restore over nvlink").likely == pytest.approx(0.1 + FIGURES.restore_start.likely)


def test_without_a_box_of_eight_two_ranks_on_one_gpu_are_better_than_nothing(tmp_path: Path) -> None:
    one = [line("C1", 420, "ms"), line("D1", 0.3, "s", "fail"), line("H1", None, "", "skip")]
    figures, told = fitted(read_kit(document(tmp_path, one, "one")))
    assert figures.build.likely == pytest.approx(0.42)
    assert figures.revoke.likely == 0.3, "slower than was hoped is measured too"
    assert told.endswith("build (C1), revoke (D1)")


def test_a_whole_swap_is_held_against_the_model_and_put_into_nothing(box: Path) -> None:
    kit = read_kit(box)
    figures, _ = fitted(kit)
    (said,) = held_against(kit, figures)
    assert said.startswith("H5, a whole swap of 7 ranks and a spare: 1.20 s measured,")
    assert said.endswith("within")
    slow = read_kit(document(box.parent, [*BOX[:-1], line("H5", 60.0, "s")]))
    assert held_against(slow, fitted(slow)[0])[0].endswith("outside")
    assert fitted(slow)[0] == figures


@pytest.mark.parametrize(
    "odd",
    [
        line("H3", "0.01", "s"),
        line("H3", 5, "GB/s"),
        line("H3", 0, "s"),
        line("H3", -1.0, "s"),
        line("H3", None, "s"),
        line("H3", 1, "s", "skip"),
    ],
)
def test_what_is_no_measurement_changes_nothing(tmp_path: Path, odd: dict[str, Any]) -> None:
    figures, told = fitted(read_kit(document(tmp_path, [odd])))
    assert figures == FIGURES
    assert told.startswith("not calibrated: box-h200.json")


def test_lines_are_as_good_as_the_document(tmp_path: Path, box: Path) -> None:
    lines = tmp_path / "checks.jsonl"
    lines.write_text("\n".join(json.dumps(one) for one in BOX) + "\n")
    assert fitted(read_kit(lines))[0].revoke.likely == fitted(read_kit(box))[0].revoke.likely


def test_a_cpus_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="of a dry run: its figures are of a CPU"):
        read_kit(document(tmp_path, BOX, "dry"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checks": 3}', '{"checks": [{"outcome": "ok"}]}', "\x00"])
def test_what_is_no_result_of_the_kit_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(PlannerError, match="is no result of the GPU kit"):
        read_kit(path)
    with pytest.raises(PlannerError, match="cannot be read"):
        read_kit(tmp_path / "absent.json")
