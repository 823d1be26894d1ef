"""Adapts torch.distributed's registry of groups (torch 2.10 to 2.15).

It installs an elastic default group, changes ranks for a promoted spare, and clears the registry for a new start in the
same process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "adopt_default_group",
    "forget_groups",
    "install",
    "leave_coalescing",
    "missing",
    "promote_groups",
    "register_backend",
]

_elastic = False
_destroy: Callable[[], None] = dist.destroy_process_group
"""torch's own function."""
_asked_for: list[dist.ProcessGroup] = []
"""Groups that the default group has made and that torch before 2.13 has not asked the backend for yet."""


def missing() -> list[str]:
    """Return what this torch lacks, as messages."""
    needed = ("_world", "_get_default_group", "destroy_process_group", "batch_isend_irecv", "_check_p2p_op_list")
    return [f"distributed_c10d.{name} is gone" for name in needed if not hasattr(c10d, name)]


def install() -> None:
    """Patch functions that a script may call: init_process_group and destroy_process_group leave the elastic group in
    place."""
    init, destroy = dist.init_process_group, dist.destroy_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not _elastic:
            init(*args, **kwargs)

    def destroy_process_group(group: Any = None) -> None:
        if not _elastic:
            destroy(group)

    one_by_one = dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
        """Issue a batch as one. torch does so for groups of its own class only; one by one, two ranks of NCCL that both
        send first would wait for each other."""
        group: Any = (p2p_op_list[0].group if p2p_op_list else None) or (
            c10d._get_default_group() if _elastic else None
        )
        if not p2p_op_list or not hasattr(group, "batches") or not group.batches(p2p_op_list[0].tensor.device):
            return one_by_one(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        return [group.batch([_as_operation(one) for one in p2p_op_list])]

    for module in (dist, c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
        module.batch_isend_irecv = batch_isend_irecv  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*barrier\\(\\): using the device under current context.*")


def leave_coalescing() -> None:
    """Close torch's coalescing manager if a unit was left inside of it. Otherwise later collectives would only be
    recorded."""
    c10d._world.pg_coalesce_state.clear()


def _as_operation(one: dist.P2POp) -> tuple[str, torch.Tensor, int, int]:
    return "send" if one.op is dist.isend else "recv", one.tensor, one.group_peer, one.tag


def register_backend(name: str, create_default: Callable[[], dist.ProcessGroup]) -> None:
    """Register the backend. ``create_default`` makes the default group, which makes all others; torch before 2.13 does
    not call it for that, so it is patched."""

    def create(options: Any, backend_options: object) -> dist.ProcessGroup:
        del backend_options
        return _asked_for.pop() if options.global_ranks_in_group else create_default()

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    if "new_group" not in c10d._new_group_with_tag.__code__.co_names:
        _ask_default_group()


def _ask_default_group() -> None:
    make: Callable[..., Any] = c10d._new_process_group_helper

    def asked(size: int, rank: int | None, ranks: list[int], backend: Any, store: Any, name: str, **more: Any) -> Any:
        if ranks and _elastic:
            default: Any = c10d._get_default_group()
            group = default.new_group(ranks, group_name=name, group_desc=more.get("group_desc"))
            if group is not None:
                _asked_for.append(group)
        return make(size, rank, ranks, backend, store, name, **more)

    c10d._new_process_group_helper = asked  # type: ignore[assignment]


def adopt_default_group() -> None:
    """Keep the current default group: from now on it is the elastic one."""
    global _elastic  # noqa: PLW0603 - so is torch's
    _elastic = True


def forget_groups() -> None:
    """Empty torch's registries, so that another default group can be made. Names are counted from 0 again, as in a new
    process."""
    global _elastic  # noqa: PLW0603 - so is torch's
    _elastic = False
    _destroy()
    _asked_for.clear()


def promote_groups(moved: Sequence[tuple[Any, Sequence[int]]]) -> None:
    """Set the global ranks of each group in torch's registry."""
    for group, ranks in moved:
        c10d._world.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
