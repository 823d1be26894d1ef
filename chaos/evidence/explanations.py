"""Explain the result of a run in plain words: what is wrong, and what to do about it.

The reader tests a training script and does not know the oracles.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rackrun.chaos.evidence.run_evidence import Trace
from rackrun.protocol.ids import after_step

if TYPE_CHECKING:
    from rackrun.chaos.evidence.summary import Summary

__all__ = ["explain", "last_words"]

_SAME = ("losses", "samples", "weights", "untracked")
"""Oracles that usually fail for one cause, which is reported once."""


def explain(summary: Summary) -> str:
    """Return several lines that explain the run, or "" if everything is as the plan expects."""
    if summary.holds is True:
        return ""
    wrong = {verdict.oracle: verdict.because for verdict in summary.verdicts if verdict.holds is False}
    unknown = {verdict.oracle: verdict.because for verdict in summary.verdicts if verdict.holds is None}
    lines = _of_wrong(summary, wrong) if wrong else _of_unknown(unknown)
    if summary.strikes:
        lines.append("What was done to it:")
        lines += [
            f"  {after_step(one.step)}: {one.fault} of {', '.join(one.whom)}"
            + ("" if one.took else " (without effect)")
            for one in summary.strikes
        ]
    lines += ["What became of it:", *(f"  {line}" for line in summary.recoveries)] if summary.recoveries else []
    return "\n".join(lines)


def last_words(folder: Path, trace: Trace) -> str:
    """Return why a run failed: its result's reason, and the last line of its output that is not rackrun's.

    Each is preceded by a space.
    """
    lines = [line.strip() for line in (folder / "stderr.txt").read_text(errors="replace").splitlines() if line.strip()]
    users = [line for line in lines if not line.startswith("rackrun:")]
    said = [line for line in users if "rror" in line] or users
    because = trace.result.because if trace.result is not None else ""
    return "".join(f" {text.rstrip('.')}." for text in dict.fromkeys([because, *said[-1:]]) if text)


def _of_wrong(summary: Summary, wrong: dict[str, str]) -> list[str]:
    lines = []
    told = summary.expect == "survives" and "ending" in wrong
    if "time" in wrong:
        lines += [
            f"It hangs: {wrong['time']}.",
            "Remedy: look at where its ranks stood (faulted/stderr.txt, rackctl report on faulted/run); give more time where it is only slow (limit_s, --limit).",
        ]
    elif told:
        lines += [f"It did not survive: {wrong['ending']}."]
        lines += [f"Remedy: {summary.remedy}"] if summary.remedy else []
    elif "ending" in wrong:
        lines += [
            f"It was to stop with a reason and a remedy, and did not: {wrong['ending']}.",
            "Remedy: expect it to survive, or take more away from it.",
        ]
    different = [name for name in _SAME if name in wrong]
    if different and not ("time" in wrong or told):
        lines += [summary.diagnosis] if summary.diagnosis else [f"{name}: {wrong[name]}." for name in different]
    if "leftovers" in wrong:
        lines += [
            f"It leaves something behind: {wrong['leftovers']}.",
            "Remedy: end what the script starts, also when a rank is killed: daemons of its own session outlive it.",
        ]
    return lines


def _of_unknown(unknown: dict[str, str]) -> list[str]:
    lines = [f"The run proves nothing: {because}." for because in unknown.values()]
    lines.append(
        "Remedy: "
        + (
            "strike earlier, or train for more steps; name targets that the job has; let the budget allow what the plan does."
            if "strikes" in unknown
            else 'leave the world its size (a spare for every rank that is taken away), or use reduction="exact" in @rackrun.elastic, with '
            "which another number of ranks gives the same bits; leave the ledger its ids."
        )
    )
    return lines
