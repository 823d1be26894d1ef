"""``rackctl plan``: how many spares, which policy, how often to save; and two helpers: ``calibrate`` and ``predict``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.analysis.recommendation import survey
from rackrun.chaos.planner.analysis.simulation_case import Case
from rackrun.chaos.planner.inputs.calibrate import calibrated, read_run
from rackrun.chaos.planner.inputs.failure_traces import read_trace
from rackrun.chaos.planner.inputs.failures import FailureProcess
from rackrun.chaos.planner.inputs.fleet import FleetJob, fleet_of
from rackrun.chaos.planner.inputs.operation_costs import PlanCosts, read_costs, write_costs
from rackrun.chaos.planner.inputs.option_values import duration, numbers, pair, sizes, volume
from rackrun.chaos.planner.inputs.published_failure_rates import PRESETS, preset
from rackrun.chaos.planner.model.job_state import Intervals
from rackrun.chaos.planner.plan_output import render_grid, render_prediction, render_survey
from rackrun.chaos.planner.predict import predict as predicted
from rackrun.chaos.planner.swap_model.fit_measurements import fitted, held_against, read_kit
from rackrun.chaos.planner.swap_model.predict_swap import SwapScenario, predict_swap
from rackrun.chaos.planner.swap_model.stage_costs import FIGURES
from rackrun.chaos.planner.swap_model.swap_table import render_swap
from rackrun.core.policy.choice import parse_policy, parse_weights

__all__ = ["plan"]

_MINUTES_MAX, _FAULTS_MAX = 5_256_000, 1_000_000
"""Ten years, and as many faults as are simulated in a minute or so."""

plan = typer.Typer(
    name="plan",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Costs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with costs, from rackctl plan calibrate. Default: guesses.", show_default=False
    ),
]


def _text(metavar: str, text: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(metavar=metavar, help=text, show_default=False)
    return found


@plan.callback(
    epilog="Example: rackctl plan --gpus 73728 --tray-mtbf 8000h --repair 4h --spares-per-rack 0,8 --spare-racks 0,1,2"
)
def answer(  # noqa: PLR0913, PLR0917 - one argument for each option
    ctx: typer.Context,
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs that are paid for; whole racks of them are used.", show_default=False)
    ] = 0,
    trays_per_rack: Annotated[int, typer.Option(help="Compute trays in a rack.")] = 18,
    gpus_per_tray: Annotated[int, typer.Option(help="GPUs in a tray.")] = 4,
    tray_mtbf: Annotated[str | None, _text("TIME", "Mean time between failures of one tray, such as 8000h.")] = None,
    from_preset: Annotated[
        str | None,
        typer.Option(
            "--preset", metavar="NAME", help=f"Use a published failure rate: {', '.join(PRESETS)}.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Replay failures from a CSV file: hours,where,kind,repair_hours.", show_default=False
        ),
    ] = None,
    repair: Annotated[
        str, typer.Option(metavar="TIME", help="Mean repair time of a tray, once a crew has begun.")
    ] = "4h",
    repair_law: Annotated[
        Literal["exponential", "fixed"], typer.Option(help="Distribution of repair times.")
    ] = "exponential",
    crews: Annotated[
        int | None, typer.Option(help="Number of repairs at the same time. Default: no limit.", show_default=False)
    ] = None,
    rack_mtbf: Annotated[
        str | None, _text("TIME", "Mean time between failures of a whole rack (power, switches). Default: never.")
    ] = None,
    rack_repair: Annotated[str, typer.Option(metavar="TIME", help="Mean repair time of a rack.")] = "8h",
    process_mtbf: Annotated[
        str | None,
        _text("TIME", "Mean time between deaths of one GPU's process that need no repair. Default: never."),
    ] = None,
    stall_mtbf: Annotated[
        str | None, _text("TIME", "Mean time between broken steps of the job without a loss. Default: never.")
    ] = None,
    weibull: Annotated[
        float, typer.Option(metavar="SHAPE", help="Weibull shape of tray failures; below 1, new trays fail more often.")
    ] = 1.0,
    lemons: Annotated[
        str | None, _text("SHARE:FACTOR", "A share of the trays fails FACTOR times as often: 0.02:10. Default: none.")
    ] = None,
    burn_in: Annotated[
        str | None,
        _text("TIME:FACTOR", "New and repaired trays fail FACTOR times as often for TIME: 100h:5. Default: no."),
    ] = None,
    spares_per_rack: Annotated[
        str, typer.Option(metavar="N,..", help="Numbers of spare GPUs per rack to try.")
    ] = "0,8",
    spare_racks: Annotated[str, typer.Option(metavar="N,..", help="Numbers of whole spare racks to try.")] = "0,1,2",
    group: Annotated[int, typer.Option(help="Ranks of a tp or ep group, which share a rack.")] = 8,
    replica: Annotated[int, typer.Option(help="Ranks of one model replica; the world shrinks by whole replicas.")] = 64,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches of a replica in a step; 0: work always divides evenly.")
    ] = 16,
    state: Annotated[
        Literal["replicas", "mirror", "disk"],
        typer.Option(
            help="Where the state of a lost rank comes from: live replicas, copies of snapshots, or only the disk."
        ),
    ] = "replicas",
    reduction: Annotated[Literal["fast", "exact"], typer.Option(help="The script's reduction.")] = "fast",
    min_ranks: Annotated[int, typer.Option(help="As rackrun --min-ranks; 0: the world never shrinks.")] = 1,
    wait_for_hardware: Annotated[float, typer.Option(metavar="SECONDS", help="As rackrun --wait-for-hardware.")] = 0.0,
    policy: Annotated[
        str, typer.Option(metavar="WHAT", help="As rackrun --policy: RUNG,.., no-RUNG,.. or MODULE:FUNCTION.")
    ] = "",
    policy_weights: Annotated[str, typer.Option(metavar="NAME=N,..", help="As rackrun --policy-weights.")] = "",
    costs: Costs = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            help="Steps between checkpoints on disk. Default: chosen, see docs/planning.md.",
            show_default=False,
        ),
    ] = None,
    snapshot_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Steps between snapshots, with --state mirror. Default: chosen.", show_default=False
        ),
    ] = None,
    days: Annotated[float, typer.Option(help="Days to simulate.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="Number of runs of each plan, each with its own seed.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Number of processes. Default: one per processor.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Recommend how many spares to have. Also which policy, and how often to save, by simulating a job on a fleet.

    The decisions come from the code that decides in real jobs. docs/planning.md explains the output and its limits.
    """
    if ctx.invoked_subcommand is not None:
        return
    if gpus < 1:
        raise PlannerError(
            f"--gpus {gpus} leaves no fleet to simulate.",
            remedy="give the GPUs that are paid for, such as --gpus 73728.",
        )
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if seeds < 1 or jobs < 1 or not 0 < days < float("inf"):
        raise PlannerError(
            f"--seeds {seeds}, --jobs {jobs} and --days {days} leave nothing to simulate.",
            remedy="give 1 or more, and days above 0.",
        )
    if sum(one is not None for one in (tray_mtbf, from_preset, trace)) != 1:
        raise PlannerError(
            "the plan needs exactly one source that says how often something fails.",
            remedy="give one of --tray-mtbf, --preset, --trace.",
        )
    fleet = fleet_of(gpus, trays_per_rack, gpus_per_tray)
    parse_policy(policy)
    parse_weights(policy_weights)
    processes: list[FailureProcess] = []
    if trace is None:
        mtbf_s = duration(tray_mtbf, "--tray-mtbf") if tray_mtbf else preset(from_preset or "").mtbf_s(gpus_per_tray)
        share, factor = _two(lemons, "--lemons", "give a share of the trays and a factor: 0.02:10.")
        young, often = pair(burn_in, "--burn-in", "give a time and a factor: 100h:5.") if burn_in else ("", "1")
        processes.append(
            FailureProcess(
                name="tray",
                domain="tray",
                mtbf_s=mtbf_s,
                repair_s=duration(repair, "--repair"),
                repair_law=repair_law,
                shape=weibull,
                lemons=share,
                lemon_factor=factor,
                burn_in_s=duration(young, "--burn-in") if young else 0.0,
                burn_in_factor=_number(often, "--burn-in", "give a time and a factor: 100h:5."),
            )
        )
        if rack_mtbf:
            processes.append(
                FailureProcess(
                    name="rack",
                    domain="rack",
                    mtbf_s=duration(rack_mtbf, "--rack-mtbf"),
                    repair_s=duration(rack_repair, "--rack-repair"),
                    repair_law=repair_law,
                )
            )
        if process_mtbf:
            processes.append(
                FailureProcess(name="process", domain="gpu", mtbf_s=duration(process_mtbf, "--process-mtbf"))
            )
        if stall_mtbf:
            every_s = duration(stall_mtbf, "--stall-mtbf") * fleet.racks
            processes.append(FailureProcess(name="stall", domain="rack", mtbf_s=every_s, stalls=True))
    case = Case(
        fleet=fleet,
        job=FleetJob(
            group=group,
            replica=replica,
            micro_batches=micro_batches,
            state=state,
            exact=reduction == "exact",
            min_ranks=min_ranks,
            wait_for_hardware_s=wait_for_hardware,
        ),
        costs=read_costs(costs) if costs else PlanCosts(),
        processes=tuple(processes),
        trace=tuple(read_trace(trace, fleet)) if trace else (),
        horizon_s=days * 86400,
        crews=crews,
        policy=policy,
        weights=policy_weights,
    )
    told, console = Console(stderr=True, markup=False, emoji=False), _console()
    found = survey(
        case,
        numbers(spares_per_rack, "--spares-per-rack"),
        numbers(spare_racks, "--spare-racks"),
        range(seed, seed + seeds),
        given=Intervals(snapshot=snapshot_every or 0, checkpoint=checkpoint_every or 0),
        processes=jobs,
        tell=lambda line: told.print(f"plan: {line}", highlight=False, markup=False),
        show=lambda grid: None if as_json else render_grid(console, grid),
    )
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        render_survey(console, found)


@plan.command(epilog="Example: rackctl plan calibrate out/ > costs.json")
def calibrate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The --out-dir of a run, its journal, or the output of rackctl report --json."
        ),
    ],
) -> None:
    """Print the costs that a real run shows. Each has its origin. What the run does not show stays a guess."""
    print(write_costs(calibrated(read_run(run))), end="")


@plan.command(
    epilog="Example: rackctl plan predict --costs costs.json --ranks 4 --spares 2 --faults-per-minute 2 --minutes 30"
)
def predict(
    ranks: Annotated[int, typer.Option(help="Number of ranks; each is a whole replica.")],
    spares: Annotated[int, typer.Option(help="Number of spares.")],
    faults_per_minute: Annotated[float, typer.Option(help="Ranks killed per minute.")],
    minutes: Annotated[float, typer.Option(help="Length of the job in minutes.")] = 30.0,
    costs: Costs = None,
    policy: Annotated[str, typer.Option(metavar="RUNG,..", help="As rackrun --policy.")] = "",
    seeds: Annotated[int, typer.Option(help="Number of runs.")] = 10,
    as_json: Json = False,
) -> None:
    """Predict the throughput under faults. How much of it a small job keeps while its ranks are killed."""
    if not 0 < faults_per_minute < float("inf") or seeds < 1:
        raise PlannerError(
            f"--faults-per-minute {faults_per_minute} and --seeds {seeds} leave nothing to simulate.",
            remedy="give a rate above 0, and a seed or more.",
        )
    if not 0 < minutes * faults_per_minute * seeds <= _FAULTS_MAX or not minutes <= _MINUTES_MAX:
        raise PlannerError(
            f"--minutes {minutes} of {faults_per_minute} faults per minute, --seeds {seeds} times, cannot be simulated.",
            remedy=f"give a time above 0, of {_MINUTES_MAX} minutes and {_FAULTS_MAX} faults in all at the most.",
        )
    found = predicted(
        read_costs(costs) if costs else PlanCosts(),
        ranks=ranks,
        spares=spares,
        every_s=60 / faults_per_minute,
        horizon_s=60 * minutes,
        seeds=range(seeds),
        policy=policy,
    )
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        render_prediction(_console(), found)


@plan.command(epilog="Example: rackctl plan swap --ranks 1024 --groups tp:8,dp:128 --state 12.7GB")
def swap(  # noqa: PLR0913, PLR0917 - one argument for each option
    ranks: Annotated[int, typer.Option(help="Number of ranks.")],
    groups: Annotated[
        str, _text("AXIS:SIZE,..", "Axes of the mesh: tp:8,dp:128. Default: one data-parallel group.")
    ] = "",
    state_of_rank: Annotated[str, typer.Option("--state", metavar="BYTES", help="State of one rank: 12.7GB.")] = "5GB",
    link: Annotated[
        Literal["nvlink", "host", "network"],
        typer.Option(
            help="Source of the new rank's state: a replica's GPU over NVLink, a snapshot on its host, or another host."
        ),
    ] = "nvlink",
    gate: Annotated[
        Literal["host", "gpu"], typer.Option(help="gpu: also build a communicator as large as the world.")
    ] = "host",
    at_once: Annotated[bool, typer.Option(help="Build all groups of a rank at the same time.")] = False,
    kit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Result of the GPU kit: its document or its checks.jsonl. Default: not calibrated.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    as_costs: Annotated[
        bool, typer.Option(help="Print a file for --costs, with takeover_s from this prediction.")
    ] = False,
) -> None:
    """Predict how long a swap takes on GPUs. Each stage says whether it is measured or predicted."""
    measured = read_kit(kit) if kit else None
    figures, told = (
        fitted(measured)
        if measured
        else (FIGURES, "not calibrated: rackctl plan swap --kit FILE takes what the GPU kit measured")
    )
    question = SwapScenario(
        ranks=ranks,
        groups=sizes(groups, "--groups") or {"dp": ranks},
        state_bytes=volume(state_of_rank, "--state"),
        link=link,
        gate=gate,
        at_once=at_once,
    )
    found = predict_swap(question, figures, told)
    if measured:
        found = msgspec.structs.replace(found, held_against=held_against(measured, figures))
    if as_costs:
        whole = found.row("whole swap, spare warm")
        origin = {"takeover_s": f"rackctl plan swap, {ranks} ranks, {whole.source}; {told}"}
        print(write_costs(PlanCosts(takeover_s=whole.likely, state_bytes=question.state_bytes, origin=origin)), end="")
    elif as_json:
        print(msgspec.json.encode(found).decode())
    else:
        render_swap(_console(), found)


def _console() -> Console:
    """Return the console; a file or a pipe gets a width that has room for the tables."""
    return Console(markup=False, emoji=False) if sys.stdout.isatty() else Console(width=140, markup=False, emoji=False)


def _two(text: str | None, what: str, remedy: str) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    left, right = pair(text, what, remedy)
    return _number(left, what, remedy), _number(right, what, remedy)


def _number(text: str, what: str, remedy: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise PlannerError(f"{what} has {text!r} where a number belongs.", remedy=remedy) from error
