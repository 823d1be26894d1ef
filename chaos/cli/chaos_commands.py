"""``rackctl chaos``: break a job on purpose, and see whether anything was lost."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from rackrun.chaos.cli.campaign_page import tally_line, write_overview
from rackrun.chaos.cli.chaos_output import plain, render, render_soak, render_sums
from rackrun.chaos.injectors.doctor import examine
from rackrun.chaos.plan.definition import Plan, read_plan, write_plan
from rackrun.chaos.plan.definition import schema as schema_of_plans
from rackrun.chaos.report.run_text import NAMES, markdown, one_line
from rackrun.chaos.report.write_reports import make_report
from rackrun.chaos.runs.campaign import TallySums, run_campaign
from rackrun.chaos.runs.draw_run import FLAGS
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.chaos.runs.shrink_failure import NotFailing, reduce_plan
from rackrun.chaos.runs.soak import SOAK_FAULTS, run_soak
from rackrun.chaos.runs.torchrun import run_outside
from rackrun.errors import InternalError, RackrunError, UsageError
from rackrun.launch.run.run_directory import read_json

__all__ = ["chaos"]

chaos = typer.Typer(
    name="chaos",
    help="Run jobs with faults on purpose. Then check that nothing is lost.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

UNKNOWN, INTERRUPTED = 3, 130


class _OfAJob(TyperCommand):
    """A command that takes a job's command after ``--``.

    It explains what to do where ``--`` was left out, since rackrun's options would then be taken for this command's. An
    error of the harness itself becomes an internal error, so that it is not taken for a verdict on the job.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError:
            raise
        except RackrunError as error:
            raise InternalError(str(error), remedy="the harness has failed, not the job: please report it.") from error

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {*ctx.help_option_names, *(name for param in self.params for name in param.opts)}
        strange = [word for word in args if word.startswith("--") and word.partition("=")[0] not in known]
        if strange and "--" not in args:
            raise UsageError(
                f"{strange[0]} is no option of rackctl chaos {self.name}.",
                remedy=f"put rackrun's options and the script behind --; see rackctl chaos {self.name} -h.",
            )
        return super().parse_args(ctx, args)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@chaos.command(
    cls=_OfAJob,
    epilog="Example: rackctl chaos run examples/chaos/rank_killed.yaml -- --nproc-per-node 5 --spares 1 train.py",
)
def run(  # noqa: PLR0913, PLR0917 - one for each option
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="Plan with faults, as YAML or JSON; examples/chaos has some.")
    ],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="Options of rackrun, the script, and its arguments. {out} becomes the folder of the run.",
        ),
    ],
    seed: Annotated[int | None, typer.Option(help="Seed. Default: the plan's.", show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the results. Default: a new one in ./chaos-report.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder reference/ of an earlier run. Default: a new run without faults.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="A longer run counts as a hang. Default: one minute and ten times the run without faults.",
            show_default=False,
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="rackrun or torchrun. With torchrun, COMMAND is torchrun's, and the script reports its steps.",
        ),
    ] = "rackrun",
    step_by_step: Annotated[
        bool,
        typer.Option(
            "--step-by-step",
            help="Inject exactly at steps and name the first difference. Ranks record their state and wait for the harness: slower.",
        ),
    ] = False,
    may_differ: Annotated[
        list[str] | None,
        typer.Option(
            "--may-differ",
            metavar="NAME",
            help="Untracked variable that does not affect training, such as a list for a plot. Repeatable; * matches anything.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a job with and without faults. It runs twice; losses, samples, weights and leftovers are compared.

    Exit codes: 0 as the plan expects; 1 not as it expects; 2 bad usage; 3 unknown: a fault was not injected, had no
    effect, or came too late; 70 rackctl itself failed; 130 interrupted.
    """
    told = Console(stderr=True, markup=False, emoji=False)
    folder = out or _new(plan.stem)

    def tell(line: str) -> None:
        told.print(f"chaos: {line}", highlight=False, markup=False)

    if launcher not in ("rackrun", "torchrun"):
        raise UsageError(f"--launcher {launcher} is not known.", remedy="give rackrun or torchrun.")
    if launcher == "torchrun":
        if reference is not None or step_by_step:
            raise UsageError(
                "--reference and --step-by-step need rackrun in the job.",
                remedy="leave them out, or --launcher torchrun.",
            )
        _outside(read_plan(plan), command, folder, seed, limit, tell, as_json=as_json)
        return
    try:
        summary = run_plan(
            read_plan(plan),
            command,
            out=folder,
            seed=seed,
            reference=reference,
            limit_s=limit,
            step_by_step=step_by_step,
            may_differ=may_differ or (),
            tell=tell,
        )
    except KeyboardInterrupt:
        tell(f"interrupted; there is no verdict, and what there is lies in {folder}")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        render(Console(markup=False, emoji=False), summary)
    if summary.holds is not True:
        raise typer.Exit(UNKNOWN if summary.holds is None else 1)


@chaos.command(
    cls=_OfAJob,
    epilog="Example: rackctl chaos campaign --seeds 0:500 --tally tally.jsonl --limit 30 -- examples/chaos/small.py {wrap} {reduction} 40 {out} {flags}",
)
def campaign(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="The script and its arguments. {wrap} becomes ddp or fsdp, {reduction} fast or exact, {flags} further features, {out} the folder of the run.",
        ),
    ],
    seeds: Annotated[str, typer.Option(metavar="A:B", help="Seeds from A to B-1.")],
    tally: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="File with a line for each seed. Seeds that it already has are not run again."
        ),
    ],
    limit: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="MINUTES", help="Start no new seed after this time. Default: no limit.", show_default=False
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs at the same time.")] = 2,
    flags: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help=f"Features from which {{flags}} is drawn. Default: {','.join(FLAGS)}.",
            show_default=False,
        ),
    ] = ",".join(FLAGS),
    as_json: Json = False,
) -> None:
    """Do many random runs. Each seed draws a job and a plan from all faults that this machine can inject.

    Runs that fail keep their folders in FILE.runs. Exit codes: 0 all are right; 1 one is wrong; 2 bad usage; 3 one is
    unknown; 70 rackctl itself failed; 130 interrupted.
    """
    wanted, features = _seeds(seeds), _flags(flags)
    told, sums, interrupted = Console(stderr=True, markup=False, emoji=False), TallySums(), False
    try:
        run_campaign(
            wanted,
            command,
            tally=tally,
            limit_s=None if limit is None else limit * 60,
            jobs=jobs,
            tell=lambda line: told.print(f"chaos: {line}", highlight=False, markup=False, soft_wrap=True),
            flags=features,
            sums=sums,
        )
    except Exception:
        if sums.seeds:  # the sums so far, even after a failure
            render_sums(Console(markup=False, emoji=False), sums)
        raise
    except KeyboardInterrupt:
        interrupted = True
        told.print(
            f"chaos: interrupted; {tally} has {sums.seeds} seeds, and the same command goes on from there",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if sums.seeds:
        page = tally.with_name(f"{tally.name}.html")
        write_overview(tally, page)
        told.print(f"chaos: all of them are in {page}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(msgspec.json.encode(plain(sums)).decode())
    else:
        render_sums(Console(markup=False, emoji=False), sums)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if sums.wrong:
        raise typer.Exit(1 if any(line.holds is False for line in sums.wrong) else UNKNOWN)


@chaos.command(
    cls=_OfAJob,
    epilog="Example: rackctl chaos soak --minutes 30 --faults-per-minute 2 -- --nproc-per-node 6 --spares 2 examples/chaos/small.py ddp fast 1000000",
)
def soak(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            help="Options of rackrun, a script that trains for longer than the soak, and its arguments.",
        ),
    ],
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of the soak in minutes.")] = 30.0,
    per_minute: Annotated[
        float, typer.Option("--faults-per-minute", min=0.01, help="Mean number of faults per minute.")
    ] = 2.0,
    faults: Annotated[
        str, typer.Option(help=f"Kinds of faults, separated by commas: {', '.join(SOAK_FAULTS)}.")
    ] = "kill",
    seed: Annotated[int, typer.Option(help="Seed of the random moments.")] = 0,
    at_least: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Fail if less than this share of the throughput is kept, for example 0.98. Default: no limit.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the results. Default: a new one in ./chaos-report.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Inject faults at a steady rate. Report the share of the throughput that is kept, and where the rest went.

    Exit codes: 0 nothing was lost and enough was kept; 1 otherwise; 2 bad usage; 3 unknown: too little time without
    faults.
    """
    told = Console(stderr=True, markup=False, emoji=False)
    found = run_soak(
        command,
        out=out or _new("soak"),
        minutes=minutes,
        per_minute=per_minute,
        faults=[name.strip() for name in faults.split(",")],
        seed=seed,
        tell=lambda line: told.print(f"chaos: {line}", highlight=False, markup=False),
    )
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        render_soak(Console(markup=False, emoji=False), found)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    if found.trouble or (at_least is not None and found.kept is not None and found.kept < at_least):
        raise typer.Exit(1)
    if found.kept is None:
        raise typer.Exit(UNKNOWN)


@chaos.command(epilog="Example: rackctl chaos report chaos-report/rank_killed-20260131-120000 --open")
def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The --out folder of a run, or the tally of a campaign.")],
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    line: Annotated[bool, typer.Option("--line", help="Print one line, for a log.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for the summary page of a build.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the reports of a run again. These are report.html, report.md, and trace.json for https://ui.perfetto.dev.

    For a tally: one page of all its runs, beside it. Exit code 0 whatever the verdict; 2: OUT holds no run with faults.
    """
    if out.is_file():
        page = out.with_name(f"{out.name}.html")
        lines = write_overview(out, page)
        print(msgspec.json.encode(lines).decode() if as_json else tally_line(lines))
    else:
        page, summary = out / "report.html", make_report(out)
        if as_json:
            print(msgspec.json.encode(summary).decode())
        elif as_markdown:
            print(markdown(summary), end="")
        else:
            print(one_line(summary))
    page = page.resolve()
    if not (line or as_json or as_markdown):
        print(page)
    if show and not webbrowser.open(page.as_uri()):
        raise UsageError("there is no browser here.", remedy=f"copy {page} to where there is one: it is one file.")


@chaos.command(cls=_OfAJob, epilog="Example: rackctl chaos reduce chaos-report/hang/resolved.json --repeats 5")
def reduce(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="File resolved.json of a run that failed.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="Command of the run. Default: that of summary.json beside PLAN.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of runs after which a smaller plan counts as right.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the results. Default: reduced/ beside PLAN. Plans that were tried there are not tried again.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="As rackctl chaos run --limit.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the smallest plan that still fails. First in the simulator if it can play the job, then with real runs.

    Exit codes: 0 a smaller plan was found; 2 bad usage; 3 the plan did not fail in --repeats runs.
    """
    told = Console(stderr=True, markup=False, emoji=False)
    found, beside = read_plan(plan), read_json(plan.resolve().parent / "summary.json", Summary)
    try:
        reduced = reduce_plan(
            found,
            command or _command_of(beside, plan),
            out=out or plan.resolve().parent / "reduced",
            repeats=repeats,
            reference=plan.resolve().parent / "reference",
            limit_s=limit,
            may_differ=beside.may_differ if beside is not None else (),
            tell=lambda line: told.print(f"chaos: {line}", highlight=False, markup=False),
        )
    except KeyboardInterrupt:
        told.print(
            "chaos: interrupted; what was tried is not tried again by the same command", highlight=False, markup=False
        )
        raise typer.Exit(INTERRUPTED) from None
    except NotFailing as error:
        told.print(f"rackctl: {error}", highlight=False, markup=False)
        raise typer.Exit(UNKNOWN) from error
    if as_json:
        print(msgspec.json.encode(reduced).decode())
        return
    print(write_plan(reduced.plan), end="")
    print(f"\n{reduced.diagnosis}" if reduced.diagnosis else f"\nwrong: {', '.join(reduced.wrong)}")
    print(f"{reduced.runs} runs; again: {reduced.out}/repro.sh")


def _command_of(found: Summary | None, plan: Path) -> list[str]:
    if found is None:
        raise UsageError(f"there is no summary.json beside {plan}.", remedy="give the command that was run, after --.")
    return list(found.command)


@chaos.command(epilog="Example: rackctl chaos schema > plan.schema.json")
def schema() -> None:
    """Print the JSON Schema of plans. Editors and other programs can use it."""
    print(msgspec.json.format(msgspec.json.encode(schema_of_plans()), indent=1).decode())


@chaos.command(epilog="Example: rackctl chaos doctor --json")
def doctor(as_json: Json = False) -> None:
    """Show which faults can be injected here. And why the others cannot."""
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
    Console(markup=False, emoji=False).print(table)


def _outside(
    plan: Plan,
    command: list[str],
    folder: Path,
    seed: int | None,
    limit_s: float | None,
    tell: Callable[[str], None],
    *,
    as_json: bool,
) -> None:
    plan = plan if seed is None else msgspec.structs.replace(plan, seed=seed)
    found = run_outside(plan, command, out=folder, limit_s=limit_s, tell=tell)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        console = Console(markup=False, emoji=False)
        good = ", ".join("never" if one is None else f"{one:.2f} s" for one in found.good_step_s) or "-"
        for line in (
            f"ended    exit code {found.exit_code}, {found.steps} steps",
            f"losses   {'the same' if found.same_losses else 'OTHERS'}, bit for bit",
            f"samples  {found.samples_twice} used twice",
            f"again    {found.steps_again} finished steps were computed once more",
            f"recovery {good} until all ranks had finished a new step",
            *(f"missed   {text}" for text in found.missed),
            *(f"left     {text}" for text in found.left),
            f"verdict  {NAMES[found.holds]}; {found.out}",
        ):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if found.holds is not True:
        raise typer.Exit(UNKNOWN if found.holds is None else 1)


def _new(name: str) -> Path:
    """Return a folder below ``chaos-report`` that does not exist yet."""
    first = Path("chaos-report") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    more = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return first if not first.exists() else next(folder for folder in more if not folder.exists())


def _flags(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in FLAGS]:
        raise UsageError(f"--flags knows no {', '.join(unknown)}.", remedy=f"give some of {', '.join(FLAGS)}.")
    return names


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise UsageError(f"--seeds {text} is no range.", remedy="give FIRST:END, as 0:500.")
    return range(int(first), int(end))
