"""Tests of a script of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import rackrun.chaos
from rackrun.chaos import Kill, Pause, Plan, Summary, exactly, inject, make_plan, one, par, run_plan, seq, write_plan
from rackrun.chaos.testing import Chaos, JobOptions

JOB: JobOptions = {"ranks": 2, "spares": 2, "args": ["--steps", 10]}


def test_a_lost_rank_costs_nothing(chaos: Chaos) -> None:
    chaos.repeats("train.py", **JOB)
    plan = par(inject(Pause(for_s=3.0), exactly("rank", 0), step=3), inject(Kill(), one("rank"), step=6))
    assert_type(chaos.survives("train.py", plan=plan, **JOB), Summary)
    assert_type(chaos.stops(Path("train.py"), plan=plan, ranks=2, spares=0, options=["--policy", "stop"]), Summary)


def test_a_plan() -> None:
    plan = make_plan(seq(inject(Kill(), one("rank"), step=6)), seed=3)
    assert_type(plan, Plan)
    Path("plan.yaml").write_text(write_plan(plan))
    inject(Kill(), "everybody", step=6)  # type: ignore[arg-type]
    rackrun.chaos.earthquake  # type: ignore[attr-defined]  # noqa: B018 - it is not there


RUN = run_plan
