"""Prepare a thread to use a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from rackrun.checkpoint.host_memory.loaded_libraries import loaded_library

__all__ = ["use_device"]

_OF_THIS_THREAD = 1
"""cudaStreamCaptureModeThreadLocal: only this thread's own captures restrict what it may call.

By default, querying an event while any other thread captures a graph ends that capture with an error.
"""


def use_device(device: torch.device) -> None:
    """Select ``device`` in this thread. Call it first in each thread that may use the device.

    Without it CUDA would make a context on the first GPU, which belongs to another rank. It also keeps this thread's
    calls from spoiling a CUDA graph that another thread captures. No effect for a device that is not CUDA.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    mode = ctypes.c_int(_OF_THIS_THREAD)
    with contextlib.suppress(OSError, AttributeError):
        if (runtime := loaded_library("libcudart")) is not None:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
