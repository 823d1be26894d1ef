"""Openings and records for the tests of sinks."""

from __future__ import annotations

from pathlib import Path

from rackrun.coordinator.sinks.sink import Key, Opening, Record, Value

__all__ = ["opening", "record"]


def opening(
    kind: str, target: object, directory: Path, *, fresh: bool = True, first_step: int = 0, run_id: str = "job-1"
) -> Opening:
    return Opening(
        kind=kind, target=str(target), run_id=run_id, directory=str(directory), fresh=fresh, first_step=first_step
    )


def record(at: int, /, phase: int = 0, call: int = 0, **values: Value) -> Record:
    return Record(Key(at, phase, call), 1000.0 + at, values or {"loss": 1 / (at + 1)})
