"""A number that a device computes, on its way to the host while other work goes on."""

from __future__ import annotations

import torch

__all__ = ["Readback"]


class Readback:
    """Of a tensor with one element. What is enqueued after this is not waited for, nor is anything here: the host waits for the device
    once in a step, before its gate (`World.let_device_come`), and reads then."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._copy: torch.Tensor | None = None
        if tensor is not None:
            tensor = tensor.detach()
            on_host = tensor.device.type == "cpu"
            self._copy = tensor if on_host else torch.empty_like(tensor, device="cpu", pin_memory=True)
            if not on_host:
                self._copy.copy_(tensor, non_blocking=True)

    def value(self) -> float:
        """To be asked when the device has come past the making of this. 0 where there was no tensor."""
        return 0.0 if self._copy is None else float(self._copy.item())
