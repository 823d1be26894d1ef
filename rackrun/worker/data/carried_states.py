"""Carries the states of loaders that a framework owns: one on each data-parallel rank, committed with each step.

Before the gate of a step the ranks exchange the states of their loaders, and when the step is committed all of them keep
the states of all. So an attempt that follows one that did not count begins with the states of the last commit; so does
a process that has taken a rank over, and a job that goes on from a snapshot or a checkpoint. A state belongs to one
data-parallel rank of so many, so the world keeps its size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rackrun.errors import StepError, UsageError
from rackrun.worker.data.rng import undrawn
from rackrun.worker.data.stream_states import decode_state, encode_state

__all__ = ["CarriedStates"]


@dataclass
class _Carried:
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    first: bytes
    """The state of the loader as it was made."""
    made_for: tuple[int, int]
    """The data-parallel rank that it was made for, and their number."""


class CarriedStates:
    """The states of all loaders that are carried; a tracked object. ``place``: returns this rank's index among the
    data-parallel ranks, and their number."""

    def __init__(self, place: Callable[[], tuple[int, int]]) -> None:
        self._place = place
        self._carried: dict[str, _Carried] = {}
        self._reached: list[Any] = []
        """The objects that the functions given to `add` belong to or use: a check of the script finds here that somebody
        keeps them."""
        self._states: dict[str, list[bytes]] = {}
        """Name -> the states of the data-parallel ranks after the last committed step; empty before the first."""
        self._coming: tuple[Any, dict[str, list[bytes]]] | None = None
        """An attempt at a step, and the states that count if it does."""
        self._stands = False
        """Whether the loaders are where the last committed step has left them."""

    def add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """Carry what ``get`` returns. Raises `StepError` for a name in use, and `UsageError` for a state that cannot be
        kept."""
        if name in self._carried:
            raise StepError(f"run.carry was given {name!r} twice.", remedy="use another name for the second.")
        self._carried[name] = _Carried(get, put, encode_state(get()), self._place())
        self._note_reached()

    def begin(self) -> None:
        """Put the loaders where the last committed step has left them, before an attempt at a step. What was read
        elsewhere since, in a phase or between two steps, is read again.

        Raises `UsageError` when the states are those of another number of ranks.
        """
        with undrawn():
            for name, one in self._carried.items():
                if not self._stands or encode_state(one.get()) != self._states[name][self._place()[0]]:
                    self._put(name, one)
        self._stands = False
        self._note_reached()

    def _put(self, name: str, one: _Carried) -> None:
        states, (rank, ranks) = self._states.get(name), self._place()
        if states is None:
            if one.made_for != (rank, ranks):  # by now the script has made another, where it needs one
                one.first, one.made_for = encode_state(one.get()), (rank, ranks)
            elif encode_state(one.get()) != one.first:  # a spare has tried a step, or the first step broke
                one.put(decode_state(one.first))
            return
        if len(states) != ranks:
            raise UsageError(
                f"run.carry has the states of {len(states)} loaders for {name!r}, and there are {ranks} data-parallel ranks.",
                remedy="go on with as many ranks as before; or read the data through run.stream, which works on any number.",
            )
        one.put(decode_state(states[rank]))

    def _note_reached(self) -> None:
        functions = [one for carried in self._carried.values() for one in (carried.get, carried.put)]
        self._reached = [getattr(one, "__self__", None) for one in functions]
        cells = [cell for one in functions for cell in getattr(one, "__closure__", None) or ()]
        for cell in cells:
            with contextlib.suppress(ValueError):  # a name that is bound later
                self._reached.append(cell.cell_contents)
        for one in functions:
            names = getattr(getattr(one, "__code__", None), "co_names", ())
            variables = getattr(one, "__globals__", {})
            self._reached += [variables[name] for name in names if name in variables]

    def trial_over(self) -> None:
        """Reset a spare's loaders to their first state after its trial step."""
        with undrawn():
            for one in self._carried.values():
                one.put(decode_state(one.first))

    def exchange(self, step: Any, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Exchange the states before the gate of ``step``. Collective."""
        if step._at.phase:
            return
        rank, ranks = self._place()
        mine = {name: encode_state(one.get()) for name, one in self._carried.items()}
        found: dict[str, list[bytes]] = {name: [b""] * ranks for name in mine}
        for row in gather(msgspec.msgpack.encode((rank, mine))):
            other, states = msgspec.msgpack.decode(row, type=tuple[int, dict[str, bytes]])
            for name, state in states.items():
                found[name][other] = state
        self._coming = step, found

    def committed(self, step: Any) -> None:
        """Keep the states that were exchanged, because ``step`` is committed."""
        if self._coming is not None and self._coming[0] is step:
            self._states, self._stands = self._coming[1], True
        self._coming = None

    # -- tracked
    def state_dict(self) -> dict[str, Any]:
        """Return the states of all data-parallel ranks."""
        return {"states": {name: list(states) for name, states in self._states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the next attempt begins with it. Raises `UsageError` when it is of loaders with
        other names."""
        names = state["states"].keys()
        if names and names != self._carried.keys():
            raise UsageError(
                f"run.carry has the states of {', '.join(map(repr, sorted(names)))}, and the script carries "
                f"{', '.join(map(repr, sorted(self._carried))) or 'nothing'}: loaders would begin again from the start.",
                remedy="use the names that the job had when the states were kept.",
            )
        self._states = {name: list(map(bytes, states)) for name, states in state["states"].items()}
        self._stands, self._coming = False, None
