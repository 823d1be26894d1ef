"""Recommend how many spares to keep and where, which policy to use, and how often to save.

1. The grid: every number of spares per rack and of spare racks is simulated over the same seeds.
2. The best plan of the grid is simulated with other policies and other intervals, and with each assumption halved and
   doubled. Costs are halved and doubled by arithmetic (`rackrun.chaos.planner.analysis.sensitivity`), and so are
   intervals where nothing ever goes back to a save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from rackrun.chaos.planner.analysis.applicable_formulas import Formula, restart_only, takeovers_only, whole_share
from rackrun.chaos.planner.analysis.closed_forms import daly, multi_level_waste, two_levels, young
from rackrun.chaos.planner.analysis.parallel_runs import Runs
from rackrun.chaos.planner.analysis.seed_statistics import SeedMean, spread_of
from rackrun.chaos.planner.analysis.sensitivity import applies, resaved, rescaled
from rackrun.chaos.planner.analysis.simulation_case import Case, chosen_intervals, rates
from rackrun.chaos.planner.inputs.option_values import spell
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.model.outcome import FleetOutcome, TimeBreakdown

__all__ = ["COSTS", "POLICIES", "Candidate", "Grid", "GridPoint", "GridSurvey", "AssumptionSwing", "survey"]

Tell = Callable[[str], None]
POLICIES = ("", "swap,move,wait,shrink", "shrink", "restart")
"""The policies that are compared with the one that was asked for."""
ADVISED_S_MAX = 3600.0
"""The most seconds between checkpoints on disk that are advised: a site may lose its power, which no model here
contains."""
COSTS = (
    "detect_s",
    "takeover_s",
    "regroup_s",
    "reenter_s",
    "start_s",
    "load_s",
    "checkpoint_s",
    "snapshot_s",
    "step_s",
)


class GridPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of the grid, with its results."""

    spares_per_rack: int
    spare_racks: int
    policy: str
    intervals: Intervals
    ranks: int
    gpus: int
    goodput: SeedMean
    """Productive GPU-time over all GPU-time that is paid for."""
    wall: SeedMean
    """Productive time over wall time (ETTR)."""
    whole: SeedMean
    """The share of time in which the world had its full size and did not wait."""
    rungs: dict[str, float]
    """How often each rung was taken in a run, on average."""
    where: TimeBreakdown
    """Where the seconds of a run went, on average."""
    formulas: dict[str, Formula]
    """Closed forms by the figure that they belong to: ``wall``, ``whole``."""
    front: bool = False
    """Whether no other plan has at least this goodput over wall time for at most this price, and is better in one of
    them."""

    @property
    def price(self) -> float:
        """GPU-hours that are paid for, per productive one."""
        return 1 / self.goodput.mean if self.goodput.mean > 0 else float("inf")


class AssumptionSwing(msgspec.Struct, frozen=True, kw_only=True):
    """The goodput with another value of one assumption; everything else stays, the spares included."""

    what: str
    low: str
    low_goodput: float
    high: str
    high_goodput: float
    simulated: bool = True
    """False: computed by arithmetic, with the decisions of the best plan's run."""

    @property
    def size(self) -> float:
        return abs(self.high_goodput - self.low_goodput)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One policy or interval, to be compared with others."""

    what: str
    goodput: SeedMean
    wall: SeedMean
    formulas: tuple[Formula, ...] = ()


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The results for every number of spares that was tried."""

    gpus: int
    racks: int
    days: float
    seeds: tuple[int, ...]
    points: tuple[GridPoint, ...]


class GridSurvey(Grid, frozen=True, kw_only=True):
    """The grid, and what its best plan depends on."""

    breaks_a_day: float
    """How many times a day the best plan's job breaks."""
    advice: str
    """How often to save, in words."""
    advised: Intervals
    interval_formulas: dict[str, float]
    """Seconds of work between two saves, by formula and level; ``waste``: the share of time for saving and for work
    done again."""
    best: GridPoint
    policies: tuple[Candidate, ...]
    intervals: tuple[Candidate, ...]
    usual: float
    """The best plan's goodput with the first seed, with which each assumption is varied."""
    tornado: tuple[AssumptionSwing, ...]
    guessed: tuple[str, ...]
    """Costs that were never measured."""


def survey(
    case: Case,
    spares: Iterable[int],
    racks: Iterable[int],
    seeds: Sequence[int],
    *,
    given: Intervals | None = None,
    processes: int = 1,
    tell: Tell = lambda line: None,  # noqa: ARG005
    show: Callable[[Grid], None] = lambda grid: None,  # noqa: ARG005
) -> GridSurvey:
    """Simulate all plans, and return the grid and what the best plan depends on.

    ``case``: its job's own spares are ignored. ``given``: intervals that are not 0 are used instead of chosen ones.
    ``show`` is called with the grid as soon as it is complete. Raises PlannerError before anything is simulated.
    """
    cases = [_given(_with(case, spares_per_rack=each, spare_racks=whole), given) for each in spares for whole in racks]
    for one in cases:
        one.job.ranks(one.fleet)
        one.source(0)
    tell(f"{len(cases)} plans x {len(seeds)} seeds")
    with Runs(processes) as runs:
        runs.fetch((one, seed) for one in cases for seed in seeds)
        outcomes = [runs.outcomes(one, seeds) for one in cases]
        points = _front([_point(one, found) for one, found in zip(cases, outcomes, strict=True)])
        grid = Grid(
            gpus=case.fleet.total_gpus,
            racks=case.fleet.racks,
            days=case.horizon_s / 86400,
            seeds=tuple(seeds),
            points=tuple(points),
        )
        show(grid)
        best_at = max(range(len(points)), key=lambda at: (points[at].goodput.mean, -at))
        best, chosen, usual = points[best_at], cases[best_at], outcomes[best_at]
        tell(f"the best has {best.spares_per_rack} spares a rack and {best.spare_racks} spare racks; what it hangs on")
        advised, advice, formulas = _advice(chosen, usual)
        _fetch_ahead(runs, chosen, advised, usual, seeds)
        return GridSurvey(
            **msgspec.structs.asdict(grid),
            breaks_a_day=sum(one.breaks for one in usual) / len(seeds) / grid.days,
            advice=advice,
            advised=advised,
            interval_formulas=formulas,
            best=best,
            policies=_policies(chosen, seeds, runs),
            intervals=_intervals(chosen, advised, usual, seeds, runs),
            usual=usual[0].goodput,
            tornado=_tornado(chosen, usual[0], seeds[0], runs),
            guessed=tuple(case.costs.guessed()),
        )


def _fetch_ahead(
    runs: Runs, case: Case, advised: Intervals, usual: Sequence[FleetOutcome], seeds: Sequence[int]
) -> None:
    """Simulate everything that the best plan needs at once, so that no processor waits for the last run of a table."""
    several = [*reversed(_policy_cases(case).values()), *_interval_cases(case, advised, usual).values()]
    single = [one for _, low, high, simulated in _swung(case, usual[0]) if simulated for one in (low[1], high[1])]
    runs.fetch([(one, seed) for one in several for seed in seeds] + [(one, seeds[0]) for one in single])


def _point(case: Case, outcomes: Sequence[FleetOutcome]) -> GridPoint:
    intervals = case.intervals or chosen_intervals(case)
    first, count = outcomes[0], len(outcomes)
    names = sorted({name for one in outcomes for name in one.rungs})
    rungs = {name: sum(one.rungs.get(name, 0) for one in outcomes) / count for name in names}
    where = TimeBreakdown(
        **{name: sum(getattr(one.where, name) for one in outcomes) / count for name in TimeBreakdown.__struct_fields__}
    )
    return GridPoint(
        spares_per_rack=case.job.spares_per_rack,
        spare_racks=case.job.spare_racks,
        policy=case.policy,
        intervals=intervals,
        ranks=first.ranks,
        gpus=first.gpus,
        goodput=spread_of([one.goodput for one in outcomes]),
        wall=spread_of([one.wall_goodput for one in outcomes]),
        whole=spread_of([1 - (one.short_s + one.where.waiting + one.where.stopped) / one.wall_s for one in outcomes]),
        rungs=rungs,
        where=where,
        formulas={"wall": takeovers_only(case, intervals, rungs), "whole": whole_share(case)},
    )


def _front(points: Sequence[GridPoint]) -> list[GridPoint]:
    def beaten(one: GridPoint) -> bool:
        mine = (one.wall.mean, -one.price)
        others = [(other.wall.mean, -other.price) for other in points]
        return any(wall >= mine[0] and price >= mine[1] and (wall, price) != mine for wall, price in others)

    return [msgspec.structs.replace(one, front=not beaten(one)) for one in points]


def _policy_cases(case: Case) -> dict[str, Case]:
    names = dict.fromkeys([case.policy, *POLICIES])
    return {name: msgspec.structs.replace(case, policy=name) for name in names}


def _policies(case: Case, seeds: Sequence[int], runs: Runs) -> tuple[Candidate, ...]:
    found = []
    for name, one in _policy_cases(case).items():
        only_disk = msgspec.structs.replace(one, job=msgspec.structs.replace(one.job, state="disk"))
        intervals = one.intervals or chosen_intervals(one)
        formulas = restart_only(only_disk, intervals) if name == "restart" else ()
        found.append(_compared(name or "cheapest", runs.outcomes(one, seeds), formulas))
    return tuple(found)


def _advice(case: Case, outcomes: Sequence[FleetOutcome]) -> tuple[Intervals, str, dict[str, float]]:
    """Return the advised intervals, the advice in words, and the formulas.

    Checkpoints follow Daly's formula, for the rate at which the simulated job went back to one; one more time is added,
    since it cannot be known that it never will.
    """
    now, costs = case.intervals or chosen_intervals(case), case.costs
    times = sum(one.rungs.get("restart", 0) + one.rungs.get("relaunch", 0) for one in outcomes)
    mtbf_s = sum(one.wall_s for one in outcomes) / (times + 1)
    every_s = min(max(daly(costs.checkpoint_s, mtbf_s), costs.write_s), max(ADVISED_S_MAX, costs.write_s))
    steps = max(round(every_s / costs.step_s), 1)
    snapshots = (
        f"snapshots in memory every {now.snapshot} steps, as the runtime chooses by itself; " if now.snapshot else ""
    )
    told = (
        f"{snapshots}a checkpoint on disk every {steps} steps ({spell(steps * costs.step_s)}): the job went back to one {times} times in "
        f"{spell(sum(one.wall_s for one in outcomes))}"
    )
    formulas = {"Young": young(costs.checkpoint_s, mtbf_s), "Daly": daly(costs.checkpoint_s, mtbf_s)}
    levels, often = [costs.snapshot_s, costs.checkpoint_s], [rates(case)[0], 1 / mtbf_s]
    if now.snapshot and all(often):
        memory, disk = two_levels(levels, often)
        formulas |= {"two levels, memory": memory, "two levels, disk": disk, "waste": multi_level_waste(levels, often)}
    return Intervals(snapshot=now.snapshot, checkpoint=steps), told, formulas


def _tried_intervals(case: Case, advised: Intervals) -> dict[str, Intervals]:
    now = case.intervals or chosen_intervals(case)
    tried = {
        f"checkpoint every {steps} steps": Intervals(snapshot=now.snapshot, checkpoint=steps)
        for steps in sorted({max(now.checkpoint // 2, 1), now.checkpoint, now.checkpoint * 2, advised.checkpoint})
    }
    if now.snapshot:
        tried |= {
            f"snapshot every {steps} steps": Intervals(snapshot=steps, checkpoint=now.checkpoint)
            for steps in sorted({max(now.snapshot // 2, 1), now.snapshot * 2})
        }
    return tried


def _interval_cases(case: Case, advised: Intervals, usual: Sequence[FleetOutcome]) -> dict[str, Case]:
    """Return the intervals that have to be simulated: none where nothing ever goes back to a save."""
    if not any(one.where.redone for one in usual):
        return {}
    tried = _tried_intervals(case, advised)
    return {name: msgspec.structs.replace(case, intervals=one) for name, one in tried.items()}


def _intervals(
    case: Case, advised: Intervals, usual: Sequence[FleetOutcome], seeds: Sequence[int], runs: Runs
) -> tuple[Candidate, ...]:
    cases = _interval_cases(case, advised, usual)
    return tuple(
        _compared(
            name,
            runs.outcomes(cases[name], seeds) if cases else [resaved(case, one, intervals) for one in usual],
            (),
        )
        for name, intervals in _tried_intervals(case, advised).items()
    )


def _compared(what: str, outcomes: Sequence[FleetOutcome], formulas: tuple[Formula, ...]) -> Candidate:
    return Candidate(
        what=what,
        goodput=spread_of([one.goodput for one in outcomes]),
        wall=spread_of([one.wall_goodput for one in outcomes]),
        formulas=formulas,
    )


def _tornado(case: Case, usual: FleetOutcome, seed: int, runs: Runs) -> tuple[AssumptionSwing, ...]:
    """Vary each assumption. Intervals that were not given are chosen anew."""
    found = []
    for what, low, high, simulated in _swung(case, usual):
        if simulated:
            ends = [runs.outcomes(one, [seed])[0].goodput for one in (low[1], high[1])]
        else:
            ends = [rescaled(case, usual, what, factor).goodput for factor in (0.5, 2.0)]
        found.append(
            AssumptionSwing(
                what=what,
                low=low[0],
                low_goodput=ends[0],
                high=high[0],
                high_goodput=ends[1],
                simulated=simulated,
            )
        )
    changes = [one for one in found if {one.low_goodput, one.high_goodput} != {usual.goodput}]
    return tuple(sorted(changes, key=lambda one: -one.size))


def _swung(case: Case, usual: FleetOutcome) -> Iterable[tuple[str, tuple[str, Case], tuple[str, Case], bool]]:
    """Yield each assumption, its low and its high value with the case, and whether these have to be simulated."""
    replace = msgspec.structs.replace
    for name in ("mtbf_s", "repair_s"):
        if any(getattr(process, name) for process in case.processes) and not (
            name == "repair_s" and any(2 * process.repair_s >= case.horizon_s for process in case.processes)
        ):
            low, high = (
                tuple(replace(process, **{name: getattr(process, name) * factor}) for process in case.processes)
                for factor in (0.5, 2.0)
            )
            yield (
                name.removesuffix("_s"),
                ("half", replace(case, processes=low)),
                ("twice", replace(case, processes=high)),
                True,
            )
    for name in COSTS:
        if value := getattr(case.costs, name):
            low_costs, high_costs = (replace(case.costs, **{name: value * factor}) for factor in (0.5, 2.0))
            yield (
                name,
                (f"{value / 2:g}", replace(case, costs=low_costs)),
                (f"{2 * value:g}", replace(case, costs=high_costs)),
                not applies(name, usual),
            )
    if case.crews is not None:
        fewer, more = max(case.crews // 2, 1), 2 * case.crews
        yield "crews", (str(fewer), replace(case, crews=fewer)), (str(more), replace(case, crews=more)), True


def _with(case: Case, **job: int) -> Case:
    return msgspec.structs.replace(case, job=msgspec.structs.replace(case.job, **job))


def _given(case: Case, given: Intervals | None) -> Case:
    if given is None or not (given.snapshot or given.checkpoint):
        return case
    chosen = chosen_intervals(case)
    snapshot, checkpoint = given.snapshot or chosen.snapshot, given.checkpoint or chosen.checkpoint
    return msgspec.structs.replace(case, intervals=Intervals(snapshot=snapshot, checkpoint=checkpoint))
