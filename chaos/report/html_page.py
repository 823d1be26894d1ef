"""Write ``report.html``, a single file that needs no other.

Words and tables are HTML; ``page.js`` draws the plots from the values in the page.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec

from rackrun.chaos.evidence.summary import StrikeTold, Summary
from rackrun.chaos.report.analysis.report_data import Material
from rackrun.chaos.report.plots import Figure, figures_of
from rackrun.chaos.report.run_text import duration, next_steps, sentence, story

__all__ = ["document", "figure", "table", "write_page"]

STORIES = 12
PLAN_CHARS = 200_000
_HERE = Path(__file__).parent
_MARK = {True: "holds", False: "fails", None: "unknown"}
_WORD = {True: "true", False: "FALSE", None: "unknown"}


def write_page(material: Material, path: Path) -> None:
    """Write the page of a run to ``path``."""
    summary = material.summary
    parts = [
        _banner(summary),
        _section("What happened", _happened(summary)),
        _section("What differs first, and why", _why(summary)) if summary.diagnosis else "",
        _section("What next", _list(next_steps(summary))),
        _section("Verdicts", _verdicts(summary)),
        figure(
            "losses",
            "Losses",
            "The run with faults on the one without; strikes are shaded, up to the first step afterwards.",
        ),
        figure("progress", "Progress", "When each step was committed. Flat parts are recoveries."),
        figure("waterfall", "Recoveries", "From each strike until every rank had committed a step."),
        figure("goodput", "Where the time went", "", _goodput_table(summary)),
        figure("map", "Who sat where", "Ranks at the end. A slot's strikes, and who took over, are in its hint."),
        _section("Times", _times(summary)) if summary.faults else "",
        _section(f"Strikes ({len(summary.strikes)})", _strikes(summary)),
        _section("Do it again", _again(material)),
        _section("The run", _facts(summary)),
    ]
    title = f"{_WORD[summary.holds]}: {summary.plan or 'chaos'}, seed {summary.seed}"
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(document(title, parts, figures_of(material)), encoding="utf-8")
    partial.replace(path)


def document(title: str, parts: Iterable[str], figures: Figure) -> str:
    """Return a whole page. ``figures``: name -> values, for the plots that `figure` has made room for."""
    css, js = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    values = msgspec.json.encode(figures).decode().replace("<", "\\u003c")  # the values cannot end the element
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, parts))
        + f'\n</main>\n<script type="application/json" id="figures">{values}</script>\n<script>\n{js}</script>\n</body>\n</html>\n'
    )


def figure(name: str, title: str, caption: str, more: str = "") -> str:
    """Return the HTML for a plot, which is drawn in the browser."""
    return (
        f'<section><h2>{escape(title)}</h2><figure data-plot="{name}"><div class="plot"></div>'
        f'<figcaption>{escape(caption)}<span class="said"></span></figcaption></figure>{more}</section>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table. ``rows`` are HTML already. ``numbers``: the columns that are aligned to the right."""

    def cells(row: Sequence[str], kind: str) -> str:
        return "".join(
            f"<{kind}{' class=number' if index in numbers else ''}>{cell}</{kind}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells(head, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _badge(holds: bool | None) -> str:
    return f'<span class="badge {_MARK[holds]}">{_WORD[holds]}</span>'


def _banner(summary: Summary) -> str:
    expects = "must end as without faults" if summary.expect == "survives" else "must stop, with a reason"
    facts = f"seed {summary.seed}; {expects}; {summary.began.replace('T', ' ').replace('Z', ' UTC')}; {duration(summary.seconds)}"
    return (
        f'<header class="{_MARK[summary.holds]}"><p class="verdict">{_badge(summary.holds)} {escape(sentence(summary))}</p>'
        f"<h1>{escape(summary.plan or 'A run with faults')}</h1><p>{escape(facts)}</p></header>"
    )


def _happened(summary: Summary) -> str:
    if not summary.strikes:
        return "<p>Nothing was struck.</p>"
    trouble = [one for one in summary.strikes if one.took is not True]
    ordered = [*trouble, *(one for one in summary.strikes if one.took is True)]
    shown = sorted(ordered[:STORIES], key=lambda one: one.number)
    items = "".join(f'<li value="{one.number}">{escape(story(one)).replace(" -&gt; ", " → ")}</li>' for one in shown)
    rest = len(summary.strikes) - len(shown)
    more = f"<p>And {rest} more, in the table of strikes.</p>" if rest else ""
    end = (
        "It did not end, and was killed"
        if summary.exit_code is None
        else f"It ended with exit code {summary.exit_code}"
    )
    end = f"<p>{escape(end + (': ' + summary.because if summary.because else ''))}.</p>"
    return f'<ol class="story">{items}</ol>{more}{end}'


def _why(summary: Summary) -> str:
    """Return the diagnosis as HTML; its indented lines are facts."""
    lines = summary.diagnosis.splitlines()
    facts = [line.strip() for line in lines if line.startswith(" ")]
    before, *after = [f"<p>{escape(line)}</p>" for line in lines if not line.startswith(" ")]
    return before + (_list(facts) if facts else "") + "".join(after)


def _verdicts(summary: Summary) -> str:
    rows = [[escape(one.oracle), _badge(one.holds), escape(one.because)] for one in summary.verdicts]
    return table(["oracle", "", "because"], rows)


def _goodput_table(summary: Summary) -> str:
    mine, theirs = summary.goodput, summary.reference_goodput
    if mine is None:
        return ""
    rows = []
    for name, field in (
        ("steps", "productive_s"),
        ("start-up", "startup_s"),
        ("recovery", "recovery_s"),
        ("done again", "redone_s"),
        ("other", "other_s"),
        ("wall", "wall_s"),
    ):
        seconds = getattr(mine, field)
        share = f"{seconds / mine.wall_s:.1%}" if mine.wall_s else ""
        without = duration(getattr(theirs, field)) if theirs is not None else "–"
        rows.append([name, duration(seconds), share, without])
    without = f"{theirs.ettr_since_first_step:.1%}" if theirs is not None else "–"
    rows.append(["goodput since the first generation", f"{mine.ettr_since_first_step:.1%}", "", without])
    return table(["", "with faults", "share", "without"], rows, (1, 2, 3))


def _times(summary: Summary) -> str:
    rows = [
        [
            escape(one.fault),
            str(one.strikes),
            str(one.detected),
            duration(one.detect_s_p50),
            duration(one.detect_s_p99),
            str(one.recovered),
            duration(one.recover_s_p50),
            duration(one.recover_s_p99),
        ]
        for one in summary.faults
    ]
    head = ["fault", "strikes", "noticed", "p50", "p99", "recovered", "p50", "p99"]
    return (
        table(head, rows, range(1, 8)) + "<p class=note>From the strike. Of fewer than 100 the p99 is the longest.</p>"
    )


def _strikes(summary: Summary) -> str:
    head = ["#", "at", "step", "fault", "whom", "took effect", "noticed", "decided", "recovered", "generation"]
    rows = table(head, map(_strike_row, summary.strikes), (0, 1, 2, 6, 7, 8, 9))
    inner = f'<div class="strikes">{rows}</div>'
    return inner if len(summary.strikes) <= STORIES else f"<details><summary>all of them</summary>{inner}</details>"


def _strike_row(one: StrikeTold) -> list[str]:
    noticed = duration(one.detect_s) + (" *" if one.inferred else "")
    return [
        str(one.number),
        f"{one.at_s if one.struck_s is None else one.struck_s:.2f} s",
        str(one.step),
        escape(one.fault),
        escape(", ".join(one.whom)),
        f'<div class="detail">{_badge(one.took)} {escape(one.detail)}</div>',
        noticed,
        duration(one.decide_s),
        duration(one.recover_s),
        "–" if one.generation is None else f"{one.generation} {escape(one.rung)}",
    ]


def _again(material: Material) -> str:
    summary = material.summary
    command = f"rackctl chaos run {shlex.quote(str(material.out / 'resolved.json'))} -- {shlex.join(summary.command)}"
    try:
        plan = (material.out / "resolved.json").read_text(encoding="utf-8")
    except OSError as error:
        plan = f"resolved.json cannot be read: {error.strerror}"
    if len(plan) > PLAN_CHARS:
        plan = f"{plan[:PLAN_CHARS]}\n... {len(plan) - PLAN_CHARS} characters more, in resolved.json"
    return (
        f"<p>What was struck, again, by name and step:</p><pre>{escape(command)}</pre>"
        f"<details><summary>resolved.json</summary><pre>{escape(plan)}</pre></details>"
    )


def _facts(summary: Summary) -> str:
    host = summary.host
    rows = [
        ["steps", f"{summary.steps} of {summary.reference_steps}"],
        ["with faults", duration(summary.seconds)],
        ["without", duration(summary.reference_seconds)],
        ["rackrun", host.rackrun],
        ["torch", host.torch],
        ["python", host.python],
        ["commit", host.commit],
        ["host", f"{host.system} {host.machine}, {host.processors} processors, {host.memory_bytes / 2**30:.0f} GiB"],
        ["folder", summary.out],
    ]
    more = _list(summary.recoveries[: STORIES * 4]) if summary.recoveries else ""
    told = f"<h3>As the job told it</h3>{more}" if more else ""
    return table(["", ""], [[escape(name), escape(value or "–")] for name, value in rows]) + told
