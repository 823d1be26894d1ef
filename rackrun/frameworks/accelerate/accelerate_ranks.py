"""Keeps what Accelerate knows of this process's rank in step with the run."""

from __future__ import annotations

import os

from accelerate.state import AcceleratorState, GradientState, PartialState

from rackrun.errors import UsageError
from rackrun.worker.loop.run import Run

__all__ = ["follow_ranks", "set_ranks"]


def follow_ranks(run: Run) -> None:
    """Let ``accelerator.is_main_process``, ``process_index``, ``num_processes`` and the like follow the rank of this
    process in ``run``, now and whenever it changes.

    Call it in ``main``, before or after the ``Accelerator`` is made. Without it a process keeps the rank that it had
    when the ``Accelerator`` was made: a spare that becomes rank 0 would not be the main process. Raises `UsageError`
    when ``run.steps`` begins if the ``Accelerator`` accumulates gradients: a step of rackrun's does.
    """

    def take_place() -> None:
        _refuse_accumulation()
        set_ranks(run)

    run.on_join(take_place)


def _refuse_accumulation() -> None:
    steps = GradientState._shared_state.get("plugin_kwargs", {}).get("num_steps", 1)
    if steps != 1:
        raise UsageError(
            f"the Accelerator has gradient_accumulation_steps={steps}: accelerator.backward divides each loss by it, and rackrun has "
            "weighted the losses of a step already.",
            remedy="leave out gradient_accumulation_steps=. One step of the run has all micro-batches of the global batch.",
        )


def set_ranks(run: Run) -> None:
    """Set what Accelerate has derived from an older rank of this process. Of all ranks only rank 0 is the main process
    of its host. Does nothing in a world of one, which Accelerate does not take for distributed."""
    if run.world_size == 1:
        return
    local = 0 if run.rank == 0 else max(int(os.environ.get("LOCAL_RANK", "0")), 1)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        if shared:  # else nothing was derived yet
            shared.update(process_index=run.rank, local_process_index=local, num_processes=run.world_size)
