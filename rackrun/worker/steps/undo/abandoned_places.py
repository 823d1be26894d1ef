"""Where attempts at a unit were abandoned, and whether the present attempt is to be compared with them here.

The same code with the same numbers writes the same tensors. So the next attempt, when it comes to the place at which one
was left, has changed what that one had changed, also without a copy.
"""

from __future__ import annotations

__all__ = ["AbandonedPlaces"]


class AbandonedPlaces:
    """The places at which attempts were abandoned, as long as nothing has shown that those attempts left uncopied
    tensors unchanged. True while there are some."""

    def __init__(self) -> None:
        self._left_at: set[int] = set()
        self._everywhere = False
        """Whether this rank has other micro-batches now than in those attempts, so that their places cannot be
        compared."""
        self._reached = 0
        """The number of places at which the current attempt could have been left so far."""
        self._owes_comparison = False
        """Whether the comparison is still due for the current place."""
        self._share: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._left_at)

    def begin(self, share: tuple[float, ...]) -> None:
        """Begin an attempt. ``share``: what decides how many micro-batches this rank has."""
        self._reached, self._owes_comparison = 0, False
        if share != self._share:
            self._share, self._everywhere = share, bool(self._left_at)

    def reach(self, *, updates_next: bool) -> bool:
        """Note that the attempt reaches its next place. Return whether it is to be compared here with those before.

        ``updates_next``: `is_due_before_update` follows without any code of the script between, and says it then.
        """
        self._reached += 1
        suspect = self._everywhere or bool({self._reached, self._reached - 1} & self._left_at)
        self._owes_comparison = suspect and updates_next
        return suspect and not updates_next

    def is_due_before_update(self) -> bool:
        """Return whether the attempt is to be compared with those before, now that it is about to update or at its
        gate: it owes that, or those may have come further."""
        if not self._owes_comparison and not (self._left_at and self._reached <= max(self._left_at)):
            return False
        self._owes_comparison = False
        return True

    def leave(self) -> None:
        """Note that the attempt is abandoned where it is."""
        self._left_at.add(self._reached)

    def clear(self) -> None:
        """Forget all: what those attempts left unchanged is known, or does not matter any more."""
        self._left_at.clear()
        self._everywhere = False
