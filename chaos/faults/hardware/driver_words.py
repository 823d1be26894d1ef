"""What the driver of a GPU answers when the GPU is in a bad state."""

from __future__ import annotations

__all__ = ["GPU_IS_LOST", "RESET"]

GPU_IS_LOST: dict[str, int | dict[str, int]] = {"error": 15}
RESET: dict[str, int | dict[str, int]] = {"recovery_action": 1}
"""The GPU has to be reset."""
