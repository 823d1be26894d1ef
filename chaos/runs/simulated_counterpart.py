"""Make the simulator's counterpart of a real job and its plan, as far as there is one.

A failure that the counterpart shows, too, is found in seconds, and lies in the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from rackrun.chaos.base.errors import PlanError, Unsupported
from rackrun.chaos.base.job_command import option
from rackrun.chaos.base.job_layout import JobLayout, layout_of, rack_of
from rackrun.chaos.faults.targets import Exactly
from rackrun.chaos.plan.definition import Inject, Par, Plan
from rackrun.chaos.plan.shrink_plan import shrink
from rackrun.chaos.simulator.cluster.simulation import SimulatedJob, Simulation
from rackrun.protocol.job_config import JobConfig

__all__ = ["counterpart", "reduced_in_simulator"]

SEEDS = 20


def counterpart(plan: Plan, command: Sequence[str], steps: int) -> SimulatedJob:
    """Return the simulated job for ``command``, whose options say how large it is, with its plan.

    Raises `Unsupported` for what has no model, and `PlanError` for a plan that does not strike by name.
    """
    layout = layout_of(command, on_rack=True)
    if layout is None:
        raise Unsupported("the command does not say how large the job is.", remedy="reduce it with real runs alone.")
    parts = plan.plan.parts if isinstance(plan.plan, Par) else (plan.plan,)
    for part in parts:
        if not isinstance(part, Inject) or not isinstance(part.target, Exactly):
            raise PlanError("the simulator repeats strikes by name and step.", remedy="give resolved.json of a run.")
    job = SimulatedJob(
        seed=0,
        config=JobConfig(
            trays_min=layout.trays,
            trays_max=layout.trays,
            spares=layout.spares,
            min_ranks=int(option(command, "--min-ranks") or 1),
        ),
        trays=layout.trays,
        slots=layout.slots,
        units=max(steps, 1),
        plan=_renamed(plan, _names(command, layout)),
        faults_s=600.0,
        must_survive=plan.expect == "survives",
    )
    Simulation(job)  # raises Unsupported for a fault without a model
    return job


def reduced_in_simulator(plan: Plan, command: Sequence[str], steps: int) -> tuple[Plan | None, str]:
    """Return the smallest plan that fails in the simulator in the same job, and what is wrong there.

    The plan is None, with the reason, where nothing fails or no counterpart exists.
    """
    try:
        job = counterpart(plan, command, steps)
    except (Unsupported, PlanError) as error:
        return None, f"the simulator has no counterpart: {error.what}"

    def fails(tried: Plan) -> str | None:
        for seed in range(SEEDS):
            if violation := Simulation(replace(job, seed=seed, plan=tried)).run().violation:
                return violation
        return None

    violation = fails(job.plan)
    if violation is None:
        return None, f"{SEEDS} runs in the simulator survive it: it is not in what the coordinator decides"
    smallest, last = shrink(job.plan, violation, fails)
    back = {mine: theirs for theirs, mine in _names(command, job).items()}
    return _renamed(smallest, back), last


def _names(command: Sequence[str], of: JobLayout | SimulatedJob) -> dict[str, str]:
    """Return the name of each real tray (``tray-00``, or as the rack file names it) -> its name in the simulator,
    ``tray-0``."""
    rack = rack_of(command)
    real = list(rack.trays) if rack is not None else [f"tray-{index:02d}" for index in range(of.trays)]
    return {name: f"tray-{index}" for index, name in enumerate(real)}


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan with the trays renamed, also within the names of slots."""

    def name_of(name: str) -> str:
        tray, slash, slot = name.rpartition("/") if "/" in name else (name, "", "")
        return f"{names.get(tray, tray)}{slash}{slot}"

    def of(part: object) -> object:
        if isinstance(part, Inject) and isinstance(part.target, Exactly):
            return msgspec.structs.replace(
                part, target=Exactly(part.target.kind, tuple(map(name_of, part.target.names)))
            )
        return part

    whole = plan.plan
    renamed = Par(parts=tuple(of(part) for part in whole.parts)) if isinstance(whole, Par) else of(whole)  # type: ignore[misc]
    return msgspec.structs.replace(plan, plan=renamed)
