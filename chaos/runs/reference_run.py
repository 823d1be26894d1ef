"""Run a job without faults, as the reference for a run with faults.

``reference.json`` in its folder names the command; `rackrun.chaos.runs.run_plan` lists the other files.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rackrun.chaos.base.job_command import arguments, check_script
from rackrun.chaos.evidence.explanations import last_words
from rackrun.chaos.evidence.run_evidence import Trace, read_trace
from rackrun.chaos.testbed.job_under_test import JobUnderTest
from rackrun.errors import UsageError
from rackrun.protocol.encodable import clean

__all__ = ["Reference", "ReferenceRun", "make_folder", "read_reference", "run_reference", "writable"]

REFERENCE_LIMIT_S = 3600.0


class ReferenceRun(NamedTuple):
    """A run without faults of another command, which must compute the same."""

    folder: Path
    command: Sequence[str]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``reference.json``."""

    command: tuple[str, ...]
    seconds: float
    monotonic_s: float = 0.0
    """The host's monotonic clock when the run was started."""
    step_by_step: bool = False


def run_reference(
    command: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    step_by_step: bool = False,
    limit_s: float | None = None,
) -> Trace:
    """Run the job without faults, and return what it computed.

    Raises `UsageError` when it fails, does not end within ``limit_s`` seconds (an hour by default), or commits no step.
    """
    check_script(command)
    make_folder(folder)
    with JobUnderTest(folder, arguments(command, folder), env=env, step_by_step=step_by_step) as job:
        job.let_go_on()
        ended = job.finish(REFERENCE_LIMIT_S if limit_s is None else limit_s)
    trace = read_trace(folder / "run", folder / "inside")
    said = last_words(folder, trace)
    look = f"mend the script first: run it by hand, and look at {folder / 'stderr.txt'}."
    if ended.exit_code is None:
        where = f"stood after step {trace.steps - 1}" if trace.steps else "had not done a step"
        raise UsageError(
            f"the run without faults did not end within {ended.seconds:.0f} s; it {where}.{said}",
            remedy=f"give it more time (limit_s, --limit), or fewer steps; if it hangs, look at {folder / 'stderr.txt'}.",
        )
    if ended.exit_code != 0:
        raise UsageError(f"the run without faults ended with exit code {ended.exit_code}.{said}", remedy=look)
    if not trace.steps:
        raise UsageError(
            "the run without faults committed no step, so there is nothing to compare.",
            remedy=f"use @rackrun.elastic and run.steps() in the script; {look}",
        )
    told = Reference(
        command=tuple(command), seconds=ended.seconds, monotonic_s=job.started_s, step_by_step=step_by_step
    )
    (folder / "reference.json").write_bytes(msgspec.json.encode(told))
    return trace


def read_reference(folder: Path, command: Sequence[str], *, step_by_step: bool) -> Reference:
    """Read the reference in ``folder``. Raises `UsageError` if there is none, or it is of another command."""
    try:
        found = msgspec.json.decode((folder / "reference.json").read_bytes(), type=Reference)
    except (OSError, msgspec.MsgspecError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"{folder} is no run without faults: reference.json: {why}.",
            remedy="name the folder reference/ of an earlier run.",
        ) from error
    if found.command != tuple(command):
        raise UsageError(
            f"{folder} is a run of another command: {shlex.join(found.command)}.", remedy="compare like with like."
        )
    if step_by_step and not found.step_by_step:
        raise UsageError(
            f"{folder} was not looked at step by step.", remedy="leave out --reference, or --step-by-step."
        )
    return found


def make_folder(folder: Path) -> None:
    """Create the folder of a run. Raises `UsageError` if it holds an earlier run or cannot be written."""
    writable(folder)
    if any(path.name in ("summary.json", "reference", "faulted", "run") for path in folder.iterdir()):
        raise UsageError(f"{folder} holds an earlier run.", remedy="name another --out, or remove that one.")


def writable(folder: Path, *, option: str = "--out") -> None:
    """Create ``folder`` if it does not exist, and check that it can be written, and named in reports. Raises
    `UsageError`."""
    if clean(str(folder.absolute())) != str(folder.absolute()):
        raise UsageError(
            f"{clean(str(folder.absolute()))} is no UTF-8, and the reports could not name it.",
            remedy=f"choose another {option}.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".probe").touch()
        (folder / ".probe").unlink()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}.", remedy=f"choose another {option}."
        ) from error
