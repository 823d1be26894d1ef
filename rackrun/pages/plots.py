"""The geometry of plots. ``plots.html.j2`` has their markup.

Places across are in percent of the plot's width, so that a plot fits every screen; places down are in pixels.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

__all__ = ["Bar", "Chart", "Curve", "Span"]

HINTS = 1_000
"""The most places of a chart that say their values: more than a screen has columns."""


class Curve(NamedTuple):
    """One line of a chart."""

    label: str
    colour: str
    """The name of a colour in ``page.css``, without ``--``."""
    width: float
    """In pixels."""
    rows: Sequence[tuple[float, float, float, float]]
    """First x, last x, smallest y and largest y of each point, sorted by x."""


class Span(NamedTuple):
    """A shaded part of a chart, from one x to another."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A line chart: curves over one x axis, and shaded spans behind them."""

    label: str
    """What it shows, for readers who do not see it."""
    unit: str
    """The unit of the x axis."""
    height: int
    """In pixels, without the figures below the x axis."""
    x: tuple[float, float]
    y: tuple[float, float]
    x_text: str = "{:g}"
    """How a hint shows an x."""
    y_text: str = "{:.6g}"
    curves: Sequence[Curve]
    spans: Sequence[Span] = ()
    spans_label: str = ""

    def legend(self) -> list[tuple[str, str]]:
        """Return each label with the name of its colour."""
        named = [(curve.label, curve.colour) for curve in self.curves]
        return [*named, (self.spans_label, "fault")] if self.spans_label else named

    def across(self, x: float) -> float:
        """Return the place of an x, in percent of the width."""
        return round(100 * _share(x, *self.x), 2)

    def down(self, y: float) -> float:
        """Return the place of a y, in pixels from above."""
        return round(self.height * (1 - _share(y, *self.y)), 1)

    def x_ticks(self) -> list[float]:
        """Return round values on the x axis: few enough for a narrow screen."""
        return _ticks(*self.x, 6)

    def y_ticks(self) -> list[float]:
        """Return round values on the y axis."""
        return _ticks(*self.y, self.height / 50)

    def points(self, curve: Curve) -> str:
        """Return a curve as the points of a polyline, 1,000 units wide."""
        return _points((self._middle(row), self.down(row[2] / 2 + row[3] / 2)) for row in curve.rows)

    def band(self, curve: Curve) -> str:
        """Return the area between smallest and largest y as the points of a polygon; "" if there is none."""
        if all(low == high for _, _, low, high in curve.rows):
            return ""
        below = ((self._middle(row), self.down(row[2])) for row in reversed(curve.rows))
        return " ".join([_points((self._middle(row), self.down(row[3])) for row in curve.rows), _points(below)])

    def hints(self) -> Iterator[tuple[float, float, str]]:
        """Return columns that cover the chart: place and width in percent, and the values there."""
        lasts = {row[0]: row[1] for curve in self.curves for row in curve.rows}
        xs = sorted(lasts)
        xs = xs[:: max(1, -(-len(xs) // HINTS))]
        edges = [self.x[0], *((a + b) / 2 for a, b in pairwise(xs)), self.x[1]]
        for x, (left, right) in zip(xs, pairwise(edges), strict=False):  # an empty chart has a column without a value
            lines = [self.x_text.format(x) + (f" to {lasts[x]:g}" if lasts[x] != x else "")]
            for curve in self.curves:
                at = bisect_right(curve.rows, x, key=itemgetter(0)) - 1
                if at >= 0:
                    low, high = (self.y_text.format(value) for value in curve.rows[at][2:])
                    lines.append(f"{curve.label}: {low if low == high else f'{low} to {high}'}")
            lines += [span.text for span in self.spans if span.start <= right and span.end >= left][:4]
            yield self.across(left), round(self.across(right) - self.across(left), 2), "\n".join(lines)

    def _middle(self, row: tuple[float, float, float, float]) -> float:
        return 10 * self.across((row[0] + row[1]) / 2)


class Bar(NamedTuple):
    """A bar made of parts, one after the other."""

    label: str
    parts: Sequence[tuple[str, str, float]]
    """Name, colour as in `Curve`, and size."""


def _share(value: float, low: float, high: float) -> float:
    """Return how far a value is on the way from ``low`` to ``high``. Halves, since their difference is a number."""
    return (value / 2 - low / 2) / ((high / 2 - low / 2) or 1)


def _ticks(low: float, high: float, about: float) -> list[float]:
    least = (high / about - low / about) or 1.0
    power = 10.0 ** math.floor(math.log10(least))
    step = power * next((n for n in (1, 2, 5) if n * power >= least), 10)
    if math.isinf(step):
        return []
    return [float(f"{n * step:.12g}") for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _points(places: Iterator[tuple[float, float]]) -> str:
    return " ".join(f"{x:.5g},{y:g}" for x, y in places)
