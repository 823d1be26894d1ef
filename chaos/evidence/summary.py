"""Read and write ``summary.json``: the result of a run with faults, for programs and for the reports."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import rackrun
from rackrun.chaos.evidence.run_evidence import Verdict
from rackrun.coordinator.report.goodput import Goodput
from rackrun.errors import UsageError

__all__ = [
    "FORMAT",
    "FaultTimes",
    "Host",
    "StrikeSummary",
    "Summary",
    "host_facts",
    "read_summary",
    "schema",
    "write_summary",
]

FORMAT = 2
NAME = "summary.json"


class StrikeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One strike, and how the job responded to it."""

    number: int = 0
    """The number of the strike in the run, from 0; ``strike`` in ``history.jsonl``."""
    fault: str
    family: str = ""
    whom: tuple[str, ...]
    slots: tuple[str, ...] = ()
    """The slots of what was struck."""
    step: int
    """The newest committed step at the strike; -1 if there was none."""
    at_s: float
    """When the strike was ordered, in seconds since the run was started."""
    struck_s: float | None = None
    """When it struck, if the injector knows; otherwise `at_s` counts."""
    took: bool | None
    """Whether it took effect; None if the job ended before that was known."""
    detail: str
    """What confirmed it, or why it did not take effect."""
    back_s: float | None = None
    """When it was taken back."""
    noticed: str = ""
    """The coordinator's first event about it: ``WorkerExited: SIGKILL``."""
    inferred: bool = False
    """Whether that event is linked to the strike by its time alone: it names nothing that was struck."""
    detect_s: float | None = None
    """Seconds from the strike to that event."""
    decide_s: float | None = None
    """Seconds from the strike to the plan of the new generation."""
    recover_s: float | None = None
    """Seconds from the strike until every rank of the new world had committed a unit."""
    generation: int | None = None
    """The generation that followed from it; None if none did."""
    rung: str = ""
    first_step: int | None = None
    """The first step that the new world committed."""
    taken_over: tuple[str, ...] = ()
    """The ranks that changed their slot: ``rank 2: tray-00/2 -> tray-00/4``."""


class FaultTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of all strikes of one fault, by nearest rank: below 100 strikes, the 99th percentile is the largest."""

    fault: str
    strikes: int
    """The number of strikes that took effect."""
    detected: int
    detect_s_p50: float | None
    detect_s_p99: float | None
    recovered: int
    recover_s_p50: float | None
    recover_s_p99: float | None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The software and the machine of a run."""

    rackrun: str = ""
    python: str = ""
    torch: str = ""
    commit: str = ""
    """The commit of the working directory, as git describes it; "" if it is in no repository."""
    system: str = ""
    machine: str = ""
    processors: int = 0
    """The number of processors that this process may use."""
    memory_bytes: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run with faults."""

    format: int = FORMAT
    plan: str
    seed: int
    expect: str
    holds: bool | None
    """Whether all oracles hold; None if that is unknown."""
    verdicts: tuple[Verdict, ...]
    strikes: tuple[StrikeSummary, ...]
    recoveries: tuple[str, ...]
    """The recoveries, in the words of ``rackctl report``."""
    faults: tuple[FaultTimes, ...] = ()
    """The times of the strikes, by the name of the fault."""
    steps: int
    """The number of different steps that were committed."""
    reference_steps: int = 0
    seconds: float
    reference_seconds: float
    exit_code: int | None = None
    """The exit code; None if the run did not end and was killed."""
    because: str = ""
    """The run's own reason for its end."""
    remedy: str = ""
    goodput: Goodput | None = None
    """Where the time went; None if there is no journal or no step in it."""
    reference_goodput: Goodput | None = None
    host: Host = Host()
    began: str = ""
    """When the run with faults was started: ISO 8601, in UTC."""
    command: tuple[str, ...]
    reference: str = ""
    """The folder of the run without faults."""
    out: str
    may_differ: tuple[str, ...] = ()
    """Names of untracked state that may differ (``--may-differ``)."""
    diagnosis: str = ""
    """What the first difference is, and its cause; "" if there is none or none was looked for."""


def read_summary(folder: Path) -> Summary:
    """Read the summary of a run. Raises `UsageError` if there is none or it has another format."""
    path = folder / NAME
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise UsageError(
                f"{path} has format {found}, this version reads format {FORMAT}.", remedy="use the one that wrote it."
            )
        return msgspec.json.decode(data, type=Summary)
    except (OSError, msgspec.MsgspecError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"{folder} holds no run with faults: summary.json: {why}.", remedy="name the --out of one."
        ) from error


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary. The file is replaced as a whole, or stays as it was."""
    partial = folder / f".{NAME}.part"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    partial.replace(folder / NAME)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``summary.json``."""
    return msgspec.json.schema(Summary)


def host_facts() -> Host:
    """Return the versions of the software and the facts about the machine."""
    return Host(
        rackrun=rackrun.__version__,
        python=sys.version.split()[0],
        torch=_version("torch"),
        commit=_output("git", "describe", "--always", "--dirty", "--abbrev=40"),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


class _Format(msgspec.Struct):
    format: int = 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Return the output of a command, or "" if it fails or does not exist."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # the repository may be in use
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=env)
        return found.stdout.strip()
    return ""


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile ``share`` (0 to 1) of the values by nearest rank; None if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] if ordered else None
