"""The pages in a real browser: every plot is drawn, nothing is complained of, nothing is fetched, nothing sticks out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.chaos.cli.campaign_page import write_overview
from rackrun.chaos.evidence.run_evidence import Verdict
from rackrun.chaos.report.write_reports import make_report
from tests.chaos.browser import Browser, find_browser
from tests.chaos.recorded import write_run
from tests.chaos.report.test_report import line_of, write_tally

pytestmark = [
    pytest.mark.stories,
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="there is no browser: install chromium"),
]

PLOTS = ("losses", "progress", "waterfall", "goodput", "map")
DRAWN = """Object.fromEntries([...document.querySelectorAll('figure')].map(f => {
  const high = f.getBoundingClientRect().height - f.querySelector('figcaption').getBoundingClientRect().height;
  return [f.dataset.plot, (high > 30) === (f.dataset.drawn === 'plot') ? f.dataset.drawn : `${f.dataset.drawn}, ${high} px`];
}))"""
COLOURS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('svg text.strong')).fill]"
OUTSIDE = """[...document.querySelectorAll('svg text')].filter(one => {
  const own = one.getBoundingClientRect(), of = one.closest('figure').getBoundingClientRect();
  return own.left < of.left - 1 || own.right > of.right + 1 || own.top < of.top - 1 || own.bottom > of.bottom + 1;
}).map(one => one.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    assert executable
    with Browser(executable, tmp_path_factory.mktemp("profile")) as started:
        yield started


def opened(browser: Browser, page: Path, width: int = 1100, *, dark: bool = False) -> dict[str, str]:
    browser.complaints.clear()
    browser.requests.clear()
    browser.look(width, dark=dark)
    browser.open(page)
    found: dict[str, str] = json.loads(browser.run(f"JSON.stringify({DRAWN})"))
    assert not browser.complaints
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    return found


@pytest.mark.parametrize("width", [1100, 390])
def test_every_plot_is_drawn_and_nothing_is_cut_off(width: int, browser: Browser, tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", ranks=12, steps=60, kills={7: 1, 8: 2, 40: 1})
    make_report(out)
    assert opened(browser, out / "report.html", width) == dict.fromkeys(PLOTS, "plot")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(OUTSIDE) == []
    assert "0 differ" in browser.run("document.querySelector('[data-plot=losses] .said').textContent")
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_it_is_light_or_dark_as_its_reader_likes(browser: Browser, tmp_path: Path) -> None:
    make_report(write_run(tmp_path / "out"))
    opened(browser, tmp_path / "out" / "report.html")
    light = browser.run(COLOURS)
    opened(browser, tmp_path / "out" / "report.html", dark=True)
    dark = browser.run(COLOURS)
    assert light[0] == dark[1].replace("rgb(228, 232, 238)", light[0])  # paper is light, then ink is
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_a_hint_says_what_is_under_the_pointer(browser: Browser, tmp_path: Path) -> None:
    make_report(write_run(tmp_path / "out"))
    opened(browser, tmp_path / "out" / "report.html")
    under = """(query => { const one = document.querySelector(query);
      one.scrollIntoView({block: 'center'});
      const area = one.getBoundingClientRect();
      const hit = document.elementFromPoint(area.left + area.width / 2, area.top + area.height / 3);
      return hit.querySelector('title').textContent; })"""
    said = browser.run(f"{under}('[data-plot=losses] svg svg')")
    assert said.startswith(("step 9\n", "step 10\n"))
    assert "without faults: " in said
    assert browser.run(f"{under}('[data-plot=waterfall] rect')").startswith("detect: 3 ms of 0.35 s, ")
    slot = browser.run("document.querySelector('[data-plot=map] .slot').title")
    assert slot.startswith("tray-00/0\nrank 0 at the start\n")


def test_a_failure_and_runs_of_which_little_is_left_are_shown_too(browser: Browser, tmp_path: Path) -> None:
    wrong = [Verdict(oracle="losses", holds=False, because="the loss of step 9 is another")]
    failed = write_run(tmp_path / "failed", wrong_step=9, holds=False, verdicts=wrong)
    make_report(failed)
    assert opened(browser, failed / "report.html") == dict.fromkeys(PLOTS, "plot")
    assert "1 differ" in browser.run("document.querySelector('[data-plot=losses] .said').textContent")
    assert browser.run("document.querySelectorAll('.differs').length") == 1
    assert browser.run("document.querySelector('header').className") == "fails"
    gone = write_run(tmp_path / "gone")
    for folder in ("faulted", "reference"):
        (gone / folder / "run" / "journal.sqlite").unlink()
    make_report(gone)
    drawn = opened(browser, gone / "report.html")
    assert drawn["losses"] == "nothing"
    assert drawn["map"] == "plot"
    calm = write_run(tmp_path / "calm", kills={})
    make_report(calm)
    assert opened(browser, calm / "report.html")["waterfall"] == "nothing"


def test_a_campaign_is_shown(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name-" * 9)
    folder.mkdir()
    tally = write_tally(folder / "tally.jsonl", *(line_of(seed, holds=seed % 7 != 3) for seed in range(500)))
    write_overview(tally, tmp_path / "tally.html")
    for width in (1100, 390):
        assert opened(browser, tmp_path / "tally.html", width) == {"seeds": "plot"}
        assert browser.run("document.querySelectorAll('.squares i').length") == 500
        assert browser.run("document.documentElement.scrollWidth") <= width
