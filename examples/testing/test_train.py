"""How you test your own script: the fixture ``chaos`` is there where rackrun is installed.

pytest examples/testing                      # a few seconds for each run of the script
pytest examples/testing --chaos-seed 7       # the same random plan again
"""

from __future__ import annotations

from rackrun.chaos import Kill, Pause, exactly, inject, par
from rackrun.chaos.testing import Chaos, JobOptions

JOB: JobOptions = {"ranks": 2, "spares": 2, "args": ["--steps", 10]}


def test_it_does_the_same_twice(chaos: Chaos) -> None:
    chaos.repeats("train.py", **JOB)


def test_a_rank_that_is_killed_costs_nothing(chaos: Chaos) -> None:
    chaos.survives("train.py", plan=inject(Kill(), exactly("rank", 1), step=4), **JOB)


def test_who_comes_back_late_does_no_harm_to_who_took_its_place(chaos: Chaos) -> None:
    plan = par(inject(Pause(for_s=3.0), exactly("rank", 0), step=3), inject(Kill(), exactly("rank", 1), step=6))
    chaos.survives("train.py", plan=plan, **JOB)


def test_whatever_is_drawn_is_survived(chaos: Chaos) -> None:
    chaos.survives("train.py", **JOB)


def test_where_nothing_else_is_allowed_it_stops_and_says_why(chaos: Chaos) -> None:
    plan = inject(Kill(), exactly("rank", 0), step=4)
    chaos.stops("train.py", plan=plan, ranks=2, spares=0, options=["--policy", "stop"])
