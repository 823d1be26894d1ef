"""Everything that determines a simulation except its seed, and the checkpoint intervals that follow from it."""

from __future__ import annotations

import math

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.analysis.closed_forms import daly
from rackrun.chaos.planner.inputs.failure_traces import FailureTrace
from rackrun.chaos.planner.inputs.failures import FailureProcess, FailureSource, UnitFailure, failures_of, units
from rackrun.chaos.planner.inputs.fleet import Fleet, FleetJob
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts
from rackrun.chaos.planner.inputs.repair_crews import Crews
from rackrun.chaos.planner.model.fleet_simulation import FleetSimulation
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.model.outcome import FleetOutcome
from rackrun.chaos.planner.model.policy_adapter import Policy
from rackrun.checkpoint.commit.snapshot_interval import NS, IntervalPolicy, ObservedCosts, choose_interval
from rackrun.coordinator.user_code.child_setup import find
from rackrun.core.policy.choice import parse_policy, parse_weights

__all__ = ["CHECKPOINT_S", "Case", "chosen_intervals", "rates", "simulate"]

CHECKPOINT_S = 300.0
"""Seconds between checkpoints on disk where nothing ever goes back to one, as the runtime chooses by itself."""
_RUN_S = 1e6


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a simulation except its seed."""

    fleet: Fleet
    job: FleetJob
    costs: PlanCosts = PlanCosts()
    processes: tuple[FailureProcess, ...] = ()
    trace: tuple[tuple[float, UnitFailure], ...] = ()
    """Recorded failures, used instead of processes."""
    horizon_s: float = 30 * 86400.0
    crews: int | None = None
    policy: str = ""
    """The value of ``rackrun --policy``: rungs, ``no-RUNG``, or MODULE:FUNCTION."""
    weights: str = ""
    intervals: Intervals | None = None
    """None: `chosen_intervals`."""

    def __post_init__(self) -> None:
        if not 0 < self.horizon_s < math.inf:
            raise PlannerError(f"{self.horizon_s} s leave no time to simulate.", remedy="give days above 0.")
        Crews(self.crews)  # refuses an impossible number

    def source(self, seed: int) -> FailureSource:
        """Return the source of failures for one seed. Raises PlannerError if nothing ever fails."""
        if self.trace:
            return FailureTrace(self.trace, self.horizon_s)
        if not self.processes:
            raise PlannerError("nothing ever fails in this plan.", remedy="give --tray-mtbf, --preset or --trace.")
        return failures_of(self.processes, self.fleet, seed, self.horizon_s)


def simulate(case: Case, seed: int, *, shortcut: bool = True, checked: bool = False) -> FleetOutcome:
    """Simulate one run. The same case and seed give the same outcome, in any process."""
    rules, name = parse_policy(case.policy)
    return FleetSimulation(
        fleet=case.fleet,
        job=case.job,
        costs=case.costs,
        intervals=case.intervals or chosen_intervals(case),
        source=case.source(seed),
        horizon_s=case.horizon_s,
        rules=rules,
        weights=parse_weights(case.weights),
        function=_function(name) if name else None,
        crews=case.crews,
        shortcut=shortcut,
        checked=checked,
    ).run()


def chosen_intervals(case: Case) -> Intervals:
    """Return the intervals for a case.

    Snapshots are taken as often as the runtime chooses. Checkpoints on disk follow Daly's interval for the failures
    that memory does not survive, and are at least as far apart as one takes to be written.
    """
    costs, job = case.costs, case.job
    to_memory, to_disk = rates(case)
    snapshot = 0
    if job.state == "mirror":
        observed = ObservedCosts(
            steps=1,
            step_ns=round(costs.step_s * NS),
            snapshots=1,
            snapshot_ns=max(round(costs.snapshot_s * NS), 1),
            run_ns=round(_RUN_S * NS),
            failures=max(round(_RUN_S * to_memory), 1),
        )
        snapshot = choose_interval(observed, IntervalPolicy()).steps
    every_s = daly(costs.checkpoint_s, 1 / to_disk) if to_disk and costs.checkpoint_s else CHECKPOINT_S
    return Intervals(snapshot=snapshot, checkpoint=max(math.ceil(max(every_s, costs.write_s) / costs.step_s), 1))


def rates(case: Case) -> tuple[float, float]:
    """Return the rates of failures that strike the job, per second: those that state in memory survives, and the
    others.

    The failures of a trace are counted.
    """
    share = case.job.ranks(case.fleet) / case.fleet.total_gpus
    found = dict.fromkeys(("gpu", "tray", "rack"), 0.0)
    for process in case.processes:
        if not process.stalls:
            found[process.domain] += process.rate * units(case.fleet, process.domain)
    for _, strike in case.trace:
        found[strike.domain] += 1 / case.horizon_s
    small, whole = share * (found["gpu"] + found["tray"]), found["rack"]
    if case.job.state == "disk":
        return 0.0, small + whole
    return (small, whole) if case.job.state == "mirror" else (small + whole, 0.0)


def _function(name: str) -> Policy:
    try:
        found = find(name)
    except Exception as error:
        raise PlannerError(
            f"the policy {name} cannot be loaded: {type(error).__name__}: {error}.",
            remedy="name a function of (failure, view) as MODULE:FUNCTION, with the module in this directory or in PYTHONPATH.",
        ) from error
    if not callable(found):
        raise PlannerError(f"the policy {name} is no function.", remedy="name a function of (failure, view).")
    return found
