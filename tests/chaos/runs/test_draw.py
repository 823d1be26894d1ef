"""A seed is a job and a plan, whose end is known before it starts."""

from __future__ import annotations

from pathlib import Path

from rackrun.chaos.base.job_layout import JobLayout
from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.table.fault_table import all_faults
from rackrun.chaos.injectors.doctor import check_plan
from rackrun.chaos.plan.definition import Plan, check
from rackrun.chaos.plan.survivability import Label, check_budget, judge_plan
from rackrun.chaos.runs.draw_run import FLAGS, VARIANTS, draw_flags, draw_run
from rackrun.topology.model.rack_file import read_rack_file

SEEDS = 100


def anything(_plan: Plan, _layout: JobLayout) -> bool:
    return True


def test_the_same_seed_is_the_same_run() -> None:
    assert draw_run(7, allowed=anything) == draw_run(7, allowed=anything)
    assert draw_run(7, allowed=anything) != draw_run(8, allowed=anything)


def test_what_is_drawn_can_be_injected_here_and_expects_what_it_is_labelled() -> None:
    labels = set()
    for seed in range(SEEDS):
        drawn = draw_run(seed)
        labels.add(drawn.label)
        check(drawn.plan)
        check_plan(drawn.plan)
        check_budget(drawn.plan, drawn.layout)
        assert judge_plan(drawn.plan, drawn.layout).label is drawn.label
        assert drawn.plan.expect == ("stops" if drawn.label is Label.BEYOND else "survives")
    assert labels == {Label.SURVIVABLE, Label.BEYOND}


def test_every_fault_is_drawn_once_it_can_be_injected(tmp_path: Path) -> None:
    """Whoever adds a fault says here what campaigns may draw of it."""
    names = {name_of(kind) for kind in all_faults()}
    assert names <= VARIANTS.keys()
    drawn = [draw_run(seed, racks=tmp_path, allowed=anything) for seed in range(4 * SEEDS)]
    assert {fault for one in drawn for fault in one.faults} == names
    on_racks = {one.layout.rack for one in drawn} - {""}
    assert {path.name for path in map(Path, on_racks)} == {"5x1.yaml"}
    assert len(read_rack_file(Path(on_racks.pop())).trays) == 5


def test_what_the_script_has_besides_is_drawn_from_a_stream_of_its_own() -> None:
    drawn = [draw_flags(seed) for seed in range(300)]
    assert drawn == [draw_flags(seed) for seed in range(300)]
    words = [set(flags.split(",")) - {""} for flags in drawn]
    assert set().union(*words) == set(FLAGS)
    assert {len(some) for some in words} == {0, 1, 2, 3}
    assert all(set(draw_flags(seed, ["random", "skip"]).split(",")) <= {"random", "skip", ""} for seed in range(50))
    assert not any("batchnorm" in draw_flags(seed, reduction="exact") for seed in range(300))


def test_the_script_of_the_campaign_knows_what_may_be_drawn() -> None:
    """By its text: it is not imported, for it would train."""
    script = (Path(__file__).resolve().parents[3] / "examples" / "chaos" / "small.py").read_text()
    for flag in FLAGS:
        assert f"``{flag}``" in script
        assert script.count(f'"{flag}"') >= 2, "it is known, and does something"
