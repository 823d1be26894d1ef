"""The table of all faults. A new fault is a module with a ``ROW``, its import and its line in ``_ROWS`` here, and its
export in ``chaos/__init__.py``."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Union

from rackrun.chaos.faults.data import flip_bit, poison_batch, step_clock
from rackrun.chaos.faults.fault_row import FaultAndTarget, FaultRow, Need
from rackrun.chaos.faults.fault_types import BaseFault
from rackrun.chaos.faults.hangs import delay_collective, freeze_tray, hold_gil, pause_process, slow_down
from rackrun.chaos.faults.hardware import gpu_failure, xid_error
from rackrun.chaos.faults.network import bad_link, network_partition
from rackrun.chaos.faults.processes import (
    crash_at_point,
    duplicate_process,
    exhaust_descriptors,
    exhaust_memory,
    kill,
    preempt_tray,
    raise_exception,
    return_tray,
)
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.storage import disk_failure, disk_full

__all__ = ["CLASSES", "FAULTS", "PLAIN_LOSS", "Fault", "all_faults", "needs_of", "one_of", "row_of", "variants_of"]

F = TypeVar("F", bound=BaseFault)

_ROWS: tuple[FaultRow[Any], ...] = (
    kill.ROW,
    raise_exception.ROW,
    exhaust_memory.ROW,
    crash_at_point.ROW,
    return_tray.ROW,
    pause_process.ROW,
    hold_gil.ROW,
    delay_collective.ROW,
    slow_down.ROW,
    xid_error.ROW,
    gpu_failure.ROW,
    preempt_tray.ROW,
    network_partition.ROW,
    bad_link.ROW,
    disk_full.ROW,
    disk_failure.ROW,
    flip_bit.ROW,
    step_clock.ROW,
    duplicate_process.ROW,
    poison_batch.ROW,
    exhaust_descriptors.ROW,
    freeze_tray.ROW,
)
FAULTS: Mapping[type[BaseFault], FaultRow[Any]] = {type(row.example): row for row in _ROWS}
"""Class of a fault -> its row. The order counts: what is drawn from a seed depends on it."""
CLASSES: Mapping[str, type[BaseFault]] = {kind.__name__: kind for kind in FAULTS}
"""Name of a class -> the class: `rackrun.chaos` exports them."""

if TYPE_CHECKING:
    Fault = BaseFault
else:
    Fault = Union[tuple(FAULTS)]  # noqa: UP007 - the union of all classes, from which plans are read

PLAIN_LOSS: Fault = kill.ROW.example
"""The simplest fault that loses its subjects, for plans in which it does not matter how they are lost."""


def all_faults() -> tuple[type[BaseFault], ...]:
    """Return the classes of all faults."""
    return tuple(FAULTS)


def row_of(fault: F) -> FaultRow[F]:
    """Return the row of a fault."""
    return FAULTS[type(fault)]


def variants_of(profile: Profile, draw: random.Random, for_s: float | None = None) -> list[FaultAndTarget[BaseFault]]:
    """Return the variants that the rows of all faults have for a profile."""
    return [one for row in FAULTS.values() if profile in row.variants for one in row.variants[profile](draw, for_s)]


def one_of(profile: Profile, draw: random.Random) -> FaultAndTarget[BaseFault]:
    """Return one of the variants that there are for a profile. No number is drawn where there is only one."""
    variants = variants_of(profile, draw)
    return variants[0] if len(variants) == 1 else draw.choice(variants)


def needs_of(faults: Iterable[BaseFault]) -> frozenset[Need]:
    """Return what a job needs for all of these faults together."""
    return frozenset().union(*(row_of(fault).needs(fault) for fault in faults))
