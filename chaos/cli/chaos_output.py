"""Print the results of runs, campaigns and soaks for ``rackctl chaos``."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rackrun.chaos.evidence.explanations import explain
from rackrun.chaos.evidence.summary import Summary
from rackrun.chaos.report.run_text import NAMES, one_line
from rackrun.chaos.runs.campaign import TallySums
from rackrun.chaos.runs.soak import Soak
from rackrun.protocol.ids import after_step

__all__ = ["plain", "render", "render_soak", "render_sums"]


def plain(sums: TallySums) -> dict[str, object]:
    """Return the sums of a campaign as plain values, for JSON."""
    runs = {
        family: {
            f"{label}, {NAMES[holds].lower()}": count
            for (of, label, holds), count in sorted(sums.runs.items(), key=str)
            if of == family
        }
        for family in sums.families()
    }
    return {
        "seeds": sums.seeds,
        "faults": sums.faults,
        "seconds": round(sums.seconds, 1),
        "runs": runs,
        "wrong": sums.wrong,
    }


def render_sums(console: Console, sums: TallySums) -> None:
    """Print the sums of a campaign, and a line for each run that was false or unknown."""
    table = Table(box=None, pad_edge=False)
    table.add_column("faults")
    columns = [(label, holds) for label in ("survivable", "beyond") for holds in (True, False, None)]
    for label, holds in columns:
        table.add_column(f"{label} {NAMES[holds]}", justify="right")
    for family in sums.families():
        table.add_row(family, *(str(sums.runs[family, label, holds] or "-") for label, holds in columns))
    console.print(table)
    for line in sums.wrong:
        why = "; ".join(f"{name}: {text}" for name, text in line.wrong.items())
        console.print(f"seed {line.seed} {NAMES[line.holds]}: {why}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{sums.seeds} runs, {sums.faults} faults, {sums.seconds:.0f} s", highlight=False)


def render_soak(console: Console, soak: Soak) -> None:
    """Print the result of a soak, with the time lost at each stage."""
    kept = (
        "unknown: too few steps without faults"
        if soak.kept is None
        else f"{100 * soak.kept:.2f} % of the throughput without faults"
    )
    step = (
        ""
        if soak.step_s is None
        else f", one takes {1e3 * soak.step_s:.1f} ms without faults ({soak.calm_steps} steps)"
    )
    lines = [
        f"kept     {kept}",
        f"ran      {soak.seconds:.1f} s, {soak.steps} steps{step}",
        f"faults   {soak.faults}; spares {soak.spares[0]} at the beginning, {soak.spares[1]} at the end",
    ]
    if soak.recoveries_s:
        ordered = sorted(soak.recoveries_s)
        tail = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
        lines.append(f"recovery {ordered[len(ordered) // 2]:.2f} s at the median, {tail:.2f} s p99")
    for name, seconds in msgspec.structs.asdict(soak.lost_s).items():
        share = f"{100 * seconds / soak.seconds:6.2f} %" if soak.seconds else ""
        lines.append(f"  lost   {name:8} {seconds:8.2f} s {share}")
    lines += [f"trouble  {text}" for text in soak.trouble]
    for line in [*lines, f"report   {soak.out}/soak.json"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def render(console: Console, summary: Summary) -> None:
    """Print the verdicts, strikes and recoveries of one run."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for verdict in summary.verdicts:
        table.add_row(verdict.oracle, NAMES[verdict.holds], Text(verdict.because))
    console.print(table, markup=False)
    for strike in summary.strikes:
        whom = ", ".join(strike.whom)
        console.print(
            f"struck   {after_step(strike.step)}: {strike.fault} of {whom}: {strike.detail}",
            highlight=False,
            markup=False,
        )
    for line in summary.recoveries:
        console.print(f"recovery {line}", highlight=False, markup=False)
    if summary.diagnosis:
        console.print(explain(summary), highlight=False, markup=False, soft_wrap=True)
    console.print(f"verdict  {NAMES[summary.holds]}; {summary.out}", highlight=False, markup=False)
    console.print(f"in a line: {one_line(summary)}", highlight=False, markup=False, soft_wrap=True)
