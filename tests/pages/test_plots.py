"""Where the points, ticks and hints of a plot are."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from rackrun.pages.plots import HINTS, Bar, Chart, Curve, Span
from rackrun.pages.templates import render


def chart(*curves: Curve, x: tuple[float, float] = (0, 10), y: tuple[float, float] = (0, 4)) -> Chart:
    spans = [Span(2, 3, "strike 0: kill")]
    return Chart(label="", unit="step", height=200, x=x, y=y, x_text="step {:.0f}", curves=curves, spans=spans)


def test_y_grows_upwards_and_x_is_in_percent() -> None:
    assert [chart().across(x) for x in (0, 5, 10)] == [0, 50, 100]
    assert [chart().down(y) for y in (0, 1, 4)] == [200, 150, 0]
    assert (chart(x=(3, 3)).across(3), chart(y=(2, 2)).down(2)) == (0, 200)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 59, [0, 10, 20, 30, 40, 50]),
        (0.3, 0.6, [0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6]),
        (-3, 3, [-3, -2, -1, 0, 1, 2, 3]),
        (7, 7, [7]),
        (0, 120_000, [0, 20_000, 40_000, 60_000, 80_000, 100_000, 120_000]),
        (0, 1.5e308, [0, 5e307, 1e308, 1.5e308]),
    ],
)
def test_ticks_are_round_values(low: float, high: float, ticks: list[float]) -> None:
    assert chart(x=(low, high)).x_ticks() == ticks


def test_the_largest_numbers_have_places() -> None:
    most = 1.7e308
    curve = Curve("loss", "faulted", 1, [(0, 0, -most, -most), (10, 10, -most, most), (20, 20, most, most)])
    shown = chart(curve, x=(0, 20), y=(-most, most))
    assert shown.points(curve) == "0,200 500,100 1000,0"
    assert shown.band(curve) == "0,200 500,0 1000,0 1000,0 500,200 0,200"
    assert all(math.isfinite(tick) for tick in shown.y_ticks())


def test_a_point_stands_for_steps_and_its_band_for_what_they_span() -> None:
    merged = Curve("loss", "faulted", 1, [(0, 1, 2.0, 2.0), (2, 3, 1.0, 3.0)])
    assert chart(merged).points(merged) == "50,100 250,100"
    assert chart(merged).band(merged) == "50,100 250,50 250,150 50,100"
    single = Curve("loss", "faulted", 1, [(0, 0, 2.0, 2.0)])
    assert chart(single).band(single) == ""


def test_hints_cover_the_chart_and_say_the_values_there() -> None:
    mine = Curve("mine", "faulted", 1, [(0, 1, 2.0, 2.0), (2, 3, 1.0, 3.0), (8, 8, 4.0, 4.0)])
    theirs = Curve("theirs", "reference", 1, [(2, 3, 1.5, 1.5)])
    found = list(chart(mine, theirs).hints())
    assert [(at, width) for at, width, _ in found] == [(0, 10), (10, 40), (50, 50)]
    assert [text.splitlines() for _, _, text in found] == [
        ["step 0 to 1", "mine: 2"],
        ["step 2 to 3", "mine: 1 to 3", "theirs: 1.5", "strike 0: kill"],
        ["step 8", "mine: 4", "theirs: 1.5"],
    ]
    many = Curve("many", "faulted", 1, [(n, n, 0.0, 0.0) for n in range(5 * HINTS)])
    assert len(list(chart(many, x=(0, 5 * HINTS)).hints())) == HINTS
    assert list(chart(Curve("none", "faulted", 1, [])).hints()) == []


def test_the_parts_of_a_bar_follow_each_other_and_the_longest_bar_fills_the_plot(tmp_path: Path) -> None:
    template = tmp_path / "bars.html.j2"
    template.write_text('{% from "plots.html.j2" import bars %}{{ bars(shown, "times", "{:g} s".format) }}')
    short = Bar("short", [("one", "detect", 1.0), ("two", "break", 3.0)])
    shown = [short, Bar("long", [("one", "detect", 8.0)]), Bar("empty", [("one", "detect", 0.0)])]
    svgs = list(ET.fromstring(render(template, shown=shown)).iter("svg"))
    places = [
        [[float(one.attrib[name].rstrip("%")) for name in ("x", "width")] for one in svg.iter("rect")] for svg in svgs
    ]
    assert places == [[[0, 12.5], [12.5, 37.5]], [[0, 100]], [[0, 0]]]
    assert [title.text for title in svgs[0].iter("title")] == ["one: 1 s of 4 s, 25.0%", "two: 3 s of 4 s, 75.0%"]
    assert [text.text for svg in svgs for text in svg.iter("text")] == ["4 s", "8 s", "0 s"]
    assert ET.fromstring(render(template, shown=shown[2:])) is not None
    assert not [*ET.fromstring(render(template, shown=[])).iter("svg")]
