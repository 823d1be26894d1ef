"""Find the closed form that applies to a simulated figure: its name and value or, where it does not apply, the
reason."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from rackrun.chaos.planner.analysis import closed_forms
from rackrun.chaos.planner.analysis.simulation_case import Case
from rackrun.chaos.planner.inputs.failures import FailureProcess, units
from rackrun.chaos.planner.model.job_state import Intervals

__all__ = ["Formula", "restart_only", "takeovers_only", "whole_share"]

BUSY_MAX = 0.85
"""The load of repair crews above which the number of units that are down is far from a binomial distribution."""


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    """One closed form, applied to a case."""

    name: str
    value: float | None
    """The value; None if the formula does not apply."""
    why_not: str = ""

    def gap(self, simulated: float) -> float | None:
        """Return by how much the simulated figure differs from this one, as a share of this one; None without a
        value."""
        return None if not self.value else simulated / self.value - 1


def takeovers_only(case: Case, intervals: Intervals, rungs: Mapping[str, float]) -> Formula:
    """Return productive time over wall time if spares answer every failure: a renewal cycle.

    ``rungs``: how often each rung was taken; only the ratio of moves to swaps is used.
    """
    name = "renewal (ETTR)"
    others = sorted(set(rungs) - {"swap", "move"})
    if others:
        return Formula(name=name, value=None, why_not=f"it was not only swaps and moves: {', '.join(others)}")
    if why_not := _laws(case):
        return Formula(name=name, value=None, why_not=why_not)
    costs = case.costs
    moves = rungs.get("move", 0.0) / max(sum(rungs.values()), 1e-9)
    lost = costs.detect_s + costs.takeover_s + moves * costs.regroup_s + costs.first_step_s + costs.step_s / 2
    saving = costs.checkpoint_s / intervals.checkpoint if intervals.checkpoint else 0.0
    if case.job.state == "mirror" and intervals.snapshot:
        lost += intervals.snapshot * costs.step_s / 2 + costs.copy_s
        saving += costs.snapshot_s / intervals.snapshot
    step_s = costs.step_s + costs.between_steps_s
    rate = sum(_hits(case, process) for process in case.processes)
    value = closed_forms.ettr(rate, lost, saving / step_s) * costs.step_s / step_s
    return Formula(name=name, value=value)


def restart_only(case: Case, intervals: Intervals) -> tuple[Formula, Formula]:
    """Return productive time over wall time if a restart from disk answers every failure.

    The two formulas are Daly's complete expression and Meta's estimate.
    """
    costs = case.costs
    if why_not := _laws(case):
        return (
            Formula(name="Daly", value=None, why_not=why_not),
            Formula(name="ETTR (Meta)", value=None, why_not=why_not),
        )
    every_s, rate = intervals.checkpoint * costs.step_s, sum(_hits(case, process) for process in case.processes)
    restart_s = costs.detect_s + costs.start_s + costs.load_s + costs.first_step_s
    whole = closed_forms.daly_efficiency(every_s, costs.checkpoint_s, 1 / rate, restart_s)
    return (
        Formula(name="Daly", value=whole),
        Formula(name="ETTR (Meta)", value=closed_forms.meta_ettr(1, rate, restart_s, every_s, costs.checkpoint_s)),
    )


def whole_share(case: Case) -> Formula:
    """Return the share of time in which enough hardware is in order for all ranks, with each group in one rack."""
    fleet, job = case.fleet, case.job
    name = "binomial spares"
    trays = [process for process in case.processes if process.domain == "tray" and process.repair_s]
    if case.trace or not trays or any(process.domain != "tray" for process in case.processes):
        return Formula(name=name, value=None, why_not="trays are not all that fails")
    if why_not := _laws(case):
        return Formula(name=name, value=None, why_not=why_not)
    rate = sum(process.rate for process in trays)
    repair_s = sum(process.rate * process.repair_s for process in trays) / rate
    waited_s = repair_s
    for _ in range(50):  # a unit that is down does not fail
        waited_s = closed_forms.repair_time(fleet.total_trays / (1 / rate + waited_s), repair_s, case.crews)
        if math.isinf(waited_s):
            break
    busy = repair_s * fleet.total_trays / (1 / rate + waited_s) / case.crews if case.crews else 0.0
    if math.isinf(waited_s) or busy > BUSY_MAX:
        return Formula(name=name, value=None, why_not="the crews can hardly keep up")
    down = closed_forms.unavailability(1 / rate, waited_s)
    groups = job.ranks(fleet) // job.group
    if fleet.gpus % job.group == 0:  # a group fits wherever a tray is free
        need = math.ceil(groups * job.group / fleet.gpus)
        return Formula(name=name, value=closed_forms.rack_ok(fleet.total_trays, need, down))
    if fleet.rack_gpus < 2 * job.group:  # one group in each rack
        need = math.ceil(job.group / fleet.gpus)
        return Formula(
            name=name, value=closed_forms.all_racks_ok(fleet.racks, fleet.trays, need, down, fleet.racks - groups)
        )
    return Formula(name=name, value=None, why_not="a rack has several groups, each of several trays")


def _hits(case: Case, process: FailureProcess) -> float:
    """Return the rate of failures that take ranks, per second of training. A unit under repair does not fail."""
    share = 1.0 if process.domain == "rack" else case.job.ranks(case.fleet) / case.fleet.total_gpus
    if process.stalls:
        share = 1.0
    return process.rate * units(case.fleet, process.domain) * share


def _laws(case: Case) -> str:
    """Return why the case's laws of failure are not exponential, or ""."""
    if case.trace:
        return "failures are a trace's"
    special = [one.name for one in case.processes if one.shape != 1 or one.lemons or one.burn_in_s]
    return f"not exponential: {', '.join(special)}" if special else ""
