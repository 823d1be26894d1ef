"""``rackctl chaos``: break a job on purpose, and see whether anything was lost."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rackrun.chaos.doctor import examine
from rackrun.chaos.plan import read_plan
from rackrun.chaos.run import Summary, run_plan

__all__ = ["chaos"]

chaos = typer.Typer(
    name="chaos",
    help="Break a job on purpose, and see whether anything was lost.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

UNKNOWN = 3
_WORDS = {True: "true", False: "FALSE", None: "unknown"}
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@chaos.command(
    epilog="Example: rackctl chaos run examples/chaos/rank_killed.yaml -- --nproc-per-node 5 --spares 1 train.py"
)
def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="YAML or JSON; see examples/chaos.")],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="rackrun's options, the script, its arguments. {out}: the folder of the run."
        ),
    ],
    seed: Annotated[int | None, typer.Option(help="Instead of the plan's.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: a new one in ./chaos-report.", show_default=False)
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The reference/ of an earlier run, instead of a new run without faults.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="It hangs when it takes longer. Default: from the reference.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the job without faults, and with those of PLAN, and compare: losses, samples and weights bit for bit, the ending, what is left.

    Exit codes: 0 it is as the plan expects; 1 it is not; 2 bad usage; 3 unknown: a strike was not done, or took no effect.
    """
    told = Console(stderr=True)
    folder = out or Path("chaos-report") / f"{plan.stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    summary = run_plan(
        read_plan(plan),
        command,
        out=folder,
        seed=seed,
        reference=reference,
        limit_s=limit,
        tell=lambda line: told.print(f"chaos: {line}", highlight=False, markup=False),
    )
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        _render(Console(), summary)
    if summary.holds is not True:
        raise typer.Exit(UNKNOWN if summary.holds is None else 1)


@chaos.command(epilog="Example: rackctl chaos doctor --json")
def doctor(as_json: Json = False) -> None:
    """What this machine can inject, and what not, and why."""
    found = examine()
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    table = Table(box=None, pad_edge=False)
    for column in ("fault", "family", "", "how, or why not"):
        table.add_column(column)
    for one in found:
        table.add_row(
            one.fault, one.family, "yes" if one.can else "no", one.how + (f"; {one.remedy}" if one.remedy else "")
        )
    Console().print(table)


def _render(console: Console, summary: Summary) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for verdict in summary.verdicts:
        table.add_row(verdict.oracle, _WORDS[verdict.holds], verdict.because)
    console.print(table, markup=False)
    for strike in summary.strikes:
        whom = ", ".join(strike.whom)
        console.print(
            f"struck   after step {strike.step}: {strike.fault} of {whom}: {strike.detail}",
            highlight=False,
            markup=False,
        )
    for line in summary.recoveries:
        console.print(f"recovery {line}", highlight=False, markup=False)
    console.print(f"verdict  {_WORDS[summary.holds]}; {summary.out}", highlight=False, markup=False)
