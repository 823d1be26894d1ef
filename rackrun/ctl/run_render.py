"""Output of `rackctl` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rackrun.coordinator.observe.filler_usage import FillerUse
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.report.run_report import LedgerCheck, OwnTime, RecoveryReport, Report
from rackrun.launch.run.run_directory import Result
from rackrun.protocol.ids import after_step

__all__ = ["render_report", "render_result", "render_status"]

_BAR = 32
_COLOURS = {
    "break": "red",
    "park": "yellow",
    "hold": "cyan",
    "plan": "magenta",
    "resume": "blue",
    "first commit": "green",
}


def render_status(console: Console, status: Mapping[str, Any]) -> None:
    """Print a status. ``status`` is the JSON of `rackrun.coordinator.shell.driver.Status`, perhaps of a slightly
    different version."""
    progress, core = status["progress"], status["core"]
    _say(
        console,
        f"{status['run_id']}  {_shown(core.get('phase', ''))}, up {status['uptime_s']:.0f} s",
        bold=len(status["run_id"]),
    )
    values = "  ".join(f"{name} {value}" for name, value in progress["values"].items())
    _say(console, f"{_reached(progress['position'][0])}  {progress['steps_per_s']:.3g} steps/s  {values}")
    size = core.get("world_size", "?")
    grows = f" (grows to {most})" if isinstance(size, int) and (most := core.get("most", 0)) > size else ""
    _say(
        console,
        f"generation {core.get('generation', '?')}, world size {size}{grows}, "
        f"recoveries {status['recoveries']}, restarts {core.get('restarts', 0)}",
    )
    _waits(console, core.get("waits", ""), core.get("hold", ""))
    if status["last_recovery"]:
        _say(console, f"last: {status['last_recovery']}")
    table = Table("rank", "slot", "incarnation", "state", box=None, pad_edge=False)
    for rank in core.get("ranks", ()):
        _row(table, rank["rank"], rank["slot"], rank["incarnation"] or "-", _shown(rank["state"]))
    for spare in core.get("spares", ()):
        _row(table, "spare", spare["slot"], spare["incarnation"], spare["state"])
    console.print(table)
    for tray in core.get("trays", ()):
        for slot, why in tray.get("withdrawn", {}).items():
            _say(console, f"{slot} is not used: {why}")
        reasons = dict[str, list[str]]()
        for slot, why in tray.get("probation", {}).items():
            reasons.setdefault(why, []).append(slot)
        for why, slots in reasons.items():
            _say(console, f"{', '.join(slots)}: on probation, the last choice until rackctl return: {why}")
        if unjudged := tray.get("unjudged"):
            _say(console, f"{tray['tray']}: not judged: {unjudged}")


def _shown(state: str) -> str:
    """Return a state of the job or of a worker in the word of all messages: ranks that are parked wait."""
    return "waiting" if state in ("parking", "parked") else state


def _waits(console: Console, waits: str, hold: str) -> None:
    """Print why all ranks wait, and what ends it if it is a hold."""
    if waits:
        _say(console, f"all ranks wait: {waits}")
    if hold:
        _say(console, f"  {hold}")


def render_result(console: Console, result: Result) -> None:
    """Print how a run ended."""
    title = Text(result.run_id, "bold") + Text("  ")
    console.print(title + Text(f"ended with exit code {result.exit_code}", "green" if result.exit_code == 0 else "red"))
    because = f"{result.because.rstrip('.')}. Remedy: {result.remedy}" if result.remedy else result.because
    _say(console, because)
    told = _recoveries(len(result.recoveries), ended=result.recoveries_ended)
    _say(console, f"{result.steps} steps in {result.seconds:.1f} s, {told}")
    for line in result.recoveries:
        _say(console, f"  {line}")


def render_report(console: Console, report: Report) -> None:
    """Print a report."""
    ended = (
        "still running, or killed" if report.exit_code is None else f"exit code {report.exit_code}: {report.because}"
    )
    _say(console, f"{report.run_id}  {ended}", bold=len(report.run_id))
    if report.stop is not None and str(report.stop.cause):
        _say(console, f"  sent at {report.stop.at_ms / 1e3:.3f} s: {report.stop}")
    _say(
        console,
        f"{report.steps} steps, {report.steps_redone} of them done again{_rescaled(report.steps_rescaled)}; "
        f"{report.generations} {'generation' if report.generations == 1 else 'generations'}, "
        f"{_recoveries(len(report.recoveries), ended=sum(one.recovery.ended_with_job for one in report.recoveries))}",
    )
    _waits(console, report.waits, report.hold)
    for notice in report.notices:
        cause = f"  [{notice.cause}]" if str(notice.cause) else ""
        _say(console, f"{notice.at_ms / 1e3:9.3f} s  {notice.text}{cause}")
    for one in report.recoveries:
        _waterfall(console, one)
    if report.fillers:
        _fillers(console, report.fillers)
    if not report.ledger.units:
        _say(console, "no steps were reported: a plain script, or one that ended before its first step")
        return
    _goodput(console, report)
    if report.own_times:
        _own_times(console, report.own_times)
    _ledger(console, report.ledger)


def _recoveries(failures: int, *, ended: int = 0) -> str:
    """Return the number of recoveries as text. ``ended``: of these failures, how many the job ended before answering."""
    done = failures - ended
    more = f", and {ended} not completed when the job ended" if ended else ""
    return f"{done} {'recovery' if done == 1 else 'recoveries'}{more}"


def _reached(step: int) -> str:
    return f"step {step}" if step >= 0 else after_step(step)


def _rescaled(steps: int) -> str:
    return f' ({steps} because a gradient had no scale yet or had outgrown it, reduction="exact")' if steps else ""


def _waterfall(console: Console, one: RecoveryReport) -> None:
    console.print()
    _say(console, f"generation {one.recovery.generation}: {one.line}")
    total = sum(stage.ms for stage in one.stages)
    table = Table(box=None, pad_edge=False, show_header=False)
    for stage in one.stages:
        start = int(_BAR * stage.from_ms / total) if total else 0
        length = max(1, round(_BAR * stage.ms / total)) if total else 1
        bar = Text(" " * min(start, _BAR - 1)) + Text(
            "█" * min(length, _BAR - min(start, _BAR - 1)), style=_COLOURS[stage.name]
        )
        table.add_row(Text(f"  {stage.name}"), f"{stage.ms:8.1f} ms", bar)
    console.print(table)
    _decisions(console, one.recovery)
    for sent in one.commands:
        _say(console, f"  sent at {sent.at_ms / 1e3:.3f} s: {sent}")
    for restore in one.recovery.restores:
        _say(console, f"  state of {restore}")


def _decisions(console: Console, recovery: RecoveryRecord) -> None:
    for reason in recovery.reasons:
        _say(console, f"  decided: {reason}")
    if recovery.rungs:
        predicted, measured = _gpu_s(recovery.predicted_gpu_s), _gpu_s(recovery.measured_gpu_s)
        overtaken = " (overtaken)" if recovery.overtaken else ""
        _say(console, f"  cost: predicted {predicted}, measured {measured}{overtaken}")


def _gpu_s(cost: float | None) -> str:
    if cost is None:
        return "unknown"
    return f"{cost:.0f} GPU-s" if cost >= 100 else f"{cost:.3g} GPU-s"


def _fillers(console: Console, fillers: Sequence[FillerUse]) -> None:
    console.print()
    table = Table(
        "filler beside",
        "ran",
        "cpu",
        "utilisation",
        "starts",
        "restarts",
        "had to go",
        "gone in",
        box=None,
        pad_edge=False,
    )
    for one in fillers:
        gone = "" if one.gone_s_max is None else f"at most {one.gone_s_max:.2f} s"
        counts = (str(count) for count in (one.starts, one.restarts, one.had_to_go))
        _row(table, one.slot, f"{one.seconds:.1f} s", f"{one.cpu_s:.1f} s", f"{one.utilisation:.0%}", *counts, gone)
    console.print(table)
    for one in fillers:
        if one.given_up:
            _say(console, f"  {one.slot}: given up, it ended at once ten times ({one.given_up})")


def _goodput(console: Console, report: Report) -> None:
    goodput = report.goodput
    console.print()
    _say(
        console,
        f"goodput (ETTR) {goodput.ettr:.1%}, since the first generation {goodput.ettr_since_first_step:.1%}",
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, seconds in (
        ("steps", goodput.productive_s),
        ("start-up", goodput.startup_s),
        ("recovery", goodput.recovery_s),
        *((("hold", goodput.hold_s),) if goodput.hold_s else ()),
        ("done again", goodput.redone_s),
        ("other", goodput.other_s),
        ("wall", goodput.wall_s),
    ):
        share = seconds / goodput.wall_s if goodput.wall_s else 0.0
        _row(table, f"  {name}", f"{seconds:9.2f} s", f"{share:6.1%}")
    console.print(table)


def _own_times(console: Console, times: Sequence[OwnTime], shown: int = 4) -> None:
    """Print the longest own times, for which all other ranks wait."""
    usual = sorted(one.seconds for one in times)[(len(times) - 1) // 2]
    console.print()
    _say(console, f"own time of a step, without waiting: median rank {1e3 * usual:.1f} ms; the longest:")
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in sorted(times, key=lambda one: (-one.seconds, one.rank))[:shown]:
        factor = f"x {one.seconds / usual:.2f}" if usual else ""
        _row(table, f"  rank {one.rank}", f"{1e3 * one.seconds:9.1f} ms", factor, f"waits {one.waits:.0%} of the time")
    console.print(table)


def _ledger(console: Console, ledger: LedgerCheck) -> None:
    console.print()
    if ledger.ok and not ledger.samples:
        console.print(
            f"ledger: {ledger.units} units, and no sample that run.loader has delivered: which ones were trained on is not known",
            highlight=False,
        )
        return
    if ledger.ok:
        _say(
            console,
            f"ledger: {ledger.samples} samples in {ledger.units} units, none twice within one, no row missing{_folded(ledger)}",
            "green",
        )
        _some(console, "by the gate", ledger.by_gate)
        return
    _say(console, f"ledger: {ledger.samples} samples in {ledger.units} units do not add up", "red")
    for what, lines in (("twice", ledger.doubled), ("differing", ledger.differing), ("missing", ledger.missing)):
        _some(console, what, lines)
    if ledger.rows_lost:
        _say(console, f"  {ledger.rows_lost} rows could not be written: the disk was full")


def _some(console: Console, what: str, lines: Sequence[str], shown: int = 10) -> None:
    for line in lines[:shown]:
        _say(console, f"  {what}: {line}")
    if len(lines) > shown:
        _say(console, f"  {what}: and {len(lines) - shown} more")


def _say(console: Console, text: str, style: str = "", *, bold: int = 0) -> None:
    """Print text unchanged, because texts from users and errors may look like rich's markup or an emoji's name.
    ``bold``: number of bold characters at its beginning."""
    line = Text(text, style)
    if bold:
        line.stylize("bold", 0, bold)
    console.print(line)


def _row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _folded(ledger: LedgerCheck) -> str:
    return f" ({ledger.folded} old units were checked before their rows were put together)" if ledger.folded else ""
