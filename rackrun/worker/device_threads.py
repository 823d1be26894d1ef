"""A thread that may call CUDA says which device is its own: without that it makes a context on the first one, which is another rank's."""

from __future__ import annotations

import torch

__all__ = ["use_device"]


def use_device(device: torch.device) -> None:
    """First thing in such a thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
