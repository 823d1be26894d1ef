"""One attempt at one step, as the user's step function sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rackrun.errors import StepError
from rackrun.protocol.ids import Position
from rackrun.worker.torch_compat.not_compiled import read_eagerly
from rackrun.worker.torch_compat.unhooked_calls import mark_weighted

if TYPE_CHECKING:
    from rackrun.worker.membership.decisions.gate_sums import GateSums
    from rackrun.worker.membership.worker_membership import WorkerMembership

__all__ = ["Step"]


class Step:
    """One attempt at one step. ``int(step)`` is the step's number, from 0; ``step.attempt`` counts the attempts at it,
    from 0."""

    def __init__(self, at: Position, attempt: int, world: WorkerMembership) -> None:
        self._at, self.attempt = at, attempt
        self._weight = 0.0
        self.shards: tuple[int, ...] = ()
        """Indices in the global batch of the micro-batches delivered so far."""
        self._local_loss: torch.Tensor | None = None
        self._shard_losses: dict[int, torch.Tensor] | None = None
        """Micro-batch index -> its part of ``_local_loss``, where the loss is reduced exactly; None otherwise."""
        self._gradient_scale = self._divided_by = 1.0
        """`gradient_scale`, and what gradients are divided by when they are reduced: the data-parallel ranks, or 1."""
        self._weight_reads = 0
        """How often `weight` or `gradient_scale` was read, which shows that a script weights its gradients itself."""
        self.samples = 0
        """Samples in all steps before this one together, for schedules that count samples."""
        self.batch_size = 0
        """Samples in the global batch of this step."""
        self.lr_factor = 1.0
        """The factor for all learning rates in this step's ``optimizer.step()``; differs from 1 only with
        ``batch="scale_lr"``."""
        self._early: GateSums | None = None
        """The sums over all ranks while the gate is still to come, in a step of several parts; None otherwise."""
        self._to_gather: tuple[float, ...] = ()
        """What `_gather_with_gate` was given."""
        self._refuses_gathered: Callable[[list[tuple[float, ...]]], bool] | None = None
        self._last_given = False
        """Whether the current micro-batch is this rank's last of the step."""
        self._is_whole = False
        """Whether the last micro-batch's loss has been given to `scale`, so that nothing more is added to `loss`."""
        self._ask_loss: Callable[[], None] | None = None
        """Called when `loss` is read before any ``optimizer.step()`` once all micro-batches are complete; makes the
        loss known."""
        self._discarded = False
        """Whether the attempt is over, and did not count."""
        self._ghost = False
        """Whether the current micro-batch is a ghost."""
        self._was_read = self._was_scaled = False
        """Whether the weight of the current micro-batch was read; whether it was given to a loss."""
        self._ahead = self._ahead_unread = self._over = False
        """Whether the current micro-batch was taken before the weight of the one before was given to a loss, or even
        read; whether the loader is exhausted."""
        self._loss_is_old = False
        """Whether a closure is being called again, with other weights than those of the known loss."""
        self._world = world

    def __int__(self) -> int:
        return self._at.step

    __index__ = __int__

    def __repr__(self) -> str:
        return f"<step {self._at.step}, attempt {self.attempt}>"

    @property
    def weight(self) -> float:
        """The weight of the current micro-batch in the global batch: 1 / number of micro-batches, or 0 for a ghost.

        The sum of weight times mean loss over all micro-batches of all ranks is the mean loss over the global batch.
        """
        self._weight_reads += 1
        self._was_read = True
        return self._weight

    @property
    def gradient_scale(self) -> float:
        """``weight`` times the number of data-parallel ranks, because DDP and FSDP divide by that number; with
        ``reduction="exact"`` simply ``weight``."""
        self._weight_reads += 1
        if self._ghost and (self._ahead_unread or self._over):
            raise _weight_of_another()
        self._was_read = True
        return self._gradient_scale

    def _weigh(self, micro_batches: int, divided_by: int, *, ghost: bool) -> None:
        """Set the weight of the micro-batch that the loader is about to yield: one of this many in the global batch, or
        a ghost. ``divided_by``: what gradients are divided by when they are reduced."""
        self._ahead = self._weight > 0 and not self._was_scaled
        self._ahead_unread = self._ahead and not self._was_read
        self._weight = 0.0 if ghost else 1.0 / micro_batches
        self._gradient_scale, self._divided_by = 0.0 if ghost else divided_by / micro_batches, divided_by
        self._ghost, self._was_read, self._was_scaled, self._over = ghost, False, False, False

    def _end_delivery(self) -> None:
        """Note that the loader is exhausted: a loss that comes now need not be that of the last micro-batch."""
        self._over = True

    def scale(self, loss: torch.Tensor, weight: float | None = None) -> torch.Tensor:
        """Return the loss to call ``backward`` on, scaled so that gradients become the mean over the global batch.

        ``weight``: this micro-batch's share of the global batch, where all shares sum to 1. It replaces the default of
        equal shares, as for a mean over tokens. The loss is also added to what `loss` reports.
        """
        self._world.may_be_left()
        machine = self._world.machine
        if machine.broken and not machine.unit_passed:
            self._world.abandon()
        factor, share = self._gradient_scale, self._weight
        if self._ghost and (self._ahead or self._over):
            if weight is None or not self._was_read or self._shard_losses is not None:
                raise _weight_of_another()
            factor, share = self._divided_by * weight, weight  # the script knows which micro-batch is the ghost
        elif weight is not None and share:
            factor, share = factor / share * weight, weight
        self._was_scaled = True
        self._is_whole |= self._last_given
        part = loss.detach().double() * share
        self._local_loss = part if self._local_loss is None else self._local_loss + part
        if self._shard_losses is not None and self._weight:
            known = self._shard_losses.get(self.shards[-1])
            self._shard_losses[self.shards[-1]] = part if known is None else known + part
        weighted = loss * factor
        if torch.compiler.is_compiling():
            self._weight_reads += 1
        else:
            mark_weighted(weighted)
        return weighted

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Call ``scale(loss, weight).backward()``."""
        self.scale(loss, weight).backward()

    @property
    @read_eagerly
    def loss(self) -> float:
        """The mean loss over the global batch, the same on every rank.

        It is known after the last micro-batch's `backward`, also in a step that skips ``optimizer.step()``, as a
        GradScaler does. Raises `StepError` before that, and in a further call of a closure.
        """
        if self._loss_is_old:
            raise StepError(
                "step.loss was read in a further call of the closure of optimizer.step(closure): it is that of the first call.",
                remedy="add up the loss over the ranks in the closure (dist.all_reduce), and return that.",
            )
        return self._sums("step.loss").loss

    def _gather_with_gate(
        self, values: Sequence[float], refuses: Callable[[list[tuple[float, ...]]], bool] | None = None
    ) -> None:
        """Offer these numbers to all ranks, before ``optimizer.step()``; `_gathered` returns those of each rank after it.
        They travel with the gate, which takes no collective of its own. All ranks share as many.

        ``refuses``: decides from the numbers of all ranks, alike on each, whether the step is to be done again."""
        self._to_gather, self._refuses_gathered = tuple(values), refuses

    def _refuses(self, sums: GateSums) -> bool:
        """Whether what the ranks have shared is refused, as all ranks decide alike."""
        return self._refuses_gathered is not None and self._refuses_gathered(self._rows(sums))

    @property
    def _gathered(self) -> list[tuple[float, ...]]:
        """What each rank has shared. Raises `StepError` before the last micro-batch's `backward`."""
        return self._rows(self._sums("what the ranks share"))

    def _rows(self, sums: GateSums) -> list[tuple[float, ...]]:
        width = len(self._to_gather)
        return [sums.shared[first : first + width] for first in range(0, len(sums.shared), width)]

    def _sums(self, what: str) -> GateSums:
        """Return the sums over all ranks, for ``what`` is read from them."""
        if self._early is None and not self._world.unit_passed and self._is_whole and self._ask_loss is not None:
            self._ask_loss()
        if self._early is not None:
            return self._early
        if not self._world.unit_passed:
            raise StepError(
                f"{what} was read before the last micro-batch of the step was given to step.backward().",
                remedy="read it after the loop over the micro-batches, best after optimizer.step().",
            )
        gate = self._world.gate
        assert gate is not None, "a gate that has passed"
        return gate


def _weight_of_another() -> StepError:
    return StepError(
        "this rank has fewer micro-batches in the step than others, so its last one is a repetition with weight 0. The script took it before "
        "step.backward of an earlier one, whose loss would get that weight.",
        remedy="call step.backward for a micro-batch before the next one is taken, or read step.weight of each as soon as it is taken, "
        "and pass it on (weight=); or let global_batch_size be a multiple of micro_batch_size times the data-parallel ranks, after a shrink too.",
    )
