"""Draw when something fails: renewal processes of GPUs, trays and racks, with a random stream of its own for each unit.

A *process* strikes units of one domain: a rack's power or its switches take the whole rack at once. Its law is a
hazard: constant (exponential), falling or rising with age (Weibull), higher for some units (lemons), or higher at first
(burn-in). The time t to the next failure solves ``H(age + t) = H(age) + E``, where ``H`` is the cumulative hazard and
``E`` is exponential with mean 1. After a repair a unit is new. The mean over all units stays the given MTBF with and
without lemons; burn-in adds failures.

What strikes when does not depend on spares or policies: with one seed all plans meet the same failures, until a repair
differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, Protocol

import msgspec

from rackrun.chaos.base.errors import PlannerError
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.planner.inputs.fleet import Fleet

__all__ = ["Domain", "Failures", "FailureProcess", "FailureSource", "UnitFailure", "failures_of", "slots_of", "units"]

Domain = Literal["gpu", "tray", "rack", "rank"]


class UnitFailure(NamedTuple):
    """One failure."""

    source: int
    """The index of the process that struck."""
    domain: Domain
    unit: int
    """The number of the unit in the whole fleet, from 0; for the domain ``rank``, the rank, wherever it sits."""
    repair_s: float
    """The seconds of the repair; 0: the hardware is in order, and its workers start again."""
    stalls: bool = False
    """Whether nothing is lost, and the step is done again in place."""
    turn: int = 0
    """How many times the process has struck this unit before."""


class FailureSource(Protocol):
    """A source of failures for one run."""

    def begin(self) -> list[tuple[float, UnitFailure]]:
        """Return, with its time in seconds, the first failure of each unit that has one before the horizon."""

    def again(self, strike: UnitFailure, since_s: float) -> tuple[float, UnitFailure] | None:
        """Return the next failure of the same unit, which has been in order since ``since_s``; None if there is
        none."""


class FailureProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that strikes the units of one domain."""

    name: str
    domain: Literal["gpu", "tray", "rack"]
    mtbf_s: float
    """The mean seconds between failures of one unit."""
    repair_s: float = 0.0
    """The mean seconds of a repair, once a crew is there; 0: nothing has to be repaired."""
    repair_law: Literal["exponential", "fixed"] = "exponential"
    stalls: bool = False
    shape: float = 1.0
    """The shape of the Weibull law: below 1 young units fail more often, above 1 old ones do; 1 is exponential."""
    age_s: float = 0.0
    """The age of all units when the run begins."""
    lemons: float = 0.0
    """The share of units that fail ``lemon_factor`` times as often."""
    lemon_factor: float = 1.0
    burn_in_s: float = 0.0
    """For this long, a new or repaired unit fails ``burn_in_factor`` times as often."""
    burn_in_factor: float = 1.0

    def __post_init__(self) -> None:
        above_0 = ("mtbf_s", "shape", "lemon_factor", "burn_in_factor")
        wrong = [name for name in above_0 if not 0 < getattr(self, name) < math.inf]
        wrong += [name for name in ("repair_s", "age_s", "burn_in_s") if not 0 <= getattr(self, name) < math.inf]
        wrong += ["lemons"] if not 0 <= self.lemons <= 1 else []
        if wrong:
            raise PlannerError(
                f"failures of {self.name} cannot have {', '.join(f'{name} {getattr(self, name)}' for name in wrong)}.",
                remedy="times and factors are above 0, a share is from 0 to 1; leave a process out instead of giving it the rate 0.",
            )
        if self.shape != 1 and self.burn_in_s:
            raise PlannerError(
                f"failures of {self.name} have both a Weibull shape and a burn-in.",
                remedy="give one of the two: a shape below 1 is a burn-in.",
            )

    @property
    def rate(self) -> float:
        """Failures of one unit a second, in the long run, without burn-in."""
        return 1.0 / self.mtbf_s

    def wait(self, age_s: float, mean: float, factor: float) -> float:
        """Return the seconds until the next failure of a unit of this age.

        ``mean``: drawn from an exponential law with mean 1. ``factor``: multiplies the rate for this unit.
        """
        if self.shape != 1:
            scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
            return float(scale * ((age_s / scale) ** self.shape + mean / factor) ** (1 / self.shape)) - age_s
        rate, more = self.rate * factor, self.burn_in_factor - 1
        target = rate * (age_s + more * min(age_s, self.burn_in_s)) + mean
        young = rate * self.burn_in_factor * self.burn_in_s
        if target < young:
            return target / (rate * self.burn_in_factor) - age_s
        return target / rate - more * self.burn_in_s - age_s


class Failures:
    """The failures of ``processes`` on ``fleet``, determined by ``seed``, before ``horizon_s`` seconds.

    The object never changes, so runs that meet the same failures can share it.
    """

    def __init__(self, processes: Sequence[FailureProcess], fleet: Fleet, seed: int, horizon_s: float) -> None:
        for process in processes:
            if process.repair_s >= horizon_s:
                raise PlannerError(
                    f"a repair of {process.repair_s / 3600:.3g} h is not done within the {horizon_s / 3600:.3g} h that are simulated.",
                    remedy="simulate longer (--days), or give a shorter repair.",
                )
        self._processes = tuple(processes)
        self._fleet = fleet
        self._seed = seed
        self._horizon_s = horizon_s
        self._lemons = [self._drawn(process) for process in self._processes]

    def begin(self) -> list[tuple[float, UnitFailure]]:
        return list(self._first)

    @cached_property
    def _first(self) -> list[tuple[float, UnitFailure]]:
        found = []
        for source, process in enumerate(self._processes):
            draw = stream(self._seed, process.name)
            for unit in range(units(self._fleet, process.domain)):
                at_s = process.wait(process.age_s, draw.expovariate(1.0), self._factor(source, unit))
                if at_s < self._horizon_s:
                    found.append((at_s, self._strike(source, unit, 0)))
        return found

    def again(self, strike: UnitFailure, since_s: float) -> tuple[float, UnitFailure] | None:
        """See `FailureSource.again`."""
        process, turn = self._processes[strike.source], strike.turn + 1
        draw = stream(self._seed, process.name, strike.unit, turn)
        at_s = since_s + process.wait(0.0, draw.expovariate(1.0), self._factor(strike.source, strike.unit))
        return (at_s, self._strike(strike.source, strike.unit, turn)) if at_s < self._horizon_s else None

    def _strike(self, source: int, unit: int, turn: int) -> UnitFailure:
        process, repair_s = self._processes[source], self._processes[source].repair_s
        if repair_s and process.repair_law == "exponential":
            repair_s *= stream(self._seed, process.name, "repair", unit, turn).expovariate(1.0)
        return UnitFailure(source, process.domain, unit, repair_s, process.stalls, turn)

    def _drawn(self, process: FailureProcess) -> frozenset[int]:
        count = units(self._fleet, process.domain)
        draw: random.Random = stream(self._seed, process.name, "lemons")
        return frozenset(draw.sample(range(count), round(process.lemons * count))) if process.lemons else frozenset()

    def _factor(self, source: int, unit: int) -> float:
        process = self._processes[source]
        usual = 1.0 / (1.0 + process.lemons * (process.lemon_factor - 1.0))
        return usual * process.lemon_factor if unit in self._lemons[source] else usual


@lru_cache(maxsize=8)
def failures_of(processes: tuple[FailureProcess, ...], fleet: Fleet, seed: int, horizon_s: float) -> Failures:
    """Return the `Failures` for these arguments, one object for equal arguments.

    Plans that differ in spares or policies thus meet the same failures.
    """
    return Failures(processes, fleet, seed, horizon_s)


def units(fleet: Fleet, domain: Domain) -> int:
    """Return how many units of this domain the fleet has."""
    return {"gpu": fleet.total_gpus, "tray": fleet.total_trays, "rack": fleet.racks}[domain]


def slots_of(fleet: Fleet, strike: UnitFailure) -> range:
    """Return the slots that a failure strikes."""
    size = fleet.total_gpus // units(fleet, strike.domain)
    return range(strike.unit * size, (strike.unit + 1) * size)
