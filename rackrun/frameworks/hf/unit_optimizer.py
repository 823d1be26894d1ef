"""accelerate's optimizer, moved by the unit alone: the Trainer's loop calls it again after the step is done."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

__all__ = ["UnitOptimizer"]


class UnitOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An `AcceleratedOptimizer` whose `step` and `zero_grad` do nothing outside of a unit."""

    _in_unit = False

    @classmethod
    def adopt(cls, optimizer: Any) -> UnitOptimizer:
        """Make accelerate's ``optimizer`` one of this class, in place, and return it."""
        stock = optimizer.step  # a scheduler may have put a function of its own here

        def step(closure: Any = None) -> None:
            if adopted._in_unit:
                stock(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        optimizer.__class__ = cls
        adopted: UnitOptimizer = optimizer
        adopted.step = step
        return adopted

    def within(self, in_unit: bool) -> None:
        """Say whether a unit runs."""
        self._in_unit = in_unit

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients in a unit; do nothing elsewhere."""
        if self._in_unit:
            super().zero_grad(set_to_none)

    @property
    def skipped(self) -> bool:
        """Whether the unit's step was skipped, because a `GradScaler` has met an overflow."""
        return bool(super().step_was_skipped)

    @property
    def step_was_skipped(self) -> bool:
        """True outside of a unit, so that the loop leaves the scheduler to the unit."""
        return not self._in_unit or self.skipped
