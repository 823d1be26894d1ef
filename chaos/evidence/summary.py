"""What is said of a run with faults when it is over: ``summary.json``, for machines and for the reports."""

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
from rackrun.coordinator.report.run_report import Goodput
from rackrun.errors import UsageError

__all__ = [
    "FORMAT",
    "FaultTimes",
    "Host",
    "StrikeTold",
    "Summary",
    "host_facts",
    "read_summary",
    "schema",
    "write_summary",
]

FORMAT = 2
NAME = "summary.json"


class StrikeTold(msgspec.Struct, frozen=True, kw_only=True):
    """One strike, and what the job made of it."""

    number: int = 0
    """In the run, from 0: ``strike`` in ``history.jsonl``."""
    fault: str
    family: str = ""
    whom: tuple[str, ...]
    slots: tuple[str, ...] = ()
    """Where that was when it was struck."""
    step: int
    """The newest that was committed when it struck; -1: none."""
    at_s: float
    """When it was ordered, since the run was started."""
    struck_s: float | None = None
    """When it struck, where the injector knows; else `at_s` counts."""
    took: bool | None
    """None: nobody knows, the job ended first."""
    detail: str
    """What confirmed it, or why it did not take effect."""
    back_s: float | None = None
    """When it was taken back."""
    noticed: str = ""
    """What the coordinator was told, or saw, first of it: ``WorkerExited: SIGKILL``."""
    inferred: bool = False
    """That is tied to the strike by its time alone: it names nobody who was struck."""
    detect_s: float | None = None
    """Seconds from the strike until that."""
    decide_s: float | None = None
    """From the strike until the new generation was planned."""
    recover_s: float | None = None
    """From the strike until every rank of the new world had committed a unit."""
    generation: int | None = None
    """That came of it; None: none did."""
    rung: str = ""
    first_step: int | None = None
    """The first that the new world committed."""
    taken_over: tuple[str, ...] = ()
    """``rank 2: tray-00/2 -> tray-00/4``."""


class FaultTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All strikes of one fault together, by nearest rank: with fewer than 100, the 99th percentile is the largest."""

    fault: str
    strikes: int
    """That took effect."""
    detected: int
    detect_s_p50: float | None
    detect_s_p99: float | None
    recovered: int
    recover_s_p50: float | None
    recover_s_p99: float | None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What the run was made with, and on."""

    rackrun: str = ""
    python: str = ""
    torch: str = ""
    commit: str = ""
    """Of the working directory, as git describes it; "": it is in no repository."""
    system: str = ""
    machine: str = ""
    processors: int = 0
    """That this process may use."""
    memory_bytes: int = 0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    plan: str
    seed: int
    expect: str
    holds: bool | None
    """All oracles; None: unknown."""
    verdicts: tuple[Verdict, ...]
    strikes: tuple[StrikeTold, ...]
    recoveries: tuple[str, ...]
    """As ``rackctl report`` tells them."""
    faults: tuple[FaultTimes, ...] = ()
    """By the name of the fault."""
    steps: int
    """Different ones that were committed."""
    reference_steps: int = 0
    seconds: float
    reference_seconds: float
    exit_code: int | None = None
    """None: it did not end, and was killed."""
    because: str = ""
    """Why it ended, as it says."""
    remedy: str = ""
    goodput: Goodput | None = None
    """Where the time went; None: no journal, or no step in it."""
    reference_goodput: Goodput | None = None
    host: Host = Host()
    began: str = ""
    """When the run with faults was started: ISO 8601, in UTC."""
    command: tuple[str, ...]
    reference: str = ""
    """The folder of the run without faults."""
    out: str
    may_differ: tuple[str, ...] = ()
    """What was said to go into no training (``--may-differ``)."""
    diagnosis: str = ""
    """What the first difference is, and what it comes from; "": there is none, or nobody has asked."""


def read_summary(folder: Path) -> Summary:
    """Raises `UsageError` when there is none, or it is of another version."""
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
    """Whole, or the one before stays."""
    partial = folder / f".{NAME}.part"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    partial.replace(folder / NAME)


def schema() -> dict[str, Any]:
    """JSON Schema of ``summary.json``."""
    return msgspec.json.schema(Summary)


def host_facts() -> Host:
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
    """ "" when it fails, or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # somebody may be at work there
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=env)
        return found.stdout.strip()
    return ""


def quantile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] if ordered else None
