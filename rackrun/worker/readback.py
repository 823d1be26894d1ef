"""A number that a device computes, on its way to the host while other work goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["Readback"]


class Readback:
    """Of a tensor with one element. What is enqueued after this is not waited for, nor is anything here: the host waits for the device
    once in a step, before its gate (`World.let_device_come`), and reads then."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._value: np.ndarray[Any, Any] | None = None
        if tensor is not None:
            tensor = tensor.detach()
            if tensor.device.type == "cpu":
                copy = tensor.to(torch.float64, copy=True)
            else:
                copy = torch.empty(tensor.shape, dtype=torch.float64, pin_memory=True)
                copy.copy_(tensor, non_blocking=True)
            self._value = (
                copy.numpy()
            )  # read in a tenth of the time that torch takes, while the device has nothing to do

    def value(self) -> float:
        """To be asked when the device has come past the making of this. 0 where there was no tensor."""
        return 0.0 if self._value is None else float(self._value.item())
