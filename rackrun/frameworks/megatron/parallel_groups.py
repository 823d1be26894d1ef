"""Makes Megatron's process groups, anew each time ``main`` is entered."""

from __future__ import annotations

import weakref
from typing import Any

from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

from rackrun.errors import UsageError
from rackrun.frameworks.megatron.refusals import refuse_sizes, refuse_version
from rackrun.worker.loop.run import Run

__all__ = ["initialize", "is_initialized", "place_of_shard"]

_runs: weakref.WeakSet[Run] = weakref.WeakSet()
"""The runs, one for each entry of ``main``, whose groups were made."""


def initialize(run: Run, **sizes: Any) -> None:
    """Make the process groups of ``megatron.core.parallel_state``, in place of ``initialize_model_parallel(**sizes)``.

    Megatron keeps the groups, and what it computes from this process's rank, in global variables. A spare that takes
    another rank over enters ``main`` again, and this makes them anew. Raises `UsageError` for a version of
    megatron-core that is not supported, for kinds of parallelism that are not, and when the mesh of the run gives ranks
    other data than Megatron's data-parallel groups do.
    """
    refuse_version()
    refuse_sizes(sizes)
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.initialize_model_parallel(**sizes)
    mine = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if run._data_coordinate() != mine:
        tensor = parallel_state.get_tensor_model_parallel_world_size()
        raise UsageError(
            f"run.loader deals data to {run._data_coordinate()[1]} ranks, and Megatron has {mine[1]} data-parallel ranks.",
            remedy=f'write @rackrun.elastic(..., mesh={{"dp": -1, "tp": {tensor}}}), in this order.',
        )
    _runs.add(run)


def is_initialized(run: Run) -> bool:
    """Whether `initialize` has made the groups for this entry of ``main``."""
    return run in _runs


def place_of_shard(optimizer: Any) -> str:
    """Return which part of the model and of its state this rank holds, such as ``_tp1of2_shard0of4``, for the names of what
    is tracked: the same on replicas, and different on ranks that hold different parts. "" where all ranks hold the
    whole. ``optimizer``: one of Megatron's, without others in it."""
    place = ""
    if (tensor := parallel_state.get_tensor_model_parallel_world_size()) > 1:
        place += f"_tp{parallel_state.get_tensor_model_parallel_rank()}of{tensor}"
    group = getattr(optimizer, "data_parallel_group", None)  # only the distributed optimizer has one
    if group is not None and group.size() > 1:
        place += f"_shard{group.rank()}of{group.size()}"
    return place
