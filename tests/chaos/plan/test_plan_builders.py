"""Plans in Python are the plans that files have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest

import rackrun.chaos
from rackrun.chaos import (
    Kill,
    Pause,
    Plan,
    PlanError,
    buddy_of,
    burst,
    draw_plan,
    every,
    exactly,
    flip_flop,
    heal,
    inject,
    last,
    majority,
    make_plan,
    minority,
    neighbour_of,
    one,
    par,
    quiet,
    seq,
    several,
    swizzle,
)
from rackrun.chaos.faults.table.fault_table import Fault
from rackrun.chaos.injectors.doctor import check_plan
from rackrun.chaos.plan.definition import AtStep, Inject, Seq, plan_from

KILL = {"do": "inject", "fault": {"fault": "kill"}, "target": {"who": "one", "of": "rank"}}
A_KILL = inject(Kill(), one("rank"))
PAUSE = {"fault": {"fault": "pause"}, "target": {"who": "minority", "of": "tray"}}


@pytest.mark.parametrize(
    ("built", "told"),
    [
        (A_KILL, KILL),
        (inject(Kill(), one("rank"), step=6, plus_s=0.5), {**KILL, "when": {"at": "step", "step": 6, "plus_s": 0.5}}),
        (
            inject(Kill(), one("rank"), point="gate.after", nth=2),
            {**KILL, "when": {"at": "point", "point": "gate.after", "nth": 2}},
        ),
        (inject(Kill(), one("rank"), time_s=3.0), {**KILL, "when": {"at": "time", "s": 3.0}}),
        (inject(Kill(), one("rank"), plus_s=3.0), {**KILL, "when": {"at": "now", "plus_s": 3.0}}),
        (seq(A_KILL, quiet(5), heal()), {"do": "seq", "parts": [KILL, {"do": "quiet", "steps": 5}, {"do": "heal"}]}),
        (par(A_KILL, A_KILL), {"do": "par", "parts": [KILL, KILL]}),
        (every(2.0, A_KILL, times=3), {"do": "every", "mean_s": 2.0, "part": KILL, "times": 3}),
        (burst(3, 2.0, A_KILL), {"do": "burst", "times": 3, "within_s": 2.0, "part": KILL}),
        (
            flip_flop(Pause(), minority("tray"), on_s=1.0, off_s=2.0, times=2),
            {"do": "flip_flop", **PAUSE, "on_s": 1.0, "off_s": 2.0, "times": 2},
        ),
        (swizzle(Pause(), minority("tray"), over_s=4.0), {"do": "swizzle", **PAUSE, "over_s": 4.0}),
        (
            inject(Kill(), exactly("rank", 0, 3)),
            {**KILL, "target": {"who": "exactly", "kind": "rank", "names": ["0", "3"]}},
        ),
        (inject(Kill(), exactly("coordinator")), {**KILL, "target": {"who": "exactly", "kind": "coordinator"}}),
        (inject(Kill(), several("rank", 2)), {**KILL, "target": {"who": "several", "of": "rank", "count": 2}}),
        (inject(Kill(), majority("rank")), {**KILL, "target": {"who": "majority", "of": "rank"}}),
        (
            inject(Kill(), neighbour_of(last("rank"))),
            {**KILL, "target": {"who": "neighbour_of", "whom": {"who": "last", "of": "rank"}}},
        ),
        (
            inject(Kill(), buddy_of(one("tray"))),
            {**KILL, "target": {"who": "buddy_of", "whom": {"who": "one", "of": "tray"}}},
        ),
    ],
)
def test_what_is_built_is_what_is_written(built: Any, told: dict[str, Any]) -> None:
    assert make_plan(built, seed=7) == plan_from({"plan": told, "seed": 7})


def test_several_parts_follow_each_other_within_a_budget() -> None:
    plan = make_plan(A_KILL, quiet(2), slots=2, expect="stops", name="a story")
    assert plan == plan_from(
        {
            "plan": {"do": "seq", "parts": [KILL, {"do": "quiet", "steps": 2}]},
            "budget": {"slots": 2},
            "expect": "stops",
            "name": "a story",
        }
    )


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: one("gpu"), "no kind 'gpu' .* give one of rank, spare"),  # type: ignore[arg-type]
        (make_plan, "no parts"),
        (lambda: inject(Kill(), one("rank"), step=3, time_s=1.0), "at one moment"),
        (lambda: inject(Kill(), one("rank"), time_s=1.0, plus_s=1.0), "plus_s counts from a step"),
        (lambda: make_plan(inject(Kill(), one("storage"))), "kill cannot strike a storage"),
        (lambda: make_plan(inject(Kill(), several("rank", 2)), slots=1), "never fits into a budget of 1 slots"),
        (lambda: make_plan(inject(Pause(), one("tray")), trays=0), "never fits into a budget of 0 trays"),
    ],
)
def test_what_means_nothing_is_refused(build: Callable[[], object], what: str) -> None:
    with pytest.raises(PlanError, match=what) as refused:
        build()
    assert refused.value.remedy


# -- what is exported
def test_all_that_is_exported_is_there_and_every_fault_is_among_it() -> None:
    for name in rackrun.chaos.__all__:
        assert getattr(rackrun.chaos, name) is not None
    assert {fault.__name__ for fault in get_args(Fault)} <= set(rackrun.chaos.__all__)
    with pytest.raises(AttributeError, match="earthquake"):
        rackrun.chaos.earthquake  # type: ignore[attr-defined]  # noqa: B018 - it is not there


def test_no_name_that_is_exported_is_a_module_s() -> None:
    """``from rackrun.chaos import plan`` would give one or the other, by what was imported before."""
    code = "import rackrun.chaos as c, pkgutil; print(sorted(set(c.__all__) & {m.name for m in pkgutil.iter_modules(c.__path__)}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_package_loads_nothing_until_it_is_asked() -> None:
    code = "import sys, rackrun.chaos; print([name for name in sys.modules if name.startswith('rackrun.chaos.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- drawn plans
@pytest.mark.parametrize("spares", [0, 1, 5])
def test_a_drawn_plan_strikes_early_enough_loses_no_more_than_there_are_spares_for_and_can_be_had(spares: int) -> None:
    drawn = [draw_plan(seed, steps=10, spares=spares) for seed in range(40)]
    for plan in drawn:
        check_plan(plan)
        assert isinstance(plan.plan, Seq)
        strikes = [part for part in plan.plan.parts if isinstance(part, Inject)]
        assert sum(part.fault.loses for part in strikes) == min(spares, 3)
        assert all(isinstance(part.when, AtStep) and 0 <= part.when.step < 7 for part in strikes)
        errors = [part.fault for part in strikes if part.fault.loses]
        assert len(errors) == len({json.dumps(repr(error)) for error in errors})
    assert len({str(plan.plan) for plan in drawn}) > 10
    assert draw_plan(3, steps=10, spares=spares) == draw_plan(3, steps=10, spares=spares)


def test_a_script_that_is_too_short_is_refused() -> None:
    with pytest.raises(PlanError, match="3 steps, too few"):
        draw_plan(1, steps=3, spares=1)


def test_a_plan_is_a_value() -> None:
    assert isinstance(make_plan(A_KILL), Plan)
    assert make_plan(A_KILL) == make_plan(A_KILL)
