"""Print the table of `rackctl plan swap`."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from rackrun.chaos.planner.inputs.option_values import spell
from rackrun.chaos.planner.swap_model.predict_swap import Swap

__all__ = ["render_swap"]


def render_swap(console: Console, found: Swap) -> None:
    """Print the stages of a swap, and where each figure is from."""
    question = found.question
    groups = ", ".join(f"{name} {size}" for name, size in question.groups.items()) or "none"
    order = "at once" if question.at_once else "one after another"
    _say(
        console,
        f"{question.ranks} ranks, groups {groups} built {order}, {question.state_bytes / 1e9:.3g} GB of state a rank, gate on {question.gate}",
    )
    _say(console, found.calibration)
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("likely", "from", "to"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("by", overflow="fold")
    for row in found.rows:
        times = [_time(value) for value in (row.likely, row.low, row.high)]
        table.add_row(f"{'+ ' if row.counts else '  '}{row.stage}", *times, row.source, row.where)
    console.print(table, markup=False, highlight=False)
    _say(
        console,
        "+ adds up to the whole swap with a warm spare. What is computed again, and the lease of a silent host, come on top",
    )
    for line in found.held_against:
        _say(console, line)
    reasoned = [row.stage for row in found.rows if row.counts and row.source != "measured"]
    if reasoned:
        _say(console, f"predicted, not measured: {', '.join(reasoned)}")


def _time(seconds: float) -> str:
    return "?" if math.isnan(seconds) else spell(seconds)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
