"""Describe a run with faults in words: one line for a log, Markdown for a build's summary, sentences for a page."""

from __future__ import annotations

from rackrun.chaos.evidence.summary import StrikeSummary, Summary
from rackrun.protocol.ids import after_step

__all__ = ["NAMES", "duration", "markdown", "next_steps", "one_line", "sentence", "story"]

NAMES = {True: "true", False: "FALSE", None: "unknown"}
_SHOWN = 50


def duration(seconds: float | None) -> str:
    """Return seconds as a text: ``4.2 ms``, ``0.32 s``, ``2 min 5 s``; "–" for None."""
    if seconds is None:
        return "–"
    if not seconds:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def one_line(summary: Summary) -> str:
    """Return the run's result in one line, for a log."""
    parts = [
        f"chaos {NAMES[summary.holds]}",
        f"{summary.plan or 'plan'}, seed {summary.seed}",
        f"{_count(len(summary.strikes), 'strike')} ({_faults(summary)})",
        f"{summary.steps} of {summary.reference_steps} steps",
    ]
    if summary.goodput is not None:
        parts.append(f"goodput {summary.goodput.ettr_since_first_step:.1%} since the first generation")
    recovered = [one for one in summary.faults if one.recovered]
    parts += [
        f"{one.fault} recovered in {duration(one.recover_s_p50)} (p50), {duration(one.recover_s_p99)} (p99)"
        for one in recovered[:3]
    ]
    wrong = [f"{one.oracle} {NAMES[one.holds]}: {one.because}" for one in summary.verdicts if one.holds is not True]
    return "; ".join([*parts, *wrong])


def sentence(summary: Summary) -> str:
    """Return one sentence that says whether anything is lost."""
    wrong = [one for one in summary.verdicts if one.holds is False]
    if wrong:
        return f"Not as the plan expects: {wrong[0].oracle}: {wrong[0].because}."
    unknown = [one for one in summary.verdicts if one.holds is None]
    if unknown:
        return f"This run proves nothing yet: {unknown[0].oracle}: {unknown[0].because}."
    struck = _count(sum(one.took is True for one in summary.strikes), "fault")
    if summary.expect == "stops":
        ending = next((one.because for one in summary.verdicts if one.oracle == "ending"), "")
        return f"{struck}; the job stopped, as it was to ({ending}). What it had committed is what a run without faults commits, bit for bit."
    return (
        f"{struck}, and nothing is lost: {summary.steps} of {summary.reference_steps} steps, their samples and the "
        "weights at the end are those of the run without faults, bit for bit."
    )


def story(one: StrikeSummary) -> str:
    """Return what happened to one strike, in sentences."""
    whom = ", ".join(one.whom)
    where = f" ({', '.join(one.slots)})" if one.slots and whom not in one.slots else ""
    struck_s = one.at_s if one.struck_s is None else one.struck_s
    ordered = f" (ordered at {one.at_s:.2f} s)" if struck_s - one.at_s >= 1.0 else ""
    after = after_step(one.step)
    parts = [f"{after[0].upper()}{after[1:]}, at {struck_s:.2f} s{ordered}: {one.fault} of {whom}{where}."]
    if one.took is False:
        return f"{parts[0]} It did not take effect: {one.detail}."
    if one.took is None:
        parts.append("Nobody knows whether it took effect: the job ended first.")
    if one.detect_s is None:
        parts.append("Its journal tells nothing of it.")
    else:
        how = "First sign, by its time" if one.inferred else "Noticed"
        parts.append(f"{how} after {duration(one.detect_s)}: {one.noticed}.")
    if one.generation is not None:
        over = f"; {', '.join(one.taken_over)}" if one.taken_over else ""
        parts.append(f"Decided after {duration(one.decide_s)}: {one.rung or 'to go on'}{over}.")
    if one.recover_s is not None:
        parts.append(f"All had committed step {one.first_step} after {duration(one.recover_s)}.")
    elif one.generation is not None:
        parts.append("The job ended before all had committed another step.")
    if one.back_s is not None:
        parts.append(f"Taken back after {duration(one.back_s - struck_s)}.")
    return " ".join(parts)


def next_steps(summary: Summary) -> list[str]:
    """Return what a reader of the report may want to do next."""
    found = []
    if summary.remedy:
        found.append(f"The job itself says: {summary.remedy}")
    otherwise = "Look at history.jsonl and at faulted/stderr.txt."
    found += [_LOOK.get(one.oracle, otherwise) for one in summary.verdicts if one.holds is not True]
    if summary.holds is False:
        found.append(
            "Do it again: sh repro.sh --out NEW. If it fails again it is a bug; keep this folder with the report of it."
        )
    elif summary.holds is None:
        found.append("Do it again with another seed, or a longer job: rackctl chaos run plan.yaml --seed N.")
    else:
        found.append("Nothing has to be done.")
    return list(dict.fromkeys(found))


_LOOK = {
    "losses": "Look at the first step that differs, below, and at which strike it follows. State that the script does not track, and "
    "random numbers of its own, are the usual causes: see run.track.",
    "samples": "rackctl report faulted/run checks the ledger, unit by unit.",
    "weights": "Where losses are the same and weights are not, something was restored that the loss does not show.",
    "untracked": "A rank that took over runs the script from its beginning: give run.track what is named, or say --may-differ NAME where it "
    "goes into no training.",
    "rollback": "More was computed again than the snapshots explain: see which were taken, and which were kept, in rackctl report faulted/run.",
    "ending": "Look at the end of faulted/stderr.txt, and at the last decisions below.",
    "time": "It hung: the last lines of history.jsonl and rackctl report faulted/run say where.",
    "leftovers": "The processes that outlived the job are named above; they are dead now.",
    "strikes": "A strike that did not take effect, or had no target, proves nothing: rackctl chaos doctor says what this machine can have.",
}


def markdown(summary: Summary) -> str:
    """Return Markdown for a build's summary page."""
    lines = [
        f"### chaos: {NAMES[summary.holds]}, {summary.plan or 'plan'}, seed {summary.seed}",
        "",
        sentence(summary),
        "",
    ]
    lines += [*(_cell(line) for line in summary.diagnosis.splitlines()), ""] if summary.diagnosis else []
    lines += ["| oracle | verdict | |", "|---|---|---|"]
    lines += [f"| {one.oracle} | {NAMES[one.holds]} | {_cell(one.because)} |" for one in summary.verdicts]
    if summary.faults:
        lines += [
            "",
            "| fault | strikes | noticed | p50 | p99 | recovered | p50 | p99 |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {one.fault} | {one.strikes} | {one.detected} | {duration(one.detect_s_p50)} | {duration(one.detect_s_p99)} "
            f"| {one.recovered} | {duration(one.recover_s_p50)} | {duration(one.recover_s_p99)} |"
            for one in summary.faults
        ]
    if summary.goodput is not None:
        lines += [
            "",
            f"Goodput (ETTR) {summary.goodput.ettr:.1%}, since the first generation {summary.goodput.ettr_since_first_step:.1%}.",
        ]
    lines += ["", *(f"- {_cell(story(one))}" for one in summary.strikes[:_SHOWN])]
    if len(summary.strikes) > _SHOWN:
        lines.append(f"- and {len(summary.strikes) - _SHOWN} more: see summary.json")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _faults(summary: Summary) -> str:
    names: dict[str, int] = {}
    for one in summary.strikes:
        names[one.fault] = names.get(one.fault, 0) + 1
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items()) or "none"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
