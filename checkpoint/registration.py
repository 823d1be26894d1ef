"""Memory of the host that a GPU copies to and from at full speed: registered with its driver, where that is possible."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Protocol

import torch

__all__ = ["loaded_runtime", "register_memory", "unregister_memory"]


class _Runtime(Protocol):
    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...  # noqa: N802 - CUDA's names

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802


def register_memory(address: int, size: int, runtime: _Runtime | None = None) -> bool:
    """``size`` bytes at ``address``. False: it is not, copies are slower. The memory may be registered already, or be too much."""
    return _done((runtime or torch.cuda.cudart()).cudaHostRegister(address, size, 0))


def unregister_memory(address: int, runtime: _Runtime | None = None) -> bool:
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
        loaded_runtime().cudaGetLastError()


def loaded_runtime() -> ctypes.CDLL:
    """The library that torch has loaded: another copy would have an error of its own. OSError: there is none."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart" in line}
    if not paths:
        raise OSError("no libcudart is loaded")
    return ctypes.CDLL(min(paths))
