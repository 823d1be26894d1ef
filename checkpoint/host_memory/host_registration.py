"""Register host memory with the GPU's driver, so that copies run at full speed."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from rackrun.checkpoint.host_memory.loaded_libraries import loaded_library

__all__ = ["CudaRuntime", "register_memory", "unregister_memory"]


class CudaRuntime(Protocol):
    """The calls of CUDA's runtime that are used here. Each returns an error code, or 0."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...  # noqa: N802 - CUDA's names

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802


def register_memory(address: int, size: int, runtime: CudaRuntime | None = None) -> bool:
    """Register ``size`` bytes at ``address``. Return False when they are not registered; copies are slower then.

    Memory may be refused because it is registered already, or is too large.
    """
    return _done((runtime or torch.cuda.cudart()).cudaHostRegister(address, size, 0))


def unregister_memory(address: int, runtime: CudaRuntime | None = None) -> bool:
    """Undo `register_memory` with the CUDA driver, before the memory is freed. Return whether that succeeded.
    ``runtime``: the CUDA runtime library; None: the one that is loaded."""
    return _done((runtime or torch.cuda.cudart()).cudaHostUnregister(address))


def _done(code: object) -> bool:
    """Whether the code is 0. If not, the runtime's stored error is cleared: the next kernel launch would raise it."""
    if int(code) == 0:  # type: ignore[call-overload]
        return True
    _forget_error()
    return False


def _forget_error() -> None:
    with contextlib.suppress(OSError, AttributeError):
        if (library := loaded_library("libcudart")) is not None:
            library.cudaGetLastError()
