"""Threads that touch a device."""

from __future__ import annotations

import contextlib
import ctypes

import torch

from rackrun.checkpoint.host_memory.loaded_libraries import loaded_library

__all__ = ["use_device"]

_OF_THIS_THREAD = 1
"""cudaStreamCaptureModeThreadLocal: of captures, only this thread's own forbid it anything. By default an event that is asked for, beside a
capture of any other thread, ends that capture with an error."""


def use_device(device: torch.device) -> None:
    """First in each thread that may touch ``device``: else CUDA would make a context on the first GPU, which is another rank's. And what this
    thread asks for does not spoil a CUDA graph that another one captures."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    mode = ctypes.c_int(_OF_THIS_THREAD)
    with contextlib.suppress(OSError, AttributeError):
        if (runtime := loaded_library("libcudart")) is not None:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
