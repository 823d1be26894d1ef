"""Detection of slow ranks from each rank's own time, step by step: pure and deterministic.

*Rows.* Own times are added up until they cover `Limits.row_s` of the job's time. So a row of tiny steps is as long as
one large step, and a short disturbance of the host does not fill a window. The last `Limits.window` rows are evaluated.

*Peers.* In each row a rank is compared with the lower median of the ranks that do the same work (its group). It is
*behind* in a row if it takes `Limits.row_times` as long, and the others lose `Limits.cost` of the row by it. The lower
median is valid while at most half of the group is slow. It cannot tell two of two, or five of eight; then no rank is
blamed.

*Persistence.* A rank is slow if it was behind in `Limits.hits` rows of the window, and its median is `Limits.times`
that of its peers and exceeds the noise: the noise of a row (how much peers differ) and its own (how much it varies, by
itself or relative to its peers, whichever is less). It is no longer slow after it was behind in at most `Limits.clear`
rows of a window. So a few rows never decide, and the result does not flip back and forth.

*The past.* The best window of each rank, and of the world, is kept. If three quarters of the world's rows are
`Limits.all_slower` times as long as three quarters of its best window's, no rank is to blame. This is reported until
three quarters are short again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rackrun.protocol.events import SlowRank
from rackrun.protocol.ids import Rank, SlotId

__all__ = ["Limits", "RankPlace", "Stragglers", "StragglerVerdict"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Thresholds of the detection; the module's docstring explains them."""

    window: int = 20
    """Number of rows in the window."""
    row_s: float = 0.5
    """Shortest time that a row covers, in seconds."""
    hits: int = 15
    clear: int = 5
    row_times: float = 1.15
    times: float = 1.25
    cost: float = 0.1
    noise: float = 3.0
    """By how many median absolute deviations of rows a slow rank's median exceeds its peers'."""
    again: float = 1.3
    """A slow rank is reported again when its ratio to its peers has changed by this factor since its last report."""
    all_slower: float = 1.5
    all_as_before: float = 1.2
    settle: int = 3
    """Number of first steps of a new generation or world that are ignored: a newcomer's first steps are slow for good
    reasons."""


class RankPlace(NamedTuple):
    """The slot of a rank, the incarnation of its worker, and its group."""

    slot: SlotId
    incarnation: int
    group: int
    """Ranks of one group do the same work."""


class StragglerVerdict(NamedTuple):
    """The slow ranks, and whether the whole world is slower than before."""

    slow: tuple[SlowRank, ...]
    everybody: float
    """Present time of all ranks divided by their former time; 0: they are not slower."""


@dataclass(slots=True)
class _Windows:
    """The latest rows, newest last, as float64 or bool arrays of shape (window, ranks). NaN: the rank was not there, or
    was new."""

    own: Floats
    times: Floats
    """Own time divided by the peers'."""
    behind: Bools
    noise: Floats
    """The peers' median absolute deviation, relative; shape (window, ranks)."""

    @classmethod
    def empty(cls, rows: int, ranks: int) -> _Windows:
        """Return windows of shape (rows, ranks) without any measurement: NaN and False."""
        nan = np.full((rows, ranks), np.nan)
        return cls(nan, nan.copy(), np.zeros((rows, ranks), bool), nan.copy())

    def add(self, own: Floats, times: Floats, behind: Bools, noise: Floats) -> None:
        """Append one step, a row of shape (ranks,) for each window; the oldest row goes."""
        for ring, row in ((self.own, own), (self.times, times), (self.behind, behind), (self.noise, noise)):
            ring[:-1] = ring[1:]
            ring[-1] = row

    def forget(self, ranks: Bools) -> None:
        """Drop all measurements of ``ranks``, a mask of shape (ranks,)."""
        self.own[:, ranks] = self.times[:, ranks] = self.noise[:, ranks] = np.nan
        self.behind[:, ranks] = False


@dataclass(slots=True)
class Stragglers:
    """Detects slow ranks. Call `world` at the beginning of a generation, then `step` for every step that all ranks
    committed undisturbed."""

    limits: Limits = field(default_factory=Limits)
    _seats: list[RankPlace] = field(default_factory=list)
    _windows: _Windows = field(default_factory=lambda: _Windows.empty(0, 0))
    _past: Floats = field(default_factory=lambda: np.zeros(0))
    """Best window median of each rank; NaN: none yet."""
    _world_past: float = 0.0
    _slow: Bools = field(default_factory=lambda: np.zeros(0, bool))
    _everybody: bool = False
    _settling: int = 0
    _row: Floats = field(default_factory=lambda: np.zeros(0))
    _row_s: float = 0.0
    _row_steps: int = 0
    _told: StragglerVerdict = field(default_factory=lambda: StragglerVerdict((), 0.0))

    def world(self, seats: Sequence[RankPlace]) -> None:
        """Begin a generation with these seats.

        A rank that stays keeps its past. If the world's size has changed, no rank keeps it.
        """
        size = len(seats)
        if size != len(self._seats):
            self._windows = _Windows.empty(self.limits.window, size)
            self._past, self._slow = np.full(size, np.nan), np.zeros(size, bool)
            self._world_past, self._everybody = 0.0, False
        else:
            new = np.array([one != other for one, other in zip(seats, self._seats, strict=True)])
            self._windows.forget(new)
            self._past[new], self._slow[new] = np.nan, False
        self._seats = list(seats)
        self._settling = self.limits.settle
        self._begin_row()

    def step(self, own: Sequence[float], seconds: float) -> StragglerVerdict | None:
        """Add a step; return the new verdict if it has changed, else None.

        ``own``: each rank's own time, as if all had had the same amount of work. ``seconds``: the step's time, in the
        same unit.
        """
        assert len(own) == len(self._seats), "one time for each rank"
        if self._settling:
            self._settling -= 1
            return None
        self._row += own
        self._row_s += seconds
        self._row_steps += 1
        if self._row_s < self.limits.row_s:
            return None
        self._add_row()
        self._begin_row()
        return self._judge()

    def own_s(self) -> tuple[float, ...]:
        """Return each rank's median own time of a step over the window; NaN if there are too few rows."""
        return tuple(_medians(self._windows.own).tolist())

    def _begin_row(self) -> None:
        self._row, self._row_s, self._row_steps = np.zeros(len(self._seats)), 0.0, 0

    def _add_row(self) -> None:
        own, limits = self._row, self.limits
        peers, noise = np.empty_like(own), np.empty_like(own)
        groups = np.array([seat.group for seat in self._seats])
        for group in sorted({seat.group for seat in self._seats}):
            at = groups == group
            peers[at] = usual = max(_lower_median(own[at]), 1e-9)
            noise[at] = _lower_median(np.abs(own[at] - usual)) / usual
        times = own / peers
        behind = (times >= limits.row_times) & (own - peers >= limits.cost * self._row_s)
        self._windows.add(own / self._row_steps, times, behind, noise)

    def _judge(self) -> StragglerVerdict | None:
        limits, windows = self.limits, self._windows
        now, times = _medians(windows.own), _medians(windows.times)
        usual_peers = _medians(windows.own / windows.times)
        # If its peers vary, the ratio varies although the rank is steady. If the work varies, only the ratio is steady.
        wobble = np.fmin(
            _medians(np.abs(windows.times - times)), _medians(np.abs(windows.own - now)) / np.fmax(usual_peers, 1e-9)
        )
        margin = limits.noise * np.fmax(_medians(windows.noise), wobble)
        hits = windows.behind.sum(0)
        enough = (hits >= limits.hits) & (times >= limits.times) & (times - 1 >= margin)
        slow: Bools = enough | (self._slow & (hits > limits.clear))
        whole: Bools = np.asarray(~np.isnan(windows.own).any(0))
        past = self._past.copy()
        self._past[whole] = np.fmin(past, now)[whole]
        self._slow = slow
        found = tuple(self._described(rank, now, times, past, hits) for rank in np.flatnonzero(slow).tolist())
        verdict = StragglerVerdict(found, self._compare_with_past(whole))
        if self._is_known(verdict) and bool(verdict.everybody) == bool(self._told.everybody):
            return None
        self._told = verdict
        return verdict

    def _compare_with_past(self, whole: Bools) -> float:
        """Return by how much the world is slower than in the past. The median rank of each row counts, so a few slow
        ranks have no effect."""
        if not whole.all():
            return self._told.everybody if self._everybody else 0.0
        middle = (len(whole) - 1) // 2
        rows: Floats = np.partition(self._windows.own, middle, axis=1)[:, middle]
        quarter = len(rows) // 4
        low, usual, high = np.sort(rows)[[quarter, len(rows) // 2, -1 - quarter]].tolist()
        past = self._world_past
        self._world_past = min(past, high) if past else high
        if not past:
            return 0.0
        limits = self.limits
        self._everybody = high >= limits.all_as_before * past if self._everybody else low >= limits.all_slower * past
        return round(usual / past, 2) if self._everybody else 0.0

    def _is_known(self, verdict: StragglerVerdict) -> bool:
        """Return whether the same ranks were slow before, and about as slow, or are recovering."""
        known, limits = {(one.rank, one.slot): one.times for one in self._told.slow}, self.limits
        now = {(one.rank, one.slot): one.times for one in verdict.slow}
        return now.keys() == known.keys() and all(
            times < limits.times or 1 / limits.again < times / known[one] < limits.again for one, times in now.items()
        )

    def _described(self, rank: int, now: Floats, times: Floats, past: Floats, hits: npt.NDArray[np.int64]) -> SlowRank:
        before = float(past[rank])
        return SlowRank(
            rank=Rank(rank),
            slot=self._seats[rank].slot,
            times=round(float(times[rank]), 2),
            own_ms=round(1e3 * float(now[rank]), 3),
            past=0.0 if np.isnan(before) or before <= 0 else round(float(now[rank]) / before, 2),
            rows=int(hits[rank]),
            window=self.limits.window,
        )


def _lower_median(values: Floats) -> float:
    """Return the lower median: of two values, the smaller."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])


def _medians(window: Floats) -> Floats:
    """Return each rank's median over its known rows; NaN if at most half are known."""
    known = (~np.isnan(window)).sum(0)
    middle = np.sort(window, axis=0)[np.maximum(known - 1, 0) // 2, np.arange(window.shape[1])]  # NaN is sorted last
    found: Floats = np.where(known > len(window) // 2, middle, np.nan)
    return found
