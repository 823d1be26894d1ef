"""What the Trainer's loop iterates over in place of batches: one token for each micro-batch of a step.

The step itself is done at its last token. So the loop has as many turns as the stock one, accumulates as many
micro-batches, and calls as many callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.utils.data import DataLoader, IterableDataset

__all__ = ["Token", "TokenLoader"]


@dataclass(frozen=True)
class Token:
    """One micro-batch of the Trainer's step ``step``."""

    step: int
    last: bool
    """Whether it is the step's last: the step is done at this one."""

    def __contains__(self, key: object) -> bool:
        return False  # it is no batch: it has no "labels"


class _Tokens(IterableDataset[Token]):
    rackrun_delivers = True
    """Marks it as no data set of the script's own (`rackrun.worker.torch_compat.unhooked_calls`)."""

    def __init__(self, per_epoch: int, micro_batches: Callable[[int], int], enter: Callable[[int], bool]) -> None:
        self._per_epoch, self._micro_batches, self._enter = per_epoch, micro_batches, enter
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[Token]:
        for step in range(self.epoch * self._per_epoch, (self.epoch + 1) * self._per_epoch):
            if step >= self.first and not self._enter(step):
                return
            count = self._micro_batches(step)
            for index in range(count):
                yield Token(step, last=index == count - 1)


class TokenLoader(DataLoader[Token]):
    """The tokens of one epoch after the other. ``micro_batches``: returns the number of tokens of a step. ``enter``: is
    called when the loop comes to a step, before its first token, waits where a spare has to, and returns whether there is such a step."""

    def __init__(self, per_epoch: int, micro_batches: Callable[[int], int], enter: Callable[[int], bool]) -> None:
        self._tokens = _Tokens(per_epoch, micro_batches, enter)
        super().__init__(self._tokens, batch_size=None)

    def begin(self, first: int) -> None:
        """Skip all steps before ``first``: their tokens are given at once, to be passed over."""
        self._tokens.first = first

    def set_epoch(self, epoch: int) -> None:
        """Give the tokens of ``epoch`` in the next iteration."""
        self._tokens.epoch = epoch
