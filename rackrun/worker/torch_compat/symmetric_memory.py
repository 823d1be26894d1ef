"""Refuses symmetric memory (torch 2.10 to 2.15), which ranks map into each other: no replaced communicator could
restore it."""

from __future__ import annotations

from typing import Any, NoReturn

from torch._C import _distributed_c10d as c10d

from rackrun.errors import UsageError

__all__ = ["install"]

_ENTRANCES = ("empty_strided_p2p", "rendezvous", "set_group_info")
"""Every use from Python passes through one of these, also from compiled code; uses from C++ need memory of the
first."""


def install() -> None:
    """Make every request for symmetric memory raise `UsageError` from now on."""
    memory = getattr(c10d, "_SymmetricMemory", None)
    for name in _ENTRANCES:
        if hasattr(memory, name):
            setattr(memory, name, staticmethod(_refuse))


def _refuse(*_args: Any, **_how: Any) -> NoReturn:
    raise UsageError(
        "symmetric memory was asked for, which maps the memory of ranks into each other: a rank that is lost would take its part away under the "
        "kernels of the others, and who takes its place would not be mapped.",
        remedy="use collectives of torch.distributed; switch off what asks for it (micro-pipelined or asynchronous tensor parallelism, "
        "torch.distributed._symmetric_memory, one-shot all-reduces of inductor).",
    )
