"""Checkpoints in memory and on disk: `CheckpointManager` for training scripts, and the parts that the runtime uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rackrun.checkpoint.manager.manager import CheckpointManager, MemoryTier, RestoreReport, SaveHandle

__all__ = ["CheckpointManager", "MemoryTier", "RestoreReport", "SaveHandle"]

if not TYPE_CHECKING:  # for a type checker there is no other name than those above

    def __getattr__(name: str) -> object:
        # torch is imported when the manager is first used: agents and rackctl read arenas and manifests without torch
        if name in __all__:
            from rackrun.checkpoint.manager import manager

            return getattr(manager, name)
        raise AttributeError(f"module 'rackrun.checkpoint' has no attribute {name!r}")
