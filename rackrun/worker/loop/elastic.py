"""``@rackrun.elastic``: the decorator that makes a function the main function of an elastic run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, Literal, ParamSpec, TypeVar

from rackrun.errors import UsageError
from rackrun.worker.batch.lr_rule import Mode, scaling
from rackrun.worker.data.loader import BatchPlan
from rackrun.worker.exact.fixed_point_scales import width_of
from rackrun.worker.loop.main_entry import run_main
from rackrun.worker.loop.run import Run
from rackrun.worker.process.runtime import start

__all__ = ["elastic"]

P = ParamSpec("P")
T = TypeVar("T")


def elastic(
    *,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int = 0,
    mesh: dict[str, int] | None = None,
    snapshot_every: int | None = None,
    reduction: Literal["fast", "exact", "exact64", "none"] = "fast",
    batch: Mode = "constant",
) -> Callable[[Callable[Concatenate[Run, P], T]], Callable[P, T]]:
    """Make ``main(run, ...)`` the main function of an elastic run.

    - ``global_batch_size``: samples in one optimizer step, over all ranks. It stays fixed for the whole run when ranks
      are lost or join, unless ``batch`` says otherwise.
    - ``micro_batch_size``: samples in one forward and backward pass. It divides the global batch into its logical
      shards.
    - ``seed``: seeds the parameters (the generators are seeded before ``main``), the data order, and the random numbers
      of every step.
    - ``mesh``: axes and sizes of ``run.mesh``, at most one of them -1, such as ``{"dp": -1, "tp": 4}``. Axes named
      ``dp``, ``dp_replicate``, ``dp_shard``, ``fsdp``, ``replicate`` or ``shard`` split the data; ranks along the other
      axes share it. The default is the mesh of ``rackrun --mesh``; where both are given they must be the same.
    - ``snapshot_every``: steps between two snapshots of shards that have no live copy. The default is Young's interval,
      from the cost of a snapshot and the rate at which ranks are lost, with snapshots taking at most 1 % of the time,
      and snapshots after 1, 2, 4, 8, ... steps since a start or a recovery.
    - ``reduction``: how gradients are added over micro-batches and ranks. ``"fast"``: as floats, by DDP and FSDP2
      themselves. ``"exact"``: as 32-bit integers, so that losses and weights have the same bits on any number of
      data-parallel ranks. ``"exact64"``: as 64-bit integers, for twice the traffic, with room for any number of
      micro-batches. ``"none"``: gradients are not added; each rank trains a model of its own, as in local SGD, and the
      script averages what it wants averaged.
    - ``batch``: what happens to the global batch in a world with fewer ranks. ``"constant"``: it stays, and each rank
      computes more. ``"scale_lr"``, short for ``ScaleLR("linear")``, or a `ScaleLR`: each rank keeps its micro-batches,
      so the global batch shrinks, and the learning rates with it.

    Raises `UsageError` when the sizes do not divide, when ``batch`` is none of these, when more than one axis of
    ``mesh`` is -1, when the sizes leave an exact reduction too few bits, or when ``main`` takes no argument. Under
    ``rackrun`` the function runs on every rank and every spare; under plain ``python`` it trains in one process.
    """
    sizes, scale = BatchPlan(global_batch_size, micro_batch_size, seed), scaling(batch)
    width_of(reduction, sizes.shards)
    if mesh is not None and sum(extent == -1 for extent in mesh.values()) > 1:
        raise UsageError(f"mesh={mesh} leaves more than one axis open.", remedy="give -1 to one axis at most.")

    def decorate(main: Callable[Concatenate[Run, P], T]) -> Callable[P, T]:
        if not inspect.signature(main).parameters:
            raise UsageError(
                f"{main.__name__}() takes no argument, but an elastic main is given the run.",
                remedy="write def main(run): ...",
            )

        @functools.wraps(main)
        def started(*args: P.args, **kwargs: P.kwargs) -> T:
            runtime = start()
            return run_main(
                runtime,
                lambda carried: Run(runtime, sizes, mesh, snapshot_every, reduction, carried, scale),
                lambda run: main(run, *args, **kwargs),
            )

        return started

    return decorate
