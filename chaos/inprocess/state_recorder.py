"""Record the state of the ranks by name: written by the workers of a run, read by the harness that compares runs.

``FOLDER/ends/RANK.json`` is an `EndState`, written in every run: the state that the rank's script reaches after its last
step and that is not tracked. In a step-by-step run, ``FOLDER/witness/RANK-PID.jsonl`` has a `StepState` for each attempt of
a step, and one for the end. In such a run a worker also waits before each step until the harness has seen the step
before, so that what a plan does after a step is done there: ``FOLDER/go`` holds the last step that may begin.
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

__all__ = [
    "FREE",
    "STEP_BY_STEP",
    "EndState",
    "EndRecorder",
    "StepState",
    "comparable_plain",
    "StateRecorder",
    "let_go_on",
    "read_end_states",
    "read_step_states",
]

STEP_BY_STEP = "RACKRUN_CHAOS_STEP_BY_STEP"
FREE = 2**53
"""The content of ``go`` with which no step waits."""
_WAIT_S = 0.002
_OF_OPTIMIZER = re.compile(r"([^/]+)/state/(\d+|outside)/(\d+)/(.+)")


class StepState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a rank before a step."""

    step: int
    """The step; at the end, the number of steps."""
    rank: int
    world: int
    """The number of ranks."""
    pid: int
    attempt: int = 0
    tracked: dict[str, str] = {}
    """Name -> value or digest, for all state that ``run.track`` was given."""
    reached: dict[str, str] = {}
    """The same for all other state that the step function reaches (`rackrun.chaos.inprocess.untracked_state`)."""


class EndState(msgspec.Struct, frozen=True, kw_only=True):
    """The untracked state of a rank when its loop has ended."""

    rank: int
    world: int
    since: int
    """The first step that this process has done; -1 if it has done none."""
    reached: dict[str, str]
    """Name -> value or digest, for what the step function and the variables of the functions around the loop reach."""


class EndRecorder:
    """The recorder of `EndState` in a worker.

    It reads the state when the loop ends and writes it when the rank has finished, because the rank's number is final
    then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._body: Callable[..., Any] | None = None
        self._since = -1
        self._reached: dict[str, str] = {}

    def began(self, step: int, body: Callable[..., Any]) -> None:
        """Note that this process begins a step. ``body``: as in `StateRecorder.write`."""
        self._since = step if self._since < 0 else self._since
        self._body = body

    def look(self, state: TrackedState, frame: types.FrameType | None) -> None:
        """Read what the script reaches now. ``frame``: that of the caller which asks ``run.steps`` for the next
        step."""
        from rackrun.chaos.inprocess.untracked_state import frames_of_script, reached

        try:
            found = reached(
                *_called(self._body), _known(state), frames_of_script(frame), folder=str(self._folder.parent)
            )
        except Exception as error:  # noqa: BLE001 - objects of the user's may raise anything when they are looked at
            found = {"what the script reaches": f"cannot be looked at: {type(error).__name__}"}
        self._reached = found

    def write(self, rank: int, world: int) -> None:
        """Write what was read as the `EndState` of this rank."""
        end = EndState(rank=rank, world=world, since=self._since, reached=self._reached)
        partial = self._folder / "ends" / f"{rank}.part"
        partial.write_bytes(msgspec.json.encode(end))
        partial.rename(partial.with_suffix(".json"))


class StateRecorder:
    """The recorder of `StepState` in a worker, for step-by-step runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._body: Callable[..., Any] | None = None
        """The body of the last step."""

    def wait(self, step: int) -> None:
        """Wait, between two steps, until the harness lets ``step`` begin."""
        while step > _read_go(self._folder):
            time.sleep(_WAIT_S)

    def write(self, units: UnitRunner, step: int, body: Callable[..., Any] | None = None, attempt: int = 0) -> None:
        """Record the state of this rank before ``step``.

        ``body`` calls the user's step function with its arguments (`rackrun.worker.loop.run`); at the end, where it is
        None, that of the last step is used.
        """
        from rackrun.chaos.inprocess.untracked_state import reached

        self._body = body or self._body
        state, world = units._state, units._world
        held = StepState(
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
    """Let the workers of a step-by-step run begin all steps up to ``step``."""
    partial = folder / "go.part"
    partial.write_text(str(step))
    partial.replace(folder / "go")


def read_step_states(folder: Path) -> list[StepState]:
    """Return the records of a run, by step, rank and attempt. A half-written line of a killed process is left out."""
    found: list[StepState] = []
    for path in sorted((folder / "witness").glob("*.jsonl")):
        whole = path.read_bytes().rpartition(b"\n")[0]
        found += [msgspec.json.decode(line, type=StepState) for line in whole.splitlines()]
    return sorted(found, key=lambda held: (held.step, held.rank, held.attempt))


def read_end_states(folder: Path) -> dict[int, EndState]:
    """Return rank -> its `EndState`, for a run."""
    paths = sorted((folder / "ends").glob("*.json"))
    return {end.rank: end for end in (msgspec.json.decode(path.read_bytes(), type=EndState) for path in paths)}


def comparable_plain(state: TrackedState) -> dict[str, Any]:
    """Return name -> all of a rank's tracked state that is no tensor, as two runs of a training have it in common: of a
    tracked object with a method ``comparable_state`` what that returns, because its state also holds times or paths."""
    plain: dict[str, Any] = msgspec.msgpack.decode(state.encode_plain(), strict=False)
    for name, other in state.others.items():
        if callable(comparable := getattr(other, "comparable_state", None)):
            plain[name] = comparable()
    return plain


def _read_go(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # the run is over
        return int((folder / "go").read_text())
    return FREE


def _known(state: TrackedState) -> Iterable[object]:
    """Return the objects that are tracked as a whole: tensors and torch's own objects.

    Tracked objects of the user's are not among them but are looked into, because their ``state_dict`` may leave
    something out.
    """
    from torch.amp import GradScaler

    scalers = [other for other in state.others.values() if isinstance(other, GradScaler)]
    return [*state.parameters(), *state.parts().values(), *state.optimizers.values(), *scalers]


def _called(body: Callable[..., Any] | None) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Return the user's step function, and what it is called with besides the step, by name."""
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
    """Return the tracked state of this rank: readable name -> value or digest. State of rackrun's own is left out."""
    from rackrun.chaos.inprocess.untracked_state import described

    state = units._state
    parameters = {id(p): path for module in state.modules.values() for path, p in module.named_parameters()}
    of_optimizer = {
        (name, group, index): parameters.get(id(p), "")
        for name, optimizer in state.optimizers.items()
        for group, members in (
            *((str(number), group["params"]) for number, group in enumerate(optimizer.param_groups)),
            ("outside", state.parameters()),
        )
        for index, p in enumerate(members)
    }

    def readable(path: str) -> str:
        match = _OF_OPTIMIZER.fullmatch(path)
        if match is None:
            return path
        name, group, index, key = match.groups()
        return f"{name}/{key} of {of_optimizer.get((name, group, int(index)), path)}"

    found = {readable(path): described(tensor) for path, tensor in state.tensors().items()}
    for path, value in _flat("", comparable_plain(state)):
        found.setdefault(readable(path), described(value))
    return {name: found[name] for name in sorted(found) if not name.startswith("rackrun.")}  # rackrun's own state


def _flat(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the leaves of nested dicts and lists, each with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return [(path, value)]
    return [
        leaf
        for key, one in items
        for leaf in _flat(f"{path}/{key}" if path else str(key), one)
        if key != "__rackrun_tensor__"
    ]
