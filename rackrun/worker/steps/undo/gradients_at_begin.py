"""Which parameters had gradients, and required them, when a unit began."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import compress, islice, repeat
from operator import attrgetter, is_not

import torch

from rackrun.errors import StepError
from rackrun.worker.torch_compat import zero_grad

__all__ = ["GradientsAtBegin"]

_LOOKED_AT = 3
_REQUIRES_GRAD, _GRAD = attrgetter("requires_grad"), attrgetter("grad")


class GradientsAtBegin:
    """What is known of all tracked parameters' gradients from when the unit began."""

    def __init__(self) -> None:
        self._parameters: Sequence[torch.Tensor] = ()
        """All parameters; the next two lists have one element for each."""
        self._requires_grad: list[bool] = []
        self._had_grads: list[bool] = []
        self._found: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []
        """A few gradients that some older unit has left and that were not cleared since."""
        self._cleared = 0
        """How often gradients had been cleared."""

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """Record the gradients of ``parameters``, which are all, as a unit begins."""
        self._parameters, self._requires_grad = parameters, list(map(_REQUIRES_GRAD, parameters))
        self._had_grads = _have_grads(parameters)
        self._found = []
        if zero_grad.some_are_left():
            some = islice(compress(parameters, self._had_grads), _LOOKED_AT)
            self._found = [(one, weakref.ref(one.grad)) for one in some if one.grad is not None]
        self._cleared = zero_grad.cleared()

    def check_cleared(self) -> None:
        """Raise `StepError` if gradients of an older step are still in the sum, because the unit could not be repeated:
        nobody has kept them.

        Called before the first optimizer step of a unit. The older step is the one before, or any where some make no
        optimizer step.
        """
        if not self._found or zero_grad.cleared() != self._cleared:
            return
        if any(parameter.grad is not None and parameter.grad is found() for parameter, found in self._found):
            raise StepError(
                "gradients of an older step were not cleared, so this step adds to them, and could not be repeated.",
                remedy="call optimizer.zero_grad() in every step; to accumulate, use smaller micro-batches of one global batch.",
            )

    def require_again(self) -> None:
        """Have the parameters require gradients as they did."""
        for parameter, requires_grad in zip(self._parameters, self._requires_grad, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    def clear(self, parameters: Iterable[torch.Tensor]) -> None:
        """Clear the gradients of ``parameters``: to zeros where there were some, to None elsewhere. To be called
        without autograd."""
        had = dict(zip(map(id, self._parameters), self._had_grads, strict=True))
        for parameter in parameters:
            if parameter.grad is not None:
                if had.get(id(parameter)):
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        zero_grad.nothing_is_left()


def _have_grads(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each of ``parameters`` whether it has a gradient. Usually none has one between two units."""
    grads = list(map(_GRAD, parameters))
    if grads == [None] * len(grads):  # a list compares None by identity, and ends at the first gradient
        return [False] * len(grads)
    return list(map(is_not, grads, repeat(None)))
