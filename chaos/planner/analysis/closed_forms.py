"""What can be said with a formula: beside each simulated figure, where its assumptions hold.

========== ================================================================================================================
young      J. W. Young, A First Order Approximation to the Optimum Checkpoint Interval, CACM 17(9), 1974
daly       J. T. Daly, A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps, FGCS 22(3), 2006
two_levels A. Benoit et al., Towards Optimal Multi-Level Checkpointing, IEEE Transactions on Computers 66(7), 2017
meta_ettr  A. Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, arXiv:2410.21680
erlang_*   A. K. Erlang's loss and delay formulas; any text on queues
========== ================================================================================================================

Times are in one unit, whichever; a rate is one over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = [
    "all_racks_ok",
    "daly",
    "daly_efficiency",
    "erlang_b",
    "erlang_c",
    "ettr",
    "meta_ettr",
    "multi_level_waste",
    "rack_ok",
    "repair_time",
    "two_levels",
    "unavailability",
    "young",
]


def young(cost: float, mtbf: float) -> float:
    """Work between two checkpoints of ``cost``: the first order."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """The same, in higher order; the checkpoint itself is not counted in it."""
    if cost >= 2 * mtbf:
        return mtbf
    x = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost


def daly_efficiency(interval: float, cost: float, mtbf: float, restart: float) -> float:
    """Work over wall time, one level, exponential failures, which strike in checkpoints and restarts too: Daly's complete expression."""
    wall = mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf)
    return interval / wall


def two_levels(costs: Iterable[float], rates: Iterable[float]) -> tuple[float, ...]:
    """An interval for each level, in first order: level l is there for failures that come with ``rates[l]``."""
    return tuple(math.inf if not rate else math.sqrt(2 * cost / rate) for cost, rate in zip(costs, rates, strict=True))


def multi_level_waste(costs: Iterable[float], rates: Iterable[float]) -> float:
    """The share of time that checkpoints and lost work take at `two_levels`, in first order."""
    return sum(math.sqrt(2 * cost * rate) for cost, rate in zip(costs, rates, strict=True))


def meta_ettr(nodes: float, rate: float, restart: float, interval: float, cost: float) -> float:
    """Effective training time ratio of a long run that does not queue: ``rate`` is a node's, ``cost`` what a checkpoint holds up."""
    return max(0.0, 1 - nodes * rate * (restart + interval / 2)) / (1 + cost / interval)


def ettr(rate: float, lost: float, saving: float = 0.0) -> float:
    """Of failures that come with ``rate`` while it runs, and each lose ``lost``: a renewal cycle. ``saving``: time of saving for each of
    work."""
    return 1 / ((1 + saving) * (1 + rate * lost))


def unavailability(mtbf: float, repair: float) -> float:
    """Of a unit, in the long run."""
    return repair / (mtbf + repair)


def rack_ok(trays: int, need: int, down: float) -> float:
    """The chance that of ``trays``, each ``down`` with that chance, ``need`` are up."""
    return min(sum(_binomial(trays, k, down) for k in range(trays - need + 1)), 1.0)


def all_racks_ok(racks: int, trays: int, need: int, down: float, spare_racks: int = 0) -> float:
    """The chance that no more than ``spare_racks`` of ``racks`` have fewer trays up than ``need``."""
    short = 1 - rack_ok(trays, need, down)
    return min(sum(_binomial(racks, k, short) for k in range(spare_racks + 1)), 1.0)


def erlang_b(servers: int, load: float) -> float:
    """The chance that all ``servers`` are busy; who comes then is turned away. ``load``: in erlangs."""
    found = 1.0
    for count in range(1, servers + 1):
        found = load * found / (count + load * found)
    return found


def erlang_c(servers: int, load: float) -> float:
    """The chance that who comes has to wait. 1 where the queue would grow for ever."""
    if load >= servers:
        return 1.0
    blocked = erlang_b(servers, load)
    return blocked / (1 - load / servers * (1 - blocked))


def repair_time(rate: float, repair: float, crews: int | None) -> float:
    """With the wait for a crew, in the mean (M/M/c); infinite where crews cannot keep up."""
    if crews is None:
        return repair
    load = rate * repair
    return math.inf if load >= crews else repair + erlang_c(crews, load) * repair / (crews - load)


def _binomial(count: int, k: int, chance: float) -> float:
    if chance <= 0 or chance >= 1:
        return float(k == (count if chance >= 1 else 0))
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways + k * math.log(chance) + (count - k) * math.log1p(-chance))
