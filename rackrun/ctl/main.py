"""The commands of ``rackctl``. A run is named by its directory or its id; without a name, the newest run is used."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console

from rackrun.checkpoint.base.location import local_path
from rackrun.coordinator.report.run_report import read_report
from rackrun.ctl.ckpt.ckpt_commands import ckpt
from rackrun.ctl.control_commands import add_control
from rackrun.ctl.coordinator_client import Run, RunOption, ask, one_run, running
from rackrun.ctl.plugin_commands import WithPlugins
from rackrun.ctl.run_render import render_report, render_result, render_status
from rackrun.ctl.topology_commands import topology
from rackrun.errors import InternalError, RackrunError, UsageError
from rackrun.launch.run.run_directory import Result, find_run, read_json
from rackrun.version import __version__

__all__ = ["CRASHED", "app", "main"]

app = typer.Typer(
    name="rackctl",
    cls=WithPlugins,
    help="Inspect and control runs of rackrun, their checkpoints, and racks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app.add_typer(ckpt)
add_control(app)
app.add_typer(topology)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rackrun {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version of rackrun and exit."
        ),
    ] = False,
) -> None:
    """Options of ``rackctl`` itself; its help is `app`'s."""


CRASHED = 70
"""Exit code if rackctl itself failed (``EX_SOFTWARE`` of sysexits.h), which is no verdict on anything."""
_NO_READER = 128 + signal.SIGPIPE
"""Exit code if the reader of the output has gone, as a shell reports it of tools that SIGPIPE ends."""


def main() -> None:
    """Run ``rackctl``.

    Exit codes: 0 done; 1 a check failed (a ledger with errors, a damaged checkpoint); 2 bad usage; 70 rackctl itself
    failed, which says nothing about what was asked; 130 interrupted; 141 the reader of the output has gone.
    """
    with _output() as output:
        try:
            _run(output)
        except (BrokenPipeError, SystemExit) as error:
            if not _has_no_reader(output, error):
                raise
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what is left in its buffer
            sys.exit(_NO_READER)


@contextlib.contextmanager
def _output() -> Iterator[int]:
    """Give a descriptor of standard output that stays when a library redirects it; -1: it has none, or is closed."""
    try:
        descriptor = os.dup(sys.stdout.fileno()) if sys.stdout else -1
    except (OSError, ValueError):
        yield -1
        return
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _has_no_reader(output: int, error: BaseException) -> bool:
    """Return whether ``error`` is a broken pipe, or the SystemExit of a library because of one, and ``output`` is a pipe
    whose reader has gone."""
    if output < 0 or not any(isinstance(one, BrokenPipeError) for one in (error, error.__context__)):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def _run(output: int) -> NoReturn:
    """Run the command and end with its exit code, as `main` says. ``output``: standard output; what is raised when it
    has no reader any more is left to the caller (`_has_no_reader`)."""
    try:
        _refuse_remote(sys.argv[1:])
        code = app(prog_name="rackctl", standalone_mode=False)
        if sys.stdout:  # None: it was closed before the start
            sys.stdout.flush()  # what cannot be written is an error here, and not when the interpreter ends
        sys.exit(code if isinstance(code, int) else 0)
    except RackrunError as error:
        print(f"rackctl: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else CRASHED if isinstance(error, InternalError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:  # Python would give it the exit code of a verdict
        if _has_no_reader(output, error):
            raise
        if hasattr(error, "format_message"):  # a ClickException, of click or of typer's own copy of it
            _refuse_usage(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            print("rackctl: error: there is no room for the output. Remedy: make room where it goes.", file=sys.stderr)
            sys.exit(CRASHED)
        traceback.print_exc()
        print(
            f"rackctl: internal error: {type(error).__name__}: {error} Remedy: this is a bug of rackrun; please report it with the lines above.",
            file=sys.stderr,
        )
        sys.exit(CRASHED)


def _refuse_usage(error: Any) -> NoReturn:
    """Print what is wrong with the command line, and end with exit code 2."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "rackctl"
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        what = " ".join(error.format_message().split()).replace(", unable to parse string as an integer", "")
        what = what.replace(", unable to parse string as a number", "").rstrip(".")
        print(f"rackctl: error: {what}. Remedy: see {command} --help.", file=sys.stderr)
    sys.exit(error.exit_code)


def _refuse_remote(words: list[str]) -> None:
    """Refuse remote paths: only `rackctl ckpt` reads from object stores. A command after -- is not checked."""
    for word in words[: words.index("--")] if "--" in words else words:
        value = word.partition("=")[2] if word.startswith("--") else word
        if "://" in value and words[0] != "ckpt":
            local_path(value, "the place")


@app.command(epilog="Example: rackctl status out/ --json")
def status(run: Run = None, option: RunOption = None, as_json: Json = False) -> None:
    """Show the state of a run. Ranks, spares, trays, generation and progress, or how it ended."""
    place = find_run(one_run(run, option))
    result = read_json(place / "result.json", Result)
    if result is not None:
        if as_json:
            print(msgspec.json.encode({"running": False, "result": result}).decode())
        else:
            render_result(Console(markup=False, emoji=False), result)
        return
    found = json.loads(ask(place, "/api/status"))
    if as_json:
        print(json.dumps({"running": True, **found}))
    else:
        render_status(Console(markup=False, emoji=False), found)


@app.command(epilog="Example: rackctl report 20260131-120000-ab12 --json")
def report(run: Run = None, option: RunOption = None, as_json: Json = False) -> None:
    """Show what happened in a run. Recoveries stage by stage, goodput (ETTR), where the time went, and the check of the ledger.

    Exit code 1: a sample was counted twice, or rows are missing.
    """
    found = read_report(find_run(one_run(run, option)) / "journal.sqlite")
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        render_report(Console(markup=False, emoji=False), found)
    if not found.ledger.ok:
        raise typer.Exit(1)


@app.command(epilog="Example: rackctl stop out/")
def stop(run: Run = None, option: RunOption = None) -> None:
    """End a run at its next step boundary, or at once if all ranks wait and none comes. A second stop ends it at once."""
    place = running(one_run(run, option))
    answer = json.loads(ask(place, "/api/stop", data=b'{"because": "rackctl stop"}'))
    print(answer.get("text", "stopping at the next step boundary"))  # a run of an older version says nothing


@app.command("close-breaker", epilog="Example: rackctl close-breaker out/")
def close_breaker(run: Run = None, option: RunOption = None) -> None:
    """Act on GPU verdicts held back. The circuit breaker holds them; use this after you have ruled out the switch.

    rackctl topology check --run lists these verdicts.
    """
    place = running(one_run(run, option))
    ask(place, "/api/close-breaker", data=b"{}")
    print("the breaker is closed")


if __name__ == "__main__":
    main()
