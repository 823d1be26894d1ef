"""The table of all faults. A new fault is one module with a row, and one line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Union

from rackrun.chaos.faults.data import flip_bit, poison_batch, step_clock
from rackrun.chaos.faults.fault_row import FaultRow, Need
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
from rackrun.chaos.faults.storage import disk_failure, disk_full

__all__ = ["CLASSES", "FAULTS", "Fault", "all_faults", "needs_of", "row_of"]

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


def all_faults() -> tuple[type[BaseFault], ...]:
    """Return the classes of all faults."""
    return tuple(FAULTS)


def row_of(fault: F) -> FaultRow[F]:
    """Return the row of a fault."""
    return FAULTS[type(fault)]


def needs_of(faults: Iterable[BaseFault]) -> frozenset[Need]:
    """Return what a job needs for all of these faults together."""
    return frozenset().union(*(row_of(fault).needs(fault) for fault in faults))
