"""The reports of a run are made from what it has left, as often as one likes, and stay small however long it was."""

from __future__ import annotations

import math
import random
import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackrun.chaos.cli.campaign_page import tally_line, write_overview
from rackrun.chaos.evidence.history import Recovered, Strike, read_history
from rackrun.chaos.evidence.run_evidence import Verdict
from rackrun.chaos.evidence.summary import quantile, read_summary
from rackrun.chaos.report.analysis.downsample import choose_detail, envelope, every_nth, lanes, merged
from rackrun.chaos.report.analysis.journal_timeline import CommittedUnit, JournalTimeline, PlannedGeneration, RankUnit
from rackrun.chaos.report.chrome_trace import STEP_SLICES
from rackrun.chaos.report.plots import BARS, POINTS, losses
from rackrun.chaos.report.run_text import duration, markdown, next_steps, one_line, sentence
from rackrun.chaos.report.write_reports import make_report, report_on
from rackrun.chaos.runs.campaign import TallyHeader, TallyLine
from rackrun.coordinator.report.goodput import read_goodput
from rackrun.coordinator.report.run_report import read_report
from rackrun.errors import UsageError
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Generation
from tests.chaos.recorded import RECOVERY_S, STEP_S, write_run
from tests.chaos.report.test_report_chains import strike

PLOTS = {"losses", "progress", "waterfall", "goodput", "map"}
MADE = ("history.jsonl", "summary.json", "trace.json", "report.html", "report.md")


def figures_in(page: Path) -> dict[str, ET.Element]:
    """The plots of a page by their names. Raises `ET.ParseError` where the page is not well-formed."""
    return {figure.attrib["data-plot"]: figure for figure in ET.fromstring(page.read_text()).iter("figure")}


def words_of(element: ET.Element) -> str:
    """What a reader sees, with what is in hints."""
    hints = [one.attrib["title"] for one in element.iter() if "title" in one.attrib]
    return " ".join(" ".join([*element.itertext(), *hints]).split())


def test_summary_and_history_are_completed_from_the_journal(tmp_path: Path) -> None:
    summary = make_report(write_run(tmp_path / "out", kills={7: 1, 12: 2}))
    first, second = summary.strikes
    assert (first.generation, first.first_step, first.rung, first.slots) == (2, 7, "swap", ("tray-00/1",))
    assert first.noticed == "WorkerExited: SIGKILL"
    assert first.detect_s == pytest.approx(0.003, abs=0.002)
    assert first.recover_s == pytest.approx(RECOVERY_S + STEP_S, abs=0.001)
    assert first.taken_over == ("rank 1: tray-00/1 -> tray-00/4",)
    assert (second.generation, second.first_step) == (3, 12)
    (times,) = summary.faults
    assert (times.fault, times.strikes, times.detected, times.recovered) == ("kill", 2, 2, 2)
    assert summary.goodput is not None
    assert summary.reference_goodput is not None
    assert read_summary(tmp_path / "out") == summary
    history = read_history(tmp_path / "out" / "history.jsonl")
    assert [entry.at_s for entry in history] == sorted(entry.at_s for entry in history)


def test_the_first_good_step_leads_back_to_the_strike(tmp_path: Path) -> None:
    make_report(write_run(tmp_path / "out"))
    history = {entry.id: entry for entry in read_history(tmp_path / "out" / "history.jsonl")}
    (recovered,) = (entry for entry in history.values() if isinstance(entry, Recovered))
    line, at = ["Recovered"], history[recovered.id]
    while at.cause is not None:
        at = history[at.cause]
        line.append(type(at).__name__)
    assert line == ["Recovered", "Resumed", "Planned", "RungChosen", "Noticed", "Strike"]
    assert isinstance(at, Strike)


def test_the_time_went_where_rackctl_report_says_that_it_did(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", kills={7: 1, 12: 2})
    journal = out / "faulted" / "run" / "journal.sqlite"
    assert make_report(out).goodput == read_goodput(journal) == read_report(journal).goodput


def test_made_again_they_are_the_same(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    make_report(out)
    first = [(out / name).read_bytes() for name in MADE]
    make_report(out)
    assert [(out / name).read_bytes() for name in MADE] == first


def test_a_folder_that_was_moved_still_has_its_reference(tmp_path: Path) -> None:
    write_run(tmp_path / "out")
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert make_report(moved).reference_goodput is not None


def test_without_its_reference_a_run_is_shown_alone(tmp_path: Path) -> None:
    import shutil

    out = write_run(tmp_path / "out")
    shutil.rmtree(out / "reference")
    make_report(out)
    shown = figures_in(out / "report.html")["losses"]
    said = words_of(shown)
    assert "0 steps compared bit for bit, 0 differ. The run without faults is not there any more." in said
    assert len([*shown.iter("polyline")]) == 1
    assert "without faults:" not in said


def test_of_a_job_that_left_no_journal_there_is_a_report_too(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    for path in (out / "faulted" / "run").iterdir():
        path.unlink()
    summary = make_report(out)
    assert summary.goodput is None
    assert all((out / name).exists() for name in MADE)


@pytest.mark.parametrize("missing", ["summary.json", "history.jsonl"])
def test_another_folder_is_refused(missing: str, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / missing).unlink()
    with pytest.raises(UsageError):
        make_report(out)


def test_a_summary_of_another_format_is_refused(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / "summary.json").write_text('{"format": 1}')
    with pytest.raises(UsageError, match="format 1"):
        make_report(out)


def test_a_report_that_cannot_be_made_does_not_change_the_verdict(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    summary = read_summary(out)
    (out / "history.jsonl").unlink()
    told: list[str] = []
    assert report_on(out, summary, told.append) == summary
    assert told
    assert "no report" in told[0]


# -- the page
def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    make_report(out)
    write_overview(write_tally(tmp_path / "tally.jsonl", line_of(1)), tmp_path / "tally.html")
    for made, plots in ((out / "report.html", PLOTS), (tmp_path / "tally.html", {"seeds"})):
        page = made.read_text()
        assert not re.search(r"(src|href)=\"(?!data:|#)", page)
        assert "url(" not in page
        assert "@import" not in page
        assert not re.search(r"https?://", page)
        assert "<script" not in page
        assert figures_in(made).keys() == plots
        assert all(figure.attrib["data-drawn"] == "plot" for figure in figures_in(made).values())


EVIL = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<b>"


def with_evil_text(value: Any) -> Any:
    """The same value with `EVIL` behind each text in it."""
    if isinstance(value, dict):
        return {key: with_evil_text(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_evil_text(one) for one in value]
    return f"{value}{EVIL}" if isinstance(value, str) else value


def is_only_text(page: Path) -> bool:
    """Whether `EVIL` is in the page, and no element or attribute has come of it."""
    root = ET.fromstring(page.read_text())
    names = {one.tag for one in root.iter()} | {name for one in root.iter() for name in one.attrib}
    return EVIL in words_of(root) and not names & {"script", "img", "b", "onerror"}


def test_what_a_job_says_cannot_change_the_page(tmp_path: Path) -> None:
    why = f"it differs.{EVIL}\n  a fact{EVIL}\nRemedy: none."
    out = write_run(tmp_path / "out", holds=False, diagnosis=why)
    summary = with_evil_text(msgspec.json.decode((out / "summary.json").read_bytes()))
    (out / "summary.json").write_bytes(msgspec.json.encode(summary))
    history = []
    for line in (out / "history.jsonl").read_bytes().splitlines():
        entry = msgspec.json.decode(line)
        said = ("tray", "rack", "fault", "whom", "detail")
        history.append(entry | with_evil_text({name: entry[name] for name in said if name in entry}))
    (out / "history.jsonl").write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in history))
    (out / "resolved.json").write_text(EVIL)
    make_report(out)
    assert is_only_text(out / "report.html")
    for figure in ("waterfall", "map"):
        assert EVIL in words_of(figures_in(out / "report.html")[figure])
    page = words_of(ET.fromstring((out / "report.html").read_text()))
    for text in ("it differs.", "a fact", "Remedy: none.", "tray-00", "rack-0", "SIGKILL: gone", "ranks are killed"):
        assert f"{text}{EVIL}" in page


def test_one_wrong_bit_of_a_loss_is_never_thinned_away(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", ranks=1, steps=2 * POINTS, kills={}, wrong_step=1234)
    make_report(out)
    shown = figures_in(out / "report.html")["losses"]
    said = words_of(shown)
    assert f"{2 * POINTS:,} steps compared bit for bit, 1 differ. First: step 1234: " in said
    assert "Each point is 2 steps: their smallest and largest loss." in said
    (mark,) = (one for one in shown.iter("line") if one.get("class") == "differs")
    assert words_of(mark).startswith("step 1234: ")


def test_a_curve_keeps_its_spikes() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[77_777] = (77_777, 9.0)
    thinned = envelope(points, POINTS)
    assert len(thinned) <= POINTS
    assert max(one.high for one in thinned) == 9.0
    assert (thinned[0].first, thinned[-1].last) == (0, 99_999)
    assert envelope([], POINTS) == []


def test_every_nth_keeps_both_ends() -> None:
    assert every_nth(range(10_000), 5) == [0, 2500, 5000, 7499, 9999]
    assert every_nth(range(3), 5) == [0, 1, 2]


# -- a large run
def large(ranks: int = 72, steps: int = 100_000, strikes: int = 500) -> tuple[JournalTimeline, list[object]]:
    from rackrun.chaos.report.analysis.recovery_chains import Chain

    draw = random.Random(1)
    job = JournalTimeline(Path("nowhere"), end_s=1e5)
    job.plans = [
        PlannedGeneration(
            0.0,
            GenerationPlan(
                generation=Generation(1), world_size=ranks, members=(), store="", layout=Generation(0), full=ranks
            ),
        )
    ]
    gate = b"\0" * 24
    job.units = [CommittedUnit(step, 0, 1, float(step), 0, gate, True) for step in range(steps)]
    struck = sorted(draw.sample(range(steps), strikes))
    chains: list[object] = [
        Chain(
            strike(number, float(step), (f"t{number}/0", 1), whom=f"rank {draw.randrange(ranks)}"),
            step=step,
            first_step=step + 2,
        )
        for number, step in enumerate(struck)
    ]
    return job, chains


def test_the_slices_of_a_large_run_are_few_and_show_what_struck_ranks_did() -> None:
    _, chains = large()
    detail = choose_detail(chains, 100_000, 72, STEP_SLICES)  # type: ignore[arg-type]
    assert detail.steps
    struck = next(iter(detail.ranks or ()))
    for rank, most in ((struck, 2_000), (next(rank for rank in range(72) if rank not in (detail.ranks or ())), 200)):
        units = (RankUnit(rank, step, 0, 1, 0, float(step + 1), 1.0) for step in range(100_000))
        shown = list(merged(units, detail))
        assert sum(getattr(one, "units", 1) for one in shown) == 100_000
        assert len(shown) < most


def test_a_short_run_is_shown_step_by_step() -> None:
    detail = choose_detail([], 1000, 16, STEP_SLICES)
    units = [RankUnit(0, step, 0, 1, 0, float(step + 1), 1.0) for step in range(1000)]
    assert list(merged(units, detail)) == units


def test_the_losses_of_a_large_run_are_small() -> None:
    job, chains = large(steps=30_000)
    shown = losses(job, job, chains)  # type: ignore[arg-type]
    assert shown.compared == 30_000
    assert shown.chart is not None
    assert all(len(curve.rows) <= POINTS for curve in shown.chart.curves)
    assert len(msgspec.json.encode(shown)) < 200_000


def test_the_losses_of_a_run_that_diverges_are_drawn() -> None:
    job, chains = large(steps=4, strikes=1)
    most = sys.float_info.max
    for unit, loss in zip(range(4), (1.0, most, -most, math.inf), strict=True):
        job.units[unit] = job.units[unit]._replace(gate=struct.pack("<d", loss) + b"\0" * 16)
    chart = losses(job, job, chains).chart  # type: ignore[arg-type]
    assert chart is not None
    assert chart.y == (-most, most)
    assert [chart.points(curve) for curve in chart.curves] == ["0,113 333.3,0 666.7,226"] * 2
    assert all(math.isfinite(tick) for tick in chart.y_ticks())


def test_a_plan_that_is_not_utf_8_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / "resolved.json").write_bytes(b'{"plan": "\xff"}')
    make_report(out)
    assert '{"plan": "\N{REPLACEMENT CHARACTER}"}' in words_of(ET.fromstring((out / "report.html").read_text()))


def test_what_happens_at_once_is_in_different_lanes() -> None:
    assert lanes([(0, 10), (1, 3), (2, 4), (3, 5), (10, 11)]) == [0, 1, 2, 1, 0]


def test_only_the_longest_recoveries_are_drawn_and_all_are_counted(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", steps=5 * BARS, kills={4 * n + 2: n % 4 for n in range(BARS + 3)})
    make_report(out)
    shown = figures_in(out / "report.html")["waterfall"]
    assert len([*shown.iter("svg")]) == BARS
    assert f"The {BARS} longest of {BARS + 3}; all are in the table of strikes." in words_of(shown)


# -- in words
def test_a_line_and_markdown_say_what_a_build_has_to_know(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    summary = make_report(out)
    assert one_line(summary).startswith("chaos true; ranks are killed, seed 3; 1 strike (kill); 20 of 20 steps")
    assert "\n" not in one_line(summary)
    assert "nothing is lost" in sentence(summary)
    assert next_steps(summary) == ["Nothing has to be done."]
    told = markdown(summary)
    assert (out / "report.md").read_text() == told
    assert "| losses | true |" in told


def test_who_reads_of_a_failure_is_told_what_and_where_to_look(tmp_path: Path) -> None:
    wrong = [
        Verdict(oracle="losses", holds=False, because="the loss of step 8 | is 2"),
        Verdict(oracle="strikes", holds=None, because="one had no target"),
    ]
    summary = make_report(write_run(tmp_path / "out", holds=False, verdicts=wrong))
    assert "losses: the loss of step 8" in sentence(summary)
    assert "losses FALSE" in one_line(summary)
    assert any("run.track" in line for line in next_steps(summary))
    assert any("repro.sh" in line for line in next_steps(summary))
    assert r"step 8 \| is" in markdown(summary)


def test_what_differs_first_and_why_is_on_the_page(tmp_path: Path) -> None:
    why = "the loss of step 8 is 2 instead of 1.\n  not tracked: norm.mean on <b>rank 1</b>\nRemedy: run.track(norm=norm)."
    out = write_run(tmp_path / "out", holds=False, diagnosis=why)
    summary = make_report(out)
    page = (out / "report.html").read_text()
    told = page.partition("What differs first, and why")[2].partition("</section>")[0]
    assert "<p>the loss of step 8 is 2 instead of 1.</p>" in told
    assert "<li>not tracked: norm.mean on &lt;b&gt;rank 1&lt;/b&gt;</li>" in told
    assert "<p>Remedy: run.track(norm=norm).</p>" in told
    assert "norm.mean" in markdown(summary)


def test_where_a_report_cannot_be_written_that_is_said(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    (out / "report.md").mkdir()
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        make_report(out)
    tally = tmp_path / "tally.jsonl"
    tally.write_bytes(msgspec.json.encode(TallyHeader(command=("train.py",))) + b"\n")
    with pytest.raises(UsageError, match="cannot be written"):
        write_overview(tally, tmp_path / "nowhere" / "page.html")


def test_where_nothing_differs_there_is_no_reason_for_it(tmp_path: Path) -> None:
    make_report(out := write_run(tmp_path / "out"))
    assert "What differs first" not in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.32, "0.32 s"),
        (12.0, "12 s"),
        (125.0, "2 min 5 s"),
        (9000.0, "2 h 30 min"),
    ],
)
def test_times_are_said_in_their_own_unit(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_quantiles_are_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([3.0], 0.99), quantile([], 0.5)) == (
        50,
        99,
        3,
        None,
    )


# -- a campaign
def line_of(seed: int, label: str = "survivable", holds: bool | None = True, **more: object) -> TallyLine:
    some: dict[str, Any] = {"faults": ("kill", "pause"), "struck": 2, "because": "exit code 0"}
    some |= {"layout": "2x3-1 ddp exact", "recoveries": 2, "steps": 30, "seconds": 8.0}
    return TallyLine(seed=seed, label=label, holds=holds, **some | more)


def write_tally(path: Path, *lines: TallyLine) -> Path:
    rows = [TallyHeader(command=("train.py", "{wrap}")), *lines]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


def test_the_tally_of_a_campaign_is_one_page(tmp_path: Path) -> None:
    wrong = line_of(31, "beyond", False, struck=0, faults=("kill",), wrong={"ending": "<hung>"})
    unknown = line_of(30, "beyond", None, struck=0, faults=("partition",), wrong={"strikes": "late"})
    tally = write_tally(tmp_path / "tally.jsonl", unknown, wrong, *map(line_of, range(30)))
    told = write_overview(tally, tmp_path / "tally.html")
    page = (tmp_path / "tally.html").read_text()
    assert [line.seed for line in told] == list(range(32))
    assert tally_line(told) == "chaos: 32 runs, 60 faults: 30 true, 1 FALSE, 1 unknown"
    assert "ending: &lt;hung&gt;" in page
    assert page.index("ending: ") < page.index("strikes: late")
    assert "network" in page
    squares = [one for one in figures_in(tmp_path / "tally.html")["seeds"].iter("i") if "title" in one.attrib]
    assert [one.attrib["class"] for one in squares] == ["holds"] * 30 + ["unknown", "fails"]
    assert "seed 31: FALSE beyond, kill " in squares[31].attrib["title"]  # XML takes line breaks there for spaces


def test_what_a_tally_says_cannot_change_the_page(tmp_path: Path) -> None:
    evil = line_of(7, f"a{EVIL}", False, faults=(f"b{EVIL}",), layout=f"c{EVIL}", wrong={f"d{EVIL}": f"e{EVIL}"})
    unknown = line_of(8, holds=None, because=f"f{EVIL}")
    tally = write_tally(tmp_path / "a '<b>' & \"b\".jsonl", evil, unknown)
    (kept := tmp_path / f"{tally.name}.runs" / "seed-000007").mkdir(parents=True)
    (kept / "report.html").touch()
    write_overview(tally, tmp_path / "tally.html")
    assert is_only_text(tmp_path / "tally.html")
    page = words_of(ET.fromstring((tmp_path / "tally.html").read_text()))
    assert all(f"{letter}{EVIL}" in page for letter in "abcdef")
    assert f"{tally.name}: 2 runs" in page
    assert re.findall('href="(?!data:)(.*?)"', (tmp_path / "tally.html").read_text()) == [
        "a%20%27%3Cb%3E%27%20%26%20%22b%22.jsonl.runs/seed-000007/report.html"
    ]


def test_a_run_that_was_kept_is_led_to(tmp_path: Path) -> None:
    tally = write_tally(tmp_path / "tally.jsonl", line_of(7, holds=False, wrong={"time": "hung"}))
    kept = tmp_path / "tally.jsonl.runs" / "seed-000007"
    kept.mkdir(parents=True)
    (kept / "report.html").touch()
    write_overview(tally, tmp_path / "tally.html")
    assert 'href="tally.jsonl.runs/seed-000007/report.html"' in (tmp_path / "tally.html").read_text()


def test_a_tally_that_is_none_is_refused_and_one_without_seeds_is_not(tmp_path: Path) -> None:
    (tmp_path / "tally.jsonl").write_text("seed 1 was fine\n")
    with pytest.raises(UsageError, match="is not a file of campaign results"):
        write_overview(tmp_path / "tally.jsonl", tmp_path / "tally.html")
    assert write_overview(write_tally(tmp_path / "tally.jsonl"), tmp_path / "tally.html") == []
