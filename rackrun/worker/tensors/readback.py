"""Copies a number, or a few flags, that a device computes to the host while other work goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rackrun.worker.tensors.tensor_lists import are_plain

__all__ = ["Readback", "flags_to_host"]


class Readback:
    """A copy of a tensor with one element, on its way to the host as a float64.

    Nothing here waits. The host waits for the device once in a step, before its gate
    (`WorkerMembership.synchronise_device`), and reads the value then; work enqueued after this object was made is not
    waited for."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._value: float | np.ndarray[Any, Any] | torch.Tensor = 0.0
        if tensor is None:
            return
        on_host, plain = tensor.device.type == "cpu", are_plain([tensor])
        if on_host and plain:
            self._value = float(tensor.item())  # a fifth of the time of a copy that is read later
            return
        tensor = tensor.detach()
        if on_host:
            copy = tensor
        elif plain:
            copy = torch.empty(tensor.shape, dtype=torch.float64, pin_memory=True)
        else:  # a DTensor, from loss_parallel
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        if not on_host:
            copy.copy_(tensor, non_blocking=True)
        # NumPy reads it in a tenth of torch's time, and the device is idle meanwhile.
        self._value = copy.numpy() if plain else copy

    def value(self) -> float:
        """Return the number; 0 where there was no tensor. To be called when the device has passed the creation of this
        object."""
        return self._value if isinstance(self._value, float) else float(self._value.item())


def flags_to_host(flags: torch.Tensor) -> torch.Tensor:
    """Return ``flags``, bool, on the host. Nothing here waits: to be read when the device has passed this call."""
    if flags.device.type == "cpu":
        return flags
    copy = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    return copy.copy_(flags, non_blocking=True)
