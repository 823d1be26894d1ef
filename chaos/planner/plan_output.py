"""Print the results of `rackctl plan` for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from rackrun.chaos.planner.analysis.applicable_formulas import Formula
from rackrun.chaos.planner.analysis.recommendation import Candidate, Grid, GridPoint, GridSurvey
from rackrun.chaos.planner.inputs.option_values import spell
from rackrun.chaos.planner.predict import Prediction

__all__ = ["render_grid", "render_prediction", "render_survey"]

_BAR = 24


def render_grid(console: Console, found: Grid) -> None:
    """Print the grid: one line for each number of spares that was tried."""
    _say(
        console,
        f"{found.gpus} GPUs in {found.racks} racks, {found.days:g} days, {len(found.seeds)} seeds; "
        f"±: the interval in which the mean lies with 95 %",
    )
    _points(console, found.points)


def render_survey(console: Console, found: GridSurvey) -> None:
    """Print what follows the grid."""
    best = found.best
    _say(console, "")
    _say(
        console,
        f"best     {best.spares_per_rack} spare GPUs in each rack, {best.spare_racks} spare racks: {best.ranks} ranks, "
        f"{best.gpus - best.ranks} GPUs spare",
    )
    _say(
        console,
        f"         {best.goodput} of all GPU-time is productive; {best.price:.4f} GPU-hours are paid for a productive one",
    )
    _say(console, f"         the job breaks {found.breaks_a_day:.3g} times a day; {_rungs(best)}")
    _say(console, f"saving   {found.advice}")
    formulas = ", ".join(
        f"{name} {value:.2%}" if name == "waste" else f"{name} {spell(value)}"
        for name, value in found.interval_formulas.items()
    )
    _say(console, f"         by formula: {formulas}")
    _where(console, best)
    for title, compared in (("policy", found.policies), ("saving", found.intervals)):
        _compared(console, title, compared)
    _tornado(console, found)
    if found.guessed:
        _say(console, "")
        _say(console, f"guessed, not measured: {', '.join(found.guessed)}. rackctl plan calibrate measures them.")


def render_prediction(console: Console, found: Prediction) -> None:
    """Print the predicted throughput of a small job."""
    _say(console, f"keeps {found.kept} of its throughput without faults{_beside(found.formula, found.kept.mean)}")
    _say(
        console,
        f"goodput (ETTR) {found.wall}, from the first step on; {found.kills:.1f} kills a run, {found.kept.seeds} runs",
    )
    rungs = ", ".join(f"{count:.1f} {name}" for name, count in found.rungs.items())
    _say(console, f"answered by: {rungs or 'nothing'}")
    if found.guessed:
        _say(console, f"guessed, not measured: {', '.join(found.guessed)}")


def _points(console: Console, points: Iterable[GridPoint]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in (
        "",
        "spares/rack",
        "spare racks",
        "ranks",
        "goodput",
        "paid/productive",
        "wall (ETTR)",
        "formula",
        "gap",
    ):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("whole", justify="right", no_wrap=True)
    table.add_column("formula", justify="right", no_wrap=True)
    for one in points:
        wall, whole = one.formulas["wall"], one.formulas["whole"]
        gap = wall.gap(one.wall.mean)
        table.add_row(
            "*" if one.front else "",
            str(one.spares_per_rack),
            str(one.spare_racks),
            str(one.ranks),
            str(one.goodput),
            f"{one.price:.4f}",
            str(one.wall),
            _value(wall),
            "-" if gap is None else f"{gap:+.2%}",
            f"{one.whole.mean:.1%}",
            _value(whole),
        )
    console.print(table, markup=False, highlight=False)
    _say(
        console,
        "* on the front: no other plan has more goodput over wall time for the same price, or the same for less",
    )
    for why in dict.fromkeys(
        f"{formula.name}: {formula.why_not}" for one in points for formula in one.formulas.values() if formula.why_not
    ):
        _say(console, f"- {why}")


def _where(console: Console, best: GridPoint) -> None:
    total = best.where.total()
    parts = [(name, getattr(best.where, name) / total) for name in best.where.__struct_fields__]
    shown = ", ".join(f"{name} {share:.2%}" for name, share in parts if share >= 5e-5)
    _say(console, f"time     {shown}")


def _compared(console: Console, title: str, compared: Iterable[Candidate]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in (title, "goodput", "wall (ETTR)", "formulas"):
        table.add_column(column, no_wrap=True)
    for one in compared:
        beside = "; ".join(
            f"{formula.name} {_value(formula)}{_gap(formula, one.wall.mean)}" for formula in one.formulas
        )
        table.add_row(one.what, str(one.goodput), str(one.wall), beside)
    console.print()
    console.print(table, markup=False, highlight=False)


def _tornado(console: Console, found: GridSurvey) -> None:
    """Print the goodput with half and twice each assumption, as a bar between the two, with the present goodput
    marked."""
    if not found.tornado:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("assumption", "half", "goodput", "", "goodput", "twice"):
        table.add_column(column, no_wrap=True)
    values = [value for one in found.tornado for value in (one.low_goodput, one.high_goodput)]
    least, most = min(*values, found.usual), max(*values, found.usual)

    def at(value: float) -> int:
        return round((value - least) / (most - least) * (_BAR - 1)) if most > least else 0

    for one in found.tornado:
        left, right = sorted((at(one.low_goodput), at(one.high_goodput)))
        bar = [" "] * left + ["─"] * (right - left + 1) + [" "] * (_BAR - 1 - right)
        bar[at(found.usual)] = "┼"
        what = one.what if one.simulated else f"{one.what} ~"
        table.add_row(what, one.low, f"{one.low_goodput:.2%}", "".join(bar), f"{one.high_goodput:.2%}", one.high)
    console.print()
    console.print(table, markup=False, highlight=False)
    if not all(one.simulated for one in found.tornado):
        _say(console, "~ by arithmetic: the seconds that a cost accounts for are scaled, the decisions stay the same")


def _rungs(one: GridPoint) -> str:
    counts = ", ".join(f"{count:.0f} {name}" for name, count in sorted(one.rungs.items(), key=lambda pair: -pair[1]))
    return f"answered by {counts}" if counts else "nothing ever struck it"


def _value(formula: Formula) -> str:
    return "-" if formula.value is None else f"{formula.value:.2%}"


def _gap(formula: Formula, simulated: float) -> str:
    gap = formula.gap(simulated)
    return "" if gap is None else f" (gap {gap:+.2%})"


def _beside(formula: Formula, simulated: float) -> str:
    if formula.value is None:
        return f"; {formula.name} does not apply: {formula.why_not}"
    return f"; {formula.name} {formula.value:.2%}{_gap(formula, simulated)}"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
