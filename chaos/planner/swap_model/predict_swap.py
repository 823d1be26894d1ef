"""Predict how long a swap takes on GPUs, stage by stage, for a number of ranks, groups, and bytes of state. Pure.

The stages of a swap are: notice, break and revoke, decide, build the groups again, restore the newcomer. Work done
again afterwards depends on the step and is not included. Neither is a host that falls silent, whose lease comes before
all of this.

All members of a group build it again at the same moment, so a rank waits for its own groups, not for all groups. The
world's own group, if it is large, is built only where it is used. Hosts then sum the gate in a tree of small groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.planner.swap_model.stage_costs import (
    EAGER_RANKS,
    FIGURES,
    GATE_FANOUT,
    GROWN_BY_S,
    SHRUNK_BY_S,
    Figure,
    Figures,
    Link,
    Source,
    between,
    built_s,
    cold_s,
)

__all__ = ["SwapScenario", "PredictionRow", "Swap", "predict_swap"]

_EDGES = ("low", "likely", "high")
_HONESTY: tuple[Source, ...] = ("reasoned", "public", "measured")
"""The kinds of source, from the least to the most certain. A sum is as certain as its least certain part."""


class SwapScenario(msgspec.Struct, frozen=True, kw_only=True):
    """The swap to predict."""

    ranks: int
    groups: Mapping[str, int]
    """Axis -> ranks of one group on it, as in a mesh: ``{"tp": 8, "dp": 128}``. A rank is in one group of each."""
    state_bytes: float
    """Bytes of state of one rank."""
    link: Link = "nvlink"
    """From where a newcomer is restored: a replica's GPU, a snapshot on its own host, a replica on another host."""
    gate: str = "host"
    """``host``: no communicator on GPUs is as large as the world; ``gpu``: the gate's is."""
    at_once: bool = False
    """Whether a rank's groups are built at the same time, rather than one after another."""

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise PlannerError(
                f"a swap needs a peer, which a world of {self.ranks} rank(s) does not have.", remedy="give 2 or more."
            )
        if not 0 <= self.state_bytes < math.inf:
            raise PlannerError(
                f"the state of a rank cannot have {self.state_bytes} bytes.", remedy="give bytes from 0."
            )
        if self.gate not in ("host", "gpu"):
            raise PlannerError(f"the gate cannot run on {self.gate!r}.", remedy="give host or gpu.")
        for name, size in self.groups.items():
            if not 1 <= size <= self.ranks or self.ranks % size:
                raise PlannerError(
                    f"groups of {size} ranks ({name}) do not divide {self.ranks} ranks.",
                    remedy="give sizes that do, from 1.",
                )
        if math.prod(self.groups.values()) > self.ranks:
            sizes = " x ".join(map(str, self.groups.values()))
            raise PlannerError(
                f"a mesh of {sizes} needs more than the {self.ranks} ranks that there are.",
                remedy="give the sizes of the mesh's axes.",
            )

    def on_gpus(self) -> dict[str, int]:
        """Return the communicators on GPUs that a rank is in: name -> size."""
        world = {"world": self.ranks} if self.gate == "gpu" else {}
        return {name: size for name, size in {**self.groups, **world}.items() if size > 1}

    def on_hosts(self) -> int:
        """Return the number of connections of rank 0, which has the most.

        They go to all other ranks of a small world, and within the blocks of the gate's tree of a large one.
        """
        whole = self.ranks - 1 if self.ranks <= EAGER_RANKS or self.gate == "gpu" else 0
        return whole + sum(
            min(GATE_FANOUT, math.ceil(self.ranks / math.pow(GATE_FANOUT, level))) - 1
            for level in range(math.ceil(math.log(self.ranks, GATE_FANOUT)))
            if self.ranks > GATE_FANOUT
        )


class PredictionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table, in seconds."""

    stage: str
    low: float
    likely: float
    high: float
    source: Source
    where: str
    counts: bool = False
    """Whether the stage is a part of the whole swap."""


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction."""

    question: SwapScenario
    rows: tuple[PredictionRow, ...]
    calibration: str
    """The measurements that the figures are from, or "not calibrated"."""
    held_against: tuple[str, ...] = ()
    """Measurements that do not enter the model, each with the prediction for the same."""

    def row(self, stage: str) -> PredictionRow:
        return next(row for row in self.rows if row.stage == stage)


WARM, COLD = "build groups, all warm", "build groups, the spare cold"


def predict_swap(question: SwapScenario, figures: Figures = FIGURES, calibration: str = "not calibrated") -> Swap:
    """Return the table of stages, with the whole swap at the end."""
    notice = _row("notice a dead process", _notice(question, figures), *_noticed(question, figures), counts=True)
    revoke = _row("break, revoke, device quiet", _each(figures.revoke), figures.revoke, counts=True)
    decide = _row("decide, persist", _each(figures.decide), figures.decide, counts=True)
    warm = _row(WARM, _build(question, figures, cold=False), *_builders(figures, cold=False), counts=True)
    cold = _row(COLD, _build(question, figures, cold=True), *_builders(figures, cold=True))
    restore = _restore(question, figures)
    parts = [notice, revoke, decide, warm, restore]
    rows = [
        notice, revoke, decide, warm, cold, *_other_ways(question), restore,
        _sum("whole swap, spare warm", parts), _sum("whole swap, spare cold", [*parts[:3], cold, restore]),
    ]  # fmt: skip
    return Swap(question=question, rows=tuple(rows), calibration=calibration)


def _each(figure: Figure) -> tuple[float, float, float]:
    return figure.low, figure.likely, figure.high


def _notice(question: SwapScenario, figures: Figures) -> tuple[float, ...]:
    doublings = max(math.log2(question.ranks / 64), 0.0)
    return tuple(
        base + doublings * more
        for base, more in zip(_each(figures.notice), _each(figures.notice_doubling), strict=True)
    )


def _noticed(question: SwapScenario, figures: Figures) -> tuple[Figure, ...]:
    return (figures.notice, figures.notice_doubling) if question.ranks > 64 else (figures.notice,)


def _build(question: SwapScenario, figures: Figures, *, cold: bool) -> tuple[float, ...]:
    """Return the time to build a rank's communicators on GPUs, and the hosts' connections for the world's group and its
    gate."""
    join = max if question.at_once else sum
    out = []
    for edge in _EDGES:
        build, growth = getattr(figures.build, edge), getattr(figures.build_growth, edge)
        sizes = question.on_gpus().values()
        gpus = join([built_s(build, growth, size) for size in sizes] or [0.0])
        if cold and sizes:
            first, doubling = getattr(figures.first_build, edge), getattr(figures.first_build_doubling, edge)
            gpus += cold_s(first, doubling, max(sizes))
        hosts = getattr(figures.host_pair, edge) * question.on_hosts()
        out.append(join([gpus, hosts]))
    return tuple(out)


def _builders(figures: Figures, *, cold: bool) -> tuple[Figure, ...]:
    more = (figures.first_build, figures.first_build_doubling) if cold else ()
    return figures.build, figures.build_growth, figures.host_pair, *more


def _restore(question: SwapScenario, figures: Figures) -> PredictionRow:
    rate, start = figures.restore[question.link], figures.restore_start
    values = [
        start.low + question.state_bytes / rate.high,
        start.likely + question.state_bytes / rate.likely,
        start.high + question.state_bytes / rate.low,
    ]
    return _row(f"restore over {question.link}", values, rate, counts=True)


def _other_ways(question: SwapScenario) -> Iterable[PredictionRow]:
    """Yield, for comparison, what NCCL offers instead of building the largest group again.

    It renumbers ranks, so it is of use to a world that shrinks.
    """
    size = max(question.on_gpus().values(), default=0)
    shrunk, grown = between(SHRUNK_BY_S, size), between(GROWN_BY_S, size)
    if size < 2:
        return
    if shrunk is None or grown is None:
        yield PredictionRow(
            stage="shrink and grow instead",
            low=math.nan,
            likely=math.nan,
            high=math.nan,
            source="public",
            where=f"nobody has published it for {size} ranks",
        )
        return
    low, high = shrunk[0] + grown[0], shrunk[1] + grown[1]
    yield PredictionRow(
        stage="shrink and grow instead",
        low=low,
        likely=(low + high) / 2,
        high=high,
        source="public",
        where=f"NVIDIA-NeMo/RL #3186, #3334, at {size} ranks; the first use costs 1.5 to 2.2 s more there",
    )


def _row(stage: str, values: Iterable[float], *figures: Figure, counts: bool = False) -> PredictionRow:
    low, likely, high = values
    sources = dict.fromkeys(figure.source for figure in figures)
    where = "; ".join(dict.fromkeys(figure.where for figure in figures[:2]))
    return PredictionRow(
        stage=stage,
        low=low,
        likely=likely,
        high=high,
        source=min(sources, key=_HONESTY.index),
        where=where,
        counts=counts,
    )


def _sum(stage: str, rows: Iterable[PredictionRow]) -> PredictionRow:
    rows = list(rows)
    sources = [row.source for row in rows]
    shares = ", ".join(f"{sources.count(source)} {source}" for source in _HONESTY[::-1] if source in sources)
    return PredictionRow(
        stage=stage,
        low=math.fsum(row.low for row in rows),
        likely=math.fsum(row.likely for row in rows),
        high=math.fsum(row.high for row in rows),
        source=min(sources, key=_HONESTY.index),
        where=f"of {len(rows)} stages {shares}",
    )
