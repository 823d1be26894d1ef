"""A number that a device computes, on its way to the host while other work goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rackrun.worker.tensors.tensor_lists import are_plain

__all__ = ["Readback"]


class Readback:
    """Of a tensor with one element. What is enqueued after this is not waited for, nor is anything here: the host waits for the device
    once in a step, before its gate (`World.let_device_come`), and reads then."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._value: np.ndarray[Any, Any] | torch.Tensor | None = None
        if tensor is None:
            return
        tensor = tensor.detach()
        on_host, plain = tensor.device.type == "cpu", are_plain([tensor])
        if on_host:
            copy = tensor.to(torch.float64, copy=True) if plain else tensor
        elif plain:
            copy = torch.empty(tensor.shape, dtype=torch.float64, pin_memory=True)
        else:  # a DTensor, of loss_parallel
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        if not on_host:
            copy.copy_(tensor, non_blocking=True)
        # numpy reads it in a tenth of the time that torch takes, in which the device has nothing to do
        self._value = copy.numpy() if plain else copy

    def value(self) -> float:
        """To be asked when the device has come past the making of this. 0 where there was no tensor."""
        return 0.0 if self._value is None else float(self._value.item())
