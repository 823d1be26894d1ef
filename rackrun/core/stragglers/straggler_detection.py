"""Which ranks are slow: from the time that each spends on its own, step by step. Pure, and the same for the same steps.

*Rows.* Own times are added up until they cover `Limits.row_s` of the job's time, so that a row of tiny steps is as long as one large
step, and no hiccup of the host fills a window. The last `Limits.window` rows are looked at.

*Peers.* A rank is compared with the lower median of those that do the same work (its group), row by row. It is *behind* in a row
when it takes `Limits.row_times` as long, and the others lose `Limits.cost` of the row by it. The lower median holds while no more than half
are slow: two of two it cannot tell, nor five of eight; then nobody is blamed.

*Persistence.* A rank is slow when it was behind in `Limits.hits` rows of the window, and its median is `Limits.times` that of its
peers and stands out of the noise: of a row (by how much peers differ) and of its own (by how much it varies: by itself, or beside
its peers, whichever is less). It is slow no more
after it was behind in at most `Limits.clear` rows of a window. So no single row, and no few, condemn anybody, and nobody flutters.

*The past.* The best window of each rank, and of the world, is remembered. If three quarters of the world's rows are
`Limits.all_slower` times as long as three quarters of its best window's there is nobody to blame; it is said, until three quarters are
short again.
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

__all__ = ["Limits", "Seat", "Stragglers", "Verdict"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    window: int = 20
    """Rows."""
    row_s: float = 0.5
    hits: int = 15
    clear: int = 5
    row_times: float = 1.15
    times: float = 1.25
    cost: float = 0.1
    noise: float = 3.0
    """A slow rank's median is above its peers' by this many median absolute deviations of rows."""
    again: float = 1.3
    """A slow rank whose median is so many times what was told, or that part of it, is told of again."""
    all_slower: float = 1.5
    all_as_before: float = 1.2
    settle: int = 3
    """Steps of a new generation, or of a new world, that are not looked at: a newcomer's first are slow for good reasons."""


class Seat(NamedTuple):
    slot: SlotId
    incarnation: int
    group: int
    """Ranks of one group do the same work."""


class Verdict(NamedTuple):
    slow: tuple[SlowRank, ...]
    everybody: float
    """How much longer than in the past all take; 0: they do not."""


@dataclass(slots=True)
class _Windows:
    """(window, ranks); the newest row last. NaN: that rank was not there, or was new."""

    own: Floats
    times: Floats
    """Own time over the peers'."""
    behind: Bools
    noise: Floats
    """(window, ranks): the peers' median absolute deviation, relative."""

    @classmethod
    def empty(cls, rows: int, ranks: int) -> _Windows:
        nan = np.full((rows, ranks), np.nan)
        return cls(nan, nan.copy(), np.zeros((rows, ranks), bool), nan.copy())

    def add(self, own: Floats, times: Floats, behind: Bools, noise: Floats) -> None:
        for ring, row in ((self.own, own), (self.times, times), (self.behind, behind), (self.noise, noise)):
            ring[:-1] = ring[1:]
            ring[-1] = row

    def forget(self, ranks: Bools) -> None:
        self.own[:, ranks] = self.times[:, ranks] = self.noise[:, ranks] = np.nan
        self.behind[:, ranks] = False


@dataclass(slots=True)
class Stragglers:
    """Tell it the `world`, then every `step` that all of its ranks have committed undisturbed."""

    limits: Limits = field(default_factory=Limits)
    _seats: list[Seat] = field(default_factory=list)
    _windows: _Windows = field(default_factory=lambda: _Windows.empty(0, 0))
    _past: Floats = field(default_factory=lambda: np.zeros(0))
    """Of each rank: its best window's median; NaN while it has had none."""
    _world_past: float = 0.0
    _slow: Bools = field(default_factory=lambda: np.zeros(0, bool))
    _everybody: bool = False
    _settling: int = 0
    _row: Floats = field(default_factory=lambda: np.zeros(0))
    _row_s: float = 0.0
    _row_steps: int = 0
    _told: Verdict = field(default_factory=lambda: Verdict((), 0.0))

    def world(self, seats: Sequence[Seat]) -> None:
        """A generation begins: the seat of each rank. Who has stayed keeps its past; if the world's size has changed nobody does."""
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

    def step(self, own: Sequence[float], seconds: float) -> Verdict | None:
        """``own``: what each rank spent on its own, as if all had had as much work; ``seconds``: what the step took, in the same
        units. The new verdict, when others are slow than before."""
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
        """Of each rank, a step's median over the window; NaN when it has not been seen long enough."""
        return tuple(_medians(self._windows.own).tolist())

    def _begin_row(self) -> None:
        self._row, self._row_s, self._row_steps = np.zeros(len(self._seats)), 0.0, 0

    def _add_row(self) -> None:
        own, limits = self._row, self.limits
        peers, noise = np.empty_like(own), np.empty_like(own)
        groups = np.array([seat.group for seat in self._seats])
        for group in np.unique(groups):
            at = groups == group
            peers[at] = usual = max(_lower_median(own[at]), 1e-9)
            noise[at] = _lower_median(np.abs(own[at] - usual)) / usual
        times = own / peers
        behind = (times >= limits.row_times) & (own - peers >= limits.cost * self._row_s)
        self._windows.add(own / self._row_steps, times, behind, noise)

    def _judge(self) -> Verdict | None:
        limits, windows = self.limits, self._windows
        now, times = _medians(windows.own), _medians(windows.times)
        usual_peers = _medians(windows.own / windows.times)
        # Where its peers vary, so does what it is times them, however steady it is; where the work does, both do, and not their ratio.
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
        verdict = Verdict(found, self._compare_with_past(whole))
        if self._is_known(verdict) and bool(verdict.everybody) == bool(self._told.everybody):
            return None
        self._told = verdict
        return verdict

    def _compare_with_past(self, whole: Bools) -> float:
        """By the usual rank of each row, so that a few slow ones are not everybody."""
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

    def _is_known(self, verdict: Verdict) -> bool:
        """The same ranks are slow, and about as slow as they were, or on their way not to be."""
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
    """Of two, the smaller."""
    middle = (len(values) - 1) // 2
    return float(np.partition(values, middle)[middle])


def _medians(window: Floats) -> Floats:
    """Over the rows that are known; NaN where too few are."""
    known = (~np.isnan(window)).sum(0)
    middle = np.sort(window, axis=0)[np.maximum(known - 1, 0) // 2, np.arange(window.shape[1])]  # NaN is sorted last
    found: Floats = np.where(known > len(window) // 2, middle, np.nan)
    return found
