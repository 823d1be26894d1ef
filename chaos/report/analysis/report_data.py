"""Read everything that the reports of a run are made of, from its folder.

The history and the summary are completed from the job's journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rackrun.chaos.evidence.history import Entry, Started, read_history
from rackrun.chaos.evidence.summary import FaultTimes, StrikeSummary, Summary, quantile, read_summary
from rackrun.chaos.report.analysis.journal_timeline import JournalTimeline, maybe_recorded
from rackrun.chaos.report.analysis.recovery_chains import Chain, chains_of, entries_of
from rackrun.coordinator.report.goodput import Goodput, read_goodput
from rackrun.errors import UsageError

__all__ = ["Material", "read_material"]


@dataclass(frozen=True)
class Material:
    """Everything that a report is made of."""

    out: Path
    summary: Summary
    history: list[Entry]
    chains: list[Chain]
    job: JournalTimeline | None
    """The run with faults; None: it has left no journal."""
    reference: JournalTimeline | None
    """The run without faults; None: it has been removed."""


def read_material(out: Path) -> Material:
    """Read the folder of a run. Raises `UsageError` when ``out`` holds no run with faults."""
    summary = read_summary(out)
    history = [entry for entry in read_history(out / "history.jsonl") if entry.by == "harness"]
    started = next((entry for entry in history if isinstance(entry, Started)), None)
    if started is None:
        raise UsageError(f"{out / 'history.jsonl'} has no begin.", remedy="name the --out of a run.")
    job = maybe_recorded(out / "faulted", started.monotonic_s)
    folder = _reference(out, summary)
    reference = maybe_recorded(folder, _started_s(folder)) if folder is not None else None
    chains = chains_of(history, job)
    if job is not None:
        history += entries_of(chains, job)
    history.sort(key=lambda entry: entry.at_s)  # stable: of entries at the same time, causes come first
    summary = msgspec.structs.replace(
        summary,
        strikes=_strikes(summary.strikes, chains),
        faults=_times(chains),
        goodput=_goodput(out / "faulted"),
        reference_goodput=_goodput(folder) if folder is not None else None,
    )
    return Material(out, summary, history, chains, job, reference)


def _reference(out: Path, summary: Summary) -> Path | None:
    """Return the folder of the run without faults, which may have been moved together with ``out``; None if it
    is gone."""
    for folder in (out / "reference", Path(summary.reference)):
        if (folder / "run" / "journal.sqlite").is_file():
            return folder
    return None


class _Started(msgspec.Struct):
    monotonic_s: float = 0.0


def _started_s(folder: Path) -> float | None:
    try:
        return msgspec.json.decode((folder / "reference.json").read_bytes(), type=_Started).monotonic_s or None
    except (OSError, msgspec.MsgspecError):
        return None


def _goodput(folder: Path) -> Goodput | None:
    try:
        return read_goodput(folder / "run" / "journal.sqlite")
    except UsageError:
        return None


def _strikes(told: Sequence[StrikeSummary], chains: Sequence[Chain]) -> tuple[StrikeSummary, ...]:
    by_number = {chain.strike.strike: chain for chain in chains}
    return tuple(_strike(one, by_number[one.number]) if one.number in by_number else one for one in told)


def _strike(told: StrikeSummary, chain: Chain) -> StrikeSummary:
    recovery, seen = chain.recovery, chain.seen

    def after(moment_s: float | None) -> float | None:
        return None if moment_s is None else round(moment_s - chain.at_s, 4)

    struck = {slot for slot, _ in chain.strike.slots}
    lost = [one for each in (*chain.overtaken, recovery) if each is not None for one in each.lost]
    return msgspec.structs.replace(
        told,
        step=chain.step,
        struck_s=None if chain.struck_s is None else round(chain.struck_s, 4),
        slots=tuple(slot for slot, _ in chain.strike.slots),
        noticed=": ".join(filter(None, [seen.name, seen.how])) if seen is not None else "",
        inferred=chain.inferred,
        detect_s=after(chain.noticed_s),
        decide_s=after(chain.planned_s),
        recover_s=after(chain.recovered_s),
        generation=recovery.generation if recovery is not None else None,
        rung=recovery.rungs[-1] if recovery is not None and recovery.rungs else "",
        first_step=chain.first_step,
        taken_over=tuple(f"rank {one.rank}: {one.slot} -> {one.to}" for one in lost if one.slot in struck and one.to),
    )


def _times(chains: Sequence[Chain]) -> tuple[FaultTimes, ...]:
    found = []
    for fault in sorted({chain.fault for chain in chains}):
        struck = [chain for chain in chains if chain.fault == fault and chain.took]
        detect = [chain.noticed_s - chain.at_s for chain in struck if chain.noticed_s is not None]
        recover = [chain.recovered_s - chain.at_s for chain in struck if chain.recovered_s is not None]
        found.append(
            FaultTimes(
                fault=fault,
                strikes=len(struck),
                detected=len(detect),
                detect_s_p50=quantile(detect, 0.5),
                detect_s_p99=quantile(detect, 0.99),
                recovered=len(recover),
                recover_s_p50=quantile(recover, 0.5),
                recover_s_p99=quantile(recover, 0.99),
            )
        )
    return tuple(found)
