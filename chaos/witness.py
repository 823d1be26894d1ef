"""What every rank holds before every step, by name: written in the workers of a run that is looked at step by step, read by who compares it.

``FOLDER/witness/RANK-PID.jsonl`` has a `Held` for each attempt of a step, and one for the end. It is also where a worker waits until the
harness has seen the step before, so that what a plan does after a step is done there: ``FOLDER/go`` is the last step that may begin.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rackrun.worker.units import UnitRunner

__all__ = ["FREE", "STEP_BY_STEP", "Held", "Witness", "let_go_on", "read_witness"]

STEP_BY_STEP = "RACKRUN_CHAOS_STEP_BY_STEP"
FREE = 2**53
"""In ``go``: wait for nobody."""
_WAIT_S = 0.002
_OF_OPTIMIZER = re.compile(r"([^/]+)/state/(\d+)/(\d+)/(.+)")


class Held(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank, before a step."""

    step: int
    """At the end: the number of steps."""
    rank: int
    world: int
    """How many ranks there are."""
    pid: int
    attempt: int = 0
    tracked: dict[str, str] = {}
    """Name -> value, or digest: of all that ``run.track`` was given."""
    reached: dict[str, str] = {}
    """The same of what else the step function reaches (`rackrun.chaos.reach`)."""


class Witness:
    """In a worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._body: Callable[..., Any] | None = None
        """Of the last step."""

    def wait(self, step: int) -> None:
        """Until the harness lets it begin, between two steps."""
        while step > _read_go(self._folder):
            time.sleep(_WAIT_S)

    def write(self, units: UnitRunner, step: int, body: Callable[..., Any] | None = None, attempt: int = 0) -> None:
        """``body``: calls the user's step function, with its arguments (`rackrun.worker.run`); at the end it is that of the last step."""
        from rackrun.chaos.reach import reached

        self._body = body or self._body
        state, world = units._state, units._world
        held = Held(
            step=step,
            rank=world.rank,
            world=world.size,
            pid=os.getpid(),
            attempt=attempt,
            tracked=_tracked(units),
            reached=reached(*_called(self._body), [*state.parameters(), *state.parts().values()]),
        )
        path = self._folder / "witness" / f"{world.rank}-{os.getpid()}.jsonl"
        with path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(held) + b"\n")


def let_go_on(folder: Path, step: int) -> None:
    """Steps up to this one may begin."""
    partial = folder / "go.part"
    partial.write_text(str(step))
    partial.replace(folder / "go")


def read_witness(folder: Path) -> list[Held]:
    """Of a run, by step and rank. A process that was killed has left half a line, perhaps."""
    found: list[Held] = []
    for path in sorted((folder / "witness").glob("*.jsonl")):
        whole = path.read_bytes().rpartition(b"\n")[0]
        found += [msgspec.json.decode(line, type=Held) for line in whole.splitlines()]
    return sorted(found, key=lambda held: (held.step, held.rank, held.attempt))


def _read_go(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # the run is over
        return int((folder / "go").read_text())
    return FREE


def _called(body: Callable[..., Any] | None) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """A step function, and what it is given besides the step."""
    if body is None:
        return None, {}
    inside = inspect.getclosurevars(body).nonlocals
    function, given = inside["function"], inside["args"][1:]
    code = getattr(function, "__code__", None)
    names = code.co_varnames[1 : len(given) + 1] if code is not None else ()
    arguments = {**dict(zip(names, given, strict=False)), **inside["kwargs"]}
    return function, {f"{function.__name__}({name})": value for name, value in arguments.items()}


def _tracked(units: UnitRunner) -> dict[str, str]:
    from rackrun.chaos.reach import told

    state = units._state
    parameters = {id(p): path for module in state.modules.values() for path, p in module.named_parameters()}
    of_optimizer = {
        (name, group, index): parameters.get(id(p), "")
        for name, optimizer in state.optimizers.items()
        for group, members in enumerate(optimizer.param_groups)
        for index, p in enumerate(members["params"])
    }

    def readable(path: str) -> str:
        match = _OF_OPTIMIZER.fullmatch(path)
        if match is None:
            return path
        name, group, index, key = match.groups()
        return f"{name}/{key} of {of_optimizer.get((name, int(group), int(index)), path)}"

    found = {readable(path): told(tensor) for path, tensor in state.tensors().items()}
    plain: dict[str, Any] = msgspec.msgpack.decode(state.encode_plain(), strict=False)
    for path, value in _flat("", plain):
        found.setdefault(readable(path), told(value))
    return {name: found[name] for name in sorted(found) if not name.startswith("rackrun.")}  # what is our own


def _flat(path: str, value: Any) -> list[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return [(path, value)]
    return [
        leaf
        for key, one in items
        for leaf in _flat(f"{path}/{key}" if path else str(key), one)
        if key != "__rackrun_tensor__"
    ]
