"""torch.distributed's registry of groups, torch 2.10 to 2.13: an elastic default group, and a promoted spare's new place."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["adopt_default_group", "install", "missing", "promote_groups"]

_elastic = False


def missing() -> list[str]:
    needed = ("_world", "_get_default_group")
    return [f"distributed_c10d.{name} is gone" for name in needed if not hasattr(c10d, name)]


def install() -> None:
    """A script may still call init_process_group and destroy_process_group: both find the elastic group in place."""
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not _elastic:
            init(*args, **kwargs)

    def destroy_process_group(group: Any = None) -> None:
        if not _elastic:
            destroy(group)

    for module in (dist, c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*barrier\\(\\): using the device under current context.*")


def adopt_default_group() -> None:
    """From now on the default group is ours, and stays."""
    global _elastic  # noqa: PLW0603 - so is torch's
    _elastic = True


def promote_groups(moved: Sequence[tuple[Any, Sequence[int]]]) -> None:
    """Tell torch's registry which global ranks each group now has."""
    for group, ranks in moved:
        c10d._world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
