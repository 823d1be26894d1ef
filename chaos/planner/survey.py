"""The question of a planner, answered: how many spares, where; which policy; how often to save; and what the answer hangs on.

1. Every number of spares of a rack and of spare racks, over the same seeds.
2. Of the best of these: other policies, other intervals, and each assumption halved and doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from rackrun.chaos.planner.case import Case, chosen_intervals, rates, simulate_all
from rackrun.chaos.planner.closed import daly, multi_level_waste, two_levels, young
from rackrun.chaos.planner.formulas import Formula, restart_only, takeovers_only, whole_share
from rackrun.chaos.planner.outcome import Outcome, Where
from rackrun.chaos.planner.spread import Spread, spread_of
from rackrun.chaos.planner.state import Intervals
from rackrun.chaos.planner.words import spell

__all__ = ["POLICIES", "Compared", "Point", "Survey", "Swing", "survey"]

Tell = Callable[[str], None]
POLICIES = ("", "swap,move,wait,shrink", "shrink", "restart")
"""What is compared with the policy that was asked for."""
ADVISED_S_MAX = 3600.0
"""Between checkpoints on disk, at the most: a site loses its power too, which no model here knows of."""
_COSTS = (
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


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One plan."""

    spares_per_rack: int
    spare_racks: int
    policy: str
    intervals: Intervals
    ranks: int
    gpus: int
    goodput: Spread
    """Productive GPU-time over all that is paid for."""
    wall: Spread
    """Productive time over wall time (ETTR)."""
    whole: Spread
    """The share of time in which the world was not smaller than whole, and waited for nothing."""
    rungs: dict[str, float]
    """A run's, in the mean."""
    where: Where
    """Seconds of a run, in the mean."""
    formulas: dict[str, Formula]
    """By the figure that they stand beside: ``wall``, ``whole``."""
    front: bool = False
    """No other plan of the grid has at least this goodput over wall time for at most this price, and one of them better."""

    @property
    def price(self) -> float:
        """GPU-hours that are paid for, for each productive one."""
        return 1 / self.goodput.mean if self.goodput.mean > 0 else float("inf")


class Swing(msgspec.Struct, frozen=True, kw_only=True):
    """What the goodput is when one assumption is another; all else, spares too, stays."""

    what: str
    low: str
    low_goodput: float
    high: str
    high_goodput: float

    @property
    def size(self) -> float:
        return abs(self.high_goodput - self.low_goodput)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    goodput: Spread
    wall: Spread
    formulas: tuple[Formula, ...] = ()


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    gpus: int
    racks: int
    days: float
    seeds: tuple[int, ...]
    breaks_a_day: float
    """Of the best plan."""
    advice: str
    """How often to save."""
    advised: Intervals
    interval_formulas: dict[str, float]
    """Seconds of work between two, by formula and level; ``waste``: the share of time that goes into saving and what is done again."""
    best: Point
    points: tuple[Point, ...]
    policies: tuple[Compared, ...]
    intervals: tuple[Compared, ...]
    usual: float
    """The best plan's goodput with the first seed, with which assumptions are swung."""
    tornado: tuple[Swing, ...]
    guessed: tuple[str, ...]
    """Costs that nobody has measured."""


class _Run(NamedTuple):
    case: Case
    seed: int


def survey(
    case: Case,
    spares: Iterable[int],
    racks: Iterable[int],
    seeds: Sequence[int],
    *,
    given: Intervals | None = None,
    processes: int = 1,
    tell: Tell = lambda line: None,  # noqa: ARG005
) -> Survey:
    """``case``: its job's spares are not looked at. ``given``: intervals that are not to be chosen, where they are not 0. Raises PlannerError
    before anything is simulated."""
    cases = [_given(_with(case, spares_per_rack=each, spare_racks=whole), given) for each in spares for whole in racks]
    for one in cases:
        one.job.ranks(one.fleet)
        one.source(0)
    tell(f"{len(cases)} plans x {len(seeds)} seeds")
    outcomes = _each(cases, seeds, processes)
    points = _front([_point(one, found) for one, found in zip(cases, outcomes, strict=True)])
    best_at = max(range(len(points)), key=lambda at: (points[at].goodput.mean, -at))
    best, chosen = points[best_at], cases[best_at]
    tell(f"the best has {best.spares_per_rack} spares a rack and {best.spare_racks} spare racks; what it hangs on")
    advised, advice, formulas = _advice(chosen, outcomes[best_at])
    return Survey(
        gpus=case.fleet.total_gpus,
        racks=case.fleet.racks,
        days=case.horizon_s / 86400,
        seeds=tuple(seeds),
        breaks_a_day=sum(one.breaks for one in outcomes[best_at]) / len(seeds) / (case.horizon_s / 86400),
        advice=advice,
        advised=advised,
        interval_formulas=formulas,
        best=best,
        points=tuple(points),
        policies=_policies(chosen, seeds, processes),
        intervals=_intervals(chosen, advised, seeds, processes),
        usual=outcomes[best_at][0].goodput,
        tornado=_tornado(chosen, outcomes[best_at][0].goodput, seeds[:1], processes),
        guessed=tuple(case.costs.guessed()),
    )


def _each(cases: Sequence[Case], seeds: Sequence[int], processes: int) -> list[list[Outcome]]:
    runs = [_Run(case, seed) for case in cases for seed in seeds]
    found = list(simulate_all(runs, processes))
    return [found[at : at + len(seeds)] for at in range(0, len(found), len(seeds))]


def _point(case: Case, outcomes: Sequence[Outcome]) -> Point:
    intervals = case.intervals or chosen_intervals(case)
    first, count = outcomes[0], len(outcomes)
    names = sorted({name for one in outcomes for name in one.rungs})
    rungs = {name: sum(one.rungs.get(name, 0) for one in outcomes) / count for name in names}
    where = Where(
        **{name: sum(getattr(one.where, name) for one in outcomes) / count for name in Where.__struct_fields__}
    )
    return Point(
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


def _front(points: Sequence[Point]) -> list[Point]:
    def beaten(one: Point) -> bool:
        mine = (one.wall.mean, -one.price)
        others = [(other.wall.mean, -other.price) for other in points]
        return any(wall >= mine[0] and price >= mine[1] and (wall, price) != mine for wall, price in others)

    return [msgspec.structs.replace(one, front=not beaten(one)) for one in points]


def _policies(case: Case, seeds: Sequence[int], processes: int) -> tuple[Compared, ...]:
    names = list(dict.fromkeys([case.policy, *POLICIES]))
    cases = [msgspec.structs.replace(case, policy=name) for name in names]
    found = []
    for name, one, outcomes in zip(names, cases, _each(cases, seeds, processes), strict=True):
        only_disk = msgspec.structs.replace(one, job=msgspec.structs.replace(one.job, state="disk"))
        intervals = one.intervals or chosen_intervals(one)
        formulas = restart_only(only_disk, intervals) if name == "restart" else ()
        found.append(_compared(name or "cheapest", outcomes, formulas))
    return tuple(found)


def _advice(case: Case, outcomes: Sequence[Outcome]) -> tuple[Intervals, str, dict[str, float]]:
    """Checkpoints by Daly, for how often the simulated job went back to one; one time more, as nobody knows that it never will."""
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


def _intervals(case: Case, advised: Intervals, seeds: Sequence[int], processes: int) -> tuple[Compared, ...]:
    now = case.intervals or chosen_intervals(case)
    others = {
        f"checkpoint every {steps} steps": Intervals(snapshot=now.snapshot, checkpoint=steps)
        for steps in sorted({max(now.checkpoint // 2, 1), now.checkpoint, now.checkpoint * 2, advised.checkpoint})
    }
    if now.snapshot:
        others |= {
            f"snapshot every {steps} steps": Intervals(snapshot=steps, checkpoint=now.checkpoint)
            for steps in sorted({max(now.snapshot // 2, 1), now.snapshot * 2})
        }
    cases = [msgspec.structs.replace(case, intervals=one) for one in others.values()]
    return tuple(
        _compared(name, outcomes, ()) for name, outcomes in zip(others, _each(cases, seeds, processes), strict=True)
    )


def _compared(what: str, outcomes: Sequence[Outcome], formulas: tuple[Formula, ...]) -> Compared:
    return Compared(
        what=what,
        goodput=spread_of([one.goodput for one in outcomes]),
        wall=spread_of([one.wall_goodput for one in outcomes]),
        formulas=formulas,
    )


def _tornado(case: Case, usual: float, seeds: Sequence[int], processes: int) -> tuple[Swing, ...]:
    """Intervals are chosen anew where they were not given."""
    pairs = list(_swung(case))
    cases = [one for _, low, high in pairs for one in (low[1], high[1])]
    means = [spread_of([one.goodput for one in found]).mean for found in _each(cases, seeds, processes)]
    swings = [
        Swing(what=what, low=low[0], low_goodput=means[2 * at], high=high[0], high_goodput=means[2 * at + 1])
        for at, (what, low, high) in enumerate(pairs)
    ]
    shown = [one for one in swings if max(abs(one.low_goodput - usual), abs(one.high_goodput - usual)) > 0]
    return tuple(sorted(shown, key=lambda one: -one.size))


def _swung(case: Case) -> Iterable[tuple[str, tuple[str, Case], tuple[str, Case]]]:
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
            )
    for name in _COSTS:
        if value := getattr(case.costs, name):
            low_costs, high_costs = (replace(case.costs, **{name: value * factor}) for factor in (0.5, 2.0))
            yield (
                name,
                (f"{value / 2:g}", replace(case, costs=low_costs)),
                (f"{2 * value:g}", replace(case, costs=high_costs)),
            )
    if case.crews is not None:
        fewer, more = max(case.crews // 2, 1), 2 * case.crews
        yield "crews", (str(fewer), replace(case, crews=fewer)), (str(more), replace(case, crews=more))


def _with(case: Case, **job: int) -> Case:
    return msgspec.structs.replace(case, job=msgspec.structs.replace(case.job, **job))


def _given(case: Case, given: Intervals | None) -> Case:
    if given is None or not (given.snapshot or given.checkpoint):
        return case
    chosen = chosen_intervals(case)
    snapshot, checkpoint = given.snapshot or chosen.snapshot, given.checkpoint or chosen.checkpoint
    return msgspec.structs.replace(case, intervals=Intervals(snapshot=snapshot, checkpoint=checkpoint))
