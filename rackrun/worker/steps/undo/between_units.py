"""What is tracked may not change between two units, because only what units do is done again.

Versions and plain values tell, after every unit and before the next. `rackrun.worker.steps.undo.unit_undo` compares
content in some units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rackrun.errors import StepError
from rackrun.worker.state.objects.module_structure import ModuleStructure
from rackrun.worker.state.objects.optimizer_state import HeldObjects
from rackrun.worker.state.tracked_state import TrackedState

__all__ = ["BetweenUnits", "Look", "changed_between"]


class Look(NamedTuple):
    """The tracked state as it was found at one moment between two units."""

    filled: int
    structure: ModuleStructure
    dicts: dict[str, Any]
    """The objects' ``state_dict``s (see `TrackedState.state_dicts`)."""
    plain: bytes
    of_parameters: list[int]
    """The versions of all parameters."""
    held: dict[str, HeldObjects]
    """What optimizers hold (see `TrackedState.held_objects`)."""


class BetweenUnits:
    """The tracked state as the last unit has left it."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._stands: tuple[bytes, list[int], list[int], list[Any], int] = b"", [], [], [], -1
        self._looked_at: Look | None = None
        """The state as `changed_since` found it, for the unit that begins next."""
        self.dicts_at_end: dict[str, Any] | None = None
        """The ``state_dict``s, where they were read already at the end of the unit, for `committed`, which follows
        before any code of the script runs."""

    def committed(self) -> None:
        """Record the state at the end of a unit. Nothing tracked may change until the next one begins."""
        dicts, self.dicts_at_end = self.dicts_at_end, None
        structure = self._state.structure(glance=True)
        plain = self._state.encode_plain(dicts, structure)
        of_parameters, of_buffers = structure.versions(), structure.buffer_versions()
        self._stands = plain, of_parameters, of_buffers, self._state.scaler_marks(), self._state.filled

    def changed_since(self, *, glance: bool = False) -> str:
        """Return what has changed since the last unit ended, as far as versions tell, for a message; "" for nothing.
        ``glance``: see `TrackedState.structure`."""
        plain, of_parameters, of_buffers, of_scalers, filled = self._stands
        self._looked_at = None
        if filled != self._state.filled or not of_parameters:
            return ""
        structure = self._state.structure(glance=glance)
        found = structure.versions()
        if of_parameters != found:
            return "a parameter"
        if of_buffers != structure.buffer_versions():
            return "a buffer (by a forward in training mode, perhaps)"
        dicts, held = self._state.state_dicts(), self._state.held_objects()
        now = self._state.encode_plain(dicts, structure, held)
        if plain != now or of_scalers != self._state.scaler_marks():
            return "tracked state (a scheduler, an optimizer setting, ...)"
        self._looked_at = Look(filled, structure, dicts, now, found, held)
        return ""

    def look(self) -> Look:
        """Return the current state, as a unit begins; uses what `changed_since` has found if that is still valid."""
        known, self._looked_at, self.dicts_at_end = self._looked_at, None, None
        if known is not None and known.filled == self._state.filled:
            return known
        structure, dicts, held = self._state.structure(), self._state.state_dicts(), self._state.held_objects()
        plain = self._state.encode_plain(dicts, structure, held)
        return Look(self._state.filled, structure, dicts, plain, structure.versions(), held)

    def forget_look(self) -> None:
        """Keep nothing of what `changed_since` has found: it keeps all alive that optimizers held then."""
        self._looked_at = None


def changed_between(what: str) -> StepError:
    """Return the error for a script that has changed ``what`` between two steps."""
    return StepError(
        f"{what} was changed between two steps, where it is lost when a step is done again.",
        remedy="change tracked state inside the @run.step function (scheduler.step() after optimizer.step()), or in a phase.",
    )
