"""What ranks hold, by name: written in the workers of a run, read by who compares it.

``FOLDER/ends/RANK.json`` is an `End`, of every run: what the script of a rank reached behind its last step and nobody tracks. Where a run is looked at
step by step, ``FOLDER/witness/RANK-PID.jsonl`` has a `Held` for each attempt of a step, and one for the end. It is also where a worker waits until the
harness has seen the step before, so that what a plan does after a step is done there: ``FOLDER/go`` is the last step that may begin.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rackrun.worker.loop.unit_runner import UnitRunner
    from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["FREE", "STEP_BY_STEP", "End", "Ends", "Held", "Witness", "let_go_on", "read_ends", "read_witness"]

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
    """The same of what else the step function reaches (`rackrun.chaos.inprocess.untracked_state`)."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, when its loop has ended."""

    rank: int
    world: int
    since: int
    """The first step that its process has done; -1: none."""
    reached: dict[str, str]
    """As `Held` has it, from the step function and from the variables of the functions around the loop."""


class Ends:
    """In a worker: looks when the loop ends, and writes when the rank has finished, which is when its number is its last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._body: Callable[..., Any] | None = None
        self._since = -1
        self._reached: dict[str, str] = {}

    def began(self, step: int, body: Callable[..., Any]) -> None:
        """A step of this process; ``body`` as `Witness.write` has it."""
        self._since = step if self._since < 0 else self._since
        self._body = body

    def look(self, state: TrackedState, frame: types.FrameType | None) -> None:
        """``frame``: of whoever asks ``run.steps`` for the next step."""
        from rackrun.chaos.inprocess.untracked_state import frames_of_script, reached

        try:
            found = reached(
                *_called(self._body), _known(state), frames_of_script(frame), folder=str(self._folder.parent)
            )
        except Exception as error:  # noqa: BLE001 - objects of the user's may raise anything when they are looked at
            found = {"what the script reaches": f"cannot be looked at: {type(error).__name__}"}
        self._reached = found

    def write(self, rank: int, world: int) -> None:
        end = End(rank=rank, world=world, since=self._since, reached=self._reached)
        partial = self._folder / "ends" / f"{rank}.part"
        partial.write_bytes(msgspec.json.encode(end))
        partial.rename(partial.with_suffix(".json"))


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
        """``body``: calls the user's step function, with its arguments (`rackrun.worker.loop.run`); at the end it is that of the last step."""
        from rackrun.chaos.inprocess.untracked_state import reached

        self._body = body or self._body
        state, world = units._state, units._world
        held = Held(
            step=step,
            rank=world.rank,
            world=world.size,
            pid=os.getpid(),
            attempt=attempt,
            tracked=_tracked(units),
            reached=reached(*_called(self._body), _known(state), folder=str(self._folder.parent)),
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


def read_ends(folder: Path) -> dict[int, End]:
    """Rank -> its end, of a run."""
    paths = sorted((folder / "ends").glob("*.json"))
    return {end.rank: end for end in (msgspec.json.decode(path.read_bytes(), type=End) for path in paths)}


def _read_go(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # the run is over
        return int((folder / "go").read_text())
    return FREE


def _known(state: TrackedState) -> Iterable[object]:
    """Tensors and torch's own objects that are kept as a whole; what is the user's is looked into, for ``state_dict`` may leave some of it out."""
    from torch.amp import GradScaler

    scalers = [other for other in state.others.values() if isinstance(other, GradScaler)]
    return [*state.parameters(), *state.parts().values(), *state.optimizers.values(), *scalers]


def _called(body: Callable[..., Any] | None) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """A step function, and what it is given besides the step."""
    if body is None:
        return None, {}
    inside = inspect.getclosurevars(body).nonlocals
    if not {"function", "args", "kwargs"} <= inside.keys():
        return body, {}
    function, given = inside["function"], inside["args"][1:]
    code = getattr(function, "__code__", None)
    names = code.co_varnames[1 : len(given) + 1] if code is not None else ()
    arguments = {**dict(zip(names, given, strict=False)), **inside["kwargs"]}
    return function, {f"{function.__name__}({name})": value for name, value in arguments.items()}


def _tracked(units: UnitRunner) -> dict[str, str]:
    from rackrun.chaos.inprocess.untracked_state import told

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
