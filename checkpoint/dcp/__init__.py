"""``torch.distributed.checkpoint`` on durable checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rackrun.checkpoint.dcp.dcp_storage import RackrunStorageReader, RackrunStorageWriter

__all__ = ["RackrunStorageReader", "RackrunStorageWriter"]

if not TYPE_CHECKING:  # for a type checker there is no other name than those above

    def __getattr__(name: str) -> object:
        # torch is imported when these are first used: agents and rackctl read the written checkpoints without torch
        if name in __all__:
            from rackrun.checkpoint.dcp import dcp_storage

            return getattr(dcp_storage, name)
        raise AttributeError(f"module 'rackrun.checkpoint.dcp' has no attribute {name!r}")
