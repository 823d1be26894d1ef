"""Which parameters had gradients, and required them, when a unit began."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice, repeat
from operator import attrgetter, is_not
from typing import NamedTuple

import torch

from rackrun.errors import StepError
from rackrun.worker.tensors.tensor_bytes import local_part
from rackrun.worker.tensors.tensor_lists import versions
from rackrun.worker.torch_compat import zero_grad

__all__ = ["GradientsAtBegin"]

_LOOKED_AT = 3
_REQUIRES_GRAD, _GRAD = attrgetter("requires_grad"), attrgetter("grad")


class _Left(NamedTuple):
    """A gradient that a parameter had when a unit began."""

    parameter: torch.Tensor
    gradient: weakref.ref[torch.Tensor]
    version: int
    zero: bool | None
    """Whether it was all zeros, if that is known."""

    @property
    def stands(self) -> bool:
        """Whether the parameter still has this gradient. Clearing it, unless in place, gives the parameter another."""
        return self.parameter.grad is not None and self.parameter.grad is self.gradient()

    @property
    def is_cleared(self) -> bool:
        """Whether the parameter has lost this gradient since, or zero_grad has written zeros into it."""
        gradient = self.gradient()
        return not self.stands or gradient is None or zero_grad.version_when_cleared(gradient) > self.version

    @property
    def was_just_cleared(self) -> bool:
        """Whether zero_grad had written zeros into it, and nothing else since."""
        gradient = self.gradient()
        return gradient is not None and zero_grad.version_when_cleared(gradient) == self.version

    def version_now(self) -> int:
        """The gradient's version now; -1 if it is gone."""
        gradient = self.gradient()
        return -1 if gradient is None else versions([gradient])[0]

    def is_zero(self) -> bool:
        """Whether it was all zeros, if it was not written since; False if it was. Waits for the device."""
        gradient = self.gradient()
        if gradient is None or self.version_now() != self.version or gradient.layout is not torch.strided:
            return False
        return not local_part(gradient).any()


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
        """How often zero_grad had been called."""
        self._outside: dict[int, _Left] = {}
        """By ``id``: parameters that no optimizer trained when the unit began, where they had gradients."""
        self._joined: list[_Left] = []
        """Parameters that joined an optimizer since the unit before, which has left them gradients. Kept until an
        optimizer step finds them cleared: attempts and phases may come first."""

    def begin(
        self,
        parameters: Sequence[torch.Tensor],
        free: Iterable[torch.Tensor] = (),
        joined: Sequence[torch.Tensor] = (),
        *,
        filled: bool = False,
    ) -> None:
        """Record the gradients of ``parameters``, which are all, as a unit begins.

        ``free``: those that no optimizer trains. ``joined``: those that one trains now, and none when the unit before
        began. ``filled``: whether the state was filled from outside since then.
        """
        self._parameters, self._requires_grad = parameters, list(map(_REQUIRES_GRAD, parameters))
        self._had_grads = _have_grads(parameters)
        if self._outside or (free and any(self._had_grads)):
            self._outside = self._left_outside(free, filled=filled)
        self._joined += [left for left in _left(joined) if not left.is_zero()]
        held = [left.gradient() for left in (*self._joined, *self._outside.values())]
        zero_grad.watch([gradient for gradient in held if gradient is not None])
        self._found = []
        if zero_grad.some_are_left():
            some = islice(compress(parameters, self._had_grads), _LOOKED_AT)
            self._found = [(one, weakref.ref(one.grad)) for one in some if one.grad is not None]
        self._cleared = zero_grad.cleared()

    def check_cleared(self, trained: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """Raise `StepError` if gradients of an older step are still in the sum, because the unit could not be repeated:
        nobody has kept them.

        Called before the first optimizer step of a unit. The older step is the one before, or any where some make no
        optimizer step, or where no optimizer trained the parameter yet. ``trained``: returns what optimizers train now.
        """
        self._check_joined(trained)
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
        # DDP's reset may give a parameter another view of its bucket as a gradient: what was zeros is zeros again
        stand = {key: left for key, left in self._outside.items() if left.stands or left.zero}
        zero = {key: left.zero or (left.zero is None and left.is_zero()) for key, left in stand.items()}
        for parameter in parameters:
            if parameter.grad is not None:
                if had.get(id(parameter)):
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
        zero_grad.nothing_is_left()
        for key, left in stand.items():  # all are zeros from here on, and it counts what they have been
            if (gradient := left.parameter.grad) is not None:
                self._outside[key] = _Left(left.parameter, weakref.ref(gradient), versions([gradient])[0], zero[key])

    # -- helpers
    def _left_outside(self, free: Iterable[torch.Tensor], *, filled: bool) -> dict[int, _Left]:
        """Return the gradients of ``free``. Values are looked at once, when a whole unit has not written them, as those
        of a frozen parameter, and when the state was filled from outside: gradients are zeros then."""
        found = {}
        for left in _left(free):
            known = self._outside.get(id(left.parameter))
            zero = left.is_zero() if filled else None
            if not filled and known is not None and known.parameter is left.parameter and known.stands:
                stood = known.version == left.version
                zero = known.zero if stood or known.zero is False else None
                if left.was_just_cleared:
                    zero = True
                elif stood and zero is None:
                    zero = left.is_zero()
            found[id(left.parameter)] = left._replace(zero=zero)
        return found

    def _check_joined(self, trained: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Raise `StepError` if a parameter that has joined an optimizer since the unit before still has an older
        gradient."""
        left = self._joined
        if self._outside:
            now = set(map(id, trained()))
            left = left + [one for key, one in self._outside.items() if key in now and not one.zero]
        if not all(one.is_cleared for one in left):
            raise StepError(
                "gradients of an older step were not cleared: a parameter that was added to an optimizer has one, which older steps have summed "
                "up while no optimizer trained it. This step adds to it, and could not be repeated.",
                remedy="call zero_grad() on the whole model in every step, not only on the optimizer, or freeze with requires_grad_(False) what "
                "no optimizer trains.",
            )
        self._joined.clear()


def _left(parameters: Iterable[torch.Tensor]) -> list[_Left]:
    held = [(one, one.grad) for one in parameters]
    return [_Left(one, weakref.ref(grad), versions([grad])[0], None) for one, grad in held if grad is not None]


def _have_grads(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each of ``parameters`` whether it has a gradient. Usually none has one between two units."""
    grads = list(map(_GRAD, parameters))
    if grads == [None] * len(grads):  # a list compares None by identity, and ends at the first gradient
        return [False] * len(grads)
    return list(map(is_not, grads, repeat(None)))
