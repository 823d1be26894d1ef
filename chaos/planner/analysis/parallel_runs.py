"""Simulate each case and seed once, on all processors where that is worth starting processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from types import TracebackType

import msgspec

from rackrun.chaos.planner.analysis.simulation_case import Case, simulate
from rackrun.chaos.planner.model.outcome import FleetOutcome

__all__ = ["Runs"]

_WORTH_A_POOL_S = 4.0
"""The seconds of work from which processes are started; a process takes 1 to 2 s until it can simulate."""


class Runs:
    """The simulated runs, with their outcomes kept. Use it as a context manager, because it may own processes."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._found: dict[tuple[bytes, int], FleetOutcome] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def fetch(self, runs: Iterable[tuple[Case, int]]) -> None:
        """Simulate those of the runs that have not been simulated yet."""
        due = {key: run for run in runs if (key := _key(*run)) not in self._found}
        while due and self._pool is None:
            key = next(iter(due))
            began = time.monotonic()
            self._found[key] = simulate(*due.pop(key))
            if self._processes > 1 and (time.monotonic() - began) * len(due) > _WORTH_A_POOL_S:
                self._pool = self._stack.enter_context(
                    ProcessPoolExecutor(self._processes, mp_context=get_context("spawn"))
                )
        if self._pool is not None:
            self._found.update(zip(due, self._pool.map(_simulate, due.values()), strict=True))

    def outcomes(self, case: Case, seeds: Sequence[int]) -> list[FleetOutcome]:
        """Return one outcome for each seed."""
        self.fetch((case, seed) for seed in seeds)
        return [self._found[_key(case, seed)] for seed in seeds]


def _key(case: Case, seed: int) -> tuple[bytes, int]:
    return msgspec.msgpack.encode(case), seed


def _simulate(run: tuple[Case, int]) -> FleetOutcome:
    return simulate(*run)
