"""Memory of the host that a GPU copies to and from at full speed: registered with its driver, where that is possible."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch

from rackrun.checkpoint.host_memory.loaded_libraries import loaded_library

__all__ = ["Runtime", "register_memory", "unregister_memory"]


class Runtime(Protocol):
    """CUDA's, as far as it is asked. What it returns is an error's code, or 0."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...  # noqa: N802 - CUDA's names

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802


def register_memory(address: int, size: int, runtime: Runtime | None = None) -> bool:
    """``size`` bytes at ``address``. False: it is not, copies are slower. The memory may be registered already, or be too much."""
    return _done((runtime or torch.cuda.cudart()).cudaHostRegister(address, size, 0))


def unregister_memory(address: int, runtime: Runtime | None = None) -> bool:
    """Before the memory goes."""
    return _done((runtime or torch.cuda.cudart()).cudaHostUnregister(address))


def _done(code: object) -> bool:
    """The runtime also remembers what has failed, and the next kernel that anybody launches would raise it."""
    if int(code) == 0:  # type: ignore[call-overload]
        return True
    _forget_error()
    return False


def _forget_error() -> None:
    with contextlib.suppress(OSError, AttributeError):
        if (library := loaded_library("libcudart")) is not None:
            library.cudaGetLastError()
