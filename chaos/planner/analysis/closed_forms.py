"""Closed formulas, shown beside simulated figures where their assumptions hold.

========== =========================================================================================================
young      J. W. Young, A First Order Approximation to the Optimum Checkpoint Interval, CACM 17(9), 1974
daly       J. T. Daly, A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps, FGCS 22(3), 2006
two_levels A. Benoit et al., Towards Optimal Multi-Level Checkpointing, IEEE Transactions on Computers 66(7), 2017
meta_ettr  A. Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025,
           arXiv:2410.21680
erlang_*   A. K. Erlang's loss and delay formulas; any text on queues
========== =========================================================================================================

All times are in one unit, whichever; a rate is one over that unit.
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
    """Return the work between two checkpoints that cost ``cost`` each, in first order."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return the same in higher order; the time of the checkpoint itself is not included."""
    if cost >= 2 * mtbf:
        return mtbf
    x = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost


def daly_efficiency(interval: float, cost: float, mtbf: float, restart: float) -> float:
    """Return work over wall time by Daly's complete expression.

    It has one level and exponential failures, which may also strike in checkpoints and restarts.
    """
    wall = mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf)
    return interval / wall


def two_levels(costs: Iterable[float], rates: Iterable[float]) -> tuple[float, ...]:
    """Return an interval for each level, in first order. Level l is for failures that come with ``rates[l]``."""
    return tuple(math.inf if not rate else math.sqrt(2 * cost / rate) for cost, rate in zip(costs, rates, strict=True))


def multi_level_waste(costs: Iterable[float], rates: Iterable[float]) -> float:
    """Return the share of time that checkpoints and lost work take with the intervals of `two_levels`, in first
    order."""
    return sum(math.sqrt(2 * cost * rate) for cost, rate in zip(costs, rates, strict=True))


def meta_ettr(nodes: float, rate: float, restart: float, interval: float, cost: float) -> float:
    """Return the effective training time ratio of a long run that does not queue.

    ``rate`` is the failure rate of one node, ``cost`` the time for which a checkpoint stops the training.
    """
    return max(0.0, 1 - nodes * rate * (restart + interval / 2)) / (1 + cost / interval)


def ettr(rate: float, lost: float, saving: float = 0.0) -> float:
    """Return the effective training time ratio of a renewal cycle.

    Failures come with ``rate`` while the job runs, and each loses ``lost``. ``saving``: the time of saving per unit of
    work.
    """
    return 1 / ((1 + saving) * (1 + rate * lost))


def unavailability(mtbf: float, repair: float) -> float:
    """Return the share of time that a unit is down, in the long run."""
    return repair / (mtbf + repair)


def rack_ok(trays: int, need: int, down: float) -> float:
    """Return the probability that ``need`` of ``trays`` are up, if each is down with probability ``down``."""
    return min(sum(_binomial(trays, k, down) for k in range(trays - need + 1)), 1.0)


def all_racks_ok(racks: int, trays: int, need: int, down: float, spare_racks: int = 0) -> float:
    """Return the probability that at most ``spare_racks`` of ``racks`` have fewer than ``need`` trays up."""
    short = 1 - rack_ok(trays, need, down)
    return min(sum(_binomial(racks, k, short) for k in range(spare_racks + 1)), 1.0)


def erlang_b(servers: int, load: float) -> float:
    """Return the probability that all ``servers`` are busy, where an arrival then is turned away. ``load``: in
    erlangs."""
    found = 1.0
    for count in range(1, servers + 1):
        found = load * found / (count + load * found)
    return found


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that an arrival has to wait; 1 where the queue would grow forever."""
    if load >= servers:
        return 1.0
    blocked = erlang_b(servers, load)
    return blocked / (1 - load / servers * (1 - blocked))


def repair_time(rate: float, repair: float, crews: int | None) -> float:
    """Return the mean time of a repair with the wait for a crew (M/M/c); infinite where the crews cannot keep up."""
    if crews is None:
        return repair
    load = rate * repair
    return math.inf if load >= crews else repair + erlang_c(crews, load) * repair / (crews - load)


def _binomial(count: int, k: int, chance: float) -> float:
    """Return the binomial probability of ``k`` successes in ``count`` tries."""
    if chance <= 0 or chance >= 1:
        return float(k == (count if chance >= 1 else 0))
    ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
    return math.exp(ways + k * math.log(chance) + (count - k) * math.log1p(-chance))
